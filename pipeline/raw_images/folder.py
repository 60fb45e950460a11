"""Walk a dataset's folder, local or remote, and sort its files into images, captions and everything else."""

from __future__ import annotations

import difflib
import heapq
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import NamedTuple

from pipeline.errors import DatasetError
from pipeline.images.formats import SUFFIXES, sniff
from pipeline.storage.http_client import RedirectRefusedError
from pipeline.storage.regular_files import InsideFolder, open_regular
from pipeline.storage.remote_source import ListedPath, RemoteSource
from pipeline.storage.source import DATASET_KEY, to_int64

JUNK = frozenset(["__macosx", "thumbs.db", "desktop.ini"])
"""Lower-case names that operating systems leave in folders. They count as hidden, like dot files and `name~`
backups."""

# Only names that nobody gives a folder of pictures: "Trash" and "Recycle Bin" may be classes of a dataset.
COPIES = frozenset(
    (
        *("$recycle.bin", "recycler", "system volume information"),  # Windows
        *("network trash folder", "thevolumesettingsfolder", "lost+found"),  # macOS, Linux
        *("#recycle", "#snapshot", "@eadir", "@tmp", "@sharebin"),  # Synology
        *("@recycle", "@recently-snapshot", "@__thumb", "@transcode"),  # QNAP
        *("~snapshot", "trashbox"),  # NetApp, Buffalo
        *("files_trashbin", "files_versions"),  # Nextcloud
        "[originals]",  # ACDSee: pictures before they were edited
    )
)
"""Lower-case names of folders with deleted pictures, snapshots and thumbnails."""

_SNAPSHOT_PREFIX = "@gmt-"
"""Start of the names of Windows' previous versions on Samba shares."""

_PREVIEWS_SUFFIX = ".lrdata"
"""Suffix of Lightroom's folders of previews."""

_APPLE_LIBRARIES = (".photoslibrary", ".photolibrary", ".aplibrary")
"""Suffixes of the folders in which Apple's programs keep originals next to derived pictures."""

_APPLE_COPIES = frozenset(["resources", "thumbnails", "previews", "data.noindex"])
"""Lower-case names of the folders of derived pictures in Apple's libraries."""

FOREIGN_CACHES = frozenset(["npz", "npy", "pt", "pth", "safetensors", "ckpt"])
"""Suffixes of the cache files that other trainers write next to images."""

_IGNORED_NAMES = JUNK | COPIES | _APPLE_COPIES
_IGNORED_STARTS = (".", _SNAPSHOT_PREFIX)
_IGNORED_ENDS = ("~", _PREVIEWS_SUFFIX)

_PLAIN_CAPTIONS = frozenset([".txt", ".caption", ".json"])
"""Caption suffixes that no ignored name has."""

MAX_REMOTE_FOLDERS = 1_000_000
"""Maximum number of folders of a dataset at an address."""

MAX_REMOTE_DEPTH = 64
"""Maximum depth of folders of a dataset at an address."""

_SNIFFED_BYTES = 64
"""Number of leading bytes that `sniff` needs."""


class FoundFile(NamedTuple):
    """A file that may be an image: its path below the root, as the file system spells it, and its stat."""

    path: str
    file_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


class Problem(NamedTuple):
    """A file or folder that cannot be read, with the columns of a rejected sample."""

    path: str
    reason: str
    detail: str
    fix: str


@dataclass
class WalkResult:
    """The files below one root.

    Attributes:
        images: Files that may be images, in no particular order, each file once.
        problems: Files and folders that would belong to the dataset but cannot be read.
        passed_over: Number of other files by kind: "hidden", "captions", "not_images", "foreign_caches",
            "special", "linked_twice", "broken_links", "excluded"; and of folders: "deleted_or_cached".
        suffixes: Number of files that are not images, by lower-case suffix without the dot.
        captions: Paths of the files with a caption suffix.
        foreign_caches: Paths of other trainers' caches.
        deleted_or_cached: Paths of folders with deleted pictures, snapshots and thumbnails.
        links_out: Paths of followed links that lead out of the root.
    """

    images: list[FoundFile] = field(default_factory=list[FoundFile])
    problems: list[Problem] = field(default_factory=list[Problem])
    passed_over: Counter[str] = field(default_factory=Counter[str])
    suffixes: Counter[str] = field(default_factory=Counter[str])
    captions: list[str] = field(default_factory=list[str])
    foreign_caches: list[str] = field(default_factory=list[str])
    deleted_or_cached: list[str] = field(default_factory=list[str])
    links_out: list[str] = field(default_factory=list[str])


