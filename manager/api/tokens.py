"""`/api/v1/tokens`: the administrator makes, lists and revokes tokens of users and machines."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Request
from pydantic import AfterValidator, BaseModel, Field

from ..service.tokens import ADMINISTRATOR, Scope, id_of
from ..threads import CallKind
from .auth import Admin, service_of

router = APIRouter(prefix="/api/v1", tags=["tokens"])


def _name(value: str) -> str:
    if not value.isprintable() or value != value.strip():
        raise ValueError("expected printable characters, without blanks at either end")
    if value == ADMINISTRATOR:
        raise ValueError("this is the administrators' name; choose another")
    return value


class NewToken(BaseModel):
    """`name`: for a user, the owner of the jobs that are submitted with it; several tokens of one name are
    one user's. `ttl_s`: how long the token is valid (None: until revoked). `uses`: how many machines may join
    with it, for scope `machine` only."""

    name: Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_name)]
    scope: Literal["user", "machine"] = "user"
    ttl_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    uses: int | None = Field(default=None, ge=1, le=10_000)


class IssuedToken(BaseModel):
    """`id` names the token in lists and for revoking; `token` itself is shown only here."""

    id: str
    token: str


class TokenView(BaseModel):
    """Times in Unix seconds; `expires_at` None: valid until revoked."""

    id: str
    name: str
    scope: str
    created_at: float
    expires_at: float | None
    uses: int | None = None
    used: int = 0


class TokensView(BaseModel):
    tokens: list[TokenView]


@router.post("/tokens", status_code=201)
async def new_token(body: NewToken, request: Request, _: Admin) -> IssuedToken:
    """Make a token for a user, or for machines to join; it is shown only here. Admin token only."""
    service = service_of(request)
    scope = Scope(body.scope)
    if (scope is Scope.MACHINE) != (body.uses is not None):
        raise HTTPException(422, "uses: expected with scope machine, and with no other")
    issue = partial(service.tokens.issue, scope, name=body.name, ttl_s=body.ttl_s, uses=body.uses)
    token = await service.threads.run(CallKind.TOKENS, issue)
    return IssuedToken(id=id_of(token), token=token)


@router.get("/tokens")
async def tokens(request: Request, _: Admin) -> TokensView:
    """The valid tokens of users, machines and the admin, oldest first. Admin token only."""
    service = service_of(request)
    found = await service.threads.run(CallKind.TOKENS, service.tokens.listed)
    return TokensView(
        tokens=[
            TokenView(
                id=grant.token_id,
                name=grant.name,
                scope=grant.scope.value,
                created_at=created,
                expires_at=grant.expires,
                uses=grant.uses,
                used=used,
            )
            for grant, created, used in found
        ]
    )


@router.delete("/tokens/{token_id}", status_code=204)
async def revoke_token(token_id: str, request: Request, _: Admin) -> None:
    """Revoke a token; `token_id` is its part before the dot. Admin token only."""
    service = service_of(request)
    if not await service.threads.run(CallKind.TOKENS, service.tokens.revoke, token_id):
        raise HTTPException(404, f"token: there is no {token_id!r}")
    await service.end_streams()
