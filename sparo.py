"""SPARO: Selective Attention for Robust and Compositional Transformer Encodings for Vision
(Vani et al., ECCV 2024, arXiv 2404.15721).

An encoding is made of L slots. Each slot is the output of one attention head with a learned
query over a transformer's outputs: a bottleneck, so that a slot holds one concept. CLIP's two
towers have the same slots; the similarity of image and caption is the mean over slots.

    symbol    name here        shape              where (K' is K transposed)
    H         x                (B, n, d)          Sec. 3.1; all outputs of a transformer
    g         grp_size                            App. A; slots that share one K_l
    q_l       Sparo.q          (1, L/g, g, 1, D)  Eq. 1; learned query of slot l
    K_l       Sparo.KVproj     d -> (L/g) D       Eq. 1; learned key projection
    W         Sparo.Wproj      D -> V             Eq. 1; learned, shared by all slots
    y_l       y                (B, L, V)          Eq. 1; Model.image_slots, Model.text_slots
    y         normalize_slots  (B, L V)           Sec. 3.3; encoding, of length 1
    y^i, y^t  v, t             (B, L V)           Eq. 2; encodings of images and captions

The authors' code is https://github.com/ankitkv/sparo-clip at 6621a31, a fork of OpenCLIP; DINO's
is https://github.com/facebookresearch/dino at 7c446df. A place in them is named (FILE:LINE).
`python tests/parity.py sparo PATH` (or dino) trains their network and ours side by side, with
their weight decay, in float64: the relative difference of the losses of 60 steps is at most 9.6e-15
(CLIP 1.4e-14, CLIP+GAP 5.7e-15), of DINO's 40 steps 4.2e-16.

Differs from the paper (what concerns a variant stands at the variant):
  * Sparo.forward computes App. A's listing, Eq. 1 with biases, in another order.
  * Captions end at WordPiece's [SEP]; the paper's tokens are CLIP's (--vocab bpe_...txt.gz).
  * Embeddings, positions and queries do not decay (common.param_groups); the authors' code
    decays all matrices (training/main.py:310).
  * Photographs are flipped (common.train_transform); the authors' are not (transform.py:105).
  * The image tower starts as CLIP's text tower does (transformer.py:703). The authors' starts
    with torch's defaults, [CLS] and positions with width^-.5 (transformer.py:503, 430).
  * Recall@k asks whether a match is among the k nearest, as CLIP_benchmark (Table C.2) and the
    authors' code (training/train.py:360) do; Sec. 4.2 has the fraction of the k that match.
Not here: CLIP's own form of ResNet-50 (App. B.3); Table 5's VTAB Avg, the relative change of a mean
         accuracy (eval.py prints the mean of the relative changes).

Run:     python train.py --method sparo                   (the embedded world, in minutes)
         python train.py --method sparo --readout cls     (CLIP; gap: CLIP+GAP)
         python train.py --method sparo --objective dino  (DINO; --readout sparo, cls, gap)
Result:  seeds 11-15: zero-shot .933 +- .013, CLIP .842 +- .074 (above with four: not shown);
         swapped attributes .610 +- .074, CLIP .508 +- .006 (holds). Seeds 3-5, an older record:
         CLIP+GAP's zero-shot .871 +- .063, hard negatives .722, CLIP .695, CLIP+GAP .692.
"""

import contextlib
import copy
import math
import time
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    objective: Literal["clip", "dino"] = "clip"  # CLIP (Sec. 3.3) or DINO (Sec. 3.4)
    # Sec. 3.2; cls: CLIP, gap: CLIP+GAP, attpool: Table 6, bottleneck, fdt: App. B.2
    readout: Literal["sparo", "cls", "gap", "attpool", "bottleneck", "fdt"] = "sparo"
    L: int = 128                      # slots; Sec. 4: 64 on Conceptual Captions, with DINO
    V: int = 64                       # width of a slot (Sec. 4)
    D: int = 64                       # width of a slot's key (Sec. 3.2)
    grp_size: int = 1                 # slots that share a key projection (App. A)
    replace_block: bool = True        # SPARO in the place of a tower's last block (Sec. 4)
    init_scale: float = 1 / 0.07      # 1 / temperature at first (CLIP, 2.5)
    embed_dim: int = 512              # cls, gap, bottleneck, fdt: width of the encoding
    bottleneck: int = 64              # bottleneck: m of App. B.2
    codes: int = 16384                # fdt: size of the codebook (App. B.2)
    heads: Literal["separate", "multi"] = "multi"  # attpool, Table 6: multi mixes heads
    slot_norm: bool = False           # attpool, Table 6: LayerNorm slot by slot
    slot_projection: bool = False     # attpool, Table 6: one projection for all slots
    out_dim: int = 65536              # dino: K, width of the distributions (all dino: C.2)
    head_width: int = 2048            # dino: width of the head's hidden layers
    head_bottleneck: int = 256        # dino: width before the head's last layer
    student_temp: float = 0.1         # dino: tau_s
    teacher_temp: float = 0.04        # dino: tau_t
    center_momentum: float = 0.9      # dino: momentum of the center
    ema: float = 0.996                # dino: teacher's momentum, by half a cosine to 1
    freeze_last: int = 0              # dino: steps before the last layer trains
    local_crops: int = 8              # dino: small views, beside two large ones
    local_size: int = 96              # dino: pixels of a small view
    crop_least: float = 0.05          # dino: min. fraction of the image in small views
    crop_border: float = 0.4          # dino: max. of small, min. of large views


