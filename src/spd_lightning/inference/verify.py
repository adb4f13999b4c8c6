"""Proposing a draft token and judging it, in three matching pairs: greedy, rejection and coupled (design §5, step 3).

A pair is chosen once per request. Both sides see one row of logits and a position; they know no ranks and no pipeline.
The position is always that of the token to be drawn, counted from 0 at the prompt's first token.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Float64, Int64
from torch import Tensor

from spd_lightning.inference.sampling import (
    Purpose,
    SamplingParams,
    best_token,
    draw,
    gumbel_noise,
    shortlist,
    uniform,
    warp,
)
from spd_lightning.inference.schedule import Verdict


@dataclass(frozen=True, eq=False)
class DraftProposal:
    """A drafted token.

    Args:
        token: its target id.
        probs: the law over the draft vocabulary that it was drawn from, bit for bit; None where none is needed.
    """

    token: int
    probs: Float64[Tensor, " draft_vocab"] | None = None


@runtime_checkable
class Proposer(Protocol):
    """The drafter's side."""

    def propose(self, draft_logits: Float[Tensor, " draft_vocab"], position: int) -> DraftProposal:
        """The draft for `position`."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """The target's side. Logits may have rows beyond the tokenizer's tokens (padding); those are never drawn."""

    def draw(self, logits: Float[Tensor, " vocab"], position: int) -> int:
        """The target's own token for `position`: the prefill's token, and every token of autoregressive decoding."""
        ...

    def judge(self, logits: Float[Tensor, " vocab"], proposal: DraftProposal, position: int) -> Verdict:
        """Whether the draft for `position` is accepted, and the token to commit there."""
        ...


def make_proposer(params: SamplingParams, draft_token_ids: Int64[Tensor, " draft_vocab"]) -> Proposer:
    """The drafter's side for a request.

    Args:
        params: with a seed if they sample (`SamplingParams.seeded`), the same one on every rank.
        draft_token_ids: target ids of the draft vocabulary, ascending, on the device of the draft logits.
    """
    if params.is_greedy:
        return GreedyProposer(draft_token_ids)
    if params.verify == "coupled":
        return CoupledProposer(params, draft_token_ids)
    return RejectionProposer(params, draft_token_ids)


def make_verifier(
    params: SamplingParams, num_tokens: int, draft_token_ids: Int64[Tensor, " draft_vocab"] | None = None
) -> Verifier:
    """The target's side for a request.

    Args:
        params: with a seed if they sample (`SamplingParams.seeded`), the same one on every rank.
        num_tokens: `len(tokenizer)`; rows of logits beyond are padding.
        draft_token_ids: as for `make_proposer`, on the device of the target's logits; None if nothing will be judged.
    """
    if params.is_greedy:
        return GreedyVerifier(num_tokens)
    if params.verify == "coupled":
        return CoupledVerifier(params, num_tokens)
    return RejectionVerifier(params, num_tokens, draft_token_ids)


class GreedyProposer:
    """The likeliest draft."""

    def __init__(self, draft_token_ids: Int64[Tensor, " draft_vocab"]) -> None:
        self._token_ids = draft_token_ids

    def propose(self, draft_logits: Float[Tensor, " draft_vocab"], position: int) -> DraftProposal:
        return DraftProposal(int(self._token_ids[best_token(draft_logits)]))


class GreedyVerifier:
    """The target's likeliest token, of equal ones the lowest id; a draft is accepted if it is that."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def draw(self, logits: Float[Tensor, " vocab"], position: int) -> int:
        return best_token(logits[: self._num_tokens])

    def judge(self, logits: Float[Tensor, " vocab"], proposal: DraftProposal, position: int) -> Verdict:
        token = self.draw(logits, position)
        return Verdict(accepted=token == proposal.token, token=token)


class RejectionProposer:
    """A draft drawn from the warped draft law, which goes along with it."""

    def __init__(self, params: SamplingParams, draft_token_ids: Int64[Tensor, " draft_vocab"]) -> None:
        self._params, self._seed, self._token_ids = params, _seed(params), draft_token_ids

    def propose(self, draft_logits: Float[Tensor, " draft_vocab"], position: int) -> DraftProposal:
        probs = warp(draft_logits, self._params.temperature, self._params.top_k, self._params.top_p)
        choice = draw(probs, uniform(self._seed, position, Purpose.DRAFT))
        return DraftProposal(int(self._token_ids[choice]), probs)


