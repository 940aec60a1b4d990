"""Initial weights as a pure function of (seed, tensor), with the distribution of the user's own code.

The user's model is built with fake tensors, which have shapes but no memory, while every operation on them
is recorded. A parameter, buffer or constant is then made by replaying, on real memory, only the operations
that touch its storage or flow into it, each random one under a seed of its own. So a tensor is the same on
whichever worker it is made, and no worker ever holds more than its range. A number that is drawn once and
flows into several tensors (a copied layer, a norm of a weight) is the same in all of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import UntraceableModel
from ..seeds import preserved_randomness, seed64, seed_everything
from ..torch_private.dispatch import TorchDispatchMode, no_modes
from ..torch_private.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from ..torch_private.operators import OpOverload, is_mutable, is_random, written_values
from ..torch_private.pytree import tree_leaves, tree_map
from ..torch_private.storages import storage_key
from .addresses import addressed
from .conversion import converting
from .loading import adopt_module, loading
from .views import Memory, View, real_view, store, view_of

T = TypeVar("T")
_aten = torch.ops.aten
_UNINITIALISED = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_permuted,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A tensor read from a file and never written."""

    data: torch.UntypedStorage
    view: View


@dataclass(frozen=True, slots=True)
class _Call:
    """`args` and `kwargs` hold fake tensors as `View` or `_Loaded`, and copies of real ones, which come from
    the user's lists and NumPy arrays."""

    function: OpOverload | Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    outputs: tuple[View, ...]
    storages: frozenset[int]  # read or written
    random: bool


