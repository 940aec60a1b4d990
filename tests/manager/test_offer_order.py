"""In which order places are tried: zones by price, and types by price over speed if the job wants that."""

from __future__ import annotations

from typing import Any

import pytest
from core_script import Script
from makara.manager.core.events import OffersSeen
from makara.manager.core.facts import RefusalKind
from makara.manager.core.offer_order import in_order
from makara.manager.service.views.quote import quote_of
from makara.manager.spec.job_spec import JobSpecError, Resources, parse_spec
from makara.manager.spec.placement import Market, Offer
from test_renting import CLOUD, ON_DEMAND, SPOT, asked, fail, offer, rented


def priced(zone: str, kind: str, hourly: float | None, market: Market = SPOT) -> Offer:
    return offer(zone, kind, market, ceiling=None if hourly is None else 2 * hourly)


def places(offers: list[Offer]) -> list[tuple[str, str]]:
    return [(it.placement.instance_type, it.placement.zone) for it in offers]


OFFERS = [
    priced("a", "small", 0.45),
    priced("b", "small", 0.3),
    priced("c", "small", None),
    priced("a", "large", 0.8),
    priced("b", "large", 0.5),
    priced("a", "small", 0.9, ON_DEMAND),
]


def ordered(measured: dict[str, float] | None = None, **changes: Any) -> list[tuple[str, str]]:
    resources = Resources.model_validate({**CLOUD, "on_demand_nodes": 1, **changes})
    return places(in_order(resources, OFFERS, 0.0, measured))


def test_zones_of_one_type_are_tried_by_price_and_types_as_they_are_listed() -> None:
    assert ordered() == [
        ("small", "b"),
        ("small", "a"),
        ("small", "c"),
        ("large", "b"),
        ("large", "a"),
        ("small", "a"),
    ]


def test_types_are_tried_by_price_over_their_stated_speed_and_spot_comes_first() -> None:
    plain = [("small", "b"), ("small", "a"), ("large", "b"), ("large", "a"), ("small", "c"), ("small", "a")]
    assert ordered(order="price") == plain
    faster = [("large", "b"), ("small", "b"), ("large", "a"), ("small", "a"), ("small", "c"), ("small", "a")]
    assert ordered(order="price", speed={"large": 2.0}) == faster


def test_a_measured_speed_counts_for_more_than_a_stated_one() -> None:
    stated = {"large": 2.0}
    assert ordered({"large": 1.0, "small": 1.0}, order="price", speed=stated)[0] == ("small", "b")
    assert ordered({"small": 0.5}, order="price", speed=stated)[0] == ("large", "b"), "twice as fast as that"


def test_refusals_are_followed_in_that_order() -> None:
    script = rented(Script(), *OFFERS[:5], joined=False, order="price", speed={"large": 2.0})
    script.wait()
    for _ in range(3):
        fail(script)
    assert [(kind, zone) for _, zone, kind in asked(script)] == [
        ("large", "b"),
        ("small", "b"),
        ("large", "a"),
        ("small", "a"),
    ]
    fail(script, RefusalKind.QUOTA)
    script.wait(10.0)
    assert asked(script)[-1][1:] == ("b", "large"), "the quota is that of the other type"


def test_prices_that_change_change_the_order() -> None:
    script = rented(Script(), offer("a", ceiling=1.0), offer("b", ceiling=1.2), joined=False)
    script.event(OffersSeen(now=script.now, offers=(offer("a", ceiling=1.0), offer("b", ceiling=0.8))))
    script.wait()
    assert [zone for _, zone, _ in asked(script)] == ["b"]


def test_the_question_before_a_submission_shows_that_order() -> None:
    resources = Resources.model_validate({**CLOUD, "order": "price", "speed": {"large": 2.0}})
    quote = quote_of(resources, OFFERS[:5], 0.0)
    assert quote is not None
    assert [(it.instance_type, it.zone) for it in quote.offers][:2] == [("large", "b"), ("small", "b")]
    assert quote.hourly == pytest.approx(3 * 0.5), "of the first kind"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed": {"small": 2.0}}, "has no effect without order: price"),
        ({"order": "price", "speed": {"huge": 2.0}}, "'huge' is not in resources.instance_type"),
        ({"order": "price", "speed": {"small": 0.0}}, "speed"),
        ({"order": "cheapest"}, "order"),
    ],
)
def test_an_order_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    job = {
        "name": "j",
        "entrypoint": "train:build",
        "resources": {**CLOUD, **changes},
        "training": {"global_batch_size": 8, "steps": 100},
        "checkpoint": {"uri": "file:///c"},
    }
    with pytest.raises(JobSpecError, match=message):
        parse_spec(job)
