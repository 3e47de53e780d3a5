"""The kinds of clusters, and what NCCL wants on each of them."""

from __future__ import annotations

from gradwire.core.errors import SpecError
from gradwire.core.nearest import nearest
from gradwire.doctor.advice import Advice, Cluster

_ENV = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_NETWORK = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/networking_troubleshooting.html"
_RUNTIME = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/runtime_and_mpi_issues.html"
_GPU = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/gpu_troubleshooting.html"
_TORCH = "https://docs.pytorch.org/docs/stable/distributed.html"
_RECORDER_PAGE = "https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html"
_TORCH_NCCL = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
_EFA = "https://github.com/aws-samples/awsome-distributed-training/blob/main/1.architectures/efa-cheatsheet.md"
_OFI = "https://github.com/aws/aws-ofi-nccl"
_GCP = "https://docs.cloud.google.com/cluster-toolkit/docs/machine-learning/a3-mega-enable-gpudirect-tcpxo"
_AZURE = "https://github.com/Azure/azhpc-images/blob/master/customizations/ndv5.sh"

_WARN = Advice("NCCL_DEBUG", "WARN", "says why a call failed, and nothing else", _ENV)
_INFO_ONCE = Advice(
    "", None, "run once with NCCL_DEBUG=INFO: lines 'via NET/IB' or 'via P2P' tell which way NCCL takes", _ENV
)
_ALGORITHMS_ALONE = Advice(
    "NCCL_ALGO", None, "NCCL chooses algorithms by the topology and the size, and later versions choose better", _ENV
)
_PROTOCOLS_ALONE = Advice(
    "NCCL_PROTO", None, "NVIDIA advises against it; LL128 where it is not supported corrupts data", _ENV
)
_MEETING = Advice(
    "NCCL_SOCKET_IFNAME",
    "^lo,docker",
    "sockets, over which ranks meet on any network, must not take the loopback or a bridge of containers",
    _ENV,
)
_GLOO = Advice(
    "GLOO_SOCKET_IFNAME",
    "eth0",
    "Gloo takes whole names alone; without it the address of the host's name, often the loopback",
    _TORCH,
    is_example=True,
)
_RECORDER = Advice(
    "TORCH_FR_BUFFER_SIZE",
    "2000",
    "keeps the last collectives of each rank, so that a hang can be explained",
    _RECORDER_PAGE,
)
_DUMP = Advice("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "writes them down when a collective times out", _TORCH_NCCL)
_LOCKED = Advice(
    "", None, "let processes lock memory: memlock unlimited, or --ulimit memlock=-1 for containers", _NETWORK
)
_BASICS = (_WARN, _INFO_ONCE, _RECORDER, _DUMP)
_GLOO_BY_ETH0 = Advice(
    "GLOO_SOCKET_IFNAME", "eth0", "the same for Gloo, which takes whole names alone", _TORCH, is_example=True
)
_CHOICES_LEFT = (_ALGORITHMS_ALONE, _PROTOCOLS_ALONE)

CLUSTERS = {
    each.name: each
    for each in (
        Cluster(
            "single-node",
            "one host with several GPUs",
            (
                *_BASICS,
                Advice("NCCL_P2P_LEVEL", None, "NCCL knows how far GPUs may be apart on this hardware", _ENV),
                Advice("NCCL_P2P_DISABLE", None, "it takes the fastest way away, NVLink's too", _ENV),
                Advice(
                    "",
                    None,
                    "turn PCI access control (ACS) off on bare metal: it sends copies between GPUs over the "
                    "root complex, slowly or into a hang",
                    _GPU,
                ),
                Advice(
                    "", None, "give containers --shm-size=1g: NCCL and data loaders share memory in /dev/shm", _RUNTIME
                ),
                *_CHOICES_LEFT,
            ),
            ("local", "one host", "nvlink", "dgx", "workstation"),
        ),
        Cluster(
            "infiniband",
            "hosts with InfiniBand",
            (
                *_BASICS,
                _MEETING,
                _GLOO,
                Advice(
                    "NCCL_NET", "IB", "fails where InfiniBand cannot be used, in place of going by sockets unseen", _ENV
                ),
                Advice(
                    "NCCL_IB_HCA",
                    "=mlx5_0,mlx5_1",
                    "names the adapters of the compute network, and with = no others "
                    "that begin alike; leave it out where all are of it",
                    _ENV,
                    is_example=True,
                ),
                Advice(
                    "NCCL_IB_TIMEOUT",
                    None,
                    "20 is the default since 2.23; large fabrics with error 12 raise it to 22",
                    _ENV,
                ),
                Advice(
                    "NCCL_IB_PCI_RELAXED_ORDERING",
                    "2",
                    "relaxed ordering where it is available; virtual machines gain most by it",
                    _ENV,
                ),
                Advice("NCCL_NET_GDR_LEVEL", None, "NCCL knows how far a NIC may be from a GPU", _ENV),
                _LOCKED,
                *_CHOICES_LEFT,
            ),
            ("ib", "rdma", "mellanox", "quantum"),
        ),
        Cluster(
            "roce",
            "hosts with RDMA over Ethernet (RoCE)",
            (
                *_BASICS,
                _MEETING,
                _GLOO,
                Advice("NCCL_NET", "IB", "fails where RoCE cannot be used, in place of going by sockets unseen", _ENV),
                Advice(
                    "NCCL_IB_HCA",
                    "=mlx5_0,mlx5_1",
                    "names the adapters of the compute network, and with = no others that begin alike",
                    _ENV,
                    is_example=True,
                ),
                Advice(
                    "NCCL_IB_GID_INDEX",
                    None,
                    "since 2.21 NCCL finds the GID of RoCE v2, and a fixed one may be wrong "
                    "on another host; before that take it from show_gids",
                    _NETWORK,
                ),
                Advice(
                    "NCCL_IB_TC",
                    "106",
                    "the traffic class for which the switches lose nothing; ask who runs them, "
                    "since 0 may travel in a class that drops",
                    _NETWORK,
                    is_example=True,
                ),
                _LOCKED,
                *_CHOICES_LEFT,
            ),
            ("rocev2", "rdma over converged ethernet", "spectrum-x"),
        ),
        Cluster(
            "efa",
            "AWS with Elastic Fabric Adapters",
            (
                *_BASICS,
                Advice(
                    "NCCL_SOCKET_IFNAME",
                    "^lo,docker,veth",
                    "sockets, over which ranks meet, must not take the loopback or what containers have",
                    _ENV,
                ),
                Advice(
                    "GLOO_SOCKET_IFNAME",
                    "ens5",
                    "Gloo takes whole names alone, which differ between instances (ip -br link)",
                    _TORCH,
                    is_example=True,
                ),
                Advice(
                    "",
                    None,
                    "look for NET/OFI in the log of a run with NCCL_DEBUG=INFO: without the plug-in "
                    "aws-ofi-nccl NCCL goes by sockets unseen",
                    _OFI,
                ),
                Advice("FI_EFA_USE_HUGE_PAGE", "0", "data loaders that fork run out of huge pages otherwise", _EFA),
                Advice("NCCL_BUFFSIZE", None, "the plug-in sets what the adapters want", _EFA),
                Advice(
                    "NCCL_MIN_NCHANNELS", None, "more channels make smaller messages, which starve the adapters", _EFA
                ),
                Advice("NCCL_SOCKET_NTHREADS", None, "it is about sockets, which EFA does not use", _EFA),
                Advice("FI_PROVIDER", None, "aws-ofi-nccl after 1.5.0 finds EFA by itself", _EFA),
                Advice("RDMAV_FORK_SAFE", None, "it breaks things with newer kernels", _EFA),
                _ALGORITHMS_ALONE,
                Advice("NCCL_PROTO", None, "aws-ofi-nccl after 1.5.0 sets what EFA's order of arrival allows", _EFA),
            ),
            ("aws", "ec2", "sagemaker", "libfabric"),
        ),
        Cluster(
            "gcp",
            "Google Cloud with GPUDirect-TCPXO (A3 Mega)",
            (
                _WARN,
                Advice(
                    "",
                    None,
                    "source nccl-env-profile.sh, which comes with the plug-in, on every host: it sets "
                    "NCCL_FASTRAK_..., NCCL_ALGO, NCCL_PROTO, NCCL_BUFFSIZE and more as this version wants them",
                    _GCP,
                ),
                Advice(
                    "NCCL_ALGO",
                    None,
                    "a checker of the plug-in refuses to start with other values than its own script has",
                    "https://github.com/NVIDIA/aicr/pull/422",
                ),
                Advice("NCCL_BUFFSIZE", None, "the same", "https://github.com/NVIDIA/aicr/pull/422"),
                Advice(
                    "GLOO_SOCKET_IFNAME",
                    "eth0",
                    "the first interface is that of the hosts, the others are the GPUs'; Gloo takes whole names alone",
                    _TORCH,
                    is_example=True,
                ),
                _RECORDER,
                _DUMP,
            ),
            ("google", "google cloud", "gke", "tcpx", "tcpxo", "a3"),
        ),
        Cluster(
            "azure",
            "Azure's ND virtual machines with InfiniBand",
            (
                *_BASICS,
                Advice(
                    "NCCL_SOCKET_IFNAME",
                    "eth0",
                    "the interface of the virtual network, over which ranks meet",
                    _ENV,
                    is_example=True,
                ),
                _GLOO_BY_ETH0,
                Advice(
                    "NCCL_TOPO_FILE",
                    "/opt/microsoft/ndv5/topo.xml",
                    "a virtual machine hides which adapter is near "
                    "which GPU; images for HPC set it in /etc/nccl.conf, others lack file and setting",
                    _AZURE,
                    is_example=True,
                ),
                Advice(
                    "NCCL_IB_PCI_RELAXED_ORDERING",
                    "1",
                    "forces relaxed ordering, by which virtual machines gain, and fails where it is missing",
                    _AZURE,
                ),
                Advice(
                    "NCCL_IGNORE_CPU_AFFINITY",
                    "1",
                    "takes the processors that are near the GPU, whatever the job has",
                    _AZURE,
                ),
                Advice(
                    "NCCL_NET", "IB", "fails where InfiniBand cannot be used, in place of going by sockets unseen", _ENV
                ),
                _LOCKED,
                *_CHOICES_LEFT,
            ),
            ("microsoft", "nd", "ndv5", "ndv4"),
        ),
        Cluster(
            "ethernet",
            "hosts with Ethernet and no RDMA",
            (
                *_BASICS,
                Advice(
                    "NCCL_SOCKET_IFNAME",
                    "=eth0",
                    "the interface that reaches the other hosts; with = no others that begin alike",
                    _ENV,
                    is_example=True,
                ),
                _GLOO_BY_ETH0,
                Advice(
                    "NCCL_SOCKET_NTHREADS",
                    "4",
                    "one thread does not fill 100 Gbit/s; leave it out below 25",
                    _ENV,
                    is_example=True,
                ),
                Advice(
                    "NCCL_NSOCKS_PERTHREAD",
                    "4",
                    "the same for sockets; threads times sockets are 64 at most",
                    _ENV,
                    is_example=True,
                ),
                Advice(
                    "",
                    None,
                    "open the ports of net.ipv4.ip_local_port_range between the hosts: NCCL and Gloo listen "
                    "on ports that the kernel chooses",
                    _NETWORK,
                ),
                *_CHOICES_LEFT,
            ),
            ("tcp", "sockets", "lan", "10gbe", "25gbe", "100gbe"),
        ),
    )
}
"""By name."""


def advise(cluster: str) -> Cluster:
    """Return the advice for a kind of cluster.

    Args:
        cluster: a name of `CLUSTERS`.

    Raises:
        SpecError: no such kind; the message has the nearest name, or all of them.

    >>> advise("single-node").variables["NCCL_DEBUG"]
    'WARN'
    >>> advise("infinband")
    Traceback (most recent call last):
    gradwire.core.errors.SpecError: there is no advice for a cluster 'infinband': did you mean infiniband?
    """
    if cluster in CLUSTERS:
        return CLUSTERS[cluster]
    names = {synonym: each.name for each in CLUSTERS.values() for synonym in (each.name, *each.synonyms)}
    near = nearest(cluster, names)
    hint = f"did you mean {near}?" if near else f"known are {', '.join(CLUSTERS)}"
    raise SpecError(f"there is no advice for a cluster {cluster!r}: {hint}")
