"""What was sent of each sample, so that activations travel as changes since the sample was met last."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradwire.codecs import Codec
from gradwire.codecs.base import SUPPORTED_DTYPES
from gradwire.codecs.error_memory import require_contraction
from gradwire.core.errors import PayloadError, StepError
from gradwire.core.key import Key
from gradwire.core.payload import Layout
from gradwire.parallel.pipelines.codecs import stage_codec

HEADER_BYTES = 8

_Sent = dict[int, Tensor]
"""What the receiver last made of each sample's activations, by the sample's number."""


class SampleMemory:
    """Sends of each sample the change of its activations since they were sent last, instead of the activations.

    With m(i) what the receiver last made of the activations x of sample i, both ends do, for each sample,

        m(i) <- D(x)            where i is met for the first time, by the codec `first`
        m(i) <- m(i) + C(x - m(i))   from then on, by the codec of activations

    and the receiver goes on with m(i) (Wang et al. 2022, Algorithm 1). Activations of a sample change ever less while
    training converges, so few bits of the change say more than few bits of the activations. A residual of what other
    samples lost would be noise.

    It needs numbers of samples that stay the same from epoch to epoch: call `next_batch` on every rank before each
    step. It helps from the second epoch on. Both ends of each boundary keep a number in float32 (or float64) for each
    element that a sample's activations have, see `nbytes`.

    A micro-batch of b samples, u of them new, of r elements each takes 8 + D(u r) + C((b - u) r) bytes, the first 8 of
    which tell whether both ends mean the same samples.

    Evaluations send by `first`. Saves do not hold the memory: after a restart all samples are new on all ranks.

    Args:
        first: codec of a sample that is met for the first time. The paper sends it as it is: "none".

    Raises:
        SpecError: as `stage_codec`.

    References:
        Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Quantization with
        Guarantees", Algorithm 1.

    >>> from gradwire.codecs import BlockInt
    >>> sender, receiver, x = SampleMemory(), SampleMemory(), torch.tensor([[1.0, 0.3]])
    >>> for step in range(3):
    ...     for end in (sender, receiver):
    ...         end.next_batch([7])
    ...     wire = sender.coder(BlockInt(2), x + step / 4, (0, 0), 0, 1).encode(x + step / 4, Key())
    ...     receiver.coder(BlockInt(2), x, (0, 0), 0, 1).decode_into(wire, out := torch.empty(1, 2), Key())
    ...     print(out, wire.numel())
    tensor([[1.0000, 0.3000]]) 16
    tensor([[1.2500, 0.5500]]) 16
    tensor([[1.5000, 0.8000]]) 16
    """

    def __init__(self, first: str | Codec = "none") -> None:
        self.first = stage_codec(first)
        self._sent: dict[tuple[int, int], _Sent] = {}
        self._samples: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept on this rank."""
        return sum(tensor.nbytes for sent in self._sent.values() for tensor in sent.values())

    def next_batch(self, samples: Iterable[int] | Tensor) -> None:
        """Say which samples the next step has, in the order of the whole batch, before it is cut into micro-batches.

        Raises:
            StepError: a sample that is named twice.
        """
        named = [int(sample) for sample in (samples.tolist() if isinstance(samples, Tensor) else samples)]
        if len(set(named)) < len(named):
            raise StepError("a batch has a sample twice, whose activations would be two changes of one: draw without")
        self._samples = named

    def clear(self) -> None:
        """Forget all samples, which must be done on all ranks."""
        self._sent.clear()

    def coder(self, codec: Codec, like: Tensor, place: tuple[int, int], chunk: int, chunks: int) -> PerSample | None:
        """Return what codes a tensor of one micro-batch; None for what is no number, which is sent as it is.

        Args:
            codec: of changes.
            like: of the shape [samples, ...].
            place: the boundary, and which of the tensors that pass it.
            chunk: the micro-batch.
            chunks: how many the batch is cut into, as `torch.tensor_split` does.

        Raises:
            StepError: another number of samples than `next_batch` was given.
        """
        if like.dtype not in SUPPORTED_DTYPES:
            return None
        few, more = divmod(len(self._samples), chunks)
        start = chunk * few + min(chunk, more)
        samples = self._samples[start : start + few + (chunk < more)]
        if not like.dim() or len(samples) != like.shape[0]:
            raise StepError(
                f"micro-batch {chunk} passes tensors of {list(like.shape)}, and next_batch has named {len(samples)} "
                "samples of it: name those of each batch before its step, and keep them in the first dimension"
            )
        return PerSample(self._sent.setdefault(place, {}), samples, codec, self.first)


