"""A dataset's folder, walked once: which files may be images, and what else lies there and is passed over.

Only names and stats are looked at here (and the first bytes of files without a suffix); nothing is written,
and no file that could block is opened.
"""

from __future__ import annotations

import heapq
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import DatasetError
from pipeline.images.formats import SUFFIXES, sniff
from pipeline.raw_images.path_list import Paths
from pipeline.storage.source import open_nonblocking, to_int64

JUNK = frozenset(
    ["__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir", "$RECYCLE.BIN", "System Volume Information"]
)
"""Names that operating systems leave in folders, beside all that begin with a dot or end with a tilde."""

FOREIGN_CACHES = frozenset(["npz", "npy", "pt", "pth", "safetensors", "ckpt"])
"""Suffixes of what other trainers keep among the images."""


_FILES_AT_ONCE = 500
"""Of a folder, that are met before they count as found."""


class Found(NamedTuple):
    """A file that may be an image: its path below the root, as the file system spells it, and its stat."""

    path: str
    file_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


class FoundFiles:
    """The files that a walk met, kept as columns."""

    def __init__(self) -> None:
        """None yet."""
        self.paths = Paths()
        self._numbers = array("q")

    def append(self, found: Found) -> None:
        """One more."""
        self.add(found.path, found[1:])

    def add(self, path: str, numbers: Sequence[int]) -> None:
        """One more, by what `Found` says beside its path."""
        self._extend(numbers)
        self.paths.append(path)

    def extend(self, folder: str, names: Sequence[str], numbers: list[int]) -> None:
        """More, all in one folder.

        Args:
            folder: Empty, or ending with a slash.
            names: Of the files in it.
            numbers: What `Found` says beside a path, one file's after another's.
        """
        self._extend(numbers)
        self.paths.extend(folder, names)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.paths)

    def __iter__(self) -> Iterator[Found]:
        """In the order in which they were met."""
        for row, path in enumerate(self.paths):
            yield Found(path, *self._numbers[5 * row : 5 * row + 5])

    def _extend(self, numbers: Sequence[int]) -> None:
        """With numbers as a stat has them, or as `to_int64` has these."""
        try:
            self._numbers.extend(numbers)
        except OverflowError:
            del self._numbers[5 * len(self.paths) :]
            self._numbers.extend(map(to_int64, numbers))

    def stats(self) -> npt.NDArray[np.int64]:
        """Of each file its size, times, inode and device: int64 (N, 5)."""
        return np.frombuffer(self._numbers, dtype=np.int64).reshape(-1, 5)


class Problem(NamedTuple):
    """A file or folder that cannot be looked at, in the words of the table of rejected samples."""

    path: str
    reason: str
    detail: str
    fix: str


@dataclass
class Walk:
    """What lies below one root.

    Attributes:
        images: What may be an image, in no particular order, each file once.
        problems: What would be an image or a folder, and cannot be looked at.
        passed_over: Number of entries by kind: "hidden", "captions", "not_images", "foreign_caches",
            "special", "linked_twice", "broken_links".
        suffixes: Number of files that are no images by lower-case suffix, without the dot.
        captions: Paths of files with the caption suffix; of those beside an image of their name perhaps none.
        foreign_caches: Paths of other trainers' caches.
        links_out: Paths of followed links that lead out of the root.
    """

    images: FoundFiles = field(default_factory=FoundFiles)
    problems: list[Problem] = field(default_factory=list[Problem])
    passed_over: Counter[str] = field(default_factory=Counter[str])
    suffixes: Counter[str] = field(default_factory=Counter[str])
    captions: Paths = field(default_factory=Paths)
    foreign_caches: list[str] = field(default_factory=list[str])
    links_out: list[str] = field(default_factory=list[str])


def walk(root: Path, caption_suffix: str | None = None, *, found: Walk | None = None) -> Walk:
    """Everything below `root`; hidden files and folders are passed over.

    A file or folder is met once, by its identity: what is really in the dataset is met under its own name,
    and a link is followed only to what has not been met. So loops end. A link to a folder that holds the
    dataset is not followed: everything would be below it.

    Args:
        root: The dataset's folder; it may itself be a link.
        caption_suffix: Of sidecar caption files, with its dot; None where there are none.
        found: Filled and handed back, so that another thread can see how far it is; a new one by default.

    Raises:
        DatasetError: `root` is no folder, or cannot be listed.
    """
    require_listable(root)
    walker = _Walker(root, caption_suffix, found or Walk())
    walker.run()
    return walker.walk


