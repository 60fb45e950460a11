"""Datasets, cache_dir and output_dir must be separate folders; the error names both paths."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PathIsolationError
from pipeline.recipe import Recipe, recipe_from_mapping
from pipeline.recipe.isolation import check_isolation, require_isolation, require_separate_folder
from pipeline.storage.addresses import Url
from pipeline.storage.isolation.identity import identify


def recipe_of(data: Path | str, cache: Path | str, output: Path | str, *more: Path | str) -> Recipe:
    datasets = [{"name": f"photos{index}", "path": path} for index, path in enumerate([data, *more])]
    values = {"datasets": datasets, "cache_dir": cache, "output_dir": output, "model": {"base": "owner/name"}}
    return recipe_from_mapping("x", values)


def relations(recipe: Recipe) -> list[tuple[str, str, str]]:
    return [(c.first.label, c.relation, c.second.label) for c in check_isolation(recipe)]


def listing(folder: Path) -> list[tuple[str, int, int]]:
    paths = [folder, *sorted(folder.rglob("*"))]
    return [(str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in paths]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "data" / "a.png").write_bytes(b"x")
    (tmp_path / "link").symlink_to("data")
    return tmp_path


def test_sibling_folders_are_separate_even_before_they_exist(home: Path):
    assert relations(recipe_of(home / "data", home / "cache", home / "out")) == []
    assert relations(recipe_of(home / "none", home / "x/cache", home / "x/out")) == []
    require_isolation(recipe_of(home / "data", home / "data-cache", home / "data.out"))


@pytest.mark.parametrize(
    ("cache", "relation"),
    [
        ("data", "same"),
        ("data/", "same"),
        ("data/.", "same"),
        ("data/sub/..", "same"),
        ("other/../data", "same"),
        ("link", "same"),
        ("link/sub/../", "same"),
        ("data/sub", "inside"),
        ("data/not/yet/there", "inside"),
        ("link/cache", "inside"),
        ("link/sub/../cache", "inside"),
        (".", "contains"),
        ("data/..", "contains"),
        ("", "contains"),
    ],
)
def test_L01_a_cache_inside_or_around_the_dataset_is_refused_in_any_spelling(
    home: Path, cache: str, relation: str
):
    before = listing(home)
    recipe = recipe_of(home / "data", f"{home}/{cache}", home.parent / "out")
    assert relations(recipe) == [("cache_dir", relation, "dataset photos0")]
    with pytest.raises(PathIsolationError):
        require_isolation(recipe)
    assert listing(home) == before


def test_L01_the_error_names_both_paths_as_written_and_as_resolved(home: Path):
    with pytest.raises(PathIsolationError) as excinfo:
        require_isolation(recipe_of(f"{home}/link", f"{home}/data/../data/cache", home / "out"))
    error = excinfo.value
    assert error.what == "cache_dir is inside dataset photos0"
    assert f"cache_dir: {home}/data/../data/cache (real path {home}/data/cache)" in error.where
    assert f"datasets[0].path: {home}/link (real path {home}/data)" in error.where
    assert "cache_dir" in error.fix


@pytest.mark.parametrize("folder", ["data/sub", "cache", "out/lora", "out/runs/0", "out/reports/raw_images"])
def test_pictures_are_not_written_into_folders_of_the_recipe_or_of_its_runs(home: Path, folder: str):
    recipe = recipe_of(home / "data", home / "cache", home / "out")
    with pytest.raises(PathIsolationError, match="the folder of the pictures") as excinfo:
        require_separate_folder(recipe, "--output", home / folder)
    assert f"--output: {home}/{folder}" in excinfo.value.where
    require_separate_folder(recipe, "--output", home / "out" / "pictures")
    require_separate_folder(recipe, "--output", home / "elsewhere")


def test_the_error_names_the_file_of_the_recipe(home: Path):
    values = recipe_of(home / "data", home / "data", home / "out").model_dump(
        mode="json", include={"datasets", "cache_dir", "output_dir", "model"}
    )
    recipe = recipe_from_mapping("x", values, source=home / "x.yaml")
    for check in (require_isolation, lambda each: require_separate_folder(each, "--output", home / "data")):
        with pytest.raises(PathIsolationError) as excinfo:
            check(recipe)
        assert excinfo.value.where.splitlines()[0] == f"{home}/x.yaml"


def test_L01_the_output_folder_is_compared_with_every_dataset(home: Path):
    recipe = recipe_of(home / "other", home / "out/cache", home / "out", home / "out/data", home / "out")
    assert relations(recipe) == [
        ("cache_dir", "inside", "dataset photos2"),
        ("output_dir", "contains", "dataset photos1"),
        ("output_dir", "same", "dataset photos2"),
        ("cache_dir", "inside", "output_dir"),
    ]


def test_the_masks_are_compared_with_cache_and_output(home: Path):
    plain = recipe_of(home / "data", home / "cache", home / "out")
    values = plain.model_dump(mode="json", include={"datasets", "cache_dir", "output_dir", "model"})
    values["datasets"][0]["mask"] = {"path": str(home / "out" / "masks")}
    masked = recipe_from_mapping("x", values)
    assert relations(masked) == [("output_dir", "contains", "masks of photos0")]
    values["datasets"][0]["mask"] = {"path": str(home / "data" / "sub")}
    assert relations(recipe_from_mapping("x", values)) == []


def test_E01_the_references_are_compared_with_cache_and_output(home: Path):
    plain = recipe_of(home / "data", home / "cache", home / "out")
    values = plain.model_dump(mode="json", include={"datasets", "cache_dir", "output_dir", "model"})
    values["datasets"][0]["references"] = [
        {"path": str(home / "data" / "sub")},
        {"path": str(home / "cache" / ".." / "cache")},
        {"path": str(home / "out" / "before")},
    ]
    found = relations(recipe_from_mapping("x", values))
    assert found == [
        ("cache_dir", "same", "references of photos0"),
        ("output_dir", "contains", "references of photos0"),
    ]


def test_the_references_of_previews_are_compared_with_cache_and_output(home: Path):
    plain = recipe_of(home / "data", home / "cache", home / "out")
    values = plain.model_dump(mode="json", include={"datasets", "cache_dir", "output_dir", "model"})
    references = [str(home / folder / "a.png") for folder in ("data", "cache", "out")]
    values["training"] = {"sample_prompts": ["a", {"prompt": "b", "references": references}]}
    assert relations(recipe_from_mapping("x", values)) == [
        ("cache_dir", "contains", "a reference of a preview"),
        ("output_dir", "contains", "a reference of a preview"),
    ]


def test_two_datasets_may_contain_one_another(home: Path):
    assert (
        relations(recipe_of(home / "data", home / "cache", home / "out", home / "data/sub", home / "data"))
        == []
    )


def test_I19_a_link_from_the_dataset_into_the_cache_is_refused(home: Path):
    (home / "data" / "sub" / "x").symlink_to("../../cache/latents")
    recipe = recipe_of(home / "data", home / "cache", home / "out")
    assert relations(recipe) == [("dataset photos0", "link", "cache_dir")]
    with pytest.raises(PathIsolationError, match="a link in dataset photos0 leads into cache_dir") as excinfo:
        require_isolation(recipe)
    assert f"link: {home}/data/sub/x (real path {home}/cache/latents)" in excinfo.value.where


def test_a_link_from_the_cache_into_a_dataset_is_refused(home: Path):
    (home / "cache").mkdir()
    (home / "cache" / "latents").symlink_to("../data")
    recipe = recipe_of(home / "data", home / "cache", home / "out")
    assert relations(recipe) == [("cache_dir", "link", "dataset photos0")]


def test_of_many_links_into_the_cache_the_first_few_are_named(home: Path):
    for index in range(40):
        (home / "data" / f"{index}.png").symlink_to(f"../cache/{index}.png")
    assert len(check_isolation(recipe_of(home / "data", home / "cache", home / "out"))) == 10


def test_L01_a_bind_mount_of_the_same_folder_is_refused(home: Path, bind: Callable[[Path, Path], None]):
    point = home / "mounted"
    point.mkdir()
    bind(home / "data", point)
    assert relations(recipe_of(home / "data", point, home / "out")) == [
        ("cache_dir", "same", "dataset photos0")
    ]
    recipe = recipe_of(home / "data", point / "sub" / "cache", home / "out")
    assert relations(recipe) == [("cache_dir", "inside", "dataset photos0")]


def test_L01_a_bind_mount_of_a_folder_inside_the_dataset_is_refused(
    home: Path, bind: Callable[[Path, Path], None]
):
    point = home / "mounted"
    point.mkdir()
    bind(home / "data" / "sub", point)
    recipe = recipe_of(home / "data", point / "cache", home / "out")
    assert relations(recipe) == [("cache_dir", "inside", "dataset photos0")]
    assert relations(recipe_of(point, home / "data", home / "out")) == [
        ("cache_dir", "contains", "dataset photos0")
    ]


def test_I18_unprintable_names_are_escaped_in_the_error(home: Path):
    odd = home / "data" / os.fsdecode(b"x\xe9\n")
    odd.symlink_to("../cache")
    with pytest.raises(PathIsolationError) as excinfo:
        require_isolation(recipe_of(home / "data", home / "cache", home / "out"))
    assert "x\\xe9\\n" in str(excinfo.value)
    assert str(excinfo.value).encode("utf-8")


FOLDERS = st.lists(st.sampled_from(["a", "b", "c", "..", "link"]), min_size=1, max_size=4).map("/".join)
SWAPPED = {"same": "same", "inside": "contains", "contains": "inside"}


@given(one=FOLDERS, other=FOLDERS)
def test_L01_isolation_is_symmetric(tmp_path_factory: pytest.TempPathFactory, one: str, other: str):
    home = tmp_path_factory.getbasetemp() / "symmetric" / "deep" / "down" / "below"
    (home / "a" / "b").mkdir(parents=True, exist_ok=True)
    if not (home / "link").is_symlink():
        (home / "link").symlink_to("a/b")
    away = tmp_path_factory.getbasetemp() / "away"
    forth = relations(recipe_of(f"{home}/{one}", f"{home}/{other}", away))
    reversed_relations = relations(recipe_of(f"{home}/{other}", f"{home}/{one}", away))
    direct = [relation for _, relation, _ in forth if relation != "link"]
    assert [SWAPPED[relation] for relation in direct] == [r for _, r, _ in reversed_relations if r != "link"]


@pytest.mark.parametrize(
    ("data", "cache", "relation"),
    [
        ("zip://photos::{home}/cache/a.zip", "cache", "contains"),
        ("simplecache::{home}/data", "data/cache", "inside"),
        ("simplecache::file://{home}/link", "data/cache", "inside"),
        ("simplecache::{home}/cache", "cache", "same"),
        ("file://{home}/data", "data/sub", "inside"),
        ("local://{home}/cache/..", "cache", "inside"),
    ],
)
def test_L01_an_address_of_a_local_file_is_compared_as_a_path(
    home: Path, data: str, cache: str, relation: str
):
    recipe = recipe_of(data.format(home=home), home / cache, home / "out")
    assert ("cache_dir", relation, "dataset photos0") in relations(recipe)
    with pytest.raises(PathIsolationError) as excinfo:
        require_isolation(recipe)
    assert str(recipe.datasets[0].path) in excinfo.value.where


def test_a_remote_address_is_separate_from_every_folder(home: Path):
    for data in ("s3://bucket/photos", "zip://x::https://host/a.zip", "memory://cache"):
        assert relations(recipe_of(data, home / "cache", home / "out")) == []


def test_spellings_of_the_same_address_are_equal():
    same = [("s3://b/x", "s3a://B/x/"), ("https://h/x", "http://user:word@h/x"), ("gs://b//x", "gcs://b/./x")]
    for one, other in same:
        assert identify(Url(one)).same(identify(Url(other)))
    assert identify(Url("zip://in::s3://b/x/a.zip")).inside(identify(Url("s3://b/x")))
    assert not identify(Url("s3://b/xy")).inside(identify(Url("s3://b/x")))
    assert not identify(Url("s3://b/x")).same(identify(Url("gs://b/x")))


def starting_from(home: Path, start: Path | str) -> Recipe:
    values = {
        "datasets": [{"name": "photos", "path": home / "data"}],
        "cache_dir": home / "cache",
        "output_dir": home / "out",
        "model": {"base": "owner/name"},
        "training": {"lora": {"start_from": start}},
    }
    return recipe_from_mapping("x", values)


LORA_FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture
def trained(home: Path) -> Path:
    """Folders of a recipe with one finished run, whose LoRA is published, and a file of another project."""
    for folder in ("out/lora", "out/runs/0123abcd/lora", "other"):
        (home / folder).mkdir(parents=True)
        (home / folder / LORA_FILE).write_bytes(b"lora")
    (home / "out/lora/provenance.json").write_text('{"run": "0123abcd"}', "utf-8")
    (home / "latest").symlink_to("out/lora")
    (home / "start.safetensors").symlink_to(f"out/lora/{LORA_FILE}")
    return home


@pytest.mark.parametrize(
    "spelling",
    [
        f"out/lora/{LORA_FILE}",
        f"out/runs/../lora/{LORA_FILE}",
        f"latest/{LORA_FILE}",
        f"latest/../lora/{LORA_FILE}",
        "start.safetensors",
    ],
)
def test_a_start_that_runs_replace_is_refused_with_the_file_of_its_run(trained: Path, spelling: str) -> None:
    with pytest.raises(PathIsolationError, match=r"training\.lora\.start_from is inside lora/") as excinfo:
        require_isolation(starting_from(trained, f"{trained}/{spelling}"))
    assert f"training.lora.start_from: {trained}/{spelling}" in excinfo.value.where
    assert f"output_dir: {trained}/out/lora" in excinfo.value.where
    lasting = f"{trained}/out/runs/0123abcd/lora/{LORA_FILE}"
    assert excinfo.value.fix == f"set training.lora.start_from to {lasting}, which no later run replaces"
    require_isolation(starting_from(trained, lasting))


@pytest.mark.parametrize("start", ["out/lora/absent.safetensors", "out/lora", "out/reports/x.safetensors"])
def test_a_start_without_a_file_of_a_run_is_refused_with_the_pattern_of_such_files(
    trained: Path, start: str
) -> None:
    with pytest.raises(PathIsolationError, match="which runs replace") as excinfo:
        require_isolation(starting_from(trained, trained / start))
    assert f"{trained}/out/runs/<run>/lora/" in excinfo.value.fix


@pytest.mark.parametrize("provenance", ["{", "{}", "[]", "1", None])
def test_a_start_is_refused_with_the_pattern_if_the_published_run_is_unknown(
    trained: Path, provenance: str | None
) -> None:
    record = trained / "out/lora/provenance.json"
    if provenance is None:
        record.unlink()
    else:
        record.write_text(provenance)
    with pytest.raises(PathIsolationError) as excinfo:
        require_isolation(starting_from(trained, trained / "out/lora" / LORA_FILE))
    assert f"such as {trained}/out/runs/<run>/lora/{LORA_FILE}" in excinfo.value.fix


def test_a_start_in_the_cache_is_refused(trained: Path) -> None:
    recipe = starting_from(trained, trained / "cache" / LORA_FILE)
    assert relations(recipe) == [("training.lora.start_from", "inside", "cache_dir")]


@pytest.mark.parametrize(
    "start", ["other", "data", "out", "out/runs/0123abcd/lora", "out/runs/0123abcd/checkpoints/step-00000002"]
)
def test_a_start_that_no_run_replaces_is_accepted(trained: Path, start: str) -> None:
    require_isolation(starting_from(trained, trained / start / LORA_FILE))
