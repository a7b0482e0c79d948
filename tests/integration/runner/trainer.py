"""A training job in miniature: its weights are a chain of hashes, so that one lost or repeated step shows at the end.

It is data for the tests: they pack it as a job's code. `argv`: steps, seconds per step, and how it saves.
"""

TRAINER = r"""
import hashlib, os, signal, sys, time
steps, pause, style = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
size = int(sys.argv[4]) if len(sys.argv) > 4 else 50_000
folder = os.environ["SPOTD_CHECKPOINT_DIR"]
step, weights = 0, b"start"
resume = os.environ["SPOTD_RESUME"]
if resume:
    with open(os.path.join(resume, "w") if os.path.isdir(resume) else resume, "rb") as f:
        head = f.read(100)
        step, weights = int(head[:10]), head[10:42]
        body = f.read()
    assert hashlib.sha256(head + body[:-32]).digest() == body[-32:], "the restored checkpoint is broken"
    print("resumed at", step, flush=True)

def content():
    head = b"%010d" % step + weights
    head += b"." * (100 - len(head))
    noise = b"".join(hashlib.sha256(weights + b"%d" % n).digest() for n in range(size // 32))
    return head + noise + hashlib.sha256(head + noise).digest()

def save():
    name = os.path.join(folder, "step-%d" % step)
    data = content()
    if style == "marked":            # a folder, finished by a mark
        os.makedirs(name, exist_ok=True)
        with open(name + "/w", "wb") as f:
            for n in range(0, len(data), 8192):
                f.write(data[n:n + 8192]); f.flush()
        open(name + "/DONE", "w").close()
    elif style == "renamed":         # one file, renamed into place
        with open(name + ".tmp", "wb") as f:
            f.write(data)
        os.rename(name + ".tmp", name)
    else:                            # one file, written over in place: in one call, so that it is never half a file
        path = os.path.join(folder, "last")
        is_first = not os.path.exists(path)
        target = path + ".tmp" if is_first else path
        with open(target, "wb" if is_first else "r+b", buffering=0) as f:
            f.write(data)
        os.rename(target, path)
    for old in sorted(os.listdir(folder)):
        if style == "marked" and old.startswith("step-") and int(old[5:]) < step - 1:
            import shutil
            shutil.rmtree(os.path.join(folder, old), ignore_errors=True)

def leave(*_):
    print("saving at", step, flush=True)
    save()
    sys.exit(0)

if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, leave)
while step < steps:
    weights = hashlib.sha256(weights + b"%d" % step).digest()
    step += 1
    if "final" not in sys.argv:
        save()
    print("step", step, flush=True)
    time.sleep(pause)
with open(os.path.join(os.environ["SPOTD_OUTPUT_DIR"], "final"), "w") as f:
    f.write(weights.hex())
"""


def final_weights(steps: int) -> str:
    """What an uninterrupted run ends with."""
    import hashlib

    weights = b"start"
    for step in range(steps):
        weights = hashlib.sha256(weights + b"%d" % step).digest()
    return weights.hex()
