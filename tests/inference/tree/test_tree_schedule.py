"""The decode algorithm of trees without tensors: any drafter gives the oracle's tokens, in bounded cycles."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spd_lightning.inference.schedule import PipelineSchedule, Verdict
from spd_lightning.inference.tree.schedule import PREFIX, Draft, Level, Node, Pruning, TreeSchedule, TreeShape
from tests.inference.test_schedule import VOCAB, oracle


class Stage:
    """Sees the nodes of a level behind their parents; a verdict prunes what it has seen."""

    def __init__(self, length: int) -> None:
        self.length, self.seen = length, {PREFIX: length - 1}

    def run(self, level: Level) -> None:
        for node in level.nodes:
            assert node.id not in self.seen, "each node once"
            assert self.seen[node.parent] == level.position - 1, "right behind its parent"
        self.seen |= dict.fromkeys(level.ids, level.position)

    def prune(self, pruning: Pruning) -> None:
        assert self.seen.pop(pruning.left) == self.length, "what has left was the root"
        self.length += 1
        assert self.length == pruning.length
        self.seen = {node: at for node, at in self.seen.items() if node in pruning.kept} | {PREFIX: self.length - 1}


def draft_at_random(rng: random.Random, plan, accuracy: float) -> list[Draft]:
    drafts = []
    for node in plan.levels[-1].nodes:
        right = oracle(plan.drafted, node.token)
        tokens = rng.sample([token for token in range(VOCAB) if token != right], rng.randrange(3))
        if rng.random() < accuracy:
            tokens.insert(rng.randrange(len(tokens) + 1), right)
        drafts += [Draft(token, node.id, -1.0) for token in tokens]
    return [drafts[index] for index in sorted(rng.sample(range(len(drafts)), min(len(drafts), plan.width)))]


@settings(deadline=None, max_examples=40)
@given(
    num_stages=st.integers(2, 9),
    prompt_length=st.integers(1, 12),
    width=st.integers(1, 5),
    wider=st.integers(0, 4),
    accuracy=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    num_tokens=st.integers(1, 25),
    seed=st.integers(0, 10**6),
)
def test_any_trees_give_the_oracles_tokens(num_stages, prompt_length, width, wider, accuracy, num_tokens, seed) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(prompt_length)]
    expected = list(prompt)
    for _ in range(num_tokens):
        expected.append(oracle(len(expected), expected[-1]))
    schedule = TreeSchedule(num_stages, prompt, expected[prompt_length], TreeShape(width, width + wider))
    stages = [Stage(prompt_length) for _ in range(num_stages)]
    waited = 0
    while schedule.num_verified < len(expected):
        assert schedule.num_cycles < num_stages * (num_tokens + 1)
        plan = schedule.plan()
        positions = [level.position for level in plan.levels]
        assert positions == list(range(len(schedule.tokens) - 1, plan.newest + 1)), "levels are contiguous"
        depths = [level.depth for level in plan.levels]
        assert depths == sorted(set(depths), reverse=True) and depths[0] < num_stages
        assert all(len(level.nodes) <= width + wider for level in plan.levels)
        if plan.fill == num_stages:
            assert plan.width == width
        for number, stage in enumerate(stages, start=1):
            if (level := plan.level_at(number)) is not None:
                stage.run(level)
                assert number < num_stages or len(level.nodes) == 1, "only the root comes to the last stage"
        drafts = draft_at_random(rng, plan, accuracy)
        verdict = None
        if plan.judged is not None:
            truth = oracle(plan.judged, plan.root.token)
            verdict = Verdict(truth in plan.candidates, truth)
        pruning = schedule.advance(drafts, verdict)
        if pruning is not None:
            for stage in stages:
                stage.prune(pruning)
            if schedule.num_verified < len(expected):
                waited += num_stages - 1 - schedule.levels[0].depth
    assert schedule.verified == expected
    committed = schedule.num_judged
    assert committed == num_tokens - 1 and schedule.num_flushes == committed - schedule.num_accepted
    # A cycle a token, and what each new root had to go before it left: all of the pipeline after a flush.
    assert schedule.num_cycles == (committed + num_stages - 1 + waited if committed else 0)


def test_one_candidate_a_level_is_the_chain() -> None:
    rng, prompt = random.Random(5), [3, 4]
    tree, chain = TreeSchedule(3, prompt, 7, TreeShape(1, 1)), PipelineSchedule(3, prompt, 7)
    for _ in range(60):
        ours, theirs = tree.plan(), chain.plan()
        assert (ours.cycle, ours.epoch, ours.fill, ours.newest) == (
            theirs.cycle, theirs.epoch, theirs.fill, theirs.newest,
        )  # fmt: skip
        assert ours.judged == theirs.judged and ours.drafted == theirs.drafted
        for stage in (1, 2, 3):
            assert ours.position_at(stage) == theirs.position_at(stage)
            assert ours.count_at(stage) == theirs.count_at(stage)
        assert [level.tokens[0] for level in ours.levels] == chain.tokens[-ours.fill :]
        draft, verdict = rng.randrange(VOCAB), None
        if theirs.judged is not None:
            accepted = rng.random() < 0.6
            verdict = Verdict(accepted, chain.tokens[theirs.judged] if accepted else VOCAB + 1)
        undone = chain.advance(draft, verdict)
        pruning = tree.advance([Draft(draft, ours.levels[-1].ids[0], 0.0)], verdict)
        assert tree.verified == chain.verified
        assert (undone is not None) == (pruning is not None and not pruning.kept)


def test_a_worked_tree() -> None:
    """n = 3. Of the root's two children the second is right; it has no child of its own, so the newest level empties."""
    schedule = TreeSchedule(3, [5, 6], 7, TreeShape(2, 2))
    assert schedule.plan().levels == (Level(2, 0, (Node(0, 7, PREFIX, 0.0),)),)
    schedule.advance([Draft(8, 0, -1.0), Draft(9, 0, -2.0)], None)
    assert [level.tokens for level in schedule.plan().levels] == [(7,), (8, 9)]
    schedule.advance([Draft(10, 1, -1.5), Draft(11, 1, -1.7)], None)
    plan = schedule.plan()
    assert [(level.position, level.depth, level.tokens) for level in plan.levels] == [
        (2, 2, (7,)), (3, 1, (8, 9)), (4, 0, (10, 11)),
    ]  # fmt: skip
    assert plan.judged == 3 and plan.candidates == (8, 9)
    pruning = schedule.advance([Draft(12, 3, -2.0), Draft(13, 4, -2.0)], Verdict(True, 9))
    assert pruning == Pruning(3, left=0, kept=frozenset({2}))
    plan = schedule.plan()
    assert plan.levels == (Level(3, 2, (Node(2, 9, PREFIX, -2.0),)),)
    assert plan.judged == 4 and plan.candidates == (), "nothing to judge, so the target's token starts anew"
    pruning = schedule.advance([Draft(20, 2, -3.0)], Verdict(False, 14))
    assert pruning == Pruning(4, left=2, kept=frozenset())
    assert schedule.plan().levels == (Level(4, 0, (Node(8, 14, PREFIX, 0.0),)),)
    assert schedule.verified == [5, 6, 7, 9, 14] and schedule.plan().epoch == 1


def test_wrong_use_is_caught() -> None:
    shape = TreeShape(2, 2)
    with pytest.raises(ValueError, match="tree_width=0"):
        TreeShape.build(0)
    with pytest.raises(ValueError, match="refill_width=2 is less than tree_width=4"):
        TreeShape.build(4, 2)
    with pytest.raises(ValueError, match="tree_width=257: at most 256"):
        TreeShape.build(257)
    with pytest.raises(ValueError, match="refill_width=100000000: at most 256"):
        TreeShape.build(2, 100_000_000)
    assert TreeShape.build(1) is None and TreeShape.build(1, 3) == TreeShape(1, 3)
    assert TreeShape.build(4) == TreeShape(4, 4)
    with pytest.raises(ValueError, match="num_stages=1: a draft tree needs"):
        TreeSchedule(1, [1], 2, shape)
    with pytest.raises(ValueError, match="prompt is empty"):
        TreeSchedule(2, [], 2, shape)
    with pytest.raises(AssertionError, match="a verdict exactly when one is due"):
        TreeSchedule(2, [1], 2, shape).advance([], Verdict(True, 3))
    with pytest.raises(AssertionError):
        TreeSchedule(2, [1], 2, shape).advance([Draft(3, 9, 0.0)], None)  # of no live node
