"""Bytes and operations against the real modules and caches, and against facts of Qwen3.5 that are known otherwise."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.planning.costs import DELTA_RULE_FLOPS, DrafterCosts, TargetCosts
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.model_size import DrafterSize, read_target_size
from spd_lightning.modules.tiny_target import tiny_config
from tests.inference.conftest import CAPACITY, cut
from tests.modules.conftest import FAMILIES, make_drafter, make_target

MIB = 1 << 20


def num_bytes(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def tiny_costs(folder, family: str, dtype: str = "float32", length: int = 10, **overrides) -> TargetCosts:
    tiny_config(family, num_layers=8, **overrides).save_pretrained(folder)
    return TargetCosts(read_target_size(str(folder)), dtype, length)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_bytes_are_those_of_the_modules(tmp_path, family, tied):
    costs = tiny_costs(tmp_path, family, "bfloat16", tie_word_embeddings=tied)
    model = make_target(family, 8, torch.bfloat16, tie_word_embeddings=tied).model
    held = [num_bytes(*layer.parameters()) for layer in model.model.layers]
    assert [cost.weight_bytes for cost in costs.layers] == held
    assert costs.head.weight_bytes == num_bytes(model.lm_head.weight, model.model.norm.weight)
    assert costs.embedding.weight_bytes == num_bytes(model.model.embed_tokens.weight)
    assert costs.token.weight_bytes == num_bytes(*model.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cache_bytes_are_those_of_the_stages(tmp_path, family, dtype):
    costs, layout = tiny_costs(tmp_path, family, dtype), FeatureLayout.build(8, 3, stage_layers=[4, 1, 3])
    for stage in cut(make_target(family, 8, getattr(torch, dtype)), layout):
        hidden = torch.zeros(1, 2, 32, dtype=getattr(torch, dtype))
        stage.run(torch.zeros(1, 2, dtype=torch.long) if stage.number == 1 else hidden, 0)  # makes the rings
        tensors = [tensor for layer in stage.cache.layers for tensor in vars(layer).values() if torch.is_tensor(tensor)]
        kinds = costs.size.layer_types[layout.stage_ends[stage.number - 1] : layout.stage_ends[stage.number]]
        assert costs.cache_bytes(kinds, CAPACITY, slots=3 - stage.number + 1) == num_bytes(*tensors) > 0


@pytest.mark.parametrize("schedule", ["pre_step", "post_step"])
def test_drafter_bytes_are_those_of_its_session(tmp_path, schedule):
    layout = FeatureLayout.build(8, 4, anchors=[0, 3, 7], rows="shared", schedule=schedule)
    target = tiny_costs(tmp_path, "llama")
    drafter = make_drafter(layout, torch.float32)
    session = DraftSession(drafter, nn.Embedding(8, 32), CAPACITY)
    costs = DrafterCosts(DrafterSize.of(target.size, layout, 2, 40), layout, 4, length=10)
    assert costs.draft.weight_bytes == num_bytes(*drafter.parameters())
    cached = [tensor for buffer in session.buffers for tensor in (buffer.keys, buffer.values)]
    assert costs.cache_bytes(CAPACITY) == num_bytes(*cached, session.states)


def test_a_draft_projects_one_row_for_each_depth():
    layout = FeatureLayout.build(8, 4, anchors=[0, 3, 7])  # stages end at 2, 4, 6, 8
    size = DrafterSize(
        hidden_size=10, intermediate_size=20, query_width=8, kv_width=4, head_dim=4, num_layers=3,
        projection_inputs=(1, 2, 3), num_gains=3, draft_vocab_size=7,
    )  # fmt: skip
    costs = DrafterCosts(size, layout, 2, length=6)
    assert costs.row_inputs(4) == (1, 1, 2, 2, 3)
    assert [costs.row_inputs(fill) for fill in (1, 2, 3)] == [(1,), (1, 1), (1, 1, 2)]
    layer = 2 * 10 * 8 + 2 * 10 * 4 + 3 * 10 * 20
    weights = 9 * 100 + 3 * 10 + 3 * (layer + 2 * 10 + 2 * 4) + 7 * 10 + 10
    assert costs.draft.read_bytes == 2 * (weights + 3 * 2 * 4 * 6)
    assert costs.draft.flops == 2 * (9 * 100 + 5 * 3 * layer + 70) + 5 * 3 * 4 * 8 * 6
    assert costs.draft.weight_bytes == 2 * (weights - 3 * 100)
    post_step = FeatureLayout.build(8, 4, anchors=[0, 3, 7], schedule="post_step")
    assert DrafterCosts(size, post_step, 2, length=6).row_inputs(4) == (1, 2, 2, 3)
    assert costs.draft == costs.draft_at(4)
    # Rows of depth 0 and 1, one anchor each.
    assert costs.draft_at(2).read_bytes == 2 * (weights - 6 * 100 + 2 * 100 - 3 * 100 + 3 * 2 * 4 * 6)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_5"])
def test_operations_are_those_that_torch_counts(tmp_path, family):
    """Attention and linear maps; the delta rule is written out in `DELTA_RULE_FLOPS`, and tested below."""
    overrides = {"layer_types": ["full_attention"] * 8} if family == "qwen3_5" else {}
    costs = tiny_costs(tmp_path, family, length=12, **overrides)
    layout = FeatureLayout.build(8, 1)
    [stage] = cut(make_target(family, 8, torch.float32, **overrides), layout)
    stage.run(torch.zeros(1, 11, dtype=torch.long), 0)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        stage.run(torch.zeros(1, 1, dtype=torch.long), 11)
    counted = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    assert costs.token.flops == sum(counted.values())


def test_a_recurrent_layer_counts_maps_convolution_and_delta_rule(tmp_path):
    costs = tiny_costs(tmp_path, "qwen3_5", length=12)
    maps = 32 * (2 * 2 * 8 + 4 * 8) + 32 * (4 * 8) + 32 * 2 * 4 + (4 * 8) * 32 + 3 * 32 * 48
    convolution, states = (2 * 2 * 8 + 4 * 8) * 4, 4 * 8 * 8
    assert costs.by_type["linear_attention"].flops == 2 * maps + 2 * convolution + DELTA_RULE_FLOPS * states


def test_layers_read_their_weights_and_their_own_kind_of_state(tmp_path):
    short, long = tiny_costs(tmp_path, "qwen3_5", length=10), tiny_costs(tmp_path, "qwen3_5", length=110)
    assert set(short.by_type) == {"linear_attention", "full_attention"}
    assert [cost == other for cost, other in zip(short.layers, long.layers, strict=True)] == [
        True,
        True,
        True,
        False,
    ] * 2
    attention = long.by_type["full_attention"]
    assert attention.read_bytes - attention.weight_bytes == 110 * 2 * 2 * 16 * 4  # keys and values of 2 heads of 16
    recurrent = short.by_type["linear_attention"]
    # Read and written: 4 matrices of 8 x 8 in float32, and 64 channels of the last 4 inputs.
    assert recurrent.read_bytes - recurrent.weight_bytes == 2 * (4 * 8 * 8 * 4 + 64 * 4 * 4)


@pytest.mark.parametrize("name", ["4B", "9B"])
def test_recurrent_states_of_qwen_weigh_what_is_known(qwen_costs, name):
    costs = qwen_costs(name)
    assert costs.cache_bytes(["linear_attention"], 4096, slots=1) == 2 * MIB + 64 * 1024
    rings = [costs.cache_bytes(["linear_attention"] * 3, 0, slots=8 - number + 1) for number in range(1, 9)]
    assert round(sum(rings) / MIB) == 223


def test_qwen_has_the_parameters_of_its_name(qwen_costs):
    assert qwen_costs("4B").size.num_parameters == 4_205_751_296
    assert qwen_costs("9B").size.num_parameters == 8_953_803_264
    assert qwen_costs("9B").token.weight_bytes == 2 * 8_953_803_264


def test_the_head_of_qwen_outweighs_a_whole_stage_of_eight(qwen_costs):
    for name, ratio in (("4B", 2.4), ("9B", 2.2)):
        costs = qwen_costs(name)
        stage = sum(cost.weight_bytes for cost in costs.layers[-4:])
        assert costs.head.weight_bytes > stage
        assert (stage + costs.head.weight_bytes) / stage == pytest.approx(ratio, abs=0.06)
