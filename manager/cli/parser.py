"""The commands of `makara` and their options. Most command modules are imported only when they run."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from ..config import DEFAULT_BUNDLE_BYTES, DEFAULT_PORT, default_home
from ..spec.paths import path
from ..spec.reading import positive
from ..spec.resources import CLOUDS
from . import plan, simulate
from .calibration import command as calibration

Run = Callable[[argparse.Namespace], int]
_SKIP = "do not compare one step in pieces with the module's own: go on where they differ"


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. `run` of the parsed options runs the command and returns its status."""
    whole = argparse.ArgumentParser(
        prog="makara", description="Train big PyTorch models on spot machines that keep disappearing."
    )
    whole.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")
    commands = _Commands(whole)
    _add_server(commands)
    _add_apply(commands)
    about = "check a job, and say how it would run on so many VMs and why; submits nothing"
    plan.add_arguments(commands.add("plan", plan.plan, about))
    _add_check(commands)
    _add_job_commands(commands)
    _add_token(commands)
    _add_machines(commands)
    _add_clouds(commands)
    about = "replay a job over an availability trace, in virtual time"
    simulate.add_arguments(commands.add("simulate", simulate.simulate, about))
    about = "measure a model on this machine, or show what was measured of a job"
    calibration.add_arguments(commands.add("calibrate", calibration.calibrate, about))
    _add_demo(commands)
    return whole


