"""`python -m benchmarks.drawn LIBRARY NAME`: check one model; the last line of the output is JSON.

It has no bound of its own: `benchmarks.models` bounds the process.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from makara.model.data import Batches
from makara.model.errors import UntraceableModel, UserCodeError
from makara.model.tracebacks import first_line
from makara.worker import Training
from makara.worker.check.check import CheckSettings, check

from . import declare_operators

_MICRO_BATCH = 2


def main() -> None:
    library, name = sys.argv[1:]
    torch.set_num_threads(1)
    declare_operators()
    torch.manual_seed(0)
    try:
        training: Training = importlib.import_module(f"benchmarks.drawn.of_{library}").training(name)
        _plain_step(training)
    except Exception as error:  # whatever it is: another model is drawn
        answer = {"outcome": "not drawn", "said": f"{type(error).__name__}: {first_line(error)}"}
    else:
        answer = _checked(training)
    print(json.dumps(answer))


def _plain_step(training: Training) -> None:
    """A step as the user would write it; raises what torch or the library raises."""
    model: Any = training.model()
    model.train()
    batch = dict(Batches(training.dataset(), 0, _MICRO_BATCH, _MICRO_BATCH).micro_batch(0, 0))
    given = {name: value for name, value in batch.items() if " " not in name}
    loss: Any = training.loss(model(**given), batch)
    loss.backward()
    if not math.isfinite(float(loss)):
        raise ValueError("the loss is not finite")


def _checked(training: Training) -> dict[str, Any]:
    try:
        found = check(training, CheckSettings(microbatch_size=_MICRO_BATCH), Path("/nowhere"))
    except (UserCodeError, UntraceableModel) as error:
        return {"outcome": "refused", "said": str(error)}
    except Exception as error:  # an internal error is what this is looking for
        return {"outcome": "internal error", "said": f"{type(error).__name__}: {first_line(error)}"}
    findings = [finding["text"] for finding in found["findings"]]
    return {
        "outcome": "differs" if findings else "trains",
        "sections": found["num_sections"],
        "difference": max(found["largest_differences"].values(), default=0.0),
        "said": " | ".join(findings),
    }


if __name__ == "__main__":
    main()
