"""Process that converts a checkpoint; imports torch."""
