import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from spd_lightning.inference.evaluation import confinement, execution
from spd_lightning.inference.evaluation.execution import Execution, Limits, require_confinement, run_program

LIMITS = Limits(memory_mb=256, processes=6, output_kb=64, disk_mb=4)


def namespaces_permitted() -> bool:
    """Whether an unprivileged user may make namespaces here, by another program than ours."""
    if (unshare := shutil.which("unshare")) is None:
        return False
    command = [unshare, "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork"]
    command += ["mount", "-t", "tmpfs", "none", "/tmp"]
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    return subprocess.run(command, capture_output=True, timeout=60, cwd="/", **nobody).returncode == 0


confined = pytest.mark.skipif(not namespaces_permitted(), reason="user namespaces are not permitted here")
Run = Callable[..., Execution]


@pytest.fixture(scope="module")
def run() -> Run:
    """Runs a program with limits that have been seen to hold, so that a harmful one can be run."""
    if not namespaces_permitted():
        pytest.skip("user namespaces are not permitted here")
    require_confinement(LIMITS)
    return lambda source, seconds=30: run_program(textwrap.dedent(source), replace(LIMITS, seconds=seconds))


def num_processes_named(name: str) -> int:
    """Processes on this machine whose name or arguments hold `name`."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            found += name.encode() in (process / "comm").read_bytes() + (process / "cmdline").read_bytes()
    return found


@pytest.fixture
def mark() -> str:
    """A name that no other process has; at most 15 letters, or the kernel cuts it."""
    return f"spd{uuid.uuid4().hex[:12]}"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder everybody may write to, at a place that programs see."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def wait_until(holds: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "source",
    [
        "assert sorted({3, 1, 2}) == [1, 2, 3]",
        "text = 'Zoë ➞ 日本 🙂'\nassert len(text) == 10\nprint(text)",
        "import collections, dataclasses, functools, heapq, itertools, math, random, re, typing",
        "@__import__('dataclasses').dataclass\nclass Point:\n    x: 'int'\nassert Point(1) == Point(1)",
        "import sys\nprint('x' * 65536, end='')\nsys.stdout.flush()",
        "if __name__ == '__main__':\n    assert False, 'what an answer does when it is run as a script'",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "",
    ],
)
def test_program_that_comes_to_its_end_passes(run: Run, source: str) -> None:
    assert run(source) == Execution(True, "passed")


@pytest.mark.parametrize(
    "source, reason",
    [
        ("x = 1\nassert x == 2", "AssertionError (line 2)"),
        ("def f():\n    assert False, 'wrong\\n ➞ sum'\nf()", "AssertionError: wrong ➞ sum (line 2)"),
        ("assert False, '\\ud800'", "AssertionError: \\ud800 (line 1)"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("return 1", "SyntaxError: 'return' outside function"),
        ("x = '\ud800'", "UnicodeEncodeError"),
        ("x = 1\0", "source code string cannot contain null bytes"),
        ("def f(): f()\nf()", "RecursionError"),
        ("input()", "EOFError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import numpy", "ModuleNotFoundError"),
    ],
)
def test_program_that_fails_says_how(run: Run, source: str, reason: str) -> None:
    done = run(source)
    assert not done.passed and reason in done.reason


@pytest.mark.parametrize(
    "exit_early, reason",
    [
        ("sys.exit()", "SystemExit"),
        ("sys.exit(0)", "SystemExit: 0"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("os._exit(0)", "left with exit code 0 before its end"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.execv('/bin/true', ['true'])", "left with exit code 0 before its end"),
    ],
)
def test_leaving_before_the_check_is_a_failure_whatever_the_exit_code(run: Run, exit_early: str, reason: str) -> None:
    done = run(f"import os, signal, sys\n{exit_early}\nassert 1 + 1 == 3")
    assert not done.passed and done.reason.startswith(reason)


def test_success_cannot_be_claimed_by_a_message_known_in_advance(run: Run) -> None:
    done = run(
        """
        import os
        for fd in range(3, 64):
            try:
                os.write(fd, b"passed")
            except OSError:
                pass
        assert (os.lseek(0, 0, os.SEEK_SET), os.read(0, 1)) == (0, b""), "where the token came from is still open"
        os._exit(0)
        """
    )
    assert done == Execution(False, "passed")  # the reason is what the program says, and no more than that


def test_endless_loop_is_stopped(run: Run, mark: str) -> None:
    began = time.monotonic()
    done = run(f"import ctypes\nctypes.CDLL(None).prctl(15, b'{mark}')\nwhile True: pass", seconds=1)
    assert done == Execution(False, "ran for 1 s without coming to its end")
    assert time.monotonic() - began < 30
    assert num_processes_named(mark) == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_printing_is_cut(run: Run, stream: str) -> None:
    done = run(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    assert done == Execution(False, "printed more than 64 KB")


def test_printing_a_little_too_much_fails_even_if_the_program_has_ended(run: Run) -> None:
    source = "import os\nos.write(1, b'x' * {})"
    assert run(source.format(64 << 10)).passed
    assert run(source.format((64 << 10) - 1) + "\nos.write(2, b'xx')").reason == "printed more than 64 KB"


def test_ten_gigabytes_are_refused(run: Run) -> None:
    assert run("data = bytearray(10 << 30)").reason == "MemoryError (line 1)"
    caught = run("data = []\nwhile True:\n    data.append(bytearray(1 << 20))")
    assert caught.reason.startswith("MemoryError")


def test_fork_bomb_stays_small_and_leaves_nothing(run: Run, mark: str) -> None:
    source = f"""
        import ctypes, os, time
        ctypes.CDLL(None).prctl(15, b"{mark}")
        while True:
            try:
                os.fork()
            except OSError:
                time.sleep(0.01)
        """
    most, seconds = 0, 1
    while most < LIMITS.processes and seconds < 30:  # a busy machine takes its time to start six processes
        seconds *= 2
        done: list[Execution] = []
        running = threading.Thread(target=lambda found, limit: found.append(run(source, limit)), args=(done, seconds))
        running.start()
        while running.is_alive():
            most = max(most, num_processes_named(mark))
            time.sleep(0.02)
        running.join()
        assert num_processes_named(mark) == 0
        assert done == [Execution(False, f"ran for {seconds} s without coming to its end")]
    assert most == LIMITS.processes


def test_threads_count_as_processes(run: Run) -> None:
    done = run("import threading, time\nfor _ in range(9): threading.Thread(target=time.sleep, args=(9,)).start()")
    assert done.reason.startswith("RuntimeError: can't start new thread")


def test_a_daemon_of_its_own_session_does_not_survive(run: Run, mark: str) -> None:
    done = run(
        f"""
        import os, sys
        told, tell = os.pipe()
        os.set_inheritable(tell, True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                code = f"import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                code += f"os.write({{tell}}, b'x'); time.sleep(60)"
                os.execv("/proc/self/exe", ["{mark}", "-S", "-c", code])
            os._exit(0)
        assert os.read(told, 1) == b"x"
        """
    )
    assert done.passed  # so the daemon was there
    assert num_processes_named(mark) == 0


@confined
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_nothing_survives_our_own_death(mark: str, end: signal.Signals) -> None:
    source = f"import ctypes\nctypes.CDLL(None).prctl(15, b'{mark}')\nwhile True: pass"
    code = f"from spd_lightning.inference.evaluation.execution import *\nrun_program({source!r}, Limits(60))"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as ours:
        wait_until(lambda: num_processes_named(mark) == 2)  # ours has the mark among its arguments
        ours.send_signal(end)
    wait_until(lambda: num_processes_named(mark) == 0)


def test_nothing_survives_the_process_that_watches(run: Run, mark: str) -> None:
    def kill_the_guard() -> None:
        wait_until(lambda: num_processes_named(mark) == 1)
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and b"confinement.py" in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)

    killer = threading.Thread(target=kill_the_guard)
    killer.start()
    done = run(f"import ctypes\nctypes.CDLL(None).prctl(15, b'{mark}')\nwhile True: pass", seconds=60)
    killer.join()
    assert done == Execution(False, "was killed along with the process that watched it")
    wait_until(lambda: num_processes_named(mark) == 0)


def test_network_is_cut(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        source = f"import socket\nsocket.create_connection({address!r}, 5)"
        subprocess.run([sys.executable, "-c", source], check=True, timeout=60)
        assert run(source).reason.startswith("OSError: [Errno 101] Network is unreachable")


def test_services_of_this_machine_cannot_be_called(run: Run) -> None:
    name = f"\0{uuid.uuid4().hex}"  # a socket without a file
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        source = f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})"
        done = run(source)
    assert done.reason.startswith("ConnectionRefusedError")


def test_files_outside_stay_as_they_are(run: Run, open_folder: Path) -> None:
    (open_folder / "old").write_text("old")
    (open_folder / "old").chmod(0o666)
    done = run(
        f"""
        import os, shutil
        for attempt in (
            lambda: open({str(open_folder / "new")!r}, "w"),
            lambda: open({str(open_folder / "old")!r}, "a"),
            lambda: os.remove({str(open_folder / "old")!r}),
            lambda: shutil.rmtree({str(open_folder)!r}),
            lambda: open("/dev/shm/new", "w"),
            lambda: open("/var/tmp/new", "w"),
        ):
            try:
                attempt()
            except OSError:
                continue
            assert False, "a file was changed"
        """
    )
    assert done == Execution(True, "passed")
    assert [(file.name, file.read_text()) for file in open_folder.iterdir()] == [("old", "old")]


def test_working_directory_is_empty_limited_and_gone_afterwards(run: Run, tmp_path: Path) -> None:
    source = f"""
        import os
        assert os.listdir() == [], "not empty"
        assert not os.path.exists({str(tmp_path)!r}) or not {str(tmp_path).startswith("/tmp")}
        open("/tmp/small-{tmp_path.name}", "wb").write(bytes(3 << 20))
        try:
            open("large", "wb").write(bytes(2 << 20))
        except OSError:
            pass
        else:
            assert False, "no limit"
        """
    assert run(source) == Execution(True, "passed")
    assert run(source) == Execution(True, "passed")
    assert not Path(f"/tmp/small-{tmp_path.name}").exists()


def test_other_processes_are_out_of_reach(run: Run) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        done = run(f"import os\nos.kill({other.pid}, 0)")
        assert other.poll() is None
        other.kill()
    assert done.reason.startswith("ProcessLookupError")


def test_nothing_of_ours_is_handed_down(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPD_SECRET", "1")
    kept, other_end = os.pipe()
    os.set_inheritable(kept, True)
    shared = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "mnt", "net", "pid", "user", "uts")}
    try:
        done = run(
            f"""
            import os, resource
            assert "SPD_SECRET" not in os.environ and "PATH" not in os.environ and "HOME" not in os.environ
            assert (os.getuid(), os.getgid()) == ({confinement.NOBODY}, {confinement.NOBODY})
            assert set(os.getgroups()) <= {{{confinement.NOBODY}}}
            names = [os.readlink(f"/proc/self/fd/{{fd}}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2
                     if os.path.islink(f"/proc/self/fd/{{fd}}")]
            assert len(names) == 1 and names[0].startswith("pipe:"), names  # where the token goes
            limits = {{"CPU": 31, "CORE": 0, "NOFILE": 64, "FSIZE": 4 << 20}}
            found = {{name: resource.getrlimit(getattr(resource, "RLIMIT_" + name)) for name in limits}}
            assert found == {{name: (limit, limit) for name, limit in limits.items()}}
            shared = {shared!r}
            assert not [name for name in shared if os.readlink("/proc/self/ns/" + name) == shared[name]]
            assert "NoNewPrivs: 1" in " ".join(open("/proc/self/status").read().split())
            assert open("/proc/self/oom_score_adj").read().strip() == "1000"
            assert os.listdir("/run") == []
            """
        )
    finally:
        os.close(kept)
        os.close(other_end)
    assert done == Execution(True, "passed")


def test_the_order_of_sets_is_the_same_in_every_run(run: Run) -> None:
    first, second = (run("assert False, str([hash('a'), hash('b')])") for _ in range(2))
    assert first == second and "AssertionError: [" in first.reason


@confined
@pytest.mark.parametrize(
    "step, broken, limit",
    [
        ('wanted["processes"] + _OWN_TASKS', "64", "processes"),
        ('wanted["memory_mb"] * megabyte', "resource.RLIM_INFINITY", "memory"),
        ("sum(_NEW_NAMESPACES.values())", "sum(_NEW_NAMESPACES.values()) - 0x40000000", "network"),
        ("set=_ATTR_RDONLY", "set=0", "files"),
        ('"{NOBODY} {user} 1"', '"0 {user} 1"', "user"),
    ],
)
def test_programs_are_refused_where_a_limit_does_not_hold(
    step: str, broken: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(confinement.__file__).read_text(encoding="utf-8")
    assert text.count(step) == 1
    (tmp_path / "confinement.py").write_text(text.replace(step, broken), encoding="utf-8")
    monkeypatch.setattr(confinement, "__file__", str(tmp_path / "confinement.py"))
    monkeypatch.setattr(execution, "_probe", execution._probe.__wrapped__)  # what it found before is not asked
    with pytest.raises(ValueError, match=rf"a probe that tried the limits failed \(AssertionError: \['{limit}'\]"):
        run_program("", LIMITS)


SYSCALL_UNSHARE = {"x86_64": 272, "aarch64": 97}


@pytest.mark.skipif(platform.machine() not in SYSCALL_UNSHARE, reason="the number of one system call is not known")
def test_programs_are_refused_where_namespaces_are_not_permitted() -> None:
    """As a container's usual filter of system calls does it."""
    code = f"""
        import ctypes, struct
        number, libc = {SYSCALL_UNSHARE[platform.machine()]}, ctypes.CDLL(None)
        filter = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in filter))
        program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(filter), ctypes.addressof(code)))
        assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
        from spd_lightning.inference.evaluation.execution import run_program
        try:
            print(run_program("print('ran')"))
        except ValueError as error:
            print(error)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.startswith("programs that a model wrote are not run here, because they cannot be confined: uns")
    assert "unshare: Operation not permitted" in done.stdout and "--security-opt seccomp=unconfined" in done.stdout


def test_programs_are_refused_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(execution, "_probe", execution._probe.__wrapped__)
    with pytest.raises(ValueError, match="this is darwin; needed are Linux"):
        require_confinement(LIMITS)


@pytest.mark.parametrize("name", ["seconds", "memory_mb", "processes", "output_kb", "disk_mb"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"limit {name} of a program is 0, but must be at least 1"):
        Limits(**{name: 0})
