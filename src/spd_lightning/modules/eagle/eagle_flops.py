"""What a training step of EAGLE-3 costs (see `StepFlops`). Plain numbers; knows no trainer."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from spd_lightning.modules.eagle.eagle_config import Eagle3Config
from spd_lightning.modules.model_size import TargetSize
from spd_lightning.modules.throughput import target_flops, tokens_and_pairs


@dataclass(frozen=True)
class EagleFlops:
    """Operations of a training step; every step of a chain costs a pass of the layer over all positions.

    Args:
        target: runs forward once.
        drafter: runs forward, and backward at twice the cost.
        num_steps: of the training-time test.
    """

    target: TargetSize
    drafter: Eagle3Config
    num_steps: int

    def of(self, lengths: Int[Tensor, " batch"], num_supervised: int, fill: Int[Tensor, " batch"]) -> float:
        """Of one batch.

        Args:
            lengths: tokens of each sequence.
            num_supervised: chains; the few whose last steps lie beyond their answers count in full.
            fill: of no concern here.
        """
        del fill
        tokens, pairs = tokens_and_pairs(lengths)
        hidden, config, steps = self.drafter.hidden_size, self.drafter, self.num_steps
        query = config.num_heads * config.head_dim
        head = config.draft_vocab_size * hidden
        fusing = len(config.anchors) * hidden**2
        attention = 4 * query * (steps * pairs + steps * (steps - 1) / 2 * tokens)
        drafting = (
            2 * (fusing + steps * config.layer_parameters) * tokens + attention + 2 * steps * head * num_supervised
        )
        return target_flops(self.target, head, tokens, pairs, steps * num_supervised) + 3 * drafting
