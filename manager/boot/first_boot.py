"""Runs on a VM, from its user data, with the image's own Python: prepares it once, then becomes the agent.

Written to /etc/makara beside boot.json and payload.json. Run again after a reboot, it only becomes the agent.
"""

import glob
import hashlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

ETC, VENV = "/etc/makara", "/opt/makara/venv"
BOOT = os.path.join(ETC, "boot.json")
DONE = os.path.join(VENV, ".makara-complete")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PATIENCE_S, PAUSE_S = 1200, 5
# Images with GPU drivers bring a Python that has torch.
PYTHONS = [
    "/opt/pytorch/bin/python3",
    "/opt/conda/bin/python3",
    "/usr/bin/python3.1[1-9]",
    "/usr/bin/python3",
]


def main() -> None:
    os.umask(0o077)
    with open(BOOT) as file:
        boot = json.load(file)
    os.makedirs(boot["directory"], exist_ok=True)
    if not os.path.exists(DONE):
        prepare(boot)
    boot["address"] = address_towards(boot["manager_url"])
    with open(BOOT, "w") as file:
        json.dump(boot, file)
    python = os.path.join(VENV, "bin", "python")
    os.chdir(boot["directory"])
    os.execv(python, [python, "-P", "-m", "makara.worker.agent", BOOT])


def prepare(boot: dict[str, Any]) -> None:
    with open(os.path.join(ETC, "payload.json")) as file:
        payload = json.load(file)
    torch = "torch==" + fetch(boot, "torch").decode().strip()
    wheel = os.path.join(ETC, payload["wheel"])
    constraints = os.path.join(ETC, "constraints.txt")
    keep(wheel, fetch(boot, "wheel"), payload["wheel_sha256"])
    keep(constraints, fetch(boot, "constraints"), payload["constraints_sha256"])
    python, has_torch = choose(torch)
    shutil.rmtree(VENV, ignore_errors=True)
    have_venv(python)
    shared = ["--system-site-packages"] if has_torch else []
    run(python, "-m", "venv", *shared, VENV)
    pip = [os.path.join(VENV, "bin", "python"), "-m", "pip", "install", "--no-input"]
    if not has_torch:
        cpu = [] if glob.glob("/proc/driver/nvidia/gpus/*") else ["--extra-index-url", CPU_INDEX]
        run(*pip, *cpu, "-c", constraints, torch)
    run(*pip, "-c", constraints, torch, wheel)
    open(DONE, "w").close()


def fetch(boot: dict[str, Any], name: str) -> bytes:
    """The manager may not be reached at once: the network comes up, it restarts."""
    url = "{}/api/v1/jobs/{}/boot/{}".format(boot["manager_url"], boot["job"], name)
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + boot["join_token"]})
    context = ssl.create_default_context(cadata=boot["ca"])
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    stop = time.monotonic() + PATIENCE_S
    while True:
        try:
            with opener.open(request, timeout=60) as answer:
                return answer.read()
        except OSError as error:  # that of HTTP is one
            say(f"{url}: {error}")
            if time.monotonic() > stop:
                raise
        time.sleep(PAUSE_S)


def keep(path: str, data: bytes, sha256: str) -> None:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise SystemExit(f"{path}: not what the user data names")
    with open(path, "wb") as file:
        file.write(data)


def choose(torch: str) -> tuple[str, bool]:
    """The Python to use, and whether it has this torch."""
    found = [path for pattern in PYTHONS for path in sorted(glob.glob(pattern), reverse=True)]
    usable = [path for path in found if answers(path, "import sys; assert sys.version_info >= (3, 11)")]
    if not usable:
        raise SystemExit(f"no Python of at least 3.11 in this image: {found}")
    version = torch.partition("==")[2]
    has = f"from importlib.metadata import version; assert version('torch').partition('+')[0] == {version!r}"
    return next(((path, True) for path in usable if answers(path, has)), (usable[0], False))


def have_venv(python: str) -> None:
    """Debian and Ubuntu have it in a package of its own."""
    if not answers(python, "import ensurepip"):
        version = subprocess.check_output(
            [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True
        )
        run("apt-get", "update")
        run("apt-get", "install", "-y", "--no-install-recommends", f"python{version.strip()}-venv")


def address_towards(url: str) -> str:
    """Of this machine, on the way to the manager; nothing is sent."""
    parts = urlsplit(url)
    port = parts.port or 443
    family, kind, _, _, there = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        return probe.getsockname()[0]


def answers(python: str, program: str) -> bool:
    return subprocess.run([python, "-c", program], capture_output=True).returncode == 0


def run(*command: str) -> None:
    say(" ".join(command))
    subprocess.run(command, check=True)


def say(text: str) -> None:
    print("makara: " + text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
