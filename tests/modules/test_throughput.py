"""What is counted of a training step, and its operations against torch's own count of the modules that do them."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spd_lightning.modules.batch import ReplicatedBatch
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target import FrozenTarget
from spd_lightning.modules.throughput import StepFlops, ThroughputMeter, peak_memory_gib
from spd_lightning.modules.tiny_target import save_tiny_target
from tests.modules.conftest import make_drafter

STATUS = Path("/proc/self/status")


def matrix_flops(counter: FlopCounterMode) -> int:
    """Of matrix products; attention is another operation."""
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in counts.items() if "attention" not in str(operation))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_target(tmp_path_factory.mktemp("flops") / "target", "llama", 8))


@pytest.mark.parametrize("fill", [1, 3, 4])
@pytest.mark.parametrize(
    ("layout", "gated"),
    [
        (FeatureLayout.build(8, 4), False),
        (FeatureLayout.build(8, 4, anchors=[0, 4, 7], rows="shared"), False),
        (FeatureLayout.build(8, 1), False),
        (FeatureLayout.build(8, 4, schedule="post_step"), False),
        (FeatureLayout.build(8, 4), True),
    ],
    ids=["exact", "shared", "one_stage", "post_step", "gated"],
)
def test_matrix_products_are_those_of_the_modules(target: str, layout: FeatureLayout, gated: bool, fill: int) -> None:
    fill = min(fill, layout.num_stages)
    drafter = make_drafter(layout, torch.float32, gated_attention=gated)
    model = FrozenTarget.from_pretrained(target)
    flops = StepFlops.of_run(target, drafter.config)
    ids = torch.ones((2, 7), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        states = model.forward(ids, torch.ones_like(ids), layout.anchors[: drafter.features.num_anchors])
    no_pairs = 0.0
    assert flops._target(14.0, no_pairs, 0) == matrix_flops(counter)

    table = torch.tensor(layout.visibility_table())[fill - 1].expand(2, -1, -1)
    attended = []

    def attention(query, key, value, visible_row):
        attended.append((query.shape, key.shape))
        return torch.zeros_like(query)

    drafter.structural_attention = attention
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        drafter.lm_head(drafter(states.anchors, torch.arange(7).expand(2, 7), table))
    head = 2 * 14 * drafter.lm_head.weight.numel()
    assert flops._rows(14.0, no_pairs, fill) + head == matrix_flops(counter)
    # Every query row has one score for each pair of a position and one at or before it: two products of head_dim.
    pairs = 2 * 7 * 8 / 2
    rows = sum(query[2] for query, _ in attended)
    assert flops._rows(0.0, pairs, fill) == pairs * rows * 4 * drafter.config.num_heads * drafter.config.head_dim


def test_a_step_is_a_forward_of_the_target_and_three_of_the_drafter(target: str) -> None:
    drafter = make_drafter(FeatureLayout.build(8, 4), torch.float32)
    flops = StepFlops.of_run(target, drafter.config)
    # Pairs of 3 and 5 tokens: 6 + 15.
    in_drafter = flops._rows(3.0, 6.0, 2) + flops._rows(5.0, 15.0, 4) + 2 * 4 * drafter.lm_head.weight.numel()
    counted = flops.of(torch.tensor([3, 5]), 4, torch.tensor([2, 4]))
    assert counted == flops._target(8.0, 21.0, 4) + 3 * in_drafter


def batch(lengths: list[int], supervised: int) -> ReplicatedBatch:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    chosen = torch.zeros_like(mask, dtype=torch.bool)
    chosen.view(-1)[:supervised] = True
    empty = torch.zeros((len(lengths), 1, 1), dtype=torch.long)
    return ReplicatedBatch(mask, mask, chosen, torch.ones(len(lengths)).long(), torch.zeros(1).long(), mask, empty)


def test_rates_and_shares_are_of_the_time_since_the_last_report(target: str) -> None:
    clock = [100.0]
    meter = ThroughputMeter(now=lambda: clock[0])
    flops = StepFlops.of_run(target, make_drafter(FeatureLayout.build(8, 4), torch.float32).config)
    meter.restart(waited=5.0)
    meter.count(batch([4, 2], 3), flops)
    clock[0] += 1.0
    meter.pause()
    clock[0] += 50.0  # a validation
    meter.resume()
    meter.resume()  # of what was not paused
    meter.count(batch([3, 1], 1), flops)
    clock[0] += 3.0
    rates, shares = meter.rates(waited=5.5, peak_flops=1e6)
    assert rates == {"tokens_per_s": 10 / 4, "supervised_tokens_per_s": 4 / 4}
    one = torch.ones(2).long()
    needed = flops.of(torch.tensor([4, 2]), 3, one) + flops.of(torch.tensor([3, 1]), 1, one)
    assert shares == {
        "padding_share": pytest.approx(4 / 14),
        "data_wait_share": 0.5 / 4,
        "flops_utilisation": pytest.approx(needed / 4 / 1e6),
    }
    meter.restart(waited=5.5)
    clock[0] += 1.0
    meter.count(batch([2], 1), flops)
    rates, shares = meter.rates(waited=5.5, peak_flops=None)
    assert rates["tokens_per_s"] == 2 and shares == {"padding_share": 0.0, "data_wait_share": 0.0}


@pytest.mark.skipif(not STATUS.exists(), reason="the system does not say how much memory this process has used")
def test_peak_memory_is_what_the_system_says() -> None:
    peak = peak_memory_gib(torch.device("cpu"))
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    assert peak == pytest.approx(int(line.split()[1]) / 2**20, rel=0.02)
