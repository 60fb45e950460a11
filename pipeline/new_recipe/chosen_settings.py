"""Settings that options of `latentline new` choose, set in the text of a recipe with its comments."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

_OWN_KEYS = {
    "buckets.resolution": ("resolution", "resolutions"),
    "latents.flip": ("flip",),
    "text.caption_dropout": ("caption_dropout",),
}
"""Keys of a dataset that would replace a chosen setting of the recipe."""


def with_settings(
    text: str, settings: Mapping[str, Any], *, trigger: str | None = None, for_all: bool = True
) -> str:
    """Return the text of a recipe with other values of keys such as `training.lora.rank`.

    A value of None removes the key. A chosen value applies to all datasets, unless `for_all` is False, and
    `datasets.photos.repeats` is a key of the dataset photos. `trigger` becomes the trigger word of all
    datasets that are trained on.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    # A longer line would be broken in the middle of a list.
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    document = yaml.load(text)
    for key, value in settings.items():
        *sections, last = key.split(".")
        section = document
        if sections[:1] == ["datasets"]:
            section = next(each for each in document["datasets"] if each["name"] == sections[1])
            sections = sections[2:]
        for name in sections:
            if section.get(name) is None:
                section[name] = CommentedMap()
            section = section[name]
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
            _remove_comment(section, last)
        for dataset in document["datasets"]:
            for own in _OWN_KEYS.get(key, ()) if for_all else ():
                dataset.pop(own, None)
    if trigger is not None:
        for dataset in document["datasets"]:
            if dataset.get("role", "train") == "train":
                dataset.setdefault("captions", CommentedMap())["trigger"] = trigger
    changed = StringIO()
    yaml.dump(document, changed)
    return changed.getvalue()


def _remove_comment(section: CommentedMap, key: str) -> None:
    """Remove the comment at the end of a key's line, which explains the value that was replaced."""
    tokens = section.ca.items.get(key)
    # Lines below the key, such as an empty line before the next section, are in the same token.
    if tokens and tokens[2] is not None and tokens[2].value.startswith("#"):
        _, newline, below = tokens[2].value.partition("\n")
        tokens[2].value = newline + below
