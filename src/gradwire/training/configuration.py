"""The file that says what is trained on which ranks: a table for the model, its data and its steps, and one for each
axis of the mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from gradwire.choosing.automatic import accuracy_of
from gradwire.core.errors import GradwireError, SpecError
from gradwire.parallel.exchange import row_codec
from gradwire.parallel.pipelines import ScheduleShape
from gradwire.parallel.pipelines.codecs import StageCodecs
from gradwire.parallel.sequences import Contiguous, SequenceLayout, Zigzag
from gradwire.reducers.auto import Auto
from gradwire.reducers.base import Reducer
from gradwire.spec import as_method

T = TypeVar("T")

AXES = ("pp", "dp", "ep", "cp", "tp")
"""Names of the axes, the outermost first: ranks that follow each other differ in tp, those far apart in pp."""


MOST_LR = 1000
VOCABULARY = 256
"""Bytes."""
INNER = 4
"""How many times as wide as a position the inside of a feed-forward layer is."""


class ConfigurationError(SpecError):
    """A value of a configuration that cannot be, with what can.

    Attributes:
        table, key: where it stands.
    """

    def __init__(self, table: str, key: str, text: str) -> None:
        super().__init__(f"[{table}] {key}: {text}" if key else f"[{table}]: {text}")
        self.table, self.key = table, key


@dataclass(frozen=True)
class GPTShape:
    """`[model]`: a GPT over bytes.

    Args:
        layers: blocks of attention and feed-forward.
        width: elements of a position.
        heads: of attention; they divide the width.
        context: positions of a sequence.
        experts: of each feed-forward layer; 0 makes it dense.
        chosen: experts that a position goes through.
        balance_loss: what the loss of unbalanced experts counts (Fedus et al. 2021, equations 4 to 6).
        dtype: of parameters and activations.
    """

    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 128
    experts: int = 0
    chosen: int = 2
    balance_loss: float = 0.01
    dtype: Literal["float32", "float64"] = "float32"

    @property
    def parameters(self) -> int:
        """How many the whole model has.

        >>> GPTShape(layers=1, width=8, context=4).parameters
        4944
        """
        matrices, norms = 4 * self.width**2, 4 * self.width
        feed = 2 * INNER * self.width**2
        feed = self.experts * (feed + self.width) if self.experts else feed
        around = (2 * VOCABULARY + self.context + 2) * self.width
        return around + self.layers * (matrices + norms + feed)


@dataclass(frozen=True)
class TextBatches:
    """`[data]`: windows of a folder of text. Which ones a step has does not depend on the ranks.

    Args:
        batch: sequences of a step, over all ranks.
        micro_batches: that a rank cuts its sequences into, for a pipeline or for less memory.
        text: folder; empty for the sources of Python's standard library.
        seed: of weights, of batches and of methods that draw.
    """

    batch: int = 16
    micro_batches: int = 1
    text: str = ""
    seed: int = 0


@dataclass(frozen=True)
class TrainingSteps:
    """`[steps]`: how many, and how long they are: AdamW whose learning rate rises linearly, then falls as a cosine.

    Args:
        count: steps of the whole training.
        lr: learning rate at its highest.
        warm_up: steps until then.
        weight_decay: of AdamW.
        clip_norm: the largest norm of the gradient of the whole model; 0 does not clip.
    """

    count: int = 50
    lr: float = 2e-3
    warm_up: int = 10
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclass(frozen=True)
class DataAxis:
    """`[dp]`: ranks that train the same parameters on other sequences.

    Args:
        ranks: how many.
        method: that combines gradients: "none", "int8", "topk:0.01" and all others that a session takes.
    """

    ranks: int = 1
    method: str = "none"


@dataclass(frozen=True)
class TensorAxis:
    """`[tp]`: ranks that share the matrices of a layer (Shoeybi et al. 2019).

    Args:
        ranks: how many; they divide the heads.
        sequence: whether they share the positions between these matrices too (Korthikanti et al. 2022).
        overlap: with `sequence`, whether a piece is multiplied while the next one travels; else PyTorch's styles.
        codec: of positions as they are gathered, with `overlap`.
    """

    ranks: int = 1
    sequence: bool = True
    overlap: bool = True
    codec: str = "none"


@dataclass(frozen=True)
class PipelineAxis:
    """`[pp]`: ranks that have some of the layers each.

    Args:
        ranks: how many.
        schedule: of `gradwire.parallel.pipelines.SCHEDULES`.
        codec: of activations between stages.
        gradients: of their gradients; empty for a milder one.
    """

    ranks: int = 1
    schedule: str = "1F1B"
    codec: str = "none"
    gradients: str = ""


@dataclass(frozen=True)
class ContextAxis:
    """`[cp]`: ranks that share the positions of a sequence.

    Args:
        ranks: how many.
        attention: "ring", or "ulysses".
        layout: "zigzag", under which all ranks compute equally long, or "contiguous".
        codec: of keys and values.
    """

    ranks: int = 1
    attention: Literal["ring", "ulysses"] = "ring"
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    codec: str = "none"


@dataclass(frozen=True)
class ExpertAxis:
    """`[ep]`: ranks that share the experts of a layer. Their sequences differ, as those of `[dp]` do.

    Args:
        ranks: how many; they divide the experts.
        codec: of all four exchanges.
    """

    ranks: int = 1
    codec: str = "none"


@dataclass(frozen=True)
class TrainingConfiguration:
    """What is trained, and on which ranks.

    `read_configuration` makes it of a TOML file, in which every table and key may be left out.

    The product of the axes is the number of ranks. A dense parameter has its gradients from all ranks but those of tp
    and pp; an expert has them from dp and cp, since those of ep have other experts.

    Raises:
        ConfigurationError: values that cannot be, with the nearest that can.

    >>> TrainingConfiguration(dp=DataAxis(2, "int8"), tp=TensorAxis(2)).ranks
    4
    """

    model: GPTShape = field(default_factory=GPTShape)
    data: TextBatches = field(default_factory=TextBatches)
    steps: TrainingSteps = field(default_factory=TrainingSteps)
    dp: DataAxis = field(default_factory=DataAxis)
    tp: TensorAxis = field(default_factory=TensorAxis)
    pp: PipelineAxis = field(default_factory=PipelineAxis)
    cp: ContextAxis = field(default_factory=ContextAxis)
    ep: ExpertAxis = field(default_factory=ExpertAxis)

    def __post_init__(self) -> None:
        for name, table in self.tables().items():
            for each in dataclasses.fields(table):
                _require_range(name, each.name, getattr(table, each.name))
        self._require_model()
        self._require_batch()
        self._require_words()

    def tables(self) -> dict[str, Any]:
        """The tables by their names."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def as_tables(self) -> dict[str, dict[str, Any]]:
        """What `configuration_of` makes the same of, and what a TOML or JSON file can hold."""
        return dataclasses.asdict(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each of `AXES`."""
        return tuple(getattr(self, name).ranks for name in AXES)

    @property
    def ranks(self) -> int:
        """How many it takes."""
        return math.prod(self.sizes)

    @property
    def data_ranks(self) -> int:
        """Ranks whose sequences differ."""
        return self.dp.ranks * self.ep.ranks

    @property
    def averaged_ranks(self) -> int:
        """Ranks whose gradients of a dense parameter a mean is taken of."""
        return self.data_ranks * self.cp.ranks

    @property
    def layout(self) -> str:
        """The axes that have more than one rank, in words.

        >>> TrainingConfiguration(dp=DataAxis(2), pp=PipelineAxis(4)).layout
        'pp 4 x dp 2'
        """
        return " x ".join(f"{name} {size}" for name, size in zip(AXES, self.sizes, strict=True) if size > 1) or "1 rank"

    @property
    def around(self) -> SequenceLayout:
        """Which positions each rank of cp has."""
        kind = Zigzag if self.cp.layout == "zigzag" else Contiguous
        return kind(self.model.context, self.cp.ranks)

    @property
    def stages(self) -> ScheduleShape | None:
        """The pipeline, if there is one."""
        if self.pp.ranks == 1:
            return None
        return ScheduleShape(self.pp.schedule, self.pp.ranks, self.data.micro_batches)

    def require_ranks(self, running: int) -> None:
        """Refuse another number of ranks than the file describes.

        Raises:
            ConfigurationError: with what to do.
        """
        if running != self.ranks:
            others = self.ranks // self.dp.ranks
            other = f", or set [dp] ranks = {running // others}" if running % others == 0 else ""
            told = f"the axes ({self.layout}) multiply to {self.ranks}, and {running} ranks run: start {self.ranks}"
            raise ConfigurationError("dp", "ranks", told + other)

    # What does not fit together ----------------------------------------------------------------------------------

    def _require_model(self) -> None:
        model = self.model
        _require_divides("model", "heads", model.heads, model.width, "a width")
        _require_divides("tp", "ranks", self.tp.ranks, model.heads, "heads")
        if model.experts:
            _require_divides("ep", "ranks", self.ep.ranks, model.experts, "experts")
            if model.chosen > model.experts:
                raise ConfigurationError("model", "chosen", f"{model.chosen} of {model.experts} experts: take fewer")
        elif self.ep.ranks > 1:
            raise ConfigurationError("ep", "ranks", "there are no experts to share: set [model] experts")
        pieces = self.cp.ranks * (self.tp.ranks if self.tp.sequence else 1)
        if model.context < 2 * pieces:
            raise ConfigurationError(
                "model", "context", f"{model.context} positions on {pieces} ranks: take {2 * pieces} or more"
            )
        counts = [self.around.count(place) for place in range(self.cp.ranks)]
        uneven = next((count for count in counts if count % self.tp.ranks), None)
        if self.tp.sequence and not self.tp.overlap and uneven is not None:
            told = f"PyTorch's styles do not cut {uneven} positions into {self.tp.ranks} pieces: take overlap = true"
            raise ConfigurationError("tp", "overlap", told)

    def _require_batch(self) -> None:
        unit = self.data_ranks * self.data.micro_batches
        if self.data.batch % unit:
            nearest = max(1, round(self.data.batch / unit)) * unit
            raise ConfigurationError(
                "data",
                "batch",
                f"{self.data.batch} sequences do not divide among {self.data_ranks} ranks of dp and ep with "
                f"{self.data.micro_batches} micro-batches each: take {nearest}",
            )

    def _require_words(self) -> None:
        _told_of("pp", "schedule", lambda: self.stages)
        shape = self.stages
        if shape is not None and self.model.layers < shape.stages:
            raise ConfigurationError(
                "model", "layers", f"{self.model.layers} layers in {shape.stages} stages: take {shape.stages} or more"
            )
        _told_of("pp", "codec", lambda: StageCodecs.of(self.pp.codec, self.pp.gradients or None))
        head = self.model.width // self.model.heads
        for table, width in (("cp", head), ("tp", self.model.width), ("ep", self.model.width)):
            spec = getattr(self, table).codec
            codec = _told_of(table, "codec", lambda spec=spec, width=width: row_codec(spec, width, "codec"))
            if codec is not None and codec.keyed and table != "ep":
                told = f"{spec} would draw the same numbers in each step: take one that does not draw, such as int8"
                raise ConfigurationError(table, "codec", told)
        if self.tp.codec != "none" and not (self.tp.sequence and self.tp.overlap):
            raise ConfigurationError("tp", "codec", "PyTorch's styles have none: take sequence = true, overlap = true")
        self._require_method()

    def _require_method(self) -> None:
        if accuracy_of(self.dp.method) is not None:
            raise ConfigurationError("dp", "method", "write a method, such as int8: groups of ranks would choose apart")
        method = _told_of("dp", "method", lambda: as_method(self.dp.method))
        if method.weighs:
            told = "every rank has as many sequences, so leave weights=given out"
        elif method.private:
            told = "it bounds what a rank gives of a whole model, and parts of models travel apart here: take another"
        elif _measures_routes(method):
            told = "groups of ranks would measure routes apart, and add up in other orders: leave exchange=auto out"
        else:
            told = ""
        if told:
            raise ConfigurationError("dp", "method", f"{self.dp.method}: {told}")
        for ranks in (self.averaged_ranks, self.dp.ranks * self.cp.ranks if self.model.experts else 1):
            if ranks > 1:
                _told_of("dp", "method", lambda ranks=ranks: method.require_ranks(ranks))


def _measures_routes(method: Reducer) -> bool:
    return isinstance(method, Auto) or any(map(_measures_routes, method.children()))


def _require_range(table: str, key: str, value: object) -> None:
    """Refuse numbers that no training has."""
    if key == "lr" and isinstance(value, float | int) and value > MOST_LR:
        raise ConfigurationError(table, key, f"{value} would leave nothing of the parameters: take {MOST_LR} or less")
    least = {"experts": 0, "seed": 0, "weight_decay": 0, "clip_norm": 0, "balance_loss": 0}.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        raise ConfigurationError(table, key, f"{value} is no number to train with")
    if key == "lr":
        if value <= 0:
            raise ConfigurationError(table, key, f"{value} would move nothing: take more than 0, such as 0.002")
    elif value < least:
        raise ConfigurationError(table, key, f"{value} is too small: take {least} or more")


def _require_divides(table: str, key: str, divisor: int, of: int, what: str) -> None:
    if of % divisor:
        around = (each for away in range(1, divisor) for each in (divisor - away, divisor + away))
        legal = next(each for each in around if of % each == 0)
        raise ConfigurationError(table, key, f"{divisor} does not divide {what} of {of}: take {legal}")


def _told_of(table: str, key: str, make: Callable[[], T]) -> T:
    """Say where a word stands that cannot be read."""
    try:
        return make()
    except GradwireError as error:
        raise ConfigurationError(table, key, str(error)) from error
