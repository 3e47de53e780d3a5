"""The laws, as functions that raise AssertionError where one is broken.

Tolerances are derived, never tuned: `u` is the unit roundoff of a dtype, the most that one operation rounded to
nearest can be off, relative to its result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from gradwire import codecs as codec_classes
from gradwire.codecs import Codec
from gradwire.core.collective import AllReduce, Collective
from gradwire.core.errors import PayloadError
from gradwire.core.grain import Grain
from gradwire.core.key import Key
from gradwire.core.state import State, flatten, walk
from gradwire.drivers.lockstep import Lockstep, run_lockstep
from gradwire.reducers import Program, Reduced, Reducer, Step, Wrapper

from .pools import nothing_is_used_again
from .subjects import bits, codecs_of

Z = 5.5
"""Standard deviations allowed where chance is at work: exceeded once in 3e7 normal draws."""


def unit_roundoff(*dtypes: torch.dtype) -> float:
    """The coarsest unit roundoff among `dtypes` and float32, in which kernels compute."""
    return max(torch.finfo(dtype).eps / 2 for dtype in (torch.float32, *dtypes))


def norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.double()))


def repeated(lockstep: Lockstep, xs: list[Tensor], steps: int) -> Tensor:
    """The mean of the last of some equal steps."""
    return [lockstep.step(xs)[0] for _ in range(steps)][-1]


def decoded(codec: Codec, x: Tensor, key: Key | None = None) -> Tensor:
    return codec.decode(codec.encode(x, key), like=x, key=key)


# 1 and 2: shape and size ----------------------------------------------------------------------------------------


def check_preserved(codec: Codec, x: Tensor, key: Key) -> None:
    """Shape, dtype and device come back; encoding leaves its input as it was."""
    before = bits(x).clone()
    y = decoded(codec, x, key)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert torch.equal(bits(x), before), "encode changed its input"
    if codec.lossless:
        assert torch.equal(y, x)


def check_payload_bytes(codec: Codec, x: Tensor, key: Key) -> None:
    """The fields are views of one buffer of `payload_bytes`, in the order, types and sizes of the layout."""
    with nothing_is_used_again():  # buffers that are have sizes of their own
        payload = codec.encode(x, key)
    layout = codec.layout(x.numel(), x.dtype)
    assert [(f.dtype, f.numel()) for f in payload] == [(f.dtype, f.numel) for f in layout.fields]
    assert {f.untyped_storage().data_ptr() for f in payload} == {payload[0].untyped_storage().data_ptr()}
    assert payload[0].untyped_storage().nbytes() == codec.payload_bytes(x.numel(), x.dtype)
    assert sum(f.nbytes for f in payload) + 8 * len(payload) > codec.payload_bytes(x.numel(), x.dtype)


def check_accumulate(codec: Codec, x: Tensor, key: Key) -> None:
    """accumulate(into, alpha) = into + alpha * decode, to the rounding of a product and a sum."""
    payload = codec.encode(x, key)
    into = torch.linspace(-1, 1, x.numel(), dtype=x.dtype)
    y = codec.decode(payload, like=into, key=key).double()
    want = into.double() - 0.5 * y
    codec.accumulate(payload, into, key, alpha=-0.5)
    slack = 4 * unit_roundoff(x.dtype) * (1 + y.abs()) + torch.finfo(x.dtype).tiny
    assert bool(((into.double() - want).abs() <= slack).all())


def check_keeping(codec: Codec, x: Tensor, key: Key) -> None:
    """encode_keeping_into writes the same payload as encode_into, and leaves exactly x - decode of it."""
    x = x.reshape(-1).to(torch.promote_types(x.dtype, torch.float32)).clone()
    layout = codec.layout(x.numel(), x.dtype)
    want_wire, wire = layout.empty(x.device), layout.empty(x.device)
    codec.encode_into(x, key, layout.views(want_wire))
    left = x.clone()
    codec.encode_keeping_into(left, key, layout.views(wire))
    assert torch.equal(wire, want_wire), "another payload than encode_into's"
    codec.accumulate(layout.views(want_wire), x, key, alpha=-1.0)
    assert torch.equal(left, x), "what is left is not x - decode"


def check_shows_non_finite(codec: Codec, x: Tensor, key: Key) -> None:
    """A NaN or an infinity anywhere in the tensor makes what is decoded non-finite somewhere."""
    for bad, place in itertools.product((float("nan"), float("inf"), float("-inf")), (0, x.numel() // 2, -1)):
        spoiled = x.clone()
        spoiled.view(-1)[place] = bad
        assert not bool(torch.isfinite(decoded(codec, spoiled, key)).all()), f"{bad} at {place} vanished"


# 3 to 5: algebra and statistics ---------------------------------------------------------------------------------


def check_additive(codec: Codec, xs: Sequence[Tensor], key: Key) -> None:
    """decode(sum of payloads) = sum of decodings = decode(encode(sum)), each rank with its own key."""
    assert len(codec.layout(xs[0].numel(), xs[0].dtype).fields) == 1, "only one tensor can ride an all-reduce"
    keys = [key.with_(rank=rank) for rank in range(len(xs))]
    payloads = [codec.encode(x, k)[0] for x, k in zip(xs, keys, strict=True)]
    total = payloads[0].clone()
    for payload in payloads[1:]:
        total = total + payload
    together = codec.decode((total,), like=xs[0], key=keys[0]).double()
    each = sum(decoded(codec, x, k).double() for x, k in zip(xs, keys, strict=True))
    of_sum = decoded(codec, sum(xs[1:], start=xs[0]), keys[-1]).double()
    # n - 1 sums on the wire, n encodings and decodings, in the coarsest of the precisions at work.
    sizes = sum(decoded(codec, x.abs(), k).double() for x, k in zip(xs, keys, strict=True))
    u = unit_roundoff(xs[0].dtype, payloads[0].dtype)
    if codec.mixes:  # what is rounded in one element is of the size of any other
        sizes = norm(torch.stack(list(xs)))
    slack = (3 * len(xs) + 2) * u * sizes + len(xs) * torch.finfo(payloads[0].dtype).tiny
    assert bool(((together - each).abs() <= slack).all())
    assert bool(((together - of_sum).abs() <= slack).all())


def check_unbiased(codec: Codec, x: Tensor, draws: int = 400) -> None:
    """The mean over keys of C(x) - x, seen from several directions, is within `Z` standard errors of zero."""
    errors = torch.stack([decoded(codec, x, Key(seed=s)).double() - x.double() for s in range(draws)])
    errors = errors.view(draws, -1)
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(6, x.numel(), generator=generator, dtype=torch.float64)
    directions = torch.cat([x.double().view(1, -1), torch.ones(1, x.numel(), dtype=torch.float64), random])
    seen = errors @ directions.T
    # Decoding rounds each value a few times in float32 and once to the dtype of x.
    sizes = x.double().abs().view(-1) + errors.abs().mean(0)
    rounding = 4 * unit_roundoff(x.dtype) * (directions.abs() @ sizes)
    bound = Z * seen.std(0) / draws**0.5 + rounding
    assert bool((seen.mean(0).abs() <= bound).all()), f"bias {seen.mean(0)} beyond {bound}"


def check_contraction(codec: Codec, x: Tensor, draws: int = 600) -> None:
    """||C(x) - x||^2 <= (1 - delta) ||x||^2: for this input, or in the mean over keys where the codec is keyed."""
    delta = codec.contraction(x.numel())
    assert delta is not None
    assert 0 < delta <= 1
    # Rounding: to float32 on the way in, a few products, and once to the dtype of x on the way out.
    u = unit_roundoff(x.dtype)
    if not codec.keyed:
        y = decoded(codec, x)
        error = norm(y.double() - x.double())
        slack = 4 * u * (norm(x) + norm(y)) + x.numel() ** 0.5 * torch.finfo(x.dtype).tiny
        assert error <= (1 - delta) ** 0.5 * norm(x) + slack, f"{error} of {norm(x)}, delta {delta}"
        return
    if norm(x) == 0:
        assert norm(decoded(codec, x)) == 0
        return
    ratios = [(norm(decoded(codec, x, Key(seed=s)).double() - x.double()) / norm(x)) ** 2 for s in range(draws)]
    # Bernstein's inequality, one-sided: a ratio lies in [0, 1], so its variance is at most delta (1 - delta).
    chance = Z * (delta * (1 - delta) / draws) ** 0.5 + Z**2 / (3 * draws)
    assert sum(ratios) / draws <= 1 - delta + chance + 8 * u


# 8: randomness --------------------------------------------------------------------------------------------------


def check_keys(codec: Codec, x: Tensor) -> None:
    """Equal keys give equal payloads; a codec that is not keyed gives the same for any key."""
    first, again = (codec.encode(x, Key(seed=1, rank=3)) for _ in range(2))
    other = codec.encode(x, Key(seed=2, rank=3))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, again, strict=True))
    if not codec.keyed:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, other, strict=True))


# 9 and 10: configuration and damage -----------------------------------------------------------------------------


def check_config(codec: Codec) -> None:
    """Configuration and repr both build an equal codec, which is hashable, as plans need."""
    assert type(codec)(**codec.config()) == codec
    assert eval(repr(codec), dict(vars(codec_classes))) == codec
    assert hash(type(codec)(**codec.config())) == hash(codec)


def wire_of(codec: Codec, x: Tensor, key: Key) -> Tensor:
    """The bytes that travel."""
    layout = codec.layout(x.numel(), x.dtype)
    wire = layout.empty(x.device)
    codec.encode_into(x.reshape(-1), key, layout.views(wire))
    return wire


def check_cut(codec: Codec, x: Tensor, key: Key) -> None:
    """A payload that is too short or long, as a buffer or field by field, is refused."""
    layout, wire = codec.layout(x.numel(), x.dtype), wire_of(codec, x, key)
    for damaged in (wire[:-1], wire[:-8], wire[:0], torch.cat([wire, wire[:8]])):
        with pytest.raises(PayloadError):
            layout.views(damaged)
    payload = layout.views(wire)
    cut = tuple(f[:-1] for f in payload)
    wrong_type = tuple(f.view(torch.int8) for f in payload)
    for fields in (cut, payload[:-1], (*payload, payload[0]), wrong_type):
        with pytest.raises(PayloadError):
            codec.decode(fields, like=x, key=key)


def check_indices(codec: Codec, x: Tensor, key: Key) -> None:
    """An index that points outside is refused, wherever it stands."""
    for which, bad in itertools.product((0, -1), (-1, x.numel(), 2**31 - 1, -(2**31))):
        payload = codec.encode(x, key)
        for place in (f for f in payload if f.dtype == torch.int32):
            place[which] = bad
            with pytest.raises(PayloadError):
                codec.decode(payload, like=x, key=key)


def check_rubbish(codec: Codec, x: Tensor, key: Key, rubbish: Tensor) -> None:
    """A payload with `rubbish` over part of it is refused or decodes to something, and writes nothing else."""
    layout, wire = codec.layout(x.numel(), x.dtype), wire_of(codec, x, key)
    wire[: rubbish.numel()] = rubbish[: wire.numel()]
    margin, canary = 64, 12345.0
    around = torch.full((x.numel() + 2 * margin,), canary, dtype=x.dtype)
    out = around[margin : margin + x.numel()]
    for write in (codec.decode_into, codec.accumulate):
        try:
            write(layout.views(wire), out, key)
        except PayloadError:
            continue
    assert bool((around[:margin] == canary).all())
    assert bool((around[margin + x.numel() :] == canary).all())


# Reducers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Spied(Wrapper):
    """A reducer that is the inner one, and keeps every collective that is asked for, of all ranks."""

    inner: Reducer
    asked: dict[int, list[Collective]] = field(default_factory=dict[int, list[Collective]])

    @property
    def seen(self) -> list[Collective]:
        """What all ranks asked for, rank by rank."""
        return [request for of_rank in self.asked.values() for request in of_rank]

    def around(self, inner: Reducer) -> Reducer:
        return Spied(inner, self.asked)

    def reduce(self, grain: Grain, x: Tensor, state: State, step: Step) -> Program:
        program = self.inner.reduce(grain, x, state, step)
        answer: Tensor | None = None
        while True:
            try:
                request = self.turn(program, answer, step)
            except StopIteration as stop:
                return stop.value
            self.asked.setdefault(step.rank, []).append(request)
            answer = yield request

    def turn(self, program: Program, answer: Tensor | None, step: Step) -> Collective:
        """Let the inner program run to its next collective."""
        return next(program) if answer is None else program.send(answer)


def check_means(results: Sequence[Reduced], xs: Sequence[Tensor]) -> None:
    """Every rank has the same mean bit for bit, in the shape and dtype of its tensor."""
    for result, x in zip(results, xs, strict=True):
        assert (result.value.shape, result.value.dtype) == (x.shape, x.dtype)
        assert torch.equal(bits(result.value), bits(results[0].value)), "ranks disagree on the mean"


def check_leaves_input(reducer: Reducer, grain: Grain, xs: Sequence[Tensor]) -> None:
    """A reducer that does not declare `keeps_input` leaves its input alone, also once it has finished."""
    assert not reducer.keeps_input
    ranks = [Step(0, rank, len(xs)) for rank in range(len(xs))]
    before = [bits(x).clone() for x in xs]
    states = [reducer.init(grain, step) for step in ranks]
    programs = [reducer.reduce(grain, x, s, r) for x, s, r in zip(xs, states, ranks, strict=True)]
    run_lockstep(programs)
    assert all(torch.equal(bits(x), b) for x, b in zip(xs, before, strict=True)), "reduce changed its input"


@dataclass(frozen=True)
class Owed:
    """What the ranks owe: residuals e of each rank, and the owners' s in units of the mean; float64, flat."""

    e: list[Tensor]
    s: Tensor


