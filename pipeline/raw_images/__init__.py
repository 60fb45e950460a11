"""Stage 1: every image file of the datasets, with its size and content hash."""
