"""The environment variables of NCCL, up to version 2.32.

Names, values and versions are those of the page "Environment Variables" of NCCL's user guide. Names that only its
sources tell of are in `INTERNAL`: they are known, and their values are not checked.
"""

from __future__ import annotations

from gradwire.doctor.kinds import (
    ALGORITHMS,
    FLAG,
    INTERFACES,
    LEVEL,
    PATH,
    PROTOCOLS,
    Kind,
    Number,
    Text,
    Words,
)
from gradwire.doctor.variable import Variable

SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
NEWEST = "2.32"

_DEBUG = Words(
    ("VERSION", "WARN", "ATTN", "INFO", "ABORT", "TRACE"), "turns logging off: NCCL does not know it", any_case=True
)
_SUBSYSTEMS = (
    "INIT COLL P2P SHM NET GRAPH TUNING ENV ALLOC ALLOC_HOST CALL PROXY NVLS BOOTSTRAP REG PROFILE RAS DESTROY ALL"
)
_NETWORKS = Text(
    "IB, Socket or the name of a plug-in",
    r"(?!(?i:infiniband|rdma|roce|tcp|sockets|ethernet|auto)$).*",
    "is the name of no network that NCCL has, so it fails unless a plug-in has this name",
    stops=True,
)
_ADDRESS = Text("a host and a port, such as localhost:28028", r".+:[0-9]+")
_FACTOR = Text("a positive number", r"[0-9]*\.?[0-9]+", "is ignored, and 1 is taken")
_HCA = Text("devices with ports, such as mlx5 or =mlx5_0:1,mlx5_1 or ^mlx5_2", r"\^?=?[^\s,^=]+(,[^\s,^=]+)*")


def _read(name: str, kind: Kind, purpose: str, since: str | None = None, *, alike: bool = True) -> Variable:
    return Variable(f"NCCL_{name}", kind, purpose, since, alike=alike, source=SOURCE)


def _old(name: str, removed: str, instead: str) -> Variable:
    return Variable(f"NCCL_{name}", removed=removed, instead=instead, source=SOURCE)


