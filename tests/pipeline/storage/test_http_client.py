"""A web server cannot make this machine read another server, wait without end, or use up its memory."""

from __future__ import annotations

import gzip
import threading
import tracemalloc
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pipeline.errors import DatasetError
from pipeline.raw_images.folder import walk_remote
from pipeline.storage.addresses import Url
from pipeline.storage.remote_source import RemoteSource
from tests.pipeline.dataset_folder import Folder, picture

INTERNAL = b"the answer of an internal service"
SECRET = "s3cr3t-query"


@contextmanager
def server(pages: dict[str, bytes | str], encoded: Collection[str] = ()) -> Generator[str]:
    """Serve bytes, and redirects to addresses, by path; the folder /photos/ lists the names below it.

    The paths `encoded` are packed with gzip.
    """
    requested: list[str] = []

    class Pages(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            requested.append(path)
            page = pages.get(path)
            if page is None and path.rstrip("/") == "/photos":
                names = [name.removeprefix("/photos/") for name in pages]
                page = "".join(f'<a href="{name}">{name}</a>' for name in names).encode()
            if page is None:
                self.send_error(404)
                return
            self.send_response(302 if isinstance(page, str) else 200)
            if isinstance(page, str):
                self.send_header("Location", page)
                page = b""
            if path in encoded and self.command == "GET":
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            if self.command == "GET":
                with suppress(ConnectionError):
                    self.wfile.write(page)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serving(Pages) as url:
        yield url


@contextmanager
def serving(pages: type[BaseHTTPRequestHandler]) -> Generator[str]:
    """Run a web server, and yield its address."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), pages)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        running.server_close()


def test_a_caption_that_redirects_to_another_server_is_rejected_with_the_reason(folder: Folder) -> None:
    with server({"/latest/credentials": INTERNAL}) as internal:
        pages: dict[str, bytes | str] = {"/photos/good.png": picture(0), "/photos/good.txt": b"a rose"}
        pages |= {"/photos/bad.png": picture(1), "/photos/bad.txt": f"{internal}/latest/credentials"}
        pages |= {"/photos/moved.png": picture(2), "/photos/moved.txt": "/texts/moved.txt"}
        pages["/texts/moved.txt"] = b"a tulip"
        with server(pages) as outside:
            folder.dataset = {"path": f"{outside}/photos"}
            result = folder.ingest()

    captions = dict(result.table.select("path", "caption").rows())
    assert captions == {"good.png": "a rose", "moved.png": "a tulip"}
    (row,) = result.rejected.to_dicts()
    assert (row["path"], row["reason"]) == ("bad.png", "caption_unreadable")
    assert f"redirects to another server, {internal}, which is not followed" in row["detail"]


def test_an_image_and_a_folder_that_redirect_to_another_server_are_not_read() -> None:
    with server({"/secret.png": INTERNAL}) as internal:
        with server({"/photos/a.png": f"{internal}/secret.png"}) as outside:
            source = RemoteSource(Url(f"{outside}/photos"))
            with pytest.raises(OSError, match="redirects to another server"):
                source.read("a.png")
        with (
            server(dict.fromkeys(["/photos", "/photos/"], f"{internal}/")) as outside,
            pytest.raises(DatasetError, match="redirects to another server"),
        ):
            RemoteSource(Url(f"{outside}/photos")).list_folder("")


def test_the_container_of_an_archive_is_not_read_from_another_server() -> None:
    with (
        server({"/secret.zip": INTERNAL}) as internal,
        server({"/all.zip": f"{internal}/secret.zip"}) as outside,
        pytest.raises(DatasetError) as excinfo,
    ):
        RemoteSource(Url(f"zip://photos::{outside}/all.zip?token={SECRET}")).list_folder("")
    assert SECRET not in str(excinfo.value)


@contextmanager
def misbehaving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Generator[str]:
    """Serve a listing of the file a.png, whose content `answer` sends."""

    class Pages(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            if self.path.endswith("/"):
                page = b'<a href="a.png">a.png</a>'
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)
                return
            with suppress(ConnectionError):
                answer(self)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serving(Pages) as url:
        yield url


def test_an_answer_without_end_is_given_up() -> None:
    sent: list[int] = []

    def endless(page: BaseHTTPRequestHandler) -> None:
        page.send_header("Transfer-Encoding", "chunked")
        page.end_headers()
        while True:
            page.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
            sent.append(0x10000)

    with misbehaving(endless) as url, pytest.raises(OSError, match="sent more than 1,000,000 bytes"):
        RemoteSource(Url(f"{url}/photos"), max_file_bytes=1_000_000).read("a.png")
    assert sum(sent) < 50_000_000


def test_a_server_that_stops_sending_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = threading.Event()

    def silent(page: BaseHTTPRequestHandler) -> None:
        page.send_header("Content-Length", "1000")
        page.end_headers()
        page.wfile.write(b"x")
        page.wfile.flush()
        finished.wait(60)

    monkeypatch.setattr("pipeline.storage.http_client.SILENCE_S", 0.5)
    with misbehaving(silent) as url:
        with pytest.raises(OSError, match="Timeout"):
            RemoteSource(Url(f"{url}/photos")).read("a.png")
        finished.set()


def test_no_message_about_a_source_contains_its_query() -> None:
    with server({"/photos/a.txt": b"a rose"}) as outside:
        source = RemoteSource(Url(f"{outside}/none?token={SECRET}"))
        assert SECRET not in source.where("a.txt") + repr(source)
        with pytest.raises(DatasetError) as excinfo:
            source.list_folder("")
        assert SECRET not in str(excinfo.value)
        with pytest.raises(OSError) as failed:  # noqa: PT011 - the message must not contain something
            source.read("a.txt")
        assert SECRET not in str(failed.value) or isinstance(failed.value, FileNotFoundError)


def test_a_caption_that_unpacks_to_more_than_a_caption_may_have_is_not_unpacked(folder: Folder) -> None:
    packed = gzip.compress(bytes(200_000_000), 1)
    pages: dict[str, bytes | str] = {"/photos/a.png": picture(0), "/photos/a.txt": packed}
    pages |= {"/photos/b.png": picture(1), "/photos/b.txt": b"a rose"}
    with server(pages, encoded={"/photos/a.txt"}) as url:
        folder.dataset = {"path": f"{url}/photos"}
        tracemalloc.start()
        try:
            result = folder.ingest()
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert result.table["caption"].to_list() == ["a rose"]
    (row,) = result.rejected.to_dicts()
    assert (row["path"], row["reason"]) == ("a.png", "caption_unreadable")
    assert "sent more than 1,000,000 bytes" in row["detail"]
    assert peak_bytes < 100_000_000


@pytest.mark.parametrize(
    "location",
    ["http://[bad", "http://host:99999999/", "http://\x80\xff:x@/", "file:///etc/passwd", "//", "a.png"],
)
def test_a_file_with_an_unusable_redirect_rejects_one_sample(folder: Folder, location: str) -> None:
    pages: dict[str, bytes | str] = {"/photos/a.png": location, "/photos/a.txt": b"a"}
    pages |= {"/photos/b.png": picture(1), "/photos/b.txt": b"a rose"}
    with server(pages) as url:
        folder.dataset = {"path": f"{url}/photos"}
        result = folder.ingest()
    assert result.table["path"].to_list() == ["b.png"]
    assert result.rejected["path"].to_list() in ([], ["a.png"])  # rejected by the scan or by validation


def test_a_listed_file_that_does_not_exist_rejects_one_sample(folder: Folder) -> None:
    listing = b'<a href="a.png">a</a><a href="b.png">b</a><a href="b.txt">b</a>'
    with server({"/photos/": listing, "/photos/b.png": picture(1), "/photos/b.txt": b"a rose"}) as url:
        folder.dataset = {"path": f"{url}/photos"}
        assert folder.ingest().table["path"].to_list() == ["b.png"]


@pytest.mark.parametrize("names", [("deeper/",), ("one/", "two/")])
def test_folders_without_end_are_an_error(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    monkeypatch.setattr("pipeline.raw_images.folder.MAX_REMOTE_FOLDERS", 200)
    listing = "".join(f'<a href="{name}">{name}</a>' for name in names).encode()
    with endless_folders(listing) as url, pytest.raises(DatasetError, match="folders more than 64 deep"):
        walk_remote(RemoteSource(Url(f"{url}/photos")))


def test_a_listing_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.storage.remote_source.MAX_LISTING_BYTES", 100_000)
    with (
        endless_folders(b'<a href="a.png">a.png</a>' * 10_000) as url,
        pytest.raises(DatasetError, match="sent more than 100,000 bytes"),
    ):
        walk_remote(RemoteSource(Url(f"{url}/photos")))


@contextmanager
def endless_folders(listing: bytes) -> Generator[str]:
    """Serve the same listing for every folder."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(listing)))
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(listing)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serving(Pages) as url:
        yield url
