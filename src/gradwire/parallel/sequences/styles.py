"""Styles for PyTorch's `parallelize_module` whose linear layers hide the exchange of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import override

from gradwire.codecs.base import Codec
from gradwire.core.errors import AttachError
from gradwire.parallel.exchange import ExchangeAxis
from gradwire.parallel.sequences.layouts import Contiguous
from gradwire.parallel.sequences.linear import gathered_linear, scattered_linear

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class OverlappedColwiseParallel(ParallelStyle):
    """`ColwiseParallel(input_layouts=Shard(1))` of a `torch.nn.Linear`, by `gathered_linear`.

    Parameters become the same DTensors, so state dicts, optimizers and checkpoints do not change. The layer takes the
    positions of this rank, as a tensor or as a DTensor of `SequenceParallel`, and gives all positions of its rows as a
    tensor. Its `forward` is replaced.

    Args:
        axis: the ranks of the mesh that `parallelize_module` is given.
        layout: which positions each rank has.
        codec: of positions as they are gathered, e.g. "int8:64"; None sends them as they are.

    Raises:
        AttachError: a module that is no `torch.nn.Linear`, or a mesh of other ranks than the axis.

    >>> OverlappedColwiseParallel(ExchangeAxis(), Contiguous(6, 1)).codec is None
    True
    """

    def __init__(self, axis: ExchangeAxis, layout: Contiguous, *, codec: Codec | str | None = None) -> None:
        super().__init__()
        self.axis, self.layout, self.codec = axis, layout, codec

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _distributed(module, device_mesh, self.axis, Shard(0), Shard(0))

        def forward(x: Tensor) -> Tensor:
            return gathered_linear(_local(x), *_parameters(linear), self.axis, self.layout, codec=self.codec)

        linear.forward = forward  # type: ignore[method-assign]
        return linear


class OverlappedRowwiseParallel(ParallelStyle):
    """`RowwiseParallel(output_layouts=Shard(1))` of a `torch.nn.Linear`, by `scattered_linear`.

    Parameters become the same DTensors. The layer takes all positions of its columns, and gives those of this rank,
    both as tensors. Its `forward` is replaced.

    Args:
        axis: the ranks of the mesh that `parallelize_module` is given.
        layout: which positions each rank has.
        gradient_codec: of gradients as they are gathered; None sends them as they are.

    Raises:
        AttachError: as for `OverlappedColwiseParallel`.

    >>> OverlappedRowwiseParallel(ExchangeAxis(), Contiguous(6, 1)).layout.length
    6
    """

    def __init__(self, axis: ExchangeAxis, layout: Contiguous, *, gradient_codec: Codec | str | None = None) -> None:
        super().__init__()
        self.axis, self.layout, self.gradient_codec = axis, layout, gradient_codec

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _distributed(module, device_mesh, self.axis, Shard(1), Replicate())

        def forward(x: Tensor) -> Tensor:
            of_ranks = self.axis, self.layout
            return scattered_linear(_local(x), *_parameters(linear), *of_ranks, gradient_codec=self.gradient_codec)

        linear.forward = forward  # type: ignore[method-assign]
        return linear


def _distributed(
    module: nn.Module, mesh: DeviceMesh, axis: ExchangeAxis, of_weight: Placement, of_bias: Placement
) -> nn.Linear:
    """A linear layer whose parameters are split over the ranks of a mesh.

    Raises:
        AttachError: no linear layer, or a mesh of another size than the axis.
    """
    if not isinstance(module, nn.Linear):
        raise AttachError(f"{type(module).__name__} is no torch.nn.Linear: give other modules one of PyTorch's styles")
    if mesh.size() != axis.size:
        raise AttachError(
            f"the mesh has {mesh.size()} ranks, and the axis of the style {axis.size}: make the axis of this mesh, as "
            'ExchangeAxis(mesh["tp"])'
        )
    for name, placement in (("weight", of_weight), ("bias", of_bias)):
        parameter: nn.Parameter | None = getattr(module, name, None)
        if parameter is not None:
            part = distribute_tensor(parameter, mesh, [placement])
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    return module


def _parameters(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of this rank."""
    bias: Tensor | None = getattr(linear, "bias", None)
    return _local(linear.weight), None if bias is None else _local(bias)


def _local(x: Tensor) -> Tensor:
    """The part of a tensor that this rank has."""
    return x.to_local() if isinstance(x, DTensor) else x
