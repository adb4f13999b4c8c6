"""The learning rate over a run: linear warm-up, then linear decay to zero (design §4). Knows optimizers, no trainer."""

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_then_decay(warmup: int, total: int | float) -> Callable[[int], float]:
    """The factor of the peak learning rate at each step.

    Args:
        warmup: steps of linear warm-up.
        total: steps of the run.

    Raises:
        ValueError: if the run has no end.
    """
    if math.isinf(total):
        raise ValueError("the learning rate needs to know where the run ends: set trainer.max_epochs or max_steps")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (total - step) / max(1, total - warmup))

    return factor


def use_own_rates(optimizer: Optimizer, scheduler: LambdaLR, lr: float, weight_decay: float) -> None:
    """Puts a run's own learning rate and weight decay in place of those of a checkpoint that it resumes."""
    scheduler.base_lrs = [lr] * len(optimizer.param_groups)
    for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group |= {"initial_lr": lr, "lr": lr * factor(scheduler.last_epoch), "weight_decay": weight_decay}
