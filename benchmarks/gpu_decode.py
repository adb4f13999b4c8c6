"""Decoding on one GPU in bfloat16, checked and clocked: `python benchmarks/gpu_decode.py --out gpu_decode.json`.

Needs an NVIDIA GPU with 24 GB, Transformers 5.21 or later, no network and at most six minutes. The package need not be
installed: `PYTHONPATH=src` is enough. With `--smoke` everything runs on the CPU in less than a minute, shorter and with
the big target at toy width.

Records, for tiny random targets of all families, loaded from folders, and for a random one of the shape of Qwen3.5-4B,
made on the device (8 stages, a drafter of 3 layers):
- whether decoding with drafts gives the tokens, and the bits of the logits, of plain decoding by the same stages, on one
  device and eagerly: with the drafter, greedily and coupled, and with drafts of which half are rejected;
- of the big one the median time of a step of each stage, of the drafter and of the head, from an idle device to an idle
  device: what a rank would wait for, launching included.

Fails if a token differs. Knows nothing of acceptance: the weights are noise.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from spd_lightning.inference.autoregressive import decode_autoregressively
from spd_lightning.inference.coordinator import decode
from spd_lightning.inference.drafting import DraftSession
from spd_lightning.inference.runtime.local import LocalPipeline
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.inference.schedule import CyclePlan, Verdict
from spd_lightning.inference.stage import Stage
from spd_lightning.inference.stage_loading import StageModules, load_stage
from spd_lightning.inference.stats import DecodeStats
from spd_lightning.inference.stopping import StopCondition
from spd_lightning.inference.verify import DraftProposal, Proposer, Verifier, make_proposer, make_verifier
from spd_lightning.modules.drafter import PipelineDraftModule
from spd_lightning.modules.drafter_config import DrafterConfig
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.tiny_target import NUM_TOKENS, byte_tokenizer, save_tiny_target

DTYPE = torch.bfloat16
FAMILIES = ("qwen3_5", "qwen3", "llama")
TOKENIZER = byte_tokenizer()  # asked for texts that nobody reads

QWEN35_4B: dict[str, Any] = dict(
    vocab_size=248_320,
    hidden_size=2560,
    intermediate_size=9216,
    num_hidden_layers=32,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    tie_word_embeddings=True,
)
QWEN35_4B_TOKENS = 248_077
TOY_WIDTH: dict[str, Any] = dict(
    vocab_size=264,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
PUBLISHED_ANCHORS = (0, 8, 16, 24, 31)
WARM_UPS = 3


@dataclass(frozen=True)
class Bench:
    """A target in stages and a drafter for it.

    Attributes:
        stages: all stages.
        session: the drafter.
        num_tokens: ids below it can be drawn.
        prompt: what is decoded from.
        max_new_tokens: how far.
    """

    stages: list[Stage]
    session: DraftSession
    num_tokens: int
    prompt: list[int]
    max_new_tokens: int


class ScriptedProposer:
    """Right with a given chance, whatever the drafter says: it knows the answer in advance."""

    def __init__(self, answer: Sequence[int], accuracy: float, num_tokens: int) -> None:
        self.answer, self.accuracy, self.num_tokens = answer, accuracy, num_tokens
        self.generator = torch.Generator().manual_seed(0)

    def propose(self, draft_logits: Tensor, position: int) -> DraftProposal:
        """The answer's token at `position`, or the id after it."""
        right = self.answer[position] if position < len(self.answer) else 0
        is_right = float(torch.rand((), generator=self.generator)) < self.accuracy
        return DraftProposal(right if is_right else (right + 1) % self.num_tokens)


class RecordingVerifier:
    """Keeps the logits behind every committed token, by its position."""

    def __init__(self, inner: Verifier) -> None:
        self.inner = inner
        self.logits: dict[int, Tensor] = {}

    def draw(self, logits: Tensor, position: int) -> int:
        """As the inner one."""
        self.logits[position] = logits.clone()
        return self.inner.draw(logits, position)

    def judge(self, logits: Tensor, proposal: DraftProposal, position: int) -> Verdict:
        """As the inner one."""
        self.logits[position] = logits.clone()
        return self.inner.judge(logits, proposal, position)


def progress(line: str) -> None:
    """Prints what is being done, at once."""
    print(line, flush=True)


