"""The side of model families that needs torch; only worker processes import it."""
