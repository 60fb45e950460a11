"""The server of `latentline ui` answers only this machine with the token, and shows what the recipe has."""

from __future__ import annotations

import html
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from pipeline.page.actions import Jobs
from pipeline.page.server import application
from tests.pipeline.page.trained import recipes_of
from tests.waiting import until

PORT, TOKEN = 8765, "a-secret-token"
BASE = f"http://127.0.0.1:{PORT}"

JOB = (
    sys.executable,
    "-c",
    "import sys, time\nprint(*sys.argv[1:], flush=True)\n"
    "try:\n    time.sleep(600 if sys.argv[1] == 'run' else 0)\n"
    "except KeyboardInterrupt:\n    print('a checkpoint', flush=True)",
)
"""A command that waits for Ctrl-C in place of a training."""

PATHS = (
    "/",
    "/page.css",
    "/page.js",
    "/small/",
    "/small/dataset",
    "/small/results",
    "/small/runs",
    "/small/files/reports/dataset/index.html",
    "/small/image/abc",
)
ACTIONS = ("/small/start", "/small/stop", "/small/publish")
"""With `PATHS`, an address of every route."""


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path / "jobs", JOB)


@pytest.fixture
def app(page: Any, jobs: Jobs, tmp_path: Path) -> Any:
    return application(recipes_of(page, tmp_path), jobs, token=TOKEN, port=PORT)


@pytest.fixture
def client(app: Any) -> TestClient:
    """A browser that has opened the address with the token."""
    client = TestClient(app, base_url=BASE, follow_redirects=False)
    response = client.get("/", params={"token": TOKEN})
    assert response.status_code == 303
    assert response.headers["location"] == "/"
    return client


def test_the_list_of_paths_has_every_route(app: Any) -> None:
    routes = [route.path for route in app.routes]
    assert len(routes) == len(PATHS) + len(ACTIONS)
    for route in app.routes:
        assert any(route.path_regex.match(path) for path in (*PATHS, *ACTIONS)), route.path


@pytest.mark.parametrize(
    ("headers", "cookies"),
    [
        pytest.param({}, {}, id="no token"),
        pytest.param({}, {f"latentline-{PORT}": "another"}, id="token of another start"),
        pytest.param({"host": f"evil.example:{PORT}"}, {f"latentline-{PORT}": TOKEN}, id="foreign host"),
        pytest.param({"host": "127.0.0.1:80"}, {f"latentline-{PORT}": TOKEN}, id="other port"),
        pytest.param({"origin": "http://evil.example"}, {f"latentline-{PORT}": TOKEN}, id="foreign origin"),
        pytest.param({"origin": "null"}, {f"latentline-{PORT}": TOKEN}, id="origin of a sandbox"),
    ],
)
def test_every_route_refuses_strangers(app: Any, headers: dict[str, str], cookies: dict[str, str]) -> None:
    client = TestClient(app, base_url=BASE, cookies=cookies)
    for path in PATHS:
        response = client.get(path, headers=headers)
        assert response.status_code == 403, path
        assert "small" not in response.text
    for path in ACTIONS:
        response = client.post(path, headers={"origin": BASE, **headers})
        assert response.status_code == 403, path


def test_the_cookie_is_hidden_from_scripts_and_other_sites(app: Any) -> None:
    client = TestClient(app, base_url=BASE, follow_redirects=False)
    response = client.get("/small/dataset", params={"token": TOKEN, "search": "a b"})
    assert response.headers["location"] == "/small/dataset?search=a+b"
    cookie = response.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


def test_a_redirection_stays_on_this_server(app: Any) -> None:
    client = TestClient(app, base_url=BASE, follow_redirects=False)
    response = client.get(f"{BASE}//evil.example/", params={"token": TOKEN})
    assert response.headers["location"] == "/evil.example/"


