"""Maps Azure's errors to `ProviderError`s.

Sources, by code: `learn.microsoft.com/azure/virtual-machines/error-codes-spot` (spot),
`learn.microsoft.com/troubleshoot/azure/virtual-machines/windows/error-messages` (VMs),
`learn.microsoft.com/azure/azure-resource-manager/troubleshooting/error-sku-not-available` and
`.../error-resource-quota`, `learn.microsoft.com/azure/virtual-machines/compute-throttling-limits` (429).
"""

from __future__ import annotations

from azure.core.exceptions import AzureError, ClientAuthenticationError, HttpResponseError

from .. import NoCapacity, NotAllowed, NotSold, ProviderError, QuotaExceeded, Throttled, Unauthenticated

_CAPACITY = frozenset(
    {
        "AllocationFailed",
        "ZonalAllocationFailed",
        "OverconstrainedAllocationRequest",
        "OverconstrainedZonalAllocationRequest",
        "SkuNotAvailable",  # for spot: no capacity; `check` finds a type that the region never has
    }
)
_NOT_SOLD = frozenset({"SpotPriceGreaterThanProvidedMaxPrice"})
_QUOTA = frozenset({"QuotaExceeded", "ResourceQuotaExceeded", "SubnetIsFull", "PublicIPCountLimitReached"})
_NOT_SIGNED_IN, _TIMED_OUT, _CONFLICT = 401, 408, 409
_MOST_SHOWN = 400

# Conflicts that pass.
_BUSY = frozenset({"Conflict", "OperationPreempted", "RetryableError"})

# Deletions that succeed later: Azure reserves the interface of a failed VM for 180 s.
STILL_USED = frozenset(
    {
        "NicReservedForAnotherVm",
        "NicInUse",
        "InUseNetworkInterfaceCannotBeDeleted",
        "PublicIPAddressCannotBeDeleted",
        "DiskInUse",
        "OperationNotAllowed",
        "AnotherOperationInProgress",
        "RetryableErrorDueToAnotherOperation",
        "ConflictingConcurrentWriteNotAllowed",
    }
)


def of_request(error: AzureError) -> ProviderError:
    """The error of a request that was refused or had no answer."""
    status = status_of(error)
    if isinstance(error, ClientAuthenticationError) or status == _NOT_SIGNED_IN:
        return Unauthenticated(f"Azure does not accept the manager's credentials: {_shown(error)}")
    if status == 429:
        return Throttled(f"Azure is asked too often: {_shown(error)}")
    known = _of_code(code_of(error), message_of(error))
    if known is not None:
        return known
    return (NotAllowed if _is_refused(error) else ProviderError)(_shown(error))


def _is_refused(error: AzureError) -> bool:
    """Whether Azure refused the request for good, and did nothing. A conflict without a code, or with one of
    something else that is under way, passes."""
    status, code = status_of(error), code_of(error)
    if status == _CONFLICT:
        return bool(code) and code not in STILL_USED | _BUSY
    return status is not None and 400 <= status < 500 and status != _TIMED_OUT


def of_failure(code: str, message: str) -> ProviderError:
    """The error of a creation that failed and left nothing. With an unknown code, another place may do."""
    known = _of_code(code, message)
    if known is not None:
        return known
    refused = code.startswith("Invalid") or code.endswith("NotFound") or code.endswith("AuthorizationFailed")
    return (NotAllowed if refused else NoCapacity)(_text(code, message))


def status_of(error: AzureError) -> int | None:
    return error.status_code if isinstance(error, HttpResponseError) else None


def code_of(error: AzureError) -> str:
    detail = error.error if isinstance(error, HttpResponseError) else None
    return str(getattr(detail, "code", None) or "")


def message_of(error: AzureError) -> str:
    detail = error.error if isinstance(error, HttpResponseError) else None
    return str(getattr(detail, "message", None) or error.message)


def _of_code(code: str, message: str) -> ProviderError | None:
    if code in _CAPACITY:
        return NoCapacity(_text(code, message))
    if code in _NOT_SOLD:
        return NotSold(_text(code, message))
    if code in _QUOTA or (code == "OperationNotAllowed" and "quota" in message.lower()):
        return QuotaExceeded(_text(code, message))
    return None


def _shown(error: AzureError) -> str:
    return _text(code_of(error), message_of(error))


def _text(code: str, message: str) -> str:
    """Code and message in one line, shortened: Azure's messages may be a page long."""
    line = " ".join(message.split())
    if len(line) > _MOST_SHOWN:
        line = line[: _MOST_SHOWN - 3] + "..."
    return f"{code}: {line}" if code and not line.startswith(code) else line
