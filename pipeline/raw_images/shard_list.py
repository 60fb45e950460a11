"""List the shards of a dataset with packed images: the files that match one name with `*`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import DatasetError
from pipeline.raw_images.folder import is_hidden, require_listable
from pipeline.recipe.packed import WILDCARD
from pipeline.storage.addresses import Address
from pipeline.storage.remote_source import RemoteSource
from pipeline.storage.source import NO_FILE, Source, Stat


def list_shards(source: Source, packed: Address) -> dict[str, Stat]:
    """Return the stats of the shards in `source`, the parent of `packed`, by name and sorted.

    Raises:
        DatasetError: The folder cannot be listed, or no shard matches.
    """
    is_shard = _matcher(packed.name)
    if isinstance(source, RemoteSource):
        items = source.list_folder("")
        shards = {item.path: item.stat for item in items if item.stat is not None and is_shard(item.path)}
    else:
        require_listable(Path(source.address))
        names = [name for name in source.sibling_names("") if is_shard(name)]
        stats = zip(names, source.stats(names).tolist(), strict=True)
        shards = {
            name: (stat[0], stat[1], stat[2], stat[3]) for name, stat in stats if tuple(stat) != NO_FILE
        }
    if not shards:
        what = f"no file matches {packed.name}" if WILDCARD in packed.name else "the file does not exist"
        fix = "correct datasets[].path; * stands for any characters of a file name"
        raise DatasetError(what, where=str(packed), fix=fix)
    return dict(sorted(shards.items()))


def _matcher(pattern: str) -> Callable[[str], bool]:
    expression = re.compile(".*".join(map(re.escape, pattern.split(WILDCARD))), re.DOTALL)
    return lambda name: expression.fullmatch(name) is not None and not is_hidden(name)
