"""The part of drawing that needs torch; it runs in a launched process."""
