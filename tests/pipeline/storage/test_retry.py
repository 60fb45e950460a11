"""Requests to a service that is away for a short time, with a real S3 server that stops and starts again."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable

import fsspec
import httpx2
import pytest
from aiohttp import ClientPayloadError, ServerDisconnectedError
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError
from huggingface_hub.errors import HfHubHTTPError

from pipeline.storage import retry as module
from pipeline.storage.addresses import Url
from pipeline.storage.remote_folder import RemoteFolder
from pipeline.storage.retry import is_failed_precondition, is_transient, retry
from tests.remote_folders import S3_ENVIRONMENT, StoppableS3Server


def response(status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


def hub_error(status: int) -> HfHubHTTPError:
    request = httpx2.Request("GET", "http://127.0.0.1/api/datasets/anna/flowers")
    return HfHubHTTPError(f"status {status}", response=httpx2.Response(status, request=request))


def caused(err: Exception, cause: Exception) -> Exception:
    err.__cause__ = cause
    return err


TRANSIENT = [
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError(),
    EndpointConnectionError(endpoint_url="http://127.0.0.1:1"),
    ReadTimeoutError(endpoint_url="http://127.0.0.1:1"),
    ServerDisconnectedError(),
    httpx2.ConnectError("refused"),
    httpx2.ReadTimeout("silent"),
    httpx2.PoolTimeout("busy"),
    httpx2.RemoteProtocolError("disconnected"),
    hub_error(429),
    hub_error(503),
    ClientPayloadError(),
    caused(OSError(errno.EBUSY, "busy"), response(503, "SlowDown")),
    caused(OSError(errno.EIO, "internal"), response(500, "InternalError")),
]

PERMANENT = [
    FileNotFoundError(errno.ENOENT, "missing"),
    PermissionError(errno.EACCES, "refused"),
    OSError(errno.ENOSPC, "full"),
    NoCredentialsError(),
    ValueError("an error of the caller"),
    hub_error(401),
    hub_error(404),
    httpx2.UnsupportedProtocol("not HTTP"),
    httpx2.LocalProtocolError("an error of the caller"),
    caused(OSError(errno.EINVAL, "exists"), response(412, "PreconditionFailed")),
    caused(EndpointConnectionError(endpoint_url="http://no.host"), socket.gaierror(-2, "unknown name")),
]


@pytest.mark.parametrize("err", TRANSIENT, ids=repr)
def test_a_broken_connection_and_an_overloaded_server_are_transient(err: Exception) -> None:
    assert is_transient(err)
    assert not is_failed_precondition(err)


@pytest.mark.parametrize("err", PERMANENT, ids=repr)
def test_an_answer_of_the_server_and_a_wrong_host_name_are_not_transient(err: Exception) -> None:
    assert not is_transient(err)


def test_a_circular_chain_of_errors_ends() -> None:
    first, second, third = OSError("first"), OSError("second"), OSError("third")
    first.__context__, second.__context__, third.__context__ = second, third, second
    assert not is_transient(first)


def test_an_address_with_an_unknown_host_fails_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL_S3": "http://no-such-host.invalid"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    start = time.monotonic()
    with pytest.raises(OSError, match="Could not connect"):
        RemoteFolder(Url("s3://restarts/cache")).read("a")
    assert time.monotonic() - start < module.RETRY_S / 2


def test_only_a_status_412_is_a_failed_precondition() -> None:
    assert is_failed_precondition(caused(OSError(errno.EINVAL, "x"), response(412, "PreconditionFailed")))
    assert not is_failed_precondition(caused(OSError(errno.EINVAL, "x"), response(400, "InvalidArgument")))


def failing(times: int, err: Exception) -> Callable[[], int]:
    """Return a request that fails `times` times and then answers with the number of the attempt."""
    attempts: list[int] = []

    def send() -> int:
        attempts.append(len(attempts) + 1)
        if len(attempts) <= times:
            raise err
        return attempts[-1]

    return send


def test_a_transient_error_is_retried_and_a_permanent_one_is_not() -> None:
    assert retry(failing(2, ConnectionResetError())) == 3
    with pytest.raises(FileNotFoundError):
        retry(failing(1, FileNotFoundError()))


def test_the_attempts_end_with_the_services_error_after_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 1.0)
    send = failing(3, ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        retry(send)  # after waits of up to 0.25 and 0.5 s, another of up to 1 s would end too late


def test_O13_every_request_waits_for_an_s3_server_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    server = StoppableS3Server()
    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL_S3": server.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the library's own attempts would hide those of the project
    server.start()
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("restarts")
    folder = RemoteFolder(Url("s3://restarts/cache"))
    folder.put("a", b"first")
    folder.put("b", b"second")

    requests: list[Callable[[], object]] = [
        lambda: folder.read("a"),
        lambda: folder.info("a")["size"],
        lambda: sorted(folder.list_files()),
        lambda: folder.put_if_absent("a", b"other"),
        lambda: folder.put("c", b"third"),
        lambda: folder.remove("b"),
    ]
    answers: dict[int, object] = {}
    server.stop()
    threads = [
        threading.Thread(target=lambda n=number, send=send: answers.update({n: send()}))
        for number, send in enumerate(requests)
    ]
    for thread in threads:
        thread.start()
    time.sleep(2)
    assert answers == {}, "no request has an answer or an error while the server is away"

    server.start()
    try:
        for thread in threads:
            thread.join(30)
        assert answers[0] == b"first"
        assert answers[1] == 5
        assert {"a"} <= set(answers[2]) <= {"a", "b", "c"}
        assert answers[3] is False
        assert sorted(folder.list_files()) == ["a", "c"]
    finally:
        server.stop()
