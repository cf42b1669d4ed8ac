"""Who holds a tensor's memory. A tensor whose memory nothing else holds may be written to, or given away, unseen.

This is the one file that touches torch's count of a storage's holders. Not here: what is done with the answer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_alone(value: Tensor) -> bool:
    """Whether no other tensor, no view among them, holds this one's memory: the value does, and here a look at it. False
    of sparse tensors, which have no one storage."""
    if value.layout != torch.strided:
        return False
    storage = value.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)
