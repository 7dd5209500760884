"""DINO: the loss and the head against literal references, the center, the teacher and the views.

BAM's teacher is a moving average, too, so the tests of the teacher cover both methods.
"""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import common
import sparo
import train
from helpers import SMALL, assert_same_with_gradients, cos, make_views, tiny_model, train_alone

K = 7
small_model = functools.partial(tiny_model, "dino")
make_batch = functools.partial(make_views, sizes=(16, 16, 8, 8, 8))  # two large views come first


def literal_loss(student, teacher, center, tau_s, tau_t):
    """DINO's loss: cross entropy for each pair of different views and each image."""
    losses = []
    for i, t in enumerate(teacher):
        for j, s in enumerate(student):
            if i != j:
                for b in range(len(t)):
                    p = [math.exp(x) for x in ((t[b] - center) / tau_t).tolist()]
                    log_z = torch.stack([(x / tau_s).exp() for x in s[b]]).sum().log()
                    terms = [p[k] / sum(p) * (s[b, k] / tau_s - log_z) for k in range(len(p))]
                    losses.append(-sum(terms))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("G, V", [(2, 2), (2, 5), (1, 3), (3, 4)])
def test_loss_and_gradient_equal_literal_loops(G, V):
    student = torch.randn(V, 3, K, dtype=torch.double, requires_grad=True)
    teacher, center = torch.randn(G, 3, K).double().requires_grad_(), torch.randn(K).double()
    loss, p_t = sparo.dino_loss(student, teacher, center, 0.3, 0.2)
    expected = literal_loss(student, teacher, center, 0.3, 0.2)
    assert_same_with_gradients(loss, expected, [student])
    assert torch.autograd.grad(loss, teacher, allow_unused=True) == (None,)
    torch.testing.assert_close(p_t.sum(-1), torch.ones(G, 3, dtype=torch.double))


def test_head_equals_its_layers_written_out():
    head, x = sparo.DinoHead(5, K, 8, 6).double(), torch.randn(3, 5, dtype=torch.double)
    nn.init.normal_(head.mlp[2].bias)
    h = x
    for layer in (head.mlp[0], head.mlp[2]):
        h = h @ layer.weight.T + layer.bias
        h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    h = h @ head.mlp[4].weight.T + head.mlp[4].bias
    rows = [torch.stack([cos(row, w) for w in head.last.weight]) for row in h]
    torch.testing.assert_close(head(x), torch.stack(rows))
    with torch.autocast("cpu", torch.bfloat16):
        assert head.float()(x.float()).dtype == torch.float32


def test_frozen_last_layer_starts_with_a_fresh_optimizer_state():
    model = small_model(freeze_last=2)
    optimizer = torch.optim.AdamW(model.student().parameters(), lr=0.01, weight_decay=0.5)
    last = model.head.last.weight
    for step in range(3):
        before = last.detach().clone()
        optimizer.zero_grad()
        model(make_batch())["loss"].backward()
        model.before_update(step)
        assert (last.grad is None) == (step < 2)
        optimizer.step()
        assert torch.equal(last, before) == (step < 2)
    assert optimizer.state[last]["step"] == 1  # not 3: the bias correction counts from here


def test_model_loss_equals_the_loss_of_views_encoded_one_by_one():
    """The model encodes all views of one size together. BatchNorm would let one change another.
    The center follows the teacher's mean output, in training alone."""
    model, batch = small_model(vit=dict(stem=None)), make_batch()  # no BatchNorm

    def logits(network, views):
        encoder, readout, head = network
        return torch.stack([head(readout(encoder(x)).flatten(1)) for x in views])

    center = model.center.normal_(std=0.1).clone()
    for p in model.teacher.parameters():  # so that the teacher differs from the student
        nn.init.normal_(p, std=0.3)
    student = logits(model.student(), batch["views"])
    teacher = logits(model.teacher, batch["views"][:2]).detach()
    expected, p_t = sparo.dino_loss(student, teacher, center, 0.1, 0.04)  # C.2
    out = model.eval()(batch)
    assert torch.equal(model.center, center)
    torch.testing.assert_close(out["loss"], expected)
    torch.testing.assert_close(out["entropy"], -(p_t * p_t.log()).sum(-1).mean())
    mean = p_t.mean((0, 1))
    torch.testing.assert_close(out["entropy_mean"], -(mean * mean.log()).sum())
    torch.testing.assert_close(model.train()(batch)["loss"], expected)
    torch.testing.assert_close(model.center, 0.9 * center + 0.1 * teacher.mean((0, 1)))


@pytest.mark.parametrize("name, settings", [
    ("dino", {}), ("bam", {}), ("bam", dict(target="moco"))])
def test_teacher_is_a_moving_average_whose_momentum_grows_to_1(name, settings):
    model = tiny_model(name, ema=0.9, **settings)
    expected = [p.clone() for p in model.teacher.parameters()]
    assert all(map(torch.equal, expected, model.student().parameters()))
    assert not any(p.requires_grad for p in model.teacher.parameters())
    for step in range(4):
        for p in model.student().parameters():
            nn.init.normal_(p)
        model.after_update(step, 4)
        # BAM's code moves the teacher as a step begins, DINO's as it ends
        k = step + 1 if name == "bam" else step
        m = 1 - 0.1 * (1 + math.cos(math.pi * k / 4)) / 2
        expected = [m * a + (1 - m) * b for a, b in zip(expected, model.student().parameters())]
        torch.testing.assert_close(list(model.teacher.parameters()), expected)
    assert m > 0.98


