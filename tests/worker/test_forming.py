"""What a member holds when a generation does not come to be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from makara.checkpoint import Receipt, StoreRefused, assemble, open_generation, publish, write_part
from makara.checkpoint.stores.local import LocalStore
from makara.checkpoint.tensors import pack
from makara.model.partition.partition import Sections, choose_cuts, split
from makara.model.tracing.trace import trace
from makara.model.training import Training, load_entrypoint
from makara.pipeline import Range, grid
from makara.protocol.messages import CheckpointRef, Phase
from makara.worker.execution.blocking import GenerationAbandoned
from makara.worker.execution.partial_sums import PartialSums
from makara.worker.execution.state import ModelState
from makara.worker.progress import ProgressCounters
from makara.worker.recovery.joining import CheckpointLocation, NoCheckpoint, join_generation
from makara.worker.sections.ranges import RangeRuntime
from makara.worker.sections.state import entry_owner
from makara.worker.trainer import generation
from makara.worker.trainer.trainer import failure_of
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

    rendezvous_s = 0.0

    def __init__(self, state: ModelState, donor: ModelState, num_sections: int) -> None:
        self.rank, self.number, self.members = 0, 2, ["newcomer", "donor"]
        self.plan = grid([Range(0, num_sections)], 1, 2, generation=2)
        self.wanted = range(num_sections)
        self.checkpoints: list[Any] = []
        self.courier, self.progress = self, ProgressCounters()
        self._states = state, donor

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
            "origins": {"1": "another"},
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


@pytest.fixture(scope="module")
def gpt() -> tuple[Training, Sections]:
    training = load_entrypoint(BUNDLE, "models:tied_gpt")
    traced = trace(training, 2, 7)
    return training, split(traced, choose_cuts(traced, None))


def holds_nothing(gpt: tuple[Training, Sections]) -> ModelState:
    training, chain = gpt
    return ModelState(RangeRuntime(chain, training, 7), None, PartialSums(chain, 2, "exact"))


def publish_steps(store: LocalStore, gpt: tuple[Training, Sections], *steps: int) -> ModelState:
    """Initial weights, published as checkpoints of these steps."""
    chain, state = gpt[1], holds_nothing(gpt)
    open_generation(store, "job", 1)
    for index in range(chain.num_sections):
        state.runtime.host(index)
    for step in steps:
        checkpoint = CheckpointRef(step=step, generation=1)
        receipts: list[Receipt] = []
        for index in range(chain.num_sections):
            tensors, scalars = state.runtime.sections[index].state()
            own = {n: t for n, t in tensors.items() if chain.shared.get(entry_owner(n), (index,))[0] == index}
            kept = {name: value for name, value in scalars.items() if value is not None}
            receipts.append(write_part(store, "job", checkpoint, index, 0, 1, pack(own), metadata=kept))
        manifest = assemble(
            receipts,
            job="job",
            checkpoint=checkpoint,
            num_sections=chain.num_sections,
            data_position=8 * step,
            recipe={},
        )
        publish(store, "job", 1, manifest)
    return state


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes] | None, str]] = {
    "a part is cut": (".safetensors", lambda data: data[: len(data) // 2], r"\d+ bytes, \d+ were written"),
    "a part is empty": (".safetensors", lambda _: b"", "0 bytes, "),
    "a bit of a part is flipped": (".safetensors", flipped, "the checksum does not match"),
    "a part is missing": (".safetensors", None, "no such object"),
    "the manifest is cut": (".json", lambda data: data[: len(data) // 2], "the whole object"),
    "the manifest is no text": (".json", lambda _: b"\xff\xfe", "the whole object"),
    "a digit of the manifest is another": (
        ".json",
        lambda data: data.replace(b'"data_position":', b'"data_position":1', 1),
        "the checksum does not match",
    ),
    "the manifest is missing": (".json", None, "no such object"),
}


def damage(folder: Path, step: int, how: str) -> str:
    """Damage an object of this checkpoint; returns its key."""
    suffix, change, _ = DAMAGES[how]
    path = sorted(path for path in folder.rglob(f"*{suffix}") if f"{step}-g1" in str(path))[-1]
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    return path.relative_to(folder).as_posix()


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_and_its_object_is_named(
    gpt: tuple[Training, Sections], tmp_path: Path, how: str
) -> None:
    store, num_sections = LocalStore(tmp_path, tmp_path.as_uri()), gpt[1].num_sections
    written = publish_steps(store, gpt, 1, 2, 3)
    keys = [damage(tmp_path, 3, how), damage(tmp_path, 2, how)]
    alone: Any = Alone(num_sections)
    alone.checkpoints = [CheckpointRef(step=step, generation=1) for step in (3, 2, 1)]
    state = holds_nothing(gpt)
    state.origins = {0: "another"}
    formed = join_generation(alone, state, CheckpointLocation(store, "job"), [])
    assert (formed.rung, formed.step, state.branch) == ("store", 1, 1)
    assert state.origins == {}
    assert [found.checkpoint.step for found in formed.skipped] == [3, 2]
    for found, key in zip(formed.skipped, keys, strict=True):
        assert key in found.why
        assert re.search(DAMAGES[how][2], found.why)
    for index in range(num_sections):
        loaded, expected = (s.runtime.sections[index].state()[0] for s in (state, written))
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_where_every_checkpoint_is_damaged_the_trainer_ends_and_names_each(
    gpt: tuple[Training, Sections], tmp_path: Path
) -> None:
    store = LocalStore(tmp_path, tmp_path.as_uri())
    publish_steps(store, gpt, 1, 2)
    keys = [damage(tmp_path, 2, "a part is cut"), damage(tmp_path, 1, "the manifest is missing")]
    alone: Any = Alone(gpt[1].num_sections)
    alone.checkpoints = [CheckpointRef(step=step, generation=1) for step in (2, 1)]
    with pytest.raises(NoCheckpoint) as caught:
        join_generation(alone, holds_nothing(gpt), CheckpointLocation(store, "job"), [])
    failure = failure_of(caught.value)
    assert failure.kind == "unreadable"
    assert all(key in failure.message for key in keys)
    assert failure.message.startswith("none of the checkpoints of job job can be read: that of step 2: ")


def test_what_the_store_says_while_a_checkpoint_is_waited_for_is_told(
    gpt: tuple[Training, Sections], tmp_path: Path
) -> None:
    told: list[str] = []
    anything: Any = Alone(gpt[1].num_sections)
    state = holds_nothing(gpt)
    with pytest.raises(NoCheckpoint):  # it was never written
        join_generation(anything, state, CheckpointLocation(RefusingOnce(tmp_path), "job", told.append), [])
    assert told == ["AccessDenied: not with this key", ""]


def test_a_member_counts_what_it_received_before_a_donor_may_let_go_of_it(
    gpt: tuple[Training, Sections],
) -> None:
    chain = gpt[1]
    donor, state = holds_nothing(gpt), holds_nothing(gpt)
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
    assert state.origins == {
        index: "another" if index == 1 else "donor" for index in range(chain.num_sections)
    }


def test_a_donor_has_left_when_the_manager_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The manager may end its VM at once, and the others must not take that for the loss of a member."""
    said: list[str] = []
    runtime = SimpleNamespace(
        place_optimizers=lambda *, on_host: None, discard=lambda: said.append("discard")
    )
    model: Any = SimpleNamespace(
        chain=None, state=SimpleNamespace(runtime=runtime, settled=None, void_until=0)
    )
    session: Any = SimpleNamespace(
        plan=SimpleNamespace(optimizer_on_host=False),
        trains=False,
        rendezvous=lambda: said.append("rendezvous"),
        leave=lambda: said.append("bye"),
        void_until=0,
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
    # Activations take no memory while it forms.
    assert said == ["discard", "rendezvous", "join", "bye", "left"]
