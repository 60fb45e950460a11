"""What the rest of Latentline asks of a model family: a subclass says all that is particular to one.

Letters of shapes: B samples, T tokens, D embedding width, C latent channels, h and w latent edges, H and W
pixel edges. Importing this module imports no torch: methods that need it import it when they are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pipeline.images.geometry import Size
from pipeline.models.families.clip_text import TrainableClip
from pipeline.models.fingerprints import ModelPart

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

Use = Literal["latents", "text", "denoiser"]
"""What a part of the base model decides: latents, text embeddings, or the training itself."""

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Tensor name to shape, of one sample."""

Conditions: TypeAlias = "Mapping[str, Tensor]"
"""What the denoiser is told beside the latent: `text_embedding` (B, T, D), where the family has one
`pooled_text_embedding` (B, D) or `text_mask` (B, T), and of every family `original_size_hw`, `crop_top_left`
and `target_size_hw`, each an int tensor (B, 2); a family takes what it needs."""

BetaPrediction = Literal["epsilon", "v_prediction"]
"""The noise, or the velocity of https://arxiv.org/abs/2202.00512, under a table of betas."""

Prediction = Literal[BetaPrediction, "flow"]
"""What the denoiser predicts; a flow is noise minus latent: https://arxiv.org/abs/2210.02747."""

Density = Literal["uniform", "logit_normal", "mode"]
"""How training spreads its draws over noise levels from 0, no noise, to 1, noise alone."""

TextPadding = Literal["stored", "zeros", "masked"]
"""What the denoiser sees beside a caption's own tokens, where it takes as many tokens of every caption:

"stored": the encoders' answer to padding, which nothing hides: entries have it, all are of one length.
"zeros": zeros; an entry has the caption's own tokens alone.
"masked": nothing, since `text_mask` hides it; an entry has the caption's own tokens alone.
"""

Denoiser = Literal["unet", "transformer"]
"""Component of the diffusers pipeline that training adapts."""


@dataclass(frozen=True)
class Posterior:
    """The VAE's answer: a diagonal Gaussian over raw latents, both float32 of shape (B, C, h, w)."""

    mean: Tensor
    std: Tensor


@dataclass(frozen=True)
class EncodedCaption:
    """One caption as the denoiser sees it.

    Counts are those of the encoder that reads furthest: what is cut, no encoder sees.

    Attributes:
        tensors: As an entry has them, by the names of `Family.text_shapes`, in the encoders' dtype.
        num_tokens: Tokens of the whole caption, start and end marks included, padding not.
        num_cut: How many of those the encoder cannot take; 0 when the caption fits.
        cut_from: Index of the caption's first character that is cut; None when it fits.
    """

    tensors: dict[str, Tensor]
    num_tokens: int
    num_cut: int
    cut_from: int | None


@dataclass(frozen=True)
class Layer:
    """A linear layer of a LoRA file's layout, made of one module of the denoiser or of several.

    Attributes:
        key: In the file, without `.lora_down.weight` and the like.
        modules: Dotted paths in the diffusers denoiser, whose outputs lie one after the other in the layer's;
            query, key and value of one attention, say. All take the same input.
    """

    key: str
    modules: tuple[str, ...]


