"""The policies of a replay, and the made-up markets that they are compared on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from makara.manager.cli.main import main
from makara.manager.replay import POLICIES, Outcome, replay
from makara.manager.replay.markets import MARKETS, trace_of
from makara.manager.replay.policies.bamboo import with_successors
from makara.manager.replay.policies.oobleck import regrouped
from makara.manager.spec.resources import Resources
from makara.morphing import reroute, stage_table
from makara.morphing.reroute import Rerouted
from makara.morphing.unequal import pool, shared
from makara.pipeline import Range, grid
from makara.simulator import NodeChange
from replays import random_trace, scenario


def adds(count: int) -> str:
    return "".join(f"0,add,n{n}\n" for n in range(1, count + 1))


@pytest.mark.parametrize("seed", range(3))
def test_every_policy_plays_a_random_trace_and_accounts_for_all_of_its_time(seed: int) -> None:
    given = scenario(random_trace(seed))
    outcomes = replay(given, tuple(POLICIES))
    assert [one.policy for one in outcomes] == [
        "makara",
        "varuna",
        "oobleck",
        "slipstream",
        "bamboo",
        "fixed",
    ]
    for one in outcomes:
        assert sum(one.seconds.values()) == pytest.approx(one.wall_s)
        assert one.steps > 0


def test_every_policy_plays_a_job_of_a_cloud_whose_pipelines_may_be_unequal() -> None:
    """Found: no VM was ever asked for, and `fixed` took the depth of unequal pipelines for that of a grid."""
    given = scenario(adds(7), hours=0.2, max_nodes=7)
    spec = given.spec
    resources = Resources(
        provider="aws", region="r", instance_type="small", max_nodes=7, device_memory=200, budget=5.0
    )
    parallelism = spec.parallelism.model_copy(update={"unequal_pipelines": "auto"})
    cloudy = spec.model_copy(update={"resources": resources, "parallelism": parallelism})
    for one in replay(replace(given, spec=cloudy), tuple(POLICIES)):
        assert one.steps > 0, one.policy
        assert one.most_vms == 7


def test_oobleck_uses_templates_where_vms_have_several_devices() -> None:
    given = scenario(adds(5) + "1000000,remove,n3\n", hours=0.5, workers_per_node=2)
    resources = given.spec.resources.model_copy(update={"device_memory": 130})  # three workers at least
    given = replace(given, spec=given.spec.model_copy(update={"resources": resources}))
    (outcome,) = replay(given, ("oobleck",))
    assert [one.after for one in outcome.morphs] == ["6+4", "4x2"]


def after_a_death(policy: str, nodes: int = 6) -> Outcome:
    given = scenario(adds(nodes) + "1000000,remove,n3\n", hours=0.5)
    (outcome,) = replay(given, (policy,))
    return outcome


def test_slipstream_reroutes_where_varuna_forms_another_grid() -> None:
    assert "-" in after_a_death("slipstream").morphs[-1].after
    assert "-" not in after_a_death("varuna").morphs[-1].after


def test_oobleck_goes_on_with_unequal_pipelines() -> None:
    outcome = after_a_death("oobleck", 6)
    assert outcome.morphs[-1].rung == "peers"
    assert outcome.morphs[-1].after == "3+2"


def test_bamboo_goes_on_without_the_store_though_no_pipeline_is_beside() -> None:
    """Room for two ranges makes one pipeline of these six workers; one of its inner stages dies."""
    outcome = after_a_death("bamboo")
    assert outcome.lost_steps == 0
    (plain,) = replay(scenario(adds(6), hours=0.5), ("makara",))
    (redundant,) = replay(scenario(adds(6), hours=0.5), ("bamboo",))
    assert redundant.samples_per_s < plain.samples_per_s


def test_a_redundant_pipeline_survives_what_are_no_neighbours() -> None:
    plan = with_successors(grid([Range(n, n + 1) for n in range(4)], 1, 4))
    assert plan.ranges == (Range(0, 2), Range(1, 3), Range(2, 4), Range(3, 4))
    assert isinstance(reroute(plan, {1, 3}), Rerouted)
    assert not isinstance(reroute(plan, {1, 2}), Rerouted)


@pytest.mark.parametrize(
    ("sizes", "least", "expected"),
    [
        ([4, 3, 3], 3, (4, 3, 3)),  # reinstantiate
        ([4, 4, 2], 3, (4, 3, 3)),  # borrow
        ([3, 3, 2], 3, (5, 3)),  # merge
        ([3, 0], 3, (3,)),
        ([2, 2, 1], 3, (5,)),
        ([2], 3, (2,)),  # too few for any
    ],
)
def test_oobleck_reinstantiates_then_borrows_then_merges(
    sizes: list[int], least: int, expected: tuple[int, ...]
) -> None:
    assert regrouped(sizes, least) == expected
    assert sum(expected) == sum(sizes)


def test_shares_of_given_pipelines_end_soonest() -> None:
    table = stage_table(scenario(adds(1), hours=1.0).calibration)
    choices = pool(table, 12, 4, 1, 10**9)
    members = [choices[4][0], choices[2][0], choices[1][0]]
    found = shared(members, 12)
    assert sum(found.shares) == 12
    every = [
        max(one.time_ns(share) for one, share in zip(members, (a, b, 12 - a - b), strict=True))
        for a in range(1, 11)
        for b in range(1, 12 - a)
    ]
    assert found.time_ns == min(every)


# ---- markets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MARKETS)
def test_a_market_is_the_same_each_time_and_nodes_go_only_once(name: str) -> None:
    market = MARKETS[name]
    events = trace_of(market, seed=5, nodes=16, hours=6.0)
    assert events == trace_of(market, seed=5, nodes=16, hours=6.0)
    assert events != trace_of(market, seed=6, nodes=16, hours=6.0) or market.losses_per_hour < 1
    assert [event.time_ms for event in events] == sorted(event.time_ms for event in events)
    live: set[str] = set()
    for event in events:
        if event.change is NodeChange.ADD:
            assert event.node not in live
            live.add(event.node)
        else:
            live.remove(event.node)
        assert len(live) <= 16


def test_losses_come_as_often_and_as_large_as_the_market_says() -> None:
    market = MARKETS["stormy-zones"]
    losses: dict[tuple[int, int], list[str]] = {}
    for seed in range(30):
        for event in trace_of(market, seed=seed, nodes=16, hours=10.0):
            if event.change is NodeChange.REMOVE:
                losses.setdefault((seed, event.time_ms), []).append(event.node)
    assert len(losses) == pytest.approx(30 * 10 * market.losses_per_hour, rel=0.1)
    for nodes in losses.values():
        assert len({node.partition("-")[0] for node in nodes}) == 1
    assert 1.5 < sum(map(len, losses.values())) / len(losses) < market.group


def test_there_are_at_least_twenty_markets_of_all_kinds() -> None:
    kinds: list[Callable[[str], bool]] = [
        lambda name: MARKETS[name].group > 1,
        lambda name: MARKETS[name].zones > 1,
        lambda name: MARKETS[name].wave > 0,
        lambda name: MARKETS[name].notice_s > 0,
        lambda name: MARKETS[name].boot_s > 300,
        lambda name: MARKETS[name].present < 1,
        lambda name: math.isinf(MARKETS[name].away_hours),
    ]
    assert len(MARKETS) >= 20
    assert all(any(map(kind, MARKETS)) for kind in kinds)


def test_the_command_replays_a_market_under_all_policies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[2] / "examples" / "replay"
    options = ["simulate", "-f", str(example / "job.yaml")]
    options += ["--calibration", str(example / "calibration.json"), "--hours", "0.5", "--json"]
    assert main([*options, "--market", "stormy", "--seed", "3", "--policy", "makara,varuna"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["policy"] for one in told["outcomes"]] == ["makara", "varuna"]
    assert told["costs"]["boot_s"] == MARKETS["stormy"].boot_s
    assert main([*options, "--market", "rough"]) != 0
    assert "market: 'rough' is unknown; known are calm" in capsys.readouterr().err
