"""What a run leaves beside its weights: checkpoints and the drafter folder, draft samples, throughput, a report."""

from spd_lightning.callbacks.acceptance_report import AcceptanceReport
from spd_lightning.callbacks.checkpoint import DrafterCheckpoint
from spd_lightning.callbacks.sample_drafts import SampleDrafts
from spd_lightning.callbacks.throughput import Throughput

__all__ = ["AcceptanceReport", "DrafterCheckpoint", "SampleDrafts", "Throughput"]
