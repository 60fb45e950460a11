"""Evaluation of a trained LoRA: pictures, scorers, numbers and the choice of a step."""
