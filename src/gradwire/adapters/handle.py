"""What `attach` returns: the running communication of one model."""

from __future__ import annotations

import sys

from gradwire.core import saved
from gradwire.core.link import Link
from gradwire.drivers.engine import Stats
from gradwire.reducers.base import Reducer
from gradwire.session import Session
from gradwire.session.own_file import require_own_file
from gradwire.session.report import Report


class Handle:
    """What `attach` returns: the running communication of one model.

    Attributes:
        session: what runs it, step after step.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def reducer(self) -> Reducer:
        """The method that combines gradients."""
        return self.session.reducer

    @property
    def method(self) -> str:
        """The method as it was given."""
        return self.session.method

    @property
    def seed(self) -> int:
        """Of all random choices."""
        return self.session.seed

    def __repr__(self) -> str:
        return repr(self.session).replace("Session", "Handle", 1)

    def report(self) -> Report:
        """Return what the method costs and saves on this rank, see `Session.report`.

        Example:
            print(handle.report())                # for people
            handle.report().as_dict()["saved_ms"] # for programs
        """
        return self.session.report()

    def change(self, method: Reducer | str) -> None:
        """Go on with another method, on every rank at the same place between two steps, see `Session.change`.

        What is owed under the old one is carried over. A change that fails leaves the old method in place.

        Example:
            if step == 100:
                handle.change("topk:0.01")
        """
        self.session.change(method)

    def measure_link(self) -> Link | None:
        """Measure again how long an uncompressed all-reduce takes, since links change; `attach` did so once.

        Every rank must call it at the same place, between two steps. It takes a tenth of a second on fast
        links, and about fifteen at most on slow ones, see `Session.measure_link`.
        """
        return self.session.measure_link()

    def stats(self) -> Stats:
        """Return bytes and times so far, those of the step that has just ended among them."""
        return self.session.stats()

    def residual_norm(self) -> float:
        """Return the Euclidean norm of all that this rank owes: its residuals, and its shards' as an owner."""
        return self.session.residual_norm()

    def state_dict(self) -> saved.Saved:
        """Return this rank's state by parameter name; save one file a rank.

        Resuming with the same world size is exact; for another, pass all ranks' states to `gradwire.reshard`.
        `gradwire.save` and `gradwire.load` do all of it, files included.

        Raises:
            StateError: asked for by `torch.distributed.checkpoint`, which would keep what one rank has.
        """
        require_own_file(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        return self.session.state_dict()

    def load_state_dict(self, state: saved.Saved) -> None:
        """Take up a saved state.

        Raises:
            StateError: a damaged state, or one of another version, method, rank, world size or model; nothing is
                changed then.
        """
        self.session.load_state_dict(state)

    def close(self, at_once: bool = False) -> None:
        """Stop communicating: end the threads, then destroy the process groups. A second call does nothing.

        Args:
            at_once: do not wait for a step that is under way, as after an interrupt. A thread that is stuck in it ends
                at `deadline_s`, or with the process.
        """
        self.session.close(at_once)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.session.__exit__(kind, error, trace)
