"""The way into an OpenStack cloud: tokens of Keystone, the catalogue that comes with them, and Nova's microversion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from random import Random
from typing import Any, Final, Unpack
from urllib.parse import quote

from spotd_providers.contract.errors import AuthFailed, ProviderError, Unavailable
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import AttemptKey
from spotd_providers.kit.boundary import is_loopback, safe_base_url
from spotd_providers.kit.calls import KeptToken, Page, Rest, is_token
from spotd_providers.kit.http import AnswerLost, Http, HttpAnswer, RequestOptions
from spotd_providers.kit.oauth import TOKEN_LIFE_MAX, TOKEN_MARGIN
from spotd_providers.kit.rest import RestClient
from spotd_providers.kit.shapes import decode_or_none, is_small, parse_instant
from spotd_providers.kit.text import quote_safely
from spotd_providers.kit.vm_market import row_name
from spotd_providers.openstack.wire import DIALECT, WHO, OpenstackSettings

SERVICES: Final = {
    "compute": ("compute",),
    "image": ("image",),
    "network": ("network",),
    "volume": ("block-storage", "volumev3", "volume"),
}
"""First parts of our paths, with the types that a catalogue may call them."""
UNVERSIONED: Final = ("image", "network")
"""Services whose version our paths name; the catalogues of some clouds name it, too."""
_OWN_VERSION: Final = re.compile(r"/v2(\.0)?$")
ROWS_MAX: Final = 500
PAGE_ROWS: Final = 200
VERSION_KEPT: Final = timedelta(hours=6)
VERSION_AGAIN: Final = timedelta(minutes=5)
"""After an answer that states no version, where one is known."""
NOT_KNOWN: Final = 406
"""The answer to a request in a version that Nova does not know."""
OLDEST: Final = (2, 1)
WANTED: Final = (2, 74)
"""The newest version whose answers are known; a cloud that knows less gets its own newest."""
_ROOT: Final = re.compile(r"(.*?/v2(?:\.\d+)?)(?:/.*)?")
_NUMBER: Final = re.compile(r"2\.(\d{1,3})")


class Keystone(KeptToken):
    """Tokens for an application credential or a password, and where the services of one region answer."""

    def __init__(self, http: Http, settings: OpenstackSettings, secret: str, clock: Clock) -> None:
        super().__init__(clock)
        self._http, self._settings, self._secret = http, settings, secret
        self._urls: dict[str, str] = {}
        self._unsafe: frozenset[str] = frozenset()
        self.region = settings.region
        self.project = settings.project_id
        self.credential = settings.credential_id

    async def url(self, service: str) -> str:
        """Return where a service answers, without a slash at its end.

        Raises:
            AuthFailed, Unavailable: there is no token, or the catalogue does not hold the service.
        """
        await self(refused=False)
        if service in self._unsafe:
            raise Unavailable(f"{WHO}'s catalogue names an address for {service} that is not safe, so it is not called")
        if service not in self._urls:
            raise Unavailable(f"{WHO}'s catalogue names no {service} service in region {self.region or '?'}")
        return self._urls[service]

    def has(self, service: str) -> bool:
        """Whether the newest catalogue names a service, be it at an address that is not safe."""
        return service in self._urls or service in self._unsafe

    def _body(self) -> Mapping[str, Any]:
        settings = self._settings
        if settings.credential_id:
            said = {"id": settings.credential_id, "secret": self._secret}
            return {"auth": {"identity": {"methods": ["application_credential"], "application_credential": said}}}
        user = {"name": settings.username, "domain": {"name": settings.domain}, "password": self._secret}
        identity = {"methods": ["password"], "password": {"user": user}}
        return {"auth": {"identity": identity, "scope": {"project": {"id": settings.project_id}}}}

    async def _fetch(self) -> tuple[str, timedelta]:
        try:
            answer = await self._http.send("POST", "/v3/auth/tokens", json_body=self._body())
        except AnswerLost as exc:
            raise Unavailable(f"{WHO}'s answer to a request for a token was lost") from exc
        body = decode_or_none(answer.body, who=WHO)
        if answer.status in (400, 401, 403) and isinstance(body, dict) and isinstance(body.get("error"), dict):
            raise AuthFailed(f"{WHO} refused the credential ({answer.status})")
        token = answer.headers.get("x-subject-token", "") if answer.status in (200, 201) else ""
        said = body.get("token") if isinstance(body, dict) else None
        if not is_token(token) or not isinstance(said, dict):
            raise Unavailable(f"{WHO} answered {answer.status} to a request for a token, and no token")
        project = said.get("project")
        number = project.get("id") if isinstance(project, dict) else None
        # Once known it stays, as the region does: in another project each of our servers would appear gone.
        if self.project and number != self.project:
            raise Unavailable(f"{WHO}'s token is of another project than {self.project}, or of none")
        self._urls, self._unsafe = self._endpoints(said.get("catalog"))
        self.project = number if isinstance(number, str) else ""
        span = self._life(said.get("expires_at"))
        return token, span - min(TOKEN_MARGIN, span / 4)

    def _life(self, expires: Any) -> timedelta:
        """Return how long a token holds; one that does not say so is kept for minutes."""
        try:
            span = parse_instant(expires) - self._clock.now()
        except (ValueError, OverflowError):
            return TOKEN_MARGIN * 2
        return min(span, TOKEN_LIFE_MAX) if span > timedelta(0) else TOKEN_MARGIN * 2

    def _endpoints(self, catalog: Any) -> tuple[dict[str, str], frozenset[str]]:
        """Return the public endpoints of the region, and the services at addresses that would show a token to others.

        Raises:
            Unavailable: no region is named where there are several, or the catalogue does not hold the one that is.
        """
        rows = [row for row in catalog[:ROWS_MAX] if isinstance(row, dict)] if isinstance(catalog, list) else []
        found: dict[tuple[str, str], str] = {}
        for row in rows:
            ends = row.get("endpoints")
            for end in ends[:ROWS_MAX] if isinstance(ends, list) else ():
                if not is_small(end) or not isinstance(end, dict) or end.get("interface") != "public":
                    continue
                place, url = end.get("region_id", end.get("region")), end.get("url")
                if isinstance(place, str) and isinstance(url, str) and isinstance(row.get("type"), str):
                    found.setdefault((row["type"], place), url)
        places = sorted({place for kind, place in found if kind == "compute"})
        # Once known it stays: in another region each of our servers would appear gone.
        region = self._settings.region or self.region or (places[0] if len(places) == 1 else "")
        if region not in places:
            some = quote_safely(", ".join(places[:20])) or "none"
            raise Unavailable(f"name one of the cloud's regions in providers.openstack.region: it has {some}")
        self.region = region
        urls: dict[str, str] = {}
        named: set[str] = set()
        for service, kinds in SERVICES.items():
            for url in (found[kind, region] for kind in kinds if (kind, region) in found):
                named.add(service)
                if self._is_safe(url):
                    plain = url.rstrip("/")
                    urls.setdefault(service, _OWN_VERSION.sub("", plain) if service in UNVERSIONED else plain)
        return urls, frozenset(named - set(urls))

    def _is_safe(self, url: str) -> bool:
        """Whether a token may be sent there; in the clear only on this very computer, where Keystone is here, too."""
        try:
            safe_base_url(url, example="https://...")
        except ValueError:
            return False
        return not url.lower().startswith("http:") or is_loopback(self._settings.base_url)


class OpenstackClient(RestClient):
    """Calls whose path begins with the service that is meant, as `/compute/servers`."""

    def __init__(self, http: Http, keys: Keystone, *, clock: Clock, rng: Random) -> None:
        super().__init__(http, DIALECT, clock=clock, rng=rng)
        self.keys = keys
        self._version: tuple[int, int] | None = None
        self._version_kept = Rest(clock)

    async def send(self, method: str, path: str, *, what: str, **options: Unpack[RequestOptions]) -> HttpAnswer:
        url, headers = await self._place(path)
        options["headers"] = {**(options.get("headers") or {}), **headers}
        answer = await super().send(method, url, what=what, **options)
        self._note_version(answer)
        return answer

    async def send_purchase(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any],
        *,
        key: AttemptKey,
        headers: Mapping[str, str] | None = None,
    ) -> HttpAnswer:
        url, more = await self._place(path)
        said = {**(headers or {}), **more}
        answer = await super().send_purchase(method, url, body, key=key, headers=said)
        self._note_version(answer)
        return answer

    async def page(self, path: str, name: str, token: str | None, *, limit: str = f"limit={PAGE_ROWS}") -> Page:
        """Read one page of a list; the token of the next is the last row's id, if the answer says that there is one."""
        query = "&".join(one for one in (limit, f"marker={quote(token, safe='')}" if token else "") if one)
        answer = await self.ask("GET", f"{path}?{query}" if query else path, what=f"the list of {name}")
        rows, links = answer.get(name), answer.get(f"{name}_links", [])
        if not isinstance(rows, list) or not isinstance(links, list):
            raise Unavailable(f"{WHO}'s answer to the list of {name} is no list")
        if not any(isinstance(one, dict) and one.get("rel") == "next" for one in links):
            return rows, None if not links else ""
        last = row_name(rows[-1], "id") if rows else ""
        return rows, "" if last == "unreadable" else last

    async def version(self) -> tuple[int, int]:
        """Return the version of Nova's API that requests ask for: the newest that both know.

        Raises:
            Unavailable: Nova does not state its version, and none is known from before.
        """
        if self._version is None or self._version_kept.left() <= timedelta(0):
            try:
                self._version = await self._ask_version()
                self._version_kept.take(VERSION_KEPT)
            except Unavailable:
                if self._version is None:
                    raise
                self._version_kept.take(VERSION_AGAIN)
        return self._version

    async def _ask_version(self) -> tuple[int, int]:
        url = await self.keys.url("compute")
        root = _ROOT.fullmatch(url)
        answer = await self._http.read("GET", f"{root[1] if root else url}/")
        body = decode_or_none(answer.body, who=WHO)
        said = body.get("version") if isinstance(body, dict) and answer.status == 200 else None
        newest = said.get("version") if isinstance(said, dict) and isinstance(said.get("id"), str) else None
        if newest == "":  # the first version, which knows no others
            return OLDEST
        number = _NUMBER.fullmatch(newest) if isinstance(newest, str) else None
        if number is None:
            raise Unavailable(f"{WHO} answered {answer.status} to the question for its version, and no version")
        return min(WANTED, (2, max(1, int(number[1]))))

    def _note_version(self, answer: HttpAnswer) -> None:
        """Have the version asked for again after an answer by a Nova that no longer knows it."""
        if answer.status == NOT_KNOWN:
            self._version_kept = Rest(self._clock)

    async def _place(self, path: str) -> tuple[str, Mapping[str, str]]:
        _, service, rest = path.split("/", 2)
        url = await self.keys.url(service)
        if service != "compute":
            return f"{url}/{rest}", {}
        major, minor = await self.version()
        number = f"{major}.{minor}"
        return f"{url}/{rest}", {
            "openstack-api-version": f"compute {number}",
            "x-openstack-nova-api-version": number,
        }


async def account_of(keys: Keystone) -> str:
    """Return project and region: another one's list proves nothing of ours."""
    try:
        await keys(refused=False)
    except ProviderError:
        if not keys.project or not keys.region:
            raise
    return f"{keys.project or keys.credential} in {keys.region}"
