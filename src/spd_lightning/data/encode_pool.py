"""Encodes source rows in chunks, in this process or in several, in the order in which they are read."""

import hashlib
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from spd_lightning.data.conversations import DropRow
from spd_lightning.data.drop_report import SourceReport
from spd_lightning.data.encoding import EncodedRow, encode
from spd_lightning.data.rows import SourceRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK_ROWS = 256


@dataclass
class EncodedChunk:
    """Encoded rows of some consecutive source rows.

    Attributes:
        read: source rows.
        kept: source rows that gave at least one encoded row.
        drops: (reason, location, detail) of the others.
        turn_drops: the same of single turns whose dialogue kept others.
        groups: equal for rows that must not be parted by a validation split (same dialogue, same question).
    """

    read: int = 0
    kept: int = 0
    input_ids: list[np.ndarray] = field(default_factory=list)
    loss_masks: list[np.ndarray] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    locations: list[str] = field(default_factory=list)
    drops: list[tuple[str, str, str]] = field(default_factory=list)
    turn_drops: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, encoded: list[EncodedRow], location: str) -> None:
        """Adds the encoded rows of one source row."""
        assert encoded, "an item that gives nothing raises DropRow"
        self.kept += 1
        group = _group(encoded[0])
        for row in encoded:
            self.input_ids.append(np.asarray(row.input_ids, dtype=np.int32))
            self.loss_masks.append(np.asarray(row.loss_mask, dtype=np.int8))
            self.groups.append(group)
            self.locations.append(location)

    def count(self, report: SourceReport) -> None:
        """Adds what the chunk holds and drops to a report."""
        report.read += self.read
        report.kept += self.kept
        report.rows += len(self.input_ids)
        report.tokens += sum(map(len, self.input_ids))
        report.supervised_tokens += sum(map(supervised_tokens, self.loss_masks))
        for drop in self.drops:
            report.add_drop(report.drops, *drop)
        for drop in self.turn_drops:
            report.add_drop(report.turn_drops, *drop)


def supervised_tokens(loss_mask: np.ndarray) -> int:
    """Answer tokens that are predicted: nothing predicts a first token."""
    return int(np.count_nonzero(loss_mask[1:]))


def encode_chunks(
    rows: Iterable[SourceRow], tokenizer: "PreTrainedTokenizerBase", options: dict[str, Any], num_proc: int = 1
) -> Iterator[EncodedChunk]:
    """Encodes rows chunk by chunk; with `num_proc` above 1 in processes of their own, a few chunks ahead.

    Args:
        rows: of a source.
        tokenizer: of the target.
        options: keyword arguments of `encode`.
        num_proc: processes.

    Raises:
        ValueError: if a process dies.
    """
    chunks = _chunked(rows)
    # Processes take seconds to start: a source of few chunks is done by then.
    first = list(islice(chunks, 1 if num_proc == 1 else 4 * num_proc))
    if num_proc == 1 or len(first) < 4 * num_proc:
        for chunk in chain(first, chunks):
            yield encode_chunk(chunk, tokenizer, options)
        return
    # Not forked: the parent may hold threads and locks of torch and of the tokenizer.
    context = multiprocessing.get_context("spawn")
    pending: deque[Future[EncodedChunk]] = deque()
    with ProcessPoolExecutor(num_proc, context, _start_worker, (tokenizer, options)) as pool:
        try:
            for chunk in chain(first, chunks):
                pending.append(pool.submit(_encode_in_worker, chunk))
                if len(pending) > 2 * num_proc:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise ValueError(
                f"a process that encodes rows died, most likely out of memory: lower data.num_proc ({num_proc})"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def encode_chunk(rows: list[SourceRow], tokenizer: "PreTrainedTokenizerBase", options: dict[str, Any]) -> EncodedChunk:
    """Encodes rows; those that cannot be are in its `drops`."""
    chunk = EncodedChunk(read=len(rows))
    for row in rows:
        dropped_turns: list[DropRow] = []
        try:
            if row.drop is not None:
                raise row.drop
            assert row.item is not None
            encoded = encode(row.item, tokenizer, on_drop=dropped_turns.append, **options)
        except DropRow as drop:
            chunk.drops.append((drop.reason, row.location, drop.detail))
        else:
            chunk.add(encoded, row.location)
            chunk.turn_drops += [(drop.reason, row.location, drop.detail) for drop in dropped_turns]
    return chunk


def _group(row: EncodedRow) -> int:
    """Hash of the first row's prompt, or of the whole row where nothing but a first token goes before the answer."""
    prompt_length = list(row.loss_mask).index(1) if 1 in row.loss_mask else len(row.loss_mask)
    ids = row.input_ids[:prompt_length] if prompt_length > 1 else row.input_ids
    digest = hashlib.blake2b(np.asarray(ids, dtype=np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _chunked(rows: Iterable[SourceRow]) -> Iterator[list[SourceRow]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, _CHUNK_ROWS)):
        yield chunk


_worker: "tuple[PreTrainedTokenizerBase, dict[str, Any]] | None" = None


def _start_worker(tokenizer: "PreTrainedTokenizerBase", options: dict[str, Any]) -> None:
    global _worker
    _worker = (tokenizer, options)


def _encode_in_worker(rows: list[SourceRow]) -> EncodedChunk:
    assert _worker is not None
    return encode_chunk(rows, *_worker)
