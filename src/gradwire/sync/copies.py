"""Models whose parameters are sharded: what a rank holds of them, and what the ranks of one copy decide together.

Each copy of a sharded model lies on ranks of its own, of which each holds a shard. The ranks that hold the same shard
average it, and know nothing of other shards. What must hold for whole copies the ranks of each copy tell each other
here, over a group of their own. The ranks of a shard know the same already, so afterwards all ranks of all copies do.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.core.collective import AllReduce
from gradwire.core.errors import AttachError, GradwireError, StepError
from gradwire.core.figures import listed
from gradwire.drivers.interpreter import ask
from gradwire.session.form import Form
from gradwire.session.lane import Lane, group_of
from gradwire.session.names import is_sharded, named
from gradwire.session.together import Together
from gradwire.sync.shards import local

_HERE = 'group=mesh["replicate"].get_group()'
"""How the group that is wanted is usually written."""


class WholeCopy:
    """This rank alone, which has all of its copy: what it decides holds for all of it.

    Attributes:
        number, total: which shard this rank holds, of how many.
    """

    number, total = 0, 1

    @property
    def says(self) -> str:
        """What the settings of a run say of it."""
        return ""

    @property
    def form(self) -> Form:
        """Of sessions over this rank's shard."""
        return Form()

    def held(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of which this rank has any element.

        Raises:
            AttachError: there is none.
        """
        return parameters

    def attempt(self, act: Callable[[], None]) -> None:
        """Do something; where it fails on one rank of the copy, it raises on all of them."""
        act()

    def require_alike(self, settings: str) -> None:
        """Refuse settings that differ within the copy.

        Raises:
            AttachError: on all ranks of the copy.
        """
        return

    def first(self, name: str | None, names: Sequence[str], where: str) -> str | None:
        """Which of `names` comes first of those that ranks of the copy give; None where none of them gives any."""
        return name

    def ask(self, request: AllReduce, where: str) -> Tensor:
        """The result of an all-reduce within the copy."""
        return request.tensor

    def wire_bytes(self, request: AllReduce) -> int:
        """What a rank sends for that."""
        return 0

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Those over which the ranks of the copy communicate."""
        return ()

    @contextlib.contextmanager
    def telling(self, lane: Lane) -> Generator[None]:
        """Tell the other ranks what is raised inside, on all lanes of this rank: they wait for it, or will.

        A `StepError` is raised on all ranks anyway, and ends nothing.
        """
        try:
            yield
        except StepError:
            raise
        except BaseException as error:
            for each in (lane, *self.lanes):
                each.give_up(error)
            raise

    def together(self, call: str, lane: Lane, failure: type[GradwireError]) -> Together:
        """The ranks of all copies."""
        return Together(call, lane, failure)

    def leave_word(self, error: BaseException) -> None:
        """Write down for the others why this rank is about to end."""
        return

    def close(self) -> None:
        """Stop communicating within the copy."""
        return


WHOLE = WholeCopy()


class ShardedCopy(WholeCopy):
    """The ranks of one copy of a sharded model.

    Args:
        group: these ranks.
        device: of their shards.
        deadline_s: seconds after which a silent rank is an error.
        what: the call that errors speak of.

    Raises:
        CommunicationError: a rank that did not come within `deadline_s`, by its number.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, deadline_s: float, what: str) -> None:
        self.number, self.total = group.rank(), group.size()
        self._what, self._device = what, device
        self._lane = Lane(group, device, deadline_s, what)
        self._transport = self._lane.transport()
        self._finalizer = weakref.finalize(self, self._lane.let_go, self._transport)
        self._finalizer.atexit = False

    @property
    def says(self) -> str:
        """How many shards a copy has, so that a checkpoint of a run with other ones is refused."""
        return f", {self.total} shards"

    @property
    def form(self) -> Form:
        """One that says which shard it is, so that ranks with others are told."""
        return _OfShard(f"shard {self.number} of {self.total}")

    def held(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of which this rank has any element: FSDP2 leaves the last ranks without one where rows are few.

        Raises:
            AttachError: there is none.
        """
        found = {name: parameter for name, parameter in parameters.items() if local(parameter).numel()}
        if not found:
            first, *others = parameters
            raise AttachError(
                f"shard {self.number} of {self.total} holds no element of {first!r}"
                f"{f' and {len(others)} more' if others else ''}, so it has nothing to average: shard the model over "
                "fewer ranks, or make fewer fragments="
            )
        return found

    def attempt(self, act: Callable[[], None]) -> None:
        """Do something on all ranks of the copy; where one fails, all raise.

        Raises:
            AttachError: another rank failed, with its reason; or what `act` raises here.
        """
        Together(self._what, self._lane, AttachError).attempt(act)

    def require_alike(self, settings: str) -> None:
        """Refuse settings that differ within the copy: its ranks would average at different steps.

        Raises:
            AttachError: on all ranks of the copy.
        """
        ranks = Together(self._what, self._lane, AttachError)
        said = ranks.gather(settings)
        for rank, its in zip(ranks.ranks, said, strict=True):
            if its != said[0]:
                raise AttachError(
                    f"ranks of one copy disagree on the settings: rank {rank} has {its}, and rank {ranks.ranks[0]} has "
                    f"{said[0]}"
                )

    def first(self, name: str | None, names: Sequence[str], where: str) -> str | None:
        """Which of `names` comes first of those that ranks of the copy give; None where none of them gives any.

        Raises:
            CommunicationError: as `ask`.
        """
        before_end = 0 if name is None else len(names) - names.index(name)
        most = int(self.ask(AllReduce(torch.tensor([before_end], device=self._device), "max"), where))
        return names[-most] if most else None

    def ask(self, request: AllReduce, where: str) -> Tensor:
        """The result of an all-reduce within the copy.

        Raises:
            CommunicationError: a rank of the copy failed or fell silent, by its number.
        """
        self._lane.require_sound()
        return self._lane.call(lambda: ask(request, self._transport), where)

    def wire_bytes(self, request: AllReduce) -> int:
        """What a rank sends for that."""
        return request.wire_bytes(self.total)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Those over which the ranks of the copy communicate."""
        return (self._lane,)

    def together(self, call: str, lane: Lane, failure: type[GradwireError]) -> Together:
        """The ranks of all copies, copy by copy."""
        return _AllCopies(call, self._lane, lane, failure)

    def leave_word(self, error: BaseException) -> None:
        """Write down for the other ranks of the copy why this rank is about to end."""
        self._lane.failures.leave_word(error)

    def close(self) -> None:
        """Stop communicating within the copy; a second call does nothing."""
        self._finalizer()


class _OfShard(Form):
    """Tensors that are the same shard on all ranks."""

    def __init__(self, says: str) -> None:
        self.says = says


class _AllCopies(Together):
    """All ranks of all copies: those of a copy tell each other, and then those that hold the same shard.

    Args:
        call: what they do, for errors.
        inside: lane of the ranks of this copy.
        between: lane of the ranks that hold the same shard.
        failure: what is raised on the others where one rank fails.
    """

    def __init__(self, call: str, inside: Lane, between: Lane, failure: type[GradwireError]) -> None:
        super().__init__(call, between, failure)
        self._inside = Together(call, inside, failure)
        self.rank = self.rank * self._inside.world_size + self._inside.rank
        self.ranks = [rank for copy in super().gather(list(self._inside.ranks)) for rank in copy]

    def gather(self, words: Any) -> list[Any]:
        """What all ranks say, copy by copy."""
        return [its for copy in super().gather(self._inside.gather(words)) for its in copy]


# What is served ---------------------------------------------------------------------------------------------------


def shards_of(model: nn.Module, group: dist.ProcessGroup | None, deadline_s: float, what: str) -> WholeCopy:
    """Return who has a copy of the model together with this rank.

    Args:
        model: whose trained parameters are averaged.
        group: the ranks that average them; None for the default group.
        deadline_s: seconds after which a silent rank of the copy is an error.
        what: the call that errors speak of.

    Raises:
        AttachError: a model that is sharded in a way that is not served, or a group of ranks with different shards.
        CommunicationError: a rank of the copy that did not come within `deadline_s`, by its number.
    """
    parameters = named(model)
    if not any(map(is_sharded, parameters.values())):
        return WHOLE
    for name, parameter in parameters.items():
        _require_served(name, parameter)
    meshes: list[Any] = [parameter.device_mesh for parameter in parameters.values()]  # pyright: ignore[reportAttributeAccessIssue]
    shards = meshes[0].get_group()
    _require_one_copy(dict(zip(parameters, meshes, strict=True)), shards)
    _require_others(group_of(group), shards)
    return ShardedCopy(shards, local(next(iter(parameters.values()))).device, deadline_s, what)


def _require_served(name: str, parameter: Tensor) -> None:
    """Refuse what is no plain shard."""
    if not is_sharded(parameter):
        raise AttachError(
            f"{name!r} is whole on this rank, and other parameters of the model are sharded: call fully_shard on the "
            "root too, after its parts"
        )
    its: Any = parameter
    if its.device_mesh.ndim != 1:
        raise AttachError(
            f"{name!r} is sharded over a mesh of {its.device_mesh.ndim} dimensions, within which FSDP2 keeps copies "
            f'equal in every step: call fully_shard with mesh=mesh["shard"], and pass {_HERE}'
        )
    (placement,) = its.placements
    if not placement.is_shard():
        raise AttachError(f"{name!r} is placed as {placement} and not sharded: only models of fully_shard are served")


def _require_one_copy(meshes: Mapping[str, Any], shards: dist.ProcessGroup) -> None:
    """Refuse parts over different ranks."""
    ranks = dist.get_process_group_ranks(shards)
    for name, mesh in meshes.items():
        if (its := dist.get_process_group_ranks(mesh.get_group())) != ranks:
            raise AttachError(
                f"{name!r} is sharded over ranks {listed(its)}, and other parameters over {listed(ranks)}: give "
                "fully_shard one mesh"
            )


def _require_others(group: dist.ProcessGroup, shards: dist.ProcessGroup) -> None:
    """Refuse to average different shards of one copy."""
    inside = dist.get_process_group_ranks(shards)
    both = [rank for rank in dist.get_process_group_ranks(group) if rank in inside]
    if len(both) > 1:
        raise AttachError(
            f"ranks {listed(both)} hold different shards of one copy of the model, and cannot average them: pass the "
            f"ranks that hold the same shard, as {_HERE}"
        )
