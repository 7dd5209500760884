"""Statistics over all ranks, without ranks: two threads of one process stand for two ranks.

The mean of the two ranks' losses, its gradients and the buffers must be those of one process on the
joined batch, in float64. A failing test names the objective whose statistics are of one rank only.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import common
from helpers import batch_of, tiny_model
from test_memory import OBJECTIVES

WORLD = 2


class Threads:
    """A gather of threads: joins their tensors in the order of the ranks, with gradients."""

    def __init__(self):
        self.barrier, self.parts = threading.Barrier(WORLD, timeout=20), [None] * WORLD
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
            patch.setattr(torch.distributed, "get_world_size", lambda: len(self.parts))
            return list(pool.map(as_rank, range(len(self.parts))))


# A rank of FILIP drops tokens of its own pairs alone.
MODELS = {name: row for name, row in OBJECTIVES.items() if "filip" not in name} | {
    "filip": ("sparc", dict(objective="filip", filip_keep=1.0)),
    "bam with a teacher": ("bam", dict(batch_norm=True)), "bam, zeros": ("bam", dict(mask="zero")),
    "bam, blocks": ("bam", dict(teacher=False, normalization="block")),
    "bam, no balancing": ("bam", dict(teacher=False, target="softmax"))}


def part_of(rows, rank):
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
    rows = batch_of(method, name, B=6)
    rows = tree_map(lambda x: x.double() if x.is_floating_point() else x, rows)
    alone = model(rows)
    alone["loss"].backward()

    gather = Threads()
    with monkeypatch.context() as patch:  # for the BatchNorm of the encoder's stem
        patch.setattr(common.SumOverRanks, "apply", lambda x: gather(x[None]).sum(0))
        patch.setattr(common.dist, "is_initialized", lambda: True)
        patch.setattr(common.dist, "get_world_size", lambda: WORLD)
        outputs = gather.run(lambda rank: ranks[rank](part_of(rows, rank), gather))
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
        single, halves = [common.BatchNorm(3) for _ in range(WORLD)], x.bfloat16().chunk(WORLD)
        half = torch.cat(gather.run(lambda rank: single[rank](halves[rank])))
    of_half = nn.BatchNorm2d(3)(x.bfloat16().float())  # bf16, but its statistics are fp32
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), of_half, atol=1e-4, rtol=2**-8)
    torch.testing.assert_close(found, y)
    weight = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad((found * weight).sum(), x),
                               torch.autograd.grad((y * weight).sum(), x))
    for rank in ranks:
        torch.testing.assert_close(dict(rank.named_buffers()), dict(expected.named_buffers()))
