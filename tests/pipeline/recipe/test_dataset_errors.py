"""Mistakes in the section `datasets`, and in keys that require a setting of a dataset."""

from typing import Any

from pipeline.recipe.yaml_document import dotted
from tests.pipeline.recipe.mistakes import Case, assert_mistake, dataset, each_case, mistakes_of

PHOTOS = {"name": "photos", "path": "data/photos"}
CLASS = {"name": "class", "path": "data/class", "role": "prior"}

CASES: list[Case] = [
    (
        {"datasets": [PHOTOS, {**CLASS, "slider": -1, "role": "train"}]},
        "datasets[1].slider",
        "slider: -1 requires a dataset with slider: 1, got none",
        "set slider: 1 for the dataset of the opposite",
    ),
    (dataset(slider=0.5), "datasets[0].slider", "must be 1 or -1, got 0.5", "1 or -1"),
    (
        {
            "datasets": [{**PHOTOS, "slider": 1}, {**CLASS, "slider": -1, "role": "train"}],
            "training": {"lora": {"dora": True}},
        },
        "training.lora.dora",
        "training.lora.dora must be false with datasets[].slider",
        "remove dora",
    ),
    (
        {
            "datasets": [{**PHOTOS, "slider": 1}, {**CLASS, "slider": -1, "role": "train"}],
            "training": {"lora": {"kind": "oft"}},
        },
        "training.lora.kind",
        "training.lora.kind must not be oft with datasets[].slider",
        "set kind: lora",
    ),
    (
        {
            "datasets": [
                {**PHOTOS, "slider": 1},
                {**PHOTOS, "name": "b", "slider": -1},
                {**CLASS, "slider": 1},
            ]
        },
        "datasets[2].slider",
        "slider requires role: train, got role: prior with slider: 1",
        "remove slider or role",
    ),
    (dataset(caption={}), "datasets[0].caption", "unknown key caption", "did you mean captions?"),
    (
        dataset(captions={"from_": "fixed"}),
        "datasets[0].captions.from_",
        "unknown key from_",
        "did you mean from?",
    ),
    (dataset(weight=0), "datasets[0].weight", "must be greater than 0, got 0", "greater than 0"),
    (
        {"datasets": [{"name": "a", "path": "a", "weight": 2.0}, {"name": "b", "path": "b"}]},
        "datasets[1]",
        "either all datasets or none must have a weight, got 1 of 2",
        "give each dataset a weight, or none",
    ),
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
        'a protocol in docs/remote_storage.md, got "s4"',
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
        "datasets[0].mask.path",
        "mask.path must not be the dataset's folder without mask.suffix",
        "set mask.suffix",
    ),
    (
        dataset(mask={"column": "mask"}),
        "datasets[0].mask.column",
        "mask.column requires a manifest, got path photos",
        ".parquet",
    ),
    (
        dataset(references={"path": "data/before"}),
        "datasets[0].references",
        "must be a list",
        "put a dash before its first key, - path: ...",
    ),
    (
        dataset(references=[{}]),
        "datasets[0].references[0]",
        "a reference must have one of path and column, got none",
        "references: [{path: data/before}]",
    ),
    (
        dataset(path="a.csv", references=[{"path": "data/before", "column": "before"}]),
        "datasets[0].references[0]",
        "a reference must have one of path and column, got path and column",
        "[{column: before}]",
    ),
    (
        dataset(references=[{"path": "data/before"}, {"column": "before"}]),
        "datasets[0].references[1].column",
        "references[1].column requires a manifest, got path photos",
        ".parquet",
    ),
    (
        dataset(path="a.csv", references=[{"column": "before", "suffix": "-before"}]),
        "datasets[0].references[0].suffix",
        "suffix requires path, got column: before",
        "remove suffix",
    ),
    (
        dataset(references=[{"path": "data/photos"}]),
        "datasets[0].references[0].path",
        "references[0].path must not be the dataset's folder without references[0].suffix",
        "set references[0].suffix",
    ),
    (
        dataset(references=[{"path": "data/before"}, {"path": "data/before", "resolution": 512}]),
        "datasets[0].references[1]",
        "references[1] reads the same files as references[0]: data/before",
        "remove one",
    ),
    (
        dataset(references=[{"path": "data/before", "resolution": 0}]),
        "datasets[0].references[0].resolution",
        "must be",
        "16",
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
            f"{key} requires from: sidecar or model, got from: filename",
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
]


@each_case(CASES)
def test_a_mistake_of_a_dataset_names_key_value_and_fix(
    values: dict[str, Any], key: str, what: str, fix: str
):
    assert_mistake(values, key, what, fix)


def test_datasets_with_equal_names_are_reported_even_if_only_case_differs():
    names = ["a", "b", "A", "b"]
    mistakes = mistakes_of(datasets=[{"name": name, "path": name} for name in names])
    assert [(dotted(mistake.path), mistake.what) for mistake in mistakes] == [
        ("datasets[2].name", "dataset names must differ in more than case, got a and A"),
        ("datasets[3].name", "dataset names must be unique, got b twice"),
    ]
