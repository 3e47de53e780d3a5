"""Environments in which a processor plays one that it is not: see `PLAIN` in the Makefile."""

from __future__ import annotations

PLAIN = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "NUMBA_CPU_NAME": "x86-64",
    "NUMBA_CPU_FEATURES": "+sse2",
}
WITHOUT_NUMBA = {**PLAIN, "GRADWIRE_KERNELS": "reference"}
