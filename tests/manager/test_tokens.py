"""Tokens: shown once, stored as hashes, good for one thing."""

from __future__ import annotations

import hashlib
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from makara.manager.service import tokens as token_module
from makara.manager.service.tokens import Scope, TokenRefused, TokenStore, csrf_token, new_token


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[TokenStore]:
    tokens = TokenStore(tmp_path / "tokens.sqlite3", clock)
    yield tokens
    tokens.close()


def test_who_is_admitted_by_a_hash_is_an_administrator_beside_the_managers_own(tmp_path: Path) -> None:
    token, token_id, digest = new_token()
    path, admin_file = tmp_path / "tokens.sqlite3", tmp_path / "admin.token"
    with closing(TokenStore(path, identity="chosen")) as tokens:
        tokens.admit(token_id, digest, "owner")
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("tokens.sqlite3*"))
    assert token.partition(".")[2].encode() not in stored
    with closing(TokenStore(path, identity="another")) as tokens:
        assert tokens.identity == "chosen"  # of the file, once it is made
        own = tokens.ensure_admin(admin_file)
        admin_file.unlink()
        assert tokens.ensure_admin(admin_file) != own
        assert tokens.check(token, Scope.ADMIN).name == "owner"
        assert tokens.revoke(token_id)
        with pytest.raises(TokenRefused):
            tokens.check(token, Scope.ADMIN)


def test_a_token_is_good_for_its_scope_only(store: TokenStore) -> None:
    token = store.issue(Scope.USER, name="ada")
    assert store.check(token, Scope.USER, Scope.ADMIN).name == "ada"
    with pytest.raises(TokenRefused, match="not good for this"):
        store.check(token, Scope.ADMIN)


@pytest.mark.parametrize("shown", ["", ".", "x", "x.y", "ü.ü"])
def test_what_is_no_token_is_refused(store: TokenStore, shown: str) -> None:
    with pytest.raises(TokenRefused, match="unknown"):
        store.check(shown, *Scope)


def test_a_right_id_with_another_secret_is_refused(store: TokenStore) -> None:
    token = store.issue(Scope.USER)
    other = store.issue(Scope.USER)
    with pytest.raises(TokenRefused, match="unknown"):
        store.check(f"{token.split('.')[0]}.{other.split('.')[1]}", Scope.USER)


def test_a_join_token_works_for_its_vm_until_its_successor_is_shown(store: TokenStore) -> None:
    token = store.issue(Scope.JOIN, job="j", vm="v", ttl_s=60)
    other = store.issue(Scope.JOIN, job="j", vm="w", ttl_s=60)
    with pytest.raises(TokenRefused, match="not good for this"):
        store.check(token, Scope.USER)
    grant = store.check(token, Scope.JOIN)
    assert (grant.job, grant.vm) == ("j", "v")
    successor = store.issue(Scope.WORKER, job="j", vm="v", ttl_s=60)
    store.check(token, Scope.JOIN)  # the connection broke before it was delivered
    with pytest.raises(TokenRefused, match="not good for this"):
        store.check(successor, Scope.USER)  # a wrong use shows nothing
    store.check(token, Scope.JOIN)
    store.check(successor, Scope.WORKER)
    with pytest.raises(TokenRefused, match="this join token has been used"):
        store.check(token, Scope.JOIN)
    store.check(other, Scope.JOIN)


def test_an_attempt_that_is_repeated_has_the_same_join_token(tmp_path: Path) -> None:
    def issue(job: str = "j", attempt: str = "v-1", secret: bytes = b"s") -> str:
        with closing(TokenStore(tmp_path / "tokens.sqlite3")) as store:  # each time by another manager
            return store.issue_join(secret, job=job, vm="v", attempt=attempt, ttl_s=60)

    token = issue()
    assert issue() == token
    others = [issue(attempt="v-2"), issue(job="k"), issue(secret=b"t")]
    assert len({t.partition(".")[part] for t in [token, *others] for part in (0, 2)}) == 8
    assert token.partition(".")[2].encode() not in b"".join(f.read_bytes() for f in tmp_path.iterdir())


def test_a_join_token_that_is_late_or_used_is_refused_as_that(store: TokenStore, clock: Clock) -> None:
    def issue() -> str:
        return store.issue_join(b"s", job="j", vm="v", attempt="v-1", ttl_s=60)

    token = issue()
    clock.now += 61
    store.sweep()
    with pytest.raises(TokenRefused, match="this join token has expired"):
        store.check(token, Scope.JOIN)
    assert issue() == token  # the call is repeated: its VM may take as long again
    assert store.check(token, Scope.JOIN).vm == "v"
    store.check(store.issue(Scope.WORKER, job="j", vm="v", ttl_s=60), Scope.WORKER)
    issue()
    with pytest.raises(TokenRefused, match="this join token has been used"):
        store.check(token, Scope.JOIN)


