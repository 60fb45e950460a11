"""Images in WebDataset shards and in columns of Parquet files are unpacked once, and never by half."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from PIL import Image

from pipeline.errors import DatasetError, RecipeError, StoreError
from pipeline.images.decode import hash_bytes
from pipeline.log import discard
from pipeline.raw_images.scan_fingerprint import scan_fingerprint
from pipeline.raw_images.shards import unpack_shards
from pipeline.raw_images.unpack_process import unpack_shard
from pipeline.raw_images.walk import require_readable
from pipeline.recipe import Recipe
from pipeline.recipe.isolation import check_isolation
from pipeline.recipe.overrides import with_overrides
from pipeline.recipe.packed import unpacked_folder
from tests.hub_server import HubRepository, hub_server
from tests.pipeline.dataset_folder import Folder, picture
from tests.pipeline.raw_images.shard_case import hub_row, parquet_bytes, put, samples, tar_bytes
from tests.remote_folders import published_in_bucket

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project is a new folder, so that its scratch folder is too."""
    monkeypatch.setenv("LATENTLINE_PROJECT", str(tmp_path))
    return tmp_path


@pytest.fixture
def data(folder: Folder) -> Path:
    return folder.root


def tar(folder: Folder, pattern: str = "*.tar") -> None:
    folder.dataset = {"path": f"{folder.root}/{pattern}"}


def parquet(folder: Folder, pattern: str = "*.parquet", **dataset: Any) -> None:
    folder.dataset = {"path": f"{folder.root}/{pattern}", "image_column": "image", **dataset}
    folder.captions = {"from": "column", "columns": ["text"]}


def unpacked(recipe: Recipe) -> Path:
    return unpacked_folder(recipe.datasets[0])


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def captions_of(folder: Folder) -> dict[str, str]:
    return dict(folder.ingest().table.select("sample_id", "caption").rows())


def test_samples_of_several_tar_shards_have_the_captions_next_to_them(folder: Folder, data: Path) -> None:
    put(data, "train-0.tar", tar_bytes({**samples("a", "b"), "a.json": b'{"width": 40}'}))
    put(data, "train-1.tar", tar_bytes(samples("./deep/c")))
    put(data, "test-0.tar", tar_bytes(samples("z")))
    tar(folder, "train-*.tar")

    assert captions_of(folder) == {
        "d/train-0/a.png": "caption of a",
        "d/train-0/b.png": "caption of b",
        "d/train-1/deep/c.png": "caption of ./deep/c",
    }
    hashes = folder.tables.read("raw_images")["content_hash"]
    assert hashes[0] == hash_bytes(picture(sum(b"a")))


def test_rows_of_parquet_shards_have_the_captions_in_their_column(folder: Folder, data: Path) -> None:
    put(data, "train-0.parquet", parquet_bytes([hub_row("a", score=1), hub_row("b", score=9)]))
    put(data, "train-1.parquet", parquet_bytes([hub_row("c", score=8)]))
    parquet(folder, filters={"where": "score > 5"})

    assert captions_of(folder) == {
        "d/train-0/00000001.png": "caption of b",
        "d/train-1/00000000.png": "caption of c",
    }
    raw = folder.tables.read("raw_images")
    assert raw["content_hash"].to_list() == [hash_bytes(picture(sum(each))) for each in (b"a", b"b", b"c")]
    report = folder.scan().report
    assert report["datasets"]["d"]["path"] == f"{data}/*.parquet"


def test_masks_in_a_column_of_images_belong_to_their_rows(folder: Folder, data: Path) -> None:
    grey = io.BytesIO()
    Image.new("L", (40, 24), 128).save(grey, "PNG")
    rows = [hub_row("a", mask={"bytes": grey.getvalue(), "path": None}), hub_row("b", mask=None)]
    put(data, "train.parquet", parquet_bytes(rows))
    parquet(folder, mask={"column": "mask"})

    kept = folder.ingest().table
    assert kept["mask_path"].to_list() == ["train/00000000-1.png"]
    assert folder.tables.read_rejected("validated_dataset")["reason"].to_list() == ["mask_missing"]


def test_rows_without_an_image_are_rejected_and_the_others_kept(folder: Folder, data: Path) -> None:
    rows = [
        {"image": None, "text": "none"},
        {"image": {"bytes": None, "path": "elsewhere.png"}, "text": "a path alone"},
        {"image": {"bytes": b"these are words", "path": None}, "text": "words"},
        hub_row("a"),
    ]
    put(data, "train.parquet", parquet_bytes(rows))
    parquet(folder)

    result = folder.scan()
    reasons = dict(result.rejected.select("path", "reason").rows())
    assert reasons == {
        "train/00000000.bin": "empty_file",
        "train/00000001.bin": "empty_file",
        "train/00000002.bin": "not_an_image",
    }
    assert (result.report["in"], result.report["kept"]) == (4, 1)


