"""`spd-infer --runtime distributed` as users start it: its answers, their mistakes, a killed rank, Ctrl-C."""

import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spd_lightning.inference.cli import main
from spd_lightning.inference.decoder import PipelineDecoder
from spd_lightning.inference.sampling import SamplingParams
from spd_lightning.modules.checkpoint import drafter_record, save_drafter
from spd_lightning.modules.draft_vocab import DraftVocab
from spd_lightning.modules.features import FeatureLayout
from spd_lightning.modules.target import read_target_shape
from spd_lightning.modules.tiny_target import save_tiny_target
from spd_lightning.modules.tokenizer import load_tokenizer, tokenizer_record
from tests.modules.conftest import make_drafter

PROMPT = "Hello"
NUM_STAGES, NUM_LAYERS, END_OF_TURN = 2, 8, 258
LIMIT = 280.0
"""Seconds after which a command hangs; its imports alone take many on a machine that does other things as well."""

pytestmark = pytest.mark.timeout(600)
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")


@dataclass(frozen=True)
class Folders:
    drafter: str
    target: str
    without_first: str
    without_last: str


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A target in several files that never ends a turn, a drafter for it, and the target with files missing."""
    root = tmp_path_factory.mktemp("commands")
    target = save_tiny_target(root / "target", "qwen3_5", NUM_LAYERS)
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        model.lm_head.weight[END_OF_TURN] = 0.0  # of hundreds of other logits, one is above 0
    (target / "model.safetensors").unlink()
    model.save_pretrained(target, max_shard_size="60KB")
    files = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    incomplete = []
    for layers in (range(NUM_LAYERS // 2), range(NUM_LAYERS // 2, NUM_LAYERS)):
        prefixes = tuple(f"model.layers.{layer}." for layer in layers)
        needed_by_others = {file for weight, file in files.items() if not weight.startswith(prefixes)}
        folder = shutil.copytree(target, root / f"without_layers_from_{layers[0]}")
        (folder / min(set(files.values()) - needed_by_others)).unlink()
        incomplete.append(str(folder))

    drafter = make_drafter(FeatureLayout.build(NUM_LAYERS, NUM_STAGES), torch.float32)
    record = drafter_record(
        drafter.config,
        target_name=str(target),
        target=read_target_shape(str(target)),
        tokenizer=tokenizer_record(load_tokenizer(str(target)), [END_OF_TURN]),
        draft_vocab=DraftVocab(tuple(drafter.draft_token_ids.tolist())),
        metrics={},
    )
    save_drafter(root / "drafter", drafter.state_dict(), record)
    return Folders(str(root / "drafter"), str(target), *incomplete)


class Command:
    """A command of `spd-infer` as processes that are all marked by a variable of their environment.

    Args:
        name: of the command, with what only it takes.
        drafter: a drafter folder.
        args: further arguments.
        launcher: module and arguments of what starts the ranks; the command itself when absent.
        folder: for what it prints.
    """

    def __init__(
        self, name: tuple[str, ...], drafter: str, args: tuple[str, ...], launcher: tuple[str, ...], folder: Path
    ) -> None:
        self.mark = f"SPD_TEST_MARK={uuid.uuid4().hex}"
        variable, value = self.mark.split("=")
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
        self.errors = folder / f"{value}.txt"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "spd_lightning.inference.cli", *name]
                + ["--runtime", "distributed", "--drafter", drafter, "--timeout", "60", *args],
                env=os.environ | threads | {variable: value},
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def living(self) -> dict[int, str | None]:
        """Its processes that are left, by process id: of a rank its number."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if self.mark in environment:
                ranks = [entry.removeprefix("RANK=") for entry in environment if entry.startswith("RANK=")]
                found[int(folder.name)] = ranks[0] if ranks else None
        return found

    def wait_for_text(self) -> None:
        """Returns when the first of the answer has been printed."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT)
        assert ready and os.read(self.process.stdout.fileno(), 1), self.errors.read_text()

    def end(self) -> tuple[int, str, list[str]]:
        """Its exit code, and what it printed: to stdout, and lines to stderr, the libraries' notes left out."""
        printed, _ = self.process.communicate(timeout=LIMIT)
        lines = self.errors.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.strip() and not line.startswith("[transformers]")]
        return self.process.returncode, printed.decode(errors="replace"), said

    def has_left(self) -> bool:
        """Whether all of its processes are gone soon."""
        deadline = time.monotonic() + 20
        while self.living():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


