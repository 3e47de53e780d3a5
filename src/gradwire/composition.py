"""How the parts of a spec become one reducer: `topk:0.01+int8,exchange=twoshot,warmup=100`.

A second method quantises the values that the first keeps. Options are the first method's own, and these, which every
method has:

    exchange=allreduce|allgather|allgatherv|twoshot  how payloads become a mean
    exchange=direct|ring|tree|rhd|auto      an all-reduce by another route; auto measures which is fastest
    node=RANKS|RANKS/RANKS/...|auto         uncompressed inside nodes of so many ranks, the method between them;
                                            the number must divide that of the ranks, and 1 is no node; 1/2/3 are
                                            nodes of 1, 2 and 3 ranks; auto has ranks find out who shares a node
    node=RANKSxNODES                        three levels: uncompressed inside groups of so many nodes too
    ef=on|off, decay=FLOAT                  error feedback; `on` scales an unbiased codec to a contraction
    ef=ef21                                 differences to an estimate that ranks keep, in place of a residual
    residual=fp32|bf16|factored:RANK        what its memory is kept in
    worker_momentum=FLOAT                   each rank sends a moving average; give the optimizer less momentum then
    warmup=STEPS                            steps of uncompressed all-reduce first
    vectors=on|off                          off: biases and norms go uncompressed
    layers=default|PATTERN:SPEC/...         other methods for some parameters: a pattern is a role (embedding, norm,
                                            bias, output) or a glob on names; default has more bits for these roles
    layers=measured                         of int2 to int8: bits for each layer, by errors that are measured
    budget=SPEC|FLOAT                       with it: bytes of a step, as of this codec, or a share of float32's
    measure=STEPS                           with it: steps between two measurements
    guard=on|off                            handling of non-finite gradients
    weights=FLOAT/FLOAT/...                 a weight for each rank
    weights=given                           what each rank gives `session.weigh` before each step, as its samples
    rule=RULE                               after dp: each rank adds all the noise itself, and a rule combines
    parameters=CODEC                        under FSDP2: what parameters are gathered in, as (int8,stochastic=on)

What would change nothing is refused: memory where all is sent (`none,ef=on`), vectors that are uncompressed anyway.
A rule stands before the codec whose payloads it combines, without error feedback: `krum:1+int8,ef=off`. Noise for
privacy comes before a rule and never after it: `dp:1,rule=median`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from gradwire.codecs import BlockInt, Chain, Codec
from gradwire.codecs.scaled import contracting
from gradwire.core.axis import NodeSize
from gradwire.core.errors import CompositionError, SpecError
from gradwire.core.grammar import Part, arguments, read
from gradwire.core.nearest import meant, nearest
from gradwire.core.options import SWITCH, convert
from gradwire.core.places import EVERY_STEP, Place
from gradwire.core.registry import Method, hints, table
from gradwire.core.spoken import Spoken, called
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
    MeasuredBits,
    Partition,
    RecursiveHalvingDoubling,
    Reducer,
    Ring,
    Tree,
    WorkerMomentum,
    is_vector,
    two_shot,
)
from gradwire.reducers.aggregate import GIVEN, Gathered, PrivateMean, PrivateReports, Rule, Sharded, Weighted
from gradwire.reducers.exchange import PLAIN
from gradwire.reducers.hierarchical import AS_FOUND, in_levels
from gradwire.reducers.layers import MEASURED, by_layer
from gradwire.reducers.without_effect import (
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
_OF_A_LAYER = frozenset({"exchange", "node", "ef", "decay", "residual"})
"""The options that methods of single layers have."""
_OPTION_SYNONYMS = {"error_feedback": "ef", "feedback": "ef", "ratio": "density", "k": "density", "group": "block"}


def _node(text: str) -> str:
    """Check what follows `node=`, and return it."""
    if any(min(level if isinstance(level, tuple) else (level,)) < 1 for level in node_levels(text.lower())):
        raise ValueError(text)
    return text.lower()


def node_levels(text: str) -> tuple[NodeSize, ...]:
    """Return what the groups of each level have, the finest level first; of `auto` that nobody knows it yet.

    >>> node_levels("8x4"), node_levels("1/2/3")
    ((8, 4), ((1, 2, 3),))
    """
    if text == "auto":
        return ()
    levels = [tuple(map(int, level.split("/"))) for level in text.split("x")]
    return tuple(level[0] if len(level) == 1 else level for level in levels)


def _feedback(text: str) -> bool | str:
    """Read what follows `ef=`."""
    return "ef21" if text.lower() == "ef21" else SWITCH[text.lower()]


class _Option(NamedTuple):
    """What reads an option's value, and a spec that has it."""

    kind: Callable[[str], Any]
    example: str
    wanted: str | None = None


