"""Statistics over all ranks, without ranks: two threads of one process stand for two ranks.

The mean of the two ranks' losses, its gradients and the buffers must be those of one process on the
joined batch, in float64. A failing test names the equation whose statistics are of one rank only.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import bam
import common
import sparc
import sparo
import stair
from helpers import make_batch, make_views, tiny_model

WORLD = 2


class Threads:
    """A gather of threads: joins their tensors in the order of the ranks, with gradients."""

    def __init__(self, world=WORLD):
        self.barrier, self.parts = threading.Barrier(world, timeout=20), [None] * world
        self.local = threading.local()

    def __call__(self, x):
        self.parts[self.local.rank] = x
        self.barrier.wait()
        joined = torch.cat(self.parts)
        self.barrier.wait()  # else a fast thread would replace its part too early
        return joined

    def run(self, function):
        """Return [function(rank) of each rank]."""

        def as_rank(rank):
            self.local.rank = rank
            try:
                return function(rank)
            except BaseException:
                self.barrier.abort()  # else the other thread would wait
                raise

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(self.parts)) as pool:
            patch.setattr(torch.distributed, "get_rank", lambda: self.local.rank)
            return list(pool.map(as_rank, range(len(self.parts))))


def unit(x):
    return F.normalize(x, dim=-1)


def views(z):
    """z (n, k, E) -> latents (k * n, E), view after view."""
    return z.transpose(0, 1).flatten(0, 1)


def ablated(z, gather, **settings):
    """The loss of an ablation of BAM without a teacher."""
    config = bam.Settings(teacher=False, **settings)
    return bam.ablated_loss(views(z), 2, None, 2, config, gather)[0]


def batch_norm(z, gather):
    """BAM's BatchNorm of (n, k, E), whose rows are images."""
    norm = bam.BatchNorm(z.shape[-1]).double()
    return norm(z.transpose(0, 1), gather).transpose(0, 1)


def batch_means(losses, mask, gather):
    return sparc.mean_of_words(losses, mask, "batch", gather)


