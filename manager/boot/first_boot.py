"""Runs on a VM, from its user data, with the image's own Python: prepares it once, then becomes the agent.

Written to /etc/makara beside boot.json and payload.json. Run again after a reboot, it only bars the metadata
service to all but root, which the agent is and the job's code is not, and becomes the agent. Python 3.9 must
be able to load it: Amazon Linux has no newer one at first.
"""

from __future__ import annotations

import glob
import hashlib
import http.client
import json
import os
import pwd
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

ETC, VENV = "/etc/makara", "/opt/makara/venv"
# The job's code has a user and an environment of its own; packages that it installs hide those of VENV.
USER, USERS_VENV = "makara-trainer", "/opt/makara/trainers"
BOOT = os.path.join(ETC, "boot.json")
DONE = os.path.join(VENV, ".makara-complete")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PATIENCE_S, PAUSE_S = 1200, 5
REFUSALS, REFUSED_S = (401, 403, 404), 60  # a proxy may answer so while the manager restarts
GPUS, GPUS_WITHIN_S = "/proc/driver/nvidia/gpus/*", 60
PAUSES_S = (5, 20, 60)  # between two tries of what comes from elsewhere
# By TCP a VM hears there who it is and what it may do; UDP (names, leases) and names by TCP are for all.
RULES = """
table inet makara
delete table inet makara
table inet makara {
  chain output {
    type filter hook output priority 0; policy accept;
    meta skuid != 0 ip daddr { 169.254.169.254, 168.63.129.16 } tcp dport != 53 reject with tcp reset
    meta skuid != 0 ip6 daddr fd00:ec2::254 tcp dport != 53 reject with tcp reset
  }
}
"""
# Images with GPU drivers bring a Python that has torch, often in an environment of its own.
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
    if boot["device_kind"] == "cuda":
        wait_for_gpus()
    if not os.path.exists(DONE):
        prepare(boot)
    bar_metadata()
    open_gpus()
    boot["trainer_user"] = trainer_user(boot)
    boot["address"] = address_towards(boot["manager_url"])
    with open(BOOT, "w") as file:
        json.dump(boot, file)
    python = os.path.join(VENV, "bin", "python")
    os.chdir(boot["directory"])
    os.execv(python, [python, "-P", "-m", "makara.worker.agent", BOOT])


def wait_for_gpus() -> None:
    """The driver may still be loading."""
    stop = time.monotonic() + GPUS_WITHIN_S
    while not glob.glob(GPUS):
        if time.monotonic() > stop:
            raise SystemExit(
                "makara: this VM's type has GPUs, but its image no NVIDIA driver that shows them"
            )
        time.sleep(PAUSE_S)


def prepare(boot: dict[str, Any]) -> None:
    with open(os.path.join(ETC, "payload.json")) as file:
        payload = json.load(file)
    torch = "torch==" + fetch(boot, "torch").decode().strip()
    wheel = os.path.join(ETC, payload["wheel"])
    constraints = os.path.join(ETC, "constraints.txt")
    keep(wheel, fetch(boot, "wheel"), payload["wheel_sha256"])
    keep(constraints, fetch(boot, "constraints"), payload["constraints_sha256"])
    python, torch_at = choose(torch)
    have_venv(python)
    before = os.umask(0o022)  # what is not root's reads it
    make_venv(python, torch_at)
    make_users_venv(python, torch_at)
    make_user(trainer_user(boot))
    pip = [os.path.join(VENV, "bin", "python"), "-m", "pip", "install", "--no-input"]
    if torch_at is None:
        cpu = [] if glob.glob(GPUS) else ["--extra-index-url", CPU_INDEX]
        keep_trying(*pip, *cpu, "-c", constraints, torch)
    keep_trying(*pip, "-c", constraints, torch, wheel)
    os.umask(before)
    open(DONE, "w").close()


def bar_metadata() -> None:
    """Raises `CalledProcessError`: without the rule no job's code runs here."""
    if shutil.which("nft") is None:  # Ubuntu's images have it
        install("nftables")
    subprocess.run(["nft", "-f", "-"], input=RULES, text=True, check=True)


def open_gpus() -> None:
    """Make their device files, which CUDA makes only for who may become root."""
    if glob.glob(GPUS) and shutil.which("nvidia-modprobe"):
        subprocess.run(["nvidia-modprobe", "-u", "-c=0"])


def trainer_user(boot: dict[str, Any]) -> dict[str, str]:
    """Who runs the job's code."""
    home = os.path.join(boot["directory"], "home")
    return {"name": USER, "home": home, "python": os.path.join(USERS_VENV, "bin", "python")}


