"""What is installed, what it imports, and which room may import from which."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Container, Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from newest_torch import newest_allowed, torch_range
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from repository import ROOT, repository_files

NOT_INSTALLED = {"tests", "benchmarks", "docs", "build", "dist"}

# The house, floor by floor: a room imports only from the floors below its own.
FLOORS = (
    ("pipeline", "protocol", "model"),
    ("simulator", "checkpoint"),
    ("morphing",),
    ("worker", "manager"),
)
BESIDE = ("deploy",)  # stands beside the house and holds no logic
MOST_MODULES = 20  # of a folder
WITHOUT_TORCH = ("pipeline", "protocol", "simulator", "morphing", "manager", "worker/agent", "deploy")


@pytest.fixture(scope="module")
def setuptools() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_the_client_of_the_agents_connection_can_be_told_to_use_no_proxy() -> None:
    """`connect(proxy=None)` came with websockets 15; older ones refuse the argument."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (required,) = (name for name in project["dependencies"] if name.startswith("websockets"))
    found = re.fullmatch(r"websockets>=(\d+)", required)
    assert found is not None
    assert int(found[1]) >= 15


def test_the_range_of_torch_is_the_version_that_the_tests_are_run_with() -> None:
    """Found: torch>=2.8,<3 took 2.15 with 4.8 GB of CUDA; only 2.13 was tested."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (pinned,) = (Version(line.partition("==")[2]) for line in lines if line.startswith("torch=="))
    allowed = SpecifierSet(f">={pinned.major}.{pinned.minor},<{pinned.major}.{pinned.minor + 1}")
    assert torch_range(ROOT) == allowed
    assert newest_allowed(["2.15.0", "2.14.0", "2.13.1", "2.13.0"], SpecifierSet(">=2.13,<2.14")) == "2.13.1"


def sources(*rooms: str) -> Iterator[Path]:
    for path in repository_files(ROOT):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py" and any(name.startswith(f"{room}/") for room in rooms):
            yield path


def folder_of(package: str) -> Path:
    return ROOT.joinpath(*package.split(".")[1:])


# ---- what is installed -------------------------------------------------------------------------------------


def test_every_folder_with_code_is_a_package_that_is_installed(setuptools: dict[str, Any]) -> None:
    tops = {path.relative_to(ROOT).parts[0] for path in repository_files(ROOT) if path.parent != ROOT}
    folders = {path.parent for path in sources(*tops - NOT_INSTALLED)}
    assert len(folders) >= 10
    assert set(setuptools["packages"]) == {
        ".".join(("makara", *folder.relative_to(ROOT).parts)) for folder in folders
    }
    assert setuptools["package-dir"] == {"makara": "."}


@pytest.mark.parametrize("git", [True, False])
def test_what_is_written_into_a_clone_is_not_taken_for_code(tmp_path: Path, git: bool) -> None:
    packages = '[tool.setuptools]\npackages = ["makara.worker"]\n'
    ours = {"pyproject.toml": packages, "worker/__init__.py": ""}
    demo = "makara-demo/20261122-084537/home/vms/vm1/bundles/b8357b/train.py"
    theirs = {demo: "", "my-model/train.py": "", "checkpoints/head.json": "{}", ".makara/journal": ""}
    for name, text in {**ours, **theirs}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    if git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        subprocess.run(["git", "-C", str(tmp_path), "add", *ours], check=True)
    found = {path.relative_to(tmp_path).as_posix() for path in repository_files(tmp_path)}
    assert found - {"pyproject.toml"} == {"worker/__init__.py"}


def test_every_package_says_what_it_is_for(setuptools: dict[str, Any]) -> None:
    for package in setuptools["packages"]:
        assert ast.get_docstring(ast.parse((folder_of(package) / "__init__.py").read_text())), package


def test_files_that_are_no_code_are_installed_with_it(setuptools: dict[str, Any]) -> None:
    data: dict[str, list[str]] = setuptools["package-data"]
    found = 0
    for package in setuptools["packages"]:
        patterns = data.get(package, []) + data.get("*", [])
        folder = folder_of(package)
        for path in repository_files(ROOT):
            inner = any((parent / "__init__.py").exists() for parent in _between(path, folder))
            if folder not in path.parents or path.suffix == ".py" or inner:
                continue
            found += 1
            name = path.relative_to(folder).as_posix()
            assert any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns), f"{package}: {name}"
    assert found > 5


def _between(path: Path, folder: Path) -> list[Path]:
    """The folders on the way from `folder` (without it) to `path`."""
    return [parent for parent in path.parents if parent != folder and folder in parent.parents]


def declared() -> dict[str, list[str]]:
    """Names of distributions: `core`, and each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"core": project["dependencies"], **project["optional-dependencies"]}
    return {group: [re.split(r"[^\w-]", line)[0] for line in lines] for group, lines in groups.items()}


