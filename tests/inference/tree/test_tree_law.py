"""Sampled trees have the target's law: by enumeration for one node, by decodes of many seeds end to end; wrong rules not."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import permutations

import pytest
import torch
from torch import Tensor

from spd_lightning.inference.coordinator import decode
from spd_lightning.inference.sampling import SamplingParams, uniform, warp
from spd_lightning.inference.schedule import Verdict
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.tree import verify
from spd_lightning.inference.tree.drafting import TreeDraftSession
from spd_lightning.inference.tree.pipeline import TreePipeline
from spd_lightning.inference.tree.schedule import Draft, Level, Node, TreePlan, TreeShape, schedule_maker
from spd_lightning.inference.tree.stage import TreeStage
from spd_lightning.inference.tree.verify import (
    Drafts,
    RecursiveRejectionVerifier,
    make_tree_proposer,
    make_tree_verifier,
    spread,
)
from tests.inference.test_end_to_end_law import (
    CASES,
    LIMIT,
    PROMPT,
    TOKENS,
    WRONG,
    Bench,
    Case,
    _no_shape_checks,  # noqa: F401  a fixture of every test here
    chance_of_counts,
    joint_law,
    stop,
)
from tests.inference.test_verify import DRAFT_IDS, WARPS, laws, logits_pair
from tests.inference.test_verify import TOKENS as NUM_TOKENS


def plan_of(scores: list[float], width: int) -> TreePlan:
    """A cycle whose newest level has nodes of these scores."""
    nodes = tuple(Node(10 + index, 0, 0, score) for index, score in enumerate(scores))
    return TreePlan(0, 0, 1, 5, 4, levels=(Level(5, 0, nodes),), width=width)


class Choices:
    """Stands for `draw`: takes what it is told, and knows how likely that was."""

    def __init__(self, wanted: tuple[int, ...]) -> None:
        self.wanted, self.chance, self.numbers = list(wanted), 1.0, list[float]()

    def __call__(self, weights: Tensor, number: float) -> int:
        choice = self.wanted.pop(0)
        self.chance *= float(weights[choice] / weights.sum())
        self.numbers.append(number)
        return choice


def chance_of_verdicts(judge: Callable, monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> Tensor:
    """The law of a verdict on given candidates: each acceptance by bisection on its number, then the last residual."""
    numbers: dict[int, float] = {}
    weights: list[Tensor] = []
    monkeypatch.setattr(verify, "uniform", lambda seed, position, purpose, candidate=0: numbers.get(candidate, 0.0))
    monkeypatch.setattr(verify, "draw", lambda left, number: weights.append(left) or 0)
    law, reached = torch.zeros(NUM_TOKENS, dtype=torch.float64), 1.0
    for index, token in enumerate(tokens):
        low, high = 0.0, 1.0
        numbers[index] = 0.0
        verdict = Verdict(True, token)
        if judge() == verdict:
            for _ in range(45):  # accepted below the threshold
                numbers[index] = (low + high) / 2
                low, high = (numbers[index], high) if judge() == verdict else (low, numbers[index])
            law[token] += reached * low
            reached *= 1 - low
            if low > 1 - 1e-12:
                return law
        numbers[index] = 1.0
    weights.clear()
    judge()
    return law + reached * weights[-1] / weights[-1].sum()


def law_of_candidates(
    params: SamplingParams, count: int, make_verifier: Callable, monkeypatch
) -> tuple[Tensor, Tensor]:
    """What is committed behind a node with so many candidates, and what should be.

    By all ordered draws of the proposer, each with its chance, and the verdicts on them, by the code itself.
    """
    target, draft = logits_pair(3)
    p, q = laws(params, target, draft)
    proposer = make_tree_proposer(params, DRAFT_IDS)
    verifier = make_verifier(params, NUM_TOKENS, DRAFT_IDS)
    possible = q[DRAFT_IDS].nonzero().flatten().tolist()
    law, total = torch.zeros(NUM_TOKENS, dtype=torch.float64), 0.0
    for wanted in permutations(possible, min(count, len(possible))):
        choices = Choices(wanted)
        monkeypatch.setattr(verify, "draw", choices)
        drafts = proposer.propose(draft[None], plan_of([0.0], count))
        assert [d.token for d in drafts.candidates] == DRAFT_IDS[list(wanted)].tolist()
        assert len(set(choices.numbers)) == len(wanted), "a number of its own for each candidate"
        tokens = [d.token for d in drafts.candidates]

        def judge(tokens=tokens, drafts=drafts) -> Verdict:
            return verifier.judge_candidates(target, tokens, drafts.laws[10], 6)

        law += choices.chance * chance_of_verdicts(judge, monkeypatch, tokens)
        monkeypatch.undo()
        total += choices.chance
    assert abs(total - 1) < 1e-12
    return law, p


@pytest.mark.parametrize(("name", "count"), [("plain", 2), ("cold", 3), ("all", 2), ("all", 3)])
def test_candidates_of_a_node_reproduce_the_target_law(name: str, count: int, monkeypatch) -> None:
    law, p = law_of_candidates(SamplingParams(**WARPS[name], seed=0), count, make_tree_verifier, monkeypatch)
    torch.testing.assert_close(law, p, rtol=0, atol=1e-9)


def test_a_node_without_candidates_gives_the_targets_own_token() -> None:
    params, (target, _) = SamplingParams(temperature=1.0, seed=4), logits_pair(3)
    verifier = make_tree_verifier(params, NUM_TOKENS, DRAFT_IDS)
    for position in range(20):
        token = verifier.draw(target, position)
        assert verifier.judge_candidates(target, (), None, position) == Verdict(False, token)


def test_candidates_are_spread_before_they_are_drawn() -> None:
    assert spread([0.0], 4) == [4]
    assert spread([-1.0, -1.0], 4) == [2, 2]
    assert spread([-0.1, -5.0, -9.0], 3) == [3, 0, 0]
    params, generator = SamplingParams(temperature=1.0, seed=1), torch.Generator().manual_seed(0)
    for mode in ("rejection", "coupled"):
        shapes = set()
        for _ in range(10):  # whatever the laws are
            logits = torch.randn(3, len(DRAFT_IDS), generator=generator, dtype=torch.float64)
            proposer = make_tree_proposer(replace(params, verify=mode), DRAFT_IDS)
            drafts = proposer.propose(logits, plan_of([-0.5, -1.0, -6.0], 5)).candidates
            shapes.add(tuple(draft.parent for draft in drafts))
        assert shapes == {(10, 10, 10, 11, 11)}


class TreeBench(Bench):
    """The chain's bench, that decodes trees."""

    def __init__(self, family: str, num_stages: int, draft_ids: tuple[int, ...]) -> None:
        super().__init__(family, num_stages, draft_ids)
        self.tree_stages = [TreeStage(stage, num_stages, 4) for stage in self.stages]
        self.trees = TreeDraftSession(self.session, 4)

    def decode_tree(self, params: SamplingParams, shape: TreeShape, pair: "Pair") -> tuple[list[int], DecodeStats]:
        proposer = pair.proposer(params, self.draft_ids)
        verifier = pair.verifier(params, TOKENS, self.draft_ids)
        stats = DecodeStats(self.num_stages)
        pipeline = TreePipeline(self.tree_stages, self.trees, proposer, verifier)
        maker = schedule_maker(shape)
        return list(decode(pipeline, self.num_stages, PROMPT, stop(params), stats, maker)), stats


