"""Types of query parameters and headers that several routes have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

MOST = 2**53 - 1  # the largest number that every reader of JSON holds exactly; SQLite's are larger
Since = Annotated[int, Query(ge=0, le=MOST)]
Limit = Annotated[int | None, Query(ge=1, le=MOST)]  # None: all
