"""cuDNN's choice of algorithms for the convolutions of a VAE.

With `torch.backends.cudnn.benchmark`, cuDNN times its algorithms when a shape occurs for the first time, and
uses the fastest one from then on. That pays off for shapes of many batches, so only they get it.
"""

from __future__ import annotations

from collections import Counter

import torch

MIN_BATCHES = 8
"""Number of batches of one shape before its algorithms are timed.

An assumption: timing them takes about as long as encoding a few batches.
"""

MAX_SHAPES = 32
"""Maximum number of shapes with timed algorithms, more than the buckets of a usual recipe."""


class CudnnTuning:
    """Switches cuDNN's timing of algorithms on for shapes that occur often; used on GPUs only."""

    def __init__(self) -> None:
        """Start without any shape."""
        self._num_batches = Counter[tuple[int, ...]]()
        self._tuned_shapes = set[tuple[int, ...]]()

    def before_batch(self, shape: tuple[int, ...]) -> None:
        """Set cuDNN's mode for a batch of this shape (B, H, W)."""
        self._num_batches[shape] += 1
        if self._num_batches[shape] > MIN_BATCHES and len(self._tuned_shapes) < MAX_SHAPES:
            self._tuned_shapes.add(shape)
        torch.backends.cudnn.benchmark = shape in self._tuned_shapes
