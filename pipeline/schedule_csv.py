"""Orders of operations as CSV, in the format of `torch.distributed.pipelining`'s compute-only schedules."""

from __future__ import annotations

import csv
import io

from .operations import Kind, Operation
from .schedules import InvalidOrder, Orders


def to_csv(orders: Orders, *, recompute: bool = True) -> str:
    """Write one row per rank. `recompute=False` leaves out R, which PyTorch's reader does not know."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for listed in orders:
        writer.writerow([str(task) for task in listed if recompute or task.kind is not Kind.RECOMPUTE])
    return text.getvalue()


def from_csv(text: str) -> Orders:
    """Read what `to_csv` wrote; empty cells are idle time and are skipped.

    Raises `InvalidOrder` naming row and column (from 1) of a cell that is not an operation or repeats one.
    """
    seen: dict[Operation, str] = {}
    result: list[tuple[Operation, ...]] = []
    for row, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        listed: list[Operation] = []
        for column, cell in enumerate(cells, start=1):
            if not cell.strip():
                continue
            place = f"row {row}, column {column}"
            try:
                task = Operation.parse(cell)
            except ValueError as error:
                raise InvalidOrder(f"{place}: {error}") from error
            if task in seen:
                raise InvalidOrder(f"{place}: {task} occurs already in {seen[task]}")
            seen[task] = place
            listed.append(task)
        result.append(tuple(listed))
    return tuple(result)
