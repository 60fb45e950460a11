"""Training of the demo's base model from scratch: tokenizer, VAE, text encoder and UNet."""
