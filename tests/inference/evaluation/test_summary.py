"""Figures of design §9 out of samples: pooled, over the right prompts, and none where there is nothing."""

import json
import random

import pytest

from spd_lightning.inference.evaluation.summary import Group, Speedup, Tally, make_summary, summarize
from tests.inference.evaluation.synthetic import PROMPT_TOKENS, drafted, evaluation, sample


def group(samples, task: str = "overall", method: str = "spd") -> Group:
    found = [group for group in summarize(samples) if (group.task, group.method) == (task, method)]
    assert len(found) == 1
    return found[0]


def test_totals_are_pooled_and_ratios_are_not_averaged() -> None:
    long = drafted([True] * 90, question_id="1")  # 90 tokens in 93 cycles
    short = drafted([False, False], question_id="2")  # 2 tokens in 8 cycles
    pooled = group([long, short])
    assert (pooled.num_prompts, pooled.num_committed, pooled.num_cycles) == (2, 92, 101)
    assert (pooled.num_judged, pooled.num_accepted) == (92, 90)
    assert pooled.alpha == pytest.approx(92 / 101) and pooled.p == pytest.approx(90 / 92)
    assert pooled.s0 == pytest.approx(4 * 92 / 101) and pooled.cycle_deviation == 0


def test_each_task_has_a_group_and_all_have_one() -> None:
    samples = [drafted([True] * 4), drafted([False] * 2, task="mt_bench"), sample(temperature=1.0)]
    found = {(group.task, group.method, group.drafter, group.temperature): group for group in summarize(samples)}
    assert list(found) == [
        ("gsm8k", "spd", "n4", 0.0),
        ("gsm8k", "ar", None, 1.0),
        ("mt_bench", "spd", "n4", 0.0),
        ("overall", "spd", "n4", 0.0),
        ("overall", "ar", None, 1.0),
    ]
    assert found["mt_bench", "spd", "n4", 0.0].num_committed == 2
    assert found["overall", "spd", "n4", 0.0].num_committed == 6


@pytest.mark.parametrize("num_committed, verdicts", [(0, []), (1, [True]), (1, [False])])
def test_an_end_at_once_and_a_single_token(num_committed: int, verdicts: list[bool]) -> None:
    seconds = 0.25 * num_committed
    made = group([drafted(verdicts, decode_seconds=seconds)])
    assert (made.num_committed, made.cycle_deviation, made.num_judged) == (num_committed, 0, num_committed)
    assert made.num_cycles == 4 * num_committed
    if num_committed:
        assert (made.alpha, made.s0, made.tokens_per_second) == (0.25, 1.0, 4.0) and made.p == float(verdicts[0])
    else:
        assert (made.alpha, made.p, made.s0, made.adjusted_s, made.implied) == (None,) * 5
        assert made.tokens_per_second is None and made.tokens_per_second_per_device is None
        assert (made.by_fill, made.by_position, made.by_class) == ((), (), ())


def test_a_prompt_that_ended_at_once_changes_no_ratio() -> None:
    verdicts = [True, True, False, True]
    alone, both = group([drafted(verdicts)]), group([drafted(verdicts), drafted([], question_id="2")])
    assert (alone.alpha, alone.p, alone.s0, alone.cycle_deviation) == (both.alpha, both.p, both.s0, 0)
    assert both.cycle_deviation == 0 and both.num_prompts == 2


def test_misses_of_the_identity_do_not_cancel() -> None:
    more = drafted([True, False, True], num_cycles=10, question_id="1")
    fewer = drafted([True, False, True], num_cycles=8, question_id="2")
    assert group([more, fewer]).cycle_deviation == 2


def test_a_baseline_has_no_figures_of_drafting() -> None:
    plain = group([sample()], method="ar")
    assert (plain.alpha, plain.p, plain.s0, plain.adjusted_s, plain.implied, plain.cycle_deviation) == (None,) * 6
    assert plain.tokens_per_second == 2.0


def test_adjusted_speedup_follows_method_and_schedule() -> None:
    verdicts = [True, False, True, True]
    pre = group([drafted(verdicts)])
    post = group([drafted(verdicts, schedule="post_step")])
    ppsd = group([drafted(verdicts, method="ppsd", num_spec_layers=1, schedule="post_step")], method="ppsd")
    eagle = group(
        [sample(method="eagle3", drafter="k3", num_spec_layers=2, draft_length=3, num_committed=4, num_cycles=2)],
        method="eagle3",
    )
    assert pre.s0 == post.s0 == ppsd.s0 == 1.6 and pre.adjusted_s == pre.s0
    assert post.adjusted_s == pytest.approx(pre.s0 * 30 / (4 * 2 + 30))
    assert ppsd.adjusted_s == pytest.approx(pre.s0 * 30 / (4 + 30))
    assert eagle.s0 == 2.0 and eagle.adjusted_s == pytest.approx(2 * 30 / (3 * 2 + 30))
    assert eagle.implied is None and eagle.cycle_deviation is None


