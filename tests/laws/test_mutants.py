"""The laws notice: codecs and reducers broken on purpose, and the law that each of them fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

from gradwire.codecs import QSGD, BlockInt, Codec, Identity, RandomK, Sign, TopK
from gradwire.core.errors import PayloadError
from gradwire.core.grain import Grain, flat_grain
from gradwire.core.key import Key
from gradwire.core.payload import Field, Layout, Payload
from gradwire.core.registry import Method
from gradwire.core.state import Leaf, State, replace_leaves
from gradwire.drivers.lockstep import Lockstep
from gradwire.reducers import (
    EF21,
    AllGatherExchange,
    AllReduceExchange,
    CompressionWarmUp,
    ErrorFeedback,
    LeanErrorFeedback,
    MomentumCorrection,
    Program,
    Reducer,
    Step,
    TwoShot,
    WorkerMomentum,
    Wrapper,
)
from gradwire.reducers.aggregate import Adasum, Gathered, GeometricMedian, Krum, Median, Sharded, TrimmedMean

from . import checks
from .subjects import codecs, reducers, sample
from .test_allocation import allocations
from .test_memory import Pair, check_delivers, pairs

X = sample("normal", (257,), seed=4)
KEY = Key(seed=1, rank=1)


@dataclass(frozen=True)
class WrongSign(BlockInt):
    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        super().decode_into(payload, out, key)
        out.neg_()


@dataclass(frozen=True)
class WrongScale(QSGD):
    def decode_into(self, payload: Payload, out: Tensor, key: Key) -> None:
        super().decode_into(payload, out, key)
        out.mul_(1.05)


@dataclass(frozen=True)
class SwappedOrder(TopK):
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        super().encode_into(x, key, out)
        out[0].copy_(out[0].flip(0))


@dataclass(frozen=True)
class RoundsDown(BlockInt):
    """Stochastic in name: the same bits for every key."""

    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        super().encode_into(x, Key(seed=5), out)


@dataclass(frozen=True)
class ScaledForFeedback(RandomK):
    scaled: bool = True

    def contraction(self, numel: int) -> float | None:
        return self.density


@dataclass(frozen=True)
class SignsThatAdd(Sign):
    additive: ClassVar[bool] = True


@dataclass(frozen=True)
class OwnsItsInput(BlockInt):
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        super().encode_into(x, key, out)
        x.zero_()


@dataclass(frozen=True)
class SaysLess(TopK):
    """Declares fewer bytes than it sends."""

    def payload_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        return super().payload_bytes(numel, dtype) - 8


@dataclass(frozen=True)
class WideIndices(TopK):
    """int64 indices under a layout that says int32."""

    indices: Literal["int32"] = "int32"

    def encode(self, x: Tensor, key: Key | None = None) -> Payload:
        values, indices = super().encode(x, key)
        return values, indices.long()


@dataclass(frozen=True)
class SecretGenerator(BlockInt):
    def encode_into(self, x: Tensor, key: Key, out: Payload) -> None:
        super().encode_into(x + 0.01 * torch.randn(x.shape), key, out)


@dataclass(frozen=True)
class TrustsIndices(TopK):
    indices: Literal["int32"] = "int32"

    def accumulate32(self, payload: Payload, into: Tensor, key: Key, alpha: float) -> None:
        indices = payload[1].long().remainder(into.numel())
        into.index_add_(0, indices, payload[0].to(into.dtype), alpha=alpha)

    def decode32(self, payload: Payload, out: Tensor, key: Key) -> None:
        self.accumulate32(payload, out.zero_(), key, 1.0)


@dataclass(frozen=True)
class TakesAnyLength(Sign):
    def decode(self, payload: Payload, like: Tensor, key: Key | None = None) -> Tensor:
        try:
            return super().decode(payload, like, key)
        except PayloadError:
            return torch.zeros_like(like)


@dataclass(frozen=True)
class ForgetsAnOption(BlockInt):
    def config(self) -> dict[str, object]:
        return {"bits": self.bits}


@dataclass(frozen=True)
class HidesBytes(BlockInt):
    """Half of what it needs travels in a buffer of its own."""

    def encode(self, x: Tensor, key: Key | None = None) -> Payload:
        scales, packed = super().encode(x, key)
        return scales.clone(), packed


@dataclass(frozen=True)
class KeepsTooMuch(BlockInt):
    """Forgets to subtract what it sends."""

    def encode_keeping_into(self, x: Tensor, key: Key, out: Payload) -> None:
        self.encode_into(x, key, out)


@dataclass(frozen=True)
class HidesNaN(RandomK):
    """Claims that nobody need look for a NaN, and leaves out most of them."""

    @property
    def shows_non_finite(self) -> bool:
        return True


BROKEN: list[tuple[Codec, Callable[[Codec], None]]] = [
    (WrongSign(8), lambda c: checks.check_contraction(c, X)),
    (WrongSign(8), lambda c: checks.check_accumulate(c, X, KEY)),
    (WrongScale(15), lambda c: checks.check_unbiased(c, X)),
    (SwappedOrder(0.3), lambda c: checks.check_contraction(c, X)),
    (RoundsDown(4, stochastic=True), lambda c: checks.check_unbiased(c, X)),
    (ScaledForFeedback(0.2), lambda c: checks.check_contraction(c, X[:61])),
    (SignsThatAdd(64), lambda c: checks.check_additive(c, [X, -2 * X.flip(0)], KEY)),
    (OwnsItsInput(4), lambda c: checks.check_preserved(c, X.clone(), KEY)),
    (SaysLess(0.1), lambda c: checks.check_payload_bytes(c, X, KEY)),
    (WideIndices(0.1), lambda c: checks.check_payload_bytes(c, X, KEY)),
    (HidesBytes(4), lambda c: checks.check_payload_bytes(c, X, KEY)),
    (SecretGenerator(8), lambda c: checks.check_keys(c, X)),
    (TrustsIndices(0.1), lambda c: checks.check_indices(c, X, KEY)),
    (TakesAnyLength(64), lambda c: checks.check_cut(c, X, KEY)),
    (ForgetsAnOption(4, 64), checks.check_config),
    (KeepsTooMuch(4), lambda c: checks.check_keeping(c, X, KEY)),
    (HidesNaN(0.1), lambda c: checks.check_shows_non_finite(c, X, KEY)),
]


@pytest.mark.parametrize(("codec", "law"), BROKEN, ids=lambda value: getattr(value, "__name__", repr(value)))
def test_a_broken_codec_fails_its_law(codec: Codec, law: Callable[[Codec], None]) -> None:
    sound = type(codec).__mro__[1]
    if not isinstance(codec, ScaledForFeedback | SignsThatAdd | HidesNaN):  # whose parents never claimed the law
        law(sound(**{name: getattr(codec, name) for name in (f.name for f in fields(sound))}))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        law(codec)


@dataclass(frozen=True)
class Mutant(Wrapper):
    """A reducer that is the inner one but for one thing."""

    inner: Reducer

    def around(self, inner: Reducer) -> Reducer:
        return type(self)(inner)


@dataclass(frozen=True)
class Forgets(Mutant):
    """Drops everything it owes."""

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        reduced = yield from self.inner.reduce(grain, x, state, step)
        return reduced._replace(state=self.inner.init(grain, step))


@dataclass(frozen=True)
class ForgetsTheOwner(Mutant):
    """Drops the residual of the second shot, so the mean is biased for good."""

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        reduced = yield from self.inner.reduce(grain, x, state, step)

        def forget(path: str, leaf: Leaf) -> Leaf:
            return leaf if leaf.kind != "owned" else Leaf(torch.zeros_like(leaf.tensor), "owned", owed=True)

        return reduced._replace(state=replace_leaves(reduced.state, forget))


@dataclass(frozen=True)
class Disagrees(Mutant):
    """The mean is off by a last place on rank 1."""

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        reduced = yield from self.inner.reduce(grain, x, state, step)
        return reduced._replace(value=reduced.value * (1 + step.rank * 2.0**-23))


@dataclass(frozen=True)
class Overwrites(Mutant):
    """Uses its input as scratch without saying so."""

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        reduced = yield from self.inner.reduce(grain, x, state, step)
        x.zero_()
        return reduced


@dataclass(frozen=True)
class Copies(Mutant):
    """Allocates a second tensor of the gradient's size."""

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        return (yield from self.inner.reduce(grain, x + 0, state, step))


