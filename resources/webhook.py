"""Alerts as HTTP requests to the address in `LATENTLINE_WEBHOOK`: for Slack, for Discord, or as JSON."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from pipeline.errors import LatentlineError
from pipeline.escaping import printable_lines, without_secrets
from resources.failures import Problem

if TYPE_CHECKING:
    from urllib.request import Request

WEBHOOK_VARIABLE = "LATENTLINE_WEBHOOK"
"""Environment variable with the address. A prefix `slack+`, `discord+` or `json+` chooses the form."""

# Dagster ends a tick after 60 s without storing its cursor, so that all alerts of the tick would be sent
# again. If alerts fail, it evaluates up to five runs in one tick.
BUDGET_S = 10.0
"""Longest time for all attempts to send an alert."""

TIMEOUT_S = 5.0

RETRY_DELAYS_S = (1.0, 2.0)
"""Seconds before the second and the third attempt."""

MAX_PROBLEMS = 5

# Discord refuses messages of more than 2,000 characters, title included.
MAX_CHARACTERS, MAX_TITLE_CHARACTERS = 1_600, 300

_HOSTS = {"hooks.slack.com": "slack", "discord.com": "discord", "discordapp.com": "discord"}
_CLIENT_ERROR, _TOO_MANY_REQUESTS, _SERVER_ERROR = 400, 429, 500


class WebhookError(LatentlineError):
    """An alert could not be sent."""


@dataclass(frozen=True)
class Alert:
    """The message about one run or recipe.

    Attributes:
        title: One line.
        level: "error" or "warning".
        run_id: The run; empty for a recipe.
        job: Name of its job; empty for a recipe.
        problems: At least one problem.
    """

    title: str
    level: str
    run_id: str = ""
    job: str = ""
    problems: Sequence[Problem] = field(default_factory=tuple[Problem, ...])


def webhook() -> str | None:
    """Return the address for alerts, which is a secret; None if there is none."""
    return os.environ.get(WEBHOOK_VARIABLE, "").strip() or None


def send(
    alert: Alert,
    address: str,
    *,
    sleep: Callable[[float], object] = time.sleep,
    budget_s: float = BUDGET_S,
) -> None:
    """Send an alert, and again if the service is busy or away. An alert without an answer counts as sent.

    Raises:
        WebhookError: The address is invalid, or no attempt succeeded within `budget_s`. The message never has
            the address.
    """
    form, url = _form(address)
    from urllib.request import Request  # definitions load this module, and few of them send anything

    body = json.dumps(_FORMS[form](_safe(alert))).encode("utf-8")
    headers = {"Content-Type": "application/json", "User-Agent": "latentline"}
    request = Request(url, data=body, headers=headers, method="POST")  # noqa: S310 - see _form

    # A thread, because the timeout of a request limits neither the search for the host's address nor an
    # answer that arrives byte by byte.
    reasons: list[str | None] = [f"no answer within {budget_s:g} s"]
    deadline_s = time.monotonic() + budget_s
    thread = threading.Thread(
        target=lambda: reasons.append(_send(request, sleep, deadline_s=deadline_s)), daemon=True
    )
    thread.start()
    thread.join(budget_s)
    if reasons[-1] is not None:
        raise WebhookError(
            f"the alert {alert.title!r} was not sent: {reasons[-1]}",
            where=f"{WEBHOOK_VARIABLE}, host {urlsplit(url).hostname}",
            fix=f"if the address in {WEBHOOK_VARIABLE} is wrong, correct it and restart the code server"
            + (f"; run {alert.run_id} has the details" if alert.run_id else ""),
        )


def _send(request: Request, sleep: Callable[[float], object], *, deadline_s: float) -> str | None:
    """Return why all attempts failed, or None; none begins after `deadline_s` of the monotonic clock."""
    for delay_s in RETRY_DELAYS_S:
        reason, is_final = _attempt(request)
        if is_final or time.monotonic() + delay_s > deadline_s:
            return reason
        sleep(delay_s)
    return _attempt(request)[0]


def _attempt(request: Request) -> tuple[str | None, bool]:
    """Return why the request failed or None, and whether another attempt would fail in the same way."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPRedirectHandler, build_opener

    class _NoRedirects(HTTPRedirectHandler):
        # urllib would repeat the request as a GET without the alert.
        def redirect_request(
            self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
        ) -> None:
            return None

    try:
        with build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S):
            return None, True
    except HTTPError as err:
        if err.code < _CLIENT_ERROR and (new := err.headers.get("Location")) is not None:
            err.close()
            # The path and the query of the address are secret.
            parts = urlsplit(urljoin(request.full_url, new))
            address = f"{parts.scheme}://{parts.hostname}"
            return f"the service redirects to {address}: set {WEBHOOK_VARIABLE} to that address", True
        is_busy = err.code == _TOO_MANY_REQUESTS or err.code >= _SERVER_ERROR
        err.close()
        return f"the service answered {err.code}", not is_busy
    # The reasons of these errors name the host at most.
    except URLError as err:
        return str(err.reason), False
    # From here on, the request was sent completely: with another attempt, a slow service would show the alert
    # twice.
    except TimeoutError:
        return None, True
    except (OSError, HTTPException) as err:
        return type(err).__name__, True


def _form(address: str) -> tuple[str, str]:
    """Return the form of the messages, and the address without its prefix."""
    prefix, plus, rest = address.partition("+")
    form, url = (prefix, rest) if plus and prefix in _FORMS else ("", address)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise WebhookError(
            "the address for alerts must begin with https:// or http://",
            where=WEBHOOK_VARIABLE,
            fix="copy the address of an incoming webhook from Slack, Discord or another service",
        )
    return form or _HOSTS.get(parts.hostname, "json"), url


def _safe(alert: Alert) -> Alert:
    """Return the alert without secrets and control characters, which names of files may contain."""
    problems = [
        Problem(*(printable_lines(without_secrets(part)) for part in (each.what, each.where, each.fix)))
        for each in alert.problems[:MAX_PROBLEMS]
    ]
    title = printable_lines(alert.title)[:MAX_TITLE_CHARACTERS]
    return Alert(title, alert.level, alert.run_id, alert.job, problems)


def _text(alert: Alert) -> str:
    parts = [str(each) for each in alert.problems]
    text = "\n\n".join([*parts, f"run {alert.run_id}"] if alert.run_id else parts)
    # Backticks would end the block.
    text = text.replace("`", "'")
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"


def _slack(alert: Alert) -> Mapping[str, Any]:
    # With these three escaped, Slack sees no links and no mentions such as <!channel>.
    title, text = (
        each.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        for each in (alert.title, _text(alert))
    )
    return {"text": f"*{title}*\n```\n{text}\n```"}


def _discord(alert: Alert) -> Mapping[str, Any]:
    return {"content": f"**{alert.title}**\n```\n{_text(alert)}\n```", "allowed_mentions": {"parse": []}}


def _json(alert: Alert) -> Mapping[str, Any]:
    return asdict(alert)


_FORMS: Mapping[str, Callable[[Alert], Mapping[str, Any]]] = {
    "slack": _slack,
    "discord": _discord,
    "json": _json,
}
