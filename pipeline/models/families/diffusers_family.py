"""What every family does the same way because diffusers does: reading, loading, encoding, drawing.

A family file below it says which classes, and hands the tensors over.
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pipeline.images.geometry import Size, latent_size
from pipeline.models.diffusers_folder import read_json, tokenizer_files, weight_files, weight_variant
from pipeline.models.families.base import EncodedCaption, Family, Posterior, Use
from pipeline.models.fingerprints import ModelPart

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

_CAPTION = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for a caption, to see where one begins among the words that a family puts around it."""


class DiffusersFamily(Family):
    """A family whose parts are classes of diffusers and transformers, and whose VAE is an `AutoencoderKL`."""

    guidance_scale: ClassVar[float]
    """Of the pictures that are drawn while training."""

    adds_marks: ClassVar[bool] = True
    """Whether the pipeline's tokenizers put start and end marks around `tokenized`: no, if it has them."""

    @cached_property
    def index(self) -> dict[str, Any]:
        """The folder's `model_index.json`."""
        return read_json(self.folder / "model_index.json")

    @cached_property
    def vae_config(self) -> dict[str, Any]:
        """The VAE's configuration."""
        return self.config("vae")

    @cached_property
    def denoiser_config(self) -> dict[str, Any]:
        """The denoiser's configuration."""
        return self.config(self.denoiser_name)

    @cached_property
    def scheduler_config(self) -> dict[str, Any]:
        """The noise schedule's configuration."""
        return read_json(self.place("scheduler") / "scheduler_config.json")

    def config(self, role: str) -> dict[str, Any]:
        """`config.json` of a component."""
        return read_json(self.place(role) / "config.json")

    def has(self, role: str) -> bool:
        """Whether the model has the component; an optional one may be [null, null] in its index."""
        return role in self.elsewhere or (self.index.get(role) or [None])[0] is not None

    def text_roles(self) -> tuple[str, ...]:
        """Tokenizers and text encoders that the base model has, in the order of `components`."""
        return tuple(
            role
            for role in self.components
            if role.startswith(("tokenizer", "text_encoder")) and self.has(role)
        )

    @property
    def factor(self) -> int:
        """Pixels on the edge of one latent value."""
        return 2 ** (len(self.vae_config["block_out_channels"]) - 1)

    @property
    def latent_channels(self) -> int:
        """Of the VAE."""
        return int(self.vae_config["latent_channels"])

    def size_multiple(self) -> int:
        """The VAE's factor times the edge of the denoiser's patches, in latent values."""
        return self.factor * int(self.denoiser_config.get("patch_size") or 1)

    def latent_shape(self, target: Size) -> tuple[int, int, int]:
        """(C, h, w), each edge divided by the VAE's factor."""
        edges = latent_size(target, self.factor)
        return self.latent_channels, edges.height, edges.width

    @abstractmethod
    def token_limits(self) -> dict[str, int]:
        """Tokenizer to the number of tokens that its encoder takes, start and end marks included."""

    def max_length(self) -> int:
        """Tokens of the encoder that takes most."""
        return max(self.token_limits().values())

    def tokenizer_limit(self, role: str) -> int:
        """`model_max_length` of a tokenizer: what diffusers pads CLIP's captions to."""
        if role not in self._tokenizer_limits:
            config = read_json(self.place(role) / "tokenizer_config.json")
            self._tokenizer_limits[role] = int(config["model_max_length"])
        return self._tokenizer_limits[role]

    @cached_property
    def _tokenizer_limits(self) -> dict[str, int]:
        """Of the tokenizers that were asked for: each caption asks."""
        return {}

    def parts(self, use: Use) -> tuple[ModelPart, ...]:
        """VAE for latents; tokenizers and text encoders for text; denoiser and schedule for the denoiser."""
        if use == "latents":
            return (self._network("vae"),)
        if use == "text":
            return tuple(
                self._network(role)
                if role.startswith("text_encoder")
                else ModelPart(role, *tokenizer_files(self.place(role)))
                for role in self.text_roles()
            )
        scheduler = self.place("scheduler") / "scheduler_config.json"
        return self._network(self.denoiser_name), ModelPart("scheduler", (scheduler,), ())

    def _network(self, role: str) -> ModelPart:
        folder = self.place(role)
        return ModelPart(role, (folder / "config.json",), weight_files(folder))

    # torch side

    @cached_property
    def vae(self) -> Any:
        """The VAE codec."""
        return SimpleNamespace(
            load=self.load_vae,
            posterior=self.posterior,
            normalise=self.normalise,
            denormalise=self.denormalise,
            decode=self.decode,
        )

    @cached_property
    def text(self) -> Any:
        """The text conditioner."""
        return SimpleNamespace(
            load=self.load_text_encoders,
            encode_caption=self.encode_caption,
            stack=self.stack_texts,
            network=self.text_network,
            embed_captions=self.embed_captions,
        )

    @cached_property
    def denoiser(self) -> Any:
        """The denoiser call."""
        return SimpleNamespace(
            load=self.load_denoiser,
            predict=self.predict,
            recompute_activations=self.recompute_activations,
        )

    @cached_property
    def noise(self) -> Any:
        """The noise process."""
        return SimpleNamespace(
            load_scheduler=self.load_noise_scheduler,
            timesteps=self.timesteps,
            signal_to_noise=self.signal_to_noise,
            add_noise=self.add_noise,
            target=self.target,
        )

    @cached_property
    def drawing(self) -> Any:
        """The part that draws previews."""
        return SimpleNamespace(load_pipeline=self.load_pipeline, draw=self.draw)

    def pipeline_options(self) -> dict[str, Any]:
        """Settings of the pipeline class's constructor that are not its defaults."""
        return {}

    def pipeline_class(self) -> Any:
        """The family's pipeline in diffusers."""
        return getattr(importlib.import_module("diffusers"), self.pipeline_classes[0])

    def load_vae(self, dtype: str, device: str) -> nn.Module:
        """An instance of the class that `components` names."""
        return self.load_component("vae", dtype, device)

    def posterior(self, vae: nn.Module, pixels: Tensor) -> Posterior:
        """`AutoencoderKL.encode`, with the deviation computed in float32."""
        import torch

        parameter = next(vae.parameters())
        with torch.inference_mode():
            encoded = cast("Any", vae).encode(pixels.to(parameter.device, parameter.dtype)).latent_dist
            return Posterior(encoded.mean.float(), torch.exp(0.5 * encoded.logvar.float()))

    def normalise(self, raw_latent: Tensor) -> Tensor:
        """(raw_latent - shift) * scaling, as the VAE's configuration or else its class has them."""
        shift = float(self.vae_config.get("shift_factor") or 0.0)
        scale = float(self.vae_config.get("scaling_factor", 0.18215))
        return (raw_latent - shift) * scale if shift else raw_latent * scale

    def denormalise(self, latent: Tensor) -> Tensor:
        """The inverse: latent / scaling + shift."""
        shift = float(self.vae_config.get("shift_factor") or 0.0)
        return latent / float(self.vae_config.get("scaling_factor", 0.18215)) + shift

    def decode(self, vae: nn.Module, latent: Tensor) -> Tensor:
        """`AutoencoderKL.decode` of the raw latent, which is computed in float32."""
        import torch

        parameter = next(vae.parameters())
        with torch.inference_mode():
            raw = self.denormalise(latent.float()).to(parameter.device, parameter.dtype)
            return cast("Any", vae).decode(raw, return_dict=False)[0].float()

    def load_text_encoders(self, dtype: str, device: str) -> Any:
        """The family's diffusers pipeline with tokenizers and text encoders only."""
        loaded: dict[str, Any] = dict.fromkeys(_component_names(self.pipeline_class()))
        for role in self.text_roles():
            if role.startswith("tokenizer"):
                folder = self.place(role)
                loaded[role] = self.class_of(role).from_pretrained(folder, local_files_only=True)
            else:
                loaded[role] = self.load_component(role, dtype, device)
        return self.pipeline_class()(**{**loaded, **self.pipeline_options()})

    @abstractmethod
    def embed(self, encoders: Any, caption: str) -> dict[str, Tensor]:
        """An entry's tensors with a batch of one in front, by the pipeline's `encode_prompt`."""

    def encode_caption(self, encoders: Any, caption: str) -> EncodedCaption:
        """`embed`; what is cut is counted by the tokenizers, unlimited."""
        import torch

        counts = [self.count_tokens(encoders, role, caption) for role in self.token_limits()]
        num_tokens, num_cut, cut_from = max(counts, key=lambda count: _reach(count[2]))
        with torch.inference_mode():
            tensors = {name: tensor[0] for name, tensor in self.embed(encoders, caption).items()}
        return EncodedCaption(tensors, num_tokens, num_cut, cut_from)

    def stack_texts(self, texts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """One beside the other: all are of one shape."""
        import torch

        return {name: torch.stack([text[name] for text in texts]) for name in texts[0]}

    def text_network(self, encoders: Any, role: str) -> nn.Module:
        """The component of the pipeline."""
        return getattr(encoders, role)

    def embed_captions(self, encoders: Any, captions: Sequence[str]) -> dict[str, Tensor]:
        """`embed` of one after the other."""
        each = [self.embed(encoders, caption) for caption in captions]
        return self.stack_texts([{name: tensor[0] for name, tensor in tensors.items()} for tensors in each])

    def tokenized(self, encoders: Any, caption: str) -> str:
        """The text, with the caption in it, that the pipeline `encoders` gives its tokenizer."""
        return caption

    def limit_of(self, encoders: Any, role: str) -> int:
        """Tokens of `tokenized` that a tokenizer's encoder takes."""
        return self.token_limits()[role]

    def count_tokens(self, encoders: Any, role: str, caption: str) -> tuple[int, int, int | None]:
        """(tokens of the caption, how many are beyond the limit, index of the first character that is)."""
        text, limit = self.tokenized(encoders, caption), self.limit_of(encoders, role)
        whole = getattr(encoders, role)(
            text,
            add_special_tokens=self.adds_marks,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        num_tokens = len(whole["input_ids"])
        if num_tokens <= limit:
            return num_tokens, 0, None
        first = limit - whole["special_tokens_mask"][-1]  # an end mark is kept, and takes a place
        offset = whole["offset_mapping"][first][0] - self.tokenized(encoders, _CAPTION).index(_CAPTION)
        return num_tokens, num_tokens - limit, min(max(offset, 0), len(caption))

    def load_denoiser(self, dtype: str, device: str, *, quantization: Any = None) -> nn.Module:
        """An instance of the class that `components` names."""
        if quantization is None:
            return self.load_component(self.denoiser_name, dtype, device)
        packing = {"quantization_config": quantization}
        if quantization.quant_method.value == "torchao":  # packs nothing of what is mapped to the CPU
            return self._read(self.denoiser_name, dtype, **packing).to(device)
        # bitsandbytes packs what is mapped to a GPU, and cannot be moved afterwards.
        return self._read(self.denoiser_name, dtype, **packing, device_map={"": device})

    def recompute_activations(self, denoiser: nn.Module) -> None:
        """Diffusers' gradient checkpointing."""
        cast("Any", denoiser).enable_gradient_checkpointing()

    def load_noise_scheduler(self) -> Any:
        """The class that `components` names, with the configuration of the base model's scheduler."""
        return self.class_of("scheduler").from_pretrained(
            self.folder, subfolder="scheduler", local_files_only=True
        )

    def load_pipeline(self, *, denoiser: nn.Module | None = None, dtype: str, device: str) -> Any:
        """The family's diffusers pipeline with the base model's own scheduler.

        The VAE draws in `dtype` whatever the autocast around it, in which SDXL's would overflow to black.
        """
        pipeline_class = self.pipeline_class()
        loaded: dict[str, Any] = dict.fromkeys(_component_names(pipeline_class))
        del loaded["scheduler"]
        loaded["vae"] = self.vae.load(dtype, device)
        loaded[self.denoiser_name] = denoiser if denoiser is not None else self.load_denoiser(dtype, device)
        pipeline = pipeline_class.from_pretrained(
            self.folder, **{**loaded, **self.pipeline_options()}, local_files_only=True
        )
        pipeline.set_progress_bar_config(disable=True)
        _decode_as_loaded(loaded["vae"])
        return pipeline

    @abstractmethod
    def prompt_arguments(
        self, pipeline: Any, text: Mapping[str, Tensor], empty_text: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """What the pipeline is called with in place of a prompt and a negative prompt.

        Args:
            pipeline: From `load_pipeline`.
            text: The caption's conditions, a batch of one, on the denoiser's device, in its dtype.
            empty_text: The empty caption's; as long as the caption's.
        """

    def allow_size(self, pipeline: Any, size: Size) -> None:
        """Let the pipeline draw in that very size; most do without being told."""

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
        """A picture with the family's `guidance_scale`."""
        import torch

        parameter = unpacked_weight(getattr(pipeline, self.denoiser_name))
        both = self.stack_texts([text, empty_text])
        prompt, negative = (
            {name: tensor[at : at + 1].to(parameter.device, parameter.dtype) for name, tensor in both.items()}
            for at in (0, 1)
        )
        self.allow_size(pipeline, size)
        pictures, *_ = pipeline(
            **self.prompt_arguments(pipeline, prompt, negative),
            height=size.height,
            width=size.width,
            num_inference_steps=steps,
            guidance_scale=self.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(seed),
            return_dict=False,
        )
        return pictures[0]

    def class_of(self, role: str) -> Any:
        """The class that `components` names."""
        library, _, name = self.components[role].rpartition(".")
        return getattr(importlib.import_module(library), name)

    def load_component(self, role: str, dtype: str, device: str) -> nn.Module:
        """A network of `components`, frozen, in evaluation mode."""
        return self._read(role, dtype).to(device)

    def _read(self, role: str, dtype: str, **options: Any) -> nn.Module:
        import torch

        place = self.place(role)
        options |= {"variant": weight_variant(place), "dtype": getattr(torch, dtype)}
        loaded = self.class_of(role).from_pretrained(place, local_files_only=True, **options)
        return loaded.requires_grad_(False).eval()


def unpacked_weight(network: nn.Module) -> nn.Parameter:
    """A weight in whose number format the network computes: packed ones are bytes."""
    return next(weight for weight in network.parameters() if weight.is_floating_point())


def _decode_as_loaded(vae: nn.Module) -> None:
    """Let `vae.decode` take latents of any number format, and heed no autocast.

    The VAE is not held by it: it would hold itself, and stay in memory after its last use.
    """
    import torch

    decode, held = cast("Any", type(vae)).decode, weakref.ref(vae)

    def decode_so(latent: Tensor, *arguments: Any, **options: Any) -> Any:
        network = cast("nn.Module", held())
        weight = unpacked_weight(network)
        with torch.autocast(weight.device.type, enabled=False):
            return decode(network, latent.to(weight.dtype), *arguments, **options)

    cast("Any", vae).decode = decode_so


def _component_names(pipeline_class: Any) -> list[str]:
    """Arguments of a pipeline's constructor that are components: without a default, or with None."""
    parameters = inspect.signature(pipeline_class.__init__).parameters
    empty = inspect.Parameter.empty
    return [
        name
        for name, parameter in parameters.items()
        if name != "self" and (parameter.default is empty or parameter.default is None)
    ]


def _reach(cut_from: int | None) -> float:
    return float("inf") if cut_from is None else cut_from
