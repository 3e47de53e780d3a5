"""Settings and memory of PyTorch's PowerSGD hooks, on gradwire's PowerSGD and a session.

A `PowerSGDState` belongs to one model. What it remembers is kept by parameter: DDP may rebuild its buckets, and a
resumed run begins with unrebuilt ones.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from gradwire.adapters.hooks import lane_of
from gradwire.adapters.power_sgd_factors import initial_factors
from gradwire.adapters.power_sgd_layout import BucketLayout, LayOut
from gradwire.adapters.power_sgd_memory import Memory, read_memory, write_memory
from gradwire.adapters.power_sgd_port import PowerPort
from gradwire.codecs import Identity
from gradwire.core import saved
from gradwire.core.errors import AttachError
from gradwire.drivers.engine import Stats
from gradwire.drivers.plan import Unit
from gradwire.reducers import AllReduceExchange, CompressionWarmUp, ErrorFeedback, Guard, PowerSGD, Reducer
from gradwire.session import Session

logger = logging.getLogger(__name__)


class PowerSGDState:
    """Settings and memory of `powerSGD_hook` and `batched_powerSGD_hook`, for one model.

    Arguments are PyTorch's. What differs: `start_powerSGD_iter` may be 0 or 1, since memory goes by parameter and not
    by bucket; `orthogonalization_epsilon` does nothing, since a QR decomposition needs none; matrices of equal shape
    are always batched, and `batch_tensors_with_same_shape` only says how initial factors are drawn. Settings are
    fixed once the first step has begun.

    Args:
        process_group: whose ranks communicate; None for the default group.
        matrix_approximation_rank: r, the rank of what is sent.
        start_powerSGD_iter: steps of uncompressed averaging first.
        min_compression_rate: matrices that shrink by less are sent uncompressed.
        use_error_feedback: add what was not sent to the next gradient.
        warm_start: start from the last step's factors; else draw new ones in every step.
        orthogonalization_epsilon: ignored.
        random_seed: of the initial factors; they are the numbers that PyTorch draws.
        compression_stats_logging_frequency: steps between two log messages.
        batch_tensors_with_same_shape: draw the initial factors of equal matrices together.

    Raises:
        CompositionError: a rank below 1, a rate that is not positive, a negative number of steps.

    >>> PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=0).iter
    0
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.rng = np.random.RandomState(random_seed)
        self.draw_order: list[list[str]] | None = None
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        self._pending: Memory | None = None
        self._port: PowerPort | None = None
        self.reducer(min_compression_rate)  # refuses settings that make no sense here, and not in the backward pass

    @property
    def iter(self) -> int:
        """How many steps have ended."""
        if self._session is not None:
            return self._session.engine.index
        return self._pending.iter if self._pending else 0

    def reducer(self, min_compression_rate: float) -> Reducer:
        """What the settings say, in gradwire's terms."""
        compressed: Reducer = PowerSGD(self.matrix_approximation_rank, min_compression_rate)
        if self.use_error_feedback:
            compressed = ErrorFeedback(compressed)
        return Guard(CompressionWarmUp(AllReduceExchange(Identity()), compressed, self.start_powerSGD_iter))

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements after it) of all PowerSGD steps so far."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after else 0, before, after

    def stats(self) -> Stats:
        """Return bytes and times so far."""
        return self._session.stats() if self._session is not None else Stats()

    @property
    def _session(self) -> Session | None:
        """What communicates, from the first step on."""
        return self._port.session if self._port is not None else None

    def port(self, device: torch.device, lay_out: LayOut, min_compression_rate: float) -> PowerPort:
        """Return what takes buckets, begun at the first one.

        Raises:
            AttachError: another hook or other settings than in the steps before.
        """
        wanted = self.reducer(min_compression_rate)
        if self._port is None:
            self._rate = min_compression_rate
            self._port = PowerPort(lane_of(self.process_group, device), lay_out, wanted, self)
        elif (self._port.lay_out, self._port.reducer) != (lay_out, wanted):
            raise AttachError(
                "the hook or the settings of a PowerSGDState changed after its first step: make a new one"
            )
        return self._port

    def pending(self) -> Memory | None:
        """What was loaded before the first step, once."""
        memory, self._pending = self._pending, None
        return memory

    def draw(self, layout: BucketLayout, buckets: Sequence[GradBucket]) -> dict[str, Tensor]:
        """Draw Q as PyTorch does: in the first PowerSGD step, or in every one without warm start.

        The order in which matrices are drawn is that of the buckets of the first such step, and is kept from then on
        and in saved states, so that a resumed run with other buckets draws the same numbers.
        """
        if first := self.draw_order is None:
            self.draw_order = layout.names_by_bucket(buckets)
        if not first and self.warm_start:
            return {}
        specs = {spec.name: spec for spec in layout.specs}
        rank, together = self.matrix_approximation_rank, self.batch_tensors_with_same_shape
        Q: dict[str, Tensor] = {}
        for names in self.draw_order:
            generator = torch.Generator().manual_seed(int(self.rng.randint(1_000_000_000)))
            Q.update(initial_factors([specs[name] for name in names], generator, rank, self._rate, together))
        return Q

    def count(self, units: Sequence[Unit]) -> None:
        """Count elements as PyTorch does: a matrix that is not compressed counts as it is."""
        for grain, reducer in units:
            after = grain.numel
            if reducer.scope == "tensor":
                batch, rows, columns = grain.shape
                after = batch * (rows + columns) * self.matrix_approximation_rank
            self.total_numel_before_compression += grain.numel
            self.total_numel_after_compression += after
        if self.iter >= self.next_stats_report:
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency
            logger.info("PowerSGD at step %d: rate, elements before, after = %s", self.iter, self.compression_stats())

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory as tensors and numbers, which `torch.load(weights_only=True)` reads.

        Resuming is exact if every rank loads its own. If all load rank 0's, as is usual with PyTorch's, what the
        other ranks had not sent yet is lost.
        """
        if self._session is None:
            parameters = self._pending.parameters if self._pending else {}
        else:
            parameters = saved.save(self._session.engine.states(), self._session.transport.rank)
        return {
            **write_memory(self.iter, parameters, self.rng, self.draw_order),
            "numel": [self.total_numel_before_compression, self.total_numel_after_compression],
            "next_stats_report": self.next_stats_report,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved memory.

        Raises:
            StateError: a damaged state, or one of another version or model; nothing is changed then. Before the first
                step no model is known, so that one of another model is refused there.
        """
        memory = read_memory(state)
        if self._port is None or self._port.session is None:
            self._pending = memory
        else:
            self._port.load(self._port.session, memory)
        # Nothing from here on fails.
        self.rng.set_state({"bit_generator": "MT19937", "state": memory.twister, "has_gauss": 0, "gauss": 0.0})
        self.draw_order = memory.draw_order
        self.total_numel_before_compression, self.total_numel_after_compression = memory.numel
        self.next_stats_report = memory.next_stats_report

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the process group, which cannot be pickled."""
        unsaved = ("process_group", "_port", "_pending", "rng", "draw_order")
        return {**{k: v for k, v in vars(self).items() if k not in unsaved}, "memory": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The default process group serves, unless `process_group` is set before the first step."""
        state = dict(state)
        memory = state.pop("memory")
        vars(self).update(state)
        self.process_group = None
        self._port = None
        self._pending = None
        self.rng = np.random.RandomState(0)
        self.load_state_dict(memory)
