"""Choose the caption of an image among its sources, and bring it into one canonical form."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipeline.images.formats import ImageError
from pipeline.raw_images.folder import last_suffix, sidecar_path
from pipeline.raw_images.scan_index import SIDECAR
from pipeline.recipe.captions import FILENAME
from pipeline.storage.source import MAX_TEXT_BYTES
from pipeline.validated_dataset.caption_files import missing_error, read_caption_file

if TYPE_CHECKING:
    from pipeline.recipe import CaptionSettings
    from pipeline.recipe.captions import ReplaceSettings
    from pipeline.storage.source import Source

MODEL = "model"
"""Value of `caption_from` for a caption that a model wrote, see `pipeline.captions`."""

PENDING = "pending"
"""Value of `caption_from` in the forecast of a job, for a caption that its model has not written yet."""

FALLBACK = "fallback"
"""Value of `caption_from` for a caption from `captions.fallback`."""

EDITED = "edit"
"""Value of `caption_from` for a caption that a person has edited, see `edited_captions`."""

NO_CAPTION = ("caption_missing", "caption_empty")
"""Reasons of images without a caption, for which `captions.fallback` is used."""

_LINE_ENDS = re.compile("\r\n|[\r\n\v\f\x85\u2028\u2029]")

HTML_TAGS = (
    "html|head|body|div|span|p|br|hr|img|table|tbody|tr|td|th|ul|ol|li|h[1-6]|strong|script|iframe|font|blockquote"
    "|figure|figcaption|section|article"
)
"""Names of HTML's tags as a regular expression, without names that a token such as <style> may have."""

_MARKUP = re.compile(
    r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)"
    rf"|<(?:lora|lyco|hypernet):[^<>]*>|</?(?:{HTML_TAGS})(?:\s[^<>]*)?/?>|</[a-z][a-z0-9]*>|<!--.*?-->"
    r"|<!doctype[^<>]*>|<\|\w+\|>|&(?:nbsp|#160|#xa0);",
    re.IGNORECASE | re.DOTALL,
)
"""Text that a model wrote for itself, prompt syntax and HTML, which are no words of a caption."""

_RTF = re.compile(
    r"\{\\(?:fonttbl|colortbl|stylesheet|info|\*).*?\}+|\\[a-z]+-?\d* ?|\\'[0-9a-f]{2}|[{}]", re.DOTALL
)
"""RTF's tables, commands and brackets."""

# The characters that Unicode calls default ignorable, the empty Braille pattern, and replacement characters.
_VISIBLE = re.compile(
    r"[^\s\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800"
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffd\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    r"\U000e0000-\U000e0fff]"
)
"""A character that can be seen."""

_INVISIBLE = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ufeff]")
"""Control characters except white space, and byte order marks inside a text."""


class Caption(NamedTuple):
    """The captions of one image.

    Attributes:
        texts: At least one text in canonical form; none is empty.
        source: "sidecar:<path>", "filename", "fixed", "column", "model", "fallback" or "edit", for the column
            `caption_from`. With `as: column`, the text of the model follows the ones of the file.
    """

    texts: tuple[str, ...]
    source: str


def caption_of(
    settings: CaptionSettings,
    source: Source,
    path: str,
    manifest_texts: Sequence[str] | None = None,
    *,
    sidecar_bytes: Sequence[int] = (),
    written: str | None = None,
) -> Caption:
    """Return the caption of one image, or its captions if it has several.

    `manifest_texts` are from the manifest's caption columns, or None without a manifest. `written` is the
    text of the model, or None if it has not captioned the image. `sidecar_bytes` are the sizes of the files
    listed in `captions.suffix`, in that order, -1 for a file that does not exist; they may be omitted.

    Raises:
        ImageError: There is no caption (`caption_missing`), it is empty (`caption_empty`), its bytes do
            not decode (`caption_undecodable`), its file cannot be read (`caption_unreadable`), or its file is
            a link out of the dataset (`caption_outside_dataset`).
    """
    if settings.as_ == "column":
        return _with_model_caption(settings, source, path, sidecar_bytes, written)
    if is_left_to_model(settings, source, path, sidecar_bytes):
        return _model_caption(settings, source, path, written)
    try:
        return _own_caption(settings, source, path, manifest_texts, sidecar_bytes)
    except ImageError as err:
        if settings.fallback is None or err.reason not in NO_CAPTION:
            raise

    # The fallback takes the same way as any caption: `replace` and the check of its text apply.
    text = _words_of_name(path) if settings.fallback == FILENAME else settings.fallback
    return Caption(usable_texts([text], settings, source.where(path)), FALLBACK)


