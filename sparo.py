"""SPARO: Selective Attention for Robust and Compositional Transformer Encodings for Vision (Vani et al., ECCV 2024,
arXiv 2404.15721).

An encoding is made of L slots, each the result of ONE attention head with a query of its own over the transformer's outputs: a
narrow pass, so that a slot holds one concept. In CLIP both towers have the same slots, and similarity is the mean over slots.

    symbol       name here            shape             where (B.2 is the paper's 0.B.2; K' is K transposed)
    H            x                    (B, n, d)         Sec. 3.1; all n outputs of a transformer, after its last LayerNorm
    q_l          Sparo.q              (1, L/g, g, 1, D) Eq. 1; learned query of slot l
    K_l          Sparo.KVproj         d -> (L/g) D      Eq. 1; learned key projection, shared by g = grp_size slots (App. A)
    W            Sparo.Wproj          D -> V            Eq. 1; learned, shared by all slots; W K_l is the value projection
    y_l          slots                (B, L, V)         Eq. 1
    y            normalize_slots      (B, L V)          Sec. 3.3; each slot normalised, divided by sqrt(L)
    sim          clip_loss            scalar            Eq. 2; y^i . y^t is the mean cosine of the slots
    m, theta     train_mask           (M,), (parts,)    Sec. 5.2, C.1; mask of an image's encoding, M = L V
    g_s, g_t, c  logits, center       (V, B, K), (K,)   DINO (arXiv 2104.14294), Eq. 3, 4; of student and teacher, V views

Differs from the paper:
  * Sparo is computed in another order, equal in values and gradients: the query does not depend on the input, so that
    K_l' q_l / sqrt(D) is one vector u_l of d numbers, and K_l is applied after the attention, to L vectors instead of n positions.
    The (B, n, L D) keys of the paper's listing are never built; listing=True computes as the listing does.
  * The bias of KVproj adds the same to all scores of a slot and drops out of the softmax; it reaches the values unchanged.
  * The end of a caption is WordPiece's [SEP]; the paper's tokenizer is CLIP's.
  * CLIP+GAP takes the mean in both towers, as Sec. 3 reads; the authors' code does so for images only. Of Table 6's variants
    without SPARO the whole encoding is normalised, not each slot: the paper does not say.
  * FDT is the paper's summary of B.2: one projection, scores divided by sqrt(E); the original's extra layers are left out.
  * Weight decay spares embeddings, positions and queries, images are flipped (train.py); OpenCLIP, which the authors trained with,
    decays all matrices and does not flip.
  * ResNet-50 is torchvision's, not CLIP's modified one; with it the text tower keeps its last block: so Table B.2's sizes come out
    (with CLIP's 49,408 tokens: --text-encoder 12x512:causal=1,vocab_size=49408).
  * Of the masks of C.1 the one with most right pairs is kept; the paper keeps the best in SugarCrepe's mean over categories. On the
    world they are trained on the split that they are evaluated on. eval.py keeps half or a quarter of the slots (Sec. 5.1: 32).
  * DINO: the whole gradient's norm is clipped, where DINO's code clips each parameter's; lr ends at 0, not 1e-6; only weights of
    layers decay, not [CLS], positions and q; the encoder begins as CLIP's does; pixels are normalised by CLIP's mean and deviation;
    positions are interpolated with antialiasing; colour jitter is linear (common.py). The linear probe trains by AdamW as CLIP's
    (C.1), on features as they are, without augmentation; DINO's takes SGD, 100 epochs, random crops and flips.

Not here: CLIP's own ResNet with attention pooling; visualisation of DINO's slots.

Run:     python train.py --method sparo                      (the embedded world, minutes on two cores)
         python train.py --method sparo --readout cls        (CLIP; gap: CLIP+GAP)
         python train.py --method sparo --objective dino     (DINO, images alone; --readout sparo, cls or gap)
Result:  zero-shot .933 (CLIP .725, CLIP+GAP .656), R@1 .876 / .809 (.596 / .542, .579 / .562), swapped attributes .727 (.494, .551);
         DINO's linear probe .467 (without SPARO .362), k-NN .267 (.275). Three seeds, one thread of an AMD EPYC, one learning rate
         for all; CLIP at its better one: zero-shot .881, R@1 .727 / .657 (README).
"""

import copy
import functools
import math
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


