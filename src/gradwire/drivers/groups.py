"""Process groups of our own: every one has a name that was never used before, and ranks that do not come are named.

PyTorch calls a group after its ranks and after how many groups there are, where only its members make it. Once one is
destroyed, the next has its name, and with it finds in the store the addresses of ports that are closed by now.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import distributed_c10d as c10d

from gradwire.core.errors import CommunicationError, first_line
from gradwire.core.figures import listed

CONNECT_S = 10.0
"""How long a process that has said it is here gets to connect."""

_LONGEST_PAUSE_S = 0.05
_GIVEN_UP = "given up"

_attempts: dict[str, int] = {}
"""How often this process has made a group of the same ranks below the same parent."""


def new_group(parent: dist.ProcessGroup, ranks: Sequence[int], deadline_s: float, what: str) -> dist.ProcessGroup:
    """Return a new group of `ranks`, of the backend of `parent`; all of these ranks must call it, and only they.

    Args:
        parent: a group that has all the ranks.
        ranks: numbers of ranks in the default group.
        deadline_s: seconds to wait for the others, and the new group's patience.
        what: the call that makes the group, for the error that names who did not make it.

    Raises:
        CommunicationError: ranks that did not come within `deadline_s`, or could not be connected.
    """
    began = time.monotonic()
    ranks = sorted(ranks)
    try:
        name = _meet(_family(parent, ranks), ranks, deadline_s, what)
        return _made(parent, name, ranks, deadline_s)
    except CommunicationError:
        raise
    except RuntimeError as error:
        waited = time.monotonic() - began
        raise CommunicationError(
            f"rank {dist.get_rank()} could not connect to ranks {listed(ranks)} for {what} (after {waited:.1f} s, with "
            f"deadline_s={deadline_s:g}): a rank ended meanwhile, or a host cannot be reached on the interface that "
            f"GLOO_SOCKET_IFNAME names; PyTorch says: {first_line(error)}"
        ) from error


def group_apart(
    store: Store, rank: int, world_size: int, deadline_s: float, connect_s: float = CONNECT_S
) -> dist.ProcessGroup:
    """Return a Gloo group that no default group knows of: its ranks are numbers of its own.

    It is for processes that come and go, since those of a default group can only end together. Let go of it by
    `abort()`, from any thread: what waits in it fails at once then.

    Args:
        store: used for no other group, see `PrefixStore`. Waits in it block other users of the same connection.
        rank: of this process in the new group.
        world_size: how many ranks it has.
        deadline_s: the new group's patience.
        connect_s: how long to wait for each of the others while they are being connected, which nobody can break off;
            `deadline_s` if that is less.

    Raises:
        CommunicationError: they could not be connected.
    """
    began, connect_s = time.monotonic(), min(connect_s, deadline_s)
    try:
        gloo = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, world_size, timeout=timedelta(seconds=connect_s))
    except RuntimeError as error:
        waited = time.monotonic() - began
        raise CommunicationError(
            f"{world_size} processes could not be connected (after {waited:.1f} s, of {connect_s:g} s for each): "
            "one ended meanwhile, or a host cannot be reached on the interface that GLOO_SOCKET_IFNAME names; PyTorch "
            f"says: {first_line(error)}"
        ) from error
    gloo._set_default_timeout(timedelta(seconds=deadline_s))
    gloo._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)  # pyright: ignore[reportPrivateUsage]
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)  # pyright: ignore[reportPrivateUsage]
    return group


def deadline_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds after which a collective of `group` fails."""
    backend = group._get_backend(device)  # pyright: ignore[reportPrivateUsage]
    return backend.options._timeout.total_seconds()  # pyright: ignore[reportPrivateUsage]


def destroy(group: dist.ProcessGroup) -> None:
    """Let go of a group, unless it went already with the default group."""
    if is_registered(group):
        dist.destroy_process_group(group)


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether the default group knows of a group: it does not of one that `group_apart` made."""
    return dist.is_initialized() and group in c10d._world.pg_map  # pyright: ignore[reportPrivateUsage]


_STALE = (
    "the rendezvous store still holds what this rank wrote before it was restarted, such as addresses where nobody "
    "listens any more: start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, which gives each "
    "restart a store of its own"
)


def _family(parent: dist.ProcessGroup, ranks: Sequence[int]) -> str:
    """What all groups of these ranks below this parent are called, but for a number."""
    same = hashlib.sha256(f"{parent.group_name}: {listed(ranks)}".encode()).hexdigest()[:16]
    return f"gradwire/group/{same}"


def _meet(family: str, ranks: Sequence[int], deadline_s: float, what: str) -> str:
    """Wait until all ranks are here; return the name of their new group.

    A number that ranks gave up on, since others did not come in time, is used up for those who come late as well.

    Raises:
        CommunicationError: ranks that did not come, or a store in which this rank was before, under another process.
    """
    root, me, late = _store(), str(dist.get_rank()), False
    while True:
        attempt = _attempts[family] = _attempts.get(family, -1) + 1
        name = f"{family}/{attempt}"
        store = PrefixStore(f"{name}/here", root)
        if store.check([me]):
            raise CommunicationError(_STALE)
        if not store.check([_GIVEN_UP]):
            break
        late = True
    store.set(me, me)
    began, pause = time.monotonic(), 0.001
    while not store.check([str(rank) for rank in ranks]):
        waited = time.monotonic() - began
        if waited > deadline_s or store.check([_GIVEN_UP]):
            store.set(_GIVEN_UP, me)
            absent = [rank for rank in ranks if not store.check([str(rank)])]
            raise CommunicationError(_missed(absent, waited, deadline_s, what, late), absent)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return name


def _missed(absent: Sequence[int], waited_s: float, deadline_s: float, what: str, late: bool) -> str:
    if not absent:
        return f"another rank gave up waiting for {what} just before the last rank came; call it again on every rank"
    who = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {listed(absent)}"
    text = (
        f"{who} did not call {what} within {waited_s:.1f} s (rank {dist.get_rank()} waited, with "
        f"deadline_s={deadline_s:g}): every rank of the process group must call it, in the same order; "
        f"look at the output of {who} first"
    )
    return text + "; the others had given up an earlier call before this rank made it" if late else text


def _store() -> Store:
    return c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]


def _made(parent: dist.ProcessGroup, name: str, ranks: Sequence[int], deadline_s: float) -> dist.ProcessGroup:
    """`torch.distributed.new_group` with a name of our choice, which that function has no argument for."""
    made, _ = c10d._new_process_group_helper(  # pyright: ignore[reportPrivateUsage]
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        c10d.Backend(dist.get_backend(parent)),
        _store(),
        name,  # pyright: ignore[reportArgumentType] - a type of its own in new versions, which is a string
        timeout=timedelta(seconds=deadline_s),
        device_id=c10d._get_default_group().bound_device_id,  # pyright: ignore[reportPrivateUsage]
        group_desc="gradwire",
    )
    assert isinstance(made, dist.ProcessGroup), "this process is no member of the group"
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}  # pyright: ignore[reportPrivateUsage]
    return made
