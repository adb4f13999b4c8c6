"""What a training step of the drafter costs, beside its naive twin: `train_step.py --out FILE.json ...`.

The naive twin has the dense mask, all row types as queries in every layer, a concatenation per projection and whole
logits of target and drafter over the full vocabulary; it computes the same loss. Random states stand for the target,
whose forward is left out. Every measurement runs in a process of its own, so that its peak memory is its own.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# PyTorch is imported by the processes that measure: a child's peak begins at the size of its parent.

SHAPES: dict[str, dict[str, int]] = {
    "smollm2": dict(hidden=576, heads=9, kv_heads=3, head_dim=64, mlp=1536, vocab=49152, draft_vocab=8192, layers=30),
    "qwen3_5": dict(
        hidden=1024, heads=8, kv_heads=2, head_dim=256, mlp=3584, vocab=248320, draft_vocab=50000, layers=24
    ),
    "tiny": dict(hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=48, vocab=300, draft_vocab=40, layers=8),
}
LOSS_CASES = {
    "large": dict(vocab=248320, draft_vocab=50000, positions=4096, hidden=1024),
    "tiny": dict(vocab=300, draft_vocab=40, positions=50, hidden=32),
}


@dataclass(frozen=True)
class Measurement:
    """One figure to take.

    Attributes:
        part: `attention` (one layer's), `step` (features, layers, loss) or `loss`, forward and backward.
        form: `naive` or `fast`.
        shapes: a key of `SHAPES`, or of `LOSS_CASES` for the loss.
        seq: positions of the one sequence.
        stages: pipeline stages; with one row type per depth there are one more row types.
        spec_layers: the drafter's layers.
        device: `cpu` or `cuda`.
        repeats: timed runs after one that is not; the fastest counts. With 0 the first counts.
        target: a target's folder, whose forward is timed as well.
    """

    part: str
    form: str
    shapes: str
    seq: int = 0
    stages: int = 6
    spec_layers: int = 2
    device: str = "cpu"
    repeats: int = 2
    target: str | None = None


def make_step(given: Measurement) -> dict[str, Any]:
    """A drafter with random weights, states, mask and target head, by the names that `naive_loss` takes."""
    import torch

    from spd_lightning.modules.drafter import PipelineDraftModule
    from spd_lightning.modules.drafter_config import DrafterConfig
    from spd_lightning.modules.features import FeatureLayout
    from spd_lightning.modules.losses import TargetHead

    size = SHAPES[given.shapes]
    layout = FeatureLayout.build(size["layers"], given.stages)
    config = DrafterConfig(
        num_stages=given.stages,
        **asdict(layout) | {"schedule": layout.schedule},
        num_spec_layers=given.spec_layers,
        hidden_size=size["hidden"],
        intermediate_size=size["mlp"],
        num_heads=size["heads"],
        num_kv_heads=size["kv_heads"],
        head_dim=size["head_dim"],
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        feature_norm="rms",
        draft_vocab_size=size["draft_vocab"],
    )
    torch.manual_seed(0)
    drafter = PipelineDraftModule(config)
    draft_ids = torch.arange(size["draft_vocab"]) * (size["vocab"] // size["draft_vocab"])
    weight = (0.02 * torch.randn(size["vocab"], size["hidden"])).bfloat16()
    drafter.initialize(draft_ids, torch.ones(size["hidden"]), weight[draft_ids].float())
    drafter = drafter.to(given.device)
    weight = weight.to(given.device)
    states = torch.randn(drafter.features.num_anchors + 1, 1, given.seq, size["hidden"]).bfloat16().to(given.device)
    return dict(
        drafter=drafter,
        states=list(states[:-1]),
        last=states[-1],
        position_ids=torch.arange(given.seq, device=given.device)[None],
        visible_row=torch.tensor(layout.visibility_table(), device=given.device)[-1:],
        supervised=torch.ones(1, given.seq, dtype=torch.bool, device=given.device),
        head=TargetHead(weight, weight[draft_ids.to(given.device)], size["vocab"]),
    )


def fast_loss(drafter, states, last, position_ids, visible_row, supervised, head):
    """The product's step: summed KL over the supervised positions."""
    from spd_lightning.modules.losses import distillation_loss

    hidden = drafter(states, position_ids, visible_row)[supervised]
    return distillation_loss("kl", hidden, drafter.lm_head.weight, last[supervised], head)


def naive_loss(drafter, states, last, position_ids, visible_row, supervised, head):
    """The same loss, written by its definition."""
    import torch
    import torch.nn.functional as F

    from spd_lightning.modules.attention.dense import dense_attention

    rows = []
    for depth in drafter.layout.row_depths:
        count = drafter.layout.deepest_anchor(depth) + 1
        normed = [norm(x.to(norm.weight.dtype)) for norm, x in zip(drafter.features.norms, states[:count])]  # noqa: B905
        rows.append(drafter.features.projections[str(count - 1)](torch.cat(normed, dim=-1)))
    hidden = torch.stack(rows, dim=1).to(drafter.norm.weight.dtype)

    def attend(query, key, value):
        return dense_attention(query, key, value, visible_row)

    num_rows = len(rows)
    hidden = drafter.run_layers(hidden, position_ids, [attend] * len(drafter.layers), num_rows)[:, 0]
    logits = drafter.lm_head(hidden).to(hidden.dtype)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        target_logits = (last @ head.weight.T).to(hidden.dtype)[..., drafter.draft_token_ids]
    target_logs = target_logits.log_softmax(dim=-1)
    losses = (target_logs.exp() * (target_logs - F.log_softmax(logits, dim=-1))).sum(dim=-1)
    return losses[supervised].sum()


def step_run(given: Measurement):
    """Forward and backward of the whole step under bfloat16 autocast."""
    import torch

    step = make_step(given)
    loss = naive_loss if given.form == "naive" else fast_loss

    def run() -> None:
        step["drafter"].zero_grad()
        with torch.autocast(given.device, torch.bfloat16):
            value = loss(**step)
        value.backward()

    return run


def attention_run(given: Measurement):
    """Forward and backward of structural attention, all row types as queries, in bfloat16."""
    import torch

    from spd_lightning.modules.attention.backends import fast_attention
    from spd_lightning.modules.attention.dense import dense_attention
    from spd_lightning.modules.features import FeatureLayout

    size = SHAPES[given.shapes]
    layout = FeatureLayout.build(size["layers"], given.stages)
    visible = torch.tensor(layout.visibility_table(), device=given.device)[-1:]
    query, key, value = (
        torch.randn(
            1, heads, layout.num_rows, given.seq, size["head_dim"], dtype=torch.bfloat16, device=given.device
        ).requires_grad_()
        for heads in (size["heads"], size["kv_heads"], size["kv_heads"])
    )
    attention = dense_attention if given.form == "naive" else fast_attention
    out_gradient = torch.randn_like(query)

    def run() -> None:
        torch.autograd.grad(attention(query, key, value, visible), (query, key, value), out_gradient)

    return run


def loss_run(given: Measurement):
    """Forward and backward of the KL loss in float32, from states to gradients of drafter states and head."""
    import torch
    import torch.nn.functional as F

    from spd_lightning.modules.losses import TargetHead, distillation_loss

    case = LOSS_CASES[given.shapes]
    hidden = case["hidden"]
    weight = 0.02 * torch.randn(case["vocab"], hidden, device=given.device)
    ids = torch.arange(case["draft_vocab"], device=given.device) * (case["vocab"] // case["draft_vocab"])
    draft_head = weight[ids].requires_grad_()
    states = torch.randn(case["positions"], hidden, device=given.device).requires_grad_()
    last = torch.randn(case["positions"], hidden, device=given.device)
    head = TargetHead(weight, weight[ids], case["vocab"])

    def run() -> None:
        if given.form == "naive":
            target_logs = (last @ weight.T)[:, ids].log_softmax(dim=-1)
            logs = F.log_softmax(F.linear(states, draft_head), dim=-1)
            loss = (target_logs.exp() * (target_logs - logs)).sum()
        else:
            loss = distillation_loss("kl", states, draft_head, last, head)
        torch.autograd.grad(loss, (states, draft_head))

    return run


def target_run(given: Measurement):
    """The frozen target's forward, which a step has in front."""
    import torch

    from spd_lightning.modules.target import FrozenTarget

    assert given.target is not None
    target = FrozenTarget.from_pretrained(given.target, "auto", torch.device(given.device))
    ids = torch.randint(10, 1000, (1, given.seq), device=given.device)
    return lambda: target.forward(ids, torch.ones_like(ids), (0,))


RUNS = {"attention": attention_run, "step": step_run, "loss": loss_run, "target": target_run}


def measure(given: Measurement) -> dict[str, float]:
    """The fastest run, by the clock and in processor time, and the memory in MiB that the runs needed in addition."""
    import torch

    from spd_lightning.host_memory import keep_freed_memory

    if given.part != "loss":  # that is measured for what it needs, not for what a process keeps
        keep_freed_memory()  # as spd-train does
    if given.part != "target":
        RUNS[given.part](replace(given, shapes="tiny", seq=16))()  # what is loaded at a first use counts for nobody
    run = RUNS[given.part](given)
    is_gpu = given.device == "cuda"
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    times = []
    for _ in range(given.repeats + 1):
        start = time.perf_counter(), time.process_time()
        run()
        if is_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    seconds, cpu_seconds = zip(*(times[1:] or times), strict=True)
    peak = torch.cuda.max_memory_allocated() if is_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": min(seconds), "cpu_seconds": min(cpu_seconds), "peak_mib": (peak - before) / 2**20}


def in_subprocess(given: Measurement) -> dict[str, Any]:
    """The measurement with its figures, taken by this script in a fresh process."""
    command = [sys.executable, __file__, "--measure", json.dumps(asdict(given))]
    figures = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
    result = asdict(given) | json.loads(figures)
    print(
        f"{given.part:9} {given.form:5} {given.shapes:8} S={given.seq:<5}"
        f" {result['seconds']:8.3f} s {result['cpu_seconds']:8.3f} s of CPU {result['peak_mib']:8.0f} MiB",
        flush=True,
    )
    return result


def plan(given: argparse.Namespace) -> list[Measurement]:
    """What to measure: attention and step at every length in both forms, then the loss."""
    fixed: dict[str, Any] = dict(shapes=given.shapes, device=given.device, repeats=given.repeats)
    parts = [("attention", 4), ("step", given.stages)]
    measurements = [
        Measurement(part, form, seq=seq, stages=stages, **fixed)
        for part, stages in parts
        if part in given.parts
        for seq in given.lengths
        for form in (("fast",) if seq > given.naive_up_to else ("naive", "fast"))
    ]
    if "loss" in given.parts:
        case = fixed | {"shapes": "tiny" if given.shapes == "tiny" else "large"}
        measurements += [Measurement("loss", form, **case) for form in ("naive", "fast")]
    if given.target:
        measurements += [Measurement("target", "fast", seq=seq, target=given.target, **fixed) for seq in given.lengths]
    return measurements


def ratios(results: list[dict[str, Any]]) -> list[str]:
    """How the fast form compares to the naive one, and the step's time per token across lengths."""
    found = {(r["part"], r["seq"], r["form"]): r for r in results}
    lines = []
    for (part, seq, form), fast in found.items():
        naive = found.get((part, seq, "naive"))
        if form == "fast" and naive:
            time_ratio, memory_ratio = naive["seconds"] / fast["seconds"], fast["peak_mib"] / naive["peak_mib"]
            cpu_ratio = naive["cpu_seconds"] / fast["cpu_seconds"]
            lines.append(
                f"{part} S={seq}: {time_ratio:.2f}x faster ({cpu_ratio:.2f}x in CPU time), {memory_ratio:.2f}x the memory"
            )
    per_token = {seq: r["seconds"] / seq for (part, seq, form), r in found.items() if part == "step" and form == "fast"}
    if len(per_token) > 1:
        short, long = min(per_token), max(per_token)
        lines.append(f"step: time per token at S={long} is {per_token[long] / per_token[short]:.2f}x that at S={short}")
    for (part, seq, _), target in found.items():
        if part == "target" and ("step", seq, "fast") in found:
            whole = target["seconds"] + found["step", seq, "fast"]["seconds"]
            lines.append(f"step with the target's forward S={seq}: {whole:.3f} s")
    return lines


def machine() -> dict[str, Any]:
    """What the figures depend on; read without PyTorch."""
    from importlib.metadata import version

    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].split(":")[1].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "torch": version("torch"),
    }


def main() -> None:
    """Measures, prints figures and ratios, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--shapes", choices=SHAPES, default="smollm2")
    parser.add_argument(
        "--parts", nargs="+", choices=("attention", "step", "loss"), default=["attention", "step", "loss"]
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--naive-up-to", type=int, default=2048, help="longest sequence of the naive twin")
    parser.add_argument("--stages", type=int, default=6, help="of the step; attention has four, so five row types")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--target", help="folder of a target: its forward is timed beside the step")
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(Measurement(**json.loads(given.measure)))))
        return
    facts = machine()
    results = [in_subprocess(measurement) for measurement in plan(given)]
    lines = ratios(results)
    print("\n".join(lines))
    if given.out:
        record = {"machine": facts, "results": results, "ratios": lines}
        with tempfile.NamedTemporaryFile("w", dir=given.out.parent, delete=False, encoding="utf-8") as file:
            file.write(json.dumps(record, indent=1) + "\n")
        os.replace(file.name, given.out)


if __name__ == "__main__":
    main()
