"""A command run where it may mount a disk that nobody else sees."""

from __future__ import annotations

from tests.pipeline.namespaces import namespace


def on_small_disk(folder: str, size: str, command: list[str]) -> list[str]:
    """`command`, run with an empty disk of `size` ("64k") mounted at `folder`; as `namespace`."""
    script = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'
    return [*namespace(), "sh", "-c", script, "sh", size, folder, *command]
