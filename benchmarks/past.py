"""What a job's past takes of a manager's memory: VMs that have ended, and generations that are over.

Counted are the bytes that Python allocates for the state that facts are folded into, each read from its JSON.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterable, Iterator

from makara.manager.core import apply
from makara.manager.core.facts import (
    AttemptMade,
    EndReason,
    Fact,
    GenerationFormed,
    GenerationOpened,
    GenerationPlanned,
    GenerationPrepared,
    Submitted,
    VmCreated,
    VmEnded,
    VmJoined,
    VmRequested,
)
from makara.manager.core.state import JobState
from makara.manager.spec.placement import Attempt, Market, Placement, Price
from makara.pipeline import Range, grid
from makara.protocol.messages import CheckpointRef, Formed
from pydantic import TypeAdapter

from .manager import SPEC
from .manager_agents import DEVICE
from .report import Row

TITLE = "what a job's past takes of a manager's memory"
_COUNT = 500
_MEMBERS = 50
_FACTS: TypeAdapter[Fact] = TypeAdapter(Fact)
_PLACE = Placement(
    provider="aws", market=Market.SPOT, region="us-east-1", zone="us-east-1a", instance_type="g4dn.xlarge"
)


def rows() -> list[Row]:
    kinds = {
        "a VM that was rented, joined and was taken back": _vm,
        f"a generation of {_MEMBERS} workers that formed and was superseded": _generation,
    }
    found = {what: _bytes_of_each(facts_of) for what, facts_of in kinds.items()}
    return [
        {"what": what, "bytes": each, "10,000 of them, MiB": 1e4 * each / 2**20}
        for what, each in found.items()
    ]


def _bytes_of_each(facts_of: Callable[[int], Iterator[Fact]]) -> float:
    """What one more of them adds to what is kept."""
    tracemalloc.start()
    first = _kept([Submitted(at=1.0, job="job", spec=SPEC, bundle_sha256="none"), *facts_of(0)], JobState())
    before = tracemalloc.get_traced_memory()[0]
    state = _kept((fact for number in range(1, _COUNT + 1) for fact in facts_of(number)), first)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert state.vms.num_ended + len(state.history) >= _COUNT, "they are over"
    return (after - before) / _COUNT


def _kept(facts: Iterable[Fact], state: JobState) -> JobState:
    """The state after these facts, each read from its JSON: none shares anything with another."""
    for fact in facts:
        state = apply(state, _FACTS.validate_json(_FACTS.dump_json(fact)))
    return state


def _vm(number: int) -> Iterator[Fact]:
    vm, at = f"job-4gd8s1-vm{number}", 1e9 + number
    attempt, price = (
        Attempt(vm=vm, number=1, placement=_PLACE),
        Price(hourly=0.2, ceiling=0.5, at=at, source="EC2"),
    )
    yield VmRequested(at=at, vm=vm)
    yield AttemptMade(at=at, vm=vm, attempt=attempt, price=price, manager_url="https://192.0.2.1:8700")
    yield VmCreated(at=at, vm=vm, number=1, id=f"i-{number:017x}")
    yield VmJoined(at=at, vm=vm, address="10.0.0.1", devices=(DEVICE.model_dump(),))
    yield VmEnded(at=at + 3600.0, vm=vm, reason=EndReason.PREEMPTED, gone=True)


def _generation(number: int) -> Iterator[Fact]:
    at = 1e9 + number
    plan = grid([Range(0, 1)], _MEMBERS, _MEMBERS).to_json()
    members = tuple((f"job-4gd8s1-vm{number + n}.0", 1) for n in range(_MEMBERS))
    yield GenerationPlanned(
        at=at,
        number=number + 1,
        cause=f"job-4gd8s1-vm{number}.0 is gone",
        plan=plan,
        members=members,
        predicted_s=1.0,
        detected_at=at,
        decided_s=0.1,
    )
    yield GenerationPrepared(at=at, number=number + 1, endpoint="10.0.0.1:1234")
    checkpoints = (CheckpointRef(step=number, generation=number),)
    yield GenerationOpened(at=at, number=number + 1, endpoint="10.0.0.1:1234", checkpoints=checkpoints)
    phases_s = {"groups": 0.1 + number, "exchange": 0.2 + number, "load": 0.3 + number, "first": 0.4 + number}
    formed = Formed(generation=number + 1, step=number, rung="peers", phases_s=phases_s)
    yield GenerationFormed(at=at, number=number + 1, formed=formed, lost_steps=0)
