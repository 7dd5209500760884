"""Weights of other projects: start from a CLIP or a ViT, export a ViT. Lines for other projects.

Made-up checkpoints have the names of OpenCLIP's, OpenAI's, timm's, DINO's and BAM's files. Each
method file has a comment with lines that use its loss in another project. A test runs the lines.
"""

import argparse
import copy
import functools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, normalize

import common
import eval as evaluation
import stair
import train
from common import UserError
from helpers import ROOT, SMALL, make_batch, read_log, tiny_model, train_alone, weights
from test_encoders import (CLIP_PIXELS, CONTEXT, DEPTH, SIZE, VOCAB, WIDTH, close, literal_text, literal_vit,
                           pils_resize, quick_gelu, random_weights, renamed, tiny_text, tiny_vit)

IMAGENET_PIXELS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_IMAGE = dict(cls=True, pre_norm=True, patch_bias=False, eps=1e-5)
CLIP_NAMES = [  # (part of our name, part of the name in files of OpenCLIP and OpenAI)
    ("embedding.", "token_embedding."), ("cls", "class_embedding"), ("pos", "positional_embedding"),
    ("patch_embed.", "conv1."), ("norm_pre.", "ln_pre."), ("blocks.", "transformer.resblocks."),
    (".norm1.", ".ln_1."), (".attn.qkv.", ".attn.in_proj_"), (".attn.proj.", ".attn.out_proj."),
    (".norm2.", ".ln_2."), (".mlp.fc1.", ".mlp.c_fc."), (".mlp.fc2.", ".mlp.c_proj.")]
NUMBERS = {"input_resolution": torch.tensor(12), "context_length": torch.tensor(7)}  # OpenAI


def prefixed(prefix, state):
    """Return the state dict with the prefix before each name."""
    return {prefix + name: value for name, value in state.items()}


def clip_names(image, text, E=8):
    """Return two encoders and projections to width E under the names of OpenCLIP and OpenAI."""
    wide, text_wide = len(image["norm.weight"]), len(text["norm.weight"])
    image = renamed(image, [*CLIP_NAMES, ("norm.", "ln_post.")])
    text = renamed(text, [*CLIP_NAMES, ("norm.", "ln_final.")])
    state = prefixed("visual.", image) | text
    for name in state:
        if name.endswith(("class_embedding", "positional_embedding")):
            state[name] = state[name].squeeze()
    return state | {"visual.proj": torch.randn(wide, E), "logit_scale": torch.tensor(4.6),
                    "text_projection": torch.randn(text_wide, E)}


def model_of(name, vit, encoder, **settings):
    """Return a method's model with these two encoders."""
    config = train.METHODS[name].Settings(**settings)
    config.method = name
    return common.build_model(train.METHODS[name], config, vit, encoder)


def custom_text(state):
    """Return OpenCLIP's training checkpoint of a model whose text encoder is a separate module."""
    for key in list(state):
        if not key.startswith(("visual.", "logit_scale")):
            state[f"text.{key}"] = state.pop(key)
    return {"epoch": 3, "state_dict": prefixed("module.", state)}


@pytest.mark.parametrize("act, dtype, extra, change", [
    (gelu, torch.float32, {}, dict), (gelu, torch.float32, {}, custom_text),
    (quick_gelu, torch.float16, NUMBERS, dict)])
