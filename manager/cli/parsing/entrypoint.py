"""Looks for the function that `entrypoint` names in the file's text; imports and runs nothing."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path


def entrypoint_fault(workdir: Path, entrypoint: str, envs: Mapping[str, str]) -> str:
    """Why there is surely no such function; empty if there is one, or may be.

    A module that is not below `workdir` may be installed. Names that appear when a module runs (`globals()`,
    `setattr`, `import *`, a module's `__getattr__`) are found by running it only.
    """
    module, _, function = entrypoint.partition(":")
    file = _file_of(workdir, module)
    if file is None:
        return "" if "PYTHONPATH" in envs or "." in module else _missing(workdir, module)
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ""  # running it reports this better
    names = {*_defined(tree)}
    if function in names or _is_dynamic(tree):
        return ""
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    close = difflib.get_close_matches(function, sorted(names), 1)
    meant = f"; did you mean {module}:{close[0]}?" if close else _list("; it defines ", functions)
    return f"{file.name} has no {function}{meant}"


def _file_of(workdir: Path, module: str) -> Path | None:
    place = workdir.joinpath(*module.split("."))
    return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)


def _missing(workdir: Path, module: str) -> str:
    """Why a module cannot be found, if a file of nearly that name is there; it may be installed otherwise."""
    there = sorted(file.stem for file in workdir.glob("*.py"))
    close = difflib.get_close_matches(module, there, 1)
    if not close or _is_installed(module):
        return ""
    return f"there is no {module}.py in {workdir}; did you mean {close[0]}?"


def _is_installed(module: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return True


def _list(before: str, names: list[str]) -> str:
    return before + ", ".join(names[:6]) if names else ""


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names that may be bound at the top level: everything that is bound outside of functions and classes."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
                continue  # what is inside is not bound in the module
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((alias.asname or alias.name).partition(".")[0] for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
                yield name
            case (
                ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name))
            ):
                yield name
            case _:
                pass
        yield from _defined(node)


def _is_dynamic(tree: ast.Module) -> bool:
    """Whether names may be bound in a way that cannot be read from the text."""
    for node in ast.walk(tree):
        match node:
            case ast.Global():
                return True
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                return True
            case ast.Name(id="globals" | "vars" | "locals" | "setattr" | "exec" | "eval"):
                return True
            case ast.FunctionDef(name="__getattr__") | ast.Attribute(attr="modules" | "__dict__"):
                return True
            case _:
                pass
    return False
