"""`spd-train fit --method eagle3`: its loss and gradients, what it measures, its folder, resuming, and mistakes."""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml

from spd_lightning.callbacks.acceptance_report import chain_table
from spd_lightning.cli import METHODS, main
from spd_lightning.data.training_config import chosen_method
from spd_lightning.modules.batch import ReplicatedBatch
from spd_lightning.modules.checkpoint import load_drafter
from spd_lightning.modules.eagle.eagle_drafter import Eagle3Drafter
from spd_lightning.modules.eagle.eagle_module import Eagle3Module
from spd_lightning.modules.target import FrozenTarget
from spd_lightning.modules.tiny_target import save_tiny_target
from tests.modules.eagle.drafters import make_eagle

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory")
CALLBACKS = [
    {"class_path": "spd_lightning.callbacks.DrafterCheckpoint", "init_args": {"monitor": "val/s0_k7"}},
    {"class_path": "spd_lightning.callbacks.AcceptanceReport"},
    {"class_path": "spd_lightning.callbacks.SampleDrafts"},
    {"class_path": "spd_lightning.callbacks.Throughput"},
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle")
    save_tiny_target(folder / "target", "qwen3_5", 8)
    rng = random.Random(0)
    with (folder / "chat.jsonl").open("w") as file:
        for _ in range(48):
            a, b = rng.randint(1, 50), rng.randint(1, 50)
            turns = [("user", f"What is {a} + {b}?"), ("assistant", f"{a + b}." + " Yes." * rng.randint(0, 9))]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return folder


def write_config(workspace: Path, run: Path, **model) -> Path:
    """A small complete configuration in the run's folder."""
    config = {
        "method": "eagle3",
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
        "model": {"target": str(workspace / "target"), "num_steps": 3, "lr": 3e-3, "warmup_steps": 2, **model},
        "data": {
            "sources": [{"path": str(workspace / "chat.jsonl")}], "val_rows": 12, "batch_size": 4,
            "draft_vocab_size": 64, "cache_dir": str(workspace / "cache"),
        },
    }  # fmt: skip
    run.mkdir(parents=True, exist_ok=True)
    path = run / "given.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def fit(workspace: Path, run: Path, *args: str, **model) -> Path:
    """One epoch of 36 rows, configured as a user would; returns the folder of the run."""
    main(["fit", "--config", str(write_config(workspace, run, **model)), *args])
    return run


def logged(run: Path) -> dict[str, list[float]]:
    lines = (run / "metrics.csv").read_text().splitlines()
    names, columns = lines[0].split(","), zip(*(line.split(",") for line in lines[1:]), strict=True)
    return {name: [float(value) for value in column if value] for name, column in zip(names, columns, strict=True)}


@pytest.fixture(scope="module")
def finished(workspace: Path) -> Path:
    return fit(workspace, workspace / "finished")


def test_a_run_learns_and_ends_with_a_drafter_folder(finished: Path) -> None:
    read = load_drafter(finished / "drafter")
    assert isinstance(read.module, Eagle3Drafter)
    assert read.record["method"] == "eagle3" and "schedule" not in read.record
    assert read.record["drafter"]["num_layers"] == 8 and read.module.config.anchors == (2, 4, 5)
    figures = logged(finished)
    loss = figures["train/loss"]
    assert len(loss) == 9 and sum(loss[-3:]) < 0.95 * sum(loss[:3])
    assert figures["train/flops_utilisation" if "train/flops_utilisation" in figures else "train/tokens_per_s"]
    assert (finished / "sample_drafts.jsonl").read_text().count("\n") == 16
    assert list((finished / "checkpoints").glob("step*-s0_k7=*.ckpt"))


def test_the_report_shows_every_step_and_what_it_implies(finished: Path) -> None:
    metrics = load_drafter(finished / "drafter").record["provenance"]["metrics"]
    table = chain_table(metrics, 9).splitlines()
    assert len(table) == 2 + 3 + 3
    assert table[2].split() == ["1", *(f"{metrics[f'val/p{rule}_step_1']:.3f}" for rule in ("", "_t1", "_t1_top50"))]
    assert f"{metrics['val/s0_k7']:.2f} with 7 drafts" in table[5]


def test_validation_measures_every_step_and_what_it_implies(finished: Path) -> None:
    figures = {name: values[-1] for name, values in logged(finished).items() if name.startswith("val/")}
    for suffix in ("", "_t1", "_t1_top50"):
        rates = [figures[f"val/p{suffix}_step_{step}"] for step in (1, 2, 3)]
        assert all(0 <= rate <= 1 for rate in rates)
        by_hand = 1 + rates[0] + rates[0] * rates[1] + rates[0] * rates[1] * rates[2]
        assert figures[f"val/s0{suffix}_k3"] == pytest.approx(by_hand, rel=1e-5)
        assert by_hand <= figures[f"val/s0{suffix}_k7"] <= figures[f"val/s0{suffix}_k15"]
    assert 0 < figures["val/p_t1_step_1"] < 1 and "val/p_step_4" not in figures


def test_the_loss_is_the_weighted_sum_over_all_steps_that_decoding_would_make(workspace: Path, monkeypatch) -> None:
    """Chain by chain and step by step, from the target's own logits, which judge base `t`, step `s` at `t+1+s`."""
    module = Eagle3Module(str(workspace / "target"), num_steps=3, step_weights=[1.0, 0.5, 0.25], target_dtype="float64")
    module.target = target = FrozenTarget.from_pretrained(str(workspace / "target"), "float64")
    module.drafter = drafter = make_eagle(8)
    module.tokenizer_record = {"num_tokens": 259}
    module._trainer = SimpleNamespace(accumulate_grad_batches=1, world_size=1)
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    ids = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(3))
    # Prompts of 3 and 4 tokens, the second answer two tokens shorter: `t` is supervised iff token `t+1` is an answer's.
    answers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 0, 0]], dtype=torch.bool)
    mask = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    positions = torch.arange(9).expand(2, -1)
    batch = ReplicatedBatch(
        ids, mask, F.pad(answers[:, 1:], (0, 1)), torch.ones(2).long(), torch.zeros(1).long(), positions,
        torch.zeros(2, 1, 2).long(),
    )  # fmt: skip
    states = target.forward(ids, mask, (0, 2, 4, 5))
    outputs = drafter(states.anchors[1:], states.anchors[0], positions, 3)
    laws = (states.last @ target.head_weight.T)[..., drafter.draft_token_ids].log_softmax(-1)
    expected, chains = 0.0, 0
    for row in range(2):
        for base in range(9):
            for step, weight in enumerate((1.0, 0.5, 0.25)):
                judged = base + 2 + step  # the position of the token that this step predicts
                if not (judged < 9 and answers[row, base + 1 : judged + 1].all()):
                    break
                chains += step == 0
                p, q = laws[row, judged - 1], drafter.lm_head(outputs[step][row, base]).log_softmax(-1)
                expected += weight * float((p.exp() * (p - q)).sum().detach())
    loss = module.training_step(batch, 0)
    assert chains == module.supervised_tokens == 5 + 2
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    loss.backward()
    assert all(parameter.grad is not None for parameter in drafter.parameters())
    nothing = batch._replace(supervised=torch.zeros_like(batch.supervised))
    assert float(module.training_step(nothing, 0)) == 0.0 and module.supervised_tokens == 7


