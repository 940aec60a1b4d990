"""Fetches a job's code from the manager, checks it, unpacks it once, and runs its setup once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

import httpx
from pydantic import TypeAdapter, ValidationError

from ...checkpoint import inherited
from ...protocol.archives import ANY_SIZE, BadArchive, members, opened
from ...protocol.log_tail import tail
from ...protocol.messages import BootConfig, JobSettings
from ...protocol.vm_processes import kill_group
from .trainer_user import CodeUser
from .trust import trust

_SECRETS = TypeAdapter(dict[str, str])
_SETUP_DONE = "-setup-done"  # suffix of a mark beside the folder, since the folder is the job's
_SETUP_BYTES = 4000  # of setup's output are reported


class BadBundle(Exception):
    """The answer is not what was requested; something other than the manager may have answered."""


class SetupFailed(Exception):
    """The job's code cannot be used here, and retrying is useless. `output` is the end of what its `setup`
    printed."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


async def prepare_bundle(
    boot: BootConfig, token: str, job: JobSettings, environment: Mapping[str, str], user: CodeUser
) -> Path:
    """Prepare the folder with the job's code, owned by `user`, ready to import from.

    Raises `BadBundle` (checksum), `SetupFailed`, `httpx.HTTPError` (manager unreachable, refused), and
    `OSError` (a full disk).
    """
    folder = Path(boot.directory) / "bundles" / job.bundle_sha256
    if not folder.exists():
        data = await _get(boot, token, f"jobs/{job.job}/bundle")
        if hashlib.sha256(data).hexdigest() != job.bundle_sha256:
            raise BadBundle(f"bundle of job {job.job}: checksum differs from {job.bundle_sha256}")
        try:
            await asyncio.to_thread(_unpack, data, folder, user)
        except BadArchive as error:
            raise SetupFailed(f"bundle: {error}") from error
    done = folder.with_name(folder.name + _SETUP_DONE)
    if job.setup is not None and not done.exists():
        await _set_up(job.setup, folder, environment, user, Path(boot.directory) / "setup.log")
        done.touch()
    return folder


async def fetch_secrets(boot: BootConfig, token: str) -> dict[str, str]:
    """Fetch the values of the job's `secrets`; they are kept only in memory.

    Raises `BadBundle` (an invalid answer), `httpx.HTTPError` (manager unreachable, refused).
    """
    data = await _get(boot, token, f"jobs/{boot.job}/secrets")
    try:
        return _SECRETS.validate_json(data)
    except ValidationError:  # its text may hold values, which must not be logged
        raise BadBundle(f"secrets of job {boot.job}: the answer is no object of texts") from None


async def _get(boot: BootConfig, token: str, path: str) -> bytes:
    async with httpx.AsyncClient(timeout=60.0, trust_env=False, verify=trust(boot)) as client:
        response = await client.get(
            f"{boot.manager_url}/api/v1/{path}", headers={"Authorization": f"Bearer {token}"}
        )
        return response.raise_for_status().content


def _unpack(data: bytes, folder: Path, user: CodeUser) -> None:
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.new")
    shutil.rmtree(temporary, ignore_errors=True)  # left by an earlier attempt
    temporary.mkdir(parents=True)
    with opened(data) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(temporary, members(archive, ANY_SIZE), filter="data")
        else:  # before Python 3.11.4, which Debian 12 has: by the same rules
            archive.extractall(temporary, map(_owned, members(archive, ANY_SIZE)))
    user.give(temporary)
    _sync(temporary)  # else, after a crash of the VM, the folder may be there without what is in its files
    temporary.rename(folder)


def _sync(folder: Path) -> None:
    """Wait until all files and folders in `folder` are on the disk."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The member with the permissions that the filter `data` gives files and folders, and without owner."""
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    return member


async def _set_up(
    command: str, folder: Path, environment: Mapping[str, str], user: CodeUser, log: Path
) -> None:
    with log.open("ab") as output:
        process = await user.start(
            *("/bin/sh", "-c", command),
            cwd=folder,
            env=inherited(user.environment(os.environ), environment),
            output=output,
        )
    try:
        status = await process.wait()
    finally:
        if process.returncode is None:
            kill_group(process.pid)
    if status != 0:
        message = f"setup: the command {command!r} ended with status {status}"
        raise SetupFailed(message, tail(log, _SETUP_BYTES))
