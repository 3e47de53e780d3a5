"""Which widths `layers=measured` has chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradwire.core.errors import StateError
from gradwire.core.state import walk

if TYPE_CHECKING:
    from gradwire.session.session import Session


def layer_bits(session: Session) -> dict[str, int]:
    """Return the bits that an element of each parameter's gradient has in the next step, alike on all ranks.

    Call it between two steps. The numbers change where a measurement is made, see `gradwire.reducers.MeasuredBits`.

    Args:
        session: of a method with `layers=measured`.

    Raises:
        StateError: another method.

    Example:
        session = gradwire.attach(ddp, "int4,layers=measured")
        ...
        print(gradwire.layer_bits(session))  # {"wte.weight": 5, "blocks.0.mlp.weight": 3, ...}
    """
    found: dict[str, int] = {}
    for grain, state in session.engine.states():
        for path, leaf in walk(state):
            if path.split("/")[-1] == "bits" and leaf.kind == "segment":
                found |= {segment.name: round(float(leaf.tensor[0])) for segment in grain.segments}
    if not found:
        raise StateError(f"{session.method} chooses no widths by layer: add layers=measured to an intN method")
    return {name: found[name] for name in session.names if name in found}
