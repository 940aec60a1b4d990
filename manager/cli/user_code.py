"""Tries or measures the user's code on the user's machine, in separate processes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ...protocol.answers import answer_in
from ...protocol.messages import JobSettings
from ...protocol.stages import STAGE
from ...simulator import Measurements
from ..spec.job_spec import JobSpec
from .parsing.entrypoint import entrypoint_fault


class UserCodeRefused(ValueError):
    """The job's own code failed the check; the message has the lines that led to it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a check. `model`: facts about the model and findings of the dry run; None if it did not
    get that far."""

    model: dict[str, Any] | None
    error: str | None
    traceback: str | None
    """The part in the user's code."""
    whole_traceback: str | None

    @property
    def refusal(self) -> str | None:
        return self.error and _told(self.error, self.traceback, self.whole_traceback)


def settings_of(spec: JobSpec) -> dict[str, Any]:
    """The parts of a job's specification on which the check depends."""
    return {
        "global_batch_size": spec.training.global_batch_size,
        "steps": spec.training.steps,
        "seed": spec.training.seed,
        "precision": spec.training.precision,
        "microbatch_size": spec.parallelism.microbatch_size,
        "num_sections": spec.parallelism.num_sections,
        "pipeline_parallel_degree": spec.parallelism.pipeline_parallel_degree,
        "most_workers": spec.resources.most_workers,
    }


def try_out(
    workdir: Path,
    entrypoint: str,
    settings: Mapping[str, Any],
    envs: Mapping[str, str],
    begin: Callable[[str], None] = lambda _: None,
) -> Trial:
    """Check the code in a process, and call `begin` with each stage. Raises `UserCodeRefused` if the code
    ends that process."""
    if fault := entrypoint_fault(workdir, entrypoint, envs):  # at once: the process imports torch first
        return Trial(None, f"entrypoint {entrypoint!r}: {fault}", None, None)
    arguments = (str(workdir), entrypoint, json.dumps(settings))
    begin("importing torch and your code")
    answer = _answer_of("makara.worker.check", arguments, workdir, entrypoint, envs, begin)
    return Trial(answer["model"], answer["error"], answer["traceback"], answer["whole_traceback"])


def measured_apart(
    workdir: Path, settings: JobSettings, seconds: float, envs: Mapping[str, str]
) -> Measurements:
    """Measure a job's model in a separate process for about `seconds`. Raises `UserCodeRefused`."""
    bare = settings.model_copy(update={"envs": {}, "setup": None})  # an argument has 128 KiB at most
    arguments = (str(workdir), bare.model_dump_json(), str(seconds))
    answer = _answer_of("makara.worker.profiling", arguments, workdir, settings.entrypoint, envs)
    if "measurements" not in answer:
        raise UserCodeRefused(_told(answer["error"], answer["traceback"], answer["whole_traceback"]))
    return Measurements.from_json(answer["measurements"])


def plain_step_s(workdir: Path, spec: JobSpec, m: int) -> float:
    """Seconds of a step of the job in plain PyTorch, on one thread. Raises `UserCodeRefused`."""
    arguments = (str(workdir), spec.entrypoint, str(spec.training.global_batch_size), str(m))
    return _answer_of("makara.worker.profiling.plain_step", arguments, workdir, spec.entrypoint, spec.envs)[
        "seconds"
    ]


def _told(error: str, part: str | None, whole: str | None) -> str:
    more = ""
    if part is not None and whole is not None:
        more = f"the whole traceback, of {len(whole.splitlines())} lines: makara check with --traceback"
    return "\n".join(text.rstrip() for text in (error, part, more) if text)


def _answer_of(
    module: str,
    arguments: Sequence[str],
    workdir: Path,
    entrypoint: str,
    envs: Mapping[str, str],
    begin: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Run `module` as a program; returns its answer. It names its stages on stderr."""
    command = [sys.executable, "-P", "-m", "makara.worker.start", module, *arguments]
    try:
        process = subprocess.Popen(
            command,
            cwd=workdir,
            env={**os.environ, **envs},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # the user's code may print what it likes
        )
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise
        raise UserCodeRefused(
            "envs: together with your own environment they are more than a process can be started with; "
            "unset large variables here, or shorten those of the job"
        ) from error
    printed, errors = _output(process, begin)
    answer = answer_in(printed)
    if answer is None:
        raise UserCodeRefused(
            f"entrypoint: {entrypoint} ended its process with status {process.returncode}:\n{errors[-4000:]}"
        )
    return answer


def _output(process: subprocess.Popen[str], begin: Callable[[str], None]) -> tuple[str, str]:
    """Wait for the end; returns stdout, and stderr without the lines that name stages."""
    lines: list[str] = []

    def read(stderr: IO[str]) -> None:
        for line in stderr:
            if line.startswith(STAGE):
                begin(line.removeprefix(STAGE).strip())
            else:
                lines.append(line)

    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=read, args=(process.stderr,))  # else a full pipe would stop the process
    with process:
        reader.start()
        try:
            printed = process.stdout.read()
            process.wait()
        except BaseException:  # Ctrl-C
            process.kill()
            raise
        finally:
            reader.join()
    return printed, "".join(lines)
