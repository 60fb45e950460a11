"""Anima, from the blocks of diffusers' modular pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AnimaAutoBlocks, ClassifierFreeGuidance, CosmosTransformer3DModel
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep
from torch import Tensor, nn

from pipeline.models.worker.denoiser import Conditions, DenoiserCall
from pipeline.models.worker.inference import PipelineDrawing
from pipeline.models.worker.loading import component_class
from pipeline.models.worker.text import TextConditioner

if TYPE_CHECKING:
    from PIL import Image

# Blocks of the pipeline that turn a prompt into the embeddings that are stored.
_TEXT_BLOCKS = ("text_encoder", "denoise.text_conditioning")


class ImageCosmosTransformer(CosmosTransformer3DModel):
    """Cosmos' transformer for complete images, whose padding mask is zero everywhere."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Any:
        """Return the prediction as the base class does; `padding_mask` is taken as zero."""
        options.pop("padding_mask", None)

        # The base class resizes the mask with torchvision, which nothing else here needs. A mask of
        # conditions becomes the same channel of the input as a padding mask.
        has_mask = self.config["concat_padding_mask"]
        channel = torch.zeros_like(hidden_states[:, :1]) if has_mask else None
        self.register_to_config(concat_padding_mask=False)
        try:
            return super().forward(hidden_states, *arguments, condition_mask=channel, **options)
        finally:
            self.register_to_config(concat_padding_mask=has_mask)


class AnimaConditioner(TextConditioner):
    """A Qwen3 and a text conditioner, whose queries are the tokens of T5's tokenizer."""

    def assemble(self, components: Mapping[str, Any]) -> Any:
        pipeline = _pipeline(lambda name: name in _TEXT_BLOCKS)
        pipeline.update_components(**components)
        return pipeline

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        encoder, conditioner = encoders.text_encoder, encoders.text_conditioner
        encoded: dict[str, Any] = AnimaTextEncoderStep.encode_prompt(
            encoders,
            caption,
            prepare_unconditional_embeds=False,
            max_sequence_length=self.family.max_length(),
            device=encoder.device,
            dtype=conditioner.dtype,
        )
        embedding = conditioner(
            source_hidden_states=encoded["qwen_prompt_embeds"],
            source_attention_mask=encoded["qwen_attention_mask"],
            target_input_ids=encoded["t5_input_ids"],
            target_attention_mask=encoded["t5_attention_mask"],
        )
        # Zeros follow the caption's own tokens.
        return {"text_embedding": embedding[:, : encoded["t5_input_ids"].shape[1]]}

    def inputs_of_pass(self, role: str, num_tokens: int) -> dict[str, Any]:
        if role != "text_conditioner":
            return super().inputs_of_pass(role, num_tokens)
        length = self.family.max_length()
        width = int(self.family.model.config(role)["source_dim"])
        return {
            "source_hidden_states": torch.empty(1, length, width, device="meta"),
            "target_input_ids": torch.zeros(1, length, dtype=torch.long, device="meta"),
        }


class AnimaCall(DenoiserCall):
    """Cosmos' transformer over a video of one frame."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        prediction = denoiser(
            hidden_states=noisy.unsqueeze(2),
            timestep=timesteps / self.num_timesteps,
            encoder_hidden_states=conditions["text_embedding"],
            return_dict=False,
        )[0]
        return prediction.squeeze(2)


class AnimaDrawing(PipelineDrawing):
    """Previews with the blocks of the modular pipeline that follow the text encoders."""

    def assemble(self, components: Mapping[str, Any]) -> Any:
        scheduler = component_class(self.family, "scheduler").from_pretrained(
            self.family.model.component("scheduler"), local_files_only=True
        )
        pipeline = _pipeline(lambda name: name not in _TEXT_BLOCKS)
        pipeline.update_components(**components, scheduler=scheduler)
        return pipeline

    def call(self, pipeline: Any, arguments: Mapping[str, Any]) -> Sequence[Image.Image]:
        given = dict(arguments)
        guider = ClassifierFreeGuidance(guidance_scale=given.pop("guidance_scale"))
        pipeline.update_components(guider=guider)
        return pipeline(**given, output="images")


def _pipeline(is_used: Callable[[str], bool]) -> Any:
    """Return the text-to-image pipeline without components, with the blocks whose name `is_used` accepts."""
    blocks = AnimaAutoBlocks().get_workflow("text2image")
    for name in [name for name in blocks.sub_blocks if not is_used(name)]:
        del blocks.sub_blocks[name]
    return blocks.init_pipeline()
