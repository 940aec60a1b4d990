"""Each contribution to a step is added exactly once, whoever dies when; and no rule can be left out.

A failing seed reproduces exactly: `MAKARA_SEED=<seed> pytest tests/worker/test_parcels.py`.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from contribution_history import Added, History, Wrong
from makara.morphing import in_flight
from makara.morphing.in_flight import KeptParcel, Parcel, StepId, StepInFlight, continue_step
from makara.pipeline.contributions import Pairs, whole_tally
from makara.worker.execution.parcels import Bucket, Parcels

Patch = Callable[[pytest.MonkeyPatch], None]


def _seeds(number: int) -> range:
    given = os.environ.get("MAKARA_SEED")
    if given is not None:
        return range(int(given), int(given) + 1)
    first = random.SystemRandom().randrange(10**9)
    print(f"seeds from {first}")
    return range(first, first + number)


@pytest.mark.parametrize("number", [1_500, pytest.param(30_000, marks=pytest.mark.soak)])
def test_every_history_adds_each_contribution_once(number: int) -> None:
    kept = 0
    for seed in _seeds(number):
        history = History(seed)
        try:
            history.play()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        assert not history.caught, f"seed {seed}: the tallies refused a step"
        kept += history.kept
    assert kept > 0


def _steps_are_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(in_flight, "_is_of", lambda parcel, step, branch: parcel.branch == branch)  # type: ignore


def _branches_are_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(in_flight, "_is_of", lambda parcel, step, branch: parcel.step == step)  # type: ignore


def _scales_may_differ(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(in_flight, "_compatible", lambda parcels, buckets: True)  # type: ignore


def _sets_may_overlap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(in_flight, "_is_open", lambda pairs, missing: True)  # type: ignore


def _a_sum_half_added_to_is_shown(patch: pytest.MonkeyPatch) -> None:
    whole = Parcels.adds

    def adds(self: Parcels[Added], bucket: Bucket, micro_batch: int, section: int) -> Added | None:
        total = whole(self, bucket, micro_batch, section)
        if total is not None:
            self._held[bucket][0].is_torn = False  # type: ignore
        return total

    patch.setattr(Parcels, "adds", adds)


def _what_does_not_count_is_added_to(patch: pytest.MonkeyPatch) -> None:
    whole = Parcels.settle

    def settle(self: Parcels[Added], rank: int, of: Any, step: StepInFlight, scales: Any, empty: Any) -> None:
        shown = [one for one in self._shown if one.pairs.sections in scales]  # type: ignore
        whole(self, rank, of, step, scales, empty)
        for one in shown:
            own = self._held[one.pairs.sections][0]  # type: ignore
            if not set(one.pairs) & set(own.pairs):
                own.total.merge(one.total)

    patch.setattr(Parcels, "settle", settle)


def _held_contributions_are_added_again(patch: pytest.MonkeyPatch) -> None:
    whole = Parcels.settle

    def settle(self: Parcels[Added], rank: int, of: Any, step: StepInFlight, *rest: Any) -> None:
        again = {bucket: Pairs.all(bucket, 8) for bucket in step.missing}
        whole(self, rank, of, StepInFlight(step.attempt, step.kept, again), *rest)

    patch.setattr(Parcels, "settle", settle)


def _a_transfer_in_part_counts(patch: pytest.MonkeyPatch) -> None:
    whole = Parcels.receive

    def receive(self: Parcels[Added], kept: KeptParcel, total: Added, shown: Parcel) -> None:
        half = Counter(dict(sorted(total.counts.items())[::2]))
        whole(self, kept, Added(half), shown)

    patch.setattr(Parcels, "receive", receive)


def _sums_are_reduced_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(History, "reduces_in_place", True)


@pytest.mark.parametrize(
    ("leave_out", "first"),
    [
        (_steps_are_not_told_apart, 0),
        (_branches_are_not_told_apart, 11_600),
        (_scales_may_differ, 0),
        (_sets_may_overlap, 0),
        (_a_sum_half_added_to_is_shown, 0),
        (_what_does_not_count_is_added_to, 0),
        (_held_contributions_are_added_again, 0),
        (_a_transfer_in_part_counts, 0),
        (_sums_are_reduced_in_place, 0),
    ],
)
def test_no_rule_can_be_left_out(leave_out: Patch, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`first`: the seed to begin with, where few histories need the rule: not long before one that does."""
    leave_out(monkeypatch)
    for seed in range(first, first + 20_000):
        try:
            History(seed, checks_tallies=False).play()
        except (Wrong, IndexError) as error:  # IndexError: a parcel would count that is not there any more
            print(f"seed {seed}: {error!r}")
            return
    pytest.fail("the rule makes no difference in 20,000 histories")