def is_left_to_model(
    settings: CaptionSettings, source: Source, path: str, sidecar_bytes: Sequence[int] = ()
) -> bool:
    """Return whether the model captions an image: with `when: missing`, if no caption file has a text."""
    if settings.from_ != "model" or not settings.reads_files or settings.as_ == "column":
        return settings.from_ == "model"
    try:
        _sidecar_caption(settings, source, path, sidecar_bytes)
    except ImageError as err:
        # A file that cannot be read may hold a caption, so the image is rejected with its error.
        return err.reason in NO_CAPTION
    return False


def _model_caption(settings: CaptionSettings, source: Source, path: str, written: str | None) -> Caption:
    where = source.where(path)
    if written is None:
        detail = f"the model has not captioned {path}"
        fix = "run the job again, which captions it; if the error returns, look at the checks of captions"
        raise ImageError("caption_missing", detail, where=where, fix=fix)
    return Caption(usable_texts([written], settings, where), MODEL)


def _with_model_caption(
    settings: CaptionSettings, source: Source, path: str, sidecar_bytes: Sequence[int], written: str | None
) -> Caption:
    """Return the captions in the file of an image, if it has one, and the text of the model behind them."""
    own = None
    try:
        own = _sidecar_caption(settings, source, path, sidecar_bytes)
    except ImageError as err:
        if err.reason not in NO_CAPTION:
            raise
    try:
        of_model = _model_caption(settings, source, path, written)
    except ImageError as err:
        # captions_readable names images for which the model wrote nothing; a person's caption is enough.
        if own is None or err.reason != "caption_empty":
            raise
        return own
    if own is None:
        return of_model
    more = [text for text in of_model.texts if text not in own.texts]
    return Caption((*own.texts, *more), own.source)


def differing_files(
    settings: CaptionSettings, source: Source, path: str, caption: Caption, sidecar_bytes: Sequence[int] = ()
) -> list[str]:
    """Return the paths of further listed caption files of an image that hold another caption.

    A file without text does not count. A file that cannot be read or decoded does. `sidecar_bytes` is as in
    `caption_of`.
    """
    used = caption.source.removeprefix(SIDECAR)
    differing: list[str] = []
    if not settings.reads_files or used == caption.source or len(settings.suffixes) == 1:
        return differing
    if settings.as_ == "column":
        # Without the text of the model.
        caption = _sidecar_caption(settings, source, path, sidecar_bytes)
    for suffix, num_bytes in _suffixes_with_sizes(settings, sidecar_bytes):
        sidecar = sidecar_path(path, suffix)
        if sidecar == used:
            continue
        try:
            texts = read_caption_file(settings, source, path=path, suffix=suffix, num_bytes=num_bytes)
            if texts is not None and usable_texts(texts, settings, sidecar) != caption.texts:
                differing.append(sidecar)
        except ImageError as err:
            if err.reason not in NO_CAPTION:
                differing.append(sidecar)
    return differing


def _own_caption(
    settings: CaptionSettings,
    source: Source,
    path: str,
    manifest_texts: Sequence[str] | None,
    sidecar_bytes: Sequence[int],
) -> Caption:
    """Return the caption from the source that `captions.from` names, without the fallback."""
    if settings.reads_files:
        return _sidecar_caption(settings, source, path, sidecar_bytes)
    where, texts = source.where(path), [settings.text or ""]
    if settings.from_ == "filename":
        texts = [_words_of_name(path)]
    elif settings.from_ == "column":
        texts, where = list(manifest_texts or ()), f"the manifest's row of {path}"
        if any(len(text) > MAX_TEXT_BYTES for text in texts):
            detail = f"its caption in the manifest has more than {MAX_TEXT_BYTES:,} characters"
            raise ImageError("caption_unreadable", detail, where=where, fix="write a shorter caption")
    return Caption(usable_texts(texts, settings, where), settings.from_)


def _sidecar_caption(
    settings: CaptionSettings, source: Source, path: str, sidecar_bytes: Sequence[int]
) -> Caption:
    """Return the caption in the first listed file that holds a text."""
    first_error: ImageError | None = None
    for suffix, num_bytes in _suffixes_with_sizes(settings, sidecar_bytes):
        sidecar = sidecar_path(path, suffix)
        try:
            texts = read_caption_file(settings, source, path=path, suffix=suffix, num_bytes=num_bytes)
            if texts is not None:
                usable = usable_texts(texts, settings, source.where(sidecar))
                return Caption(usable, f"{SIDECAR}{sidecar}")
        except ImageError as err:
            # An unreadable file is an error even if a later file is readable: its text may be the better one.
            if err.reason not in NO_CAPTION:
                raise
            first_error = first_error or err
    raise first_error or missing_error(settings, source, path)


