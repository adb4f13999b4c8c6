import json
import os
import subprocess
import sys

import pytest

from spd_lightning.data import preparation
from spd_lightning.data.preparation import EncodingOptions, PreparedSource, describe, prepare, prepare_source
from spd_lightning.data.sources import Source

OPTIONS = EncodingOptions(max_length=200)


def chat(question, *answers):
    turns = [{"role": "user", "content": question}]
    for answer in answers:
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    return {"messages": turns}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(str(path))


@pytest.fixture
def dialogues(tmp_path):
    return write(tmp_path / "chat.jsonl", [chat(f"question {n}", f"answer {n}", "more") for n in range(7)])


def built(cache):
    return sorted(path.name for path in (cache / "rows").iterdir())


def test_rows_are_encoded_once_and_found_again(tmp_path, dialogues, tiny_tokenizer, monkeypatch):
    first = prepare_source(dialogues, tiny_tokenizer, OPTIONS, tmp_path / "cache")
    monkeypatch.setattr(preparation, "encode_chunks", None)
    again = prepare_source(dialogues, tiny_tokenizer, OPTIONS, tmp_path / "cache")
    assert again == first
    assert first.report.read == first.report.kept == 7
    assert first.report.rows == len(first.rows()) == 14
    assert built(tmp_path / "cache") == [first.fingerprint], "nothing half-built stays"
    row = first.rows()[3]
    assert row["location"].endswith("chat.jsonl:2")
    assert tiny_tokenizer.decode([i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]) == (
        "more<|im_end|>"
    )
    assert row["length"] == len(row["input_ids"])
    assert row["supervised"] == sum(row["loss_mask"])


def test_totals_of_the_report_are_those_of_the_rows(tmp_path, dialogues, tiny_tokenizer):
    prepared = prepare_source(dialogues, tiny_tokenizer, OPTIONS, tmp_path)
    rows = list(prepared.rows())
    assert prepared.report.tokens == sum(len(row["input_ids"]) for row in rows)
    assert prepared.report.supervised_tokens == sum(sum(row["loss_mask"]) for row in rows)


def test_everything_that_matters_changes_the_fingerprint(tmp_path, dialogues, tiny_tokenizer, monkeypatch):
    def fingerprint(source=dialogues, tokenizer=tiny_tokenizer, options=OPTIONS):
        return preparation.prepared_fingerprint(source, tokenizer, options)

    seen = [fingerprint()]
    seen.append(fingerprint(options=EncodingOptions(max_length=201)))
    seen.append(fingerprint(options=EncodingOptions(max_length=200, turns="joined")))
    seen.append(fingerprint(options=EncodingOptions(max_length=200, on_long="truncate")))
    seen.append(fingerprint(Source(dialogues.path, limit=3)))
    seen.append(fingerprint(Source(dialogues.path, response_remove="a")))
    seen.append(fingerprint(Source(dialogues.path, system="be brief")))
    seen.append(fingerprint(write(tmp_path / "other.jsonl", [chat("question", "answer")])))
    template = tiny_tokenizer.chat_template
    tiny_tokenizer.chat_template = template + " "
    seen.append(fingerprint())
    tiny_tokenizer.chat_template = template
    tiny_tokenizer.add_tokens(["surprise"])
    seen.append(fingerprint())
    monkeypatch.setattr(preparation, "code_fingerprint", lambda: "another version")
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)


def test_what_does_not_matter_leaves_the_fingerprint(tmp_path, dialogues, tiny_tokenizer):
    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / "renamed.jsonl"
    moved.write_bytes((tmp_path / "chat.jsonl").read_bytes())
    fingerprints = {
        preparation.prepared_fingerprint(source, tiny_tokenizer, OPTIONS)
        for source in (dialogues, Source(str(moved)), Source(dialogues.path, weight=0.25))
    }
    assert len(fingerprints) == 1


