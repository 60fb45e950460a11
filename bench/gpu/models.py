"""Base models with random weights: full-size models drawn on the GPU, or the tiny models of the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.published import FLUX, SDXL, Config
from demo.tiny_models import make_tiny_flux, make_tiny_sdxl
from demo.tiny_models.parts import assemble, write_clip_tokenizer, write_t5_tokenizer

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn

Network = tuple[str, str, Config]
"""Library, class and configuration."""


@dataclass(frozen=True)
class BaseModel:
    """A base model for measurements.

    Attributes:
        name: Name used in figures.
        tiny: Function that writes a tiny model of about a million weights into a folder.
        networks: Networks of the full-size model by component.
        pipeline: Class name of its diffusers pipeline.
        scheduler: Class name and configuration of the scheduler.
        second_tokenizer: Function that writes the second text encoder's tokenizer.
        batch_size: Training batch size at 1024 px.
        training: Additional recipe settings of `training` for this model.
        dtype: Dtype of latents and text embeddings in the store.
    """

    name: str
    tiny: Callable[[Path], None]
    networks: Mapping[str, Network]
    pipeline: str
    scheduler: tuple[str, Config]
    second_tokenizer: Callable[[Path], str]
    batch_size: int
    dtype: str
    training: Config = field(default_factory=dict[str, Any])

    def write(self, folder: Path, device: str) -> None:
        """Write the full-size model as a bfloat16 diffusers folder, with weights drawn on `device`."""
        import diffusers

        kind, config = self.scheduler
        makers: dict[str, Callable[[], Any]] = {
            role: partial(random_network, *network, device=device) for role, network in self.networks.items()
        }
        makers["scheduler"] = partial(getattr(diffusers, kind), **config)
        absent = {role: [None, None] for role in ("feature_extractor", "image_encoder")}
        tokenizers = {"tokenizer": write_clip_tokenizer, "tokenizer_2": self.second_tokenizer}
        index = {**absent, **({"force_zeros_for_empty_prompt": True} if self.name == "SDXL" else {})}
        assemble(folder, self.pipeline, makers, tokenizers=tokenizers, seed=0, index=index)


MODELS = (
    BaseModel(
        name="SDXL",
        tiny=make_tiny_sdxl,
        networks={
            "vae": ("diffusers", "AutoencoderKL", SDXL["vae"]),
            "text_encoder": ("transformers", "CLIPTextModel", SDXL["text_encoder"]),
            "text_encoder_2": ("transformers", "CLIPTextModelWithProjection", SDXL["text_encoder_2"]),
            "unet": ("diffusers", "UNet2DConditionModel", SDXL["unet"]),
        },
        pipeline="StableDiffusionXLPipeline",
        scheduler=("EulerDiscreteScheduler", SDXL["scheduler"]),
        second_tokenizer=write_clip_tokenizer,
        batch_size=4,
        dtype="float16",
    ),
    BaseModel(
        name="FLUX.1",
        tiny=make_tiny_flux,
        networks={
            "vae": ("diffusers", "AutoencoderKL", FLUX["vae"]),
            "text_encoder": ("transformers", "CLIPTextModel", FLUX["text_encoder"]),
            "text_encoder_2": ("transformers", "T5EncoderModel", FLUX["text_encoder_2"]),
            "transformer": ("diffusers", "FluxTransformer2DModel", FLUX["transformer"]),
        },
        pipeline="FluxPipeline",
        scheduler=("FlowMatchEulerDiscreteScheduler", FLUX["scheduler"]),
        second_tokenizer=write_t5_tokenizer,
        batch_size=1,
        dtype="bfloat16",
        training={"gradient_checkpointing": True},
    ),
)


def random_network(library: str, kind: str, config: Config, *, device: str) -> nn.Module:
    """Return a bfloat16 network with random weights, created directly on `device`. See `fill`."""
    network = empty_network(library, kind, config).to_empty(device=device)
    fill(network)
    return network


def empty_network(library: str, kind: str, config: Config) -> nn.Module:
    """Return the bfloat16 network on the meta device, which has shapes but uses no memory."""
    import torch

    with torch.device("meta"), _default_dtype(torch.bfloat16):
        if library == "diffusers":
            import diffusers

            return getattr(diffusers, kind)(**config)
        import transformers

        described = {"T5EncoderModel": "T5Config"}.get(kind, "CLIPTextConfig")
        return getattr(transformers, kind)(getattr(transformers, described)(**config))


def fill(network: nn.Module) -> None:
    """Draw weights of variance 1 / inputs, ones for norms, and zeros for biases; activations stay near 1."""
    import torch

    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight[0].numel() ** -0.5)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)


@contextmanager
def _default_dtype(dtype: Any) -> Generator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
