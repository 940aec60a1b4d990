"""The VM of `makara up`, as processes on loopback: its user data's own program, below a folder of its own.

Played are cloud-init, systemd and users: `systemctl`, `useradd` and `chown` are programs of this file, found
first on the VM's path. The image's Python sees the libraries of these tests, and no Makara.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from written_files import files_in

_PLAYED = {
    "useradd": "exit 0",
    "chown": "exit 0",
    # The unit's own environment and command, below $ROOT; a power-off is a file.
    "systemctl": """
case "$1" in
poweroff) touch "$ROOT/ended"; exit 0;;
disable) echo "$2" >>"$ROOT/disabled"; exit 0;;
restart) ;;
*) exit 0;;
esac
. "$ROOT/etc/makara/manager.env"
grep -q 'ExecStart=/opt/makara/bin/makara server --port 8700 $MAKARA_SERVER_OPTIONS' \
    "$ROOT/etc/systemd/system/$2" || exit 1
MAKARA_HOME="$ROOT/var/lib/makara" nohup \
    "$ROOT/opt/makara/bin/makara" server --port 8700 $MAKARA_SERVER_OPTIONS >"$ROOT/manager.log" 2>&1 &
echo $! >"$ROOT/manager.pid"
""",
}
_PYTHONS = "import makara.manager.boot.first_boot as first_boot; first_boot.PYTHONS = [{python!r}]; "


class ManagerVm:
    """Boots when it is made; `close` ends it with all that it started."""

    def __init__(self, folder: Path, user_data: bytes, **changes: Any) -> None:
        """`changes`: of its boot file."""
        self.root = folder
        self.boot = folder / "boot"
        self.boot.mkdir(parents=True)
        files = files_in(user_data)
        told = {**json.loads(files["/etc/makara-manager/boot.json"]), "host": "127.0.0.1", **changes}
        (self.boot / "boot.json").write_text(json.dumps(told))
        (self.boot / "end_vm.py").write_text(files["/etc/makara-manager/end_vm.py"])
        program = self.boot / "manager_boot.py"
        text = files["/etc/makara-manager/manager_boot.py"]
        place = "from makara.manager.hosting.installing"
        assert text.count(place) == 1
        program.write_text(text.replace(place, _PYTHONS.format(python=self._python()) + "\n" + place))
        self._process = self._run(program)

    def _run(self, program: Path) -> subprocess.Popen[bytes]:
        bin_ = self.root / "bin"
        bin_.mkdir()
        for name, script in _PLAYED.items():
            (bin_ / name).write_text(f"#!/bin/sh\n{script}\n")
            (bin_ / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "ROOT": str(self.root)}
        environment = {name: value for name, value in environment.items() if not name.startswith("MAKARA_")}
        with (self.root / "console.log").open("ab") as console:
            return subprocess.Popen(
                [sys.executable, "-I", str(program), str(self.boot), str(self.root)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=environment,
                start_new_session=True,
            )

    def _python(self) -> str:
        """Of an image that has everything except Makara: nothing is downloaded."""
        image = self.root / "image"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(image)], check=True)
        libraries = self.root / "libraries"
        libraries.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if "makara" not in path.name and not path.name.endswith(".pth"):
                (libraries / path.name).symlink_to(path)
        (seen,) = image.glob("lib/python3*/site-packages")
        (seen / "image.pth").write_text(f"{libraries}\n")
        return str(image / "bin" / "python")

    @property
    def ended(self) -> bool:
        """Whether it powered itself off."""
        return (self.root / "ended").exists()

    @property
    def console(self) -> str:
        logs = (self.root / name for name in ("console.log", "manager.log"))
        return "\n".join(log.read_text(errors="replace") for log in logs if log.exists())

    def wait(self) -> int:
        """Until the boot program ends; its status."""
        return self._process.wait(300)

    def close(self) -> None:
        pid = self.root / "manager.pid"
        if pid.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGTERM)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
