"""The launched process of checkpoint conversion; imports torch."""
