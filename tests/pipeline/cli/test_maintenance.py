"""The commands plan, explain, verify, pack and gc."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from pipeline.cache.recipe_entries import RecipeEntries
from pipeline.cli.main import latentline
from pipeline.encoding.speed import record_speed
from pipeline.errors import LatentlineError, PathIsolationError, RecipeError, TrainingError
from pipeline.validated_dataset.stage import validate
from tests.pipeline.cached_job import Job
from tests.pipeline.packs_case import pack_everything
from tests.pipeline.used_case import forget_use, make_old, use

OLD_S = 1_000_000_000


@pytest.fixture
def cli(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    configs = tmp_path / "configs"
    configs.mkdir()
    text = f"""\
datasets: [{{name: photos, path: {tmp_path}/photos}}]
cache_dir: {tmp_path}/cache
output_dir: {tmp_path}/out
model: {{base: {job.recipe.model.base}}}
buckets: {{resolution: 64, step: 16}}
"""
    (configs / "sample.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(configs))

    def call(*arguments: str) -> Result:
        # Only the tests of the memory forecast need it; it loads torch in another process.
        if arguments[0] == "plan" and "--only-memory" not in arguments:
            arguments = (*arguments, "--no-memory")
        return CliRunner().invoke(latentline, arguments)

    return call


def test_plan_shows_counts_names_bytes_and_seconds(cli: Any, job: Job) -> None:
    assert "5 to reuse         0 to encode" in cli("plan", "sample").stdout
    job.entry("vae_latents").unlink()
    completed = cli("plan", "sample")
    assert completed.exit_code == 0
    assert "4 to reuse         1 to encode   2.56 kB, about" in completed.stdout
    assert "entry missing: 1 (photos/cat.png)" in completed.stdout
    as_json = json.loads(cli("plan", "sample", "--json").stdout)
    assert as_json["latents_to_make"] == 1
    assert as_json["latents"]["reasons"] == {"entry missing": ["photos/cat.png"]}
    assert not job.entry("vae_latents").exists()


def test_plan_shows_what_training_would_do_its_time_and_its_price(cli: Any, job: Job) -> None:
    lines = cli("plan", "sample", "--price", "2.5").stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("trained_lora "))
    assert re.fullmatch(r"trained_lora     1,000 steps to train: run [0-9a-f]{16} is new", lines[start])
    assert lines[start + 1].strip() == "it is the first run of this recipe"
    assert lines[start + 2].strip() == (
        "time unknown until a training of this base model has run on this machine"
    )
    assert lines[-1] == "whole job: time and cost are unknown, because one of the times above is"

    # Two hours for 1,000 steps of one image.
    fingerprint = RecipeEntries(job.recipe).fingerprint("denoiser")
    sizes = job.tables.read("vae_latents").select(pl.col("target_height") * pl.col("target_width"))
    pixels = float(sizes.to_series().mean())  # pyright: ignore[reportArgumentType] - it is a number
    record_speed(job.recipe.cache_dir, f"training of {fingerprint[:16]}", 7200 / 1000 / pixels)
    lines = cli("plan", "sample", "--price", "2.5").stdout.splitlines()
    assert lines[start + 2].strip() == (
        "about 2.0 h, estimated from a training of this base model with another recipe"
    )
    assert lines[-1] == "whole job: about 2.0 h, 5.00 at 2.5 per hour"
    as_json = json.loads(cli("plan", "sample", "--json", "--price", "2.5").stdout)
    assert (as_json["seconds"], as_json["cost"]) == (pytest.approx(7200), pytest.approx(5))
    assert as_json["training"]["action"]["kind"] == "new"
    assert as_json["training"]["duration"]["seconds"] == pytest.approx(7200)


def test_plan_shows_warnings_with_their_fixes(cli: Any, job: Job) -> None:
    assert "warning" not in cli("plan", "sample").stdout
    folder = job.recipe.datasets[0].path
    text = (folder / "cat.txt").read_text("utf-8")
    for name in ("camera", "coffee"):
        (folder / f"{name}.txt").write_text(text, "utf-8")
    lines = cli("plan", "sample").stdout.splitlines()
    (number,) = [number for number, line in enumerate(lines) if line.startswith("warning: ")]
    assert lines[number].startswith("warning: validated_dataset, captions_repeated: ")
    assert lines[number + 1].startswith("  fix: ")


def test_plan_first_shows_gates_that_would_close_and_their_fixes(cli: Any, job: Job) -> None:
    (job.recipe.datasets[0].path / "cat.txt").write_text(" ", encoding="utf-8")
    completed = cli("plan", "sample")
    assert completed.exit_code == 1
    assert "the job would stop at validated_dataset, before anything is encoded:" in completed.stdout
    assert "captions_present: 1 image has no caption" in completed.stdout
    assert "fix: " in completed.stdout
    as_json = cli("plan", "sample", "--json")
    assert as_json.exit_code == 1
    assert {gate["name"] for gate in json.loads(as_json.stdout)["closed"]} == {
        "captions_present",
        "rejected_fraction",
    }


@pytest.mark.parametrize("name", ["plan", "validate"])
def test_a_start_of_another_rank_is_an_error(cli: Any, tmp_path: Path, name: str) -> None:
    recipe, start = tmp_path / "configs" / "sample.yaml", tmp_path / "start.safetensors"
    shapes = {"lora_down": (3, 6), "lora_up": (8, 3)}
    save_file({f"lora_unet_x.{key}.weight": np.ones(shape) for key, shape in shapes.items()}, start)
    with recipe.open("a", encoding="utf-8") as file:
        file.write(f"training: {{lora: {{rank: 4, start_from: {start}}}}}\n")
    completed = cli(name, "sample")
    assert isinstance(completed.exception, TrainingError)
    assert "it has rank 3 instead of 4" in str(completed.exception)


@pytest.mark.parametrize("name", ["plan", "validate"])
def test_a_preview_prompt_that_the_base_model_cannot_draw_is_an_error(
    cli: Any, tmp_path: Path, name: str
) -> None:
    with (tmp_path / "configs" / "sample.yaml").open("a", encoding="utf-8") as file:
        file.write("training: {sample_prompts: [{prompt: a cat, height: 63, width: 64}]}\n")
    completed = cli(name, "sample")
    assert isinstance(completed.exception, RecipeError)
    assert "height and width must be multiples of 8" in str(completed.exception)


@pytest.mark.parametrize("name", ["plan", "explain", "verify"])
def test_L01_no_command_writes_into_a_dataset_that_holds_the_cache(
    cli: Any, job: Job, tmp_path: Path, name: str
) -> None:
    dataset, recipe = job.recipe.datasets[0].path, tmp_path / "configs" / "sample.yaml"
    text = recipe.read_text("utf-8")
    recipe.write_text(text.replace(f"{tmp_path}/cache", f"{dataset}/cache"), encoding="utf-8")
    before = sorted(dataset.rglob("*"))
    completed = cli(name, "sample", *(["cat"] if name == "explain" else []))
    assert sorted(dataset.rglob("*")) == before
    if name != "plan":
        assert isinstance(completed.exception, PathIsolationError)
        return
    assert completed.exit_code == 1
    assert (
        "sample: the job would stop at raw_images, before any work:\n  path_isolation: " in completed.stdout
    )
    assert "    fix: " in completed.stdout
    (gate,) = json.loads(cli("plan", "sample", "--json").stdout)["closed"]
    assert gate["name"] == "path_isolation"


def test_explain_prints_every_stage(cli: Any) -> None:
    completed = cli("explain", "sample", "cat")
    assert completed.exit_code == 0
    assert '"a cat that looks at the camera"' in completed.stdout
    assert json.loads(cli("explain", "sample", "cat", "--json").stdout)["latents entry"]["state"] == "valid"


def test_explain_is_short_by_default_and_full_adds_hashes(cli: Any) -> None:
    short, full = cli("explain", "sample", "cat").stdout, cli("explain", "sample", "cat", "--full").stdout
    assert len(short.splitlines()) < 40 < len(full.splitlines())
    assert "bucket (height x width)" in short
    assert "--full" in short
    assert not re.search(r"content_hash|inode|made of|^  key ", short, re.MULTILINE)
    assert re.search(r"content_hash +\"[0-9a-f]{64}", full)


def test_explain_first_states_whether_a_sample_is_used_or_why_not(cli: Any, job: Job) -> None:
    first_line = cli("explain", "sample", "cat").stdout.splitlines()[0]
    assert first_line == "photos/cat.png: used for training; its cache entries are valid, not trained on yet"

    job.entry("vae_latents").unlink()
    first_line = cli("explain", "sample", "cat").stdout.splitlines()[0]
    assert first_line.endswith("1 of 2 cache entries missing or damaged; the next job encodes them")

    (job.recipe.datasets[0].path / "cat.txt").write_text(" ", encoding="utf-8")
    validated = validate(job.recipe, job.tables.read("raw_images"), job.tables, log=print)
    job.keep("validated_dataset", validated)
    what, fix, stage, *_ = cli("explain", "sample", "cat").stdout.splitlines()
    assert what.startswith("photos/cat.png: rejected by validated_dataset, ")
    assert fix.startswith("fix: ")
    assert stage == "rejected"


def test_explain_as_json_keeps_every_row_of_a_stage(cli: Any, job: Job) -> None:
    text = job.tables.read("text_embeddings")
    further = text.with_columns(variant=pl.lit(1, pl.Int32), caption=pl.lit("a tabby"))
    job.tables.write("text_embeddings", pl.concat([text, further]))
    explanation = json.loads(cli("explain", "sample", "cat", "--json").stdout)
    assert explanation["text_embeddings"]["variant"] == 0
    assert explanation["text_embeddings (2)"]["caption"] == "a tabby"


def test_verify_exits_with_1_and_shows_the_file_and_the_fix(cli: Any, job: Job) -> None:
    assert cli("verify", "sample").exit_code == 0
    path = job.entry("vae_latents")
    path.write_bytes(path.read_bytes()[:-1])
    completed = cli("verify", "sample")
    assert completed.exit_code == 1
    assert f"photos/cat.png: expected 2560 bytes, got 2559 bytes\n    {path}" in completed.stdout
    assert "latentline verify sample --repair" in completed.stderr


@pytest.mark.slow
def test_verify_repairs_in_a_separate_process(cli: Any, job: Job) -> None:
    path = job.entry("text_embeddings")
    sound = path.read_bytes()
    path.write_bytes(sound[:-1])
    completed = cli("verify", "sample", "--repair")
    assert (completed.exit_code, "repaired 1 of 1" in completed.stdout) == (0, True), completed.output
    assert path.read_bytes() == sound
    assert cli("verify", "sample").exit_code == 0


def drop_cat(job: Job) -> Path:
    """Delete an image, let all lists of used entries expire, and run the job; return the image's latent."""
    path = job.entry("vae_latents")
    for suffix in (".png", ".txt"):
        (job.recipe.datasets[0].path / f"cat{suffix}").unlink()
    forget_use(job.recipe.cache_dir)
    job.run()
    return path