PAPER = dict(text_encoder="clip-b16", lr=5e-4, weight_decay=0.5, warmup=3600, batch=4096,
             clip_grad=0.0)
R50 = PAPER | dict(image_encoder="ResNet-50", steps=78_280, beta2=0.999, adam_eps=1e-8)  # OpenCLIP's (params.py:11)
PRESETS = {  # settings of this file and of train.py by name; --flags override them
    "tiny": dict(image_encoder="tiny:cls=1", text_encoder="tiny:causal=1", data="shapes", L=32, V=16, D=16, batch=128,
                 steps=600, lr=1e-3, weight_decay=0.1, warmup=50, embed_dim=128, codes=512, out_dim=1024, ema=0.99,
                 head_width=256, head_bottleneck=64, local_crops=2, local_size=24, crop_least=0.2, crop_border=0.5),
    # Sec. 4, Table C.3. Steps: epochs times pairs of Table C.1 over the batch, 32 x 2,795,293 of
    # CC3M, 25 x 10,030,127 of CC12M, 25 x 12,825,420 of CC15M, 32 x 319,707,672 of LAION-400M.
    "cc3m-b16": dict(image_encoder="clip-b16", L=64, steps=21_838, **PAPER),
    "cc12m-b16": dict(image_encoder="clip-b16", L=64, steps=61_219, **PAPER),
    "cc3m-b32": dict(image_encoder="clip-b32", L=64, steps=21_838, **PAPER),  # Table B.1
    "cc12m-b32": dict(image_encoder="clip-b32", L=64, steps=61_219, **PAPER),
    "cc15m-b32": dict(image_encoder="clip-b32", L=64, steps=78_280, **PAPER),
    "cc15m-b16": dict(image_encoder="clip-b16", L=64, steps=78_280, **PAPER),
    "l400m-b32": dict(image_encoder="clip-b32", L=128, steps=312_214,
                      **PAPER | dict(weight_decay=0.2, warmup=2000, batch=32768)),
    # The rows of Table B.2. differs: ResNet-50 is torchvision's; the text tower keeps its last
    # block, so that SPARO has the table's parameters.
    "cc15m-r50": dict(L=128, V=32, D=32, **R50),
    "cc15m-r50-d64": dict(L=128, V=32, D=64, **R50),
    "cc15m-r50-clip": dict(readout="cls", embed_dim=1024, **R50),
    "cc15m-r50-clip4096": dict(readout="cls", embed_dim=4096, **R50),
    # The CLIP that STAIR compares with (arXiv 2301.13081, Sec. 4.2), with LAMB's own constants.
    # [CLS] and a causal text tower are CLIP's; how STAIR's towers differ, it does not say. differs:
    # LAMB neither scales nor decays the token embedding (see stair.py).
    "stair-clip": dict(image_encoder="ViT-B/16:cls=1", text_encoder="12x512:context=76,causal=1,vocab_size=30522",
                       readout="cls", steps=600_000, batch=16384, optimizer="lamb", beta2=0.999,
                       adam_eps=1e-6, lr=1e-3, schedule="linear", weight_decay=1e-2, warmup=10_000, clip_grad=0.0),
    # Sec. 3.4, C.2: 100 epochs of ImageNet's 1,281,167 images, 10 of them warm-up
    "dino-s16": dict(image_encoder="ViT-S/16:cls=1,drop_path=0.1", objective="dino", L=64, batch=512, steps=250_200,
                     lr=1e-3, beta2=0.999, adam_eps=1e-8, clip_grad=3.0, weight_decay=0.04, weight_decay_end=0.4,
                     warmup=25_020, freeze_last=2502, probe="sgd"),
}


