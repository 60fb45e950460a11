"""Equal and similar images are found and grouped (FAILURES I24)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance
from skimage import data

from pipeline.images.pixel_values import PIXEL_VALUES, PixelValue
from pipeline.validated_dataset.duplicates import duplicate_groups
from tests.pipeline.dataset_folder import Folder

PHOTOS = [Image.fromarray(photo) for photo in (data.astronaut(), data.coffee(), data.cat(), data.rocket())]


def brute_force(values: list[int], max_distance: int) -> list[int]:
    """The smallest member of each value's group, by comparing all pairs until nothing changes."""
    labels = list(values)
    changed = True
    while changed:
        changed = False
        for i, one in enumerate(values):
            for j, other in enumerate(values):
                if (one ^ other).bit_count() <= max_distance and labels[i] < labels[j]:
                    labels[j] = labels[i]
                    changed = True
    return labels


words = st.integers(0, 2**64 - 1)


@st.composite
def planted(draw: st.DrawFn) -> list[int]:
    """Random values, and chains of others that differ from one another in a few bits."""
    values = draw(st.lists(words, max_size=12))
    for _ in range(draw(st.integers(0, 12)) if values else 0):
        value = draw(st.sampled_from(values))
        for bit in draw(st.lists(st.integers(0, 63), max_size=6)):
            value ^= 1 << bit
        values.append(value)
    return values


@given(planted(), st.integers(0, 16))
def test_I24_groups_equal_those_of_a_brute_force_search(values: list[int], max_distance: int) -> None:
    names = [f"{value:016x}{index:04}" for index, value in enumerate(values)]
    columns = {"content_hash": names, "perceptual_hash": values}
    schema: dict[str, Any] = {"content_hash": pl.String, "perceptual_hash": pl.UInt64}
    groups = duplicate_groups(pl.DataFrame(columns, schema=schema), max_distance)
    labels = brute_force(values, max_distance)
    smallest = {
        label: min(n for n, each in zip(names, labels, strict=True) if each == label) for label in labels
    }
    assert dict(groups.rows()) == {n: smallest[label] for n, label in zip(names, labels, strict=True)}


