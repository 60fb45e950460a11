"""What `make demo` trains on: photographs and a tiny model, both made on this machine."""
