"""Mutation tests: small changes of the code that the tests must notice. `make mutants` runs them."""
