"""A tiny training job for each framework, which saves as that framework's users do. Tests pack it as a job's code.

`train.py NAME [steps]`: goes on from `SPOTD_RESUME`, saves every few steps, saves on SIGTERM and leaves. The state says
at which step it was written, in its tensors too, so that a mixture of two checkpoints can not be loaded unnoticed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("SPOTD_CHECKPOINT_DIR", "checkpoints"))
RESUME = os.environ.get("SPOTD_RESUME", "")
EVERY, KEEP, SIZE = 5, 2, 4096
PACE_S = 0.1  # what has no mark must be left alone for the settle time before the rotation takes it
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 10**9
_terminated = False


def _note(*_: object) -> None:
    global _terminated
    _terminated = True


def loop(step: int, save: Callable[[int], object], name: Callable[[int], str]) -> None:
    """Trains from `step`; the oldest checkpoints are removed as users do."""
    signal.signal(signal.SIGTERM, _note)
    print("resumed at", step, flush=True)
    while step < STEPS and not _terminated:
        step += 1
        time.sleep(PACE_S)
        if step % EVERY == 0:
            save(step)
            if step > KEEP * EVERY:
                shutil.rmtree(FOLDER / name(step - KEEP * EVERY), ignore_errors=True)
    if _terminated and step % EVERY:
        save(step)
        print("saved on SIGTERM at", step, flush=True)


def filled(step: int) -> Any:
    import torch

    return torch.full((SIZE,), float(step))


def checked(tensors: list[Any]) -> int:
    """The step that all tensors agree on."""
    values = {float(value) for tensor in tensors for value in (tensor.min(), tensor.max())}
    assert len(values) == 1, f"a mixture of checkpoints: {values}"
    return int(values.pop())


def dcp() -> None:
    import torch.distributed.checkpoint as dcp

    step = 0
    if RESUME:
        state = {"w": filled(-1), "m": filled(-2)}
        dcp.load(state, checkpoint_id=RESUME, no_dist=True)
        step = checked(list(state.values()))
    loop(
        step,
        lambda at: dcp.save({"w": filled(at), "m": filled(at)}, checkpoint_id=FOLDER / f"step-{at}", no_dist=True),
        "step-{}".format,
    )


def deepspeed_layout() -> None:
    """DeepSpeed's files in DeepSpeed's order; `latest` comes last, by a plain write."""
    import torch

    def save(at: int) -> None:
        place = FOLDER / f"global_step{at}"
        place.mkdir()
        for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            torch.save({"w": filled(at)}, place / file)
        (FOLDER / "latest").write_text(f"global_step{at}")

    step = 0
    if RESUME:
        tag = (FOLDER / "latest").read_text()
        assert tag == Path(RESUME).name, "the pointer was not restored with its checkpoint"
        step = checked([torch.load(path)["w"] for path in sorted((FOLDER / tag).iterdir())])
    loop(step, save, "global_step{}".format)


def safetensors_sharded() -> None:
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    def save(at: int) -> None:
        (FOLDER / f"step-{at}").mkdir()
        state = {f"layer{number}": filled(at) for number in range(4)}
        save_torch_state_dict(state, FOLDER / f"step-{at}", max_shard_size="20KB")

    step = 0
    if RESUME:
        shards = sorted(Path(RESUME).glob("*.safetensors"))
        assert len(shards) > 1
        step = checked([tensor for shard in shards for tensor in load_file(shard).values()])
    loop(step, save, "step-{}".format)


def accelerate() -> None:
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def save(at: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(at))
        accelerator.save_state(str(FOLDER / f"checkpoint_{at}"))

    step = 0
    if RESUME:
        accelerator.load_state(RESUME)
        step = checked([parameter.detach() for parameter in model.parameters()])
    del optimizer
    loop(step, save, "checkpoint_{}".format)


def orbax() -> None:
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(FOLDER.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=KEEP))
    step = 0
    if RESUME:
        state = manager.restore(int(Path(RESUME).name), args=ocp.args.StandardRestore())
        step = checked([state["w"], state["m"]])

    def save(at: int) -> None:
        state = {"w": jnp.full((SIZE,), float(at)), "m": jnp.full((SIZE,), float(at))}
        manager.save(at, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()

    loop(step, save, lambda _: "none: the manager removes its own")


def trainer() -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            return {"loss": ((self.layer(x) - labels) ** 2).mean()}

    class Say(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            print("resumed at", state.global_step, flush=True)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.sleep(PACE_S)

    rows = [{"x": torch.randn(4), "labels": torch.ones(1)} for _ in range(64)]
    arguments = TrainingArguments(
        output_dir=str(FOLDER),
        max_steps=min(STEPS, 10**6),
        save_steps=EVERY,
        save_total_limit=KEEP,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        enable_jit_checkpoint=True,
    )
    Trainer(model=Model(), args=arguments, train_dataset=rows, callbacks=[Say()]).train(
        resume_from_checkpoint=RESUME or None
    )


def lightning() -> None:
    import lightning as li
    import torch
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Model(li.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            time.sleep(PACE_S)
            return (self.layer(batch) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Say(Callback):
        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            print("resumed at", checkpoint["global_step"], flush=True)

    keep = ModelCheckpoint(
        dirpath=FOLDER,
        filename="{step}",
        every_n_train_steps=EVERY,
        save_top_k=KEEP,
        monitor="step",
        mode="max",
        save_last="link",
        save_on_exception=True,
    )
    data = torch.utils.data.DataLoader(torch.randn(100_000, 4), batch_size=2)
    loud = li.Trainer(
        max_steps=min(STEPS, 10**6),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keep, Say()],
    )
    loud.fit(Model(), data, ckpt_path=RESUME or None, weights_only=False)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
