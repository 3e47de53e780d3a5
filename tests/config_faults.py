"""Configurations with one fault each, and what the checks of `gradwire.config` have to say of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ConfigFault:
    """A configuration that is wrong in one way.

    Attributes:
        name: of the fault.
        given: what is wrong in it, on top of a sound configuration.
        says: a part of what is to be found.
        severity: of the finding.
        remedy: a part of what to do.
    """

    name: str
    given: Any
    says: str
    severity: str = "error"
    remedy: str = ""
    world_size: int | None = field(default=16)


def sound_deepspeed() -> dict[str, Any]:
    """A configuration of DeepSpeed for 16 ranks on two nodes with nothing wrong."""
    return {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "zero_hpz_partition_size": 8},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


DEEPSPEED_FAULTS = (
    ConfigFault("unknown", {"gradient_clippings": 1.0}, "passes by without a word", "warning", "gradient_clipping?"),
    ConfigFault("outermost", {"stage3_max_live_parameters": 1e9}, "passes by", "warning", "into zero_optimization."),
    ConfigFault("misspelt", _zero(stage=3, overlap_com=True), "has no key overlap_com", remedy="overlap_comm?"),
    ConfigFault("moved", _zero(stage=3, gradient_clipping=1.0), "has no key", remedy="to the outermost level"),
    ConfigFault("removed", {"amp": {"enabled": True}}, "amp was removed", remedy="bf16, fp16 or torch_autocast"),
    ConfigFault("removed inside", _zero(stage=3, mics_shard_size=8), "was removed", remedy="zero_hpz_partition_size"),
    ConfigFault(
        "text for a switch", {"prescale_gradients": "false"}, "every text counts as true", remedy="without quotes"
    ),
    ConfigFault("text for a number", {"gradient_clipping": "1.0"}, "is no number", remedy="without quotes"),
    ConfigFault("no section", {"optimizer": "AdamW"}, "is no object", remedy="an object"),
    ConfigFault(
        "text for a stage", _zero(stage="3"), "is a text: DeepSpeed reads it as 3", "warning", "without quotes"
    ),
    ConfigFault("text for a size", _zero(stage=3, reduce_bucket_size="5e8"), "is no whole number"),
    ConfigFault("fraction", {"train_batch_size": 256.5}, "is no whole number"),
    ConfigFault("dtype", {"communication_data_type": "bfloat16"}, "cannot be 'bfloat16'", remedy="bf16"),
    ConfigFault(
        "device", _zero(stage=3, offload_param={"device": "ssd"}), "cannot be 'ssd'", remedy="none, cpu or nvme"
    ),
    ConfigFault("stage 4", _zero(stage=4), "ZeRO has no stage 4", remedy="3 for parameters too"),
    ConfigFault("switch", {"zero_optimization": True}, "no section but a switch", "warning", '{"stage": 1}'),
    ConfigFault(
        "product", {"gradient_accumulation_steps": 2}, "not 4 x 2 x 16 = 128", remedy="leave train_batch_size out"
    ),
    ConfigFault(
        "multiple",
        {"train_batch_size": 250, "gradient_accumulation_steps": None},
        "no multiple of 64",
        remedy="192 or 256",
    ),
    ConfigFault("no batch", {"train_batch_size": ..., "train_micro_batch_size_per_gpu": ...}, "no size of a batch"),
    ConfigFault("no samples", {"train_micro_batch_size_per_gpu": 0}, "takes 1 or more"),
    ConfigFault("both", {"fp16": {"enabled": True}}, "fp16 and bf16 are both on", remedy="bf16 where"),
    ConfigFault("off", {"bf16": {"immediate_grad_update": True}}, "bf16 is off", "warning", '"enabled": true'),
    ConfigFault(
        "master weights",
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": ...},
        "needs ZeRO",
    ),
    ConfigFault(
        "states", {"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "refuses it without", remedy="both"
    ),
    ConfigFault(
        "kept", {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": ...}, "kept in fp32 without ZeRO"
    ),
    ConfigFault("cast", {"data_types": {"param_dtype": "fp16"}}, "computed in is bf16", remedy="it follows"),
    ConfigFault(
        "quantized at 1", _zero(stage=1, zero_quantized_weights=True), "no effect at stage 1", "warning", "to 3"
    ),
    ConfigFault("offload at 2", _zero(stage=2, offload_param={"device": "cpu"}), "no effect at stage 2", "warning"),
    ConfigFault("tuned at 2", _zero(stage=2, stage3_max_live_parameters=1e9), "no effect at stage 2", "note"),
    ConfigFault("offload at 0", _zero(stage=0, offload_optimizer={"device": "cpu"}), "begins with stage 1", "warning"),
    ConfigFault(
        "disk at 2",
        _zero(stage=2, offload_optimizer={"device": "nvme", "nvme_path": "/d"}),
        "NVMe is of stage 3",
        "warning",
    ),
    ConfigFault("ratio", _zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.5}), "refuses it at 2"),
    ConfigFault("no path", _zero(stage=3, offload_param={"device": "nvme"}), "no path says where", remedy="nvme_path"),
    ConfigFault("no norm", _zero(stage=3, compute_grad_norm=False), "stages 1 and 2 alone"),
    ConfigFault(
        "clipped", {**_zero(stage=1, compute_grad_norm=False), "gradient_clipping": 1.0}, "says not to compute"
    ),
    ConfigFault("scatter", _zero(stage=3, zero_quantized_gradients=True, reduce_scatter=False), "need reduce_scatter"),
    ConfigFault(
        "one node", _zero(stage=3, zero_quantized_gradients=True), "no effect in one node", "warning", world_size=8
    ),
    ConfigFault("groups", _zero(stage=3, zero_hpz_partition_size=3), "cut into groups of 3", remedy="divides 16"),
    ConfigFault("across nodes", _zero(stage=3, zero_hpz_partition_size=16), "over several nodes", "warning", "Write 8"),
    ConfigFault("within", _zero(stage=3, zero_hpz_partition_size=4), "several second copies", "note", "Write 8"),
    ConfigFault("no bucket", _zero(stage=2, reduce_bucket_size=0), "1 element or more"),
    ConfigFault("small", _zero(stage=2, allgather_bucket_size=500), "latency counts", "warning", "number of elements"),
    ConfigFault("large", _zero(stage=2, overlap_comm=True, reduce_bucket_size=2e9), "22.5 GB", "warning", "2e8"),
    ConfigFault("prescaled", {"prescale_gradients": True}, "does not go with reduce_scatter"),
    ConfigFault("predivided", {"gradient_predivide_factor": 2.0}, "does not go with reduce_scatter"),
    ConfigFault(
        "divided twice",
        {**_zero(stage=1), "prescale_gradients": True, "gradient_predivide_factor": 2.0},
        "gradient_predivide_factor has no effect",
        "warning",
    ),
    ConfigFault("sum", {"gradient_allreduce_op": "sum"}, "cannot be 'sum' at stage 3", remedy="'mean'"),
    ConfigFault("fp16 sums", {"communication_data_type": "fp16"}, "overflows beyond 65504", "warning", "'fp32'"),
    ConfigFault(
        "4 bits",
        {**_zero(stage=3, zero_quantized_gradients=True), "communication_data_type": "fp32"},
        "travel in 4 bits",
        "note",
    ),
    ConfigFault("one bit", {"optimizer": {"type": "OneBitAdam"}}, "does not go with ZeRO", remedy="AdamW"),
    ConfigFault("one bit alone", {"optimizer": {"type": "ZeroOneAdam"}, **_zero(stage=0)}, "was removed", "warning"),
    ConfigFault("no optimizer", {"optimizer": {"type": "AdamWW"}}, "there is no optimizer AdamWW", remedy="AdamW?"),
    ConfigFault(
        "untested", {"optimizer": {"type": "SGD"}}, "not tried with ZeRO", remedy="zero_allow_untested_optimizer"
    ),
    ConfigFault(
        "norm",
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}},
        "no parameter of an",
        remedy="gradient_clipping",
    ),
    ConfigFault("measures", {"wall_clock_breakdown": True}, "makes each step wait", "note"),
)


def with_fault(fault: ConfigFault) -> dict[str, Any]:
    """The sound configuration with the fault; an ellipsis takes a key out."""
    return {name: value for name, value in {**sound_deepspeed(), **fault.given}.items() if value is not ...}


SOUND_MEGATRON = (
    "--micro-batch-size 2 --global-batch-size 64 --tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --num-layers 32 --num-attention-heads 32 --seq-length 4096 --bf16 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --lr 1e-4 --data-path /data"
)
"""Arguments of Megatron for 16 ranks with nothing wrong."""


def _changed(**given: str | None) -> str:
    """The sound arguments with some of them changed; None takes one out."""
    text = f"{SOUND_MEGATRON} "
    for name, value in given.items():
        argument = f"--{name.replace('_', '-')}"
        text = re.sub(rf"{argument}( [^-]\S*)? ", "", text)
        text += "" if value is None else f"{argument} {value} ".replace("  ", " ")
    return text


_FSDP = {"use_distributed_optimizer": "", "use_megatron_fsdp": "", "pipeline_model_parallel_size": "1"}

MEGATRON_FAULTS = (
    ConfigFault("misspelt", _changed(use_distributed_optimiser=""), "has no argument", "warning", "-optimizer?"),
    ConfigFault(
        "of another", _changed(tensor_parallel_size="2"), "has no argument", remedy="--tensor-model-parallel-size?"
    ),
    ConfigFault(
        "underscores", f"{SOUND_MEGATRON} --ddp_bucket_size 40000000", "has no argument", remedy="--ddp-bucket-size?"
    ),
    ConfigFault("ranks", _changed(tensor_model_parallel_size="3", num_attention_heads="33"), "no multiple of 6"),
    ConfigFault(
        "nodes",
        _changed(tensor_model_parallel_size="8", pipeline_model_parallel_size="1"),
        "more than one node",
        "warning",
    ),
    ConfigFault("no micro-batch", _changed(micro_batch_size=None), "no --micro-batch-size"),
    ConfigFault("batch", _changed(global_batch_size="60"), "no multiple of 8", remedy="Write 56 or 64."),
    ConfigFault("sequence", _changed(tensor_model_parallel_size="1"), "has no effect: layers are not cut", "warning"),
    ConfigFault("whole activations", _changed(sequence_parallel=None), "kept whole on each rank", "note"),
    ConfigFault(
        "experts", _changed(sequence_parallel=None, expert_model_parallel_size="2"), "need --sequence-parallel in"
    ),
    ConfigFault("tp overlap", _changed(sequence_parallel=None, tp_comm_overlap=""), "needs --sequence-parallel, and"),
    ConfigFault("gather", _changed(use_distributed_optimizer=None), "needs a sharded optimizer"),
    ConfigFault("gather alone", _changed(overlap_grad_reduce=None), "needs --overlap-grad-reduce"),
    ConfigFault("step", _changed(overlap_param_gather_with_optimizer_step=""), "an interleaved pipeline"),
    ConfigFault(
        "no overlap", _changed(overlap_grad_reduce=None, overlap_param_gather=None), "after the backward", "note"
    ),
    ConfigFault("buckets", _changed(ddp_num_buckets="4", ddp_bucket_size="40000000"), "both say how large"),
    ConfigFault("small", _changed(ddp_bucket_size="500"), "latency counts", "warning", "not of bytes"),
    ConfigFault("both", _changed(fp16=""), "--fp16 and --bf16 are both there", remedy="--bf16 where"),
    ConfigFault("float32", _changed(bf16=None), "in float32", "note"),
    ConfigFault("reduce alone", _changed(bf16=None, grad_reduce_in_bf16=""), "no effect without --bf16", "warning"),
    ConfigFault(
        "reduce twice", _changed(grad_reduce_in_bf16="", accumulate_allreduce_grads_in_fp32=""), "overrules", "warning"
    ),
    ConfigFault("fp16 experts", _changed(bf16=None, fp16="", expert_model_parallel_size="2"), "do not go with --fp16"),
    ConfigFault("fp8", _changed(use_distributed_optimizer=None, fp8_param_gather=""), "which nothing shards"),
    ConfigFault("layers", _changed(num_layers="31"), "31 layers cannot be cut evenly"),
    ConfigFault(
        "virtual",
        _changed(num_layers_per_virtual_pipeline_stage="4", num_virtual_stages_per_pipeline_rank="4"),
        "refuses both together",
    ),
    ConfigFault(
        "stages",
        _changed(num_virtual_stages_per_pipeline_rank="4", no_overlap_p2p_communication=""),
        "needs 3 stages or more",
    ),
    ConfigFault("heads", _changed(num_attention_heads="31"), "cannot be cut over 2 ranks"),
    ConfigFault("length", _changed(context_parallel_size="4", seq_length="4100"), "no multiple of 8", remedy="4104"),
    ConfigFault("instances", _changed(num_distributed_optimizer_instances="3"), "cut into 3 groups"),
    ConfigFault(
        "instances alone",
        _changed(num_distributed_optimizer_instances="2", use_distributed_optimizer=None, overlap_param_gather=None),
        "nothing shards the optimizer",
        "warning",
    ),
    ConfigFault(
        "strategy", _changed(data_parallel_sharding_strategy="optim"), "without --use-megatron-fsdp", "warning"
    ),
    ConfigFault("format", _changed(**_FSDP), "in its own format alone", remedy="fsdp_dtensor"),
    ConfigFault(
        "fsdp2", _changed(use_torch_fsdp2="", use_distributed_optimizer=""), "not go with --use-distributed-optimizer"
    ),
    ConfigFault("fsdp2 fusion", _changed(use_torch_fsdp2=""), "needs --no-gradient-accumulation-fusion"),
    ConfigFault("muon", _changed(optimizer="muon"), "Muon does not go with"),
    ConfigFault("offload", _changed(optimizer_cpu_offload=""), "needs --use-precision-aware-optimizer"),
    ConfigFault("queues", f"export CUDA_DEVICE_MAX_CONNECTIONS=8\n{SOUND_MEGATRON}", "must be 1 where layers are cut"),
    ConfigFault("one queue", f"export CUDA_DEVICE_MAX_CONNECTIONS=1\n{_changed(**_FSDP)}", "FSDP does not go with"),
)
