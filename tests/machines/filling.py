"""Many tiny files in a bucket, written by unsigned requests: signing them would take most of the time."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import fsspec

NUM_THREADS = 16


def fill(gateway_url: str, folder: str, keys: Sequence[str]) -> None:
    """Write a tiny entry of kind `latents` for each key below `s3://<folder>`.

    The bucket becomes writable for everybody.
    """
    bucket = folder.partition("/")[0]
    fsspec.filesystem("s3", skip_instance_cache=True).chmod(bucket, "public-read-write")
    host = urlsplit(gateway_url).netloc

    def write(thread: int) -> None:
        connection = http.client.HTTPConnection(host, timeout=60)
        for key in keys[thread::NUM_THREADS]:
            connection.request("PUT", f"/{folder}/latents/{key[:2]}/{key}.safetensors", b"tiny")
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.reason
        connection.close()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(write, range(NUM_THREADS)))