def test_a_shard_is_unpacked_once_and_again_after_a_change(folder: Folder, data: Path) -> None:
    put(data, "0.tar", tar_bytes(samples("a")))
    path = put(data, "1.tar", tar_bytes(samples("b")))
    tar(folder)
    folder.scan()
    files = unpacked(folder.recipe) / "files"
    before = {each: each.stat().st_ino for each in sorted(files.iterdir())}
    folder.scan()
    assert {each: each.stat().st_ino for each in sorted(files.iterdir())} == before

    stat = path.stat()
    path.write_bytes(tar_bytes(samples("c")))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    folder.scan()
    assert (files / "0").stat().st_ino == before[files / "0"]
    assert [each.name for each in sorted((files / "1").iterdir())] == ["c.png", "c.txt"]

    path.unlink()
    assert folder.scan().table["sample_id"].to_list() == ["d/0/a.png"]
    assert [each.name for each in files.iterdir()] == ["0"]


def test_unpacked_files_that_have_changed_are_unpacked_again(folder: Folder, data: Path) -> None:
    put(data, "0.tar", tar_bytes(samples("a", "b")))
    tar(folder)
    unpack_shards(folder.recipe, log=discard)
    files = unpacked(folder.recipe) / "files" / "0"
    expected = contents(files)

    def swap() -> None:
        (files / "a.txt").rename(files / "x")
        (files / "b.txt").rename(files / "a.txt")
        (files / "x").rename(files / "b.txt")

    damages: list[Callable[[], object]] = [
        lambda: (files / "a.txt").write_bytes(b""),
        (files / "a.png").unlink,
        lambda: (files / "d.png").write_bytes(picture(4)),
        swap,
    ]
    for damage in damages:
        damage()
        assert contents(files) != expected
        unpack_shards(folder.recipe, log=discard)
        assert contents(files) == expected


def test_rows_of_a_changed_parquet_shard_replace_the_former_ones(folder: Folder, data: Path) -> None:
    put(data, "0.parquet", parquet_bytes([hub_row("a")]))
    put(data, "1.parquet", parquet_bytes([hub_row("b")]))
    parquet(folder)
    assert len(captions_of(folder)) == 2
    put(data, "1.parquet", parquet_bytes([hub_row("c"), hub_row("d")]))
    assert list(captions_of(folder).values()) == ["caption of a", "caption of c", "caption of d"]
    (data / "0.parquet").unlink()
    assert list(captions_of(folder).values()) == ["caption of c", "caption of d"]


