"""Classifies AWS's error codes.

The codes: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html. An unlisted code with
status 4xx means that the request was refused and nothing was done; after anything else, as after a lost
connection, the outcome is unknown.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from .. import (
    Ended,
    NoCapacity,
    NotAllowed,
    NotSold,
    ProviderError,
    QuotaExceeded,
    Throttled,
    Unauthenticated,
)

_KINDS: dict[type[ProviderError], tuple[str, ...]] = {
    NoCapacity: (
        "InsufficientInstanceCapacity",
        "InsufficientHostCapacity",
        "InsufficientCapacity",
        "InsufficientReservedInstanceCapacity",
        "InsufficientFreeAddressesInSubnet",
        "UnfulfillableCapacity",
    ),
    NotSold: (
        "SpotMaxPriceTooLow",
        "Unsupported",  # the type is not available in this zone
    ),
    QuotaExceeded: (
        "InstanceLimitExceeded",
        "VcpuLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "MaxIOPSLimitExceeded",
        "VolumeLimitExceeded",
        "AddressLimitExceeded",
        "PendingVerification",  # a new account, for minutes to hours
    ),
    Throttled: (
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
        "EC2ThrottledException",
        "SlowDown",
    ),
    Unauthenticated: (
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "RequestExpired",  # also if this machine's clock is wrong
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    ),
    Ended: ("IdempotentInstanceTerminated",),
}
_BY_CODE = {code: kind for kind, codes in _KINDS.items() for code in codes}
_WITHOUT_A_CALL = (ParamValidationError, ProfileNotFound)
_NOT_SIGNED = (  # and not sent
    CredentialRetrievalError,
    NoAuthTokenError,
    NoCredentialsError,
    PartialCredentialsError,
    SSOError,
    TokenRetrievalError,
)
_LONGEST = 400  # a refusal for lack of rights contains a long encoded text


class Mismatch(ProviderError):
    """The client token was used before with other parameters, so something was created with it."""


class UnknownToAws(ProviderError):
    """AWS does not know that name, or not yet."""


class RegionDisabled(NotAllowed):
    """The account has not enabled this region."""


def disabled(region: str) -> str:
    """What a person can do about a region that refuses an account whose credentials are right."""
    return (
        f"region {region} is not enabled for this account: enable it (aws account enable-region "
        f"--region-name {region}) or use another"
    )


@contextmanager
def translated(what: str) -> Generator[None]:
    """Turn the library's errors into `ProviderError`s that begin with `what`."""
    try:
        yield
    except ClientError as error:
        raise _kind_of(error)(f"{what}: {_words(error)}") from error
    except _WITHOUT_A_CALL as error:
        raise NotAllowed(f"{what}: {error}") from error
    except _NOT_SIGNED as error:
        raise Unauthenticated(f"{what}: {error}") from error
    except (BotoCoreError, ResponseParserError) as error:
        raise ProviderError(f"{what}: {error}") from error


def _kind_of(error: ClientError) -> type[ProviderError]:
    code = str(error.response.get("Error", {}).get("Code", ""))
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code == "IdempotentParameterMismatch":
        return Mismatch
    if code == "OptInRequired" and "Marketplace" not in _words(error):  # else terms of an image
        return RegionDisabled
    if code.endswith(".NotFound") or code == "NoSuchResourceException":
        return UnknownToAws
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
    return NotAllowed if 400 <= status < 500 else ProviderError


def _words(error: ClientError) -> str:
    told = error.response.get("Error", {})
    text = f"{told.get('Code', 'error')}: {told.get('Message', 'no message')}"
    if told.get("Code") == "OptInRequired" and "Marketplace" not in text:
        text = f"the region is not enabled for this account, or the account is not active yet ({text})"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
