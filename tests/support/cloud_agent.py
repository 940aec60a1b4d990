"""A local VM whose agent asks a stand-in of its cloud: `python cloud_agent.py SOURCE BOOT_FILE`.

SOURCE is the JSON of a `NoticeSource`; what its address answers for a VM lies below the VM's own name.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from makara.protocol.messages import BootConfig, NoticeSource
from makara.worker.agent.agent import Agent


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    source = NoticeSource.model_validate_json(sys.argv[1])
    boot = BootConfig.model_validate_json(Path(sys.argv[2]).read_bytes())
    own = source.model_copy(update={"metadata_url": f"{source.metadata_url}/{boot.vm}"})
    asyncio.run(Agent(boot.model_copy(update={"notices": own})).run())


if __name__ == "__main__":
    main()
