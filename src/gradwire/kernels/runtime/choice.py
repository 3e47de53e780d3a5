"""Which kernels the environment asks for: `GRADWIRE_KERNELS=reference`, or the fastest that are installed."""

from __future__ import annotations

import os

from gradwire.core.errors import SpecError

VARIABLE = "GRADWIRE_KERNELS"


def reference_only() -> bool:
    """Return whether the environment asks for the kernels in plain torch.

    Raises:
        SpecError: the variable is set to something else, which could be meant either way.
    """
    chosen = os.environ.get(VARIABLE) or "auto"
    if chosen not in ("auto", "reference"):
        raise SpecError(
            f"{VARIABLE}={chosen!r} names no kernels: set it to 'reference' for plain PyTorch, or to 'auto' for the "
            "fastest that are installed"
        )
    return chosen == "reference"
