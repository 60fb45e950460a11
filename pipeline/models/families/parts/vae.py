"""The torch-free side of a VAE: the shape of its latents, and the sizes in pixels that a model accepts.

To support another VAE: declare its latents here, write its codec in `pipeline.models.worker.vae` (or name an
existing one in `codec`), and use both in the `latents` and `components` of a family.

Letters of shapes: C latent channels, h and w latent edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.errors import BucketError, FamilyError
from pipeline.images.geometry import Size, latent_size
from pipeline.models.diffusers_folder import ModelFolder


def configured_patch(model: ModelFolder) -> int:
    """Return `patch_size` of the transformer's configuration, 1 if there is none."""
    return int(model.config("transformer").get("patch_size") or 1)


def frame_patch(model: ModelFolder) -> int:
    """Return the edge of a patch of one frame, from a video transformer's `patch_size`.

    Raises:
        FamilyError: A patch has several frames, or is not square.
    """
    frames, height, width = model.config("transformer")["patch_size"]
    if frames != 1 or height != width:
        raise FamilyError(
            f"patch_size must be 1 frame and a square, got {[frames, height, width]}",
            where=str(model.config_file("transformer")),
            fix="use a model that was trained for images",
        )
    return int(height)


@dataclass(frozen=True)
class LatentSpec:
    """Latents of an `AutoencoderKL`.

    Attributes:
        method: Name of the way from pixels to latents, part of each latent's key. Change it when the latents
            change.
        codec: Import path of the VAE codec below `pipeline.models.worker`.
        patch: Edge, in latent values, of the patch that the denoiser reads as one token.
        max_patches: Longest edge in patches that the denoiser has positions for; None if unlimited.
        uses_shift: Whether the family's pipelines apply the VAE's `shift_factor`.
    """

    method: str
    codec: str = "vae:KLCodec"
    patch: int | Callable[[ModelFolder], int] = configured_patch
    max_patches: Callable[[ModelFolder], int] | None = None
    uses_shift: bool = True

    def method_of(self, model: ModelFolder) -> str:
        """Return `method`, or another name if this model's VAE requires different arithmetic."""
        return self.method

    def factor(self, model: ModelFolder) -> int:
        """Return the number of pixels per latent value along an edge."""
        return 2 ** (len(model.config("vae")["block_out_channels"]) - 1)

    def channels(self, model: ModelFolder) -> int:
        """Return the number of channels of the VAE's latents."""
        return int(model.config("vae")["latent_channels"])

    def patch_of(self, model: ModelFolder) -> int:
        """Return `patch` for this model."""
        return self.patch if isinstance(self.patch, int) else self.patch(model)

    def size_multiple(self, model: ModelFolder) -> int:
        """Return the number of pixels that both edges of a target size must be multiples of."""
        return self.factor(model) * self.patch_of(model)

    def shape(self, model: ModelFolder, target: Size) -> tuple[int, int, int]:
        """Return (C, h, w) of the latent of one image of `target` size in pixels.

        Raises:
            BucketError: An edge is not a multiple of the VAE's factor, or longer than `max_patches` allows.
        """
        if self.max_patches is not None:
            max_px = self.max_patches(model) * self.size_multiple(model)
            if max(target) > max_px:
                raise BucketError(
                    f"target size {target.height}x{target.width} (height x width) is too large for this "
                    "base model",
                    where="buckets.resolution",
                    fix=f"lower it, or narrow the aspect ratios: no edge may be longer than {max_px} px",
                )
        edges = latent_size(target, self.factor(model))
        return self.channels(model), edges.height, edges.width

    def num_tokens(self, model: ModelFolder, latent_shape: tuple[int, int, int]) -> int:
        """Return the number of image tokens that the denoiser sees of a latent (C, h, w)."""
        patch = self.patch_of(model)
        return (latent_shape[1] // patch) * (latent_shape[2] // patch)


@dataclass(frozen=True)
class ChannelScaledLatents(LatentSpec):
    """Latents of an `AutoencoderKL`; its configuration may have a mean and deviation for each channel."""

    codec: str = "vae:ChannelScaledCodec"

    def method_of(self, model: ModelFolder) -> str:
        # Playground 2.5's VAE has channel statistics.
        return self.method if self.statistics(model) is None else "autoencoder-kl by channel scaled, 1"

    def statistics(self, model: ModelFolder) -> tuple[list[float], list[float]] | None:
        """Return mean and deviation of each channel of raw latents, or None unless both are configured."""
        mean, std = (model.config("vae").get(name) for name in ("latents_mean", "latents_std"))
        return None if mean is None or std is None else (mean, std)


@dataclass(frozen=True)
class QwenImageLatents(LatentSpec):
    """Latents of one frame of `AutoencoderKLQwenImage`."""

    codec: str = "vae:FrameCodec"

    def factor(self, model: ModelFolder) -> int:
        # Each level of the VAE halves the edges.
        return 2 ** len(model.config("vae")["temperal_downsample"])

    def channels(self, model: ModelFolder) -> int:
        return int(model.config("vae")["z_dim"])


@dataclass(frozen=True)
class WanLatents(QwenImageLatents):
    """Latents of one frame of `AutoencoderKLWan`."""

    def factor(self, model: ModelFolder) -> int:
        # Configurations that were written before diffusers had this key have its default.
        return int(model.config("vae").get("scale_factor_spatial", 8))


@dataclass(frozen=True)
class DeepCompressionLatents(LatentSpec):
    """Latents of `AutoencoderDC`."""

    codec: str = "vae:DeepCompressionCodec"

    def factor(self, model: ModelFolder) -> int:
        # Each level of the encoder but the first halves the edges.
        return 2 ** (len(model.config("vae")["encoder_block_out_channels"]) - 1)


@dataclass(frozen=True)
class PatchedLatents(LatentSpec):
    """Latents of `AutoencoderKLFlux2`, stored in patches with values that are normalised one by one.

    Attributes:
        channels_last: Whether the values of a patch are ordered position first and channel last.
        variance_floor: Number added to each variance; None uses the VAE's `batch_norm_eps`.
    """

    codec: str = "vae:PatchedCodec"
    patch: int | Callable[[ModelFolder], int] = 2
    channels_last: bool = False
    variance_floor: float | None = None

    def shape(self, model: ModelFolder, target: Size) -> tuple[int, int, int]:
        # (4 C, h / 2, w / 2), the shape in patches.
        channels, height, width = super().shape(model, target)
        patch = self.patch_of(model)
        return channels * patch**2, height // patch, width // patch

    def num_tokens(self, model: ModelFolder, latent_shape: tuple[int, int, int]) -> int:
        # A position of a stored latent is a patch already.
        return latent_shape[1] * latent_shape[2]