@pytest.mark.parametrize("leave_out", [_sets_may_overlap, _held_contributions_are_added_again])
def test_tallies_show_what_was_added_twice(leave_out: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the step begins again, so that it ends as it should."""
    leave_out(monkeypatch)
    caught = 0
    for seed in range(300):
        history = History(seed)
        history.play()
        caught += history.caught
    assert caught


BUCKET = (0, 1)


def parcel(*pairs: tuple[int, int], scales: str = "s", attempt: int = 0, step: int = 4) -> Parcel:
    held = Pairs.none(BUCKET)
    for micro_batch, section in pairs:
        held = held.with_pair(micro_batch, section)
    return Parcel(step, 2, attempt, scales, held)


def continued(*shown: list[Parcel], hosts: tuple[int, ...] = (0,)) -> StepInFlight:
    return continue_step(shown, step=4, branch=2, hosts={BUCKET: hosts}, num_micro_batches=3)


def test_the_largest_counts_and_then_what_is_disjoint_from_it() -> None:
    small, large, other = parcel((0, 0)), parcel((0, 0), (1, 0)), parcel((2, 1))
    found = continued([small], [large, other])
    assert [(one.member, one.number, one.destination) for one in found.kept] == [(1, 0, 0), (1, 1, 0)]
    assert set(found.missing[BUCKET]) == {(2, 0), (0, 1), (1, 1)}


def test_of_equal_ones_a_hosts_own_counts_so_that_nothing_is_sent() -> None:
    held = parcel((0, 0))
    assert not continued([held], [held], hosts=(1,)).moves
    assert [one.member for one in continued([held], [held], hosts=(2,)).moves] == [0]


def test_nobody_is_sent_more_than_it_has_room_for() -> None:
    parcel = Parcel(4, 2, 0, "s", Pairs.all(BUCKET, 3))
    shown: list[list[Parcel]] = [[parcel], [], []]

    def found(short: list[int]) -> StepInFlight:
        hosts, room = {BUCKET: [1, 2]}, dict.fromkeys(short, 9)
        return continue_step(
            shown, step=4, branch=2, hosts=hosts, num_micro_batches=3, room=room, sizes={BUCKET: 10}
        )

    assert [one.destination for one in found([1]).kept] == [2]
    assert [one.destination for one in found([0]).kept] == [1]
    assert not found([1, 2]).kept
    assert found([1, 2]).missing[BUCKET] == Pairs.all(BUCKET, 3)


def test_several_sums_of_a_bucket_need_room_for_each() -> None:
    """Found: room for one was enough for any number of them."""
    shown = [[parcel((0, 0))], [parcel((1, 0))], [parcel((2, 0))], []]

    def received(room: float) -> int:
        found = continue_step(
            shown,
            step=4,
            branch=2,
            hosts={BUCKET: [3]},
            num_micro_batches=3,
            room={3: room},
            sizes={BUCKET: 10},
        )
        return len(found.moves)

    assert [received(room) for room in (9, 10, 29, 30)] == [0, 1, 2, 3]


def test_what_a_newcomer_has_received_is_shown_if_the_generation_breaks() -> None:
    """Found: it was shown by nobody, if its sender had dropped it."""
    parcels: Parcels[Added] = Parcels()
    given, total = parcel((0, 0), (1, 0)), Added()
    parcels.receive(KeptParcel(0, 0, 1, given.pairs), total, given)
    assert parcels.show() == [given]
    later = parcel((2, 0), step=5)
    parcels.receive(KeptParcel(0, 0, 1, later.pairs), Added(), later)
    assert parcels.show() == [later]


def test_what_is_of_the_fewest_contributions_is_dropped_first() -> None:
    parcels: Parcels[Added] = Parcels()
    buckets: list[Bucket] = [(0,), (1,), (2,)]
    parcels.begin(
        StepId(4, 2, 0),
        {bucket: Pairs.all(bucket, 3) for bucket in buckets},
        dict.fromkeys(buckets, ""),
        {bucket: Added() for bucket in buckets},
    )
    for micro_batch, section in [(0, 2), (1, 2), (0, 1)]:
        parcels.adds((section,), micro_batch, section)
        parcels.added(micro_batch, section)
    assert parcels.make_room(0) == parcels.make_room(-1) == 0
    assert len(parcels.show()) == 3
    assert parcels.make_room(2) == 1
    assert [len(parcel.pairs) for parcel in parcels.show()] == [2]
    assert parcels.make_room(float("inf")) == 2
    assert not parcels.show()


def test_one_host_is_not_given_all() -> None:
    shown = [[parcel((number, 0))] for number in range(3)]
    assert sorted(one.destination for one in continued(*shown, hosts=(3, 4)).moves) == [3, 3, 4]


@pytest.mark.parametrize(
    "other", [parcel((1, 0), scales="t"), parcel((1, 0), attempt=1)], ids=["scales", "attempt"]
)
def test_where_scales_differ_nothing_counts(other: Parcel) -> None:
    found = continued([parcel((0, 0))], [other])
    assert (found.attempt, found.kept, found.missing) == (0, (), {BUCKET: Pairs.all(BUCKET, 3)})


def test_a_later_attempt_goes_on_if_its_scales_are_known_of_every_bucket() -> None:
    again = parcel((0, 0), attempt=1)
    assert continued([again]).attempt == 1
    hosts = {BUCKET: (0,), (0, 2): (0,)}
    found = continue_step([[again]], step=4, branch=2, hosts=hosts, num_micro_batches=3)
    assert (found.attempt, found.kept) == (0, ())


def test_parcels_of_another_step_are_void() -> None:
    assert not continued([parcel((0, 0), step=3)], [parcel((1, 0), step=5)]).kept


def test_tallies_of_disjoint_sets_add_up_to_the_whole() -> None:
    held = parcel((0, 0), (2, 1)).pairs
    whole = Pairs.all(BUCKET, 3)
    assert (held.tally + (whole - held).tally) % 2**64 == whole.tally == whole_tally(BUCKET, 3)
    assert len(whole - held) == 4
    assert (0, 0) in held
    assert (0, 1) not in held
