"""Checks at the manager's start that the regions in the settings exist at AWS."""

from __future__ import annotations

import difflib
import socket
from collections.abc import Iterable

from .. import NotAllowed
from .sessions import new_session


def check_regions(regions: Iterable[str]) -> None:
    """Raise `NotAllowed` for a region that the library does not know and whose host name does not resolve
    (AWS opens regions that the library does not know yet)."""
    known = _known()
    for name in regions:
        if name not in known and not _has_address(name):
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise NotAllowed(f"aws.regions.{name}: AWS has no region of this name{meant}")


def _known() -> set[str]:
    session = new_session()
    partitions = session.get_available_partitions()
    return {name for one in partitions for name in session.get_available_regions("ec2", partition_name=one)}


def _has_address(region: str) -> bool:
    """Whether EC2's host there resolves (`docs.aws.amazon.com/general/latest/gr/ec2-service.html`)."""
    host = f"ec2.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:  # no such name, or no name server
        return False
