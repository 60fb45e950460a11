"""Each mistake names the key, the value and a fix, in the terms of the YAML file."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipe.errors import Mistake, find_mistakes
from pipeline.recipe.yaml_document import dotted

SMALLEST: dict[str, Any] = {
    "datasets": [{"name": "photos", "path": "data/photos"}],
    "output_dir": "outputs/x",
    "model": {"base": "owner/name"},
}


def dataset(**values: Any) -> dict[str, Any]:
    return {"datasets": [{"name": "photos", "path": "data/photos", **values}]}


def mistakes_of(**values: Any) -> list[Mistake]:
    return find_mistakes({**SMALLEST, **values})


PHOTOS = {"name": "photos", "path": "data/photos"}
CLASS = {"name": "class", "path": "data/class", "role": "prior"}

CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"cache_dirr": "x"}, "cache_dirr", "unknown key cache_dirr", "did you mean cache_dir?"),
    ({"resolution": 512}, "resolution", "unknown key resolution", "write it as buckets.resolution"),
    (
        {"text": {"zzz": 1}},
        "text.zzz",
        "unknown key zzz",
        "remove it; the keys of text are caption_dropout, dtype",
    ),
    (dataset(caption={}), "datasets[0].caption", "unknown key caption", "did you mean captions?"),
    (
        dataset(captions={"from_": "fixed"}),
        "datasets[0].captions.from_",
        "unknown key from_",
        "did you mean from?",
    ),
    (
        {"recache": {"enabled": "False"}},
        "recache.enabled",
        'must be true or false, got "False"',
        "write false, without quotes",
    ),
    (
        {"recache": {"enabled": 0}},
        "recache.enabled",
        "recache.enabled must be true or false, got 0",
        "such as false",
    ),
    ({"training": {"steps": "eight"}}, "training.steps", "must be an integer", "such as 1000"),
    (
        {"training": {"steps": "8"}},
        "training.steps",
        'training.steps must be an integer, got "8"',
        "write 8, without quotes",
    ),
    (
        {"training": {"steps": 1.0}},
        "training.steps",
        "training.steps must be an integer, got 1.0",
        "an integer",
    ),
    ({"training": {"steps": True}}, "training.steps", "must be an integer, got true", "an integer"),
    ({"training": {"steps": 10**400}}, "training.steps", "must be between 1 and 1000000000", "between 1"),
    (
        {"training": {"batch_size": None}},
        "training.batch_size",
        "got an empty value",
        "an integer, such as 1",
    ),
    (dataset(weight=0), "datasets[0].weight", "must be greater than 0, got 0", "greater than 0"),
    (
        {"training": {"exhausted": "repeat"}},
        "training.exhausted",
        "repeat requires datasets with weights",
        "give each dataset a",
    ),
    (
        {"datasets": [{"name": "a", "path": "a", "weight": 2.0}, {"name": "b", "path": "b"}]},
        "datasets[1]",
        "either all datasets or none must have a weight, got 1 of 2",
        "give each dataset a weight, or none",
    ),
    ({"training": {"learning_rate": float("nan")}}, "training.learning_rate", "finite", "write a number"),
    (
        {"training": {"learning_rate": 0}},
        "training.learning_rate",
        "must be greater than 0, got 0",
        "greater than",
    ),
    ({"training": {"seed": 2**63}}, "training.seed", "and less than", "less than"),
    (
        {"training": {"lora": 4}},
        "training.lora",
        "must be a section of keys, got 4",
        "its keys are rank, alpha",
    ),
    (
        {"training": {"optimizer": "adam"}},
        "training.optimizer",
        'an import path, got "adam"',
        "did you mean adamw?",
    ),
    (
        {"training": {"sample_prompts": "a rose"}},
        "training.sample_prompts",
        "must be a list",
        'write a list: sample_prompts: ["a rose"]',
    ),
    (
        {"training": {"sample_prompts": [""]}},
        "training.sample_prompts[0].prompt",
        "must not be empty",
        "at least 1",
    ),
    (
        {"training": {"sample_prompts": [{"prompt": "a rose", "step": 3}]}},
        "training.sample_prompts[0].step",
        "unknown key step",
        "did you mean steps?",
    ),
    (
        {"training": {"sample_prompts": [{"prompt": "a rose", "height": 64}]}},
        "training.sample_prompts[0].height",
        "height requires width, got height: 64",
        "set width, or remove height",
    ),
    (
        {"training": None},
        "training",
        "training must be a section of keys, got an empty value",
        "its keys are steps",
    ),
    (
        {"text": {"caption_dropout": 1.5}},
        "text.caption_dropout",
        "text.caption_dropout must be between 0 and 1, got 1.5",
        "use a value between 0 and 1",
    ),
    (
        {"latents": {"dtype": "fp16"}},
        "latents.dtype",
        'must be float16, bfloat16 or float32, got "fp16"',
        "use float16, bfloat16 or float32",
    ),
    (
        {"latents": {"background": [0, 0, 256]}},
        "latents.background[2]",
        "must be at most 255, got 256",
        "at most 255",
    ),
    ({"latents": {"background": [0, 0]}}, "latents.background[2]", "missing", "add"),
    (
        {"latents": {"background": [0, 0, 0, 0]}},
        "latents.background",
        "must have at most 3 values",
        "write 3 values",
    ),
    ({"buckets": {"max_aspect_ratio": 0.5}}, "buckets.max_aspect_ratio", "at least 1, got 0.5", "at least 1"),
    (
        {"buckets": {"resolution": 1000}},
        "buckets.resolution",
        "buckets.resolution must be a multiple of buckets.step, got 1000 and 64",
        "960 or 1024",
    ),
    ({"model": {"base": ""}}, "model.base", "model.base must not be empty", "at least 1"),
    ({"model": {"base": "a/b", "revision": 1234567}}, "model.revision", "must be text", 'quotes: "1234567"'),
    ({"model": {}}, "model.base", "required key base is missing", "add base: Hub id"),
    ({"datasets": []}, "datasets", "datasets must not be empty", "at least 1"),
    ({"datasets": {}}, "datasets", "must be a list", "write a list: datasets: [...]"),
    (
        {"datasets": {"name": "a"}},
        "datasets",
        "must be a list",
        "put a dash before its first key, - name: ...",
    ),
    (dataset(name="a b"), "datasets[0].name", 'only letters, digits, _ and -, got "a b"', "A-Z"),
    (
        dataset(repeats=0),
        "datasets[0].repeats",
        "datasets[0].repeats must be at least 1, got 0",
        "at least 1",
    ),
    (dataset(path=""), "datasets[0].path", "the path must not be empty", "name a folder"),
    (dataset(path=3), "datasets[0].path", "datasets[0].path must be text, got 3", 'quotes: "3"'),
    (dataset(path="a\0b"), "datasets[0].path", "NUL", "remove the character"),
    (
        dataset(path="s4://bucket/x"),
        "datasets[0].path",
        'a protocol that fsspec supports, got "s4"',
        "did you mean s3?",
    ),
    (
        dataset(path="filecache::s3://b/x"),
        "datasets[0].path",
        "must not use filecache",
        "simplecache::",
    ),
    (dataset(path="zip::nosuch://x"), "datasets[0].path", 'got "nosuch"', "use s3"),
    (
        dataset(path="s3://b/l.csv", images="s3://b/l.csv"),
        "datasets[0].images",
        "must be a folder, got the manifest",
        "name a folder",
    ),
    (
        {"output_dir": "s3://bucket/x"},
        "output_dir",
        "must be a local folder, got the address",
        "use a local folder",
    ),
    (
        dataset(path="all.csv", images="b.csv"),
        "datasets[0].images",
        'must be a folder, got the manifest "b.csv"',
        "name a folder",
    ),
    (
        dataset(captions={"suffix": "txt"}),
        "datasets[0].captions.suffix",
        'must start with a dot, got "txt"',
        "use .txt",
    ),
    (dataset(captions={"suffix": [".txt", "cap"]}), "datasets[0].captions.suffix", 'got "cap"', "use .cap"),
    (dataset(captions={"suffix": []}), "datasets[0].captions.suffix", "text or a list of texts", "[.txt,"),
    (dataset(captions={"suffix": 3}), "datasets[0].captions.suffix", "got 3", "[.txt, .caption]"),
    (dataset(captions={"suffix": [".txt", 3]}), "datasets[0].captions.suffix", "be text, got 3", ".txt"),
    (
        dataset(captions={"suffix": [".txt", ".md", ".txt"]}),
        "datasets[0].captions.suffix",
        "must be listed once, got .txt twice",
        "remove one .txt",
    ),
    (dataset(captions={"fallback": " "}), "datasets[0].captions.fallback", "without words", "filename"),
    (
        dataset(captions={"from": "filename", "fallback": "a photo"}),
        "datasets[0].captions.fallback",
        "fallback requires from: sidecar or column, got from: filename",
        "from: sidecar or column",
    ),
    (dataset(captions={"suffix": "."}), "datasets[0].captions.suffix", "must be a dot and letters", ".txt"),
    (
        dataset(captions={"suffix": "./../x"}),
        "datasets[0].captions.suffix",
        "must be a dot and letters",
        ".txt",
    ),
    (
        dataset(captions={"encoding": "utf-9"}),
        "datasets[0].captions.encoding",
        "must be a text encoding of Python, got 'utf-9'",
        "cp1252",
    ),
    (
        dataset(captions={"encoding": "hex"}),
        "datasets[0].captions.encoding",
        "must be a text encoding of Python, got 'hex'",
        "cp1252",
    ),
    (dataset(captions={"fallback_encoding": "x"}), "datasets[0].captions.fallback_encoding", "'x'", "cp1252"),
    (
        dataset(captions={"placeholder": "[trigger]"}),
        "datasets[0].captions.placeholder",
        "placeholder requires a trigger word",
        "set trigger",
    ),
    (
        dataset(mask={}),
        "datasets[0].mask",
        "must have one of path, from and column, got none",
        "mask: {path: data/masks}",
    ),
    (
        dataset(mask={"path": "data/masks", "from": "alpha"}),
        "datasets[0].mask",
        "must have one of path, from and column, got path and from",
        "mask: {from: alpha}",
    ),
    (
        dataset(mask={"from": "alpha", "suffix": "-mask"}),
        "datasets[0].mask.suffix",
        "suffix requires path, got from: alpha",
        "remove suffix",
    ),
    (
        dataset(mask={"path": "data/photos"}),
        "datasets[0].mask",
        "must not be the dataset's folder without mask.suffix",
        "set mask.suffix",
    ),
    (
        dataset(mask={"column": "mask"}),
        "datasets[0].mask.column",
        "mask.column requires a manifest, got path photos",
        ".parquet",
    ),
    (
        dataset(mask={"from": "alpha", "unmasked_weight": 1.0}),
        "datasets[0].mask.unmasked_weight",
        "must be at least 0 and less than 1, got 1.0",
        "less than 1",
    ),
    (
        {"datasets": [PHOTOS, {**CLASS, "captions": {"class_words": "dog"}}]},
        "datasets[1].captions.class_words",
        "class_words require a trigger word",
        "set trigger",
    ),
    (
        dataset(captions={"class_words": "dog", "trigger": "sks dog"}),
        "datasets[0].captions.class_words",
        "require role: prior, got role: train",
        "set role: prior",
    ),
    (
        dataset(captions={"trigger": "sks dog"}, role="prior"),
        "datasets[0].captions.trigger",
        "requires class_words with role: prior",
        "set captions.class_words",
    ),
    (
        dataset(role="prior"),
        "datasets[0].role",
        "at least one dataset must have role: train",
        "remove role: prior",
    ),
    (
        {"training": {"loss": {"prior": "prediction"}}},
        "training.loss.prior",
        "requires a dataset with role: prior",
        "set role: prior",
    ),
    (
        {"training": {"loss": {"prior_weight": 0.5}}},
        "training.loss.prior_weight",
        "requires a dataset with role: prior",
        "set role: prior",
    ),
    (
        dataset(exclude=["../masks"]),
        "datasets[0].exclude[0]",
        "got '../masks'",
        "use a pattern such as masks",
    ),
    (
        dataset(exclude=["old\\masks"]),
        "datasets[0].exclude[0]",
        "must separate folders with /",
        "use old/masks",
    ),
    (
        dataset(path="photos.csv", exclude=["masks"], captions={"from": "column"}),
        "datasets[0].exclude",
        "exclude requires a folder, got the manifest photos.csv",
        "set filters.where",
    ),
    (
        dataset(captions={"from": "column"}),
        "datasets[0].captions.from",
        "requires a manifest, got path photos",
        ".parquet",
    ),
    (
        dataset(filters={"where": "a > 1"}),
        "datasets[0].filters.where",
        "requires a manifest, got path photos",
        ".parquet",
    ),
    (
        dataset(filters={"min_width": 9, "max_width": 8}),
        "datasets[0].filters.min_width",
        "filters.min_width must be at most max_width (8), got 9",
        "at most 8",
    ),
    (dataset(limit=0), "datasets[0].limit", "must be at least 1, got 0", "at least 1"),
    (
        dataset(captions={"from": "fixed"}),
        "datasets[0].captions.text",
        "captions.text is required",
        "set text",
    ),
    (
        dataset(captions={"text": "x"}),
        "datasets[0].captions.text",
        "text requires from: fixed, got from: sidecar",
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
        "columns requires from: column, got from: fixed",
        "from: column",
    ),
    (
        dataset(path_column="file"),
        "datasets[0].path_column",
        "requires a manifest, got path photos",
        "remove this key",
    ),
    *(
        (
            dataset(captions={"from": "filename", key: value}),
            f"datasets[0].captions.{key}",
            f"{key} requires from: sidecar, got from: filename",
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
        "json_key requires suffix: .json, got suffix: .txt",
        "suffix: .json",
    ),
    ({"checks": {"allow": ["finite_values"]}}, "checks.allow[0]", "cannot be allowed", "run the cache job"),
    ({"checks": {"allow": ["path_isolation"]}}, "checks.allow[0]", "cannot be allowed", "separate folders"),
    (
        {"recache": {"cron": "61 3 * * *"}},
        "recache.cron",
        "minute of recache.cron must be between 0 and 59, got '61'",
        "five fields",
    ),
    (
        {"training": {"steps": 5, "warmup_steps": 9}},
        "training.warmup_steps",
        "training.warmup_steps must be at most steps (5), got 9",
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


def test_datasets_with_equal_names_are_reported_even_if_only_case_differs():
    names = ["a", "b", "A", "b"]
    mistakes = mistakes_of(datasets=[{"name": name, "path": name} for name in names])
    assert [(dotted(mistake.path), mistake.what) for mistake in mistakes] == [
        ("datasets[2].name", "dataset names must differ in more than case, got a and A"),
        ("datasets[3].name", "dataset names must be unique, got b twice"),
    ]


def test_a_rule_across_keys_is_reported_together_with_an_unknown_key():
    mistakes = mistakes_of(buckets={"resolution": 1000, "stepp": 8})
    assert {dotted(mistake.path) for mistake in mistakes} == {"buckets.stepp", "buckets.resolution"}


def test_a_rule_across_keys_is_not_reported_for_a_key_that_is_invalid_by_itself():
    mistakes = mistakes_of(buckets={"resolution": "large", "step": 100})
    assert [dotted(mistake.path) for mistake in mistakes] == ["buckets.resolution"]


def test_mistakes_in_all_sections_are_reported_at_once():
    values: dict[str, Any] = {}
    for addition, *_ in CASES:
        for section, change in addition.items():
            if section not in {"datasets", "model", "text", "latents"} and isinstance(change, dict):
                values[section] = {**values.get(section, {}), **change}
    mistakes = {dotted(mistake.path).partition(".")[0] for mistake in mistakes_of(**values)}
    assert mistakes == set(values)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=8), below, max_size=3),
    max_leaves=6,
)
SECTIONS = ["datasets", "cache_dir", "model", "buckets", "latents", "training", "checks", "recache", "other"]


@given(st.dictionaries(st.sampled_from(SECTIONS), JSON, min_size=1))
def test_arbitrary_values_never_raise_and_every_mistake_has_a_fix(values: dict[str, Any]):
    for mistake in mistakes_of(**values):
        assert mistake.what.strip()
        assert mistake.fix.strip()
        assert "see the key's description" not in mistake.fix
