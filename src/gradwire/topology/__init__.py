"""What a host sees of itself, which ranks share a node, and what the links of each level carry.

Nothing here needs other ranks: `gradwire.drivers.topology` asks them, and measures.
"""

from gradwire.topology.axis_links import AxisLink, AxisLinks, MeasuredPair
from gradwire.topology.description import described
from gradwire.topology.gpus import Gpu, NvLink, nvlink_groups, nvlinks_between
from gradwire.topology.host import Host, read_host
from gradwire.topology.identity import NODE_VARIABLE, HostIdentity
from gradwire.topology.interfaces import NetworkInterface
from gradwire.topology.levels import Level, Topology
from gradwire.topology.numa import NumaNode
from gradwire.topology.parallel_mesh import mesh, mesh_sizes
from gradwire.topology.rdma import RdmaPort

__all__ = [
    "NODE_VARIABLE",
    "AxisLink",
    "AxisLinks",
    "Gpu",
    "Host",
    "HostIdentity",
    "Level",
    "MeasuredPair",
    "NetworkInterface",
    "NumaNode",
    "NvLink",
    "RdmaPort",
    "Topology",
    "described",
    "mesh",
    "mesh_sizes",
    "nvlink_groups",
    "nvlinks_between",
    "read_host",
]
