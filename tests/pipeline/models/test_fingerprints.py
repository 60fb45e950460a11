from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.cache.keys import LatentInputs, MaskInputs, TextInputs, latent_key, text_key
from pipeline.errors import ModelError
from pipeline.images.geometry import Crop, Size
from pipeline.models.diffusers_folder import weight_files
from pipeline.models.families import detect
from pipeline.models.families.family import Use
from pipeline.models.fingerprints import Fingerprints, ModelPart, canonical_hash, canonical_text
from pipeline.models.worker.family import load_family
from tests.tensor_differences import differing_tensors

LATENT = LatentInputs(
    content_hash="aa",
    resized_size=Size(64, 80),
    crop=Crop(0, 8, 64, 64),
    flip=False,
    background=(255, 255, 255),
    preprocessing_version=1,
    vae="vv",
    method="m, 1",
    posterior="sample",
    compute_dtype="float32",
    dtype="float16",
)
TEXT = TextInputs(
    "a cat", encoders="ee", method="t, 1", max_length=77, compute_dtype="float32", dtype="float16"
)
MASK = MaskInputs(
    mask_hash="aa",
    source="file",
    resized_size=Size(64, 80),
    crop=Crop(0, 8, 64, 64),
    flip=False,
    factor=8,
    preprocessing_version=1,
    dtype="float16",
)

OTHER_LATENT = {
    "content_hash": "ab",
    "resized_size": Size(80, 64),
    "crop": Crop(8, 0, 64, 64),
    "flip": True,
    "background": (255, 255, 254),
    "preprocessing_version": 2,
    "vae": "vw",
    "method": "m, 2",
    "posterior": "mean",
    "compute_dtype": "bfloat16",
    "dtype": "float32",
}
OTHER_TEXT = {
    "references": {"images": [["0" * 64, 384, 384]]},
    "caption": "a cat ",
    "encoders": "ef",
    "method": "t, 2",
    "max_length": 225,
    "compute_dtype": "bfloat16",
    "dtype": "float32",
}
OTHER_MASK = {
    "mask_hash": "ab",
    "source": "alpha",
    "resized_size": Size(80, 64),
    "crop": Crop(8, 0, 64, 64),
    "flip": True,
    "factor": 16,
    "preprocessing_version": 2,
    "dtype": "float32",
}


def sharing_a_key(keys: dict[str, str]) -> list[list[str]]:
    """Return the changed inputs that have one key in common, as lists of two or more."""
    changes: dict[str, list[str]] = {}
    for name, key in keys.items():
        changes.setdefault(key, []).append(name)
    return [names for names in changes.values() if len(names) > 1]


def test_L04_each_input_of_a_latent_changes_its_key() -> None:
    assert set(OTHER_LATENT) == {field.name for field in dataclasses.fields(LatentInputs)}
    keys = {
        name: latent_key(dataclasses.replace(LATENT, **{name: OTHER_LATENT[name]})) for name in OTHER_LATENT
    }
    assert sharing_a_key({"nothing": latent_key(LATENT), **keys}) == []


def test_T01_each_input_of_a_text_embedding_changes_its_key() -> None:
    assert set(OTHER_TEXT) == {field.name for field in dataclasses.fields(TextInputs)}
    keys = {name: text_key(dataclasses.replace(TEXT, **{name: OTHER_TEXT[name]})) for name in OTHER_TEXT}
    assert sharing_a_key({"nothing": text_key(TEXT), **keys}) == []


def test_L04_each_input_of_a_mask_changes_its_key() -> None:
    assert set(OTHER_MASK) == {field.name for field in dataclasses.fields(MaskInputs)}
    masks = {name: dataclasses.replace(MASK, **{name: OTHER_MASK[name]}) for name in OTHER_MASK}
    keys = {name: canonical_hash({"masks": vars(mask)}) for name, mask in {"nothing": MASK, **masks}.items()}
    assert sharing_a_key(keys) == []


