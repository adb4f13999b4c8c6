"""Commands of the documentation run as they stand, in a folder that has what they name, at a small size."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from spd_lightning.data.cli import main as spd_data
from spd_lightning.inference.cli import main as spd_infer
from tests.inference.eagle.setting import save_eagle_folders
from tests.inference.evaluation.test_tasks import gsm8k, write
from tests.inference.folders import save_folders
from tests.modules.published_files import published_file
from tests.test_docs import CASES, ROOT

SMALL = {
    "generate": ["--max_new_tokens", "3"],
    "chat": ["--max_new_tokens", "3"],
    "profile": ["--max_new_tokens", "8"],
    "eval": "--tasks gsm8k --task_dir tasks --num_prompts 1 --max_new_tokens 3 --max_length 160".split(),
    "plan": ["--target", "target", "--devices", "5"],
    "import": ["--target", "target"],
    "import_eagle3": ["--target", "target"],
    "push": [],
    "estimate": [],
    "prepare": [],
    "inspect": [],
    "vocab": [],
    "regenerate": ["--sampling.max_new_tokens", "3"],
}
"""Options at the end of a command, which win over those before; a command that is not here is run elsewhere."""
ELSEWHERE = ("distributed", "hf://you/pdm-n8", "targets/smollm2-135m")
"""What names ranks, the hub or a real target; other tests run those."""


def is_run(page: Path, command: list[str]) -> bool:
    is_tool = command[0] in ("spd-infer", "spd-data") and command[1] in SMALL
    return is_tool and page.parent.name != "benchmarks" and not set(ELSEWHERE) & set(command)


RUN = sorted({tuple(command) for page, command in CASES if is_run(page, command)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafters, a target, a configuration and questions where the pages have them."""
    root = tmp_path_factory.mktemp("docs")
    drafter, _ = save_folders(root, "llama")
    eagle, _ = save_eagle_folders(root, "llama")
    for name in ("runs/pdm_n8", "drafters"):
        (root / name).mkdir(parents=True)
    shutil.move(drafter, root / "runs" / "pdm_n8" / "drafter")
    spd_infer(["export_eagle3", "--drafter", eagle, "--out", str(root / "eagle3_folder")])
    torch.save(published_file("llama"), root / "published.pt")
    debug = (ROOT / "configs" / "debug.yaml").read_text(encoding="utf-8")
    (root / "configs").mkdir()
    small = debug.replace("limit: 100", "limit: 8").replace("val_rows: 16", "val_rows: 2")
    (root / "configs" / "pdm_n8.yaml").write_text(small, encoding="utf-8")
    write(root / "tasks" / "gsm8k" / "question.jsonl", gsm8k(1))
    write(root / "my_questions.jsonl", {"question_id": 1, "category": "own", "turns": ["Why?"]})
    (root / "chat.json").write_text(json.dumps([{"role": "user", "content": "Hi"}]))
    return root


@pytest.mark.parametrize("command", RUN, ids=" ".join)
def test_a_command_of_the_documentation_runs(command: tuple[str, ...], folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    tool, name, *args = command
    if "--questions" in args:
        args += [word for word in SMALL[name] if word not in ("--tasks", "gsm8k", "--task_dir", "tasks")]
    else:
        args += SMALL[name]
    {"spd-infer": spd_infer, "spd-data": spd_data}[tool]([name, *args])
    assert capsys.readouterr().out.strip(), "every command says something"
    if "--out" in args:
        assert Path(args[args.index("--out") + 1]).exists()


def test_most_pages_and_commands_are_there() -> None:
    assert {command[1] for command in RUN} == set(SMALL)