def test_tokens_of_a_vm_are_found_without_looking_at_those_of_others(tmp_path: Path) -> None:
    with closing(TokenStore(tmp_path / "tokens.sqlite3")):
        pass
    with closing(sqlite3.connect(tmp_path / "tokens.sqlite3")) as file:
        for statement in (token_module._USE_JOIN, "DELETE FROM tokens WHERE job = ? AND vm = ?"):
            values = ("x",) * statement.count("?")
            steps = [row[3] for row in file.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
            assert steps == ["SEARCH tokens USING INDEX tokens_of_vms (job=? AND vm=?)"]


def test_a_manager_is_the_same_over_restarts_and_another_with_another_file(tmp_path: Path) -> None:
    names: list[str] = []
    for file in ("a", "a", "b"):
        tokens = TokenStore(tmp_path / file)
        names.append(tokens.identity)
        tokens.close()
    assert names[0] == names[1] != names[2]


def test_tokens_expire_and_are_swept(store: TokenStore, clock: Clock) -> None:
    token = store.issue(Scope.WORKER, job="j", vm="v", ttl_s=60)
    clock.now += 59
    store.check(token, Scope.WORKER)
    clock.now += 1
    with pytest.raises(TokenRefused, match="expired"):
        store.check(token, Scope.WORKER)
    store.sweep()
    with pytest.raises(TokenRefused, match="unknown"):
        store.check(token, Scope.WORKER)


def test_tokens_of_vms_are_bound_and_short_lived(store: TokenStore) -> None:
    with pytest.raises(AssertionError, match="short-lived"):
        store.issue(Scope.WORKER, job="j", vm="v")


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_manager_that_starts_after_the_clock_was_set_knows_its_vms(
    store: TokenStore, clock: Clock, jump_s: float
) -> None:
    token, user = store.issue(Scope.WORKER, job="j", vm="v", ttl_s=60), store.issue(Scope.USER, ttl_s=60)
    clock.now += jump_s
    store.begin_anew(60)
    assert store.check(token, Scope.WORKER).vm == "v"
    clock.now += 60
    with pytest.raises(TokenRefused, match="expired"):
        store.check(token, Scope.WORKER)
    if jump_s > 0:
        with pytest.raises(TokenRefused, match="expired"):
            store.check(user, Scope.USER)


def test_revoked_tokens_are_refused(store: TokenStore) -> None:
    user = store.issue(Scope.USER)
    worker = store.issue(Scope.WORKER, job="j", vm="v", ttl_s=60)
    assert store.revoke(user.split(".")[0])
    assert not store.revoke("nobody")
    store.revoke_vm("j", "v")
    for token in (user, worker):
        with pytest.raises(TokenRefused):
            store.check(token, *Scope)


def test_only_hashes_are_stored_and_the_files_are_private(tmp_path: Path) -> None:
    path = tmp_path / "tokens.sqlite3"
    tokens = TokenStore(path)
    admin = tokens.ensure_admin(tmp_path / "admin.token")
    user = tokens.issue(Scope.USER)
    tokens.close()
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("tokens.sqlite3*"))
    for token in (admin, user):
        assert token.split(".")[1].encode() not in stored
    for file in (path, tmp_path / "admin.token"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_tokens_survive_a_restart_and_the_admin_token_is_kept(tmp_path: Path) -> None:
    path, admin_file = tmp_path / "tokens.sqlite3", tmp_path / "admin.token"
    first = TokenStore(path)
    admin, worker = first.ensure_admin(admin_file), first.issue(Scope.WORKER, job="j", vm="v", ttl_s=60)
    first.close()
    second = TokenStore(path)
    assert second.ensure_admin(admin_file) == admin
    assert second.check(worker, Scope.WORKER).vm == "v"
    admin_file.unlink()
    assert second.ensure_admin(admin_file) != admin
    with pytest.raises(TokenRefused):
        second.check(admin, Scope.ADMIN)
    second.close()


def test_a_session_ends_with_the_token_that_signed_in(store: TokenStore, clock: Clock) -> None:
    user, brief = store.issue(Scope.USER), store.issue(Scope.USER, ttl_s=60)
    sessions = [
        store.issue(Scope.SESSION, ttl_s=3600, parent=token.split(".")[0]) for token in (user, user, brief)
    ]
    for session in sessions:
        store.check(session, Scope.SESSION)
    clock.now += 60
    with pytest.raises(TokenRefused, match="expired"):
        store.check(sessions[2], Scope.SESSION)
    assert store.lives(sessions[0].split(".")[0])
    store.revoke(user.split(".")[0])
    for session in sessions[:2]:
        assert not store.lives(session.split(".")[0])
        with pytest.raises(TokenRefused):
            store.check(session, Scope.SESSION)


def test_a_file_of_an_older_manager_is_read_and_its_sessions_sign_in_again(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    with closing(sqlite3.connect(path)) as database:
        database.execute(
            "CREATE TABLE tokens (id TEXT PRIMARY KEY, hash BLOB NOT NULL, scope TEXT NOT NULL, name TEXT "
            "NOT NULL, job TEXT, vm TEXT, created REAL NOT NULL, expires REAL) STRICT"
        )
        secret = hashlib.sha256(b"s").digest()
        for scope in ("user", "session"):
            row = (scope, secret, scope, "", None, None, 0.0, None)
            database.execute("INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        database.commit()
    with closing(TokenStore(path)) as tokens:
        assert tokens.check("user.s", Scope.USER).token_id == "user"
        with pytest.raises(TokenRefused, match="expired"):
            tokens.check("session.s", Scope.SESSION)


def test_csrf_tokens_belong_to_one_session() -> None:
    assert csrf_token("a") == csrf_token("a") != csrf_token("b")
