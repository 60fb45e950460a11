"""Decode one image in a separate process, which is ended when the image takes too long.

It reads the opened file as its standard input, and prints the result as JSON.
"""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from typing import Any, BinaryIO, NamedTuple

from pipeline.images.decode import DecodeLimits, decoded, decoding_of
from pipeline.images.formats import ImageError
from pipeline.images.geometry import Size
from pipeline.images.pixel_values import pixel_values
from pipeline.processes.limited_process import (
    Limits,
    TooSlowError,
    apply_limits,
    last_error_line,
    run_limited,
)

# The largest images of the default limits take 3 to 10 s.
MAX_CPU_S = 20
"""Processor time after which the process is ended."""

_BACKGROUND = (255, 255, 255)  # any colour: the result does not depend on it


class DecodeResult(NamedTuple):
    """The result of decoding an image.

    Attributes:
        size: Size of the decoded image.
        values: Values by name (`images.pixel_values`).
        decoding: Names of its decoding rules; None if it has none.
    """

    size: Size
    values: dict[str, Any]
    decoding: str | None


def decode_and_measure(content: BinaryIO, limits: DecodeLimits) -> DecodeResult:
    """Decode an open file in this thread.

    Raises:
        ImageError: The image cannot be decoded, or it exceeds the limits.
    """
    rules: list[str] = []
    with decoded(content, _BACKGROUND, limits=limits, rules=rules) as image:
        return DecodeResult(Size(image.height, image.width), pixel_values(image), decoding_of(rules))


def decode_in_process(content: BinaryIO, limits: DecodeLimits, *, max_cpu_s: int = MAX_CPU_S) -> DecodeResult:
    """Decode an open file in a new process, and end it after `max_cpu_s` seconds of processor time.

    The position in the file is undefined afterwards.

    Raises:
        ImageError: See `decode_and_measure`; decoding took too long (`too_slow`) or crashed (`undecodable`).
    """
    try:
        process = run_limited(__name__, {"limits": limits}, content, Limits(max_cpu_s))
    except TooSlowError as err:
        detail = f"decoding it took more than {err} and was stopped"
        fix = "make it smaller or save it as a baseline JPEG, or remove it"
        raise ImageError("too_slow", detail, fix=fix) from err
    if process.returncode != 0:
        raise _failure(process)
    return _result(json.loads(process.stdout))


def _result(answer: dict[str, Any]) -> DecodeResult:
    if "reason" in answer:
        raise ImageError(answer["reason"], answer["detail"], fix=answer["fix"])
    return DecodeResult(Size(*answer["size"]), answer["values"], answer["decoding"])


def _failure(process: subprocess.CompletedProcess[bytes]) -> ImageError:
    """Return the error for a process that ended without a result."""
    status = process.returncode
    if status == -signal.SIGKILL:
        detail = "the system ended the process that decoded it, as it does when memory is used up"
        return ImageError(
            "out_of_memory", detail, fix="make it smaller, or free memory, and start the job again"
        )
    detail = f"the decoder crashed with status {status}: {last_error_line(process) or 'no message'}"
    return ImageError("undecodable", detail, fix="save the image again, or remove it")


def main() -> None:
    """Decode the standard input with the limits in the arguments."""
    arguments = apply_limits()
    content: BinaryIO = sys.stdin.buffer

    # Decoders seek, and bytes from memory arrive through a pipe.
    if not content.seekable():
        content = io.BytesIO(content.read())
    content.seek(0)
    try:
        answer = decode_and_measure(content, DecodeLimits(*arguments["limits"]))._asdict()
    except ImageError as err:
        answer = {"reason": err.reason, "detail": err.detail, "fix": err.fix}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
