from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from demo.tiny_models import TINY
from pipeline.models.worker.family import load_family
from pipeline.models.worker.text import chat_prompt, count_within_template, own_tokens, unpadded
from tests.tiny_models import TinyModel

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

MIXED = {
    "Stable Diffusion 3 and 3.5": ["float32", "float32", "bfloat16"],
    "FLUX.1 dev": ["float32", "bfloat16"],
    "Kandinsky 5 (image)": ["bfloat16", "float32"],
}
"""Kinds of models with CLIP and language models, and the dtype of each text encoder with "auto"."""


@pytest.mark.parametrize("kind", MIXED)
def test_auto_loads_each_encoder_in_its_own_dtype_and_embeds_almost_as_in_float32(
    tiny_model: TinyModel, kind: str
) -> None:
    family = load_family(tiny_model(kind))
    encoders = family.text.load("auto", "cpu")
    roles = [role for role in family.text_roles() if role.startswith("text_encoder")]
    dtypes = [str(next(getattr(encoders, role).parameters()).dtype) for role in roles]
    assert dtypes == [f"torch.{dtype}" for dtype in MIXED[kind]]

    expected = family.text.encode_caption(family.text.load("float32", "cpu"), "a red cat").tensors
    for name, tensor in family.text.encode_caption(encoders, "a red cat").tensors.items():
        values = (tensor.float().flatten(), expected[name].flatten())
        assert float(torch.nn.functional.cosine_similarity(*values, dim=0)) > 0.999


@pytest.mark.parametrize("kind", TINY)
def test_every_kind_of_model_embeds_with_default_dtypes_almost_as_in_float32(
    tiny_model: TinyModel, kind: str
) -> None:
    family = load_family(tiny_model(kind))
    expected = family.text.encode_caption(family.text.load("float32", "cpu"), "a red cat").tensors
    tensors = family.text.encode_caption(family.text.load("auto", "cpu"), "a red cat").tensors
    assert tensors.keys() == expected.keys()
    if family.spec.text.padding == "stored":
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == family.text_shapes()
    for name, tensor in tensors.items():
        values = (tensor.float().flatten(), expected[name].flatten())
        assert float(torch.nn.functional.cosine_similarity(*values, dim=0)) > 0.99, name


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_a_chatglm_stored_in_half_precision_runs_in_the_default_dtype(tmp_path: Path, stored: str) -> None:
    """Its file has a floating-point buffer, the frequencies of the rotary embedding."""
    TINY["Kolors"](tmp_path / "tiny")
    file = tmp_path / "tiny" / "text_encoder" / "model.safetensors"
    weights = {name: weight.to(getattr(torch, stored)) for name, weight in load_file(file).items()}
    assert "rotary_pos_emb.inv_freq" in weights
    save_file(weights, file, {"format": "pt"})

    family = load_family(tmp_path / "tiny")
    encoders = family.text.load("auto", "cpu")
    assert encoders.text_encoder.rotary_pos_emb.inv_freq.dtype == torch.bfloat16
    expected = type(encoders.text_encoder).from_pretrained(file.parent, dtype=torch.bfloat16)
    encoded = family.text.encode_caption(encoders, "a red cat").tensors
    encoders.text_encoder = expected
    for name, tensor in family.text.encode_caption(encoders, "a red cat").tensors.items():
        assert torch.equal(encoded[name], tensor), name


