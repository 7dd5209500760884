"""The baseline MoCo-v3: its loss against loops, its networks, its weights, its released files."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

import bam
import common
from helpers import (SMALL, assert_same_with_gradients, cos, infonce, make_views, tiny_model,
                     train_alone, weights)


@pytest.mark.parametrize("tau", [0.2, 1.0])
def test_loss_and_gradient_equal_those_of_loops(tau):
    """Algorithm 1 of the paper: the loss of the queries q[0] and the keys k[1], and of the rest."""
    q, k = (x.requires_grad_() for x in torch.randn(2, 2, 6, 5, dtype=torch.double))
    expected = 0
    for queries, keys in ((q[0], k[1]), (q[1], k[0])):
        rows = [infonce([cos(query, key) / tau for key in keys], i)
                for i, query in enumerate(queries)]
        expected = expected + 2 * tau * sum(rows) / len(rows)
    loss = bam.moco_loss(q, k, tau)
    assert_same_with_gradients(loss, expected, [q])
    loss.backward()
    assert k.grad is None  # keys are constants


def build(name):
    """Return a small MoCo-v3 for a ViT or a ResNet."""
    settings = dict(target="moco", tau=0.2, ema=0.9, projector_width=12, projector_dim=6)
    if name == "vit":
        return tiny_model("bam", vit=dict(stem=None), **settings)
    encoder = common.ResNet(image_size=32, blocks=(1, 1, 1, 1))
    config = bam.Settings(readout="gap", **settings)
    complete = type("Model", (bam.MoCo, common.ModelDefaults), {})
    return complete(config, encoder, None, encoder.width, None)


@pytest.mark.parametrize("name, size", [("vit", 16), ("resnet", 32)])
def test_a_model_computes_queries_and_keys_as_algorithm_1_does(name, size):
    """Each view passes the networks alone, so that BatchNorm has statistics of one view."""
    model, batch = build(name), make_views(4, (size, size))
    nn.init.normal_(model.teacher[1][0].weight)  # the keys' projector is another one
    q, k = [], []
    for view in batch["views"]:
        for network, found in ((model.student(), q), (model.teacher, k)):
            tokens = network[0](view)
            h = tokens[:, 0] if name == "vit" else tokens.mean(1)
            found.append(network[1](h[None], bam.all_ranks)[0])
        q[-1] = model.predictor(q[-1][None], bam.all_ranks)[0]
    expected = bam.moco_loss(torch.stack(q), torch.stack(k), 0.2)
    out = model(batch)
    torch.testing.assert_close(out["loss"], expected)
    out["loss"].backward()
    trained = {key for key, p in model.named_parameters() if p.grad is not None}
    frozen = {"image_encoder.patch_embed.weight", "image_encoder.patch_embed.bias"}
    every = {key for key, _ in model.named_parameters() if not key.startswith("teacher.")}
    assert trained == (every - frozen if name == "vit" else every)


def layers(head):
    """Return the kinds and widths of a head's layers."""
    return [(type(layer).__name__, layer.weight.shape[0] if layer.weight is not None else None)
            for layer in head]


def test_heads_are_those_of_builder_py():
    linear, norm, last = ("Linear", 12), ("BatchNorm", 12), [("Linear", 6), ("BatchNorm", None)]
    vit, resnet = build("vit"), build("resnet")
    assert layers(vit.projector) == [linear, norm, linear, norm, *last]
    assert layers(vit.predictor) == [linear, norm, *last]
    assert layers(resnet.projector) == [linear, norm, *last]
    assert layers(resnet.predictor) == [linear, norm, ("Linear", 6)]
    assert all(layer.bias is None for layer in vit.projector if isinstance(layer, nn.Linear))
    x = torch.randn(1, 5, 6)
    a, b, c = resnet.predictor
    expected = c((b(a(x), bam.all_ranks)).relu())
    torch.testing.assert_close(resnet.predictor(x, bam.all_ranks), expected)


def test_initial_weights_are_those_of_vits_py():
    """Xavier's bound is sqrt(6 / (inputs + outputs)); q, k and v are three layers."""
    encoder = build("vit").image_encoder
    block, d = encoder.blocks[0], 16
    for weight, inputs, outputs in ((block.attn.qkv.weight, d, d), (block.attn.proj.weight, d, d),
                                    (block.mlp.fc1.weight, d, 4 * d),
                                    (encoder.patch_embed.weight, 3 * 4 * 4, d)):
        bound = math.sqrt(6 / (inputs + outputs))
        assert 0.9 * bound < weight.abs().max() <= bound
    assert not block.attn.qkv.bias.any() and not encoder.patch_embed.bias.any()
    assert encoder.cls.abs().max() < 1e-5
    resnet = build("resnet").image_encoder
    assert not resnet.layer1[0].bn3.weight.any() and resnet.layer1[0].bn2.weight.all()


def test_an_evaluation_and_a_probe_use_the_query_network():
    model, images = build("vit").eval(), torch.randn(2, 3, 16, 16)
    nn.init.normal_(model.teacher[0].norm.weight)
    cls = model.image_encoder(images)[:, 0]
    torch.testing.assert_close(model.encode_image(images), normalize(cls, dim=-1))
    torch.testing.assert_close(model.probe_features(images), cls)


def test_a_run_trains_and_moves_the_teacher(tmp_path):
    flags = ["--target", "moco", "--teacher", "--local-crops", "0", "--ema", "0.5", "--lr", "0.01"]
    train_alone([*SMALL["bam"], *flags, "--out", tmp_path / "run"])
    state = weights(tmp_path / "run")
    query, key = (state[f"{name}.norm.weight"] for name in ("image_encoder", "teacher.0"))
    assert not torch.equal(key, torch.ones(16)) and not torch.equal(key, query)


def test_released_files_load_their_base_encoder():
    """Names as in vit-s-300ep.pth.tar."""
    encoder = common.ViT(image_size=16, patch_size=4, width=16, depth=1, heads=2, cls=True,
                         positions="sincos")
    theirs = common.timm_weights(encoder)["model"]
    base = {f"module.base_encoder.{name}": torch.randn_like(x) for name, x in theirs.items()}
    others = {f"module.momentum_encoder.{name}": torch.zeros_like(x) for name, x in theirs.items()}
    others |= {f"module.{name}": torch.ones(3, 3) for name in (
        "base_encoder.head.0.weight", "momentum_encoder.head.0.weight", "predictor.0.weight")}
    left_over = common.load_timm(encoder, {"arch": "vit_small", "state_dict": base | others})
    loaded = common.timm_weights(encoder)["model"]
    for name, x in loaded.items():
        assert torch.equal(x, base[f"module.base_encoder.{name}"])
    assert len(left_over) == len(others)
