"""Clock skew between this machine and a store, which refuses requests signed at another time."""

from __future__ import annotations

from datetime import timedelta
from email.utils import parsedate_to_datetime

_MOST_S = 900.0  # AWS S3, error responses: RequestTimeTooSkewed


def describe_skew(date: str | None, now: float) -> str | None:
    """A message about how far Unix second `now` is from `date`, the store's HTTP date; None if it is near
    enough or unknown."""
    try:
        ahead_s = round(now - parsedate_to_datetime(date or "").timestamp())
    except ValueError:
        return None
    if abs(ahead_s) <= _MOST_S:
        return None
    side = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"this machine's clock is {timedelta(seconds=abs(ahead_s))} {side} the store's, which allows "
        f"{timedelta(seconds=_MOST_S)}; set one of them right"
    )
