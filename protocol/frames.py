"""Reads frames between manager and agent, which may have different versions.

Unknown fields and unknown kinds of frames are ignored. An unknown value of an enumeration is read as `other`
in reports (see `unknown_values`); in orders it raises `UnknownOrder`, because orders must not be carried out
in part. An unreadable frame raises `Malformed`, another protocol `Misfit`; none of these ends a process. An
agent and its trainers may differ, too: after an upgrade in place a restarted trainer has the version on disk.
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
    """An unreadable frame; the message names the first faults, without values."""


class Misfit(Exception):
    """The other side speaks another protocol; the message says which side speaks which."""


class UnknownOrder(Exception):
    """Orders with a value that this version does not know; the message names it."""


class _Envelope(BaseModel):
    """The fields that every version of every frame has."""

    model_config = ConfigDict(extra="ignore")

    type: str = ""
    protocol: int = PROTOCOL
    makara: str = ""


@cache
def makara_version() -> str:
    """The version of this installation."""
    return version("makara")


def read_to_agent(frame: str | bytes) -> Welcome | Orders | ReportAck | Credential | None:
    """Read a frame from the manager; None for a kind that this version does not know.

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
    """Read a frame from an agent; raises like `read_report`."""
    if not frame.startswith(_BEAT):
        return read_report(frame)
    try:
        return Beat.model_validate_json(frame, extra="ignore", context=FROM_ANOTHER_VERSION)
    except ValidationError as error:
        raise Malformed(_faults(error)) from error


def read_report(frame: str | bytes) -> Report:
    """Read an agent's report. Raises `Malformed`, and `Misfit` if the agent has another protocol."""
    try:
        report = Report.model_validate_json(frame, extra="ignore", context=FROM_ANOTHER_VERSION)
    except ValidationError as error:
        envelope = _envelope(frame)
        _check_protocol("the agent", envelope.protocol, envelope.makara)
        raise Malformed(_faults(error)) from error
    _check_protocol("the agent", report.protocol, report.makara)
    return report


def read_from_trainer(kind: type[M], value: Any) -> M:
    """Read a message of a trainer, which may be newer than its agent. Raises `ValidationError`."""
    return kind.model_validate(value, extra="ignore", context=FROM_ANOTHER_VERSION)


def read_from_agent(line: bytes) -> Orders:
    """Read orders from an agent, which may be older than its trainer. Raises `ValidationError`."""
    return Orders.model_validate_json(line, extra="ignore")


def read_refusal(body: bytes) -> Refusal | None:
    """Read the refusal in the body of an answer; None if it is not a manager's."""
    try:
        return Refusal.model_validate_json(body, extra="ignore")
    except ValidationError:
        return None  # the answer is not a manager's


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
