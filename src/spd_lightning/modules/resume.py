"""Keeps checkpoints at optimizer-step boundaries. Knows Lightning's progress counters and nothing else."""

from typing import Any


def rewind_to_last_step(loops: dict[str, Any], accumulate_grad_batches: int, batches_in_epoch: int | float) -> None:
    """Takes batches that have not reached an optimizer step out of a checkpoint's batch counts, in place.

    A run that is stopped between two steps holds gradients that no checkpoint keeps. Without this a resumed run would
    go on behind the batches that made them, and end with other weights than an uninterrupted one. Nor is an epoch done
    that `max_steps` has cut, though the trainer closes it: a longer run goes on in it.

    Args:
        loops: the `loops` entry of a Lightning checkpoint.
        accumulate_grad_batches: batches per optimizer step.
        batches_in_epoch: the last step of an epoch may have fewer.
    """
    progress = loops["fit_loop"]["epoch_loop.batch_progress"]
    # While callbacks see the end of a batch, its step is taken but the trainer does not count it as completed yet.
    processed = progress["current"]["processed"]
    pending = 0 if processed >= batches_in_epoch else processed % accumulate_grad_batches
    for counts in (progress["current"], progress["total"]):
        stepped = counts["processed"] - pending
        for name in counts:
            counts[name] = stepped
    if progress["current"]["completed"] < batches_in_epoch:
        for counts in loops["fit_loop"]["epoch_progress"].values():
            counts["processed"] = counts["completed"] = max(0, counts["ready"] - 1)
