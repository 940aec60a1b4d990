"""A job that starts from a checkpoint of another: copied before VMs are asked for, of the same model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from calibrations import uniform
from checkpoints import JOB, published, read_sections, section_tensors
from core_script import RECIPE, Script, spec
from makara.checkpoint import (
    HeadAhead,
    HeadMissing,
    NoReadable,
    Store,
    StoreRefused,
    StoreUnavailable,
    copy_checkpoint,
    delete_parts,
    load_manifest,
    open_generation,
    open_store,
    read_head,
    retire,
    weight_shapes,
)
from makara.checkpoint.layout import manifest_key, part_key
from makara.checkpoint.tensors import unpack
from makara.manager.api.starting import newest_readable
from makara.manager.cli.progress import answers
from makara.manager.core.commands import ComputePlan, CopyCheckpoint, OpenHead, RequestVm
from makara.manager.core.events import (
    CheckpointCopied,
    CommandStuck,
    ContinueRequested,
    HeadDiffers,
    JobCommandFailed,
    JobSubmitted,
    ManagerStarted,
    ResumeRequested,
    StopRequested,
)
from makara.manager.core.facts import BitsFixed, JobEnded, PersonNeeded, RecipeFixed, Resumption, StartCopied
from makara.manager.core.state import Status
from makara.manager.core.strikes.table import Kind
from makara.manager.service.runtime import Job
from makara.manager.service.views.job import job_view
from makara.manager.service.views.notes import notes
from makara.manager.spec.job_spec import JobSpecError, parse_spec, resolve_uri
from makara.manager.spec.start_source import StartSource, other_weights, split_step
from makara.protocol.messages import CheckpointRef, Phase, Profile, WorkerReport


def ref(step: int, generation: int = 0) -> CheckpointRef:
    return CheckpointRef(step=step, generation=generation)


def submitted(numerics: str = "fast", **recipe: object) -> Script:
    """A job that starts from another's checkpoint, which is being copied."""
    script = Script()
    start = StartSource(uri="file:///c", job="other", recipe=RECIPE.model_copy(update=recipe))
    value = spec(training={"numerics": numerics})
    script.event(JobSubmitted(now=script.now, job="j", spec=value, bundle_sha256="b0", start=start))
    return script


def profiled(script: Script) -> list[str]:
    """The checkpoint is copied, and VMs came; one of them reports the recipe."""
    copied(script)
    script.wait(1.0)
    workers = [f"{vm.vm}.0" for vm in script.state.live_vms]
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(workers[0], profile=profile))
    return workers


def copied(script: Script, step: int = 40) -> None:
    script.event(CheckpointCopied(now=script.now, checkpoint=ref(step), source=ref(step, 7)))


def test_no_vm_is_asked_for_before_the_checkpoint_is_copied() -> None:
    script = submitted()
    assert script.last(CopyCheckpoint).source.job == "other"
    for _ in range(5):
        script.wait(1.0)
    script.event(ManagerStarted(now=script.now))
    assert (script.count(RequestVm), script.count(CopyCheckpoint)) == (0, 1)
    assert script.state.status is Status.PENDING
    copied(script)
    copied(script)  # by the command as the manager before had run it
    script.wait(1.0)
    assert (script.count(RequestVm), script.count(StartCopied)) == (2, 1)
    assert (script.state.published, script.state.progress_step) == ((ref(40),), 40)


def test_that_not_the_newest_checkpoint_was_copied_is_an_event_and_a_note() -> None:
    script = submitted()
    why = "checkpoint of step 50: other/sections/50-g7/0.0.safetensors in file:///s: no such object"
    script.event(CheckpointCopied(now=script.now, checkpoint=ref(40), source=ref(40, 7), skipped=why))
    assert script.last(StartCopied).skipped == why
    job = Job("j", [], [])
    job.state, job.observations = script.state, script.observations
    assert f"it starts from step 40 of another job, not from the newest: {why}" in notes(job, script.now)


