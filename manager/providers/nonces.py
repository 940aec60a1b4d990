"""Nonces that a machine signs to authenticate."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

GOOD_FOR_S = 60.0


class Nonces:
    """Each is valid once, for a minute. Stateless except for used ones, which are remembered for a minute."""

    def __init__(self, steady: Callable[[], float] = time.monotonic) -> None:
        self._steady = steady
        self._secret = secrets.token_bytes(32)
        self._used: dict[str, float] = {}

    def new(self) -> str:
        made = f"{self._steady():.0f}.{secrets.token_hex(16)}"
        return f"{made}.{self._mark(made)}"

    def use(self, nonce: str) -> bool:
        """Use a nonce; returns whether it was valid. It is invalid from now on."""
        made, _, mark = nonce.rpartition(".")
        if not hmac.compare_digest(mark.encode(), self._mark(made).encode()):
            return False
        now = self._steady()
        self._used = {used: at for used, at in self._used.items() if now - at <= 2 * GOOD_FOR_S}
        if nonce in self._used or now - float(made.partition(".")[0]) > GOOD_FOR_S:
            return False
        self._used[nonce] = now
        return True

    def _mark(self, made: str) -> str:
        return hmac.new(self._secret, made.encode(), hashlib.sha256).hexdigest()