def test_L13_gc_deletes_nothing_without_its_option(cli: Any, job: Job) -> None:
    path = drop_cat(job)
    assert "2 kept, because jobs record what they use only since" in cli("gc").stdout
    os.utime(job.recipe.cache_dir / "used" / "since", (OLD_S, OLD_S))
    assert "2 not used but written in the last 30 days: kept" in cli("gc").stdout
    os.utime(path, (OLD_S, OLD_S))
    completed = cli("gc")
    assert completed.exit_code == 0
    assert "9 used in the last 30 days" in completed.stdout
    assert "1 not used, 2.56 kB" in completed.stdout
    assert "2 old lists of used entries" in completed.stdout
    assert "nothing was deleted" in completed.stdout
    assert path.exists()
    assert "deleted 3 files" in cli("gc", "--delete").stdout
    assert not path.exists()
    assert cli("verify", "sample").exit_code == 0


def test_L13_gc_can_keep_only_what_the_recipes_need(cli: Any, job: Job, tmp_path: Path) -> None:
    path = drop_cat(job)
    make_old(job.recipe.cache_dir, lists_too=True)
    assert "0 used in the last 30 days" in cli("gc").stdout
    listing = cli("gc", "--keep", "0d")
    assert "9 needed by recipes of this project, or used in the last 6 h" in listing.stdout, listing.output

    (tmp_path / "configs" / "broken.yaml").write_text("datasets: [")
    completed = cli("gc", "--keep", "0d", "--delete")
    assert isinstance(completed.exception, RecipeError)
    assert "nothing was deleted, because a recipe with mistakes may need entries: broken" in str(
        completed.exception
    )
    (tmp_path / "configs" / "broken.yaml").unlink()
    assert path.exists()
    cli("gc", "--keep", "0d", "--delete")
    assert not path.exists()
    assert cli("verify", "sample").exit_code == 0
    make_old(job.recipe.cache_dir)
    assert "9 used in the last 30 days" in cli("gc").stdout, "gc has recorded what the recipes need"


