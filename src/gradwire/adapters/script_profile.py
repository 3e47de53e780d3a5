"""A profile of a script that knows nothing of gradwire: its steps end where its optimizer's steps do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.adapters.told import Told, told
from gradwire.profiling import Profile, profile
from gradwire.session import Session


class ScriptProfile:
    """Profiles the first model that a script trains in parallel, from its first step to the end of the process group.

    What the script does between the optimizer's step and the next forward pass counts as "data".

    Args:
        folder: for the records and what is made of them.
        say: is told where they are.
        live: whether each rank tells how the run goes, for `gradwire watch`.
    """

    def __init__(self, folder: str, say: Callable[[str], None], live: bool = False) -> None:
        self._folder, self._say, self._live = folder, say, live
        self._profile: Profile | None = None
        self._parameters: set[int] = set()
        self._hook: Any = None

    def follow(self, model: nn.Module, session: Session | None) -> None:
        """Begin, if this is the first model; called on every rank before the model's first step."""
        if self._profile is not None:
            return
        self._profile = profile(model, self._folder, session=session, live=self._live)
        self._profile.__enter__()
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if self._profile is not None and any(id(parameter) in self._parameters for parameter in trained):
            self._profile.step()

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """End the profile before the script ends its process group, or with the script."""

        def ends(*_: object, **__: object) -> None:
            self.end()

        with told(Told(dist, "destroy_process_group", before=ends)):
            try:
                yield
            except BaseException as error:
                self.end(error)
                raise
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Write what there is; a second call does nothing."""
        if self._hook is None or self._profile is None:
            return
        self._hook.remove()
        self._hook = None
        self._profile.__exit__(type(error) if error is not None else None, error, None)
        self._say(f"profile: gradwire profile {Path(self._folder)} prints it, and trace.json there is for Perfetto")
