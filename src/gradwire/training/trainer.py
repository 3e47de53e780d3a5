"""Training on a mesh: batches, passes through stages, combined gradients, one norm, and the steps of an optimizer."""

from __future__ import annotations

import math
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from gradwire.core.collective import AllGather
from gradwire.core.errors import AttachError, GradwireError, SpecError, StepError
from gradwire.core.program import once
from gradwire.drivers.process_group import GroupTransport
from gradwire.drivers.words import gathered_words
from gradwire.parallel.exchange import DEADLINE_S
from gradwire.parallel.pipelines import Pipeline
from gradwire.parallel.pipelines.stage import CompressedStage
from gradwire.parallel.sequences.layouts import even_piece
from gradwire.tasks.builtin import Corpus, load_corpus, windows
from gradwire.tasks.task import TaskError, stream, warm_cosine
from gradwire.training.configuration import VOCABULARY, ConfigurationError, TrainingConfiguration
from gradwire.training.mesh import TrainingMesh
from gradwire.training.model import GPTStage
from gradwire.training.trained import KINDS, CombinedGradients, trained_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
CLIP_EPS = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to a norm."""
FLOOR = 0.1
"""What the learning rate ends at, of its highest."""


class StepFigures(NamedTuple):
    """What a step found, the same on all ranks: the mean loss of all positions in nats, and the norm of the gradient of
    the whole model before it was clipped."""

    loss: float
    norm: float


class MeshTrainer:
    """Trains a GPT over bytes as a configuration says, on the ranks of the default group.

    Every rank makes one and calls `step` equally often. Losses and parameters are those of one process, to rounding, if
    codecs and the method lose nothing.

        loss = 1 / (batch x context)  sum over sequences and positions of -log p(next byte)

    Args:
        configuration: the same on all ranks.
        device: of the tensors.
        deadline_s: seconds after which a silent rank is an error.

    Attributes:
        steps: made so far.
        run: a name that its saves have.
        stages: of this rank, by their numbers.
        gradients: what combines them.

    Raises:
        AttachError: there is no default group.
        SpecError: on every rank: another number of ranks than the configuration has, ranks with other configurations or
            texts, no folder of that name, or one with too little text.

    Example (torchrun --nproc-per-node 4):
        dist.init_process_group("gloo")
        trainer = MeshTrainer(read_configuration("two_by_two.toml"))
        for step in range(trainer.configuration.steps.count):
            print(trainer.step())
    """

    def __init__(
        self,
        configuration: TrainingConfiguration,
        *,
        device: str | torch.device = "cpu",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.configuration, self.device, self.steps = configuration, torch.device(device), 0
        self._corpus = agreed_corpus(configuration, self.device)
        self.run: str = said_by_all(secrets.token_hex(8), self.device)[0]
        self.mesh = TrainingMesh(configuration, self.device.type, deadline_s)
        shape = configuration.stages
        self._pipeline = None if shape is None else self._make_pipeline()
        stages = 1 if shape is None else shape.stages
        indices = [0] if self._pipeline is None else self._pipeline.indices
        self.stages = {index: self._make_stage(index, stages) for index in indices}
        self._has_last = stages - 1 in self.stages
        self._compressed: list[CompressedStage] = []
        self._schedule = None if self._pipeline is None else self._make_schedule(self._pipeline)
        self.tensors = trained_tensors(self.stages.values())
        self.gradients = CombinedGradients(self.mesh, self.tensors, deadline_s)
        steps = configuration.steps
        parameters = [each.local for each in self.tensors.values()]
        self.optimizer = torch.optim.AdamW(parameters, lr=steps.lr, betas=(0.9, 0.95), weight_decay=steps.weight_decay)

    # Stages ------------------------------------------------------------------------------------------------------

    def _make_stage(self, index: int, stages: int) -> nn.Module:
        layers = even_piece(self.configuration.model.layers, stages, index)
        return GPTStage(self.mesh, layers, is_first=index == 0, is_last=index == stages - 1).to(self.device)

    def _make_pipeline(self) -> Pipeline:
        axis, data = self.configuration.pp, self.configuration.data
        return Pipeline(
            axis.schedule,
            data.micro_batches,
            axis.codec,
            axis.gradients or None,
            group=self.mesh.patient_group("pp"),
            device=self.device,
            seed=data.seed,
        )

    def _make_schedule(self, pipeline: Pipeline) -> Any:
        model, data = self.configuration.model, self.configuration.data
        samples = data.batch // self.configuration.data_ranks // data.micro_batches
        tokens = torch.empty(samples, len(self.mesh.positions()), dtype=torch.int64, device="meta")
        between = torch.empty(*tokens.shape, model.width, dtype=getattr(torch, model.dtype), device="meta")
        between.requires_grad_()
        scores = between.new_empty(*tokens.shape, VOCABULARY)
        last = pipeline.shape.stages - 1
        self._compressed = [
            pipeline.stage(
                module,
                index,
                input_args=tokens if index == 0 else between,
                output_args=scores if index == last else between,
            )
            for index, module in self.stages.items()
        ]
        return pipeline.schedule(self._compressed, self._loss, scale_grads=False)

    # A step --------------------------------------------------------------------------------------------------------

    def step(self) -> StepFigures:
        """Train one step.

        Raises:
            StepError: on all ranks, where the loss or the gradient is not finite; no parameter has moved then.
            CommunicationError: a rank failed or fell silent.
        """
        inputs, targets = self.batch(self.steps)
        self.optimizer.zero_grad()
        loss = self._passes(inputs, targets)
        self.gradients.combine()
        found = self._agreed(loss)
        if not (math.isfinite(found.loss) and math.isfinite(found.norm)):
            raise StepError(
                f"the loss of step {self.steps} is {found.loss} and the norm of its gradient {found.norm}: lower "
                "[steps] lr, set clip_norm, or go on from the last save"
            )
        steps = self.configuration.steps
        clipped = steps.clip_norm / (found.norm + CLIP_EPS)
        if 0 < clipped < 1:
            self.gradients.scale(clipped)
        factor = warm_cosine(self.steps, self.steps / steps.count, warm_up=steps.warm_up, floor=FLOOR)
        for group in self.optimizer.param_groups:
            group["lr"] = steps.lr * factor
        self.optimizer.step()
        self.steps += 1
        return found

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank: (its sequences, its positions), int64."""
        data, context = self.configuration.data, self.configuration.model.context
        generator = torch.Generator().manual_seed(stream(data.seed, step))
        starts = torch.randint(len(self._corpus.train) - context - 1, (data.batch,), generator=generator)
        inputs, targets = windows(self._corpus.train, starts[self.mesh.sequences()], context)
        positions = self.mesh.positions()
        return inputs[:, positions].to(self.device), targets[:, positions].to(self.device)

    def _passes(self, inputs: Tensor, targets: Tensor) -> float:
        """Forward and backward passes of all micro-batches. Returns the sum of losses of this rank's positions, in nats
        over the positions of the whole batch; 0 where the last stage is elsewhere."""
        losses: list[Tensor] = []
        if self._schedule is None:
            chunks = self.configuration.data.micro_batches
            (stage,) = self.stages.values()
            for part, target in zip(inputs.chunk(chunks), targets.chunk(chunks), strict=True):
                loss = self._loss(stage(part), target)
                loss.backward()
                losses.append(loss.detach())
        else:
            given = {"target": targets, "losses": losses} if self._has_last else {}
            self._schedule.step(*((inputs,) if 0 in self.stages else ()), **given)
        total = float(sum(loss.detach().double() for loss in losses)) if losses else 0.0
        return total / self.configuration.averaged_ranks

    def _loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Of a micro-batch: the sum over its positions, such that the mean over ranks that are averaged is the loss."""
        whole = self.configuration.data.batch * self.configuration.model.context
        total = functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
        return total * (self.configuration.averaged_ranks / whole)

    def _agreed(self, loss: float) -> StepFigures:
        """The loss and the norm of all ranks, by one small collective whose words all ranks add up in one order."""
        squares = self.gradients.squares()
        mine = torch.tensor([loss, *(squares[kind] for kind in KINDS)], dtype=torch.float64)
        words = self.mesh.world.run(once(AllGather(mine.view(torch.uint8).to(self.device))))
        of_ranks = words.cpu().view(torch.float64).view(*self.configuration.sizes, len(mine))
        losses = of_ranks[..., 0] if self.mesh.splits_positions else of_ranks[..., :1, 0]
        return StepFigures(math.fsum(losses.flatten().tolist()), _norm(of_ranks))

    # Saves ---------------------------------------------------------------------------------------------------------

    def moments_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What the optimizer remembers of a parameter, zeros before its first step."""
        memory = self.optimizer.state[parameter]
        if not memory:
            memory |= {"step": torch.tensor(0.0), **{moment: torch.zeros_like(parameter) for moment in MOMENTS}}
        return memory

    def go_on_from(self, steps: int, run: str) -> None:
        """Count steps from another number, and be the run that was saved, as a resumed training is."""
        self.steps, self.run = steps, run
        for memory in self.optimizer.state.values():
            memory["step"].fill_(steps)
        for stage in self._compressed:
            stage.steps = steps

    def close(self) -> None:
        """Communicate no more."""
        self.gradients.close()


