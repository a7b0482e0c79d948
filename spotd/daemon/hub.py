"""Repositories of a hub: which files a revision has, and by which URL a host reads each without a token.

By the hub's public interface: `GET /api/{models|datasets}/OWNER/NAME/revision/REV` names the commit, `.../tree/COMMIT`
lists its files in pages (`Link: <...>; rel="next"`), and `/OWNER/NAME/resolve/COMMIT/PATH` serves one. A large file
(`lfs`) has a SHA-256 and is served by a redirection to a signed URL; a small one has the hash of its git object and is
served at once.

The token is sent to the hub's own address alone, and never to where that redirects.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urljoin, urlsplit

from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.dataset import BYTES_MAX, FILES_MAX, GIT, SHA256, STORED, ListedFile, order_of_path
from spotd_jobs.wire.client.sinks import is_plain

TIMEOUT_S: Final = 20.0
PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
PAGES_MAX: Final = 200
REDIRECTS_MAX: Final = 3
SMALL_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of one file of a private repository that the hub serves at once, which the store then holds."""
SMALL_BYTES_IN_ALL_MAX: Final = 256 * 1024 * 1024
SMALL_FILES_MAX: Final = 500
SIGNED_FILES_MAX: Final = 300
"""Large ones of a private repository: each is signed by a request of its own, again and again."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_NEXT: Final = re.compile(r'<([^>]+)>\s*;\s*rel="next"')
_REFUSED: Final = frozenset({401, 403, 404})
_MOVED: Final = frozenset({301, 302, 303, 307, 308})
STORE_HINT: Final = "fetch it once and store it: spotctl data put NAME DIR, then the name as source"


class SourceRefused(Exception):
    """A source that machines cannot read data from. The text goes on after the source; `hint` is a way out."""

    def __init__(self, message: str, *, hint: str = STORE_HINT) -> None:
        super().__init__(message)
        self.hint = hint


class SourceAway(Exception):
    """The place of a source does not answer now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPlace:
    """A hub. `error`: why its token is not known, empty where it is or where none is configured."""

    url: str
    token: str = ""
    error: str = ""

    def __repr__(self) -> str:
        return f"HubPlace({self.url!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A revision of a repository, as a job names it."""

    kind: str
    name: str
    revision: str

    @property
    def api(self) -> str:
        return f"/api/{self.kind}/{self.name}"

    def file(self, path: str) -> str:
        head = "/datasets/" if self.kind == "datasets" else "/"
        return f"{head}{self.name}/resolve/{quote(self.revision, safe='')}/{quote(path)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSnapshot:
    """What a revision holds.

    Attributes:
        is_private: only the token's owner may read it.
    """

    commit: str
    files: tuple[ListedFile, ...]
    is_private: bool


def repository_of(source: str, revision: str | None) -> Repository:
    """Return the repository that a source names; the revision of the job goes before what the source says."""
    place, _, stated = source.removeprefix("hf://").partition("@")
    head, _, rest = place.partition("/")
    kind, name = (head, rest) if head in {"datasets", "models"} and "/" in rest else ("models", place)
    return Repository(kind=kind, name=name, revision=revision or stated or "main")


