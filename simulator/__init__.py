"""Virtual time: what a plan would take, before any machine runs it.

In: a plan, the calibration of the model on its hardware, where the workers are and how slow each is; or the
text of an availability trace. Out: the time and the memory of one mini-batch with its timeline; the trace's
events. Whole nanoseconds and seeded jitter, so that equal input gives equal output. Which operation a worker
runs next is asked of `makara.pipeline`, as the real worker does. `play` goes through the operations, in code
that is interpreted or compiled (`code`); `closing` adds sums, commit and optimizer.
"""

from .calibration.data import Calibration, InvalidCalibration, Link
from .calibration.links import AllReduce, Wire
from .calibration.measurements import Measurements, load_measurements
from .calibration.sizes import sizes_of
from .closing import COMMIT_BYTES, TALLY_BYTES, Closing, ClosingKind
from .cluster import to_ns
from .code import warm_up
from .costs import InvalidCosts, MorphCosts
from .minibatch import MiniBatch, simulate
from .spans import Span
from .trace import Change, InvalidTrace, TraceEvent, read_availability, read_counts, read_trace

__all__ = [
    "AllReduce",
    "COMMIT_BYTES",
    "TALLY_BYTES",
    "Calibration",
    "Change",
    "Closing",
    "ClosingKind",
    "InvalidCalibration",
    "InvalidCosts",
    "InvalidTrace",
    "Link",
    "Measurements",
    "MiniBatch",
    "MorphCosts",
    "Span",
    "TraceEvent",
    "Wire",
    "load_measurements",
    "read_availability",
    "read_counts",
    "read_trace",
    "simulate",
    "sizes_of",
    "to_ns",
    "warm_up",
]
