"""The compiled baseline against the target itself, and as a method of `spd-infer eval`."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from spd_lightning.inference.cli import main
from spd_lightning.inference.evaluation.compiled import CompiledTarget
from spd_lightning.modules.target import FrozenTarget
from spd_lightning.modules.tiny_target import save_tiny_target
from tests.inference.folders import save_folders

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")


@needs_compiler
def test_compiled_logits_are_the_targets(tmp_path: Path) -> None:
    """Of every token of two sequences: the second begins with an empty cache."""
    model = FrozenTarget.from_pretrained(str(save_tiny_target(tmp_path / "target", "qwen3_5", 4)), "float64")
    compiled = CompiledTarget(model, max_length=24)
    generator = torch.Generator().manual_seed(0)
    for prompt, count in ((5, 12), (9, 15)):
        ids = torch.randint(0, 250, (1, count), generator=generator)
        with torch.no_grad():
            expected = model.model(ids).logits[0, prompt - 1 :]
        found = [compiled.logits(ids[0, :prompt].tolist(), 0).clone()]
        found += [compiled.logits([int(ids[0, position])], position).clone() for position in range(prompt, count)]
        torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-4)  # delta rule in float32


@needs_compiler
def test_the_compiled_baseline_is_a_method_of_its_own(tmp_path: Path) -> None:
    drafter, _ = save_folders(tmp_path, "llama", num_stages=2)
    (tmp_path / "own.jsonl").write_text(json.dumps({"question_id": 1, "category": "x", "turns": ["Count."]}) + "\n")
    main(
        [
            *("eval", "--drafter", drafter, "--questions", str(tmp_path / "own.jsonl"), "--out", str(tmp_path / "out")),
            *("--methods", "ar", "compiled", "spd", "--temperature", "0", "1", "--seed", "5", "--max_new_tokens", "12"),
            *("--max_length", "64", "--dtype", "float32"),
        ]
    )
    samples = [json.loads(line) for line in (tmp_path / "out" / "per_sample.jsonl").read_text().splitlines()]
    by_key = {(sample["method"], sample["temperature"]): sample for sample in samples}
    for temperature in (0.0, 1.0):  # the same law, drawn from with the same seed
        assert by_key["compiled", temperature]["token_ids"] == by_key["ar", temperature]["token_ids"]
    assert by_key["compiled", 0.0]["identical_to_ar"] is True
    assert "compiled" in (tmp_path / "out" / "summary.md").read_text()


def test_without_a_compiler_the_baseline_says_what_it_lacks(tmp_path: Path, monkeypatch) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def failing(*_args, **_kwargs):
        raise BackendCompilerFailed(lambda: None, RuntimeError("no compiler here"), None)

    monkeypatch.setattr(torch, "compile", lambda *_args, **_kwargs: failing)
    model = FrozenTarget.from_pretrained(str(save_tiny_target(tmp_path / "target", "llama", 2)))
    with pytest.raises(ValueError, match=r"needs a compiler for cpu .* leave `compiled` out of --methods"):
        CompiledTarget(model, max_length=8)
