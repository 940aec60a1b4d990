"""Local VMs: one session each, found again by the next manager, gone without a trace when they go."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from makara.manager.providers import Ended, NoCapacity, ProviderError, ResourceStatus, local, statuses
from makara.manager.providers.local import LocalProvider
from makara.manager.spec.placement import Attempt, Placement
from makara.protocol.messages import BootConfig, NoticeFile

PATIENCE_S = 300.0  # for what comes at once on a machine with nothing else to do

# A VM of two processes; it says that both are up by a file.
AGENT = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
folder = pathlib.Path(sys.argv[1]).parent
(folder / "child.new").write_text(str(child.pid))
(folder / "child.new").rename(folder / "child")
time.sleep(600)
"""


class Cloud:
    """A provider and the moments at which its VMs ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended = threading.Event()
        self.providers: list[LocalProvider] = []
        self.provider = self.new_provider()

    def new_provider(self) -> LocalProvider:
        """Of the next manager, once the one before has died."""
        for earlier in self.providers:
            earlier.close()
        provider = LocalProvider(self.folder, command=(sys.executable, "-c", AGENT), changed=self.ended.set)
        self.providers.append(provider)
        return provider

    def create(self, vm: str) -> None:
        placement = Placement(provider="local")
        self.provider.create(Attempt(vm=vm, placement=placement), boot(self.folder, vm))

    def start(self, vm: str) -> list[psutil.Process]:
        """The processes of a new VM, once both are up."""
        self.create(vm)
        child = self.folder / vm / "child"
        eventually(child.exists)
        leader = json.loads((self.folder / vm / "vm.json").read_text())["pid"]
        return [psutil.Process(leader), psutil.Process(int(child.read_text()))]


def eventually(condition: Callable[[], object]) -> None:
    tick = threading.Event()
    for _ in range(round(100 * PATIENCE_S)):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError(f"{condition} never came true")


def boot(folder: Path, vm: str) -> BootConfig:
    return BootConfig(
        vm=vm, job="j", manager_url="http://127.0.0.1:1", join_token="secret", directory=str(folder / vm)
    )


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    made = Cloud(tmp_path / "vms")
    yield made
    for vm in statuses(made.provider.list()):
        made.provider.release(vm)
    for provider in made.providers:
        provider.close()


def gone(processes: list[psutil.Process]) -> bool:
    try:
        return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def test_a_vm_is_requested_once_and_released_whole(cloud: Cloud) -> None:
    processes = cloud.start("a")
    cloud.create("a")
    assert statuses(cloud.provider.list()) == {"a": ResourceStatus.RUNNING}
    cloud.provider.release("a")
    cloud.provider.release("a")
    eventually(lambda: gone(processes))
    assert statuses(cloud.provider.list()) == {"a": ResourceStatus.GONE}
    with pytest.raises(Ended):
        cloud.create("a")  # a late repetition does not bring it back
    assert statuses(cloud.provider.list()) == {"a": ResourceStatus.GONE}


def test_the_boot_file_is_private_and_no_secret_is_in_arguments_or_environment(cloud: Cloud) -> None:
    leader, _ = cloud.start("a")
    assert stat.S_IMODE((cloud.folder / "a" / "boot.json").stat().st_mode) == 0o600
    assert "secret" not in " ".join(leader.cmdline())
    assert "secret" not in leader.environ().values()


def test_a_killed_vm_dies_whole_and_its_end_is_told(cloud: Cloud) -> None:
    processes = cloud.start("a")
    cloud.provider.inject("a", "kill")
    assert cloud.ended.wait(PATIENCE_S)
    eventually(lambda: gone(processes))
    assert statuses(cloud.provider.list()) == {"a": ResourceStatus.GONE}


def test_a_vm_whose_agent_died_leaves_no_trainer(cloud: Cloud) -> None:
    processes = cloud.start("a")
    processes[0].kill()
    assert cloud.ended.wait(PATIENCE_S)
    eventually(lambda: gone(processes))


def test_the_next_manager_finds_vms_and_those_that_ended_meanwhile(cloud: Cloud) -> None:
    first, second = cloud.start("a"), cloud.start("b")
    cloud.provider.close()
    first[0].kill()
    eventually(lambda: gone(first[:1]))
    cloud.provider = cloud.new_provider()
    assert statuses(cloud.provider.list()) == {"a": ResourceStatus.GONE, "b": ResourceStatus.RUNNING}
    eventually(lambda: gone(first))
    cloud.provider.release("b")
    eventually(lambda: gone(second))


def test_a_vm_that_was_started_and_not_written_down_is_adopted(cloud: Cloud) -> None:
    processes = cloud.start("a")
    (cloud.folder / "a" / "vm.json").unlink()  # the manager died in between
    cloud.provider = cloud.new_provider()
    assert statuses(cloud.provider.list()) == {"a": ResourceStatus.RUNNING}
    cloud.create("a")
    assert json.loads((cloud.folder / "a" / "vm.json").read_text())["pid"] == processes[0].pid


def test_another_process_with_the_number_of_a_dead_vm_is_left_alone(cloud: Cloud) -> None:
    cloud.start("a")
    cloud.provider.release("a")
    assert cloud.ended.wait(PATIENCE_S)  # from here on its watcher neither reads nor writes
    bystander = cloud.start("b")[0]
    record = json.loads((cloud.folder / "b" / "vm.json").read_text())
    record["started"] -= 100
    (cloud.folder / "a" / "vm.json").write_text(json.dumps(record))
    assert statuses(cloud.provider.list())["a"] is ResourceStatus.GONE
    cloud.provider.release("a")
    assert bystander.is_running()


def test_a_vm_that_an_earlier_version_started_is_known(cloud: Cloud) -> None:
    leader = cloud.start("a")[0]
    record = {"pid": leader.pid, "started": leader.create_time()}
    (cloud.folder / "a" / "vm.json").write_text(json.dumps(record))
    assert statuses(cloud.provider.list()) == {"a": ResourceStatus.RUNNING}


def test_a_wall_clock_that_is_set_ends_no_vm(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.start("a")
    booted_at = psutil.boot_time()  # the wall clock less the time since, so it moves with the wall clock
    for jump_s in (-3600.0, -1.0, 1.0, 3600.0):
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_at + jump_s)  # noqa: B023
        assert statuses(cloud.provider.list()) == {"a": ResourceStatus.RUNNING}


def test_a_vm_of_the_same_name_elsewhere_on_this_machine_is_left_alone(cloud: Cloud, tmp_path: Path) -> None:
    other = Cloud(tmp_path / "elsewhere")
    processes, neighbours = cloud.start("a"), other.start("a")
    cloud.provider.release("a")
    eventually(lambda: gone(processes))
    assert not any(gone([process]) for process in neighbours)
    assert statuses(other.provider.list()) == {"a": ResourceStatus.RUNNING}
    other.provider.release("a")
    eventually(lambda: gone(neighbours))
    other.provider.close()


def test_a_notice_is_written_and_then_kept(cloud: Cloud) -> None:
    processes = cloud.start("a")
    cloud.provider.inject("a", "notice", 3600.0)
    notice = NoticeFile.model_validate_json((cloud.folder / "a" / "notice.json").read_bytes())
    assert notice.deadline_s == 3600.0
    assert not gone(processes)
    cloud.provider.release("a")
    assert cloud.ended.wait(PATIENCE_S)
    cloud.ended.clear()
    processes = cloud.start("b")
    cloud.provider.inject("b", "notice", 0.2)
    assert cloud.ended.wait(PATIENCE_S)
    eventually(lambda: gone(processes))


def test_stopping_hangs_the_trainers_and_not_the_agent(cloud: Cloud) -> None:
    leader, child = cloud.start("a")
    cloud.provider.inject("a", "stop")
    eventually(lambda: child.status() == psutil.STATUS_STOPPED)
    assert leader.status() != psutil.STATUS_STOPPED
    cloud.provider.inject("a", "continue")
    eventually(lambda: child.status() != psutil.STATUS_STOPPED)


def test_beyond_its_capacity_there_is_none_to_be_had(cloud: Cloud) -> None:
    cloud.provider.set_capacity(1)
    cloud.start("a")
    with pytest.raises(NoCapacity, match="1 may live"):
        cloud.create("b")
    cloud.provider.release("a")
    cloud.start("b")


@pytest.mark.parametrize("vm", ["nobody", "../a", ""])
def test_faults_are_for_vms_that_run(cloud: Cloud, vm: str) -> None:
    with pytest.raises(ProviderError, match="not running"):
        cloud.provider.inject(vm, "kill")


def test_vms_share_out_the_gpus_of_the_machine(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found: all took the first."""
    monkeypatch.setattr(local, "shown_gpus", lambda: ["0", "GPU-ab", "2"])

    def shown(vm: str) -> str | None:
        return {process.environ().get("CUDA_VISIBLE_DEVICES") for process in cloud.start(vm)}.pop()

    assert [shown(vm) for vm in "abcd"] == ["0", "GPU-ab", "2", "0"]
    cloud.provider.release("b")
    cloud.provider = cloud.new_provider()
    assert [shown(vm) for vm in "ef"] == ["GPU-ab", "GPU-ab"]
    monkeypatch.setattr(local, "shown_gpus", list)
    assert shown("g") == os.environ.get("CUDA_VISIBLE_DEVICES")


