"""`spd-train` end to end on tiny targets: weights, resume, distributed strategies, artifacts, mistakes."""

import csv
import json
import os
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from spd_lightning.cli import main
from spd_lightning.data.loader import ReplicatedRows
from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.modules.checkpoint import load_drafter
from spd_lightning.modules.model_size import resolve_stage_layers
from spd_lightning.modules.tiny_target import save_tiny_target

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory")
REPO = Path(__file__).resolve().parents[1]
CALLBACKS = [{"class_path": f"spd_lightning.callbacks.{name}"} for name in ("DrafterCheckpoint", "AcceptanceReport", "SampleDrafts", "Throughput")]  # fmt: skip

LOGGED_FIGURES = (
    "tokens_per_s", "supervised_tokens_per_s", "padding_share", "data_wait_share", "peak_memory_gib"
)  # fmt: skip

TOKEN_BUDGET = {"data__batch_size": None, "data__max_length": 160, "data__tokens_per_batch": 320}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 target and sixty dialogues, shared by the runs of this file."""
    folder = tmp_path_factory.mktemp("training")
    save_tiny_target(folder / "target", "qwen3_5", 8)
    rng = random.Random(0)
    with (folder / "chat.jsonl").open("w") as file:
        for _ in range(60):
            a, b = rng.randint(1, 50), rng.randint(1, 50)
            turns = [
                ("user", f"What is {a} + {b}?"),
                ("assistant", f"{a} + {b} = {a + b}." + " Yes." * rng.randint(0, 9)),
            ]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return folder


def write_config(workspace: Path, run: Path, **changes) -> Path:
    """A small complete configuration; `changes` are dotted keys with `__` for the dot."""
    config = {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu", "devices": 1, "precision": "32-true", "max_epochs": 1, "gradient_clip_val": 1.0,
            "log_every_n_steps": 1, "num_sanity_val_steps": 0, "default_root_dir": str(run),
            "enable_progress_bar": False, "enable_model_summary": False, "callbacks": CALLBACKS,
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(run), "name": None, "version": ""},
            },
        },
        "model": {"target": str(workspace / "target"), "num_stages": 4, "num_spec_layers": 2, "lr": 1e-3, "warmup_steps": 2},
        "data": {
            "sources": [{"path": str(workspace / "chat.jsonl")}], "val_rows": 12, "batch_size": 4,
            "draft_vocab_size": 64, "cache_dir": str(workspace / "cache"),
        },
    }  # fmt: skip
    for key, value in changes.items():
        section, _, name = key.partition("__")
        config[section][name] = value
    run.mkdir(parents=True, exist_ok=True)
    path = run / "given.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "drafter" / "drafter.safetensors")


def extra(name: str, **init_args) -> dict:
    return {"class_path": f"tests.interruption.{name}", "init_args": init_args}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.fixture(scope="module")
def finished_run(workspace: Path) -> Path:
    run = workspace / "finished"
    main(["fit", "--config", str(write_config(workspace, run))])
    return run


def test_a_run_ends_with_a_drafter_folder(finished_run: Path, workspace: Path) -> None:
    drafter = load_drafter(finished_run / "drafter")
    record = drafter.record
    assert drafter.module.layout.anchors == (0, 2, 4, 6, 7)
    assert record["target"]["family"] == "qwen3_5" and record["target"]["name"] == str(workspace / "target")
    assert record["tokenizer"]["num_tokens"] == 259 and record["tokenizer"]["eos_token_ids"] == [258]
    assert record["draft_vocab"]["token_ids"] == drafter.module.draft_token_ids.tolist()
    metrics = record["provenance"]["metrics"]
    assert {f"val/p_fill_{fill}" for fill in range(1, 5)} < metrics.keys()
    assert 0 < metrics["val/coverage"] <= 1 and 1 <= metrics["val/s0"] <= 4
    assert record["provenance"]["versions"]["torch"] == torch.__version__


def test_balanced_stages_are_resolved_in_the_drafter_and_kept_in_decoding(workspace: Path, tmp_path: Path) -> None:
    config = write_config(workspace, tmp_path, model__stage_layers="balanced", trainer__max_steps=1)
    main(["fit", "--config", str(config)])
    drafter = load_drafter(tmp_path / "drafter").module
    assert drafter.config.stage_layers == resolve_stage_layers(str(workspace / "target"), 4, "balanced") != (2, 2, 2, 2)
    with PipelineDecoder.from_pretrained(str(tmp_path / "drafter")) as decoder:
        assert [len(stage.modules.layers) for stage in decoder.runtime.stages] == list(drafter.config.stage_layers)


def test_a_run_logs_how_fast_it_trains(finished_run: Path) -> None:
    with (finished_run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/tokens_per_s"]]
    assert len(rows) == 12  # 48 rows in batches of 4, each logged
    figures = {name: [float(row[f"train/{name}"]) for row in rows] for name in LOGGED_FIGURES}
    assert all(
        0 < few < all for few, all in zip(figures["supervised_tokens_per_s"], figures["tokens_per_s"], strict=True)
    )
    assert all(0 <= share < 1 for name in ("padding_share", "data_wait_share") for share in figures[name])
    assert max(figures["padding_share"]) > 0 < max(figures["data_wait_share"])
    assert figures["peak_memory_gib"] == sorted(figures["peak_memory_gib"])
    assert "train/flops_utilisation" not in rows[0]  # of no CPU is it known what it can do


def test_a_slow_loader_is_warned_of_once(workspace: Path, tmp_path: Path, monkeypatch) -> None:
    read = ReplicatedRows.__getitem__

    def slow(rows, batch):
        time.sleep(0.2)
        return read(rows, batch)

    monkeypatch.setattr(ReplicatedRows, "__getitem__", slow)
    callbacks = [{"class_path": "spd_lightning.callbacks.Throughput", "init_args": {"peak_tflops": 1e-3}}]
    config = write_config(workspace, tmp_path, trainer__callbacks=callbacks, trainer__max_steps=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        main(["fit", "--config", str(config), "--trainer.limit_val_batches", "0"])
    told = [str(warning.message) for warning in caught if "loader is the bottleneck" in str(warning.message)]
    assert len(told) == 1 and "give data.num_workers more than 0" in told[0]
    with (tmp_path / "metrics.csv").open() as file:
        shares = [float(row["train/flops_utilisation"]) for row in csv.DictReader(file)]
    assert len(shares) == 6 and all(0 < share < 10 for share in shares)


def test_every_trained_parameter_has_moved(finished_run: Path) -> None:
    for name, value in weights(finished_run).items():
        if name.endswith("norm.weight") or ".norms." in name:
            assert not torch.equal(value, torch.ones_like(value)), f"{name}: the gains never moved"


def test_checkpoints_hold_no_target_weight_and_export_alike(finished_run: Path) -> None:
    [best] = (finished_run / "checkpoints").glob("step*.ckpt")
    checkpoint = torch.load(best, weights_only=True)
    assert all(name.startswith("drafter.") for name in checkpoint["state_dict"])
    assert best.name.startswith("step12-s0=")
    main(["export", "--ckpt_path", str(best), "--out", str(finished_run / "exported")])
    exported = load_file(finished_run / "exported" / "drafter.safetensors")
    assert difference(exported, weights(finished_run)) == 0


def test_samples_and_reports_lie_beside_the_run(finished_run: Path) -> None:
    samples = [json.loads(line) for line in (finished_run / "sample_drafts.jsonl").read_text().splitlines()]
    assert samples and set(samples[0]) == {"step", "context", "target_token", "draft_token", "draft_probability"}
    assert "<|im_start|>assistant" in samples[0]["context"] and 0 < samples[0]["draft_probability"] <= 1
    header = (finished_run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "train/acceptance", "train/tokens_per_s", "val/p_fill_4", "val/alpha", "val/s0_t1"} <= set(
        header
    )
    assert (finished_run / "data_report.json").is_file() and (finished_run / "config.yaml").is_file()


@pytest.mark.parametrize(
    ("accumulate", "batches", "size"), [(1, 5, {}), (3, 7, {}), (1, 5, TOKEN_BUDGET), (3, 7, TOKEN_BUDGET)]
)
def test_sigterm_saves_and_the_resumed_run_has_the_same_weights(
    workspace: Path, tmp_path: Path, accumulate: int, batches: int, size: dict
) -> None:
    """Bit for bit, with the epoch cut in the middle, also amid an accumulation window."""
    settings = {"trainer__max_epochs": 2, "trainer__accumulate_grad_batches": accumulate} | size

    def run(name: str, *args: str, **changes) -> Path:
        folder = tmp_path / name
        callbacks = [*CALLBACKS, extra("RecordBatches", path=str(tmp_path / f"{name}.txt")), *changes.pop("more", [])]
        config = write_config(workspace, folder, **settings | {"trainer__callbacks": callbacks} | changes)
        main(["fit", "--config", str(config), *args])
        return folder

    whole = run("whole")
    with pytest.raises(SystemExit) as ended:
        run("cut", more=[extra("SigtermAfter", batches=batches)])
    assert ended.value.code == 143
    assert not (tmp_path / "cut" / "drafter").exists()
    resumed = run("cut", "--ckpt_path", str(tmp_path / "cut" / "checkpoints" / "last.ckpt"))
    assert difference(weights(whole), weights(resumed)) == 0
    seen = (tmp_path / "cut.txt").read_text().splitlines()
    redone = batches % accumulate  # batches whose gradients were lost are shown again
    assert seen[: batches - redone] + seen[batches:] == (tmp_path / "whole.txt").read_text().splitlines()


@pytest.mark.parametrize(("accumulate", "every", "batches"), [(1, 2, 5), (2, 1, 5), (1, 12, 12)])
def test_a_checkpoint_between_validations_resumes_exactly(
    workspace: Path, tmp_path: Path, accumulate: int, every: int, batches: int
) -> None:
    """`every_n_train_steps` saves while callbacks see the end of a batch, which the trainer has not counted yet."""
    last, copy = tmp_path / "whole" / "checkpoints" / "last.ckpt", tmp_path / "copy.ckpt"
    saving = {"class_path": CALLBACKS[0]["class_path"], "init_args": {"every_n_train_steps": every}}
    copying = extra("CopyBefore", batches=batches, path=str(last), to=str(copy))
    seen = tmp_path / "resumed.txt"
    settings = {"trainer__max_epochs": 2, "trainer__accumulate_grad_batches": accumulate}
    for name, more, args in (
        ("whole", [copying], []),
        ("resumed", [extra("RecordBatches", path=str(seen))], ["--ckpt_path", str(copy)]),
    ):
        callbacks = {"trainer__callbacks": [saving, *CALLBACKS[1:], *more]}
        main(["fit", "--config", str(write_config(workspace, tmp_path / name, **settings, **callbacks)), *args])
    assert difference(weights(tmp_path / "whole"), weights(tmp_path / "resumed")) == 0
    stepped = batches // (accumulate * every) * accumulate * every
    assert len(seen.read_text().splitlines()) == 24 - stepped


def test_the_last_checkpoint_is_of_the_last_step_and_a_longer_run_goes_on_amid_the_epoch(
    workspace: Path, tmp_path: Path
) -> None:
    """Neither the best validation nor the end of the epoch is where `max_steps` stops."""
    changes = {"trainer__val_check_interval": 2, "trainer__max_steps": 5}
    main(["fit", "--config", str(write_config(workspace, tmp_path / "short", **changes))])
    [best] = (tmp_path / "short" / "checkpoints").glob("step*.ckpt")
    last = tmp_path / "short" / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 5
    assert best.name.startswith(("step2-", "step4-"))
    callbacks = [*CALLBACKS, extra("RecordBatches", path=str(tmp_path / "seen.txt"))]
    config = write_config(workspace, tmp_path / "long", trainer__callbacks=callbacks)
    main(["fit", "--config", str(config), "--ckpt_path", str(last)])
    seen = (tmp_path / "seen.txt").read_text().splitlines()
    assert [line.split()[:2] for line in seen] == [["0", str(index)] for index in range(5, 12)]


def test_accumulated_steps_weigh_tokens_as_one_joined_batch_does(workspace: Path, tmp_path: Path) -> None:
    """Batches of 2 rows, 24 to a step, against one batch of all 48 rows; the data is the same, the order is not."""
    common = {"model__warmup_steps": 1, "data__simulate_fill": False}
    parts = {"data__batch_size": 2, "trainer__accumulate_grad_batches": 24}
    for name, changes in (("joined", {"data__batch_size": 48}), ("parts", parts)):
        main(["fit", "--config", str(write_config(workspace, tmp_path / name, **common, **changes))])
    joined, parts = (
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"]
        for name in ("joined", "parts")
    )
    for index, state in joined.items():
        torch.testing.assert_close(parts[index]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("size", [{"data__batch_size": 7}, TOKEN_BUDGET], ids=["rows", "tokens"])
def test_a_step_of_unequal_batches_has_the_gradient_of_their_joined_batch(
    size: dict, workspace: Path, tmp_path: Path
) -> None:
    """In float64; batches differ in rows, length and supervised tokens, and end the epoch before the step is full."""
    save_tiny_target(tmp_path / "target", "qwen3", 8)
    common = {"trainer__precision": "64-true", "trainer__gradient_clip_val": None, "model__warmup_steps": 1}
    model = ["--model.target", str(tmp_path / "target"), "--model.target_dtype", "float64"]
    parts = {"trainer__accumulate_grad_batches": 50} | size
    for name, changes in (("joined", {"data__batch_size": 48}), ("parts", parts)):
        callbacks = [*CALLBACKS, extra("RecordBatches", path=str(tmp_path / f"{name}.txt"))]
        changes |= common | {"trainer__callbacks": callbacks}
        main(["fit", "--config", str(write_config(workspace, tmp_path / name, **changes)), *model])
    checkpoints = [
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True) for name in ("joined", "parts")
    ]
    assert [checkpoint["global_step"] for checkpoint in checkpoints] == [1, 1]
    assert len((tmp_path / "joined.txt").read_text().splitlines()) == 1
    assert len((tmp_path / "parts.txt").read_text().splitlines()) > 6
    joined, parts = (checkpoint["optimizer_states"][0]["state"] for checkpoint in checkpoints)
    for index, state in joined.items():
        assert state["exp_avg"].dtype == torch.float64
        torch.testing.assert_close(parts[index]["exp_avg"], state["exp_avg"], rtol=1e-10, atol=1e-14)


def test_a_wandb_run_has_metrics_config_and_samples(workspace: Path, tmp_path: Path, monkeypatch) -> None:
    """A real offline run in a process of its own, read back from the file that `wandb sync` would upload."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    init = {"save_dir": str(tmp_path), "project": "spd-test", "name": "tiny"}
    logger = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": init}
    done = spd_train("fit", "--config", str(write_config(workspace, tmp_path, trainer__logger=logger)))
    assert done.returncode == 0, done.stderr
    assert f"wandb sync {tmp_path}/wandb/offline-run-" in done.stderr + done.stdout
    [log] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = list(read_wandb_log(log))
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name) == ("spd-test", "tiny")
    keys = {item.key or "/".join(item.nested_key) for record in records for item in record.history.item}
    assert {"train/loss", "train/acceptance", "val/p_fill_1", "val/p_fill_4", "val/s0", "val/coverage"} <= keys
    assert any(key.startswith("val/sample_drafts") for key in keys)
    configured = {item.key for record in records for item in (*record.config.update, *record.run.config.update)}
    assert {"config", "num_stages", "lr"} <= configured


