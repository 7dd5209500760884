"""What the tests share: literal references, tiny models and runs, ranks as processes."""

import datetime
import functools
import io
import itertools
import json
import multiprocessing
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

# Flags of runs that take a second.
TOWER = "tiny:width=16,heads=2,depth="
RUN = "--batch 8 --log-every 1 --data shapes:size=16,objects=2"
SLOTS = f"--L 4 --V 4 --D 4 --image-encoder {TOWER}2,cls=1"
SMALL = {
    "sparc": f"{RUN} --steps 6 --image-encoder {TOWER}1 --text-encoder {TOWER}1",
    "sparo": f"{RUN} --steps 4 {SLOTS} --text-encoder {TOWER}2,causal=1",
    "dino": f"{RUN} --steps 4 {SLOTS} --objective dino --out-dim 20 --head-width 8"
            " --head-bottleneck 6 --local-size 8",
    "stair": f"{RUN},words=20 --steps 8 --share-1 0.25 --share-2 0.25 --warmup 1"
             f" --image-encoder {TOWER}1 --text-encoder {TOWER}1",
    "bam": f"{RUN} --steps 4 --image-encoder {TOWER}1,cls=1 --projector-width 12"
           " --projector-dim 6 --local-size 8",
    "classifier": f"{RUN} --steps 4 --image-encoder {TOWER}1,cls=1 --mixup 0.8 --cutmix 1"
                  " --smoothing 0.1 --erasing 0.25 --rand-augment --drop-path 0.1",
}
METHOD = {"dino": "sparo"}  # its name in METHODS
SMALL = {name: ["--method", METHOD.get(name, name), *SMALL[name].split()] for name in SMALL}
MODELS = {  # settings of the method's Config, and of its ViT
    "sparc": (dict(embed_dim=8), {}),
    "sparo": (dict(L=4, V=3, D=5, embed_dim=8, bottleneck=3, codes=20), dict(cls=True)),
    "dino": (dict(objective="dino", L=4, V=3, D=5, out_dim=7, head_width=12, head_bottleneck=6),
             dict(cls=True, depth=2)),
    "stair": ({}, {}),
    "bam": (dict(projector_width=12, projector_dim=6), dict(cls=True, positions="sincos")),
    "classifier": (dict(classes=["a", "b", "c"]), dict(cls=True)),
}


def cos(a, b):
    """Cosine of two vectors (E,)."""
    return (a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt())


def softmax(values):
    """A list of scalar tensors -> the list of their softmax."""
    e = [x.exp() for x in values]
    return [x / sum(e) for x in e]


def infonce(row, positive):
    """-log of the softmax of a list of scalar tensors at `positive`."""
    return -(row[positive] - sum(x.exp() for x in row).log())


def mean(values):
    return sum(values) / len(values)