@contextlib.contextmanager
def in_fp32(*tensors):
    """`with in_fp32(x, y) as (x, y):` half precision is float32, float64 stays, autocast is off."""
    with torch.autocast(tensors[0].device.type, enabled=False):
        yield [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def identity(x):
    return x


def after_end(eos_idx, n):
    """Index (B,) of each caption's last token -> (B, n), True at the positions behind it."""
    return torch.arange(n, device=eos_idx.device) > eos_idx[:, None]


# y_l = W K_l H' softmax(H K_l' q_l / sqrt(D))                                      (Eq. 1)
class Sparo(nn.Module):
    """Separate-head attention. Its parameters have the names of the listing of App. A. Raises
    ValueError if grp_size does not divide L."""

    def __init__(self, d, L, V, D, grp_size=1):
        super().__init__()
        if L % grp_size:
            raise ValueError(f"grp_size={grp_size} does not divide L={L}: give a divisor of L.")
        self.D, self.grp_size, self.nkeys = D, grp_size, L // grp_size
        self.q = nn.Parameter(torch.randn(1, self.nkeys, grp_size, 1, D))
        self.KVproj = nn.Linear(d, self.nkeys * D)
        self.Wproj = nn.Linear(D, V)
        nn.init.xavier_uniform_(self.KVproj.weight)
        nn.init.zeros_(self.KVproj.bias)
        nn.init.zeros_(self.Wproj.bias)

    def forward(self, x, eos_idx=None, return_attn=False):
        """x (B, n, d), eos_idx (B,): slots do not see the positions behind it -> slots
        (B, L, V), and with return_attn the attention (B, L, n)."""
        B, n, d = x.shape
        K = self.KVproj.weight.view(self.nkeys, self.D, d)         # (L/g, D, d)
        b = self.KVproj.bias.view(self.nkeys, 1, self.D)           # (L/g, 1, D)

        # differs: the listing projects every position to keys, (B, n, (L/g) D). Here K_l meets no
        # position: the scores are H u_l, and K_l is applied to p_l, after the attention. Its
        # bias b_l would add the same to all scores of a slot, which softmax ignores; as the
        # attention sums to 1, b_l reaches the values unchanged.
        u = self.q[0, :, :, 0] @ K * self.D**-0.5    # (L/g, g, d)  u_l = K_l' q_l / sqrt(D)
        scores = F.linear(x, u.flatten(0, 1)).transpose(1, 2)      # (B, L, n)  H u_l
        if eos_idx is not None:
            scores = scores.masked_fill(after_end(eos_idx, n)[:, None], -torch.inf)
        attn = scores.softmax(-1)                                  # (B, L, n)  a_l
        pooled = (attn @ x).view(B, self.nkeys, self.grp_size, d)  # (B, L/g, g, d)  p_l = H' a_l
        values = torch.einsum("bkgd,kDd->bkgD", pooled, K) + b     # (B, L/g, g, D)  K_l p_l + b_l
        y = self.Wproj(values.flatten(1, 2))                       # (B, L, V)
        return (y, attn) if return_attn else y


# y = concat(y_l / |y_l|) / sqrt(L),  so  y^i . y^t = mean_l sim(y^i_l, y^t_l)        (Eq. 2)
def normalize_slots(y):
    """Slots (B, L, V) -> encodings (B, L V) of length 1."""
    with in_fp32(y) as (y,):
        return F.normalize(y, dim=-1).flatten(1) / y.shape[1] ** 0.5


def clip_loss(v, t, scale, gather=identity):
    """CLIP's loss, a scalar. v, t (B, M): encodings of pairs, of length 1; scale: 1 / temperature;
    gather: (B, M) -> (world * B, M), differentiable, rank by rank; gather.rank is this one."""
    pair = getattr(gather, "rank", 0) * len(v) + torch.arange(len(v), device=v.device)
    with in_fp32(v, t) as (v, t):
        logits = scale * v @ gather(t).T                           # (B, world * B)
        positive = logits.take_along_dim(pair[:, None], 1)[:, 0]   # (B,)
        image_to_text = logits.logsumexp(1) - positive             # (B,)
        # ranks exchange a number per text, its sum over their images, in place of the images
        sums = gather(logits.logsumexp(0, keepdim=True)).logsumexp(0)  # (world * B,)
        text_to_image = sums[pair] - positive                      # (B,)
        return (image_to_text + text_to_image).mean() / 2


def blocks_left_out(args):
    """How many last blocks of a ViT and its text tower the read-out replaces (Sec. 3.4 and 4)."""
    return int(args.readout == "sparo" and args.replace_block)


class Model(nn.Module):
    """CLIP with a read-out on both towers (Sec. 3.3). image_encoder(images) -> (B, n, width),
    with [CLS] first or without; text_encoder(tokens, mask) -> (B, n, width), causal."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config = config
        self.slots = config.L if config.readout == "sparo" else 0
        self.mask_parts = config.L  # equal parts of an encoding that train_mask weighs
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        widths = image_width, text_width
        if config.readout == "sparo":
            sizes = config.L, config.V, config.D, config.grp_size
            readouts = [Sparo(d, *sizes) for d in widths]
        else:
            readouts = other_readouts(config, image_encoder, *widths)  # below
        self.image_readout, self.text_readout = readouts
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.init_scale)))

    def forward(self, batch, gather=identity):
        """batch: images (B, 3, H, W), tokens (B, n), mask (B, n), True at tokens.
        Returns {"loss": scalar, and scalars to log}."""
        v = self.encode_image(batch["images"])                     # (B, L V)
        t = self.encode_text(batch["tokens"], batch["mask"])       # (B, L V)
        scale = self.log_scale.exp()
        return {"loss": clip_loss(v, t, scale, gather), "scale": scale.detach()}

    def clip_parameters(self):
        """What starts from a whole CLIP (--init-weights): with --readout cls the model is CLIP."""
        places = {"logit_scale": self.log_scale}
        if self.config.readout == "cls":
            places["visual.proj"] = self.image_readout.proj.weight
            places["text_projection"] = self.text_readout.proj.weight
        return places

    @torch.no_grad()
    def after_update(self, step, steps):
        """Keep the scale within [1, 100], as CLIP does."""
        self.log_scale.clamp_(0, math.log(100))

    def encode_image(self, images):
        return normalize_slots(self.image_slots(images))           # (B, L V)

    def encode_text(self, tokens, mask):
        return normalize_slots(self.text_slots(tokens, mask))      # (B, L V)

    def image_slots(self, images, **options):
        """(B, 3, H, W) -> (B, L, V), with return_attn=True also (B, L, n)."""
        return self.image_readout(self.image_encoder(images), **options)

    def text_slots(self, tokens, mask, **options):
        """(B, n), (B, n) -> (B, L, V), with return_attn=True also (B, L, n)."""
        eos_idx = mask.sum(1) - 1                                  # (B,)
        return self.text_readout(self.text_encoder(tokens, mask), eos_idx, **options)

    def attend(self, images, tokens, mask):
        """What the slots of pairs attend to (Sec. 5.4): weights (B, L, n) of the image's
        tokens, weights (B, L, n) of the caption's, and the slots (B, L, V) of both."""
        y_i, over_image = self.image_slots(images, return_attn=True)
        y_t, over_text = self.text_slots(tokens, mask, return_attn=True)
        return over_image, over_text, y_i, y_t


# To read SPARO, stop here. ----------------------------------------------------------------
#
# Into Hugging Face's CLIP (`model`), for `images`, `ids` and their attention mask `mask`; gather:
# identity, under DDP common.gather. "once": before the optimizer is made.
#     image_sparo, text_sparo = Sparo(768, 64, 64, 64), Sparo(512, 64, 64, 64)  # once
#     x = model.vision_model(pixel_values=images).last_hidden_state             # (B, n, 768)
#     x = model.vision_model.post_layernorm(x)  # the text model does this by itself
#     h = model.text_model(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, n, 512)
#     v = normalize_slots(image_sparo(x))                                       # (B, L V)
#     t = normalize_slots(text_sparo(h, eos_idx=mask.sum(1) - 1))               # (B, L V)
#     loss = clip_loss(v, t, model.logit_scale.exp(), gather)
#
# What was found out on the embedded world (three seeds, lr 1e-3, FDT and AttPool 5e-4):
# SPARO binds colours to shapes: swapped attributes .593 (CLIP .496, chance .50), among four objects
# .848 (sparc.py's CLIP .509). Swapped objects stay at chance for SPARO, CLIP, CLIP+GAP.
# Zero-shot of AttPool is .708; with LayerNorm and projection by slot .779; with separate heads,
# too, .791; of SPARO .912, CLIP .794, FDT .631. The best half of the slots keeps the hard
# negatives (.719, all slots .722), without the paper's gain.
# For each per cent that a mask of single dimensions gains on hard negatives, zero-shot loses .9 per
# cent with SPARO, 2.9 with a CLIP+GAP as wide. A mask of slots costs 5.3 (in the paper less than
# one of dimensions), of as many parts of CLIP+GAP 6.3: no difference is shown.
# CLIP+GAP as wide as SPARO is no better (.823; of 128 dimensions .871). V = 64 is worse at this
# rate (.759); of V = 4 (.884), L = 8 and 64 (.900, .928) no difference to .912 is shown.
# With DINO (lr 2.5e-4), SPARO raises the linear probe (.465, .437), but not k-NN (.348, .354).


# Other read-outs --------------------------------------------------------------------------
# x (B, n, d), and for captions the index eos_idx (B,) of the last token -> (B, 1, M): one slot,
# so the whole is normalised. How Table 6's variants are normalised, the paper does not say.


def other_readouts(config, image_encoder, image_width, text_width):
    """The read-outs of the two towers."""

    def projection(d, M):
        layer = nn.Linear(d, M, bias=False)
        nn.init.normal_(layer.weight, std=d**-0.5)
        return layer

    E, m, widths = config.embed_dim, config.bottleneck, (image_width, text_width)
    if config.readout == "cls" and image_encoder.cls is None:  # a ResNet; App. B.3
        pool = AttentionPool(image_width, image_encoder.grid**2, E)
        return [pool, Pool(projection(text_width, E))]
    if config.readout == "cls":
        return [Pool(projection(d, E)) for d in widths]
    if config.readout == "gap":  # the mean, then the tower's LayerNorm (transformer.py:527, 573)
        norm = getattr(image_encoder, "norm", nn.Identity())       # a ResNet has none
        image_encoder.norm = nn.Identity()
        mean = Pool(nn.Sequential(norm, projection(image_width, E)), mean=True)
        return [mean, Pool(projection(text_width, E))]             # captions: their end, as CLIP
    if config.readout == "bottleneck":  # App. B.2
        return [Pool(nn.Sequential(projection(d, m), nn.Linear(m, E))) for d in widths]
    if config.readout == "fdt":
        codebook = nn.Parameter(torch.randn(config.codes, E))
        return [FDT(d, codebook) for d in widths]
    return [CrossAttention(d, config.L, config.V, config.D, config.heads, config.slot_norm,
                           config.slot_projection) for d in widths]


class Pool(nn.Module):
    """The output at [CLS], or at the caption's end (CLIP); mean=True: the mean of all outputs."""

    def __init__(self, proj, mean=False):
        super().__init__()
        self.proj, self.mean = proj, mean

    def forward(self, x, eos_idx=None):
        if self.mean:
            x = x.mean(1)
        else:
            x = x[torch.arange(len(x), device=x.device), 0 if eos_idx is None else eos_idx]
        return self.proj(x)[:, None]                               # (B, 1, M)


class AttentionPool(nn.Module):
    """CLIP's end of a ResNet (CLIP, Sec. 2.4): the mean of the n outputs attends to them and to
    itself, with heads of 64."""

    def __init__(self, d, n, M):
        super().__init__()
        self.pos = nn.Parameter(torch.randn(1 + n, d) * d**-0.5)
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.proj = nn.Linear(d, M)
        for layer in (self.q, self.k, self.v, self.proj):
            nn.init.normal_(layer.weight, std=d**-0.5)

    def forward(self, x, eos_idx=None):
        x = torch.cat([x.mean(1, keepdim=True), x], 1) + self.pos  # (B, 1 + n, d)
        q, k, v = self.q(x[:, :1]), self.k(x), self.v(x)
        q, k, v = (y.unflatten(2, (-1, 64)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)                # (B, d / 64, 1, 64)
        return self.proj(y.transpose(1, 2).flatten(2))             # (B, 1, M)


class CrossAttention(nn.Module):
    """Table 6: L queries, keys and values of width D; then LayerNorm and projection, of all
    outputs or slot by slot. AttPool has heads="multi" and neither of them slot by slot. The
    authors' code also projects queries, behind LayerNorms (transformer.py:229); Table 6 has no
    parameters for such projections."""

    def __init__(self, d, L, V, D, heads, slot_norm, slot_projection):
        super().__init__()
        self.q = nn.Parameter(torch.randn(L, 1, D))
        self.k, self.v = nn.Linear(d, L * D), nn.Linear(d, L * D)
        self.mix = nn.Linear(L * D, L * D) if heads == "multi" else nn.Identity()
        self.norm = nn.LayerNorm(D if slot_norm else L * D)
        self.proj = nn.Linear(D, V) if slot_projection else nn.Linear(L * D, L * V)

    def forward(self, x, eos_idx=None):
        B, n, _ = x.shape
        k = self.k(x).view(B, n, len(self.q), -1).transpose(1, 2)  # (B, L, n, D)
        v = self.v(x).view(B, n, len(self.q), -1).transpose(1, 2)
        visible = None if eos_idx is None else ~after_end(eos_idx, n)[:, None, None]
        y = F.scaled_dot_product_attention(self.q.expand(B, -1, -1, -1), k, v, visible)
        y = self.mix(y.flatten(1))                                 # (B, L D)
        y = self.norm(y.view(B, -1, *self.norm.normalized_shape))  # slot by slot, or all
        y = self.proj(y.view(B, -1, self.proj.in_features))        # slot by slot, or all
        return y.view(B, 1, -1)                                    # (B, 1, L V)


class FDT(nn.Module):
    """Finite Discrete Tokens (B.2): each position scores the codes (C, E) that the towers
    share; sparsemax of the maximum over positions gives the mixture of codes. differs: outputs
    are normalised and include [CLS]; the authors' are not (model.py:448) and lack it
    (transformer.py:565). What is behind a caption's end scores -inf, not 0 (transformer.py:1067).
    """

    def __init__(self, d, codebook):
        super().__init__()
        E = codebook.shape[1]
        self.codebook, self.temperature = codebook, 1000 * E**0.5  # transformer.py:1004, 1065
        self.query = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, E), nn.GELU(), nn.LayerNorm(E),
                                   nn.Linear(E, E))

    def forward(self, x, eos_idx=None):
        scores = self.query(x) @ self.codebook.T / self.temperature  # (B, n, C)
        if eos_idx is not None:
            scores = scores.masked_fill(after_end(eos_idx, x.shape[1])[..., None], -torch.inf)
        return (sparsemax(scores.amax(1)) @ self.codebook)[:, None]  # (B, 1, E)


