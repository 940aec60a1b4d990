"""`makara`: the command line. Exit status: 0 done, 1 job failed or unwanted, 2 a mistake, 3 no manager."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ...simulator import InvalidCalibration
from ..config import ConfigError
from ..replay import ReplayError
from ..service.journal import JournalError
from ..spec.job_file import placed, told
from ..spec.job_spec import JobSpecError
from ..spec.reading import BadFile
from .bundle import BundleError
from .client import RequestRefused, Unreachable
from .parser import parser
from .plan import NoPlan
from .user_code import UserCodeRefused

JOB_FAILED, MISTAKE, UNREACHABLE = 1, 2, 3


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit status."""
    atexit.register(gc.freeze)  # saves the collections at exit: a third of a second
    options = parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    file: Path | None = getattr(options, "file", None)
    try:
        return command(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for example, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else flushing at exit raises again
        return 141
    except Unreachable as error:
        return _say(str(error), UNREACHABLE)
    except JobSpecError as error:
        return _say(told(error, file), MISTAKE, from_us=file is None)
    except RequestRefused as error:
        status = UNREACHABLE if error.status >= 500 else MISTAKE
        if error.errors:
            return _say(told(JobSpecError(error.errors), file), status, from_us=file is None)
        return _say(str(error), status)
    except BadFile as error:
        return _say(str(error), MISTAKE, from_us=False)
    except (
        BundleError,
        ConfigError,
        InvalidCalibration,
        JournalError,
        NoPlan,
        ReplayError,
        UserCodeRefused,
    ) as error:
        text = placed(str(error), file)
        return _say(text, MISTAKE, from_us=text == str(error))


def _say(text: str, status: int, *, from_us: bool = True) -> int:
    """Print an error. `from_us`: add a prefix, since the text does not begin with a file and a line."""
    from rich.console import Console  # here, because most commands do not need it

    said = f"makara: {text}" if from_us else text
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(said)
    return status