class Hub:
    """One hub. Synchronous: called from worker threads."""

    def __init__(self, place: HubPlace) -> None:
        self._place = place

    def snapshot(self, repository: Repository) -> HubSnapshot:
        """Return what the revision holds now.

        Raises:
            SourceRefused: it is not there, may not be read, or holds what no machine can read.
            SourceAway
        """
        try:
            commit, is_private = self._commit(repository)
            token = self._place.token if is_private else ""
            files = tuple(sorted(self._tree(repository, commit, token), key=lambda one: order_of_path(one.path)))
            if not files:
                raise SourceRefused("holds no file")
            if not is_private:
                at = Repository(kind=repository.kind, name=repository.name, revision=commit)
                is_private = self._is_gated(at, files)
            return HubSnapshot(commit=commit, files=files, is_private=is_private)
        finally:
            web.drop_connections()

    def public_url(self, repository: Repository, path: str) -> str:
        """Return where everybody reads the file of a public repository."""
        return self._place.url + repository.file(path)

    def signed_url(self, repository: Repository, path: str) -> str:
        """Return the URL by which a host without a token reads a large file for a while.

        Raises:
            SourceRefused: the hub gives none.
            SourceAway
        """
        url = self._place.url + repository.file(path)
        for _ in range(REDIRECTS_MAX):
            status, headers, _ = self._ask(url, self._place.token, {"Range": "bytes=0-0"})
            if status not in _MOVED or "location" not in headers:
                raise SourceRefused(f"has a file that the hub serves by no signed URL (HTTP {status}): {path[:100]}")
            found = urljoin(url, headers["location"])
            if not self._is_own(found):
                if urlsplit(found).scheme != "https" and not self._place.url.startswith("http:"):
                    raise SourceRefused("is served over another protocol than https")
                return found
            url = found
        raise SourceRefused("redirects too often")

    def small_file(self, repository: Repository, one: ListedFile) -> bytes:
        """Return a file of a private repository that the hub serves at once.

        Raises:
            SourceRefused: it is too large, or not what was listed.
            SourceAway
        """
        if one.size > SMALL_BYTES_MAX:
            raise SourceRefused(f"is private and has a large file that is not kept as LFS: {one.path[:100]}")
        url = self._place.url + repository.file(one.path)
        status, _, data = self._ask(url, self._place.token, {}, size_max=one.size + 1)
        if status != 200 or git_hash(data) != one.check:
            raise SourceRefused(f"has a file that cannot be read as it was listed (HTTP {status}): {one.path[:100]}")
        return data

    def _commit(self, repository: Repository) -> tuple[str, bool]:
        path = f"{repository.api}/revision/{quote(repository.revision, safe='')}"
        status, document = self._document(path, "")
        is_private = status in _REFUSED and bool(self._place.token)
        if is_private:
            status, document = self._document(path, self._place.token)
        if status in _REFUSED:
            more = self._place.error and f"; {self._place.error}"
            hint = "check owner, name and revision; a private one needs token under [hub] in the config"
            raise SourceRefused(f"is not there, or is private (HTTP {status}){more}", hint=hint)
        commit = document.get("sha") if isinstance(document, dict) else None
        if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
            raise SourceRefused("has a revision whose commit the hub does not name")
        return commit, is_private

    def _tree(self, repository: Repository, commit: str, token: str) -> Iterator[ListedFile]:
        path: str | None = f"{repository.api}/tree/{commit}?recursive=true&expand=false"
        count = total = 0
        for _ in range(PAGES_MAX):
            if path is None:
                return
            status, headers, data = self._ask(urljoin(self._place.url + "/", path), token, {}, size_max=PAGE_BYTES_MAX)
            if status != 200:
                raise SourceRefused(f"does not list its files (HTTP {status})")
            for row in _rows(data):
                one = _file(row)
                if one is not None:
                    count, total = count + 1, total + one.size
                    yield one
            if count > FILES_MAX or total > BYTES_MAX:
                raise SourceRefused(f"has more than {FILES_MAX:,} files, or more bytes than a dataset can have")
            found = _NEXT.search(headers.get("link", ""))
            path = None if found is None else found[1]
            if path is not None and not self._is_own(urljoin(self._place.url + "/", path)):
                raise SourceRefused("goes on in a list of another server")
        if path is not None:
            raise SourceRefused(f"lists its files in more than {PAGES_MAX} pages")

    def _is_gated(self, repository: Repository, files: tuple[ListedFile, ...]) -> bool:
        """Whether its files may be listed by everybody and read only with a token.

        Raises:
            SourceRefused: they may not be read with the token either.
        """
        one = min(files, key=lambda found: (found.kind != SHA256, found.size))
        url = self._place.url + repository.file(one.path)
        if self._ask(url, "", {"Range": "bytes=0-0"})[0] not in _REFUSED:
            return False
        status = self._ask(url, self._place.token, {"Range": "bytes=0-0"})[0] if self._place.token else 401
        if status in _REFUSED:
            hint = "ask for access on its page, and write token under [hub] in the config"
            raise SourceRefused(f"is gated: its files are not served to everybody (HTTP {status})", hint=hint)
        return True

    def _document(self, path: str, token: str) -> tuple[int, Any]:
        url = self._place.url + path
        for _ in range(REDIRECTS_MAX):
            status, headers, data = self._ask(url, token, {}, size_max=PAGE_BYTES_MAX)
            if status in _MOVED and "location" in headers:
                url = urljoin(url, headers["location"])
                if not self._is_own(url):
                    raise SourceRefused("leads to another server")
                continue
            try:
                return status, json.loads(data) if status == 200 else None
            except ValueError:
                raise SourceRefused("is described by no JSON") from None
        raise SourceRefused("redirects too often")

    def _is_own(self, url: str) -> bool:
        own, other = urlsplit(self._place.url), urlsplit(url)
        return (own.scheme, own.hostname, own.port) == (other.scheme, other.hostname, other.port)

    def _ask(
        self, url: str, token: str, headers: dict[str, str], *, size_max: int = 65536
    ) -> tuple[int, dict[str, str], bytes]:
        """Ask the hub, without following any redirection.

        Raises:
            SourceAway
        """
        if token:
            headers = {**headers, "Authorization": f"Bearer {token}"}
        try:
            answer = web.request("GET", url, headers, timeout_s=TIMEOUT_S, foreign=True, size_max=size_max)
        except web.WebError as exc:
            raise SourceAway(f"the hub does not answer: {exc}") from exc
        if answer[0] == 429 or answer[0] >= 500:
            raise SourceAway(f"the hub does not answer: HTTP {answer[0]}")
        return answer


