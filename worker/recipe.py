"""What this process is asked to meet, and does not."""

from __future__ import annotations

from ..model.errors import RecipeMismatch
from ..protocol.hashes import short


def other_graph(found: str, wanted: str, who: str = "the recipe") -> RecipeMismatch:
    """This VM traced another graph than is wanted."""
    return RecipeMismatch(
        f"graph_hash: this VM traced {short(found)}, {who} says {short(wanted)}: its libraries or its copy "
        "of the code differ, or the job's code builds another model where its environment differs "
        "(variables, host name, files, time)"
    )