def test_a_command_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    provider = LocalProvider(tmp_path / "vms", command=("/nowhere/python",))
    with pytest.raises(ProviderError, match="cannot start local VM a"):
        provider.create(Attempt(vm="a", placement=Placement(provider="local")), boot(tmp_path / "vms", "a"))


def test_a_vm_that_ended_leaves_its_logs_and_nothing_else(tmp_path: Path) -> None:
    """Found: code and caches of every VM there ever was filled the disk."""
    cloud = Cloud(tmp_path / "vms")
    cloud.start("a")
    directory = cloud.folder / "a"
    for name in ("code/train.py", "code/.cache/data.bin", "a.0.log", "a.0.log.1", "trace.json"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("x")
    elsewhere = tmp_path / "data"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("x")
    (directory / "link").symlink_to(elsewhere)
    cloud.provider.release("a")
    logs = {"a.0.log", "a.0.log.1", "agent.log", "vm.json"}
    assert {path.name for path in directory.iterdir()} == logs
    assert (elsewhere / "kept").exists()
    (directory / "late").mkdir()
    cloud.provider.close()
    cloud.new_provider().close()
    assert {path.name for path in directory.iterdir()} == logs, "the next manager looks once more"


# ---- processes that hide -----------------------------------------------------------------------------------

# The agent's own `main`, whose trainer is a program that hides another: in a session of its own, without its
# parents, its environment and all files.
HIDING = """
import asyncio, os, pathlib, sys
from makara.worker.agent import agent

def hide(folder):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            os.execve(sys.executable, [sys.executable, "-S", "-c", HIDDEN, str(folder)], {})
        os._exit(0)
    os.wait()

HIDDEN = '''import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "hidden.new").write_text(str(os.getpid()))
(folder / "hidden.new").rename(folder / "hidden")
time.sleep(600)'''

async def run(self):
    asyncio.get_running_loop().add_signal_handler(15, self._ended.set)
    hide(pathlib.Path(sys.argv[1]).parent)
    await self._ended.wait()

agent.Agent.run = run
agent.main()
"""


@pytest.fixture
def hiding(cloud: Cloud) -> tuple[Cloud, psutil.Process, psutil.Process, psutil.Process]:
    """A VM with a hidden process: its leader, its agent, and that."""
    cloud.provider._command = (sys.executable, "-c", HIDING)
    cloud.create("a")
    file = cloud.folder / "a" / "hidden"
    eventually(file.exists)
    leader = psutil.Process(json.loads((cloud.folder / "a" / "vm.json").read_text())["pid"])
    hidden = psutil.Process(int(file.read_text()))
    assert "MAKARA_VM" not in hidden.environ()
    assert os.getsid(hidden.pid) != leader.pid
    return cloud, leader, leader.children()[0], hidden


@pytest.mark.parametrize("end", ["release", "kill", "its leader", "its agent", "its leader, unobserved"])
def test_no_process_outlives_its_vm_however_it_hides_and_the_vm_ends(
    hiding: tuple[Cloud, psutil.Process, psutil.Process, psutil.Process], end: str
) -> None:
    cloud, leader, agent, hidden = hiding
    match end:
        case "release":
            cloud.provider.release("a")
        case "kill":
            cloud.provider.inject("a", "kill")
        case "its leader":
            leader.kill()
        case "its agent":
            agent.kill()
        case _:
            cloud.provider.close()  # the manager is away
            leader.kill()
    eventually(lambda: gone([leader, agent, hidden]))
