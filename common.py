"""What the four methods share: distributed set-up, encoders, tokenizer, data, schedules, checkpoints.

Nothing here knows a method, and no method file imports this one: train.py and eval.py join them.
"""

import contextlib
import csv
import dataclasses
import functools
import hashlib
import heapq
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import tarfile
import unicodedata
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, get_worker_info
from torchvision.models import resnet
from torchvision.ops import Conv2dNormActivation, masks_to_boxes, stochastic_depth
from torchvision.transforms import v2


class UserError(Exception):
    """Bad input. The command line prints the message as one sentence, without a traceback."""


def parse_spec(spec):
    """`"name:key=value,key=value"` -> `("name", {key: value})`; a colon without `=` behind it belongs to the name."""
    match = re.fullmatch(r"(.*?):(\w+=[^,=]*(?:,\w+=[^,=]*)*)", spec)
    if not match:
        return spec, {}
    return match[1], dict(item.split("=") for item in match[2].split(","))


def cast_knobs(knobs, defaults, what):
    """Cast the strings of a spec to the types of `defaults` (name -> value); an unknown name raises UserError."""
    truth = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    cast = {}
    for key, text in knobs.items():
        if key not in defaults:
            raise UserError(f"{what} has no setting {key!r}; it has {', '.join(sorted(defaults))}.")
        kind = type(defaults[key])
        try:
            cast[key] = truth[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError):
            raise UserError(f"{what}: {key}={text!r} is not of type {kind.__name__} (default {defaults[key]}).") from None
    return cast


# Distributed ---------------------------------------------------------------------------------------------------------


def init_distributed():
    """Join the process group that `torchrun` describes, if there is one. Returns (rank, world_size, device)."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    return rank, world_size, device


class _Gather(torch.autograd.Function):
    """(B, ...) on each rank -> (world, B, ...); the backward pass sums what every rank sends back to these rows."""

    @staticmethod
    def forward(ctx, x):
        rows = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(rows, x.contiguous())
        return rows.view(-1, *x.shape)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


def gather(x):
    """(B, ...) on each rank -> (world * B, ...), the own rows FIRST, so that row i's positive stays in column i.

    Differentiable, so that DDP's mean over ranks equals the gradient of one process on the global batch (a raw
    all_gather would lose what the other ranks' losses say about these rows). Every rank must bring the same shape.
    """
    if not dist.is_initialized():
        return x
    return _Gather.apply(x).roll(-dist.get_rank(), 0).flatten(0, 1)


def gather_objects(value):
    """Any picklable value of every rank, as a list in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# Encoders ------------------------------------------------------------------------------------------------------------


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x): the GELU of OpenAI's CLIP weights."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Attention(nn.Module):
    """Multi-head self-attention, (B, N, d) -> (B, N, d); `mask` (B, 1, 1, N) is True where a key may be seen."""

    def __init__(self, width, heads):
        super().__init__()
        if width % heads:
            raise UserError(f"width {width} is not a multiple of heads {heads}.")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x, mask=None, causal=False):
        B, N, d = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)  # each (B, h, N, d/h)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)            # (B, h, N, d/h)
        return self.proj(x.transpose(1, 2).reshape(B, N, d))

    def of_first(self, x):
        """The weights (B, heads, N) with which the first token attends to all."""
        B, N, d = x.shape
        q, k, _ = self.qkv(x).view(B, N, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return (q[:, :, :1] @ k.transpose(2, 3) * (d // self.heads) ** -0.5).softmax(-1)[:, :, 0]


class Block(nn.Module):
    """Pre-norm transformer block with stochastic depth."""

    def __init__(self, width, heads, mlp_ratio, act, eps, drop_path):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        hidden = int(width * mlp_ratio)
        self.mlp = nn.Sequential(
            OrderedDict(fc1=nn.Linear(width, hidden), act=act(), fc2=nn.Linear(hidden, width))
        )
        self.drop_path = drop_path

    def forward(self, x, mask=None, causal=False):
        x = x + stochastic_depth(self.attn(self.norm1(x), mask, causal), self.drop_path, "row", self.training)
        return x + stochastic_depth(self.mlp(self.norm2(x)), self.drop_path, "row", self.training)


class Chain(nn.ModuleList):
    """Modules one after the other, each called with the output of the one before and `context`; recomputed in the backward pass
    with grad_checkpoint. Returns the last `n` outputs, the last one last."""

    grad_checkpoint = False

    def forward(self, x, *context, n=1):
        outputs = []
        for module in self:
            if self.grad_checkpoint and torch.is_grad_enabled():
                again = functools.partial(without_statistics, module)
                x = checkpoint(module, x, *context, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), again()))
            else:
                x = module(x, *context)
            outputs = [*outputs, x][-n:]
        return outputs or [x]


@contextlib.contextmanager
def without_statistics(module):
    """BatchNorms of the module leave their running statistics alone: recomputing must not count a batch twice."""
    norms = [(norm, norm.momentum, norm.num_batches_tracked.clone()) for norm in module.modules()
             if isinstance(norm, nn.BatchNorm2d)]
    for norm, _, _ in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in norms:
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(count)


class Blocks(Chain):
    """`depth` blocks: stochastic depth growing linearly, CLIP's initialisation, optional gradient checkpointing."""

    def __init__(self, depth, width, heads, mlp_ratio, act, eps, drop_path):
        rates = np.linspace(0, drop_path, depth).tolist()
        super().__init__(Block(width, heads, mlp_ratio, act, eps, rate) for rate in rates)
        for block in self:
            nn.init.normal_(block.attn.qkv.weight, std=width**-0.5)
            nn.init.normal_(block.attn.proj.weight, std=(2 * width * depth) ** -0.5)
            nn.init.normal_(block.mlp.fc1.weight, std=(2 * width) ** -0.5)
            nn.init.normal_(block.mlp.fc2.weight, std=(2 * width * depth) ** -0.5)
            for linear in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
                nn.init.zeros_(linear.bias)


def sincos_positions(height, width, d):
    """(height * width, d) fixed positions: a quarter of the channels each for sin and cos of the column and the row."""
    omega = 10000.0 ** (-torch.arange(d // 4) / (d // 4))
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    angles = [p.flatten()[:, None] * omega for p in (x, y)]
    return torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)], dim=1)


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm2d over the GLOBAL batch: N ranks normalise, and pass gradients, as one process would. CPU and GPU."""

    def forward(self, x):
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        variances, means = torch.var_mean(x.float(), (0, 2, 3), correction=0)
        means, variances = gather(torch.stack([means, variances])[None]).unbind(1)         # each (world, C)
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        with torch.no_grad():
            n = x.numel() / x.shape[1] * dist.get_world_size()
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * n / (n - 1), self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight * (variance + self.eps).rsqrt()
        return (x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]).to(x.dtype)


class ViT(nn.Module):
    """Vision transformer that returns ALL tokens: images (B, 3, H, W) -> (B, N, width), the CLS token, if any, first.

    patch_size  pixels of a patch's side; H and W must be multiples of it
    cls         put a CLS token first
    positions   "learned", "sincos" or "none"; both grids are interpolated when the image is not `image_size` wide
    pre_norm    a LayerNorm before the first block (CLIP's `ln_pre`)
    stem        None for one patch convolution, or ((channels, stride), ...) of 3x3 convolutions with BatchNorm and ReLU whose
                strides multiply to patch_size: small ViTs learn much faster behind it (Xiao et al. 2021, arXiv 2106.14881)
    quick_gelu, eps, patch_bias: as the weights that you load need them
    drop_path   stochastic depth of the last block, growing linearly from 0
    """

    def __init__(self, image_size=224, patch_size=16, width=768, depth=12, heads=12, mlp_ratio=4.0, cls=False,
                 positions="learned", pre_norm=False, stem=None, quick_gelu=False, eps=1e-6, patch_bias=True,
                 drop_path=0.0):
        super().__init__()
        self.image_size, self.patch_size, self.width = image_size, patch_size, width
        if image_size % patch_size:
            raise UserError(f"image_size {image_size} is not a multiple of patch_size {patch_size}: give "
                            f"{image_size // patch_size * patch_size or patch_size}.")
        self.grid = image_size // patch_size
        if stem:
            if math.prod(stride for _, stride in stem) != patch_size:
                raise UserError(f"The strides of the stem {stem} do not multiply to patch_size {patch_size}.")
            layers, channels = [], 3
            for out, stride in stem:
                layers.append(Conv2dNormActivation(channels, out, 3, stride, norm_layer=BatchNorm))
                channels = out
            self.patch_embed = nn.Sequential(*layers, nn.Conv2d(channels, width, 1))
        else:
            self.patch_embed = nn.Conv2d(3, width, patch_size, patch_size, bias=patch_bias)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02) if cls else None
        if positions == "learned":
            self.pos = nn.Parameter(torch.randn(1, bool(cls) + self.grid**2, width) * 0.02)
        elif positions == "sincos":
            grid = sincos_positions(self.grid, self.grid, width)
            self.register_buffer("pos", torch.cat([torch.zeros(int(cls), width), grid])[None])
        elif positions == "none":
            self.pos = None
        else:
            raise UserError(f"positions must be learned, sincos or none, not {positions!r}.")
        self.norm_pre = nn.LayerNorm(width, eps=eps) if pre_norm else nn.Identity()
        self.blocks = Blocks(depth, width, heads, mlp_ratio, QuickGELU if quick_gelu else nn.GELU, eps, drop_path)
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, images):
        return self.layers(images, 1)[0]

    def layers(self, images, n):
        """The outputs (B, N, width) of the last n blocks, or of all if there are fewer, each normalised; the last one last."""
        return [self.norm(x) for x in self.blocks(self.embed(images), n=n)]

    def cls_attention(self, images):
        """How much each head of the last block's [CLS] token attends to the patches (DINO, BAM) -> (B, heads, h, w)."""
        *before, last = self.blocks
        x = self.embed(images)
        for block in before:
            x = block(x)
        weights = last.attn.of_first(last.norm1(x))[:, :, 1:]                # (B, heads, h*w)
        return weights.unflatten(2, (images.shape[2] // self.patch_size, -1))

    def embed(self, images):
        """(B, 3, H, W) -> what enters the first block, (B, N, width)."""
        x = self.patch_embed(images)                         # (B, d, h, w)
        h, w = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)                     # (B, h*w, d)
        if self.pos is not None:
            pos = resize_positions(self.pos, self.cls is not None, h, w)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(len(x), -1, -1).to(x.dtype), x], dim=1)  # (B, 1 + h*w, d)
        if self.pos is not None:
            x = x + pos
        return self.norm_pre(x)


