"""Vector instructions that trainers are held to, so that more kinds of processors give the same bits."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Literal

InstructionSet = Literal["native", "avx2", "avx512"]

# For ATen's own kernels, oneDNN and MKL, which read them once, when they are first used.
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
    """What a trainer's environment needs on a processor with these flags.

    Nothing where the processor lacks them: ATen would run them all the same and be killed. Such a trainer
    gives other bits than its peers, and is told by them.
    """
    return dict(_ENVIRONMENT[wanted]) if _NEEDS[wanted] <= flags else {}


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Of this machine; empty where the system does not list them so."""
    if not cpuinfo.exists():
        return frozenset()
    lines = cpuinfo.read_text().splitlines()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))
