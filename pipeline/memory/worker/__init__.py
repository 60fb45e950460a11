"""The part of the memory forecast that needs torch."""
