"""The table of a job's VMs: immutable, in order of request, and a change costs only what lives."""

from __future__ import annotations

import random
from dataclasses import replace

from makara.manager.core import fold
from makara.manager.core.facts import EndReason, VmEnded, VmJoined, VmRequested
from makara.manager.core.vm_table import VmTable
from makara.manager.core.vms import Vm, VmStatus


def test_tables_are_what_dictionaries_of_all_vms_would_be() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        tables: list[tuple[VmTable[Vm], dict[str, Vm]]] = [(VmTable(), {})]
        for _ in range(60):
            table, plain = rng.choice(tables)  # also one that is not the newest
            name = f"v{rng.randrange(15)}"
            before = plain.get(name)
            if before is None:
                changed = Vm(name, requested_at=0.0, number=len(plain))
            else:
                changed = replace(before, status=rng.choice(list(VmStatus)), detail=str(rng.random()))
            after = dict(plain)
            if before is None or before.live:
                after[name] = changed
            tables.append((table.with_vm(changed), after))
        for table, plain in tables:
            assert table == plain, seed
            assert list(table) == list(plain), seed
            assert list(table.live) == [name for name, vm in plain.items() if vm.live], seed
            assert len(table) == len(plain), seed
            assert {vm.vm for vm in table.ended(0)} == {name for name, vm in plain.items() if not vm.live}
            assert ("v99" in table, table.get("v99")) == (False, None)


def test_a_fold_copies_what_lives_and_not_what_ever_was() -> None:
    facts = []
    for number in range(2000):
        name = f"v{number}"
        facts += [
            VmRequested(at=1.0, vm=name),
            VmJoined(at=1.0, vm=name, address="a", devices=()),
            VmEnded(at=1.0, vm=name, reason=EndReason.PREEMPTED),
        ]
    state = fold(facts)
    older = fold(facts[:3000])
    assert (len(state.vms), len(state.live_vms), state.vms.num_ended) == (2000, 0, 2000)
    assert [vm.vm for vm in state.vms.ended(-2)] == ["v1998", "v1999"]
    assert list(older.vms) == list(state.vms)[:1000]
    more = state.with_vm(Vm("new", 1.0, number=2000)).vms
    assert more._ended is state.vms._ended, "the list of ended VMs is shared, never copied"
