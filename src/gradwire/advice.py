"""Names that people look for and that are no methods of `gradwire.methods`: what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

_MODELS = (
    "models are averaged by gradwire.wrap(optimizer, model, 'local:8,outer=int4'), and `gradwire compare` takes that "
    "spec as well"
)
_FEDERATIONS = "federations have a server and no ranks: use gradwire.federated, or `gradwire federate --method fedavg`"
_SHARDED_OTHERWISE = (
    "models that are sharded otherwise than by fully_shard (docs/fsdp2.md) are not served, so attach a method such as "
    "'int4' to a DistributedDataParallel model"
)
_FULLY_SHARD = (
    "models of fully_shard are attached to as they are, by a method such as 'int8', and parameters='int8' compresses "
    "what they gather (docs/fsdp2.md)"
)
_NEIGHBOURS = (
    "neighbours mix models and not gradients: gradwire.wrap(optimizer, model, 'gossip:ring') does that (docs/gossip.md)"
)
_SERVERS = "ranks that do not wait push to servers, by gradwire.wrap(optimizer, model, 'ssp:4') (docs/asynchronous.md)"
_UNWAITING_GOSSIP = (
    "gossip that waits for nobody is not served; gradwire.wrap(optimizer, model, 'sgp:one-peer') waits least"
)
_OTHER_WIDTHS = "integers have 2 to 8 bits ('int2' to 'int8'), one bit is 'sign', and sixteen bits are 'fp16' or 'bf16'"
_BYTES = "gradients hardly shrink by byte compressors, so gradwire has none: 'fp16' sends half and 'int8' a quarter"
_OPTIMIZERS = "a spec says what is sent and leaves the optimizer to you, so name a method such as 'int4' or 'topk:0.01'"
_SHARED_OPTIMIZERS = (
    "it is an optimizer, and gradwire.wrap(optimizer, model, 'dion:16,lr=0.01') puts it in place of yours"
)
_BACKENDS = "gradwire uses the backend of DDP's process group, so name what it shall send, such as 'int4'"
_FEEDBACK = (
    "error feedback is an option, as in 'qsgd:15,ef=on' or 'topk:0.01,ef=ef21', and biased methods have it already"
)

_CHOOSES = (
    "it chooses a method by what a training loop measures, so gradwire.attach and gradwire.Session take it alone, and "
    "without options but its class; elsewhere name a method, such as the one that `gradwire choose` tells"
)

ADVICE: Mapping[str, str] = {
    _MODELS: "localsgd post_localsgd streaming_diloco open_diloco sparseloco easgd",
    _FEDERATIONS: "fedbuff federated",
    _SHARDED_OTHERWISE: "fsdp1 zero zero1 zero2 zero3 deepspeed megatron tensor_parallel pipeline",
    _FULLY_SHARD: "fsdp fsdp2 fully_shard hsdp zero++ qsdp sdp4bit",
    _NEIGHBOURS: "choco_sgd dpsgd d_psgd decentralized decentralised",
    _SERVERS: "async async_sgd asynchronous bounded_staleness",
    _UNWAITING_GOSSIP: "adpsgd",
    _OTHER_WIDTHS: " ".join(
        [
            *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (0, 1, *range(9, 17), 32, 64)),
            *(f"{bits}bit" for bits in range(9, 16)),
        ]
    ),
    _BYTES: "gzip zlib zstd lz4 huffman entropy lossless",
    _OPTIMIZERS: "sgd adam adamw lamb lion muon adafactor",
    _SHARED_OPTIMIZERS: "orth_dion 01adam",
    _BACKENDS: "nccl gloo mpi ucc ddp horovod",
    _CHOOSES: "auto",
    _FEEDBACK: "error_feedback feedback residual ef21 ef_sgd memory",
}
"""By what is said: the names that it is said for, with spaces between them."""