def sparsemax(z):
    """(..., C) -> the nearest point of the simplex (Martins & Astudillo 2016)."""
    with in_fp32(z) as (z,):
        k = torch.arange(1, z.shape[-1] + 1, device=z.device)
        sums = z.sort(-1, descending=True).values.cumsum(-1)       # of the k largest
        threshold = ((sums - 1) / k).amax(-1, keepdim=True)
        return (z - threshold).clamp(min=0)


# DINO (arXiv 2104.14294) with SPARO (Sec. 3.4) --------------------------------------------


# P_s = softmax(g_s / tau_s),  P_t = softmax((g_t - c) / tau_t)
# mean over large views x and views x' != x of - P_t(x) . log P_s(x')          (DINO, Eq. 3)
def dino_loss(student, teacher, center, student_temp, teacher_temp):
    """Logits g_s (V, B, K) of all views, the G large ones first, g_t (G, B, K) of the large
    ones, c (K,) -> scalar, and P_t (G, B, K). The teacher gets no gradient."""
    with in_fp32(student, teacher) as (student, teacher):
        p_t = ((teacher.detach() - center) / teacher_temp).softmax(-1)
        log_p_s = (student / student_temp).log_softmax(-1)
        G, V = len(teacher), len(student)
        # The sum over pairs is the product of sums, less the pairs of a view with itself.
        every = (p_t.sum(0) * log_p_s.sum(0)).sum(-1).mean()
        same = (p_t * log_p_s[:G]).sum((0, 2)).mean()
        return (same - every) / (G * (V - 1)), p_t


