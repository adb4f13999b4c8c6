import json
from pathlib import Path

import pytest
import yaml
from tests.inference.folders import save_folders

from spd_lightning.data import cli
from spd_lightning.modules.draft_vocab import DraftVocab
from spd_lightning.modules.tiny_target import save_tiny_target

NUM_DIALOGUES = 40


@pytest.fixture(autouse=True)
def _no_colour(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def config(tmp_path):
    """A training configuration with a tiny target and dialogues."""
    rows = [{"q": f"question {n}", "a": f"the answer is {n}"} for n in range(NUM_DIALOGUES)]
    rows.append({"q": "no answer"})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "seed_everything": 0,
        "trainer": {"max_epochs": 2, "accumulate_grad_batches": 2, "devices": 2},
        "model": {"target": str(save_tiny_target(tmp_path / "target", "qwen3")), "num_stages": 4, "lr": 1e-3},
        "data": {
            "sources": [{"path": str(path), "columns": {"prompt": "q", "response": "a"}}],
            "val_rows": 8,
            "batch_size": 4,
            "draft_vocab_size": 30,
            "cache_dir": str(tmp_path / "cache"),
        },
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    return str(file)


def test_prepare_prints_what_was_dropped_and_where_it_lies(config, tmp_path, capsys):
    cli.main(["prepare", "--config", config])
    out = capsys.readouterr().out
    assert "41 read, 40 kept (2.4% dropped), 40 rows" in out
    assert "unknown_schema: 1 rows" in out
    assert "rows.jsonl:41" in out
    assert "training: 32 rows" in out
    (folder,) = (tmp_path / "cache" / "rows").iterdir()
    assert f"prepared: {folder}" in out


def test_inspect_prints_rows_with_their_answers_marked(config, capsys):
    cli.main(["inspect", "--config", config, "--num_samples", "2"])
    out = capsys.readouterr().out
    assert out.count("[[the answer is ") == out.count("<|im_start|>assistant\n[[") == 2
    assert out.count("--- ") == 2
    assert "unknown_schema: 1 rows" in out
    assert "\x1b" not in out


def test_inspect_shows_sources_whose_drops_stop_training(config, capsys):
    cli.main(
        ["inspect", "--config", config, "--data.max_length", "45", "--limit", "20", "--data.max_drop_fraction", "0.1"]
    )
    out = capsys.readouterr().out
    assert "20 read, 10 kept (50.0% dropped)" in out
    assert "too_long: 10 rows" in out


def test_inspect_shows_other_rows_for_another_seed(config, capsys):
    shown = []
    for seed in ("0", "0", "1"):
        cli.main(["inspect", "--config", config, "--num_samples", "3", "--sample_seed", seed])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]


def test_vocab_writes_what_training_would_count(config, tmp_path, capsys):
    out = tmp_path / "vocab" / "tiny.json"
    cli.main(["vocab", "--config", config, "--out", str(out), "--sizes", "[5, 10, 5000]"])
    printed = capsys.readouterr().out
    vocab = DraftVocab.load(out, num_tokens=259)
    assert len(vocab) == 30
    assert vocab.token_ids[-1] == 258, "the EOS id"
    assert vocab.counts is not None
    assert sum(vocab.counts) == vocab.provenance["total_positions_counted"]
    sizes = [line.split()[0] for line in printed.splitlines() if line.strip().endswith("%") and line.startswith(" ")]
    assert sizes == ["5", "10", "30", "259"]
    cli.main(["prepare", "--config", config, "--data.draft_vocab", str(out)])
    assert "draft vocabulary: 30 of 259 ids, coverage 100.00%" in capsys.readouterr().out


def test_estimate_is_exact_where_the_sample_is_everything(config, capsys):
    cli.main(["prepare", "--config", config])
    totals = next(line for line in capsys.readouterr().out.splitlines() if "41 read" in line)
    tokens, supervised = totals.split(", ")[3:]
    cli.main(["estimate", "--config", config])
    out = capsys.readouterr().out
    assert f"40 training rows, {tokens}, {supervised}" in out
    assert "steps: 4 batches of 4 on each of 2 ranks, 2 optimizer steps per epoch (global batch 16), 4 in all" in out
    assert "dropped as unknown_schema: 2.4%" in out


def test_estimate_counts_the_batches_of_a_token_budget(config, capsys):
    budget = ["--data.batch_size", "null", "--data.max_length", "64", "--data.tokens_per_batch", "128"]
    cli.main(["estimate", "--config", config, *budget])
    out = capsys.readouterr().out
    # 32 rows of 45 to 47 tokens, two to a batch, and one batch more because the cuts move
    assert "steps: 9 batches of 128 tokens on each of 2 ranks, 5 optimizer steps per epoch" in out
    assert "(global batch 512 tokens), 10 in all" in out
    assert "one batch of 128 tokens and 5 row types" in out