def test_masked_embeddings_are_padded_with_zeros_to_the_longest_of_a_batch(tiny_model: TinyModel) -> None:
    family = load_family(tiny_model("Lumina Image 2"))
    assert family.spec.text.padding == "masked"
    short, long = (torch.full((length, 4), float(length)) for length in (2, 5))
    stacked = family.text.stack([{"text_embedding": short}, {"text_embedding": long}])
    assert stacked["text_lengths"] == (2, 5)
    assert stacked["text_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert stacked["text_embedding"].shape == (2, 5, 4)
    assert torch.equal(stacked["text_embedding"][0], torch.cat([short, torch.zeros(3, 4)]))
    assert torch.equal(stacked["text_embedding"][1], long)


def test_other_tensors_are_stacked_as_they_are(tiny_model: TinyModel) -> None:
    texts = [{"text_embedding": torch.rand(7, 4), "pooled_text_embedding": torch.rand(3)} for _ in range(2)]
    stacked = load_family(tiny_model("Stable Diffusion XL")).text.stack(texts)
    assert stacked.keys() == texts[0].keys()
    for name, value in stacked.items():
        assert torch.equal(value, torch.stack([text[name] for text in texts]))


@pytest.mark.parametrize("kind", ["Stable Diffusion 1.x and 2.x", "Stable Diffusion XL", "Lumina Image 2"])
def test_a_caption_beyond_the_limit_reports_its_tokens_and_where_it_is_cut(
    tiny_model: TinyModel, kind: str
) -> None:
    family = load_family(tiny_model(kind))
    encoders = family.text.load("float32", "cpu")
    (limit,) = set(family.token_limits.values())

    def counts(num_words: int) -> tuple[int, int, int | None]:
        encoded = family.text.encode_caption(encoders, " ".join(["cat"] * num_words))
        return encoded.num_tokens, encoded.num_cut, encoded.cut_from

    # Every further word is one token, so that the tokens besides the words follow from any count.
    extra = counts(3)[0] - 3
    fitting = limit - extra
    assert counts(fitting) == (limit, 0, None)
    for cut in (1, 4):
        num_tokens, num_cut, cut_from = counts(fitting + cut)
        assert (num_tokens, num_cut) == (limit + cut, cut)
        assert cut_from is not None
        assert abs(cut_from - 4 * fitting) <= 1, "the space before a word may belong to its token"


def test_a_caption_that_one_of_several_encoders_reads_completely_is_not_cut(tiny_model: TinyModel) -> None:
    """Stable Diffusion 3 has two CLIPs of 77 tokens and a T5 of 256."""
    family = load_family(tiny_model("Stable Diffusion 3 and 3.5"))
    encoders = family.text.load("float32", "cpu")
    limits = family.token_limits.values()
    for num_words, fits in ((3, True), (min(limits) + 1, True), (max(limits) + 1, False)):
        encoded = family.text.encode_caption(encoders, " ".join(["cat"] * num_words))
        assert (encoded.num_cut == 0, encoded.cut_from is None) == (fits, fits)
        assert encoded.num_tokens >= num_words
    assert encoded.cut_from is not None
    assert encoded.cut_from > 4 * min(limits), "the encoder that reads furthest decides"


TEMPLATE_START, TEMPLATE_END = "say: ", " now"


def spans(caption: str) -> list[tuple[int, int]]:
    """Return the tokens of a template: its start, the caption's, and its end.

    Captions of 4, 8 and 16 characters are split into tokens of 4, one of 9 is a token, others are characters.
    """
    size = {4: 4, 8: 4, 9: 9, 16: 4}.get(len(caption), 1)
    first = len(TEMPLATE_START)
    words = [(first + at, first + at + size) for at in range(0, len(caption), size)]
    end = first + len(caption)
    return [(0, first), *words, (end, end + len(TEMPLATE_END))]


@pytest.mark.parametrize(
    ("length", "limit", "expected"),
    [
        (16, 7, (6, 0, None)),
        (16, 6, (6, 0, None)),
        (16, 4, (6, 2, 8)),
        (16, 3, (6, 3, 4)),
        (16, 5, (6, 3, 9)),  # 12, 11 and 10 characters would be as many tokens
    ],
)
def test_a_caption_in_a_template_is_cut_until_the_template_ends_within_the_limit(
    length: int, limit: int, expected: tuple[int, int, int | None]
) -> None:
    start = len(TEMPLATE_START)
    assert count_within_template(spans, "x" * length, caption_start=start, limit=limit) == expected


@pytest.mark.parametrize("kind", ["Stable Diffusion XL", "Lumina Image 2"])
def test_captions_are_embedded_together_as_one_by_one(tiny_model: TinyModel, kind: str) -> None:
    family = load_family(tiny_model(kind))
    encoders, captions = family.text.load("float32", "cpu"), ["a red cat", "", "two old cats"]
    alone = [family.text.encode_caption(encoders, caption) for caption in captions]
    expected = family.text.stack([each.tensors for each in alone])
    with torch.no_grad():
        together = family.text.embed_captions(encoders, captions)
    assert together.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, tuple):
            assert together[name] == value
        else:
            torch.testing.assert_close(together[name], value, rtol=1e-4, atol=1e-4)

    assert family.text.embeds_batches == (kind == "Stable Diffusion XL")
    if family.text.embeds_batches:
        for one, other in zip(family.text.encode_captions(encoders, captions), alone, strict=True):
            assert (one.num_tokens, one.num_cut, one.cut_from) == (other.num_tokens, 0, None)
            for name, value in other.tensors.items():
                torch.testing.assert_close(one.tensors[name], value, rtol=1e-4, atol=1e-4)


