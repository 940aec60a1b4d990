"""The status page: static files of this package, and its login sessions."""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Form, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from ..service.tokens import Scope, TokenRefused, csrf_token
from ..threads import CallKind
from .auth import COOKIE, SESSION_TTL_S, User, admit, service_of

router = APIRouter(tags=["page"], include_in_schema=False)

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FILES = {
    path.name: path.read_bytes() for path in (files("makara.manager") / "page").iterdir() if path.is_file()
}


@router.get("/")
async def index() -> HTMLResponse:
    """The page, which contains no data and asks for a token if there is no session."""
    return HTMLResponse(_FILES["index.html"])


@router.get("/docs")
async def docs() -> HTMLResponse:
    """The API's description, rendered from /openapi.json without external scripts."""
    return HTMLResponse(_FILES["docs.html"])


@router.get("/page/{name}")
async def page(name: str) -> Response:
    """Script, style and icon of the pages."""
    suffix = name[name.rfind(".") :]
    if name not in _FILES or suffix not in _TYPES:
        raise HTTPException(404, f"page: there is no {name!r}")
    return Response(_FILES[name], media_type=_TYPES[suffix], headers={"Cache-Control": "no-cache"})


@router.post("/login")
async def login(request: Request, token: Annotated[str, Form(max_length=200)] = "") -> Response:
    """Sign in with a user or admin token: a session cookie, and the CSRF token that goes with it."""
    service = service_of(request)
    threads, tokens = service.threads, service.tokens
    try:
        grant = await threads.run(CallKind.TOKENS, tokens.check, token.strip(), Scope.USER, Scope.ADMIN)
    except TokenRefused as refusal:
        raise HTTPException(401, f"token: {refusal}") from refusal
    admit(request, grant)
    issue = partial(tokens.issue, Scope.SESSION, name=grant.name, ttl_s=SESSION_TTL_S, parent=grant.token_id)
    session = await threads.run(CallKind.TOKENS, issue)
    response = JSONResponse({"csrf": csrf_token(session)})
    response.set_cookie(
        COOKIE,
        session,
        max_age=int(SESSION_TTL_S),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.get("/session")
async def session(request: Request, _: User) -> dict[str, str]:
    """The CSRF token of the current session, for a page that was reloaded."""
    return {"csrf": csrf_token(request.cookies.get(COOKIE, ""))}


@router.post("/logout", status_code=204)
async def logout(request: Request, grant: User) -> Response:
    """End the session."""
    if grant.scope is Scope.SESSION:
        service = service_of(request)
        await service.threads.run(CallKind.TOKENS, service.tokens.revoke, grant.token_id)
    response = Response(status_code=204)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return response
