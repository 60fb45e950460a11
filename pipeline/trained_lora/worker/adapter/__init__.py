"""The trainable adapter on a frozen base model."""