def sidecar_path(path: str, suffix: str) -> str:
    """Return the path of an image's caption file: the image's path with its last suffix replaced."""
    return path.removesuffix(last_suffix(path)) + suffix


def last_suffix(path: str) -> str:
    """Return the last suffix with its dot; "" for a name without one, and for a dot file such as `.txt`."""
    name = path.rpartition("/")[2]
    stem, dot, suffix = name.rpartition(".")
    return dot + suffix if stem else ""


def walk_local(
    root: Path,
    caption_suffixes: tuple[str, ...] = (),
    *,
    result: WalkResult | None = None,
    key: str = DATASET_KEY,
) -> WalkResult:
    """Walk everything below `root`, which may be a link, except hidden files and folders.

    Each file or folder is visited once, identified by device and inode. Real files come first, under their
    own names; links are followed afterwards, and only to targets that were not visited yet, so loops end.

    `caption_suffixes` have their dots. `result` is filled, so that another thread can report progress. `key`
    is the recipe key of `root`, for messages.

    Raises:
        DatasetError: `root` is not a folder, or cannot be listed.
    """
    require_listable(root, key)
    walker = _LocalWalker(root, caption_suffixes, result or WalkResult())
    walker.run()
    return walker.result


def walk_remote(
    source: RemoteSource, caption_suffixes: tuple[str, ...] = (), *, result: WalkResult | None = None
) -> WalkResult:
    """Walk a folder that fsspec opens; otherwise as `walk_local`, but links count as special files.

    Raises:
        DatasetError: The address cannot be listed, or it names a file.
    """
    result = result or WalkResult()

    def looks_like_image(path: str) -> bool:
        try:
            return sniff(source.read_start(path, _SNIFFED_BYTES)) is not None
        except OSError:
            return False

    pending = [""]
    num_folders = 0
    while pending:
        folder = pending.pop()
        num_folders += 1
        if num_folders > MAX_REMOTE_FOLDERS or folder.count("/") >= MAX_REMOTE_DEPTH:
            # A web server can invent folders without end.
            what = f"the dataset has more than {MAX_REMOTE_FOLDERS:,} folders, or folders more than "
            what += f"{MAX_REMOTE_DEPTH} deep"
            fix = f"set {source.key} to a folder inside it"
            raise DatasetError(what, where=source.where(folder), fix=fix)
        for entry in _remote_entries(source, folder, result):
            parent, _, name = entry.path.rpartition("/")
            if is_ignored(name, parent or str(source.address)):
                _count_ignored(result, entry.path, name)
                continue
            if entry.is_special:
                result.passed_over["special"] += 1
            elif entry.stat is None:
                pending.append(entry.path)
            elif _may_be_image(result, entry.path, caption_suffixes, looks_like_image):
                result.images.append(FoundFile(entry.path, *entry.stat, device=0))
    return result


def require_listable(root: Path, key: str = DATASET_KEY) -> None:
    """Raise DatasetError unless `root`, the value of `key` in the recipe, is a folder that can be listed."""
    try:
        os.scandir(root).close()
    except OSError as err:
        subject = "the dataset" if key == DATASET_KEY else f"the folder in {key}"
        what = f"{subject} cannot be read: {err.strerror}"
        raise DatasetError(what, where=str(root), fix=_root_fix(root, err, key)) from err


def _root_fix(root: Path, err: OSError, key: str) -> str:
    if isinstance(err, NotADirectoryError):
        manifest = " to a manifest (.parquet, .jsonl or .csv)," if key == DATASET_KEY else ""
        return f"set {key} to a folder,{manifest} or to the inside of an archive, such as zip://::photos.zip"
    if isinstance(err, FileNotFoundError) and "$" in str(root):
        return f"write the full path in {key}: variables such as $HOME are not expanded, only ~ is"
    is_windows_path = "\\" in str(root) or any(len(part) == 2 and part[1] == ":" for part in root.parts)
    if isinstance(err, FileNotFoundError) and is_windows_path:
        return f"correct {key}: it is a Windows path, and this machine does not run Windows"
    if not isinstance(err, FileNotFoundError):
        return f"correct {key} in the recipe, or make the folder readable"

    siblings = [each.name for each in root.parent.iterdir()] if root.parent.is_dir() else []
    closest = difflib.get_close_matches(root.name, siblings, n=1)
    hint = f"did you mean {root.with_name(closest[0])}? Otherwise " if closest else ""
    return f"{hint}correct {key} in the recipe; relative paths start at the project root"


def is_hidden(name: str) -> bool:
    """Return whether a file or folder of this name is hidden or left by an operating system."""
    return name[0] == "." or name[-1] == "~" or name.lower() in JUNK


