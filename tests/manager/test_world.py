"""The simulated world that replays and the core's histories share."""

from __future__ import annotations

import pytest
from core_script import spec
from makara.manager.core import Timing
from makara.manager.core.commands import Command, RequestVm
from makara.manager.core.events import JobSubmitted, Tick
from makara.manager.world import Beginning, Clock, Store, Trainer, World, begin
from makara.pipeline import Range
from makara.protocol.messages import CheckpointRef, Formed, Phase

K = 4


def ref(step: int, generation: int) -> CheckpointRef:
    return CheckpointRef(step=step, generation=generation)


# ---- time --------------------------------------------------------------------------------------------------


def test_time_jumps_from_one_instant_to_the_next_and_keeps_the_order_of_asking_within_one() -> None:
    clock, said = Clock(epoch_s=100.0), list[tuple[float, str]]()

    def say(what: str) -> None:
        said.append((clock.now, what))

    clock.after(2.0, say, "late")
    clock.after(0.5, say, "first")
    clock.at(500_000_000, say, "second")
    clock.after(0.5, clock.after, 0.0, say, "asked for at that instant")
    while clock.next_ns is not None:
        clock.advance()
    assert said == [
        (100.5, "first"),
        (100.5, "second"),
        (100.5, "asked for at that instant"),
        (102.0, "late"),
    ]


# ---- the core ----------------------------------------------------------------------------------------------


class Recorder(World[None]):
    """A world in which commands come to nothing."""

    def __init__(self) -> None:
        super().__init__(Timing(), epoch_s=100.0)
        self.told: list[str] = []

    def perform(self, command: Command) -> None:
        self.told.append(command.command)

    def give_orders(self) -> None:
        self.told.append(f"orders of {self.state.num_facts} facts")


def test_a_decision_is_kept_before_its_commands_run_and_orders_follow_only_what_changed() -> None:
    world = Recorder()
    world.handle(JobSubmitted(now=world.now, job="j", spec=spec(), bundle_sha256="b0"))
    world.handle(Tick(now=world.now, new_vms=("v0", "v1")))
    requests = [told for told in world.told if told == RequestVm.model_fields["command"].default]
    assert len(requests) == len(world.state.vms) == 2
    assert world.told[-1] == f"orders of {world.state.num_facts} facts"
    told = len(world.told)
    world.handle(Tick(now=world.now, new_vms=("v2",)))
    assert len(world.told) == told
    assert world.num_decisions == 3


# ---- the store ---------------------------------------------------------------------------------------------


def test_only_the_open_generation_publishes() -> None:
    store = Store[str]()
    assert store.open(1)
    assert store.publish(ref(5, 1), "five")
    assert store.open(2)
    assert not store.publish(ref(9, 1), "too late")
    assert not store.open(1)
    assert store.publish(ref(6, 2), "six")
    assert store.listed == [ref(6, 2), ref(5, 1)]
    assert store.base == ref(5, 1)
    assert store.parts == {ref(5, 1): "five", ref(6, 2): "six"}


def test_the_base_and_the_only_checkpoint_are_never_retired() -> None:
    store = Store[None]()
    store.open(1)
    store.publish(ref(5, 1), None)
    with pytest.raises(AssertionError, match="only checkpoint"):
        store.retire(ref(5, 1), 0.0)
    store.open(2)
    store.publish(ref(6, 2), None)
    with pytest.raises(AssertionError, match="the base"):
        store.retire(ref(5, 1), 0.0)


def test_parts_stay_for_a_lease_after_their_checkpoint_was_retired() -> None:
    store = Store[None]()
    store.open(1)
    for step in (1, 2, 3):
        store.publish(ref(step, 1), None)
    store.retire(ref(1, 1), 10.0)
    with pytest.raises(AssertionError, match="within a lease"):
        store.delete(ref(1, 1), 14.0, lease_s=5.0)
    store.sweep({ref(3, 1)}, (1, 2), 15.0, lease_s=5.0)
    assert store.listed == [ref(3, 1)]
    assert list(store.parts) == [ref(2, 1), ref(3, 1)]
    assert store.retired == {ref(2, 1): 15.0}


# ---- where a generation begins -----------------------------------------------------------------------------


def running(worker: str, span: Range, step: int, generation: int = 1) -> Trainer:
    trainer = Trainer(worker)
    trainer.take_part(span, 0, Formed(generation=generation, step=0, rung="start", phases_s={}))
    for _ in range(step):
        trainer.commit(generation)
    return trainer


def test_members_go_on_from_what_they_hold_together() -> None:
    members = [running("a.0", Range(0, 2), 7), running("b.0", Range(2, 4), 7), Trainer("c.0")]
    assert begin(members, [ref(5, 1)], K) == Beginning("peers", 7, 1, frozenset({"a.0", "b.0"}))


def test_after_a_torn_commit_those_who_did_not_see_it_take_the_step_too() -> None:
    saw, behind = running("a.0", Range(0, 2), 8), running("b.0", Range(2, 4), 7)
    behind.reduced_in = 1
    assert begin([saw, behind], [], K) == Beginning("peers", 8, 1, frozenset({"a.0", "b.0"}))
    assert behind.step == 8


def test_without_every_section_members_begin_with_the_newest_checkpoint_or_anew() -> None:
    members = [running("a.0", Range(0, 2), 7), running("b.0", Range(2, 4), 7)]
    members[1].leave()
    assert members[1].report().phase is Phase.LEFT
    assert begin(members, [ref(5, 1), ref(4, 1)], K) == Beginning("store", 5, 1, frozenset())
    assert begin(members, [], K) == Beginning("start", 0, 0, frozenset())