@dataclass
class Recording:
    """The operations of the model's construction, which can be replayed for one tensor at a time."""

    seed: int
    fake_mode: FakeTensorMode
    _calls: list[_Call] = field(default_factory=list)
    _calls_by_storage: dict[int, list[int]] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)  # kept alive, so that storages' keys stay unique
    _loaded: Memory = field(default_factory=dict)  # from files, by fake storage
    _seeds: dict[int, int] = field(default_factory=dict)  # of random calls, by their number

    def tensor(self, fake: Tensor, name: str) -> Tensor:
        """A new contiguous CPU tensor with the values of `fake`. Random numbers come from (seed, name), or
        from the name of another tensor that they flow into (`own`).

        Raises `UntraceableModel` if `fake` was not made while the model was built.
        """
        if not isinstance(fake, FakeTensor):
            return fake.detach().clone(memory_format=torch.contiguous_format)
        view = view_of(fake)
        is_loaded = view.storage in self._loaded
        if not is_loaded and view.storage not in self._calls_by_storage:
            raise UntraceableModel(
                f"{name!r} was not made by the function Training.model; its values are unknown"
            )
        with no_modes(), preserved_randomness(), torch.no_grad():
            memory = self._loaded if is_loaded else self._replay(view.storage, name)
            return real_view(memory, view).clone(memory_format=torch.contiguous_format)

    def own(self, fake: Tensor, name: str) -> None:
        """Seed the random numbers of `fake` by (seed, name) for every tensor that they flow into, except
        numbers that have an owner already."""
        for number, seed in self._drawn(self._slice(storage_key(fake)), name).items():
            self._seeds.setdefault(number, seed)

    def read(self, fake: Tensor) -> Tensor:
        """The current values of `fake` while the model is being built."""
        self.own(fake, f"read {len(self._calls)}")
        return self.tensor(fake, "read")

    def _drawn(self, numbers: Sequence[int], name: str) -> dict[int, int]:
        """{number of a random call: its seed}, if they are drawn for `name`."""
        random = [number for number in numbers if self._calls[number].random]
        return {
            number: seed64("initialise", self.seed, name, ordinal) for ordinal, number in enumerate(random)
        }

    def _replay(self, storage: int, name: str) -> Memory:
        memory: Memory = {}
        numbers = self._slice(storage)
        seeds = self._drawn(numbers, name) | self._seeds
        for number in numbers:
            call = self._calls[number]
            args, kwargs = tree_map(partial(_real, memory=memory), (call.args, call.kwargs))
            if call.random:
                seed = seeds[number]
                seed_everything(seed)
                if "generator" in kwargs:  # replace the user's generator by this tensor's
                    kwargs["generator"] = torch.Generator().manual_seed(seed)
            results = [
                leaf for leaf in tree_leaves(call.function(*args, **kwargs)) if isinstance(leaf, Tensor)
            ]
            if getattr(call.function, "overloadpacket", None) in _UNINITIALISED:
                results[0].zero_()  # memory that the user never fills would differ between machines
            store(memory, call.outputs, results)
        return memory

    def _slice(self, storage: int) -> list[int]:
        """The calls that touch `storage` or a storage that flows into it, in recorded order."""
        found: set[int] = set()
        seen, waiting = {storage}, [storage]
        while waiting:
            for number in self._calls_by_storage.get(waiting.pop(), ()):
                found.add(number)
                fresh = self._calls[number].storages - seen
                seen |= fresh
                waiting.extend(fresh)
        return sorted(found)

    def adopt(self, real: Tensor) -> Tensor:
        """A fake tensor for `real`, which is kept without a copy, because it may lie in a mapped file."""
        if isinstance(real, FakeTensor):
            return real
        with no_modes():  # else operations on it would be recorded, with a copy of it
            fake = self.fake_mode.from_tensor(real.detach())
        self._loaded.setdefault(storage_key(fake), real.untyped_storage())
        self._alive.append(fake)
        return fake

    def _own(self, leaf: Any) -> None:
        """Replace a loaded tensor that is now written to by a copy, as in the user's program."""
        key = storage_key(leaf) if isinstance(leaf, FakeTensor) else None
        if key is None or key not in self._loaded:
            return
        storage = self._loaded.pop(key)
        whole = View(key, (storage.nbytes(),), (1,), 0, torch.uint8)
        self._append(
            _Call(torch.clone, (_Loaded(storage, whole),), {}, (whole,), frozenset({key}), random=False)
        )

    def add(self, function: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Record a call; pure views and metadata queries are not recorded."""
        for leaf in tree_leaves(written_values(function, args, kwargs)):
            self._own(leaf)
        outputs = _fakes(output)
        made = set(map(storage_key, outputs)) - set(map(storage_key, _fakes((args, kwargs))))
        if not made and not is_mutable(function):
            return
        random = is_random(function, args, kwargs)
        args, kwargs = tree_map(self._saved, (args, kwargs))
        views = tuple(map(view_of, outputs))
        used = [*views, *(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, View))]
        storages = frozenset(view.storage for view in used)
        self._append(_Call(function, args, kwargs, views, storages, random))
        self._alive.extend(outputs)

    def _append(self, call: _Call) -> None:
        for storage in call.storages:
            self._calls_by_storage.setdefault(storage, []).append(len(self._calls))
        self._calls.append(call)

    def _saved(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            view = view_of(leaf)
            loaded = self._loaded.get(view.storage)
            return view if loaded is None else _Loaded(loaded, view)
        if isinstance(leaf, Tensor):
            with no_modes():
                return leaf.detach().clone()
        return leaf


def record(build: Callable[[], T], seed: int) -> tuple[T, Recording]:
    """Call `build()` under fake tensors and record its operations. Exceptions of `build` propagate.

    Python's and NumPy's generators are seeded too, so that a structure drawn from them is the same in every
    process.
    """
    recording = Recording(seed, FakeTensorMode(allow_non_fake_inputs=True))
    before = _parameters_alive()
    with preserved_randomness():
        seed_everything(seed64("construct", seed))
        with converting(), addressed(), recording.fake_mode, _Recorder(recording), loading(recording.adopt):
            built = build()
        if isinstance(built, nn.Module):  # it may hold real tensors that a library read in its own threads
            _refuse_older(built, before)
            adopt_module(built, recording.adopt)
            for name, tensor in [*built.named_parameters(), *built.named_buffers()]:
                _refuse_without_values(tensor, name)
                recording.own(tensor, name)
    return built, recording


def _parameters_alive() -> dict[int, nn.Parameter]:
    """All parameters of this process by id, kept alive by the result."""
    types = set(map(id, _with_subclasses(nn.Parameter)))  # by id: a library's types may not be hashable
    objects = gc.get_objects()
    # Without a loop of Python: after imports such as transformers there are a million objects.
    found: Any = compress(objects, map(types.__contains__, map(id, map(type, objects))))
    return {id(parameter): parameter for parameter in found}


def _with_subclasses(base: type) -> list[type]:
    return [base, *chain.from_iterable(map(_with_subclasses, type.__subclasses__(base)))]


def _refuse_older(model: nn.Module, before: Mapping[int, nn.Parameter]) -> None:
    """Refuse parameters made before `Training.model` was called: their values do not depend on the seed."""
    for name, parameter in model.named_parameters():
        if id(parameter) in before:
            raise UntraceableModel(
                f"parameter {name} was there before Training.model was called, with values that do not "
                "follow from the job's seed, and that other VMs may not have; build the module inside "
                "Training.model, or load its weights there (torch.load, safetensors)"
            )


def _refuse_without_values(tensor: Tensor, name: str) -> None:
    """Refuse a tensor left on the meta device, which holds a shape only."""
    if tensor.device.type == "meta":
        raise UntraceableModel(
            f"{name} is still on the meta device when Training.model returns, so it has no values. Load it "
            "by load_state_dict(..., assign=True), or build the module without torch.device('meta'): Makara "
            "builds it without taking memory"
        )


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            output = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._computed(func, args, kwargs)
        self._recording.add(func, args, kwargs, output)
        return output

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute operations that depend on values (`.item()`, `torch.unique`) on the real tensors."""
        real_args, real_kwargs = tree_map(self._read, (args, kwargs))
        with no_modes():
            output = func(*real_args, **real_kwargs)
        return tree_map(self._adopted, output)

    def _read(self, leaf: Any) -> Any:
        return self._recording.read(leaf) if isinstance(leaf, FakeTensor) else leaf

    def _adopted(self, leaf: Any) -> Any:
        return self._recording.adopt(leaf) if isinstance(leaf, Tensor) else leaf


def _real(leaf: Any, memory: Memory) -> Any:
    if isinstance(leaf, View):
        return real_view(memory, leaf)
    if isinstance(leaf, _Loaded):
        return real_view({leaf.view.storage: leaf.data}, leaf.view)
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _fakes(value: Any) -> list[FakeTensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, FakeTensor)]
