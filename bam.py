"""BAM: Unsupervised Representation Learning by Balanced Self Attention Matching
(Shalam and Korman, ECCV 2024, arXiv 2408.02014). Images alone.

A view of an image is described by its similarities to the views of all other images of the
batch. The loss makes the views of one image agree: each predicts the balanced and sharpened
description of another.

    symbol   name here                 shape         where
    f, g     image_encoder, projector                Sec. 3; h = f(x) is what is used later
    z        z                         (k n, E)      Sec. 3; g(h), view by view, large first
    Z_m      teacher, z_m              (k n, E)      App. C; latents of a moving average
    S        similarities              (k n, W G n)  Sec. 3.1; cosines with all large views
    A        attention                 like S        Eq. 1; each row a distribution
    S hat    mask_positives            like S        Eq. 3; without views of the same image
    B        sinkhorn                  like S        Eq. 4; balanced
    L_BAM    matching, bam_loss        (n,), scalar  Eq. 5
    n images on each of W ranks; k views of an image, the first G of them large

Differs from the paper, as the authors' code does (what concerns a variant stands there):
  * Columns of S, and targets, are large views alone; rows of all views are balanced.
  * Positives are left out (mask="exclude"); "zero" is Eq. 3 as printed.
  * Three Sinkhorn iterations, columns first; a mean over pairs and images, not a sum.
  * With a teacher, the teacher is evaluated.

Not here: fine-tuning, semi-supervised and transfer learning, video segmentation, detection.
Run:     python train.py --method bam                        (the embedded world)
Result:  CIFAR-10, 300 steps of 128 images: k-NN .463; SimCLR .487, DINO .314, untrained .274.
"""

import copy
import functools
import math
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    target: Literal["balanced", "softmax", "onehot"] = "balanced"  # Eq. 4; A itself; SimCLR
    mask: Literal["exclude", "zero", "none"] = "exclude"  # positives: left out; Eq. 3; kept
    normalization: Literal["global", "block"] = "global"  # Sec. 3.1; Table 1 without
    tau: Annotated[float, 1e-3, 10] = 0.1  # temperature of A (Sec. 3.1)
    tau_b: Annotated[float, 1e-3, 10] = 0.05  # tau_B, temperature of B (Sec. 3.4)
    sinkhorn_iters: Annotated[int, 1, 1000] = 3  # iterations of Sinkhorn (authors' code)
    top_k: Annotated[int, 0, math.inf] = 0  # columns of a target (authors: 128); 0: all
    teacher: bool = True  # a moving average makes targets and columns (App. C)
    ema: Annotated[float, 0, 1] = 0.995  # momentum of the teacher at first; it ends at 1
    readout: Literal["cls", "gap"] = "cls"  # h: [CLS], or the mean of all tokens
    projector_width: Annotated[int, 1, math.inf] = 4096  # both hidden layers (App. C)
    projector_dim: Annotated[int, 1, math.inf] = 4096  # E (App. C)
    batch_norm: bool | None = None  # in the projector; None: without a teacher (App. C)
    activation: Literal["gelu", "relu"] = "gelu"  # in the projector; ResNet: ReLU (App. C)
    local_crops: Annotated[int, 0, 100] = 6  # small views beside two large ones (Sec. 3.5)
    local_size: Annotated[int, 1, math.inf] = 96  # pixels of a small view
    crop_least: Annotated[float, 0.01, 1] = 0.05  # smallest area of small views (authors)
    crop_border: Annotated[float, 0.01, 1] = 0.25  # their largest, smallest of large views
    contrastive_crop: bool = True  # crop around what [CLS] attends to (App. G)
    crop_start: Annotated[int, 0, math.inf] = 12_512  # first step with boxes: 40 epochs
    crop_every: Annotated[int, 1, math.inf] = 6_256  # steps that boxes last: 20 epochs
    crop_threshold: Annotated[float, 0, 1] = 0.1  # attention in a box (arXiv 2202.03278)
    crop_alpha: Annotated[float, 1e-3, 100] = 0.6  # centres: Beta(alpha, alpha) in the box


VIT = dict(batch=4096, steps=93_840, lr=3e-3, warmup=12_512, weight_decay=0.04, weight_decay_end=0.4, clip_grad=0.3,
           beta2=0.999, adam_eps=1e-8)