def test_sparos_clip_has_the_encodings_of_the_loaded_clip(act, dtype, extra, change):
    quick = act is quick_gelu
    vit = tiny_vit(**CLIP_IMAGE, quick_gelu=quick)
    encoder = tiny_text(causal=True, quick_gelu=quick)
    image, text = random_weights(vit, dtype), random_weights(encoder, dtype)
    clip = clip_names(image, text)
    projections = clip["visual.proj"], clip["text_projection"]
    parts = common.load_clip((vit, encoder), change(clip | extra), None)
    model = model_of("sparo", vit, encoder, readout="cls", embed_dim=8)
    common.load_clip_parts(model, parts)
    images, tokens = torch.randn(2, 3, SIZE, SIZE), torch.randint(VOCAB, (2, CONTEXT))
    mask = torch.arange(CONTEXT) < torch.tensor([[4], [CONTEXT]])
    v, t = model.encode_image(images), model.encode_text(tokens, mask)
    for i, last in enumerate((3, CONTEXT - 1)):
        cls = literal_vit(image, images[i], act, 1e-5)[0]
        end = literal_text(text, tokens[i], act, 1e-5)[last]
        close(v[i], normalize(cls @ projections[0].double(), dim=0))
        close(t[i], normalize(end @ projections[1].double(), dim=0))
    assert model.log_scale.item() == pytest.approx(4.6)


@pytest.mark.parametrize("name, settings, taken", [
    ("sparc", {"embed_dim": 8}, 3), ("sparc", {"embed_dim": 8, "objective": "clip"}, 3),
    ("sparc", {"embed_dim": 8, "objective": "pacl"}, 2),
    ("sparo", {"readout": "cls", "embed_dim": 8}, 3),
    ("sparo", {"L": 2, "V": 3, "D": 4}, 1), ("stair", {}, 1)])
def test_each_method_loads_the_parts_of_a_clip_that_it_has(name, settings, taken):
    model = model_of(name, tiny_vit(cls=True), tiny_text(), **settings)
    before = {key: p.clone() for key, p in model.named_parameters()}
    parts = {"visual.proj": torch.randn(WIDTH, 8), "text_projection": torch.randn(WIDTH, 8),
             "logit_scale": torch.tensor(4.5)}
    common.load_clip_parts(model, parts)
    changed = [key for key, p in model.named_parameters() if not torch.equal(p, before[key])]
    assert len(changed) == taken
    for part, parameter in model.clip_parameters().items():
        assert torch.equal(parameter, parts[part].T if parts[part].ndim else parts[part])


@pytest.mark.parametrize("wrong", [lambda x: (100 * x).to(torch.int8), lambda x: x > 0,
                                   lambda x: x / 0])
def test_weights_that_are_no_finite_floats_are_refused_wherever_they_are_loaded(wrong):
    with pytest.raises(UserError, match="is NaN, infinite or no float"):
        vit = tiny_vit()
        state = common.timm_weights(vit)["model"]
        name = "blocks.0.attn.qkv.weight"
        common.load_timm(vit, state | {name: wrong(state[name])})
    model = model_of("sparc", tiny_vit(cls=True), tiny_text(), embed_dim=8)
    parts = {"visual.proj": torch.randn(WIDTH, 8), "logit_scale": torch.tensor(4.5)}
    with pytest.raises(UserError, match="the file has no finite text_projection of shape"):
        common.load_clip_parts(model, parts | {"text_projection": parts["visual.proj"] / 0})


def test_a_clip_needs_clips_vocabulary_and_openais_needs_quick_gelu_in_both_encoders():
    encoders = tiny_vit(**CLIP_IMAGE), tiny_text(causal=True, vocab_size=49408)
    state = clip_names(*map(random_weights, encoders))
    words = [*common.SPECIAL_TOKENS, *map(str, range(49404))]
    for cut in (common.WordPiece(words), common.BPE(["#version: 0.2", "a t</w>"])):
        with pytest.raises(UserError, match="the file needs CLIP's tokens: give --vocab bpe_simple"):
            common.load_clip(encoders, state, cut)
    common.load_clip(encoders, state, SimpleNamespace(encode=lambda text: [49406, 49407]))
    for image, text in ((True, False), (False, True)):
        encoders = tiny_vit(quick_gelu=image), tiny_text(causal=True, quick_gelu=text)
        with pytest.raises(UserError, match="add :quick_gelu=1 to both encoders"):
            common.load_clip(encoders, NUMBERS, None)