def test_keys_equal_those_of_earlier_versions() -> None:
    """A change here invalidates the caches of all users, so it must be intended."""
    assert latent_key(LATENT) == "b54d104602e6102860a170260f4e1bfc716f51b67588bc0606c64f28c156e292"
    assert text_key(TEXT) == "ee39bd6501607929f3a2bcd8c4ee3495afabd710086e0e45221f8e3e9fe68fd3"


@pytest.fixture
def part(tmp_path: Path) -> ModelPart:
    folder = tmp_path / "model" / "vae"
    folder.mkdir(parents=True)
    config = {"_class_name": "AutoencoderKL", "scaling_factor": 0.18, "_name_or_path": "me/mine"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "weights.safetensors").write_bytes(b"12345")
    old(folder / "weights.safetensors")
    return ModelPart("vae", (folder / "config.json",), (folder / "weights.safetensors",))


def old(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def fingerprint(tmp_path: Path, part: ModelPart) -> str:
    return Fingerprints(tmp_path / "cache").of([part])


def test_L04_T01_weights_and_settings_of_a_model_change_its_fingerprint(
    tmp_path: Path, part: ModelPart
) -> None:
    fingerprints = {"nothing": fingerprint(tmp_path, part)}
    part.contents[0].write_bytes(b"12346")
    fingerprints["weights"] = fingerprint(tmp_path, part)
    config = json.loads(part.configs[0].read_text())
    part.configs[0].write_text(json.dumps({**config, "scaling_factor": 0.19}))
    fingerprints["a setting"] = fingerprint(tmp_path, part)
    part.configs[0].write_text(json.dumps({**config, "_class_name": "AutoencoderTiny"}))
    fingerprints["the class"] = fingerprint(tmp_path, part)
    fingerprints["the role"] = fingerprint(tmp_path, dataclasses.replace(part, role="decoder"))
    assert sharing_a_key(fingerprints) == []


def test_L15_names_paths_versions_and_the_order_of_settings_do_not(tmp_path: Path, part: ModelPart) -> None:
    before = fingerprint(tmp_path, part)
    config = json.loads(part.configs[0].read_text())
    changed = {**config, "_name_or_path": "other", "_diffusers_version": "9", "transformers_version": "1"}
    part.configs[0].write_text(json.dumps(dict(reversed(changed.items())), indent=7))
    moved = part.configs[0].parent.parent.rename(tmp_path / "elsewhere") / "vae"
    part = ModelPart("vae", (moved / "config.json",), (moved / "weights.safetensors",))
    assert fingerprint(tmp_path / "other cache", part) == before


def test_an_unchanged_file_is_hashed_once_and_the_stored_hash_is_not_a_cache_entry(
    tmp_path: Path, part: ModelPart, monkeypatch: pytest.MonkeyPatch, progress_lines: list[str]
) -> None:
    monkeypatch.setattr("pipeline.models.fingerprints.RACY_NS", -(10**18))
    before = fingerprint(tmp_path, part)
    again = Fingerprints(tmp_path / "cache", log=progress_lines.append)
    assert again.of([part]) == before
    assert progress_lines == [], "it was read again"
    (memory,) = (tmp_path / "cache").iterdir()
    assert memory.suffix != ".safetensors"


def test_the_hash_of_a_file_that_changed_a_moment_ago_is_not_stored(tmp_path: Path, part: ModelPart) -> None:
    """The file was changed a moment ago, so it could change again without a change of its stat."""
    fingerprint(tmp_path, part)
    assert time.time_ns() - part.contents[0].stat().st_ctime_ns < 60e9
    assert not (tmp_path / "cache" / "fingerprints.json").exists()


@pytest.mark.parametrize("text", ['{"x": 1}', '{"x": ["a"]}'])
def test_stored_values_that_are_no_hashes_are_ignored(tmp_path: Path, part: ModelPart, text: str) -> None:
    before = fingerprint(tmp_path, part)
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / "fingerprints.json").write_text(text)
    assert fingerprint(tmp_path, part) == before


