"""Encoding process of text_embeddings; imports torch."""
