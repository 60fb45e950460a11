"""Stage sweep: variants of a recipe, of which only the best ones are trained to the end."""
