"""Encoded rows -> the replicated layout: fill levels, rotary positions and the structural mask (design §4).

Knows the feature layout; knows neither tokenizers nor the target.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spd_lightning.data.draws import random_bits
from spd_lightning.modules.batch import ReplicatedBatch
from spd_lightning.modules.features import FeatureLayout


def judged_shares(acceptance: float, num_stages: int) -> np.ndarray:
    """Shares of the judged drafts that decoding makes at fill `1 .. n`, if each is accepted with that probability.

    After a flush the drafts made at fill 1, 2, ... are judged one after another until one is rejected (design §4,
    "Metrics"), so fill `a < n` has the share `(1-p) p^(a-1)`, and the full pipeline what is left, `p^(n-1)`.
    """
    shares = (1 - acceptance) * acceptance ** np.arange(num_stages)
    shares[-1] = acceptance ** (num_stages - 1)
    return shares


def draw_fill(
    seed: int, epoch: int, rows: Sequence[int], num_stages: int, acceptance: float | None = None
) -> np.ndarray:
    """Fill level of each row: `n` with probability 1/2, else uniform on `1..n-1`; always 1 when `n = 1`.

    Given an `acceptance`, fill levels come as often as decoding judges drafts made at them (`judged_shares`).

    A pure function of (seed, epoch, row index), whatever batch or rank the row is in.
    """
    if num_stages == 1:
        return np.ones(len(rows), dtype=np.int64)
    bits = random_bits(seed, "fill", epoch, np.asarray(rows, dtype=np.uint64))
    if acceptance is not None:
        uniform = (bits >> np.uint64(11)) * 2.0**-53
        return 1 + np.searchsorted(judged_shares(acceptance, num_stages).cumsum()[:-1], uniform, side="right")
    is_full = bits >> np.uint64(63) == 1
    partial = 1 + (bits & np.uint64(0xFFFFFFFF)) % np.uint64(num_stages - 1)
    return np.where(is_full, num_stages, partial.astype(np.int64))


class Replicator:
    """Collates encoded rows into a `ReplicatedBatch` of one feature layout.

    Args:
        layout: stages, anchors, row types and schedule of the drafter.
        seed: of the fill draws.
        pad_token_id: fills the sequences up on the right; masked everywhere, so any valid id will do.
        fill_acceptance: of the fill draws, see `draw_fill`; 1 for a pipeline that is always full.
    """

    def __init__(
        self,
        layout: FeatureLayout,
        seed: int = 0,
        pad_token_id: int = 0,
        fill_acceptance: float | None = None,
    ) -> None:
        self.num_stages = layout.num_stages
        self.row_depths = torch.tensor(layout.row_depths, dtype=torch.long)
        self.visibility = torch.tensor(layout.visibility_table(), dtype=torch.long)
        self.seed = seed
        self.pad_token_id = pad_token_id
        self.fill_acceptance = fill_acceptance

    def fill(self, epoch: int, rows: Sequence[int]) -> Tensor:
        """The fill level that each row simulates in this epoch."""
        return torch.from_numpy(draw_fill(self.seed, epoch, rows, self.num_stages, self.fill_acceptance))

    def collate(
        self, input_ids: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray], fill: Tensor, is_filler: bool = False
    ) -> ReplicatedBatch:
        """Right-pads the rows and adds what the layout says of them.

        Args:
            input_ids: token ids of each row.
            loss_masks: 1 at each row's answer tokens.
            fill: fill level of each row.
            is_filler: nothing is supervised.
        """
        lengths = np.array([len(ids) for ids in input_ids])
        shape = (len(input_ids), int(lengths.max()))
        ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        supervised = np.zeros(shape, dtype=np.bool_)
        for row, (tokens, mask) in enumerate(zip(input_ids, loss_masks, strict=True)):
            ids[row, : len(tokens)] = tokens
            if not is_filler:
                # position t predicts token t+1
                supervised[row, : len(tokens) - 1] = mask[1:] != 0
        positions = np.arange(shape[1])
        return ReplicatedBatch(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy((positions < lengths[:, None]).astype(np.int64)),
            supervised=torch.from_numpy(supervised),
            fill=fill,
            row_depths=self.row_depths,
            position_ids=torch.from_numpy(np.tile(positions, (shape[0], 1))),
            visible_row=self.visibility[fill - 1],
        )
