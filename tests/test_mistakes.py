"""Malformed inputs through the commands: files, rows, options, configurations, draft vocabularies, targets.

Each ends with one line on stderr that names the fault, and with exit code 2; nothing prints a traceback.
"""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from lightning import LightningModule, Trainer

from spd_lightning.callbacks import DrafterCheckpoint
from spd_lightning.cli import main as spd_train
from spd_lightning.data.cli import main as spd_data
from spd_lightning.modules.checkpoint import FORMAT
from spd_lightning.modules.tiny_target import save_tiny_target

NUM_TOKENS = 259
GOOD_ROW = {"prompt": "one and one?", "response": "two"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("mistakes") / "target", "llama", 4)


@pytest.fixture
def config(target: Path, tmp_path: Path) -> dict:
    (tmp_path / "rows.jsonl").write_text("".join(row(GOOD_ROW | {"prompt": f"{n}?"}) for n in range(20)))
    return {
        "trainer": {
            "accelerator": "cpu", "devices": 1, "precision": "32-true", "max_steps": 1, "logger": False,
            "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": str(tmp_path / "run"),
        },
        "model": {"target": str(target), "num_stages": 2, "num_spec_layers": 1},
        "data": {
            "sources": [{"path": str(tmp_path / "rows.jsonl")}], "val_rows": 4, "batch_size": 4, "num_proc": 1,
            "draft_vocab_size": 32, "cache_dir": str(tmp_path / "cache"),
        },
    }  # fmt: skip


def row(content: object) -> str:
    return json.dumps(content) + "\n"


