"""The dynamic programme behind pipeline templates: every last part of a pipeline that a best one may have.

A label is such a part: so many devices, counted from the last stage, and the sections from one on. Of two
labels of the same devices and sections one that is worse in both time and trip is dropped, so each place has
a front of labels: the less time, the longer the trip. Both grow from a part to a longer one, and by the same
rule for all, so no best pipeline is lost.

`fill` is compiled by numba where that is installed (`simulator.compiling`): it makes no arrays, and all that
it reads and writes are whole numbers.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

Numbers = MutableSequence[int]


class StageCosts(NamedTuple):
    """Of the stage of the sections start..stop-1, at start * (K + 1) + stop."""

    work_ns: Sequence[int]
    """All of its operations for one micro-batch."""
    trip_ns: Sequence[int]
    """Those of them that the first micro-batch of a step and the last one wait for."""
    window: Sequence[int]
    """Micro-batches that fit into a worker's memory at a time; 0: not one, nor for any later stop."""

    def bounds(self, num_micro_batches: int) -> bool:
        """Whether memory holds fewer micro-batches than so many, for some stage."""
        return any(0 < each < num_micro_batches for each in self.window)


class CutCosts(NamedTuple):
    """Of the cut before a section, between two workers of one VM (near) and of two VMs (far)."""

    near_ns: Sequence[int]
    """Of an activation and its gradient, there and back."""
    far_ns: Sequence[int]
    near_work_ns: Sequence[int]
    """For how long the busier direction of a wire is occupied by one of them."""
    far_work_ns: Sequence[int]


class Fronts(NamedTuple):
    """Of q devices and the sections from one on, at q * (K + 1) + section: its labels' place and number."""

    first: Numbers
    number: Numbers


class Labels(NamedTuple):
    """Each front in the order of time."""

    time_ns: Numbers
    """Of all micro-batches in these stages, from the first one's arrival to the last one's gradient."""
    trip_ns: Numbers
    """Of one micro-batch through these stages and back."""
    after: Numbers
    """The label of the stages after the first one; -1: none."""
    start: Numbers
    """The first stage's first section, and its number of workers."""
    width: Numbers


class Front(NamedTuple):
    """Room for one front while it grows, as in `Labels`."""

    time_ns: Numbers
    trip_ns: Numbers
    after: Numbers
    width: Numbers


def fill(
    num_sections: int,
    num_devices: int,
    per_vm: int,
    num_micro_batches: int,
    is_bounded: bool,
    stages: StageCosts,
    cuts: CutCosts,
    fronts: Fronts,
    labels: Labels,
    front: Front,
) -> int:
    """Find all labels of up to `num_devices` devices. Returns their number, or -1 if the room is too little.

    A stage has 1..`per_vm` devices of one VM, which take its micro-batches in turn. `is_bounded`:
    `stages.bounds`; without, trips do not matter, and are left out.
    """
    row = num_sections + 1
    fronts.first[num_sections] = 0
    fronts.number[num_sections] = 1
    labels.time_ns[0] = 0
    labels.trip_ns[0] = 0
    labels.after[0] = -1
    labels.start[0] = num_sections
    labels.width[0] = 0
    used = 1
    for devices in range(1, num_devices + 1):
        most = (devices - 1) % per_vm + 1
        for start in range(num_sections - 1, -1, -1):
            length = 0
            for width in range(1, most + 1):
                length = _extend(
                    num_sections,
                    per_vm,
                    num_micro_batches,
                    is_bounded,
                    devices,
                    start,
                    width,
                    length,
                    stages,
                    cuts,
                    fronts,
                    labels,
                    front,
                )
                if length < 0:
                    return -1
            if used + length > len(labels.time_ns):
                return -1
            place = devices * row + start
            fronts.first[place] = used
            fronts.number[place] = length
            for number in range(length):
                labels.time_ns[used] = front.time_ns[number]
                labels.trip_ns[used] = front.trip_ns[number]
                labels.after[used] = front.after[number]
                labels.start[used] = start
                labels.width[used] = front.width[number]
                used += 1
    return used


def _extend(
    num_sections: int,
    per_vm: int,
    num_micro_batches: int,
    is_bounded: bool,
    devices: int,
    start: int,
    width: int,
    length: int,
    stages: StageCosts,
    cuts: CutCosts,
    fronts: Fronts,
    labels: Labels,
    front: Front,
) -> int:
    """Add the labels whose first stage has `width` workers. Returns the front's length, or -1."""
    row = num_sections + 1
    rest = devices - width
    is_near = rest % per_vm != 0
    most = -(-num_micro_batches // width)  # of the stage's workers
    for stop in range(start + 1, num_sections + 1):
        stage = start * row + stop
        window = stages.window[stage]
        if window == 0:
            continue
        place = rest * row + stop
        if fronts.number[place] == 0:
            continue
        work_ns = stages.work_ns[stage]
        own_trip_ns = stages.trip_ns[stage]
        wire_ns = 0
        if stop < num_sections:
            work_ns = max(work_ns, cuts.near_work_ns[stop] if is_near else cuts.far_work_ns[stop])
            wire_ns = cuts.near_ns[stop] if is_near else cuts.far_ns[stop]
        for label in range(fronts.first[place], fronts.first[place] + fronts.number[place]):
            trip_ns = 0
            time_ns = max(labels.time_ns[label] + wire_ns, (most - 1) * work_ns) + own_trip_ns
            if is_bounded:
                # A micro-batch is in flight on this stage until it is back from those after it.
                trip_ns = labels.trip_ns[label] + wire_ns + own_trip_ns
                time_ns = max(time_ns, most * trip_ns // window)
            length = _add(front, length, time_ns, trip_ns, label, width)
            if length < 0:
                return -1
    return length


def _add(front: Front, length: int, time_ns: int, trip_ns: int, after: int, width: int) -> int:
    """Add a label unless another is as good, and drop those that are no better. Returns the length, or -1."""
    low = 0
    high = length
    while low < high:
        middle = (low + high) // 2
        if front.time_ns[middle] < time_ns:
            low = middle + 1
        else:
            high = middle
    # From `low` on no label takes less time.
    if low > 0 and front.trip_ns[low - 1] <= trip_ns:
        return length
    if low < length and front.time_ns[low] == time_ns and front.trip_ns[low] <= trip_ns:
        return length
    worse = low
    while worse < length and front.trip_ns[worse] >= trip_ns:
        worse += 1
    if worse == low:
        if length == len(front.time_ns):
            return -1
        for number in range(length, low, -1):
            _move(front, number - 1, number)
        length += 1
    elif worse > low + 1:
        gap = worse - low - 1
        for number in range(worse, length):
            _move(front, number, number - gap)
        length -= gap
    front.time_ns[low] = time_ns
    front.trip_ns[low] = trip_ns
    front.after[low] = after
    front.width[low] = width
    return length


def _move(front: Front, source: int, target: int) -> None:
    front.time_ns[target] = front.time_ns[source]
    front.trip_ns[target] = front.trip_ns[source]
    front.after[target] = front.after[source]
    front.width[target] = front.width[source]
