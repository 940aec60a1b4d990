#!/usr/bin/python3
"""Stands in for systemctl in a VM without systemd: starts a unit as far as ours go, and powers the VM off.

A unit with a setting that is not played here is refused, so that nobody takes it for tested.
"""

import configparser
import os
import shlex
import signal
import subprocess
import sys

UNITS, STATES = "/etc/systemd/system", "/var/lib"
PLAYED = {"execstart", "execstoppost", "umask", "statedirectory", "successaction", "failureaction"}
# What systemd alone can do; docs/clouds/boot.md says that it is not shown.
NOT_SHOWN = {"killmode", "limitmemlock", "limitnofile", "oompolicy", "timeoutstopsec"}
OF_THE_ORDER = {"description", "after", "wants", "standardoutput", "standarderror", "wantedby"}


def main(arguments: list[str]) -> None:
    command, *names = [word for word in arguments if not word.startswith("--")]
    if command == "daemon-reload":
        return
    if command == "poweroff":
        os.kill(1, signal.SIGTERM)
        return
    if command == "is-system-running":
        print("running")
        return
    (name,) = names
    unit = settings_of(os.path.join(UNITS, name))
    if command == "start":
        if os.fork() == 0:
            os.setsid()
            run(unit)
    elif command != "enable":
        raise SystemExit(f"systemctl {command}: not played here")


def settings_of(path: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    with open(path) as file:
        parser.read_file(file)
    found = {key: value for section in parser.sections() for key, value in parser[section].items()}
    if unknown := found.keys() - PLAYED - NOT_SHOWN - OF_THE_ORDER:
        raise SystemExit(f"{path}: {', '.join(sorted(unknown))}: not played here")
    return found


def run(unit: dict[str, str]) -> None:
    """With the little that systemd has in a unit's environment; its output is the console's."""
    os.umask(int(unit.get("umask", "0022"), 8))
    if "statedirectory" in unit:
        os.makedirs(os.path.join(STATES, unit["statedirectory"]), exist_ok=True)
    with open("/etc/environment") as file:
        told = dict(line.rstrip("\n").split("=", 1) for line in file)
    with open("/proc/1/fd/1", "ab") as console, open(os.devnull) as nothing:
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **told}
        streams = {"stdin": nothing, "stdout": console, "stderr": console}
        status, *_ = (
            subprocess.run(shlex.split(unit[name]), **streams, env=environment).returncode
            for name in ("execstart", "execstoppost")
            if name in unit
        )
    if unit.get("failureaction" if status else "successaction") == "poweroff":
        main(["poweroff"])


if __name__ == "__main__":
    main(sys.argv[1:])
