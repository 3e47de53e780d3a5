"""Gradient accumulation: micro-batches whose gradients add up and are exchanged once."""
