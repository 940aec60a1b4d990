"""Tokens and what they permit. Each has 256 random bits, of which only the SHA-256 is stored.

A token is written `<id>.<secret>`; the id finds the row, the secret is compared in constant time. Tokens
live in a small SQLite file of their own, so that agents and users stay signed in when the manager restarts.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import sqlite3
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..config import write_private


class Scope(StrEnum):
    """What a token permits."""

    ADMIN = "admin"  # everything, other tokens and fault injection included
    USER = "user"  # submit jobs, and stop and read those of the same name
    SESSION = "session"  # a browser that signed in with a user or admin token
    JOIN = "join"  # connections of one VM of one job, until that shows its worker token
    WORKER = "worker"  # later connections of that VM, its bundle and its secrets
    MACHINE = "machine"  # joining the pool, for a number of machines, once each


class TokenRefused(Exception):
    """The token is unknown, expired, used up, or of the wrong scope; the message does not say which."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A validated token. A user's `name` is the owner of the jobs that are submitted with it; join and worker
    tokens are bound to a VM."""

    token_id: str
    scope: Scope
    name: str = ""
    job: str | None = None
    vm: str | None = None
    expires: float | None = None  # Unix seconds
    parent: str | None = None  # id of the token with which a session signed in; it ends with that
    uses: int | None = None  # how many machines may join with it
    is_admin: bool = False  # an administrator's, or a session that one signed in with it

    @property
    def owner(self) -> str | None:
        """The owner of jobs submitted with this token; None: the administrators, who see all jobs."""
        return None if self.is_admin else self.name


class TokenStore:
    """All tokens of one manager. Safe to use from several threads; `clock` gives Unix seconds."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.time, identity: str | None = None
    ) -> None:
        """`identity`: for a new file, the manager's identity (None: a random one)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._clock = clock
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.executescript(_TABLES)
        columns = {row[1] for row in self._database.execute("PRAGMA table_info(tokens)")}
        for column in _LATER_COLUMNS:
            if column.split()[0] not in columns:
                self._database.execute(f"ALTER TABLE tokens ADD COLUMN {column}")
        self._database.execute(
            "INSERT OR IGNORE INTO identity VALUES (0, ?)", (identity or secrets.token_hex(16),)
        )
        self.identity: str = self._database.execute("SELECT name FROM identity").fetchone()[0]
        """The manager's identity, created with the file: without the file, older tokens cannot be checked."""

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def issue(
        self,
        scope: Scope,
        *,
        name: str = "",
        job: str | None = None,
        vm: str | None = None,
        ttl_s: float | None = None,
        parent: str | None = None,
        uses: int | None = None,
    ) -> str:
        """Create a token; returned only here. `ttl_s` None: no expiry; it ends with its `parent`, if any."""
        assert (scope is Scope.MACHINE) == (uses is not None), "machines are counted, and nothing else"
        if scope in (Scope.JOIN, Scope.WORKER):
            assert None not in (job, vm, ttl_s), "bound to a VM of a job, and short-lived"
        token, token_id, digest = new_token()
        self._insert(token_id, digest, scope, name, job, vm, ttl_s, parent, uses)
        return token

    def issue_join(self, secret: bytes, *, job: str, vm: str, attempt: str, ttl_s: float) -> str:
        """The join token of this attempt, valid for `ttl_s` from now unless it has been used.

        Derived from `secret`, so that a repeated attempt, even by a later manager, boots its VM with the same
        bytes.
        """
        token_id = _derived(secret, "id", job, attempt)[:8].hex()
        text = urlsafe_b64encode(_derived(secret, "secret", job, attempt)).decode().rstrip("=")
        self._insert(token_id, _hash(text), Scope.JOIN, job=job, vm=vm, ttl_s=ttl_s)
        return f"{token_id}.{text}"

    def admit(self, token_id: str, digest: bytes, name: str) -> None:
        """Admit a token of `new_token` as an administrator's, by its hash alone."""
        self._insert(token_id, digest, Scope.ADMIN, name)

    def check(self, token: str, *scopes: Scope) -> Grant:
        """The grant of `token` if it has one of `scopes`. Raises `TokenRefused`.

        A worker token that is shown was delivered, so its VM's join token becomes used.
        """
        token_id, _, secret = token.partition(".")
        with self._lock:
            row = self._database.execute(_FIND, (token_id,)).fetchone()
            stored = row[0] if row else b"\0" * 32
            matches = hmac.compare_digest(_hash(secret), stored)
            if row is None or not matches:
                raise TokenRefused("unknown token")
            grant = Grant(token_id, Scope(row[1]), *row[2:7], uses=row[8], is_admin=self._is_admin(row))
            if row[7]:
                raise TokenRefused("this join token has been used")
            if not self._lives(token_id):
                raise TokenRefused(f"this {'join ' if grant.scope is Scope.JOIN else ''}token has expired")
            if grant.scope not in scopes:
                raise TokenRefused(
                    f"{'an' if grant.scope is Scope.ADMIN else 'a'} {grant.scope} token is not good for this"
                )
            if grant.scope is Scope.WORKER:
                self._database.execute(_USE_JOIN, (Scope.JOIN.value, grant.job, grant.vm))
        return grant

    def spend(self, token: str, machine: str) -> None:
        """Let `machine` join with `token`; repeated use by one machine counts once. Raises `TokenRefused`."""
        grant = self.check(token, Scope.MACHINE)
        assert grant.uses is not None
        with self._lock:
            joined = {row[0] for row in self._database.execute(_JOINED, (grant.token_id,))}
            if machine not in joined and len(joined) >= grant.uses:
                machines = "1 machine" if grant.uses == 1 else f"{grant.uses} machines"
                raise TokenRefused(f"this token has let in {machines}, and lets in no more")
            self._database.execute("INSERT OR IGNORE INTO joined VALUES (?, ?)", (grant.token_id, machine))

    def lives(self, token_id: str) -> bool:
        """Whether a token that was valid still is."""
        with self._lock:
            return self._lives(token_id)

    def listed(self) -> list[tuple[Grant, float, int]]:
        """Valid tokens made by people, oldest first: [(grant, Unix seconds of creation, how many machines
        joined with it)]."""
        with self._lock:
            people = (Scope.ADMIN.value, Scope.USER.value, Scope.MACHINE.value)
            rows = self._database.execute(_LISTED, people).fetchall()
            return [
                (Grant(row[0], Scope(row[1]), row[2], expires=row[4], uses=row[5]), row[3], row[6])
                for row in rows
                if self._lives(row[0])
            ]

    def revoke(self, token_id: str) -> bool:
        """Revoke a token and the sessions that it signed in; returns whether there was one."""
        with self._lock:
            self._database.execute("DELETE FROM joined WHERE token = ?", (token_id,))
            return self._database.execute("DELETE FROM tokens WHERE id = ?", (token_id,)).rowcount > 0

    def revoke_vm(self, job: str, vm: str) -> None:
        """Revoke all tokens of one VM."""
        with self._lock:
            self._database.execute("DELETE FROM tokens WHERE job = ? AND vm = ?", (job, vm))

    def begin_anew(self, ttl_s: float) -> None:
        """Extend tokens of VMs that are not revoked to `ttl_s` from now.

        Called when a manager starts: its wall clock may have been set since they were made, which must not
        get a VM refused.
        """
        with self._lock:
            self._database.execute(
                "UPDATE tokens SET expires = ? WHERE scope = ?", (self._clock() + ttl_s, Scope.WORKER.value)
            )

    def sweep(self) -> None:
        """Delete expired tokens; join tokens a day later, so that a late VM is told that it is late."""
        now = self._clock()
        with self._lock:
            self._database.execute(_SWEEP, (now, Scope.JOIN.value, now - _LATE_S))

    def ensure_admin(self, path: Path) -> str:
        """The admin token: that in `path` if valid, else a new one written there with mode 0600."""
        if path.exists():
            token = path.read_text().strip()
            try:
                self.check(token, Scope.ADMIN)
                return token
            except TokenRefused:
                pass  # the token file of another home, or an altered one: replaced below
        with self._lock:
            own = (Scope.ADMIN.value, ADMINISTRATOR)
            self._database.execute("DELETE FROM tokens WHERE scope = ? AND name = ?", own)
        token = self.issue(Scope.ADMIN, name=ADMINISTRATOR)
        write_private(path, token.encode() + b"\n")
        return token

    def _lives(self, token_id: str) -> bool:
        row = self._database.execute(_FIND, (token_id,)).fetchone()
        if row is None or (row[5] is not None and row[5] <= self._clock()):
            return False
        if Scope(row[1]) is not Scope.SESSION:
            return True
        return row[6] is not None and self._lives(row[6])  # None: signed in before sessions knew their token

    def _is_admin(self, row: tuple[Any, ...]) -> bool:
        """Whether the token of this row of `_FIND` is an administrator's, or of a session that is."""
        if Scope(row[1]) is Scope.SESSION and row[6] is not None:
            row = self._database.execute(_FIND, (row[6],)).fetchone() or row
        return Scope(row[1]) is Scope.ADMIN

    def _insert(
        self,
        token_id: str,
        digest: bytes,
        scope: Scope,
        name: str = "",
        job: str | None = None,
        vm: str | None = None,
        ttl_s: float | None = None,
        parent: str | None = None,
        uses: int | None = None,
    ) -> None:
        now = self._clock()
        expires = None if ttl_s is None else now + ttl_s
        row = (token_id, digest, scope.value, name, job, vm, now, expires, parent, uses)
        with self._lock:
            self._database.execute(_INSERT, row)


