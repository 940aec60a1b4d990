"""The web application of a manager: API, agents, page, health and metrics, with one format for errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from ...checkpoint import StoreUnavailable
from ..home import is_loopback
from ..service.quarantine import Quarantined
from ..service.service import Service
from ..spec.job_spec import JobSpecError
from . import agents, boot, decisions, history, jobs, machines, plans, prometheus, tokens, vms, web
from .auth import user
from .before_renting import CloudAway
from .continuing import CannotGoOn
from .description import DescribedApp
from .submission import KeyUsed

MODULES = (jobs, vms, history, plans, decisions, tokens, agents, boot, machines, web, prometheus)
_OVERHEAD_BYTES = 4 << 20  # of a multipart body besides its bundle
_MOST_LARGE_BODIES = 8  # of a user at a time
_UNKNOWN_BYTES = 64 << 10  # of a body that is read before authentication


def create_app(service: Service) -> FastAPI:
    """An app that starts `service` when it starts and closes it when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = DescribedApp(title="Makara", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.state.large_bodies = Counter[str]()  # that are being received or checked, by user
    for module in MODULES:
        app.include_router(module.router)
    app.middleware("http")(_guard)
    if is_loopback(service.config.host):
        # Against DNS rebinding: another site that resolves to 127.0.0.1 still sends its own name.
        known = ["127.0.0.1", "localhost", "[::1]", "[", "::1"]
        public = service.config.public_host  # of a proxy that terminates TLS
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*known, *([public] if public else [])])
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return app


async def _guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse a body that is too large, or large and unauthenticated, unread; set security headers."""
    limit = cast(Service, request.app.state.service).config.max_bundle_bytes + _OVERHEAD_BYTES
    length = request.headers.get("Content-Length")
    if length is not None and (not length.isdigit() or int(length) > limit):
        return problem(413, f"body: expected at most {limit} bytes")
    if length is None and "Transfer-Encoding" in request.headers:
        return problem(411, "body: expected a Content-Length header")
    if length is not None and int(length) > _UNKNOWN_BYTES:
        try:
            grant = await user(request)
        except HTTPException as error:
            return await _http_error(request, error)
        # The parts of an upload are kept on disk; other bodies are in memory.
        is_upload = request.headers.get("Content-Type", "").startswith("multipart/")
        if int(length) > _OVERHEAD_BYTES and not is_upload:
            return problem(413, f"body: expected at most {_OVERHEAD_BYTES} bytes")
        response = await _with_large_body(request, grant.owner or "", call_next)
    else:
        response = await call_next(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response


async def _with_large_body(
    request: Request, owner: str, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Answer a request that holds memory and disk until its end, unless its user has several of them."""
    in_progress = cast(Counter[str], request.app.state.large_bodies)
    if in_progress[owner] >= _MOST_LARGE_BODIES:
        return problem(
            429,
            f"body: {_MOST_LARGE_BODIES} large requests of this user are in progress; repeat this one later",
        )
    in_progress[owner] += 1
    try:
        return await call_next(request)
    finally:
        in_progress[owner] -= 1


def problem(status: int, detail: str, errors: list[dict[str, str]] | None = None) -> JSONResponse:
    """An error as a problem object (RFC 9457); `errors` names fields."""
    body: dict[str, Any] = {"type": "about:blank", "title": HTTPStatus(status).phrase}
    body |= {"status": status, "detail": detail}
    if errors is not None:
        body["errors"] = errors
    return JSONResponse(body, status, media_type="application/problem+json")


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = problem(error.status_code, str(error.detail))
    answer.headers.update(error.headers or {})
    return answer


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [
        {"field": ".".join(str(part) for part in fault["loc"][1:]), "message": str(fault["msg"])}
        for fault in error.errors()
    ]
    return problem(422, "the request has faults", faults)


async def _spec_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, JobSpecError)
    faults = [{"field": field, "message": message} for field, message in error.errors]
    return problem(422, "the job has faults; nothing was stored", faults)


async def _conflict(_: Request, error: Exception) -> Response:
    return problem(409, str(error))


async def _away(_: Request, error: Exception) -> Response:
    return problem(503, f"{error}; nothing was stored")


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    HTTPException: _http_error,
    RequestValidationError: _invalid,
    JobSpecError: _spec_error,
    KeyUsed: _conflict,
    CannotGoOn: _conflict,
    Quarantined: _conflict,
    StoreUnavailable: _away,
    CloudAway: _away,
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}