def owed(states: Sequence[State], grain: Grain) -> Owed:
    """Read what is owed from the states of all ranks."""
    e = [torch.zeros(grain.numel, dtype=torch.float64) for _ in states]
    s = torch.zeros(grain.numel, dtype=torch.float64)
    for rank, state in enumerate(states):
        for _, leaf in walk(state):
            if leaf.owed and leaf.kind == "element":
                e[rank] += leaf.tensor.double().view(-1)
            elif leaf.owed and leaf.kind == "owned":
                here = s[leaf.first(rank) : leaf.first(rank) + leaf.tensor.numel()]
                here += leaf.tensor.double()[: here.numel()]
                assert not bool(leaf.tensor[here.numel() :].any()), "something is owed behind the grain's end"
    return Owed(e, s)


def check_conservation(ranks: Lockstep, xs: Sequence[Tensor]) -> list[Reduced]:
    """Do a step, in which nothing may be lost: sum(x + e) + n s = n mean + sum e' + n s'.

    Without error feedback a rank's own loss is forgotten by choice, and what it `sent` takes the place of x + e.
    """
    assert isinstance(ranks.reducer, Spied)
    assert ranks.reducer.conserves_sum
    n, grain = len(xs), ranks.grain
    before = owed(ranks.states, grain)
    results = ranks.reduce(xs)
    after = owed(ranks.states, grain)
    ys = [x.double().view(-1) + e for x, e in zip(xs, before.e, strict=True)]
    sent = [_sent(result, y, grain) for result, y in zip(results, ys, strict=True)]
    given = ys if ranks.reducer.keeps_input else sent
    mean = results[0].value.double().view(-1)
    lost = sum(given) + n * (before.s - after.s) - n * mean - sum(after.e)
    # Every quantity below is rounded at most once per rank and a few times more, in the coarsest precision at work.
    sizes = sum(t.abs() for t in (*ys, *sent, *before.e, *after.e)) + n * (mean.abs() + before.s.abs() + after.s.abs())
    mixes = any(codec.mixes for codec in codecs_of(ranks.reducer))
    if sizes.numel() and (mixes or grain.shape != (grain.numel,)):  # products and transforms add up terms of any size
        sizes = sizes.max().expand_as(sizes)
    summed = [r.tensor.dtype for r in ranks.reducer.seen if isinstance(r, AllReduce) and r.op == "sum"]
    u = unit_roundoff(grain.dtype, *summed)
    tiny = max(torch.finfo(dtype).tiny for dtype in (grain.dtype, *summed))
    assert bool((lost.abs() <= 2 * (n + 4) * u * sizes + n * tiny).all()), f"lost {lost.abs().max()}"
    return results


