"""What a model that was given to `fully_shard` is made of, as far as `attach` must know it.

FSDP2 hands over buffers without names. What lies in them is said by its parameter groups, which are private: this
module reads them, so it is what another version of PyTorch would have to be compared with. `profiling/sharded_hook.py`
reads which collective a group has, and does without where it finds none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.core.errors import AttachError
from gradwire.session.names import canonical_name, is_fsdp2, require_apart, require_served

PYTORCH = "2.13"
"""The version whose parameter groups this module reads."""


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A parameter of a group, cut along its first dimension into chunks of equal size, the last ones padded.

    Attributes:
        name: without what wrappers add.
        shape: of the whole.
        chunk: elements of a chunk, padding included.
        trained: whether it required a gradient at `attach`.
        gathered: the dtype that it is gathered in.
        held: FSDP2's own object for it.
    """

    name: str
    shape: tuple[int, ...]
    chunk: int
    trained: bool
    gathered: torch.dtype
    held: Any

    @property
    def has_gradient(self) -> bool:
        """Whether the backward pass, or one before it that was not synchronised, made a gradient that is still here."""
        whole = getattr(self.held, "_unsharded_param", None)
        return whole is not None and (self.held.unsharded_accumulated_grad is not None or whole.grad is not None)

    @property
    def needs_gradient(self) -> bool:
        """Whether it was used in a forward pass and requires a gradient now."""
        whole = getattr(self.held, "_unsharded_param", None)
        return whole is not None and whole.requires_grad

    @property
    def shard(self) -> Tensor:
        """This rank's shard, in full precision."""
        return self.held.sharded_param

    def local_bytes(self) -> bytes:
        """The bits of this rank's shard."""
        local: Tensor = self.held.sharded_param._local_tensor
        return local.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that FSDP2 communicates together.

    Attributes:
        module: one that `fully_shard` was called on.
        held: FSDP2's own object for the group.
        parameters: in the order of its buffers.
    """

    module: Any
    held: Any
    parameters: tuple[ShardedParameter, ...]

    @property
    def trained(self) -> list[ShardedParameter]:
        """Those that required gradients at `attach`."""
        return [parameter for parameter in self.parameters if parameter.trained]

    def about_to_reduce(self) -> list[ShardedParameter]:
        """The parameters whose gradients FSDP2 is about to reduce, if it is asked before it begins."""
        zeros = bool(self.held.reduce_scatter_unused_params)
        return [p for p in self.parameters if p.has_gradient or (zeros and p.needs_gradient)]

    @property
    def scatter(self) -> Any:
        """What scatters its reduced gradients."""
        return self.held._reduce_scatter_comm

    @property
    def divisor(self) -> float | None:
        """What `set_gradient_divide_factor` was given."""
        return self.held.gradient_divide_factor

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that share the group's parameters."""
        return self.held.mesh_info.shard_process_group

    @property
    def mesh(self) -> Any:
        """The mesh of these ranks."""
        return self.held.mesh_info.mesh

    @property
    def device(self) -> torch.device:
        """The device that it computes on."""
        return self.held.device


def groups_of(model: nn.Module) -> list[Group]:
    """Return the parameter groups of a model, in the order of its modules.

    Raises:
        AttachError: a model that cannot be served, with the reason and what to do.
    """
    prefixes: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        prefixes.setdefault(module, f"{name}." if name else "")
    found = [_group(state, module, prefixes) for state, module in _states(model)]
    groups = [group for group in found if group is not None]
    require_apart({name: canonical_name(name) for name in _names(groups, prefixes)})
    _check(groups)
    return groups


def root_state(model: nn.Module) -> Any:
    """FSDP2's state of a module that `fully_shard` was called on."""
    held: Any = model
    return held._get_fsdp_state()


def held_groups(model: nn.Module) -> set[int]:
    """What identifies the parameter groups that a model has now."""
    return {id(held) for held in _held(model)}


