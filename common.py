"""The code that all methods share: encoders, tokenizers, data, distributed training, weights.

No code here depends on a method, and no method file imports this file. So a method file works in
another project without this file. train.py and eval.py join the two. The sections:

    Encoders            ViT, TextTransformer, ResNet; their presets
    What train.py and eval.py need from a method    members, defaults, how to add a method
    Tokenizer           WordPiece, CLIP's BPE, the training of a vocabulary
    Images and views    decoding, crops, augmentation
    Data files          tables, tar shards, class folders: what --data names
    Streams and seeds   endless batches, which a resumed run continues
    Command line        flags from the fields of a dataclass and their comments
    Schedules           learning rate, weight decay
    Groups, files       parameter groups; files that a killed process leaves intact
    Distributed         ranks, and the values that they exchange
    Weights of others   reading weights of CLIP and timm, writing weights for timm
    Boxes               data for detection
    The world of shapes drawn scenes with captions; skip this section if you have data

To add a size of ViT or of text encoder, add a row to VIT_PRESETS or TEXT_PRESETS. To add an image
encoder, read the docstring of ResNet. To add a format, read the docstring of formats. To add a
method, read the docstring of Method.
"""

import argparse
import ast
import contextlib
import csv
import dataclasses
import datetime
import errno
import fcntl
import fnmatch
import functools
import gzip
import hashlib
import heapq
import html
import inspect
import io
import itertools
import json
import math
import operator
import os
import pickle
import random
import re
import signal
import stat
import string
import subprocess
import sys
import tarfile
import textwrap
import time
import unicodedata
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import ExifTags, Image
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, get_worker_info
from torchvision.models import ResNet50_Weights, resnet
from torchvision.ops import (Conv2dNormActivation, box_area, box_iou, masks_to_boxes,
                             stochastic_depth)
from torchvision.transforms import v2


class UserError(Exception):
    """An error that the user can mend. The command line prints its message without a traceback.

    The message is one line: the problem, then the remedy.
    """

    def __init__(self, message):
        # A DataLoader raises the error of a worker again, with the traceback of the worker before
        # the message. Only the message is kept.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


class DiskError(UserError):
    """The error of a disk that fails again and again. The run saves and ends."""


def flag_of(name):
    """The name of a setting -> its flag on the command line."""
    return "--" + name.replace("_", "-")


@contextlib.contextmanager
def explained(kinds, what, remedy=""):
    """A context that turns an error of the types `kinds` into a UserError.

    The message of the UserError is `what`, a colon, the text of the error, and `remedy`.
    """
    try:
        yield
    except kinds as error:
        # strerror is the text of an OSError without the path, which `what` already names.
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        reason = reason or type(error).__name__
        # the text of torch goes on with the advice to trust the file
        reason = re.split(" In PyTorch| This file can", reason)[0].rstrip(".")
        raise UserError(f"{what}: {reason}{remedy}".rstrip(".") + ".") from None


def prepare_output():
    """Print each line at once. Print a backslash escape for a character that the terminal cannot
    show, because an unusual file name must not end a run. A closed stream is None. The streams of
    a notebook have no `reconfigure`."""
    for stream in filter(lambda stream: hasattr(stream, "reconfigure"), (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="backslashreplace", line_buffering=True)
        stream.write = functools.partial(write_or_drop, stream, stream.write)


def write_or_drop(stream, write, text):
    """Write a text. If nobody can read the stream any more, the text and all later texts are
    dropped: neither `| head`, a closed terminal nor a full disk may end a run. Trainings and
    evaluations also write their figures into log.jsonl and evals.jsonl."""
    try:
        return write(text)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def parse_spec(spec):
    """"name:key=value,key=value" -> (name, {key: value}).

    A name may contain other colons. A path that exists is not split. A spec that joins several
    shards with "::" is not split either.
    """
    match = re.fullmatch(r"(.*?):(\w+=[^,=]*(?:,\w+=[^,=]*)*)", spec)
    if not match or "::" in spec or look_at(spec):
        return spec, {}
    return match[1], dict(item.split("=") for item in match[2].split(","))


def cast_settings(settings, defaults, name):
    """Cast the strings of a spec's settings to the types of `defaults`.

    Raises UserError for a key that `defaults` lacks and for a string that cannot be cast.
    """
    booleans = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    result = {}
    for key, text in settings.items():
        if key not in defaults:
            known = ", ".join(sorted(defaults)) or "none"
            raise UserError(f"{name} has no setting {key!r}; its settings: {known}.")
        kind = type(defaults[key])
        problem = f"{name}: {key}={text!r} is not of type {kind.__name__}"
        with explained((ValueError, KeyError), problem, f" (default {defaults[key]})"):
            result[key] = booleans[text.lower()] if kind is bool else kind(text)
    return result


# Encoders -----------------------------------------------------------------------------
#
# An encoder of images or of texts returns ALL its tokens after the last LayerNorm, because methods
# pool the tokens in different ways: into a mean, slots or words, or not at all.
#
# The weights of all blocks are initialised like the weights of CLIP's text encoder. Parameters have
# the names of timm, so that few names differ when weights of timm are loaded.


class Encoder(nn.Module):
    """A transformer: the base of ViT and TextTransformer, but not of ResNet. Subclasses define
    `all_tokens`, which computes the tokens of a batch.

    With accum_freq K the rows of a batch are computed in at most K parts, one after the other. The
    backward pass computes each part again. So memory for the activations of one part is enough. The
    loss still compares the whole batch.
    """

    accum_freq = 1
    left_out = 0  # number of last blocks that are missing because the method replaces them

    def forward(self, *inputs):
        if self.accum_freq == 1:
            return self.all_tokens(*inputs)
        rows = math.ceil(len(inputs[0]) / self.accum_freq)
        outputs = []
        for part in zip(*[x.split(rows) for x in inputs if x is not None]):
            # Autocast caches a half-precision copy of each weight. If all parts shared the copy,
            # their gradients would be summed in half precision. With a copy for each part, the
            # gradients are summed in the gradient of the weight, in fp32.
            torch.clear_autocast_cache()

            # The backward pass computes each part again. `checkpoint` restores the random state, so
            # that stochastic depth drops the same rows. Without gradients, `checkpoint` only calls
            # all_tokens.
            outputs.append(checkpoint(self.all_tokens, *part, use_reentrant=False))
        return torch.cat(outputs)


# The (mean, standard deviation) of pixels that pretrained weights expect. clip: OpenAI, OpenCLIP.
# imagenet: torchvision, DeiT, DINO, BAM, many of timm. half: augreg, orig_in21k and sam of timm.
PIXELS = {"clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
          "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
          "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))}


class Pixels(nn.Module):
    """Images (B, 3, H, W), uint8 or floats in [0, 1] -> (x - mean) / std for each channel.

    Every image encoder begins with this module. Pixels are normalised nowhere else. Weights need
    the constants with which they were trained, so a checkpoint holds the constants, too.

    name: a key of PIXELS, or "". With "" the constants are those of CLIP, until weights are loaded
    that come with other constants.
    """

    def __init__(self, name):
        super().__init__()
        if name and name not in PIXELS:
            raise UserError(f"pixels must be one of {', '.join(PIXELS)}, not {name!r}.")
        self.name = name
        for constant, values in zip(("mean", "std"), PIXELS[name or "clip"]):
            self.register_buffer(constant, torch.tensor(values)[:, None, None])  # (3, 1, 1)

    def forward(self, images):
        images = v2.functional.to_dtype(images, self.mean.dtype, scale=True)  # uint8 -> [0, 1]
        return (images - self.mean) / self.std


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x): an approximation of GELU. OpenAI trained CLIP with this function."""

    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Attention(nn.Module):
    """Multi-head self-attention, (B, N, d) -> (B, N, d)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x, mask=None, causal=False):
        """mask: (B, 1, 1, N), True for keys that queries may attend to; None for all keys."""
        q, k, v = self.split_heads(x)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.proj(x.transpose(1, 2).flatten(2))       # (B, N, d)

    def split_heads(self, x):
        """(B, N, d) -> queries, keys and values, each (B, heads, N, d / heads)."""
        B, N, d = x.shape
        return self.qkv(x).view(B, N, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)


class Block(nn.Module):
    """Pre-norm transformer block, (B, N, d) -> (B, N, d).

    drop_path: the probability of stochastic depth (arXiv 1603.09382). With this probability, a
    training step skips the attention for an image. The MLP is skipped with the same probability,
    independently of the attention.
    """

    def __init__(self, width, heads, act, eps, drop_path):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = nn.Sequential(OrderedDict(
            fc1=nn.Linear(width, 4 * width), act=act(), fc2=nn.Linear(4 * width, width)))
        self.drop_path = drop_path

    def forward(self, x, mask=None, causal=False):
        change = self.attn(self.norm1(x), mask, causal)
        x = x + stochastic_depth(change, self.drop_path, "row", self.training)
        change = self.mlp(self.norm2(x))
        return x + stochastic_depth(change, self.drop_path, "row", self.training)