_SYSTEM = (
    _read("SOCKET_IFNAME", INTERFACES, "network interfaces for sockets and for meeting", alike=False),
    _read("SOCKET_FAMILY", Words(("AF_INET", "AF_INET6"), "is ignored"), "IPv4 or IPv6 alone"),
    _read("SOCKET_MAGIC", Number(0), "number by which sockets of one job know each other"),
    _read("SOCKET_RETRY_CNT", Number(1), "attempts to connect", "2.24", alike=False),
    _read("SOCKET_RETRY_SLEEP_MSEC", Number(1), "milliseconds between attempts", "2.24", alike=False),
    _read("SOCKET_POLL_TIMEOUT_MSEC", Number(0), "milliseconds of a poll while ranks meet", "2.28", alike=False),
    _read("SOCKET_NTHREADS", Number(1, 16), "threads of each socket connection", "2.4.8"),
    _read("NSOCKS_PERTHREAD", Number(1, 64), "sockets of each of these threads", "2.4.8"),
    _read("CROSS_NIC", Number(0, 2), "whether rings and trees may use different NICs"),
    _read("IB_HCA", _HCA, "RDMA devices and ports", alike=False),
    _read("IB_TIMEOUT", Number(0, 31), "InfiniBand's timeout, 4.096 us times 2 to this power"),
    _read("IB_RETRY_CNT", Number(0, 7), "InfiniBand's retries", "2.1.15"),
    _read("IB_GID_INDEX", Number(-1), "GID of RoCE; since 2.21 NCCL finds it", "2.1.4", alike=False),
    _read("IB_ADDR_FAMILY", Words(("AF_INET", "AF_INET6"), "is ignored"), "family of the GID that is found", "2.21"),
    _read(
        "IB_ADDR_RANGE",
        Text("a range such as 10.0.0.0/8", r"[0-9a-fA-F.:]+/[0-9]+"),
        "range of GIDs",
        "2.21",
        alike=False,
    ),
    _read("IB_ROCE_VERSION_NUM", Number(among=(1, 2)), "version of RoCE of the GID that is found", "2.21"),
    _read("IB_PKEY", Number(0), "index of the partition key", "2.1.4", alike=False),
    _read("IB_PKEY_VALUE", Number(-1), "partition key by its value", "2.31"),
    _read("IB_SL", Number(0, 15), "service level", "2.1.4"),
    _read("IB_TC", Number(0, 255), "traffic class", "2.1.15"),
    _read("IB_FIFO_TC", Number(0, 255), "traffic class of control messages", "2.22.3"),
    _read("IB_RETURN_ASYNC_EVENTS", FLAG, "stop upon fatal events of a device", "2.23"),
    _read("IB_EVENT_BASED_LB", FLAG, "split messages by the speed of fused devices", "2.31"),
    _read("IB_RAIL_POLICY", Words(("NONE", "CX9"), also="CX9:(FLIP|ALT|BLOCK)"), "rails of NICs", "2.30.5"),
    _read("OOB_NET_ENABLE", FLAG, "meet over the network of NCCL", "2.23"),
    _read("OOB_NET_IFNAME", _HCA, "devices to meet over", "2.23", alike=False),
    _read("UID_STAGGER_THRESHOLD", Number(1), "ranks from which on they meet one after the other", "2.23"),
    _read("UID_STAGGER_RATE", Number(1), "messages a second while ranks meet", "2.23"),
    _read("NET", _NETWORKS, "name of the network: IB, Socket or a plug-in's", "2.10"),
    _read("NET_PLUGIN", Text(), "library of the network plug-in", "2.11"),
    _read("GIN_PLUGIN", Text(), "library of the plug-in for networking that GPUs begin", "2.29.3"),
    _read("RMA_PLUGIN", Text(), "library of the plug-in for one-sided operations", "2.30.7"),
    _read("TUNER_PLUGIN", Text(), "library of the tuner plug-in"),
    _read("PROFILER_PLUGIN", Text(), "library of the profiler plug-in", alike=False),
    _read("ENV_PLUGIN", Text(), "library of the plug-in for variables", "2.28"),
    _read("IGNORE_CPU_AFFINITY", FLAG, "take the GPU's affinity, not the job's", "2.4.6"),
    _read("CONF_FILE", PATH, "file that sets variables", "2.23", alike=False),
    _read("DEBUG", _DEBUG, "what NCCL logs", alike=False),
    _read(
        "DEBUG_LEVELS",
        Words(("VERSION", "WARN", "ATTN", "INFO", "ABORT", "TRACE", "ALL"), "is ignored", any_case=True, separator=","),
        "levels to log besides",
        "2.32",
        alike=False,
    ),
    _read("DEBUG_FILE", PATH, "file of the log; %h is the host and %p the process", "2.2.12", alike=False),
    _read(
        "DEBUG_SUBSYS",
        Words(tuple(_SUBSYSTEMS.split()), "is ignored", any_case=True, separator=","),
        "subsystems that log",
        "2.3.4",
        alike=False,
    ),
    _read("DEBUG_TIMESTAMP_FORMAT", Text(), "how the log writes times", "2.26", alike=False),
    _read(
        "DEBUG_TIMESTAMP_LEVELS",
        Words(("VERSION", "WARN", "ATTN", "INFO", "ABORT", "TRACE", "ALL"), "is ignored", any_case=True, separator=","),
        "which lines of the log have times",
        "2.26",
        alike=False,
    ),
    _read("COLLNET_ENABLE", FLAG, "use CollNet: reductions in the network", "2.6"),
    _read("COLLNET_NODE_THRESHOLD", Number(0), "nodes from which on CollNet is used", "2.9.9"),
    _read("CTA_POLICY", Words(("DEFAULT", "EFFICIENCY", "ZERO"), also=r"[012]|[A-Z]+(\|[A-Z]+)+"), "policy", "2.27"),
    _read("NETDEVS_POLICY", Words(("ALL",), also="MAX:[0-9]+"), "network devices of each GPU", "2.28"),
    _read("MULTI_RANK_GPU_ENABLE", FLAG, "several ranks on one GPU (experimental)", "2.30"),
    _read("TOPO_FILE", PATH, "XML file of the topology of a host", "2.6", alike=False),
    _read("TOPO_DUMP_FILE", PATH, "file to write the topology to", "2.6", alike=False),
    _read("SET_THREAD_NAME", FLAG, "names of NCCL's threads", "2.12", alike=False),
)

