"""`makara token`: make, list and revoke tokens of users and of machines; it needs the admin token."""

from __future__ import annotations

import argparse
import json

from rich.table import Table

from ..home import ConfigError
from .client import connect
from .show import day_and_time, print_table


def add(options: argparse.Namespace) -> int:
    """Make a token and print it; it is not shown again."""
    if options.join and options.uses is None:
        raise ConfigError("--uses: say how many machines may join with this token")
    if options.uses is not None and not options.join:
        raise ConfigError("--uses: goes with --join only")
    if options.name is None and not options.join:
        raise ConfigError("name: say whose token it is, or --join for one by which machines join")
    body = {
        "name": options.name or "machines",
        "scope": "machine" if options.join else "user",
        "ttl_s": None if options.days is None else 86400.0 * options.days,
        "uses": options.uses,
    }
    with connect(options) as client:
        made = client.post("/tokens", json=body)
    print(json.dumps(made) if options.json else made["token"])
    return 0


def list_(options: argparse.Namespace) -> int:
    with connect(options) as client:
        answer = client.get("/tokens")
    if options.json:
        print(json.dumps(answer))
        return 0
    table = Table("ID", "NAME", "SCOPE", "MADE", "EXPIRES", "USED", box=None, pad_edge=False)
    for token in answer["tokens"]:
        expires = "never" if token["expires_at"] is None else day_and_time(token["expires_at"])
        used = "" if token["uses"] is None else f"{token['used']} of {token['uses']}"
        made = day_and_time(token["created_at"])
        table.add_row(token["id"], token["name"], token["scope"], made, expires, used)
    print_table(table)
    return 0


def revoke(options: argparse.Namespace) -> int:
    """Revoke a token by its id, or by the token itself (the id is the part before the dot)."""
    with connect(options) as client:
        client.delete(f"/tokens/{options.id.partition('.')[0]}")
    return 0
