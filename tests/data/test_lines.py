import gzip

import pytest

from spd_lightning.data.conversations import DropRow
from spd_lightning.data.lines import numbered_lines, whole_text


def lines(path, **options) -> list[tuple[int, str]]:
    return [
        (number, line.reason if isinstance(line, DropRow) else line) for number, line in numbered_lines(path, **options)
    ]


def test_lines_keep_their_newline_and_count_from_one(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"a\n\n\r\nb\rc\x0b\x0c\xe2\x80\xa8d\x00\nlast")
    assert lines(path) == [(1, "a\n"), (2, "\n"), (3, "\r\n"), (4, "b\rc\x0b\x0c\u2028d\x00\n"), (5, "last")]


def test_the_last_line_may_be_cut_inside_a_character(tmp_path):
    path = tmp_path / "a"
    path.write_bytes("a\né".encode()[:-1])
    assert lines(path) == [(1, "a\n"), (2, "invalid_unicode")]


@pytest.mark.parametrize("max_bytes", range(4, 12))
def test_pieces_of_long_lines_join_to_the_lines(tmp_path, max_bytes):
    path = tmp_path / "a"
    text = "é中😀 abcdefgh\n\n😀😀😀😀é\nend é"
    path.write_text(text)
    pieces = lines(path, max_bytes=max_bytes)
    assert "".join(piece for _, piece in pieces) == text
    assert [number for number, piece in pieces if piece.endswith("\n")] == [1, 2, 3]
    assert max(len(piece.encode()) for _, piece in pieces) <= max_bytes + 3


def test_bytes_that_are_no_text_cost_their_piece_only(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"aaaa\xff\xff\xff\xffbbbb\n\x80\xbf\n")
    assert lines(path, max_bytes=4) == [
        (1, "aaaa"),
        (1, "invalid_unicode"),
        (1, "bbbb"),
        (1, "\n"),
        (2, "invalid_unicode"),
    ]


def test_whole_text_marks_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\xef\xbb\xbfa\xffb")
    assert whole_text(path) == ("a\udcffb", None)


def test_a_cut_gzip_gives_its_beginning_and_says_so(tmp_path):
    path = tmp_path / "a.gz"
    text = "".join(f"{index * 7919 % 10007}\n" for index in range(20_000))
    packed = gzip.compress(text.encode())
    path.write_bytes(packed)
    assert whole_text(path) == (text, None)
    path.write_bytes(packed[: len(packed) // 2])
    begun, damage = whole_text(path)
    assert damage is not None
    assert damage.reason == "truncated_file"
    assert text.startswith(begun)
    assert lines(path)[-1][1] == "truncated_file"


def test_a_damaged_checksum_is_said_at_the_end(tmp_path):
    path = tmp_path / "a.gz"
    packed = bytearray(gzip.compress(b"a\nb\n"))
    packed[-6] ^= 0xFF
    path.write_bytes(packed)
    assert lines(path)[-1][1] == "truncated_file"
