"""How close Latentline comes to what the machine can do: `make bench`."""
