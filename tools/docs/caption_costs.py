"""Generate the table of times in docs/captions.md: `python -m tools.docs.caption_costs`, some seconds.

A time is computed from the shapes of a model and the published figures of a card; nothing is measured:

    seeing     2 * weights * tokens of the vision tower and of the prompt, and their attention, over the peak
    writing    for each token, the longer one of its operations and of reading the language model's weights,
               which the images of a batch share, with the keys and values of the tokens before it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from pipeline.captions.worker.captioner import GPU_BATCH
from pipeline.trained_lora.worker.memory.resident_blocks import RESERVED_BYTES
from tools.docs.streaming import BF16_BYTES, CARDS, COMPUTE_SHARES, Card

PAGE = Path("docs/captions.md")
BEGIN, END = "<!-- costs: begin -->", "<!-- costs: end -->"

NUM_IMAGES = 1000

PROMPT_TOKENS, CAPTION_TOKENS = 20, 100
"""Length of the prompt without the image, and of the caption. Assumptions."""

BANDWIDTHS = {"RTX 4070": 504.2e9, "RTX 4080": 716.8e9, "RTX 4090": 1008e9}
"""Memory bandwidth in bytes per second, by NVIDIA's specifications."""


@dataclass(frozen=True)
class PublishedCaptioner:
    """A published model, and what it makes of an image of 1024 x 1024 px.

    Attributes:
        name: Hub id.
        kind: Class of its configuration in transformers.
        config: Values of its configuration that differ from the defaults of the class.
        billions: Billions of parameters that its repository states, to two digits behind the point.
        tiles: Number of pictures that the vision tower sees: crops and the complete image.
        patches: Number of patches of each.
        window: Number of patches that see each other in all layers but `full_layers`; all for None.
        full_layers: Number of layers in which all patches see each other, with a window.
        image_tokens: Number of tokens of the image in the prompt.
    """

    name: str
    kind: str
    config: dict[str, Any]
    billions: float
    tiles: int
    patches: int
    image_tokens: int
    window: int | None = None
    full_layers: int = 0

    def model(self) -> Any:
        """Return the model without weights."""
        config = getattr(transformers, self.kind)(**self.config)
        with torch.device("meta"):
            return transformers.AutoModelForImageTextToText.from_config(config)


def _qwen(hidden: int, inner: int, layers: int, heads: int, kv: int, **text: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv}
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": hidden}
    return {"text_config": {**sizes, **heads_of, **text}, "vision_config": vision}


PUBLISHED = (
    PublishedCaptioner(
        "HuggingFaceTB/SmolVLM-500M-Instruct",
        "SmolVLMConfig",
        {
            "text_config": {
                "model_type": "llama",
                "hidden_size": 960,
                "intermediate_size": 2560,
                "num_hidden_layers": 32,
                "num_attention_heads": 15,
                "num_key_value_heads": 5,
                "head_dim": 64,
                "vocab_size": 49280,
            },
            "vision_config": {
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "image_size": 512,
                "patch_size": 16,
            },
            "scale_factor": 4,
            "tie_word_embeddings": False,
        },
        0.51,
        tiles=17,
        patches=1024,
        image_tokens=17 * 64,
    ),
    PublishedCaptioner(
        "Salesforce/blip2-opt-2.7b",
        "Blip2Config",
        {
            "text_config": {
                "model_type": "opt",
                "hidden_size": 2560,
                "num_hidden_layers": 32,
                "ffn_dim": 10240,
                "num_attention_heads": 32,
                "word_embed_proj_dim": 2560,
                "vocab_size": 50304,
            },
        },
        3.74,
        tiles=1,
        patches=257,
        image_tokens=32,
    ),
    PublishedCaptioner(
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "Qwen2_5_VLConfig",
        {**_qwen(2048, 11008, 36, 16, 2, vocab_size=151936), "tie_word_embeddings": True},
        3.75,
        tiles=1,
        patches=74 * 74,
        window=64,
        full_layers=4,
        image_tokens=37 * 37,
    ),
    PublishedCaptioner(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "Qwen2_5_VLConfig",
        {**_qwen(3584, 18944, 28, 28, 4, vocab_size=152064), "tie_word_embeddings": False},
        8.29,
        tiles=1,
        patches=74 * 74,
        window=64,
        full_layers=4,
        image_tokens=37 * 37,
    ),
    PublishedCaptioner(
        "HuggingFaceM4/Idefics3-8B-Llama3",
        "Idefics3Config",
        {
            "text_config": {
                "model_type": "llama",
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128259,
            },
            "vision_config": {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 364,
                "patch_size": 14,
            },
            "scale_factor": 2,
        },
        8.46,
        tiles=17,
        patches=676,
        image_tokens=17 * 169,
    ),
)


