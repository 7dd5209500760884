"""What a GPU computes, without one: fake CUDA tensors have no values, but raise where a tensor that
was left on the CPU meets them. Backward passes need a driver, older torch needs it for all."""

import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import common
import eval as evaluation
import train
from helpers import make_batch, make_views, tiny_model
from test_accum import OBJECTIVES

CASES = OBJECTIVES | {  # name: model of helpers.MODELS, its settings
    **{align: ("sparc", dict(align=align, h_v="residual")) for align in ("dense", "softmax")},
    **{name: ("sparo", dict(readout=name)) for name in ("cls", "attpool", "bottleneck")},
    "slot by slot": ("sparo", dict(readout="attpool", slot_norm=True, slot_projection=True)),
    "dino-cls": ("dino", dict(readout="cls")), "dino-gap": ("dino", dict(readout="gap")),
    "bam-blocks": ("bam", dict(normalization="block", top_k=2, mask="zero", readout="gap")),
    "bam-softmax": ("bam", dict(target="softmax", mask="none", vit=dict(drop_path=0.5)))}
IMAGES = "encode_image encode_patches image_slots head_maps boxes probe_features"  # members of models
TEXTS = "encode_text encode_tokens text_slots encode_words"
pytestmark = pytest.mark.skipif(not hasattr(torch._C, "_ensureCUDADeviceGuardSet"),
                                reason="fake CUDA tensors of this torch need a driver")


@pytest.fixture
def fake(monkeypatch):
    """A mode in which tensors are fake, each has the value 2, and autocast believes in a GPU."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    for name, value in dict(item=2, __int__=2, backward=None).items():
        monkeypatch.setattr(FakeTensor, name, lambda self, value=value: value, raising=False)
    return FakeTensorMode(allow_non_fake_inputs=True)


def on_gpu(model):
    """model.to("cuda"), but each module once: fake tensors cannot be moved twice."""
    for module in model.modules():
        module._apply(lambda x: x.to("cuda"), recurse=False)
    return model


@pytest.mark.parametrize("name", CASES)
def test_models_leave_no_tensor_on_the_cpu(fake, name):
    method, settings = CASES[name]
    model = tiny_model(method, **settings)
    batch = make_views() if method in ("dino", "bam") else make_batch()
    with fake:
        batch = train.to_device(batch, "cuda")
        on_gpu(model)
        for bf16 in (False, True):
            model.train()
            with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
                layer = torch.nn.Linear(2, 2, device="cuda")
                assert layer(layer.weight).dtype == (torch.bfloat16 if bf16 else torch.float32)
                outputs = model(batch)
                outputs |= model.eval().diagnose(batch)
            assert {x.device.type for x in outputs.values()} == {"cuda"}
        model.before_update(0)
        model.after_update(0, 4)
        model.begin_stage(2, fresh=True)


@pytest.mark.parametrize("name", ["sparc", "filip", "pacl", "sparo", "dino", "stair3", "bam"])
def test_encoders_leave_no_tensor_on_the_cpu(fake, name):
    method, settings = CASES[name]
    model, (images, tokens, mask) = tiny_model(method, **settings), make_batch().values()
    with fake:
        images, tokens, mask = (x.to("cuda") for x in (images, tokens, mask))
        on_gpu(model)
        for member in filter(None, [getattr(model, member) for member in IMAGES.split()]):
            member(images)
        for member in filter(None, [getattr(model, member) for member in TEXTS.split()]):
            member(tokens, mask)
        for member in filter(None, [model.align_words, model.attend]):
            member(images, tokens, mask)
        if model.similarity:
            model.similarity(model.encode_patches(images), model.encode_tokens(tokens, mask))
        if model.word_maps:
            model.word_maps(images, torch.tensor([5, 6], device="cuda"))


@pytest.mark.parametrize("name", train.OPTIMIZERS)
def test_optimizers_leave_no_tensor_on_the_cpu(fake, name):
    model = tiny_model("sparc")
    with fake:
        for p in on_gpu(model).parameters():
            p.grad = torch.zeros_like(p)
        settings = types.SimpleNamespace(optimizer=name, weight_decay=1, beta2=0.9, adam_eps=1e-6)
        optimizer = train.build_optimizer(settings, model, None)
        optimizer.step()


def test_distortions_leave_no_tensor_on_the_cpu(fake):
    views = common.Views([common.View(8, (0.5, 1), blur=0.5, solarize=0.5)] * 2, 8)
    batch = views.collate([views(torch.rand(3, 8, 8)) for _ in range(4)])
    with fake:
        batch = common.distort(train.to_device(batch, "cuda"))
        assert [x.device.type for x in batch["views"]] == ["cuda", "cuda"]


def test_evaluation_leaves_no_tensor_on_the_cpu(fake, monkeypatch):
    monkeypatch.setattr(torch.nn.Linear, "to", lambda self, device: torch.nn.Linear(
        self.in_features, self.out_features, device=device))
    x, labels = torch.rand(80, 6), torch.arange(80) % 3
    with fake:
        x, labels = x.to("cuda"), labels.to("cuda")
        evaluation.knn_accuracy(x, labels, x, labels)
        evaluation.adamw_probe(x, labels, epochs=1)
        evaluation.sgd_probe(lambda: (x.cpu(), labels.cpu()), x, labels, 3, epochs=1)
