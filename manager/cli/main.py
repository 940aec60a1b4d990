"""`makara`: the command line. Exit status: 0 done, 1 job failed or unwanted, 2 a mistake, 3 no manager."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ...simulator import InvalidCalibration
from ..config import DEFAULT_BUNDLE_BYTES, DEFAULT_PORT, ConfigError, ServerConfig, default_home
from ..replay import ReplayError
from ..service.journal import JournalError
from ..spec.job_file import placed, told
from ..spec.job_spec import JobSpecError
from ..spec.reading import BadFile, positive
from ..spec.resources import CLOUDS
from . import calibrate as cli_calibrate
from . import plan as cli_plan
from . import simulate as cli_simulate
from .bundle import BundleError
from .client import Refused, Unreachable
from .costs.asking import NobodyToAsk
from .plan import NoPlan
from .user_code import UserCodeRefused

JOB_FAILED, MISTAKE, UNREACHABLE = 1, 2, 3


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit status."""
    atexit.register(
        gc.freeze
    )  # a process that ends need not look for what it could free: a third of a second
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    file: Path | None = getattr(options, "file", None)
    try:
        return command(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else flushing at exit raises again
        return 141
    except Unreachable as error:
        return _say(str(error), UNREACHABLE)
    except JobSpecError as error:
        return _say(told(error, file), MISTAKE, from_us=file is None)
    except Refused as error:
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
        NobodyToAsk,
        NoPlan,
        ReplayError,
        UserCodeRefused,
    ) as error:
        text = placed(str(error), file)
        return _say(text, MISTAKE, from_us=text == str(error))


