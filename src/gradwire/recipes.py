"""Ready recipes of precision: what to compute in, what gradients travel in, what stays in float32, and why.

    recipe = gradwire.recipes.PRE_TRAINING
    session = gradwire.attach(DistributedDataParallel(model), recipe.spec)
    for inputs, targets in loader:
        with recipe.autocast("cuda"):
            loss = loss_of(model(inputs), targets)
        loss.backward()

`print(recipe)` and `gradwire recipes` show each line with its reason and with what was measured. docs/precision.md has
the figures of all recipes beside those of float32.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from gradwire.core.errors import SpecError
from gradwire.core.nearest import meant

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP8_CAPABILITY: tuple[int, int] = (8, 9)
"""The compute capability from which on a GPU of NVIDIA's multiplies 8-bit floats."""


class RecipeLine(NamedTuple):
    """One setting of a recipe.

    Attributes:
        setting: what is set.
        value: to what.
        reason: why.
        measured: a figure that says so, with where it stands.
    """

    setting: str
    value: str
    reason: str
    measured: str


@dataclass(frozen=True)
class TrainingRecipe:
    """Settings that go together.

    Attributes:
        name: as the command takes it.
        purpose: when to take it.
        spec: for `gradwire.attach`.
        sharded: whether the model is one of `fully_shard`.
        compute: what products are computed in: "fp32", "bf16" or "fp16".
        lines: every setting with its reason.
    """

    name: str
    purpose: str
    spec: str
    sharded: bool
    compute: str
    lines: tuple[RecipeLine, ...]

    def autocast(self, device_type: str, compute: str | None = None) -> contextlib.AbstractContextManager[object]:
        """Return the context of the forward pass and the loss. Weights stay in float32, and so do their gradients.

        Args:
            device_type: "cpu" or "cuda".
            compute: another precision than the recipe's; with "fp16" give `attach` and the loop a
                `torch.amp.GradScaler`.

        Raises:
            SpecError: a precision that is unknown, or that the device lacks.

        >>> with PRE_TRAINING.autocast("cpu"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
        """
        return torch.autocast(device_type, require_compute(compute or self.compute, device_type))

    def policy(self) -> MixedPrecisionPolicy:
        """Return what `fully_shard(model, mp_policy=...)` takes: products in `compute`, sums of gradients in float32.

        >>> LOW_MEMORY.policy().reduce_dtype
        torch.float32
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy  # which takes a second to import

        return MixedPrecisionPolicy(param_dtype=DTYPES[self.compute], reduce_dtype=torch.float32)

    def __str__(self) -> str:
        """All lines, for people."""
        heads = [f"{self.name}: {self.purpose}"]
        return "\n".join(heads + [f"  {a} = {b}\n      {why} Measured: {figure}" for a, b, why, figure in self.lines])


def require_compute(compute: str, device_type: str) -> torch.dtype:
    """Return the dtype of products in a forward pass under autocast.

    Raises:
        SpecError: an unknown one, or one that the device lacks, with what to take.

    >>> require_compute("fp8", "cpu")
    Traceback (most recent call last):
        ...
    gradwire.core.errors.SpecError: fp8 is no precision to compute in on a CPU: take bf16; ...
    """
    travel = "gradients travel in fp8 on every device, by the method 'fp8'"
    if compute == "fp8":
        if device_type != "cuda":
            raise SpecError(f"fp8 is no precision to compute in on a CPU: take bf16; {travel}")
        has: tuple[int, int] = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
        if has < FP8_CAPABILITY:
            raise SpecError(
                f"products of 8-bit floats need compute capability 8.9, and this GPU has {has[0]}.{has[1]}: take bf16; "
                f"{travel}"
            )
        raise SpecError(f"torch.autocast has no 8-bit floats: take bf16, or torchao's float8 layers; {travel}")
    if compute not in DTYPES:
        raise SpecError(f"unknown precision {compute!r}: {meant(compute, DTYPES)}")
    if compute == "bf16" and device_type == "cuda" and not torch.cuda.is_bf16_supported():
        raise SpecError("this GPU has no bfloat16: take fp16, with a torch.amp.GradScaler in the loop and in attach")
    return DTYPES[compute]


_WEIGHTS = RecipeLine(
    "weights and moments of the optimizer",
    "float32",
    "An update is often smaller than half a step of bfloat16, and would be lost.",
    "not measured here; see Micikevicius et al. 2018, Section 3.1",
)
_FIGURES = "docs/precision.md#recipes"

PRE_TRAINING = TrainingRecipe(
    "pre-training",
    "a model from scratch, on links of 1 Gbit/s and slower",
    "int4,layers=default",
    sharded=False,
    compute="bf16",
    lines=(
        _WEIGHTS,
        RecipeLine(
            "torch.autocast",
            "bfloat16",
            "Half of the bytes of activations; with the range of float32 it needs no loss scaler.",
            f"held-out loss beside float32's, {_FIGURES}",
        ),
        RecipeLine(
            "method",
            "int4,layers=default",
            "Four bits with error feedback lose nothing that lasts; embeddings and the output layer get eight.",
            f"bytes and held-out loss beside float32's, {_FIGURES}",
        ),
        RecipeLine(
            "gradients of norms and biases",
            "float32",
            "They are few, and a block that they share with others has one scale for all.",
            "a hundredth of the bytes of a step of byte-GPT: `gradwire cost --stack int4,layers=default`",
        ),
    ),
)

FINE_TUNING = TrainingRecipe(
    "fine-tuning",
    "a trained model, for some hundred steps at a small rate",
    "int8,layers=default",
    sharded=False,
    compute="bf16",
    lines=(
        _WEIGHTS,
        RecipeLine(
            "torch.autocast",
            "bfloat16",
            "Half of the bytes of activations; the range is that of float32.",
            f"held-out loss beside float32's, {_FIGURES}",
        ),
        RecipeLine(
            "method",
            "int8,layers=default",
            "A short run has few steps in which error feedback could make good what four bits lose.",
            f"bytes and held-out loss beside float32's, {_FIGURES}",
        ),
        RecipeLine(
            "gradients of embeddings and of the output layer",
            "bfloat16",
            "Few rows of an embedding have a gradient in a step, beside which the others of a block are zero.",
            f"as a part of the method, {_FIGURES}",
        ),
    ),
)

LOW_MEMORY = TrainingRecipe(
    "low memory",
    "a model that does not fit on each rank: fully_shard",
    "int8,stochastic=on,ef=off,parameters=int8",
    sharded=True,
    compute="bf16",
    lines=(
        _WEIGHTS,
        RecipeLine(
            "MixedPrecisionPolicy",
            "param_dtype=bfloat16, reduce_dtype=float32",
            "Gathered weights and activations take half of the memory; sums over ranks stay exact.",
            f"held-out loss beside float32's, {_FIGURES}",
        ),
        RecipeLine(
            "method",
            "int8,stochastic=on,ef=off",
            "Rounding at random has no bias, so no residual of the size of the whole model is kept on each rank.",
            f"bytes that a rank keeps, {_FIGURES}",
        ),
        RecipeLine(
            "parameters",
            "int8",
            "Of what FSDP2 sends, two thirds are parameters; the shards that the optimizer changes stay in float32.",
            "`gradwire cost --stack int8,parameters=int8`",
        ),
    ),
)

RECIPES = {recipe.name: recipe for recipe in (PRE_TRAINING, FINE_TUNING, LOW_MEMORY)}


def recipe(name: str) -> TrainingRecipe:
    """Return a recipe by its name.

    Raises:
        SpecError: an unknown one, with the nearest.

    >>> recipe("fine-tuning").spec
    'int8,layers=default'
    """
    if name not in RECIPES:
        raise SpecError(f"unknown recipe {name!r}: {meant(name, RECIPES)}")
    return RECIPES[name]
