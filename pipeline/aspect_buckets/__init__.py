"""Stage 3: the bucket, resized size and crop of each image."""
