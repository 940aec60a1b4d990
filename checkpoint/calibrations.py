"""Calibrations that jobs share, stored as text under their fingerprints, beside the jobs' folders.

Readers check a calibration, and measure again if it does not fit.
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
    """Store a calibration, replacing an equivalent one. Raises `StoreUnavailable`."""
    store.put(calibration_key(fingerprint), text.encode())
