"""Draws a simulated step: a Gantt chart (SVG), or a trace for ui.perfetto.dev.

In: a plan, and the result of `simulate` with a timeline. Out: the text of a file. `svg` has what all of
Makara's pictures share.
"""

from .chrome import chrome_trace
from .gantt import draw
from .lanes import Lane, Pipeline, Timeline, timeline_of

__all__ = ["Lane", "Pipeline", "Timeline", "chrome_trace", "draw", "timeline_of"]
