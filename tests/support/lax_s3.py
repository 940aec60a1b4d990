"""An S3 service that lets conditional writes through which must fail, as some do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from http_answers import Answer, Request, answering

ABSENT = "If-Match on an object that is not there"
OLDER = "If-Match with the tag of an older version"
PRESENT = "If-None-Match: * on an object that is there"


class LaxS3:
    """Objects in memory. `ignored`: the conditions that it does not look at."""

    def __init__(self, *ignored: str) -> None:
        self.objects: dict[str, bytes] = {}
        self._ignored = ignored

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Gives its endpoint."""
        with answering(self._answer) as endpoint:
            yield endpoint

    def _answer(self, request: Request) -> Answer:
        key = request.path.partition("?")[0]
        found = self.objects.get(key)
        if request.method == "DELETE":
            self.objects.pop(key, None)
            return Answer(204)
        if request.method == "PUT":
            return self._put(key, found, request)
        return _error(404, "NoSuchKey") if found is None else Answer(200, found.decode(), headers=_tag(found))

    def _put(self, key: str, found: bytes | None, request: Request) -> Answer:
        if (error := self._broken(found, request)) is not None:
            return error
        self.objects[key] = request.body
        return Answer(200, headers=_tag(request.body))

    def _broken(self, found: bytes | None, request: Request) -> Answer | None:
        """What a condition that does not hold is answered with."""
        expected = request.headers.get("If-Match")
        if found is None:
            return _error(404, "NoSuchKey") if expected is not None and ABSENT not in self._ignored else None
        older = expected not in (None, _tag(found)["ETag"]) and OLDER not in self._ignored
        present = "If-None-Match" in request.headers and PRESENT not in self._ignored
        return _error(412, "PreconditionFailed") if older or present else None


def _tag(data: bytes) -> dict[str, str]:
    return {"ETag": f'"{hashlib.md5(data).hexdigest()}"'}


def _error(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>")
