"""Jobs that lose VMs again and again: what our decisions move and bring, and Oobleck's from the same
state."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from makara.manager.core.commands import ComputePlan, DeathRisk, WorkerSlot
from makara.manager.core.state import Incarnation, JobState
from makara.manager.replay.planner import CachedPlanner
from makara.manager.spec.job_spec import parse_spec
from makara.morphing import (
    Risk,
    TemplateStage,
    plan_of,
    prospect,
    stage_table,
    transfers,
    worths,
)
from makara.morphing.stages import Mode
from makara.morphing.templates import Template, template_of
from makara.pipeline import Plan, Range
from makara.protocol.messages import Recipe
from makara.simulator import Calibration, Link, simulate
from oobleck_rules import Pipeline, Rules, all_templates, dealt

SAMPLES = 4  # of a micro-batch
MOST_WORKERS = 24
RISK = {"mean_size": 4 / 3, "redo_s": 320.0, "redo_steps": 0.5, "form_s": 5.0}  # of deaths to come


@dataclass(frozen=True)
class Model:
    """What is trained, by workers that have a VM each."""

    name: str
    calibration: Calibration
    num_micro_batches: int
    memory_bytes: int
    between_losses_s: float
    tolerated_failures: int = 1

    @cached_property
    def risk(self) -> DeathRisk:
        return DeathRisk(losses_per_s=1.0 / self.between_losses_s, **RISK)

    @cached_property
    def planner(self) -> CachedPlanner:
        return CachedPlanner()

    @cached_property
    def templates(self) -> Mapping[bool, Mapping[int, Template]]:
        """Oobleck's, by whether they recompute."""
        table = stage_table(self.calibration)
        return {
            recompute: all_templates(table, MOST_WORKERS, self.memory_bytes, recompute=recompute)
            for recompute in (False, True)
        }

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Bytes of each section that a new host of it receives."""
        return self.calibration.saved_bytes

    @property
    def least(self) -> int:
        """n0: the fewest workers that hold the model."""
        return min(min(choices) for choices in self.templates.values() if choices)

    def template(self, stages: tuple[TemplateStage, ...], *, recompute: bool) -> Template | None:
        return template_of(stage_table(self.calibration), stages, 1, self.memory_bytes, Mode(recompute))

    @cached_property
    def job(self) -> JobState:
        spec = parse_spec(
            {
                "name": self.name,
                "entrypoint": "train:build",
                "resources": {"provider": "local", "min_nodes": 1, "max_nodes": MOST_WORKERS},
                "training": {"global_batch_size": self.num_micro_batches * SAMPLES, "steps": 10**9},
                "parallelism": {"unequal_pipelines": "auto", "optimizer_offload": "off"},
                "checkpoint": {"uri": "file:///c", "interval": "10m"},
                "resilience": {"tolerated_failures": self.tolerated_failures},
            }
        )
        recipe = Recipe(
            microbatch_size=SAMPLES,
            num_micro_batches=self.num_micro_batches,
            cuts=list(range(1, self.calibration.num_sections)),
            graph_hash="g",
            threads=1,
            device_kind="cuda",
            torch_version="2.13",
            bundle_sha256="b",
        )
        return JobState(job="j", spec=spec, recipe=recipe, calibration=self.calibration.to_json())

    def job_after(self, before: Decision | None) -> JobState:
        """The job, whose newest plan that formed was `before`."""
        if before is None:
            return self.job
        hosts = {Incarnation(worker, 1): (span.start, span.stop) for worker, span in before.hosts.items()}
        return replace(self.job, hosts=hosts, hosts_plan=before.plan.to_json())


@dataclass(frozen=True)
class Decision:
    """`name`: how it came about. `pipelines`: as Oobleck's rules see them."""

    name: str
    plan: Plan
    workers: tuple[str, ...]
    pipelines: tuple[Pipeline, ...]

    @property
    def hosts(self) -> dict[str, Range]:
        return dict(zip(self.workers, self.plan.ranges, strict=True))


def ours(model: Model, before: Decision | None, living: Sequence[str]) -> Decision:
    """What the manager's planner answers after the others died; without `before`, at the start."""
    slots = [WorkerSlot(worker=one, vm=one, memory_bytes=model.memory_bytes) for one in living]
    command = ComputePlan(
        key="k", generation=1, workers=tuple(slots), lasts_s=model.between_losses_s, risk=model.risk
    )
    answer = model.planner.answer(model.job_after(before), command, 0.0)
    assert answer.plan is not None, answer.reason
    name, plan = answer.alternatives[0].name, Plan.from_json(answer.plan)
    if name == "rerouted":
        assert before is not None, "what never ran is not rerouted"
        left = [_left(one, living) for one in before.pipelines]
        return Decision(name, plan, answer.workers, tuple(one for one in left if one.nodes))
    spans = dict(zip(answer.workers, plan.ranges, strict=True))
    pipelines = list[Pipeline]()
    for path in plan.paths:
        nodes = tuple(answer.workers[hop.worker] for hop in path.hops)
        stages = tuple(TemplateStage(spans[node], 1) for node in nodes)
        pipelines.append(Pipeline(nodes, model.template(stages, recompute=plan.recompute)))
    spare = tuple(one for one in living if one not in spans)
    if spare:
        pipelines.append(Pipeline(spare, None))
    return Decision(name, plan, answer.workers, tuple(pipelines))


