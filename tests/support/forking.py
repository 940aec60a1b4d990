"""Makara's own programs start as forks of the process that starts them, which has imported all they need.

A manager that a test starts is a fork of a warm process (`forked.py`). So its agents start in milliseconds
instead of a second, and their trainers without the four seconds of processor time that importing torch takes.
A forked process has its own command line and environment in /proc, session, open files, and seeds, as if it
had been executed; only the seed of hashes is that of the first process. All other programs are executed.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import inspect
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

_TESTS = Path(__file__).parents[1]
_NOT_FORKED = ("preexec_fn", "shell", "uid", "gid", "gids")  # a process that is started with one is executed
_READ_AT_START = {
    name: os.environ.get(name)
    for name in ("LD_PRELOAD", "PYTHONHASHSEED", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS")
}
"""Variables that Python, or the libraries imported already, read once."""
_OWN_OUTPUT = {"p2cread": -1, "c2pwrite": -1, "errwrite": -1}
_FORK = signal.SIGRTMIN + 5
_asked: SimpleQueue[tuple[Callable[[], int], Future[int]]] = SimpleQueue()
_PR_SET_MM, _PR_SET_MM_MAP, _PR_SET_MM_MAP_SIZE = 35, 14, 15


def fork_programs() -> None:
    """From now on `subprocess` and `asyncio` of this process fork what can be forked, and `os.execv` keeps
    this process."""
    subprocess.Popen = ForkingPopen
    os.execv = _execute
    signal.signal(_FORK, _fork_as_asked)


@cache
def fresh_path() -> list[str]:
    """Where a new interpreter looks for modules. A warm process calls this once for all forks of it."""
    program = "import sys; print(*sys.path, sep='\\0')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.check_output([sys.executable, "-Pc", program], env=environment, text=True)[:-1].split(
        "\0"
    )


class ForkingPopen(subprocess.Popen[Any]):
    def _execute_child(self, args: Any, *others: Any) -> None:
        given = _PARAMETERS.bind(self, args, *others).arguments
        environment = dict(os.environ if given["env"] is None else given["env"])
        program = _program(args)
        if program is None or not self._can_fork(program, given, environment):
            super()._execute_child(args, *others)  # pyright: ignore[reportAttributeAccessIssue]
            return
        self.pid = self._fork(program, given, environment)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # pyright: ignore[reportAttributeAccessIssue]

    def _can_fork(
        self, _program: list[str], given: Mapping[str, Any], environment: Mapping[str, str]
    ) -> bool:
        same = all(environment.get(name) == before for name, before in _READ_AT_START.items())
        return same and not any(given[name] for name in _NOT_FORKED) and _can_show_in_proc()

    def _fork(self, program: list[str], given: Mapping[str, Any], environment: dict[str, str]) -> int:
        return _in_main_thread(partial(_fork, program, given, environment))


_PARAMETERS = inspect.signature(subprocess.Popen._execute_child)  # pyright: ignore[reportAttributeAccessIssue]


def _execute(path: str, arguments: Sequence[str], *, execv: Callable[..., NoReturn] = os.execv) -> NoReturn:
    program = _program(arguments)
    if program is None or not _can_show_in_proc():
        execv(path, arguments)
    given = {"args": arguments, "cwd": None, "start_new_session": False, "pass_fds": (), **_OWN_OUTPUT}
    live(program, given, dict(os.environ), signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def _in_main_thread(fork: Callable[[], int]) -> int:
    """A process that another thread forks cannot start threads of its own (Python 3.11: "thread state already
    initialized")."""
    if threading.current_thread() is threading.main_thread():
        return fork()
    answer: Future[int] = Future()
    _asked.put((fork, answer))
    signal.pthread_kill(threading.main_thread().ident or 0, _FORK)
    return answer.result()


def _fork_as_asked(_number: int, _frame: object) -> None:
    fork, answer = _asked.get()
    try:
        answer.set_result(fork())
    except OSError as error:
        answer.set_exception(error)


def _fork(program: list[str], given: Mapping[str, Any], environment: dict[str, str]) -> int:
    allowed = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            live(program, given, environment, allowed)
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, allowed)


