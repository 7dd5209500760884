"""Encoders against literal float64 loops, weights in others' names, three ranks against one."""

import math

import pytest
import torch
from torch import nn
from torchvision.models import resnet

import common
from common import UserError
from helpers import run_ranks

WIDTH, HEADS, DEPTH, PATCH, SIZE = 12, 3, 2, 4, 12  # the tiny towers: a grid of 3 x 3 patches
VOCAB, CONTEXT = 19, 7
# our names, and those of timm and DINO, of OpenCLIP and OpenAI
TIMM_NAMES = [("patch_embed.", "patch_embed.proj."), ("cls", "cls_token"), ("pos", "pos_embed")]
CLIP_NAMES = [
    ("embedding.", "token_embedding."), ("cls", "class_embedding"), ("pos", "positional_embedding"),
    ("patch_embed.", "conv1."), ("norm_pre.", "ln_pre."), ("blocks.", "transformer.resblocks."),
    (".norm1.", ".ln_1."), (".attn.qkv.", ".attn.in_proj_"), (".attn.proj.", ".attn.out_proj."),
    (".norm2.", ".ln_2."), (".mlp.fc1.", ".mlp.c_fc."), (".mlp.fc2.", ".mlp.c_proj.")]


def random_weights(encoder, dtype=torch.float32):
    """{name: random tensor} for every tensor of an encoder."""
    state = encoder.state_dict()
    return {name: (torch.randn(value.shape) * 0.4).to(dtype) for name, value in state.items()}


def renamed(state, names):
    result = {}
    for name, value in state.items():
        for ours, theirs in names:
            name = name.replace(ours, theirs)
        result[name] = value
    return result


def prefixed(prefix, state):
    return {prefix + name: value for name, value in state.items()}


def clip_names(image, text, E=8):
    """Two towers as in a file of OpenCLIP or OpenAI, with projections to E."""
    image = renamed(image, [*CLIP_NAMES, ("norm.", "ln_post.")])
    text = renamed(text, [*CLIP_NAMES, ("norm.", "ln_final.")])
    state = prefixed("visual.", image) | text
    for name in state:
        if name.endswith(("class_embedding", "positional_embedding")):
            state[name] = state[name].squeeze()
    return state | {"visual.proj": torch.randn(WIDTH, E), "logit_scale": torch.tensor(4.6),
                    "text_projection": torch.randn(WIDTH, E)}


def literal_linear(x, p, name):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def literal_norm(x, p, name, eps):
    rows = []
    for row in x:
        mean = sum(row) / len(row)
        variance = sum((v - mean) ** 2 for v in row) / len(row)
        normalised = (row - mean) / (variance + eps) ** 0.5
        rows.append(normalised * p[f"{name}.weight"] + p[f"{name}.bias"])
    return torch.stack(rows)


def literal_gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def literal_quick_gelu(x):
    return x / (1 + torch.exp(-1.702 * x))


def literal_attention(x, p, name, sees):
    n, d = x.shape
    e = d // HEADS
    q, k, v = literal_linear(x, p, f"{name}.qkv").split(d, dim=1)
    rows = []
    for i in range(n):
        row = []
        for h in range(HEADS):
            part = slice(h * e, (h + 1) * e)
            keys = [j for j in range(n) if sees(i, j)]
            weights = [torch.exp(q[i, part] @ k[j, part] / e**0.5) for j in keys]
            row.append(sum(w * v[j, part] for w, j in zip(weights, keys)) / sum(weights))
        rows.append(torch.cat(row))
    return literal_linear(torch.stack(rows), p, f"{name}.proj")


def literal_block(x, p, act, eps, name="", sees=lambda i, j: True):
    """One sample (N, d) through a pre-norm block; query i attends to key j where sees(i, j)."""
    normalised = literal_norm(x, p, f"{name}norm1", eps)
    x = x + literal_attention(normalised, p, f"{name}attn", sees)
    normalised = literal_norm(x, p, f"{name}norm2", eps)
    hidden = act(literal_linear(normalised, p, f"{name}mlp.fc1"))
    return x + literal_linear(hidden, p, f"{name}mlp.fc2")


