"""Checks what a model's forward returns: tensors and plain values, in containers registered with pytree."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..errors import UntraceableModel
from ..libraries import CACHES
from ..torch_private.pytree import KeyPath, add_keys, keystr, tree_flatten_with_path
from .source import line_of

_PLAIN = (Tensor, int, float, complex, bool, str, type(None))


@contextmanager
def checked_outputs(model: nn.Module) -> Generator[None]:
    """While `model` runs, refuse an output with a part that is neither a tensor nor a plain value."""

    def check(_module: nn.Module, _arguments: Any, output: Any) -> None:
        add_keys(output)
        leaves: list[tuple[KeyPath, Any]] = tree_flatten_with_path(output)[0]
        for path, leaf in leaves:
            if not isinstance(leaf, _PLAIN):
                raise UntraceableModel(_message(f"output{keystr(path)}", type(leaf)), _return_line(model))

    handle = model.register_forward_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _message(place: str, kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name.startswith(CACHES[0]) and CACHES[1] in kind.__name__:
        way_out = (
            'Training reads no cache: write Training(forward_kwargs={"use_cache": False}, ...), or where '
            "forward takes no use_cache, set config.use_cache = False in Training.model"
        )
    elif hasattr(kind, "__dataclass_fields__"):
        way_out = f"Return a dict instead, or make it known: torch.export.register_dataclass({kind.__name__})"
    else:
        way_out = "Return tensors, or tuples, lists and dicts of them"
    return f"forward returns a {name} ({place}), which is no tensor and cannot be taken apart. {way_out}"


def _return_line(model: nn.Module) -> str | None:
    """The line of the last `return` of the model's forward, or of its beginning."""
    forward = inspect.unwrap(type(model).forward)
    filename = inspect.getsourcefile(forward)
    try:
        lines, first = inspect.getsourcelines(forward)
    except (OSError, TypeError):  # made without a source file
        return None
    tree = ast.parse(textwrap.dedent("".join(lines)))
    places = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return line_of(filename, first + max(places, default=1) - 1) if filename is not None else None
