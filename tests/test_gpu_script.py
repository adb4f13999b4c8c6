"""`benchmarks/gpu_decode.py`, which is meant for a GPU, runs on the CPU from beginning to end, and fails when it must."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from spd_lightning.inference.sampling import SamplingParams

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu_decode.py"
BIG = "qwen3_5_4b_toy_width"
RUNS = {"greedy", "greedy_half_rejected", "coupled", "coupled_half_rejected"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_decode", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_decode"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_the_smoke_run_checks_and_clocks_everything(tmp_path: Path) -> None:
    out = tmp_path / "smoke.json"
    command = [sys.executable, str(SCRIPT), "--smoke", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens identical, logits identical") == 16

    content = json.loads(out.read_text())
    assert content["smoke"] is True and content["dtype"] == "bfloat16"
    assert content["machine"]["versions"]["torch"] == torch.__version__
    assert set(content["targets"]) == {"tiny_qwen3_5", "tiny_qwen3", "tiny_llama", BIG}
    for name, runs in content["targets"].items():
        assert set(runs) == RUNS
        num_stages, num_tokens = (8, 6) if name == BIG else (4, 10)
        for run, result in runs.items():
            assert result["identical_tokens"] and result["identical_logits"]
            assert result["num_tokens"] == num_tokens == result["num_judged"] + 1 and result["num_distinct_tokens"] > 1
            assert result["num_cycles"] > num_stages
            if run.endswith("half_rejected"):
                assert 0 < result["num_rejected"] < result["num_judged"]
    times = content["times"][BIG]
    assert len(times["stages_ms"]) == 8
    assert min(*times["stages_ms"], times["drafter_ms"], times["norm_and_head_ms"]) > 0


def test_other_tokens_are_seen_and_make_the_script_fail(script: ModuleType, tmp_path: Path, monkeypatch) -> None:
    bench = script.tiny_bench(tmp_path, "llama", torch.device("cpu"), smoke=True)
    params = SamplingParams(6)
    assert script.compare(bench, params)["identical_tokens"]
    decode = script.decode

    def decode_wrongly(*given):
        *tokens, last = decode(*given)
        yield from (*tokens, last + 1)

    monkeypatch.setattr(script, "decode", decode_wrongly)
    wrong = script.compare(bench, params)
    assert not wrong["identical_tokens"] and wrong["identical_logits"]

    monkeypatch.setattr(script, "check", lambda name, bench: {"greedy": wrong})
    monkeypatch.setattr(script, "tiny_bench", lambda *_: bench)
    monkeypatch.setattr(script, "big_bench", lambda *_: bench)
    monkeypatch.setattr(sys, "argv", ["gpu_decode.py", "--smoke", "--out", str(tmp_path / "wrong.json")])
    with pytest.raises(SystemExit, match="other tokens than plain decoding: tiny_qwen3_5 greedy, tiny_qwen3 greedy, "):
        script.main()
    assert not json.loads((tmp_path / "wrong.json").read_text())["targets"][BIG]["greedy"]["identical_tokens"]


def test_other_logits_are_reported_with_the_margin(script: ModuleType) -> None:
    rows = {position: torch.tensor([0.5, 3.0, 1.0]) for position in (4, 5, 6)}
    assert script.logit_differences(rows, dict(rows)) == {"identical_logits": True}
    found = rows | {5: torch.tensor([0.5, 3.0, 1.25])}
    difference = {"position": 5, "largest": 0.25, "top2_margin": 2.0}
    assert script.logit_differences(rows, found) == {"identical_logits": False, "first_difference": difference}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_way_out_is_named(script: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_decode.py", "--out", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit):
        script.main()
    assert "--smoke runs on the CPU" in capsys.readouterr().err


def test_the_smoke_run_of_training_clocks_every_case(tmp_path: Path) -> None:
    """`benchmarks/gpu_train.py`: chunks and their dense twin see the same losses, compiled or not."""
    out = tmp_path / "smoke.json"
    command = [sys.executable, str(SCRIPT.with_name("gpu_train.py")), "--smoke", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    assert content["left_out"] == [] and content["seq"] == 96
    cases = content["cases"]
    assert [(case["rows"], case["attention"], case["compile_target"]) for case in cases] == [
        ("exact", "chunked", False), ("exact", "dense", False), ("shared", "chunked", False), ("shared", "dense", False),
        ("shared", "chunked", True),
    ]  # fmt: skip
    for case in cases:
        assert case["tokens_per_second"] == pytest.approx(content["batch"] * content["seq"] / case["step_seconds"])
        assert 0 < case["target_seconds"] < case["step_seconds"]
    losses = {rows: [case["first_loss"] for case in cases if case["rows"] == rows] for rows in ("exact", "shared")}
    for of_one_layout in losses.values():
        assert max(of_one_layout) - min(of_one_layout) < 0.01 * max(of_one_layout)  # bfloat16
