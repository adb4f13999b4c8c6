"""`spd-infer generate`: one prompt, its answer, and what it took. Knows arguments and printing."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentParser, Namespace

from spd_lightning.inference.arguments import add_decoding_arguments, opened_decoder, run_on_ranks, sampling_params

if TYPE_CHECKING:
    from spd_lightning.inference.decoder import PipelineDecoder


def add_generate_arguments(parser: ArgumentParser) -> None:
    """The arguments of `spd-infer generate`."""
    add = parser.add_argument
    add("--drafter", type=str, required=True, help="drafter folder, as `spd-train fit` writes it")
    add_prompt_arguments(parser)
    add("--compare_ar", type=bool, default=False, help="decode plainly too, and say whether the tokens are the same")
    add("--json", type=bool, default=False, help="print one JSON object instead of text and summary")
    add_decoding_arguments(parser)


def add_prompt_arguments(parser: ArgumentParser) -> None:
    """Three ways to give one prompt."""
    add = parser.add_argument
    add("--prompt", type=str | None, default=None, help="text of one user turn")
    add("--prompt_file", type=Path | None, default=None, help="file that holds the text of one user turn")
    add("--messages", type=Path | None, default=None, help="JSON file: a list of {role, content}")


def run_generate(given: Namespace, args: Sequence[str]) -> None:
    """Answers one prompt."""
    messages = read_prompt(given)
    params = sampling_params(given)

    def work() -> None:
        with opened_decoder(given, given.drafter) as decoder:
            if decoder.is_lead:
                answer(given, decoder, messages, params)
            else:
                decoder.follow()

    run_on_ranks(given, args, work)


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


def answer(given: Namespace, decoder: "PipelineDecoder", messages: Sequence[Mapping[str, str]], params: Any) -> None:
    """Decodes and prints."""
    from spd_lightning.inference.chat import held_interrupts

    run = decoder.start(messages, params)
    with held_interrupts() as is_interrupted:
        for text in run.texts():
            if not given.json:
                print(text, end="", flush=True)
            if is_interrupted():
                run.close()
                raise KeyboardInterrupt
    if not given.json:
        print()
    result = run.result()
    report = result.to_json() | ({} if params.is_greedy else {"seed": params.seed})
    if given.compare_ar:
        baseline = decoder.start_autoregressive(messages, params).result()
        report |= {"ar_seconds": baseline.seconds, "identical_to_ar": baseline.token_ids == result.token_ids}
    if given.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        if decoder.drafter.module.config.method == "eagle3":
            print(summary_of_rounds(report), file=sys.stderr)
        else:
            print(summary(report, given.runtime, decoder.num_stages), file=sys.stderr)


def summary(report: Mapping[str, Any], runtime: str, num_stages: int) -> str:
    """The figures of a decode in a few lines."""
    places = {
        "local": "with all stages one after the other in one process",
        "virtual": f"on the virtual clock, as if on {num_stages + 1} devices; the link is assumed, not measured",
        "distributed": f"with {num_stages} processes for the stages and one for the drafter",
    }

    tokens = report["num_committed"]
    counts = (
        f"{tokens} tokens in {report['num_cycles']} cycles ({report['finish_reason']}): tokens per cycle "
        f"{figure(report, 'alpha')}, acceptance {figure(report, 'p')} of {report['num_judged']}, S0 "
        f"{figure(report, 's0')} if drafting and communication were free"
    )
    return "\n".join([counts, *lines_of_time(report, places[runtime])])


def summary_of_rounds(report: Mapping[str, Any]) -> str:
    """The figures of an EAGLE-3 decode."""
    counts = (
        f"{report['num_committed']} tokens in {report['num_cycles']} rounds ({report['finish_reason']}): tokens per "
        f"round {figure(report, 's0')}, acceptance {figure(report, 'p')} of {report['num_judged']} drafts judged"
    )
    return "\n".join([counts, *lines_of_time(report, "with target and drafter on one device")])


def figure(report: Mapping[str, Any], name: str) -> str:
    """A figure, or a dash where there is none."""
    return "-" if report[name] is None else f"{report[name]:.3f}"


def lines_of_time(report: Mapping[str, Any], place: str) -> list[str]:
    """How fast it was, and what else the report has to say."""
    seconds = report["seconds"]
    lines = [f"{report['num_committed'] / seconds:.1f} tokens/s {place}"] if seconds else []
    if "seed" in report:
        lines.append(f"seed {report['seed']}")
    if "identical_to_ar" in report:
        same = "identical to" if report["identical_to_ar"] else "NOT the same as"
        lines.append(f"{same} plain decoding, which took {report['ar_seconds']:.2f} s against {seconds:.2f} s")
    return lines