def test_step_weights_decide_what_is_learnt(workspace: Path, tmp_path: Path) -> None:
    """A weight of zero for a step is as good as not unrolling so far."""
    common = ["--trainer.max_steps", "2"]
    cut = fit(workspace, tmp_path / "cut", *common, num_steps=2, step_weights=[1.0, 0.5])
    zero = fit(workspace, tmp_path / "zero", *common, num_steps=3, step_weights=[1.0, 0.5, 0.0])
    other = fit(workspace, tmp_path / "other", *common, num_steps=3, step_weights=[1.0, 0.5, 0.5])
    weights = [load_drafter(run / "drafter").module.fc.weight for run in (cut, zero, other)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)
    assert not torch.allclose(weights[0], weights[2], rtol=0, atol=1e-5)


def test_two_sharding_ranks_train_the_weights_of_one(workspace: Path, tmp_path: Path) -> None:
    """FSDP2 over gloo, four rows a rank, against one process of eight rows; two steps and a validation."""
    common = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    alone = fit(workspace, tmp_path / "alone", *common, "--data.batch_size", "8")
    sharding = {
        "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
        "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1},
    }
    together = write_config(workspace, tmp_path / "together")
    command = [sys.executable, "-m", "spd_lightning.cli", "fit", "--config", str(together)]
    more = ["--trainer.devices", "2", "--trainer.strategy", json.dumps(sharding)]
    done = subprocess.run([*command, *common, *more], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (load_drafter(run / "drafter") for run in (alone, together.parent))
    for name, value in one.module.state_dict().items():
        torch.testing.assert_close(two.module.state_dict()[name], value, rtol=0, atol=1e-6)
    metrics = [drafter.record["provenance"]["metrics"] for drafter in (one, two)]
    for name in ("val/p_step_1", "val/p_t1_step_3", "val/s0_t1_k7", "val/loss", "val/coverage"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], abs=1e-6), name


