"""Captions with more than a description, repeated ones and settings without effect are warned by name."""

from __future__ import annotations

from typing import Any

import pytest
from ruamel.yaml import YAML

from pipeline.reporting.findings import CheckContext, Finding
from pipeline.validated_dataset import checks
from pipeline.validated_dataset.captions import canonical
from tests.pipeline.dataset_folder import Folder
from tests.pipeline.reporting.row_columns import require_columns

NO_DESCRIPTION = {
    "refusal": (
        "I'm sorry, but I can't help with describing this image.",
        "I\u2019m sorry, but I cannot assist with that request.",
        "sks, As an AI language model, I cannot see images.",
        "I am unable to provide a caption.",
        "I don't see any image in your message",
        "Es tut mir leid, aber ich kann dabei nicht helfen.",
        "\u62b1\u6b49\uff0c\u6211\u65e0\u6cd5\u63cf\u8ff0",
    ),
    "chatter": (
        "Sure, here is a caption: a red rose",
        "Here's a detailed, vivid description of the image: a rose",
        "Caption: a red rose",
        "**Description:** a red rose",
        "a red rose. Let me know if you need more!",
        "The user wants a list of tags. a rose",
        "In the image you provided, a rose",
    ),
    "reasoning": (
        "<think>Okay the user wants</think> a cat",
        "a cat</think>",
        "<reasoning>\nA cat?\n</reasoning>\na cat",
    ),
    "model tokens": (
        "a cat<|im_end|>",
        "[INST] describe [/INST] a cat",
        "<MORE_DETAILED_CAPTION>a cat",
        "<image> a cat",
    ),
    "HTML": (
        "<html><body>a red rose</body></html>",
        "a red<br/>rose",
        "<b>a rose</b>",
        "salt &amp; pepper",
        '<a class="x" href="y">rose</a>',
        '<?xml version="1.0"?><x>rose</x>',
    ),
    "RTF": (r"{\rtf1\ansi\deff0 {\fonttbl {\f0 Arial;}} \f0 a red rose}",),
    "Git LFS pointer": ("see version https://git-lfs.github.com/spec/v1 of it",),
    "prompt syntax": (
        "(masterpiece:1.3), <lora:foo:0.8>, BREAK, dog",
        "<LyCO:style:1>, a dog",
        "a dog, (blurry:-.5)",
        "(style2:1.3), a dog",
        "((best quality)), a dog",
        r"hatsune miku \(vocaloid\)",
        "a [cat:dog:0.5] in a garden",
        "a {red|blue} rose",
        "a rose, BREAK a dog",
        "a __colour__ rose",
        "a rose --ar 16:9 --v 6",
        "embedding:easynegative, a rose",
    ),
    "JSON": ('{"caption": "a rose", "tags": []}', '["a rose", "red"]'),
    "Markdown": ("**A red rose** in a vase", "# A red rose", "![rose](https://example.org/rose.jpg)"),
    "link": ("https://example.org/rose.jpg",),
    "file name": ("IMG_0001.JPG", "rose.webp"),
    "undecodable characters": ("a caf\ufffd",),
}

DESCRIPTIONS = (
    *("007", "NA", "true", "1e5", "null", "nan", "-", ".", "\u732b", "\U0001f600", "<3"),
    *("<cat-toy>", "<s1><s2> on a table", "a <style> rose", "<sks>"),
    "a page of html, a browser",
    "an html document about <cat-toy>",
    "a cat (black) and a dog (brown)",
    "a clock (10:30), a map (scale 1:3), a film (16:9)",
    "a model (scale 1:2.5), (ISO 100, f 1:2.8), a video still [00:12:30]",
    "a cup of coffee, COFFEE BREAK, a table",
    'a sign that says "BREAK"',
    "BREAKING NEWS, a screen",
    "a sorry sight, a man who says I'm sorry, Dave",
    "a man cannot help but laugh; I cannot wait",
    "a robot as an AI assistant, thinking",
    "here is a cat, there is a dog",
    "of course a rose",
    "a label with the description of a plant",
    "salt & pepper, R&D, a > b, x < y",
    "#cat #dog, a hashtag",
    "a rose * a star ** two stars",
    "C:\\photos\\rose, \u00af\\_(\u30c4)_/\u00af",
    "a smiley :) and {curly} and [square] brackets",
    "a web page at https://example.org",
    "a - b -- c --- d, no",
    "a file called rose.jpg on a screen",
)