class PerSample:
    """Codes one tensor of a micro-batch as the changes of its samples.

    Args:
        sent: what was sent of each sample through this place, which is brought up to date.
        samples: of the micro-batch, in the order of rows.
        codec: of changes.
        first: of new samples.
    """

    def __init__(self, sent: _Sent, samples: Sequence[int], codec: Codec, first: Codec) -> None:
        require_contraction(codec)
        self._sent, self._samples, self._codec, self._first = sent, samples, codec, first
        self._new = [row for row, sample in enumerate(samples) if sample not in sent]
        self._known = [row for row, sample in enumerate(samples) if sample in sent]

    def nbytes(self, like: Tensor) -> int:
        """A header, new samples, and changes."""
        first, changes = self._layouts(like)
        return HEADER_BYTES + first.nbytes + changes.nbytes

    def _layouts(self, like: Tensor) -> tuple[Layout, Layout]:
        row = like[0].numel() if like.shape[0] else 0
        return (
            self._first.layout(len(self._new) * row, like.dtype),
            self._codec.layout(len(self._known) * row, _kept_dtype(like)),
        )

    def _header(self) -> bytes:
        """Alike where both ends mean the same samples, and know the same ones of them."""
        return hashlib.blake2b(repr((self._samples, self._new)).encode(), digest_size=HEADER_BYTES).digest()

    def _parts(self, wire: Tensor, like: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The payloads of new samples and of changes, in a buffer."""
        first, changes = self._layouts(like)
        middle = HEADER_BYTES + first.nbytes
        return first.views(wire[HEADER_BYTES:middle]), changes.views(wire[middle:])

    def _stacked(self, like: Tensor) -> Tensor:
        """What was sent of the samples that are known, one row for each."""
        kept = [self._sent[self._samples[row]] for row in self._known]
        return torch.stack(kept) if kept else torch.empty((0,), dtype=_kept_dtype(like), device=like.device)

    def encode(self, x: Tensor, key: Key) -> Tensor:
        """Return the buffer, and take up what the receiver will make of it."""
        wire = x.new_zeros(self.nbytes(x), dtype=torch.uint8)
        wire[:HEADER_BYTES] = torch.frombuffer(bytearray(self._header()), dtype=torch.uint8)
        first, changes = self._parts(wire, x)
        rows = x.reshape(x.shape[0], -1)
        if self._new:
            self._first.encode_into(rows[self._new].reshape(-1), key, first)
        if self._known:
            kept = self._stacked(x)
            self._codec.encode_into(rows[self._known].to(kept.dtype).sub_(kept).view(-1), key, changes)
        self._take_up(first, changes, x, key)
        return wire

    def decode_into(self, wire: Tensor, out: Tensor, key: Key) -> None:
        """Overwrite `out` with what the samples' activations now are.

        Raises:
            PayloadError: the other end means other samples.
        """
        if bytes(wire[:HEADER_BYTES].tolist()) != self._header():
            raise PayloadError(
                "two stages mean other samples by one micro-batch: call next_batch with the same samples on every "
                "rank, and clear() on all of them or on none"
            )
        self._take_up(*self._parts(wire, out), out, key)
        kept = torch.stack([self._sent[sample] for sample in self._samples])
        out.copy_(kept.view(out.shape))

    def _take_up(self, first: tuple[Tensor, ...], changes: tuple[Tensor, ...], like: Tensor, key: Key) -> None:
        """m(i) <- D(x) for new samples and m(i) <- m(i) + C(x - m(i)) for the others, with equal bits on both ends."""
        row = like[0].numel()
        if self._new:
            met = like.new_empty(len(self._new) * row)
            self._first.decode_into(first, met, key)
            self._keep(self._new, met.to(_kept_dtype(like)).view(-1, row))
        if self._known:
            kept = self._stacked(like)
            self._codec.accumulate(changes, kept.view(-1), key)
            self._keep(self._known, kept)

    def _keep(self, rows: Sequence[int], values: Tensor) -> None:
        for row, value in zip(rows, values.unbind(), strict=True):
            self._sent[self._samples[row]] = value.clone()


def _kept_dtype(like: Tensor) -> torch.dtype:
    """Changes of half precision would be lost in sums of half precision."""
    return like.dtype if like.dtype == torch.float64 else torch.float32