def _suffixes_with_sizes(
    settings: CaptionSettings, sidecar_bytes: Sequence[int]
) -> Iterator[tuple[str, int]]:
    """Return an iterator over each listed suffix with the size of its file; 0 for an unknown size."""
    return zip(settings.suffixes, sidecar_bytes or [0] * len(settings.suffixes), strict=True)


def _words_of_name(path: str) -> str:
    name = path.rpartition("/")[2]
    return name.removesuffix(last_suffix(name)).replace("_", " ")


def usable_texts(
    texts: Sequence[str], settings: CaptionSettings, where: str, *, fix: str = ""
) -> tuple[str, ...]:
    """Return the texts in canonical form, without those in which nothing is readable.

    `fix` is the instruction for a caption without text; by default one for a file of the dataset.

    Raises:
        ImageError: No text is left (`caption_empty`), or one is invalid Unicode (`caption_undecodable`).
    """
    usable = [canonical(text) for text in texts]
    if settings.lines == "each":
        usable = [line for text in usable for line in text.split("\n")]

    # A replacement may leave nothing of a line, such as a line of removed tags.
    written = [text for each in usable if (text := replaced(settings, each))]
    usable = [text for text in written if is_readable(text)]
    if not usable:
        if not fix:
            fix = "write a caption, or remove the image"
            fix += ", or set captions.fallback" if settings.from_ in ("sidecar", "column") else ""
        what = f"has no readable text: {written[0][:60]!a}" if written else "is empty"
        raise ImageError("caption_empty", f"the caption in {where} {what}", where=where, fix=fix)
    _require_valid_unicode(usable, where)
    return tuple(usable)


def is_readable(text: str) -> bool:
    """Return whether a canonical text has a visible character outside of markup."""
    if "<" in text or "&" in text:
        text = _MARKUP.sub("", text)
    if text.startswith("{\\rtf"):
        text = _RTF.sub("", text)
    return _VISIBLE.search(text) is not None


def replaced(settings: CaptionSettings, text: str) -> str:
    """Return a canonical text with the replacements of `captions.replace`, again canonical."""
    for rule in settings.replace:
        pattern = _pattern(rule)
        flags = re.IGNORECASE if rule.ignore_case else 0
        if rule.with_:
            text = re.sub(pattern, lambda _, text=rule.with_: text, text, flags=flags)
        else:
            # Removing a tag also removes the comma before it, or behind the first one.
            tag, first_tags = rf"\s*,\s*{pattern}(?=\s*(,|$))", rf"^({pattern}\s*,\s*)+"
            text = re.sub(f"{tag}|{first_tags}|{pattern}", "", text, flags=flags)
    return canonical(text) if settings.replace else text


def _pattern(rule: ReplaceSettings) -> str:
    """Return the regular expression of the text to replace, with white space as in canonical texts."""
    text = canonical(rule.find)
    if not text:
        return re.escape(rule.find)
    if rule.whole_words:
        start = r"(?<!\w)" if re.match(r"\w", text) else ""
        end = r"(?!\w)" if re.search(r"\w$", text) else ""
        return f"{start}{re.escape(text)}{end}"
    before, after = " " * rule.find[0].isspace(), " " * rule.find[-1].isspace()
    return re.escape(f"{before}{text}{after}")


def canonical(text: str) -> str:
    """Return the form in which a caption is stored, hashed and tokenized.

    It is in Unicode form NFC. Lines end in a single newline and are stripped; empty lines are removed. Runs
    of spaces and tabs become one space; control characters are removed. The function is idempotent.
    """
    # NFC first, because composed and decomposed letters would be two captions with two entries.
    lines = _LINE_ENDS.split(unicodedata.normalize("NFC", _INVISIBLE.sub("", text)))
    stripped = [" ".join(line.split()) for line in lines]
    return "\n".join(line for line in stripped if line)


def _require_valid_unicode(texts: Sequence[str], where: str) -> None:
    """Reject captions with lone surrogates, which JSON escapes and some encodings can produce."""
    try:
        for text in texts:
            text.encode("utf-8")
    except UnicodeEncodeError as err:
        surrogate = f"\\u{ord(err.object[err.start]):04x}"
        detail = f"its caption contains {surrogate}, half of a surrogate pair ({where})"
        fix = (
            "write the complete character; in JSON a character above \\uffff needs two escapes, such as "
            "\\ud83d\\ude00"
        )
        raise ImageError("caption_undecodable", detail, where=where, fix=fix) from err
