"""`attach` for FSDP2: a session in the form of a sharded model, and the ports that feed it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import nn

from gradwire.adapters.attached import bind
from gradwire.adapters.fsdp2.form import ReplicaForm, ShardedForm, tensors_of
from gradwire.adapters.fsdp2.gather import GatherPort, parameter_codec
from gradwire.adapters.fsdp2.groups import Group, groups_of
from gradwire.adapters.fsdp2.node_axes import require_copies_on_nodes
from gradwire.adapters.fsdp2.port import AlonePort, ReplicaPort, ScatterPort
from gradwire.adapters.fsdp2.prefetch import set_prefetch
from gradwire.codecs import Codec
from gradwire.core.errors import AttachError, StateError
from gradwire.core.roles import roles_of
from gradwire.drivers.nodes import finds_nodes
from gradwire.reducers.base import Reducer
from gradwire.session import Session
from gradwire.session.agreement import is_alike
from gradwire.session.lane import Lane
from gradwire.session.names import canonical_name
from gradwire.spec import as_method

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gradwire.adapters.fsdp2.stateful import Stateful

WHAT = "gradwire.attach"

GATHERS = "parameters, which FSDP2 gathers as they are (parameters= compresses and counts them)"
"""What reports do not count where no codec gathers parameters."""


class Port(Protocol):
    """What takes the place of a kind of FSDP2's collectives."""

    def install(self) -> None:
        """Take the place of FSDP2's own."""
        ...

    def remove(self) -> None:
        """Give back, if it had taken over."""
        ...


def attach_fsdp2(
    model: nn.Module, reducer: Reducer | str, parameters: Codec | str | None, replicate: Any, **options: Any
) -> ShardedSession:
    """Let `reducer` reduce the gradients of `model`, see `gradwire.attach`.

    Args:
        model: the root of a model that `fully_shard` was called on.
        reducer: the method.
        parameters: the codec that parameters are gathered in, or None.
        replicate: a mesh of one dimension or a process group: ranks that have the same shard; or None.
        options: of the session.
    """
    if replicate is not None and options.get("on_non_finite") == "skip":
        raise AttachError(
            'on_non_finite="skip" does not go with replicate=: ranks that hold other shards would not hear of it'
        )
    groups = groups_of(model)
    codec = None if parameters is None else parameter_codec(parameters)
    known = roles_of(model)
    roles = {canonical_name(name): known[parameter] for name, parameter in model.named_parameters()}
    says, shards = f"parameters={codec!r}", groups[0].shard_group
    if replicate is None:
        form = ShardedForm(groups, roles, range(shards.size()), says, "" if codec else GATHERS)
        session = ShardedSession(tensors_of(groups), reducer, group=shards, what=WHAT, form=form, **options)
        scatter = ScatterPort if shards.size() > 1 else AlonePort
        ports: list[Port] = [scatter(session, model, groups)]
    else:
        row = shards.rank()
        inside = "what FSDP2 reduces among the shards of a copy" + ("" if codec else f", and {GATHERS}")
        form = ReplicaForm(groups, roles, range(row, row + 1), f"{says}, shard {row} of {shards.size()}", inside)
        group = _group(replicate)
        session = ShardedSession(tensors_of(groups), reducer, group=group, what=WHAT, form=form, **options)
        ports = [ReplicaPort(session, model, groups)]
    try:
        if replicate is not None:
            _require_replicas(session, groups)
            if finds_nodes(as_method(reducer)):
                require_copies_on_nodes(session, shards, groups[0].device)
        if codec is not None:
            lane = None if replicate is None else Lane(shards, groups[0].device, session.lane.deadline_s, WHAT)
            ports.append(GatherPort(session, groups, codec, lane))
        session.feed_by(ports, groups[0].mesh if replicate is None else None)
        held = bind(session, model)
        session.when_adopted = lambda overlap: set_prefetch(held(), overlap.prefetch)
        if session.overlap.prefetch is not None:
            set_prefetch(model, session.overlap.prefetch)
    except BaseException:
        session.close(at_once=True)
        raise
    return session


def _group(given: Any) -> dist.ProcessGroup:
    """The process group that is meant by a mesh of one dimension, or the group itself.

    Raises:
        AttachError: a mesh of several dimensions.
    """
    if isinstance(given, dist.ProcessGroup):
        return given
    if given.ndim != 1:
        raise AttachError(f'replicate= is a mesh of {given.ndim} dimensions: pass one of them, as mesh["replicate"]')
    return given.get_group()


def _require_replicas(session: Session, groups: Sequence[Group]) -> None:
    """Refuse replicas that begin with other parameters: FSDP2 knows nothing of replicas and has not made them equal."""
    digest = hashlib.blake2b(digest_size=7)
    for group in groups:
        for parameter in group.parameters:
            digest.update(parameter.local_bytes())
    number = int.from_bytes(digest.digest(), "little")
    where = f" in {WHAT}"
    if not session.lane.call(lambda: is_alike(number, session.transport, groups[0].device), where):
        raise AttachError(
            "ranks of replicate= have other parameters than each other: begin from one seed or checkpoint"
        )


class ShardedSession(Session):
    """The session of a model of FSDP2. After `close` the model communicates as it does alone."""

    _ports: Sequence[Port] = ()
    _mesh: DeviceMesh | None = None

    def feed_by(self, ports: list[Port], mesh: DeviceMesh | None) -> None:
        """Have ports take the place of FSDP2's collectives.

        Args:
            ports: which.
            mesh: of all ranks of the session, where it holds all shards of the model.
        """
        self._ports, self._mesh = ports, mesh
        for port in ports:
            port.install()

    def stateful(self, checkpoint: str | Path | None = None) -> Stateful:
        """Return what `torch.distributed.checkpoint` saves and loads, beside the model and the optimizer.

        With as many ranks as saved a resume is exact; with another number each gets the mean of what was owed.

        Args:
            checkpoint: to load, the folder that is loaded from; None to save.

        Raises:
            StateError: with `replicate=`, for which `gradwire.save` is there, or a folder without such a state.

        Example:
            dcp.save({"model": model.state_dict(), "gradwire": session.stateful()}, checkpoint_id=folder)
            dcp.load({"model": model.state_dict(), "gradwire": session.stateful(folder)}, checkpoint_id=folder)
        """
        from gradwire.adapters.fsdp2.stateful import Stateful  # what it imports would make `import gradwire` slow

        if self._mesh is None:
            raise StateError("with replicate= save by gradwire.save, into a folder for each shard")
        return Stateful(self, self._mesh, checkpoint)

    def close(self, at_once: bool = False) -> None:
        """Give the model's communication back to FSDP2, and stop, see `Session.close`."""
        for port in self._ports:
            port.remove()
        super().close(at_once)
