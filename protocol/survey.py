"""What is measured of a model, in parts: what there is to measure, and one row for each section and m.

Members of a generation of kind `profile` hand these to each other; nothing here imports torch.
"""

from __future__ import annotations

from pydantic import Field

from .bounds import MOST_ENTRIES, Count, Finite, JsonObject, Name, Seconds, Text
from .messages.base import Message
from .messages.recipe import Recipe


class Timed(Message):
    """A measured time in seconds; see makara.simulator.calibration.statistics."""

    median: Seconds
    spread: Seconds
    repeats: int = Field(ge=1)
    dropped: Count


class SectionRow(Message):
    """One section, measured for one m: the columns of a calibration, by field name."""

    microbatch_size: int = Field(ge=1)
    section: Count
    times: dict[Name, Timed] = Field(max_length=100)
    sizes: dict[Name, Count] = Field(max_length=100)
    seconds: Seconds  # that measuring it took


class TiedParameters(Message):
    """The parameters that exactly these sections use, whose gradients are summed over all hosts of them."""

    sections: list[Count] = Field(min_length=2, max_length=MOST_ENTRIES)
    gradient_bytes: Count


class Layout(Message):
    """The model for micro-batches of m: how it is cut, and what crosses each cut."""

    microbatch_size: int = Field(ge=1)
    graph_hash: Name
    cuts: list[Count] = Field(max_length=MOST_ENTRIES)
    cut_bytes: list[Count] = Field(max_length=MOST_ENTRIES)
    grad_cut_bytes: list[Count] = Field(max_length=MOST_ENTRIES)
    labels: list[Text] = Field(max_length=MOST_ENTRIES)
    tied: list[TiedParameters] = Field(default=[], max_length=MOST_ENTRIES)


class Survey(Message):
    """What the first worker found that is to be measured, and the part of it that it has measured itself."""

    basis: JsonObject  # makara.simulator.calibration.measurements.Basis
    recipe: Recipe  # of the most likely m; that of another differs in m, N, cuts and graph hash
    layouts: list[Layout] = Field(max_length=100)  # one for each m
    rows: list[SectionRow] = Field(max_length=MOST_ENTRIES)
    executor: dict[Name, Finite] = Field(max_length=100)  # what a worker's own code takes: calibration fields
    # What one machine can tell of links: makara.simulator.calibration.links.Wire
    wires: list[JsonObject] = Field(max_length=1000)
    seconds: Seconds  # that it took, without the rows
    note: Text = ""  # why a stored calibration was not used