@dataclass
class Config:
    objective: Literal["clip", "dino"] = "clip"              # Sec. 3.3; Sec. 3.4
    readout: Literal["sparo", "cls", "gap", "attpool", "bottleneck", "fdt"] = "sparo"  # Sec. 3.2; Table 6; App. B.2
    L: Annotated[int, 1, math.inf] = 128                                             # slots; Sec. 4: 64 on Conceptual Captions and with DINO, 128 on LAION
    V: Annotated[int, 1, math.inf] = 64                                              # width of a slot
    D: Annotated[int, 1, math.inf] = 64                                              # width of a slot's key
    grp_size: Annotated[int, 1, math.inf] = 1                                        # slots that share a key projection (App. A)
    replace_block: bool = True                               # SPARO in the place of each tower's last block (Sec. 3.2, Table 6)
    heads: Literal["separate", "multi"] = "multi"            # attpool, Table 6: multi-head mixes the heads' outputs
    slot_norm: bool = False                                  # attpool, Table 6: LayerNorm of each slot instead of all together
    slot_projection: bool = False                            # attpool, Table 6: one projection for all slots, V -> V
    embed_dim: Annotated[int, 1, math.inf] = 512                                     # cls, gap: width of the encoding; bottleneck: M of B.2
    bottleneck: Annotated[int, 1, math.inf] = 64                                     # bottleneck: m of B.2
    codes: Annotated[int, 1, math.inf] = 16384                                       # fdt, B.2
    listing: bool = False                                    # compute SPARO as the paper's listing does: slower, for comparison
    init_scale: float = 1 / 0.07                             # CLIP (arXiv 2103.00020), Sec. 2.5
    # dino: the defaults of its authors' training of ViT-S, which the paper follows (C.2)
    out_dim: Annotated[int, 1, math.inf] = 65536                                     # dino: K, width of the distributions
    head_width: Annotated[int, 1, math.inf] = 2048                                   # dino: of the head's hidden layers
    head_bottleneck: Annotated[int, 1, math.inf] = 256                               # dino: width before the head's last layer
    student_temp: Annotated[float, 0.001, 10] = 0.1                                # dino: tau_s
    teacher_temp: Annotated[float, 0.001, 10] = 0.04                               # dino: tau_t
    center_momentum: Annotated[float, 0, 1] = 0.9                             # dino: of the teacher's mean output
    ema: Annotated[float, 0, 1] = 0.996                                       # dino: the teacher's momentum at first; half a cosine takes it to 1
    freeze_last: Annotated[int, 0, math.inf] = 0                                     # dino: steps in which the head's last layer rests; its paper: an epoch
    local_crops: Annotated[int, 0, 100] = 8                                     # dino: small views of an image beside the two large ones
    local_size: Annotated[int, 1, math.inf] = 96                                     # dino: pixels of a small view
    crop_least: Annotated[float, 0.01, 1] = 0.05                                 # dino: least share of the image that a small view shows
    crop_border: Annotated[float, 0.01, 1] = 0.4                                 # dino: share of the image that parts small from large views


CLIP_VIT = "cls=1,pre_norm=1,patch_bias=0,eps=1e-5"          # CLIP's image tower
PAPER = dict(text_encoder="12x512:causal=1", lr=5e-4, weight_decay=0.5, warmup=3600, batch=4096, clip_grad=0.0)
PRESETS = {  # settings of this file and of train.py by name; --flags go before them
    "tiny": dict(image_encoder="tiny:cls=1", text_encoder="tiny:causal=1", data="shapes", L=32, V=16, D=16, embed_dim=128,
                 batch=128, steps=600, lr=2e-3, weight_decay=0.1, warmup=50, out_dim=1024, head_width=256, head_bottleneck=64,
                 codes=512, ema=0.99, local_crops=2, local_size=24, crop_least=0.2, crop_border=0.5),
    # Sec. 4, Table C.3; steps: 25 epochs of the 12.8M pairs that the authors got of CC15M, 32 of the 320M of LAION-400M
    "cc15m-b32": dict(image_encoder=f"ViT-B/32:{CLIP_VIT}", L=64, steps=78_000, **PAPER),
    "cc15m-b16": dict(image_encoder=f"ViT-B/16:{CLIP_VIT}", L=64, steps=78_000, **PAPER),
    "cc15m-r50": dict(image_encoder="ResNet-50", L=128, V=32, D=32, steps=78_000, **PAPER),          # B.3; also with D=64
    "l400m-b32": dict(image_encoder=f"ViT-B/32:{CLIP_VIT}", L=128, steps=312_000,
                      **PAPER | dict(weight_decay=0.2, warmup=2000, batch=32768)),
    # Sec. 3.4, C.2: 100 epochs of ImageNet's 1,281,167 images on 8 GPUs, 10 of them warm-up; lr 5e-4 batch / 256
    "dino-s16": dict(image_encoder="ViT-S/16:cls=1,drop_path=0.1", objective="dino", L=64, batch=512, steps=250_200, lr=1e-3,
                     beta2=0.999, adam_eps=1e-8, weight_decay=0.04, weight_decay_end=0.4, warmup=25_020, clip_grad=3.0, freeze_last=2502),
}


