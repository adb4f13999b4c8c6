"""The import rules and file rules of the package, read from its syntax trees.

They keep the pieces separate: one file talks to `torch.distributed`, few know Lightning or Transformers' internals,
`data` and `inference` never meet, and the layout arithmetic stays free of arrays.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src" / "spd_lightning"
FILES = sorted(path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py"))

DISTRIBUTED = {"inference/runtime/distributed.py"}
# Declarations of how parameters are sharded, and reading what was saved so; Lightning's strategy does the rest.
SHARDING = ("torch.distributed.fsdp", "torch.distributed.device_mesh", "torch.distributed.checkpoint")
SHARDING_FILES = {"modules/sharding.py"}
LIGHTNING = {
    "cli.py",
    "data/datamodule.py",
    *(f"modules/{name}.py" for name in ("distillation", "lit_module", "eagle/eagle_module")),
    *(f"callbacks/{name}.py" for name in ("acceptance_report", "checkpoint", "sample_drafts", "throughput")),
}
TRANSFORMERS = {
    "modules/target.py",
    "modules/tokenizer.py",
    "inference/caches.py",
    "inference/stage_loading.py",  # builds a stage of Transformers' layers from the files that hold them
    "inference/evaluation/compiled.py",  # the static cache of the compiled baseline
    "modules/target_files.py",  # finds a target's files in the hub's cache
    "modules/tiny_target.py",  # tiny random targets of every family, made from the public configuration classes
    "data/embedded_target.py",  # turns one pinned GGUF file into a folder, once, without knowing the model inside
}
# The public base type of all tokenizers may be named in annotations anywhere.
TOKENIZER_TYPE = "transformers.PreTrainedTokenizerBase"
TRAINING = [f"spd_lightning.modules.{name}" for name in ("distillation", "lit_module", "eagle.eagle_module")]
NO_ARRAYS = {"modules/features.py", "modules/partition.py", "inference/schedule.py"}
HEAVY = ("torch", "lightning", "transformers", "datasets", "numpy", "pyarrow", "wandb", "jsonargparse")
MAX_LINES = 300
LONGER_FILES: dict[str, str] = {}  # file: why it is one piece


@dataclass(frozen=True)
class Import:
    """One imported module or name, absolute and dotted."""

    file: str
    line: int
    name: str
    for_types_only: bool

    def is_of(self, package: str) -> bool:
        return self.name == package or self.name.startswith(package + ".")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.name}"


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((SRC / file).read_text(encoding="utf-8"))


def imports_in(node: ast.AST, file: str, for_types_only: bool = False) -> Iterator[Import]:
    """All imports below `node`, those inside functions as well, and `torch.distributed` reached through `torch`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(file, child.lineno, alias.name, for_types_only)
        elif isinstance(child, ast.ImportFrom):
            base = absolute(file, child)
            for alias in child.names:
                yield Import(file, child.lineno, f"{base}.{alias.name}", for_types_only)
        elif isinstance(child, ast.Attribute) and ast.unparse(child) == "torch.distributed":
            yield Import(file, child.lineno, "torch.distributed", for_types_only)
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in child.body:
                yield from imports_in(ast.Module([statement], []), file, for_types_only=True)
            for statement in child.orelse:
                yield from imports_in(ast.Module([statement], []), file, for_types_only)
        else:
            yield from imports_in(child, file, for_types_only)


def absolute(file: str, node: ast.ImportFrom) -> str:
    """The module that `from ... import` names, relative ones resolved."""
    if not node.level:
        return node.module or ""
    package = ["spd_lightning", *Path(file).parent.parts]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


ALL_IMPORTS = [entry for file in FILES for entry in imports_in(tree(file), file)]


def offenders(package: str, allowed: set[str]) -> list[str]:
    return [str(entry) for entry in ALL_IMPORTS if entry.is_of(package) and entry.file not in allowed]


def imports_between(part: str, *others: str) -> list[str]:
    return [
        str(entry)
        for entry in ALL_IMPORTS
        if entry.file.startswith(f"{part}/") and any(entry.is_of(f"spd_lightning.{other}") for other in others)
    ]


