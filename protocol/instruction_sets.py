"""Limits trainers to a set of vector instructions, so that more kinds of processors give the same bits."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Literal

InstructionSet = Literal["native", "avx2", "avx512"]

# For ATen's own kernels, oneDNN and MKL, which read them once, at first use.
_ENVIRONMENT: dict[InstructionSet, dict[str, str]] = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_CBWR": "AVX512"},
}
# As Linux names them.
_NEEDS: dict[InstructionSet, Set[str]] = {
    "native": frozenset(),
    "avx2": frozenset({"avx2", "fma"}),
    "avx512": frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
}


def environment_of(wanted: InstructionSet, flags: Set[str]) -> dict[str, str]:
    """The variables for a trainer's environment on a processor with these flags.

    Empty if the processor lacks the instructions, because ATen would use them all the same and crash. Such a
    trainer computes other bits than its peers, and is recognised by them.
    """
    return dict(_ENVIRONMENT[wanted]) if _NEEDS[wanted] <= flags else {}


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The CPU flags of this machine; empty if the system does not list them in `cpuinfo`."""
    if not cpuinfo.exists():
        return frozenset()
    lines = cpuinfo.read_text().splitlines()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))
