"""The commands of `makara` and their options. Most command modules are imported only when they run."""

from __future__ import annotations

import argparse

from ...home import DEFAULT_BUNDLE_BYTES, DEFAULT_PORT
from .commands import Commands, Run, filling, lazily
from .option_types import path, positive, size
from .suggestions import Parser

_SKIP = "do not compare one step in pieces with the module's own: go on where they differ"


def parser() -> Parser:
    """The parser of all commands. `run` of the parsed options runs the command and returns its status."""
    whole = Parser(
        prog="makara", description="Train big PyTorch models on spot machines that keep disappearing."
    )
    whole.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")
    commands = Commands(whole)
    _add_server(commands)
    _add_apply(commands)
    about = "check a job, and say how it would run on so many VMs and why; submits nothing"
    commands.add("plan", lazily("plan", "plan"), about).fill = filling("plan")
    _add_check(commands)
    _add_job_commands(commands)
    _add_token(commands)
    _add_machines(commands)
    _add_clouds(commands)
    about = "replay a job over an availability trace, in virtual time"
    commands.add("simulate", lazily("simulate", "simulate"), about).fill = filling("simulate")
    about = "measure a model on this machine, or show what was measured of a job"
    calibrate = commands.add("calibrate", lazily("calibration.command", "calibrate"), about)
    calibrate.fill = filling("calibration.command")
    _add_demo(commands)
    return whole


class _Version(argparse.Action):
    """Looks up the version only when requested, so that other commands do not wait for it."""

    def __call__(self, *_: object, **__: object) -> None:
        from importlib.metadata import version

        print(f"makara {version('makara')}")
        raise SystemExit(0)


# ---- a manager, and what is submitted to it ----------------------------------------------------------------


def _add_server(commands: Commands) -> None:
    option = commands.add_local(
        "server", lazily("server", "server"), "run a manager on this machine"
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
    option(
        "--local",
        action=argparse.BooleanOptionalAction,
        help="offer provider local to administrators' jobs, whose code runs on this machine as the "
        "manager's user (default: without --allow-remote)",
    )
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
        type=size,
        default=DEFAULT_BUNDLE_BYTES,
        metavar="SIZE",
        help="largest bundle of code that a job may bring, packed, e.g. 256MiB (64MiB)",
    )


def _add_apply(commands: Commands) -> None:
    about = "check a job, submit it, and follow it (Ctrl-C only stops following)"
    command = commands.add("apply", lazily("apply", "apply"), about)
    command.add_job_file()
    option = command.add_argument
    option("--detach", action="store_true", help="do not follow the job")
    yes = "submit a job that rents VMs without asking whether its price is wanted"
    option("-y", "--yes", action="store_true", help=yes)
    option("--idempotency-key", help="a repeated submission with it is the same job")
    option("--skip-comparison", action="store_true", help=_SKIP)


def _add_check(commands: Commands) -> None:
    about = "run one step of a model in pieces and as it is, and say what differs; submits nothing"
    option = commands.add_bare("check", lazily("check", "check"), about).add_argument
    option("entrypoint", nargs="?", help="module:function (default: the job file's)")
    option("-f", "--file", type=path, help="a job file, for its settings")
    option("--workdir", type=path, help="folder of the code (default: the job file's, or this)")
    option("--microbatch-size", type=positive, metavar="M", help="(default: the job file's, or the least)")
    option("--num-sections", type=positive, metavar="K", help="(default: the job file's, or chosen)")
    option("--skip-comparison", action="store_true", help=_SKIP)
    option(
        "--memory",
        type=size,
        metavar="SIZE",
        help="that counts as free, as 16GB; 70%% of it is used at most (default: what the machine and its "
        "cgroup have)",
    )
    option(
        "--traceback", action="store_true", help="print every frame of what was raised, not your code's alone"
    )
    option("--json", action="store_true", help="print JSON")


# ---- jobs --------------------------------------------------------------------------------------------------