_DEBUGGING = (
    _read("P2P_DISABLE", FLAG, "no direct access between GPUs"),
    _read("P2P_LEVEL", LEVEL, "distance up to which GPUs access each other", "2.3.4"),
    _read("P2P_DIRECT_DISABLE", FLAG, "no direct access to buffers of the user"),
    _read("SHM_DISABLE", FLAG, "no shared memory between processes of a host"),
    _read("BUFFSIZE", Number(1), "bytes of a buffer between two GPUs"),
    _read("NTHREADS", Number(64, 512, multiple=32), "CUDA threads of a block"),
    _read("MAX_NCHANNELS", Number(1), "most channels; MAX_CTAS replaces it", "2.5.0"),
    _read("MIN_NCHANNELS", Number(1), "fewest channels; MIN_CTAS replaces it", "2.5.0"),
    _read("MAX_NRINGS", Number(1), "older name of MAX_NCHANNELS", "2.0.5"),
    _read("MIN_NRINGS", Number(1), "older name of MIN_NCHANNELS", "2.2.0"),
    _read("CHECK_POINTERS", FLAG, "check pointers of each call; CHECK_MODE replaces it", "2.2.12"),
    _read("CHECK_MODE", Words(("DEFAULT", "DEBUG_LOCAL", "DEBUG_GLOBAL")), "check arguments of each call", "2.29.7"),
    _read("LAUNCH_MODE", Words(("PARALLEL", "GROUP"), "is ignored"), "how kernels are launched", "2.1.0"),
    _read("IB_DISABLE", FLAG, "no InfiniBand and no RoCE"),
    _read("IB_AR_THRESHOLD", Number(0), "bytes from which on data use adaptive routing", "2.6"),
    _read("IB_OOO_RQ", FLAG, "receive requests out of order", "2.30"),
    _read("IB_QPS_PER_CONNECTION", Number(1, 128), "queue pairs of each connection", "2.10"),
    _read("IB_SPLIT_DATA_ON_QPS", FLAG, "split each message among queue pairs", "2.18"),
    _read("IB_PCI_RELAXED_ORDERING", Number(0, 2), "relaxed ordering", "2.12"),
    _read("IB_ADAPTIVE_ROUTING", FLAG, "adaptive routing", "2.16"),
    _read("IB_ECE_ENABLE", FLAG, "enhanced connection establishment", "2.23"),
    _read("MEM_SYNC_DOMAIN", FLAG, "memory domain of kernels", "2.16"),
    _read("CUMEM_ENABLE", FLAG, "allocate by cuMem", "2.18"),
    _read("CUMEM_HOST_ENABLE", FLAG, "allocate host memory by cuMem", "2.23"),
    _read("NET_GDR_LEVEL", LEVEL, "distance up to which a NIC accesses a GPU", "2.3.4"),
    _read("NET_GDR_C2C", FLAG, "the same over C2C", "2.26"),
    _read("NET_GDR_READ", FLAG, "the NIC reads from the GPU"),
    _read("GDRCOPY_ENABLE", FLAG, "GDRCopy"),
    _read("GDRCOPY_FIFO_ENABLE", FLAG, "GDRCopy for the queue of work"),
    _read("GDRCOPY_SYNC_ENABLE", FLAG, "GDRCopy for synchronization"),
    _read("GDRCOPY_FLUSH_ENABLE", FLAG, "GDRCopy for flushes"),
    _read("NET_SHARED_BUFFERS", FLAG, "one pool of buffers for all peers", "2.8"),
    _read("NET_SHARED_COMMS", FLAG, "one connection for several GPUs", "2.12"),
    _read("IGNORE_NET_MISMATCH", FLAG, "go on where ranks have different numbers of devices", "2.30"),
    _read("IGNORE_COLLNET_MISMATCH", FLAG, "the same for CollNet", "2.30"),
    _read("ALGO", ALGORITHMS, "algorithms", "2.5"),
    _read("PROTO", PROTOCOLS, "protocols", "2.5"),
    _read("NVB_DISABLE", FLAG, "no NVLink over another GPU", "2.11"),
    _read("PXN_DISABLE", FLAG, "no NIC of another GPU", "2.12"),
    _read("P2P_PXN_LEVEL", Number(0, 2), "when send and receive use NICs of other GPUs", "2.12"),
    _read("PXN_C2C", FLAG, "the same over C2C", "2.27"),
    _read("RUNTIME_CONNECT", FLAG, "connect when it is needed", "2.22"),
    _read("GRAPH_REGISTER", FLAG, "register buffers of CUDA graphs", "2.11"),
    _read("LOCAL_REGISTER", FLAG, "register buffers of the user", "2.19"),
    _read("LEGACY_CUDA_REGISTER", FLAG, "register buffers of cudaMalloc", "2.24"),
    _read("WIN_ENABLE", FLAG, "register windows", "2.27"),
    _read("SET_STACK_SIZE", FLAG, "set the stack of kernels", "2.9"),
    _read("GRAPH_MIXING_SUPPORT", FLAG, "graphs beside other calls", "2.13"),
    _read("GRAPH_STREAM_ORDERING", FLAG, "order of kernels in graphs", "2.30"),
    _read("RMA_EAGER_INIT", FLAG, "set signals up with the communicator", "2.31"),
    _read("DMABUF_ENABLE", FLAG, "register GPU memory by dma-buf", "2.13"),
    _read("P2P_NET_CHUNKSIZE", Number(1), "bytes of a message of send and receive", "2.14"),
    _read("P2P_LL_THRESHOLD", Number(0), "bytes up to which send and receive use LL", "2.14"),
    _read("ALLOC_P2P_NET_LL_BUFFERS", FLAG, "buffers of LL for all peers", "2.14"),
    _read("COMM_BLOCKING", FLAG, "whether calls block", "2.14"),
    _read("CGA_CLUSTER_SIZE", Number(0, 8), "blocks of a cluster", "2.16"),
    _read("MAX_CTAS", Number(1, 64), "most thread blocks", "2.17"),
    _read("MIN_CTAS", Number(1, 64), "fewest thread blocks", "2.17"),
    _read("NVLS_ENABLE", Number(0, 2), "NVLink SHARP", "2.17"),
    _read("IB_MERGE_NICS", FLAG, "use the ports of a NIC as one device", "2.20"),
    _read("NET_MERGE_POLICY", Words(("ALL", "RAIL")), "which devices are merged", "2.30.5"),
    _read("NET_MERGE_LEVEL", LEVEL, "distance up to which devices are merged"),
    _read("MNNVL_ENABLE", Number(0, 2), "NVLink between hosts", "2.21"),
    _read("MNNVL_UUID", Number(), "NVLink domain", "2.25", alike=False),
    _read("MNNVL_CLIQUE_ID", Number(), "part of an NVLink domain", "2.25", alike=False),
    _read("RAS_ENABLE", FLAG, "health service", "2.24"),
    _read("RAS_ADDR", _ADDRESS, "where the health service listens", "2.24", alike=False),
    _read("RAS_TIMEOUT_FACTOR", _FACTOR, "factor of its timeouts", "2.24"),
    _read("LAUNCH_ORDER_IMPLICIT", FLAG, "order of operations of several communicators", "2.26"),
    _read("LAUNCH_RACE_FATAL", FLAG, "fail where threads race to launch", "2.26"),
    _read("IPC_USE_ABSTRACT_SOCKET", FLAG, "abstract sockets between processes of a host", "2.29"),
    _read("SYM_GIN_KERNELS_ENABLE", FLAG, "symmetric kernels over the network", "2.29"),
    _read(
        "PSK",
        Text("32 characters or more", r".{32,}", "is refused: it is shorter than 32 characters", True),
        "key that encrypts sockets",
    ),
)

