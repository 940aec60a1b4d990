"""How a part of the benchmarks is shown and kept: one table, and one JSON file without dates."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import torch
from makara.worker.profiling.subject import device_name
from rich.console import Console
from rich.table import Table

Row = Mapping[str, str | int | float | bool]
_MOST_COLUMNS = 5
_FILE_WIDTH = 240  # columns where nobody's terminal is: cut cells would tell nothing
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str | int]:
    """The hardware's name and the versions that figures depend on."""
    memory_gib = round(psutil.virtual_memory().total / 2**30)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "hardware": f"{device_name(torch.device('cpu'))}, {memory_gib} GiB, {gpu}",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def show(part: str, title: str, rows: Sequence[Row]) -> None:
    """Print the rows as a table; the first row's keys are the columns, or the lines where they are many and
    there are fewer rows."""
    names = list(rows[0])
    cells = [[_text(value) for value in row.values()] for row in rows]
    if len(names) <= max(_MOST_COLUMNS, len(rows)):
        table = Table(*names, title=f"{part}: {title}", title_justify="left")
    else:
        table = Table(title=f"{part}: {title}", title_justify="left", show_header=False)
        cells = [list(line) for line in zip(names, *cells, strict=True)]
    for line in cells:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)


def save(part: str, title: str, rows: Sequence[Row]) -> None:
    """Write benchmarks/results/<part>.json."""
    RESULTS.mkdir(exist_ok=True)
    report = {"title": title, "machine": machine(), "rows": list(rows)}
    (RESULTS / f"{part}.json").write_text(json.dumps(report, indent=2) + "\n")


def _text(value: str | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
