"""A first recipe for a folder of images, from a quick look at it."""