def test_every_library_is_declared_and_has_its_reason() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    reasons = {
        name.strip() for row in re.findall(r"^\|(.+)\|.+\|$", text, re.M) for name in re.split(r"[|,]", row)
    }
    for name in (name for names in declared().values() for name in names):
        assert name in reasons, name
    owners = packages_distributions()
    rooms = [room for floor in FLOORS for room in floor]
    imported = {module.partition(".")[0] for path in sources(*rooms) for _, module in imports(path)}
    for module in imported - set(sys.stdlib_module_names) - set(rooms):
        # Extras whose modules are imported where they are installed, or when they are needed.
        allowed = {*declared()["core"], *declared()["fast"], *declared()["azure"]}
        assert set(map(str.lower, owners.get(module, []))) & allowed, module


# ---- what is imported --------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """`room.module` of one of our files."""
    *folders, last = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(folders if last == "__init__" else [*folders, last])


def imports(path: Path, names: Container[str] = ()) -> Iterator[tuple[int, str]]:
    """(line, module) of each import; ours as `room.module`, relative ones resolved. An imported name that is
    one of the modules `names` is told as that."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                yield node.lineno, node.module or ""
                continue
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            full = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{full}.{alias.name}".strip(".")
                yield node.lineno, inner if inner in names else full or alias.name


def test_a_room_imports_only_from_the_floors_below() -> None:
    seen: set[tuple[str, str]] = set()
    for number, floor in enumerate(FLOORS):
        below = {room for rooms in FLOORS[:number] for room in rooms}
        for room in floor:
            for path in sources(room):
                for line, module in imports(path):
                    other = module.partition(".")[0]
                    if other not in {name for rooms in FLOORS for name in rooms} - {room}:
                        continue
                    seen.add((room, other))
                    assert other in below, f"{path}:{line} imports {module}"
    assert {("manager", "protocol"), ("worker", "model"), ("morphing", "simulator")} <= seen


def test_no_module_imports_itself_on_a_detour() -> None:
    names = {module_name(path): path for path in sources(*(room for floor in FLOORS for room in floor))}
    graph = {
        name: {other for _, imported in imports(path, names) if (other := imported) in names}
        for name, path in names.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_folder_is_a_heap() -> None:
    for floor in FLOORS:
        for room in floor:
            counts = Counter(path.parent for path in sources(room) if not path.stem.startswith("__"))
            assert all(count <= MOST_MODULES for count in counts.values()), counts.most_common(1)


def test_no_two_tests_have_one_name() -> None:
    """Found: without packages pytest collects one of them, and ends with an error where it runs serially."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_rooms_find_each_other_by_relative_imports() -> None:
    """Which resolve by the files alone, in a checkout and in an installation."""
    for path in sources(*(room for floor in FLOORS for room in floor), *BESIDE):
        for line, module in imports(path):
            assert module.partition(".")[0] != "makara", f"{path}:{line} imports {module}"


def test_every_name_of_a_module_of_ours_has_one(setuptools: dict[str, Any]) -> None:
    """Tests and benchmarks, which no type checker reads, included."""
    names = {module_name(path) for path in repository_files(ROOT) if path.suffix == ".py"}
    names |= {".".join(folder.relative_to(ROOT).parts) for folder in map(folder_of, setuptools["packages"])}
    for path in repository_files(ROOT):
        for line, module in imports(path) if path.suffix == ".py" else ():
            if module.startswith("makara."):
                assert module.partition(".")[2] in names, f"{path}:{line} imports {module}"
                assert module.split(".")[1] not in NOT_INSTALLED, f"{path}:{line} imports {module}"


def test_rooms_without_torch_do_not_name_it() -> None:
    for path in sources(*WITHOUT_TORCH):
        assert "torch" not in {module.partition(".")[0] for _, module in imports(path)}, path


def test_what_runs_without_torch_does_not_load_it() -> None:
    modules = [
        "makara.pipeline",
        "makara.simulator",
        "makara.morphing",
        "makara.checkpoint",
        "makara.worker",
        "makara.protocol.messages",
        "makara.worker.agent.agent",
        "makara.manager.cli.main",
        "makara.manager.cli.demo",
        "makara.manager.api.app",
        "makara.manager.server",
    ]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} loads torch')\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, *modules], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
