"""The launched process of vae_latents; imports torch."""