def _states(model: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Every state once, with a module that has it."""
    seen: set[int] = set()
    for module in model.modules():
        if is_fsdp2(module) and id(state := root_state(module)) not in seen:
            seen.add(id(state))
            yield state, module


def reduced_over(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return along which axes FSDP2 sums gradients: the shards of a copy, and with HSDP the copies of a shard.

    Where parts of a model are sharded over different ranks, the axes are those with the most ranks.
    """
    return max((_axes(held.mesh_info) for held in _held(model)), key=lambda axes: math.prod(a.size() for a in axes))


def divisor_of(model: nn.Module, copies: int = 1) -> float:
    """Return what the sum of the gradients of all ranks is divided by.

    Args:
        model: the root.
        copies: between which somebody else averages what FSDP2 has reduced.

    Raises:
        AttachError: parts of the model are divided by different numbers, so that no one factor scales a loss.
    """
    divisors = {_divisor(held, copies) for held in _held(model)}
    if len(divisors) > 1:
        numbers = ", ".join(f"{divisor:g}" for divisor in sorted(divisors))
        raise AttachError(
            f"parts of this model divide their gradients by different numbers ({numbers}), so no one "
            "factor scales the loss: call set_gradient_divide_factor with one number on all parts"
        )
    return divisors.pop()


def _held(model: nn.Module) -> Iterator[Any]:
    """FSDP2's own objects for the groups."""
    return (held for state, _ in _states(model) for held in state._fsdp_param_groups)


def _axes(info: Any) -> list[dist.ProcessGroup]:
    groups = (getattr(info, name, None) for name in ("shard_process_group", "replicate_process_group"))
    return [group for group in groups if group is not None]


def _divisor(held: Any, copies: int) -> float:
    """What the gradients of a group are divided by: what it was told, or the number of ranks."""
    told: float | None = held.gradient_divide_factor
    return float(copies * math.prod(axis.size() for axis in _axes(held.mesh_info))) if told is None else float(told)


def forget_accumulated(model: nn.Module) -> None:
    """Drop gradients that passes have left without reducing them, or without summing them between copies."""
    for held in _held(model):
        held._partial_reduce_output = None
        for parameter in held.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                whole.grad = None


def _group(state: Any, module: nn.Module, prefixes: dict[nn.Module, str]) -> Group | None:
    held_groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if held_groups is None:
        raise AttachError(f"FSDP2 of PyTorch {torch.__version__} is not known here: PyTorch {PYTORCH} is needed")
    where = f" (at {name.rstrip('.')!r})" if (name := prefixes.get(module, "")) else ""
    if len(held_groups) > 1:
        raise AttachError(
            f"this module has {len(held_groups)} parameter groups{where}, for which FSDP2 takes no communication of "
            "others: let shard_placement_fn return the same mesh for all of its parameters"
        )
    if not held_groups:
        return None
    (held,) = held_groups
    _check_mesh(held, where)
    return Group(module, held, tuple(_parameter(held, p, prefixes) for p in held.fsdp_params))


def _check_mesh(held: Any, where: str) -> None:
    """Refuse meshes of other kinds."""
    kind = type(held.mesh_info).__name__
    if kind == "HSDPMeshInfo":
        raise AttachError(
            f"this module is sharded over a mesh of two dimensions{where}, between whose replicas FSDP2 sums "
            'uncompressed: call fully_shard with mesh=mesh["shard"] and attach with replicate=mesh["replicate"]'
        )
    if kind != "FSDPMeshInfo":
        raise AttachError(f"this module is not sharded but replicated{where}: use DistributedDataParallel")


def _parameter(group: Any, held: Any, prefixes: dict[nn.Module, str]) -> ShardedParameter:
    name = canonical_name(_full_name(held, prefixes))
    if held.is_dtensor:
        raise AttachError(f"{name!r} was a DTensor before fully_shard (tensor parallel), which is not served yet")
    trained = bool(held.sharded_param.requires_grad)
    if held.sharded_param.device.type == "meta":
        raise AttachError(f"{name!r} is on the meta device: call to_empty and initialise the model before attach")
    if trained:
        require_served(name, held.sharded_param.dtype, group.device)
        if held.fsdp_placement.dim != 0:
            raise AttachError(
                f"{name!r} is sharded along dimension {held.fsdp_placement.dim}, and served is 0: leave "
                "shard_placement_fn out"
            )
    dtype = held.sharded_param.dtype
    cast = group.mp_policy.param_dtype if dtype.is_floating_point else None
    shape, chunk = tuple(held._orig_size), int(held.padded_sharded_param_size.numel())
    return ShardedParameter(name, shape, chunk, trained, cast or dtype, held)


def _full_name(held: Any, prefixes: dict[nn.Module, str]) -> str:
    info = held._module_info
    return prefixes[info.module] + info.param_name


def _names(groups: Iterable[Group], prefixes: dict[nn.Module, str]) -> Iterator[str]:
    for group in groups:
        for parameter in group.parameters:
            yield _full_name(parameter.held, prefixes)


def _check(groups: list[Group]) -> None:
    """Refuse what concerns several groups, and what was done before."""
    if not any(group.trained for group in groups):
        raise AttachError("no parameter of this model requires a gradient: there is nothing to combine")
    ranks = dist.get_process_group_ranks(groups[0].shard_group)
    for group in groups:
        if dist.get_process_group_ranks(group.shard_group) != ranks:
            raise AttachError("parts of this model are sharded over different ranks: give fully_shard one mesh")
        for comm in (group.held._reduce_scatter_comm, group.held._all_gather_comm):
            if not type(comm).__name__.startswith("Default"):
                raise AttachError(
                    f"this model communicates by {type(comm).__name__} already: close the session of an earlier "
                    "attach, or leave set_custom_reduce_scatter, set_custom_all_gather and their like out"
                )
        if group.held._all_reduce_hook is not None:
            raise AttachError("this model has an all-reduce hook already: close the session of an earlier attach first")
        for parameter in group.parameters:
            if parameter.has_gradient or parameter.shard.grad is not None:
                raise AttachError(
                    f"{parameter.name!r} has a gradient already: attach before the first backward pass, or after "
                    "optimizer.zero_grad()"
                )
