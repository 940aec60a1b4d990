"""Checks a submission completely before any of it is stored."""

from __future__ import annotations

import hashlib
import json
import re
import secrets as random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pydantic import BaseModel

from ...checkpoint import StoreRefused
from ...protocol.archives import BadArchive, BundleBounds, check
from ..service.service import Service
from ..service.store_access import StoreNotAllowed, check_usable, for_submission
from ..service.views.quote import Quote, quote_of
from ..spec.job_spec import JobSpec, JobSpecError, parse_spec, to_settings
from ..spec.resources import CLOUDS
from .before_renting import MachineType, check_renting, machines_of
from .starting import StartView, pinned, start_of, start_view

_NO_TEXT = re.compile(r"[\0\ud800-\udfff]")  # the end of a C string, and halves of UTF-16


class KeyUsed(Exception):
    """The Idempotency-Key was used before with different content."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What a user submits: the job file's content, the code, and the values of the secrets it names.

    `owner`: whose job it is; None: the administrators'.
    """

    spec_text: str
    bundle: bytes
    secrets_text: str = "{}"
    idempotency_key: str | None = None
    owner: str | None = None


class Accepted(BaseModel):
    """The largest code bundle accepted, what the job starts from (None: step 0), the types of VM that it may
    rent, and their price (None: it rents nothing, or was submitted before)."""

    packed_bytes: int
    unpacked_bytes: int
    files: int
    start: StartView | None
    machines: list[MachineType]
    quote: Quote | None


async def accept(service: Service, submission: Submission) -> tuple[str, bool]:
    """Store the job durably; returns (its id, whether it is new; False: this submission was accepted before).

    Raises `JobSpecError` with every fault that was found, `KeyUsed`, `StoreUnavailable`, `CloudAway`.
    """
    owner = submission.owner
    spec, secrets = _read(service, submission.spec_text, submission.secrets_text, owner)
    check_bundle = partial(_check_bundle, submission.bundle, service.config.bundle_bounds)
    await for_submission(service.threads, owner, check_bundle)
    job = _job_id(spec, submission.idempotency_key, owner)
    if not await service.admission.has_accepted(job):
        stores = service.config.stores_for(owner)
        check = partial(check_store, spec, job, secrets, stores)
        await for_submission(service.threads, owner, check)
        await check_renting(service, spec)
        start = await start_of(service, spec, secrets, owner)
        whole = pinned(spec, start)
        if await service.admission.submit(job, whole, submission.bundle, secrets, start, owner):
            return job, True
    _check_same(service, job, spec, submission)
    return job, False


async def check_settings(service: Service, submission: Submission) -> Accepted:
    """Raise what `accept` would, as far as possible without the job's code; stores nothing."""
    owner = submission.owner
    spec, secrets = _read(service, submission.spec_text, submission.secrets_text, owner)
    job = _job_id(spec, submission.idempotency_key, owner)
    start = quote = None
    machines: list[MachineType] = []
    if job not in service.jobs:
        stores = service.config.stores_for(owner)
        check = partial(check_store, spec, job, secrets, stores, make_folders=False)
        await for_submission(service.threads, owner, check)
        offers = await check_renting(service, spec)
        start = await start_view(service, spec, secrets, owner)
        machines = machines_of(spec.resources, offers)
        quote = quote_of(spec.resources, offers, service.clock())
    bounds = service.config.bundle_bounds
    return Accepted(
        packed_bytes=service.config.max_bundle_bytes,
        unpacked_bytes=bounds.unpacked_bytes,
        files=bounds.members,
        start=start,
        machines=machines,
        quote=quote,
    )


def _read(
    service: Service, spec_text: str, secrets_text: str, owner: str | None
) -> tuple[JobSpec, dict[str, str]]:
    """The job file's content and the secrets, checked. Raises `JobSpecError`."""
    spec = parse_spec(_from_json("spec", spec_text))
    check_providers(spec, service, owner)
    return spec, check_secrets(spec, _from_json("secrets", secrets_text))