def literal_vit(p, image, act, eps, pos=None):
    """p: weights by our names; pos: positions (N, d) instead of theirs."""
    p, image = {name: value.double() for name, value in p.items()}, image.double()
    rows = [p["cls"][0, 0]] if "cls" in p else []
    for top in range(0, image.shape[1], PATCH):
        for left in range(0, image.shape[2], PATCH):
            patch = p["patch_embed.weight"] * image[:, top:top + PATCH, left:left + PATCH]
            rows.append(patch.sum((1, 2, 3)) + p.get("patch_embed.bias", 0))
    x = torch.stack(rows) + (p["pos"][0] if pos is None else pos.double())
    if "norm_pre.weight" in p:
        x = literal_norm(x, p, "norm_pre", eps)
    for i in range(DEPTH):
        x = literal_block(x, p, act, eps, f"blocks.{i}.")
    return literal_norm(x, p, "norm", eps)


def literal_text(p, tokens, act, eps):
    """The causal tower."""
    p = {name: value.double() for name, value in p.items()}
    x = torch.stack([p["embedding.weight"][t] + p["pos"][0, i] for i, t in enumerate(tokens)])
    for i in range(DEPTH):
        x = literal_block(x, p, act, eps, f"blocks.{i}.", lambda i, j: j <= i)
    return literal_norm(x, p, "norm", eps)


def cubic(x, a=-0.5):
    x = abs(x)
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0


def literal_resize(grid, height, width):
    """Antialiased bicubic interpolation (Keys, a = -0.5) of (h, w, d), cell by cell."""
    def weights(n, i, m):
        scale = n / m
        w = [cubic((j + 0.5 - (i + 0.5) * scale) / max(scale, 1)) for j in range(n)]
        return torch.tensor(w).double() / sum(w)

    h, w = grid.shape[:2]
    cells = []
    for y in range(height):
        for x in range(width):
            weight = weights(h, y, height)[:, None] * weights(w, x, width)
            cells.append((weight[..., None] * grid.double()).sum((0, 1)))
    return torch.stack(cells)


def tiny_vit(**settings):
    size = dict(image_size=SIZE, patch_size=PATCH, width=WIDTH, depth=DEPTH, heads=HEADS)
    return common.ViT(**size | settings)


def tiny_text(**settings):
    size = dict(vocab_size=VOCAB, context=CONTEXT, width=WIDTH, depth=DEPTH, heads=HEADS)
    return common.TextTransformer(**size | settings)


def close(a, b, atol=1e-5, rtol=0):
    torch.testing.assert_close(a, b.to(a.dtype), atol=atol, rtol=rtol)


@pytest.mark.parametrize("act, literal_act", [
    (nn.GELU, literal_gelu), (common.QuickGELU, literal_quick_gelu)])
