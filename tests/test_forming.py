"""What a member holds when a generation does not come to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet import BUNDLE
from makara.pipeline.plan import Range, grid
from makara.worker.cutting.partition import choose_cuts, split
from makara.worker.execution.interrupt import Abandoned
from makara.worker.execution.state import ModelState
from makara.worker.forming import Source, form
from makara.worker.progress import Progress
from makara.worker.sections.ranges import RangeRuntime
from makara.worker.tracing.trace import trace
from makara.worker.training import load_entrypoint


class Wire:
    """Both ends of a group: what the donor packed is what the member receives."""

    def __init__(self, donor: ModelState) -> None:
        self.donor = donor
        self.section = 0

    def receive(self, tensor: torch.Tensor, _peer: int, tag: int) -> None:
        payload = self.donor.pack_section(tag // 2)
        whole = torch.tensor([len(payload)]) if tag % 2 == 0 else torch.tensor(list(payload))
        tensor.copy_(whole)


class Session:
    """A newcomer's session with one donor, abandoned while it waits for the donor to be ready."""

    def __init__(self, state: ModelState, donor: ModelState, num_sections: int) -> None:
        self.rank, self.number, self.members = 0, 2, ["newcomer", "donor"]
        self.plan = grid([Range(0, num_sections)], 1, 2, generation=2)
        self.wanted = range(num_sections)
        self.checkpoints: list[Any] = []
        self.courier, self.progress = self, Progress()
        self._states = state, donor

    def rendezvous(self) -> None: ...

    def link(self, _neighbours: Any) -> None: ...

    def open_groups(self, _buckets: Any) -> None: ...

    def group(self, _name: str, _ranks: Any) -> Wire:
        return Wire(self._states[1])

    def call(self, function: Callable[[], Any], _ranks: Any = ()) -> Any:
        return function()

    def gather(self, name: str, value: Any) -> list[Any]:
        if name == "ready":
            raise Abandoned
        donor = {
            "standing": {
                "applied_step": 3,
                "record": None,
                "reduced_step": None,
                "reduced_by": None,
                "sections": list(self.wanted),
            },
            "record": None,
            "branch": 1,
        }
        return [value, donor]


def test_a_member_counts_what_it_received_before_a_donor_may_let_go_of_it() -> None:
    training = load_entrypoint(BUNDLE, "models:tied_gpt")
    traced = trace(training, 2, 7)
    chain = split(traced, choose_cuts(traced, None))
    donor, state = (ModelState(RangeRuntime(chain, training, 7), None) for _ in range(2))
    for index in range(chain.num_sections):
        donor.runtime.host(index)
    anything: Any = Session(state, donor, chain.num_sections)
    source: Any = Source
    with pytest.raises(Abandoned):
        form(anything, state, source, [])
    standing = state.standing()
    assert standing.applied_step == 3
    assert standing.sections == frozenset(range(chain.num_sections))
    assert state.branch == 1
