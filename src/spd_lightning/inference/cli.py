"""`spd-infer`: decode with a drafter folder. Knows arguments and printing; the rest is `PipelineDecoder`'s."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from spd_lightning.errors import one_line_errors


def build_parser() -> ArgumentParser:
    """The parser of `spd-infer` and its one command."""
    parser = ArgumentParser(prog="spd-infer", description="Decodes with a drafter folder.", allow_abbrev=False)
    generate = ArgumentParser(description="Answers one prompt; the text is the target's own.", allow_abbrev=False)
    add = generate.add_argument
    add("--drafter", type=str, required=True, help="drafter folder, as `spd-train fit` writes it")
    add("--target", type=str | None, default=None, help="folder or hub id of the target; the drafter names its own")
    add("--prompt", type=str | None, default=None, help="text of one user turn")
    add("--prompt_file", type=Path | None, default=None, help="file that holds the text of one user turn")
    add("--messages", type=Path | None, default=None, help="JSON file: a list of {role, content}")
    add("--max_new_tokens", type=int, default=512, help="tokens of the answer at most")
    add("--max_length", type=int, default=4096, help="prompt and answer together at most; caches are made for it")
    add("--temperature", type=float, default=0.0, help="0 decodes greedily")
    add("--top_k", type=int, default=50, help="only so many likeliest tokens can be drawn; 0 is off")
    add("--top_p", type=float, default=1.0, help="of those, the fewest whose probabilities sum to this; 1 is off")
    add("--seed", type=int | None, default=None, help="of all draws; drawn and printed when absent")
    add("--stop", type=list[str], default=[], help="strings that end the text")
    add(
        "--verify",
        type=Literal["rejection", "coupled"],
        default="rejection",
        help="sampled drafts: accept most, or give the very text of plain sampling with this seed",
    )
    add("--dtype", type=Literal["auto", "float32", "bfloat16"], default="auto", help="auto keeps the checkpoint's")
    add("--device", type=str, default="auto", help="auto takes a GPU if there is one")
    add("--compare_ar", type=bool, default=False, help="decode plainly too, and say whether the tokens are the same")
    add("--json", type=bool, default=False, help="print one JSON object instead of text and summary")
    parser.add_subcommands().add_subcommand("generate", generate)
    return parser


def read_prompt(given: Namespace) -> Sequence[Mapping[str, str]]:
    """The messages that the arguments ask to answer.

    Raises:
        ValueError: if there is not exactly one prompt, or its file is not readable as one.
    """
    named = [name for name in ("prompt", "prompt_file", "messages") if given[name] is not None]
    if len(named) != 1:
        raise ValueError(f"give one of --prompt, --prompt_file and --messages; given: {', '.join(named) or 'none'}")
    if given.prompt is not None:
        return [{"role": "user", "content": given.prompt}]
    if given.prompt_file is not None:
        return [{"role": "user", "content": given.prompt_file.read_text(encoding="utf-8")}]
    try:
        messages = json.loads(given.messages.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{given.messages}: not JSON ({error})") from error
    if not (isinstance(messages, list) and messages and all(is_message(message) for message in messages)):
        raise ValueError(f"{given.messages}: a list of objects with the strings `role` and `content` is needed")
    return messages


def is_message(message: Any) -> bool:
    """Whether this is an object with the strings `role` and `content`."""
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def generate(given: Namespace) -> None:
    """Runs `spd-infer generate`."""
    messages = read_prompt(given)

    import torch

    from spd_lightning.inference.decoder import PipelineDecoder
    from spd_lightning.inference.sampling import SamplingParams

    params = SamplingParams(
        given.max_new_tokens,
        given.temperature,
        given.top_k,
        given.top_p,
        given.seed,
        given.verify,
        tuple(given.stop),
    )
    if not params.is_greedy:
        params = params.seeded()
    device = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    decoder = PipelineDecoder.from_pretrained(given.drafter, given.target, given.dtype, device, given.max_length)
    run = decoder.start(messages, params)
    if not given.json:
        for text in run.texts():
            print(text, end="", flush=True)
        print()
    result = run.result()
    report = result.to_json() | ({} if params.is_greedy else {"seed": params.seed})
    if given.compare_ar:
        baseline = decoder.start_autoregressive(messages, params).result()
        report |= {"ar_seconds": baseline.seconds, "identical_to_ar": baseline.token_ids == result.token_ids}
    if given.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print(summary(report), file=sys.stderr)


def summary(report: Mapping[str, Any]) -> str:
    """The figures of a decode in a few lines."""

    def figure(name: str) -> str:
        return "-" if report[name] is None else f"{report[name]:.3f}"

    seconds, tokens = report["seconds"], report["num_committed"]
    lines = [
        f"{tokens} tokens in {report['num_cycles']} cycles ({report['finish_reason']}): tokens per cycle "
        f"{figure('alpha')}, acceptance {figure('p')} of {report['num_judged']}, S0 {figure('s0')} if drafting and "
        "communication were free",
        f"{tokens / seconds:.1f} tokens/s with all stages one after the other in one process" if seconds else "",
    ]
    if "seed" in report:
        lines.append(f"seed {report['seed']}")
    if "identical_to_ar" in report:
        same = "identical to" if report["identical_to_ar"] else "NOT the same as"
        lines.append(f"{same} plain decoding, which took {report['ar_seconds']:.2f} s against {seconds:.2f} s")
    return "\n".join(line for line in lines if line)


def main(args: list[str] | None = None) -> None:
    """Runs one `spd-infer` command; `args` as on the command line."""
    given = build_parser().parse_args(args)
    with one_line_errors("spd-infer"):
        generate(given.generate)
