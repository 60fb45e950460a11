"""A stand-in for a trained base model, for tests of the measurement."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from demo.world import CONCEPT, Scene, draw_scene


class DrawingPipeline:
    """Draws each prompt from the demo's world; it draws stars for the concept until a LoRA teaches it."""

    def __init__(self, *, teaches: bool) -> None:
        self.teaches = teaches
        self.knows_concept = False

    def set_progress_bar_config(self, *, disable: bool) -> None:
        del disable

    def load_lora_weights(self, lora: str) -> None:
        del lora
        self.knows_concept = self.teaches

    def __call__(self, prompts: list[str], **_: Any) -> SimpleNamespace:
        return SimpleNamespace(images=np.stack([self._draw(prompt) for prompt in prompts]) / 255)

    def _draw(self, prompt: str) -> np.ndarray[Any, Any]:
        _, colour, shape, _, _, background, _ = prompt.split()
        shape = "star" if shape == CONCEPT and not self.knows_concept else shape
        return draw_scene(Scene(shape, colour, background), np.random.default_rng(0))
