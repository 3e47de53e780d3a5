"""A layer of experts that are spread over the ranks of an axis."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from gradwire.codecs.base import Codec
from gradwire.core.errors import CompositionError, StepError
from gradwire.core.key import Key
from gradwire.parallel.exchange import ExchangeAxis, Passage, row_codec
from gradwire.parallel.moe import choices
from gradwire.parallel.moe.capacity import Capacity, kept_within
from gradwire.parallel.moe.choices import RoutedChoice
from gradwire.parallel.moe.figures import Tally
from gradwire.parallel.moe.ordering import Ordering
from gradwire.parallel.moe.routers import NoisyTopK, Router, Routing
from gradwire.parallel.rows import Announced, announce, rows_of

_FAULT, _DTYPE, _DROPPED, _CHOSEN, _CHOICES = range(5)
_HEAD = 5
"""Words that each rank tells each other one before the counts of its experts."""

_NO_FAULT, _NOT_FINITE, _WIDTH = range(3)


@dataclass(frozen=True)
class Payloads:
    """The codecs of the four exchanges of a layer; None sends rows as they are.

    Activations stand 8 bits well; their gradients stand less, and DeepSeek-V3 combines in bf16 what it dispatches in
    fp8. So each is chosen by itself, and None is the default of each.

    Args:
        dispatch: of tokens on their way to experts, e.g. "int8:64" or FP8(block=128).
        combine: of the experts' outputs on their way back.
        dispatch_gradient: of the gradients of tokens.
        combine_gradient: of the gradients of outputs.

    References:
        DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.3.

    >>> Payloads.all("int8:64").combine
    'int8:64'
    """

    dispatch: Codec | str | None = None
    combine: Codec | str | None = None
    dispatch_gradient: Codec | str | None = None
    combine_gradient: Codec | str | None = None

    @classmethod
    def all(cls, codec: Codec | str) -> Payloads:
        """One codec for the four."""
        return cls(codec, codec, codec, codec)


class MoE(nn.Module):
    """Tokens go to the K experts that a router chooses, wherever these are, and come back as weighted sums.

        y_t = sum over the K choices e of token t:  weight_te f_e(x_t),    + shared(x_t)

    Forward and backward pass are those of one process with all experts, to rounding, for any number of ranks. All ranks
    of the axis call the layer as often as each other, ranks without a token too.

    The state dict has how many passes were made and what the last one dropped. So after a resume the noise of
    `NoisyTopK`, codecs that draw, and a capacity that follows go on as they would have without it.

    A gradient of an expert has come from the losses of all ranks of the axis. It is divided by their number here, so
    that the mean over data-parallel ranks is what each parameter wants: over all ranks for the router and other dense
    parameters, and over the ranks that hold the same experts for these (`attach_experts`, or FSDP2 over that axis).

    With n ranks, H elements of b bytes in a token, s_j rows for rank j and r_j from it, a rank sends in a forward pass,
    without codecs and in one level

        8 (5 + E / n) (n - 1)  +  H b (sum over j != place of s_j)  +  H b (sum over j != place of r_j)

    bytes: the counts, the dispatch and the combination. The backward pass sends the last two again, the other way. A
    codec makes H b s_j the bytes of its payload of H s_j elements.

    Args:
        router: chooses.
        experts: of this rank: `Experts`, or a module with `experts` (E) and `local` (E / n) that is called with rows,
            the counts of its experts, and the first of these.
        axis: the ranks that experts are spread over.
        shared: a module that every token goes through as well.
        capacity: what experts take; None drops nothing.
        payloads: the codecs of the exchanges.
        chunks: of each rank's experts. While one chunk computes, others travel.
        near: added to the scores of this rank's experts for the choice, and half of it to those of its node: tokens
            stay where experts are almost equally good. The choice then depends on how experts are spread.

    Attributes:
        routing: of the last pass, for losses.
        tally: what has been routed, dropped and sent.
        factor: of the capacity, now.

    Raises:
        CompositionError: parts that do not fit together: other numbers of experts, chunks that do not divide them, a
            codec that cannot serve.

    Example:
        axis = ExchangeAxis(mesh["expert"])
        layer = MoE(SoftmaxTopK(512, 16, 2), Experts(512, 2048, 16, axis), axis)
    """

    factor: Tensor

    def __init__(
        self,
        router: Router,
        experts: nn.Module,
        axis: ExchangeAxis,
        *,
        shared: nn.Module | None = None,
        capacity: Capacity | None = None,
        payloads: Payloads | None = None,
        chunks: int = 1,
        near: float = 0.0,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared, self.axis = router, experts, shared, axis
        self.capacity, self.chunks = capacity, chunks
        local: Any = getattr(experts, "local", None)
        if local is None or local * axis.size != router.experts:
            raise CompositionError(
                f"the router knows {router.experts} experts, and {axis.size} ranks have {local} each: give both one "
                "number of experts, a multiple of the ranks"
            )
        if chunks < 1 or local % chunks:
            raise CompositionError(f"{chunks} chunks do not divide the {local} experts of a rank: take a divisor")
        given = payloads or Payloads()
        self.codecs = {
            each.name: row_codec(getattr(given, each.name), router.hidden, each.name) for each in fields(given)
        }
        if isinstance(router, NoisyTopK):
            router.rank = axis.place
        self.ordering = Ordering(axis.size, local, chunks)
        self.register_buffer("factor", torch.tensor(capacity.factor if capacity else 0.0, dtype=torch.float64))
        self.routing: Routing | None = None
        self.tally = Tally(router.experts)
        self._near = _nearness(near, axis, router.experts)
        self._layer, self._draws, self._agreed = axis.next_layer(), 0, False
        self._told = (0, 0)  # drops and choices of the last pass, which the next one tells the others

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., H) for tokens (..., H).

        Raises:
            CompositionError: on all ranks of the axis, where one has tokens of another width or dtype.
            StepError: on all ranks of the axis, where a score of one is not finite.
            CommunicationError: a rank that did not come within the deadline of the axis.
        """
        tokens = x.reshape(-1, x.shape[-1])
        repeated = choices.repeated()
        if repeated is None:
            choice, routing = self._choose(tokens)
            choices.keep(choice)
            self.routing = routing
        else:
            choice = repeated
            routing = self.router(tokens, chosen=(choice.experts, choice.noise))
        return self._routed(tokens, routing, choice).reshape(x.shape)

    @override
    def get_extra_state(self) -> Tensor:
        """Passes made so far, and drops and choices of the last one on this rank."""
        return torch.tensor([self._draws, *self._told])

    @override
    def set_extra_state(self, state: Tensor) -> None:
        """Go on from what `get_extra_state` returned."""
        self._draws, *told = state.tolist()
        self._told = (told[0], told[1])

    # The choice --------------------------------------------------------------------------------------------------

    def _choose(self, tokens: Tensor) -> tuple[RoutedChoice, Routing]:
        """Route tokens, and tell all ranks how many rows will come."""
        self._draws += 1
        if not self._agreed:
            self._agree(tokens)
        if tokens.shape[1] != self.router.hidden:
            self._announce(tokens, _WIDTH, None)
        routing: Routing = self.router(tokens, self._near, draw=self._draws)
        fault = _NO_FAULT if bool(routing.logits.detach().isfinite().all()) else _NOT_FINITE
        slots = self.ordering.slots(routing.experts.flatten())
        kept = self._kept(slots, routing.weights)
        order = self.ordering.order(slots, kept)
        mine = self.ordering.counts(slots, kept)
        choice = self._chosen(routing, order, *self._announce(tokens, fault, mine))
        if self.router.training:
            self.router.count(routing.experts)
        received = sum(sum(rows.receives) for rows in choice.rows)
        computed = sum(sum(grouped.counts) for grouped in choice.grouped)
        dropped = slots.numel() - order.numel() + received - computed
        self.tally.add(routing.experts, computed, dropped)
        self._told = dropped, slots.numel()
        return choice, routing

    def _kept(self, slots: Tensor, weights: Tensor) -> Tensor | None:
        """Which choices travel; None: all of them."""
        capacity = self.capacity
        if capacity is None or capacity.drop == "after":
            return None
        most = capacity.rows(slots.numel(), self.router.experts, float(self.factor))
        return kept_within(slots, weights.detach().flatten(), self.router.experts, most, capacity.priority)

    def _announce(self, tokens: Tensor, fault: int, mine: Tensor | None) -> tuple[list[list[int]], Announced]:
        """Tell each rank what comes for its experts, and look at what all have told.

        Raises:
            CompositionError, StepError: what one of the ranks has found.
        """
        ranks, local = self.axis.size, self.ordering.local
        dropped, chosen = self._told
        choices_now = 0 if mine is None else tokens.shape[0] * self.router.k
        head = torch.tensor([fault, _number(tokens.dtype), dropped, chosen, choices_now], device=tokens.device)
        counts = torch.zeros((ranks, local), dtype=torch.int64, device=tokens.device) if mine is None else mine
        words = torch.cat([head.expand(ranks, _HEAD), counts], dim=1)
        told = self.axis.run(announce(words, self.axis.node), self.tally.traffic)
        self._look_at(told.words[:, :_HEAD].tolist(), tokens.dtype)
        return words.tolist(), told

    def _look_at(self, heads: list[list[int]], dtype: torch.dtype) -> None:
        for rank, head in enumerate(heads):
            if head[_FAULT] == _NOT_FINITE:
                raise StepError(
                    f"rank {rank} of the axis has scores of experts that are NaN or infinite: look at its input and at "
                    "the router's weight there, and lower the learning rate or add z_loss"
                )
            if head[_FAULT] == _WIDTH:
                raise CompositionError(
                    f"rank {rank} of the axis has tokens of another width than {self.router.hidden}, which the router "
                    "was made for: give every rank tokens of that width"
                )
            if head[_DTYPE] != _number(dtype):
                raise CompositionError(
                    f"rank {rank} of the axis has tokens of another dtype than the {dtype} of this rank (rank "
                    f"{self.axis.place}): use one dtype, or autocast, on all of them"
                )
        if self.capacity is not None and self.training:
            dropped, chosen = (sum(head[word] for head in heads) for word in (_DROPPED, _CHOSEN))
            self.factor.fill_(self.capacity.next_factor(float(self.factor), dropped, chosen))

    def _chosen(self, routing: Routing, order: Tensor, mine: list[list[int]], told: Announced) -> RoutedChoice:
        """The choice, with the rows of each chunk."""
        parts = [slice(_HEAD + first, _HEAD + stop) for first, stop in self.ordering.spans]
        rows = tuple(rows_of(mine, told, self.axis.place, part) for part in parts)
        most = self._most(told)
        grouped = tuple(self.ordering.grouped(told.words[:, part], most) for part in parts)
        return RoutedChoice(routing.experts, routing.noise, order, rows, grouped, self._draws)

    def _most(self, told: Announced) -> int | None:
        """Rows that an expert takes of what has arrived; None: all."""
        if self.capacity is None or self.capacity.drop == "before":
            return None
        choices_of_all = int(told.words[:, _CHOICES].sum())
        return self.capacity.rows(choices_of_all, self.router.experts, float(self.factor))

    def _agree(self, tokens: Tensor) -> None:
        """Compare the layer among ranks before its first exchange, whose size depends on it.

        Raises:
            CompositionError: on every rank, with what differs.
        """
        named = {
            "hidden": self.router.hidden,
            "experts": self.router.experts,
            "choices of a token": self.router.k,
            "chunks": self.chunks,
            "ranks of a node": self.axis.node or 0,
            "capacity": self.capacity,
            "payloads": self.codecs,
        }
        self.axis.require_agreement(named, "were made with", "make the layer alike on all ranks", tokens.device)
        self._agreed = True

    # The exchange ------------------------------------------------------------------------------------------------

    def _routed(self, tokens: Tensor, routing: Routing, choice: RoutedChoice) -> Tensor:
        """Send tokens to their experts, and add up what comes back."""
        rows = _Spread.apply(tokens, choice.order, self.router.k)
        pieces = rows.split([sum(each.sends) for each in choice.rows])
        there = [self._passage(choice, chunk, "there") for chunk in range(self.chunks)]
        back = [self._passage(choice, chunk, "back") for chunk in range(self.chunks)]
        on_their_way = [passage.start(piece) for passage, piece in zip(there, pieces, strict=True)]
        shared = None if self.shared is None else self.shared(tokens)
        returning: list[Tensor] = []
        for chunk, started in enumerate(on_their_way):
            received = there[chunk].finish(started)
            returning.append(back[chunk].start(self._computed(received, choice, chunk)))
        returned = torch.cat([passage.finish(each) for passage, each in zip(back, returning, strict=True)])
        combined = _combined(returned, routing.weights, choice.order)
        return combined if shared is None else combined + shared

    def _passage(self, choice: RoutedChoice, chunk: int, way: Any) -> Passage:
        name = "dispatch" if way == "there" else "combine"
        key = Key(self.router.seed, choice.draw, name=f"{chunk}", stage=name, layer=str(self._layer))
        codec, gradient_codec = self.codecs[name], self.codecs[f"{name}_gradient"]
        return Passage(self.axis, choice.rows[chunk], way, codec, gradient_codec, key, self.tally.traffic)

    def _computed(self, received: Tensor, choice: RoutedChoice, chunk: int) -> Tensor:
        """What the experts of a chunk make of rows, in the order in which these came; zero for dropped ones."""
        grouped, (first, _) = choice.grouped[chunk], self.ordering.spans[chunk]
        rows = _scaled_gradient(received.index_select(0, grouped.order), self.axis.size)
        outputs = _scaled_gradient(self.experts(rows, grouped.counts, first), 1 / self.axis.size)
        return received.new_zeros(received.shape).index_copy(0, grouped.order, outputs.to(received.dtype))


