"""Is my cluster set up right? Checks of hosts, variables, ranks and links, each finding with evidence and remedy.

`examine_host` looks at this host, `examine_ranks` at all ranks of a launcher and at what lies between them, and
`advise` says which variables of NCCL a kind of cluster wants. Checks are functions of `Facts`, which are read once, so
what they find does not depend on where they run.
"""

from gradwire.doctor.advice import Advice, Cluster
from gradwire.doctor.check_variables import VARIABLES
from gradwire.doctor.clusters import CLUSTERS, advise
from gradwire.doctor.facts import Devices, Facts, MeetingPoint, ProcessLimits
from gradwire.doctor.finding import Examination, Finding, Unchecked
from gradwire.doctor.launched import examine_ranks
from gradwire.doctor.one_host import examine_host
from gradwire.doctor.reading import read_facts
from gradwire.doctor.together import examine_group
from gradwire.doctor.variable import Variable
from gradwire.topology.link_matrix import LinkMatrix

__all__ = [
    "CLUSTERS",
    "VARIABLES",
    "Advice",
    "Cluster",
    "Devices",
    "Examination",
    "Facts",
    "Finding",
    "LinkMatrix",
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