class _Commands:
    """The subcommands of a parser, and the options that several of them share."""

    def __init__(self, whole: argparse.ArgumentParser) -> None:
        self._commands = whole.add_subparsers(required=True, metavar="COMMAND")
        self.home = argparse.ArgumentParser(add_help=False)
        self.home.add_argument(
            "--home", type=path, default=default_home(), help="folder of the manager (%(default)s)"
        )
        self.client = client = argparse.ArgumentParser(add_help=False, parents=[self.home])
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

    def add(self, name: str, run: Run, about: str) -> argparse.ArgumentParser:
        """A command that asks a manager."""
        return self._add(name, run, about, self.client)

    def add_local(self, name: str, run: Run, about: str) -> argparse.ArgumentParser:
        """A command that works with a manager's folder."""
        return self._add(name, run, about, self.home)

    def add_bare(self, name: str, run: Run | None, about: str) -> argparse.ArgumentParser:
        """A command that needs no manager; with no `run`, one of several commands below it."""
        return self._add(name, run, about)

    def _add(
        self, name: str, run: Run | None, about: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        command = self._commands.add_parser(name, help=about, description=about, parents=parents)
        if run is not None:
            command.set_defaults(run=run)
        return command


class _Version(argparse.Action):
    """Looks up the version only when requested, so that other commands do not wait for it."""

    def __call__(self, *_: object, **__: object) -> None:
        from importlib.metadata import version

        print(f"makara {version('makara')}")
        raise SystemExit(0)


def _lazily(module: str, name: str) -> Run:
    """A command whose module is imported when it runs, so that other commands do not wait for it."""

    def run(options: argparse.Namespace) -> int:
        return getattr(importlib.import_module(f".{module}", __package__), name)(options)

    return run


# ---- a manager, and what is submitted to it ----------------------------------------------------------------


def _add_server(commands: _Commands) -> None:
    option = commands.add_local(
        "server", _lazily("server", "server"), "run a manager on this machine"
    ).add_argument
    option("--host", default="127.0.0.1")
    option("--port", type=int, default=DEFAULT_PORT, help="0: any free one (%(default)s)")
    option("--allow-remote", action="store_true", help="listen beyond this machine")
    option(
        "--tls",
        action=argparse.BooleanOptionalAction,
        help="speak HTTPS, by the authority in ca.pem of --home (default: beyond loopback, and with clouds)",
    )
    option("--public-url", help="the URL by which agents reach this manager")
    option(
        "--name",
        action="append",
        default=[],
        metavar="HOST",
        help="another name or address by which this manager is reached, for its certificate",
    )
    option("--no-local", action="store_true", help="have no VMs on this machine: no job's code runs here")
    option(
        "--bound",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a bound that differs from its default, e.g. form_timeout_s=600; see docs/generations.md",
    )
    option(
        "--allow-store",
        action="append",
        metavar="URL",
        help="store for which jobs may use this manager's credentials, or a folder for checkpoints; may be "
        "given again. Replaces the default: s3:// (AWS), az:// (Azure) and, without --allow-remote, "
        "file:/// (folders)",
    )
    option(
        "--max-bundle",
        type=plan.size,
        default=DEFAULT_BUNDLE_BYTES,
        metavar="SIZE",
        help="largest bundle of code that a job may bring, packed, e.g. 256MiB (64MiB)",
    )


def _add_apply(commands: _Commands) -> None:
    about = "check a job, submit it, and follow it (Ctrl-C only stops following)"
    option = commands.add("apply", _lazily("apply", "apply"), about).add_argument
    option("-f", "--file", type=path, required=True, help="the job file")
    option("--detach", action="store_true", help="do not follow the job")
    yes = "submit a job that rents VMs without asking whether its price is wanted"
    option("-y", "--yes", action="store_true", help=yes)
    option("--idempotency-key", help="a repeated submission with it is the same job")
    option("--skip-comparison", action="store_true", help=_SKIP)


def _add_check(commands: _Commands) -> None:
    about = "run one step of a model in pieces and as it is, and say what differs; submits nothing"
    option = commands.add_bare("check", _lazily("check", "check"), about).add_argument
    option("entrypoint", nargs="?", help="module:function (default: the job file's)")
    option("-f", "--file", type=path, help="a job file, for its settings")
    option("--workdir", type=path, help="folder of the code (default: the job file's, or this)")
    option("--microbatch-size", type=positive, metavar="M", help="(default: the job file's, or the least)")
    option("--num-sections", type=positive, metavar="K", help="(default: the job file's, or chosen)")
    option("--skip-comparison", action="store_true", help=_SKIP)
    option(
        "--memory",
        type=plan.size,
        metavar="SIZE",
        help="that counts as free, as 16GB; 70%% of it is used at most (default: what the machine and its "
        "cgroup have)",
    )
    option(
        "--traceback", action="store_true", help="print every frame of what was raised, not your code's alone"
    )
    option("--json", action="store_true", help="print JSON")


# ---- jobs --------------------------------------------------------------------------------------------------


def _add_job_commands(commands: _Commands) -> None:
    commands.add("ps", _lazily("show", "ps"), "list jobs")
    _add_of_job(commands, "status", _lazily("show", "status"), "show one job")
    about = "follow a job's progress (Ctrl-C only stops following)"
    _add_of_job(commands, "follow", _lazily("apply", "follow_command"), about)
    events = _add_of_job(
        commands, "events", _lazily("show", "events"), "what was decided about a job, and why"
    )
    events.add_argument("--since", type=int, default=0, help="sequence number to begin after")
    events.add_argument("--why", action="store_true", help="also show, for each change, the plans weighed")
    about = "the ends of the logs of a job's VMs (of provider local)"
    logs = _add_of_job(commands, "logs", _lazily("show", "logs"), about)
    logs.add_argument("--vm", help="of this VM only")
    _add_resume(commands)
    about = "export the weights of a job's newest checkpoint, or of another"
    export = _add_of_job(commands, "export", _lazily("resume", "export"), about)
    export.add_argument("--step", type=int, help="of which checkpoint (default: the newest)")
    to = "copy them here, too: a folder, or a file that ends in .safetensors"
    export.add_argument("--to", type=path, help=to)
    _add_of_job(commands, "stop", _lazily("show", "stop"), "have a job publish a checkpoint and end")
    about = "have a VM hand over and released, and another asked for in its place"
    drain = commands.add("drain", _lazily("show", "drain"), about)
    drain.add_argument("vm", help="its id, as `makara status` shows it")


def _add_of_job(commands: _Commands, name: str, run: Run, about: str) -> argparse.ArgumentParser:
    command = commands.add(name, run, about)
    command.add_argument("job", help="its id, or its name: the newest job of that name")
    return command


def _add_resume(commands: _Commands) -> None:
    about = "have a job go on that was stopped or failed, or that waits for a person"
    resume = _add_of_job(commands, "resume", _lazily("resume", "resume"), about)
    how = resume.add_mutually_exclusive_group()
    how.add_argument("--from-head", action="store_true", help="from what the head in the store lists")
    how.add_argument("--restart", action="store_true", help="from step 0, without any checkpoint")
    option = resume.add_argument
    option("--max-nodes", type=positive, metavar="N", help="VMs from now on, if it had ended")
    option("--min-nodes", type=positive, metavar="N", help="the least with which it trains, likewise")
    budget = "what its whole life may cost, what it has cost included, likewise"
    option("--budget", type=float, metavar="USD", help=budget)
    hourly = "what its VMs may cost an hour, likewise"
    option("--max-hourly-cost", type=float, metavar="USD", help=hourly)


# ---- tokens, machines, clouds ------------------------------------------------------------------------------


def _add_token(commands: _Commands) -> None:
    about = "make, list and revoke tokens of users and machines (with the admin token)"
    kinds = commands.add_bare("token", None, about).add_subparsers(required=True, metavar="add|list|revoke")

    def add(name: str, function: str, about: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, help=about, description=about, parents=[commands.client])
        kind.set_defaults(run=_lazily("tokens", function))
        return kind

    option = add("add", "add", "make a token for a user or for machines, and print it this once").add_argument
    option("name", nargs="?", help="whose it is (of machines: for people, as `lab`)")
    option("--join", action="store_true", help="by which machines join, with --uses")
    option("--uses", type=positive, metavar="N", help="how many machines may join with it")
    option("--days", type=float, help="for how long it is good (default: until revoked)")
    add("list", "list_", "list the tokens that are good")
    revoke = add("revoke", "revoke", "have a token, and the sessions that it signed in, end at once")
    revoke.add_argument("id", help="as `makara token list` shows it: the part before the dot")


def _add_machines(commands: _Commands) -> None:
    about = "lend this machine to a manager, until Ctrl-C"
    option = commands.add_local("join", _lazily("machines.join", "join"), about).add_argument
    option("url", help="of the manager, as https://manager.example:8700")
    option("--token-file", type=path, help="holds a join token; needed the first time")
    option("--folder", type=path, help="of this machine's key and VMs (machine, below --home)")
    option("--name", help="for people (default: the host's)")
    option("--address", help="where other machines reach this one (default: as the manager is reached)")
    grace = "for its VM to hand over after Ctrl-C or SIGTERM; a second one ends it at once (default: 30)"
    option("--grace", type=float, metavar="SECONDS", help=grace)
    option(
        "--ca-file",
        type=path,
        help="whom to trust, as PEM: ca.pem of the manager's home (default: the system's)",
    )
    commands.add("machines", _lazily("machines.listing", "machines"), "list the machines that joined")


def _add_clouds(commands: _Commands) -> None:
    about = "have a manager run on a VM of its own at a cloud that clouds.yaml names, and print its address"
    option = commands.add_local("up", _lazily("clouds.up", "up"), about).add_argument
    option("cloud", choices=CLOUDS)
    option("--region", help="(default: as clouds.yaml says)")
    option("--instance-type", metavar="TYPE", help="(default: as clouds.yaml says)")
    option("-y", "--yes", action="store_true", help="do not ask")
    about = "show what this home's manager has at clouds, and have nothing be left of it"
    option = commands.add_local("down", _lazily("clouds.down", "down"), about).add_argument
    option("cloud", nargs="?", choices=CLOUDS, help="(default: all that clouds.yaml names)")
    option("-y", "--yes", action="store_true", help="do not ask")
    option("--json", action="store_true", help="print JSON")


# ---- the demonstration -------------------------------------------------------------------------------------


def _add_demo(commands: _Commands) -> None:
    about = "train a small GPT through scripted preemptions on this machine"
    option = commands.add_bare("demo", _lazily("demo", "demo"), about).add_argument
    option("--folder", type=path, help="where everything goes (./makara-demo)")
    option("--steps", type=int, help="how many to train (by the machine's speed)")
    option("--verify", action="store_true", help="compare with an uninterrupted run, bit for bit")