def resize_positions(pos, has_cls, height, width):
    """Bicubic interpolation of a square grid of positions (1, [1 +] g*g, d) to height x width; the CLS row stays."""
    head, grid = pos[:, : int(has_cls)], pos[:, int(has_cls):]
    side = math.isqrt(grid.shape[1])
    if (side, side) == (height, width):
        return pos
    grid = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid.float(), (height, width), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([head, grid.flatten(2).transpose(1, 2).to(pos.dtype)], dim=1)


class TextTransformer(nn.Module):
    """Text transformer that returns ALL tokens: ids (B, L), mask (B, L) -> (B, L, width).

    `mask` is True on real tokens. A bidirectional tower hides the padding from the attention; a causal one needs not:
    padding stands behind every real token. What stands at padded positions has no meaning.
    """

    def __init__(self, vocab_size=30522, context=77, width=512, depth=12, heads=8, mlp_ratio=4.0, causal=False,
                 quick_gelu=False, eps=1e-5, drop_path=0.0):
        super().__init__()
        self.vocab_size, self.context, self.width, self.causal = vocab_size, context, width, causal
        self.special = ()  # ids of the tokens that stand for no word, if someone sets them
        self.embedding = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.pos = nn.Parameter(torch.randn(1, context, width) * 0.01)
        self.blocks = Blocks(depth, width, heads, mlp_ratio, QuickGELU if quick_gelu else nn.GELU, eps, drop_path)
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, tokens, mask=None):
        x = self.embedding(tokens) + self.pos[:, : tokens.shape[1]]  # (B, L, d)
        mask = None if self.causal or mask is None else mask[:, None, None, :]
        return self.norm(self.blocks(x, mask, self.causal)[-1])


class ResNet(resnet.ResNet):
    """torchvision's ResNet up to its last feature map: images (B, 3, H, W) -> (B, h * w, width), a token for each 32 x 32 pixels.

    Parameters have torchvision's names; BatchNorm is over the global batch. blocks: how many in each of the four stages.
    """

    def __init__(self, image_size=224, blocks=(3, 4, 6, 3)):
        super().__init__(resnet.Bottleneck, list(blocks), norm_layer=BatchNorm)
        if image_size % 32:
            raise UserError(f"image_size {image_size} is not a multiple of 32, the stride of a ResNet.")
        self.image_size, self.grid, self.cls, self.width = image_size, image_size // 32, None, self.fc.in_features
        del self.avgpool, self.fc
        for name in ("layer1", "layer2", "layer3", "layer4"):
            setattr(self, name, Chain(getattr(self, name)))

    def forward(self, images):
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)[-1]                                 # (B, 256, H/4, W/4) ... (B, 2048, H/32, W/32)
        return x.flatten(2).transpose(1, 2)


VIT_PRESETS = {
    # the embedded world: a convolutional stem with a receptive field of 31 pixels, and two blocks
    "tiny": dict(image_size=48, patch_size=8, width=96, depth=2, heads=3, stem=((32, 2), (64, 2), (128, 2), (128, 1))),
    "ViT-S/16": dict(patch_size=16, width=384, depth=12, heads=6),     # DeiT (arXiv 2012.12877), Table 1
    "ViT-B/32": dict(patch_size=32, width=768, depth=12, heads=12),    # ViT (arXiv 2010.11929), Table 1
    "ViT-B/16": dict(patch_size=16, width=768, depth=12, heads=12),    # ViT, Table 1
    "ViT-L/14": dict(patch_size=14, width=1024, depth=24, heads=16),   # ViT, Table 1; patch 14: CLIP (arXiv 2103.00020)
}
RESNET_PRESETS = {"ResNet-50": dict(blocks=(3, 4, 6, 3))}              # ResNet (arXiv 1512.03385), Table 1
TEXT_PRESETS = {
    "tiny": dict(context=32, width=128, depth=2, heads=4),             # the embedded world
    "12x512": dict(width=512, depth=12, heads=8),                      # CLIP, Sec. 2.4
    "12x768": dict(width=768, depth=12, heads=12),                     # SPARC, Sec. D.1
}


def encoder_settings(kind, spec, presets):
    """`encoder_settings(ViT, "ViT-B/16:drop_path=0.1", VIT_PRESETS)` -> every argument of the constructor, by name."""
    name, knobs = parse_spec(spec)
    if name not in presets:
        raise UserError(f"There is no {kind.__name__} preset {name!r}; there are {', '.join(presets)}.")
    defaults = {k: p.default for k, p in inspect.signature(kind).parameters.items()}
    scalars = {k: value for k, value in defaults.items() if value is not None}  # a stem cannot be spelled in a spec
    return {**defaults, **presets[name], **cast_knobs(knobs, scalars, kind.__name__)}


def image_encoder_settings(spec):
    """A spec of --image-encoder -> (ViT or ResNet, every argument of its constructor)."""
    kind = ResNet if parse_spec(spec)[0] in RESNET_PRESETS else ViT
    return kind, encoder_settings(kind, spec, VIT_PRESETS | RESNET_PRESETS)


# What train.py and eval.py ask of a method ---------------------------------------------------------------------------


class Method:
    """A method's module, with the defaults below for what it leaves out. It must have Config, PRESETS and Model.

    `args` is the run's settings: one object with the fields of train.py's Config and of the method's.
    """

    def __init__(self, module):
        vars(self).update(vars(module))

    def model_class(self, args):
        """The class of the model."""
        return self.Model

    def check(self, args):
        """Raise ValueError for settings that do not fit each other."""

    def uses_text(self, args):
        """Whether there is a text tower; without one the images' views are compared."""
        return True

    def needs_cls(self, args):
        """The flag that needs the image's [CLS] token; "" if none does."""
        return ""

    def replaced_blocks(self, args):
        """How many of each tower's last blocks the method replaces."""
        return 0

    def views(self, args):
        """The random views of an image, each a dict of View's arguments; None: one image and its caption."""
        return None

    def stages(self, args):
        """The stages of a run: (number, steps, peak learning rate) of each."""
        return [(1, args.steps, args.lr)]

    def box_refreshes(self, args):
        """The steps before which train.py finds anew, by `boxes`, where crops are to lie."""
        return ()


class ModelDefaults:
    """What a Model may leave out. It must have __init__(config, image_encoder, text_encoder, image_width, text_width),
    forward(batch, gather) -> {"loss": scalar, other scalars to log} and encode_image(images) -> (B, E), normalised.
    An ability that it lacks is None."""

    takes_cls = True          # whether the image encoder may have a [CLS] token
    late_interaction = False  # compare encode_patches and encode_tokens by `similarity`, not encodings by a dot product
    slots = 0                 # how many slots image_slots, text_slots and attend give
    mask_parts = 0            # equal parts of an encoding for which masks are trained

    encode_text = None        # (tokens, mask) -> (B, E), normalised
    encode_patches = None     # (images) -> (B, P, E), normalised
    encode_tokens = None      # (tokens, mask) -> (B, L, E), zeros where no word is
    similarity = None         # (patches, tokens) -> (n, m)
    align_words = None        # (images, tokens, mask) -> (B, L, P), weights of the patches of each word
    image_slots = None        # (images) -> (B, L, V)
    text_slots = None         # (tokens, mask) -> (B, L, V)
    attend = None             # (images, tokens, mask) -> attention over patches and tokens, slots of both
    encode_words = None       # (tokens, mask) -> (B, |V|), the caption's words alone
    image_encoding = None     # (images) -> (B, |V|), not normalised
    word_maps = None          # (images, ids) -> (B, N, n), the score of each word at each image token
    head_maps = None          # (images) -> (B, heads, h, w), what [CLS] attends to
    boxes = None              # (images) -> (B, 4), where crops are to lie, as fractions of the sides

    def probe_features(self, images):
        """What a linear probe sees."""
        return self.encode_image(images)

    def chance_loss(self, batch_size, mask, patches):
        """The loss when all similarities are equal; batch_size is global."""
        return math.log(batch_size)

    def begin_stage(self, number, fresh):
        """A stage begins, or is continued if not fresh."""

    def before_update(self, step):
        """Called between the backward pass and the update."""

    def after_update(self, step, steps):
        """Called after each update, `step` of the `steps` of its stage."""

    def diagnose(self, batch):
        """Scalars that are computed only when a step is logged: in evaluation mode, on one rank alone."""
        return {}

    def warn(self, record):
        """What a record of the log says against the run, or None."""
        return None


def build_encoders(method, args, tokenizer):
    """The image encoder and the text encoder (None without text) of a run's settings, freshly initialised."""
    kind, image = image_encoder_settings(args.image_encoder)
    image["image_size"] = args.image_size or image["image_size"]
    replaced = 0 if kind is ResNet else method.replaced_blocks(args)  # a ResNet has no block to replace
    if kind is ViT:
        image["depth"] -= replaced
    image_encoder = kind(**image)
    if image_encoder.cls is not None and not getattr(method.Model, "takes_cls", True):
        raise UserError(f"{args.method} takes all image tokens for patches: leave out cls=1 of --image-encoder.")
    flag = method.needs_cls(args)
    if flag and image_encoder.cls is None:
        remedy = "choose a ViT" if kind is ResNet else "add cls=1 to --image-encoder"
        raise UserError(f"{flag} of {args.method} takes the [CLS] token: {remedy}.")
    if not method.uses_text(args):
        return image_encoder, None
    text = encoder_settings(TextTransformer, args.text_encoder, TEXT_PRESETS)
    asked = int(parse_spec(args.text_encoder)[1].get("vocab_size", 0))
    text["vocab_size"] = max(len(tokenizer), asked)
    text["depth"] -= replaced
    text_encoder = TextTransformer(**text)
    text_encoder.special = [*getattr(tokenizer, "special", ()), *range(len(tokenizer), text["vocab_size"])]
    return image_encoder, text_encoder


