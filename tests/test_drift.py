"""Losses and gradient norms of five updates of each method, as a reviewed run recorded them.

tests/parity.py compares these methods with the authors' code, but needs that code. This test finds
any later change of the numerics, in float64: it does not say which number is right. If a change is
meant, `python tests/test_drift.py` writes tests/drift.json again, and its diff is to be reviewed.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_map

sys.path[:0] = [str(Path(__file__).parents[1])]

import train
from helpers import METHOD, batch_of, make_views, tiny_model
from test_gpu_fake import CASES

RECORD = Path(__file__).with_name("drift.json")
STEPS = 5
FLAGS = {"dino": "--weight-decay-end 0.4", "stair1": "--optimizer lamb", "bam": "--clip-grad 0.3",
         "stair3": "--schedule linear", "simclr": "--optimizer lars --lr 0.01",
         "classifier": "--optimizer sgd"}


def five_updates(name):
    """Return [[loss, norm of the gradient] of each update]."""
    torch.manual_seed(0)
    model_name, settings = CASES[name]
    flags = ["--lr", "1e-3", "--warmup", "2", *FLAGS.get(name, "").split()]
    args = train.parse_args(["--method", METHOD.get(model_name, model_name), *flags])
    model = tiny_model(model_name, **settings).double().train()
    for key, buffer in model.named_buffers():
        if "pixels." in key:  # the recorded numbers are of images that no encoder normalises
            buffer.fill_(float(key.endswith("std")))
    optimizer, found = train.build_optimizer(args, model, None), []
    for step in range(STEPS):
        if model_name in ("dino", "bam"):  # positions of small views would be in float32
            batch = make_views(sizes=(16,) * (2 if name == "moco" else 4))
        else:
            batch = batch_of(model_name)
        batch = tree_map(lambda x: x.double() if x.is_floating_point() else x, batch)
        train.set_schedules(optimizer, args, step, STEPS, args.lr)
        loss = model(batch)["loss"]
        loss.backward()
        model.before_update(step)
        norm = clip_grad_norm_(model.parameters(), args.clip_grad or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        model.after_update(step, STEPS)
        found.append([loss.item(), norm.item()])
    return found


@pytest.mark.parametrize("name", CASES)
def test_five_updates_are_those_of_the_record(name):
    expected = json.loads(RECORD.read_text())[name]
    for found, recorded in zip(five_updates(name), expected, strict=True):
        assert found == pytest.approx(recorded, rel=1e-9)


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(five_updates(name))}" for name in CASES]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
