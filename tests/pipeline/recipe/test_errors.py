"""Each mistake names the key, the value and a fix, in the terms of the YAML file.

Those in the section `datasets` are in test_dataset_errors.py.
"""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pipeline.recipe.yaml_document import dotted
from tests.pipeline.recipe.mistakes import Case, assert_mistake, each_case, mistakes_of

CASES: list[Case] = [
    ({"cache_dirr": "x"}, "cache_dirr", "unknown key cache_dirr", "did you mean cache_dir?"),
    ({"resolution": 512}, "resolution", "unknown key resolution", "write it as buckets.resolution"),
    (
        {"name": "flowers"},
        "name",
        "unknown key name",
        "remove it: the name of a recipe is the name of its file",
    ),
    (
        {"text": {"zzz": 1}},
        "text.zzz",
        "unknown key zzz",
        "remove it; the keys of text are caption_dropout, dtype",
    ),
    (
        {"model": {"base": "/", "revision": "main"}},
        "model.base",
        "model.base must name a model, got '/'",
        "write a Hub id such as owner/name",
    ),
    (
        {"recache": {"timezone": "Middle/Earth"}},
        "recache.timezone",
        "recache.timezone must be a time zone, got 'Middle/Earth'",
        "write a name such as Europe/Berlin or UTC",
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
    (
        {"training": {"exhausted": "repeat"}},
        "training.exhausted",
        "repeat requires datasets with weights",
        "give each dataset a",
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
        {"buckets": {"resolution": [512, 768]}},
        "buckets.resolution",
        "must be an integer, got [512, 768]",
        "write resolutions: [512, 768]",
    ),
    (
        {"training": {"lr_scheduler": "cosine_annealing"}},
        "training.lr_scheduler",
        'got "cosine_annealing"',
        "did you mean cosine?",
    ),
    (
        {"training": {"sample_prompts": [{"photo": "a brick wall"}]}},
        "training.sample_prompts[0]",
        "a prompt with a colon must be in quotes, got photo: a brick wall",
        'write "photo: a brick wall"',
    ),
    (
        {"training": {"lora": {"target_modules": ["to_q"]}}},
        "training.lora.target_modules",
        "unknown key target_modules",
        "write training.lora.modules",
    ),
    (
        {"training": {"train_text_encoder": True}},
        "training.train_text_encoder",
        "unknown key train_text_encoder",
        "write training.lora.text_encoders",
    ),
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
        {"training": {"sample_prompts": [{"prompt": "a rose", "references": "a.png"}]}},
        "training.sample_prompts[0].references",
        'must be a list, got "a.png"',
        'write a list: references: ["a.png"]',
    ),
    (
        {"training": {"sample_prompts": [{"prompt": "a rose", "references": ["https://host/a.png"]}]}},
        "training.sample_prompts[0].references[0]",
        "must be a local folder, got the address",
        "use a local folder",
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
    (
        {"checks": {"allow": ["conservaton"]}},
        "checks.allow[0]",
        "'conservaton'",
        "did you mean conservation?",
    ),
    ({"checks": {"allow": ["finite_values"]}}, "checks.allow[0]", "cannot be allowed", "run the cache job"),
    ({"checks": {"allow": ["path_isolation"]}}, "checks.allow[0]", "cannot be allowed", "separate folders"),
    (
        {"checks": {"gates": ["picture_sharp"]}},
        "checks.gates[0]",
        "'picture_sharp'",
        "did you mean pictures_sharp?",
    ),
    ({"checks": {"gates": ["names_distinct"]}}, "checks.gates[0]", "names of warnings", "a gate already"),
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


@each_case(CASES)
def test_a_mistake_names_key_value_and_fix(values: dict[str, Any], key: str, what: str, fix: str):
    assert_mistake(values, key, what, fix)


def test_a_misspelled_key_of_a_prompt_is_not_taken_for_a_text_with_a_colon():
    mistakes = mistakes_of(training={"sample_prompts": [{"promt": "a brick wall"}]})
    fixes = {dotted(mistake.path): mistake.fix for mistake in mistakes}
    assert fixes["training.sample_prompts[0].promt"] == "did you mean prompt?"


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
