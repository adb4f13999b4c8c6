"""Train/decode parity of the Pipeline Draft Module: the training layout against a naive recursion."""

import math

import pytest
import torch
from torch import Tensor

from spd_lightning.modules.attention.chunked import chunked_attention
from spd_lightning.modules.attention.dense import dense_attention
from spd_lightning.modules.attention.split import split_attention
from spd_lightning.modules.decoder_layer import rotary_tables, rotate
from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.features import FeatureLayout, visible_depth
from tests.modules.conftest import make_drafter

LAYOUTS = {
    "exact": FeatureLayout.build(8, 4),
    "exact_one_stage": FeatureLayout.build(8, 1),
    "exact_uneven": FeatureLayout.build(9, 3, stage_layers=[2, 4, 3]),
    "exact_coarse": FeatureLayout.build(8, 4, anchors=(0, 4, 7)),
    "shared": FeatureLayout.build(8, 4, anchors=(0, 4, 7), rows="shared"),
    "post_step": FeatureLayout.build(8, 4, schedule="post_step"),
    "post_step_one_stage": FeatureLayout.build(8, 1, schedule="post_step"),
    "post_step_uneven": FeatureLayout.build(9, 3, stage_layers=[2, 4, 3], schedule="post_step"),
    "post_step_shared": FeatureLayout.build(8, 4, anchors=(0, 4, 7), rows="shared", schedule="post_step"),
    "post_step_shared_without_0": FeatureLayout.build(8, 4, anchors=(0, 2, 7), rows="shared", schedule="post_step"),
}


class NaiveDrafter:
    """Evaluates one (depth, position) at a time by the definition, with a memo; uses only the drafter's weights.

    `h(layer, d, t)` attends to `h(layer - 1, D(d, t - T; a), T)` for every `T <= t`; with shared rows each depth is
    replaced by the depth that its row type stands for. The output is that of depth 0, or of depth 1 post-step, where
    `a` is `min(n, a + 1)` of the tokens in flight.
    """

    def __init__(self, drafter: PipelineDraftModule, states: list[Tensor], fill: int) -> None:
        self.drafter, self.states = drafter, states
        self.layout, self.config = drafter.layout, drafter.config
        is_post_step = self.layout.schedule == "post_step"
        self.newest_depth, self.fill = (1, min(self.layout.num_stages, fill + 1)) if is_post_step else (0, fill)
        self.memo: dict[tuple[int, int, int], Tensor] = {}

    def represent(self, depth: int) -> int:
        return self.layout.row_depths[self.layout.row_of_depth(depth)]

    def norm(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.pow(2).mean() + self.config.rms_norm_eps) * module.weight

    def feature(self, depth: int, position: int) -> Tensor:
        last = max(i for i, anchor in enumerate(self.layout.anchors) if anchor <= self.layout.stage_ends[depth])
        parts = [state[position] for state in self.states[: last + 1]]
        if self.config.feature_norm == "rms":
            parts = [self.norm(norm, part) for norm, part in zip(self.drafter.features.norms, parts, strict=False)]
        return self.drafter.features.projections[str(last)].weight @ torch.cat(parts)

    def rotate(self, x: Tensor, position: int) -> Tensor:
        half = len(x) // 2
        out = torch.empty_like(x)
        for i in range(half):
            angle = position * self.config.rope_theta ** (-2 * i / len(x))
            cos, sin = math.cos(angle), math.sin(angle)
            out[i] = x[i] * cos - x[i + half] * sin
            out[i + half] = x[i + half] * cos + x[i] * sin
        return out

    def hidden(self, layer: int, depth: int, position: int) -> Tensor:
        key = (layer, depth, position)
        if key not in self.memo:
            self.memo[key] = self.feature(depth, position) if layer == 0 else self.step(*key)
        return self.memo[key]

    def step(self, layer: int, depth: int, position: int) -> Tensor:
        block, config = self.drafter.layers[layer - 1], self.config
        own = self.hidden(layer - 1, depth, position)

        def heads(projection: torch.nn.Linear, x: Tensor) -> Tensor:
            return (projection.weight @ x).view(-1, config.head_dim)

        queries = heads(block.attention.q_proj, self.norm(block.input_norm, own))
        keys, values = [], []
        for earlier in range(position + 1):
            seen = self.represent(visible_depth(depth, position - earlier, self.fill, config.num_stages))
            x = self.norm(block.input_norm, self.hidden(layer - 1, seen, earlier))
            keys.append(
                [self.rotate(self.norm(block.attention.k_norm, k), earlier) for k in heads(block.attention.k_proj, x)]
            )
            values.append(heads(block.attention.v_proj, x))
        outputs = []
        for head in range(config.num_heads):
            group = head // (config.num_heads // config.num_kv_heads)
            query = self.rotate(self.norm(block.attention.q_norm, queries[head]), position)
            scores = torch.stack([query @ key[group] for key in keys]) / math.sqrt(config.head_dim)
            weights = (scores - scores.max()).exp()
            weights = weights / weights.sum()
            outputs.append(sum(w * value[group] for w, value in zip(weights, values, strict=True)))
        out = own + block.attention.o_proj.weight @ torch.cat(outputs)
        x = self.norm(block.mlp_norm, out)
        gate, up = block.mlp.gate_proj.weight @ x, block.mlp.up_proj.weight @ x
        return out + block.mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * up)

    def output(self, position: int) -> Tensor:
        return self.norm(self.drafter.norm, self.hidden(len(self.drafter.layers), self.newest_depth, position))