class DinoHead(nn.Module):
    """Three layers, then the cosines with K directions. (B, M) -> (B, K)"""

    def __init__(self, M, K, width, bottleneck):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(M, width), nn.GELU(), nn.Linear(width, width),
                                 nn.GELU(), nn.Linear(width, bottleneck))
        self.last = nn.Linear(bottleneck, K, bias=False)
        for layer in self.mlp[::2]:
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        with in_fp32(self.mlp(x), self.last.weight) as (x, directions):
            return F.normalize(x, dim=-1) @ F.normalize(directions, dim=-1).T


class Dino(nn.Module):
    """The student learns the distributions that its moving average, the teacher, gives to
    other views. Slots enter the head as they are. The teacher is what is evaluated.

    differs (brackets: DINO's code): the norm of the whole gradient is clipped (each parameter's,
    utils.py:132). The rate ends at 0 (1e-6, main_dino.py:101); its warm-up begins at peak / warmup
    (0, utils.py:191) and has the peak at the same step. [CLS], positions and q do not decay (they
    do, utils.py:639). Pixels have CLIP's mean and deviation (ImageNet's, main_dino.py:431).
    Encoders start as CLIP's. Positions are interpolated with antialiasing (without,
    vision_transformer.py:187). Colours change as in common.jitter (torchvision's,
    main_dino.py:424).
    """

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config, self.image_encoder = config, image_encoder
        if config.readout == "sparo":
            M = config.L * config.V
            self.readout = Sparo(image_width, config.L, config.V, config.D, config.grp_size)
        else:
            M = image_width
            self.readout = Pool(nn.Identity(), config.readout == "gap")
        self.head = DinoHead(M, config.out_dim, config.head_width, config.head_bottleneck)
        self.teacher = copy.deepcopy(self.student()).requires_grad_(False)
        self.register_buffer("center", torch.zeros(config.out_dim))
        self.train()

    def student(self):
        return nn.Sequential(self.image_encoder, self.readout, self.head)

    def train(self, mode=True):
        """The teacher drops nothing, but normalises by the batch as the student does."""
        super().train(mode)
        for module in self.teacher.modules():
            module.training = mode and isinstance(module, nn.modules.batchnorm._BatchNorm)
        return self

    def logits(self, network, views):
        """V views (B, 3, s, s), two large ones first -> (V, B, K). One pass for each size."""
        encode, head = network[:2], network[2]
        by_size = [torch.cat(part) for part in (views[:2], views[2:]) if part]
        y = torch.cat([encode(x).flatten(1) for x in by_size])     # (V B, M)
        return head(y).unflatten(0, (len(views), -1))

    def forward(self, batch, gather=identity):
        """batch: views, a list of (B, 3, s, s), two large ones first. Returns {"loss": scalar,
        and the entropies of P_t and of its mean: a collapse takes both to log K, or to 0}."""
        config, views = self.config, batch["views"]
        with torch.no_grad():
            teacher = self.logits(self.teacher, views[:2])         # (2, B, K)
        student = self.logits(self.student(), views)               # (V, B, K)
        loss, p_t = dino_loss(student, teacher, self.center, config.student_temp,
                              config.teacher_temp)
        if self.training:  # c = m c + (1 - m) mean g_t of the global batch    (DINO, Eq. 4)
            mean = gather(teacher.mean((0, 1))[None]).mean(0)      # (K,)
            self.center.lerp_(mean, 1 - config.center_momentum)
        entropy = torch.special.entr(p_t).sum(-1).mean()           # entr(p) = -p log p
        entropy_mean = torch.special.entr(p_t.mean((0, 1))).sum()
        return {"loss": loss, "entropy": entropy, "entropy_mean": entropy_mean}

    def before_update(self, step):
        if step < self.config.freeze_last:  # Adam does not even count the step
            self.head.last.weight.grad = None

    @torch.no_grad()
    def after_update(self, step, steps):
        """theta_t = m theta_t + (1 - m) theta_s; half a cosine takes m from `ema` to 1."""
        m = 1 - (1 - self.config.ema) * (1 + math.cos(math.pi * step / steps)) / 2
        theta_t, theta_s = (list(net.parameters()) for net in (self.teacher, self.student()))
        torch._foreach_lerp_(theta_t, theta_s, 1 - m)

    def chance_loss(self, batch_size, mask, patches):
        return math.log(self.config.out_dim)  # uniform distributions

    def evaluation_encoder(self):
        return self.teacher[0]

    def head_maps(self, images):
        return self.evaluation_encoder().cls_attention(images)              # (B, heads, h, w)

    def encode_image(self, images):
        return F.normalize(self.teacher[:2](images).flatten(1).float(), dim=-1)  # (B, M)

    def probe_features(self, images):
        """DINO's linear probe (C.2; eval_linear.py:256, 165) sees [CLS] after each of the last four
        blocks; the slots, or with `gap` the mean, replace the last. Without a [CLS] it sees the
        mean of the patches (ours), with a ResNet the read-out alone. differs: eval.py chooses its
        rate (DINO's is .001 x batch / 256); `tiny` trains it as CLIP's (C.1), by AdamW and without
        augmentation."""
        encoder, readout, _ = self.teacher
        if not hasattr(encoder, "layers"):
            return readout(encoder(images)).flatten(1).float()
        replaced = blocks_left_out(self.config)  # 1 if the read-out is the last block, else 0
        layers = encoder.layers(images, 4 - replaced)              # of (B, n, d)
        blocks = layers if replaced else layers[:-1]
        summary = [x.mean(1) if encoder.cls is None else x[:, 0] for x in blocks]   # of (B, d)
        return torch.cat([*summary, readout(layers[-1]).flatten(1)], 1).float()


