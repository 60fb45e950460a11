"""Files of every family against the key maps that `tests.readers.real` has written with the readers' code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from demo.tiny_models import TINY
from pipeline.trained_lora.export.lora_files import LoraModule
from pipeline.trained_lora.export.metadata import READERS_KEY
from tests.readers import comfyui, golden, musubi, sd_scripts
from tests.readers.exported import Exported, export
from tests.readers.readings import TOLERANCE, stem

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

MAPS = {reader: golden.load(reader) for reader in golden.LAYOUT}

MODELS = {"comfyui": comfyui.MODELS, "sd_scripts": sd_scripts.MODELS, "musubi": musubi.MODELS}
"""Kinds of models that the readers can load."""

NO_GOLDEN_MAP = {
    "Qwen-Image-Edit (first)": "its transformer is the one of Qwen-Image-Edit",
    "Sana": "none of the readers has code for it",
    "CogView4": "none of the readers has code for it",
    "Bria FIBO": "none of the readers has code for it",
    "Bria FIBO 2": "none of the readers has been tried with it",
    "Qwen-Image 2.1": "ComfyUI 0.33.0 does not have it yet, the others not at all",
    "Qwen-Image 2.1 Turbo": "ComfyUI 0.33.0 does not have it yet, the others not at all",
}

CASES = [
    pytest.param(
        reader, kind, marks=[pytest.mark.slow] if key_map in list(stored.maps.values())[:number] else []
    )
    for reader, stored in MAPS.items()
    for number, (kind, key_map) in enumerate(stored.maps.items())
]
"""Readers and kinds of models; a kind with the map of an earlier kind is slow."""

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Files by kind of model, written on first use."""
    made: dict[str, Exported] = {}

    def of(kind: str) -> Exported:
        if kind not in made:
            made[kind] = export(kind, tmp_path_factory.mktemp("exported"))
        return made[kind]

    return of


def differences(reader: str, kind: str, files: Exported, tensors: Tensors) -> Iterator[str]:
    """Yield each difference between a file and the golden map, with reader, kind, module and both keys."""
    layout = golden.LAYOUT[reader]
    where = f"{MAPS[reader].reader}, {kind}"
    expected = MAPS[reader].maps[kind]
    modules = {module.name: module for module in files.modules}
    for name in expected.keys() ^ modules.keys():
        yield f"{where}, {name}: only in {'the golden map' if name in expected else 'our file'}"

    keys = {stem(key) for key in tensors}
    ours = {name: stem(module.keys(layout)[0]) for name, module in modules.items()}
    for name in expected.keys() & modules.keys():
        if (entry := expected[name]) is None:
            continue
        key, place = entry
        num_rows = sum(end - start for start, end in place.rows)
        if ours[name] != key:
            yield f"{where}, {name}: our key is {ours[name]}, the reader's is {key}"
        elif num_rows != modules[name].out_features:
            yield f"{where}, {name}: the reader's {place.weight} has {num_rows} rows for key {key}"
        elif key in keys:
            shared = sum(each == key for each in ours.values()) > 1
            delta = _delta(tensors, key)
            rows = place.of(delta) if shared else delta
            error = _error(rows, files.deltas[name])
            if error > TOLERANCE:
                problem = f"holds another delta weight for {place.weight}, error {error:.2g}"
                yield f"{where}, {name}: key {key} {problem}"

    known = {entry[0] for entry in expected.values() if entry is not None}
    known |= {ours[name] for name in expected.keys() & ours.keys() if expected[name] is None}
    for key in keys ^ known:
        yield f"{where}, key {key} is only in {'our file' if key in keys else 'the golden map'}"


def _delta(tensors: Tensors, key: str) -> Tensor:
    """Return alpha / rank * up @ down, as each of the readers computes it."""
    down, up = tensors[f"{key}.lora_down.weight"], tensors[f"{key}.lora_up.weight"]
    return float(tensors[f"{key}.alpha"]) / len(down) * (up.flatten(1) @ down.flatten(1))


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("reader", "kind"), CASES)
def test_E09_a_reader_finds_every_module_under_the_key_of_its_own_map(
    exported: Callable[[str], Exported], reader: str, kind: str
) -> None:
    files = exported(kind)
    tensors = load_file(files.file(golden.LAYOUT[reader]))
    assert not (wrong := list(differences(reader, kind, files, tensors))), "\n".join(wrong)


@pytest.mark.parametrize(("reader", "kind"), CASES)
def test_a_reader_ignores_no_module_that_gets_an_adapter_by_default(
    exported: Callable[[str], Exported], reader: str, kind: str
) -> None:
    files = exported(kind)
    entries = MAPS[reader].maps[kind]
    ignored = [
        module.name for module in files.modules if files.is_default(module) and entries[module.name] is None
    ]
    assert not ignored, f"{MAPS[reader].reader}, {kind}: {ignored}"


@pytest.mark.parametrize("kind", ["Z-Image", "AuraFlow", "Lumina Image 2"])
def test_a_file_in_kohyas_layout_that_comfyui_ignores_in_part_says_so(
    exported: Callable[[str], Exported], kind: str
) -> None:
    with safe_open(exported(kind).file("kohya"), framework="pt") as file:
        note = file.metadata().get(READERS_KEY, "")
    assert ("ComfyUI ignores" in note) == (kind != "Lumina Image 2")


