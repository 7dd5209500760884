"""What a GPU computes, without one: fake CUDA tensors have no values, but raise where they meet a
tensor that was left on the CPU. Without a driver torch has no backward pass of them."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import common
import eval as evaluation
import sparc
import train
from helpers import make_batch, make_views, tiny_model
from test_accum import OBJECTIVES

CASES = OBJECTIVES | {  # name: model of helpers.MODELS, its settings
    "softmax": ("sparc", dict(align="softmax", h_v="residual")),
    "attpool": ("sparo", dict(readout="attpool")), "dino-cls": ("dino", dict(readout="cls")),
    "bam-blocks": ("bam", dict(normalization="block", top_k=2, mask="zero", readout="gap"))}
pytestmark = pytest.mark.skipif(not hasattr(torch._C, "_ensureCUDADeviceGuardSet"),
                                reason="this torch needs a driver for fake CUDA tensors, too")


@pytest.fixture
def fake(monkeypatch):
    """The mode that makes tensors fake; each has the value 2, autocast believes in a GPU."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    for name in ("item", "__int__"):
        monkeypatch.setattr(FakeTensor, name, lambda self: 2, raising=False)
    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.parametrize("name", CASES)
def test_objectives_leave_no_tensor_on_the_cpu(fake, name):
    method, settings = CASES[name]
    model = tiny_model(method, **settings)
    batch = make_views() if method in ("dino", "bam") else make_batch()
    with fake:
        for module in model.modules():  # model.to would move a shared embedding twice
            module._apply(lambda x: x.to("cuda"), recurse=False)
        batch = train.to_device(batch, "cuda")
        for bf16 in (False, True):
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                layer = torch.nn.Linear(2, 2, device="cuda")
                assert layer(layer.weight).dtype == (torch.bfloat16 if bf16 else torch.float32)
                outputs = model(batch) | model.diagnose(batch)
            assert {x.device.type for x in outputs.values()} == {"cuda"}
        model.after_update(0, 4)


@pytest.mark.parametrize("optimizer", train.OPTIMIZERS.values(), ids=train.OPTIMIZERS)
def test_optimizers_leave_no_tensor_on_the_cpu(fake, optimizer):
    with fake:
        weight = torch.nn.Parameter(torch.zeros(2, 2, device="cuda"))
        weight.grad = torch.zeros_like(weight)
        optimizer([weight]).step()


def test_distortions_and_metrics_leave_no_tensor_on_the_cpu(fake):
    views = common.Views([common.View(8, (0.5, 1), blur=0.5, solarize=0.5)], 8)
    batch, labels = views.collate([views(torch.rand(3, 8, 8)) for _ in range(64)]), torch.arange(64)
    with fake:
        batch, labels = train.to_device((batch, labels), "cuda")
        x = common.distort(batch)["views"][0].flatten(1)
        evaluation.knn_accuracy(x, labels, x, labels)


def test_detection_leaves_no_tensor_on_the_cpu(fake):
    with fake:
        e, x = torch.zeros(2, 9, 8, device="cuda"), torch.zeros(2, 9, 4, device="cuda")
        logits = sparc.query_logits(e, torch.zeros(5, 8, device="cuda"), x[..., :1], x[..., 1:2])
        boxes = sparc.patch_boxes(x)
        best = evaluation.best_boxes(logits, boxes, 7)
        losses = sparc.detection_losses(
            logits, boxes, torch.ones(2, 5, dtype=torch.bool, device="cuda"),
            torch.zeros(2, 0, dtype=torch.long, device="cuda"), x[:, :0],
            match=lambda costs, is_box: torch.zeros_like(is_box, dtype=torch.long))
    assert {y.device.type for y in (logits, boxes, best, losses)} == {"cuda"}
