"""Exports the weights of a published checkpoint on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from pydantic import BaseModel

from ...checkpoint import (
    CREDENTIALS,
    Corrupt,
    Export,
    Incomplete,
    NoReadable,
    NotFound,
    Store,
    StoreRefused,
    export,
    published,
)
from ..service.runtime import Job
from ..service.service import Service
from ..service.store_access import open_for
from ..spec.job_spec import JobSpecError


class ExportView(BaseModel):
    """Exported weights: `uri` is the file to load, or the index of its shards; `sha256` the weight hash.

    `num_bytes` counts the files of weights. `store`, with `endpoint` and `region` if any, is how to open it.
    """

    job: str
    step: int
    uri: str
    sha256: str
    num_bytes: int
    store: str
    endpoint: str | None
    region: str | None


async def export_now(service: Service, job: Job, step: int | None, secrets: Mapping[str, str]) -> ExportView:
    """Export the newest checkpoint that the head lists, or that of `step`; an existing export is not written
    again.

    `secrets`: for an ended job, the keys of its store, which are not kept. Raises `JobSpecError` saying which
    steps exist or what cannot be read, `StoreUnavailable`.
    """
    unknown = sorted(set(secrets) - set(CREDENTIALS))
    if unknown:
        raise JobSpecError([("secrets", f"{name} is no key of a store") for name in unknown])
    spec = job.state.spec
    assert spec is not None, "whoever can be asked for was submitted"
    scratch = service.config.home / "scratch"

    def call() -> Export:
        given = {**service.files.secrets(job.job), **secrets}
        store: Store = open_for(spec, given, service.stores_of(job))
        scratch.mkdir(parents=True, exist_ok=True)
        wanted = published(store, job.job, step)[0]
        try:
            return export(store, job.job, wanted, scratch=scratch)
        except (Corrupt, Incomplete, NotFound) as error:
            others = [str(c.step) for c in published(store, job.job) if c != wanted]
            advice = f"; --step exports another: {', '.join(others)}" if others else ""
            raise NoReadable(f"the checkpoint of step {wanted.step} is damaged: {error}{advice}") from error

    try:
        done = await service.admission.export(job.job, call)
    except (NoReadable, StoreRefused) as error:
        raise JobSpecError([("step", str(error))]) from error
    place = spec.checkpoint
    return ExportView(
        job=job.job,
        **asdict(done),
        store=place.uri,
        endpoint=place.endpoint,
        region=place.region,
    )
