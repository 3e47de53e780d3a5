"""Checks of what keys of a configuration of DeepSpeed mean together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradwire.config.deepspeed_file import DeepSpeedFile
from gradwire.config.deepspeed_keys import (
    CODE,
    CONFIG_CODE,
    ENGINE_CODE,
    ONE_BIT,
    OWN_OPTIMIZERS,
    SEEN,
    SOURCE,
    STAGE3_ONLY,
    ZERO_CODE,
    ZERO_OPTIMIZERS,
    ZEROPP_SOURCE,
)
from gradwire.core.figures import si_bytes
from gradwire.core.nearest import nearest
from gradwire.doctor.finding import Finding, Outcome, Unchecked

BATCH, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_ZERO = "zero_optimization"
_QUANTIZED_GRADIENTS = f"{_ZERO}.zero_quantized_gradients"
_LOST = frozenset({"offload_param", "cpu_offload_param"}) | {name for name in STAGE3_ONLY if name.startswith("zero_")}
"""Keys that somebody counts on for memory or for fewer bytes; the others of stage 3 only tune it."""
_BUFFERS = "https://huggingface.co/docs/transformers/deepspeed"
_STAGE3 = f"{CODE}/zero/stage3.py"
_STAGES_1_AND_2 = f"{CODE}/zero/stage_1_and_2.py"


# Batches and precision ------------------------------------------------------------------------------------------------


def batches(file: DeepSpeedFile) -> Iterator[Outcome]:
    """The batch of a step is what a rank has at once, times its micro-batches, times all ranks."""
    given = {name: file.count(name) for name in (BATCH, MICRO, STEPS)}
    evidence = ", ".join(f"{name} = {value}" for name, value in given.items() if value is not None)
    for name, value in given.items():
        if value is not None and value < 1:
            what = f"{name} is {value}, and DeepSpeed takes 1 or more"
            yield Finding("error", "batch", what, f"{name} = {value}", "Write 1 or more.", CONFIG_CODE)
            return
    if BATCH not in file.keys and MICRO not in file.keys:
        what = "no size of a batch is given, and DeepSpeed refuses that"
        remedy = f"Write {MICRO}, or {BATCH}."
        yield Finding("error", "batch", what, f"neither {BATCH} nor {MICRO} is there", remedy, SOURCE)
        return
    batch, micro, steps = given.values()
    if batch is None:
        return
    if file.world_size is None:
        yield Unchecked("batch", "the number of ranks was not given")
        return
    if micro is not None and steps is not None and batch != micro * steps * file.world_size:
        what = f"{BATCH} is {batch}, which is not {micro} x {steps} x {file.world_size} = "
        what += f"{micro * steps * file.world_size}, and DeepSpeed refuses that"
        remedy = f"Correct one of the three, or leave {BATCH} out: it follows from the others."
        yield Finding("error", "batch", what, f"{evidence}, {file.world_size} ranks", remedy, SOURCE)
    elif batch % ((micro or 1) * (steps or 1) * file.world_size):
        at_once = (micro or 1) * (steps or 1) * file.world_size
        what = f"{BATCH} is {batch}, which is no multiple of {at_once}, and DeepSpeed refuses that"
        remedy = f"Write {max(1, batch // at_once) * at_once} or {(batch // at_once + 1) * at_once}."
        yield Finding("error", "batch", what, f"{evidence}, {file.world_size} ranks", remedy, SOURCE)


def filled_in_later(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Values that Transformers or Accelerate fill in; DeepSpeed alone would fail at those outside of sections."""
    autos = list(file.autos)
    if autos:
        more = f" and {len(autos) - 3} more" if len(autos) > 3 else ""
        why = (
            f'{", ".join(autos[:3])}{more} are "auto", which Transformers or Accelerate fill in, and nothing else does'
        )
        yield Unchecked("values", why)