def model_class(args):
    return Dino if args.objective == "dino" else Model


def uses_text(args):
    return args.objective == "clip"


def needs_cls(args):
    if args.readout == "cls" and args.objective == "clip" and "ResNet" in args.image_encoder:
        return ""  # AttentionPool
    return f"--readout {args.readout}" if args.readout in ("cls", "bottleneck") else ""


def check(args):
    if args.objective == "dino" and args.readout not in ("sparo", "cls", "gap"):
        raise ValueError(f"--objective dino has --readout sparo, cls, gap, not {args.readout}.")
    if args.objective == "dino" and args.crop_least > args.crop_border:
        least, most = args.crop_least, args.crop_border
        raise ValueError(f"--crop-least {least} must not be above --crop-border {most}.")


def views(args):
    """DINO's random views of an image (C.2; main_dino.py:435): two large ones, then the small
    ones."""
    if args.objective != "dino":
        return None
    large = dict(size=args.image_size, scale=(args.crop_border, 1.0))
    small = dict(size=args.local_size, scale=(args.crop_least, args.crop_border), blur=0.5)
    first, second = large | dict(blur=1.0), large | dict(blur=0.1, solarize=0.2)
    return [first, second] + args.local_crops * [small]


# Analyses ---------------------------------------------------------------------------------


