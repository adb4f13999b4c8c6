"""The pipelined output is the target's own, token for token and in the bits of the logits."""

import pytest
import torch

from spd_lightning.inference.autoregressive import decode_autoregressively
from spd_lightning.inference.caches import KeyValueBuffer, RecurrentRing, StageCache
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import make_verifier
from spd_lightning.modules.features import FeatureLayout, Schedule
from spd_lightning.modules.tiny_target import NUM_TOKENS
from tests.inference.conftest import GREEDY, TOKENIZER, RecordingVerifier, ScriptedProposer, cut, make_pipeline, run
from tests.modules.conftest import make_target

SPLITS = {"n1": (8, 1, None), "n2": (8, 2, None), "n4": (8, 4, None), "n8": (8, 8, None), "uneven": (8, 3, [1, 5, 2])}
TARGETS = {"qwen3_5": {}, "qwen3_5_tied": {"tie_word_embeddings": True}, "qwen3": {}, "llama": {}}
PROMPTS = [[65], [72, 105], list(range(60, 71))]


def layout_of(split: str, schedule: Schedule = "pre_step") -> FeatureLayout:
    num_layers, num_stages, stage_layers = SPLITS[split]
    return FeatureLayout.build(num_layers, num_stages, stage_layers, schedule=schedule)


def autoregressive(target, layout, prompt, max_new_tokens, params=GREEDY, eos=(), stop=()):
    verifier = RecordingVerifier(make_verifier(params, NUM_TOKENS))
    condition = StopCondition(eos, max_new_tokens, stop, TOKENIZER)
    tokens = list(decode_autoregressively(cut(target, layout), verifier, prompt, condition))
    return tokens, verifier.logits


CASES = [
    *((name, split, torch.float32, "pre_step") for name in TARGETS for split in SPLITS),
    *((name, split, torch.bfloat16, "pre_step") for name in TARGETS for split in ("n4", "n8")),
    *((name, split, torch.float32, "post_step") for name in ("qwen3_5", "llama") for split in ("n1", "n4", "uneven")),
]


@pytest.mark.parametrize(("name", "split", "dtype", "schedule"), CASES, ids=str)
def test_tokens_and_logit_bits_are_those_of_plain_decoding(
    name: str, split: str, dtype: torch.dtype, schedule: Schedule
) -> None:
    """Drafters that are never, sometimes and always right; prompts of one token and shorter than `n`."""
    target, layout = make_target(name.removesuffix("_tied"), 8, dtype, **TARGETS[name]), layout_of(split, schedule)
    for prompt in PROMPTS:
        expected, logits = autoregressive(target, layout, prompt, 24)
        for accuracy in (0.0, 0.6, 1.0):
            pipeline = make_pipeline(target, layout, proposer=ScriptedProposer(prompt + expected, accuracy))
            tokens, stats, _ = run(pipeline, layout, prompt, 24)
            assert tokens == expected
            assert pipeline.verifier.logits.keys() == logits.keys()
            for position, row in pipeline.verifier.logits.items():
                assert torch.equal(row, logits[position]), f"logits at {position}, accuracy {accuracy}"
            assert stats.num_committed == 23 == stats.num_judged
            if accuracy == 1.0:
                assert stats.acceptance == 1.0
            if accuracy == 0.0:
                assert stats.acceptance == 0.0


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3", "llama"])
@pytest.mark.parametrize(
    ("split", "schedule"),
    [*((split, "pre_step") for split in ("n1", "n4", "uneven")), ("n1", "post_step"), ("n4", "post_step")],
)
def test_a_real_drafter_changes_no_token_greedy_or_coupled(name: str, split: str, schedule: Schedule) -> None:
    target, layout = make_target(name, 8, torch.float32), layout_of(split, schedule)
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=3, verify="coupled")):
        for prompt in PROMPTS:
            expected, _ = autoregressive(target, layout, prompt, 24, params)
            pipeline = make_pipeline(target, layout, params)
            assert run(pipeline, layout, prompt, 24)[0] == expected
            assert run(pipeline, layout, prompt, 24)[0] == expected  # the second request is clean


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3", "llama"])
@pytest.mark.parametrize("num_stages", [1, 4])
def test_a_drafter_of_first_stage_states_changes_no_token(name: str, num_stages: int) -> None:
    layout = FeatureLayout.build(8, num_stages, anchors="first_stage", rows="shared", schedule="post_step")
    target = make_target(name, 8, torch.float32)
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=3, verify="coupled")):
        for prompt in PROMPTS:
            expected, _ = autoregressive(target, layout, prompt, 24, params)
            assert run(make_pipeline(target, layout, params), layout, prompt, 24)[0] == expected


