"""The target answers the prompts itself: drafters trained on the target's own answers are accepted more.

Knows dialogues, prompts and resuming; what answers is an object with `generate`, whatever is behind it.

What can be repeated: the dialogues of a run fall into the same batches however often it is stopped, and every batch
draws from its own seed. So on the same machine, with the same settings and versions, a run that was stopped and
resumed writes what an uninterrupted one writes. Another batch size gives other draws, and, as sums are rounded
otherwise, now and then another greedy token.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from spd_lightning.data.answer_journal import AnswerJournal
from spd_lightning.data.answering import AnsweringTarget, Sampling, answer_batch, first_prompt
from spd_lightning.data.chat_format import chat_format
from spd_lightning.data.conversations import DropRow
from spd_lightning.data.questions import AnsweredTurns, Questions, questions_of
from spd_lightning.data.sources import Source, iter_rows
from spd_lightning.modules.tokenizer import template_fingerprint, tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCHES_PER_WINDOW = 16
ENDS = {"stop": "whole", "length": "with an answer longer than max_new_tokens"}
"""How a dialogue's end is put to users; other reasons say it themselves."""


@dataclass(frozen=True)
class RegenerationReport:
    """What a run left behind.

    Attributes:
        path: the file of answers.
        num_rows: dialogues in it, and unfinished answers if they were kept.
        reasons: how the dialogues ended (`stop`, `length`, or why one has no answer), and rows dropped while reading.
        num_tokens: answer tokens made by this run, not by the ones that it resumed.
        seconds: time that this run took for them.
    """

    path: Path
    num_rows: int
    reasons: dict[str, int]
    num_tokens: int
    seconds: float

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {ENDS.get(reason, reason)}" for reason, count in sorted(self.reasons.items()))
        speed = f"{self.num_tokens / self.seconds:.0f} tokens/s" if self.num_tokens else "nothing left to do"
        return (
            f"{self.num_rows} rows in {self.path}; of {sum(self.reasons.values())} dialogues: {ends}; "
            f"{self.num_tokens} new answer tokens, {speed}"
        )


