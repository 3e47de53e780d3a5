"""A profile as scalars against steps, for TensorBoard and whatever else takes `add_scalar(tag, value, step)`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gradwire.profiling.account import Account, account, common_steps
from gradwire.profiling.records import ProfileError, RankRecord


class ScalarWriter(Protocol):
    """What takes scalars: `torch.utils.tensorboard.SummaryWriter`, and loggers that are made like it."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Note the value of a tag in a step."""
        ...


class Scalar(NamedTuple):
    """The value of a tag in a step."""

    tag: str
    value: float
    step: int


def write_scalars(records: Sequence[RankRecord], to: ScalarWriter | Path | str) -> None:
    """Write the figures of each step that all ranks have kept.

    Tags are `profile/step_ms/rank0`, and so on for "data_ms", "compute_ms", "encode_ms", "decode_ms", "transfer_ms",
    "wait_ms", "sent_bytes" and "overlap" (a share); in the last step also `profile/wire_bytes/NAME`,
    `profile/ratio/NAME` and `profile/residual/NAME` of each tensor. Steps are those of the profile, from 0 on.

    Args:
        records: of the ranks of one run, see `read_records`.
        to: what takes scalars, which is left open; or a folder, for which `tensorboard` must be installed.

    Raises:
        ProfileError: a folder, and `tensorboard` is not installed.

    Example:
        writer = torch.utils.tensorboard.SummaryWriter("runs/int4")
        write_scalars(read_records("profile"), writer)
    """
    if isinstance(to, Path | str):
        writer = _summary_writer(Path(to))
        try:
            write_scalars(records, writer)
        finally:
            writer.close()
        return
    for scalar in scalars(records):
        to.add_scalar(scalar.tag, scalar.value, scalar.step)


def _summary_writer(folder: Path) -> Any:
    try:
        made: Any = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ProfileError(
            "TensorBoard is not installed: pip install tensorboard, or pass an object with add_scalar(tag, value, step)"
        ) from error
    return made.SummaryWriter(str(folder))


def scalars(records: Sequence[RankRecord]) -> Iterator[Scalar]:
    """Yield the figures of each step, see `write_scalars`."""
    kept = common_steps(records, 0)
    for index in kept:
        of_step = [replace(record, steps=[step for step in record.steps if step.index == index]) for record in records]
        yield from _of_ranks(account(of_step), index)
    if kept:
        yield from _of_tensors(account(records), kept[-1])


def _of_ranks(found: Account, step: int) -> Iterator[Scalar]:
    for rank in found.ranks:
        figures = {"step_ms": 1e3 * rank.step_s, **{f"{kind}_ms": 1e3 * of for kind, of in rank.seconds.items()}}
        figures |= {"sent_bytes": rank.sent_bytes, "overlap": rank.efficiency}
        for name, value in figures.items():
            yield Scalar(f"profile/{name}/rank{rank.rank}", value, step)


def _of_tensors(found: Account, step: int) -> Iterator[Scalar]:
    for tensor in found.tensors:
        figures = {"wire_bytes": tensor.wire_bytes, "ratio": tensor.ratio, "residual": tensor.residual_norm}
        for name, value in figures.items():
            if value is not None:
                yield Scalar(f"profile/{name}/{tensor.name}", value, step)
