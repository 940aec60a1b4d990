"""The VMs of a job, those that live apart from those that ended: a change costs what lives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar


class _Vm(Protocol):
    @property
    def vm(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def live(self) -> bool: ...


V = TypeVar("V", bound=_Vm)


class VmTable(Mapping[str, V], Generic[V]):
    """Immutable: `with_vm` makes another table. In the order in which VMs were requested (`Vm.number`).

    Ended VMs never change, so all tables that come from one another share one list of them, each up to its
    own length. Only a change to a table that is not the newest copies the list.
    """

    __slots__ = ("_ended", "_index", "_live", "_num_ended")

    def __init__(self) -> None:
        self._live: dict[str, V] = {}
        self._ended: list[V] = []
        self._index: dict[str, int] = {}  # places in `_ended`, some of them perhaps of newer tables
        self._num_ended = 0

    @property
    def live(self) -> Mapping[str, V]:
        """Those that have not ended, in order."""
        return MappingProxyType(self._live)

    @property
    def num_ended(self) -> int:
        return self._num_ended

    def ended(self, start: int, stop: int | None = None) -> list[V]:
        """Part of those that ended, in the order in which they did; negative numbers count from the end."""
        begin, end, _ = slice(start, stop).indices(self._num_ended)
        return self._ended[begin:end]

    def with_vm(self, vm: V) -> VmTable[V]:
        """With `vm` as it is now. One that has ended does not change any more."""
        if vm.vm not in self._live and self._ended_vm(vm.vm) is not None:
            return self
        made: VmTable[V] = VmTable.__new__(VmTable)
        made._ended, made._index, made._num_ended = self._ended, self._index, self._num_ended
        made._live = {**self._live, vm.vm: vm}
        if not vm.live:
            del made._live[vm.vm]
            if len(self._ended) > self._num_ended:  # a newer table went another way
                made._ended = self._ended[: self._num_ended]
                made._index = {ended.vm: n for n, ended in enumerate(made._ended)}
            made._index[vm.vm] = self._num_ended
            made._ended.append(vm)
            made._num_ended += 1
        return made

    def __getitem__(self, name: str) -> V:
        vm = self._live.get(name) or self._ended_vm(name)
        if vm is None:
            raise KeyError(name)
        return vm

    def __iter__(self) -> Iterator[str]:
        everyone = [*self._live.values(), *self._ended[: self._num_ended]]
        return iter([vm.vm for vm in sorted(everyone, key=lambda vm: vm.number)])

    def __len__(self) -> int:
        return len(self._live) + self._num_ended

    def __repr__(self) -> str:
        return f"VmTable({dict(self)!r})"

    def _ended_vm(self, name: str) -> V | None:
        place = self._index.get(name, self._num_ended)
        return self._ended[place] if place < self._num_ended else None
