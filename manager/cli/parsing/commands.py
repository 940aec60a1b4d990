"""The commands of a parser, the options that they share, and modules that are imported when they are used."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from ...home import default_home
from .option_types import path
from .suggestions import Parser

Run = Callable[[argparse.Namespace], int]


class Commands:
    """The subcommands of a parser, and the options that several of them share."""

    def __init__(self, whole: Parser) -> None:
        self._commands = whole.add_subparsers(required=True, metavar="COMMAND")
        whole.commands = self._commands.choices
        self.home = Parser(add_help=False)
        self.home.add_argument(
            "--home", type=path, default=default_home(), help="folder of the manager (%(default)s)"
        )
        self.client = client = Parser(add_help=False, parents=[self.home])
        client.add_argument(
            "--server", help="URL of the manager (default: $MAKARA_SERVER, or the one of --home)"
        )
        client.add_argument(
            "--ca-file",
            type=path,
            help="whom to trust, as PEM (default: $MAKARA_CA_FILE, or the authority of --home for its "
            "manager)",
        )
        client.add_argument("--token", help="default: $MAKARA_TOKEN, or the admin token in --home")
        client.add_argument("--json", action="store_true", help="print JSON")

    def add(self, name: str, run: Run, about: str) -> Parser:
        """A command that asks a manager."""
        return self._add(name, run, about, self.client)

    def add_local(self, name: str, run: Run, about: str) -> Parser:
        """A command that works with a manager's folder."""
        return self._add(name, run, about, self.home)

    def add_bare(self, name: str, run: Run | None, about: str) -> Parser:
        """A command that needs no manager; with no `run`, one of several commands below it."""
        return self._add(name, run, about)

    def _add(self, name: str, run: Run | None, about: str, *parents: Parser) -> Parser:
        command = self._commands.add_parser(name, help=about, description=about, parents=parents)
        if run is not None:
            command.set_defaults(run=run)
        return command


def lazily(module: str, name: str) -> Run:
    """A command whose module is imported when it runs, so that other commands do not wait for it."""

    def run(options: argparse.Namespace) -> int:
        return getattr(importlib.import_module(f"..{module}", __package__), name)(options)

    return run


def filling(module: str) -> Callable[[Parser], None]:
    """The options of a command whose module adds them, likewise."""

    def fill(command: Parser) -> None:
        importlib.import_module(f"..{module}", __package__).add_arguments(command)

    return fill
