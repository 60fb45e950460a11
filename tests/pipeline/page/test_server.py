"""The server of `latentline ui` answers only this machine with the token, and shows what the recipe has."""

from __future__ import annotations

import html
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from pipeline.page.actions import DRAW, Jobs
from pipeline.page.server import application
from pipeline.reporting.reports import write_report
from pipeline.storage.atomic import write_text
from pipeline.trained_lora.run_folder import RunLayout, hold_training
from tests.pipeline.page.trained import add_drawing, recipes_of
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

VALUES = {"recipe": "small", "name": "reports/dataset/index.html", "stem": "abc"}
"""A value for each part of the routes."""


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


def paths(app: Any, method: str) -> list[str]:
    """Return an address of every route with this method, from the application's own list."""
    found = [
        re.sub(r"{(\w+)(:path)?}", lambda part: VALUES[part[1]], route.path)
        for route in app.routes
        if method in route.methods
    ]
    assert len(found) >= 5
    return found


def test_every_route_is_tested(app: Any) -> None:
    assert len(paths(app, "GET")) + len(paths(app, "POST")) == len(app.routes)


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
    for path in paths(app, "GET"):
        response = client.get(path, headers=headers)
        assert response.status_code == 403, path
        assert "small" not in response.text
    for path in paths(app, "POST"):
        response = client.post(path, headers={"origin": BASE, **headers})
        assert response.status_code == 403, path


def test_behind_a_reverse_proxy_its_name_is_accepted_and_no_other(
    page: Any, jobs: Jobs, tmp_path: Path
) -> None:
    url = "https://training.example"
    app = application(recipes_of(page, tmp_path), jobs, token=TOKEN, port=PORT, public_url=url)
    client = TestClient(app, base_url=url, follow_redirects=False)
    response = client.get("/small/", params={"token": TOKEN})
    assert "secure" in response.headers["set-cookie"].lower()
    assert client.get("/small/").status_code == 200
    assert client.post("/small/stop", headers={"origin": url}).status_code == 303
    for headers in ({"origin": "http://training.example"}, {"origin": url, "host": "other.example"}):
        assert client.post("/small/stop", headers=headers).status_code == 403, headers


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


def test_pages_forbid_inline_scripts_and_other_hosts(app: Any, client: TestClient, page: Any) -> None:
    page.ingest()
    page.add_run("aaaa", began_s=1_000_000)
    for path in (*paths(app, "GET"), "/small/sample?id=d/rose.png"):
        response = client.get(path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        if response.headers["content-type"].startswith("text/html"):
            assert "<style" not in response.text
            assert " style=" not in response.text
            scripts = re.findall(r"<script[^>]*>[^<]*", response.text)
            assert set(scripts) <= {f'<script src="/{name}.js" defer>' for name in ("page", "viewer")}


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
    assert "<script>" not in text
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
    app: Any, client: TestClient, tmp_path: Path
) -> None:
    for path in paths(app, "POST"):
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


def saved_run(page: Any) -> RunLayout:
    layout = page.add_run("aaaa", began_s=1_000_000)
    for step in (2, 4):
        write_text(layout.checkpoints / f"step-{step:08d}" / "lora.json", "{}")
    return layout


def test_a_prompt_is_drawn_with_a_saved_step_and_its_picture_appears(
    client: TestClient, jobs: Jobs, page: Any
) -> None:
    saved_run(page)
    origin = {"origin": BASE}
    prompt = '--lora=x; $(touch y) <b>\r\na "rose"\0'
    form = {"run": "aaaa", "step": "", "prompt": prompt, "strength": "0.5", "seed": ""}
    assert client.post("/small/draw", data=form, headers=origin).headers["location"] == "/small/#drawings"
    text = text_of(client, "/small/")
    assert "started: latentline sample small --run aaaa --step 4" in text
    until(lambda: not jobs.is_running(page.folder.recipe, DRAW))
    printed = "\n".join(jobs.last_lines(page.folder.recipe, DRAW)).replace("\r", "")
    assert (
        printed
        == 'sample small --run aaaa --step 4 --prompt=--lora=x; $(touch y) <b>\na "rose" --strength=0.5'
    )

    for number, name in enumerate(("001", "002")):
        add_drawing(page, name, f"prompt {number}")
    text = text_of(client, "/small/")
    assert text.index("prompt 1</p>") < text.index("prompt 0</p>"), "the newest first"
    assert "step 4, strength 0.5" in text
    assert "started" not in text, "a notice is shown once"


