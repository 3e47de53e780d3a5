"""Is my cluster set up right? Checks of hosts, variables, ranks and links, each finding with evidence and remedy.

`examine_host` looks at this host, `examine_ranks` at all ranks of a launcher and at what lies between them, and
`advise` says which variables of NCCL a kind of cluster wants. Checks are functions of `Facts`, which are read once, so
what they find does not depend on where they run.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
