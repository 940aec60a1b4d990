"""`GET /metrics` in Prometheus' text format, and `GET /healthz`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from ..service.quarantine import STATUS
from ..service.runtime import Job
from ..service.views.morphs import step_in_flight
from ..service.views.steps import measured_s, newest_step
from .auth import User, service_of

router = APIRouter(tags=["operations"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Answers while the manager serves requests. Needs no token, and reveals nothing."""
    return {"status": "ok"}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request, grant: User) -> Response:
    """Gauges and counters of the user's jobs, for an administrator of all; scrape with a token of either."""
    text = exposition(service_of(request).shown_to(grant.owner))
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def exposition(jobs: Sequence[Job]) -> str:
    """These jobs, in Prometheus' text format."""
    return "\n".join(_lines(jobs)) + "\n"


def _lines(shown: Sequence[Job]) -> Iterable[str]:
    counts = Counter(STATUS if job.set_aside else job.state.status.value for job in shown)
    yield from _family(
        "makara_jobs", "gauge", "Jobs by status", [({"status": k}, n) for k, n in counts.items()]
    )
    series: dict[str, list[tuple[dict[str, str], float]]] = {name: [] for name in _FAMILIES}
    for job in shown:
        for name, value in _values(job).items():
            if value is not None:
                series[name].append(({"job": job.job}, value))
    for name, (kind, about) in _FAMILIES.items():
        yield from _family(name, kind, about, series[name])


def _values(job: Job) -> dict[str, float | None]:
    """A job's gauges, computed without iterating over its steps or VMs."""
    state, last, seconds = job.state, job.recent[-1] if job.recent else None, measured_s(job)
    morphs = [g for g in (*state.history, state.current) if g is not None and g.formed_at is not None]
    in_flight = [step for morph in morphs if (step := step_in_flight(state, morph)) is not None]
    return {
        "makara_step": newest_step(state, last),
        "makara_steps": state.spec.training.steps if state.spec is not None else 0,
        "makara_loss": last.loss if last is not None and math.isfinite(last.loss) else None,
        "makara_samples_per_second": last.samples / seconds if last is not None and seconds else None,
        "makara_generation": state.current.number if state.current is not None else state.last_generation,
        "makara_live_vms": len(state.live_vms),
        "makara_morphs_total": len(morphs),
        "makara_lost_steps_total": sum(morph.lost_steps for morph in morphs),
        "makara_kept_micro_batches_total": sum(step.kept for step in in_flight),
        "makara_left_micro_batches_total": sum(step.left for step in in_flight),
        "makara_miscounts_total": state.miscounts,
        "makara_checkpoints": len(state.published),
        "makara_waiting": float(state.waiting is not None and state.ended is None),
    }


def _family(
    name: str, kind: str, about: str, samples: Iterable[tuple[dict[str, str], float]]
) -> Iterable[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        text = ",".join(
            f'{key}="{label}"' for key, label in labels.items()
        )  # ids and enums: nothing to escape
        yield f"{name}{{{text}}} {value:g}"


_FAMILIES = {
    "makara_step": ("gauge", "Committed steps"),
    "makara_steps": ("gauge", "Steps of the whole job"),
    "makara_loss": ("gauge", "Loss of the newest step"),
    "makara_samples_per_second": ("gauge", "Throughput over recent steps"),
    "makara_generation": ("gauge", "Open generation"),
    "makara_live_vms": ("gauge", "VMs requested and not ended"),
    "makara_morphs_total": ("counter", "Generations formed"),
    "makara_lost_steps_total": ("counter", "Steps that were done again after a morph"),
    "makara_kept_micro_batches_total": ("counter", "Micro-batches of cut-off steps that morphs kept"),
    "makara_left_micro_batches_total": (
        "counter",
        "Micro-batches of these steps that were left to do, whether lost or not begun before",
    ),
    "makara_miscounts_total": ("counter", "Attempts at steps that did not add up, see `step_miscounted`"),
    "makara_checkpoints": ("gauge", "Published checkpoints kept"),
    "makara_waiting": ("gauge", "1 while the job waits for a person"),
}
