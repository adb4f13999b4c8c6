"""What a chain sees in the training-time test: by hand, and in chunks as in one dense softmax."""

import pytest
import torch

from spd_lightning.modules.eagle import unrolled_attention as module
from spd_lightning.modules.eagle.unrolled_attention import unrolled_attention
from tests.modules.eagle.drafters import dense_unrolled_attention, unrolled_mask

# Four positions, three steps: step 0 has the bases 0 1 2 3, step 1 has 0 1 2, step 2 has 0 1.
BY_HAND = """
1000 000 00
1100 000 00
1110 000 00
1111 000 00
1000 100 00
1100 010 00
1110 001 00
1000 100 10
1100 010 01
"""


def keys_of(bases: list[int], seed: int, heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, count, 8, dtype=torch.float64, generator=generator) for count in bases]


def weights_seen(bases: list[int]) -> torch.Tensor:
    """The attention weights of every step, read off by values that are unit vectors."""
    total = sum(bases)
    units = torch.eye(total, dtype=torch.float64)[None, None]
    keys = [torch.zeros(1, 1, count, total, dtype=torch.float64) for count in bases]
    values = list(units.split(bases, dim=2))
    rows = [unrolled_attention(keys[step], keys[: step + 1], values[: step + 1])[0, 0] for step in range(len(bases))]
    return torch.cat(rows)


def test_each_step_sees_what_the_matrix_written_by_hand_says() -> None:
    wanted = torch.tensor([[int(digit) for digit in row.replace(" ", "")] for row in BY_HAND.split("\n") if row])
    weights = weights_seen([4, 3, 2])
    assert torch.equal((weights > 0).long(), wanted)
    # Keys of zeros are all alike, so what is seen is seen equally.
    torch.testing.assert_close(weights, wanted / wanted.sum(dim=1, keepdim=True).double())
    assert torch.equal(unrolled_mask([4, 3, 2]).long(), wanted)


@pytest.mark.parametrize("length", [1, 16, 64])
def test_chunks_are_the_dense_softmax_and_so_are_their_gradients(length: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "CHUNK", length)
    bases = [40, 39, 38, 37]
    keys, values = keys_of(bases, 1), keys_of(bases, 2)
    query = keys_of([37], 3, heads=4)[0]
    inputs = [query, *keys, *values]
    for tensor in inputs:
        tensor.requires_grad_()
    found, expected = (attention(query, keys, values) for attention in (unrolled_attention, dense_unrolled_attention))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    target = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    gradients = [torch.autograd.grad((out * target).sum(), inputs) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