def test_estimate_of_an_eagle3_drafter_counts_its_own_parameters(config, tmp_path, capsys):
    content = yaml.safe_load(Path(config).read_text())
    content |= {"method": "eagle3", "model": {"target": content["model"]["target"], "num_steps": 3, "lr": 1e-3}}
    (tmp_path / "eagle.yaml").write_text(yaml.safe_dump(content))
    cli.main(["estimate", "--config", str(tmp_path / "eagle.yaml")])
    out = capsys.readouterr().out
    # Width 32, four heads of 16 and two of keys, MLP 48, 30 draft tokens.
    fused, attention, mlp = 3 * 32 * 32, 64 * (64 + 2 * 32) + 64 * 32, 3 * 32 * 48
    assert f"drafter: {fused + attention + mlp + 4 * 32 + 30 * 32:,} parameters" in out
    assert "and 3 steps of each chain" in out


def test_estimate_has_the_sizes_of_the_drafter_that_training_begins_with(config, tmp_path, capsys):
    drafter, _ = save_folders(tmp_path / "source", "qwen3")
    record = json.loads((Path(drafter) / "config.json").read_text())
    record["drafter"] |= {"num_heads": 2, "gated_attention": True}
    (Path(drafter) / "config.json").write_text(json.dumps(record))
    counts = []
    for more in ([], ["--model.init_from", drafter], ["--model.init_from", drafter, "--model.num_heads", "4"]):
        cli.main(["estimate", "--config", config, *more])
        line = next(line for line in capsys.readouterr().out.splitlines() if "drafter: " in line)
        counts.append(int(line.partition("drafter: ")[2].split()[0].replace(",", "")))
    # Width 32, two layers; a head of 16 has query and output projections, and with gates as much again of the former.
    assert counts[1] - counts[0] == 2 * 32 * 16 * (2 * 3 - 4 * 2)
    assert counts[2] - counts[0] == 2 * 32 * 16 * (4 * 3 - 4 * 2)


def test_estimate_of_eight_rows_unless_told_otherwise(config, capsys):
    cli.main(["estimate", "--config", config, "--data.batch_size", "null"])
    assert "steps: 2 batches of 8 on each of 2 ranks" in capsys.readouterr().out


def test_estimate_extrapolates_from_a_sample(config, capsys):
    cli.main(["estimate", "--config", config, "--sample_rows", "20", "--trainer.max_steps", "3"])
    out = capsys.readouterr().out
    assert "41 rows read (from 20 of them)" in out
    assert "3 in all" in out


def test_regenerate_writes_the_targets_answers(config, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    args = ["--config", config, "--out", str(out), "--sampling.max_new_tokens", "4", "--keep_unfinished", "true"]
    cli.main(["regenerate", *args, "--data.sources.limit", "3", "--device", "cpu"])
    assert str(out) in capsys.readouterr().out
    assert 1 <= len(out.read_text().splitlines()) <= 3


def test_embedded_target_has_no_use_for_a_configuration(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr("spd_lightning.data.embedded_target.embedded_target", lambda *given: made.append(given))
    cli.main(["embedded-target", "--out", str(tmp_path / "target")])
    assert made == [(tmp_path / "target", None)]


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_names_every_command(args, capsys):
    cli.main(args)
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_of_a_command_is_its_manual(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: spd-data {command}" in out
    assert "--config" in out or command == "embedded-target"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["prepair"], "unknown command 'prepair'"),
        (["prepare"], "model.target, data.sources"),
        (["prepare", "--config", "absent.yaml"], "absent.yaml"),
        (["prepare", "--config", "CONFIG", "--data.batch_siz", "3"], "batch_siz"),
        (["prepare", "--config", "CONFIG", "--data.batch_size", "0"], "data.batch_size=0"),
        (["prepare", "--config", "CONFIG", "--data.val_rows", "0"], "data.val_rows=0"),
        (["prepare", "--config", "CONFIG", "--data.val_rows", "40"], "leaves no training row"),
        (["prepare", "--config", "CONFIG", "--data.max_drop_fraction", "0"], "max_drop_fraction=0.0"),
        (["prepare", "--config", "CONFIG", "--data.sources", "[]"], "data.sources is empty"),
        (["prepare", "--config", "CONFIG", "--data.sources.path", "/absent.jsonl"], "/absent.jsonl"),
        (["prepare", "--config", "CONFIG", "--model.target", "/absent"], "/absent"),
        (["prepare", "--config", "CONFIG", "--data.draft_vocab", "/absent.json"], "no draft vocabulary here"),
        (["prepare", "--config", "CONFIG", "--data.draft_vocab_size", "0"], "draft_vocab_size=0"),
        (["inspect", "--config", "CONFIG", "--num_samples", "-1"], "num_samples=-1"),
        (["vocab", "--config", "CONFIG"], "out"),
        (["estimate", "--config", "CONFIG", "--sample_rows", "0"], "sample_rows=0"),
        (["estimate", "--config", "CONFIG", "--model.num_stages", "99"], "num_stages=99"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(config, args, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([config if arg == "CONFIG" else arg for arg in args])
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line.lower()]
    assert len(lines) == 1
    assert lines[0].startswith("spd-data: error: ")
    assert message in lines[0]
