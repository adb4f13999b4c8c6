import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from spd_lightning.data.conversations import DropRow
from spd_lightning.data.readers import TEXT_BLOCK, data_suffix, read_arrow, read_json, read_parquet, read_text

ROW = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
LINE = json.dumps(ROW)


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def outcomes(rows) -> list[tuple[str, object]]:
    """`(line or row number, row or reason)` of each row."""
    return [
        (location.rsplit(":", 1)[-1].split("row ")[-1], row.reason if isinstance(row, DropRow) else row)
        for location, row in rows
    ]


def test_bad_lines_are_named_and_the_others_kept(tmp_path):
    lines = [
        LINE.encode(),
        b"{broken",
        b"",
        b"   \r",
        b'{"text": "\xff\xfe"}',
        b'{"text": "' + b"9" * 3 + b'", "n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"null",
        LINE.encode() + b"\r",
        LINE[:-9].encode(),
    ]
    path = write(tmp_path / "rows.jsonl", b"\n".join(lines))
    assert outcomes(read_json(path)) == [
        ("1", ROW),
        ("2", "invalid_json"),
        ("5", "invalid_unicode"),
        ("6", "invalid_json"),
        ("7", "invalid_json"),
        ("8", None),
        ("9", ROW),
        ("10", "invalid_json"),
    ]


