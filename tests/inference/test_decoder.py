"""`PipelineDecoder` and `spd-infer` on folders as users have them, and the mistakes that users make."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd_lightning.inference.cli import main
from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.sampling import SamplingParams
from tests.inference.folders import save_folders

MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny Qwen3.5 target and a drafter for it."""
    return save_folders(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def decoder(folders: tuple[str, str]) -> PipelineDecoder:
    return PipelineDecoder.from_pretrained(folders[0], max_length=128)


@pytest.mark.parametrize(
    "params", [SamplingParams(24), SamplingParams(24, 0.9, 30, seed=4, verify="coupled")], ids=["greedy", "coupled"]
)
def test_the_answer_is_that_of_plain_decoding(decoder: PipelineDecoder, params: SamplingParams) -> None:
    result = decoder.generate(MESSAGES, params)
    baseline = decoder.start_autoregressive(MESSAGES, params).result()
    assert result.token_ids == baseline.token_ids and result.text == baseline.text
    assert result.stats is not None and baseline.stats is None
    assert "".join(decoder.stream(MESSAGES, params)) == result.text


def test_the_same_seed_gives_the_same_text_and_no_seed_another(decoder: PipelineDecoder) -> None:
    sampled = SamplingParams(32, 1.0, seed=1)
    assert decoder.generate(MESSAGES, sampled).token_ids == decoder.generate(MESSAGES, sampled).token_ids
    unseeded = SamplingParams(32, 1.0)
    assert decoder.generate(MESSAGES, unseeded).token_ids != decoder.generate(MESSAGES, unseeded).token_ids


def test_an_answer_that_is_left_is_cancelled_and_one_that_is_gone_on_with_has_its_time(decoder) -> None:
    endless = SamplingParams(24, ignore_eos=True)
    for _ in decoder.stream(MESSAGES, endless):
        break
    assert decoder._current._committed.gi_frame is None
    run = decoder.start(MESSAGES, endless)
    for _ in run.tokens():
        if len(run.token_ids) == 5:
            break
    began = time.perf_counter()
    result = run.result()
    assert len(result.token_ids) == 24 and 0 < result.seconds < time.perf_counter() - began + 60
    cancelled = decoder.start(MESSAGES, endless)
    next(cancelled.tokens())
    assert decoder.generate(MESSAGES, endless).token_ids == result.token_ids
    with pytest.raises(ValueError, match="cancelled"):
        cancelled.result()


def test_the_limit_of_length_is_exact(decoder: PipelineDecoder) -> None:
    prompt = [65] * 100
    result = decoder.generate(prompt, SamplingParams(28, ignore_eos=True))
    assert len(result.token_ids) == 28 and result.finish_reason == "length"
    with pytest.raises(ValueError, match=r"prompt of 100 tokens and max_new_tokens=29 do not fit into max_length=128"):
        decoder.generate(prompt, SamplingParams(29))
    with pytest.raises(ValueError, match="prompt is empty"):
        decoder.generate([])


def test_the_command_prints_one_json_object(folders: tuple[str, str], capsys) -> None:
    main(
        ["generate", "--drafter", folders[0], "--prompt", "Hello", "--max_new_tokens", "12", "--max_length", "64"]
        + ["--compare_ar", "true", "--json", "true"]
    )
    report = json.loads(capsys.readouterr().out)
    assert report["identical_to_ar"] is True and len(report["token_ids"]) <= 12
    counts = (
        "num_committed",
        "num_cycles",
        "num_judged",
        "num_accepted",
        "alpha",
        "p",
        "s0",
        "seconds",
        "finish_reason",
    )
    assert set(counts) <= report.keys()


def test_the_command_streams_text_and_sums_up(folders: tuple[str, str], capsys, tmp_path: Path) -> None:
    messages = tmp_path / "chat.json"
    messages.write_text(json.dumps(MESSAGES))
    main(
        ["generate", "--drafter", folders[0], "--messages", str(messages), "--max_new_tokens", "12"]
        + ["--max_length", "64", "--temperature", "1", "--compare_ar", "true", "--verify", "coupled"]
    )
    printed = capsys.readouterr()
    assert (
        printed.out and "tokens per cycle" in printed.err and "seed " in printed.err and "identical to" in printed.err
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--drafter", "/no/such/drafter"], "no drafter here"),
        (["--target", "/no/such/target"], "cannot load the configuration of '/no/such/target'"),
        (["--target", "tiny-random-llama"], "is not the one that the drafter was trained for"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--max_new_tokens", "0"], "max_new_tokens=0"),
        (["--top_p", "0"], "top_p=0.0"),
        (["--max_length", "8"], "do not fit into max_length=8"),
        (["--prompt_file", "/no/such/file"], "give one of --prompt, --prompt_file and --messages"),
    ],
)
def test_mistakes_give_one_line_and_exit_2(
    args: list[str], message: str, folders, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("SPD_CACHE", str(tmp_path))
    given = [
        "generate",
        "--drafter",
        folders[0],
        "--prompt",
        "Hello",
        "--max_new_tokens",
        "12",
        "--max_length",
        "64",
        *args,
    ]
    with pytest.raises(SystemExit) as raised:
        main(given)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_target_with_another_tokenizer_is_refused(folders: tuple[str, str], tmp_path: Path) -> None:
    record = json.loads((Path(folders[0]) / "config.json").read_text())
    record["tokenizer"]["hash"] = "other"
    copy = tmp_path / "drafter"
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(record))
    (copy / "drafter.safetensors").write_bytes((Path(folders[0]) / "drafter.safetensors").read_bytes())
    with pytest.raises(ValueError, match="another tokenizer"):
        PipelineDecoder.from_pretrained(str(copy))


def test_weights_in_double_precision_are_not_rounded_on_the_way(folders: tuple[str, str], tmp_path: Path) -> None:
    wide = Path(shutil.copytree(folders[0], tmp_path / "drafter"))
    weights = load_file(wide / "drafter.safetensors")
    weights["norm.weight"] = weights["norm.weight"].double() + 1e-12
    save_file(weights, wide / "drafter.safetensors")
    decoder = PipelineDecoder.from_pretrained(str(wide), dtype="float64", max_length=32)
    assert torch.equal(decoder.drafter.module.norm.weight, weights["norm.weight"])


def test_importing_the_decoder_imports_neither_lightning_nor_datasets() -> None:
    code = (
        "import sys, spd_lightning.inference.decoder, spd_lightning.inference.cli; "
        "sys.exit(', '.join(m for m in ('lightning', 'datasets', 'wandb', 'torchmetrics') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
