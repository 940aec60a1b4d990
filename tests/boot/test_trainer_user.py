"""What a VM's first boot keeps from a job's code: a machine of its own stands in for the VM, with a metadata
service at the clouds' own address."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import barred_machine
import pytest
from makara.manager.boot import first_boot
from vm_network import require_root_and

pytestmark = pytest.mark.clouds
IPV4, IPV6, WIRESERVER = "169.254.169.254", "fd00:ec2::254", "168.63.129.16"
CODE_UID = 61234


class Machine:
    """A network of its own, in which the addresses of the clouds' services answer on ports 53 and 80."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", f"{_SETUP}\nexec python3 -c '{_SERVE}' ready"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._shell.stdout is not None
        assert self._shell.stdout.readline() == "ready\n"

    def close(self) -> None:
        self._shell.kill()
        self._shell.wait()
        assert self._shell.stdout is not None
        self._shell.stdout.close()

    def run(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        inside = ["nsenter", f"--target={self._shell.pid}", "--net", "--", *command]
        return subprocess.run(inside, input=text, capture_output=True, text=True, check=False)

    def reaches(self, uid: int, address: str, port: int = 80) -> bool:
        """Whether a process of this user gets a connection, and at once."""
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
        done = self.run(*user, "/usr/bin/python3", "-c", _CONNECT, address, str(port))
        assert done.stdout in ("reached\n", "refused\n"), done.stderr
        return done.stdout == "reached\n"


_SETUP = f"""
ip link set lo up
ip address add {IPV4}/32 dev lo
ip address add {WIRESERVER}/32 dev lo
ip address add {IPV6}/128 dev lo nodad
"""
_SERVE = """
import socket
listening = []
for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    for port in (53, 80):
        made = socket.socket(family)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((host, port))
        made.listen()
        listening.append(made)
print("ready", flush=True)
while True:
    listening[1].accept()
"""
_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10).close()
    print("reached")
except ConnectionRefusedError:
    print("refused")
"""


@pytest.fixture
def machine() -> Iterator[Machine]:
    require_root_and({"ip"})
    assert shutil.which("nft") is not None, "apt-get install nftables"
    made = Machine()
    yield made
    made.close()


def bar(machine: Machine) -> None:
    program = f"import runpy, sys; runpy.run_path({first_boot.__file__!r})['bar_metadata']()"
    done = machine.run(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr


def test_only_root_reaches_the_metadata_service(machine: Machine) -> None:
    services = [IPV4, IPV6, WIRESERVER]
    assert all(machine.reaches(CODE_UID, address) for address in services)
    bar(machine)
    assert not any(machine.reaches(CODE_UID, address) for address in services)
    assert all(machine.reaches(0, address) for address in services)
    assert all(machine.reaches(CODE_UID, address, 53) for address in services), "names are for all"
    bar(machine)  # at the next boot, or once more in this one
    assert not any(machine.reaches(CODE_UID, address) for address in services)
    assert all(machine.reaches(0, address) for address in services)


def test_a_machine_where_the_service_cannot_be_barred_becomes_no_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = tmp_path / "nft"
    refusing.write_text("#!/bin/sh\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(subprocess.CalledProcessError):
        first_boot.bar_metadata()


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that every user can reach."""
    made = Path(tempfile.mkdtemp(prefix="makara-vm-"))
    yield made
    shutil.rmtree(made)


def test_a_jobs_code_has_the_credentials_of_its_store_and_nothing_else_of_its_vm(folder: Path) -> None:
    require_root_and({"ip"})
    program = [sys.executable, barred_machine.__file__, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(Path(barred_machine.__file__).parent)}
    done = subprocess.run(
        ["unshare", "--net", *program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    user = pwd.getpwnam(barred_machine.USER)
    assert (found["uid"], found["groups"], found["user"]) == (user.pw_uid, [], user.pw_name)
    assert "NoNewPrivs:\t1\n" in found["status"]
    assert found["metadata"] == "[Errno 111] Connection refused"
    assert found["agent's files"] == ["Permission denied", "Permission denied"]
    assert found["agent's environment"] == "Permission denied"
    assert found["credentials"] == barred_machine.ROLE
    assert found["set up"] == f"{user.pw_name}\n"
    assert found["home"] == [str(folder / "home"), True]
    assert found["owners"] == [user.pw_name], "the job's folder is its own to write"


_START = """
import asyncio, os, sys
from pathlib import Path
from makara.checkpoint import inherited
from makara.protocol.messages import TrainerUser
from makara.worker.agent.trainer_user import CodeUser

folder, search, name = sys.argv[1:]
user = CodeUser(TrainerUser(name=name, home=folder, python=f"{folder}/bin/python"))

async def main():
    envs = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": f"{folder}/loader", "PATH": search}
    with open(f"{folder}/output", "wb") as output:
        process = await user.start(
            *("/bin/sh", "-c", "grep NoNewPrivs /proc/self/status; id -u"),
            env=inherited(user.environment(os.environ), envs), cwd=Path(folder), output=output,
        )
    assert await process.wait() == 0

asyncio.run(main())
"""


def test_nothing_of_a_jobs_environment_is_obeyed_by_root(folder: Path) -> None:
    """Found: the program that gave root's rights up was searched in the PATH of the job, and loaded what the
    job's LD_PRELOAD names. Its loader writes a file here, as whom it runs as."""
    require_root_and({"ip"})
    folder.chmod(0o777)
    programs = folder / "bin"
    programs.mkdir()
    for name in ("setpriv", "sh", "id"):
        program = programs / name
        program.write_text(f'#!/bin/sh\n: > {folder}/hijacked-$$\nexec /usr/bin/{name} "$@"\n')
        program.chmod(0o755)
    arguments = [str(folder), f"{programs}:{os.defpath}", barred_machine.USER]
    subprocess.run([sys.executable, "-c", _START, *arguments], check=True)
    uid = pwd.getpwnam(barred_machine.USER).pw_uid
    made = [path for path in folder.iterdir() if path.name.startswith(("loader", "hijacked"))]
    assert {path.name.partition(".")[0].partition("-")[0] for path in made} == {"loader", "hijacked"}
    assert {path.stat().st_uid for path in made} == {uid}
    assert (folder / "output").read_text() == f"NoNewPrivs:\t1\n{uid}\n"


def test_what_a_job_installs_hides_what_the_agent_has_and_leaves_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents, codes = tmp_path / "venv", tmp_path / "trainers"
    monkeypatch.setattr(first_boot, "VENV", str(agents))
    monkeypatch.setattr(first_boot, "USERS_VENV", str(codes))
    first_boot.make_venv(sys.executable, None)
    first_boot.make_users_venv(sys.executable, None)

    def packages(of: Path) -> Path:
        (found,) = of.glob("lib/python3*/site-packages")
        return found

    def imported(by: Path, name: str) -> str:
        command = [str(by / "bin" / "python"), "-P", "-c", f"import {name}; print({name}.__file__)"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    for name in ("both", "alone"):
        (packages(agents) / f"{name}.py").touch()
    assert imported(codes, "both") == str(packages(agents) / "both.py")
    (packages(codes) / "both.py").touch()
    assert imported(codes, "both") == str(packages(codes) / "both.py")
    assert imported(codes, "alone") == str(packages(agents) / "alone.py")
    assert imported(agents, "both") == str(packages(agents) / "both.py")
