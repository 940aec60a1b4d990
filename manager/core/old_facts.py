"""Facts that earlier versions wrote and this one does not decide, as it reads them.

Until a calibration became a generation of kind `profile`, each part of it was a fact. The worker that was
chosen to look at the model is read as the one member of such a generation; what came after that, until the
recipe was fixed, is kept to be shown. A calibration that was under way begins again.
"""

from __future__ import annotations

import json
from typing import Any

OBSOLETE = ("surveyed", "share_dealt", "sections_measured", "probe_dealt", "probe_opened", "probe_ended")
_MARKS = tuple(f'"fact":"{name}"' for name in ("profiler_chosen", *OBSOLETE))


def translated(text: str) -> str:
    """The JSON of a fact of any version, as this one reads it."""
    if not any(mark in text for mark in _MARKS):
        return text
    written: dict[str, Any] = json.loads(text)
    name = written["fact"]
    if name == "profiler_chosen":
        return json.dumps(_planned(written))
    if name in OBSOLETE:
        return json.dumps({"at": written["at"], "fact": "obsolete", "name": name, "written": written})
    return text


def _planned(chosen: dict[str, Any]) -> dict[str, Any]:
    return {
        "at": chosen["at"],
        "fact": "generation_planned",
        "kind": "profile",
        "number": 1,
        "cause": "start",
        "plan": {},
        "members": [[chosen["worker"], chosen["incarnation"]]],
        "predicted_s": None,
        "detected_at": chosen["at"],
        "decided_s": 0.0,
    }
