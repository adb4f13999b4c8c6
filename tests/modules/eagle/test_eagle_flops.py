"""The operations of an EAGLE-3 step against torch's own count of the modules that do them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spd_lightning.modules.eagle import eagle_drafter
from spd_lightning.modules.eagle.eagle_flops import EagleFlops
from spd_lightning.modules.model_size import read_target_size
from spd_lightning.modules.throughput import target_flops
from spd_lightning.modules.tiny_target import save_tiny_target
from tests.modules.eagle.drafters import make_eagle


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_step_is_a_forward_of_the_target_and_three_of_the_unrolled_drafter(
    num_steps: int, tmp_path_factory, monkeypatch
) -> None:
    """But for the last positions of a sequence, at which later steps have no base."""
    size = read_target_size(str(save_tiny_target(tmp_path_factory.mktemp("flops") / "target", "llama", 8)))
    drafter, seq = make_eagle(8, torch.float32), 400
    flops = EagleFlops(size, drafter.config, num_steps)
    monkeypatch.setattr(eagle_drafter, "unrolled_attention", lambda query, keys, values: torch.zeros_like(query))
    states = [torch.zeros(1, seq, 32)] * 3
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        outputs = drafter(states, states[0], torch.arange(seq)[None], num_steps)
        for output in outputs:
            drafter.lm_head(output)
    pairs, tokens = seq * (seq + 1) / 2, float(seq)
    head = 40 * 32
    in_target = target_flops(size, head, tokens, pairs, num_steps * seq)
    # Each query has one score with each position at or before it, and one with each later step of its own chain.
    scores = num_steps * pairs + sum(range(num_steps)) * seq
    in_attention = 4 * 4 * 16 * scores
    counted = in_target + 3 * (counter.get_total_flops() + in_attention)
    assert flops.of(torch.tensor([seq]), seq, torch.tensor([1])) == pytest.approx(counted, rel=0.01)


def test_the_configuration_knows_the_number_of_parameters() -> None:
    drafter = make_eagle(8, torch.float32)
    assert drafter.config.num_parameters == sum(parameter.numel() for parameter in drafter.parameters())
