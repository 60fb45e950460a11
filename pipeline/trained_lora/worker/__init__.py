"""The launched training process; imports torch."""
