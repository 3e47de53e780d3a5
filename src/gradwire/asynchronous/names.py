"""`Names`: named tensors as one vector, which rules compute with and which travels."""

from gradwire.core.flat_layout import FlatLayout as Names

__all__ = ["Names"]
