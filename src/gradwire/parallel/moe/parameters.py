"""Expert parameters beside data parallelism: other ranks hold other experts, so each stands on an axis of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.adapters.unwrapped import HookedSession, attach_unwrapped
from gradwire.core.errors import AttachError, CompositionError
from gradwire.parallel.moe.figures import expert_report
from gradwire.parallel.moe.layer import MoE
from gradwire.reducers.base import Reducer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of all experts of a model, by name.

    >>> from gradwire.parallel.moe import ExchangeAxis, Experts, SoftmaxTopK
    >>> axis = ExchangeAxis()
    >>> layer = MoE(SoftmaxTopK(8, 4, 2), Experts(8, 16, 4, axis), axis)
    >>> list(expert_parameters(nn.Sequential(nn.Linear(8, 8), layer)))
    ['1.experts.w_in', '1.experts.w_out']
    """
    return {
        f"{place}.{name}".lstrip("."): parameter
        for place, experts in _experts(model).items()
        for name, parameter in experts.named_parameters()
    }


def leave_experts_to_their_axis(model: nn.Module) -> nn.Module:
    """Have `DistributedDataParallel` ignore the experts of a model, whose gradients it would average with other ones.

    Call it before the model is wrapped; it returns the model.

    Raises:
        CompositionError: a model without experts, or one that is wrapped already.

    Example:
        ddp = DistributedDataParallel(leave_experts_to_their_axis(model))
        gradwire.attach(ddp, "int8")  # everything but the experts
        attach_experts(model, "int8", mesh["expert_data"])
    """
    if isinstance(model, DistributedDataParallel):
        raise CompositionError("this model is wrapped already: call leave_experts_to_their_axis before DDP is made")
    names = list(_required(model))
    ignored = [*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # pyright: ignore[reportPrivateUsage]
    return model


def attach_experts(
    model: nn.Module, method: Reducer | str, ranks: DeviceMesh | dist.ProcessGroup, **options: Any
) -> HookedSession:
    """Let a method combine the gradients of experts among the ranks that hold the same ones.

    Each gradient then is that of the mean loss of all ranks: a layer divides what comes from the ranks of its expert
    axis, and the method takes the mean over `ranks`. It communicates while the backward pass runs. The report of the
    session tells load, drops and bytes of the layers too.

    Args:
        model: with layers of experts, whose weights are the same on all of `ranks`.
        method: a reducer, or a spec such as "int8".
        ranks: an axis of a mesh, or a group: those that hold the same experts.
        options: `optimizer`, `seed`, `deadline_s` and others of `gradwire.attach`.

    Raises:
        AttachError: a mesh of several dimensions, or ranks that begin with different weights.
        CompositionError: a model without experts.
        CommunicationError: a rank that did not attach within `deadline_s`.
    """
    _required(model)
    group = ranks if isinstance(ranks, dist.ProcessGroup) else _group(ranks)
    experts = nn.Module()
    for place, module in _experts(model).items():
        experts.add_module(place.replace(".", "/"), module)
    optimizer = options.pop("optimizer", None)
    session = attach_unwrapped(experts, method, optimizer, group=group, **options)
    session.add_to_report(lambda: expert_report(model))
    return session


def _group(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        raise AttachError(f"a mesh of {mesh.ndim} dimensions is no axis: pass one of them")
    return mesh.get_group()


def _required(model: nn.Module) -> dict[str, nn.Parameter]:
    found = expert_parameters(model)
    if not found:
        raise CompositionError(
            f"{type(model).__name__} has no layer of experts: make one with gradwire.parallel.moe.MoE"
        )
    return found


def _experts(model: nn.Module) -> dict[str, nn.Module]:
    """The experts of each layer, by their place in the model, without what DDP adds."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        f"{name}.experts".lstrip("."): module.experts
        for name, module in inner.named_modules()
        if isinstance(module, MoE)
    }
