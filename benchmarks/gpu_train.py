"""Training on one GPU, clocked: `python benchmarks/gpu_train.py --out gpu_train.json`.

Needs an NVIDIA GPU with 80 GB, no network and at most eight minutes; what does not fit into `--seconds` is left out and
named. The package need not be installed: `PYTHONPATH=src` is enough. With `--smoke` everything runs on the CPU in less
than a minute, at toy width and with chunks in place of FlexAttention.

Records whole optimizer steps (target forward, drafter forward and backward, loss, AdamW) of a random target of
Qwen3.5-4B's shape and a drafter of 8 stages and 3 layers, sequences of 2,048 tokens, bf16-mixed: tokens/s, peak memory
and the seconds of the target's part, for both row modes, FlexAttention and chunks, the target's layers compiled or not.
The losses of the two attention backends at the first step stand beside each other.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_decode import PUBLISHED_ANCHORS, QWEN35_4B, QWEN35_4B_TOKENS, TOY_WIDTH, machine, progress, synchronize
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from spd_lightning.files import write_whole
from spd_lightning.modules.attention.backends import BACKENDS
from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.drafter_config import DrafterConfig
from spd_lightning.modules.features import FeatureLayout, RowMode
from spd_lightning.modules.losses import TargetHead, distillation_loss
from spd_lightning.modules.target import FrozenTarget, target_shape

NUM_STAGES, NUM_SPEC_LAYERS = 8, 3


@dataclass(frozen=True)
class Case:
    """One configuration of the step.

    Attributes:
        rows: row mode; exact rows have an anchor at every boundary, shared ones the published anchors.
        attention: structural attention backend.
        compile_target: whether the target's layers are compiled.
    """

    rows: RowMode
    attention: str
    compile_target: bool


def make_target(device: torch.device, smoke: bool) -> FrozenTarget:
    """Random weights in bfloat16."""
    make_config: Any = Qwen3_5TextConfig
    config = make_config(**QWEN35_4B | (TOY_WIDTH if smoke else {}))
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return FrozenTarget(model, target_shape(config, "random"), "random")


def make_drafter(case: Case, target: FrozenTarget, draft_ids: torch.Tensor, device: torch.device) -> Any:
    """A drafter of the target's sizes; the same weights for every backend."""
    shape = target.shape
    anchors = "auto" if case.rows == "exact" else PUBLISHED_ANCHORS
    layout = FeatureLayout.build(shape.num_layers, NUM_STAGES, anchors=anchors, rows=case.rows)
    config = DrafterConfig(
        num_stages=NUM_STAGES,
        **asdict(layout),
        num_spec_layers=NUM_SPEC_LAYERS,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope_theta=1e7,
        rms_norm_eps=shape.rms_norm_eps,
        feature_norm="rms",
        draft_vocab_size=len(draft_ids),
    )
    with torch.device(device):
        drafter = PipelineDraftModule(config, BACKENDS[case.attention])
        drafter.initialize(
            draft_ids,
            torch.ones(shape.hidden_size),
            target.head_rows(draft_ids).float(),
            torch.Generator(device).manual_seed(1),
        )
    return drafter


def run(case: Case, target: FrozenTarget, batch: int, seq: int, steps: int, smoke: bool) -> dict[str, Any]:
    """Times some steps on random tokens, all but the prompt's quarter of them supervised."""
    device = target.head_weight.device
    num_tokens = 259 if smoke else QWEN35_4B_TOKENS
    draft_ids = torch.arange(64 if smoke else 50_000, device=device)
    drafter = make_drafter(case, target, draft_ids, device)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=device.type == "cuda")
    head = TargetHead(target.head_weight, target.head_weight[draft_ids], num_tokens)
    table = torch.tensor(drafter.layout.visibility_table(), device=device)
    generator = torch.Generator(device).manual_seed(2)
    ids = torch.randint(0, num_tokens, (batch, seq), generator=generator, device=device)
    positions = torch.arange(seq, device=device).expand(batch, -1)
    supervised = positions >= seq // 4
    fill = torch.randint(0, NUM_STAGES, (batch,), generator=generator, device=device)
    anchors = drafter.layout.anchors[: drafter.features.num_anchors]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, target_seconds, losses = [], [], []
    for _ in range(steps + 2):
        synchronize(device)
        began = time.perf_counter()
        states = target.forward(ids, torch.ones_like(ids), anchors)
        synchronize(device)
        target_seconds.append(time.perf_counter() - began)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = drafter(states.anchors, positions, table[fill])[supervised]
            loss = distillation_loss("kl", hidden, drafter.lm_head.weight, states.last[supervised], head)
        (loss / supervised.sum()).backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach() / supervised.sum()))
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    step = median(seconds[2:])
    return {
        **asdict(case),
        "tokens_per_second": batch * seq / step,
        "step_seconds": step,
        "target_seconds": median(target_seconds[2:]),
        "first_step_seconds": seconds[0],
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def main() -> None:
    """Writes the JSON file after every case, so that whatever ends the script leaves what it has measured."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=450.0, help="no case is begun after so many")
    parser.add_argument("--smoke", action="store_true", help="on the CPU, at toy width")
    given = parser.parse_args()
    if not given.smoke and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs on the CPU")
    began, device = time.perf_counter(), torch.device("cpu" if given.smoke else "cuda")
    if given.smoke:
        torch.set_num_threads(1)
    seq, steps = (96, 1) if given.smoke else (2048, given.steps)
    backends = ("chunked", "dense") if given.smoke else ("flex", "chunked")
    cases = [
        Case(rows, attention, compile_target)
        for compile_target in (False, True)
        for rows in ("exact", "shared")
        for attention in backends
        # What is compiled does not depend on the drafter: once is enough.
        if not compile_target or (rows, attention) == ("shared", backends[0])
    ]
    progress("making the target's weights")
    target = make_target(device, given.smoke)
    content: dict[str, Any] = {
        "smoke": given.smoke, "batch": given.batch, "seq": seq, "machine": machine(device), "cases": [], "left_out": [],
    }  # fmt: skip
    is_compiled = False
    for case in cases:
        if time.perf_counter() - began > given.seconds:
            content["left_out"].append(asdict(case))
            continue
        if case.compile_target and not is_compiled:
            target.compile_layers()
            is_compiled = True
        result = run(case, target, given.batch, seq, steps, given.smoke)
        content["cases"].append(result)
        progress(json.dumps(result))
        write_whole(given.out, json.dumps(content | {"seconds": time.perf_counter() - began}, indent=1) + "\n")


if __name__ == "__main__":
    main()
