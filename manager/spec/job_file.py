"""A job file on the disk of whoever runs a command: read, and its faults told with file and line."""

from __future__ import annotations

import re
from pathlib import Path

from ...simulator.source_lines import FileFault, decode
from .job_spec import JobSpec, JobSpecError, parse_yaml, resolve_uri
from .spec_errors import WHOLE

_FIELD = re.compile(r"[a-z_]+(\.[a-z_]+)*(?=[:\s])")


def read_spec(file: Path) -> JobSpec:
    """A job file's specification with an absolute `checkpoint.uri`. Raises `JobSpecError`."""
    try:
        text = decode(file.read_bytes(), FileFault)
    except OSError as error:
        raise JobSpecError([(WHOLE, f"cannot read it: {error.strerror}")]) from error
    except FileFault as error:
        raise JobSpecError([(WHOLE, error.message)], [error.line]) from error
    return resolve_uri(parse_yaml(text), file.resolve().parent)


def read_job(file: Path) -> tuple[JobSpec, Path]:
    """(a job file's specification, the folder of its code). Raises `JobSpecError`."""
    spec = read_spec(file)
    workdir = (file.resolve().parent / spec.workdir).resolve()
    if not workdir.is_dir():
        raise JobSpecError([("workdir", f"{workdir} is no folder")])
    return spec, workdir


def told(error: JobSpecError, file: Path | None) -> str:
    """All faults of a job file, one line each. Those found after it was read get their lines as well."""
    return str(error) if file is None else error.located(_text(file)).in_file(file)


def placed(message: str, file: Path | None) -> str:
    """A message with file and line before it, if it begins with a key of the job file."""
    field = _FIELD.match(message)
    if file is None or field is None or field[0].partition(".")[0] not in JobSpec.model_fields:
        return message
    (line,) = JobSpecError([(field[0], message)]).located(_text(file)).lines
    return f"{file}: {message}" if line is None else f"{file}:{line}: {message}"


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):  # that is the fault which is being told: it has no line
        return ""
