"""Values of enumerations that only a newer version knows, in every message that crosses between two sides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import pytest
from calibrations import uniform
from core_script import RECIPE, Script, plan_json
from makara.manager.core.commands import RequestVm
from makara.manager.core.facts import EndReason, GenerationPlanned, GenerationStalled, RecipeFixed, VmEnded
from makara.manager.core.state import Status
from makara.manager.core.strikes.table import Kind
from makara.protocol.frames import UnknownOrder, read_from_trainer, read_report, read_to_agent
from makara.protocol.messages import (
    At,
    DeviceInfo,
    Failure,
    Formed,
    GenerationOrder,
    JobSettings,
    Member,
    Message,
    Orders,
    Phase,
    Profile,
    Profiling,
    Progress,
    Report,
    StoreConfig,
    WorkerReport,
)
from pydantic import BaseModel, ValidationError

FUTURE = "from the future"
Place = tuple[str, ...]


def full_report() -> Report:
    """With something in each field that holds messages with enumerations."""
    worker = WorkerReport(
        worker="v.0",
        incarnation=1,
        phase=Phase.RUNNING,
        formed=Formed(generation=1, step=0, rung="start", phases_s={}),
        failure=Failure(kind="user", message="oh"),
        profile=Profile(recipe=RECIPE, calibration={}),
        profiling=Profiling(),
    )
    return Report(
        vm="v",
        sequence=1,
        orders_version=1,
        address="10.0.0.1",
        devices=[DeviceInfo(kind="cpu", name="cpu0", memory_bytes=1)],
        workers=[worker],
        progress=[Progress(count=1, at=At.DATA)],
    )


def full_orders() -> Orders:
    job = JobSettings(
        job="j",
        entrypoint="a:b",
        seed=0,
        steps=1,
        global_batch_size=8,
        numerics="exact",
        store=StoreConfig(uri="file:///c"),
        bundle_sha256="b0",
    )
    order = GenerationOrder.of(
        [Member(worker="v.0", address="10.0.0.1")], plan_json(1, 1), number=1, phase="go"
    )
    return Orders(version=1, action="train", job=job, recipe=RECIPE, generation=order)


def is_choice(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return True
    if get_origin(annotation) is Literal:
        return len(get_args(annotation)) > 1  # of one value: it tells kinds of frames apart
    return any(is_choice(inner) for inner in get_args(annotation) if not is_message(inner))


def is_message(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def messages_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if is_message(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from messages_in(inner)


def declared(message: type[BaseModel]) -> set[tuple[str, str]]:
    """(message, field) of all enumerations in it and in what it holds."""
    found: set[tuple[str, str]] = set()
    for name, info in message.model_fields.items():
        if is_choice(info.annotation):
            found.add((message.__name__, name))
        for inner in messages_in(info.annotation):
            found |= declared(inner)
    return found


def choices(message: BaseModel, path: Place = ()) -> Iterator[tuple[Place, tuple[str, str], Any]]:
    """Path, (message, field) and value of each enumeration in the message."""
    for name, info in type(message).model_fields.items():
        value = getattr(message, name)
        if is_choice(info.annotation):
            yield (*path, name), (type(message).__name__, name), value
        items = list(enumerate(value)) if isinstance(value, list) else [("", value)]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        for index, item in items:  # pyright: ignore[reportUnknownVariableType]
            if isinstance(item, BaseModel):
                yield from choices(item, (*path, name) if index == "" else (*path, name, str(index)))


def with_future(message: Message, path: Place) -> str:
    """The message as JSON, with a value from the future there."""
    value = message.model_dump(mode="json")
    at: Any = value
    for part in path[:-1]:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[path[-1]] = FUTURE
    return json.dumps(value)


def places(message: Message) -> list[Place]:
    return [path for path, _, _ in choices(message)]


def test_the_messages_below_have_every_enumeration_that_crosses_the_wire() -> None:
    assert {field for _, field, _ in choices(full_report())} == declared(Report)
    assert {field for _, field, _ in choices(full_orders())} == declared(Orders)


@pytest.mark.parametrize("place", places(full_report()), ids="/".join)
def test_an_unknown_value_in_a_report_is_read_as_other(place: Place) -> None:
    """Found: the whole report was malformed, and the connection closed for ever."""
    read = {path: value for path, _, value in choices(read_report(with_future(full_report(), place)))}
    known = {path: value for path, _, value in choices(full_report())}
    assert read[place] in ("other", Phase.OTHER, At.OTHER)
    assert {**read, place: None} == {**known, place: None}


@pytest.mark.parametrize("place", places(full_orders()), ids="/".join)
def test_orders_with_an_unknown_value_are_not_done_by_half(place: Place) -> None:
    with pytest.raises(UnknownOrder, match=place[-1]):
        read_to_agent(with_future(full_orders(), place))


def test_what_a_newer_trainer_tells_its_agent_is_read_by_the_same_rule() -> None:
    told = {"worker": "v.0", "phase": FUTURE, "colour": "red"}
    assert read_from_trainer(WorkerReport, told) == WorkerReport(worker="v.0", phase=Phase.OTHER)


@pytest.mark.parametrize("value", [7, None, [FUTURE]])
def test_what_is_no_value_at_all_is_refused_still(value: object) -> None:
    with pytest.raises(ValidationError):
        read_from_trainer(WorkerReport, {"worker": "v.0", "phase": value})


def test_a_message_that_is_made_here_has_known_values() -> None:
    with pytest.raises(ValidationError):
        Failure.model_validate({"kind": "usre", "message": "a mistake of ours"})


# ---- what follows from them: nothing that ends anything ---------------------------------------------------


def test_a_member_in_an_unknown_phase_is_no_reason_to_close_a_generation() -> None:
    script = Script()
    _, b = script.run(2)
    for count in range(200):
        script.extra[b[:-2]] = {"progress": [Progress(count=count, at=At.OTHER)]}
        script.report(script.change(b, phase=Phase.OTHER))
        script.wait(5.0)
    assert script.state.running
    assert (script.count(VmEnded), script.count(GenerationStalled)) == (0, 0)


def test_who_is_at_something_unknown_has_the_longest_bound_and_is_not_suspected() -> None:
    script = Script()
    a, b = script.run(2)
    for worker, where in ((a, At.SUMS), (b, At.OTHER)):
        script.extra[worker[:-2]] = {"progress": [Progress(count=1, at=where)]}
        script.report(script.change(worker, step=5))
    for _ in range(370):
        script.wait(5.0)
        script.report()
    stalled = script.last(GenerationStalled)
    assert (stalled.bound_s, stalled.suspects) == (script.timing.store_wait_s, ())


def test_a_failure_of_an_unknown_kind_counts_as_a_death() -> None:
    script = Script()
    _, b = script.run(2)
    for incarnation in range(1, 4):
        assert not script.count(VmEnded)
        dead = Failure(kind="other", message="struck by lightning")
        script.now += 20.0
        script.report(WorkerReport(worker=b, incarnation=incarnation, phase=Phase.EXITED, failure=dead))
    assert script.last(VmEnded).reason is EndReason.WORKERS_DIED
    assert script.state.status is not Status.FAILED


def test_nothing_is_made_of_a_device_of_an_unknown_kind() -> None:
    """A recipe for it would be one that nobody can meet, and it is fixed for ever."""
    script = Script()
    script.submit()
    script.wait()
    a, b = (f"{vm}.0" for vm in script.state.vms)
    script.report(*(WorkerReport(worker=w, incarnation=1, phase=Phase.IDLE) for w in (a, b)))
    strange = Profile(
        recipe=RECIPE.model_copy(update={"device_kind": "other"}), calibration=uniform(2).to_json()
    )
    script.report(script.change(a, profile=strange))
    assert script.last(GenerationPlanned).members == ((b, 1),)
    assert script.last(VmEnded).vm == a[:-2]
    script.report(script.change(b, profile=Profile(recipe=RECIPE, calibration=uniform(2).to_json())))
    assert script.last(RecipeFixed).recipe == RECIPE
    script.report(script.change(b, graph_hash="5ec7"))  # one that is fit: another may be asked for
    script.wait(script.timing.strikes[Kind.UNFIT_VM].first_s)
    assert script.count(RequestVm) == 3
