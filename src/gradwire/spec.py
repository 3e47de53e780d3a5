"""The spec language that Python and the command line share: `topk:0.01+int8,exchange=twoshot,warmup=100`.

    spec    = method {"+" method} {"," option "=" value}
    method  = name [":" argument]

The first method's argument is its main number (density, levels, rank, block). A second method quantises the values
that the first keeps. Options are the first method's own, and these, which every method has:

    exchange=allreduce|allgather|allgatherv|twoshot  how payloads become a mean
    exchange=direct|ring|tree|rhd|auto      an all-reduce by another route; auto measures which is fastest
    node=RANKS                              uncompressed inside nodes of so many ranks, the method between them;
                                            the number must divide that of the ranks, and 1 is no node
    ef=on|off, decay=FLOAT                  error feedback; `on` scales an unbiased codec to a contraction
    ef=ef21                                 differences to an estimate that ranks keep, in place of a residual
    residual=fp32|bf16|factored:RANK        what its memory is kept in
    worker_momentum=FLOAT                   each rank sends a moving average; give the optimizer less momentum then
    warmup=STEPS                            steps of uncompressed all-reduce first
    vectors=on|off                          off: biases and norms go uncompressed
    guard=on|off                            handling of non-finite gradients
    weights=FLOAT/FLOAT/...                 a weight for each rank

What would change nothing is refused: memory where all is sent (`none,ef=on`), vectors that are uncompressed anyway.
A rule stands before the codec whose payloads it combines, without error feedback: `krum:1+int8,ef=off`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gradwire.codecs import Chain, Codec
from gradwire.codecs.error_memory import require_contraction, require_decay
from gradwire.codecs.scaled import contracting
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.options import REQUIRED, SWITCH, convert, meant, options_of
from gradwire.core.registry import Method, hints, nearest
from gradwire.core.spoken import Spoken, called
from gradwire.methods import methods
from gradwire.reducers import (
    EF21,
    AllGatherExchange,
    AllGatherVExchange,
    AllReduceExchange,
    Auto,
    CompressionWarmUp,
    Direct,
    ErrorFeedback,
    FactoredErrorFeedback,
    Guard,
    Hierarchical,
    LeanErrorFeedback,
    Partition,
    RecursiveHalvingDoubling,
    Reducer,
    Ring,
    Tree,
    WorkerMomentum,
    is_vector,
    two_shot,
)
from gradwire.reducers.aggregate import Gathered, PrivateMean, Rule, Sharded, Weighted
from gradwire.reducers.base import as_reducer
from gradwire.reducers.without_effect import (
    PLAIN,
    require_loss,
    require_memory,
    require_room,
    require_vectors,
    require_warming,
)

EXCHANGES: Mapping[str, Callable[[Codec], Reducer]] = {
    "allreduce": AllReduceExchange,
    "allgather": AllGatherExchange,
    "allgatherv": AllGatherVExchange,
    "twoshot": two_shot,
    "direct": Direct,
    "ring": Ring,
    "tree": Tree,
    "rhd": RecursiveHalvingDoubling,
    "auto": Auto,
}
RESIDUALS = {"fp32": ErrorFeedback, "bf16": LeanErrorFeedback}
_OPTION_SYNONYMS = {"error_feedback": "ef", "feedback": "ef", "ratio": "density", "k": "density", "group": "block"}


def _feedback(text: str) -> bool | str:
    """Read what follows `ef=`."""
    return "ef21" if text.lower() == "ef21" else SWITCH[text.lower()]


class _Option(NamedTuple):
    """What reads an option's value, and a spec that has it."""

    kind: Callable[[str], Any]
    example: str
    wanted: str | None = None


