"""How `latentline gc` classifies the files of a cache by their paths."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pipeline.errors import StoreError
from pipeline.maintenance.gc import delete, survey
from tests.pipeline.used_case import make_old, use

KEY = "0" * 64
TEMP = ".4570-a2391e24edeef39f.tmp"
OLD_S = 1_000_000_000

ENTRIES = (f"latents/00/{KEY}.safetensors", f"text/00/{KEY}.safetensors", f"masks/00/{KEY}.safetensors")
LEFTOVERS = (
    *(TEMP, f"used/{TEMP}", f"outputs/{TEMP}", f"latents/ab/{TEMP}", f"packs/latents/{TEMP}"),
    *("outputs/other.json", "outputs/other-text.keys"),  # of version 0.2
)
BOOKKEEPING = ("speed.json", "used/since", "used/clock", "used/lock")
FOREIGN = (
    # Not quite entries.
    f"latents/00/{KEY}.txt",
    f"latents/00/{KEY[1:]}.safetensors",
    f"latents/00/{KEY[1:]}z.safetensors",
    f"latents/00/{KEY}0.safetensors",
    f"latents/01/{KEY}.safetensors",
    f"latents/000/{KEY}.safetensors",
    f"latents/0/{KEY}.safetensors",
    f"latents/{KEY}.safetensors",
    f"latents/00/00/{KEY}.safetensors",
    f"photos/00/{KEY}.safetensors",
    # Temporary files of other programs, or in folders that Latentline does not write to.
    "latents/ab/mine.tmp",
    f"latents/{TEMP}",
    f"latents/abc/{TEMP}",
    f"latents/ab/ab/{TEMP}",
    f"photos/ab/{TEMP}",
    f"photos/latents/{TEMP}",
    f"packs/{TEMP}",
    f"packs/photos/{TEMP}",
    f"packs/latents/ab/{TEMP}",
    "packs/latents/mine.tmp",
    # Not quite bookkeeping.
    "speed.txt",
    "photos/a.json",
    "used/notes.txt",
    "used/a.json",
    "used/deep/since",
    "outputs/notes.txt",
    "outputs/deep/a.json",
    "packs/a.json",
    "packs/changed",
    "packs/photos/changed",
    "packs/latents/notes.txt",
    "packs/latents/ab/changed",
    "encodings/notes.txt",
)


def put(root: Path, name: str, modified_s: float = OLD_S) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"123")
    os.utime(path, (modified_s, modified_s))


@pytest.mark.parametrize("name", [*ENTRIES, *LEFTOVERS, *FOREIGN, *BOOKKEEPING])
def test_I27_a_file_of_a_cache_is_classified_by_its_path(tmp_path: Path, name: str) -> None:
    use(tmp_path, ["1" * 64])
    make_old(tmp_path)
    put(tmp_path, name)
    surveyed = survey(tmp_path)
    expected = {
        "orphans": [name] if name in ENTRIES else [],
        "leftovers": [name] if name in LEFTOVERS else [],
        "foreign": [name] if name in FOREIGN else [],
    }
    assert {kind: list(getattr(surveyed, kind)) for kind in expected} == expected


def test_a_survey_of_each_kind_of_file_is_complete_and_deletion_leaves_no_empty_folder(
    tmp_path: Path,
) -> None:
    use(tmp_path, ["2" * 64])
    make_old(tmp_path)
    for name in (*ENTRIES, *LEFTOVERS, "encodings/1/encoding.json", "encodings/1/shard/0.json"):
        put(tmp_path, name)
    put(tmp_path, "notes/of/mine.txt")
    put(tmp_path, "encodings/2/encoding.json", modified_s=time.time())
    put(tmp_path, f"latents/11/{'1' * 64}.safetensors", modified_s=time.time())
    surveyed = survey(tmp_path)
    assert (surveyed.entries, surveyed.entry_bytes, surveyed.young) == (4, 12, 1)
    assert surveyed.orphans == dict.fromkeys(ENTRIES, 3)
    assert surveyed.leftovers == dict.fromkeys(LEFTOVERS, 3)
    assert surveyed.old_encodings == dict.fromkeys(
        ("encodings/1/encoding.json", "encodings/1/shard/0.json"), 3
    )
    assert (surveyed.num_old_encodings, surveyed.num_young_encodings) == (1, 1)
    assert surveyed.foreign == ["notes/of/mine.txt"]

    assert delete(tmp_path, surveyed) == (12, 36)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    left = sorted(name for name in left if not name.startswith("used/"))
    assert left == ["encodings/2/encoding.json", f"latents/11/{'1' * 64}.safetensors", "notes/of/mine.txt"]
    for folder in ("latents/00", "latents/ab", "text/00", "masks/00", "encodings/1", "outputs"):
        assert not (tmp_path / folder).exists(), folder


def test_more_orphans_than_one_batch_are_all_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.maintenance.gc._BATCH", 2)
    use(tmp_path, ["2" * 64])
    make_old(tmp_path)
    for number in range(5):
        put(tmp_path, f"latents/00/{number:064x}.safetensors")
    surveyed = survey(tmp_path)
    assert len(surveyed.orphans) == 5
    assert delete(tmp_path, surveyed) == (5, 15)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_cache_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        raise OSError("refused")

    monkeypatch.setattr("pipeline.cache.local_folder.LocalFolder.files", refuse)
    with pytest.raises(StoreError, match="the cache cannot be listed: refused"):
        survey(tmp_path)
