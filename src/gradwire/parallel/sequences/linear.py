"""Linear layers whose weights are split over ranks that share a sequence: the exchange hides behind the product.

PyTorch's styles for Megatron's sequence parallelism gather a whole sequence, then multiply it. Here a piece is
multiplied while the next one travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from gradwire.codecs.base import Codec
from gradwire.core.key import Direction, Key
from gradwire.drivers.interpreter import Traffic
from gradwire.parallel.exchange import ExchangeAxis, RowCoding, row_codec
from gradwire.parallel.sequences.inputs import dtype_of_sums, layout_fault, require_alike
from gradwire.parallel.sequences.layouts import Contiguous, even_piece


def gathered_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: ExchangeAxis,
    layout: Contiguous,
    *,
    codec: Codec | str | None = None,
    key: Key | None = None,
    traffic: Traffic | None = None,
) -> Tensor:
    """A column-parallel linear layer of a sequence whose positions are spread over the ranks.

        y = [x_0; x_1; ...; x_(P-1)] W^T + b

    where x_r are the positions of rank r, and W is this rank's part of the rows of a whole weight. The pieces go round
    a ring of P - 1 hops. In the backward pass they go round again, for dW = dy^T [x_0; ...], so that a rank keeps its
    own positions only; and dx_r, the sum over all ranks of dy W at the positions of r, goes round as a sum of float32,
    or of float64 for float64. With a codec C every rank multiplies C(x_r), for its own positions too, and gradients
    pass C as if it changed nothing (straight-through, Bengio et al. 2013).

    All ranks call it in the same order, and run their backward passes so. Layers that share an input share its journey
    if their weights are concatenated first: `gathered_linear(x, torch.cat([w_q, w_k, w_v]), ...)`.

    With T positions in all, of which s on this rank and s' on the next one, n = B C elements a position, elements of w
    bytes as they travel, and of a bytes in sums, a rank sends

        forward:   n w (T - s') + 56 (P - 1) bytes
        backward:  n w (T - s') where the weight has a gradient, and n a (T - s) where x has one

    Args:
        x: (B, S, C), the positions of this rank.
        weight: (O, C), of this rank.
        bias: (O,), of this rank; None for none.
        axis: the ranks.
        layout: which positions each rank has.
        codec: of positions as they are gathered, e.g. "int8:64"; None sends them as they are.
        key: of a codec that draws.
        traffic: is told what was sent.

    Returns:
        (B, T, O).

    Raises:
        CompositionError: shapes that do not fit each other or the layout, inputs that differ among ranks, or a codec
            whose blocks do not divide what travels; each rank is told.

    References:
        Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.2.2; Wang et
        al. 2023, "Overlap communication with dependent computation via decomposition", section 5.

    >>> axis = ExchangeAxis()
    >>> gathered_linear(torch.ones(1, 6, 8), torch.ones(3, 8), None, axis, Contiguous(6, axis.size)).shape
    torch.Size([1, 6, 3])
    """
    ring = _LinearRing(axis, layout, codec, None, key or Key(), traffic)
    ring.require_inputs(x, weight, bias, layout.count(axis.place), x.shape[-1:])
    return _GatheredLinear.apply(x, weight, bias, ring)  # type: ignore[no-any-return]


def scattered_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: ExchangeAxis,
    layout: Contiguous,
    *,
    gradient_codec: Codec | str | None = None,
    key: Key | None = None,
    traffic: Traffic | None = None,
) -> Tensor:
    """A row-parallel linear layer, whose output is spread over the ranks by its positions.

        y = (sum over ranks r of x_r W_r^T)[positions of this rank] + b

    where x_r are the columns of the whole input that rank r has. The sums of a piece go round a ring, and a rank
    computes its share of the next piece meanwhile. In the backward pass dy is gathered by a ring, and each piece of it
    is multiplied while the next one travels. It is the transpose of `gathered_linear`, whose docstring has the terms:

        forward:   B O a (T - s) + 56 (P - 1) bytes,    backward:  B O w (T - s') bytes

    Args:
        x: (B, T, C), all positions.
        weight: (O, C), of this rank.
        bias: (O,), the same one on all ranks, which is added once. Each rank has its whole gradient. None for none.
        axis: the ranks.
        layout: which positions each rank has.
        gradient_codec: of dy as it is gathered, e.g. "int8:64"; None sends it as it is. Sums are never coded.
        key: of a codec that draws.
        traffic: is told what was sent.

    Returns:
        (B, S, O), of the dtype of x.

    Raises:
        CompositionError: as for `gathered_linear`.

    References:
        Korthikanti et al. 2022, section 4.2.2.

    >>> axis = ExchangeAxis()
    >>> scattered_linear(torch.ones(1, 6, 3), torch.ones(8, 3), None, axis, Contiguous(6, axis.size)).shape
    torch.Size([1, 6, 8])
    """
    ring = _LinearRing(axis, layout, None, gradient_codec, key or Key(), traffic)
    ring.require_inputs(x, weight, bias, layout.length, weight.shape[:1])
    return _ScatteredLinear.apply(x, weight, bias, ring)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _LinearRing:
    """One call: the ranks, the positions of each, and how pieces travel."""

    axis: ExchangeAxis
    layout: Contiguous
    codec: Codec | str | None
    gradient_codec: Codec | str | None
    key: Key
    traffic: Traffic | None

    def require_inputs(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, positions: int, travels: torch.Size
    ) -> None:
        """Compare the inputs with each other, and with those of other ranks.

        Args:
            x, weight, bias: of a linear layer.
            positions: that x should have.
            travels: columns of what goes round, which are alike on all ranks. On the other side each has its own.
        """
        fault = self._fault(x, weight, bias, positions)
        alike: dict[str, object] = {
            "sizes of batches": x.shape[:1],
            "widths": travels,
            "dtypes": x.dtype,
            "layouts or codecs": (self.layout, self.codec, self.gradient_codec),
            "gradients": (x.requires_grad, weight.requires_grad),
            "biases": bias is None,
        }
        require_alike(self.axis, alike, fault, x.device, self.traffic)
        for codec, what in ((self.codec, "codec"), (self.gradient_codec, "gradient_codec")):
            row_codec(codec, travels[0], what)

    def _fault(self, x: Tensor, weight: Tensor, bias: Tensor | None, positions: int) -> str | None:
        """What is wrong with the inputs of a rank, in a sentence."""
        if x.dim() != 3 or weight.dim() != 2 or min(x.shape[0], x.shape[2], *weight.shape) < 1:
            return (
                f"x and weight of {tuple(x.shape)} and {tuple(weight.shape)}: give (batch, positions, columns) and "
                "(rows, columns), of which only the positions of a rank may be none"
            )
        if not x.is_floating_point() or any(each.dtype != x.dtype for each in (weight, bias) if each is not None):
            return f"x is {x.dtype}, and weight {weight.dtype}: give x, weight and bias of one floating-point dtype"
        if x.shape[2] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
            told = "no bias" if bias is None else f"a bias of {tuple(bias.shape)}"
            return f"x of {tuple(x.shape)}, a weight of {tuple(weight.shape)} and {told} do not fit each other"
        if (of_layout := layout_fault(self.axis, self.layout)) is not None:
            return of_layout
        if x.shape[1] != positions:
            return f"x has {x.shape[1]} positions on rank {self.axis.place}, where the layout wants {positions}"
        return None

    # Travelling --------------------------------------------------------------------------------------------------

    def rows(self, place: int) -> slice:
        """Where the positions of a rank lie among all."""
        piece = even_piece(self.layout.length, self.layout.ranks, place)
        return slice(piece.start, piece.stop)

    def gather(self, x: Tensor, direction: Direction, codec: Codec | str | None) -> Iterator[tuple[slice, Tensor]]:
        """The pieces of all ranks and where they lie, this rank's first. The next one travels meanwhile."""
        batch, _, width = x.shape
        coding = RowCoding(row_codec(codec, width, "codec"), width, x.dtype)
        key = self.key.with_(rank=self.axis.place, direction=direction)
        rows = batch * x.shape[1]
        wire = coding.encode(x.reshape(rows, width), (rows,), key)

        def nbytes(place: int) -> int:
            return coding.nbytes(batch * self.layout.count(place))

        for place, arrived in self.axis.passed_round(wire, nbytes, self.traffic):
            count = self.layout.count(place)
            yield self.rows(place), coding.decode(arrived, (batch * count,)).view(batch, count, width)

    def scatter(self, share: Callable[[slice], Tensor]) -> Tensor:
        """The sum over ranks of their shares at the positions of this one. A sum travels while the next is computed."""
        total = share(self.rows((self.axis.place - 1) % self.axis.size))
        for hop in range(1, self.axis.size):
            place = (self.axis.place - 1 - hop) % self.axis.size
            batch, _, width = total.shape
            arrives = batch * self.layout.count(place) * width * total.itemsize
            under_way = self.axis.pass_on(total.contiguous().view(-1).view(torch.uint8), arrives, self.traffic)
            mine = share(self.rows(place))
            total = mine + under_way.end().view(mine.dtype).view(mine.shape)
        return total


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ring: _LinearRing) -> Tensor:
        ctx.ring = ring
        ctx.save_for_backward(x, weight)
        y = x.new_empty(x.shape[0], ring.layout.length, len(weight))
        for rows, piece in ring.gather(x.detach(), "forward", ring.codec):
            y[:, rows] = functional.linear(piece, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ring: _LinearRing = ctx.ring
        x, weight = ctx.saved_tensors
        dy, whole = grads[0].to(dtype_of_sums(x.dtype)), weight.to(dtype_of_sums(x.dtype))
        dx = dw = None
        if ctx.needs_input_grad[1]:
            total = torch.zeros_like(whole)
            # the key of the forward pass: the same payloads travel again
            for rows, piece in ring.gather(x, "forward", ring.codec):
                total += torch.einsum("bto,btc->oc", dy[:, rows], piece.to(total.dtype))
            dw = total.to(weight.dtype)
        if ctx.needs_input_grad[0]:
            dx = ring.scatter(lambda rows: dy[:, rows].matmul(whole)).to(x.dtype)
        return dx, dw, dy.sum((0, 1)).to(x.dtype) if ctx.needs_input_grad[2] else None, None


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ring: _LinearRing) -> Tensor:
        ctx.ring = ring
        ctx.save_for_backward(x, weight)
        inputs, whole = x.detach().to(dtype_of_sums(x.dtype)), weight.to(dtype_of_sums(x.dtype))
        y = ring.scatter(lambda rows: functional.linear(inputs[:, rows], whole))
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ring: _LinearRing = ctx.ring
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        dx, dw = torch.empty_like(x), torch.zeros_like(weight, dtype=dtype_of_sums(x.dtype))
        db = dw.new_zeros(len(weight))
        for rows, piece in ring.gather(grads[0], "backward", ring.gradient_codec):
            if of_x:
                dx[:, rows] = piece.matmul(weight)
            if of_weight:
                dw += torch.einsum("bto,btc->oc", piece.to(dw.dtype), x[:, rows].to(dw.dtype))
            if of_bias:
                db += piece.sum((0, 1), dtype=db.dtype)
        return dx if of_x else None, dw.to(x.dtype) if of_weight else None, db.to(x.dtype) if of_bias else None, None
