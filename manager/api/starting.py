"""Resolves `checkpoint.start_from` of a submission in the store, before anything is stored."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ValidationError

from ...checkpoint import (
    Corrupt,
    Manifest,
    NoReadable,
    NotFound,
    Store,
    StoreRefused,
    credentials_in,
    load_manifest,
    no_checkpoint,
    published,
    weight_shapes,
)
from ...protocol.messages import CheckpointRef, Recipe
from ..service.service import Service
from ..service.store_access import StoreNotAllowed, at_source, check_allowed, for_submission, open_for
from ..spec.job_spec import JobSpec, JobSpecError
from ..spec.start_source import StartSource, split_job, split_step
from ..spec.store_uri import is_absolute, place_of
from .job_names import find

_FIELD = "checkpoint.start_from"


class StartView(BaseModel):
    """The checkpoint that a submission would start from; `weights`: {name: shape}.

    The job continues with that checkpoint's recipe: its model, traced with `microbatch_size` and
    `num_sections` by this version of torch, must have this `graph_hash`.
    """

    job: str
    uri: str
    step: int
    microbatch_size: int
    num_sections: int
    graph_hash: str
    torch_version: str
    weights: dict[str, tuple[int, ...]]


async def start_of(
    service: Service, spec: JobSpec, secrets: Mapping[str, str], owner: str | None
) -> StartSource | None:
    """The checkpoint that the job starts from; None for step 0. Raises `JobSpecError`, `StoreUnavailable`."""
    found = await _look(service, spec, secrets, owner, None)
    return found[0] if found is not None else None


async def start_view(
    service: Service, spec: JobSpec, secrets: Mapping[str, str], owner: str | None
) -> StartView | None:
    """The same with shapes and hash, so that a client can compare its model."""
    weights: dict[str, tuple[int, ...]] = {}
    found = await _look(service, spec, secrets, owner, weights)
    if found is None:
        return None
    source, manifest = found
    return StartView(
        job=source.job,
        uri=source.uri,
        step=manifest.step,
        microbatch_size=source.recipe.microbatch_size,
        num_sections=source.recipe.num_sections,
        graph_hash=source.recipe.graph_hash,
        torch_version=source.recipe.torch_version,
        weights=weights,
    )


def pinned(spec: JobSpec, source: StartSource | None) -> JobSpec:
    """The job with m and K of the checkpoint that it starts from."""
    if source is None:
        return spec
    sizes = {
        "microbatch_size": source.recipe.microbatch_size,
        "num_sections": source.recipe.num_sections,
    }
    return spec.model_copy(update={"parallelism": spec.parallelism.model_copy(update=sizes)})


async def _look(
    service: Service,
    spec: JobSpec,
    secrets: Mapping[str, str],
    owner: str | None,
    weights: dict[str, tuple[int, ...]] | None,
) -> tuple[StartSource, Manifest] | None:
    if spec.checkpoint.start_from is None:
        return None
    uri, endpoint, region, job, step = _place(service, spec, spec.checkpoint.start_from, owner)
    there = at_source(spec, uri, endpoint, region)
    known = service.jobs.get(job)
    # With the manager's own credentials its URI must not say more than its name, which is another's.
    own_keys = credentials_in(uri, {**there.envs, **secrets}) is not None
    hidden = known is not None and not known.is_shown_to(owner) and not own_keys

    def read() -> Manifest:
        store = _opened(there, secrets, service.config.stores_for(owner))
        try:
            if hidden:
                raise no_checkpoint(store, job)
            return newest_readable(store, job, step, weights)
        except (NoReadable, StoreRefused) as error:
            raise JobSpecError([(_FIELD, str(error))]) from error

    manifest = await for_submission(service.threads, owner, read)
    try:
        recipe = Recipe.model_validate(dict(manifest.recipe))
    except ValidationError as error:
        raise JobSpecError([(_FIELD, f"the recipe of {job} is not one of this version")]) from error
    _check_fits(spec, recipe, manifest.checkpoint)
    return StartSource(uri=uri, endpoint=endpoint, region=region, job=job, step=step, recipe=recipe), manifest


def _place(
    service: Service, spec: JobSpec, start_from: str, owner: str | None
) -> tuple[str, str | None, str | None, str, int | None]:
    """(store, endpoint, region, job, step)."""
    place, step = split_step(start_from)
    if is_absolute(place):
        uri, job = split_job(place)
        own = spec.checkpoint
        endpoint, region = place_of(uri, own.uri, own.endpoint, own.region)
        return uri, endpoint, region, job, step
    known = find(service, place, owner)
    if known is None or known.state.spec is None:
        about = "expected a job (`makara ps` lists all), or the URI of a job's folder in a store"
        raise JobSpecError([(_FIELD, f"there is no job {place!r}; {about}")])
    source = known.state.spec.checkpoint
    return source.uri, source.endpoint, source.region, known.job, step


def _opened(there: JobSpec, secrets: Mapping[str, str], allowed: tuple[str, ...]) -> Store:
    try:
        check_allowed(there.checkpoint, {**there.envs, **secrets}, allowed)
    except StoreNotAllowed as error:
        raise JobSpecError([(_FIELD, str(error))]) from error
    return open_for(there, secrets, allowed)


def newest_readable(
    store: Store, job: str, step: int | None, weights: dict[str, tuple[int, ...]] | None
) -> Manifest:
    """The manifest of the newest checkpoint that can be read as far as it is looked at: the manifest, and the
    shapes of its weights, which `weights` gets."""
    reasons: list[str] = []
    for checkpoint in published(store, job, step):
        try:
            manifest = load_manifest(store, job, checkpoint)
            if weights is not None:
                weights.update(weight_shapes(store, manifest))
        except (Corrupt, NotFound) as error:
            reasons.append(f"the checkpoint of step {checkpoint.step} is damaged: {error}")
        else:
            return manifest
    raise NoReadable("; ".join(reasons))


def _check_fits(spec: JobSpec, recipe: Recipe, checkpoint: CheckpointRef) -> None:
    """Raise `JobSpecError` naming each field with which the job could not continue from there."""
    made, parallel, training = f"checkpoint {checkpoint} was made with", spec.parallelism, spec.training
    faults: list[tuple[str, str]] = []
    for name, there in (("microbatch_size", recipe.microbatch_size), ("num_sections", recipe.num_sections)):
        here = getattr(parallel, name)
        if here not in (None, there):
            faults.append((f"parallelism.{name}", f"{here}, but {made} {there}; leave it out"))
    if training.global_batch_size != recipe.global_batch_size:
        what = f"{training.global_batch_size}, but {made} {recipe.global_batch_size}"
        faults.append(("training.global_batch_size", what))
    if training.numerics == "exact" and spec.resources.threads != recipe.threads:
        what = f"{spec.resources.threads}, but {made} {recipe.threads}; numerics: exact needs the same"
        faults.append(("resources.threads", what))
    if training.steps <= checkpoint.step:
        what = f"{training.steps}, but checkpoint {checkpoint} has made {checkpoint.step} steps already"
        faults.append(("training.steps", what))
    if faults:
        raise JobSpecError(faults)
