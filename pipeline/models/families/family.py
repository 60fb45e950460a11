"""The declaration of a model family, and a base model of a family in a local diffusers folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pipeline.images.geometry import Size
from pipeline.models.diffusers_folder import (
    ModelFolder,
    image_processor_settings,
    is_text_encoder,
    tokenizer_files,
    weight_files,
)
from pipeline.models.families.compute_dtype import denoiser_precision, text_encoder_dtype, vae_dtype
from pipeline.models.families.parts.lora_keys import ClipLora, Layer, LoraKeys
from pipeline.models.families.parts.noise import NoiseSpec, Prediction
from pipeline.models.families.parts.references import ReferenceSpec, TextImages
from pipeline.models.families.parts.text import Shapes, TextSpec
from pipeline.models.families.parts.vae import LatentSpec
from pipeline.models.fingerprints import ModelPart

Use = Literal["latents", "text", "denoiser"]
"""Artifact that a part of the base model decides: latents, text embeddings, or the trained LoRA."""

Denoiser = Literal["unet", "transformer"]
"""Component of the diffusers pipeline that training adapts."""


LOSES_ZERO_SNR = "loses_zero_snr"
"""Key of the provenance of a LoRA for a base model with `Family.loses_zero_snr`."""

MODULAR = "modular_pipeline"
"""Key of the provenance of a LoRA for a base model that diffusers has as a modular pipeline only."""

FORCES_ZEROS = "force_zeros_for_empty_prompt"
"""Key of `model_index.json`: without a negative prompt, the pipeline draws with zeros in place of a text."""


@dataclass(frozen=True)
class Distillation:
    """Facts about a distilled base model, which draws in few steps.

    Attributes:
        training_adapter: Published training adapter, as a value of `model.training_adapter`; "" without one.
    """

    # A LoRA that is trained directly on it weakens its distillation, so that it draws generic pictures. A
    # training adapter prevents this.

    training_adapter: str = ""


@dataclass(frozen=True)
class FamilySpec:
    """The declaration of a model family: the parts that a base model of this family consists of.

    Import paths such as "vae:KLCodec" are below `pipeline.models.worker`.

    Attributes:
        name: Display name.
        pipeline_classes: Values of `_class_name` in the index that belong to the family.
        components: Subfolders that are used, each with its class as `library.Class`; no other component is
            downloaded or loaded.
        latents: Latent geometry and VAE codec.
        text: Shapes of text embeddings and text conditioner.
        noise: Noise process.
        denoiser_call: Import path of the denoiser call.
        lora: Modules that get adapters, and their names in LoRA files.
        architecture: The base model's name in the ModelSpec metadata of LoRA files, without "/lora".
        kohya_version: `ss_base_model_version` as sd-scripts or musubi-tuner writes it; "" if neither trains
            this model.
        guidance_scale: Guidance scale of previews.
        no_negative_prompts: Why previews of this model cannot have a negative prompt; empty if they can.
        denoiser_name: Component of the denoiser, and prefix of its keys in diffusers' LoRA files.
        drawing: Import path of the part that draws previews.
        pipeline_options: Settings of the pipeline's constructor that differ from its defaults.
        objective: Version of the training objective. Raise it when the same recipe would train other weights;
            runs of earlier versions then keep their ids, and new runs get other ones.
        distillation: Reads from the configurations whether a base model is distilled.
        references: Reference images that the denoiser sees; None if it sees none.
        takes_guidance: Reads from the configurations whether a guidance scale is an input of the denoiser.
        require_supported: Raises FamilyError for a model of these pipeline classes that cannot be trained,
            from the contents and the path of its index.
        forces_zeros: Default of the pipeline for a model without `FORCES_ZEROS` in `model_index.json`.
    """

    name: str
    pipeline_classes: tuple[str, ...]
    components: Mapping[str, str]
    latents: LatentSpec
    text: TextSpec
    noise: NoiseSpec
    denoiser_call: str
    lora: LoraKeys
    architecture: str | Callable[[ModelFolder], str]
    guidance_scale: float
    kohya_version: str | Callable[[ModelFolder], str] = ""
    denoiser_name: Denoiser = "transformer"
    drawing: str = "inference:PipelineDrawing"
    pipeline_options: Callable[[ModelFolder], Mapping[str, Any]] = lambda model: {}
    no_negative_prompts: str | Callable[[ModelFolder], str] = ""
    objective: int | Callable[[ModelFolder], int] = 1
    distillation: Callable[[ModelFolder], Distillation | None] = lambda model: None
    references: ReferenceSpec | None = None
    takes_guidance: Callable[[ModelFolder], bool] = lambda model: False
    require_supported: Callable[[Mapping[str, Any], Path], None] = lambda contents, index: None
    forces_zeros: bool = False


class Family:
    """A base model of one family: its declaration applied to the configuration files of its folder.

    Most members return what the declaration's part has under the same name. Everything is read from
    configurations, when it is used; see `pipeline.models.worker.family` for the side that needs torch.
    """

    def __init__(self, spec: FamilySpec, model: ModelFolder) -> None:
        self.spec = spec
        self.model = model

    def mixed_precision(self, setting: str) -> str:
        """Return the precision for a recipe's `accelerate.mixed_precision`, which may be "auto"."""
        return denoiser_precision(setting, self.spec.denoiser_name)

    @property
    def no_negative_prompts(self) -> str:
        reason = self.spec.no_negative_prompts
        return reason(self.model) if callable(reason) else reason

    @property
    def denoiser_config(self) -> dict[str, Any]:
        return self.model.config(self.spec.denoiser_name)

    @property
    def scheduler_config(self) -> dict[str, Any]:
        return self.model.config("scheduler")

    def fingerprint_parts(self, use: Use) -> tuple[ModelPart, ...]:
        """Return the parts of the base model that decide the bytes of `use`, in a fixed order.

        Raises:
            ModelError: A file of them is missing.
        """
        # The order is part of fingerprints, so it must never change.
        if use == "latents":
            return (self._network_part("vae"),)
        if use == "text":
            return tuple(
                self._network_part(role)
                if is_text_encoder(role)
                else ModelPart(role, *tokenizer_files(self.model.component(role)))
                for role in self.text_roles()
            )
        scheduler = ModelPart("scheduler", (self.model.config_file("scheduler"),), ())
        return self._network_part(self.spec.denoiser_name), scheduler

    def _network_part(self, role: str) -> ModelPart:
        folder = self.model.component(role)
        return ModelPart(role, (folder / "config.json",), weight_files(folder))

    # Latents

    def size_multiple(self) -> int:
        return self.spec.latents.size_multiple(self.model)

    def latent_shape(self, target: Size) -> tuple[int, int, int]:
        return self.spec.latents.shape(self.model, target)

    def vae_compute_dtype(self, setting: str) -> str:
        """Return the dtype of the VAE for a recipe's `latents.compute_dtype`, which may be "auto"."""
        return vae_dtype(setting, self.model.config("vae"))

    @property
    def vae_factor(self) -> int:
        """Number of pixels per latent value along an edge."""
        return self.spec.latents.factor(self.model)

    # Text

    def text_roles(self) -> tuple[str, ...]:
        return self.spec.text.roles(self.model, self.spec.components)

    def text_compute_dtypes(self, setting: str) -> dict[str, str]:
        """Return the dtype of each text encoder for a recipe's `text.compute_dtype`, which may be "auto"."""
        return {
            role: text_encoder_dtype(setting, self.spec.components[role])
            for role in self.text_roles()
            if is_text_encoder(role)
        }

    def text_shapes(self) -> Shapes:
        return self.spec.text.shapes(self.model)

    @cached_property
    def token_limits(self) -> dict[str, int]:
        return self.spec.text.token_limits(self.model)

    def max_length(self) -> int:
        return self.spec.text.max_length(self.model)

    def trainable_text_encoders(self) -> Mapping[str, ClipLora]:
        return self.spec.text.trainable_encoders(self.model)

    @property
    def text_images(self) -> TextImages | None:
        references = self.spec.references
        return None if references is None else references.in_text

    def image_processor_settings(self) -> dict[str, Any]:
        return image_processor_settings(self.model.component("processor"))

    # Noise

    def prediction_type(self) -> Prediction:
        return self.spec.noise.prediction_type(self.model)

    def timestep_facts(self) -> dict[str, Any]:
        return self.spec.noise.timestep_facts(self.model)

    @property
    def loses_zero_snr(self) -> bool:
        """Whether training reads a zero terminal SNR that the model's own scheduler ignores."""
        return self.spec.noise.loses_zero_snr(self.model)

    @property
    def num_timesteps(self) -> int:
        """Timestep at which a latent is all noise."""
        return int(self.scheduler_config.get("num_train_timesteps", 1000))

    @property
    def distillation(self) -> Distillation | None:
        return self.spec.distillation(self.model)

    @property
    def takes_guidance(self) -> bool:
        return self.spec.takes_guidance(self.model)

    @property
    def objective(self) -> int:
        version = self.spec.objective
        return version(self.model) if callable(version) else version

    @property
    def forces_zeros(self) -> bool:
        """Whether the pipeline uses zeros, instead of the empty prompt, if it gets no negative prompt."""
        return bool(self.model.index.get(FORCES_ZEROS, self.spec.forces_zeros))

    @property
    def is_modular(self) -> bool:
        """Whether diffusers has the family as a modular pipeline only."""
        return self.spec.pipeline_classes[0].endswith("ModularPipeline")

    # LoRA files

    def lora_targets(self) -> list[str]:
        return self.spec.lora.targets(self.model)

    def kohya_layer(self, module: str) -> Layer:
        return self.spec.lora.kohya_layer(self.model, module)

    def comfyui_key(self, module: str) -> str:
        return self.spec.lora.comfyui_key(self.model, module)

    def kohya_loads(self) -> bool:
        return self.spec.lora.reads_kohya(self.model)

    def modelspec_architecture(self) -> str:
        architecture = self.spec.architecture
        return architecture(self.model) if callable(architecture) else architecture

    def kohya_version(self) -> str:
        version = self.spec.kohya_version
        return version(self.model) if callable(version) else version
