"""Sampled text has the target's law through the whole pipeline: prefill, cycles, rejections and refilling included.

The joint law of the next tokens is enumerated with the target's own forward over all prefixes, and the decodes of
hundreds of seeds are held against it in each case; wrong rules fail the same test. The law of one judgement is in
`test_verify.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import jaxtyping
import pytest
import torch
from torch import Tensor

from spd_lightning.inference import verify
from spd_lightning.inference.autoregressive import decode_autoregressively
from spd_lightning.inference.coordinator import decode
from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.runtime.local import LocalPipeline
from spd_lightning.inference.sampling import SamplingParams, uniform, warp
from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import DraftProposal, make_proposer, make_verifier
from spd_lightning.modules.features import FeatureLayout
from tests.inference.conftest import TOKENIZER, cut
from tests.inference.test_verify import exact_coupled_acceptance
from tests.modules.conftest import make_drafter, make_target

TOKENS, VOCAB = 5, 7  # two padding rows
EVERY, GAPS = (0, 1, 2, 3, 4), (1, 3, 4)
PROMPT = [1, 4]
LIMIT, WRONG = 1e-3, 1e-6


@dataclass(frozen=True)
class Case:
    """How one target is decoded."""

    params: SamplingParams
    draft_ids: tuple[int, ...] = EVERY
    family: str = "qwen3"
    num_stages: int = 2
    num_tokens: int = 3
    num_seeds: int = 300


CASES = {
    "plain": Case(SamplingParams(temperature=1.0)),
    "top_k": Case(SamplingParams(temperature=1.0, top_k=3)),
    "top_p": Case(SamplingParams(temperature=1.0, top_p=0.8)),
    "cold": Case(SamplingParams(temperature=0.7), GAPS),
    "cold_top_k": Case(SamplingParams(temperature=0.7, top_k=2), GAPS),
    "four_stages": Case(SamplingParams(temperature=1.0, top_k=4, top_p=0.9), GAPS, "qwen3_5", 4, 4, 100),
}


class OneAttendPerLayer(DraftSession):
    """Makes the attention of each layer once: under the tests' type checks, making it is most of a cycle."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self._made = cache(super()._attend)

    def _attend(self, buffer):
        return self._made(buffer)


class Bench:
    """A target, its stages and a drafter that is often right; one decode after the other."""

    def __init__(self, family: str, num_stages: int, draft_ids: tuple[int, ...]) -> None:
        self.target = make_target(family, num_stages, vocab_size=VOCAB, eos_token_id=0)
        self.target.model.lm_head.weight.data.mul_(3)  # so that temperature matters
        layout = FeatureLayout.build(num_stages, num_stages)
        drafter = make_drafter(layout, num_spec_layers=1, draft_vocab_size=len(draft_ids))
        drafter.draft_token_ids.copy_(torch.tensor(draft_ids))
        drafter.lm_head.weight.data.mul_(0.2)  # about as flat as the target's law
        self.num_stages, self.draft_ids = num_stages, drafter.draft_token_ids
        self.stages = cut(self.target, layout, capacity=32)
        self.session = OneAttendPerLayer(drafter, self.target.model.model.embed_tokens, 32)

    def decode(self, params: SamplingParams, wrong: "Wrong | None" = None) -> tuple[list[int], DecodeStats, "Laws"]:
        proposer = (wrong.proposer if wrong else make_proposer)(params, self.draft_ids)
        verifier = (wrong.verifier if wrong else make_verifier)(params, TOKENS, self.draft_ids)
        stats, laws = DecodeStats(self.num_stages), Laws(proposer, verifier, params, self.draft_ids)
        pipeline = LocalPipeline(self.stages, self.session, laws, laws)
        tokens = list(decode(pipeline, self.num_stages, PROMPT, stop(params), stats))
        return tokens, stats, laws

    def decode_plainly(self, params: SamplingParams) -> list[int]:
        return list(decode_autoregressively(self.stages, make_verifier(params, TOKENS), PROMPT, stop(params)))


class Laws:
    """Proposer and verifier in one, as given; keeps both sides' logits of what is judged."""

    def __init__(self, proposer, verifier, params: SamplingParams, draft_ids: Tensor) -> None:
        self.proposer, self.verifier, self.params, self.draft_ids = proposer, verifier, params, draft_ids
        self.draft_logits: dict[int, Tensor] = {}
        self.judged: list[tuple[Tensor, Tensor]] = []

    def propose(self, draft_logits: Tensor, position: int) -> DraftProposal:
        self.draft_logits[position] = draft_logits
        return self.proposer.propose(draft_logits, position)

    def draw(self, logits: Tensor, position: int) -> int:
        return self.verifier.draw(logits, position)

    def judge(self, logits: Tensor, proposal: DraftProposal, position: int) -> Verdict:
        self.judged.append((logits, self.draft_logits[position]))
        return self.verifier.judge(logits, proposal, position)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """`P` and `Q` over all tokens, of each judgement."""
        for logits, draft_logits in self.judged:
            q = torch.zeros(TOKENS, dtype=torch.float64)
            q[self.draft_ids] = warped(draft_logits, self.params)
            yield warped(logits[:TOKENS], self.params), q


