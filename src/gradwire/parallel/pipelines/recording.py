"""When the ranks of a real pipeline did what, so that its bubble is measured."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gradwire.drivers.process_group import GroupTransport
from gradwire.drivers.words import gathered_words
from gradwire.parallel.pipelines.orders import StageWork, WorkKind
from gradwire.parallel.pipelines.stage import CompressedStage
from gradwire.parallel.pipelines.timeline import WorkSpan, WorkTimeline


class WorkRecorder:
    """Notes the passes of the stages of this rank.

    Clocks of ranks on several hosts differ, so the bubble of a timeline that was gathered from them is as exact as the
    hosts' clocks are set. Work on a GPU is noted when it is started, which says nothing of when it was done.

    Args:
        stages: of this rank.
    """

    def __init__(self, stages: Sequence[CompressedStage]) -> None:
        self._stages = stages
        self.spans: list[WorkSpan] = []

    @contextmanager
    def recording(self) -> Generator[None]:
        """Note what is done inside; what was noted before is forgotten."""
        self.spans = []
        with ExitStack() as patches:
            for stage in self._stages:
                for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                    patches.enter_context(mock.patch.object(stage, name, self._noting(stage, name)))
            yield

    def _noting(self, stage: CompressedStage, name: str) -> Any:
        call = getattr(stage, name)

        def noted(micro_batch: int, *args: Any, **options: Any) -> Any:
            began = time.time()
            result = call(micro_batch, *args, **options)
            kind = _kind(name, options.get("full_backward", True))
            self.spans.append(WorkSpan(StageWork(kind, stage.stage_index, micro_batch), began, time.time()))
            return result

        return noted

    def gathered(self) -> WorkTimeline:
        """Return what all ranks have noted. Every rank of the pipeline must call it."""
        group = self._stages[0].group or dist.distributed_c10d._get_default_group()  # pyright: ignore[reportPrivateUsage]
        transport = GroupTransport(group)
        try:
            said = gathered_words(
                [[*span.work, span.began, span.ended] for span in self.spans], transport, self._device
            )
        finally:
            transport.close()
        return WorkTimeline([[WorkSpan(StageWork(*words[:3]), *words[3:]) for words in rank] for rank in said])

    @property
    def _device(self) -> torch.device:
        return self._stages[0].device


def _kind(name: str, whole: bool) -> WorkKind:
    """What a method of PyTorch's stages does."""
    if name == "forward_one_chunk":
        return "F"
    return "W" if name == "backward_weight_one_chunk" else "B" if whole else "I"
