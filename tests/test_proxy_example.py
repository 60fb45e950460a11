"""The example of a reverse proxy: nginx with this file in front of Dagster's own server."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.free_ports import free_port

CONFIGURATION = Path(__file__).resolve().parents[1] / "configs" / "examples" / "deployment" / "nginx.conf"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
SITE = "latentline.example"
MUTATION = "mutation { setNuxSeen }"
BASIC = {"Authorization": "Basic " + b64encode(b"anna:pass").decode()}

pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="needs Debian's package nginx-light"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + 240
    while time.monotonic() < end_s:
        assert process.poll() is None, "the server ended"
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    pytest.fail(f"nothing listens on port {port}")


def without_tls(text: str, folder: Path, *, upstream: int, port: int) -> str:
    """Return the configuration with the test's ports and without TLS; all other lines are unchanged."""
    replaced = {
        "127.0.0.1:3000": f"127.0.0.1:{upstream}",
        "listen 443 ssl": f"listen 127.0.0.1:{port}",
        "    ssl_reject_handshake on;\n": "",
        "    ssl_certificate /etc/nginx/latentline.pem;\n": "",
        "    ssl_certificate_key /etc/nginx/latentline.key;\n": "",
        "/etc/nginx/latentline.users;\n\n": f"{folder}/users;\n\n",
    }
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    return f"pid {folder}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{paths}{text}}}\n"


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """Start Dagster's server and nginx, and provide the ports of both."""
    folder = tmp_path_factory.mktemp("proxy")
    folder.chmod(0o755)
    (folder / "definitions.py").write_text("import dagster as dg\n\ndefs = dg.Definitions()\n")
    (folder / "users").write_text("anna:{PLAIN}pass\n")
    upstream, port = free_port(), free_port()
    text = CONFIGURATION.read_text(encoding="utf-8")
    (folder / "nginx.conf").write_text(without_tls(text, folder, upstream=upstream, port=port))

    environment = {**os.environ, "DAGSTER_HOME": str(folder), "DO_NOT_TRACK": "1"}
    dagster = [sys.executable, "-m", "dagster_webserver", "-f", str(folder / "definitions.py")]
    options = ["-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    servers = [
        subprocess.Popen([*dagster, "-h", "127.0.0.1", "-p", str(upstream)], cwd=folder, env=environment),
        subprocess.Popen([str(NGINX), *options, "-g", "daemon off; master_process off;"]),
    ]
    try:
        wait_for(port, servers[1])
        wait_for(upstream, servers[0])
        yield upstream, port
    finally:
        for server in servers:
            server.terminate()
            server.wait(60)


def request(
    port: int, method: str, path: str, *, host: str = SITE, body: str | None = None, **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with closing(connection):
        connection.request(method, path, body, {"Host": host, **named})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


def test_mutations_by_get_and_foreign_hosts_and_origins_are_refused(ports: tuple[int, int]) -> None:
    upstream, port = ports
    by_get = f"/graphql?query={quote(MUTATION)}"
    body = json.dumps({"query": MUTATION})
    json_headers = {"Content_Type": "application/json"}

    # Without the proxy, each of these is executed.
    assert "setNuxSeen" in request(upstream, "GET", by_get, host="evil.example")[1]
    foreign = request(upstream, "POST", "/graphql", body=body, Origin="https://evil.example", **json_headers)
    assert foreign[0] == 200

    for path in (by_get, by_get.replace("graphql", "graphql/"), by_get.replace("graphql", "%67raphql")):
        assert request(port, "GET", path, **BASIC)[0] == 405
    assert request(port, "GET", by_get, Origin="https://evil.example", **BASIC)[0] == 403
    assert request(port, "GET", "/", host="evil.example", **BASIC)[0] == 421
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}):
        assert request(port, "POST", "/graphql", body=body, **headers, **json_headers, **BASIC)[0] == 403
    socket_headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Origin": "https://evil.example"}
    assert request(port, "GET", "/graphql", **socket_headers, **BASIC)[0] == 403


def test_a_user_with_a_password_can_use_the_site_and_nobody_else(ports: tuple[int, int]) -> None:
    _, port = ports
    body = json.dumps({"query": MUTATION})
    headers = {"Content_Type": "application/json", "Origin": f"https://{SITE}"}
    status, answer = request(port, "POST", "/graphql", body=body, **headers, **BASIC)
    assert (status, json.loads(answer)["data"]) == (200, {"setNuxSeen": True})
    assert request(port, "GET", "/", **BASIC)[0] == 200
    assert request(port, "GET", "/")[0] == 401
    assert request(port, "POST", "/graphql", body=body, **headers)[0] == 401


def test_the_subscription_of_the_user_interface_is_opened(ports: tuple[int, int]) -> None:
    _, port = ports
    key = b64encode(os.urandom(16)).decode()
    lines = [
        "GET /graphql HTTP/1.1",
        f"Host: {SITE}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Origin: https://{SITE}",
        f"Sec-WebSocket-Key: {key}",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Protocol: graphql-ws",
        f"Authorization: {BASIC['Authorization']}",
    ]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 101 ")
