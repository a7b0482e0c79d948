"""What spotd costs a training on a real GPU, and whether a training that was preempted ends with the same weights.

The same steps twice, with checkpoints of 3.2 GB: alone, and as a job on the local market whose machine is taken away
once. Compared are the steps between saves, most of which lie beside an upload: alone nothing is uploaded.

Run: python benchmarks/bench_training.py [--steps 2400] [--save-every 400]
It needs torch and a GPU of 16 GB, and says so where they are missing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from tests.e2e.harness import host, lab, until  # noqa: E402 - the folder above must be importable first

GPU = "H100"
"""What the local market calls its machine; the job uses the GPU of this computer, whatever it is."""
SLOWER_LIMIT = 1.02
FIRST_STEPS = 50
"""Of each start: the GPU and its libraries warm up."""
ASK = "import torch, sys; sys.exit(not torch.cuda.is_available())"


def step_times(folder: Path, after: int) -> list[float]:
    """Seconds of each step beyond `after` that was measured, without the first ones of a start."""
    found = [{int(k): v for k, v in json.loads(path.read_text()).items()} for path in sorted(folder.glob("*.json"))]
    return [took for one in found for step, took in list(one.items())[FIRST_STEPS:] if step > after]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--save-every", type=int, default=400)
    args = parser.parse_args()
    if subprocess.run([sys.executable, "-c", ASK], capture_output=True, check=False).returncode:
        print("not measured: it needs torch and a GPU")
        return 0
    with tempfile.TemporaryDirectory(prefix="spotd-bench-") as made:
        folder = Path(made)
        code = folder / "code"
        code.mkdir()
        shutil.copy(REPO / "benchmarks" / "gpu_train.py", code)
        flags = ["--steps", str(args.steps), "--save-every", str(args.save_every)]
        alone = folder / "alone"
        alone.mkdir()
        subprocess.run(
            [sys.executable, code / "gpu_train.py", *flags, "--times", folder / "times-alone"], cwd=alone, check=True
        )
        expected = (alone / "out" / "weights.sha256").read_text()
        shutil.rmtree(alone)
        with lab(folder / "lab", hosts=host("h0", 0.30, gpu=GPU) + host("h1", 0.31, gpu=GPU), scale=1.0) as found:
            found.fresh = True
            found.start()
            command = f"{sys.executable} gpu_train.py {' '.join(flags)} --times {folder / 'times-spotd'}"
            job = found.submit(
                "train",
                command,
                workdir=code,
                resources={"gpu": [f"{GPU}:1"], "disk": "40GB"},
                checkpoint={"every": "20s", "settle": "1s", "keep": 2, "stop_grace": "30s"},
            )
            until(lambda: found.job(job)["checkpoint"] is not None, what="a checkpoint", within=300, every=0.5)
            time.sleep(1.0)
            (machine,) = found.running_machines()
            found.control("preempt", {"machine": machine.machine_id, "notice": False, "lasting": "1d"})
            found.wait_final(job, within=900)
            same = found.delivered(job, "weights.sha256") == expected
            starts = len(list((folder / "times-spotd").glob("*.json")))
        plain, ours = (step_times(folder / f"times-{name}", args.save_every) for name in ("alone", "spotd"))
    for name, times in (("alone", plain), ("under spotd", ours)):
        middle, mean = statistics.median(times), statistics.mean(times)
        print(f"{name:12} {1000 * middle:8.3f} ms a step, mean {1000 * mean:8.3f}, of {len(times)} steps")
    ratio = statistics.mean(ours) / statistics.mean(plain)
    verdict = "met" if ratio <= SLOWER_LIMIT else "NOT MET"
    print(f"a step beside uploads takes {ratio:.3f} times as long (limit {SLOWER_LIMIT}): {verdict}")
    print(f"the same weights after {starts} starts: {'met' if same else 'NOT MET'}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