def special(kind: bytes, name: str = "a.png", target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


HOSTILE: dict[str, tuple[bytes, str]] = {
    "parent": (tar_bytes({"../a.png": picture(1)}), "'../a.png' leads out of the archive"),
    "inner parent": (tar_bytes({"a/../../a.png": picture(1)}), "leads out of the archive"),
    "absolute": (tar_bytes({"/tmp/a.png": picture(1)}), "'/tmp/a.png' leads out"),
    "symlink": (tar_bytes([special(tarfile.SYMTYPE, target="/etc")]), "'a.png' is a link, a device"),
    "hard link": (tar_bytes([special(tarfile.LNKTYPE, target="b.png")]), "'a.png' is a link, a device"),
    "device": (tar_bytes([special(tarfile.CHRTYPE)]), "'a.png' is a link, a device"),
    "fifo": (tar_bytes([special(tarfile.FIFOTYPE)]), "'a.png' is a link, a device"),
    "twice": (
        tar_bytes([(tarfile.TarInfo("a.png"), b"1"), (tarfile.TarInfo("./a.png"), b"2")]),
        "is in the archive twice",
    ),
    "cut": (tar_bytes(samples("a", "b"))[:2560], "does not end as a tar archive"),
    "cut and padded": (tar_bytes(samples("a"))[:1024] + bytes(1024), "unexpected end of data"),
    "no archive": (b"<html>" + bytes(2000), "damaged|cannot be unpacked"),
    "large": (tar_bytes({"a.png": bytes(70_000)}), "it must have at most 60,000 bytes, got 71,680"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_I34_a_hostile_or_damaged_shard_is_refused_by_name_and_writes_nothing(
    folder: Folder, data: Path, project: Path, name: str
) -> None:
    content, message = HOSTILE[name]
    put(data, "good.tar", tar_bytes(samples("a")))
    path = put(data, "hostile.tar", content)
    tar(folder)
    folder.checks = {"max_file_bytes": 60_000} if name == "large" else {}
    before = {each for each in project.rglob("*.png") if "scratch" not in each.parts}
    with pytest.raises(DatasetError, match=message) as excinfo:
        folder.scan()
    assert excinfo.value.where == str(path)
    files = unpacked(folder.recipe) / "files"
    assert [each.name for each in files.iterdir() if not each.name.startswith(".")] == ["good"]
    assert {each for each in project.rglob("*.png") if "scratch" not in each.parts} == before


def test_a_sparse_member_of_a_terabyte_is_refused(folder: Folder, data: Path) -> None:
    sparse = data / "sparse"
    data.mkdir(exist_ok=True)
    with sparse.open("wb") as file:
        file.truncate(2**40)
    subprocess.run(["tar", "-cSf", "a.tar", "sparse"], cwd=data, check=True)
    sparse.unlink()
    tar(folder)
    with pytest.raises(DatasetError, match="special file"):
        folder.scan()


def test_a_parquet_file_that_expands_beyond_reason_is_refused(
    folder: Folder, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.raw_images.unpack_process.MIN_TABLE_BYTES", 400_000_000)
    rows = pl.DataFrame({"image": [bytes(5_000_000)], "text": ["a"]})
    rows = pl.concat([rows] * 200)
    data.mkdir(exist_ok=True)
    rows.write_parquet(data / "a.parquet", row_group_size=5)
    assert (data / "a.parquet").stat().st_size < 2_000_000
    parquet(folder)
    with pytest.raises(DatasetError, match=r"much larger than the shard|too much memory"):
        folder.scan()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"picture": b"1", "text": "a"}], "has no column 'image'; its columns are 'picture', 'text'"),
        ([{"image": "a.png", "text": "a"}], "the column 'image' must hold images, got String"),
        ([{"image": [b"1"], "text": "a"}], "the column 'image' must hold images, got List"),
    ],
)
def test_a_column_without_images_is_named(
    folder: Folder, data: Path, rows: list[dict[str, Any]], message: str
) -> None:
    put(data, "a.parquet", parquet_bytes(rows))
    parquet(folder)
    with pytest.raises(DatasetError, match=message):
        folder.scan()