class Blocks(nn.ModuleList):
    """`depth` blocks in sequence. Initial weights are normal, as in CLIP's text encoder, and
    initial biases are zero.

    The probability of stochastic depth grows linearly from 0 in the first block to `drop_path` in
    the last block. A single block has the probability 0. With grad_checkpoint the backward pass
    computes each block again, which saves memory.
    """

    grad_checkpoint = False

    def __init__(self, depth, width, heads, quick_gelu, eps, drop_path):
        act = QuickGELU if quick_gelu else nn.GELU
        rates = np.linspace(0, drop_path, depth).tolist()
        super().__init__(Block(width, heads, act, eps, rate) for rate in rates)
        for block in self:
            # 2 * depth layers (proj and fc2) add their outputs to the residual stream. The weights
            # of these layers are smaller, so that the variance does not grow with the depth.
            nn.init.normal_(block.attn.qkv.weight, std=width**-0.5)
            nn.init.normal_(block.attn.proj.weight, std=(2 * width * depth) ** -0.5)
            nn.init.normal_(block.mlp.fc1.weight, std=(2 * width) ** -0.5)
            nn.init.normal_(block.mlp.fc2.weight, std=(2 * width * depth) ** -0.5)
            for linear in (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2):
                nn.init.zeros_(linear.bias)

    def forward(self, x, mask=None, causal=False, n=1):
        """(B, N, d) -> a list of the outputs of the last n blocks, (B, N, d) each, in order."""
        outputs = []
        for block in self:
            if self.grad_checkpoint:
                x = checkpoint(block, x, mask, causal, use_reentrant=False)
            else:
                x = block(x, mask, causal)
            outputs = [*outputs, x][-n:]
        return outputs or [x]  # without blocks the input is the output


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm2d with the statistics of the GLOBAL batch, computed at least in fp32.

    So N ranks give the gradients of one process. On GPUs torch's SyncBatchNorm is used, because it
    reads and writes a quarter of the bytes. SyncBatchNorm does not run on CPUs, and torch.compile
    cannot trace it.
    """

    def forward(self, x):
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        if x.is_cuda and not torch.compiler.is_compiling():
            self.num_batches_tracked += 1
            return SyncBatchNorm.apply(x, self.weight, self.bias, self.running_mean,
                                       self.running_var, self.eps, self.momentum,
                                       dist.group.WORLD, dist.get_world_size())

        precise = x.to(torch.promote_types(x.dtype, torch.float32))          # float64 stays float64
        var, own = torch.var_mean(precise, (0, 2, 3), correction=0)          # (C,), (C,)
        mean = SumOverRanks.apply(own) / dist.get_world_size()               # (C,)
        # The total variance is the mean variance within ranks plus the variance between ranks.
        variance = var + (own - mean).square()
        variance = SumOverRanks.apply(variance) / dist.get_world_size()      # (C,)
        with torch.no_grad():
            # Each channel has n values. The factor n / (n - 1) makes the running variance unbiased,
            # as in torch.
            n = x.numel() / x.shape[1] * dist.get_world_size()
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * n / (n - 1), self.momentum)
            self.num_batches_tracked += 1
        scale = self.weight * (variance + self.eps).rsqrt()
        shift = self.bias - mean * scale
        return (x * scale[:, None, None] + shift[:, None, None]).to(x.dtype)


class ViT(Encoder):
    """Vision transformer that returns ALL tokens: images (B, 3, H, W) -> (B, N, width).

    N is H/p * W/p for patch_size p, plus 1 with `cls`. H and W must be multiples of p.

    cls: put a [CLS] token before the patches.
    positions: "learned", or "sincos" for fixed positions. Images of another size than `image_size`
        get interpolated positions.
    pre_norm: whether there is a LayerNorm before the first block (`ln_pre` of CLIP).
    stem: ((channels, stride), ...) of 3x3 convolutions that replace the patch convolution. The
        product of the strides must be patch_size. Small ViTs learn much faster with such a stem
        (Xiao et al. 2021, arXiv 2106.14881).
    drop_path: see Blocks. pixels: see Pixels.
    quick_gelu, eps, patch_bias: architectures differ in these settings. Pretrained weights need the
        settings of their architecture.

    Raises UserError if image_size is not a multiple of patch_size, or if `positions`, `stem` or
    `pixels` is invalid.
    """

    def __init__(self, image_size=224, patch_size=16, width=768, depth=12, heads=12,
                 cls=False, positions="learned", pre_norm=False, stem=None, quick_gelu=False,
                 eps=1e-6, patch_bias=True, drop_path=0.0, pixels=""):
        super().__init__()
        if image_size % patch_size:
            raise UserError(f"image_size {image_size} is no multiple of patch_size {patch_size}.")
        if positions not in ("learned", "sincos"):
            raise UserError(f"positions must be learned or sincos, not {positions!r}.")
        if stem and math.prod(stride for _, stride in stem) != patch_size:
            raise UserError(f"This stem does not fit patch_size {patch_size}: choose tiny-patch.")
        self.image_size, self.patch_size, self.width = image_size, patch_size, width
        self.grid, self.pixels = image_size // patch_size, Pixels(pixels)
        if stem:
            self.patch_embed = conv_stem(stem, width)
        else:
            self.patch_embed = nn.Conv2d(3, width, patch_size, patch_size, bias=patch_bias)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02) if cls else None
        if positions == "learned":
            self.pos = nn.Parameter(torch.randn(1, cls + self.grid**2, width) * 0.02)
        else:
            pos = sincos_positions(self.grid, self.grid, width)
            # [CLS] has no position in the image, so its position is a row of zeros.
            self.register_buffer("pos", F.pad(pos, (0, 0, int(cls), 0))[None])
        self.norm_pre = nn.LayerNorm(width, eps=eps) if pre_norm else nn.Identity()
        self.blocks = Blocks(depth, width, heads, quick_gelu, eps, drop_path)
        self.norm = nn.LayerNorm(width, eps=eps)

    def all_tokens(self, images):
        return self.layers(images, 1)[0]

    def layers(self, images, n):
        """Images -> the outputs (B, N, width) of the last n blocks, each after the LayerNorm."""
        return [self.norm(x) for x in self.blocks(self.embed(images), n=n)]

    def embed(self, images):
        """(B, 3, H, W) -> the input of the first block, (B, N, width). [CLS] comes first."""
        x = self.patch_embed(self.pixels(images))            # (B, d, h, w)
        pos = resize_positions(self.pos, self.cls is not None, *x.shape[2:])
        x = x.flatten(2).transpose(1, 2)                     # (B, h*w, d)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1)
        return self.norm_pre(x + pos)

    def cls_attention(self, images):
        """Images -> the attention weights from [CLS] to each patch in the last block.

        The result is (B, heads, h, w). The weights of a head sum to less than 1, because [CLS]
        also attends to itself. The weights are computed here, because the fused attention of
        `Attention.forward` returns no weights.
        """
        *before, last = self.blocks
        x = self.embed(images)
        for block in before:
            x = block(x)
        q, k, _ = last.attn.split_heads(last.norm1(x))       # (B, heads, 1 + h*w, d / heads)
        scores = q[:, :, :1] @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        weights = scores.softmax(-1)[:, :, 0, 1:]            # (B, heads, h*w)
        return weights.unflatten(2, (images.shape[2] // self.patch_size, -1))


def conv_stem(stem, width):
    """The convolutions of a stem, which map images (B, 3, H, W) to (B, width, H/p, W/p).

    stem: ((channels, stride), ...). p is the product of the strides.
    """
    layers, channels = [], 3
    for out, stride in stem:
        layers.append(Conv2dNormActivation(channels, out, 3, stride, norm_layer=BatchNorm))
        channels = out
    return nn.Sequential(*layers, nn.Conv2d(channels, width, 1))


def sincos_positions(height, width, d):
    """Fixed positions (height * width, d): the sinusoids of "Attention Is All You Need" in 2-D.

    The d numbers have four quarters: sin of the column, cos of the column, sin of the row, cos of
    the row. Each quarter has d / 4 frequencies.
    """
    omega = 10000.0 ** (-torch.arange(d // 4) / (d // 4))
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    x, y = x.flatten()[:, None] * omega, y.flatten()[:, None] * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


def resize_positions(pos, has_cls, height, width):
    """Interpolate the positions of a square grid to a grid of height x width, bicubically.

    (1, [1 +] g*g, d) -> (1, [1 +] height*width, d). The row of [CLS] does not change. Positions
    that do not form a square grid do not change either.
    """
    cls, grid = pos[:, : int(has_cls)], pos[:, int(has_cls):]
    side = math.isqrt(grid.shape[1])
    if (side, side) == (height, width) or side * side != grid.shape[1] or side == 0:
        return pos
    grid = grid.reshape(1, side, side, -1).permute(0, 3, 1, 2).float()
    # differs: DeiT does not use antialiasing
    grid = F.interpolate(grid, (height, width), mode="bicubic", antialias=True)
    return torch.cat([cls, grid.flatten(2).transpose(1, 2).to(pos.dtype)], dim=1)


class TextTransformer(Encoder):
    """Text transformer that returns ALL tokens: ids (B, L), mask (B, L) -> (B, L, width).

    `mask` is True on real tokens. In a bidirectional encoder, no token attends to padding. A causal
    encoder needs no mask, because padding comes last, and no real token attends to later tokens.
    The outputs at padding have no meaning. vocab_size: the number of token ids, to be given.
    build_encoders raises it to the length of the tokenizer.
    """

    def __init__(self, vocab_size=0, context=77, width=512, depth=12, heads=8, causal=False,
                 quick_gelu=False):
        super().__init__()
        self.vocab_size, self.context, self.width = vocab_size, context, width
        self.causal = causal
        self.special = ()  # ids of tokens that are no words; build_encoders sets them
        self.embedding = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.pos = nn.Parameter(torch.randn(1, context, width) * 0.01)
        self.blocks = Blocks(depth, width, heads, quick_gelu, eps=1e-5, drop_path=0.0)
        self.norm = nn.LayerNorm(width, eps=1e-5)

    def all_tokens(self, tokens, mask=None):
        x = self.embedding(tokens) + self.pos[:, : tokens.shape[1]]  # (B, L, d)
        mask = None if self.causal or mask is None else mask[:, None, None, :]
        return self.norm(self.blocks(x, mask, self.causal)[-1])


class ResNet(resnet.ResNet):
    """torchvision's ResNet without its head: images (B, 3, H, W) -> tokens (B, h * w, width).

    h = H / 32 and w = W / 32, rounded up. Each position of the last feature map becomes a token, so
    that a method can use a ResNet like a ViT. blocks: the numbers of blocks of the four stages.
    pixels: see Pixels.

    To add an image encoder, write a class with the members image_size, patch_size, grid (the number
    of tokens of a side), width, cls, norm, pixels and left_out, and add a row to IMAGE_ENCODERS.
    Use BatchNorm of this file, because torch's BatchNorm2d has other statistics on each rank. If an
    argument is a tuple, add its name to encoder_settings.
    """

    left_out = 0     # methods replace blocks of transformers only
    patch_size = 32  # a token stands for this many pixels of a side

    def __init__(self, image_size=224, blocks=(3, 4, 6, 3), pixels=""):
        super().__init__(resnet.Bottleneck, list(blocks), norm_layer=BatchNorm)
        self.image_size, self.grid, self.cls = image_size, math.ceil(image_size / 32), None
        self.width, self.norm = self.fc.in_features, nn.Identity()  # sparo.py moves `norm`
        self.pixels = Pixels(pixels)
        del self.avgpool, self.fc
        # convolutions are faster if weights and images have the layout "channels last"
        self.to(memory_format=torch.channels_last)

    def forward(self, images):
        images = self.pixels(images).contiguous(memory_format=torch.channels_last)
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer2(self.layer1(x))                      # (B, 512, H/8, W/8)
        x = self.layer4(self.layer3(x))                      # (B, 2048, H/32, W/32)
        return x.flatten(2).transpose(1, 2)


CLIP_TOKENS = 49_408  # the size of CLIP's vocabulary
# The receptive field of this stem is 31 pixels. The preset tiny/4 uses its first two layers, which
# have a receptive field of 7 pixels.
WORLD_STEM = ((32, 2), (64, 2), (128, 2), (128, 1))
CLIP_VIT = dict(cls=True, pre_norm=True, patch_bias=False, eps=1e-5, pixels="clip")
CLIP_TEXT = dict(vocab_size=CLIP_TOKENS, context=77, depth=12, causal=True)
# The presets clip-b32, clip-b16 and clip-l14 are the encoders of CLIP (2103.00020, Table 20), as
# OpenCLIP builds them, for --init-weights. Weights of OpenAI also need quick_gelu=1, like the
# models whose name in OpenCLIP ends in -quickgelu.
VIT_PRESETS = {
    "tiny": dict(image_size=48, patch_size=8, width=96, depth=2, heads=3, stem=WORLD_STEM),
    # A ViT without a stem, for --accum-freq. BatchNorm of a stem needs the whole batch at once.
    "tiny-patch": dict(image_size=48, patch_size=8, width=96, depth=2, heads=3),
    "tiny/4": dict(image_size=48, patch_size=4, width=96, depth=2, heads=3, stem=WORLD_STEM[:2]),
    "ViT-S/16": dict(patch_size=16, width=384, depth=12, heads=6),  # DeiT (2012.12877), Table 1
    "ViT-B/32": dict(patch_size=32, width=768, depth=12, heads=12),  # ViT (2010.11929), Table 1
    "ViT-B/16": dict(patch_size=16, width=768, depth=12, heads=12),  # ViT, Table 1
    "ViT-L/14": dict(patch_size=14, width=1024, depth=24, heads=16),  # ViT; 14: CLIP (2103.00020)
    "clip-b32": dict(patch_size=32, width=768, depth=12, heads=12, **CLIP_VIT),
    "clip-b16": dict(patch_size=16, width=768, depth=12, heads=12, **CLIP_VIT),
    "clip-l14": dict(patch_size=14, width=1024, depth=24, heads=16, **CLIP_VIT),
}
RESNET_PRESETS = {"ResNet-50": dict(blocks=(3, 4, 6, 3))}             # (1512.03385), Table 1
TEXT_PRESETS = {
    "tiny": dict(context=32, width=128, depth=2, heads=4),            # the world of shapes
    "12x512": dict(width=512, depth=12, heads=8),                     # CLIP, Sec. 2.4
    "12x768": dict(width=768, depth=12, heads=12),                    # SPARC, Sec. D.1
    "clip-b32": dict(width=512, heads=8, **CLIP_TEXT),
    "clip-b16": dict(width=512, heads=8, **CLIP_TEXT),
    "clip-l14": dict(width=768, heads=12, **CLIP_TEXT),
}
IMAGE_ENCODERS = {ViT: VIT_PRESETS, ResNet: RESNET_PRESETS}
TEXT_ENCODERS = {TextTransformer: TEXT_PRESETS}


def encoder_settings(spec, encoders):
    """("ViT-B/16:drop_path=0.1", IMAGE_ENCODERS) -> (ViT, {argument of the constructor: value}).

    The settings of the spec override the preset. The preset overrides the defaults of the
    constructor. Raises UserError for an unknown preset or setting.
    """
    name, settings = parse_spec(spec)
    for kind, presets in encoders.items():
        if name in presets:
            defaults = {k: p.default for k, p in inspect.signature(kind).parameters.items()}
            # a spec can set numbers and words, but no tuples
            scalars = {k: x for k, x in defaults.items() if k not in ("stem", "blocks")}
            settings = cast_settings(settings, scalars, kind.__name__)
            return kind, defaults | presets[name] | settings
    known = ", ".join(itertools.chain.from_iterable(encoders.values()))
    raise UserError(f"There is no encoder {name!r}; there are {known}.")


# What train.py and eval.py need from a method -----------------------------------------
#
# Method lists the functions that the module of a method may define. ModelDefaults lists the members
# that its Model may define. Each line has the default for a method that does not define the
# function or the member. train.py and eval.py use nothing else of a method, except Settings,
# PRESETS and Model. So a new method is a new file and a few rows. The docstring of Method names
# these rows.


class Method:
    """The module of a method: Config, PRESETS, Model, and the functions below.

    Config has the settings that Model reads. Settings, a subclass of Config, adds the other flags.
    `method.views(args)` calls the function `views` of the module, or the default below if the
    module has no such function. `args` holds the settings of a run: one object with the fields of
    Config of train.py and of Settings of the method. To add a method:

    1. Write NAME.py, which imports nothing but torch. ModelDefaults, below, lists the members that
       its Model must define, and the members that it may define. Each field of Settings has a
       comment, which becomes the help of its flag. One of the PRESETS is called tiny.
       `python NAME.py` prints a demonstration.
    2. Import the file in eval.py and add the module to METHODS there.
    3. Add a row to SMALL and to MODELS in tests/helpers.py. tests/test_contract.py then checks the
       method.
    4. If a setting has bounds, write them into its comment, as > 0 or <= 1. See check_numbers.
    """

    model_class = lambda self, args: self.Model  # the class of the model
    check = lambda self, args: None      # raises ValueError for settings that exclude each other
    uses_text = lambda self, args: True  # whether the model has a text encoder
    content = lambda self, args: "caption" if self.uses_text(args) else None  # open_data says more
    needs_cls = lambda self, args: ""    # the flag that needs a [CLS] token; "" if none does
    blocks_left_out = lambda self, args: 0  # number of last blocks that the method replaces
    vit_settings = lambda self, args: {}  # arguments of ViT that override --image-encoder
    views = lambda self, args: None      # arguments of View, a dict for each random view
    augment = lambda self, args: None    # arguments of Augment, for labelled images
    stages = lambda self, args: [(1, args.steps, args.lr)]  # (number, steps, peak lr)
    box_refreshes = lambda self, args: ()  # steps before which train.py calls Model.boxes

    def __init__(self, module):
        self.Settings = module.Config  # replaced by Settings of the module, if there is one
        vars(self).update(vars(module))  # functions of the module hide the defaults of the class


class ModelDefaults:
    """Defaults for the members that a Model need not define. None means that the model cannot
    compute the value.

    build_model makes a class that inherits from the Model of the method first and from this class
    second. So Python finds here the members that the Model does not define. A Model must define

        __init__(config, image_encoder, text_encoder, image_width, text_width)
        image_encoder, and text_encoder if it learns from captions: the encoders from __init__
        forward(batch, gather) -> {"loss": scalar, other scalars to log}
        encode_image(images) -> (B, E), normalised

    Shapes below: B images or captions, E numbers in an encoding, P patches, L text tokens or slots,
    N image tokens, V numbers in a slot, |V| words, h x w patches, C classes.
    """

    late_interaction = False  # whether `similarity` compares encode_patches and encode_tokens
    slots = 0                 # number of slots of image_slots, text_slots and attend
    mask_parts = 0            # number of equal parts of an encoding, for the task `masks`
    encode_text = None        # (tokens, mask) -> (B, E), normalised
    encode_patches = None     # (images) -> (B, P, E), normalised
    encode_tokens = None      # (tokens, mask) -> (B, L, E), zeros at padding
    similarity = None         # (patches, tokens) of n images and m captions -> (n, m)
    align_words = None        # (images, tokens, mask) -> (B, L, P), weights of patches
    image_slots = None        # (images) -> (B, L, V)
    text_slots = None         # (tokens, mask) -> (B, L, V)
    attend = None             # (images, tokens, mask) -> attention over image and text, slots
    encode_words = None       # (tokens, mask) -> (B, |V|), without the text encoder
    image_encoding = None     # (images) -> (B, |V|), weights of words, not normalised
    word_maps = None          # (images, ids) -> (B, N, n), scores of n words at image tokens
    head_maps = None          # (images) -> (B, heads, h, w), what [CLS] attends to
    class_scores = None       # (images) -> (B, C), scores of a classifier
    detect = None             # (images, queries (Q, E)) -> logits (B, P, Q), boxes (B, P, 4)
    boxes = None              # (images) -> (B, 4), boxes of crops, as fractions of the sides

    # {name in CLIP: our parameter} for "visual.proj", "text_projection" and "logit_scale", if the
    # model has them. Projections are (E, d).
    clip_parameters = lambda self: {}

    # the image encoder of encode_image, which is that of the teacher if there is a teacher
    evaluation_encoder = lambda self: self.image_encoder

    # the input of a linear probe
    probe_features = lambda self, images: self.encode_image(images)

    # the loss if all similarities are equal, which --dry-run prints. For a contrastive loss over a
    # global batch of B the loss is log B. A run whose loss stays there has learned nothing.
    chance_loss = lambda self, batch_size, mask, patches: math.log(batch_size)

    # called when a stage begins (fresh=True) and when a resumed run continues a stage (fresh=False)
    begin_stage = lambda self, number, fresh: None

    # called before and after each update; `step` is counted from the start of the stage
    before_update = lambda self, step: None
    after_update = lambda self, step, steps: None

    # called on each rank, in evaluation mode, at logged steps; returns more scalars to log
    diagnose = lambda self, batch: {}

    # a record of log.jsonl -> a warning to print, or None
    warn = lambda self, record: None


def build_encoders(method, args, tokenizer):
    """The settings of a run -> new (image encoder, text encoder). The text encoder is None if the
    method has none.

    tokenizer: its length is the size of the vocabulary of the text encoder, unless --text-encoder
    names a larger size. Raises UserError if the method needs [CLS] and the encoder has no [CLS].
    """
    kind, image = encoder_settings(args.image_encoder, IMAGE_ENCODERS)
    image["image_size"] = args.image_size or image["image_size"]
    left_out = 0
    # A ResNet has no transformer block to replace. The text encoder beside a ResNet also keeps all
    # its blocks.
    if kind is ViT:
        image |= method.vit_settings(args)
        left_out = method.blocks_left_out(args)
        image["depth"] -= left_out
    image_encoder = kind(**image)
    image_encoder.left_out = left_out
    flag = method.needs_cls(args)
    if flag and image_encoder.cls is None:
        raise UserError(f"{flag} needs a [CLS] token: give --image-encoder a ViT with :cls=1.")
    if not method.uses_text(args):
        return image_encoder, None
    _, text = encoder_settings(args.text_encoder, TEXT_ENCODERS)
    text["vocab_size"] = max(len(tokenizer), text["vocab_size"])
    text["depth"] -= left_out
    text_encoder = TextTransformer(**text)
    text_encoder.left_out = left_out
    # If the vocabulary of the text encoder is larger than that of the tokenizer, the last ids have
    # no token.
    unused = range(len(tokenizer), text["vocab_size"])
    text_encoder.special = [*getattr(tokenizer, "special", ()), *unused]
    return image_encoder, text_encoder


def build_model(method, args, image_encoder, text_encoder):
    """The Model of the method with these encoders, and with the members of ModelDefaults.

    If settings exclude each other, the constructor of the Model raises ValueError, which becomes a
    UserError.
    """
    text_width = text_encoder.width if text_encoder else None
    complete_class = type("Model", (method.model_class(args), ModelDefaults), {})
    with explained(ValueError, args.method):
        return complete_class(args, image_encoder, text_encoder, image_encoder.width, text_width)


def copy_encoder(encoder, source, run):
    """Load the weights of `source`, an encoder of a run, into `encoder`. Raises UserError if the
    weights do not fit.

    Positions are interpolated to the image size of `encoder`. If `source` has no final LayerNorm,
    because CLIP+GAP has moved it to the read-out, the LayerNorm of `encoder` keeps its weights.
    """
    norm = {key: x for key, x in encoder.state_dict().items() if key.startswith("norm.")}
    with explained(UserError, run):
        load_encoder(encoder, norm | source.state_dict(), (), "leave out --image-encoder")


# Tokenizer ----------------------------------------------------------------------------
#
# WordPiece is the tokenizer of BERT. STAIR needs WordPiece, because its tokens are words that
# people can read. BPE is the tokenizer of CLIP, for weights of CLIP. Both return the ids of the
# original tokenizers, because an embedding is valid only with the ids of its training. The
# docstring of BPE names two exceptions.

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
MAX_WORD = 100  # longest word, in characters; a longer word becomes [UNK], as in BERT
# the code points of Chinese characters, as in Hugging Face's BERT
CJK = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B81F),
       (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)]


def clean_text(text, keeps_marks=False):
    """BERT's uncased normalisation.

    Letters become lower case and lose their accents. Control characters are removed. Spaces are put
    around each Chinese character, so that the character is a word.

    keeps_marks: keep accents and other marks. Vowels of Hindi and Thai are such marks, and words of
    many languages differ only in a mark. The variation selectors of emoji are always dropped.
    """
    if text.isascii() and text.isprintable():  # most captions need only this fast line
        return text.lower()
    out = []
    for char in text:
        category = unicodedata.category(char)
        if char in "\t\n\r" or category.startswith("Z"):
            out.append(" ")
        elif any(first <= ord(char) <= last for first, last in CJK):
            out.append(f" {char} ")
        elif char != "\ufffd" and category not in ("Cc", "Cf", "Co", "Cs"):
            out.append(char)  # an unassigned code point (Cn) also stays, and becomes [UNK]
    # NFD splits a letter with an accent into the letter and a mark (Mn)
    text = unicodedata.normalize("NFD", "".join(out))
    return "".join(char.lower() for char in text if unicodedata.category(char) != "Mn"
                   or keeps_marks and not "\ufe00" <= char <= "\ufe0f")


def is_punctuation(char):
    """Whether BERT counts a character as punctuation: Unicode's punctuation and ASCII symbols."""
    return char in string.punctuation or unicodedata.category(char).startswith("P")


def split_words(text, keeps_marks=False):
    """A text -> its words, cleaned. Every punctuation character is a word."""
    words = []
    for chunk in clean_text(text, keeps_marks).split():
        for punctuation, group in itertools.groupby(chunk, is_punctuation):
            words += list(group) if punctuation else ["".join(group)]
    return words


class Tokenizer:
    """The methods that both tokenizers share. A subclass defines

    split(text)           -> words
    pieces(word)          -> ids of the tokens of a word
    vocab, ids            list of tokens, {token: id}
    pad, unk, cls, sep    ids
    special               ids of all tokens that are no words
    lines                 the lines of the vocabulary file, for `save` and `hash`
    """

    def __len__(self):
        return len(self.vocab)

    def encode(self, text, max_length=None):
        """Text -> list of ids, [CLS] ... [SEP], truncated to `max_length` ids (2 or more).

        A truncated text keeps its [SEP], because a causal encoder has its encoding at [SEP].
        """
        ids = [piece for word in self.split(text) for piece in self.pieces(word)]
        if max_length is not None:
            ids = ids[: max_length - 2]
        return [self.cls, *ids, self.sep]

    def batch(self, texts, max_length):
        """B texts -> ids (B, L) and mask (B, L), which is True on tokens and False on padding.

        L is the length of the longest of THESE texts, at most max_length. Captions are much shorter
        than the context. So a smaller L saves time in the text encoder.
        """
        rows = [torch.tensor(self.encode(text, max_length)) for text in texts]
        tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad)
        lengths = torch.tensor([len(row) for row in rows])
        return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]

    def hash(self):
        """A number that identifies the vocabulary. A checkpoint holds this number, because a run
        that is resumed with another vocabulary would train wrong embeddings."""
        return zlib.crc32("\n".join(self.lines).encode())

    def save(self, path):
        with replacing(path) as file:
            file.write("".join(f"{line}\n" for line in self.lines).encode())


def open_tokenizer(path):
    """Open vocab.txt of BERT as WordPiece, or bpe_simple_vocab_16e6.txt of CLIP as BPE, also as a
    .gz file. Raises UserError for another file."""
    remedy = f". Give BERT's vocab.txt or CLIP's bpe_simple_vocab_16e6.txt.gz. {SAME_FILE}"
    kinds = OSError, EOFError, zlib.error, ValueError, KeyError
    with explained(kinds, f"{path} is no vocabulary that can be used", remedy):
        lines = read_vocabulary(path)
        return BPE(lines) if "#version" in lines[0] else WordPiece(lines)


def read_vocabulary(path):
    """The lines of a text file or of a .gz file."""
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        return file.read().rstrip("\n").split("\n")


class WordPiece(Tokenizer):
    """BERT's uncased tokenizer, which splits a word into tokens of the vocabulary.

    Accents and other marks are dropped, unless a token of the vocabulary has a mark. A vocabulary
    of train_wordpiece may have such tokens. A vocabulary with [MASK] is one of BERT, so that marks
    are always dropped.

    The first token is the longest token at the start of the word. Each later token is the longest
    token that continues the word. Tokens that continue a word begin with ##:

        "sunflowers" becomes sun, ##flower, ##s if these are the longest tokens that match

    A word becomes [UNK] if no token matches its next characters. "[SEP]" in a text is plain text,
    no special token.

    vocab: the path of a `vocab.txt`, one token per line, or a list of tokens. Raises ValueError if
    a special token is missing.
    """

    def __init__(self, vocab):
        vocab = vocab if isinstance(vocab, list) else read_vocabulary(vocab)
        self.vocab = self.lines = vocab
        self.ids = {token: i for i, token in enumerate(vocab)}
        if missing := [token for token in SPECIAL_TOKENS if token not in self.ids]:
            raise ValueError(f"it lacks {' '.join(missing)}")
        self.pad, self.unk, self.cls, self.sep = (self.ids[token] for token in SPECIAL_TOKENS)
        self.special = [i for i, token in enumerate(vocab) if re.fullmatch(r"\[\w+\]", token)]
        text = "".join(vocab)
        self.keeps_marks = "[MASK]" not in self.ids and clean_text(text) != clean_text(text, True)

    def split(self, text):
        return split_words(text, self.keeps_marks)

    def pieces(self, word):
        """A word -> list of the ids of its pieces."""
        if len(word) > MAX_WORD:
            return [self.unk]
        pieces, start = [], 0
        while start < len(word):
            mark = "##" if start else ""
            for end in range(len(word), start, -1):
                piece = mark + word[start:end]
                if piece in self.ids:
                    break
            else:  # no token continues the word here
                return [self.unk]
            pieces.append(self.ids[piece])
            start = end
        return pieces


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
# {byte: the character that represents the byte in CLIP's file}, in the order of the ids 0 to 255.
# The file is a text. So characters from 256 on represent the bytes without a printable character,
# such as a space or a part of an accented letter.
BYTE_SIGNS = dict(zip(PRINTABLE + OTHERS, map(chr, [*PRINTABLE, *range(256, 324)])))


class BPE(Tokenizer):
    """CLIP's byte-pair encoding. A word starts as its bytes. Then neighbours are merged, in the
    order of the lines of the file.

    lines: a comment, then one merge per line. A character, the "sign", represents a byte. </w>
    marks the end of a word. The word "cat" starts as c, a, t</w>:

        a t</w>      "cat" becomes c, at</w>      a new piece, with the next free id
        c at</w>     "cat" becomes cat</w>

    The ids are those of OpenCLIP with two exceptions. OpenCLIP uses `ftfy`, which repairs more
    damage in a text than `split`. OpenCLIP recognises special tokens in a text, which are plain
    text here.

    In `vocab`, "##" is appended to a piece that does not end its word ("c##"). No word is unknown,
    because every byte is a piece.
    """

    def __init__(self, lines):
        # CLIP uses only the first merges of its file. The vocabulary has one token per merge, two
        # for each of the 256 bytes, and two special tokens. The 1 counts the comment.
        self.lines = lines[: CLIP_TOKENS - 2 * 256 - 2 + 1]

        # ids 0 to 255: a byte inside a word; 256 to 511: the same byte at the end of a word
        signs = list(BYTE_SIGNS.values())
        signs += [sign + "</w>" for sign in signs]
        ids = {sign: i for i, sign in enumerate(signs)}
        spelled = [bytes([byte]) for byte in BYTE_SIGNS] * 2  # the bytes of each id

        # the ids of the merges follow, in the order of the lines
        self.byte_ids, self.merges = {byte: i for i, byte in enumerate(BYTE_SIGNS)}, {}
        for line in self.lines[1:]:
            a, b = line.split()
            pair, merged = (ids[a], ids[b]), len(spelled)
            self.merges[pair] = ids[a + b] = merged
            spelled.append(spelled[pair[0]] + spelled[pair[1]])

        if not any("</w>" in line for line in self.lines):
            raise ValueError("it has no </w>, which ends a word")

        # the text of each id, for pictures and tables
        self.vocab = [piece.decode(errors="backslashreplace") for piece in spelled]
        for piece, i in ids.items():
            self.vocab[i] += "" if piece.endswith("</w>") else "##"
        self.vocab += ["<start_of_text>", "<end_of_text>"]
        self.ids = {token: i for i, token in enumerate(self.vocab)}
        self.pad, self.unk, self.cls, self.sep = 0, -1, len(spelled), len(spelled) + 1
        self.special = [self.cls, self.sep]

    @staticmethod
    def split(text):
        """A text -> its words: runs of letters, single digits, runs of other characters.

        The endings 's, 't, 're, 've, 'm, 'll and 'd are words of their own, as in CLIP.
        """
        # captions of web pages have HTML escapes, some of them twice (&amp;quot;), and curly quotes
        text = html.unescape(html.unescape(text)).replace("\ufeff", "")
        text = " ".join(unicodedata.normalize("NFC", text).split()).lower()
        text = re.sub("[\u201c-\u201f]", '"', re.sub("[\u02bc\u2018-\u201b]", "'", text))

        # Python's `re` has no \p{L} and \p{N}. So the words are found in an ASCII copy of the text.
        # The copy has "a" for letters, "0" for numbers and "-" for all other characters outside
        # ASCII. Then the words are cut from the text.
        kinds = {"L": "a", "N": "0"}
        signs = [c if c.isascii() else kinds.get(unicodedata.category(c)[0], "-") for c in text]
        words = re.finditer("'(?:s|t|re|ve|m|ll|d)|[a-z]+|[0-9]|[^ a-z0-9]+", "".join(signs))
        return [text[word.start() : word.end()] for word in words]

    @functools.lru_cache(2**16)  # words repeat in captions; 65,536 words take about 20 MB
    def pieces(self, word):
        """A word -> tuple of the ids of its pieces.

        Each step merges the pair of neighbours whose line comes first in the file, until no pair of
        neighbours has a line.
        """
        *ids, last = [self.byte_ids[byte] for byte in word.encode("utf-8", "replace")]
        ids.append(last + 256)                               # the same byte with </w>
        while pairs := [pair for pair in itertools.pairwise(ids) if pair in self.merges]:
            best = min(pairs, key=self.merges.get)
            ids = merge_pair(ids, best, self.merges[best])
        return tuple(ids)  # callers could change a list in the cache


