"""Acceptance at every fill level, and what it implies for decoding (design §4, "Metrics").

Knows flat lists of supervised positions; pools over batches and ranks, never averages ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric

from spd_lightning.modules.losses import TargetHead, chunk_size, wide

TOP_K = 50
"""The top-k of the sampled evaluation (design §9)."""


@dataclass(frozen=True)
class ImpliedFigures:
    """What decoding would do at these acceptance rates.

    Attributes:
        judged_per_flush: `E`, the expected number of judgements between two flushes.
        acceptance: `p = 1 - 1/E`.
        tokens_per_cycle: `alpha = E / (E + n - 1)`.
        speedup: `S0 = n * alpha`, with free drafting: post-step drafting is not, and its cost comes off it.
    """

    judged_per_flush: float
    acceptance: float
    tokens_per_cycle: float
    speedup: float


def implied_figures(acceptance_by_fill: Sequence[float]) -> ImpliedFigures:
    """Figures implied by `p_1 .. p_n`: `E = 1 + p_1 + p_1 p_2 + ...`, with `p_a = p_n` beyond `n`.

    After a flush the first judged draft was made at fill 1, the next at fill 2 and so on, until the pipeline is full.

    Raises:
        ValueError: if a rate is outside `[0, 1]`.
    """
    for fill, rate in enumerate(acceptance_by_fill, start=1):
        if not 0 <= rate <= 1:
            raise ValueError(f"acceptance {rate} at fill {fill} is outside [0, 1]")
    num_stages = len(acceptance_by_fill)
    expected, reached = 1.0, 1.0
    for rate in acceptance_by_fill[:-1]:
        reached *= rate
        expected += reached
    steady = acceptance_by_fill[-1]
    reached *= steady
    if reached > 0:
        expected = math.inf if steady == 1 else expected + reached / (1 - steady)
    if math.isinf(expected):
        return ImpliedFigures(expected, 1.0, 1.0, float(num_stages))
    alpha = expected / (expected + num_stages - 1)
    return ImpliedFigures(expected, 1 - 1 / expected, alpha, num_stages * alpha)


@dataclass(frozen=True)
class AcceptanceSums:
    """Sums over positions, one entry per fill level.

    Attributes:
        matched: drafts equal to the target's argmax over the full vocabulary.
        overlap: `sum_v min(P_v, Q_v)` at `T = 1`, `P` over the full vocabulary.
        overlap_top_k: the same with both laws cut to their `TOP_K` best tokens first.
        kl: `KL(P || Q)`, `P` renormalised on the draft vocabulary.
        covered: positions whose target argmax is in the draft vocabulary (the same at every fill).
        positions: positions (the same at every fill).
    """

    matched: Float[Tensor, " fills"]
    overlap: Float[Tensor, " fills"]
    overlap_top_k: Float[Tensor, " fills"]
    kl: Float[Tensor, " fills"]
    covered: Float[Tensor, " fills"]
    positions: Float[Tensor, " fills"]


def keep_top_k(probs: Float[Tensor, "positions vocab"], k: int) -> Float[Tensor, "positions vocab"]:
    """The law after top-k: the `k` most probable tokens, renormalised."""
    values, indices = probs.topk(min(k, probs.shape[-1]), dim=-1)
    return torch.zeros_like(probs).scatter(-1, indices, values / values.sum(dim=-1, keepdim=True))


@dataclass(frozen=True)
class TargetLaws:
    """What the target says at some positions, as drafts are judged by it.

    Attributes:
        draft_token_ids: target ids of the draft vocabulary.
        greedy: argmax over the full vocabulary.
        on_draft: probabilities at `T = 1` over the full vocabulary, of the draft ids.
        top_on_draft: the same of the law cut to its `TOP_K` best tokens.
        logs: log-probabilities of the law renormalised on the draft vocabulary.
    """

    draft_token_ids: Int[Tensor, " draft_vocab"]
    greedy: Int[Tensor, " positions"]
    on_draft: Float[Tensor, "positions draft_vocab"]
    top_on_draft: Float[Tensor, "positions draft_vocab"]
    logs: Float[Tensor, "positions draft_vocab"]

    @classmethod
    def of(
        cls, target_logits: Float[Tensor, "positions tokens"], draft_token_ids: Int[Tensor, " draft_vocab"]
    ) -> "TargetLaws":
        """The laws of these logits over the full vocabulary."""
        probs = target_logits.softmax(dim=-1)
        return cls(
            draft_token_ids,
            target_logits.argmax(dim=-1),
            probs[:, draft_token_ids],
            keep_top_k(probs, TOP_K)[:, draft_token_ids],
            F.log_softmax(target_logits[:, draft_token_ids], dim=-1),
        )

    @property
    def num_covered(self) -> Int[Tensor, ""]:
        """Positions whose argmax is in the draft vocabulary."""
        return torch.isin(self.greedy, self.draft_token_ids).sum()

    def chances(
        self, draft_logits: Float[Tensor, "positions draft_vocab"]
    ) -> tuple[Float[Tensor, "rules positions"], Float[Tensor, ""]]:
        """The chance that each draft is accepted, greedily, at `T = 1` and from the `TOP_K` best; the summed KL."""
        draft_logs = draft_logits.log_softmax(dim=-1)
        draft_probs = draft_logs.exp()
        matched = self.draft_token_ids[draft_logits.argmax(dim=-1)] == self.greedy
        overlap = torch.minimum(self.on_draft, draft_probs).sum(dim=-1)
        top_k = torch.minimum(self.top_on_draft, keep_top_k(draft_probs, TOP_K)).sum(dim=-1)
        kl = (self.logs.exp() * (self.logs - draft_logs)).sum()
        return torch.stack([matched.double(), overlap.double(), top_k.double()]), kl


@torch.no_grad()
def acceptance_sums(
    drafter_states: Sequence[Float[Tensor, "positions dim"]],
    draft_head: Float[Tensor, "draft_vocab dim"],
    draft_token_ids: Int[Tensor, " draft_vocab"],
    target_states: Float[Tensor, "positions dim"],
    head: TargetHead,
) -> AcceptanceSums:
    """Compares drafts and target at the same positions for several fill levels, in chunks of positions.

    Args:
        drafter_states: the drafter's normed outputs, one tensor per fill level.
        draft_head: the drafter's head rows.
        draft_token_ids: target ids of the draft vocabulary.
        target_states: the target's final-normed states.
        head: the target's head.
    """
    sums = {
        name: torch.zeros(len(drafter_states), dtype=torch.float64, device=target_states.device)
        for name in AcceptanceSums.__dataclass_fields__
    }
    size = chunk_size(head.num_tokens)
    for start in range(0, target_states.shape[0], size):
        chunk = slice(start, start + size)
        laws = TargetLaws.of(head.logits(target_states[chunk]), draft_token_ids)
        sums["covered"] += laws.num_covered
        sums["positions"] += laws.greedy.shape[0]
        for index, states in enumerate(drafter_states):
            (matched, overlap, top_k), kl = laws.chances(wide(F.linear(states[chunk], draft_head)))
            sums["matched"][index] += matched.sum()
            sums["overlap"][index] += overlap.sum()
            sums["overlap_top_k"][index] += top_k.sum()
            sums["kl"][index] += kl
    return AcceptanceSums(**sums)


class FillAcceptance(Metric):
    """Pooled acceptance by fill level and the figures that it implies.

    Args:
        num_stages: `n`; fill levels are `1..n`.
    """

    full_state_update = False
    higher_is_better = True

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self.num_stages = num_stages
        for name in AcceptanceSums.__dataclass_fields__:
            self.add_state(name, torch.zeros(num_stages, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, sums: AcceptanceSums) -> None:
        for name in AcceptanceSums.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(sums, name).to(self.device))

    def compute(self) -> dict[str, float]:
        """`p_fill_a`, `p_t1_fill_a`, ... and the implied figures; empty before the first supervised position."""
        positions = float(cast(Tensor, self.positions)[0])
        if not positions:
            return {}

        if not bool(cast(Tensor, self.kl).isfinite().all()):
            raise ValueError(
                "the drafter's outputs are not finite, so training has diverged: lower model.lr, or resume from an "
                "earlier checkpoint with a lower one"
            )

        def rates(name: str) -> list[float]:
            return [min(1.0, value / positions) for value in getattr(self, name).tolist()]

        figures: dict[str, float] = {
            "loss": float(cast(Tensor, self.kl)[-1]) / positions,
            "coverage": rates("covered")[-1],
        }
        for suffix, name in (("", "matched"), ("_t1", "overlap"), (f"_t1_top{TOP_K}", "overlap_top_k")):
            by_fill = rates(name)
            figures |= {f"p{suffix}_fill_{fill}": rate for fill, rate in enumerate(by_fill, start=1)}
            implied = implied_figures(by_fill)
            figures |= {
                f"p{suffix}": implied.acceptance,
                f"alpha{suffix}": implied.tokens_per_cycle,
                f"s0{suffix}": implied.speedup,
            }
        return figures