def made_up_clip_file(vocab, changes={}):
    """Write clip.pt with random weights of a CLIP, and return SPARC's flags to start from the file.

    changes: {tensor: another shape, or None if the file lacks the tensor}.
    """
    encoders = [f"clip-b32:width=16,heads=2,depth=1,{more}"
                for more in ("image_size=16,patch_size=8", "context=32,vocab_size=1")]
    flags = ["--image-encoder", encoders[0], "--text-encoder", encoders[1], "--embed-dim", "8",
             "--vocab", str(vocab), "--init-weights", "clip.pt"]
    args = train.parse_args([*SMALL["sparc"], *flags])
    tokenizer = common.open_tokenizer(vocab)
    encoders = common.build_encoders(train.METHODS["sparc"], args, tokenizer)
    clip = clip_names(*map(random_weights, encoders))
    for name, shape in changes.items():
        clip[name] = shape if shape is None else torch.ones(shape)
    torch.save({name: x for name, x in clip.items() if x is not None}, "clip.pt")
    return flags


@pytest.mark.parametrize("name", ["clip", "stair", "bam"])
def test_no_steps_change_nothing_and_evaluate(tmp_path, monkeypatch, run_of, name):
    """With one step and --lr 0 the statistics of BatchNorm would move. A run that starts from a
    CLIP resumes without its file."""
    monkeypatch.chdir(tmp_path)
    flags = made_up_clip_file(run_of("sparc") / "vocab.txt") if name == "clip" else []
    flags = [*SMALL["sparc" if name == "clip" else name], *flags, "--steps", "0", "--out", "run"]
    train.main(flags)
    args = train.parse_args(flags)
    method = train.METHODS[args.method]
    data = train.open_training_data(args, method)
    tokenizer = train.build_tokenizer(args, data) if method.uses_text(args) else None
    initial, saved = train.new_model(args, method, tokenizer).state_dict(), weights(Path("run"))
    assert [key for key, x in initial.items() if not torch.equal(x, saved[key])] == []
    figures = json.loads(Path("run/eval.json").read_text())
    assert figures.keys() >= {"knn" if name == "bam" else "zeroshot"} and not read_log(Path("run"))
    if name == "clip":
        clip = torch.load("clip.pt")
        assert torch.equal(saved["g_v.weight"], clip["visual.proj"].T)
        assert torch.equal(saved["image_encoder.patch_embed.weight"], clip["visual.conv1.weight"])
        Path("clip.pt").unlink()
    if name != "bam":
        train_alone(["--resume", "--out", "run", "--steps", 8])
        assert len(read_log(Path("run"))) == 8


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_cannot_be_read_is_named_with_torchs_reason(tmp_path, monkeypatch):
    """OpenAI's CLIP is a TorchScript archive."""
    torch.jit.script(nn.Linear(2, 3)).save(tmp_path / "ViT-B-32.pt")
    with pytest.raises(UserError, match="ViT-B-32.pt cannot be read: .*TorchScript.* another file"):
        common.load_checkpoint(tmp_path / "ViT-B-32.pt")
    monkeypatch.setattr(torch, "load", lambda *args, **options: bytearray(10**18))
    for content, remedy in (None, "give another file"), (b"", "begin a new run"):
        if content is not None:
            (tmp_path / "last.pt").write_bytes(content)
        with pytest.raises(UserError, match=f"last.pt cannot be read: MemoryError. Remedy: {remedy}"):
            common.load_checkpoint(tmp_path / "last.pt")


TIMM_NAMES = [("cls_token", "cls"), ("pos_embed", "pos"), ("patch_embed.proj.", "patch_embed.")]
TIMM_BLOCK = """
    norm1.weight norm1.bias attn.qkv.weight attn.qkv.bias attn.proj.weight attn.proj.bias
    norm2.weight norm2.bias mlp.fc1.weight mlp.fc1.bias mlp.fc2.weight mlp.fc2.bias"""


@pytest.mark.parametrize("settings", [
    dict(cls=True), dict(cls=False, pixels="imagenet"), dict(cls=True, positions="sincos"),
    dict(cls=True, pixels="half"), CLIP_IMAGE])