def two_precisions(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Only one precision can be computed in."""
    if _fp16(file) and _bf16(file):
        what = "fp16 and bf16 are both on, and DeepSpeed refuses that"
        remedy = "Turn one of them off. Take bf16 where the GPU has it: its range needs no loss scaler."
        yield Finding("error", "precision", what, "fp16.enabled and bf16.enabled are true", remedy, SOURCE)


def _fp16(file: DeepSpeedFile) -> bool:
    return file.is_on("fp16.enabled")


def _bf16(file: DeepSpeedFile) -> bool:
    return file.is_on("bf16.enabled") or ("bf16" not in file.keys and file.is_on("bfloat16.enabled"))


def precision_that_is_off(file: DeepSpeedFile) -> Iterator[Outcome]:
    """A section that sets something, but not that it is on, is off."""
    for name in ("fp16", "bf16", "bfloat16", "torch_autocast"):
        section = file.section(name)
        if section and "enabled" not in section:
            what = f"{name} is off: its section does not say that it is on"
            remedy = f'Write "enabled": true into {name}, or leave the section out.'
            yield Finding("warning", "precision", what, f"{name} has {', '.join(section)}", remedy, SOURCE)


def master_weights(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Weights of the optimizer in 16 bits are of ZeRO alone."""
    for name in (
        "fp16.fp16_master_weights_and_grads",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
    ):
        if file.is_on(name) and file.stage == 0:
            what = f"{name} needs ZeRO, and DeepSpeed refuses it without"
            remedy = "Set zero_optimization.stage to 1, 2 or 3, or leave it out."
            yield Finding("error", "precision", what, f"{name} is true at stage 0", remedy, CONFIG_CODE)
    if file.is_on("bf16.bf16_optimizer_states") and not file.is_on("bf16.bf16_master_weights_and_grads"):
        what = "bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads, and DeepSpeed refuses it without"
        remedy = "Turn on both, or neither."
        yield Finding("error", "precision", what, "only bf16_optimizer_states is true", remedy, CONFIG_CODE)


def data_types(file: DeepSpeedFile) -> Iterator[Outcome]:
    """What gradients are kept in, and what parameters are cast to."""
    computed = "fp16" if _fp16(file) else "bf16" if _bf16(file) else "fp32"
    kept = file.at("data_types.grad_accum_dtype")
    if isinstance(kept, str) and kept != computed and file.stage == 0:
        what = f"gradients of {computed} cannot be kept in {kept} without ZeRO, and DeepSpeed refuses that"
        remedy = "Set zero_optimization.stage to 1 or more, or leave data_types.grad_accum_dtype out."
        yield Finding("error", "precision", what, f"data_types.grad_accum_dtype = {kept!r}", remedy, ENGINE_CODE)
    cast = file.at("data_types.param_dtype")
    if isinstance(cast, str) and cast != computed:
        what = f"data_types.param_dtype is {cast}, but what is computed in is {computed}, and DeepSpeed refuses that"
        remedy = "Leave data_types.param_dtype out: it follows from fp16 and bf16."
        yield Finding("error", "precision", what, f"data_types.param_dtype = {cast!r}", remedy, ENGINE_CODE)


# Sharding and offload -------------------------------------------------------------------------------------------------


def keys_of_stage_3(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Keys that nothing reads below stage 3."""
    if file.stage is None or file.stage > 2:
        return
    there = [name for name, value in file.section(_ZERO).items() if name in STAGE3_ONLY and value not in (False, None)]
    lost = [name for name in there if name in _LOST and not _is_without_effect(file, name)]
    for name in lost:
        what = f"{_ZERO}.{name} has no effect at stage {file.stage}: only stage 3 shards parameters"
        remedy = f"Set {_ZERO}.stage to 3, or leave it out."
        yield Finding("warning", "sharding", what, f"{name} = {file.section(_ZERO)[name]}", remedy, SOURCE)
    tuning = [name for name in there if name not in _LOST]
    if tuning:
        what = f"{', '.join(tuning)} {'have' if len(tuning) > 1 else 'has'} no effect at stage {file.stage}"
        yield Finding(
            "note", "sharding", what, f"{_ZERO}.stage = {file.stage}", "Leave out what is of stage 3.", SOURCE
        )


def _is_without_effect(file: DeepSpeedFile, name: str) -> bool:
    """Whether a key says what would be so without it."""
    if name == "offload_param":
        return file.at(f"{_ZERO}.offload_param.device") in (None, "none")
    return name == "zero_hpz_partition_size" and file.count(f"{_ZERO}.{name}") in (0, 1)


def offload(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Offload that a stage does not take, or without a place to go to."""
    name = f"{_ZERO}.offload_optimizer"
    device = file.at(f"{name}.device")
    if device in ("cpu", "nvme") and file.stage == 0:
        what = "the optimizer is not offloaded: that begins with stage 1"
        remedy = f"Set {_ZERO}.stage to 1, 2 or 3, or leave offload_optimizer out."
        yield Finding("warning", "offload", what, f"{name}.device = {device!r} at stage 0", remedy, SOURCE)
    if device == "nvme" and file.stage in (1, 2):
        what = f"at stage {file.stage} the optimizer's states stay in the memory of the host: NVMe is of stage 3"
        remedy = f'Set {_ZERO}.stage to 3, or write "device": "cpu".'
        yield Finding("warning", "offload", what, f"{name}.device = 'nvme'", remedy, _STAGES_1_AND_2)
    ratio = file.at(f"{name}.ratio")
    if isinstance(ratio, (int, float)) and ratio < 1 and file.stage in (0, 1, 2):
        what = f"a part of the optimizer can be offloaded at stage 3 alone, and DeepSpeed refuses it at {file.stage}"
        remedy = f"Set {_ZERO}.stage to 3, or leave ratio out."
        yield Finding("error", "offload", what, f"{name}.ratio = {ratio}", remedy, ZERO_CODE)
    for part in ("offload_optimizer", "offload_param"):
        if file.at(f"{_ZERO}.{part}.device") == "nvme" and not file.at(f"{_ZERO}.{part}.nvme_path"):
            what = f"{part} goes to NVMe, and no path says where"
            remedy = f"Write {part}.nvme_path, a folder on a local disk."
            yield Finding("error", "offload", what, f"{_ZERO}.{part}.nvme_path is missing", remedy, SOURCE)


def gradient_norm(file: DeepSpeedFile) -> Iterator[Outcome]:
    """The norm of all gradients can be left out at two stages alone."""
    if file.at(f"{_ZERO}.compute_grad_norm") is not False:
        return
    evidence, remedy = f"{_ZERO}.compute_grad_norm = false", f"Leave {_ZERO}.compute_grad_norm out."
    if file.stage in (0, 3):
        what = f"compute_grad_norm can be false at stages 1 and 2 alone, and DeepSpeed refuses it at {file.stage}"
        yield Finding("error", "sharding", what, evidence, remedy, ZERO_CODE)
    elif file.at("gradient_clipping"):
        what = "gradients are to be clipped by their norm, which compute_grad_norm says not to compute"
        yield Finding("error", "sharding", what, f"{evidence}, gradient_clipping is set", remedy, ZERO_CODE)


# Communication --------------------------------------------------------------------------------------------------------


def quantized_communication(file: DeepSpeedFile) -> Iterator[Outcome]:
    """What ZeRO++'s quantized gradients need."""
    if file.stage != 3 or not file.is_on(_QUANTIZED_GRADIENTS):
        return
    if file.at(f"{_ZERO}.reduce_scatter") is False:
        what = "quantized gradients need reduce_scatter, and DeepSpeed refuses them without"
        remedy = f"Leave {_ZERO}.reduce_scatter out: it is on by itself."
        yield Finding("error", "communication", what, f"{_ZERO}.reduce_scatter = false", remedy, _STAGE3)
    if file.world_size is None or file.gpus_per_node is None:
        yield Unchecked("quantized gradients", "the number of ranks or of GPUs in a node was not given")
    elif file.world_size <= file.gpus_per_node:
        what = "quantized gradients have no effect in one node: DeepSpeed quantizes what travels between nodes"
        evidence = f"{file.world_size} ranks, {file.gpus_per_node} GPUs in a node"
        yield Finding("warning", "communication", what, evidence, f"Leave {_QUANTIZED_GRADIENTS} out.", _STAGE3)


def partition_size(file: DeepSpeedFile) -> Iterator[Outcome]:
    """ZeRO++'s second copy of parameters is that of one node, or the gathers cross nodes after all."""
    size = file.count(f"{_ZERO}.zero_hpz_partition_size")
    if size is None or size < 2 or file.stage != 3:
        return
    evidence = f"zero_hpz_partition_size = {size}, {file.world_size} ranks"
    if file.world_size is None:
        yield Unchecked("partition size", "the number of ranks was not given")
    elif file.world_size % min(size, file.world_size):
        what = f"{file.world_size} ranks cannot be cut into groups of {size}, and DeepSpeed refuses that"
        remedy = f"Write a number that divides {file.world_size}: the GPUs of a node."
        yield Finding("error", "communication", what, evidence, remedy, ZEROPP_SOURCE)
    if file.gpus_per_node is not None and size != file.gpus_per_node:
        crosses = size > file.gpus_per_node
        what = "parameters are gathered over several nodes in the backward pass, which the second copy is to avoid"
        what = what if crosses else "a node keeps several second copies of its parameters, which costs memory alone"
        remedy = f"Write {file.gpus_per_node}, the GPUs of a node."
        evidence = f"zero_hpz_partition_size = {size}, {file.gpus_per_node} GPUs in a node"
        yield Finding("warning" if crosses else "note", "communication", what, evidence, remedy, ZEROPP_SOURCE)


_LEAST_BUCKET, _BUFFER_BYTES = 1_000_000, 10_000_000_000


def bucket_sizes(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Buckets that are so small that latency counts, or so large that memory does. They are counted in elements."""
    sizes = {name: file.count(f"{_ZERO}.{name}") for name in ("reduce_bucket_size", "allgather_bucket_size")}
    for name, size in sizes.items():
        if size is not None and size < 1:
            what = f"{name} is {size}, and a bucket has 1 element or more"
            yield Finding(
                "error", "communication", what, f"{_ZERO}.{name} = {size}", "Write 5e8, or leave it out.", SOURCE
            )
        elif size is not None and size < _LEAST_BUCKET:
            what = f"{name} is {size} elements, so that each collective carries little and latency counts"
            remedy = "Write 5e7 to 5e8. It is a number of elements, and neither of bytes nor of megabytes."
            yield Finding("warning", "communication", what, f"{_ZERO}.{name} = {size}", remedy, SOURCE)
    overlaps = file.at(f"{_ZERO}.overlap_comm")
    if file.stage in (1, 2) and overlaps is True:
        held = int(4.5 * 2 * sum(500_000_000 if size is None else max(size, 0) for size in sizes.values()))
        if held > _BUFFER_BYTES:
            what = f"buffers of communication take about {si_bytes(held)} on each GPU"
            evidence = "4.5 x 2 bytes x (reduce_bucket_size + allgather_bucket_size), with overlap_comm"
            remedy = "Write 2e8 for both, unless the memory is there."
            yield Finding("warning", "communication", what, evidence, remedy, _BUFFERS)


def scaling_of_gradients(file: DeepSpeedFile) -> Iterator[Outcome]:
    """When gradients are divided by the number of ranks, and whether they are."""
    scatters = file.at(f"{_ZERO}.reduce_scatter") is not False and file.stage in (2, 3)
    predivide = file.at("gradient_predivide_factor")
    divides = isinstance(predivide, (int, float)) and predivide != 1
    if file.is_on("prescale_gradients") and scatters:
        what = f"prescale_gradients does not go with reduce_scatter, and DeepSpeed refuses it at stage {file.stage}"
        remedy = "Leave prescale_gradients out."
        yield Finding("error", "communication", what, "prescale_gradients = true", remedy, _STAGE3)
    if divides and scatters:
        what = (
            f"gradient_predivide_factor does not go with reduce_scatter, and DeepSpeed refuses it at stage {file.stage}"
        )
        remedy = "Leave gradient_predivide_factor out."
        yield Finding("error", "communication", what, f"gradient_predivide_factor = {predivide}", remedy, _STAGE3)
    elif divides and file.is_on("prescale_gradients"):
        what = "gradient_predivide_factor has no effect: prescale_gradients divides by all ranks beforehand"
        remedy = "Leave one of them out."
        yield Finding(
            "warning", "communication", what, f"gradient_predivide_factor = {predivide}", remedy, _STAGES_1_AND_2
        )
    if file.at("gradient_allreduce_op") == "sum" and file.stage == 3:
        what = "gradient_allreduce_op cannot be 'sum' at stage 3, and DeepSpeed refuses that"
        remedy = "Write 'mean', or leave it out."
        yield Finding("error", "communication", what, "gradient_allreduce_op = 'sum'", remedy, CONFIG_CODE)


def dtype_of_communication(file: DeepSpeedFile) -> Iterator[Outcome]:
    """What gradients are summed in."""
    dtype = file.at("communication_data_type")
    if dtype == "fp16" and not _fp16(file):
        computed = "bf16" if _bf16(file) else "fp32"
        what = f"gradients of {computed} are summed in fp16, which overflows beyond 65504, and no loss scaler notices"
        remedy = "Write 'fp32', or 'bf16' for half of the bytes."
        yield Finding("warning", "communication", what, "communication_data_type = 'fp16'", remedy, SOURCE)
    if dtype == "fp32" and file.stage == 3 and file.is_on(_QUANTIZED_GRADIENTS):
        what = "between nodes gradients travel in 4 bits, whatever communication_data_type says"
        remedy = "Leave communication_data_type out, or zero_quantized_gradients for sums in fp32."
        evidence = "communication_data_type = 'fp32', zero_quantized_gradients = true"
        yield Finding("note", "communication", what, evidence, remedy, ZEROPP_SOURCE)


# Optimizers, and what was left on -------------------------------------------------------------------------------------


def optimizers(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Optimizers that a stage does not allow, that are gone, or that never were."""
    name, written = file.optimizer, file.at("optimizer.type")
    evidence = f"optimizer.type = {written!r}"
    if name in ONE_BIT and file.stage:
        what = f"{written} does not go with ZeRO: it sends signs of the whole momentum, of which a rank has a shard"
        remedy = (
            "Leave zero_optimization out, or take AdamW. gradwire sends few bits under FSDP2 and DDP: docs/fsdp2.md."
        )
        yield Finding("error", "optimizer", what, f"{evidence}, stage {file.stage}", remedy, SOURCE)
    elif name in ONE_BIT:
        what = f"{written} was removed: DeepSpeed {SEEN} has no optimizers of one bit, and older versions have"
        remedy = "Take AdamW, or gradwire.sync's 'onebitadam' with DistributedDataParallel."
        yield Finding("warning", "optimizer", what, evidence, remedy, ENGINE_CODE)
    elif name and name not in OWN_OPTIMIZERS and not hasattr(torch.optim, str(written)):
        own = {each: each for each in [*OWN_OPTIMIZERS, *torch.optim.__all__]}
        near = nearest(name, own)
        remedy = f"Did you mean {near}?" if near else "Write AdamW, or the name of a class of torch.optim."
        what = f"there is no optimizer {written}, neither of DeepSpeed nor of torch.optim"
        yield Finding("error", "optimizer", what, evidence, remedy, ENGINE_CODE)
    elif name and file.stage and name not in ZERO_OPTIMIZERS and not file.is_on("zero_allow_untested_optimizer"):
        what = f"{written} was not tried with ZeRO, and DeepSpeed refuses it"
        remedy = 'Write "zero_allow_untested_optimizer": true, or take AdamW.'
        yield Finding("error", "optimizer", what, f"{evidence}, stage {file.stage}", remedy, ENGINE_CODE)
    if "max_grad_norm" in file.section("optimizer.params"):
        what = "max_grad_norm is no parameter of an optimizer, and DeepSpeed refuses it"
        remedy = "Write gradient_clipping outside of any section."
        yield Finding("error", "optimizer", what, "optimizer.params.max_grad_norm is there", remedy, ENGINE_CODE)


_MEASURING = ("wall_clock_breakdown", "memory_breakdown", "comms_logger.enabled", "flops_profiler.enabled")


def measuring_left_on(file: DeepSpeedFile) -> Iterator[Outcome]:
    """Settings that measure, and wait for the GPU to do so."""
    for name in _MEASURING:
        if file.is_on(name):
            what = f"{name} is on: it measures, and makes each step wait for the GPU"
            yield Finding("note", "measuring", what, f"{name} = true", "Turn it off once it has told.", SOURCE)