class RejectionVerifier:
    """Accepts `x` with probability `min(1, P(x)/Q(x))`, else draws from `normalise(max(P - Q, 0))`.

    `P` is the target's warped law and `Q` the draft's, which is zero outside the draft vocabulary. Committed tokens
    have the law `P`, and the acceptance rate, `1 - d` with `d` the total variation distance, is the best possible.
    """

    def __init__(
        self, params: SamplingParams, num_tokens: int, draft_token_ids: Int64[Tensor, " draft_vocab"] | None
    ) -> None:
        self._params, self._seed, self._num_tokens = params, _seed(params), num_tokens
        self._draft_token_ids = draft_token_ids
        self._draft_ids = [] if draft_token_ids is None else draft_token_ids.tolist()

    def draw(self, logits: Float[Tensor, " vocab"], position: int) -> int:
        return draw(self._law(logits), uniform(self._seed, position, Purpose.TARGET))

    def judge(self, logits: Float[Tensor, " vocab"], proposal: DraftProposal, position: int) -> Verdict:
        assert proposal.probs is not None and self._draft_token_ids is not None
        draft_id = bisect_left(self._draft_ids, proposal.token)
        assert self._draft_ids[draft_id : draft_id + 1] == [proposal.token], "the draft is not in the draft vocabulary"
        target_probs, draft_probs = self._law(logits), proposal.probs.to(logits.device)
        limit = uniform(self._seed, position, Purpose.ACCEPT) * float(draft_probs[draft_id])
        if limit < float(target_probs[proposal.token]):
            return Verdict(accepted=True, token=proposal.token)
        residual = residual_weights(target_probs, draft_probs, self._draft_token_ids)
        return Verdict(accepted=False, token=draw(residual, uniform(self._seed, position, Purpose.TARGET)))

    def _law(self, logits: Float[Tensor, " vocab"]) -> Float64[Tensor, " tokens"]:
        params = self._params
        return warp(logits[: self._num_tokens], params.temperature, params.top_k, params.top_p)


def residual_weights(
    target_probs: Float64[Tensor, " tokens"],
    draft_probs: Float64[Tensor, " draft_vocab"],
    draft_token_ids: Int64[Tensor, " draft_vocab"],
) -> Float64[Tensor, " tokens"]:
    """`max(P - Q, 0)`, not normalised; `P` itself where nothing is left, that is, where `P` is `Q`."""
    residual = target_probs.index_add(0, draft_token_ids, draft_probs, alpha=-1).clamp_(min=0)
    return residual if bool(residual.any()) else target_probs


class CoupledProposer:
    """Gumbel-max on the draft law, with the noise that the target will use."""

    def __init__(self, params: SamplingParams, draft_token_ids: Int64[Tensor, " draft_vocab"]) -> None:
        self._params, self._seed, self._token_ids = params, _seed(params), draft_token_ids

    def propose(self, draft_logits: Float[Tensor, " draft_vocab"], position: int) -> DraftProposal:
        kept, scaled = shortlist(draft_logits, self._params.temperature, self._params.top_k, self._params.top_p)
        return DraftProposal(_gumbel_max(self._token_ids[kept], scaled, self._seed, position))


class CoupledVerifier:
    """Gumbel-max on the target's law; a draft is accepted if the same noise made it the same token.

    So the text is that of autoregressive sampling with this noise. The acceptance rate lies between `(1-d)/(1+d)`
    and `1-d`, `d` being the total variation distance.
    """

    def __init__(self, params: SamplingParams, num_tokens: int) -> None:
        self._params, self._seed, self._num_tokens = params, _seed(params), num_tokens

    def draw(self, logits: Float[Tensor, " vocab"], position: int) -> int:
        params = self._params
        kept, scaled = shortlist(logits[: self._num_tokens], params.temperature, params.top_k, params.top_p)
        return _gumbel_max(kept, scaled, self._seed, position)

    def judge(self, logits: Float[Tensor, " vocab"], proposal: DraftProposal, position: int) -> Verdict:
        token = self.draw(logits, position)
        return Verdict(accepted=token == proposal.token, token=token)


def _gumbel_max(token_ids: Int64[Tensor, " kept"], scaled: Float64[Tensor, " kept"], seed: int, position: int) -> int:
    """The target id that maximises `log law + noise`, which is a draw from the law of these scaled logits."""
    return int(token_ids[(scaled + gumbel_noise(seed, position, token_ids)).argmax()])


def _seed(params: SamplingParams) -> int:
    assert params.seed is not None, "SamplingParams.seeded() gives sampling a seed"
    return params.seed
