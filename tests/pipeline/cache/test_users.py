"""Who needs what in a cache, as each output folder says it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from pipeline.cache.users import (
    CacheUser,
    read_users,
    record_speed,
    recorded_speed,
    register_user,
    unregister_user,
)
from pipeline.errors import StoreError

KEYS = [hashlib.sha256(bytes([index])).hexdigest() for index in range(5)]


def test_each_output_folder_is_found_with_the_keys_of_all_kinds(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "zwei ü"
    register_user(tmp_path, one, recipe="flowers", kind="latents", keys=KEYS[:2])
    register_user(tmp_path, one, recipe="flowers", kind="text", keys=KEYS[2:3])
    register_user(tmp_path, two, recipe="faces", kind="latents", keys=[])
    found = {user.recipe: user for user in read_users(tmp_path)}
    assert found["flowers"] == CacheUser(one, "flowers", frozenset(KEYS[:3]))
    assert found["faces"] == CacheUser(two, "faces", frozenset())


def test_the_last_registration_of_a_kind_counts(tmp_path: Path) -> None:
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=KEYS[:2])
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=[KEYS[4], KEYS[4]])
    (user,) = read_users(tmp_path)
    assert user.keys == {KEYS[4]}


def test_saying_the_same_again_writes_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=KEYS)
        stats = {path: path.stat().st_ino for path in (tmp_path / "outputs").iterdir()}
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=reversed(KEYS))
    assert {path: path.stat().st_ino for path in (tmp_path / "outputs").iterdir()} == stats


def test_a_forgotten_folder_needs_nothing(tmp_path: Path) -> None:
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=KEYS)
    assert unregister_user(tmp_path, tmp_path / "out")
    assert list(read_users(tmp_path)) == []
    assert not unregister_user(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("suffix", "content"), [(".json", b"{"), (".json", b"[]"), ("-latents.keys", b"short")]
)
def test_L13_a_damaged_registration_is_an_error_and_never_a_need_for_nothing(
    tmp_path: Path, suffix: str, content: bytes
) -> None:
    register_user(tmp_path, tmp_path / "out", recipe="flowers", kind="latents", keys=KEYS)
    (path,) = (tmp_path / "outputs").glob(f"*{suffix}")
    path.write_bytes(content)
    with pytest.raises(StoreError, match="registration") as caught:
        list(read_users(tmp_path))
    assert "run the cache job" in caught.value.fix


def test_nothing_registered_is_nothing(tmp_path: Path) -> None:
    assert list(read_users(tmp_path / "none")) == []


def test_the_speed_is_remembered_by_kind_and_a_damaged_memory_is_none(tmp_path: Path) -> None:
    assert recorded_speed(tmp_path, "latents") is None
    record_speed(tmp_path, "latents", 0.5)
    record_speed(tmp_path, "text", 0.25)
    assert (recorded_speed(tmp_path, "latents"), recorded_speed(tmp_path, "text")) == (0.5, 0.25)
    (tmp_path / "speed.json").write_text("nonsense")
    assert recorded_speed(tmp_path, "text") is None
