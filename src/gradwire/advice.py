"""Names that people look for and that are no methods of `gradwire.methods`: what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

_MODELS = (
    "models are averaged by gradwire.sync, and `gradwire compare` takes it as 'local:H=8,outer=int4', an average of "
    "which costs what 'int4' does"
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
    "neighbours mix models and not gradients, which gradwire.sync.Gossip does (docs/gossip.md); `gradwire compare` "
    "takes it as 'gossip:ring'"
)
_SERVERS = (
    "ranks that do not wait push to servers, which gradwire.asynchronous does (docs/asynchronous.md); `gradwire "
    "compare` takes it as 'ssp:4'"
)
_UNWAITING_GOSSIP = (
    "gossip that waits for nobody is not served; 'sgp:one-peer' of gradwire.sync, which `gradwire compare` takes, "
    "waits least"
)
_OTHER_WIDTHS = "integers have 2 to 8 bits ('int2' to 'int8'), one bit is 'sign', and sixteen bits are 'fp16' or 'bf16'"
_BYTES = "gradients hardly shrink by byte compressors, so gradwire has none: 'fp16' sends half and 'int8' a quarter"
_OPTIMIZERS = "a spec says what is sent and leaves the optimizer to you, so name a method such as 'int4' or 'topk:0.01'"
_SHARED_OPTIMIZERS = (
    "it is an optimizer of gradwire.sync.optimizers, which `gradwire compare` takes as in 'dion:16,lr=0.01'"
)
_BACKENDS = "gradwire uses the backend of DDP's process group, so name what it shall send, such as 'int4'"
_FEEDBACK = (
    "error feedback is an option, as in 'qsgd:15,ef=on' or 'topk:0.01,ef=ef21', and biased methods have it already"
)

ADVICE: Mapping[str, str] = {
    _MODELS: "local localsgd post_localsgd diloco streaming_diloco open_diloco slowmo bmuf sparseloco easgd",
    _FEDERATIONS: "fedavg fedprox fednova scaffold fedavgm fedadam fedyogi fedadagrad fedbuff federated",
    _SHARDED_OTHERWISE: "fsdp1 zero zero1 zero2 zero3 deepspeed megatron tensor_parallel pipeline",
    _FULLY_SHARD: "fsdp fsdp2 fully_shard hsdp zero++ qsdp sdp4bit",
    _NEIGHBOURS: "gossip choco choco_sgd dpsgd d_psgd sgp decentralized decentralised",
    _SERVERS: "ssp asgd async async_sgd asynchronous dcasgd dc_asgd hogwild bounded_staleness",
    _UNWAITING_GOSSIP: "adpsgd",
    _OTHER_WIDTHS: " ".join(
        [
            *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (0, 1, *range(9, 17), 32, 64)),
            *(f"{bits}bit" for bits in range(9, 16)),
        ]
    ),
    _BYTES: "gzip zlib zstd lz4 huffman entropy lossless",
    _OPTIMIZERS: "sgd adam adamw lamb lion muon adafactor",
    _SHARED_OPTIMIZERS: "dion orth_dion zero_one_adam 01adam",
    _BACKENDS: "nccl gloo mpi ucc ddp horovod",
    _FEEDBACK: "error_feedback feedback residual ef21 ef_sgd memory",
}
"""By what is said: the names that it is said for, with spaces between them."""
