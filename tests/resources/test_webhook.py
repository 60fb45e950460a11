"""Alerts that a real web server receives."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from resources.webhook import BUDGET_S, Alert, Problem, WebhookError, send, webhook
from tests.free_ports import free_port
from tests.webhook_server import Received, webhook_server

PROBLEM = Problem("3 images have no caption", "flowers/validated_dataset", "write a.txt")
ALERT = Alert("flowers_cache failed", "error", "0123", "flowers_cache", [PROBLEM])


@pytest.fixture
def server() -> Iterator[Received]:
    with webhook_server() as received:
        yield received


def test_M10_a_plain_alert_is_json_with_what_where_and_fix(server: Received) -> None:
    send(ALERT, server.url)
    (body,) = server.bodies
    assert body == {
        "title": "flowers_cache failed",
        "level": "error",
        "run_id": "0123",
        "job": "flowers_cache",
        "problems": [
            {
                "what": "3 images have no caption",
                "where": "flowers/validated_dataset",
                "fix": "write a.txt",
            }
        ],
    }


TEXT = "3 images have no caption\n  where: flowers/validated_dataset\n  fix:   write a.txt\n\nrun 0123"


def test_slack_and_discord_get_their_own_form(server: Received) -> None:
    send(ALERT, f"slack+{server.url}")
    send(ALERT, f"discord+{server.url}")
    assert server.bodies == [
        {"text": f"*flowers_cache failed*\n```\n{TEXT}\n```"},
        {
            "content": f"**flowers_cache failed**\n```\n{TEXT}\n```",
            "allowed_mentions": {"parse": []},
        },
    ]


def test_names_of_files_mention_nobody_hide_nothing_and_reveal_no_secret(server: Received) -> None:
    hostile = Problem(
        "<!channel> ```\n@everyone \x1b[2J", "https://me:hunter22@host/a?sig=hunter22", "fix " * 1000
    )
    alert = Alert("a <!here> b" + " and more" * 300, "error", "0123", "job", [hostile])
    for form in ("slack", "discord", "json"):
        send(alert, f"{form}+{server.url}")
    slack, discord, plain = server.bodies
    assert "<!" not in slack["text"]
    assert discord["allowed_mentions"] == {"parse": []}
    for text in (slack["text"], discord["content"]):
        assert text.count("```") == 2
        assert len(text) < 2000
    for text in (slack["text"], discord["content"], plain["problems"][0]["where"]):
        assert "hunter22" not in text
    assert "\x1b" not in f"{slack}{discord}{plain}"


def test_a_busy_service_gets_the_alert_again(server: Received) -> None:
    server.statuses += [503, 429]
    waited: list[float] = []
    send(ALERT, server.url, sleep=waited.append)
    assert (len(server.bodies), waited) == (3, [1.0, 2.0])


def test_no_attempt_begins_after_the_budget(server: Received) -> None:
    """Its success would contradict the error that the sensor has reported."""
    server.statuses += [503, 503]
    with pytest.raises(WebhookError, match="the service answered 503"):
        send(ALERT, server.url, sleep=lambda _seconds: None, budget_s=0.9)
    assert len(server.bodies) == 1


def test_a_service_that_refuses_the_alert_is_an_error_without_the_address(server: Received) -> None:
    server.statuses += [404]
    with pytest.raises(WebhookError, match="the service answered 404") as error:
        send(ALERT, server.url)
    assert len(server.bodies) == 1, "another attempt would be refused too"
    assert "SECRET" not in str(error.value)
    assert "127.0.0.1" in error.value.where
    assert "0123" in error.value.fix


@pytest.mark.parametrize("status", [301, 307])
def test_a_redirection_is_an_error_because_the_alert_would_get_lost(server: Received, status: int) -> None:
    server.statuses += [status]
    new = r"redirects to http://127\.0\.0\.1: set LATENTLINE_WEBHOOK to that address"
    with pytest.raises(WebhookError, match=new) as error:
        send(ALERT, server.url)
    assert len(server.bodies) == 1
    assert "SECRET" not in error.value.text()


def test_a_service_that_is_away_is_an_error_without_the_address() -> None:
    waited: list[float] = []
    with pytest.raises(WebhookError, match="was not sent") as error:
        send(ALERT, f"http://127.0.0.1:{free_port()}/SECRET", sleep=waited.append)
    assert len(waited) == 2
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize(
    "address", ["hooks.slack.com/SECRET", "file:///SECRET", "https:///SECRET", "slack+SECRET"]
)
def test_an_address_that_is_no_web_address_is_an_error_without_it(address: str) -> None:
    with pytest.raises(WebhookError, match="must begin with https://") as error:
        send(ALERT, address)
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize(("value", "expected"), [(None, None), ("", None), (" ", None), (" x ", "x")])
def test_the_address_is_the_variable(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: str | None
) -> None:
    monkeypatch.delenv("LATENTLINE_WEBHOOK", raising=False)
    if value is not None:
        monkeypatch.setenv("LATENTLINE_WEBHOOK", value)
    assert webhook() == expected


def test_a_service_that_does_not_answer_takes_no_longer_than_the_budget(server: Received) -> None:
    """Dagster ends a tick after 60 s, and sends its alerts again."""
    server.answers.clear()
    begin_s = time.monotonic()
    with pytest.raises(WebhookError, match=r"no answer within 0\.2 s"):
        send(ALERT, server.url, budget_s=0.2)
    assert time.monotonic() - begin_s < 4, "one attempt alone may take 5 s"
    server.answers.set()
    assert 5 * BUDGET_S < 60


def test_a_service_that_answers_late_gets_an_alert_once(
    server: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resources.webhook.TIMEOUT_S", 0.2)
    server.answers.clear()
    send(ALERT, server.url, sleep=lambda _seconds: None)
    server.answers.set()
    assert len(server.bodies) == 1
