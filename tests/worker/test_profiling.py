"""A job's first look at its model: what is measured, how the work is divided, what is found in the store."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from makara.checkpoint import open_store, save_calibration
from makara.checkpoint.layout import calibration_key
from makara.model.errors import RecipeMismatch
from makara.model.partition.partition import split
from makara.model.tracing.trace import trace
from makara.model.training import load_entrypoint
from makara.protocol.messages import JobSettings, Profile
from makara.protocol.survey import Survey
from makara.simulator import Calibration, Measurements
from makara.simulator.calibration.assembly import done_in, left, measurements_of
from makara.worker.profiling.profiling import begin, conclude, profile, subject_of
from makara.worker.profiling.shares import shares
from makara.worker.profiling.survey import rest
from models import tied_gpt
from trainer_processes import BUNDLE, settings

ENTRYPOINT = "models:untied_mlp"


def job_of(folder: Path, **changes: object) -> JobSettings:
    return settings(folder, **{"entrypoint": ENTRYPOINT, "microbatch_size": None, **changes})


def surveyed(job: JobSettings, seconds: float) -> Survey:
    found = begin(subject_of(load_entrypoint(BUNDLE, job.entrypoint), job), seconds=seconds)
    assert isinstance(found, Survey)
    return found


def store(job: JobSettings, measured: dict | None) -> str:
    """Leave a calibration in the job's store, as the manager does."""
    assert measured is not None
    found = Measurements.from_json(measured)
    assert found.basis is not None
    save_calibration(open_store(job.store.uri), found.basis.fingerprint, found.to_text())
    return found.basis.fingerprint