def test_the_import_reader_sees_every_form() -> None:
    source = (
        "import torch.distributed as dist\n"
        "def f():\n    from ..data import rows\n    torch.distributed.barrier()\n"
        "if TYPE_CHECKING:\n    from transformers import PreTrainedTokenizerBase\nelse:\n    import lightning\n"
    )
    found = [(e.line, e.name, e.for_types_only) for e in imports_in(ast.parse(source), "modules/x.py")]
    assert found == [
        (1, "torch.distributed", False),
        (3, "spd_lightning.data.rows", False),
        (4, "torch.distributed", False),
        (6, "transformers.PreTrainedTokenizerBase", True),
        (8, "lightning", False),
    ]
    assert len(FILES) > 10


def test_torch_distributed_is_used_in_one_file() -> None:
    used = [
        str(entry)
        for entry in ALL_IMPORTS
        if entry.is_of("torch.distributed")
        and entry.file not in DISTRIBUTED
        and not (entry.file in SHARDING_FILES and any(entry.is_of(package) for package in SHARDING))
    ]
    assert used == []


def test_lightning_is_known_in_few_files() -> None:
    assert offenders("lightning", LIGHTNING) == []
    assert offenders("pytorch_lightning", set()) == []


def test_transformers_is_known_in_few_files() -> None:
    used = [
        str(entry)
        for entry in ALL_IMPORTS
        if entry.is_of("transformers") and entry.file not in TRANSFORMERS and entry.name != TOKENIZER_TYPE
    ]
    assert used == []


def test_data_and_inference_never_meet_and_modules_know_neither() -> None:
    assert imports_between("data", "inference") == []
    assert imports_between("inference", "data") == []
    assert imports_between("modules", "data", "inference", "cli", "callbacks") == []


def test_inference_knows_no_training() -> None:
    """Benchmark questions may come from the hub: one function of one file imports `datasets` when it is asked to."""
    wanted = [
        str(entry)
        for entry in ALL_IMPORTS
        if entry.file.startswith("inference/")
        and any(entry.is_of(name) for name in ("lightning", "datasets", *TRAINING))
        and not (entry.file == "inference/evaluation/tasks.py" and entry.is_of("datasets"))
    ]
    assert wanted == []


def test_layout_arithmetic_knows_no_arrays() -> None:
    standard = sys.stdlib_module_names
    own = tuple("spd_lightning." + file.removesuffix(".py").replace("/", ".") for file in NO_ARRAYS)
    strange = [
        str(entry)
        for entry in ALL_IMPORTS
        if entry.file in NO_ARRAYS and entry.name.split(".")[0] not in standard and not entry.name.startswith(own)
    ]
    assert strange == []


def test_importing_the_package_is_cheap() -> None:
    code = f"import sys, spd_lightning; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


@pytest.mark.parametrize("file", FILES)
def test_file_is_small_named_for_what_it_holds_and_says_what_it_does(file: str) -> None:
    words = set(Path(file).stem.split("_"))
    assert not words & {"util", "utils", "common", "helper", "helpers", "misc"}, f"{file}: name the missing noun"
    text = (SRC / file).read_text(encoding="utf-8")
    if text.strip():
        assert ast.get_docstring(tree(file)), f"{file} has no docstring that says what it does"
    num_lines = text.count("\n")
    assert num_lines <= MAX_LINES or file in LONGER_FILES, f"{file} has {num_lines} lines: look for the second noun"


def test_the_readme_names_every_file() -> None:
    tree_of_files = (SRC.parents[1] / "README.md").read_text(encoding="utf-8").split("## The files")[1]
    unnamed = [file for file in FILES if f" {Path(file).name} " not in tree_of_files and "__init__" not in file]
    assert unnamed == []


def test_exceptions_name_files_that_need_them() -> None:
    for file in LONGER_FILES:
        assert (SRC / file).read_text(encoding="utf-8").count("\n") > MAX_LINES, f"{file} is short enough now"