def test_speedup_is_over_the_prompts_that_both_have() -> None:
    samples = [
        sample(question_id="1", num_committed=10, decode_seconds=1.0),
        sample(question_id="2", num_committed=30, decode_seconds=9.0),
        sample(question_id="9", num_committed=1000, decode_seconds=1.0),
        sample(question_id="1", method="generate", num_committed=10, decode_seconds=4.0),
        drafted([True] * 10, question_id="1", decode_seconds=2.0, num_devices=5),
        drafted([True] * 30, question_id="2", decode_seconds=2.0, num_devices=5),
        drafted([True] * 500, question_id="3", decode_seconds=1.0, num_devices=5),
    ]
    made = group(samples)
    assert made.tokens_per_second == 540 / 5 and made.tokens_per_second_per_device == pytest.approx(540 / 25)
    against_plain, against_generate = made.speedups
    assert against_plain == Speedup("ar", 2, ratio=(40 / 4) / (40 / 10), per_device=0.5)
    assert against_generate == Speedup("generate", 1, ratio=(10 / 2) / (10 / 4), per_device=0.4)
    assert group(samples, method="generate").speedups == (Speedup("ar", 1, 0.25, 0.25),)


def test_speedup_is_within_a_turn_a_temperature_and_a_task() -> None:
    fast = dict(decode_seconds=0.001)
    samples = [sample(decode_seconds=1.0), sample(turn=1, **fast), sample(temperature=1.0, **fast)]
    samples += [sample(task="mt_bench", **fast), drafted([True], decode_seconds=1.0)]
    for task in ("gsm8k", "overall"):
        assert [speedup.ratio for speedup in group(samples, task).speedups] == [1.0]


@pytest.mark.parametrize(
    "baseline", [dict(question_id="2"), dict(num_committed=0, decode_seconds=0.0), dict(clock="virtual")]
)
def test_there_is_no_speedup_without_something_to_compare_with(baseline: dict) -> None:
    assert group([sample(**baseline), drafted([True])]).speedups == ()
    assert group([sample(), drafted([])]).speedups == (Speedup("ar", 1, 0.0, 0.0),)
    assert group([sample(), drafted([], decode_seconds=0.0)]).speedups == ()


def test_shares_count_only_what_was_compared_or_scored() -> None:
    verdicts = [(True, True), (False, None), (None, False), (True, True)]
    samples = [
        drafted([True], question_id=str(index), identical_to_ar=identical, is_correct=correct)
        for index, (identical, correct) in enumerate(verdicts)
    ]
    made = group(samples)
    assert (made.num_compared, made.num_identical, made.share_identical) == (3, 2, pytest.approx(2 / 3))
    assert (made.num_scored, made.num_correct, made.share_correct) == (3, 2, pytest.approx(2 / 3))
    nothing = group([drafted([True], identical_to_ar=None)])
    assert (nothing.num_compared, nothing.share_identical, nothing.share_correct) == (0, None, None)


def test_acceptance_by_fill_position_and_class() -> None:
    judgements = tuple((PROMPT_TOKENS + at, fill, accepted) for at, fill, accepted in
                       [(1, 1, True), (15, 2, False), (16, 1, True), (31, 2, True), (32, 2, False), (5000, 2, True)])  # fmt: skip
    classes = ("digit", "digit", "word start", "digit", "special", "word start")
    made = group([drafted([], judgements=judgements, token_classes=classes)])
    assert made.by_fill == (Tally("1", 2, 2), Tally("2", 2, 4))
    assert made.by_position == (
        Tally("1-15", 1, 2), Tally("16-31", 2, 2), Tally("32-63", 0, 1), Tally("4096 on", 1, 1)
    )  # fmt: skip
    assert made.by_class == (Tally("word start", 2, 2), Tally("digit", 2, 3), Tally("special", 0, 1))


def test_implied_figures_come_from_acceptance_by_fill() -> None:
    draw = random.Random(3)
    made = group([drafted([draw.random() < 0.7 for _ in range(1500)])])
    assert made.implied is not None and made.implied["s0"] == pytest.approx(made.s0, rel=1e-2)
    assert group([drafted([True, True])]).implied is None  # fill 3 and 4 never occurred


def test_an_answer_counts_once() -> None:
    with pytest.raises(ValueError, match=r"\('gsm8k', '1', 0, 'ar', None, 0.0\) occurs twice"):
        summarize([sample(), sample(text="again")])


@pytest.mark.parametrize("name, value", [("num_stages", 8), ("num_devices", 2), ("clock", "virtual")])
def test_answers_made_in_different_ways_are_not_pooled(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"spd n4 at T=0 has answers with {name}=.* and {{.*{value}"):
        summarize([drafted([True]), drafted([True], question_id="2", **{name: value})])


def test_a_summary_survives_json() -> None:
    summary, samples = evaluation(num_prompts=2, num_tokens=30)
    assert json.loads(json.dumps(summary, allow_nan=False))["groups"][0]["task"] == "mt_bench"
    assert list(summary)[:2] == ["version", "command"] and len(summary["groups"]) == 4 * 8
    assert make_summary([])["groups"] == [] and sum(group.num_prompts for group in summarize(samples)) == 2 * 48
    assert all(not group.cycle_deviation for group in summarize(samples))
