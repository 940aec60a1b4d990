"""An agent on a machine with a network of its own, where a job's code is another user's. The metadata service
of AWS is at its own address.

`unshare --net python barred_machine.py FOLDER`, as root. Prints what the code found, as JSON. The user is one
of Debian's own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from http_answers import answering
from makara.manager.boot import first_boot
from makara.protocol.messages import (
    Credential,
    JobSettings,
    NoticeSource,
    StoreConfig,
    StoreIdentity,
    TrainerUser,
)
from makara.worker.agent.agent import Agent
from metadata import AwsMetadata
from scripted_manager import TIMEOUT_S, Manager

USER = "games"
ADDRESS = "169.254.169.254"
ROLE = {"AccessKeyId": "key", "SecretAccessKey": "secret", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}

# In the place of a trainer: the image's own Python runs it, which every user can read.
CODE = """
import json, os, time, urllib.error, urllib.request

def answer(url, **headers):
    try:
        request = urllib.request.Request(url, headers=headers)
        return urllib.request.urlopen(request, timeout=10).read().decode()
    except (urllib.error.URLError, OSError) as error:
        return str(getattr(error, "reason", error))

def reads(path):
    try:
        return open(path).read()
    except OSError as error:
        return error.strerror

folder = {folder!r}
url, token = os.environ["AWS_CONTAINER_CREDENTIALS_FULL_URI"], os.environ["AWS_CONTAINER_AUTHORIZATION_TOKEN"]
found = {{
    "uid": os.getuid(),
    "groups": os.getgroups(),
    "status": reads("/proc/self/status"),
    "metadata": answer("http://169.254.169.254/latest/meta-data/"),
    "credentials": json.loads(answer(url, Authorization=token)),
    "agent's files": [reads(os.path.join(folder, name)) for name in ("worker.token", "boot.json")],
    "agent's environment": reads(f"/proc/{{os.getppid()}}/environ"),
    "set up": reads("set-up"),
    "home": [os.environ["HOME"], os.access(os.environ["HOME"], os.W_OK)],
    "user": os.environ["USER"],
}}
with open("found.new", "w") as file:
    json.dump(found, file)
os.rename("found.new", "found.json")
time.sleep(1000)
"""


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"], check=True)
    runpy.run_path(first_boot.__file__)["bar_metadata"]()
    service = AwsMetadata(role=ROLE)
    with answering(service.answer, socket.create_server((ADDRESS, 80))):
        print(json.dumps(asyncio.run(played(Path(sys.argv[1])))))


async def played(folder: Path) -> dict[str, Any]:
    """What the code found."""
    user = code_user(folder)
    manager = Manager(
        folder,
        "",
        trainer_user=user,
        notices=NoticeSource(kind="aws"),
        store_identity=StoreIdentity(kind="aws"),
    )
    await manager.open()
    (folder / "boot.json").write_text(manager.boot().model_dump_json())
    (folder / "boot.json").chmod(0o600)
    agent = asyncio.create_task(Agent(manager.boot()).run())
    try:
        await manager.send(Credential(token="the-workers-own", valid_for_s=1e6))
        await manager.order("train", job=job_of(manager))
        bundle = Path("bundles") / hashlib.sha256(manager.bundle).hexdigest()
        await manager.until_file(str(bundle / "found.json"))
        async with asyncio.timeout(TIMEOUT_S):
            await manager.report(lambda report: report.notices_known)
        found = json.loads((folder / bundle / "found.json").read_text())
        owners = {path.owner() for path in [folder / bundle, *(folder / bundle).rglob("*")]}
        return {**found, "owners": sorted(owners)}
    finally:
        agent.cancel()
        await asyncio.gather(agent, return_exceptions=True)
        await manager.close()


def code_user(folder: Path) -> TrainerUser:
    folder.chmod(0o711)
    home, python = folder / "home", folder / "python"
    home.mkdir()
    subprocess.run(["chown", f"{USER}:", str(home)], check=True)
    (folder / "code.py").write_text(CODE.format(folder=str(folder)))
    python.write_text(f"#!/bin/sh\nexec /usr/bin/python3 -S {folder}/code.py\n")
    for path, mode in ((folder / "code.py", 0o644), (python, 0o755)):
        path.chmod(mode)
    return TrainerUser(name=USER, home=str(home), python=str(python))


def job_of(manager: Manager) -> JobSettings:
    return JobSettings(
        job="job",
        entrypoint="train:build",
        seed=1,
        steps=9,
        global_batch_size=2,
        numerics="fast",
        store=StoreConfig(uri="s3://bucket/prefix"),
        bundle_sha256=hashlib.sha256(manager.bundle).hexdigest(),
        setup="id -un > set-up",
    )


if __name__ == "__main__":
    main()
