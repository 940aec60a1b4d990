"""`makara simulate`: a job over an availability trace, in virtual time, under one policy or several."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...simulator import Calibration, MorphCosts, read_availability
from ..replay import POLICIES, Outcome, Prices, ReplayError, Scenario, replay
from ..replay.markets import MARKETS, trace_of
from ..replay.picture import draw
from ..spec.job_file import read_spec
from ..spec.job_spec import JobSpec
from ..spec.reading import read_file
from .calibration.source import of_file, of_manager
from .client import Unreachable
from .parsing.option_types import path
from .parsing.suggestions import Parser
from .warm_up import wait_for_code

_MARKET_HOURS = 6.0  # of a made-up market, if nobody says otherwise
_ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("time", lambda o: f"{o.wall_s / 3600:.2f} h" + (", finished" if o.finished else "")),
    ("steps that count", lambda o: f"{o.steps}"),
    ("goodput", lambda o: f"{100 * o.goodput:.1f} %"),
    ("samples/s", lambda o: f"{o.samples_per_s:.2f}"),
    ("morphs", lambda o: _morphs(o)),
    ("  without a step", lambda o: _hours(o, "detect", "decide", "prepare", "open", "form")),
    ("  the longest", lambda o: f"{max((m.idle_s or 0 for m in o.morphs), default=0):.1f} s"),
    ("whole steps done again", lambda o: f"{o.lost_steps} ({_hours(o, 'lost')})"),
    ("parts of steps done again", lambda o: f"of {o.cut_off_steps} cut off ({_hours(o, 'cut_off')})"),
    ("checkpoints", lambda o: f"{o.checkpoints} (steps waited {_hours(o, 'snapshot')})"),
    ("starting", lambda o: _hours(o, "start")),
    ("waiting for VMs", lambda o: _hours(o, "wait")),
    ("VM-hours", lambda o: f"{o.vm_hours:.1f}, at most {o.most_vms} VMs"),
    ("cost", lambda o: _money(o, o.spot_cost)),
    ("the same on demand", lambda o: _steady(o)),
    ("  on", lambda o: _cluster(o)),
)


def add_arguments(command: Parser) -> None:
    """The options of `makara simulate`."""
    names = ", ".join(POLICIES)
    command.add_job_file()
    nodes = command.add_mutually_exclusive_group(required=True)
    nodes.add_argument("--trace", type=path, help="rows ms,add|remove,node or seconds,count")
    nodes.add_argument("--market", help=f"a made-up market: {', '.join(MARKETS)}")
    command.add_argument(
        "--calibration", type=path, help="of the model (JSON; default: of the newest such job of the manager)"
    )
    command.add_argument(
        "--costs", type=path, help="what morphs and checkpoints cost (JSON; default: as measured)"
    )
    command.add_argument(
        "--policy", default="makara", help=f"one or more of {names}, with commas, or all (%(default)s)"
    )
    command.add_argument(
        "--fixed-depth", type=int, help="P of the policy fixed (default: best for max_nodes)"
    )
    command.add_argument(
        "--hours", type=float, help="how long (default: until the trace's last event; of a market: 6)"
    )
    command.add_argument(
        "--notice", type=float, help="seconds of notice before a VM goes (default: 0, or the market's)"
    )
    command.add_argument(
        "--seed", type=int, default=0, help="draws a market's events, or which nodes go in a series of counts"
    )
    command.add_argument("--spot-price", type=float, help="of a VM and hour")
    command.add_argument("--on-demand-price", type=float, help="of a VM and hour")
    command.add_argument("-o", "--output", type=path, help="write a picture (SVG)")


def simulate(options: argparse.Namespace) -> int:
    """Replay, print, draw. Raises `ReplayError`, `JobSpecError` or `BadFile` for a user's mistakes."""
    scenario = _scenario(options)
    if options.fixed_depth is not None and not 1 <= options.fixed_depth <= scenario.calibration.num_sections:
        raise ReplayError(
            f"fixed-depth: {options.fixed_depth} is not in 1..{scenario.calibration.num_sections}, "
            "the sections of the calibration"
        )
    wait_for_code()
    policies = list(POLICIES) if options.policy == "all" else list(dict.fromkeys(options.policy.split(",")))
    outcomes = replay(
        scenario,
        policies,
        fixed_depth=options.fixed_depth,
        prices=Prices(spot=options.spot_price, on_demand=options.on_demand_price),
    )
    if options.output is not None:
        title = f"{scenario.spec.name} over {options.market or options.trace.name}"
        try:
            options.output.write_text(draw(outcomes, title))
        except OSError as error:
            raise ReplayError(f"output: cannot write {options.output}: {error}") from error
    if options.json:
        print(json.dumps({"costs": scenario.costs.to_json(), "outcomes": [o.to_json() for o in outcomes]}))
    else:
        _show(scenario, outcomes, options)
    return 0


