"""Members of an archive are read up to their stated size, whatever they unpack to."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from pipeline.errors import DatasetError
from pipeline.storage.addresses import Url
from pipeline.storage.regular_files import RefusedFileError
from pipeline.storage.remote_source import RemoteSource
from tests.hostile_images import png
from tests.pipeline.dataset_folder import Folder, picture

BOMB_BYTES = 7_500_000_000

_READ = """
import json, re, sys
from pathlib import Path
from pipeline.storage.addresses import Url
from pipeline.storage.remote_source import RemoteSource
source = RemoteSource(Url(sys.argv[1]))
try:
    result = len(source.read(sys.argv[2]))
except OSError as err:
    result = f"{type(err).__name__}: {err}"
peak_mb = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1000
print(json.dumps([result, peak_mb]))
"""


def write_bomb(archive: Path, *, stated: int) -> None:
    """Write an archive with a good image and a member of zeros, for which it states another size."""
    # A full flush makes blocks independent, so that one of them can be repeated.
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = deflate.compress(bytes(10**6)) + deflate.flush(zlib.Z_FULL_FLUSH)
    packed = block * (BOMB_BYTES // 10**6) + deflate.flush()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("good.png", picture(0))
        file.writestr("bomb.png", packed)
    data = bytearray(archive.read_bytes())

    # The local header and the directory both hold method, time, checksum, and both sizes.
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        header = data.rindex(signature)
        struct.pack_into("<H", data, header + offset, zipfile.ZIP_DEFLATED)
        struct.pack_into("<II", data, header + offset + 10, len(packed), stated)
    archive.write_bytes(data)


@pytest.fixture(scope="module")
def lying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive whose bomb of 7.5 GB claims to have 1,000 bytes."""
    archive = tmp_path_factory.mktemp("archive") / "lying.zip"
    write_bomb(archive, stated=1_000)
    return archive


@pytest.mark.timeout(120)
def test_a_member_that_is_larger_than_stated_is_refused_within_the_memory(lying: Path) -> None:
    assert lying.stat().st_size < 8_000_000
    process = subprocess.run(
        [sys.executable, "-c", _READ, f"zip://::{lying}", "bomb.png"],
        capture_output=True,
        text=True,
        check=True,
    )
    result, peak_mb = json.loads(process.stdout)
    assert "UnreachableError: BadZipFile: Bad CRC-32" in result
    assert peak_mb < 300


def test_only_the_lying_member_of_an_archive_is_rejected(folder: Folder, lying: Path) -> None:
    folder.dataset = {"path": f"zip://::{lying}"}
    result = folder.scan()
    assert result.table["path"].to_list() == ["good.png"]
    assert result.rejected.select("path", "reason").rows() == [("bomb.png", "unreadable")]


def test_a_member_above_the_limit_is_refused_from_its_stated_size(folder: Folder, tmp_path: Path) -> None:
    write_bomb(tmp_path / "honest.zip", stated=2**32 - 10)
    with pytest.raises(RefusedFileError, match="got 4,294,967,286"):
        RemoteSource(Url(f"zip://::{tmp_path / 'honest.zip'}")).read("bomb.png")
    folder.dataset = {"path": f"zip://::{tmp_path / 'honest.zip'}"}
    result = folder.scan()
    assert result.rejected.select("path", "reason").rows() == [("bomb.png", "file_too_large")]
    assert "checks.max_file_bytes" in result.rejected["fix"].item()


def test_an_image_in_an_archive_that_needs_too_much_memory_is_rejected(
    folder: Folder, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("good.png", picture(0))
        file.writestr("good.txt", "a rose")
        file.writestr("deep.png", png())
        file.writestr("deep.txt", "a bomb")
    (tmp_path / "bomb.zip").write_bytes(buffer.getvalue())
    folder.dataset = {"path": f"zip://::{tmp_path / 'bomb.zip'}"}
    result = folder.ingest()
    assert result.table["path"].to_list() == ["good.png"]
    assert result.rejected.select("path", "reason").rows() == [("deep.png", "too_much_memory")]


def test_a_damaged_archive_is_an_error_with_a_fix(folder: Folder, lying: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.zip").write_bytes(lying.read_bytes()[:1_000])
    folder.dataset = {"path": f"zip://::{tmp_path / 'cut.zip'}"}
    with pytest.raises(DatasetError, match="BadZipFile") as caught:
        folder.scan()
    assert caught.value.fix
