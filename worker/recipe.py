"""Errors about recipes that this process cannot meet."""

from __future__ import annotations

from ..model.errors import RecipeMismatch
from ..protocol.hashes import short


def other_graph(found: str, wanted: str, who: str = "the recipe") -> RecipeMismatch:
    """The error that this VM traced a different graph than `who` wants."""
    return RecipeMismatch(
        f"graph_hash: this VM traced {short(found)}, {who} says {short(wanted)}: its libraries or its copy "
        "of the code differ, or the job's code builds another model where its environment differs "
        "(variables, host name, files, time)"
    )