def test_drops_are_counted_by_reason_with_examples_and_written(tmp_path, tiny_tokenizer):
    bad = [{"messages": [{"role": "narrator", "content": "x"}]}] * 5 + [
        {"messages": [{"role": "user", "content": "q"}]}
    ]
    source = write(tmp_path / "mixed.jsonl", [chat("q", "a")] * 4 + bad)
    prepared = prepare_source(source, tiny_tokenizer, OPTIONS, tmp_path / "cache")
    written = json.loads((prepared.folder / "report.json").read_text())
    assert {reason: entry["count"] for reason, entry in written["drops"].items()} == {
        "unknown_role": 5,
        "no_supervised_token": 1,
    }
    assert len(written["drops"]["unknown_role"]["examples"]) == 3
    assert "mixed.jsonl:5" in written["drops"]["unknown_role"]["examples"][0]
    text = describe([prepared], tiny_tokenizer)
    assert "10 read, 4 kept (60.0% dropped)" in text
    assert "[[a<|im_end|>]]" in text


def test_single_turns_that_are_too_long_are_counted_apart(tmp_path, tiny_tokenizer):
    source = write(tmp_path / "long.jsonl", [chat("q", "a", "word " * 300)])
    report = prepare_source(source, tiny_tokenizer, OPTIONS, tmp_path / "cache").report
    assert (report.read, report.kept, report.rows) == (1, 1, 1)
    assert report.drops == {}
    assert {reason: entry.count for reason, entry in report.turn_drops.items()} == {"too_long": 1}


def test_run_stops_when_drops_pass_the_limit(tmp_path, tiny_tokenizer):
    source = write(tmp_path / "mixed.jsonl", [chat("q", "a")] * 2 + [{"no": "dialogue"}] * 3)
    assert prepare([source], tiny_tokenizer, OPTIONS, tmp_path, max_drop_fraction=0.6)
    with pytest.raises(
        ValueError,
        match=r"60\.0% of the rows .* data\.max_drop_fraction=0\.5: 3 of 5 rows were dropped as unknown_schema",
    ):
        prepare([source], tiny_tokenizer, OPTIONS, tmp_path, max_drop_fraction=0.5)