@pytest.fixture(autouse=True)
def _no_shape_checks() -> Iterator[None]:
    """Thousands of forwards of the same shapes; the checks would take most of the time."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="module")
def bench_of() -> Callable[[Case], Bench]:
    benches = cache(Bench)
    return lambda case: benches(case.family, case.num_stages, case.draft_ids)


def stop(params: SamplingParams) -> StopCondition:
    return StopCondition((), params.max_new_tokens, (), TOKENIZER)


def warped(logits: Tensor, params: SamplingParams) -> Tensor:
    """The definition: temperature, then the likeliest `top_k`, then the fewest of them that hold `top_p`."""
    law = (logits.double() / params.temperature).softmax(0)
    ranked = law.argsort(descending=True)[: params.top_k or None]
    held = (law[ranked] / law[ranked].sum()).cumsum(0)
    kept = ranked[: int((held < params.top_p).sum()) + 1]
    return torch.zeros_like(law).scatter(0, kept, law[kept] / law[kept].sum())


def joint_law(bench: Bench, params: SamplingParams, num_tokens: int) -> Tensor:
    """The probability of every sequence of `num_tokens` tokens after the prompt, one axis a token."""
    joint = torch.ones((), dtype=torch.float64)
    for length in range(num_tokens):
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in product(range(TOKENS), repeat=length)])
        last = bench.target.forward(ids, torch.ones_like(ids), ()).last[:, -1]
        laws = torch.stack([warped(row, params) for row in (last @ bench.target.head_weight.T)[:, :TOKENS]])
        joint = joint[..., None] * laws.reshape(*joint.shape, TOKENS)
    return joint


def chance_of_counts(counts: Tensor, law: Tensor) -> float:
    """The p-value of Pearson's test; rare sequences are pooled until five are expected, impossible ones must not occur."""
    counts, expected = counts.flatten(), law.flatten() * counts.sum()
    if bool(counts[expected == 0].any()):
        return 0.0
    pools = [[0.0, 0.0]]
    for cell in expected.argsort().tolist():
        if pools[-1][1] >= 5:
            pools.append([0.0, 0.0])
        pools[-1][0] += float(counts[cell])
        pools[-1][1] += float(expected[cell])
    assert len(pools) > 5, "too few different sequences to tell laws apart"
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in pools)
    return float(torch.special.gammaincc(torch.tensor((len(pools) - 1) / 2), torch.tensor(statistic / 2)))


def chance_of_decodes(bench: Bench, case: Case, wrong: "Wrong | None" = None) -> float:
    """The p-value of the case's decodes under the target's law."""
    counts = torch.zeros([TOKENS] * case.num_tokens, dtype=torch.float64)
    pooled = []
    for seed in range(case.num_seeds):
        params = replace(case.params, seed=seed, max_new_tokens=case.num_tokens)
        tokens, stats, _ = bench.decode(params, wrong)
        counts[tuple(tokens)] += 1
        pooled.append(stats)
    acceptance = DecodeStats.pooled(pooled).acceptance
    assert acceptance is not None and (wrong or 0.2 < acceptance < 0.9), acceptance
    return chance_of_counts(counts, joint_law(bench, case.params, case.num_tokens))


@pytest.mark.parametrize("name", CASES)
def test_decoded_sequences_have_the_law_of_the_target(name: str, bench_of) -> None:
    assert chance_of_decodes(bench_of(CASES[name]), CASES[name]) > LIMIT


@dataclass(frozen=True)
class Wrong:
    """A pair of which one side follows a wrong rule."""

    proposer: Callable = make_proposer
    verifier: Callable = make_verifier


class AcceptAll(verify.RejectionVerifier):
    def judge(self, logits, proposal, position):
        return Verdict(accepted=True, token=proposal.token)


class TargetAfterRejection(verify.RejectionVerifier):
    def judge(self, logits, proposal, position):
        verdict = super().judge(logits, proposal, position)
        return verdict if verdict.accepted else Verdict(accepted=False, token=self.draw(logits, position))


class OtherWarping(verify.RejectionProposer):
    def propose(self, draft_logits, position):
        return replace(super().propose(draft_logits, position), probs=warp(draft_logits, 1.0, 0, 1.0))


