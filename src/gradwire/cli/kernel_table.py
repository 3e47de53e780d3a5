"""`gradwire methods --kernels`: what each kernel runs in, made from what dispatch chooses from."""

from __future__ import annotations

from rich.table import Table


def kernel_table() -> Table:
    """A row for each kernel: its family, its name, and what it runs in on a CPU and on a CUDA device."""
    from gradwire.catalogue import COMPILER_TITLES
    from gradwire.kernels.dispatch import implementation_table

    table = Table(box=None, header_style="bold")
    for heading in ("family", "kernel", "on a CPU", "on CUDA"):
        table.add_column(heading, no_wrap=True)
    for family, name, on_cpu, on_cuda in implementation_table():
        table.add_row(family, name, COMPILER_TITLES[on_cpu], COMPILER_TITLES[on_cuda])
    table.caption = "Where numba or Triton is missing, or GRADWIRE_KERNELS=reference is set, torch takes its place."
    return table
