"""PyTorch's PowerSGD hooks by name, signature and meaning, on gradwire's PowerSGD and engine.

A `PowerSGDState` belongs to one model. What it remembers is kept by parameter: DDP may rebuild its buckets, and a
resumed run begins with unrebuilt ones.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from gradwire.adapters.communication import BucketPort, BucketStep, queue_callback
from gradwire.adapters.hooks import lane_of
from gradwire.adapters.power_sgd_memory import Memory, read_memory, write_memory
from gradwire.codecs import Identity
from gradwire.core import saved
from gradwire.core.errors import AttachError
from gradwire.core.grain import ParameterSpec
from gradwire.core.saved_schema import Parameters
from gradwire.core.state import walk
from gradwire.drivers.engine import Engine, Stats
from gradwire.drivers.plan import Place, plan
from gradwire.reducers import AllReduce, ErrorFeedback, Guard, PowerSGD, Reducer, WarmUp
from gradwire.session.lane import Lane

# `register_comm_hook` reads the annotations of a hook, so this module must not postpone them.

logger = logging.getLogger(__name__)


class _Home(NamedTuple):
    """Where a parameter's gradient goes: elements from `begin` on of the planned matrix `name`."""

    name: str
    begin: int


class _Arrangement(NamedTuple):
    """What is planned for the buckets of a first step.

    `specs` are what PowerSGD sees as parameters, in registration order; `padding` are elements (name, begin, numel)
    of them that no parameter fills.
    """

    specs: list[ParameterSpec]
    homes: dict[Tensor, _Home]
    padding: list[tuple[str, int, int]]


Arrange = Callable[[Sequence[GradBucket]], _Arrangement]


def _by_parameter(buckets: Sequence[GradBucket]) -> _Arrangement:
    """Every parameter by itself.

    Before DDP rebuilds them, buckets are in reverse registration order and their parameters in registration order. So
    this numbers parameters as the model does, in every run, and those numbers are the names.
    """
    specs: list[ParameterSpec] = []
    homes: dict[Tensor, _Home] = {}
    for bucket in reversed(buckets):
        dtype, device = bucket.buffer().dtype, bucket.buffer().device  # a wrapper may have cast them
        for parameter in bucket.parameters():
            name = f"{len(specs)}[{'x'.join(map(str, parameter.shape))}]"
            specs.append(ParameterSpec(name, tuple(parameter.shape), dtype, device))
            homes[parameter] = _Home(name, 0)
    return _Arrangement(specs, homes, [])


