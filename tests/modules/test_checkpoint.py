"""Drafter folders: what is written comes back, and every damaged or foreign folder gives one clear message."""

import json
import resource
import shutil
from pathlib import Path

import jaxtyping
import pytest
import torch
from safetensors.torch import load_file, save_file

from spd_lightning.modules.checkpoint import drafter_record, load_drafter, save_drafter, save_weights
from spd_lightning.modules.distillation import default_settings
from spd_lightning.modules.draft_vocab import DraftVocab
from spd_lightning.modules.drafter_config import DrafterConfig, RopeScaling
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target import target_shape
from spd_lightning.modules.tiny_target import tiny_config
from tests.modules.conftest import make_drafter

LAYOUT = FeatureLayout.build(8, 4)


def write_folder(folder: Path, layout: FeatureLayout, **overrides) -> Path:
    drafter = make_drafter(layout, torch.float32, **overrides)
    record = drafter_record(
        drafter.config,
        target_name="tiny",
        target=target_shape(tiny_config("llama"), "tiny"),
        tokenizer={"num_tokens": 259, "hash": "abc", "template_hash": "def", "eos_token_ids": [258]},
        draft_vocab=DraftVocab(tuple(drafter.draft_token_ids.tolist()), provenance={"tokenizer_name": "tiny"}),
        metrics={"val/s0": 2.5},
    )
    save_drafter(folder, drafter.state_dict(), record)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "drafter", LAYOUT)


def test_a_drafter_comes_back_bit_for_bit(folder: Path) -> None:
    original = make_drafter(LAYOUT, torch.float32)
    read = load_drafter(folder)
    assert read.module.config == original.config
    for name, value in original.state_dict().items():
        assert torch.equal(read.module.state_dict()[name], value), name
    assert read.record["provenance"]["metrics"] == {"val/s0": 2.5}
    assert not read.module.training and not any(p.requires_grad for p in read.module.parameters())
    half = load_drafter(folder, torch.bfloat16).module
    assert half.lm_head.weight.dtype == torch.bfloat16 and half.draft_token_ids.dtype == torch.int64


def test_whoever_may_read_the_configuration_may_read_the_weights(folder: Path) -> None:
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


@pytest.mark.parametrize("schedule", ["pre_step", "post_step"])
def test_the_schedule_travels_in_the_folder(schedule: str, tmp_path: Path) -> None:
    layout = FeatureLayout.build(8, 4, schedule=schedule)
    read = load_drafter(write_folder(tmp_path, layout))
    assert read.module.layout == layout
    assert read.record["schedule"] == read.record["drafter"]["schedule"] == schedule


def test_a_folder_written_before_there_were_two_schedules_is_pre_step(folder: Path) -> None:
    record = json.loads((folder / "config.json").read_text())
    del record["drafter"]["schedule"]
    (folder / "config.json").write_text(json.dumps(record))
    assert load_drafter(folder).module.layout == LAYOUT and LAYOUT.schedule == "pre_step"
    edit(folder, schedule="post_step")
    with pytest.raises(ValueError, match=r"schedule='post_step', but this release reads .* with 'pre_step'"):
        load_drafter(folder)


def test_an_unknown_schedule_in_a_folder_gives_one_line(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside tests
    edit_drafter(folder, schedule="mid_step")
    edit(folder, schedule="mid_step")
    with pytest.raises(ValueError, match=r"config.json: schedule='mid_step': must be 'pre_step' or 'post_step'$"):
        load_drafter(folder)


def test_nothing_but_the_two_files_is_left(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "drafter.safetensors"]


def test_the_draft_vocabulary_of_a_drafter_folder_can_be_used_again(folder: Path) -> None:
    vocab = DraftVocab.load(folder, 259, "abc")
    assert list(vocab.token_ids) == make_drafter(LAYOUT).draft_token_ids.tolist()
    with pytest.raises(ValueError, match="another tokenizer"):
        DraftVocab.load(folder, 259, "other")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("config", ['{"architectures": ["LlamaForCausalLM"]}', "{}", "[]", "{", "\udcff"])
def test_a_folder_of_something_else_is_left_as_it_is(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config, encoding="utf-8", errors="surrogateescape")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"config.json is not that of such a drafter and would be lost"):
        write_folder(tmp_path, LAYOUT)
    with pytest.raises(ValueError, match="would be lost"):
        save_weights(tmp_path / "model.safetensors", {}, {"architectures": ["LlamaForCausalLMEagle3"]})
    assert contents(tmp_path) == before


def test_a_drafter_replaces_another_one(folder: Path) -> None:
    layout = FeatureLayout.build(8, 2)
    assert load_drafter(write_folder(folder, layout)).module.layout == layout


