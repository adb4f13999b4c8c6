"""Random trees against an oracle that runs each node's path alone: states, caches and logits; broken trees do not pass."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

from spd_lightning.inference.caches import KeyValueBuffer
from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.schedule import CyclePlan
from spd_lightning.inference.tree import drafting
from spd_lightning.inference.tree.caches import StatePool, TreeCache
from spd_lightning.inference.tree.schedule import PREFIX, TreePlan, TreeShape
from spd_lightning.modules.features import FeatureLayout
from tests.inference.conftest import CAPACITY, cut, make_pipeline, run
from tests.inference.tree.setting import ScriptedTreeProposer, make_tree_pipeline, run_tree
from tests.modules.conftest import make_drafter, make_target

PROMPT = list(range(60, 67))
SHAPE = TreeShape(3, 4)
ATOL, NUM_NEW = 1e-10, 7


class PathOracle:
    """Every position of a path, one token a forward through fresh stages; what is common with the last path stays."""

    def __init__(self, target: Any, layout: FeatureLayout) -> None:
        self.target, self.layout = target, layout
        self.stages = cut(target, layout)
        for stage in self.stages:
            for layer in stage.cache.layers:
                if not isinstance(layer, KeyValueBuffer):
                    layer.slots, layer.tags = CAPACITY, [-1] * CAPACITY
        self.path: list[int] = []
        self.hidden: list[list[Tensor]] = [[] for _ in self.stages]
        self.anchors: list[dict[int, Tensor]] = []
        self.logits: dict[int, Tensor] = {}

    def follow(self, path: list[int]) -> "PathOracle":
        """All of `path` has been run."""
        common = next((i for i, (a, b) in enumerate(zip(path, self.path, strict=False)) if a != b), None)
        common = min(len(path), len(self.path)) if common is None else common
        if common < len(PROMPT):
            assert path[: len(PROMPT)] == PROMPT
            self._run(torch.tensor([PROMPT]), 0)
            common = len(PROMPT)
        for stage in self.stages:
            stage.rollback(common)
        for position in range(common, len(path)):
            self._run(torch.tensor([[path[position]]]), position)
        self.path = list(path)
        return self

    def _run(self, tokens: Tensor, position: int) -> None:
        entering, anchors, count = tokens, {0: self.target.model.model.embed_tokens(tokens)}, tokens.shape[1]
        for stage, hidden in zip(self.stages, self.hidden, strict=True):
            output = stage.run(entering, position)
            entering = output.hidden
            anchors |= output.anchors
            hidden[position:] = [entering[0, i] for i in range(count)]
        self.anchors[position:] = [{anchor: states[0, i] for anchor, states in anchors.items()} for i in range(count)]
        assert output.logits is not None
        self.logits[position + count - 1] = output.logits

    def draft_logits(self, drafter: Any, path: list[int], plan: TreePlan) -> Tensor:
        """What a chain's session says behind `path`, of which `plan.fill` tokens are in flight."""
        self.follow(path)
        session = DraftSession(drafter, self.target.model.model.embed_tokens, CAPACITY)
        start = plan.newest - plan.fill + 1
        joined = {a: torch.stack([at[a] for at in self.anchors[:start]])[None] for a in self.anchors[0]}
        session.prefill(torch.tensor([path[:start]]), joined)
        for position in range(start, plan.newest + 1):
            passed = self.layout.stage_ends[plan.newest - position + self.layout.first_depth]
            own = self.anchors[position]
            session.receive(position, {a: own[a][None, None] for a in own if a <= passed})
        return session.draft_logits(CyclePlan(0, 0, plan.fill, plan.newest, plan.num_stages), path[-1])


@cache
def setting_of(family: str, schedule: Any) -> tuple[FeatureLayout, Any, Any, list[int]]:
    """A target, a drafter for it, and what the target says."""
    layout = FeatureLayout.build(8, 4, schedule=schedule)
    target, drafter = make_target(family, 8), make_drafter(layout)
    return layout, target, drafter, run(make_pipeline(target, layout, drafter=drafter), layout, PROMPT, NUM_NEW)[0]


