"""The part of the forecast of memory and time that needs torch."""
