"""Stage 4: a VAE latent in the cache for each image of aspect_buckets."""
