"""Diagnosis of a dataset with the base model, before training: captions that do not fit their images."""