def _say(text: str, status: int, *, from_us: bool = True) -> int:
    """`from_us`: the text does not begin with a file and a line, which editors and people look for."""
    from rich.console import Console  # here, for most commands have no need of it

    said = f"makara: {text}" if from_us else text
    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(said)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="makara", description="Train big PyTorch models on spot machines that keep disappearing."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version, and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--home", type=Path, default=default_home(), help="folder of the manager (%(default)s)"
    )
    client = argparse.ArgumentParser(add_help=False, parents=[common])
    client.add_argument("--server", help="URL of the manager (default: $MAKARA_SERVER, or the one of --home)")
    client.add_argument(
        "--ca-file",
        type=Path,
        help="whom to trust, as PEM (default: $MAKARA_CA_FILE, or the authority of --home for its manager)",
    )
    client.add_argument("--token", help="default: $MAKARA_TOKEN, or the admin token in --home")
    client.add_argument("--json", action="store_true", help="print JSON")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], about: str, *parents: argparse.ArgumentParser
    ):
        command = commands.add_parser(name, help=about, description=about, parents=parents)
        command.set_defaults(run=run)
        return command

    server = add("server", _server, "run a manager on this machine", common)
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=DEFAULT_PORT, help="0: any free one (%(default)s)")
    server.add_argument("--allow-remote", action="store_true", help="listen beyond this machine")
    server.add_argument(
        "--tls",
        action=argparse.BooleanOptionalAction,
        help="speak HTTPS, by the authority in ca.pem of --home (default: beyond loopback, and with clouds)",
    )
    server.add_argument("--public-url", help="the URL by which agents reach this manager")
    server.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="HOST",
        help="another name or address by which this manager is reached, for its certificate",
    )
    server.add_argument(
        "--no-local",
        action="store_true",
        help="have no VMs on this machine: no job's code runs here",
    )
    server.add_argument(
        "--bound",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a bound that differs from its default, e.g. form_timeout_s=600; see docs/generations.md",
    )
    server.add_argument(
        "--allow-store",
        action="append",
        metavar="URL",
        help="store for which jobs may use this manager's credentials, or a folder for checkpoints; may be "
        "given again. Replaces the default: s3:// (AWS), az:// (Azure) and, without --allow-remote, "
        "file:/// (folders)",
    )
    server.add_argument(
        "--max-bundle",
        type=cli_plan.size,
        default=DEFAULT_BUNDLE_BYTES,
        metavar="SIZE",
        help="largest bundle of code that a job may bring, packed, e.g. 256MiB (64MiB)",
    )
    about = "check a job, submit it, and follow it (Ctrl-C only stops following)"
    command = add("apply", _lazily("apply", "apply"), about, client)
    command.add_argument("-f", "--file", type=Path, required=True, help="the job file")
    command.add_argument("--detach", action="store_true", help="do not follow the job")
    yes = "submit a job that rents VMs without asking whether its price is wanted"
    command.add_argument("-y", "--yes", action="store_true", help=yes)
    command.add_argument("--idempotency-key", help="a repeated submission with it is the same job")
    command.add_argument("--skip-comparison", action="store_true", help=_SKIP)
    about = "check a job, and say how it would run on so many VMs and why; submits nothing"
    cli_plan.add_arguments(add("plan", cli_plan.plan, about, client))
    about = "run one step of a model in pieces and as it is, and say what differs; submits nothing"
    command = commands.add_parser("check", help=about, description=about)
    command.set_defaults(run=_lazily("check", "check"))
    _check_arguments(command)
    add("ps", _lazily("show", "ps"), "list jobs", client)
    for name, run, about in (
        ("status", _lazily("show", "status"), "show one job"),
        (
            "follow",
            _lazily("apply", "follow_command"),
            "follow a job's progress (Ctrl-C only stops following)",
        ),
        ("events", _lazily("show", "events"), "what was decided about a job, and why"),
        ("logs", _lazily("show", "logs"), "the ends of the logs of a job's VMs (of provider local)"),
        (
            "resume",
            _lazily("resume", "resume"),
            "have a job go on that was stopped or failed, or that waits for a person",
        ),
        (
            "export",
            _lazily("resume", "export"),
            "export the weights of a job's newest checkpoint, or of another",
        ),
        ("stop", _lazily("show", "stop"), "have a job publish a checkpoint and end"),
    ):
        command = add(name, run, about, client)
        command.add_argument("job", help="its id, or its name: the newest job of that name")
        if name == "events":
            command.add_argument("--since", type=int, default=0, help="sequence number to begin after")
        if name == "resume":
            how = command.add_mutually_exclusive_group()
            how.add_argument("--from-head", action="store_true", help="from what the head in the store lists")
            how.add_argument("--restart", action="store_true", help="from step 0, without any checkpoint")
            command.add_argument(
                "--max-nodes", type=positive, metavar="N", help="VMs from now on, if it had ended"
            )
            command.add_argument(
                "--min-nodes", type=positive, metavar="N", help="the least with which it trains, likewise"
            )
            budget = "what its whole life may cost, what it has cost included, likewise"
            command.add_argument("--budget", type=float, metavar="USD", help=budget)
            hourly = "what its VMs may cost an hour, likewise"
            command.add_argument("--max-hourly-cost", type=float, metavar="USD", help=hourly)
        if name == "export":
            command.add_argument("--step", type=int, help="of which checkpoint (default: the newest)")
            to = "copy them here, too: a folder, or a file that ends in .safetensors"
            command.add_argument("--to", type=Path, help=to)
        if name == "logs":
            command.add_argument("--vm", help="of this VM only")
    about = "have a VM hand over and released, and another asked for in its place"
    command = add("drain", _lazily("show", "drain"), about, client)
    command.add_argument("vm", help="its id, as `makara status` shows it")
    about = "make, list and revoke tokens of users and machines (with the admin token)"
    _token_arguments(commands.add_parser("token", help=about, description=about), client)
    about = "lend this machine to a manager, until Ctrl-C"
    command = add("join", _lazily("machines.join", "join"), about, common)
    command.add_argument("url", help="of the manager, as https://manager.example:8700")
    command.add_argument("--token-file", type=Path, help="holds a join token; needed the first time")
    command.add_argument("--folder", type=Path, help="of this machine's key and VMs (machine, below --home)")
    command.add_argument("--name", help="for people (default: the host's)")
    command.add_argument(
        "--address", help="where other machines reach this one (default: as the manager is reached)"
    )
    grace = "for its VM to hand over after Ctrl-C or SIGTERM; a second one ends it at once (default: 30)"
    command.add_argument("--grace", type=float, metavar="SECONDS", help=grace)
    command.add_argument(
        "--ca-file",
        type=Path,
        help="whom to trust, as PEM: ca.pem of the manager's home (default: the system's)",
    )
    add("machines", _lazily("machines.listing", "machines"), "list the machines that joined", client)
    about = "have a manager run on a VM of its own at a cloud that clouds.yaml names, and print its address"
    command = add("up", _lazily("clouds.up", "up"), about, common)
    command.add_argument("cloud", choices=CLOUDS)
    command.add_argument("--region", help="(default: as clouds.yaml says)")
    command.add_argument("--instance-type", metavar="TYPE", help="(default: as clouds.yaml says)")
    command.add_argument("-y", "--yes", action="store_true", help="do not ask")
    about = "show what this home's manager has at clouds, and have nothing be left of it"
    command = add("down", _lazily("clouds.down", "down"), about, common)
    command.add_argument("cloud", nargs="?", choices=CLOUDS, help="(default: all that clouds.yaml names)")
    command.add_argument("-y", "--yes", action="store_true", help="do not ask")
    command.add_argument("--json", action="store_true", help="print JSON")
    about = "replay a job over an availability trace, in virtual time"
    simulate = add("simulate", cli_simulate.simulate, about, client)
    cli_simulate.add_arguments(simulate)
    about = "measure a model on this machine, or show what was measured of a job"
    cli_calibrate.add_arguments(add("calibrate", cli_calibrate.calibrate, about, client))
    demo = add("demo", _demo, "train a small GPT through scripted preemptions on this machine")
    demo.add_argument("--folder", type=Path, help="where everything goes (./makara-demo)")
    demo.add_argument("--steps", type=int, help="how many to train (by the machine's speed)")
    demo.add_argument("--verify", action="store_true", help="compare with an uninterrupted run, bit for bit")
    return parser


