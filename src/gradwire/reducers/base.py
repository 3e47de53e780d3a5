"""The contract of a reducer: a program that yields collectives and returns what becomes of all ranks' tensors.

    received = yield collective.AllToAll(wire)

A reducer does no I/O and holds no state: a driver performs what it yields, on one grain at a time, and commits the
state it returns once the whole step is known to be good. Programs never branch on the value of a tensor, unless all
ranks were sent the same and a tensor without data (`meta`) has its branch too.

A reducer declares traits. The traits of one that is made of others, its `children`, follow from theirs, unless it
declares something else. A trait that must hold everywhere is true where it is true for all children, and a trait that
is enough in one place where it is true for any child. Of numbers the largest or the least counts. So a wrapper states
what it changes and nothing else.

- `reduce` must leave `x` as it is unless the reducer declares `keeps_input`, in which case `x` is the reducer's to
  keep (error feedback makes it the new residual).
- `conserves_sum`: sum over ranks of (x + e) + n * sum of owners' residuals = n * mean + the same of the new state.
- `keyed`: what is sent is drawn from a key, other than by a codec that says so; `contraction` then holds in the mean
  over keys.
- `averages`: the value is the mean over ranks of what they sent. Rules that are no mean (a median, a weighted or a
  private mean) say no, and state what holds for them instead.
- `linear`: the result is linear in what the ranks sent, so that what is sent in parts, over several steps, adds up to
  what the whole would have become. Error feedback and EF21 send in parts. A mean is linear, and so is a weighted mean;
  a median is not, nor is a choice by distances.
- `carries_momentum`: what is sent contains momentum already, which nobody should add again.
- `sums_in_16_bits`: sums over ranks are rounded to 16 bits, and estimates that are never corrected would drift by it.
- `ends_alike`: every rank ends with the same result, bit for bit. What a model is trained by must say so, else replicas
  would drift apart without a word.
- `scatters`: each rank ends with its own shard of the value only, the elements `owned`: what sharded training needs.
- `shows_non_finite`: what is not finite on any rank shows in the mean that *every* rank ends with, so that nobody need
  agree on it. What `scatters` can never say so, since no rank sees the whole mean.
- `fewest_ranks`, `rank_multiple`: a rule may need several ranks to make sense, and nodes of m ranks need a multiple of
  m; `require_ranks` refuses other numbers.
- `weighs`: it wants to be told in each step what this rank counts for (`Step.weight`).
- `repeatable`: equal inputs, states and seeds give equal results. Noise for privacy must not.
- `assign(parameter)` says which reducer serves a parameter: usually itself, for a policy somebody else.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, cast

from torch import Tensor
from typing_extensions import override

from gradwire.core.axis import SubGroups
from gradwire.core.errors import CompositionError
from gradwire.core.grain import Grain, ParameterSpec
from gradwire.core.places import EVERY_STEP, Place
from gradwire.core.spoken import Spoken, called_as
from gradwire.core.state import State
from gradwire.reducers.step import Program, Step


class _OfChildren:
    """A trait that a class declares by a value, and that is asked of a reducer's children where it declares none."""

    def __init__(self, fold: Callable[[Iterable[bool]], bool]) -> None:
        self._fold = fold

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, reducer: Reducer | None, kind: type) -> bool:
        children = () if reducer is None else reducer.children()
        return self._fold(getattr(child, self._name) for child in children)


