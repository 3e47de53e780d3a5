"""The environment variables of `torch.distributed`, Gloo and launchers, as of PyTorch 2.13."""

from __future__ import annotations

from gradwire.doctor.kinds import PATH, PLAIN, TORCH_FLAG, Kind, Text, TorchNumber, Words
from gradwire.doctor.variable import Variable

NCCL_PAGE = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
RECORDER_PAGE = "https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"
DISTRIBUTED_PAGE = "https://docs.pytorch.org/docs/stable/distributed.html"
ELASTIC_PAGE = "https://docs.pytorch.org/docs/stable/elastic/run.html"
CUDA_PAGE = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars"

_PORT = TorchNumber(0, 65535)
_COUNT, _RANK = TorchNumber(1), TorchNumber(0)
_INTERFACE = Text(
    "the whole names of interfaces, such as eth0 or eth0,eth1",
    r"[^\s,^=]+(,[^\s,^=]+)*",
    "makes Gloo fail: it takes whole names of interfaces alone, without ^ and =",
    stops=True,
)
_TRANSPORT = Words(("TCP", "TCP_TLS", "UV", "LINUX"), "makes Gloo fail: it has no such transport", stops=True)
_DEBUG = Words(("OFF", "INFO", "DETAIL"), "makes PyTorch raise", any_case=True, stops=True)
_LOG_LEVEL = Words(("INFO", "WARNING", "ERROR", "FATAL"), "is ignored", also=r"-?[0-9]")


def _nccl(name: str, kind: Kind, purpose: str, *, alike: bool = True) -> Variable:
    return Variable(f"TORCH_NCCL_{name}", kind, purpose, alike=alike, source=NCCL_PAGE)


def _renamed(old: str, kind: Kind, new: str) -> Variable:
    return Variable(old, kind, f"older name of {new}", instead=f"Set {new}.", source=NCCL_PAGE)


def _launcher(name: str, kind: Kind, purpose: str, *, alike: bool = False, source: str = ELASTIC_PAGE) -> Variable:
    return Variable(name, kind, purpose, alike=alike, source=source)