def checked(folder: Folder) -> dict[str, Finding]:
    findings = checks.run(CheckContext(folder.recipe, folder.tables))
    require_columns(findings)
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize("kind", NO_DESCRIPTION)
def test_C10_C11_texts_that_are_no_descriptions_are_named_and_counted(folder: Folder, kind: str) -> None:
    texts = dict(enumerate(NO_DESCRIPTION[kind]))
    for number, text in texts.items():
        folder.add(f"{number:02}.png", caption=text)
    folder.add("zz.png", caption="a red rose")
    folder.ingest()
    finding = checked(folder)["captions_plausible"]
    assert {row["sample_id"]: row["what"] for row in finding.rows} == {
        f"d/{number:02}.png": kind for number in texts
    }
    assert (finding.passed, finding.severity) == (False, "warn")
    number = kind.replace(" ", "_").lower()
    assert finding.numbers == {"num_rows": len(texts), number: len(texts)}
    assert f"{len(texts)} {kind}" in finding.summary
    assert ("captions.replace" in finding.fix) == (kind == "prompt syntax")


def test_C10_C11_ordinary_captions_are_not_warned(folder: Folder) -> None:
    for number, text in enumerate(DESCRIPTIONS):
        folder.add(f"{number}.png", caption=text)
    kept = folder.ingest().table
    captions = {f"{number}.png": canonical(text) for number, text in enumerate(DESCRIPTIONS)}
    assert dict(kept.select("path", "caption").rows()) == captions, "their entries stay valid"
    findings = checked(folder)
    assert findings["captions_plausible"].rows == []
    assert findings["captions_plausible"].passed
    assert findings["captions_present"].passed


@pytest.mark.parametrize(
    ("caption", "rule", "replaced"),
    [
        ("<lora:foo:0.8>, a dog", {"find": "<lora:foo:0.8>"}, "a dog"),
        ("a (red:1.3) dog on grass", {"find": "(red:1.3)", "with": "red"}, "a red dog on grass"),
        ("((red)) dog", {"find": "((red))", "with": "red"}, "red dog"),
        ("a dog, BREAK a cat", {"find": "BREAK"}, "a dog, a cat"),
        (r"miku \(vocaloid", {"find": r"\(", "with": "("}, "miku (vocaloid"),
    ],
)
def test_C11_the_fix_is_a_replacement_that_keeps_the_words(
    folder: Folder, caption: str, rule: dict[str, str], replaced: str
) -> None:
    folder.add("a.png", caption=caption)
    folder.ingest()
    fix = checked(folder)["captions_plausible"].fix
    assert YAML(typ="safe").load(fix.rpartition(": [")[2].removesuffix("]")) == rule
    folder.captions = {"replace": [rule]}
    assert folder.ingest().table["caption"].to_list() == [replaced]
    assert checked(folder)["captions_plausible"].passed


def test_C10_each_of_several_captions_is_checked(folder: Folder) -> None:
    folder.captions = {"lines": "each"}
    folder.add("a.png", caption="a rose\nI cannot assist with that\n")
    folder.ingest()
    (row,) = checked(folder)["captions_plausible"].rows
    assert (row["what"], row["text"]) == ("refusal", "I cannot assist with that")


