"""The start script of a host.

All that it leaves on the machine lies below `$SPOTD_HOME`: a folder of this attempt's own below the working directory,
or below the temporary one where the working directory is not writable.

It must fit the narrowest provider (vast: 4,096 characters), run under any POSIX shell in images that may have neither
curl nor wget, and be harmless when it is started twice. So the shell only finds a Python of 3.8 or later; that Python
reads grant.json at the one URL the script holds, fetches the runner the grant names, verifies it, and becomes it.

A Python that is missing is reported on stdout and stderr, and through curl or wget, where the image has them, as the
plain fact and nothing else. That report needs a URL of its own that may be written, which costs nothing secret: it is a
presigned PUT of one small object.
"""

from __future__ import annotations

import hashlib
import io
import re
import shlex
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import spotd_jobs

SCRIPT_BYTES_MAX: Final = 4096
NO_PYTHON: Final = "spotd: no Python 3.8 or later in this image"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Kept terse: every character of it travels in the provider's launch request. It runs with -I, so nothing of the image's
# own Python settings can change what it does. The tries end after about five minutes; providers start scripts again.
_FETCH: Final = r"""
import hashlib, json, os, sys, time
def get(u):
    if u.startswith("file://"):
        from urllib.parse import unquote
        with open(unquote(u[7:]), "rb") as f: return f.read()
    from urllib.request import Request, urlopen
    with urlopen(Request(u, headers={"User-Agent": "spotd-start"}), timeout=30) as r: return r.read()
h = os.environ["SPOTD_HOME"]
os.makedirs(h, 0o700, exist_ok=True)
p = os.path.join(h, "runner.pyz")
for n in range(30):
    try:
        r = json.loads(get(os.environ["SPOTD_GRANT_URL"]))["runner"]
        b = get(r["url"])
        if hashlib.sha256(b).hexdigest() != r["sha256"]: raise ValueError("runner is not what its hash says")
        with open(p + ".new", "wb") as f: f.write(b)
        os.replace(p + ".new", p)
        break
    except Exception as e:
        if os.path.exists(p) and n > 2: break
        print("spotd: start failed, trying again:", type(e).__name__, getattr(e, "code", ""), file=sys.stderr)
        time.sleep(min(15, 0.3 * 2 ** n))
else: sys.exit("spotd: the runner could not be fetched")
os.execv(sys.executable, [sys.executable, "-IS", p, "--home", h])
""".strip()

_SHELL: Final = """\
#!/bin/sh
# spotd: fetches the runner that grant.json names, and becomes it
export SPOTD_GRANT_URL=@URL@
@EXPORTS@[ -w . ] || cd "${TMPDIR:-/tmp}"
: "${SPOTD_HOME:=$PWD/spotd-@TAG@}"
export SPOTD_HOME
for p in python3 python /opt/conda/bin/python3 /root/miniconda3/bin/python3 /opt/miniconda3/bin/python3 \
/usr/local/bin/python3 /usr/bin/python3 /venv/main/bin/python /opt/venv/bin/python3 \
python3.13 python3.12 python3.11 python3.10 python3.9 python3.8; do
command -v "$p" >/dev/null 2>&1 || continue
"$p" -Ic 'import sys;sys.exit(sys.version_info<(3,8))' >/dev/null 2>&1 || continue
exec "$p" -IS -c @FETCH@
done
m=@MESSAGE@
echo "$m"
echo "$m" >&2
@REPORT@exit 78
"""

_REPORT: Final = """\
if command -v curl >/dev/null 2>&1; then curl -fsS -m 20 -X PUT -d "$m" @URL@
elif command -v wget >/dev/null 2>&1; then wget -q -T 20 -O /dev/null --method=PUT --body-data="$m" @URL@
fi
"""


class ScriptTooLong(ValueError):
    """A script that does not fit the provider's limit. The text states by how much."""


def start_script(
    grant_url: str,
    limit_bytes: int = SCRIPT_BYTES_MAX,
    extra_env: Mapping[str, str] | None = None,
    *,
    report_url: str | None = None,
) -> str:
    """Return a POSIX shell script that carries the attempt of the grant at this URL.

    Args:
        extra_env: not secret: providers show scripts to the owner of the machine.
        report_url: where the fact that the image has no Python may be PUT, by curl or wget, if there.

    Raises:
        ScriptTooLong: it has more than `limit_bytes` bytes.
        ValueError: a name can not be one of an environment variable, or a value holds a NUL or a line break.
    """
    exports = "".join(f"export {_name(name)}={_quote(value)}\n" for name, value in (extra_env or {}).items())
    report = _REPORT.replace("@URL@", _quote(report_url)) if report_url else ""
    script = (
        _SHELL.replace("@FETCH@", shlex.quote(_FETCH))
        .replace("@MESSAGE@", shlex.quote(NO_PYTHON))
        .replace("@REPORT@", report)
        .replace("@EXPORTS@", exports)
        .replace("@TAG@", _tag(grant_url))
        .replace("@URL@", _quote(grant_url))
    )
    excess = len(script.encode()) - limit_bytes
    if excess > 0:
        raise ScriptTooLong(f"the start script is {excess} bytes over the provider's limit of {limit_bytes}")
    return script


def _tag(grant_url: str) -> str:
    """Distinguish attempts that meet in one folder: what one left there must not end or lock out the other."""
    parts = urlsplit(grant_url)
    return hashlib.sha256(f"{parts.netloc}{parts.path}".encode()).hexdigest()[:8]


def _name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no name of an environment variable")
    return name


def _quote(value: str) -> str:
    if any(character in value for character in "\0\r\n"):
        raise ValueError("a value of the start script holds a NUL or a line break")
    return shlex.quote(value)


# The runner as one file: a zipapp whose bytes depend on its sources alone.


_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
_FILE_MODE: Final = 0o100644 << 16
_MAIN: Final = b"from spotd_jobs.runner.main import run\n\nrun()\n"


@cache
def build_runner() -> bytes:
    """Return the zipapp's bytes: the same sources give the same bytes, on every machine."""
    root = Path(spotd_jobs.__file__).parent
    # The other modules of `wire` are the daemon's: they need more than the standard library.
    sources = {"__main__.py": _MAIN, "spotd_jobs/__init__.py": b"", "spotd_jobs/wire/__init__.py": b""}
    for folder in ("runner", "wire/client"):
        for source in sorted((root / folder).glob("*.py")):
            sources[f"spotd_jobs/{folder}/{source.name}"] = source.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(sources.items()):
            entry = zipfile.ZipInfo(name, date_time=_EPOCH)
            entry.external_attr = _FILE_MODE
            entry.create_system = 3
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content, compresslevel=9)
    return buffer.getvalue()
