"""`GET /api/v1/jobs/{job}/plan`: the running plan, predicted and measured, and its alternatives."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel

from ...morphing import Candidate, Infeasible
from ...morphing import Request as Question
from ...pipeline import Plan
from ..core import worth
from ..core.slots import slot_of
from ..core.state import Generation
from ..service.planning.deaths import after_a_death
from ..service.planning.ranking import Ranking, rank
from ..service.planning.requests import request_of
from ..service.runtime import Job
from ..service.service import Service
from ..service.views.steps import measured_s
from ..threads import CallKind, Threads
from .auth import service_of
from .job_names import AskedJob

_MOST_ROWS = 12

router = APIRouter(prefix="/api/v1", tags=["jobs"])


class PlanRow(BaseModel):
    """The best plan at one P, with predicted seconds and bytes. `lost`: seconds that deaths which leave a
    section without a host are expected to cost, for each second of steps; `running`: its shape is the running
    one."""

    shape: str
    pipeline_parallel_degree: int
    data_parallel_degree: int
    workers_used: int
    workers_idle: int
    predicted_s: float
    samples_per_s: float
    window: int | None
    recompute: bool
    halves: bool
    optimizer_on_host: bool
    peak_bytes: int | None
    lost: float
    running: bool


class PlanView(BaseModel):
    """The running plan, and the ranking for the current workers; the first row is the planner's choice, `why`
    explains it. `after_a_death`: what the death of a VM costs the running plan; empty if its steps were not
    predicted. `no_plan` names depths without a plan; `num_slower` counts those slower than all rows."""

    generation: int
    shape: str
    window: int | None
    recompute: bool
    halves: bool
    optimizer_on_host: bool
    predicted_s: float | None
    measured_s: float | None
    workers: int
    rows: list[PlanRow]
    num_slower: int
    no_plan: dict[int, str]
    why: str
    after_a_death: str


@router.get("/jobs/{job}/plan")
async def plan(job: AskedJob, request: Request) -> PlanView:
    """The running plan, and what the planner would choose for each P with the current workers."""
    current = job.state.current
    if current is None or job.state.calibration is None:
        raise HTTPException(404, f"plan: job {job.job} runs no plan")
    service = service_of(request)
    plan, question = Plan.from_json(current.plan), _question(job, service)
    ranking, after_death = await _explained(service.threads, job, question, current)
    return PlanView(
        generation=current.number,
        shape=current.shape,
        window=plan.window,
        recompute=plan.recompute,
        halves=plan.has_halves,
        optimizer_on_host=plan.optimizer_on_host,
        predicted_s=current.predicted_s,
        measured_s=measured_s(job),
        workers=len(question.workers),
        rows=_rows(ranking, question, current, plan),
        num_slower=0 if isinstance(ranking, Infeasible) else ranking.num_slower,
        no_plan={} if isinstance(ranking, Infeasible) else dict(ranking.refused),
        why=ranking.reason if isinstance(ranking, Infeasible) else ranking.why,
        after_a_death=after_death,
    )


def _question(runtime: Job, service: Service) -> Question:
    """The planner's question about the open generation's workers and those that wait."""
    state, current = runtime.state, runtime.state.current
    assert current is not None, "something runs"
    incarnations = dict.fromkeys((*current.incarnations, *sorted(runtime.observations.usable)))
    workers = tuple(slot_of(state, worker) for worker in dict.fromkeys(worker for worker, _ in incarnations))
    risk = worth.risk(state, service.clock(), service.timing)
    return request_of(state, workers, current.number, risk)


async def _explained(
    threads: Threads, runtime: Job, question: Question, current: Generation
) -> tuple[Ranking | Infeasible, str]:
    """The ranking, and what a death costs the running plan. Found in a thread, as it takes a sweep for each
    P; cached by all that it depends on."""
    key = (question.calibration, tuple(question.workers), question.risk, current.number)
    async with runtime.ranking_lock:
        if runtime.ranking is None or runtime.ranking[0] != key:
            runtime.ranking = key, await threads.run(CallKind.RANKING, _explain, question, current)
        return runtime.ranking[1]


def _explain(question: Question, current: Generation) -> tuple[Ranking | Infeasible, str]:
    ranking = rank(question, _MOST_ROWS)
    if current.predicted_s is None:
        return ranking, ""
    workers = [worker for worker, _ in current.incarnations]
    return ranking, after_a_death(question, Plan.from_json(current.plan), workers, current.predicted_s)


def _rows(
    ranking: Ranking | Infeasible, question: Question, current: Generation, plan: Plan
) -> list[PlanRow]:
    """The rows; one is the running plan, even if it is not a grid, or was chosen for other workers."""
    batch = question.num_micro_batches * question.calibration.microbatch_size

    def row(candidate: Candidate, name: str, used: int) -> PlanRow:
        assert candidate.predicted_s is not None, "only what was simulated is ranked"
        return PlanRow(
            **asdict(candidate),
            shape=name,
            workers_used=used,
            workers_idle=len(question.workers) - used,
            samples_per_s=batch / candidate.predicted_s,
            running=name == current.shape,
        )

    ranked = () if isinstance(ranking, Infeasible) else ranking.rows
    rows = [row(candidate, candidate.shape, candidate.used) for candidate in ranked]
    if current.predicted_s is not None and not any(row.running for row in rows):
        running = Candidate(
            pipeline_parallel_degree=max(len(path.hops) for path in plan.paths),
            data_parallel_degree=len(plan.paths),
            recompute=plan.recompute,
            halves=plan.has_halves,
            optimizer_on_host=plan.optimizer_on_host,
            window=plan.window,
            predicted_s=current.predicted_s,
        )
        rows.append(row(running, current.shape, plan.num_workers))
    return rows
