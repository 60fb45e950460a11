"""The local server of `latentline ui`: its routes, and who may request them.

A request must name this machine as its host, come from no other site, and bring the token that the command
has printed, as with Jupyter. A browser sends the token once, in the address, and then as a cookie.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from pipeline.errors import LatentlineError
from pipeline.page import live
from pipeline.page.render import render, template_text
from pipeline.page.sample import edit, read_sample, sample_picture

if TYPE_CHECKING:
    from starlette.requests import Request

    from pipeline.page.actions import Jobs
    from pipeline.recipe import Recipe

HOST = "127.0.0.1"
"""Address on which the server listens: no other machine can reach it."""

_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # With no-referrer, browsers would send forms without their origin.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of every response. Inline scripts and styles, and requests to other hosts, are forbidden."""

_KEPT = {"Cache-Control": "private, max-age=31536000, immutable"}
"""Headers of files, whose address has the time at which they were written."""

# Captions of 100,000 characters take up to 1.2 MB as a form.
_MAX_FORM_BYTES = 1_500_000

Form = Mapping[str, Sequence[str]]
"""Fields of a form."""

Next = Callable[["Request"], Awaitable[Response]]


def application(
    recipes: live.Recipes,
    jobs: Jobs,
    *,
    token: str,
    port: int,
    dagster: str = "",
    public_url: str = "",
) -> Starlette:
    """Return the application.

    Args:
        recipes: Recipes that are served.
        jobs: The jobs that a person may start and stop.
        token: Secret that a request must bring.
        port: Port on which the server listens, which hosts and origins must name.
        dagster: Address of Dagster's UI, to which the pages link; empty without one.
        public_url: Scheme and host under which a reverse proxy serves the pages; empty without one.
    """
    guard = _Guard(token, port, public_url)
    pages = _Pages(recipes, jobs, dagster)
    return Starlette(
        routes=[
            Route("/", pages.overview),
            Route("/page.css", pages.style),
            Route("/page.js", pages.script),
            Route("/viewer.js", pages.viewer),
            Route("/{recipe}/", pages.training),
            Route("/{recipe}/dataset", pages.dataset),
            Route("/{recipe}/results", pages.results),
            Route("/{recipe}/sample", pages.sample),
            Route("/{recipe}/picture", pages.picture),
            Route("/{recipe}/runs", pages.runs),
            Route("/{recipe}/recipe", pages.recipe),
            Route("/{recipe}/files/{name:path}", pages.file),
            Route("/{recipe}/image/{stem}", pages.image),
            Route("/{recipe}/start", pages.start, methods=["POST"]),
            Route("/{recipe}/stop", pages.stop, methods=["POST"]),
            Route("/{recipe}/publish", pages.publish, methods=["POST"]),
            Route("/{recipe}/draw", pages.draw, methods=["POST"]),
            Route("/{recipe}/caption", pages.caption, methods=["POST"]),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
    )


class _Guard:
    """Refuses requests of other hosts and sites and without the token; adds the headers of `_SECURITY`."""

    def __init__(self, token: str, port: int, public_url: str) -> None:
        self._token = token
        # Cookies are not separated by port, and two servers must not replace each other's.
        self._cookie = f"latentline-{port}"
        self._hosts = {f"{name}:{port}" for name in (HOST, "localhost")}
        self._origins = {f"http://{host}" for host in self._hosts}
        if public_url:
            self._hosts.add(public_url.partition("://")[2])
            self._origins.add(public_url)
        self._is_encrypted = public_url.startswith("https:")

    async def __call__(self, request: Request, call_next: Next) -> Response:
        response = self._refusal(request) or self._login(request) or await call_next(request)
        response.headers.update(_SECURITY)
        return response

    def _refusal(self, request: Request) -> Response | None:
        # A site whose name leads to this machine would otherwise be of the same origin (DNS rebinding).
        if request.headers.get("host") not in self._hosts:
            return _message(403, "Refused", "the host of the request is not this machine")
        # Browsers send an origin with each POST, and with a GET of a script of another site.
        origin = request.headers.get("origin")
        if origin not in self._origins and (origin is not None or request.method != "GET"):
            return _message(403, "Refused", "the request comes from another site")
        if self._is_token(request.query_params.get("token")) or self._is_token(
            request.cookies.get(self._cookie)
        ):
            return None
        fix = "open the address that latentline ui has printed: it contains the token"
        return _message(403, "Token missing", "the request has no token, or the token of another start", fix)

    def _login(self, request: Request) -> Response | None:
        """Return a redirection that turns the token in the address into a cookie."""
        if "token" not in request.query_params:
            return None
        rest = urlencode([pair for pair in request.query_params.multi_items() if pair[0] != "token"])
        # Browsers read a path such as //other.site as another host.
        path = "/" + request.url.path.lstrip("/")
        response = RedirectResponse(f"{path}?{rest}" if rest else path, status_code=303)
        if self._is_token(request.query_params["token"]):
            response.set_cookie(
                self._cookie, self._token, httponly=True, secure=self._is_encrypted, samesite="strict"
            )
        return response

    def _is_token(self, text: str | None) -> bool:
        return text is not None and secrets.compare_digest(text.encode(), self._token.encode())


class _Pages:
    """The endpoints. Starlette calls plain functions in threads, because they read files."""

    def __init__(self, recipes: live.Recipes, jobs: Jobs, dagster: str) -> None:
        self._recipes = recipes
        self._jobs = jobs
        self._dagster = dagster
        self._notices: dict[str, str] = {}

    def overview(self, request: Request) -> Response:
        return _html(request, live.overview(self._recipes))

    def style(self, request: Request) -> Response:
        return Response(template_text("page.css"), media_type="text/css")

    def script(self, request: Request) -> Response:
        return Response(template_text("page.js"), media_type="text/javascript")

    def viewer(self, request: Request) -> Response:
        return Response(template_text("viewer.js"), media_type="text/javascript")

    def training(self, request: Request) -> Response:
        return self._of_recipe(request, partial(live.training_page, jobs=self._jobs))

    def results(self, request: Request) -> Response:
        return self._of_recipe(request, live.results_page)

    def dataset(self, request: Request) -> Response:
        return self._of_recipe(request, partial(live.dataset_page, query=dict(request.query_params)))

    def runs(self, request: Request) -> Response:
        return self._of_recipe(request, partial(live.runs_page, query=dict(request.query_params)))

    def recipe(self, request: Request) -> Response:
        return self._of_recipe(request, live.recipe_page)

    def sample(self, request: Request) -> Response:
        sample_id = request.query_params.get("id", "")
        return self._of_recipe(request, partial(live.sample_page, sample_id=sample_id))

    def _of_recipe(self, request: Request, page: Callable[..., str | None]) -> Response:
        recipe = self._recipe(request)
        if isinstance(recipe, Response):
            return recipe
        # The script of the page before it may request this page first, which nobody sees.
        is_seen = request.headers.get("sec-fetch-mode") in (None, "navigate")
        notice = self._notices.pop(recipe.name, "") if is_seen else ""
        text = page(recipe, dagster=self._dagster, notice=notice)
        if text is None:
            return _message(404, "Not found", "no stage has seen this image", "run the recipe's job")
        return _html(request, text)

    def start(self, request: Request) -> Response:
        return self._act(request, self._jobs.start, "")

    def stop(self, request: Request) -> Response:
        return self._act(request, self._jobs.stop, "")

    async def publish(self, request: Request) -> Response:
        return await self._act_on_form(request, self._publish, "runs")

    def _publish(self, recipe: Recipe, form: Form) -> str:
        return self._jobs.publish(recipe, *(form.get(name, [""])[0] for name in ("run", "step")))

    async def draw(self, request: Request) -> Response:
        return await self._act_on_form(request, self._draw, "#drawings")

    def _draw(self, recipe: Recipe, form: Form) -> str:
        return self._jobs.draw(recipe, {name: texts[0] for name, texts in form.items()})

    async def caption(self, request: Request) -> Response:
        return await self._act_on_form(request, self._caption, "sample")

    def _caption(self, recipe: Recipe, form: Form) -> str:
        sample_id = form.get("id", [""])[0]
        # Only images that a stage has seen, so that no form writes another file.
        if read_sample(recipe, sample_id) is None:
            return f"no stage has seen the image {sample_id!a}"
        if form.get("do") == ["restore"]:
            return edit(recipe, sample_id, ())
        texts = [text for text in form.get("text", ()) if text.strip()]
        return edit(recipe, sample_id, texts) if texts else "write a caption, or restore the dataset's"

    async def _act_on_form(
        self, request: Request, action: Callable[[Recipe, Form], str], page: str
    ) -> Response:
        body = await request.body()
        if len(body) > _MAX_FORM_BYTES:
            return _message(413, "Too large", f"a form must have at most {_MAX_FORM_BYTES:,} bytes")
        form = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
        if page == "sample":
            page += f"?{urlencode({'id': form.get('id', [''])[0]})}"
        return await run_in_threadpool(self._act, request, lambda recipe: action(recipe, form), page)

    def _act(self, request: Request, action: Callable[[Recipe], str], page: str) -> Response:
        """Execute an action, and show what it has done on a page of the recipe."""
        recipe = self._recipe(request)
        if isinstance(recipe, Response):
            return recipe
        self._notices[recipe.name] = action(recipe)
        return RedirectResponse(f"/{recipe.name}/{page}", status_code=303)

    def picture(self, request: Request) -> Response:
        recipe = self._recipe(request)
        if isinstance(recipe, Response):
            return recipe
        query = request.query_params
        data = sample_picture(recipe, query.get("id", ""), query.get("part", ""))
        if data is None:
            return _message(404, "Not found", "the dataset has no such picture, or it cannot be read")
        return Response(data, media_type="image/jpeg", headers=_KEPT)

    def file(self, request: Request) -> Response:
        recipe = self._recipe(request)
        if isinstance(recipe, Response):
            return recipe
        name, edge = request.path_params["name"], request.query_params.get("edge", "")
        path = live.served_file(recipe, name, edge)
        if path is None:
            return _message(404, "Not found", "the outputs have no such picture or LoRA file")
        return FileResponse(path, media_type=live.SERVED[path.suffix], headers=_KEPT)

    def image(self, request: Request) -> Response:
        recipe = self._recipe(request)
        if isinstance(recipe, Response):
            return recipe
        data = live.image_thumbnail(recipe, request.path_params["stem"])
        if data is None:
            return _message(404, "Not found", "the dataset has no such image, or it cannot be read")
        return Response(data, media_type="image/jpeg", headers=_KEPT)

    def _recipe(self, request: Request) -> Recipe | Response:
        name = request.path_params["recipe"]
        try:
            recipe = self._recipes.get(name)
        except LatentlineError as err:
            return _message(500, f"{name} is not valid", err.what, err.fix, err.where)
        return recipe or _message(
            404, "Not found", f"there is no recipe {name}", "open the list of recipes: /"
        )


def _html(request: Request, text: str) -> Response:
    # The page's script polls, and most of the time nothing has changed.
    etag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(text, headers=headers)


def _message(status: int, title: str, text: str, fix: str = "", where: str = "") -> Response:
    if status == 403:
        # Without the style sheet, which needs the token too.
        return PlainTextResponse(f"{title}: {text}\n" + (f"  fix: {fix}\n" if fix else ""), status)
    page = render("live/message.html", title=title, text=text, fix=fix, where=where)
    return HTMLResponse(page, status, headers={"Cache-Control": "no-cache"})