PRESETS = {
    "tiny": dict(image_encoder="tiny", readout="gap", data="shapes:objects=1,background=0", batch=128, steps=600,
                 lr=2e-3, weight_decay=0.1, warmup=50, teacher=False, projector_width=1024, projector_dim=1024,
                 local_crops=2, local_size=24, crop_least=0.2, crop_border=0.5, contrastive_crop=False,
                 crop_start=300, crop_every=150),
    # Sec. 4.1, App. C, Table 9a: 300 epochs of 1,281,167 images; warm-up 40, ResNet-50 10.
    # differs: ResNet-50's lr is .3 batch / 256, ViT's that of batch 4096 (released: .0048).
    "vit-s16": dict(image_encoder="ViT-S/16:cls=1,positions=sincos", **VIT),
    "vit-b16": dict(image_encoder="ViT-B/16:cls=1,positions=sincos", **VIT),
    "r50": dict(image_encoder="ResNet-50", readout="gap", activation="relu", teacher=False, contrastive_crop=False,
                optimizer="lars", batch=4096, steps=93_840, lr=4.8, warmup=3_128, weight_decay=1e-6, clip_grad=0.0),
}
CHUNK = 2**24  # entries of S that the loss works on at a time


def fp32(x):
    """Half precision -> float32, for a temperature of .05 needs the digits. float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def identity(x):
    return x


# Equations --------------------------------------------------------------------------------


# a_i^j = softmax(s_i^j / tau)                                                       (Eq. 1)
def attention(S, tau, log=False):
    """S (..., rows, columns) -> A, each row a distribution; or log A, where none underflows."""
    log_A = (fp32(S) / tau).log_softmax(-1)
    return log_A if log else log_A.exp()


# S(i, j) := 0 where i = j mod n                                                     (Eq. 3)
def mask_positives(S, rows, columns, mask="zero"):
    """S, and the number of the image that each of its rows and columns shows -> S hat."""
    if mask == "none":  # Table 1 without
        return S
    # differs: "exclude" leaves positives out of softmax and Sinkhorn (authors' code)
    value = 0.0 if mask == "zero" else -torch.inf
    return S.masked_fill(rows[:, None] == columns, value)


# B = argmin_B' <-S, B'> - tau_B h(B'),  B' doubly stochastic                        (Eq. 4)
def sinkhorn(S, tau, iters, gather=identity):
    """S (..., rows, columns) -> B: exp(S / tau), columns and rows normalised in turn.

    The rows have the sum 1. In the limit the columns have the same sum too: 1 if S is square,
    else rows / columns (so in the authors' code). With gather, S has the rows of this rank,
    and its columns come first. There is no gradient.
    """
    log_b = fp32(S.detach()) / tau
    del S  # as large as log_b
    for _ in range(iters):
        log_b -= over_ranks(log_b.logsumexp(-2, keepdim=True), gather)       # columns
        log_b -= log_b.logsumexp(-1, keepdim=True)                           # rows
    return log_b.exp_()


def over_ranks(sums, gather):
    """Log-sums of columns (..., 1, W m) over the rows of this rank -> over those of all."""
    ranks = gather(sums[None])                               # (W, ..., 1, W m), this one first
    m = sums.shape[-1] // len(ranks)
    # The r-th next rank has first, as its own m columns, what is block r here.
    rolled = [sums.roll(r * m, -1) for r, sums in enumerate(ranks)]
    return torch.stack(rolled).logsumexp(0)


# L = sum_{j != j'} sum_i CE(b_i^j, a_i^j')                                          (Eq. 5)
def matching(B, log_A):
    """B (G, n, m), log_A (k, n, m) -> (n,), of each image the mean over pairs of views."""
    log_A = log_A.masked_fill(log_A == -torch.inf, 0)        # left out; B is 0 there
    loss = 0
    for j, b in enumerate(B):
        for other, log_a in enumerate(log_A):
            if other != j:
                loss = loss - (b * log_a).sum(-1)
    return loss / (len(B) * (len(log_A) - 1))


def similarities(z, c, rows, columns, mask):
    """z (k, b, E), all views of b images, and c (W G n, E) -> S hat (k b, W G n).
    rows (k, b) and columns (W G n): the numbers of their images."""
    with torch.autocast(z.device.type, enabled=False):
        S = z.flatten(0, 1) @ c.T
    return mask_positives(S, rows.flatten(), columns, mask)


def match(z, B, rows, c, columns, mask, attend, tau):
    """z (k, b, E), B (G, b, W G n) -> (b,) losses of b images, (b,) entropies of A."""
    S = similarities(z, c, rows, columns, mask)
    log_A = attend(S, tau, log=True).unflatten(0, rows.shape)                # (k, b, W G n)
    entropy = torch.special.entr(log_A.detach().exp()).sum(-1).mean(0)
    return matching(B, log_A), entropy


again = functools.partial(checkpoint, match, use_reentrant=False)


@torch.compiler.disable
def bam_loss(z, n_views, teacher=None, n_global=None, tau=0.1, tau_b=0.05, iters=3,
             mask="exclude", normalization="global", target="balanced", top_k=0,
             gather=identity, entropies=False):
    """Eq. 1 to 5. z: (n_views * n, E) latents of n images, view by view, the n_global large
    views first (None: all are). teacher: the latents of a moving average, like z, for columns
    and targets (App. C). gather: (m, ...) -> (W m, ...), differentiable, the rows of this rank
    first; every rank brings n images. The other arguments are fields of Config. Returns a
    scalar; entropies=True: also the mean entropies of the rows of A and of B. Raises ValueError.
    """
    k, n, G = n_views, len(z) // n_views, n_views if n_global is None else n_global
    check_arguments(z, k, G, teacher, mask=mask, normalization=normalization, target=target)
    z = F.normalize(fp32(z), dim=-1).view(k, n, -1)
    z_m = z if teacher is None else F.normalize(fp32(teacher.detach()), dim=-1).view_as(z)
    c = gather(z_m[:G].flatten(0, 1))                        # (W G n, E), the columns of S
    if len(c) < 2 * G:
        raise ValueError("The loss compares images: the global batch needs two or more.")
    row = torch.arange(k * n, device=z.device).view(k, n)    # view by view
    column = torch.arange(len(c), device=z.device)           # rank by rank, view by view
    rows, columns = row % n, column // (G * n) * n + column % n              # their images
    balance, attend, blocks = sinkhorn, attention, 1
    if target == "onehot":  # SimCLR leaves out the latent itself alone; -1 is no row
        rows, columns, mask = row, column.masked_fill(column >= G * n, -1), "exclude"
    if normalization == "block":
        balance, attend, blocks = by_block(sinkhorn, k, n, G), by_block(attention, k, n, G), G

    with torch.no_grad():
        if target == "balanced":
            B = balance(similarities(z_m, c, rows, columns, mask), tau_b, iters, gather)
        elif target == "softmax":
            B = attend(similarities(z_m, c, rows, columns, mask), tau_b)
        else:
            B = torch.eye(G * n, len(c), dtype=z.dtype, device=z.device)
        # differs: a small view is no target of large ones, as in the authors' code
        B = B[: G * n].view(G, n, -1)
        entropy_b = torch.special.entr(B).sum(-1).mean()
        if top_k and target != "onehot":
            B = keep_largest(B, top_k)

    b, parts = max(1, CHUNK // (k * len(c))), []             # images at a time
    run = match if b >= n else again  # of several parts the backward pass makes each anew
    for part in zip(z.split(b, 1), B.split(b, 1), rows.split(b, 1)):
        parts.append(run(*part, c, columns, mask, attend, tau))
    loss, entropy_a = [torch.cat(values).mean() / blocks for values in zip(*parts)]
    return (loss, entropy_a, entropy_b / blocks) if entropies else loss


# Model ------------------------------------------------------------------------------------


class Model(nn.Module):
    """image_encoder(images of any size) -> (B, N, image_width), [CLS] first if there is one."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config, self.image_encoder = config, image_encoder
        self.projector = Projector(image_width, config)
        teacher = copy.deepcopy(self.student()).requires_grad_(False)
        self.teacher = teacher if config.teacher else None
        self.train()

    def student(self):
        return nn.ModuleList([self.image_encoder, self.projector])

    def train(self, mode=True):
        """The teacher normalises by the batch as the student does, but drops nothing."""
        super().train(mode)
        for module in self.teacher.modules() if self.teacher else ():
            module.training = mode and isinstance(module, nn.modules.batchnorm._BatchNorm)
        return self

    def readout(self, tokens):  # (B, N, d) -> h (B, d)
        return tokens[:, 0] if self.config.readout == "cls" else tokens.mean(1)

    def latents(self, network, views, gather):
        """k views (n, 3, s, s), two large ones first -> h (k, n, d) and z (k, n, E)."""
        encoder, projector = network
        sizes = [same for same in (views[:2], views[2:]) if same]
        h = torch.cat([self.readout(encoder(torch.cat(same))) for same in sizes])
        h = h.unflatten(0, (len(views), -1))
        return h, projector(h, gather)

    def forward(self, batch, gather=identity):
        """batch["views"]: (n, 3, s, s) each, two large ones first -> {"loss": scalar, others
        to log: entropies of A and B, mean cosine of latents, effective rank of h}."""
        cfg, views, teacher = self.config, batch["views"], None
        if self.teacher:  # first, while no activations of the student are held
            with torch.no_grad():
                teacher = self.latents(self.teacher, views, gather)[1].flatten(0, 1)
        h, z = self.latents(self.student(), views, gather)
        loss, entropy_a, entropy_b = bam_loss(
            z.flatten(0, 1), len(views), teacher, 2, cfg.tau, cfg.tau_b, cfg.sinkhorn_iters,
            cfg.mask, cfg.normalization, cfg.target, cfg.top_k, gather, entropies=True)
        return {"loss": loss, "entropy_a": entropy_a, "entropy_b": entropy_b,
                "similarity": mean_cosine(z[0].detach()),
                "effective_rank": effective_rank(gather(h[0].detach()))}

    def after_update(self, step, steps):
        """teacher = l teacher + (1 - l) student (App. C); l goes to 1 by half a cosine."""
        if self.teacher:
            l = 1 - (1 - self.config.ema) * (1 + math.cos(math.pi * step / steps)) / 2
            for p, p_student in zip(self.teacher.parameters(), self.student().parameters()):
                p.data.lerp_(p_student.data, 1 - l)

    # To read BAM, stop here. Below: evaluation, projector, variants, crops, LARS.

    def evaluated(self):
        """The image encoder that is evaluated: the teacher's, as in the authors' code."""
        return self.teacher[0] if self.teacher else self.image_encoder

    def encode_image(self, images):
        """(B, 3, H, W) -> h (B, d), normalised."""
        return F.normalize(self.readout(self.evaluated()(images)).float(), dim=-1)

    def probe_features(self, images):
        """What a linear probe sees: h, or [CLS] and the mean of the patches (App. D.1)."""
        tokens = self.evaluated()(images).float()
        if self.config.readout == "gap":
            return tokens.mean(1)
        return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1)

    def head_maps(self, images):
        """(B, 3, H, W) -> (B, heads, h, w), what [CLS] attends to in the last block."""
        return self.evaluated().cls_attention(images)

    def boxes(self, images):
        """(B, 3, H, W) -> (B, 4), where crops of these images are to lie (App. G)."""
        heat = self.head_maps(images).float().sum(1)
        return heat_boxes(heat, self.config.crop_threshold, images.shape[-1])

    def chance_loss(self, batch_size, mask, patches):
        """The loss when all similarities are equal; batch_size is global."""
        if self.config.target == "onehot":
            return math.log(2 * batch_size - 1)
        images = batch_size - 1 if self.config.mask == "exclude" else batch_size
        return math.log(images if self.config.normalization == "block" else 2 * images)

    def warn(self, record):
        """A sentence if the network has collapsed, or None. At first latents may be alike."""
        cosine, rank = record["similarity"], record["effective_rank"]
        if record["step"] <= 100 or cosine <= 0.99 and rank >= 1.5:
            return None
        return (f"the network has collapsed (mean cosine {cosine:.3f}, effective rank {rank:.1f}"
                "): lower --tau-b or --lr, or use --batch-norm.")


