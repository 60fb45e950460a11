"""Versions of the code that decides results: raised by hand, whenever the same input would give others.

Definitions read them when they load, so nothing is imported here.
"""

PREPROCESSING_VERSION = 1
"""Part of every latent's key. Raised whenever the same file gives other pixels; the golden pixels of its test
say when that is."""

LOOK_VERSION = "look-3"
"""Of `perceptual_hash`: hashes of another version are made anew, which decodes every image once more."""

CAPTIONS_VERSION = 1
"""Of how a caption file becomes captions; another version reads every one again."""

TRAINING_VERSION = 1
"""Raised when the code would train other weights from the same facts."""
