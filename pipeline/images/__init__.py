"""Decoding image files to pixels: formats, colour and geometry."""