Spawn = Callable[..., Command]


@pytest.fixture
def spawn(folders: Folders, tmp_path: Path) -> Iterator[Spawn]:
    commands: list[Command] = []

    def spawn(
        *args: str, name: tuple[str, ...] = ("generate", "--prompt", PROMPT), launcher: tuple[str, ...] = ()
    ) -> Command:
        commands.append(Command(name, folders.drafter, args, launcher, tmp_path))
        return commands[-1]

    yield spawn
    for command in commands:
        command.process.kill()
        command.process.wait()
        for process in command.living():
            os.kill(process, signal.SIGKILL)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(NUM_STAGES + 1))


@pytest.mark.parametrize(
    ("params", "launcher"),
    [
        (SamplingParams(24), ()),
        (SamplingParams(24, 0.9, 30, 0.95, seed=2**53 + 1, verify="coupled"), TORCHRUN),
    ],
    ids=["greedy, started by itself", "coupled, started by torchrun"],
)
def test_the_answer_is_that_of_one_process(
    params: SamplingParams, launcher: tuple[str, ...], folders: Folders, spawn: Spawn
) -> None:
    args = ["--max_new_tokens", str(params.max_new_tokens), "--json", "true", "--compare_ar", "true"]
    if not params.is_greedy:
        args += ["--temperature", str(params.temperature), "--top_k", str(params.top_k), "--top_p", str(params.top_p)]
        args += ["--seed", str(params.seed), "--verify", params.verify]
    command = spawn(*args, launcher=launcher)
    decoder = PipelineDecoder.from_pretrained(folders.drafter, max_length=128)
    expected = decoder.generate([{"role": "user", "content": PROMPT}], params).to_json()

    code, printed, said = command.end()
    assert (code, said) == (0, [])
    report = json.loads(printed)
    assert report.pop("identical_to_ar") is True
    assert report.pop("seed", None) == params.seed
    assert {name for name in report if name not in expected} == {"ar_seconds"}
    for name in expected.keys() - {"seconds"}:
        assert report[name] == expected[name], name