def test_an_exported_vit_has_timms_names_and_says_its_pixels(settings):
    vit = tiny_vit(**settings)
    common.restore_model(vit, random_weights(vit), "a file", "")
    file, images = common.timm_weights(vit), torch.rand(2, 3, SIZE, SIZE)
    state, constants = file["model"], (file["mean"].flatten(), file["std"].flatten())
    names = ["pos_embed", "patch_embed.proj.weight", "norm.weight", "norm.bias"]
    names += [f"blocks.{i}.{name}" for i in range(DEPTH) for name in TIMM_BLOCK.split()]
    names += ["cls_token"] * settings["cls"]
    clip = ["norm_pre.weight", "norm_pre.bias"]  # timm's CLIP has no bias of patches
    names += clip if settings is CLIP_IMAGE else ["patch_embed.proj.bias"]
    assert sorted(state) == sorted(names)
    expected = {"imagenet": IMAGENET_PIXELS, "half": (3 * [0.5], 3 * [0.5])}
    expected = torch.tensor(expected.get(settings.get("pixels"), CLIP_PIXELS))
    assert torch.equal(torch.stack(constants), expected)
    eps = settings.get("eps", 1e-6)
    for x, tokens in zip(images, vit(images), strict=True):
        close(tokens, literal_vit(renamed(state, TIMM_NAMES), x, gelu, eps, pixels=expected.tolist()))
    again = tiny_vit(**settings | {"pixels": "clip"})  # the file's constants come before the spec's
    common.load_timm(again, file)
    assert torch.equal(again(images), vit(images))


@pytest.mark.parametrize("pixels, patch_bias, expected", [
    ("", True, IMAGENET_PIXELS), ("half", True, (3 * [0.5], 3 * [0.5])), ("clip", False, CLIP_PIXELS)])
def test_weights_of_timm_get_imagenets_pixels_or_those_that_the_spec_names(
        pixels, patch_bias, expected):
    """A file of timm does not say its pixels. The presets clip-... name CLIP's."""
    vit = tiny_vit(cls=True, pixels=pixels, patch_bias=patch_bias)
    state, images = made_up_timm(vit), torch.rand(2, 3, SIZE, SIZE)
    common.load_timm(vit, state)
    for x, tokens in zip(images, vit(images), strict=True):
        close(tokens, literal_vit(renamed(state, TIMM_NAMES), x, gelu, 1e-6, pixels=expected))
    assert {settings.get("pixels") for name, settings in common.VIT_PRESETS.items()
            if name.startswith("clip-")} == {"clip"}


def made_up_timm(vit):
    """Return random weights for a ViT under timm's names."""
    names = [(ours, theirs) for theirs, ours in TIMM_NAMES]
    return renamed(random_weights(vit), names)


@pytest.mark.parametrize("save", [
    lambda state, other: state | {"head.weight": torch.ones(2)},
    lambda state, other: {                                              # DINO's file
        "student": prefixed("module.backbone.", other), "args": argparse.Namespace(lr=0.1),
        "teacher": prefixed("module.backbone.", state) | {"head.last_layer.weight": torch.ones(2)}},
    lambda state, other: {"model": prefixed("student.module.backbone.", other)      # BAM's file
                          | prefixed("teacher.backbone.", state)
                          | {"teacher.proj_head.0.bias": torch.ones(2)}, "epoch": 3},
    lambda state, other: {"model": prefixed("_orig_mod.module.backbone.", state)},
    lambda state, other: {"model": other, "model_ema": state},          # DeiT's file
    lambda state, other: {"state_dict": other, "state_dict_ema": state},
    lambda state, other: {"model": state, "model_ema": {"decay": 0.9, "shadow_params": [other]}},
    lambda state, other: state | {"fc.weight": torch.ones(2), "head_dist.bias": torch.ones(2)},
    lambda state, other: {"model": state | {                            # MAE's file
        "mask_token": torch.ones(2), "decoder_pos_embed": torch.ones(2),
        "decoder_blocks.0.norm1.weight": torch.ones(2)}},
    lambda state, other: {"state_dict": prefixed("backbone.", state)    # solo-learn's file
                          | prefixed("momentum_backbone.", other)
                          | {"projector.0.weight": torch.ones(2), "queue": torch.ones(2)}},
    lambda state, other: {"state_dict": prefixed("module.base_encoder.", state)     # MoCo-v3's
                          | prefixed("module.momentum_encoder.", other)
                          | {"module.base_encoder.head.0.weight": torch.ones(2),
                             "module.predictor.0.weight": torch.ones(2)}},
    *(lambda state, other, prefix=prefix: {"state_dict": prefixed(prefix, state)}
      for prefix in ("model.", "net.encoder.", "module.model."))])
