"""Stands in for `python -m makara.worker.trainer` under a real agent: starts at once and does as it is told.

The job's environment says how it behaves: `FAKE_TRAINER` is "plain" (reports the version of its orders as its
step; holds when ordered, which leaves the file `held` in the VM's folder), "silent" (its first incarnation
beats once and never again), "late" (begins to beat only with its second orders), "survived" (dies, but a
child of it keeps its socket open), "saves long" (told to hold, it runs on and saves for ever), "talkative"
(tells of thousands of steps with each orders), "killed" (its first incarnation kills itself at its first
orders), "huge" (its report is larger than any manager takes), "holding" (it keeps the interpreter to itself
as soon as it is told to train), "parent" (its first incarnation starts processes that heed no signal, and
dies when it is to train), "silent parent" (it stops to beat instead), "noisy" (writes a megabyte to its log
with each orders), "newer" (tells what an agent of today does not know), "real-time" (a signal without a name
ends it), "leaver" (has handed over when it is told to
idle), "diary" (leaves the number of each incarnation that was told to train in the
file `began`), "crowded" (it has more threads than stacks are shown of), or "scalar" (its first incarnation
tells what is no object).
"""

import faulthandler
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from pathlib import Path

BEAT_S = 0.05


CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, sys.argv[1])
time.sleep(1000)
"""


def start_children(folder: Path) -> None:
    """A child, one in a session of its own whose parent is gone, and one with a clean environment."""
    for name in ("plain", "daemon", "clean"):
        if os.fork():
            continue
        if name == "daemon":
            os.setsid()
            if os.fork():
                os._exit(0)
        environment = {} if name == "clean" else os.environ
        command = [sys.executable, "-S", "-c", CHILD, str(folder / f"{name}.pid")]
        os.execve(sys.executable, command, environment)


def main() -> None:
    arguments = dict(zip(sys.argv[5::2], sys.argv[6::2], strict=True))  # after -P -m START MODULE
    connection = socket.socket(fileno=int(arguments["--fd"]))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.register(signal.SIGUSR2, all_threads=False)
    mode, incarnation = os.environ["FAKE_TRAINER"], int(arguments["--incarnation"])
    report = {"worker": arguments["--worker"], "incarnation": incarnation, "phase": "idle"}
    lines = connection.makefile("rb")
    selector = selectors.DefaultSelector()
    selector.register(connection, selectors.EVENT_READ)

    def send(**value: object) -> None:
        connection.sendall(json.dumps(value).encode() + b"\n")

    if mode == "late":
        lines.readline()
        lines.readline()
    send(report=report)
    if mode == "silent" and incarnation == 1:
        while lines.readline():
            pass
        return
    if mode == "killed" and incarnation == 1:
        lines.readline()
        os.kill(os.getpid(), signal.SIGKILL)
    if mode.endswith("parent") and incarnation == 1:
        start_children(Path(arguments["--bundle"], "..", ".."))
        while json.loads(lines.readline())["action"] != "train":
            send(beat=True)
        if mode == "parent":
            os._exit(3)
        lines.readlines()
    if mode == "survived" and incarnation == 1:
        if os.fork():
            os._exit(3)
        while lines.readline():  # until the agent lets go of its end
            pass
        return
    if mode == "real-time":
        lines.readline()
        os.kill(os.getpid(), signal.SIGRTMIN + 3)
    if mode == "crowded":
        for _ in range(120):
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    if mode == "scalar" and incarnation == 1:
        lines.readline()
        connection.sendall(b"5\n")
    while True:
        if selector.select(BEAT_S):
            line = lines.readline()
            if not line:
                return
            orders = json.loads(line)
            holds = orders["hold"] and mode != "saves long"
            phase = "held" if holds else "running" if orders["action"] == "train" else "idle"
            if mode == "leaver" and phase == "idle":
                phase = "left"
            if orders["hold"]:
                Path(arguments["--bundle"], "..", "..", "held").touch()
            report |= {"phase": phase, "step": orders["version"], "generation": 1}
            if mode == "diary" and orders["action"] == "train":
                page = Path(arguments["--bundle"], "..", "..", "began")
                page.with_suffix(".new").write_text(str(incarnation))
                page.with_suffix(".new").rename(page)
            metrics = {"generation": 1, "loss": 1.0, "grad_norm": 1.0, "seconds": 1.0, "samples": 1}
            for n in range(3000 if mode == "talkative" else 1):
                send(metrics=metrics | {"step": orders["version"] + n * 1000})
            if mode == "noisy":
                print(f"orders {orders['version']} " + "x" * (1 << 20), flush=True)
            if mode == "huge":
                report |= {"lost": ["x" * 400] * 60_000}
            if mode == "newer":
                report |= {"phase": "levitating", "colour": "red"}
            send(report=report)
            if mode == "holding" and orders["action"] == "train":
                sum(range(10**12))
        at = "at the beach" if mode == "newer" else "waiting for data"
        send(beat={"count": report.get("step", 0), "at": at})


main()
