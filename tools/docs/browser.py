"""A headless Chromium, controlled through chromedriver's HTTP interface, and Dagster's GraphQL API."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from pipeline.processes.tree import ProcessTree

PROGRAMS = ("chromium", "chromedriver")

PAGE_TIMEOUTS_MS = {"script": 120_000, "pageLoad": 300_000}
"""WebDriver's time limits, which allow for a busy machine."""

MAX_SCREENSHOT_BYTES = 200_000


def missing() -> list[str]:
    """Return the programs that are not installed; Debian has them in chromium and chromium-driver."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def request(
    url: str, body: dict[str, Any] | None = None, *, method: str | None = None, timeout_s: float = 180.0
) -> Any:
    """Return the JSON response to a GET, to a POST of `body`, or to another HTTP method.

    Raises:
        ConnectionError: The server responds with an error status.
        OSError: Nothing listens at the address.
    """
    data = None if body is None else json.dumps(body).encode("utf-8")
    headers = {"Content-Type": "application/json"}
    # The addresses belong to local servers, which this module's callers started.
    http_request = urllib.request.Request(url, data=data, headers=headers, method=method)  # noqa: S310
    try:
        with urllib.request.urlopen(http_request, timeout=timeout_s) as response:  # noqa: S310
            return json.loads(response.read())
    except urllib.error.HTTPError as err:
        raise ConnectionError(f"{url}: {err.read().decode('utf-8', 'replace')[:2000]}") from err


def responds(url: str) -> bool:
    """Return whether a server listens at the address."""
    try:
        request(url, timeout_s=2.0)
    except OSError:
        return False
    return True


class Browser:
    """One tab of the browser."""

    def __init__(self, session: str) -> None:
        self._session = session

    @property
    def session(self) -> str:
        """Address of the WebDriver session, for commands that this class lacks."""
        return self._session

    def open(self, url: str) -> None:
        """Open a page."""
        request(f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Return the result of a JavaScript function body."""
        return request(f"{self._session}/execute/sync", {"script": script, "args": []})["value"]

    def text(self) -> str:
        """Return the visible text of the page."""
        return str(self.run("return document.body.innerText"))

    def wait_for(self, *texts: str, seconds: float = 60.0) -> None:
        """Wait until the page shows all `texts`.

        Raises:
            TimeoutError: It does not within `seconds`.
        """
        end = time.monotonic() + seconds
        while not all(text in self.text() for text in texts):
            if time.monotonic() > end:
                raise TimeoutError(f"the page does not show all of {texts}:\n{self.text()[:3000]}")
            time.sleep(0.3)

    def pictures(self) -> list[list[int]]:
        """Return width and height of each picture in the visible metadata; 0 for a broken one."""
        return self.run(
            "return [...document.images].filter(i => i.src.startsWith('data:image/'))"
            ".map(i => [i.naturalWidth, i.naturalHeight])"
        )

    def links(self) -> list[str]:
        """Return the addresses of all links of the page."""
        return self.run("return [...document.links].map(link => link.href)")

    def click(self, text: str, *, row: str = "") -> None:
        """Click on the first element that contains only `text`.

        Args:
            text: Text of the element, for example of a button.
            row: Text in the table row of the element. By default it may be anywhere on the page.

        Raises:
            LookupError: The page has no such element.
        """
        clicked = self.run(
            f"const [text, row] = [{json.dumps(text)}, {json.dumps(row)}];"
            "const inRow = e => !row || [...(e.closest('tr')?.querySelectorAll('*') ?? [])]"
            ".some(other => !other.children.length && other.textContent.trim() === row);"
            "const one = [...document.querySelectorAll('*')]"
            ".find(e => !e.children.length && e.textContent.trim() === text && inRow(e));"
            "if (one) one.click(); return Boolean(one);"
        )
        if not clicked:
            raise LookupError(f"the page does not show {text!r}")

    def fill(self, selector: str, text: str) -> None:
        """Type a text into the first field that matches a CSS selector, in place of its content."""
        found = request(f"{self._session}/element", {"using": "css selector", "value": selector})["value"]
        address = f"{self._session}/element/{next(iter(found.values()))}"
        request(f"{address}/clear", {})
        request(f"{address}/value", {"text": text})

    def emulate(self, *, scheme: str, width: int, height: int = 900) -> None:
        """Choose a light or dark scheme and the size of the window."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        for command, values in (
            ("Emulation.setEmulatedMedia", {"features": [feature]}),
            ("Emulation.setDeviceMetricsOverride", size),
        ):
            request(f"{self._session}/goog/cdp/execute", {"cmd": command, "params": values})

    def screenshot(self, file: Path) -> None:
        """Save the window as a PNG of at most `MAX_SCREENSHOT_BYTES`, with as many colours as fit."""
        time.sleep(1.0)  # animations
        data = base64.b64decode(request(f"{self._session}/screenshot")["value"])
        window = Image.open(io.BytesIO(data)).convert("RGB")
        file.parent.mkdir(parents=True, exist_ok=True)
        for colours in (256, 128, 64, 32, 16):
            window.quantize(colours).save(file, optimize=True)
            if file.stat().st_size <= MAX_SCREENSHOT_BYTES:
                return


@contextmanager
def browsing(folder: Path, *, size: tuple[int, int] = (1440, 900)) -> Generator[Browser]:
    """Provide a browser with a new profile in `folder`."""
    port = free_port()
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    base = f"http://127.0.0.1:{port}"
    arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    arguments += [
        "--no-sandbox",
        f"--window-size={size[0]},{size[1]}",
        f"--user-data-dir={folder / 'profile'}",
    ]
    options = {"goog:chromeOptions": {"args": arguments}, "timeouts": PAGE_TIMEOUTS_MS}
    try:
        end = time.monotonic() + 30
        while not responds(f"{base}/status"):
            assert time.monotonic() < end, "chromedriver does not respond"
            time.sleep(0.1)
        value = request(f"{base}/session", {"capabilities": {"alwaysMatch": options}})["value"]
        session = f"{base}/session/{value['sessionId']}"
        try:
            yield Browser(session)
        finally:
            request(session, method="DELETE")
    finally:
        ProcessTree(driver.pid).stop(grace_s=5)  # in a background job, chromedriver survives SIGTERM
        driver.wait()


LAUNCH_ASSETS = """
mutation($keys: [AssetKeyInput!]!) {
  launchRun(executionParams: {
    selector: {repositoryLocationName: "latentline", repositoryName: "__repository__",
               jobName: "__ASSET_JOB", assetSelection: $keys, assetCheckSelection: []},
    runConfigData: {}
  }) { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } }
}
"""

TERMINATE = "mutation($run: String!) { terminateRun(runId: $run) { __typename } }"

LAUNCH = """
mutation($job: String!, $config: RunConfigData) {
  launchRun(executionParams: {
    selector: {repositoryLocationName: "latentline", repositoryName: "__repository__", jobName: $job},
    runConfigData: $config
  }) { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
       ... on RunConfigValidationInvalid { errors { message } } }
}
"""

AGAIN = """
mutation($run: String!) {
  launchRunReexecution(reexecutionParams: {parentRunId: $run, strategy: FROM_FAILURE}) {
    __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  }
}
"""

STATUS = "query($run: ID!) { runOrError(runId: $run) { ... on Run { status } } }"


def graphql(url: str, query: str, **variables: Any) -> dict[str, Any]:
    """Return the data of a response of Dagster's GraphQL API."""
    response = request(f"{url}/graphql", {"query": query, "variables": variables})
    assert "errors" not in response, response["errors"]
    return response["data"]


