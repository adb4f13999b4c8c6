"""Proposing the candidates of a level and judging those of a node: greedy, rejection and coupled (design §8).

A pair is chosen once per request, beside the chain's pairs, whose draws they share. Candidates are judged in the order
in which they were drafted. Knows no ranks and no pipeline.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from spd_lightning.inference.sampling import Purpose, SamplingParams, draw, gumbel_noise, shortlist, uniform, warp
from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.token_scores import TokenScores
from spd_lightning.inference.tree.schedule import Draft, Node, TreePlan
from spd_lightning.inference.verify import RejectionVerifier, Verifier, make_verifier, residual_weights

ACCEPTANCE = 0.6
"""What the share of accepted candidates is taken for when those of a level are spread over its nodes; no result depends
on it, only how often one is right."""


@dataclass(frozen=True, eq=False)
class Drafts:
    """The candidates of a level.

    Attributes:
        candidates: those of one parent in the order in which they are judged.
        laws: by parent, the law over the draft vocabulary that the first of its candidates was drawn from, bit for bit;
            empty where none is needed.
    """

    candidates: tuple[Draft, ...]
    laws: dict[int, Float64[Tensor, " draft_vocab"]] = field(default_factory=dict)


@runtime_checkable
class TreeProposer(Protocol):
    """The drafter's side."""

    def propose(self, draft_logits: Float[Tensor, "leaves draft_vocab"], plan: TreePlan) -> Drafts:
        """At most `plan.width` candidates for `plan.drafted`, behind the nodes of the newest level."""
        ...


@runtime_checkable
class TreeVerifier(Protocol):
    """The target's side. Logits may have rows beyond the tokenizer's tokens (padding); those are never drawn."""

    def draw(self, logits: Float[Tensor, " vocab"], position: int) -> int:
        """The target's own token for `position`."""
        ...

    def judge_candidates(
        self,
        logits: Float[Tensor, " vocab"],
        candidates: Sequence[int],
        draft_probs: Float64[Tensor, " draft_vocab"] | None,
        position: int,
    ) -> Verdict:
        """Which of the candidates for `position` is accepted, if any, and the token to commit there."""
        ...


def make_tree_proposer(params: SamplingParams, draft_token_ids: Int64[Tensor, " draft_vocab"]) -> TreeProposer:
    """The drafter's side for a request; arguments as for `make_proposer`."""
    if params.is_greedy:
        return GreedyTreeProposer(draft_token_ids)
    if params.verify == "coupled":
        return CoupledTreeProposer(params, draft_token_ids)
    return RejectionTreeProposer(params, draft_token_ids)


def make_tree_verifier(
    params: SamplingParams, num_tokens: int, draft_token_ids: Int64[Tensor, " draft_vocab"]
) -> TreeVerifier:
    """The target's side for a request; arguments as for `make_verifier`."""
    if params.is_greedy or params.verify == "coupled":
        return MatchingVerifier(make_verifier(params, num_tokens))
    return RecursiveRejectionVerifier(params, num_tokens, draft_token_ids)


def spread(scores: Sequence[float], width: int) -> list[int]:
    """How many candidates each node of a level gets, `width` in all: where they are likeliest to be needed.

    Known before any of them is drawn, so every candidate that is drawn enters and is judged. The `i`-th of a node is
    needed if the node is right and the candidates before it are not.
    """
    counts = [0] * len(scores)
    for _ in range(width):
        node = max(range(len(scores)), key=lambda node: scores[node] + candidate_score(counts[node]))
        counts[node] += 1
    return counts


def candidate_score(index: int) -> float:
    """The logarithm of how likely a node's `index`-th candidate is taken to be right, given that the node is."""
    return math.log(ACCEPTANCE) + index * math.log(1 - ACCEPTANCE)


