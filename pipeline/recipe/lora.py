"""The section `training.lora`: kind and size of the adapter, and the modules it is added to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from pipeline.recipe.settings import Settings, Violation, reject
from pipeline.recipe.validators import check_path

MAX_RANK = 4096

DEFAULT_KRONECKER_FACTOR = 8

DEFAULT_OFT_BLOCK_SIZE = 32

TEXT_ENCODER = "text_encoder"
"""Prefix of the text encoders' component names, and so of their modules' paths."""


def _check_pattern(value: str) -> str:
    if any(sign in value for sign in " /\\^$|()+"):
        reject(
            f"a module pattern must be a dotted path with * or ?, got {value!r}",
            "use * for any text and ? for any one character, such as *.attn2.to_q",
        )
    return value


ModulePattern = Annotated[str, Field(min_length=1), AfterValidator(_check_pattern)]
"""An `fnmatch` pattern for dotted module paths in the diffusers denoiser; * also matches dots."""


class RankSettings(Settings):
    """A different rank for some modules."""

    modules: ModulePattern = Field(
        description="Pattern of dotted module paths in the diffusers model, such as `*.attn2.*`."
    )
    rank: int = Field(ge=1, le=MAX_RANK, description="Rank of these modules.")
    alpha: float | None = Field(
        default=None,
        gt=0.0,
        description="Alpha of these modules; null uses the same alpha / rank as the other modules.",
    )


class LearningRateSettings(Settings):
    """A different learning rate for some modules."""

    modules: ModulePattern = Field(
        description="Pattern of dotted module paths in the diffusers model, such as `down_blocks.*`."
    )
    learning_rate: float = Field(
        gt=0.0, description="Learning rate of these modules' adapters; the schedule is the same."
    )


class TextEncoderSettings(Settings):
    """LoRA on the text encoders, in addition to the denoiser."""

    rank: int | None = Field(
        default=None,
        ge=1,
        le=MAX_RANK,
        description="Rank of each adapter; null uses `training.lora.rank`.",
    )
    alpha: float | None = Field(
        default=None,
        gt=0.0,
        description="Alpha of each adapter; null chooses it so that alpha / rank is the denoiser's.",
    )
    targets: Literal["attention", "blocks"] = Field(
        default="attention",
        description="Layers that get an adapter. attention: the query, key, value and output projections. "
        "blocks: also the feed-forward layers, as in kohya's tools.",
    )
    learning_rate: float | None = Field(
        default=None,
        gt=0.0,
        description="Learning rate of these adapters; null uses `training.learning_rate`, but half of that "
        "or less is usual. The schedule is the same.",
    )


class TimestepRankSettings(Settings):
    """Ranks that a sample trains, by its noise level (T-LoRA)."""

    min_rank: int = Field(
        default=1, ge=1, le=MAX_RANK, description="Ranks that train at the highest noise level."
    )
    power: float = Field(
        default=1.0,
        gt=0.0,
        description="Exponent of the share of signal, (T - t) / T. Above 1, fewer ranks train at medium "
        "noise levels.",
    )


class LoraSettings(Settings):
    """The adapter: its kind, its size and its modules."""

    requirements = (
        *(
            (key, "kind", "lora")
            for key in (
                "dropout",
                "rank_dropout",
                "module_dropout",
                "dora",
                "rslora",
                "init",
                "start_from",
                "loraplus_ratio",
                "scale_weight_norms",
                "timestep_ranks",
            )
        ),
        ("lokr_factor", "kind", "lokr"),
        ("native_file", "kind", "loha", "lokr"),
        ("oft_block_size", "kind", "oft"),
        # peft's OFT has one block size for all layers, and rotates the inputs of linear layers only.
        *(
            (key, "kind", "lora", "loha", "lokr")
            for key in ("rank", "alpha", "ranks", "conv_rank", "conv_alpha", "text_encoders")
        ),
        # The fixed adapter of PiSSA and OLoRA subtracts the initial weights of all ranks.
        *(
            (key, "init", "kaiming", "gaussian")
            for key in (
                "dora",
                "start_from",
                "save_dtype",
                "rank_dropout",
                "module_dropout",
                "scale_weight_norms",
                "timestep_ranks",
            )
        ),
    )

    rank: int = Field(default=16, ge=1, le=MAX_RANK, description="Rank of each adapter.")
    alpha: float = Field(
        default=16.0, gt=0.0, description="The adapter is scaled by alpha / rank; usually equal to `rank`."
    )
    kind: Literal["lora", "loha", "lokr", "oft"] = Field(
        default="lora",
        description="lora: the product of two matrices (https://arxiv.org/abs/2106.09685). loha: the "
        "Hadamard product of two such products (https://arxiv.org/abs/2108.06098), as expressive as a LoRA "
        "of rank x rank with far fewer weights. lokr: the Kronecker product of a small matrix and such a "
        "product (https://arxiv.org/abs/2309.14859), as expressive as a LoRA of rank x `lokr_factor`. loha "
        "and lokr are exported as an equivalent LoRA, which every program can load but which is larger. "
        "oft: a rotation of each layer's inputs (https://arxiv.org/abs/2306.07280), which keeps the norms of "
        "a weight's rows. Its files can be loaded with peft, and by ComfyUI with an extension "
        "(docs/outputs.md).",
    )
    lokr_factor: int | None = Field(
        default=None,
        ge=2,
        le=MAX_RANK,
        description="For kind: lokr, the number of rows and columns of the small matrix; less if it does not "
        f"divide a layer's size. null means {DEFAULT_KRONECKER_FACTOR}. A larger factor trains fewer weights "
        "but exports larger files. If `rank` is at least half the longer side of the second matrix, that "
        "matrix is trained directly instead of as a product.",
    )
    oft_block_size: int | None = Field(
        default=None,
        ge=2,
        le=MAX_RANK,
        description="For kind: oft, the number of inputs that are rotated together. If it does not divide a "
        f"layer's inputs, the closest divisor is used. null means {DEFAULT_OFT_BLOCK_SIZE}. Larger blocks "
        "train more weights: (size - 1) / 2 for each input of a layer.",
    )
    dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Dropout on the inputs of each adapter.",
    )
    rank_dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of each adapter's ranks that a training step drops, drawn for each sample; the "
        "others are divided by 1 - `rank_dropout`, as in kohya's tools. Excludes `dora`.",
    )
    module_dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Probability with which a training step drops an adapter for all samples of a batch, as "
        "in kohya's tools. Excludes `dora`.",
    )
    scale_weight_norms: float | None = Field(
        default=None,
        gt=0.0,
        description="Largest Frobenius norm of a module's delta weight, alpha / rank included, as in kohya's "
        "tools, which call 1 a good start. After each step, larger ones are scaled down to it. Limits what "
        "single layers can overfit. Excludes `dora`, `training.ema_decay` and schedule-free optimizers; null "
        "sets no limit.",
    )
    timestep_ranks: TimestepRankSettings | None = Field(
        default=None,
        description="Train fewer ranks with noisier samples (T-LoRA, https://arxiv.org/abs/2507.05964), so "
        "that few images teach their details rather than their composition. `{}` uses all defaults; null "
        "trains all ranks. Previews, evaluation and exported files use all ranks, as other programs do. "
        "Applies to the denoiser only. Excludes `dora` and `training.compile`.",
    )
    targets: Literal["family", "attention", "blocks"] = Field(
        default="family",
        description="Modules that get an adapter. family: the modules listed in docs/families.md. attention: "
        "the linear layers of every attention. blocks: all linear layers of the repeated blocks, attention "
        "and feed-forward.",
    )
    modules: tuple[ModulePattern, ...] = Field(
        default=(),
        description="Patterns of dotted module paths in the diffusers model, with * and ?, such as "
        "`*.attn2.to_q`. They replace `targets`.",
    )
    conv_rank: int | None = Field(
        default=None,
        ge=1,
        le=MAX_RANK,
        description="Rank of adapters on the convolutions of a UNet's blocks (LoCon); null adapts none.",
    )
    conv_alpha: float | None = Field(
        default=None,
        gt=0.0,
        description="Alpha of the convolutions; null uses the same alpha / rank as the other layers.",
    )
    ranks: tuple[RankSettings, ...] = Field(
        default=(), description="Different ranks for some modules; the first matching pattern applies."
    )
    learning_rates: tuple[LearningRateSettings, ...] = Field(
        default=(),
        description="Different learning rates for some modules of the denoiser; the first matching pattern "
        "applies, and other modules use `training.learning_rate`.",
    )
    loraplus_ratio: float | None = Field(
        default=None,
        gt=0.0,
        description="Learning rate of the up matrices (B), divided by the rate of all other weights "
        "(LoRA+, https://arxiv.org/abs/2402.12354), such as 16. It also applies to `learning_rates` and text "
        "encoders; lower the learning rate with it. null trains all weights at the same rate.",
    )
    dora: bool = Field(
        default=False,
        description="Also train the magnitude of each row of the adapted weights (DoRA, "
        "https://arxiv.org/abs/2402.09353). Closer to full fine-tuning, but slower. Only the diffusers "
        "layout can be loaded by diffusers.",
    )
    rslora: bool = Field(
        default=False,
        description="Scale by alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732), so that large ranks "
        "learn as fast as small ones. Exported files contain an equivalent alpha.",
    )
    init: Literal["kaiming", "gaussian", "pissa", "olora"] = Field(
        default="kaiming",
        description="Initial weights. kaiming and gaussian: the down matrices are uniform as in a "
        "linear layer, or normal with standard deviation 1 / rank; the up matrices are zero. pissa and "
        "olora: the principal singular components of the base weights (https://arxiv.org/abs/2404.02948), "
        "or the first ones of their QR decomposition (https://arxiv.org/abs/2406.01775). A fixed adapter "
        "subtracts these, so that the model starts unchanged. Exported files apply to the original base "
        "model and have twice the rank.",
    )
    save_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32",
        description="Number format of the matrices in the exported files. float16 and bfloat16 halve the "
        "files and round each number, by up to 1/2048 and 1/256 of its size. Alpha, DoRA's magnitudes and "
        "training stay float32. A finished run is trained again if this key changes.",
    )
    native_file: bool = Field(
        default=False,
        description="For kind: loha and lokr, also export `<recipe>_lycoris.safetensors` in the kind's own "
        "format, which is smaller than the converted LoRA. ComfyUI reads it, and for UNets LyCORIS. A "
        "finished run is trained again if this key changes.",
    )
    start_from: Annotated[Path, BeforeValidator(check_path)] | None = Field(
        default=None,
        description="LoRA file to start from, with the same modules, ranks and kind, in diffusers, kohya or "
        "ComfyUI layout. Relative to the project root.",
    )
    text_encoders: TextEncoderSettings | None = Field(
        default=None,
        description="Also train LoRA on the text encoders, for the families listed in docs/families.md. `{}` "
        "uses all defaults; null trains none. Captions are then encoded in every training step, which needs "
        "memory for the encoders, and cached text embeddings are not used. `kind`, `dora`, `modules`, "
        "`ranks`, `timestep_ranks` and `conv_rank` apply to the denoiser only; `dropout`, `rank_dropout`, "
        "`module_dropout`, `scale_weight_norms`, `rslora` and `init: gaussian` apply to both.",
    )

    def violations(self) -> Iterator[Violation]:
        """See `Settings.violations`."""
        for key, groups in (("ranks", self.ranks), ("learning_rates", self.learning_rates)):
            patterns = [each.modules for each in groups]
            for index, pattern in enumerate(patterns):
                if pattern in patterns[:index]:
                    what = f"duplicate pattern {pattern} in lora.{key}; only the first one would apply"
                    yield Violation(f"{key}[{index}].modules", what, "remove one of the two")
        if self.modules and self.targets != "family":
            what = f"targets: {self.targets} cannot be combined with modules"
            yield Violation("targets", what, "remove one of the two", involves=("targets", "modules"))
        for key in ("rank_dropout", "module_dropout", "scale_weight_norms", "timestep_ranks"):
            # A DoRA's magnitudes divide by the norms of weights with all ranks, and set the norms themselves.
            if getattr(self, key) and self.dora:
                what, fix = f"{key} cannot be combined with dora: true", "remove one of the two"
                yield Violation(key, what, fix, involves=(key, "dora"))
        least = self.timestep_ranks and self.timestep_ranks.min_rank
        if least is not None and least >= self.rank:
            what = f"timestep_ranks.min_rank must be below rank {self.rank}, got {least}"
            fix = "lower it, or raise rank"
            yield Violation("timestep_ranks.min_rank", what, fix, involves=("timestep_ranks", "rank"))
        if self.conv_alpha is not None and self.conv_rank is None:
            what, fix = "conv_alpha requires conv_rank", "set conv_rank, or remove it"
            yield Violation("conv_alpha", what, fix, involves=("conv_alpha", "conv_rank"))

    @property
    def starts_from_base_weights(self) -> bool:
        """True if the adapter is initialised from the base weights (pissa, olora)."""
        return self.init in ("pissa", "olora")

    @property
    def allows_packed_weights(self) -> bool:
        """True if `training.quantize` and `training.compute` may change the format of the base weights."""
        return self.kind == "lora" and not self.dora and not self.starts_from_base_weights

    @property
    def kronecker_factor(self) -> int:
        """`lokr_factor`, or its default."""
        return self.lokr_factor or DEFAULT_KRONECKER_FACTOR

    @property
    def rotation_block(self) -> int:
        """`oft_block_size`, or its default."""
        return self.oft_block_size or DEFAULT_OFT_BLOCK_SIZE

    @property
    def family_modules(self) -> bool:
        """True if the adapted modules are exactly the family's."""
        return self.targets == "family" and not self.modules and self.conv_rank is None

    @property
    def of_text_encoders(self) -> LoraSettings | None:
        """Settings of the text encoders' adapters, a plain LoRA; None if they are not trained."""
        text = self.text_encoders
        if text is None:
            return None
        rank = self.rank if text.rank is None else text.rank
        return LoraSettings(
            rank=rank,
            alpha=self._proportional_alpha(rank) if text.alpha is None else text.alpha,
            dropout=self.dropout,
            rank_dropout=self.rank_dropout,
            module_dropout=self.module_dropout,
            rslora=self.rslora,
            init="gaussian" if self.init == "gaussian" else "kaiming",
        )

    def of_network(self, module: str) -> LoraSettings:
        """Return the settings of the network that contains the module with this dotted path."""
        # The path of a text encoder's module starts with the encoder's component name.
        text = self.of_text_encoders
        return text if text is not None and module.startswith(TEXT_ENCODER) else self

    def has_own_size(self, module: str, *, conv: bool) -> bool:
        """Return whether the module's size differs from `rank` and `alpha`; see `size_of`."""
        return self._rank_settings_of(module) is not None or (conv and self.conv_rank is not None)

    def size_of(self, module: str, *, conv: bool) -> tuple[int, float]:
        """Return (rank, alpha) of a module; `conv` is True if its kernel has more than one pixel."""
        settings = self._rank_settings_of(module)
        if settings is not None:
            alpha = self._proportional_alpha(settings.rank) if settings.alpha is None else settings.alpha
            return settings.rank, alpha
        if conv and self.conv_rank is not None:
            alpha = self._proportional_alpha(self.conv_rank) if self.conv_alpha is None else self.conv_alpha
            return self.conv_rank, alpha
        return self.rank, self.alpha

    def scale_of(self, module: str, *, conv: bool) -> float:
        """Return the factor applied to the product of the module's two matrices; see `size_of`."""
        rank, alpha = self.size_of(module, conv=conv)
        return alpha / rank**0.5 if self.rslora else alpha / rank

    @property
    def usual_file_rank(self) -> int:
        """Rank of most modules in the exported files, see `file_rank_of`; of OFT, its block size."""
        if self.kind == "oft":
            return self.rotation_block
        if self.starts_from_base_weights:
            return 2 * self.rank
        return self.rank * {"lora": 1, "loha": self.rank, "lokr": self.kronecker_factor}[self.kind]

    def file_rank_of(self, module: str, weight: tuple[int, ...]) -> int:
        """Return the rank of the module's matrices in the exported files; for OFT, the number of blocks.

        `weight` is the shape of its weight: (rows, columns), or (rows, columns, height, width).
        """
        if self.kind == "oft":
            return weight[1] // oft_block_size(weight[1], self.rotation_block)
        rank = self.size_of(module, conv=max(weight[2:], default=1) > 1)[0]
        if self.kind == "lokr":
            # rank(A kron B) = rank(A) * rank(B)
            left, right = lokr_shapes(weight, self.kronecker_factor)
            is_full = _second_matrix_is_full(weight, rank, self.kronecker_factor)
            return min(left) * (min(right) if is_full else rank)
        if self.kind == "loha":
            # The rank of a Hadamard product is at most the product of the ranks.
            return rank * rank
        # The fixed adapter that subtracts the initial weights doubles the rank.
        return rank * (2 if self.starts_from_base_weights else 1)

    def learning_rate_of(self, module: str) -> float | None:
        """Return the learning rate of a denoiser module in `learning_rates`; None if it has none."""
        rates = (each.learning_rate for each in self.learning_rates if fnmatchcase(module, each.modules))
        return next(rates, None)

    def _rank_settings_of(self, module: str) -> RankSettings | None:
        return next((each for each in self.ranks if fnmatchcase(module, each.modules)), None)

    def _proportional_alpha(self, rank: int) -> float:
        return self.alpha * rank / self.rank


