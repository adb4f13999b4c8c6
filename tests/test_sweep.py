"""`spd-train sweep`: what a file says, and a sweep of real runs that is stopped, resumed and partly fails."""

import json
from pathlib import Path

import pytest
import yaml

from spd_lightning.cli import main
from spd_lightning.sweep import Sweep, SweepRun, run_name, to_table

REPO = Path(__file__).resolve().parents[1]
DEBUG = str(REPO / "configs" / "debug.yaml")
TWO_RANKS = {"model.anchors": [0, 4], "model.rows": "shared", "trainer.devices": 2, "trainer.strategy": "ddp"}


def write(path: Path, **content) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_grid_is_every_combination_and_runs_come_after_it(tmp_path: Path) -> None:
    grid = {"model.num_spec_layers": [1, 2], "model.rows": ["exact", "shared"]}
    runs = {
        "coarse": {"model.anchors": [0, 4]},
        "other": {"config": str(REPO / "configs" / "pdm_n4.yaml")},
        "same": None,
    }
    read = Sweep.read(write(tmp_path / "s.yaml", config=DEBUG, out="o", grid=grid, runs=runs))
    assert [(run.name, dict(run.settings)) for run in read.runs] == [
        ("num_spec_layers_1,rows_exact", {"model.num_spec_layers": 1, "model.rows": "exact"}),
        ("num_spec_layers_1,rows_shared", {"model.num_spec_layers": 1, "model.rows": "shared"}),
        ("num_spec_layers_2,rows_exact", {"model.num_spec_layers": 2, "model.rows": "exact"}),
        ("num_spec_layers_2,rows_shared", {"model.num_spec_layers": 2, "model.rows": "shared"}),
        ("coarse", {"model.anchors": [0, 4]}),
        ("other", {}),
        ("same", {}),
    ]
    assert {Path(run.config).stem for run in read.runs} == {"debug", "pdm_n4"}
    assert run_name({"model.anchors": [0, 10], "trainer.default": "a/b"}) == "anchors_0-10,default_ab"
    assert run_name({"a": [1, 11]}) != run_name({"a": [11, 1]})


def test_a_run_is_a_command_that_writes_below_the_sweep_and_resumes(tmp_path: Path) -> None:
    run = SweepRun("deep", str(REPO / "configs" / "pdm_n8.yaml"), {"model.anchors": [0, 4], "model.rows": "exact"})
    folder = str(tmp_path / "deep")
    args = run.command(tmp_path)
    assert args[:5] == ["fit", "--config", run.config, "--trainer.default_root_dir", folder]
    assert args[5:9] == ["--trainer.logger.init_args.save_dir", folder, "--trainer.logger.init_args.name", "deep"]
    assert args[9:] == ["--model.anchors", "[0, 4]", "--model.rows", "exact"]
    last = tmp_path / "deep" / "checkpoints" / "last.ckpt"
    last.parent.mkdir(parents=True)
    last.touch()
    assert run.command(tmp_path)[-2:] == ["--ckpt_path", str(last)]


