"""Random draws that are a pure function of their keys. Knows neither rows nor batches.

A counter-based hash (SplitMix64's finaliser) rather than a generator's stream: a draw does not depend on how many
were made before it, on the rank, the worker or the version of numpy.
"""

from typing import Any

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def random_bits(seed: int, purpose: str, *keys: Any) -> np.ndarray:
    """64 random bits for each entry of the broadcast integer `keys`.

    Args:
        seed: of the run.
        purpose: separates draws that would otherwise share their keys, such as `order` and `fill`.
        keys: integers or integer arrays.
    """
    tag = int.from_bytes(purpose.encode()[:8].ljust(8, b"\0"), "little")
    with np.errstate(over="ignore"):
        bits = _mix(np.asarray([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) ^ np.uint64(tag))
        for key in keys:
            bits = _mix(bits ^ _mix(np.atleast_1d(np.asarray(key)).astype(np.uint64)))
    return bits


def random_order(seed: int, purpose: str, size: int, *keys: int) -> np.ndarray:
    """A random permutation of `range(size)`."""
    return np.argsort(random_bits(seed, purpose, *keys, np.arange(size, dtype=np.uint64)), kind="stable")


def _mix(value: np.ndarray) -> np.ndarray:
    value = value + _GOLDEN
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))
