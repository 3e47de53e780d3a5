"""`gradwire.parse`: what a spec names, of whatever place. `gradwire.core.grammar` says how specs are written."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from gradwire.codecs import Codec
from gradwire.codecs.error_memory import require_contraction, require_decay
from gradwire.codecs.scaled import contracting
from gradwire.composition import COMMON, Composition, hint
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.grammar import name_of, split
from gradwire.core.places import BASELINES, EVERY_STEP, Place, require_place
from gradwire.core.registry import Method, SpecMethod, table
from gradwire.core.spoken import called
from gradwire.methods import methods
from gradwire.reducers.aggregate import PrivateMean, Rule
from gradwire.reducers.base import Reducer, as_reducer


def find(spec: str, *wanted: Place) -> Method | SpecMethod:
    """Return the method whose name a spec begins with.

    Args:
        spec: as written.
        wanted: where it has to serve; what an error suggests that serves elsewhere comes with the call that takes it.

    Raises:
        SpecError: there is none, with the nearest name.

    >>> find("topk:0.01").summary
    'largest magnitudes'
    """
    name, known = name_of(spec), table()
    if not name:
        raise SpecError(f"a method's name is missing in {spec!r}: write one, as in 'int4' or 'topk:0.01+int8'")
    if name not in known:
        raise SpecError(f"unknown method {name!r} in {spec!r}: {hint(name, *wanted)}")
    return known[name]


class ForShards(NamedTuple):
    """What `int4,parameters=int8` is: a method for gradients, and the codec that parameters are gathered in."""

    gradients: Reducer
    parameters: Codec

    place = EVERY_STEP


def parse(spec: str) -> Any:
    """Return what a spec names. Its `place` tells where it can serve, and the call that takes it there.

    Returns:
        A `Reducer` for a method that reduces gradients in every step, with the exchange and the error feedback that
        suit it; `ForShards` where parameters are compressed as well. For others a `Recipe` (methods that go with the
        optimizer), a `Named` (methods of federations) or a `TorchMethod` (baselines of `gradwire compare`).

    Raises:
        SpecError: an unknown method or option, or a value that cannot be read, with the nearest name.
        CompositionError: parts that do not fit together.

    >>> parse("sign")
    Guard(inner=ErrorFeedback(inner=TwoShot(codec=Sign(block=4096), second=Sign(block=4096)), decay=1.0))
    >>> parse("topk:0.01") == parse("topk:density=0.01") == parse("topk,density=0.01")
    True
    >>> parse("fp16"), parse("fp16").place.title
    (AllReduceExchange(codec=FP16()), 'Gradients of every step')
    >>> parse("topc:0.01")
    Traceback (most recent call last):
        ...
    gradwire.core.errors.SpecError: unknown method 'topc' in 'topc:0.01': did you mean 'topk'?
    """
    method = find(spec)
    if not isinstance(method, Method):
        return method.made(spec)
    written = _with_brackets(spec)
    composition = Composition.read(written)
    if "parameters" not in composition.common:
        return composition.reducer(spec)
    kept = ",".join(piece for piece in split(written, ",") if not piece.startswith("parameters"))
    return ForShards(composition.reducer(kept), as_codec(composition.common["parameters"]))


def _with_brackets(spec: str) -> str:
    """Put the options of a codec in brackets that followed `parameters=` without, as they did before there were any."""
    before, _, after = spec.partition(",parameters=")
    codec, *items = split(after, ",")
    own = [item for item in items if item.partition("=")[0] not in COMMON]
    if codec.startswith("(") or not own:
        return spec
    rest = [item for item in items if item not in own]
    written = ",".join([f"{before},parameters=({','.join([codec, *own])})", *rest])
    warnings.warn(
        f"{spec!r} is written {written!r} now, since options after a comma are those of the first method",
        FutureWarning,
        stacklevel=3,
    )
    return written


def as_method(given: Reducer | str) -> Reducer:
    """Return the reducer that a spec names, or the reducer that was given.

    Raises:
        SpecError, CompositionError: as `parse`; a method that serves elsewhere, with the call that takes it, or
            something that is neither.

    >>> as_method("fedavg")
    Traceback (most recent call last):
        ...
    gradwire.core.errors.SpecError: 'fedavg' is for clients of federations: run `gradwire federate --method fedavg`
    """
    if not isinstance(given, str):
        return as_reducer(given)
    place = find(given, EVERY_STEP).place
    if place is BASELINES:
        raise SpecError(f"{given!r} {place.does}: {hint(name_of(given).removeprefix('torch.'), EVERY_STEP)}")
    require_place(given, place, EVERY_STEP)
    made = parse(given)
    if isinstance(made, ForShards):
        raise SpecError(
            f"parameters= in {given!r} is for models of fully_shard, or `gradwire compare --engine fsdp2`: leave it out"
        )
    return made


def for_shards(
    given: Reducer | ForShards | str, parameters: Codec | str | None = None
) -> tuple[Reducer, Codec | str | None]:
    """Return the method for gradients and the codec for parameters that are meant, by a spec or beside it.

    Raises:
        SpecError, CompositionError: as `as_method`, or a codec that is given both ways.

    >>> for_shards("int4,parameters=int8")[1]
    BlockInt(bits=8, block=256, stochastic=False)
    """
    if isinstance(given, str) and find(given, EVERY_STEP).place is EVERY_STEP:
        given = parse(given)
    if not isinstance(given, ForShards):
        return as_method(given), parameters
    if parameters is not None:
        raise SpecError(f"parameters={parameters} is given twice: once in the spec, once beside it")
    return given


def as_codec(given: Codec | str) -> Codec:
    """Return the codec that a spec names, without an exchange and without error feedback, or the codec that was given.

    Raises:
        SpecError: an unknown method or option, a method that is no codec, or an option of exchanges.
        CompositionError: parts that do not fit together, or something that is neither.

    >>> as_codec("randomk:0.1+int8")
    Chain(first=RandomK(density=0.1, scaled=False), second=BlockInt(bits=8, block=256, stochastic=False))
    """
    if isinstance(given, Codec):
        return given
    if not isinstance(given, str):  # pyright: ignore[reportUnnecessaryIsInstance] - a reducer, most likely
        raise CompositionError(f"{given!r} is no codec: give one, such as TopK(0.01), or a spec, such as 'topk:0.01'")
    composition = Composition.read(given)
    for name in composition.common:
        raise SpecError(f"{name} in {given!r} is an option of exchanges, and a codec alone has none: leave it out")
    return called(composition.codec(), given)


def parse_codec(spec: str) -> tuple[Codec, float | None]:
    """Return the codec that a spec names and the decay of its error memory, None where it needs none.

    For what one sends to another, where there is no exchange: `gradwire.compress` takes both.

    Raises:
        SpecError: as `parse`; a method that is more than a codec, or an option of exchanges.
        CompositionError: a memory around a codec whose error would grow without bound.

    >>> parse_codec("topk:0.05")
    (TopK(density=0.05, values='fp32', indices='auto'), 1.0)
    >>> parse_codec("fp16"), parse_codec("qsgd:15")[1]
    ((FP16(), None), None)
    """
    composition = Composition.read(spec)
    common = composition.common
    if extra := [name for name in common if name not in ("ef", "decay")]:
        raise SpecError(f"{extra[0]} in {spec!r} belongs to exchanges among ranks: leave it out where one sends to one")
    codec, feedback = composition.codec(), common.get("ef", composition.methods[0].feedback)
    if feedback == "ef21":
        raise SpecError(f"ef=ef21 in {spec!r} is for exchanges among ranks: take ef=on")
    if not feedback:
        if "decay" in common:
            raise SpecError(f"decay in {spec!r} is an option of error feedback, and there is none: add ef=on")
        return codec, None
    if codec.lossless:
        raise CompositionError(f"ef=on in {spec!r} has nothing to remember, since all is sent: leave it out")
    codec = contracting(codec)
    require_contraction(codec)
    require_decay(common.get("decay", 1.0))
    return codec, common.get("decay", 1.0)


def parse_rule(spec: str) -> Rule | PrivateMean:
    """Return the rule that a spec names, for whoever has all rows at hand: "median", "trimmed:1", "krum:1", "dp:1".

    Raises:
        SpecError: as `parse`; a method that is no rule, or options of exchanges.
        CompositionError: as the rule's.

    >>> parse_rule("trimmed:2")
    TrimmedMean(bad=2)
    """
    composition = Composition.read(spec)
    (rule, *others), common = composition.built, composition.common
    if common or others or not isinstance(rule, Rule | PrivateMean):
        names = [name for name, method in methods().items() if issubclass(_kind(method), Rule | PrivateMean)]
        raise SpecError(f"{spec!r} is no rule, with its own options alone: take one of {', '.join(names)}")
    return rule


def _kind(method: Method) -> type:
    return method.build if isinstance(method.build, type) else object
