"""The keys that DeepSpeed reads, as of its version 0.19.8, and those that it reads no more.

They were compared with the models of that version by hand; where DeepSpeed is installed, its own models are asked too
(`installed_deepspeed.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

SOURCE = "https://www.deepspeed.ai/docs/config-json/"
CODE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime"
CONFIG_CODE, ENGINE_CODE, ZERO_CODE = f"{CODE}/config.py", f"{CODE}/engine.py", f"{CODE}/zero/config.py"
ZEROPP_SOURCE = "https://www.deepspeed.ai/tutorials/zeropp/"
REMOVED_SOURCE = "https://github.com/deepspeedai/DeepSpeed/issues/8489"
SEEN = "0.19.8"
"""The version of DeepSpeed that these tables were made from."""

SWITCH, WHOLE, NUMBER, TEXT, SECTION, ANY = "true or false", "a whole number", "a number", "a text", "an object", ""
"""What a value has to be, for people; an empty one is not checked."""

TOP: Mapping[str, str] = {
    "train_batch_size": WHOLE,
    "train_micro_batch_size_per_gpu": WHOLE,
    "gradient_accumulation_steps": WHOLE,
    "managed_gradient_accumulation": SWITCH,
    "gradient_clipping": NUMBER,
    "gradient_predivide_factor": NUMBER,
    "gradient_allreduce_op": TEXT,
    "prescale_gradients": SWITCH,
    "communication_data_type": TEXT,
    "seq_parallel_communication_data_type": TEXT,
    "sequence_parallel_size": WHOLE,
    "disable_allgather": SWITCH,
    "optimizer": SECTION,
    "scheduler": SECTION,
    "fp16": SECTION,
    "bf16": SECTION,
    "bfloat16": SECTION,
    "torch_autocast": SECTION,
    "data_types": SECTION,
    "zero_optimization": ANY,  # an object, or true in files of 2020
    "zero_allow_untested_optimizer": SWITCH,
    "zero_force_ds_cpu_optimizer": SWITCH,
    "allgather_size": NUMBER,
    "steps_per_print": ANY,
    "wall_clock_breakdown": SWITCH,
    "memory_breakdown": SWITCH,
    "dump_state": SWITCH,
    "disable_python_gc": SWITCH,
    "dataloader_drop_last": SWITCH,
    "vocabulary_size": WHOLE,
    "use_data_before_expert_parallelism": SWITCH,
    "log_level": ANY,
    "activation_checkpointing": SECTION,
    "aio": SECTION,
    "autotuning": SECTION,
    "checkpoint": SECTION,
    "comms_logger": SECTION,
    "compile": SECTION,
    "csv_monitor": SECTION,
    "comet": SECTION,
    "tensorboard": SECTION,
    "wandb": SECTION,
    "data_efficiency": SECTION,
    "datastates_ckpt": ANY,
    "expert_parallel": SECTION,
    "flops_profiler": SECTION,
    "hybrid_engine": SECTION,
    "pipeline": SECTION,
    "tensor_parallel": SECTION,
    "timers": SECTION,
    "weight_quantization": SECTION,
}
"""Keys outside of any section. DeepSpeed reads these and passes all others by without a word."""

_OFFLOAD = {"device": TEXT, "nvme_path": TEXT, "buffer_count": WHOLE, "pin_memory": SWITCH}

ZERO: Mapping[str, str] = {
    "stage": WHOLE,
    "contiguous_gradients": SWITCH,
    "reduce_scatter": SWITCH,
    "reduce_bucket_size": WHOLE,
    "use_multi_rank_bucket_allreduce": SWITCH,
    "allgather_partitions": SWITCH,
    "allgather_bucket_size": WHOLE,
    "overlap_comm": SWITCH,
    "compute_grad_norm": SWITCH,
    "load_from_fp32_weights": SWITCH,
    "elastic_checkpoint": SWITCH,
    "offload_param": SECTION,
    "offload_optimizer": SECTION,
    "zenflow": SECTION,
    "sub_group_size": WHOLE,
    "cpu_offload": SWITCH,
    "cpu_offload_param": SWITCH,
    "cpu_offload_use_pin_memory": SWITCH,
    "stage3_prefetch_bucket_size": WHOLE,
    "stage3_param_persistence_threshold": WHOLE,
    "stage3_model_persistence_threshold": WHOLE,
    "stage3_max_live_parameters": WHOLE,
    "stage3_max_reuse_distance": WHOLE,
    "stage3_gather_16bit_weights_on_model_save": SWITCH,
    "stage3_gather_fp16_weights_on_model_save": SWITCH,
    "stage3_module_granularity_threshold": WHOLE,
    "stage3_use_all_reduce_for_fetch_params": SWITCH,
    "stage3_allgather_sequential": SWITCH,
    "prefetch_bucket_size": WHOLE,
    "param_persistence_threshold": WHOLE,
    "model_persistence_threshold": WHOLE,
    "max_live_parameters": WHOLE,
    "max_reuse_distance": WHOLE,
    "gather_16bit_weights_on_model_save": SWITCH,
    "module_granularity_threshold": WHOLE,
    "use_all_reduce_for_fetch_params": SWITCH,
    "allgather_sequential": SWITCH,
    "ignore_unused_parameters": SWITCH,
    "legacy_stage1": SWITCH,
    "round_robin_gradients": SWITCH,
    "parameter_alignment": SWITCH,
    "zero_hpz_partition_size": WHOLE,
    "zero_quantized_weights": SWITCH,
    "zero_quantized_nontrainable_weights": SWITCH,
    "zero_quantized_gradients": SWITCH,
    "memory_efficient_linear": SWITCH,
    "pipeline_loading_checkpoint": SWITCH,
    "override_module_apply": SWITCH,
    "log_trace_cache_warnings": SWITCH,
    "enable_sanity_checks": SWITCH,
    "save_muon_momentum_buffer_in_memory": SWITCH,
    "leaf_module": SECTION,
}
"""Keys of `zero_optimization`. Those of stage 3 may be written without their `stage3_`."""

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "zero_optimization": ZERO,
    "zero_optimization.offload_param": {**_OFFLOAD, "buffer_size": WHOLE, "max_in_cpu": WHOLE},
    "zero_optimization.offload_optimizer": {
        **_OFFLOAD,
        "pipeline_read": SWITCH,
        "pipeline_write": SWITCH,
        "fast_init": SWITCH,
        "ratio": NUMBER,
        "super_offload": SWITCH,
        "cpuadam_cores_perc": NUMBER,
    },
    "bf16": {
        "enabled": SWITCH,
        "immediate_grad_update": SWITCH,
        "check_grad_overflow": SWITCH,
        "bf16_master_weights_and_grads": SWITCH,
        "bf16_optimizer_states": SWITCH,
    },
    "fp16": {
        "enabled": SWITCH,
        "auto_cast": SWITCH,
        "loss_scale": NUMBER,
        "initial_scale_power": WHOLE,
        "loss_scale_window": WHOLE,
        "hysteresis": WHOLE,
        "consecutive_hysteresis": SWITCH,
        "min_loss_scale": WHOLE,
        "fp16_master_weights_and_grads": SWITCH,
    },
    "comms_logger": {"enabled": SWITCH, "prof_all": SWITCH, "prof_ops": ANY, "verbose": SWITCH, "debug": SWITCH},
}
"""Sections whose keys DeepSpeed checks: it refuses what is not among them."""

STAGE3_ONLY = frozenset(
    {
        "offload_param",
        "sub_group_size",
        "cpu_offload_param",
        "zero_hpz_partition_size",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients",
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
        *(name for name in ZERO if name.startswith("stage3_")),
    }
)
"""Keys of `zero_optimization` that nothing reads below stage 3."""

REMOVED: Mapping[str, str] = {
    "amp": "Use bf16, fp16 or torch_autocast.",
    "compression_training": "Leave it out: the model would train without it.",
    "curriculum_learning": "Write data_efficiency.data_sampling.curriculum_learning.",
    "eigenvalue": "Leave it out.",
    "elasticity": "Set the batch sizes themselves.",
    "graph_harvesting": "Leave it out.",
    "nebula": "Leave it out: checkpoints go through torch.save.",
    "progressive_layer_drop": "Leave it out.",
    "quantize_training": "Leave it out.",
    "sparse_attention": "Leave it out.",
    "sparse_gradients": "Leave it out: embeddings with sparse=True are summed sparsely without it.",
    "zero_optimization.mics_hierarchical_params_gather": "Leave it out.",
    "zero_optimization.mics_shard_size": "Set zero_hpz_partition_size to keep gathers inside a node.",
    "zero_optimization.zeropp_loco_param": "Leave it out, for quantized gradients without error feedback.",
}
"""Keys that older versions read and 0.19.8 refuses, with what to do instead."""

ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
"""Optimizers that send signs, in small letters, as DeepSpeed compares them."""

OWN_OPTIMIZERS = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
"""Other optimizers by DeepSpeed's own names, in small letters; what is not among them is a name of torch.optim."""

ZERO_OPTIMIZERS = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
"""Optimizers that ZeRO takes without `zero_allow_untested_optimizer`."""
