"""Every YAML in the repository parses, instantiates and says what it configures."""

import json
import random
from pathlib import Path

import pytest
import yaml

from spd_lightning.cli import METHODS, TrainingCLI, main
from spd_lightning.data.cli import main as data_main
from spd_lightning.data.datamodule import DialogueDataModule
from spd_lightning.data.training_config import chosen_method
from spd_lightning.modules.checkpoint import load_drafter
from spd_lightning.modules.eagle.eagle_module import Eagle3Module
from spd_lightning.modules.tiny_target import save_tiny_target

REPO = Path(__file__).resolve().parents[1]
CONFIGS = sorted([*(REPO / "configs").glob("*.yaml"), *(REPO / "benchmarks").glob("*.yaml")])
PUBLISHED = {
    "pdm_n4": (4, 4),
    "pdm_n8": (8, 3),
    "pdm_n16": (16, 2),
    "pdm_9b_n8": (8, 3),
    "pdm_n8_exact": (8, 3),
    "pdm_n8_post_step": (8, 3),
    "ppsd_n8": (8, 1),
}
POST_STEP = {"pdm_n8_post_step", "ppsd_n8"}

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Tiny Qwen3.5 targets with the layer counts that the configurations are for."""
    folder = tmp_path_factory.mktemp("targets")
    return {layers: save_tiny_target(folder / str(layers), "qwen3_5", layers) for layers in (30, 32)}


def parse(path: Path, *args: str) -> TrainingCLI:
    return TrainingCLI(
        METHODS[chosen_method(["--config", str(path)], METHODS)],
        DialogueDataModule,
        args=["--config", str(path), *args],
        run=False,
        parser_kwargs={"allow_abbrev": False},
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_instantiates(path: Path, targets: dict[int, Path], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    target = targets[32 if path.stem.startswith(("pdm", "ppsd", "eagle3")) else 30]
    cli = parse(path, "--model.target", str(target), "--trainer.accelerator", "cpu")
    assert cli.datamodule.layout is cli.model.layout
    assert cli.datamodule.target == str(target)
    given, trainer = cli.model.hparams, cli.trainer
    if path.stem in (*PUBLISHED, "eagle3"):
        assert (given["lr"], given["warmup_steps"], given["weight_decay"]) == (1e-4, 100, 0.0)
        assert cli.datamodule.batch_size * trainer.accumulate_grad_batches * trainer.world_size == 64
        assert (trainer.max_epochs, trainer.gradient_clip_val) == (1, 1.0)
    if path.stem == "eagle3":
        assert isinstance(cli.model, Eagle3Module) and given["num_steps"] == 7
    if path.stem in PUBLISHED:
        num_stages, num_spec_layers = PUBLISHED[path.stem]
        assert (given["num_stages"], given["num_spec_layers"]) == (num_stages, num_spec_layers)
        assert cli.model.layout.schedule == ("post_step" if path.stem in POST_STEP else "pre_step")
        exact = path.stem == "pdm_n8_exact"
        assert cli.model.layout.rows == ("exact" if exact else "shared")
        anchors = {"pdm_n8_exact": (0, 4, 8, 12, 16, 20, 24, 28, 31), "ppsd_n8": (4,)}
        assert cli.model.layout.anchors == anchors.get(path.stem, (0, 8, 16, 24, 31))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_of_the_product_configurations_is_set(path: Path) -> None:
    """One YAML is one experiment, complete: no model or data option is left to a default that may change."""
    if path.stem not in (*PUBLISHED, "eagle3"):
        pytest.skip("a short configuration")
    config = yaml.safe_load(path.read_text())
    module = METHODS[config.get("method", "spd")]
    for section, owner in (("model", module), ("data", DialogueDataModule)):
        options = (
            set(owner.__init__.__annotations__) - {"return", "layout"} - ({"target"} if section == "data" else set())
        )
        assert set(config[section]) == options


def test_every_configuration_states_its_schedule() -> None:
    """But EAGLE-3's, whose drafter has none."""
    contents = {path.stem: yaml.safe_load(path.read_text()) for path in CONFIGS}
    eagle3 = [name for name, content in contents.items() if content.get("method") == "eagle3"]
    assert [name for name, content in contents.items() if "schedule" not in content["model"]] == eagle3


