"""One module per stage. Each defines `FIGURES`, the figures that it measures."""
