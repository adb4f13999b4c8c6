"""The feature layout: hand-worked visibility tables, and the decoder's own view of depths."""

import warnings

import jaxtyping
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spd_lightning.modules.features import FeatureLayout, visible_depth
from spd_lightning.modules.partition import check_stage_layers, even_stage_layers

PUBLISHED = (0, 8, 16, 24, 31)

# Worked out by hand for n = 4: per fill and row depth, the depth seen at distance 0, 1, 2, 3, 4.
N4_DEPTHS = {
    1: {0: "04444", 1: "14444", 2: "24444", 3: "34444", 4: "44444"},
    2: {0: "01444", 1: "14444", 2: "24444", 3: "34444", 4: "44444"},
    3: {0: "01244", 1: "12444", 2: "24444", 3: "34444", 4: "44444"},
    4: {0: "01234", 1: "12344", 2: "23444", 3: "34444", 4: "44444"},
}

# The same after the stage forwards of a cycle that began with so many tokens in flight: the newest has depth 1.
N4_POST_STEP_DEPTHS = {
    1: {1: "14444", 2: "24444", 3: "34444", 4: "44444"},
    2: {1: "12444", 2: "24444", 3: "34444", 4: "44444"},
    3: {1: "12344", 2: "23444", 3: "34444", 4: "44444"},
    4: {1: "12344", 2: "23444", 3: "34444", 4: "44444"},
}

# Worked out by hand for n = 8 with the published anchors: row types stand for depths 0, 2, 4, 6, 8; the entries are
# row types at distance 0..8.
N8_ROWS = {
    8: ("001122334", "112233444", "223344444", "334444444", "444444444"),
    5: ("001124444", "112444444", "244444444", "344444444", "444444444"),
    3: ("001444444", "144444444", "244444444", "344444444", "444444444"),
    1: ("044444444", "144444444", "244444444", "344444444", "444444444"),
}

# Post-step row types of the same anchors stand for depths 1, 2, 4, 6, 8.
N8_POST_STEP_ROWS = {
    8: ("011223344", "112233444", "223344444", "334444444", "444444444"),
    7: ("011223344", "112233444", "223344444", "334444444", "444444444"),
    5: ("011224444", "112244444", "224444444", "344444444", "444444444"),
    1: ("044444444", "144444444", "244444444", "344444444", "444444444"),
}


@pytest.mark.parametrize("fill", N4_DEPTHS)
def test_visible_depth_is_the_hand_worked_table_for_four_stages(fill: int) -> None:
    for depth, expected in N4_DEPTHS[fill].items():
        assert "".join(str(visible_depth(depth, distance, fill, 4)) for distance in range(5)) == expected


@pytest.mark.parametrize("fill", N8_ROWS)
def test_shared_rows_show_the_hand_worked_row_types_for_eight_stages(fill: int) -> None:
    layout = FeatureLayout.build(32, 8, anchors=PUBLISHED, rows="shared")
    assert layout.row_depths == (0, 2, 4, 6, 8)
    table = layout.visibility_table()[fill - 1]
    assert tuple("".join(map(str, row)) for row in table) == N8_ROWS[fill]


@pytest.mark.parametrize("fill", N4_POST_STEP_DEPTHS)
def test_post_step_rows_show_the_hand_worked_depths_for_four_stages(fill: int) -> None:
    layout = FeatureLayout.build(8, 4, schedule="post_step")
    assert layout.row_depths == (1, 2, 3, 4)
    table = layout.visibility_table()[fill - 1]
    depths = {
        layout.row_depths[row]: "".join(str(layout.row_depths[seen]) for seen in distances)
        for row, distances in enumerate(table)
    }
    assert depths == N4_POST_STEP_DEPTHS[fill]
    newest = N4_POST_STEP_DEPTHS[fill][1]
    assert "".join(str(layout.depth_when_drafting(distance, fill)) for distance in range(5)) == newest


@pytest.mark.parametrize("fill", N8_POST_STEP_ROWS)
def test_post_step_shared_rows_show_the_hand_worked_row_types_for_eight_stages(fill: int) -> None:
    layout = FeatureLayout.build(32, 8, anchors=PUBLISHED, rows="shared", schedule="post_step")
    assert layout.row_depths == (1, 2, 4, 6, 8)
    table = layout.visibility_table()[fill - 1]
    assert tuple("".join(map(str, row)) for row in table) == N8_POST_STEP_ROWS[fill]


