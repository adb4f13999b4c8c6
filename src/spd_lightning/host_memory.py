"""How the C library keeps memory that a training step on the CPU frees and asks for again."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's `mallopt`."""


def keep_freed_memory() -> bool:
    """Has large blocks that are freed reused by the process rather than returned to the system; whether that was done.

    A tensor beyond 32 MiB is otherwise a fresh mapping each time, and touching its pages for the first time takes
    several times as long as the arithmetic on it. Does nothing where the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