def build_model(method, args, image_encoder, text_encoder):
    """The method's model on its encoders."""
    kind = method.model_class(args)
    complete = type(kind.__name__, (kind, ModelDefaults), {})
    text_width = text_encoder.width if text_encoder else None
    try:
        return complete(args, image_encoder, text_encoder, image_encoder.width, text_width)
    except ValueError as error:
        raise UserError(str(error)) from None


# Weights of others ---------------------------------------------------------------------------------------------------

CLIP_NAMES = [  # OpenCLIP and OpenAI CLIP; the image tower's names stand behind `visual.`
    (r"(?:transformer\.)?resblocks\.(\d+)\.attn\.in_proj_", r"blocks.\1.attn.qkv."),
    (r"(?:transformer\.)?resblocks\.(\d+)\.attn\.out_proj", r"blocks.\1.attn.proj"),
    (r"(?:transformer\.)?resblocks\.(\d+)\.ln_([12])", r"blocks.\1.norm\2"),
    (r"(?:transformer\.)?resblocks\.(\d+)\.mlp\.c_fc", r"blocks.\1.mlp.fc1"),
    (r"(?:transformer\.)?resblocks\.(\d+)\.mlp\.c_proj", r"blocks.\1.mlp.fc2"),
    (r"^conv1\.", "patch_embed."), (r"^class_embedding$", "cls"), (r"^positional_embedding$", "pos"),
    (r"^ln_pre\.", "norm_pre."), (r"^ln_post\.|^ln_final\.", "norm."), (r"^token_embedding\.", "embedding."),
]
TIMM_NAMES = [(r"^patch_embed\.proj\.", "patch_embed."), (r"^cls_token$", "cls"), (r"^pos_embed$", "pos")]


def load_encoder_weights(encoder, state_dict):
    """Load OpenCLIP/OpenAI CLIP or timm/DINO weights, or our own, into a ViT or a TextTransformer, torchvision's into a ResNet.

    The tower may stand behind any prefix (`visual.`, `module.`, `teacher.backbone.`) and in nested dicts; of a student and
    its teacher the teacher is taken. Position grids of another size are interpolated; a position of the CLS token or a bias
    of the patch convolution that the file lacks is set to zero. Returns a list of sentences about everything that did not
    fit: nothing is skipped in silence. Raises UserError when no block fits. OpenAI's weights need quick_gelu=True,
    pre_norm=True, patch_bias=False, cls=True, eps=1e-5 (image) and causal=True, quick_gelu=True, context=77 (text).
    """
    tensors = dict(flatten(state_dict))
    is_resnet = isinstance(encoder, ResNet)
    block = r"layer[1-4]\.\d+\." if is_resnet else r"(?:transformer\.)?(?:res)?blocks\.\d+\."
    tower, inside = find_tower(tensors, block, isinstance(encoder, (ViT, ResNet)))
    own, renamed, report = encoder.state_dict(), {}, []
    outside = [key for key in tensors if key not in inside]
    if outside:
        names = ", ".join(outside[:3]) + ", ..." * (len(outside) > 3)
        report.append(f"{len(outside)} tensor(s) of other parts of the file ({names}): not used")
    for key, value in inside.items():
        name = key[len(tower):]
        for pattern, replacement in [] if is_resnet else CLIP_NAMES + TIMM_NAMES:
            name = re.sub(pattern, replacement, name)
        if name == "cls":
            value = value.reshape(1, 1, -1)
        if name == "pos":
            value = value.reshape(1, -1, value.shape[-1]).float()
            if isinstance(encoder, ViT) and name in own and value.shape[2] == encoder.width:
                value, notes = fit_positions(value, encoder)
                report += [f"{key}: {note}" for note in notes]
        if name not in own:
            report.append(f"{key}: not used")
        elif own[name].shape != value.shape:
            report.append(f"{key}: shape {tuple(value.shape)} does not fit {tuple(own[name].shape)}, not used")
        else:
            renamed[name] = value
    if not any(name.startswith(("blocks.", "layer")) for name in renamed):
        names = f"its names start with {', '.join(list(tensors)[:3])}" if tensors else "it holds no tensor"
        why = next((line for line in report if re.search(r"blocks\.|layer", line) and "does not fit" in line), names)
        raise UserError(f"No block of the file fits this {type(encoder).__name__}: {why}.")
    if "patch_embed.weight" in renamed and "patch_embed.bias" in own.keys() - renamed.keys():
        renamed["patch_embed.bias"] = torch.zeros(encoder.width)
        report.append("patch_embed.bias: not in the file, set to zero")
    report += [f"{name}: nothing in the file fits, left at its initial value" for name in own if name not in renamed]
    encoder.load_state_dict(renamed, strict=False)
    return report


def flatten(tree, prefix=""):
    """The tensors of nested dicts, with dotted names."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        elif torch.is_tensor(value):
            yield f"{prefix}{key}", value


def find_tower(tensors, block, is_image):
    """The prefix of the image or text tower's names in a file, and its tensors by their full names; block: pattern of a block's."""
    found = (re.match(rf"((?:.*?\.)??){block}", key) for key in tensors)
    prefixes = sorted({match[1] for match in found if match}) or [""]
    tower = max(prefixes, key=lambda p: (is_image and "teacher" in p, ("visual." in p or "image" in p) == is_image))
    return tower, {key: value for key, value in tensors.items()
                   if tower == max((p for p in prefixes if key.startswith(p)), key=len, default=None)}


def fit_positions(pos, encoder):
    """A file's positions (1, n, d) -> (a ViT's (1, [1 +] g*g, d), notes on what changed); as they are if not square."""
    n = pos.shape[1]
    from_cls, to_cls = int(math.isqrt(n) ** 2 != n), int(encoder.cls is not None)
    if math.isqrt(n - from_cls) ** 2 != n - from_cls:
        return pos, [f"its {n} positions are not a square grid, with or without a CLS token"]
    notes = []
    if from_cls and not to_cls:
        pos = pos[:, 1:]
        notes.append("position of the CLS token not used")
    if to_cls and not from_cls:
        pos = torch.cat([torch.zeros_like(pos[:, :1]), pos], dim=1)
        notes.append("no position of the CLS token, set to zero")
    if pos.shape[1] != to_cls + encoder.grid**2:
        notes.append(f"grid interpolated from {n - from_cls} to {encoder.grid**2} positions")
        pos = resize_positions(pos, to_cls, encoder.grid, encoder.grid)
    return pos, notes


# Tokenizer -----------------------------------------------------------------------------------------------------------


def clean_text(text):
    """BERT's uncased normalisation: no control characters, CJK set apart, no accents, lower case."""
    out = []
    for char in text:
        code, category = ord(char), unicodedata.category(char)
        if char in "\t\n\r" or category in ("Zs", "Zl", "Zp"):
            out.append(" ")
        elif code == 0xFFFD or category in ("Cc", "Cf", "Co", "Cs"):  # unassigned ones (Cn) stay and end in [UNK]
            continue
        elif (0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0x20000 <= code <= 0x2A6DF
              or 0x2A700 <= code <= 0x2B81F or 0x2B920 <= code <= 0x2CEAF  # the gap is in Hugging Face's BERT too
              or 0xF900 <= code <= 0xFAFF or 0x2F800 <= code <= 0x2FA1F):
            out.append(f" {char} ")
        else:
            out.append(char)
    text = unicodedata.normalize("NFD", "".join(out))
    return "".join(char.lower() for char in text if unicodedata.category(char) != "Mn")


def is_punctuation(char):
    """ASCII symbols count as punctuation too (BERT)."""
    return 33 <= ord(char) <= 47 or 58 <= ord(char) <= 64 or 91 <= ord(char) <= 96 or 123 <= ord(char) <= 126 \
        or unicodedata.category(char).startswith("P")


def split_words(text):
    """Cleaned text -> words; every punctuation character is a word of its own."""
    words = []
    for chunk in clean_text(text).split():
        for punctuation, group in itertools.groupby(chunk, is_punctuation):
            words += list(group) if punctuation else ["".join(group)]
    return words


class WordPiece:
    """BERT's uncased tokenizer: greedy longest match of words against a vocabulary, `##` inside a word.

    vocab: path of a `vocab.txt` (one token a line, its id the line's number), or a list of tokens. Raises UserError when
    the file is unreadable or lacks one of [PAD] [UNK] [CLS] [SEP]. Special tokens spelled out in a text are plain text.
    """

    def __init__(self, vocab):
        if not isinstance(vocab, list):
            try:
                vocab = Path(vocab).read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
            except OSError as error:
                raise UserError(f"Cannot read the vocabulary {vocab}: {error.strerror}.") from None
            except UnicodeDecodeError:
                raise UserError(f"The vocabulary {vocab} is not UTF-8 text: give a BERT vocab.txt.") from None
        self.vocab = vocab
        self.ids = {token: i for i, token in enumerate(self.vocab)}
        missing = [token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if token not in self.ids]
        if missing:
            raise UserError(f"The vocabulary of {len(self.vocab)} tokens lacks {' '.join(missing)}: give a BERT vocab.txt, "
                            f"one token a line.")
        self.pad, self.unk, self.cls, self.sep = (self.ids[t] for t in ("[PAD]", "[UNK]", "[CLS]", "[SEP]"))
        self.special = [i for i, token in enumerate(self.vocab) if re.fullmatch(r"\[\w+\]", token)]
        self.pieces = functools.lru_cache(maxsize=2**16)(self._pieces)

    def __len__(self):
        return len(self.vocab)

    def __reduce__(self):
        return WordPiece, (self.vocab,)

    def _pieces(self, word):
        if len(word) > 100:
            return [self.unk]
        pieces, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                piece = word[start:end] if start == 0 else "##" + word[start:end]
                if piece in self.ids:
                    break
            else:
                return [self.unk]
            pieces.append(self.ids[piece])
            start = end
        return pieces

    def encode(self, text, max_length=None):
        """Text -> [CLS] ... [SEP] as a list of ids, at most `max_length` of them; the last one is [SEP] all the same.

        Raises UserError when `max_length` is below 2.
        """
        ids = [piece for word in split_words(text) for piece in self.pieces(word)]
        if max_length is not None:
            if max_length < 2:
                raise UserError(f"max_length {max_length} has no room for [CLS] and [SEP]: give 2 or more.")
            ids = ids[: max_length - 2]
        return [self.cls, *ids, self.sep]

    def batch(self, texts, max_length):
        """B texts -> ids (B, L) and mask (B, L), True on tokens; L is the longest of THESE texts, no more."""
        rows = [torch.tensor(self.encode(text, max_length)) for text in texts]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad)
        lengths = torch.tensor([len(row) for row in rows])
        return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]

    def save(self, path):
        Path(path).write_text("\n".join(self.vocab) + "\n", encoding="utf-8")


