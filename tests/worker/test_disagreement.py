"""Members that are about to do different things notice it before anything is sent."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from makara.model.partition.partition import choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import load_entrypoint
from makara.morphing.in_flight import Parcel, StepId
from makara.morphing.recovery import Agreement
from makara.pipeline import Range, grid
from makara.pipeline.contributions import Pairs
from makara.worker.execution.buckets import buckets
from makara.worker.execution.partial_sums import PartialSums
from makara.worker.execution.state import ModelState, Reduced
from makara.worker.progress import ProgressCounters
from makara.worker.recovery.joining import CheckpointLocation, MembersDisagree, join_generation
from makara.worker.recovery.kept_step import Shown, keep_step, show
from makara.worker.recovery.room import lacking_bytes
from makara.worker.sections.ranges import RangeRuntime
from makara.worker.sections.runtime import Piece
from trainer_processes import BUNDLE

NUM_MICRO_BATCHES = 4


class Sent(Exception):
    """A member begins to send to another."""


class Session:
    """A session of two members with the same state, which go on as two stages; only this one has sums.
    `others` is what the other one says that it will do, in place of the same."""

    rendezvous_s = 0.0

    def __init__(self, num_sections: int, others: dict[int, str] | None = None) -> None:
        self.rank, self.number, self.members = 0, 2, ["one", "other"]
        half = num_sections // 2
        self.plan = grid([Range(0, half), Range(half, num_sections)], 1, NUM_MICRO_BATCHES, generation=2)
        self.wanted = range(half)
        self.checkpoints: list[Any] = []
        self.courier, self.progress = self, ProgressCounters()
        self._others = others or {}

    def introduce(self, choice: list[str]) -> list[Any]:
        return [choice, [self._others.get(place, chosen) for place, chosen in enumerate(choice)]]

    def link(self, _neighbours: Any) -> None: ...

    def open_groups(self, _buckets: Any) -> None: ...

    def group(self, _name: str, _ranks: Any) -> None:
        raise Sent

    def gather(self, name: str, value: Any) -> list[Any]:
        if name != "standing":
            return [value, value]
        nothing = {
            "rows": [],
            "parcels": [],
            "losses": {},
            "dropped": 0,
            "room": None,
        }  # so that the one's sums count
        return [value, {**value, "in_flight": nothing}]


def cut_off() -> ModelState:
    """The state of a worker that hosts all sections, and has added micro-batch 0 to its sums of step 3."""
    training = load_entrypoint(BUNDLE, "models:tied_gpt")
    traced = trace(training, 2, 7)
    chain = split(traced, choose_cuts(traced, None))
    sums = PartialSums(chain, NUM_MICRO_BATCHES, "exact")
    state = ModelState(RangeRuntime(chain, training, 7), None, sums)
    for index in range(chain.num_sections):
        state.runtime.host(index)
    state.applied, state.branch, state.agreed_in = 3, 1, 1
    alone = grid([Range(0, chain.num_sections)], 1, NUM_MICRO_BATCHES, generation=1)
    own = buckets(chain, alone)
    state.in_flight.begin(StepId(3, 1, 0), own, 0, NUM_MICRO_BATCHES, state.scales(), state.loss_scale)
    for section in range(chain.num_sections):
        for bucket in own:
            if section in bucket.sections:
                state.in_flight.parcels.adds(bucket.sections, 0, section)
        state.in_flight.parcels.added(0, section)
    return state


def join(state: ModelState, session: Any) -> Any:
    own = buckets(state.runtime.chain, session.plan)
    source: Any = CheckpointLocation
    return join_generation(session, state, source, own)


def test_members_that_choose_alike_send_sums_whose_holder_hosts_no_more() -> None:
    state = cut_off()
    with pytest.raises(Sent):
        join(state, Session(state.runtime.chain.num_sections))


def test_where_members_keep_different_sums_nothing_is_sent_and_the_step_begins_whole() -> None:
    """Found: it was noticed after the sums were sent, where one of the two may wait for ever."""
    state = cut_off()
    state.reduced = reduced()
    formed = join(state, Session(state.runtime.chain.num_sections, {1: "other sums"}))
    assert (formed.step, formed.in_flight) == (3, None)
    assert state.in_flight.rest is None
    assert state.in_flight.show() == ([], {})
    assert state.reduced is None  # all agreed that nobody has the record


def test_gradients_that_were_reduced_before_a_section_came_are_not_applied_to_it() -> None:
    """Found: where a member came back with the record after that, the others died."""
    state = cut_off()
    state.reduced = reduced()
    assert state.standing().reduced_step == 4
    state.unpack_section(1, state.pack_section(1))
    assert state.standing().reduced_step is None


def reduced() -> Reduced:
    return Reduced(3, 1, 0, gradients={}, statistics={}, scales={}, loss=0.0, began=0.0)


def test_members_that_continue_from_different_states_say_so_and_send_nothing() -> None:
    state = cut_off()
    with pytest.raises(MembersDisagree, match=r"rank 0 and ranks \[1\] do not agree on the state"):
        join(state, Session(state.runtime.chain.num_sections, {0: "another state"}))


@pytest.mark.parametrize(("attempt", "is_kept"), [(0, True), (1, False)])
def test_nothing_is_kept_of_an_attempt_whose_scales_newcomers_do_not_know(
    attempt: int, is_kept: bool
) -> None:
    state = cut_off()
    session: Any = Session(state.runtime.chain.num_sections)
    shown = [
        Shown([one.__class__(3, 1, attempt, one.scales, one.pairs) for one in state.in_flight.show()[0]], {}),
        Shown((), {}),
    ]
    agreement = Agreement("peers", 3, None, (), (0, 1), (), {}, branch=1)
    own = buckets(state.runtime.chain, session.plan)
    kept = keep_step(session, state, agreement, shown, own)
    assert (kept is not None) is is_kept
    if kept is not None:
        assert Pairs.all((0,), NUM_MICRO_BATCHES) != kept.step.missing[(0,)]


def test_a_member_without_memory_for_what_it_lacks_shows_less_and_says_so() -> None:
    state = cut_off()
    chain = state.runtime.chain
    alone = grid([Range(0, chain.num_sections)], 1, NUM_MICRO_BATCHES, generation=2)
    session: Any = SimpleNamespace(rank=0, wanted=range(chain.num_sections))
    everything = show(session, state, buckets(chain, alone), lambda: 0.0)
    assert everything["dropped"] == 0  # it lacks nothing
    assert everything["room"] < 0
    state_bytes = sum(tensor.nbytes for tensor in state.runtime.sections[1].state()[0].values())
    state.runtime.drop(1)
    assert lacking_bytes(state, session.wanted, buckets(chain, alone)) == pytest.approx(state_bytes, rel=0.1)
    state.runtime.place_optimizers(on_host=True)
    weights = sum(chain.traced.tensors[name].nbytes for name in chain.sections[1].parameters)
    assert lacking_bytes(state, session.wanted, buckets(chain, alone)) == weights
    state.runtime.place_optimizers(on_host=False)
    found = show(session, state, buckets(chain, alone), lambda: 0.0)
    assert found["dropped"] == len(everything["parcels"]) - len(found["parcels"]) > 0
    ample = show(session, state, buckets(chain, alone), lambda: 1e12)
    assert ample["dropped"] == 0
    assert 0 < ample["room"] < 1e12
    assert show(session, state, buckets(chain, alone), lambda: math.inf)["room"] is None


def test_a_member_that_forgets_its_state_is_still_short_of_memory() -> None:
    """Found: it was sent sums all the same."""
    shown = Shown([Parcel(3, 1, 0, "s", Pairs.all((0,), 2))], {0: Piece(1, 0)}, dropped=2, room=5)
    assert shown.forgotten() == Shown((), {}, dropped=0, room=5)