def test_rejection_sampling_runs_and_repeats_with_its_seed() -> None:
    target, layout = make_target("qwen3_5", 8, torch.float32), layout_of("n4")
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=5)
    first, again = (run(make_pipeline(target, layout, params), layout, PROMPTS[2], 40)[0] for _ in range(2))
    other = run(make_pipeline(target, layout, SamplingParams(temperature=0.8, seed=6)), layout, PROMPTS[2], 40)[0]
    assert first == again != other


@pytest.mark.parametrize("max_new_tokens", range(1, 7))
@pytest.mark.parametrize("eos_at", [1, 2, 5, None])
def test_exactly_the_tokens_up_to_the_end_come_out(max_new_tokens: int, eos_at: int | None) -> None:
    target, layout = make_target("llama", 8, torch.float32), layout_of("n4")
    endless, _ = autoregressive(target, layout, PROMPTS[2], 30)
    eos = () if eos_at is None else (endless[eos_at - 1],)
    expected, _ = autoregressive(target, layout, PROMPTS[2], max_new_tokens, eos=eos)
    for accuracy in (0.0, 1.0):
        pipeline = make_pipeline(target, layout, proposer=ScriptedProposer(PROMPTS[2] + endless, accuracy))
        tokens, _, condition = run(pipeline, layout, PROMPTS[2], max_new_tokens, eos=eos)
        assert tokens == expected
        stopped_early = bool(eos) and eos[0] in expected
        assert condition.end is not None and condition.end.reason == ("eos" if stopped_early else "length")


def test_the_counts_obey_the_identity_of_the_design() -> None:
    target, layout = make_target("qwen3", 8, torch.float32), layout_of("n4")
    expected, _ = autoregressive(target, layout, PROMPTS[2], 60)
    pipeline = make_pipeline(target, layout, proposer=ScriptedProposer(PROMPTS[2] + expected, 0.6))
    _, stats, _ = run(pipeline, layout, PROMPTS[2], 60)
    flushes = sum(not judgement.accepted for judgement in stats.judgements[:-1])
    assert stats.num_cycles == stats.num_committed + 3 * (1 + flushes)
    assert sum(judged for _, judged in stats.acceptance_by_fill().values()) == stats.num_judged
    # after a flush the first judged draft was made at fill 1
    fills = [judgement.fill for judgement in stats.judgements]
    for before, judgement in zip(stats.judgements, stats.judgements[1:], strict=False):
        assert judgement.fill == (min(4, before.fill + 1) if before.accepted else 1)
    assert fills[0] == 1


def begin_without_window(ring: RecurrentRing, position: int) -> None:
    ring.target = position


def begin_in_one_slot(ring: RecurrentRing, position: int) -> None:
    BEGIN(ring, position)
    if ring.conv is not None:
        ring.conv = ring.conv[:1].expand_as(ring.conv)


def one_position_later(*bounds: int, **options) -> torch.Tensor:
    return ARANGE(*bounds, **options) + (len(bounds) == 2 and bounds[0] > 0)


BEGIN, ROLLBACK, RING, ARANGE = RecurrentRing.begin, KeyValueBuffer.rollback, RecurrentRing.__init__, torch.arange

MUTANTS = {
    "the convolution window is forgotten": ("qwen3_5", RecurrentRing, "begin", begin_without_window),
    "the recurrent state is forgotten": ("qwen3_5", StageCache, "get_recurrent_state", lambda *_, **__: None),
    "the buffer is cut one too short": (
        "llama", KeyValueBuffer, "rollback", lambda buffer, length: ROLLBACK(buffer, max(0, length - 1)),
    ),
    "the ring has one slot too few": (
        "qwen3_5", RecurrentRing, "__init__", lambda ring, slots: RING(ring, max(1, slots - 1)),
    ),
    "the slots are aliases of one": ("qwen3_5", RecurrentRing, "begin", begin_in_one_slot),
    "positions are one too high": ("llama", torch, "arange", one_position_later),
    "rollbacks are forgotten": ("llama", StageCache, "rollback", lambda cache, length: None),
}  # fmt: skip


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_a_broken_cache_shows_in_the_bits_of_the_logits(mutant: str | None, monkeypatch) -> None:
    """Tokens alone are too weak an oracle; and the unbroken code must not differ."""
    family, *patch = MUTANTS[mutant] if mutant else ("qwen3_5",)
    target, layout = make_target(family, 8, torch.float32), layout_of("n4")
    expected, logits = autoregressive(target, layout, PROMPTS[2], 24)
    if patch:
        monkeypatch.setattr(*patch)
    pipeline = make_pipeline(target, layout, proposer=ScriptedProposer(PROMPTS[2] + expected, 0.5))
    try:
        run(pipeline, layout, PROMPTS[2], 24)
    except (AssertionError, LookupError, RuntimeError):  # a mask that does not fit the keys, for one
        caught = True
    else:
        found = pipeline.verifier.logits
        caught = found.keys() != logits.keys() or any(not torch.equal(found[p], logits[p]) for p in logits)
    assert caught is (mutant is not None)
