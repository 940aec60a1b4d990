"""Clients of AWS, one for each region and service, created at first use."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config

from .. import ProviderError, Unauthenticated
from . import errors
from .sessions import new_session

_PRICE_REGION = "us-east-1"  # one of the few regions that serve the price list, which is the same in all
_HOME = "us-east-1"  # enabled for every account
# The library never retries: callers do, as they know whether a call is still wanted.
_CONFIG = Config(
    connect_timeout=5, read_timeout=30, retries={"total_max_attempts": 1}, max_pool_connections=32
)


class Clients:
    """Safe to use from several threads. Raises `NotAllowed` for a missing profile.

    boto3 looks for credentials once and keeps the result, even if it found none. So session and clients are
    replaced after AWS has refused them, except for a session that was passed in.
    """

    def __init__(self, endpoint_url: str | None, session: boto3.Session | None = None) -> None:
        self._endpoint_url = endpoint_url
        self._given = session
        with errors.translated("aws"):
            self._session: boto3.Session | None = session or new_session()
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], Any] = {}

    def ec2(self, region: str) -> Any:
        return self._client("ec2", region)

    def sts(self, region: str) -> Any:
        return self._client("sts", region)

    def quotas(self, region: str) -> Any:
        return self._client("service-quotas", region)

    def pricing(self) -> Any:
        return self._client("pricing", _PRICE_REGION)

    @contextmanager
    def translated(self, what: str, region: str = "") -> Generator[None]:
        """A context for calls by these clients, which turns the library's errors into `ProviderError`s.

        In a region that is not enabled for the account AWS refuses credentials that are right: it is asked
        about them elsewhere before they are blamed. Raises `RegionDisabled`.
        """
        used = self._session
        try:
            with errors.translated(what):
                yield
        except Unauthenticated as error:
            if region and region != _HOME and self._knows_us(_HOME):
                why = f"{errors.disabled(region)} ({error})"
                if not self._knows_us(region):
                    raise errors.RegionDisabled(f"{what}: {why}") from error
                raise Unauthenticated(f"{what}: {why}") from error
            self._forget(used)
            raise

    def _knows_us(self, region: str) -> bool:
        """Whether the credentials are accepted there."""
        try:
            with errors.translated(f"credentials in {region}"):
                self.sts(region).get_caller_identity()
        except ProviderError:
            return False
        return True

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _forget(self, used: boto3.Session | None) -> None:
        """Discard the session, unless another thread has done so. Running calls keep their clients."""
        with self._lock:
            if self._session is used:
                self._session = self._given
                self._clients.clear()

    def _client(self, service: str, region: str) -> Any:
        with self._lock:
            known = self._clients.get((service, region))
            if known is None:
                with errors.translated(f"{service} in {region}"):
                    if self._session is None:
                        self._session = new_session()
                    known = self._session.client(
                        service,  # pyright: ignore[reportArgumentType, reportCallIssue]
                        region_name=region,
                        endpoint_url=self._endpoint_url,
                        config=_CONFIG,
                    )
                self._clients[service, region] = known
            return known
