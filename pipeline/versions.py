"""Versions of the code that determines results: raise one by hand when the same input would give others."""

# Definitions read the versions while they load, so this module imports nothing.

PREPROCESSING_VERSION = 1
"""Version of image preprocessing, part of every latent's key. A golden-pixel test shows when to raise it."""

LOOK_VERSION = "look-5"
"""Version of `images/pixel_values.py`. A new version decodes every image again to measure its values."""

CAPTIONS_VERSION = 2
"""Version of caption parsing. A new version reads every caption file again."""

REPLACE_VERSION = 2
"""Version of `captions.replace`. A new version reads the captions of datasets with replacements again."""

TRAINING_VERSION = 1
"""Version of the training code. Raise it when the same run fingerprint would give other weights."""

PICTURES_VERSION = 1
"""Version of the code that draws the pictures of an evaluation, part of every picture's key."""

FEATURES_VERSION = 1
"""Version of the code between a picture and a scorer of Latentline, part of the key of its features."""

CAPTIONER_VERSION = 1
"""Version of the code between an image and a captioning model, part of the key of every caption."""

DIAGNOSIS_VERSION = 1
"""Version of the code that measures captions with the base model, part of the key of their losses."""

INFLUENCE_VERSION = 1
"""Version of the code that computes the influence of an image at a step, part of its key."""
