"""Checks of the captions' texts: chatter, markup, prompt syntax, repetition, settings without effect.

To recognise another kind of text, add its expression to `KINDS`. Add texts to test_caption_checks.py that it
finds, and similar ones that it must not find: `true`, `NA`, `<cat-toy>` and `a page of html` are captions.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from pipeline.errors import counted, verb
from pipeline.reporting.findings import Outcome
from pipeline.validated_dataset.caption_phrases import MIN_SHARE, common_phrases
from pipeline.validated_dataset.captions import FALLBACK, HTML_TAGS, PENDING

if TYPE_CHECKING:
    from pipeline.recipe import DatasetSettings, Recipe
    from pipeline.recipe.captions import CaptionSettings

_IMAGE = "(?:image|picture|photo)"

# Polars' expressions have no look-around. Apostrophes are typed or typographic.
KINDS: dict[str, str] = {
    "reasoning": r"(?i)</?(?:think|thinking|thought|reasoning|reflection|scratchpad)>|◁/?think▷",
    "JSON": r'\{\s*"[^"]+"\s*:|^\[\s*"[^"]*"\s*[,\]]',
    "refusal": (
        r"(?i)\bI(?:['’]m| am) (?:very |really |so )?sorry,? (?:but|as an)\b"
        r"|\bas an AI(?: language)? model\b|\bas an AI,"
        r"|\bI(?: cannot| can['’]t| can not| won['’]t|(?:['’]m| am) (?:unable|not able) to) "
        r"(?:assist|help (?:you )?with|provide (?:an?|any|the|this|that)|describe|identify|comply)\b"
        rf"|\bI (?:cannot|can['’]t|don['’]t|do not) see (?:an?|any|the) (?:{_IMAGE}|attachment)"
        r"|\b(?:Es tut mir leid, aber|Lo siento, pero|Je suis désolé, mais|Desculpe, mas|Mi dispiace, ma)\b"
        r"|抱歉，|申し訳ありません|죄송하지만|Извините, но я не"
    ),
    "chatter": (
        r"(?im)\bhere(?:['’]s| is| are) (?:an?|the|your|some) (?:[\w-]+,? ){0,5}"
        r"(?:captions?|descriptions?|prompts?|tags)\b"
        r"|^(?:sure|certainly|absolutely|of course)[,!.] "
        rf"|^\W*(?:{_IMAGE} )?(?:captions?|descriptions?|prompt|assistant|answer|response)\W*:"
        r"|\blet me know if\b|\bI hope this helps\b|\bfeel free to (?:ask|adjust|modify)\b"
        r"|\bthe user (?:wants|asked|is asking|has asked|requested|provided|uploaded)\b"
        rf"|\bplease (?:provide|upload|share|attach) (?:an?|the|your) {_IMAGE}"
        rf"|\b{_IMAGE} (?:that )?you(?:['’]ve| have)? (?:provided|uploaded|shared)\b"
    ),
    "model tokens": r"<\|\w+\|>|\[/?INST\]|<(?:start|end)_of_turn>|<image>|<[A-Z_]*CAPTION>|<loc_\d+>",
    "HTML": (
        rf"(?i)</?(?:{HTML_TAGS})(?:\s[^<>]*)?/?>|</[a-z][a-z0-9]*>|<a [^<>]*href|<!--|<!doctype|<\?xml"
        r"|&(?:nbsp|amp|lt|gt|quot|apos|#\d{1,7}|#x[0-9a-f]{1,6});"
    ),
    "RTF": r"\{\\rtf\d",
    "Git LFS pointer": r"version https://git-lfs\.github\.com/spec/",
    "prompt syntax": (
        r"(?i:<(?:lora|lyco|hypernet):[^<>]*>)"
        # (word:1.3) but not (scale 1:3) or (at 10:30)
        r"|\([^()]*[^\s()\d:](?:\d*:[+-]?\d?\.\d+|:[+-]?[0-3])\)"
        r"|\(\([^()]+\)\)|\[\[[^\[\]]+\]\]|\{\{[^{}]+\}\}|\[(?:[^\[\]:]*[^\[\]\d:])?:[^\[\]:]*:\d?\.?\d+\]|\{[^{}|]*\|[^{}]*\}"
        r"|\\[()\[\]]"
        # BREAK as a tag, but not in COFFEE BREAK
        r"|(?m:(?:^|[,.])\s*BREAK(?:\s*(?:,|$)|\s+[a-z(<]))"
        r"|\bembedding:\w|(?:^|[\s,])__[\w/-]+__(?:[\s,]|$)"
        r"|(?:^|\s)--(?:ar|aspect|v|version|niji|stylize|chaos|no|seed|iw|style)\s"
    ),
    "Markdown": r"(?m)\*\*[^*\s][^*\n]*\*\*|```|^#{1,6} \S|!?\[[^\[\]]*\]\(https?://",
    "link": r"^https?://\S+$",
    "file name": r"(?i)^\S+\.(?:jpe?g|png|webp|gif|bmp|tiff?|heic|avif)$",
    "undecodable characters": r"\x{FFFD}",
}
"""Kinds of texts that are no descriptions, and their expressions. The first that matches names a caption."""

MIN_REPEATED = 3
"""Smallest number of images with one caption that captions_repeated reports."""

MAX_REPEATED_SHARE = 0.1
"""Largest share of a dataset's images that may have one caption."""

