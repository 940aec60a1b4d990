"""Writes the table of strikes into docs/faults.md: `python -m makara.manager.core.strikes.page`."""

from __future__ import annotations

import math
from pathlib import Path

from .table import TABLE, Kind, Progress, Row

PAGE = Path(__file__).parents[3] / "docs" / "faults.md"
_BEGIN, _END = "<!-- strikes: begin -->\n", "<!-- strikes: end -->\n"
_HEAD = "| kind | a strike: | of | together | pause, s | strikes | what follows | what forgives | kept |"


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(with_table(PAGE.read_text()))


def with_table(page: str) -> str:
    """The page with the table as it is in the code."""
    before, _, rest = page.partition(_BEGIN)
    _, found, after = rest.partition(_END)
    assert found, f"{PAGE} has the marks between which the table stands"
    lines = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|", *(_line(kind, row) for kind, row in TABLE.items())]
    return before + _BEGIN + "\n".join(lines) + "\n" + _END + after


def _line(kind: Kind, row: Row) -> str:
    strikes = f"{row.limit}" if row.limit is not None else "–"
    forgiven = "; ".join(progress for progress in Progress if progress in row.forgiven_by) or "nothing"
    if row.forgotten_s < math.inf:
        forgiven = f"none for {row.forgotten_s:g} s"
    cells = (f"`{kind}`", row.what, row.subject, _together(row), _pause(row), strikes, row.follows, forgiven)
    cells = (*cells, "journal" if row.journalled else "memory")
    return f"| {' | '.join(cells)} |"


def _together(row: Row) -> str:
    if row.seen_again:
        return "the same one, seen again"
    if row.under_way:
        return "what was under way when it came"
    return f"within {row.together_s:g} s of the first" if row.together_s else "–"


def _pause(row: Row) -> str:
    if not row.first_s:
        return "–"
    free = "0, then " if row.num_free else ""
    if row.factor == 1.0:
        return f"{free}{row.first_s:g}"
    return f"{free}{row.first_s:g}, times {row.factor:g} each, to {row.longest_s:g}"


if __name__ == "__main__":
    main()