def make_user(user: dict[str, str]) -> None:
    home, shell = user["home"], shutil.which("nologin") or "/bin/false"
    try:
        pwd.getpwnam(USER)
    except KeyError:
        run("useradd", "--system", "--user-group", "--home-dir", home, "--shell", shell, USER)
    os.makedirs(home, exist_ok=True)
    run("chown", "-R", f"{USER}:", home, USERS_VENV)
    os.chmod(os.path.dirname(home), 0o711)  # on the way to what is theirs


def fetch(boot: dict[str, Any], name: str) -> bytes:
    """The manager may not be reached at once: the network comes up, it restarts. What it goes on refusing is
    not waited for, because the VM is billed."""
    url = "{}/api/v1/jobs/{}/boot/{}".format(boot["manager_url"], boot["job"], name)
    began_at = not_refused_at = time.monotonic()
    while True:
        try:
            return ask(url, {"Authorization": "Bearer " + boot["join_token"]}, ca=boot["ca"])
        except (OSError, http.client.HTTPException) as error:
            say(f"{url}: {error}")
            now = time.monotonic()
            if getattr(error, "code", None) not in REFUSALS:
                not_refused_at = now
            if now - not_refused_at > REFUSED_S or now - began_at > PATIENCE_S:
                raise
        time.sleep(PAUSE_S)


def ask(url: str, headers: dict[str, str], ca: str | None = None) -> bytes:
    """What is answered. Past any proxy. Raises `OSError`, `http.client.HTTPException`."""
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=ca)),
    )
    request = urllib.request.Request(url, headers=headers)
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        error.close()  # the connection hangs on it
        raise


def keep(path: str, data: bytes, sha256: str) -> None:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise SystemExit(f"{path}: not what the user data names")
    with open(path, "wb") as file:
        file.write(data)


def choose(torch: str) -> tuple[str, str | None]:
    """The Python to use, and the folder where it has this torch."""
    found = [path for pattern in PYTHONS for path in sorted(glob.glob(pattern), reverse=True)]
    usable = [
        path for path in found if told(path, "import sys; assert sys.version_info >= (3, 11)") is not None
    ]
    if not usable:
        raise SystemExit(f"no Python of at least 3.11 in this image: {found}")
    version = torch.partition("==")[2]
    where = (
        "from importlib.metadata import distribution; found = distribution('torch');"
        f"assert found.version.partition('+')[0] == {version!r}; print(found.locate_file(''))"
    )
    for path in usable:
        if folder := told(path, where):
            return path, folder
    return usable[0], None


def make_venv(python: str, packages: str | None) -> None:
    """The agent's. It sees `packages`, which lie in an environment that a new one does not see by itself."""
    new_venv(python, VENV, packages)


def make_users_venv(python: str, packages: str | None) -> None:
    """For the job's code: it sees what the agent's sees."""
    new_venv(python, USERS_VENV, packages_of(VENV), packages)


def new_venv(python: str, folder: str, *seen: str | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    with open(os.path.join(packages_of(folder), "image.pth"), "w") as file:
        file.writelines(f"{path}\n" for path in seen if path is not None)


def packages_of(venv: str) -> str:
    (found,) = glob.glob(venv + "/lib/python3*/site-packages")
    return found


def have_venv(python: str) -> None:
    """Debian and Ubuntu have it in a package of its own."""
    if told(python, "import ensurepip") is None:
        version = told(python, "import sys; print('%d.%d' % sys.version_info[:2])")
        install(f"python{version}-venv")


def install(package: str) -> None:
    if shutil.which("apt-get") is None:
        keep_trying("dnf", "install", "-y", package)
        return
    # The image's own updates hold apt's lock for minutes; that of its lists is not waited for.
    apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=600"]
    keep_trying(*apt, "update")
    keep_trying(*apt, "install", "-y", "--no-install-recommends", package)


def address_towards(url: str) -> str:
    """Of this machine, on the way to the manager; nothing is sent."""
    parts = urlsplit(url)
    port = parts.port or 443
    family, kind, _, _, there = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        return probe.getsockname()[0]


def told(python: str, program: str) -> str | None:
    """What it prints; None if it fails."""
    done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def run(*command: str) -> None:
    say(" ".join(command))
    subprocess.run(command, check=True)


def keep_trying(*command: str) -> None:
    for pause_s in PAUSES_S:
        try:
            return run(*command)
        except subprocess.CalledProcessError as error:
            say(f"{error}; again in {pause_s} s")
        time.sleep(pause_s)
    run(*command)


def say(text: str) -> None:
    print("makara: " + text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
