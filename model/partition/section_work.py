"""The counted work of each section, which all who trace a model know alike."""

from __future__ import annotations

from .flops import compute_nodes, work_per_node
from .partitioned_model import Sections
from .places import spans


def work_per_section(sections: Sections) -> tuple[int, ...]:
    """Forward work of each section in floating-point operations, at least 1."""
    traced = sections.traced
    counted = work_per_node(compute_nodes(traced.graph), traced.precision)
    return tuple(
        max(1, round(sum(counted[start:stop]))) for start, stop in spans(sections.cuts, len(counted))
    )
