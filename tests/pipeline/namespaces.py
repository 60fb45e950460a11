"""Disks that only one test can see, in a mount namespace."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def namespace(*kinds: str) -> list[str]:
    """Return a command prefix that allows a command to mount disks; skip the test if that is impossible.

    `kinds` are further options of unshare.
    """
    start = ["unshare", "--user", "--map-root-user", "--mount", *kinds]
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        pytest.skip("this system has no unshare or no mount command")
    if subprocess.run([*start, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not create mount namespaces")
    return start
