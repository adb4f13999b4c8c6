"""`spd-train sweep`: trains and evaluates a list of runs one after the other, and puts them into one table.

Each run, and the evaluation of all, is a command that a user could type, in a process of its own. Knows no trainer and
no decoder.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from spd_lightning.files import write_whole
from spd_lightning.inference.evaluation.folder import load_folder
from spd_lightning.inference.evaluation.tables import NONE, number

KEYS = {"config", "out", "grid", "runs", "eval"}
RUN_FILE, EVAL_FOLDER = "sweep_run.json", "eval"
TRAIN = ("-m", "spd_lightning.cli")  # by the module's name Lightning can start further ranks
INFER = ("-m", "spd_lightning.inference.cli")


@dataclass(frozen=True)
class SweepRun:
    """One training.

    Attributes:
        name: of its folder, and in the table.
        config: configuration file.
        settings: values by dotted key of the configuration, as on the command line.
    """

    name: str
    config: str
    settings: Mapping[str, Any]

    def command(self, out: Path) -> list[str]:
        """Arguments of `spd-train`: everything is written below `out/name`; what was begun there is resumed."""
        folder = out / self.name
        args = ["fit", "--config", self.config, "--trainer.default_root_dir", str(folder)]
        args += self._logger(folder)
        for key, value in self.settings.items():
            args += [f"--{key}", as_text(value)]
        last = folder / "checkpoints" / "last.ckpt"
        return [*args, "--ckpt_path", str(last)] if last.exists() else args

    def _logger(self, folder: Path) -> list[str]:
        """Where the logger of the configuration writes, and the run's name in W&B."""
        trainer = yaml.safe_load(Path(self.config).read_text(encoding="utf-8")).get("trainer") or {}
        logger = trainer.get("logger")
        if not isinstance(logger, dict):
            return []
        args = ["--trainer.logger.init_args.save_dir", str(folder)]
        if logger["class_path"].endswith("WandbLogger"):
            args += ["--trainer.logger.init_args.name", self.name]
        return args


@dataclass(frozen=True)
class Sweep:
    """What a sweep file says.

    Attributes:
        out: folder of all runs, of the evaluation (`eval`) and of the table.
        runs: to be trained.
        evaluation: arguments of `spd-infer eval`; without any nothing is evaluated.
    """

    out: Path
    runs: tuple[SweepRun, ...]
    evaluation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Sweep":
        """The sweep of a file.

        Raises:
            ValueError: if it is no YAML of the known keys, or names no run, one twice, or no configuration.
        """
        if not path.is_file():
            raise ValueError(f"{path}: there is no sweep file here")
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
        if not isinstance(content, dict) or not content.get("out"):
            raise ValueError(f"{path}: a mapping with the keys {', '.join(sorted(KEYS))} is needed, `out` at least")
        if unknown := sorted(content.keys() - KEYS):
            raise ValueError(f"{path}: unknown key {unknown[0]!r}; known are {', '.join(sorted(KEYS))}")
        grid, named, evaluation = (content.get(key) or {} for key in ("grid", "runs", "eval"))
        for key, value in (("grid", grid), ("runs", named), ("eval", evaluation)):
            if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
                raise ValueError(f"{path}: `{key}` is {value!r}, but must be a mapping of names")
        for key, values in grid.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"{path}: grid.{key} is {values!r}, but must be a list of values")
        combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())] if grid else []
        settings = [*((run_name(combination), combination) for combination in combinations), *named.items()]
        runs: dict[str, SweepRun] = {}
        for name, given in settings:
            if name in runs:
                raise ValueError(f"{path}: two runs are named {name!r}: name them apart under `runs`")
            if name == EVAL_FOLDER or name.startswith(".") or Path(name).name != name:
                raise ValueError(f"{path}: run {name!r} is to have a folder of its name: give it another one")
            if not isinstance(given, dict | None):
                raise ValueError(f"{path}: run {name!r} is {given!r}, but must be a mapping of settings")
            values = dict(given or {})
            config = str(values.pop("config", content.get("config")))
            if not Path(config).is_file():
                raise ValueError(f"{path}: run {name!r} has no configuration file ({config} is not there)")
            runs[name] = SweepRun(name, config, values)
        if not runs:
            raise ValueError(f"{path}: there is no run: give a `grid`, `runs`, or both")
        return cls(Path(str(content["out"])), tuple(runs.values()), evaluation)


