"""`latentline fit-buckets` on a folder of images: its table, and the list it writes into the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from pipeline.cli.fit_buckets import command
from pipeline.errors import BucketError, RecipeError
from pipeline.images.geometry import Size, placement_of
from pipeline.models.families import detect
from pipeline.recipe import load_recipe

BASE = Path(__file__).parents[3] / "demo" / "base"

RECIPE = """\
# my flowers
datasets:
  - name: photos            # from the garden
    path: {folder}/photos
output_dir: {folder}/out
cache_dir: {folder}/cache
model: {{base: nobody/nothing}}
buckets: {{resolution: 256, step: 64{more}}}   # about 256x256
training: {{batch_size: 2}}
"""


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for index in range(12):
        size = (300 + 20 * index, 400) if index % 2 else (400, 300 + 20 * index)
        Image.new("RGB", size, (index, 0, 0)).save(tmp_path / "photos" / f"{index}.png")
    return write(tmp_path)


def write(folder: Path, more: str = "") -> Path:
    file = folder / "flowers.yaml"
    file.write_text(RECIPE.format(folder=folder, more=more), encoding="utf-8")
    return file


def run(*arguments: str) -> str:
    return CliRunner().invoke(command, arguments, catch_exceptions=False).output


def test_B01_each_image_counts_once_whatever_its_repeats(flowers: Path) -> None:
    more = "    repeats: 3\n    validation_fraction: 0.5\noutput_dir"
    flowers.write_text(flowers.read_text("utf-8").replace("output_dir", more), encoding="utf-8")
    lines = run(str(flowers)).splitlines()
    assert "12 images from a new scan, batches of 2" in "\n".join(lines)
    fits = [line for line in lines if line.startswith("fitted, at most")]
    assert [line for line in fits if int(line.split()[-1]) > 12] == [], "there are 12 images"


def test_datasets_with_a_resolution_of_their_own_are_left_out(flowers: Path) -> None:
    text = flowers.read_text("utf-8")
    own = f"  - {{name: large, path: {flowers.parent}/photos, resolution: 512}}\noutput_dir"
    flowers.write_text(text.replace("output_dir", own), encoding="utf-8")
    assert "12 images from a new scan" in run(str(flowers))

    only_own = text.replace("    path:", "    resolution: 512\n    path:")
    flowers.write_text(only_own, encoding="utf-8")
    with pytest.raises(BucketError, match="all datasets have resolutions of their own"):
        run(str(flowers))


def test_fitted_lists_are_compared_with_the_recipe_and_nothing_is_written(flowers: Path) -> None:
    before = flowers.read_bytes()
    lines = run(str(flowers)).splitlines()
    assert "12 images from a new scan, batches of 2" in "\n".join(lines)
    current = next(line for line in lines if line.startswith("current recipe"))
    fitted = [line for line in lines if line.startswith("fitted, at most")]
    assert current.split()[-1] == "0"
    assert len(fitted) >= 2
    losses = [float(line.split("%")[0].split()[-1]) for line in fitted]
    assert losses[-1] < float(current.split("%")[0].split()[-1])
    assert flowers.read_bytes() == before
    assert not (flowers.parent / "out").exists()


def test_writing_the_list_preserves_the_comments_of_the_recipe(flowers: Path) -> None:
    assert "wrote" in run(str(flowers), "--write", "6")
    text = flowers.read_text(encoding="utf-8")
    for comment in ("# my flowers", "# from the garden", "# about 256x256"):
        assert comment in text
    settings = load_recipe(flowers).buckets
    assert 1 <= len(settings.sizes) <= 6
    assert settings.resolution == 256
    sizes = set(placement_of(settings).sizes)
    assert {size.transposed for size in sizes} == sizes
    assert [str(size) for size in sizes if size.height % 16 or size.width % 16] == []
    repeated = run(str(flowers), "--write", "6").splitlines()
    assert next(line for line in repeated if line.startswith("fitted")).split()[-1] == "0", "nothing moves"


def test_the_table_shows_how_many_sizes_are_written_and_how_many_are_used(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for index, size in enumerate([(400, 300), (420, 300), (300, 300)]):
        Image.new("RGB", size, (index, 0, 0)).save(tmp_path / "photos" / f"{index}.png")
    file = write(tmp_path)
    lines = run(str(file), "--write", "6").splitlines()
    columns = (
        next(line for line in lines if line.startswith("fitted")).removeprefix("fitted, at most 6").split()
    )
    sizes = load_recipe(file).buckets.sizes
    landscapes = [size for size in placement_of(load_recipe(file).buckets).sizes if size.width >= size.height]
    assert columns[:2] == [str(len(sizes)), str(len(landscapes))]
    assert len(landscapes) < len(sizes)
    assert f"\nwrote {len(sizes)} sizes as buckets.sizes" in "\n".join(["", *lines])


def test_a_free_list_with_another_step(flowers: Path) -> None:
    run(str(flowers), "--free", "--step", "32", "--write", "5")
    sizes = placement_of(load_recipe(flowers).buckets).sizes
    assert [str(size) for size in sizes if size.height % 32 or size.width % 32] == []


def test_a_finer_step_of_the_recipe_is_the_default(flowers: Path) -> None:
    multiple = detect(BASE).size_multiple()
    assert multiple < 8
    text = flowers.read_text("utf-8").replace("nobody/nothing", str(BASE))
    flowers.write_text(text.replace("step: 64", f"step: {multiple}"), encoding="utf-8")
    output = run(str(flowers), "--write", "5")
    assert f"step {multiple}\n" in output
    assert "crops less" not in output
    edges = {edge for size in load_recipe(flowers).buckets.size_pairs for edge in size}
    assert any(edge % 8 for edge in edges)

    # Without such a step, the list would not be valid.
    coarse = flowers.read_text("utf-8").replace(f"step: {multiple}", "step: 64")
    flowers.write_text(coarse, encoding="utf-8")
    with pytest.raises(RecipeError, match="the edges of a size must be multiples of 8"):
        load_recipe(flowers)


@pytest.mark.parametrize("more", [", upscale: never", ", resolutions: [256, 128]"])
def test_settings_that_a_fit_does_not_support_are_rejected(flowers: Path, more: str) -> None:
    file = write(flowers.parent, more)
    with pytest.raises(BucketError, match="keep the current buckets"):
        run(str(file))


def test_adding_an_image_never_moves_another_if_sizes_are_explicit(flowers: Path) -> None:
    run(str(flowers), "--write", "6")
    placement = placement_of(load_recipe(flowers).buckets)
    placed_before = placement.assign(Size(300, 420))
    many = placement.assign_many([300, 4000, 77], [420, 300, 900]).columns
    assert many.one(0) == placed_before