def _by_bucket(buckets: Sequence[GradBucket]) -> _Arrangement:
    """Each bucket of the first step as one square matrix, filled up with zeros; DDP may rebuild buckets later."""
    specs: list[ParameterSpec] = []
    homes: dict[Tensor, _Home] = {}
    padding: list[tuple[str, int, int]] = []
    for bucket in reversed(buckets):
        flat = bucket.buffer()
        side = math.ceil(math.sqrt(flat.numel()))
        name = f"bucket{bucket.index()}"
        specs.append(ParameterSpec(name, (side, side), flat.dtype, flat.device))
        at = 0
        for parameter in bucket.parameters():
            homes[parameter] = _Home(name, at)
            at += parameter.numel()
        padding.append((name, at, side * side - at))
    return _Arrangement(specs, homes, padding)


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
        self._session: _Session | None = None
        self.reducer(min_compression_rate)  # refuses settings that make no sense here, and not in the backward pass

    @property
    def iter(self) -> int:
        """Finished steps."""
        if self._session is not None:
            return self._session.index
        return self._pending.iter if self._pending else 0

    def reducer(self, min_compression_rate: float) -> Reducer:
        """What the settings say, in gradwire's terms."""
        compressed: Reducer = PowerSGD(self.matrix_approximation_rank, min_compression_rate)
        if self.use_error_feedback:
            compressed = ErrorFeedback(compressed)
        return Guard(WarmUp(AllReduce(Identity()), compressed, self.start_powerSGD_iter))

    def compression_stats(self) -> tuple[float, int, int]:
        """Return (rate, elements before compression, elements after it) of all PowerSGD steps so far."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return before / after if after else 0, before, after

    def stats(self) -> Stats:
        """Return bytes and times so far."""
        return self._session.engine.stats if self._session and self._session.started else Stats()

    def session(self, device: torch.device, arrange: Arrange, min_compression_rate: float) -> "_Session":
        """Return the running communication, begun at the first bucket.

        Raises:
            AttachError: another hook or other settings than in the steps before.
        """
        if self._session is None:
            lane = lane_of(self.process_group, device)
            self._session = _Session(lane, self, arrange, min_compression_rate, self._pending)
            self._pending = None
        elif (self._session.arrange, self._session.reducer) != (arrange, self.reducer(min_compression_rate)):
            raise AttachError(
                "the hook or the settings of a PowerSGDState changed after its first step: make a new one"
            )
        return self._session

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory as tensors and numbers, which `torch.load(weights_only=True)` reads.

        Resuming is exact if every rank loads its own. If all load rank 0's, as is usual with PyTorch's, what the
        other ranks had not sent yet is lost.
        """
        if self._session is None:
            parameters = self._pending.parameters if self._pending else {}
        else:
            parameters = self._session.save()
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
        if self._session is None:
            self._pending = memory
        else:
            self._session.load(memory)
        # Nothing from here on fails.
        self.rng.set_state({"bit_generator": "MT19937", "state": memory.twister, "has_gauss": 0, "gauss": 0.0})
        self.draw_order = memory.draw_order
        self.total_numel_before_compression, self.total_numel_after_compression = memory.numel
        self.next_stats_report = memory.next_stats_report

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the process group, which cannot be pickled."""
        unsaved = ("process_group", "_session", "_pending", "rng", "draw_order")
        return {**{k: v for k, v in vars(self).items() if k not in unsaved}, "memory": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The default process group serves, unless `process_group` is set before the first step."""
        state = dict(state)
        memory = state.pop("memory")
        vars(self).update(state)
        self.process_group = None
        self._session = None
        self._pending = None
        self.rng = np.random.RandomState(0)
        self.load_state_dict(memory)


