"""As whom a job's code runs on a VM: as the agent's user, or, if that is root, as one that may do less.

On a cloud's VM the metadata service is barred to that user (`manager/boot/first_boot.py`), so that the code
has no part in what the VM may do in its account.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...protocol.messages import TrainerUser


@dataclass(frozen=True, slots=True)
class CodeUser:
    """None: the agent's own user."""

    user: TrainerUser | None

    @property
    def python(self) -> str:
        return self.user.python if self.user is not None else sys.executable

    @property
    def prefix(self) -> tuple[str, ...]:
        """What begins a command: it gives up the agent's rights, for good, and becomes the command itself."""
        if self.user is None:
            return ()
        name = self.user.name
        return ("setpriv", f"--reuid={name}", f"--regid={name}", "--clear-groups", "--no-new-privs", "--")

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """`inherited`, with what belongs to the user."""
        if self.user is None:
            return dict(inherited)
        path = inherited.get("PATH", os.defpath)
        return {
            **inherited,
            "HOME": self.user.home,
            "USER": self.user.name,
            "LOGNAME": self.user.name,
            "PATH": f"{Path(self.user.python).parent}{os.pathsep}{path}",
        }

    def give(self, folder: Path) -> None:
        """Make `folder` and all that is in it the user's, and have it reach that."""
        if self.user is None:
            return
        entry = pwd.getpwnam(self.user.name)
        for place, _, names in os.walk(folder):
            for path in (place, *(os.path.join(place, name) for name in names)):
                os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)
        folder.parent.chmod(0o711)