def train_wordpiece(captions, size):
    """Captions -> a vocabulary of `size` tokens: the special tokens, all characters, and merged
    pairs. All characters are kept, also if there are more than `size`. Marks are kept, see
    clean_text.

    Each step merges the most frequent pair of adjacent pieces into a new token. Among equally
    frequent pairs the alphabetically first is merged, so that the order of the captions does not
    matter. The steps end when every word is one token or the vocabulary is full.
    """
    counts = Counter(word for caption in captions for word in split_words(caption, True))
    words = {word: [word[0], *("##" + char for char in word[1:])]
             for word in counts if len(word) <= MAX_WORD}
    vocab = SPECIAL_TOKENS + sorted({piece for pieces in words.values() for piece in pieces})

    # Counting all pairs again after each merge would be slow. So a merge recounts only the words
    # that contain the pair, and a heap keeps the most frequent pair on top.
    pair_counts, words_with, changed, heap = Counter(), defaultdict(set), set(), []

    def add_pairs(word, n):
        for pair in itertools.pairwise(words[word]):
            pair_counts[pair] += n
            words_with[pair].add(word)
            changed.add(pair)

    for word in words:
        add_pairs(word, counts[word])
    while len(vocab) < size and (changed or heap):
        while changed:
            pair = changed.pop()
            heapq.heappush(heap, (-pair_counts[pair], pair))
        count, best = heapq.heappop(heap)
        # Skip an entry if the count of its pair has changed since the entry was made. A newer entry
        # has the right count, unless the pair has disappeared.
        if count == 0 or -count != pair_counts[best]:
            continue
        merged = best[0] + best[1].removeprefix("##")
        vocab.append(merged)
        for word in words_with.pop(best):
            add_pairs(word, -counts[word])
            words[word] = merge_pair(words[word], best, merged)
            add_pairs(word, counts[word])
    return vocab


def merge_pair(pieces, pair, merged):
    """The pieces of a word -> the pieces with each occurrence of the pair merged, from the left."""
    result = []
    for piece in pieces:
        if result and (result[-1], piece) == pair:
            result[-1] = merged
        else:
            result.append(piece)
    return result


# Images and views ---------------------------------------------------------------------
#
# The workers of a DataLoader decode and crop image by image, because files have different sizes.
# Stream.load calls open_image, then train_transform, Views, Augment or crop_boxes. All of these
# crop by random_crop. All crops of a view have the same size. So `distort` changes the colours of a
# whole batch of views, and blurs the batch, on the device of the model, which takes less time. The
# worker draws the random numbers of these changes. So the numbers depend only on the seed and on
# the position in the data.
#
# Images are uint8 or floats in [0, 1] everywhere. Only the encoder normalises them (Pixels). Crops
# stay uint8 until they are on the device of the model, because floats have four times as many
# bytes. Augment changes the colours of single images, and returns floats.

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff",
                  ".jpe", ".jfif", ".avif")
# {number of an orientation in EXIF: how to turn the image upright}
TURNS = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
         4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
         6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90}
BICUBIC = v2.InterpolationMode.BICUBIC


def to_unit(images):
    """uint8 images -> float32 in [0, 1]. Floats become float32 and keep their values."""
    return v2.functional.to_dtype(images, scale=True)


def random_crop(image, scale, generator=None):
    """A PIL image or (3, H, W) -> (top, left, height, width) of a random crop, in pixels.

    `scale` has the smallest and the largest area of the crop, as fractions of the area of the
    image. The aspect ratio is from 3/4 to 4/3, as in torchvision's RandomResizedCrop. If ten such
    crops do not fit into the image, the ratio is drawn around the ratio of the image, where every
    area fits. A square image is then taken whole.

    differs: torchvision then takes the largest crop of an allowed ratio from the middle. With areas
    from .9 to 1, all crops of a photo of 3:2 or 16:9 would be this one crop.

    generator: the source of random numbers; None for that of torch.
    """
    height, width = v2.functional.get_size(image)
    uniform = functools.partial(torch.empty(1).uniform_, generator=generator)
    for attempt in range(11):
        if attempt == 10 and height == width:
            return 0, 0, height, width
        area, low, high = uniform(*scale).item(), 3 / 4, 4 / 3
        if attempt == 10:  # a ratio near the image's, so that the crop fits into the image
            own = width / height
            low, high = own * max(low, area), own * min(high, 1 / area)
        ratio = math.exp(uniform(math.log(low), math.log(high)).item())
        h = max(1, round(math.sqrt(height * width * area / ratio)))
        w = max(1, round(math.sqrt(height * width * area * ratio)))
        if h <= height and w <= width:
            break
    top = torch.randint(height - h + 1, (1,), generator=generator).item()
    left = torch.randint(width - w + 1, (1,), generator=generator).item()
    return top, left, h, w


def crop_and_flip(image, size, scale, flip, generator=None):
    """A PIL image, or (3, H, W), uint8 or floats -> a crop (3, size, size) by random_crop, mirrored
    with probability `flip`."""
    if not torch.is_tensor(image):
        # The image becomes a tensor before the crop, because torch resizes a tensor three times as
        # fast as PIL resizes an image. On CPUs without AVX2, torch is half as fast as PIL. Pixels
        # differ from those of PIL by rounding, on average by .05 of 255.
        image = v2.functional.pil_to_tensor(image)
    crop = random_crop(image, scale, generator)
    image = v2.functional.resized_crop(image, *crop, [size, size], BICUBIC)
    return image.flip(2) if torch.rand((), generator=generator) < flip else image


def train_transform(size, min_scale=0.9, flip=0.0):
    """A transform, image -> (3, size, size), by crop_and_flip. The area of the crop is at least
    `min_scale` of the area of the image. With 1 the whole image is resized."""
    return functools.partial(crop_and_flip, size=size, scale=(min_scale, 1.0), flip=flip)


def eval_transform(size, resize=None):
    """A transform, PIL image -> uint8 (3, size, size): resize, then crop the centre.

    The shorter side is resized to `resize`, or to `size` if `resize` is None. PIL resizes, because
    the evaluations of OpenCLIP and DINO do the same, and pixels must be equal.
    """
    resize = v2.Resize(resize or size, BICUBIC)
    return v2.Compose([cut_thin, resize, v2.CenterCrop(size), v2.PILToTensor()])


def squeezed(image, size):
    """A PIL image -> uint8 (3, size, size), without a crop. So a place, in fractions of the sides,
    is the same in the file."""
    return v2.functional.pil_to_tensor(image.resize((size, size), Image.Resampling.BICUBIC))


def cut_thin(image):
    """A picture more than 8 times as long as wide -> its middle part, 4 times as long as wide.

    The crop that follows keeps a square. Without this cut, an image of 20,000 x 1 pixels would be
    resized to full length and need 6 GB.
    """
    short = min(image.size)
    if max(image.size) <= 8 * short:
        return image
    return v2.functional.center_crop(image, [min(side, 4 * short) for side in image.size[::-1]])


def to_bytes(image):
    """Images (3, H, W), uint8 or floats -> uint8. Bicubic resizing gives some values outside [0,
    1]. They are clamped, because RandAugment would turn such a white pixel into a black one."""
    if image.dtype == torch.uint8:
        return image
    return v2.functional.to_dtype(image.clamp(0, 1), torch.uint8, scale=True)


class Augment(v2.Compose):
    """Augmentation of labelled images as in DeiT (2012.12877, Table 9), whose code is timm's.

    An Augment is called with an image, of PIL or (3, H, W) in [0, 1], and returns floats
    (3, size, size). `mix` mixes the images of a batch, and their labels.

    differs: RandAugment is torchvision's. The magnitude (9 of 10) has no noise. Every drawn
    operation is applied, while timm applies half of them. There is no inversion and no SolarizeAdd.
    Posterize is weaker. Images are resampled bilinearly, not bicubically, and filled with black.
    Erased pixels become grey, while timm fills in noise.
    """

    def __init__(self, size, classes, min_scale, rand_augment, erasing, mixup, cutmix, flip=0.5):
        steps = [train_transform(size, min_scale, flip)]
        if rand_augment:
            bilinear = v2.InterpolationMode.BILINEAR
            # The magnitude is 27 of 30.
            steps += [to_bytes, v2.RandAugment(2, magnitude=27, interpolation=bilinear)]
        steps += [to_unit, v2.RandomErasing(erasing, value=PIXELS["clip"][0])]
        super().__init__(steps)
        kinds = (v2.MixUp, mixup), (v2.CutMix, cutmix)
        self.mixtures = [kind(alpha=alpha, num_classes=classes) for kind, alpha in kinds if alpha]

    def mix(self, images, labels):
        """Images (B, 3, S, S) and labels (B,) -> mixed images and shares of classes (B, C).

        Images and labels are returned unchanged if MixUp and CutMix are off.
        """
        return v2.RandomChoice(self.mixtures)(images, labels) if self.mixtures else (images, labels)


# Pillow warns of every damaged EXIF block, but reads such photos.
warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")


def open_image(file, min_side=None):
    """A path, bytes or a PIL image -> RGB PIL image.

    min_side: a large JPEG may be decoded at a half, a quarter or an eighth of its size, to save
    time, if each side keeps at least min_side pixels. PIL raises errors of any type for damaged
    files, so callers catch Exception.
    """
    if isinstance(file, Image.Image):
        return to_rgb(file)
    if isinstance(file, (bytes, bytearray, memoryview)):
        file = io.BytesIO(file)
    with Image.open(file) as image:
        if min_side:
            image.draft("RGB", (min_side, min_side))
        return to_rgb(image)


def to_rgb(image):
    """A PIL image of any mode -> RGB, as a viewer shows the image.

    differs: OpenCLIP, timm and torchvision ignore the orientation in EXIF, so that a portrait of a
    phone lies on its side. They also ignore transparency. The colour under transparent pixels is
    often black. Transparent pixels are white here, as in shards of img2dataset.
    """
    image.load()  # Pillow turns a TIFF while it decodes the file, and then drops the orientation
    orientation = 1
    with contextlib.suppress(Exception):  # EXIF may be damaged although the pixels are intact
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    if orientation in TURNS:
        image = image.transpose(TURNS[orientation])
    # For images of 16 bits, 32 bits or floats, convert() of PIL would cut all values at 255.
    if image.mode.startswith(("I", "F")):
        x = np.nan_to_num(np.asarray(image))
        if image.mode == "F" and x.max() <= 2:  # in these floats 1 is white
            x = 255 * x
        elif image.mode.startswith("I;16") or x.max() > 255:  # 65,535 is white
            x = x / 256
        image = Image.fromarray(x.clip(0, 255).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


@dataclasses.dataclass
class View:
    """The settings of one random view of an image (BYOL, 2006.07733, App. B; DINO, 2104.14294).

    The colours of a view are jittered with probability .8. A view becomes grey with probability .2.
    """

    size: int                # side of the crop in pixels, after resizing
    scale: tuple             # smallest and largest area of the crop / area of the image
    blur: float = 0.0        # probability of a Gaussian blur
    solarize: float = 0.0    # probability of solarisation, which inverts values above .5
    alpha: float = 1.0       # Beta(alpha, alpha) draws the centre of the crop in a box


def decoded_side(size, least):
    """The number of pixels that each side of a decoded image needs, so that each crop has at least
    `size` pixels.

    least: the smallest area of a crop / the area of the image. The smallest side of a crop of a
    square belongs to the aspect ratio 3/4.
    """
    return math.ceil(size / (0.75 * least) ** 0.5)


class Views:
    """Several random views of each image, for methods that compare views (BAM, DINO, SimCLR).

    A worker crops image by image, and draws all random numbers. `distort` changes the colours of
    the whole batch, on the device of the model.

    views: list of View. image_size: the side of the largest view. The width of the blur is
    proportional to image_size. flip: the probability that a view is mirrored, .5 in BYOL.
    """

    def __init__(self, views, image_size, flip=0.5):
        self.views, self.image_size, self.flip = views, image_size, flip
        self.betas = [torch.distributions.Beta(view.alpha, view.alpha) for view in views]
        # open_image must leave enough pixels for the smallest crop of every view
        self.min_side = max(decoded_side(view.size, view.scale[0]) for view in views)

    def __call__(self, image, box=None):
        """An image -> a list of random crops (3, size, size), one for each view.

        image: a PIL image or floats (3, H, W) in [0, 1]. Crops of a PIL image are uint8, and crops
        of floats are floats.

        box: (left, top, right, bottom), as fractions of the sides. The centres of the crops lie in
        this box, as far as the crops fit into the image (ContrastiveCrop, arXiv 2202.03278).
        """
        if not torch.is_tensor(image):
            image = v2.functional.pil_to_tensor(image)       # see crop_and_flip
        crops = []
        for view, beta in zip(self.views, self.betas):
            top, left, h, w = random_crop(image, view.scale)
            if box is not None:
                height, width = v2.functional.get_size(image)
                x, y = beta.sample((2,)).tolist()
                left = crop_start(box[0] * width, box[2] * width, w, width, x)
                top = crop_start(box[1] * height, box[3] * height, h, height, y)
            size = [view.size, view.size]
            crops.append(v2.functional.resized_crop(image, top, left, h, w, size, BICUBIC))
        return crops

    def draws(self, n):
        """The random numbers that `distort` needs for a batch of n images."""
        changed, colours, sigma = zip(*[self.draw(n, view) for view in self.views])
        # The five changes of a view share one tensor of row numbers, so that few tensors are copied
        # to the device. `counts` says where to split this tensor.
        return {"rows": [x.nonzero()[:, 1] for x in changed],  # (sum of counts,) for each view
                "counts": [x.sum(1).tolist() for x in changed],
                "colours": torch.stack(colours),             # (V, B, 11)
                "sigma": torch.stack(sigma)}                 # (V, B)

    def draw(self, n, view):
        """Draw the changes of a view of n images. Returns three tensors:

        (5, n) bool: whether an image is flipped, jittered, made grey, blurred, solarized
        (n, 11): the changes of colour for `jitter`
        (n,): the standard deviation of the blur in pixels
        """
        flipped, jittered = torch.rand(n) < self.flip, torch.rand(n) < 0.8
        colours = draw_colours(n, 0.4, 0.4, 0.2, 0.1)
        grey, blurred = torch.rand(n) < 0.2, torch.rand(n) < view.blur
        sigma = torch.zeros(n)
        sigma[blurred] = torch.empty(int(blurred.sum())).uniform_(0.1, 2) * self.image_size / 224
        solarized = torch.rand(n) < view.solarize
        return torch.stack([flipped, jittered, grey, blurred, solarized]), colours, sigma


def distort(batch):
    """Apply the changes that Views.draws has drawn, on the device of the crops.

    A batch without "draws" is returned unchanged. Rows are selected by their numbers, and constants
    are Python numbers, because the CPU would wait for the GPU to index with a mask or to copy a
    constant tensor.
    """
    if "draws" not in batch:
        return batch
    batch, views = dict(batch), []
    draws = batch.pop("draws")
    columns = draws["rows"], draws["counts"], draws["colours"], draws["sigma"]
    for x, rows, counts, colours, sigma in zip(batch["views"], *columns):
        flipped, jittered, grey, blurred, solarized = rows.split(counts)
        x = to_unit(x).clamp(0, 1)                       # bicubic resizing leaves [0, 1] a little
        x[flipped] = x[flipped].flip(3)
        x[jittered] = jitter(x[jittered], colours[jittered])
        x[grey] = luma(x[grey]).expand(-1, 3, -1, -1)
        x[blurred] = blur(x[blurred], sigma[blurred])
        x[solarized] = v2.functional.solarize(x[solarized], 0.5)
        views.append(x)
    return batch | {"views": views}


def crop_start(low, high, length, side, fraction):
    """The first pixel of a crop of `length` pixels, whose centre lies between low and high.

    side: the number of pixels of this side of the image. A crop that would leave the image is moved
    into the image. fraction: 0 gives the first possible pixel, 1 the last possible pixel.
    """
    first = min(max(low - length / 2, 0), side - length)
    last = min(max(high - length / 2, 0), side - length)
    return round(first + fraction * (last - first))


def luma(x):
    """(B, 3, H, W) -> grey values (B, 1, H, W), with the weights of ITU-R BT.601."""
    r, g, b = x.split(1, dim=1)
    return 0.299 * r + 0.587 * g + 0.114 * b


def draw_colours(n, brightness, contrast, saturation, hue):
    """Draw the changes of colour of n images, for `jitter` -> (n, 11).

    The 11 numbers are the factor of the brightness, the factor of the contrast, and a 3 x 3 matrix
    that maps colours. Factors are uniform in [1 - strength, 1 + strength]. The hue turns by at most
    `hue` of a circle.

    In YIQ, Y is the grey value, and I and Q span the colours. Saturation scales I and Q, and hue
    turns them. So all four changes together are one linear map around the mean grey value, and
    their order does not matter. v2.ColorJitter turns the hue in HSV, and clamps to [0, 1] after
    each step.
    """
    b, c, s = (torch.empty(n, 1, 1).uniform_(1 - strength, 1 + strength)
               for strength in (brightness, contrast, saturation))
    angle = torch.empty(n).uniform_(-2 * math.pi * hue, 2 * math.pi * hue)

    # RGB -> YIQ, scale and turn I and Q, YIQ -> RGB
    yiq = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213],
                        [0.2115, -0.5227, 0.3112]])
    turn = torch.zeros(n, 3, 3)
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 2, 1], turn[:, 1, 2] = angle.sin(), -angle.sin()
    turn[:, 1:] *= s                                     # the saturation
    colours = torch.linalg.inv(yiq) @ turn @ yiq * b     # (n, 3, 3)
    return torch.cat([x.flatten(1) for x in (b, c, c * colours)], 1)


def jitter(x, colours):
    """Change the colours of images (B, 3, H, W) in [0, 1]; colours: (B, 11) from draw_colours.

    differs: hues turn in YIQ. The jitter of torchvision, which BAM and DINO use, turns hues in HSV.
    """
    b, c, colours = colours[:, :, None].split([1, 1, 9], 1)       # (B, 1, 1), (B, 9, 1)
    grey = b * luma(x).mean((2, 3), keepdim=True)[:, 0]           # (B, 1, 1)
    # contrast: c * x + (1 - c) * grey; the matrix already has the factor c
    x = torch.baddbmm((1 - c) * grey, colours.view(-1, 3, 3), x.flatten(2)).view_as(x)
    return x.clamp(0, 1)


def blur(x, sigma):
    """Gaussian blur of (B, 3, s, s); sigma: (B,), the standard deviations in pixels.

    A Gaussian is separable: one matrix product blurs the columns, another the rows. With matrix
    products, images of a batch can have different sigmas. One convolution has one sigma.
    """
    i, sigma = torch.arange(x.shape[-1], device=x.device), sigma.view(-1, 1, 1, 1)
    kernel = (-(i[:, None] - i).square() / (2 * sigma.square())).exp()  # (B, 1, s, s)
    # at the edges, too, the weights of the pixels inside the image sum to 1
    kernel = kernel / kernel.sum(-1, keepdim=True)
    return kernel @ x @ kernel.transpose(2, 3)


