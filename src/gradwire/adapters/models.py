"""Which models `attach` serves, and what their parameters are called without the wrappers around them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from gradwire.core.errors import AttachError
from gradwire.session.names import TrainedParameters, canonical_name, named, require_apart, require_served

_HOLDERS = (DistributedDataParallel, nn.DataParallel, AveragedModel)
"""Modules that hold another one under the name `module`, which a model may also give to a part of its own."""


def trained(ddp: DistributedDataParallel) -> dict[Tensor, str]:
    """Name every parameter that DDP communicates, tied weights once and without what wrappers add.

    Raises:
        AttachError: two parameters that would share a name, or one whose `requires_grad` changed after DDP was made.
    """
    ignored: set[str] = set(getattr(ddp, "parameters_to_ignore", ()))
    given = {name: p for name, p in ddp.module.named_parameters() if name not in ignored}
    _require_unchanged(ddp, given)
    holders = [f"{name}.module" for name, module in ddp.module.named_modules() if isinstance(module, _HOLDERS)]
    trained = {name: p for name, p in given.items() if p.requires_grad}
    short = {name: canonical_name(_without_holders(name, holders)) for name in trained}
    require_apart(short)
    return {parameter: short[name] for name, parameter in trained.items()}


def planned(ddp: DistributedDataParallel) -> TrainedParameters:
    """Those that may require gradients in a step: what DDP communicates, and what it was told to ignore."""
    ignored: set[str] = set(getattr(ddp, "parameters_to_ignore", ()))
    others = {canonical_name(name): p for name, p in ddp.module.named_parameters() if name in ignored}
    return TrainedParameters("gradwire.attach", {**named(ddp.module), **others})


def _without_holders(name: str, holders: Iterable[str]) -> str:
    """A name without the `module` of wrappers that stand at `holders`, the innermost first."""
    for path in sorted((holder.lstrip(".") for holder in holders), key=len, reverse=True):
        if name.startswith(f"{path}."):
            name = path.removesuffix("module") + name[len(path) + 1 :]
    return name


def _require_unchanged(ddp: DistributedDataParallel, given: dict[str, Tensor]) -> None:
    """Refuse a model whose parameters DDP would communicate otherwise, were it made now."""
    buckets = ddp.reducer._get_zeros_like_grad_buckets()  # pyright: ignore[reportPrivateUsage]
    has = {parameter for bucket in buckets for parameter in bucket.parameters()}
    for name, parameter in given.items():
        if parameter.requires_grad != (parameter in has):
            verb = (
                "requires a gradient now and did not"
                if parameter.requires_grad
                else "requires no gradient any more and did"
            )
            raise AttachError(
                f"parameter {name!r} {verb} when DistributedDataParallel was made, which decides then what it "
                "communicates; set requires_grad first, then make the DistributedDataParallel, then attach"
            )


def check(ddp: nn.Module) -> None:
    """Refuse a model that cannot be served.

    Raises:
        AttachError: with the reason, and what to do.
    """
    require_no_other_parallelism(ddp)
    if not isinstance(ddp, DistributedDataParallel):
        raise AttachError(f"attach wants a DistributedDataParallel model, got {type(ddp).__name__}; wrap it first")
    if getattr(ddp, "_comm_hooks", None):
        raise AttachError("this model has a communication hook already; DDP takes one, so attach to a new DDP")
    if getattr(ddp, "mixed_precision", None) is not None:
        raise AttachError("DDP's own mixed_precision casts gradients behind the hook; use torch.autocast instead")
    if getattr(ddp, "_use_python_reducer", False):
        raise AttachError("the python_reducer of compiled DDP calls no hooks; compile the module inside DDP instead")
    require_dense(ddp.module)


def check_unwrapped(model: nn.Module) -> None:
    """Refuse a model that nobody wraps and that cannot be served.

    Raises:
        AttachError: with the reason, and what to do.
    """
    require_no_other_parallelism(model)
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            if name == "_orig_mod":
                raise AttachError("attach to the DistributedDataParallel model itself, before or after torch.compile")
            raise AttachError(f"{name!r} of this model is a DistributedDataParallel: wrap the whole model, or no part")
    require_dense(model)


def require_no_other_parallelism(model: nn.Module) -> None:
    """Refuse a model that is trained in parallel in a way that is not served.

    Raises:
        AttachError: with the way, and what to do.
    """
    for name, module in [("", model), *getattr(model, "module", model).named_modules()]:
        if (served_not := _other_parallelism(module)) is not None:
            raise AttachError(f"{served_not}{f' (at {name!r})' if name else ''}")


def require_dense(model: nn.Module) -> None:
    """Refuse gradients that no method can take.

    Raises:
        AttachError: sparse ones, or of a dtype or on a device that is not served.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise AttachError(f"{name!r} makes sparse gradients, which hooks do not see; set sparse=False")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            require_served(name, parameter.dtype, parameter.device)


_UNSERVED = {
    "ReplicateModule": "this model was given to `replicate`, which gradwire does not serve yet; "
    "wrap the module in DistributedDataParallel instead, which trains the same way, and attach to that",
    "FSDPModule": "a part of this model was given to `fully_shard` (FSDP2), and the model itself was not: give it to "
    "fully_shard too, without DistributedDataParallel around it, and attach to it",
    "FullyShardedDataParallel": "this model is in FullyShardedDataParallel (FSDP1), which is not served; give "
    "the module to fully_shard (FSDP2) instead and attach to that, or wrap it in DistributedDataParallel if it fits",
}
"""What to do about models of other ways to train in parallel, by the class that gives them away."""


def _other_parallelism(module: nn.Module) -> str | None:
    """What to say of a module that another way of training in parallel has taken; found without importing those."""
    names = [c.__name__ for c in type(module).__mro__ if c.__module__.startswith("torch.distributed.")]
    if "DDP" in names:  # of `replicate` where that stands on DDP
        names = ["ReplicateModule"]
    return next((text for name, text in _UNSERVED.items() if name in names), None)
