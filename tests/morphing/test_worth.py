"""What a plan is worth: against sums over all that may happen, and as it depends on each of its parts."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from makara.morphing import Prospect, Risk, prospect, worths
from makara.morphing.risk import used_part, worth

RATES = (0.0, 1e-6, 0.01, 1.0)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("ends_s", [0.5, 20.0, 500.0, math.inf])
def test_the_part_of_the_time_in_which_a_plan_steps_is_that_of_all_times_of_the_next_change(
    rate: float, ends_s: float
) -> None:
    for begins_s in (0.0, 0.1, 3.0, 19.0, 600.0):
        if rate == 0 and math.isinf(ends_s):
            wanted = 1.0
        else:
            longest = min(ends_s, 40.0 / rate if rate else math.inf)
            slices = [longest * (n + 0.5) / 20_000 for n in range(20_000)]
            alive = [math.exp(-rate * at) for at in slices]  # no change until then
            wanted = sum(a for a, at in zip(alive, slices, strict=True) if at > begins_s) / sum(alive)
        assert used_part(begins_s, rate, ends_s) == pytest.approx(wanted, abs=2e-3)


def test_without_an_end_it_is_the_formula_of_an_endless_job() -> None:
    one = Prospect(samples_per_s=40.0, begins_s=12.0, changes_per_s=0.01, change_s=30.0)
    assert worth(one, 50.0) == pytest.approx(40.0 * math.exp(-0.12) - 0.01 * 50.0 * 30.0)


def test_whatever_comes_later_costs_more_or_ends_sooner_is_worth_less() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    pick = random.Random(seed)
    for _ in range(1000):
        values = {
            "samples_per_s": pick.uniform(1, 100),
            "begins_s": pick.uniform(0, 100),
            "changes_per_s": 10 ** pick.uniform(-6, -1),
            "change_s": pick.uniform(0, 1000),
        }
        ends_s = pick.choice([math.inf, 10 ** pick.uniform(0, 5)])
        before = worth(Prospect(**values), 100.0, ends_s)
        slack = 1e-9 * (1 + abs(before))
        for name in ("begins_s", "change_s"):
            later = {**values, name: values[name] * pick.uniform(1, 3)}
            assert worth(Prospect(**later), 100.0, ends_s) <= before + slack
        faster = {**values, "samples_per_s": values["samples_per_s"] * 1.5}
        assert worth(Prospect(**faster), 100.0, ends_s) >= before - slack
        oftener = {**values, "changes_per_s": values["changes_per_s"] * 2}
        assert worth(Prospect(**oftener), 100.0) <= worth(Prospect(**values), 100.0) + slack


def test_what_the_next_change_costs_is_that_of_all_losses_that_there_may_be() -> None:
    risk = Risk(losses_per_s=0.01, mean_size=2.0, redo_s=100.0, redo_steps=5.5, form_s=6.0)
    step_s, vms = 4.0, [f"vm{n}" for n in range(6)]
    hostings = [[{"vm0", "vm1"}, {"vm2"}], [{"vm0", "vm1"}, {"vm1", "vm2"}], [set(vms)], [{"vm0"}]]
    for hosting in hostings:
        hosts, used = [frozenset(one) for one in hosting], set[str]().union(*hosting)
        weights = {size: 0.5 ** (size - 1) for size in range(1, 7)}
        cost_s = touching = 0.0
        for size, weight in weights.items():
            losses = [set(loss) for loss in itertools.combinations(vms, size)]
            chance = weight / sum(weights.values()) / len(losses)
            for loss in losses:
                touching += chance * bool(loss & used)
                if any(one <= loss for one in hosting):
                    cost_s += chance * (100.0 + 5.5 * step_s)
                elif loss & used:
                    cost_s += chance * 6.0
        found = prospect(16, step_s, 0.0, hosts, len(vms), risk)
        assert found.changes_per_s == pytest.approx(0.01 * touching)
        # Beside that, what was in flight: half of a step at most.
        again_s = found.changes_per_s * found.change_s / 0.01 - cost_s
        assert -1e-9 <= again_s <= touching * step_s / 2


def test_fewer_vms_are_touched_less_often() -> None:
    risk = Risk(losses_per_s=0.01, mean_size=1.5, redo_s=100.0, redo_steps=5.5, form_s=6.0)
    rates = [
        prospect(16, 4.0, 0.0, [frozenset(f"vm{n}" for n in range(used))], 12, risk).changes_per_s
        for used in range(1, 13)
    ]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.01)
    assert rates[0] < 0.2 * rates[-1]


def test_a_plan_without_a_second_copy_is_worth_less_where_deaths_are_many() -> None:
    def of(rate: float) -> list[float]:
        risk = Risk(losses_per_s=rate, mean_size=1.0, redo_s=300.0, redo_steps=5.5, form_s=6.0)
        single = prospect(16, 4.0, 0.0, [frozenset({"a"}), frozenset({"b"})], 4, risk)
        double = prospect(16, 4.1, 0.0, [frozenset({"a", "b"}), frozenset({"c", "d"})], 4, risk)
        return worths([single, double])

    assert of(1e-7)[0] > of(1e-7)[1]
    assert of(1e-2)[0] < of(1e-2)[1]


def test_where_none_steps_before_the_end_that_is_foreseen_they_are_weighed_without_it() -> None:
    slow = Prospect(samples_per_s=10.0, begins_s=50.0, changes_per_s=0.001, change_s=10.0)
    fast = Prospect(samples_per_s=20.0, begins_s=60.0, changes_per_s=0.002, change_s=10.0)
    assert worths([slow, fast], 40.0) == worths([slow, fast])
    assert worths([slow, fast])[1] > worths([slow, fast])[0] > 0
    assert worths([slow, fast], 55.0)[0] > worths([slow, fast], 55.0)[1]
    at_once = Prospect(samples_per_s=1.0, begins_s=0.0)
    assert worths([at_once, fast], 0.0)[0] > worths([at_once, fast], 0.0)[1]


@pytest.mark.parametrize("name", ["samples_per_s", "begins_s", "changes_per_s", "change_s"])
def test_a_part_that_cannot_be_is_named(name: str) -> None:
    values = {"samples_per_s": 1.0, "begins_s": 1.0, "changes_per_s": 1.0, "change_s": 1.0}
    with pytest.raises(ValueError, match=name):
        Prospect(**{**values, name: -1.0})
