"""The one order in which all workers sum gradients over the hosts of each section."""

from __future__ import annotations

from .plan import Plan


def sum_order(plan: Plan) -> list[int]:
    """All sections, in rounds: no worker hosts two sections of a round, so its sums can run at the same time.

    In a round sections descend, as they do on each worker of a grid: that is the order in which backwards
    complete them. Where pipelines are cut at different places, sums in one descending order would each wait
    for the one before, through the worker that hosts both sections.
    """
    reach = [0] * plan.num_sections
    for span in set(plan.ranges):
        for section in span.sections:
            reach[section] = max(reach[section], span.stop)
    order: list[int] = []
    left = list(reversed(range(plan.num_sections)))
    while left:
        above, later = plan.num_sections, list[int]()
        for section in left:
            # Who hosts it and some section of the round hosts the nearest of these.
            if reach[section] <= above:
                order.append(section)
                above = section
            else:
                later.append(section)
        left = later
    return order
