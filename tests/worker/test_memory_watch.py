"""What an agent can say of the memory of a trainer that something killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from makara.worker.memory_watch import MemoryWatch, available_bytes, oom_kills, total_bytes

_HOLDS = "held = b'x' * 200_000_000; print(flush=True); import time; time.sleep(600)"
MB = 1_000_000


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds 200 MB."""
    process = subprocess.Popen([sys.executable, "-c", _HOLDS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def system(root: Path, version: int, kills: int, *, limit: str = "", usage: int = 0, cache: int = 0) -> Path:
    """The files of a kernel that limits this process's cgroup."""
    texts = {"proc/vmstat": f"nr_free_pages 1\noom_kill {kills}\n"}
    if version == 2:
        folder = "sys/fs/cgroup/vm"
        texts |= {
            "proc/self/cgroup": "0::/vm\n",
            f"{folder}/memory.events": f"max 9\noom_kill {kills}\noom_group_kill 0\n",
            f"{folder}/memory.max": limit,
            f"{folder}/memory.current": str(usage),
            f"{folder}/memory.stat": f"anon 5\ninactive_file {cache}\n",
        }
    elif version == 1:
        folder = "sys/fs/cgroup/memory"
        texts |= {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu:/\n0::/\n",
            f"{folder}/memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n",
            f"{folder}/memory.limit_in_bytes": limit,
            f"{folder}/memory.usage_in_bytes": str(usage),
            f"{folder}/memory.stat": f"cache 5\ntotal_inactive_file {cache}\n",
        }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_killed_process_leaves_what_it_held(tmp_path: Path, holder: subprocess.Popen[bytes]) -> None:
    watch = MemoryWatch(holder.pid, system(tmp_path, 2, 0, limit="max"))
    watch.sample()
    holder.kill()
    holder.wait()
    watch.sample()
    account = watch.account()
    held_mb = float(account.removeprefix("it held ").split()[0])
    assert 200 <= held_mb < 300
    assert "the kernel killed nothing for want of memory meanwhile" in account


def test_what_is_left_is_looked_at_in_one_sample_of_four(
    tmp_path: Path, holder: subprocess.Popen[bytes]
) -> None:
    watch = MemoryWatch(holder.pid, system(tmp_path, 2, 0, limit=str(40 * MB), usage=10 * MB))
    watch.sample()
    system(tmp_path, 2, 0, limit=str(40 * MB), usage=38 * MB)
    for left in ("30 MB", "30 MB", "30 MB", "2 MB"):
        watch.sample()
        assert f"{left} were left" in watch.account()


@pytest.mark.parametrize("version", [1, 2])
def test_the_kernels_count_of_kills_is_told(
    tmp_path: Path, holder: subprocess.Popen[bytes], version: int
) -> None:
    watch = MemoryWatch(holder.pid, system(tmp_path, version, 3, limit="1000000000"))
    watch.sample()
    system(tmp_path, version, 4, limit="1000000000")
    assert "the kernel killed 1 process for want of memory meanwhile" in watch.account()


def test_without_a_kernel_that_tells_nothing_is_claimed(tmp_path: Path) -> None:
    watch = MemoryWatch(2**22 + 1, tmp_path)  # no process has this number
    watch.sample()
    assert watch.account() == "the kernel does not say whether it was for want of memory"
    assert oom_kills(tmp_path) is None


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_left_is_what_the_cgroup_leaves(tmp_path: Path, version: int) -> None:
    root = system(tmp_path, version, 0, limit=str(40 * MB), usage=35 * MB, cache=10 * MB)
    assert available_bytes(root) == 15 * MB


def test_a_cgroup_without_a_limit_leaves_what_the_machine_has(tmp_path: Path) -> None:
    assert available_bytes(system(tmp_path, 2, 0, limit="max\n", usage=35 * MB)) > 50 * MB


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_the_memory_that_it_is_limited_to(tmp_path: Path, version: int) -> None:
    assert total_bytes(system(tmp_path, version, 0, limit=str(40 * MB), usage=35 * MB)) == 40 * MB


def test_a_cgroup_has_no_more_than_the_one_around_it(tmp_path: Path) -> None:
    root = system(tmp_path, 2, 0, limit=str(40 * MB), usage=35 * MB)
    (root / "proc/self/cgroup").write_text("0::/vm/worker\n")
    (root / "sys/fs/cgroup/vm/worker").mkdir()
    (root / "sys/fs/cgroup/vm/worker/memory.max").write_text("max\n")
    assert total_bytes(root) == 40 * MB
    assert available_bytes(root) == 5 * MB


@pytest.mark.parametrize(("version", "limit"), [(1, "9223372036854771712\n"), (2, "max\n")])
def test_without_a_limit_a_cgroup_has_the_memory_of_the_machine(
    tmp_path: Path, version: int, limit: str
) -> None:
    assert total_bytes(system(tmp_path, version, 0, limit=limit)) == psutil.virtual_memory().total