class BatchNorm(nn.BatchNorm1d):
    """Over the images of the global batch: N ranks normalise as one process would."""

    def forward(self, x, gather):  # x (k, n, d) -> the same shape
        # differs: each view alone; over all views the tiny network told small from large
        y = x.float()
        mean = gather(y.mean(1)[None]).mean(0)               # (k, d)
        y = y - mean[:, None]
        variance = gather(y.square().mean(1)[None]).mean(0)
        y = y * (variance[:, None] + self.eps).rsqrt()
        return (y if self.weight is None else y * self.weight + self.bias).to(x.dtype)


class Projector(nn.ModuleList):
    """g (App. C): three layers, each with BatchNorm or none, activations between them."""

    def __init__(self, d, config):
        super().__init__()
        self.activation = getattr(F, config.activation)
        batch_norm = not config.teacher if config.batch_norm is None else config.batch_norm
        width, dim = config.projector_width, config.projector_dim
        for before, after in ((d, width), (width, width), (width, dim)):
            self.append(nn.Linear(before, after, bias=not batch_norm))
            nn.init.normal_(self[-1].weight, std=0.02)       # as in the authors' code
            if batch_norm:  # differs: the last has no scale and shift (authors' code)
                self.append(BatchNorm(after, affine=len(self) < 5, track_running_stats=False))
            else:
                nn.init.zeros_(self[-1].bias)

    def forward(self, h, gather):  # h (k, n, d) -> z (k, n, E)
        for layer in self:
            if isinstance(layer, BatchNorm):
                h = layer(h, gather)
            else:
                h = layer(h if layer is self[0] else self.activation(h))
        return h


