"""Tree decoding gives the target's own tokens; one candidate a level gives the chain's, in the bits of the logits."""

from collections.abc import Sequence

import pytest
import torch

from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.tree.schedule import Draft, TreeShape
from spd_lightning.inference.tree.verify import Drafts
from spd_lightning.modules.features import FeatureLayout, Schedule
from tests.inference.conftest import GREEDY, ScriptedProposer, make_pipeline, run
from tests.inference.test_end_to_end_law import _no_shape_checks  # noqa: F401  a fixture of every test here
from tests.inference.test_local import autoregressive
from tests.inference.tree.setting import ScriptedTreeProposer, make_tree_pipeline, run_tree
from tests.modules.conftest import make_target

PROMPTS: list[Sequence[int]] = [[65], list(range(60, 67))]
NUM_NEW = 8
SHAPES = {"w2": TreeShape(2, 2), "w4r8": TreeShape(4, 8)}


LAYOUTS = {
    "qwen3": FeatureLayout.build(8, 3),
    "qwen3_5": FeatureLayout.build(8, 4),
    "llama": FeatureLayout.build(8, 4, schedule="post_step"),
    "llama, PPSD": FeatureLayout.build(8, 4, anchors="first_stage", rows="shared", schedule="post_step"),
    "qwen3, coarse anchors": FeatureLayout.build(8, 4, anchors=(0, 4, 7), rows="shared"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_greedy_and_coupled_trees_give_what_plain_decoding_gives(name: str) -> None:
    """In float64, where there are no ties; Qwen3.5's tiny targets have none either."""
    target, layout = make_target(name.split(",")[0], 8), LAYOUTS[name]
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=3, verify="coupled")):
        for prompt in PROMPTS if params.is_greedy else PROMPTS[1:]:
            expected, _ = autoregressive(target, layout, prompt, NUM_NEW, params)
            shape = SHAPES["w4r8"]
            pipeline = make_tree_pipeline(target, layout, shape, params)
            for _ in range(1 + (prompt is PROMPTS[0])):  # the second request is clean
                tokens, stats = run_tree(pipeline, layout, shape, prompt, NUM_NEW)
                assert tokens == expected
            assert stats.num_judged == stats.num_committed == NUM_NEW - 1
    scripted = ScriptedTreeProposer([*PROMPTS[1], *autoregressive(target, layout, PROMPTS[1], NUM_NEW)[0]], 0.8)
    pipeline = make_tree_pipeline(target, layout, SHAPES["w2"], proposer=scripted)
    tokens, stats = run_tree(pipeline, layout, SHAPES["w2"], PROMPTS[1], NUM_NEW)
    assert tokens == autoregressive(target, layout, PROMPTS[1], NUM_NEW)[0]
    assert 2 < stats.num_accepted < NUM_NEW - 1


@pytest.mark.parametrize(("family", "schedule"), [("qwen3_5", "pre_step"), ("qwen3", "post_step")])
def test_one_candidate_a_level_is_the_chain_bit_for_bit(family: str, schedule: Schedule) -> None:
    """By the tree's own code, in float32; greedy, with rejection and coupled, drafted and scripted."""
    target, layout = make_target(family, 8, torch.float32), FeatureLayout.build(8, 4, schedule=schedule)
    shape, prompt = TreeShape(1, 1), PROMPTS[1]
    answer, _ = autoregressive(target, layout, prompt, NUM_NEW)
    for params, accuracy in (
        (GREEDY, 0.7),
        (SamplingParams(temperature=1.5, seed=3), None),
        (SamplingParams(temperature=1.5, top_k=30, seed=3, verify="coupled"), None),
    ):
        scripted = None if accuracy is None else ScriptedProposer([*prompt, *answer], accuracy)
        chain = make_pipeline(target, layout, params, proposer=scripted)
        expected, counts, _ = run(chain, layout, prompt, NUM_NEW)
        own = None if accuracy is None else OneByOne(ScriptedProposer([*prompt, *answer], accuracy))
        pipeline = make_tree_pipeline(target, layout, shape, params, proposer=own)
        tokens, stats = run_tree(pipeline, layout, shape, prompt, NUM_NEW)
        assert tokens == expected and stats == counts
        logits, theirs = pipeline.verifier.logits, chain.verifier.logits
        assert logits.keys() == theirs.keys()
        assert all(torch.equal(logits[position], theirs[position]) for position in logits)


class OneByOne:
    """A chain's proposer, for levels of one node."""

    def __init__(self, proposer: ScriptedProposer) -> None:
        self.proposer = proposer

    def propose(self, draft_logits, plan):
        (logits,), (node,) = draft_logits, plan.levels[-1].nodes
        return Drafts((Draft(self.proposer.propose(logits, plan.drafted).token, node.id, 0.0),))


@pytest.mark.parametrize("max_new_tokens", [1, 4])
@pytest.mark.parametrize("eos_at", [1, None])
def test_exactly_the_tokens_up_to_the_end_come_out(max_new_tokens: int, eos_at: int | None) -> None:
    target, layout, prompt = make_target("llama", 8), FeatureLayout.build(8, 4), PROMPTS[1]
    endless, _ = autoregressive(target, layout, prompt, 12)
    eos = () if eos_at is None else (endless[eos_at - 1],)
    expected, _ = autoregressive(target, layout, prompt, max_new_tokens, eos=eos)
    for accuracy in (0.0, 1.0):
        proposer = ScriptedTreeProposer([*prompt, *endless], accuracy)
        pipeline = make_tree_pipeline(target, layout, SHAPES["w2"], proposer=proposer)
        assert run_tree(pipeline, layout, SHAPES["w2"], prompt, max_new_tokens, eos)[0] == expected


def test_a_wider_tree_has_more_of_what_the_target_says() -> None:
    """The drafter of the tests is no good, but among more candidates the right one is more often."""
    target, layout = make_target("qwen3", 8), FeatureLayout.build(8, 2)
    params, accepted = SamplingParams(temperature=1.0, top_k=40, seed=1), []
    for shape in (TreeShape(1, 1), TreeShape(8, 8)):
        pipeline = make_tree_pipeline(target, layout, shape, params)
        accepted.append(run_tree(pipeline, layout, shape, PROMPTS[1], 20)[1].num_accepted)
    assert accepted[0] < accepted[1]
