from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cli.main import latentline
from pipeline.errors import TrainingError
from pipeline.models.families import detect
from pipeline.recipe import PreviewPrompt, ReferenceSettings
from pipeline.recipe.schema import ComponentSources
from pipeline.storage.tables import frame, validated, write_rows
from pipeline.trained_lora import provenance as module
from pipeline.trained_lora.export.lora_files import PROVENANCE_KEY, SAMPLES_FILE, read_provenance
from pipeline.trained_lora.export.metadata import header_metadata
from pipeline.trained_lora.fingerprint import run_facts, run_id
from pipeline.trained_lora.provenance import caption_hash, find_in_provenance, provenance, shareable

if TYPE_CHECKING:
    from tests.pipeline.trained_lora.project import Project


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def trained_on(*rows: tuple[str, str, str]) -> pl.DataFrame:
    """Return a trained_lora table from (path, image content, split) rows, with two captions per sample."""
    values: list[dict[str, Any]] = []
    for name, content, split in rows:
        captions = " ".join(caption_hash(f"{content} {number}") for number in (1, 2))
        text = {"dataset": "photos", "path": name, "bucket": "64x64", "latent_keys": "l", "text_keys": "t"}
        image = {"content_hash": sha256(content), "height": 64, "width": 64, "caption_hashes": captions}
        values.append({"sample_id": f"photos/{name}", **text, **image, "split": split, "times_seen": 3})
    return frame("trained_lora", values)


TABLE = trained_on(("a.png", "rose", "train"), ("b.png", "oak", "train"), ("c.png", "fern", "validation"))


def record_of(project: Project, table: pl.DataFrame = TABLE) -> dict[str, Any]:
    job, entries = project.job(), RecipeEntries(project.recipe)
    return provenance(project.recipe, entries, run_facts(project.recipe, entries, job.inputs), table)


