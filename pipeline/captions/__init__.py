"""Captions that a vision-language model writes for images without one."""
