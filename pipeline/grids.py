"""Varuna's P×D grid as a plan, and how micro-batches are dealt to pipelines."""

from __future__ import annotations

from collections.abc import Sequence

from .plan import Hop, InvalidPlan, Path, Plan, Range, Schedule


def grid(
    stages: Sequence[Range],
    replicas: int,
    num_micro_batches: int,
    *,
    schedule: Schedule = Schedule.VARUNA,
    window: int | None = None,
    recompute: bool = False,
    generation: int = 0,
    optimizer_on_host: bool = False,
    frozen: int = 0,
    halves: bool = False,
    shares: Sequence[int] | None = None,
) -> Plan:
    """Varuna's P×D grid: `replicas` copies of the same P ranges; worker d·P+p hosts stage p of replica d.

    Micro-batch i goes to replica i mod D, so N need not be divisible by D: some paths carry one more. With
    `shares`, replica d takes `shares[d]` micro-batches instead, dealt round-robin among the replicas that
    still lack some. Raises `InvalidPlan` when a replica would get no micro-batch, or the shares do not add up
    to N.
    """
    depth = len(stages)
    if not 1 <= replicas <= num_micro_batches:
        raise InvalidPlan(
            f"replicas: {replicas} is not in 1..{num_micro_batches} (the number of micro-batches)"
        )
    paths = tuple(
        Path(
            tuple(Hop(replica * depth + stage, span) for stage, span in enumerate(stages)),
            micro_batches,
        )
        for replica, micro_batches in enumerate(dealt(_shares(replicas, num_micro_batches, shares)))
    )
    return Plan(
        num_sections=stages[-1].stop if stages else 0,
        num_micro_batches=num_micro_batches,
        ranges=tuple(stages) * replicas,
        paths=paths,
        schedule=schedule,
        window=window,
        recompute=recompute,
        generation=generation,
        optimizer_on_host=optimizer_on_host,
        frozen=frozen,
        halves=halves,
    )


def _shares(replicas: int, num_micro_batches: int, shares: Sequence[int] | None) -> Sequence[int]:
    if shares is None:
        each, more = divmod(num_micro_batches, replicas)
        return [each + (replica < more) for replica in range(replicas)]
    if len(shares) != replicas or sum(shares) != num_micro_batches or min(shares) < 1:
        raise InvalidPlan(
            f"shares: expected {replicas}, each at least 1, that add up to {num_micro_batches}, got {shares}"
        )
    return shares


def dealt(shares: Sequence[int]) -> list[tuple[int, ...]]:
    """The micro-batches of each pipeline, dealt round-robin among those that still lack some."""
    turns = sorted((turn, pipeline) for pipeline, share in enumerate(shares) for turn in range(share))
    taken: list[list[int]] = [[] for _ in shares]
    for micro_batch, (_, pipeline) in enumerate(turns):
        taken[pipeline].append(micro_batch)
    return [tuple(numbers) for numbers in taken]
