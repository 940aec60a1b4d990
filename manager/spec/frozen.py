"""What events, commands and facts are made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Never changes; fields that it does not know are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
