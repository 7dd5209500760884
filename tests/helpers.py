"""What the tests share: literal references, small models and runs, image files, ranks as processes.

A literal reference computes an equation number by number, in Python loops, as the paper prints it.
Loops are slow, but a reader can compare them with the paper line by line.
"""

import contextlib
import datetime
import functools
import io
import itertools
import json
import multiprocessing
import os
import runpy
import sys
import tarfile
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import common
import eval as evaluation
import train

ROOT = Path(__file__).parents[1]

# Flags of train.py for runs that last a second.
ENCODER = "tiny:width=16,heads=2,depth="
RUN = "--batch 8 --log-every 1 --data shapes:size=16,objects=2"
SLOTS = f"--L 4 --V 4 --D 4 --image-encoder {ENCODER}2,cls=1"
SMALL = {
    "sparc": f"{RUN} --steps 6 --image-encoder {ENCODER}1 --text-encoder {ENCODER}1",
    "sparo": f"{RUN} --steps 4 {SLOTS} --text-encoder {ENCODER}2,causal=1",
    "dino": f"{RUN} --steps 4 {SLOTS} --objective dino --out-dim 20 --head-width 8"
            " --head-bottleneck 6 --local-size 8",
    "stair": f"{RUN},words=20 --steps 8 --share-1 0.25 --share-2 0.25 --warmup 1"
             f" --image-encoder {ENCODER}1 --text-encoder {ENCODER}1",
    "bam": f"{RUN} --steps 4 --image-encoder {ENCODER}1,cls=1 --projector-width 12"
           " --projector-dim 6 --local-size 8",
    "classifier": f"{RUN} --steps 4 --image-encoder {ENCODER}1,cls=1 --mixup 0.8 --cutmix 1"
                  " --smoothing 0.1 --erasing 0.25 --rand-augment --drop-path 0.1",
}
METHOD = {"dino": "sparo"}  # DINO is an objective of sparo.py
SMALL = {name: ["--method", METHOD.get(name, name), *SMALL[name].split()] for name in SMALL}
MODELS = {  # {name: (settings of the method's Config, settings of its ViT)}
    "sparc": (dict(embed_dim=8), {}),
    "sparo": (dict(L=4, V=3, D=5, embed_dim=8, bottleneck=3, codes=20), dict(cls=True)),
    "dino": (dict(objective="dino", L=4, V=3, D=5, out_dim=7, head_width=12, head_bottleneck=6),
             dict(cls=True, depth=2)),
    "stair": ({}, {}),
    "bam": (dict(projector_width=12, projector_dim=6), dict(cls=True, positions="sincos")),
    "classifier": (dict(classes=["a", "b", "c"]), dict(cls=True)),
}


def cos(a, b):
    """The cosine of two vectors (E,)."""
    return (a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt())


def softmax(values):
    """Return the softmax of a list of scalar tensors as a list."""
    e = [x.exp() for x in values]
    return [x / sum(e) for x in e]


def infonce(row, positive):
    """Return -log of the softmax of a list of scalar tensors, at the index `positive`."""
    return -(row[positive] - sum(x.exp() for x in row).log())


def mean(values):
    """Return the mean of a list of numbers or scalar tensors."""
    return sum(values) / len(values)


