"""`/api/v1/tokens`: tokens of users, made, listed and revoked by the administrator."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fastapi import APIRouter, HTTPException, Request
from pydantic import BaseModel, Field

from ..service.tokens import Scope, id_of
from ..threads import Kind
from .auth import Admin, service_of

router = APIRouter(prefix="/api/v1", tags=["tokens"])


class NewToken(BaseModel):
    """`ttl_s`: for how long it is good; None: until it is revoked."""

    name: str = Field(min_length=1, max_length=100)
    scope: Literal["user"] = "user"
    ttl_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)


class IssuedToken(BaseModel):
    """`id` names it wherever it is listed or revoked; `token` is shown this once."""

    id: str
    token: str


class TokenView(BaseModel):
    """Times in Unix seconds; `expires_at` None: it is good until it is revoked."""

    id: str
    name: str
    scope: str
    created_at: float
    expires_at: float | None


class TokensView(BaseModel):
    tokens: list[TokenView]


@router.post("/tokens", status_code=201)
async def new_token(body: NewToken, request: Request, _: Admin) -> IssuedToken:
    """A token for a user, shown this once. Admin token only."""
    service = service_of(request)
    issue = partial(service.tokens.issue, Scope(body.scope), name=body.name, ttl_s=body.ttl_s)
    token = await service.threads.run(Kind.TOKENS, issue)
    return IssuedToken(id=id_of(token), token=token)


@router.get("/tokens")
async def tokens(request: Request, _: Admin) -> TokensView:
    """The tokens of users and the admin's own that are good, oldest first. Admin token only."""
    service = service_of(request)
    found = await service.threads.run(Kind.TOKENS, service.tokens.listed)
    return TokensView(
        tokens=[
            TokenView(
                id=grant.token_id,
                name=grant.name,
                scope=grant.scope.value,
                created_at=created,
                expires_at=grant.expires,
            )
            for grant, created in found
        ]
    )


@router.delete("/tokens/{token_id}", status_code=204)
async def revoke_token(token_id: str, request: Request, _: Admin) -> None:
    """Forget a token; `token_id` is its part before the dot. Admin token only."""
    service = service_of(request)
    if not await service.threads.run(Kind.TOKENS, service.tokens.revoke, token_id):
        raise HTTPException(404, f"token: there is no {token_id!r}")
    await service.end_streams()