def _add_job_commands(commands: Commands) -> None:
    commands.add("ps", lazily("show", "ps"), "list jobs")
    _add_of_job(commands, "status", lazily("show", "status"), "show one job")
    about = "follow a job's progress (Ctrl-C only stops following)"
    _add_of_job(commands, "follow", lazily("apply", "follow_command"), about)
    events = _add_of_job(
        commands, "events", lazily("show", "events"), "what was decided about a job, and why"
    )
    events.add_argument("--since", type=int, default=0, help="sequence number to begin after")
    events.add_argument("--why", action="store_true", help="also show, for each change, the plans weighed")
    about = "the ends of the logs of a job's VMs (of provider local)"
    logs = _add_of_job(commands, "logs", lazily("show", "logs"), about)
    logs.add_argument("--vm", help="of this VM only")
    _add_resume(commands)
    about = "export the weights of a job's newest checkpoint, or of another"
    export = _add_of_job(commands, "export", lazily("resume", "export"), about)
    export.add_argument("--step", type=int, help="of which checkpoint (default: the newest)")
    to = "copy them here, too: a folder, or a file that ends in .safetensors"
    export.add_argument("--to", type=path, help=to)
    _add_of_job(commands, "stop", lazily("show", "stop"), "have a job publish a checkpoint and end")
    about = "have a VM hand over and released, and another asked for in its place"
    drain = commands.add("drain", lazily("show", "drain"), about)
    drain.add_argument("vm", help="its id, as `makara status` shows it")


def _add_of_job(commands: Commands, name: str, run: Run, about: str) -> argparse.ArgumentParser:
    command = commands.add(name, run, about)
    command.add_argument("job", help="its id, or its name: the newest job of that name")
    return command


def _add_resume(commands: Commands) -> None:
    about = "have a job go on that was stopped or failed, or that waits for a person"
    resume = _add_of_job(commands, "resume", lazily("resume", "resume"), about)
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


def _add_token(commands: Commands) -> None:
    about = "make, list and revoke tokens of users and machines (with the admin token)"
    token = commands.add_bare("token", None, about)
    kinds = token.add_subparsers(required=True, metavar="add|list|revoke")
    token.commands = kinds.choices

    def add(name: str, function: str, about: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(name, help=about, description=about, parents=[commands.client])
        kind.set_defaults(run=lazily("tokens", function))
        return kind

    option = add("add", "add", "make a token for a user or for machines, and print it this once").add_argument
    option("name", nargs="?", help="whose it is (of machines: for people, as `lab`)")
    option("--join", action="store_true", help="by which machines join, with --uses")
    option("--uses", type=positive, metavar="N", help="how many machines may join with it")
    option("--days", type=float, help="for how long it is good (default: until revoked)")
    add("list", "list_", "list the tokens that are good")
    revoke = add("revoke", "revoke", "have a token, and the sessions that it signed in, end at once")
    revoke.add_argument("id", help="as `makara token list` shows it: the part before the dot")


def _add_machines(commands: Commands) -> None:
    about = "lend this machine to a manager, until Ctrl-C"
    option = commands.add_local("join", lazily("machines.join", "join"), about).add_argument
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
    commands.add("machines", lazily("machines.listing", "machines"), "list the machines that joined")


def _add_clouds(commands: Commands) -> None:
    about = "have a manager run on a VM of its own at a cloud that clouds.yaml names, and print its address"
    commands.add_local("up", lazily("clouds.up", "up"), about).fill = _fill_up
    about = "show what this home's manager has at clouds, and have nothing be left of it"
    commands.add_local("down", lazily("clouds.down", "down"), about).fill = _fill_down


def _fill_up(command: Parser) -> None:
    from ...spec.resources import CLOUDS  # here, because it imports pydantic

    option = command.add_argument
    option("cloud", choices=CLOUDS)
    option("--region", help="(default: as clouds.yaml says)")
    option("--instance-type", metavar="TYPE", help="(default: as clouds.yaml says)")
    option("-y", "--yes", action="store_true", help="do not ask")


def _fill_down(command: Parser) -> None:
    from ...spec.resources import CLOUDS

    option = command.add_argument
    option("cloud", nargs="?", choices=CLOUDS, help="(default: all that clouds.yaml names)")
    option("-y", "--yes", action="store_true", help="do not ask")
    option("--json", action="store_true", help="print JSON")


# ---- the demonstration -------------------------------------------------------------------------------------


def _add_demo(commands: Commands) -> None:
    about = "train a small GPT through scripted preemptions on this machine"
    option = commands.add_bare("demo", lazily("demo", "demo"), about).add_argument
    option("--folder", type=path, help="where everything goes (./makara-demo)")
    option("--steps", type=int, help="how many to train (by the machine's speed)")
    option("--verify", action="store_true", help="compare with an uninterrupted run, bit for bit")
