"""Stages against the whole model of `AutoModelForCausalLM`, in bits; and which files are opened for them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from spd_lightning.inference import stage_loading
from spd_lightning.inference.stage_loading import StageModules, load_stage
from spd_lightning.modules.target import FrozenTarget
from spd_lightning.modules.tiny_target import random_model, save_tiny_target, tiny_config
from tests.modules.conftest import FAMILIES

NUM_LAYERS = 6
ENDS = (0, 1, 4, 6)
"""Of three stages: the first of Qwen3.5's has no full attention, the second begins in the middle of its pattern."""
CHECKPOINTS = (*FAMILIES, "wrapped")


def save_target(folder: Path, kind: str, shard_bytes: int | None = None, **overrides: Any) -> Path:
    """A target of a family, or (`wrapped`) of Qwen3.5 with a vision part and a part for multi-token prediction."""
    if kind == "wrapped":
        text = tiny_config("qwen3_5", NUM_LAYERS, **{"dtype": torch.float32} | overrides)
        vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
        tied = text.tie_word_embeddings
        model: Any = Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=tied)
        ).to(text.dtype)
    else:
        model = random_model(tiny_config(kind, NUM_LAYERS, **overrides))
    model.save_pretrained(folder, max_shard_size=shard_bytes or 10**9)
    if kind == "wrapped":
        add_tensor(folder, "mtp.layers.0.mlp.up_proj.weight", torch.ones(3, 3))
    return folder


