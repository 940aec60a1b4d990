"""What a local VM of the fault tests runs before its boot file: a machine of its own, and then the agent.

`python vm_boot.py NETWORK BOOT_FILE`; NETWORK is the JSON of `vm_network.Network` and of the size of the VM's
disk. The agent gets a network namespace with an address, a disk at its folder, and the machine's clock: what
the manager's environment does to the manager's is not for VMs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from vm_network import Network

# $0: bytes, $1: folder, $2: the boot file's text, then the command. Its log is where it was opened.
MOUNT = """
set -e
umask 077
mount -t tmpfs -o size="$0" none "$1"
cd "$1"
printf %s "$2" > boot.json
shift 2
exec "$@"
"""


def main() -> None:
    settings, boot_file = json.loads(sys.argv[1]), Path(sys.argv[2])
    network = Network(Path(settings["folder"]), settings["name"], settings["prefix"])
    boot = json.loads(boot_file.read_text())
    namespace, boot["address"] = network.add(boot["vm"])
    boot_file.write_text(json.dumps(boot))
    del os.environ["LD_PRELOAD"], os.environ["CLOCK_AHEAD"]
    command = [sys.executable, "-P", "-m", "makara.worker.agent", str(boot_file)]
    disk = ["sh", "-c", MOUNT, str(settings["disk_bytes"]), str(boot_file.parent), boot_file.read_text()]
    os.execvp("ip", ["ip", "netns", "exec", namespace, *disk, *command])


if __name__ == "__main__":
    main()
