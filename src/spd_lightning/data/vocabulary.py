"""Counts the answer tokens of the training rows and makes the draft vocabulary of them. Knows no batches."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from spd_lightning.data.corpus import RowSet
from spd_lightning.modules.draft_vocab import DraftVocab


def count_supervised(rows: RowSet, num_tokens: int) -> np.ndarray:
    """How often each token id is an answer token that an epoch of `rows` predicts.

    Args:
        rows: of training, each counted as often as the epoch shows it.
        num_tokens: `len(tokenizer)`.
    """
    counts = np.zeros(num_tokens, dtype=np.int64)
    multiplicity = rows.multiplicity()
    first = 0
    with tqdm(total=len(rows.rows), desc="counting answer tokens", unit=" rows", mininterval=0.5) as bar:
        for ids, masks, lengths in rows.blocks():
            times = np.repeat(multiplicity[first : first + len(lengths)], lengths)
            times[masks == 0] = 0
            times[np.cumsum(lengths) - lengths] = 0  # nothing predicts a first token
            counts += np.bincount(ids, weights=times, minlength=num_tokens).astype(np.int64)
            first += len(lengths)
            bar.update(len(lengths))
    return counts


def cached_counts(rows: RowSet, tokenizer_hash: str, num_tokens: int, cache_dir: Path) -> np.ndarray:
    """`count_supervised`, kept in the cache under the tokenizer's and the data's hash."""
    key = hashlib.sha256(f"{tokenizer_hash}:{rows.data_hash}".encode()).hexdigest()[:32]
    path = cache_dir / "counts" / f"{key}.npy"
    if path.exists():
        counts = _load(path)
        if counts.shape == (num_tokens,):
            return counts
        raise ValueError(f"{path}: counts of {counts.shape} tokens, {num_tokens} are expected: delete this file")
    counts = count_supervised(rows, num_tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, counts)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return counts


def vocabulary_from_counts(
    counts: np.ndarray,
    size: int,
    eos_token_ids: Sequence[int],
    tokenizer_name: str,
    tokenizer_hash: str,
    data_hash: str,
) -> DraftVocab:
    """The `size` most frequent ids with the EOS ids, and where they come from (design §10's keys)."""
    return DraftVocab.from_counts(
        counts,
        size,
        num_tokens=len(counts),
        always=eos_token_ids,
        provenance={
            "tokenizer_name": tokenizer_name,
            "tokenizer_hash": tokenizer_hash,
            "vocab_size": len(counts),
            "data_hash": data_hash,
            "total_positions_counted": int(counts.sum()),
        },
    )


def coverage_table(
    counts: Sequence[np.ndarray], sizes: Sequence[int], eos_token_ids: Sequence[int]
) -> list[tuple[int, *tuple[float, ...]]]:
    """Coverage of draft vocabularies of several sizes, made of the first counts and measured on all of them.

    Args:
        counts: of the training rows, then of any others.
        sizes: capped at the number of tokens.
        eos_token_ids: in every vocabulary.

    Returns:
        A size and a coverage (0 to 1) for each of `counts`, by size.
    """
    table = []
    for size in sorted({min(size, len(counts[0])) for size in sizes}):
        vocab = DraftVocab.from_counts(counts[0], size, num_tokens=len(counts[0]), always=eos_token_ids)
        table.append((size, *(vocab.coverage(counted) for counted in counts)))
    return table


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: the cached counts are damaged ({error}): delete this file") from None