def launch(url: str, job: str, config: dict[str, Any] | None = None) -> str:
    """Start a job as the UI's launchpad does, and return the run's id."""
    result = graphql(url, LAUNCH, job=job, config=config or {})["launchRun"]
    assert result["__typename"] == "LaunchRunSuccess", result
    return str(result["run"]["runId"])


def launch_assets(url: str, *keys: str) -> str:
    """Materialize assets, or observe source assets, as the UI's button does, and return the run's id."""
    paths = [{"path": key.split("/")} for key in keys]
    result = graphql(url, LAUNCH_ASSETS, keys=paths)["launchRun"]
    assert result["__typename"] == "LaunchRunSuccess", result
    return str(result["run"]["runId"])


def launch_from_failure(url: str, run: str) -> str:
    """Re-execute a run from its failure, as the UI's menu does, and return the new run's id."""
    result = graphql(url, AGAIN, run=run)["launchRunReexecution"]
    assert result["__typename"] == "LaunchRunSuccess", result
    return str(result["run"]["runId"])


def terminate(url: str, run: str) -> None:
    """Stop a run as the UI's button does."""
    graphql(url, TERMINATE, run=run)


def ended(url: str, run: str) -> str | None:
    """Return the final status of the run, or None while it runs."""
    status = graphql(url, STATUS, run=run)["runOrError"]["status"]
    return status if status in {"SUCCESS", "FAILURE", "CANCELED"} else None


NEWEST = """
{ runsOrError(limit: 1) { ... on Runs { results {
  jobName status assetMaterializations { __typename } assetCheckSelection { name }
} } } }"""


def newest_run(url: str) -> dict[str, Any]:
    """Return the job, status, materializations and selected checks of the newest run."""
    return graphql(url, NEWEST)["runsOrError"]["results"][0]
