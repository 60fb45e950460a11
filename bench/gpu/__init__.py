"""`python -m bench --gpu`: the figures that need a GPU, using full-size base models with random weights."""
