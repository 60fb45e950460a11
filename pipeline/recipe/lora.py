"""The adapter of a recipe: its size, which modules it is put on, and of what kind it is."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from pipeline.recipe.rules import Broken, check_path, raise_broken, reject
from pipeline.recipe.section import Settings
from pipeline.recipe.text_encoders import MAX_RANK, TextEncoderSettings

TEXT_ENCODER = "text_encoder"
"""How the names of the text encoders begin, and so the paths of their modules."""


def _check_pattern(value: str) -> str:
    if any(sign in value for sign in " /\\^$|()+"):
        reject(
            f"{value!r} is no pattern of module paths",
            "write a dotted path with * for any text and ? for any one character, such as *.attn2.to_q",
        )
    return value


ModulePattern = Annotated[str, Field(min_length=1), AfterValidator(_check_pattern)]
"""Of dotted module paths in the diffusers denoiser, as `fnmatch` reads it: * also matches dots."""


class RankSettings(Settings):
    """Modules whose rank is not that of the others."""

    modules: ModulePattern = Field(
        description="Pattern of their dotted paths in the diffusers model, such as `*.attn2.*`."
    )
    rank: int = Field(ge=1, le=MAX_RANK, description="Inner dimension of their adapter matrices.")
    alpha: float | None = Field(
        default=None,
        gt=0.0,
        description="Their alpha; null: in proportion, so that they are scaled as the others are.",
    )


class LoraSettings(Settings):
    """The adapter: its size, its modules and its kind."""

    rank: int = Field(default=16, ge=1, le=MAX_RANK, description="Inner dimension of each adapter matrix.")
    alpha: float = Field(
        default=16.0, gt=0.0, description="The adapter is scaled by alpha / rank; usually equal to rank."
    )
    kind: Literal["lora", "loha", "lokr"] = Field(
        default="lora",
        description="lora: the product of two matrices (https://arxiv.org/abs/2106.09685). loha: two such "
        "products multiplied value by value (https://arxiv.org/abs/2108.06098), as rich as a LoRA of rank "
        "x rank with far fewer weights. lokr: the Kronecker product of a small matrix and such a product "
        "(https://arxiv.org/abs/2309.14859), as rich as a LoRA of rank x `lokr_factor`. The files of the "
        "last two hold that very LoRA, so that every program reads them, and are as large as it.",
    )
    lokr_factor: int | None = Field(
        default=None,
        ge=2,
        le=MAX_RANK,
        description="Of kind lokr: rows and columns of the small matrix, or fewer where they do not divide a "
        "layer's; null: 8. Larger: fewer weights are trained, and the files grow. With a rank of half the "
        "larger side of the second matrix or more, that is no product but whole.",
    )
    dropout: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of each adapter's inputs that a training step leaves out, drawn from the seed.",
    )
    targets: Literal["family", "attention", "blocks"] = Field(
        default="family",
        description="Which modules get an adapter. family: those that docs/families.md names. attention: the "
        "linear layers of every attention. blocks: every linear layer of the repeated blocks, attention and "
        "feed-forward.",
    )
    modules: tuple[ModulePattern, ...] = Field(
        default=(),
        description="In place of `targets`: patterns of dotted paths in the diffusers model, with * and ?, "
        "such as `*.attn2.to_q`.",
    )
    conv_rank: int | None = Field(
        default=None,
        ge=1,
        le=MAX_RANK,
        description="Also adapt the convolutions of a UNet's blocks, with this rank (LoCon); null: none.",
    )
    conv_alpha: float | None = Field(
        default=None,
        gt=0.0,
        description="Of the convolutions; null: in proportion, so that they are scaled as the others are.",
    )
    ranks: tuple[RankSettings, ...] = Field(
        default=(), description="Ranks of their own for some modules; the first pattern that fits counts."
    )
    dora: bool = Field(
        default=False,
        description="Also train the length of each row of the adapted weights (DoRA, "
        "https://arxiv.org/abs/2402.09353): closer to full training, slower. diffusers reads it from its own "
        "layout only.",
    )
    rslora: bool = Field(
        default=False,
        description="Scale by alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732), so that large ranks "
        "learn as fast as small ones. Files hold an alpha that comes to the same.",
    )
    init: Literal["kaiming", "gaussian", "pissa", "olora"] = Field(
        default="kaiming",
        description="How it begins. kaiming, gaussian: the down matrices uniform as a linear layer's, or "
        "normal with deviation 1 / rank, the up matrices zero. pissa, olora: as that part of the base "
        "weights with the largest singular values (https://arxiv.org/abs/2404.02948), or the first of their "
        "QR decomposition (https://arxiv.org/abs/2406.01775), which is taken off again by a fixed adapter, "
        "so that the model begins unchanged. Files are for the base model as it is, and have twice the rank.",
    )
    start_from: Annotated[Path, BeforeValidator(check_path)] | None = Field(
        default=None,
        description="A LoRA file with which training begins, of the same modules, ranks and kind, in "
        "diffusers', kohya's or ComfyUI's layout. Relative to the project root.",
    )
    text_encoders: TextEncoderSettings | None = Field(
        default=None,
        description="Train LoRA on the text encoders too, as docs/families.md says which families can; `{}` "
        "takes every default, null trains none. Captions are then encoded in training, at each step, with "
        "encoders that need their memory there; of the cached text embeddings none is read. What is the "
        "denoiser's own stays so: `kind`, `dora`, `modules`, `ranks`, `conv_rank`. `dropout`, `rslora` and "
        "`init: gaussian` hold for both.",
    )

    @model_validator(mode="after")
    def _ranks_differ(self) -> LoraSettings:
        seen: set[str] = set()
        for index, each in enumerate(self.ranks):
            if each.modules in seen:
                what = f"the pattern {each.modules} stands there before, and the first that fits counts"
                raise_broken([Broken(f"ranks[{index}].modules", what, "remove one of the two")])
            seen.add(each.modules)
        return self

    @model_validator(mode="after")
    def _modules_or_targets(self) -> LoraSettings:
        if self.modules and self.targets != "family":
            what = f"targets: {self.targets} has no effect beside modules"
            raise_broken([Broken("targets", what, "remove one of the two")], involves=("targets", "modules"))
        return self

    @model_validator(mode="after")
    def _conv_alpha_has_an_effect(self) -> LoraSettings:
        if self.conv_alpha is not None and self.conv_rank is None:
            broken = Broken(
                "conv_alpha", "conv_alpha has no effect without conv_rank", "set conv_rank, or remove it"
            )
            raise_broken([broken], involves=("conv_alpha", "conv_rank"))
        return self

    @model_validator(mode="after")
    def _other_kinds_are_plain(self) -> LoraSettings:
        given = {
            "dropout": self.dropout > 0.0,
            "dora": self.dora,
            "rslora": self.rslora,
            "init": self.init != "kaiming",
            "start_from": self.start_from is not None,
        }
        broken = [
            Broken(key, f"{key} is not for kind: {self.kind}", f"remove {key}, or set kind: lora")
            for key, is_given in given.items()
            if is_given and self.kind != "lora"
        ]
        if self.lokr_factor is not None and self.kind != "lokr":
            what = f"lokr_factor has no effect with kind: {self.kind}"
            broken.append(Broken("lokr_factor", what, "remove it, or set kind: lokr"))
        if broken:
            raise_broken(broken, involves=("kind", "lokr_factor", *given))
        return self

    @model_validator(mode="after")
    def _parts_of_the_base_are_plain(self) -> LoraSettings:
        given = {"dora": self.dora, "start_from": self.start_from is not None}
        broken = [
            Broken(key, f"{key} is not for init: {self.init}", f"remove {key}, or set init: kaiming")
            for key, is_given in given.items()
            if is_given and self.begins_as_part
        ]
        if broken:
            raise_broken(broken, involves=("init", *given))
        return self

    def file_rank_of(self, module: str, weight: tuple[int, ...]) -> int:
        """The rank of the module's matrices in the exported files.

        Args:
            module: Its dotted path.
            weight: The shape of its weight: (rows, columns), of a convolution (rows, columns, height, width).
        """
        rank = self.size_of(module, conv=max(weight[2:], default=1) > 1)[0]
        if self.kind == "lokr":
            left, right = lokr_shapes(weight, self.kronecker_factor)
            whole = lokr_is_whole(weight, rank, self.kronecker_factor)
            return min(left) * (min(right) if whole else rank)
        return rank * rank if self.kind == "loha" else rank * (2 if self.begins_as_part else 1)

    @property
    def begins_as_part(self) -> bool:
        """Whether the adapter begins as a part of the base weights."""
        return self.init in ("pissa", "olora")

    @property
    def usual_file_rank(self) -> int:
        """`file_rank_of` of most modules."""
        if self.begins_as_part:
            return 2 * self.rank
        return self.rank * {"lora": 1, "loha": self.rank, "lokr": self.kronecker_factor}[self.kind]

    @property
    def kronecker_factor(self) -> int:
        """`lokr_factor`, or what it is unless said."""
        return self.lokr_factor or 8

    @property
    def family_modules(self) -> bool:
        """Whether the adapted modules are just those that the family names."""
        return self.targets == "family" and not self.modules and self.conv_rank is None

    @property
    def of_text_encoders(self) -> LoraSettings | None:
        """The settings of the text encoders' adapters, a plain LoRA; None where they get none."""
        own = self.text_encoders
        if own is None:
            return None
        rank = self.rank if own.rank is None else own.rank
        return LoraSettings(
            rank=rank,
            alpha=self._proportional(rank) if own.alpha is None else own.alpha,
            dropout=self.dropout,
            rslora=self.rslora,
            init="gaussian" if self.init == "gaussian" else "kaiming",
        )

    def of_network(self, module: str) -> LoraSettings:
        """The settings of the adapter that a module has: the denoiser's, or a text encoder's.

        Args:
            module: Its dotted path, which begins with the name of the text encoder if it is one's.
        """
        text = self.of_text_encoders
        return text if text is not None and module.startswith(TEXT_ENCODER) else self

    def has_own_size(self, module: str, *, conv: bool) -> bool:
        """Whether the module's size is another than `rank` and `alpha`; arguments as of `size_of`."""
        return self._rule_of(module) is not None or (conv and self.conv_rank is not None)

    def size_of(self, module: str, *, conv: bool) -> tuple[int, float]:
        """(rank, alpha) of a module.

        Args:
            module: Its dotted path.
            conv: Whether it is a convolution of more than one pixel.
        """
        rule = self._rule_of(module)
        if rule is not None:
            return rule.rank, self._proportional(rule.rank) if rule.alpha is None else rule.alpha
        if conv and self.conv_rank is not None:
            alpha = self._proportional(self.conv_rank) if self.conv_alpha is None else self.conv_alpha
            return self.conv_rank, alpha
        return self.rank, self.alpha

    def scale_of(self, module: str, *, conv: bool) -> float:
        """What the product of the module's two matrices is multiplied by; arguments as of `size_of`."""
        rank, alpha = self.size_of(module, conv=conv)
        return alpha / rank**0.5 if self.rslora else alpha / rank

    def _rule_of(self, module: str) -> RankSettings | None:
        return next((each for each in self.ranks if fnmatchcase(module, each.modules)), None)

    def _proportional(self, rank: int) -> float:
        return self.alpha * rank / self.rank


def lokr_shapes(weight: tuple[int, ...], factor: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns of the two matrices whose Kronecker product is the weight, flattened to a matrix.

    Rows and columns are each split into two numbers. The first is `factor` where it divides them, or else
    the largest divisor below it that is the smaller of the two, as peft splits them.

    Args:
        weight: The weight's shape, (rows, columns, *kernel); the kernel is of the second matrix.
        factor: What the first matrix has of rows and columns.
    """
    (left, right), (top, bottom) = (_split(length, factor) for length in weight[:2])
    return (left, top), (right, bottom * math.prod(weight[2:]))


def lokr_is_whole(weight: tuple[int, ...], rank: int, factor: int) -> bool:
    """Whether the second matrix is one, and not the product of two of `rank`; the kernel does not count."""
    return rank >= max(lokr_shapes(weight[:2], factor)[1]) / 2


def _split(length: int, factor: int) -> tuple[int, int]:
    if length % factor == 0:
        return factor, length // factor
    largest = min(factor, math.isqrt(length))
    first = next(number for number in range(largest, 0, -1) if length % number == 0)
    return first, length // first
