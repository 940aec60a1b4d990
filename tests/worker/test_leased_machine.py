"""What a machine of a person's own does with what its VMs leave."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import pytest
from makara.manager.spec.placement import Attempt, Placement
from makara.protocol.machines import Lease, MachineOrders, MachineReport
from makara.worker.agent.notices.file import FileSource
from makara.worker.machine import leased
from makara.worker.machine.leased import LeasedVm
from provider_stands import boot_of

URL = "http://127.0.0.1:1"
COMMAND = (sys.executable, "-S", "-c", "import time; time.sleep(600)")

_LEAVE_READ_ONLY_FOLDERS = """
import json, os, sys
from pathlib import Path
from makara.protocol.machines import MachineOrders
from makara.worker.machine.leased import LeasedVm

folder, orders = Path(sys.argv[1]), MachineOrders.model_validate_json(sys.argv[2])
vm = LeasedVm(folder, url="http://127.0.0.1:1", command=json.loads(sys.argv[3]))
vm.obey(orders)
place = folder / "vms" / orders.lease.name
(place / "cache" / "inner").mkdir(parents=True)
(place / "cache" / "inner" / "file").touch()
(place / "cache" / "link").symlink_to(folder / "kept")
for path in (place / "cache" / "inner", place / "cache"):
    path.chmod(0o555)
report = vm.obey(MachineOrders(version=2))
print(json.dumps([report.lease, report.ended, os.listdir(folder / "vms")]))
"""


def orders(folder: Path, vm: str, version: int = 1) -> MachineOrders:
    attempt = Attempt(vm=vm, number=1, placement=Placement(provider="static"))
    lease = Lease(name=attempt.name, vm=vm, boot=boot_of(attempt, folder))
    return MachineOrders(version=version, lease=lease)


def test_a_jobs_read_only_folders_are_wiped(tmp_path: Path) -> None:
    """Found: the machine lost its connection at each look, for ever, and was lost to its pool."""
    kept = tmp_path / "machine" / "kept"
    kept.mkdir(parents=True)
    kept.chmod(0o555)
    # As root, without the right to pass over modes.
    as_owner = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    arguments = [str(kept.parent), orders(tmp_path, "a").model_dump_json(), json.dumps(COMMAND)]
    done = subprocess.run(
        [*as_owner, sys.executable, "-c", _LEAVE_READ_ONLY_FOLDERS, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None, "a-1", []]
    assert kept.stat().st_mode & 0o777 == 0o555, "what a link leads to is not the VM's"


def test_a_vm_that_cannot_be_started_has_ended_and_the_machine_is_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: after a disk was full for a moment the machine could be no VM until it was started anew."""
    write, has_room = leased.write_secret, iter([False, True])

    def write_if_there_is_room(path: Path, text: str) -> None:
        if path.name == "boot.json" and not next(has_room):
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(leased, "write_secret", write_if_there_is_room)
    vm = LeasedVm(tmp_path, url=URL, command=COMMAND)
    report = vm.obey(orders(tmp_path, "a"))
    assert (report.lease, report.ended, report.unwiped) == (None, "a-1", "")
    assert list((tmp_path / "vms").iterdir()) == []
    assert vm.obey(orders(tmp_path, "b", version=2)).lease == "b-1"
    vm.obey(MachineOrders(version=3))


def test_a_vm_hears_of_its_machines_leaving_and_a_machine_that_is_started_again_takes_it_back(
    tmp_path: Path,
) -> None:
    killed = LeasedVm(tmp_path, url=URL, command=COMMAND)
    killed.obey(orders(tmp_path, "a"))
    assert killed.leave(20.0) == "a"
    source = FileSource(tmp_path / "vms" / "a-1")
    notice = asyncio.run(source.read()).notice
    assert notice is not None
    assert 0.0 < notice.left_s <= 20.0
    assert killed.obey(None).leaving
    vm = LeasedVm(tmp_path, url=URL, command=COMMAND)
    assert asyncio.run(source.read()).notice is None
    report = vm.obey(None)
    assert (report.lease, report.leaving) == ("a-1", False)
    vm.end()
    assert list((tmp_path / "vms").iterdir()) == []
    for child in killed._children:
        child.wait()


class Unwipable:
    """Refuses to wipe what lies in a folder with `stuck` in it, as an entry of another user's would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._wipe = leased.wipe
        monkeypatch.setattr(leased, "wipe", self)
        monkeypatch.setattr(leased, "_WIPE_AGAIN_S", 0.0)

    def __call__(self, folder: Path) -> None:
        if (folder / "stuck").exists():
            raise PermissionError(1, "Operation not permitted", "stuck")
        self._wipe(folder)


@pytest.mark.parametrize("mended", [lambda stuck: stuck.unlink(), lambda stuck: rmtree(stuck.parent)])
def test_what_cannot_be_wiped_is_told_and_no_other_job_gets_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mended: Callable[[Path], None]
) -> None:
    Unwipable(monkeypatch)
    vm = LeasedVm(tmp_path, url=URL, command=COMMAND)
    assert vm.obey(orders(tmp_path, "a")).lease == "a-1"
    stuck = tmp_path / "vms" / "a-1" / "stuck"
    stuck.touch()

    def is_stuck(report: MachineReport) -> bool:
        return (report.lease, report.ended) == (None, "a-1") and "stuck" in report.unwiped

    assert is_stuck(vm.obey(MachineOrders(version=2)))
    assert is_stuck(vm.obey(orders(tmp_path, "b", version=3)))
    vm = LeasedVm(tmp_path, url=URL, command=COMMAND)  # `makara join`, started again
    assert is_stuck(vm.obey(orders(tmp_path, "b")))
    mended(stuck)
    report = vm.obey(orders(tmp_path, "b"))
    assert (report.lease, report.unwiped) == ("b-1", "")
    vm.obey(MachineOrders(version=2))
    assert list((tmp_path / "vms").iterdir()) == []
