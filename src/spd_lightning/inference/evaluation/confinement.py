"""A script that runs one Python program where it can do little harm, and ends with everything the program started.

`execution.py` starts it as a process of its own. Imports the standard library only, all of it at the top: later the
files of the interpreter can be out of reach.
"""

import ctypes
import json
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534
STARTED = b"started\n"  # the status line before the program begins
REFUSED = "refused: "  # begins the status line that says why it could not
WORKING_DIR = "/tmp"
# Shown empty: sockets of services, homes, what other processes share. The interpreter stays visible, see `_cover`.
_COVERED_DIRS = ("/run", "/home", "/root", "/var/tmp", "/dev/shm", WORKING_DIR)
_OWN_TASKS = 3  # counted along with the program's: this process, and two threads of the namespace's first one
_MAX_OPEN_FILES = 64

_PREFIX, _PYTHON = os.path.realpath(sys.base_prefix), os.path.realpath(sys.executable)
_LIBC = ctypes.CDLL(None, use_errno=True)
# Numbers of the kernel's interface, the same on all its 64-bit machines.
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_SIGKILL = 9
_NEW_NAMESPACES = {
    "mounts": 0x00020000,
    "host name": 0x04000000,
    "shared memory": 0x08000000,
    "users": 0x10000000,
    "processes": 0x20000000,
    "network": 0x40000000,
}
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_RDONLY = 442, -100, 0x8000, 0x1

# Runs the program as a module that is not `__main__`, as HumanEval's own harness does, so that what answers put below
# `if __name__ == "__main__"` stays out. The token is written only when the last line is done.
_DRIVER = """
import json, os, sys, types
def run(request, write=os.write, leave=os._exit):
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        exec(compile(request["source"], "program.py", "exec"), module.__dict__)
    except BaseException as error:
        line, frame = getattr(error, "lineno", None), error.__traceback__
        while frame:
            if frame.tb_frame.f_code.co_filename == "program.py":
                line = frame.tb_lineno
            frame = frame.tb_next
        message = ": ".join(filter(None, [type(error).__name__, str(error)])) + (f" (line {line})" if line else "")
    else:
        message = request["token"]
    write(request["report_fd"], message[:2000].encode("utf-8", "backslashreplace"))
    leave(0)
with open(0, "rb", closefd=False) as stdin:
    request = json.load(stdin)
null = os.open(os.devnull, os.O_RDONLY)
os.dup2(null, 0)
os.close(null)
run(request)
"""


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def main(report_fd: int, output_fd: int) -> None:
    """Reads a request from stdin, runs its program and says on stdout how that went.

    stdin is also the lifeline: a further byte or its end is the order to kill everything. When this process has ended
    nothing of the program is left.

    Args:
        report_fd: where the program's token or error goes.
        output_fd: where what the program prints goes.
    """
    os.set_inheritable(output_fd, False)
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        request, size = b"", int(stdin.readline())
        while len(request) < size:
            request += stdin.read(size - len(request)) or b""
    wanted = json.loads(request) | {"report_fd": report_fd}
    try:
        _confine(wanted)
    except OSError as error:
        os.write(1, f"{REFUSED}{error.strerror}\n".encode())
        return
    if (init := os.fork()) == 0:
        _be_first_process(wanted, output_fd)
    os.waitpid(init, 0)  # returns when the kernel has killed all processes of the namespace


def _confine(wanted: dict) -> None:
    os.chdir(_PREFIX)  # keeps it at hand when its path is closed to us
    if os.geteuid() == 0:
        with _step(f"becoming user {NOBODY}"):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        _kernel("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # else our own files in /proc stay root's
    user, group = os.geteuid(), os.getegid()
    _kernel("unshare", sum(_NEW_NAMESPACES.values()))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
        ("oom_score_adj", "1000"),  # when memory runs out the program goes first
    ):
        with _step(f"writing /proc/self/{name}"):
            Path("/proc/self", name).write_text(text)
    _cover(wanted["disk_mb"])


def _cover(disk_mb: int) -> None:
    """Makes all files read-only but those of an empty working directory, which lives in memory."""
    _kernel("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    closed = [str(parent) for parent in reversed(Path(_PREFIX).parents) if not os.access(parent, os.X_OK)][:1]
    options = f"size={disk_mb}m,nr_inodes=4096,mode=755".encode()
    for path in sorted({*_COVERED_DIRS, *closed}):
        if os.path.isdir(path) and not os.path.islink(path):  # one below another is gone by now
            _kernel("mount", b"tmpfs", os.fsencode(path), b"tmpfs", 0, options)
    if not os.path.isdir(_PREFIX):
        os.makedirs(_PREFIX)
        _kernel("mount", b".", os.fsencode(_PREFIX), None, _MS_BIND | _MS_REC, None)
    _set_mount_attributes("/", _AT_RECURSIVE, _MountAttributes(set=_ATTR_RDONLY))
    _set_mount_attributes(WORKING_DIR, 0, _MountAttributes(clear=_ATTR_RDONLY))
    os.chdir(WORKING_DIR)


def _be_first_process(wanted: dict, output_fd: int) -> None:
    """Whatever ends this process ends all others of its namespace."""
    _kernel("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    os.write(1, STARTED)
    if (program := os.fork()) == 0:
        status_fd = os.dup(1)
        try:
            _become_program(wanted, output_fd)
        except OSError as error:
            os.write(status_fd, f"{REFUSED}{error.strerror}\n".encode())
            os._exit(1)
    threading.Thread(target=_end_at_order, daemon=True).start()
    while True:
        pid, status = os.wait()
        if pid == program:
            os.write(1, f"exit {os.waitstatus_to_exitcode(status)}\n".encode())
            os._exit(0)


def _end_at_order() -> None:
    os.read(0, 1)
    os._exit(0)


def _become_program(wanted: dict, output_fd: int) -> None:
    request_fd = os.memfd_create("request")
    with open(request_fd, "wb", closefd=False) as file:
        file.write(json.dumps(wanted).encode())
    os.lseek(request_fd, 0, os.SEEK_SET)
    os.dup2(request_fd, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    _kernel("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    megabyte, seconds = 1 << 20, wanted["seconds"] + 1
    for kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_FSIZE, wanted["disk_mb"] * megabyte),
        (resource.RLIMIT_AS, wanted["memory_mb"] * megabyte),
        (resource.RLIMIT_NPROC, wanted["processes"] + _OWN_TASKS),
    ):
        resource.setrlimit(kind, (limit, limit))
    # The order of sets is the same in every run, so that a wrong answer does not pass by luck once in a while.
    with _step(f"starting {_PYTHON}"):
        os.execve(_PYTHON, [_PYTHON, "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _DRIVER], {"PYTHONHASHSEED": "0"})


def _set_mount_attributes(path: str, flags: int, attributes: _MountAttributes) -> None:
    # `syscall` takes longs, and the C library of some systems has no `mount_setattr`.
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    numbers = [ctypes.c_long(number) for number in (_SYS_MOUNT_SETATTR, _AT_FDCWD)]
    with _step("mount_setattr"):
        _kernel("syscall", *numbers, path.encode(), ctypes.c_long(flags), ctypes.byref(attributes), size)


def _kernel(name: str, *arguments: object) -> None:
    """Calls a function of the C library; `OSError` names it when it fails."""
    with _step(name):
        if getattr(_LIBC, name)(*arguments) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


@contextmanager
def _step(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror}") from error


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
