"""An optimizer whose step needs more memory than there is."""

from __future__ import annotations

from typing import Any

import torch


class Greedy(torch.optim.SGD):
    """Really asks for it, so that the machine's own allocator refuses."""

    def step(self, closure: Any = None) -> Any:
        torch.empty(2**60, dtype=torch.uint8)
        return super().step(closure)