def test_post_step_has_no_row_of_an_anchor_count_that_only_depth_0_has() -> None:
    """Anchors 0, 2, 7 with stages of two layers: depth 0 has one anchor, depths 1 to 3 have two, depth 4 all three."""
    pre, post = (
        FeatureLayout.build(8, 4, anchors=(0, 2, 7), rows="shared", schedule=schedule)
        for schedule in ("pre_step", "post_step")
    )
    assert (pre.row_depths, pre.used_anchor_indices) == ((0, 1, 4), (0, 1, 2))
    assert (post.row_depths, post.used_anchor_indices) == ((1, 4), (1, 2))
    assert [post.row_of_depth(depth) for depth in (1, 2, 3, 4)] == [0, 0, 0, 1]
    tables = [tuple("".join(map(str, row)) for row in table) for table in post.visibility_table()]
    assert tables == [("01111", "11111"), ("00111", "11111"), ("00011", "11111"), ("00011", "11111")]


@given(num_stages=st.integers(1, 16), data=st.data())
def test_the_depth_when_drafting_is_what_the_pipeline_holds(num_stages: int, data: st.DataObject) -> None:
    """A token enters per cycle and all advance: simulated stage by stage, before and after the stage forwards."""
    fill = data.draw(st.integers(1, num_stages))
    depths = [num_stages] * (num_stages + 2)  # by distance to the newest token; the prompt's have left
    for cycle in range(fill):
        depths.insert(0, 0)
        if cycle < fill - 1:
            depths = [min(num_stages, depth + 1) for depth in depths]
    for schedule in ("pre_step", "post_step"):
        layout = FeatureLayout.build(num_stages, num_stages, schedule=schedule)
        assert [layout.depth_when_drafting(distance, fill) for distance in range(len(depths))] == depths
        depths = [min(num_stages, depth + 1) for depth in depths]


def test_the_schedule_says_what_comes_first() -> None:
    pre, post = FeatureLayout.build(8, 4), FeatureLayout.build(8, 4, schedule="post_step")
    assert (pre.drafts_first, pre.first_depth) == (True, 0)
    assert (post.drafts_first, post.first_depth) == (False, 1)


@given(num_stages=st.integers(1, 16), data=st.data())
def test_a_row_shows_what_the_pipeline_held_when_it_was_made(num_stages: int, data: st.DataObject) -> None:
    """The decoder's view: with `a` tokens in flight, position `t - i` has depth `i`, and earlier ones have left."""
    fill = data.draw(st.integers(1, num_stages))
    held = [min(i, num_stages) if i < fill else num_stages for i in range(2 * num_stages + 2)]
    for newest_distance in range(fill):
        depth = held[newest_distance]
        for distance in range(num_stages + 2):
            assert visible_depth(depth, distance, fill, num_stages) == held[newest_distance + distance]


def test_deepest_anchor_follows_the_stage_ends() -> None:
    layout = FeatureLayout.build(32, 4, anchors=PUBLISHED, rows="exact")
    assert [layout.deepest_anchor(depth) for depth in range(5)] == [0, 1, 2, 3, 4]
    uneven = FeatureLayout.build(10, 3, stage_layers=[2, 5, 3], anchors=[0, 3, 9], rows="shared")
    assert uneven.stage_ends == (0, 2, 7, 10)
    assert [uneven.deepest_anchor(depth) for depth in range(4)] == [0, 0, 1, 2]
    assert uneven.row_depths == (0, 2, 3)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "stage_layers", "expected"),
    [
        (30, 6, None, (0, 5, 10, 15, 20, 25, 29)),
        (32, 8, None, (0, 4, 8, 12, 16, 20, 24, 28, 31)),
        (4, 4, None, (0, 1, 2, 3, 4)),  # the last stage begins at L-1, so L itself is the anchor
        (10, 2, [9, 1], (0, 9, 10)),
        (5, 1, None, (0, 4)),
        (1, 1, None, (0, 1)),
    ],
)
def test_auto_anchors_are_the_stage_boundaries(num_layers, num_stages, stage_layers, expected) -> None:
    layout = FeatureLayout.build(num_layers, num_stages, stage_layers, "auto")
    assert layout.anchors == expected
    assert layout.used_anchor_indices == tuple(range(len(expected)))