GRAIN = flat_grain(600)
XS = [sample("normal", (600,), seed=seed) for seed in range(3)]
TOP, INT = ErrorFeedback(AllGatherExchange(TopK(0.1))), ErrorFeedback(TwoShot(BlockInt(4)))


@pytest.mark.parametrize("reducer", [Forgets(TOP), Forgets(INT), ForgetsTheOwner(INT)], ids=repr)
def test_a_reducer_that_loses_something_fails(reducer: Mutant) -> None:
    checks.check_conservation(Lockstep(checks.Spied(reducer.inner), GRAIN, 3), XS)
    with pytest.raises(AssertionError, match="lost"):
        checks.check_conservation(Lockstep(checks.Spied(reducer), GRAIN, 3), XS)


def test_ranks_that_disagree_fail() -> None:
    checks.check_means(Lockstep(TOP, GRAIN, 3).reduce(XS), XS)
    with pytest.raises(AssertionError, match="disagree"):
        checks.check_means(Lockstep(Disagrees(TOP), GRAIN, 3).reduce(XS), XS)


def test_a_reducer_that_overwrites_its_input_fails() -> None:
    checks.check_leaves_input(AllGatherExchange(TopK(0.1)), GRAIN, XS)
    with pytest.raises(AssertionError, match="changed its input"):
        checks.check_leaves_input(Overwrites(AllGatherExchange(TopK(0.1))), GRAIN, [x.clone() for x in XS])


