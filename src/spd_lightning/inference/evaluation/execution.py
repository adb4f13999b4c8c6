"""Runs a model's Python program as a process with limits and says whether it came to its end. Knows no questions.

A guard against accidents of generated code, not a security boundary. While a program runs, and after it:

- it has no network, no environment, no input and no privileges (those of `nobody` where we are root); it can neither
  signal nor look into processes of others, though it may see in `/proc` that they are there;
- it can write to an empty folder in memory only; all other files are read-only, and homes, `/run` and the shared
  temporary folders look empty. The rest it may read as far as its user may: `nobody`, or we where we are not root;
- time, CPU time, memory, processes, files and output are limited, as `Limits` says;
- it runs on the standard library of our Python, without installed packages;
- when `run_program` returns or is interrupted, or our process is killed, nothing that it started is left.

Not kept out: faults of the kernel, and a program made to cheat that takes its token from the memory of its process.
Where any of this cannot be had, programs are refused.
"""

import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from io import FileIO

from spd_lightning.inference.evaluation import confinement

_START_SECONDS = 60
_STOP_SECONDS = 60
_PIPE_BYTES = 1 << 16  # what a pipe holds

# Fails unless the limits hold; asks for little more than they allow, so that it is harmless where they do not.
_PROBE = """
import os, socket, time
held = dict.fromkeys(["processes", "memory", "network"], False)
try:
    for _ in range({processes} + 4):
        if os.fork() == 0:
            time.sleep(60)
except BlockingIOError:
    held["processes"] = True
try:
    bytearray(({memory_mb} + 1) << 20)
except MemoryError:
    held["memory"] = True
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("127.0.0.1", 9))  # sends nothing
except OSError:
    held["network"] = True
held["files"] = not any(os.access(path, os.W_OK) for path in ("/", "/var/tmp", "/dev/shm", "/proc/self/oom_score_adj"))
with open("/proc/self/status") as status:
    held["user"] = "CapEff:\\t0000000000000000" in status.read() and os.getuid() == {nobody}
not_held = [name for name in held if not held[name]]
assert not not_held, not_held
"""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: wall-clock time from the start of its interpreter; CPU time of each of its processes, plus 1.
        memory_mb: address space of each of its processes; all together can use `processes` times as much.
        processes: its processes and threads at one time, itself included.
        output_kb: what it may print.
        disk_mb: size of its working directory, which is in memory.
    """

    seconds: int = 10
    memory_mb: int = 512
    processes: int = 8
    output_kb: int = 256
    disk_mb: int = 16

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise ValueError(f"limit {field.name} of a program is {value}, but must be at least 1")


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Execution:
    """How a program ended.

    Attributes:
        passed: it came to the end of its last line, within all limits.
        reason: `passed`, or in a few words what stopped it.
    """

    passed: bool
    reason: str


def run_program(source: str, limits: Limits = DEFAULT_LIMITS) -> Execution:
    """Whether `source` runs to its end; exits before that count as failures, whatever their exit code.

    Raises:
        ValueError: if programs cannot be confined here; it says why and what is needed. Nothing was run then.
    """
    require_confinement(limits)
    return _run(source, limits)


def require_confinement(limits: Limits = DEFAULT_LIMITS) -> None:
    """Returns if the limits can be set and a harmless program that tries to break them finds that they hold.

    Raises:
        ValueError: if not.
    """
    _probe(replace(limits, seconds=_START_SECONDS))


@cache
def _probe(limits: Limits) -> None:
    execution = _run(_PROBE.format(**asdict(limits), nobody=confinement.NOBODY), limits)
    if not execution.passed:
        raise _refusal(f"a probe that tried the limits failed ({execution.reason})")


def _run(source: str, limits: Limits) -> Execution:
    if sys.platform != "linux":
        raise _refusal(f"this is {sys.platform}")
    token = secrets.token_hex(16)
    request = json.dumps(asdict(limits) | {"source": source, "token": token}).encode()
    with ExitStack() as stack:
        report, report_end = (stack.enter_context(end) for end in _pipe())
        output, output_end = (stack.enter_context(end) for end in _pipe())
        ends = (report_end.fileno(), output_end.fileno())
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", confinement.__file__, *map(str, ends)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=ends,
            start_new_session=True,
        )
        with _ended(guard) as (orders, status_fd):
            report_end.close()
            output_end.close()
            _send(orders, f"{len(request)}\n".encode() + request)
            status, broken_limit = _watch(status_fd, output.fileno(), limits)
        # Every process that could write has ended, so this does not wait.
        message = os.read(report.fileno(), _PIPE_BYTES).decode("utf-8", "replace")
    if confinement.REFUSED in status:
        raise _refusal(status.rpartition(confinement.REFUSED)[2].splitlines()[0])
    if confinement.STARTED.decode() not in status:
        raise RuntimeError(
            f"the process that sets a program's limits did not start it in {_START_SECONDS} s: {status or 'no word'}"
        )
    if broken_limit:
        return Execution(False, broken_limit)
    if message == token:
        return Execution(True, "passed")
    return Execution(False, " ".join(message.split())[:200] or _exit_reason(status))


def _pipe() -> tuple[FileIO, FileIO]:
    reading, writing = os.pipe()
    return FileIO(reading, "r"), FileIO(writing, "w")


@contextmanager
def _ended(guard: subprocess.Popen[bytes]) -> Iterator[tuple[int, int]]:
    """Its stdin and stdout; afterwards the guard, and so everything it has started, has ended."""
    assert guard.stdin and guard.stdout
    with guard.stdin, guard.stdout:
        try:
            yield guard.stdin.fileno(), guard.stdout.fileno()
        finally:
            _send(guard.stdin.fileno(), b"\n")
            guard.stdin.close()
            try:
                guard.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                guard.kill()  # the kernel kills the program along with it
                guard.wait()
                raise RuntimeError(f"a program that was stopped did not end within {_STOP_SECONDS} s") from None


def _send(orders: int, data: bytes) -> None:
    with suppress(BrokenPipeError):  # a guard that has ended needs no orders; its status says why it did
        while data:
            data = data[os.write(orders, data) :]


def _watch(status_fd: int, output_fd: int, limits: Limits) -> tuple[str, str | None]:
    """What the guard said until it ended, or until a limit was broken: which one."""
    status, num_printed = b"", 0
    deadline = time.monotonic() + _START_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(status_fd, selectors.EVENT_READ)
        selector.register(output_fd, selectors.EVENT_READ)
        while selector.get_map():
            # The clock is asked in every round: a program that keeps printing keeps the pipe readable.
            if (left := deadline - time.monotonic()) <= 0:
                return status.decode("utf-8", "replace"), f"ran for {limits.seconds} s without coming to its end"
            for key, _ in selector.select(left):
                if not (data := os.read(key.fd, _PIPE_BYTES)):
                    selector.unregister(key.fd)
                elif key.fd == output_fd:
                    num_printed += len(data)
                    if num_printed > limits.output_kb << 10:
                        return status.decode("utf-8", "replace"), f"printed more than {limits.output_kb} KB"
                else:
                    if confinement.STARTED not in status:
                        deadline = time.monotonic() + limits.seconds
                    status += data
    return status.decode("utf-8", "replace"), None


def _exit_reason(status: str) -> str:
    code = re.search(r"^exit (-?\d+)$", status, re.MULTILINE)
    if code is None:
        return "was killed along with the process that watched it"
    if (number := int(code[1])) < 0:
        return f"was killed by {signal.Signals(-number).name}"
    return f"left with exit code {number} before its end"


def _refusal(cause: str) -> ValueError:
    return ValueError(
        f"programs that a model wrote are not run here, because they cannot be confined: {cause}; needed are Linux "
        "5.12 or newer and user namespaces (in a container: `--security-opt seccomp=unconfined`; on a host: sysctl "
        "user.max_user_namespaces above 0 and kernel.apparmor_restrict_unprivileged_userns=0 where it exists), or "
        "leave out the flag that runs programs"
    )