def test_two_nodes_of_unequal_size_give_the_answer_of_one_process(folders: Folders, spawn: Spawn) -> None:
    """Two agents of torchrun with a static rendezvous, as docs/inference.md starts them: both stages here, the drafter there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = ("--master_addr", "127.0.0.1", "--master_port", str(probe.getsockname()[1]))
    nodes = [
        spawn(
            *("--max_new_tokens", "12", "--json", "true"),
            launcher=(*TORCHRUN[:2], "--nnodes", "2", "--node_rank", rank, "--nproc_per_node", processes, *where),
        )
        for rank, processes in (("0", "2"), ("1", "1"))
    ]
    decoder = PipelineDecoder.from_pretrained(folders.drafter, max_length=128)
    expected = decoder.generate([{"role": "user", "content": PROMPT}], SamplingParams(12))
    (code, printed, said), (other_code, other_printed, other_said) = (node.end() for node in nodes)
    assert (code, said, other_code, other_printed, other_said) == (0, [], 0, "", [])
    assert json.loads(printed)["token_ids"] == expected.token_ids


@pytest.mark.parametrize(
    ("args", "variables", "message"),
    [
        (["--target", "/no/such/target"], {}, "cannot load the configuration of '/no/such/target'"),
        (["--temperature", "-1"], {}, "temperature=-1.0"),
        (["--timeout", "0"], {}, "timeout=0.0"),
        (["--schedule", "post_step"], {}, "schedule='post_step', but the drafter was trained for 'pre_step'"),
        ([], {"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2, but this drafter needs 3 ranks"),
        ([], {"RANK": "0", "WORLD_SIZE": "4"}, "WORLD_SIZE=4, but this drafter needs 3 ranks"),
        ([], {"RANK": "zero", "WORLD_SIZE": "3"}, "RANK='zero'"),
        (
            [],
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1", "MASTER_ADDR": "a"},
            "WORLD_SIZE=8, but this drafter needs 3 ranks",
        ),
    ],
)
def test_mistakes_are_one_line_before_any_rank_starts(
    args: list[str], variables: dict[str, str], message: str, folders: Folders, monkeypatch, capsys
) -> None:
    def launch(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("spd_lightning.inference.runtime.distributed.launch", launch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as raised:
        main(["generate", "--runtime", "distributed", "--drafter", folders.drafter, "--prompt", PROMPT, *args])
    assert raised.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    said = [line for line in printed.err.splitlines() if not line.startswith("[transformers]")]
    assert len(said) == 1 and said[0].startswith("spd-infer: error: ")
    assert message in said[0]


class ForkedCommand:
    """`spd-infer generate` in one process per rank, as srun starts it on many nodes: nothing ends one for another.

    Args:
        drafter: a drafter folder.
        args: further arguments.
        folder: for what the ranks print.
    """

    def __init__(self, drafter: str, args: tuple[str, ...], folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = ["generate", "--runtime", "distributed", "--drafter", drafter, "--prompt", PROMPT, "--timeout", "20"]
        self.processes = [
            multiprocessing.get_context("fork").Process(target=self._run, args=(rank, port, [*common, *args]))
            for rank in range(NUM_STAGES + 1)
        ]
        for process in self.processes:
            process.start()

    def _run(self, rank: int, port: int, args: list[str]) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdout = (self.folder / f"{rank}.out").open("w", buffering=1)
        sys.stderr = (self.folder / f"{rank}.err").open("w", buffering=1)
        variables = {"PROCID": rank, "NTASKS": NUM_STAGES + 1, "LOCALID": rank, "JOB_ID": 1}
        os.environ.update({f"SLURM_{name}": str(value) for name, value in variables.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
        code = 0
        try:
            main(args)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)

    def wait_for_text(self) -> None:
        """Returns when the lead has printed the first of the answer."""
        deadline, text = time.monotonic() + LIMIT, self.folder / "0.out"
        while not (text.exists() and text.stat().st_size):
            assert time.monotonic() < deadline and self.processes[0].is_alive(), self.said()
            time.sleep(0.01)

    def end(self) -> list[int | None]:
        """The exit codes, by rank."""
        for process in self.processes:
            process.join(LIMIT)
        return [process.exitcode for process in self.processes]

    def said(self) -> list[str]:
        """What all ranks printed to stderr, the libraries' notes left out."""
        texts = [path.read_text() for path in sorted(self.folder.glob("*.err"))]
        return [line for text in texts for line in text.splitlines() if line and not line.startswith("[transformers]")]


Fork = Callable[..., ForkedCommand]


@pytest.fixture
def fork(folders: Folders, tmp_path: Path) -> Iterator[Fork]:
    commands: list[ForkedCommand] = []

    def fork(*args: str) -> ForkedCommand:
        commands.append(ForkedCommand(folders.drafter, args, tmp_path))
        return commands[-1]

    yield fork
    for command in commands:
        for process in command.processes:
            process.kill()
            process.join()


def test_ranks_that_slurm_starts_decode_together(folders: Folders, fork: Fork, tmp_path: Path) -> None:
    command = fork("--max_new_tokens", "12", "--json", "true", "--compare_ar", "true")
    assert command.end() == [0, 0, 0], command.said()
    assert command.said() == []
    report = json.loads((tmp_path / "0.out").read_text())
    assert report["identical_to_ar"] is True and len(report["token_ids"]) == 12
    assert [(tmp_path / f"{rank}.out").read_text() for rank in (1, 2)] == ["", ""]


@pytest.mark.parametrize(
    ("mistake", "message", "codes"),
    [
        ("a prompt that does not fit", "do not fit into max_length=8", [2, 0, 0]),
        ("a file of the first stage is missing", "weights of layers 1 to 4", [2, 1, 1]),
        ("a file of the last stage is missing", "weights of layers 5 to 8", [1, 2, 1]),
    ],
)
def test_a_mistake_that_one_rank_finds_is_one_line_and_ends_all(
    mistake: str, message: str, codes: list[int], folders: Folders, fork: Fork, tmp_path: Path
) -> None:
    args = {
        "a prompt that does not fit": ["--max_length", "8"],
        "a file of the first stage is missing": ["--target", folders.without_first],
        "a file of the last stage is missing": ["--target", folders.without_last],
    }
    command = fork("--max_new_tokens", "12", *args[mistake])
    assert command.end() == codes, command.said()
    assert len(command.said()) == 1, command.said()
    assert command.said()[0].startswith("spd-infer: error: ") and message in command.said()[0]
    assert (tmp_path / "0.out").read_text() == ""


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_in_one_line_a_rank_at_most(victim: int, fork: Fork) -> None:
    """The lead speaks for all, unless it is the lead that is gone."""
    command = fork("--max_new_tokens", "4000")
    command.wait_for_text()
    began = time.monotonic()
    command.processes[victim].kill()
    codes = command.end()
    assert time.monotonic() - began < 60
    assert codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(3)]
    assert len(command.said()) == (2 if victim == 0 else 1), command.said()
    name = ["rank 0 (stage 1)", "rank 1 (stage 2)", "rank 2 (drafter)"][victim]
    assert all(line.startswith(f"spd-infer: error: {name} ") for line in command.said()), command.said()


