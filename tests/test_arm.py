"""Kernels for CPUs belong to no one processor: LLVM makes code for 64-bit Arm of what numba makes of them."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

pytest.importorskip("numba")
tool = importlib.import_module("arm_kernels")

KERNELS = {
    "sign.cpu": "_sign_decode",  # masks of eight lanes
    "selection.candidates": "_count_from",  # masks of 64
    "low_rank.products_cpu": "_low_rank",  # sums in vectors
}
"""A few with what is spelled in LLVM's language: `python tools/arm_kernels.py` compiles all."""


@pytest.mark.one_draw_in(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("module", "name"), KERNELS.items())
def test_a_kernel_compiles_for_arm(module: str, name: str) -> None:
    kernel: Any = getattr(importlib.import_module(f"gradwire.kernels.{module}"), name)
    assert tool.arm_code(tool.ir_of(kernel)).startswith(b"\x7fELF")


def test_instructions_of_one_processor_are_found() -> None:
    ir = "declare void @llvm.x86.sse2.pause()\ndefine void @f() {\n  call void @llvm.x86.sse2.pause()\n  ret void\n}\n"
    with pytest.raises(ValueError, match=r"llvm\.x86\.sse2\.pause"):
        tool.arm_code(ir)
