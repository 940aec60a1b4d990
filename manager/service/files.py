"""A job's files: its code bundle, and the values of its secrets until it ends."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

from ..config import write_private


class JobFiles:
    """Files below `<home>/jobs/<job>/`, readable by this user only. Blocking."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "jobs"
        self._home = home

    def generation_secret(self) -> bytes:
        """The secret from which keys of generations are derived; created at the first call."""
        return self._made_once("generations.secret")

    def join_secret(self) -> bytes:
        """The secret from which join tokens are derived; created at the first call."""
        return self._made_once("join.secret")

    def store(self, job: str, bundle: bytes, secrets: Mapping[str, str]) -> str:
        """Store both durably; returns the bundle's SHA-256."""
        self.store_secrets(job, secrets)
        write_private(self.bundle(job), bundle)
        return hashlib.sha256(bundle).hexdigest()

    def store_secrets(self, job: str, secrets: Mapping[str, str]) -> None:
        """Replace the stored secrets, durably."""
        write_private(self._secrets(job), json.dumps(dict(secrets)).encode())

    def forget(self, job: str) -> None:
        """Undo `store`."""
        self.forget_secrets(job)
        self.bundle(job).unlink(missing_ok=True)
        self.bundle(job).parent.rmdir()

    def forget_others(self, jobs: Collection[str]) -> None:
        """Delete secrets of jobs that were never journalled, because the process ended before."""
        for folder in self._folder.glob("*"):
            if folder.name not in jobs:
                self.forget_secrets(folder.name)

    def forget_secrets(self, job: str, but: Collection[str] = ()) -> None:
        """Delete all secrets except those named in `but`."""
        secrets = self.secrets(job)
        kept = {name: value for name, value in secrets.items() if name in but}
        if not kept:
            self._secrets(job).unlink(missing_ok=True)
        elif kept != secrets:
            write_private(self._secrets(job), json.dumps(kept).encode())

    def bundle(self, job: str) -> Path:
        return self._folder / job / "bundle.tar.gz"

    def secrets(self, job: str) -> dict[str, str]:
        """The values by name; empty once the job has ended."""
        path = self._secrets(job)
        return json.loads(path.read_bytes()) if path.exists() else {}

    def _secrets(self, job: str) -> Path:
        return self._folder / job / "secrets.json"

    def _made_once(self, name: str) -> bytes:
        path = self._home / name
        if not path.exists():
            write_private(path, secrets.token_bytes(32))
        return path.read_bytes()
