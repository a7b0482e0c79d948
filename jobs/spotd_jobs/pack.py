"""A working folder as one deterministic archive, so that equal content has an equal hash and is stored once.

`.gitignore` files count as they do for git: nested ones, negations, and those of the repository above the folder; so do
`.spotdignore` files, whose rules come after those of the `.gitignore` beside them. What is likely to hold keys is
refused unless it is included by name. `.git` never travels. Links may point around inside the folder but not out of
it, since what they point to would be missing, or another file, on the host.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec


# Which files of a working folder are likely to hold keys.
#
# They are recognised by their names and, where those can be harmless too, by their first bytes.
#
# What is sent to a rented machine by mistake must be counted as public.


HEAD_BYTES: Final = 64 * 1024
"""So much of a file is read."""

_HARMLESS: Final = (
    "*.pub",
    ".env.example",
    ".env.sample",
    ".env.template",
    ".env.dist",
    ".env.defaults",
    "example.env",
    "sample.env",
)
_NAMES: Final = (
    ".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".git-credentials", ".pgpass", ".my.cnf", ".htpasswd",
    ".dockercfg", ".vault-token", ".secrets", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.ppk", "*.p12",
    "*.pfx", "*.jks", "*.keystore", "*.key", "kubeconfig", "*.kubeconfig", "application_default_credentials.json",
    "secrets.toml", "secrets.yml", "secrets.yaml", "secrets.json", ".boto", ".s3cfg", ".rclone.conf", "rclone.conf",
    ".npmrc", ".pypirc", "credentials.json", ".credentials.json", "credentials.csv", "*accesskeys.csv", "kaggle.json",
    "service-account*.json", "service_account*.json", "serviceaccount*.json", "client_secret*.json", "*.tfstate",
    "*.tfstate.*", "*.tfvars", "*.tfvars.json", ".terraformrc", "token.json", "token.pickle", "*.kdbx", "*.p8",
)  # fmt: skip
_FOLDERS: Final = (
    ".ssh",
    ".aws",
    ".gnupg",
    ".kube",
    ".azure",
    ".config/gcloud",
    ".config/gh",
    ".config/rclone",
    ".docker",
)
_PATHS: Final = (".huggingface/token", ".cache/huggingface/token", ".config/wandb/settings", ".kaggle/kaggle.json")
_PRIVATE_KEY: Final = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY")
_CERTIFICATE: Final = re.compile(rb"-----BEGIN [A-Z0-9 ]*(?:CERTIFICATE|PUBLIC KEY|CRL|PARAMETERS)")
_TOKEN: Final = re.compile(
    rb"(?im)^[^#;\n]*(?:_authtoken|_auth|_password|password|token|npmauthtoken)[\"']?\s*[:=]\s*\S"
)
_URL_PASSWORD: Final = re.compile(rb"://[^/\s:@]+:[^/\s:@]+@")
_SERVICE_ACCOUNT: Final = re.compile(rb'"(?:private_key|client_secret|refresh_token)"\s*:')
_BY_CONTENT: Final[tuple[tuple[str, re.Pattern[bytes]], ...]] = (
    (".yarnrc.yml", _TOKEN),
    ("pip.conf", _URL_PASSWORD),
    (".condarc", _URL_PASSWORD),
    ("*.json", _SERVICE_ACCOUNT),
)


def holds_keys(path: str, head: Callable[[], bytes]) -> bool:
    """Whether the file should not leave this computer unless its owner includes it by name.

    Args:
        path: relative, with `/`.
        head: gives its first `HEAD_BYTES`.
    """
    low = f"/{path.lower()}"
    name = low.rpartition("/")[2]
    if any(fnmatchcase(name, pattern) for pattern in _HARMLESS):
        return False
    if any(fnmatchcase(name, pattern) for pattern in _NAMES):
        return True
    if any(f"/{folder}/" in low for folder in _FOLDERS) or any(low.endswith(f"/{one}") for one in _PATHS):
        return True
    start = head()
    if fnmatchcase(name, "*.pem"):
        return _PRIVATE_KEY.search(start) is not None or _CERTIFICATE.search(start) is None
    if _PRIVATE_KEY.match(start.lstrip()) is not None:
        return True
    return any(fnmatchcase(name, pattern) and content.search(start) for pattern, content in _BY_CONTENT)


_NEVER: Final = ".git"
_RULES: Final = ".gitignore"
_OWN_RULES: Final = ".spotdignore"
_NAMED_MAX: Final = 10
_COMPRESSION: Final = 6
_FILES_MAX: Final = 100_000


class PackError(Exception):
    """The folder cannot be packed; the message names the place, `hint` the way out."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One packed folder.

    Attributes:
        data: the gzip-compressed tar archive; paths are relative to the folder.
        sha256: of `data`, lower-case hex.
        size: bytes of `data`.
        file_count: files and links in it, folders not counted.
        skipped: sockets, pipes and devices that were left out, by path.
    """

    data: bytes
    sha256: str
    size: int
    file_count: int
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Rules:
    """The ignore rules of one folder; `base` is that folder's path from the top of the repository, `""` or `x/y/`."""

    base: str
    spec: GitIgnoreSpec


