"""Train/decode parity: what the decoding drafter computes is what the training layout computes, at every fill level."""

import pytest
import torch

from spd_lightning.modules.features import FeatureLayout
from tests.inference.conftest import ScriptedProposer, make_pipeline, run
from tests.inference.replay import replayed_logits
from tests.modules.conftest import make_drafter, make_target

LAYOUTS = {
    "exact": FeatureLayout.build(8, 4),
    "uneven": FeatureLayout.build(8, 3, stage_layers=[1, 5, 2]),
    "coarse": FeatureLayout.build(8, 4, anchors=(0, 4, 7)),
    "one_stage": FeatureLayout.build(8, 1),
    "post_step": FeatureLayout.build(8, 4, schedule="post_step"),
    "post_step_uneven": FeatureLayout.build(8, 3, stage_layers=[1, 5, 2], schedule="post_step"),
    "post_step_coarse": FeatureLayout.build(8, 4, anchors=(0, 4, 7), schedule="post_step"),
    "post_step_one_stage": FeatureLayout.build(8, 1, schedule="post_step"),
    "ppsd": FeatureLayout.build(8, 4, None, "first_stage", "shared", "post_step"),
    "ppsd_uneven": FeatureLayout.build(8, 3, [2, 5, 1], "first_stage", "exact", "post_step"),
    "post_step_without_embedding": FeatureLayout.build(8, 4, anchors=(1, 4, 7), schedule="post_step"),
}


def training_logits(drafter, states, fill: int) -> torch.Tensor:
    """Draft logits of the training layout at every position, at one fill level."""
    seq = states[0].shape[1]
    visible = torch.tensor(drafter.layout.visibility_table())[fill - 1 : fill]
    return drafter.lm_head(drafter(states, torch.arange(seq)[None], visible)[0])


GATED = {"gated_attention": True, "partial_rotary_factor": 0.25}
"""The attention of published drafters for Qwen3.5."""


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        *((name, {}) for name in LAYOUTS),
        ("exact", GATED),
        ("post_step_coarse", GATED),
        ("exact", {"partial_rotary_factor": 0.5}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_a_replayed_sequence_gives_the_training_logits_at_every_fill(name: str, attention: dict) -> None:
    """The same recorded target states into both, float64: equal to 1e-10 wherever the fill can occur."""
    layout, seq, prompt = LAYOUTS[name], 24, 5
    n, target = layout.num_stages, make_target("llama", 8)
    drafter = make_drafter(layout, **attention)
    ids = torch.randint(0, 259, (1, seq), generator=torch.Generator().manual_seed(1))
    states = target.forward(ids, torch.ones_like(ids), layout.anchors).anchors
    by_anchor = dict(zip(layout.anchors, states, strict=True))
    with torch.no_grad():
        expected = {fill: training_logits(drafter, states, fill) for fill in range(1, n + 1)}
        for fill in range(1, n + 1):
            for newest in range(prompt + fill - 1, seq):
                logits = replayed_logits(drafter, target.model.model.embed_tokens, ids, by_anchor, newest, fill)
                torch.testing.assert_close(logits, expected[fill][newest], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("family", "tolerance"), [("llama", 1e-9), ("qwen3", 1e-9), ("qwen3_5", 1e-3)])
@pytest.mark.parametrize(
    "name", ["exact", "uneven", "one_stage", "post_step", "post_step_uneven", "post_step_one_stage"]
)
def test_a_whole_decode_drafts_what_training_would(family: str, tolerance: float, name: str) -> None:
    """End to end, accepted and rejected: each cycle's draft logits against the training layout at the fill it had.

    Qwen3.5 runs its delta rule in float32 whatever the model's dtype, and prefills in other blocks than training.
    """
    layout, target = LAYOUTS[name], make_target(family, 8)
    drafter = make_drafter(layout)
    prompt = list(range(60, 71))
    answer, _, _ = run(make_pipeline(target, layout, drafter=drafter), layout, prompt, 24)
    pipeline = make_pipeline(target, layout, drafter=drafter, proposer=ScriptedProposer(prompt + answer, 0.6))
    drafted: list[tuple[list[int], int, torch.Tensor]] = []
    draft_logits = pipeline.session.draft_logits

    def recording(plan, newest_token):
        logits = draft_logits(plan, newest_token)
        drafted.append((list(current.tokens), plan.fill, logits))
        return logits

    cycle = pipeline.cycle

    def tracking(schedule):
        nonlocal current
        current = schedule
        return cycle(schedule)

    current = None
    pipeline.session.draft_logits, pipeline.cycle = recording, tracking
    tokens, stats, _ = run(pipeline, layout, prompt, 24)
    assert tokens == answer and stats.num_judged == 23 and 5 < stats.num_accepted < 23
    assert {fill for _, fill, _ in drafted} == set(range(1, layout.num_stages + 1))
    for tokens, fill, logits in drafted:
        ids = torch.tensor([tokens])
        states = target.forward(ids, torch.ones_like(ids), layout.anchors).anchors
        with torch.no_grad():
            expected = training_logits(drafter, states, fill)[-1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)
