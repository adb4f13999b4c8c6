"""`spd-infer`: decode with a drafter folder. Knows arguments and printing; the rest is `PipelineDecoder`'s."""

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from spd_lightning.errors import one_line_errors


def build_parser() -> ArgumentParser:
    """The parser of `spd-infer` and its commands."""
    parser = ArgumentParser(prog="spd-infer", description="Decodes with a drafter folder.", allow_abbrev=False)
    generate = ArgumentParser(description="Answers one prompt; the text is the target's own.", allow_abbrev=False)
    generate.add_argument("--prompt", type=str | None, default=None, help="text of one user turn")
    generate.add_argument(
        "--prompt_file", type=Path | None, default=None, help="file that holds the text of one user turn"
    )
    generate.add_argument("--messages", type=Path | None, default=None, help="JSON file: a list of {role, content}")
    generate.add_argument(
        "--compare_ar", type=bool, default=False, help="decode plainly too, and say whether the tokens are the same"
    )
    generate.add_argument("--json", type=bool, default=False, help="print one JSON object instead of text and summary")
    add_decoding_arguments(generate)
    chat = ArgumentParser(description="A conversation in the terminal; /help lists its commands.", allow_abbrev=False)
    chat.add_argument("--system", type=str | None, default=None, help="system message")
    add_decoding_arguments(chat)
    commands = parser.add_subcommands()
    commands.add_subcommand("generate", generate)
    commands.add_subcommand("chat", chat)
    return parser


def add_decoding_arguments(parser: ArgumentParser) -> None:
    """What every command that decodes needs: the models, how tokens are drawn, and where the work is done."""
    add = parser.add_argument
    add("--drafter", type=str, required=True, help="drafter folder, as `spd-train fit` writes it")
    add("--target", type=str | None, default=None, help="folder or hub id of the target; the drafter names its own")
    add("--max_new_tokens", type=int, default=512, help="tokens of an answer at most")
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
    add(
        "--schedule",
        type=Literal["pre_step", "post_step"] | None,
        default=None,
        help="when drafts are made; the drafter was trained for one, another is an error",
    )
    add(
        "--runtime",
        type=Literal["local", "distributed"],
        default="local",
        help="all stages in this process, or one process per stage and one that drafts: started here, or by torchrun "
        "or srun on one node or many",
    )
    add("--timeout", type=float, default=120.0, help="seconds after which a process that does not answer is given up")
    add("--dtype", type=Literal["auto", "float32", "bfloat16"], default="auto", help="auto keeps the checkpoint's")
    add("--device", type=str, default="auto", help="auto takes a GPU if there is one")


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


def sampling_params(given: Namespace) -> Any:
    """The sampling parameters that the arguments ask for; with a seed if they sample."""
    from spd_lightning.inference.sampling import SamplingParams

    params = SamplingParams(
        given.max_new_tokens, given.temperature, given.top_k, given.top_p, given.seed, given.verify, tuple(given.stop)
    )
    return params if params.is_greedy else params.seeded()


def generate(given: Namespace, decoder: Any) -> None:
    """Answers one prompt."""
    from spd_lightning.inference.chat import held_interrupts

    messages, params = read_prompt(given), sampling_params(given)
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
        print(summary(report, given.runtime, decoder.num_stages), file=sys.stderr)


def chat(given: Namespace, decoder: Any) -> None:
    """Holds a conversation."""
    from spd_lightning.inference.chat import converse

    converse(decoder, sampling_params(given), given.system)


COMMANDS: dict[str, Callable[[Namespace, Any], None]] = {"generate": generate, "chat": chat}


def run_command(name: str, given: Namespace, args: Sequence[str]) -> None:
    """Runs a command: here, as one rank of several, or by starting the ranks.

    Args:
        name: of the command.
        given: its arguments.
        args: the whole command line, for processes that are started.
    """
    if name == "generate":
        read_prompt(given)
    sampling_params(given)
    if not given.timeout > 0:
        raise ValueError(f"timeout={given.timeout}: a number of seconds above 0 is needed")

    import torch

    from spd_lightning.inference.decoder import PipelineDecoder, check_schedule, check_target
    from spd_lightning.inference.runtime.distributed import launch
    from spd_lightning.inference.runtime.environment import rank_environment
    from spd_lightning.inference.runtime.liveness import RankFailure
    from spd_lightning.modules.checkpoint import load_drafter

    drafter = load_drafter(given.drafter)
    check_schedule(drafter, given.schedule)
    environment = rank_environment() if given.runtime == "distributed" else None
    if environment is not None:  # Ctrl-C reaches every process of a terminal; the lead tells the others
        signal.signal(signal.SIGINT, signal.default_int_handler if environment.rank == 0 else signal.SIG_IGN)
    try:
        if given.runtime == "distributed" and environment is None:
            check_target(drafter, given.target)
            num_ranks = drafter.module.config.num_stages + 1
            if code := launch(num_ranks, "spd_lightning.inference.cli", args):
                raise SystemExit(code)
            return
        device = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        with PipelineDecoder.from_pretrained(
            given.drafter, given.target, given.runtime, given.dtype, device, given.max_length, given.timeout
        ) as decoder:
            if decoder.is_lead:
                COMMANDS[name](given, decoder)
            else:
                decoder.follow()
    except RankFailure as failure:
        # The lead speaks for all, unless it is the lead that has failed.
        if environment is None or environment.rank == 0 or failure.rank in (0, None):
            print(f"spd-infer: error: {failure}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def summary(report: Mapping[str, Any], runtime: str, num_stages: int) -> str:
    """The figures of a decode in a few lines."""
    places = {
        "local": "with all stages one after the other in one process",
        "distributed": f"with {num_stages} processes for the stages and one for the drafter",
    }

    def figure(name: str) -> str:
        return "-" if report[name] is None else f"{report[name]:.3f}"

    seconds, tokens = report["seconds"], report["num_committed"]
    lines = [
        f"{tokens} tokens in {report['num_cycles']} cycles ({report['finish_reason']}): tokens per cycle "
        f"{figure('alpha')}, acceptance {figure('p')} of {report['num_judged']}, S0 {figure('s0')} if drafting and "
        "communication were free",
        f"{tokens / seconds:.1f} tokens/s {places[runtime]}" if seconds else "",
    ]
    if "seed" in report:
        lines.append(f"seed {report['seed']}")
    if "identical_to_ar" in report:
        same = "identical to" if report["identical_to_ar"] else "NOT the same as"
        lines.append(f"{same} plain decoding, which took {report['ar_seconds']:.2f} s against {seconds:.2f} s")
    return "\n".join(line for line in lines if line)


def main(args: list[str] | None = None) -> None:
    """Runs one `spd-infer` command; `args` as on the command line."""
    args = sys.argv[1:] if args is None else args
    given = build_parser().parse_args(args)
    with one_line_errors("spd-infer"):
        run_command(given.subcommand, given[given.subcommand], args)


if __name__ == "__main__":  # what the launcher of ranks runs
    main()
