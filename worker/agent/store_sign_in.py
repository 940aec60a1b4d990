"""Serves credentials of the VM's identity to trainers, which cannot reach the metadata service.

The agent serves them on loopback in the forms that the clouds' libraries know (container credentials for
boto3, App Service for azure-identity), to clients that show a token from the trainers' environment. The
credentials last hours at most, and permit what the identity may do: it should be limited to the store.
"""

from __future__ import annotations

import asyncio
import hmac
import http.client
import io
import json
import logging
import secrets
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from ...checkpoint import credentials_in
from ...protocol.messages import JobSettings, StoreIdentity
from .notices.aws_metadata import AwsMetadata
from .notices.metadata import Metadata, read_object
from .notices.notice import Unanswered

log = logging.getLogger("makara.agent")

_TIMEOUT_S = 10.0
_ROLES = "/latest/meta-data/iam/security-credentials/"
_AWS_FIELDS = ("AccessKeyId", "SecretAccessKey", "Token", "Expiration")
_AZURE_TOKEN, _AZURE_VERSION = "/metadata/identity/oauth2/token", "2018-02-01"
_AZURE_FIELDS = ("access_token", "expires_on", "resource", "token_type")
_STORAGE = "https://storage.azure.com"


class StoreSignIn:
    """`environment` begins to serve; `close` ends it. Runs on the agent's event loop only."""

    def __init__(self, identity: StoreIdentity) -> None:
        self._identity = identity
        self._token = secrets.token_urlsafe(32)
        self._server: asyncio.Server | None = None
        is_aws = identity.kind == "aws"
        self._aws = AwsMetadata(identity.metadata_url) if is_aws else None
        self._azure = Metadata(identity.metadata_url, _TIMEOUT_S) if identity.kind == "azure" else None

    async def environment(self, job: JobSettings, own: Mapping[str, str]) -> dict[str, str]:
        """The variables by which trainers of `job` find the credentials. `own`: the job's variables; if they
        hold keys of its store, nothing is served. Raises `OSError`."""
        if not job.store.uri.startswith(_SCHEMES.get(self._identity.kind, "\0")):
            return {}
        if credentials_in(job.store.uri, own) is not None:
            return {}
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"
        address, secret = _VARIABLES[self._identity.kind]
        return {address: url, secret: self._token}

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for service in (self._aws, self._azure):
            if service is not None:
                await service.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status, answer = await self._answer(await reader.readuntil(b"\r\n\r\n"))
                body = json.dumps(answer).encode()
                head = f"HTTP/1.1 {status} {http.client.responses[status]}\r\nConnection: close\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            log.warning("a request for credentials of the store was not answered: %r", error)
        finally:
            writer.close()

    async def _answer(self, request: bytes) -> tuple[int, dict[str, Any]]:
        line, _, rest = request.partition(b"\r\n")
        headers = http.client.parse_headers(io.BytesIO(rest))
        shown = headers.get("Authorization") or headers.get("X-IDENTITY-HEADER") or ""
        if not hmac.compare_digest(shown.encode(), self._token.encode()):
            return _refusal(403, "this is for the trainers of this VM's job")
        words = line.decode("latin-1").split(" ")
        if words[0] != "GET" or len(words) != 3:
            return _refusal(400, "expected GET")
        try:
            if self._aws is not None:
                return await _of_aws(self._aws)
            assert self._azure is not None, "nothing is served without a service to ask"
            resource = parse_qs(urlsplit(words[1]).query).get("resource", [""])[0]
            return await _of_azure(self._azure, self._identity.identity_id, resource)
        except Unanswered as error:
            log.warning("the cloud gives no credentials for the store: %s", error)
            return _refusal(503, f"the metadata service of this VM: {error}")


_SCHEMES = {"aws": "s3://", "azure": "az://"}
_VARIABLES = {
    "aws": ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN"),
    "azure": ("IDENTITY_ENDPOINT", "IDENTITY_HEADER"),
}


async def _of_aws(metadata: AwsMetadata) -> tuple[int, dict[str, Any]]:
    """The instance role's credentials, as EC2 gives them."""
    roles = await metadata.get(_ROLES)
    if roles is None or roles.status_code != 200 or not roles.text.split():
        return _refusal(404, "this VM has no role: clouds.yaml names no aws.instance_profile")
    answer = await metadata.get(_ROLES + roles.text.split()[0])
    found = _told(answer) if answer is not None else {}
    if not all(isinstance(found.get(name), str) for name in _AWS_FIELDS):
        raise Unanswered(f"no credentials of the VM's role: {found.get('Code', 'nothing')}")
    return 200, {name: found[name] for name in _AWS_FIELDS}


async def _of_azure(metadata: Metadata, identity: str, resource: str) -> tuple[int, dict[str, Any]]:
    """A token of the identity for storage only."""
    if resource.rstrip("/") != _STORAGE:
        return _refusal(403, f"tokens are given for {_STORAGE} alone")
    params = {"api-version": _AZURE_VERSION, "resource": _STORAGE}
    if identity:
        params["msi_res_id"] = identity
    found = _told(await metadata.ask("GET", _AZURE_TOKEN, headers={"Metadata": "true"}, params=params))
    return 200, {name: found[name] for name in _AZURE_FIELDS if name in found}


def _told(response: httpx.Response) -> dict[str, Any]:
    """The object in an answer; errors do not repeat the answer, which may hold credentials."""
    try:
        return read_object(response)
    except Unanswered:
        if response.status_code != 200:
            raise
        raise Unanswered("its answer cannot be read") from None


def _refusal(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"statusCode": status, "message": message}
