"""A path has the identities of the folder that it names, however it is spelled."""

import itertools
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.storage.addresses import Url
from pipeline.storage.isolation import identity
from pipeline.storage.isolation.identity import Identified, folds_case, identify, mount_table, parse_mounts

NAMES = st.sampled_from(["a", "b", "A", "link", ".", ".."])
SPELLINGS = st.lists(NAMES, max_size=5).map("/".join)


def relation(one: Identified, other: Identified) -> str:
    if one.same(other):
        return "same"
    if one.inside(other):
        return "inside"
    return "contains" if other.inside(one) else "apart"


MIRRORED = {"same": "same", "inside": "contains", "contains": "inside", "apart": "apart"}


@pytest.fixture(scope="module")
def tree():
    """Folders a/b and b/a, links between them, and names that do not exist."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for path in ("a/b", "b/a"):
            (root / path).mkdir(parents=True)
        (root / "link").symlink_to("a")
        (root / "a" / "link").symlink_to("../b")
        (root / "b" / "link").symlink_to(root)
        yield root


def stat_without_inode(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
    """Return the stat of a file system on which all inodes are 0."""
    fields = os.stat(path, follow_symlinks=follow_symlinks)  # noqa: PTH116 - replaces the method of Path
    return os.stat_result([0 if index == 1 else field for index, field in enumerate(fields)])


@given(one=SPELLINGS, other=SPELLINGS, known=st.sampled_from(["inodes and mounts", "inodes", "mounts"]))
def test_L01_relations_agree_with_real_paths_and_are_symmetric(tree: Path, one: str, other: str, known: str):
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "mounts" not in known:
            monkeypatch.setattr(identity, "MOUNT_TABLE", tree / "absent")
        if "inodes" not in known:
            monkeypatch.setattr(Path, "stat", stat_without_inode)
        first, second = identify(f"{tree}/{one}"), identify(f"{tree}/{other}/")
    real, other_real = Path(os.path.realpath(f"{tree}/{one}")), Path(os.path.realpath(f"{tree}/{other}"))
    expected = "apart"
    if real == other_real:
        expected = "same"
    elif real.is_relative_to(other_real):
        expected = "inside"
    elif other_real.is_relative_to(real):
        expected = "contains"
    assert relation(first, second) == expected
    assert relation(second, first) == MIRRORED[expected]


@given(spelling=SPELLINGS, detours=st.lists(st.sampled_from(["", ".", "a/..", "link/.."]), max_size=3))
def test_L01_detours_and_trailing_slashes_change_nothing(tree: Path, spelling: str, detours: list[str]):
    # b/link leads to the root, so "link/.." after it would leave the tree: detours come first, from the root.
    plain = [detour for detour in detours if detour != "link/.."]
    detoured = identify("/".join([str(tree), *plain, spelling, ""]))
    assert relation(detoured, identify(f"{tree}/{spelling}")) == "same"


def test_L01_a_link_to_a_folder_that_does_not_exist_yet_is_resolved(tmp_path: Path):
    (tmp_path / "link").symlink_to("later/cache")
    assert identify(tmp_path / "link").inside(identify(tmp_path / "later"))


def test_I19_a_link_to_itself_does_not_loop(tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    loop = identify(tmp_path / "loop" / "below")
    assert loop.inside(identify(tmp_path))


def test_an_unreadable_folder_is_identified_by_its_name(tmp_path: Path):
    assert identify("/proc/1/nothing/x").inside(identify("/proc/1/nothing"))
    assert not identify(tmp_path / "a").same(identify(tmp_path / "b"))


def test_L01_names_of_missing_folders_are_folded_where_the_file_system_folds_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    upper, lower = tmp_path / "Cache" / "X", tmp_path / "cache"
    assert not identify(upper).inside(identify(lower))
    monkeypatch.setattr(identity, "folds_case", lambda _folder: True)
    assert identify(upper).inside(identify(lower))
    assert identify(tmp_path / "Caf\u00e9").same(identify(tmp_path / "CAFE\u0301"))


def test_a_case_sensitive_file_system_is_recognised_without_writing(tmp_path: Path):
    (tmp_path / "Aa").touch()
    if (tmp_path / "aA").exists():
        pytest.skip("this file system folds case")
    before = tmp_path.stat().st_mtime_ns
    assert not folds_case(tmp_path)
    assert tmp_path.stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["Aa"]


@pytest.mark.parametrize("folds", [True, False])
@pytest.mark.parametrize(
    ("folder", "files"), [("1234", ["Abc", "Xyz"]), ("Abcd", ["1.2"]), ("Abcd", [])], ids=str
)
def test_L01_names_in_the_folder_show_whether_case_is_folded_and_otherwise_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, files: list[str], folds: bool
):
    (tmp_path / folder).mkdir()
    for name in files:
        (tmp_path / folder / name).touch()
    lstat = Path.lstat

    def folding_lstat(path: Path) -> os.stat_result:
        same = [other for other in path.parent.iterdir() if other.name.casefold() == path.name.casefold()]
        return lstat(same[0] if same else path)

    if folds:
        monkeypatch.setattr(Path, "lstat", folding_lstat)
    assert folds_case(tmp_path / folder) == folds


@pytest.mark.skipif(not mount_table(), reason="needs a mount table")
def test_L01_case_is_seen_through_although_inode_numbers_change_at_each_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """FUSE file systems without lasting inode numbers, such as mounts of object stores, may fold case."""
    (tmp_path / "Work" / "Photos").mkdir(parents=True)
    (tmp_path / "Other").mkdir()
    inodes = itertools.count(1)

    def stored(path: Path) -> Path:
        found = tmp_path
        for name in path.relative_to(tmp_path).parts:
            names = {each.casefold(): each for each in os.listdir(found)}  # noqa: PTH208 - Path is patched
            found = found / names.get(name.casefold(), name)
        return found

    def status(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        real = stored(path) if path.is_relative_to(tmp_path) else path
        fields = os.stat(real, follow_symlinks=follow_symlinks)  # noqa: PTH116 - replaces the method of Path
        return os.stat_result([next(inodes) if index == 1 else field for index, field in enumerate(fields)])

    monkeypatch.setattr(Path, "stat", status)
    monkeypatch.setattr(Path, "lstat", lambda path: status(path, follow_symlinks=False))
    photos = identify(tmp_path / "Work" / "Photos")
    assert identify(tmp_path / "work" / "PHOTOS").same(photos)
    assert identify(tmp_path / "WORK" / "photos" / "cache").inside(photos)
    assert photos.inside(identify(tmp_path / "wORK"))
    assert relation(identify(tmp_path / "other"), photos) == "apart"
    assert identify(tmp_path / "work" / "New").same(identify(tmp_path / "Work" / "new"))


@pytest.mark.parametrize(("kind", "folds"), [("vfat", True), ("cifs", True), ("ext4", False), ("xfs", False)])
def test_L01_without_a_name_to_test_the_type_of_the_file_system_shows_whether_case_is_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, folds: bool
):
    folder, table = tmp_path / "1234", tmp_path / "mountinfo"
    folder.mkdir()
    lines = ["27 1 254:0 / / rw - ext4 /dev/vda rw", f"43 27 8:1 / {tmp_path} rw - {kind} /dev/sda1 rw"]
    table.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(identity, "MOUNT_TABLE", table)
    assert folds_case(folder) == folds


def test_a_link_or_hard_link_with_swapped_case_does_not_count_as_folding(tmp_path: Path):
    folder = tmp_path / "Folder"
    folder.mkdir()
    (tmp_path / "fOLDER").symlink_to("Folder")
    assert not folds_case(folder)
    (folder / "a.txt").write_text("x", encoding="utf-8")
    os.link(folder / "a.txt", folder / "A.TXT")
    assert not folds_case(folder)


def test_a_mount_table_is_unescaped_and_the_last_mount_of_a_point_counts():
    text = (
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "41 27 0:40 / /mnt/a\\040b rw - tmpfs tmpfs rw\n"
        "42 27 254:0 /data/photos /mnt/a\\040b rw,relatime shared:3 - ext4 /dev/vda rw\n"
        "43 27 8:1 / /mnt/usb rw - vfat /dev/sda1 rw\n"
    )
    mounts = parse_mounts(text)
    assert set(mounts) == {"/", "/mnt/a b", "/mnt/usb"}
    assert (mounts["/mnt/a b"].device, mounts["/mnt/a b"].root) == ("254:0", "/data/photos")
    assert mounts["/mnt/usb"].kind == "vfat"


def test_L01_bind_mounts_of_parent_folders_are_seen_through_the_mount_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a container, one of two mounts may be a folder inside the other, which their paths do not show."""
    for name in ("data", "cache", "other"):
        (tmp_path / name).mkdir()
    lines = [
        "27 1 254:0 / / rw - ext4 /dev/vda rw",
        f"41 27 254:0 /home/photos {tmp_path}/data rw - ext4 /dev/vda rw",
        f"42 27 254:0 /home/photos/sub/cache {tmp_path}/cache rw - ext4 /dev/vda rw",
        f"43 27 254:1 /home/photos/sub {tmp_path}/other rw - ext4 /dev/vdb rw",
    ]
    table = tmp_path / "mountinfo"
    table.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(identity, "MOUNT_TABLE", table)
    data = identify(tmp_path / "data")
    assert identify(tmp_path / "cache").inside(data)
    assert identify(tmp_path / "cache" / "not" / "there").inside(data)
    assert identify(tmp_path / "data" / "sub" / "cache").same(identify(tmp_path / "cache"))
    assert not identify(tmp_path / "other").inside(data)