def test_a_damaged_parquet_shard_is_refused_by_name(folder: Folder, data: Path) -> None:
    content = parquet_bytes([hub_row("a")])
    put(data, "a.parquet", content[: len(content) // 2])
    parquet(folder)
    with pytest.raises(DatasetError, match=r"cannot be unpacked") as excinfo:
        folder.scan()
    assert excinfo.value.where.endswith("a.parquet")


def test_a_name_that_is_not_utf8_rejects_its_sample_alone(folder: Folder, data: Path) -> None:
    put(data, "a.tar", tar_bytes({**samples("a"), "\udcff.png": picture(1)}))
    tar(folder)
    result = folder.scan()
    assert result.table["sample_id"].to_list() == ["d/a/a.png"]
    assert result.rejected["reason"].to_list() == ["name_undecodable"]


def test_no_match_is_an_error_before_anything_is_written(folder: Folder, data: Path) -> None:
    data.mkdir(exist_ok=True)
    tar(folder, "tain-*.tar")
    with pytest.raises(DatasetError, match=r"no file matches tain-\*\.tar"):
        require_readable(folder.recipe.datasets[0], packed=folder.recipe.packed["d"])
    with pytest.raises(DatasetError, match=r"no file matches tain-\*\.tar"):
        folder.scan()
    assert not unpacked(folder.recipe).exists()


def test_a_disk_with_too_little_space_is_an_error_before_unpacking(
    folder: Folder, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(data, "a.tar", tar_bytes(samples("a")))
    tar(folder)
    usage = SimpleNamespace(total=10**9, used=10**9, free=2**26)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match="bytes free for the images of dataset d, got 67,108,864"):
        folder.scan()
    assert list((unpacked(folder.recipe) / "files").iterdir()) == []


def test_the_size_and_the_free_space_are_logged_before_unpacking(folder: Folder, data: Path) -> None:
    put(data, "a.tar", tar_bytes(samples("a")))
    tar(folder)
    folder.scan()
    (line,) = [each for each in folder.log if "unpacking" in each]
    assert line.startswith("note: unpacking 1 shard of 0.00 GB of d to ")
    assert line.endswith(" GB free)")


def test_a_change_of_a_shard_changes_the_fingerprint_of_the_sensor(folder: Folder, data: Path) -> None:
    put(data, "a.tar", tar_bytes(samples("a")))
    put(data, "other.txt", b"not a shard")
    tar(folder)
    packed = folder.recipe.packed["d"]
    before = scan_fingerprint([packed])
    put(data, "other.txt", b"changed")
    assert scan_fingerprint([packed]) == before
    put(data, "b.tar", tar_bytes(samples("b")))
    added = scan_fingerprint([packed])
    put(data, "b.tar", tar_bytes(samples("c")))
    assert len({before, added, scan_fingerprint([packed])}) == 3


def test_shards_inside_of_an_output_and_a_cache_in_the_unpacked_folder_are_conflicts(
    folder: Folder, data: Path
) -> None:
    put(folder.output_dir / "lora", "a.tar", tar_bytes(samples("a")))
    folder.dataset = {"path": str(folder.output_dir / "lora" / "a.tar")}
    assert any("output_dir contains dataset d" in each.what() for each in check_isolation(folder.recipe))

    put(data, "a.tar", tar_bytes(samples("a")))
    tar(folder)
    assert [each.what() for each in check_isolation(folder.recipe) if "cache_dir" not in each.what()] == []
    inside = unpacked(folder.recipe) / "files"
    recipe = folder.recipe.model_copy(update={"cache_dir": inside})
    assert any("unpacked images of d" in each.what() for each in check_isolation(recipe))


def test_a_recipe_with_shards_can_be_stored_and_loaded_again(folder: Folder, data: Path) -> None:
    parquet(folder)
    recipe = folder.recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert str(recipe.packed["d"]) == f"{data}/*.parquet"
    assert with_overrides(recipe, {"steps": 7}).datasets == recipe.datasets
    assert with_overrides(recipe, {"steps": 7}).packed == recipe.packed


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"path": "p/*.parquet"}, r"a path with \* requires image_column"),
        ({"path": "photos", "image_column": "image"}, "image_column requires Parquet files, got path photos"),
        ({"path": "a.jsonl", "image_column": "image"}, "image_column requires Parquet files"),
        (
            {"path": "a.parquet", "image_column": "image", "images": "b"},
            "images cannot be used with image_col",
        ),
        ({"path": "a.parquet", "image_column": "i", "path_column": "p"}, "path_column cannot be used with"),
        ({"path": "a.tar", "image_column": "image"}, "image_column requires Parquet files"),
        ({"path": "a.tar", "filters": {"where": "x > 1"}}, r"filters\.where requires a manifest"),
    ],
)
def test_keys_that_contradict_each_other_are_mistakes(
    folder: Folder, dataset: dict[str, Any], message: str
) -> None:
    folder.dataset = dataset
    with pytest.raises(RecipeError, match=message):
        _ = folder.recipe


