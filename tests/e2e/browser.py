"""Chromium without a window, driven through chromedriver's own HTTP interface; and Dagster's GraphQL."""

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

PROGRAMS = ("chromium", "chromedriver")


def missing() -> list[str]:
    """Programs that are not installed; Debian's packages are chromium and chromium-driver."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def request(url: str, body: dict[str, Any] | None = None, *, timeout_s: float = 60.0) -> Any:
    """The JSON answer to a GET, or to a POST of `body`."""
    data = None if body is None else json.dumps(body).encode("utf-8")
    sent = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(sent, timeout=timeout_s) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as err:
        raise AssertionError(f"{url}: {err.read().decode('utf-8', 'replace')[:2000]}") from err


def answers(url: str) -> bool:
    """Whether a server listens there."""
    try:
        request(url, timeout_s=2.0)
    except (OSError, AssertionError):
        return False
    return True


class Browser:
    """One tab."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        request(f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """What a JavaScript function body returns."""
        return request(f"{self._session}/execute/sync", {"script": script, "args": []})["value"]

    def text(self) -> str:
        """What the page shows."""
        return str(self.run("return document.body.innerText"))

    def wait_for(self, *texts: str, seconds: float = 60.0) -> None:
        """Return when the page shows all `texts`."""
        end = time.monotonic() + seconds
        while not all(text in self.text() for text in texts):
            if time.monotonic() > end:
                raise AssertionError(f"{texts} do not all stand on the page:\n{self.text()[:3000]}")
            time.sleep(0.3)

    def pictures(self) -> list[list[int]]:
        """Width and height of each decoded picture that stands in the metadata shown; 0 for a broken one."""
        return self.run(
            "return [...document.images].filter(i => i.src.startsWith('data:image/'))"
            ".map(i => [i.naturalWidth, i.naturalHeight])"
        )

    def click(self, text: str) -> None:
        """Click on the first element that holds just `text`."""
        found = self.run(
            "const all = [...document.querySelectorAll('*')];"
            f"const one = all.find(e => !e.children.length && e.textContent.trim() === {json.dumps(text)});"
            "if (one) one.click(); return Boolean(one);"
        )
        assert found, f"{text!r} does not stand on the page"

    def screenshot(self, file: Path) -> None:
        """The window as a PNG of 256 colours."""
        time.sleep(1.0)  # animations
        data = base64.b64decode(request(f"{self._session}/screenshot")["value"])
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.open(io.BytesIO(data)).convert("RGB").quantize(256).save(file, optimize=True)


@contextmanager
def browsing(folder: Path, *, size: tuple[int, int] = (1440, 900)) -> Generator[Browser]:
    """A browser with a profile of its own in `folder`."""
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
    options = {"goog:chromeOptions": {"args": arguments}}
    try:
        end = time.monotonic() + 30
        while not answers(f"{base}/status"):
            assert time.monotonic() < end, "chromedriver does not answer"
            time.sleep(0.1)
        made = request(f"{base}/session", {"capabilities": {"alwaysMatch": options}})["value"]
        session = f"{base}/session/{made['sessionId']}"
        try:
            yield Browser(session)
        finally:
            urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=20).close()
    finally:
        driver.terminate()
        driver.wait(timeout=20)


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
    answer = request(f"{url}/graphql", {"query": query, "variables": variables})
    assert "errors" not in answer, answer["errors"]
    return answer["data"]


def launch(url: str, job: str, config: dict[str, Any] | None = None) -> str:
    """Start a job as the UI's launchpad does; the run's id."""
    answer = graphql(url, LAUNCH, job=job, config=config or {})["launchRun"]
    assert answer["__typename"] == "LaunchRunSuccess", answer
    return str(answer["run"]["runId"])


def launch_from_failure(url: str, run: str) -> str:
    """Start a run again where it failed, as the UI's menu does; the new run's id."""
    answer = graphql(url, AGAIN, run=run)["launchRunReexecution"]
    assert answer["__typename"] == "LaunchRunSuccess", answer
    return str(answer["run"]["runId"])


def ended(url: str, run: str) -> str | None:
    """How the run ended, if it has."""
    status = graphql(url, STATUS, run=run)["runOrError"]["status"]
    return status if status in {"SUCCESS", "FAILURE", "CANCELED"} else None


NEWEST = """
{ runsOrError(limit: 1) { ... on Runs { results {
  jobName status assetMaterializations { __typename } assetCheckSelection { name }
} } } }"""


def newest_run(url: str) -> dict[str, Any]:
    """The run that was started last: its job, status, materializations, and the checks it was asked for."""
    return graphql(url, NEWEST)["runsOrError"]["results"][0]