class _Session(BucketPort):
    """Follows one model: plans in the first step, when all buckets are known, then runs grains as gradients come."""

    def __init__(
        self,
        lane: Lane,
        state: PowerSGDState,
        arrange: Arrange,
        min_compression_rate: float,
        memory: Memory | None,
    ) -> None:
        super().__init__(lane)
        self.arrange = arrange
        self.reducer = state.reducer(min_compression_rate)
        self._rate = min_compression_rate
        self._state = state
        self._memory = memory
        self._arrangement = _Arrangement([], {}, [])
        self._places: dict[Tensor, list[Place]] = {}
        self._padding: list[Place] = []
        self._engine: Engine | None = None

    @property
    def started(self) -> bool:
        """Whether the first step has been planned."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The engine, once the first step is planned."""
        assert self._engine is not None
        return self._engine

    @property
    def index(self) -> int:
        """Finished steps."""
        if self._engine is not None:
            return self._engine.index
        return self._memory.iter if self._memory else 0

    def save(self) -> Parameters:
        """This rank's states by parameter."""
        if self._engine is None:
            return self._memory.parameters if self._memory else {}
        return saved.save(self._engine.states(), dist.get_rank(self.lane.group))

    def load(self, memory: Memory) -> None:
        """Take up saved states; where that is refused nothing is changed."""
        if self._engine is None:
            self._memory = memory
            return
        memory.check_drawn([spec.name for spec in self._arrangement.specs])
        rank, unstarted = dist.get_rank(self.lane.group), memory.iter == 0 and not memory.parameters
        grains, parameters = self._engine.states(), memory.parameters
        states = self._engine.initial_states() if unstarted else saved.load_all(grains, parameters, rank)
        self._engine.set_states(states)
        self._engine.index = memory.iter

    def work(self, buckets: Sequence[GradBucket], last: bool) -> None:
        """Deliver gradients; where all of a step's buckets must be known first, at the last one."""
        compressing = self.index >= self._state.start_powerSGD_iter
        waits = self._engine is None or (compressing and self._state.draw_order is None)
        if waits and not last:
            return
        arrived = buckets if waits else buckets[-1:]
        if arrived[0] is buckets[0]:
            self._begin(buckets, compressing)
        for bucket in arrived:
            self._deliver(bucket)
        self.engine.pump()
        if last:
            self.engine.finish()
            self._write_back(buckets)
            if compressing:
                self._count()

    def _begin(self, buckets: Sequence[GradBucket], compressing: bool) -> None:
        if self._engine is None:
            self._plan(buckets)
        self.engine.begin()
        if compressing:
            self._draw(buckets)
        for unit, _, numel, offset in self._padding:
            grain = self.engine.plan.units[unit].grain
            self.engine.deliver(unit, offset, torch.zeros(numel, dtype=grain.dtype, device=grain.device))

    def _plan(self, buckets: Sequence[GradBucket]) -> None:
        self._arrangement = self.arrange(buckets)
        planned = plan(self._arrangement.specs, self.reducer)
        self._engine = Engine(planned, self.lane.transport())
        pieces = planned.places
        homes = self._arrangement.homes.items()
        self._places = {p: _places(pieces[name], begin, p.numel()) for p, (name, begin) in homes}
        for name, begin, numel in self._arrangement.padding:
            self._padding += _places(pieces[name], begin, numel)
        memory, self._memory = self._memory, None
        if memory is not None:
            self.load(memory)

    def _draw(self, buckets: Sequence[GradBucket]) -> None:
        """Draw Q as PyTorch does: in the first PowerSGD step, or in every one without warm start.

        The order in which matrices are drawn is that of the buckets of the first such step, and is kept from then on
        and in saved states, so that a resumed run with other buckets draws the same numbers.
        """
        state = self._state
        first = state.draw_order is None
        if first:
            state.draw_order = _names_by_bucket(buckets, self._arrangement.homes)
        if not first and state.warm_start:
            return
        assert state.draw_order is not None
        specs = {spec.name: spec for spec in self._arrangement.specs}
        Q: dict[str, Tensor] = {}
        for names in state.draw_order:
            generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
            Q.update(self._initial_factors([specs[name] for name in names], generator))
        self._set_factors(Q)

    def _initial_factors(self, specs: Sequence[ParameterSpec], generator: torch.Generator) -> dict[str, Tensor]:
        """Q of every matrix of a bucket that PyTorch would compress, drawn as PyTorch draws: shape by shape.

        The generator starts where PyTorch's global one is after `manual_seed`, so the numbers are the same. They need
        not be orthonormal: P is made so, and depends on the span of Q alone.
        """
        by_shape: dict[tuple[int, int, int], list[ParameterSpec]] = {}
        for spec in specs:
            rows, columns = spec.matrix_shape
            rank = min(rows, columns, self._state.matrix_approximation_rank)
            if (rows + columns) * rank * self._rate < rows * columns:
                by_shape.setdefault((rows, columns, rank), []).append(spec)
        Q: dict[str, Tensor] = {}
        for (_, columns, rank), group in by_shape.items():
            together = self._state.batch_tensors_with_same_shape
            for drawn in [group] if together else [[spec] for spec in group]:
                shape = (len(drawn), columns, rank)
                factors = torch.randn(shape, generator=generator, dtype=group[0].dtype).float()
                Q.update(zip((spec.name for spec in drawn), factors, strict=True))
        return Q

    def _set_factors(self, Q: dict[str, Tensor]) -> None:
        for grain, state in self.engine.states():
            for path, leaf in walk(state):
                if path.endswith("Qt"):
                    for i, segment in enumerate(grain.segments):
                        leaf.tensor[i].copy_(Q[segment.name].T)

    def _deliver(self, bucket: GradBucket) -> None:
        flat = bucket.buffer()
        for parameter, at in _offsets(bucket):
            for unit, start, numel, offset in self._places_of(parameter):
                self.engine.deliver(unit, offset, flat[at + start : at + start + numel])

    def _places_of(self, parameter: Tensor) -> list[Place]:
        if parameter not in self._places:
            raise AttachError(
                f"a parameter of shape {tuple(parameter.shape)} was not there in the first step: a PowerSGDState "
                "serves one model with one set of trained parameters, so make a new one when either changes"
            )
        return self._places[parameter]

    def _write_back(self, buckets: Sequence[GradBucket]) -> None:
        for bucket in buckets:
            flat = bucket.buffer()
            for parameter, at in _offsets(bucket):
                for unit, start, numel, offset in self._places[parameter]:
                    flat[at + start : at + start + numel].copy_(self.engine.mean(unit)[offset : offset + numel])

    def _count(self) -> None:
        """Count elements as PyTorch does: a matrix that is not compressed counts as it is."""
        state = self._state
        for grain, reducer in self.engine.plan.units:
            state.total_numel_before_compression += grain.numel
            if reducer.scope == "tensor":
                batch, rows, columns = grain.shape
                state.total_numel_after_compression += batch * (rows + columns) * state.matrix_approximation_rank
            else:
                state.total_numel_after_compression += grain.numel
        if self.index >= state.next_stats_report:
            state.next_stats_report = self.index + state.compression_stats_logging_frequency
            logger.info("PowerSGD at step %d: rate, elements before, after = %s", self.index, state.compression_stats())

    def after_backward(self, step: BucketStep) -> None:
        """Once DDP has written gradients: where it left one as it was, the mean was dropped and is owed still."""
        if not self._arrangement.padding:  # a square mixes parameters, and cannot be taken back in part
            queue_callback(lambda: self._take_back_unused(step))

    def _take_back_unused(self, step: BucketStep) -> None:
        if unused := {self._arrangement.homes[parameter].name for parameter in step.unwritten()}:
            self.engine.take_back(unused)


