import pytest

from spd_lightning.data import fingerprint
from spd_lightning.data.fingerprint import hub_revision, source_fingerprint
from spd_lightning.data.sources import Source


@pytest.fixture
def folder(tmp_path):
    for name, text in (("a.jsonl", '{"text": "one"}\n'), ("b.jsonl", '{"text": "two"}\n')):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_one_changed_byte_in_any_file_is_seen(folder):
    before = source_fingerprint(Source(str(folder)))
    (folder / "b.jsonl").write_text('{"text": "twO"}\n')
    assert source_fingerprint(Source(str(folder))) != before


def test_order_and_bounds_of_files_matter(folder):
    before = source_fingerprint(Source(str(folder)))
    (folder / "a.jsonl").rename(folder / "c.jsonl")
    assert source_fingerprint(Source(str(folder))) != before
    (folder / "b.jsonl").write_text((folder / "b.jsonl").read_text() + (folder / "c.jsonl").read_text())
    (folder / "c.jsonl").write_text("")
    assert source_fingerprint(Source(str(folder))) != before


def test_suffix_matters_as_it_chooses_the_reader(tmp_path):
    prints = []
    for suffix in ("jsonl", "txt"):
        path = tmp_path / f"rows.{suffix}"
        path.write_text('{"text": "one"}\n')
        prints.append(source_fingerprint(Source(str(path))))
    assert prints[0] != prints[1]


def test_python_docs_belong_to_a_version_of_python(monkeypatch):
    before = source_fingerprint(Source("python-docs"))
    assert source_fingerprint(Source("python-docs")) == before
    monkeypatch.setattr(fingerprint.sys, "version", "4.0")
    assert source_fingerprint(Source("python-docs")) != before


def test_revision_of_a_hub_data_set_is_that_of_the_local_copy_without_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="set `path` to the local folder or file") as error:
        hub_revision("owner/chats", None)
    assert "\n" not in str(error.value)
    references = tmp_path / "datasets--owner--chats" / "refs"
    references.mkdir(parents=True)
    (references / "main").write_text("abc123")
    (references / "v2").write_text("def456")
    (tmp_path / "datasets--owner--chats" / "snapshots" / "abc123").mkdir(parents=True)
    assert hub_revision("owner/chats", None) == "abc123"
    assert hub_revision("owner/chats", "v2") == "def456"
    assert hub_revision("owner/chats", "abc123") == "abc123"
    with pytest.raises(ValueError, match="owner/chats"):
        hub_revision("owner/chats", "v3")
    main, other = (source_fingerprint(Source("owner/chats", revision=revision)) for revision in (None, "v2"))
    assert main != other


def test_missing_source_is_named():
    with pytest.raises(ValueError, match="/absent/rows"):
        source_fingerprint(Source("/absent/rows.jsonl"))