def the_one_line(command: Callable[[list[str]], None], args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says of a mistake."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command(args)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "usage:" not in err
    program = "spd-train" if command is spd_train else "spd-data"
    [line] = [line for line in err.splitlines() if line.startswith(f"{program}: error: ")]
    return line


def saved(config: dict, tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def tokens(ids: list, mask: list) -> str:
    return row({"input_ids": ids, "loss_mask": mask}) * 20


FILES: dict[str, tuple[str, str | bytes, str]] = {
    "nothing in it": ("x.jsonl", "", "x.jsonl: no rows at all"),
    "no JSON": ("x.jsonl", "hello\nworld\n", "x.jsonl:1: Expecting value"),
    "no text": ("x.jsonl", b"\xe9 junk\n" * 9, "x.jsonl:1: the line is not UTF-8"),
    "text of another encoding": ("x.jsonl", row(GOOD_ROW).encode("utf-16"), "x.jsonl is UTF-16 text: convert it"),
    "not of the format its name says": ("x.parquet", b"PAR1 no more", "x.parquet is not a readable parquet file"),
    "no Arrow": ("x.arrow", b"junk", "x.arrow is not a readable Arrow file"),
    "no gzip": ("x.jsonl.gz", b"junk", "x.jsonl.gz is not a gzip file"),
    "an unknown suffix": ("x.xyz", row(GOOD_ROW), "cannot tell its format from the suffix '.xyz'"),
    "compressed nothing": ("x.jsonl.gz", gzip.compress(b""), "x.jsonl.gz: no rows at all"),
}

ROWS: dict[str, tuple[str, str]] = {
    "numbers": ("1\n2\n", "dropped as not_an_object"),
    "columns without a meaning": (row({"q": "?", "a": "!"}), "dropped as unknown_schema"),
    "an unknown role": (row({"messages": [{"role": "alien", "content": "x"}]}), "has the role 'alien'"),
    "no answer": (row({"messages": [{"role": "user", "content": "x"}]}), "e.g."),
    "ids beyond the tokenizer": (tokens([1, 2, 9999], [0, 1, 1]), f"has 9999, the tokenizer has {NUM_TOKENS} ids"),
    "a mask of another length": (tokens([1, 2, 3], [0, 1]), "3 input_ids but 2 entries in loss_mask"),
    "nothing supervised": (tokens([1, 2, 3], [0, 0, 0]), "no answer token among its 3 tokens"),
    "fractions for ids": (tokens([1.5, 2, 3], [0, 1, 1]), "is not a list of whole numbers"),
}

SOURCES: dict[str, tuple[dict, str]] = {
    "nowhere": ({"path": "/no/such/rows.jsonl"}, "no such file or folder"),
    "on a hub that cannot be reached": ({"path": "nobody/nothing"}, "nobody/nothing"),
    "with an unknown option": ({"path": "python-docs", "weigth": 1}, "weigth"),
    "with a weight of nothing": ({"path": "python-docs", "weight": 0}, "weight=0.0 of python-docs: must be positive"),
    "with a broken expression": ({"path": "python-docs", "response_remove": "("}, "is no regular expression"),
    "with an unknown column": ({"path": "python-docs", "columns": {"promt": "q"}}, "names ['promt']"),
}

VOCABULARIES: dict[str, tuple[object, str]] = {
    "another tokenizer's ids": ({"token_ids": [1, NUM_TOKENS]}, f"token id {NUM_TOKENS} is out of range"),
    "another tokenizer's hash": ({"token_ids": [1], "tokenizer_hash": "0123"}, "another tokenizer (hash 0123"),
    "not ascending": ({"token_ids": [5, 3]}, "token id 3 follows 5; the ids must ascend"),
    "an id twice": ({"token_ids": [3, 3]}, "token id 3 is listed twice"),
    "negative": ({"token_ids": [-1, 3]}, "token id -1 is not a non-negative integer"),
    "empty": ({"token_ids": []}, "the draft vocabulary is empty"),
    "a list": ([1, 2], "holds a JSON list"),
    "another size than stated": ({"token_ids": [1], "draft_vocab_size": 2}, "draft_vocab_size=2, but 1 token_ids"),
    "a drafter folder without one": ({"draft_vocab": 3}, "draft_vocab is int"),
}

OPTIONS: dict[str, tuple[list[str], str]] = {
    "an abbreviation": (["--model.num_stage", "2"], "--model.num_stage 2"),
    "a misspelt loss": (["--model.loss", "mse"], "Got value: mse"),
    "more stages than layers": (["--model.num_stages", "5"], "num_stages=5: a target of 4 layers"),
    "anchors without the embedding": (["--model.anchors", "[1,2]"], "the first anchor must be 0"),
    "an anchor beyond the target": (["--model.anchors", "[0,9]"], "the target has 4 layers"),
    "heads that do not divide": (["--model.num_heads", "3"], "num_heads=3 must be a multiple"),
    "no heads at all": (["--model.num_kv_heads", "0"], "num_kv_heads=0: must be a positive integer"),
    "16-bit parameters": (["--trainer.precision", "bf16-true"], "drafter parameters must be float32"),
    "a negative learning rate": (["--model.lr", "-1"], "model.lr=-1.0 must be positive"),
    "a negative warm-up": (["--model.warmup_steps", "-1"], "model.warmup_steps=-1: must be at least 0"),
    "a run without an end": (["--trainer.max_steps=-1", "--trainer.max_epochs=-1"], "set trainer.max_epochs or"),
    "no device": (["--trainer.devices", "0"], "devices='0'"),
    "a device whose package is not installed": (["--trainer.accelerator", "tpu"], "torch_xla"),
    "a rotary base of nothing": (["--model.rope_theta", "0"], "rope_theta=0.0: must be positive"),
    "an empty batch": (["--data.batch_size", "0"], "data.batch_size=0: must be at least 1"),
    "no rows left to train on": (["--data.val_rows", "20"], "leaves no training row"),
    "sequences too short for anything": (["--data.max_length", "3"], "dropped as too_long"),
    "no checkpoint": (["--ckpt_path", "JUNK"], "junk: not a readable checkpoint"),
    "no configuration": (["--config", "/no/such.yaml"], "/no/such.yaml"),
    "a configuration that is no YAML": (["--config", "JUNK"], "error: "),
}


def without(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def with_text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def with_config(**changes) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


TARGETS: dict[str, tuple[Callable[[Path], object], str]] = {
    "without a configuration": (without("config.json"), "cannot load the configuration"),
    "with a cut configuration": (with_text("config.json", "{"), "cannot load the configuration"),
    "of an unsupported family": (with_config(model_type="gpt2"), "'gpt2', which is not supported; supported are llama"),
    "of an unknown family": (with_config(model_type="nope"), "cannot load the configuration"),
    "with words for numbers": (with_config(hidden_size="big"), "cannot load the configuration"),
    "without a tokenizer": (without("tokenizer.json"), "tokenizer of"),
    "without a chat template": (without("chat_template.jinja"), "has no chat template"),
    "with a broken template": (with_text("chat_template.jinja", "{% for x in %}"), "the chat template refuses"),
    "without weights": (without("model.safetensors"), "cannot load the weights"),
    "with cut weights": (with_text("model.safetensors", "cut"), "cannot load the weights"),
    "with weights of another size": (with_config(intermediate_size=24), "do not have the sizes"),
    "with layers missing": (with_config(num_hidden_layers=6), "weights (model.layers."),
    "with a foreign EOS id": (with_text("generation_config.json", '{"eos_token_id": 9999}'), "eos_token_id 9999"),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_file_with(mistake: str, config: dict, tmp_path: Path, capsys) -> None:
    name, content, message = FILES[mistake]
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    config["data"]["sources"] = [{"path": str(tmp_path / name)}]
    assert message in the_one_line(spd_data, ["prepare", "--config", saved(config, tmp_path)], capsys)


@pytest.mark.parametrize("mistake", ROWS)
def test_rows_that_are(mistake: str, config: dict, tmp_path: Path, capsys) -> None:
    content, message = ROWS[mistake]
    (tmp_path / "rows.jsonl").write_text(content)
    line = the_one_line(spd_data, ["prepare", "--config", saved(config, tmp_path)], capsys)
    assert message in line
    assert "rows.jsonl:1: " in line, "says where"


@pytest.mark.parametrize("mistake", SOURCES)
def test_a_source(mistake: str, config: dict, tmp_path: Path, capsys) -> None:
    source, message = SOURCES[mistake]
    config["data"]["sources"] = [source]
    assert message in the_one_line(spd_data, ["prepare", "--config", saved(config, tmp_path)], capsys)


@pytest.mark.parametrize("mistake", VOCABULARIES)
def test_a_draft_vocabulary(mistake: str, config: dict, tmp_path: Path, capsys) -> None:
    content, message = VOCABULARIES[mistake]
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(content))
    args = ["fit", "--config", saved(config, tmp_path), "--data.draft_vocab", str(path)]
    line = the_one_line(spd_train, args, capsys)
    assert message in line
    assert str(path) in line
    assert "spd-data vocab" in line, "says what to do"


@pytest.mark.parametrize("mistake", OPTIONS)
def test_an_option(mistake: str, config: dict, tmp_path: Path, capsys) -> None:
    args, message = OPTIONS[mistake]
    junk = tmp_path / "junk"
    junk.write_text("a: [1,\nb: 2")
    args = [str(junk) if arg == "JUNK" else arg for arg in args]
    assert message in the_one_line(spd_train, ["fit", "--config", saved(config, tmp_path), *args], capsys)


@pytest.mark.parametrize("mistake", TARGETS)
def test_a_target(mistake: str, config: dict, target: Path, tmp_path: Path, capsys) -> None:
    damage, message = TARGETS[mistake]
    folder = tmp_path / "target"
    shutil.copytree(target, folder)
    damage(folder)
    config["model"]["target"] = str(folder)
    assert message in the_one_line(spd_train, ["fit", "--config", saved(config, tmp_path)], capsys)


@pytest.mark.parametrize("args", [[], ["train"], ["test"], ["fit"], ["export"]])
def test_a_command_that_is_none_or_incomplete(args: list[str], capsys) -> None:
    assert "--help" in the_one_line(spd_train, args, capsys)


def test_an_output_folder_that_is_a_file(config: dict, tmp_path: Path, capsys) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "drafter").write_text("mine")
    config["trainer"]["callbacks"] = [{"class_path": "spd_lightning.callbacks.DrafterCheckpoint"}]
    line = the_one_line(spd_train, ["fit", "--config", saved(config, tmp_path)], capsys)
    assert "drafter': that is a file" in line


def test_an_output_folder_with_the_configuration_of_something_else(config: dict, tmp_path: Path, capsys) -> None:
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    (tmp_path / "run" / "drafter" / "config.json").write_text('{"model_type": "qwen3"}')
    config["trainer"]["callbacks"] = [{"class_path": "spd_lightning.callbacks.DrafterCheckpoint"}]
    line = the_one_line(spd_train, ["fit", "--config", saved(config, tmp_path)], capsys)
    assert "config.json is not that of such a drafter and would be lost" in line


def test_a_run_says_whose_drafter_it_will_replace(tmp_path: Path, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("spd_lightning.callbacks.checkpoint.rank_zero_info", said.append)
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False)
    for folder in (tmp_path / "drafter", None):
        DrafterCheckpoint().setup(trainer, LightningModule(), "fit")
        assert [line.partition(" has a drafter")[0] for line in said] == ([] if folder else [str(tmp_path / "drafter")])
        if folder:
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps({"format": FORMAT}))
