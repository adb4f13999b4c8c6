import json
import sys

import datasets
import huggingface_hub
import pytest

from spd_lightning.data.conversations import Conversation, Message
from spd_lightning.data.hub import is_hub_id
from spd_lightning.data.sources import Source, iter_rows

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
DIALOGUE = Conversation((Message("user", "q"), Message("assistant", "a")))


@pytest.fixture
def loaded(monkeypatch):
    """Calls of `load_dataset`, which gives 300 rows."""
    calls = []

    def load_dataset(path, name=None, **options):
        calls.append((path, name, options))
        return datasets.Dataset.from_list([{**CHAT, "n": index} for index in range(300)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """Calls of `snapshot_download`, which gives a folder with two files."""
    calls = []
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "ShareGPT_V3_unfiltered_cleaned_split.json").write_text(json.dumps([CHAT, {"x": 1}]))
    (tmp_path / "repo" / "other.jsonl").write_text(json.dumps(CHAT) + "\nbroken\n")

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        return str(tmp_path / "repo")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


@pytest.mark.parametrize(
    "path, name, split",
    [
        ("HuggingFaceH4/ultrachat_200k", None, "train_sft"),
        ("HuggingFaceTB/smoltalk", "all", "train"),
        ("opencsg/smoltalk-chinese", None, "train"),
        ("owner/other", None, "train"),
    ],
)
def test_known_data_sets_need_no_options(loaded, path, name, split):
    rows = list(iter_rows(Source(path=path)))
    assert loaded == [(path, name, {"split": split, "revision": None})]
    assert [row.location for row in rows] == [f"{path} row {number}" for number in range(1, 301)]
    assert all(row.item == DIALOGUE for row in rows)


def test_given_options_win(loaded):
    list(iter_rows(Source(path="HuggingFaceTB/smoltalk", name="everyday", split="test", revision="v1")))
    assert loaded == [("HuggingFaceTB/smoltalk", "everyday", {"split": "test", "revision": "v1"})]


def test_sharegpt_is_fetched_as_a_file_and_read_row_by_row(fetched):
    path = "anon8231489123/ShareGPT_Vicuna_unfiltered"
    rows = list(iter_rows(Source(path=path)))
    assert fetched[0][0] == path
    assert fetched[0][1]["allow_patterns"] == ["ShareGPT_V3_unfiltered_cleaned_split.json"]
    assert [row.location for row in rows] == [f"{path}/ShareGPT_V3_unfiltered_cleaned_split.json:1"] * 2
    assert rows[0].item == DIALOGUE
    assert rows[1].drop is not None
    assert rows[1].drop.reason == "unknown_schema"


def test_data_files_choose_what_is_fetched(fetched):
    rows = list(iter_rows(Source(path="owner/name", data_files=["*.jsonl"], revision="v1")))
    assert fetched == [("owner/name", {"repo_type": "dataset", "revision": "v1", "allow_patterns": ["*.jsonl"]})]
    assert [row.location for row in rows] == ["owner/name/other.jsonl:1", "owner/name/other.jsonl:2"]
    with pytest.raises(ValueError, match=r"the hub repository has no file that matches \['absent\*'\]"):
        list(iter_rows(Source(path="owner/name", data_files="absent*")))


@pytest.mark.parametrize("options", [{}, {"data_files": "a.json"}, {"name": "all", "split": "x"}])
def test_a_hub_out_of_reach_is_one_line_with_the_way_out(options):
    with pytest.raises(ValueError) as error:
        list(iter_rows(Source(path="owner/no-such-data", **options)))
    message = str(error.value)
    assert message.startswith("source 'owner/no-such-data': no local file or folder /")
    assert message.endswith("download the data set and set `path` to the local folder or file")
    assert "\n" not in message
    assert len(message) < 500


def test_local_sources_do_not_import_the_hub_library(tmp_path):
    import subprocess

    (tmp_path / "a.jsonl").write_text(json.dumps(CHAT))
    code = (
        "import sys; from spd_lightning.data.sources import Source, iter_rows\n"
        f"assert len(list(iter_rows(Source(path={str(tmp_path / 'a.jsonl')!r})))) == 1\n"
        "print([name for name in ('datasets', 'torch', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("path", ["owner/name", "name", "Owner-1/name_2.v3"])
def test_hub_ids(path):
    assert is_hub_id(path)


@pytest.mark.parametrize(
    "path", ["a/b/c", "rows.jsonl", "dir/rows.json", "x.parquet", "", "./x", "/x", "a b", "x.txt.gz"]
)
def test_paths_are_no_hub_ids(path):
    assert not is_hub_id(path)
