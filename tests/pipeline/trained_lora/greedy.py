"""An optimizer whose step needs more memory than there is."""

from __future__ import annotations

from typing import Any

import torch


class Greedy(torch.optim.SGD):
    """An optimizer that allocates too much, so that the system's allocator fails."""

    def step(self, closure: Any = None) -> Any:
        torch.empty(2**60, dtype=torch.uint8)
        return super().step(closure)