def _scenario(options: argparse.Namespace) -> Scenario:
    spec = read_spec(options.file)
    costs = read_file(options.costs, MorphCosts.from_json) if options.costs else MorphCosts()
    hours, notice_s = options.hours, options.notice or 0.0
    if options.market is None:
        trace = read_file(options.trace, lambda text: read_availability(text, seed=options.seed))
    else:
        market = MARKETS.get(options.market)
        if market is None:
            raise ReplayError(f"market: {options.market!r} is unknown; known are {', '.join(MARKETS)}")
        hours = _MARKET_HOURS if hours is None else hours
        notice_s = market.notice_s if options.notice is None else notice_s
        if options.costs is None:
            costs = replace(costs, boot_s=market.boot_s)
        trace = trace_of(market, seed=options.seed, nodes=spec.resources.max_nodes, hours=hours)
    return Scenario(
        spec=spec,
        calibration=_calibration(options, spec),
        trace=trace,
        costs=costs,
        hours=hours,
        notice_s=notice_s,
    )


def _calibration(options: argparse.Namespace, spec: JobSpec) -> Calibration:
    """The calibration of the given file, else of the manager's newest measured job of this name."""
    if options.calibration is not None:
        source = of_file(options.calibration)
    else:
        try:
            known = of_manager(options, spec.name)
        except Unreachable as error:
            raise ReplayError(
                f"calibration: give --calibration, or name a manager that has one: {error}"
            ) from None
        if known is None:
            raise ReplayError(
                f"calibration: the manager has measured no job named {spec.name!r}; give --calibration"
            )
        source = known
    resources = spec.resources
    return source.calibration(spec, resources.device_memory, resources.most_workers)


# ---- what is printed ---------------------------------------------------------------------------------------


def _show(scenario: Scenario, outcomes: Sequence[Outcome], options: argparse.Namespace) -> None:
    rows = [("", [outcome.policy for outcome in outcomes])]
    rows += [(name, [cell(outcome) for outcome in outcomes]) for name, cell in _ROWS]
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(outcomes))]
    for name, cells in rows:
        print(
            f"{name:<26}"
            + "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()
        )
    print()
    for outcome in outcomes:
        print(f"{outcome.policy}: {outcome.about}")
    for line in _assumed(scenario, outcomes[0]):
        print(f"assumed: {line}")
    if options.output is not None:
        print(f"picture: {options.output}")


def _assumed(scenario: Scenario, outcome: Outcome) -> list[str]:
    notice = (
        f"{scenario.notice_s:g} s of notice before a VM goes" if scenario.notice_s else "no notice of deaths"
    )
    costs = ", ".join(f"{name} {value:g}" for name, value in scenario.costs.to_json().items())
    prices = outcome.prices
    money = "no prices: give --spot-price and --on-demand-price"
    if prices.spot is not None or prices.on_demand is not None:
        money = f"a VM-hour is {_price(prices.spot)} on the spot market, {_price(prices.on_demand)} on demand"
    memory = scenario.spec.resources.device_memory
    device = "workers have memory without bound" if memory is None else f"{memory / 1e9:g} GB for each worker"
    return [f"{device}; {notice}; {money}", f"costs {costs}"]


def _price(price: float | None) -> str:
    return "not given" if price is None else f"{price:g}"


def _hours(outcome: Outcome, *items: str) -> str:
    seconds = sum(outcome.seconds[item] for item in items)
    return f"{seconds / 3600:.2f} h, {100 * seconds / outcome.wall_s:.1f} %"


def _morphs(outcome: Outcome) -> str:
    kinds = Counter(morph.kind for morph in outcome.morphs)
    return f"{len(outcome.morphs)} ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})"


def _money(outcome: Outcome, cost: float | None) -> str:
    if cost is None:
        return "-"
    each = outcome.per_million(cost)
    return f"{cost:.2f}" + ("" if each is None else f", {each:.2f} a million samples")


def _steady(outcome: Outcome) -> str:
    return "no plan for max_nodes VMs" if outcome.steady is None else _money(outcome, outcome.on_demand_cost)


def _cluster(outcome: Outcome) -> str:
    steady = outcome.steady
    if steady is None:
        return "-"
    hours = outcome.steps * steady.step_s / 3600
    return f"{steady.num_vms} VMs that stay, as {steady.shape}, for {hours:.2f} h"
