"""Beginning with an existing drafter: the same comes out bit for bit, and of another one what has a place in it."""

import pytest
import torch

from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.init_from import (
    ARITHMETIC,
    STRUCTURAL,
    carry_over,
    changed_settings,
    check_source,
    kept_projections,
)
from spd_lightning.modules.target import target_shape
from spd_lightning.modules.tiny_target import tiny_config
from tests.modules.conftest import make_drafter
from tests.modules.eagle.drafters import make_eagle

LAYOUT = FeatureLayout.build(8, 4, anchors=(0, 2, 6), rows="shared")


def other_drafter(layout: FeatureLayout = LAYOUT, first_id: int = 0, **overrides) -> PipelineDraftModule:
    """Not initialised as `make_drafter` is: no weight is equal by chance."""
    drafter = make_drafter(layout, **overrides)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(7))
    drafter.draft_token_ids += first_id
    return drafter


@pytest.mark.parametrize("overrides", [{}, {"gated_attention": True, "feature_norm": "none"}], ids=["plain", "gated"])
def test_the_same_drafter_comes_out_bit_for_bit(overrides: dict) -> None:
    source, module = make_drafter(LAYOUT, **overrides), other_drafter(**overrides)
    assert carry_over(source, module) == []
    for name, value in source.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert changed_settings(source.config, module.config, ARITHMETIC + STRUCTURAL) == []


def test_eagle_drafters_carry_over_as_well() -> None:
    source, module = make_eagle(), make_eagle(draft_vocab_size=30, intermediate_size=64)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.0)
    told = carry_over(source, module)
    after = module.state_dict()
    assert [line.partition(":")[0] for line in told] == [
        *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "lm_head",
    ]
    for name, value in after.items():
        if "mlp." in name or name == "draft_token_ids":
            assert torch.equal(value, before[name]), name
        elif name == "lm_head.weight":
            assert torch.equal(value, source.lm_head.weight[:30])
        else:
            assert torch.equal(value, source.state_dict()[name]), name


@pytest.mark.parametrize(("had", "has"), [(2, 3), (3, 1)])
def test_of_other_numbers_of_layers_the_first_are_taken(had: int, has: int) -> None:
    source, module = make_drafter(LAYOUT, num_spec_layers=had), other_drafter(num_spec_layers=has)
    fresh = [value.clone() for value in module.layers[-1].state_dict().values()]
    told = carry_over(source, module)
    for index in range(min(had, has)):
        for name, value in module.layers[index].state_dict().items():
            assert torch.equal(value, source.layers[index].state_dict()[name])
    if has > had:
        assert told == ["layers.2: initialised, the drafter has 2"]
        assert all(torch.equal(a, b) for a, b in zip(module.layers[-1].state_dict().values(), fresh, strict=True))
    else:
        assert told == ["layers.1: left out", "layers.2: left out"]


def test_head_rows_go_with_their_tokens() -> None:
    source, module = make_drafter(LAYOUT), other_drafter(first_id=30)  # 0, 3, .., 117 and 30, 33, .., 147
    fresh = module.lm_head.weight.detach().clone()
    told = carry_over(source, module)
    assert torch.equal(module.lm_head.weight[:30], source.lm_head.weight[10:])
    assert torch.equal(module.lm_head.weight[30:], fresh[30:])
    assert told == [
        "lm_head: 10 of 40 draft tokens are new; their rows are the target's",
        "lm_head: 10 of the drafter's 40 draft tokens are left out",
    ]
    assert module.draft_token_ids[0] == 30


def test_exact_rows_have_the_weights_of_shared_ones() -> None:
    source, module = make_drafter(LAYOUT), other_drafter(FeatureLayout.build(8, 4, anchors=(0, 2, 6), rows="exact"))
    assert carry_over(source, module) == []
    states = [torch.randn(1, 5, 32, dtype=torch.float64) for _ in range(3)]
    rows = module.replicate(states)
    assert torch.equal(rows[:, [0, 1, 3]], source.replicate(states)) and rows.shape[1] == 5
    assert changed_settings(source.config, module.config, STRUCTURAL) == [
        "rows is exact, the drafter was trained with shared"
    ]


