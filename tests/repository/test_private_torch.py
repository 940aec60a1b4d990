"""What torch does not document is used in fences alone, one module for each interface."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from repository import ROOT, repository_files
from torch import nn

ROOMS = ("pipeline/", "protocol/", "model/", "simulator/", "checkpoint/", "morphing/", "worker/", "manager/")
FENCES = (
    "model/torch_private/",
    "worker/execution/gloo.py",
    "worker/sections/engine.py",
    "worker/profiling/footprint.py",
)
# Private attributes of objects. (Operators of ATen may begin with "_", too.)
ATTRIBUTES = {
    name
    for thing in (nn.Module(), torch.zeros(0), torch.zeros(0).untyped_storage(), torch.ops.aten.add.Tensor)
    for name in dir(thing)
    if name.startswith("_") and not name.endswith("__")
}


def sources() -> list[str]:
    """The paths of all modules, from the repository's root."""
    return [path.relative_to(ROOT).as_posix() for path in repository_files(ROOT) if path.suffix == ".py"]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of all that `source` names of torch and that begins with an underscore."""
    tree = ast.parse(source)
    of_torch = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for module in node.names:
                if module.name.partition(".")[0] == "torch":
                    of_torch.add(module.asname or "torch")
                    if any(map(_is_private, module.name.split("."))):
                        yield node.lineno, module.name
        elif (
            isinstance(node, ast.ImportFrom) and not node.level and str(node.module).split(".")[0] == "torch"
        ):
            for member in node.names:
                of_torch.add(member.asname or member.name)
                if any(map(_is_private, [*str(node.module).split("."), member.name])):
                    yield node.lineno, f"{node.module}.{member.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner.split(".")[0] in of_torch or (owner not in ("self", "cls") and node.attr in ATTRIBUTES):
                yield node.lineno, f"{owner}.{node.attr}"
        elif isinstance(node, ast.Constant) and (
            node.value in ATTRIBUTES or str(node.value)[:7] == "torch._"
        ):
            yield node.lineno, repr(node.value)


def test_private_torch_is_named_in_fences_alone() -> None:
    found = [
        f"{path}:{line} {what}"
        for path in sources()
        if path.startswith(ROOMS) and not path.startswith(FENCES)
        for line, what in private_uses((ROOT / path).read_text())
    ]
    assert not found, "put it into a module of model/torch_private: " + ", ".join(found)


def test_each_fence_says_the_version_that_it_was_checked_with() -> None:
    version = ".".join(torch.__version__.split(".")[:2])
    for path in sources():
        if path.startswith(FENCES):
            says = " ".join((ast.get_docstring(ast.parse((ROOT / path).read_text())) or "").split())
            assert version in says, path


def test_every_way_to_name_private_torch_is_found() -> None:
    source = """
import torch, torch._dynamo
from torch import Tensor, nn, _utils
from torch.export import _trace
from torch._ops import OpOverload
import torch.distributed as dist

options = dist.ProcessGroupGloo._Options()
kinds = nn.modules.batchnorm._BatchNorm
key = tensor.untyped_storage()._cdata
hooks = getattr(module, "_backward_hooks")
name = "torch._functorch.predispatch"
fine = self._schema, own._replace(), torch.ops.aten.add, "_", torch.__version__
"""
    assert sorted(line for line, _ in private_uses(source)) == [2, 3, 4, 5, 8, 9, 10, 11, 12]