def test_ctrl_c_that_reaches_every_rank_ends_all_without_an_error(fork: Fork) -> None:
    command = fork("--max_new_tokens", "4000")
    command.wait_for_text()
    for process in command.processes:
        os.kill(process.pid or 0, signal.SIGINT)
    assert command.end() == [128 + signal.SIGINT, 0, 0], command.said()
    assert command.said() == ["spd-infer: interrupted"]


@needs_proc
def test_a_killed_rank_ends_the_command_that_started_it_with_a_line_that_names_it(spawn: Spawn) -> None:
    command = spawn("--max_new_tokens", "4000")
    command.wait_for_text()
    ranks = {rank: process for process, rank in command.living().items() if rank is not None}
    assert sorted(ranks) == ["0", "1", "2"]
    os.kill(ranks["1"], signal.SIGKILL)
    began = time.monotonic()
    code, _, said = command.end()
    assert time.monotonic() - began < 45, "before the time-out"
    assert code == 1
    assert len(said) == 1, said
    assert said[0].startswith("spd-infer: error: rank 1 (stage 2) ")
    assert command.has_left()


@needs_proc
def test_ctrl_c_at_the_command_that_started_the_ranks_ends_all(spawn: Spawn) -> None:
    command = spawn("--max_new_tokens", "4000")
    command.wait_for_text()
    os.killpg(command.process.pid, signal.SIGINT)
    code, _, said = command.end()
    assert (code, said) == (128 + signal.SIGINT, ["spd-infer: interrupted"])
    assert command.has_left()


def test_eval_of_several_ranks_measures_and_writes_once(spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps({"question_id": 1, "category": "x", "turns": ["Count."]}) + "\n")
    command = spawn(
        *("--max_new_tokens", "8", "--max_length", "64", "--temperature", "0", "1", "--seed", "1"),
        *("--out", str(tmp_path / "out"), "--check_lossless", "true"),
        name=("eval", "--questions", str(tmp_path / "own.jsonl")),
    )
    code, printed, said = command.end()
    assert code == 0, said
    assert "lossless: 1 of 1 greedy answers" in printed
    samples = [json.loads(line) for line in (tmp_path / "out" / "per_sample.jsonl").read_text().splitlines()]
    assert [(s["method"], s["temperature"]) for s in samples] == [("ar", 0), ("spd", 0), ("ar", 1), ("spd", 1)]
    assert all(s["num_devices"] == NUM_STAGES + 1 and s["clock"] == "wall" for s in samples)
    assert all(len(s["token_ids"]) == 8 and s["decode_seconds"] > 0 for s in samples)


def test_profile_of_several_ranks_has_the_parts_of_all(spawn: Spawn, tmp_path: Path) -> None:
    command = spawn(
        *("--max_new_tokens", "8", "--max_length", "64", "--out", str(tmp_path / "out")),
        name=("profile", "--prompt", PROMPT),
    )
    code, printed, said = command.end()
    assert code == 0, said
    assert "slack" in printed
    levels = json.loads((tmp_path / "out" / "profile.json").read_text())["fills"]
    assert [level["fill"] for level in levels] == [1, 2]
    parts = {"PDM", "stage 1", "stage 2", "verification", "communication", "synchronisation"}
    assert set(levels[-1]["parts_ms"]) == parts
    for level in levels:
        assert all(0 < milliseconds < 2 * level["cycle_ms"] for milliseconds in level["parts_ms"].values())
