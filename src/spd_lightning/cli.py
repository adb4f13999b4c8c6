"""`spd-train`: a LightningCLI over a method's LightningModule and the dialogue data. Wiring only."""

import sys
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from jsonargparse import ArgumentParser
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from spd_lightning.data.datamodule import DialogueDataModule
from spd_lightning.data.training_config import chosen_method, replacing_lists
from spd_lightning.errors import one_line_errors
from spd_lightning.host_memory import keep_freed_memory
from spd_lightning.modules.checkpoint import check_resumable, export_checkpoint, read_checkpoint
from spd_lightning.modules.distillation import Distillation
from spd_lightning.modules.eagle.eagle_module import Eagle3Module
from spd_lightning.modules.lit_module import DistillationModule
from spd_lightning.sweep import sweep

DESCRIPTION = (
    "Trains the drafter of Speculative Pipeline Decoding. "
    "`spd-train export --ckpt_path CKPT --out DIR` makes a drafter folder of any checkpoint; "
    "`spd-train sweep FILE.yaml` trains and evaluates several runs."
)


COMMANDS = ("fit", "validate")
METHODS: dict[str, type[Distillation[Any]]] = {"spd": DistillationModule, "eagle3": Eagle3Module}
"""What trains each method's drafter; `spd` is the Pipeline Draft Module, all of its layouts and schedules included."""


class LoggedConfig(SaveConfigCallback):
    """Hands the whole configuration to the loggers too, so that a W&B run shows it."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        config = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        for logger in trainer.loggers:
            logger.log_hyperparams({"config": config})


class TrainingCLI(LightningCLI):
    """The target and the feature layout are stated once, under `model`."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's `test` and `predict` have nothing to run here."""
        known = LightningCLI.subcommands()
        return {name: known[name] for name in COMMANDS}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        methods = {module: method for method, module in METHODS.items()}
        parser.add_argument(
            "--method",
            type=Literal[tuple(METHODS)],
            default=methods[cast(Any, self.model_class)],
            help="whose drafter is trained; `fit --method eagle3 --help` shows the options of EAGLE-3",
        )
        parser.link_arguments("model.target", "data.target")
        parser.link_arguments("model.layout", "data.layout", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Lists of sources are taken whole."""
        assert args is None or isinstance(args, list)
        self.config = parser.parse_args(replacing_lists(sys.argv[1:] if args is None else args))

    def before_fit(self) -> None:
        """On the CPU a step's large tensors take their memory from the step before."""
        if isinstance(self.trainer.accelerator, CPUAccelerator):
            keep_freed_memory()

    def _parse_ckpt_path(self) -> None:
        """Looks at the checkpoint before anything is loaded, and leaves the configuration alone.

        Lightning would let a checkpoint's values override the command line's.
        """
        given = self.config[self.config.subcommand].get("ckpt_path") if self.config.get("subcommand") else None
        if given and Path(given).exists():
            check_resumable(Path(given))


def export(args: Sequence[str]) -> None:
    """`spd-train export`: a drafter folder out of a Lightning checkpoint; needs neither target nor data."""
    parser = ArgumentParser(
        prog="spd-train export", description=export.__doc__, allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument("--ckpt_path", type=Path, required=True, help="checkpoint file, or folder of a sharded run")
    parser.add_argument("--out", type=Path, required=True, help="drafter folder to write")
    given = parser.parse_args(list(args))
    export_checkpoint(read_checkpoint(given.ckpt_path), given.out)
    print(f"drafter: {given.out}")


def train(args: list[str] | None) -> None:
    """The LightningCLI, whose parsers raise instead of printing all their options."""
    strict: dict[str, Any] = {"allow_abbrev": False, "exit_on_error": False}
    TrainingCLI(
        METHODS[chosen_method(sys.argv[1:] if args is None else args, METHODS)],
        DialogueDataModule,
        args=args,
        parser_kwargs={"description": DESCRIPTION} | strict | {name: dict(strict) for name in COMMANDS},
        save_config_callback=LoggedConfig,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={"use_distributed_sampler": False},
    )


def main(args: list[str] | None = None) -> None:
    """Runs one `spd-train` command; `args` as on the command line."""
    given = sys.argv[1:] if args is None else args
    with one_line_errors("spd-train"):
        try:
            if given[:1] == ["export"]:
                export(given[1:])
            elif given[:1] == ["sweep"]:
                sweep(given[1:])
            else:
                train(args)
        except ArgumentError as error:
            command = given[0] + " " if given and given[0] in (*COMMANDS, "export", "sweep") else ""
            raise ValueError(f"{error} (see spd-train {command}--help)") from None
        except SIGTERMException:
            raise SystemExit(143) from None  # Lightning would leave with 0, as if the run had come to its end
        except MisconfigurationException as error:
            raise ValueError(str(error)) from error
        except ModuleNotFoundError as error:
            if error.name is not None:  # else Lightning says which package an option needs
                raise
            raise ValueError(str(error)) from error


if __name__ == "__main__":  # what a sweep runs
    main()