COMMON: Mapping[str, _Option] = {
    "exchange": _Option(str, "none,exchange=ring"),
    "node": _Option(_node, "int4,node=8", "how many ranks share a node, 1 or more, or auto (1/2/3: each; 8x4: levels)"),
    "ef": _Option(_feedback, "qsgd:15,ef=on", "on, off or ef21"),
    "decay": _Option(float, "int4,decay=0.9"),
    "residual": _Option(str, "topk:0.01,residual=bf16"),
    "worker_momentum": _Option(float, "topk:0.01,worker_momentum=0.9"),
    "warmup": _Option(int, "int4,warmup=100"),
    "vectors": _Option(bool, "int4,vectors=off"),
    "layers": _Option(str, "int4,layers=default"),
    "budget": _Option(str, "int4,layers=measured,budget=int3"),
    "measure": _Option(int, "int4,layers=measured,measure=100"),
    "guard": _Option(bool, "int4,guard=off"),
    "weights": _Option(str, "none,weights=1/2"),
    "rule": _Option(str, "dp:1,rule=median"),
    "parameters": _Option(str, "int4,parameters=int8"),
}


@dataclass(frozen=True)
class Composition:
    """What the parts of a spec build, and the options that every method has.

    Attributes:
        spec: as written.
        parts: what is written.
        methods: of the parts.
        built: what each of them builds, without options of others.
        common: the options that every method has, converted.
    """

    spec: str
    parts: list[Part]
    methods: list[Method]
    built: list[Any]
    common: dict[str, Any]

    @classmethod
    def read(cls, spec: str) -> Composition:
        """Read the parts of a spec.

        Raises:
            SpecError: an unknown name or option, or a value that cannot be read.
            CompositionError: a value that a part cannot have.

        >>> Composition.read("topk:0.1+int8,warmup=9").common
        {'warmup': 9}
        """
        parts = read(spec)
        options = parts[0].options
        common = {
            name: convert(spec, name, options.pop(name), option.kind, option.wanted)
            for name, option in COMMON.items()
            if name in options
        }
        methods = [_method(spec, part) for part in parts]
        built = [_build(spec, part, method) for part, method in zip(parts, methods, strict=True)]
        return cls(spec, parts, methods, built, common)

    def reducer(self, called_by: str) -> Reducer:
        """Return the reducer with all that options put around it, which messages call `called_by`.

        Raises:
            SpecError, CompositionError: parts that do not fit together.
        """
        reducer = _reducer(self.spec, self.methods, self.built, self.common)
        coding = self.methods[1] if isinstance(reducer, Gathered) else self.methods[0]
        head = "+".join(part.written for part in self.parts)
        given = "".join(f",{name}={self.common[name]}" for name in ("exchange", "node") if name in self.common)
        return called(_wrap(self.spec, called(reducer, head + given), coding, self.common), called_by)

    def codec(self) -> Codec:
        """Return the codec that the parts make up, without an exchange and without error feedback.

        Raises:
            SpecError: a method that is no codec.
            CompositionError: parts that do not fit together.
        """
        if not isinstance(self.built[0], Codec):
            raise _no_codec(self.spec, self.parts[0])
        return _codec(self.spec, self.built)


def hint(name: str, *wanted: Place) -> str:
    """What to say about a name that no method has."""
    examples = {option: example for option, (_, example, _) in COMMON.items()}
    examples |= {exchange: f"none,exchange={exchange}" for exchange in EXCHANGES}
    written = {word: f"it is written after a comma, as in {example!r}" for word, example in examples.items()}
    return nearest(name, {**written, **hints(*wanted)}) or "`gradwire methods` lists all"


def _method(spec: str, part: Part) -> Method:
    method = table().get(part.name)
    if method is None:
        raise SpecError(f"unknown method {part.name!r} in {spec!r}: {hint(part.name, EVERY_STEP)}")
    if not isinstance(method, Method):
        raise _no_codec(spec, part)
    return method


def _no_codec(spec: str, part: Part) -> SpecError:
    return SpecError(f"{part.name!r} in {spec!r} is no codec: write one, such as 'int8' or 'topk:0.05'")


def _build(spec: str, part: Part, method: Method) -> Any:
    """Construct one part, with its argument and the options that are its own."""
    if "noise" in part.options and _builds_rule(method):
        raise _noise_after_rule(spec, part)
    values = arguments(spec, part, method, COMMON, _OPTION_SYNONYMS)
    if values.get("density") == 1.0:
        raise SpecError(
            f"density 1 in {spec!r} is all entries and not one of them: write 'none' to send all, or the fraction to "
            f"send, as in {part.name}:0.01 for 1%"
        )
    made = method.build(**values, **method.fixed)
    return called(made, part.written) if isinstance(made, Spoken) else made


def _builds_rule(method: Method) -> bool:
    return isinstance(method.build, type) and issubclass(method.build, Rule)


def _noise_after_rule(spec: str, rule: Part) -> SpecError:
    return SpecError(
        f"noise after {rule.written!r} in {spec!r} would hide nobody, since one rank can move the result of a rule as "
        f"far as the others lie apart: have each rank add its own before it, as in 'dp:1,noise=1,rule={rule.written}'"
    )


