"""Arithmetic on finished LoRA files: merging several, reducing ranks, and what a file contains."""
