"""How far chains of drafts get, and the tokens per round that this implies (design §9). Knows no drafter and no data.

A chain is drafted in one go and judged token by token: step `s` is only judged where all steps before it were accepted.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchmetrics import Metric

from spd_lightning.modules.losses import TargetHead, chunk_size, wide
from spd_lightning.modules.metrics import TOP_K, TargetLaws

DRAFT_LENGTHS = (3, 7, 15)
"""`k` of the published comparison."""
RULES = ("", "_t1", f"_t1_top{TOP_K}")
"""Greedy decoding, sampling at `T = 1`, and sampling from the best `TOP_K`, as suffixes of figures."""


def tokens_per_round(acceptance_by_step: Sequence[float], draft_length: int) -> float:
    """`1 + a_1 + a_1 a_2 + ...` up to `draft_length` drafts: what the target adds, and each draft that is reached.

    Args:
        acceptance_by_step: `a_s`, the chance of acceptance where all steps before were accepted; the last one holds for
            the steps beyond.
        draft_length: `k`.
    """
    expected, reached = 1.0, 1.0
    for step in range(draft_length):
        reached *= acceptance_by_step[min(step, len(acceptance_by_step) - 1)]
        expected += reached
    return expected


def chain_positions(supervised: Bool[Tensor, "batch seq"], num_steps: int) -> list[Bool[Tensor, "batch _"]]:
    """The base positions that step `s` of a chain is trained and measured at: those that decoding can draft from.

    The token behind the base is one of an answer, for the prompt's last position gives the first token of an answer
    without a draft; and so are all tokens that the chain predicts up to this step. `supervised` is the batch's: true
    at `t` iff token `t+1` is an answer's. Step `s`, of the base `t`, predicts token `t+2+s`.
    """
    bases, reached = [], supervised
    for step in range(min(num_steps, supervised.shape[1] - 1)):
        reached = reached[:, : supervised.shape[1] - 1 - step] & supervised[:, step + 1 :]
        bases.append(reached)
    return bases


@torch.no_grad()
def draft_chances(
    drafter_states: Float[Tensor, "positions dim"],
    draft_head: Float[Tensor, "draft_vocab dim"],
    draft_token_ids: Int[Tensor, " draft_vocab"],
    target_states: Float[Tensor, "positions dim"],
    head: TargetHead,
) -> tuple[Float[Tensor, "rules positions"], Float[Tensor, ""], Float[Tensor, ""]]:
    """The chance that each draft is accepted, by each of `RULES`; the summed KL; and how many argmaxes are covered.

    Args:
        drafter_states: normed outputs of one step.
        draft_head: the drafter's head rows.
        draft_token_ids: target ids of the draft vocabulary.
        target_states: the target's final-normed states at the positions whose next token is drafted.
        head: the target's head.
    """
    size = chunk_size(head.num_tokens)
    kl = torch.zeros((), dtype=torch.float64, device=target_states.device)
    covered, chances = kl.clone(), []
    for drafter_chunk, target_chunk in zip(drafter_states.split(size), target_states.split(size), strict=True):
        laws = TargetLaws.of(head.logits(target_chunk), draft_token_ids)
        of_chunk, kl_of_chunk = laws.chances(wide(F.linear(drafter_chunk, draft_head)))
        chances.append(of_chunk)
        kl += kl_of_chunk
        covered += laws.num_covered
    return torch.cat(chances, dim=1).clamp(max=1.0), kl, covered


class ChainAcceptance(Metric):
    """Pooled acceptance by step of the chain, and the tokens per round that it implies.

    Args:
        num_steps: of the chains that are measured.
    """

    full_state_update = False
    higher_is_better = True

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        for name in ("reached", "accepted"):  # how often the step was judged, and of these accepted, by rule
            self.add_state(name, torch.zeros(len(RULES), num_steps, dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("kl", "covered", "chains"):  # of the first step
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self,
        bases: Sequence[Bool[Tensor, "batch _"]],
        chances: Sequence[Float[Tensor, "rules _"]],
        kl: Float[Tensor, ""],
        covered: Float[Tensor, ""],
    ) -> None:
        """Adds a batch.

        Args:
            bases: `chain_positions`, a step each; a later step's are among those of the one before it.
            chances: of acceptance at these, in their order.
            kl: summed over the first step.
            covered: of the first step's target argmaxes, those in the draft vocabulary.
        """
        reached, accepted = cast(Tensor, self.reached), cast(Tensor, self.accepted)
        alive: Tensor | None = None
        for step, (chosen, chance) in enumerate(zip(bases, chances, strict=True)):
            grid = chance.new_zeros(len(RULES), *chosen.shape)
            grid[:, chosen] = chance
            alive = torch.ones_like(grid) if alive is None else alive[:, :, : chosen.shape[1]]
            reached[:, step] += (alive * chosen).sum(dim=(1, 2))
            alive = alive * grid
            accepted[:, step] += alive.sum(dim=(1, 2))
        self.kl = cast(Tensor, self.kl) + kl
        self.covered = cast(Tensor, self.covered) + covered
        self.chains = cast(Tensor, self.chains) + (bases[0].sum() if bases else 0)

    def compute(self) -> dict[str, float]:
        """`p_step_s` and `s0_k7` and so on, by rule; empty before the first chain.

        A step that no chain has reached has the acceptance of the one before it.
        """
        chains, kl = float(cast(Tensor, self.chains)), float(cast(Tensor, self.kl))
        if not chains:
            return {}
        if not torch.isfinite(torch.tensor(kl)):
            raise ValueError(
                "the drafter's outputs are not finite, so training has diverged: lower model.lr, or resume from an "
                "earlier checkpoint with a lower one"
            )
        figures = {"loss": kl / chains, "coverage": float(cast(Tensor, self.covered)) / chains}
        rows = zip(RULES, cast(Tensor, self.reached).tolist(), cast(Tensor, self.accepted).tolist(), strict=True)
        for suffix, reached, accepted in rows:
            rates: list[float] = []
            for judged, stayed in zip(reached, accepted, strict=True):
                rates.append(min(1.0, stayed / judged) if judged else rates[-1])
            figures |= {f"p{suffix}_step_{step}": rate for step, rate in enumerate(rates, start=1)}
            figures |= {f"s0{suffix}_k{k}": tokens_per_round(rates, k) for k in DRAFT_LENGTHS}
        return figures
