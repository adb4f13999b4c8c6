"""The notebooks run as they are, are committed without outputs; offline W&B runs become the table that one reads."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "notebooks" / "figures.ipynb"
WALK = ROOT / "notebooks" / "01_train_and_decode.ipynb"
MAX_DATA_BYTES = 300_000


def execute(notebook: nbformat.NotebookNode, folder: Path, kernels: Path) -> None:
    """Runs all cells in place, in a kernel of the interpreter that runs this."""
    write_kernel_spec(kernels / "python3")
    specs = KernelSpecManager(kernel_dirs=[str(kernels)])
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
    client = NotebookClient(
        notebook, km=manager, startup_timeout=120, timeout=240, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(cleanup_kc=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_the_notebook_draws_three_figures(tmp_path: Path) -> None:
    folder = tmp_path / "notebooks"
    shutil.copytree(NOTEBOOK.parent, folder)
    notebook = nbformat.read(folder / NOTEBOOK.name, as_version=4)
    execute(notebook, folder, tmp_path / "kernels")
    outputs = outputs_of(notebook)
    assert count_pictures(outputs) == 3
    assert [output.text for output in outputs if output.output_type == "stream"] == []


def test_the_walk_trains_a_drafter_and_decodes_with_it(tmp_path: Path) -> None:
    for name in ("notebooks", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    notebook = nbformat.read(WALK, as_version=4)
    execute(notebook, tmp_path / "notebooks", tmp_path / "kernels")
    outputs = outputs_of(notebook)
    assert count_pictures(outputs) == 2
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "47 tokens in" in printed and "the tokens of plain decoding: yes" in printed
    assert (tmp_path / "runs" / "first" / "drafter" / "config.json").is_file()


def outputs_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def count_pictures(outputs: list[nbformat.NotebookNode]) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", [NOTEBOOK, WALK], ids=lambda path: path.name)
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)


def test_the_recorded_data_are_small_and_name_no_machine() -> None:
    files = [path for path in (NOTEBOOK.parent / "data").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_DATA_BYTES
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not [root for root in ("/tmp/", "/home/", "/root/", "/Users/", str(ROOT)) if root in text], path


RUN = """
import wandb
for name, layers in (("one", 1), ("two", 2)):
    config = {"num_spec_layers": layers, "config": {"model": {"anchors": [0, 3], "rope_theta": None}, "text": "x" * 70_000}}
    with wandb.init(project="p", name=name, config=config, tags=["a", "b"]) as run:
        run.log({"val/p": 0.1 * layers, "loss": 3.0})
        run.log({"val/p": 0.25 * layers})
"""


def table_of(runs: list[Path], out: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(ROOT / "benchmarks" / "wandb_offline_csv.py"), "--out", str(out), *map(str, runs)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_offline_runs_become_the_table_that_wandb_exports(tmp_path: Path) -> None:
    """The last values of real runs, whose configuration is longer than a block of the file that holds it."""
    variables = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", RUN], env=os.environ | variables, check=True, timeout=240)
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    done = table_of(runs, tmp_path / "runs.csv")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "runs.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"one", "two"}
    for name, layers in (("one", 1), ("two", 2)):
        row = rows[name]
        assert (row["State"], row["Tags"], row["num_spec_layers"]) == ("finished", "a, b", str(layers))
        assert (row["config.model.anchors"], row["config.model.rope_theta"]) == ("[0, 3]", "")
        assert row["config.text"] == "x" * 70_000
        assert (float(row["val/p"]), float(row["loss"])) == (0.25 * layers, 3.0)
        assert not [column for column in row if column.startswith("_")]

    [log] = runs[0].glob("*.wandb")
    log.write_bytes(log.read_bytes()[:-20])  # as a run that was killed leaves it
    assert table_of(runs[:1], tmp_path / "runs.csv").returncode == 0
    assert "crashed" in (tmp_path / "runs.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "holds 0 .wandb files"), (b"PK\3\4 1234", "is not the log of")]
)
def test_what_is_no_offline_run_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "run.wandb").write_bytes(content)
    done = table_of([tmp_path], tmp_path / "runs.csv")
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "runs.csv").exists()