@pytest.mark.parametrize(
    "form",
    [
        pytest.param({"run": "--x", "step": "4"}, id="no run"),
        pytest.param({"run": "../aaaa", "step": "4"}, id="a path"),
        pytest.param({"run": "aaaa", "step": "3"}, id="a step that is not saved"),
        pytest.param({"run": "aaaa", "step": "4", "prompt": " "}, id="no prompt"),
        pytest.param({"run": "aaaa", "step": "4", "prompt": "x" * 10_001}, id="a long prompt"),
    ],
)
def test_a_drawing_that_cannot_be_is_refused(
    client: TestClient, page: Any, tmp_path: Path, form: dict[str, str]
) -> None:
    saved_run(page)
    client.post("/small/draw", data={"prompt": "a rose", **form}, headers={"origin": BASE})
    assert " must " in text_of(client, "/small/")
    assert not (tmp_path / "jobs").exists()


def test_a_caption_is_edited_and_restored_outside_the_dataset(client: TestClient, page: Any) -> None:
    page.ingest()
    sample = "/small/sample?id=d%2Frose.png"
    assert ">a red rose</textarea>" in client.get(sample).text
    assert 'href="/small/sample?id=d%2Frose.png"' in client.get("/small/dataset").text
    hostile = "--restore </textarea><script>alert(1)</script>\r\n$(touch x)"
    form = {"id": "d/rose.png", "text": ["", hostile, "another"], "do": "save"}
    response = client.post("/small/caption", data=form, headers={"origin": BASE})
    assert response.headers["location"] == sample
    text = client.get(sample).text
    assert "<script>" not in text
    text = html.unescape(text)
    assert "latentline edit-caption small -- d/rose.png '--restore </textarea><script>" in text
    assert "the next job uses it" in text
    file = page.out / "captions" / "d" / "rose.png.txt"
    assert file.read_text("utf-8").split("\n\n")[1] == "another\n"
    assert (page.folder.root / "rose.txt").read_text("utf-8") == "a red rose"

    page.ingest()
    assert "edited caption" in client.get("/small/dataset?search=another").text
    assert "the next job uses it" not in client.get(sample).text
    client.post("/small/caption", data={"id": "d/rose.png", "do": "restore"}, headers={"origin": BASE})
    assert "--restore d/rose.png" in client.get(sample).text
    assert not file.exists()


@pytest.mark.parametrize("sample_id", ["", "d/gone.png", "../secret", "d/../../x", "d/rose.png\0"])
def test_captions_of_no_image_are_not_written(client: TestClient, page: Any, sample_id: str) -> None:
    page.ingest()
    form = {"id": sample_id, "text": "x"}
    client.post("/small/caption", data=form, headers={"origin": BASE})
    assert "no stage has seen the image" in text_of(client, "/small/")
    assert not (page.out / "captions").exists()
    assert client.get("/small/sample", params={"id": sample_id}).status_code == 404
    assert client.get("/small/picture", params={"id": sample_id, "part": "image"}).status_code == 404


def test_a_large_form_is_refused_instead_of_cut(client: TestClient, page: Any) -> None:
    page.ingest()
    form = {"id": "d/rose.png", "text": "x" * 1_600_000}
    assert client.post("/small/caption", data=form, headers={"origin": BASE}).status_code == 413


