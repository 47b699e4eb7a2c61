"""How many drafts of each request are verified in a step: policies as pure functions over tensors.

What they may look at: what was known before the drafts were drawn, and survivals that depend on a draft's prefix only.
Next: agent/batch.py, which packs that many rows.
"""

from torch import Tensor


def fixed(num_drafts: Tensor, caps: Tensor, room: Tensor) -> Tensor:
    """Every draft there is, up to the request's own cap and what its limits leave; all [B] int64.

    `room` is the number of tokens that the request may still emit: a step emits one more than it accepts.
    """
    return num_drafts.minimum(caps).minimum(room - 1).clamp(min=0)
