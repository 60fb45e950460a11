"""The launched process of text_embeddings; imports torch."""
