"""The modules of `processes` that import torch and run only in launched processes."""
