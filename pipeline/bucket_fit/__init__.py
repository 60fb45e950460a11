"""Bucket sizes fitted to a dataset, for `latentline fit-buckets`."""
