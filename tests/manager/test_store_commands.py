"""What the manager does in a job's store, when all goes well and when the store says no; in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from checkpoints import JOB, published, written
from core_script import RECIPE, spec
from makara.checkpoint import (
    CheckpointError,
    Corrupt,
    Manifest,
    Store,
    StoreRefused,
    open_generation,
    open_store,
    read_head,
    retire,
)
from makara.checkpoint.layout import head_key
from makara.manager.core.commands import (
    Command,
    CopyCheckpoint,
    DeleteCheckpoint,
    ExportWeights,
    OpenHead,
    SweepStore,
)
from makara.manager.core.events import (
    CheckpointCopied,
    CheckpointDeleted,
    CommandStuck,
    Event,
    HeadDiffers,
    HeadOpened,
    HeadSeen,
    WeightsExported,
)
from makara.manager.core.facts import (
    CheckpointPublished,
    CheckpointRetired,
    Fact,
    GenerationPlanned,
    GenerationPrepared,
    JobEnded,
    Submitted,
)
from makara.manager.core.fold import fold
from makara.manager.core.strikes.table import TABLE, Kind
from makara.manager.service import store_commands
from makara.manager.service.store_commands import StoreCommands
from makara.manager.spec.start_source import StartSource
from makara.protocol.messages import CheckpointRef

T = TypeVar("T")
LEASE_S = 60.0


def ref(step: int, generation: int = 1) -> CheckpointRef:
    return CheckpointRef(step=step, generation=generation)


def opened(generation: int) -> list[Fact]:
    """The head may have been opened for this generation."""
    plan = GenerationPlanned(
        at=0, number=generation, cause="", plan={"ranges": [], "paths": []}, members=(), predicted_s=None,
        detected_at=0, decided_s=0,
    )  # fmt: skip
    return [plan, GenerationPrepared(at=0, number=generation, endpoint="")]


class World:
    """A job's store, and a manager's clock that only waiting moves."""

    def __init__(self, folder: Path) -> None:
        self.uri = (folder / "store").as_uri()
        self.store: Store = open_store(self.uri)
        self.now = time.time()
        self.trouble: list[str] = []
        self.refusals: list[Exception] = []  # what the store says to whoever opens it next
        value = spec(checkpoint={"uri": self.uri, "interval": 10, "keep_latest_k": 2})
        self.facts: list[Fact] = [Submitted(at=self.now, job=JOB, spec=value, bundle_sha256="b0")]
        self.commands = StoreCommands(
            scratch=folder / "scratch",
            open_store=lambda _: self.open(),
            open_source=lambda _, source: open_store(source.uri),
            state_of=lambda _: fold(self.facts),
            persist=self._persist,
            clock=lambda: self.now,
            patience_s=600.0,
            sleep=self._sleep,
        )

    def open(self) -> Store:
        if self.refusals:
            raise self.refusals.pop()
        return open_store(self.uri)

    def do(self, command: Any) -> Event | None:
        return asyncio.run(self.commands.carry_out(JOB, command))

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds

    async def _persist(
        self,
        job: str,
        command: Command,
        call: Callable[[], T],
        *temporary: type[Exception],
        wanted: Callable[[], bool] | None = None,
        kind: Kind = Kind.COMMAND,
        alone: asyncio.Lock | None = None,
    ) -> T:
        while True:
            try:
                async with alone or contextlib.nullcontext():
                    return call()
            except temporary as error:
                self.trouble.append(str(error))
                await self._sleep(TABLE[kind].longest_s)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_parts_outlive_their_place_in_the_head_by_a_lease_however_late_it_is_taken(world: World) -> None:
    old = published(world.store, 10, 1)
    published(world.store, 20, 1)
    decided_at = world.now - 3600.0  # the manager was away since
    command = DeleteCheckpoint(key="d", checkpoint=ref(10), not_before=decided_at + LEASE_S, lease_s=LEASE_S)
    began = world.now
    assert world.do(command) == CheckpointDeleted(now=world.now, checkpoint=ref(10))
    assert world.now == pytest.approx(began + LEASE_S)
    assert not world.store.exists(old.parts[0].key)


@pytest.mark.parametrize("error", [StoreRefused("AccessDenied: no"), CheckpointError("whatever")])
def test_a_refused_deletion_is_tried_again_and_never_given_up(world: World, error: Exception) -> None:
    published(world.store, 10, 1)
    published(world.store, 20, 1)
    world.refusals = [error] * 50
    done = world.do(DeleteCheckpoint(key="d", checkpoint=ref(10), not_before=0.0, lease_s=LEASE_S))
    assert isinstance(done, CheckpointDeleted)
    assert world.trouble == [str(error)] * 50


def retired(world: World) -> tuple[Manifest, Any, Any]:
    """A checkpoint that has left the head, and the two commands that may delete its parts."""
    old = published(world.store, 10, 1)
    published(world.store, 20, 1)
    retire(world.store, JOB, old.checkpoint, now=0.0)
    world.facts.append(CheckpointPublished(at=0, checkpoint=ref(20)))
    world.facts += opened(1)
    delete = DeleteCheckpoint(key="d", checkpoint=ref(10), not_before=0.0, lease_s=LEASE_S)
    return old, delete, SweepStore(key="s", not_before=0.0, lease_s=LEASE_S)


@pytest.mark.parametrize("which", [1, 2], ids=["delete", "sweep"])
def test_no_parts_are_deleted_while_an_export_reads_them(world: World, which: int) -> None:
    found = retired(world)
    old, command = found[0], found[which]

    async def export_beside() -> Event | None:
        async with world.commands.exports[JOB]:
            deleting = asyncio.create_task(world.commands.carry_out(JOB, command))
            for _ in range(20):  # it goes as far as it can
                await asyncio.sleep(0)
            assert world.store.exists(old.parts[0].key)
        return await deleting

    assert isinstance(asyncio.run(export_beside()), CheckpointDeleted | HeadSeen)
    assert not world.store.exists(old.parts[0].key)


def test_a_refused_deletion_keeps_no_export_waiting(world: World) -> None:
    _, command, _ = retired(world)
    locked: list[bool] = []

    async def sleep(_: float) -> None:
        locked.append(world.commands.exports[JOB].locked())

    world._sleep = sleep  # type: ignore[method-assign]
    world.refusals = [StoreRefused("AccessDenied: no")] * 3
    assert isinstance(world.do(command), CheckpointDeleted)
    assert locked == [False] * 3


@pytest.mark.parametrize("made", [99, 100])
def test_what_a_job_starts_from_leaves_steps_to_train(world: World, tmp_path: Path, made: int) -> None:
    """Its source went on after the job was submitted, which trains 100 steps."""
    there = open_store((tmp_path / "there").as_uri())
    published(there, made, 1)
    source = StartSource(uri=there.uri, job=JOB, recipe=RECIPE)
    world.facts[0] = world.facts[0].model_copy(update={"start": source})
    answer = world.do(CopyCheckpoint(key="c", source=source))
    if made == 99:
        assert answer == CheckpointCopied(now=world.now, checkpoint=ref(99, 0), source=ref(99))
    else:
        assert isinstance(answer, CommandStuck)
        assert "100-g1: 100 of 100 steps (training.steps) are made" in answer.error


def test_opening_outlasts_a_refusal_that_is_put_right(world: World) -> None:
    world.refusals = [StoreRefused("ExpiredToken: the token has expired")] * 20
    assert isinstance(world.do(OpenHead(key="o", generation=1)), HeadOpened)
    assert world.trouble[0] == "ExpiredToken: the token has expired"


def test_opening_that_is_refused_for_too_long_asks_a_person(world: World) -> None:
    world.refusals = [StoreRefused("AccessDenied: not with this key")] * 1000
    began = world.now
    stuck = world.do(OpenHead(key="o", generation=1))
    error = "AccessDenied: not with this key"
    assert stuck == CommandStuck(now=world.now, command="open_head", error=error, generation=1)
    assert 600.0 <= world.now - began < 620.0


def test_a_missing_head_is_not_made_anew_where_one_must_be(world: World) -> None:
    published(world.store, 10, 1)
    world.store.delete(head_key(JOB))
    answer = world.do(OpenHead(key="o", generation=2, opened=1, checkpoints=(ref(10),)))
    assert isinstance(answer, HeadDiffers)
    assert answer.difference == "missing"
    assert "it was opened for generation 1 and listed checkpoint 10-g1" in answer.reason
    assert not world.store.exists(head_key(JOB))
    world.store.put(head_key(JOB), b"{torn")
    answer = world.do(OpenHead(key="o", generation=2, opened=1, checkpoints=(ref(10),)))
    assert isinstance(answer, HeadDiffers)
    assert answer.difference == "missing"
    answer = world.do(OpenHead(key="o", generation=3, restart=True))
    assert answer == HeadOpened(now=world.now, generation=3, checkpoints=())


def test_a_head_that_was_set_back_is_left_as_it_is(world: World) -> None:
    published(world.store, 10, 1)
    for opened, known in ((2, (ref(10),)), (1, (ref(10), ref(20)))):
        answer = world.do(OpenHead(key="o", generation=3, opened=opened, checkpoints=known))
        assert isinstance(answer, HeadDiffers)
        assert (answer.difference, answer.head_generation, answer.checkpoints) == ("lacks", 1, (ref(10),))
    head = read_head(world.store, JOB)
    assert head is not None
    assert head.generation == 1


@pytest.mark.parametrize("generation", [1, 2, 5, 6])
def test_a_head_of_another_life_of_the_job_is_left_as_it_is(world: World, generation: int) -> None:
    """The journal is of a backup, or begins anew under the same id."""
    published(world.store, 80, 4)
    published(world.store, 90, 5)
    answer = world.do(OpenHead(key="o", generation=generation, opened=0))
    assert isinstance(answer, HeadDiffers)
    assert (answer.difference, answer.head_generation) == ("ahead", 5)
    assert answer.checkpoints == (ref(80, 4), ref(90, 5)), "the base first"
    known = world.do(OpenHead(key="o", generation=6, opened=5, checkpoints=answer.checkpoints))
    assert known == HeadOpened(now=world.now, generation=6, checkpoints=(ref(90, 5), ref(80, 4)))


def test_a_command_journalled_before_heads_were_compared_asks_for_nothing(world: World) -> None:
    published(world.store, 10, 1)
    journalled = OpenHead.model_validate({"command": "open_head", "key": "j/head/2", "generation": 2})
    assert world.do(journalled) == HeadOpened(now=world.now, generation=2, checkpoints=(ref(10),))


@pytest.mark.parametrize("step", ["opening", "looking"])
def test_a_head_that_cannot_be_read_asks_a_person(
    world: World, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(world.store, 10, 3)

    def torn(*_: object) -> Any:
        raise Corrupt("j/head.json: torn")

    opened = 0
    if step == "looking":
        monkeypatch.setattr(store_commands, "read_head", torn)
    else:
        opened = None
        world.store.put(head_key(JOB), b"{torn")
    stuck = world.do(OpenHead(key="o", generation=2, opened=opened))
    assert isinstance(stuck, CommandStuck)
    assert (stuck.command, stuck.generation) == ("open_head", 2)
    assert "head.json" in stuck.error


@pytest.mark.parametrize("num_faults", [20, 1000])
def test_a_disk_that_is_full_is_waited_for_and_then_asks_a_person(
    world: World, num_faults: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(world.store, 10, 1)
    full = [OSError(errno.ENOSPC, "No space left on device", "/scratch")] * num_faults
    real = store_commands.export

    def export(*values: Any, **options: Any) -> Any:
        if full:
            raise full.pop()
        return real(*values, **options)

    monkeypatch.setattr(store_commands, "export", export)
    began = world.now
    answer = world.do(ExportWeights(key="e", checkpoint=ref(10)))
    assert "No space left on device: '/scratch'" in world.trouble[0]
    if num_faults == 20:
        assert isinstance(answer, WeightsExported)
        return
    assert isinstance(answer, CommandStuck)
    assert "No space left on device: '/scratch'" in answer.error
    assert 600.0 <= world.now - began < 620.0


def test_opening_again_after_a_crash_is_no_difference(world: World) -> None:
    published(world.store, 10, 1)
    command = OpenHead(key="o", generation=2, opened=1, checkpoints=(ref(10),))
    first = world.do(command)
    assert world.do(command) == first


@pytest.mark.parametrize("restart", [False, True])
def test_a_generation_that_another_manager_has_opened_is_not_taken_for_ones_own(
    world: World, restart: bool
) -> None:
    published(world.store, 10, 1)
    mine = OpenHead(
        key="o", generation=2, opener=7, opened=1, tried=1, checkpoints=(ref(10),), restart=restart
    )
    other = mine.model_copy(update={"opener": 8})
    first = world.do(mine)
    assert isinstance(first, HeadOpened)
    answer = world.do(other)
    assert isinstance(answer, HeadDiffers)
    assert (answer.difference, answer.head_generation) == ("ahead", 2)
    assert world.do(mine) == first


def test_starting_over_takes_what_was_listed_out_of_the_head(world: World) -> None:
    old = published(world.store, 10, 1)
    answer = world.do(OpenHead(key="o", generation=2, opened=1, restart=True))
    assert answer == HeadOpened(now=world.now, generation=2, checkpoints=())
    head = read_head(world.store, JOB)
    assert head is not None
    assert [retired.checkpoint for retired in head.retired] == [old.checkpoint]
    assert world.store.exists(old.parts[0].key), "for a lease"


def test_the_newest_readable_checkpoint_is_exported_and_the_answer_says_why(world: World) -> None:
    published(world.store, 10, 1)
    newest = published(world.store, 20, 1)
    world.store.put(newest.parts[0].key, b"torn")
    command = ExportWeights(key="e", checkpoint=ref(20), older=(ref(10),))
    answer = world.do(command)
    assert isinstance(answer, WeightsExported)
    assert answer.step == 10
    assert "checkpoint 20-g1 cannot be read" in answer.note
    assert newest.parts[0].key in answer.note
    stuck = world.do(command.model_copy(update={"older": ()}))
    assert isinstance(stuck, CommandStuck)
    assert "checkpoint 20-g1 cannot be read" in stuck.error


def test_a_sweep_retires_what_nobody_reported_and_tells_what_is_listed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "makara.manager")
    steps = (20, 30, 40, 50, 60, 120, 130)
    manifests = {step: published(world.store, step, 1) for step in steps}
    orphan = written(world.store, 25, 1)
    world.facts += [
        *opened(1),
        *(CheckpointPublished(at=0, checkpoint=ref(step)) for step in (20, 60, 120)),
        *(CheckpointRetired(at=0, checkpoint=ref(step)) for step in (20, 60)),
    ]
    world.now = time.time() + LEASE_S
    command = SweepStore(key="s", not_before=0.0, lease_s=LEASE_S)
    answer = world.do(command)
    listed = (ref(130), ref(120))
    assert answer == HeadSeen(now=world.now, generation=1, checkpoints=listed, leaving=5)
    assert not world.store.exists(orphan.parts[0].key)
    assert "a sweep removed checkpoints that were never published: 25-g1" in caplog.text
    assert world.store.exists(manifests[30].parts[0].key), "for a lease after it left the head"
    world.now += LEASE_S
    world.do(command)
    assert {key.split("/")[2] for key, _ in world.store.list(f"{JOB}/sections/")} == {"120-g1", "130-g1"}


def test_nothing_is_swept_under_a_head_that_another_manager_opened(world: World) -> None:
    published(world.store, 10, 1)
    orphan = written(world.store, 20, 1)
    open_generation(world.store, JOB, 2)
    world.now += 7200.0
    assert world.do(SweepStore(key="s", not_before=0.0, lease_s=LEASE_S)) is None
    assert world.store.exists(orphan.parts[0].key)


def test_sweeps_after_the_end_leave_only_what_the_job_keeps(world: World) -> None:
    """One deletion failed while the job was stopping, and what its last generation began from is not kept."""
    base, failed, *_ = (published(world.store, step, 1) for step in (10, 20, 30, 40))
    open_generation(world.store, JOB, 2)  # begins from 40-g1
    for step in (50, 60):
        published(world.store, step, 2)
    everything = [ref(10), ref(20), ref(30), ref(40), ref(50, 2), ref(60, 2)]
    retire(world.store, JOB, base.checkpoint, now=world.now)
    world.facts += [
        *opened(2),
        *(CheckpointPublished(at=0, checkpoint=checkpoint) for checkpoint in everything),
        *(CheckpointRetired(at=0, checkpoint=checkpoint) for checkpoint in everything[:-2]),
        JobEnded(at=0, status="stopped"),
    ]
    world.now = time.time() + LEASE_S
    command = SweepStore(key="s", not_before=0.0, lease_s=LEASE_S)
    kept = (ref(60, 2), ref(50, 2))
    assert world.do(command) == HeadSeen(now=world.now, generation=2, checkpoints=kept, leaving=3)
    assert world.store.exists(failed.parts[0].key), "for a lease after it left the head"
    world.now += LEASE_S
    assert world.do(command) == HeadSeen(now=world.now, generation=2, checkpoints=kept)
    assert {key.split("/")[2] for key, _ in world.store.list(f"{JOB}/sections/")} == {"50-g2", "60-g2"}


def copied(world: World, tmp_path: Path, *steps: int) -> Event | None:
    """What comes of copying the newest checkpoint of another job that can be read: the last is torn."""
    there = open_store((tmp_path / "there").as_uri())
    torn = [published(there, step, 1) for step in steps][-1]
    there.put(torn.parts[-1].key, b"torn")
    source = StartSource(uri=there.uri, job=JOB, recipe=RECIPE)
    world.facts[0] = world.facts[0].model_copy(update={"start": source})
    answer = world.do(CopyCheckpoint(key="c", source=source))
    assert list(world.store.list(f"{JOB}/sections/10-g0/"))
    return answer


def test_a_sweep_after_the_end_removes_what_a_failed_copy_left(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "makara.manager")
    assert isinstance(copied(world, tmp_path, 10), CommandStuck)
    foreign = written(world.store, 20, 1)
    world.facts.append(JobEnded(at=0, status="failed"))
    world.do(SweepStore(key="s", not_before=0.0, lease_s=LEASE_S))
    assert not list(world.store.list(f"{JOB}/sections/10-g0/"))
    assert "a sweep removed parts of copies that failed: 10-g0" in caplog.text
    assert all(world.store.exists(part.key) for part in foreign.parts), (
        "without a head, nobody knows whose it is"
    )


def test_no_sweep_removes_parts_that_are_being_copied(world: World, tmp_path: Path) -> None:
    copied(world, tmp_path, 10)
    world.facts.append(JobEnded(at=0, status="stopped"))

    async def sweep_beside() -> None:
        async with world.commands.copies[JOB]:
            command = SweepStore(key="s", not_before=0.0, lease_s=LEASE_S)
            sweeping = asyncio.create_task(world.commands.carry_out(JOB, command))
            for _ in range(20):  # it goes as far as it can
                await asyncio.sleep(0)
            assert list(world.store.list(f"{JOB}/sections/10-g0/"))
        await sweeping

    asyncio.run(sweep_beside())
    assert not list(world.store.list(f"{JOB}/sections/10-g0/"))


def test_a_copy_that_was_made_after_all_is_kept_and_the_parts_of_others_go(
    world: World, tmp_path: Path
) -> None:
    answer = copied(world, tmp_path, 5, 10)
    torn = f"{JOB}/sections/10-g1/2.1.safetensors in {(tmp_path / 'there').as_uri()}"
    assert isinstance(answer, CheckpointCopied)
    assert (answer.checkpoint, answer.source) == (ref(5, 0), ref(5))
    assert answer.skipped.startswith(f"checkpoint of step 10: {torn}: 4 bytes, ")
    world.facts.append(JobEnded(at=0, status="stopped"))
    world.now = time.time() + LEASE_S
    world.do(SweepStore(key="s", not_before=0.0, lease_s=LEASE_S))
    assert {key.split("/")[2] for key, _ in world.store.list(f"{JOB}/sections/")} == {"5-g0"}


def test_a_sweep_of_a_store_that_refuses_gives_up_until_the_next(world: World) -> None:
    world.refusals = [StoreRefused("AccessDenied: no listing")] * 3
    published(world.store, 10, 1)
    assert world.do(SweepStore(key="s", not_before=world.now + 5.0, lease_s=LEASE_S)) is None
    assert world.trouble == ["AccessDenied: no listing"] * 3
