"""Models drawn from transformers, timm, diffusers and peft, each checked beside its own eager module.

Each model is checked by a process of its own, with bounds on its memory and CPU seconds. A model that plain
PyTorch cannot build or step, or whose check exceeds the CPU seconds, is
left out and named; another one is drawn.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .drawn import declare_operators
from .report import Row

TITLE = "models of other libraries: sections, and the largest difference to the eager module"
LIBRARIES = {"transformers": 8, "timm": 4, "peft": 3, "diffusers": 2}
"""{library: how often it is drawn}."""
CPU_S = 60
MEMORY_BYTES = 12 << 30  # of addresses: torch alone maps some gigabytes
_REQUIRED = ("transformers", "timm", "peft", "diffusers", "accelerate", "torchvision", "PIL", "requests")
_PACKAGES = "transformers timm peft diffusers accelerate torchvision pillow requests importlib_metadata zipp"
_SAID = 300  # characters of a refusal in the table


def rows(seed: str = "0", count: int = 60) -> list[Row]:
    """A row for each of `count` models, drawn by `seed`."""
    _require_libraries()
    declare_operators()
    found: list[Row] = []
    for library, name in _drawn(seed):
        answer, cpu_s = _check(library, name)
        if answer["outcome"] == "not drawn":
            print(f"left out: {library} {name}: {answer['said'][:_SAID]}", file=sys.stderr, flush=True)
            continue
        found.append(_row(library, name, answer, cpu_s))
        print(*found[-1].values(), sep="  ", file=sys.stderr, flush=True)
        if len(found) == count:
            break
    return found


def _row(library: str, name: str, answer: dict[str, Any], cpu_s: float) -> Row:
    return {
        "model": f"{library} {name}",
        "K": answer.get("sections", ""),
        "difference": answer.get("difference", ""),
        "CPU s": round(cpu_s, 1),
        "outcome": answer["outcome"],
        "said": " ".join(answer["said"].split())[:_SAID],
    }


def _drawn(seed: str) -> Iterator[tuple[str, str]]:
    """(library, name) without end or repetition, until all are drawn."""
    generator = random.Random(seed)
    left = {library: _names(library) for library in LIBRARIES}
    while any(left.values()):
        libraries = [library for library in LIBRARIES if left[library]]
        library = generator.choices(libraries, [LIBRARIES[one] for one in libraries])[0]
        yield library, left[library].pop(generator.randrange(len(left[library])))


def _names(library: str) -> list[str]:
    module = importlib.import_module(f".drawn.of_{library}", __package__)
    return sorted(module.names())


def _check(library: str, name: str) -> tuple[dict[str, Any], float]:
    """What the process said, and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.drawn", library, name],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        preexec_fn=_bound,
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = ended.stdout.strip().splitlines()
    if ended.returncode == 0 and lines:
        return json.loads(lines[-1]), cpu_s
    if cpu_s >= CPU_S - 1:
        return {"outcome": "not drawn", "said": f"more than {CPU_S} CPU s"}, cpu_s
    said = ended.stderr.strip().splitlines()
    return {"outcome": "crashed", "said": f"exit status {ended.returncode}: {' '.join(said[-1:])}"}, cpu_s


def _bound() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _require_libraries() -> None:
    if missing := [name for name in _REQUIRED if importlib.util.find_spec(name) is None]:
        raise SystemExit(
            f"models: {', '.join(missing)} not installed. They are no dependencies of Makara's: "
            f"pip install --no-deps {_PACKAGES}"
        )