_TORCH_NCCL = (
    _nccl("ASYNC_ERROR_HANDLING", TorchNumber(0, 3), "what the watchdog does on an error"),
    _nccl("HIGH_PRIORITY", TORCH_FLAG, "streams of high priority"),
    _nccl("BLOCKING_WAIT", TORCH_FLAG, "whether wait() blocks"),
    _nccl("DUMP_ON_TIMEOUT", TORCH_FLAG, "write the flight recorder on a timeout"),
    _nccl("DESYNC_DEBUG", TORCH_FLAG, "name the rank that is out of step"),
    _nccl("ENABLE_TIMING", TORCH_FLAG, "time each collective"),
    _nccl("ENABLE_MONITORING", TORCH_FLAG, "end a process whose watchdog is stuck"),
    _nccl("HEARTBEAT_TIMEOUT_SEC", TorchNumber(1), "seconds until then"),
    _nccl("COORD_CHECK_MILSEC", TorchNumber(1), "milliseconds between looks for signals of other ranks"),
    _nccl("WAIT_TIMEOUT_DUMP_MILSEC", TorchNumber(0), "milliseconds to write the flight recorder"),
    _nccl("DEBUG_INFO_PIPE_FILE", PATH, "pipe that asks for a dump", alike=False),
    _nccl("NAN_CHECK", TORCH_FLAG, "raise where an input has NaN"),
    _nccl("AVOID_RECORD_STREAMS", TORCH_FLAG, "keep tensors alive without record_stream"),
    _nccl("USE_TENSOR_REGISTER_ALLOCATOR_HOOK", TORCH_FLAG, "register tensors with NCCL"),
    _nccl("USE_COMM_NONBLOCKING", TORCH_FLAG, "communicators that do not block"),
    _nccl("NONBLOCKING_TIMEOUT", TorchNumber(1), "seconds to wait for them"),
    _nccl("SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", TORCH_FLAG, "a warning"),
    _nccl("CUDA_EVENT_CACHE", TORCH_FLAG, "reuse events"),
    _nccl("PROPAGATE_ERROR", TORCH_FLAG, "tell other ranks of an error"),
    _nccl("LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN", TORCH_FLAG, "stacks at a bad end"),
    _nccl("EXTRA_DUMP_ON_EXEC", TORCH_FLAG, "another dump"),
    _nccl("RANKS_PER_ROOT", TorchNumber(1), "ranks that meet at one root"),
    _nccl("RETHROW_CUDA_ERRORS", TORCH_FLAG, "raise errors of CUDA again"),
    _nccl("ABORT_IN_DESTROY_PG", TORCH_FLAG, "abort communicators at the end"),
)
_RECORDER = (
    Variable("TORCH_FR_BUFFER_SIZE", TorchNumber(0), "events that the flight recorder keeps", source=RECORDER_PAGE),
    Variable("TORCH_FR_CPP_STACK", TORCH_FLAG, "stacks of C++ in the flight recorder", source=RECORDER_PAGE),
    Variable("TORCH_FR_DUMP_TEMP_FILE", PATH, "beginning of its files", source=RECORDER_PAGE),
    Variable("TORCH_FR_DUMP_DYNAMIC_FILE_NAME", TORCH_FLAG, "new names for later dumps", source=RECORDER_PAGE),
)
_DISTRIBUTED = (
    Variable("GLOO_SOCKET_IFNAME", _INTERFACE, "network interfaces of Gloo, whole names", source=DISTRIBUTED_PAGE),
    Variable("GLOO_DEVICE_TRANSPORT", _TRANSPORT, "transport of Gloo", alike=True, source=DISTRIBUTED_PAGE),
    Variable("GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY", PATH, "key for TLS", source=DISTRIBUTED_PAGE),
    Variable("GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT", PATH, "certificate for TLS", source=DISTRIBUTED_PAGE),
    Variable("GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_FILE", PATH, "authority for TLS", source=DISTRIBUTED_PAGE),
    Variable("GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_PATH", PATH, "authorities for TLS", source=DISTRIBUTED_PAGE),
    Variable("GLOO_LOG_LEVEL", PLAIN, "what Gloo logs", source=DISTRIBUTED_PAGE),
    Variable("GLOO_DISABLE_CONNECTION_RETRIES", PLAIN, "connect once only", alike=True, source=DISTRIBUTED_PAGE),
    Variable("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", PLAIN, "how ranks meet", alike=True, source=DISTRIBUTED_PAGE),
    Variable("TORCH_GLOO_LAZY_INIT", TORCH_FLAG, "connect when it is needed", alike=True, source=DISTRIBUTED_PAGE),
    Variable("TORCH_DISTRIBUTED_DEBUG", _DEBUG, "checks of each collective", alike=True, source=DISTRIBUTED_PAGE),
    Variable("TORCH_DISTRIBUTED_USE_TORCHCOMMS", PLAIN, "backends of torchcomms", alike=True, source=DISTRIBUTED_PAGE),
    Variable("TORCH_DISTRIBUTED_COMPILE_ON_ONE_RANK", PLAIN, "one rank compiles", alike=True, source=DISTRIBUTED_PAGE),
    Variable("TORCH_CPP_LOG_LEVEL", _LOG_LEVEL, "what C++ logs", source=DISTRIBUTED_PAGE),
    Variable("CUDA_LAUNCH_BLOCKING", Text("0 or 1", r"[01]"), "launch one kernel at a time", source=CUDA_PAGE),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        Text("1 to 32", r"[1-9]|[12][0-9]|3[0-2]"),
        "queues of a GPU",
        alike=True,
        source=CUDA_PAGE,
    ),
    Variable("CUDA_DEVICE_ORDER", Words(("FASTEST_FIRST", "PCI_BUS_ID"), "is ignored"), "order", source=CUDA_PAGE),
)
_LAUNCHERS = (
    _launcher("MASTER_ADDR", PLAIN, "host where ranks meet", alike=True),
    _launcher("MASTER_PORT", _PORT, "port where ranks meet", alike=True),
    _launcher("WORLD_SIZE", _COUNT, "how many ranks there are", alike=True),
    _launcher("RANK", _RANK, "number of this rank"),
    _launcher("LOCAL_RANK", _RANK, "its number on its host"),
    _launcher("LOCAL_WORLD_SIZE", _COUNT, "ranks of its host"),
    _launcher(
        "OMP_NUM_THREADS",
        Text("a whole number of 1 or more", r"[1-9][0-9]*(,[1-9][0-9]*)*", "is ignored"),
        "threads of each process",
        source="https://www.openmp.org/spec-html/5.0/openmpse50.html",
    ),
)
_RENAMED = (
    _renamed("NCCL_ASYNC_ERROR_HANDLING", TorchNumber(0, 3), "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    _renamed("NCCL_BLOCKING_WAIT", TORCH_FLAG, "TORCH_NCCL_BLOCKING_WAIT"),
    _renamed("NCCL_DESYNC_DEBUG", TORCH_FLAG, "TORCH_NCCL_DESYNC_DEBUG"),
    _renamed("NCCL_ENABLE_TIMING", TORCH_FLAG, "TORCH_NCCL_ENABLE_TIMING"),
    _renamed("TORCH_NCCL_TRACE_BUFFER_SIZE", TorchNumber(0), "TORCH_FR_BUFFER_SIZE"),
    _renamed("TORCH_NCCL_TRACE_CPP_STACK", TORCH_FLAG, "TORCH_FR_CPP_STACK"),
    _renamed("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", PATH, "TORCH_FR_DUMP_TEMP_FILE"),
)

TORCH_VARIABLES = {each.name: each for each in (*_TORCH_NCCL, *_RECORDER, *_DISTRIBUTED, *_LAUNCHERS, *_RENAMED)}
"""By name."""

MEANT = {
    **dict.fromkeys(("MASTER_ADDRESS", "MASTER_HOST", "MASTER_IP", "MASTERADDR"), "MASTER_ADDR"),
    "MASTERPORT": "MASTER_PORT",
    "WORLDSIZE": "WORLD_SIZE",
    "LOCALRANK": "LOCAL_RANK",
}
"""What is written for names that have no beginning of their own."""
