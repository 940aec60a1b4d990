"""Virtual time: what a plan would take, before any machine runs it.

In: a plan, the calibration of the model on its hardware, where the workers are and how slow each is; or the
text of an availability trace. Out: the time and the memory of one mini-batch with its timeline; the trace's
events. Whole nanoseconds and seeded jitter, so that equal input gives equal output. Which operation a worker
runs next is asked of `makara.pipeline`, as the real worker does. Begin with `minibatch`: `engine` runs the
operations, interpreted or compiled (`backends`); `step_end` adds all-reduces, commit and optimizer.
"""

from .backends import warm_up
from .calibration.data import Calibration, InvalidCalibration, Link
from .calibration.links import AllReduce, Wire
from .calibration.measurements import Measurements, load_measurements
from .calibration.sizes import sizes_of
from .cluster import to_ns
from .costs import InvalidCosts, MorphCosts
from .simulation import MiniBatch, simulate
from .spans import Span
from .step_end import COMMIT_BYTES, LOSS_ALLREDUCE_BYTES, Closing, ClosingKind
from .trace import Change, InvalidTrace, TraceEvent, read_availability, read_counts, read_trace

__all__ = [
    "AllReduce",
    "COMMIT_BYTES",
    "LOSS_ALLREDUCE_BYTES",
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
