"""Latentline's public face: its version and its command line."""

__version__ = "0.3.0"
