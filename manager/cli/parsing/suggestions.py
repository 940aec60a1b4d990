"""Suggests the commands or options that are meant where a command line names an unknown one."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from .option_types import path

# Words of other tools (SkyPilot, dstack, kubectl, Slurm, docker), and the command that does it here.
_COMMANDS = {
    "run launch submit start create sbatch job train up-job": "apply -f job.yaml",
    "cancel kill delete rm remove terminate abort scancel end pause suspend": "stop JOB",
    "log tail attach watch": "follow JOB",
    "list ls jobs queue squeue get": "ps",
    "show describe info inspect job-status": "status JOB",
    "restart continue retry unpause requeue": "resume JOB",
    "download save pull weights": "export JOB",
    "validate lint test dry-run": "check -f job.yaml",
    "serve manager daemon api": "server",
    "login auth whoami users": "token list",
    "nodes hosts node": "machines",
    "price cost estimate": "plan -f job.yaml",
    "example quickstart": "demo",
}
_OPTIONS = {
    "logs": {
        "follow": "`makara follow JOB` shows progress as it is made; logs are printed as they are now",
        "tail": "it prints the ends of all logs, or with --vm those of one VM",
    },
    "ps": {"all": "it lists all jobs, ended ones as well", "watch": "`makara follow JOB` follows one job"},
    "status": {"watch": "`makara follow JOB` follows a job"},
    "apply": {
        "detached": "--detach",
        "wait": "it follows the job until it ends; --detach does not",
        "force": "--yes submits without asking",
        "dry-run": "`makara plan -f job.yaml` checks and plans, and submits nothing",
        "resume": "`makara resume JOB`, or checkpoint.start_from in the job file",
    },
    "stop": {"force": "it publishes a checkpoint first", "all": "stop takes one job; `makara ps` lists them"},
    "server": {"bind": "--host", "listen": "--host", "data": "--home", "data-dir": "--home"},
}
_WITH_JOB_FILE = ("apply", "plan", "check", "calibrate")


def command_hint(word: str, commands: Collection[str]) -> str:
    """For an unknown command: "; did you mean ...?" or nothing."""
    table = _COMMANDS if "apply" in commands else {}
    known = {name: command for names, command in table.items() for name in names.split()}
    close = difflib.get_close_matches(word.lower(), commands, 1, 0.7)
    if not close and (other := difflib.get_close_matches(word.lower(), known, 1, 0.8)):
        close = [known[other[0]]]
    if not close and table and re.search(r"\.ya?ml$", word):
        close = [f"apply -f {word}"]
    return f"; did you mean `makara {close[0]}`?" if close else ""


def options_hint(command: str, given: Sequence[str], options: Collection[str]) -> str:
    """For arguments that `command` does not take: how to write them, or where they belong; may be empty."""
    for argument in given:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            continue
        word = name.lstrip("-").replace("_", "-")
        if special := _OPTIONS.get(command, {}).get(word):
            return f"; {special}"
        close = difflib.get_close_matches(f"--{word}", options, 1, 0.7)
        if close:
            return f"; did you mean {close[0]}?"
        if command in _WITH_JOB_FILE and (where := _in_job_file(word.replace("-", "_"))):
            return f"; in the job file: {where}"
    return ""


def _in_job_file(key: str) -> str | None:
    from ...spec.job_spec import JobSpec  # here, because only a mistake needs it
    from ...spec.other_tools import belongs

    return belongs(key, JobSpec)


class Parser(argparse.ArgumentParser):
    """A parser that suggests what was meant, and adds its options when it is used.

    `fill` adds options: what it imports is imported for this command alone. `commands`: of a parser that has
    some, their names.
    """

    takes_job_file = False
    fill: Callable[[Parser], None] | None = None
    commands: Collection[str] = ()

    def add_job_file(self) -> None:
        """Let the job file be given, with or without `-f`; it is required."""
        self.takes_job_file = True
        self.add_argument("-f", "--file", type=path, help="the job file")
        self.add_argument("bare_file", nargs="?", type=path, metavar="FILE", help="the same, without -f")

    def filled(self) -> Parser:
        """This parser with all its options."""
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)
        return self

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # it has overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """As its base does, but arguments left over are refused here, where the command is known."""
        known, unknown = super(Parser, self.filled()).parse_known_args(args, namespace)
        if unknown:
            hint = options_hint(self.prog.rpartition(" ")[2], unknown, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        if self.takes_job_file:
            bare = vars(known).pop("bare_file")
            if (known.file is None) == (bare is None):
                what = "is required" if bare is None else f"is given twice ({known.file}, {bare})"
                self.error(f"the job file {what}; expected {self.prog} -f job.yaml")
            known.file = known.file or bare
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """End with the usage, the message and a suggestion."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from", message)
        if wrong and self.commands:
            message = f"unknown command {wrong[1]!r}{command_hint(wrong[1], self.commands)}"
        super().error(message)