def test_error_feedback_without_a_guard_fails() -> None:
    """The residual keeps the NaN for ever."""
    bad = [XS[0], XS[1].index_fill(0, torch.tensor([5]), float("nan")), XS[2]]
    with pytest.raises(AssertionError):
        checks.check_non_finite(Lockstep(TOP, GRAIN, 3), XS, bad, all_nan=False)


def test_a_reducer_that_copies_fails() -> None:
    assert len(allocations(TOP)) == 1
    assert len(allocations(Copies(TOP))) == 2


# Memory: rules that claim to be linear, and wrappers that count wrongly


@dataclass(frozen=True)
class LinearMedian(Median):
    linear = True  # type: ignore[assignment]


@dataclass(frozen=True)
class LinearKrum(Krum):
    linear = True  # type: ignore[assignment]


@dataclass(frozen=True)
class LinearTrimmedMean(TrimmedMean):
    linear = True  # type: ignore[assignment]


@dataclass(frozen=True)
class LinearGeometricMedian(GeometricMedian):
    linear = True  # type: ignore[assignment]


@dataclass(frozen=True)
class LinearAdasum(Adasum):
    linear = True  # type: ignore[assignment]


@dataclass(frozen=True)
class BlindWarmUp(CompressionWarmUp):
    """Does not ask its parts whether they are linear."""

    linear = True  # type: ignore[assignment]


@dataclass(frozen=True)
class CountsAllAsSent(ErrorFeedback):
    """Owes nothing, whatever was lost."""

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        reduced = yield from super().reduce(grain, x, state, step)
        return reduced._replace(state=self.init(grain, step))


@dataclass(frozen=True)
class CountsNothingAsSent(ErrorFeedback):
    """Owes what was sent, too."""

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        y = x + state.tensor("residual").view(x.shape)
        reduced = yield from self.inner.reduce(grain, y, state.part("inner"), step)
        residual = Leaf(y.view(-1), "element", owed=True)
        return reduced._replace(state=State(residual=residual, inner=reduced.state))


@dataclass(frozen=True)
class FadesUnsaid(ErrorFeedback):
    """Loses a twentieth of what it owes in each step."""

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        x.add_(state.tensor("residual").view(x.shape), alpha=-0.05)
        return (yield from super().reduce(grain, x, state, step))


