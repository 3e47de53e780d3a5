"""Names and types of tensors as a session keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwire.codecs.base import SUPPORTED_DTYPES
from gradwire.core.errors import AttachError, StepError
from gradwire.core.grain import ParameterSpec

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What `torch.compile`, `checkpoint_wrapper` and FSDP put into names, each a component of its own."""


def canonical_name(name: str) -> str:
    """Return a parameter's name without the components that wrappers put into it.

    >>> canonical_name("_orig_mod.layer._checkpoint_wrapped_module.weight"), canonical_name("gate_module.weight")
    ('layer.weight', 'gate_module.weight')
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def require_apart(short: Mapping[str, str]) -> None:
    """Refuse two parameters that would share a name.

    Args:
        short: the names of all parameters, each with what it is without what wrappers add.

    Raises:
        AttachError: with both names.
    """
    whose: dict[str, str] = {}
    for name, kept in short.items():
        if (other := whose.setdefault(kept, name)) != name:
            raise AttachError(
                f"parameters {other!r} and {name!r} are both {kept!r} without what wrappers add, and state is kept by "
                "name; rename one of them"
            )


def require_served(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a tensor that no method can take.

    Raises:
        AttachError: with the dtypes and devices that are served.
    """
    if dtype not in SUPPORTED_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in SUPPORTED_DTYPES)
        raise AttachError(f"parameter {name!r} has dtype {dtype}; supported are {names}")
    if device.type not in ("cpu", "cuda"):
        raise AttachError(f"parameter {name!r} is on {device}; supported devices are cpu and cuda")


def require_all_served(specs: Sequence[ParameterSpec], checksum: bool) -> None:
    """Refuse tensors that no session can take.

    Raises:
        AttachError: none at all, of a dtype or on a device that is not served, on several devices, or with checksums
            elsewhere than on a CPU.
    """
    if not specs:
        raise AttachError("there is nothing to combine: no tensor, or no parameter that requires a gradient")
    device = specs[0].device
    for spec in specs:
        require_served(spec.name, spec.dtype, spec.device)
        if spec.device != device:
            raise AttachError(f"{spec.name!r} lies on {spec.device} and others on {device}: make a session for each")
    if checksum and device.type != "cpu":
        raise AttachError(f"checksums are made on a CPU, and the tensors lie on {device}: leave checksum out")


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a `DTensor`, of which this rank holds a part; found without importing it."""
    return hasattr(tensor, "to_local")


def is_fsdp2(module: object) -> bool:
    """Whether `fully_shard` was called on a module; found without importing it."""
    return any(
        c.__name__ == "FSDPModule" and c.__module__.startswith("torch.distributed.") for c in type(module).__mro__
    )


def require_whole(tensors: nn.Module | Mapping[str, Tensor], what: str) -> None:
    """Refuse a model or tensors of which this rank holds shards.

    Raises:
        AttachError: with what serves such models.
    """
    if isinstance(tensors, nn.Module):
        shards = any(map(is_fsdp2, tensors.modules()))
        held = [parameter for parameter in tensors.parameters() if parameter.requires_grad]
    else:
        shards, held = False, list(tensors.values())
    if shards or any(map(is_sharded, held)):
        raise AttachError(
            f"{what} wants whole tensors, and these are shards: a model of fully_shard is served by gradwire.attach, "
            "and by gradwire.sync.LocalSGD, Averaging and Hierarchical"
        )


class TrainedParameters:
    """The trained parameters of a model, in every step: those that communication was planned for, and no others.

    Args:
        what: what planned it, for errors.
        planned: by canonical name the parameters themselves, or None where any tensor of that name will do.
    """

    def __init__(self, what: str, planned: Mapping[str, Tensor | None]) -> None:
        self._what, self._planned = what, planned
        self._found: tuple[int, ...] = ()
        self._named: dict[str, Tensor] = {}

    @classmethod
    def of_now(cls, what: str, model: nn.Module) -> TrainedParameters:
        """Those that a model trains now."""
        return cls(what, dict(named(model)))

    def of(self, model: nn.Module) -> dict[str, Tensor]:
        """Name every parameter that requires a gradient, tied ones once.

        Raises:
            StepError: one that was not planned, such as that of a layer that was unfrozen or replaced since.
            AttachError: two that would share a name.
        """
        # Naming takes three times as long as this look. What is named is kept, so no other tensor has its `id`.
        found = tuple(map(id, _trained(model)))
        if found != self._found:
            now = named(model)
            for name, parameter in now.items():
                self._require_planned(name, parameter)
            self._named, self._found = now, found
        return self._named

    def all_of(self, model: nn.Module) -> dict[str, Tensor]:
        """The same of a model that trains all of them.

        Raises:
            StepError: as `of`, or one that was frozen since.
        """
        now = self.of(model)
        if frozen := next((name for name in self._planned if name not in now), None):
            raise StepError(
                f"{frozen!r} requires no gradient any more and did when {self._what} planned what ranks exchange: let "
                "it require one and give it a learning rate of 0, or make another session"
            )
        return now

    def has(self, parameter: Tensor) -> bool:
        """Whether a parameter was planned for, be it frozen by now."""
        return any(parameter is planned for planned in self._planned.values())

    def _require_planned(self, name: str, parameter: Tensor) -> None:
        if name not in self._planned:
            raise unplanned(name, self._what)
        planned = self._planned[name]
        if planned is not None and planned is not parameter:
            raise StepError(
                f"{name!r} is another tensor than when {self._what} planned what ranks exchange: close that and call "
                f"{self._what} again after the replacement, with a new DistributedDataParallel where there is one"
            )


def unplanned(name: str, what: str) -> StepError:
    """What is raised where a layer was unfrozen in mid-run."""
    return StepError(
        f"{name!r} requires a gradient now and did not when {what} planned what ranks exchange: close that and call "
        f"{what} again after the unfreezing, with a new DistributedDataParallel where there is one, or let the layer "
        "require gradients from the beginning, with a learning rate of 0 until it is to be trained"
    )


def _trained(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for parameter in module._parameters.values():  # pyright: ignore[reportPrivateUsage]
            if parameter is not None and parameter.requires_grad:
                yield parameter


def named(tensors: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors; of a model its trained parameters, without what wrappers add to names."""
    if not isinstance(tensors, nn.Module):
        return dict(tensors)
    given = {name: parameter for name, parameter in tensors.named_parameters() if parameter.requires_grad}
    short = {name: canonical_name(name) for name in given}
    require_apart(short)
    return {short[name]: parameter for name, parameter in given.items()}


@torch.inference_mode(False)
def gradients_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients; a parameter that was not used gets one of zeros, since other ranks may have used it."""
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found[name] = parameter.grad
    return found
