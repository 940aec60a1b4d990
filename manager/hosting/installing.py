"""Runs on the manager's VM, once it has its payload, with the image's own Python: installs Makara, makes the
manager's home, and has systemd keep the manager running.

Needs Python alone, as `first_boot`, whose helpers it uses.
"""

import glob
import json
import os
import pwd
import shlex
import shutil
from pathlib import Path
from typing import Any

from ..boot import first_boot

USER, UNIT = "makara-manager", "makara-manager.service"


def main(folder: str, root: str = "/") -> None:
    """`folder`: of manager_boot.py. `root`: below which everything is put. Raises `CalledProcessError`."""
    there, below = Path(folder), Path(root)
    made = json.loads((there / "payload" / "manager.json").read_text())
    told = json.loads((there / "told.json").read_text())
    os.umask(0o022)  # what is installed the manager's user reads
    venv = below / "opt/makara"
    install(there / "payload", made, str(venv))
    os.umask(0o077)
    home = below / "var/lib/makara"
    make_home(there, home, str(venv))
    boot = json.loads((there / "boot.json").read_text())
    start(below, options(boot, told))


def install(payload: Path, made: dict[str, Any], venv: str) -> None:
    torch, constraints = f"torch=={made['torch']}", str(payload / "constraints.txt")
    python, torch_at = first_boot.choose(torch)
    first_boot.have_venv(python)
    first_boot.new_venv(python, venv, torch_at)
    pip = [os.path.join(venv, "bin", "python"), "-m", "pip", "install", "--no-input", "-c", constraints]
    if torch_at is None:
        first_boot.run(*pip, "--extra-index-url", first_boot.CPU_INDEX, torch)
    (wheel,) = glob.glob(str(payload / "*.whl"))
    extras = f"[{','.join(made['extras'])}]" if made["extras"] else ""
    first_boot.run(*pip, torch, wheel + extras)


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
    first_boot.run("systemctl", "enable", "--now", UNIT)
