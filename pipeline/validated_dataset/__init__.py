"""Stage 2: every image that decodes, with its caption."""
