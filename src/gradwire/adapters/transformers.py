"""The `Trainer` of Hugging Face Transformers: `attach(trainer, "int4")`, and its checkpoints hold every rank's state.

A callback is given the model without what is around it, and never the checkpoint that training resumes from. So ours
knows its trainer: `model_wrapped` is what makes the gradients of all ranks one, and what `train` was asked to resume
from is noted when it is called.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.adapters.frameworks import attach_if_distributed, load_if_there, require
from gradwire.reducers.base import Reducer
from gradwire.session import Session
from gradwire.session.checkpoint import save

LEAST = "5.23"
"""The oldest version that tests ran with."""
require("transformers", LEAST)

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint  # noqa: E402

if TYPE_CHECKING:
    from transformers import Trainer

FOLDER = "gradwire"
"""Of the states, in the folder of a checkpoint."""


def attach(trainer: Trainer, method: Reducer | str, **options: Any) -> GradwireCallback:
    """Let a method combine the gradients of a trainer's model, and save its state with the trainer's checkpoints.

    Call it on every rank, before `trainer.train()`. Each checkpoint folder then holds `gradwire` too, and
    `trainer.train(resume_from_checkpoint=...)` takes it up, exactly. The trainer's loss scaler, if it has one, is
    followed. Where training is not distributed a warning says so, and nothing is done.

    Args:
        trainer: that will train.
        method: a spec such as `"int4"`, or a reducer.
        options: of `gradwire.attach`.

    Returns:
        The callback that does all of it, which the trainer has by then; `callback.session` is there while it trains.

    Raises:
        AttachError: once training begins: the trainer distributes the model in another way than
            `DistributedDataParallel`.

    Example:
        trainer = Trainer(model, arguments, train_dataset=data)
        gradwire.adapters.transformers.attach(trainer, "int4")
        trainer.train()
    """
    callback = GradwireCallback(trainer, method, **options)
    trainer.add_callback(callback)
    return callback


class GradwireCallback(TrainerCallback):
    """What `attach` gives to a trainer.

    Attributes:
        session: of the model in training; None before training has begun, and where it is not distributed.
    """

    def __init__(self, trainer: Trainer, method: Reducer | str, **options: Any) -> None:
        self.session: Session | None = None
        self._trainer, self._method, self._options = trainer, method, options
        self._model: object = None
        self._resume_from: str | bool | None = None
        train = trainer.train

        @functools.wraps(train)
        def noted(resume_from_checkpoint: str | bool | None = None, *rest: Any, **named: Any) -> Any:
            self._resume_from = resume_from_checkpoint
            return train(resume_from_checkpoint, *rest, **named)

        trainer.train = noted

    @property
    def handle(self) -> Session | None:
        """What `session` was called once."""
        return self.session

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Attach, and go on from the checkpoint that training goes on from. Another `train()` has the same model."""
        model = self._trainer.model_wrapped
        assert model is not None
        if model is not self._model:
            if self.session is not None:  # of a model that was wrapped anew, as for another size of batch
                self.session.close()
            scaler = self._trainer.accelerator.scaler
            self.session = attach_if_distributed(model, self._method, scaler=scaler, **self._options)
            self._model = model
        checkpoint = self._checkpoint(args)
        if self.session is not None and checkpoint is not None:
            load_if_there(Path(checkpoint) / FOLDER, self.session, checkpoint)

    def _checkpoint(self, args: TrainingArguments) -> str | None:
        """The folder that training resumes from, as the trainer finds it."""
        if self._resume_from is True:
            return get_last_checkpoint(str(args.output_dir))
        return self._resume_from or None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save every rank's state into the checkpoint that the trainer has just made."""
        if self.session is not None:
            run = self._trainer._get_output_dir(trial=None)  # pyright: ignore[reportPrivateUsage]
            checkpoint = Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            save(checkpoint / FOLDER, self.session, overwrite=True)  # as the checkpoint around it is
