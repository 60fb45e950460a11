"""Who needs which entries of a store: each output folder registers itself in `cache_dir`.

    <cache_dir>/outputs/<id>.json             which output folder, which recipe
    <cache_dir>/outputs/<id>-<kind>.keys      the keys that its last job of this kind asked for
    <cache_dir>/speed.json                    how long encoding took here, for estimates

A job registers before it looks at the first entry, so that the keys of a running job are known as well as
those of a finished one, captions without a table row among them. Nothing here is needed to read an entry:
`latentline gc` alone asks who needs what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.atomic import write_bytes
from pipeline.errors import StoreError
from pipeline.refusals import system_refusal

FOLDER = "outputs"
_KEY_BYTES = 32
_SPEED_FILE = "speed.json"


@dataclass(frozen=True)
class Registered:
    """One output folder that uses the store.

    Attributes:
        output_dir: As it was registered; it may be gone, or not mounted.
        recipe: The recipe's name.
        keys: Hex keys that its last jobs asked for, of all kinds.
    """

    output_dir: Path
    recipe: str
    keys: frozenset[str]


def register(cache_dir: Path, output_dir: Path, *, recipe: str, kind: str, keys: Iterable[str]) -> None:
    """Say that `output_dir` needs the entries of `kind` with these keys, and no others of that kind.

    Nothing is written where the same is said already.

    Args:
        cache_dir: The store's root; made if it is not there.
        output_dir: Of the recipe that asks.
        recipe: Its name.
        kind: Of the entries.
        keys: 64 hex digits each.

    Raises:
        StoreError: The cache cannot be written.
    """
    folder, name = cache_dir / FOLDER, _id(output_dir)
    said = json.dumps({"output_dir": str(output_dir), "recipe": recipe}, ensure_ascii=False) + "\n"
    raw = b"".join(sorted({bytes.fromhex(key) for key in keys}))
    try:
        _replace(folder / f"{name}.json", said.encode("utf-8"))
        _replace(folder / f"{name}-{kind}.keys", raw)
    except OSError as err:
        refusal = system_refusal(err)
        what = f"the cache cannot be written: {refusal.what if refusal else err}"
        fix = refusal.fix if refusal else "see that cache_dir lies on a working disk"
        raise StoreError(what, where=str(folder), fix=fix) from err


def registered(cache_dir: Path) -> Iterator[Registered]:
    """Every output folder that uses the store, by name.

    Raises:
        StoreError: A registration cannot be read, so that nobody knows which entries it needs.
    """
    for path in sorted((cache_dir / FOLDER).glob("*.json")):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            keys = [_keys(file) for file in path.parent.glob(f"{path.stem}-*.keys")]
            yield Registered(Path(said["output_dir"]), said["recipe"], frozenset().union(*keys))
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise StoreError(
                f"a registration in the cache cannot be read: {err}",
                where=str(path),
                fix="run the cache job of the recipe that wrote it again, or delete the file and those with "
                f"its name if that recipe is gone: {path.stem}*",
            ) from err


def forget(cache_dir: Path, output_dir: Path) -> bool:
    """Strike out an output folder, so that entries only it needs become orphans; False if it is unknown."""
    name = _id(output_dir)
    found = list((cache_dir / FOLDER).glob(f"{name}*"))
    for path in found:
        with suppress(FileNotFoundError):
            path.unlink()
    return bool(found)


def note_speed(cache_dir: Path, kind: str, seconds_per_cost: float) -> None:
    """Remember how long encoding took on this machine, for `speed`; losing it costs nothing."""
    with suppress(OSError):
        write_bytes(
            cache_dir / _SPEED_FILE, json.dumps({**_speeds(cache_dir), kind: seconds_per_cost}).encode()
        )


def speed(cache_dir: Path, kind: str) -> float | None:
    """Seconds for one unit of a job's cost when entries of this kind were last encoded; None if never."""
    return _speeds(cache_dir).get(kind)


def _speeds(cache_dir: Path) -> dict[str, float]:
    try:
        return dict(json.loads((cache_dir / _SPEED_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _id(output_dir: Path) -> str:
    return hashlib.sha256(str(output_dir).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _replace(path: Path, data: bytes) -> None:
    with suppress(FileNotFoundError):
        if path.read_bytes() == data:
            return
    write_bytes(path, data)


def _keys(path: Path) -> frozenset[str]:
    raw = path.read_bytes()
    if len(raw) % _KEY_BYTES:
        raise ValueError(f"{path.name} has {len(raw)} bytes, no multiple of {_KEY_BYTES}")
    return frozenset(raw[at : at + _KEY_BYTES].hex() for at in range(0, len(raw), _KEY_BYTES))
