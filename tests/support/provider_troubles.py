"""What the stands of the conformance suite can do to their providers."""

from __future__ import annotations

from enum import StrEnum

CONSOLE = "the VM says that it boots"


class Trouble(StrEnum):
    """What a stand can do to its providers. Each but the last two lasts until it is taken away."""

    NO_CAPACITY = "no capacity"
    QUOTA = "quota"
    REFUSED = "refused"
    THROTTLED = "throttled"
    UNREACHABLE = "unreachable"  # whatever is asked
    LATE_LISTS = "late lists"  # what is created from now on is in no list
    LOST_ANSWER = "lost answer"  # of the next creation, which is done
    LEFTOVERS = "leftovers"  # the next creation fails half way: a disk or an interface stays
