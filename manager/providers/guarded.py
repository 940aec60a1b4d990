"""Wraps a provider so that whatever it raises is a `ProviderError`, and no error fails a job."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from ...protocol.messages import BootConfig
from ..spec.job_spec import Resources
from ..spec.placement import Attempt, Offer
from . import Bounded, Provider, ProviderError, Resource

log = logging.getLogger("makara.manager")


def guarded(providers: Mapping[str, Provider]) -> dict[str, Provider]:
    """Wrap each of them."""
    return {
        name: provider if isinstance(provider, Guarded) else Guarded(name, provider)
        for name, provider in providers.items()
    }


class Guarded:
    """Wraps a provider. An unforeseen error (an answer of unknown form, a fault of a library) means that the
    call's outcome is unknown: it is shown, and the call is repeated."""

    def __init__(self, name: str, provider: Provider) -> None:
        self._name = name
        self._provider = provider

    def create(self, attempt: Attempt, boot: BootConfig) -> str:
        with self._guarded(f"create {attempt.name}"):
            return self._provider.create(attempt, boot)

    def release(self, vm: str, attempts: int = 1) -> bool:
        with self._guarded(f"release {vm}"):
            return self._provider.release(vm, attempts)

    def look(self, vm: str, attempts: int = 1) -> Sequence[Resource]:
        with self._guarded(f"look for {vm}"):
            return self._provider.look(vm, attempts)

    def list(self) -> Sequence[Resource]:
        with self._guarded("list"):
            return self._provider.list()

    def check(self, resources: Resources) -> Sequence[tuple[str, str]]:
        with self._guarded("check"):
            return self._provider.check(resources)

    def offers(self, resources: Resources) -> Sequence[Offer]:
        with self._guarded("offers"):
            return self._provider.offers(resources)

    def capacity(self) -> int | None:
        """How many VMs it can have at a time; None: any number, or it does not know."""
        with self._guarded("capacity"):
            return self._provider.capacity() if isinstance(self._provider, Bounded) else None

    def console(self, vm: str, attempts: int = 1) -> str:
        with self._guarded(f"console of {vm}"):
            return self._provider.console(vm, attempts)

    def close(self) -> None:
        self._provider.close()

    @contextmanager
    def _guarded(self, what: str) -> Generator[None]:
        try:
            yield
        except ProviderError:
            raise
        except Exception as error:
            log.exception("%s: %s: an error that was not foreseen", self._name, what)
            message = f"{what}: an error that was not foreseen: {type(error).__name__}: {error}"
            raise ProviderError(message) from error
