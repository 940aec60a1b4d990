"""`makara machines`: lists the machines that joined, and what each is doing."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table

from ..client import connect
from ..show import day_and_time, print_table


def machines(options: argparse.Namespace) -> int:
    with connect(options) as client:
        answer = client.get("/machines")
    if options.json:
        print(json.dumps(answer))
        return 0
    table = Table("MACHINE", "NAME", "CPUS", "MEMORY", "JOINED", "NOW", box=None, pad_edge=False)
    for machine in answer["machines"]:
        memory = f"{machine['memory_bytes'] / 1e9:.1f} GB"
        joined = day_and_time(machine["joined_at"])
        cpus = str(machine["num_cpus"])
        table.add_row(machine["machine"], machine["name"], cpus, memory, joined, _now(machine))
    print_table(table)
    return 0


def _now(machine: dict[str, Any]) -> str:
    leased = machine["vm"] or machine.get("leased")
    vm = f"VM {machine['vm']}" if machine["vm"] else "another user's VM" if leased else "free"
    if machine["unwiped"]:
        return f"not free, it cannot be wiped: {machine['unwiped']}"
    if machine["connected"]:
        return f"{vm}, leaving" if machine["leaving"] else vm
    away = f"away since {day_and_time(machine['seen_at'])}"
    return f"{away}, {vm}" if leased else away
