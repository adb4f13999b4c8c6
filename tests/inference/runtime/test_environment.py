"""Which rank a process is, by torchrun's and SLURM's variables, and that the ranks then find each other."""

import os
import signal
import socket
from pathlib import Path

import pytest
import torch

from spd_lightning.inference.runtime.distributed import Transport, join
from spd_lightning.inference.runtime.environment import (
    RankEnvironment,
    check_world_size,
    first_host,
    rank_environment,
    rank_name,
)
from spd_lightning.inference.runtime.liveness import Store
from spd_lightning.inference.runtime.wire import CycleRecord
from tests.inference.ranks import run_ranks

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "9",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[003-005,9]",
}


def test_torchrun_says_it_and_its_address_is_in_the_environment() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "9", "LOCAL_RANK": "1"}
    assert rank_environment(variables) == RankEnvironment(3, 9, 1, "env://", 0)
    del variables["LOCAL_RANK"]
    assert rank_environment(variables) == RankEnvironment(3, 9, 3, "env://", 0)


def test_torchrun_under_slurm_is_torchrun() -> None:
    assert rank_environment(SLURM | {"RANK": "0", "WORLD_SIZE": "3"}) == RankEnvironment(0, 3, 0, "env://", 0)


def test_slurm_says_it_and_the_first_node_is_the_address() -> None:
    assert rank_environment(SLURM) == RankEnvironment(5, 9, 1, "tcp://gpu003:24567", 0)


def test_the_nodes_of_the_step_go_before_those_of_the_job() -> None:
    step = {"SLURM_STEP_NODELIST": "gpu[004-005]"}
    assert rank_environment(SLURM | step) == RankEnvironment(5, 9, 1, "tcp://gpu004:24567", 0)
    del (rest := dict(SLURM))["SLURM_JOB_NODELIST"]
    assert rank_environment(rest | step) == RankEnvironment(5, 9, 1, "tcp://gpu004:24567", 0)


def test_an_address_that_is_set_goes_before_what_slurm_says() -> None:
    def url(**variables: str) -> str | None:
        found = rank_environment(SLURM | variables)
        return found and found.init_method

    assert url(MASTER_ADDR="10.0.0.7") == "tcp://10.0.0.7:24567"
    assert url(MASTER_PORT="29500") == "tcp://gpu003:29500"
    assert url(MASTER_ADDR="login1", MASTER_PORT="29500") == "tcp://login1:29500"
    assert url(MASTER_ADDR="login1", MASTER_PORT="29500", SLURM_JOB_ID="", SLURM_JOB_NODELIST="") == (
        "tcp://login1:29500"
    )


@pytest.mark.parametrize("job", ["1", "9999", "10000", "4294967295"])
def test_the_port_is_a_free_one_and_the_same_on_every_rank(job: str) -> None:
    ports = set()
    for rank in ("0", "8"):
        found = rank_environment(SLURM | {"SLURM_JOB_ID": job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        assert found is not None
        ports.add(int(found.init_method.rpartition(":")[2]))
    assert len(ports) == 1
    assert all(20000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(
    "variables",
    [
        SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {},
        {"HOME": "/root", "MASTER_ADDR": "a"},
        {"RANK": "0"},
        {"WORLD_SIZE": "3"},
        {"SLURM_JOB_ID": "1"},
    ],
)
def test_outside_of_both_there_is_none(variables: dict[str, str]) -> None:
    assert rank_environment(variables) is None


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "", "WORLD_SIZE": "3"}, "RANK=''"),
        ({"RANK": "one", "WORLD_SIZE": "3"}, "RANK='one'"),
        ({"RANK": "-1", "WORLD_SIZE": "3"}, "RANK='-1'"),
        ({"RANK": "0", "WORLD_SIZE": "3.0"}, "WORLD_SIZE='3.0'"),
        ({"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "x"}, "LOCAL_RANK='x'"),
        (SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
        (SLURM | {"SLURM_NTASKS": "4(x2)"}, "SLURM_NTASKS='4(x2)'"),
        (SLURM | {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID=''"),
        ({name: value for name, value in SLURM.items() if name != "SLURM_LOCALID"}, "SLURM_LOCALID=''"),
        ({name: value for name, value in SLURM.items() if name != "SLURM_JOB_NODELIST"}, "set MASTER_ADDR"),
    ],
)
def test_what_is_missing_or_garbled_is_named(variables: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError) as raised:
        rank_environment(variables)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node7", "node7"),
        ("a,b", "a"),
        ("gpu[003-005,9]", "gpu003"),
        ("gpu[003-005,9],login1", "gpu003"),
        ("gpu[12,14-15]", "gpu12"),
        ("gpu[7]", "gpu7"),
        ("login1,gpu[003-005]", "login1"),
        ("node[01-04]-ib0", "node01-ib0"),
        ("node[01-04]-ib0,other[1-2]", "node01-ib0"),
        ("node-1.cluster.example,node-2.cluster.example", "node-1.cluster.example"),
        ("rack[1-2]node[03-04],x", "rack1node03"),
    ],
)
def test_the_first_node_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def variables_of(launcher: str, rank: int, port: int) -> dict[str, str]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if launcher == "torchrun":
        return {"RANK": str(rank), "WORLD_SIZE": "3"} | address
    return SLURM | {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "3"} | address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(launcher: str, rank: int, port: int, timeout: float) -> tuple[Store, Transport]:
    for name, value in variables_of(launcher, rank, port).items():
        os.environ[name] = value  # of a process that ends with the test
    environment = rank_environment()
    assert environment is not None
    return join(environment, 2, torch.device("cpu"), timeout)


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_ranks_meet_at_the_address_that_the_variables_give(launcher: str, tmp_path: Path) -> None:
    port = free_port()

    def body(rank: int, _: str) -> list[int]:
        store, transport = meet(launcher, rank, port, timeout=60.0)
        drafts = [record.draft for record in transport.exchange(CycleRecord(1, 0, 0, 0, draft=rank))]
        store.set(f"ended/{rank}", "")
        if rank == 0:  # it holds the store
            for other in (1, 2):
                transport.liveness.wait_for(f"ended/{other}", [other])
        return drafts

    outcomes = run_ranks(3, body, tmp_path)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.value for outcome in outcomes] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_the_death_of_the_rank_that_holds_the_store_is_told_by_its_name(launcher: str, tmp_path: Path) -> None:
    port = free_port()

    def body(rank: int, _: str) -> None:
        _, transport = meet(launcher, rank, port, timeout=8.0)
        transport.exchange(CycleRecord(1, 0, 0, 0))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            transport.exchange(CycleRecord(1, 0, 1, 1))
        transport.liveness.wait_for("request/1", [0, 1])

    outcomes = run_ranks(3, body, tmp_path)
    for outcome in outcomes[1:]:
        assert "rank 0 (stage 1) is dead or unreachable" in (outcome.error or ""), outcome.error
        assert outcome.blamed == 0


@pytest.mark.parametrize("world_size", [1, 4, 6, 8])
def test_another_number_of_processes_than_ranks_says_both(world_size: int) -> None:
    with pytest.raises(ValueError) as raised:
        check_world_size(world_size, 4)
    assert f"WORLD_SIZE={world_size}" in str(raised.value)
    assert "5 ranks" in str(raised.value) and "4 stages" in str(raised.value)


def test_one_rank_a_stage_and_one_that_drafts_is_right() -> None:
    check_world_size(5, 4)


def test_ranks_are_called_by_what_they_do() -> None:
    assert [rank_name(rank, 2) for rank in range(3)] == ["rank 0 (stage 1)", "rank 1 (stage 2)", "rank 2 (drafter)"]