class Reducer(Spoken, ABC):
    """A way to combine one tensor of every rank, most often into their mean. The module's text has the contract."""

    keeps_input: ClassVar[bool] = cast(bool, _OfChildren(any))
    conserves_sum: ClassVar[bool] = cast(bool, _OfChildren(all))
    keyed: ClassVar[bool] = cast(bool, _OfChildren(any))
    place: ClassVar[Place] = EVERY_STEP

    def children(self) -> tuple[Reducer, ...]:
        """The reducers that this one is made of, in the order of its attributes.

        >>> from gradwire.spec import parse
        >>> [type(child).__name__ for child in parse("int4,ef=off").children()]
        ['TwoShot']
        """
        return tuple(_reducers_among(vars(self).values()))

    @property
    def scope(self) -> Literal["flat", "tensor"]:
        """Elementwise on a flat grain, or one matrix (or a batch of equal ones) at a time."""
        return "tensor" if any(child.scope == "tensor" for child in self.children()) else "flat"

    @property
    def lossless(self) -> bool:
        """Whether nothing is lost, so that error feedback would have nothing to do."""
        return self._all(lambda child: child.lossless)

    @property
    def averages(self) -> bool:
        """Whether the result is the mean over ranks of what they sent."""
        return all(child.averages for child in self.children())

    @property
    def linear(self) -> bool:
        """Whether results of what is sent in parts add up to the result of the whole: a mean's do."""
        children = self.children()
        return all(child.linear for child in children) if children else self.averages

    @property
    def scatters(self) -> bool:
        """Whether each rank ends with its own shard of the mean only."""
        return any(child.scatters for child in self.children())

    @property
    def ends_alike(self) -> bool:
        """Whether every rank ends with the same result, bit for bit."""
        return all(child.ends_alike for child in self.children())

    def owned(self, grain: Grain, step: Step) -> slice:
        """Return which elements of the grain this rank's result holds: all of them, or the rank's shard."""
        return slice(0, grain.numel)

    def scattered(self) -> Reducer:
        """Return the reducer that leaves each rank with its shard of what this one computes, without the rest.

        Shards are those of `Shards(numel, ranks)`, whatever the codec is: what sharded training has already cut.

        Raises:
            CompositionError: there is none.

        >>> from gradwire.spec import parse
        >>> parse("int8,ef=off").scattered()
        ShardwiseScatterReduce(codec=BlockInt(bits=8, block=256, stochastic=False))
        """
        raise CompositionError(f"{self} cannot be stopped halfway, when each rank has its shard of the mean")

    @property
    def carries_momentum(self) -> bool:
        """Whether momentum is added before sending."""
        return any(child.carries_momentum for child in self.children())

    @property
    def sums_in_16_bits(self) -> bool:
        """Whether sums over ranks are rounded to 16 bits: an error that no rank's residual contains."""
        return any(child.sums_in_16_bits for child in self.children())

    @property
    def payload_share(self) -> float:
        """About how many bytes a payload has for a byte of float32 gradient: the largest share, 0 if unknown.

        Where it is large, a small model is cut into more grains (`drivers.plan`).
        """
        return max((child.payload_share for child in self.children()), default=0.0)

    @property
    def fewest_ranks(self) -> int:
        """Ranks that it needs at least."""
        return max((child.fewest_ranks for child in self.children()), default=1)

    @property
    def rank_multiple(self) -> int:
        """The number of ranks must be a multiple of this."""
        return math.lcm(*(child.rank_multiple for child in self.children()))

    @property
    def repeatable(self) -> bool:
        """Whether a run with the same seed is the same run."""
        return all(child.repeatable for child in self.children())

    @property
    def weighs(self) -> bool:
        """Whether each rank says in each step what it counts for."""
        return any(child.weighs for child in self.children())

    @property
    def private(self) -> bool:
        """Whether noise hides what a rank contributes: its steps are accounted for together."""
        return any(child.private for child in self.children())

    def require_ranks(self, world_size: int) -> None:
        """Refuse a number of ranks that this reducer cannot serve.

        Raises:
            CompositionError: fewer ranks than `fewest_ranks`, or a number that is no multiple of `rank_multiple`.
        """
        for child in self.children():
            child.require_ranks(world_size)
        self._require_multiple(world_size)
        if world_size < self.fewest_ranks:
            raise CompositionError(
                f"{self} needs at least {self.fewest_ranks} ranks, and this run has {world_size}: add ranks, tolerate "
                "fewer bad ones (the number after the colon), or take 'median', which any number of ranks will do for"
            )

    def _require_multiple(self, world_size: int) -> None:
        if world_size % self.rank_multiple:
            raise CompositionError(
                f"{self.rank_multiple} ranks a node do not divide the {world_size} ranks of this run: give node= "
                f"(node_size) a number that divides {world_size}, or leave it out"
            )

    @abstractmethod
    def init(self, grain: Grain, step: Step) -> State:
        """Return the state before the first step."""

    @abstractmethod
    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """Return the program that combines `x`, this rank's tensor, with those of all ranks."""

    def reduce_keeping(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        """The same program, which leaves in `x` what this rank did not send: x -= sent.

        Error feedback runs this one. `x` is float32, contiguous and the program's to change; an exchange that encodes
        and subtracts in one pass saves reading and writing the gradient twice more.
        """
        reduced = yield from self.reduce(grain, x, state, step)
        reduced.sent.subtract_from(x.view(grain.shape))
        return reduced

    @property
    def shows_non_finite(self) -> bool:
        """Whether a NaN or an infinity on any rank always makes the mean non-finite on all of them."""
        return self._all(lambda child: child.shows_non_finite)

    def _all(self, trait: Callable[[Reducer], bool]) -> bool:
        """Whether all children say so; where there are none, no."""
        children = self.children()
        return bool(children) and all(map(trait, children))

    def contraction(self, grain: Grain) -> float | None:
        """Return delta in E||sent - x||^2 <= (1 - delta)||x||^2, or None where there is no such bound.

        Of several children it is the weakest one's.
        """
        return weakest(child.contraction(grain) for child in self.children())

    def absolute_error(self, grain: Grain) -> float | None:
        """Return a bound on what is left of each element, as `Codec.absolute_error` has it, or None."""
        return None

    def of_model(self, parameters: Collection[ParameterSpec]) -> Reducer:
        """Return this reducer with what a policy wants to know of all parameters; most want nothing."""
        return _with_reducers(self, lambda reducer: reducer.of_model(parameters))

    def assign(self, parameter: ParameterSpec) -> Reducer:
        """Return the reducer that serves `parameter`."""
        return self

    @property
    def travels_with(self) -> Reducer:
        """What is equal for reducers whose grains are sent in one wave: usually itself."""
        return _with_reducers(self, lambda reducer: reducer.travels_with)

    def unmatched_globs(self, names: Collection[str]) -> list[str]:
        """The globs in its rules that match none of the parameters called `names`: most likely misspelt."""
        return [glob for child in self.children() for glob in child.unmatched_globs(names)]

    def axes(self, world_size: int) -> tuple[SubGroups, ...]:
        """Sub-groups of ranks that the program communicates on, so that they can be made beforehand."""
        found = (axis for child in self.children() for axis in child.axes(world_size))
        return tuple(dict.fromkeys(found))


def with_parts(part: Any, make: Callable[[Any], Any]) -> Any:
    """Return a part of a reducer whose own parts `make` has made anew; the part itself where nothing is new.

    A reducer is made of reducers, and of rules that pair conditions with reducers. What takes its place is called as
    it is.
    """
    if isinstance(part, tuple):
        made = tuple(make(each) for each in part)
        return made if any(a is not b for a, b in zip(made, part, strict=True)) else part
    if not isinstance(part, Reducer) or not is_dataclass(part):
        return part
    changed = {field.name: make(getattr(part, field.name)) for field in fields(part) if field.init}
    same = all(changed[name] is getattr(part, name) for name in changed)
    return part if same else called_as(replace(part, **changed), part)


def _with_reducers(reducer: Reducer, make: Callable[[Reducer], Reducer]) -> Reducer:
    """A reducer in which `make` has made the next reducers inside anew."""

    def made(part: Any) -> Any:
        return make(part) if isinstance(part, Reducer) else with_parts(part, made)

    return with_parts(reducer, made)


def as_reducer(given: object) -> Reducer:
    """Return what was given, if it is a reducer.

    Raises:
        CompositionError: something else, with how to make a reducer of it.

    >>> as_reducer("int4")
    Traceback (most recent call last):
        ...
    gradwire.core.errors.CompositionError: 'int4' is no reducer: parse a spec, put a codec into an exchange (TwoShot)
    """
    if isinstance(given, Reducer):
        return given
    raise CompositionError(f"{given!r} is no reducer: parse a spec, put a codec into an exchange (TwoShot)")


def weakest(bounds: Iterable[float | None]) -> float | None:
    """Return the least of some bounds, or None where one of them is none or there are none at all.

    >>> weakest([0.5, 0.25]), weakest([0.5, None]), weakest([])
    (0.25, None, None)
    """
    known = list(bounds)
    return min((bound for bound in known if bound is not None), default=None) if None not in known else None


def _reducers_among(values: Iterable[object]) -> Iterator[Reducer]:
    """The reducers among some values, in tuples and lists too."""
    for value in values:
        if isinstance(value, Reducer):
            yield value
        elif isinstance(value, tuple | list):
            yield from _reducers_among(cast(Sequence[object], value))


class Wrapper(Reducer):
    """A reducer made of a reducer, which it asks about everything but what it changes."""

    inner: Reducer

    @override
    def owned(self, grain: Grain, step: Step) -> slice:
        return self.inner.owned(grain, step)

    def scattered(self) -> Reducer:
        """The same wrapper around what the inner reducer has for it."""
        return self.around(self.inner.scattered())

    @override
    def init(self, grain: Grain, step: Step) -> State:
        return self.inner.init(grain, step)

    @override
    def absolute_error(self, grain: Grain) -> float | None:
        return self.inner.absolute_error(grain)

    def assign(self, parameter: ParameterSpec) -> Reducer:
        """The same wrapper around the reducer that the inner one assigns, and called as that one is."""
        inner = self.inner.assign(parameter)
        return self if inner is self.inner else called_as(self.around(inner), inner)

    @abstractmethod
    def around(self, inner: Reducer) -> Reducer:
        """Return this wrapper with another inner reducer."""