def assert_same_with_gradients(value, expected, inputs):
    """Two float64 tensors are equal, and their gradients by the inputs, weighted at random."""
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(value)
    ours, theirs = (torch.autograd.grad((x * weight).sum(), inputs, allow_unused=True,
                                        retain_graph=True) for x in (value, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def tiny_model(name, stage=3, vit={}, **settings):
    """A model of width 16 with a grid of 4 x 4 patches, for make_batch() or, of dino and bam, for
    make_views(). vit: settings of its image encoder; settings: of its Config; stage: of STAIR."""
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
    config = method.Config(**known | settings)
    complete = type("Model", (method.model_class(config), common.ModelDefaults), {})
    model = complete(config, image, text, 16, text and 16)
    if name == "stair":
        model.begin_stage(int(stage), fresh=True)
        model.strength.fill_(1.0)
    return model


def make_batch(B=4, L=9):
    """Images (B, 3, 16, 16), tokens (B, L) and their mask (B, L), for B up to 8."""
    lengths = torch.tensor([9, 4, 6, 3, 5, 8, 7, 4])[:B].clamp(max=L)
    return {"images": torch.randn(B, 3, 16, 16), "tokens": torch.randint(4, 30, (B, L)),
            "mask": torch.arange(L) < lengths[:, None]}


def padded(batch, n=3):
    """The batch's tokens and mask with n positions more, of any words, that are masked."""
    tokens, mask = batch["tokens"], batch["mask"]
    B = len(tokens)
    return (torch.cat([tokens, torch.randint(30, (B, n))], 1),
            torch.cat([mask, torch.zeros(B, n, dtype=torch.bool)], 1))


def make_views(B=4, sizes=(16, 16, 8, 8)):
    """Views of B images: a list of (B, 3, size, size)."""
    return {"views": [torch.randn(B, 3, size, size) for size in sizes]}


def picture(width=8, height=8, mode="RGB", format="JPEG", value=None):
    """Bytes of an image: noise, or of one value."""
    shape = (height, width) if mode in ("L", "P") else (height, width, len(mode))
    pixels = np.random.default_rng(0).integers(0, 256, shape)
    if value is not None:
        pixels = np.broadcast_to(value, shape)
    file = io.BytesIO()
    image = Image.frombytes(mode, (width, height), pixels.astype(np.uint8).tobytes())
    image.save(file, format)
    return file.getvalue()


def write_files(directory, files):
    """{name: bytes, text, or a dict of a tar file's members} -> files below the directory."""
    for name, data in files.items():
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, dict):
            write_tar(path, data)
        else:
            path.write_bytes(data.encode() if isinstance(data, str) else data)


def write_tar(path, members):
    """{name: bytes or text} -> a tar file."""
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def write_table(directory, n, broken=()):
    """n images with captions; of the broken ones the file is no image."""
    rows = "".join(f"{i}.jpg,n{i}\n" for i in range(n))
    write_files(directory, {"table.csv": "filepath,title\n" + rows})
    for i in range(n):
        (directory / f"{i}.jpg").write_bytes(b"no image" if i in broken else picture())
    return str(directory / "table.csv")


def write_shards(directory, sizes, broken=(), uncaptioned=(), labels=None):
    """One shard a size, the samples numbered through; returns the SPEC. labels: how many."""
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


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all tensors while they live: `peak` is what an allocator needs."""

    def __init__(self, tensors=()):
        super().__init__()
        self.sizes, self.peak = weakref.WeakKeyDictionary(), 0  # of storages
        self.add(tensors)

    def add(self, tensors):
        for x in tensors:
            self.sizes[x.untyped_storage()] = x.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.sizes.values()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.add(x for x in tree_leaves(out) if torch.is_tensor(x))
        return out


@functools.cache
def rank_process(rank):
    """The process that is this rank in every test: it imports torch once."""
    return multiprocessing.get_context("spawn").Pool(1)


def as_rank(rank, directory, world, function, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank,
                            world_size=world, timeout=datetime.timedelta(minutes=5))
    try:
        torch.save(function(rank, *arguments), directory / f"rank{rank}.pt")
        dist.barrier()  # else torch 2.6 may hang where one rank ends before another
    finally:
        dist.destroy_process_group()


def run_ranks(directory, function, world=2, *arguments):
    """[function(rank, *arguments) of each rank], in processes joined by gloo. `function` stands at
    the top of a test module; it returns tensors, numbers, strings, or lists and dicts of these."""
    (directory / "store").unlink(missing_ok=True)
    running = []
    for rank in range(world):
        task = rank, directory, world, function, arguments
        running.append(rank_process(rank).apply_async(as_rank, task))
    for result in running:
        result.get(timeout=900)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(world)]


def train_models(rank, directory, world, build, names):
    """Loss and gradients of each saved model for this rank's rows of the saved batch."""
    results = {}
    for name in names:
        model = build(name)
        model.load_state_dict(torch.load(directory / f"{name}.pt"))
        batch = tree_map(lambda x: x.chunk(world)[rank], torch.load(directory / "batch.pt"))
        if "mask" in batch:  # each rank cuts to its own longest caption
            longest = int(batch["mask"].sum(1).max())
            batch |= {key: batch[key][:, :longest] for key in ("tokens", "mask")}
        parallel = DistributedDataParallel(model)  # kept by name: its gradient hooks die with it
        out = parallel(batch, common.gather)
        out["loss"].backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
        out = {key: value.detach() for key, value in out.items()}
        results[name] = out, gradients, model.state_dict()
    return results


def on_ranks(directory, build, models, batch, world=2):
    """{name: [(outputs, gradients, state after the forward pass) of each rank]}.

    models: {name: model}; build(name), a function at the top of a test module, makes each anew.
    batch: tensors whose rows are dealt to the ranks, in dicts or lists.
    """
    torch.save(batch, directory / "batch.pt")
    for name, model in models.items():
        torch.save(model.state_dict(), directory / f"{name}.pt")
    ranks = run_ranks(directory, train_models, world, directory, world, build, list(models))
    return {name: [rank[name] for rank in ranks] for name in models}


def assert_one_process(ranks, model, loss, tolerance=1e-5):
    """The mean loss of the ranks, as on_ranks gives them, and each one's gradients are those of
    `loss`, which the model has in one process."""
    loss.backward()
    mean = sum(out["loss"].item() for out, *_ in ranks) / len(ranks)
    assert mean == pytest.approx(loss.item(), abs=tolerance)
    for _, gradients, _ in ranks:
        for name, gradient in gradients.items():
            expected = model.get_parameter(name).grad
            error = (gradient - expected).abs().max()
            assert error <= tolerance * (1 + expected.abs().max()), name


def train_alone(flags):
    """Train, without the evaluation at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "evaluate_and_show", lambda *arguments: None)
        train.main([str(flag) for flag in flags])


def train_until(step, flags):
    """Train, and stop as after a signal when this call has made so many steps."""
    calls = itertools.count(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Stop, "agreed", lambda self, device: next(calls) == step)
        train.main([str(flag) for flag in flags])


def train_on_rank(rank, flags, step=None):
    """Train as a process of run_ranks, without the evaluation; step: as in train_until."""
    args, calls = train.parse_args([str(flag) for flag in flags]), itertools.count(1)
    Path(args.out).mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "evaluate_and_show", lambda *arguments: None)
        if step:
            patch.setattr(train.Stop, "agreed", lambda self, device: next(calls) == step)
        return train.train(args, None if rank else Path(args.out), torch.device("cpu"))


def read_log(run):
    """log.jsonl: one dict per logged step."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def weights(run, name="last.pt"):
    """The model's state dict in a checkpoint of the run."""
    return common.load_checkpoint(run / name)["model"]


def assert_same_weights(a, b):
    """The last weights of two runs are the same, bit for bit."""
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
