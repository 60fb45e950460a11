"""Process that captions images; imports torch."""