def in_fp32(function):
    """Leave autocast and cast half-precision arguments up (float64 stays): a softmax at scale 100 needs the digits."""

    def cast(x):
        return x.to(torch.promote_types(x.dtype, torch.float32)) if torch.is_tensor(x) and x.is_floating_point() else x

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        device = next(x.device.type for x in (*args, *kwargs.values()) if torch.is_tensor(x))
        with torch.autocast(device, enabled=False):
            return function(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return wrapper


def identity(x):
    return x


# Equations -----------------------------------------------------------------------------------------------------------

# y = concat(y_1 / |y_1|, ..., y_L / |y_L|) / sqrt(L), so that y^i . y^t = mean_l sim(y^i_l, y^t_l)                (Eq. 2)
@in_fp32
def normalize_slots(y):
    """Slots (B, L, V) -> encoding (B, L * V) of length 1."""
    return F.normalize(y, dim=-1).flatten(1) / y.shape[1] ** 0.5


@in_fp32
def clip_loss(v, t, scale, gather=identity):
    """CLIP's loss. v, t: (B, M) normalised encodings of pairs; scale: 1 / temperature. Returns a scalar.

    gather: (B, M) -> (world * B, M) with the own rows first, differentiable; logits are local rows x global columns.
    """
    i = torch.arange(len(v), device=v.device)
    return (F.cross_entropy(scale * v @ gather(t).T, i) + F.cross_entropy(scale * t @ gather(v).T, i)) / 2


# mean over global x and x' != x of - P_t(x) log P_s(x'),  P_s = softmax(g_s / tau_s),  P_t = softmax((g_t - c) / tau_t)  (DINO Eq. 3)
@in_fp32
def dino_loss(student, teacher, center, student_temp, teacher_temp):
    """DINO's loss (Caron et al. 2021, Eq. 3), mean over images and pairs of views. student (V, B, K): logits of all views, the
    global ones first; teacher (G, B, K): of the global ones, without gradient; center (K,). -> scalar, and P_t (G, B, K).

    The sum over pairs is the product of the sums, without the pairs of a view with itself.
    """
    p_t = ((teacher.detach() - center) / teacher_temp).softmax(-1)       # (G, B, K)
    log_p_s = (student / student_temp).log_softmax(-1)                   # (V, B, K)
    G, V = len(teacher), len(student)
    every = (p_t.sum(0) * log_p_s.sum(0)).sum(-1).mean()
    same = (p_t * log_p_s[:G]).sum((0, 2)).mean()
    return (same - every) / (G * (V - 1)), p_t


def entropy(p):
    """Of distributions (..., K): the mean of their entropies, in nats."""
    return -(p * p.clamp(min=1e-30).log()).sum(-1).mean()


# Read-outs: (B, n, d), and of captions the index (B,) of the last token -> encoding ----------------------------------


def hide_after(eos_idx, n):
    """Index (B,) of the last token -> (B, n), True on the positions behind it."""
    return torch.arange(n, device=eos_idx.device) > eos_idx[:, None]


# y_l = W K_l H' softmax(H K_l' q_l / sqrt(D))                                                                     (Eq. 1)
class Sparo(nn.Module):
    """Separate-head attention read-out. d: width of x; L slots of width V, keys of width D, shared by grp_size slots.

    x (B, n, d), eos_idx (B,): positions behind it are not attended to -> slots (B, L, V), and with return_attn the
    attention (B, L, n). Parameters have the names of the paper's listing. Raises ValueError if grp_size does not divide L.
    """

    def __init__(self, d, L, V, D, grp_size=1, listing=False):
        super().__init__()
        if L % grp_size:
            raise ValueError(f"L={L} slots cannot share keys in groups of grp_size={grp_size}: give a divisor of L.")
        self.L, self.V, self.D, self.grp_size, self.nkeys, self.listing = L, V, D, grp_size, L // grp_size, listing
        self.q = nn.Parameter(torch.randn(1, self.nkeys, grp_size, 1, D))
        self.KVproj = nn.Linear(d, self.nkeys * D)
        self.Wproj = nn.Linear(D, V)
        nn.init.xavier_uniform_(self.KVproj.weight)
        nn.init.zeros_(self.KVproj.bias)
        nn.init.zeros_(self.Wproj.bias)

    def forward(self, x, eos_idx=None, return_attn=False):
        hidden = None if eos_idx is None else hide_after(eos_idx, x.shape[1])[:, None]  # (B, 1, n)
        pooled, attn = (self.as_listed if self.listing else self.absorbed)(x, hidden)   # (B, L, D), (B, L, n)
        y = self.Wproj(pooled)                                               # (B, L, V)
        return (y, attn) if return_attn else y

    def absorbed(self, x, hidden):
        B, _, d = x.shape
        K = self.KVproj.weight.view(self.nkeys, self.D, d)
        u = self.q[0, :, :, 0] @ K * self.D**-0.5                            # (nkeys, grp, d), u_l = K_l' q_l / sqrt(D)
        attn = softmax(F.linear(x, u.flatten(0, 1)).transpose(1, 2), hidden)  # (B, L, n)
        pooled = (attn @ x).view(B, self.nkeys, self.grp_size, d)            # p_l = H' a_l
        pooled = torch.einsum("bkgd,kDd->bkgD", pooled, K) + self.KVproj.bias.view(self.nkeys, 1, self.D)
        return pooled.flatten(1, 2), attn

    def as_listed(self, x, hidden):
        B, n, _ = x.shape
        kv = self.KVproj(x).view(B, n, self.nkeys, self.D).transpose(1, 2)   # (B, nkeys, n, D)
        scores = self.q[:, :, :, 0] @ kv.transpose(2, 3) * self.D**-0.5      # (B, nkeys, grp, n)
        attn = softmax(scores.flatten(1, 2), hidden)                         # (B, L, n)
        return (attn.view(B, self.nkeys, self.grp_size, n) @ kv).flatten(1, 2), attn


def softmax(scores, hidden):
    """Softmax over the last dimension, zero where `hidden` (or nothing, if None) is True."""
    return (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(-1)


class CrossAttention(nn.Module):
    """Table 6: one query per head attends to x with separate keys and values, M = L D in all; LayerNorm and projection follow,
    over all of M or slot by slot. With heads="multi" and neither slot-wise: the attentional pooler (AttPool). -> (B, L V)"""

    def __init__(self, d, L, V, D, heads, slot_norm, slot_projection):
        super().__init__()
        M = L * D
        self.L, self.slot_norm, self.slot_projection = L, slot_norm, slot_projection
        self.q = nn.Parameter(torch.randn(L, 1, D))
        self.k, self.v = nn.Linear(d, M), nn.Linear(d, M)
        self.mix = nn.Linear(M, M) if heads == "multi" else nn.Identity()
        self.norm = nn.LayerNorm(D if slot_norm else M)
        self.proj = nn.Linear(D, V) if slot_projection else nn.Linear(M, L * V)

    def forward(self, x, eos_idx=None):
        B, n, _ = x.shape
        k, v = (layer(x).view(B, n, self.L, -1).transpose(1, 2) for layer in (self.k, self.v))   # (B, L, n, D)
        seen = None if eos_idx is None else ~hide_after(eos_idx, n)[:, None, None]                # (B, 1, 1, n)
        y = F.scaled_dot_product_attention(self.q.expand(B, -1, -1, -1), k, v, seen)              # (B, L, 1, D)
        y = self.mix(y.flatten(1))                                                                # (B, L * D)
        y = self.norm(y.view(B, self.L, -1) if self.slot_norm else y).flatten(1)
        return self.proj(y.view(B, self.L, -1) if self.slot_projection else y).flatten(1)


@in_fp32
def sparsemax(z):
    """The point of the simplex nearest to z, along the last dimension (Martins & Astudillo 2016): softmax with exact zeros."""
    ordered = z.sort(-1, descending=True).values
    k = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    support = 1 + k * ordered > ordered.cumsum(-1)
    size = support.sum(-1, keepdim=True)
    threshold = ((ordered * support).sum(-1, keepdim=True) - 1) / size
    return (z - threshold).clamp(min=0)


class FDT(nn.Module):
    """Finite Discrete Tokens (B.2): each position scores the codes, the maximum over positions goes through sparsemax, and the
    encoding is that mixture of codes. codebook: (C, E), shared by the towers. -> (B, E)"""

    def __init__(self, d, codebook):
        super().__init__()
        self.codebook = codebook
        self.proj = nn.Linear(d, codebook.shape[1])

    def forward(self, x, eos_idx=None):
        scores = self.proj(x) @ self.codebook.T * self.codebook.shape[1] ** -0.5                  # (B, n, C)
        if eos_idx is not None:
            scores = scores.masked_fill(hide_after(eos_idx, x.shape[1])[..., None], -torch.inf)
        return sparsemax(scores.amax(1)) @ self.codebook                                          # (B, E)


class Pool(nn.Module):
    """CLIP: the output at [CLS] or at the end of the caption; with mean=True CLIP+GAP: the mean. Then `proj` -> (B, M)"""

    def __init__(self, proj, mean):
        super().__init__()
        self.proj, self.mean = proj, mean

    def forward(self, x, eos_idx=None):
        if not self.mean:
            return self.proj(x[:, 0] if eos_idx is None else x[torch.arange(len(x), device=x.device), eos_idx])
        if eos_idx is None:
            return self.proj(x.mean(1))
        return self.proj(x.masked_fill(hide_after(eos_idx, x.shape[1])[..., None], 0).sum(1) / (eos_idx[:, None] + 1))


def build_readouts(cfg, image_width, text_width):
    """The read-outs of both towers."""
    codebook = nn.Parameter(torch.randn(cfg.codes, cfg.embed_dim) * cfg.embed_dim**-0.5) if cfg.readout == "fdt" else None

    def linear(d, out, bias=False):
        layer = nn.Linear(d, out, bias=bias)
        nn.init.normal_(layer.weight, std=d**-0.5)
        return layer

    build = {
        "sparo": lambda d: Sparo(d, cfg.L, cfg.V, cfg.D, cfg.grp_size, cfg.listing),
        "cls": lambda d: Pool(linear(d, cfg.embed_dim), mean=False),
        "gap": lambda d: Pool(linear(d, cfg.embed_dim), mean=True),
        "attpool": lambda d: CrossAttention(d, cfg.L, cfg.V, cfg.D, cfg.heads, cfg.slot_norm, cfg.slot_projection),
        "bottleneck": lambda d: Pool(nn.Sequential(linear(d, cfg.bottleneck), nn.Linear(cfg.bottleneck, cfg.embed_dim)), False),
        "fdt": lambda d: FDT(d, codebook),
    }[cfg.readout]
    return build(image_width), build(text_width)


# Analyses ------------------------------------------------------------------------------------------------------------


def slot_accuracies(y_i, y_t, labels):
    """Zero-shot accuracy of each slot alone (Sec. 5.1). Slots y_i (n, L, V) of images, y_t (C, L, V) of classes, each of length 1
    or not; labels (n,) -> (L,)."""
    y_i, y_t = F.normalize(y_i, dim=-1), F.normalize(y_t, dim=-1)
    return torch.stack([((y_i[:, l] @ y_t[:, l].T).argmax(1) == labels).float().mean() for l in range(y_i.shape[1])])


# m = sigmoid( max(100, exp(alpha)) / 4 theta ); cross-entropy of max(100, exp(alpha)) cos(m y^i, y^p), ... cos(m y^i, y^n)    (C.1)
def train_mask(y_i, y_p, y_n, parts, epochs=100, batch=256, generator=None):
    """A mask of image encodings that tells captions from hard negatives (Sec. 5.2, C.1). y_i, y_p, y_n: (n, M) encodings of
    images, captions and negatives; parts: M' equal parts that are masked together, L for slots, M for single dimensions.

    Returns the mask (M,) in [0, 1] of the epoch that fits best, and the share of right pairs without it and with it. Raises
    ValueError if parts does not divide M. As printed in C.1 the scale is at LEAST 100, where CLIP's is at most 100.
    """
    (n, M), device = y_i.shape, y_i.device
    if M % parts:
        raise ValueError(f"Encodings of {M} dimensions have no {parts} equal parts.")
    theta = torch.zeros(parts, device=device, requires_grad=True)
    alpha = torch.tensor(math.log(100.0), device=device, requires_grad=True)
    optimizer = torch.optim.SGD([theta, alpha], lr=0.02, momentum=0.9)

    def mask():
        return torch.sigmoid(alpha.exp().clamp(min=100) / 4 * theta).repeat_interleave(M // parts)

    def logits(m, rows):
        pairs = torch.stack([F.cosine_similarity(m * y_i[rows], y[rows], dim=-1) for y in (y_p, y_n)], dim=1)
        return alpha.exp().clamp(min=100) * pairs                        # (b, 2)

    @torch.no_grad()
    def fit(m):
        pairs = logits(m, slice(None))
        return (pairs[:, 0] > pairs[:, 1]).float().mean().item()

    everything = torch.ones(M, device=device)
    start = fit(everything)
    best = (start, everything)
    for _ in range(epochs):
        for rows in torch.randperm(n, generator=generator).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(logits(mask(), rows), torch.zeros(len(rows), dtype=torch.long, device=device)).backward()
            optimizer.step()
        best = max(best, (fit(mask()), mask().detach()), key=lambda pair: pair[0])
    return best[1], start, best[0]


# Model ---------------------------------------------------------------------------------------------------------------


def replaced_blocks(args):
    """How many of each tower's last blocks the read-out replaces."""
    return int(args.readout == "sparo" and args.replace_block)


def needs_cls(args):
    """The flag that takes the image's [CLS] token, if any."""
    return f"--readout {args.readout}" if args.readout in ("cls", "bottleneck") else ""


def uses_text(args):
    """Whether the objective has a text tower."""
    return args.objective == "clip"


def check(args):
    if args.crop_least > args.crop_border:
        raise ValueError(f"--crop-least {args.crop_least} must not be above --crop-border {args.crop_border}.")


def views(args):
    """The random views of an image that the objective compares, in the words of common.View; None: one, and its caption."""
    if args.objective == "clip":
        return None
    border, least = args.crop_border, args.crop_least
    large = dict(size=args.image_size, scale=(border, 1.0))
    return [large | dict(blur=1.0), large | dict(blur=0.1, solarize=0.2),
            *[dict(size=args.local_size, scale=(least, border), blur=0.5)] * args.local_crops]


def model_class(args):
    return Model if args.objective == "clip" else Dino


class Model(nn.Module):
    """CLIP with a read-out on both towers (Sec. 3.3).

    image_encoder(images) -> (B, n, image_width), [CLS] first; text_encoder(tokens, mask) -> (B, L, text_width), causal.
    """

    takes_cls = True

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config = config
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.image_readout, self.text_readout = build_readouts(config, image_width, text_width)
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.init_scale)))
        self.slots, self.mask_parts = config.L if config.readout == "sparo" else 0, config.L

    def forward(self, batch, gather=identity):
        """batch: images (B, 3, H, W), tokens (B, L), mask (B, L) -> {"loss": scalar, and scalars to log}."""
        v, t = self.encode_image(batch["images"]), self.encode_text(batch["tokens"], batch["mask"])
        scale = self.log_scale.exp()
        return {"loss": clip_loss(v, t, scale, gather), "scale": scale.detach()}

    def after_update(self, step, steps):
        """Keep the scale within [1, 100], as CLIP does."""
        with torch.no_grad():
            self.log_scale.clamp_(0, math.log(100))

    def chance_loss(self, batch_size, mask, patches):
        """The loss when all similarities are equal; batch_size is global."""
        return math.log(batch_size)

    def normalize(self, y):
        return normalize_slots(y) if self.config.readout == "sparo" else F.normalize(y.float(), dim=-1)

    def image_slots(self, images):
        """(B, 3, H, W) -> the read-out's output: slots (B, L, V) of SPARO, else (B, M)."""
        return self.image_readout(self.image_encoder(images))

    def text_slots(self, tokens, mask):
        """(B, L), (B, L) -> like image_slots; the caption ends at its last token."""
        return self.text_readout(self.text_encoder(tokens, mask), mask.sum(1) - 1)

    def encode_image(self, images):
        """(B, 3, H, W) -> (B, M), normalised."""
        return self.normalize(self.image_slots(images))

    def attend(self, images, tokens, mask):
        """Attention and slots of pairs: (B, L, n) over the image's tokens, (B, L, n') over the caption's, (B, L, V), (B, L, V)."""
        y_i, over_image = self.image_readout(self.image_encoder(images), return_attn=True)
        y_t, over_text = self.text_readout(self.text_encoder(tokens, mask), mask.sum(1) - 1, return_attn=True)
        return over_image, over_text, y_i, y_t

    def encode_text(self, tokens, mask):
        """(B, L), (B, L) -> (B, M), normalised."""
        return self.normalize(self.text_slots(tokens, mask))