def test_locations_name_the_file(tmp_path):
    path = write(tmp_path / "rows.jsonl", f"{LINE}\n{LINE}\n")
    assert [location for location, _ in read_json(path)] == [f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r", "\x00"])
def test_only_newline_bytes_end_a_line(tmp_path, separator):
    row = {"text": f"before{separator}after"}
    path = write(tmp_path / "rows.jsonl", f'{{"text": "before{separator}after"}}\n{LINE}\n')
    assert outcomes(read_json(path)) == [("1", row), ("2", ROW)]


def test_a_lone_surrogate_is_read_for_the_row_to_be_judged(tmp_path):
    path = write(tmp_path / "rows.jsonl", '{"text": "cut \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    assert outcomes(read_json(path)) == [("1", {"text": "cut \ud83d"}), ("2", {"text": "whole 😀"})]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.ndjson"])
@pytest.mark.parametrize("indent", [None, 1, 4])
def test_a_top_level_list_is_read_whatever_the_suffix(tmp_path, name, indent):
    path = write(tmp_path / name, json.dumps([ROW, {"other": 1}, ROW], indent=indent))
    assert [row for _, row in read_json(path)] == [ROW, {"other": 1}, ROW]


def test_elements_of_a_list_are_located_by_line(tmp_path):
    path = write(tmp_path / "rows.json", f"[\n{LINE},\n\n{LINE}\n]\n")
    assert outcomes(read_json(path)) == [("2", ROW), ("4", ROW)]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_broken_element_costs_itself_only(tmp_path, indent):
    whole = json.dumps([ROW, {**ROW, "note": "here"}, ROW, ROW], indent=indent)
    path = write(tmp_path / "rows.json", whole.replace('"here"', "here"))
    assert [row for _, row in outcomes(read_json(path))] == [ROW, "invalid_json", ROW, ROW]


def test_a_broken_first_element_costs_itself_only(tmp_path):
    whole = json.dumps([{**ROW, "note": "here"}, ROW, ROW], indent=2)
    path = write(tmp_path / "rows.json", whole.replace('"here"', "here"))
    assert [row for _, row in outcomes(read_json(path))] == ["invalid_json", ROW, ROW]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_cut_list_keeps_what_came_before(tmp_path, indent):
    path = write(tmp_path / "rows.json", json.dumps([ROW, ROW, ROW], indent=indent)[:-12])
    assert [row for _, row in outcomes(read_json(path))] == [ROW, ROW, "invalid_json"]


def test_a_list_that_is_not_closed_is_reported(tmp_path):
    path = write(tmp_path / "rows.json", f"[{LINE},\n")
    assert outcomes(read_json(path)) == [("1", ROW), ("2", "invalid_json")]


def test_bytes_that_are_no_text_cost_one_element_of_a_list(tmp_path):
    path = write(tmp_path / "rows.json", b'[{"text": "\xff"},\n{"text": "b"}]')
    rows = [row for _, row in read_json(path)]
    assert rows == [{"text": "\udcff"}, {"text": "b"}]


def test_lines_that_hold_lists_are_rows_of_their_own(tmp_path):
    path = write(tmp_path / "rows.jsonl", "[1, 2]\n[3]\n" + LINE)
    assert [row for _, row in read_json(path)] == [[1, 2], [3], ROW]


def test_a_single_object_may_span_lines(tmp_path):
    path = write(tmp_path / "row.json", json.dumps(ROW, indent=2))
    assert [row for _, row in read_json(path)] == [ROW]


def test_empty_files_have_no_rows(tmp_path):
    for content in ("", "\n\n", "\ufeff", "[]", "[ ]\n"):
        assert list(read_json(write(tmp_path / "rows.json", content))) == []
        if "[" not in content:
            assert list(read_text(write(tmp_path / "rows.txt", content))) == []


def test_a_bad_first_line_does_not_load_the_file_into_memory(tmp_path):
    import tracemalloc

    line = json.dumps({"text": "x" * 10_000}) + "\n"
    for first in (b"\xff\n", b'{"messages":\n', b"[broken\n", b"{\x00\n"):
        path = write(tmp_path / "rows.jsonl", first + line.encode() * 2000)
        tracemalloc.start()
        assert sum(1 for _, row in read_json(path) if isinstance(row, dict)) == 2000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000


@pytest.mark.parametrize("content", [LINE, f"[{LINE}]"])
def test_a_byte_order_mark_is_left_out(tmp_path, content):
    assert [row for _, row in read_json(write(tmp_path / "rows.json", "\ufeff" + content))] == [ROW]


def test_utf16_is_refused_with_the_way_out(tmp_path):
    path = write(tmp_path / "rows.jsonl", LINE.encode("utf-16"))
    with pytest.raises(ValueError, match=r"rows\.jsonl is UTF-16 text: convert it"):
        list(read_json(path))


def test_gzip_is_unpacked_and_a_cut_file_keeps_its_rows(tmp_path):
    lines = "".join(json.dumps({"text": f"row {index} {index * 7919 % 1009}"}) + "\n" for index in range(5000))
    packed = gzip.compress(lines.encode())
    whole = write(tmp_path / "whole.jsonl.gz", packed)
    cut = write(tmp_path / "cut.jsonl.gz", packed[: len(packed) // 2])
    assert len(list(read_json(whole))) == 5000
    rows = outcomes(read_json(cut))
    assert len(rows) > 1000
    assert rows[-1][1] == "truncated_file"
    assert all(isinstance(row, dict) for _, row in rows[:-1])


def test_a_file_that_only_claims_to_be_gzip_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz is not a gzip file"):
        list(read_json(write(tmp_path / "rows.jsonl.gz", LINE)))


def test_text_comes_back_whole_in_blocks_of_lines(tmp_path):
    text = "".join(f"line {index} \u2028 é\n" for index in range(20_000))
    rows = list(read_text(write(tmp_path / "a.txt", text)))
    assert "".join(row["text"] for _, row in rows) == text
    assert len(rows) > 3
    assert all(len(row["text"]) <= TEXT_BLOCK and row["text"].endswith("\n") for _, row in rows)
    first_line = int(rows[1][0].rsplit(":", 1)[1])
    assert rows[1][1]["text"].startswith(f"line {first_line - 1} ")


def test_a_huge_line_of_text_is_cut_between_characters(tmp_path):
    text = "aé中😀" * 60_000
    rows = list(read_text(write(tmp_path / "a.txt", text)))
    assert "".join(row["text"] for _, row in rows) == text
    assert len(rows) > 3


def test_text_ending_inside_a_character_loses_that_line_only(tmp_path):
    path = write(tmp_path / "a.txt", "first\nsecond é".encode()[:-1])
    assert outcomes(read_text(path)) == [("2", "invalid_unicode"), ("1", {"text": "first\n"})]


def test_windows_line_ends_become_newlines(tmp_path):
    assert [row for _, row in read_text(write(tmp_path / "a.txt", "a\r\nb\rc\r\n"))] == [{"text": "a\nb\rc\n"}]


def test_parquet_rows_come_in_order_over_batches(tmp_path):
    table = pa.Table.from_pylist([{"n": index, "messages": ROW["messages"]} for index in range(1000)])
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=300)
    rows = list(read_parquet(tmp_path / "rows.parquet"))
    assert [row["n"] for _, row in rows] == list(range(1000))
    assert rows[999][0] == f"{tmp_path / 'rows.parquet'} row 1000"
    assert rows[7][1]["messages"] == ROW["messages"]


def test_a_column_value_that_python_cannot_hold_costs_one_row(tmp_path):
    year_20000 = 568_971_820_800
    table = pa.table({"text": ["a", "b", "c"], "date": pa.array([0, year_20000, 1], pa.timestamp("s"))})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert [row for _, row in outcomes(read_parquet(tmp_path / "rows.parquet"))][1] == "unreadable_value"
    assert [row["text"] for _, row in read_parquet(tmp_path / "rows.parquet") if isinstance(row, dict)] == ["a", "c"]


def test_arrow_text_that_is_not_utf8_costs_one_row(tmp_path):
    column = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    table = pa.table({"text": column})
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert outcomes(read_arrow(tmp_path / "rows.arrow")) == [
        ("1", {"text": "a"}),
        ("2", "invalid_unicode"),
        ("3", {"text": "c"}),
    ]


@pytest.mark.parametrize("new_writer", [pa.ipc.new_stream, pa.ipc.new_file])
def test_arrow_is_read_in_both_formats(tmp_path, new_writer):
    table = pa.Table.from_pylist([ROW, ROW])
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, new_writer(sink, table.schema) as writer:
        writer.write_table(table)
    assert [row for _, row in read_arrow(tmp_path / "rows.arrow")] == [ROW, ROW]


@pytest.mark.parametrize("read, kind", [(read_parquet, "parquet"), (read_arrow, "Arrow")])
@pytest.mark.parametrize("content", [b"", b"PAR1 nonsense", b"\x00" * 64])
def test_a_damaged_binary_file_is_one_error_that_names_it(tmp_path, read, kind, content):
    path = write(tmp_path / "rows.bin", content)
    with pytest.raises(ValueError, match=rf"rows\.bin is not a readable {kind} file"):
        list(read(path))


@pytest.mark.parametrize(
    "name, suffix", [("a.jsonl", ".jsonl"), ("a.JSON.GZ", ".json"), ("a.b.txt", ".txt"), ("a", ""), ("a.gz", "")]
)
def test_the_suffix_decides_without_gz(name, suffix):
    assert data_suffix(Path(name)) == suffix


PIECES = [
    LINE.encode(),
    b"[",
    b"]",
    b",",
    b"\n",
    b"{",
    b"}",
    b'"',
    b"\xff",
    b"\x00",
    b"\\ud800",
    b"null",
    b" ",
    b"\xef\xbb\xbf",
    b"1e999",
]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_no_content_of_a_json_file_ends_a_run(tmp_path, pieces):
    path = write(tmp_path / "rows.json", b"".join(pieces))
    list(read_json(path))
    list(read_text(path))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 400), byte=st.integers(0, 255))
@example(place=0, byte=ord("["))
@example(place=0, byte=ord("]"))
@example(place=1, byte=ord("["))
@example(place=1, byte=ord("\n"))
@example(place=0, byte=0xFF)
@example(place=len(LINE), byte=ord(" "))
def test_a_changed_byte_costs_few_rows(tmp_path, place, byte):
    lines = bytearray((LINE + "\n").encode() * 10)
    lines[place] = byte
    path = write(tmp_path / "rows.jsonl", bytes(lines))
    kept = [row for _, row in read_json(path) if row == ROW]
    assert len(kept) >= 8
