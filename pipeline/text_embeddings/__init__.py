"""Stage 5: text embeddings in the cache for each distinct caption."""
