"""Buckets: gradients that are all-reduced together, and the workers over which they are.

A bucket is the trainable parameters used by the same sections, and the buffers of these sections that
training changes. Its hosts are the workers that host any of those sections; buckets with the same hosts share
a process group. All workers go through the buckets in one order, so that collectives of different groups
cannot deadlock: in the order of their section (`pipeline.sum_order`), then those of several sections by the
lowest, descending.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...model.partition.partition import Sections
from ...pipeline.plan import Plan
from ...pipeline.sum_order import sum_order


@dataclass(frozen=True, slots=True)
class Bucket:
    """`names`: trainable parameters, canonical, in the model's order, used by exactly `sections`; `buffers`:
    those of them that training changes."""

    sections: tuple[int, ...]
    names: tuple[str, ...]
    hosts: tuple[int, ...]
    buffers: tuple[str, ...] = ()

    @property
    def norm_rank(self) -> int:
        """The host that contributes these parameters' norms to the commit."""
        return self.hosts[0]


def buckets(sections: Sections, plan: Plan) -> list[Bucket]:
    """All buckets of the model under `plan`, in the order in which their collectives are issued."""
    names: dict[tuple[int, ...], list[str]] = {}
    for name in sections.trainable_names:
        used = tuple(section.index for section in sections.sections if name in section.parameters)
        names.setdefault(used, []).append(name)
    buffers: dict[tuple[int, ...], list[str]] = {}
    for name in sections.updated_buffers:
        used = tuple(section.index for section in sections.sections if name in section.buffers)
        buffers.setdefault(used, []).append(name)
    return [
        Bucket(used, tuple(names.get(used, ())), _hosts(plan, used), tuple(buffers.get(used, ())))
        for used in _ordered({*names, *buffers}, plan)
    ]


def _ordered(every: Collection[tuple[int, ...]], plan: Plan) -> list[tuple[int, ...]]:
    alone = [(section,) for section in sum_order(plan) if (section,) in every]
    return alone + sorted((used for used in every if len(used) > 1), reverse=True)


def _hosts(plan: Plan, sections: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({worker for section in sections for worker in plan.hosts(section)}))
