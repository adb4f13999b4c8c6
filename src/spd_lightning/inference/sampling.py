"""What is sampled and how: the parameters of a request, the warped law of a row of logits, and keyed random draws.

Target and draft use the same functions. Knows no verification and no pipeline.
"""

import math
import secrets
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b
from typing import Literal, get_args

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

VerifyMode = Literal["rejection", "coupled"]

GREEDY_BELOW = 1e-5  # a lower temperature is greedy decoding
MAX_SEED = 2**63 - 1  # a seed travels as an int64


@dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    Args:
        max_new_tokens: tokens to commit at most, the prefill's own included.
        temperature: divides the logits; below 1e-5 decoding is greedy.
        top_k: only the `top_k` likeliest tokens can be drawn (ties: the lower id); 0 is off.
        top_p: of those, only the smallest number of likeliest tokens whose probabilities sum to `top_p`; 1 is off.
        seed: of all random draws; the same seed gives the same tokens. None: `seeded` draws one.
        verify: how a sampled draft is verified. `rejection` accepts most; `coupled` gives the very text that
            autoregressive sampling with the same seed gives. Greedy decoding ignores it.
        stop: strings that end the text; they are not part of it.
        ignore_eos: decode on past the end-of-sequence tokens.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    verify: VerifyMode = "rejection"
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ValueError(f"stop={self.stop!r}: a tuple of strings is needed, such as ({self.stop!r},)")
        for name, least in (("max_new_tokens", 1), ("top_k", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value}: an integer of at least {least} is needed")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: a number of at least 0 is needed; 0 decodes greedily")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: a number above 0 and at most 1 is needed; 1 keeps every token")
        if self.seed is not None and not (isinstance(self.seed, int) and 0 <= self.seed <= MAX_SEED):
            raise ValueError(f"seed={self.seed}: an integer from 0 to {MAX_SEED} is needed")
        if self.verify not in get_args(VerifyMode):
            raise ValueError(f"verify={self.verify!r}: {' or '.join(get_args(VerifyMode))} is needed")
        if "" in self.stop:
            raise ValueError("stop: an empty string would end every text before its first token; leave it out")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    def seeded(self) -> "SamplingParams":
        """These parameters with a seed: their own, or else a fresh one. Call it once per request, on one rank."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(48))


def best_token(logits: Float[Tensor, " vocab"]) -> int:
    """The index of the largest logit; of equal ones the first."""
    value, token = logits.max(dim=0)
    _check_finite(value)
    return int(token)


def shortlist(
    logits: Float[Tensor, " vocab"], temperature: float, top_k: int, top_p: float
) -> tuple[Int64[Tensor, " kept"], Float64[Tensor, " kept"]]:
    """The tokens that temperature, then top-k, then top-p leave, and their logits divided by the temperature."""
    _check_finite(logits.max())
    kept = torch.arange(len(logits), device=logits.device)
    if 0 < top_k < len(logits):
        kept = (logits >= logits.topk(top_k).values.min()).nonzero().flatten()  # more than top_k if some are equal
        kept = kept[_ranking(logits[kept])[:top_k]]
    scaled = logits[kept].double() / temperature
    if top_p < 1:
        probs = scaled.softmax(dim=0)
        # All others together hold less than 1 - top_p. This spares a sort of the vocabulary, most of the time here.
        likely = (probs >= (1 - top_p) / (2 * len(probs))).nonzero().flatten()
        likely = likely[_ranking(logits[kept[likely]])]
        cumulative = probs[likely].cpu().cumsum(dim=0)  # on the CPU: see `draw`
        likely = likely[: int((cumulative[:-1] < top_p).sum()) + 1]
        kept, scaled = kept[likely], scaled[likely]
    return kept, scaled


def warp(logits: Float[Tensor, " vocab"], temperature: float, top_k: int, top_p: float) -> Float64[Tensor, " vocab"]:
    """The law that tokens are drawn from: `shortlist`'s tokens, renormalised, and exactly 0 elsewhere."""
    kept, scaled = shortlist(logits, temperature, top_k, top_p)
    return scaled.new_zeros(len(logits)).scatter_(0, kept, scaled.softmax(dim=0))


class Purpose(IntEnum):
    """What a random draw at a position is for; draws of different purposes are independent."""

    DRAFT = 0  # the drafter's token
    ACCEPT = 1  # whether the draft is accepted
    TARGET = 2  # the target's token: drawn from its law, or from the residual after a rejection
    NOISE = 3  # the noise that target and draft share in coupled sampling


def uniform(seed: int, position: int, purpose: Purpose, candidate: int = 0) -> float:
    """A number in [0, 1), a pure function of its key.

    Args:
        seed: of the request.
        position: of the token to be drawn.
        purpose: of the draw.
        candidate: of several for one position, in the order in which they are drawn; the first is a chain's only one.
    """
    return (_key(seed, position, purpose, candidate) >> 11) * 2.0**-53


def gumbel_noise(seed: int, position: int, token_ids: Int64[Tensor, " tokens"]) -> Float64[Tensor, " tokens"]:
    """One standard Gumbel number for each **target** token id, a pure function of (seed, position, id).

    It is SplitMix64 at index `id` of the key's stream, in integers (which wrap around), so that the random bits are
    the same on every device, and nobody has to make the noise of ids that cannot be drawn.
    """
    bits = token_ids * _signed(0x9E3779B97F4A7C15) + _signed(_key(seed, position, Purpose.NOISE))
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    bits = bits ^ _shifted(bits, 31)
    uniforms = (_shifted(bits, 11).double() * 2.0**-53).clamp_(min=2.0**-54)  # 0 would give an infinity
    return uniforms.log_().neg_().log_().neg_()


def draw(weights: Float64[Tensor, " vocab"], number: float) -> int:
    """The index that `number`, uniform in [0, 1), selects by inverting the cumulative sum; one of weight 0 never.

    The sum is taken on the CPU: a parallel one need not be monotonic, nor the same twice.
    """
    possible = weights.nonzero().flatten()
    cumulative = weights[possible].cpu().cumsum(dim=0)
    return int(possible[torch.searchsorted(cumulative, cumulative[-1] * number, right=True)])


def _ranking(logits: Float[Tensor, " vocab"]) -> Int64[Tensor, " vocab"]:
    """The indices by falling logit; of equal ones the lower index comes first."""
    return logits.sort(descending=True, stable=True).indices


def _key(seed: int, position: int, purpose: Purpose, candidate: int = 0) -> int:
    """64 well mixed bits."""
    key = f"{seed} {position} {purpose:d}" + (f" {candidate}" if candidate else "")
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little")


def _signed(bits: int) -> int:
    """64 bits as the int64 that holds them."""
    return bits - 2**64 if bits >= 2**63 else bits


def _shifted(bits: Int64[Tensor, " tokens"], places: int) -> Int64[Tensor, " tokens"]:
    """The 64 bits shifted right with zeros moving in; `>>` alone copies the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _check_finite(largest: Float[Tensor, ""]) -> None:
    if not torch.isfinite(largest):
        raise ValueError(
            f"the largest logit is {largest.item()}, so no token can be chosen: check the weights, or use a wider dtype"
        )
