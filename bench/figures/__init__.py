"""One module a stage; each has `FIGURES`, the figures that it measures."""
