"""Decode one image in a separate process, which is ended when the image takes too long.

It reads the opened file as its standard input, and prints the result as JSON.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pipeline.images.decode import DecodeLimits, decoded
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Size
from pipeline.validated_dataset.duplicates import perceptual_hash

# Unlike the time of a clock, it does not depend on the load of the machine. The largest images of the default
# limits take 3 to 10 s.
MAX_CPU_S = 20
"""Processor time after which the process is ended."""

MAX_WALL_S = 600
"""Time after which the process is ended, however much of it was spent waiting."""

_BACKGROUND = (255, 255, 255)  # any colour: the result does not depend on it


class DecodeResult(NamedTuple):
    """Size of a decoded image, and its perceptual hash; None if it has a single colour."""

    size: Size
    perceptual_hash: int | None


def decode_and_hash(content: BinaryIO, limits: DecodeLimits) -> DecodeResult:
    """Decode an open file in this thread.

    Raises:
        ImageError: The image cannot be decoded, or it exceeds the limits.
    """
    with decoded(content, _BACKGROUND, limits=limits) as image:
        return DecodeResult(Size(image.height, image.width), perceptual_hash(image))


def decode_in_process(content: BinaryIO, limits: DecodeLimits, *, max_cpu_s: int = MAX_CPU_S) -> DecodeResult:
    """Decode an open file in a new process, and end it after `max_cpu_s` seconds of processor time.

    The position in the file is undefined afterwards.

    Raises:
        ImageError: See `decode_and_hash`, or decoding took too long (`too_slow`) or crashed (`undecodable`).
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    arguments = json.dumps({"limits": limits, "max_cpu_s": max_cpu_s})

    # A file of an address is in memory, and a process cannot inherit it as a descriptor.
    source: dict[str, Any] = (
        {"input": content.getvalue()} if isinstance(content, io.BytesIO) else {"stdin": content}
    )

    # Python cannot end a thread inside a decoder, but the system can end a process. And a decoder that
    # crashes does not take the job with it. With -P, modules in the working folder are not imported.
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", __name__, arguments],
            **source,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            timeout=MAX_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise _too_slow(f"{MAX_WALL_S} s") from err
    if process.returncode == 0:
        return _result(json.loads(process.stdout))
    raise _failure(process.returncode, process.stderr, max_cpu_s)


def _result(answer: dict[str, Any]) -> DecodeResult:
    if "reason" in answer:
        raise ImageError(answer["reason"], answer["detail"], fix=answer["fix"])
    return DecodeResult(Size(*answer["size"]), answer["perceptual_hash"])


def _failure(status: int, errors: bytes, max_cpu_s: int) -> ImageError:
    """Return the error for a process that ended without a result."""
    if status == -signal.SIGXCPU:
        return _too_slow(f"{max_cpu_s} s of processor time")
    if status == -signal.SIGKILL:
        detail = "the system ended the process that decoded it, as it does when memory is used up"
        return ImageError(
            "out_of_memory", detail, fix="make it smaller, or free memory, and start the job again"
        )
    last_line = errors.decode("utf-8", "replace").strip().rpartition("\n")[2][:500]
    detail = f"the decoder crashed with status {status}: {last_line or 'no message'}"
    return ImageError("undecodable", detail, fix="save the image again, or remove it")


def _too_slow(limit: str) -> ImageError:
    detail = f"decoding it took more than {limit} and was stopped"
    return ImageError("too_slow", detail, fix="make it smaller or save it as a baseline JPEG, or remove it")


def main() -> None:
    """Decode the standard input with the limits in the first argument."""
    arguments = json.loads(sys.argv[1])
    soft_s = int(arguments["max_cpu_s"])

    # A decoder that crashes must not leave a core dump of gigabytes. The hard limit is one second later,
    # because reaching it kills with a signal that looks like missing memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (soft_s, soft_s + 1))

    content: BinaryIO = sys.stdin.buffer

    # Decoders seek, and bytes from memory arrive through a pipe.
    if not content.seekable():
        content = io.BytesIO(content.read())
    content.seek(0)
    try:
        size, image_hash = decode_and_hash(content, DecodeLimits(*arguments["limits"]))
        answer = {"size": size, "perceptual_hash": image_hash}
    except ImageError as err:
        answer = {"reason": err.reason, "detail": err.detail, "fix": err.fix}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
