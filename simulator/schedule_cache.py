"""A cache of static orders. A lone path's order depends only on the plan's shape, so it can be reused."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from ..pipeline.arrays import StaticOrder
from ..pipeline.components import Component
from ..pipeline.plan import Plan
from ..pipeline.schedules import Lister, static_order

_MOST_ENTRIES = 1 << 20  # 24 MiB as compiled arrays


class ScheduleCache:
    """Gives the static orders of a component's workers, and keeps the most recently used ones. They are
    shared: do not modify them."""

    def __init__(self, lister: Lister) -> None:
        self._lister = lister
        self._kept: OrderedDict[Hashable, StaticOrder] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, plan: Plan, component: Component) -> StaticOrder:
        if component.signature is None:
            return static_order(plan, component, self._lister)
        key = component.signature, plan.schedule, component.window, plan.recompute, plan.halves
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        order = static_order(plan, component, self._lister)
        with self._lock:
            self._kept[key] = order
            while self._kept and sum(len(one.entries) for one in self._kept.values()) > _MOST_ENTRIES:
                self._kept.popitem(last=False)
        return order
