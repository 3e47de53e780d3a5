"""Drop-in replacements of `torch.distributed.algorithms.ddp_comm_hooks`: same names, signatures and meaning.

    from gradwire.hooks import PowerSGDState, powerSGD_hook

    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=0)
    ddp.register_comm_hook(state, powerSGD_hook)

They also work where PyTorch's do not: several buckets on Gloo, bfloat16 on a CPU, byte quantisation on Gloo, a step
with infinities, a layer without gradients, PowerSGD from the first step, exact resumes. Post-local SGD has its
optimizer and averager here too, which PyTorch keeps in `torch.distributed.optim` and
`torch.distributed.algorithms.model_averaging.averagers`.
"""

from gradwire.adapters.hooks import (
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    noop_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from gradwire.adapters.post_local_hook import PostLocalSGDState, post_localSGD_hook
from gradwire.adapters.power_sgd_hook import batched_powerSGD_hook, powerSGD_hook
from gradwire.adapters.power_sgd_state import PowerSGDState
from gradwire.sync.post_local import PeriodicModelAverager, PostLocalSGDOptimizer

__all__ = [
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]
