"""Bits on the wire, counted: what each quantiser says it sends is what it sends, with scales and padding."""

from __future__ import annotations

import math

import pytest
import torch

from gradwire import cost, parse
from gradwire.codecs import QSGD, Codec, OneBit, Sign, TernGrad
from gradwire.core.collective import ring_bytes
from gradwire.core.grain import ParameterSpec

NUMEL = 1_000_000
LARGE = 1 << 22
"""Cut into four grains of 2^20 elements, as any larger model is."""
MODEL = [ParameterSpec("w", (LARGE,), torch.float32, torch.device("meta"))]


def bits(codec: Codec, numel: int = NUMEL) -> float:
    """Bits an element of a real payload."""
    payload = codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    sent = sum(field.nbytes for field in payload)
    assert sent <= codec.payload_bytes(numel) < sent + 8 * len(payload)
    return 8 * codec.payload_bytes(numel) / numel


def bits_each_way(spec: str, ranks: int = 4) -> float:
    """Bits an element that a rank sends, of which an uncompressed all-reduce has 32 each way."""
    sent = cost(parse(spec), MODEL, ranks).wire_bytes
    whole = ring_bytes(4 * LARGE, ranks)
    return 32 * sent / whole


def test_a_sign_is_a_bit() -> None:
    assert round(bits(Sign(1 << 16)), 2) == 1.00
    assert bits(Sign()) == pytest.approx(1 + 32 / 4096, abs=1e-4)
    assert bits(OneBit()) == pytest.approx(1 + 64 / 512, abs=1e-4)


def test_a_ternary_digit_is_1_6_bits() -> None:
    assert bits(TernGrad()) <= 1.61
    assert bits(TernGrad(digits=4)) == pytest.approx(2 + 32 / 6560, abs=1e-3)


@pytest.mark.parametrize("levels", [1, 2, 3, 4, 7, 15, 16, 127, 255])
def test_qsgd_sends_a_level_and_a_sign(levels: int) -> None:
    """ceil(log2(s + 1)) + 1 bits and a norm a block, and nothing else; 2^20 elements fill whole bytes and blocks."""
    numel = 1 << 20
    level = math.ceil(math.log2(levels + 1))
    assert QSGD(levels).payload_bytes(numel) == numel * (level + 1) // 8 + 4 * numel // 512


SIZES = {
    "sign": 1 + 32 / 4096,
    "signsgd_mv": 1 + 32 / 4096,
    "onebit": 1 + 64 / 512,
    "terngrad": 1.61,
    "fp8": 8 + 8 / 256,
    "natural": 9.0,
    "bf16_stochastic": 16.0,
    "fp16_scaled": 16.0,
    "qsgd:15": 5 + 32 / 512,
    "int4": 4 + 32 / 256,
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("spec", SIZES)
def test_what_travels_each_way(spec: str, ranks: int) -> None:
    """Scales, padding and the flags of a step (some bytes a grain) included."""
    assert bits_each_way(spec, ranks) <= SIZES[spec] + 1e-4


@pytest.mark.parametrize(("ranks", "sum_bits"), [(2, 3), (3, 3), (4, 4), (8, 5)])
def test_ternary_sums_travel_in_as_many_bits_as_they_need(ranks: int, sum_bits: int) -> None:
    """ceil(log2(2n + 1)) bits back for 1.6 there, and a float32 a block; three ranks pad 1.4%."""
    assert 2**sum_bits >= 2 * ranks + 1 > 2 ** (sum_bits - 1)
    padded = 1.014 if ranks == 3 else 1.001
    assert 2 * bits_each_way("terngrad_sum", ranks) <= (1.6 + sum_bits) * padded + 2 * 32 / 6560 + 1e-3
