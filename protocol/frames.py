"""Frames between manager and agent, read by a side that may be older or newer than the writer.

Unknown fields and unknown kinds of frames are passed over. An unknown value of an enumeration is read as
its `other` in what tells (see `unknown_values`); in orders it is `UnknownOrder`, since half of what is wanted
must not be done. What cannot be read is `Malformed`, and a side that speaks another protocol altogether is a
`Misfit`; none of these ends a process. An agent and its trainers are two sides, too: after an upgrade in
place a trainer that is started anew is of the version on disk.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import version
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .messages import (
    PROTOCOL,
    TO_AGENT,
    Beat,
    Credential,
    Message,
    Orders,
    Refusal,
    Report,
    ReportAck,
    Welcome,
)
from .unknown_values import FROM_ANOTHER_VERSION

M = TypeVar("M", bound=Message)

log = logging.getLogger("makara.frames")
_SHOWN_FAULTS = 3
_BEAT = '{"type":"beat"'
_NOT_A_CHOICE = ("literal_error", "enum")


class Malformed(ValueError):
    """A frame that cannot be read; the message names the first faults, and holds no values."""


class Misfit(Exception):
    """The other side speaks another protocol; the message says which side speaks which."""


class UnknownOrder(Exception):
    """Orders with a value that this version does not know; the message names it."""


class _Envelope(BaseModel):
    """What every version of every frame can be read as."""

    model_config = ConfigDict(extra="ignore")

    type: str = ""
    protocol: int = PROTOCOL
    makara: str = ""


@cache
def makara_version() -> str:
    """The version of this installation."""
    return version("makara")


def read_to_agent(frame: str | bytes) -> Welcome | Orders | ReportAck | Credential | None:
    """A frame from the manager; None for a kind that this version does not know.

    Raises `Malformed`, `UnknownOrder`, and `Misfit` for the welcome of a manager with another protocol.
    """
    try:
        message = TO_AGENT.validate_json(frame, extra="ignore")
    except ValidationError as error:
        envelope = _envelope(frame)
        _check_protocol("the manager", envelope.protocol, envelope.makara)
        if any(fault["type"] == "union_tag_invalid" and not fault["loc"] for fault in error.errors()):
            log.warning("passing over a frame of unknown type %r: the manager is newer", envelope.type)
            return None
        if all(fault["type"] in _NOT_A_CHOICE for fault in error.errors()):
            raise UnknownOrder(_faults(error)) from error
        raise Malformed(_faults(error)) from error
    if isinstance(message, Welcome):
        _check_protocol("the manager", message.protocol, message.makara)
    return message


def read_report_or_beat(frame: str) -> Report | Beat:
    """A frame from an agent; raises as `read_report`."""
    if not frame.startswith(_BEAT):
        return read_report(frame)
    try:
        return Beat.model_validate_json(frame, extra="ignore", context=FROM_ANOTHER_VERSION)
    except ValidationError as error:
        raise Malformed(_faults(error)) from error


def read_report(frame: str | bytes) -> Report:
    """An agent's report. Raises `Malformed`, and `Misfit` for that of an agent with another protocol."""
    try:
        report = Report.model_validate_json(frame, extra="ignore", context=FROM_ANOTHER_VERSION)
    except ValidationError as error:
        envelope = _envelope(frame)
        _check_protocol("the agent", envelope.protocol, envelope.makara)
        raise Malformed(_faults(error)) from error
    _check_protocol("the agent", report.protocol, report.makara)
    return report


def read_from_trainer(kind: type[M], value: Any) -> M:
    """A message of a trainer that may be newer than its agent. Raises `ValidationError`."""
    return kind.model_validate(value, extra="ignore", context=FROM_ANOTHER_VERSION)


def read_from_agent(line: bytes) -> Orders:
    """Orders that an agent passed on, which may be older than its trainer. Raises `ValidationError`."""
    return Orders.model_validate_json(line, extra="ignore")


def read_refusal(body: bytes) -> Refusal | None:
    """The refusal in the body of an answer; None if it is not a manager's."""
    try:
        return Refusal.model_validate_json(body, extra="ignore")
    except ValidationError:
        return None  # whoever answered, it was not a manager that knows of VMs


def _envelope(frame: str | bytes) -> _Envelope:
    try:
        return _Envelope.model_validate_json(frame)
    except ValidationError as error:
        raise Malformed(_faults(error)) from error


def _check_protocol(side: str, protocol: int, makara: str) -> None:
    if protocol != PROTOCOL:
        raise Misfit(
            f"{side} (makara {makara or 'of unknown version'}) speaks protocol {protocol}, "
            f"this side (makara {makara_version()}) protocol {PROTOCOL}"
        )


def _faults(error: ValidationError) -> str:
    shown = [
        f"{'.'.join(str(part) for part in fault['loc']) or 'frame'}: {fault['msg']}"
        for fault in error.errors(include_url=False, include_input=False)[:_SHOWN_FAULTS]
    ]
    return "; ".join(shown)