def regenerate(
    sources: Sequence[Source],
    target: AnsweringTarget,
    tokenizer: "PreTrainedTokenizerBase",
    out: Path,
    *,
    target_name: str,
    eos_token_ids: Sequence[int],
    sampling: Sampling | None = None,
    turns: AnsweredTurns = "all",
    batch_size: int = 32,
    max_length: int = 2048,
    keep_unfinished: bool = False,
    device: str = "cpu",
) -> RegenerationReport:
    """Has the target answer the dialogues of `sources` and writes them to `out` as chat rows (JSON lines).

    The run can be stopped at any time; the same command goes on from `OUT.journal`, which stays beside `out` with one
    record per dialogue. A dialogue's id is a hash of what is asked, so it stays when files move or rows are added.
    `out` itself is written at the end, in the order of the sources, under a temporary name first.

    With `turns="all"` every answer of a dialogue is replaced, in order, each seeing the target's earlier answers; with
    `"last"` only the last one, after the history of the data set (whose answers are not the target's own, and which
    training with `turns: each` would supervise as well).

    An answer that reaches `max_new_tokens` has no end, and none is invented: the dialogue ends before that turn. With
    `keep_unfinished` the unfinished answer is a row of its own, as tokens (`input_ids`, `loss_mask`).

    Args:
        sources: where the dialogues come from; their answers are not read, their weights are without effect.
        target: what answers.
        tokenizer: the target's.
        out: the `.jsonl` file to write.
        target_name: folder or id of the target, which the journal records.
        eos_token_ids: what ends an answer.
        sampling: how tokens are drawn; greedy by default.
        turns: which answers are replaced.
        batch_size: dialogues answered at once.
        max_length: longest prompt plus `max_new_tokens`; a dialogue ends before a turn that would pass it.
        keep_unfinished: keep answers that have no end.
        device: where the target's inputs go.

    Raises:
        ValueError: if an argument is out of range, if `out` exists without a journal, if the journal was begun with
            other settings, or if a source cannot be read.
    """
    sampling = sampling or Sampling()
    out = Path(out)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")
    if max_length <= sampling.max_new_tokens:
        raise ValueError(
            f"max_length={max_length} leaves no room for a prompt before max_new_tokens={sampling.max_new_tokens}: lower "
            "--sampling.max_new_tokens or raise --data.max_length"
        )
    if turns not in ("all", "last"):
        raise ValueError(f"turns={turns!r}: must be 'all' or 'last'")
    journal_path = out.with_name(out.name + ".journal")
    if out.exists() and not journal_path.exists():
        raise ValueError(f"{out} exists and has no journal to go on from: give another file, or remove it")
    settings = {
        "target": target_name,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer),
        "eos_token_ids": sorted(eos_token_ids),
        "turns": turns,
        "batch_size": batch_size,
        "max_length": max_length,
        **asdict(sampling),
    }
    reasons: Counter[str] = Counter()
    ids = [questions.id for questions in _read_questions(sources, turns, reasons)]
    if not ids:
        raise ValueError(f"there is no prompt to answer in {[source.path for source in sources]}: {dict(reasons)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    num_tokens = 0
    with AnswerJournal(journal_path, settings) as journal:
        done = sum(record_id in journal for record_id in ids)
        bar = tqdm(total=len(ids), initial=done, desc="answering", unit="dialogue", smoothing=0)
        with bar:
            for window in _windows(_read_questions(sources, turns, Counter()), batch_size * BATCHES_PER_WINDOW):
                for batch in _batches(window, tokenizer, journal, batch_size, max_length - sampling.max_new_tokens):
                    records = answer_batch(
                        batch, target, tokenizer, eos_token_ids, sampling, max_length=max_length, device=device
                    )
                    num_tokens += sum(record["num_tokens"] for record in records)
                    bar.set_postfix_str(f"{num_tokens / (time.monotonic() - start):.0f} tokens/s", refresh=False)
                    bar.update(journal.append(records))
            bar.update(len(ids) - bar.n)  # prompts that cannot be asked
        seconds = time.monotonic() - start
        num_rows = _write_answers(ids, journal, out, keep_unfinished, reasons)
    return RegenerationReport(out, num_rows, dict(reasons), num_tokens, seconds)


def _read_questions(sources: Sequence[Source], turns: AnsweredTurns, reasons: Counter[str]) -> Iterator[Questions]:
    """What is asked in the dialogues of the sources, ids unique; counts in `reasons` what cannot be asked."""
    seen: Counter[str] = Counter()
    for source in sources:
        for row in iter_rows(source):
            if row.item is None:
                reasons[row.drop.reason if row.drop else "dropped"] += 1
                continue
            try:
                questions = questions_of(row.item, turns)
            except DropRow as drop:
                reasons[drop.reason] += 1
                continue
            seen[questions.id] += 1
            yield questions.with_repeat(seen[questions.id])


def _windows(questions: Iterator[Questions], size: int) -> Iterator[list[Questions]]:
    window: list[Questions] = []
    for entry in questions:
        window.append(entry)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def _batches(
    window: list[Questions],
    tokenizer: "PreTrainedTokenizerBase",
    journal: AnswerJournal,
    batch_size: int,
    max_prompt_length: int,
) -> Iterator[list[Questions]]:
    """The window's batches that the journal lacks, whole, of prompts of about the same length.

    A batch of which only some dialogues are there is answered again as a whole: its draws depend on all of it.
    """
    if all(entry.id in journal for entry in window):
        return
    lengths: dict[str, int] = {}
    for entry in window:
        try:
            length = len(first_prompt(entry, chat_format(tokenizer)))
            if length > max_prompt_length:
                raise DropRow("prompt_too_long", f"{length} tokens")
            lengths[entry.id] = length
        except DropRow as drop:
            journal.append([{"id": entry.id, "messages": [], "finish_reason": drop.reason, "num_tokens": 0}])
    ordered = sorted((entry for entry in window if entry.id in lengths), key=lambda e: (lengths[e.id], e.id))
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        if not all(entry.id in journal for entry in batch):
            yield batch


def _write_answers(
    ids: Sequence[str], journal: AnswerJournal, out: Path, keep_unfinished: bool, reasons: Counter[str]
) -> int:
    """Writes the rows of `ids` in their order and returns their number; counts how the dialogues ended."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    num_rows = 0
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            for record_id in ids:
                record = journal[record_id]
                reasons[record["finish_reason"]] += 1
                for row in _rows_of(record, keep_unfinished):
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    num_rows += 1
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return num_rows


def _rows_of(record: dict[str, Any], keep_unfinished: bool) -> Iterator[dict[str, Any]]:
    if record["messages"]:
        yield {"id": record["id"], "messages": record["messages"], "finish_reason": record["finish_reason"]}
    if keep_unfinished and "unfinished" in record:
        yield {"id": f"{record['id']}/unfinished", **record["unfinished"], "finish_reason": "length"}