class Pair:
    """Both sides of a request, of which one may follow a wrong rule."""

    def __init__(self, proposer: Callable = make_tree_proposer, verifier: Callable = make_tree_verifier) -> None:
        self.proposer, self.verifier = proposer, verifier


@pytest.fixture(scope="module")
def bench_of() -> Callable[[Case], TreeBench]:
    benches = cache(TreeBench)
    return lambda case: benches(case.family, case.num_stages, case.draft_ids)


def chance_of_trees(bench: TreeBench, case: Case, shape: TreeShape, pair: Pair) -> tuple[float, DecodeStats]:
    counts, pooled = torch.zeros([TOKENS] * case.num_tokens, dtype=torch.float64), []
    for seed in range(case.num_seeds):
        params = replace(case.params, seed=seed, max_new_tokens=case.num_tokens)
        tokens, stats = bench.decode_tree(params, shape, pair)
        counts[tuple(tokens)] += 1
        pooled.append(stats)
    return chance_of_counts(counts, joint_law(bench, case.params, case.num_tokens)), DecodeStats.pooled(pooled)


TREES = {
    "plain": (replace(CASES["plain"], num_seeds=150), TreeShape(2, 3)),
    "three_stages": (
        replace(CASES["four_stages"], family="qwen3", num_stages=3, num_seeds=100, num_tokens=3), TreeShape(2, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_decoded_sequences_have_the_law_of_the_target(name: str, bench_of) -> None:
    case, shape = TREES[name]
    chance, stats = chance_of_trees(bench_of(case), case, shape, Pair())
    assert chance > LIMIT
    assert stats.acceptance is not None and 0.3 < stats.acceptance < 0.98


class BestProposer:
    """The likeliest candidates, whatever the numbers say, with the law that they were not drawn from."""

    def __init__(self, params: SamplingParams, draft_ids: Tensor) -> None:
        self.params, self.draft_ids = params, draft_ids

    def propose(self, draft_logits: Tensor, plan: TreePlan) -> Drafts:
        params, drafts, found = self.params, list[Draft](), dict[int, Tensor]()
        for node, row in zip(plan.levels[-1].nodes, draft_logits, strict=True):
            law = found[node.id] = warp(row, params.temperature, params.top_k, params.top_p)
            best = law.argsort(descending=True)[: int(law.count_nonzero())][: plan.width]
            drafts += [Draft(int(self.draft_ids[choice]), node.id, 0.0) for choice in best.tolist()]
        return Drafts(tuple(drafts[: plan.width]), found)


class EachAgainstQ(RecursiveRejectionVerifier):
    """Every candidate is tested as if it were a chain's."""

    def judge_candidates(self, logits, candidates, draft_probs, position):
        law = self._law(logits)
        for index, token in enumerate(candidates):
            q = float(draft_probs[self._draft_ids.index(token)])
            if uniform(self._seed, position, verify.Purpose.ACCEPT, index) * q < float(law[token]):
                return Verdict(True, token)
        return super().judge_candidates(logits, (), None, position)


class QStays(RecursiveRejectionVerifier):
    """`Q` is not renormalised without what was drawn, and keeps it."""

    def judge_candidates(self, logits, candidates, draft_probs, position):
        left = self._law(logits)
        for index, token in enumerate(candidates):
            q = float(draft_probs[self._draft_ids.index(token)])
            if verify.uniform(self._seed, position, verify.Purpose.ACCEPT, index) * q < float(left[token]):
                return Verdict(True, token)
            left = verify.residual_weights(left, draft_probs, self._draft_token_ids)
            left = left / left.sum()
        return Verdict(False, verify.draw(left, verify.uniform(self._seed, position, verify.Purpose.TARGET)))


class DropsFirst(RecursiveRejectionVerifier):
    """Judges only some of what was drawn, as if the rest had been pruned."""

    def judge_candidates(self, logits, candidates, draft_probs, position):
        return super().judge_candidates(logits, candidates[1:], draft_probs, position)


WRONG_PAIRS = {
    "the best, each against Q": (Pair(BestProposer, EachAgainstQ), 100),
    "a pruned candidate is not judged": (Pair(verifier=DropsFirst), 120),
}


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_a_wrong_rule_shows_in_the_law(name: str, bench_of) -> None:
    pair, num_seeds = WRONG_PAIRS[name]
    case = replace(CASES["cold"], num_seeds=num_seeds)
    assert chance_of_trees(bench_of(case), case, TreeShape(2, 2), pair)[0] < WRONG


def test_a_q_that_is_not_renormalised_shows_in_the_law_of_a_node(monkeypatch) -> None:
    law, p = law_of_candidates(SamplingParams(**WARPS["plain"], seed=0), 2, QStays, monkeypatch)
    assert float((law - p).abs().sum()) > 1e-3
