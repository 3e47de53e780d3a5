"""Bytes that training a module holds on a rank under DDP or FSDP2, estimated before any rank is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.core.errors import SpecError
from gradwire.core.grain import ParameterSpec
from gradwire.core.state import walk
from gradwire.drivers.cost import model_specs, without_data
from gradwire.drivers.parts import Chunked, plan_parts
from gradwire.drivers.plan import Unit, plan
from gradwire.planning.gradients import method_of, shard_method_of
from gradwire.reducers.step import Step

ADAM_MOMENTS = 2


class HeldTraining(NamedTuple):
    """Bytes that one rank holds, by kind.

    Attributes:
        parameters: those of the rank, in the dtype that they have.
        gradients: of as many elements. DDP's buckets are these where it was made with `gradient_as_bucket_view=True`,
            and as many bytes more without.
        optimizer: moments, in the parameters' dtype.
        residuals, factors, other_states, buffers: of the method, as `session.report()` tells them.
        activations: that are kept for the backward pass.
    """

    parameters: int
    gradients: int
    optimizer: int
    residuals: int
    factors: int
    other_states: int
    buffers: int
    activations: int

    @property
    def method(self) -> int:
        """All that the method holds."""
        return self.residuals + self.factors + self.other_states + self.buffers

    @property
    def between_steps(self) -> int:
        """What is held after a step of the optimizer, before gradients are set to None."""
        return sum(self) - self.activations

    @property
    def total(self) -> int:
        """What is held at the end of the forward pass, if gradients are kept."""
        return sum(self)


def held_by_training(
    model: nn.Module,
    method: str | None = None,
    ranks: int = 2,
    blocks: Sequence[nn.Module] | None = None,
    loss: Callable[[nn.Module], Tensor] | None = None,
    moments: int = ADAM_MOMENTS,
) -> HeldTraining:
    """Estimate what the fullest rank holds that trains a module with a method.

    The method's states and buffers are those of its own plan, made on tensors without data. What PyTorch holds besides
    for a while is left out: parameters that FSDP2 has gathered, and the memory that `session.report()` calls the pool.

    Args:
        model: whose parameters are trained. It is not changed.
        method: a spec, as `gradwire.attach` takes it; None: PyTorch alone.
        ranks: how many.
        blocks: modules inside of the model that `fully_shard` is called on, before the model itself; None: DDP.
        loss: a forward pass whose activations are counted; None: none are.
        moments: that the optimizer keeps of each element: 2 of Adam, 1 of SGD with momentum, 0 of SGD.

    Raises:
        SpecError, CompositionError: fewer ranks than 1, a method that is unknown, or has no shards where FSDP2 needs
            some.

    >>> found = held_by_training(nn.Linear(256, 256, bias=False), "int4", ranks=4)
    >>> found.parameters, found.gradients, found.optimizer, found.residuals, found.buffers
    (262144, 262144, 524288, 327680, 262144)
    """
    if ranks < 1 or moments < 0:
        raise SpecError(
            f"ranks={ranks} and moments={moments} make no training: give 1 rank or more, and 0 moments or more"
        )
    parts = None if blocks is None else list(_parts(model, blocks, ranks))
    if parts is None:
        own = sum(p.nbytes for p in model.parameters())
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    else:
        own = trained = sum(chunked.chunk * chunked.spec.dtype.itemsize for part in parts for chunked in part)
    units: Sequence[Unit] = ()
    if method is not None and parts is None:
        units = plan(model_specs(model), method_of(method)).units
    elif method is not None and parts is not None:
        units = plan_parts(parts, shard_method_of(method), range(ranks)).units
    step = Step(0, 0, ranks)
    leaves = [leaf for unit in units for _, leaf in walk(unit.reducer.init(without_data(unit.grain), step))]
    return HeldTraining(
        parameters=own,
        gradients=trained,
        optimizer=moments * trained,
        residuals=sum(leaf.tensor.nbytes for leaf in leaves if leaf.owed),
        factors=sum(leaf.tensor.nbytes for leaf in leaves if leaf.kind == "matrix" and not leaf.owed),
        other_states=sum(leaf.tensor.nbytes for leaf in leaves if leaf.kind != "matrix" and not leaf.owed),
        # under FSDP2 a buffer is given back after its part, unless a residual lies in it
        buffers=sum(
            unit.grain.numel * unit.grain.dtype.itemsize for unit in units if parts is None or unit.reducer.keeps_input
        ),
        activations=0 if loss is None else saved_bytes(model, loss),
    )


def saved_bytes(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, each piece of memory counted once.

    Args:
        model: whose parameters and buffers do not count.
        loss: the forward pass.

    >>> inputs = torch.zeros(8, 16)
    >>> saved_bytes(nn.Linear(16, 4), lambda model: model(inputs).tanh().sum()) == 4 * (8 * 16 + 8 * 4)
    True
    """
    own = {each.untyped_storage().data_ptr() for each in chain(model.parameters(), model.buffers())}
    found: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no memory is given to another tensor meanwhile

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = loss(model)
    del result
    return sum(found.values())


def _parts(model: nn.Module, blocks: Sequence[nn.Module], ranks: int) -> Iterator[list[Chunked]]:
    """The parameters of each block, and those that are in none, as FSDP2 cuts them: rows of the first dimension."""
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    specs = {id(p): spec for p, spec in zip(_trained(model), model_specs(model), strict=True)}
    yield [_chunked(specs[id(p)], ranks) for p in _trained(model) if id(p) not in inside]
    for block in blocks:
        yield [_chunked(specs[id(p)], ranks) for p in _trained(block)]


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _chunked(spec: ParameterSpec, ranks: int) -> Chunked:
    rows = spec.shape[0] if spec.shape else 1
    return Chunked(spec, -(-rows // ranks) * (spec.numel // max(1, rows)))