def _left(one: Pipeline, living: Collection[str]) -> Pipeline:
    nodes = tuple(node for node in one.nodes if node in living)
    return one if nodes == one.nodes else Pipeline(nodes, None)


def theirs(model: Model, before: Decision, living: Sequence[str]) -> Decision:
    """What Oobleck's rules make of it, with or without recomputation, whichever is faster."""
    found = [_by_rules(model, before, living, recompute) for recompute in (False, True)]
    possible = [one for one in found if one is not None]
    return min(possible, key=lambda one: simulate(one.plan, model.calibration, timeline=False).time_s)


def _by_rules(model: Model, before: Decision, living: Collection[str], recompute: bool) -> Decision | None:
    """None if memory does not suffice."""
    choices = model.templates[recompute]
    if not choices or len(living) < min(choices):
        return None
    pipelines = list[Pipeline]()
    for one in before.pipelines:
        again = one.template and model.template(one.template.stages, recompute=recompute)
        if one.template and not again:
            return None
        pipelines.append(Pipeline(one.nodes, again))
    dead = [node for one in pipelines for node in one.nodes if node not in living]
    holding = {worker: span for worker, span in before.hosts.items() if worker in living}
    found = Rules(choices, holding, model.sizes).re_formed(pipelines, dead)
    made = [one.template for one in found if one.template is not None]
    shares = dealt(made, model.num_micro_batches)
    plan = plan_of(
        [one.stages for one in made],
        shares,
        windows=[*map(_window, [model] * len(made), made, shares, [recompute] * len(made))],
        recompute=recompute,
        generation=1,
    )
    return Decision("oobleck", plan, tuple(node for one in found for node in one.nodes), tuple(found))


def _window(model: Model, template: Template, share: int, recompute: bool) -> int | None:
    """The widest for which every stage has the memory."""
    table = stage_table(model.calibration)
    limits = [
        table.memory(stage.range.start, stage.range.stop, Mode(recompute)).window(model.memory_bytes)
        for stage in template.stages
    ]
    return min((limit for limit in limits if limit is not None and limit < share), default=None)


@dataclass(frozen=True)
class Measured:
    """What a decision moves, and what it brings until the next loss."""

    moved_bytes: int
    most_bytes: int
    """Received by one worker."""
    samples_per_s: float
    done_per_s: float
    """Samples done until the next loss, for each second until then, in the mean of all times of it."""
    goodput: float
    """As `done_per_s`, less what the loss costs (see docs/choice.md)."""


def measured(
    model: Model, both: Sequence[Decision], holding: Mapping[str, Range], num_living: int
) -> list[Measured]:
    """`holding`: of those who live."""
    moved = [_moved(model, one, holding) for one in both]
    risk = Risk(**model.risk.model_dump())
    prospects = []
    for one, (received, sent) in zip(both, moved, strict=True):
        step = simulate(one.plan, model.calibration, timeline=False)
        assert max(step.peak_bytes) <= model.memory_bytes, one
        hosts = [
            frozenset(worker for worker, span in one.hosts.items() if section in span)
            for section in range(model.calibration.num_sections)
        ]
        link, busiest = model.calibration.inter_vm, max(*received.values(), *sent.values())
        begins_s = link.latency_s + busiest / link.bytes_per_s if busiest else 0.0
        samples = model.num_micro_batches * SAMPLES
        prospects.append(prospect(samples, step.time_s, begins_s, hosts, num_living, risk))
    return [
        Measured(
            moved_bytes=sum(received.values()),
            most_bytes=max(received.values()),
            samples_per_s=one.samples_per_s,
            done_per_s=one.samples_per_s * math.exp(-one.begins_s / model.between_losses_s),
            goodput=goodput,
        )
        for (received, _), one, goodput in zip(moved, prospects, worths(prospects), strict=True)
    ]