def test_L13_gc_finds_the_entries_of_recipes_without_their_tables(cli: Any, job: Job) -> None:
    make_old(job.recipe.cache_dir)
    use(job.recipe.cache_dir, ["ab" * 32])
    shutil.rmtree(job.recipe.output_dir / "tables")
    assert "11 needed by recipes" in cli("gc", "--keep", "0d").stdout
    assert "0 not used" in cli("gc", "--keep", "0d").stdout


def test_a_cache_that_recorded_no_use_yet_is_kept(cli: Any, job: Job) -> None:
    shutil.rmtree(job.recipe.cache_dir / "used")
    for path in job.recipe.cache_dir.rglob("*"):
        os.utime(path, (OLD_S, OLD_S))
    assert "11 kept, because no job has recorded yet which entries it uses" in cli("gc").stdout
    assert "nothing was deleted" not in cli("gc").stdout


def test_gc_shows_where_a_damaged_pack_is_and_what_to_do(cli: Any, job: Job) -> None:
    pack_everything(job.recipe.cache_dir)
    pack = next((job.recipe.cache_dir / "packs" / "text").glob("*.pack"))
    pack.write_bytes(b"damaged")
    shown = cli("gc").stdout
    assert f"the header of a pack is damaged: {pack}. Its entries count as missing." in shown
    assert "Then delete this file." in shown


