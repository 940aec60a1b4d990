"""Runs on a VM, from its user data, with the image's own Python: ends the VM, whatever else of it is missing.

Arguments: the boot file, whose `ending` says how, and for how many seconds a deletion is tried. A VM is
deleted where one that is only shut down is billed on, and powered off in any case. Python 3.9 must be able to
load it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlencode

PAUSE_S = 5
DELETED_S = 300  # for a deletion that was accepted; then it is asked for again
TIMEOUT_S = 20  # of each of the three requests of a deletion


def main(boot_file: str, for_s: float) -> None:
    """Not while the system shuts down: it may be back. Raises `CalledProcessError` if it stays on."""
    state = subprocess.run(["systemctl", "is-system-running"], stdout=subprocess.PIPE).stdout
    if state.strip() == b"stopping":
        return
    say("this VM ends itself")
    try:
        with open(boot_file) as file:
            ending = json.load(file)["ending"]
        if ending["kind"] == "azure":
            delete(ending, for_s)
    finally:
        subprocess.run(["systemctl", "poweroff", "--force"], check=True)


def delete(ending: dict[str, Any], for_s: float) -> None:
    """Until the time is over: what was accepted may fail later."""
    stop = time.monotonic() + for_s
    while True:
        try:
            ask_for_deletion(ending)
            pause_s = DELETED_S
        except Exception as error:
            say(f"this VM cannot be deleted yet: {error!r}")
            pause_s = PAUSE_S
        if time.monotonic() + pause_s > stop:
            return
        time.sleep(pause_s)


def ask_for_deletion(ending: dict[str, Any]) -> None:
    """As `worker/agent/ending.py` does, which says where this is from."""
    metadata, tell = ending["metadata_url"] + "/metadata/", {"Metadata": "true"}
    compute = json.loads(ask(f"{metadata}instance/compute?api-version=2021-02-01", tell))
    named = {"client_id": ending["client_id"], "msi_res_id": ending["identity_id"]}
    query = {"api-version": "2018-02-01", "resource": ending["management_url"] + "/"}
    query.update({name: value for name, value in named.items() if value})
    token = json.loads(ask(f"{metadata}identity/oauth2/token?{urlencode(query)}", tell))["access_token"]
    url = ending["management_url"] + compute["resourceId"] + "?api-version=2024-07-01"
    ask(url, {"Authorization": "Bearer " + token}, "DELETE")


def ask(url: str, headers: dict[str, str], method: str = "GET") -> bytes:
    """What is answered. Past any proxy. Raises `OSError`, `http.client.HTTPException`."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        error.close()  # the connection hangs on it
        raise


def say(text: str) -> None:
    print("makara: " + text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
