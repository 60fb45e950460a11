"""Filling the store: VAE latents and text embeddings."""
