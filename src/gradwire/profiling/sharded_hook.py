"""FSDP2's own collectives, with spans: what gathers parameters and scatters gradients is called through a watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from gradwire.drivers.traced import Span
from gradwire.session.names import is_fsdp2

_KINDS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}
"""Of FSDP2's `set_custom_...`, and what a span is called."""


class ShardedSpans:
    """Spans of the all-gathers and reduce-scatters of a model that was given to `fully_shard`, on a CPU.

    There FSDP2 waits inside the call, so a collective is as long as the wait for it. What others have put in their
    place, `gradwire.attach` for one, is left alone, and so are groups on a GPU, where the call only hands over.
    FSDP2 can be given another collective, but does not tell which one it has: that is read of its parameter groups,
    which are private. Where another version of PyTorch has none, nothing is watched.

    Args:
        model: the model.
        clock: seconds.
    """

    def __init__(self, model: nn.Module, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spans: list[Span] = []
        self._before: list[tuple[Callable[[Any], None], Any]] = []
        for module, group in _groups_on_cpu(model):
            for kind, what in _KINDS.items():
                before, put = getattr(group, f"_{kind}_comm", None), getattr(module, f"set_custom_{kind}", None)
                if put is not None and type(before).__name__.startswith("Default"):
                    put(_Watched(before, what, self._clock, self._spans))
                    self._before.append((put, before))

    @property
    def is_watching(self) -> bool:
        """Whether there is anything to watch: alike on all ranks, whose models are."""
        return bool(self._before)

    def take(self) -> tuple[list[Span], list[Span]]:
        """Return when the training loop waited, and what it waited for, of the step that has ended."""
        spans = self._spans.copy()
        self._spans.clear()  # in place, since watches append to it
        return [span._replace(what="FSDP2") for span in spans if span.kind == "wait"], spans

    def close(self) -> None:
        """Have FSDP2 communicate as it did before."""
        for put, before in self._before:
            put(before)
        self._before = []


class _Watched:
    """A collective of FSDP2 that is noted.

    Args:
        comm: FSDP2's own.
        what: a span is called.
        clock: seconds.
        spans: where they are noted.
    """

    def __init__(self, comm: Any, what: str, clock: Callable[[], float], spans: list[Span]) -> None:
        self._comm, self._what, self._clock, self._spans = comm, what, clock, spans

    def allocate(self, *arguments: Any, **options: Any) -> Tensor:
        """Return memory for a buffer, as FSDP2 does."""
        return self._comm.allocate(*arguments, **options)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        """Communicate as FSDP2 does; a call that does not wait is not noted, since nobody tells when it has ended."""
        began_s = self._clock()
        work = self._comm(output_tensor=output_tensor, input_tensor=input_tensor, **options)
        if not options.get("async_op"):
            ended_s, nbytes = self._clock(), input_tensor.nbytes
            self._spans.append(Span("wait", self._what, began_s, ended_s, nbytes))
            self._spans.append(Span("wire", self._what, began_s, ended_s, nbytes))
        return work


def _groups_on_cpu(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Each group of parameters of FSDP2 on a CPU, with the module that it is told of; none of modules with several."""
    seen = set[int]()
    for module in model.modules():
        if not is_fsdp2(module):
            continue
        held: Any = module
        groups: list[Any] = getattr(held._get_fsdp_state(), "_fsdp_param_groups", [])
        if len(groups) == 1 and id(groups[0]) not in seen and groups[0].device.type == "cpu":
            seen.add(id(groups[0]))
            yield module, groups[0]