@pytest.mark.parametrize(
    "layout",
    [
        FeatureLayout.build(8, 4),  # 0, 2, 4, 6, 7: more anchors
        FeatureLayout.build(8, 2, anchors=(0, 2, 4, 6, 8)),  # another number of stages, and anchors that none reaches
        FeatureLayout.build(8, 8, anchors=(0, 2, 5, 6)),
        FeatureLayout.build(8, 4, stage_layers=[1, 3, 3, 1], anchors=(0, 1, 2, 6)),
    ],
    ids=["more", "fewer_stages", "more_stages", "another_split"],
)
@pytest.mark.filterwarnings("ignore:anchors .* are never the deepest")
def test_with_more_anchors_a_token_shows_what_the_source_would_have_seen(layout: FeatureLayout) -> None:
    """The feature of every depth is that of the source for a token that has come as far."""
    source, module = make_drafter(LAYOUT), other_drafter(layout)
    told = carry_over(source, module)
    by_layer = {layer: torch.randn(3, 32, dtype=torch.float64) for layer in range(9)}
    for depth in layout.depths:
        end = layout.stage_ends[depth]
        passed = [i for i, anchor in enumerate(LAYOUT.anchors) if anchor <= end and anchor <= max(layout.anchors)]
        own = source.features.join([by_layer[anchor] for anchor in LAYOUT.anchors])
        new = module.features.join([by_layer[anchor] for anchor in layout.anchors])
        expected = source.features.project(own, passed[-1])
        torch.testing.assert_close(module.features.project(new, layout.deepest_anchor(depth)), expected)
    assert any("with zeros for the states of" in line for line in told)
    assert any("the gain of layer" in line and "initialised" in line for line in told)


def test_fewer_anchors_leave_columns_and_projections_out() -> None:
    source = make_drafter(FeatureLayout.build(8, 4))  # 0, 2, 4, 6, 7
    module = other_drafter(LAYOUT)
    told = carry_over(source, module)
    ours, theirs = module.features.projections["2"].weight, source.features.projections["3"].weight
    assert torch.equal(ours, torch.cat([theirs[:, :64], theirs[:, 96:]], dim=1))
    assert told == [
        "the projection of layers [0, 2, 6]: that of [0, 2, 4, 6] without the states of [4]",
        "the projection of layers [0, 2, 4]: left out",
        "the projection of layers [0, 2, 4, 6, 7]: left out",
    ]


def test_a_projection_that_the_source_has_no_counterpart_of_is_initialised() -> None:
    post_step = FeatureLayout.build(8, 4, anchors=(0, 2, 6), rows="shared", schedule="post_step")
    source, module = make_drafter(post_step), other_drafter(LAYOUT)
    fresh = module.features.projections["0"].weight.detach().clone()
    told = carry_over(source, module)
    assert told == [
        "the projection of layers [0]: initialised, the drafter has none for tokens that have come so far only"
    ]
    assert torch.equal(module.features.projections["0"].weight, fresh)
    assert torch.equal(module.features.projections["1"].weight, source.features.projections["1"].weight)
    assert changed_settings(source.config, module.config, ARITHMETIC) == [
        "schedule is pre_step, the drafter was trained with post_step"
    ]


def test_projections_of_raw_states_are_no_beginning_for_those_of_normalised_ones() -> None:
    source, module = make_drafter(LAYOUT, feature_norm="none"), other_drafter()
    fresh = module.features.projections["1"].weight.detach().clone()
    [line] = carry_over(source, module)
    assert line.startswith("features: initialised") and torch.equal(module.features.projections["1"].weight, fresh)
    assert changed_settings(source.config, module.config, ARITHMETIC) == [
        "feature_norm is rms, the drafter was trained with none"
    ]


@pytest.mark.parametrize("gated", [True, False])
def test_queries_pass_between_gated_and_plain_layers(gated: bool) -> None:
    source, module = make_drafter(LAYOUT, gated_attention=gated), other_drafter(gated_attention=not gated)
    fresh = module.layers[0].attention.q_proj.weight.detach().clone()
    told = carry_over(source, module)
    what = "left out" if gated else "initialised"
    assert told == [f"layers.{index}.attention.q_proj.weight: the gates are {what}" for index in range(2)]
    for head in range(4):
        with_gate, plain = (source, module) if gated else (module, source)
        both = with_gate.layers[0].attention.q_proj.weight[head * 32 : (head + 1) * 32]
        assert torch.equal(both[:16], plain.layers[0].attention.q_proj.weight[head * 16 : (head + 1) * 16])
        if not gated:
            assert torch.equal(both[16:], fresh[head * 32 + 16 : (head + 1) * 32])
    assert torch.equal(module.layers[1].attention.o_proj.weight, source.layers[1].attention.o_proj.weight)
    [line] = changed_settings(source.config, module.config, ARITHMETIC)
    assert line == f"gated_attention is {not gated}, the drafter was trained with {gated}"


