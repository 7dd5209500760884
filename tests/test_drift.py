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
from helpers import METHOD, make_batch, make_views, tiny_model

RECORD = Path(__file__).with_name("drift.json")
STEPS = 5
# {name: (model of helpers.MODELS, settings of its Config, flags of train.py)}
RUNS = {
    "sparo": ("sparo", {}, ""), "clip": ("sparo", dict(readout="cls"), ""),
    "gap": ("sparo", dict(readout="gap"), ""), "dino": ("dino", {}, "--weight-decay-end 0.4"),
    "stair 1": ("stair", {}, "--optimizer lamb"), "stair 2": ("stair", {}, ""),
    "stair 3": ("stair", {}, "--schedule linear"), "sparc": ("sparc", dict(lambda_f=2.0), ""),
    "filip": ("sparc", dict(objective="filip", filip_keep=0.5), ""),
    "pacl": ("sparc", dict(objective="pacl"), ""),
    "gloria": ("sparc", dict(objective="gloria"), ""),
    "mgca": ("sparc", dict(objective="mgca", mgca_prototypes=5), ""),
    "bam": ("bam", {}, "--clip-grad 0.3"), "bam alone": ("bam", dict(teacher=False), ""),
    "blocks": ("bam", dict(teacher=False, normalization="block", mask="zero"), ""),
    "simclr": ("bam", dict(teacher=False, target="onehot"), "--optimizer lars --lr 0.01"),
    "moco": ("bam", dict(target="moco", projector_dim=6), ""),
    "classifier": ("classifier", {}, "--optimizer sgd"),
}


def five_updates(name):
    """Return [[loss, norm of the gradient] of each update]."""
    torch.manual_seed(0)
    model_name, settings, flags = RUNS[name]
    method = METHOD.get(model_name, model_name)
    args = train.parse_args(["--method", method, "--lr", "1e-3", "--warmup", "2", *flags.split()])
    stage = int(name[-1]) if model_name == "stair" else 3
    model = tiny_model(model_name, stage=stage, **settings).double().train()
    for name, buffer in model.named_buffers():
        if "pixels." in name:  # the recorded numbers are of images that no encoder normalises
            buffer.fill_(float(name.endswith("std")))
    optimizer, found = train.build_optimizer(args, model, None), []
    for step in range(STEPS):
        if model_name in ("dino", "bam"):
            batch = make_views(4, sizes=(16,) * (2 if settings.get("target") == "moco" else 4))
        else:
            batch = make_batch() | {"labels": torch.tensor([0, 1, 2, 1])}
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


@pytest.mark.parametrize("name", RUNS)
def test_five_updates_are_those_of_the_record(name):
    expected = json.loads(RECORD.read_text())[name]
    for found, recorded in zip(five_updates(name), expected, strict=True):
        assert found == pytest.approx(recorded, rel=1e-9)


def test_the_record_has_each_run():
    assert json.loads(RECORD.read_text()).keys() == RUNS.keys()


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(five_updates(name))}" for name in RUNS]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
