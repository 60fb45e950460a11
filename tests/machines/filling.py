"""Many tiny files in a bucket, written by unsigned requests: signing them would take most of the time."""

from __future__ import annotations

import hashlib
import http.client
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import fsspec

NUM_THREADS = 16


def foreign_keys(count: int) -> list[str]:
    """Return the keys of entries that no recipe needs."""
    return [hashlib.sha256(b"foreign %d" % number).hexdigest() for number in range(count)]


def fill(
    gateway_url: str,
    folder: str,
    keys: Sequence[str],
    content: Callable[[str], bytes] = lambda _key: b"tiny",
) -> None:
    """Write a tiny entry of kind `latents` for each key below `s3://<folder>`.

    The bucket becomes writable for everybody.

    Args:
        gateway_url: URL of the S3 server.
        folder: Bucket and folder of the cache.
        keys: Keys of the entries.
        content: Returns the bytes of the entry of a key.
    """
    bucket = folder.partition("/")[0]
    fsspec.filesystem("s3", skip_instance_cache=True).chmod(bucket, "public-read-write")
    host = urlsplit(gateway_url).netloc

    def write(thread: int) -> None:
        connection = http.client.HTTPConnection(host, timeout=60)
        for key in keys[thread::NUM_THREADS]:
            connection.request("PUT", f"/{folder}/latents/{key[:2]}/{key}.safetensors", content(key))
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.reason
        connection.close()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(write, range(NUM_THREADS)))