def require_listable(root: Path) -> None:
    """Nothing, where `root` is a folder that can be listed.

    Raises:
        DatasetError: It is not.
    """
    try:
        os.scandir(root).close()
    except OSError as err:
        what = f"the dataset cannot be read: {err.strerror}"
        raise DatasetError(what, where=str(root), fix=_fix_of_root(root, err)) from err


def _fix_of_root(root: Path, err: OSError) -> str:
    if isinstance(err, NotADirectoryError):
        return (
            "let datasets[].path name a folder; a listing (.parquet, .jsonl or .csv); or the inside of an "
            "archive, such as zip://::photos.zip"
        )
    if isinstance(err, FileNotFoundError) and "$" in str(root):
        return "write the path out in datasets[].path: variables such as $HOME are not replaced, only ~ is"
    of_windows = "\\" in str(root) or any(len(part) == 2 and part[1] == ":" for part in root.parts)
    if isinstance(err, FileNotFoundError) and of_windows:
        return "correct datasets[].path: that is a path of Windows, and this is none"
    return "correct datasets[].path in the recipe, or make the folder readable"


def is_hidden(name: str) -> bool:
    """Whether a file or folder is passed over for its name."""
    return name[0] == "." or name[-1] == "~" or name in JUNK


def may_be_image(
    found: Walk, path: str, caption_suffix: str | None, looks_like_image: Callable[[str], bool]
) -> bool:
    """Whether a file may be an image; if not, it is counted in `found` as what it is.

    Args:
        found: Of the walk that met it.
        path: Its path below the root.
        caption_suffix: As for `walk`.
        looks_like_image: Asked about the path of a file without a suffix.
    """
    name = path.rpartition("/")[2]
    _, dot, suffix = name.rpartition(".")
    suffix = suffix.lower() if dot else ""
    if suffix in SUFFIXES or (not dot and looks_like_image(path)):
        return True
    found.suffixes[suffix] += 1
    if caption_suffix and name.endswith(caption_suffix):
        found.captions.append(path)
        found.passed_over["captions"] += 1
    elif suffix in FOREIGN_CACHES:
        found.foreign_caches.append(path)
        found.passed_over["foreign_caches"] += 1
    else:
        found.passed_over["not_images"] += 1
    return False


