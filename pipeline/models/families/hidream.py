"""HiDream: two CLIPs, T5 and every layer of a Llama; a transformer of experts; a VAE of 16 channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.errors import BucketError, FamilyError
from pipeline.images.geometry import Size
from pipeline.models.families.base import Conditions, Shapes
from pipeline.models.families.solver_schedule import SolverSchedule

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 128
"""`max_sequence_length` of the pipeline, for all four encoders."""

_BROUGHT = ("tokenizer_4", "text_encoder_4")
"""Components that the published models lack: users bring a Llama 3.1."""


class HiDream(SolverSchedule):
    """HiDream I1, full, dev and fast."""

    name = "HiDream"
    pipeline_classes = ("HiDreamImagePipeline",)
    components: ClassVar[Mapping[str, str]] = {
        "vae": "diffusers.AutoencoderKL",
        "tokenizer": "transformers.CLIPTokenizer",
        "tokenizer_2": "transformers.CLIPTokenizer",
        "tokenizer_3": "transformers.T5TokenizerFast",
        "tokenizer_4": "transformers.PreTrainedTokenizerFast",
        "text_encoder": "transformers.CLIPTextModelWithProjection",
        "text_encoder_2": "transformers.CLIPTextModelWithProjection",
        "text_encoder_3": "transformers.T5EncoderModel",
        "text_encoder_4": "transformers.LlamaForCausalLM",
        "transformer": "diffusers.HiDreamImageTransformer2DModel",
        "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    }
    latent_method = "autoencoder-kl shifted scaled, 1"
    text_method = "two clips pooled, t5 and llama layers padded, 1"
    guidance_scale = 5.0

    def latent_shape(self, target: Size) -> tuple[int, int, int]:
        """(C, h, w), each edge divided by the VAE's factor.

        Raises:
            BucketError: The image is no square, and has more patches than the transformer fills up to.
        """
        shape = super().latent_shape(target)
        config = self.denoiser_config
        most = math.prod(config["max_resolution"]) // int(config["patch_size"]) ** 2
        if target.height != target.width and self.num_tokens(shape) > most:
            pixels = round(math.sqrt(most)) * self.size_multiple()
            raise BucketError(
                f"a target size of {target.height}x{target.width} is too large for this base model",
                where="buckets.resolution",
                fix=f"set it to {pixels} at most: images that are no squares may have {pixels**2} pixels",
            )
        return shape

    def text_roles(self) -> tuple[str, ...]:
        """All eight.

        Raises:
            FamilyError: Nobody says which Llama it is.
        """
        for role in _BROUGHT:
            if not self.has(role):
                raise FamilyError(
                    f"{self.name}'s published models have no {role}: it is a Llama 3.1, which you bring",
                    where=f"model.components.{role}",
                    fix="set model.components.tokenizer_4 and model.components.text_encoder_4 to "
                    "meta-llama/Llama-3.1-8B-Instruct, or to a folder that it was downloaded to",
                )
        return super().text_roles()

    def token_limits(self) -> dict[str, int]:
        """The pipeline's 128, of each."""
        return {role: _TOKENS for role in self.components if role.startswith("tokenizer")}

    def text_shapes(self) -> Shapes:
        """T5's hidden states and those of all of Llama's layers, padded to T; both CLIPs' projections."""
        llama = self.config("text_encoder_4")
        pooled = sum(int(self.config(role)["projection_dim"]) for role in ("text_encoder", "text_encoder_2"))
        return {
            "text_embedding": (_TOKENS, int(self.config("text_encoder_3")["d_model"])),
            "llama_embeddings": (int(llama["num_hidden_layers"]), _TOKENS, int(llama["hidden_size"])),
            "pooled_text_embedding": (pooled,),
        }

    def modelspec_architecture(self) -> str:
        """The one name."""
        return "hidream-i1"

    def lora_targets(self) -> list[str]:
        """Query, key, value and output of each attention, of image and text."""
        return [f"attn1.to_{end}{side}" for side in ("", "_t") for end in ("q", "k", "v", "out")]

    def kohya_loads(self) -> bool:
        """Diffusers reads no kohya files for HiDream."""
        return False

    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """`HiDreamImagePipeline.encode_prompt`."""
        t5, _, llama, _, pooled, _ = encoders.encode_prompt(
            caption,
            device=encoders.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=_TOKENS,
        )
        return {
            "text_embedding": t5,
            "llama_embeddings": llama.transpose(0, 1),
            "pooled_text_embedding": pooled,
        }

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The transformer's sample, backwards, as the pipeline takes it."""
        answer = -denoiser(
            hidden_states=noisy,
            timesteps=timesteps,
            encoder_hidden_states_t5=conditions["text_embedding"],
            encoder_hidden_states_llama3=conditions["llama_embeddings"].transpose(0, 1),
            pooled_embeds=conditions["pooled_text_embedding"],
            return_dict=False,
        )[0]
        return self._in_place(answer, noisy) if denoiser.training else answer

    def _in_place(self, patches: Tensor, noisy: Tensor) -> Tensor:
        """Patches (B, C, S, p p), which the transformer answers with while it trains, as `noisy` lies.

        Behind those of the image come others, to which the transformer fills up what is no square.
        """
        edge = int(self.denoiser_config["patch_size"])
        batch, channels, height, width = noisy.shape
        rows, columns = height // edge, width // edge
        own = patches[:, :, : rows * columns].reshape(batch, channels, rows, columns, edge, edge)
        return own.transpose(3, 4).reshape(noisy.shape)

    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Guided away from the empty caption."""
        arguments: dict[str, Any] = {}
        for sign, tensors in (("", text), ("negative_", empty_text)):
            arguments[f"{sign}prompt_embeds_t5"] = tensors["text_embedding"]
            arguments[f"{sign}prompt_embeds_llama3"] = tensors["llama_embeddings"].transpose(0, 1)
            arguments[f"{sign}pooled_prompt_embeds"] = tensors["pooled_text_embedding"]
        return arguments

    def allow_size(self, pipeline: Any, size: Size) -> None:
        """The pipeline scales any to the area of its default one: so that is made the size's."""
        edge = math.sqrt(size.height * size.width) / pipeline.vae_scale_factor
        pipeline.default_sample_size = edge * (1 + 1e-6)  # it rounds down
