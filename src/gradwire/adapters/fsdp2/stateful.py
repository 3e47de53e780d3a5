"""What a sharded model's session remembers, in checkpoints of `torch.distributed.checkpoint`.

Each leaf of each parameter is one tensor of shape (ranks, elements), sharded over ranks along its first dimension: so
every rank writes and reads its own row, and a run with another number of ranks can read all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, zeros

from gradwire.core.collective import AllReduce
from gradwire.core.errors import StateError
from gradwire.core.renamed import with_former_names
from gradwire.core.saved_schema import VERSION, Saved
from gradwire.drivers.interpreter import ask
from gradwire.reducers.as_saved import could_be_saved
from gradwire.reducers.base import Reducer
from gradwire.session import Session

_HEAD, _SCALE, _ELEMENT = "head", "scale", "element:"


class Stateful:
    """What `torch.distributed.checkpoint` calls `Stateful`: it is asked for tensors, which are saved or overwritten.

    Args:
        session: of the model.
        mesh: of one dimension, over the session's ranks in their order.
        checkpoint: the folder that will be loaded from; None to save.

    Raises:
        StateError: a method that remembers something else than a value for each element, or a checkpoint of another;
            `auto`, whose choices are no tensors.
    """

    def __init__(self, session: Session, mesh: DeviceMesh, checkpoint: str | Path | None = None) -> None:
        if session.automatic is not None:
            raise StateError("auto chooses in the run, which this form cannot tell: use gradwire.save and load")
        self._session, self._mesh = session, mesh
        keys = _rows(session.state_dict()).keys()
        self._saved_by = session.transport.world_size if checkpoint is None else _ranks_of(Path(checkpoint), keys)

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of what all ranks save, or the tensors that a load fills."""
        session = self._session
        saved, rows = session.state_dict(), _rows(session.state_dict())
        head = [VERSION, saved["step"], saved["seed"], self._saved_by, _number(saved["reducer"])]
        sharded = {key: self._sharded(row) for key, row in rows.items()}
        return {_HEAD: torch.tensor(head), _SCALE: torch.tensor([saved["scale"]], dtype=torch.float64), **sharded}

    def _sharded(self, row: Tensor) -> Tensor:
        """Rows of all ranks that save; of a run with another number of ranks those that this rank reads."""
        if self._saved_by == self._session.transport.world_size:
            return DTensor.from_local(row[None], self._mesh, [Shard(0)], run_check=False)
        return zeros(self._saved_by, row.numel(), dtype=row.dtype, device_mesh=self._mesh, placements=[Shard(0)])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what was loaded.

        Raises:
            StateError: it is of another method or another version; nothing is changed then.
        """
        session, head = self._session, [int(value) for value in state[_HEAD]]
        mine = session.state_dict()
        reducer = _texts(session.reducer).get(head[4])
        if head[0] != VERSION or reducer is None:
            raise StateError("the checkpoint was saved by another method, or version: attach as it was, then load")
        parameters: dict[str, dict[str, Any]] = {}
        for key, row in _rows(mine).items():
            path, _, name = key.partition(" of ")
            values = self._mean(cast(DTensor, state[key]).to_local(), row)
            parameters.setdefault(name, {})[path] = [{"start": 0, "values": values}]
        said = {"step": head[1], "seed": head[2], "scale": float(state[_SCALE]), "reducer": reducer}
        session.load_state_dict({**mine, **said, "parameters": parameters})

    def _mean(self, rows: Tensor, like: Tensor) -> Tensor:
        """This rank's own row, or the mean of all rows where there were more or fewer ranks."""
        session = self._session
        if self._saved_by == session.transport.world_size:
            return rows[0]
        mine = rows.float().sum(0) if rows.numel() else torch.zeros(like.shape, device=like.device)
        total = session.lane.call(lambda: ask(AllReduce(mine), session.transport), " in load_state_dict")
        return (total / self._saved_by).to(like.dtype)


def _rows(saved: Saved) -> dict[str, Tensor]:
    """What a rank remembers, as one flat tensor for each leaf of each parameter."""
    rows: dict[str, Tensor] = {}
    for name, leaves in saved["parameters"].items():
        for path, pieces in leaves.items():
            if not path.startswith(_ELEMENT):
                raise StateError(f"{saved['reducer'][:80]} remembers more than an element's value: use gradwire.save")
            ordered = sorted(pieces, key=lambda piece: piece["start"])
            rows[f"{path} of {name}"] = torch.cat([piece["values"] for piece in ordered])
    return rows


def _number(text: str) -> int:
    """A number that stands for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _texts(reducer: Reducer) -> dict[int, str]:
    """The texts of what a session with this reducer can go on from, by their numbers: classes had other names."""
    texts = [repr(made) for made in could_be_saved(reducer)]
    return {_number(said): text for text in texts for said in (text, with_former_names(text))}


def _ranks_of(folder: Path, keys: Collection[str]) -> int:
    """How many ranks have saved these keys, which is said by the shapes in PyTorch's own list of a checkpoint.

    Raises:
        StateError: there is nothing of gradwire's in it, or what another method remembers.
    """
    metadata: Any = FileSystemReader(folder).read_metadata()
    found: Mapping[str, Any] = metadata.state_dict_metadata
    if not any(key.split(".")[-1] == _HEAD for key in found):
        raise StateError(f"{folder} has nothing of gradwire's in it: save session.stateful() with the model")
    saved = {key[key.index(_ELEMENT) :]: what for key, what in found.items() if _ELEMENT in key}
    if saved.keys() != set(keys):
        raise StateError(f"{folder} was saved by another method, or of another model: attach as it was, then load")
    return next((int(what.size[0]) for what in saved.values()), 1)  # where nothing is owed it does not matter