def test_the_sweeps_of_the_repository_can_be_read(monkeypatch) -> None:
    monkeypatch.chdir(REPO)
    for path in (REPO / "configs" / "sweeps").glob("*.yaml"):
        assert len(Sweep.read(path).runs) == 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"out": "o"}, "there is no run"),
        ({"out": "o", "grit": {}}, "unknown key 'grit'"),
        ({"grid": {}}, "`out` at least"),
        ({"out": "o", "config": DEBUG, "grid": {"model.lr": 1}}, "grid.model.lr is 1, but must be a list"),
        ({"out": "o", "config": DEBUG, "grid": {"a.b": [1]}, "runs": {"b_1": {}}}, "two runs are named 'b_1'"),
        ({"out": "o", "config": "/no/such.yaml", "grid": {"a.b": [1]}}, "no configuration file (/no/such.yaml"),
        ({"out": "o", "runs": {"one": {}}}, "run 'one' has no configuration file"),
        ({"out": "o", "config": 5, "runs": {"one": {}}}, "run 'one' has no configuration file (5 is not there)"),
        ({"out": "o", "config": DEBUG, "runs": {"eval": {}}}, "run 'eval' is to have a folder of its name"),
        ({"out": "o", "config": DEBUG, "runs": {"../x": {}}}, "run '../x' is to have a folder of its name"),
        ({"out": "o", "config": DEBUG, "runs": {"a": 3}}, "run 'a' is 3, but must be a mapping of settings"),
        ({"out": "o", "config": DEBUG, "runs": ["a"]}, "`runs` is ['a'], but must be a mapping of names"),
        ({"out": "o", "config": DEBUG, "grid": [1]}, "`grid` is [1], but must be a mapping of names"),
        ({"out": "", "config": DEBUG, "runs": {"a": {}}}, "`out` at least"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_line(content: dict, message: str, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["sweep", str(write(tmp_path / "sweep.yaml", **content))])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_runs_are_trained_evaluated_and_kept(tmp_path: Path, capfd) -> None:
    """One run fails, which stops neither the others nor their evaluation; a second start trains nothing again."""
    questions = tmp_path / "own.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "x", "turns": ["What is 2 + 2?"]}) + "\n")
    content = {
        "config": DEBUG,
        "out": str(tmp_path / "out"),
        "grid": {"model.num_spec_layers": [1]},
        "runs": {"broken": {"model.num_stages": 99}, "shared": TWO_RANKS},
        "eval": {
            "questions": str(questions), "max_new_tokens": 8, "max_length": 128, "temperature": [0, 1], "seed": 1,
            "check_lossless": True,
        },
    }  # fmt: skip
    file = write(tmp_path / "sweep.yaml", **content)
    with pytest.raises(SystemExit) as raised:
        main(["sweep", str(file)])
    assert raised.value.code == 1
    printed = capfd.readouterr()
    assert "99" in printed.err and "broken failed; the other runs go on" in printed.err
    lines = (tmp_path / "out" / "sweep.md").read_text().splitlines()
    assert lines[0].startswith(
        "| run | model.num_spec_layers | model.num_stages | model.anchors | model.rows | trainer.devices "
        "| trainer.strategy | method | T |"
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [(row[0], row[8]) for row in rows] == [
        ("num_spec_layers_1", "0"), ("num_spec_layers_1", "1"), ("shared", "0"), ("shared", "1")
    ]  # fmt: skip
    assert rows[0][1:8] == ["1", *"-----", "spd"] and rows[2][3:7] == ["[0, 4]", "shared", "2", "ddp"]
    assert [row[-1] for row in rows] == ["100.0%", "-", "100.0%", "-"]

    weights = [tmp_path / "out" / name / "drafter" / "drafter.safetensors" for name in ("num_spec_layers_1", "shared")]
    made = [path.stat().st_mtime_ns for path in weights]
    del content["runs"]["broken"]
    write(file, **content)
    main(["sweep", str(file)])
    assert [path.stat().st_mtime_ns for path in weights] == made
    assert "spd-train fit" not in capfd.readouterr().out

    content["grid"] = {"model.num_spec_layers": [1]}
    content["runs"] = {"shared": {"model.anchors": [0, 6]}}
    write(file, **content)
    with pytest.raises(SystemExit):
        main(["sweep", str(file)])
    assert "holds a run of another configuration" in capfd.readouterr().err


def test_tasks_have_columns_and_what_a_run_lacks_is_a_dash() -> None:
    runs = (SweepRun("one", DEBUG, {"model.lr": 0.1}), SweepRun("two", DEBUG, {}))
    group = {
        "method": "spd", "drafter": "one", "temperature": 0.0, "p": 0.5, "alpha": 0.25, "s0": 1.0, "adjusted_s": 1.0,
        "share_identical": None,
    }  # fmt: skip
    groups = [group | {"task": task, "s0": s0} for task, s0 in (("gsm8k", 1.5), ("overall", 1.25))]
    lines = to_table(Sweep(Path("o"), runs), groups).splitlines()
    assert lines[0] == (
        "| run | model.lr | method | T | p | alpha | S0 gsm8k | S0 overall | adjusted S | identical to AR |"
    )
    assert lines[2:] == ["| one | 0.1 | spd | 0 | 0.500 | 0.250 | 1.50 | 1.25 | 1.00 | - |"]
