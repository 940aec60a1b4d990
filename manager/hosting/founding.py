"""`python -m makara.manager.hosting.founding HOME FILE`: creates a manager's home with an owner."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from ..service.tokens import TokenStore


def found(home: Path, owner: dict[str, Any]) -> None:
    """Create the home. `owner`: the manager's identity, and id and hash of its owner's token."""
    with closing(TokenStore(home / "tokens.sqlite3", identity=owner["identity"])) as tokens:
        tokens.admit(owner["token_id"], bytes.fromhex(owner["token_sha256"]), "owner")


if __name__ == "__main__":
    found(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