# DINO with SPARO (Sec. 3.4) ------------------------------------------------------------------------------------------


class DinoHead(nn.Module):
    """DINO's head: three layers, then the cosines with K directions, in fp32: they are divided by 0.04. x (B, M) -> (B, K)"""

    def __init__(self, M, K, width, bottleneck):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(M, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, bottleneck))
        self.last = nn.Linear(bottleneck, K, bias=False)
        for layer in (self.mlp[0], self.mlp[2], self.mlp[4]):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        return cosines(self.mlp(x), self.last.weight)


@in_fp32
def cosines(x, directions):
    """(B, E), (K, E) -> (B, K)"""
    return F.normalize(x, dim=-1) @ F.normalize(directions, dim=-1).T


class Dino(nn.Module):
    """DINO (arXiv 2104.14294) on a read-out: a student learns the distributions that its own moving average, the teacher, gives
    to other views of the image. The read-out's slots go into the head as they are. What is evaluated is the teacher.

    image_encoder(images) -> (B, n, image_width), [CLS] first, for images of any size; if it has layers(images, n), which gives the
    outputs of its last n blocks, the linear probe sees them. There is no text encoder.
    """

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        readouts = {"sparo": lambda: Sparo(image_width, config.L, config.V, config.D, config.grp_size, config.listing),
                    "cls": lambda: Pool(nn.Identity(), mean=False), "gap": lambda: Pool(nn.Identity(), mean=True)}
        if config.readout not in readouts:
            raise ValueError(f"--objective dino has --readout {', '.join(readouts)}, not {config.readout}.")
        self.config, self.image_encoder, self.readout = config, image_encoder, readouts[config.readout]()
        M = config.L * config.V if config.readout == "sparo" else image_width
        self.head = DinoHead(M, config.out_dim, config.head_width, config.head_bottleneck)
        self.teacher = copy.deepcopy(self.student()).requires_grad_(False)
        self.register_buffer("center", torch.zeros(config.out_dim))
        self.train()

    def student(self):
        return nn.ModuleList([self.image_encoder, self.readout, self.head])

    def train(self, mode=True):
        """The teacher normalises by the batch as the student does, but drops nothing."""
        super().train(mode)
        self.teacher.eval()
        for module in self.teacher.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.train(mode)
        return self

    def logits(self, network, views):
        """V views (B, 3, s, s), two large ones first -> (V, B, K); those of one size go through the encoder together."""
        encoder, readout, head = network
        y = [readout(encoder(torch.cat(same))).flatten(1) for same in (views[:2], views[2:]) if same]
        return head(torch.cat(y)).unflatten(0, (len(views), -1))

    def forward(self, batch, gather=identity):
        """batch: views, the two global ones first, each (B, 3, s, s) -> {"loss": scalar, and scalars to log}.

        entropy: of the teacher's distributions; entropy_mean: of their mean, over the images here. A collapse takes both to log K,
        or both to 0.
        """
        cfg = self.config
        with torch.no_grad():
            teacher = self.logits(self.teacher, batch["views"][:2])              # (2, B, K)
        student = self.logits(self.student(), batch["views"])                    # (V, B, K)
        loss, p_t = dino_loss(student, teacher, self.center, cfg.student_temp, cfg.teacher_temp)
        if self.training:  # c = m c + (1 - m) mean g_t(x)                       (DINO Eq. 4)
            mean = gather(teacher.mean((0, 1))[None]).mean(0)                    # (K,), over the global batch
            self.center.lerp_(mean, 1 - cfg.center_momentum)
        return {"loss": loss, "entropy": entropy(p_t), "entropy_mean": entropy(p_t.mean((0, 1)))}

    def before_update(self, step):
        """At first the head's last layer rests; without a gradient the optimizer does not begin to count its steps."""
        if step < self.config.freeze_last:
            self.head.last.weight.grad = None

    def after_update(self, step, steps):
        """The teacher follows the student: theta_t = l theta_t + (1 - l) theta_s, l from `ema` to 1 by half a cosine (DINO, Sec. 3.1)."""
        momentum = 1 - (1 - self.config.ema) * (1 + math.cos(math.pi * step / steps)) / 2
        get_ema_multi_avg_fn(momentum)(list(self.teacher.parameters()), list(self.student().parameters()), None)

    def chance_loss(self, batch_size, mask, patches):
        """The loss when all distributions are uniform."""
        return math.log(self.config.out_dim)

    def head_maps(self, images):
        """(B, 3, H, W) -> (B, heads, h, w), what the teacher's [CLS] attends to in the last block."""
        return self.teacher[0].cls_attention(images)

    def image_slots(self, images):
        """(B, 3, H, W) -> the teacher's read-out: slots (B, L, V) of SPARO, else (B, M)."""
        encoder, readout, _ = self.teacher
        return readout(encoder(images))

    def encode_image(self, images):
        """(B, 3, H, W) -> (B, M), normalised; SPARO's slots are not normalised one by one here."""
        return F.normalize(self.image_slots(images).flatten(1).float(), dim=-1)

    def probe_features(self, images):
        """(B, 3, H, W) -> what DINO's linear probe sees (C.2): [CLS] after each of the last four blocks, of which SPARO's slots, as
        they are, replace the last; CLIP+GAP's mean does too. Of an encoder without layers the read-out alone."""
        encoder, readout, _ = self.teacher
        if not hasattr(encoder, "layers"):
            return self.image_slots(images).flatten(1).float()
        replaced = self.config.readout == "sparo" and self.config.replace_block
        *before, last = encoder.layers(images, 3 if replaced else 4)
        before = [*before, last] if replaced else before
        return torch.cat([*(x[:, 0] for x in before), readout(last).flatten(1)], dim=1).float()