@pytest.mark.parametrize("damaged", ["a part is missing", "a part is cut", "the manifest is cut"])
def test_a_submission_looks_at_the_newest_checkpoint_that_can_be_read(
    stores: tuple[Store, Store], damaged: str
) -> None:
    there, _ = stores
    published(there, 10, 1)
    newest = published(there, 20, 2)
    match damaged:
        case "a part is missing":
            there.delete(newest.parts[0].key)
        case "a part is cut":
            there.put(newest.parts[0].key, there.get(newest.parts[0].key)[:20])
        case _:
            there.put(manifest_key(JOB, newest.checkpoint), b"{")
    weights: dict[str, tuple[int, ...]] = {}
    assert newest_readable(there, JOB, None, weights).step == 10
    assert weights["block1.0.weight"] == (3, 4)
    with pytest.raises(NoReadable, match="the checkpoint of step 20 is damaged: gpt/"):
        newest_readable(there, JOB, 20, weights)


def test_the_first_generation_opens_the_head_that_the_copy_made() -> None:
    script = submitted()
    copied(script)
    script.wait(1.0)
    workers = [f"{vm.vm}.0" for vm in script.state.live_vms]
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    fix_recipe(script, workers)
    script.answer(2, 1)
    script.prepare()
    command = script.last(OpenHead)
    assert (command.generation, command.opened, command.checkpoints) == (1, 0, (ref(40),))
    script.open(ref(40))
    script.form(40)
    assert script.state.status is Status.RUNNING
    assert script.state.current is not None
    assert script.state.current.lost_steps == 0


def fix_recipe(script: Script, workers: list[str]) -> None:
    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(workers[0], profile=profile))
    script.report(*(script.change(w, graph_hash="5ec7") for w in workers))


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        ({"graph_hash": "0ther"}, "graph hash 0ther, here 5ec7"),
        ({"cuts": [1, 2]}, r"sections 3, here 2; cuts \[1, 2\], here \[1\]"),
        ({"graph_hash": "0ther", "torch_version": "2.12"}, "5ec7; torch 2.12, here 2.13"),
    ],
)
def test_a_checkpoint_of_another_model_ends_the_job_with_what_differs(
    recipe: dict[str, object], what: str
) -> None:
    script = submitted(**recipe)
    copied(script)
    script.wait(1.0)
    workers = [f"{vm.vm}.0" for vm in script.state.live_vms]
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in workers))
    profile = Profile(recipe=RECIPE, calibration=uniform(2).to_json())
    script.report(script.change(workers[0], profile=profile))
    assert script.last(JobEnded).status == "failed"
    assert script.last(JobEnded).reason.startswith("checkpoint.start_from: job other is of another model: ")
    assert re.search(what, script.last(JobEnded).reason)
    assert not script.state.live_vms


def test_exact_takes_over_the_bits_of_the_steps_that_were_made() -> None:
    script = submitted("exact", bits_hash="aaaa")
    script.timing = script.timing.with_row(Kind.UNFIT_VM, limit=1)
    workers = profiled(script)
    assert script.last(RecipeFixed).recipe.bits_hash == "aaaa"
    script.report(*(script.change(w, graph_hash="5ec7", bits_hash="bbbb") for w in workers))
    script.wait(0.25)
    assert (script.count(BitsFixed), script.count(ComputePlan)) == (0, 0)
    reason = script.last(PersonNeeded).reason
    assert "other bits (bbbb) than the job's (aaaa)" in reason
    assert "those of other, which it starts from" in reason
    assert "training.numerics: fast" in reason
    assert script.last(PersonNeeded).offers == (Resumption.AGAIN,), "from step 0 it would be another job"