def identity_in(path: Path) -> str | None:
    """The identity of the manager of this file; None if no manager has run there."""
    if not path.exists():
        return None
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        row = database.execute("SELECT name FROM identity").fetchone()
    return str(row[0])


def new_token() -> tuple[str, str, bytes]:
    """(a new token, its id, the hash to store)."""
    token_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    return f"{token_id}.{secret}", token_id, _hash(secret)


def id_of(token: str) -> str:
    return token.partition(".")[0]


def csrf_token(session: str) -> str:
    """The value of `X-CSRF-Token` for a session cookie; derived from it, so not stored."""
    return hmac.new(session.encode(), b"makara csrf", hashlib.sha256).hexdigest()


def _derived(secret: bytes, *names: str) -> bytes:
    """A secret derived from `secret` and names; different lists of names give different secrets."""
    return hmac.new(secret, json.dumps(["makara join", *names]).encode(), hashlib.sha256).digest()


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


ADMINISTRATOR = "admin"  # the name of the token that the manager makes itself
_TABLES = """
CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY, hash BLOB NOT NULL, scope TEXT NOT NULL, name TEXT NOT NULL,
    job TEXT, vm TEXT, created REAL NOT NULL, expires REAL, parent TEXT, uses INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS tokens_of_vms ON tokens (job, vm);
CREATE TABLE IF NOT EXISTS joined (token TEXT, machine TEXT, PRIMARY KEY (token, machine)) STRICT;
CREATE TABLE IF NOT EXISTS identity (one INTEGER PRIMARY KEY CHECK (one = 0), name TEXT NOT NULL) STRICT;
"""
_INSERT = """
INSERT INTO tokens (id, hash, scope, name, job, vm, created, expires, parent, uses)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET expires = excluded.expires
"""
_USE_JOIN = "UPDATE tokens SET used = 1 WHERE scope = ? AND job = ? AND vm = ? AND used = 0"
_LATE_S = 86400.0
_SWEEP = "DELETE FROM tokens WHERE expires <= ? AND (scope != ? OR expires <= ?)"
_LISTED = """
SELECT id, scope, name, created, expires, uses, (SELECT count(*) FROM joined WHERE token = id)
FROM tokens WHERE scope IN (?, ?, ?) ORDER BY created
"""
_FIND = "SELECT hash, scope, name, job, vm, expires, parent, used, uses FROM tokens WHERE id = ?"
_JOINED = "SELECT machine FROM joined WHERE token = ?"
_LATER_COLUMNS = ("parent TEXT", "used INTEGER NOT NULL DEFAULT 0", "uses INTEGER")
