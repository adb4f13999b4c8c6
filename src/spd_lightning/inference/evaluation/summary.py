"""The figures of design §9 out of samples: pooled totals, never means of ratios. Knows no files and no layout."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spd_lightning.inference.evaluation.formulas import adjusted_speedup, cycle_deviation, implied_by_counts
from spd_lightning.inference.evaluation.sample import TOKEN_CLASSES, TREE, Clock, Sample
from spd_lightning.inference.evaluation.tasks import OVERALL
from spd_lightning.inference.stats import DecodeStats

VERSION = 1
RANGE_STARTS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Where the ranges of positions begin by which acceptance is shown along an answer; 0 is the prefill's token."""
RANGES = (*(f"{start}-{end - 1}" for start, end in zip(RANGE_STARTS, RANGE_STARTS[1:], strict=False)), "4096 on")
SHARED = ("num_stages", "num_layers", "num_spec_layers", "schedule", "draft_length", "clock", "num_devices")
"""What all answers of one method and drafter have in common."""


@dataclass(frozen=True)
class Tally:
    """Verdicts of one kind.

    Attributes:
        label: of the kind.
        accepted: drafts that stayed.
        judged: all drafts.
    """

    label: str
    accepted: int
    judged: int


@dataclass(frozen=True)
class Speedup:
    """Against a baseline of the same run, over the prompts that both have.

    Attributes:
        baseline: the other method.
        num_prompts: that both have.
        ratio: of decode tokens per second.
        per_device: of decode tokens per second and device.
    """

    baseline: str
    num_prompts: int
    ratio: float
    per_device: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """What one method did at one temperature on one task, or on all; a figure is none where there is nothing of it.

    Attributes not listed are those of `Sample`, or totals and shares of them.

    Attributes:
        task: or `overall`.
        num_prompts: answers that are pooled; each turn counts.
        num_committed: `N`.
        num_cycles: `K`.
        alpha: `N / K`.
        p: accepted over judged.
        s0: `n * alpha`, for EAGLE-3 `alpha`. Simulated: assumes free drafting and communication.
        adjusted_s: `s0` with the layers of drafts counted that nothing hides. Simulated as well.
        implied: `p`, `alpha` and `s0` that follow from `by_fill` (design §4); none for trees.
        cycle_deviation: sum of the samples' misses of the identity of design §5; 0 unless something is wrong, and none for
            trees, where it does not hold: a verdict can leave the newest levels without candidates.
        tokens_per_second: `N` over the seconds of the decode phase, by `clock`.
        num_compared: answers that there was one of plain decoding for.
        num_scored: answers with a score.
        by_fill: acceptance by tokens in flight when the draft was made.
        by_position: acceptance by position in the answer.
        by_class: acceptance by the class of the committed token.
    """

    task: str
    method: str
    drafter: str | None
    temperature: float
    num_stages: int | None
    num_layers: int
    num_spec_layers: int | None
    schedule: str | None
    draft_length: int | None
    num_prompts: int
    num_committed: int
    num_cycles: int
    num_judged: int
    num_accepted: int
    alpha: float | None
    p: float | None
    s0: float | None
    adjusted_s: float | None
    implied: Mapping[str, float] | None
    cycle_deviation: int | None
    clock: Clock
    num_devices: int
    decode_seconds: float
    tokens_per_second: float | None
    tokens_per_second_per_device: float | None
    speedups: tuple[Speedup, ...]
    num_compared: int
    num_identical: int
    share_identical: float | None
    num_scored: int
    num_correct: int
    share_correct: float | None
    by_fill: tuple[Tally, ...]
    by_position: tuple[Tally, ...]
    by_class: tuple[Tally, ...]


def make_summary(samples: Sequence[Sample], **facts: Any) -> dict[str, Any]:
    """The content of `summary.json`: its version, the facts of the run, and the groups.

    Args:
        samples: of the whole run.
        facts: JSON-ready; `report.render_report` says which ones it shows.
    """
    return {"version": VERSION, **facts, "groups": [asdict(group) for group in summarize(samples)]}


def summarize(samples: Sequence[Sample]) -> list[Group]:
    """One group per task or all tasks, temperature, drafter and method, in the order in which they first occur.

    Raises:
        ValueError: if an answer occurs twice, or answers that belong together were made in different ways.
    """
    keys = [sample.key for sample in samples]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the answer {twice} occurs twice: remove one of the two")
    groups = []
    for task in [*dict.fromkeys(sample.task for sample in samples), OVERALL]:
        runs: dict[tuple[float, str | None, str], list[Sample]] = {}
        for sample in samples:
            if task in (sample.task, OVERALL):
                runs.setdefault((sample.temperature, sample.drafter, sample.method), []).append(sample)
        for key, own in runs.items():
            baselines = [runs[other] for other in runs if other[:2] == (key[0], None) and other != key]
            groups.append(_group(task, own, baselines))
    return groups


