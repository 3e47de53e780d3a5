"""What a script loads, and whether the states of all ranks are beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from gradwire.adapters.script_places import checkpoint_of, fingerprint
from gradwire.core import save_folder
from gradwire.core.errors import StateError
from gradwire.core.state import walk
from gradwire.core.tensor_file import Written
from gradwire.session import Session
from gradwire.session.checkpoint import load
from gradwire.session.together import Together

Shapes = Mapping[str, tuple[int, ...]]

_WRAPPERS = {"module", "_orig_mod"}
"""Parts of a parameter's name that say how the model is wrapped."""
_KEPT = 1000
"""Files without states that are remembered: a script may load its data by `torch.load` too."""


class Followed(NamedTuple):
    """A model of the script.

    Attributes:
        session: of it.
        suffix: what is added to the names of its folders: nothing for the first model of all ranks.
        begin: the step that it began at.
        shapes: of its parameters, by name.
    """

    session: Session
    suffix: str
    begin: int
    shapes: Shapes

    @property
    def step(self) -> int:
        """How many steps have ended."""
        return self.session.engine.index

    @property
    def remembers(self) -> bool:
        """Whether its method has anything to go on with."""
        leaves = (leaf for _, state in self.session.engine.states() for _, leaf in walk(state))
        return any(leaf.kind != "scratch" for leaf in leaves)

    def folder(self, states: Path) -> Path:
        """Its own folder, where that of the first model is `states`."""
        return states.with_name(states.name + self.suffix)


class _Loaded(NamedTuple):
    """What a script has loaded.

    Attributes:
        name: what people call it.
        states: the folder that belongs to it; None where there is no place beside it.
        written: what tells the file from others, if it is one.
        shapes: of the tensors in it.
    """

    name: str
    states: Path | None
    written: Written | None
    shapes: Shapes


class _Offer(NamedTuple):
    """A finished save that belongs to what a rank has loaded.

    Attributes:
        token: which save it is.
        states: where it is.
        fits: whether it was saved with the very file that was loaded.
    """

    token: str
    states: str
    fits: bool


class Loads:
    """Remembers what a script has loaded, until its models take up what is beside it.

    Args:
        say: is told what is taken up, and what is not there.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._loaded: list[_Loaded] = []

    def note(self, name: str, states: Path | None, content: object, file: Path | None = None) -> None:
        """Remember what was loaded.

        Args:
            name: what people call it.
            states: the folder that belongs to it, which need not be there.
            content: what the script has got.
            file: where it is one file.
        """
        written = fingerprint(file) if file is not None and states is not None and states.exists() else None
        self._loaded.append(_Loaded(name, states, written, shapes_in(content)))
        bare = [at for at, one in enumerate(self._loaded) if one.written is None]
        if len(bare) > _KEPT:
            del self._loaded[bare[0]]

    def moved(self, rename: Callable[[Path], Path]) -> None:
        """Take new names for the folders of states."""
        self._loaded = [one._replace(states=one.states and rename(one.states)) for one in self._loaded]

    def take_up(self, followed: Followed) -> None:
        """Load the states of what the script loaded last, or say that they are not there. Every rank must call it."""
        ranks = Together("loading beside a checkpoint", followed.session.lane, StateError)
        mine = [offer for loaded in self._loaded if (offer := _offer(loaded, followed)) is not None]
        said = ranks.gather({"offers": [list(offer) for offer in mine], "lack": self._lack(followed)})
        lack = next((words["lack"] for words in said if words["lack"]), None)
        chosen = _chosen([[_Offer(*offer) for offer in words["offers"]] for words in said])
        unfit = next((offer for offer in chosen if not offer.fits), None)
        if unfit is not None:
            file = checkpoint_of(Path(unfit.states))
            lack = f"{file} is another file than the one that the states in {unfit.states} were saved with"
        elif chosen:
            states = Path(chosen[ranks.rank].states)
            step = load(followed.folder(states), followed.session)
            later = f"; {lack}, though it was loaded later" if lack else ""
            self._say(f"goes on at step {step} with what was owed when {checkpoint_of(states)} was saved{later}")
            return
        if lack and followed.remembers:
            self._say(f"{lack}: training goes on with nothing owed")

    def _lack(self, followed: Followed) -> str | None:
        """What the file lacks that this model was loaded from last, if anything."""
        own = next((one for one in reversed(self._loaded) if followed.shapes.items() <= one.shapes.items()), None)
        if own is None or (own.states is not None and save_folder.manifests(followed.folder(own.states))):
            return None
        return f"{own.name} has no states of gradwire's{f' in {own.states}' if own.states else ''}"


def _offer(loaded: _Loaded, followed: Followed) -> _Offer | None:
    """What is beside a file, if anything."""
    if loaded.states is None or not (found := save_folder.manifests(followed.folder(loaded.states))):
        return None
    bound = found[0].checkpoint
    fits = bound is None or bound == (loaded.written or fingerprint(checkpoint_of(loaded.states)))
    return _Offer(found[0].token, str(loaded.states), fits)


def _chosen(offers: Sequence[Sequence[_Offer]]) -> list[_Offer]:
    """The offer that each rank takes: the last one that is there on all ranks which have any; none where none has any.

    Where no save is common to them, ranks take what they loaded last, and loading says which rank lacks what.

    >>> a, b, c = (_Offer(token, f"{token}.pt.gradwire", True) for token in "abc")
    >>> [offer.token for offer in _chosen([[a, b], [a, c], []])]
    ['a', 'a', 'a']
    >>> [offer.token for offer in _chosen([[a, b], [a, b], []])]
    ['b', 'b', 'b']
    """
    some = [one for one in offers if one]
    if not some:
        return []
    tokens = [{offer.token for offer in one} for one in some]
    common = [offer.token for offer in some[0] if all(offer.token in there for there in tokens)]

    def own(one: Sequence[_Offer]) -> _Offer:
        return next((offer for offer in reversed(one) if common and offer.token == common[-1]), one[-1])

    return [own(one or some[0]) for one in offers]


def shapes_in(content: object, depth: int = 3) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in what a script saves or loads, by their names in the model.

    >>> shapes_in({"step": 1, "model": {"module.weight": torch.ones(2, 3)}})
    {'weight': (2, 3)}
    """
    if isinstance(content, nn.Module):
        content = dict(content.named_parameters())
    if not isinstance(content, Mapping) or not depth:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for name, value in content.items():
        if isinstance(value, torch.Tensor):
            found[_plain(str(name))] = tuple(value.shape)
        else:
            found |= shapes_in(value, depth - 1)
    return found


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