def test_eagle3_is_trained_on_the_data_and_budget_of_the_published_drafter() -> None:
    published, rival = (
        yaml.safe_load((REPO / "configs" / f"{name}.yaml").read_text()) for name in ("pdm_n8", "eagle3")
    )
    assert rival["data"] == published["data"] | {"simulate_fill": False}
    assert {
        key: value for key, value in rival["trainer"].items() if key not in ("default_root_dir", "logger", "callbacks")
    } == {
        key: value
        for key, value in published["trainer"].items()
        if key not in ("default_root_dir", "logger", "callbacks")
    }
    shared = rival["model"].keys() & published["model"].keys()
    assert {"lr", "rope_theta", "target", "loss"} <= shared
    assert all(rival["model"][name] == published["model"][name] for name in shared)


def test_the_post_step_ablation_differs_from_the_published_layout_in_the_schedule_alone() -> None:
    published, ablation = (
        yaml.safe_load((REPO / "configs" / f"{name}.yaml").read_text()) for name in ("pdm_n8", "pdm_n8_post_step")
    )
    assert ablation["model"] == published["model"] | {"schedule": "post_step"}
    assert ablation["data"] == published["data"]
    assert {key: value for key, value in ablation["trainer"].items() if key not in ("default_root_dir", "logger")} == {
        key: value for key, value in published["trainer"].items() if key not in ("default_root_dir", "logger")
    }


@pytest.mark.parametrize("rows", ["exact", "shared"])
def test_a_post_step_run_ends_with_a_post_step_drafter(rows: str, tmp_path: Path, monkeypatch) -> None:
    """Three optimizer steps of the debug configuration and a validation at every fill."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPD_CACHE", str(tmp_path / "cache"))
    common = ["--model.rows", rows, "--model.anchors", "[0, 2, 7]", "--trainer.limit_train_batches", "3"]
    for schedule in ("pre_step", "post_step"):
        where = ["--trainer.default_root_dir", schedule, "--trainer.logger.init_args.save_dir", schedule]
        main(["fit", "--config", str(REPO / "configs" / "debug.yaml"), "--model.schedule", schedule, *where, *common])
    pre, post = (load_drafter(Path(schedule) / "drafter") for schedule in ("pre_step", "post_step"))
    assert post.record["schedule"] == post.module.config.schedule == post.module.layout.schedule == "post_step"
    assert post.module.layout.row_depths == ((1, 2, 3, 4) if rows == "exact" else (1, 4))
    assert (sorted(pre.module.features.projections), sorted(post.module.features.projections)) == (
        ["0", "1", "2"],
        ["1", "2"],
    )
    figures = [drafter.record["provenance"]["metrics"] for drafter in (pre, post)]
    assert figures[0]["val/p_t1_fill_4"] != figures[0]["val/p_t1_fill_3"]
    assert figures[1]["val/p_t1_fill_4"] == figures[1]["val/p_t1_fill_3"]  # the same states are visible
    assert figures[1]["val/p_t1_fill_3"] != figures[1]["val/p_t1_fill_2"]


def test_an_unknown_schedule_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", str(REPO / "configs" / "debug.yaml"), "--model.schedule", "mid_step"])
    assert ended.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1 and "mid_step" in errors[0] and "post_step" in errors[0]


def test_the_estimate_counts_the_row_types_of_the_schedule(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for schedule, num_rows in (("pre_step", 5), ("post_step", 4)):
        data_main(["estimate", "--config", str(REPO / "configs" / "debug.yaml"), "--model.schedule", schedule])
        assert f"and {num_rows} row types" in capsys.readouterr().out


def test_pdm_n8_trains_with_only_target_and_sources_replaced(
    targets: dict[int, Path], tmp_path: Path, monkeypatch
) -> None:
    """Two optimizer steps of the product's main command, W&B (offline) included, on a 32-layer target."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SPD_CACHE", str(tmp_path / "cache"))
    rng = random.Random(0)
    with open("chat.jsonl", "w") as file:
        for _ in range(2100):
            a, b = rng.randint(1, 50), rng.randint(1, 50)
            row = {"prompt": f"{a} + {b}?", "response": f"{a + b}" + " yes" * rng.randint(0, 3)}
            file.write(json.dumps(row) + "\n")
    with pytest.warns(UserWarning, match="draft_vocab_size=50000 is more than"):
        main(
            ["fit", "--config", str(REPO / "configs" / "pdm_n8.yaml"), "--model.target", str(targets[32])]
            + ["--data.sources", "[{path: chat.jsonl}]", "--trainer.max_steps", "2"]
        )
    record = json.loads(Path("runs/pdm_n8/drafter/config.json").read_text())
    assert record["drafter"]["stage_layers"] == [4] * 8 and record["drafter"]["anchors"] == [0, 8, 16, 24, 31]
    assert list(Path("runs/pdm_n8/wandb").glob("offline-run-*/run-*.wandb"))