def mean_cosine(z):
    """Mean cosine of different rows of z (B, E)."""
    z = F.normalize(fp32(z), dim=-1)
    return (z.sum(0).square().sum() - len(z)) / (len(z) * max(1, len(z) - 1))


def effective_rank(h):
    """(sum l)^2 / sum l^2, l the eigenvalues of the covariance of h (B, d)."""
    h = fp32(h) - fp32(h).mean(0)
    with torch.autocast(h.device.type, enabled=False):
        gram = h @ h.T if len(h) < h.shape[1] else h.T @ h   # the same eigenvalues
    return gram.trace().square() / gram.square().sum().clamp(min=1e-30)


def check_arguments(z, k, G, teacher, **words):
    """Raise ValueError for arguments of bam_loss that do not fit."""
    for name, value in words.items():
        known = get_args(Config.__annotations__[name])
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}.")
    if k < 2 or not 1 <= G <= k or len(z) % k:
        raise ValueError(f"{len(z)} latents are not two or more views ({k}, {G} large).")
    if teacher is not None and teacher.shape != z.shape:
        raise ValueError(f"The teacher's latents must be of all views, {tuple(z.shape)}.")
    if words["target"] == "onehot" and (G < 2 or words["normalization"] == "block"):
        raise ValueError("SimCLR takes two or more large views, normalization is global.")


