"""Names and types of tensors as a session keeps them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradwire.codecs.base import SUPPORTED_DTYPES
from gradwire.core.errors import AttachError

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What `torch.compile`, `checkpoint_wrapper` and FSDP put into names, each a component of its own."""


def canonical_name(name: str) -> str:
    """Return a parameter's name without the components that wrappers put into it.

    >>> canonical_name("_orig_mod.layer._checkpoint_wrapped_module.weight"), canonical_name("gate_module.weight")
    ('layer.weight', 'gate_module.weight')
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def require_apart(short: Mapping[str, str]) -> None:
    """Refuse two parameters that would share a name.

    Args:
        short: the names of all parameters, each with what it is without what wrappers add.

    Raises:
        AttachError: with both names.
    """
    whose: dict[str, str] = {}
    for name, kept in short.items():
        if (other := whose.setdefault(kept, name)) != name:
            raise AttachError(
                f"parameters {other!r} and {name!r} are both {kept!r} without what wrappers add, and state is kept by "
                "name; rename one of them"
            )


def require_served(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a tensor that no method can take.

    Raises:
        AttachError: with the dtypes and devices that are served.
    """
    if dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in SUPPORTED_DTYPES)
        raise AttachError(f"parameter {name!r} has dtype {dtype}; supported are {names}")
    if device.type not in ("cpu", "cuda"):
        raise AttachError(f"parameter {name!r} is on {device}; supported devices are cpu and cuda")
