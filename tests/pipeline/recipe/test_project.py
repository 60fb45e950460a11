from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.recipe import project_root, shareable_path

ROOT = project_root()


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        (f"{ROOT}/demo/base", "demo/base"),
        (f"{ROOT}/outputs/../demo/base", "demo/base"),
        ("demo/base", "demo/base"),
        ("./demo/base", "./demo/base"),
        ("outputs/../demo/base", "demo/base"),
        ("/home/ann/models/sdxl", "sdxl"),
        ("../../../../../../home/ann/sdxl", "sdxl"),
        (f"{ROOT}-of-ann/sdxl", "sdxl"),
        ("/", ""),
        ("stabilityai/stable-diffusion-xl-base-1.0", "stabilityai/stable-diffusion-xl-base-1.0"),
        ("a cat... in a box", "a cat... in a box"),
        ("s3://bucket/home/photos", "s3://bucket/home/photos"),
        ("https://host/photos.zip?token=abc", "https://host/photos.zip?***"),
        ("file:///home/ann/photos", "file://photos"),
        ("zip://photos::/home/ann/all.zip", "zip://photos::all.zip"),
        (f"zip://photos::file://{ROOT}/data/all.zip", "zip://photos::file://data/all.zip"),
        (
            "zip://photos::simplecache::https://u:pw@host/a.zip",
            "zip://photos::simplecache::https://***@host/a.zip",
        ),
    ],
)
def test_H05_a_published_path_names_no_folder_outside_the_project(text: str, shared: str) -> None:
    assert shareable_path(text) == shared


def test_H05_a_path_below_the_home_folder_is_shortened() -> None:
    assert shareable_path(str(Path.home() / "models" / "flux")) == "flux"