def as_text(value: Any) -> str:
    """A setting as on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def run_name(settings: Mapping[str, Any]) -> str:
    """Such as `num_stages_4,num_spec_layers_2`: usable as a folder's name."""
    parts = [f"{key.rpartition('.')[2]}_{json.dumps(value)}" for key, value in settings.items()]
    return ",".join("".join("-" if c == "," else c for c in part if c.isalnum() or c in "_-.,") for part in parts)


def train(sweep: Sweep, run: SweepRun) -> Path | None:
    """Trains one run unless that is done; its drafter folder, or none if training failed.

    Raises:
        ValueError: if its folder holds a run of other settings.
    """
    folder = sweep.out / run.name
    content = {"config": Path(run.config).read_text(encoding="utf-8"), "settings": dict(run.settings)}
    note = folder / RUN_FILE
    if note.exists() and json.loads(note.read_text(encoding="utf-8")) != content:
        raise ValueError(f"{folder} holds a run of another configuration: remove it, or give the sweep another `out`")
    folder.mkdir(parents=True, exist_ok=True)
    if not note.exists():
        write_whole(note, json.dumps(content, indent=1))
    drafter = folder / "drafter"
    if not (drafter / "config.json").exists():
        args = run.command(sweep.out)
        print(f"== {run.name}: spd-train {' '.join(args)}", flush=True)
        group = {"WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP", sweep.out.name)}
        if subprocess.run([sys.executable, *TRAIN, *args], env=os.environ | group).returncode:
            print(f"{run.name} failed; the other runs go on", file=sys.stderr, flush=True)
            return None
    return drafter


def evaluate(sweep: Sweep, drafters: Sequence[Path]) -> bool:
    """Evaluates all drafters into one folder; whether that succeeded."""
    args = ["eval", "--out", str(sweep.out / EVAL_FOLDER), "--drafter", *map(str, drafters)]
    for key, value in sweep.evaluation.items():
        values = value if isinstance(value, list) else [value]
        args += [f"--{key}", *(str(item).lower() if isinstance(item, bool) else str(item) for item in values)]
    print(f"== spd-infer {' '.join(args)}", flush=True)
    return subprocess.run([sys.executable, *INFER, *args]).returncode == 0


def to_table(sweep: Sweep, groups: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each run and temperature; `S0` of each task and pooled over them, with free drafting."""
    keys = list(dict.fromkeys(key for run in sweep.runs for key in run.settings))
    tasks = list(dict.fromkeys(group["task"] for group in groups))
    head = [
        "run",
        *keys,
        "method",
        "T",
        "p",
        "alpha",
        *(f"S0 {task}" for task in tasks),
        "adjusted S",
        "identical to AR",
    ]
    rows = []
    for run in sweep.runs:
        own = [group for group in groups if group["drafter"] == run.name]
        for temperature in dict.fromkeys(group["temperature"] for group in own):
            by_task = {group["task"]: group for group in own if group["temperature"] == temperature}
            all_tasks = by_task["overall"]
            identical = all_tasks["share_identical"]
            rows.append(
                [
                    run.name,
                    *(as_text(run.settings[key]) if key in run.settings else NONE for key in keys),
                    all_tasks["method"],
                    f"{temperature:g}",
                    number(all_tasks["p"], 3),
                    number(all_tasks["alpha"], 3),
                    *(number(by_task[task]["s0"], 2) if task in by_task else NONE for task in tasks),
                    number(all_tasks["adjusted_s"], 2),
                    NONE if identical is None else f"{identical:.1%}",
                ]
            )
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def sweep(args: Sequence[str]) -> None:
    """`spd-train sweep FILE.yaml`: resumable; ends with exit code 1 if a run or the evaluation failed.

    Raises:
        ValueError: for a file that makes no sense, before anything is trained.
    """
    parser = ArgumentParser(prog="spd-train sweep", description=__doc__, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("file", type=Path, help="YAML: config, out, grid, runs, eval (see configs/sweeps/layers.yaml)")
    what = Sweep.read(parser.parse_args(list(args)).file)
    drafters = [drafter for run in what.runs if (drafter := train(what, run)) is not None]
    has_failed = len(drafters) < len(what.runs)
    if drafters and what.evaluation:
        if evaluate(what, drafters):
            table = to_table(what, load_folder(what.out / EVAL_FOLDER).summary["groups"])
            write_whole(what.out / "sweep.md", table)
            print(f"{table}\n{what.out / 'sweep.md'} holds this; S0 assumes free drafting and communication")
        else:
            has_failed = True
    if has_failed:
        raise SystemExit(1)
