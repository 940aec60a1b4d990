"""Pairs `makara up` with its VM: TLS without a trusted authority, until each proves that it knows the secret.

The proof is an HMAC over the connection's certificate, which excludes a man in the middle. The certificate is
the manager's own authority, and `makara up` trusts it from then on. The VM's side is `manager_boot.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import secrets
import ssl
from collections.abc import Callable
from typing import Any

from .manager_boot import proof

_TIMEOUT_S = 30.0
_MOST_BYTES = 4096


class NobodyThere(Exception):
    """Nothing at that address speaks this protocol, or the exchange broke off."""


class NotOurs(Exception):
    """The other side does not know the secret, or says that we do not."""


class Taken(Exception):
    """The VM has its payload already."""


def pair(
    host: str,
    port: int,
    secret: str,
    payload: bytes,
    told: dict[str, Any],
    trust: Callable[[str], None],
) -> None:
    """Send the VM at this address its payload and `told`, the arguments of `installing`.

    Calls `trust` with the VM's authority, as PEM, before anything is sent. Raises `NobodyThere`, `NotOurs`,
    `Taken`.
    """
    connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=_trusting_nobody())
    try:
        connection.connect()
        certificate = connection.sock.getpeercert(binary_form=True)
        assert certificate is not None, "a server shows one"
        nonce = _meet(connection, secret, certificate)
        trust(ssl.DER_cert_to_PEM_cert(certificate))
        _hand_over(connection, secret, certificate, nonce, payload, json.dumps(told))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NobodyThere(f"{host}:{port}: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _trusting_nobody() -> ssl.SSLContext:
    """A context that accepts any certificate: the proof authenticates it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _meet(connection: http.client.HTTPSConnection, secret: str, certificate: bytes) -> str:
    """The VM's nonce, after its proof that it knows the secret. Raises `NotOurs`."""
    ours = secrets.token_hex(16)
    status, answer = _ask(connection, "/hello", ours.encode(), {})
    if status != 200:
        raise NobodyThere(f"HTTP {status}")
    theirs = str(answer.get("nonce", ""))
    _check(answer, proof(secret, certificate.hex(), "vm", ours, theirs))
    return theirs


def _hand_over(
    connection: http.client.HTTPSConnection,
    secret: str,
    certificate: bytes,
    nonce: str,
    payload: bytes,
    told: str,
) -> None:
    checksum = hashlib.sha256(payload).hexdigest()
    shown = proof(secret, certificate.hex(), "owner", nonce, told, checksum)
    headers = {"Makara-Nonce": nonce, "Makara-Told": told, "Makara-Proof": shown}
    status, answer = _ask(connection, "/payload", payload, headers)
    if status == 409:
        raise Taken
    if status in (403, 422):
        raise NotOurs(f"the VM does not take what it is sent (HTTP {status})")
    if status != 200:
        raise NobodyThere(f"HTTP {status}")
    _check(answer, proof(secret, certificate.hex(), "taken", nonce))


def _ask(
    connection: http.client.HTTPSConnection, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, dict[str, Any]]:
    connection.request("POST", path, body, headers)
    with connection.getresponse() as response:
        answer = json.loads(response.read(_MOST_BYTES) or b"{}")
        return response.status, answer if isinstance(answer, dict) else {}


def _check(answer: dict[str, Any], expected: str) -> None:
    if not hmac.compare_digest(str(answer.get("proof", "")).encode(), expected.encode()):
        raise NotOurs("what answers there is not the VM that was asked for")