@pytest.mark.parametrize("kind", ["FLUX.2 klein", "Lumina Image 2", "FLUX.1 dev", "Chroma"])
def test_E09_a_file_in_comfyuis_layout_that_diffusers_does_not_apply_says_so(
    exported: Callable[[str], Exported], kind: str
) -> None:
    with safe_open(exported(kind).file("comfyui"), framework="pt") as file:
        note = file.metadata().get(READERS_KEY, "")
    assert ("diffusers does not apply" in note) == (kind in {"FLUX.2 klein", "Lumina Image 2"})


def test_every_kind_of_model_has_a_golden_map_or_a_reason() -> None:
    covered = {kind for stored in MAPS.values() for kind in stored.maps}
    assert covered | NO_GOLDEN_MAP.keys() == TINY.keys()
    assert not covered & NO_GOLDEN_MAP.keys()
    for reader, stored in MAPS.items():
        assert MODELS[reader].keys() - stored.maps.keys() <= NO_GOLDEN_MAP.keys(), reader


def test_the_page_on_families_states_what_the_readers_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    section = page.split("## LoRA files in other programs\n", 1)[1].split("\n## ", 1)[0]
    for stored in MAPS.values():
        for each in (stored.version, *stored.other_versions.values()):
            version, commit = re.fullmatch(r"(\S+), commit ([0-9a-f]{40})", each).groups()  # type: ignore[union-attr]
            assert re.search(rf"{stored.reader}\s{version}\s\((commit )?{commit[:7]}\)", section), each

    kinds = dict.fromkeys(kind for stored in MAPS.values() for kind in stored.maps)
    rows = [
        f"| {kind} | {' | '.join(_num_read(stored, kind) for stored in MAPS.values())} |" for kind in kinds
    ]
    assert re.findall(r"^\| .*[\d-] \|$", section, re.MULTILINE) == rows


def _num_read(stored: golden.Golden, kind: str) -> str:
    """Return the cell of a kind: the modules that the reader reads, and all if it ignores some."""
    if kind not in stored.maps:
        return "-"
    entries = stored.maps[kind].values()
    num_read = sum(entry is not None for entry in entries)
    return str(num_read) if num_read == len(entries) else f"{num_read} of {len(entries)}"


def test_the_upsampler_of_a_level_without_attention_has_the_number_that_comfyui_gives_it() -> None:
    entries = MAPS["comfyui"].maps["Stable Diffusion 1.x and 2.x"]
    keys = {f"up_blocks.{level}": entries[f"up_blocks.{level}.upsamplers.0.conv"] for level in range(3)}
    assert {name: entry and entry[0] for name, entry in keys.items()} == {
        "up_blocks.0": "diffusion_model.output_blocks.2.1.conv",  # no attention before it
        "up_blocks.1": "diffusion_model.output_blocks.5.2.conv",
        "up_blocks.2": "diffusion_model.output_blocks.8.2.conv",
    }


def _swap_query_and_key(tensors: Tensors, modules: list[LoraModule]) -> Tensors:
    query, key = (_key(modules, f"transformer_blocks.0.attn.to_{end}") for end in "qk")
    names = {query: key, key: query}
    return {
        names.get(stem(name), stem(name)) + name[len(stem(name)) :]: each for name, each in tensors.items()
    }


def _without_a_module(tensors: Tensors, modules: list[LoraModule]) -> Tensors:
    lost = _key(modules, "transformer_blocks.0.attn.to_q")
    others = {name: each for name, each in tensors.items() if stem(name) != lost}
    return others | {name.replace(lost, "unknown"): tensors[name] for name in tensors.keys() - others.keys()}


def _with_another_alpha(tensors: Tensors, modules: list[LoraModule]) -> Tensors:
    key = _key(modules, "transformer_blocks.0.attn.to_q")
    return {name: 2 * each if name == f"{key}.alpha" else each for name, each in tensors.items()}


def _key(modules: list[LoraModule], name: str) -> str:
    return next(module.comfyui for module in modules if module.name == name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _swap_query_and_key,
            "transformer_blocks.0.attn.to_k: key transformer.transformer_blocks.0.attn.to_k holds",
        ),
        (_without_a_module, "key transformer.transformer_blocks.0.attn.to_q is only in the golden map"),
        (_without_a_module, "key unknown is only in our file"),
        (
            _with_another_alpha,
            "transformer_blocks.0.attn.to_q: key transformer.transformer_blocks.0.attn.to_q holds",
        ),
    ],
)
def test_a_changed_file_is_reported_with_family_module_and_keys(
    exported: Callable[[str], Exported], change: Callable[..., Tensors], message: str
) -> None:
    files = exported("FLUX.2 klein")
    tensors = change(load_file(files.file("comfyui")), files.modules)
    wrong = list(differences("comfyui", "FLUX.2 klein", files, tensors))
    assert any(line.startswith(f"ComfyUI, FLUX.2 klein, {message}") for line in wrong), wrong
