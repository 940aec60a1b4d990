"""Decides whose keys are used for a job's store: the manager's own, or the job's.

A job names its store, so whoever may submit decides where requests go. The manager's own credentials (from
its environment or its machine's role) sign only for stores that the administrator allowed. For any other
store a job brings keys among its secrets; if it brings keys, those are always used.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ...checkpoint import (
    NoCredentials,
    Store,
    StoreUnavailable,
    StoreUri,
    check_writable,
    credential_names,
    credentials_in,
    is_azure,
    open_store,
)
from ..spec.job_spec import CheckpointSpec, JobSpec
from ..spec.store_uri import covers
from ..threads import CallKind, Threads

T = TypeVar("T")
_SUBMISSION_S = 45.0  # of one look at a store; the command line waits for 60 s
_SUBMISSION_BYTES = 256 << 20


async def for_submission(threads: Threads, owner: str | None, call: Callable[[], T]) -> T:
    """Run a blocking call that a user's request causes, in threads of that user's own (None: of the
    administrators), so that a store that hardly answers holds up nobody else. All that stores answer
    meanwhile is bounded in time and size."""

    def run() -> T:
        from ...checkpoint.stores.bounded_http import Bounds, bounded  # here, as a local job needs no HTTP

        with bounded(Bounds(_SUBMISSION_S, _SUBMISSION_BYTES, _SUBMISSION_BYTES)):
            return call()

    return await threads.run(CallKind.SUBMISSION, run, owner=owner or "")


class StoreNotAllowed(ValueError):
    """The manager must not use its own credentials for this store; `field` is the one to change."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def check_allowed(checkpoint: CheckpointSpec, environment: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Raise `StoreNotAllowed` if the job has no keys for its store, and the manager must not use its own."""
    if credentials_in(checkpoint.uri, environment) is not None:
        return
    if any(covers(entry, checkpoint.uri, checkpoint.endpoint) for entry in allowed):
        return
    if StoreUri.of(checkpoint.uri).scheme == "file":
        message = f"{checkpoint.uri!r} is no folder that this manager may write to"
        how = f"its administrator can allow it: {_how(checkpoint)}"
        never = "users' jobs never get the manager's home, or a folder around it"
        raise StoreNotAllowed("checkpoint.uri", f"{message}; {how} ({never})")
    field, store = "checkpoint.uri", f"{checkpoint.uri!r}"
    if checkpoint.endpoint is not None:
        field, store = "checkpoint.endpoint", f"{checkpoint.endpoint!r}"
    names = credential_names(checkpoint.uri)
    message = (
        f"this manager does not use its own credentials for {store}; name keys of your own in `secrets` "
    )
    if checkpoint.uri.startswith("az://") and not is_azure(checkpoint.endpoint or ""):
        raise StoreNotAllowed(field, f"{message}({names})")
    allow = f"or have its administrator allow it: {_how(checkpoint)}"
    raise StoreNotAllowed(field, f"{message}({names}), {allow}")


def open_for(spec: JobSpec, secrets: Mapping[str, str], allowed: Sequence[str]) -> Store:
    """The store of an accepted job. Blocking.

    Raises `StoreUnavailable` (to be retried) while the manager must not use it: the administrator's setting,
    or missing secrets of an ended job, may be corrected.
    """
    checkpoint, environment = spec.checkpoint, {**spec.envs, **secrets}
    try:
        check_allowed(checkpoint, environment, allowed)
    except StoreNotAllowed as error:
        raise StoreUnavailable(f"{error.field}: {error}") from error
    with _saying_whose_credentials(checkpoint):
        return open_store(
            checkpoint.uri,
            endpoint=checkpoint.endpoint,
            region=checkpoint.region,
            credentials=credentials_in(checkpoint.uri, environment),
        )


def at_source(spec: JobSpec, uri: str, endpoint: str | None, region: str | None) -> JobSpec:
    """The job as if its checkpoints were at `uri`, to apply the same rules to the store it starts from."""
    place = {"uri": uri, "endpoint": endpoint, "region": region}
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=place)})


def check_usable(
    spec: JobSpec, secrets: Mapping[str, str], allowed: Sequence[str], *, make_folders: bool = True
) -> None:
    """Try the store of a submitted job; see `check_writable`. Blocking.

    Raises `StoreNotAllowed` before anything is sent, and what `check_writable` raises.
    """
    checkpoint, environment = spec.checkpoint, {**spec.envs, **secrets}
    check_allowed(checkpoint, environment, allowed)
    with _saying_whose_credentials(checkpoint):
        check_writable(
            checkpoint.uri,
            endpoint=checkpoint.endpoint,
            region=checkpoint.region,
            credentials=credentials_in(checkpoint.uri, environment),
            make_folders=make_folders,
        )


@contextmanager
def _saying_whose_credentials(checkpoint: CheckpointSpec) -> Generator[None]:
    """Say in errors that the manager lacks credentials, since the user's own shell may have some."""
    try:
        yield
    except NoCredentials as error:
        raise NoCredentials(
            f"checkpoint.uri {checkpoint.uri}: the manager has no credentials for it: name "
            f"{credential_names(checkpoint.uri)} in the job file's `secrets`, and their values are sent from "
            "your environment, or have the manager's administrator set them in the environment of `makara "
            "server`"
        ) from error


def _how(checkpoint: CheckpointSpec) -> str:
    return f"makara server --allow-store {checkpoint.endpoint or checkpoint.uri}, beside those allowed now"