class Family(ABC):
    """A base model of one family, in a local diffusers folder.

    Methods above the line "torch side" read only configurations; those below import torch and diffusers.
    A `dtype` is "float16", "bfloat16" or "float32"; a `device` is what `torch.device` takes.
    """

    name: ClassVar[str]
    """As users read it."""

    pipeline_classes: ClassVar[tuple[str, ...]]
    """Values of `_class_name` in `model_index.json` that belong to the family."""

    components: ClassVar[Mapping[str, str]]
    """Subfolders that are used, each with its class as `library.Class`; no other is downloaded or loaded."""

    latent_method: ClassVar[str]
    """Names how pixels become latents: a new name when the result changes. See `method_of_latents`."""

    text_method: ClassVar[str]
    """Names how captions become embeddings. Part of each text key: a new name when the result changes."""

    text_padding: ClassVar[TextPadding] = "stored"
    """Decides whether captions' entries are of one length, or each of its own."""

    density: ClassVar[Density]
    """Of the noise levels that training draws, where the recipe names none."""

    trains_text_encoders: ClassVar[bool] = False
    """Whether a LoRA may adapt the text encoders."""

    denoiser_name: ClassVar[Denoiser]
    """The denoiser's component: a subfolder, and the prefix of its keys in diffusers' LoRA files."""

    def __init__(self, folder: Path, elsewhere: Mapping[str, Path] | None = None) -> None:
        """Remember where the model lies; nothing is read yet.

        Args:
            folder: Holds `model_index.json` and a subfolder for each component.
            elsewhere: Folders of the components that are not taken from there.
        """
        self.folder = folder
        self.elsewhere = dict(elsewhere or {})

    def place(self, role: str) -> Path:
        """The folder of a component, whether or not it exists."""
        return self.elsewhere.get(role, self.folder / role)

    @abstractmethod
    def size_multiple(self) -> int:
        """Pixels: target sizes must be multiples of it in both directions."""

    @abstractmethod
    def latent_shape(self, target: Size) -> tuple[int, int, int]:
        """(C, h, w) of the latent of one image of `target` size in pixels."""

    def method_of_latents(self) -> str:
        """`latent_method`, or another name where this very VAE asks for more. Part of each latent's key."""
        return self.latent_method

    @abstractmethod
    def text_shapes(self) -> Shapes:
        """Of one caption: `text_embedding` (T, D); `pooled_text_embedding` (D,) where the family has one.

        Unless `text_padding` is "stored", T is the most that a `text_embedding` may have; the least is 1.
        """

    @abstractmethod
    def max_length(self) -> int:
        """T: tokens that the encoders take, start and end marks included."""

    @abstractmethod
    def prediction_type(self) -> Prediction:
        """What the denoiser predicts, as the scheduler's configuration says."""

    @abstractmethod
    def timestep_facts(self) -> dict[str, Any]:
        """All that decides what `timesteps` makes of its arguments, JSON-serialisable."""

    @abstractmethod
    def parts(self, use: Use) -> tuple[ModelPart, ...]:
        """The parts of the base model that decide the bytes of `use`, in a fixed order.

        Raises:
            ModelError: A file of them is missing.
        """

    @abstractmethod
    def kohya_layer(self, module: str) -> Layer:
        """The layer of kohya's LoRA files that the denoiser's module is, or is a part of.

        Args:
            module: Dotted path in the diffusers denoiser, such as `mid_block.attentions.0.proj_in`.

        Raises:
            FamilyError: The module has no name there.
        """

    def kohya_loads(self) -> bool:
        """Whether diffusers' loader of the family reads kohya's layout of this very denoiser."""
        return True

    @abstractmethod
    def comfyui_key(self, module: str) -> str:
        """The key, without `.lora_down.weight` and the like, under which ComfyUI looks for the module.

        Raises:
            FamilyError: The module has no such name.
        """

    @abstractmethod
    def lora_targets(self) -> list[str]:
        """Endings of the modules that get an adapter, for `peft.LoraConfig.target_modules`."""

    def trainable_text_encoders(self) -> Mapping[str, TrainableClip]:
        """The text encoders that may get adapters, by component: those whose LoRA diffusers' loader takes."""
        return {}

    @abstractmethod
    def modelspec_architecture(self) -> str:
        """The base model's name in the ModelSpec metadata of LoRA files, without "/lora"."""

    # torch side

    @abstractmethod
    def load_vae(self, dtype: str, device: str) -> nn.Module:
        """The VAE, frozen, in evaluation mode."""

    @abstractmethod
    def posterior(self, vae: nn.Module, pixels: Tensor) -> Posterior:
        """The raw latents of `pixels`.

        Args:
            vae: From `load_vae`.
            pixels: Float tensor (B, 3, H, W) in [-1, 1], on any device; moved to the VAE's device and dtype.
        """

    @abstractmethod
    def normalise(self, raw_latent: Tensor) -> Tensor:
        """The latent: `raw_latent` (B, C, h, w) after the VAE's shift and scaling, about unit variance."""

    @abstractmethod
    def denormalise(self, latent: Tensor) -> Tensor:
        """The raw latent of which `normalise` makes `latent`."""

    @abstractmethod
    def decode(self, vae: nn.Module, latent: Tensor) -> Tensor:
        """The picture of a latent, as the end of the family's diffusers pipeline draws it.

        Args:
            vae: From `load_vae`.
            latent: As `normalise` makes it, on any device; moved to the VAE's device and dtype.

        Returns:
            Float32 (B, 3, H, W) on the VAE's device, about -1 to 1 and not cut off there.
        """

    @abstractmethod
    def load_text_encoders(self, dtype: str, device: str) -> Any:
        """Tokenizers and encoders, frozen; what `encode_caption` takes, and opaque to everyone else."""

    @abstractmethod
    def encode_caption(self, encoders: Any, caption: str) -> EncodedCaption:
        """What the family's diffusers pipeline makes of one prompt."""

    @abstractmethod
    def stack_texts(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The text conditions of a batch, of what each sample's entry has, in its dtype.

        Captions of different lengths are padded as `text_padding` says: to the batch's longest with
        `text_mask` (B, T) beside them, 1 where there is a token, or to the length that the denoiser knows.
        """

    @abstractmethod
    def text_network(self, encoders: Any, role: str) -> nn.Module:
        """One of `trainable_text_encoders`, of what `load_text_encoders` gave: the very network it asks."""

    @abstractmethod
    def embed_captions(self, encoders: Any, captions: Sequence[str]) -> dict[str, Tensor]:
        """The text conditions of a batch of captions, as of `stack_texts`, with their graph.

        Of each caption they are what `encode_caption` gives, but for the arithmetic of a larger batch.
        """

    @abstractmethod
    def load_denoiser(self, dtype: str, device: str, *, quantization: Any = None) -> nn.Module:
        """The network that training adapts, frozen, in evaluation mode.

        Args:
            dtype: Of its weights, and of what is multiplied with packed ones.
            device: Where it lies.
            quantization: diffusers' config of how weights are packed; None: they are not.
        """

    @abstractmethod
    def recompute_activations(self, denoiser: nn.Module) -> None:
        """Let the denoiser's backward pass compute activations again: less memory, the same gradients.

        Raises:
            ValueError: The denoiser's class cannot.
        """

    @abstractmethod
    def load_noise_scheduler(self) -> Any:
        """A training scheduler with the base model's noise schedule."""

    @abstractmethod
    def timesteps(self, scheduler: Any, levels: Tensor, latent_shape: tuple[int, int, int]) -> Tensor:
        """The timesteps (B,) of noise levels `levels` (B,), float64 in [0, 1): later ones for higher levels.

        Args:
            scheduler: From `load_noise_scheduler`.
            levels: Drawn with some density, see `density`.
            latent_shape: (C, h, w) of the samples: some families give larger images more noise.
        """

    @abstractmethod
    def signal_to_noise(self, scheduler: Any, timesteps: Tensor) -> Tensor:
        """Ratio (B,) of the variances of signal and noise in the noisy latent at `timesteps` (B,)."""

    @abstractmethod
    def add_noise(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """The noisy latent (B, C, h, w) at `timesteps` (B,)."""

    @abstractmethod
    def target(self, scheduler: Any, latent: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """What `predict` should return, (B, C, h, w): the loss compares the two."""

    @abstractmethod
    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditions: Conditions
    ) -> Tensor:
        """The denoiser's answer (B, C, h, w) to `noisy` (B, C, h, w) at `timesteps` (B,)."""

    @abstractmethod
    def load_pipeline(self, *, denoiser: nn.Module | None = None, dtype: str, device: str) -> Any:
        """The diffusers pipeline without its text encoders, for `draw`; silent, without a safety checker.

        Args:
            denoiser: Used as it is, adapter and all; None loads the base model's own.
            dtype: Of what is loaded.
            device: Where it draws.
        """

    @abstractmethod
    def draw(
        self,
        pipeline: Any,
        text: Mapping[str, Tensor],
        empty_text: Mapping[str, Tensor],
        *,
        size: Size,
        steps: int,
        seed: int,
    ) -> Image.Image:
        """One picture of `size` pixels for one caption's tensors; the same for the same seed on one device.

        Args:
            pipeline: From `load_pipeline`.
            text: The caption's tensors, as its entry has them.
            empty_text: The empty caption's, for guidance.
            size: Multiples of `size_multiple`.
            steps: Denoising steps, at least 1.
            seed: Of the first noise, drawn on the CPU.
        """
