"""`spd-infer`: its commands. What each does is in a module of its own, imported when it is called."""

import sys
from argparse import ArgumentError
from typing import Any

from jsonargparse import ArgumentParser

from spd_lightning.errors import one_line_errors
from spd_lightning.inference import import_command
from spd_lightning.inference.chat_command import add_chat_arguments, run_chat
from spd_lightning.inference.eagle.commands import (
    add_export_arguments,
    add_import_arguments,
    run_export,
    run_import,
)
from spd_lightning.inference.evaluation.command import add_eval_arguments, run_eval
from spd_lightning.inference.generate import add_generate_arguments, run_generate
from spd_lightning.inference.planning.command import add_plan_arguments, run_plan
from spd_lightning.inference.profile import add_profile_arguments, run_profile
from spd_lightning.inference.push_command import add_push_arguments, run_push
from spd_lightning.inference.serve.command import add_serve_arguments, run_serve

COMMANDS = {
    "generate": ("Answers one prompt; the text is the target's own.", add_generate_arguments, run_generate),
    "eval": ("Drafters on benchmarks beside plain decoding: tables and a page.", add_eval_arguments, run_eval),
    "plan": (
        "Predicts cycle, speed and memory of every split of a target, and proposes the best.",
        add_plan_arguments,
        lambda given, _: run_plan(given),
    ),
    "profile": ("Where the time of a cycle goes, by fill level.", add_profile_arguments, run_profile),
    "import": (
        "Makes a drafter folder of a published PDM checkpoint.",
        import_command.add_import_arguments,
        lambda given, _: import_command.run_import(given),
    ),
    "import_eagle3": (
        "Makes a drafter folder of a published EAGLE-3 drafter.",
        add_import_arguments,
        lambda given, _: run_import(given),
    ),
    "export_eagle3": (
        "Writes an EAGLE-3 drafter in the published format.",
        add_export_arguments,
        lambda given, _: run_export(given),
    ),
    "serve": ("An endpoint for OpenAI's clients; answers one request after the other.", add_serve_arguments, run_serve),
    "push": (
        "Uploads a drafter folder to the Hugging Face hub, with a model card.",
        add_push_arguments,
        lambda given, _: run_push(given),
    ),
    "chat": ("A conversation in the terminal; /help lists its commands.", add_chat_arguments, run_chat),
}
"""Description, arguments and what to do, by name. Each is given its arguments and the whole command line."""


def build_parser() -> ArgumentParser:
    """The parser of `spd-infer` and its commands."""
    fixed: Any = dict(allow_abbrev=False, exit_on_error=False)
    parser = ArgumentParser(prog="spd-infer", description="Decodes with a drafter folder.", **fixed)
    commands = parser.add_subcommands()
    for name, (description, add_arguments, _) in COMMANDS.items():
        command = ArgumentParser(description=description, **fixed)
        add_arguments(command)
        commands.add_subcommand(name, command, help=description)
    return parser


def main(args: list[str] | None = None) -> None:
    """Runs one `spd-infer` command; `args` as on the command line."""
    args = sys.argv[1:] if args is None else args
    with one_line_errors("spd-infer"):
        if not args:
            build_parser().print_help()
            return
        try:
            given = build_parser().parse_args(args)
        except ArgumentError as error:
            name = next((word for word in args if word in COMMANDS), "")
            raise ValueError(f"{error} (see {f'spd-infer {name}'.strip()} --help)") from None
        COMMANDS[given.subcommand][2](given[given.subcommand], args)


if __name__ == "__main__":  # what the launcher of ranks runs
    main()
