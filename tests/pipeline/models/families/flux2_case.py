"""The expected results of FLUX.2 klein and dev."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from pipeline.models.worker.family import WorkerFamily, load_family
from pipeline.trained_lora.worker.micro_input import MicroInput
from tests.pipeline.models.families.case import Case
from tests.pipeline.models.families.references_case import (
    check_calls,
    check_encoding,
    check_loss,
    check_order,
    check_preview,
)

DOUBLE = ("img_attn_qkv", "img_attn_proj", "img_mlp_0", "img_mlp_2")
DOUBLE += tuple(layer.replace("img", "txt") for layer in DOUBLE)


class Flux2Case(Case):
    targets = (
        r"transformer_blocks\.\d+\.(attn\.(to|add)_[qkv](_proj)?|attn\.to_out\.0|attn\.to_add_out"
        r"|ff(_context)?\.linear_(in|out))|single_transformer_blocks\.\d+\.attn\.to_(qkv_mlp_proj|out)"
    )

    guidance: ClassVar[float | None]
    """Guidance scale of the transformer, or None if it takes none."""

    def embed(self, pipe: Any, caption: str) -> dict[str, torch.Tensor]:
        return {"text_embedding": pipe.encode_prompt(caption)[0]}

    def latent(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        return pipe._encode_vae_image(pixels, generator=None)

    def predict(self, pipe: Any, noisy: torch.Tensor, micro: MicroInput) -> torch.Tensor:
        """Call the transformer with one token per position; ids are (time, row, column, text index)."""
        batch, _, height, width = noisy.shape
        rows = [[0, row, column, 0] for row in range(height) for column in range(width)]
        text = micro.conditions["text_embedding"]
        places = [[0, 0, 0, place] for place in range(text.shape[1])]
        tokens = pipe.transformer(
            noisy.flatten(2).transpose(1, 2),
            text,
            micro.timesteps / 1000,
            torch.tensor([rows] * batch),
            torch.tensor([places] * batch),
            guidance=None if self.guidance is None else torch.full((batch,), self.guidance),
        ).sample
        return tokens.transpose(1, 2).reshape(noisy.shape)

    def kohya_keys(self) -> set[str]:
        double = {f"lora_unet_double_blocks_{block}_{layer}" for block in range(2) for layer in DOUBLE}
        single = {f"lora_unet_single_blocks_{block}_linear{layer}" for block in range(2) for layer in (1, 2)}
        return double | single


class ReferenceTests:
    """Tests of reference images; a subclass names its case."""

    case: ClassVar[Case]

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[WorkerFamily, Any]:
        """Return the tiny model and its complete pipeline."""
        folder = tmp_path_factory.mktemp("base")
        cls.case.make(folder)
        pipe = cls.case.pipeline(folder)
        pipe.set_progress_bar_config(disable=True)
        return load_family(folder), pipe

    def test_the_latents_of_references_are_those_of_the_pipeline(
        self, loaded: tuple[WorkerFamily, Any]
    ) -> None:
        check_encoding(*loaded)

    @pytest.mark.parametrize("number", [0, 1, 2, 3])
    def test_training_calls_the_transformer_as_each_step_of_the_pipeline_does(
        self, loaded: tuple[WorkerFamily, Any], number: int
    ) -> None:
        check_calls(*loaded, number=number)

    def test_the_loss_ignores_the_predictions_for_references(self, loaded: tuple[WorkerFamily, Any]) -> None:
        check_loss(*loaded)

    def test_order_height_and_width_of_references_change_the_prediction(
        self, loaded: tuple[WorkerFamily, Any]
    ) -> None:
        check_order(*loaded, number=2)

    @pytest.mark.parametrize("number", [1, 2])
    def test_a_preview_with_references_equals_the_picture_of_the_pipeline(
        self, loaded: tuple[WorkerFamily, Any], number: int
    ) -> None:
        check_preview(self.case, *loaded, number=number)