def test_another_optimizer_on_machines_that_are_alike_is_told_and_makes_nobody_unfit() -> None:
    """Found: the hash covered the user's choices, so VMs came and were ended for another learning rate."""
    script = submitted("exact", bits_hash="aaaa", kernels_hash="cccc")
    workers = profiled(script)
    shown = {"graph_hash": "5ec7", "bits_hash": "bbbb", "kernels_hash": "cccc"}
    script.report(*(script.change(w, **shown) for w in workers))
    assert script.count(ComputePlan) == 1
    fixed = script.last(BitsFixed)
    assert (fixed.bits_hash, fixed.kernels_hash) == ("bbbb", "cccc")
    assert "another seed, data or optimizer" in fixed.note
    job = Job("j", [], [])
    job.state, job.observations = script.state, script.observations
    [note] = job_view(job, {}, 0.0).notes
    assert note.startswith("goes on from job other with another seed, data or optimizer")
    script.answer(2, 1)
    script.report(script.change(workers[1], **{**shown, "bits_hash": "dddd"}))
    assert set(script.state.unfit) == {workers[1]}, "from then on all train to the same bits"


def test_the_same_bits_as_before_need_no_word() -> None:
    script = submitted("exact", bits_hash="aaaa", kernels_hash="cccc")
    workers = profiled(script)
    shown = {"graph_hash": "5ec7", "bits_hash": "aaaa", "kernels_hash": "cccc"}
    script.report(*(script.change(w, **shown) for w in workers))
    assert script.last(BitsFixed).note == ""


def test_machines_with_other_kernels_than_before_are_unfit() -> None:
    script = submitted("exact", bits_hash="aaaa", kernels_hash="cccc")
    script.timing = script.timing.with_row(Kind.UNFIT_VM, limit=1)
    workers = profiled(script)
    shown = {"graph_hash": "5ec7", "bits_hash": "bbbb", "kernels_hash": "dddd"}
    script.report(*(script.change(w, **shown) for w in workers))
    script.wait(0.25)
    assert (script.count(BitsFixed), script.count(ComputePlan)) == (0, 0)
    assert "other bits (dddd) than the job's (cccc)" in script.last(PersonNeeded).reason


@pytest.mark.parametrize(("numerics", "bits"), [("exact", None), ("fast", "aaaa")])
def test_bits_that_are_not_known_or_not_wanted_are_not_asked_for(numerics: str, bits: str | None) -> None:
    script = submitted(numerics, bits_hash=bits)
    workers = profiled(script)
    assert script.last(RecipeFixed).recipe.bits_hash is None
    script.report(*(script.change(w, graph_hash="5ec7", bits_hash="bbbb") for w in workers))
    assert script.count(BitsFixed) == (numerics == "exact")
    assert script.count(ComputePlan) == 1


@pytest.mark.parametrize(
    ("recipe", "what"),
    [({"threads": 4}, "resources.threads 4, here 1"), ({"device_kind": "cuda"}, "device cuda, here cpu")],
)
def test_exact_is_refused_where_its_bits_cannot_be_those_of_before(
    recipe: dict[str, object], what: str
) -> None:
    script = submitted("exact", **recipe)
    profiled(script)
    reason = f"checkpoint.start_from: job other was trained to other bits: {what}; "
    assert script.last(JobEnded).reason.startswith(reason)
    script = submitted("fast", **recipe)
    profiled(script)
    assert script.state.ended is None


def test_to_begin_anew_says_that_it_is_not_from_the_other_job() -> None:
    script = submitted()
    workers = profiled(script)
    script.report(*(script.change(w, graph_hash="5ec7") for w in workers))
    script.answer(2, 1)
    script.prepare()
    command = script.last(OpenHead)
    lacks = HeadDiffers(now=script.now, generation=command.generation, difference="missing", reason="gone")
    script.event(lacks)
    job = Job("j", [], [])
    job.state, job.observations = script.state, script.observations
    shown = "\n".join(answers(job_view(job, {}, 0.0).model_dump(mode="json")))
    assert "--restart    begin at step 0, NOT from other; the checkpoints" in shown


