"""The product's chooser, as it is."""

from __future__ import annotations

from .policy import Policy

MAKARA = Policy(name="makara", about="the core and the planner as they are")
