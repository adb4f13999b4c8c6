"""`spd-train`: a LightningCLI over the distillation module and the dialogue data. Wiring only."""

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser
from lightning import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from spd_lightning.data.datamodule import DialogueDataModule
from spd_lightning.errors import one_line_errors
from spd_lightning.modules.checkpoint import export_checkpoint, read_checkpoint
from spd_lightning.modules.lit_module import DistillationModule

DESCRIPTION = (
    "Trains the drafter of Speculative Pipeline Decoding. "
    "`spd-train export --ckpt_path CKPT --out DIR` makes a drafter folder of any checkpoint."
)


class LoggedConfig(SaveConfigCallback):
    """Hands the whole configuration to the loggers too, so that a W&B run shows it."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        config = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        for logger in trainer.loggers:
            logger.log_hyperparams({"config": config})


class TrainingCLI(LightningCLI):
    """The target and the feature layout are stated once, under `model`."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.target", "data.target")
        parser.link_arguments("model.layout", "data.layout", apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """Leaves the configuration alone: Lightning would let a checkpoint's values override the command line's."""


def export(args: Sequence[str]) -> None:
    """`spd-train export`: a drafter folder out of a Lightning checkpoint; needs neither target nor data."""
    parser = ArgumentParser(prog="spd-train export", description=export.__doc__, allow_abbrev=False)
    parser.add_argument("--ckpt_path", type=Path, required=True, help="checkpoint file, or folder of a sharded run")
    parser.add_argument("--out", type=Path, required=True, help="drafter folder to write")
    given = parser.parse_args(list(args))
    export_checkpoint(read_checkpoint(given.ckpt_path), given.out)
    print(f"drafter: {given.out}")


def main(args: list[str] | None = None) -> None:
    """Runs one `spd-train` command; `args` as on the command line."""
    given = sys.argv[1:] if args is None else args
    with one_line_errors("spd-train"):
        if given[:1] == ["export"]:
            export(given[1:])
            return
        TrainingCLI(
            DistillationModule,
            DialogueDataModule,
            args=args,
            parser_kwargs={"allow_abbrev": False, "description": DESCRIPTION},
            save_config_callback=LoggedConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"use_distributed_sampler": False},
        )