def test_pages_forbid_inline_scripts_and_other_hosts(client: TestClient, page: Any) -> None:
    page.ingest()
    page.add_run("aaaa", began_s=1_000_000)
    for path in PATHS:
        response = client.get(path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        if response.headers["content-type"].startswith("text/html"):
            assert "<style" not in response.text
            assert " style=" not in response.text
            assert response.text.count("<script") == response.text.count(
                '<script src="/page.js" defer></script>'
            )


def test_the_training_page_shows_new_steps_and_answers_304_without_them(
    client: TestClient, page: Any
) -> None:
    layout = page.add_run("aaaa", began_s=1_000_000)
    first = client.get("/small/")
    assert "finished" not in first.text
    assert "step 4 of 4" in first.text
    assert client.get("/small/", headers={"If-None-Match": first.headers["etag"]}).status_code == 304
    with layout.metrics.open("a") as file:
        file.write('{"step": 4, "loss": 0.1, "samples": 2, "seconds": 0.5, "learning_rate": 0.001}\n')
    second = client.get("/small/", headers={"If-None-Match": first.headers["etag"]})
    assert "step 5 of 4" in second.text


def test_images_are_found_by_caption_and_paged(
    client: TestClient, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.ingest()
    assert "a red rose" in client.get("/small/dataset?search=RED").text
    assert "a yellow tulip" not in client.get("/small/dataset?search=RED").text
    monkeypatch.setattr("pipeline.page.live.IMAGES_PER_PAGE", 1)
    texts = [client.get(f"/small/dataset?page={number}").text for number in (1, 2)]
    assert ["a yellow tulip" in text for text in texts] == [True, False], "sorted by name"
    assert ["a red rose" in text for text in texts] == [False, True]
    assert "page=2" in texts[0]
    assert "page=3" not in texts[1]
    for number in ("0", "-1", "9" * 30, "x", "²"):
        assert (
            "a yellow tulip" in client.get("/small/dataset", params={"page": number}).text or number[0] == "9"
        )


def test_rejected_images_are_found_by_reason(client: TestClient, page: Any) -> None:
    page.folder.add("empty.png", b"")
    page.folder.add("without.png", page.folder.picture(99), caption=None)
    page.ingest()
    reasons = page.folder.tables.read_rejected()["reason"].to_list()
    assert len(set(reasons)) == 2
    text = client.get("/small/dataset", params={"show": "rejected", "reason": reasons[0]}).text
    assert "<h2>1 image</h2>" in text


def test_a_search_is_shown_as_text(client: TestClient, page: Any) -> None:
    page.ingest()
    text = client.get("/small/dataset", params={"search": '"><script>alert(1)</script>'}).text
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_thumbnails_that_are_not_on_disk_are_drawn_from_the_image(client: TestClient, page: Any) -> None:
    page.ingest()
    thumbnails = page.out / "reports" / "dataset" / "thumbnails"
    [first, _] = thumbnails.iterdir()
    stem = first.stem
    first.unlink()
    assert f"/small/image/{stem}" in client.get("/small/dataset").text
    response = client.get(f"/small/image/{stem}")
    assert response.headers["content-type"] == "image/jpeg"
    assert response.content.startswith(b"\xff\xd8")
    assert client.get("/small/image/" + "0" * 32).status_code == 404


def test_only_pictures_and_lora_files_of_the_outputs_are_served(
    client: TestClient, page: Any, tmp_path: Path
) -> None:
    layout = page.add_run("aaaa", began_s=1_000_000)
    lora = layout.exported / "pytorch_lora_weights.safetensors"
    lora.parent.mkdir()
    lora.write_bytes(b"weights")
    assert client.get("/small/files/runs/aaaa/lora/pytorch_lora_weights.safetensors").content == b"weights"
    large = layout.previews / "step-00000004-00.png"
    Image.effect_noise((600, 600), 80).save(large)
    complete = client.get("/small/files/runs/aaaa/samples/step-00000004-00.png")
    reduced = client.get("/small/files/runs/aaaa/samples/step-00000004-00.png?edge=256")
    assert complete.headers["content-type"] == "image/png"
    assert reduced.headers["content-type"] == "image/jpeg"
    assert len(reduced.content) < 24_000 < len(complete.content)

    outside = tmp_path / "secret.png"
    outside.write_bytes(b"secret")
    (page.out / "reports").mkdir(exist_ok=True)
    (page.out / "reports" / "link.png").symlink_to(outside)
    (page.out / "tables.png").write_bytes(b"secret")
    for name in (
        "reports/link.png",
        "reports/../../secret.png",
        "reports/%2e%2e/%2e%2e/secret.png",
        str(outside),
        "tables.png",
        "runs/aaaa/run.json",
        "runs/aaaa/samples/step-00000004-00.png?edge=9999",
        "reports/a%00.png",
    ):
        assert client.get(f"/small/files/{name}").status_code == 404, name


def test_a_changed_recipe_is_read_again_and_a_broken_one_is_explained(
    client: TestClient, tmp_path: Path
) -> None:
    file = tmp_path / "configs" / "small.yaml"
    assert client.get("/small/").status_code == 200
    file.write_text("datasets: 5\n", "utf-8")
    response = client.get("/small/")
    assert response.status_code == 500
    assert "small is not valid" in response.text
    assert "latentline validate small" in client.get("/").text
    assert client.get("/other/").status_code == 404


def test_runs_are_paged_with_the_difference_to_the_run_before(
    client: TestClient, page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        page.add_run(f"run{number}", began_s=1_000_000 + number, optimizer={"learning_rate": number})
    monkeypatch.setattr("pipeline.page.live.RUNS_PER_PAGE", 2)
    first, second = (client.get(f"/small/runs?page={number}").text for number in (1, 2))
    assert "optimizer.learning_rate 0 -&gt; 1" in first, "the run before is on the next page"
    assert "run0" not in first.replace("run1", "").split("Differs")[0]
    assert 'id="run-run0"' in second


def text_of(client: TestClient, path: str) -> str:
    return html.unescape(client.get(path).text)


def test_no_action_by_get_and_none_without_the_origin_of_this_server(
    client: TestClient, tmp_path: Path
) -> None:
    for path in ACTIONS:
        assert client.get(path).status_code == 405
        assert client.post(path).status_code == 403
        assert client.post(path, headers={"origin": "http://evil.example"}).status_code == 403
        # A token in the address of a form would be an action that a link of another site may start.
        assert client.post(path, params={"token": TOKEN}, headers={"origin": BASE}).status_code == 303
    assert not (tmp_path / "jobs").exists()


def test_a_job_is_started_once_and_stopped_by_a_later_server(
    client: TestClient, jobs: Jobs, page: Any, tmp_path: Path
) -> None:
    origin = {"origin": BASE}
    assert "latentline run small" in text_of(client, "/small/")
    assert client.post("/small/start", headers=origin).headers["location"] == "/small/"
    until(lambda: "run small" in (tmp_path / "jobs" / "small.log").read_text("utf-8"))
    text = text_of(client, "/small/")
    assert "started: latentline run small" in text
    assert "Stop after a checkpoint" in text
    client.post("/small/start", headers=origin)
    assert "the job is running already" in text_of(client, "/small/")

    later = Jobs(tmp_path / "jobs", JOB)
    recipe = page.folder.recipe
    assert later.is_running(recipe)
    assert later.stop(recipe).startswith("stopping")
    until(lambda: not jobs.is_running(recipe))
    assert later.last_lines(recipe) == ["run small", "a checkpoint"]
    assert "no job" in later.stop(recipe)


def test_a_step_is_published_by_the_command_and_its_output_is_shown(client: TestClient) -> None:
    form = {"run": "aaaa", "step": "4"}
    response = client.post("/small/publish", data=form, headers={"origin": BASE})
    assert response.headers["location"] == "/small/runs"
    assert "export small --run aaaa --step 4" in text_of(client, "/small/runs")
    for bad in (
        {"run": "--latest", "step": "4"},
        {"run": "aaaa", "step": "-1"},
        {"run": "../x", "step": "4"},
        {},
    ):
        client.post("/small/publish", data=bad, headers={"origin": BASE})
        assert "run and step must be" in text_of(client, "/small/runs"), bad