def slot_accuracies(y_i, y_t, labels):
    """Zero-shot accuracy of each slot alone (Sec. 5.1). Slots y_i (n, L, V) of images, y_t
    (C, L, V) of classes; labels (n,) -> (L,)."""
    y_i, y_t = F.normalize(y_i, dim=-1), F.normalize(y_t, dim=-1)
    right = [(y_i[:, l] @ y_t[:, l].T).argmax(1) == labels for l in range(y_i.shape[1])]
    return torch.stack(right).float().mean(1)


# m = sigmoid(s theta / 4),  s = max(100, exp(alpha)),  theta in R^M'                 (C.1)
# cross-entropy of the logits  s cos(m y^i, y^p)  and  s cos(m y^i, y^n)
def train_mask(y_i, y_p, y_n, parts, epochs=100, batch=256, generator=None):
    """A mask that tells captions from hard negatives (Sec. 5.2). y_i, y_p, y_n: encodings
    (n, M) of images, captions, negatives; parts: M', L for slots, M for single dimensions.

    Returns the mask (M,) of the epoch with the most right pairs (ones if no epoch has more than
    no mask), and the fractions of right pairs without and with it. Raises ValueError if parts
    does not divide M. differs: C.1 chooses the mask by SugarCrepe's mean over categories. It
    gives no batch size: 256 is ours, and sets the number of updates.
    """
    n, M = y_i.shape
    if M % parts:
        raise ValueError(f"Encodings of {M} dimensions have no {parts} equal parts.")
    theta = y_i.new_zeros(parts).requires_grad_()
    alpha = y_i.new_tensor(math.log(100)).requires_grad_()
    optimizer = torch.optim.SGD([theta, alpha], lr=0.02, momentum=0.9)

    def scale_and_mask():
        s = alpha.exp().clamp(min=100)
        return s, (s / 4 * theta).sigmoid().repeat_interleave(M // parts)

    def margin(m, rows=slice(None)):
        y = m * y_i[rows]
        return F.cosine_similarity(y, y_p[rows]) - F.cosine_similarity(y, y_n[rows])

    best = y_i.new_ones(M)
    before = after = (margin(best) > 0).float().mean().item()
    for _ in range(epochs):
        for rows in torch.randperm(n, generator=generator).split(batch):
            s, m = scale_and_mask()
            loss = F.softplus(-s * margin(m, rows)).mean()  # cross-entropy of two logits
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        m = scale_and_mask()[1].detach()
        right = (margin(m) > 0).float().mean().item()
        if right > after:
            best, after = m, right
    return best, before, after


if __name__ == "__main__":
    # The read-out of ViT-B/16, forward and backward, in our order and in that of App. A.
    x, readout = torch.randn(16, 197, 768), Sparo(768, L=64, V=64, D=64)

    def as_listed(x):
        kv = readout.KVproj(x).unflatten(2, (64, 64)).transpose(1, 2)  # (B, L, n, D)
        attn = (readout.q[:, :, 0] @ kv.transpose(2, 3) / 8).softmax(-1)  # (B, L, 1, n)
        return readout.Wproj((attn @ kv).squeeze(2))               # (B, L, V)

    torch.testing.assert_close(readout(x), as_listed(x), rtol=1e-4, atol=1e-5)
    for name, compute in ("Eq. 1 in our order", readout), ("the same, as in App. A", as_listed):
        start = time.perf_counter()
        compute(x).sum().backward()
        print(f"{name}: {1e3 * (time.perf_counter() - start):.0f} ms")
