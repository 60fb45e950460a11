"""`python -m bench --gpu`: the figures that need a GPU, with base models of full size and random weights."""
