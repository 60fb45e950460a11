"""`reports/index.html` shows stages, images, runs and previews, needs no other file, and runs nothing."""

from __future__ import annotations

import base64
import io
import json
import re
import uuid
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from PIL import Image

from pipeline.outputs.folder import OutputFolder
from pipeline.outputs.stage_files import fetch_for_command
from pipeline.page.static import refresh_page, write_page
from pipeline.reporting.findings import Finding, write_findings
from pipeline.reporting.reports import write_report
from pipeline.storage.addresses import Url

EVIL = '</style><script>alert("x")</script> & "quoted" <img src=x onerror=alert(1)> \x1b]0;owned\x07\u202e'


class Read(HTMLParser):
    """Tags, pictures, links and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.pictures: list[str] = []
        self.alternatives: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        assert not [name for name in values if name.startswith("on") or name == "style"]
        if tag == "img":
            self.pictures.append(values["src"] or "")
            self.alternatives.append(values["alt"] or "")
        self.links += [values["href"] or ""] if "href" in values else []

    def handle_data(self, data: str) -> None:
        self.text += data


def is_picture(address: str) -> bool:
    kind, _, data = address.partition(";base64,")
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        return kind.startswith("data:image/") and min(picture.size) > 20


def test_the_page_shows_each_image_with_caption_bucket_and_thumbnail_inside(page: Any) -> None:
    page.folder.dataset["repeats"] = 3
    page.ingest()
    read = Read(write_page(page.folder.recipe))
    for text in ("d/rose.png", "a red rose", "d/deep/tulip.png", "a yellow tulip", "3 times per epoch"):
        assert text in read.text
    assert read.text.count("bucket ") == 2
    assert len(read.pictures) == 2
    assert all(map(is_picture, read.pictures))


def test_rejected_images_have_reason_and_fix_and_are_counted(page: Any) -> None:
    page.folder.add("empty.png", b"")
    page.ingest()
    read = Read(write_page(page.folder.recipe))
    [row] = page.folder.tables.read_rejected().to_dicts()
    for text in ("2 images kept, 1 rejected", row["sample_id"], row["reason"], f"Fix: {row['fix']}"):
        assert text in read.text


def test_a_closed_gate_is_open_on_the_page_with_its_fix(page: Any) -> None:
    closed = Finding("captions_present", False, "error", "1 caption is missing", "write it", [], {})
    warning = Finding("solid_colour", False, "warn", "1 image is grey", "", [{"sample_id": "d/a.png"}], {})
    write_findings(page.out, "validated_dataset", [closed, warning])
    path = write_page(page.folder.recipe)
    read = Read(path)
    assert "1 gate closed" in read.text
    assert "Fix: write it" in read.text
    assert "d/a.png" in read.text
    opened = re.findall(r"<details open>\s*<summary>.*?</summary>", path.read_text("utf-8"), re.DOTALL)
    assert len(opened) == 1
    assert "captions_present" in opened[0]


def test_a_run_has_curves_previews_by_step_and_prompt_and_its_difference_in_words(page: Any) -> None:
    page.add_run("aaaa", began_s=1_000_000, optimizer={"learning_rate": 0.1})
    page.add_run("bbbb", began_s=2_000_000, optimizer={"learning_rate": 0.2})
    page.publish("bbbb", 4)
    read = Read(write_page(page.folder.recipe))
    assert "optimizer.learning_rate 0.1 -> 0.2" in read.text
    assert "Step 4 is in lora/." in read.text
    # The grid shows the newest run, the list of runs has one picture of each.
    assert read.alternatives == ["Step 0: a rose", "Step 4: a rose", "Step 4: a rose", "Step 4: a rose"]
    assert all(map(is_picture, read.pictures))
    for title in ("Training loss", "Learning rate", "Images per second"):
        assert title in read.text


def test_a_run_that_was_stopped_shows_its_step(page: Any) -> None:
    layout = page.add_run("aaaa", began_s=1_000_000, steps=4)
    (layout.folder / "order.json").write_text(json.dumps({"recipe": {"training": {"steps": 9}}}))
    assert "stopped, step 4 of 9" in Read(write_page(page.folder.recipe)).text


def test_images_that_do_harm_have_picture_estimate_and_whether_a_training_left_them_out(page: Any) -> None:
    page.ingest()
    worst = [
        {"sample_id": "d/rose.png", "caption": "a red rose", "estimate": -0.0123},
        {"sample_id": "d/gone.png", "caption": "a violet", "estimate": -0.001},
    ]
    left_out = {"images": ["d/rose.png"], "change": -0.02, "low": -0.03, "high": -0.01}
    report = {"run": "aaaa", "from_step": 4, "why": "the held-out loss is lower", "worst": worst}
    write_report(page.out, "influence", {**report, "without": left_out})
    read = Read(write_page(page.folder.recipe))
    words = " ".join(read.text.split())
    for row in ("d/rose.png a red rose-1.23%yes", "d/gone.png a violet-0.10%no", "Influence of images"):
        assert row in words
    assert read.alternatives.count("") == 1, "the image that is gone has no picture"


def test_names_captions_prompts_and_messages_run_nothing_and_load_nothing(page: Any) -> None:
    page.folder.add("evil.png", caption=EVIL)
    page.folder.add("<script>alert(2)<!--.png", caption=EVIL * 50)
    page.ingest()
    page.add_run("aaaa", began_s=1_000_000, prompt=EVIL, optimizer={"kind": "a"})
    page.add_run("bbbb", began_s=2_000_000, prompt=EVIL, optimizer={"kind": EVIL[:30]})
    (page.out / "lora").mkdir()
    (page.out / "lora" / "pytorch_lora_weights.safetensors").write_bytes(b"x")
    (page.out / "lora" / "README.md").write_text(EVIL, "utf-8")
    failed = Finding("captions_present", False, "error", EVIL, EVIL, [{"sample_id": EVIL}], {})
    write_findings(page.out, "validated_dataset", [failed])
    interval = {"mean": 0.5, "low": 0.1, "high": 0.9, "pictures": 4}
    write_report(
        page.out, "evaluation", {"why": EVIL, "steps": [{"step": 4, "strength": 1.0, "learned": interval}]}
    )
    write_report(
        page.out,
        "sweep",
        {"why": EVIL, "variants": [{"variant": 1, "settings": EVIL, "error": EVIL, "run": EVIL}]},
    )
    worst = {"sample_id": EVIL, "caption": EVIL, "better_caption": EVIL, "score": 1.5}
    write_report(page.out, "diagnosis", {"why": EVIL, "worst": [worst]})
    worst = {"sample_id": EVIL, "caption": EVIL, "estimate": -0.5}
    write_report(page.out, "influence", {"why": EVIL, "run": EVIL, "from_step": 4, "worst": [worst]})

    path = write_page(page.folder.recipe)
    read = Read(path)
    assert read.text.count("<script>alert(") > 16, "the texts are shown"
    assert "script" not in read.tags
    assert all(address.startswith("data:image/") for address in read.pictures)
    assert all(link.startswith("#") for link in read.links)
    assert not {"\x1b", "\x07", "\u202e"} & set(path.read_text("utf-8"))
    assert path.read_text("utf-8").count("<style>") == 1


def test_an_unchanged_page_is_not_written_again_and_old_pictures_are_removed(page: Any) -> None:
    layout = page.add_run("aaaa", began_s=1_000_000)
    large = layout.previews / "step-00000004-00.png"
    Image.effect_noise((600, 600), 80).convert("RGB").save(large)
    path = write_page(page.folder.recipe)
    [reduced] = (page.out / "reports" / "thumbnails").iterdir()
    before = path.stat().st_mtime_ns, reduced.stat().st_mtime_ns
    assert write_page(page.folder.recipe) == path
    assert (path.stat().st_mtime_ns, reduced.stat().st_mtime_ns) == before

    Image.effect_noise((600, 600), 40).convert("RGB").save(large)
    write_page(page.folder.recipe)
    [replaced] = (page.out / "reports" / "thumbnails").iterdir()
    assert replaced != reduced


def test_damaged_files_leave_gaps_and_not_errors(page: Any) -> None:
    page.ingest()
    layout = page.add_run("aaaa", began_s=1_000_000)
    page.add_run("bbbb", began_s=2_000_000)
    layout.facts.write_text("{", "utf-8")
    (layout.previews / "step-00000004-00.png").write_bytes(b"\x89PNG\r\n")
    (page.out / "tables" / "aspect_buckets.parquet").write_bytes(b"PAR1")
    (page.out / "reports" / "raw_images.json").write_text("[", "utf-8")
    read = Read(write_page(page.folder.recipe))
    assert "2 images kept" in read.text
    assert "run.json of one of the runs is damaged" in read.text


def test_a_recipe_without_outputs_has_a_page_that_names_the_next_command(page: Any) -> None:
    assert "latentline run small" in Read(write_page(page.folder.recipe)).text


def test_outputs_at_an_address_get_their_page_there(page: Any, tmp_path: Path) -> None:
    page.ingest()
    page.add_run("aaaa", began_s=1_000_000, prompt="a rose in the rain")
    other = OutputFolder(Url(f"memory://{uuid.uuid4().hex}/out"), page.out)
    other.upload("tables/", "reports/", "runs/")

    here = {"output_address": other.address, "output_dir": tmp_path / "here"}
    recipe = page.folder.recipe.model_copy(update=here)
    fetch_for_command(OutputFolder(other.address, recipe.output_dir))
    path = refresh_page(recipe, page.folder.log.append)
    read = Read(path)
    assert "a rose in the rain" in read.text
    assert "a yellow tulip" in read.text
    assert len([each for each in read.pictures if is_picture(each)]) >= 4
    assert other.read("reports/index.html") == path.read_bytes()