_COMMON: Mapping[str, _Option] = {
    "exchange": _Option(str, "none,exchange=ring"),
    "node": _Option(int, "int4,node=8"),
    "ef": _Option(_feedback, "qsgd:15,ef=on", "on, off or ef21"),
    "decay": _Option(float, "int4,decay=0.9"),
    "residual": _Option(str, "topk:0.01,residual=bf16"),
    "worker_momentum": _Option(float, "topk:0.01,worker_momentum=0.9"),
    "warmup": _Option(int, "int4,warmup=100"),
    "vectors": _Option(bool, "int4,vectors=off"),
    "guard": _Option(bool, "int4,guard=off"),
    "weights": _Option(str, "none,weights=1/2"),
}


class _Part(NamedTuple):
    method: Method
    argument: str | None


def parse(spec: str) -> Reducer:
    """Return the reducer that `spec` names, with the exchange and the error feedback that suit it.

    Raises:
        SpecError: an unknown method or option, or a value that cannot be read, with the nearest name.
        CompositionError: parts that do not fit together.

    >>> parse("sign")
    Guard(inner=ErrorFeedback(inner=TwoShot(codec=Sign(block=4096), second=Sign(block=4096)), decay=1.0))
    >>> parse("fp16")
    AllReduceExchange(codec=FP16())
    >>> parse("topc:0.01")
    Traceback (most recent call last):
        ...
    gradwire.core.errors.SpecError: unknown method 'topc' in 'topc:0.01': did you mean 'topk'?
    """
    parts, built, common = _read_parts(spec)
    reducer = _reducer(spec, parts, built, common)
    coding = parts[1] if isinstance(reducer, Gathered) else parts[0]
    head = "+".join(_written(part) for part in parts)
    given = "".join(f",{name}={common[name]}" for name in ("exchange", "node") if name in common)
    return called(_wrap(spec, called(reducer, head + given), coding.method, common), spec)


def _written(part: _Part) -> str:
    return part.method.name if part.argument is None else f"{part.method.name}:{part.argument}"


def as_method(given: Reducer | str) -> Reducer:
    """Return the reducer that a spec names, or the reducer that was given.

    Raises:
        SpecError, CompositionError: as `parse`; something that is neither.
    """
    return parse(given) if isinstance(given, str) else as_reducer(given)


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
    parts, built, common = _read_parts(given)
    for name in common:
        raise SpecError(f"{name} in {given!r} is an option of exchanges, and a codec alone has none: leave it out")
    return called(_whole_codec(given, parts, built), given)


def _whole_codec(spec: str, parts: list[_Part], built: list[Any]) -> Codec:
    if not isinstance(built[0], Codec):
        name = parts[0].method.name
        raise SpecError(f"{name!r} in {spec!r} is no codec: write one, such as 'int8' or 'topk:0.05'")
    return _codec(spec, built)


def _read_parts(spec: str) -> tuple[list[_Part], list[Any], dict[str, Any]]:
    """The parts of a spec, what each of them builds, and the options that every method has."""
    parts, options = _read(spec)
    common = {
        name: convert(spec, name, options.pop(name), option.kind, option.wanted)
        for name, option in _COMMON.items()
        if name in options
    }
    built = [_build(spec, part, options if i == 0 else {}) for i, part in enumerate(parts)]
    for part, made in zip(parts, built, strict=True):
        if isinstance(made, Spoken):
            called(made, _written(part))
    return parts, built, common


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
    parts, built, common = _read_parts(spec)
    if extra := [name for name in common if name not in ("ef", "decay")]:
        raise SpecError(f"{extra[0]} in {spec!r} belongs to exchanges among ranks: leave it out where one sends to one")
    codec, feedback = _whole_codec(spec, parts, built), common.get("ef", parts[0].method.feedback)
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
    _, built, common = _read_parts(spec)
    if common or len(built) > 1 or not isinstance(built[0], Rule | PrivateMean):
        names = [name for name, method in methods().items() if issubclass(_kind(method), Rule | PrivateMean)]
        raise SpecError(f"{spec!r} is no rule, with its own options alone: take one of {', '.join(names)}")
    return built[0]


def _kind(method: Method) -> type:
    return method.build if isinstance(method.build, type) else object


