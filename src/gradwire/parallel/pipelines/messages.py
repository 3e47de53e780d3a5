"""What the ranks of a pipeline send in a step, as programs of messages, which the cost driver counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.core.axis import Axis
from gradwire.core.messages import Message, SendRecv
from gradwire.core.program import Program
from gradwire.parallel.pipelines.codecs import StageCodecs
from gradwire.parallel.pipelines.coding import sent_bytes, stateless
from gradwire.parallel.pipelines.schedules import ScheduleShape


def step_messages(
    shape: ScheduleShape, rank: int, codecs: StageCodecs, activations: Sequence[Tensor], backward: bool = True
) -> Program[None]:
    """What a rank sends in one step: a message for each tensor of each micro-batch that goes to another rank.

    With A and G the payload bytes of a tensor by the two codecs, b the stages of this rank whose next stage is on
    another rank, and c those whose stage before is, it sends m (b A + c G) bytes. A V has fewer such boundaries, since
    its two middle stages share a rank.

    Args:
        shape: the schedule.
        rank: whose messages.
        codecs: of what is sent.
        activations: the tensors of one micro-batch between two stages, which may be on the device "meta".
        backward: whether gradients are sent back.

    >>> from gradwire.drivers.cost import asked_by
    >>> program = step_messages(ScheduleShape("1F1B", 2, 8), 0, StageCodecs.of("int8"), [torch.empty(16, 64)])
    >>> sum(request.nbytes for request in asked_by(program, 2)), 8 * (1024 + 4 * 4)
    (8320, 8320)
    """
    for stage in shape.stages_of(rank):
        for other, codec in ((stage + 1, codecs.activations), (stage - 1, codecs.gradients)):
            forward = other > stage
            if not 0 <= other < shape.stages or shape.rank_of(other) == rank or not (forward or backward):
                continue
            for like in activations:
                if not forward and not like.is_floating_point():
                    continue  # ids and masks have no gradients
                nbytes = sent_bytes(stateless(codec, like), like)
                payload = torch.empty(nbytes, dtype=torch.uint8, device="meta")
                for _ in range(shape.micro_batches):
                    to = (shape.rank_of(other) - rank) % shape.ranks
                    yield SendRecv(payload, (Message(to, payload),), axis=Axis(shape.ranks))