class Watched:
    """A tree pipeline, of which everything that a cycle makes is held against the oracle."""

    def __init__(self, family: str, schedule: Any, accuracy: float, seed: int, atol: float = ATOL) -> None:
        self.layout, self.target, self.drafter, self.answer = setting_of(family, schedule)
        self.atol = atol
        proposer = ScriptedTreeProposer(PROMPT + self.answer, accuracy, seed)
        self.pipeline = make_tree_pipeline(self.target, self.layout, SHAPE, proposer=proposer, drafter=self.drafter)
        self.oracle = PathOracle(self.target, self.layout)
        self.num_compared = self.num_wide = self.num_states = 0
        self.paths: dict[int, list[int]] = {}

    def decode(self) -> None:
        cycle, rollback, draft_logits = (
            self.pipeline.cycle, self.pipeline.rollback, self.pipeline.session.draft_logits,
        )  # fmt: skip

        def watching_cycle(schedule):
            plan = schedule.plan()
            for level in plan.levels:
                for node in level.nodes:
                    before = schedule.tokens[:-1] if node.parent == PREFIX else self.paths[node.parent]
                    self.paths[node.id] = [*before, node.token]
            outcome = cycle(schedule)
            self._compare_states(plan)
            return outcome

        def watching_logits(plan):
            logits = draft_logits(plan)
            for node, row in zip(plan.levels[-1].nodes, logits, strict=True):
                self._close(row, self.oracle.draft_logits(self.drafter, self.paths[node.id], plan))
            return logits

        def watching_rollback(pruning):
            rollback(pruning)
            self._compare_caches()

        self.pipeline.cycle, self.pipeline.rollback = watching_cycle, watching_rollback
        self.pipeline.session.draft_logits = watching_logits
        tokens, self.stats = run_tree(self.pipeline, self.layout, SHAPE, PROMPT, NUM_NEW)
        assert tokens == self.answer

    def _compare_states(self, plan: TreePlan) -> None:
        for stage in self.pipeline.stages:
            level = plan.level_at(stage.number)
            if level is None:
                continue
            self.num_wide += len(level.nodes) > 1
            rows = self.pipeline.outputs[stage.number].states[0]
            for node, row in zip(level.nodes, rows, strict=True):
                oracle = self.oracle.follow(self.paths[node.id])
                self._close(row, oracle.hidden[stage.number - 1][level.position])
                if stage.number == self.layout.num_stages:
                    assert self.pipeline.logits is not None
                    self._close(self.pipeline.logits, oracle.logits[level.position])

    def _compare_caches(self) -> None:
        """What is left of each live node, after each verdict: its rows, and the states behind it."""
        for stage, fresh in zip(self.pipeline.stages, self.oracle.stages, strict=True):
            cache = stage.cache
            for row, node in enumerate(cache.parents):
                self.oracle.follow(self.paths[node])
                at = len(self.paths[node]) - 1
                for own, other in zip(cache.layers, fresh.cache.layers, strict=True):
                    if isinstance(own, StatePool):
                        slot = cache.slot_of[node]
                        assert own.conv is not None and own.recurrent is not None
                        self._close(own.conv[slot], other.conv[at % other.slots][0])
                        self._close(own.recurrent[slot], other.recurrent[at % other.slots][0])
                        self.num_states += 1
                    else:
                        assert own.length == cache.committed + len(cache.parents)
                        for mine, theirs in ((own.keys, other.keys), (own.values, other.values)):
                            self._close(mine[0, :, cache.committed + row], theirs[0, :, at])
                            prefix = min(cache.committed, at)
                            self._close(mine[0, :, :prefix], theirs[0, :, :prefix])

    def _close(self, ours: Tensor, theirs: Tensor) -> None:
        self.num_compared += 1
        distance = float((ours - theirs).abs().max())
        assert distance <= self.atol, distance


@pytest.fixture(autouse=True)
def _no_shape_checks() -> Iterator[None]:
    """Thousands of forwards of one token; the checks would take most of the time."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


CASES = [
    *((family, "pre_step") for family in ("llama", "qwen3_5")),
    ("qwen3", "post_step"),
]


@pytest.mark.parametrize(("family", "schedule"), CASES)
def test_every_node_has_the_states_of_its_path_alone(family: str, schedule: str) -> None:
    watched = Watched(family, schedule, 0.8, seed=3)
    watched.decode()
    assert watched.num_compared > 250 and watched.num_wide > 10
    assert family != "qwen3_5" or watched.num_states > 30
    assert 2 < watched.stats.num_accepted < watched.stats.num_judged


def mask_of_all(cache: TreeCache, level: Any, dtype: torch.dtype) -> Tensor:
    """Siblings and cousins are seen."""
    return torch.zeros(1, 1, len(level.nodes), cache.committed + len(cache.parents), dtype=dtype)


def begin_with_siblings_state(cache: TreeCache, level: Any, dtype: torch.dtype) -> Tensor | None:
    mask = BEGIN(cache, level, dtype)
    cache.reading = cache.reading[:1].expand_as(cache.reading)
    return mask


def prune_nothing(cache: TreeCache, pruning: Any) -> None:
    """Nodes that were dropped stay."""
    PRUNE(cache, replace(pruning, kept=frozenset(range(10_000)) if pruning.kept else pruning.kept))


def select_first(buffer: KeyValueBuffer, length: int, rows: Any) -> None:
    """Rows are not moved up."""
    SELECT(buffer, length, range(len(rows)))


def see_all(session: drafting.TreeDraftSession, parents: Any, num_waiting: int) -> None:
    return None


BEGIN, PRUNE, SELECT = TreeCache.begin, TreeCache.prune, KeyValueBuffer.select
MUTANTS = {
    "all rows are seen": ("llama", TreeCache, "_mask", mask_of_all),
    "the state of a sibling's parent is read": ("qwen3_5", TreeCache, "begin", begin_with_siblings_state),
    "pruned nodes are kept": ("llama", TreeCache, "prune", prune_nothing),
    "rows are not moved up": ("llama", KeyValueBuffer, "select", select_first),
    "the drafter sees all rows": ("llama", drafting.TreeDraftSession, "_visible", see_all),
    "the drafter keeps no waiting row": (
        "llama", drafting.TreeDraftSession, "prune", lambda session, pruning: None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_tree_does_not_pass(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, *patch = MUTANTS[mutant]
    watched = Watched(family, "pre_step", 0.8, seed=3)
    monkeypatch.setattr(*patch)
    with pytest.raises((AssertionError, LookupError)):
        watched.decode()