def test_files_of_timm_dino_bam_and_others_are_read(save, tmp_path):
    """DINO's and BAM's files hold a student, too. The teacher's weights are read, and averaged
    weights. A prefix that all names share is stripped."""
    vit, expected = tiny_vit(cls=True), tiny_vit(cls=True)
    state, other = made_up_timm(vit), made_up_timm(vit)
    common.load_timm(expected, state)
    torch.save(save(state, other), tmp_path / "vit.pth")
    common.load_timm(vit, common.load_checkpoint(tmp_path / "vit.pth"))
    assert all(map(torch.equal, vit.parameters(), expected.parameters()))


@pytest.mark.parametrize("target", ["bam", "moco"])
def test_init_weights_replace_the_initial_weights_of_a_method(tmp_path, target):
    """MoCo-v3 has initial weights of its own."""
    vit = common.ViT(16, 8, width=16, depth=1, heads=2, cls=True)
    torch.save(common.timm_weights(vit), tmp_path / "vit.pt")
    flags = ["--target", "moco", "--local-crops", "0", "--teacher"] if target == "moco" else []
    shape = "tiny-patch:width=16,heads=2,depth=1,cls=1"
    train_alone([*SMALL["bam"], *flags, "--image-encoder", shape, "--image-size", "16", "--steps",
                 "0", "--init-weights", tmp_path / "vit.pt", "--out", tmp_path / "run"])
    found = weights(tmp_path / "run")
    for name, value in vit.state_dict().items():
        if not name.startswith("pixels."):
            assert torch.equal(found[f"image_encoder.{name}"], value)


@pytest.mark.parametrize("name, shape", [
    ("cls_token", ()), ("pos_embed", ()), ("pos_embed", (1, 0, WIDTH)),
    ("pos_embed", (1, 1, WIDTH)), ("pos_embed", (1, 7, WIDTH)), ("pos_embed", (2, 5, 8)),
    ("patch_embed.proj.weight", (WIDTH, 3)), ("patch_embed.proj.bias", (7,))])
def test_a_tensor_of_another_shape_is_refused(name, shape):
    state = made_up_timm(tiny_vit(cls=True)) | {name: torch.ones(shape)}
    with pytest.raises(UserError, match="^the file holds a model of another .*size mismatch for "):
        common.load_timm(tiny_vit(cls=True), state)


def test_a_vits_positions_are_interpolated_and_its_replaced_block_is_left_out():
    for cls in (True, False):
        vit, state = tiny_vit(cls=cls, image_size=20), made_up_timm(tiny_vit(cls=cls))
        common.load_timm(vit, state)
        grid = pils_resize(state["pos_embed"][0, int(cls):].view(3, 3, WIDTH), 5, 5)
        close(vit.pos[0], torch.cat([state["pos_embed"][0, :int(cls)], grid]), 1e-6)
    vit, state = tiny_vit(depth=DEPTH - 1), made_up_timm(tiny_vit())
    for encoder, word in ((vit, "Unexpected"), (tiny_vit(depth=DEPTH + 1), "Missing")):
        with pytest.raises(UserError, match=f"{word} .* its width, depth.* such as ViT-S/16"):
            common.load_timm(encoder, state)
    with pytest.raises(UserError, match="Unexpected .*reg_token.* its width, depth"):
        common.load_timm(tiny_vit(), state | {"reg_token": torch.ones(2)})
    words = ["--text-encoder", "tiny:width=16,heads=2,causal=1,vocab_size=6"]
    args = train.parse_args([*SMALL["sparo"], *words])
    built = common.build_encoders(train.METHODS["sparo"], args, range(4))
    assert [encoder.left_out for encoder in built] == [1, 1]
    assert built[1].vocab_size == 6 and built[1].special == [4, 5]  # which no token has
    vit.left_out = 1
    left_over = common.load_timm(vit, state | {"head.weight": torch.ones(2)})
    assert torch.equal(vit.norm.weight, state["norm.weight"])
    assert {*left_over} == {"head.weight", *[n for n in state if n.startswith("blocks.1.")]}