@pytest.mark.parametrize("value", ["NaN", "1e999", "{}", '"abc"', "null", '"\\ud800"', "[" * 500 + "]" * 500])
def test_a_stored_value_for_the_stat_of_a_file_that_is_no_hash_is_ignored(
    tmp_path: Path, part: ModelPart, value: str
) -> None:
    before, memory = fingerprint(tmp_path, part), tmp_path / "cache" / "fingerprints.json"
    memory.parent.mkdir(exist_ok=True)
    stats = {path.resolve(): path.stat() for path in part.contents}
    lines = [
        f'"{path}": [{stat.st_size}, {stat.st_mtime_ns}, {stat.st_ctime_ns}, {stat.st_ino}, {value}]'
        for path, stat in stats.items()
    ]
    memory.write_text("{" + ",".join(lines) + "}")
    assert fingerprint(tmp_path, part) == before


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"x": "\xff"}', b"[" * 100_000])
def test_damaged_stored_hashes_are_named_in_the_log_and_ignored(
    tmp_path: Path, part: ModelPart, progress_lines: list[str], content: bytes
) -> None:
    before, memory = fingerprint(tmp_path, part), tmp_path / "cache" / "fingerprints.json"
    memory.parent.mkdir(exist_ok=True)
    memory.write_bytes(content)
    assert Fingerprints(memory.parent, log=progress_lines.append).of([part]) == before
    assert f"{memory} cannot be read" in progress_lines[0]
    assert "hashed again" in progress_lines[0]


