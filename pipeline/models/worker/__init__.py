"""Loading base models in launched processes; imports torch."""
