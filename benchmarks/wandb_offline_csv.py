"""The runs table of W&B's 'Export > CSV' for runs that were never uploaded.

    python benchmarks/wandb_offline_csv.py --out runs.csv runs/wandb/offline-run-* ...

One row a run: name, state, time, and every key of its configuration and summary (nested keys joined by dots; keys that
begin with an underscore are W&B's own and stay out). An offline run keeps all of this in its `.wandb` file only.
"""

import argparse
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

MAGIC, HEADER_BYTES, VERSION = b":W&B\xe1\xbe", 7, 0
BLOCK_BYTES, CHUNK_HEADER_BYTES = 32768, 7
"""Records are cut into chunks that do not cross blocks, as in a log of LevelDB."""
WHOLE, LAST = 1, 4
"""Kinds of the chunk that a record ends with."""


def read_records(path: Path) -> Iterator[Record]:
    """The records of a `.wandb` file; a last one that was cut, as by a crash, is left out.

    Raises:
        ValueError: if the file is none of W&B's.
    """
    data = path.read_bytes()
    if data[:HEADER_BYTES] != MAGIC + bytes([VERSION]):
        raise ValueError(f"{path} is not the log of a W&B run, or of a newer version of that format")
    position, parts = HEADER_BYTES, b""
    while position + CHUNK_HEADER_BYTES <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < CHUNK_HEADER_BYTES:
            position += left_in_block
            continue
        # A chunk's header: checksum (4 bytes), length (2), kind (1).
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        position += CHUNK_HEADER_BYTES
        if position + length > len(data):
            return
        parts += data[position : position + length]
        position += length
        if kind in (WHOLE, LAST):
            yield Record.FromString(parts)
            parts = b""


def update(tree: dict[str, Any], items: Sequence[Any]) -> None:
    """Sets the values of a configuration's or summary's changed keys, which may lie deeper."""
    for item in items:
        *outer, last = item.nested_key or [item.key]
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = json.loads(item.value_json)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; truth values, lists and media (such as tables) as JSON."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if not prefix and key.startswith("_"):
            continue
        if isinstance(value, dict) and "_type" not in value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = json.dumps(value) if isinstance(value, bool | dict | list) else value
    return flat


def read_run(folder: Path) -> dict[str, Any]:
    """The row of one offline run.

    Raises:
        ValueError: if the folder holds no run.
    """
    files = sorted(folder.glob("*.wandb"))
    if len(files) != 1:
        raise ValueError(f"{folder} holds {len(files)} .wandb files: name folders such as wandb/offline-run-*")
    facts: dict[str, Any] = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    state = "crashed"
    for record in read_records(files[0]):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
            created = datetime.fromtimestamp(run.start_time.seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            facts = {"Name": run.display_name or run.run_id, "State": "", "Notes": run.notes, "User": ""}
            facts |= {"Tags": ", ".join(run.tags), "Created": created, "Runtime": "", "Sweep": run.sweep_id}
            update(config, run.config.update)
        elif kind == "config":
            update(config, record.config.update)
        elif kind == "summary":
            update(summary, record.summary.update)
        elif kind == "exit":
            state = "failed" if record.exit.exit_code else "finished"
    if not facts:
        raise ValueError(f"{files[0]} does not say what run it is of: it was cut too early")
    facts |= {"State": state, "Runtime": summary.get("_runtime")}
    return facts | flatten(config) | flatten(summary)


def main(args: Sequence[str] | None = None) -> None:
    """Writes the CSV; runs that lack a column of others have an empty cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_FOLDER", help="such as wandb/offline-run-*")
    given = parser.parse_args(args)
    try:
        rows = [read_run(folder) for folder in given.runs]
    except ValueError as error:
        parser.error(str(error))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with given.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
