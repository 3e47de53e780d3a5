"""Training that goes on while workers are killed, leave and join. `store.serve` holds the store they meet at.

`H` is `every=` of `Elastic`, and `update` is `method=`: a spec for what carries the changes of a window. `lr=`,
`momentum=` and `nesterov=` are those of the outer step, `DiLoCo`; without them it is the plain mean. Where workers meet
is no part of a spec: `store=` stands beside it, and so do `run=`, `name=`, `least=`, `begin_with=`, `resume=`,
`lost_after_s=` and `join_s=`.
"""

from gradwire.sync.elastic.change import Change
from gradwire.sync.elastic.elastic import Elastic
from gradwire.sync.elastic.optimizer import ElasticOptimizer, ElasticWhere
from gradwire.sync.elastic.store import serve

__all__ = ["Change", "Elastic", "ElasticOptimizer", "ElasticWhere", "serve"]
