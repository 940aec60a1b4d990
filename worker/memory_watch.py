"""Samples a process's memory, to explain why it was killed.

SIGKILL comes without a reason. The memory that the process had just before, the machine's available memory,
and the kernel's count of out-of-memory kills usually show whether it ran out of memory.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_ROOT = Path("/")
_AVAILABLE_EVERY = 4  # samples: available memory needs several files, the process's memory one
_UNITS = ("B", "kB", "MB", "GB", "TB")


class MemoryWatch:
    """Samples one process; `account` describes the last samples. Use from one thread."""

    def __init__(self, pid: int, root: Path = _ROOT) -> None:
        """`root`: the folder of `proc` and `sys`."""
        self._root = root
        self._process: psutil.Process | None = None
        self._held_bytes = self._most_bytes = 0
        self._available_bytes: int | None = None
        self._num_samples = 0
        self._kills_before = oom_kills(root)
        try:
            self._process = psutil.Process(pid)
        except psutil.NoSuchProcess:
            return  # it has ended already

    def sample(self) -> None:
        """Record the process's memory. If it is gone, keeps the last sample."""
        try:
            held_bytes = self._process.memory_info().rss if self._process is not None else 0
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return
        if held_bytes:  # a zombie has none
            self._held_bytes = held_bytes
            self._most_bytes = max(self._most_bytes, held_bytes)
            if self._num_samples % _AVAILABLE_EVERY == 0:
                self._available_bytes = available_bytes(self._root)
            self._num_samples += 1

    def account(self) -> str:
        """A message for a person who asks why it was killed."""
        parts: list[str] = []
        if self._available_bytes is not None:
            held, most = _in_words(self._held_bytes), _in_words(self._most_bytes)
            left = _in_words(self._available_bytes)
            parts.append(f"it held {held} of memory at the end and {most} at most; {left} were left")
        before, after = self._kills_before, oom_kills(self._root)
        if before is None or after is None:
            parts.append("the kernel does not say whether it was for want of memory")
        elif after > before:
            killed = "1 process" if after == before + 1 else f"{after - before} processes"
            parts.append(f"the kernel killed {killed} for want of memory meanwhile")
        else:
            parts.append("the kernel killed nothing for want of memory meanwhile")
        return "; ".join(parts)


def oom_kills(root: Path = _ROOT) -> int | None:
    """The kernel's count of out-of-memory kills, in this process's cgroup or on the whole machine, whichever
    is larger; None if neither is available."""
    counts = [_field(path, "oom_kill") for path in _cgroup_files(root, "memory.events", "memory.oom_control")]
    counts.append(_field(root / "proc/vmstat", "oom_kill"))
    return max((count for count in counts if count is not None), default=None)


def total_bytes(root: Path = _ROOT) -> int:
    """The machine's memory, or its cgroup's limit (a container's, for example) if that is less."""
    limits = (_number(path) for path in _cgroup_files(root, "memory.max", "memory.limit_in_bytes"))
    return min([psutil.virtual_memory().total, *(limit for limit in limits if limit is not None)])


def available_bytes(root: Path = _ROOT) -> int:
    """Memory still available: the machine's, or what is left of its cgroup's limit."""
    available = psutil.virtual_memory().available
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        for path in _cgroup_files(root, limit_name):
            limit, usage = _number(path), _number(path.with_name(usage_name))
            if limit is not None and usage is not None:
                cache = _field(path.with_name("memory.stat"), cache_name) or 0
                available = min(available, max(0, limit - usage + cache))
    return available


def _cgroup_files(root: Path, *names: str) -> list[Path]:
    """The existing files of these names, of this process's cgroup and its ancestors, which also limit it:
    cgroups of version 2, or the memory controller of version 1."""
    folders: dict[Path, None] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        # In a container the path is often that on the host, and the mount is the cgroup itself.
        own = mount / path.lstrip("/")
        folders |= dict.fromkeys([own, *(folder for folder in own.parents if folder.is_relative_to(mount))])
    return [folder / name for folder in folders for name in names if (folder / name).is_file()]


def _field(path: Path, name: str) -> int | None:
    lines = (line.split() for line in _text(path).splitlines())
    return next((int(words[1]) for words in lines if len(words) == 2 and words[0] == name), None)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # not on this system, or not for this user


def _in_words(size_bytes: float) -> str:
    for unit in _UNITS[:-1]:
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} {_UNITS[-1]}"