@dataclass(frozen=True)
class ForgetsTheMean(EF21):
    """Returns the mean of differences and not what they add up to."""

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        state.tensor("mean").zero_()
        return (yield from super().reduce(grain, x, state, step))


@dataclass(frozen=True)
class AveragesTooLittle(WorkerMomentum):
    """Hands on momentum that is not brought back to the size of a gradient."""

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        return (yield from super().reduce(grain, x.mul_(1 / (1 - self.momentum)), state, step))


SPARSE, QUANTISED = TopK(0.05), BlockInt(4)
PLAIN = AllReduceExchange(Identity())
MISREMEMBERING = [
    Pair(EF21(Sharded(LinearMedian())), Sharded(Median())),
    Pair(EF21(Sharded(LinearKrum(1))), Sharded(Krum(1))),
    Pair(EF21(LinearAdasum()), Adasum()),
    Pair(ErrorFeedback(Gathered(LinearMedian(), SPARSE)), Sharded(Median())),
    Pair(ErrorFeedback(Gathered(LinearMedian(), QUANTISED)), Sharded(Median())),
    Pair(ErrorFeedback(Gathered(LinearTrimmedMean(1), SPARSE)), Sharded(TrimmedMean(1))),
    Pair(ErrorFeedback(Gathered(LinearKrum(1), SPARSE)), Sharded(Krum(1))),
    Pair(LeanErrorFeedback(Gathered(LinearKrum(1), SPARSE)), Sharded(Krum(1))),
    Pair(EF21(Gathered(LinearGeometricMedian(), SPARSE)), Sharded(GeometricMedian())),
    Pair(EF21(Sharded(LinearMedian())), Sharded(Median())),
    Pair(ErrorFeedback(BlindWarmUp(PLAIN, Gathered(Median(), SPARSE), 0)), Sharded(Median())),
    Pair(MomentumCorrection(Gathered(LinearMedian(), SPARSE), 0.0), Sharded(Median())),
    Pair(CountsAllAsSent(AllGatherExchange(SPARSE)), PLAIN),
    Pair(CountsAllAsSent(TwoShot(QUANTISED)), PLAIN),
    Pair(CountsNothingAsSent(AllGatherExchange(SPARSE)), PLAIN),
    Pair(FadesUnsaid(AllGatherExchange(SPARSE)), PLAIN),
    Pair(ForgetsTheMean(AllGatherExchange(SPARSE)), PLAIN),
    Pair(AveragesTooLittle(PLAIN), PLAIN),
    Pair(ErrorFeedback(AllGatherExchange(QUANTISED), decay=0.5), PLAIN),
]


@pytest.mark.parametrize("pair", MISREMEMBERING, ids=lambda pair: repr(pair.reducer))
@pytest.mark.draw(3)
def test_memory_that_delivers_something_else_fails(pair: Pair) -> None:
    with pytest.raises(AssertionError, match=r"short by .* (declared|it grows)"):
        check_delivers(pair)


def test_the_next_rule_that_is_not_linear_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry line is all it takes: the pair is built, and the law fails for it."""
    method = Method("middle", LinearMedian, "broken", "own", examples=("middle",))
    monkeypatch.setitem(vars(__import__("gradwire.core.registry", fromlist=["_methods"]))["_methods"], "middle", method)
    found = pairs.__wrapped__()
    for spec in ("middle+int4", "middle+int4,ef=ef21", "middle+topk:0.01"):
        with pytest.raises(AssertionError, match="short by"):
            check_delivers(found[spec])


def test_whatever_is_registered_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry line is all it takes: the laws find the new codec."""
    method = Method("wrong", WrongSign, "broken", "twoshot", True, "bits", examples=("wrong:8",))
    monkeypatch.setitem(vars(__import__("gradwire.core.registry", fromlist=["_methods"]))["_methods"], "wrong", method)
    assert "wrong:8" in reducers()
    assert WrongSign(8) in codecs()


def test_a_layout_that_lies_is_refused() -> None:
    layout = Layout((Field(torch.float32, 2), Field(torch.int32, 2)))
    with pytest.raises(PayloadError, match="expected"):
        layout.views(torch.zeros(layout.nbytes, dtype=torch.int8))