class LawOfEarlierDraft(verify.RejectionProposer):
    """After a rejection the position is drafted again; the law of the first time stays with it."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.first: dict[int, Tensor] = {}

    def propose(self, draft_logits, position):
        proposal = super().propose(draft_logits, position)
        return replace(proposal, probs=self.first.setdefault(position, proposal.probs))


def make_warm_proposer(params, draft_ids):
    return make_proposer(replace(params, temperature=1.0), draft_ids)


def make_warm_verifier(params, *given):
    return make_verifier(replace(params, temperature=1.0), *given)


WRONG_PAIRS = {
    "the temperature is left out": ("cold", Wrong(make_warm_proposer, make_warm_verifier)),
    "every draft is accepted": ("cold_top_k", Wrong(verifier=AcceptAll)),
    "a rejected draft is replaced from P": ("cold_top_k", Wrong(verifier=TargetAfterRejection)),
    "Q is warped in another way": ("cold_top_k", Wrong(proposer=OtherWarping)),
    "Q is that of an earlier draft": ("cold_top_k", Wrong(proposer=LawOfEarlierDraft)),
}


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_a_wrong_rule_shows_in_the_law(name: str, bench_of) -> None:
    case_name, wrong = WRONG_PAIRS[name]
    case = replace(CASES[case_name], num_seeds=200)
    assert chance_of_decodes(bench_of(case), case, wrong) < WRONG


def test_the_same_numbers_at_every_position_show_in_the_law(bench_of, monkeypatch) -> None:
    """The law of each token alone would be right."""
    monkeypatch.setattr(verify, "uniform", lambda seed, position, purpose: uniform(seed, 0, purpose))
    case = replace(CASES["plain"], num_seeds=200)
    assert chance_of_decodes(bench_of(case), case, Wrong()) < WRONG


def test_coupled_text_is_plain_sampling_with_the_same_noise_for_200_seeds(bench_of) -> None:
    """And drafts are accepted as often as the laws at the judged positions say, within the interval of design §5."""
    case, num_judged, num_accepted = CASES["cold"], 0, 0
    lowest = expected = highest = unshared = 0.0
    for seed in range(200):
        params = replace(case.params, seed=seed, max_new_tokens=6, verify="coupled")
        tokens, stats, laws = bench_of(case).decode(params)
        assert tokens == bench_of(case).decode_plainly(params)
        num_judged += stats.num_judged
        num_accepted += stats.num_accepted
        for p, q in laws.pairs():
            distance = 0.5 * float((p - q).abs().sum())
            lowest += (1 - distance) / (1 + distance)
            expected += exact_coupled_acceptance(p, q)
            highest += 1 - distance
            unshared += float(p @ q)
    deviations = 0.5 * num_judged**0.5  # one standard deviation at most
    assert num_judged == 1000
    assert lowest < expected < highest
    assert abs(num_accepted - expected) < 3 * deviations
    assert lowest - deviations < num_accepted < highest + deviations
    assert unshared < expected - 6 * deviations  # noise that is not shared would be seen


def test_rejection_accepts_as_often_as_the_distance_of_the_laws_allows(bench_of) -> None:
    case, num_judged, num_accepted, overlap = CASES["cold"], 0, 0, 0.0
    for seed in range(150):
        _, stats, laws = bench_of(case).decode(replace(case.params, seed=seed, max_new_tokens=4))
        num_judged += stats.num_judged
        num_accepted += stats.num_accepted
        overlap += sum(float(torch.minimum(p, q).sum()) for p, q in laws.pairs())
    assert num_judged == 450
    assert abs(num_accepted - overlap) < 3 * 0.5 * num_judged**0.5


@pytest.mark.parametrize("name", ["plain", "four_stages"])
def test_one_token_left_by_top_k_is_greedy_decoding(name: str, bench_of) -> None:
    bench = bench_of(CASES[name])
    greedy = bench.decode(SamplingParams(12))[0]
    assert len(set(greedy)) > 1 and greedy == bench.decode_plainly(SamplingParams(12))
    for mode in ("rejection", "coupled"):
        for seed in range(3):
            assert bench.decode(SamplingParams(12, 1.0, top_k=1, seed=seed, verify=mode))[0] == greedy


@pytest.mark.parametrize("mode", ["rejection", "coupled"])
def test_a_seed_gives_its_tokens_whatever_was_decoded_before(mode, bench_of) -> None:
    def tokens_of(seed: int) -> tuple[int, ...]:
        params = SamplingParams(6, 1.0, seed=seed, verify=mode)
        return tuple(bench_of(CASES["four_stages"]).decode(params)[0])

    forward = {seed: tokens_of(seed) for seed in range(8)}
    assert {seed: tokens_of(seed) for seed in reversed(range(8))} == forward
    assert len(set(forward.values())) > 5