def by_block(function, k, n, G):
    """function of each block S_jj' (n, W n) alone: Table 1 without global norm."""

    def wrapper(S, *args, **kwargs):
        blocks = S.view(k, len(S) // k, -1, G, n).permute(0, 3, 1, 2, 4)  # (k, G, b, W, n)
        result = function(blocks.flatten(3), *args, **kwargs)
        return result.view(blocks.shape).permute(0, 2, 3, 1, 4).reshape(S.shape)

    return wrapper


def keep_largest(B, top_k):
    """B (G, n, m) -> of each image the columns with the largest mean over its views, scaled
    to the old sum of the row. # differs: the authors' code has it, the paper does not."""
    largest = B.mean(0).topk(min(top_k, B.shape[-1])).indices.expand(len(B), -1, -1)
    kept = torch.zeros_like(B).scatter(-1, largest, B.gather(-1, largest))
    return kept * B.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True)


# Settings, ContrastiveCrop, optimizer -----------------------------------------------------


def uses_text(args):
    return False


def needs_cls(args):
    """The flag that takes the [CLS] token, "" if none does."""
    readout = "--readout cls" if args.readout == "cls" else ""
    return "--contrastive-crop" if args.contrastive_crop else readout


def check(args):
    """Raise ValueError for settings that do not fit."""
    if args.batch < 2:
        raise ValueError(f"--batch {args.batch} must be 2 or more: the loss compares images.")
    if args.target == "onehot" and args.normalization == "block":
        raise ValueError("--target onehot is SimCLR's: leave out --normalization block.")
    if args.crop_least > args.crop_border:
        raise ValueError(f"--crop-least {args.crop_least} must not be above --crop-border.")
    if args.contrastive_crop and args.crop_start >= args.steps:
        raise ValueError(f"--crop-start {args.crop_start} must be below --steps {args.steps}: "
                         "lower it, or give --no-contrastive-crop.")


