"""A configuration of DeepSpeed, with a reason for each key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from gradwire.config.check_deepspeed import CHECKS
from gradwire.config.deepspeed_file import DeepSpeedFile
from gradwire.config.deepspeed_keys import SOURCE, ZEROPP_SOURCE
from gradwire.config.setting import ConfigFile, Setting
from gradwire.config.shape import TrainingShape, require_one_of
from gradwire.core.errors import SpecError
from gradwire.doctor.finding import Examination, Finding

ZEROPP_PARTS = ("qwz", "hpz", "qgz")
"""Parts of ZeRO++: quantized weights, a second copy of parameters in each node, quantized gradients."""
OFFLOADS = ("none", "optimizer", "all")
_BUFFERS = "https://huggingface.co/docs/transformers/deepspeed"
_STAGES = (
    "nothing is sharded, and each rank has everything",
    "each rank has a shard of the optimizer's states, and sends what it would send without",
    "each rank has a shard of gradients too, and sends what it would send without",
    "each rank has a shard of parameters too, which are gathered in both passes: half as many bytes again",
)


def write_deepspeed(
    shape: TrainingShape,
    stage: int = 2,
    zeropp: Sequence[str] = (),
    offload: str = "none",
    hidden_size: int | None = None,
    clip: float | None = 1.0,
) -> ConfigFile:
    """Write a configuration of DeepSpeed. The optimizer is left to the script, as are its rates.

    What is written is checked as `check_deepspeed` does, and refused where that finds an error.

    Args:
        shape: ranks, batches and precision.
        stage: of ZeRO, 0 to 3: what is sharded.
        zeropp: parts of ZeRO++, of stage 3: "qwz" gathers parameters in 8 bits, "hpz" keeps a second copy in each node
            for the backward pass, and "qgz" sends gradients between nodes in 4 bits.
        offload: "none", "optimizer" for its states in the memory of hosts, or "all" for parameters as well.
        hidden_size: of the model; with it buckets of stage 3 are those that Transformers would choose.
        clip: the norm that gradients are clipped to; None for none.

    Raises:
        SpecError: numbers or words that make no configuration, with what to do instead.

    >>> shape = TrainingShape(world_size=16, micro_batch=4, batch=256, gpus_per_node=8)
    >>> written = write_deepspeed(shape, stage=3, zeropp=["qwz", "hpz"])
    >>> json.loads(written.text)["zero_optimization"]["zero_hpz_partition_size"]
    8
    >>> print(written.settings[0])
    train_micro_batch_size_per_gpu = 4: what one rank has in one forward pass [https://www.deepspeed.ai/docs/config-json/]
    """
    if stage not in range(4):
        raise SpecError(f"ZeRO has no stage {stage}: take 0, 1, 2 or 3")
    require_one_of("offload", offload, OFFLOADS)
    for part in zeropp:
        require_one_of("part of ZeRO++", part, ZEROPP_PARTS)
    if hidden_size is not None and hidden_size < 1:
        raise SpecError(f"hidden_size={hidden_size} is no size: give that of the model, such as 4096")
    if clip is not None and not 0 < clip < float("inf"):
        raise SpecError(f"gradients cannot be clipped to a norm of {clip:g}: give 1.0, or leave it out")
    settings = (
        *_batches(shape),
        *_precision(shape, "qgz" in zeropp),
        *_sharding(shape, stage, hidden_size),
        *_zeropp(shape, zeropp),
        *_offload(offload),
        *([Setting("gradient_clipping", clip, "one bad batch cannot move the model far", SOURCE)] if clip else []),
        Setting("wall_clock_breakdown", False, "times of parts would make each step wait for the GPU", SOURCE),
    )
    keys = _nested(settings)
    _require_sound(DeepSpeedFile(keys, shape.world_size, shape.gpus_per_node))
    return ConfigFile(json.dumps(keys, indent=2) + "\n", settings, has_reasons=False)


def _batches(shape: TrainingShape) -> Iterator[Setting]:
    steps = shape.accumulation()
    yield Setting("train_micro_batch_size_per_gpu", shape.micro_batch, "what one rank has in one forward pass", SOURCE)
    accumulates = (
        f"{steps} of these are summed up before one exchange" if steps > 1 else "an exchange after each of these"
    )
    yield Setting("gradient_accumulation_steps", steps, accumulates, SOURCE)
    product = f"{shape.micro_batch} x {steps} x {shape.world_size} ranks, which DeepSpeed compares"
    yield Setting("train_batch_size", shape.micro_batch * steps * shape.world_size, product, SOURCE)


def _precision(shape: TrainingShape, quantizes_gradients: bool) -> Iterator[Setting]:
    if shape.precision == "bf16":
        yield Setting("bf16.enabled", True, "half of the memory, and the range of float32: no loss scaler", SOURCE)
    if shape.precision == "fp16":
        yield Setting("fp16.enabled", True, "for GPUs without bfloat16", SOURCE)
        yield Setting("fp16.loss_scale", 0, "the scale follows the gradients, so that few are lost to zero", SOURCE)
    if quantizes_gradients:
        return  # what gradients travel in between nodes, nothing else decides
    exact = "sums over many ranks keep their small parts; twice the bytes of 16 bits"
    rounded = "half of the bytes of fp32; each addition rounds"
    why = exact if shape.reduce == "fp32" else rounded
    yield Setting("communication_data_type", shape.reduce, why, SOURCE)


def _sharding(shape: TrainingShape, stage: int, hidden_size: int | None) -> Iterator[Setting]:
    yield Setting("zero_optimization.stage", stage, _STAGES[stage], SOURCE)
    if not stage:
        return
    yield Setting("zero_optimization.overlap_comm", True, "gradients travel while the backward pass goes on", SOURCE)
    yield Setting(
        "zero_optimization.contiguous_gradients", True, "gradients are copied into one buffer: no fragments", SOURCE
    )
    if stage < 3:
        held = "with overlap_comm buffers of 4.5 x 2 x 4e8 bytes = 3.6 GB on each GPU"
        yield Setting("zero_optimization.reduce_bucket_size", 200_000_000, held, _BUFFERS)
        yield Setting("zero_optimization.allgather_bucket_size", 200_000_000, "the same for parameters", _BUFFERS)
    elif hidden_size is not None:
        square = hidden_size * hidden_size
        yield Setting("zero_optimization.reduce_bucket_size", square, "a matrix of the model at a time", _BUFFERS)
        yield Setting(
            "zero_optimization.stage3_prefetch_bucket_size",
            square * 9 // 10,
            "one is fetched ahead of its use",
            _BUFFERS,
        )
        yield Setting(
            "zero_optimization.stage3_param_persistence_threshold",
            10 * hidden_size,
            "norms and biases are not sharded: gathering them would be all latency",
            _BUFFERS,
        )
    if stage == 3:
        yield Setting(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            True,
            "save_16bit_model writes the whole model, of which each rank has a shard",
            SOURCE,
        )


def _zeropp(shape: TrainingShape, parts: Sequence[str]) -> Iterator[Setting]:
    if "qwz" in parts:
        why = "parameters are gathered in 8 bits in place of 16"
        yield Setting("zero_optimization.zero_quantized_weights", True, why, ZEROPP_SOURCE)
    if "hpz" in parts:
        if shape.gpus_per_node is None:
            raise SpecError("hpz keeps a copy of the parameters in each node: give the GPUs of a node, gpus_per_node=8")
        why = "the backward pass gathers parameters inside a node, from a second copy that takes memory"
        yield Setting("zero_optimization.zero_hpz_partition_size", shape.gpus_per_node, why, ZEROPP_SOURCE)
    if "qgz" in parts:
        if shape.gpus_per_node is None:
            raise SpecError("qgz quantizes what travels between nodes: give the GPUs of a node, gpus_per_node=8")
        why = "gradients travel between nodes in 4 bits, without error feedback: compare the loss with and without"
        yield Setting("zero_optimization.zero_quantized_gradients", True, why, ZEROPP_SOURCE)


def _offload(offload: str) -> Iterator[Setting]:
    if offload in ("optimizer", "all"):
        why = "states of the optimizer stay in the memory of the host, and are stepped there"
        yield Setting("zero_optimization.offload_optimizer.device", "cpu", why, SOURCE)
        pinned = "pages that cannot move are copied from and to the GPU while it computes"
        yield Setting("zero_optimization.offload_optimizer.pin_memory", True, pinned, SOURCE)
    if offload == "all":
        why = "parameters are there too, and each pass copies them to the GPU"
        yield Setting("zero_optimization.offload_param.device", "cpu", why, SOURCE)
        yield Setting("zero_optimization.offload_param.pin_memory", True, "as for the optimizer", SOURCE)


def _nested(settings: Sequence[Setting]) -> dict[str, Any]:
    """Settings by dotted names as sections in sections.

    >>> _nested([Setting("a.b", 1, "", ""), Setting("a.c", 2, "", "")])
    {'a': {'b': 1, 'c': 2}}
    """
    keys: dict[str, Any] = {}
    for each in settings:
        *sections, last = each.name.split(".")
        here = keys
        for section in sections:
            here = here.setdefault(section, {})
        here[last] = each.value
    return keys


def _require_sound(file: DeepSpeedFile) -> None:
    """Refuse what the checks find wrong, so that what may go together is written in one place."""
    found = Examination.of(each for check in CHECKS for each in check(file))
    wrong: list[Finding] = [each for each in found.findings if each.severity != "note"]
    if wrong:
        raise SpecError(f"{wrong[0].what}: {wrong[0].remedy[:1].lower()}{wrong[0].remedy[1:]}")