def holds_copies(name: str, parent: str) -> bool:
    """Return whether a program keeps deleted pictures, snapshots or thumbnails in a folder of this name.

    `parent` is the path or the name of the folder that contains it.
    """
    name = name.lower()
    if name in COPIES or name.startswith(_SNAPSHOT_PREFIX) or name.endswith(_PREVIEWS_SUFFIX):
        return True
    return name in _APPLE_COPIES and parent.rstrip("/").lower().endswith(_APPLE_LIBRARIES)


def is_ignored(name: str, parent: str) -> bool:
    """Return whether a file or folder of this name does not belong to the dataset; see `holds_copies`."""
    # Called for every file of a dataset, and most names are in none of the lists.
    lower = name.lower()
    if (
        lower not in _IGNORED_NAMES
        and not lower.startswith(_IGNORED_STARTS)
        and not lower.endswith(_IGNORED_ENDS)
    ):
        return False
    return is_hidden(name) or holds_copies(name, parent)


def _count_ignored(result: WalkResult, path: str, name: str) -> None:
    if is_hidden(name):
        result.passed_over["hidden"] += 1
    else:
        result.passed_over["deleted_or_cached"] += 1
        result.deleted_or_cached.append(path)


def _may_be_image(
    result: WalkResult, path: str, caption_suffixes: tuple[str, ...], looks_like_image: Callable[[str], bool]
) -> bool:
    """Return True for a possible image; count every other file in `result` by its kind."""
    _, dot, suffix = path.rpartition(".")
    has_suffix = dot and "/" not in suffix
    suffix = suffix.lower() if has_suffix else ""

    # Only files without a suffix are opened, because scrapers leave such images.
    if suffix in SUFFIXES or (not has_suffix and looks_like_image(path)):
        return True

    result.suffixes[suffix] += 1
    if path.endswith(caption_suffixes):
        result.captions.append(path)
        result.passed_over["captions"] += 1
    elif suffix in FOREIGN_CACHES:
        result.foreign_caches.append(path)
        result.passed_over["foreign_caches"] += 1
    else:
        result.passed_over["not_images"] += 1
    return False


def _remote_entries(source: RemoteSource, folder: str, result: WalkResult) -> list[ListedPath]:
    try:
        return source.list_folder(folder)
    except DatasetError as err:
        # An unreadable subfolder becomes a problem, as in a local folder.
        if not folder or not isinstance(err.__cause__, (PermissionError, RedirectRefusedError)):
            raise
        detail = f"the folder cannot be listed: {err.__cause__}"
        result.problems.append(Problem(f"{folder}/", "unreadable_folder", detail, "make it readable"))
        return []


