"""Lightning: `Trainer(callbacks=[GradwireCallback("int4")])`, and its checkpoints hold every rank's state.

Lightning's own `ddp_comm_hook` is dropped without a word on a CPU, and callbacks' states are saved as rank 0 has them.
So the model is attached to once the strategy has wrapped it, and the states of all ranks stand in a folder beside the
checkpoint file: where the strategy saves or removes the file, on every rank, it does so with the folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire.adapters.frameworks import attach_if_distributed, folder_beside, load_if_there, require
from gradwire.reducers.base import Reducer
from gradwire.session import Session
from gradwire.session.checkpoint import save

LEAST = "2.6"
"""The oldest version that tests ran with."""
require("lightning", LEAST)

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402


class GradwireCallback(Callback):
    """Lets a method combine the gradients of what a trainer fits, and saves its state with Lightning's checkpoints.

    A checkpoint `last.ckpt` has a folder `last.ckpt.gradwire` beside it, and goes on exactly where it is. The loss
    scaler of the precision plugin, if it has one, is followed. Where training is not distributed a warning says so, and
    nothing is done.

    Args:
        method: a spec such as `"int4"`, or a reducer.
        options: of `gradwire.attach`.

    Attributes:
        session: of the model that was fitted last; None before, and where training is not distributed.

    Raises:
        AttachError: once fitting begins: the strategy is another one than `"ddp"`.

    Example:
        trainer = Trainer(strategy="ddp", callbacks=[GradwireCallback("int4")])
    """

    def __init__(self, method: Reducer | str, **options: Any) -> None:
        self.session: Session | None = None
        self._method, self._options = method, options

    @property
    def handle(self) -> Session | None:
        """What `session` was called once."""
        return self.session

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach, and go on from the checkpoint that the trainer has gone on from."""
        if self.session is not None:  # of an earlier fit, whose model is gone
            self.session.close()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        model = trainer.strategy.model
        assert model is not None
        self.session = attach_if_distributed(model, self._method, scaler=scaler, **self._options)
        if self.session is None:
            return
        if trainer.ckpt_path is not None:
            load_if_there(folder_beside(trainer.ckpt_path), self.session, trainer.ckpt_path)
        self._follow_checkpoints(trainer)

    def _follow_checkpoints(self, trainer: Trainer) -> None:
        """Do with the folder of states what the strategy does with a checkpoint file, which it does on every rank."""
        strategy = trainer.strategy
        if getattr(strategy.save_checkpoint, "followed_by", None) is self:
            return

        def save_too(checkpoint: dict[str, Any], filepath: str | Path, *rest: Any, **named: Any) -> None:
            plain_save(checkpoint, filepath, *rest, **named)
            whole = "optimizer_states" in checkpoint  # else only the model's weights were wanted
            if whole and self.session is not None and self.session.is_open:
                save(folder_beside(filepath), self.session, overwrite=True)  # as the file beside it is

        def remove_too(filepath: str | Path) -> None:
            folder = folder_beside(filepath)
            plain_remove(filepath)
            if trainer.local_rank == 0:
                shutil.rmtree(folder, ignore_errors=True)

        plain_save: Callable[..., None] = strategy.save_checkpoint
        plain_remove: Callable[..., None] = strategy.remove_checkpoint
        save_too.followed_by = self  # type: ignore[attr-defined]
        strategy.save_checkpoint = save_too
        strategy.remove_checkpoint = remove_too