def random_states(layout: FeatureLayout, batch: int, seq: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        10**index * torch.randn(batch, seq, 32, generator=generator, dtype=torch.float64)
        for index in range(len(layout.anchors))
    ]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("feature_norm", ["rms", "none"])
def test_training_layout_computes_the_definition_at_every_fill(name: str, feature_norm: str) -> None:
    layout, seq = LAYOUTS[name], 7
    drafter = make_drafter(layout, feature_norm=feature_norm)
    states = random_states(layout, layout.num_stages, seq)
    visible = torch.tensor(layout.visibility_table())  # sequence a - 1 of the batch simulates fill a
    positions = torch.arange(seq).expand(layout.num_stages, seq)
    with torch.no_grad():
        out = drafter(states, positions, visible)
        for fill in range(1, layout.num_stages + 1):
            naive = NaiveDrafter(drafter, [state[fill - 1] for state in states], fill)
            expected = torch.stack([naive.output(position) for position in range(seq)])
            torch.testing.assert_close(out[fill - 1], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", LAYOUTS)
def test_backends_give_the_same_loss_gradients(name: str) -> None:
    layout, seq = LAYOUTS[name], 70
    states = random_states(layout, layout.num_stages, seq)
    visible = torch.tensor(layout.visibility_table())
    positions = torch.arange(seq).expand(layout.num_stages, seq)
    gradients = []
    for attention in (dense_attention, chunked_attention, split_attention):
        drafter = make_drafter(layout)
        drafter.structural_attention = attention
        drafter(states, positions, visible).pow(2).sum().backward()
        gradients.append({name: p.grad for name, p in drafter.named_parameters() if name != "lm_head.weight"})
    dense, *others = gradients
    for name, gradient in dense.items():
        assert gradient is not None, f"{name} is in no graph: DDP would raise"
        for fast in others:
            torch.testing.assert_close(fast[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("feature_norm", ["rms", "none"])
def test_16_bit_states_and_autocast_leave_the_residual_stream_in_float32(feature_norm: str) -> None:
    layout = LAYOUTS["exact"]
    drafter = make_drafter(layout, torch.float32, feature_norm=feature_norm)
    states = [state.bfloat16() for state in random_states(layout, 1, 5)]
    torch.testing.assert_close(drafter.replicate(states), drafter.replicate([state.float() for state in states]))
    with torch.autocast("cpu", torch.bfloat16):
        rows = drafter.replicate(states)
        out = drafter(states, torch.arange(5)[None], torch.tensor(layout.visibility_table())[-1:])
    assert rows.dtype == out.dtype == torch.float32
    assert drafter.norm(rows.bfloat16()).dtype == torch.float32


def test_rotary_of_16_bit_heads_is_computed_in_float32() -> None:
    x = torch.randn(1, 2, 3, 50, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    tables = rotary_tables(torch.arange(50)[None], 16, 1e4)
    assert torch.equal(rotate(x, tables), rotate(x.float(), tables).bfloat16())


@pytest.mark.parametrize("name", ["exact", "post_step"])
def test_only_the_first_row_is_a_query_in_the_last_layer(name: str) -> None:
    layout, seen = LAYOUTS[name], []

    def attention(query: Tensor, *others: Tensor) -> Tensor:
        seen.append(query.shape[2])
        return dense_attention(query, *others)

    drafter = make_drafter(layout)
    drafter.structural_attention = attention
    drafter(random_states(layout, 1, 5), torch.arange(5)[None], torch.tensor(layout.visibility_table())[-1:])
    assert seen == [layout.num_rows, 1]


def test_padding_on_the_right_changes_nothing() -> None:
    layout = LAYOUTS["exact"]
    drafter = make_drafter(layout)
    states = random_states(layout, 1, 9)
    visible = torch.tensor(layout.visibility_table())[2:3]
    positions = torch.arange(9)[None]
    padded = drafter(states, positions, visible)[:, :6]
    alone = drafter([state[:, :6] for state in states], positions[:, :6], visible)
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-12)


def test_only_reachable_anchors_have_parameters() -> None:
    with pytest.warns(UserWarning, match="never the deepest"):
        layout = FeatureLayout.build(9, 3, anchors=(0, 3, 5, 6, 8, 9), rows="shared")
    drafter = make_drafter(layout)
    assert sorted(drafter.features.projections) == ["0", "1", "3", "5"]
    post_step = make_drafter(FeatureLayout.build(9, 3, schedule="post_step"))
    assert sorted(post_step.features.projections) == ["1", "2", "3"] and post_step.features.num_anchors == 4
    unreachable_end = FeatureLayout(stage_layers=(3, 3, 3), anchors=(0, 3, 6), rows="shared")
    assert make_drafter(unreachable_end).features.num_anchors == 3


def test_initialisation_takes_norm_and_head_from_the_target() -> None:
    drafter = PipelineDraftModule(make_drafter(LAYOUTS["exact"]).config, dense_attention)
    ids, gain, rows = torch.arange(40) * 5, torch.rand(32), torch.randn(40, 32)
    drafter.initialize(ids, gain, rows, torch.Generator().manual_seed(0))
    assert torch.equal(drafter.draft_token_ids, ids)
    assert torch.equal(drafter.norm.weight, gain) and torch.equal(drafter.lm_head.weight, rows)
    first = drafter.layers[0]
    assert torch.equal(first.input_norm.weight, torch.ones(32)) and torch.equal(
        first.attention.q_norm.weight, torch.ones(16)
    )
    weights = torch.cat([layer.mlp.gate_proj.weight.flatten() for layer in drafter.layers])
    assert abs(weights.mean()) < 2e-3 and abs(weights.std() - 0.02) < 2e-3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_spec_layers": 0}, "at least one layer"),
        ({"num_heads": 3}, "multiple of num_kv_heads=2"),
        ({"head_dim": 15}, "must be even"),
        ({"draft_vocab_size": 0}, "at least one row"),
        ({"num_kv_heads": 0}, "num_kv_heads=0: must be a positive integer"),
        ({"num_heads": -2}, "num_heads=-2: must be a positive integer"),
        ({"rope_theta": 0.0}, "must be positive"),
        ({"num_stages": 8}, "num_stages=8, but stage_layers"),
    ],
)
def test_a_wrong_shape_names_the_value_and_the_rule(overrides, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_drafter(LAYOUTS["exact"], **overrides)
