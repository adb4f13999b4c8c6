"""Layers into pipeline stages (design §2). Plain integers; knows no model and no rank."""

from collections.abc import Sequence
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
