"""Orders of operations as a CSV file, as `torch.distributed.pipelining` writes and reads them."""

from __future__ import annotations

import csv
import io

from .operations import Kind, Operation
from .schedules import InvalidOrder, Orders


def to_csv(orders: Orders, *, recompute: bool = True) -> str:
    """One row per rank, as `torch.distributed.pipelining` reads its compute-only schedules.

    PyTorch knows no R (it recomputes inside the module); `recompute=False` leaves it out for that reader.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for listed in orders:
        writer.writerow([str(task) for task in listed if recompute or task.kind is not Kind.RECOMPUTE])
    return text.getvalue()


def from_csv(text: str) -> Orders:
    """Reads what `to_csv` wrote; empty cells are idle time and are skipped.

    Raises `InvalidOrder` naming row and column (from 1) of a cell that is no operation or that repeats one.
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