def test_a_folder_in_place_of_the_weights_leaves_the_configuration(folder: Path) -> None:
    (folder / "drafter.safetensors").unlink()
    (folder / "drafter.safetensors").mkdir()
    before = contents(folder)
    with pytest.raises(ValueError, match=r"drafter.safetensors is a folder"):
        write_folder(folder, LAYOUT)
    assert contents(folder) == before


def test_without_space_the_drafter_before_stays(folder: Path) -> None:
    before, (soft, hard) = contents(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match=r"drafter.safetensors cannot be written"):
            write_folder(folder, FeatureLayout.build(8, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(folder) == before and len(list(folder.iterdir())) == 2


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_drafter(folder: Path, **changes) -> None:
    edit(folder, drafter=json.loads((folder / "config.json").read_text())["drafter"] | changes)


def drop_weight(folder: Path) -> None:
    state = load_file(folder / "drafter.safetensors")
    del state["norm.weight"]
    save_file(state, folder / "drafter.safetensors")


def move_inside(folder: Path) -> None:
    shutil.copytree(folder, folder / "drafter")
    (folder / "config.json").unlink()


def change_vocabulary(folder: Path) -> None:
    record = json.loads((folder / "config.json").read_text())
    record["draft_vocab"]["token_ids"][-1] += 1
    edit(folder, draft_vocab=record["draft_vocab"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            r"no drafter here \(config.json is missing\); `spd-train fit`",
        ),
        (lambda folder: shutil.rmtree(folder), "no drafter here .there is no such folder"),
        (move_inside, "did you mean its drafter/"),
        (lambda folder: (folder / "drafter.safetensors").unlink(), "drafter.safetensors is missing"),
        (lambda folder: (folder / "drafter.safetensors").write_bytes(b"cut"), "not a readable safetensors file"),
        (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a drafter of this project"),
        (lambda folder: edit(folder, format_version=99), "format version 99"),
        (lambda folder: edit(folder, format="other"), "not a drafter of this project"),
        (lambda folder: edit(folder, drafter={}), "incomplete"),
        (lambda folder: edit(folder, schedule="post_step"), "schedule='post_step', but .* with 'pre_step'"),
        (lambda folder: edit_drafter(folder, schedule="post_step"), "schedule='pre_step', but .* with 'post_step'"),
        (lambda folder: edit(folder, norm_convention="one_plus_weight"), "norm_convention='one_plus_weight'"),
        (lambda folder: edit_drafter(folder, rope_theta=5e5), "rotary="),
        (lambda folder: edit_drafter(folder, num_stages=8), "num_stages=8, but stage_layers"),
        (lambda folder: edit_drafter(folder, stage_layers=[2, 2, 2, 4]), "num_layers=10, but target.num_layers=8"),
        (lambda folder: edit_drafter(folder, num_kv_heads=0), "num_kv_heads=0"),
        (drop_weight, "does not fit config.json.*norm.weight"),
        (change_vocabulary, "draft vocabularies .* differ"),
    ],
)
def test_a_damaged_folder_gives_one_line(damage, message, folder: Path) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=message) as raised:
        load_drafter(folder)
    assert "\n" not in str(raised.value)


def test_the_documentation_names_every_key(folder: Path) -> None:
    """Those of the record, and those of the drafter in it."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
    record = json.loads((folder / "config.json").read_text())
    assert [key for key in (*record, *record["drafter"]) if f"`{key}`" not in page] == []


def test_scaled_rotary_positions_travel_in_the_folder(tmp_path: Path) -> None:
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    write_folder(tmp_path, LAYOUT, rope_scaling=scaling, gated_attention=True, partial_rotary_factor=0.5)
    read = load_drafter(tmp_path)
    assert read.module.config.rope_scaling == scaling and read.module.config.gated_attention
    assert read.record["rotary"] == {
        "theta": 1e4,
        "dims": 8,
        "layout": "half_split",
        "scaling": {
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    edit_drafter(tmp_path, partial_rotary_factor=0.25)
    with pytest.raises(ValueError, match="rotary="):
        load_drafter(tmp_path)
    edit_drafter(tmp_path, partial_rotary_factor=0.2)
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0.2: of head_dim=16 it leaves 3"):
        load_drafter(tmp_path)


def test_a_folder_written_before_there_were_gates_has_none(folder: Path) -> None:
    record = json.loads((folder / "config.json").read_text())
    for name in ("gated_attention", "partial_rotary_factor", "rope_scaling", "kept_projections"):
        del record["drafter"][name]
    (folder / "config.json").write_text(json.dumps(record))
    assert load_drafter(folder).module.config == make_drafter(LAYOUT).config
    assert default_settings(DrafterConfig) == {
        "schedule": "pre_step",
        "gated_attention": False,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "kept_projections": [],
    }
