"""Encoders: ViT, text transformer and ResNet against torch, torchvision and literal references.

Further tests check which weights are read from the checkpoints of other projects.
"""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import gelu, layer_norm
from torchvision.models import resnet

import common
import train
from helpers import assert_same_with_gradients

WIDTH, HEADS, DEPTH, PATCH, SIZE = 12, 3, 2, 4, 12  # of the tiny ViT: a grid of 3 x 3 patches
VOCAB, CONTEXT = 19, 7
CLIP_PIXELS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
TORCH_NAMES = [  # (part of our name, part of the name in nn.TransformerEncoderLayer)
    ("attn.qkv.", "self_attn.in_proj_"), ("attn.proj.", "self_attn.out_proj."),
    ("mlp.fc1.", "linear1."), ("mlp.fc2.", "linear2.")]


def random_weights(encoder, dtype=torch.float32):
    """Return {name: random tensor} for every tensor of an encoder but the constants of its pixels,
    which files of others lack, too."""
    state = encoder.state_dict()
    return {name: (torch.randn(value.shape) * 0.4).to(dtype) for name, value in state.items()
            if not name.startswith("pixels.")}


def renamed(state, names):
    """Return the state dict with names in which each of ours is replaced by theirs."""
    result = {}
    for name, value in state.items():
        for ours, theirs in names:
            name = name.replace(ours, theirs)
        result[name] = value
    return result


def quick_gelu(x):
    return x / (1 + torch.exp(-1.702 * x))


def torchs_block(p, act, eps, name=""):
    """Return torch's pre-norm block in float64.

    Its weights are those of p whose names begin with `name`.
    """
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, act, eps, batch_first=True,
                                       norm_first=True, dtype=torch.float64)
    own = {key.removeprefix(name): x for key, x in p.items() if key.startswith(name)}
    layer.load_state_dict(renamed(own, TORCH_NAMES))
    return layer


