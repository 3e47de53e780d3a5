"""`attach` for FSDP2: a session in the form of a sharded model, and the ports that feed it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from gradwire.adapters.fsdp2.form import ShardedForm, tensors_of
from gradwire.adapters.fsdp2.gather import GatherPort, parameter_codec
from gradwire.adapters.fsdp2.groups import groups_of
from gradwire.adapters.fsdp2.port import ScatterPort
from gradwire.adapters.handle import Handle
from gradwire.codecs import Codec
from gradwire.reducers.base import Reducer
from gradwire.session import Session


class Port(Protocol):
    """What takes the place of a kind of FSDP2's collectives."""

    def install(self) -> None:
        """Take over."""
        ...

    def remove(self) -> None:
        """Give back, if it had taken over."""
        ...


def attach_fsdp2(model: nn.Module, reducer: Reducer | str, parameters: Codec | str | None, **options: Any) -> Handle:
    """Let `reducer` take the place of the reduce-scatters of `model`, see `gradwire.attach`.

    Args:
        model: the root of a model that `fully_shard` was called on.
        reducer: the method.
        parameters: the codec that parameters are gathered in, or None.
        options: of the session.
    """
    groups = groups_of(model)
    ranks = groups[0].shard_group
    codec = None if parameters is None else parameter_codec(parameters)
    form = ShardedForm(groups, ranks.size(), f"parameters={codec!r}")
    session = Session(tensors_of(groups), reducer, group=ranks, what="gradwire.attach", form=form, **options)
    ports: list[Port] = [ScatterPort(session, model, groups)]
    if codec is not None:
        ports.append(GatherPort(session, groups, codec))
    try:
        for port in ports:
            port.install()
    except BaseException:
        _remove(ports)
        session.close(at_once=True)
        raise
    return ShardedHandle(session, ports)


def _remove(ports: list[Port]) -> None:
    for port in ports:
        port.remove()


class ShardedHandle(Handle):
    """The running communication of a model of FSDP2. After `close` the model communicates as it does alone."""

    def __init__(self, session: Session, ports: list[Port]) -> None:
        super().__init__(session)
        self._ports = ports

    def close(self, at_once: bool = False) -> None:
        """Give the model's communication back to FSDP2, and stop, see `Handle.close`."""
        _remove(self._ports)
        super().close(at_once)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _remove(self._ports)
        super().__exit__(kind, error, trace)