_NEVER_READ = (
    _old("RINGS", "2.5", "Leave it out: NCCL finds its rings; NCCL_TOPO_FILE describes what it cannot see."),
    _old("SINGLE_RING_THRESHOLD", "2.3", "Leave it out: NCCL chooses by its own model of times."),
    _old("LL_THRESHOLD", "2.5", "Leave it out. NCCL_PROTO chooses protocols, where you must."),
    _old("TREE_THRESHOLD", "2.5", "Leave it out. NCCL_ALGO chooses algorithms, where you must."),
    _old("IB_CUDA_SUPPORT", "2.4.0", "Set NCCL_NET_GDR_LEVEL."),
    _old("IB_GDR_LEVEL", "2.4.0", "Set NCCL_NET_GDR_LEVEL."),
    _old("CHECKS_DISABLE", "2.2.12", "Leave it out: checks are off, and NCCL_CHECK_MODE turns them on."),
    _old("MIN_CHANNELS", "ever", "Its name is NCCL_MIN_NCHANNELS, and NCCL_MIN_CTAS since 2.17."),
    _old("MAX_CHANNELS", "ever", "Its name is NCCL_MAX_NCHANNELS, and NCCL_MAX_CTAS since 2.17."),
    _old("TIMEOUT", "ever", "Give init_process_group(timeout=...), which PyTorch's watchdog keeps."),
)

