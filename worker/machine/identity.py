"""This machine's identity: an Ed25519 key pair in its folder, and the manager that admitted it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ...protocol.machines import SCHEME, Challenge
from ..agent.shown_token import write_secret


class WrongFolder(Exception):
    """The folder cannot be used; the message says why and what to do."""


class MachineIdentity:
    """The key pair of `folder`, created at first use, and locked by one process at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises `WrongFolder`."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held while this process lives
        except BlockingIOError:
            os.close(self._lock)
            raise WrongFolder(
                f"{folder} is another machine's that runs; name one of its own with --folder"
            ) from None
        path = folder / "machine.key"
        if not path.exists():
            write_secret(path, Ed25519PrivateKey.generate().private_bytes_raw().hex())
        try:
            self._key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text().strip()))
        except ValueError as error:
            raise WrongFolder(f"{path} holds no key; remove it, and this is a new machine") from error
        self.public_key = self._key.public_key().public_bytes_raw()
        self._manager_file = folder / "manager.id"

    @property
    def manager(self) -> str | None:
        """The identity of the manager that admitted this machine; None: none yet."""
        return self._manager_file.read_text().strip() if self._manager_file.exists() else None

    def admitted_by(self, manager: str) -> None:
        """Store the manager; from now on this machine signs for no other."""
        if self.manager != manager:
            write_secret(self._manager_file, manager)

    def authorization(self, challenge: Challenge) -> str:
        """The header that authenticates this machine. Raises `WrongFolder` for another manager."""
        if self.manager not in (None, challenge.manager):
            raise WrongFolder(
                f"this machine belongs to another manager than the one that answers; to have it join this "
                f"one, remove {self._manager_file} and give a join token"
            )
        signature = self._key.sign(challenge.signed()).hex()
        return f"{SCHEME} {self.public_key.hex()} {challenge.nonce} {signature}"

    def close(self) -> None:
        os.close(self._lock)