def _read(spec: str) -> tuple[list[_Part], dict[str, str]]:
    head, *tail = spec.strip().split(",")
    options: dict[str, str] = {}
    for item in tail:
        name, equals, value = item.partition("=")
        if not equals or not value:
            raise SpecError(
                f"cannot read {item!r} in {spec!r}: an option is written name=value, as in 'int4,warmup=100'"
            )
        if name.strip() in options:
            raise SpecError(f"{name.strip()!r} is given twice in {spec!r}")
        options[name.strip()] = value.strip()
    return [_part(spec, text) for text in head.split("+")], options


def _part(spec: str, text: str) -> _Part:
    name, colon, argument = text.strip().partition(":")
    known = methods()
    if not name:
        raise SpecError(f"a method's name is missing in {spec!r}: write one, as in 'int4' or 'topk:0.01+int8'")
    if name == "torch":
        raise SpecError(f"{spec!r} is a hook of PyTorch's, which only `gradwire compare` takes: {_hint(argument)}")
    if name not in known:
        raise SpecError(f"unknown method {name!r} in {spec!r}: {_hint(name)}")
    if colon and known[name].argument is None:
        raise SpecError(f"{name!r} takes nothing after a colon, in {spec!r}: write {name!r}")
    if colon and not argument:
        raise SpecError(f"nothing stands after the colon of {text!r}: {name} takes its {known[name].argument} there")
    return _Part(known[name], argument if colon else None)


def _hint(name: str) -> str:
    """What to say about a name that no method has."""
    examples = {option: example for option, (_, example, _) in _COMMON.items()}
    examples |= {exchange: f"none,exchange={exchange}" for exchange in EXCHANGES}
    written = {word: f"it is written after a comma, as in {example!r}" for word, example in examples.items()}
    return nearest(name, {**written, **hints()}) or "`gradwire methods` lists all"


def _build(spec: str, part: _Part, options: dict[str, str]) -> Any:
    """Construct one part, with its argument and the options that are its own."""
    method = part.method
    known = {name: option for name, option in options_of(method.build).items() if name not in method.fixed}
    given = dict(options)
    if part.argument is not None and method.argument is not None:
        if method.argument in given:
            raise SpecError(f"{method.argument!r} is given twice in {spec!r}: once after the colon, once as an option")
        given[method.argument] = part.argument
    for name in given:
        if name not in known:
            hint = meant(name, [*known, *_COMMON], _OPTION_SYNONYMS)
            raise SpecError(f"{method.name!r} has no option {name!r}, in {spec!r}: {hint}")
    values = {name: convert(spec, name, text, known[name].kind) for name, text in given.items()}
    for name, option in known.items():
        if name not in values and option.default is REQUIRED:
            raise SpecError(f"{method.name!r} needs its {name}, in {spec!r}: write it after a colon")
    if values.get("density") == 1.0:
        raise SpecError(
            f"density 1 in {spec!r} is all entries and not one of them: write 'none' to send all, or the fraction to "
            f"send, as in {method.name}:0.01 for 1%"
        )
    return method.build(**values, **method.fixed)


def described_options(method: Method) -> list[str]:
    """Return a method's own options as they are written, with their defaults, and choices where there are few.

    The first of several choices is the default; a type in capitals stands where there is none.

    >>> described_options(methods()["dct_topk"])
    ['density=0.0625', 'chunk=64', 'values=fp32|bf16|fp16']
    """
    options = options_of(method.build).items()
    return [f"{name}={option.described}" for name, option in options if name not in method.fixed]