def _moved(
    model: Model, decision: Decision, holding: Mapping[str, Range]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that each worker receives, and sends."""
    workers, sizes = decision.workers, model.sizes
    holders: dict[int, list[int]] = {}
    for rank, worker in enumerate(workers):
        for section in holding[worker].sections if worker in holding else ():
            holders.setdefault(section, []).append(rank)
    received, sent = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)
    for one in transfers(holders, decision.plan.ranges):
        received[workers[one.destination]] += sizes[one.section]
        sent[workers[one.source]] += sizes[one.section]
    return received, sent


@dataclass(frozen=True)
class Death:
    """One or two VMs died. `ours` and `theirs`: decisions from the same state, measured."""

    model: Model
    seed: int
    before: Decision
    dead: tuple[str, ...]
    ours: tuple[Decision, Measured]
    theirs: tuple[Decision, Measured]

    def __str__(self) -> str:
        (our, we), (their, they) = self.ours, self.theirs
        parts = [
            f"seed {self.seed}, {self.model.name}: {self.before.plan.shape} loses {len(self.dead)}",
            f"{our.name} {our.plan.shape} beside {their.plan.shape}",
            f"goodput {we.goodput:.4f} beside {they.goodput:.4f}",
            f"{we.moved_bytes / 1e6:.0f} MB beside {they.moved_bytes / 1e6:.0f} MB",
        ]
        return "; ".join(parts)


def deaths(model: Model, seed: int) -> Iterator[Death]:
    """Of one job, from 12 to 24 workers down to the fewest for two pipelines, but at least six.

    After each death it goes on by our decision or by theirs, so that both meet what the other leaves. It ends
    where some section has no host left: then nobody re-forms.
    """
    draw = random.Random(seed)
    living = [f"w{number:02}" for number in range(draw.randint(12, MOST_WORKERS))]
    now = ours(model, None, living)
    while True:
        dead = tuple(draw.sample(living, draw.choice((1, 1, 2))))
        living = [worker for worker in living if worker not in dead]
        holding = {worker: span for worker, span in now.hosts.items() if worker in living}
        held = {section for span in holding.values() for section in span.sections}
        if len(living) < max(6, 2 * model.least) or len(held) < model.calibration.num_sections:
            return
        both = ours(model, now, living), theirs(model, now, living)
        we, they = measured(model, both, holding, len(living))
        yield Death(model, seed, now, dead, (both[0], we), (both[1], they))
        now = draw.choice(both)


def models() -> list[Model]:
    """Of sections that are alike, that shrink in time and grow in size, or that are drawn; with fast and slow
    links, and memory for a third or a quarter of the model."""
    draw = random.Random(7)
    transformer = _calibration([135, *[44] * 22, 140], [*[0.01] * 23, 0.03], 15, 690, 1.25e9)
    alike = _calibration([20] * 16, [0.02] * 16, 4, 100, 1.25e9)
    sizes, times = [0.5 * 1.25**n for n in range(20)], [0.04 * 0.93**n for n in range(20)]
    convolutions = _calibration(sizes, times, 8, 200, 1.25e8)
    sizes, times = [draw.uniform(5, 120) for _ in range(30)], [draw.uniform(0.004, 0.03) for _ in range(30)]
    drawn = _calibration(sizes, times, 10, 300, 1.25e10)
    return [
        Model("transformer", transformer, 48, _part(transformer, 3.0), 600.0),
        Model("alike", alike, 40, _part(alike, 3.5), 900.0),
        Model("convolutions", convolutions, 32, _part(convolutions, 2.5), 1800.0, tolerated_failures=0),
        Model("drawn", drawn, 60, _part(drawn, 4.0), 300.0),
    ]


def _calibration(
    sizes: Sequence[float], times: Sequence[float], cut_mib: int, activation_mib: int, bytes_per_s: float
) -> Calibration:
    """`sizes`: millions of parameters of each section, which Adam updates. `times`: of forwards."""
    parameters, num = [int(size * 1e6) for size in sizes], len(sizes)
    link = Link(latency_s=5e-4, bytes_per_s=bytes_per_s)
    return Calibration(
        forward_s=tuple(times),
        backward_s=tuple(2 * time_s for time_s in times),
        optimizer_s=tuple(28 * count / 900e9 for count in parameters),
        parameter_bytes=tuple(4 * count for count in parameters),
        gradient_bytes=tuple(4 * count for count in parameters),
        state_bytes=tuple(16 * count for count in parameters),
        activation_bytes=(activation_mib << 20,) * num,
        cut_bytes=(cut_mib << 20,) * (num - 1),
        grad_cut_bytes=(cut_mib << 20,) * (num - 1),
        inter_vm=link,
        intra_vm=link,
        device_kind="cuda",
        microbatch_size=SAMPLES,
        versions={"source": "made up"},
    )


def _part(calibration: Calibration, parts: float) -> int:
    """Memory for so many parts of the model, half of its largest section, and activations."""
    sizes = calibration.state_bytes
    return int(sum(sizes) / parts + max(sizes) / 2 + 8 * max(calibration.activation_bytes))
