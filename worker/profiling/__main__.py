"""`python -m makara.worker.profiling FOLDER SETTINGS SECONDS`: a job's model, measured on this machine.

SETTINGS are `JobSettings` as JSON. Prints one line of JSON and exits with 0: `{"measurements": {...}}`, or
`{"error": ..., "traceback": ..., "whole_traceback": ...}` when the user's code is at fault. It is a process
of its own, so that whatever that code does happens there.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

from ...model.errors import UntraceableModel, UserCodeError
from ...model.tracebacks import whole
from ...model.training import load_entrypoint
from ...protocol.answers import write_answer
from ...protocol.messages import JobSettings
from .profiling import measure


def main() -> None:
    folder, settings, seconds = sys.argv[1:]
    job = JobSettings.model_validate_json(settings)
    answer: dict[str, Any]
    with contextlib.redirect_stdout(sys.stderr):  # the user's code may print; the answer stands alone
        try:
            found = measure(load_entrypoint(Path(folder), job.entrypoint), job, seconds=float(seconds))
            answer = {"measurements": found.to_json()}
        except (UserCodeError, UntraceableModel) as error:
            answer = {"error": str(error), "traceback": error.traceback, "whole_traceback": whole(error)}
    write_answer(answer)


if __name__ == "__main__":
    main()
