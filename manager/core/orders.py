"""What each VM should now be doing: a pure projection of a job's state, sent whenever it changes."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from ...protocol.messages import GenerationOrder, JobSettings, Member, Orders
from ..spec.job_spec import JobSpec, to_settings
from .facts import GenerationKind
from .state import Generation, JobState, vm_of


@dataclass(frozen=True, slots=True)
class Leases:
    """Bounds that agents keep, in seconds (see the fields of `Orders`), and what the keys of generations are
    made of."""

    trainer_lease_s: float = 10.0  # a trainer silent for this long is killed and replaced
    link_timeout_s: float = 10.0  # a member that another cannot reach for this long is lost to it
    measuring_s: float = 30.0  # sections that are not measured by then, of an m that can be missed, are not
    probe_s: float = 12.0  # links that are not measured by then are assumed after the second time
    orphan_timeout_s: float = 600.0  # a VM that sees no manager for this long saves and ends itself
    orphan_save_s: float = 300.0  # for how long a VM that is to end waits for its checkpoint
    log_bytes: int = 16 << 20  # of each log file on a VM
    least_worker_token_s: float = 3600.0
    secret: bytes = field(default=b"", repr=False)

    @property
    def worker_token_s(self) -> float:
        """For how long a VM's token is good. It is renewed after a third of that: a VM that was away for as
        long as it may be still gets in."""
        return max(self.least_worker_token_s, 3 * (self.orphan_timeout_s + self.orphan_save_s))


class OrderParts:
    """What the orders of all VMs of one job have in common, made once."""

    def __init__(self) -> None:
        self._settings: tuple[JobSpec, JobSettings] | None = None
        self._generations: list[tuple[Generation, dict[str, GenerationOrder]]] = []

    def settings(self, state: JobState) -> JobSettings:
        """As the function of this name."""
        assert state.spec is not None, "no job was submitted"
        if self._settings is None or self._settings[0] is not state.spec:
            self._settings = state.spec, settings(state)
        return self._settings[1]

    def generation_for(self, state: JobState, vm: str, secret: bytes) -> GenerationOrder | None:
        """The newest generation that concerns the VM: the planned one to prepare, else the open one."""
        for generation in (state.profile, state.planned, state.current):
            if generation is not None:
                order = self._of(state, generation, secret).get(vm)
                if order is not None:
                    return order
        return None

    def _of(self, state: JobState, generation: Generation, secret: bytes) -> dict[str, GenerationOrder]:
        """The order to form this generation, for each VM that takes part."""
        made = next((orders for one, orders in self._generations if one is generation), None)
        if made is None:
            whole, workers = _order(state, generation, secret), dict[str, list[str]]()
            for worker in whole.ranks:
                workers.setdefault(vm_of(worker), []).append(worker)
            made = {vm: whole.told_to(names) for vm, names in workers.items()}
            self._generations = [*self._generations[-1:], (generation, made)]  # that runs, that is planned
        return made


def is_same(orders: Orders, before: Orders) -> bool:
    """Whether both say the same, whatever their versions are."""
    return all(
        (now := getattr(orders, name)) is (then := getattr(before, name)) or now == then for name in _SAID
    )


_SAID = tuple(name for name in Orders.model_fields if name != "version")


def orders(state: JobState, vm: str, leases: Leases = Leases(), parts: OrderParts | None = None) -> Orders:
    """The orders of one VM. A VM that ended or was never asked for is told to shut down (fencing).

    `parts` keeps from call to call what is alike for all VMs.
    """
    parts = parts or OrderParts()
    known = state.vms.get(vm)
    if known is None or not known.live or state.ended is not None or state.spec is None:
        return Orders(version=state.num_facts, action="shutdown", abandoned=state.last_generation)
    generation = parts.generation_for(state, vm, leases.secret)
    action = generation.kind if generation is not None else "idle"
    return Orders(
        version=state.num_facts,
        action=action,
        job=parts.settings(state),
        recipe=state.recipe,
        generation=generation,
        abandoned=state.abandoned,
        hold=state.hold or state.stop_ordered_at is not None,
        stacks=state.stall.number if state.stall is not None else 0,
        given_up={worker: number for worker, number in state.given_up.items() if vm_of(worker) == vm},
        lease_s=leases.trainer_lease_s,
        link_timeout_s=leases.link_timeout_s,
        measuring_s=leases.measuring_s,
        probe_s=leases.probe_s,
        orphan_timeout_s=leases.orphan_timeout_s,
        orphan_save_s=leases.orphan_save_s,
        log_bytes=leases.log_bytes,
    )


def settings(state: JobState) -> JobSettings:
    """The job's settings as trainers get them. The job must have been submitted."""
    assert state.spec is not None, "no job was submitted"
    return to_settings(state.spec, state.job, state.bundle_sha256)


def _order(state: JobState, generation: Generation, secret: bytes) -> GenerationOrder:
    known_by = f"{state.job}/{generation.number}"
    if generation.kind is GenerationKind.PROFILE:
        known_by = f"{state.job}/profile/{generation.number}"
    return GenerationOrder.of(
        [Member(worker=worker, address=state.vms[vm_of(worker)].address) for worker, _ in generation.members],
        dict(generation.plan),
        number=generation.number,
        kind=generation.kind.value,
        phase="prepare" if generation.opened_at is None else "go",
        checkpoints=list(generation.checkpoints),
        endpoint=generation.endpoint if generation.opened_at is not None else None,
        saves_only=generation.saves_only,
        void_until=state.void_until,
        key=hmac.new(secret, known_by.encode(), hashlib.sha256).hexdigest(),
    )
