"""How pools of VMs are shared among jobs: cases by hand, seeded histories, and histories without a rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from makara.manager.core.pools.shares import Claim, Share, Sharing, shares
from pool_history import Divide, PoolHistory, Violated

POOL, CLOUD = "static", "aws/r/large"
_SEEDS = 30


def claim(
    job: str, least: int, held: int = 0, *, most: int = 9, pool: str = POOL, priority: int = 0, **known: Any
) -> Claim:
    """A job that was submitted in the order of its name."""
    return Claim(
        job=job,
        priority=priority,
        submitted_at=float(ord(job[0])),
        least=least,
        most=most,
        pools=(pool,),
        held={pool: held} if held else {},
        trains=known.pop("trains", held >= least),
        **known,
    )


def shared(*claims: Claim, room: int | None = None, pool: str = POOL) -> dict[str, int | None]:
    """How many VMs of the pool each may have; None: any number."""
    found = shares(claims, {} if room is None else {pool: room})
    return {job: share.most.get(pool) for job, share in found.items()}


def test_of_two_that_hold_too_few_the_first_is_given_what_the_other_has() -> None:
    assert shared(claim("a", 2, 1), claim("b", 2, 1), room=2) == {"a": 2, "b": 0}


def test_the_order_is_by_priority_then_by_submission() -> None:
    assert shared(claim("a", 2), claim("b", 2), room=2) == {"a": 2, "b": 0}
    assert shared(claim("a", 2), claim("b", 2, priority=1), room=2) == {"b": 2, "a": 0}


def test_one_that_trains_keeps_its_least_whoever_waits() -> None:
    assert shared(claim("a", 2, 2), claim("b", 2, priority=9), room=2) == {"b": 0, "a": 2}


def test_a_job_that_lost_a_vm_keeps_its_place() -> None:
    assert shared(claim("a", 2, 1), claim("b", 2), room=2) == {"a": 2, "b": 0}


def test_what_is_above_the_least_goes_to_one_that_waits() -> None:
    assert shared(claim("a", 1, 4), claim("b", 2), room=4) == {"a": 2, "b": 2}


def test_what_is_above_the_least_is_not_given_to_lower_priorities() -> None:
    assert shared(claim("a", 1, 4, priority=1), claim("b", 2), room=4) == {"a": 4, "b": 0}


def test_what_would_still_be_too_little_is_not_taken() -> None:
    assert shared(claim("a", 2, 3), claim("b", 2), room=3) == {"a": 3, "b": 0}


def test_the_head_may_hold_what_is_free_and_those_after_it_nothing() -> None:
    assert shared(claim("a", 3, 3), claim("b", 3), claim("c", 1), room=5) == {"a": 3, "b": 2, "c": 0}


def test_a_head_that_its_pool_can_never_satisfy_is_passed_over_and_named() -> None:
    claims = claim("a", 4), claim("b", 2)
    found = shares(claims, {POOL: 3})
    assert found["b"].most == {POOL: 3}
    assert found["a"].most == {POOL: 0}
    assert found["a"].why == (
        "it needs 4 VMs (resources.min_nodes), but static has 3: other jobs go first until there are more"
    )


def test_what_is_left_is_for_those_that_train_in_their_order() -> None:
    assert shared(claim("a", 1, 2, most=4), claim("b", 1, 1), room=6) == {"a": 4, "b": 2}


def test_a_job_alone_in_its_pool_asks_as_it_likes() -> None:
    assert shared(claim("a", 1, 2), claim("b", 1, pool="local"), room=2) == {"a": None, "b": None}


def test_a_job_that_asks_for_no_more_holds_what_it_has_and_is_not_waited_for() -> None:
    assert shared(claim("a", 2, 1, is_active=False), claim("b", 1), claim("c", 1), room=3) == {"b": 1, "c": 1}


def test_a_cloud_that_refuses_one_that_waits_has_what_is_held() -> None:
    refused = {CLOUD: 1.0}
    a, b = claim("a", 1, 4, pool=CLOUD), claim("b", 2, pool=CLOUD, refused=refused)
    assert shared(a, b, pool=CLOUD) == {"a": 2, "b": 2}


def test_the_head_of_a_cloud_asks_again_and_those_after_it_wait() -> None:
    refused = {CLOUD: 1.0}
    b, c = claim("b", 2, 1, pool=CLOUD, refused=refused), claim("c", 1, pool=CLOUD)
    assert shared(claim("a", 1, 1, pool=CLOUD), b, c, pool=CLOUD) == {"a": 1, "b": None, "c": 0}


def test_while_one_waits_for_its_first_vms_of_a_cloud_others_do_not_ask_for_more() -> None:
    a, b = claim("a", 1, 2, pool=CLOUD), claim("b", 2, 1, pool=CLOUD)
    assert shared(a, b, pool=CLOUD) == {"a": 2, "b": None}
    higher = claim("a", 1, 2, pool=CLOUD, priority=1)
    assert shared(higher, b, pool=CLOUD) == {"a": None, "b": None}


def test_one_that_asks_for_none_of_a_cloud_holds_nobody_up() -> None:
    """Found: a job whose caps allow no VM had all others lose theirs, one by one, and ask for none."""
    assert shared(claim("a", 1, 2, pool=CLOUD), claim("b", 2, pool=CLOUD), pool=CLOUD) == {
        "a": None,
        "b": None,
    }


def test_what_is_handed_over_still_counts_and_once_it_is_free_is_asked_for_first() -> None:
    """Found: for one VM that waited, a job of eight gave up six, one after each change of plan."""
    b = claim("b", 1, pool=CLOUD, refused={CLOUD: 1.0})
    assert shared(claim("a", 2, 8, pool=CLOUD), b, pool=CLOUD) == {"a": 7, "b": 1}
    assert shared(claim("a", 2, 7, pool=CLOUD, leaving={CLOUD: 1}), b, pool=CLOUD) == {"a": 7, "b": 1}
    found = shares([claim("a", 2, 7, pool=CLOUD), b], {}, {CLOUD: 2.0})
    assert (found["a"].most, found["b"].most, found["b"].freed) == ({CLOUD: 7}, {}, {CLOUD})
    again = claim("b", 1, pool=CLOUD, refused={CLOUD: 3.0})  # others were faster
    found = shares([claim("a", 2, 7, pool=CLOUD), again], {}, {CLOUD: 2.0})
    assert (found["a"].most, found["b"].freed) == ({CLOUD: 6}, frozenset())


def test_none_is_passed_over_for_want_of_machines_that_may_come_back() -> None:
    """Found: after a restart of the manager the head gave up what it had, since others were not back yet."""
    claims = [claim("a", 5, 2), claim("b", 1, 2)]
    assert shares(claims, {POOL: 4})["a"].most == {POOL: 0}
    assert shares(claims, {POOL: 4}, may_grow=True)["a"].most == {POOL: 2}


# ---- histories ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seeds", [range(_SEEDS), pytest.param(range(_SEEDS, 5000), marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_every_history_keeps_what_the_queue_promises(seeds: range) -> None:
    finished = sum(PoolHistory(seed).run() for seed in seeds)
    assert finished > 3 * len(seeds)


class _NobodyIsPassedOver(Sharing):
    def __init__(self, *known: Any, **settings: Any) -> None:
        super().__init__(*known, **settings)
        self._ever = {}


class _NobodyIsHead(Sharing):
    def _give_least(self, claim: Claim) -> None:
        super()._give_least(claim)
        self._heads.clear()


class _NobodyYields(Sharing):
    def _available(self, pool: str) -> float:
        return max(0, super()._available(pool) - self._kept(pool, None))


class _NewestFirst(Sharing):
    def __init__(self, queue: Any, *known: Any, **settings: Any) -> None:
        super().__init__(queue[::-1], *known, **settings)


class _NothingIsKept(Sharing):
    def _give_held(self, claim: Claim, most: int) -> None:
        pass


class _AsksInItsOwnTime(Sharing):
    def __init__(self, queue: Any, capacity: Any, freed: Any, **settings: Any) -> None:
        super().__init__(queue, capacity, {}, **settings)


class _GrowsFirst(Sharing):
    def _give_least(self, claim: Claim) -> None:
        for other in self._queue:
            if other.trains:
                self._let_grow(other)
        super()._give_least(claim)


@pytest.mark.parametrize(
    "without",
    [
        _NobodyIsPassedOver,
        _NobodyIsHead,
        _NobodyYields,
        _NewestFirst,
        _NothingIsKept,
        _AsksInItsOwnTime,
        _GrowsFirst,
    ],
    ids=lambda kind: kind.__name__.strip("_"),
)
def test_histories_find_the_rule_that_is_missing(without: type[Sharing]) -> None:
    def divide(
        claims: Iterable[Claim], capacity: Mapping[str, int], freed: Mapping[str, float]
    ) -> dict[str, Share]:
        queue = sorted(claims, key=lambda claim: (-claim.priority, claim.submitted_at, claim.job))
        return without(queue, capacity, freed, may_grow=False).run()

    assert any(_is_violated(seed, divide) for seed in range(200))


def _is_violated(seed: int, divide: Divide) -> bool:
    try:
        PoolHistory(seed, divide).run()
    except Violated:
        return True
    return False
