"""`makara plan`: prints facts about a job, its plans for a number of VMs by speed, and why the best wins."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...morphing import Candidate, Infeasible
from ...simulator import Calibration, simulate
from ...simulator.timeline import Timeline, chrome_trace, timeline_of
from ...simulator.timeline import draw as draw_timeline
from ..replay import Prices
from ..service.planning.deaths import after_a_death
from ..service.planning.ranking import Ranking, rank
from ..spec.job_file import read_job, read_spec
from ..spec.job_spec import JobSpec
from ..spec.reading import BadFile, write_file
from .calibration.source import CalibrationSource, of_file, of_manager, of_this_machine
from .client import Unreachable
from .parsing.option_types import path, positive, size
from .parsing.suggestions import Parser
from .plan_text import PricedVms, report, request
from .progress import counted
from .stages import Stages, writer
from .warm_up import wait_for_code

_WRITERS: dict[str, Callable[[Timeline], str]] = {".svg": draw_timeline, ".json": chrome_trace}


class NoPlan(ValueError):
    """There is no plan for these VMs; the message says why."""


def add_arguments(command: Parser) -> None:
    """The options of `makara plan`."""
    command.add_job_file()
    command.add_argument("--nodes", type=positive, metavar="N", help="VMs (default: max_nodes)")
    command.add_argument(
        "--devices-per-node", type=positive, metavar="N", help="workers on each (default: workers_per_node)"
    )
    command.add_argument(
        "--device-memory",
        type=size,
        metavar="SIZE",
        help="of each worker, as 16GB (default: the job file's)",
    )
    command.add_argument(
        "--calibration",
        type=path,
        help="of the model (JSON). Default: of the newest such job of the manager, else measured here. With "
        "it the job's code is not looked at",
    )
    command.add_argument("--skip-comparison", action="store_true", help="as `makara check` takes it")
    command.add_argument("--measure", action="store_true", help="measure here, whatever the manager knows")
    command.add_argument(
        "--seconds", type=float, default=20.0, help="how long to measure, about (%(default)g)"
    )
    command.add_argument("--spot-price", type=float, help="of a VM and hour")
    command.add_argument("--on-demand-price", type=float, help="of a VM and hour")
    command.add_argument(
        "--timeline", type=path, metavar="FILE", help="one step of the best plan: .svg, or .json for Perfetto"
    )
    command.add_argument("--rows", type=positive, default=12, help="how many plans are shown (%(default)s)")


def plan(options: argparse.Namespace) -> int:
    """Check, calibrate, choose, print, draw.

    Raises `JobSpecError`, `UserCodeRefused`, `BadFile`, `NoPlan`.
    """
    prices = Prices(spot=options.spot_price, on_demand=options.on_demand_price)
    timeline: Path | None = options.timeline
    writer = None if timeline is None else _writer(timeline)
    spec, model, source = _job(options)
    cluster = PricedVms(
        num_vms=options.nodes or spec.resources.max_nodes,
        workers_per_vm=options.devices_per_node or spec.resources.workers_per_node,
        memory_bytes=options.device_memory or spec.resources.device_memory,
        prices=prices,
    )
    calibration = source.calibration(spec, cluster.memory_bytes, cluster.num_workers)
    if not options.json:
        for line in (*_described(spec, model), ""):
            print(line)
    print(f"planning for {counted(cluster.num_vms, 'VM')} ...", file=sys.stderr)
    wait_for_code()
    question = request(spec, calibration, cluster)
    ranking = rank(question, options.rows)
    if isinstance(ranking, Infeasible):
        raise NoPlan(f"there is no plan for {cluster.num_vms} VMs: {ranking.reason}")
    if timeline is not None and writer is not None:
        write_file(timeline, writer(_timeline(spec, calibration, cluster, ranking)))
    choice = ranking.choice
    after_death = after_a_death(question, choice.plan, choice.workers, choice.predicted_s)
    if options.json:
        print(json.dumps({**_json(spec, model, source, cluster, ranking), "after_a_death": after_death}))
        return 0
    for line in report(ranking, spec, calibration, cluster, source.where, after_death):
        print(line)
    if timeline is not None:
        print(f"timeline: {timeline}")
    return 0


# ---- the job and its calibration ---------------------------------------------------------------------------


def _job(options: argparse.Namespace) -> tuple[JobSpec, dict[str, Any] | None, CalibrationSource]:
    """(specification, facts about its model if its code was tried, its measurements)."""
    if options.calibration is not None:
        return read_spec(options.file), None, of_file(options.calibration)
    from .apply import check_code  # here, because most plans use an existing calibration

    spec, workdir = read_job(options.file)
    with Stages(writer(options)) as stages:
        model = check_code(spec, workdir, compare=not options.skip_comparison, begin=stages.begin)
        stages.begin("looking for a calibration, or measuring the model")
        return spec, model, _measured(options, spec, workdir)


def _measured(options: argparse.Namespace, spec: JobSpec, workdir: Path) -> CalibrationSource:
    if not options.measure:
        try:
            known = of_manager(options, spec.name)
        except Unreachable:  # a plan needs no manager
            known = None
        if known is not None:
            return known
    return of_this_machine(spec, workdir, options.seconds)


# ---- what is written ---------------------------------------------------------------------------------------


def _writer(path: Path) -> Callable[[Timeline], str]:
    if path.suffix not in _WRITERS:
        raise BadFile(f"{path}: expected a name that ends in {' or '.join(_WRITERS)}")
    return _WRITERS[path.suffix]


def _timeline(spec: JobSpec, calibration: Calibration, cluster: PricedVms, ranking: Ranking) -> Timeline:
    chosen = ranking.choice.plan
    if chosen.optimizer_on_host:
        calibration = calibration.with_optimizer_on_host()
    vm_of = [worker.partition(".")[0] for worker in ranking.choice.workers]
    step = simulate(chosen, calibration, vm_of=vm_of)
    return timeline_of(chosen, step, job=spec.name, microbatch_size=calibration.microbatch_size, vm_of=vm_of)


def _described(spec: JobSpec, model: dict[str, Any] | None) -> list[str]:
    training = spec.training
    steps = f"{training.steps} steps of {training.global_batch_size} samples, numerics {training.numerics}"
    if model is None:
        return [f"{spec.name}: {steps}"]
    from .check import notes, summary

    lines = [f"{spec.name}: {model['num_parameters']:,} parameters in {model['num_sections']} sections"]
    if model["shared_parameters"]:
        lines.append(f"shared between sections: {', '.join(model['shared_parameters'])}")
    return [*lines, steps, *notes(model), summary(model)]


def _json(
    spec: JobSpec,
    model: dict[str, Any] | None,
    source: CalibrationSource,
    cluster: PricedVms,
    ranking: Ranking,
) -> dict[str, Any]:
    batch = spec.training.global_batch_size

    def row(candidate: Candidate) -> dict[str, Any]:
        return {
            **asdict(candidate),
            "workers_used": candidate.used,
            "workers_idle": cluster.num_workers - candidate.used,
            "samples_per_s": batch / (candidate.predicted_s or 1),
            "spot_per_million_samples": cluster.per_million(candidate, batch, cluster.prices.spot),
            "on_demand_per_million_samples": cluster.per_million(candidate, batch, cluster.prices.on_demand),
        }

    return {
        "spec": spec.model_dump(mode="json"),
        "model": model,
        "calibration": source.where,
        "cluster": asdict(cluster),
        "why": ranking.why,
        "rows": [row(candidate) for candidate in ranking.rows],
        "num_slower": ranking.num_slower,
        "no_plan": [{"pipeline_parallel_degree": p, "reason": why} for p, why in ranking.refused],
        "plan": ranking.choice.plan.to_json(),
    }