def synchronize(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def clocked(name: str, seconds: dict[str, float], device: torch.device) -> Iterator[None]:
    """Puts the wall clock of what happens within into `seconds`."""
    synchronize(device)
    began = time.perf_counter()
    yield
    synchronize(device)
    seconds[name] = time.perf_counter() - began


def random_session(
    layout: FeatureLayout, stages: Sequence[Stage], num_layers: int, draft_ids: Tensor, capacity: int
) -> DraftSession:
    """A random drafter of the target's sizes, ready to decode."""
    embedding, head, config = stages[0].modules.embedding, stages[-1].modules.head, stages[0].modules.config
    assert embedding is not None and head is not None
    device = head.weight.device
    with torch.device(device):
        drafter = PipelineDraftModule(
            DrafterConfig(
                num_stages=layout.num_stages,
                stage_layers=layout.stage_layers,
                anchors=layout.anchors,
                rows=layout.rows,
                num_spec_layers=num_layers,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                rope_theta=1e7,
                rms_norm_eps=config.rms_norm_eps,
                feature_norm="rms",
                draft_vocab_size=len(draft_ids),
            )
        )
        generator = torch.Generator(device).manual_seed(1)
        ids = draft_ids.to(device)
        drafter.initialize(ids, torch.ones(config.hidden_size), head.weight[ids].float(), generator)
    return DraftSession(drafter.eval().to(DTYPE), embedding, capacity)


def tiny_bench(folder: Path, family: str, device: torch.device, smoke: bool) -> Bench:
    """Four stages of a tiny target, read from its folder as a rank would read them."""
    layout, capacity = FeatureLayout.build(8, 4), 80
    target = str(save_tiny_target(folder / family, family, 8))
    stages = []
    for number in range(1, 5):
        first, last = layout.stage_ends[number - 1 : number + 1]
        modules = load_stage(target, first, last, number == 1, number == 4, "bfloat16", device)
        stages.append(Stage(modules, number, 4, first, layout.anchors, capacity))
    session = random_session(layout, stages, 2, torch.arange(0, NUM_TOKENS, 2), capacity)
    return Bench(stages, session, NUM_TOKENS, list(range(60, 71)), 10 if smoke else 48)


def big_bench(device: torch.device, smoke: bool) -> Bench:
    """Eight stages of a random Qwen3.5-4B, and a drafter of three layers in the published layout."""
    layout, capacity = FeatureLayout.build(32, 8, anchors=PUBLISHED_ANCHORS, rows="shared"), 512
    num_tokens, max_new_tokens = (NUM_TOKENS, 6) if smoke else (QWEN35_4B_TOKENS, 64)
    make_config: Any = Qwen3_5TextConfig
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            make_config(**QWEN35_4B | (TOY_WIDTH if smoke else {})), dtype=DTYPE
        )
        for parameter in model.parameters():
            if parameter.ndim >= 2:  # wide enough that the text does not repeat one token
                nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    body = model.eval().requires_grad_(False).model
    stages = []
    for number in range(1, 9):
        first, last = layout.stage_ends[number - 1 : number + 1]
        layers = body.layers[first:last]
        for index, layer in enumerate(layers):
            (layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn).layer_idx = index
        modules = StageModules(
            layers=layers,
            embedding=body.embed_tokens if number == 1 else None,
            norm=body.norm if number == 8 else None,
            head=model.lm_head if number == 8 else None,
            rotary=body.rotary_emb,
            config=model.config,
            layer_types=tuple(model.config.layer_types[first:last]),
            vocab_size=model.config.vocab_size,
        )
        stages.append(Stage(modules, number, 8, first, layout.anchors, capacity))
    draft_ids = torch.arange(128) if smoke else torch.arange(32_000) * 7
    session = random_session(layout, stages, 3, draft_ids, capacity)
    return Bench(stages, session, num_tokens, draft_ids[:64].tolist(), max_new_tokens)


def compare(bench: Bench, params: SamplingParams, accuracy: float | None = None) -> dict[str, Any]:
    """Decodes plainly and with drafts: the drafter's or, at a given accuracy, scripted ones."""
    device, draft_ids = bench.session.states.device, bench.session.drafter.draft_token_ids
    seconds: dict[str, float] = {}
    plain, piped = (RecordingVerifier(make_verifier(params, bench.num_tokens, draft_ids)) for _ in range(2))

    def stop() -> StopCondition:
        return StopCondition((), params.max_new_tokens, (), TOKENIZER)

    with clocked("plain", seconds, device):
        expected = list(decode_autoregressively(bench.stages, plain, bench.prompt, stop()))
    proposer: Proposer = make_proposer(params, draft_ids)
    if accuracy is not None:
        proposer = ScriptedProposer(bench.prompt + expected, accuracy, bench.num_tokens)
    stats = DecodeStats(len(bench.stages))
    pipeline = LocalPipeline(bench.stages, bench.session, proposer, piped)
    with clocked("with_drafts", seconds, device):
        tokens = list(decode(pipeline, len(bench.stages), bench.prompt, stop(), stats))
    return {
        "identical_tokens": tokens == expected,
        "num_tokens": len(tokens),
        "num_distinct_tokens": len(set(expected)),
        "num_cycles": stats.num_cycles,
        "num_judged": stats.num_judged,
        "num_rejected": stats.num_judged - stats.num_accepted,
        "seconds_with_prefill": seconds,
        **logit_differences(plain.logits, piped.logits),
    }