# Data files ---------------------------------------------------------------------------
#
# --data names a source: a CaptionTable, TarShards or a World. Every source has
#   content                  the value that comes with an image: "caption", "label", "boxes" or None
#   classes                  the names of the labels, or None if the source does not know them
#   sample_captions(limit)   captions for the training of a vocabulary, from all parts of the data
#   each(content, limit)     yields (path or bytes, value) of every image, for an evaluation, and
#                            prints what it leaves out. With "caption" the value is a list. A World
#                            has no such member.
#   fingerprint              identifies the images and their order. A checkpoint holds the
#                            fingerprint, because its positions are wrong for other images.
#   annotations              a hash of the paths below the root, the captions, labels and boxes, or
#                            None if the fingerprint is enough. Ranks compare both values.
#
# CaptionTable and TarShards also have
#   samples(seed, part, parts, start)
#                            yields (Sample, position after the sample) without end. With
#                            "caption" the value is one text. The data are divided into `parts`
#                            disjoint parts, one for each worker of each rank. Only the samples of
#                            the part number `part` are read.
#   name                     the name of the source in messages
#   start                    the first position
#   len(source), unit        the number of "images" or "shards" that are divided into parts.
#                            open_source of eval.py reads labels, not captions, from "shards".
#   skipped                  {problem: [count, last example]} of the rows left out at the start
#   max_bad                  the number of unusable samples in a row after which a run ends
#
# A reader only turns a file of one format into rows. CaptionTable handles the paths, splits and
# captions of all formats. find_label looks up labels, with_image opens images. An opener raises
# UserError for a content that the format does not have. open_data sets `content`.
#
# Web data always have broken files. A broken sample is skipped, so that it does not end the run.
# Skipped samples are counted by their problem and reported.


EVERY = "every split"  # the split of the rows of a file without splits


class Sample(NamedTuple):
    """An image and its caption, label or boxes. A reader makes a Sample, and a batch joins many."""

    file: object               # a path, bytes of an image, an open shard, or a decoded image
    value: object = ""         # a caption, a list of captions, a label, or the files of a key
    name: str = ""             # the name of the sample in messages: a path, "shard:key"
    number: int | None = None  # row in a table, label of an image, or place of a key in a shard
    problem: str = ""          # why the sample is left out; problems are counted by this text
    split: object = EVERY      # split of a row; None or "": an empty cell, which is train


# errors of a network disk that often go away after seconds
PASSING = errno.EIO, errno.ESTALE, errno.ETIMEDOUT
DISK = "read that the disk failed four times"


def patiently(read, *arguments):
    """Return read(*arguments). If the disk fails, try again after 1, 5 and 25 seconds."""
    for seconds in (1, 5, 25):
        try:
            return read(*arguments)
        except OSError as error:
            if error.errno not in PASSING:
                raise
        time.sleep(seconds)
    return read(*arguments)


def problem_of(error, problem):
    """Why a sample is left out: DISK for an error of the disk, `problem` for another error."""
    return DISK if getattr(error, "errno", None) in PASSING else problem


class Disk:
    """Ends a run if the disk fails to read three samples or shards in a row. Each of them costs 31
    seconds."""

    failed = 0

    def check(self, sample):
        self.failed = self.failed + 1 if sample.problem == DISK else 0
        if self.failed == 3:
            raise DiskError(f"The disk failed to read three samples in a row, last {sample.name}.")


class ShardFile(io.FileIO):
    """A shard. If the disk fails during a read, the file is opened again and the read is
    repeated."""

    is_stale = False

    def readinto(self, buffer):
        return patiently(self.read_from, self.tell(), buffer)

    def read_from(self, place, buffer):
        if self.is_stale:
            super().__init__(self.name)
            self.seek(place)
        self.is_stale = True
        n = os.readv(self.fileno(), [buffer])
        self.is_stale = False
        return n


def left_out(problem, name):
    """A sample, or a whole shard, that cannot be used."""
    return Sample(None, name=name, problem=problem)


def with_image(sample, read, *arguments):
    """A sample with a file -> the sample with read(file, *arguments), or left_out."""
    try:
        return sample._replace(file=patiently(read, sample.file, *arguments))
    except UserError:  # wrong data, such as a map of unknown classes, end the run
        raise
    except FileNotFoundError as error:
        return left_out("image that does not exist", error.filename or sample.name)
    except Exception as error:  # PIL raises errors of any type for damaged files
        problem = problem_of(error, "unreadable image")
        return left_out(problem, f"{sample.name} ({type(error).__name__}: {error!s:.200})")


def count_problem(sample, counts):
    """Add a sample that is left out to `counts`, {problem: [count, last example]}."""
    n, _ = counts.get(sample.problem, [0, ""])
    counts[sample.problem] = [n + 1, sample.name]


def usable(samples, counts):
    """Yield the samples without a problem, and count the others."""
    disk = Disk()
    for sample in samples:
        disk.check(sample)
        if sample.problem:
            count_problem(sample, counts)
        else:
            yield sample


def total_skipped(parts):
    """Several {problem: [count, last example]} -> their sum."""
    total = {}
    for part in parts:
        for problem, (n, example) in part.items():
            total[problem] = [total.get(problem, [0])[0] + n, example]
    return total


def skipped_by(positions):
    """The "position" of batches, see Stream -> the samples that workers have skipped so far,
    {problem: [count, last example]}. Workers of a World skip nothing."""
    return total_skipped(counts for position in positions.values() for counts in position[2:])


def describe_skipped(counts):
    """{problem: [count, last example]} -> "2 x empty caption, the last a.csv, line 3; ..."."""
    return "; ".join(f"{n} x {problem}, the last {example}"
                     for problem, (n, example) in counts.items())


def clean_captions(value):
    """The captions of a row, a text or a list -> [text, ...]. A text without a visible character
    becomes "", for example a zero-width space. A value that is no text, such as null of JSON, also
    becomes ""."""
    captions = []
    for text in itertools.chain(*map(texts_of, value if isinstance(value, list) else [value])):
        # JSON may hold half of a character (a lone surrogate), which UTF-8 cannot encode. "?"
        # replaces the surrogate.
        text = text.strip().encode(errors="replace").decode() if isinstance(text, str) else ""
        captions.append(text if any(map(str.isprintable, text.replace(" ", ""))) else "")
    return captions or [""]


def texts_of(cell):
    """A cell of a table -> its texts. A cell with several texts is a list in JSON or Python, or a
    tuple."""
    is_list = str(cell)[:1] in ("[", "(") and not re.search(r"['\"]\s+['\"]", str(cell))  # numpy
    for read in (json.loads, ast.literal_eval) if is_list else ():
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(cell)
            if isinstance(found, (list, tuple)) and all(isinstance(x, str) for x in found):
                return [*found]
    return [cell]


