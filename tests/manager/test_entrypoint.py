"""The function that `entrypoint` names is looked for in the file's text, before anything is imported."""

from __future__ import annotations

from pathlib import Path

import pytest
from makara.manager.cli.parsing.entrypoint import entrypoint_fault


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ("train:biuld", "train.py has no biuld; did you mean train:build?"),
        ("train:zzz", "train.py has no zzz; it defines build, main"),
        ("train:inner", "train.py has no inner"),
        ("train:Method", "train.py has no Method"),
        ("tarin:build", "did you mean train?"),
        ("pack:missing", "__init__.py has no missing"),
        ("pack.part:buidl", "part.py has no buidl; did you mean pack.part:build?"),
    ],
)
def test_a_function_that_is_surely_missing_is_named(tmp_path: Path, entrypoint: str, said: str) -> None:
    (tmp_path / "train.py").write_text(
        "def build():\n    def inner(): pass\ndef main(): pass\nclass A:\n    def Method(self): pass\n"
    )
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("")
    (tmp_path / "pack/part.py").write_text("async def build(): pass\n")
    assert said in entrypoint_fault(tmp_path, entrypoint, {})


@pytest.mark.parametrize(
    "text",
    [
        "def build(): pass", "build = print", "from x import y as build", "import build", "build: int = 3",
        "if 1:\n    def build(): pass", "try:\n    pass\nexcept E:\n    build = 1", "class build: pass",
        "for build in (): pass", "with x as (a, build): pass", "(build := 3)", "a, *build = x",
        "from x import *", "globals()['build'] = 1", "import sys\nsetattr(sys.modules[__name__], 'build', 1)",
        "def __getattr__(name): return 1", "def f():\n    global build\n    build = 1",
        "exec('build = 1')", "vars()['build'] = 1", "match x:\n    case [build]: pass", "def broken(",
        "match x:\n    case {**build}: pass",
        "@decorated\ndef build(): pass", "del x\nwhile 1:\n    build = 2",
    ],
)  # fmt: skip
def test_a_function_that_may_be_there_is_left_to_be_found_by_importing(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text(text)
    assert entrypoint_fault(tmp_path, "train:build", {}) == ""


def test_a_module_that_may_be_installed_is_left_to_be_found_by_importing(tmp_path: Path) -> None:
    (tmp_path / "jsom.py").write_text("")
    assert entrypoint_fault(tmp_path, "json:build", {}) == ""
    assert entrypoint_fault(tmp_path, "elsewhere:build", {}) == ""
    (tmp_path / "tran.py").write_text("")
    assert entrypoint_fault(tmp_path, "train:build", {"PYTHONPATH": "src"}) == ""
