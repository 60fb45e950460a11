"""The launched process of both cache stages; imports torch."""
