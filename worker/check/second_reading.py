"""A second process opens the data set as well, and must read the same samples: several workers share them.

`python -m makara.worker.check.second_reading FOLDER ENTRYPOINT SEED` waits for a line on its standard input,
so that it opens the data set after the first process did (which may download it), and answers
`{"length": ..., "samples": {index: hash}}` or `{"error": ...}`. Another process has other hashes of strings,
another time, and other random numbers from the system.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...model.data import Batches, open_dataset
from ...model.errors import UserCodeError
from ...model.precision import dtype_name
from ...model.training import Dataset, load_entrypoint
from ...protocol.answers import answer_in, write_answer
from .findings import Report

_FIELD = "Training.dataset"
_LEAST_S = 600  # a data set that waits for a lock of the first process waits for ever
_TIMES = 3  # the first process may have left files that are read again, but both share the disk


class SecondReading:
    """The other process. It imports torch and the user's code at once, and opens the data set when asked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def compare(self, dataset: Dataset, seed: int, opened_s: float, report: Report) -> None:
        """Adds to `report` what differs there from `dataset`, which took `opened_s` to open here."""
        ours, limit_s = _read(dataset, seed), patience_s(opened_s)
        try:
            printed, _ = self._process.communicate("\n", timeout=limit_s)
        except subprocess.TimeoutExpired:
            _blame(ours, {"error": f"it was not done after {limit_s / 60:.0f} minutes"}, report)
            return
        theirs, status = answer_in(printed), self._process.returncode
        if theirs is None and status < 0:
            report.notes.append(
                "whether every process reads the same samples is not known: the second one that opened the "
                f"data set was ended by {_name(-status)}, as where memory is short for two of them"
            )
            return
        _blame(ours, theirs or {"error": f"its process ended with status {status}"}, report)


def patience_s(opened_s: float) -> float:
    """How long the second process may take, when the first one took `opened_s` to open the data set."""
    return max(_LEAST_S, _TIMES * opened_s)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def second_reading(folder: Path, entrypoint: str, seed: int) -> Generator[SecondReading]:
    """Starts the other process; on exit it is ended."""
    command = [sys.executable, "-P", "-m", __name__, str(folder), entrypoint, str(seed)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield SecondReading(process)
        finally:
            process.kill()


def _read(dataset: Dataset, seed: int) -> dict[str, Any]:
    """The length of the data set, and hashes of the first, middle and last samples in the job's order."""
    batches = Batches(dataset, seed, 1, 1)
    length = len(dataset)
    places = sorted({0, 1 % length, length // 2, length - 1})
    return {"length": length, "samples": {str(place): _hash(batches, place) for place in places}}


def _hash(batches: Batches, place: int) -> str:
    """Of the sample at a place in the order of the job."""
    digest = hashlib.sha256()
    for name, value in batches.micro_batch(place, 0).items():
        digest.update(f"{name} {dtype_name(value.dtype)} {list(value.shape)}\n".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _blame(ours: dict[str, Any], theirs: dict[str, Any], report: Report) -> None:
    if "error" in theirs:
        report.find(
            _FIELD,
            f"a second process could not open the data that this one opened: {theirs['error']}. Each worker "
            "opens it in a process of its own",
            "Let several processes open the data at once: no lock, no port, no file that is moved away",
        )
        return
    if theirs == ours:
        return
    places = [place for place, value in ours["samples"].items() if theirs["samples"].get(place) != value]
    said = (
        f"it has {ours['length']} samples in this process and {theirs['length']} in another"
        if ours["length"] != theirs["length"]
        else f"samples {', '.join(places)} in the job's order are others in another process"
    )
    report.find(
        _FIELD,
        f"{said}: the data follow from more than the files, such as the order of a set or of `os.listdir`, "
        "the clock, or a generator that is seeded by the system. All workers must read the same samples",
        "Sort what has no order, and draw from Python's, NumPy's or torch's global generators, which are "
        "seeded alike in every process while the data set is opened and each sample is read",
    )


def main() -> None:
    folder, entrypoint, seed = sys.argv[1:]
    answer: dict[str, Any]
    with contextlib.redirect_stdout(sys.stderr):  # the user's code may print; the answer stands alone
        try:
            training = load_entrypoint(Path(folder), entrypoint)
            if not sys.stdin.readline():
                return  # the first process has no use for it any more
            answer = _read(open_dataset(training, int(seed)), int(seed))
        except UserCodeError as error:
            answer = {"error": error.message}
    write_answer(answer)


if __name__ == "__main__":
    main()
