"""`spd-infer push` and hub ids in place of drafter folders, with a hub that lives in this process."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

from spd_lightning.inference.cli import main
from spd_lightning.modules.checkpoint import load_drafter
from tests.inference.eagle.setting import save_eagle_folders
from tests.inference.folders import save_folders

FILES = {"README.md", "config.json", "drafter.safetensors"}


class FakeHub:
    """Repositories as dictionaries of files, and the calls that were made."""

    def __init__(self, root: Path) -> None:
        self.root, self.private, self.downloads = root, {}, []

    def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> None:
        assert exist_ok
        self.private[repo_id] = private

    def upload_folder(self, repo_id: str, folder_path: Path, allow_patterns: list[str], commit_message: str) -> str:
        folder = self.root / repo_id
        folder.mkdir(parents=True, exist_ok=True)
        for path in Path(folder_path).iterdir():
            if path.name in allow_patterns:
                (folder / path.name).write_bytes(path.read_bytes())
        return f"https://hub/{repo_id}"

    def snapshot_download(self, repo: str, revision: str | None, allow_patterns: list[str]) -> str:
        self.downloads.append((repo, revision))
        if not (self.root / repo).is_dir():
            raise OSError(f"Repository Not Found for {repo}. Please make sure of many things.")
        return str(self.root / repo)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("push")
    save_folders(root, "llama", name="pdm")
    save_eagle_folders(root, "llama")
    (root / "own.jsonl").write_text(json.dumps({"question_id": "one", "category": "short", "turns": ["Hello"]}) + "\n")
    return root


@pytest.fixture
def folder(root: Path, tmp_path: Path) -> Path:
    """A copy of the PDM's folder, to which a card may be added."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "drafter.safetensors"):
        (copy / name).write_bytes((root / "pdm" / name).read_bytes())
    return copy


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def front_matter(card: str) -> dict[str, Any]:
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)


@pytest.mark.parametrize("name", ["pdm", "eagle"])
def test_a_pushed_drafter_decodes_by_its_hub_id(name: str, root: Path, hub: FakeHub, tmp_path: Path, capsys) -> None:
    main(["push", str(root / name), f"someone/{name}", "--private", "true", "--new_card", "true"])
    assert f"uploaded: https://hub/someone/{name}" in capsys.readouterr().out
    assert {path.name for path in (hub.root / "someone" / name).iterdir()} == FILES
    assert hub.private == {f"someone/{name}": True}
    own, loaded = load_drafter(root / name), load_drafter(f"hf://someone/{name}@v2")
    assert loaded.record == own.record and hub.downloads == [(f"someone/{name}", "v2")]
    for id_ in (f"hf://someone/{name}", f"someone/{name}"):
        main(["generate", "--drafter", id_, "--prompt", "Hi", "--max_new_tokens", "4", "--compare_ar", "true"])
        assert "identical to plain decoding" in capsys.readouterr().err


def test_every_other_command_takes_hub_ids(root: Path, hub: FakeHub, tmp_path: Path, capsys) -> None:
    main(["push", str(root / "pdm"), "someone/pdm"])
    main(["plan", "--drafter", "hf://someone/pdm"])
    main(["profile", "--drafter", "hf://someone/pdm", "--prompt", "Hi", "--max_new_tokens", "4"])
    evaluation = ["eval", "--drafter", "hf://someone/pdm", "--questions", str(root / "own.jsonl")]
    main([*evaluation, "--out", str(tmp_path / "eval"), "--max_new_tokens", "4", "--max_length", "100"])
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert {group["drafter"] for group in summary["groups"]} == {None, "pdm"}


def test_a_dry_run_writes_the_card_and_uploads_nothing(
    root: Path, folder: Path, hub: FakeHub, tmp_path, capsys
) -> None:
    evaluation = ["eval", "--drafter", str(root / "pdm"), "--questions", str(root / "own.jsonl")]
    main([*evaluation, "--out", str(tmp_path / "eval"), "--max_new_tokens", "4", "--max_length", "100"])
    command = ["push", str(folder), "someone/pdm", "--dry_run", "true", "--licence", "other: with | a bar"]
    main([*command, "--eval", str(tmp_path / "eval")])
    printed = capsys.readouterr().out
    assert all(f"{name}  " in printed for name in FILES) and "nothing was uploaded" in printed
    assert hub.private == {} and not hub.root.exists()
    card = (folder / "README.md").read_text()
    assert front_matter(card) == {
        "library_name": "spd-lightning",
        "tags": ["speculative-decoding", "spd-lightning", "spd"],
        "license": "other: with | a bar",
    }
    for part in ("## Target", "## Method", "## Data", "## Metrics", "## Limits", "## Licence"):
        assert f"\n{part}\n" in card
    assert "spd-infer generate --drafter hf://someone/pdm" in card
    assert "spd-infer eval --drafter" in card and "### " in card  # the figures, and the command that gave them
    assert "| stage_layers | `[2, 2, 2, 2]` |" in card
    main([*command, "--eval", str(tmp_path / "eval")])  # the same card once more
    with pytest.raises(SystemExit):
        main(command)
    assert "says something else: --new_card true" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # of another drafter
        main(["push", str(root / "eagle"), "someone/eagle", "--eval", str(tmp_path / "eval")])
    assert "it was made with other drafters than" in capsys.readouterr().err


def test_a_card_that_is_there_is_kept_unless_a_new_one_is_asked_for(folder: Path, hub: FakeHub, capsys) -> None:
    (folder / "README.md").write_text("mine")
    main(["push", str(folder), "someone/pdm"])
    assert "left as it is" in capsys.readouterr().out
    assert (hub.root / "someone" / "pdm" / "README.md").read_text() == "mine"
    main(["push", str(folder), "someone/pdm", "--new_card", "true"])
    card = (hub.root / "someone" / "pdm" / "README.md").read_text()
    assert "Not stated by who uploaded this." in card and "license" not in front_matter(card)
    assert "None were measured." in card


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["push", "FOLDER", "someone/pdm"], "nothing was uploaded to someone/pdm: "),  # HF_HUB_OFFLINE in tests
        (["push", "FOLDER", "nameless"], "a hub id, owner/name, is needed"),
        (["push", "FOLDER", "some--one/pdm"], "Cannot have -- or .."),
        (["push", "FOLDER", "someone/ö"], "repo='someone/ö'"),
        (["push", "FOLDER/absent", "someone/pdm"], "there is no such folder"),
        (["push", "FOLDER", "someone/pdm", "--eval", "FOLDER"], "not a finished `spd-infer eval --out`"),
        (
            ["generate", "--prompt", "x", "--drafter", "hf://someone/absent"],
            "someone/absent could not be read from the hub",
        ),
        (
            ["generate", "--prompt", "x", "--drafter", "someone/absent"],
            "no drafter here (there is no such local folder)",
        ),
        (["plan", "--drafter", "someone/absent"], "someone/absent could not be read from the hub"),
    ],
)
def test_without_a_network_and_with_mistakes_there_is_one_line(
    command: list[str], message: str, folder: Path, capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([part.replace("FOLDER", str(folder)) for part in command])
    assert ended.value.code == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and message in errors[0]


def test_a_damaged_drafter_is_not_pushed(folder: Path, hub: FakeHub, capsys) -> None:
    (folder / "drafter.safetensors").write_bytes(b"cut")
    with pytest.raises(SystemExit):
        main(["push", str(folder), "someone/pdm"])
    assert "not a readable safetensors file" in capsys.readouterr().err and hub.private == {}
