"""Policies by layer: which parameters travel in more bits than the method, as `layers=` of a spec says it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.grammar import split
from gradwire.core.roles import ROLES
from gradwire.reducers.base import Reducer
from gradwire.reducers.exchange import PLAIN
from gradwire.reducers.partition import Condition, HasRole, Partition

DEFAULT, MEASURED = "default", "measured"
EIGHT_BITS = 0.2
"""What share of a gradient's bytes a method sends that has about 8 bits: less than these, and more than 6 bits."""

_WRITTEN = "write layers=default, layers=measured, or rules such as layers=embedding:int8/*.head.weight:none"


def by_layer(spec: str, text: str, default: Reducer, made: Callable[[str], Reducer]) -> Partition:
    """Return the policy that `layers=` describes, around the reducer of the other parameters.

    Rules stand between slashes, and the first that a parameter meets counts. A rule is a role (embedding, norm, bias or
    output) or a glob on the parameter's name, a colon, and a spec. `default` among them stands for these rules:

        norm, bias            uncompressed: few bytes, and large elements beside others of a block
        embedding, output     int8; bf16 where the method itself sends about 8 bits an element or more

    Args:
        spec: all of the spec, for errors.
        text: what follows `layers=`.
        default: what serves the parameters that no rule names.
        made: makes a reducer of a rule's spec.

    Raises:
        SpecError: a rule that cannot be read, or a spec of one.
        CompositionError: a method that sends everything uncompressed anyway.
    """
    rules: list[tuple[Condition, Reducer]] = []
    for piece in split(text, "/"):
        if piece == DEFAULT:
            rules += _default_rules(spec, default, made)
            continue
        pattern, colon, method = (part.strip() for part in piece.partition(":"))
        if not (colon and pattern and method):
            raise SpecError(f"cannot read {piece!r} of layers= in {spec!r}: {_WRITTEN}")
        rules.append((HasRole(pattern) if pattern in ROLES else pattern, made(method)))
    return Partition(tuple(rules), default)


def _default_rules(spec: str, default: Reducer, made: Callable[[str], Reducer]) -> Iterator[tuple[Condition, Reducer]]:
    if default == PLAIN:
        raise CompositionError(
            f"layers=default in {spec!r} changes nothing, since all is sent uncompressed anyway: leave it out"
        )
    more = made("bf16" if default.payload_share >= EIGHT_BITS else "int8")
    for role in ("norm", "bias"):
        yield HasRole(role), PLAIN
    if more != default:
        for role in ("embedding", "output"):
            yield HasRole(role), more
