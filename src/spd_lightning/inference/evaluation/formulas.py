"""The formulas of design §§4, 5 and 9 that a summary is made with. Plain numbers; knows no groups and no files."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.modules.metrics import TOP_K, implied_figures


def cycle_deviation(num_stages: int, num_committed: int, num_cycles: int, verdicts: Sequence[bool]) -> int:
    """How far one prompt misses the identity of design §5, in cycles; 0 for a chain pipeline.

    `K - (N + (n-1) * ([N > 0] + rejections that are not the prompt's last token))`: filling the pipeline costs `n-1`
    cycles, at the beginning and after every rejection but one that the answer ends with.

    Args:
        num_stages: `n`.
        num_committed: `N`.
        num_cycles: `K`.
        verdicts: of the judged drafts, in order.
    """
    num_fillings = (num_committed > 0) + sum(not accepted for accepted in verdicts[:-1])
    return num_cycles - num_committed - (num_stages - 1) * num_fillings


def adjusted_speedup(
    s0: float,
    method: str,
    num_layers: int,
    num_spec_layers: int | None,
    schedule: str | None = None,
    num_stages: int | None = None,
    draft_length: int | None = None,
) -> float:
    """`S0 * L / (d * L_s + L)`: `S0` with the layers of those drafts counted that nothing hides (design §9).

    `d` is 0 for pre-step SPD, whose drafting runs beside the stages, `n` for post-step SPD and PPSD, `k` for EAGLE-3.

    Raises:
        ValueError: if a number that the method needs is not known.
    """
    if method == "eagle3":
        num_exposed = draft_length
    else:
        num_exposed = {"pre_step": 0, "post_step": num_stages}.get(schedule or "")
    if num_exposed is None or num_spec_layers is None:
        raise ValueError(
            f"the cost of drafting is not known for {method=} with {schedule=}, {num_stages=}, {draft_length=} and "
            f"{num_spec_layers=}"
        )
    return s0 / (1 + num_exposed * num_spec_layers / num_layers)


def implied_by_rates(rates: Sequence[float]) -> dict[str, float]:
    """`p`, `alpha` and `s0` that acceptance `p_1 .. p_n` at each fill level implies (design §4)."""
    implied = implied_figures(rates)
    return {"p": implied.acceptance, "alpha": implied.tokens_per_cycle, "s0": implied.speedup}


def implied_by_counts(by_fill: Mapping[int, tuple[int, int]], num_stages: int) -> dict[str, float] | None:
    """The same of (accepted, judged) at fill levels; none if a level that matters never occurred.

    A level behind one at which every draft failed does not matter: none gets there.
    """
    rates: list[float] = []
    for fill in range(1, num_stages + 1):
        accepted, judged = by_fill.get(fill, (0, 0))
        if not judged and 0.0 not in rates:
            return None
        rates.append(accepted / judged if judged else 0.0)
    return implied_by_rates(rates)


def predicted_acceptance(
    metrics: Mapping[str, float], num_stages: int, params: SamplingParams
) -> dict[str, Any] | None:
    """What a drafter's validation says of decoding: `by_fill`, and `p`, `alpha` and `s0` that it implies.

    Args:
        metrics: of the drafter's record, such as `val/p_fill_1`.
        num_stages: `n`.
        params: of the decode. Validation knows greedy decoding, and rejection sampling at `T=1` from all tokens or
            the best `TOP_K`.

    Returns:
        None where validation did not measure this.
    """
    law = (params.temperature, params.top_p, params.verify)
    if params.is_greedy:
        suffix = ""
    elif law == (1.0, 1.0, "rejection") and params.top_k in (0, TOP_K):
        suffix = f"_t1_top{TOP_K}" if params.top_k else "_t1"
    else:
        return None
    names = [f"val/p{suffix}_fill_{fill}" for fill in range(1, num_stages + 1)]
    if any(name not in metrics for name in names):
        return None
    by_fill = [float(metrics[name]) for name in names]
    return {"by_fill": by_fill, **implied_by_rates(by_fill)}


def wilson_interval(accepted: int, judged: int) -> tuple[float, float]:
    """Bounds of the rate with 95% confidence, as if drafts were independent; at least one was judged."""
    z = 1.96
    rate, spread = accepted / judged, z * z / judged
    middle = rate + spread / 2
    half = z * math.sqrt(rate * (1 - rate) / judged + spread / judged / 4)
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)
