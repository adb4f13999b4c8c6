"""`spd-train fit --model.init_from`: the debug configuration, begun with drafters of all kinds."""

from pathlib import Path

import huggingface_hub
import pytest
import torch

from spd_lightning.cli import main
from spd_lightning.inference.cli import main as infer
from spd_lightning.modules import distillation
from spd_lightning.modules.checkpoint import load_drafter
from spd_lightning.modules.tiny_target import save_tiny_target
from tests.inference.eagle.setting import save_eagle_folders
from tests.inference.folders import save_folders
from tests.modules.published_files import published_file

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory")
CONFIG = Path(__file__).resolve().parents[1] / "configs" / "debug.yaml"
STANDING_STILL = "1e-30"
"""A learning rate at which no float32 weight moves."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 target with one drafter of ours, an imported one, and one of EAGLE-3; prepared data."""
    root = tmp_path_factory.mktemp("init_from")
    save_folders(root, "qwen3_5", num_stages=4, name="own")
    save_eagle_folders(root, name="eagle")
    torch.save(published_file("qwen3_5", anchors=(0, 2, 5, 6, 7)), root / "published.pt")
    infer(["import", str(root / "published.pt"), "--target", str(root / "target"), "--out", str(root / "imported")])
    save_tiny_target(root / "other", "qwen3_5", 9)
    return root


def fit(root: Path, run: Path, monkeypatch, *options: str) -> Path:
    """Two optimizer steps; returns the drafter folder."""
    run.mkdir(exist_ok=True)
    monkeypatch.chdir(run)
    monkeypatch.setenv("SPD_CACHE", str(root / "cache"))
    limits = ["--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "1"]
    main(["fit", "--config", str(CONFIG), "--model.target", str(root / "target"), *limits, *options])
    return run / "runs" / "debug" / "drafter"


def test_training_begins_with_the_very_same_drafter(root: Path, tmp_path: Path, monkeypatch) -> None:
    """With nothing changed and steps of no size, the drafter that comes out is bit for bit the one that went in."""
    same = [
        "--model.init_from",
        str(root / "own"),
        "--data.draft_vocab",
        str(root / "own"),
        "--model.rope_theta",
        "1e4",
    ]
    folder = fit(root, tmp_path, monkeypatch, *same, "--model.lr", STANDING_STILL)
    before, after = load_drafter(root / "own").module, load_drafter(folder)
    assert after.module.config == before.config
    for name, value in before.state_dict().items():
        assert torch.equal(after.module.state_dict()[name], value), name
    assert after.record["provenance"]["init_from"] == str(root / "own")
    assert after.record["provenance"]["data"] == [
        {"path": "debug-dialogues", "format": "auto", "limit": 100, "weight": 1.0}
    ]


def test_an_imported_drafter_is_trained_on_as_it_is_and_its_gates_move(
    root: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    published = ["--model.anchors", "[0, 2, 5, 6, 7]", "--model.rows", "shared", "--model.feature_norm", "none"]
    source = ["--model.init_from", str(root / "imported"), "--data.draft_vocab", str(root / "imported")]
    with pytest.warns(UserWarning, match="never the deepest"):
        folder = fit(root, tmp_path, monkeypatch, *published, *source, "--model.rope_theta", "1e4")
    before, after = load_drafter(root / "imported").module, load_drafter(folder).module
    assert after.config == before.config and after.config.gated_attention and after.config.rotary_dims == 4
    assert torch.equal(after.features.kept_projection_2, before.features.kept_projection_2)
    moved = [name for name, value in before.named_parameters() if not torch.equal(after.get_parameter(name), value)]
    assert moved == [name for name, _ in before.named_parameters()]
    gates = slice(16, 32)  # of the first head
    for layer, original in zip(after.layers, before.layers, strict=True):
        assert not torch.equal(layer.attention.q_proj.weight[gates], original.attention.q_proj.weight[gates])


def test_what_differs_is_listed_and_what_computes_something_else_is_warned_of(
    root: Path, tmp_path: Path, monkeypatch
) -> None:
    hub, listed = [], []
    monkeypatch.setattr(distillation, "rank_zero_info", listed.append)

    def snapshot_download(repo: str, **options) -> str:
        hub.append((repo, options["revision"]))
        return str(root / "imported")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    options = ["--model.init_from", "hf://someone/drafter", "--model.gated_attention", "false"]
    with pytest.warns(UserWarning, match="init_from") as warned:
        folder = fit(root, tmp_path, monkeypatch, *options, "--model.num_spec_layers", "3")
    assert set(hub) == {("someone/drafter", None)}
    said = [str(warning.message) for warning in warned if "init_from" in str(warning.message)]
    for line in (
        "gated_attention is False, the drafter was trained with True",
        "rope_theta is 1000000.0, the drafter was trained with 10000.0",
        "feature_norm is rms, the drafter was trained with none",
    ):
        assert f"init_from hf://someone/drafter: {line}: the same weights compute something else" in said
    for line in (
        "rows is exact",
        "layers.2: initialised",
        "layers.1.attention.q_proj.weight: the gates are left out",
        "features: initialised",
        "lm_head: ",
    ):
        assert f"init_from hf://someone/drafter: {line}" in "\n".join(listed)
    assert load_drafter(folder).module.config.partial_rotary_factor == 0.25  # as in the drafter it began with


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model.init_from", "ROOT/eagle"], "method 'eagle3', but this run trains a Pipeline Draft Module"),
        (["--model.init_from", "ROOT/own", "--model.target", "ROOT/other"], "num_layers=8, but this run's has 9"),
        (["--model.init_from", "ROOT/absent"], "no drafter here"),
        (["--model.init_from", "someone/absent"], "someone/absent: no drafter here (there is no such local folder)"),
    ],
)
def test_mistakes_are_one_line(
    root: Path, options: list[str], message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        fit(root, tmp_path, monkeypatch, *(option.replace("ROOT", str(root)) for option in options))
    assert ended.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(errors) == 1 and message in errors[0]