def test_I27_gc_rejects_a_folder_that_is_not_a_cache(cli: Any, tmp_path: Path) -> None:
    foreign_folder = tmp_path / "mine"
    foreign_folder.mkdir()
    (foreign_folder / "render.tmp").write_text("of hours")
    os.utime(foreign_folder / "render.tmp", (OLD_S, OLD_S))
    completed = cli("gc", "--delete", "--cache-dir", str(foreign_folder))
    assert isinstance(completed.exception, LatentlineError)
    assert "not a cache: the folder holds only 1 file of other programs" in completed.exception.what
    assert (foreign_folder / "render.tmp").exists()
    (foreign_folder / "render.tmp").unlink()
    assert cli("gc", "--cache-dir", str(foreign_folder)).exit_code == 0, "a new cache is empty"


def add_run(output_dir: Path, name: str, *, changed_s: float) -> Path:
    """Create the folder of an unfinished run with 2 + 1,000 bytes in files."""
    folder = output_dir / "runs" / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"x" * 1000)
    for path in folder.iterdir():
        os.utime(path, (changed_s, changed_s))
    return folder


def test_gc_deletes_old_runs_only_with_both_options(cli: Any, job: Job) -> None:
    output_dir = job.recipe.output_dir
    oldest, newest = (add_run(output_dir, digit * 16, changed_s=OLD_S + int(digit)) for digit in ("1", "2"))
    cli("gc", "--delete")
    assert oldest.exists(), "without --keep-runs, no run is deleted"

    listing = cli("gc", "--keep-runs", "1")
    assert listing.exit_code == 0
    assert f"{output_dir / 'runs'}: 2 runs, 2 kB" in listing.stdout
    assert re.search(rf"{newest.name} +1 kB .*2001-09-0[89].* unfinished +kept: newest", listing.stdout)
    assert re.search(rf"{oldest.name} +1 kB .* unfinished +old", listing.stdout)
    assert "nothing was deleted; latentline gc --keep-runs 1 --delete deletes 1 kB" in listing.stdout
    assert "latentline gc sample --keep-runs 1 --delete" in cli("gc", "sample", "--keep-runs", "1").stdout
    assert oldest.exists()

    assert "deleted 1 folder, 1 kB" in cli("gc", "--keep-runs", "1", "--delete").stdout
    assert (oldest.exists(), newest.exists()) == (False, True)
    assert cli("verify", "sample").exit_code == 0, "caches are unchanged"


def test_gc_deletes_no_run_while_a_recipe_has_mistakes(cli: Any, job: Job, tmp_path: Path) -> None:
    run = add_run(job.recipe.output_dir, "1" * 16, changed_s=OLD_S)
    (tmp_path / "configs" / "broken.yaml").write_text("datasets: [")
    assert cli("gc", "--keep-runs", "0").exit_code == 0, "listing is harmless"
    completed = cli("gc", "--keep-runs", "0", "--delete")
    assert isinstance(completed.exception, LatentlineError)
    assert "start_from of a recipe with mistakes may name one: broken" in completed.exception.what
    assert run.exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--keep-runs", "1", "--cache-dir", "x"],
        ["--keep-runs", "1", "--keep", "30d"],
        ["--keep", "30"],
        ["--keep", "-1d"],
        ["demo", "--cache-dir", "x"],
        ["--keep-runs", "-1"],
    ],
    ids=" ".join,
)
def test_gc_refuses_options_that_exclude_each_other(options: list[str]) -> None:
    assert CliRunner().invoke(latentline, ["gc", *options]).exit_code == 2


