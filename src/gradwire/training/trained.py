"""The tensors of a training: what this rank has of each parameter, and what becomes of its gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from gradwire.parallel.moe import expert_parameters
from gradwire.session import Session
from gradwire.tasks.task import stream
from gradwire.training.mesh import TrainingMesh

Kind = Literal["whole", "tp", "ep"]
"""What a rank has of a parameter: all of it, a part of it along tp, or some of its experts."""

KINDS: tuple[Kind, ...] = ("whole", "tp", "ep")


@dataclass(frozen=True)
class TrainedTensor:
    """What this rank has of a parameter.

    Args:
        parameter: of the model; a DTensor where PyTorch has split it.
        local: a parameter over the same memory, without a mesh: what optimizers step.
        kind: of the part.
        dim: the dimension that is split.
    """

    parameter: nn.Parameter
    local: nn.Parameter
    kind: Kind
    dim: int = 0

    def take_gradient(self) -> Tensor:
        """The gradient of this rank's part, zeros where there is none. It is moved to `local`."""
        given = self.parameter.grad
        found = given.to_local() if isinstance(given, DTensor) else given
        self.parameter.grad = None
        self.local.grad = torch.zeros_like(self.local) if found is None else found
        return self.local.grad

    def saved(self, tensor: Tensor, mesh: TrainingMesh) -> Tensor:
        """A tensor shaped like `local`, as `torch.distributed.checkpoint` must see it: with what other ranks have."""
        if self.kind == "whole":
            return tensor
        return DTensor.from_local(tensor, mesh.mesh[self.kind], [Shard(self.dim)], run_check=False)


def trained_tensors(stages: Iterable[nn.Module]) -> dict[str, TrainedTensor]:
    """The tensors of the stages of a rank, by the names that they have in the whole model."""
    found: dict[str, TrainedTensor] = {}
    for stage in stages:
        experts = expert_parameters(stage)
        for name, parameter in stage.named_parameters():
            if isinstance(parameter, DTensor):
                (placement,) = parameter.placements
                assert isinstance(placement, Shard), "styles replicate biases only, and there are none"
                local = nn.Parameter(parameter.to_local().detach())
                found[name] = TrainedTensor(parameter, local, "tp", placement.dim)
            else:
                found[name] = TrainedTensor(parameter, parameter, "ep" if name in experts else "whole")
    return found


class CombinedGradients:
    """Makes the gradients of all ranks one: sums over tp, then means over data-parallel ranks by a method.

    Parameters that ranks of tp have whole, and those that they have parts of, travel in sessions of their own. A method
    that looks at several tensors at once would else make different whole ones of different parts.

    Args:
        mesh: of the training.
        tensors: of this rank, by name.
        deadline_s: seconds after which a silent rank is an error.

    Attributes:
        sessions: by the kind of their tensors; none for a kind that one rank alone trains.
    """

    def __init__(self, mesh: TrainingMesh, tensors: Mapping[str, TrainedTensor], deadline_s: float) -> None:
        self.mesh, self.tensors = mesh, tensors
        self.sessions: dict[Kind, Session] = {}
        configuration = mesh.configuration
        for kind in KINDS:
            axes = ("dp", "cp") if kind == "ep" else ("dp", "ep", "cp")
            group, members = mesh.group_of(*axes), self._of(kind)
            if group.size() > 1 and members:
                named = {name: each.local.detach() for name, each in members.items()}
                part = {"whole": 0, "tp": mesh.tp.place, "ep": mesh.ep.place}[kind]  # other parts draw other numbers
                seed = stream(configuration.data.seed, part) if part else configuration.data.seed
                method = configuration.dp.method
                self.sessions[kind] = Session(named, method, group=group, seed=seed, deadline_s=deadline_s)

    def _of(self, kind: Kind) -> dict[str, TrainedTensor]:
        return {name: each for name, each in self.tensors.items() if each.kind == kind}

    def combine(self) -> None:
        """Take the gradients of the model, combine them in place, and leave them to the optimizer's parameters."""
        gradients = {name: each.take_gradient() for name, each in self.tensors.items()}
        if self.mesh.splits_positions:
            self._sum_over_positions([gradients[name] for name, each in self.tensors.items() if each.kind != "tp"])
        for kind, session in self.sessions.items():
            session.reduce_({name: gradients[name] for name in self._of(kind)})

    def _sum_over_positions(self, gradients: Sequence[Tensor]) -> None:
        """Ranks of tp have other positions where these parameters are used, so each has a part of the gradient."""
        total = self.mesh.tp.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, total.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def squares(self) -> dict[Kind, float]:
        """The squared norm of what this rank has of each kind."""
        found = dict.fromkeys(KINDS, 0.0)
        for each in self.tensors.values():
            if each.local.grad is not None:
                found[each.kind] += float(each.local.grad.double().square().sum())
        return found

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for each in self.tensors.values():
            if each.local.grad is not None:
                each.local.grad.mul_(factor)

    def close(self) -> None:
        """Communicate no more."""
        for session in self.sessions.values():
            session.close()
