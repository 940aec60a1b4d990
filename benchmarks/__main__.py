"""`python -m benchmarks [part...]`: each part prints a table and writes benchmarks/results/<part>.json.

Without names, all parts run that the machine can, in the order below, except `models`, which needs further
libraries. A part is a module with `TITLE` and `rows()`; it is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from pathlib import Path

import torch

from .report import save, show

PARTS = {
    "trace_big": "the paper's 2.5-billion-parameter GPT-2, traced and cut (half a minute)",
    "planning": "what planning and gradient sums cost (half a minute)",
    "sizes": "planning for 24 to 10,000 workers, by what they are like (1 minute)",
    "failures": "plans for every number of failures, templates for every number of VMs (3 minutes)",
    "replay": "a whole job over an availability trace, a month, a thousand VMs (1 minute)",
    "markets": "every policy over made-up markets, beside the chooser (an hour; --quick: 3 minutes)",
    "manager": "a manager with 250 to 2,000 VMs in one job, 10,000 ever, through sockets (8 minutes)",
    "page": "the page of a job of 300,000 steps: bytes, processor time, memory (1 minute)",
    "past": "what VMs and generations that are over take of a manager's memory (seconds)",
    "clouds": "a manager that rents 150 VMs for three jobs from a stand-in of AWS (an hour, or --minutes)",
    "networks": "GPipe and Varuna, deep and shallow pipelines over slower networks, simulated (seconds)",
    "hashing": "what comparing the state of replicas costs (1 minute)",
    "overhead": "what the executor costs for each operation (1 minute)",
    "throughput": "against torch.distributed.pipelining, undisturbed (6 minutes)",
    "schedules": "against each schedule of torch.distributed.pipelining, over slower wires too (20 minutes)",
    "memory": "peak resident memory of trainers, and as predicted (5 minutes)",
    "predictions": "steps of up to 24 emulated workers, as predicted and as measured (5 minutes)",
    "unequal": "unequal pipelines of thirteen workers beside the best grid, as measured (8 minutes)",
    "choices": "whether the plan that is chosen is the fastest of all, as measured (25 minutes)",
    "halves": "I and W of transformer blocks, beside the whole backward (2 minutes)",
    "slots": "pipelines of SlipStream's figures, whole and rerouted, in slots (2 minutes)",
    "morphs": "from a death to the next operation, rerouted, from peers, from the store (3 minutes)",
    "goodput": "policies on a spot market of a few minutes, real processes beside a replay (half an hour)",
    "rests": "a death within a long step: the rest of it, as simulated and as measured (10 minutes)",
    "links": "the same over emulated links, and the simulation (3 minutes)",
    "models": "models drawn from four libraries by --seed, beside eager (--count 60: 20 minutes)",
    "gpu": "trainers on a GPU beside plain PyTorch, if there is one (3 minutes)",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure, side by side in one run.",
        epilog="\n".join(f"{name}: {what}" for name, what in PARTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=60.0, help="how long `clouds` watches")
    parser.add_argument("--quick", action="store_true", help="of `markets` a few; nothing is written")
    parser.add_argument("--seed", default="0", help="draws the models of `models`")
    parser.add_argument("--count", type=int, default=60, help="how many models `models` checks")
    arguments = parser.parse_args()
    everything = [part for part in PARTS if part != "models" and (part != "gpu" or torch.cuda.is_available())]
    parts: list[str] = arguments.parts or everything
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"part: {unknown[0]!r} is none of {', '.join(PARTS)}")
    torch.set_num_threads(1)
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    for part in parts:
        module = importlib.import_module(f".{part}", __package__)
        given = {
            "clouds": {"minutes": arguments.minutes},
            "markets": {"quick": arguments.quick},
            "models": {"seed": arguments.seed, "count": arguments.count},
        }
        rows = module.rows(**given.get(part, {}))
        for _, alike in itertools.groupby(rows, key=list):  # one table for all rows with the same columns
            show(part, module.TITLE, list(alike))
        if not (part == "markets" and arguments.quick):
            save(part, module.TITLE, rows)


if __name__ == "__main__":
    main()
