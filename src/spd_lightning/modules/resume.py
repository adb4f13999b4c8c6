"""Keeps checkpoints at optimizer-step boundaries. Knows Lightning's progress counters and nothing else."""

from typing import Any


def rewind_to_last_step(loops: dict[str, Any], accumulate_grad_batches: int, batches_in_epoch: int | float) -> None:
    """Takes batches that have not reached an optimizer step out of a checkpoint's batch counts, in place.

    A run that is stopped between two steps holds gradients that no checkpoint keeps. Without this a resumed run would
    go on behind the batches that made them, and end with other weights than an uninterrupted one.

    Args:
        loops: the `loops` entry of a Lightning checkpoint.
        accumulate_grad_batches: batches per optimizer step.
        batches_in_epoch: the last step of an epoch may have fewer.
    """
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    completed = progress["current"]["completed"]
    pending = 0 if completed >= batches_in_epoch else completed % accumulate_grad_batches
    for counts in (progress["current"], progress["total"]):
        stepped = counts["completed"] - pending
        for name in counts:
            counts[name] = stepped
