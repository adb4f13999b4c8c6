from spd_lightning.data import python_docs
from spd_lightning.data.python_docs import python_docs_rows
from spd_lightning.data.rows import PlainText
from spd_lightning.data.sources import Source, iter_rows, resolve_files


def test_every_python_has_a_large_corpus_in_a_fixed_order():
    rows = list(python_docs_rows())
    texts = {location.removeprefix("python-docs "): row["text"] for location, row in rows}
    topics = [location for location in texts if location.startswith("topic ")]
    modules = [location for location in texts if not location.startswith("topic ")]
    assert [*sorted(topics), *sorted(modules, key=lambda name: name.split("/"))] == list(texts)
    assert len(texts) == len(rows)
    assert sum(map(len, texts.values())) > 1_000_000
    assert "assert_stmt" in texts["topic assert"]
    assert "JSON (JavaScript Object Notation)" in texts["json/__init__.py"]
    assert all(text.strip() and text.endswith("\n") for text in texts.values())


def test_modules_are_parsed_and_never_run(tmp_path):
    (tmp_path / "b.py").write_text(
        '"""Module."""\nraise SystemExit\ndef f():\n    "Function."\nclass C:\n    """Class."""\n'
    )
    (tmp_path / "broken.py").write_text('"""Not Python."""\ndef (:\n')
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text('"""A test."""\n')
    assert list(python_docs._module_docstrings(tmp_path)) == [("b.py", "Module.\n\nFunction.\n\nClass.\n")]


def test_it_is_a_source_by_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = list(iter_rows(Source(path="python-docs", limit=3)))
    assert [row.location.startswith("python-docs topic ") for row in rows] == [True] * 3
    assert all(isinstance(row.item, PlainText) for row in rows)
    assert resolve_files(Source(path="python-docs")) == ()
    (tmp_path / "python-docs").mkdir()
    (tmp_path / "python-docs" / "a.txt").write_text("a local folder wins\n")
    assert [row.item for row in iter_rows(Source(path="python-docs"))] == [PlainText("a local folder wins\n")]
