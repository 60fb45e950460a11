"""The dataset and the tiny base model of `make demo`, both created offline."""
