"""Commands that run with a small disk mounted at a folder."""

from __future__ import annotations

from tests.pipeline.namespaces import namespace


def on_small_disk(folder: str, size: str, command: list[str]) -> list[str]:
    """Return a command that mounts an empty disk of `size` (such as "64k") at `folder` and runs `command`.

    Only the command can see the disk. The test is skipped where `namespace` skips it.
    """
    script = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'
    return [*namespace(), "sh", "-c", script, "sh", size, folder, *command]
