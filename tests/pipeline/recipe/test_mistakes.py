"""Each mistake is told in the words of YAML: what with the value met, the key, and a fix that works."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipe.locate import dotted
from pipeline.recipe.mistakes import Mistake, find_mistakes

SMALLEST: dict[str, Any] = {
    "datasets": [{"name": "photos", "path": "data/photos"}],
    "output_dir": "outputs/x",
    "model": {"base": "owner/name"},
}


def dataset(**values: Any) -> dict[str, Any]:
    return {"datasets": [{"name": "photos", "path": "data/photos", **values}]}


def mistakes_of(**values: Any) -> list[Mistake]:
    return find_mistakes({**SMALLEST, **values})


CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"cache_dirr": "x"}, "cache_dirr", "unknown key cache_dirr", "did you mean cache_dir?"),
    ({"resolution": 512}, "resolution", "unknown key resolution", "write it as buckets.resolution"),
    ({"text": {"zzz": 1}}, "text.zzz", "unknown key zzz", "remove it; text takes caption_dropout, dtype"),
    (dataset(caption={}), "datasets[0].caption", "unknown key caption", "did you mean captions?"),
    (
        dataset(captions={"from_": "fixed"}),
        "datasets[0].captions.from_",
        "unknown key from_",
        "did you mean from?",
    ),
    ({"recache": {"enabled": "False"}}, "recache.enabled", 'the text "False"', "write false, without quotes"),
    (
        {"recache": {"enabled": 0}},
        "recache.enabled",
        "enabled is 0, and must be true or false",
        "such as false",
    ),
    ({"training": {"steps": "eight"}}, "training.steps", "must be a whole number", "such as 1000"),
    ({"training": {"steps": "8"}}, "training.steps", 'steps is the text "8"', "write 8, without quotes"),
    (
        {"training": {"steps": 1.0}},
        "training.steps",
        "steps is 1.0, and must be a whole number",
        "whole number",
    ),
    ({"training": {"steps": True}}, "training.steps", "steps is true", "whole number"),
    ({"training": {"steps": 10**400}}, "training.steps", "must be at most 1000000000", "at most"),
    ({"training": {"batch_size": None}}, "training.batch_size", "is empty", "whole number, such as 1"),
    (dataset(weight=0), "datasets[0].weight", "must be more than 0", "more than 0"),
    ({"training": {"exhausted": "repeat"}}, "training.exhausted", "has no effect", "give each dataset a"),
    (
        {"datasets": [{"name": "a", "path": "a", "weight": 2.0}, {"name": "b", "path": "b"}]},
        "datasets[1]",
        "1 of 2 datasets has a weight, this one has none",
        "give each dataset a weight, or none",
    ),
    ({"training": {"learning_rate": float("nan")}}, "training.learning_rate", "finite", "write a number"),
    ({"training": {"learning_rate": 0}}, "training.learning_rate", "must be more than 0", "more than 0"),
    ({"training": {"seed": 2**63}}, "training.seed", "must be less than", "less than"),
    ({"training": {"lora": 4}}, "training.lora", "lora is 4", "it takes rank, alpha"),
    ({"training": {"optimizer": "adam"}}, "training.optimizer", 'the text "adam"', "did you mean adamw?"),
    (
        {"training": {"sample_prompts": "a rose"}},
        "training.sample_prompts",
        "must be a list",
        'write it as a list: sample_prompts: ["a rose"]',
    ),
    ({"training": {"sample_prompts": [""]}}, "training.sample_prompts[0]", "is empty", "give at least 1"),
    ({"training": None}, "training", "training is empty, and must be a section", "it takes steps"),
    (
        {"text": {"caption_dropout": 1.5}},
        "text.caption_dropout",
        "is 1.5, and must be at most 1.0",
        "at most 1.0",
    ),
    ({"latents": {"dtype": "fp16"}}, "latents.dtype", 'the text "fp16"', "float16, bfloat16, float32"),
    ({"latents": {"background": [0, 0, 256]}}, "latents.background[2]", "at most 255", "at most 255"),
    ({"latents": {"background": [0, 0]}}, "latents.background[2]", "missing", "add"),
    ({"latents": {"background": [0, 0, 0, 0]}}, "latents.background", "too long", "give 3 values"),
    ({"buckets": {"max_aspect_ratio": 0.5}}, "buckets.max_aspect_ratio", "at least 1.0", "at least 1.0"),
    (
        {"buckets": {"resolution": 1000}},
        "buckets.resolution",
        "resolution 1000 is not a multiple of",
        "960 or 1024",
    ),
    ({"model": {"base": ""}}, "model.base", "base is empty", "give at least 1"),
    ({"model": {"base": "a/b", "revision": 1234567}}, "model.revision", "must be text", 'quotes: "1234567"'),
    ({"model": {}}, "model.base", "required key base is missing", "add base: A Hub id"),
    ({"datasets": []}, "datasets", "datasets is empty", "give at least 1"),
    ({"datasets": {}}, "datasets", "must be a list", "write it as a list: datasets: [...]"),
    (
        {"datasets": {"name": "a"}},
        "datasets",
        "must be a list",
        "put a dash before its first key, - name: ...",
    ),
    (dataset(name="a b"), "datasets[0].name", 'name the text "a b" holds other characters', "A-Z"),
    (dataset(repeats=0), "datasets[0].repeats", "repeats is 0, and must be at least 1", "at least 1"),
    (dataset(path=""), "datasets[0].path", "the path is empty", "name a folder"),
    (dataset(path=3), "datasets[0].path", "path is 3, and must be text", 'quotes: "3"'),
    (dataset(path="a\0b"), "datasets[0].path", "NUL", "remove it"),
    (dataset(path="s4://bucket/x"), "datasets[0].path", "fsspec does not know", "did you mean s3?"),
    (
        dataset(path="filecache::s3://b/x"),
        "datasets[0].path",
        "say nothing of their version",
        "simplecache::",
    ),
    (dataset(path="zip::nosuch://x"), "datasets[0].path", "fsspec does not know", "use s3"),
    (
        dataset(path="s3://b/l.csv", images="s3://b/l.csv"),
        "datasets[0].images",
        "is a listing",
        "name a folder",
    ),
    ({"output_dir": "s3://bucket/x"}, "output_dir", "is an address", "a folder of this machine"),
    (
        dataset(path="all.csv", images="b.csv"),
        "datasets[0].images",
        "is a listing, and this must be a folder",
        "name a folder",
    ),
    (dataset(captions={"suffix": "txt"}), "datasets[0].captions.suffix", "has no leading dot", "use .txt"),
    (dataset(captions={"suffix": "."}), "datasets[0].captions.suffix", "no file suffix", ".txt"),
    (dataset(captions={"suffix": "./../x"}), "datasets[0].captions.suffix", "no file suffix", ".txt"),
    (
        dataset(captions={"encoding": "utf-9"}),
        "datasets[0].captions.encoding",
        "'utf-9' is no text",
        "cp1252",
    ),
    (dataset(captions={"encoding": "hex"}), "datasets[0].captions.encoding", "'hex' is no text", "cp1252"),
    (dataset(captions={"fallback_encoding": "x"}), "datasets[0].captions.fallback_encoding", "'x'", "cp1252"),
    (
        dataset(captions={"from": "column"}),
        "datasets[0].captions.from",
        "only a listing has columns",
        ".parquet",
    ),
    (
        dataset(filters={"where": "a > 1"}),
        "datasets[0].filters.where",
        "only a listing has columns",
        ".parquet",
    ),
    (
        dataset(filters={"min_width": 9, "max_width": 8}),
        "datasets[0].filters.min_width",
        "no image is left",
        "at most 8",
    ),
    (dataset(limit=0), "datasets[0].limit", "limit is 0", "at least 1"),
    (dataset(captions={"from": "fixed"}), "datasets[0].captions.text", "there is no text", "set text"),
    (
        dataset(captions={"text": "x"}),
        "datasets[0].captions.text",
        "no effect with from: sidecar",
        "from: fixed",
    ),
    (
        {"checks": {"allow": ["conservaton"]}},
        "checks.allow[0]",
        "'conservaton'",
        "did you mean conservation?",
    ),
    (
        dataset(captions={"from": "fixed", "text": "x", "columns": ["title"]}),
        "datasets[0].captions.columns",
        "no effect with from: fixed",
        "from: column",
    ),
    (dataset(path_column="file"), "datasets[0].path_column", "only a listing has columns", "remove this"),
    *(
        (
            dataset(captions={"from": "filename", key: value}),
            f"datasets[0].captions.{key}",
            f"{key} has no effect with from: filename",
            "from: sidecar",
        )
        for key, value in {
            "suffix": ".caption",
            "json_key": "title",
            "encoding": "utf-16",
            "fallback_encoding": "cp1252",
        }.items()
    ),
    (
        dataset(captions={"json_key": "title"}),
        "datasets[0].captions.json_key",
        "no effect with suffix: .txt",
        "suffix: .json",
    ),
    ({"checks": {"allow": ["finite_values"]}}, "checks.allow[0]", "cannot be allowed", "run the cache job"),
    ({"checks": {"allow": ["path_isolation"]}}, "checks.allow[0]", "cannot be allowed", "side by side"),
    ({"recache": {"cron": "61 3 * * *"}}, "recache.cron", "'61' as minute", "five fields"),
    (
        {"training": {"steps": 5, "warmup_steps": 9}},
        "training.warmup_steps",
        "9 is more than steps 5",
        "at most 5",
    ),
]


@pytest.mark.parametrize(
    ("values", "key", "what", "fix"), CASES, ids=[f"{case[1]}-{case[2][:20]}" for case in CASES]
)
def test_a_mistake_names_key_value_and_fix(values: dict[str, Any], key: str, what: str, fix: str):
    (mistake,) = mistakes_of(**values)
    assert dotted(mistake.path) == key
    assert what in mistake.what
    assert fix in mistake.fix


def test_two_datasets_of_one_name_also_by_case_are_named():
    names = ["a", "b", "A", "b"]
    found = mistakes_of(datasets=[{"name": name, "path": name} for name in names])
    assert [(dotted(mistake.path), mistake.what) for mistake in found] == [
        ("datasets[2].name", "dataset names a and A differ only in case"),
        ("datasets[3].name", "two datasets are named b"),
    ]


def test_a_rule_across_keys_is_told_beside_an_unknown_key_of_the_same_section():
    found = mistakes_of(buckets={"resolution": 1000, "stepp": 8})
    assert {dotted(mistake.path) for mistake in found} == {"buckets.stepp", "buckets.resolution"}


def test_a_rule_across_keys_is_not_told_of_a_key_that_is_wrong_by_itself():
    found = mistakes_of(buckets={"resolution": "large", "step": 100})
    assert [dotted(mistake.path) for mistake in found] == ["buckets.resolution"]


def test_mistakes_in_every_section_are_found_at_once():
    values: dict[str, Any] = {}
    for addition, *_ in CASES:
        for section, change in addition.items():
            if section not in {"datasets", "model", "text", "latents"} and isinstance(change, dict):
                values[section] = {**values.get(section, {}), **change}
    found = {dotted(mistake.path).partition(".")[0] for mistake in mistakes_of(**values)}
    assert found == set(values)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=6,
)
SECTIONS = ["datasets", "cache_dir", "model", "buckets", "latents", "training", "checks", "recache", "other"]


@given(st.dictionaries(st.sampled_from(SECTIONS), JSON, min_size=1))
def test_no_values_raise_and_every_mistake_has_words(values: dict[str, Any]):
    for mistake in mistakes_of(**values):
        assert mistake.what.strip()
        assert mistake.fix.strip()
        assert "see the key's description" not in mistake.fix