def assert_same_with_gradients(value, expected, inputs):
    """Assert that two float64 tensors and their gradients with respect to `inputs` are equal.

    The gradients are those of a sum with random weights, so that every element contributes.
    """
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(value)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), inputs, allow_unused=True,
                                        retain_graph=True) for x in (value, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def tiny_model(name, stage=3, vit={}, **settings):
    """Return a model of width 16 for the images of batch_of(), which have 4 x 4 patches.

    stage: the stage of STAIR. vit: settings of the ViT. settings: fields of the method's Config.
    """
    method = train.METHODS[METHOD.get(name, name)]
    known, known_vit = MODELS[name]
    size = dict(width=16, depth=1, heads=2)
    stem = ((8, 2), (8, 2))
    image = common.ViT(**dict(image_size=16, patch_size=4, stem=stem) | size | known_vit | vit)
    text = None
    if name not in ("dino", "bam", "classifier"):
        text = common.TextTransformer(vocab_size=30, context=12, **size, causal=name == "sparo")
    if name == "stair":
        nn.init.normal_(text.embedding.weight, std=0.3)
        text.special = [0, 1, 2, 3]
    config = method.Settings(**known | settings)
    complete = type("Model", (method.model_class(config), common.ModelDefaults), {})
    model = complete(config, image, text, 16, text and 16)
    if name == "stair":
        model.begin_stage(int(stage), fresh=True)
        model.strength.fill_(1.0)
    return model


def make_batch(B=4, L=9):
    """Return B pairs, B up to 8, whose captions have different lengths, at most 9."""
    lengths = torch.tensor([9, 4, 6, 3, 5, 8, 7, 4])[:B].clamp(max=L)
    return {"images": torch.randn(B, 3, 16, 16), "tokens": torch.randint(4, 30, (B, L)),
            "mask": torch.arange(L) < lengths[:, None]}


def padded(batch):
    """Return the batch's tokens and mask with 3 more positions, which hold words but are masked."""
    tokens, mask = batch["tokens"], batch["mask"]
    return (torch.cat([tokens, torch.randint(30, (len(tokens), 3))], 1),
            torch.cat([mask, torch.zeros(len(tokens), 3, dtype=torch.bool)], 1))


def make_views(B=4, sizes=(16, 16, 8, 8)):
    """Return views of B images: a list with one tensor (B, 3, size, size) for each size."""
    return {"views": [torch.randn(B, 3, size, size) for size in sizes]}


def batch_of(method, name="", B=4, L=9):
    """Return a batch of B samples for tiny_model(method). MoCo-v3, by name, has two large views."""
    if method in ("dino", "bam"):
        return make_views(B, (16, 16)) if name == "moco" else make_views(B)
    if method == "classifier":
        return {"images": torch.randn(B, 3, 16, 16), "labels": torch.arange(B) % 3}
    return make_batch(B, L)


def picture(width=8, height=8, mode="RGB", format="JPEG", value=None):
    """Return the bytes of an image file, whose pixels are noise, or the colour `value`."""
    shape = (height, width) if mode in ("L", "P") else (height, width, len(mode))
    pixels = np.random.default_rng(0).integers(0, 256, shape)
    if value is not None:
        pixels = np.broadcast_to(value, shape)
    file = io.BytesIO()
    image = Image.frombytes(mode, (width, height), pixels.astype(np.uint8).tobytes())
    image.save(file, format)
    return file.getvalue()


def write_files(directory, files):
    """Write {name: bytes, text, or a dict {name: content} of a tar file} below the directory."""
    for name, data in files.items():
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, dict):
            write_tar(path, data)
        else:
            path.write_bytes(data.encode() if isinstance(data, str) else data)


def write_tar(path, members):
    """Write {name: bytes or text} as a tar file and return its path. A list of pairs may have a
    name twice."""
    with tarfile.open(path, "w") as tar:
        for name, data in members.items() if isinstance(members, dict) else members:
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def write_table(directory, n, broken=()):
    """Write n images and a table of their captions "n0", "n1", ...; return the path of the table.

    broken: the numbers of images whose file holds no image.
    """
    rows = "".join(f"{i}.jpg,n{i}\n" for i in range(n))
    write_files(directory, {"table.csv": "filepath,title\n" + rows})
    write_files(directory, {f"{i}.jpg": b"no image" if i in broken else picture()
                            for i in range(n)})
    return str(directory / "table.csv")


def write_shards(directory, sizes, broken=(), uncaptioned=(), labels=None):
    """Write one shard of each size and return the SPEC of all of them.

    The samples are numbered across the shards: sample i has the caption "n<i>".
    broken, uncaptioned: numbers of samples without an image, or with an empty caption.
    labels: the number of classes. Without it the samples have no labels.
    """
    number = itertools.count()
    for s, size in enumerate(sizes):
        members = {}
        for i in itertools.islice(number, size):
            members[f"{i:05}.jpg"] = b"no image" if i in broken else picture()
            members[f"{i:05}.txt"] = "" if i in uncaptioned else f"n{i}"
            if labels:
                members[f"{i:05}.cls"] = str(i % labels)
        write_tar(directory / f"{s:03}.tar", members)
    return f"{directory}/{{000..{len(sizes) - 1:03}}}.tar"


@contextlib.contextmanager
def shapes_alone():
    """Tensors that are made inside have shapes and no values, as torch's device "meta" gives them.
    Without initial values a module is built in a fifth of the time."""
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        for name in vars(nn.init):
            if name.endswith("_") and not name.startswith("_"):
                patch.setattr(nn.init, name, lambda weights, *_, **__: weights)
        yield


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive. `peak` is the largest count so far."""

    def __init__(self, tensors=()):
        super().__init__()
        self.storages, self.bytes, self.peak = weakref.WeakSet(), 0, 0
        self.add(tensors)

    def add(self, tensors):
        """Count the storages of these tensors until they are freed."""
        for x in tensors:
            storage = x.untyped_storage()
            if storage not in self.storages:
                self.storages.add(storage)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.bytes)

    def free(self, n):
        """Forget n bytes."""
        self.bytes -= n

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.add(x for x in tree_leaves(out) if torch.is_tensor(x))
        return out


@functools.cache
def rank_process(rank):
    """Return the process that is this rank in every test: a fork of pytest before the first."""
    return multiprocessing.get_context("fork").Pool(1, initializer=print_nothing)


def print_nothing():  # output would interrupt pytest's
    sys.stdout = open(os.devnull, "w")


def as_rank(rank, directory, world, function, arguments):
    """Join a group of `world` ranks, call the function, and save what it returns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank,
                            world_size=world, timeout=datetime.timedelta(minutes=5))
    try:
        torch.save(function(rank, *arguments), directory / f"rank{rank}.pt")
        dist.barrier()  # without it torch 2.6 may hang when one rank ends before another
    finally:
        dist.destroy_process_group()


