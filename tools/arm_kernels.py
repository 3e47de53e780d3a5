"""Compile the kernels for CPUs for 64-bit Arm: `python tools/arm_kernels.py [TEXT]`, all or those whose name has TEXT.

What numba makes of a kernel on this machine must name no instruction of this machine's processor, and LLVM must be able
to make machine code of it for Arm. Nothing is run there. So this shows that the vectors and masks that kernels spell in
LLVM's language are no one processor's, and not that they are fast on another.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import numba
from llvmlite import binding

from gradwire.kernels import warm
from gradwire.kernels.runtime import compiling

TRIPLE = "aarch64-unknown-linux-gnu"
COUNTS_REFERENCES = re.compile(r"(?:tail )?call i8 @llvm\.x86\.atomic\.sub\.cc\.i64\(.*")
"""A call in numba's own counting of references, which it has compiled for this machine before kernels take it in."""


def ir_of(kernel: Any) -> str:
    """The optimised code of a `CompiledKernel` in LLVM's language, compiled anew."""
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy")(kernel.__wrapped__)
    dispatcher.compile(kernel.signature)
    (text,) = dispatcher.inspect_llvm().values()
    return text


def arm_code(ir: str) -> bytes:
    """An object file for Arm of code in LLVM's language.

    Raises:
        ValueError: the code names instructions of one processor.
    """
    ir = COUNTS_REFERENCES.sub("add i8 0, 0", ir)
    foreign = sorted(set(re.findall(r"call .*@(llvm\.(?:x86|aarch64|arm)\.[\w.]+)", ir)))
    if foreign or " asm " in ir:
        raise ValueError(f"instructions of one processor: {', '.join(foreign) or 'assembly'}")
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(TRIPLE).create_target_machine(cpu="generic", features="+neon")
    ir = re.sub(r'^target triple = ".*"$', f'target triple = "{TRIPLE}"', ir, flags=re.MULTILINE)
    ir = re.sub(r'^target datalayout = ".*"$', f'target datalayout = "{machine.target_data}"', ir, flags=re.MULTILINE)
    module = binding.parse_assembly(ir)
    module.verify()
    return machine.emit_object(module)


def main() -> None:
    """Compile, and print the size of each kernel's code."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    warm.import_for_cpu()
    compiled: list[Any] = list(compiling.COMPILED)
    kernels = [kernel for kernel in compiled if wanted in kernel.__qualname__]
    for kernel in kernels:
        print(f"{kernel.__wrapped__.__name__:28s} {len(arm_code(ir_of(kernel))):7d} bytes", flush=True)
    print(f"{len(kernels)} kernels compile for {TRIPLE}")


if __name__ == "__main__":
    main()
