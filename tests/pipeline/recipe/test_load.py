"""Recipes load from files, or one error lists every mistake with file, line, key and fix."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import RecipeError
from pipeline.recipe import (
    Recipe,
    load_recipe,
    load_recipe_folder,
    project_root,
    recipe_from_mapping,
    recipes_dir,
)
from pipeline.recipe.load import require_own_output

GOOD = """datasets:
  - {name: photos, path: data/photos}
output_dir: outputs/NAME
model: {base: owner/name}
"""

THREE_MISTAKES = """datasets:
  - name: photos
    path: data/photos
    repeats: eight
output_dir: outputs/NAME
model: {base: owner/name}
buckets: {resolution: 1000, step: 64}
recache:
  enabled: "False"
"""


def write(folder: Path, name: str, text: str = GOOD) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(text.replace("NAME", name), encoding="utf-8")
    return file


def error_of(file: Path) -> str:
    with pytest.raises(RecipeError) as excinfo:
        load_recipe(file)
    return str(excinfo.value)


def test_a_recipe_has_its_name_its_file_and_absolute_paths(tmp_path: Path):
    file = write(tmp_path, "flowers")
    recipe = load_recipe(file)
    assert (recipe.name, recipe.source) == ("flowers", file)
    assert recipe.datasets[0].path == project_root() / "data/photos"
    assert recipe.cache_dir == project_root() / ".cache/latentline"
    assert recipe.output_dir == project_root() / "outputs/flowers"


def test_symbolic_links_and_dots_in_paths_are_not_resolved(tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    text = GOOD.replace("data/photos", f"{link}/../x").replace("outputs/NAME", "~/out")
    recipe = load_recipe(write(tmp_path, "x", text))
    assert str(recipe.datasets[0].path) == f"{link}/../x"
    assert recipe.output_dir == Path.home() / "out"


def test_three_mistakes_are_reported_at_once_with_line_key_and_fix(tmp_path: Path):
    file = write(tmp_path, "wrong", THREE_MISTAKES)
    assert (
        error_of(file)
        == f"""3 mistakes in {file}

  datasets[0].repeats must be an integer, got "eight"
    where: {file}:4, datasets[0].repeats
    fix:   write an integer, such as 1

  buckets.resolution must be a multiple of buckets.step, got 1000 and 64
    where: {file}:7, buckets.resolution
    fix:   use 960 or 1024, or set buckets.step to 8 or 40

  recache.enabled must be true or false, got "False"
    where: {file}:9, recache.enabled
    fix:   write false, without quotes

  where: {file}
  fix:   apply the 3 fixes above"""
    )


def test_a_single_mistake_is_reported_without_a_list(tmp_path: Path):
    file = write(tmp_path, "x", GOOD + "cachedir: y\n")
    assert (
        error_of(file)
        == f"unknown key cachedir\n  where: {file}:5, cachedir\n  fix:   did you mean cache_dir?"
    )


def test_a_recipe_inside_the_project_is_shown_relative_to_the_root():
    error = error_of(project_root() / "configs" / "not-there.yaml")
    assert "configs/not-there.yaml" in error
    assert str(project_root()) not in error


def test_yaml_flaws_and_wrong_values_are_reported_together_by_line(tmp_path: Path):
    text = GOOD + "training: {steps: 0}\nmodel: {base: other/name}\ntext: {caption_dropout: 2}\n"
    error = error_of(write(tmp_path, "x", text))
    lines = [line.partition(".yaml:")[2] for line in error.splitlines() if ".yaml:" in line]
    assert lines == ["5, training.steps", "6, model", "7, text.caption_dropout"]
    assert "duplicate key model, first used in line 4" in error


def test_a_value_with_a_yaml_flaw_is_reported_once(tmp_path: Path):
    error = error_of(write(tmp_path, "x", GOOD + "training: !custom x\n"))
    assert error.startswith("unknown YAML tag !custom\n  where: ")


@pytest.mark.parametrize(
    ("content", "what", "where"),
    [
        (b"", "the recipe is empty", ":1"),
        (b"# only a comment\n", "the recipe is empty", ":1"),
        (b"- 1\n", "a recipe must be a mapping of keys", ":1"),
        (b"just text", "a recipe must be a mapping of keys", ":1"),
        (b"a: 1\nb: caf\xe9\n", "a recipe must be UTF-8, got byte 0xe9", ":2"),
        (b"a: [1\nb: 2\n", "not valid YAML", ":1"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused_with_the_reason(
    tmp_path: Path, content: bytes, what: str, where: str
):
    file = tmp_path / "x.yaml"
    file.write_bytes(content)
    error = error_of(file)
    assert error.startswith(what)
    assert f"where: {file}{where}" in error


def test_a_byte_order_mark_and_windows_line_endings_are_accepted(tmp_path: Path):
    file = tmp_path / "x.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_recipe(file).name == "x"


@pytest.mark.parametrize("stem", ["my-flowers", "my flowers", "blümchen", "a.b"])
def test_a_name_that_dagster_does_not_accept_is_refused_with_a_valid_alternative(tmp_path: Path, stem: str):
    error = error_of(write(tmp_path, stem, GOOD))
    assert repr(stem) in error
    proposed = error.partition("for example to ")[2].strip().removesuffix(".yaml")
    assert write(tmp_path, proposed).exists()
    assert load_recipe(tmp_path / f"{proposed}.yaml").name == proposed


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path):
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot read the recipe: No such file" in error_of(tmp_path / "absent.yaml")
    assert "cannot read the recipe: Is a directory" in error_of(tmp_path / "folder.yaml")


@pytest.mark.timeout(20)
def test_a_fifo_a_device_and_a_huge_file_are_refused_without_being_read(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "device.yaml").symlink_to("/dev/zero")
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(6 * 10**9)

    reasons = {each.name: each.error.what for each in load_recipe_folder(tmp_path).broken}
    assert reasons == {
        "device": "cannot read the recipe: it is not a regular file",
        "fifo": "cannot read the recipe: it is not a regular file",
        "huge": "cannot read the recipe: a recipe must have at most 4,000,000 bytes",
    }


def test_recipes_are_the_yaml_files_directly_in_the_folder_sorted_by_name(tmp_path: Path):
    (tmp_path / "examples").mkdir()
    for name in ("b", "a", "examples/c", "._a", ".hidden"):
        write(tmp_path, name)
    (tmp_path / "notes.txt").write_text("no recipe", encoding="utf-8")
    assert [recipe.name for recipe in load_recipe_folder(tmp_path).recipes] == ["a", "b"]


def test_a_recipe_with_the_suffix_yml_is_an_error(tmp_path: Path):
    write(tmp_path, "a").rename(tmp_path / "a.yml")
    recipes, [broken] = load_recipe_folder(tmp_path)
    assert (recipes, broken.name) == ([], "a")
    assert broken.error.fix == "rename it to a.yaml"


def test_broken_recipes_are_returned_with_all_their_mistakes_next_to_the_others(tmp_path: Path):
    write(tmp_path, "good")
    for name in ("first", "second"):
        write(tmp_path, name, THREE_MISTAKES)
    recipes, broken = load_recipe_folder(tmp_path)
    assert [recipe.name for recipe in recipes] == ["good"]
    assert [each.name for each in broken] == ["first", "second"]
    for each in broken:
        assert str(each.error).startswith(f"3 mistakes in {each.file}")
        assert each.summary().startswith(
            f"recipe {each.name} is excluded: 3 mistakes in {each.file}; latentline "
        )
        assert "\n" not in each.summary()
        for line in (4, 7, 9):
            assert f"{each.name}.yaml:{line}, " in str(each.error)


def sharing_error(folder: Path, name: str) -> str:
    """Return the error of the only broken recipe of a folder."""
    [broken] = load_recipe_folder(folder).broken
    assert broken.name == name
    return str(broken.error)


@pytest.mark.parametrize("copy", ["flowers2", "a_try", "rank32"])
def test_O15_only_the_copy_of_a_recipe_is_at_fault_and_its_fix_names_a_free_folder(tmp_path: Path, copy: str):
    text = GOOD.replace("outputs/NAME", f"{tmp_path}/outputs/flowers")
    write(tmp_path, "flowers", text)
    write(tmp_path, copy, text.replace("outputs/flowers", "outputs/../outputs/flowers/"))
    error = sharing_error(tmp_path, copy)
    assert error.startswith(f"output_dir {tmp_path}/outputs/../outputs/flowers belongs to recipe flowers\n")
    assert f"where: {tmp_path}/{copy}.yaml:3, output_dir" in error
    assert f"such as {tmp_path}/outputs/../outputs/{copy}\n" in f"{error}\n"
    assert [recipe.name for recipe in load_recipe_folder(tmp_path).recipes] == ["flowers"]


@pytest.mark.parametrize(
    ("file", "record"),
    [
        ("reports/raw_images.json", {"recipe": "old"}),
        ("lora/provenance.json", {"recipe": {"name": "old"}}),
    ],
)
def test_O15_an_output_folder_belongs_to_the_recipe_whose_job_wrote_it(
    tmp_path: Path, file: str, record: dict[str, object]
):
    # Its name suggests another owner, and so would the order of the names.
    output = tmp_path / "new"
    for name in ("a", "new", "old"):
        write(tmp_path, name, GOOD.replace("outputs/NAME", str(output)))
    (output / file).parent.mkdir(parents=True)
    (output / file).write_text(json.dumps(record), encoding="utf-8")
    recipes, broken = load_recipe_folder(tmp_path)
    assert [recipe.name for recipe in recipes] == ["old"]
    assert [each.error.what for each in broken] == [f"output_dir {output} belongs to recipe old"] * 2
    assert [each.error.fix.rpartition("/")[2] for each in broken] == ["a", "new_2"]


def test_O15_a_recipe_that_is_not_written_yet_owns_no_folder(tmp_path: Path):
    write(tmp_path, "flowers", GOOD.replace("outputs/NAME", f"{tmp_path}/roses"))
    values = {"datasets": [{"name": "p", "path": "x"}], "output_dir": tmp_path / "roses"}
    planned = recipe_from_mapping("roses", {**values, "model": {"base": "b"}}, source=tmp_path / "roses.yaml")
    with pytest.raises(RecipeError, match="recipe flowers has the same output_dir"):
        require_own_output(planned)


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"recipe": 7}', '{"recipe": "gone"}'])
def test_O15_a_record_of_no_existing_recipe_decides_nothing(tmp_path: Path, content: str):
    output = tmp_path / "results"
    (output / "reports").mkdir(parents=True)
    (output / "reports" / "raw_images.json").write_text(content, encoding="utf-8")
    for name in ("a", "b"):
        write(tmp_path, name, GOOD.replace("outputs/NAME", str(output)))
    assert [each.name for each in load_recipe_folder(tmp_path).broken] == ["a", "b"]


def test_O15_an_address_belongs_to_the_recipe_with_a_working_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    site = tmp_path / "site" / "deployment.yaml"
    site.parent.mkdir()
    site.write_text(f"scratch: {tmp_path}/scratch\n", encoding="utf-8")
    monkeypatch.setenv("LATENTLINE_DEPLOYMENT", str(site))
    text = GOOD.replace("outputs/NAME", "s3://bucket/loras/x")
    reports = load_recipe(write(tmp_path, "first", text)).output_dir / "reports"
    write(tmp_path, "second", text)
    assert len(load_recipe_folder(tmp_path).broken) == 2
    reports.mkdir(parents=True)
    (reports / "raw_images.json").write_text('{"recipe": "first"}', encoding="utf-8")
    assert "a separate folder, such as s3://bucket/loras/second" in sharing_error(tmp_path, "second")


def test_O15_an_original_with_mistakes_keeps_its_folder_and_a_copy_lists_all_of_its_own(tmp_path: Path):
    text = THREE_MISTAKES.replace("outputs/NAME", f"{tmp_path}/outputs/flowers")
    write(tmp_path, "flowers", text)
    write(tmp_path, "copy", GOOD.replace("outputs/NAME", f"{tmp_path}/outputs/flowers"))
    write(tmp_path, "draft", text)
    copy, draft, flowers = load_recipe_folder(tmp_path).broken
    assert copy.error.what.endswith("belongs to recipe flowers")
    assert str(flowers.error).startswith(f"3 mistakes in {tmp_path}/flowers.yaml")
    assert "belongs to" not in str(flowers.error)
    assert str(draft.error).startswith(f"4 mistakes in {tmp_path}/draft.yaml")
    assert f"where: {tmp_path}/draft.yaml:5, output_dir" in str(draft.error)


def test_a_broken_recipe_has_its_recache_section_if_that_is_valid(tmp_path: Path):
    valid = "recache: {cron: '5 4 * * *', enabled: true}\n"
    write(tmp_path, "a", GOOD + valid + "cachedir: y\n")
    write(tmp_path, "b", GOOD + "recache: {enabled: 7}\n")
    write(tmp_path, "c", "datasets: [\n")
    crons = [each.recache.cron for each in load_recipe_folder(tmp_path).broken]
    assert crons == ["5 4 * * *", "H 3 * * *", "H 3 * * *"]


def test_recipes_with_the_same_output_folder_of_unknown_owner_are_all_broken(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(tmp_path, "good")
    write(tmp_path, "a", GOOD.replace("outputs/NAME", f"{tmp_path}/real"))
    write(tmp_path, "b", GOOD.replace("outputs/NAME", f"{tmp_path}/link/"))
    recipes, (first, second) = load_recipe_folder(tmp_path)
    assert [recipe.name for recipe in recipes] == ["good"]
    assert first.error.what.startswith("recipe b has the same output_dir")
    assert second.error.what.startswith("recipe a has the same output_dir")
    assert second.error.where == f"{second.file}:3, output_dir"
    write(tmp_path, "c", GOOD.replace("outputs/NAME", f"{tmp_path}/real"))
    assert "recipes a, b have the same output_dir" in load_recipe_folder(tmp_path).broken[2].error.what


def test_an_environment_variable_sets_the_folder_of_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LATENTLINE_CONFIGS", raising=False)
    assert recipes_dir() == project_root() / "configs"
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path))
    write(tmp_path, "chosen")
    assert [recipe.name for recipe in load_recipe_folder().recipes] == ["chosen"]
    monkeypatch.setenv("LATENTLINE_CONFIGS", str(tmp_path / "absent"))
    with pytest.raises(RecipeError, match="the folder of recipes does not exist"):
        load_recipe_folder()


def test_the_recipes_of_this_repository_load():
    assert "demo" in [recipe.name for recipe in load_recipe_folder(project_root() / "configs").recipes]
    examples, broken = load_recipe_folder(project_root() / "configs" / "examples")
    assert broken == []
    assert [recipe.name for recipe in examples] == [
        "edits_flux_kontext",
        "edits_qwen_image21",
        "edits_qwen_image_edit",
        "flowers_anima",
        "flowers_aura_flow",
        "flowers_bria_fibo",
        "flowers_bria_fibo2",
        "flowers_chroma",
        "flowers_cogview4",
        "flowers_ernie_image",
        "flowers_flux2_dev",
        "flowers_flux2_klein",
        "flowers_flux_dev",
        "flowers_flux_schnell",
        "flowers_hidream",
        "flowers_ideogram4",
        "flowers_kandinsky5",
        "flowers_kolors",
        "flowers_krea2",
        "flowers_lumina2",
        "flowers_qwen_image",
        "flowers_qwen_image21",
        "flowers_sana",
        "flowers_sd15",
        "flowers_sd21",
        "flowers_sd3",
        "flowers_sd35",
        "flowers_sdxl",
        "flowers_wan",
        "flowers_z_image",
    ]


def test_a_mapping_is_validated_like_a_file(tmp_path: Path):
    values = {
        "datasets": [{"name": "p", "path": tmp_path}],
        "output_dir": tmp_path / "o",
        "model": {"base": "b"},
    }
    recipe = recipe_from_mapping("x", values, source=tmp_path / "x.yaml")
    assert isinstance(recipe, Recipe)
    assert recipe.datasets[0].path == tmp_path
    with pytest.raises(RecipeError, match="unknown key extra") as excinfo:
        recipe_from_mapping("x", {**values, "extra": 1})
    assert "where: recipe x, extra" in str(excinfo.value)


def test_the_error_keeps_all_mistakes_when_pickled(tmp_path: Path):
    with pytest.raises(RecipeError) as excinfo:
        load_recipe(write(tmp_path, "wrong", THREE_MISTAKES))
    assert str(pickle.loads(pickle.dumps(excinfo.value))) == str(excinfo.value)


def test_O03_loading_recipes_imports_nothing_heavy():
    code = (
        "import sys; from pipeline.recipe import load_recipe_folder; load_recipe_folder();"
        "print(*(name for name in sys.modules if '.' not in name))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {
        "torch",
        "diffusers",
        "transformers",
        "accelerate",
        "peft",
        "dagster",
        "polars",
        "pandera",
        "numpy",
        "PIL",
    }
    assert heavy & set(completed.stdout.split()) == set()


SECRETS = (
    "http://me:s3cr3t@host/photos",
    "https://s3cr3t@host/photos",
    "zip://p::https://me:s3cr3t@host/a.zip",
)


@pytest.mark.parametrize("address", SECRETS)
@pytest.mark.parametrize("key", ["path: data/photos", "output_dir: outputs/NAME", "base: owner/name"])
def test_H05_an_address_with_a_password_is_a_mistake_that_does_not_repeat_it(
    tmp_path: Path, address: str, key: str
):
    text = GOOD.replace(key, f'{key.partition(":")[0]}: "{address}"')
    if key.startswith("base"):
        text += "buckets: {step: none}\n"  # whether a model exists is checked later
    with pytest.raises(RecipeError) as excinfo:
        load_recipe(write(tmp_path, "small", text))
    assert "s3cr3t" not in str(excinfo.value)
    assert excinfo.value.fix
    if key.startswith("path"):
        assert "the address must not contain a user or password" in excinfo.value.what


@pytest.mark.parametrize(
    "address",
    [
        "sftp://me:s3cr3t's@host/x",
        "smb://me:a s3cr3t@host/x",
        'zip://a::ftp://me:"s3cr3t"@host/a.zip',
        "s3://k:<s3cr3t /@b",
    ],
)
def test_a_password_may_contain_quotes_and_spaces(tmp_path: Path, address: str):
    with pytest.raises(RecipeError, match="must not contain a user or password") as excinfo:
        load_recipe(write(tmp_path, "small", GOOD.replace("data/photos", json.dumps(address))))
    assert "s3cr3t" not in str(excinfo.value)


@pytest.mark.parametrize(
    "address",
    [
        "sftp://user@host/photos",
        "abfs://container@account.dfs.core.windows.net/photos",
        "github://a:b@main/c",
    ],
)
def test_an_address_without_a_password_may_contain_an_at_sign(tmp_path: Path, address: str):
    recipe = load_recipe(write(tmp_path, "small", GOOD.replace("data/photos", f'"{address}"')))
    assert str(recipe.datasets[0].path) == address


@pytest.mark.parametrize(
    ("key", "usual", "text"),
    [
        ("output_dir", "outputs/NAME", "~no-such-user/out"),
        ("cache_dir", ".cache/latentline", "~$(id)"),
        ("datasets[0].path", "data/photos", "zip://photos::~{{x}}/all.zip"),
        ("datasets[0].path", "data/photos", "~no-such-user"),
    ],
)
def test_O12_the_home_folder_of_an_unknown_user_is_a_mistake_in_one_recipe(
    tmp_path: Path, key: str, usual: str, text: str
) -> None:
    file = write(tmp_path, "a", f"{GOOD}cache_dir: .cache/latentline\n".replace(usual, f'"{text}"'))
    write(tmp_path, "b")
    message = error_of(file)
    assert "must start with the home folder of a user of this machine" in message
    assert key in message
    folder = load_recipe_folder(tmp_path)
    assert ([each.name for each in folder.recipes], [each.file for each in folder.broken]) == (["b"], [file])