def _sent(result: Reduced, y: Tensor, grain: Grain) -> Tensor:
    left = y.float().view(grain.shape).clone()
    result.sent.subtract_from(left)
    return (y.float() - left.view(-1)).double()


def same_state(a: Sequence[State], b: Iterable[dict[str, Tensor]]) -> bool:
    """Whether the tensors of `a` are bit for bit the snapshots `b`."""
    return all(
        flatten(state).keys() == snapshot.keys()
        and all(torch.equal(bits(tensor), bits(snapshot[path])) for path, tensor in flatten(state).items())
        for state, snapshot in zip(a, b, strict=True)
    )


def snapshot(states: Sequence[State]) -> list[dict[str, Tensor]]:
    """Copies of all tensors of all ranks."""
    return [{path: tensor.clone() for path, tensor in flatten(state).items()} for state in states]


def check_left_out(ranks: Lockstep, clean: Sequence[Tensor], bad: Sequence[Tensor]) -> None:
    """A rule leaves out what is not finite: the result and the state stay finite, alike on every rank."""
    ranks.step(clean)
    results = ranks.reduce(bad)
    check_means(results, bad)
    for tensors in (*([result.value] for result in results), *(flatten(state).values() for state in ranks.states)):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors), "a bad gradient came through"


def check_non_finite(ranks: Lockstep, clean: Sequence[Tensor], bad: Sequence[Tensor], all_nan: bool) -> None:
    """A bad value on one rank reaches every rank's mean and no state; the next clean step is finite."""
    ranks.step(clean)
    before = snapshot(ranks.states)
    for mean in ranks.step(bad):
        assert not bool(torch.isfinite(mean).all()), "the optimizer would not see it"
        assert bool(mean.isnan().all()) or not all_nan
    assert same_state(ranks.states, before), "a state was kept"
    for mean in ranks.step(clean):
        assert bool(torch.isfinite(mean).all())