def _group(task: str, samples: Sequence[Sample], baselines: Iterable[Sequence[Sample]]) -> Group:
    method, drafter, temperature = samples[0].method, samples[0].drafter, samples[0].temperature
    shared: dict[str, Any] = {name: getattr(samples[0], name) for name in SHARED}
    for name, value in shared.items():
        if values := {getattr(sample, name) for sample in samples} - {value}:
            run = f"{method} {drafter or ''} at T={temperature:g}"
            raise ValueError(f"{run} has answers with {name}={value} and {values}: give each run its own folder")
    stats = DecodeStats.pooled(sample.stats for sample in samples)
    num_stages, s0 = shared["num_stages"], stats.speedup
    costs = [shared[name] for name in ("num_layers", "num_spec_layers", "schedule", "num_stages", "draft_length")]
    by_fill = stats.acceptance_by_fill()
    seconds = sum(sample.decode_seconds for sample in samples)
    speed = _speed(samples)
    compared = [sample.identical_to_ar for sample in samples if sample.identical_to_ar is not None]
    scored = [sample.is_correct for sample in samples if sample.is_correct is not None]
    return Group(
        task=task,
        method=method,
        drafter=drafter,
        temperature=temperature,
        **shared,
        num_prompts=len(samples),
        num_committed=stats.num_committed,
        num_cycles=stats.num_cycles,
        num_judged=stats.num_judged,
        num_accepted=stats.num_accepted,
        alpha=stats.alpha,
        p=stats.acceptance,
        s0=s0,
        adjusted_s=None if s0 is None else adjusted_speedup(s0, method, *costs),
        implied=None if num_stages is None or method == TREE else implied_by_counts(by_fill, num_stages),
        cycle_deviation=None
        if num_stages is None or method == TREE
        else sum(abs(_deviation(sample)) for sample in samples),
        decode_seconds=seconds,
        tokens_per_second=speed,
        tokens_per_second_per_device=None if speed is None else speed / shared["num_devices"],
        speedups=tuple(found for other in baselines if (found := _speedup(samples, other)) is not None),
        num_compared=len(compared),
        num_identical=sum(compared),
        share_identical=sum(compared) / len(compared) if compared else None,
        num_scored=len(scored),
        num_correct=sum(scored),
        share_correct=sum(scored) / len(scored) if scored else None,
        by_fill=tuple(Tally(str(fill), *counts) for fill, counts in by_fill.items()),
        by_position=_tallies(samples, RANGES, _range_index),
        by_class=_tallies(samples, TOKEN_CLASSES, _class_index),
    )


def _deviation(sample: Sample) -> int:
    verdicts = [accepted for _, _, accepted in sample.judgements]
    return cycle_deviation(sample.num_stages or 1, sample.num_committed, sample.num_cycles, verdicts)


def _range_index(sample: Sample, index: int) -> int:
    return bisect_right(RANGE_STARTS, sample.judgements[index][0] - sample.prompt_tokens) - 1


def _class_index(sample: Sample, index: int) -> int:
    return TOKEN_CLASSES.index(sample.token_classes[index])


def _tallies(
    samples: Iterable[Sample], labels: Sequence[str], index_of: Callable[[Sample, int], int]
) -> tuple[Tally, ...]:
    """Verdicts by kind, in the order of the labels; kinds without any are left out."""
    accepted, judged = [0] * len(labels), [0] * len(labels)
    for sample in samples:
        for number, (_, _, is_accepted) in enumerate(sample.judgements):
            index = index_of(sample, number)
            accepted[index] += is_accepted
            judged[index] += 1
    return tuple(Tally(*counts) for counts in zip(labels, accepted, judged, strict=True) if counts[2])


def _speed(samples: Iterable[Sample]) -> float | None:
    """Decode tokens per second; none without any seconds."""
    samples = list(samples)
    seconds = sum(sample.decode_seconds for sample in samples)
    return sum(sample.num_committed for sample in samples) / seconds if seconds > 0 else None


def _speedup(samples: Sequence[Sample], baseline: Sequence[Sample]) -> Speedup | None:
    """None without common prompts, or if the two were timed by different clocks."""
    common = {sample.prompt for sample in samples} & {sample.prompt for sample in baseline}
    own = _speed(sample for sample in samples if sample.prompt in common)
    other = _speed(sample for sample in baseline if sample.prompt in common)
    if own is None or not other or samples[0].clock != baseline[0].clock:
        return None
    per_device = (own / samples[0].num_devices) / (other / baseline[0].num_devices)
    return Speedup(baseline[0].method, len(common), own / other, per_device)
