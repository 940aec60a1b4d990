"""Authentication and authorisation: FastAPI dependencies over `TokenStore`.

Programs send `Authorization: Bearer <token>`. The page signs in once and has a same-site, HttpOnly cookie;
its changes must carry `X-CSRF-Token` as well, which another site can neither read nor guess.
"""

from __future__ import annotations

import hmac
from typing import Annotated, cast

from fastapi import Depends, HTTPException, Request, Response, WebSocket
from starlette.requests import HTTPConnection

from ...protocol.messages import Refusal
from ..http_server import connection_of
from ..service.service import Service
from ..service.tokens import Grant, Scope, TokenRefused, csrf_token
from ..threads import CallKind

COOKIE = "makara_session"
SESSION_TTL_S = 12 * 3600.0
_READ_ONLY = ("GET", "HEAD", "OPTIONS")


def service_of(connection: HTTPConnection) -> Service:
    """The service behind the app of this request."""
    return cast(Service, connection.app.state.service)


def bearer(connection: HTTPConnection) -> str | None:
    """The token of the Authorization header."""
    kind, _, token = connection.headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" and token else None


async def user(request: Request) -> Grant:
    """Require a user, an administrator, or a signed-in page; else 401, or 403 without the CSRF token."""
    token = bearer(request)
    if token is not None:
        return await _check(request, token, Scope.USER, Scope.ADMIN)
    session = request.cookies.get(COOKIE)
    if session is None:
        raise HTTPException(401, "send Authorization: Bearer <token>", {"WWW-Authenticate": "Bearer"})
    grant = await _check(request, session, Scope.SESSION)
    if request.method not in _READ_ONLY:
        shown = request.headers.get("X-CSRF-Token", "")
        if not hmac.compare_digest(shown.encode(), csrf_token(session).encode()):
            raise HTTPException(403, "the X-CSRF-Token header is missing or wrong")
    return grant


async def admin(request: Request) -> Grant:
    """Require the administrator, by bearer token only; else 401, or 403 for others."""
    token = bearer(request)
    if token is None:
        raise HTTPException(401, "send Authorization: Bearer <admin token>", {"WWW-Authenticate": "Bearer"})
    grant = await _check(request, token, Scope.ADMIN, Scope.USER)
    if grant.scope is not Scope.ADMIN:
        raise HTTPException(403, "this needs the admin token")
    return grant


async def _check(request: Request, token: str, *scopes: Scope) -> Grant:
    service = service_of(request)
    try:
        grant = await service.threads.run(CallKind.TOKENS, service.tokens.check, token, *scopes)
    except TokenRefused as refusal:
        raise HTTPException(401, str(refusal), {"WWW-Authenticate": "Bearer"}) from refusal
    admit(request, grant)
    return grant


def admit(request: HTTPConnection, grant: Grant) -> None:
    """Note whose the connection of this request is, so that it is not ended as an unknown one."""
    connection = connection_of(request.scope)
    if connection is not None:
        of_vm = grant.vm is not None
        connection.admit(f"VM {grant.vm}" if of_vm else f"user {grant.name}", of_vm=of_vm)


async def vm_of_job(request: Request, job: str, *scopes: Scope) -> Grant:
    """Require a VM of this job, by a token of `scopes`; else 401, or 403 for those of other jobs."""
    grant = await _check(request, bearer(request) or "", *scopes)
    if grant.job != job or job not in service_of(request).jobs:
        raise HTTPException(403, "this token is for another job")
    return grant


async def refuse(websocket: WebSocket, refused: str, reason: str) -> None:
    """Refuse the connection of a VM or machine: only a `Refusal` says that this manager does not know it."""
    refusal = Refusal(refused=refused, manager=service_of(websocket).tokens.identity, reason=reason)
    body = refusal.model_dump_json()
    await websocket.send_denial_response(Response(body, 403, media_type="application/json"))


User = Annotated[Grant, Depends(user)]
Admin = Annotated[Grant, Depends(admin)]
