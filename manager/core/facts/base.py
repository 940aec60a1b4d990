"""What all facts have."""

from __future__ import annotations

from ...spec.frozen import Frozen


class BaseFact(Frozen):
    at: float  # Unix seconds, from the event that caused it
