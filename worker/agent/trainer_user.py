"""The user as whom a job's code runs on a VM: the agent's, or, if that is root, one with fewer rights.

On a cloud's VM that user cannot reach the metadata service (`manager/boot/first_boot.py`), so the code cannot
use the VM's rights in its account.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pwd
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...protocol.messages import TrainerUser

_PR_SET_NO_NEW_PRIVS = 38


@dataclass(frozen=True, slots=True)
class CodeUser:
    """None: the agent's own user."""

    user: TrainerUser | None

    @property
    def python(self) -> str:
        return self.user.python if self.user is not None else sys.executable

    async def start(
        self,
        *command: str,
        env: Mapping[str, str],
        cwd: Path,
        output: IO[bytes],
        pass_fds: Sequence[int] = (),
    ) -> asyncio.subprocess.Process:
        """Run a command, given by its path, in a session of its own; its output goes to `output`.

        `env` is the job's, and affects what is executed (PATH, LD_PRELOAD): so the process becomes the user
        before it executes anything. It has no other groups, and cannot return.
        """
        become: dict[str, Any] = {}
        if self.user is not None:
            entry = pwd.getpwnam(self.user.name)
            become = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            _give_up_new_rights()
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
            env=env,
            cwd=cwd,
            start_new_session=True,
            **become,
        )

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """`inherited`, with the user's own variables."""
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
        """Make the user the owner of `folder` and its contents, and let it reach the folder."""
        if self.user is None:
            return
        entry = pwd.getpwnam(self.user.name)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, entry.pw_uid, entry.pw_gid, follow_symlinks=False)
        folder.parent.chmod(0o711)


def _give_up_new_rights() -> None:
    """Keep programs that this thread starts from gaining rights, by set-user-ID bits for example.

    Permanently, and for the agent as well, which is root: libraries that a user's environment preloads could
    otherwise run before a program that does this in the new process (prctl(2)).
    """
    arguments = [ctypes.c_ulong(number) for number in (1, 0, 0, 0)]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, *arguments) != 0:
        raise OSError(ctypes.get_errno(), "prctl: PR_SET_NO_NEW_PRIVS")
