"""`gradwire.save` and `gradwire.load`: the states of all ranks of a run in a folder, complete or not there at all."""

from __future__ import annotations

import contextlib
import socket
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from gradwire.core import save_folder
from gradwire.core.errors import ShardsElsewhereError, StateError
from gradwire.core.renamed import alike
from gradwire.core.reshard import reshard, with_all_owned
from gradwire.core.save_folder import Manifest, SavedRun
from gradwire.core.saved_schema import SHARED, TREE, VERSION, Saved
from gradwire.core.tensor_file import Written
from gradwire.core.tree import put_together, taken_apart
from gradwire.session.meeting import group_store
from gradwire.session.offers import Offer, Shelf, choose, offer_of
from gradwire.session.saved_runs import Saver, remember, run_of, stranger
from gradwire.session.session import Session
from gradwire.session.states import Unpacked, take_up, unpacked
from gradwire.session.together import Together


class HasSession(Protocol):
    """What holds a session, as the optimizers of `gradwire.sync` do; a session is its own."""

    @property
    def session(self) -> Session:
        """The session whose state is saved."""
        ...


@runtime_checkable
class Savable(Protocol):
    """What remembers more than a session does, as the optimizers of `gradwire.sync`.

    Attributes:
        kind: what it is, in a text that is the same on all ranks and in the run that loads.
        steps: finished so far, the same on all ranks.
    """

    @property
    def session(self) -> Saver:
        """One of its sessions, over all its ranks; where it has none, who saves, and `together` is there then."""
        ...

    @property
    def kind(self) -> str:
        """What the class says of it."""
        ...

    @property
    def steps(self) -> int:
        """What the class says of it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This rank's state in tensors, numbers and strings."""
        ...

    def checked(self, state: Mapping[str, Any]) -> Any:
        """Return a saved state for `take_up`; until then nothing is changed."""
        ...

    def take_up(self, checked: Any) -> None:
        """Go on from what `checked` returned."""
        ...

    def resharded(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return this rank's state from those of all ranks of a run with another number of ranks.

        Raises:
            StateError: they cannot be brought to another number of ranks as they are; with what to do.
        """
        ...


@runtime_checkable
class OnceASession(Savable, Protocol):
    """What older versions saved as its session alone, as `gradwire.sync.Gossip`."""

    def of_session(self, saved: Saved) -> Mapping[str, Any]:
        """Return the state for `checked` that goes on from what was saved of the session."""
        ...


@runtime_checkable
class Unwaiting(Protocol):
    """What has no step that all ranks finish, as optimizers of `gradwire.asynchronous`: ranks meet to save and load."""

    def standing_still(self, call: str) -> AbstractContextManager[Savable]:
        """All ranks have come to this call, and none steps in a `with` block; in it is what is saved or loaded."""
        ...


@runtime_checkable
class KeptOtherwise(Protocol):
    """What `save` refuses, since no fixed set of ranks holds its state, as a `gradwire.sync.Elastic`."""

    kept_by: ClassVar[str]
    """How it is kept, for the error."""


@runtime_checkable
class HasSeveralGroups(Protocol):
    """What has ranks in several groups, as averages of sharded models: all of them save and load together."""

    def together(self, call: str) -> Together:
        """All these ranks, for a call that each of them makes."""
        ...


def _require_savable(call: str, handle: object) -> None:
    """Refuse what holds no session, alike on all ranks.

    Raises:
        StateError: with how it is kept, or with what can be given.
    """
    kind = type(handle).__name__
    if isinstance(handle, KeptOtherwise):
        raise StateError(f"{call} takes no {kind}: {handle.kept_by}")
    if not isinstance(getattr(handle, "session", None), Session):
        raise StateError(
            f"{call} takes no {kind}: give it what gradwire.attach returned, a Session, an optimizer or average of "
            "gradwire.sync, or an optimizer of gradwire.asynchronous"
        )


AnyHandle = HasSession | Savable | Unwaiting


class _Still(NamedTuple):
    """What is saved or loaded at a moment when no rank steps, and the ranks that do so."""

    handle: HasSession | Savable
    ranks: Together


@contextlib.contextmanager
def _still(call: str, handle: AnyHandle) -> Generator[_Still]:
    if isinstance(handle, Unwaiting):
        with handle.standing_still(call) as still:
            yield _Still(still, _together(call, still))
    else:
        _require_savable(call, handle)
        yield _Still(handle, _together(call, handle))


def _together(call: str, handle: HasSession | Savable) -> Together:
    session = handle.session
    if not session.is_open:
        raise StateError(f"{call}: this session is closed; save and load before close()")
    group_store()  # else nobody can be met
    if isinstance(handle, HasSeveralGroups):
        return handle.together(call)
    assert isinstance(session, Session)
    return Together(call, session.lane, StateError)


def _packed(handle: HasSession | Savable, ranks: Together) -> Saved:
    """This rank's state in the form of `gradwire.core.saved`; what is more than a session's is a tree of its own."""
    if not isinstance(handle, Savable):
        return handle.session.state_dict()
    tree, tensors = taken_apart(handle.state_dict())
    where = {"rank": ranks.rank, "world_size": ranks.world_size}
    head = {"version": VERSION, "reducer": handle.kind, "step": handle.steps, "seed": handle.session.seed, "scale": 1.0}
    pieces = {name: {"matrix:value": [{"start": 0, "values": tensor}]} for name, tensor in tensors.items()}
    return {**head, **where, "parameters": pieces, TREE: tree}


def _tree(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a `Savable`.

    Raises:
        StateError: it is that of a session.
    """
    if TREE not in saved:
        raise StateError(f"the save is that of a session of {saved['reducer']}: load it into such a one")
    tensors = {name: leaves["matrix:value"][0]["values"] for name, leaves in saved["parameters"].items()}
    return put_together(saved[TREE], tensors)


def save(
    folder: str | Path,
    handle: AnyHandle,
    *,
    overwrite: bool = False,
    checkpoint: Written | None = None,
) -> None:
    """Save what every rank's `handle` remembers, one file a rank, next to your own checkpoint.

    Every rank must call it, between two steps. The folder may be one that all ranks share, or each host may have its
    own. What the folder held stays until the new save is complete on every rank, and is removed then; a save that was
    interrupted is never loaded. Files are in the safetensors format: numbers and text, nothing that is executed.

    Optimizers of `gradwire.asynchronous` have no step that all ranks finish: each rank calls it when it gets there, and
    waits for the others. Nobody waits for a rank that is here.

    Give each session a folder of its own, since a folder keeps one save. What this run has saved or loaded is replaced,
    and so is what was saved by an earlier run of the same model that began with the same method.

    Args:
        folder: where to; it is made where it is missing.
        handle: what `gradwire.attach` returned, a `Session`, an optimizer or average of `gradwire.sync`, or an
            optimizer of `gradwire.asynchronous`.
        overwrite: replace whatever the folder holds, also what another session has saved.
        checkpoint: size and digest of a file that the states belong to, for the manifest; the same on all ranks that
            share the folder.

    Raises:
        StateError: a rank could not write its file (the message says which and why), the ranks are not at one step, the
            folder holds what another session has saved, or a `handle` that is kept in another way.
        CommunicationError: a rank did not call it within the deadline that `attach` was given.

    Example:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{rank}.pt")
        gradwire.save(folder / "gradwire", session)
    """
    with _still("gradwire.save", handle) as still:
        _save(Path(folder), still, overwrite, checkpoint)


def _save(here: Path, still: _Still, overwrite: bool, checkpoint: Written | None) -> None:
    handle, ranks = still
    session, state = handle.session, _packed(handle, ranks)
    head = {key: state[key] for key in SHARED}
    last = max(save_folder.numbers(here), default=0)
    method = handle.kind if isinstance(handle, Savable) and isinstance(session, Session) else session.begun_with
    run = run_of(session, method)
    other = None if overwrite else stranger(save_folder.manifests(here), session, run, ranks.world_size)
    kept = None if other is None else f"{here} holds {other}"
    said = ranks.gather({"head": head, "last": last, "token": save_folder.new_token(), "run": run, "kept": kept})
    _require_one_step({rank: words["head"] for rank, words in zip(ranks.ranks, said, strict=True)})
    _require_own_folder([words["kept"] for words in said])
    number, token = 1 + max(words["last"] for words in said), said[0]["token"]
    run = SavedRun(*said[0]["run"])
    run = run._replace(id=run.id or token)

    def write() -> Written:
        return save_folder.write_rank(here, number, state)

    def give_up() -> None:
        save_folder.remove(here, number)

    files = ranks.attempt(write, give_up, words=list).words
    manifest = Manifest(number, token, head, tuple(Written(*file) for file in files), run, checkpoint)
    ranks.attempt(lambda: save_folder.finish(here, manifest), give_up)
    remember(session, run)
    save_folder.remove_before(here, number)


def load(folder: str | Path, handle: AnyHandle) -> int:
    """Take up what `gradwire.save` saved, and return the step it was saved at.

    Every rank must call it, after `attach` and before the first step. With as many ranks as saved each needs its own
    file only, and resuming is exact. Where grains are cut otherwise, by another `grain_numel` or another version of
    gradwire, ranks may need all files to find what they own, and every rank still gets what it owed. With another
    number of ranks every rank needs all files, and the memory to hold them; the states are resharded, which conserves
    the mean of what is owed. The newest save is taken that every rank can load. All ranks take it up, or none does.
    Nothing is unpickled.

    Optimizers of `gradwire.sync` are taken up whole, with the inner optimizer's state; load your model beside them.
    With another number of ranks the save must have been made where all ranks had the same model, and rank r gets the
    inner state of the old rank r modulo their number. Those of `gradwire.asynchronous` are taken up by as many ranks
    as saved, and the model's parameters are then what the servers have.

    Args:
        folder: as given to `save`; on each host the one that holds the files of its ranks.
        handle: as given to `save`, made anew.

    Returns:
        The step that the save was made at: compare it with your own checkpoint's.

    Raises:
        StateError: no finished save, files that a rank does not find (the message names them and says what to do) or
            that are damaged, or a state of another method or model. No rank has changed anything then.
        CommunicationError: a rank did not call it within the deadline that `attach` was given.

    Example:
        session = gradwire.attach(ddp, "int4")
        step = gradwire.load(folder / "gradwire", session)
    """
    with _still("gradwire.load", handle) as still:
        return _load(Path(folder), still)


def _load(here: Path, still: _Still) -> int:
    handle, ranks = still
    session = handle.session
    found = save_folder.manifests(here)
    latest = max(save_folder.numbers(here), default=0)
    seen = [offer_of(manifest, here, ranks) for manifest in found]
    said = ranks.gather({"where": f"{here} on {socket.gethostname()}", "latest": latest, "seen": seen})
    shelves = [Shelf(words["where"], [Offer(*offer) for offer in words["seen"]]) for words in said]
    chosen = choose(shelves, ranks.ranks)
    if ranks.rank == 0 and max(words["latest"] for words in said) > chosen.number:
        text = f"a later save in {here} was not finished on every rank, so the one of step {chosen.step} is loaded"
        warnings.warn(text, stacklevel=3)
    (manifest,) = [m for m in found if (m.number, m.token) == (chosen.number, chosen.token)]
    if isinstance(handle, Savable):
        handle.take_up(ranks.attempt(lambda: _checked(handle, manifest, here, ranks)).own)
        remember(session, manifest.run)
        return handle.steps
    whole = handle.session
    take_up(whole, ranks.attempt(lambda: _unpacked(whole, manifest, here, ranks)).own)
    remember(whole, manifest.run)
    return chosen.step


def _checked(handle: Savable, manifest: Manifest, here: Path, ranks: Together) -> Any:
    """What a rank takes up of more than a session."""
    session = handle.session
    is_older = isinstance(session, Session) and alike(manifest.head["reducer"], repr(session.reducer))
    if isinstance(handle, OnceASession) and is_older:
        return handle.checked(handle.of_session(manifest.read(here, ranks.rank)))
    if not alike(manifest.head["reducer"], handle.kind):
        raise StateError(
            f"the save is that of {manifest.head['reducer']}, and this is {handle.kind}: make it as it was"
        )
    if manifest.world_size == ranks.world_size:
        return handle.checked(_tree(manifest.read(here, ranks.rank)))
    return handle.checked(handle.resharded([_tree(manifest.read(here, rank)) for rank in range(manifest.world_size)]))


def _unpacked(session: Session, manifest: Manifest, here: Path, ranks: Together) -> Unpacked:
    """What a rank takes up: where shards were cut otherwise, what it owns now is in the files of other ranks."""
    state = _state(manifest, here, ranks)
    try:
        return unpacked(session, state)
    except ShardsElsewhereError:
        if manifest.missing(here):
            raise
        states = [manifest.read(here, rank) for rank in range(manifest.world_size)]
        return unpacked(session, with_all_owned(states, ranks.rank))


def _state(manifest: Manifest, here: Path, ranks: Together) -> Saved:
    """This rank's state, resharded where the number of ranks has changed."""
    if manifest.world_size == ranks.world_size:
        return manifest.read(here, ranks.rank)
    return reshard([manifest.read(here, rank) for rank in range(manifest.world_size)], ranks.world_size)[ranks.rank]


def _require_own_folder(kept: Sequence[str | None]) -> None:
    """Refuse to save where a rank's folder holds what another session has saved."""
    if (found := next(filter(None, kept), None)) is not None:
        raise StateError(
            f"{found}, which this save would remove: give each session a folder of its own, or pass overwrite=True to "
            "gradwire.save"
        )


def _require_one_step(heads: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse to save ranks, by their numbers, that are not at one step of one run."""
    first, *others = heads
    for rank in others:
        for key in SHARED:
            if heads[rank][key] != heads[first][key]:
                raise StateError(
                    f"rank {rank} has {key} {heads[rank][key]!r} and rank {first} {heads[first][key]!r}: call "
                    "gradwire.save on every rank after the same step"
                )
