"""The base class of events, commands and facts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable model; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
