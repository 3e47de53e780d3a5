"""What the laws are tried on: everything registered, awkward shapes, and inputs chosen to hurt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

import gradwire
from gradwire.codecs import Codec
from gradwire.core.grain import Grain, ParameterSpec, flat_grain, matrix_grain
from gradwire.reducers import Guard, Reducer

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SHAPES = ((0,), (), (1,), (7,), (3, 5), (257,), (513,), (33, 65))
HUGE = 200_003


def specs() -> list[str]:
    """Every example of every registered method."""
    return [spec for method in gradwire.methods().values() for spec in method.examples]


def reducers() -> dict[str, Reducer]:
    """The reducer of every example."""
    return {spec: gradwire.parse(spec) for spec in specs()}


def parts(thing: object) -> Iterator[object]:
    """Yield a reducer or codec and all it is made of."""
    yield thing
    if dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            value = getattr(thing, field.name)
            if isinstance(value, Codec | Reducer):
                yield from parts(value)


def codecs_of(thing: object) -> list[Codec]:
    """The codecs in a reducer."""
    return [part for part in parts(thing) if isinstance(part, Codec)]


def codecs() -> list[Codec]:
    """Every different codec that an example uses, alone or in a chain, and no other."""
    found = (codec for reducer in reducers().values() for codec in codecs_of(reducer))
    return list(dict.fromkeys(found))


def guarded(reducer: Reducer) -> bool:
    """Whether a guard watches over the reducer."""
    return any(isinstance(part, Guard) for part in parts(reducer))


def spec_of(grain: Grain) -> ParameterSpec:
    """A parameter that fills the grain."""
    shape = grain.shape[1:] if len(grain.shape) == 3 else grain.shape
    return ParameterSpec(grain.name, shape, grain.dtype, grain.device)


def grain_for(reducer: Reducer, numel: int, dtype: torch.dtype = torch.float32) -> Grain:
    """A grain of the scope that the reducer asks for, of about `numel` elements: exactly as many where it is flat."""
    if reducer.scope == "flat":
        return flat_grain(numel, dtype=dtype)
    batch = 2 if numel >= 200 else 1
    rows = max(1, math.isqrt(numel // batch))
    return matrix_grain(rows, max(1, numel // batch // rows), batch=batch, dtype=dtype)


def ranks_for(reducer: Reducer, ranks: int) -> int:
    """`ranks`, or as many as the reducer needs: whole nodes."""
    whole = reducer.rank_multiple
    return -(-max(ranks, reducer.fewest_ranks) // whole) * whole


def normal(shape: Sequence[int], seed: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def low_rank(rows: int, columns: int, rank: int, seed: int, batch: int = 1) -> Tensor:
    """Matrices of exactly that rank."""
    return normal((batch, rows, rank), seed) @ normal((batch, rank, columns), seed + 1)


def _heavy(x: Tensor) -> Tensor:
    """Four orders of magnitude, scaled so that sums over two steps and a whole matrix fit half precision."""
    return x.sign() * (3 * x.abs()).exp().clamp(max=1e4) / 128


def _one_entry(x: Tensor, value: float) -> Tensor:
    spike = torch.zeros_like(x).view(-1)
    spike[spike.numel() // 2 : spike.numel() // 2 + 1] = value
    return spike.view(x.shape)


def _adversarial(x: Tensor) -> Tensor:
    """One entry of 1, the rest half a level of 4 bits: the most that rounding to nearest can lose."""
    return torch.full_like(x, 0.5 / 7 * 0.999) + _one_entry(x, 1.0)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "heavy": _heavy,
    "constant": lambda x: torch.full_like(x, -0.7),
    "zeros": torch.zeros_like,
    "sparse": lambda x: torch.where(x.abs() > 1.9, x, torch.zeros_like(x)),
    "spike": lambda x: _one_entry(x, -3.0),
    "adversarial": _adversarial,
    "ties": lambda x: (2 * x).round(),
    "small": lambda x: x * 2.0**-13,
}


def sample(kind: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a tensor of a kind; every value is a normal number of `dtype`, or zero."""
    return flush(KINDS[kind](normal(shape, seed)).to(dtype))


def flush(x: Tensor) -> Tensor:
    """`x` with subnormal numbers replaced by zero."""
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, torch.zeros_like(x), x)


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, to compare what `==` would not: NaN, and the sign of zero."""
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1)).view(torch.uint8)


shapes = st.sampled_from(SHAPES)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)
kinds = st.sampled_from(sorted(KINDS))


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A sample of some kind, or for small ones numbers that hypothesis picks; sometimes not contiguous."""
    size = draw(shapes) if shape is None else shape
    kind = draw(dtypes) if dtype is None else dtype
    if math.prod(size) <= 16 and draw(st.booleans()):
        numbers = st.floats(-1024, 1024, width=16, allow_subnormal=False)
        values = draw(st.lists(numbers, min_size=math.prod(size), max_size=math.prod(size)))
        return flush(torch.tensor(values, dtype=torch.float32).to(kind).view(size))
    x = sample(draw(kinds), size, kind, draw(seeds))
    return _strided(x) if draw(st.booleans()) else x


def _strided(x: Tensor) -> Tensor:
    """The same values, every other element of a wider tensor."""
    wide = torch.full((*x.shape, 2), 7.0, dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]
