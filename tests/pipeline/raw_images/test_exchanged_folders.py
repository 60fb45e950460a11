"""Another process exchanges folders for links to private folders while a dataset is read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.raw_images.folder import walk_local
from pipeline.raw_images.sources import source_of
from pipeline.recipe import DatasetSettings
from pipeline.storage.source import LocalSource

NUM_EXCHANGES = 300

EXCHANGE = """
import os, sys
folder, private, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
for _ in range(number):
    os.rename(folder, folder + ".aside")
    os.symlink(private, folder)
    os.unlink(folder)
    os.rename(folder + ".aside", folder)
"""


@contextmanager
def exchanged(folder: Path, private: Path) -> Iterator[Callable[[], bool]]:
    """Yield a function that is True while a process exchanges `folder` for a link to `private` and back."""
    arguments = [sys.executable, "-c", EXCHANGE, str(folder), str(private), str(NUM_EXCHANGES)]
    with subprocess.Popen(arguments) as process:
        try:
            yield lambda: process.poll() is None
        finally:
            process.wait()
    assert process.returncode == 0


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return a dataset with the file sub/deep/a.txt, and a private folder with files of the same names."""
    for root, text in ((tmp_path / "data", "public"), (tmp_path / "private", "private")):
        for folder in ("sub", "sub/deep"):
            (root / folder).mkdir(parents=True)
            (root / folder / "a.txt").write_text(text)
    (tmp_path / "private" / "sub" / "of_the_user.png").write_text("private")
    return tmp_path / "data", tmp_path / "private"


def image_source(root: Path) -> LocalSource:
    source = LocalSource(root)
    source.links_out = walk_local(root).links_out
    return source


@pytest.mark.parametrize("path", ["sub/a.txt", "sub/deep/a.txt"])
@pytest.mark.parametrize("kind", ["caption", "image"])
def test_a_file_is_never_read_through_an_exchanged_folder(
    folders: tuple[Path, Path], path: str, kind: str
) -> None:
    root, private = folders
    source = image_source(root)
    open_file = source.open_text if kind == "caption" else source.open
    texts: set[bytes] = set()
    with exchanged(root / "sub", private / "sub") as is_running:
        while is_running():
            try:
                with open_file(path) as file:
                    texts.add(file.read())
            except OSError:
                continue
    with open_file(path) as file:
        texts.add(file.read())
    assert texts == {b"public"}


def test_a_walk_never_lists_an_exchanged_folder(folders: tuple[Path, Path]) -> None:
    root, private = folders
    paths: set[str] = set()
    num_listed = 0
    with exchanged(root / "sub", private / "sub") as is_running:
        while is_running():
            walk = walk_local(root, (".txt",))
            num_listed += "sub/a.txt" in walk.captions

            # A link that the walk finds as a link is followed, and reported.
            if not walk.links_out:
                paths |= {image.path for image in walk.images}
    assert num_listed > 0
    assert paths == set()


@pytest.mark.parametrize("kind", ["caption", "image"])
def test_a_folder_is_exchanged_after_its_first_file_was_read(folders: tuple[Path, Path], kind: str) -> None:
    root, private = folders
    source = image_source(root)
    later_source = image_source(root)
    open_file = {"caption": LocalSource.open_text, "image": LocalSource.open}[kind]
    open_file(source, "sub/a.txt").close()
    (root / "sub").rename(root / "aside")
    (root / "sub").symlink_to(private / "sub")

    # The folder that was read before is still open.
    with open_file(source, "sub/a.txt") as file:
        assert file.read() == b"public"
    for path in ("sub/a.txt", "sub/deep/a.txt"):
        with pytest.raises(OSError, match="outside"):
            open_file(later_source, path)


def test_links_that_the_walk_found_are_followed_and_later_ones_are_not(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    (elsewhere / "more").mkdir(parents=True)
    (root / "real").mkdir(parents=True)
    for path in (elsewhere / "a.png", elsewhere / "more" / "b.png", root / "real" / "c.png"):
        path.write_bytes(b"image")
    (root / "link.png").symlink_to(elsewhere / "a.png")
    (root / "folder").symlink_to(elsewhere / "more")
    (root / "absolute.png").symlink_to(root / "real" / "c.png")
    source = image_source(root)
    for path in ("link.png", "folder/b.png", "real/c.png", "absolute.png"):
        source.open(path).close()

    (root / "real" / "c.png").unlink()
    (root / "real" / "c.png").symlink_to(elsewhere / "a.png")
    (root / "linked.png").symlink_to(elsewhere / "a.png")
    (root / "folder2").symlink_to(elsewhere)
    for path in ("real/c.png", "absolute.png", "linked.png", "folder2/a.png"):
        with pytest.raises(OSError, match="outside") as caught:
            source.open(path)
        assert "follow_links" not in caught.value.fix  # it applies to texts only


def test_images_of_a_manifest_are_opened_inside_their_folder_in_every_stage(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "list.csv").write_text("path\nx.png\n")
    (tmp_path / "private.png").write_bytes(b"private")
    settings = DatasetSettings.model_validate(
        {"name": "d", "path": tmp_path / "data" / "list.csv", "captions": {"from": "fixed", "text": "x"}}
    )
    (tmp_path / "data" / "x.png").symlink_to(tmp_path / "private.png")
    with pytest.raises(OSError, match="outside"):
        source_of(settings, max_file_bytes=100).open("x.png")