class _Walker:
    """The state of one walk."""

    def __init__(self, root: Path, caption_suffix: str | None, found: Walk) -> None:
        self.walk = found
        self._root = os.fspath(root)
        self._real_root = root.resolve()
        self._caption_suffix = caption_suffix
        self._folders_met = {_identity(parent) for parent in self._real_root.parents}
        self._files_met: set[tuple[int, int]] = set()
        self._links: list[str] = []
        self._following = False

    def run(self) -> None:
        """First all that is really below the root, then its links in the order of their names."""
        self._below("")
        self._following = True
        if self._links:
            self._files_met.update((found.device, found.inode) for found in self.walk.images)
        while self._links:
            self._follow(heapq.heappop(self._links))

    def _below(self, folder: str) -> None:
        """Meet the folder (relative, "" for the root, else ending with a slash) and all below it."""
        pending = [folder]
        while pending:
            folder = pending.pop()
            try:
                identity = _identity(self._root + "/" + folder)
                if identity in self._folders_met:
                    self.walk.passed_over["linked_twice"] += 1
                    continue
                self._folders_met.add(identity)
                with os.scandir(self._root + "/" + folder) as entries:
                    others = entries if self._following else self._plain_files(folder, entries)
                    for entry in others:
                        self._entry(folder, entry, pending)
            except OSError as err:
                detail = f"the folder cannot be listed: {err.strerror}"
                problem = Problem(folder, "unreadable_folder", detail, "make it readable, or move it away")
                self.walk.problems.append(problem)

    def _plain_files(self, folder: str, entries: Iterable[os.DirEntry[str]]) -> Iterator[os.DirEntry[str]]:
        """Meet what most entries are, images and the captions beside them, and give back the others.

        It does what `_entry` does of each, in fewer steps: there may be a hundred thousand. A caption is kept
        only where no image of its name was met here.
        """
        ending = self._caption_suffix or "/"
        has_captions = ending.rpartition(".")[2].lower() not in SUFFIXES
        names, numbers = list[str](), list[int]()
        images, captions = set[str](), set[str]()
        try:
            for entry in entries:
                name = entry.name
                stem, _, suffix = name.rpartition(".")
                is_image = suffix in SUFFIXES
                plain = stem and name[0] != "." and (is_image or (has_captions and name.endswith(ending)))
                if not plain or name in JUNK or not entry.is_file(follow_symlinks=False):
                    yield entry
                elif is_image:
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # it went while the folder was listed
                    names.append(name)
                    numbers += (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)
                    images.add(stem)
                    if len(names) >= _FILES_AT_ONCE:
                        self.walk.images.extend(folder, names, numbers)
                        names, numbers = [], []
                else:
                    captions.add(name.removesuffix(ending))
        finally:  # also where the folder cannot be listed to its end
            self.walk.images.extend(folder, names, numbers)
            self._captions(folder, captions, images)

    def _captions(self, folder: str, captions: set[str], images: set[str]) -> None:
        """Met in a folder: captions and images, by their names without suffixes."""
        if captions:
            suffix = self._caption_suffix or ""
            self.walk.suffixes[suffix.rpartition(".")[2].lower()] += len(captions)
            self.walk.passed_over["captions"] += len(captions)
            self.walk.captions.extend(folder, [stem + suffix for stem in captions - images])

    def _entry(self, folder: str, entry: os.DirEntry[str], pending: list[str]) -> None:
        name = entry.name
        path = folder + name
        if is_hidden(name):
            self.walk.passed_over["hidden"] += 1
        elif entry.is_symlink():
            heapq.heappush(self._links, path)
        elif entry.is_dir(follow_symlinks=False):
            pending.append(path + "/")
        elif not entry.is_file(follow_symlinks=False):
            self.walk.passed_over["special"] += 1
        elif may_be_image(self.walk, path, self._caption_suffix, self._looks_like_image):
            try:
                stat = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                return  # it went while the folder was listed, as if it had never been there
            if self._following and (stat.st_dev, to_int64(stat.st_ino)) in self._files_met:
                self.walk.passed_over["linked_twice"] += 1
            else:
                self._image(path, stat)

    def _looks_like_image(self, path: str) -> bool:
        """By its first bytes, for a file without a suffix, as scrapers leave them."""
        try:
            with open_nonblocking(self._root + "/" + path) as file:
                return sniff(file.read(64)) is not None
        except OSError:
            return False

    def _image(self, path: str, stat: os.stat_result) -> None:
        numbers = _numbers(stat)
        self.walk.images.add(path, numbers)
        self._files_met.add((numbers[4], numbers[3]))

    def _follow(self, path: str) -> None:
        """Meet what the link at `path` leads to, unless it has been met."""
        try:
            stat = Path(self._root, path).stat()
        except OSError as err:
            self._broken_link(path, err)
            return
        identity = (stat.st_dev, to_int64(stat.st_ino))
        if identity in self._folders_met or identity in self._files_met:
            self.walk.passed_over["linked_twice"] += 1
            return
        if S_ISDIR(stat.st_mode):
            self._below(path + "/")
        elif not S_ISREG(stat.st_mode):
            self.walk.passed_over["special"] += 1
            return
        elif may_be_image(self.walk, path, self._caption_suffix, self._looks_like_image):
            self._image(path, stat)
        else:
            return
        if not Path(self._root, path).resolve().is_relative_to(self._real_root):
            self.walk.links_out.append(path)

    def _broken_link(self, path: str, err: OSError) -> None:
        if path.rpartition(".")[2].lower() in SUFFIXES:
            detail = f"the link leads nowhere: {err.strerror}"
            self.walk.problems.append(Problem(path, "broken_link", detail, "repair or remove the link"))
        else:
            self.walk.passed_over["broken_links"] += 1


def _numbers(stat: os.stat_result) -> tuple[int, int, int, int, int]:
    return (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, to_int64(stat.st_ino), to_int64(stat.st_dev))


def _identity(path: str | Path) -> tuple[int, int]:
    stat = Path(path).stat()
    return stat.st_dev, to_int64(stat.st_ino)
