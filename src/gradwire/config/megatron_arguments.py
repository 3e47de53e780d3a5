"""Arguments of Megatron-LM for parallelism, precision and communication, and a file that has them.

The names are those of `megatron/training/arguments.py` of Megatron Core 0.16. Megatron has some 600 more, for models
and data, which are not listed: an argument counts as wrong only where it is spelled almost like one of these.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradwire.core.errors import SpecError

SOURCE = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py"
FSDP_SOURCE = "https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/features/custom_fsdp.html"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

_WORDS = (
    # parallelism
    "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size "
    "expert-tensor-parallel-size sequence-parallel encoder-tensor-model-parallel-size "
    "encoder-pipeline-model-parallel-size decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers "
    "pipeline-model-parallel-layout num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank "
    "microbatch-group-size-per-virtual-pipeline-stage account-for-embedding-in-pipeline-split "
    "account-for-loss-in-pipeline-split hierarchical-context-parallel-sizes use-tp-pp-dp-mapping "
    # batches
    "micro-batch-size global-batch-size rampup-batch-size "
    # the model, where parallelism depends on it
    "num-layers hidden-size num-attention-heads group-query-attention num-query-groups seq-length num-experts "
    "untie-embeddings-and-output-weights "
    # precision
    "bf16 fp16 grad-reduce-in-bf16 accumulate-allreduce-grads-in-fp32 loss-scale initial-loss-scale "
    "min-loss-scale loss-scale-window hysteresis fp32-residual-connection attention-softmax-in-fp32 "
    "fp8-format fp8-recipe fp8-param-gather fp4-format fp4-recipe fp4-param-gather main-grads-dtype "
    "main-params-dtype exp-avg-dtype exp-avg-sq-dtype use-precision-aware-optimizer "
    "reuse-grad-buf-for-mxfp8-param-ag "
    # sharding
    "optimizer use-distributed-optimizer num-distributed-optimizer-instances use-megatron-fsdp use-custom-fsdp "
    "data-parallel-sharding-strategy enable-full-sharding-in-hsdp fsdp-double-buffer use-torch-fsdp2 "
    "torch-fsdp2-no-reshard-after-forward init-model-with-meta-device optimizer-cpu-offload "
    "suggested-communication-unit-size keep-fp8-transpose-cache ckpt-format no-gradient-accumulation-fusion "
    "calculate-per-token-loss "
    # communication
    "overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step no-align-grad-reduce "
    "no-align-param-gather no-overlap-p2p-communication overlap-p2p-communication-warmup-flush "
    "no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p ddp-num-buckets ddp-bucket-size "
    "ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation ddp-average-in-collective "
    "no-gradient-reduce-div-fusion tp-comm-overlap tp-comm-overlap-cfg tp-comm-bootstrap-backend "
    "overlap-moe-expert-parallel-comm delay-wgrad-compute defer-embedding-wgrad-compute cp-comm-type "
    "distributed-backend distributed-timeout-minutes distributed-timeout-seconds-after-init "
    "nccl-communicator-config-path use-nccl-ub use-sharp sharp-enabled-group disable-symmetric-registration"
)
NAMES = frozenset(f"--{name}" for name in _WORDS.split())
"""What is known here."""

MEANT: Mapping[str, str] = {
    "--batch-size": "--micro-batch-size",
    "--checkpoint-activations": "--recompute-activations",
    "--context-model-parallel-size": "--context-parallel-size",
    "--expert-parallel-size": "--expert-model-parallel-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--pipeline-parallel-size": "--pipeline-model-parallel-size",
    "--tensor-parallel-size": "--tensor-model-parallel-size",
    "--train-batch-size": "--global-batch-size",
}
"""Names of older versions and of other frameworks, with what they are called."""


@dataclass(frozen=True)
class MegatronArguments:
    """Arguments of a training, and what is known of its cluster.

    Attributes:
        given: the values of each argument, as they are written; none for a flag.
        world_size: how many ranks there are; None where nobody said.
        gpus_per_node: ranks that share a node; None where nobody said.
        connections: what the file sets CUDA_DEVICE_MAX_CONNECTIONS to; None where it does not.

    >>> read = MegatronArguments(parsed("--bf16 --tensor-model-parallel-size 4 --seq-length $LENGTH"))
    >>> read.has("--bf16"), read.size("--tensor-model-parallel-size"), read.size("--context-parallel-size")
    (True, 4, 1)
    >>> read.size("--seq-length") is None  # the shell knows it
    True
    """

    given: Mapping[str, Sequence[str]]
    world_size: int | None = None
    gpus_per_node: int | None = None
    connections: str | None = field(default=None)

    def has(self, name: str) -> bool:
        """Whether an argument is there."""
        return name in self.given

    def text(self, name: str, otherwise: str = "") -> str:
        """The first value of an argument, or what it is without."""
        values = self.given.get(name, ())
        return values[0] if values else otherwise

    def size(self, name: str, otherwise: int | None = 1) -> int | None:
        """A number; what it is without the argument; None where the value cannot be read here."""
        text = self.text(name)
        if not text:
            return otherwise
        return int(text) if re.fullmatch(r"[0-9]+", text) else None

    @property
    def model_parallel(self) -> int | None:
        """Ranks that share one copy of the model; None where that cannot be told."""
        sizes = [self.size(f"--{kind}-parallel-size") for kind in ("tensor-model", "pipeline-model", "context")]
        product = 1
        for size in sizes:
            if not size:
                return None
            product *= size
        return product

    @property
    def copies(self) -> int | None:
        """Copies of the model; None where that cannot be told, or is no whole number."""
        if self.world_size is None or self.model_parallel is None or self.world_size % self.model_parallel:
            return None
        return self.world_size // self.model_parallel


def parsed(text: str) -> dict[str, list[str]]:
    """Arguments in a shell script, in an array of one, or in lines: names with their values.

    Raises:
        ValueError: a quote that is not closed.

    >>> parsed("ARGS=(  # a remark\\n  --bf16\\n  --micro-batch-size=2\\n)")
    {'--bf16': [], '--micro-batch-size': ['2']}
    """
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in shlex.split(text.replace("\\\n", " "), comments=True):
        bare = word.rstrip(")") if "$(" not in word else word
        if bare.startswith("--"):
            name, equals, value = bare.partition("=")
            values = found.setdefault(name, [])
            values[:] = [value] if equals else []
        elif bare and not re.match(r"[A-Za-z_]+=\(?", bare):
            values.append(bare)
    return found


def read_megatron(
    given: str | Path | Sequence[str], world_size: int | None = None, gpus_per_node: int | None = None
) -> MegatronArguments:
    """Read arguments of Megatron from a file, or take a list of them.

    Args:
        given: the path of a shell script or of lines of arguments, or the arguments themselves.
        world_size: how many ranks there are; None reads it off torchrun's arguments, if they are there too.
        gpus_per_node: ranks that share a node; None does the same.

    Raises:
        SpecError: no argument at all, a quote that is not closed, or numbers that are no sizes.
        OSError: the file cannot be read.
    """
    for name, value in (("world_size", world_size), ("gpus_per_node", gpus_per_node)):
        if value is not None and value < 1:
            raise SpecError(f"{name}={value} is no size: give 1 or more")
    is_file = isinstance(given, (str, Path))
    try:
        text = Path(given).read_text(encoding="utf-8") if is_file else shlex.join(given)
        arguments = parsed(text)
    except ValueError as error:  # of which a text that is not UTF-8 is one
        raise SpecError(f"{given} cannot be read as arguments of a shell: {error}") from error
    if not arguments:
        raise SpecError(f"{given if is_file else 'the list'} has no argument: give those of pretrain_gpt.py, as --bf16")
    found = re.findall(rf"\b{CONNECTIONS}=['\"]?(\w+)", text)
    read = MegatronArguments(arguments, world_size, gpus_per_node, found[-1] if found else None)
    per_node = read.size("--nproc-per-node", None) or read.size("--nproc_per_node", None)
    nodes = read.size("--nnodes")
    return MegatronArguments(
        arguments,
        world_size or (per_node * nodes if per_node and nodes else None),
        gpus_per_node or per_node,
        read.connections,
    )
