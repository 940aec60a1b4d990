"""Reads a job file from disk; faults name file and line."""

from __future__ import annotations

import re
from pathlib import Path

from ...simulator.source_lines import decode
from ...simulator.validation import FileFault
from .job_spec import JobSpec, JobSpecError, parse_yaml, resolve_uri
from .paths import expanded
from .spec_errors import WHOLE
from .yaml_text import MAX_FILE_BYTES, too_large

_FIELD = re.compile(r"[a-z_]+(\.[a-z_]+)*(?=[:\s])")


def read_spec(file: Path) -> JobSpec:
    """Read a job file; `checkpoint.uri` becomes absolute. Raises `JobSpecError`."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)  # the name may be that of a checkpoint, or of a device
        if len(data) > MAX_FILE_BYTES:
            raise JobSpecError([(WHOLE, too_large())])
        text = decode(data, FileFault)
    except OSError as error:
        raise JobSpecError([(WHOLE, f"cannot read it: {error.strerror}")]) from error
    except FileFault as error:
        raise JobSpecError([(WHOLE, error.message)], [error.line]) from error
    return resolve_uri(parse_yaml(text), file.resolve().parent)


def read_job(file: Path) -> tuple[JobSpec, Path]:
    """Read a job file: (specification, folder of its code). Raises `JobSpecError`."""
    spec = read_spec(file)
    try:
        workdir = (file.resolve().parent / expanded(spec.workdir)).resolve()
    except ValueError as error:
        raise JobSpecError([("workdir", str(error))]) from None
    if not workdir.is_dir():
        raise JobSpecError([("workdir", f"{workdir} is no folder")])
    return spec, workdir


def told(error: JobSpecError, file: Path | None) -> str:
    """All faults of a job file, one line each; adds the lines of faults found after reading it."""
    return str(error) if file is None else error.located(_text(file)).in_file(file)


def placed(message: str, file: Path | None) -> str:
    """Prefix a message with file and line, if it begins with a key of the job file."""
    field = _FIELD.match(message)
    if file is None or field is None or field[0].partition(".")[0] not in JobSpec.model_fields:
        return message
    (line,) = JobSpecError([(field[0], message)]).located(_text(file)).lines
    return f"{file}: {message}" if line is None else f"{file}:{line}: {message}"


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return decode(opened.read(MAX_FILE_BYTES), FileFault)
    except (OSError, FileFault):  # this is the reported fault itself, which has no line
        return ""
