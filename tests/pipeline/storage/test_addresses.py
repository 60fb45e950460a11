"""Text in a recipe becomes a local path or an fsspec URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.storage.addresses import Url, absolute, address, container, is_url, url_parts

ROOT = Path("/project")


@pytest.mark.parametrize(
    ("text", "expected"),
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
def test_text_becomes_a_path_or_a_url(text: str, expected: Path | Url) -> None:
    result = absolute(text, ROOT)
    assert (result, type(result)) == (expected, type(expected))
    assert absolute(str(result), ROOT) == result
    assert address(str(result)) == result


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
def test_name_suffix_and_parent_are_those_of_the_link_with_a_path(
    text: str, name: str, suffix: str, parent: str
) -> None:
    url = Url(text)
    assert (url.name, url.suffix, url.parent) == (name, suffix, parent)
    assert is_url(url.parent)


def test_the_container_of_a_chain_is_its_last_link() -> None:
    assert container(Url("zip://x::/data/a.zip")) == Path("/data/a.zip")
    assert container(Url("zip://x::s3://bucket/a.zip")) == Url("s3://bucket/a.zip")
    assert url_parts(Url("ftp://user:word@Host:21/a//./b/")) == ("host:21", "a", "b")
    assert url_parts(Url("memory://")) == ()
