"""Facts that earlier versions wrote and this one does not decide, as it reads them.

Until a calibration became a generation of kind `profile`, each part of it was a fact. The worker that was
chosen to look at the model is read as the one member of such a generation; what came after that, until the
recipe was fixed, is kept to be shown. A calibration that was under way begins again.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import model_serializer

from .base import BaseFact

OBSOLETE = ("surveyed", "share_dealt", "sections_measured", "probe_dealt", "probe_opened", "probe_ended")
_MARKS = tuple(f'"fact":"{name}"' for name in ("profiler_chosen", *OBSOLETE))


class Obsolete(BaseFact):
    """Something that earlier versions decided and this one does not: it changes nothing."""

    fact: Literal["obsolete"] = "obsolete"
    name: str
    written: dict[str, Any]  # all of it, as it was

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        return self.written


def translated(text: str) -> str:
    """The JSON of a fact of any version, as this one reads it; what is damaged stays as it is."""
    if not any(mark in text for mark in _MARKS):
        return text
    try:
        written: Any = json.loads(text)
    except ValueError:
        return text
    match written:
        case {"fact": "profiler_chosen", "at": at, "worker": worker, "incarnation": incarnation}:
            return json.dumps(_planned(at, worker, incarnation))
        case {"fact": name, "at": at} if name in OBSOLETE:
            return json.dumps({"at": at, "fact": "obsolete", "name": name, "written": written})
        case _:
            return text


def _planned(at: float, worker: str, incarnation: int) -> dict[str, Any]:
    return {
        "at": at,
        "fact": "generation_planned",
        "kind": "profile",
        "number": 1,
        "cause": "start",
        "plan": {},
        "members": [[worker, incarnation]],
        "predicted_s": None,
        "detected_at": at,
        "decided_s": 0.0,
    }
