"""The job of a machine that joins a training: on its disk, or at an address."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from pipeline.errors import TrainingError
from pipeline.storage.addresses import Url
from pipeline.trained_lora.joining import local_job_file, require_local_files

FILES = {"order.json": b"{}", "inputs.parquet": b"PAR1"}


@pytest.fixture
def address() -> Url:
    files = fsspec.filesystem("memory")
    for name, data in FILES.items():
        files.pipe_file(f"/runs/0123/{name}", data)
    return Url("memory://runs/0123")


@pytest.mark.parametrize("end", ["", "/order.json"])
def test_a_job_at_an_address_is_copied(address: Url, tmp_path: Path, end: str) -> None:
    file = local_job_file(Url(address + end), tmp_path, rank=1)
    assert file == tmp_path / "order.json"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == FILES


def test_a_job_on_a_disk_is_used_where_it_is(tmp_path: Path) -> None:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    for path in (tmp_path, tmp_path / "order.json"):
        assert local_job_file(path, tmp_path / "unused", rank=0) == tmp_path / "order.json"


def test_a_missing_job_is_an_error(address: Url, tmp_path: Path) -> None:
    for job in (Url("memory://runs/4567"), tmp_path):
        with pytest.raises(TrainingError, match="does not exist at this path or address") as caught:
            local_job_file(job, tmp_path / "copy", rank=1)
        assert "copy order.json and inputs.parquet" in caught.value.fix


def test_machine_0_writes_into_the_folder_so_it_needs_it_on_a_disk(address: Url, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="machine 0 needs the run's folder on a disk"):
        local_job_file(address, tmp_path, rank=0)


@pytest.mark.parametrize("missing", ["base", "vae", "training adapter", "cache"])
def test_a_model_or_cache_that_this_machine_lacks_is_an_error(tmp_path: Path, missing: str) -> None:
    paths = {name: tmp_path / name for name in ("base", "vae", "training adapter", "cache")}
    for name, path in paths.items():
        if name != missing:
            path.mkdir()
    job = {
        "base": str(paths["base"]),
        "elsewhere": {"vae": str(paths["vae"])},
        "training_adapter": str(paths["training adapter"]),
        "recipe": {"cache_dir": str(paths["cache"])},
    }
    file = tmp_path / "order.json"
    file.write_text(json.dumps(job), encoding="utf-8")
    with pytest.raises(TrainingError, match=f"the {missing}.* does not exist on this machine") as caught:
        require_local_files(file)
    assert caught.value.where == str(paths[missing])

    paths[missing].mkdir()
    require_local_files(file)
    file.write_text(json.dumps({**job, "recipe": {"cache_dir": "s3://bucket/cache"}}), encoding="utf-8")
    require_local_files(file)
