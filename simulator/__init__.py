"""The simulator: predicts the time and memory of a plan's step in virtual time.

In: a plan, the calibration of the model on its hardware, the VM and slowdown of each worker; or the text of
an availability trace. Out: the time and the memory of one mini-batch, or of the rest of one, with its
timeline, and what of it is done at an instant (`progress`); the trace's events. Times are whole nanoseconds
and jitter is seeded, so equal input gives equal output. `makara.pipeline` decides which operation a worker
runs next, as it does for real workers. Begin with `minibatch`: `engine` runs the operations, interpreted or
compiled (`backends`); `step_end` adds all-reduces, commit and optimizer.
"""

from .backends import Compiler, warm_up
from .calibration.data import Calibration, InvalidCalibration, Link
from .calibration.links import AllReduce, MeasuredWire
from .calibration.measurements import Measurements
from .calibration.sizes import Sizes, sizes_of
from .cluster import to_ns
from .costs import InvalidCosts, MorphCosts
from .progress import Done, StepProgress
from .simulation import MiniBatch, simulate
from .spans import Span
from .staggered import staggered_step_s
from .step_end import COMMIT_BYTES, LOSS_ALLREDUCE_BYTES, Closing, ClosingKind
from .trace import InvalidTrace, NodeChange, TraceEvent, read_availability, read_counts, read_trace

__all__ = [
    "AllReduce",
    "COMMIT_BYTES",
    "LOSS_ALLREDUCE_BYTES",
    "Calibration",
    "Done",
    "NodeChange",
    "Closing",
    "Compiler",
    "ClosingKind",
    "InvalidCalibration",
    "InvalidCosts",
    "InvalidTrace",
    "Link",
    "Measurements",
    "MiniBatch",
    "MorphCosts",
    "Sizes",
    "Span",
    "StepProgress",
    "TraceEvent",
    "MeasuredWire",
    "read_availability",
    "read_counts",
    "read_trace",
    "simulate",
    "sizes_of",
    "staggered_step_s",
    "to_ns",
    "warm_up",
]
