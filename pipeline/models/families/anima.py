"""Anima: a Qwen3 and a text conditioner, Cosmos' transformer for one frame, Qwen-Image's VAE.

diffusers has it as a modular pipeline only.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.models.diffusers_folder import ModelFolder
from pipeline.models.families.family import FamilySpec
from pipeline.models.families.parts.lora_keys import RenamedKeys
from pipeline.models.families.parts.noise import FlowNoise
from pipeline.models.families.parts.text import Shapes, TextPadding, TextSpec
from pipeline.models.families.parts.vae import QwenImageLatents, frame_patch

_ENDS = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out.0": "output_proj"}

# Names of a block's attention and feed-forward layers in the original code, by their diffusers names.
_ADAPTED = {
    **{f"attn1.{name}": f"self_attn.{original}" for name, original in _ENDS.items()},
    **{f"attn2.{name}": f"cross_attn.{original}" for name, original in _ENDS.items()},
    "ff.net.0.proj": "mlp.layer1",
    "ff.net.2": "mlp.layer2",
}

_MODULATIONS = {
    f"norm{number}.linear_{layer}": f"adaln_modulation_{name}.{layer}"
    for number, name in enumerate(("self_attn", "cross_attn", "mlp"), start=1)
    for layer in (1, 2)
}

# Names of layers outside of blocks.
_OUTSIDE = {
    "patch_embed.proj": "x_embedder.proj.1",
    "time_embed.t_embedder.linear_1": "t_embedder.1.linear_1",
    "time_embed.t_embedder.linear_2": "t_embedder.1.linear_2",
    "norm_out.linear_1": "final_layer.adaln_modulation.1",
    "norm_out.linear_2": "final_layer.adaln_modulation.2",
    "proj_out": "final_layer.linear",
}


@dataclass(frozen=True)
class AnimaText(TextSpec):
    """The text conditioner's output, which has one token for each token of T5's tokenizer.

    Zeros follow it up to a fixed length, and the transformer sees them.
    """

    padding: TextPadding = "zeros"

    def token_limits(self, model: ModelFolder) -> dict[str, int]:
        # The pipeline's own limit, `max_sequence_length`, has the published value of this length.
        length = int(model.config("text_conditioner")["min_sequence_length"])
        return {"tokenizer": length, "t5_tokenizer": length}

    def shapes(self, model: ModelFolder) -> Shapes:
        width = int(model.config("text_conditioner")["target_dim"])
        return {"text_embedding": (self.max_length(model), width)}


ANIMA = FamilySpec(
    name="Anima",
    pipeline_classes=("AnimaModularPipeline",),
    components={
        "vae": "diffusers.AutoencoderKLQwenImage",
        "tokenizer": "transformers.Qwen2TokenizerFast",
        "t5_tokenizer": "transformers.T5TokenizerFast",
        "text_encoder": "transformers.Qwen3Model",
        "text_conditioner": "diffusers.AnimaTextConditioner",
        "transformer": "pipeline.models.worker.families.anima.ImageCosmosTransformer",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    },
    latents=QwenImageLatents("autoencoder-kl-qwen-image normalised, 1", patch=frame_patch),
    text=AnimaText("qwen3 and t5 tokens in anima's conditioner, 1", "families.anima:AnimaConditioner"),
    noise=FlowNoise(),
    denoiser_call="families.anima:AnimaCall",
    lora=RenamedKeys(
        list(_ADAPTED),
        blocks=("transformer_blocks", "blocks"),
        in_blocks={**_ADAPTED, **_MODULATIONS},
        outside=_OUTSIDE,
    ),
    architecture="anima",
    guidance_scale=4.0,
    drawing="families.anima:AnimaDrawing",
)
