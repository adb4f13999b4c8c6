"""The published EAGLE-3 format: what is written is read back, and what is foreign or damaged is said in one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd_lightning.modules.eagle.eagle_files import read_published, write_published
from tests.modules.eagle.drafters import make_eagle

TARGET = {"vocab_size": 264}


@pytest.fixture
def drafter():
    return make_eagle(8, torch.float32)


@pytest.fixture
def folder(tmp_path: Path, drafter) -> Path:
    write_published(tmp_path / "published", drafter.state_dict(), drafter.config, TARGET, torch.float32)
    return tmp_path / "published"


def change(folder: Path, tensors: dict | None = None, **config) -> None:
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def test_a_drafter_comes_back_bit_for_bit(folder: Path, drafter) -> None:
    read = read_published(folder, 8, 259)
    assert read.config == drafter.config and read.embedding is None
    assert read.token_ids == tuple(range(0, 120, 3))
    state = drafter.state_dict()
    assert read.state.keys() == state.keys()
    assert all(torch.equal(read.state[name], value) for name, value in state.items())


def test_the_files_are_those_of_published_drafters(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == {
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
        "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight",
        *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }  # fmt: skip
    assert tensors["fc.weight"].shape == (32, 96) and tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 64)
    # Draft id 5 is target id 15: the table holds the difference.
    assert tensors["d2t"].dtype == torch.int64 and tensors["d2t"][:6].tolist() == [0, 2, 4, 6, 8, 10]
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero().flatten().tolist() == list(range(0, 120, 3))
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["draft_vocab_size"], config["vocab_size"]) == (1, 40, 264)


def test_a_table_that_does_not_ascend_is_put_in_order_with_its_head_rows(folder: Path, drafter) -> None:
    tensors = load_file(folder / "model.safetensors")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(40) * 3
    change(folder, tensors | {"d2t": ids[order] - torch.arange(40), "lm_head.weight": tensors["lm_head.weight"][order]})
    read = read_published(folder, 8, 259)
    assert read.token_ids == tuple(ids.tolist())
    assert torch.equal(read.state["lm_head.weight"], drafter.lm_head.weight)


def test_without_a_table_all_tokens_are_draft_tokens(folder: Path) -> None:
    """The rows beyond the tokenizer's tokens are padding."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["d2t"], tensors["t2d"]
    rows, embedding = torch.randn(264, 32), torch.randn(264, 32)
    change(folder, tensors | {"lm_head.weight": rows, "embed_tokens.weight": embedding})
    read = read_published(folder, 8, 259)
    assert read.token_ids == tuple(range(259)) and read.config.draft_vocab_size == 259
    assert torch.equal(read.state["lm_head.weight"], rows[:259])
    assert read.embedding is not None and torch.equal(read.embedding, embedding)


def test_half_precision_is_half_precision(tmp_path: Path, drafter) -> None:
    write_published(tmp_path, drafter.state_dict(), drafter.config, TARGET, torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["fc.weight"].dtype == torch.bfloat16 and tensors["d2t"].dtype == torch.int64
    read = read_published(tmp_path, 8, 259)
    assert torch.equal(read.state["fc.weight"], drafter.fc.weight.bfloat16().float())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads"),
        ({"intermediate_size": 50}, "is not what config.json says"),
    ],
)
def test_what_would_be_computed_in_another_way_is_refused(folder: Path, config: dict, message: str) -> None:
    change(folder, **config)
    with pytest.raises(ValueError, match=message):
        read_published(folder, 8, 259)


def test_damaged_and_foreign_folders_are_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        read_published(tmp_path, 8, 259)
    with pytest.raises(ValueError, match="the target has 100 tokens"):
        read_published(folder, 8, 100)
    with pytest.raises(ValueError, match="at least 7 layers"):
        read_published(folder, 4, 259)
    tensors = load_file(folder / "model.safetensors")
    change(folder, tensors | {"midlayer.self_attn.q_norm.weight": torch.ones(16)})
    with pytest.raises(ValueError, match="q_norm"):
        read_published(folder, 8, 259)
    change(folder, {name: value for name, value in tensors.items() if name != "fc.weight"})
    with pytest.raises(ValueError, match=r"fc\.weight is missing"):
        read_published(folder, 8, 259)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="damaged"):
        read_published(folder, 8, 259)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        read_published(folder, 8, 259)
