"""Commands in the documentation are ones that exist, with options that they have; pictures are those that scripts draw."""

import io
import re
import shlex
import subprocess
import sys
from argparse import ArgumentError
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from spd_lightning.data.cli import main as spd_data
from spd_lightning.inference.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), ROOT / "benchmarks" / "README.md"]
)
TOOLS = ("spd-train", "spd-data", "spd-infer", "make", "python", "torchrun", "srun", "sbatch", "pip")
LAUNCHED = ["-m", "spd_lightning.inference.cli"]


def commands(text: str) -> list[list[str]]:
    """The command lines of a page's shell blocks, joined where they go on, without comments and leading variables."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                found.append(words)
    return found


CASES = [(page, command) for page in PAGES for command in commands(page.read_text(encoding="utf-8"))]
CONFIGS = sorted(ROOT.glob("configs/*.yaml")) + sorted(ROOT.glob("benchmarks/*.yaml"))
COMMENTED = [
    (path, shlex.split(command.replace("\n#", " ").replace("\\", " "), comments=True))
    for path in CONFIGS
    for command in re.findall(r"^#   (spd-\w+ (?:.*\\\n#)*.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize(("page", "command"), CASES + COMMENTED, ids=lambda value: getattr(value, "name", None))
def test_a_command_of_the_documentation_exists(page: Path, command: list[str]) -> None:
    check(command)


def check(command: list[str]) -> None:
    """Fails where the command, a subcommand, an option or a file of the repository does not exist."""
    tool, *args = command
    if tool in ("torchrun", "srun"):
        inner = args[args.index("-m") :] if "-m" in args else args[args.index("spd-infer") :]
        check(["spd-infer", *inner[2:]] if inner[:2] == LAUNCHED else inner)
    elif tool == "spd-infer":
        build_parser().parse_args(args)
    elif tool == "spd-train":
        check_training(args)
    elif tool == "spd-data":
        known = help_of(args[0])
        assert [word for word in options(args) if f"--{word} " not in known and not word.startswith("model.")] == []
        check_keys(args)
    elif tool == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert args[0] in targets
    elif tool in ("python", "sbatch"):
        script = ROOT / args[0]
        text = script.read_text(encoding="utf-8")
        assert [word for word in options(args) if f"--{word}" not in text] == []
    else:
        assert tool in TOOLS or tool.startswith((".venv/bin/", "git", "cd", "curl", "export", "python3")), (
            f"unknown: {tool}"
        )


def options(args: list[str]) -> list[str]:
    return [word.removeprefix("--").partition("=")[0] for word in args if word.startswith("--")]


@cache
def help_of(name: str) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        spd_data([name, "--help"])
    assert ended.value.code == 0
    return printed.getvalue().replace("\n", " ").replace(",", " ")


def check_training(args: list[str]) -> None:
    name, *rest = args
    assert name in ("fit", "validate", "export", "sweep")
    if name in ("fit", "validate"):
        check_keys(rest)
    else:
        words = [word for word in rest if word.endswith(".yaml")]
        assert all((ROOT / word).is_file() for word in words)
        assert set(options(rest)) <= {"ckpt_path", "out"}


def check_keys(args: list[str]) -> None:
    """Every dotted option is a key of the complete product configuration, or of its file."""
    keys: set[str] = {"config", "ckpt_path", "help"}
    for path in [ROOT / "configs" / "pdm_n8.yaml", *(ROOT / w for w in args if w.endswith(".yaml"))]:
        assert path.is_file(), path
        keys |= set(flat(yaml.safe_load(path.read_text(encoding="utf-8"))))
    unknown = [word for word in options(args) if "." in word and word not in keys]
    assert [word for word in unknown if not word.startswith("sampling.")] == []


def flat(tree: Any, prefix: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return [prefix]
    return [prefix, *(name for key, value in tree.items() for name in flat(value, f"{prefix}.{key}".lstrip(".")))]


@pytest.mark.parametrize(
    "command",
    [
        "spd-infer generate --drafter d --prompt a --no_such_option 1",
        "spd-train fit --config configs/no_such.yaml",
        "spd-train fit --config configs/pdm_n8.yaml --model.no_such_key 1",
        "spd-data prepare --config configs/pdm_n8.yaml --no_such_option 1",
        "make no-such-target",
        "python benchmarks/train_step.py --no-such-option",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command: str) -> None:
    with pytest.raises((AssertionError, ArgumentError, FileNotFoundError)):
        check(shlex.split(command))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    here = [(page.parent / name if name else page, heading) for name, heading in links if "://" not in name]
    assert [file for file, _ in here if not file.exists()] == []
    assert [(file.name, heading) for file, heading in here if heading and heading not in headings(file)] == []


def headings(page: Path) -> set[str]:
    """What links to the page's headings are called: lower case, without punctuation, dashes for spaces."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in found}


def test_the_picture_of_the_cycles_is_what_the_schedule_gives(tmp_path: Path) -> None:
    out = tmp_path / "cycle.svg"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "draw_cycle.py"), str(out)], check=True, timeout=120)
    assert out.read_text(encoding="utf-8") == (ROOT / "docs" / "cycle.svg").read_text(encoding="utf-8")
