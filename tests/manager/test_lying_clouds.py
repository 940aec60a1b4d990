"""Seeded histories of a manager at lying clouds: nothing is left behind, and no cap is passed at any instant.

A failing seed reproduces exactly: `MAKARA_SEED=<seed> pytest tests/manager/test_lying_clouds.py`. A thousand
are played by `make soak`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from deaths import Deaths
from lying_cloud import Habits
from lying_history import History, Resources, explained
from makara.manager.core.facts import VmNotReleased
from makara.manager.service.views.costs import not_released
from virtual_time import run_virtually


def _seeds(num: int) -> list[int]:
    given = os.environ.get("MAKARA_SEED")
    first = random.SystemRandom().randrange(10**9)
    return [int(given)] if given is not None else [first + n for n in range(num)]


def _resources(rng: random.Random) -> Resources:
    clouds = rng.choice((["aws"], ["azure"], ["aws", "azure"], ["azure", "aws"]))
    types = {"aws": ["small", "large"], "azure": ["Standard_S"]}
    zones = {"aws": ["a", "b"], "azure": ["1", "2"]}
    changes: dict[str, Any] = {
        "provider": clouds,
        "instance_type": [name for cloud in clouds for name in types[cloud]],
        "zones": {cloud: zones[cloud][: rng.randint(1, 2)] for cloud in clouds},
    }
    if rng.random() < 0.5:
        changes["max_hourly_cost"] = rng.choice((2.5, 4.0, 6.0))
    if rng.random() < 0.5:
        changes["budget"] = rng.choice((3.0, 5.0, 10.0))
    if rng.random() < 0.3:
        changes["max_price"] = rng.choice((0.7, 0.9))
    if rng.random() < 0.5:
        changes |= {"on_demand_nodes": 1, "on_demand_after": "5m"}
    return Resources(max_nodes=rng.randint(1, 4), changes=changes)


async def _play(seed: int, home: Path) -> None:
    rng = random.Random(seed)
    deaths = Deaths(rng, odds=rng.choice((0.0, 0.003, 0.02, 0.1)), most=8)
    history = History(seed, home, _resources(rng), deaths=deaths, habits=Habits.drawn(rng))
    with explained(history):
        try:
            await _one_job(history, rng)
        finally:
            await history.close()


async def _one_job(history: History, rng: random.Random) -> None:
    cloud = history.cloud
    history.begin()
    for _ in range(rng.randint(1, 8)):
        await history.wait(rng.uniform(30.0, 600.0))
        if rng.random() < 0.5:
            cloud.move_prices()
        if rng.random() < 0.2:
            history.kill()
        await history.resume()
    if rng.random() < 0.5:  # it ends while the clouds lie
        await history.stop()
        await history.wait(rng.uniform(0.0, 600.0))
        cloud.be_honest()
    else:
        cloud.be_honest()
        await _has_vms(history)
        await history.stop()
    await history.until(history.is_over, 3000.0, f"the end: {cloud.left()}")
    await history.wait(100.0)  # what was under way may still come
    await history.until(history.is_over, 3000.0, f"the end again: {cloud.left()}")


async def _has_vms(history: History) -> None:
    """At clouds that are honest a job has VMs soon, unless its budget has ended it."""

    def done() -> bool:
        return history.joined() > 0 or history.state.ended is not None

    for _ in range(10):
        await history.resume()
        await history.wait(300.0)
        if done():
            return
    await history.until(done, 0.0, f"VMs: {history.state.status}")


def play(seed: int, home: Path) -> None:
    home.mkdir()
    try:
        run_virtually(_play(seed, home))
    except BaseException as error:
        error.add_note(f"MAKARA_SEED={seed}")
        raise


@pytest.mark.slow
def test_no_cap_is_passed_and_nothing_is_left_at_clouds_that_lie(tmp_path: Path) -> None:
    for seed in _seeds(30):
        play(seed, tmp_path / str(seed))


async def _refused(home: Path) -> None:
    changes = {"provider": "aws", "instance_type": "small", "zones": ["a"]}
    habits = Habits(release_fails=1.0)
    history = History("refused", home, Resources(2, changes), habits=habits, clock_steps=False)
    with explained(history):
        try:
            history.begin()
            await history.until(lambda: history.joined() == 2, 1500.0, "two VMs")
            history.cloud.end(history.cloud.billed()[0])
            await history.until(lambda: history.told(VmNotReleased), 60.0, "that the release is refused")
            (told,) = history.told(VmNotReleased)
            (note,) = not_released(history.job, history.loop.time())
            assert note.startswith(
                f"{told.vm} has ended, and is paid for until its cloud says that it is gone"
            )
            assert "at most 1 USD an hour" in note
            assert "(503)" in note
            await history.wait(600.0)
            assert len(history.told(VmNotReleased)) == 1
            habits.release_fails = 0.0
            await history.stop()
            await history.until(history.is_over, 1500.0, "the end")
            assert not not_released(history.job, history.loop.time())
        finally:
            await history.close()


def test_a_job_is_told_once_that_a_release_is_refused_and_what_that_costs(tmp_path: Path) -> None:
    run_virtually(_refused(tmp_path))


@pytest.mark.soak
def test_a_thousand_histories_of_lying_clouds(tmp_path: Path) -> None:
    for seed in _seeds(1000):
        play(seed, tmp_path / str(seed))
