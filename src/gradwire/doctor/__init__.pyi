from .advice import Advice, Cluster
from .check_variables import VARIABLES
from .clusters import CLUSTERS, advise
from .facts import Devices, Facts, MeetingPoint, ProcessLimits
from .finding import Examination, Finding, Unchecked
from .launched import examine_ranks
from .one_host import examine_host
from .reading import read_facts
from .together import examine_group
from .variable import Variable

__all__ = [
    "CLUSTERS",
    "VARIABLES",
    "Advice",
    "Cluster",
    "Devices",
    "Examination",
    "Facts",
    "Finding",
    "MeetingPoint",
    "ProcessLimits",
    "Unchecked",
    "Variable",
    "advise",
    "examine_group",
    "examine_host",
    "examine_ranks",
    "read_facts",
]
