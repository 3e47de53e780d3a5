"""The mesh of a training: its axes, and which groups of ranks share what."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gradwire.drivers.groups import new_group
from gradwire.parallel.exchange import DEADLINE_S, ExchangeAxis
from gradwire.parallel.sequences import Contiguous
from gradwire.training.configuration import AXES, TrainingConfiguration


@dataclass
class TrainingMesh:
    """A `DeviceMesh` with the axes of `AXES`, all of them, and what a training asks of it.

    Every rank makes it at the same place, in the default group.

    Args:
        configuration: whose axes.
        device_type: of the mesh, "cpu" or "cuda".
        deadline_s: seconds after which a silent rank is an error.

    Attributes:
        mesh: of PyTorch.
        ep, cp, tp: the ranks of these axes.
        world: all ranks.
        tokens: all ranks whose positions differ, for counts of experts.

    Raises:
        ConfigurationError: another number of ranks.
    """

    configuration: TrainingConfiguration
    device_type: str = "cpu"
    deadline_s: float = DEADLINE_S
    mesh: DeviceMesh = field(init=False)
    ep: ExchangeAxis = field(init=False)
    cp: ExchangeAxis = field(init=False)
    tp: ExchangeAxis = field(init=False)
    world: ExchangeAxis = field(init=False)
    tokens: ExchangeAxis = field(init=False)

    def __post_init__(self) -> None:
        self.configuration.require_ranks(dist.get_world_size())
        self.mesh = init_device_mesh(self.device_type, self.configuration.sizes, mesh_dim_names=AXES)
        self.world = self._axis(None)
        self.ep, self.cp, self.tp = (self._axis(self.mesh[name]) for name in ("ep", "cp", "tp"))
        sharing = ("dp", "ep", "cp", "tp") if self.splits_positions else ("dp", "ep", "cp")
        self.tokens = self._axis(self.group_of(*sharing))

    def _axis(self, ranks: DeviceMesh | dist.ProcessGroup | None) -> ExchangeAxis:
        return ExchangeAxis(ranks, deadline_s=self.deadline_s)

    def group_of(self, *axes: str) -> dist.ProcessGroup:
        """This rank and those that differ from it in some of the axes only."""
        part = self.mesh[axes]
        # `_flatten` is private in PyTorch 2.13, and is what its own documentation shows for axes that are joined.
        flat = part._flatten("_".join(axes)) if len(axes) > 1 else part  # pyright: ignore[reportPrivateUsage]
        return flat.get_group()

    def patient_group(self, axis: str) -> dist.ProcessGroup:
        """A new group of the ranks of an axis, which waits for `deadline_s`. That of the mesh would wait 30 minutes."""
        whole = dist.group.WORLD
        assert isinstance(whole, dist.ProcessGroup)
        return new_group(whole, dist.get_process_group_ranks(self.group_of(axis)), self.deadline_s, "MeshTrainer")

    def place(self, axis: str) -> int:
        """Of this rank along an axis."""
        return self.mesh.get_local_rank(axis)

    @property
    def splits_positions(self) -> bool:
        """Whether ranks of tp have other positions between their matrices."""
        return self.configuration.tp.sequence and self.configuration.tp.ranks > 1

    # Positions -------------------------------------------------------------------------------------------------------

    @property
    def between(self) -> Contiguous:
        """Which of these each rank of tp has between the matrices of layers."""
        ranks = self.tp.size if self.splits_positions else 1
        return Contiguous(self.configuration.around.count(self.cp.place), ranks)

    def positions(self) -> Tensor:
        """The positions that this rank has between the matrices of layers."""
        place = self.tp.place if self.splits_positions else 0
        return self.between.shard(self.configuration.around.positions(self.cp.place), place, dim=0)

    def sequences(self) -> Tensor:
        """Which sequences of a step this rank has, one micro-batch after the other.

        A micro-batch has the same sequences under every layout, since the balance of experts depends on them.
        """
        data, ranks = self.configuration.data, self.configuration.data_ranks
        place = self.place("dp") * self.configuration.ep.ranks + self.ep.place
        return torch.arange(data.batch).view(data.micro_batches, ranks, -1)[:, place].flatten()