def test_one_worker_alone_measures_every_section_for_several_m(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    found = profile(load_entrypoint(BUNDLE, ENTRYPOINT), job)
    measured = Measurements.from_json(found.measurements or {})
    assert not found.stored
    assert measured.sizes[:2] == (1, 2)
    assert found.recipe.microbatch_size in measured.sizes
    assert found.recipe.global_batch_size == job.global_batch_size
    assert Calibration.from_json(found.calibration) == measured.at(found.recipe.microbatch_size)
    assert measured.row(found.recipe.microbatch_size).graph_hash == found.recipe.graph_hash
    assert all(f.repeats >= 3 for row in measured.rows for f in row.figures["forward_s"])
    assert {(wire.same_vm, wire.source) for wire in measured.wires} == {(True, "loopback")}


def test_workers_that_a_tiny_model_is_cut_for_are_part_of_what_measurements_depend_on(tmp_path: Path) -> None:
    @cache
    def fingerprint(most_workers: int) -> str:
        subject = subject_of(given, job_of(tmp_path, most_workers=most_workers))
        subject.hold_first()
        assert len(subject.cut(0.0).cuts) + 1 == max(16, min(20, most_workers))
        return subject.basis().fingerprint

    given = tied_gpt(layers=20)
    assert fingerprint(1) == fingerprint(16)
    assert len({fingerprint(16), fingerprint(18), fingerprint(20)}) == 3


def test_a_fixed_m_is_the_only_one_that_a_job_measures(tmp_path: Path) -> None:
    found = profile(load_entrypoint(BUNDLE, ENTRYPOINT), job_of(tmp_path, microbatch_size=4))
    assert found.recipe.microbatch_size == 4
    assert Measurements.from_json(found.measurements or {}).sizes == (4,)


def test_what_is_measured_says_how_much_of_the_beginning_is_frozen(tmp_path: Path) -> None:
    job = job_of(tmp_path, entrypoint="frozen_models:probe", microbatch_size=2)
    training = load_entrypoint(BUNDLE, job.entrypoint)
    found = profile(training, job, seconds=2.0)
    calibration = Calibration.from_json(found.calibration)
    chain = split(trace(training, 2, job.seed, job.precision), found.recipe.cuts)
    assert 0 < calibration.frozen == chain.frozen < chain.num_sections
    assert calibration.backward_s[: chain.frozen] == (0.0,) * chain.frozen


@pytest.mark.parametrize(("numerics", "element_bytes"), [("exact", 8), ("fast", 4)])
def test_what_is_measured_says_what_is_tied(
    tmp_path: Path, numerics: Literal["exact", "fast"], element_bytes: int
) -> None:
    job = job_of(tmp_path, entrypoint="models:tied_gpt", microbatch_size=2, numerics=numerics)
    training = load_entrypoint(BUNDLE, job.entrypoint)
    found = profile(training, job, seconds=2.0)
    calibration = Calibration.from_json(found.calibration)
    chain = split(trace(training, 2, job.seed, job.precision), found.recipe.cuts)
    ((name, sections),) = chain.shared.items()
    (tied,) = calibration.tied_sums
    assert tied.sections == sections == (0, chain.num_sections - 1)
    assert tied.gradient_bytes == element_bytes * chain.traced.tensors[name].numel()


def test_m_leaves_a_micro_batch_for_each_worker(tmp_path: Path) -> None:
    found = profile(load_entrypoint(BUNDLE, ENTRYPOINT), job_of(tmp_path, most_workers=8))
    assert found.recipe.num_micro_batches >= 8


def test_the_next_job_uses_what_the_last_one_left_in_the_store(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    first = profile(load_entrypoint(BUNDLE, ENTRYPOINT), job)
    store(job, first.measurements)
    again = profile(load_entrypoint(BUNDLE, ENTRYPOINT), job)
    assert again.stored
    assert again.model_copy(update={"stored": False}) == first
    fast = job.model_copy(update={"numerics": "fast"})
    other = profile(load_entrypoint(BUNDLE, ENTRYPOINT), fast, seconds=1.0)
    assert not other.stored


@pytest.mark.parametrize("fault", ["torn", "of another model", "of another cut"])
def test_a_stored_calibration_that_is_unfit_is_measured_anew_and_it_is_said(
    tmp_path: Path, fault: str
) -> None:
    job = job_of(tmp_path)
    first = profile(load_entrypoint(BUNDLE, ENTRYPOINT), job)
    path = tmp_path / "store" / calibration_key(store(job, first.measurements))
    text = path.read_text()
    changed = {
        "torn": text[: len(text) // 2],
        "of another model": text.replace(Measurements.from_json(text).rows[0].graph_hash, "0" * 64),
        "of another cut": text.replace(first.recipe.graph_hash, "0" * 64),
    }[fault]
    path.write_text(changed)
    found = surveyed(job, seconds=0.0)
    assert found.note.startswith("measured anew, since the stored calibration cannot be used: ")


def test_what_a_survey_leaves_is_measured_elsewhere_and_put_together(tmp_path: Path) -> None:
    job = job_of(tmp_path, microbatch_size=2)
    found = surveyed(job, seconds=0.0)
    (layout,) = found.layouts
    missing = left(layout, done_in(found.rows))
    assert len(missing) == len(layout.cuts) + 1  # also the one in the middle, which was looked at
    parts = shares(found, done_in(found.rows), 3)
    assert sorted(section for share in parts for section in share.sections) == missing
    assert len(parts) <= 3

    elsewhere = subject_of(load_entrypoint(BUNDLE, ENTRYPOINT), job)
    rows = rest(elsewhere, found, 1.0)
    whole = measurements_of(found, rows, [], [])
    assert whole.at(2).num_sections == len(layout.cuts) + 1
    answer = conclude(elsewhere, found.model_copy(update={"rows": [*found.rows, *rows]}))
    assert isinstance(answer, Profile)
    assert answer.recipe == found.recipe


def test_a_worker_that_traces_another_graph_measures_nothing(tmp_path: Path) -> None:
    job = job_of(tmp_path, microbatch_size=2)
    found = surveyed(job, seconds=0.0)
    other = found.layouts[0].model_copy(update={"graph_hash": "0" * 64})
    with pytest.raises(RecipeMismatch, match="graph_hash"):
        subject_of(load_entrypoint(BUNDLE, ENTRYPOINT), job).cut_exactly(other)
