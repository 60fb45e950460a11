"""Latents of `AutoencoderKLQwenImage`: 16 channels, in patches for the transformer."""

from __future__ import annotations

from pipeline.models.families.frame_latents import FrameLatents

PATCH = 2
"""Edge, in latent values, of what is packed into one token."""


class QwenLatents(FrameLatents):
    """A flow transformer, told by a language model, whose tokens are patches of Qwen-Image's latents."""

    latent_method = "autoencoder-kl-qwen-image normalised, 1"

    @property
    def factor(self) -> int:
        """Two for each level of the VAE."""
        return 2 ** len(self.vae_config["temperal_downsample"])

    def size_multiple(self) -> int:
        """The VAE's factor times the edge of what is packed into a token: 16."""
        return self.factor * PATCH