_SHOWN_CHARACTERS = 80

_SHOWN_PHRASES = 3

_OTHER_SEPARATORS = ",，、;；|؛،"
"""Characters that divide tags in some alphabets and programs."""

_MIN_SEPARATORS = 2

_USUAL_PLACEHOLDER = re.compile(r"[\[{<]\s*(?:trigger|name)(?:[ _-]?word)?\s*[\]}>]", re.IGNORECASE)
"""Placeholders of other trainers."""


def caption_outcomes(recipe: Recipe, table: pl.DataFrame) -> dict[str, Outcome]:
    """Return the results of the checks of texts; `table` is validated_dataset."""
    # In the forecast of a job, a text of the forecast's own is in place of each pending caption.
    table = table.filter(pl.col("caption_from").ne_missing(PENDING))
    return {
        "captions_plausible": _plausible(table),
        "captions_repeated": _repeated(recipe, table),
        "caption_settings": _settings_effective(recipe, table),
    }


def _plausible(table: pl.DataFrame) -> Outcome:
    more = pl.col("more_captions").str.json_decode(pl.List(pl.String))
    texts = table.select("sample_id", text=pl.concat_list("caption", more)).explode("text")

    # Nearly all captions match nothing, so one expression over all kinds is tried before each one.
    suspected = texts.filter(pl.any_horizontal(pl.col("text").str.contains(each) for each in KINDS.values()))
    kinds = [pl.when(pl.col("text").str.contains(each)).then(pl.lit(kind)) for kind, each in KINDS.items()]
    suspected = suspected.with_columns(what=pl.coalesce(kinds))
    found = suspected.unique("sample_id", keep="first", maintain_order=True).sort("sample_id")
    if found.is_empty():
        return Outcome(True, f"{counted(len(table), 'caption')}, none with chatter, markup or prompt syntax")

    rows = [
        {"sample_id": sample_id, "what": what, "text": _excerpt(text, what)}
        for sample_id, text, what in found.rows()
    ]
    counts = Counter(row["what"] for row in rows).most_common()
    kinds_text = ", ".join(f"{count:,} {what}" for what, count in counts)
    summary = (
        f"{counted(len(rows), 'caption')} {verb(len(rows), 'contains', 'contain')} more than a description: "
        f"{kinds_text}; {rows[0]['sample_id']}: {rows[0]['text']!r}"
    )
    fix = "correct these captions, or write them again"
    syntax = found.filter(what="prompt syntax")["text"].to_list()
    if syntax:
        rule = _replace_rule(_match(syntax[0], "prompt syntax"))
        fix += "; captions.replace removes prompt syntax, which training reads as plain text"
        fix += f": [{rule}]" if rule else ""
    numbers = {what.replace(" ", "_").lower(): count for what, count in counts}
    return Outcome(False, summary, fix, rows, numbers)


def _match(text: str, kind: str) -> str:
    """Return the part of a text that shows its kind."""
    return pl.Series([text]).str.extract(f"({KINDS[kind]})", 1).item()


def _excerpt(text: str, kind: str) -> str:
    return text[text.find(_match(text, kind)) :][:_SHOWN_CHARACTERS]


