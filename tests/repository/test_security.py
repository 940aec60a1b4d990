"""What is never done with bytes from elsewhere, and who can reach what listens.

That every route and socket of the manager refuses who shows no token is tested in `test_api`.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed
from service_process import ServiceProcess

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeline", "simulator", "checkpoint", "morphing", "worker", "manager", "deploy", "examples")

# Whatever reads a pickle, or has one read: multiprocessing's queues and pipes do.
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "load_all"),
    ("yaml", "unsafe_load"),
    ("yaml", "unsafe_load_all"),
    ("yaml", "full_load"),
    ("yaml", "full_load_all"),
    ("numpy", "load"),
    ("np", "load"),
}
# A user's own call of it, in the process that runs the user's code: only where the tensors lie is ours.
USERS_CALLS = {("model/initialisation/loading.py", "torch.load")}
COLLECTIVES = {name for name in dir(torch.distributed) if "object" in name}


def forbidden(tree: ast.AST) -> Iterator[str]:
    """`line: what` for each thing in the tree that must not be there."""
    for node in ast.walk(tree):
        for what in _names(node):
            yield f"{getattr(node, 'lineno', 0)}: {what}"


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
    elif isinstance(node, ast.ImportFrom):
        module = (node.module or "").partition(".")[0]
        if not node.level and module in MODULES:
            yield module
        taken = {alias.name for alias in node.names}
        yield from (f"{module}.{name}" for name in taken if (module, name) in CALLS)
        yield from taken & COLLECTIVES
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in BUILTINS:
            yield node.func.id
    elif isinstance(node, ast.Attribute):
        if node.attr in COLLECTIVES:
            yield node.attr
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in CALLS:
            yield f"{node.value.id}.{node.attr}"
    elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        yield "allow_pickle"


def test_no_package_reads_a_pickle_or_runs_text() -> None:
    sources = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(sources) > 100
    found = [
        f"{path}:{what}"
        for path in sources
        for what in forbidden(ast.parse(path.read_text()))
        if (str(path.relative_to(ROOT)), what.partition(": ")[2]) not in USERS_CALLS
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\nstate = torch.load(path)",
        "from torch import load",
        "dist.all_gather_object(out, mine)",
        "from torch.distributed import broadcast_object_list",
        "eval(text)",
        "exec(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "read(path, allow_pickle=True)",
    ],
)
def test_the_search_finds_what_it_searches_for(text: str) -> None:
    assert list(forbidden(ast.parse(text)))


def test_the_search_lets_pass_what_is_safe() -> None:
    text = (
        "yaml.safe_load(t)\nmodel.eval()\nre.compile(t)\nclient.put_object(b, n)\nsafetensors.torch.load(b)"
    )
    assert list(forbidden(ast.parse(text))) == []


# ---- what listens ------------------------------------------------------------------------------------------


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """(address, port) of each TCP socket that listens and each UDP socket that is bound."""
    try:
        connections = process.net_connections(kind="inet")
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended
        return set()
    return {
        (entry.laddr.ip, entry.laddr.port)
        for entry in connections
        if entry.laddr and (entry.status == psutil.CONN_LISTEN or (not entry.raddr and entry.type == 2))
    }


def kind(process: psutil.Process) -> str:
    try:
        command = process.cmdline()
    except psutil.NoSuchProcess:
        return "ended"
    if not command:
        return "ended"  # on its way out it gives up its memory, and the command with it, before its files
    return next((name for name in ("trainer", "agent") if f"makara.worker.{name}" in command), "manager")


def test_all_that_listens_during_a_job_is_on_loopback(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path)
    service.start()
    try:
        record = json.loads((service.home / "server.json").read_text())
        manager = psutil.Process(record["pid"])
        job = service.submit(
            (ROOT / "tests/support/models.py").read_text(),
            entrypoint="train:tied_gpt",
            resources={"min_nodes": 2, "max_nodes": 2},
            training={"global_batch_size": 16, "seed": 7, "steps": 30},
            parallelism={
                "pipeline_parallel_degree": 2,
                "data_parallel_degree": 1,
                "microbatch_size": 4,
                "num_sections": 4,
            },
        )
        seen: dict[str, set[tuple[str, int]]] = defaultdict(set)

        def look(view: dict[str, Any]) -> bool:
            for process in {manager, *manager.children(recursive=True), *service.vm_processes()}:
                seen[kind(process)] |= listening(process)
            return view["status"] == "finished"

        service.wait(job, look, "the job to finish")
    finally:
        service.close()
    assert seen["manager"] == {("127.0.0.1", record["port"])}
    assert seen["agent"] == set()  # an agent only calls
    assert seen["trainer"], "a pipeline of two trainers has a rendezvous and a process group"
    assert {address for address, _ in seen["trainer"]} == {"127.0.0.1"}