def pack(workdir: Path, *, bytes_max: int, include: Sequence[str] = ()) -> Packed:
    """Pack the folder's content as an archive that depends on names, contents, links and the executable bit only.

    Args:
        include: files and folders, relative to the workdir, that travel in any case: ignored ones, and such as are
            likely to hold keys.

    Raises:
        PackError: no such folder, nothing in it, more than `bytes_max` bytes, an unreadable file, a link that leads
            out of it, or files that are likely to hold keys and were not included.
    """
    buffer = io.BytesIO()
    files, skipped = _write(buffer, workdir, bytes_max, include)
    data = buffer.getvalue()
    return Packed(
        data=data,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        file_count=sum(not stat.S_ISDIR(mode) for _, mode in files),
        skipped=skipped,
    )


def pack_into(file: IO[bytes], workdir: Path, *, bytes_max: int) -> str:
    """Write the archive that `pack` makes into an empty file; return its hash. It is never whole in memory.

    Raises:
        PackError: as `pack` does.
    """
    _write(file, workdir, bytes_max, ())
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(HEAD_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _write(
    file: IO[bytes], workdir: Path, bytes_max: int, include: Sequence[str]
) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    files, skipped = _checked_files(workdir, bytes_max, include)
    left = bytes_max
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=_COMPRESSION, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, mode in files:
            left -= _add(archive, workdir, name, mode, left)
    return files, skipped


def require_packable(workdir: Path, *, bytes_max: int, include: Sequence[str] = ()) -> None:
    """Check what `pack` would refuse by names and sizes alone, without reading a file.

    Raises:
        PackError: as `pack` does, apart from files that turn out to be unreadable.
    """
    _checked_files(workdir, bytes_max, include)


def _checked_files(
    workdir: Path, bytes_max: int, include: Sequence[str]
) -> tuple[list[tuple[str, int]], tuple[str, ...]]:
    """Return what is to be packed with its mode, and the names of what cannot travel."""
    if not workdir.is_dir():
        what = "is not a folder" if workdir.exists() else "does not exist"
        raise PackError(f"the workdir {workdir} {what}", hint="set workdir to the folder that holds the code")
    wanted = [_archive_name(workdir, name) for name in include]
    members = sorted({**dict(_walk(workdir)), **_all_below(workdir, wanted)}.items())
    skipped = tuple(name for name, mode in members if not _travels(mode))
    files = sorted((name, mode) for name, mode in members if _travels(mode))
    if not any(not stat.S_ISDIR(mode) for _, mode in files):
        raise PackError(
            f"the workdir {workdir} holds nothing to pack", hint=f"check its {_RULES}, or leave workdir out"
        )
    _refuse_keys(workdir, files, wanted)
    _refuse_too_much(workdir, files, bytes_max)
    return files, skipped


def _travels(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)


def _walk(workdir: Path) -> Iterator[tuple[str, int]]:
    """Path and mode of everything that is not ignored, links not followed."""
    root, rules = _rules_above(workdir)
    seen = 0
    folders = [("", rules)]
    while folders:
        folder, rules = folders.pop()
        here = workdir / folder
        rules = [*rules, *_rules_in(here, root + folder)]
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError as exc:
            raise PackError(
                f"{here} cannot be read: {exc.strerror}", hint=f"mend its mode or ignore it in {_RULES}"
            ) from exc
        for entry in entries:
            if entry.name == _NEVER:
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            name = folder + entry.name
            if _is_ignored(root + name + ("/" if is_folder else ""), rules):
                continue
            seen += 1
            if seen > _FILES_MAX:
                raise PackError(
                    f"the workdir {workdir} holds more than {_FILES_MAX} files",
                    hint=f"ignore data and environments in a {_RULES}, or choose a smaller workdir",
                )
            yield name, entry.stat(follow_symlinks=False).st_mode
            if is_folder:
                folders.append((name + "/", rules))


def _rules_above(workdir: Path) -> tuple[str, list[_Rules]]:
    """Return the folder's path from the top of its repository, and the rules of the folders above it up to there."""
    folder = workdir.resolve()
    above = [folder, *folder.parents]
    top = next((candidate for candidate in above if (candidate / _NEVER).exists()), None)
    if top is None or top == folder:
        return "", []
    rules = []
    for candidate in reversed(above[1 : above.index(top) + 1]):
        base = candidate.relative_to(top).as_posix()
        rules += _rules_in(candidate, "" if base == "." else f"{base}/")
    return f"{folder.relative_to(top).as_posix()}/", rules


def _archive_name(workdir: Path, name: str) -> str:
    """Return the name, as the archive has it.

    Raises:
        PackError: there is no such file or folder in the workdir.
    """
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if not parts or ".." in parts or name.startswith("/") or not os.path.lexists(workdir / "/".join(parts)):
        raise PackError(f"{name} is to be included, and is not in {workdir}", hint="write its path inside the workdir")
    return "/".join(parts)


def _all_below(workdir: Path, wanted: Sequence[str]) -> dict[str, int]:
    """Path and mode of these, of everything below them, and of the folders above them."""
    found: dict[str, int] = {}
    waiting = list(wanted)
    while waiting:
        name = waiting.pop()
        mode = (workdir / name).lstat().st_mode
        found[name] = mode
        if stat.S_ISDIR(mode):
            waiting += [f"{name}/{entry.name}" for entry in os.scandir(workdir / name) if entry.name != _NEVER]
        parts = name.split("/")
        for length in range(1, len(parts)):
            above = "/".join(parts[:length])
            found[above] = (workdir / above).lstat().st_mode
    return found


def _refuse_keys(workdir: Path, files: list[tuple[str, int]], wanted: Sequence[str]) -> None:
    found = [
        name
        for name, mode in files
        if not stat.S_ISDIR(mode)
        and not any(name == one or name.startswith(f"{one}/") for one in wanted)
        and holds_keys(name, lambda path=workdir / name, mode=mode: _head(path, mode))  # type: ignore[misc]  # mypy cannot type a lambda's defaults
    ]
    if not found:
        return
    named = ", ".join(found[:_NAMED_MAX]) + (f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else "")
    raise PackError(
        f"the workdir {workdir} holds what looks like keys, and would send them to a rented machine: {named}",
        hint=f"ignore them in a {_OWN_RULES} or {_RULES}, hand values over with --secret NAME, or send a file all the"
        f" same with --include {found[0]}",
    )


def _head(path: Path, mode: int) -> bytes:
    if not stat.S_ISREG(mode):
        return b""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""  # packing it reports that


def _rules_in(folder: Path, base: str) -> list[_Rules]:
    return [*_rules_of(folder / _RULES, base), *_rules_of(folder / _OWN_RULES, base)]


def _rules_of(path: Path, base: str) -> list[_Rules]:
    from pathspec import GitIgnoreSpec  # the client must start without it

    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return []
    except OSError as exc:
        raise PackError(f"{path} cannot be read: {exc.strerror}", hint="mend its mode") from exc
    try:
        return [_Rules(base, GitIgnoreSpec.from_lines(lines))]
    except ValueError as exc:
        raise PackError(
            f"{path} holds a pattern that git would not understand: {exc}", hint="mend the pattern"
        ) from exc


def _is_ignored(path: str, rules: list[_Rules]) -> bool:
    """Whether the last rule that matches, deepest folder first, ignores the path."""
    for rule in reversed(rules):
        verdict = rule.spec.check_file(path[len(rule.base) :]).include
        if verdict is not None:
            return verdict
    return False


def _refuse_too_much(workdir: Path, files: list[tuple[str, int]], bytes_max: int) -> None:
    sizes = {name: (workdir / name).lstat().st_size for name, mode in files if stat.S_ISREG(mode)}
    total = sum(sizes.values())
    if total <= bytes_max:
        return
    largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:3]
    named = ", ".join(f"{name} ({_megabytes(sizes[name])})" for name in largest)
    raise PackError(
        f"the workdir {workdir} holds {_megabytes(total)}, more than the {_megabytes(bytes_max)} that may be packed",
        hint=f"ignore what the job does not need in a {_RULES}, and hand a dataset over as [[data]] "
        f"(spotctl data put); the largest are {named}",
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _add(archive: tarfile.TarFile, workdir: Path, name: str, mode: int, left: int) -> int:
    """Add the member to the archive; return how many bytes of content it has."""
    member = tarfile.TarInfo(name)  # owner, group and time stay 0
    member.mode = 0o755 if stat.S_ISDIR(mode) or mode & 0o100 else 0o644
    path = workdir / name
    if stat.S_ISDIR(mode):
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
        return 0
    if stat.S_ISLNK(mode):
        member.type = tarfile.SYMTYPE
        member.mode = 0o777
        member.linkname = _inner_target(workdir, path)
        archive.addfile(member)
        return 0
    try:
        with path.open("rb") as file:
            # What is open, not what was listed: the file may have changed in between.
            member.size = os.fstat(file.fileno()).st_size
            if member.size > left:
                raise PackError(f"{path} grew while it was packed", hint="pack a folder that nothing writes to")
            archive.addfile(member, file)
    except OSError as exc:
        hint = f"mend its mode or ignore it in {_RULES}"
        reason = exc.strerror or "it shrank while it was packed"
        raise PackError(f"{path} cannot be read: {reason}", hint=hint) from exc
    return member.size


def _inner_target(workdir: Path, path: Path) -> str:
    """Return the link's target, which lies inside the folder both as written and as the system follows it."""
    target = str(path.readlink())
    relative = path.parent.relative_to(workdir)
    lexical = os.path.normpath(relative / target)
    followed = Path(os.path.realpath(path))  # Path.resolve raises on a loop of links
    inside = followed.is_relative_to(workdir.resolve())
    if os.path.isabs(target) or lexical.split("/")[0] == ".." or not inside:  # noqa: PTH117  # a string from the link
        raise PackError(
            f"the link {path.relative_to(workdir)} leads out of the workdir, to {target}",
            hint=f"copy what it points to into {workdir}, make it a relative link inside, or ignore it in {_RULES}",
        )
    return target