def train_wordpiece(captions, size=8192):
    """A vocabulary of at most `size` tokens: all characters, then the most frequent adjacent pair merged, again and again.

    Of equally frequent pairs the alphabetically first is merged. Merging stops early when every word is one token.
    Returns the list of tokens; raises UserError if `size` cannot hold the special tokens and the characters.
    """
    counts = Counter(word for caption in captions for word in split_words(caption) if len(word) <= 100)  # the rest: [UNK]
    words = {word: [word[0], *("##" + char for char in word[1:])] for word in counts}
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({piece for pieces in words.values() for piece in pieces})]
    if len(vocab) > size:
        raise UserError(f"A vocabulary of {size} is too small: these captions have {len(vocab)} characters and special "
                        f"tokens; give --vocab-size {len(vocab)} or more.")
    pairs, where = Counter(), defaultdict(set)
    for word, pieces in words.items():
        for pair in itertools.pairwise(pieces):
            pairs[pair] += counts[word]
            where[pair].add(word)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    while len(vocab) < size and heap:
        count, best = heapq.heappop(heap)
        if -count != pairs[best]:  # outdated: the pair was pushed again when its count changed
            continue
        merged = best[0] + best[1].removeprefix("##")
        vocab.append(merged)
        changed = set()
        for word in where.pop(best):
            old, new = words[word], []
            for piece in old:
                if new and (new[-1], piece) == best:
                    new[-1] = merged
                else:
                    new.append(piece)
            for pair in itertools.pairwise(old):
                pairs[pair] -= counts[word]
                changed.add(pair)
            for pair in itertools.pairwise(new):
                pairs[pair] += counts[word]
                changed.add(pair)
                where[pair].add(word)
            words[word] = new
        for pair in changed:
            if pairs[pair]:
                heapq.heappush(heap, (-pairs[pair], pair))
    return vocab


# Data: the embedded world --------------------------------------------------------------------------------------------

COLOURS = {"red": (0.85, 0.15, 0.15), "green": (0.15, 0.65, 0.2), "blue": (0.2, 0.3, 0.9), "yellow": (0.95, 0.85, 0.2),
           "purple": (0.55, 0.2, 0.7), "orange": (0.95, 0.55, 0.1), "pink": (0.95, 0.6, 0.75), "white": (0.95, 0.95, 0.95)}
SHAPES = {  # each a function of (u, v), the offset from the centre in radii (v grows downwards); negative inside
    "circle": lambda u, v: torch.hypot(u, v) - 0.95,
    "square": lambda u, v: torch.maximum(u.abs(), v.abs()) - 0.82,
    "triangle": lambda u, v: torch.maximum(v - 0.75, 0.87 * u.abs() - 0.5 * v - 0.5),
    "diamond": lambda u, v: (u.abs() + v.abs() - 1.0) * 0.71,
    "cross": lambda u, v: torch.minimum(torch.maximum(u.abs() - 0.3, v.abs() - 0.95),
                                        torch.maximum(u.abs() - 0.95, v.abs() - 0.3)),
    "star": lambda u, v: torch.hypot(u, v) - 0.68 - 0.3 * torch.cos(5 * torch.atan2(u, -v)),
    "ring": lambda u, v: (torch.hypot(u, v) - 0.7).abs() - 0.25,
    "moon": lambda u, v: torch.maximum(torch.hypot(u, v) - 0.95, 0.75 - torch.hypot(u - 0.5, v)),
}
COLOUR_NAMES, SHAPE_NAMES = list(COLOURS), list(SHAPES)
OPENINGS = [""] * 10 + ["a photo of", "a picture of", "there is", "we see", "this image shows", "an image with",
            "my favourite photo of", "look at", "in this scene there is", "here we have", "close view of", "the artist drew"]
CLOSINGS = [""] * 10 + ["in the picture", "on a plain background", "for sale", "today", "as seen yesterday",
            "in high quality", "by an unknown author", "and nothing else", "taken with my camera", "in good condition"]
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven"]
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
SPLITS = {"train": range(0, 8), "val": range(8, 9), "test": range(9, 10)}  # tenths of the space of scenes


