"""Configurations with one fault each, and what the checks of `gradwire.config` have to say of it."""

from __future__ import annotations

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
