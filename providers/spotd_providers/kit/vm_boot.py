"""The script of a virtual machine's first boot: the job's image under docker with the GPUs, or the start script itself.

However that ends, the machine shuts itself down. A start script that is done says so by the file `machine-done`, which
the machine's shell watches for: a container cannot shut down its host, and needs no right to. Nothing is installed:
driver, docker and NVIDIA's toolkit are in the machine image. While the job's image is pulled, the machine's own Python
fetches the checkpoint (`SPOTD_PREFETCH`) into the folder that will be the container's; nothing is run and nothing ended
by it. A machine without a working GPU ends, rather than train at its price without one.

A runner that hangs ends nothing, and spotd may be dead at that time. So a watchdog outside of it, and of its container,
shuts the machine down when the mark that the runner makes at each renewal of its lease (`machine-lease`: a number that
changes, and for how many seconds it holds) has not changed for so long. It counts by the uptime of the machine, which
is never set; before the first mark it waits two hours.

A warning that only the machine itself gets is watched for beside the job, on the machine and not in its container:
shell lines ask a metadata service with the machine's own Python and leave the runner a notice.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_END: Final = "shutdown -h now"
IMAGE_CHARS_MAX: Final = 512
_IMAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")

# On a rented machine cloud-init's shell stands in `/`. A machine that already has a home of its own stays there.
_HEAD: Final = """#!/bin/sh
if [ -z "${SPOTD_HOME:-}" ]; then mkdir -p /opt/spotd && cd /opt/spotd || shutdown -h now; fi
umask 077
cat >start.sh <<'%(mark)s'
%(script)s
%(mark)s
"""

_WATCHDOG: Final = """up() { { read -r u _ </proc/uptime && echo "${u%%.*}"; } 2>/dev/null || date +%s; }
(
  seen=; since=$(up); limit=7200
  while [ $(($(up) - since)) -le "$limit" ]; do
    sleep 15
    mark=$(head -c 32 machine-lease 2>/dev/null)
    [ "$mark" = "$seen" ] && continue
    seen=$mark; since=$(up); holds=${mark#* }
    case $holds in
    ""|*[!0-9]*|???????*) ;;
    *) limit=$(echo "$holds" | sed 's/^0*//'); limit=${limit:-0} ;;
    esac
  done
  echo "spotd: no lease was renewed for $limit s: this machine ends"
  shutdown -h now
) &
"""

_GPU: Final = """n=0
until nvidia-smi >/dev/null 2>&1; do
  n=$((n + 1))
  [ "$n" -ge 60 ] && { echo "spotd: this machine's GPU does not work"; shutdown -h now; exit 1; }
  sleep 2
done
"""

_DOCKER: Final = """image=%(image)s
%(gpu)sn=0
until docker info >/dev/null 2>&1; do n=$((n + 1)); [ "$n" -ge 60 ] && break; sleep 2; done
SPOTD_PREFETCH=1 /bin/sh ./start.sh >prefetch.log 2>&1 &
n=0
until timeout 900 docker pull -q "$image"; do
  n=$((n + 1))
  [ "$n" -ge 3 ] && { echo "spotd: the image cannot be pulled"; shutdown -h now; exit 1; }
  sleep 10
done
docker run --name %(name)s --network host --ipc host%(gpus)s --user %(user)s -v "$PWD:/spotd" -w /spotd \\
  --entrypoint /bin/sh "$image" ./start.sh &
"""

_PLAIN: Final = """/bin/sh ./start.sh &
"""

_TAIL: Final = """job=$!
while kill -0 "$job" 2>/dev/null && [ ! -e machine-done ]; do sleep 1; done
[ -e machine-done ] || wait "$job"
echo "spotd: the start script has ended ($?)"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerRun:
    """How docker starts the container, in words of the shell: as root with the name `spotd`, where it is alone."""

    name: str = "spotd"
    user: str = "0"
    flags: str = ""


def boot_script(
    *,
    image: str,
    start_script: str,
    container: str,
    has_gpu: bool,
    bytes_max: int,
    beside: str = "",
    before_end: str = "",
    end: str = _END,
    docker: DockerRun = DockerRun(),
) -> str:
    """Build the script that cloud-init runs as root, once.

    Args:
        container: `docker`, or `none` to run the start script on the machine itself.
        has_gpu: wait for the driver of all of the machine's GPUs, and give docker all of them.
        bytes_max: what the provider takes.
        beside: shell lines of the provider's own that start what runs beside the job.
        before_end: shell lines of the provider's own, run when the job is over and before the machine shuts down.
        end: the shell command that ends the machine, where it must not shut down.

    Raises:
        ValueError: the image is no image name, or everything together is beyond the limit.
    """
    mark = "SPOTD"
    while mark in start_script:
        mark += "_"
    head, watchdog, driver, run = (part.replace(_END, end) for part in (_HEAD, _WATCHDOG, _GPU, _DOCKER))
    parts = [head % {"mark": mark, "script": start_script.rstrip("\n")}, watchdog, beside]
    if container == "docker":
        if _IMAGE.fullmatch(image) is None or len(image) > IMAGE_CHARS_MAX:
            raise ValueError(f"an image name has 1 to {IMAGE_CHARS_MAX} letters, digits and . _ / : @ -")
        gpu, gpus = (driver, " --gpus all") if has_gpu else ("", "")
        words = {"image": shlex.quote(image), "gpu": gpu, "gpus": gpus + docker.flags}
        parts.append(run % {**words, "name": docker.name, "user": docker.user})
    else:
        parts.append(_PLAIN)
    text = "".join([*parts, _TAIL, before_end, f"{end}\n"])
    if len(text.encode()) > bytes_max:
        raise ValueError(f"user data has {len(text.encode())} of at most {bytes_max} bytes")
    return text


def doorless_ssh_key(start: int) -> str:
    """Return a public key for providers that sell no machine without one: its private half is known to none.

    It is the first point of the curve ed25519 from `start` on.
    """
    prime = 2**255 - 19
    d = -121665 * pow(121666, -1, prime) % prime
    y = start % prime
    while pow((y * y - 1) * pow(d * y * y + 1, -1, prime), (prime - 1) // 2, prime) != 1:
        y = (y + 1) % prime
    parts = (b"ssh-ed25519", y.to_bytes(32, "little"))
    blob = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return f"ssh-ed25519 {base64.b64encode(blob).decode()} spotd"


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