def _replace_rule(syntax: str) -> str:
    """Return an item of `captions.replace` that removes prompt syntax and keeps its words; or no text."""
    rule = {"find": syntax.strip(" ,.\n")}
    if "BREAK" in syntax:
        rule = {"find": "BREAK"}
    elif syntax.startswith("\\"):
        rule["with"] = syntax[1:]
    elif syntax.startswith("("):
        rule["with"] = syntax.strip("()").rpartition(":")[0] or syntax.strip("()")
    elif not syntax.startswith("<"):
        return ""
    return (
        "{" + ", ".join(f"{key}: {json.dumps(text, ensure_ascii=False)}" for key, text in rule.items()) + "}"
    )


def _repeated(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    # A text in the recipe is repeated on purpose, and so are the captions of a class.
    datasets = [each.name for each in recipe.datasets if each.role != "prior"]
    written = table.filter(
        pl.col("dataset").is_in(datasets) & ~pl.col("caption_from").is_in(["fixed", FALLBACK])
    )
    sizes = table.group_by("dataset").agg(of=pl.len())
    repeated = (
        written.group_by("dataset", "caption")
        .agg(images=pl.len(), first=pl.col("sample_id").min())
        .join(sizes, on="dataset")
        .filter(pl.col("images") >= MIN_REPEATED, pl.col("images") > MAX_REPEATED_SHARE * pl.col("of"))
        .sort("images", "first", descending=[True, False])
    )
    rows = repeated.select("dataset", "caption", "images", "of", "first").rows(named=True)
    distinct = written.unique("caption", keep="first", maintain_order=True)
    common = [
        row
        for settings in recipe.datasets
        for row in common_phrases(settings, distinct.filter(dataset=settings.name))
    ]
    numbers = {"repeated": len(rows), "phrases": len(common)}
    if not rows and not common:
        summary = (
            f"no caption is on more than {MAX_REPEATED_SHARE:.0%} of a dataset's images, and no phrase "
            f"besides the trigger word is in {MIN_SHARE:.0%} of its captions"
        )
        return Outcome(True, summary, numbers=numbers)
    texts = [_repeated_text(rows)] if rows else []
    texts += [_phrase_text(row) for row in common[:_SHOWN_PHRASES]]
    fixes = dict.fromkeys(_FIXES[row.get("what", "caption")] for row in [*rows, *common])
    return Outcome(False, "; ".join(texts), "; ".join(fixes), [*rows, *common], numbers)


def _repeated_text(rows: Sequence[Mapping[str, Any]]) -> str:
    first = rows[0]
    return (
        f"{counted(len(rows), 'caption is', 'captions are')} on more than {MAX_REPEATED_SHARE:.0%} of a "
        f"dataset's images: {first['caption'][:_SHOWN_CHARACTERS]!r} on {first['images']:,} of "
        f"{counted(first['of'], 'image')} of {first['dataset']}"
    )


def _phrase_text(row: Mapping[str, Any]) -> str:
    place = f"{row['images']:,} of {row['of']:,} captions of {row['dataset']}"
    if row["what"] == "phrase":
        return f"{row['text']!r} is in {place}"
    return f"{row['text']!r} opens {place}, but not {row['without']}"


_FIXES = {
    "caption": "describe each image; if one caption is intended, set captions: {from: fixed, text: ...}",
    "phrase": "remove a phrase that nearly all captions have, for example with captions.replace: the concept "
    "binds to it instead of the trigger word; keep it if prompts will contain it",
    "opening": "if the opening is the trigger word, set captions.trigger to it, which adds it to the others",
}
"""Fixes of captions_repeated by kind of row."""


def _settings_effective(recipe: Recipe, table: pl.DataFrame) -> Outcome:
    rows: list[dict[str, Any]] = []
    for settings in recipe.datasets:
        in_dataset = table.filter(pl.col("dataset") == settings.name)
        rows += _tags_without_effect(settings, in_dataset)
        rows += _placeholders_left(settings.captions, in_dataset)
    if not rows:
        return Outcome(True, "the settings of the captions have an effect")
    summary = f"{rows[0]['setting']} has no effect: {rows[0]['sample_id']}: {rows[0]['problem']}"
    fixes = {
        **{
            f"captions.{key}": f"set captions.{key}.separator to the characters between the tags and keep to "
            f"a smaller number, or remove captions.{key}"
            for key in ("shuffle", "drop_tags")
        },
        "captions.placeholder": "write the placeholder as in the captions, or correct them with "
        "captions.replace",
    }
    fix = "; ".join(fixes[setting] for setting in dict.fromkeys(row["setting"] for row in rows))
    return Outcome(False, summary, fix, rows, dict(Counter(row["setting"].partition(".")[2] for row in rows)))


def _tags_without_effect(settings: DatasetSettings, table: pl.DataFrame) -> Iterator[dict[str, Any]]:
    captions, tags = settings.captions, settings.captions.tags
    if tags is None or table.is_empty():
        return
    row = {"setting": "captions.drop_tags" if captions.shuffle is None else "captions.shuffle"}

    # Without the parts that the recipe adds, which have separators of their own.
    text = pl.col("caption").str.strip_prefix(captions.prefix).str.strip_suffix(captions.postfix)
    text = text.str.strip_prefix(f"{captions.trigger}, ") if captions.trigger else text
    if captions.drop_tags is None:
        texts = table.select("caption", "more_captions").iter_rows()
        has_effect = any(_is_shuffled(*each) for each in texts)
    else:
        # Whether a tag is dropped is chance, so what counts is whether one may be.
        num_tags = table.select(text.str.split(tags.separator).list.len()).to_series()
        has_effect = bool((num_tags > max(tags.keep, 1)).any())
    if not has_effect:
        sample_id, caption = table.select("sample_id", "caption").row(0)
        number = "two tags" if captions.drop_tags is None else "a tag"
        problem = (
            f"no caption has {number}, divided by {tags.separator!r}, behind the first {tags.keep}; "
            f"this one is {caption[:_SHOWN_CHARACTERS]!r}"
        )
        yield {"sample_id": sample_id, **row, "problem": problem}
        return

    others = "".join(each for each in _OTHER_SEPARATORS[1:] if each not in tags.separator)
    is_divided = text.str.count_matches(f"[{others}]") >= _MIN_SEPARATORS
    has_separator = text.str.contains(tags.separator.strip() or tags.separator, literal=True)
    for sample_id, caption in table.filter(is_divided & ~has_separator).select("sample_id", "caption").rows():
        problem = f"its tags are not divided by {tags.separator!r}: {caption[:_SHOWN_CHARACTERS]!r}"
        yield {"sample_id": sample_id, **row, "problem": problem}


def _is_shuffled(caption: str, more_captions: str) -> bool:
    # The orders of one caption have the same characters.
    texts = [caption, *json.loads(more_captions)]
    return len({"".join(sorted(text)) for text in texts}) < len(texts)


def _placeholders_left(settings: CaptionSettings, table: pl.DataFrame) -> Iterator[dict[str, Any]]:
    expressions, added = [_USUAL_PLACEHOLDER], (settings.trigger, settings.class_words)
    if settings.placeholder is not None:
        expressions.insert(0, _in_any_case(settings.placeholder))
    for sample_id, caption in table.select("sample_id", "caption").iter_rows():
        # The words in place of the placeholder may be similar to it, such as SKS for sks.
        text = caption
        for words in filter(None, added):
            text = text.replace(words, "")
        text = text if text.isascii() else unicodedata.normalize("NFKC", text)
        match = next(filter(None, (each.search(text) for each in expressions)), None)
        if match is not None:
            wanted = f"placeholder {settings.placeholder}" if settings.placeholder else "no placeholder"
            problem = f"{match[0]} is left in the caption; the recipe has {wanted}"
            yield {"sample_id": sample_id, "setting": "captions.placeholder", "problem": problem}


def _in_any_case(placeholder: str) -> re.Pattern[str]:
    """Return an expression for a placeholder in any case, with any blanks between words and brackets."""
    parts = re.findall(r"\w+|[^\w\s]", unicodedata.normalize("NFKC", placeholder))
    start = r"(?<!\w)" if re.match(r"\w", parts[0]) else ""
    end = r"(?!\w)" if re.match(r"\w", parts[-1]) else ""
    return re.compile(start + r"\s*".join(map(re.escape, parts)) + end, re.IGNORECASE)
