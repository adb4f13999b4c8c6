import pytest
import torch
from transformers import AutoModelForCausalLM

from spd_lightning.modules.drafter import DrafterConfig, PipelineDraftModule
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.model_size import DrafterSize, read_target_size, resolve_stage_layers
from spd_lightning.modules.target_files import TINY_FAMILIES
from spd_lightning.modules.tiny_target import tiny_config


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_counted_parameters_are_those_of_the_model(tmp_path, family, tied):
    config = tiny_config(family, num_layers=8, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size = read_target_size(str(tmp_path))
    assert size.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (size.num_layers, size.hidden_size, size.head_dim) == (8, 32, 16)


@pytest.mark.parametrize("feature_norm", ["none", "rms"])
@pytest.mark.parametrize(("rows", "gated"), [("exact", False), ("shared", False), ("shared", True)])
def test_counted_parameters_are_those_of_the_drafter(tmp_path, rows, gated, feature_norm):
    tiny_config("llama", num_layers=8).save_pretrained(tmp_path)
    target = read_target_size(str(tmp_path))
    layout = FeatureLayout.build(8, 4, anchors=[0, 3, 7], rows=rows)
    given = dict(intermediate_size=40, feature_norm=feature_norm, gated_attention=gated)
    size = DrafterSize.of(target, layout, 3, draft_vocab_size=77, **given)
    drafter = PipelineDraftModule(
        DrafterConfig(
            num_stages=4,
            stage_layers=layout.stage_layers,
            anchors=layout.anchors,
            rows=rows,
            num_spec_layers=3,
            hidden_size=32,
            intermediate_size=40,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rope_theta=1e4,
            rms_norm_eps=1e-6,
            feature_norm=feature_norm,
            draft_vocab_size=77,
            gated_attention=gated,
        )
    )
    assert size.num_parameters == sum(parameter.numel() for parameter in drafter.parameters())
    assert size.activation_bytes(10, 5) == 10 * size.activation_bytes(1, 5) > 10 * size.activation_bytes(1, 4)


def test_bytes_follow_the_dtype(tmp_path):
    tiny_config("qwen3", dtype="bfloat16").save_pretrained(tmp_path)
    size = read_target_size(str(tmp_path))
    assert size.bytes_per_parameter() == 2
    assert size.bytes_per_parameter("float32") == 4
    with pytest.raises(ValueError, match="target_dtype='int3'"):
        size.bytes_per_parameter("int3")


def test_unsupported_family_is_refused_with_the_supported_ones(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="type 'gpt2'; supported are llama, qwen3, qwen3_5_text"):
        read_target_size(str(tmp_path))


def test_layers_of_a_type_that_is_not_supported_are_refused(tmp_path):
    config = tiny_config("qwen3", 4, layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=8)
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layers of type sliding_attention; supported are full_attention, linear"):
        read_target_size(str(tmp_path))


def test_layers_of_both_types_are_counted_each_in_its_place(tmp_path):
    config = tiny_config(
        "qwen3_5", 4, layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"]
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size = read_target_size(str(tmp_path))
    counted = [size.layer_parameters(layer_type) for layer_type in size.layer_types]
    assert counted == [sum(weight.numel() for weight in layer.parameters()) for layer in model.model.layers]
    assert counted[0] != counted[1]
    assert size.head_parameters == model.lm_head.weight.numel()


def test_balanced_stages_count_the_head_as_layers(tmp_path):
    # A layer has 10,816 weights, the head of 1,000 rows 32,000: nearly as many as three layers.
    tiny_config("llama", num_layers=9, vocab_size=1000).save_pretrained(tmp_path)
    size = read_target_size(str(tmp_path))
    assert (size.layer_parameters("full_attention"), size.head_parameters) == (10_816, 32_000)
    assert resolve_stage_layers(str(tmp_path), 3, "balanced") == (4, 4, 1)


def test_stage_layers_that_are_given_are_kept(tmp_path):
    assert resolve_stage_layers("not looked at", 2, [3, 5]) == [3, 5]
    assert resolve_stage_layers("not looked at", 2, None) is None
    with pytest.raises(ValueError, match="stage_layers='even': give a list of layers, 'balanced', or nothing"):
        resolve_stage_layers("not looked at", 2, "even")
    tiny_config("llama", num_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="at most 2 stages"):
        resolve_stage_layers(str(tmp_path), 3, "balanced")
