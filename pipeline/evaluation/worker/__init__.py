"""Process that draws the pictures of an evaluation and computes their features; imports torch."""
