"""Layers into pipeline stages (design §2). Plain integers; knows no model and no rank."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def even_stage_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as possible; the first stages take the remainder.

    The last stage also carries the LM head, so it is never the longer one.

    Raises:
        ValueError: if there is no stage, or a stage would be empty.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages}: at least one stage is needed")
    if num_stages > num_layers:
        raise ValueError(f"num_stages={num_stages}: a target of {num_layers} layers has at most {num_layers} stages")
    quotient, remainder = divmod(num_layers, num_stages)
    return tuple(quotient + (stage < remainder) for stage in range(num_stages))


def balanced_stage_layers(
    costs: Sequence[int | float], num_stages: int, last_extra: int | float = 0
) -> tuple[int, ...]:
    """Layers per stage such that the most expensive stage is as cheap as any contiguous split allows.

    Of the splits that achieve this, the one with the most even numbers of layers (least sum of squares), and of those
    the one whose first stages are the longer ones: with equal costs and nothing extra, `even_stage_layers`.

    Args:
        costs: of each layer, in order; any unit, none negative.
        num_stages: stages, each of at least one layer.
        last_extra: what the last stage bears besides its layers: the LM head, in the same unit.

    Raises:
        ValueError: if there is no stage, a stage would be empty, or a cost is negative or no number.
    """
    num_layers = len(costs)
    even_stage_layers(num_layers, num_stages)  # refuses an impossible number of stages
    for cost in (*costs, last_extra):
        if not 0 <= cost < math.inf:
            raise ValueError(f"cost {cost} of a layer or of the head: must be a finite number, 0 or more")

    @cache
    def cost_of(start: int, end: int) -> float:
        # Rounded once, so stages of the same layers cost exactly the same wherever they lie.
        return math.fsum([*costs[start:end], last_extra if end == num_layers else 0])

    def ends_of(stage: int) -> range:
        """Where a stage can end: one layer at least for each stage before, in and behind it."""
        return range(num_layers, num_layers + 1) if stage == num_stages else range(stage, num_layers)

    worst: dict[int, float] = {0: 0.0}
    """By its end: the most expensive of the stages so far, at best."""
    for stage in range(1, num_stages + 1):
        worst = {
            end: min(max(before, cost_of(start, end)) for start, before in worst.items() if start < end)
            for end in ends_of(stage)
        }
    limit = worst[num_layers]

    chosen: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    """By its end: sum of squares and negated layers of the best stages so far that stay within the limit."""
    for stage in range(1, num_stages + 1):
        options = {
            end: [
                (squares + (end - start) ** 2, (*layers, start - end))
                for start, (squares, layers) in chosen.items()
                if start < end and cost_of(start, end) <= limit
            ]
            for end in ends_of(stage)
        }
        chosen = {end: min(splits) for end, splits in options.items() if splits}
    return tuple(-layers for layers in chosen[num_layers][1])


def check_stage_layers(stage_layers: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """A split given by the user, checked.

    Raises:
        ValueError: if it has another number of stages, an empty stage, or another sum than `num_layers`.
    """
    layers = tuple(stage_layers)
    if len(layers) != num_stages:
        raise ValueError(f"stage_layers={list(layers)} names {len(layers)} stages, but num_stages={num_stages}")
    if min(layers) < 1:
        raise ValueError(f"stage_layers={list(layers)}: every stage needs at least one layer")
    if sum(layers) != num_layers:
        raise ValueError(f"stage_layers={list(layers)} sums to {sum(layers)}, but the target has {num_layers} layers")
    return layers


def stage_ends(stage_layers: Sequence[int]) -> tuple[int, ...]:
    """Boundaries `e_0=0 < e_1 < ... < e_n=L`: stage `j` runs layers `e_{j-1}+1 .. e_j`."""
    return (0, *accumulate(stage_layers))
