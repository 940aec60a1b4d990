"""A manager whose plans a policy chooses: `python -m benchmarks.spot.policy_server HOME POLICY`.

What it is beside that is `makara server`: a policy is for comparisons, and no setting of it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from makara.manager.config import ServerConfig
from makara.manager.core.strikes.table import Kind
from makara.manager.replay import POLICIES
from makara.manager.server import serve

# A request for which the market has no node waits in a replay; a manager asks again, here once a second.
_BOUNDS = tuple(
    f"{kind}.{name}=1"
    for kind in (Kind.BREAK, Kind.REQUEST, Kind.UNFIT_VM, Kind.WORN_VM)
    for name in ("first_s", "longest_s")
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spot.policy_server")
    parser.add_argument("home", type=Path)
    parser.add_argument("policy", choices=tuple(POLICIES))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    serve(
        ServerConfig(home=options.home, port=0, bounds=_BOUNDS),
        choose_plan=POLICIES[options.policy].choose_plan,
    )


if __name__ == "__main__":
    main()
