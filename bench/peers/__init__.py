"""Latentline next to other trainers: their unmodified checkouts, with the same weights and photographs.

The folder contains no code of these trainers. A file per trainer writes its configuration, starts its own
command, and counts the finished steps in its output.
"""
