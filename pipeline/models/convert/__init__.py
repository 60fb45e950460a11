"""A model in one file, as model sites have them, becomes the diffusers folder that a recipe takes."""
