"""What a manager says on an agent's connection beside orders."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from .base import PROTOCOL, Message
from .orders import Orders


class ReportAck(Message):
    """The manager has stored what reports carried up to `sequence`. Of beats, few are acknowledged."""

    type: Literal["ack"] = "ack"
    sequence: int


class Welcome(Message):
    """First message of the manager on an agent's connection."""

    type: Literal["welcome"] = "welcome"
    heartbeat_s: float
    server_time: float  # Unix seconds, for logs only
    protocol: int = PROTOCOL
    makara: str = ""  # version of the manager
    manager: str = ""  # which manager this is: the same over its restarts
    max_report_bytes: int = 1 << 24  # a larger report closes the connection
    beats: bool = False  # a `Beat` is understood in place of a report without news


class Refusal(Message):
    """The manager's own word that a VM has no place with it; the body of the answer to its connection.

    Any other answer (a proxy's, that of another manager at the same address) says nothing about the VM.
    """

    refused: str  # the VM
    manager: str  # as in `Welcome`
    reason: str


class Credential(Message):
    """The token that this VM shows from now on (reconnections, bundle, secrets); it replaces the join
    token.

    Sent right after `Welcome`, and again on a long connection well before the old one ends.
    """

    type: Literal["token"] = "token"
    token: str
    valid_for_s: float


# Frames from the manager to an agent, on the WebSocket `/api/v1/agents/{vm}`; the other way go `Report`s and
# `Beat`s.
ToAgent = Annotated[Welcome | Orders | ReportAck | Credential, Field(discriminator="type")]
TO_AGENT: TypeAdapter[Welcome | Orders | ReportAck | Credential] = TypeAdapter(ToAgent)
