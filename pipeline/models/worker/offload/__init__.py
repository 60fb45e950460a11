"""Streaming of the frozen base: weights of blocks are on the host, and copied to the device for use."""