def test_without_a_mount_table_folders_are_identified_by_inode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(identity, "MOUNT_TABLE", tmp_path / "absent")
    assert mount_table() == {}
    (tmp_path / "link").symlink_to(".")
    assert identify(tmp_path / "link").same(identify(tmp_path))
    assert identify(tmp_path / "x" / "y").inside(identify(tmp_path / "x"))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("s3://bucket/a", "s3a://bucket/a", "same"),
        ("gs://bucket/a", "gcs://bucket/a", "same"),
        ("http://host/a", "https://host/a", "same"),
        ("sftp://host/a", "ssh://host/a", "same"),
        ("abfs://container/a", "az://container/a", "same"),
        ("abfs://container/a", "abfss://container/a", "same"),
        ("S3://bucket/a", "s3://bucket/a", "same"),
        ("s3://bucket/a", "gs://bucket/a", "apart"),
        ("s3://bucket/a", "s3://other/a", "apart"),
        ("s3://bucket/a/b", "s3://bucket/a", "inside"),
        ("s3://bucket/a", "s3://bucket", "inside"),
        ("memory://a", "memory://", "inside"),
    ],
)
def test_L01_addresses_that_reach_the_same_data_are_the_same_place(one: str, other: str, expected: str):
    assert relation(identify(Url(one)), identify(Url(other))) == expected


def test_L01_the_top_of_a_mounted_file_system_contains_its_other_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("disk", "photos"):
        (tmp_path / name).mkdir()
    lines = [
        f"41 27 8:1 / {tmp_path}/disk rw - ext4 /dev/sda1 rw",
        f"42 27 8:1 /photos {tmp_path}/photos rw - ext4 /dev/sda1 rw",
    ]
    table = tmp_path / "mountinfo"
    table.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(identity, "MOUNT_TABLE", table)
    assert relation(identify(tmp_path / "photos"), identify(tmp_path / "disk")) == "inside"
