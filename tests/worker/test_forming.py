"""What a member holds when a generation does not come to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from makara.checkpoint import StoreRefused
from makara.checkpoint.stores.local import LocalStore
from makara.model.partition.partition import choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import load_entrypoint
from makara.pipeline import Range, grid
from makara.protocol.messages import CheckpointRef, Phase
from makara.worker.execution.blocking import GenerationAbandoned
from makara.worker.execution.partial_sums import PartialSums
from makara.worker.execution.state import ModelState
from makara.worker.progress import ProgressCounters
from makara.worker.recovery.joining import CheckpointLocation, NoCheckpoint, join_generation
from makara.worker.sections.ranges import RangeRuntime
from makara.worker.trainer import generation
from trainer_processes import BUNDLE, settings


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
        self.courier, self.progress = self, ProgressCounters()
        self._states = state, donor

    def rendezvous(self) -> None: ...

    def introduce(self, choice: Any) -> list[Any]:
        return [choice] * len(self.members)

    def link(self, _neighbours: Any) -> None: ...

    def open_groups(self, _buckets: Any) -> None: ...

    def group(self, _name: str, _ranks: Any) -> Wire:
        return Wire(self._states[1])

    def call(self, function: Callable[[], Any], _ranks: Any = ()) -> Any:
        return function()

    def gather(self, name: str, value: Any) -> list[Any]:
        if name == "ready":
            raise GenerationAbandoned
        donor = {
            "standing": {
                "applied_step": 3,
                "record": None,
                "reduced_step": None,
                "reduced_by": None,
                "sections": list(self.wanted),
                "branch": 1,
                "agreed_in": 1,
            },
            "record": None,
            "in_flight": {"rows": [], "parcels": [], "losses": {}, "dropped": 0, "room": None},
            "bits": "",
        }
        return [value, donor]


class Alone(Session):
    """The session of one member that has nothing yet, in a job with a checkpoint."""

    def __init__(self, num_sections: int) -> None:
        self.rank, self.number, self.members = 0, 2, ["newcomer"]
        self.plan = grid([Range(0, num_sections)], 1, 1, generation=2)
        self.wanted = range(num_sections)
        self.checkpoints = [CheckpointRef(step=2, generation=1)]
        self.courier, self.progress = self, ProgressCounters()

    def gather(self, name: str, value: Any) -> list[Any]:
        return [value]


class RefusingOnce(LocalStore):
    """Refuses the first read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, folder.as_uri())
        self.refused = False

    def get(self, key: str) -> bytes:
        if not self.refused:
            self.refused = True
            raise StoreRefused("AccessDenied: not with this key")
        return super().get(key)


def test_what_the_store_says_while_a_checkpoint_is_waited_for_is_told(tmp_path: Path) -> None:
    training = load_entrypoint(BUNDLE, "models:tied_gpt")
    traced = trace(training, 2, 7)
    chain = split(traced, choose_cuts(traced, None))
    told: list[str] = []
    anything: Any = Alone(chain.num_sections)
    state = ModelState(RangeRuntime(chain, training, 7), None, PartialSums(chain, 2, "exact"))
    with pytest.raises(NoCheckpoint):  # it was never written
        join_generation(anything, state, CheckpointLocation(RefusingOnce(tmp_path), "job", told.append), [])
    assert told == ["AccessDenied: not with this key", ""]


def test_a_member_counts_what_it_received_before_a_donor_may_let_go_of_it() -> None:
    training = load_entrypoint(BUNDLE, "models:tied_gpt")
    traced = trace(training, 2, 7)
    chain = split(traced, choose_cuts(traced, None))
    sums = PartialSums(chain, 2, "exact")
    donor, state = (ModelState(RangeRuntime(chain, training, 7), None, sums) for _ in range(2))
    for index in range(chain.num_sections):
        donor.runtime.host(index)
    anything: Any = Session(state, donor, chain.num_sections)
    source: Any = CheckpointLocation
    with pytest.raises(GenerationAbandoned):
        join_generation(anything, state, source, [])
    standing = state.standing()
    assert standing.applied_step == 3
    assert standing.sections == frozenset(range(chain.num_sections))
    assert state.branch == 1


def test_a_donor_has_left_when_the_manager_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The manager may end its VM at once, and the others must not take that for the loss of a member."""
    said: list[str] = []
    runtime = SimpleNamespace(
        place_optimizers=lambda *, on_host: None, discard=lambda: said.append("discard")
    )
    model: Any = SimpleNamespace(chain=None, state=SimpleNamespace(runtime=runtime, settled=None))
    session: Any = SimpleNamespace(
        plan=SimpleNamespace(optimizer_on_host=False), trains=False, leave=lambda: said.append("bye")
    )
    control: Any = SimpleNamespace(report=lambda **told: said.append(told["phase"].value))
    monkeypatch.setattr(generation, "buckets", lambda chain, plan: [])

    def join(*_: Any) -> Any:
        said.append("join")
        return SimpleNamespace(step=3)

    monkeypatch.setattr(generation, "join_generation", join)
    job: Any = settings(tmp_path)
    outcome = generation.run_generation(session, model, job, cast(Any, None), control, lambda: 1)
    assert outcome is Phase.LEFT
    assert said == ["discard", "join", "bye", "left"]  # activations take no memory while it forms
