"""Divides what is left to measure among workers: each computes the same shares, so that nobody deals them."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace

from ...protocol.survey import Survey
from ...simulator.calibration.assembly import left


@dataclass(frozen=True, slots=True)
class Share:
    """Sections for one worker to measure, for micro-batches of m."""

    microbatch_size: int
    sections: tuple[int, ...]


def shares(survey: Survey, done: Set[tuple[int, int]], num_shares: int) -> list[Share]:
    """Divide what is left to measure into shares of at most 1/`num_shares` each, the most likely m first. A
    share has one m, so that its worker traces the model once."""
    likely = survey.recipe.microbatch_size
    layouts = sorted(
        survey.layouts, key=lambda layout: (layout.microbatch_size != likely, layout.microbatch_size)
    )
    missing = [(layout.microbatch_size, section) for layout in layouts for section in left(layout, done)]
    each = -(-len(missing) // num_shares)
    found: list[Share] = []
    for m, section in missing:
        if found and found[-1].microbatch_size == m and len(found[-1].sections) < each:
            found[-1] = replace(found[-1], sections=(*found[-1].sections, section))
        else:
            found.append(Share(m, (section,)))
    return found


SHARE_S = 25.0  # target time for the shares of one worker, in seconds
_PARTS = 4  # of measuring a section: forward with backward, their memory, the optimizer, making it


def section_time_s(seconds: float, num_sections: int) -> float:
    """The budget in seconds for each part of measuring a section, if `num_sections` share `seconds`."""
    return seconds / max(1, num_sections) / _PARTS
