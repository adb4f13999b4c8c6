"""The losslessness gate: greedy answers of pipelines against those of plain decoding. Knows no decoder."""

import sys
from collections.abc import Sequence

from spd_lightning.inference.evaluation.runner import PIPELINES, SEVERAL_A_FORWARD
from spd_lightning.inference.evaluation.sample import Sample

NOT_LOSSLESS = 3
"""Exit code when a greedy answer is not plain decoding's, or was not compared with it."""


def check_lossless(samples: Sequence[Sample]) -> None:
    """Raises `SystemExit` with code 3 if a greedy answer of a pipeline is not that of plain decoding.

    EAGLE-3's and those of trees may differ, where two tokens are as good as equal: how often, and by which margins, is printed.
    """
    drafted = [sample for sample in samples if sample.drafter is not None and sample.temperature == 0]
    greedy = [sample for sample in drafted if sample.method in PIPELINES]
    different = [sample for sample in greedy if sample.first_difference is not None]
    several = [sample for sample in drafted if sample.method in SEVERAL_A_FORWARD]
    near_ties = [sample for sample in several if sample.first_difference is not None]
    uncompared = [sample for sample in greedy if sample.identical_to_ar is None]
    print_differences([*different, *near_ties])
    for method in dict.fromkeys(sample.method for sample in several):
        same = [sample.first_difference is None for sample in several if sample.method == method]
        print(f"{method}: {sum(same)} of {len(same)} greedy answers are those of plain decoding")
    if different:
        print(f"NOT lossless: {len(different)} of {len(greedy)} greedy answers differ", file=sys.stderr)
        raise SystemExit(NOT_LOSSLESS)
    if uncompared:
        print(
            f"NOT shown to be lossless: {len(uncompared)} of {len(greedy)} greedy answers have no plain one beside them",
            file=sys.stderr,
        )
        raise SystemExit(NOT_LOSSLESS)
    if greedy:
        print(f"lossless: {len(greedy)} of {len(greedy)} greedy answers are those of plain decoding")


def print_differences(samples: Sequence[Sample]) -> None:
    """Says of each answer where it first differs from plain decoding's, and how close the two tokens were."""
    for sample in samples:
        first = sample.first_difference
        assert first is not None
        margin = "not recorded" if first["margin"] is None else f"{first['margin']:.3g}"
        print(
            f"{sample.task} {sample.question_id}: position {first['position']}: token {first['token']} instead of "
            f"{first['ar_token']}; margin of the two best logits {margin}",
            file=sys.stderr,
        )
