"""Results of checks, errors of closed gates, and helpers that the checks of several stages share."""
