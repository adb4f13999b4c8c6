"""Log-probabilities of committed tokens, noted where they are drawn: beside the verifier. Knows no text."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.verify import DraftProposal, Verifier


@dataclass(frozen=True)
class TokenScore:
    """What the target said of one committed token.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens with theirs, likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenScores:
    """The scores of one answer by position, by the target's own law: before temperature, top-k and top-p.

    Args:
        num_tokens: `len(tokenizer)`; rows of logits beyond are padding.
        num_top: likeliest tokens to note.
    """

    def __init__(self, num_tokens: int, num_top: int) -> None:
        self.num_tokens = num_tokens
        self.num_top = num_top
        self.by_position: dict[int, TokenScore] = {}

    def note(self, logits: Float[Tensor, " vocab"], position: int, token: int) -> None:
        """Takes the score of the token that is committed at a position."""
        law = logits[: self.num_tokens].double().log_softmax(dim=0)
        values, ids = law.topk(min(self.num_top, len(law)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        self.by_position[position] = TokenScore(token, float(law[token]), top)


class ScoringVerifier:
    """Decides as another verifier does, and notes the score of what it decides.

    Args:
        verifier: decides.
        scores: are added to.
    """

    def __init__(self, verifier: Verifier, scores: TokenScores) -> None:
        self.verifier = verifier
        self.scores = scores

    def draw(self, logits: Float[Tensor, " vocab"], position: int) -> int:
        token = self.verifier.draw(logits, position)
        self.scores.note(logits, position, token)
        return token

    def judge(self, logits: Float[Tensor, " vocab"], proposal: DraftProposal, position: int) -> Verdict:
        verdict = self.verifier.judge(logits, proposal, position)
        self.scores.note(logits, position, verdict.token)
        return verdict


def scored(verifier: Verifier, scores: TokenScores | None) -> Verifier:
    """The verifier, which notes scores if there is something to note them in."""
    return verifier if scores is None else ScoringVerifier(verifier, scores)
