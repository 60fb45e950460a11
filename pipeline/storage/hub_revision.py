"""Commits of the Hugging Face Hub: an address with a branch or a tag at the commit that it names now."""

from __future__ import annotations

import re

from pipeline.storage.addresses import Address, Url
from pipeline.storage.file_systems import open_url
from pipeline.storage.retry import retry

_COMMIT = re.compile(r"[0-9a-f]{40}")


def at_commit(address: Address) -> Address:
    """Return an `hf://` address at its current commit; any other address unchanged.

    Files that are read below the result are of one commit, also if somebody pushes to the branch meanwhile.

    Raises:
        Exception: Any error of huggingface_hub, for a repository that cannot be read.
    """
    if not isinstance(address, Url) or Url(address.links[-1]).protocol != "hf":
        return address
    *inner, last = address.links
    files, path = open_url(Url(last))
    resolved = retry(lambda: files.resolve_path(path))
    if not hasattr(resolved, "repo_id") or _COMMIT.fullmatch(resolved.revision):
        return address  # a bucket has no commits

    from huggingface_hub import HfApi

    info = retry(
        lambda: HfApi().repo_info(resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision)
    )
    root = resolved.root.partition("@")[0]
    return Url("::".join([*inner, f"hf://{root}@{info.sha}/{resolved.path_in_repo}".rstrip("/")]))