@pytest.mark.parametrize("kind", ["full", "padded", "causal"])
def test_block_and_its_gradients_are_the_literal_ones(act, literal_act, kind):
    block = common.Block(WIDTH, HEADS, 4.0, act, 1e-3, 0.0).double()
    block.load_state_dict(random_weights(block, torch.float64))
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    out = block(x, real[:, None, None] if kind == "padded" else None, kind == "causal")
    literal = {name: p.detach().clone().requires_grad_() for name, p in block.named_parameters()}
    y, expected = x.detach().clone().requires_grad_(), []
    for b in range(2):
        sees = {"full": lambda i, j: True, "padded": lambda i, j: real[b, j],
                "causal": lambda i, j: j <= i}[kind]
        expected.append(literal_block(y[b], literal, literal_act, 1e-3, sees=sees))
    expected = torch.stack(expected)
    close(out, expected, 1e-10)
    cotangent = torch.randn_like(out)
    (out * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    close(x.grad, y.grad, 1e-10)
    for name, parameter in block.named_parameters():
        close(parameter.grad, literal[name].grad, 1e-10)


def test_padding_changes_nothing_at_real_tokens():
    tower, tokens = tiny_text(), torch.randint(VOCAB, (3, CONTEXT))
    nn.init.normal_(tower.pos)
    mask = torch.arange(CONTEXT) < torch.tensor([[4], [2], [4]])
    padded = tower(tokens, mask)
    for row, ids, real in zip(padded, tokens, mask):
        close(row[real], tower(ids[None, real])[0], 1e-6)
    assert (padded - tower(tokens))[mask].abs().max() > 1e-3


@pytest.mark.parametrize("height, width", [(12, 12), (20, 16), (8, 24)])
@pytest.mark.parametrize("cls", [True, False])
def test_vit_at_any_size_with_timms_weights(cls, height, width):
    vit, images = tiny_vit(cls=cls), torch.randn(2, 3, height, width)
    weights = random_weights(vit)
    extra = {"head.weight": torch.randn(5, WIDTH), "blocks.2.ls1.gamma": torch.ones(WIDTH),
             "mask_token": torch.zeros(1, WIDTH)}            # blocks 0 and 1 are all that we have
    report = common.load_encoder_weights(vit, renamed(weights, TIMM_NAMES) | extra)
    assert report == unused(*extra)
    grid = weights["pos"][0, int(cls):].view(3, 3, WIDTH)
    grid = literal_resize(grid, height // PATCH, width // PATCH)
    pos = torch.cat([weights["pos"][0, :int(cls)], grid])
    for image, tokens in zip(images, vit(images), strict=True):
        close(tokens, literal_vit(weights, image, literal_gelu, 1e-6, pos))


def test_sincos_positions():
    pos = common.sincos_positions(2, 3, 8)
    for y in range(2):
        for x in range(3):
            angles = [(p, p / 100) for p in (x, y)]  # 10000 ** (i / 2) is 1, 100
            expected = [f(a) for pair in angles for f in (math.sin, math.cos) for a in pair]
            close(pos[3 * y + x], torch.tensor(expected), 1e-6)
    vit = tiny_vit(positions="sincos", cls=True)
    expected = torch.cat([torch.zeros(1, WIDTH), common.sincos_positions(3, 3, WIDTH)])
    assert torch.equal(vit.pos[0], expected) and "pos" not in dict(vit.named_parameters())


def small_resnet():
    return common.ResNet(64, blocks=(1, 2, 1, 1))


@pytest.mark.parametrize("make, shape", [
    (lambda: tiny_vit(drop_path=0.5), (2, 3, SIZE, SIZE)),
    (lambda: tiny_text(drop_path=0.5), (2, CONTEXT)), (small_resnet, (2, 3, 64, 64))])
def test_gradient_checkpointing_changes_no_gradient(make, shape):
    encoder, inputs = make(), [torch.randn(shape)]
    if len(shape) == 2:
        mask = torch.arange(CONTEXT) < torch.tensor([[4], [7]])
        inputs = [torch.randint(VOCAB, shape), mask]
    chains = [module for module in encoder.modules() if isinstance(module, common.Chain)]
    forwards, results = [], []
    chains[0][0].register_forward_pre_hook(lambda *_: forwards.append(1))
    start = {name: value.clone() for name, value in encoder.state_dict().items()}
    for grad_checkpoint in (False, True):
        for chain in chains:
            chain.grad_checkpoint = grad_checkpoint
        encoder.load_state_dict(start)
        encoder.zero_grad()
        torch.manual_seed(3)
        out = encoder(*inputs)
        (out * torch.linspace(-1, 1, out.shape[-1])).square().sum().backward()
        buffers = [buffer.clone() for buffer in encoder.buffers()]  # a batch counts once in them
        results.append([p.grad.clone() for p in encoder.parameters()] + buffers)
    assert len(forwards) == 3 and all(map(torch.equal, *results))


@pytest.mark.parametrize("make", [
    lambda: tiny_vit(depth=1), lambda: common.ResNet(64, blocks=(1, 1, 1, 1))])
def test_checkpointed_blocks_can_be_compiled(make):
    gradients, buffers, plain, compiled = [], [], make(), make()
    images = torch.randn(2, 3, plain.image_size, plain.image_size)
    compiled.load_state_dict(plain.state_dict())
    for encoder in (plain, compiled):
        for module in encoder.modules():
            if isinstance(module, common.Chain):
                module.grad_checkpoint = True
        run = torch.compile(encoder, backend="aot_eager") if encoder is compiled else encoder
        run(images).square().sum().backward()
        gradients.append([p.grad for p in encoder.parameters()])
        buffers.append(list(encoder.buffers()))
    for a, b in zip(gradients[0] + buffers[0], gradients[1] + buffers[1]):
        close(a, b)


def test_resnet_gives_torchvisions_last_feature_map():
    theirs, ours = resnet.ResNet(resnet.Bottleneck, [1, 2, 1, 1]).eval(), small_resnet().eval()
    state = {f"module.{name}": value for name, value in theirs.state_dict().items()}
    report = common.load_encoder_weights(ours, state)
    assert report == unused("module.fc.weight", "module.fc.bias")
    images, maps = torch.randn(2, 3, 96, 64), []
    theirs.layer4.register_forward_hook(lambda *args: maps.append(args[2]))
    with torch.no_grad():
        theirs(images)
        torch.testing.assert_close(ours(images), maps[0].flatten(2).transpose(1, 2))
    assert (ours.width, ours.grid, ours.cls) == (2048, 2, None)
    settings = dict(image_size=224, blocks=(3, 4, 6, 3))
    assert common.image_encoder_settings("ResNet-50") == (common.ResNet, settings)


def test_cls_attention_is_the_softmax_of_the_last_block():
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


def test_layers_are_the_normalised_outputs_of_the_last_blocks():
    encoder, images, expected = tiny_vit().eval(), torch.randn(2, 3, SIZE, SIZE), []
    x = encoder.embed(images)
    for block in encoder.blocks:
        x = block(x)
        expected.append(encoder.norm(x))
    for n, outputs in ((1, expected[-1:]), (2, expected), (9, expected)):
        torch.testing.assert_close(encoder.layers(images, n), outputs)


def test_stochastic_depth_drops_whole_rows_in_training_only():
    block = common.Block(WIDTH, HEADS, 4.0, nn.GELU, 1e-6, 0.25)
    nn.init.zeros_(block.mlp.fc2.weight), nn.init.zeros_(block.mlp.fc2.bias)
    x = torch.randn(1, 4, WIDTH).expand(400, -1, -1)
    branch = (block.eval()(x) - x)[0]
    close(branch, block.attn(block.norm1(x))[0])
    change = block.train()(x) - x
    dropped = (change == 0).flatten(1).all(1)
    close(change[~dropped], (branch / 0.75).expand_as(change[~dropped]))
    assert 60 < dropped.sum() < 140
    assert [b.drop_path for b in tiny_vit(depth=3, drop_path=0.5).blocks] == [0.0, 0.25, 0.5]


CLIP_IMAGE = dict(cls=True, pre_norm=True, patch_bias=False, eps=1e-5)
TENSORS = 4 + 12 * DEPTH  # of a tower: blocks, embeddings or convolution, positions, final norm
IMAGE_FIRST = ["visual.class_embedding", "visual.positional_embedding", "visual.conv1.weight"]
TEXT_FIRST = ["positional_embedding", "token_embedding.weight",
              "transformer.resblocks.0.ln_1.weight"]


def others(n, names, prefix=""):
    names = ", ".join(prefix + name for name in names)
    return f"{n} tensor(s) of other parts of the file ({names}, ...): not used"


def unused(*names):
    return [f"{name}: not used" for name in names]


@pytest.mark.parametrize("prefix, dtype, act, numbers", [
    ("", torch.float32, literal_gelu, []), ("module.", torch.float32, literal_gelu, []),
    ("", torch.float16, literal_quick_gelu, ["input_resolution", "context_length", "vocab_size"])])
def test_openclip_and_openai_weights(prefix, dtype, act, numbers):
    quick = act is literal_quick_gelu
    vit, tower = tiny_vit(**CLIP_IMAGE, quick_gelu=quick), tiny_text(causal=True, quick_gelu=quick)
    image, text = random_weights(vit, dtype), random_weights(tower, dtype)
    state = prefixed(prefix, clip_names(image, text))
    state |= {name: torch.tensor(12) for name in numbers}
    projections = [f"{prefix}logit_scale", f"{prefix}text_projection", *numbers]
    assert common.load_encoder_weights(vit, state) == [
        others(TENSORS + 2 + len(numbers), TEXT_FIRST, prefix), *unused(f"{prefix}visual.proj")]
    assert common.load_encoder_weights(tower, state) == [
        others(TENSORS + 4, IMAGE_FIRST, prefix), *unused(*projections)]
    images, tokens = torch.randn(2, 3, SIZE, SIZE), torch.randint(VOCAB, (2, CONTEXT))
    for i in range(2):
        close(vit(images)[i], literal_vit(image, images[i], act, 1e-5))
        close(tower(tokens, tokens > 3)[i], literal_text(text, tokens[i], act, 1e-5))


def test_custom_text_prefix_and_a_missing_patch_bias():
    tower, vit = tiny_text(causal=True), tiny_vit(**CLIP_IMAGE | {"patch_bias": True})
    image, text = random_weights(tiny_vit(**CLIP_IMAGE)), random_weights(tower)
    state = {}
    for key, value in clip_names(image, text).items():
        state[key if key.startswith("visual.") else f"text.{key}"] = value
    common.load_encoder_weights(tower, state)
    report = common.load_encoder_weights(vit, state)
    assert "patch_embed.bias: not in the file, set to zero" in report
    images, tokens = torch.randn(1, 3, SIZE, SIZE), torch.randint(VOCAB, (1, CONTEXT))
    close(tower(tokens)[0], literal_text(text, tokens[0], literal_gelu, 1e-5))
    close(vit(images)[0], literal_vit(image, images[0], literal_gelu, 1e-5))


@pytest.mark.parametrize("nested", [True, False])
def test_dino_weights_take_the_teacher(nested):
    vit, image = tiny_vit(cls=True), torch.randn(1, 3, SIZE, SIZE)
    student, teacher = random_weights(vit), random_weights(vit)
    theirs = prefixed("backbone.", renamed(teacher, TIMM_NAMES))
    theirs["head.mlp.0.weight"] = torch.zeros(3)
    ours = prefixed("module.backbone.", renamed(student, TIMM_NAMES))
    state = {"student": ours, "teacher": theirs, "epoch": 7}
    names = [f"student.{name}" for name in ours]
    expected = others(len(names) + 1, names[:3])
    if not nested:
        state = prefixed("teacher.", theirs)
        expected = "1 tensor(s) of other parts of the file (teacher.head.mlp.0.weight): not used"
    assert common.load_encoder_weights(vit, state) == [expected]
    close(vit(image)[0], literal_vit(teacher, image[0], literal_gelu, 1e-6))


@pytest.mark.parametrize("name, encoder", [("image", tiny_vit()), ("text", tiny_text())])
def test_weights_of_our_own_checkpoint(name, encoder):
    weights = {"image": random_weights(tiny_vit()), "text": random_weights(tiny_text())}
    towers = [prefixed(f"{tower}_encoder.", weights[tower]) for tower in weights]
    state = {"model": towers[0] | towers[1] | {"head.weight": torch.zeros(2)}, "step": 3}
    assert len(common.load_encoder_weights(encoder, state)) == 1
    torch.testing.assert_close(dict(encoder.state_dict()), weights[name])


@pytest.mark.parametrize("from_cls, to_cls, notes", [
    (True, True, []), (False, False, []),
    (True, False, ["pos_embed: position of the CLS token not used", "cls_token: not used"]),
    (False, True, ["pos_embed: no position of the CLS token, set to zero",
                   "cls: nothing in the file fits, left at its initial value"])])
@pytest.mark.parametrize("size, dtype", [
    (SIZE, torch.float32), (20, torch.float32), (20, torch.float16)])
def test_position_grid_of_a_file_is_fitted(from_cls, to_cls, notes, size, dtype):
    weights = random_weights(tiny_vit(cls=from_cls), dtype)
    vit, g = tiny_vit(cls=to_cls, image_size=size), size // PATCH
    report = common.load_encoder_weights(vit, renamed(weights, TIMM_NAMES))
    if size != SIZE:
        notes = [*notes, "pos_embed: grid interpolated from 9 to 25 positions"]
    assert sorted(report) == sorted(notes)
    pos = weights["pos"][0]
    expected = literal_resize(pos[int(from_cls):].view(3, 3, WIDTH), g, g)
    if to_cls:
        cls = pos[:1] if from_cls else torch.zeros(1, WIDTH)
        expected = torch.cat([cls, expected])
    close(vit.pos[0], expected, 1e-6)  # interpolated in fp32


def test_report_lists_exactly_what_did_not_fit():
    state = renamed(random_weights(tiny_vit(cls=True)), TIMM_NAMES)
    state["pos_embed"] = torch.zeros(1, 1 + 2 * 3, WIDTH)
    state["norm.weight"] = torch.zeros(5)
    del state["blocks.1.mlp.fc1.bias"]
    vit = tiny_vit(cls=True, pre_norm=True)
    before = {key: value.clone() for key, value in vit.state_dict().items()}
    left = ["pos", "norm_pre.weight", "norm_pre.bias", "blocks.1.mlp.fc1.bias", "norm.weight"]
    assert sorted(common.load_encoder_weights(vit, state)) == sorted([
        "pos_embed: its 7 positions are not a square grid, with or without a CLS token",
        f"pos_embed: shape (1, 7, {WIDTH}) does not fit (1, 10, {WIDTH}), not used",
        f"norm.weight: shape (5,) does not fit ({WIDTH},), not used",
        *(f"{name}: nothing in the file fits, left at its initial value" for name in left)])
    for name in left:
        assert torch.equal(vit.state_dict()[name], before[name])
    assert torch.equal(vit.norm.bias, state["norm.bias"])


NORM1 = "blocks.0.norm1.weight"


@pytest.mark.parametrize("make, state, message", [
    (tiny_vit, {}, "No block of the file fits this ViT: it holds no tensor."),
    (tiny_vit, {"layer1.0.conv.weight": torch.zeros(3)},
     "fits this ViT: layer1.0.conv.weight: not used"),
    (tiny_vit, {NORM1: torch.zeros(99)}, rf"{NORM1}: shape \(99,\) does not fit \(12,\)"),
    (small_resnet, {NORM1: torch.zeros(12)}, "No block of the file fits this ResNet")])
def test_a_file_in_which_nothing_fits(make, state, message):
    with pytest.raises(UserError, match=message):
        common.load_encoder_weights(make(), state)


@pytest.mark.parametrize("make, name, shape", [
    (tiny_vit, "blocks.0.ls1.gamma", WIDTH), (tiny_vit, "blocks.1.attn.q_norm.weight", 4),
    (tiny_vit, "blocks.1.mlp.fc1.weight", 3 * WIDTH), (tiny_vit, "reg_token", WIDTH),
    (tiny_vit, "storage_tokens", WIDTH), (tiny_vit, "norm_pre.weight", WIDTH),
    (tiny_vit, "register_tokens", WIDTH), (tiny_text, "blocks.1.ls_2.gamma", WIDTH),
    (small_resnet, "layer2.1.se.fc1.weight", 8), (small_resnet, "attnpool.c_proj.bias", 8)])
def test_weights_of_another_network_are_refused(make, name, shape):
    """DINOv2's LayerScale and registers, norms of queries, CLIP's first LayerNorm, the pooling of
    its ResNets: without them the network is another."""
    encoder = make()
    weights = random_weights(encoder)
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    with pytest.raises(UserError, match=f"another network than this .*; the first: tower.{name}: "):
        state = prefixed("tower.", weights | {name: torch.ones(shape)})
        common.load_encoder_weights(encoder, state)
    assert all(map(torch.equal, encoder.state_dict().values(), before.values()))


@pytest.mark.parametrize("ours, theirs, message", [
    (20, "embedding.weight", "^embedding.weight has 19 tokens of another .* tower's 20: give"),
    (20, "token_embedding.weight", "token_embedding.weight has 19 tokens of another")])
def test_weights_of_a_vocabulary_of_another_size_are_refused(ours, theirs, message):
    weights, tower = random_weights(tiny_text()), tiny_text(vocab_size=ours)
    state = renamed(weights, [("embedding.weight", theirs)])
    with pytest.raises(UserError, match=message):
        common.load_encoder_weights(tower, state)


def test_clips_words_need_clips_vocabulary():
    tower = tiny_text(vocab_size=49408)
    wordpiece = common.WordPiece(common.SPECIAL_TOKENS)
    weights = random_weights(tower)
    assert common.load_encoder_weights(tower, weights, wordpiece) == []      # our own file
    weights = renamed(weights, CLIP_NAMES)
    with pytest.raises(UserError, match="49408 tokens of another vocabulary .* is bpe_simple"):
        common.load_encoder_weights(tower, weights, wordpiece)
    bpe = common.BPE(["#version: 0.2", "a t</w>"])
    assert common.load_encoder_weights(tower, weights, bpe) == []


@pytest.mark.parametrize("spec, name, settings", [
    ("tiny", "tiny", {}),
    ("ViT-B/16:drop_path=0.1,cls=1", "ViT-B/16", {"drop_path": "0.1", "cls": "1"}),
    ("C:/data/a.csv", "C:/data/a.csv", {}), ("a,b:c", "a,b:c", {}),
    ("C:/data/a.csv:image=path", "C:/data/a.csv", {"image": "path"}),
    ("d/{00..12}.tar:resample=1", "d/{00..12}.tar", {"resample": "1"}),
])
def test_parse_spec(spec, name, settings):
    assert common.parse_spec(spec) == (name, settings)


def test_cast_settings():
    defaults = {"n": 3, "x": 0.5, "flag": False, "name": "a"}
    texts = {"n": "4", "x": "1e-3", "flag": "True", "name": "b"}
    values = {"n": 4, "x": 1e-3, "flag": True, "name": "b"}
    assert common.cast_settings(texts, defaults, "it") == values
    assert common.cast_settings({"flag": "0"}, {"flag": True}, "it") == {"flag": False}
    for texts, message in (({"m": "1"}, "it has no setting 'm'; it has flag, n, name, x."),
                           ({"n": "4.5"}, "n='4.5' is not of type int")):
        with pytest.raises(UserError, match=message):
            common.cast_settings(texts, defaults, "it")


@pytest.mark.parametrize("spec, message", [
    ("ViT-Z/9", "no ViT preset 'ViT-Z/9'; there are tiny, tiny-patch, V"),
    ("tiny:stem=none", "ViT has no setting 'stem'"),
    ("tiny:patch_size=4", "strides of stem .* must multiply to patch_size 4"),
    ("tiny:image_size=50", "image_size 50 is not a multiple of patch_size 8: give 48"),
    ("tiny:positions=round", "positions must be learned or sincos, not 'round'"),
    ("tiny:positions=sincos,width=90", "width 90 must be a multiple of 4 for positions=sincos"),
    ("tiny:heads=5", "width 96 is not a multiple of heads 5"),
    ("ResNet-50:image_size=50", "image_size 50 is not a multiple of 32"),
    ("ResNet-50:blocks=3463", "ResNet has no setting 'blocks'; it has image_size"),
])
def test_bad_encoder_settings(spec, message):
    with pytest.raises(UserError, match=message):
        kind, settings = common.image_encoder_settings(spec)
        kind(**settings)


def norm_and_images(kind):
    torch.manual_seed(5)
    images = torch.randn(6, 3, 5, 5)
    images[2:] = 2 * images[2:] + 3  # the first rank's images are unlike the others'
    return kind(3), images, torch.randn(6, 3, 5, 5)


def normalise_on(rank):
    norm, images, weights = norm_and_images(common.BatchNorm)
    part = slice(2 * rank, 2 * rank + 2)
    x = images[part].requires_grad_()
    y = norm(x)
    (y * weights[part]).sum().backward()
    own, every = torch.ones(2, 2, requires_grad=True), torch.ones(6, 2, requires_grad=True)
    ((common.gather(own) + every) * (rank + 1)).sum().backward()
    return {"y": y.detach(), "gradient": x.grad, "rank": common.gather.rank, "own": own.grad,
            "every": every.grad, "gradients": [p.grad for p in norm.parameters()],
            "state": norm.state_dict(), "half": norm(x.bfloat16()).detach(),
            "gathered": common.gather(torch.tensor([[rank, 0], [rank, 1]])),
            "objects": common.gather_objects({"rank": rank})}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("ranks"), normalise_on, world=3)


def test_batch_norm_of_three_ranks_is_that_of_one_process(ranks):
    norm, images, weights = norm_and_images(nn.BatchNorm2d)
    y = norm(images.requires_grad_())
    (y * weights).sum().backward()
    close(torch.cat([rank["y"] for rank in ranks]), y.detach(), 1e-5)
    close(torch.cat([rank["gradient"] for rank in ranks]), images.grad, 1e-5)
    for i, parameter in enumerate(norm.parameters()):
        close(sum(rank["gradients"][i] for rank in ranks), parameter.grad, 1e-4)
    half = torch.cat([rank["half"] for rank in ranks])  # has statistics in fp32
    expected = norm(images.bfloat16().float()).detach()
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=1e-4, rtol=2**-8)
    for rank in ranks:
        for name, value in norm.state_dict().items():  # after both batches
            close(rank["state"][name], value, 1e-6, 1e-6)


def test_gather_keeps_the_order_of_the_ranks_and_sums_their_gradients(ranks):
    assert common.gather.rank == 0 and common.gather(ranks) is ranks  # one process
    for i, result in enumerate(ranks):
        assert result["rank"] == i
        assert result["gathered"].tolist() == [[rank, row] for rank in range(3) for row in (0, 1)]
        assert result["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert (result["own"] == 1 + 2 + 3).all() and (result["every"] == i + 1).all()