def weight_map(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return json.loads(index.read_text())["weight_map"]
    return dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")


def rewrite(folder: Path, file: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        others = {key: name for key, name in content["weight_map"].items() if name != file}
        index.write_text(json.dumps(content | {"weight_map": others | dict.fromkeys(tensors, file)}))


def add_tensor(folder: Path, key: str, tensor: torch.Tensor) -> None:
    file = next(iter(weight_map(folder).values()))
    rewrite(folder, file, load_file(folder / file) | {key: tensor})


def drop_tensor(folder: Path, key: str) -> None:
    file = weight_map(folder)[key]
    rewrite(folder, file, {name: tensor for name, tensor in load_file(folder / file).items() if name != key})


def load_stages(folder: Path, **settings: Any) -> list[StageModules]:
    last = len(ENDS) - 2
    return [
        load_stage(str(folder), ENDS[j], ENDS[j + 1], with_embedding=j == 0, with_head=j == last, **settings)
        for j in range(last + 1)
    ]


@torch.no_grad()
def logits_of(stages: list[StageModules], ids: torch.Tensor) -> torch.Tensor:
    embedding, norm, head = stages[0].embedding, stages[-1].norm, stages[-1].head
    assert embedding is not None and norm is not None and head is not None
    hidden = embedding(ids)
    positions = torch.arange(ids.shape[1])[None]
    for stage in stages:
        rotary = stage.rotary(hidden, positions)
        for layer in stage.layers:
            hidden = layer(hidden, position_embeddings=rotary, attention_mask=None, position_ids=positions)
    return head(norm(hidden))


def tokens() -> torch.Tensor:
    return torch.randint(0, 259, (1, 23), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("shard_bytes", [None, 40_000], ids=["single", "sharded"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_the_stages_together_are_the_whole_model_in_bits(kind, tied, shard_bytes, tmp_path) -> None:
    folder = save_target(tmp_path / "target", kind, shard_bytes, tie_word_embeddings=tied)
    assert (len(set(weight_map(folder).values())) > 1) is (shard_bytes is not None)
    whole = FrozenTarget.from_pretrained(str(folder)).model
    stages = load_stages(folder)
    with torch.no_grad():
        assert torch.equal(logits_of(stages, tokens()), whole(input_ids=tokens()).logits)


def test_a_wrapped_checkpoint_saved_again_as_a_text_model_keeps_its_keys_and_loads(tmp_path) -> None:
    folder = save_target(tmp_path / "target", "wrapped")
    whole: Any = AutoModelForCausalLM.from_pretrained(folder)
    whole.save_pretrained(tmp_path / "text")
    assert "model.language_model.norm.weight" in weight_map(tmp_path / "text")
    with torch.no_grad():
        assert torch.equal(logits_of(load_stages(tmp_path / "text"), tokens()), whole(input_ids=tokens()).logits)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float64"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_weights_have_the_dtype_and_the_bits_of_the_whole_model(kind, stored, dtype, tmp_path) -> None:
    folder = save_target(tmp_path / "target", kind, dtype=stored)
    if kind in ("qwen3_5", "wrapped"):  # as in published checkpoints, which keep these in float32
        weights = load_file(folder / "model.safetensors")
        kept = {
            key: value.float() for key, value in weights.items() if key.endswith(("A_log", "linear_attn.norm.weight"))
        }
        assert kept
        rewrite(folder, "model.safetensors", weights | kept)
    whole: Any = FrozenTarget.from_pretrained(str(folder), dtype=dtype).model
    assert whole.dtype == (stored if dtype == "auto" else getattr(torch, dtype))
    stages = load_stages(folder, dtype=dtype)
    loaded = {
        f"model.layers.{first + index}.{name}": value
        for first, stage in zip(ENDS, stages, strict=False)
        for index, layer in enumerate(stage.layers)
        for name, value in layer.state_dict().items()
    }
    loaded["model.embed_tokens.weight"] = stages[0].embedding.weight
    loaded["model.norm.weight"] = stages[-1].norm.weight
    loaded["lm_head.weight"] = stages[-1].head.weight
    expected = whole.state_dict()
    assert loaded.keys() == expected.keys()
    for name, value in loaded.items():
        assert value.dtype == expected[name].dtype == whole.dtype and torch.equal(value, expected[name]), name
    for stage in stages:
        assert torch.equal(stage.rotary.inv_freq, whole.model.rotary_emb.inv_freq)
        assert stage.rotary.inv_freq.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(logits_of(stages, tokens()), whole(input_ids=tokens()).logits)


@pytest.mark.parametrize("kind", ["qwen3_5", "wrapped"])
def test_a_dtype_that_no_configuration_states_is_the_files(kind, tmp_path) -> None:
    folder = save_target(tmp_path / "target", kind, 40_000, dtype=torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        part.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    for file in sorted(set(weight_map(folder).values()))[1:]:  # the first file decides, for every stage
        rewrite(folder, file, {key: value.float() for key, value in load_file(folder / file).items()})
    assert FrozenTarget.from_pretrained(str(folder)).model.dtype == torch.bfloat16
    for stage in load_stages(folder):
        assert {weight.dtype for weight in stage.layers.parameters()} == {torch.bfloat16}
        assert stage.config.dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_is_frozen_numbered_from_0_and_describes_itself(family: str, tmp_path) -> None:
    folder = save_target(tmp_path / "target", family)
    whole: Any = AutoModelForCausalLM.from_pretrained(folder)
    kinds = whole.config.layer_types if family != "llama" else ["full_attention"] * NUM_LAYERS
    stages = load_stages(folder)
    for stage, first, last in zip(stages, ENDS[:-1], ENDS[1:], strict=True):
        assert stage.layer_types == tuple(kinds[first:last]) and len(stage.layers) == last - first
        assert stage.config.num_hidden_layers == last - first and stage.vocab_size == whole.config.vocab_size
        assert stage.config._attn_implementation == whole.config._attn_implementation == "sdpa"
        for index, (layer, kind) in enumerate(zip(stage.layers, stage.layer_types, strict=True)):
            mixer = layer.linear_attn if kind == "linear_attention" else layer.self_attn
            assert mixer.layer_idx == index
        for module in (stage.layers, stage.embedding, stage.norm, stage.head, stage.rotary):
            if module is not None:
                assert not any(part.training for part in module.modules())
                assert not any(weight.requires_grad or weight.is_meta for weight in module.parameters())
    assert [stage.embedding is not None for stage in stages] == [True, False, False]
    assert [stage.norm is not None for stage in stages] == [False, False, True]
    assert [stage.head is not None for stage in stages] == [False, False, True]


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        dict(rope_type="yarn", factor=4.0),
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary_frequencies_are_the_whole_models(rope, tmp_path) -> None:
    rope = rope | dict(rope_theta=1e4, original_max_position_embeddings=64)
    folder = save_target(tmp_path / "target", "llama", rope_parameters=rope)
    whole: Any = FrozenTarget.from_pretrained(str(folder)).model
    plain = tiny_config("llama").rope_parameters["rope_theta"] ** (-torch.arange(0, 16, 2) / 16)
    stages = load_stages(folder)
    for stage in stages:
        assert torch.equal(stage.rotary.inv_freq, whole.model.rotary_emb.inv_freq)
        assert not torch.allclose(stage.rotary.inv_freq, plain)
    with torch.no_grad():
        assert torch.equal(logits_of(stages, tokens()), whole(input_ids=tokens()).logits)


def test_stages_have_configurations_and_memory_of_their_own(tmp_path) -> None:
    folder = save_target(tmp_path / "target", "llama")
    one, two = load_stage(str(folder), 0, 2, True, True), load_stage(str(folder), 0, 2, True, True)
    one.config.hidden_size = 1
    for weight in one.layers.parameters():
        weight.zero_()
    assert two.config.hidden_size == 32 and all(weight.any() for weight in two.layers.parameters())
    (folder / "model.safetensors").write_bytes(b"")  # nothing is read later
    assert all(weight.any() for weight in two.layers.parameters())


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("tied", [False, True])
def test_only_the_files_that_hold_the_stage_are_opened(kind, tied, tmp_path, monkeypatch) -> None:
    folder = save_target(tmp_path / "target", kind, 20_000, tie_word_embeddings=tied)
    prefix = "model.language_model." if kind == "wrapped" else "model."
    files = weight_map(folder)
    opened: list[str] = []
    original = stage_loading.safe_open

    def recording(path: str, **settings: Any) -> Any:
        opened.append(Path(path).name)
        return original(path, **settings)

    monkeypatch.setattr(stage_loading, "safe_open", recording)
    for first, last, with_embedding, with_head in [(0, 1, True, False), (1, 4, False, False), (4, 6, False, True)]:
        opened.clear()
        load_stage(str(folder), first, last, with_embedding, with_head)
        wanted = [f"{prefix}layers.{i}." for i in range(first, last)]
        wanted += [f"{prefix}embed_tokens."] if with_embedding or (with_head and tied) else []
        wanted += [f"{prefix}norm.", *([] if tied else ["lm_head."])] if with_head else []
        assert sorted(opened) == sorted({files[key] for key in files if key.startswith(tuple(wanted))})
        assert set(opened) < set(files.values())


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("with_embedding", [False, True])
def test_a_tied_head_is_the_embedding_even_where_the_file_has_a_head(kind, with_embedding, tmp_path) -> None:
    folder = save_target(tmp_path / "target", kind, tie_word_embeddings=True)
    add_tensor(folder, "lm_head.weight", torch.full((264, 32), 7.0))
    stage = load_stage(str(folder), 4, 6, with_embedding=with_embedding, with_head=True)
    embedding = load_stage(str(folder), 0, 1, with_embedding=True, with_head=False).embedding
    assert stage.head is not None and embedding is not None
    assert torch.equal(stage.head.weight, embedding.weight) and embedding.weight.std() > 0
    assert stage.embedding is None or stage.head.weight is stage.embedding.weight


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untied_target_without_its_head_is_refused(family: str, tmp_path) -> None:
    folder = save_target(tmp_path / "target", family)
    drop_tensor(folder, "lm_head.weight")
    load_stage(str(folder), 0, 3, with_embedding=True, with_head=False)
    with pytest.raises(ValueError, match=r"lacks 1 weights \(lm_head.weight, ...\): the checkpoint is incomplete"):
        load_stage(str(folder), 3, 6, with_embedding=False, with_head=True)


def test_a_missing_file_is_named_by_the_stage_that_needs_it(tmp_path) -> None:
    folder = save_target(tmp_path / "target", "llama", 20_000)
    file = weight_map(folder)["model.layers.5.mlp.up_proj.weight"]
    (folder / file).unlink()
    load_stage(str(folder), 0, 2, with_embedding=True, with_head=False)
    with pytest.raises(ValueError, match=f"cannot load the weights of layers 5 to 6 of .*the file {file} is missing"):
        load_stage(str(folder), 4, 6, with_embedding=False, with_head=False)


@pytest.mark.parametrize("shard_bytes", [None, 20_000])
def test_a_file_that_was_cut_short_is_named(shard_bytes, tmp_path) -> None:
    folder = save_target(tmp_path / "target", "llama", shard_bytes)
    path = folder / weight_map(folder)["model.layers.5.mlp.up_proj.weight"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"cannot load the weights .*{path} is damaged"):
        load_stage(str(folder), 4, 6, with_embedding=False, with_head=False)


def test_a_folder_without_safetensors_is_refused(tmp_path) -> None:
    tiny_config("llama", 2).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        load_stage(str(tmp_path), 0, 1, True, False)


@pytest.mark.parametrize("name", ["/no/such/folder", "nobody/no-such-model"])
def test_a_target_that_cannot_be_reached_gives_one_line(name: str) -> None:
    with pytest.raises(ValueError, match="cannot load the configuration of") as raised:
        load_stage(name, 0, 1, True, True)
    assert name in str(raised.value) and "\n" not in str(raised.value)


def test_weights_that_the_layers_do_not_have_are_refused(tmp_path) -> None:
    folder = save_target(tmp_path / "target", "llama")
    add_tensor(folder, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))  # as old checkpoints have it
    add_tensor(folder, "model.layers.1.mlp.up_proj.weight_scale_inv", torch.ones(1))
    load_stage(str(folder), 0, 1, True, True)
    with pytest.raises(ValueError, match=r"1 weights that its layers do not \(model.layers.1.mlp.up_proj.weight_scale"):
        load_stage(str(folder), 0, 2, True, True)


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (2, 2), (3, 2), (4, 7)])
def test_a_stage_must_lie_in_the_target(first: int, last: int, tmp_path) -> None:
    folder = save_target(tmp_path / "target", "llama")
    with pytest.raises(ValueError, match="make no stage: a stage has at least one layer, and the target has 6"):
        load_stage(str(folder), first, last, False, False)


def test_unsupported_targets_are_refused(tmp_path) -> None:
    GPT2Config(n_layer=1, n_embd=8, n_head=1).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="'gpt2', which is not supported"):
        load_stage(str(tmp_path / "gpt2"), 0, 1, True, True)
    sliding = dict(use_sliding_window=True, sliding_window=4, max_window_layers=3)
    tiny_config("qwen3", NUM_LAYERS, **sliding).save_pretrained(tmp_path / "sliding")
    with pytest.raises(ValueError, match="has layers of type sliding_attention, which are not supported"):
        load_stage(str(tmp_path / "sliding"), 2, 4, False, False)


def test_a_tiny_random_target_is_made_on_the_spot(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("spd_lightning.modules.target_files.default_cache_dir", lambda: tmp_path)
    made = load_stage("tiny-random-qwen3", 2, 8, with_embedding=False, with_head=True)
    saved = load_stage(str(save_tiny_target(tmp_path / "own", "qwen3")), 2, 8, with_embedding=False, with_head=True)
    for ours, theirs in zip(made.layers.parameters(), saved.layers.parameters(), strict=True):
        assert torch.equal(ours, theirs)
