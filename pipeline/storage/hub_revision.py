"""Commits of the Hugging Face Hub: an address with a branch or a tag at the commit that it names now."""

from __future__ import annotations

import re

from pipeline.storage.addresses import Address, Url
from pipeline.storage.file_systems import open_url
from pipeline.storage.retry import retry

_COMMIT = re.compile(r"[0-9a-f]{40}")

_AT_COMMIT = re.compile(r"(hf://[^@]*)@[0-9a-f]{40}(?=/|$)")


def without_commit(address: Address) -> str:
    """Return the text of an address without the commit that `at_commit` has added."""
    return _AT_COMMIT.sub(r"\1", str(address))


def at_commit(address: Address, known: dict[str, str] | None = None) -> Address:
    """Return an `hf://` address at its current commit; any other address unchanged.

    Files that are read below the result are of one commit, also if somebody pushes to the branch meanwhile.
    `known` has the commits of repositories that were looked up before, and gets new ones.

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

    known = {} if known is None else known
    if resolved.root not in known:
        name, kind, revision = resolved.repo_id, resolved.repo_type, resolved.revision
        known[resolved.root] = str(
            retry(lambda: HfApi().repo_info(name, repo_type=kind, revision=revision)).sha
        )
    repository = resolved.root.partition("@")[0]
    pinned = f"hf://{repository}@{known[resolved.root]}/{resolved.path_in_repo}".rstrip("/")
    return Url("::".join([*inner, pinned]))