KILLED = """\
import os, signal, sys
from pathlib import Path
from pipeline.log import discard
from pipeline.raw_images import shards
from pipeline.recipe import Recipe
from pipeline.raw_images.shards import unpack_shards
num, at = 0, int(sys.argv[2])
def counted(call):
    def killed(*args, **kwargs):
        global num
        num += 1
        if num == at:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        num += 1
        if num == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return killed
for name in ("unpack_shard", "scan_fingerprint", "write_text", "write_atomically"):
    setattr(shards, name, counted(getattr(shards, name)))
os.sync = counted(os.sync)
Path.rename = counted(Path.rename)
Path.unlink = counted(Path.unlink)
shards.shutil.rmtree = counted(shards.shutil.rmtree)
unpack_shards(Recipe.model_validate_json(Path(sys.argv[1]).read_text()), log=discard)
print("complete")
"""


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_I35_a_kill_at_any_point_leaves_nothing_that_is_taken_for_complete(
    folder: Folder, data: Path, tmp_path: Path, step: int
) -> None:
    """Each kill follows the former one, and a shard changes in between, so also replacements are killed."""
    file = tmp_path / "recipe.json"
    put(data, "1.parquet", parquet_bytes([hub_row("constant")]))
    parquet(folder)
    file.write_text(folder.recipe.model_dump_json())
    is_complete, num_killed = False, 0
    while not is_complete:
        row = hub_row(f"{num_killed} first")
        put(data, "0.parquet", parquet_bytes([row]))
        process = subprocess.run(
            [sys.executable, "-c", KILLED, str(file), str(1 + num_killed * step)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        is_complete = process.stdout == "complete\n"
        assert is_complete or process.returncode == -signal.SIGKILL, process.stderr

        unpack_shards(folder.recipe, log=discard)
        assert contents(unpacked(folder.recipe) / "files")["0/00000000.png"] == row["image"]["bytes"]
        manifest = pl.read_parquet(unpacked(folder.recipe) / "manifest.parquet")
        assert manifest["text"].to_list() == [row["text"], "caption of constant"]
        num_killed += not is_complete
    assert num_killed * step > 8


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubRepository]:
    with hub_server(monkeypatch) as server:
        yield server


def test_shards_on_the_hub_are_of_one_commit(folder: Folder, repository: HubRepository) -> None:
    first = [parquet_bytes([hub_row(key)]) for key in "ab"]
    commit = repository.push({f"data/train-{n}.parquet": each for n, each in enumerate(first)})
    parquet(folder)
    folder.dataset["path"] = "hf://datasets/anna/flowers/data/train-*.parquet"
    assert list(captions_of(folder).values()) == ["caption of a", "caption of b"]
    assert repository.requested == {commit}
    assert folder.scan().report["kept"] == 2
    assert len([line for line in folder.log if "unpacking" in line]) == 1

    # Only the shard that differs in the new commit is unpacked again.
    log = len(folder.log)
    second = repository.push({"data/train-0.parquet": first[0], "data/train-1.parquet": parquet_bytes([])})
    repository.push({"data/train-0.parquet": first[0], "data/train-1.parquet": parquet_bytes([hub_row("c")])})
    assert list(captions_of(folder).values()) == ["caption of a", "caption of c"]
    assert [line for line in folder.log[log:] if "unpacking 1 shard" in line]
    assert second not in repository.requested


def test_shards_in_a_bucket_are_downloaded_in_parts_that_are_repeated(
    folder: Folder, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del s3
    monkeypatch.setattr("pipeline.storage.remote_source.MAX_BUFFERED_BYTES", 1000)
    put(folder.root, "a.tar", tar_bytes(samples("a", "b")))
    remote = published_in_bucket(folder.root)
    expected = samples("a", "b")
    shutil.rmtree(folder.root)
    folder.dataset = {"path": f"{remote.address}/*.tar"}
    unpack_shards(folder.recipe, log=discard)
    assert contents(unpacked(folder.recipe) / "files" / "a") == expected


def test_two_recipes_with_the_same_shards_share_the_unpacked_files(folder: Folder, data: Path) -> None:
    put(data, "a.tar", tar_bytes(samples("a")))
    tar(folder)
    first = unpacked(folder.recipe)
    unpack_shards(folder.recipe, log=discard)
    folder.output_dir = folder.output_dir.with_name("other")
    assert unpacked(folder.recipe) == first
    log: list[str] = []
    unpack_shards(folder.recipe, log=log.append)
    assert log == []


def test_later_stages_on_another_machine_unpack_what_is_missing_there(folder: Folder, data: Path) -> None:
    path = put(data, "a.tar", tar_bytes(samples("a")))
    tar(folder)
    unpack_shards(folder.recipe, log=discard, only_new=True)
    files = unpacked(folder.recipe) / "files" / "a"
    assert contents(files) == samples("a")

    # Unpacked once, they are read without the shards, as entries of the cache are.
    path.unlink()
    unpack_shards(folder.recipe, log=discard, only_new=True)
    with pytest.raises(DatasetError, match="no file matches"):
        unpack_shards(folder.recipe, log=discard)


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_I35_later_stages_unpack_the_shards_that_an_interrupted_unpacking_left(
    folder: Folder, data: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "tar":
        tar(folder)
        shards = {f"{key}.tar": tar_bytes(samples(key)) for key in "abc"}
    else:
        parquet(folder)
        shards = {f"{key}.parquet": parquet_bytes([hub_row(key)]) for key in "abc"}
    for name, content in shards.items():
        put(data, name, content)
    num_unpacked = 0

    def interrupted(*args: Any, **kwargs: Any) -> None:
        nonlocal num_unpacked
        if num_unpacked == 2:
            raise KeyboardInterrupt
        num_unpacked += 1
        unpack_shard(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("pipeline.raw_images.shards.unpack_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            unpack_shards(folder.recipe, log=discard, only_new=True)
    log: list[str] = []
    unpack_shards(folder.recipe, log=log.append, only_new=True)
    assert ["unpacking 1 shard" in line for line in log] == [True]
    files = unpacked(folder.recipe) / "files"
    assert sorted(each.name for each in files.iterdir()) == ["a", "b", "c"]

    # The files of one shard that somebody deleted.
    shutil.rmtree(files / "b")
    log.clear()
    unpack_shards(folder.recipe, log=log.append, only_new=True)
    assert ["unpacking 1 shard" in line for line in log] == [True]
    unpack_shards(folder.recipe, log=log.append, only_new=True)
    assert len(log) == 1