def normed(x, p, name, eps):
    """LayerNorm with the weights p[name]."""
    return layer_norm(x, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"], eps)


@torch.no_grad()
def literal_vit(p, image, act, eps, pos=None, pixels=CLIP_PIXELS):
    """ViT written out: one image (3, H, W) in [0, 1] -> tokens (N, d).

    p: weights under our names. pos: positions (N, d) in place of the weights' own. pixels: the mean
    and the standard deviation that the weights expect.
    """
    p, (mean, std) = {name: value.double() for name, value in p.items()}, torch.tensor(pixels)
    image = (image.double() - mean[:, None, None]) / std[:, None, None]
    rows = [p["cls"][0, 0]] if "cls" in p else []
    for top in range(0, image.shape[1], PATCH):
        for left in range(0, image.shape[2], PATCH):
            patch = p["patch_embed.weight"] * image[:, top:top + PATCH, left:left + PATCH]
            rows.append(patch.sum((1, 2, 3)) + p.get("patch_embed.bias", 0))
    x = torch.stack(rows) + (p["pos"][0] if pos is None else pos.double())
    if "norm_pre.weight" in p:
        x = normed(x, p, "norm_pre", eps)
    for i in range(DEPTH):
        x = torchs_block(p, act, eps, f"blocks.{i}.")(x[None])[0]
    return normed(x, p, "norm", eps)


@torch.no_grad()
def literal_text(p, tokens, act, eps):
    """The causal text transformer written out: tokens (L,) -> (L, d).

    p: weights under our names.
    """
    p, n = {name: value.double() for name, value in p.items()}, len(tokens)
    x, hidden = p["embedding.weight"][tokens] + p["pos"][0, :n], torch.ones(n, n).triu(1).bool()
    for i in range(DEPTH):
        x = torchs_block(p, act, eps, f"blocks.{i}.")(x[None], hidden)[0]
    return normed(x, p, "norm", eps)


def pils_resize(grid, height, width):
    """PIL's bicubic interpolation of a grid (h, w, d) -> (height * width, d)."""
    channels = [Image.fromarray(x.float().numpy()) for x in grid.permute(2, 0, 1)]
    resized = [np.array(x.resize((width, height), Image.BICUBIC)) for x in channels]
    return torch.from_numpy(np.stack(resized, 2)).flatten(0, 1)


def tiny_vit(**settings):
    """Return a small ViT with these settings."""
    size = dict(image_size=SIZE, patch_size=PATCH, width=WIDTH, depth=DEPTH, heads=HEADS)
    return common.ViT(**size | settings)


def tiny_text(**settings):
    """Return a small text transformer with these settings."""
    size = dict(vocab_size=VOCAB, context=CONTEXT, width=WIDTH, depth=DEPTH, heads=HEADS)
    return common.TextTransformer(**size | settings)


def close(a, b, atol=1e-5, rtol=0):
    """Assert that a and b differ by at most atol + rtol * |b|."""
    torch.testing.assert_close(a, b.to(a.dtype), atol=atol, rtol=rtol)


@pytest.mark.parametrize("act, torchs_act", [
    (nn.GELU, gelu), (common.QuickGELU, quick_gelu)])
@pytest.mark.parametrize("kind", ["full", "padded", "causal"])
def test_a_block_and_its_gradients_equal_torchs(act, torchs_act, kind):
    block = common.Block(WIDTH, HEADS, act, 1e-3, 0.0).double()
    block.load_state_dict(random_weights(block, torch.float64))
    torchs = torchs_block(block.state_dict(), torchs_act, 1e-3)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    later = torch.ones(5, 5).triu(1).bool() if kind == "causal" else None
    out = block(x, real[:, None, None] if kind == "padded" else None, kind == "causal")
    parameters = renamed(dict(block.named_parameters()), TORCH_NAMES)
    expected = torch.func.functional_call(
        torchs, parameters, (x, later, ~real if kind == "padded" else None))
    assert_same_with_gradients(out, expected, [x, *block.parameters()])


@pytest.mark.parametrize("height, width", [(12, 12), (20, 16), (8, 24)])
@pytest.mark.parametrize("cls", [True, False])
def test_vit_equals_a_literal_reference_at_any_image_size(cls, height, width):
    """The positions of other sizes are interpolated as PIL resizes an image. CLIP's first LayerNorm
    follows the sum of patches and positions."""
    vit, images = tiny_vit(cls=cls, pre_norm=cls), torch.rand(2, 3, height, width)
    weights = random_weights(vit)
    common.restore_model(vit, weights, "a file", "")
    grid = weights["pos"][0, int(cls):].view(3, 3, WIDTH)
    grid = pils_resize(grid, height // PATCH, width // PATCH)
    pos = torch.cat([weights["pos"][0, :int(cls)], grid])
    for image, tokens in zip(images, vit(images), strict=True):
        close(tokens, literal_vit(weights, image, gelu, 1e-6, pos))


def test_sincos_positions_equal_their_formula():
    pos = common.sincos_positions(2, 3, 8)
    for y in range(2):
        for x in range(3):
            angles = [(p, p / 100) for p in (x, y)]  # 10000 ** (i / 2) is 1, 100
            expected = [f(a) for pair in angles for f in (math.sin, math.cos) for a in pair]
            close(pos[3 * y + x], torch.tensor(expected), 1e-6)
    vit = tiny_vit(positions="sincos", cls=True)
    expected = torch.cat([torch.zeros(1, WIDTH), common.sincos_positions(3, 3, WIDTH)])
    assert torch.equal(vit.pos[0], expected) and "pos" not in dict(vit.named_parameters())


@pytest.mark.parametrize("make, shape", [
    (lambda: tiny_vit(drop_path=0.5), (2, 3, SIZE, SIZE)), (tiny_text, (2, CONTEXT))])
def test_gradient_checkpointing_does_not_change_gradients(make, shape):
    encoder, inputs = make(), [torch.randn(shape)]
    if len(shape) == 2:
        mask = torch.arange(CONTEXT) < torch.tensor([[4], [7]])
        inputs = [torch.randint(VOCAB, shape), mask]
    forwards, results = [], []
    encoder.blocks[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    for grad_checkpoint in (False, True):
        encoder.blocks.grad_checkpoint = grad_checkpoint
        encoder.zero_grad()
        torch.manual_seed(3)
        out = encoder(*inputs)
        (out * torch.linspace(-1, 1, out.shape[-1])).square().sum().backward()
        results.append([p.grad.clone() for p in encoder.parameters()])
    assert len(forwards) == 3 and all(map(torch.equal, *results))


def test_resnet_returns_torchvisions_last_feature_map():
    theirs = resnet.ResNet(resnet.Bottleneck, [1, 2, 1, 1]).eval()
    ours = common.ResNet(64, blocks=(1, 2, 1, 1)).eval()
    # DINO's and torchvision's files have these names, and expect ImageNet's pixels
    assert {*common.load_timm(ours, theirs.state_dict())} == {"fc.weight", "fc.bias"}
    images, maps = torch.rand(2, 3, 96, 64), []
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    theirs.layer4.register_forward_hook(lambda *args: maps.append(args[2]))
    with torch.no_grad():
        theirs((images - mean) / std)
        torch.testing.assert_close(ours(images), maps[0].flatten(2).transpose(1, 2))
    assert (ours.width, ours.grid, ours.patch_size, ours.cls) == (2048, 2, 32, None)
    with torch.no_grad():  # a side of 72 pixels has three tokens
        assert ours(torch.rand(1, 3, 72, 40)).shape[1] == math.ceil(72 / 32) * math.ceil(40 / 32)
    kernels = [p for p in ours.parameters() if p.ndim == 4]
    ours.train()(images).sum().backward()  # DDP copies gradients whose strides are not the weights'
    assert all(p.grad.is_contiguous(memory_format=torch.channels_last) for p in kernels)
    settings = dict(image_size=224, blocks=(3, 4, 6, 3), pixels="")
    assert common.encoder_settings("ResNet-50", common.IMAGE_ENCODERS) == (common.ResNet, settings)


def test_cls_attention_equals_the_softmax_of_the_last_block():
    encoder = tiny_vit(cls=True, pre_norm=True).double()
    images = torch.randn(2, 3, 16, 8, dtype=torch.double)
    weights = encoder.cls_attention(images)
    assert weights.shape == (2, 3, 4, 2)
    first, last = encoder.blocks
    qkv = last.attn.qkv(last.norm1(first(encoder.embed(images))))       # (B, 9, 36)
    for b in range(2):
        for head in range(3):
            q, k = qkv[b, 0, 4 * head:4 * head + 4], qkv[b, :, 12 + 4 * head:16 + 4 * head]
            scores = [math.exp((q @ key).item() / 2) for key in k]
            expected = [score / sum(scores) for score in scores[1:]]
            close(weights[b, head].flatten(), torch.tensor(expected), 1e-6)


def test_stochastic_depth_drops_rows_only_in_training():
    block = common.Block(WIDTH, HEADS, nn.GELU, 1e-6, 0.25)
    nn.init.zeros_(block.mlp.fc2.weight), nn.init.zeros_(block.mlp.fc2.bias)
    x = torch.randn(1, 4, WIDTH).expand(400, -1, -1)
    branch = (block.eval()(x) - x)[0]
    close(branch, block.attn(block.norm1(x))[0])
    change = block.train()(x) - x
    dropped = (change == 0).flatten(1).all(1)
    close(change[~dropped], (branch / 0.75).expand_as(change[~dropped]))
    assert 60 < dropped.sum() < 140
    assert [b.drop_path for b in tiny_vit(depth=3, drop_path=0.5).blocks] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("spec, name, settings", [
    ("tiny", "tiny", {}),
    ("ViT-B/16:drop_path=0.1,cls=1", "ViT-B/16", {"drop_path": "0.1", "cls": "1"}),
    ("C:/data/a.csv", "C:/data/a.csv", {}), ("a,b:c", "a,b:c", {}),
    ("0.tar::part=1", "0.tar::part=1", {}),
    ("C:/data/a.csv:image=path", "C:/data/a.csv", {"image": "path"})])
def test_parse_spec_separates_the_name_from_its_settings(spec, name, settings):
    assert common.parse_spec(spec) == (name, settings)


def test_views_of_a_resnet_have_any_size():
    args = train.parse_args(["--method", "bam", "--image-encoder", "ResNet-50", "--image-size",
                             "48", "--local-size", "20"])
    views = train.build_transform(args, train.METHODS["bam"], common.ResNet(48, (1, 1, 1, 1)))
    assert {view.size for view in views.views} == {48, 20}
