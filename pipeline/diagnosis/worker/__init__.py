"""Process that measures the base model's loss under several captions; imports torch."""
