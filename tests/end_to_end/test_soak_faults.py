"""Faults of twelve kinds in a running job: each is noticed in time, the job goes on, and no bit differs.

`make soak` runs it; a table of what was seen comes at the end. It needs root, and the Debian packages
iproute2, iptables and faketime. One kind alone:
pytest -m soak tests/end_to_end/test_soak_faults.py -k "SIGSTOP".
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_runs import Row, compare, play, show
from fault_scene import running_scene
from faults import FAULTS, Fault

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """What was seen, printed when all is over."""
    seen: list[Row] = []
    yield seen
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        show(seen)


@pytest.fixture
def chance() -> random.Random:
    seed = int(os.environ.get("MAKARA_SEED") or random.randrange(1 << 32))
    print(f"MAKARA_SEED={seed}")
    return random.Random(seed)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_noticed_in_time_and_changes_nothing(
    fault: Fault, tmp_path: Path, chance: random.Random, rows: list[Row]
) -> None:
    with running_scene(tmp_path, chance) as scene:
        row = play(scene, fault)
        rows.append(row)
        compare(scene)
        row["exact"] = True


def test_faults_of_all_kinds_in_one_job_change_nothing(
    tmp_path: Path, chance: random.Random, rows: list[Row]
) -> None:
    with running_scene(tmp_path, chance) as scene:
        seen: list[Row] = []
        for fault in chance.sample(FAULTS, len(FAULTS)):
            seen.append(play(scene, fault))
            seen[-1]["fault"] += ", in one job"
            rows.append(seen[-1])
        compare(scene)
        for row in seen:
            row["exact"] = True
