"""The draft vocabulary: the sorted target token ids that the drafter can propose (design §§3 and 10).

Knows ids and counts; knows neither text nor tensors.
"""

import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spd_lightning.modules.hub import locate_drafter

_OWN_KEYS = ("token_ids", "counts", "draft_vocab_size")


@dataclass(frozen=True)
class DraftVocab:
    """A sorted list of target token ids; draft id `i` is target id `token_ids[i]`.

    Args:
        token_ids: target ids, ascending without repeats.
        counts: how often each of them was an answer token of the training rows, if known.
        provenance: where the list comes from; travels with it into every file.
    """

    token_ids: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("the draft vocabulary is empty: it needs at least one token id")
        if self.token_ids[0] < 0:
            raise ValueError(f"draft vocabulary: token id {self.token_ids[0]} is not a non-negative integer")
        for earlier, later in zip(self.token_ids, self.token_ids[1:], strict=False):
            if later == earlier:
                raise ValueError(f"draft vocabulary: token id {later} is listed twice; every id may appear once")
            if later < earlier:
                raise ValueError(f"draft vocabulary: token id {later} follows {earlier}; the ids must ascend")
        if self.counts is not None and len(self.counts) != len(self.token_ids):
            raise ValueError(f"draft vocabulary: {len(self.counts)} counts for {len(self.token_ids)} token ids")

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def load(cls, path: str | Path, num_tokens: int, tokenizer_hash: str | None = None) -> "DraftVocab":
        """Reads a draft vocabulary file (design §10) or that of a drafter folder.

        Args:
            path: a JSON file, or a folder or hub id of a drafter, whose `config.json` has a `draft_vocab`.
            num_tokens: `len(tokenizer)` of the target; every id must lie below.
            tokenizer_hash: the target's; compared when the file states one.

        Raises:
            ValueError: if the file is missing or malformed, or was made for another tokenizer.
        """
        path = Path(path)
        if path.suffix != ".json":
            path = locate_drafter(path)
        try:
            vocab = cls._from_json(_read_object(path), tokenizer_hash)
            vocab.check_range(num_tokens)
        except ValueError as error:
            raise ValueError(
                f"{path}: {error}. Count one for this target with `spd-data vocab`, or leave data.draft_vocab empty"
            ) from None
        return vocab

    @classmethod
    def _from_json(cls, content: dict[str, Any], tokenizer_hash: str | None) -> "DraftVocab":
        if "draft_vocab" in content:  # the config of a drafter folder
            inner = content["draft_vocab"]
            if not isinstance(inner, dict):
                raise ValueError(f"draft_vocab is {type(inner).__name__}, an object with token_ids is needed")
            content = {**{k: content[k] for k in ("tokenizer_hash",) if k in content}, **inner}
        token_ids = content.get("token_ids")
        if not isinstance(token_ids, list):
            raise ValueError("no list `token_ids`: this is not a draft vocabulary")
        for token_id in token_ids:
            if type(token_id) is not int:
                raise ValueError(f"draft vocabulary: token id {token_id!r} is not a non-negative integer")
        stated_size = content.get("draft_vocab_size", len(token_ids))
        if stated_size != len(token_ids):
            raise ValueError(f"draft_vocab_size={stated_size}, but {len(token_ids)} token_ids are listed")
        counts = content.get("counts")
        if counts is not None and not (isinstance(counts, list) and all(type(count) is int for count in counts)):
            raise ValueError("`counts` must be a list of integers, one for each token id")
        stated_hash = content.get("tokenizer_hash")
        if tokenizer_hash is not None and stated_hash is not None and stated_hash != tokenizer_hash:
            raise ValueError(
                f"made for another tokenizer (hash {str(stated_hash)[:12]}, the target's is {tokenizer_hash[:12]})"
            )
        return cls(
            token_ids=tuple(token_ids),
            counts=None if counts is None else tuple(counts),
            provenance={key: value for key, value in content.items() if key not in _OWN_KEYS},
        )

    @classmethod
    def from_counts(
        cls,
        counts: "np.ndarray | Counter[int]",
        size: int,
        num_tokens: int,
        always: Iterable[int] = (),
        provenance: Mapping[str, Any] | None = None,
    ) -> "DraftVocab":
        """The `size` most frequent ids: those of `always`, then by count (ties by id), then unseen ids ascending.

        Args:
            counts: occurrences of each token id as an answer token.
            size: ids wanted; capped at `num_tokens` with a warning.
            num_tokens: `len(tokenizer)`.
            always: ids that are in whatever their count: the EOS ids.
            provenance: kept with the list.
        """
        required = sorted(set(always))
        if size < max(1, len(required)):
            raise ValueError(f"draft_vocab_size={size}: at least {max(1, len(required))} ids (the EOS ids) are needed")
        if required and not 0 <= required[0] <= required[-1] < num_tokens:
            raise ValueError(f"EOS ids {required} do not all lie below the tokenizer's {num_tokens} tokens")
        if size > num_tokens:
            warnings.warn(
                f"draft_vocab_size={size} is more than the tokenizer's {num_tokens} tokens: all of them are taken",
                stacklevel=2,
            )
            size = num_tokens
        dense = dense_counts(counts, num_tokens)
        rank = dense.astype(np.int64)
        rank[required] = np.iinfo(np.int64).max
        chosen = np.sort(np.argsort(-rank, kind="stable")[:size])
        return cls(tuple(chosen.tolist()), tuple(dense[chosen].tolist()), dict(provenance or {}))

    def check_range(self, num_tokens: int) -> None:
        """Raises `ValueError` if an id is beyond the tokenizer."""
        if self.token_ids[-1] >= num_tokens:
            raise ValueError(
                f"made for another tokenizer: token id {self.token_ids[-1]} is out of range, "
                f"the target's tokenizer has {num_tokens} tokens"
            )

    def coverage(self, counts: "np.ndarray | Counter[int]") -> float:
        """Share of the counted answer tokens that the drafter can propose, 0 to 1; 0 when nothing was counted."""
        if isinstance(counts, Counter):
            total, inside = sum(counts.values()), sum(counts[token_id] for token_id in self.token_ids)
        else:
            within = [token_id for token_id in self.token_ids if token_id < len(counts)]
            total, inside = int(counts.sum()), int(counts[within].sum())
        return inside / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        """The form of design §10, further keys included."""
        content = {**self.provenance, "draft_vocab_size": len(self), "token_ids": list(self.token_ids)}
        if self.counts is not None:
            content["counts"] = list(self.counts)
        return content

    def save(self, path: str | Path) -> None:
        """Writes the JSON of design §10 to a temporary file and renames it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(self.to_json(), file)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)


def dense_counts(counts: "np.ndarray | Counter[int]", num_tokens: int) -> np.ndarray:
    """Counts as an array with one entry for each token id; `ValueError` if an id beyond the tokenizer was counted."""
    if isinstance(counts, Counter):
        if any(not 0 <= token_id < num_tokens for token_id in counts):
            raise ValueError(f"counts hold token id {max(counts)}, but the tokenizer has {num_tokens} tokens")
        dense = np.zeros(num_tokens, dtype=np.int64)
        for token_id, count in counts.items():
            dense[token_id] = count
        return dense
    beyond = np.flatnonzero(counts[num_tokens:])
    if beyond.size:
        raise ValueError(f"counts hold token id {num_tokens + beyond[-1]}, but the tokenizer has {num_tokens} tokens")
    dense = np.zeros(num_tokens, dtype=np.int64)
    dense[: len(counts)] = counts[:num_tokens]
    return dense


def _read_object(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError("there is no draft vocabulary here (a JSON file or a drafter folder is needed)")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"holds a JSON {type(content).__name__}, an object with `token_ids` is needed")
    return content
