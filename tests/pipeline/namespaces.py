"""Disks of a test's own, in a mount namespace."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def namespace() -> list[str]:
    """A command's beginning that may mount a disk which nobody else sees; skips the test without one."""
    start = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        pytest.skip("no unshare or no mount on this system")
    if subprocess.run([*start, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make mount namespaces")
    return start
