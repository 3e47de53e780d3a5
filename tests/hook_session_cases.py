"""What each rank does in the tests of the drop-in hooks' sessions."""

import hook_cases
from gradwire import hooks


def differing(rank: int, world_size: int) -> str:
    """What is told where the ranks of a model approximate by different ranks."""
    state = hooks.PowerSGDState(None, matrix_approximation_rank=1 + rank, start_powerSGD_iter=0)
    try:
        hook_cases.trained(rank, (state, hooks.powerSGD_hook))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