@pytest.mark.parametrize("option", [["--forget", "outputs/old"], ["--grace-hours", "24"]], ids=" ".join)
def test_an_option_of_version_0_2_is_an_error_that_names_its_replacement(option: list[str]) -> None:
    completed = CliRunner().invoke(latentline, ["gc", *option])
    assert completed.exit_code == 2
    assert f"{option[0]} no longer exists: gc deletes what no job has used for --keep" in completed.stderr


def test_O03_no_command_imports_torch(cli: Any) -> None:
    commands = ["plan sample --no-memory", "explain sample cat", "verify sample", "gc"]
    code = (
        "import sys\nfrom pipeline.cli.main import latentline\n"
        "for command in sys.argv[1:]: latentline(command.split(), standalone_mode=False)\n"
        "print(sorted({'torch', 'diffusers', 'transformers', 'dagster'} & set(sys.modules)))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code, *commands], capture_output=True, text=True, check=True
    )
    assert completed.stdout.splitlines()[-1] == "[]"


def pack_and_collect(cli: Any) -> str:
    """Pack the cache, delete the single entries, and return the output of gc."""
    packed = cli("pack", "sample")
    assert packed.exit_code == 0, packed.output
    assert "2 packs written with 11 entries" in packed.stdout
    assert "11 single entries are also in packs" in cli("gc").stdout
    return cli("gc", "--delete").stdout


def test_pack_and_gc_replace_single_entries_by_packs_that_jobs_and_commands_use(cli: Any, job: Job) -> None:
    latent = job.entry("vae_latents")
    assert "deleted 11 files" in pack_and_collect(cli)
    assert list(job.recipe.cache_dir.rglob("*.safetensors")) == []
    assert "2 packs with 11 entries" in cli("gc").stdout

    verified = cli("verify", "sample")
    assert (verified.exit_code, "11 entries" in verified.stdout) == (0, True)
    assert "0 to encode" in cli("plan", "sample").stdout
    explained = json.loads(cli("explain", "sample", "cat.png", "--json").stdout)["latents entry"]
    assert (explained["state"], explained["key"]) == ("valid", latent.stem)
    assert re.search(r"packs/latents/[0-9a-f]{64}\.pack from byte [\d,]+$", explained["path"])
    assert explained["made of flip"] is False

    again = cli("pack", "sample")
    assert "0 packs written with 0 entries, 0 bytes; 11 of 11 entries packed before" in again.stdout


def test_a_job_after_pack_and_gc_encodes_nothing_and_its_gates_pass(
    cli: Any, job: Job, in_process_launch: Any
) -> None:
    keys = job.tables.read("vae_latents")["key"]
    pack_and_collect(cli)
    in_process_launch.modules.clear()
    job.cache()
    assert in_process_launch.modules == []
    assert job.tables.read("vae_latents")["key"].equals(keys)
    assert job.failing("vae_latents") == job.failing("text_embeddings") == {}
    assert list(job.recipe.cache_dir.rglob("*.safetensors")) == []


def test_verify_finds_and_repairs_damage_in_a_pack(
    cli: Any, job: Job, in_process_launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.maintenance.verify.LocalLaunch", lambda _: in_process_launch)
    pack_and_collect(cli)
    job.cache()
    (pack,) = (job.recipe.cache_dir / "packs" / "latents").glob("*.pack")
    raw = bytearray(pack.read_bytes())
    raw[3000] ^= 1
    pack.write_bytes(raw)

    damaged = cli("verify", "sample")
    assert damaged.exit_code == 1
    assert "1 missing or damaged" in damaged.stdout
    assert str(pack) in damaged.stdout
    repaired = cli("verify", "sample", "--repair")
    assert "repaired 1 of 1 entry" in repaired.stdout, repaired.output
    # The pack stays as it is: the single file precedes its damaged entry, also after the next gc.
    single = list(job.recipe.cache_dir.rglob("*.safetensors"))
    assert len(single) == 1
    assert "0 packs written" in cli("pack", "sample").stdout
    cli("gc", "--delete")
    assert list(job.recipe.cache_dir.rglob("*.safetensors")) == single
    assert "0 missing or damaged" in cli("verify", "sample").stdout


def test_pack_omits_damaged_entries_with_a_warning_and_a_fix(cli: Any, job: Job) -> None:
    latent = job.entry("vae_latents")
    latent.write_bytes(latent.read_bytes()[:-1])
    packed = cli("pack", "sample")
    assert packed.exit_code == 0
    assert "with 10 entries" in packed.stdout
    assert "1 missing or damaged entry not packed, the first: photos/cat.png: expected" in packed.stderr
    assert "latentline verify sample --repair" in packed.stderr