@pytest.mark.parametrize("late", [CommandStuck, JobCommandFailed])
def test_a_copy_of_the_time_before_that_fails_late_is_no_matter_of_the_job(
    late: type[CommandStuck | JobCommandFailed],
) -> None:
    script = submitted()
    script.event(StopRequested(now=script.now))
    script.event(ContinueRequested(now=script.now, min_nodes=1, max_nodes=2))
    workers = profiled(script)
    failed = late(now=script.now, command="copy_checkpoint", error="AccessDenied")
    script.event(failed)
    assert script.state.status is Status.STARTING
    script.report(*(script.change(w, graph_hash="5ec7") for w in workers))
    script.answer(2, 1)
    script.prepare()
    script.open(ref(40))
    script.form(40)
    script.report(script.change(workers[0], step=100, phase=Phase.FINISHED, published=ref(100, 1)))
    script.event(failed)
    assert script.state.status is Status.EXPORTING
    script.event(CommandStuck(now=script.now, command="export_weights", error="AccessDenied"))
    assert script.state.status is Status.WAITING


def test_a_source_that_cannot_be_read_is_a_question_to_a_person() -> None:
    script = submitted()
    script.event(CommandStuck(now=script.now, command="copy_checkpoint", error="AccessDenied"))
    assert script.state.status is Status.WAITING
    assert script.state.waiting is not None
    assert script.state.waiting.offers == (Resumption.AGAIN,)
    script.event(ResumeRequested(now=script.now, how=Resumption.AGAIN))
    keys = [command.key for command in script.commands if isinstance(command, CopyCheckpoint)]
    assert len(set(keys)) == 2, "a command of the same key is never stored twice"
    copied(script)
    script.wait(1.0)
    assert script.count(RequestVm) == 2


def test_a_job_that_is_stopped_while_it_is_copied_begins_with_the_copy_when_it_goes_on() -> None:
    script = submitted()
    script.event(StopRequested(now=script.now))
    assert script.state.status is Status.STOPPED
    copied(script)  # too late
    assert script.state.published == ()
    script.event(ContinueRequested(now=script.now, min_nodes=1, max_nodes=2))
    assert script.count(CopyCheckpoint) == 2
    copied(script)
    script.wait(1.0)
    assert script.state.published == (ref(40),)
    assert script.count(RequestVm) == 2


# ---- the copy ----------------------------------------------------------------------------------------------


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Store, Store]:
    return open_store((tmp_path / "there").as_uri()), open_store((tmp_path / "here").as_uri())


def test_a_copy_is_whole_and_outlives_its_source(stores: tuple[Store, Store]) -> None:
    there, here = stores
    published(there, 10, 1)
    published(there, 20, 2)
    assert copy_checkpoint(there, JOB, here, "mine") == (
        CheckpointRef(step=20, generation=0),
        CheckpointRef(step=20, generation=2),
    )
    there.delete_many([key for key, _ in there.list("")])
    manifest = load_manifest(here, "mine", CheckpointRef(step=20, generation=0))
    assert (manifest.data_position, manifest.metadata[1]) == (64 * 20, {"scale": 0.5})
    files = read_sections(here, "mine", CheckpointRef(step=20, generation=0), range(3))
    for (section, part), data in files.items():
        found, _ = unpack(data)
        for name, tensor in section_tensors(section, part, 20).items():
            assert (found[name] == tensor).all()
    assert weight_shapes(here, manifest)["block1.0.weight"] == (3, 4)


def test_a_copy_opens_as_the_first_base_and_nothing_else_does(stores: tuple[Store, Store]) -> None:
    there, here = stores
    published(there, 20, 2)
    copy_checkpoint(there, JOB, here, "mine")
    with pytest.raises(HeadAhead):
        open_generation(here, "mine", 1, opened=0)
    with pytest.raises(HeadAhead):
        open_generation(here, "mine", 1, opened=0, known={CheckpointRef(step=10, generation=0)})
    known = {CheckpointRef(step=20, generation=0)}
    with pytest.raises(HeadMissing):
        open_generation(here, "another", 1, opened=0, known=known)
    head = open_generation(here, "mine", 1, opened=0, known=known)
    assert (head.generation, head.base) == (1, CheckpointRef(step=20, generation=0))
    assert open_generation(here, "mine", 1, opened=0, known=known) == head