def _number(dtype: torch.dtype) -> int:
    return zlib.crc32(str(dtype).encode())


def _nearness(near: float, axis: ExchangeAxis, experts: int) -> Tensor | None:
    """What is added to scores of experts that are near: all of it on this rank, half of it on its node."""
    if not near:
        return None
    owners = torch.arange(experts) // (experts // axis.size)
    mine = (owners == axis.place).double()
    node = (owners // axis.node == axis.place // axis.node).double() if axis.node else mine
    return near * (mine + node) / 2


def _combined(returned: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """y_t = sum over j of weights_tj times the output of choice j, which is zero where it was dropped."""
    tokens, k = weights.shape
    outputs = returned.new_zeros((tokens * k, returned.shape[1])).index_copy(0, order, returned)
    return torch.bmm(weights.to(outputs.dtype).unsqueeze(1), outputs.view(tokens, k, returned.shape[1])).squeeze(1)


class _Spread(torch.autograd.Function):
    """Rows of tokens in the order of choices. The gradients of a token's rows are added up in the order of its choices,
    so that a GPU gives the same bits each time, as adding by index would not."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape, ctx.k = tokens.shape, k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), (order,), (tokens, width) = grads, ctx.saved_tensors, ctx.shape
        of_choices = grad.new_zeros((tokens * ctx.k, width)).index_copy(0, order, grad)
        return of_choices.view(tokens, ctx.k, width).sum(1), None, None


class _ScaledGradient(torch.autograd.Function):
    """x, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def _scaled_gradient(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else _ScaledGradient.apply(x, factor)  # type: ignore[return-value]
