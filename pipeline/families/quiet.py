"""Silence of the model libraries: what takes long is told by Latentline's own progress."""

from __future__ import annotations


def keep_quiet() -> None:
    """Keep loading bars and hints of diffusers and transformers out of this process's output."""
    import diffusers.utils.logging
    import transformers.utils.logging

    for logging in (diffusers.utils.logging, transformers.utils.logging):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