def write_lora(folder: Path, record: dict[str, Any], *, table: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "pytorch_lora_weights.safetensors"
    save_file({"a": np.zeros(1, np.float32)}, path, metadata={PROVENANCE_KEY: json.dumps(record)})
    if table:
        TABLE.write_parquet(folder / SAMPLES_FILE)
    return path


@pytest.fixture
def lora(make_project: Callable[..., Project], tmp_path: Path) -> Path:
    return write_lora(tmp_path / "lora", record_of(make_project()))


def call(*arguments: object) -> Result:
    return CliRunner().invoke(latentline, ["provenance", *map(str, arguments)])


def test_the_record_is_complete_and_contains_no_absolute_paths(
    make_project: Callable[..., Project],
) -> None:
    project = make_project()
    record = record_of(project)
    assert json.loads(json.dumps(record)) == record
    assert record["samples"]["images"] == sorted([sha256("rose"), sha256("oak")])
    assert len(record["samples"]["captions"]) == 4
    assert len(record["model"]["fingerprints"]["text"]) == 64
    assert record["tables_sha256"]["aspect_buckets"] is not None
    assert record["recipe"]["training"]["steps"] == 6
    assert str(project.recipe.output_dir.parent) not in json.dumps(record)
    assert record == record_of(project)
    assert "captions" not in record, "no model has captioned the samples"


def test_H05_no_key_of_the_recipe_publishes_a_folder(
    make_project: Callable[..., Project], tmp_path: Path
) -> None:
    project = make_project(
        datasets={"photos": {"mask": {"path": str(tmp_path / "masks")}}},
        lora={"rank": 4, "start_from": str(tmp_path / "first.safetensors")},
    )
    recipe = project.recipe
    references = (ReferenceSettings(path=tmp_path / "before"), ReferenceSettings(column="style"))
    dataset = recipe.datasets[0].model_copy(update={"references": references})
    prompt = PreviewPrompt(prompt="night", references=(tmp_path / "day.png",))
    training = recipe.training.model_copy(update={"sample_prompts": (prompt,)})
    components = ComponentSources.model_validate({"vae": str(tmp_path / "vae")})
    model = recipe.model.model_copy(update={"components": components})
    edits = recipe.model_copy(update={"datasets": (dataset,), "training": training, "model": model})

    values = shareable(edits)
    assert str(tmp_path) not in json.dumps(values)
    assert values["datasets"][0]["path"] == "photos"
    assert values["datasets"][0]["mask"]["path"] == "masks"
    assert [each["path"] for each in values["datasets"][0]["references"]] == ["before", None]
    assert values["training"]["lora"]["start_from"] == "first.safetensors"
    assert values["training"]["sample_prompts"][0]["references"] == ["day.png"]
    assert values["model"]["components"]["vae"] == "vae"


def test_R15_the_header_names_the_base_model_without_its_folder(make_project: Callable[..., Project]) -> None:
    job = make_project().job()
    assert header_metadata(job, detect(job.base))["ss_sd_model_name"] == "epsilon"


def test_large_runs_store_only_a_digest_of_their_samples(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project = make_project()
    few = record_of(project)
    monkeypatch.setattr(module, "MAX_LISTED", 1)
    many = record_of(project)
    assert set(many["samples"]) == {"number", "sha256"}
    assert many["samples"]["sha256"] == few["samples"]["sha256"]
    other = record_of(project, trained_on(("a.png", "rose", "train"), ("b.png", "elm", "train")))
    assert other["samples"]["sha256"] != few["samples"]["sha256"]
    image = tmp_path / "found.png"
    image.write_bytes(b"rose")
    path = write_lora(tmp_path / "lora", many)
    assert find_in_provenance(many, path, image) == ["sample photos/a.png, seen 3 times"]
    (path.parent / SAMPLES_FILE).unlink()
    with pytest.raises(TrainingError, match="only a digest of its 2 samples"):
        find_in_provenance(many, path, image)


def test_references_are_part_of_the_record_and_are_found_by_their_content(
    make_project: Callable[..., Project], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project = make_project()
    hashes = [f"{sha256('day')} {sha256('style')}", None, sha256("fern before")]
    keys = ["k l", None, "m"]
    table = TABLE.with_columns(reference_keys=pl.Series(keys), reference_hashes=pl.Series(hashes))
    record = record_of(project, validated("trained_lora", table, "a test"))
    assert record["samples"]["references"] == sorted([sha256("day"), sha256("style")])
    assert record["samples"]["sha256"] != record_of(project)["samples"]["sha256"]
    assert record["samples"]["images"] == record_of(project)["samples"]["images"]

    style = tmp_path / "style.png"
    style.write_bytes(b"style")
    path = write_lora(tmp_path / "lora", record)
    table.write_parquet(path.parent / SAMPLES_FILE)
    matches = [f"{style} is one of the reference images", "sample photos/a.png, seen 3 times"]
    assert find_in_provenance(record, path, style) == matches
    monkeypatch.setattr(module, "MAX_LISTED", 1)
    assert find_in_provenance(record_of(project, table), path, style) == matches[1:]


def test_the_command_accepts_a_file_its_folder_or_the_output_folder(lora: Path) -> None:
    completed = call(lora)
    assert completed.exit_code == 0
    assert call(lora.parent).output == call(lora.parent.parent).output == completed.output
    for label in (
        "recipe",
        "demo",
        "base model",
        "epsilon",
        "sha256 of denoiser",
        "table vae_latents",
        "torch",
    ):
        assert label in completed.output
    assert json.loads(call(lora, "--json").output) == read_provenance(lora)


def test_the_command_accepts_a_recipe_and_prints_its_settings_first(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    text = f"datasets: [{{name: p, path: {tmp_path}/p}}]\noutput_dir: {tmp_path}\nmodel: {{base: a/b}}\n"
    (tmp_path / "configs" / "roses.yaml").write_text(text, "utf-8")
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path / "configs"))
    monkeypatch.chdir(tmp_path / "configs")
    completed = call("roses")
    assert completed.output == call(lora).output
    values = {line[:20].strip(): line[20:].strip() for line in completed.output.splitlines()}
    first = ["recipe", "run", "base model", "images", "steps", "rank, alpha", "optimizer", "resolution"]
    assert list(values)[: len(first)] == first
    assert (values["run"], values["rank, alpha"]) == (run_id(read_provenance(lora)["facts"]), "4, 2.0")
    assert values["optimizer"] == "adamw, 0.01, constant"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("rose", ["one of the training images", "sample photos/a.png, seen 3 times"]),
        ("oak 2", ["one of the training captions", "sample photos/b.png"]),
        ("\ufeffoak 2\n", ["one of the training captions", "sample photos/b.png"]),
    ],
)
def test_an_image_or_caption_is_found_by_its_hash(
    lora: Path, tmp_path: Path, content: str, expected: list[str]
) -> None:
    query = tmp_path / "query"
    query.write_text(content, encoding="utf-8")
    completed = call(lora, "--find", query)
    assert completed.exit_code == 0
    assert [each for each in expected if each not in completed.output] == [], completed.output


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_L07_a_lookup_in_a_damaged_table_is_an_error_with_a_fix(
    lora: Path, tmp_path: Path, damage: str
) -> None:
    query, table = tmp_path / "query", lora.parent / "samples.parquet"
    query.write_text("rose", encoding="utf-8")
    with table.open("w+b") as file:
        write_rows(TABLE, file)
    sound = table.read_bytes()
    flipped = bytearray(sound)
    flipped[len(sound) // 3] ^= 1
    damaged = {"flip": bytes(flipped), "cut": sound[: len(sound) // 2], "empty": b"", "foreign": b"text"}
    table.write_bytes(damaged[damage])
    completed = call(lora, "--find", query)
    assert isinstance(completed.exception, TrainingError), completed.output
    assert completed.exception.where == str(table)
    assert completed.exception.fix


@pytest.mark.parametrize("content", [b"fern", b"elm", b"\xff\x00"])
def test_a_lookup_without_a_match_exits_with_1(lora: Path, tmp_path: Path, content: bytes) -> None:
    query = tmp_path / "query"
    query.write_bytes(content)
    completed = call(lora, "--find", query)
    assert completed.exit_code == 1
    assert "the LoRA was not trained on" in completed.output


def test_a_file_without_a_record_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"a": np.zeros(1, np.float32)}, path)
    with pytest.raises(TrainingError, match="lacks a provenance record"):
        read_provenance(path)
    path.write_bytes(b"torn")
    with pytest.raises(TrainingError, match="the LoRA file cannot be read"):
        read_provenance(path)


@pytest.mark.timeout(60)
def test_a_pipe_or_an_endless_device_is_not_looked_up(lora: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("fifo", "link"):
        completed = call(lora, "--find", tmp_path / name)
        assert isinstance(completed.exception, TrainingError)
        assert "not a regular file" in completed.exception.what
        assert completed.exception.where == str(tmp_path / name)
        assert "--find" in completed.exception.fix


@pytest.mark.timeout(60)
def test_a_pipe_is_no_lora_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    with pytest.raises(TrainingError, match="cannot be read: it is not a regular file"):
        read_provenance(tmp_path / "fifo.safetensors")


@pytest.mark.parametrize(
    "record",
    ["", "[]", "7", "{}", "[" * 100_000, '{"recipe": 1, "model": [], "samples": null}', '{"samples": {}}'],
)
@pytest.mark.parametrize("options", [[], ["--find"]])
def test_a_crafted_record_is_an_error_with_a_fix(tmp_path: Path, record: str, options: list[str]) -> None:
    path = tmp_path / "crafted.safetensors"
    save_file({"a": np.zeros(1, np.float32)}, path, {PROVENANCE_KEY: record})
    completed = call(path, *options, *([path] if options else []))
    assert isinstance(completed.exception, TrainingError)
    assert completed.exception.what.startswith("the provenance record is damaged")
    assert completed.exception.where == str(path)
    assert len(completed.exception.what) < 600