class GreedyTreeProposer:
    """The candidates of the likeliest paths, by the product of their draft probabilities, of all nodes together."""

    def __init__(self, draft_token_ids: Int64[Tensor, " draft_vocab"]) -> None:
        self._token_ids = draft_token_ids

    def propose(self, draft_logits: Float[Tensor, "leaves draft_vocab"], plan: TreePlan) -> Drafts:
        nodes, width = plan.levels[-1].nodes, min(plan.width, draft_logits.shape[1])
        found = draft_logits.double().log_softmax(dim=1).topk(width, dim=1)
        scores = found.values + torch.tensor([[node.score] for node in nodes], device=found.values.device)
        best = scores.flatten().topk(width)
        tokens = self._token_ids[found.indices.flatten()[best.indices]].tolist()
        rows = (best.indices // width).tolist()
        return Drafts(
            tuple(
                Draft(token, nodes[row].id, score)
                for token, row, score in zip(tokens, rows, best.values.tolist(), strict=True)
            )
        )


class SampledTreeProposer:
    """What the proposers that sample have in common: how many candidates each node of the newest level gets."""

    def __init__(self, params: SamplingParams, draft_token_ids: Int64[Tensor, " draft_vocab"]) -> None:
        assert params.seed is not None
        self._params, self._seed, self._token_ids = params, params.seed, draft_token_ids

    def _shares(
        self, draft_logits: Float[Tensor, "leaves draft_vocab"], plan: TreePlan
    ) -> Iterator[tuple[Node, Float[Tensor, " draft_vocab"], int]]:
        """Each node with its draft logits and its number of candidates (see `spread`)."""
        nodes = plan.levels[-1].nodes
        return zip(nodes, draft_logits, spread([node.score for node in nodes], plan.width), strict=True)


class CoupledTreeProposer(SampledTreeProposer):
    """The best of Gumbel-max on each node's draft law, with the noise that the target will use."""

    def propose(self, draft_logits: Float[Tensor, "leaves draft_vocab"], plan: TreePlan) -> Drafts:
        params, drafts = self._params, list[Draft]()
        for node, row, count in self._shares(draft_logits, plan):
            if count:
                kept, scaled = shortlist(row, params.temperature, params.top_k, params.top_p)
                ids = self._token_ids[kept]
                noisy = scaled + gumbel_noise(self._seed, plan.drafted, ids)
                best = ids[noisy.topk(min(count, len(noisy))).indices].tolist()
                drafts += [Draft(x, node.id, node.score + candidate_score(i)) for i, x in enumerate(best)]
        return Drafts(tuple(drafts))


class RejectionTreeProposer(SampledTreeProposer):
    """Candidates drawn without replacement from each node's warped draft law, which goes along with them."""

    def propose(self, draft_logits: Float[Tensor, "leaves draft_vocab"], plan: TreePlan) -> Drafts:
        params, drafts, laws = self._params, list[Draft](), dict[int, Tensor]()
        for node, row, count in self._shares(draft_logits, plan):
            laws[node.id] = warp(row, params.temperature, params.top_k, params.top_p)
            left = laws[node.id].clone()
            for index in range(min(count, int(left.count_nonzero()))):
                choice = draw(left, uniform(self._seed, plan.drafted, Purpose.DRAFT, index))
                left[choice] = 0
                drafts.append(Draft(int(self._token_ids[choice]), node.id, node.score + candidate_score(index)))
        return Drafts(tuple(drafts), laws)


class MatchingVerifier:
    """The target's own token; whichever candidate is that is accepted. Greedy, and with shared noise.

    Args:
        verifier: makes the token.
    """

    def __init__(self, verifier: Verifier) -> None:
        self.draw = verifier.draw

    def judge_candidates(
        self,
        logits: Float[Tensor, " vocab"],
        candidates: Sequence[int],
        draft_probs: Float64[Tensor, " draft_vocab"] | None,
        position: int,
    ) -> Verdict:
        token = self.draw(logits, position)
        return Verdict(accepted=token in candidates, token=token)


class RecursiveRejectionVerifier(RejectionVerifier):
    """Judges one candidate after the other against what the ones before have left of the target's law.

    With `R_1 = P` and `Q_1 = Q`: accepts `x_i` with probability `min(1, R_i(x_i)/Q_i(x_i))`; else `R_{i+1}` is
    `max(R_i - Q_i, 0)` and `Q_{i+1}` is `Q_i` without `x_i`, both renormalised. If none is accepted, draws from the last
    `R`. Committed tokens have the law `P`, and one candidate gives the chain's verdict, bit for bit.
    """

    def judge_candidates(
        self,
        logits: Float[Tensor, " vocab"],
        candidates: Sequence[int],
        draft_probs: Float64[Tensor, " draft_vocab"] | None,
        position: int,
    ) -> Verdict:
        assert self._draft_token_ids is not None
        left = self._law(logits)
        if candidates:
            assert draft_probs is not None
            drawn_from = draft_probs.to(left.device, copy=True)
            for index, token in enumerate(candidates):
                if index:
                    left, drawn_from = left / left.sum(), drawn_from / drawn_from.sum()
                draft_id = bisect_left(self._draft_ids, token)
                assert self._draft_ids[draft_id : draft_id + 1] == [token], "the draft is not in the draft vocabulary"
                limit = uniform(self._seed, position, Purpose.ACCEPT, index) * float(drawn_from[draft_id])
                if limit < float(left[token]):
                    return Verdict(accepted=True, token=token)
                left = residual_weights(left, drawn_from, self._draft_token_ids)
                drawn_from = drawn_from.index_fill(0, torch.tensor([draft_id], device=left.device), 0.0)
        return Verdict(accepted=False, token=draw(left, uniform(self._seed, position, Purpose.TARGET)))


class ScoringTreeVerifier:
    """Decides as another verifier does, and notes the score of what it decides.

    Args:
        verifier: decides.
        scores: are added to.
    """

    def __init__(self, verifier: TreeVerifier, scores: TokenScores) -> None:
        self.verifier = verifier
        self.scores = scores

    def draw(self, logits: Float[Tensor, " vocab"], position: int) -> int:
        token = self.verifier.draw(logits, position)
        self.scores.note(logits, position, token)
        return token

    def judge_candidates(
        self,
        logits: Float[Tensor, " vocab"],
        candidates: Sequence[int],
        draft_probs: Float64[Tensor, " draft_vocab"] | None,
        position: int,
    ) -> Verdict:
        verdict = self.verifier.judge_candidates(logits, candidates, draft_probs, position)
        self.scores.note(logits, position, verdict.token)
        return verdict


def scored_candidates(verifier: TreeVerifier, scores: TokenScores | None) -> TreeVerifier:
    """The verifier, which notes scores if there is something to note them in."""
    return verifier if scores is None else ScoringTreeVerifier(verifier, scores)