if __name__ == "__main__":
    # Made-up scenes of four attributes with ten values. Each of two "modalities" shows every attribute at a random position, in
    # vectors of its own; CLIP's loss must find which read-out of the one matches which of the other.
    torch.manual_seed(0)
    B, attributes, values, n, d = 64, 4, 10, 12, 32
    looks = [torch.randn(attributes, values, d) for _ in range(2)]
    readouts = [Sparo(d, 8, 8, 8) for _ in range(2)]
    optimizer = torch.optim.Adam([p for readout in readouts for p in readout.parameters()], lr=1e-2)
    for step in range(201):
        scene = torch.randint(values, (B, attributes))
        encodings, sharp = [], []
        for look, readout in zip(looks, readouts):
            x = 0.3 * torch.randn(B, n, d)
            place = torch.rand(B, n).argsort(1)[:, :attributes]              # (B, attributes)
            x.scatter_add_(1, place[..., None].expand(-1, -1, d), look[torch.arange(attributes), scene])
            y, attn = readout(x, return_attn=True)
            encodings.append(normalize_slots(y))
            sharp.append(attn.amax(-1).mean())
        loss = clip_loss(*encodings, 20.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            right = (encodings[0] @ encodings[1].T).argmax(1) == torch.arange(B)
            print(f"step {step:3d}  loss {loss.item():.3f}  pairs found {right.float().mean().item():.0%}  "
                  f"a slot's largest attention weight {sum(sharp).item() / 2:.2f} of 1")

    # The read-out of ViT-B/16 with L = V = D = 64, forward and backward, as Eq. 1 in our order and as the paper's listing.
    seconds, device = {}, "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(16, 197, 768, device=device, requires_grad=True)
    for listing in (False, True):
        readout = Sparo(768, 64, 64, 64, listing=listing).to(device)
        for attempt in range(4):
            start = time.perf_counter()
            readout(x).sum().backward()
            float(x.grad.sum())                                              # waits for a GPU
            seconds[listing] = min(seconds.get(listing, math.inf), time.perf_counter() - start)
    print(f"read-out of (16, 197, 768): {1e3 * seconds[False]:.1f} ms, as listed {1e3 * seconds[True]:.1f} ms: "
          f"{seconds[True] / seconds[False]:.1f} times as long")