@pytest.mark.parametrize("name", ["dino", "bam"])
def test_a_run_starts_from_the_vit_that_another_run_exported(name, tmp_path, capsys):
    quick, more = (0, ["--readout", "cls"]) if name == "dino" else (1, [])
    encoder = f"tiny-patch:width=16,heads=2,depth=1,cls=1,quick_gelu={quick}"
    flags = [*SMALL[name], "--image-encoder", encoder, *more]
    runs, file = [str(tmp_path / run) for run in ("a", "b")], str(tmp_path / "vit.pt")
    train_alone([*flags, "--out", runs[0], "--seed", "1", "--lr", "0.1"])
    evaluation.main([runs[0], "--export", file])
    assert f"{file}: {encoder}, 16 pixels, with the names of timm" in capsys.readouterr().out
    train_alone([*flags, "--out", runs[1], "--seed", "2", "--lr", "0", "--init-weights", file])
    assert torch.equal(weights(tmp_path / "b")["image_encoder.pixels.mean"], torch.load(file)["mean"])
    assert f"{file} is loaded. Left over in the file: nothing." in capsys.readouterr().out
    a, b = (evaluation.load_run(run)[0].model for run in runs)
    for ours, theirs in zip(a.evaluation_encoder().parameters(), b.evaluation_encoder().parameters()):
        close(ours, theirs)
    assert torch.equal(b.image_encoder.pos, b.evaluation_encoder().pos)


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch.export of older versions fails")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["sparo", "stair", "sparc", "bam"])
def test_torch_traces_exports_and_quantises_encode_image(name, monkeypatch):
    """The traced and the exported function take another batch size than their example."""
    monkeypatch.setattr(stair.StreamedEncoding, "CHUNK", 600)               # a part for each image
    model = tiny_model(name).eval()
    model.forward = model.encode_image
    images, sizes = torch.rand(5, 3, 16, 16), {0: torch.export.Dim("B")}
    with torch.no_grad():
        expected = model.encode_image(images)
        close(torch.jit.trace(model, images[:2])(images), expected)
        exported = torch.export.export(model, (images[:2],), dynamic_shapes=(sizes,))
        close(exported.module()(images), expected)
        small = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)
        assert (small.encode_image(images) * expected).sum(1).min() > 0.99


def snippet(name):
    """Return a method's lines for another project: run once, for each batch, for each update.

    Widths and ids of CLIP are smaller here.
    """
    text = (ROOT / f"{name}.py").read_text().partition("stop here")[2]
    for number, small in {"768": "12", "512": "10", "49406": "28", "49407": "29"}.items():
        text = text.replace(number, small)
    for comments in re.findall(r"(?: *#[^\n]*\n)+", text):
        lines = [line.strip()[6:] for line in comments.splitlines()
                 if line.strip().startswith("#     ")]
        if any("loss.backward()" in line for line in lines):
            break
    marks = [line.rpartition("# ")[2].split(";")[0] for line in lines]
    when = [mark if mark in ("once", "update") else "batch" for mark in marks]
    return ["\n".join(line for line, of in zip(lines, when) if of == part)
            for part in ("once", "batch", "update")]