def _program(args: Any) -> list[str] | None:
    """`-m MODULE ARGUMENT...` or `SCRIPT ARGUMENT...`, where the module or script is Makara's."""
    if isinstance(args, str | bytes) or args[0] != sys.executable:
        return None
    words = [os.fspath(word) for word in args[1:]]
    if words[:2] == ["-P", "-m"]:
        return words[1:] if words[2].startswith("makara.") else None
    return words if Path(words[0]).is_relative_to(_TESTS) else None


def _path_of(program: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    named = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    return named if program[0] == "-m" else [str(Path(program[0]).parent), *named]


def _begin(given: Mapping[str, Any], environment: dict[str, str]) -> None:
    """What the kernel and Python's start would have made of this process."""
    gc.freeze()  # objects of the parent stay, or they would close files that are this process's by then
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is not None:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(_FORK, _fork_as_asked)
    if given["start_new_session"]:
        os.setsid()
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    for ours, theirs in zip((given["p2cread"], given["c2pwrite"], given["errwrite"]), range(3), strict=True):
        if ours != -1:
            os.dup2(ours, theirs)
    kept = sorted(set(given["pass_fds"]))
    for first, last in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(first + 1, last)
    for descriptor in kept:
        os.set_inheritable(descriptor, True)
    os.environ.clear()
    os.environ.update(environment)
    _show_in_proc([os.fspath(each) for each in given["args"]], environment)
    asyncio._set_running_loop(None)
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore # it may have processes of its own
    atexit._clear()  # pyright: ignore[reportPrivateUsage]


def live(
    program: list[str], given: Mapping[str, Any], environment: dict[str, str], allowed: Iterable[int]
) -> NoReturn:
    """Run the program in this process, then end it. `given`: arguments of `Popen._execute_child`; `allowed`:
    the mask of signals to begin with."""
    status: object = 1
    try:
        _begin(given, environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, allowed)
        _forget_tests()
        sys.path[:] = [*_path_of(program, environment), *fresh_path()]
        _seed()
        _run(program)
        status = 0
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def _run(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def _forget_tests() -> None:
    """The job's own code may have modules of such names."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{_TESTS}/"):
            del sys.modules[name]


def _seed() -> None:
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack")),
        *((name, ctypes.c_uint64) for name in ("arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


_shown: ctypes.Array[ctypes.c_char]


@cache
def _can_show_in_proc() -> bool:
    """Whether this kernel knows PR_SET_MM_MAP, with such a structure. Elsewhere programs are executed."""
    size = ctypes.c_uint()
    given = (_PR_SET_MM_MAP_SIZE, ctypes.addressof(size), 0, 0)
    known = sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_MM, *map(ctypes.c_ulong, given)) == 0
    return known and size.value == ctypes.sizeof(_MemoryMap)


def _show_in_proc(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let /proc/PID/cmdline and environ show these (prctl(2), PR_SET_MM_MAP): a VM's processes are found by
    them."""
    global _shown  # what the kernel reads; the parent's, which it read until now, is freed last
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    memory = ctypes.create_string_buffer(words + variables, len(words) + len(variables))
    start = ctypes.addressof(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    fields = [0, 0, *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]  # as numbered in proc(5)
    now = _MemoryMap(
        start_code=int(fields[25]),
        end_code=int(fields[26]),
        start_stack=int(fields[27]),
        start_data=int(fields[44]),
        end_data=int(fields[45]),
        start_brk=int(fields[46]),
        brk=libc.sbrk(ctypes.c_long(0)),
        arg_start=start,
        arg_end=start + len(words),
        env_start=start + len(words),
        env_end=start + len(words) + len(variables),
        exe_fd=2**32 - 1,
    )
    arguments = (_PR_SET_MM_MAP, ctypes.addressof(now), ctypes.sizeof(now), 0)
    if libc.prctl(_PR_SET_MM, *(ctypes.c_ulong(each) for each in arguments)) != 0:
        raise OSError(ctypes.get_errno(), "prctl: PR_SET_MM_MAP")
    _shown = memory
