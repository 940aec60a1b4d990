"""The text for an error that ends a command, and its exit status."""

from __future__ import annotations

from pathlib import Path

from ...simulator import InvalidCalibration
from ..home import ConfigError
from ..replay import ReplayError
from ..service.journal import JournalError
from ..spec.job_file import placed, told
from ..spec.job_spec import JobSpecError
from ..spec.paths import UnknownHome
from ..spec.reading import BadFile
from .bundle import BundleError
from .client import RequestRefused
from .plan import NoPlan
from .user_code import UserCodeRefused

_MISTAKE, _UNREACHABLE = 2, 3
_OTHERS = (
    BundleError,
    ConfigError,
    InvalidCalibration,
    JournalError,
    NoPlan,
    ReplayError,
    UnknownHome,
    UserCodeRefused,
)


def said_of(error: Exception, file: Path | None) -> tuple[str, int] | None:
    """(text, exit status) of an error that a command may end with; None for any other. `file`: the job file,
    whose lines the text names."""
    if isinstance(error, JobSpecError):
        return _spec(error, file), _MISTAKE
    if isinstance(error, RequestRefused):
        status = _UNREACHABLE if error.status >= 500 else _MISTAKE
        return (_spec(JobSpecError(error.errors), file) if error.errors else _from_us(str(error))), status
    if isinstance(error, BadFile):
        return str(error), _MISTAKE
    if isinstance(error, _OTHERS):
        text = placed(str(error), file)
        return (_from_us(text) if text == str(error) else text), _MISTAKE
    return None


def _spec(error: JobSpecError, file: Path | None) -> str:
    return _from_us(told(error, None)) if file is None else told(error, file)


def _from_us(text: str) -> str:
    """With a prefix, since the text does not begin with a file and a line."""
    return f"makara: {text}"
