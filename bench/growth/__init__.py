"""How time and memory of each stage grow with the number of samples."""
