"""Drafts beside the target's tokens, as a table of W&B and a file. Knows Lightning's hooks; no mathematics."""

import json
from pathlib import Path
from typing import Any, cast

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from spd_lightning.modules.batch import ReplicatedBatch
from spd_lightning.modules.samples import DraftSamples

CONTEXT_TOKENS = 24


class SampleDrafts(Callback):
    """Writes drafts beside the target's tokens at each validation: a W&B table and `sample_drafts.jsonl`."""

    COLUMNS = ("context", "target_token", "draft_token", "draft_probability")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, DraftSamples) or not trainer.is_global_zero or trainer.sanity_checking:
            return
        tokenizer = cast(Any, trainer).datamodule.tokenizer
        rows = []
        for index, (sequence, position) in enumerate(outputs.positions.tolist()):
            context = cast(ReplicatedBatch, batch).input_ids[
                sequence, max(0, position + 1 - CONTEXT_TOKENS) : position + 1
            ]
            rows.append(
                [
                    tokenizer.decode(context.tolist()),
                    tokenizer.decode([int(outputs.target_tokens[index])]),
                    tokenizer.decode([int(outputs.draft_tokens[index])]),
                    round(float(outputs.draft_probs[index]), 4),
                ]
            )
        path = Path(trainer.default_root_dir) / "sample_drafts.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for row in rows:
                record = {"step": trainer.global_step} | dict(zip(self.COLUMNS, row, strict=True))
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_table("val/sample_drafts", list(self.COLUMNS), rows, step=trainer.global_step)
