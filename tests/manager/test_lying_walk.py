"""One short life of a job at each cloud, walked whole: the manager dies at every moment between two effects,
and every call is lost in every way.

Two VMs are wanted; the first place refuses, one VM is taken back, the job is stopped. Whatever happens in
between, no cap is passed and nothing is left.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deaths import Deaths
from lying_history import History, Resources, explained
from virtual_time import run_virtually

CLOUDS = {
    "aws": Resources(
        2, {"provider": "aws", "instance_type": "small", "zones": ["a", "b"], "max_hourly_cost": 2.0}
    ),
    "azure": Resources(
        2, {"provider": "azure", "instance_type": "Standard_S", "zones": ["1", "2"], "max_hourly_cost": 2.4}
    ),
}
TROUBLES = ("lost_done", "lost_undone", "lost_late", "slow", "throttled", "fails_late", "release_fails")


async def _life(
    cloud: str, home: Path, death: int | None, trouble: tuple[int, str] | None
) -> tuple[int, int]:
    """How many moments, and calls that create or release, the life had."""
    home.mkdir()
    history = History("walk", home, CLOUDS[cloud], clock_steps=False)
    history.deaths = Deaths(history.rng, number=death)
    history.absences = [20.0]
    history.cloud.lies, history.cloud.refused, history.cloud.trouble = False, {"j-vm0-1"}, trouble
    with explained(history):
        try:
            history.begin()
            await history.until(lambda: history.joined() == 2, 1500.0, "two VMs")
            history.cloud.end(history.cloud.billed()[0])
            await history.until(lambda: history.joined() == 1, 600.0, "one VM")
            await history.until(lambda: history.joined() == 2, 1500.0, "two VMs again")
            await history.stop()
            await history.until(history.is_over, 1500.0, "the end")
            await history.wait(100.0)  # what was under way may still come
            await history.until(history.is_over, 600.0, "the end again")
        finally:
            await history.close()
    return history.deaths.moments, history.cloud.num_calls


def _walk(
    cloud: str, home: Path, death: int | None = None, trouble: tuple[int, str] | None = None
) -> tuple[int, int]:
    try:
        return run_virtually(_life(cloud, home / f"{death}-{trouble}", death, trouble))
    except BaseException as error:
        error.add_note(f"{cloud}: the manager dies at {death}, {trouble}")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("cloud", ["aws", pytest.param("azure", marks=pytest.mark.soak)])
def test_a_manager_may_die_at_any_moment_of_a_jobs_life(cloud: str, tmp_path: Path) -> None:
    moments, _ = _walk(cloud, tmp_path)
    for death in range(1, moments + 1):
        _walk(cloud, tmp_path, death)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES[:2])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_any_call_of_a_jobs_life_may_be_lost(cloud: str, trouble: str, tmp_path: Path) -> None:
    _, calls = _walk(cloud, tmp_path)
    for call in range(1, calls + 1):
        _walk(cloud, tmp_path, trouble=(call, trouble))


@pytest.mark.soak
@pytest.mark.parametrize("trouble", TROUBLES[:3])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_manager_may_die_at_any_moment_of_a_life_in_which_any_call_is_lost(
    cloud: str, trouble: str, tmp_path: Path
) -> None:
    _, calls = _walk(cloud, tmp_path)
    for call in range(1, calls + 1):
        home = tmp_path / str(call)
        home.mkdir()
        moments, _ = _walk(cloud, home, trouble=(call, trouble))
        for death in range(1, moments + 1):
            _walk(cloud, home, death, (call, trouble))
