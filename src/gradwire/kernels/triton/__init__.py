"""What kernels for GPUs share: how they are started, and tiles."""
