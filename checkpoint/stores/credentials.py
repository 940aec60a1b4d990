"""Keys of an S3 store that a caller hands over, in place of those that boto3 would find by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_KEY, _SECRET, _TOKEN = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
CREDENTIALS = (_KEY, _SECRET, _TOKEN)  # what `credentials_in` reads
# By which boto3 finds keys: whoever has keys of its own must not be given some of somebody else's besides.
VARIABLES = (
    _KEY,
    _SECRET,
    _TOKEN,
    "AWS_SECURITY_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)


@dataclass(frozen=True, slots=True)
class Credentials:
    """An access key and its secret, never shown in a log."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


def credentials_in(environment: Mapping[str, str]) -> Credentials | None:
    """The keys that these variables hold; None without AWS_ACCESS_KEY_ID or AWS_SECRET_ACCESS_KEY."""
    if not environment.get(_KEY) or not environment.get(_SECRET):
        return None
    return Credentials(environment[_KEY], environment[_SECRET], environment.get(_TOKEN) or None)


def inherited(environment: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """`environment` with `own` on top; where `own` has keys, without any others."""
    left_out = VARIABLES if credentials_in(own) is not None else ()
    return {**{name: value for name, value in environment.items() if name not in left_out}, **own}