def _reducer(spec: str, parts: list[_Part], built: list[Any], common: dict[str, Any]) -> Reducer:
    if isinstance(built[0], Rule):
        built = [Gathered(built[0], _codec(spec, built[1:])) if built[1:] else Sharded(built[0])]
    if isinstance(built[0], Reducer):
        if len(built) > 1 or "exchange" in common or "node" in common:
            name = parts[0].method.name
            raise SpecError(f"{name!r} has messages of its own: no '+', no exchange and no node in {spec!r}")
        return built[0]
    codec = _codec(spec, built)
    if common.get("ef"):
        codec = called(contracting(codec), str(codec))
    exchange = common.get("exchange") or ("allgather" if len(parts) > 1 else parts[0].method.exchange)
    if exchange not in EXCHANGES:
        raise SpecError(f"unknown exchange {exchange!r} in {spec!r}: {meant(exchange, EXCHANGES)}")
    if exchange == "allgatherv":
        require_room(spec, codec)
    made = EXCHANGES[exchange](codec)
    return Hierarchical(made, common["node"]) if common.get("node", 1) != 1 else made


def _codec(spec: str, built: list[Any]) -> Codec:
    """The codec that methods joined by '+' make up."""
    for part in built:
        if not isinstance(part, Codec):
            raise SpecError(f"{spec!r}: only codecs can follow a '+', and {type(part).__name__} is none")
    return called(functools.reduce(Chain, built), "+".join(map(str, built)))


def _weights(spec: str, text: str) -> tuple[float, ...]:
    return tuple(convert(spec, "weights", part, float) for part in text.split("/"))


def _fed(spec: str, reducer: Reducer, common: dict[str, Any]) -> Reducer:
    """The reducer with error feedback."""
    if common.get("ef") == "ef21":
        if lost := [name for name in ("residual", "decay") if name in common]:
            raise SpecError(f"{lost[0]} in {spec!r} is an option of ef=on: ef21 keeps estimates and owes nothing")
        made = EF21(reducer)
        require_loss(spec, reducer, "ef=ef21")
        return made
    residual, decay = common.get("residual", "fp32"), common.get("decay", 1.0)
    require_loss(spec, reducer, "ef=on")
    kind, _, rank = residual.partition(":")
    if kind == "factored":
        return FactoredErrorFeedback(reducer, decay, convert(spec, "residual", rank, int))
    if residual not in RESIDUALS:
        raise SpecError(f"unknown residual {residual!r} in {spec!r}: {meant(residual, [*RESIDUALS, 'factored:4'])}")
    return RESIDUALS[residual](reducer, decay)


def _needs_no_guard(reducer: Reducer) -> bool:
    """Where each element travels for itself a NaN reaches the mean unaided; a rule leaves a bad gradient out."""
    exchange = reducer.inter if isinstance(reducer, Hierarchical) else reducer
    return isinstance(exchange, Sharded) or (
        isinstance(exchange, AllReduceExchange) and exchange.codec.granularity == 1
    )


def _wrap(spec: str, reducer: Reducer, method: Method, common: dict[str, Any]) -> Reducer:
    partial = ["warmup"] if common.get("warmup") else [] if common.get("vectors", True) else ["vectors=off"]
    if partial and not reducer.averages:
        raise SpecError(
            f"{partial[0]} in {spec!r} would send gradients past {reducer}, which is there to look at all of them"
        )
    if common.get("ef", method.feedback):
        reducer = _fed(spec, reducer, common)
    elif lost := [name for name in ("residual", "decay") if name in common]:
        raise SpecError(f"{lost[0]} in {spec!r} is an option of error feedback, and there is none: add ef=on")
    else:
        require_memory(spec, reducer)
    transparent = _needs_no_guard(reducer)
    if not common.get("vectors", True):
        require_vectors(spec, reducer)
        reducer = Partition(((is_vector, PLAIN),), reducer)
    if common.get("warmup"):
        require_warming(spec, reducer)
        reducer = CompressionWarmUp(PLAIN, reducer, common["warmup"])
    if "weights" in common:
        reducer = Weighted(reducer, _weights(spec, common["weights"]))
    if common.get("worker_momentum"):
        reducer = WorkerMomentum(reducer, common["worker_momentum"])
    return Guard(reducer) if common.get("guard", not transparent) else reducer