def test_half_precision_leaves_the_drafter_in_float32(workspace: Path, tmp_path: Path) -> None:
    run = fit(workspace, tmp_path, "--trainer.precision", "bf16-mixed", "--trainer.max_steps", "3")
    state = load_drafter(run / "drafter").module.state_dict()
    assert all(value.dtype == torch.float32 for name, value in state.items() if name != "draft_token_ids")
    assert not torch.equal(state["midlayer.hidden_norm.weight"], torch.ones(32))  # 16 bits would never move it
    assert all(0 < loss < 10 for loss in logged(run)["train/loss"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model.step_weights", "[1, 1]"], "one weight of at least 0"),
        (["--model.step_weights", "[0, 0, 0]"], "not all 0"),
        (["--model.num_steps", "0"], "num_steps=0: must be at least 1"),
        (["--model.num_stages", "4"], "num_stages"),
        (["--method", "eagle4"], "method='eagle4': known are spd, eagle3"),
        (["--trainer.precision", "bf16-true"], "must be float32"),
    ],
)
def test_mistakes_are_one_line(args, message: str, workspace: Path, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        fit(workspace, tmp_path, *args)
    assert ended.value.code not in (0, None)
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1 and message in errors[0]


def test_the_method_is_the_last_one_named(tmp_path: Path) -> None:
    eagle, spd = tmp_path / "eagle.yaml", tmp_path / "spd.yaml"
    eagle.write_text("method: eagle3\n")
    spd.write_text("model: {}\n")
    assert chosen_method(["fit"], METHODS) == "spd"
    assert chosen_method(["fit", "--config", str(eagle)], METHODS) == "eagle3"
    assert chosen_method(["fit", f"--config={eagle}", "--config", str(spd)], METHODS) == "eagle3"
    assert chosen_method(["fit", "--config", str(eagle), "--method=spd"], METHODS) == "spd"
    assert chosen_method(["fit", "--method", "eagle3", "--config", str(spd)], METHODS) == "eagle3"


def test_help_shows_the_options_of_the_method(capsys) -> None:
    for args, has in ((["fit", "--help"], "num_stages"), (["fit", "--method", "eagle3", "--help"], "step_weights")):
        with pytest.raises(SystemExit) as ended:
            main(args)
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert f"--model.{has}" in shown and ("--model.num_stages" in shown) == (has == "num_stages")
