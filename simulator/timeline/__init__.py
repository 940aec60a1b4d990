"""A simulated step for people to look at: a Gantt chart (SVG), or a trace for ui.perfetto.dev.

In: a plan, and what `simulate` says of it with a timeline. Out: the text of a file.
"""

from .chrome import chrome_trace
from .gantt import draw
from .lanes import Lane, Pipeline, Timeline, timeline_of

__all__ = ["Lane", "Pipeline", "Timeline", "chrome_trace", "draw", "timeline_of"]
