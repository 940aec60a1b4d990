"""What trainers do in a replay, generation after generation, as the core's orders have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ...protocol.messages import CheckpointRef, Formed, Phase
from ...simulator import MorphCosts
from ..core import Observations
from ..core.state import Generation, JobState, vm_of
from ..spec.job_spec import JobSpec
from ..world import Store, Trainer, begin
from .fleet import Fleet, NodeVm
from .group import Group, GroupPhase, make_group, make_stretch
from .loading import Bytes
from .policies import Policy
from .scenario import Scenario
from .step_in_flight import Continued, StepsInFlight
from .time_account import Item, TimeAccount


class TrainingHost(Protocol):
    """What surrounds the trainers: time, the manager's state, the machines, and the store."""

    scenario: Scenario
    spec: JobSpec
    costs: MorphCosts
    state: JobState
    observations: Observations
    fleet: Fleet
    store: Store[None]
    dirty: dict[str, None]
    """VMs with something new to report, in order."""

    @property
    def now_ns(self) -> int: ...

    def after(self, delay_s: float, call: Callable[..., None], *values: Any) -> None: ...

    def at(self, at_ns: int, call: Callable[..., None], *values: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """How things stand from `at_ns` on, until the next sample."""

    at_ns: int
    num_nodes: int
    num_vms: int
    num_used: int
    """Workers that step."""
    shape: str
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class FormCost:
    """What a generation that formed had cost until then."""

    idle_ns: int
    """Since the last step before it."""
    lost_steps: int


class Training:
    """The one group of trainers that steps or forms, and the account of the job's time."""

    def __init__(self, world: TrainingHost, policy: Policy) -> None:
        self.world = world
        self.policy = policy
        self.group: Group | None = None
        self.ledger = TimeAccount(0)
        self.samples: list[Sample] = []
        self.begun: dict[int, FormCost] = {}
        self.undetected: set[str] = set()
        """VMs whose death broke the group, and of which the manager does not know yet."""
        self.in_flight = StepsInFlight(world.scenario.calibration)
        self._bytes = Bytes(world.scenario.calibration, world.costs)
        self._preparing = self._going = 0
        self._next: Generation | None = None
        self._saved_ns: int | None = None
        self._why = Item.WAIT

    # ---- time ----------------------------------------------------------------------------------------------

    def pass_time(self, until_ns: int) -> None:
        """The clock is about to jump: time without steps goes to what was the matter."""
        if self.group is None or self.group.doing is not GroupPhase.STEPPING:
            self.ledger.idle(self._why, until_ns)

    def explain(self) -> None:
        """At the end of an instant: why nothing steps from now on, if so; and how things stand."""
        self._why = self._reason()
        group, fleet = self.group, self.world.fleet
        steps = group is not None and group.doing is GroupPhase.STEPPING
        rate = self.world.spec.training.global_batch_size / group.predicted_s if group and steps else 0.0
        used, shape = (len(group.ranges), group.shape) if group and steps else (0, "")
        sample = Sample(self.world.now_ns, fleet.num_nodes, len(fleet.vms), used, shape, rate)
        last = self.samples[-1] if self.samples else None
        if last is not None and last.at_ns == sample.at_ns:
            self.samples.pop()
        self.samples.append(sample)

    def _reason(self) -> Item:
        state, group = self.world.state, self.group
        if group is not None and group.doing is GroupPhase.SAVING:
            return Item.SNAPSHOT
        if self.undetected:
            return Item.DETECT
        if state.current is not None and state.current.formed is None:
            return Item.FORM
        if state.planned is not None:
            return Item.PREPARE if state.planned.prepared_at is None else Item.OPEN
        if self.world.observations.planning is not None:
            return Item.DECIDE
        return Item.START if state.last_generation == 0 and self.world.fleet.vms else Item.WAIT

    def stop(self, now_ns: int) -> None:
        """The replay ends here."""
        self.pass_time(now_ns)
        if self.group is not None and self.group.doing is GroupPhase.STEPPING:
            self._end_stretch(self.group, Item.UNFINISHED)
        self.ledger.give_up(Item.UNFINISHED)

    # ---- orders --------------------------------------------------------------------------------------------

    def obey(self) -> None:
        """The core has decided: prepare, go, leave or hold, as it has it now."""
        state, group = self.world.state, self.group
        left = group is not None and group.number <= state.abandoned
        if group is not None and left:
            self._leave(group)
        if state.planned is not None and state.planned.number > self._preparing:
            self._preparing = state.planned.number
            self.world.after(self.world.costs.prepare_s, self._prepared, state.planned)
        current = state.current
        if current is not None and current.number > self._going:
            self._going, self._next = current.number, current
            self._switch_when_it_can()
        elif left and self._next is not None:  # it was to wait for the step's end, and is not any more
            self._switch_when_it_can()
        if group is not None and state.hold and not group.holding and group.doing is GroupPhase.STEPPING:
            group.holding = True
            assert group.stretch is not None, "a group that steps has a stretch"
            self.world.at(group.stretch.next_end_ns(self.world.now_ns), self._save, group)

    def _prepared(self, generation: Generation) -> None:
        planned = self.world.state.planned
        if planned is None or planned.number != generation.number:
            return
        for worker, _ in planned.members:
            trainer = self.world.fleet.trainers.get(worker)
            if trainer is not None:
                trainer.prepared = planned.number
                self.world.dirty[vm_of(worker)] = None

    def _switch_when_it_can(self) -> None:
        """After the step under way, if there is one."""
        group = self.group
        if group is None or group.doing in (GroupPhase.BROKEN, GroupPhase.RESTING):
            self._enter()
        elif group.doing is GroupPhase.STEPPING and group.stretch is not None:
            self.world.at(group.stretch.next_end_ns(self.world.now_ns), self._switch, group)

    def _switch(self, group: Group) -> None:
        if group is self.group and group.doing is GroupPhase.STEPPING and self._next is not None:
            self._end_stretch(group, Item.CUT_OFF)
            self._enter()

    def _leave(self, group: Group) -> None:
        """Its generation is closed: leave at once, in the middle of a step."""
        if group.doing is GroupPhase.STEPPING:
            self._end_stretch(group, Item.CUT_OFF)
        if group.doing is not GroupPhase.RESTING:
            group.doing = GroupPhase.BROKEN
        for trainer in group.members:
            if trainer.generation == group.number and trainer.phase is not Phase.LEFT:
                trainer.phase = Phase.BROKEN

    # ---- forming -------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """The members of the newest generation form it, unless one of them is gone already."""
        generation, self._next = self._next, None
        current = self.world.state.current
        if generation is None or current is None or current.number != generation.number:
            return  # closed in the meantime
        living = self.world.fleet.trainers
        members = [trainer for worker, _ in current.members if (trainer := living.get(worker)) is not None]
        if not self.policy.keeps_state:
            for trainer in members:
                trainer.span = None
        beginning = begin(members, current.checkpoints, self.world.scenario.calibration.num_sections)
        whole = len(members) == len(current.members)
        group = make_group(current, members, beginning, GroupPhase.FORMING if whole else GroupPhase.BROKEN)
        self.group = group
        for trainer in members:
            trainer.generation, trainer.phase = group.number, Phase.FORMING
            self.world.dirty[vm_of(trainer.worker)] = None
        if whole:
            costs = self.world.costs
            goes_on = self.policy.keeps_state or generation.number == 1
            again_s = 0.0 if goes_on else costs.start_s + costs.trace_s
            load_s = self._bytes.load_s(beginning, members, group.ranges)
            if self.policy.keeps_state:
                group.continued = self._continued(group)
            if group.continued is not None:
                load_s += self._bytes.moved_s(group.continued.step)
            phases_s = {"groups": costs.form_s + again_s, "load": load_s}
            self.world.after(sum(phases_s.values()), self._formed, group, phases_s)

    def _continued(self, group: Group) -> Continued | None:
        """The step that it goes on with; `rest_s` is of the same clock as its steps."""
        names = [trainer.worker for trainer in group.members]
        continued = self.in_flight.go_on(group.plan, names, group.beginning)
        if continued is not None:
            workers = names[: len(group.ranges)]
            group.rest_s = continued.progress.time_s * self.in_flight.stretched(
                group.plan, workers, group.predicted_s
            )
        return continued

    def _formed(self, group: Group, phases_s: dict[str, float]) -> None:
        if group is not self.group or group.doing is not GroupPhase.FORMING:
            return
        beginning, now_ns = group.beginning, self.world.now_ns
        self.begun[group.number] = FormCost(self.ledger.idle_ns, self.ledger.rewind(beginning.step))
        formed = Formed(generation=group.number, step=beginning.step, rung=beginning.rung, phases_s=phases_s)
        if group.continued is None:
            self.ledger.give_up(Item.CUT_OFF)
        self.in_flight.begin([trainer.worker for trainer in group.workers], beginning, group.continued)
        for rank, trainer in enumerate(group.members):
            self._take_part(group, trainer, rank, formed)
        if self._saved_ns is None or not self.policy.keeps_state:
            self._saved_ns = now_ns
        published = max((ref.step for ref in self.world.store.listed), default=0)
        checkpoint, saved_ns = self.world.spec.checkpoint, self._saved_ns
        group.stretch = make_stretch(
            group, self._bytes, checkpoint, now_ns, published=published, saved_ns=saved_ns
        )
        group.doing = GroupPhase.STEPPING
        left = self.world.spec.training.steps - beginning.step
        self.world.at(group.stretch.ends_ns(left) if left else now_ns, self._save, group)

    def _take_part(self, group: Group, trainer: Trainer, rank: int, formed: Formed) -> None:
        self.world.dirty[vm_of(trainer.worker)] = None
        if rank >= len(group.ranges):  # a donor has handed over what it had
            trainer.leave()
        else:
            trainer.take_part(group.ranges[rank], group.beginning.branch, formed)

    # ---- stepping ------------------------------------------------------------------------------------------

    def tell_progress(self) -> None:
        """Rank 0 has stepped, or published something, since it last said so. Real trainers say so at once;
        here it is told when something else happens, and dated (`told_ns`)."""
        group = self.group
        if group is None or group.doing is not GroupPhase.STEPPING:
            return
        leader, newest = group.members[0], group.step_at(self.world.now_ns)
        if leader.step != newest:
            leader.step = newest
            self.world.dirty[vm_of(leader.worker)] = None
        step = group.published_at(self.world.now_ns)
        if step is not None:
            self._publish(group, step)

    def told_ns(self, vm: NodeVm) -> int:
        """When the VM's newest report came: rank 0's at the end of its newest step."""
        group, now_ns = self.group, self.world.now_ns
        if group is None or group.doing is not GroupPhase.STEPPING or group.stretch is None:
            return now_ns
        if group.members[0] not in vm.trainers:
            return now_ns
        return group.stretch.ends_ns(group.stretch.steps_at(now_ns))

    def _publish(self, group: Group, step: int) -> None:
        ref, leader = CheckpointRef(step=step, generation=group.number), group.members[0]
        if ref != leader.published and self.world.store.publish(ref, None):
            leader.published = ref
            self.world.dirty[vm_of(leader.worker)] = None

    def _end_stretch(self, group: Group, rest: Item) -> None:
        """The steps until now are done; what they came to is what its members hold."""
        self.tell_progress()
        stretch, now_ns = group.stretch, self.world.now_ns
        assert stretch is not None, "a group that steps has a stretch"
        step = stretch.first_step + self.ledger.stepped(stretch, now_ns, rest=rest)
        newest = stretch.newest_published(now_ns)
        if newest is not None:
            self._saved_ns = stretch.ends_ns(newest)
        for trainer in group.workers:
            if step > group.beginning.step:
                trainer.branch = group.number
            trainer.step = step
        self._cut_off(group, step, stretch.under_way_ns(now_ns))

    def _cut_off(self, group: Group, step: int, under_way_ns: int) -> None:
        """Note what the workers' sums hold of the step that was under way."""
        workers = [trainer.worker for trainer in group.workers]
        at_first = step == group.beginning.step
        if not under_way_ns and not at_first:
            self.in_flight.committed()
            return
        stretched = self.in_flight.stretched(group.plan, workers, group.predicted_s)
        self.in_flight.cut_off(
            group.plan,
            workers,
            group.continued if at_first else None,
            under_way_ns / 1e9 / stretched,
            step=step,
            branch=group.workers[0].branch,
        )

    def loses(self, vm: NodeVm) -> None:
        """A VM is about to be gone. If its trainers take part, all of the group come to a halt."""
        group = self.group
        if group is None or group.doing is GroupPhase.BROKEN:
            return
        needed = (
            group.members if group.doing is GroupPhase.FORMING else group.workers
        )  # donors only until it formed
        if not {id(trainer) for trainer in needed} & {id(trainer) for trainer in vm.trainers}:
            return
        if group.doing is GroupPhase.STEPPING:
            self._end_stretch(group, Item.CUT_OFF)
            told = next((t for t in group.workers if t not in vm.trainers), group.workers[0])
            self.world.dirty[vm_of(told.worker)] = None  # the last heartbeat before it told of this step
        group.doing = GroupPhase.BROKEN
        self.undetected.add(vm.name)

    # ---- the last checkpoint, and the one before a hold ----------------------------------------------------

    def _save(self, group: Group) -> None:
        if group is not self.group or group.doing is not GroupPhase.STEPPING:
            return
        self._end_stretch(group, Item.CUT_OFF)
        group.doing = GroupPhase.SAVING
        stages, replicas = group.stages, group.replicas
        wait_s = self._bytes.snapshot_s(stages, replicas) + self._bytes.publish_s(stages, replicas)
        self.world.after(wait_s, self._saved, group)

    def _saved(self, group: Group) -> None:
        if group is not self.group or group.doing is not GroupPhase.SAVING:
            return
        group.doing = GroupPhase.RESTING
        if self.world.store.generation == group.number:
            self.ledger.num_published += 1
            self._saved_ns = self.world.now_ns
            self._publish(group, group.workers[0].step)
        done = group.workers[0].step == self.world.spec.training.steps
        for trainer in group.workers:
            trainer.phase = Phase.FINISHED if done else Phase.HELD
            self.world.dirty[vm_of(trainer.worker)] = None
        if self._next is not None:
            self._enter()