@pytest.mark.parametrize(
    "text",
    [
        "\u200b\u200b\u2060",
        "\u3164 \u2800",
        "\u00ad\ufe0f",
        "\ufffd\ufffd",
        "<think>a cat?",
        "<think>a cat?</think>\n",
        "<lora:foo:0.8>",
        "<p>&nbsp;</p><br>",
        "<html><body></body></html>",
        r"{\rtf1\ansi{\fonttbl{\f0 Arial;}}\f0\fs24 }",
    ],
)
def test_C10_a_caption_without_readable_text_closes_the_gate(folder: Folder, text: str) -> None:
    folder.add("a.png", caption=text)
    folder.add("b.png")
    (row,) = folder.ingest().rejected.to_dicts()
    assert (row["reason"], row["sample_id"]) == ("caption_empty", "d/a.png")
    assert "has no readable text" in row["detail"]
    assert checked(folder)["captions_present"].closes
    folder.captions = {"fallback": "a rose"}
    assert folder.ingest().table["caption_from"].to_list() == ["fallback", "sidecar:b.txt"]


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 45\n"


@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        (b"PK\x03\x04 binary", "is a ZIP archive", "plain text"),
        (b"%PDF-1.7\n1 0 obj", "is a PDF document", "plain text"),
        (b"GIF89a\x01\x00", "is a GIF image", "plain text"),
        (b"bplist00\x01\x02", "is a binary property list", "plain text"),
        (b"ab\x01c\x02\x03d\x04e\x05", "has 5 control characters among 10", "plain text"),
        (LFS, "is a pointer of Git LFS", "git lfs pull"),
    ],
    ids=["zip", "pdf", "gif", "plist", "controls", "lfs"],
)
def test_C10_a_caption_file_of_another_type_closes_the_gate(
    folder: Folder, data: bytes, what: str, fix: str
) -> None:
    folder.captions = {"fallback": "a rose"}
    folder.add("a.png", caption=data)
    (row,) = folder.ingest().rejected.to_dicts()
    assert row["reason"] == "caption_undecodable"
    assert f"its caption a.txt {what}" in row["detail"]
    assert fix in row["fix"]
    assert checked(folder)["captions_decodable"].closes


def test_C10_one_caption_on_more_than_a_tenth_of_the_images_is_named(folder: Folder) -> None:
    for number in range(29):
        same = {0: "a photo", 1: "a picture"}.get(number % 10)
        folder.add(f"{number}.png", folder.picture(number), caption=same or f"a photo of {number}")
    folder.ingest()
    finding = checked(folder)["captions_repeated"]
    assert [(row["caption"], row["images"], row["of"], row["dataset"]) for row in finding.rows] == [
        ("a photo", 3, 29, "d"),
        ("a picture", 3, 29, "d"),
    ]
    assert finding.summary.endswith("'a photo' on 3 of 29 images of d")
    folder.add("30.png", folder.picture(30), caption="another")
    folder.ingest()
    assert checked(folder)["captions_repeated"].passed, "3 of 30 is a tenth"


@pytest.mark.parametrize(
    "settings",
    [
        {"captions": {"from": "fixed", "text": "a photo"}},
        {"captions": {"suffix": ".caption", "fallback": "a photo"}},
    ],
    ids=["fixed", "fallback"],
)
def test_C10_a_caption_that_is_repeated_on_purpose_is_not_warned(
    folder: Folder, settings: dict[str, Any]
) -> None:
    for name, value in settings.items():
        setattr(folder, name, value)
    for number in range(4):
        folder.add(f"{number}.png", folder.picture(number))
    folder.ingest()
    assert checked(folder)["captions_repeated"].passed


def test_C10_images_of_a_class_may_share_a_caption(folder: Folder) -> None:
    for number in range(4):
        folder.add(f"{number}.png", folder.picture(number))
    folder.ingest()
    assert not checked(folder)["captions_repeated"].passed
    recipe = folder.recipe
    prior = recipe.datasets[0].model_copy(update={"role": "prior"})
    context = CheckContext(recipe.model_copy(update={"datasets": (prior,)}), folder.tables)
    assert {each.name: each for each in checks.run(context)}["captions_repeated"].passed


