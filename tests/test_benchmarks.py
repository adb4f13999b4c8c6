"""`benchmarks/train_step.py`: its naive twin computes the product's loss and gradients, and it runs to the end."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spd_lightning.modules.losses import TargetHead
from tests.modules.conftest import make_drafter
from tests.modules.test_drafter import LAYOUTS, random_states

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "train_step.py"


@pytest.fixture(scope="module")
def train_step():
    spec = importlib.util.spec_from_file_location("train_step", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_step"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_naive_twin_has_the_same_loss_and_gradients(name: str, train_step) -> None:
    """All fill levels, one of them twice, in no order; each sequence of another length, with noise in the padding."""
    layout, seq = LAYOUTS[name], 40
    batch = layout.num_stages + 1
    fills = torch.tensor([1, 3, 0, 2, 1])[:batch] % layout.num_stages
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(150, 32, generator=generator, dtype=torch.float64)
    lengths = seq - 3 * torch.arange(batch)
    step = dict(
        states=random_states(layout, batch, seq),
        last=torch.randn(batch, seq, 32, generator=generator, dtype=torch.float64),
        position_ids=torch.arange(seq).expand(batch, seq),
        visible_row=torch.tensor(layout.visibility_table())[fills],
        supervised=(torch.arange(seq) > 5) & (torch.arange(seq) < lengths[:, None]),
    )
    results = []
    for loss_of in (train_step.naive_loss, train_step.fast_loss):
        drafter = make_drafter(layout)
        loss = loss_of(drafter, **step, head=TargetHead(weight, weight[drafter.draft_token_ids], 150))
        loss.backward()
        results.append({"loss": loss} | {name: p.grad for name, p in drafter.named_parameters()})
    naive, fast = results
    for key, value in naive.items():
        torch.testing.assert_close(fast[key], value, rtol=1e-10, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")


def test_the_benchmark_prints_ratios_and_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--shapes", "tiny", "--lengths", "16", "24", "--naive-up-to", "16"]
    command += ["--parts", "step", "--repeats", "1", "--out", str(out)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert "step S=16: " in printed and "time per token at S=24" in printed and "step S=24: " not in printed
    record = json.loads(out.read_text(encoding="utf-8"))
    assert [(r["form"], r["seq"]) for r in record["results"]] == [("naive", 16), ("fast", 16), ("fast", 24)]
    assert all(r["seconds"] > 0 for r in record["results"])
    assert list(tmp_path.iterdir()) == [out]
