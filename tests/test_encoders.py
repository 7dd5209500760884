"""Encoders against literal float64 loops, weights in others' names, three ranks against one."""

import math

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common
from common import UserError
from helpers import run_ranks

WIDTH, HEADS, DEPTH, PATCH, SIZE = 12, 3, 2, 4, 12  # the tiny towers: a grid of 3 x 3 patches
VOCAB, CONTEXT = 19, 7
PARTS = ("ln1", "qkv", "out", "ln2", "fc1", "fc2")
TIMM_BLOCK = dict(zip(PARTS, (
    "norm1.", "attn.qkv.", "attn.proj.", "norm2.", "mlp.fc1.", "mlp.fc2.")))
CLIP_BLOCK = dict(zip(PARTS, (
    "ln_1.", "attn.in_proj_", "attn.out_proj.", "ln_2.", "mlp.c_fc.", "mlp.c_proj.")))


def random_affine(*shape, scale=0.4):
    return {"weight": torch.randn(shape) * scale, "bias": torch.randn(shape[0]) * scale}


def random_block(d=WIDTH):
    shapes = [(d,), (3 * d, d), (d, d), (d,), (4 * d, d), (d, 4 * d)]
    return {part: random_affine(*shape) for part, shape in zip(PARTS, shapes)}


def random_image_tower(grid=SIZE // PATCH, cls=True, pre=False, bias=True):
    tower = {"conv": {"weight": torch.randn(WIDTH, 3, PATCH, PATCH) * 0.2},
             "pos": torch.randn(cls + grid**2, WIDTH),
             "blocks": [random_block() for _ in range(DEPTH)], "final": random_affine(WIDTH)}
    if bias:
        tower["conv"]["bias"] = torch.randn(WIDTH)
    if cls:
        tower["cls"] = torch.randn(WIDTH)
    if pre:
        tower["pre"] = random_affine(WIDTH)
    return tower


def random_text_tower():
    return {"embedding": torch.randn(VOCAB, WIDTH), "pos": torch.randn(CONTEXT, WIDTH),
            "blocks": [random_block() for _ in range(DEPTH)], "final": random_affine(WIDTH)}


def cast(tree, dtype):
    if isinstance(tree, dict):
        return {key: cast(value, dtype) for key, value in tree.items()}
    return [cast(value, dtype) for value in tree] if isinstance(tree, list) else tree.to(dtype)


def write(name, affine):
    return {name + key: value for key, value in affine.items()}


def write_blocks(blocks, prefix, names):
    state = {}
    for i, block in enumerate(blocks):
        for part in block:
            state |= write(f"{prefix}{i}.{names[part]}", block[part])
    return state


def write_timm(tower):
    """A tower in the names of timm and DINO."""
    state = write("patch_embed.proj.", tower["conv"])
    state |= write_blocks(tower["blocks"], "blocks.", TIMM_BLOCK)
    state |= write("norm.", tower["final"]) | {"pos_embed": tower["pos"][None]}
    return state | ({"cls_token": tower["cls"][None, None]} if "cls" in tower else {})


def write_clip(image, text):
    """Two towers in the names of OpenCLIP and OpenAI."""
    state = {"visual.class_embedding": image["cls"], "visual.positional_embedding": image["pos"],
             "visual.proj": torch.randn(WIDTH, 8), "positional_embedding": text["pos"],
             "text_projection": torch.randn(WIDTH, 8), "logit_scale": torch.tensor(4.6),
             "token_embedding.weight": text["embedding"]}
    state |= write("visual.conv1.", image["conv"]) | write("visual.ln_pre.", image["pre"])
    state |= write("visual.ln_post.", image["final"]) | write("ln_final.", text["final"])
    state |= write_blocks(image["blocks"], "visual.transformer.resblocks.", CLIP_BLOCK)
    return state | write_blocks(text["blocks"], "transformer.resblocks.", CLIP_BLOCK)


def literal_norm(x, p, eps):
    rows = []
    for row in x:
        mean = sum(row) / len(row)
        variance = sum((v - mean) ** 2 for v in row) / len(row)
        rows.append((row - mean) / (variance + eps) ** 0.5 * p["weight"] + p["bias"])
    return torch.stack(rows)


def literal_gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def literal_quick_gelu(x):
    return x / (1 + torch.exp(-1.702 * x))


def literal_attention(x, p, heads, sees):
    n, d = x.shape
    e = d // heads
    q, k, v = (x @ p["qkv"]["weight"].T + p["qkv"]["bias"]).split(d, dim=1)
    rows = []
    for i in range(n):
        row = []
        for h in range(heads):
            part = slice(h * e, (h + 1) * e)
            keys = [j for j in range(n) if sees(i, j)]
            weights = [torch.exp(q[i, part] @ k[j, part] / e**0.5) for j in keys]
            row.append(sum(w * v[j, part] for w, j in zip(weights, keys)) / sum(weights))
        rows.append(torch.cat(row))
    return torch.stack(rows) @ p["out"]["weight"].T + p["out"]["bias"]


def literal_block(x, p, heads, act, eps, sees=lambda i, j: True):
    """One sample (N, d) through a pre-norm block; query i attends to key j where sees(i, j)."""
    x = x + literal_attention(literal_norm(x, p["ln1"], eps), p, heads, sees)
    hidden = act(literal_norm(x, p["ln2"], eps) @ p["fc1"]["weight"].T + p["fc1"]["bias"])
    return x + hidden @ p["fc2"]["weight"].T + p["fc2"]["bias"]


def literal_vit(tower, image, act, eps, pos=None):
    tower, image = cast(tower, torch.float64), image.double()
    rows = [tower["cls"]] if "cls" in tower else []
    for top in range(0, image.shape[1], PATCH):
        for left in range(0, image.shape[2], PATCH):
            patch = tower["conv"]["weight"] * image[:, top:top + PATCH, left:left + PATCH]
            rows.append(patch.sum((1, 2, 3)) + tower["conv"].get("bias", 0))
    x = torch.stack(rows) + (tower["pos"] if pos is None else pos.double())
    if "pre" in tower:
        x = literal_norm(x, tower["pre"], eps)
    for block in tower["blocks"]:
        x = literal_block(x, block, HEADS, act, eps)
    return literal_norm(x, tower["final"], eps)


def literal_text(tower, tokens, act, eps):
    """The causal tower."""
    tower = cast(tower, torch.float64)
    x = torch.stack([tower["embedding"][t] + tower["pos"][i] for i, t in enumerate(tokens)])
    for block in tower["blocks"]:
        x = literal_block(x, block, HEADS, act, eps, lambda i, j: j <= i)
    return literal_norm(x, tower["final"], eps)


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


ACTIVATIONS = [(nn.GELU, literal_gelu), (common.QuickGELU, literal_quick_gelu)]


@pytest.mark.parametrize("act, literal_act", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["full", "padded", "causal"])
def test_block_and_its_gradients_are_the_literal_ones(act, literal_act, kind):
    params = write_blocks([cast(random_block(), torch.float64)], "", TIMM_BLOCK)
    block = common.Block(WIDTH, HEADS, 4.0, act, 1e-3, 0.0).double()
    block.load_state_dict({key[2:]: value for key, value in params.items()})
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    out = block(x, real[:, None, None] if kind == "padded" else None, kind == "causal")

    leaves = {key: value.clone().requires_grad_() for key, value in params.items()}
    literal = {}
    for part, name in TIMM_BLOCK.items():
        literal[part] = {end: leaves[f"0.{name}{end}"] for end in ("weight", "bias")}
    y, expected = x.detach().clone().requires_grad_(), []
    for b in range(2):
        sees = {"full": lambda i, j: True, "padded": lambda i, j: real[b, j],
                "causal": lambda i, j: j <= i}[kind]
        expected.append(literal_block(y[b], literal, HEADS, literal_act, 1e-3, sees))
    expected = torch.stack(expected)
    close(out, expected, 1e-10)
    cotangent = torch.randn_like(out)
    (out * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    close(x.grad, y.grad, 1e-10)
    for name, parameter in block.named_parameters():
        close(parameter.grad, leaves[f"0.{name}"].grad, 1e-10)


def test_padding_changes_nothing_at_real_tokens():
    tower = tiny_text()
    nn.init.normal_(tower.pos)
    tokens = torch.randint(VOCAB, (3, CONTEXT))
    mask = torch.arange(CONTEXT) < torch.tensor([[4], [2], [4]])
    padded = tower(tokens, mask)
    close(padded[:, :4][mask[:, :4]], tower(tokens[:, :4], mask[:, :4])[mask[:, :4]], 1e-6)
    close(padded[1, :2], tower(tokens[1:2, :2])[0], 1e-6)
    assert (padded - tower(tokens))[mask].abs().max() > 1e-3


def test_causal_tower_sees_no_later_token():
    tower = tiny_text(causal=True)
    tokens = torch.randint(VOCAB, (2, CONTEXT))
    other = tokens.clone()
    other[:, 3] = (other[:, 3] + 1) % VOCAB
    a, b = tower(tokens), tower(other)
    assert torch.equal(a[:, :3], b[:, :3])
    assert ((a - b)[:, 3:].abs().amax(-1) > 1e-6).all()
    close(a[:, :4], tower(tokens[:, :4]), 1e-6)


@pytest.mark.parametrize("height, width", [(12, 12), (20, 16), (8, 24)])
@pytest.mark.parametrize("cls", [True, False])
def test_vit_at_any_size(cls, height, width):
    tower, images = random_image_tower(cls=cls), torch.randn(2, 3, height, width)
    vit = tiny_vit(cls=cls).eval()
    assert common.load_encoder_weights(vit, write_timm(tower)) == []
    grid = tower["pos"][int(cls):].view(3, 3, WIDTH)
    grid = literal_resize(grid, height // PATCH, width // PATCH)
    pos = torch.cat([tower["pos"][:int(cls)], grid])
    out = vit(images)
    assert out.shape == (2, cls + height * width // PATCH**2, WIDTH)
    for image, tokens in zip(images, out):
        close(tokens, literal_vit(tower, image, literal_gelu, 1e-6, pos))


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


def test_stem_has_the_grid_of_the_patches():
    vit = common.ViT(**common.encoder_settings(common.ViT, "tiny", common.VIT_PRESETS))
    assert vit(torch.randn(2, 3, 48, 48)).shape == (2, 36, 96)
    assert vit(torch.randn(2, 3, 64, 48)).shape == (2, 48, 96)


def test_gradient_checkpointing_changes_no_gradient():
    mask = torch.arange(CONTEXT) < torch.tensor([[4], [7]])
    images, tokens = torch.randn(2, 3, SIZE, SIZE), torch.randint(VOCAB, (2, CONTEXT))
    for encoder, inputs in ((tiny_vit(drop_path=0.5), [images]),
                            (tiny_text(drop_path=0.5), [tokens, mask])):
        forwards, gradients = [], []
        encoder.blocks[0].register_forward_pre_hook(lambda *_: forwards.append(1))
        for grad_checkpoint in (False, True):
            encoder.blocks.grad_checkpoint = grad_checkpoint
            encoder.zero_grad()
            torch.manual_seed(3)
            encoder(*inputs).square().mul(torch.arange(WIDTH)).sum().backward()
            gradients.append([p.grad.clone() for p in encoder.parameters()])
        assert len(forwards) == 3
        assert all(map(torch.equal, *gradients))


def test_checkpointed_blocks_can_be_compiled():
    vit, images, gradients = tiny_vit(), torch.randn(2, 3, SIZE, SIZE), []
    vit.blocks.grad_checkpoint = True
    for encoder in (vit, torch.compile(vit, backend="aot_eager")):
        vit.zero_grad()
        encoder(images).square().sum().backward()
        gradients.append([p.grad.clone() for p in vit.parameters()])
    for a, b in zip(*gradients):
        close(a, b)


def small_resnet():
    return common.ResNet(64, blocks=(1, 2, 1, 1))


def test_resnet_gives_torchvisions_last_feature_map():
    theirs = torchvision.models.resnet50(weights=None).eval()
    ours = common.ResNet(**common.image_encoder_settings("ResNet-50")[1]).eval()
    state = {f"module.{name}": value for name, value in theirs.state_dict().items()}
    report = common.load_encoder_weights(ours, state)
    assert report == ["module.fc.weight: not used", "module.fc.bias: not used"]
    images, maps = torch.randn(2, 3, 96, 64), []
    theirs.layer4.register_forward_hook(lambda *args: maps.append(args[2]))
    with torch.no_grad():
        theirs(images)
        tokens = ours(images)
    assert tokens.shape == (2, 6, 2048)
    assert (ours.width, ours.grid, ours.cls) == (2048, 7, None)
    torch.testing.assert_close(tokens, maps[0].flatten(2).transpose(1, 2))


def test_resnet_recomputes_its_blocks_without_changing_a_gradient():
    images, gradients, buffers = torch.randn(2, 3, 64, 64), [], []
    start = small_resnet().state_dict()
    for grad_checkpoint in (False, True):
        encoder = small_resnet()
        encoder.load_state_dict(start)
        for layer in (encoder.layer1, encoder.layer2, encoder.layer3, encoder.layer4):
            layer.grad_checkpoint = grad_checkpoint
        encoder(images).square().sum().backward()
        gradients.append([p.grad for p in encoder.parameters()])
        buffers.append(list(encoder.buffers()))  # a batch counts once in BatchNorm's statistics
    assert all(map(torch.equal, *gradients)) and all(map(torch.equal, *buffers))


def test_resnet_refuses_other_sizes_and_other_files():
    with pytest.raises(UserError, match="image_size 50 is not a multiple of 32"):
        common.ResNet(50)
    with pytest.raises(UserError, match="No block of the file fits this ResNet"):
        common.load_encoder_weights(small_resnet(), tiny_vit().state_dict())


def test_cls_attention_is_the_softmax_of_the_last_block():
    encoder = tiny_vit(cls=True, pre_norm=True).double()
    images, inputs = torch.randn(2, 3, 16, 8, dtype=torch.double), []
    weights = encoder.cls_attention(images)
    assert weights.shape == (2, 3, 4, 2)
    attention = encoder.blocks[1].attn
    attention.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    encoder(images)
    qkv = attention.qkv(inputs[0])                                       # (B, 9, 36)
    for b in range(2):
        for head in range(3):
            q, k = qkv[b, 0, 4 * head:4 * head + 4], qkv[b, :, 12 + 4 * head:16 + 4 * head]
            scores = [math.exp((q @ key).item() / 2) for key in k]
            expected = [score / sum(scores) for score in scores[1:]]
            close(weights[b, head].flatten(), torch.tensor(expected), 1e-6)


def test_layers_are_the_normalised_outputs_of_the_last_blocks():
    encoder, images, outputs = tiny_vit().eval(), torch.randn(2, 3, SIZE, SIZE), []
    for block in encoder.blocks:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    layers = encoder.layers(images, 2)
    for layer, output in zip(layers, outputs[-2:], strict=True):
        torch.testing.assert_close(layer, encoder.norm(output))
    torch.testing.assert_close(layers[-1], encoder(images))
    assert len(encoder.layers(images, 9)) == len(encoder.blocks)


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
IMAGE_FIRST = ["visual.class_embedding", "visual.positional_embedding", "visual.proj"]
TEXT_FIRST = ["positional_embedding", "text_projection", "logit_scale"]


def others(n, names, prefix=""):
    names = ", ".join(prefix + name for name in names)
    return f"{n} tensor(s) of other parts of the file ({names}, ...): not used"


def unused(*names):
    return [f"{name}: not used" for name in names]


def clip_towers():
    return random_image_tower(pre=True, bias=False), random_text_tower()


def check_clip(image, text, state, act, quick_gelu, reports):
    vit = tiny_vit(**CLIP_IMAGE, quick_gelu=quick_gelu)
    tower = tiny_text(causal=True, quick_gelu=quick_gelu)
    assert common.load_encoder_weights(vit, state) == reports[0]
    assert common.load_encoder_weights(tower, state) == reports[1]
    images, tokens = torch.randn(2, 3, SIZE, SIZE), torch.randint(VOCAB, (2, CONTEXT))
    for i in range(2):
        close(vit(images)[i], literal_vit(image, images[i], act, 1e-5))
        close(tower(tokens, tokens > 3)[i], literal_text(text, tokens[i], act, 1e-5))


@pytest.mark.parametrize("prefix", ["", "module."])
def test_openclip_weights(prefix):
    image, text = clip_towers()
    state = {prefix + key: value for key, value in write_clip(image, text).items()}
    check_clip(image, text, state, literal_gelu, False, [
        [others(TENSORS + 2, TEXT_FIRST, prefix), *unused(f"{prefix}visual.proj")],
        [others(TENSORS + 4, IMAGE_FIRST, prefix),
         *unused(f"{prefix}text_projection", f"{prefix}logit_scale")]])


def test_openai_weights_in_fp16():
    image, text = (cast(tower, torch.float16) for tower in clip_towers())
    state = cast(write_clip(image, text), torch.float16)
    numbers = ["input_resolution", "context_length", "vocab_size"]
    state |= {name: torch.tensor(12) for name in numbers}
    check_clip(image, text, state, literal_quick_gelu, True, [
        [others(TENSORS + 5, TEXT_FIRST), *unused("visual.proj")],
        [others(TENSORS + 4, IMAGE_FIRST), *unused("text_projection", "logit_scale", *numbers)]])


def test_custom_text_prefix_and_a_missing_patch_bias():
    image, text = clip_towers()
    state = {}
    for key, value in write_clip(image, text).items():
        state[key if key.startswith("visual.") else f"text.{key}"] = value
    tower, tokens = tiny_text(causal=True), torch.randint(VOCAB, (1, CONTEXT))
    common.load_encoder_weights(tower, state)
    close(tower(tokens)[0], literal_text(text, tokens[0], literal_gelu, 1e-5))
    vit, images = tiny_vit(**CLIP_IMAGE | {"patch_bias": True}), torch.randn(1, 3, SIZE, SIZE)
    report = common.load_encoder_weights(vit, state)
    assert "patch_embed.bias: not in the file, set to zero" in report
    assert not vit.patch_embed.bias.any()
    close(vit(images)[0], literal_vit(image, images[0], literal_gelu, 1e-5))


def test_timm_weights():
    tower, images = random_image_tower(), torch.randn(2, 3, SIZE, SIZE)
    state = write_timm(tower) | write("head.", random_affine(5, WIDTH))
    state["blocks.0.ls1.gamma"] = torch.ones(WIDTH)
    vit = tiny_vit(cls=True)
    report = common.load_encoder_weights(vit, state)
    assert report == unused("head.weight", "head.bias", "blocks.0.ls1.gamma")
    for image, tokens in zip(images, vit(images)):
        close(tokens, literal_vit(tower, image, literal_gelu, 1e-6))


@pytest.mark.parametrize("nested", [True, False])
def test_dino_weights_take_the_teacher(nested):
    student, teacher = random_image_tower(), random_image_tower()
    theirs = write("backbone.", write_timm(teacher)) | {"head.mlp.0.weight": torch.zeros(3)}
    ours = write("module.backbone.", write_timm(student))
    state = {"student": ours, "teacher": theirs, "epoch": 7}
    names = [f"student.{name}" for name in ours]
    expected = others(len(names) + 1, names[:3])
    if not nested:
        state = write("teacher.", theirs)
        expected = ("1 tensor(s) of other parts of the file (teacher.head.mlp.0.weight): "
                    "not used")
    vit, image = tiny_vit(cls=True), torch.randn(1, 3, SIZE, SIZE)
    assert common.load_encoder_weights(vit, state) == [expected]
    close(vit(image)[0], literal_vit(teacher, image[0], literal_gelu, 1e-6))


def test_weights_of_our_own_checkpoint():
    towers = {"image_encoder": tiny_vit(), "text_encoder": tiny_text()}
    model = nn.ModuleDict(towers | {"head": nn.Linear(2, 2)})
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for name, encoder in (("image_encoder", tiny_vit()), ("text_encoder", tiny_text())):
        state = {"model": model.state_dict(), "step": 3}
        assert len(common.load_encoder_weights(encoder, state)) == 1
        assert all(map(torch.equal, encoder.parameters(), model[name].parameters()))


@pytest.mark.parametrize("from_cls", [True, False])
@pytest.mark.parametrize("to_cls", [True, False])
@pytest.mark.parametrize("size", [SIZE, 20])
def test_position_grid_of_a_file_is_fitted(from_cls, to_cls, size):
    tower = random_image_tower(cls=from_cls)
    vit = tiny_vit(cls=to_cls, image_size=size)
    report = common.load_encoder_weights(vit, write_timm(tower))
    g = size // PATCH
    expected = literal_resize(tower["pos"][int(from_cls):].view(3, 3, WIDTH), g, g)
    if to_cls:
        cls = tower["pos"][:1] if from_cls else torch.zeros(1, WIDTH)
        expected = torch.cat([cls, expected])
    close(vit.pos[0], expected)
    notes = []
    if from_cls and not to_cls:
        notes = ["pos_embed: position of the CLS token not used", "cls_token: not used"]
    if to_cls and not from_cls:
        notes = ["pos_embed: no position of the CLS token, set to zero",
                 "cls: nothing in the file fits, left at its initial value"]
    if size != SIZE:
        notes.append("pos_embed: grid interpolated from 9 to 25 positions")
    assert sorted(report) == sorted(notes)


def test_fp16_positions_are_interpolated_in_fp32():
    tower = cast(random_image_tower(), torch.float16)
    vit = tiny_vit(cls=True, image_size=20)
    common.load_encoder_weights(vit, write_timm(tower))
    close(vit.pos[0, 1:], literal_resize(tower["pos"][1:].view(3, 3, WIDTH), 5, 5), 1e-6)


def test_report_lists_exactly_what_did_not_fit():
    state = write_timm(random_image_tower())
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


@pytest.mark.parametrize("state, message", [
    ({}, "No block of the file fits this ViT: it holds no tensor."),
    ({"layer1.0.conv.weight": torch.zeros(3)}, "fits this ViT: layer1.0.conv.weight: not used"),
    ({"blocks.0.norm1.weight": torch.zeros(99)},
     r"blocks.0.norm1.weight: shape \(99,\) does not fit \(12,\)"),
])
def test_a_file_in_which_nothing_fits(state, message):
    with pytest.raises(UserError, match=message):
        common.load_encoder_weights(tiny_vit(), state)


@pytest.mark.parametrize("spec, name, settings", [
    ("tiny", "tiny", {}),
    ("ViT-B/16:drop_path=0.1,cls=1", "ViT-B/16", {"drop_path": "0.1", "cls": "1"}),
    ("C:/data/a.csv", "C:/data/a.csv", {}),
    ("C:/data/a.csv:image=path", "C:/data/a.csv", {"image": "path"}),
    ("d/{00..12}.tar:resample=1", "d/{00..12}.tar", {"resample": "1"}),
    ("a,b:c", "a,b:c", {}),
])
def test_parse_spec(spec, name, settings):
    assert common.parse_spec(spec) == (name, settings)


def test_cast_settings():
    defaults = {"n": 3, "x": 0.5, "flag": False, "name": "a"}
    texts = {"n": "4", "x": "1e-3", "flag": "True", "name": "b"}
    values = {"n": 4, "x": 1e-3, "flag": True, "name": "b"}
    assert common.cast_settings(texts, defaults, "it") == values
    assert common.cast_settings({"flag": "0"}, {"flag": True}, "it") == {"flag": False}
    with pytest.raises(UserError, match="it has no setting 'm'; it has flag, n, name, x."):
        common.cast_settings({"m": "1"}, defaults, "it")
    with pytest.raises(UserError, match="n='4.5' is not of type int"):
        common.cast_settings({"n": "4.5"}, defaults, "it")


def test_encoder_settings():
    spec = "ViT-B/16:drop_path=0.1,cls=1"
    assert common.encoder_settings(common.ViT, spec, common.VIT_PRESETS) == dict(
        image_size=224, patch_size=16, width=768, depth=12, heads=12, mlp_ratio=4.0, cls=True,
        positions="learned", pre_norm=False, stem=None, quick_gelu=False, eps=1e-6,
        patch_bias=True, drop_path=0.1)
    settings = common.encoder_settings(common.TextTransformer, "12x768:causal=true",
                                       common.TEXT_PRESETS)
    assert settings.items() >= dict(width=768, depth=12, heads=12, causal=True).items()


@pytest.mark.parametrize("spec, message", [
    ("ViT-Z/9", "no ViT preset 'ViT-Z/9'; there are tiny, ViT-S/16"),
    ("tiny:colour=red", "ViT has no setting 'colour'; it has cls, depth"),
    ("tiny:depth=two", "depth='two' is not of type int"),
    ("tiny:stem=none", "ViT has no setting 'stem'"),
    ("tiny:patch_size=4", "strides of stem .* must multiply to patch_size 4"),
    ("tiny:image_size=50", "image_size 50 is not a multiple of patch_size 8: give 48"),
    ("tiny:positions=round", "positions must be learned or sincos, not 'round'"),
    ("tiny:heads=5", "width 96 is not a multiple of heads 5"),
])
def test_bad_encoder_settings(spec, message):
    with pytest.raises(UserError, match=message):
        common.ViT(**common.encoder_settings(common.ViT, spec, common.VIT_PRESETS))


class Pair(nn.Module):
    """BatchNorm, then a contrastive loss of the local rows against the gathered ones."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 4, 1), norm(4), nn.Linear(4 * 25, 6)

    def forward(self, x, gather=lambda x: x):
        y = self.norm(self.conv(x))
        z = self.linear(y.tanh().flatten(1))
        logits = z @ gather(z.sin()).T
        return nn.functional.cross_entropy(logits, torch.arange(len(z))), y, z


def pair_and_images(norm):
    torch.manual_seed(5)
    images = torch.randn(6, 3, 5, 5)
    images[2:] = 2 * images[2:] + 3  # the first rank's images are unlike the others'
    return Pair(norm), images


def train_pair(rank):
    model, images = pair_and_images(common.BatchNorm)
    local = images[2 * rank:2 * rank + 2]
    parallel = DistributedDataParallel(model)
    loss, y, z = parallel(local, common.gather)
    loss.backward()
    half = common.BatchNorm(3)(local.bfloat16())
    return {"loss": loss.detach(), "y": y.detach(), "z": z.detach(), "half": half.detach(),
            "state": model.state_dict(), "gradients": [p.grad for p in model.parameters()],
            "eval": model.eval()(images[:3])[1].detach(),
            "gathered": common.gather(torch.tensor([[rank, 0], [rank, 1]])),
            "objects": common.gather_objects({"rank": rank})}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("ranks"), train_pair, world=3)


def test_three_ranks_have_the_values_and_gradients_of_one_process(ranks):
    model, images = pair_and_images(nn.BatchNorm2d)
    loss, y, z = model(images)
    loss.backward()
    close(sum(rank["loss"] for rank in ranks) / 3, loss.detach(), 1e-6, 1e-6)
    close(torch.cat([rank["y"] for rank in ranks]), y.detach(), 1e-6, 1e-6)
    close(torch.cat([rank["z"] for rank in ranks]), z.detach(), 1e-6, 1e-6)
    for rank in ranks:
        for a, parameter in zip(rank["gradients"], model.parameters(), strict=True):
            close(a, parameter.grad, 1e-5)
        for name, value in model.state_dict().items():
            close(rank["state"][name], value, 1e-6, 1e-6)
        close(rank["eval"], model.eval()(images[:3])[1].detach(), 1e-6, 1e-6)
    assert max(p.grad.abs().max() for p in model.parameters()) > 0.1


def test_batch_norm_of_bf16_has_fp32_statistics(ranks):
    _, images = pair_and_images(nn.BatchNorm2d)
    expected = nn.BatchNorm2d(3)(images.bfloat16().float()).detach()
    out = torch.cat([rank["half"] for rank in ranks])
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=1e-4, rtol=2**-8)


def test_gather_puts_this_ranks_rows_first(ranks):
    for i, order in enumerate([(0, 1, 2), (1, 2, 0), (2, 0, 1)]):
        assert ranks[i]["gathered"].tolist() == [[rank, row] for rank in order for row in (0, 1)]
        assert ranks[i]["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_one_process_needs_no_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    x = torch.randn(2, 3)
    assert common.init_distributed()[:2] == (0, 1) and not dist.is_initialized()
    assert common.gather(x) is x and common.gather_objects(3) == [3]