@dataclass(frozen=True)
class Work:
    """What a model does for one image.

    Attributes:
        num_parameters: Number of all parameters.
        seeing: Operations before the first token.
        token: Operations for each token that is written.
        weights_bytes: Bytes of the weights that each token reads.
        cache_bytes: Bytes of keys and values, with half of the caption written.
    """

    num_parameters: int
    seeing: float
    token: float
    weights_bytes: int
    cache_bytes: int

    def seconds(self, card: Card, share: float) -> float | None:
        """Return the time of an image if the card reaches a share of its peaks; None if it does not fit."""
        needed = BF16_BYTES * self.num_parameters + GPU_BATCH * self.cache_bytes + RESERVED_BYTES
        if needed > card.gigabytes * 2**30:
            return None
        read_s = (self.weights_bytes / GPU_BATCH + self.cache_bytes) / BANDWIDTHS[card.name]
        token_s = max(self.token / card.peak_flops, read_s)
        return (self.seeing / card.peak_flops + CAPTION_TOKENS * token_s) / share


def work_of(captioner: PublishedCaptioner) -> Work:
    """Return the work of a model, from its shapes."""
    model = captioner.model()
    inner = getattr(model, "model", model)
    vision = next(getattr(inner, name) for name in ("vision_model", "visual") if hasattr(inner, name))
    text = next(getattr(inner, name) for name in ("text_model", "language_model") if hasattr(inner, name))
    of_vision, of_text = model.config.vision_config, model.config.get_text_config()
    # The embedding multiplies nothing, but the head that has its size multiplies at each written token.
    embedding = _size(model.get_input_embeddings())
    layer_weights = _size(text) - embedding
    layers_and_head = layer_weights + embedding

    layers = getattr(of_vision, "depth", None) or of_vision.num_hidden_layers
    full = layers if captioner.window is None else captioner.full_layers
    seen = full * captioner.patches + (layers - full) * (captioner.window or 0)
    attention = 4 * captioner.tiles * captioner.patches * seen * of_vision.hidden_size

    tokens = captioner.image_tokens + PROMPT_TOKENS
    read = 2 * layer_weights * tokens + 2 * tokens**2 * of_text.hidden_size * of_text.num_hidden_layers
    heads = getattr(of_text, "num_key_value_heads", None) or of_text.num_attention_heads
    per_token = 2 * of_text.num_hidden_layers * heads * of_text.hidden_size // of_text.num_attention_heads
    return Work(
        num_parameters=_size(model),
        seeing=2 * _size(vision) * captioner.tiles * captioner.patches + attention + read,
        token=2 * layers_and_head,
        weights_bytes=BF16_BYTES * layers_and_head,
        cache_bytes=BF16_BYTES * per_token * (tokens + CAPTION_TOKENS // 2),
    )


def cost_line(captioner: PublishedCaptioner) -> str:
    """Return a model's line: minutes for 1,000 images on each card, at the peak and at the assumed share."""
    work = work_of(captioner)
    cells = [f"`{captioner.name}`", f"{work.num_parameters / 1e9:.2f}"]
    for card in CARDS:
        times = [work.seconds(card, share) for share in sorted(COMPUTE_SHARES, reverse=True)]
        minutes = [f"{NUM_IMAGES * each / 60:.1f}" for each in times if each is not None]
        cells.append(" to ".join(minutes) or "-")
    return f"| {' | '.join(cells)} |"


def complete_page(page: str, captioners: Sequence[PublishedCaptioner] = PUBLISHED) -> str:
    """Return the page with the table computed again."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    head = [f"| model | billions of parameters | {' | '.join(each.name for each in CARDS)} |"]
    head.append(f"|---|---|{'---|' * len(CARDS)}")
    return before + "\n".join([BEGIN, "", *head, *map(cost_line, captioners), "", END]) + after


def _size(module: Any) -> int:
    return sum(each.numel() for each in module.parameters())


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(complete_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