def test_other_sizes_are_initialised_and_listed() -> None:
    source, module = make_drafter(LAYOUT), other_drafter(num_heads=2, intermediate_size=64, num_spec_layers=1)
    told = carry_over(source, module)
    assert [line.partition(":")[0] for line in told if "initialised" in line] == [
        "layers.0.attention", *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    ]  # fmt: skip
    assert torch.equal(module.layers[0].input_norm.weight, source.layers[0].input_norm.weight)


@pytest.mark.parametrize("gated", [False, True])
def test_attention_of_other_heads_is_initialised_where_its_shapes_are_the_same_too(gated: bool) -> None:
    source = make_drafter(LAYOUT, num_heads=4, head_dim=16)
    module = other_drafter(num_heads=8, num_kv_heads=4, head_dim=8, gated_attention=gated)
    before = {name: value.clone() for name, value in module.layers.state_dict().items()}
    told = carry_over(source, module)
    assert [line for line in told if line.startswith("layers.0")] == [
        "layers.0.attention: initialised, its heads are others (num_heads, num_kv_heads, head_dim)"
    ]
    for name, value in module.layers.state_dict().items():
        kept = before if "attention." in name else source.layers.state_dict()
        assert torch.equal(value, kept[name]), name


def test_a_wider_drafter_takes_the_head_rows_of_a_narrower_dtype() -> None:
    source, module = make_drafter(LAYOUT, torch.float32), other_drafter()
    carry_over(source, module)
    assert module.lm_head.weight.dtype == torch.float64
    assert torch.equal(module.lm_head.weight, source.lm_head.weight.double())


def test_a_projection_kept_unused_stays_so_and_begins_no_other() -> None:
    unreached = FeatureLayout((2, 2, 2, 2), (0, 2, 5, 6), "shared")
    source = make_drafter(unreached, kept_projections=(2,))
    kept = source.features.get_buffer("kept_projection_2").normal_(generator=torch.Generator().manual_seed(9))
    assert kept_projections(source.config, source.config) == (2,)
    same = other_drafter(unreached, kept_projections=(2,))
    assert carry_over(source, same) == []
    assert torch.equal(same.features.get_buffer("kept_projection_2"), kept)
    used = other_drafter(FeatureLayout((2, 3, 1, 2), (0, 2, 5, 6), "shared"))
    assert kept_projections(source.config, used.config) == ()
    told = carry_over(source, used)
    assert told == [
        "the projection of layers [0, 2, 5]: begins as that of [0, 2], with zeros for the states of [5]",
        "the projection of layers [0, 2, 5]: left out",
    ]
    assert torch.equal(used.features.projections["2"].weight[:, :64], source.features.projections["1"].weight)
    raw = make_drafter(unreached, feature_norm="none").config
    assert kept_projections(source.config, raw) == ()
    others = make_drafter(FeatureLayout((2, 2, 2, 2), (0, 3, 5, 6), "shared")).config
    assert kept_projections(source.config, others) == ()
    with pytest.raises(ValueError, match=r"kept_projections=\[1\]: \[1\] are used"):
        make_drafter(unreached, kept_projections=(1,))


def test_methods_and_targets_must_be_the_same() -> None:
    pdm, eagle, shape = make_drafter(LAYOUT).config, make_eagle().config, target_shape(tiny_config("llama", 8), "tiny")
    check_source(pdm, False, shape)
    check_source(eagle, True, shape)
    with pytest.raises(ValueError, match="method 'spd', but this run trains an EAGLE-3 drafter"):
        check_source(pdm, True, shape)
    with pytest.raises(ValueError, match="method 'eagle3', but this run trains a Pipeline Draft Module"):
        check_source(eagle, False, shape)
    with pytest.raises(ValueError, match="num_layers=8, but this run's has 9"):
        check_source(pdm, False, target_shape(tiny_config("llama", 9), "tiny"))
    with pytest.raises(ValueError, match="hidden_size=32, but this run's has 64"):
        check_source(pdm, False, target_shape(tiny_config("llama", 8, hidden_size=64), "tiny"))