def _from_json(field: str, text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobSpecError([(field, f"not JSON: {error}")]) from error


def check_providers(spec: JobSpec, service: Service, owner: str | None) -> None:
    """Raise `JobSpecError` for providers that this manager does not have, or not for this owner's jobs; and
    for an image that is not for them."""
    has = [name for name in service.providers if owner is None or name != "local"]
    known = ", ".join(has)
    faults = [
        ("resources.provider", f"{_lacks(name, service, owner)}; expected {known}{_how(name)}")
        for name in spec.resources.providers
        if name not in has
    ]
    resources = spec.resources
    if owner is not None and "azure" in resources.providers and resources.image_of("azure") is not None:
        # An image's own programs are root, and a VM's identity may delete VMs, also those of other users.
        message = "only administrators' jobs name an image on azure; leave it out, and the manager's is used"
        faults.append(("resources.image", message))
    if faults:
        raise JobSpecError(faults)


def _lacks(name: str, service: Service, owner: str | None) -> str:
    if name == "local" and owner is not None and name in service.providers:
        # It could read the admin token, and other users' secrets.
        return "local: such VMs run code as the manager's own user, so they are for administrators' jobs only"
    return f"this manager has no provider {name}"


def _how(name: str) -> str:
    if name == "local":
        return " (an administrator gets local VMs from `makara server --local`)"
    return f"; clouds.yaml in its home is to have a section {name}" if name in CLOUDS else ""


def check_secrets(spec: JobSpec, value: object) -> dict[str, str]:
    """The values of exactly the secrets that the job file names. Raises `JobSpecError`."""
    if not isinstance(value, Mapping) or not all(isinstance(item, str) for item in value.values()):
        raise JobSpecError([("secrets", "expected an object of names to strings")])
    if any(_NO_TEXT.search(str(item)) for item in value.values()):
        raise JobSpecError([("secrets", "a value holds a character that no process can be given")])
    given = {str(name): str(item) for name, item in value.items()}
    missing = sorted(set(spec.secrets) - set(given))
    unknown = sorted(set(given) - set(spec.secrets))
    faults = [("secrets", f"no value was sent for {name}") for name in missing]
    faults += [("secrets", f"{name} is not named in the job file") for name in unknown]
    if faults:
        raise JobSpecError(faults)
    return given


def _check_bundle(data: bytes, bounds: BundleBounds) -> None:
    """Check that the bundle is a tar.gz of plain files inside it, without unpacking it to disk."""
    try:
        check(data, bounds)
    except BadArchive as error:
        raise JobSpecError([("bundle", str(error))]) from error


def check_store(
    spec: JobSpec,
    job: str,
    secrets: Mapping[str, str],
    allowed: tuple[str, ...],
    *,
    make_folders: bool = True,
) -> None:
    """Try the store of a job. Blocking. Raises `JobSpecError`, `StoreUnavailable`."""
    to_settings(spec, job, "")  # a relative URI is refused here: the manager's folder is not the user's
    try:
        check_usable(spec, secrets, allowed, make_folders=make_folders)
    except StoreNotAllowed as error:
        raise JobSpecError([(error.field, str(error))]) from error
    except StoreRefused as error:
        raise JobSpecError([_field_and_rest(str(error))]) from error


def _field_and_rest(message: str) -> tuple[str, str]:
    """Split a store's refusal, which begins with the wrong field, into (field, message)."""
    field, _, rest = message.partition(" ")
    return (field, rest) if field.startswith("checkpoint.") else ("checkpoint.uri", message)


def _job_id(spec: JobSpec, key: str | None, owner: str | None) -> str:
    """The name and hex digits, derived from owner and key if given, so that a repetition finds its job."""
    if not key:
        return f"{spec.name}-{random.token_hex(3)}"
    known = "\0".join((spec.name, key) if owner is None else (spec.name, key, owner))
    return f"{spec.name}-{hashlib.sha256(known.encode()).hexdigest()[:12]}"


def _check_same(service: Service, job: str, spec: JobSpec, submission: Submission) -> None:
    state = service.jobs[job].state
    if (
        state.spec != pinned(spec, state.start)
        or state.bundle_sha256 != hashlib.sha256(submission.bundle).hexdigest()
    ):
        raise KeyUsed(f"Idempotency-Key: it was used for another submission, job {job}")