def test_a_copy_that_is_made_again_changes_nothing(stores: tuple[Store, Store]) -> None:
    there, here = stores
    published(there, 20, 2)
    copy_checkpoint(there, JOB, here, "mine")
    head = read_head(here, "mine")
    published(there, 30, 3)  # its source went on, and the answer was lost
    assert copy_checkpoint(there, JOB, here, "mine") == (CheckpointRef(step=20, generation=0), None)
    assert read_head(here, "mine") == head
    open_generation(here, "mine", 1, opened=0, known={CheckpointRef(step=20, generation=0)})
    with pytest.raises(HeadAhead, match="opened for generation 1"):
        copy_checkpoint(there, JOB, here, "mine")


def test_what_cannot_be_read_is_passed_over_or_said(stores: tuple[Store, Store]) -> None:
    there, here = stores
    with pytest.raises(NoReadable, match="has no checkpoint of job gpt"):
        copy_checkpoint(there, JOB, here, "mine")
    published(there, 10, 1)
    newest = published(there, 20, 2)
    with pytest.raises(NoReadable, match="no checkpoint of step 15: those of steps 10, 20 are published"):
        copy_checkpoint(there, JOB, here, "mine", step=15)
    there.put(newest.parts[0].key, b"torn")
    with pytest.raises(NoReadable, match=newest.parts[0].key):
        copy_checkpoint(there, JOB, here, "mine", step=20)
    assert read_head(here, "mine") is None
    skipped: dict[CheckpointRef, str] = {}
    assert copy_checkpoint(there, JOB, here, "mine", on_skip=skipped.__setitem__) == (
        CheckpointRef(step=10, generation=0),
        CheckpointRef(step=10, generation=1),
    )
    assert list(skipped) == [newest.checkpoint]
    assert skipped[newest.checkpoint].startswith(f"{newest.parts[0].key} in {there.uri}: 4 bytes, ")


def test_a_source_that_trained_on_past_the_last_step_is_gone_on_from_before_it(
    stores: tuple[Store, Store],
) -> None:
    there, here = stores
    for step in (90, 100, 150):
        published(there, step, 1)
    assert copy_checkpoint(there, JOB, here, "mine", below=100) == (
        CheckpointRef(step=90, generation=0),
        CheckpointRef(step=90, generation=1),
    )
    retire(there, JOB, CheckpointRef(step=90, generation=1), now=0.0)
    why = r"training\.steps"
    with pytest.raises(NoReadable, match=why):
        copy_checkpoint(there, JOB, here, "another", below=100)
    with pytest.raises(NoReadable, match=why):
        copy_checkpoint(there, JOB, here, "another", step=150, below=100)
    assert read_head(here, "another") is None


