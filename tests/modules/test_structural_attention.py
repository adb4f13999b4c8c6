"""The chunked backend equals its dense twin, in values and gradients."""

import pytest
import torch

from spd_lightning.modules import structural_attention
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.structural_attention import chunked_attention, dense_attention, visible_block

LAYOUTS = {
    "exact_n4": FeatureLayout.build(8, 4),
    "exact_n1": FeatureLayout.build(8, 1),
    "exact_uneven": FeatureLayout.build(10, 3, stage_layers=[2, 5, 3]),
    "shared_n8": FeatureLayout.build(32, 8, anchors=(0, 8, 16, 24, 31), rows="shared"),
    "shared_n5": FeatureLayout.build(10, 5, anchors=(0, 9), rows="shared"),
    "one_row": FeatureLayout.build(8, 4, anchors=(0,), rows="shared"),
    "post_step_n4": FeatureLayout.build(8, 4, schedule="post_step"),
    "post_step_n1": FeatureLayout.build(8, 1, schedule="post_step"),
    "post_step_shared_n8": FeatureLayout.build(32, 8, None, (0, 8, 16, 24, 31), "shared", "post_step"),
}


def table(layout: FeatureLayout) -> torch.Tensor:
    return torch.tensor(layout.visibility_table())


@pytest.mark.parametrize("seq", [1, 7, 33, 131])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("only_first_row", [False, True])
def test_chunked_equals_dense_for_every_fill(name: str, seq: int, only_first_row: bool, monkeypatch) -> None:
    monkeypatch.setattr(structural_attention, "QUERY_CHUNK", 16 if seq < 100 else 64)
    layout = LAYOUTS[name]
    rows, batch = layout.num_rows, layout.num_stages  # one sequence of the batch per fill level
    generator = torch.Generator().manual_seed(seq)
    shapes = [
        (batch, heads, count, seq, 8) for heads, count in ((4, 1 if only_first_row else rows), (2, rows), (2, rows))
    ]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    out_gradient = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    results = []
    for attention in (dense_attention, chunked_attention):
        out = attention(*tensors, table(layout))
        results.append([out, *torch.autograd.grad(out, tensors, out_gradient)])
    for dense, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_row_sees_each_earlier_position_exactly_once(name: str) -> None:
    layout, seq = LAYOUTS[name], 11
    positions = torch.arange(seq)
    mask = visible_block(table(layout), positions, positions, layout.num_rows, torch.arange(layout.num_rows))
    seen = mask.sum(dim=3)  # over key rows: fills, rows, queries, keys
    assert torch.equal(seen, torch.ones(seq, seq).tril().long().expand_as(seen))


def test_the_mask_is_the_one_drawn_by_hand() -> None:
    """n = 2, fill 1 and 2, three positions; keys in the order row 0, row 1, row 2 of positions 0, 1, 2."""
    layout = FeatureLayout.build(4, 2)
    positions = torch.arange(3)
    mask = visible_block(table(layout), positions, positions, 3, torch.arange(3)).flatten(3, 4).flatten(1, 2).int()
    full = [
        # row 0         row 1    row 2
        "100 000 000", "010 100 000", "001 010 100",  # queries of row 0
        "000 100 000", "000 010 100", "000 001 110",  # queries of row 1
        "000 000 100", "000 000 110", "000 000 111",  # queries of row 2
    ]  # fmt: skip
    refilling = [
        "100 000 000", "010 000 100", "001 000 110",
        "000 100 000", "000 010 100", "000 001 110",
        "000 000 100", "000 000 110", "000 000 111",
    ]  # fmt: skip
    for drawn, computed in zip((refilling, full), mask, strict=True):
        expected = [[int(cell) for cell in row.replace(" ", "")] for row in drawn]
        assert computed.tolist() == expected