def _on_reports(spec: str, built: Any, rule: str) -> Reducer:
    """What `rule=` makes of a private mean: a rule over what each rank has clipped and made noisy itself."""
    if not isinstance(built, PrivateMean):
        raise SpecError(f"rule= in {spec!r} is an option of dp alone: write the rule by itself, as {rule!r}")
    inner = Composition.read(rule)
    if not isinstance(inner.built[0], Rule) or inner.common:
        raise SpecError(f"rule={rule} in {spec!r} is no rule, with its own options alone: write one, such as 'median'")
    return PrivateReports(_reducer(rule, inner.methods, inner.built, {}), built.clip, built.noise)


def _reducer(spec: str, methods: list[Method], built: list[Any], common: dict[str, Any]) -> Reducer:
    if common.get("layers") != MEASURED and (lost := [name for name in ("budget", "measure") if name in common]):
        raise SpecError(f"{lost[0]} in {spec!r} is an option of layers=measured: add that, or leave it out")
    if isinstance(built[0], Rule):
        if any(isinstance(part, PrivateMean) for part in built[1:]):
            raise _noise_after_rule(spec, Part(methods[0].name, methods[0].name, None, {}))
        built = [Gathered(built[0], _codec(spec, built[1:])) if built[1:] else Sharded(built[0])]
    if isinstance(built[0], Reducer):
        if common.get("layers") == MEASURED:
            raise SpecError(
                f"layers=measured in {spec!r} chooses widths of integers: write it after one of int2 to int8"
            )
        if len(built) > 1 or "exchange" in common or "node" in common:
            name = methods[0].name
            raise SpecError(f"{name!r} has messages of its own: no '+', no exchange and no node in {spec!r}")
        return _on_reports(spec, built[0], common["rule"]) if "rule" in common else built[0]
    if "rule" in common:
        return _on_reports(spec, built[0], common["rule"])
    codec = _codec(spec, built)
    if common.get("layers") == MEASURED:
        return _measured(spec, codec, common)
    if common.get("ef"):
        codec = called(contracting(codec), str(codec))
    exchange = common.get("exchange") or ("allgather" if len(methods) > 1 else methods[0].exchange)
    if exchange not in EXCHANGES:
        raise SpecError(f"unknown exchange {exchange!r} in {spec!r}: {meant(exchange, EXCHANGES)}")
    if exchange == "allgatherv":
        require_room(spec, codec)
    made = EXCHANGES[exchange](codec)
    node = common.get("node", "1")
    return Hierarchical(made, AS_FOUND) if node == "auto" else in_levels(made, node_levels(node))


def _measured(spec: str, codec: Codec, common: dict[str, Any]) -> Reducer:
    """Widths that are chosen by layer."""
    if not isinstance(codec, BlockInt):
        raise SpecError(f"layers=measured in {spec!r} chooses widths of integers: write it after one of int2 to int8")
    if common.get("exchange", "twoshot") != "twoshot" or common.get("node", "1") != "1":
        raise SpecError(f"layers=measured in {spec!r} goes with exchange=twoshot alone, and without node=")
    return MeasuredBits(codec, _budget(spec, common.get("budget"), codec), common.get("measure", 100))


def _budget(spec: str, text: str | None, codec: BlockInt) -> Codec | float:
    """What `budget=` says: by default as many bytes as the codec takes that `layers=measured` stands behind."""
    if text is None:
        return codec
    try:
        return float(text)
    except ValueError:
        return Composition.read(text).codec()


def _codec(spec: str, built: list[Any]) -> Codec:
    """The codec that methods joined by '+' make up."""
    for part in built:
        if not isinstance(part, Codec):
            raise SpecError(f"{spec!r}: only codecs can follow a '+', and {type(part).__name__} is none")
    return called(functools.reduce(Chain, built), "+".join(map(str, built)))


def _for_a_layer(spec: str) -> Reducer:
    """The reducer of a rule of `layers=`. What goes around all layers, the first method's options say."""
    composition = Composition.read(spec)
    if around := [name for name in composition.common if name not in _OF_A_LAYER]:
        raise SpecError(
            f"{around[0]} in {spec!r} is no option of a layer: write it behind the first method, where it counts for "
            "all of them"
        )
    made = replace(composition, common={**composition.common, "guard": False}).reducer(spec)
    if not made.averages:
        raise CompositionError(f"{spec!r} looks at whole gradients, and a layer is a part of one: take a codec")
    return made


def _weights(spec: str, text: str) -> tuple[float, ...] | Literal["given"]:
    if text == GIVEN:
        return GIVEN
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
    exchange = reducer
    while isinstance(exchange, Hierarchical):
        exchange = exchange.inter
    exchange = exchange.inner if isinstance(exchange, PrivateReports) else exchange
    return isinstance(exchange, Sharded) or (
        isinstance(exchange, AllReduceExchange) and exchange.codec.granularity == 1
    )


def _wrap(spec: str, reducer: Reducer, method: Method, common: dict[str, Any]) -> Reducer:
    partial = [name for name in ("warmup", "layers") if common.get(name)]
    partial += [] if common.get("vectors", True) else ["vectors=off"]
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
    layers = common.get("layers", MEASURED)
    if layers != MEASURED:
        reducer = by_layer(spec, layers, reducer, _for_a_layer)
        transparent = transparent and all(_needs_no_guard(served) for _, served in reducer.rules)
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