class _Version(argparse.Action):
    """Looks the version up when it is asked for: every other command would wait for it."""

    def __call__(self, *_: object, **__: object) -> None:
        from importlib.metadata import version

        print(f"makara {version('makara')}")
        raise SystemExit(0)


def _lazily(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """A command whose module is imported when it runs: what it needs takes others only time."""

    def run(options: argparse.Namespace) -> int:
        return getattr(importlib.import_module(f".{module}", __package__), name)(options)

    return run


def _token_arguments(command: argparse.ArgumentParser, client: argparse.ArgumentParser) -> None:
    kinds = command.add_subparsers(required=True, metavar="add|list|revoke")
    for name, run, about in (
        ("add", "add", "make a token for a user or for machines, and print it this once"),
        ("list", "list_", "list the tokens that are good"),
        ("revoke", "revoke", "have a token, and the sessions that it signed in, end at once"),
    ):
        kind = kinds.add_parser(name, help=about, description=about, parents=[client])
        kind.set_defaults(run=_lazily("tokens", run))
        if name == "add":
            kind.add_argument("name", nargs="?", help="whose it is (of machines: for people, as `lab`)")
            kind.add_argument("--join", action="store_true", help="by which machines join, with --uses")
            kind.add_argument("--uses", type=positive, metavar="N", help="how many machines may join with it")
            kind.add_argument("--days", type=float, help="for how long it is good (default: until revoked)")
        if name == "revoke":
            kind.add_argument("id", help="as `makara token list` shows it: the part before the dot")


_SKIP = "do not compare one step in pieces with the module's own: go on where they differ"


def _check_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("entrypoint", nargs="?", help="module:function (default: the job file's)")
    command.add_argument("-f", "--file", type=Path, help="a job file, for its settings")
    command.add_argument("--workdir", type=Path, help="folder of the code (default: the job file's, or this)")
    command.add_argument(
        "--microbatch-size", type=positive, metavar="M", help="(default: the job file's, or the least)"
    )
    command.add_argument(
        "--num-sections", type=positive, metavar="K", help="(default: the job file's, or chosen)"
    )
    command.add_argument("--skip-comparison", action="store_true", help=_SKIP)
    command.add_argument(
        "--memory",
        type=cli_plan.size,
        metavar="SIZE",
        help="that counts as free, as 16GB; 70%% of it is used at most (default: what the machine and its "
        "cgroup have)",
    )
    command.add_argument(
        "--traceback", action="store_true", help="print every frame of what was raised, not your code's alone"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def _server(options: argparse.Namespace) -> int:
    from ..server import serve  # here, so that other commands need not import the web framework

    config = ServerConfig(
        home=options.home.expanduser().resolve(),
        host=options.host,
        port=options.port,
        allow_remote=options.allow_remote,
        tls=options.tls,
        public_url=options.public_url,
        local_vms=not options.no_local,
        names=tuple(options.name),
        bounds=tuple(options.bound),
        allow_stores=tuple(options.allow_store) if options.allow_store is not None else None,
        max_bundle_bytes=options.max_bundle,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)

    def ready(url: str, _: str) -> None:
        print(f"manager at {url}   status page: the same address", flush=True)
        print(f"admin token in {config.admin_token_file}", flush=True)
        print(f"checkpoints go to {', '.join(config.stores)}, or where a job has keys of its own", flush=True)

    serve(config, on_ready=ready)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from .demo import DemoOptions, run_demo

    chosen = DemoOptions(steps=options.steps, verify=options.verify)
    if options.folder is not None:
        chosen.folder = options.folder.expanduser().resolve()
    return run_demo(chosen)