def logit_differences(expected: dict[int, Tensor], found: dict[int, Tensor]) -> dict[str, Any]:
    """How the judged logits differ; what follows the first different token has another prefix and is left out."""
    for position in sorted(expected.keys() & found.keys()):
        one, other = expected[position], found[position]
        if not torch.equal(one, other):
            first, second = one.float().topk(2).values.tolist()
            difference = float((one.float() - other.float()).abs().max())
            return {
                "identical_logits": False,
                "first_difference": {"position": position, "largest": difference, "top2_margin": first - second},
            }
    return {"identical_logits": expected.keys() == found.keys()}


def check(name: str, bench: Bench) -> dict[str, Any]:
    """All comparisons on one target."""
    new = bench.max_new_tokens
    runs = {
        "greedy": (SamplingParams(new), None),
        "greedy_half_rejected": (SamplingParams(new), 0.5),
        "coupled": (SamplingParams(new, 0.8, 50, seed=1, verify="coupled"), None),
        "coupled_half_rejected": (SamplingParams(new, 0.8, 50, seed=2, verify="coupled"), 0.5),
    }
    results = {}
    for run, (params, accuracy) in runs.items():
        results[run] = result = compare(bench, params, accuracy)
        progress(
            f"{name} {run}: tokens {'identical' if result['identical_tokens'] else 'DIFFER'}, logits "
            f"{'identical' if result['identical_logits'] else 'differ'}, {result['num_rejected']} of "
            f"{result['num_judged']} rejected"
        )
    return results


def median_ms(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of a step that begins and ends with an idle device."""
    times = []
    for _ in range(WARM_UPS + repeats):
        synchronize(device)
        began = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 1e3 * median(times[WARM_UPS:])


@torch.no_grad()
def time_steps(bench: Bench, repeats: int) -> dict[str, Any]:
    """Medians in milliseconds, at the lengths that the last decode left; each step is one position further."""
    session, device, last = bench.session, bench.session.states.device, bench.stages[-1].modules
    assert last.norm is not None and last.head is not None
    norm, head, n = last.norm, last.head, len(bench.stages)
    token = torch.tensor([[1]], device=device)
    hidden = session.embedding(token)
    stage_ms = [
        median_ms(
            lambda stage=stage: stage.run(token if stage.number == 1 else hidden, stage.cache.length), device, repeats
        )
        for stage in bench.stages
    ]

    def draft() -> Tensor:
        """The cycle that follows on the last one, with the pipeline full."""
        plan = CyclePlan(cycle=0, epoch=0, fill=n, newest=session.length + n, num_stages=n)
        return session.draft_logits(plan, newest_token=1)

    return {
        "stages_ms": stage_ms,
        "drafter_ms": median_ms(draft, device, repeats),
        "norm_and_head_ms": median_ms(lambda: head(norm(hidden)), device, repeats),
        "repeats": repeats,
    }


def machine(device: torch.device) -> dict[str, Any]:
    """What the times depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("torch", "transformers")},
    }


def main() -> None:
    """Writes the JSON file; then fails if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="on the CPU, with the big target at toy width")
    given = parser.parse_args()
    if not given.smoke and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --smoke runs on the CPU")
    began, device = time.perf_counter(), torch.device("cpu" if given.smoke else "cuda")
    if given.smoke:
        torch.set_num_threads(1)  # ten times as fast at toy width
    targets: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            targets[f"tiny_{family}"] = check(f"tiny_{family}", tiny_bench(Path(folder), family, device, given.smoke))
    name = "qwen3_5_4b_toy_width" if given.smoke else "qwen3_5_4b"
    progress(f"{name}: making the weights")
    bench = big_bench(device, given.smoke)
    targets[name] = check(name, bench)
    times = time_steps(bench, repeats=3 if given.smoke else 50)
    progress(f"{name}: {json.dumps(times)}")
    content = {"smoke": given.smoke, "dtype": "bfloat16", "machine": machine(device), "targets": targets}
    content |= {"times": {name: times}, "seconds": time.perf_counter() - began}
    given.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    wrong = [f"{target} {run}" for target in targets for run, r in targets[target].items() if not r["identical_tokens"]]
    if wrong:
        raise SystemExit(f"other tokens than plain decoding: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
