"""Laws of a single codec: one tensor, one payload."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradwire.codecs import BlockInt, Chain, Codec, TopK
from gradwire.core.errors import CompositionError
from gradwire.core.key import Key
from gradwire.kernels import dispatch

from . import checks
from .subjects import DTYPES, HUGE, KINDS, bits, codecs, dtypes, sample, seeds, tensors

T = TypeVar("T")
CODECS = codecs()
each_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
KEY = Key(seed=3, step=7, name="w", stage="first", rank=1)


@each_codec
@given(x=tensors())
def test_one_tensor(codec: Codec, x: Tensor) -> None:
    checks.check_preserved(codec, x, KEY)
    checks.check_payload_bytes(codec, x, KEY)
    checks.check_accumulate(codec, x, KEY)
    checks.check_keeping(codec, x, KEY)
    checks.check_keys(codec, x)


@each_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_huge_tensor(codec: Codec, dtype: torch.dtype) -> None:
    x = sample("heavy", (HUGE,), dtype)
    checks.check_preserved(codec, x, KEY)
    checks.check_payload_bytes(codec, x, KEY)
    if codec.contraction(HUGE) is not None and not codec.keyed:
        checks.check_contraction(codec, x)


@pytest.mark.parametrize("codec", [c for c in CODECS if c.shows_non_finite], ids=repr)
@pytest.mark.parametrize("kind", ["normal", "heavy", "zeros"])
def test_non_finite_input_shows(codec: Codec, kind: str) -> None:
    for numel in (1, 7, 300):
        checks.check_shows_non_finite(codec, sample(kind, (numel,)), KEY)


@pytest.mark.parametrize("codec", [c for c in CODECS if c.additive], ids=repr)
@given(data=st.data(), dtype=dtypes, seed=seeds)
def test_additive(codec: Codec, data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
    shape = data.draw(st.sampled_from([(1,), (7,), (257,)]))
    xs = [data.draw(tensors(shape, dtype)) / 4 for _ in range(data.draw(st.integers(2, 5)))]
    checks.check_additive(codec, xs, Key(seed=seed))


@pytest.mark.parametrize("codec", [c for c in CODECS if c.unbiased], ids=repr)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_unbiased(codec: Codec, kind: str) -> None:
    checks.check_unbiased(codec, sample(kind, (257,)))


@pytest.mark.parametrize("codec", [c for c in CODECS if not c.unbiased and not isinstance(c, Chain)], ids=repr)
def test_biased_codecs_do_not_pass_for_unbiased(codec: Codec) -> None:
    # Near a power of two the spacing is finest above and coarsest for casts, so 1 + 2^-12 is rounded by all of them.
    x = torch.full((256,), 1 + 2.0**-12) * torch.arange(1, 257) / 256
    x[-1] *= 16  # beyond what clipping leaves
    with pytest.raises(AssertionError, match="bias"):
        checks.check_unbiased(codec, x)


CONTRACTIONS = [c for c in CODECS if c.contraction(100) is not None]


@pytest.mark.parametrize("codec", [c for c in CONTRACTIONS if not c.keyed], ids=repr)
@given(x=tensors())
def test_contraction(codec: Codec, x: Tensor) -> None:
    checks.check_contraction(codec, x)


@pytest.mark.parametrize("codec", [c for c in CONTRACTIONS if c.keyed], ids=repr)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_contraction_in_the_mean_over_keys(codec: Codec, kind: str) -> None:
    checks.check_contraction(codec, sample(kind, (61,)))


@each_codec
@given(x=tensors(), seed=seeds)
def test_kernels_agree(codec: Codec, x: Tensor, seed: int) -> None:
    check_kernels_agree(codec, x, Key(seed=seed))


@each_codec
def test_kernels_agree_on_a_huge_tensor(codec: Codec) -> None:
    check_kernels_agree(codec, sample("heavy", (HUGE,)), KEY)


def check_kernels_agree(codec: Codec, x: Tensor, key: Key) -> None:
    """numba and plain torch write the same payload and read the same values from it.

    Where a scale is a sum it may differ by one unit in the last place, so by 2 u of itself; then a level differs by one
    where that tips a rounding, which happens to a share of about u times the number of levels.
    """
    fast, slow = codec.encode(x, key), on_reference(lambda: codec.encode(x, key))
    y, again = codec.decode(fast, x, key), on_reference(lambda: codec.decode(fast, x, key))
    assert torch.equal(bits(y), bits(again))
    if codec.order_free:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(fast, slow, strict=True))
        return
    z = codec.decode(slow, x, key)
    u = checks.unit_roundoff(x.dtype)
    differs = (y.double() - z.double()).abs() > 4 * u * y.double().abs()
    assert int(differs.sum()) <= 1 + x.numel() // 10_000
    quantiser = codec.second if isinstance(codec, Chain) else codec
    level = float(fast[0].double().abs().max()) / getattr(quantiser, "levels", 1) if fast[0].numel() else 0.0
    assert bool(((y.double() - z.double()).abs() <= level * (1 + 8 * u) + 4 * u * y.double().abs()).all())


def no_implementations(_package: str, _kind: str) -> None:
    return None


def on_reference(call: Callable[[], T]) -> T:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADWIRE_KERNELS", "reference")
        patch.setattr(dispatch, "implementations", no_implementations)
        return call()


@each_codec
def test_configuration_and_repr(codec: Codec) -> None:
    checks.check_config(codec)


@each_codec
@given(x=tensors(shape=(257,)), rubbish=st.binary(min_size=1, max_size=64), seed=seeds)
def test_damaged_payloads(codec: Codec, x: Tensor, rubbish: bytes, seed: int) -> None:
    x = x.contiguous()
    checks.check_cut(codec, x, KEY)
    checks.check_indices(codec, x, KEY)
    checks.check_rubbish(codec, x, KEY, torch.frombuffer(bytearray(rubbish), dtype=torch.uint8))
    noise = torch.randint(0, 256, (2048,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    checks.check_rubbish(codec, x, KEY, noise)


@each_codec
def test_other_dtypes_are_refused_by_name(codec: Codec) -> None:
    with pytest.raises(CompositionError, match=r"int32.*float32, float64, float16, bfloat16"):
        codec.encode(torch.arange(3, dtype=torch.int32))


def test_a_chain_sends_what_its_parts_send() -> None:
    chain, x = Chain(TopK(0.1, indices="int32"), BlockInt(8)), sample("normal", (1000,))
    assert chain.payload_bytes(1000) == 100 + 4 * 1 + 4 * 100 == sum(f.nbytes for f in chain.encode(x))