@pytest.mark.parametrize(
    ("shuffle", "captions", "is_effective"),
    [
        ({}, ["\u4e00\uff0c\u4e8c\uff0c\u4e09\uff0c\u56db", "\u4e94\uff0c\u516d\uff0c\u4e03"], False),
        ({}, ["a; b; c; d", "e; f; g"], False),
        ({"separator": "|"}, ["a, b, c, d"], False),
        ({"keep": 3}, ["a, b, c, d", "e, f, g"], False),
        ({}, ["a rose in a vase", "a dog"], False),
        ({}, ["a, b, c, d, e", "a rose in a vase"], True),
        ({"separator": " "}, ["a b c d e"], True),
        ({}, ["a, b, c, d, e", "\u4e00\u3001\u4e8c\u3001\u4e09"], False),
    ],
)
def test_C12_shuffling_that_changes_nothing_is_warned(
    folder: Folder, shuffle: dict[str, Any], captions: list[str], is_effective: bool
) -> None:
    folder.captions = {"shuffle": shuffle, "trigger": "sks"}
    for number, caption in enumerate(captions):
        folder.add(f"{number}.png", caption=caption)
    folder.ingest()
    finding = checked(folder)["caption_settings"]
    assert finding.passed == is_effective, finding.summary
    if not is_effective:
        assert {row["setting"] for row in finding.rows} == {"captions.shuffle"}
        assert finding.numbers == {"num_rows": 1, "shuffle": 1}
        assert "captions.shuffle" in finding.fix


@pytest.mark.parametrize(
    ("settings", "captions", "is_effective"),
    [
        ({}, ["a; b; c; d", "e; f; g"], False),
        ({"keep": 3}, ["a, b, c", "e, f"], False),
        ({"keep": 3}, ["a, b, c, d", "e, f"], True),
        ({"keep": 0}, ["a rose in a vase"], False),
        # No tag is dropped by chance.
        ({"rate": 0.0001}, ["a, b"], True),
    ],
)
def test_C12_dropping_tags_that_changes_nothing_is_warned(
    folder: Folder, settings: dict[str, Any], captions: list[str], is_effective: bool
) -> None:
    folder.captions = {"drop_tags": {"rate": 0.5, **settings}, "trigger": "sks"}
    for number, caption in enumerate(captions):
        folder.add(f"{number}.png", caption=caption)
    folder.ingest()
    finding = checked(folder)["caption_settings"]
    assert finding.passed == is_effective, finding.summary
    if not is_effective:
        assert finding.numbers == {"num_rows": 1, "drop_tags": 1}
        assert "set captions.drop_tags.separator" in finding.fix


@pytest.mark.parametrize(
    ("placeholder", "caption", "left"),
    [
        ("[trigger]", "a photo of [Trigger] in snow", "[Trigger]"),
        ("[trigger]", "a photo of [ TRIGGER ]", "[ TRIGGER ]"),
        ("[trigger]", "a photo of \uff3btrigger\uff3d", "[trigger]"),
        ("TOK", "a photo of tok", "tok"),
        ("my dog", "a photo of My  Dog", "My Dog"),
        (None, "a photo of [trigger]", "[trigger]"),
        (None, "a photo of [name]", "[name]"),
        ("{word}", "a photo of <trigger>", "<trigger>"),
    ],
)
def test_C12_a_placeholder_that_is_left_is_warned(
    folder: Folder, placeholder: str | None, caption: str, left: str
) -> None:
    folder.captions = {"trigger": "sks", "placeholder": placeholder}
    folder.add("a.png", caption=caption)
    folder.ingest()
    (row,) = checked(folder)["caption_settings"].rows
    assert (row["sample_id"], row["setting"]) == ("d/a.png", "captions.placeholder")
    assert row["problem"].startswith(f"{left} is left in the caption")


@pytest.mark.parametrize(
    ("settings", "caption"),
    [
        ({"trigger": "SKS dog", "placeholder": "sks"}, "a photo of sks"),
        ({"trigger": "sks", "placeholder": "TOK"}, "a token of a stoke"),
        ({"trigger": "sks", "placeholder": "my dog"}, "tommy dogs"),
        ({}, "a [red] rose, name tag, a trigger (old)"),
    ],
)
def test_C12_a_replaced_placeholder_and_similar_words_are_not_warned(
    folder: Folder, settings: dict[str, Any], caption: str
) -> None:
    folder.captions = settings
    folder.add("a.png", caption=caption)
    folder.ingest()
    assert checked(folder)["caption_settings"].passed
