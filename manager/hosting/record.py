"""The record of the manager's VM, in `<home>/up`. It is written before anything is requested, so that an
interrupted `makara up` continues and `makara down` deletes what it left.

After the manager has answered, the folder holds what command lines read from a manager's home: server.json,
ca.pem and admin.token.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Generator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ..config import write_private
from ..home import CA_FILE, ConfigError
from ..providers.settings import FILE as CLOUDS
from ..providers.settings import CloudSettings, read_settings
from ..service.journal import JournalLocked, hold
from ..service.tokens import new_token
from ..spec.placement import Attempt, Placement
from .payload import payload_of

VM = "manager"
TAG = "up-"  # prefix of the manager's identity in the tag of its own VM
PAIR_WITHIN_S = 900.0
_RECORD = "record.json"
_ENDED = "ended"


def home_above(folder: Path) -> Path:
    """The home, also if the folder is its `up`."""
    return folder.parent if folder.name == "up" and (folder / _RECORD).exists() else folder


class VmRecord(BaseModel):
    """One VM of a manager."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cloud: str
    identity: str  # of the manager; VMs that it rents are tagged with it
    attempt: Attempt
    asked_at: float  # Unix seconds: when the attempt was recorded
    secret: str  # authenticates VM and caller to each other, within `PAIR_WITHIN_S` after the VM has booted
    payload_sha256: str
    port: int

    @property
    def tag(self) -> str:
        return f"{TAG}{self.identity}"


class UpFolder:
    """`<home>/up`."""

    def __init__(self, home: Path) -> None:
        self.path = home / "up"

    @contextlib.contextmanager
    def held(self) -> Generator[None]:
        """Lock the folder: no other process requests or ends its VM meanwhile. Raises `ConfigError`."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock = hold(self.path)  # beside the folder, whose content is removed under the lock
        except JournalLocked as error:
            raise ConfigError(f"another `makara up` or `down` is at work: {error}") from error
        with lock:
            yield

    def read(self) -> VmRecord | None:
        """The record, or None if there is no VM. Raises `ConfigError`."""
        try:
            return VmRecord.model_validate_json(self._record.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise ConfigError(f"{self._record}: {error}") from error

    def write(self, record: VmRecord) -> None:
        self._forget(_ENDED)
        write_private(self._record, record.model_dump_json().encode())

    def begin(self, attempt: Attempt, port: int, clouds: str, now: float) -> VmRecord:
        """The first attempt, written down with all that its VM will be given. `clouds`: the text of
        clouds.yaml; `now` in Unix seconds."""
        self._forget(CA_FILE, "user-data", "server.json")  # of one that was being removed
        token, token_id, digest = new_token()
        identity = secrets.token_hex(16)
        owner = {"identity": identity, "token_id": token_id, "token_sha256": digest.hex()}
        payload = payload_of(clouds, owner)
        for name, data in {
            CLOUDS: clouds.encode(),
            "admin.token": token.encode(),
            "payload.zip": payload,
        }.items():
            write_private(self.path / name, data)
        record = VmRecord(
            cloud=attempt.placement.provider,
            identity=identity,
            attempt=attempt,
            asked_at=now,
            secret=secrets.token_urlsafe(32),
            payload_sha256=hashlib.sha256(payload).hexdigest(),
            port=port,
        )
        self.write(record)
        return record

    def begin_again(self, record: VmRecord, placement: Placement, now: float) -> VmRecord:
        """The next attempt: of the one before, nothing is left."""
        self._forget(CA_FILE, "user-data")
        number = record.attempt.number + 1
        attempt = record.attempt.model_copy(update={"number": number, "placement": placement})
        changes = {"attempt": attempt, "asked_at": now, "secret": secrets.token_urlsafe(32)}
        record = record.model_copy(update=changes)
        self.write(record)
        return record

    def user_data(self, render: Callable[[], bytes]) -> bytes:
        """The same bytes each time, by another version as well."""
        path = self.path / "user-data"
        if not path.exists():
            write_private(path, render())
        return path.read_bytes()

    @property
    def was_asked(self) -> bool:
        """Whether a call for the VM of this attempt may have been made."""
        return (self.path / "user-data").exists()

    @property
    def payload(self) -> bytes:
        return (self.path / "payload.zip").read_bytes()

    @property
    def token(self) -> str:
        return (self.path / "admin.token").read_text().strip()

    @property
    def settings(self) -> CloudSettings:
        """As they were sent."""
        return read_settings(self.path)

    @property
    def written_at(self) -> float:
        """When a call for the VM was last about to be made, Unix seconds."""
        return self._record.stat().st_mtime

    @property
    def may_have_run(self) -> bool:
        """Whether a VM may have had what makes it a manager, which then may have rented others."""
        record = self.read()
        return record is not None and (self.ca is not None or record.attempt.number > 1)

    @property
    def ended_at(self) -> float | None:
        """When nothing was left of the manager's VM, in Unix seconds, if a `makara down` has seen that."""
        path = self.path / _ENDED
        return float(path.read_text()) if path.exists() else None

    def has_ended(self, at: float) -> None:
        write_private(self.path / _ENDED, str(at).encode())

    @property
    def ca(self) -> str | None:
        """Of the VM, once it has shown that it is the one that was asked for."""
        path = self.path / CA_FILE
        return path.read_text() if path.exists() else None

    def trust(self, ca: str) -> None:
        write_private(self.path / CA_FILE, ca.encode())

    @property
    def url(self) -> str | None:
        """Of the manager, once it has answered."""
        path = self.path / "server.json"
        return str(json.loads(path.read_bytes())["url"]) if path.exists() else None

    def is_up(self, url: str) -> None:
        write_private(self.path / "server.json", json.dumps({"url": url}).encode())
        self._forget("payload.zip", "user-data")  # nobody asks for them again

    def remove(self) -> None:
        """Nothing is left of it."""
        self._record.unlink(missing_ok=True)  # first: what remains without it means nothing
        shutil.rmtree(self.path)

    def _forget(self, *names: str) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    @property
    def _record(self) -> Path:
        return self.path / _RECORD
