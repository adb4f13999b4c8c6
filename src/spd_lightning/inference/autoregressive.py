"""Plain decoding by the same stage code: the baseline, and what every SPD output must equal. Knows no drafter."""

from collections.abc import Iterator, Sequence

import torch

from spd_lightning.inference.stage import Stage
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import Verifier


def decode_autoregressively(
    stages: Sequence[Stage], verifier: Verifier, prompt: Sequence[int], stop: StopCondition
) -> Iterator[int]:
    """Yields tokens one by one, each through all stages before the next begins.

    The prompt is prefilled in one block, and every later token is one forward of one token: the shapes of the
    pipeline, so on the CPU the logits are equal bit for bit.

    Args:
        stages: all stages, first to last, in the caches of which this decode lives.
        verifier: draws tokens from logits.
        prompt: token ids.
        stop: fed every token; the decode ends when it says so.
    """
    device = next(stages[0].modules.layers.parameters()).device
    for stage in stages:
        stage.clear()
    entering, position = torch.tensor([list(prompt)], device=device), 0
    while True:
        hidden, logits = entering, None
        for stage in stages:
            output = stage.run(hidden, position)
            hidden, logits = output.hidden, output.logits
        assert logits is not None
        position += entering.shape[1]
        token = verifier.draw(logits, position)
        ended = stop.push(token)
        yield token
        if ended is not None:
            return
        entering = torch.tensor([[token]], device=device)
