"""`makara`: the command line. Exit status: 0 done, 1 job failed or unwanted, 2 a mistake, 3 no manager."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from pathlib import Path

from .client import Unreachable
from .parsing.parser import parser

JOB_FAILED, MISTAKE, UNREACHABLE = 1, 2, 3


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit status."""
    atexit.register(gc.freeze)  # saves the collections at exit: a third of a second
    options = parser().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for example, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else flushing at exit raises again
        return 141
    except Unreachable as error:
        print(f"makara: {error}", file=sys.stderr)
        return UNREACHABLE
    except Exception as error:
        from .mistakes import said_of  # here, because it imports what all commands may raise

        file: Path | None = getattr(options, "file", None)
        found = said_of(error, file)
        if found is None:
            raise
        text, status = found
        print(text, file=sys.stderr)
        return status
