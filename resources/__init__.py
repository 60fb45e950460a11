"""With what the assets work: table IO, and the launcher of GPU processes."""