def views(args):
    """Two large views, then the small ones: arguments of common.View (BYOL's, Sec. 4.1)."""
    if args.local_crops and args.local_size > args.image_size:
        raise ValueError(f"--local-size must not be above the {args.image_size} of images.")
    large = dict(size=args.image_size, scale=(args.crop_border, 1.0), alpha=args.crop_alpha)
    small = large | dict(size=args.local_size, scale=(args.crop_least, args.crop_border))
    small = [small | dict(blur=0.5)] * args.local_crops
    return [large | dict(blur=1.0), large | dict(blur=0.1, solarize=0.2), *small]


def box_refreshes(args):
    """The steps before which the boxes of all images are made anew (App. G)."""
    return range(args.crop_start, args.steps, args.crop_every) if args.contrastive_crop else ()


def heat_boxes(heat, threshold, size):
    """Attention of [CLS], summed over heads (B, h, w) -> (B, 4), the box around all above
    `threshold`, a share of its range: left, top, right, bottom as shares of the sides."""
    # differs: the map is enlarged before it is scaled to [0, 1]; App. G scales first
    heat = F.interpolate(heat[:, None], (size, size), mode="bilinear")[:, 0]
    low, high = heat.amin((1, 2), keepdim=True), heat.amax((1, 2), keepdim=True)
    seen = (heat - low) / (high - low).clamp(min=1e-12) > threshold          # (B, size, size)
    columns, rows = seen.any(1), seen.any(2)                                 # (B, size)
    ways_in = columns, rows, columns.flip(1), rows.flip(1)   # from left, top, right, bottom
    steps = torch.stack([way.int().argmax(1) for way in ways_in], 1)         # (B, 4)
    return torch.cat([steps[:, :2], size - steps[:, 2:]], 1) / size


class LARS(torch.optim.Optimizer):
    """SGD with momentum betas[0]; gradients get the norms of weights (arXiv 1708.03888)."""

    def __init__(self, params, lr=0.3, betas=(0.9, 0), eps=0, weight_decay=1e-6, trust=1e-3):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, trust=trust))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                update = p.grad + group["weight_decay"] * p
                if group.get("decays", True):
                    scale = group["trust"] * p.norm() / update.norm()
                    update *= torch.where((scale > 0) & scale.isfinite(), scale, 1.0)
                if not self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                momentum = self.state[p]["momentum"]
                p.sub_(group["lr"] * momentum.mul_(group["betas"][0]).add_(update))


# What was found out: CIFAR-10 (k-NN) and the embedded world, 300 steps of 128 images
# * Sharpening prevents the collapse to uniform: with tau_B = tau both entropies rise to 5.4
#   of 5.5; with tau_B = tau / 2 balancing makes little difference (.442, without .437).
# * Positives must be masked, and the projector needs BatchNorm: .30 without one of them.
# * SimCLR is better with small views, and on shapes (.71, BAM .53): targets are relations
#   that the network sees already, so that it learns colours (.98) and not shapes (.36).
# * Global normalisation and blocks are level. A teacher lags behind in so few steps (.34).


if __name__ == "__main__":
    # Views that are never compared become alike (Sec. 3.2). bam.py 8192 256: one step alone
    import resource  # Unix alone has it
    m, E = [int(text) for text in sys.argv[1:]] or (256, 32)
    torch.manual_seed(0)
    z = torch.randn(m, E, requires_grad=True)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for step in range(1 if sys.argv[1:] else 241):
        loss, entropy_a, entropy_b = bam_loss(z, 2, entropies=True)
        loss.backward()
        if step % 60 == 0:
            cosine = F.cosine_similarity(*z.detach().chunk(2)).mean()
            print(f"step {step}: loss {loss:.5f}, entropy of A {entropy_a:.2f}, of B "
                  f"{entropy_b:.2f}, cosine of the two views {cosine:.2f}")
        z.data -= 200 * z.grad
        z.grad = None
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{time.perf_counter() - start:.2f} s, {peak:,.0f} MiB")