POOLED = ("prompt_embeds", "pooled_prompt_embeds")
ARGUMENTS = {
    "Stable Diffusion 1.x and 2.x": ("prompt_embeds",),
    "Stable Diffusion XL": POOLED,
    "FLUX.1 dev": POOLED,
    "Lumina Image 2": ("prompt_embeds", "prompt_attention_mask"),
}
"""Arguments of a pipeline that replace its prompt, in the order of an entry's tensors."""


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_a_pipeline_gets_each_tensor_of_the_caption_and_of_the_negative_prompt(
    tiny_model: TinyModel, kind: str
) -> None:
    text = load_family(tiny_model(kind)).text
    caption, negative = (
        {name: torch.full((1, 2), value) for name in ("text_embedding", "pooled_text_embedding", "text_mask")}
        for value in (1.0, 2.0)
    )
    arguments = text.prompt_arguments(None, caption, negative)
    plain = {name for name in arguments if not name.startswith("negative_")}
    assert plain == set(ARGUMENTS[kind])
    # FLUX.1's guidance is distilled: its family passes no negative prompt on.
    negatives = {name.removeprefix("negative_") for name in arguments.keys() - plain}
    assert negatives == (set() if kind == "FLUX.1 dev" else plain)
    for name, value in arguments.items():
        assert torch.equal(value, torch.full((1, 2), 2.0 if name.startswith("negative_") else 1.0))
    assert text.guidance_arguments(3.5) == {"guidance_scale": 3.5}


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if enable_thinking %}<think>{% endif %}"
)


def test_a_chat_has_the_caption_as_its_only_message_and_the_beginning_of_the_answer() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel()), chat_template=CHAT_TEMPLATE)
    assert chat_prompt(tokenizer, "a cat") == "<user>a cat<assistant>"
    assert chat_prompt(tokenizer, "a cat", enable_thinking=True) == "<user>a cat<assistant><think>"


def test_each_sample_of_a_padded_batch_has_its_own_tokens() -> None:
    batch = torch.arange(12.0).reshape(2, 3, 2)
    assert [len(each) for each in unpadded(batch, (1, 3))] == [1, 3]
    assert torch.equal(unpadded(batch, (1, 3))[0], batch[0, :1])
    mask = torch.tensor([[0, 1, 1]])
    assert torch.equal(own_tokens(batch[:1], mask), batch[:1, 1:])


def test_references_are_an_error_if_the_text_encoder_sees_no_images(tiny_model: TinyModel) -> None:
    text = load_family(tiny_model("Stable Diffusion 1.x and 2.x")).text
    with pytest.raises(NotImplementedError, match="sees no images"):
        text.embed_with_images(None, "a cat", [])


def test_C05_a_caption_of_exactly_the_limit_is_not_cut_and_one_more_token_is(tiny_sd: Path) -> None:
    family = load_family(tiny_sd)
    encoders, limit = family.text.load("float32", "cpu"), family.max_length()
    num_words = limit - len(("start mark", "end mark"))
    fits, longer = (
        family.text.count_tokens(encoders, "tokenizer", " ".join("a" * number))
        for number in (num_words, num_words + 1)
    )
    assert fits == (limit, 0, None)
    assert longer == (limit + 1, 1, 2 * num_words)


@pytest.mark.parametrize(
    ("kind", "limit", "cut_from"),
    [
        ("Stable Diffusion 1.x and 2.x", 1, 0),
        ("Stable Diffusion 1.x and 2.x", 2, 0),
        ("Lumina Image 2", 3, 0),
    ],
)
def test_a_limit_before_the_caption_cuts_all_of_it(
    tiny_model: TinyModel, kind: str, limit: int, cut_from: int
) -> None:
    """The start mark, or the beginning of the template, takes all places."""
    text = load_family(tiny_model(kind)).text
    encoders = text.load("float32", "cpu")
    text.token_limit = lambda encoders, role: limit  # type: ignore[method-assign]
    num_tokens, num_cut, first = text.count_tokens(encoders, "tokenizer", "a red cat")
    assert num_tokens > limit
    assert (num_cut, first) == (num_tokens - limit, cut_from)