def test_an_image_without_a_caption_gets_one(client: TestClient, page: Any) -> None:
    page.folder.add("without.png", page.folder.picture(99), caption=None)
    page.ingest()
    text = client.get("/small/sample?id=d/without.png").text
    assert "caption_missing" in text
    form = {"id": "d/without.png", "text": "written on the page"}
    client.post("/small/caption", data=form, headers={"origin": BASE})
    page.ingest()
    assert "written on the page" in client.get("/small/dataset").text


def test_the_page_of_an_image_shows_crop_mask_and_reference(
    client: TestClient, page: Any, tmp_path: Path
) -> None:
    sides = {name: tmp_path / name for name in ("masks", "before")}
    for name, folder in sides.items():
        folder.mkdir()
        Image.new("L" if name == "masks" else "RGB", (90, 24), 200).save(folder / "wide.png")
    for file in page.folder.root.rglob("*.*"):
        file.unlink()
    page.folder.add("wide.png", page.folder.picture(5, 24, 90), caption="wide")
    section = {"mask": {"path": str(sides["masks"])}, "references": [{"path": str(sides["before"])}]}
    page.folder.dataset.update(section)
    file = tmp_path / "configs" / "small.yaml"
    values = json.loads(file.read_text("utf-8"))
    values["datasets"][0].update(section)
    file.write_text(json.dumps(values), "utf-8")
    page.ingest()

    text = client.get("/small/sample?id=d/wide.png").text
    assert '<svg class="crop"' in text
    pictures = re.findall(r'src="([^"]*picture[^"]*)"', html.unescape(text))
    assert [re.search(r"part=([\w-]+)", each)[1] for each in pictures] == ["image", "mask", "reference-0"]
    for each in pictures:
        response = client.get(each)
        assert response.headers["content-type"] == "image/jpeg", each
        assert Image.open(io.BytesIO(response.content)).width > 80
    for part in ("reference-1", "reference-x", "reference--1", "other", ""):
        assert client.get("/small/picture", params={"id": "d/wide.png", "part": part}).status_code == 404
    assert "crop keeps" in client.get("/small/dataset").text


def test_the_recipe_is_shown_as_text_without_passwords(client: TestClient, tmp_path: Path) -> None:
    file = tmp_path / "configs" / "small.yaml"
    file.write_text(file.read_text("utf-8") + "\n# https://anna:secret@host/ <script>\n", "utf-8")
    text = client.get("/small/recipe").text
    assert "output_dir" in text
    assert "secret@" not in text
    assert "<script>" not in text


def test_a_dataset_that_no_job_has_read_names_the_job_that_reads_it(client: TestClient, page: Any) -> None:
    assert "latentline run small, reads them first" in words_of(client, "/small/dataset")
    page.ingest()
    assert "reads them first" not in words_of(client, "/small/dataset")


def test_the_list_of_kept_images_leads_to_the_rejected_ones(client: TestClient, page: Any) -> None:
    page.ingest()
    assert "show=rejected" not in client.get("/small/dataset").text
    page.folder.add("empty.png", b"")
    page.ingest()
    assert "1 image rejected: show reason and fix" in words_of(client, "/small/dataset")
    assert '<a href="?show=rejected">' in client.get("/small/dataset").text


def test_the_dataset_shows_a_caption_that_the_next_job_will_use(client: TestClient, page: Any) -> None:
    page.ingest()
    form = {"id": "d/rose.png", "text": "a rose in the rain", "do": "save"}
    client.post("/small/caption", data=form, headers={"origin": BASE})
    assert words_of(client, "/small/sample?id=d/rose.png").count("saved: latentline edit-caption small") == 1
    words = words_of(client, "/small/dataset")
    assert "a rose in the rain Edited: the next job uses this caption." in words
    assert "a red rose" not in words
    assert words.count("Edited:") == 1
    page.ingest()
    assert "Edited:" not in words_of(client, "/small/dataset")

    client.post("/small/caption", data={**form, "do": "restore"}, headers={"origin": BASE})
    assert "Restored: the next job uses the caption of the dataset." in words_of(client, "/small/dataset")
    (page.out / "captions" / "d").mkdir(parents=True)
    (page.out / "captions" / "d" / "rose.png.txt").write_bytes(b"\xff\xfe\x00")
    assert "a yellow tulip" in words_of(client, "/small/dataset"), "a damaged edit hides nothing"


