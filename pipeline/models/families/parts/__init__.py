"""Torch-free parts that model families are assembled from; each names its counterpart in `models/worker`."""
