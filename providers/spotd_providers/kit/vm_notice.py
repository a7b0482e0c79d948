"""A warning that only the machine itself gets: shell lines that ask a metadata service and leave the runner a notice.

They run beside the job, on the machine and not in its container, with the machine's own Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WATCH_EVERY_S: Final = 5
# Its outermost loop: whatever a metadata service answers, or a full disk refuses, the next turn asks again. It writes
# nothing of that down, since a host may fill its disk with it.
_WATCH: Final = """python3 - <<'SPOTD_NOTICE' >/dev/null 2>&1 &
import email.utils, glob, json, os, time, urllib.request
ask = urllib.request.Request(%(url)r, headers=%(headers)r)
web = urllib.request.build_opener(urllib.request.ProxyHandler({}))
def due(body):
%(due)s
while True:
    try:
        at = due(web.open(ask, timeout=150).read(65536))
        if at is not None:
            when = time.strftime("%%Y-%%m-%%dT%%H:%%M:%%SZ", time.gmtime(at))
            home = os.environ.get("SPOTD_HOME")
            for place in [home] if home else glob.glob("spotd-*"):
                with open(os.path.join(place, "notice.new"), "w") as file:
                    file.write(json.dumps({"at": when, "reason": %(reason)r}))
                os.chmod(file.name, 0o644)
                os.replace(file.name, os.path.join(place, "notice"))
    except Exception:
        pass
    time.sleep(%(every)d)
SPOTD_NOTICE
"""


def notice_lines(url: str, headers: Mapping[str, str], due: str, *, reason: str) -> str:
    """Return the lines; `due` is the body of a Python function of the answer, which returns an epoch or `None`."""
    body = "\n".join(f"    {line}" for line in due.splitlines())
    words = {"url": url, "headers": dict(headers), "due": body, "reason": reason, "every": WATCH_EVERY_S}
    return _WATCH % words
