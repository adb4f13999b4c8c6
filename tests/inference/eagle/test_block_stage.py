"""Blocks behind a prompt: their logits, and the state that is left when a part of one is taken back."""

import pytest
import torch

from tests.inference.eagle.setting import whole_stage
from tests.modules.conftest import FAMILIES, make_target

TOLERANCE = {"llama": 1e-10, "qwen3": 1e-10, "qwen3_5": 1e-4}  # Transformers' delta rule is in float32
ANCHORS = (2, 4, 5)


def reference(target, ids: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Logits and anchor states of a sequence by the model's own forward."""
    states = target.forward(ids, torch.ones_like(ids), ANCHORS)
    return (states.last @ target.head_weight.T)[0], states.anchors


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [1, 2, 3, 5])
def test_blocks_partly_taken_back_go_on_as_if_what_was_kept_had_been_run_alone(family: str, kept: int) -> None:
    """Three blocks of five tokens behind a prompt of seven, of which `kept` stay; then single tokens."""
    target, block = make_target(family, 8), 5
    stage = whole_stage(target, ANCHORS, block)
    generator = torch.Generator().manual_seed(1)
    right = torch.randint(0, 256, (1, 40), generator=generator)
    expected, anchors = reference(target, right)
    stage.run(right[:, :7], 0)
    position = 7
    for _ in range(3):
        tokens = right[:, position : position + block].clone()
        wrong = tokens.clone()
        wrong[:, kept:] = (wrong[:, kept:] + 1) % 256
        output = stage.run_block(wrong, position)
        torch.testing.assert_close(
            output.logits[:kept], expected[position : position + kept], rtol=0, atol=TOLERANCE[family]
        )
        for anchor, states in zip(ANCHORS, anchors, strict=True):
            torch.testing.assert_close(
                output.anchors[anchor][:, :kept], states[:, position : position + kept], rtol=0, atol=TOLERANCE[family]
            )
        stage.keep(position + kept)
        position += kept
    for _ in range(3):
        logits = stage.run(right[:, position : position + 1], position).logits
        torch.testing.assert_close(logits, expected[position], rtol=0, atol=TOLERANCE[family])
        position += 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_behind_a_prompt_that_is_shorter_than_the_convolution(family: str) -> None:
    target = make_target(family, 8)
    stage = whole_stage(target, ANCHORS, 6)
    ids = torch.randint(0, 256, (1, 14), generator=torch.Generator().manual_seed(2))
    expected, _ = reference(target, ids)
    stage.run(ids[:, :1], 0)
    first = stage.run_block(ids[:, 1:3], 1)
    torch.testing.assert_close(first.logits, expected[1:3], rtol=0, atol=TOLERANCE[family])
    stage.keep(2)
    again = stage.run_block(ids[:, 2:8], 2)
    torch.testing.assert_close(again.logits, expected[2:8], rtol=0, atol=TOLERANCE[family])


def test_what_was_taken_back_leaves_no_trace_in_any_state() -> None:
    """Two stages that differ in the wrong tokens only: bit for bit the same states."""
    target = make_target("qwen3_5", 8)
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(3))
    logits = []
    for wrong in (0, 7):
        stage = whole_stage(target, ANCHORS, 5)
        stage.run(ids[:, :6], 0)
        block = ids[:, 6:11].clone()
        block[:, 2:] = wrong
        stage.run_block(block, 6)
        stage.keep(8)
        logits.append(stage.run_block(ids[:, 8:12], 8).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("count", [1, 2, 6])
def test_no_position_of_a_block_shares_the_slot_of_the_state_before_it(count: int) -> None:
    """However the block lies in the ring; one slot fewer fails for the longest block."""
    target = make_target("qwen3_5", 8)
    stage = whole_stage(target, ANCHORS, 6)
    ids = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(4))
    stage.run(ids[:, :4], 0)
    position = 4
    for _ in range(8):
        stage.run_block(ids[:, position : position + count], position)
        if count > 1:
            stage.keep(position + count - 1)
        position = stage.cache.length
    expected, _ = reference(target, ids)
    torch.testing.assert_close(
        stage.run(ids[:, position : position + 1], position).logits, expected[position], rtol=0, atol=1e-4
    )
