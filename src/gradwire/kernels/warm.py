"""Compiling every kernel before the first step needs it."""

from __future__ import annotations

from gradwire.kernels.dispatch import KERNELS, implementations


def import_for_cpu() -> bool:
    """Import all kernels for CPUs, compiling none; return whether they can be had, which takes numba."""
    packages = {kernel.package for kernel in KERNELS if "cpu" in kernel.devices}
    return None not in [implementations(package, "cpu") for package in sorted(packages)]


def prepare_to_load() -> None:
    """Import all that loading kernels for CPUs takes, compiling none of them; does nothing where numba is unwanted.

    With the first function that numba compiles or loads it imports modules for half a second.
    """
    if import_for_cpu():
        from gradwire.kernels.runtime.compiling import compile_nothing

        compile_nothing()


def warm_up() -> None:
    """Compile every kernel for CPUs with its signature, or load it from disk, so that no training step does.

    Does nothing where numba is missing or unwanted. Triton compiles for the shapes that it meets, so kernels for GPUs
    are compiled in the first steps.
    """
    if not import_for_cpu():
        return
    from gradwire.kernels.runtime.compiling import COMPILED

    for kernel in COMPILED:
        kernel.compile()