def test_an_anchor_that_is_never_the_deepest_warns_and_has_no_row() -> None:
    with pytest.warns(UserWarning, match=r"\[29\] are never the deepest"):
        layout = FeatureLayout.build(30, 5, anchors=[0, 6, 18, 29, 30], rows="shared")
    assert layout.used_anchor_indices == (0, 1, 2, 4)
    assert layout.row_depths == (0, 1, 3, 5)


def test_post_step_warns_of_unused_anchors_but_not_of_the_embedding() -> None:
    """Every token has passed `e_1`, so no projection reads the embedding alone; but all read it."""
    with pytest.warns(UserWarning, match=r"anchors \[3\] are never the deepest"):
        layout = FeatureLayout.build(8, 2, anchors=[0, 3, 4, 7], schedule="post_step")
    assert layout.used_anchor_indices == (2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FeatureLayout.build(8, 4, schedule="post_step").used_anchor_indices == (1, 2, 3, 4)
        assert FeatureLayout.build(8, 4, anchors=[0, 5], schedule="post_step").used_anchor_indices == (0, 1)


def test_one_stage_has_two_exact_rows_and_post_step_one() -> None:
    layout = FeatureLayout.build(5, 1)
    assert layout.row_depths == (0, 1)
    assert layout.visibility_table() == (((0, 1), (1, 1)),)
    post = FeatureLayout.build(5, 1, schedule="post_step")
    assert post.row_depths == (1,)
    assert post.visibility_table() == (((0, 0),),)


def test_a_depth_that_the_drafter_never_reads_has_no_row() -> None:
    with pytest.raises(ValueError, match="not in"):
        FeatureLayout.build(8, 4, schedule="post_step").row_of_depth(0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"anchors": [1, 4]}, "first anchor must be 0"),
        ({"anchors": []}, "first anchor must be 0"),
        ({"anchors": [0, 4, 4]}, "must ascend"),
        ({"anchors": [0, 4, 33]}, "has 32 layers"),
        ({"num_stages": 33}, "at most 32 stages"),
        ({"num_stages": 0}, "at least one stage"),
        ({"stage_layers": [30, 2]}, "names 2 stages"),
        ({"stage_layers": [8] * 3 + [9]}, "sums to 33"),
        ({"stage_layers": [16, 16, 0, 0]}, "at least one layer"),
    ],
)
def test_a_wrong_layout_names_the_value_and_the_rule(kwargs, message) -> None:
    with pytest.raises(ValueError, match=message):
        FeatureLayout.build(**{"num_layers": 32, "num_stages": 4} | kwargs)


def test_first_stage_states_are_one_row_for_all_depths() -> None:
    """PPSD (design §7): every token shows the end of stage 1, whatever its depth; no token shows its embedding."""
    layout = FeatureLayout.build(10, 3, [4, 3, 3], "first_stage", "shared", "post_step")
    assert layout.anchors == (4,)
    assert (layout.row_depths, layout.used_anchor_indices) == ((1,), (0,))
    assert layout.visibility_table() == (((0, 0, 0, 0),),) * 3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"anchors": "first_stage"}, "first anchor must be 0, the embedding"),
        ({"anchors": [5, 8], "schedule": "post_step"}, "so 0 to 4, where the first stage ends"),
        ({"anchors": [], "schedule": "post_step"}, "first anchor must be one that every token has passed"),
        ({"anchors": "middle"}, "'auto' or 'first_stage'"),
    ],
)
def test_the_first_anchor_must_be_there_at_every_depth(kwargs, message, monkeypatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside tests
    with pytest.raises(ValueError, match=message):
        FeatureLayout.build(**{"num_layers": 16, "num_stages": 4} | kwargs)


def test_an_unknown_schedule_names_the_two(monkeypatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as outside tests
    with pytest.raises(ValueError, match="schedule='mid_step': must be 'pre_step' or 'post_step'"):
        FeatureLayout.build(8, 4, schedule="mid_step")


@given(num_layers=st.integers(1, 64), num_stages=st.integers(1, 64))
def test_even_stages_differ_by_one_layer_at_most(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        with pytest.raises(ValueError, match="at most"):
            even_stage_layers(num_layers, num_stages)
        return
    layers = even_stage_layers(num_layers, num_stages)
    assert sum(layers) == num_layers and len(layers) == num_stages
    assert max(layers) - min(layers) <= 1 and layers[-1] == min(layers)
    assert check_stage_layers(layers, num_layers, num_stages) == layers


def test_a_full_layout_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FeatureLayout.build(32, 16, anchors=PUBLISHED, rows="shared")
