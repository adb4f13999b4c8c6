"""A prompt through all stages of this process and into the drafter. Knows no cycles."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.stage import Stage


def take_prompt(stages: Sequence[Stage], session: DraftSession, prompt: Sequence[int]) -> Float[Tensor, " vocab"]:
    """Runs a prompt through all stages into the drafter, all of which forget what was before; the logits behind it."""
    session.clear()
    tokens = torch.tensor([list(prompt)], device=session.states.device)
    entering, anchors, logits = tokens, dict[int, Tensor](), None
    for stage in stages:
        stage.clear()
        output = stage.run(entering, 0)
        entering, logits = output.hidden, output.logits
        anchors |= output.anchors
    session.prefill(tokens, anchors)
    assert logits is not None
    return logits
