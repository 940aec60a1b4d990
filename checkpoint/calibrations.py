"""Calibrations that jobs share: texts under their fingerprints, beside the jobs' own folders.

They are whole or not there, as all objects; whoever reads one checks it, and measures anew what is unfit.
"""

from __future__ import annotations

from .errors import NotFound
from .layout import calibration_key
from .stores.store import Store


def load_calibration(store: Store, fingerprint: str) -> bytes | None:
    """What was stored under `fingerprint`; None if nothing was. Raises `StoreUnavailable`."""
    try:
        return store.get(calibration_key(fingerprint))
    except NotFound:
        return None


def save_calibration(store: Store, fingerprint: str, text: str) -> None:
    """Store it, over what is there: of two that measured the same, either will do. Raises
    `StoreUnavailable`."""
    store.put(calibration_key(fingerprint), text.encode())
