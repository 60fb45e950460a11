"""Values that a family's parts exchange with their callers.

Letters of shapes: B samples, T tokens, D embedding width, C latent channels, h and w latent edges.
"""

from __future__ import annotations

from pipeline.models.families.base import Conditions, EncodedCaption, Posterior

__all__ = ["Conditions", "EncodedCaption", "Posterior"]