def read_wandb_log(path: Path):
    """The records of an offline run: LevelDB's log format behind seven bytes of header."""
    from wandb.proto import wandb_internal_pb2

    data, offset, parts = path.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # no record header crosses a block
            offset += 32768 - offset % 32768
            continue
        length, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def spd_train(*args: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("spd-train")), *args]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


FSDP2 = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1},
}


@pytest.mark.parametrize("strategy", ["ddp", FSDP2], ids=["ddp", "fsdp2"])
def test_two_processes_train_the_weights_of_one(strategy, workspace: Path, tmp_path: Path, request) -> None:
    """Two gloo ranks of four rows against one process of eight rows; two steps and a validation of pooled figures."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    common = {"trainer__max_steps": 2, "trainer__val_check_interval": 2}
    main(["fit", "--config", str(write_config(workspace, alone, data__batch_size=8, **common))])
    changes = {"trainer__devices": 2, "trainer__strategy": strategy} | common
    config = write_config(workspace, together, **changes)
    done = spd_train("fit", "--config", str(config))
    assert done.returncode == 0, done.stderr[-3000:]
    assert difference(weights(alone), weights(together)) < 1e-6
    figures, pooled = (load_drafter(run / "drafter").record["provenance"]["metrics"] for run in (alone, together))
    for name in ("val/p_t1_fill_1", "val/p_fill_4", "val/s0_t1", "val/loss", "val/coverage"):
        assert pooled[name] == pytest.approx(figures[name], abs=1e-6), name


def test_a_rank_without_supervised_tokens_neither_hangs_nor_counts(workspace: Path, tmp_path: Path) -> None:
    callbacks = [*CALLBACKS, extra("UnsuperviseFirstRank")]
    changes = {
        "trainer__devices": 2,
        "trainer__strategy": "ddp",
        "trainer__max_steps": 2,
        "trainer__callbacks": callbacks,
    }
    done = spd_train("fit", "--config", str(write_config(workspace, tmp_path / "run", **changes)))
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "run").values())


@pytest.mark.parametrize("everywhere", [False, True], ids=["rank_0", "every_rank"])
def test_sigterm_stops_two_ranks_together_and_saves(everywhere: bool, workspace: Path, tmp_path: Path) -> None:
    """A scheduler signals every rank, a person the first; neither may hang, and both leave a checkpoint."""
    callbacks = [*CALLBACKS, extra("SigtermAfter", batches=3, only_first_rank=not everywhere)]
    changes = {"trainer__devices": 2, "trainer__strategy": "ddp", "trainer__callbacks": callbacks}
    done = spd_train("fit", "--config", str(write_config(workspace, tmp_path / "run", **changes)))
    assert done.returncode != 0
    saved = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    assert 3 <= saved["global_step"] <= 4
    assert not (tmp_path / "run" / "drafter").exists()


def test_validate_reads_a_checkpoint(finished_run: Path, workspace: Path, capsys, monkeypatch) -> None:
    told = []
    monkeypatch.setattr("spd_lightning.callbacks.acceptance_report.rank_zero_info", told.append)
    checkpoint = str(finished_run / "checkpoints" / "last.ckpt")
    main(["validate", "--config", str(finished_run / "given.yaml"), "--ckpt_path", checkpoint])
    assert "val/p_fill_4" in capsys.readouterr().out
    assert told[0].splitlines()[1] == "held-out acceptance", "the trainer does not know the checkpoint's step"


def test_the_command_line_wins_over_a_checkpoint(finished_run: Path, workspace: Path, tmp_path: Path) -> None:
    config = write_config(workspace, tmp_path, trainer__max_epochs=2)
    checkpoint = str(finished_run / "checkpoints" / "last.ckpt")
    main(["fit", "--config", str(config), "--model.lr", "0.005", "--ckpt_path", checkpoint])
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["lr"] == 0.005
    assert saved["lr_schedulers"][0]["base_lrs"] == [0.005]
    assert saved["optimizer_states"][0]["param_groups"][0]["initial_lr"] == 0.005


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--trainer.precision", "bf16-true"], "parameters must be float32"),
        (["--model.num_stages", "9"], "at most 8 stages"),
        (["--model.anchors", "[1,2]"], "first anchor must be 0"),
        (["--model.stage_layers", "[4,4,4]"], "names 3 stages"),
        (["--model.target", "/no/such/target"], "cannot load the configuration of '/no/such/target'"),
        (["--model.num_stage", "4"], "num_stage"),
        (["--model.loss", "mse"], "mse"),
        (["--data.no_such_key", "1"], "no_such_key"),
        (["--data.sources", "[{path: /no/such/file.jsonl}]"], "/no/such/file.jsonl"),
        (["--data.draft_vocab", "/no/such/vocab.json"], "/no/such/vocab.json"),
        (["--data.batch_size", "0"], "batch_size=0"),
    ],
)
def test_mistakes_give_one_clear_line(args: list[str], message: str, workspace: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["fit", "--config", str(write_config(workspace, tmp_path)), *args])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_resuming_another_drafter_is_refused(finished_run: Path, workspace: Path, tmp_path: Path, capsys) -> None:
    config = write_config(workspace, tmp_path)
    checkpoint = str(finished_run / "checkpoints" / "last.ckpt")
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(config), "--model.feature_norm", "none", "--ckpt_path", checkpoint])
    assert "feature_norm" in capsys.readouterr().err


def test_help_and_print_config_need_no_target(capsys) -> None:
    for args in (
        ["--help"],
        ["fit", "--help"],
        ["fit", "--model.target", "nowhere/at-all", "--model.num_stages", "2", "--print_config"],
    ):
        with pytest.raises(SystemExit) as raised:
            main(args)
        assert raised.value.code == 0
    assert "num_stages: 2" in capsys.readouterr().out


def test_sources_of_the_command_line_replace_those_of_the_file_whole(tmp_path: Path, capsys) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {target: nowhere/at-all, num_stages: 2}\ndata: {sources: [{path: a.jsonl, limit: 5}]}\n")
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(config), "--data.sources", "[{path: b.jsonl}]", "--print_config"])
    [source] = yaml.safe_load(capsys.readouterr().out)["data"]["sources"]
    assert (source["path"], source.get("limit")) == ("b.jsonl", None)


@pytest.mark.parametrize("content", ["", "not a checkpoint", None])
def test_exporting_something_else_is_refused(content, tmp_path: Path, capsys) -> None:
    path = tmp_path / "x.ckpt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit) as raised:
        main(["export", "--ckpt_path", str(path), "--out", str(tmp_path / "out")])
    assert raised.value.code == 2 and "checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
