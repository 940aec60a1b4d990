"""What runs where, and in which order: pure values, no torch, no I/O, no clock.

In: the number of sections K, the number of micro-batches N, the workers' ranges and the paths through them.
Out: a `Plan`, the order of operations on each worker, and the `Dispatcher` that decides which operation a
worker runs next. The simulator plays a plan in virtual time and the worker plays the same plan with tensors;
both ask the same policy (`policy.decide`), so what is predicted is what runs.
"""

from .components import components
from .dispatcher import Dispatcher, check_order, peak_in_flight
from .grids import dealt, grid
from .operations import Kind, Operation
from .plan import Hop, InvalidPlan, Path, Plan, Range, Schedule
from .schedules import InvalidOrder, orders
from .traffic import messages, output_of, own_part

__all__ = [
    "Dispatcher",
    "Hop",
    "InvalidOrder",
    "InvalidPlan",
    "Kind",
    "Operation",
    "Path",
    "Plan",
    "Range",
    "Schedule",
    "check_order",
    "components",
    "dealt",
    "grid",
    "messages",
    "orders",
    "output_of",
    "own_part",
    "peak_in_flight",
]