@dataclasses.dataclass
class World:
    """The embedded world: coloured shapes with captions, drawn from a seed. Its fields are the knobs of `shapes:...`.

    A scene is a dict of tensors over B scenes with K object slots: present, colour, shape, large (B, K), centre
    (B, K, 2) as (x, y), radius (B, K), in pixels. Scenes are dealt to train, val and test by a hash of their objects and
    pixels, so that no scene is in two splits; `heldout` colour-shape pairs never occur in train.
    """

    size: int = 48            # pixels
    objects: int = 3          # 1 to this many objects
    noise: float = 0.04       # standard deviation of the softened background noise
    background: float = 0.25  # how far the background colours of two images can differ
    small: float = 0.14       # radius of a small object, share of the image
    large: float = 0.20       # radius of a large one
    palette: int = 8          # colours that objects have, the first of COLOURS; tasks with captions ask for all 8
    heldout: int = 6          # colour-shape pairs, of the 64, that training never shows
    relations: float = 0.3    # share of captions that relate two objects
    kinds: float = 1.0        # share of objects whose caption names the shape; the others are a "thing"
    colours: float = 0.9      # share of objects whose caption says the colour
    sizes: float = 0.4        # share of single objects whose caption says the size
    together: float = 0.0     # share of training scenes whose first object stands beside its class's constant companion
    fillers: bool = True      # openings, closings: words that describe nothing
    words: int = 0            # made-up words of which each caption holds up to two: a vocabulary beyond what pictures show

    def __post_init__(self):
        limits = {"size": (16, 1024), "objects": (1, 7), "noise": (0, 1), "background": (0, 0.5), "palette": (1, 8), "heldout": (0, 32),
                  "relations": (0, 1), "words": (0, 4000), "kinds": (0, 1), "colours": (0, 1), "sizes": (0, 1),
                  "together": (0, 1 if self.objects > 1 else 0)}
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise UserError(f"shapes: {name}={getattr(self, name)} must be from {low} to {high}.")
        self.cells = max(2, math.ceil(math.sqrt(self.objects)))
        low, high = 2.2 / self.size, 0.64 / self.cells  # about 2 pixels; little enough that no neighbour hides an object
        if not low <= self.small < self.large <= high:
            raise UserError(f"shapes: small={self.small} must be less than large={self.large}, both from {low:.3f} to {high:.3f} "
                            f"with size={self.size} and objects={self.objects}.")
        self.heldout_pairs = [(i % 8, (3 * i + i // 8 + 1) % 8) for i in range(self.heldout)]

    # Scenes ------------------------------------------------------------------------------------------------------

    def scenes(self, n, split, generator, objects=None):
        """n scenes of the split, with 1 to `self.objects` objects, or with exactly `objects`."""
        if split not in SPLITS:
            raise UserError(f"shapes has no split {split!r}, only {', '.join(SPLITS)}.")
        K, parts, found = self.objects, [], 0
        if objects is not None and not 1 <= objects <= K:
            raise UserError(f"shapes: a scene of {objects} objects in a world of objects={K}.")
        heldout = torch.zeros(8, 8, dtype=torch.bool)
        for colour, shape in self.heldout_pairs:
            heldout[colour, shape] = True
        while found < n:
            m = max(64, math.ceil((n - found) * 10 / len(SPLITS[split]) * 1.2))
            rand = functools.partial(torch.randint, size=(m, K), generator=generator)
            count = torch.randint(1, K + 1, (m, 1), generator=generator) if objects is None else objects
            scene = {"present": (torch.arange(K) < count).expand(m, K), "colour": rand(self.palette), "shape": rand(8),
                     "large": rand(2).bool()}
            twin = torch.rand(m, generator=generator) < 0.15  # so that counts above one occur
            for k in range(1, K):
                scene["colour"][twin, k], scene["shape"][twin, k] = scene["colour"][twin, 0], scene["shape"][twin, 0]
                twin = twin & (torch.rand(m, generator=generator) < 0.4)
            if split == "train" and self.together:  # red with green, circle with square: the neighbour in the lists
                pair = torch.rand(m, generator=generator) < self.together
                scene["present"] = scene["present"] | (pair[:, None] & (torch.arange(K) == 1))
                for name, number in (("colour", self.palette), ("shape", 8)):
                    first = scene[name][pair, 0]
                    scene[name][pair, 1] = torch.where(first ^ 1 < number, first ^ 1, first)
            cell = torch.rand(m, self.cells**2, generator=generator).argsort(1)[:, :K]
            radius = torch.where(scene["large"], self.large, self.small) * self.size
            scene["radius"] = radius * (1 + 0.2 * (torch.rand(m, K, generator=generator) - 0.5))
            step = self.size / self.cells
            room = (step / 2 - scene["radius"]).clamp(min=0)[..., None]
            jitter = (2 * torch.rand(m, K, 2, generator=generator) - 1) * room
            scene["centre"] = (torch.stack([cell % self.cells, cell // self.cells], -1) + 0.5) * step + jitter
            keep = self.in_split(scene, split)
            if split == "train":
                keep &= ~(scene["present"] & heldout[scene["colour"], scene["shape"]]).any(1)
            parts.append({name: value[keep] for name, value in scene.items()})
            found += int(keep.sum())
        return {name: torch.cat([part[name] for part in parts])[:n] for name in parts[0]}

    def in_split(self, scene, split):
        """Scenes -> (B,), whether what stands at which pixel puts them into the split; the order of objects does not matter."""
        x, y = scene["centre"].long().unbind(-1)
        code = ((scene["colour"] * 8 + scene["shape"]) * 2 + scene["large"]) * self.size**2 + y * self.size + x
        key = (scene["present"] * (code * 2654435761 + code**2 * 40503 + 97)).sum(1)
        return torch.isin((key // 128) % 10, torch.tensor(SPLITS[split]))

    def render(self, scene, generator):
        """Scenes -> images (B, 3, S, S) in [0, 1] and segmentation (B, S, S): 0 background, k + 1 for object k."""
        S, (B, K) = self.size, scene["present"].shape
        images = 0.275 + self.background * (torch.rand(B, 3, 1, 1, generator=generator) - 0.5)
        noise = torch.randn(B, 3, S // 2 + 1, S // 2 + 1, generator=generator)
        noise = F.interpolate(noise, scale_factor=2, mode="bilinear")[..., :S, :S]
        images = images + self.noise * 1.6 * noise  # interpolation shrinks the deviation to about 1/1.6
        pixel = torch.arange(S) + 0.5
        offset = (pixel - scene["centre"][..., None]) / scene["radius"][..., None, None]  # (B, K, 2, S): u, v
        segmentation = torch.zeros(B, S, S, dtype=torch.long)
        tone = 1 + 0.15 * (2 * torch.rand(B, K, 1, generator=generator) - 1)
        rgb = (torch.tensor(list(COLOURS.values()))[scene["colour"]] * tone).clamp(max=1)   # (B, K, 3)
        for shape, k in itertools.product(range(8), range(K)):
            rows = torch.nonzero(scene["present"][:, k] & (scene["shape"][:, k] == shape))[:, 0]
            u, v = offset[rows, k, 0][:, None, :], offset[rows, k, 1][:, :, None]
            distance = SHAPES[SHAPE_NAMES[shape]](u, v) * scene["radius"][rows, k, None, None]
            cover = (0.5 - distance).clamp(0, 1)                                             # (b, S, S), antialiased
            images[rows] = torch.lerp(images[rows], rgb[rows, k, :, None, None], cover[:, None])
            segmentation[rows] = torch.where(cover > 0.5, k + 1, segmentation[rows])
        return images.clamp_(0, 1), segmentation

    def boxes(self, segmentation):
        """Segmentation (B, S, S) -> boxes (B, K, 4) as x0, y0, x1, y1 in pixels; zeros where an object is absent."""
        masks = segmentation[:, None] == torch.arange(1, self.objects + 1)[:, None, None]    # (B, K, S, S)
        boxes, seen = torch.zeros(*masks.shape[:2], 4), masks.any(-1).any(-1)
        boxes[seen] = masks_to_boxes(masks[seen]) + torch.tensor([0.0, 0.0, 1.0, 1.0])
        return boxes

    def objects_of(self, scene):
        """Scenes -> per scene a list of objects: dicts of colour, shape, size (words) and x, y (pixels)."""
        lists = {name: scene[name].tolist() for name in ("present", "colour", "shape", "large", "centre")}
        return [[{"colour": COLOUR_NAMES[c], "shape": SHAPE_NAMES[s], "size": "large" if l else "small", "x": xy[0],
                  "y": xy[1]} for p, c, s, l, xy in zip(*columns) if p] for columns in zip(*lists.values())]

    # Captions ----------------------------------------------------------------------------------------------------

    def caption(self, objects, rng):
        """One caption of a scene: random order, template, detail and filler words. rng: random.Random."""
        objects = rng.sample(objects, len(objects))
        related = [(a, name, b) for a, b in itertools.permutations(objects, 2) for name in RELATIONS if holds(a, name, b)]
        if related and rng.random() < self.relations:
            a, name, b = rng.choice(related)
            rest = [o for o in objects if o is not a and o is not b]
            phrases = [f"{self.noun(a, rng)} {name} {self.noun(b, rng)}", *(self.noun(o, rng) for o in rest)]
        else:
            groups = {}
            for o in objects:
                groups.setdefault((o["colour"], o["shape"]), []).append(o)
            phrases = [self.noun(group[0], rng, len(group)) for group in groups.values()]
        text = phrases[0]
        for phrase in phrases[1:]:
            text += rng.choice([" and ", " and ", " with ", " , ", " next to ", " as well as "]) + phrase
        if self.fillers:
            text = f"{rng.choice(OPENINGS)} {text} {rng.choice(CLOSINGS)}".strip()
        if self.words:
            chosen = [made_up_word(rng.randrange(self.words)) for _ in range(rng.randrange(3))]
            text = " ".join([*chosen[:1], text, *chosen[1:]])
        return text

    def noun(self, o, rng, count=1):
        """The object, or `count` of its kind, in words, now and then without its size or colour."""
        words = [o["size"]] * (count == 1 and rng.random() < self.sizes) + [o["colour"]] * (rng.random() < self.colours)
        kind = o["shape"] if rng.random() < self.kinds else "thing"
        if count == 1:
            return article(" ".join([*words, kind]))
        return " ".join([NUMBERS[count], *words, plural(kind)])

    def hard_negatives(self, objects, rng):
        """SugarCrepe's seven kinds of a scene -> {kind: (caption, negative caption)}; kinds that it does not admit lack."""
        a = rng.choice(objects)
        colours = {o["colour"] for o in objects}
        other_colour = rng.choice([c for c in COLOUR_NAMES if c not in colours])
        shapes = {o["shape"] for o in objects}
        other_shape = rng.choice([s for s in SHAPE_NAMES if s not in shapes])
        kinds = [(o["colour"], o["shape"]) for o in objects]
        name = coloured(a["colour"], a["shape"])
        everything = " and ".join(coloured(*kind) for kind in kinds)
        other_size = "small" if a["size"] == "large" else "large"
        pairs = {
            "replace_att": (name, coloured(other_colour, a["shape"])),
            "replace_obj": (name, coloured(a["colour"], other_shape)),
            "add_obj": (everything, f"{everything} and {coloured(other_colour, other_shape)}"),
        }
        if all(o["size"] == a["size"] for o in objects if (o["colour"], o["shape"]) == (a["colour"], a["shape"])):
            pairs["add_att"] = (name, article(f"{other_size} {a['colour']} {a['shape']}"))
        b = next((o for o in objects if o["colour"] != a["colour"] and o["shape"] != a["shape"]), None)
        if b is not None:
            other = coloured(b["colour"], b["shape"])
            swapped = (b["colour"], a["shape"]), (a["colour"], b["shape"])
            if not any(kind in kinds for kind in swapped):
                pairs["swap_att"] = (f"{name} and {other}", " and ".join(coloured(*kind) for kind in swapped))
            relation = next((r for r in RELATIONS if holds(a, r, b)), None)
            if relation and all(kinds.count((o["colour"], o["shape"])) == 1 for o in (a, b)):
                pairs["swap_obj"] = (f"{name} {relation} {other}", f"{other} {relation} {name}")
                pairs["replace_rel"] = (f"{name} {relation} {other}", f"{name} {OPPOSITE[relation]} {other}")
        return pairs

    def winoground(self, n, seed):
        """n pairs of test scenes with the same words: images (n, 2, 3, S, S) normalised and captions, n lists of two that
        swap the two objects' colours."""
        generator = torch.Generator().manual_seed(seed)
        world = dataclasses.replace(self, objects=max(2, self.objects))
        scene = world.scenes(30 * n + 200, "test", generator, objects=2)  # one in 15 will do
        mirror = {**scene, "colour": scene["colour"].clone()}
        mirror["colour"][:, :2] = scene["colour"][:, [1, 0]]
        differ = [scene[name][:, 0] != scene[name][:, 1] for name in ("colour", "shape")]
        keep = world.in_split(mirror, "test") & differ[0] & differ[1]
        scene, mirror = ({name: value[keep][:n] for name, value in s.items()} for s in (scene, mirror))
        captions = [[" and ".join(coloured(o["colour"], o["shape"]) for o in objects) for objects in pair]
                    for pair in zip(self.objects_of(scene), self.objects_of(mirror))]
        images = torch.stack([normalize(self.render(s, generator)[0]) for s in (scene, mirror)], dim=1)
        return images, captions

    # Samples -----------------------------------------------------------------------------------------------------

    def sample_captions(self, limit):
        """Training captions for a vocabulary, at most 5,000: they hold every word, or with `words` in the thousands most of them."""
        generator, rng = torch.Generator().manual_seed(0), random.Random(0)
        lists = self.objects_of(self.scenes(min(limit, 5000), "train", generator))
        return [self.caption(objects, rng) for objects in lists]

    def sample(self, n, split, seed, objects=None):
        """n samples: images (n, 3, S, S) normalised, captions, scene, objects and segmentation (n, S, S)."""
        generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        scene = self.scenes(n, split, generator, objects)
        images, segmentation = self.render(scene, generator)
        lists = self.objects_of(scene)
        return {"images": normalize(images), "captions": [self.caption(o, rng) for o in lists], "scene": scene,
                "objects": lists, "segmentation": segmentation}


def made_up_word(i):
    """Word number i of 4,900: two syllables."""
    i = i * 1987 % 4900
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    return syllables[i // 70] + syllables[i % 70]


def plural(kind):
    return kind + ("es" if kind == "cross" else "s")


def article(phrase):
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def coloured(colour, shape):
    return article(f"{colour} {shape}")


def holds(a, relation, b):
    """Whether object a stands in the relation to b, by a margin of 6 pixels between the centres."""
    dx, dy = RELATIONS[relation]
    return (a["x"] - b["x"]) * dx + (a["y"] - b["y"]) * dy > 6


# Data: files ---------------------------------------------------------------------------------------------------------

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's
IMAGE_ERRORS = (OSError, SyntaxError, ValueError, NotImplementedError, Image.DecompressionBombError)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")


def normalize(images):
    """(..., 3, H, W) in [0, 1] -> zero mean, unit variance by CLIP's constants."""
    return v2.functional.normalize(images, MEAN, STD)


def denormalize(images):
    """The inverse of `normalize`."""
    return images * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]


def train_transform(size, min_scale=0.9):
    """RandomResizedCrop of `min_scale` to 1 of the area, horizontal flip, normalised float (3, size, size)."""
    return v2.Compose([
        v2.RandomResizedCrop(size, scale=(min_scale, 1.0), interpolation=v2.InterpolationMode.BICUBIC, antialias=True),
        v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def eval_transform(size):
    """Shorter side to `size`, centre crop, normalised float (3, size, size)."""
    return v2.Compose([
        v2.Resize(size, interpolation=v2.InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(size),
        v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


@dataclasses.dataclass
class View:
    """A kind of random view of an image: what it crops, and how often a view is blurred and solarised (BYOL, arXiv 2006.07733,
    App. B; DINO, arXiv 2104.14294). Flips (.5 of the views), colour jitter (.8) and grey (.2) are the same for all kinds."""

    size: int                # pixels of its side
    scale: tuple             # least and largest share of the image's area that it shows
    blur: float = 0.0        # probability
    solarize: float = 0.0    # probability
    alpha: float = 1.0       # of an image with a box: the crop's centre is drawn in the box by Beta(alpha, alpha)


class Views:
    """Several random views of each image, for objectives that compare them. Only crops are made image by image, the rest by the
    batch: for small images most of the time would be the calls.

    views: a View each; image_size: pixels of the largest: blur is relative to it.
    """

    def __init__(self, views, image_size):
        self.views, self.image_size = views, image_size
        self.betas = [torch.distributions.Beta(view.alpha, view.alpha) for view in views]
        self.least = max(math.ceil(view.size / view.scale[0] ** 0.5) for view in views)  # pixels that fill the least crop

    def __call__(self, image, box=None):
        """PIL image or (3, H, W) in [0, 1] -> a random crop (3, size, size) for each view. box: the part of the image in which the
        crops' centres lie, (left, top, right, bottom) as shares of its sides (ContrastiveCrop, arXiv 2202.03278); None: anywhere."""
        crops = []
        for view, beta in zip(self.views, self.betas):
            top, left, height, width = v2.RandomResizedCrop.get_params(image, view.scale, (3 / 4, 4 / 3))
            if box is not None:
                tall, wide = v2.functional.get_size(image)
                x, y = beta.sample((2,)).tolist()
                left, top = place_in(box[0], box[2], wide, width, x), place_in(box[1], box[3], tall, height, y)
            crop = v2.functional.resized_crop(image, top, left, height, width, [view.size] * 2, v2.InterpolationMode.BICUBIC, True)
            crops.append(crop if torch.is_tensor(crop) else v2.functional.to_dtype(v2.functional.to_image(crop), scale=True))
        return crops

    def collate(self, samples):
        """B lists of crops -> {"views": a normalised tensor (B, 3, size, size) for each view}."""
        return {"views": [self.distort(torch.stack(crops), view) for crops, view in zip(zip(*samples), self.views)]}

    def distort(self, x, view):
        """Flip, jitter, grey, blur, solarise and normalise (B, 3, s, s), each image by random numbers of its own."""
        def some(p):
            return torch.rand(len(x), 1, 1, 1) < p

        x = torch.where(some(0.5), x.flip(3), x).clamp(0, 1)             # bicubic crops overshoot
        x = torch.where(some(0.8), jitter(x, 0.4, 0.4, 0.2, 0.1), x)
        x = torch.where(some(0.2), luma(x).expand_as(x), x)
        rows = some(view.blur).flatten()
        sigma = torch.empty(int(rows.sum()), 1, 1, 1).uniform_(0.1, 2) * self.image_size / 224
        x[rows] = blur(x[rows], sigma)
        x = torch.where((x >= 0.5) & some(view.solarize), 1 - x, x)
        return normalize(x)


def place_in(first, last, side, length, share):
    """Where a crop of `length` of a `side` of pixels begins, if its centre lies between two shares of the side and the crop in the
    image; share: 0 for the first such place, 1 for the last."""
    low, high = (min(max(edge * side - length / 2, 0), side - length) for edge in (first, last))
    return round(low + share * (high - low))


class Boxes:
    """The boxes of images by name. keys (n,) int64, hashes of the names; boxes (n, 4): left, top, right, bottom as shares."""

    def __init__(self, keys, boxes):
        keys, order = keys.sort()
        self.keys, self.boxes = keys.numpy(), boxes[order].numpy()

    @staticmethod
    def key(name):
        return int.from_bytes(hashlib.blake2b(str(name).encode(), digest_size=8).digest(), "little", signed=True)

    def get(self, name):
        """The box of an image, or None."""
        key = self.key(name)
        i = np.searchsorted(self.keys, key)
        return self.boxes[i].tolist() if i < len(self.keys) and self.keys[i] == key else None

    def state(self):
        """What makes it again: keys and boxes."""
        return torch.from_numpy(self.keys), torch.from_numpy(self.boxes)


def luma(x):
    """(B, 3, H, W) -> (B, 1, H, W), the grey value (ITU-R BT.601)."""
    return (x * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)


def jitter(x, brightness, contrast, saturation, hue):
    """Random colours of each image of (B, 3, H, W) in [0, 1]: factors from 1 - strength to 1 + strength, hue turned by up to
    `hue` of a circle. All four are one linear map of the colours around the mean grey value, so that their order does not
    matter; hue turns in the YIQ space, where v2.ColorJitter uses HSV and cuts at 0 and 1 after each step."""
    b, c, s = (torch.empty(len(x), 1, 1).uniform_(1 - strength, 1 + strength) for strength in (brightness, contrast, saturation))
    angle = torch.empty(len(x)).uniform_(-2 * math.pi * hue, 2 * math.pi * hue)
    yiq = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
    turn = torch.zeros(len(x), 3, 3)
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 2, 1], turn[:, 1, 2] = angle.sin(), -angle.sin()
    turn[:, 1:] *= s                                                     # saturation scales I and Q
    colours = torch.linalg.inv(yiq) @ turn @ yiq * b                     # (B, 3, 3)
    grey = b * luma(x).mean((2, 3), keepdim=True)[:, 0]                  # (B, 1, 1)
    return torch.baddbmm((1 - c) * grey, c * colours, x.flatten(2)).view_as(x).clamp(0, 1)


def blur(x, sigma):
    """Gaussian blur of (B, 3, s, s), sigma (B, 1, 1, 1) in pixels: two matrix products; at the edge the weights inside count."""
    place = torch.arange(x.shape[-1])
    kernel = (-(place[:, None] - place).square() / (2 * sigma.square())).exp()   # (B, 1, s, s)
    kernel = kernel / kernel.sum(-1, keepdim=True)
    return kernel @ x @ kernel.transpose(2, 3)


def one_view(images):
    """B images (3, S, S) -> the images of a batch, as Views.collate gives its views."""
    return {"images": torch.stack(images)}


def open_image(file, least):
    """A path or bytes -> RGB image. JPEGs decode at 1/2, 1/4 or 1/8 where both sides stay at least `least` pixels."""
    with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
        image.draft("RGB", (least, least))
        if image.mode.startswith("I"):  # 16 bits: PIL's convert would cut at 255
            image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
        return image.convert("RGB")


class Strings:
    """A read-only list of strings in two numpy buffers: forked workers share it instead of copying it (reference counts
    of a Python list's strings would touch, and so copy, every page)."""

    def __init__(self, strings):
        encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
        self.ends = np.cumsum([len(e) for e in encoded], dtype=np.int64)
        self.buffer = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self):
        return len(self.ends)

    def __getitem__(self, i):
        return self.buffer[self.ends[i - 1] if i else 0 : self.ends[i]].tobytes().decode("utf-8", "surrogatepass")


class CaptionTable:
    """Image files with one or more captions each (and class labels where they come from class folders).

    An epoch shows every image exactly once, over all ranks and workers, with its captions taking turns from epoch to epoch.
    rows: iterable of (path, caption) or Skipped; rows of one path are one image; empty captions are left out and counted.
    """

    def __init__(self, rows, what, classes=None):
        captions, self.skipped = {}, {}
        for row in rows:
            if not isinstance(row, Skipped) and not (row[1] and row[1].strip()):
                row = Skipped("empty caption", str(row[0]))
            if isinstance(row, Skipped):
                row.count(self.skipped)
            else:
                captions.setdefault(str(row[0]), []).append(row[1].strip())
        if not captions:
            left_out = "; ".join(f"{n} rows left out: {reason}" for reason, (n, _) in self.skipped.items())
            raise UserError(f"{what} has no image with a caption{left_out and f' ({left_out})'}.")
        self.patience = min(1000, 100 + 2 * len(captions))  # so many unusable samples in a row end the run
        self.what, self.classes = what, classes
        self.paths = Strings(captions)
        self.captions = Strings(itertools.chain.from_iterable(captions.values()))
        self.first = np.cumsum([0, *map(len, captions.values())])  # captions of image i: first[i] to first[i + 1]
        self.labels = None
        if classes is not None:
            index = {name: i for i, name in enumerate(classes)}
            self.labels = np.array([index[Path(path).relative_to(what).parts[0]] for path in captions])

    def __len__(self):
        return len(self.paths)

    def captions_of(self, i):
        return [self.captions[j] for j in range(self.first[i], self.first[i + 1])]

    def samples(self, seed, part, parts, start=0):
        """Endless (path, caption) of one of `parts` disjoint parts, in an order of its epoch; `start` samples are skipped."""
        size = (len(self) - part + parts - 1) // parts
        if size < 1:
            raise StreamError(f"{self.what} has {len(self)} images, fewer than ranks x workers = {parts}: use fewer --workers.")
        for epoch in itertools.count(start // size):
            order = np.random.default_rng((seed, epoch)).permutation(len(self))[part::parts]
            for i in order[start % size if epoch == start // size else 0 :]:
                turn = (epoch + int(i)) % int(self.first[i + 1] - self.first[i])
                yield self.paths[i], self.captions[self.first[i] + turn]

    def files(self, part, parts):
        """(path, name) of each image of one of `parts` parts, once."""
        return ((path, path) for path in (self.paths[i] for i in range(part, len(self), parts)))

    def sample_captions(self, limit):
        return [self.captions[i] for i in range(min(limit, len(self.captions)))]


class TarShards:
    """img2dataset shards: `key.jpg` and `key.txt` (or "caption" in `key.json`) beside each other in tar files.

    Each epoch deals the shuffled shards to the ranks and workers; with `resample` every worker draws shards with
    replacement instead. A shuffle buffer of `buffer` samples mixes them. What cannot be read is skipped and counted, and what
    has no caption unless `captions` is False.
    """

    def __init__(self, pattern, resample=False, buffer=1000, captions=True):
        self.what, self.paths, self.captions = pattern, expand_braces(pattern), captions
        missing = [path for path in self.paths if not os.path.isfile(path)]
        if missing:
            raise UserError(f"{len(missing)} of the {len(self.paths)} shards of {pattern} do not exist, the first is {missing[0]}.")
        if buffer < 1:
            raise UserError(f"{pattern}: buffer={buffer} must be at least 1.")
        self.resample, self.buffer, self.skipped, self.classes = resample, buffer, {}, None
        self.patience = 100_000  # so many unusable samples in a row end the run; fewer once an epoch's size is known

    def samples(self, seed, part, parts, start=0):
        """Endless (bytes, caption, "shard:key") of one of `parts` parts; `start` samples are passed over undecoded. What is
        left out comes as a Skipped."""
        if len(self.paths) < parts and not self.resample:
            raise StreamError(f"{self.what} has {len(self.paths)} shards, fewer than ranks x workers = {parts}: use fewer "
                              f"--workers, more shards, or {self.what}:resample=1.")
        passed = 0
        for sample in shuffled(self._read(seed, part, parts), self.buffer, random.Random(f"{seed}-{part}-{parts}")):
            if isinstance(sample, Skipped):
                if passed >= start:
                    yield sample
            elif passed < start:
                passed += 1
            else:
                yield sample

    def _read(self, seed, part, parts):
        for epoch in itertools.count():
            if self.resample:
                rng = np.random.default_rng((seed, epoch, part, parts))
                shards = rng.integers(len(self.paths), size=max(1, len(self.paths) // parts))
            else:
                shards = np.random.default_rng((seed, epoch)).permutation(len(self.paths))[part::parts]
            size = 0
            for shard in shards:
                for size, sample in enumerate(read_tar(self.paths[shard], self.captions), size + 1):
                    yield sample
            self.patience = min(100_000, 100 + 50 * size)

    def files(self, part, parts):
        """(bytes, name) of each image of one of `parts` parts, once."""
        samples = itertools.chain.from_iterable(read_tar(path, self.captions) for path in self.paths[part::parts])
        return ((sample[0], sample[2]) for sample in samples if not isinstance(sample, Skipped))

    def labelled(self):
        """(image bytes, label) of every sample with a label: a whole number in `key.cls`, or as "label" in `key.json`. What is left
        out is said at the end."""
        found, left_out = 0, {}
        for sample in itertools.chain.from_iterable(tar_members(path) for path in self.paths):
            if isinstance(sample, Skipped):
                sample.count(left_out)
                continue
            members, where = sample
            image, label = image_of(members), label_of(members)
            if image is None or label is None:
                Skipped("no image" if image is None else "no label", where).count(left_out)
            else:
                found += 1
                yield image, label
        for reason, (count, example) in left_out.items():
            print(f"left out of {self.what}: {count} with {reason}, the last {example}")
        if not found:
            raise UserError(f"{self.what} has no image with a label: a number in KEY.cls, or as \"label\" in KEY.json.")

    def sample_captions(self, limit):
        samples = itertools.chain.from_iterable(read_tar(path) for path in self.paths)
        captions = [s[1] for s in itertools.islice((s for s in samples if not isinstance(s, Skipped)), limit)]
        if not captions:
            raise UserError(f"{self.what} has no image with a caption: a sample is KEY.jpg and KEY.txt beside each other.")
        return captions


@dataclasses.dataclass
class Skipped:
    """A sample that was left out, and why."""

    reason: str
    where: str

    def count(self, skipped):
        """Enter it into {reason: [count, last example]}."""
        skipped[self.reason] = [skipped.get(self.reason, (0,))[0] + 1, self.where]


class StreamError(UserError):
    """A UserError that stays one sentence when a DataLoader worker, which adds its traceback to the message, passes it on."""

    def __init__(self, message):
        super().__init__(message.rpartition("StreamError: ")[2].strip())


def expand_braces(pattern):
    """`a/{000..012}.tar` -> the 13 paths; several ranges multiply; without braces the path itself."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not match:
        return [pattern]
    first, last = match[1], match[2]
    if int(last) < int(first):
        raise UserError(f"The brace range {match[0]} of {pattern} is empty.")
    return [path for i in range(int(first), int(last) + 1)
            for path in expand_braces(pattern[: match.start()] + str(i).zfill(len(first)) + pattern[match.end():])]


def shuffled(samples, size, rng):
    """Pass an endless stream through a buffer of `size` samples, handing out a random one for each that comes in."""
    buffer = []
    for sample in samples:
        if isinstance(sample, Skipped):
            yield sample
        elif len(buffer) < size:
            buffer.append(sample)
        else:
            i = rng.randrange(size)
            yield buffer[i]
            buffer[i] = sample


def read_tar(path, captions=True):
    """One shard -> (image bytes, caption, "shard:key") for each key, or Skipped."""
    for sample in tar_members(path):
        yield sample if isinstance(sample, Skipped) else read_sample(*sample, captions)


def tar_members(path):
    """One shard -> ({suffix: bytes}, "shard:key") for each key, or Skipped. Members of a key, which is the name up to its first
    dot, stand together (img2dataset)."""
    empty = True
    try:
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
            members = ((member.name, tar.extractfile(member).read()) for member in tar if member.isfile())
            for key, group in itertools.groupby(members, key=lambda member: re.match(r"(.*/)?[^/.]*", member[0])[0]):
                empty = False
                yield {name[len(key):].lower(): data for name, data in group}, f"{path}:{key}"
            file.seek(tar.offset)
            if file.read(512) != bytes(512):  # the end of a tar is two blocks of zeros
                yield Skipped("truncated shard", path)
            elif empty:
                yield Skipped("empty shard", path)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        yield Skipped("unreadable shard", f"{path} ({error})")


def image_of(members):
    return next((members[suffix] for suffix in IMAGE_SUFFIXES if suffix in members), None)


def label_of(members):
    """The class of a sample, or None."""
    try:
        label = int(members[".cls"]) if ".cls" in members else int(json.loads(members[".json"])["label"])
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    return label if label >= 0 else None


def read_sample(members, where, captions=True):
    """{suffix: bytes} of one key -> (image bytes, caption, where), or Skipped; without `captions` the caption is empty."""
    image = image_of(members)
    if image is None:
        return Skipped("no image", where)
    if not captions:
        return image, "", where
    caption = members.get(".txt", b"").decode("utf-8", "replace").strip()
    if not caption and ".json" in members:
        try:
            data = json.loads(members[".json"])
        except (ValueError, RecursionError):
            return Skipped("invalid JSON", where)
        caption = str(isinstance(data, dict) and data.get("caption") or "").strip()
    return (image, caption, where) if caption else Skipped("empty caption", where)


def read_table(path, image=None, caption=None):
    """CSV or TSV with a header -> (path, caption) rows or Skipped. Columns filepath, title (OpenCLIP) or image, caption
    (Flickr)."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        header = file.readline()
        file.seek(0)
        reader = csv.DictReader(file, delimiter="\t" if "\t" in header else ",")
        columns = reader.fieldnames or []
        image = image or next((name for name in ("filepath", "image") if name in columns), "filepath")
        caption = caption or next((name for name in ("title", "caption") if name in columns), "title")
        for column in (image, caption):
            if column not in columns:
                raise UserError(f"{path} has no column {column!r}, only {', '.join(columns) or 'an empty first line'}; name "
                                f"yours with {path}:image=COLUMN,caption=COLUMN.")
        for row in reader:
            if None in row or not row[image]:
                reason = "too many columns (a comma outside quotes?)" if None in row else "no image name"
                yield Skipped(reason, f"{path}, line {reader.line_num}")
            else:
                yield row[image], row[caption]


def read_token_file(path):
    """Flickr's `.token`: `x.jpg#0<TAB>caption` a line."""
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            name, tab, caption = line.partition("\t")
            if not tab:
                raise UserError(f"{path}, line {number}: no tab between the image and the caption.")
            yield name.rpartition("#")[0] or name, caption


def read_json(path, split):
    """COCO captions or Karpathy's JSON -> (path, caption) rows or Skipped; `split` (Karpathy only; train takes restval too)."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    try:
        if "annotations" in data and "images" in data:
            names = {image["id"]: str(image["file_name"]) for image in data["images"]}
            return [(names[a["image_id"]], str(a["caption"] or "")) if a["image_id"] in names else
                    Skipped("caption without image", f"{path}, image_id {a['image_id']}") for a in data["annotations"]]
        if "images" in data and "sentences" in data["images"][0]:
            splits = ("train", "restval") if split == "train" else (split,)
            images = [image for image in data["images"] if image["split"] in splits]
            if not images:
                raise UserError(f"{path} has no split {split!r}, only {', '.join(sorted({i['split'] for i in data['images']}))}.")
            return [(os.path.join(image.get("filepath", ""), image["filename"]), str(sentence["raw"] or ""))
                    for image in images for sentence in image["sentences"]]
    except KeyError as error:
        raise UserError(f"{path}: an image or annotation has no {error}; COCO captions and Karpathy's files do.") from None
    except (TypeError, AttributeError, IndexError):
        pass
    raise UserError(f"{path} is neither COCO captions (images, annotations) nor Karpathy's (images with sentences).")


def open_data(spec, image_root=None, split="train", image_size=48, captions=True):
    """A SPEC -> World, CaptionTable or TarShards. `split` chooses Karpathy's; a spec's own `split=` goes before it.

    SPEC: shapes[:knob=value,...] | FILE.csv .tsv .txt [:image=COLUMN,caption=COLUMN] | 'DIR/{00000..00012}.tar'[:resample=1] |
    FILE.json (COCO, Karpathy) [:split=val] | FILE.token | DIR of class folders.
    image_root: directory that the file names of a table are relative to; by default the table's own.
    image_size: of the world's pictures, unless the SPEC says it.
    captions: False for images alone: then shards need no captions, and a directory can hold images without class folders.
    """
    name, knobs = parse_spec(spec)
    if name == "shapes":
        return World(**{"size": image_size, **cast_knobs(knobs, dataclasses.asdict(World()), "shapes")})
    suffix = Path(name).suffix.lower()
    if suffix == ".tar":
        return TarShards(name, **cast_knobs(knobs, {"resample": False, "buffer": 1000}, name), captions=captions)
    if not os.path.exists(name):
        raise UserError(f"--data {spec}: {name} does not exist; a SPEC is shapes, a CSV or TSV file, tar shards, a COCO or "
                        f"Karpathy JSON, a .token file, or a directory of class folders.")
    if os.path.isdir(name):
        if captions or any(entry.is_dir() and entry.name[0] != "." for entry in os.scandir(name)):
            return open_class_folders(name)
        return CaptionTable(((path, "an image") for path in image_files(name)), name)
    readers = {".csv": read_table, ".tsv": read_table, ".txt": read_table, ".token": read_token_file,
               ".json": functools.partial(read_json, split=split)}
    if suffix not in readers:
        raise UserError(f"--data {spec}: no reader for {suffix!r} files, only {', '.join(readers)}, .tar and directories.")
    known = {".json": {"split": split}, ".token": {}}.get(suffix, {"image": "filepath", "caption": "title"})
    if image_root and not os.path.isdir(image_root):
        raise UserError(f"--image-root {image_root} is not a directory.")
    root = Path(image_root or Path(name).parent)
    try:
        rows = readers[suffix](name, **cast_knobs(knobs, known, name))
        return CaptionTable((row if isinstance(row, Skipped) else (root / row[0], row[1]) for row in rows), name)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"Cannot read {name}: {error}; it must be UTF-8 text, quotes in pairs.") from None


def open_class_folders(directory):
    """DIR/class name/image.jpg -> CaptionTable with labels; the caption is made from the folder's name."""
    classes = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and entry.name[0] != ".")
    if not classes:
        raise UserError(f"{directory} has no class folders.")
    rows = [(path, f"a photo of {article(name.replace('_', ' '))}.") for name in classes
            for path in image_files(Path(directory, name))]
    return CaptionTable(rows, directory, classes)


def image_files(directory):
    return [path for path in sorted(Path(directory).rglob("*")) if path.suffix.lower() in IMAGE_SUFFIXES]


class Stream(IterableDataset):
    """Endless batches of one rank from a CaptionTable or TarShards, reproducible from (seed, rank, worker, position).

    transform: a function of an image; with Views the batch has "views" instead of images. tokenizer: None for images alone.
    boxes: None or Boxes, whose images are transformed with their box.
    A batch: images (B, 3, S, S), tokens and mask (B, L), `skipped`: {worker: {reason: [count, last example]}}, and
    `position`: {worker: (batches, samples, skipped so far)}. Give the positions of all workers (the latest of each) back to
    continue with the next batch.
    """

    def __init__(self, source, tokenizer, transform, image_size, context, batch_size, seed, rank=0, world_size=1,
                 positions=None, boxes=None):
        self.source, self.tokenizer, self.transform, self.boxes = source, tokenizer, transform, boxes
        self.collate = getattr(transform, "collate", one_view)
        self.least = getattr(transform, "least", math.ceil(1.5 * image_size))
        self.context, self.batch_size = context, batch_size
        self.seed, self.rank, self.world_size, self.positions = seed, rank, world_size, positions or {}

    def __iter__(self):
        worker, workers = whose_turn(self.positions)
        part, parts = self.rank * workers + worker, self.world_size * workers
        batches, position, skipped = self.positions.get(worker, (0, 0, self.source.skipped if part == 0 else {}))
        skipped, in_a_row, images, captions = dict(skipped), 0, [], []
        for sample in self.source.samples(self.seed, part, parts, position):
            if not isinstance(sample, Skipped):
                position += 1
                sample = self.load(*sample, seed=(self.seed, part, position))
            if isinstance(sample, Skipped):
                sample.count(skipped)
                in_a_row += 1
                if in_a_row >= self.source.patience:
                    raise StreamError(f"{self.source.what}: {in_a_row:,} samples in a row could not be used, the last: "
                                      f"{sample.reason}, {sample.where}.")
                continue
            in_a_row = 0
            images.append(sample[0])
            captions.append(sample[1])
            if len(images) == self.batch_size:
                batches += 1
                with fixed_seed(self.seed, part, position, 1):
                    batch = self.collate(images)
                yield {**batch, **tokenize(self.tokenizer, captions, self.context),
                       "position": {worker: (batches, position, dict(skipped))}, "skipped": {worker: dict(skipped)}}
                images, captions = [], []

    def load(self, file, caption, where=None, *, seed):
        """Decode and augment, with random numbers that depend on the sample's place in the stream alone."""
        try:
            image = open_image(file, self.least)
        except IMAGE_ERRORS as error:
            return Skipped("unreadable image", f"{where or file} ({re.sub(' <.*>', '', str(error))})")
        box = self.boxes.get(where or file) if self.boxes else None
        with fixed_seed(*seed):
            return self.transform(image) if box is None else self.transform(image, box), caption


class EachImage(IterableDataset):
    """The images of one of `parts` parts of a CaptionTable or TarShards, each once: batches of names and images (B, 3, S, S), whole
    and squeezed to a square, so that shares of its sides are shares of the image's. What cannot be read is left out."""

    def __init__(self, source, image_size, batch_size, part=0, parts=1):
        self.source, self.image_size, self.batch_size, self.part, self.parts = source, image_size, batch_size, part, parts

    def __iter__(self):
        worker, workers = whose_turn({})
        files = iter(self.source.files(self.part * workers + worker, self.parts * workers))
        while group := list(itertools.islice(files, self.batch_size)):
            names, images = [], []
            for file, name in group:
                try:
                    image = open_image(file, self.image_size).resize((self.image_size,) * 2, Image.Resampling.BICUBIC)
                except IMAGE_ERRORS:
                    continue
                names.append(name)
                images.append(v2.functional.to_dtype(v2.functional.to_image(image), scale=True))
            if names:
                yield names, normalize(torch.stack(images))


class WorldStream(IterableDataset):
    """Endless batches of one rank from the embedded world, in the form of Stream's. transform: None or Views; tokenizer: None for
    images alone."""

    def __init__(self, source, tokenizer, context, batch_size, seed, rank=0, world_size=1, positions=None, transform=None):
        self.source, self.tokenizer, self.context, self.batch_size = source, tokenizer, context, batch_size
        self.seed, self.rank, self.positions, self.transform = seed, rank, positions or {}, transform

    def __iter__(self):
        worker, _ = whose_turn(self.positions)
        for batches in itertools.count(self.positions.get(worker, (0,))[0]):
            seed = mix_seed(self.seed, self.rank, worker, batches)
            sample = self.source.sample(self.batch_size, "train", seed)
            yield {**self.images(sample["images"], seed), **tokenize(self.tokenizer, sample["captions"], self.context),
                   "position": {worker: (batches + 1,)}, "skipped": {}}

    def images(self, images, seed):
        if self.transform is None:
            return {"images": images}
        with fixed_seed(seed):
            return self.transform.collate([self.transform(image) for image in denormalize(images)])


def tokenize(tokenizer, captions, context):
    """Captions -> tokens and mask (B, L) of a batch; without a tokenizer nothing."""
    return dict(zip(("tokens", "mask"), tokenizer.batch(captions, context))) if tokenizer else {}


@contextlib.contextmanager
def fixed_seed(*numbers):
    """Random numbers that depend on `numbers` alone, and leave those outside as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(mix_seed(*numbers))
        yield


def whose_turn(positions):
    """{worker: (batches, ...)} -> the worker whose stream this process continues, and the number of workers. A DataLoader
    asks its process 0 first, so that one continues the stream with the fewest batches."""
    info = get_worker_info()
    if info is None:
        return 0, 1
    batches = [positions.get(worker, (0,))[0] for worker in range(info.num_workers)]
    return (batches.index(min(batches)) + info.id) % info.num_workers, info.num_workers


def mix_seed(*numbers):
    """Integers -> one seed that changes with each of them."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


# Schedules and parameter groups --------------------------------------------------------------------------------------


def cosine(step, steps, start, end):
    """Half a cosine from `start` at step 0 to `end` at `steps`."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * step / max(1, steps)))


def cosine_lr(step, steps, warmup, peak):
    """Linear warm-up to `peak` over `warmup` steps, then half a cosine to 0 at `steps`."""
    return peak * (step + 1) / warmup if step < warmup else cosine(step - warmup, steps - warmup, peak, 0.0)


def linear_lr(step, steps, warmup, peak):
    """Linear warm-up to `peak` over `warmup` steps, then a line to 0 at `steps`."""
    return peak * ((step + 1) / warmup if step < warmup else (steps - step) / max(1, steps - warmup))


def param_groups(model, weight_decay):
    """Two AdamW groups, the first with `decays`: the weights of linear and convolution layers decay; norms, biases, embeddings,
    positions, queries and the temperature do not."""
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = [parameter for parameter in trained if id(parameter) in matrices]
    rest = [parameter for parameter in trained if id(parameter) not in matrices]
    return [{"params": decay, "weight_decay": weight_decay, "decays": True}, {"params": rest, "weight_decay": 0.0, "decays": False}]


# Checkpoints ---------------------------------------------------------------------------------------------------------


def save_checkpoint(path, state):
    """Write atomically: a killed process leaves the old file or the new one, never half of one."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_config(run):
    """The settings of a run's directory, as config.json has them."""
    path = Path(run, "config.json")
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{run} holds no run: there is no {path}.") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}.") from None


def load_checkpoint(path, map_location="cpu"):
    """Read a checkpoint without executing code from it. Raises UserError when it is missing or no checkpoint."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError:
        raise UserError(f"There is no checkpoint {path}.") from None
    except Exception as error:
        raise UserError(f"{path} is not a checkpoint that can be read: {type(error).__name__}.") from None