def test_a_run_resumes_until_the_recipe_or_a_caption_has_changed(
    client: TestClient, page: Any, tmp_path: Path
) -> None:
    page.ingest()
    layout = page.add_run("aaaa", began_s=2_000_000_000)
    words = words_of(client, "/small/")
    assert "Run aaaa: stopped, step 4 of 4." in words
    assert " Resume latentline run small " in words
    assert "Changed since" not in words
    assert "otherwise it trains a new run from step 0" in words

    recipe = tmp_path / "configs" / "small.yaml"
    client.post("/small/caption", data={"id": "d/rose.png", "text": "a"}, headers={"origin": BASE})
    caption = page.out / "captions" / "d" / "rose.png.txt"
    for file, change in ((recipe, "recipe"), (caption, "1 edited caption")):
        os.utime(layout.facts, (1_000_000, 1_000_000))
        for each in (recipe, caption):
            os.utime(each, (1_000_000 + (each == file), 1_000_000 + (each == file)))
        words = words_of(client, "/small/")
        assert f"Changed since this run began: {change}." in words
        assert " Start latentline run small " in words


def test_the_steps_of_a_training_are_next_to_its_button_and_in_its_stage(
    client: TestClient, page: Any
) -> None:
    write_report(page.out, "trained_lora", {"steps": 9})
    layout = page.add_run("aaaa", began_s=1_000_000)
    with hold_training(layout):
        text = client.get("/small/").text
        words = words_of(client, "/small/")
    job, rest = text.split('<section id="stages"')
    assert "training, step 4 of 4" in job
    assert '<progress class="wide" max="4" value="4"' in job
    assert "<progress" not in rest
    assert "trained_lora training step 4 of 4" in words, "and not the 9 steps of the run before"
    write_text(layout.finished, "{}")
    assert "Run aaaa: finished after 4 steps." in words_of(client, "/small/")


def test_a_job_that_does_not_train_yet_is_no_invitation_to_start_it(
    client: TestClient, jobs: Jobs, page: Any
) -> None:
    assert "No run has begun. latentline run small starts one." in words_of(client, "/small/")
    jobs.start(page.folder.recipe)
    try:
        words = words_of(client, "/small/")
        assert "The job is running." in words
        assert "The job trains after the other stages." in words
        assert "No run has begun" not in words
    finally:
        jobs.stop(page.folder.recipe)
    until(lambda: not jobs.is_running(page.folder.recipe))


def test_downloads_are_named_after_run_and_step(client: TestClient, page: Any) -> None:
    layout = saved_run(page)
    folders = [layout.exported, *(layout.checkpoints / f"step-{step:08d}" for step in (2, 4))]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "small_comfyui.safetensors").write_bytes(b"weights")
    names = re.findall(r'download="([^"]+)"', client.get("/small/runs").text)
    assert names == [f"small_comfyui_aaaa_{part}.safetensors" for part in ("end", "step4", "step2")]
    words = words_of(client, "/small/runs")
    assert "Download the LoRA of 2 steps" in words, "the end of the run is the last one"
    assert "latentline gc small --keep-runs 1" in words


def test_the_published_lora_states_its_run_and_step(client: TestClient, page: Any) -> None:
    page.publish("aaaa", 4)
    (page.out / "lora" / "small_comfyui.safetensors").write_bytes(b"weights")
    assert "Step 4 of run aaaa." in words_of(client, "/small/results")


def words_of(client: TestClient, path: str) -> str:
    """Return the text of a page without its tags, with single spaces."""
    text = re.sub(r"<[^>]+>", " ", client.get(path).text)
    return re.sub(r" ([.,:;])", r"\1", " ".join(html.unescape(text).split()))
