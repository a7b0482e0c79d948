"""A training of several machines, over an all-reduce on plain sockets; the first machine alone saves, or each a part.

The state is a list of integers. In each step every machine adds what depends on the state, the step and its rank, and
all of them learn the sum, so that one machine that goes on from another state, or alone, changes the result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys
import time
from io import BufferedRWPair
from pathlib import Path
from typing import Any

PRIME = 2**61 - 1
SIZE = 8


def connections(rank: int, nodes: int) -> list[BufferedRWPair]:
    """The first machine's connections to all others, by rank; or that of another to the first."""
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if nodes == 1:
        return []
    if rank == 0:
        listener = socket.create_server(place)
        found: dict[int, BufferedRWPair] = {}
        while len(found) < nodes - 1:
            connection, _ = listener.accept()
            peer = connection.makefile("rwb")
            hello = json.loads(_line(peer))
            if hello["rendezvous"] != os.environ["SPOTD_RENDEZVOUS_ID"]:
                raise SystemExit("a machine of another rendezvous came")
            found[int(hello["rank"])] = peer
        return [found[other] for other in sorted(found)]
    while True:
        try:
            connection = socket.create_connection(place)
        except OSError:
            time.sleep(0.02)
        else:
            hello = {"rank": rank, "rendezvous": os.environ["SPOTD_RENDEZVOUS_ID"]}
            peer = connection.makefile("rwb")
            _send(peer, hello)
            return [peer]


def summed(own: list[int], rank: int, peers: list[BufferedRWPair]) -> list[int]:
    """The sum over all machines, known to all of them."""
    if rank == 0:
        rows = [own, *(json.loads(_line(peer)) for peer in peers)]
        total = [sum(column) % PRIME for column in zip(*rows, strict=True)]
        for peer in peers:
            _send(peer, total)
        return total
    if peers:
        _send(peers[0], own)
        return [int(value) for value in json.loads(_line(peers[0]))]
    return own


def _send(peer: BufferedRWPair, value: object) -> None:
    peer.write(json.dumps(value).encode() + b"\n")
    peer.flush()


def _line(peer: BufferedRWPair) -> bytes:
    line = peer.readline()
    if not line.endswith(b"\n"):
        raise SystemExit("another machine is gone")
    return line


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--save-s", type=float, default=0.0)
    parser.add_argument("--release", type=Path, default=Path("/nonexistent"))
    parser.add_argument("--in-parts", action="store_true", help="each machine saves its own share of the values")
    options = parser.parse_args()
    rank, nodes = int(os.environ.get("NODE_RANK", "0")), int(os.environ.get("NNODES", "1"))
    folder, resume = Path(os.environ["SPOTD_CHECKPOINT_DIR"]), os.environ.get("SPOTD_RESUME", "")
    state: dict[str, Any] = {"step": 0, "values": [1] * SIZE}
    if resume:
        state = read_state(Path(resume))
    peers = connections(rank, nodes)
    # All machines have restored the same, or none of them goes on.
    if summed([state["step"]] * SIZE, rank, peers) != [state["step"] * nodes] * SIZE:
        raise SystemExit("the machines go on from different steps")
    print(f"rank {rank} of {nodes} begins at step {state['step']}", flush=True)
    while state["step"] < options.steps:
        own = [(value * (rank + 3) + state["step"] * 7 + index) % PRIME for index, value in enumerate(state["values"])]
        state["values"] = summed(own, rank, peers)
        state["step"] += 1
        if not options.release.exists():
            time.sleep(options.pace)
        if state["step"] % options.save_every == 0 and (rank == 0 or options.in_parts):
            takes_s = 0.0 if options.release.exists() else options.save_s
            if options.in_parts:
                share = {"step": state["step"], "values": dict(list(enumerate(state["values"]))[rank::nodes])}
                save(share, folder, takes_s, f"part-{rank}.json")
            else:
                save(state, folder, takes_s)
    if rank == 0:
        Path("out").mkdir(exist_ok=True)
        digest = hashlib.sha256(json.dumps(state).encode()).hexdigest()
        Path("out/weights.sha256").write_text(digest + "\n")
    return 0


def read_state(folder: Path) -> dict[str, Any]:
    """What was saved, by whichever number of machines."""
    parts = [json.loads(path.read_text()) for path in folder.glob("part-*.json")]
    if not parts:
        found: dict[str, Any] = json.loads((folder / "state.json").read_text())
        return found
    values = {int(index): value for part in parts for index, value in part["values"].items()}
    return {"step": parts[0]["step"], "values": [values[index] for index in range(SIZE)]}


def save(state: dict[str, Any], folder: Path, takes_s: float, name: str = "state.json") -> None:
    tmp = folder / f"tmp-{state['step']}"
    tmp.mkdir(parents=True, exist_ok=True)
    time.sleep(takes_s)
    (tmp / name).write_text(json.dumps(state))
    (tmp / "DONE").touch()
    tmp.rename(folder / f"step-{state['step']:08d}")
    for old in sorted(folder.glob("step-*"))[:-3]:
        for path in sorted(old.iterdir()):
            path.unlink()
        old.rmdir()


if __name__ == "__main__":
    sys.exit(main())
