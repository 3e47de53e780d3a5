"""What a rank holds of tensors that are sharded, as those of a model that was given to `fully_shard`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.core.errors import StateError
from gradwire.session.names import is_fsdp2, is_sharded


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the shard of a `DTensor`, and else all of it. Ask anew each time.

    FSDP2 may put another tensor into a parameter, as where a checkpoint was loaded.
    """
    if not is_sharded(tensor):
        return tensor
    held: Any = tensor
    with torch.no_grad():
        return held.to_local().detach()


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """Return values of this rank's shard as a `DTensor` like a sharded parameter; of a whole one as they are."""
    if not is_sharded(parameter):
        return values
    its: Any = parameter
    kind: Any = type(its.data)
    return kind.from_local(
        values, its.device_mesh, its.placements, run_check=False, shape=its.shape, stride=its.stride()
    )


def reshard_(model: nn.Module) -> None:
    """Have FSDP2 free gathered parameters, so that the next forward pass gathers what the shards are then.

    After a forward pass without a backward pass the root keeps what it has gathered.
    """
    for module in model.modules():
        if is_fsdp2(module):
            held: Any = module
            held.reshard()


# What an optimizer remembers --------------------------------------------------------------------------------------

State = Mapping[Any, Any]
"""By the number of a parameter, what is remembered of it by name; as `Optimizer.state_dict` has it."""


def held_state(state: State, parameters: Sequence[Tensor]) -> State:
    """What an optimizer remembers, with what this rank holds in the place of each `DTensor`.

    Raises:
        StateError: something that is placed otherwise than its parameter.
    """
    return _of_each(state, parameters, _held)


def sharded_state(state: State, parameters: Sequence[Tensor]) -> State:
    """The reverse of `held_state`: a tensor of a shard's shape becomes a `DTensor` like its parameter."""
    return _of_each(state, parameters, _sharded)


def _of_each(state: State, parameters: Sequence[Tensor], act: Callable[[str, Any, Tensor], Any]) -> State:
    if not any(map(is_sharded, parameters)):
        return state
    return {
        number: {key: act(key, value, parameters[number]) for key, value in its.items()}
        for number, its in state.items()
    }


def _held(key: str, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or not is_sharded(value):
        return value
    its, wanted = _placed(value), _placed(parameter)
    if its != wanted:
        raise StateError(
            f"the inner optimizer's {key!r} is not sharded as its parameter is, so it cannot be kept shard by shard: "
            "save the inner optimizer by torch.distributed.checkpoint, and optimizer.averaging by gradwire.save"
        )
    return local(value)


def _placed(tensor: Any) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements, tensor.shape


def _sharded(key: str, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or is_sharded(value) or not is_sharded(parameter):
        return value
    mine = local(parameter)
    return like(parameter, value.to(mine.device)) if value.dim() and value.shape == mine.shape else value
