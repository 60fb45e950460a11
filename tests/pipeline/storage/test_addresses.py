"""What a recipe's text stands for: a path of this machine, or an address of fsspec."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.storage.addresses import Url, absolute, address, anchor, is_url, place_parts

ROOT = Path("/project")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("data/photos", Path("/project/data/photos")),
        ("/data/photos", Path("/data/photos")),
        ("~/photos", Path.home() / "photos"),
        ("file:///data/photos", Path("/data/photos")),
        ("local:///data/photos", Path("/data/photos")),
        ("file://photos", Path("/project/photos")),
        ("./zip::x", Path("/project/zip::x")),
        ("s3://bucket/photos", Url("s3://bucket/photos")),
        ("zip://photos::data/a.zip", Url("zip://photos::/project/data/a.zip")),
        ("zip::file:///data/a.zip", Url("zip::/data/a.zip")),
        ("zip://x::s3://bucket/a.zip", Url("zip://x::s3://bucket/a.zip")),
    ],
)
def test_a_text_stands_for_a_path_or_an_address(text: str, meant: Path | Url) -> None:
    found = absolute(text, ROOT)
    assert (found, type(found)) == (meant, type(meant))
    assert absolute(str(found), ROOT) == found
    assert address(str(found)) == found


@pytest.mark.parametrize(
    ("text", "name", "suffix", "parent"),
    [
        ("s3://bucket/sub/list.csv", "list.csv", ".csv", "s3://bucket/sub"),
        ("s3://bucket/list.csv", "list.csv", ".csv", "s3://bucket"),
        ("zip://in/list.parquet::/a.zip", "list.parquet", ".parquet", "zip://in::/a.zip"),
        ("zip://list.csv::/a.zip", "list.csv", ".csv", "zip://::/a.zip"),
        ("simplecache::s3://bucket/list.csv", "list.csv", ".csv", "simplecache::s3://bucket"),
        ("zip::/a.zip", "", "", "zip://::/a.zip"),
        ("s3://bucket/photos/", "photos", "", "s3://bucket"),
    ],
)
def test_parts_are_those_of_the_link_that_names_a_place(
    text: str, name: str, suffix: str, parent: str
) -> None:
    url = Url(text)
    assert (url.name, url.suffix, url.parent) == (name, suffix, parent)
    assert is_url(url.parent)


def test_the_whole_chain_lies_in_its_last_link() -> None:
    assert anchor(Url("zip://x::/data/a.zip")) == Path("/data/a.zip")
    assert anchor(Url("zip://x::s3://bucket/a.zip")) == Url("s3://bucket/a.zip")
    assert place_parts(Url("ftp://user:word@Host:21/a//./b/")) == ("host:21", "a", "b")
    assert place_parts(Url("memory://")) == ()
