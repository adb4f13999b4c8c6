"""Which rank this process is, by what torchrun or SLURM says in its environment. Knows no process groups."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankEnvironment:
    """This process among the ranks of a decoder.

    Attributes:
        rank: `0..n-1` runs stage `rank + 1`, rank `n` drafts.
        world_size: number of ranks.
        local_rank: number of this rank on its node; which GPU it takes.
        init_method: URL by which the ranks find each other.
        store_host: rank that holds the store; none if that is a process of its own, as torchrun's agent, or a file.
    """

    rank: int
    world_size: int
    local_rank: int
    init_method: str = "env://"
    store_host: int | None = None


def rank_environment(variables: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """What torchrun (`RANK`, `WORLD_SIZE`) or SLURM (`SLURM_PROCID`, `SLURM_NTASKS`) says; none outside of both.

    For SLURM the address is `MASTER_ADDR` or the job's first node, the port `MASTER_PORT` or one made of the job's id.

    Raises:
        ValueError: if a variable is missing or no number.
    """
    if "RANK" in variables and "WORLD_SIZE" in variables:
        rank, world_size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
        local_rank = _number(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else rank
        has_agent = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return RankEnvironment(rank, world_size, local_rank, store_host=None if has_agent else 0)
    if "SLURM_PROCID" in variables and variables.get("SLURM_NTASKS", "1") != "1":  # one task is a shell within a job
        rank, world_size = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_NTASKS")
        if "MASTER_ADDR" in variables:
            host = variables["MASTER_ADDR"]
        else:
            host = first_host(variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", ""))
        # Above the ports of system services and below those that Linux hands out by itself.
        port = variables.get("MASTER_PORT") or str(20000 + _number(variables, "SLURM_JOB_ID") % 10000)
        return RankEnvironment(rank, world_size, _number(variables, "SLURM_LOCALID"), f"tcp://{host}:{port}", 0)
    return None


def first_host(nodelist: str) -> str:
    """The first node of a list as SLURM writes it: `gpu[003-005,9],login1` begins with `gpu003`.

    Raises:
        ValueError: if the list is empty.
    """
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if found is None:
        raise ValueError(f"SLURM names no nodes (SLURM_JOB_NODELIST={nodelist!r}): set MASTER_ADDR")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0])


def _number(variables: Mapping[str, str], name: str) -> int:
    value = variables.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"{name}={value!r}: a number is needed, as torchrun or SLURM sets it")
    return int(value)


def check_world_size(world_size: int, num_stages: int) -> None:
    """Raises `ValueError` unless there is one rank per stage and one that drafts."""
    if world_size != num_stages + 1:
        raise ValueError(
            f"WORLD_SIZE={world_size}, but this drafter needs {num_stages + 1} ranks: {num_stages} stages and one that "
            f"drafts; start {num_stages + 1} processes"
        )


def rank_name(rank: int, num_stages: int) -> str:
    """What to call a rank in a message."""
    return f"rank {rank} ({f'stage {rank + 1}' if rank < num_stages else 'drafter'})"