def stored_files(
    snapshot: HubSnapshot, read: Callable[[ListedFile], bytes], keep: Callable[[str, bytes], None]
) -> tuple[ListedFile, ...]:
    """Return the files of a private snapshot as hosts read them: small ones from the store, where they are kept.

    Raises:
        SourceRefused, SourceAway
    """
    small = [one for one in snapshot.files if one.kind == GIT and one.size]
    if len(snapshot.files) - len(small) > SIGNED_FILES_MAX:
        raise SourceRefused(f"is private and has over {SIGNED_FILES_MAX} large files")
    if len(small) > SMALL_FILES_MAX or sum(one.size for one in small) > SMALL_BYTES_IN_ALL_MAX:
        raise SourceRefused(f"is private and has over {SMALL_FILES_MAX:,} small files, or over 256 MiB of them")
    found = []
    for one in snapshot.files:
        if one.kind == GIT and one.size:
            data = read(one)
            digest = hashlib.sha256(data).hexdigest()
            keep(digest, data)
            found.append(ListedFile(one.path, one.size, STORED, digest))
        else:
            found.append(one)
    return tuple(found)


def git_hash(data: bytes) -> str:
    """Return what git names this content by."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324 - git's own choice


def _rows(data: bytes) -> list[Any]:
    try:
        rows = json.loads(data)
    except ValueError:
        raise SourceRefused("lists its files in no JSON") from None
    if not isinstance(rows, list):
        raise SourceRefused("lists its files in no list")
    return rows


def _file(row: Any) -> ListedFile | None:
    """Return the file that a row lists; `None` for a folder.

    Raises:
        SourceRefused
    """
    try:
        if row["type"] != "file":
            return None
        path, large = row["path"], row.get("lfs")
        size, kind, check = (row["size"], GIT, row["oid"]) if large is None else (large["size"], SHA256, large["oid"])
        is_hash = re.fullmatch(r"[0-9a-f]{40}" if kind == GIT else r"[0-9a-f]{64}", check) is not None
        if not is_plain(path) or type(size) is not int or size < 0 or not is_hash:
            raise ValueError(path)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise SourceRefused("lists a file that cannot be understood") from None
    return ListedFile(path, size, kind, check)