def _norm(of_ranks: Tensor) -> float:
    """The norm of the gradient of the whole model: each part of it counts once, from the first rank that has it.

    Args:
        of_ranks: (pp, dp, ep, cp, tp, 1 + kinds), squares after the loss.
    """
    first_copies = of_ranks[:, 0, :, 0]  # (pp, ep, tp, words)
    whole, of_tp, of_ep = first_copies[:, 0, 0, 1], first_copies[:, 0, :, 2], first_copies[:, :, 0, 3]
    return math.sqrt(math.fsum([*whole.tolist(), *of_tp.flatten().tolist(), *of_ep.flatten().tolist()]))


def said_by_all(words: Any, device: torch.device) -> list[Any]:
    """What every rank of the default group says, in rank order; anything that JSON can carry."""
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    transport = GroupTransport(world)
    try:
        return gathered_words(words, transport, device)
    finally:
        transport.close()


def agreed_corpus(configuration: TrainingConfiguration, device: torch.device) -> Corpus:
    """Read the text, and compare what all ranks of the default group were given, before a mesh is made of it.

    Args:
        configuration: of this rank.
        device: of what travels.

    Raises:
        AttachError: there is no default group.
        SpecError: on every rank, where one has a fault or they differ.
    """
    if not dist.is_initialized():
        raise AttachError("there is no default process group: call torch.distributed.init_process_group first")
    corpus, fault = None, ""
    try:
        configuration.require_ranks(dist.get_world_size())
        corpus = _corpus_of(configuration)
    except GradwireError as error:
        fault = str(error)
    mine = configuration.as_tables()
    mine["data"]["text"] = "" if corpus is None else corpus.fingerprint
    said = said_by_all({"tables": mine, "fault": fault}, device)
    for rank, words in enumerate(said):
        if words["fault"]:
            raise SpecError(words["fault"] if words["fault"] == fault else f"rank {rank}: {words['fault']}")
    first = said[0]["tables"]
    for rank, words in enumerate(said):
        for table, keys in words["tables"].items():
            for key, value in keys.items():
                if value != first[table][key]:
                    raise SpecError(
                        f"[{table}] {key} is {value!r} on rank {rank} and {first[table][key]!r} on rank 0: give all "
                        "ranks the same file and the same text"
                    )
    assert corpus is not None, "a rank without one has a fault"
    return corpus


def _corpus_of(configuration: TrainingConfiguration) -> Corpus:
    text, context = configuration.data.text, configuration.model.context
    try:
        corpus = load_corpus(Path(text) if text else None)
    except TaskError as error:
        raise ConfigurationError("data", "text", str(error).removeprefix("--text ")) from error
    if len(corpus.train) < context + 2:
        told = f"{context} positions, and the text has {len(corpus.train):,}: take fewer, or a longer text"
        raise ConfigurationError("model", "context", told)
    return corpus
