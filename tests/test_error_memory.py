"""Error memory apart from exchanges: nothing is lost, no argument is changed, and the bits are error feedback's."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire import CompositionError, ErrorMemory, Lockstep, StateError, compress
from gradwire.codecs import BF16, QSGD, BlockInt, Chain, Codec, Identity, OneBit, Sign, TernGrad, TopK
from gradwire.codecs.error_memory import compress_into
from gradwire.core.grain import flat_grain
from gradwire.core.key import Key
from gradwire.reducers import AllGatherExchange, ErrorFeedback

CODECS: list[Codec] = [
    *(BlockInt(4), BlockInt(2, block=16), TopK(0.05), Chain(TopK(0.1), BlockInt(8)), Sign(64), OneBit(64), BF16()),
]
NUMEL = 1001


def tensor(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(step)).to(dtype)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_was_given_is_what_arrived_and_what_is_owed(codec: Codec) -> None:
    memory = ErrorMemory.zeros(NUMEL)
    given, arrived, sizes = (torch.zeros(NUMEL, dtype=torch.float64) for _ in range(3))
    for step in range(20):
        x, key = tensor(step), Key(step=step)
        payload, memory = compress(codec, x, memory, key)
        decoded = codec.decode(payload, like=x, key=key)
        given, arrived, sizes = given + x, arrived + decoded, sizes + x.abs() + decoded.abs() + memory.owed.abs()
    lost = given - arrived - memory.owed
    assert float(memory.owed.abs().max()) > 0
    assert bool((lost.abs() <= 4 * torch.finfo(torch.float32).eps * sizes.max()).all())
    assert float(memory.owed.abs().max()) > 10 * float(lost.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_it_is_the_error_feedback_of_an_exchange_bit_for_bit(codec: Codec, decay: float, dtype: torch.dtype) -> None:
    """One rank's all-gather sends itself what the memory sends."""
    lockstep = Lockstep(ErrorFeedback(AllGatherExchange(codec), decay), flat_grain(NUMEL, dtype=dtype), world_size=1)
    memory = ErrorMemory.zeros(NUMEL)
    for step in range(5):
        x, key = tensor(step, dtype), Key(step=step, name="x", rank=0)
        payload, memory = compress(codec, x, memory, key, decay=decay)
        (mean,) = lockstep.step([x])
        assert torch.equal(codec.decode(payload, like=torch.empty(NUMEL), key=key).to(dtype), mean)
        assert torch.equal(memory.owed, lockstep.states[0].tensor("residual"))


def test_tensor_and_memory_are_left_as_they_are() -> None:
    """So that a payload which did not arrive is taken back by keeping the old memory."""
    x, memory = tensor(0).view(7, 143), ErrorMemory(tensor(1))
    (first, new), (again, _) = (compress(TopK(0.1), x, memory, Key()) for _ in range(2))
    assert torch.equal(x, tensor(0).view(7, 143))
    assert torch.equal(memory.owed, tensor(1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(new.owed, memory.owed)


def test_a_lossless_codec_owes_nothing() -> None:
    payload, memory = compress(Identity(), tensor(0), ErrorMemory.zeros(NUMEL), Key())
    assert torch.equal(payload[0], tensor(0))
    assert not bool(memory.owed.any())


def test_the_payload_can_be_written_into_a_buffer_that_is_sent() -> None:
    codec, x, memory = BlockInt(4), tensor(0), ErrorMemory(tensor(1))
    layout = codec.layout(NUMEL)
    wire = layout.empty(x.device)
    new = compress_into(codec, x, memory, Key(), layout.views(wire))
    payload, want = compress(codec, x, memory, Key())
    assert torch.equal(new.owed, want.owed)
    assert all(torch.equal(a, b) for a, b in zip(layout.views(wire.clone()), payload, strict=True))


# Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [QSGD(15), TernGrad(), BlockInt(4, stochastic=True)], ids=repr)
def test_what_error_feedback_refuses_memory_refuses_too(codec: Codec) -> None:
    with pytest.raises(CompositionError, match="would grow without bound, since it is no contraction"):
        ErrorFeedback(AllGatherExchange(codec))
    with pytest.raises(
        CompositionError, match=r"error memory of .* would grow without bound, since it is no contraction"
    ):
        compress(codec, tensor(0), ErrorMemory.zeros(NUMEL), Key())


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.5, float("nan")])
def test_a_decay_out_of_range_is_refused_by_both(decay: float) -> None:
    with pytest.raises(CompositionError, match=r"is outside \(0, 1\]"):
        ErrorFeedback(AllGatherExchange(TopK(0.1)), decay)
    with pytest.raises(CompositionError, match=r"is outside \(0, 1\]"):
        compress(TopK(0.1), tensor(0), ErrorMemory.zeros(NUMEL), Key(), decay=decay)


def test_a_memory_of_another_size_is_refused() -> None:
    with pytest.raises(StateError, match="a memory of 3 elements cannot go with a tensor of 1001"):
        compress(TopK(0.1), tensor(0), ErrorMemory.zeros(3), Key())


# Saving -----------------------------------------------------------------------------------------------------------


def test_a_saved_memory_goes_on_as_the_memory_would() -> None:
    _, memory = compress(TopK(0.1), tensor(0), ErrorMemory.zeros(NUMEL), Key())
    file = io.BytesIO()
    torch.save(memory.state_dict(), file)
    file.seek(0)
    loaded = ErrorMemory.from_state_dict(torch.load(file, weights_only=True))
    (_, first), (_, second) = (compress(TopK(0.1), tensor(1), each, Key()) for each in (memory, loaded))
    assert torch.equal(first.owed, second.owed)


def test_a_saved_memory_is_a_copy() -> None:
    memory = ErrorMemory.zeros(3)
    saved = memory.state_dict()
    loaded = ErrorMemory.from_state_dict(saved)
    saved["owed"].fill_(7.0)
    assert not bool(memory.owed.any())
    assert not bool(loaded.owed.any())


@pytest.mark.parametrize(
    "saved",
    [None, {}, {"owed": [0.0]}, {"owed": torch.zeros(2, 2)}, {"owed": torch.zeros(2).double()}, {"e": torch.zeros(2)}],
)
def test_what_is_no_saved_memory_is_refused(saved: object) -> None:
    with pytest.raises(StateError, match="this is no saved ErrorMemory"):
        ErrorMemory.from_state_dict(saved)


def test_it_is_public() -> None:
    assert {"ErrorMemory", "compress"} <= set(gradwire.__all__)
