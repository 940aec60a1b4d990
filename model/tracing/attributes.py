"""Detects state that a forward keeps in plain attributes of modules, which a trace cannot hold.

An attribute that is set and read within one call (an auxiliary loss) is not state. To tell, the forward is
traced a second time with the attributes as the first call left them: if the graph differs, or reads values
that the first call left, it depends on earlier calls. Only models that set attributes are traced twice.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn

from ..patching import replaced
from ..torch_private.exporting import ATTRIBUTE_CHECK
from ..torch_private.fake_tensors import FakeTensorMode
from ..torch_private.modules import OWN_FIELDS
from ..torch_private.pytree import tree_leaves, tree_map
from ..torch_private.storages import version_of
from .nodes import empty_like
from .source import calling_line

_MISSING = object()
_OF_EVERY_MODULE = OWN_FIELDS - {"training"}

Snapshot = dict[tuple[str, str], Any]
"""{(module's name, attribute): value}, containers copied."""


@dataclass
class Attributes:
    """Plain attributes of a model around one traced forward."""

    before: Snapshot = field(default_factory=dict[tuple[str, str], Any])
    changed: Snapshot = field(default_factory=dict[tuple[str, str], Any])
    lines: dict[tuple[str, str], str | None] = field(default_factory=dict[tuple[str, str], str | None])
    versions: dict[int, tuple[str, Tensor, int]] = field(default_factory=dict[int, tuple[str, Tensor, int]])

    def names(self) -> list[str]:
        return [_path(*key) for key in self.changed]

    def line(self) -> str | None:
        """The user's line that set one of them, if it was set as an attribute."""
        return next((line for key in self.changed if (line := self.lines.get(key))), None)

    def written(self) -> list[str]:
        """Attributes whose tensors were changed in place."""
        return [name for name, tensor, version in self.versions.values() if version_of(tensor) != version]

    def keep(self, model: nn.Module, fake_mode: FakeTensorMode) -> list[Tensor]:
        """Set the changed attributes as the forward left them; return the tensors among them, as new ones."""
        made: list[Tensor] = []

        def fresh(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with fake_mode:
                made.append(empty_like(leaf))
            return made[-1]

        modules = dict(model.named_modules())
        for (name, attribute), value in self.changed.items():
            vars(modules[name])[attribute] = tree_map(fresh, value)
        return made

    def restore(self, model: nn.Module) -> None:
        """Undo `keep`."""
        _restore(model, self.before, _snapshot(model))


@contextmanager
def watched(model: nn.Module) -> Generator[Attributes]:
    """Record what a forward exported in this context does to plain attributes, and undo it."""
    found = Attributes()
    names = {id(module): name for name, module in model.named_modules()}

    @contextmanager
    def around(_: nn.Module) -> Generator[None]:
        found.before = _snapshot(model)
        found.versions = _versions(found.before)
        set_attribute = nn.Module.__setattr__

        def note(self: nn.Module, name: str, value: Any) -> None:
            if id(self) in names:
                found.lines[names[id(self)], name] = calling_line()
            set_attribute(self, name, value)

        try:
            with replaced(nn.Module, "__setattr__", note):
                yield
        finally:
            after = _snapshot(model)
            for key in {**found.before, **after}:
                value = after.get(key, _MISSING)
                if not _same(found.before.get(key, _MISSING), value):
                    found.changed[key] = None if value is _MISSING else value
            _restore(model, found.before, after)

    with replaced(*ATTRIBUTE_CHECK, around):
        yield found


def _snapshot(model: nn.Module) -> Snapshot:
    return {
        (name, attribute): _copy(value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in _OF_EVERY_MODULE
    }


def _restore(model: nn.Module, before: Snapshot, after: Mapping[tuple[str, str], Any]) -> None:
    modules = dict(model.named_modules())
    for (name, attribute), value in before.items():
        if not _same(value, after.get((name, attribute), _MISSING)):
            vars(modules[name])[attribute] = value
    for name, attribute in after.keys() - before.keys():
        del vars(modules[name])[attribute]


def _copy(value: Any) -> Any:
    if type(value) is list:
        return [_copy(item) for item in cast(list[Any], value)]
    if type(value) is dict:
        return {key: _copy(item) for key, item in cast(dict[Any, Any], value).items()}
    return value


def _same(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    if isinstance(old, list | tuple):
        items = list(zip(cast(list[Any], old), cast(list[Any], new), strict=False))
        return len(old) == len(new) and all(_same(a, b) for a, b in items)  # pyright: ignore
    if type(old) is dict:
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in old)
    if isinstance(old, int | float | str | bool):
        return old == new
    return old is new


def _versions(attributes: Snapshot) -> dict[int, tuple[str, Tensor, int]]:
    return {
        id(leaf): (_path(*key), leaf, version_of(leaf))
        for key, value in attributes.items()
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    }


def _path(module: str, attribute: str) -> str:
    return f"{module}.{attribute}" if module else attribute
