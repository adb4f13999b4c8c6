"""The fast backends equal their dense twin, in values and gradients."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from spd_lightning.modules.attention import chunked, flex, split
from spd_lightning.modules.attention.backends import BACKENDS, fast_attention
from spd_lightning.modules.attention.chunked import chunk_length, chunked_attention
from spd_lightning.modules.attention.dense import dense_attention, visible_block
from spd_lightning.modules.attention.split import Tiling, split_attention
from spd_lightning.modules.features import FeatureLayout

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
def test_fast_forms_equal_dense_for_every_fill(name: str, seq: int, only_first_row: bool, monkeypatch) -> None:
    # Chunks of 5 and blocks of 2 are shorter than the band of eight stages.
    monkeypatch.setattr(chunked, "chunk_length", lambda *_: min(seq, 5 if seq < 100 else 48))
    monkeypatch.setattr(split, "BLOCK", 2 if seq < 100 else 16)
    monkeypatch.setattr(split, "FAR_QUERIES", 40 if seq < 100 else 800)
    layout = LAYOUTS[name]
    rows, batch = layout.num_rows, layout.num_stages  # one sequence of the batch per fill level
    generator = torch.Generator().manual_seed(seq)
    shapes = [
        (batch, heads, count, seq, 8) for heads, count in ((4, 1 if only_first_row else rows), (2, rows), (2, rows))
    ]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    out_gradient = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    results = []
    for attention in (dense_attention, chunked_attention, split_attention):
        out = attention(*tensors, table(layout))
        results.append([out, *torch.autograd.grad(out, tensors, out_gradient)])
    for dense, *others in zip(*results, strict=True):
        for fast in others:
            torch.testing.assert_close(fast, dense, rtol=0, atol=1e-12)


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


def test_chunks_grow_with_the_sequence_and_shrink_with_the_rows() -> None:
    assert [chunk_length(5, 3, 5, seq, "cpu") for seq in (7, 2048, 8192)] == [7, 64, 128]
    assert chunk_length(1, 3, 5, 2048, "cpu") > chunk_length(5, 3, 5, 2048, "cpu") > chunk_length(9, 3, 9, 2048, "cpu")
    assert chunk_length(5, 3, 5, 2048, "cuda") > 128


@pytest.mark.parametrize("layout", [FeatureLayout.build(30, 6), LAYOUTS["shared_n8"]], ids=["exact", "shared"])
def test_tilings_hold_all_positions_and_waste_few(layout: FeatureLayout) -> None:
    band = layout.num_stages - 1
    for seq in (1, 3, 15, 16, 17, 100, 180, 512, 700, 4095, 4096):
        for query_rows in (1, layout.num_rows):
            query, key = torch.empty(2, 9, query_rows, seq, 64), torch.empty(2, 3, layout.num_rows, seq, 64)
            cut = Tiling.of(query, key, band)
            assert cut.length >= band
            blocks = math.ceil(seq / cut.block)
            assert 0 <= cut.padding < max(cut.length, cut.block)
            assert cut.chunks * cut.blocks - blocks <= max(0.04 * blocks, math.ceil(band / cut.block) - 1)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_work_of_threads_does_not_change_results(threads: int, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # how far the far part is cut
    monkeypatch.setattr(split, "FAR_QUERIES", 200)
    layout = LAYOUTS["exact_n4"]
    shapes = [(1, heads, layout.num_rows, 90, 8) for heads in (3, 3, 3)]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    visible = table(layout)[-1:]
    results = [attention(*tensors, visible) for attention in (dense_attention, fast_attention)]
    gradients = [torch.autograd.grad(out.square().sum(), tensors) for out in results]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", [chunked_attention, split_attention])
def test_16_bit_key_gradients_are_summed_in_float32(attention, monkeypatch) -> None:
    """Every chunk adds to the gradient of the oldest keys: summed in 16 bits they would drift."""
    monkeypatch.setattr(chunked, "chunk_length", lambda *_: 4)
    monkeypatch.setattr(split, "FAR_QUERIES", 1)
    layout, seq = LAYOUTS["exact_n4"], 512
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, layout.num_rows, seq, 8) for heads in (2, 1, 1)]
    wide = [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]
    visible, out_gradient = table(layout)[-1:], torch.ones(shapes[0])
    exact, narrow = (
        torch.autograd.grad(attention(*tensors, visible), tensors, out_gradient.to(dtype))[2][:, :, -1]
        for dtype in (torch.float32, torch.bfloat16)
        for tensors in [[x.to(dtype).requires_grad_() for x in wide]]
    )
    assert ((narrow.float() - exact).norm() / exact.norm()) < 4e-3


def flex_inputs(layout: FeatureLayout, num_query_rows: int, seq: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seq)
    counts = ((4, num_query_rows), (2, layout.num_rows), (2, layout.num_rows))
    shapes = [(layout.num_stages, heads, count, seq, 16) for heads, count in counts]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["exact_uneven", "post_step_n4"])
def test_flex_equals_dense_forwards_on_the_cpu(name: str, monkeypatch) -> None:
    monkeypatch.setattr(flex, "BLOCK", 16)
    layout = LAYOUTS[name]
    for num_query_rows, seq in ((layout.num_rows, 21), (1, 32)):
        tensors = flex_inputs(layout, num_query_rows, seq, torch.float64)
        with torch.no_grad():
            out = flex.flex_attention(*tensors, table(layout))
        torch.testing.assert_close(out, dense_attention(*tensors, table(layout)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("only_first_row", [False, True])
def test_flex_blocks_are_those_of_the_dense_mask(name: str, block: int, only_first_row: bool, monkeypatch) -> None:
    monkeypatch.setattr(flex, "BLOCK", block)
    layout, seq = LAYOUTS[name], 4 * block
    rows = 1 if only_first_row else layout.num_rows
    positions = torch.arange(seq)
    dense = visible_block(table(layout), positions, positions, rows, torch.arange(layout.num_rows))
    cells = dense.flatten(3, 4).flatten(1, 2).unflatten(2, (-1, block)).unflatten(1, (-1, block)).transpose(2, 3)
    some, all_of = cells.flatten(3, 4).any(dim=-1), cells.flatten(3, 4).all(dim=-1)
    mask = flex.block_mask(table(layout), rows, seq)
    kinds = ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))
    for (counts, indices), expected in zip(kinds, (some & ~all_of, all_of), strict=True):
        taken = torch.arange(indices.shape[-1]) < counts[..., None]
        chosen = torch.zeros_like(taken).scatter(-1, indices.long(), taken)
        assert torch.equal(chosen[:, 0], expected)


def test_flex_compiles_once_for_all_lengths(monkeypatch) -> None:
    monkeypatch.setattr(flex, "BLOCK", 16)
    counter = CompileCounter()
    compiled = torch.compile(flex.flex.flex_attention, backend=counter, dynamic=True)
    layout = LAYOUTS["exact_uneven"]
    for seq in (21, 40, 61, 90, 120):
        query, key, value = (
            x.flatten(2, 3) for x in flex_inputs(layout, layout.num_rows, seq + -seq % 16, torch.float32)
        )
        mask = flex.block_mask(table(layout), layout.num_rows, seq + -seq % 16)
        with torch.no_grad():
            compiled(query, key, value, block_mask=mask, enable_gqa=True)
    assert counter.frame_count == 1


def test_flex_says_that_the_cpu_cannot_train_it() -> None:
    layout = LAYOUTS["exact_n4"]
    query, *others = flex_inputs(layout, 1, 5, torch.float32)
    with pytest.raises(ValueError, match="gradients on a GPU only; use 'chunked'"):
        flex.flex_attention(query.requires_grad_(), *others, table(layout))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has gradients on a GPU only")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("backend", ["flex", "chunked"])
def test_backends_equal_dense_on_a_gpu(name: str, backend: str) -> None:
    layout = LAYOUTS[name]
    for num_query_rows, seq in ((layout.num_rows, 131), (1, 300)):
        tensors = [x.cuda().requires_grad_() for x in flex_inputs(layout, num_query_rows, seq, torch.float32)]
        results = []
        for attention in (dense_attention, BACKENDS[backend]):
            out = attention(*tensors, table(layout).cuda())
            results.append([out, *torch.autograd.grad(out, tensors, torch.ones_like(out))])
        for dense, fast in zip(*results, strict=True):
            torch.testing.assert_close(fast, dense, rtol=1e-4, atol=1e-4)
