"""What a worker still has of a step that does not count goes when the next generation settles."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from makara.morphing.in_flight import StepId, StepInFlight
from makara.pipeline.contributions import Pairs
from makara.worker.execution.buckets import Bucket
from makara.worker.execution.in_flight import InFlight
from makara.worker.execution.partial_sums import PartialSums

NUM_MICRO_BATCHES = 2
USED = (0,)


def _hosted_by(rank: int) -> Bucket:
    return Bucket(USED, ("w0",), (rank,))


def _attempt(in_flight: InFlight, number: int) -> None:
    """Rank 0 adds micro-batch 0 in this attempt at step 5."""
    in_flight.begin(StepId(5, 1, number), [_hosted_by(0)], 0, NUM_MICRO_BATCHES, {}, 1.0)
    total = in_flight.parcels.adds(USED, 0, 0)
    assert total is not None
    total.gradients.add("w0", torch.ones(2))
    in_flight.parcels.added(0, 0)


def _commits(in_flight: InFlight) -> None:
    _attempt(in_flight, 0)
    in_flight.end()


def _tries_again(in_flight: InFlight) -> None:
    _attempt(in_flight, 0)
    _attempt(in_flight, 1)


def _commits_when_it_has_shown(in_flight: InFlight) -> None:
    """Another member has the record of the step."""
    _attempt(in_flight, 0)
    assert in_flight.show()[0]
    in_flight.end()


@pytest.mark.parametrize("before", [_commits, _commits_when_it_has_shown, _tries_again])
@pytest.mark.parametrize("host", [0, 1])
def test_what_does_not_count_is_dropped(before: Callable[[InFlight], None], host: int) -> None:
    shapes = {"w0": torch.zeros(2)}
    chain: Any = SimpleNamespace(traced=SimpleNamespace(tensors=shapes), shared={}, sections=())
    in_flight = InFlight(PartialSums(chain, NUM_MICRO_BATCHES, "fast"))
    before(in_flight)
    if before is not _commits_when_it_has_shown:
        assert in_flight.show() == ([], {})
    nothing = StepInFlight(0, (), {USED: Pairs.all(USED, NUM_MICRO_BATCHES)})
    in_flight.settle(0, StepId(6, 1, 0), nothing, None, {}, [_hosted_by(host)], {}, 1.0)

    own = in_flight.parcels.sums()
    assert set(own) == ({USED} if host == 0 else set())
    assert all(not total.gradients.buffer.any() for total in own.values())
    assert set(in_flight.parcels.tallies().values()) <= {0}
