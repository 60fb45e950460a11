"""Captions by several processes, by workers that share only the cache, and after a kill."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.captions.stage import caption_images
from pipeline.encoding.collecting import encode_on_workers
from pipeline.encoding.shard import encode_shard
from pipeline.encoding.shared_encoding import Shard, SharedEncoding
from pipeline.errors import LaunchError, ModelError
from pipeline.processes.launch import LocalLaunch, Meanwhile, launch_environment
from pipeline.recipe import AccelerateSettings
from pipeline.storage.tables import Tables
from tests.in_process_worker import InProcessLaunch, run
from tests.pipeline.captions.conftest import Captioned, picture

NUM_WORKERS = 2


def quiet(_: str) -> None: ...


def entry_bytes(project: Captioned) -> dict[str, bytes]:
    cache = project.recipe().cache_dir
    assert isinstance(cache, Path)
    return {path.name: path.read_bytes() for path in cache.rglob("*.safetensors")}


def caption(project: Captioned, launch: Any, **captions: Any) -> Any:
    recipe = project.recipe(**captions)
    return caption_images(recipe, project.raw(recipe), Tables(recipe.output_dir), launch=launch, log=quiet)


def on_workers(before: Callable[[], object] = lambda: None) -> Callable[..., None]:
    """Return a `Launch` with two workers that have only the cache in common; `before` is called first."""

    def work(encoding: SharedEncoding, num_shards: int) -> Sequence[str]:
        for index in range(num_shards):
            shard = Shard(index, num_shards)
            encode_shard(SharedEncoding(encoding.address), shard, log=quiet, launch=InProcessLaunch())
        return []

    def launch(module: str, encoding_file: Path, meanwhile: Meanwhile) -> None:
        meanwhile()
        before()
        encode_on_workers(encoding_file, work, max_workers=NUM_WORKERS, cpu_threads=2, log=quiet)

    return launch


def in_two_ranks(module: str, encoding_file: Path, meanwhile: Meanwhile) -> None:
    meanwhile()
    for rank in range(2):
        run(encoding_file, InProcessLaunch(), rank=rank, num_ranks=2)


@pytest.fixture
def alone(captioned: Captioned) -> dict[str, bytes]:
    """Return the entries that one process writes, of a project without entries."""
    picture(7, 20, 50).save(captioned.images / "d.png")
    assert caption(captioned, InProcessLaunch()).report["encoded"] == 4
    entries = entry_bytes(captioned)
    shutil.rmtree(captioned.folder / "cache")
    return entries


@pytest.mark.parametrize("launch", [on_workers(), in_two_ranks], ids=["workers", "ranks"])
def test_two_workers_and_two_ranks_write_the_entries_of_one_process(
    captioned: Captioned, alone: dict[str, bytes], launch: Any
) -> None:
    assert caption(captioned, launch).report["encoded"] == 4
    assert entry_bytes(captioned) == alone


@pytest.mark.slow
def test_two_processes_of_accelerate_write_the_entries_of_one_process(
    captioned: Captioned, alone: dict[str, bytes]
) -> None:
    launch = LocalLaunch(AccelerateSettings(num_processes=2))
    assert caption(captioned, launch).report["encoded"] == 4
    assert entry_bytes(captioned) == alone


def test_workers_tag_images_too(captioned: Captioned, captioner: Callable[[str], Path]) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    captioned.captions = {"from": "model", "model": str(captioner("tagger")), "tagger": {"threshold": 0.1}}
    assert caption(captioned, on_workers()).report["encoded"] == 3


def test_a_worker_without_the_model_or_with_another_one_names_the_key(
    captioned: Captioned, captioner: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(captioner("idefics3"), copy)
    with pytest.raises(ModelError, match="the captioning model is not on this worker") as missing:
        caption(captioned, on_workers(lambda: shutil.rmtree(copy)), model=str(copy))
    assert "set captions.model to a Hub id" in missing.value.fix

    shutil.copytree(captioner("idefics3"), copy)

    def replace_model() -> None:
        shutil.copytree(captioner("blip2"), copy, dirs_exist_ok=True)

    with pytest.raises(ModelError, match=r"the captioning model of this worker .* differs") as changed:
        caption(captioned, on_workers(replace_model), model=str(copy))
    assert "captions.revision" in changed.value.fix


def test_a_killed_captioner_is_continued_where_it_ended(captioned: Captioned) -> None:
    num_images = 40
    for seed in range(3, num_images):
        picture(seed).save(captioned.images / f"{seed:02}.png")
    captioned.captions |= {"max_tokens": 40}
    killed: list[int] = []

    def kill_after_first_entry(module: str, encoding_file: Path, meanwhile: Meanwhile) -> None:
        meanwhile()
        environment = launch_environment(AccelerateSettings(), encoding_file.with_name("error.json"))
        process = subprocess.Popen([sys.executable, "-m", module, str(encoding_file)], env=environment)
        while not entry_bytes(captioned) and process.poll() is None:
            time.sleep(0.005)
        process.kill()
        killed.append(process.wait())
        raise LaunchError("killed", where=module, fix="start again")

    with pytest.raises(LaunchError, match="killed"):
        caption(captioned, kill_after_first_entry)
    assert killed == [-9]
    num_written = len(entry_bytes(captioned))
    assert 1 <= num_written < num_images

    report = caption(captioned, InProcessLaunch()).report
    assert (report["encoded"], report["reused"]) == (num_images - num_written, num_written)
    assert (report["damaged"], report["failed"]) == (0, 0)
