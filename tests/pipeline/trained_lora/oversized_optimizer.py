"""An optimizer for tests of out-of-memory errors."""

from __future__ import annotations

from typing import Any

import torch


class OversizedStep(torch.optim.SGD):
    """An optimizer whose step requests 2**60 bytes, so that the allocation fails."""

    def step(self, closure: Any = None) -> Any:
        torch.empty(2**60, dtype=torch.uint8)
        return super().step(closure)
