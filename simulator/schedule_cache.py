"""A cache of static orders. A lone path's order depends only on the plan's shape, so it can be reused."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from ..pipeline.arrays import StaticOrder
from ..pipeline.components import Component
from ..pipeline.plan import Plan
from ..pipeline.schedules import Lister, static_order

Value = TypeVar("Value")


class ScheduleCache:
    """Gives the static orders of a component's workers. The result is shared: do not modify it."""

    def __init__(self, lister: Lister) -> None:
        self._lister = lister
        self._kept = LruCache[StaticOrder](max_size=1 << 20)  # in entries; 24 MiB as compiled arrays

    def __call__(self, plan: Plan, component: Component) -> StaticOrder:
        if component.signature is None:
            return static_order(plan, component, self._lister)
        key = component.signature, plan.schedule, component.window, plan.recompute, plan.halves
        order = self._kept.get(key)
        if order is None:
            order = static_order(plan, component, self._lister)
            self._kept.put(key, order, len(order.entries))
        return order


class LruCache(Generic[Value]):
    """Keeps the most recently used values, up to a total size."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._kept: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        with self._lock:
            self._kept[key] = value, size
            while self._kept and sum(size for _, size in self._kept.values()) > self._max_size:
                self._kept.popitem(last=False)