@pytest.mark.parametrize("name", ["dino", "bam"])
def test_teacher_drops_no_rows_and_its_batch_norm_follows_its_own_images(name):
    """A moving average of parameters alone would leave its statistics at 0 and 1."""
    norms = nn.modules.batchnorm._BatchNorm
    for mode in (True, False):
        model = tiny_model(name) if mode else tiny_model(name).eval()  # a new model trains
        for module in model.teacher.modules():
            assert module.training == (mode and isinstance(module, norms))
        assert all(module.training == mode for module in model.image_encoder.modules())
    model = tiny_model(name)
    model(make_views(6, (16, 16)))  # the student begins with the teacher's weights
    for network in (model.teacher[0], model.image_encoder):
        assert network.patch_embed[0][1].running_mean.abs().min() > 0
    torch.testing.assert_close(dict(model.teacher[0].named_buffers()),
                               dict(model.image_encoder.named_buffers()))


def test_the_teacher_encodes_images_in_an_evaluation():
    model, images = small_model().eval(), torch.randn(3, 3, 16, 16)
    nn.init.normal_(model.image_encoder.pos)  # changes only the student
    encoder, readout, _ = model.teacher
    y = readout(encoder(images)).flatten(1)
    torch.testing.assert_close(model.encode_image(images), nn.functional.normalize(y, dim=1))
    torch.testing.assert_close(model.head_maps(images), encoder.cls_attention(images))
    assert model.evaluation_encoder() is encoder


@pytest.mark.parametrize("readout, replace, depth, layers, cls", [
    ("cls", True, 6, 4, True), ("cls", True, 2, 2, True), ("gap", True, 6, 4, True),
    ("sparo", True, 5, 3, True), ("sparo", True, 1, 1, True), ("sparo", False, 6, 4, True),
    ("sparo", True, 5, 3, False), ("gap", True, 6, 4, False)])
def test_probe_features_join_the_last_four_blocks(readout, replace, depth, layers, cls):
    """Each block gives its [CLS] token, or the mean of its patches if there is no [CLS].

    The output of the readout replaces that of the last block. With replace_block SPARO's slots are
    the fourth block. depth: blocks of the encoder. layers: how many of them the features use.
    """
    settings = dict(vit=dict(stem=None, depth=depth, cls=cls), replace_block=replace)
    model, images = small_model(readout=readout, **settings).eval(), torch.randn(2, 3, 16, 16)
    encoder, head, _ = model.teacher
    outputs = []
    for block in encoder.blocks:
        block.register_forward_hook(lambda *call: outputs.append(encoder.norm(call[-1])))
    features = model.probe_features(images)
    expected = [x[:, 0] if cls else x.mean(1) for x in outputs[:depth][-layers:]]
    if not (readout == "sparo" and replace):
        expected.pop()
    x = outputs[depth - 1]
    expected.append({"cls": x[:, 0], "gap": x.mean(1), "sparo": head(x).flatten(1)}[readout])
    torch.testing.assert_close(features, torch.cat(expected, 1))


def test_probe_features_of_a_resnet_are_the_output_of_its_readout():
    config = small_model().config
    encoder = common.ResNet(64, blocks=(1, 1, 1, 1))
    model, images = sparo.Dino(config, encoder, None, 2048, None).eval(), torch.randn(2, 3, 64, 64)
    expected = model.teacher[1](model.teacher[0](images)).flatten(1)
    torch.testing.assert_close(model.probe_features(images), expected)
    views = [torch.randn(2, 3, size, size) for size in (64, 64, 32)]
    assert torch.isfinite(model.train()({"views": views})["loss"])


@pytest.mark.parametrize("crops", [0, 8])
def test_views_are_those_of_dino(crops):
    settings = sparo.Settings(objective="dino", local_crops=crops)
    args = SimpleNamespace(**vars(settings), image_size=224)
    large, small = dict(size=224, scale=(0.4, 1.0)), dict(size=96, scale=(0.05, 0.4), blur=0.5)
    assert sparo.views(args) == [
        large | dict(blur=1.0), large | dict(blur=0.1, solarize=0.2), *(crops * [small])]
    assert sparo.views(sparo.Settings(objective="clip")) is None


def test_a_gradient_of_the_frozen_last_layer_is_not_in_the_norm(tmp_path, monkeypatch):
    counts, clip = [], train.clip_grad_norm_

    def count(parameters, most):
        parameters = list(parameters)
        counts.append(sum(p.grad is not None for p in parameters))
        return clip(parameters, most)

    monkeypatch.setattr(train, "clip_grad_norm_", count)
    flags = "--readout cls --grad-checkpoint --freeze-last 2"
    train_alone([*SMALL["dino"], *flags.split(), "--out", tmp_path])
    assert [n < counts[-1] for n in counts] == [True, True, False, False]
