"""Process that measures captions with the base model, and influences with a run; imports torch."""