class TheirClip(nn.Module):
    """What the lines use of Hugging Face's CLIPModel and of OpenCLIP's CLIP: a layer for images
    (B, 3, 16, 16) and a layer for ids (B, L)."""

    def __init__(self):
        super().__init__()
        self.patches, self.words = nn.Conv2d(3, 12, 8, 8), nn.Embedding(30, 10)
        nn.init.normal_(self.words.weight, std=0.05)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))
        self.vision_model = lambda pixel_values: SimpleNamespace(
            last_hidden_state=self.patches(pixel_values).flatten(2).mT)     # (B, 4, 12)
        self.text_model = lambda input_ids, attention_mask=None: SimpleNamespace(
            last_hidden_state=self.words(input_ids).cumsum(1))              # (B, L, 10)
        self.vision_model.post_layernorm = nn.Identity()
        self.text_model.embeddings = SimpleNamespace(token_embedding=self.words)
        self.visual = SimpleNamespace(proj=torch.randn(12, 4))
        self.text_projection = torch.randn(10, 4)

    def forward_intermediates(self, image, text, **flags):
        assert flags == {"image_indices": 1, "text_indices": 1, "normalize_intermediates": True,
                         "image_output_fmt": "NLC"}
        x, y = self.vision_model(image).last_hidden_state, self.text_model(text).last_hidden_state
        return {"image_features": normalize(x.mean(1) @ self.visual.proj, dim=-1),
                "text_features": normalize(y[:, -1] @ self.text_projection, dim=-1),
                "image_intermediates": [x], "text_intermediates": [y]}


def as_they_have_it(name):
    """Return a batch under the names that the lines use."""
    if name == "bam":
        return {"views": [torch.randn(4, 3, size, size) for size in (16, 16, 8)]}
    batch = make_batch()
    last = batch["mask"].sum(1, keepdim=True) - 1
    ids = torch.where(batch["mask"], batch["tokens"].clamp(max=27), 0 if name == "sparc" else 29)
    ids = ids.scatter(1, last, 29)
    ids[:, 0] = 28
    return {"images": batch["images"], "ids": ids, "mask": batch["mask"].long()}


@pytest.mark.parametrize("name", ["sparo", "stair", "sparc", "bam"])
def test_the_lines_for_other_projects_train_all_parameters(name):
    once, lines, update = snippet(name)
    known = dict(vars(train.METHODS[name]), d=12, G=2) | as_they_have_it(name)
    if name == "bam":
        pool, small = nn.AdaptiveAvgPool2d(1), dict(projector_width=12, projector_dim=6)
        known["backbone"] = nn.Sequential(nn.Conv2d(3, 12, 8, 8), pool, nn.Flatten())
        known["Config"] = functools.partial(train.METHODS["bam"].Config, **small)
    else:
        known["model"] = TheirClip()
    exec(once, known)
    theirs = nn.ModuleList([x for x in known.values() if isinstance(x, nn.Module)])
    before = {key: p.detach().clone() for key, p in theirs.named_parameters()}
    exec(lines, known)
    assert known["loss"].isfinite()
    if name != "bam":
        known["model"].logit_scale.data.fill_(9.0)
    exec(update, known)
    changed = [key for key, p in theirs.named_parameters() if not torch.equal(p, before[key])]
    assert changed == list(before)
    assert name == "bam" or known["model"].logit_scale <= math.log(100) + 1e-6


def test_weights_that_do_not_fit_are_refused_by_their_cause(tmp_path):
    vit = tiny_vit(cls=True)
    state = made_up_timm(vit)
    for name in ("visual.transformer.resblocks.0.ln_1.weight", "vit.embeddings.layernorm.weight"):
        with pytest.raises(common.UserError, match=f"{name}.*give a file with timm's names"):
            common.load_timm(vit, state | {name: torch.ones(2)})
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(common.UserError, match="more than tensors .* or is no file of torch.save"):
        common.load_checkpoint(tmp_path / "index.json")
