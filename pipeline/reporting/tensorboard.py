"""The address at which `make ui` serves TensorBoard, and its link to one training run."""

from __future__ import annotations

import os
from urllib.parse import quote

HOST = "127.0.0.1"

PORT_VARIABLE = "LATENTLINE_TENSORBOARD_PORT"
"""Environment variable with TensorBoard's port; 6006 by default."""


def port() -> int:
    """Return the port of TensorBoard."""
    # `or`, because the variable may be set to nothing.
    return int(os.environ.get(PORT_VARIABLE) or 6006)


def url(run_name: str = "") -> str:
    """Return the address of TensorBoard, which shows only runs with `run_name` in their names.

    The name of a run is `<recipe>/<run id>/...`.
    """
    query = f"?runFilter={quote(run_name, safe='')}" if run_name else ""
    return f"http://{HOST}:{port()}/{query}"