def _places(pieces: Iterable[Place], begin: int, numel: int) -> list[Place]:
    """Where elements [begin, begin + numel) of a planned parameter live, counted from `begin`.

    >>> _places([Place(0, 0, 10, 100), Place(1, 10, 10, 0)], begin=8, numel=5)
    [Place(unit=0, start=0, numel=2, offset=108), Place(unit=1, start=2, numel=3, offset=0)]
    """
    places: list[Place] = []
    for unit, start, size, offset in pieces:
        low, high = max(begin, start), min(begin + numel, start + size)
        if low < high:
            places.append(Place(unit, low - begin, high - low, offset + low - start))
    return places


def _offsets(bucket: GradBucket) -> Iterable[tuple[Tensor, int]]:
    at = 0
    for parameter in bucket.parameters():
        yield parameter, at
        at += parameter.numel()


def _names_by_bucket(buckets: Sequence[GradBucket], homes: Mapping[Tensor, _Home]) -> list[list[str]]:
    """What is drawn for each bucket; what lies in several, with the first."""
    seen: set[str] = set()
    order: list[list[str]] = []
    for bucket in buckets:
        names = list(dict.fromkeys(homes[p].name for p in bucket.parameters()))
        order.append([name for name in names if name not in seen])
        seen.update(names)
    return order


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients as matrices of low rank (Vogels, Karimireddy & Jaggi 2019, Algorithm 1).

    With one bucket it gives what PyTorch's hook gives, to rounding. With several it works on Gloo too, where
    PyTorch's crashes. After a step with a NaN or an infinity every rank sees NaN and nothing is remembered of that
    step, so the next clean one is clean; agreeing on it costs a byte a grain. A layer without gradient gives no NaN.

    Args:
        state: settings and memory, for this model alone.
        bucket: given by DDP.

    Example:
        state = gradwire.hooks.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=0)
        ddp.register_comm_hook(state, gradwire.hooks.powerSGD_hook)
    """
    session = state.session(bucket.buffer().device, _by_parameter, state.min_compression_rate)
    return session.hook(bucket)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average each bucket as one square matrix of low rank: faster than `powerSGD_hook`, and less exact.

    PyTorch's hook of this name stops at an assertion. Squares are those of the first step's buckets, whatever DDP
    makes of them later. `min_compression_rate` plays no part.

    Args:
        state: settings and memory, for this model alone.
        bucket: given by DDP.

    Example:
        ddp.register_comm_hook(gradwire.hooks.PowerSGDState(None), gradwire.hooks.batched_powerSGD_hook)
    """
    return state.session(bucket.buffer().device, _by_bucket, 1.0).hook(bucket)
