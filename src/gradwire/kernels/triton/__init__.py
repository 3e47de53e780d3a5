"""What kernels for GPUs share: how they are started, tiles, codes of blocks.

Such kernels are the same functions as the references, with the same bits, in few passes over memory. None waits for the
device, branches on the host on what a tensor holds, or has a shape that depends on data. The same code runs without a
GPU, on CPU tensors, where `TRITON_INTERPRET=1` is set before triton is imported: that is how it is tested. Formulas are
those of the references, one rounding an operation: divisions are IEEE's, ties go to even, and multiplications are never
fused with additions. Sums are taken in float64, in an order of their own.
"""