def run_ranks(directory, function, world=2, *arguments):
    """Return [function(rank, *arguments) of each rank]. The ranks are processes joined by gloo.

    The function stands at the top level of a test module, where a process can import it.
    """
    (directory / "store").unlink(missing_ok=True)
    running = []
    for rank in range(world):
        task = rank, directory, world, function, arguments
        running.append(rank_process(rank).apply_async(as_rank, task))
    for result in running:
        result.get(timeout=900)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(world)]


def train_models(rank, directory, world, build, names):
    """Return {name: (outputs, gradients, state)} of the saved models for this rank's rows."""
    results = {}
    for name in names:
        model = build(name)
        model.load_state_dict(torch.load(directory / f"{name}.pt"))
        batch = tree_map(lambda x: x.chunk(world)[rank], torch.load(directory / "batch.pt"))
        if "mask" in batch:  # a rank cuts its captions to the length of its longest one
            longest = int(batch["mask"].sum(1).max())
            batch |= {key: batch[key][:, :longest] for key in ("tokens", "mask")}
        parallel = DistributedDataParallel(model)  # needs a name: without one its hooks are freed
        out = parallel(batch)  # Model's own gather
        out["loss"].backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
        out = {key: value.detach() for key, value in out.items()}
        results[name] = out, gradients, model.state_dict()
    return results


def on_ranks(directory, build, models, batch, world=2):
    """Return {name: [(outputs, gradients, state after the forward pass) of each rank]}.

    models: {name: model}. build(name), at the top level of a test module, builds one again.
    batch: tensors in dicts or lists, whose rows are divided among the ranks.
    """
    torch.save(batch, directory / "batch.pt")
    for name, model in models.items():
        torch.save(model.state_dict(), directory / f"{name}.pt")
    ranks = run_ranks(directory, train_models, world, directory, world, build, list(models))
    return {name: [rank[name] for rank in ranks] for name in models}


def assert_one_process(ranks, model, loss, tolerance=1e-5):
    """Assert that the mean of the ranks' losses is `loss`, which the model has in one process, and
    that each rank's gradients, which DDP averaged, are its gradients.

    ranks: a value of what on_ranks returns.
    """
    loss.backward()
    mean = sum(out["loss"].item() for out, *_ in ranks) / len(ranks)
    assert mean == pytest.approx(loss.item(), abs=tolerance)
    for _, gradients, _ in ranks:
        expected = {name: model.get_parameter(name).grad for name in gradients}
        torch.testing.assert_close(gradients, expected, rtol=10 * tolerance, atol=tolerance)


def run_program(output, file, flags):
    """Run `python FILE FLAGS` in a process group of its own. Its output is ASCII without a buffer.

    output: the name of a file or the number of an open one.
    """
    os.setsid()
    sys.argv = [file, *map(str, flags)]
    stream = io.TextIOWrapper(open(output, "wb", 0), "ascii", write_through=True)
    sys.stdout = sys.stderr = stream
    runpy.run_path(str(ROOT / file), run_name="__main__")


def start_program(output, file, flags):
    """Start a program as run_program does, and return its process: a fork, which has torch."""
    process = multiprocessing.get_context("fork").Process(target=run_program,
                                                          args=(output, file, flags))
    process.start()
    return process


def train_alone(flags):
    """Train in this process, without the evaluation at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "evaluate_and_show", lambda *arguments: None)
        train.main([str(flag) for flag in flags])


def train_until(step, flags):
    """Train for `step` steps, then stop as a signal would stop the run."""
    calls = itertools.count(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Stop, "agreed", lambda *_: next(calls) == step)
        train.main([str(flag) for flag in flags])


def train_on_rank(rank, flags, step=None):
    """Train as a process of run_ranks, without the evaluation. Return what train() returns.

    step: as in train_until.
    """
    args, calls = train.parse_args([str(flag) for flag in flags]), itertools.count(1)
    Path(args.out).mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "evaluate_and_show", lambda *arguments: None)
        if step:
            patch.setattr(train.Stop, "agreed", lambda *_: next(calls) == step)
        return train.train(args, None if rank else Path(args.out), torch.device("cpu"))


def read_log(run):
    """Return the lines of log.jsonl: one dict for each logged step."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def weights(run, name="last.pt"):
    """Return the model's state dict in a checkpoint of the run, faster than weights_only would."""
    return torch.load(run / name, weights_only=False)["model"]


def assert_same_weights(a, b):
    """Assert that the last weights of two runs are equal bit for bit."""
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
