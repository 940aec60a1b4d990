"""Runs on the manager's VM, once it has its payload, with the image's own Python: installs Makara, makes the
manager's home, has systemd keep the manager running, and waits until it answers.

Needs Python alone, as `first_boot`, whose helpers it uses.
"""

import glob
import json
import os
import pwd
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from ..boot import first_boot

USER, UNIT = "makara-manager", "makara-manager.service"
ANSWER_WITHIN_S = 300.0  # a small VM that imports everything for the first time


def main(folder: str, root: str = "/") -> None:
    """`folder`: of manager_boot.py. `root`: below which everything is put. Raises `CalledProcessError`."""
    there, below = Path(folder), Path(root)
    made = json.loads((there / "payload" / "manager.json").read_text())
    told = json.loads((there / "told.json").read_text())
    os.umask(0o022)  # what is installed the manager's user reads
    venv = make_room(below)
    install(there / "payload", made, str(venv))
    place = below / "opt/makara"
    switch(place, venv)
    os.umask(0o077)
    home = below / "var/lib/makara"
    make_home(there, home, str(place))
    boot = json.loads((there / "boot.json").read_text())
    start(below, options(boot, told))
    await_answer(boot["port"], (there / "ca.pem").read_text())


def make_room(below: Path) -> Path:
    """A new folder for a venv, beside one that a manager may be running from."""
    room, used = below / "opt/makara-venvs", (below / "opt/makara").resolve()
    room.mkdir(parents=True, exist_ok=True)
    for left in room.iterdir():
        if left.resolve() != used:
            shutil.rmtree(left)
    return room / f"{time.time_ns():x}"


def switch(place: Path, venv: Path) -> None:
    """From now on `place` is this venv."""
    link = place.with_name("makara.new")
    link.unlink(missing_ok=True)
    link.symlink_to(venv)
    link.replace(place)


def install(payload: Path, made: dict[str, Any], venv: str) -> None:
    torch, constraints = f"torch=={made['torch']}", str(payload / "constraints.txt")
    python, torch_at = first_boot.choose(torch)
    first_boot.have_venv(python)
    first_boot.new_venv(python, venv, torch_at)
    pip = [os.path.join(venv, "bin", "python"), "-m", "pip", "install", "--no-input", "-c", constraints]
    if torch_at is None:
        first_boot.keep_trying(*pip, "--extra-index-url", first_boot.CPU_INDEX, torch)
    (wheel,) = glob.glob(str(payload / "*.whl"))
    extras = f"[{','.join(made['extras'])}]" if made["extras"] else ""
    first_boot.keep_trying(*pip, torch, wheel + extras)


def make_home(there: Path, home: Path, venv: str) -> None:
    """What the manager finds at its start: its authority, its clouds, who it is and whose."""
    home.mkdir(parents=True, exist_ok=True)
    for name, source in {"ca.pem": there, "ca.key": there, "clouds.yaml": there / "payload"}.items():
        shutil.copy(source / name, home / name)
    python = [os.path.join(venv, "bin", "python"), "-P", "-m", "makara.manager.hosting.founding"]
    first_boot.run(*python, str(home), str(there / "payload" / "manager.json"))
    try:
        pwd.getpwnam(USER)
    except KeyError:
        shell = shutil.which("nologin") or "/bin/false"
        first_boot.run(
            *("useradd", "--system", "--user-group", "--no-create-home"),
            *("--home-dir", str(home), "--shell", shell, USER),
        )
    first_boot.run("chown", "-R", f"{USER}:", str(home))


def options(boot: dict[str, Any], told: dict[str, Any]) -> list[str]:
    """Of `makara server`. A job's code on this VM would have the manager's rights: there is none."""
    listen = ["--host", boot["host"], "--port", str(boot["port"]), "--allow-remote"]
    names = [word for name in told["names"] for word in ("--name", name)]
    return [*listen, "--no-local", "--public-url", told["url"], *names]


def start(below: Path, arguments: list[str]) -> None:
    settings, units = below / "etc/makara", below / "etc/systemd/system"
    for path in (settings, units):
        path.mkdir(parents=True, exist_ok=True)
    (settings / "manager.env").write_text(f"MAKARA_SERVER_OPTIONS={shlex.quote(' '.join(arguments))}\n")
    shutil.copy(Path(__file__).parents[2] / "deploy" / UNIT, units / UNIT)
    first_boot.run("systemctl", "daemon-reload")
    first_boot.run("systemctl", "enable", UNIT)
    first_boot.run("systemctl", "restart", UNIT)


def await_answer(port: int, ca: str, within_s: float = ANSWER_WITHIN_S) -> None:
    """Until a manager of this authority answers. Raises `SystemExit` if none does: it would be started for
    ever, and nobody would know."""
    stop = time.monotonic() + within_s
    while True:
        try:
            first_boot.ask(f"https://127.0.0.1:{port}/healthz", {}, ca=ca)
            return
        except OSError as error:
            if time.monotonic() > stop:
                raise SystemExit(f"the manager does not answer within {within_s:.0f} s: {error}") from error
        time.sleep(1)