class _LocalWalker:
    def __init__(self, root: Path, caption_suffixes: tuple[str, ...], result: WalkResult) -> None:
        self.result = result
        self._root = os.fspath(root)
        self._real_root = root.resolve()
        self._caption_suffixes = caption_suffixes
        self._plain_suffixes = SUFFIXES | {each[1:] for each in caption_suffixes if each in _PLAIN_CAPTIONS}

        # A link to a folder that contains the dataset is not followed: everything would be below it.
        self._visited_folders = {_identity(parent.stat()) for parent in self._real_root.parents}
        self._visited_files: set[tuple[int, int]] = set()
        self._links: list[str] = []  # a heap: links are followed in the order of their names
        self._follows_links = False

        # Folders that another process exchanges for links during the walk are not entered.
        self._inside = self._inside_root = InsideFolder(self._root)

        # Below a followed link, paths start with the link's path, and the files are in `_inside` below
        # `_target`.
        self._link, self._target = "", ""

    def run(self) -> None:
        # Real files first, so that a file has its own name and not the name of a link.
        self._visit_folder("")
        self._follows_links = True

        # Real files are met once in any case, so only links need the identities of all files.
        if self._links:
            self._visited_files = {(image.device, image.inode) for image in self.result.images}
        while self._links:
            self._follow(heapq.heappop(self._links))

    def _visit_folder(self, folder: str) -> None:
        """Visit a folder and everything below it: "" is the root, and other paths end in a slash."""
        pending = [folder]
        while pending:
            folder = pending.pop()
            try:
                with self._inside.listing(self._real(folder).rstrip("/")) as descriptor:
                    identity = _identity(os.fstat(descriptor))
                    if identity in self._visited_folders:
                        self.result.passed_over["linked_twice"] += 1
                        continue
                    self._visited_folders.add(identity)
                    with os.scandir(descriptor) as entries:
                        self._visit_entries(folder, entries, pending)
            except OSError as err:
                detail = f"the folder cannot be listed: {err.strerror}"
                problem = Problem(folder, "unreadable_folder", detail, "make it readable, or move it away")
                self.result.problems.append(problem)

    def _visit_entries(self, folder: str, entries: Iterable[os.DirEntry[str]], pending: list[str]) -> None:
        captions, suffixes = list[str](), list[str]()
        for entry in entries:
            name = entry.name
            stem, _, suffix = name.rpartition(".")

            # Nearly all files are images and captions. Here they need half of the calls of `_visit_entry`: no
            # ignored name has such a suffix, except the ones with these first characters.
            is_plain = suffix in self._plain_suffixes and stem and stem[0] not in ".@"
            if not is_plain or not entry.is_file(follow_symlinks=False):
                self._visit_entry(folder, entry, pending)
            elif suffix in SUFFIXES:
                self._visit_image(folder + name, entry)
            else:
                captions.append(folder + name)
                suffixes.append(suffix)

        if captions:
            self.result.captions += captions
            self.result.passed_over["captions"] += len(captions)
            self.result.suffixes.update(suffixes)

    def _visit_entry(self, folder: str, entry: os.DirEntry[str], pending: list[str]) -> None:
        name = entry.name
        path = folder + name
        if is_ignored(name, folder or self._root):
            _count_ignored(self.result, path, name)
        elif not entry.is_file(follow_symlinks=False):
            if entry.is_symlink():
                heapq.heappush(self._links, path)
            elif entry.is_dir(follow_symlinks=False):
                pending.append(path + "/")
            # Reading a FIFO could block forever (FAILURES I25).
            else:
                self.result.passed_over["special"] += 1
        elif _may_be_image(self.result, path, self._caption_suffixes, self._looks_like_image):
            self._visit_image(path, entry)

    def _visit_image(self, path: str, entry: os.DirEntry[str]) -> None:
        try:
            stat = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return  # deleted during the walk, as if it had never existed
        if self._follows_links and _identity(stat) in self._visited_files:
            self.result.passed_over["linked_twice"] += 1
        else:
            self._add_image(path, stat)

    def _real(self, path: str) -> str:
        """Return the path below `_inside` of a file or folder."""
        return self._target + path.removeprefix(self._link)

    def _looks_like_image(self, path: str) -> bool:
        return _starts_like_image(lambda: self._inside.open(self._real(path)))

    def _add_image(self, path: str, stat: os.stat_result) -> None:
        mtime_ns, ctime_ns, inode, device = stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev
        if (mtime_ns | ctime_ns | inode | device) >> 63:  # negative or large numbers are rare
            mtime_ns, ctime_ns, inode, device = map(to_int64, (mtime_ns, ctime_ns, inode, device))
        self.result.images.append(FoundFile(path, stat.st_size, mtime_ns, ctime_ns, inode, device))
        if self._follows_links:
            self._visited_files.add(_identity(stat))

    def _follow(self, path: str) -> None:
        # Resolved once: another process may exchange the link before the target is visited, or meanwhile.
        try:
            target = Path(os.path.realpath(f"{self._root}/{path}"))
            stat = target.stat()
        except OSError as err:
            self._add_broken_link(path, err)
            return

        identity = _identity(stat)
        if identity in self._visited_folders or identity in self._visited_files:
            self.result.passed_over["linked_twice"] += 1
            return
        is_inside = target.is_relative_to(self._real_root)
        if S_ISDIR(stat.st_mode):
            self._link = f"{path}/"
            self._inside = self._inside_root if is_inside else InsideFolder(target)
            self._target = f"{target.relative_to(self._real_root)}/" if is_inside else ""
            self._visit_folder(self._link)
        elif not S_ISREG(stat.st_mode):
            self.result.passed_over["special"] += 1
            return
        elif _may_be_image(
            self.result,
            path,
            self._caption_suffixes,
            lambda _: _starts_like_image(lambda: open_regular(target)),
        ):
            self._add_image(path, stat)
        else:
            return

        if not is_inside:
            self.result.links_out.append(path)

    def _add_broken_link(self, path: str, err: OSError) -> None:
        if path.rpartition(".")[2].lower() in SUFFIXES:
            detail = f"the link's target cannot be read: {err.strerror}"
            self.result.problems.append(Problem(path, "broken_link", detail, "repair or remove the link"))
        else:
            self.result.passed_over["broken_links"] += 1


def _starts_like_image(open_file: Callable[[], io.BufferedReader]) -> bool:
    try:
        with open_file() as file:
            return sniff(file.read(_SNIFFED_BYTES)) is not None
    except OSError:
        return False


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return to_int64(stat.st_dev), to_int64(stat.st_ino)