NCCL_VARIABLES = {each.name: each for each in (*_SYSTEM, *_DEBUGGING, *_NEVER_READ)}
"""By name."""

_INTERNAL = """
COMM_ID HOSTID LL128_NTHREADS THREAD_THRESHOLDS LL_BUFFSIZE LL128_BUFFSIZE P2P_PCI_CHUNKSIZE P2P_NVL_CHUNKSIZE
DYNAMIC_CHUNK_SIZE CHUNK_SIZE MIN_P2P_NCHANNELS MAX_P2P_NCHANNELS NCHANNELS_PER_PEER NCHANNELS_PER_NET_PEER
NET_FORCE_FLUSH NET_DISABLE_INTRA NET_OVERHEAD NET_OPTIONAL_RECV_COMPLETION NET_FORCE_MERGE NVLS_CHANNELS NVLS_NCHANNELS
NVLS_CHUNKSIZE NVLSTREE_MAX_CHUNKSIZE GRAPH_FILE GRAPH_DUMP_FILE GRAPH_DUMP_FILE_RANK TOPO_DUMP_FILE_RANK
GROUP_CUDA_STREAM IB_USE_INLINE IB_ROUTABLE_FLID_GID_INDEX IB_MERGE_VFS IB_WARN_RAIL_LOCAL IB_GDR_FLUSH_DISABLE
IB_DATA_DIRECT IB_ASYNC_EVENTS IGNORE_DISABLED_P2P P2P_READ_ENABLE P2P_USE_CUDA_MEMCPY SHM_USE_CUDA_MEMCPY
SHM_MEMCPY_MODE SHM_LOCALITY PROXY_APPEND_BATCH_SIZE PROXY_DUMP_SIGNAL PROXY_CPUSET CREATE_THREAD_CONTEXT
PROGRESS_APPENDOP_FREQ PAT_ENABLE LL128_C2C WORK_FIFO_BYTES WORK_FIFO_DEPTH WORK_ARGS_BYTES UNPACK_DOUBLE_NCHANNELS
L1_SHARED_MEMORY_CARVEOUT NVB_PRECONNECT COMM_SPLIT_SHARE_RESOURCES COMM_SHRINK_SHARE_RESOURCES
CONNECT_ROUND_MAX_PEERS REPORT_CONNECT_PROGRESS SINGLE_PROC_MEM_REG_ENABLE NVTX_DISABLE PROFILE_EVENT_MASK NO_CACHE
WARN_ENABLE_DEBUG_INFO COLLNET_SHARED_BUFFERS BOOTSTRAP_NET_ENABLE CUDA_PATH GIN_ENABLE GIN_TYPE GIN_PROXY_QUEUE_SIZE
SYM_KERNEL SYM_CTAS RAS_DEBUG TUNER_CONFIG_PATH HOME VERSION DIR INCLUDE_DIR LIB_DIR ROOT
"""
INTERNAL = frozenset(f"NCCL_{name}" for name in _INTERNAL.split())
"""Names of its sources that its guide does not tell of, and names that builds and images set."""

PLUGINS = (
    "NCCL_FASTRAK_",
    "NCCL_GPUDIRECTTCPX_",
    "NCCL_SHIMNET_",
    "NCCL_TUNER_",
    "NCCL_PROFILER_",
    "NCCL_SHARP_",
    "NCCL_PLUGIN_",
    "NCCL_UCX_",
    "NCCL_OFI_",
    "NCCL_TESTS_",
    "NCCL_NET_OFI_",
    "NCCL_INSPECTOR_",
    "NCCL_LSA_",
)
"""Beginnings of names that belong to plug-ins."""
