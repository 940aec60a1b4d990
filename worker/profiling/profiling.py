"""A job's first look at its model: micro-batch size, cuts, and the times that plans are simulated with."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...checkpoint import CheckpointError, Store, load_calibration, open_store, retrying
from ...model.errors import RecipeMismatch
from ...model.training import Training
from ...protocol.messages import JobSettings, Profile, Recipe
from ...protocol.survey import SectionRow, Survey
from ...simulator.calibration.assembly import layout_of_row, measurements_of
from ...simulator.calibration.data import InvalidCalibration
from ...simulator.calibration.measurements import Measurements
from ...simulator.calibration.microbatch_size import profile_of
from ...simulator.source_lines import decode
from ..sections.ranges import configure_torch, pick_device
from .probe import ProbedLinks
from .subject import Subject, memory_of
from .survey import recipe_of, rest, survey

log = logging.getLogger("makara.trainer")

BUDGET_S = 60.0
SURVEY_S = 20.0  # of one worker, before others help: by then a small model is measured
_STORE_PATIENCE_S = 5.0
_NO_LINKS = ProbedLinks()


def profile(training: Training, job: JobSettings, *, seconds: float = BUDGET_S) -> Profile:
    """The recipe's model part and this hardware's calibration (Varuna §4.3), by this worker alone.

    What an earlier job left in the store is used again. `seconds` bounds how often measurements are
    repeated, and how many m are looked at. Raises
    `UntraceableModel`, `UserCodeError` naming what of the job cannot be met.
    """
    subject = subject_of(training, job)
    found = begin(subject, seconds=seconds / 2)
    if isinstance(found, Profile):
        return found
    return conclude(subject, found, rest(subject, found, seconds / 2))


def measure(training: Training, job: JobSettings, *, seconds: float) -> Measurements:
    """A job's model for several m, for people to see; the store is not asked. Raises as `profile` does."""
    subject = subject_of(training, job)
    subject.hold_first()
    found = survey(subject, seconds=seconds / 2, several=True)
    return measurements_of(found, rest(subject, found, seconds / 2), [], [])


def subject_of(training: Training, job: JobSettings) -> Subject:
    """The job's model on the device that this process has."""
    configure_torch(job.threads, job.numerics)
    return Subject(training, job, pick_device("cuda" if torch.cuda.is_available() else "cpu"))


def begin(subject: Subject, *, seconds: float) -> Profile | Survey:
    """What an earlier job left in the store; or what there is to measure, and as much of it as could be in
    about `seconds`."""
    job = subject.job
    subject.hold_first()
    store = open_store(job.store.uri, endpoint=job.store.endpoint, region=job.store.region)
    note = ""
    try:
        found = _reused(subject, store)
        if found is not None:
            return found
    except (CheckpointError, InvalidCalibration, RecipeMismatch, ValueError) as error:
        note = f"measured anew, since the stored calibration cannot be used: {error}"
        log.warning("%s", note)
        subject.hold_first()
    return survey(subject, seconds=seconds).model_copy(update={"note": note})


def conclude(
    subject: Subject, survey: Survey, rows: Sequence[SectionRow] = (), links: ProbedLinks = _NO_LINKS
) -> Profile:
    """What the measurements come to, for a worker with this one's memory; without any links, they are taken
    to be as inside this machine."""
    measured = measurements_of(survey, rows, links.wires, links.allreduces)
    return _profile(subject, measured, survey.recipe).model_copy(update={"note": survey.note})


def _reused(subject: Subject, store: Store) -> Profile | None:
    """Raises what says that the stored calibration is unfit, or the store away."""
    basis = subject.basis()
    data = retrying(lambda: load_calibration(store, basis.fingerprint), patience_s=_STORE_PATIENCE_S)
    if data is None:
        return None
    measured = Measurements.from_json(decode(data, InvalidCalibration))
    if measured.basis != basis:
        raise InvalidCalibration("basis: it is another model's, or another machine's")
    found = _profile(subject, measured, recipe_of(subject, layout_of_row(measured.rows[0])), stored=True)
    # Every trainer will compare its graph with this one's: it must be what is traced here and now.
    subject.cut_exactly(layout_of_row(measured.row(found.recipe.microbatch_size)))
    return found


def _profile(subject: Subject, measured: Measurements, recipe: Recipe, *, stored: bool = False) -> Profile:
    job = subject.job
    return profile_of(
        measured,
        recipe,
        wanted=job.microbatch_size,
        memory_bytes=memory_of(subject.device, job),
        most_workers=job.most_workers,
        stored=stored,
    )