def test_L07_a_flipped_bit_of_a_stored_hash_changes_no_fingerprint(
    tmp_path: Path, part: ModelPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed fingerprint would encode everything again under other keys."""
    monkeypatch.setattr("pipeline.models.fingerprints.RACY_NS", -(10**18))
    before, memory = fingerprint(tmp_path, part), tmp_path / "cache" / "fingerprints.json"
    sound = memory.read_text()
    (stored,) = {entry[-1] for entry in json.loads(sound).values() if isinstance(entry, list)}
    for place in (0, 31, 63):
        digit = "0" if stored[place] != "0" else "1"
        memory.write_text(sound.replace(stored, stored[:place] + digit + stored[place + 1 :]))
        assert fingerprint(tmp_path, part) == before
        assert memory.read_text() == sound


def test_the_hash_in_the_name_of_a_hub_blob_equals_that_of_a_local_file(
    tmp_path: Path, part: ModelPart
) -> None:
    local = fingerprint(tmp_path, part)
    blob = tmp_path / "hub" / "blobs" / hashlib.sha256(b"12345").hexdigest()
    snapshot = tmp_path / "hub" / "snapshots" / "main" / "weights.safetensors"
    for path in (blob, snapshot):
        path.parent.mkdir(parents=True)
    blob.write_bytes(b"not read, because the name is the hash")
    snapshot.symlink_to(blob)
    hub = dataclasses.replace(part, contents=(snapshot,))
    assert Fingerprints(tmp_path / "cache").of([hub]) == local


@pytest.mark.parametrize("name", [f"copies/{'0' * 64}", "blobs/weights.safetensors"])
def test_only_the_name_of_a_hub_blob_is_taken_as_a_hash(tmp_path: Path, part: ModelPart, name: str) -> None:
    local = fingerprint(tmp_path, part)
    file = tmp_path / name
    file.parent.mkdir()
    file.write_bytes(part.contents[0].read_bytes())
    link = tmp_path / "linked" / part.contents[0].name
    link.parent.mkdir()
    link.symlink_to(file)
    assert fingerprint(tmp_path, dataclasses.replace(part, contents=(link,))) == local


def test_a_missing_model_file_is_an_error_that_names_it(tmp_path: Path, part: ModelPart) -> None:
    part.contents[0].unlink()
    with pytest.raises(ModelError, match=r"weights\.safetensors"):
        fingerprint(tmp_path, part)


def test_an_infinite_setting_of_a_solver_counts(tmp_path: Path, part: ModelPart) -> None:
    fingerprints: dict[str, str] = {}
    for value in ("-Infinity", "Infinity", "-5.1"):
        part.configs[0].write_text(f'{{"lambda_min_clipped": {value}}}')
        fingerprints[value] = fingerprint(tmp_path, part)
    assert sharing_a_key(fingerprints) == []


def test_hashing_reports_its_progress_in_megabytes_and_a_known_hash_is_not_computed(
    tmp_path: Path, progress_lines: list[str]
) -> None:
    for name, num_bytes in (("one", 3_000_000), ("two", 2_500_000)):
        file = tmp_path / name
        file.write_bytes(b"x" * num_bytes)
        os.utime(file, (1e9, 1e9))
    part = ModelPart("vae", (), (tmp_path / "one", tmp_path / "two"))
    fingerprint = Fingerprints(tmp_path, log=progress_lines.append).of([part])
    assert progress_lines[-1].startswith("model weights hashed: 5 of 5 MB, ")
    assert " MB/s, 0:0" in progress_lines[-1]
    assert Fingerprints(tmp_path / "other").of([part]) == fingerprint

    contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in part.contents]
    facts = [{"role": "vae", "configs": [], "contents": contents}]
    assert fingerprint == canonical_hash(facts), "as one call of hashlib per file"


@pytest.mark.parametrize("replaced", [False, True], ids=["edited in place", "replaced by another file"])
def test_L04_a_file_with_the_same_size_and_time_stamp_is_hashed_again(
    tmp_path: Path, part: ModelPart, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    """Copying tools restore the modification time, so only the change time and the inode show the change."""
    monkeypatch.setattr("pipeline.models.fingerprints.RACY_NS", -(10**18))
    path = part.contents[0]
    old(path)
    before, size = fingerprint(tmp_path, part), path.stat().st_size
    if replaced:
        path.unlink()
    path.write_bytes(bytes(size))
    old(path)
    assert fingerprint(tmp_path, part) != before, "the remembered hash of the earlier content was used"


def test_the_text_of_a_value_is_compact_sorted_ascii_and_has_no_nan() -> None:
    assert canonical_text({"b": "é", "a": [1, 2]}) == '{"a":[1,2],"b":"\\u00e9"}'
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_text({"a": float("nan")})


def test_nested_settings_count_without_their_origin(tmp_path: Path, part: ModelPart) -> None:
    def of(config: object) -> str:
        part.configs[0].write_text(json.dumps(config))
        return fingerprint(tmp_path, part)

    plain = of({"layers": [{"_class_name": "A", "size": 1}], "more": {"x": 2}})
    origin = {
        "name_or_path": "me",
        "tokenizer_file": "t",
        "special_tokens_map_file": "s",
        "_commit_hash": "c",
    }
    assert of({"layers": [{"_class_name": "A", "size": 1, **origin}], "more": {"x": 2, **origin}}) == plain
    assert of({"layers": [{"_class_name": "B", "size": 1}], "more": {"x": 2}}) != plain
    assert of({"layers": [{"_class_name": "A", "size": 2}], "more": {"x": 2}}) != plain


@pytest.mark.parametrize("config", ["{", "[" * 100_000], ids=["no JSON", "deeply nested"])
def test_an_unreadable_configuration_is_an_error_with_a_fix(
    tmp_path: Path, part: ModelPart, config: str
) -> None:
    part.configs[0].write_text(config)
    with pytest.raises(ModelError, match="a file of the base model is unreadable") as excinfo:
        fingerprint(tmp_path, part)
    assert excinfo.value.where == "configuration of the base model"
    assert "download the model again" in excinfo.value.fix


def test_a_missing_file_is_named_as_the_place_of_the_error(tmp_path: Path, part: ModelPart) -> None:
    part.contents[0].unlink()
    with pytest.raises(ModelError) as excinfo:
        fingerprint(tmp_path, part)
    assert excinfo.value.where == str(part.contents[0])


def state_dtype(folder: Path, dtype: str) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": dtype}))


def text_fingerprint(base: Path, memory: Path) -> str:
    return Fingerprints(memory).of(detect(base).fingerprint_parts("text"))


def configs_hash(folder: Path) -> str:
    """Return the fingerprint of a network as 0.3.0 computed it: the configuration, then the weights."""
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name != "transformers_version"}
    contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in weight_files(folder)]
    return canonical_hash([{"role": folder.name, "configs": [config], "contents": contents}])


@pytest.mark.parametrize("use", ["latents", "text", "denoiser"])
def test_the_demos_base_model_has_the_fingerprints_of_earlier_releases(tmp_path: Path, use: Use) -> None:
    """A change here encodes the demo again, or trains it again."""
    expected = {
        "latents": "757c9bf749672c993b45e35209e6edcdde18aec8b7df0f2d7e0c85fe0161c29b",
        "text": "d55e1f7d76ff870f0a4887f4305a6531747dd588fe36df7333c4eecf96bd5b19",
        "denoiser": "6946d90f76d565db838cf3140ae716bf267379583fb880ec933f0e7db66ae443",
    }
    parts = detect(Path(__file__).parents[3] / "demo" / "base").fingerprint_parts(use)
    assert Fingerprints(tmp_path).of(parts) == expected[use]


@pytest.mark.parametrize("max_shard_size", ["5GB", "30KB"])
@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
def test_a_stated_float32_computes_the_same_and_has_the_fingerprint_of_the_stored_dtype(
    tmp_path: Path, tiny_sd: Path, stored: str, max_shard_size: str
) -> None:
    from transformers import CLIPTextModel

    base = shutil.copytree(tiny_sd, tmp_path / "base")
    folder = base / "text_encoder"
    encoder = CLIPTextModel.from_pretrained(folder).to(getattr(torch, stored))
    (folder / "model.safetensors").unlink()
    encoder.save_pretrained(folder, max_shard_size=max_shard_size)
    part = ModelPart("text_encoder", (folder / "config.json",), weight_files(folder))
    assert json.loads((folder / "config.json").read_text())["dtype"] == stored
    assert len(part.contents) == 1 or max_shard_size == "30KB"

    keys, texts = list[str](), list[dict[str, torch.Tensor]]()
    for stated in (stored, "float32"):
        state_dtype(folder, stated)
        keys.append(Fingerprints(tmp_path / "cache").of([part]))
        text = load_family(base).text
        texts.append(text.encode_caption(text.load("auto", "cpu"), "a cat").tensors)
        if stated == stored:
            assert keys[0] == configs_hash(folder)
    assert keys[1] == keys[0]
    assert differing_tensors(*texts) == []


@pytest.mark.parametrize(
    ("weights", "stated"),
    [
        ({"a": torch.float16, "b": torch.bfloat16}, "float32"),
        ({"a": torch.float16, "b": torch.float32}, "float32"),
        ({"a": torch.float16, "ids": torch.int64}, "float32"),
        ({"a": torch.float64}, "float32"),
        ({"a": torch.float16}, "bfloat16"),
        ({"a": torch.float32}, "float16"),
    ],
    ids=str,
)
def test_every_other_stated_dtype_counts_as_it_is(
    tmp_path: Path, weights: dict[str, torch.dtype], stated: str
) -> None:
    folder = tmp_path / "text_encoder"
    folder.mkdir()
    save_file(
        {name: torch.ones(2, dtype=dtype) for name, dtype in weights.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"dtype": stated, "hidden_size": 2}))
    part = ModelPart("text_encoder", (folder / "config.json",), weight_files(folder))
    assert fingerprint(tmp_path, part) == configs_hash(folder)