@pytest.mark.parametrize("max_distance", range(17))
def test_two_hashes_are_similar_if_at_most_that_many_bits_differ(max_distance: int) -> None:
    """The search compares parts of the hashes, so the bits at the ends of each possible part are changed."""
    start = 0x0123_4567_89AB_CDEF
    ends = [64 * part // (max_distance + 1) for part in range(1, max_distance + 1)]
    changes = [{bit - below for bit in ends} for below in (0, 1)]
    changes += [set(range(max_distance)), set(range(64 - max_distance, 64)), {0}, {63}]
    for bits in (each for each in changes if len(each) <= max_distance):
        other = start ^ sum(1 << bit for bit in bits)
        assert len({*groups_by_name([start, other], max_distance).values()}) == 1, f"bits {sorted(bits)}"
        one_more = other ^ 1 << next(bit for bit in range(20, 64) if bit not in bits)
        is_apart = len(bits) == max_distance
        assert len({*groups_by_name([start, one_more], max_distance).values()}) == 1 + is_apart


def groups_by_name(values: list[int], max_distance: int) -> dict[str, str]:
    names = [f"{value:016x}{index:04}" for index, value in enumerate(values)]
    columns = {"content_hash": names, "perceptual_hash": pl.Series(values, dtype=pl.UInt64)}
    return dict(duplicate_groups(pl.DataFrame(columns), max_distance).rows())


def test_images_without_a_hash_are_not_grouped() -> None:
    contents = pl.DataFrame(
        {"content_hash": ["b", "a"], "perceptual_hash": pl.Series([None, None], dtype=pl.UInt64)}
    )
    assert dict(duplicate_groups(contents, 4).rows()) == {"a": "a", "b": "b"}


def test_the_search_reports_how_many_pairs_it_compared(progress_lines: list[str]) -> None:
    """With distance 1, the two halves of each hash are compared: 4 equal halves make 6 pairs."""
    values = [0x1_0000_0000, 0x2_0000_0000, 0x3_0000_0000, 0x4_0000_0000]
    columns = {"content_hash": list("abcd"), "perceptual_hash": pl.Series(values, dtype=pl.UInt64)}
    duplicate_groups(pl.DataFrame(columns), 1, log=progress_lines.append)
    assert progress_lines[-1].startswith("pairs of images compared: 6 of 6, ")


def png(photo: Image.Image, **changes: Any) -> bytes:
    file = io.BytesIO()
    photo.save(file, "PNG", **changes)
    return file.getvalue()


@pytest.fixture
def similar(folder: Folder) -> Folder:
    """A photograph, its copy, a smaller version, another photograph and a white image."""
    folder.add("photo.png", png(PHOTOS[0]))
    folder.add("sub/copy.png", png(PHOTOS[0]))
    folder.add("small.png", png(PHOTOS[0].resize((256, 256))))
    folder.add("other.png", png(PHOTOS[1]))
    folder.add("white.png", png(Image.new("RGB", (64, 64), "white")))
    return folder


def test_I24_the_first_of_several_copies_with_the_same_caption_is_kept(similar: Folder) -> None:
    result = similar.ingest()
    assert result.rejected.select("path", "reason").rows() == [("sub/copy.png", "duplicate")]
    assert "as d/photo.png, which is kept" in result.rejected["detail"][0]
    groups = dict(result.table.select("path", "duplicate_group").rows())
    hashes = dict(result.table.select("path", "content_hash").rows())
    assert groups["photo.png"] == groups["small.png"] == min(hashes["photo.png"], hashes["small.png"])
    assert groups["other.png"] == hashes["other.png"]
    assert dict(result.table.select("path", "one_colour").rows()) == dict.fromkeys(groups, False) | {
        "white.png": True
    }
    again = similar.ingest()
    assert again.table.equals(result.table)
    assert again.report["decoded"] == 0


def test_copies_with_another_caption_are_kept_and_keep_all_keeps_every_copy(similar: Folder) -> None:
    similar.duplicates = "keep_all"
    assert len(similar.ingest().table) == 5
    similar.duplicates = "keep_first"
    (similar.root / "sub" / "copy.txt").write_text("another caption")
    result = similar.ingest()
    assert len(result.table) == 5
    assert result.rejected.is_empty()


def test_copies_of_which_only_a_further_caption_differs_are_kept(similar: Folder) -> None:
    similar.captions = {"lines": "each"}
    for name, second_line in (("photo", "in a suit"), ("sub/copy", "in a spacesuit")):
        (similar.root / f"{name}.txt").write_text(f"an astronaut\n{second_line}\n")
    result = similar.ingest()
    assert result.rejected["path"].to_list() == [], "a file whose second caption differs is not a copy"
    (similar.root / "sub" / "copy.txt").write_text("an astronaut\nin a suit\n")
    assert similar.ingest().rejected["path"].to_list() == ["sub/copy.png"]


def test_I24_a_limit_is_reached_despite_copies(similar: Folder) -> None:
    similar.dataset = {"limit": 4}
    result = similar.ingest()
    assert result.table["path"].to_list() == ["other.png", "photo.png", "small.png", "white.png"]
    assert result.rejected.select("path", "reason").rows() == [("sub/copy.png", "filter_limit")]


def test_a_smaller_distance_gives_more_groups(similar: Folder) -> None:
    similar.add("bright.png", png(ImageEnhance.Contrast(PHOTOS[0]).enhance(3.0)))
    groups = {}
    for bits in (0, 16):
        similar.checks = {"near_duplicate_bits": bits}
        groups[bits] = similar.ingest().table["duplicate_group"].n_unique()
    assert groups[16] < groups[0]


@pytest.fixture
def bridged(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Three pictures; the first and the last are similar only through the second."""
    looks = {"first": 0b0, "bridge": 0b1111, "last": 0b1111_1111}
    edges = {24: "first", 32: "last", 40: "bridge"}
    hash_of = PixelValue(pl.UInt64, lambda views: looks[edges[views.image.height]])
    monkeypatch.setitem(PIXEL_VALUES, "perceptual_hash", hash_of)
    for height, name in edges.items():
        folder.add(f"{name}.png", folder.picture(height, height))
    return folder


def groups_of(folder: Folder) -> list[set[str]]:
    table = folder.ingest().table.group_by("duplicate_group").agg("path")
    return sorted(({*paths} for paths in table["path"]), key=sorted)


def test_I24_a_deleted_image_no_longer_connects_two_others(bridged: Folder) -> None:
    assert groups_of(bridged) == [{"first.png", "bridge.png", "last.png"}]
    (bridged.root / "bridge.png").unlink()
    seen_before = bridged.ingest().table
    assert seen_before["duplicate_group"].to_list() == seen_before["content_hash"].to_list()
    assert bridged.ingest().table.equals(seen_before)


def test_I24_a_filtered_image_connects_no_others_even_if_earlier_runs_decoded_it(
    bridged: Folder, tmp_path: Path
) -> None:
    """Otherwise the result would depend on the recipes of earlier runs."""
    bridged.ingest()
    bridged.dataset = {"filters": {"max_height": 35}}
    fresh = Folder(bridged.root, tmp_path / "fresh", dataset=bridged.dataset)
    assert groups_of(bridged) == [{"first.png"}, {"last.png"}]
    assert bridged.ingest().table.equals(fresh.ingest().table)


def test_a_hundred_thousand_hashes_can_be_grouped() -> None:
    random = np.random.default_rng(0)
    values = random.integers(0, 2**63, 100_000, dtype=np.uint64)
    values[50_000:50_100] = values[:100] ^ np.uint64(0b101)
    names = [f"{index:06}" for index in range(len(values))]
    groups = duplicate_groups(pl.DataFrame({"content_hash": names, "perceptual_hash": values}), 4)
    assert len(groups) == 100_000
    assert groups.filter(pl.col("content_hash") != pl.col("duplicate_group")).rows() == [
        (names[50_000 + index], names[index]) for index in range(100)
    ]