def lokr_shapes(weight: tuple[int, ...], factor: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of two matrices with a Kronecker product of the weight's shape, as in peft.

    The rows and the columns are each split into two numbers. The first is `factor` if it divides the number,
    or else the largest divisor up to `factor` that is not larger than the second. The second matrix contains
    the kernel of a convolution.
    """
    (left, right), (top, bottom) = (_split(length, factor) for length in weight[:2])
    return (left, top), (right, bottom * math.prod(weight[2:]))


def oft_block_size(columns: int, size: int) -> int:
    """Return the divisor of a weight's number of columns that is closest to `size`, as in peft.

    Of two that are equally close, it is the smaller one.
    """
    divisors = (number for number in range(1, columns + 1) if columns % number == 0)
    return min(divisors, key=lambda number: (abs(number - size), number))


def _second_matrix_is_full(weight: tuple[int, ...], rank: int, factor: int) -> bool:
    # As in peft, without the kernel of a convolution.
    return rank >= max(lokr_shapes(weight[:2], factor)[1]) / 2


def _split(length: int, factor: int) -> tuple[int, int]:
    if length % factor == 0:
        return factor, length // factor
    largest = min(factor, math.isqrt(length))
    first = next(number for number in range(largest, 0, -1) if length % number == 0)
    return first, length // first
