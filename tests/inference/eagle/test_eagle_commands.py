"""`spd-infer` with an EAGLE-3 drafter: answers, evaluations beside the others, the published format, and mistakes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd_lightning.inference.cli import main
from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.eagle.runtime import EagleRuntime
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.modules.checkpoint import load_drafter
from tests.inference.eagle.setting import save_eagle_folders
from tests.inference.folders import save_folders

MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
QUESTIONS = [
    {"question_id": "one", "category": "short", "turns": ["What is 2 + 2?"]},
    {"question_id": "two", "category": "short", "turns": ["Name a colour."]},
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama target with an EAGLE-3 drafter and a PDM, and a file of questions."""
    root = tmp_path_factory.mktemp("eagle")
    save_folders(root, "llama", num_stages=4, name="pdm")
    save_eagle_folders(root, "llama")
    (root / "own.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return root


def evaluation(root: Path, out: Path, *more: str) -> list[str]:
    return [
        *("eval", "--drafter", str(root / "eagle"), str(root / "pdm"), "--questions", str(root / "own.jsonl")),
        *("--out", str(out), "--max_new_tokens", "10", "--max_length", "200", *more),
    ]


@pytest.mark.parametrize(
    "params",
    [SamplingParams(24), SamplingParams(24, 0.9, 30, seed=4, verify="coupled"), SamplingParams(24, stop=("e",))],
    ids=["greedy", "coupled", "stop"],
)
def test_the_answer_is_that_of_plain_decoding(root: Path, params: SamplingParams) -> None:
    decoder = PipelineDecoder.from_pretrained(str(root / "eagle"), max_length=128, draft_length=3)
    assert isinstance(decoder.runtime, EagleRuntime) and decoder.runtime.draft_length == 3
    result = decoder.generate(MESSAGES, params)
    baseline = decoder.start_autoregressive(MESSAGES, params).result()
    assert (result.token_ids, result.text) == (baseline.token_ids, baseline.text)
    assert "".join(decoder.stream(MESSAGES, params)) == result.text
    assert result.stats is not None and result.stats.num_cycles > 0
    sampled = SamplingParams(24, 1.0, seed=1)
    assert decoder.generate(MESSAGES, sampled).token_ids == decoder.generate(MESSAGES, sampled).token_ids


def test_an_answer_may_fill_the_caches_to_the_last_position(root: Path) -> None:
    decoder = PipelineDecoder.from_pretrained(str(root / "eagle"), max_length=40, draft_length=7)
    prompt = list(range(100, 110))
    params = SamplingParams(30, ignore_eos=True)
    assert len(decoder.generate(prompt, params).token_ids) == 30


def test_generate_says_what_a_round_committed(root: Path, capsys) -> None:
    common = ["generate", "--drafter", str(root / "eagle"), "--prompt", "Hello", "--max_new_tokens", "12"]
    main([*common, "--compare_ar", "true", "--draft_length", "3"])
    shown = capsys.readouterr().err
    assert "tokens per round" in shown and "target and drafter on one device" in shown
    assert "identical to plain decoding" in shown
    main([*common, "--json", "true"])
    report = json.loads(capsys.readouterr().out)
    assert report["s0"] == report["alpha"] == report["num_committed"] / report["num_cycles"]


def test_an_evaluation_has_both_methods_in_one_table(root: Path, tmp_path: Path, capsys) -> None:
    main(evaluation(root, tmp_path, "--draft_length", "3", "--check_lossless", "true", "--temperature", "0", "1"))
    printed = capsys.readouterr().out
    assert "eagle3: 2 of 2 greedy answers" in printed and "lossless: 2 of 2 greedy answers" in printed
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["settings"]["draft_length"] == 3
    groups = {(g["method"], g["temperature"]): g for g in summary["groups"] if g["task"] == "overall"}
    assert groups.keys() == {(method, t) for method in ("ar", "spd", "eagle3") for t in (0.0, 1.0)}
    for temperature in (0.0, 1.0):
        eagle = groups["eagle3", temperature]
        assert (eagle["num_stages"], eagle["schedule"], eagle["draft_length"]) == (None, None, 3)
        assert (eagle["num_layers"], eagle["num_spec_layers"]) == (8, 1)
        assert eagle["s0"] == eagle["num_committed"] / eagle["num_cycles"]
        assert eagle["adjusted_s"] == pytest.approx(eagle["s0"] * 8 / (3 + 8))
        assert [speedup["baseline"] for speedup in eagle["speedups"]] == ["ar"] and eagle["tokens_per_second"] > 0
        assert groups["spd", temperature]["num_stages"] == 4 and groups["spd", temperature]["draft_length"] is None
    samples = [json.loads(line) for line in (tmp_path / "per_sample.jsonl").read_text().splitlines()]
    for sample in samples:
        if sample["method"] == "eagle3":
            bonus = sample["num_committed"] - len(sample["judgements"])
            assert 0 <= bonus <= sample["num_cycles"]
            assert {fill for _, fill, _ in sample["judgements"]} <= {1, 2, 3}
    with pytest.raises(SystemExit):  # answers with other chains are not mixed in
        main(evaluation(root, tmp_path, "--draft_length", "5", "--temperature", "0", "1"))
    assert "draft_length" in capsys.readouterr().err


def test_a_drafter_goes_to_the_published_format_and_back(root: Path, tmp_path: Path, capsys) -> None:
    published, again = tmp_path / "published", tmp_path / "again"
    main(["export_eagle3", "--drafter", str(root / "eagle"), "--out", str(published), "--dtype", "float32"])
    main(["import_eagle3", str(published), "--target", str(root / "target"), "--out", str(again)])
    assert "40 draft tokens" in capsys.readouterr().out
    before, after = load_drafter(root / "eagle"), load_drafter(again)
    assert after.module.config == before.module.config
    for name, value in before.module.state_dict().items():
        assert torch.equal(after.module.state_dict()[name], value), name
    keys = ("drafter", "method", "target", "tokenizer", "rotary")
    assert {key: after.record[key] for key in keys} == {key: before.record[key] for key in keys}
    answers = [
        PipelineDecoder.from_pretrained(str(folder), max_length=128).generate(MESSAGES, SamplingParams(16))
        for folder in (root / "eagle", again)
    ]
    assert answers[0].stats == answers[1].stats and answers[0].token_ids == answers[1].token_ids


def test_an_embedding_of_its_own_must_be_the_targets(root: Path, tmp_path: Path, capsys) -> None:
    main(["export_eagle3", "--drafter", str(root / "eagle"), "--out", str(tmp_path / "own")])
    file = tmp_path / "own" / "model.safetensors"
    tensors = load_file(file)
    embedding = load_file(root / "target" / "model.safetensors")["model.embed_tokens.weight"]
    command = ["import_eagle3", str(tmp_path / "own"), "--target", str(root / "target"), "--out", str(tmp_path / "out")]
    save_file(tensors | {"embed_tokens.weight": embedding.clone()}, file)
    main(command)
    save_file(tensors | {"embed_tokens.weight": embedding + 1}, file)
    with pytest.raises(SystemExit):
        main(command)
    assert "embed_tokens.weight is not the embedding" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "--prompt", "x", "--drafter", "eagle", "--runtime", "virtual"], "decodes on one device"),
        (["generate", "--prompt", "x", "--drafter", "eagle", "--runtime", "distributed"], "decodes on one device"),
        (["generate", "--prompt", "x", "--drafter", "eagle", "--schedule", "pre_step"], "which has none"),
        (["generate", "--prompt", "x", "--drafter", "eagle", "--draft_length", "0"], "at least one draft"),
        (["generate", "--prompt", "x", "--drafter", "pdm", "--draft_length", "3"], "is for EAGLE-3 drafters"),
        (["profile", "--prompt", "x", "--drafter", "eagle"], "no pipeline"),
        (["plan", "--drafter", "eagle"], "no split to plan"),
        (["export_eagle3", "--drafter", "pdm", "--out", "out"], "only eagle3 has this format"),
        (["export_eagle3", "--drafter", "eagle", "--out", "eagle"], "the drafter's own folder"),
        (["eval", "--drafter", "eagle", "--out", "out", "--runtime", "virtual"], "eagle3 decodes on one device"),
        (["eval", "--drafter", "pdm", "--out", "out", "--draft_length", "3"], "none is given"),
    ],
)
def test_mistakes_are_one_line(root: Path, command: list[str], message: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code not in (0, None)
    errors = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in errors if "error" in line]) == 1 and message in errors[-1]