def test_a_source_that_retires_what_is_copied_is_asked_for_its_newest(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = stores
    first = published(there, 10, 1)
    get_range = there.get_range

    def gone_meanwhile(key: str, start: int, length: int) -> bytes:
        if key == first.parts[2].key and read_head(there, JOB).generation == 1:  # type: ignore[union-attr]
            published(there, 20, 2)
            open_generation(there, JOB, 3)
            retire(there, JOB, CheckpointRef(step=10, generation=1), now=0.0)
            there.delete(key)
        return get_range(key, start, length)

    monkeypatch.setattr(there, "get_range", gone_meanwhile)
    assert copy_checkpoint(there, JOB, here, "mine") == (
        CheckpointRef(step=20, generation=0),
        CheckpointRef(step=20, generation=2),
    )


def test_a_newer_checkpoint_is_copied_rather_than_an_older_one_when_the_newest_vanishes(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = stores
    published(there, 10, 1)
    newest = published(there, 20, 2)
    get_range = there.get_range

    def gone_meanwhile(key: str, start: int, length: int) -> bytes:
        if key == newest.parts[2].key and there.exists(key):
            published(there, 30, 2)
            retire(there, JOB, newest.checkpoint, now=0.0)
            delete_parts(there, JOB, newest.checkpoint)
        return get_range(key, start, length)

    monkeypatch.setattr(there, "get_range", gone_meanwhile)
    skipped: dict[CheckpointRef, str] = {}
    made = copy_checkpoint(there, JOB, here, "mine", on_skip=skipped.__setitem__)
    assert (made, skipped) == ((ref(30), ref(30, 2)), {}), "what was retired meanwhile is not damaged"


class PartReads:
    """Counts how often the parts of a checkpoint are read, and fails the first reading of one."""

    def __init__(self, store: Store, key: str, error: Exception, patch: pytest.MonkeyPatch) -> None:
        self.reads: list[str] = []
        self._get_range, self._key, self._errors = store.get_range, key, [error]
        patch.setattr(store, "get_range", self._read)

    def _read(self, key: str, start: int, length: int) -> bytes:
        if key == self._key and self._errors:
            raise self._errors.pop()
        if "/sections/" in key:
            self.reads.append(key)
        return self._get_range(key, start, length)


def test_a_store_that_is_away_for_a_moment_costs_no_part_that_is_copied(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = stores
    keys = [part.key for part in published(there, 20, 2).parts]
    found = PartReads(there, keys[3], StoreUnavailable("timed out"), monkeypatch)
    assert copy_checkpoint(there, JOB, here, "mine") == (ref(20), ref(20, 2))
    assert found.reads == keys


def test_a_copy_that_was_cut_off_goes_on_with_the_parts_that_are_left(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = stores
    keys = [part.key for part in published(there, 20, 2).parts]
    found = PartReads(there, keys[3], StoreRefused("ExpiredToken"), monkeypatch)
    with pytest.raises(StoreRefused):
        copy_checkpoint(there, JOB, here, "mine")
    assert read_head(here, "mine") is None
    assert copy_checkpoint(there, JOB, here, "mine") == (ref(20), ref(20, 2))
    assert found.reads == keys
    assert len(read_sections(here, "mine", ref(20), range(3))) == len(keys)


def test_a_copy_takes_no_parts_that_are_of_another_checkpoint_of_its_step(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = stores
    first = published(there, 20, 2)
    PartReads(there, first.parts[3].key, StoreRefused("ExpiredToken"), monkeypatch)
    with pytest.raises(StoreRefused):
        copy_checkpoint(there, JOB, here, "mine")
    of_another = part_key("mine", ref(20), 0, 0)
    here.put(of_another, bytes(here.size(of_another)))
    second = published(there, 20, 3, recipe={})
    open_generation(there, JOB, 4)
    retire(there, JOB, first.checkpoint, now=0.0)
    assert copy_checkpoint(there, JOB, here, "mine") == (ref(20), second.checkpoint)
    assert len(read_sections(here, "mine", ref(20), range(3))) == len(second.parts)


# ---- the job file ------------------------------------------------------------------------------------------


def test_a_job_file_names_a_job_or_the_folder_of_one_and_a_step(tmp_path: Path) -> None:
    assert split_step("gpt") == ("gpt", None)
    assert split_step("s3://b/p/gpt-1a2b3c@40") == ("s3://b/p/gpt-1a2b3c", 40)
    for given, meant in (
        ("gpt@40", "gpt@40"),
        ("./old/gpt-1a2b3c@40", f"{tmp_path.as_uri()}/old/gpt-1a2b3c@40"),
        ("/old/gpt-1a2b3c", "file:///old/gpt-1a2b3c"),
    ):
        value = parse_spec(spec(checkpoint={"start_from": given}))
        assert resolve_uri(value, tmp_path).checkpoint.start_from == meant
    for wrong in ("ftp://a/b", "s3://", "file://host/a", "file:///a/..", "s3://b/p/a b"):
        with pytest.raises(JobSpecError, match=r"checkpoint\.start_from"):
            parse_spec(spec(checkpoint={"start_from": wrong}))


def test_weights_that_differ_are_named() -> None:
    there, here = {"a": (2, 3), "b": (4,), "c": (1,)}, {"a": [2, 3], "b": [5], "d": [1]}
    found = other_weights(there, here)
    assert found == "it lacks d; it has c, which this model has not; b is [4] there, [5] here"
    assert other_weights(there, {name: list(shape) for name, shape in there.items()}) == ""
