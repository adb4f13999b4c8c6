import json
import math
import os
import signal
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from spd_lightning.data.datamodule import DialogueDataModule
from spd_lightning.data.sources import Source
from spd_lightning.modules.features import FeatureLayout

NUM_ROWS = 26
BUDGET = {"batch_size": None, "max_length": 12, "tokens_per_batch": 24}


class Recorder(pl.LightningModule):
    """Trains one number and remembers which rows it saw, in which batch and with which fill."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.seen = []
        self.validated = []

    def training_step(self, batch, batch_idx):
        self.seen.append(read_batch(batch))
        return (self.weight * batch.input_ids.double().mean() - batch.fill.double().sum()) ** 2

    def validation_step(self, batch, batch_idx):
        self.validated.append(read_batch(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def read_batch(batch):
    """(row number, fill) of each row of a batch, and whether anything of it counts."""
    numbers = (batch.input_ids[:, 0] * 20 + batch.input_ids[:, 1]).tolist()
    return [
        (number, fill)
        for number, fill, counts in zip(numbers, batch.fill.tolist(), batch.supervised.any(1), strict=True)
        if counts
    ]


def write_rows(path, num_rows=NUM_ROWS, first=0):
    """Pre-tokenised rows whose first two ids say their number, of different lengths."""
    with path.open("w") as file:
        for number in range(first, first + num_rows):
            ids = [number // 20, number % 20, *range(3, 5 + number % 7)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0, 0] + [1] * (len(ids) - 2)}) + "\n")
    return path


@pytest.fixture
def make_data(tmp_path, tiny_tokenizer_dir):
    def make(**changed):
        options = {
            "layout": FeatureLayout.build(num_layers=8, num_stages=4),
            "target": str(tiny_tokenizer_dir),
            "sources": [Source(str(write_rows(tmp_path / "rows.jsonl")))],
            "val_rows": 5,
            "batch_size": 2,
            "draft_vocab_size": 50,
            "cache_dir": str(tmp_path / "cache"),
        }
        return DialogueDataModule(**{**options, **changed})

    return make


def make_trainer(tmp_path, callbacks=(), **options):
    return pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **{"logger": False, "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks), **options},
    )


def run(tmp_path, make_data, callbacks=(), ckpt_path=None, data=None, **options):
    model = Recorder()
    data = {"bucket_window": 3, **(data or {})}
    trainer = make_trainer(tmp_path, callbacks, **options)
    trainer.fit(model, datamodule=make_data(**data), ckpt_path=ckpt_path)
    return model


class StopAt(Callback):
    """Interrupts as a user, a failing machine or a scheduler would, after a number of batches."""

    def __init__(self, num_batches, how):
        self.num_batches = num_batches
        self.how = how

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.num_batches == 0:
            raise Interruption

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.num_batches -= 1
        if self.num_batches == 0 and self.how == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)


class Interruption(Exception):
    pass


class SaveOnException(Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, module, exception):
        trainer.save_checkpoint(self.path)


def interrupted(tmp_path, make_data, num_batches, how, **options):
    """Runs until it is interrupted; what was seen until then, and the checkpoint left behind."""
    path = tmp_path / "interrupted.ckpt"
    model = Recorder()
    if how == "epoch":
        saver = ModelCheckpoint(tmp_path / "epochs", filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        callbacks = [saver, StopAt(num_batches, "raise")]
    elif how == "validation":
        saver = ModelCheckpoint(tmp_path / "epochs", filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=False)
        callbacks = [saver, StopAt(num_batches, "raise")]
    elif how == "step":
        saver = ModelCheckpoint(tmp_path / "steps", filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [saver, StopAt(num_batches, "raise")]
    else:
        callbacks = [SaveOnException(path), StopAt(num_batches, how)]
    data = {"bucket_window": 3, **options.pop("data", {})}
    trainer = make_trainer(tmp_path, callbacks, **options)
    with pytest.raises(SystemExit if how == "sigterm" else Interruption):
        trainer.fit(model, datamodule=make_data(**data))
    if how == "step":
        path = tmp_path / "steps" / f"step={num_batches // options.get('accumulate_grad_batches', 1)}.ckpt"
    elif how in ("epoch", "validation"):
        path = tmp_path / "epochs" / "epoch=0.ckpt"
    return model.seen, path


@pytest.mark.parametrize("ends", [{"max_epochs": 2}, {"max_steps": 20, "max_epochs": -1}], ids=["epochs", "steps"])
@pytest.mark.parametrize("how", ["step", "sigterm"])
@pytest.mark.parametrize("num_batches", [1, 4, 10, 11, 12, 15, 18])
def test_resumed_run_sees_exactly_the_rest(tmp_path, make_data, num_batches, how, ends):
    whole = run(tmp_path, make_data, **ends)
    before, checkpoint = interrupted(tmp_path, make_data, num_batches, how, **ends)
    assert before == whole.seen[:num_batches]
    after = run(tmp_path, make_data, ckpt_path=checkpoint, **ends)
    assert after.seen == whole.seen[num_batches:]
    assert torch.equal(after.weight, whole.weight)


@pytest.mark.parametrize("ends", [{"max_epochs": 3}, {"max_steps": 31, "max_epochs": -1}], ids=["epochs", "steps"])
@pytest.mark.parametrize("how", ["epoch", "validation"])
def test_run_resumed_at_the_end_of_an_epoch_sees_exactly_the_rest(tmp_path, make_data, how, ends):
    whole = run(tmp_path, make_data, **ends)
    _, checkpoint = interrupted(tmp_path, make_data, 14, how, **ends)
    after = run(tmp_path, make_data, ckpt_path=checkpoint, **ends)
    assert after.seen == whole.seen[11:]
    assert torch.equal(after.weight, whole.weight)


@pytest.mark.parametrize("how", ["step", "sigterm", "epoch"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_is_exact_with_a_token_budget(tmp_path, make_data, how, accumulate):
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "data": BUDGET}
    whole = run(tmp_path, make_data, **options)
    num_batches = len(whole.seen) // 3
    cut = num_batches + 4 if how == "epoch" else 4
    before, checkpoint = interrupted(tmp_path, make_data, cut, how, **options)
    after = run(tmp_path, make_data, ckpt_path=checkpoint, **options)
    assert before == whole.seen[:cut]
    assert after.seen == whole.seen[num_batches if how == "epoch" else cut :]
    assert torch.equal(after.weight, whole.weight)


def test_epochs_of_a_token_budget_have_the_steps_that_the_schedule_counts_on(tmp_path, make_data):
    model = run(tmp_path, make_data, max_epochs=6, data=BUDGET)
    total = model.trainer.estimated_stepping_batches
    assert total == model.trainer.global_step == len(model.seen)
    epochs = [model.seen[begin : begin + total // 6] for begin in range(0, total, total // 6)]
    partitions = [{frozenset(number for number, _ in batch) for batch in epoch} for epoch in epochs]
    assert all(len(frozenset().union(*partition)) == 21 for partition in partitions)
    assert len({frozenset(partition) for partition in partitions}) > 3, "who is in a batch with whom"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", ["step", "sigterm"])
def test_resume_is_exact_with_workers_and_gradient_accumulation(tmp_path, make_data, how, num_workers):
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "data": {"num_workers": num_workers}}
    whole = run(tmp_path, make_data, **options)
    assert len(whole.seen) == 22
    before, checkpoint = interrupted(tmp_path, make_data, 6, how, **options)
    after = run(tmp_path, make_data, ckpt_path=checkpoint, **options)
    assert before + after.seen == whole.seen
    assert torch.equal(after.weight, whole.weight)


def test_resume_is_exact_with_limited_epochs_and_validation_amid_them(tmp_path, make_data):
    options = {"max_epochs": 3, "limit_train_batches": 7, "val_check_interval": 3}
    whole = run(tmp_path, make_data, **options)
    assert len(whole.seen) == 21
    before, checkpoint = interrupted(tmp_path, make_data, 9, "step", **options)
    after = run(tmp_path, make_data, ckpt_path=checkpoint, **options)
    assert before + after.seen == whole.seen


def test_workers_change_nothing(tmp_path, make_data):
    alone, ahead = (run(tmp_path, make_data, max_epochs=2, data={"num_workers": n}) for n in (0, 2))
    assert alone.seen == ahead.seen
    assert alone.validated == ahead.validated


def test_every_row_is_seen_once_an_epoch_and_the_validation_rows_are_apart(tmp_path, make_data):
    model = run(tmp_path, make_data, max_epochs=2)
    first, second = model.seen[:11], model.seen[11:]
    rows = [sorted(number for batch in epoch for number, _ in batch) for epoch in (first, second)]
    validated = [number for batch in model.validated for number, _ in batch]
    assert rows[0] == rows[1]
    assert len(validated) == 10
    assert validated[:5] == validated[5:]
    assert sorted([*rows[0], *validated[:5]]) == list(range(NUM_ROWS))
    assert first != second


def as_rank(data, rank, num_replicas):
    """The data module as one rank of several has it."""
    data.prepare_data()
    data.setup()
    strategy = {"num_replicas": num_replicas, "rank": rank}
    data.trainer = SimpleNamespace(
        distributed_sampler_kwargs=strategy, current_epoch=0, fit_loop=SimpleNamespace(batch_idx=-1)
    )
    return data


@pytest.mark.parametrize("size", [{}, BUDGET], ids=["rows", "tokens"])
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_ranks_share_rows_without_repeats_and_run_as_many_batches(make_data, num_replicas, size):
    ranks = [as_rank(make_data(**size), rank, num_replicas) for rank in range(num_replicas)]
    for loaders, count in (
        ([data.train_dataloader() for data in ranks], 21),
        ([data.val_dataloader() for data in ranks], 5),
    ):
        batches = [list(loader) for loader in loaders]
        assert len({len(entry) for entry in batches}) == 1
        assert [len(entry) for entry in batches] == [len(loader) for loader in loaders]
        rows = [number for entry in batches for batch in entry for number, _ in read_batch(batch)]
        assert len(rows) == len(set(rows)) == count
    seen = [read_batch(batch) for data in ranks for batch in data.train_dataloader()]
    fill = dict(row for batch in seen for row in batch)
    alone = dict(row for batch in as_rank(make_data(), 0, 1).train_dataloader() for row in read_batch(batch))
    assert fill == alone, "a row's fill does not depend on the number of ranks"


def test_draft_vocabulary_is_counted_on_the_training_rows(make_data):
    data = make_data(draft_vocab_size=12)
    data.setup()
    counts = data.counts()
    assert counts.sum() == data.training.num_supervised()
    assert len(data.draft_vocab) == 12
    assert set(data.eos_token_ids) <= set(data.draft_vocab.token_ids)
    assert data.coverage == data.draft_vocab.coverage(counts) == 1.0
    assert data.draft_vocab.provenance["tokenizer_hash"] == data.tokenizer_hash


def test_draft_vocabulary_file_is_used_and_checked(make_data, tmp_path):
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({"token_ids": [2, 3, 4]}))
    data = make_data(draft_vocab=str(path))
    data.setup()
    assert data.draft_vocab.token_ids == (2, 3, 4)
    assert 0 < data.coverage < 1
    path.write_text(json.dumps({"token_ids": [3, 4]}))
    with pytest.warns(UserWarning, match=r"lacks the EOS ids \[2\]"):
        make_data(draft_vocab=str(path)).setup()
    path.write_text(json.dumps({"token_ids": [3, 400]}))
    with pytest.raises(ValueError, match="token id 400 is out of range"):
        make_data(draft_vocab=str(path)).setup()


def test_validation_sources_are_taken_whole(make_data, tmp_path):
    data = make_data(val_sources=[Source(str(write_rows(tmp_path / "val.jsonl", 9, first=100)))])
    data.setup()
    assert (len(data.training), len(data.validation)) == (NUM_ROWS, 9)
    assert [report.read for report in data.reports] == [NUM_ROWS, 9]


def test_report_of_the_drops_lies_beside_the_run(tmp_path, make_data):
    run(tmp_path, make_data, max_steps=1, max_epochs=-1, logger=CSVLogger(tmp_path / "run"))
    (path,) = (tmp_path / "run").rglob("data_report.json")
    (report,) = json.loads(path.read_text())
    assert report["read"] == NUM_ROWS


def test_another_world_size_amid_an_epoch_is_told(tmp_path, make_data):
    _, checkpoint = interrupted(tmp_path, make_data, 4, "step", max_epochs=1)
    with pytest.warns(UserWarning, match="other global batch size than before"):
        run(tmp_path, make_data, ckpt_path=checkpoint, max_epochs=1, data={"batch_size": 3})


def test_a_budget_instead_of_rows_amid_an_epoch_is_told(tmp_path, make_data):
    _, checkpoint = interrupted(tmp_path, make_data, 4, "step", max_epochs=1)
    with pytest.warns(UserWarning, match="other data, tokens_per_batch, ranks than before"):
        run(tmp_path, make_data, ckpt_path=checkpoint, max_epochs=1, data=BUDGET)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, [2, 2, 1]),
        ({"val_batch_size": 3}, [3, 2]),
        (BUDGET, None),
        (BUDGET | {"val_batch_size": 3}, [3, 2]),
    ],
)
def test_validation_is_sized_as_training_unless_told_otherwise(make_data, given, sizes):
    batches = [batch.input_ids for batch in as_rank(make_data(**given), 0, 1).val_dataloader()]
    if sizes is None:
        assert sum(len(ids) for ids in batches) == 5
        assert max(ids.numel() for ids in batches) <= 24 < sum(ids.numel() for ids in batches)
        assert len(batches[-1]) == 24 // batches[-1].shape[1], "as many of the longest as the budget holds"
    else:
        assert [len(ids) for ids in batches] == sizes


def test_neither_size_means_eight_rows(make_data):
    data = make_data(batch_size=None)
    assert (data.batch_size, data.val_batch_size) == (8, 8)


def test_overfitting_batches_is_refused_with_the_way_out(tmp_path, make_data):
    with pytest.raises(ValueError, match=r"overfit_batches=2 .*set `limit`"):
        run(tmp_path, make_data, max_epochs=1, overfit_batches=2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 0}, "data.batch_size=0"),
        ({"val_batch_size": 0}, "data.val_batch_size=0"),
        ({"tokens_per_batch": 4096}, "data.batch_size=2 and data.tokens_per_batch=4096: .* set the other to null"),
        ({"batch_size": None, "tokens_per_batch": 2047}, "data.tokens_per_batch=2047 is below data.max_length=2048"),
        ({"val_rows": 0}, "data.val_rows=0"),
        ({"num_workers": -1}, "data.num_workers=-1"),
        ({"max_length": 1}, "max_length=1"),
        ({"bucket_window": 0}, "bucket_window=0"),
        ({"fill_acceptance": 1.5}, "data.fill_acceptance=1.5: a share from 0 to 1"),
        ({"fill_acceptance": math.nan}, "data.fill_acceptance=nan"),
        ({"fill_acceptance": 0.5, "simulate_fill": False}, "fill_acceptance=0.5 with simulate_fill: false"),
    ],
)
def test_impossible_options_are_refused_at_once(make_data, changed, message):
    with pytest.raises(ValueError, match=message):
        make_data(**changed)


@pytest.mark.parametrize(
    ("data", "fill"), [({"fill_acceptance": 0.0}, 1), ({"fill_acceptance": 1.0}, 4), ({"simulate_fill": False}, 4)]
)
def test_batches_have_the_fills_of_the_expected_acceptance(tmp_path, make_data, data, fill):
    model = run(tmp_path, make_data, data=data, max_epochs=1)
    assert {drawn for batch in model.seen for _, drawn in batch} == {fill}
