"""Encoding process of vae_latents; imports torch."""