class CaptionTable:
    """Image files with one or more captions each. Images of class folders also have labels.

    rows: the rows of a reader: Samples, or tuples (path, captions), the first fields of Sample.
    name: the name of the table in messages.
    root: the directory at which relative paths start, or "".
    content: what each image needs, see open_data. With None an empty caption is allowed.
    split: the split to keep, if the rows have splits.

    Rows with the same path are captions of one image. All ranks and workers together show each
    image once in an epoch. The next epoch shows the image with its next caption. Raises UserError
    if no row can be used.
    """

    max_bad, unit = 1000, "images"
    start = 0                 # a position is the number of samples so far
    classes = labels = None   # names of the class folders, and labels (n,) of the images

    def __init__(self, rows, name, root="", content="caption", split="train"):
        # "restval" is the part of COCO's val set that Karpathy adds to the training images
        kept, splits = {EVERY, split, "restval" if split == "train" else split}, set()
        self.content, self.name = content, name
        captions, labels, self.skipped = defaultdict(list), [], {}
        names, self.annotations, directory = 0, 0, str(Path(root or name))
        for row in usable(itertools.starmap(Sample, rows), self.skipped):
            # a row with an empty cell is train: an image must not be in two splits
            splits.add(of_row := ("" if row.split is None else str(row.split).strip()) or "train")
            if of_row not in kept:
                continue
            path = os.path.join(root, row.file)
            if "//" in path or "/./" in path or path.startswith("./"):  # Path() is slow
                path = str(Path(path))
            if row.number is not None and path not in captions:
                labels.append(row.number)
            below = path.removeprefix(directory).lstrip("/")
            last = "/".join(below.rsplit("/", 2)[-2:])  # many class folders have a 1.jpg
            for caption in clean_captions(row.value):
                if caption or content is None:
                    captions[path].append(caption)
                    names = zlib.crc32(last.encode(errors="replace"), names)
                    text = f"{below}\n{caption}\n{row.number}"
                    self.annotations = zlib.crc32(text.encode(errors="replace"), self.annotations)
                else:
                    count_problem(left_out("empty caption", path), self.skipped)
        if not captions:
            found = ", ".join(f":split={x}" for x in sorted(splits - {EVERY})[:9]) or "none"
            raise UserError(f"{name} has no image that can be used in the split {split} (splits: "
                            f"{found}; left out: {describe_skipped(self.skipped) or 'nothing'}).")

        # Paths and captions are in buffers of numpy, which forked workers share. To read a string
        # of a list would change its reference count, so that each worker would copy every page of
        # memory. Not all paths are UTF-8, so their bytes are stored as Latin-1.
        paths = [path.encode(errors="surrogatepass").decode("latin-1") for path in captions]
        self.paths = np.array(paths, np.dtypes.StringDType())
        texts = list(itertools.chain.from_iterable(captions.values()))
        self.captions = np.array(texts, np.dtypes.StringDType())
        # image i has the captions first[i] to first[i + 1] - 1
        self.first = np.cumsum([0, *map(len, captions.values())])
        self.labels = np.array(labels) if labels else None

        # computed from the last parts of paths, so that a run can resume if the data have moved
        self.fingerprint = f"{len(self)} images, {names}"

    def __len__(self):
        return len(self.first) - 1

    def path(self, i):
        """The path of image i."""
        return self.paths[i].encode("latin-1").decode(errors="surrogatepass")

    def value(self, i, content):
        """The label of image i, or the list of its captions."""
        start, end = self.first[i : i + 2]
        return int(self.labels[i]) if content == "label" else self.captions[start:end].tolist()

    def each(self, content, limit=None):
        """Yield (path, value) of every image, for an evaluation. limit: the number of images. A
        table gives its first images. Class folders give random images, because their first images
        belong to few classes."""
        rows = range(len(self))
        if self.labels is not None:
            rows = torch.randperm(len(self), generator=torch.Generator().manual_seed(0)).tolist()
        return ((self.path(i), self.value(i, content)) for i in rows[:limit])

    def only(self, rows):
        """A new table with these rows of a labelled table."""
        kept = [Sample(self.path(i), self.captions[i], number=self.labels[i]) for i in rows]
        table = CaptionTable(kept, self.name, content="label")
        table.classes, table.skipped = self.classes, self.skipped
        return table

    def samples(self, seed, part, parts, start=start):
        """See the head of this section. The order of an epoch depends only on (seed, epoch). So a
        resumed run starts at a position, and need not read the samples before."""
        size = len(range(part, len(self), parts))
        while True:
            epoch = start // size
            # all parts draw the same permutation; of `parts` images, each part takes another one
            order = np.random.default_rng((seed, epoch)).permutation(len(self))[part::parts]
            for i in order[start % size :].tolist():
                path, value, start = self.path(i), self.value(i, self.content), start + 1
                if isinstance(value, list):
                    # + i, because otherwise the first epoch would show only first captions
                    value = value[(epoch + i) % len(value)]
                yield Sample(path, value, path, i), start

    def sample_captions(self, limit):
        """See the head of this section. Captions are taken at equal distances, because the first
        captions of class folders name few classes."""
        if self.classes:
            class_names(self.classes)  # raises UserError for names such as n01440764
            if all(map(str.isdecimal, self.classes)):
                raise UserError(f"{self.name}: {self.captions[0]!r} teaches nothing: give class "
                                "folders with names, a table, or shards with captions.")
        size, n = len(self.captions), min(limit, len(self.captions))
        return [self.captions[i * size // n] for i in range(n)]


class TarShards:
    """Tar shards, as img2dataset writes them: `KEY.jpg` with `KEY.txt` (one caption per line), or
    with a label (see read_sample).

    pattern: DIR/{00000..00012}.tar, or DIR/*.tar if numbers are missing. "::" joins several
        patterns.
    on_ranks: see look_at_shards.

    Each epoch shuffles the shards and divides them among ranks and workers. A worker reads four
    shards in turn, each from start to end. The worker shuffles encoded samples in a buffer of 240
    MB, which holds 4,000 samples of 60 kB. A resumed worker reads at most the last 500 MB again.
    Samples that are unreadable, or that lack the caption or label that `content` needs, are skipped
    and counted.

    Raises UserError if a shard does not exist.
    """

    # max_bad is more than the samples of one shard, usually 10,000, so that one bad shard does not
    # end a run
    max_bad, together, unit = 20_000, 4, "shards"
    # A sample stays in the buffer until a random part of the next `span` bytes has been read. So
    # the buffer holds half of these bytes. `step`: the bytes between two places to resume from.
    span, step = 480_000_000, 16_000_000
    # A position is (epoch, number of the sample, where the sample leaves the buffer, a place). A
    # place to resume from is (bytes and samples read before it, the next shard to open, (shard,
    # offset) of each open shard).
    start = 0, -1, -1, (0, 0, 0, ())
    content, classes, annotations = "caption", None, None

    def __init__(self, pattern, on_ranks=False):
        self.name, self.skipped, self.paths = pattern, {}, []
        for name in itertools.chain(*map(expand_braces, pattern.split("::"))):
            self.paths += matching(name) or [name]
        looks = [*zip(self.paths, look_at_shards(self.paths, on_ranks))]
        missing = [f"{path} ({look})" for path, look in looks if isinstance(look, str)]
        if missing:
            raise UserError(f"{len(missing)} of the {len(self.paths)} shards are missing, first "
                            f"{missing[0]}: name some that exist. DIR/*.tar names all of a folder.")
        # computed without directories, so that a run can resume if the data have moved
        names = [(os.path.basename(path), *look) for path, look in looks]
        self.fingerprint = f"{len(self.paths)} shards, {zlib.crc32(repr(names).encode())}"

    def __len__(self):
        return len(self.paths)

    def samples(self, seed, part, parts, start=start):
        """See the head of this section. The buffer is a heap, ordered by the bytes after which
        samples leave the buffer. After at most `span` more bytes a sample has left the buffer."""
        epoch, number, leaves, place = start
        while True:
            delivered, places, held = (leaves, number), deque([place]), []
            read, n, *opened = place
            draw = random.Random(mix_seed(seed, epoch, part, n))
            order = np.random.default_rng((seed, epoch)).permutation(len(self.paths))[part::parts]
            for samples, *opened in self.read_in_turn(order, *opened):
                for sample in samples:
                    # samples that are left out pass through the buffer at once
                    leaves = read if sample.problem else read + draw.randrange(self.span)
                    if self.content == "caption" and not sample.problem:
                        # The caption changes from epoch to epoch, as in CaptionTable. A sample of a
                        # tar has no number, so its offset in the tar takes the place of a number.
                        turn = (epoch + sample.number // tarfile.BLOCKSIZE) % len(sample.value)
                        sample = sample._replace(value=sample.value[turn])
                    if (leaves, n) > delivered:
                        heapq.heappush(held, (leaves, n, sample))
                    n += 1
                    if not sample.problem:
                        read += len(sample.file) + 1000  # Python's objects need about 1,000 bytes
                if not samples:  # the epoch ends
                    read = math.inf
                elif read >= places[-1][0] + self.step:
                    places.append((read, n, *opened))
                    draw = random.Random(mix_seed(seed, epoch, part, n))
                while held and held[0][0] <= read:
                    leaves, number, sample = heapq.heappop(held)
                    while len(places) > 1 and places[1][0] <= leaves - self.span:
                        places.popleft()
                    yield sample, (epoch, number, leaves, places[0])
            epoch, (_, number, leaves, place) = epoch + 1, self.start

    def read_in_turn(self, order, following, opened):
        """Yield the samples of each key of the shards `order`, the next shard to open, and (shard,
        offset) of each open shard. Reading can continue from these two. Four shards are open, and
        give their keys in turn. An empty list ends the epoch."""
        shards = deque((i, start, read_keys(self.paths[order[i]], start)) for i, start in opened)
        while shards or following < len(order):
            if len(shards) < self.together and following < len(order):
                shards.append((following, 0, read_keys(self.paths[order[following]])))
                following += 1
                continue
            i, _, keys = shards.popleft()
            samples, end = next(keys, ([], None))
            if end is not None:
                shards.append((i, end, keys))
            if samples:
                samples = [read_sample(sample, self.content, self.classes) for sample in samples]
                yield samples, following, tuple((i, start) for i, start, _ in shards)
        yield [], following, ()

    def each(self, content, limit=None):
        """Yield (bytes, label or [captions]) of every image, in order, for an evaluation.

        content: "label" or "caption". With None the second item is "shard:key". limit: the number
        of samples, which are drawn at random. Every call draws the same samples. At the end the
        samples that were left out are printed. Raises UserError if no image has a label or a
        caption, or if a label is not among the classes, because the metrics would be wrong.
        """
        sample, counts = None, {}
        for sample in usable(read_tars(self.paths, content, limit, self.classes), counts):
            if BAD_LABEL in counts:
                break
            yield sample.file, sample.value if content else sample.name
        if sample is None or BAD_LABEL in counts:
            missing = "wrong labels" if BAD_LABEL in counts else "no image that can be used"
            raise UserError(f"{self.name} has {missing} (left out: {describe_skipped(counts)}).")
        if counts:
            print(f"left out of {self.name}: {describe_skipped(counts)}")

    def sample_captions(self, limit):
        """See the head of this section. Each shard gives its first captions."""
        captions, counts, n = [], {}, min(limit, len(self.paths))
        for i in range(n):
            wanted = math.ceil((limit - len(captions)) / (n - i))
            samples = read_tars([self.paths[i * len(self.paths) // n]], "caption")
            samples = usable(itertools.islice(samples, wanted + self.max_bad // n), counts)
            texts = itertools.chain.from_iterable(sample.value for sample in samples)
            captions += itertools.islice(texts, wanted)
        if not captions:
            raise UserError(f"{self.name} has no captions (left out: {describe_skipped(counts)}).")
        return captions


def expand_braces(pattern):
    """`a/{000..012}.tar` -> the 13 paths. Two ranges in a pattern give all combinations."""
    braces = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not braces:
        return [pattern]
    first, last = sorted(map(int, braces.groups()))
    paths = []
    for i in range(first, last + 1):
        paths += expand_braces(pattern.replace(braces[0], str(i).zfill(len(braces[1])), 1))
    return paths


def matching(pattern):
    """The paths that fit a pattern with *, ? or [ ], in natural order. A name without these
    characters is returned unchanged. A path that exists is no pattern, even with brackets in its
    name."""
    if not re.search(r"[*?[]", pattern) or look_at(pattern):
        return [pattern]
    directory, name = os.path.split(pattern)
    places = [place for place in matching(directory) if look_at(place or ".") == "directory"]
    paths = []
    for place in places:
        names = fnmatch.filter([entry.name for entry in list_directory(place or ".")], name)
        paths += [os.path.join(place, found) for found in sorted(names, key=natural)]
    return paths


def look_at_shards(paths, on_ranks):
    """For each shard, its size in bytes and the CRC of its first header, or a text that says why
    the shard cannot be read. The size alone does not identify a shard, because sizes are rounded to
    10,240 bytes. The first header has the name, the size and the time of the first file.

    on_ranks: whether all ranks call this function. Then one rank of each machine looks, and tells
    the others: a look at a network disk takes milliseconds, and large data have 40,000 shards.
    """
    def look(path):
        try:
            with open(path, "rb", 0) as file:
                return os.fstat(file.fileno()).st_size, zlib.crc32(file.read(tarfile.BLOCKSIZE))
        except OSError as error:
            return error.strerror

    number = local_rank()[0] if on_ranks else 0
    with ThreadPool(min(64, len(paths))) as pool:
        looks = pool.map(look, paths if number == 0 else ())
    return gather_objects(looks)[this_rank()[0] - number] if on_ranks else looks


KEY = re.compile(r"(.*/)?[^/.]*")  # the path of a file up to the first dot in its name
BAD_SHARD = "unreadable, truncated or compressed shard"
NO_IMAGE = "no image of a known ending (the files of a key must be neighbours in the tar)"
BAD_LABEL = "label above those of the classes (perhaps labels are numbered from 1)"
NO_CAPTION = "no .txt (the files of a key must be neighbours in the tar)"
UNUSED = "image that no sample uses (a second image of its key, or a key with a dot)"

READ = 2**20  # bytes of one read from a shard, because each read from a network's disk takes time


def read_tars(paths, content, limit=None, classes=None):
    """Yield the sample of each key of the shards, in order. One shard is open at a time.

    limit: the number of keys, which are drawn at random and come in random order. Every call draws
    the same keys.
    """
    samples, draw = (sample for path in paths for found, _ in read_keys(path)
                     for sample in found), random.Random(0)
    if limit:
        # the `limit` keys with the smallest random numbers; nsmallest does not hold all keys
        keys = heapq.nsmallest(limit, (key._replace(value=None) for key in samples),
                               key=lambda key: draw.random())
        samples = (key if key.problem else next(read_keys(key.file, key.number, 2**16))[0][0]
                   for key in keys)
    for sample in samples:
        yield read_sample(sample, content, classes)


def read_files(file, start):
    """Yield (header, content) of each file of an open tar, in order, from an offset on. The file
    may hold several tars, for example after `cat a.tar b.tar > both.tar`.

    Raises an error of any type if the tar is damaged or cut off.
    """
    ends = False
    file.seek(start)
    while block := file.read(tarfile.BLOCKSIZE):
        # blocks of zeros end a tar, and may fill the space before the next tar
        ends = not block.strip(b"\0")
        if ends:
            start += len(block)
            continue
        file.seek(start)
        tar = tarfile.open(fileobj=file, mode="r:")
        while member := tar.next():
            tar.members = []  # tarfile would keep all headers
            if member.isfile():
                file.seek(member.offset_data)
                content = file.read(member.size)
                if len(content) < member.size:
                    raise EOFError("it is cut off")
                yield member, content
        if tar.offset == start:
            raise tarfile.ReadError("a header is damaged")
        start = file.seek(tar.offset)
    # A file without blocks of zeros was cut off, but tarfile accepts such a file.
    if not ends:
        raise tarfile.ReadError("its end is missing")


def read_keys(path, start=0, buffering=READ):
    """Yield ([Sample, ...], offset of the next key) for each key of a shard, from an offset on. The
    first Sample has the value {suffix: content}. Its number is the offset of its first header. Each
    further Sample reports an image of the key that no sample uses. After the last key the offset is
    None.

    A key is the name of a file up to the first dot. The files of a key are neighbours in the tar,
    as img2dataset writes them. A second file with the same key and suffix starts another sample, as
    in OpenCLIP. The file v1.0.jpg has the key "v1" and the suffix ".0.jpg". No image has this
    suffix, so the file is left out.
    """
    key, problem, kind = None, "it holds no files", BAD_SHARD
    try:
        with io.BufferedReader(patiently(ShardFile, path), buffering) as file:
            for member, data in read_files(file, start):
                name = KEY.match(member.name)[0]
                where, suffix = f"{path}:{name}", member.name[len(name):].lower()
                if suffix.startswith("._"):  # macOS stores attributes in a second file, ._NAME
                    continue
                if not key or key.name != where or suffix in key.value:
                    if key:
                        yield with_unused(key), member.offset
                    key, problem = Sample(path, {}, where, member.offset), ""
                key.value[suffix] = data
    except Exception as error:  # tarfile raises errors of any type for damaged files
        problem, kind = error, problem_of(error, BAD_SHARD)
    last = with_unused(key) if key else []
    if problem:
        last.append(left_out(kind, f"{path} ({problem})"))
    yield last, None


def with_unused(key):
    """A Sample of a key -> a list with the Sample, and with a left_out for each image that the
    Sample does not use. If the key has images but none can be used, the list has no Sample."""
    used = image_suffix(key.value)
    images = [suffix for suffix in key.value if suffix.endswith(IMAGE_SUFFIXES)]
    unused = [left_out(UNUSED, key.name + suffix) for suffix in images if suffix != used]
    return [key, *unused] if used or not images else unused


def image_suffix(places):
    """The suffix of the image of a key, or None if the key has no image."""
    return next((suffix for suffix in IMAGE_SUFFIXES if suffix in places), None)


def read_sample(key, content, classes=None):
    """A Sample of read_keys -> the Sample with the bytes of the image, and with its captions or its
    label.

    content: "caption" reads KEY.txt, one caption per line. "label" reads KEY.cls, or "label" in
    KEY.json. The label is a number from 0, or the name of a class. None reads only the image.
    """
    if key.problem:
        return key
    image, value, problem = image_suffix(key.value), None, ""
    if image is None:
        return left_out(NO_IMAGE, key.name)
    if content == "caption":
        value, problem = find_captions(key.value.get(".txt"))
    elif content == "label":
        value, problem = find_label(key.value, classes or ())
    return key._replace(file=key.value[image], value=value, problem=problem)


def find_label(files, classes):
    """The files of a key -> (number of the label, ""), or (None, problem). The label is the number
    or the name of a class. Without names of classes every number is accepted."""
    text = files.get(".cls", b"").decode("utf-8-sig", "replace").strip()
    if not text:
        with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
            text = str(json.loads(files[".json"])["label"])
    label = int(text) if re.fullmatch("[0-9]{1,9}", text) else None
    if label is None and text in classes:
        label = classes.index(text)
    if label is not None and classes and label >= len(classes):
        return None, BAD_LABEL
    return label, "no label" if label is None else ""


def find_captions(text):
    """The bytes of KEY.txt, or None -> ([caption, ...], problem). The problem is "" for captions
    that can be used."""
    if text is None:
        return [], NO_CAPTION
    if b"\0" not in text:  # a text in UTF-16 has zeros
        with contextlib.suppress(UnicodeError):
            lines = text.decode("utf-8-sig").split("\n")
            captions = [caption for caption in clean_captions(lines) if caption]
            return captions, "" if captions else "empty caption"
    return [], "caption that is not UTF-8"


TABLES = ".csv", ".tsv", ".txt"  # the endings of files for read_table
BROKEN_ROW = "broken row (perhaps a comma outside quotes)"


def read_header(file):
    """The first line of an open CSV or TSV file -> its delimiter and the names of its columns."""
    first = file.readline()
    # Excel writes semicolons in many languages
    delimiter = "\t" if "\t" in first else max(",;|", key=first.count)
    return delimiter, [*map(str.strip, next(csv.reader([first], delimiter=delimiter), []))]


def find_columns(path, columns, image, caption):
    """The columns of a table -> the names of the two columns with the images and the captions.

    image, caption: these names, if they are given. With "" the columns are filepath and title, as
    in OpenCLIP, or image and caption, as in Flickr. Raises UserError if a column is missing, or if
    two columns may be meant.
    """
    images = [image] if image else [name for name in ("filepath", "image") if name in columns]
    texts = [caption] if caption else [name for name in ("title", "caption") if name in columns]
    if len(images) != 1 or len(texts) != 1 or not {*images, *texts} <= {*columns}:
        raise UserError(f"{path} has the columns {columns}: give {path}:image=COLUMN,caption=COLUMN"
                        ", or call one column image and one caption.")
    return images[0], texts[0]


def read_table(path, image, caption):
    """Yield a Sample or left_out for each row of a CSV or TSV file with a header. A column `split`
    holds the splits of the rows. A cell in quotes may have line breaks, as pandas writes them.

    image, caption: see find_columns. Raises UserError if an open quote joins rows. Such a quote
    never ends, or its cell has a line with as many fields as the header, one of them with the
    ending of an image.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        delimiter, columns = read_header(file)
        i, j = map(columns.index, find_columns(path, columns, image, caption))
        k = next((k for k, name in enumerate(columns) if name.lower() == "split"), None)
        seen = []  # the lines of a row
        rows = csv.reader((seen.append(line) or line for line in file), delimiter=delimiter)
        try:
            for cells in rows:
                if len(seen) > 1:  # a cell with several lines needs a closing quote
                    next(csv.reader(seen, delimiter=delimiter, strict=True))
                    lines = [line for cell in cells if "\n" in cell for line in cell.split("\n")]
                    for parts in csv.reader(lines, delimiter=delimiter):
                        if len(parts) == len(columns) and any(map(is_image, parts)):
                            raise csv.Error("it joins rows")
                seen.clear()
                if len(cells) == len(columns) and cells[i]:
                    yield Sample(cells[i], cells[j], split=EVERY if k is None else cells[k])
                elif cells:  # an empty line is no row
                    yield left_out(BROKEN_ROW, f"{path}, line {rows.line_num + 1}")
        except csv.Error as error:  # csv also raises it for a cell of more than 131,072 characters
            where = f"{path} has an open quote in a row that ends in line {rows.line_num + 1}"
            raise UserError(f"{where} ({error}): close the quote, or write it twice.") from None


def read_token_file(path):
    """Yield (path, caption) for each line `x.jpg#0<TAB>caption` of Flickr's `.token` file."""
    for line in Path(path).read_text(encoding="utf-8-sig").split("\n"):
        if line.strip():
            name, _, caption = line.partition("\t")
            yield name.rpartition("#")[0] or name, caption


def read_json(path, image, caption):
    """Yield a row or left_out for each caption of a JSON file of COCO or of Karpathy, or for each
    row of a list such as [{"image": "a.jpg", "caption": "a dog"}]. Karpathy's rows have splits.
    A .jsonl file has a row of such a list on each line. The first row names the columns, see
    find_columns. Raises UserError for another file."""
    text = Path(path).read_text(encoding="utf-8-sig")
    with explained((ValueError, KeyError, TypeError, AttributeError, IndexError),
                   f"{path} is neither COCO captions, Karpathy's JSON nor a list of rows",
                   " (a row on each line needs the ending .jsonl)"):
        if path.lower().endswith(".jsonl"):
            data = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            data = json.loads(text)
        if isinstance(data, list):
            image, caption = find_columns(path, [*data[0]], image, caption)
            unnamed = "" if any("split" in row for row in data) else EVERY
            for number, row in enumerate(data, 1):
                if row.get(image):
                    yield Sample(str(row[image]), row.get(caption), split=row.get("split", unnamed))
                else:
                    yield left_out("row without an image", f"{path}, row {number}")
            return
        if "annotations" in data:  # COCO
            images = by_id(path, "images", data["images"])
            for annotation in data["annotations"]:
                number = annotation["image_id"]
                if number in images:
                    yield str(images[number]["file_name"]), annotation["caption"]
                else:
                    yield left_out("caption without image", f"{path}, image_id {number}")
            return

        for image in data["images"]:  # Karpathy
            name = os.path.join(image.get("filepath", ""), image["filename"])
            for sentence in image["sentences"]:
                yield Sample(name, sentence["raw"], split=image["split"])


def by_id(path, part, rows):
    """The rows of a part of COCO's JSON -> {id: row}. Raises UserError if two different rows have
    the same id, because annotations would be joined to the wrong row."""
    found = {}
    for row in rows:
        if found.setdefault(row["id"], row) != row:
            raise UserError(f"{path} has two {part} with the id {row['id']!r}: make ids unique.")
    return found


class Format(NamedTuple):
    """A row of formats()."""

    endings: list    # endings of the file name
    open: object     # (name, content, image_root, split, **settings) -> source
    settings: dict   # {setting of the SPEC: its default}
    form: str        # form of the SPEC, for --help and errors


def formats(on_ranks=False, image_size=48):
    """The formats of --data. The arguments are those of open_data.

    To add a format that lists image files, write a reader, which yields rows, see CaptionTable. Add
    a row with functools.partial(open_table, reader). If the files contain the images, write a class
    such as TarShards, and add a row. The head of "Data files" lists the members of the class.
    """
    columns = {"image": "", "caption": ""}
    world = dataclasses.asdict(World()) | {"size": image_size}
    return [
        Format(["shapes"], lambda name, content, root, split, **settings: World(**settings),
               world, "shapes[:SETTING=VALUE,...]"),
        Format(TABLES, functools.partial(open_table, read_table), columns,
               "FILE.csv, .tsv or .txt[:image=COLUMN,caption=COLUMN,split=NAME]"),
        Format([".tar"], lambda name, *_: TarShards(name, on_ranks), {},
               "'DIR/{00000..00012}.tar' or 'DIR/*.tar', several of them joined by '::'"),
        Format([".json", ".jsonl"], functools.partial(open_table, read_json), columns,
               "FILE.json of COCO or Karpathy[:split=NAME], FILE.json or .jsonl of rows"),
        Format([".token"], functools.partial(open_table, read_token_file), {},
               "FILE.token of Flickr, or Flickr8k.token.txt"),
        Format(["/"], open_directory, {},
               "DIR of class folders, or of any images for BAM and DINO")]


def file_holds(name, field, size=-1):
    """Whether a JSON file has a field of this name in its first `size` bytes; -1: in all bytes."""
    if not name.lower().endswith((".json", ".jsonl")) or look_at(name) != "file":
        return False
    with open(name, "rb") as file:
        return b'"%s"' % field.encode() in file.read(size)


def has_splits(spec):
    """Whether a SPEC is a table with a column `split`, or a JSON file of Karpathy."""
    name = parse_spec(spec)[0]
    if not name.lower().endswith(TABLES) or look_at(name) != "file":
        return file_holds(name, "split") and not file_holds(name, "annotations")
    reading = explained((OSError, UnicodeError), f"Cannot read {name}")
    with reading, open(name, newline="", encoding="utf-8-sig") as file:
        return "split" in map(str.lower, read_header(file)[1])


def open_data(spec, image_root=None, split="train", image_size=48, content="caption",
              on_ranks=False):
    """Open the data to train on: a SPEC of one of the formats() -> a source.

    The source is a World, a CaptionTable or TarShards.

    image_root: the directory at which relative paths in a table start; None for the directory of
        the table.
    split: the split to read. "train" includes restval of Karpathy. image_size: the side of the
        pictures of a World in pixels. Settings of the SPEC override `split` and `image_size`.
    content: what each image needs. "caption". "label", which class folders, shards and a World
        have. "boxes", which a World and a BoxTable have. None: only the image, so that shards need
        no captions and directories no class folders.
    on_ranks: whether all ranks open these data, so that they can share the work.

    Raises UserError if the data do not exist or do not fit. (eval.open_eval_set opens the data of
    an evaluation.)
    """
    name, settings = parse_spec(spec)
    is_directory = name != "shapes" and look_at(name) == "directory"
    plain = name.lower().replace(".token.txt", ".token")  # Flickr8k.token.txt
    ending = "/" if is_directory else Path(plain).suffix or name
    kind = next((row for row in formats(on_ranks, image_size) if ending in row.endings), None)
    if kind is None:
        problem = "is a file of an unknown format" if look_at(name) else "does not exist"
        forms = "; ".join(row.form for row in formats())
        raise UserError(f"{name} {problem}. Give one of: {forms}.")
    if content == "boxes" and name != "shapes":
        cast_settings(settings, {}, name)  # raises UserError, as a file of boxes has no settings
        return BoxTable(name, image_root, split)
    if "split" in settings and has_splits(spec):
        split = settings.pop("split")
    settings = kind.settings | cast_settings(settings, kind.settings, name)
    source = kind.open(name, content, image_root, split, **settings)
    source.content = content
    return source


def open_table(read, name, content, image_root, split, **settings):
    """Open a file of captions -> CaptionTable. read(name, **settings) yields the rows.

    Raises UserError if the file cannot be read, or is not UTF-8.
    """
    if content == "label":
        raise UserError(f"{name} has no labels: give class folders, shards or shapes.")
    with explained((OSError, UnicodeError), f"Cannot read {name}"):
        root = image_root or Path(name).parent
        return CaptionTable(read(name, **settings), name, root, content, split)


def open_directory(directory, content, *_):
    """DIR/class folder/image.jpg -> CaptionTable with labels and captions "a photo of a NAME.".

    Label i belongs to the i-th of the sorted class folders. If content is None, DIR may also be a
    folder of images without labels, at any depth. Raises UserError if the folders are no classes.
    """
    entries = list_directory(directory)
    classes = sorted(entry.name for entry in entries if is_directory(entry))
    if all(map(str.isdecimal, classes)):
        classes.sort(key=int)  # 2 comes before 10, so that the label of a folder is its number
    files = sorted(entry.path for entry in entries if not is_directory(entry))
    if content is None and (not classes or any(map(is_image, files))):
        return CaptionTable(rows_of_images(directory, "an image"), directory)
    parts = [name for name in classes if PART.fullmatch(name.lower())]
    # beside other folders, train is a class
    if parts and (parts != ["train"] or classes == parts) or content and len(classes) < 2:
        found = ", ".join([*(parts or classes), *map(os.path.basename, files)][:9]) or "nothing"
        raise UserError(f"{directory} holds {found}, no classes: give the directory of two or more "
                        "class folders, a table of captions, or shards by 'DIR/*.tar'.")

    rows = [left_out("file next to the class folders", path) for path in files]
    rows += rows_of_classes(directory, classes)
    table = CaptionTable(rows, directory)
    table.classes = classes
    empty = [classes[label] for label in {*range(len(classes))}.difference(table.labels.tolist())]
    if content and empty:
        raise UserError(f"{len(empty)} class folders of {directory} have no images that you may "
                        f"read, such as {empty[0]}: add images, or remove these folders.")
    texts = {x.name[:-4] for x in rows if x.name.endswith(".txt")}
    captioned = [x.file for x in rows if not x.problem and os.path.splitext(x.file)[0] in texts]
    if content and len(captioned) > len(table) / 2:
        raise UserError(f"{directory} has a caption beside each image, such as {captioned[0]}: "
                        "write the captions into a table or into tar shards.")
    return table


def rows_of_classes(directory, classes):
    """Yield a row for each file of the class folders. The number of a row is the label."""
    names = classes
    with contextlib.suppress(UserError):  # sample_captions raises this error if captions are needed
        names, _ = class_names(classes)
    for label, (folder, name) in enumerate(zip(classes, names)):
        caption = FOLDER_CAPTION.format(a=article(name))
        yield from rows_of_images(os.path.join(directory, folder), caption, label)


def rows_of_images(folder, caption, label=None):
    """Yield a row for each file of a folder, at any depth."""
    for path in list_files(folder):
        if is_image(path):
            yield Sample(path, caption, number=label)
        else:
            yield left_out("file without an image's ending", path)


# the names of parts of a data set, such as train, val2017
PART = re.compile(r"((train|test)(ing)?|val(id|idation)?|dev)([-_]?(\d+|[ab]|set|data)|[-_]im\w+)?")
FOLDER_CAPTION = "a photo of {a}."  # {a}: the name of the class with its article
# the first letters of the names of files that systems and editors create
HIDDEN = (".", "__MACOSX", "@eaDir")


def look_at(path):
    """"file", "directory", or "" if nothing is at the path. Raises UserError if the disk fails,
    while os.path.exists would return False."""
    try:
        mode = patiently(os.stat, path).st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            raise UserError(f"Cannot look at {path}: {error.strerror}.") from None
        return ""
    return "directory" if stat.S_ISDIR(mode) else "file"


def natural(name):
    """A key for sorting. Numbers in names are compared as numbers: 2.tar comes before 10.tar."""
    return [(int(part), part) if part.isdecimal() else (0, part)
            for part in re.split(r"(\d+)", name)]


def list_directory(directory):
    """The entries of a directory in any order, without hidden ones. Raises UserError if the
    directory cannot be listed."""
    with explained(OSError, f"Cannot read {directory}"):
        return [entry for entry in os.scandir(directory) if not entry.name.startswith(HIDDEN)]


def is_directory(entry):
    """Whether an entry of list_directory is a directory. Most file systems give this answer with
    the entry, so that a folder of a million images needs no look at each file."""
    return look_at(entry.path) == "directory" if entry.is_symlink() else entry.is_dir()


def list_files(directory, seen=()):
    """The sorted paths of all files of a directory, at any depth. Links are followed.

    seen: the directories that were already read, because a link can lead back to one of them.
    Raises UserError if a directory cannot be listed.
    """
    seen, paths, here = seen or set(), [], os.path.realpath(directory)
    if here not in seen:
        seen.add(here)
        for entry in list_directory(directory):
            paths += list_files(entry.path, seen) if is_directory(entry) else [entry.path]
    return sorted(paths)


def is_image(name):
    return name.lower().endswith(IMAGE_SUFFIXES)


def article(phrase):
    """"apple" -> "an apple", "car" -> "a car"."""
    word = "an" if phrase.lower().startswith(tuple("aeiou")) else "a"
    return f"{word} {phrase}"


def class_names(folders, file=None):
    """The sorted names of class folders -> (the names of the classes, the source of the names).

        the file (--classes) holds               class i is called
        ---------------------------------------  -----------------------------------
        the folders' names, in any order,        like folder i, as the line writes it
        among others
        NUMBER NAME for each folder NUMBER,      NAME (ImageNet's LOC_synset_mapping.txt)
        among others
        one name for each folder                 line i
        no file: 1,000 numbers of ImageNet       as in torchvision
        no file: names                           like folder i

    Numbers before a name, as in "n02085620-Chihuahua" and "001.Sooty_Albatross", are dropped, and
    "_" becomes a space. Raises UserError if the file does not fit. Also raises UserError if a class
    has a number of ImageNet instead of a name, because a text encoder does not know these numbers.
    """
    names, source, plain = folders, "folders", [*map(plain_name, folders)]
    if file:
        names, source = read_lines(file, "--classes"), str(file)
        named = [name for name in names if plain_name(name) in plain]
        names = named if len(named) == len(folders) else names
        if len(names) != len(folders):
            raise UserError(f"{file} has {len(names)} names for {len(folders)} classes: name each.")
        if places := match_names(names, folders):
            names = [names[places.index(i)] for i in range(len(folders))]
        # A file in another order than the folders would name the classes wrongly.
        for folder, name in zip(plain, map(plain_name, names)):
            if name != folder and name in plain:
                raise UserError(f"{file} gives the class {folder} the name of another, {name}: "
                                "keep the order of the classes, or write the classes' own names.")
    elif len(folders) == 1000 and all(re.fullmatch(r"n\d{8}", folder) for folder in folders):
        # differs: CLIP and CLIP_benchmark have other names, which --classes can give
        names, source = ResNet50_Weights.IMAGENET1K_V1.meta["categories"], "torchvision"
    names = [re.sub(r"^(n\d{8}\W+(\d+\W+)?|\d{3}\.\W*)", "", x.replace("_", " ")) for x in names]
    if numbers := [name for name in names if re.fullmatch(r"n\d{8}", name)]:
        raise UserError(f"The class folder {numbers[0]} has a number of ImageNet instead of a "
                        "name: rename the folder. eval.py also takes names by --classes FILE.")
    return names, source


def match_names(names, known):
    """The place of each of the names in `known`, or None if the two lists have different names. All
    functions that match class names call this function.

    Equal lists match place by place. In other lists, a name that both lists have matches itself,
    and the other names match by their plain_name. A name that occurs twice matches only in equal
    lists.
    """
    if list(names) == list(known):
        return list(range(len(known)))
    both = set(names) & set(known)
    # the tuple keeps a plain name different from a name that both lists have
    keys, known_keys = ([name if name in both else (plain_name(name),) for name in part]
                        for part in (names, known))
    places = {key: i for i, key in enumerate(known_keys)}
    if Counter(keys) != Counter(known_keys) or len(places) < len(known):
        return None
    return [places[key] for key in keys]


def plain_name(name):
    """The name of a class in lower case, with spaces in place of "_", without the number of folders
    such as n02085620-Chihuahua and 001.Albatross. The name of a line of ImageNet's
    LOC_synset_mapping.txt, such as "n01440764 tench", is its number. A tab or a comma may take the
    place of the space."""
    name = unicodedata.normalize("NFC", name).replace("_", " ").lower()
    return re.sub(r"^(?:n\d{8}-|\d{3}\.\W*|(n\d{8})[\s,].*)", r"\1", name)


def label_rows(names, labels, fraction):
    """The sorted row numbers of the labelled images that --label-fraction keeps.

    names: the names of the images, None for an image without a name. labels: the labels of the
    images.
    fraction: a number in (0, 1], or a file. The number is the fraction of each class to keep. Each
    class keeps at least one image. Every call keeps the same images if their names differ. The file
    lists images, one per line: NAME, or a path that ends in FOLDER/NAME. BAM uses such lists of
    SimCLR, with 1 % and 10 % of ImageNet (Table 4).

    Raises UserError if a line of the file does not name exactly one image.
    """
    if re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", fraction):
        share, rows, labels = float(fraction), [], np.asarray(labels)
        if not 0 < share <= 1:
            raise UserError(f"--label-fraction {fraction} must be above 0 and at most 1.")
        generator = np.random.default_rng(0)
        for label in np.unique(labels):
            of_class = sorted(np.flatnonzero(labels == label), key=lambda i: str(names[i]))
            rows += generator.permutation(of_class)[: max(1, round(share * len(of_class)))].tolist()
        return sorted(rows)
    # the folder of a line tells files of equal names apart
    lines = read_list(fraction, "--label-fraction (number or file)")
    wanted = {"/".join(Path(line).parts[-2:]) for line in lines}
    ends = lambda path: {"/".join(path.parts[-n:]) for n in (1, 2)}  # NAME and FOLDER/NAME
    rows = [i for i, name in enumerate(names) if wanted & ends(Path(name or ""))]
    missing = len(wanted.difference(*(ends(Path(names[i])) for i in rows)))
    if missing or len(rows) > len(wanted):
        raise UserError(f"--label-fraction {fraction} lists {len(wanted)} names. The data lack "
                        f"{missing} of them, and have {len(rows)} images with these names: each "
                        "name must be that of one image.")
    return rows


def read_text(path, flag):
    """The text of a file that `flag` names. Raises UserError if the file cannot be read."""
    with explained((OSError, UnicodeDecodeError), f"{flag} {path} cannot be read"):
        return Path(path).read_text(encoding="utf-8-sig")


def read_lines(path, flag):
    """The lines of a text file without spaces around them. Empty lines are kept, because the number
    of a line can be a label. Empty lines at the end are dropped."""
    return [line.strip() for line in read_text(path, flag).rstrip().splitlines()]


def read_list(path, flag):
    """The names in a text file, one a line: each name once, without empty lines. Raises UserError
    if the file lists no name."""
    names = [name for name in dict.fromkeys(read_lines(path, flag)) if name]
    if not names:
        raise UserError(f"{flag} {path} is empty: write one name a line.")
    return names


# Streams and seeds --------------------------------------------------------------------
#
# A resumed run gets the batches that the uninterrupted run would have got, because
#   - each worker reads a fixed part of the data and counts how far it has read,
#   - each message of a worker, a part of a batch, has the position of the worker,
#   - a checkpoint holds the latest position of every worker,
#   - random numbers depend only on the seed and the position, not on earlier random numbers.


def this_worker(positions):
    """-> (the number of the worker that this process continues, the number of workers).

    positions: {worker: (messages delivered, ...)}. A DataLoader takes one message from each of its
    processes in turn, beginning with process 0. In a resumed run, the next message must come from
    the worker that has delivered the fewest messages. So process 0 continues this worker, and
    process 1 continues the next worker.
    """
    info = get_worker_info()
    if info is None:
        return 0, 1
    delivered = [positions.get(worker, (0,))[0] for worker in range(info.num_workers)]
    first = delivered.index(min(delivered))
    return (first + info.id) % info.num_workers, info.num_workers


class Stream(IterableDataset):
    """Endless parts of batches of one rank, reproducible from (seed, rank, worker, position).

    A worker sends at most `part` samples in a message, because messages take shared memory. `join`
    makes a batch of `parts` messages.

    source: CaptionTable or TarShards.
    tokenizer: None if the model does not read captions. context: the largest number of tokens.
    transform: a function of an image, Augment or Views. min_side: see open_image. Views have a
        min_side of their own.
    batch_size: the number of samples of this rank. positions: the latest positions of all workers,
        to continue a run.
    boxes: None, or (n, 4), the box of each image of a CaptionTable, for Views. A row of NaN means
        that the image has no box.

    A batch and a part of a batch are dicts:
        "images"             (B, 3, S, S), uint8 or floats in [0, 1]
        "views"              with Views, instead of "images": [(B, 3, size, size) for each view]
        "draws"              the result of Views.draws; not in a part
        "tokens", "mask"     (B, L), with a tokenizer
        "captions"           the B captions as they were written, with a tokenizer
        "labels"             (B,), or shares of classes (B, C) if Augment mixes
        "samples"            (B,), a number that identifies each sample
        "position"           {worker: (messages, position in the source, {problem: [count, last
                             example]} of the samples skipped so far)}

    Raises UserError if the data have fewer images or shards than there are workers, or if too many
    samples in a row cannot be used.
    """

    part = 64  # 64 images of 224 x 224 are 10 MB

    def __init__(self, source, tokenizer, transform, min_side, context, batch_size, seed,
                 rank=0, world_size=1, positions=None, boxes=None):
        self.source, self.tokenizer, self.transform = source, tokenizer, transform
        self.context, self.batch_size, self.boxes = context, batch_size, boxes
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.positions, self.min_side = positions or {}, min_side
        self.parts = max(1, math.ceil(batch_size / self.part))
        if isinstance(transform, Views):
            self.min_side = transform.min_side

    def __iter__(self):
        worker, workers = this_worker(self.positions)
        part, parts = self.rank * workers + worker, self.world_size * workers
        if len(self.source) < parts:
            raise UserError(f"{self.source.name} has {len(self.source)} {self.source.unit}, fewer "
                            f"than ranks x workers = {parts}: use fewer ranks or --workers.")
        # one worker alone counts the rows that were left out when the source was opened
        skipped = self.source.skipped if part == 0 else {}
        start = 0, self.source.start, skipped
        sent, position, skipped = self.positions.get(worker, start)
        skipped, bad_in_a_row, samples, disk = dict(skipped), 0, [], Disk()
        for sample, position in self.source.samples(self.seed, part, parts, position):
            # if the position is a tuple, its first two numbers belong to the sample
            numbers = position[:2] if isinstance(position, tuple) else (position,)
            with fixed_seed(self.seed, part, *numbers):
                sample = self.load(sample)
            disk.check(sample)
            if sample.problem:
                count_problem(sample, skipped)
                bad_in_a_row += 1
                if bad_in_a_row >= self.source.max_bad:
                    raise UserError(f"{self.source.name}: {bad_in_a_row:,} samples in a row could "
                                    f"not be used; the last: {sample.problem}, {sample.name}. "
                                    "Repair the data, or give --image-root.")
                continue

            bad_in_a_row = 0
            samples.append(sample)
            # Workers send in turn. Some parts of a batch may have one sample more than others.
            # These parts rotate from batch to batch, so that all workers send equally many samples.
            number = sent * workers + worker
            place = (number + number // self.parts) % self.parts
            if len(samples) == (self.batch_size + place) // self.parts:
                sent += 1
                after = sent, position, dict(skipped)
                yield self.collate(samples) | {"position": {worker: after}}
                samples = []

    def load(self, sample):
        """Decode and augment the image of a sample -> the sample with the image or its crops."""
        def read(file):
            image = open_image(file, self.min_side)
            if self.source.content == "boxes":
                check_sides(image, sample.value.size)
            return image

        found = sample if sample.problem else with_image(sample, read)
        if found.problem:
            return found
        if self.source.content == "boxes":
            image, truth = self.transform(found.file, sample.value)
            return sample._replace(file=image, value=truth)
        box = [math.nan] if self.boxes is None else self.boxes[sample.number].tolist()
        known = [] if math.isnan(box[0]) else [box]
        return sample._replace(file=self.transform(found.file, *known))

    def collate(self, samples):
        """Loaded samples -> a part of a batch without "position"."""
        images, values, names, numbers, *_ = zip(*samples)
        if isinstance(self.transform, Views):
            part = {"views": [torch.stack(column) for column in zip(*images)]}
        else:
            part = {"images": torch.stack(images)}
        if self.source.content == "boxes":
            part["truths"] = pickle.dumps(values)  # many small tensors are slow to send
        elif self.tokenizer:
            part["tokens"], part["mask"] = self.tokenizer.batch(values, self.context)
            part["captions"] = list(values)
        if self.source.content == "label":
            part["labels"] = torch.tensor(values)
        if any(names):  # samples of a World have no names
            part["samples"] = torch.tensor([*map(identity, names, numbers)])
        return part

    def join(self, parts, number):
        """The parts of a batch of this rank -> the batch. The number of the batch is the seed of
        the random numbers for the whole batch. The 0 and 1 keep this seed different from the seeds
        of samples."""
        with fixed_seed(self.seed, self.rank, number, 0, 1):
            return self.complete(parts)

    def complete(self, parts):
        """The parts of a batch -> the batch, with random numbers for the whole batch."""
        batch = {name: self.joined(name, [part[name] for part in parts]) for name in parts[0]}
        if isinstance(self.transform, Views):
            batch["draws"] = self.transform.draws(len(batch["views"][0]))
        if isinstance(self.transform, Augment):
            batch["images"], batch["labels"] = self.transform.mix(batch["images"], batch["labels"])
        if self.source.content == "boxes":
            truths = batch.pop("truths")
            batch |= box_batch(truths, self.source, self.tokenizer, self.context)
        return batch

    def joined(self, name, values):
        """Join the values that the parts of a batch have under one name."""
        if name == "position":  # the position in the last part of a worker is valid
            return {worker: x for value in values for worker, x in value.items()}
        if name == "captions":
            return [caption for value in values for caption in value]
        if name == "truths":
            return [truth for value in values for truth in pickle.loads(value)]
        if name == "views":
            return [torch.cat(column) for column in zip(*values)]
        if name in ("tokens", "mask"):  # parts have different lengths
            longest, pad = max(x.shape[1] for x in values), self.tokenizer.pad * (name == "tokens")
            values = [F.pad(x, (0, longest - x.shape[1]), value=pad) for x in values]
        return torch.cat(values)


def identity(*names):
    """Names -> a number of 63 bits that other names do not have."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:8], "big") >> 1


class WorldStream(Stream):
    """A Stream of a World, whose images are drawn, not read. A message is a whole batch.

    A batch depends on (seed, rank, worker, number of the batch). transform: None, Augment or Views.
    min_side and boxes have no effect. If the source has labels, each scene has one object, and the
    object's shape is the label.
    """

    part = math.inf

    def __iter__(self):
        worker, _ = this_worker(self.positions)
        for batches in itertools.count(self.positions.get(worker, (0,))[0]):
            seed = mix_seed(self.seed, self.rank, worker, batches)
            objects = 1 if self.source.content == "label" else None
            sample = self.source.sample(self.batch_size, "train", seed, objects)
            images, values = sample["images"], sample["captions"]
            if self.source.content == "label":
                values = sample["scene"]["shape"][:, 0].tolist()
            if self.source.content == "boxes":
                values = world_boxes(sample)
            with fixed_seed(seed):
                if self.transform:
                    images = [self.transform(image) for image in images]
                batch = self.complete([self.collate(map(Sample, images, values))])
            yield batch | {"position": {worker: (batches + 1,)}}

    def join(self, parts, number):
        return parts[0]


@contextlib.contextmanager
def fixed_seed(*numbers):
    """A context in which torch's CPU random numbers depend on `numbers` only.

    After the context, the random numbers continue as if the context had drawn none.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(mix_seed(*numbers))
        yield


def mix_seed(*numbers):
    """Integers from 0 to 2^32 - 1 -> one seed below 2^63. Zeros at the end make no difference.

    The sum of the integers would be a bad seed, because seed 1 of rank 0 would equal seed 0 of rank
    1.
    """
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


# Command line -------------------------------------------------------------------------
#
# Each field of a dataclass of settings is a flag. The comment of the field is the help of the flag.


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Does not wrap the description and the end of --help, and shows the defaults of flags."""


class Parser(argparse.ArgumentParser):
    """A parser that returns the flags that are given, and no defaults."""

    def __init__(self, **more):
        super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS,
                         formatter_class=HelpFormatter, **more)

    def error(self, message):
        """Raise UserError, which one rank of each machine prints."""
        raise UserError(f"{message}: see --help.")


@functools.cache  # cached, because inspect searches the whole file for a class
def comments_of(config_class):
    """{field of a dataclass: the comment behind it, or the comment lines above it}."""
    pattern = r"^((?:    # .*\n)*)    (\w+): [^#\n]*(?:# (.*))?$"
    sources = "".join(inspect.getsource(c) for c in config_class.__mro__[:-1])
    found = re.findall(pattern, sources, re.MULTILINE)
    joined = lambda lines: re.sub(r"\s+#?\s*", " ", lines).strip()
    return {name: behind or joined(above) for above, name, behind in found}


def check_numbers(settings, comments, name_of=flag_of):
    """Raise UserError for a number of `settings`, {name: value}, that is not finite, is negative,
    or breaks a bound in its comment, such as "> 0" and "<= 1". comments: see comments_of."""
    holds = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
    numbers = {name: x for name, x in settings.items() if isinstance(x, (int, float))}
    for name, value in numbers.items():
        if not math.isfinite(value) or value < 0:
            raise UserError(f"{name_of(name)} {value} must be finite and not negative.")
        for sign, bound in re.findall(r"([<>]=?) (\S*\d)", comments.get(name, "")):
            if not holds[sign](value, float(bound)):
                raise UserError(f"{name_of(name)} {value} must be {sign} {bound}.")


def add_flags(parser, config_class, groups, title):
    """Add a flag for each field of a dataclass. The help of a flag is the comment of the field.
    groups: {first field of a group: title of the group}."""
    comments, group = comments_of(config_class), None
    for field in dataclasses.fields(config_class):
        if group is None or field.name in groups:
            group = parser.add_argument_group(groups.get(field.name, title))
        kind = field.type
        if type(None) in get_args(kind):  # kind | None
            kind = get_args(kind)[0]
        if get_origin(kind) is Literal:
            options = {"choices": get_args(kind)}
        elif field.name == "resume":  # alone, or --resume auto
            options = {"nargs": "?", "const": True, "choices": ["auto"]}
        elif kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif get_origin(kind) is list:  # list[str]
            options = {"nargs": "+", "action": "extend", "metavar": "STR"}
        elif kind is list:
            read = functools.partial(read_lines, flag=flag_of(field.name))
            options = {"type": read, "metavar": "FILE"}
        else:
            options = {"type": kind, "metavar": kind.__name__.upper()}
        options["help"] = comments[field.name].replace("%", "%%")
        group.add_argument(flag_of(field.name), **options)


# Schedules ----------------------------------------------------------------------------
#
# train.set_schedules calls these functions of the step. They have no state, so a resumed run has
# nothing to restore.


def cosine(step, steps, start, end):
    """Half a cosine from `start` at step 0 to `end` at `steps`."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * step / max(1, steps)))


def cosine_lr(step, steps, warmup, peak):
    """Linear warm-up to `peak` over `warmup` steps, then half a cosine to 0 at `steps`.

    Step 0 has peak / warmup, as in OpenCLIP, and step warmup - 1 has the peak.

    differs: the schedules of the authors of BAM and DINO begin at 0 (utils.py:190, 191). The peak
    is at the same step.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    return cosine(step - warmup, steps - warmup, peak, 0.0)


def linear_lr(step, steps, warmup, peak):
    """Linear warm-up to `peak` over `warmup` steps, then a line to 0 at `steps`."""
    if step < warmup:
        return peak * ((step + 1) / warmup)
    return peak * ((steps - step) / max(1, steps - warmup))


# Parameter groups and files of a run --------------------------------------------------
#
# A run may be killed at any moment, also while it writes. So a file is written under a temporary
# name and then renamed. To rename replaces the old file in one step.


def param_groups(model, weight_decay):
    """Two groups of parameters for an optimizer. The weights of linear and convolution layers have
    weight decay. All other parameters (biases, norms, embeddings, positions) have none.

    differs: in OpenCLIP all matrices have weight decay (training/main.py:310). In the published
    LAMB all tensors have weight decay.
    """
    linear = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    matrices = {id(module.weight) for module in linear}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = [parameter for parameter in trained if id(parameter) in matrices]
    rest = [parameter for parameter in trained if id(parameter) not in matrices]
    return [{"params": decay, "weight_decay": weight_decay, "decays": True},
            {"params": rest, "weight_decay": 0.0, "decays": False}]


def without_nan(record):
    """A record with None in place of NaN and infinity, because JSON has no such numbers."""
    return {name: x if not isinstance(x, float) or math.isfinite(x) else None
            for name, x in record.items()}


def writing(path):
    """A context that turns an OSError, such as a full disk, into a UserError with the path."""
    return explained(OSError, f"{path} cannot be written")


@contextlib.contextmanager
def replacing(path):
    """A context with a binary file to write to. The file has a temporary name with the number of
    this process. At the end the file is renamed to `path`.

    If the process is killed, `path` is the old file or the complete new file. After an error `path`
    is the old file.
    """
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        with writing(path), open(temporary, "wb") as file:
            yield file
            # The content must be on the disk before the name. Otherwise a power failure could leave
            # an empty file under the name of a checkpoint.
            file.flush()
            os.fsync(file.fileno())
            patiently(os.replace, temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_file(path, content):
    """Write a record (.json), a picture (.png), or tensors in dicts and lists."""
    # torch.save raises RuntimeError if the disk is full
    full = explained(RuntimeError, f"{path} cannot be written", " (is the disk full?)")
    with replacing(path) as file, full:
        if path.suffix == ".json":
            file.write(json.dumps(content, indent=2).encode() + b"\n")
        elif path.suffix == ".png":
            content.save(file, "PNG")
        else:
            torch.save(content, file)


@contextlib.contextmanager
def locked(directory):
    """A context that only one process at a time can enter, to replace files of the directory. Some
    disks (NFS) have no such locks. There two processes that write at the same time may lose a line
    of evals.jsonl or a temporary file."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            opened = os.open(directory, os.O_RDONLY)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


@functools.cache
def revision():
    """The git revision of this code, or None."""
    # run by a shell, because a shell raises no error if git is missing
    found = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(__file__).parent,
                           capture_output=True, text=True)
    return found.stdout.strip() or None


# remedy for a run that has lost its config.json or vocab.txt
SAME_FILE = "If a run has lost this file, give its first command another --out and copy that file"


def checkpoints(run):
    """The names of a run's checkpoints, the newest first."""
    names = os.listdir(run) if os.path.isdir(run) and os.access(run, os.R_OK) else []
    names = [name for name in names if re.fullmatch(r"(last|step-\d+|stage-\d+)\.pt", name)]
    return sorted(names, key=lambda name: os.path.getmtime(Path(run, name)), reverse=True)


def read_config(run):
    """The directory of a run -> the settings in its config.json, a dict. Raises UserError if the
    file is missing or broken."""
    path = Path(run, "config.json")
    remedy = f". Give a run's directory, such as runs/sparc. {SAME_FILE}"
    with explained((OSError, ValueError, TypeError), f"{path} cannot be read", remedy):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def restore_model(model, weights, path, remedy):
    """Load weights, {name: tensor}, into a model. Raises UserError with the remedy if a tensor is
    missing, unexpected, of another shape, not finite or no float. path: the file, for the message.
    """
    # Older checkpoints have no constants of pixels. The model then keeps its constants.
    constants = {name: x for name, x in model.state_dict().items() if "pixels." in name}
    try:
        model.load_state_dict(constants | weights)
    except RuntimeError as error:
        # torch lists all differences; only the first three are shown
        lines = [textwrap.shorten(line, 150) for line in str(error).splitlines()[1:4]]
        raise UserError(f"{path} holds a model of another size or kind ({' '.join(lines)}): "
                        f"{remedy}.") from None
    for name, x in model.state_dict().items():
        theirs = weights.get(name, x)  # torch would copy integers into floats without an error
        if x.is_floating_point() > theirs.is_floating_point() or not x.isfinite().all():
            raise UserError(f"{path}: {name} is NaN, infinite or no float: give another file.")


def load_checkpoint(path, map_location="cpu"):
    """Read a checkpoint. Raises UserError if `path` cannot be read.

    A pickle can execute any code when it is read. So weights_only=True refuses all values but
    tensors and plain values. torch raises errors of any type for damaged files. torch.load does not
    check checksums. One rank of each machine checks them, which takes about a second for a GB.
    """
    # checkpoints of DINO have their settings in a Namespace, which is harmless
    safe, path = torch.serialization.safe_globals([argparse.Namespace]), Path(path)
    others = [name for name in checkpoints(path.parent) if name != path.name]
    remedy = "begin a new run" if path.name == "last.pt" and look_at(path) else "give another file"
    remedy = f"give --checkpoint {others[0]}" if others else remedy
    with safe, explained(Exception, f"{path} cannot be read", f". Remedy: {remedy}"):
        if local_rank()[0] == 0 and zipfile.is_zipfile(path):
            if damaged := zipfile.ZipFile(path).testzip():
                raise ValueError(f"its part {damaged} is damaged")
        with contextlib.suppress(pickle.UnpicklingError):  # torch advises weights_only=False
            return torch.load(path, map_location=map_location, weights_only=True)
        raise ValueError("it holds more than tensors and plain values, or is no file of torch.save")


# Distributed --------------------------------------------------------------------------
#
# A rank is one process of `torchrun`, usually with one GPU. Each rank encodes its part of the
# global batch. A contrastive loss compares all pairs of the global batch, so the ranks exchange
# encodings.
#
# N ranks must give the gradients of one process on the global batch. Each method file has a
# function `gather` for its losses. The backward pass of `gather` sums the gradients from the losses
# of all ranks. DDP then averages over ranks. So the result is the gradient of the mean loss.


def init_distributed():
    """Join the process group of `torchrun`, if there is one. Returns the device of this rank.

    Raises UserError if a cluster has started several tasks without torchrun, because each task
    would train separately.
    """
    # variables with the number of tasks, of srun, of Open MPI, of MPICH and of other launchers
    names = "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"
    tasks = max(int(os.environ.get(name, 1)) for name in names)
    if tasks > 1 and "RANK" not in os.environ:
        raise UserError(f"{tasks} tasks were started without torchrun and would train separately: "
                        "start `srun --ntasks-per-node=1 torchrun ... FILE.py ...`.")
    cuda, device = torch.cuda.is_available(), torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        timeout = datetime.timedelta(minutes=30)  # other ranks wait while rank 0 saves and draws
        # Ranks that torchrun has restarted get the store of the ranks that died. They would use the
        # old addresses in the store. A prefix hides the old addresses.
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout, store=store,
                                rank=rank, world_size=world_size,
                                device_id=device if cuda else None)
    return device


def local_rank():
    """(rank, number of ranks) among the ranks of this machine; (0, 1) without torchrun."""
    return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def cores_of_rank():
    """The number of cores of the machine that this rank can use."""
    if sys.platform == "darwin":  # macOS cannot bind a process to some of the cores
        return os.cpu_count()
    return len(os.sched_getaffinity(0)) // local_rank()[1]


def this_rank():
    """(rank, world_size)"""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def wait_for_rank_0():
    """Let the other ranks wait, for at most a day, until rank 0 also calls this function.

    The other ranks must wait while rank 0 draws at the end. If all ranks of a machine ended, their
    torchrun would leave after 5 minutes, and rank 0 would fail. The ranks wait at the store,
    because the process group waits only 30 minutes.
    """
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            store.set("rank 0 is ready", "")
        store.wait(["rank 0 is ready"], datetime.timedelta(days=1))


@contextlib.contextmanager
def rank_0_prints():
    """A context in which the other ranks print nothing."""
    with contextlib.redirect_stdout(sys.stdout if this_rank()[0] == 0 else io.StringIO()):
        yield


def let_rank_0_speak():
    """Let only the first rank of each machine print an error, because ranks often fail with the
    same message. The other ranks wait until torchrun ends them."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # SIGTERM then ends the process
        time.sleep(10)


class SumOverRanks(torch.autograd.Function):
    """x of each rank -> the sum over all ranks. The backward pass sums the gradients of all ranks.
    DDP averages them later. dist.all_reduce of torch has no gradient."""

    @staticmethod
    def forward(ctx, x):
        # all_reduce would change x, which autograd may still need
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.forward(ctx, gradient)


def gather_objects(value):
    """A picklable value on each rank -> the list of all values, in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_ranks(facts):
    """Raise UserError on all ranks if a fact, {name: value}, differs between ranks.

    Ranks exchange only gradients. So ranks with different settings, data or vocabularies would
    train wrongly, and no error would be raised.
    """
    first, *others = gather_objects(facts)
    for rank, other in enumerate(others, 1):
        for name, value in other.items():
            if value != first.get(name):
                raise UserError(f"Rank {rank} has {name} {value}, rank 0 has {first.get(name)}: "
                                "start all ranks with the same flags, files and --out.")


@contextlib.contextmanager
def without_tf32():
    """A context in which GPUs compute fp32 operations in fp32. TF32 keeps 10 bits of the mantissa,
    fp32 keeps 23. torch uses TF32 for convolutions by default. NVIDIA's containers also use TF32
    for matrix products."""
    with contextlib.ExitStack() as stack:
        for backend in (torch.backends.cudnn, torch.backends.cuda.matmul):
            stack.callback(setattr, backend, "allow_tf32", backend.allow_tf32)
            backend.allow_tf32 = False
        yield


# Weights of others --------------------------------------------------------------------
#
# Loading translates the names of tensors and interpolates positions. A file with a missing or an
# unexpected tensor is refused, because its network is another one, and results would be wrong
# without an error. Only heads, which are no part of an encoder, may be left over.

CLIP_NAMES = [  # (OpenCLIP's and OpenAI's name, ours)
    ("transformer.resblocks.", "blocks."), (".in_proj_", ".qkv."), (".out_proj.", ".proj."),
    (".ln_1.", ".norm1."), (".ln_2.", ".norm2."), (".c_fc.", ".fc1."), (".c_proj.", ".fc2."),
    ("conv1.", "patch_embed."), ("class_embedding", "cls"), ("positional_embedding", "pos"),
    ("token_embedding.", "embedding."), ("ln_pre.", "norm_pre."), ("ln_post.", "norm."),
    ("ln_final.", "norm.")]
# CLIP's tensors outside the encoders
CLIP_PARTS = ("visual.proj", "text_projection", "logit_scale")
OPENAI_ONLY = ("input_resolution", "context_length", "vocab_size")  # tensors that are no weights
TIMM_NAMES = [  # (name in VisionTransformer of timm, our name), if they differ
    ("cls_token", "cls"), ("pos_embed", "pos"), ("patch_embed.proj.", "patch_embed.")]


def load_clip(encoders, state_dict, tokenizer):
    """Load a CLIP, as OpenCLIP or OpenAI saved it, into the encoders (image, text).

    Returns the tensors that are not in the encoders, {name: tensor}, for load_clip_parts. Raises
    UserError if the file holds another network, or if the tokenizer has another vocabulary than the
    text encoder of the file.
    """
    # names of the text encoder begin with "text." in CustomTextCLIP of OpenCLIP
    state = {key.removeprefix("text."): x for key, x in unwrapped(state_dict).items()}
    parts = {key: x for key, x in state.items() if key in CLIP_PARTS}
    rest = {key: x for key, x in state.items() if key not in CLIP_PARTS + OPENAI_ONLY}
    image = {key.removeprefix("visual."): x for key, x in rest.items() if "visual." in key}
    text = {key: x for key, x in rest.items() if "visual." not in key}
    if encoders[1].vocab_size == CLIP_TOKENS and tokenizer.encode("")[-1] != CLIP_TOKENS - 1:
        raise UserError("the file needs CLIP's tokens: give --vocab bpe_simple_vocab_16e6.txt.gz.")

    # The shapes do not show with which GELU a model was trained.
    modules = [*encoders[0].modules(), *encoders[1].modules()]
    if OPENAI_ONLY[0] in state and any(isinstance(module, nn.GELU) for module in modules):
        raise UserError("OpenAI's weights need QuickGELU: add :quick_gelu=1 to both encoders.")
    preset = "the preset clip-... of the file's model"
    parts |= load_encoder(encoders[0], image, CLIP_NAMES, "give a file with OpenCLIP's or OpenAI's "
                          f"names, and as --image-encoder {preset}")
    parts |= load_encoder(encoders[1], text, CLIP_NAMES,
                          f"give --text-encoder {preset} and --vocab its words")
    return parts


def unwrapped(state):
    """The content of a checkpoint -> {name: tensor} of its weights.

    Training loops save weights under a key, beside other values. DDP puts "module." before the
    names, torch.compile puts "_orig_mod.", and Lightning puts the name of a module. Raises
    UserError if there are no weights.
    """
    if isinstance(state, dict):
        # Averages of weights come first, as in timm. "state_dict_ema": timm; "model_ema": DeiT;
        # "state_dict": OpenCLIP, timm, Lightning; "model": DeiT, BAM; "teacher": DINO
        for key in ("state_dict_ema", "model_ema", "state_dict", "model", "teacher"):
            x = state.get(key)  # some averages are lists of tensors, without names
            if isinstance(x, dict) and any(isinstance(v, dict | torch.Tensor) for v in x.values()):
                state = x
    names = state.keys() if isinstance(state, dict) else ()
    if not any(torch.is_tensor(state[name]) for name in names):
        held = ", ".join(map(str, [*names][:5])) or f"a {type(state).__name__}"
        raise UserError(f"the file holds no weights, but {held}: save only model.state_dict().")
    state = {name: x for name, x in state.items() if isinstance(name, str) and torch.is_tensor(x)}
    shared = os.path.commonprefix([*state]).rpartition(".")[0]
    return {name.removeprefix(f"{shared}."): x for name, x in state.items()}


def load_encoder(encoder, tensors, names, remedy):
    """Load {name: tensor} of another encoder into `encoder`.

    names: [(name in the file, our name)]. The positions of a ViT are interpolated to the grid of
    `encoder`. Blocks that the method replaces are not loaded, but returned. Raises UserError, with
    the remedy, if a tensor is missing, unexpected or of another shape.
    """
    found, left_over = {}, {}
    replaced = tuple(f"blocks.{len(encoder.blocks) + i}." for i in range(encoder.left_out))
    for name, value in tensors.items():
        for theirs, ours in names:
            name = name.replace(theirs, ours)
        # CLIP has [CLS] (d,) and positions (N, d). We have (1, 1, d) and (1, N, d).
        # restore_model refuses a tensor of another width.
        if name in ("cls", "pos") and value.shape[-1:] == (encoder.width,):
            value = value.reshape(1, -1, encoder.width).float()
        (left_over if name.startswith(replaced) else found)[name] = value
    if isinstance(encoder, ViT) and "pos" in found and found["pos"].shape[-1:] == (encoder.width,):
        has_cls = encoder.cls is not None
        found["pos"] = resize_positions(found["pos"], has_cls, encoder.grid, encoder.grid)
    restore_model(encoder, found, "the file", remedy)
    encoder.is_loaded = True  # so that MoCo-v3 keeps these weights
    return left_over


def load_clip_parts(model, parts):
    """Copy the tensors that load_clip returned into the clip_parameters of the model. Returns the
    tensors that were not copied.

    Raises UserError if a tensor is missing or has another shape. Projections of CLIP are (d, E),
    ours are (E, d).
    """
    parts = dict(parts)
    for name, ours in model.clip_parameters().items():
        theirs = parts.pop(name, torch.empty(0)).squeeze()
        if theirs.shape != ours.t().shape or not theirs.float().isfinite().all():
            raise UserError(f"the file has no finite {name} of shape {tuple(ours.t().shape)}: give "
                            "a CLIP with projections, and their width as --embed-dim.")
        ours.data.copy_(theirs.t())
    return parts


def load_timm(encoder, state_dict):
    """Load a ViT with the names of timm, as timm, DeiT, DINO, BAM and eval.py --export save it, or
    a ResNet with the names of torchvision.

    These weights expect the normalisation of pixels of ImageNet. So the encoder gets it, unless the
    file or the spec of the encoder names another. Files of DINO and BAM hold a student and a
    teacher, and the teacher is loaded. Files of DINO, BAM, solo-learn and lightly have "backbone."
    before the names of the encoder, files of MoCo-v3 have "base_encoder.". These files also hold
    heads, a decoder (MAE) or a momentum encoder. Returns the tensors that were not loaded, {name:
    tensor}. Raises UserError if the file does not fit.
    """
    state = unwrapped(state_dict)
    found, left_over = {}, {}
    prefix = re.compile(r"(module\.|teacher\.|backbone\.|base_encoder\.|_orig_mod\.)*")
    backbone = re.compile(r"backbone\.|base_encoder\.")
    has_backbone = any(backbone.search(prefix.match(name)[0]) for name in state)
    for name, value in state.items():
        before, name = prefix.match(name)[0], prefix.sub("", name, 1)
        is_head = re.match(r"student|head|fc(?!_)|classif|pro[jt]|pred|decoder|mask", name)
        is_left_over = is_head or (has_backbone and not backbone.search(before))
        (left_over if is_left_over else found)[name] = value
    remedy = ("give a file with timm's names (torchvision's for a ResNet), and its width, depth, "
              "[CLS] as --image-encoder, such as ViT-S/16:cls=1")
    # a name in the spec, as in ViT-B/16:pixels=half, replaces the constants of ImageNet
    constants = Pixels(encoder.pixels.name or "imagenet").state_dict()
    found |= {f"pixels.{name}": x for name, x in constants.items()}
    found |= {f"pixels.{name}": state_dict[name] for name in ("mean", "std") if name in state_dict}
    return left_over | load_encoder(encoder, found, TIMM_NAMES, remedy)


def timm_weights(encoder):
    """A ViT -> a dict for load_timm. "model" holds the weights, {name in timm: tensor}. "mean" and
    "std" hold the constants of pixels, (3, 1, 1). Raises UserError for an encoder that
    VisionTransformer of timm cannot represent."""
    is_plain = isinstance(encoder, ViT) and isinstance(encoder.patch_embed, nn.Conv2d)
    if not is_plain or encoder.left_out or isinstance(encoder.norm, nn.Identity):
        raise UserError("--export needs a ViT of timm, without a stem: train tiny-patch, ViT-S/16.")
    weights = {}
    for name, value in encoder.state_dict().items():
        for theirs, ours in TIMM_NAMES:
            name = name.replace(ours, theirs)
        if not name.startswith("pixels."):
            weights[name] = value.cpu()
    return {"model": weights, "mean": encoder.pixels.mean.cpu(), "std": encoder.pixels.std.cpu()}


# Boxes, for detection -----------------------------------------------------------------
#
# A source with the content "boxes" also has
#   queries    a text for each class, "a red circle"
#   trained    the numbers of the classes to train on, which have a box and are not rare
#   value(i)   the Boxes of image i; a World has world_boxes instead


class Boxes(NamedTuple):
    """The true boxes of an image: left, top, right, bottom, divided by the longer side."""

    boxes: torch.Tensor         # (n, 4)
    labels: torch.Tensor        # (n,), numbers of classes
    crowd: torch.Tensor         # (n,), True for a box around many objects
    size: tuple = (1, 1)        # width and height of the image
    absent: list | None = None  # sparc.average_precisions explains absent and partial
    partial: tuple = ()


class BoxTable(CaptionTable):
    """Images with boxes, of a file such as instances_val2017.json of COCO or lvis_v1_val.json of
    LVIS.

    names: the classes in the order of their ids. Categories with the same name are one class,
    because a detector gets the name. rare: the numbers of the rare classes of LVIS.
    split: "train" leaves out the boxes of rare classes (SPARC, Sec. 4.5). Other splits keep them.

    Boxes that no detector can find are left out and counted. Boxes that reach out of the image are
    kept, as in COCO's evaluation. Images without boxes are kept, too. Raises UserError for a file
    of another form.
    """

    def __init__(self, path, image_root=None, split="train"):
        with explained((OSError, ValueError, KeyError, TypeError, AttributeError), f"{path} is no "
                       "JSON of boxes as COCO or LVIS writes it; this is missing or wrong"):
            data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
            images = [*by_id(path, "images", data["images"]).values()]
            classes = by_id(path, "categories", data["categories"]).values()
            classes = sorted(classes, key=lambda c: c["id"])
            # LVIS has addresses in place of file names: http://HOST/val2017/000000397133.jpg
            files = [image.get("file_name") or "/".join(image["coco_url"].split("/")[-2:])
                     for image in images]
            names = [c["name"].replace("_", " ") for c in classes]
            self.names = [*dict.fromkeys(names)]
            self.sizes = np.array([(image["width"], image["height"]) for image in images], float)
            rows = {image["id"]: i for i, image in enumerate(images)}
            ids = {c["id"]: self.names.index(name) for c, name in zip(classes, names)}
            found, skipped = [], {}
            for a in data["annotations"]:
                row, label, box = rows.get(a["image_id"]), ids.get(a["category_id"]), a.get("bbox")
                if None not in (row, label) and is_in_image(box, self.sizes[row]):
                    found.append((row, label, a.get("iscrowd", 0), *box))
                else:
                    problem = "annotation that has no box in its image, or an unknown category"
                    count_problem(left_out(problem, f"{path}, annotation {a.get('id')}"), skipped)
            # LVIS has annotated only some classes in each image
            absent = [image.get("neg_category_ids") for image in images]
            self.absent = [known and [ids[c] for c in known] for known in absent]
            partial = [image.get("not_exhaustive_category_ids", ()) for image in images]
            self.partial = [[ids[c] for c in known] for known in partial]
            self.rare = [ids[c["id"]] for c in classes if c.get("frequency") == "r"]
        # no training uses crowds; boxes of at most one pixel are fractions of the sides
        if all(is_crowd or max(w, h) <= 1 for _, _, is_crowd, _, _, w, h in found):
            raise UserError(f"{path} has no box that can be used: {len(found)} are crowds, or not "
                            f"in pixels (left out: {describe_skipped(skipped) or 'nothing'}).")
        super().__init__([(file, "") for file in files], path, image_root or Path(path).parent,
                         content=None)
        if len(self) < len(files):
            raise UserError(f"{path} names {len(files) - len(self)} files twice: rename them.")
        self.content, self.skipped = "boxes", skipped
        not_learned = {*self.rare} if split == "train" else ()
        found = [row for row in found if row[1] not in not_learned]
        # columns: row of the image, class, crowd, left, top, right, bottom
        table = torch.tensor(found, dtype=torch.float64).view(-1, 7)
        table[:, 5:] += table[:, 3:5]
        ends, sizes = table[:, 5:].numpy(), self.sizes[table[:, 0].long().numpy()]
        outside = (ends > sizes + 1).any(1).mean() if found else 0
        if outside > 0.1:
            print(f"note: {outside:.0%} of the boxes of {path} reach out of their image: a bbox is "
                  "left, top, width, height, not two corners")
        self.table = table[table[:, 0].argsort(stable=True)]
        self.ends = torch.searchsorted(self.table[:, 0].contiguous(), torch.arange(len(files) + 1))
        boxes = zlib.crc32(self.table.numpy(), self.annotations)
        self.annotations = zlib.crc32(repr(self.names).encode(), boxes)
        self.queries = [article(name) for name in self.names]
        self.trained = sorted({label for _, label, *_ in found})

    def value(self, i, content="boxes"):
        """The Boxes of image i."""
        rows, side = self.table[self.ends[i] : self.ends[i + 1]], self.sizes[i].max()
        return Boxes(rows[:, 3:] / side, rows[:, 1].long(), rows[:, 2] > 0,
                     tuple(self.sizes[i] / side), self.absent[i], self.partial[i])

    def sample_captions(self, limit):
        return self.queries[:limit]


def is_in_image(box, size):
    """Whether a box is a list [left, top, width, height] that overlaps an image of this size
    (width, height)."""
    if not isinstance(box, list) or len(box) != 4:
        return False
    (x, y, w, h), (width, height) = box, size
    return w > 0 and h > 0 and x < width and y < height and x + w > 0 and y + h > 0


def world_boxes(sample):
    """A sample of World -> the Boxes of each image, around the pixels that each object covers."""
    scene, segmentation, found = sample["scene"], sample["segmentation"], []
    labels = scene["colour"] * 8 + scene["shape"]
    for i, ids in enumerate(segmentation):
        seen = ids.unique()[int((ids == 0).any()) :] - 1                    # without background
        boxes = masks_to_boxes(ids == seen[:, None, None] + 1)              # of first, last pixels
        boxes = (boxes + torch.tensor([0, 0, 1, 1])).double() / len(ids)
        found.append(Boxes(boxes, labels[i, seen], torch.zeros(len(seen), dtype=torch.bool)))
    return found


def squared(image, size):
    """A PIL image -> uint8 (3, size, size). The longer side is resized to `size`. The rest, to the
    right or below, is grey (OWL-ViT's code)."""
    width, height = [max(1, round(side * size / max(image.size))) for side in image.size]
    page = Image.new("RGB", (size, size), (128, 128, 128))
    page.paste(image.resize((width, height), Image.Resampling.BICUBIC))
    return v2.functional.pil_to_tensor(page)


def check_sides(image, sides):
    """Raise ValueError if an image has another aspect ratio than its annotation, for example if
    EXIF turns the image. Boxes or a map would then be in wrong places. sides: width and height of a
    map, or of the image in the file of its boxes, in any unit."""
    longer = max(image.size)
    off = [abs(side - longer * other / max(sides)) for side, other in zip(image.size, sides)]
    if max(off) > max(2, 0.01 * longer):  # sides of a JPEG decoded at a smaller size are rounded
        raise ValueError(f"its sides {image.width} x {image.height} do not fit those of its boxes "
                         f"or map, {sides[0]:.4g} x {sides[1]:.4g}: turn the image or these")


def crop_boxes(image, truth, size, min_scale, flip=0.5):
    """A PIL image and its Boxes -> a random crop, uint8 (3, size, size), and the Boxes in the crop.

    The crop has at least min_scale of the area. It is mirrored with probability `flip`, and made
    square by `squared`. Crowds are dropped. Other boxes are kept if at least 60 % of their area is
    left (OWL-ViT's code).
    """
    top, left, height, width = crop = random_crop(image, (min_scale, 1))
    whole = truth.boxes * max(image.size) - torch.tensor([left, top, left, top])
    image = v2.functional.crop(image, *crop)
    boxes = whole.clamp(min=0).minimum(torch.tensor([width, height, width, height]))
    kept = (box_area(boxes) >= 0.6 * box_area(whole)) & (box_area(boxes) > 0) & ~truth.crowd
    if torch.rand(()) < flip:
        image = v2.functional.hflip(image)
        boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    boxes = boxes[kept] / max(width, height)
    return squared(image, size), truth._replace(boxes=boxes, labels=truth.labels[kept])


def box_batch(truths, source, tokenizer, context, others=50):
    """Boxes of B images -> the inputs of sparc.Detector.forward, without the images.

    The queries of an image are its classes and `others` more classes of source.trained. Classes
    that are absent from the image, as LVIS says, come first. Boxes that overlap by more than .9
    become one box with several classes.
    """
    asked = []
    for truth in truths:
        order = torch.tensor(source.trained)[torch.randperm(len(source.trained))]
        others_first = torch.isin(order, torch.tensor(truth.absent or [-1])).int()
        order = order[others_first.argsort(descending=True, stable=True)]
        asked.append(torch.cat([truth.labels, order[~torch.isin(order, truth.labels)][:others]]))
    queries = torch.cat(asked).unique()                                     # (Q,), sorted
    tokens, mask = tokenizer.batch([source.queries[c] for c in queries.tolist()], context)
    boxes, classes = [], []
    for truth in truths:
        same, of_box = box_iou(truth.boxes, truth.boxes) > 0.9, truth.labels[:, None] == queries
        kept = []
        for i in range(len(same)):
            if (first := next((j for j in kept if same[i, j]), None)) is None:
                kept.append(i)
            else:
                of_box[first] |= of_box[i]
        boxes.append(truth.boxes[kept].float())
        classes.append(of_box[kept])
    pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return {"tokens": tokens, "mask": mask, "boxes": pad(boxes), "classes": pad(classes),
            "asked": torch.stack([torch.isin(queries, ids) for ids in asked])}


# The world of shapes -------------------------------------------------------------------
#
# The data set `shapes`: images of coloured shapes with captions, drawn from a seed. Nearly all
# metrics of eval.py can be measured on `shapes`, within minutes and without a download. The data
# are so hard that the methods differ. Captions leave out details, their order and words vary, and
# some pairs of colour and shape never occur in training.

COLOURS = {
    "red": (0.85, 0.15, 0.15), "green": (0.15, 0.65, 0.2), "blue": (0.2, 0.3, 0.9),
    "yellow": (0.95, 0.85, 0.2), "purple": (0.55, 0.2, 0.7), "orange": (0.95, 0.55, 0.1),
    "pink": (0.95, 0.6, 0.75), "white": (0.95, 0.95, 0.95),
}
# Signed distance functions. Each returns about the distance from the point (u, v) to the outline of
# the shape. The distance is negative inside. (u, v) is the offset from the centre, divided by the
# radius. v points down.
SHAPES = {
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
# Fillers describe nothing in the picture, like many words of web captions. A method must learn to
# ignore fillers. Each list has ten empty strings. So about half of the captions have no opening,
# and half have no closing.
OPENINGS = [""] * 10 + [
    "a photo of", "a picture of", "there is", "we see", "this image shows", "an image with",
    "my favourite photo of", "look at", "in this scene there is", "here we have", "close view of",
    "the artist drew"]
CLOSINGS = [""] * 10 + [
    "in the picture", "on a plain background", "for sale", "today", "as seen yesterday",
    "in high quality", "by an unknown author", "and nothing else", "taken with my camera",
    "in good condition"]
JOINTS = [" and ", " and ", " with ", " , ", " next to ", " as well as "]
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven"]
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
P_RELATION = 0.3   # share of captions that relate two objects, if two objects can be related
P_COLOUR = 0.9     # share of objects whose colour is named
P_SIZE = 0.4       # share of single objects whose size is named
SPLITS = {"train": range(0, 8), "val": range(8, 9), "test": range(9, 10)}  # tenths of all scenes


@dataclasses.dataclass
class World:
    """The world of shapes: coloured shapes with captions, drawn from a seed.

    The fields are the settings of the SPEC `shapes`. B scenes of at most K objects are a dict of
    tensors: present, colour, shape, large, radius (B, K), and centre (B, K, 2) as (x, y). Radius
    and centre are in pixels.

    A hash of the objects and their positions puts a scene into train, val or test. So no two splits
    share a scene. `heldout` pairs of colour and shape never occur in train. Only a model that
    composes colour and shape can recognise these pairs.

    Raises UserError for settings out of their range.
    """

    size: int = 48            # side of a picture in pixels, >= 16, <= 1024
    objects: int = 3          # largest number of objects in a picture, >= 1, <= 7
    noise: float = 0.04       # standard deviation of the smooth noise on the background, <= 1
    background: float = 0.25  # largest difference of the background colours of two pictures, <= .5
    small: float = 0.14       # radius of a small object / side of the picture
    large: float = 0.20       # radius of a large object / side of the picture
    # number of colours that objects have, >= 1, <= 8; tasks test all 8 colours
    palette: int = 8
    heldout: int = 6  # number of colour-shape pairs, of 64, that training never shows, <= 32
    # share of training scenes whose second object depends on the first, <= 1
    together: float = 0.0
    fillers: bool = True  # whether captions have openings and closings, which describe nothing
    words: int = 0  # number of made-up words, <= 4000; a caption has at most two of them

    content, classes, annotations = "caption", SHAPE_NAMES, None

    def __post_init__(self):
        check_numbers(vars(self), comments_of(World), "shapes: {}".format)
        if self.together and self.objects == 1:
            raise UserError(f"shapes: together {self.together} needs objects of 2 or more.")
        self.fingerprint = repr(self)
        # The picture is a grid of cells x cells, and a cell has at most one object.
        self.cells = max(2, math.ceil(math.sqrt(self.objects)))
        # A radius is at least 2 pixels. It is so small that no object covers an object in the next
        # cell.
        low, high = 2.2 / self.size, 0.64 / self.cells
        if not low <= self.small < self.large <= high:
            raise UserError(f"shapes: small={self.small} must be less than large={self.large}, "
                            f"both from {low:.3f} to {high:.3f}, by the size and the objects.")
        # The pairs use all eight colours before they use a colour again, with another shape.
        self.heldout_pairs = [(i % 8, (3 * i + i // 8 + 1) % 8) for i in range(self.heldout)]
        # a box has the class 8 * colour + shape
        self.queries = [coloured(*names) for names in itertools.product(COLOURS, SHAPES)]
        self.trained = [8 * c + s for c, s in itertools.product(range(self.palette), range(8))
                        if (c, s) not in self.heldout_pairs]

    def scenes(self, n, split, generator, objects=None):
        """Draw n scenes of a split -> dict of tensors.

        objects: exact number of objects of each scene; None for 1 to `self.objects`.
        """
        parts, kept = [], 0
        while kept < n:
            # A hash decides the split of a scene. So scenes of all splits are drawn, and only those
            # of this split are kept, on average len(SPLITS[split]) of 10. m is 20 % larger than
            # needed on average.
            m = max(64, math.ceil((n - kept) * 10 / len(SPLITS[split]) * 1.2))
            scene = self.draw(m, generator, objects, self.together if split == "train" else 0)
            keep = self.in_split(scene, split)
            if split == "train":
                seen = torch.isin(8 * scene["colour"] + scene["shape"], torch.tensor(self.trained))
                keep &= (seen | ~scene["present"]).all(1)
            parts.append({name: value[keep] for name, value in scene.items()})
            kept += int(keep.sum())
        return {name: torch.cat([part[name] for part in parts])[:n] for name in parts[0]}

    def draw(self, m, generator, objects, together):
        """Draw m scenes of all splits. `together` replaces self.together. The method `scenes`
        explains `objects`."""
        K = self.objects

        def rand(*shape):
            return torch.rand(*shape, generator=generator)

        def choices(n):
            return torch.randint(n, (m, K), generator=generator)

        count = objects
        if objects is None:
            count = torch.randint(1, K + 1, (m, 1), generator=generator)
        present = (torch.arange(K) < count).expand(m, K)
        colour, shape, large = choices(self.palette), choices(8), choices(2).bool()

        # The second object copies colour and shape of the first with probability .15. If it does,
        # the third copies them with probability .4, and so on. So captions with numbers ("two red
        # circles") are not too rare.
        twin = rand(m) < 0.15
        for k in range(1, K):
            colour[twin, k], shape[twin, k] = colour[twin, 0], shape[twin, 0]
            twin = twin & (rand(m) < 0.4)

        # `together`: the first object determines the second, so that a red circle comes with a
        # green square. k ^ 1 is the neighbour of k in the list: 0 and 1, 2 and 3, and so on.
        if together:
            pair = rand(m) < together
            present = present | (pair[:, None] & (torch.arange(K) == 1))
            for values, n in ((colour, self.palette), (shape, 8)):
                first = values[pair, 0]
                values[pair, 1] = torch.where(first ^ 1 < n, first ^ 1, first)

        # Each object has a cell of its own, a radius that varies by 10 %, and a random place. The
        # object stays inside its cell unless it is larger than the cell.
        cell = rand(m, self.cells**2).argsort(1)[:, :K]
        radius = torch.where(large, self.large, self.small) * self.size
        radius = radius * (1 + 0.2 * (rand(m, K) - 0.5))
        step = self.size / self.cells
        room = (step / 2 - radius).clamp(min=0)[..., None]
        corner = torch.stack([cell % self.cells, cell // self.cells], -1)
        centre = (corner + 0.5) * step + (2 * rand(m, K, 2) - 1) * room
        return {"present": present, "colour": colour, "shape": shape, "large": large,
                "radius": radius, "centre": centre}

    def in_split(self, scene, split):
        """Scenes -> (B,) bool, whether a scene belongs to the split.

        The hash is a sum over objects, so that the order of the objects does not matter. A scene
        and the same scene in another order belong to the same split.
        """
        x, y = scene["centre"].long().unbind(-1)
        code = (scene["colour"] * 8 + scene["shape"]) * 2 + scene["large"]
        code = code * self.size**2 + y * self.size + x
        key = (scene["present"] * (code * 2654435761 + code**2 * 40503 + 97)).sum(1)
        return torch.isin((key // 128) % 10, torch.tensor(SPLITS[split]))

    def render(self, scene, generator):
        """Scenes -> (images (B, 3, S, S) in [0, 1], segmentation (B, S, S)).

        The segmentation is 0 on the background and k + 1 on object k.
        """
        S, (B, K) = self.size, scene["present"].shape

        # the background: a dark random colour for each picture, with smooth noise
        colour = torch.rand(B, 3, 1, 1, generator=generator) - 0.5
        noise = torch.randn(B, 3, S // 2 + 1, S // 2 + 1, generator=generator)
        noise = F.interpolate(noise, scale_factor=2, mode="bilinear")[..., :S, :S]
        # The interpolation divides the standard deviation by about 1.6. The factor 1.6 undoes this.
        images = 0.275 + self.background * colour + self.noise * 1.6 * noise

        offset = torch.arange(S) + 0.5 - scene["centre"][..., None]
        offset = offset / scene["radius"][..., None, None]   # (B, K, 2, S): u, v
        tone = 1 + 0.15 * (2 * torch.rand(B, K, 1, generator=generator) - 1)
        rgb = torch.tensor(list(COLOURS.values()))[scene["colour"]] * tone
        rgb = rgb.clamp(max=1)                               # (B, K, 3)
        segmentation = torch.zeros(B, S, S, dtype=torch.long)

        # Each step draws object k in the b of B scenes in which object k has this shape.
        for shape, k in itertools.product(range(8), range(K)):
            has_shape = scene["present"][:, k] & (scene["shape"][:, k] == shape)
            rows = torch.nonzero(has_shape)[:, 0]
            u, v = offset[rows, k, 0][:, None, :], offset[rows, k, 1][:, :, None]
            distance = SHAPES[SHAPE_NAMES[shape]](u, v) * scene["radius"][rows, k, None, None]
            # the covered share of each pixel, so that edges are smooth
            cover = (0.5 - distance).clamp(0, 1)             # (b, S, S)
            paint = rgb[rows, k, :, None, None]
            images[rows] = torch.lerp(images[rows], paint, cover[:, None])
            segmentation[rows] = torch.where(cover > 0.5, k + 1, segmentation[rows])
        return images.clamp_(0, 1), segmentation

    def objects_of(self, scene):
        """Scenes -> a list of objects for each scene. An object is a dict with the words for
        colour, shape and size, and with the centre x, y in pixels."""
        names = ("present", "colour", "shape", "large", "centre")
        lists = []
        for rows in zip(*(scene[name].tolist() for name in names)):
            objects = []
            for present, colour, shape, large, (x, y) in zip(*rows):
                if present:
                    objects.append({"colour": COLOUR_NAMES[colour], "shape": SHAPE_NAMES[shape],
                                    "size": "large" if large else "small", "x": x, "y": y})
            lists.append(objects)
        return lists

    def caption(self, objects, rng):
        """The objects of a scene -> a caption.

        rng, a random.Random, draws the order of the objects, the form of the sentence, the details
        that are named, and the fillers.
        """
        objects = rng.sample(objects, len(objects))
        related = [(a, name, b) for a, b in itertools.permutations(objects, 2)
                   for name in RELATIONS if holds(a, name, b)]
        if related and rng.random() < P_RELATION:
            # "a red circle above a small star", then the other objects
            a, name, b = rng.choice(related)
            phrases = [f"{self.noun(a, rng)} {name} {self.noun(b, rng)}"]
            phrases += [self.noun(o, rng) for o in objects if o is not a and o is not b]
        else:
            # "two red circles", "a star": equal objects are counted
            groups = defaultdict(list)
            for o in objects:
                groups[o["colour"], o["shape"]].append(o)
            phrases = [self.noun(group[0], rng, len(group)) for group in groups.values()]
        text = phrases[0]
        for phrase in phrases[1:]:
            text += rng.choice(JOINTS) + phrase
        if self.fillers:
            text = f"{rng.choice(OPENINGS)} {text} {rng.choice(CLOSINGS)}".strip()
        if self.words:
            chosen = [made_up_word(rng.randrange(self.words)) for _ in range(rng.randrange(3))]
            text = " ".join([*chosen[:1], text, *chosen[1:]])
        return text

    def noun(self, o, rng, count=1):
        """An object in words, or `count` equal objects, such as "a red circle" or "two stars".

        Some nouns leave out the colour, and many leave out the size, as people do.
        """
        words = []
        if count == 1 and rng.random() < P_SIZE:
            words.append(o["size"])
        if rng.random() < P_COLOUR:
            words.append(o["colour"])
        if count == 1:
            return article(" ".join([*words, o["shape"]]))
        return " ".join([NUMBERS[count], *words, plural(o["shape"])])

    def sample(self, n, split, seed, objects=None):
        """Draw n samples of a split -> dict:

        "images"        (n, 3, S, S), in [0, 1]
        "segmentation"  (n, S, S), see `render`
        "captions"      n strings
        "scene"         dict of tensors, see World
        "objects"       n lists, see `objects_of`
        """
        generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
        scene = self.scenes(n, split, generator, objects)
        images, segmentation = self.render(scene, generator)
        lists = self.objects_of(scene)
        captions = [self.caption(objects, rng) for objects in lists]
        return {"images": images, "captions": captions, "scene": scene,
                "objects": lists, "segmentation": segmentation}

    def sample_captions(self, limit):
        """At most 5,000 training captions for a vocabulary. They contain all words of the world,
        but not all made-up words if there are many."""
        generator, rng = torch.Generator().manual_seed(0), random.Random(0)
        scene = self.scenes(min(limit, 5000), "train", generator)
        return [self.caption(objects, rng) for objects in self.objects_of(scene)]

    def hard_negatives(self, objects, rng):
        """The objects of a scene -> {kind: (true caption, false caption)}.

        The kinds are the seven kinds of SugarCrepe. The false caption replaces an object, an
        attribute or a relation, swaps two objects or attributes, or adds an object or an attribute.
        A kind is left out if its false caption could be true for this scene. A kind that needs a
        second object is left out if the scene has only one object.
        """
        a = rng.choice(objects)
        kinds = [(o["colour"], o["shape"]) for o in objects]
        colours, shapes = zip(*kinds)
        other_colour = rng.choice([c for c in COLOUR_NAMES if c not in colours])
        other_shape = rng.choice([s for s in SHAPE_NAMES if s not in shapes])
        name = coloured(a["colour"], a["shape"])
        everything = " and ".join(coloured(*kind) for kind in kinds)
        pairs = {
            "replace_att": (name, coloured(other_colour, a["shape"])),
            "replace_obj": (name, coloured(a["colour"], other_shape)),
            "add_obj": (everything, f"{everything} and {coloured(other_colour, other_shape)}"),
        }

        # "a small red circle" is false only if every red circle is large
        alike = [o for o in objects if (o["colour"], o["shape"]) == (a["colour"], a["shape"])]
        if all(o["size"] == a["size"] for o in alike):
            other_size = "small" if a["size"] == "large" else "large"
            pairs["add_att"] = (name, article(f"{other_size} {a['colour']} {a['shape']}"))

        # swaps need a second object that differs in colour and shape
        unlike = [o for o in objects if o["colour"] != a["colour"] and o["shape"] != a["shape"]]
        if not unlike:
            return pairs
        b = unlike[0]
        other = coloured(b["colour"], b["shape"])
        swapped = (b["colour"], a["shape"]), (a["colour"], b["shape"])
        if not any(kind in kinds for kind in swapped):
            negative = " and ".join(coloured(*kind) for kind in swapped)
            pairs["swap_att"] = (f"{name} and {other}", negative)

        # A relation is certain only if no other object looks like a or b.
        relation = next((r for r in RELATIONS if holds(a, r, b)), None)
        if relation and all(kinds.count((o["colour"], o["shape"])) == 1 for o in (a, b)):
            caption = f"{name} {relation} {other}"
            pairs["swap_obj"] = (caption, f"{other} {relation} {name}")
            pairs["replace_rel"] = (caption, f"{name} {OPPOSITE[relation]} {other}")
        return pairs


def holds(a, relation, b):
    """Whether object a is `relation` of object b, for example "left of". The centres must differ by
    more than 6 pixels, because a smaller difference is hard to see."""
    dx, dy = RELATIONS[relation]
    return (a["x"] - b["x"]) * dx + (a["y"] - b["y"]) * dy > 6


def coloured(colour, shape):
    """("red", "circle") -> "a red circle"."""
    return article(f"{colour} {shape}")


def plural(shape):
    """"circle" -> "circles", "cross" -> "crosses"."""
    return shape + ("es" if shape == "cross" else "s")


def made_up_word(i):
    """Word number i of 4,900, made of two syllables. Made-up words enlarge the vocabulary by words
    that describe nothing."""
    # 1987 and 4900 have no common divisor, so this line permutes the numbers. Otherwise the first
    # 70 words would begin with the same syllable.
    i = i * 1987 % 4900
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    return syllables[i // 70] + syllables[i % 70]