MASK = torch.arange(5) < torch.tensor([5, 2, 3, 0, 1, 4])[:, None]
TOKENS, PATCHES, Z = (6, 5, 4), (6, 7, 4), (6, 2, 4)  # shapes for six images
# {equation: (function of tensors and gather, shapes of the tensors or the tensors)}
# A result with the images in its rows is joined; a scalar is averaged over the ranks.
CASES = {
    "SPARO, Sec. 3.3: CLIP's loss": (
        lambda v, t, gather: sparo.clip_loss(unit(v), unit(t), 7.0, gather=gather), [(6, 4), (6, 4)]),
    "STAIR, Eq. 3": (
        lambda v, t, gather: stair.contrastive_loss(v, t, 7.0, gather=gather), [(6, 4)] * 2),
    "STAIR, Eq. 6: the mean of the global batch": (
        lambda enc, gather: stair.flops_loss(enc, gather=gather), [(6, 9)]),
    "SPARC, Eq. 1": (
        lambda v, t, gather: sparc.global_loss(v, t, 7.0, gather=gather), [(6, 4)] * 2),
    "SPARC, listing 1: words of all ranks": (batch_means, [(6,), MASK]),
    "SPARC's FILIP": (lambda t, v, mask, gather: sparc.filip_loss(
        t, v, mask, 7.0, keep=1.0, gather=gather), [TOKENS, PATCHES, MASK]),
    "SPARC's PACL": (
        lambda t, v, gather: sparc.pacl_loss(t, v, 7.0, gather=gather), [(6, 4), PATCHES]),
    "SPARC's GLoRIA": (lambda t, v, mask, gather: sparc.gloria_loss(
        t, v, mask, 7.0, gather=gather), [TOKENS, PATCHES, MASK]),
    "SPARC, D.4: Sinkhorn's columns of the prototypes": (lambda v, t, gather: sparc.prototype_loss(
        v, t, torch.linspace(-1, 1, 12).double().view(3, 4), 7.0, gather=gather),
        [(6, 4), (6, 4)]),
    "BAM, Eq. 4: Sinkhorn's columns": (
        lambda S, gather: bam.sinkhorn(S, 0.5, 3, gather=gather), [(6, 5)]),
    "BAM, Eq. 5": (lambda z, gather: bam.bam_loss(views(z), 2, gather=gather), [Z]),
    "BAM, Table 1: blocks": (lambda z, gather: ablated(z, gather, normalization="block"), [Z]),
    "BAM, Table 1: no balancing": (lambda z, gather: ablated(z, gather, target="softmax"), [Z]),
    "BAM, App. H: SimCLR's columns": (lambda z, gather: ablated(z, gather, target="onehot"), [Z]),
    "BAM, App. C: small views and a teacher": (lambda z, m, gather: bam.bam_loss(
        views(z), 4, views(m), 2, mask="zero", gather=gather), [(6, 4, 4)] * 2),
    "BAM, App. C: BatchNorm": (batch_norm, [Z]),
}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_the_equation_of_one_process(name):
    function, given = CASES[name]
    inputs = [x if torch.is_tensor(x) else torch.randn(x, dtype=torch.float64, requires_grad=True)
              for x in given]
    gather = Threads()
    parts = gather.run(lambda rank: function(*[x.chunk(WORLD)[rank] for x in inputs], gather))
    found = torch.cat(parts) if parts[0].ndim else sum(parts) / WORLD
    one = Threads(1)
    expected, = one.run(lambda rank: function(*inputs, one))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    if expected.requires_grad:
        weight, inputs = torch.randn_like(found), [x for x in inputs if x.requires_grad]
        gradients = [torch.autograd.grad((x * weight).sum(), inputs, allow_unused=True)
                     for x in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


# {name: (method, settings of its Config)}
MODELS = {
    "sparo": ("sparo", {}), "sparc": ("sparc", {}), "stair": ("stair", {}),
    "sparc, listing 1": ("sparc", dict(token_mean="batch")), "dino": ("dino", {}),
    "mgca": ("sparc", dict(objective="mgca", mgca_prototypes=5)),
    "gloria": ("sparc", dict(objective="gloria")),
    "filip": ("sparc", dict(objective="filip", filip_keep=1.0)),
    "pacl": ("sparc", dict(objective="pacl")),
    "bam with a teacher": ("bam", dict(batch_norm=True)),
    "bam alone": ("bam", dict(teacher=False)),
    "simclr": ("bam", dict(teacher=False, target="onehot")), "moco": ("bam", dict(target="moco")),
}


def batch_of(rows, rank):
    """The rows of a rank. A rank cuts its captions to the length of its longest one."""
    part = tree_map(lambda x: x.chunk(WORLD)[rank], rows)
    if "mask" in part:
        longest = int(part["mask"].sum(1).max())
        part |= {key: part[key][:, :longest] for key in ("tokens", "mask")}
    return part


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_the_model_of_one_process(name, monkeypatch):
    """Buffers are DINO's centre and the statistics of the encoder's BatchNorm."""
    method, settings = MODELS[name]
    model = tiny_model(method, **settings).double().train()
    for p in model.parameters():
        if p.requires_grad and p.ndim > 1:
            nn.init.normal_(p, std=0.3)  # so that a teacher differs from its student
    ranks = [copy.deepcopy(model) for _ in range(WORLD)]
    rows = make_views(6) if method in ("dino", "bam") else make_batch(6)
    if name == "moco":
        rows = make_views(6, (16, 16))
    rows = tree_map(lambda x: x.double() if x.is_floating_point() else x, rows)
    alone = model(rows)
    alone["loss"].backward()

    gather = Threads()
    with monkeypatch.context() as patch:  # for the BatchNorm of the encoder's stem
        patch.setattr(common.SumOverRanks, "apply", lambda x: gather(x[None]).sum(0))
        patch.setattr(common.dist, "is_initialized", lambda: True)
        patch.setattr(common.dist, "get_world_size", lambda: WORLD)
        outputs = gather.run(lambda rank: ranks[rank](batch_of(rows, rank), gather))
    loss = sum(out["loss"] for out in outputs) / WORLD
    loss.backward()
    # DINO interpolates positions for its small views in float32.
    same = dict(rtol=1e-5, atol=1e-7) if method == "dino" else dict(rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(loss, alone["loss"], **same)
    for key, p in model.named_parameters():
        if p.grad is not None:
            found = sum(rank.get_parameter(key).grad for rank in ranks)
            torch.testing.assert_close(found, p.grad, msg=lambda text: f"{key}: {text}", **same)
    for key, value in model.named_buffers():
        for rank in ranks:
            torch.testing.assert_close(rank.get_buffer(key), value, **same)
    if "effective_rank" in alone:
        for out in outputs:
            torch.testing.assert_close(out["effective_rank"], alone["effective_rank"], **same)


def test_batch_norm_of_two_ranks_equals_torchs():
    """Mean, variance, running statistics (unbiased) and gradients of the encoders' BatchNorm."""
    expected = nn.BatchNorm2d(3).double()
    x = torch.randn(6, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    y = expected(x)
    gather, ranks = Threads(), [common.BatchNorm(3).double() for _ in range(WORLD)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.SumOverRanks, "apply", lambda x: gather(x[None]).sum(0))
        patch.setattr(common.dist, "is_initialized", lambda: True)
        patch.setattr(common.dist, "get_world_size", lambda: WORLD)
        found = torch.cat(gather.run(lambda rank: ranks[rank](x.chunk(WORLD)[rank])))
    torch.testing.assert_close(found, y)
    weight = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad((found * weight).sum(), x),
                               torch.autograd.grad((y * weight).sum(), x))
    for rank in ranks:
        torch.testing.assert_close(dict(rank.named_buffers()), dict(expected.named_buffers()))
