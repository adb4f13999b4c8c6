"""The frozen target against Transformers' own forward, for every family, with the real layer counts and types."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from spd_lightning.modules import target as target_module
from spd_lightning.modules.target import FrozenTarget, read_target_shape, target_shape
from spd_lightning.modules.tiny_target import random_model, save_tiny_target, tiny_config
from tests.modules.conftest import make_target

REAL_LAYERS = [
    ("qwen3_5", 32, {}),
    ("qwen3_5", 24, {"tie_word_embeddings": True}),
    ("qwen3", 36, {}),
    ("llama", 30, {}),
]


def tokens(batch: int, seq: int) -> torch.Tensor:
    return torch.randint(0, 259, (batch, seq), generator=torch.Generator().manual_seed(seq))


@pytest.mark.parametrize(("name", "num_layers", "overrides"), REAL_LAYERS)
def test_states_are_the_ones_of_transformers_own_forward(name: str, num_layers: int, overrides: dict) -> None:
    target = make_target(name, num_layers, **overrides)
    ids = tokens(2, 19)
    anchors = (0, 1, num_layers // 2, num_layers - 1, num_layers)
    states = target.forward(ids, torch.ones_like(ids), anchors)
    own = target.model(input_ids=ids, output_hidden_states=True)
    for anchor, state in zip(anchors[:-1], states.anchors, strict=False):
        assert torch.equal(state, own.hidden_states[anchor]), f"H^{anchor}"
    raw = states.anchors[-1]
    assert not torch.allclose(raw, own.hidden_states[-1])  # Transformers' last entry is normed, H^L is not
    assert torch.equal(target.model.model.norm(raw), states.last)
    assert torch.equal(own.hidden_states[-1], states.last)
    torch.testing.assert_close(states.last @ target.head_weight.T, own.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_layers", [24, 32, 64])
def test_qwen3_5_layer_types_are_three_recurrent_to_one_attention(num_layers: int) -> None:
    kinds = tiny_config("qwen3_5", num_layers).layer_types
    assert kinds.count("full_attention") * 4 == num_layers and kinds[3::4] == ["full_attention"] * (num_layers // 4)


def test_the_final_norm_gain_is_the_factor_that_is_applied(family: str) -> None:
    target = make_target(family)
    x = torch.randn(3, 32, dtype=torch.float64)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + target.shape.rms_norm_eps).sqrt()
    expected = normed * target.final_norm_gain.double()
    torch.testing.assert_close(target.model.model.norm(x), expected, rtol=0, atol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
@pytest.mark.parametrize(("name", "num_programs"), [("llama", 1), ("qwen3_5", 2)])
def test_compiled_layers_give_the_same_states_by_few_programs(name: str, num_programs: int) -> None:
    """One program for all layers of a kind and all lengths: of Qwen3.5, attention layers and the MLP of the others."""
    plain, compiled = make_target(name, 8), make_target(name, 8)
    torch.compiler.reset()
    compiled.compile_layers()
    counters.clear()
    for seq in (40, 71, 130, 200, 9):
        ids = tokens(2, seq)
        mask = torch.ones_like(ids)
        mask[1, seq // 2 :] = 0
        expected, found = (target.forward(ids, mask, (0, 3, 7)) for target in (plain, compiled))
        for one, other in zip((*expected.anchors, expected.last), (*found.anchors, found.last), strict=True):
            torch.testing.assert_close(other[mask == 1], one[mask == 1], rtol=0, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == num_programs


def test_slow_layers_are_told_of_on_a_gpu_only(monkeypatch) -> None:
    target, other = make_target("qwen3_5"), make_target("llama")
    monkeypatch.setattr(target_module, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.warn_of_slow_layers()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.warns(
        UserWarning, match=r"flash-linear-attention and causal-conv1d not installed.*pip install -e '\.\[gpu\]'"
    ):
        target.warn_of_slow_layers()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.warn_of_slow_layers()
        monkeypatch.setattr(target_module, "find_spec", lambda name: name)
        target.warn_of_slow_layers()


def test_right_padding_is_exact(family: str) -> None:
    target = make_target(family)
    ids = tokens(2, 90)
    mask = torch.ones_like(ids)
    mask[1, 33:] = 0
    padded = target.forward(ids, mask, (0, 3, 8))
    alone = target.forward(ids[1:, :33], mask[1:, :33], (0, 3, 8))
    for long, short in zip((*padded.anchors, padded.last), (*alone.anchors, alone.last), strict=True):
        torch.testing.assert_close(long[1:, :33], short, rtol=0, atol=1e-5)


def test_hooks_are_gone_after_a_failure(family: str) -> None:
    target = make_target(family)
    with pytest.raises(IndexError):
        target.forward(torch.full((1, 3), 10_000), torch.ones(1, 3, dtype=torch.long), (0, 2))
    assert not any(module._forward_hooks for module in target.model.modules())


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_target_loads_frozen_with_its_head(family: str, tied: bool, tmp_path) -> None:
    folder = save_tiny_target(tmp_path / "target", family, 8, tie_word_embeddings=tied)
    target = FrozenTarget.from_pretrained(str(folder))
    assert target.shape.tied is tied and target.shape.num_layers == 8 and target.shape.family == family
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())
    embedding = target.model.get_input_embeddings().weight
    assert torch.equal(target.head_weight, embedding) is tied
    reference = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokens(1, 9)
    states = target.forward(ids, torch.ones_like(ids), (0,))
    torch.testing.assert_close(states.last @ target.head_weight.T, reference(input_ids=ids).logits)


@pytest.mark.parametrize(("tied", "stated"), [(False, "both"), (True, "both"), (True, "top"), (True, "text")])
def test_a_vision_wrapped_checkpoint_gives_its_text_model(tied: bool, stated: str, tmp_path) -> None:
    text = tiny_config("qwen3_5", 4, tie_word_embeddings=tied)
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    config = Qwen3_5Config(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=tied)
    wrapped = Qwen3_5ForConditionalGeneration(config).eval()
    wrapped.save_pretrained(tmp_path)
    if stated != "both":
        path = tmp_path / "config.json"
        saved = json.loads(path.read_text())
        (saved["text_config"] if stated == "top" else saved).pop("tie_word_embeddings")
        path.write_text(json.dumps(saved))
    assert read_target_shape(str(tmp_path)).num_layers == 4
    target = FrozenTarget.from_pretrained(str(tmp_path))
    ids = tokens(1, 11)
    states = target.forward(ids, torch.ones_like(ids), (0, 4))
    torch.testing.assert_close(states.last @ target.head_weight.T, wrapped(input_ids=ids).logits, rtol=0, atol=1e-5)


def test_generate_continues_left_padded_prompts(family: str) -> None:
    target = make_target(family, dtype=torch.float32)
    short, long = tokens(1, 5), tokens(1, 9)
    ids = torch.cat([torch.cat([torch.zeros(1, 4, dtype=torch.long), short], dim=1), long])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    out = target.generate(ids, mask, max_new_tokens=6)
    alone = target.generate(short, torch.ones_like(short), max_new_tokens=6)
    assert out.shape == (2, 15) and torch.equal(out[0, 4:], alone[0])


def test_generate_ignores_the_settings_of_the_checkpoint(tmp_path) -> None:
    folder = save_tiny_target(tmp_path / "target", "llama", 4)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 50.0, "max_new_tokens": 1}))
    ids = tokens(1, 8)
    plain = FrozenTarget.from_pretrained(str(folder))
    out = plain.generate(ids, torch.ones_like(ids), max_new_tokens=20)
    expected = ids
    for _ in range(20):
        states = plain.forward(expected, torch.ones_like(expected), (0,))
        expected = torch.cat([expected, (states.last[:, -1:] @ plain.head_weight.T).argmax(-1)], dim=1)
    assert torch.equal(out, expected)


def test_an_unsupported_family_is_refused_with_the_list(tmp_path) -> None:
    GPT2Config(n_layer=1, n_embd=8, n_head=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'gpt2', which is not supported; supported are llama, qwen3, qwen3_5"):
        read_target_shape(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/folder", "nobody/no-such-model"])
def test_a_target_that_cannot_be_reached_gives_one_line(name: str) -> None:
    with pytest.raises(ValueError, match="cannot load the configuration of") as raised:
        read_target_shape(name)
    message = str(raised.value)
    assert name in message and "\n" not in message and "local folder" in message


def test_an_untied_target_without_its_head_is_refused(family: str, tmp_path) -> None:
    folder = save_tiny_target(tmp_path / "target", family, 4)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights \(lm_head.weight"):
        FrozenTarget.from_pretrained(str(folder))


def test_a_tied_target_stays_tied_whatever_head_its_file_has(family: str, tmp_path) -> None:
    folder = save_tiny_target(tmp_path / "target", family, 4, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["model.embed_tokens.weight"], 7.0)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    target = FrozenTarget.from_pretrained(str(folder))
    assert torch.equal(target.head_weight, weights["model.embed_tokens.weight"])


def test_missing_weights_are_named(tmp_path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot load the weights of"):
        FrozenTarget.from_pretrained(str(tmp_path))


def test_dtype_is_honoured(tmp_path) -> None:
    folder = str(save_tiny_target(tmp_path / "target", "llama", 2))
    assert FrozenTarget.from_pretrained(folder).head_weight.dtype == torch.float32
    assert FrozenTarget.from_pretrained(folder, "bfloat16").head_weight.dtype == torch.bfloat16


def test_shape_of_head_dim_without_the_key() -> None:
    config = tiny_config("llama", head_dim=None)
    assert target_shape(config, "x").head_dim == 8
    assert random_model(config).config.num_hidden_layers == 8


def test_a_head_without_rows_for_the_draft_vocabulary_is_refused() -> None:
    target = make_target("llama")
    rows = target.head_weight.shape[0]
    assert torch.equal(target.head_rows(torch.tensor([0, rows - 1])), target.head_weight[[0, rows - 1]])
    with pytest.raises(ValueError, match=f"token id {rows}, but the head of target 'tiny' has {rows} rows"):
        target.head_rows(torch.tensor([0, rows]))


def test_damaged_weights_are_named(tmp_path) -> None:
    folder = save_tiny_target(tmp_path / "target", "llama", 2)
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match="cannot load the weights of"):
        FrozenTarget.from_pretrained(str(folder))