def test_hopeless_source_stops_before_its_end(tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(preparation, "_HOPELESS_ROWS", 256)
    source = write(tmp_path / "bad.jsonl", [{"no": "dialogue"}] * 1000)
    with pytest.raises(ValueError, match="not one of the first 256 rows is usable: 256 of 256"):
        prepare_source(source, tiny_tokenizer, OPTIONS, tmp_path / "cache")
    assert built(tmp_path / "cache") == []


def test_nothing_supervised_names_the_cause_and_shows_a_row(tmp_path, tiny_tokenizer):
    masked = write(tmp_path / "masked.jsonl", [{"input_ids": [3, 4, 5], "loss_mask": [1, 0, 0]}])
    with pytest.raises(ValueError, match="no token is supervised"):
        prepare([masked], tiny_tokenizer, OPTIONS, tmp_path, max_drop_fraction=1.0)
    dropped = write(tmp_path / "dropped.jsonl", [{"messages": [{"role": "user", "content": "q"}]}])
    with pytest.raises(ValueError, match=r"no token is supervised.*no_supervised_token.*dropped\.jsonl:1"):
        prepare([dropped], tiny_tokenizer, OPTIONS, tmp_path, max_drop_fraction=1.0)


def test_rows_do_not_depend_on_the_number_of_processes(tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("spd_lightning.data.encode_pool._CHUNK_ROWS", 3)
    source = write(tmp_path / "chat.jsonl", [chat(f"question {n}", "a" * n) if n % 7 else {} for n in range(40)])
    alone = prepare_source(source, tiny_tokenizer, OPTIONS, tmp_path / "one", num_proc=1)
    together = prepare_source(source, tiny_tokenizer, OPTIONS, tmp_path / "two", num_proc=2)
    assert together.report == alone.report
    assert list(together.rows()) == list(alone.rows())


PREPARE = """
import sys
from pathlib import Path
from spd_lightning.data.preparation import EncodingOptions, prepare_source
from spd_lightning.data.sources import Source
from spd_lightning.modules.tokenizer import load_tokenizer

path, tokenizer, cache = sys.argv[1:]
prepared = prepare_source(Source(path), load_tokenizer(tokenizer), EncodingOptions(max_length=200), Path(cache))
print(prepared.fingerprint, len(prepared.rows()))
"""


def test_processes_that_prepare_the_same_source_at_once_harm_nothing(tmp_path, dialogues, tiny_tokenizer_dir):
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", PREPARE, dialogues.path, str(tiny_tokenizer_dir), str(cache)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    printed = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert printed == {f"{built(cache)[0]} 14\n"}
    assert len(built(cache)) == 1


def test_the_slower_of_two_preparers_takes_what_the_faster_made(tmp_path, dialogues, tiny_tokenizer, monkeypatch):
    write_rows = preparation._write_rows

    def overtaken(*arguments):
        monkeypatch.setattr(preparation, "_write_rows", write_rows)
        prepare_source(dialogues, tiny_tokenizer, OPTIONS, tmp_path / "cache")
        return write_rows(*arguments)

    monkeypatch.setattr(preparation, "_write_rows", overtaken)
    prepared = prepare_source(dialogues, tiny_tokenizer, OPTIONS, tmp_path / "cache")
    assert len(prepared.rows()) == 14
    assert built(tmp_path / "cache") == [prepared.fingerprint]


def test_a_moved_source_is_called_by_its_present_name(tmp_path, dialogues, tiny_tokenizer):
    prepare_source(dialogues, tiny_tokenizer, OPTIONS, tmp_path / "cache")
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes((tmp_path / "chat.jsonl").read_bytes())
    prepared = prepare_source(Source(str(moved)), tiny_tokenizer, OPTIONS, tmp_path / "cache")
    assert prepared.report.source == str(moved)
    assert len(built(tmp_path / "cache")) == 1


def test_what_killed_processes_left_is_removed_and_what_others_build_is_not(tmp_path, dialogues, tiny_tokenizer):
    old, new = tmp_path / "cache/rows/.building-old", tmp_path / "cache/rows/.building-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "rows.arrow").write_bytes(b"half")
    for path in (old / "rows.arrow", old, new):
        os.utime(path, (0, 0))
    prepared = prepare_source(dialogues, tiny_tokenizer, OPTIONS, tmp_path / "cache")
    assert built(tmp_path / "cache") == [".building-new", prepared.fingerprint]


def test_failure_leaves_nothing_behind(tmp_path, dialogues, tiny_tokenizer, monkeypatch):
    def fail(*arguments, **options):
        raise OSError("disk full")
        yield

    monkeypatch.setattr(preparation, "encode_chunks", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_source(dialogues, tiny_tokenizer, OPTIONS, tmp_path / "cache")
    assert built(tmp_path / "cache") == []


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "report", "other_report"])
def test_damaged_cache_says_what_to_delete(tmp_path, dialogues, tiny_tokenizer, damage):
    prepared = prepare_source(dialogues, tiny_tokenizer, OPTIONS, tmp_path / "cache")
    rows, report = prepared.folder / "rows.arrow", prepared.folder / "report.json"
    if damage == "cut":
        os.truncate(rows, rows.stat().st_size // 2)
    elif damage == "empty":
        rows.write_bytes(b"")
    elif damage == "gone":
        rows.unlink()
    elif damage == "report":
        report.write_text("{")
    else:
        report.write_text(json.dumps({**json.loads(report.read_text()), "rows": 3}))
    with pytest.raises(ValueError, match=r"damaged.*delete this folder"):
        prepare_source(dialogues, tiny_tokenizer, OPTIONS, tmp_path / "cache").rows()


def test_a_folder_that_is_not_prepared_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="damaged"):
        PreparedSource.open(tmp_path, "chat")


def test_impossible_length_is_refused():
    with pytest.raises(ValueError, match="max_length=1: a row needs a token and its successor"):
        EncodingOptions(max_length=1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sources": []}, "data.sources is empty"),
        ({"max_drop_fraction": 1.5}, "max_drop_fraction=1.5"),
        ({"num_proc": 0}, "num_proc=0"),
    ],
)
def test_impossible_arguments_are_refused(tmp_path, dialogues, tiny_tokenizer, changed, message):
    arguments = {"sources": [dialogues], "tokenizer": tiny_tokenizer, "options": OPTIONS, "cache_dir": tmp_path}
    with pytest.raises(ValueError, match=message):
        prepare(**{**arguments, **changed})


def test_empty_source_is_refused(tmp_path, tiny_tokenizer):
    with pytest.raises(ValueError, match="no rows at all"):
        prepare([write(tmp_path / "empty.jsonl", [])], tiny_tokenizer, OPTIONS, tmp_path)
