"""The API's description (OpenAPI): FastAPI's, with all that every route may answer besides its success.

Which errors a route has follows from what it is: that it needs a token, names something, changes something.
So no route lists them itself, and none is forgotten.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

_PUBLIC = ("/healthz", "/api/v1/machines/challenge")  # the described routes that need no token
_REFUSED_UNREAD = (400, 411, 413, 429)  # no HTTP of ours, a body that is too large, or too many large ones
_STORES_AND_CLOUDS = (503,)  # they are asked, and do not answer
_PROBLEM: dict[str, Any] = {
    "title": "Problem",
    "description": "An error as a problem object (RFC 9457); `errors` names the fields that have faults.",
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["field", "message"],
                "properties": {"field": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}
_CONTENT = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


def answers(*media_types: str, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose answer is no JSON, or has another status as well."""
    content = {media_type: {} for media_type in media_types}
    return {status: {"description": HTTPStatus(status).phrase, **({"content": content} if content else {})}}


class DescribedApp(FastAPI):
    """An app whose description has each route's errors."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _with_errors(super().openapi())
        return self.openapi_schema


def _with_errors(schema: dict[str, Any]) -> dict[str, Any]:
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            errors = {str(status): _error(status) for status in _statuses(path, method, operation)}
            own = {status: found for status, found in operation["responses"].items() if status != "422"}
            operation["responses"] = {**own, **errors}
            if path not in _PUBLIC:
                operation["security"] = [{"bearer": []}]
    components = schema.setdefault("components", {})
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    schemas = components.setdefault("schemas", {})
    schemas["Problem"] = _PROBLEM
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own form, which we do not use
        schemas.pop(name, None)
    return schema


def _statuses(path: str, method: str, operation: dict[str, Any]) -> tuple[int, ...]:
    changes = method in ("post", "put", "patch", "delete")
    has_input = bool(operation.get("parameters")) or "requestBody" in operation
    return (
        *_REFUSED_UNREAD,
        *((401, 403) if path not in _PUBLIC else ()),
        *((404,) if "{" in path else ()),
        *((409,) if changes or path.startswith("/api/v1/machines") else ()),
        *((422,) if has_input else ()),
        *(_STORES_AND_CLOUDS if changes and path.startswith("/api/v1/jobs") else ()),
    )


def _error(status: int) -> dict[str, Any]:
    return {"description": HTTPStatus(status).phrase, "content": _CONTENT}
