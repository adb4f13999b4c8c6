"""Sampled text has the target's law through whole EAGLE-3 decodes: exactly, and by hundreds of seeds.

The joint law of the next tokens comes from the target's own forward over all prefixes. Against it stand the sum over
everything that a decode can draw, and, as in `tests/inference/test_end_to_end_law.py` for pipelines, counts of decodes.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from spd_lightning.inference import verify
from spd_lightning.inference.sampling import SamplingParams, uniform, warp
from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.verify import DraftProposal, make_proposer, make_verifier, residual_weights
from tests.inference.eagle.setting import EagleBench
from tests.inference.test_end_to_end_law import (
    LIMIT,
    PROMPT,
    WRONG,
    AcceptAll,
    TargetAfterRejection,
    Wrong,
    _no_shape_checks,  # noqa: F401 - a fixture, in use by being here
    chance_of_counts,
    warped,
)
from tests.modules.conftest import make_target
from tests.modules.eagle.drafters import make_eagle


def make_bench(family: str, draft_length: int, num_tokens: int, draft_ids: tuple[int, ...]) -> EagleBench:
    """A target of few tokens and two rows of padding, and a drafter that is often right."""
    target = make_target(family, 8, vocab_size=num_tokens + 2, eos_token_id=0)
    drafter = make_eagle(8, draft_vocab_size=len(draft_ids))
    drafter.draft_token_ids.copy_(torch.tensor(draft_ids))
    drafter.lm_head.weight.data.mul_(0.2)  # about as flat as the target's law
    return EagleBench(target, draft_length, drafter, num_tokens)


def joint_law(bench: EagleBench, params: SamplingParams, length: int) -> Tensor:
    """The probability of every sequence of `length` tokens after the prompt, one axis a token."""
    joint, tokens = torch.ones((), dtype=torch.float64), bench.num_tokens
    prompt = prompt_of(bench)
    for count in range(length):
        ids = torch.tensor([[*prompt, *prefix] for prefix in product(range(tokens), repeat=count)])
        last = bench.target.forward(ids, torch.ones_like(ids), ()).last[:, -1]
        laws = torch.stack([warped(row, params) for row in (last @ bench.target.head_weight.T)[:, :tokens]])
        joint = joint[..., None] * laws.reshape(*joint.shape, tokens)
    return joint


def prompt_of(bench: EagleBench) -> list[int]:
    return [token % bench.num_tokens for token in PROMPT]


class EveryDraw:
    """Proposer and verifier that go through all that can be drawn, one decode after the other, depth first.

    Attributes:
        chance: of the draws of this decode.
    """

    def __init__(self, bench: EagleBench, params: SamplingParams) -> None:
        self.bench, self.params = bench, params
        self.ids = bench.drafter.draft_token_ids
        self.choices: list[list[tuple[float, object]]] = []
        self.taken: list[int] = []
        self.chance, self.depth = 1.0, 0

    def one_of(self, options: list[tuple[float, object]]):
        options = [(chance, value) for chance, value in options if chance > 0]
        if self.depth == len(self.taken):
            self.taken.append(0)
            self.choices.append(options)
        chance, value = self.choices[self.depth][self.taken[self.depth]]
        self.depth += 1
        self.chance *= chance
        return value

    def advance(self) -> bool:
        """Goes on to the next decode; false after the last."""
        while self.taken and self.taken[-1] + 1 == len(self.choices[-1]):
            self.taken.pop()
            self.choices.pop()
        if not self.taken:
            return False
        self.taken[-1] += 1
        self.chance, self.depth = 1.0, 0
        return True

    def law(self, logits: Tensor) -> Tensor:
        return warp(logits, self.params.temperature, self.params.top_k, self.params.top_p)

    def propose(self, draft_logits: Tensor, position: int) -> DraftProposal:
        probs = self.law(draft_logits)
        token = self.one_of([(float(q), int(id_)) for q, id_ in zip(probs, self.ids, strict=True)])
        return DraftProposal(token, probs)

    def draw(self, logits: Tensor, position: int) -> int:
        return self.one_of([(float(p), token) for token, p in enumerate(self.law(logits[: self.bench.num_tokens]))])

    def judge(self, logits: Tensor, proposal: DraftProposal, position: int) -> Verdict:
        p, token = self.law(logits[: self.bench.num_tokens]), proposal.token
        q = float(proposal.probs[self.ids.tolist().index(token)])
        accepted = min(1.0, float(p[token]) / q)
        rest = residual_weights(p, proposal.probs, self.ids)
        rest = rest / rest.sum()
        rejections = [((1 - accepted) * float(r), Verdict(False, other)) for other, r in enumerate(rest)]
        return self.one_of([(accepted, Verdict(True, token)), *rejections])


@pytest.mark.parametrize(
    ("draft_length", "num_new", "params"),
    [
        (1, 4, SamplingParams(temperature=1.0)),
        (2, 3, SamplingParams(temperature=0.7)),
        (2, 3, SamplingParams(temperature=1.0, top_k=2)),
        (3, 2, SamplingParams(temperature=1.0)),
    ],
    ids=["bonus", "cold", "top_k", "cut"],
)
def test_the_law_is_exact(draft_length: int, num_new: int, params: SamplingParams) -> None:
    """The sum over every draft, every verdict, every token after a rejection and every bonus token."""
    bench = make_bench("qwen3", draft_length, 3, (0, 2))
    draws = EveryDraw(bench, params)
    law: dict[tuple[int, ...], float] = defaultdict(float)
    count, rounds = 0, set()
    while True:
        tokens, stats = bench.decode(prompt_of(bench), replace(params, max_new_tokens=num_new), draws, draws)
        law[tuple(tokens)] += draws.chance
        count += 1
        rounds.add(stats.num_cycles)
        if not draws.advance():
            break
    assert count > 30 and (len(rounds) > 1 or num_new == 2)
    expected = joint_law(bench, params, num_new)
    found = torch.zeros_like(expected)
    for tokens, chance in law.items():
        found[tokens] = chance
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@dataclass(frozen=True)
class Case:
    params: SamplingParams
    family: str = "qwen3"
    draft_length: int = 2
    draft_ids: tuple[int, ...] = (1, 2, 3)
    num_new: int = 3
    num_seeds: int = 200


CASES = {
    "plain": Case(SamplingParams(temperature=1.0), draft_ids=(0, 1, 2, 3, 4)),
    "cold_top_k": Case(SamplingParams(temperature=0.7, top_k=4), draft_length=3),
    "hybrid": Case(SamplingParams(temperature=1.0, top_k=4, top_p=0.9), "qwen3_5", num_seeds=100),
}


@pytest.fixture(scope="module")
def bench_of() -> Callable[[Case], EagleBench]:
    benches = cache(make_bench)
    return lambda case: benches(case.family, case.draft_length, 5, case.draft_ids)


def chance_of_decodes(bench: EagleBench, case: Case, wrong: Wrong | None = None) -> float:
    """The p-value of the case's decodes under the target's law."""
    counts = torch.zeros([5] * case.num_new, dtype=torch.float64)
    pooled, ids = [], bench.drafter.draft_token_ids
    for seed in range(case.num_seeds):
        params = replace(case.params, seed=seed, max_new_tokens=case.num_new)
        proposer = (wrong.proposer if wrong else make_proposer)(params, ids)
        verifier = (wrong.verifier if wrong else make_verifier)(params, 5, ids)
        tokens, stats = bench.decode(prompt_of(bench), params, proposer, verifier)
        counts[tuple(tokens)] += 1
        pooled.append(stats)
    acceptance = DecodeStats.pooled(pooled).acceptance
    assert acceptance is not None and (wrong or 0.2 < acceptance < 0.95), acceptance
    return chance_of_counts(counts, joint_law(bench, case.params, case.num_new))


@pytest.mark.parametrize("name", CASES)
def test_decoded_sequences_have_the_law_of_the_target(name: str, bench_of) -> None:
    assert chance_of_decodes(bench_of(CASES[name]), CASES[name]) > LIMIT


class GreedyBonus(verify.RejectionVerifier):
    """The token behind a chain that was accepted in full is the likeliest one; the prefill's is drawn."""

    def draw(self, logits, position):
        if position == len(PROMPT):
            return super().draw(logits, position)
        return int(logits[: self._num_tokens].argmax())


WRONG_PAIRS = {
    "every draft is accepted": ("cold_top_k", Wrong(verifier=AcceptAll)),
    "a rejected draft is replaced from P": ("cold_top_k", Wrong(verifier=TargetAfterRejection)),
    "the token behind a whole chain is not drawn": ("bonus", Wrong(verifier=GreedyBonus)),
}
CASES_OF_WRONG = CASES | {"bonus": Case(SamplingParams(temperature=1.0), draft_length=1, draft_ids=(0, 2, 4))}


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_a_wrong_rule_shows_in_the_law(name: str, bench_of) -> None:
    case_name, wrong = WRONG_PAIRS[name]
    case = CASES_OF_WRONG[case_name]
    assert chance_of_decodes(bench_of(case), case, wrong) < WRONG


def test_the_same_numbers_at_every_position_show_in_the_law(bench_of, monkeypatch) -> None:
    """The law of each token alone would be right."""
    monkeypatch.setattr(verify, "uniform", lambda seed, position, purpose: uniform(seed, 0, purpose))
    assert chance_of_decodes(bench_of(CASES["plain"]), CASES["plain"], Wrong()) < WRONG
