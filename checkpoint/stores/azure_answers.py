"""Translates answers of Azure Blob Storage into errors of this package."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from azure.core.exceptions import (
    AzureError,
    DecodeError,
    HttpResponseError,
    IncompleteReadError,
    ServiceRequestError,
    ServiceResponseError,
)

from ..errors import CheckpointError, NotFound, StoreRefused, StoreUnavailable
from .advice import about_azure, about_connection
from .bounded_http import SMALL, AnswerTooLarge, Bounds, bounded
from .clock_skew import describe_skew

ABSENT = "BlobNotFound"
LOST_SWAP = ("ConditionNotMet", "BlobAlreadyExists", ABSENT)
PAST_END = "InvalidRange"
_UNAUTHENTICATED = ("AuthenticationFailed", "InvalidAuthenticationInfo", "")
# 4xx codes that say "not now" (Azure, Blob Storage error codes).
_TRANSIENT = {
    "ConditionNotMet",  # it was replaced while it was read
    "InvalidBlockList",  # another write, or an abort, took the blocks: the write may begin anew
    "InvalidBlobOrBlock",
    "Md5Mismatch",
    "Crc64Mismatch",
    "OperationTimedOut",
    "ServerBusy",
    "InternalError",
    "AccountBeingCreated",
    "ContainerBeingDeleted",
}


@contextmanager
def translated(where: str, key: str, bounds: Bounds = SMALL) -> Generator[None]:
    """Bound all answers of a call, and translate the client's errors into ours, without their cause, which
    can hold the signature of a SAS."""
    try:
        with bounded(bounds):
            yield
    except AnswerTooLarge as error:
        raise StoreRefused(f"{where}: {key}: {error}") from None
    except CheckpointError:
        raise
    except (IncompleteReadError, DecodeError, ServiceRequestError, ServiceResponseError) as error:
        raise StoreUnavailable(f"{where}: {key}: {_words(error)}{about_connection()}") from None
    except HttpResponseError as error:
        raise _answer(where, key, error, time.time()) from None
    except (AzureError, ValueError) as error:
        raise StoreRefused(f"{where}: {key}: {_words(error)}") from None
    except OSError as error:  # of a file that is sent, or of a connection
        raise StoreUnavailable(f"{where}: {key}: {_words(error)}") from None


def code_of(error: HttpResponseError) -> str:
    """Azure's code, such as `BlobNotFound`; empty if it gave none."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _answer(where: str, key: str, error: HttpResponseError, now: float) -> Exception:
    code, status = code_of(error), error.status_code or 0
    if code == ABSENT:
        return NotFound(f"{key} in {where}: no such object")
    response: Any = error.response
    date = None if response is None else response.headers.get("Date")
    skew = describe_skew(date, now) if status in (401, 403) and code in _UNAUTHENTICATED else None
    message = f"{where}: {key}: {code or status}: {f'{skew}: ' if skew else ''}{_words(error)}"
    transient = status in (0, 408, 429) or (status >= 500 and status != 501)
    if transient or skew or code in _TRANSIENT:
        return StoreUnavailable(message)
    return StoreRefused(message + about_azure(code, status))


def _words(error: BaseException) -> str:
    """The first line of the error's message, and its reason for failed authentication, without signatures."""
    text = str(error.message if isinstance(error, AzureError) else error)
    details = [detail for detail in re.findall(r"<AuthenticationErrorDetail>([^<\n]*)", text) if detail]
    line = next(iter(text.splitlines()), type(error).__name__)
    return re.sub(r"(?i)\b(sig=)[^&\s'\")]+", r"\1(hidden)", "; ".join([line, *details]))
