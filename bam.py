"""BAM: Unsupervised Representation Learning by Balanced Self Attention Matching (Shalam and Korman, ECCV 2024, arXiv 2408.02014).

Each view of an image is described by its similarities to all views of the batch, without those of its own image. The loss makes
the views of an image agree on this description, with a balanced and sharpened form of it as the target. Images alone.

    symbol       name here            shape             where (n images of the global batch, k views of each)
    f, g, h      image_encoder, projector, readout      Sec. 3; z = g(h), h = f(x) is what is used later
    z            z                    (k n, E)          Sec. 3; latents, view by view, the large (global) views first
    S            S                    (k n, G n)        Sec. 3.1; cosines of all views with the G large ones
    A            attention            like S            Eq. 1; softmax of S / tau over a whole row
    S hat        mask_positives       like S            Eq. 3; without the similarities of an image's views with each other
    B            sinkhorn             (G n, G n)        Eq. 4; doubly stochastic, tau_B
    L_BAM        bam_loss             scalar            Eq. 5
    Z_m          teacher              (G n, E)          App. C; latents of the moving average

Differs from the paper:
  * B is not built. S is symmetric among the large views, so that B = diag(x) exp(S / tau_B) diag(y), and every half-step of Sinkhorn
    is a sum over rows: x = 1 / (K y), then y = 1 / (K x). Ranks exchange these vectors, one number a view. Loss and gradient are made
    some images at a time, the gradient in the place of S: there is one matrix of the size of S (two with a teacher).
  * mask="exclude", the default, leaves positives out of softmax and Sinkhorn, as the authors' code does; "zero" is Eq. 3 as printed.
  * Table 1's model without balancing has A itself as its target: --target softmax --tau-b 0.1, both.
  * With small views the columns of S are the large views alone, as in the authors' code; targets too are of large views.
  * Three Sinkhorn iterations, columns first, so that rows sum to one; the mean over pairs of views and images, not the sum.
  * normalization="block" of Table 1: each block is a distribution, and the loss is the mean over blocks.
  * target="onehot" is SimCLR's loss (arXiv 2002.05709): the other large views' columns are the target, one at a time; mask, tau_b,
    sinkhorn_iters and top_k have no part in it.
  * top_k keeps, as the authors' code does, the columns that are largest in the mean target of an image's views, scaled to the sum that
    the row had.
  * With a teacher, the teacher is what is evaluated and what boxes come from, as in the authors' code.
  * The last BatchNorm of the projector has no scale and shift; the projector's first weights are small, the teacher's momentum ends
    at 1 by half a cosine (authors' code).
  * BatchNorm of the projector is over the images of each view; the paper does not say, the authors' code takes it over all views. Over all,
    the tiny network told small from large views apart instead of images, and collapsed. A ResNet's own is over all views of a size.
  * The paper does not say whether ResNet-50 had a teacher: `r50` has none, and BatchNorm in the projector.
  * The learning rate of Sec. 4.1 is scaled by the batch for ResNet-50 (Table 9a has .3); ViT's .003 is taken as that of batch 4096.
  * Weights of linear and convolution layers alone decay; pixels are normalised by CLIP's mean and deviation, colour jitter is linear
    (common.py); in `tiny` the optimizer's second beta and eps are CLIP's.
  * Table 9b has one learning rate of the linear probe for each network; eval.py chooses it on a fifth of the training images.
  * Boxes of ContrastiveCrop: the map is enlarged, then scaled to [0, 1]; App. G scales first.

Not here: fine-tuning, semi-supervised and transfer learning, video segmentation, detection.

Run:     python train.py --method bam                        (the embedded world)
Result:  CIFAR-10, 300 steps of 128, k-NN .463 with two small views, .435 without (SimCLR .487 and .453, DINO .314, untrained .274);
         a sharper target, masked positives and BatchNorm prevent a collapse, balancing makes no difference (README).
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
from torch.autograd.function import once_differentiable
from torch.optim.swa_utils import get_ema_multi_avg_fn


@dataclass
class Config:
    target: Literal["balanced", "softmax", "onehot"] = "balanced"  # Eq. 4; without balancing; SimCLR
    mask: Literal["exclude", "zero", "none"] = "exclude"     # of positives: the authors' code; Eq. 3; Table 1 without
    normalization: Literal["global", "block"] = "global"     # Sec. 3.1; Table 1 without
    tau: Annotated[float, 0.001, 10] = 0.1                                         # temperature of A (Sec. 3.1)
    tau_b: Annotated[float, 0.001, 10] = 0.05                                      # tau_B, of the target (Sec. 3.4)
    sinkhorn_iters: Annotated[int, 1, 1000] = 3                                  # authors' code
    top_k: Annotated[int, 0, math.inf] = 0                                           # entries that a row of the target keeps (authors' code: 128); 0: all
    teacher: bool = True                                     # targets and columns of a moving average (App. C)
    ema: Annotated[float, 0, 1] = 0.995                                       # its momentum at first; half a cosine takes it to 1 (authors' code)
    readout: Literal["cls", "gap"] = "cls"                   # h: [CLS], or the mean of all tokens
    projector_width: Annotated[int, 1, math.inf] = 4096                              # of both hidden layers (App. C)
    projector_dim: Annotated[int, 1, math.inf] = 4096                                # E
    batch_norm: bool | None = None                           # after each layer of the projector; None: without a teacher (App. C)
    activation: Literal["gelu", "relu"] = "gelu"             # App. C: ReLU with a ResNet
    local_crops: Annotated[int, 0, 100] = 6                                     # small views of an image beside the two large ones (Sec. 3.5)
    local_size: Annotated[int, 1, math.inf] = 96                                     # pixels of a small view
    crop_least: Annotated[float, 0.01, 1] = 0.05                                 # least share of the image that a small view shows (authors' code)
    crop_border: Annotated[float, 0.01, 1] = 0.25                                # the largest share of small views, the least of large (authors' code)
    contrastive_crop: bool = True                            # crops around what [CLS] attends to (App. G)
    crop_start: Annotated[int, 0, math.inf] = 12_512                                 # steps of random crops before; App. G: 40 epochs
    crop_every: Annotated[int, 1, math.inf] = 6_256                                  # steps between looks at all images; App. G: 20 epochs
    crop_threshold: Annotated[float, 0, 1] = 0.1                              # of the attention, from 0 to 1, that a box holds (arXiv 2202.03278)
    crop_alpha: Annotated[float, 0.001, 100] = 0.6                                  # centres of crops are drawn in the box by Beta(alpha, alpha)


VIT = dict(batch=4096, steps=93_840, lr=3e-3, warmup=12_512, weight_decay=0.04, weight_decay_end=0.4, clip_grad=0.3, beta2=0.999,
           adam_eps=1e-8)
PRESETS = {  # settings of this file and of train.py by name; --flags go before them
    "tiny": dict(image_encoder="tiny", readout="gap", data="shapes:objects=1,background=0", batch=128, steps=600, lr=2e-3,
                 weight_decay=0.1, warmup=50, teacher=False, projector_width=1024, projector_dim=1024, local_crops=2, local_size=24,
                 crop_least=0.2, crop_border=0.5, contrastive_crop=False, crop_start=300, crop_every=150),
    # Sec. 4.1, App. C, Table 9a: 300 epochs of ImageNet's 1,281,167 images, 40 of them warm-up (ResNet: 10)
    "vit-s16": dict(image_encoder="ViT-S/16:cls=1,positions=sincos", **VIT),
    "vit-b16": dict(image_encoder="ViT-B/16:cls=1,positions=sincos", **VIT),
    "r50": dict(image_encoder="ResNet-50", readout="gap", activation="relu", teacher=False, contrastive_crop=False, optimizer="lars",
                batch=4096, steps=93_840, lr=4.8, warmup=3_128, weight_decay=1e-6, clip_grad=0.0),   # lr: 0.3 batch / 256
}
ELEMENTS = 2**22  # of S that the loss works on at a time
SETTLED = 100     # steps before a collapse is said: without BatchNorm all latents are alike at the start


def in_fp32(function):
    """Leave autocast and cast half-precision arguments up (float64 stays): a softmax at temperature .05 needs the digits."""

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


# Equations, as they are printed --------------------------------------------------------------------------------------

# a_i^j = softmax(s_i^j / tau)                                                                                       (Eq. 1)
@in_fp32
def attention(S, tau):
    """S: (rows, columns) similarities -> A, each row a distribution."""
    return (S / tau).softmax(-1)


# S(i, j) := 0 where i = j mod n                                                                                     (Eq. 3)
def mask_positives(S, n, value=0.0):
    """S: (k n, G n), view by view -> the same with `value` (-inf: left out) where row and column are views of one image."""
    rows, columns = (torch.arange(size, device=S.device) % n for size in S.shape)
    return S.masked_fill(rows[:, None] == columns, value)


# B = argmin_B' <-S, B'> - tau_B h(B'),  B' doubly stochastic                                                        (Eq. 4)
@in_fp32
def sinkhorn(S, tau, iters):
    """S: (m, m) -> B, (m, m): columns and rows of exp(S / tau) normalised in turn, `iters` times, rows last; in log space."""
    log_b = S / tau
    for _ in range(iters):
        log_b = log_b - log_b.logsumexp(0, keepdim=True)
        log_b = log_b - log_b.logsumexp(1, keepdim=True)
    return log_b.exp()


# L = sum_{j != j'} sum_i CE(b_i^j, a_i^j')                                                                          (Eq. 5)
def matching(B, A, n):
    """B: (G n, m) targets, A: (k n, m) attention, view by view, n images; positives that are left out are 0 in both. -> scalar, the
    mean over images and pairs of different views."""
    B, log_a = B.unflatten(0, (-1, n)), A.masked_fill(A == 0, 1).log().unflatten(0, (-1, n))     # (G, n, m), (k, n, m)
    pairs = [(j, other) for j in range(len(B)) for other in range(len(log_a)) if j != other]
    return -sum((B[j] * log_a[other]).sum(-1).mean() for j, other in pairs) / len(pairs)


# The loss, with one matrix -------------------------------------------------------------------------------------------


def positives(S, first=0):
    """S (k, b, W, G, n), rows of the images from `first` on -> a view of their similarities with their own views, (k, G, b)."""
    return S[:, :, 0, :, first : first + S.shape[1]].diagonal(dim1=1, dim2=3)


def similarities(z, c, mask, onehot):
    """z (k, n, E), c (W, G, n, E), normalised -> S (k, n, W, G, n), masked."""
    S = (z.flatten(0, 1) @ c.flatten(0, 2).T).view(*z.shape[:2], *c.shape[:3])
    if onehot:  # SimCLR leaves out the view itself alone
        positives(S).diagonal().fill_(-torch.inf)
    elif mask != "none":
        positives(S).fill_(-torch.inf if mask == "exclude" else 0.0)
    return S


def balance(S, tau, half_steps, over, parts, gather):
    """Sinkhorn on the rows that a rank has of a symmetric matrix. S (G, n, W, G, n) -> u, v: B = exp(S / tau + u + v).

    Columns and rows are normalised in turn, columns first. The matrix is symmetric: the sum over column c is the one over row c,
    which the rank of row c makes. over: the dimensions that are normalised together. u: (G, n, 1) of rows, or (G, n, G) of rows and
    the blocks of their columns; v: (1, W, G, n) of columns, or (G, W, G, n) of the blocks of their rows and columns.
    """
    G, n, W = S.shape[:3]
    u = S.new_zeros(G, n, 1 if len(over) == 3 else G)
    for _ in range(half_steps):
        v = gather(u.flatten(0, 1)).view(W, G, n, -1).permute(3, 0, 1, 2)
        u = torch.cat([-(S[:, part] / tau + v[:, None]).logsumexp(over, keepdim=True).flatten(2) for part in parts], 1)
    return u, v


def keep_largest(t, k):
    """Targets t (G, b, ...) -> of each image the k columns with the largest mean over its views, scaled to the row's sum; the others
    become 0."""
    rows = t.flatten(2)                                          # (G, b, W G n)
    places = rows.mean(0).topk(min(k, rows.shape[-1])).indices.expand(len(rows), -1, -1)
    values = rows.gather(-1, places)
    values *= rows.sum(-1, keepdim=True) / values.sum(-1, keepdim=True)
    return torch.zeros_like(rows).scatter_(-1, places, values).view_as(t)


class Matching(torch.autograd.Function):
    """Eq. 1 to 5 for one rank's rows. z (k, n, E) and c (W, G, n, E), normalised: latents of the own images, and of the large views
    of all W ranks' images, the own first; z_t (G, n, E): what makes the targets, None: the first G of z.
    -> loss, mean entropy of the rows of A and of B.
    """

    @staticmethod
    def forward(ctx, z, c, z_t, tau, tau_b, half_steps, mask, block, onehot, top_k, gather):
        (k, n, _), (W, G) = z.shape, c.shape[:2]
        over = (2, 4) if block else (2, 3, 4)                    # a distribution: the columns of one view, or all
        S = similarities(z, c, mask, onehot)                     # (k, n, W, G, n)
        S_t = S[:G] if z_t is None else similarities(z_t, c, mask, onehot)
        b = max(1, ELEMENTS // S[:, 0].numel())
        parts = [slice(i, i + b) for i in range(0, n, b)]
        if not onehot:
            u, v = balance(S_t, tau_b, half_steps, over, parts, gather)
        loss, entropy_a, entropy_b = z.new_zeros(3).unbind()
        for part in parts:
            log_a = S[:, part] / tau
            log_a -= log_a.logsumexp(over, keepdim=True)
            if onehot:
                t = torch.zeros_like(log_a[:G])
                positives(t, part.start).diagonal().fill_(1)
            else:
                log_b = S_t[:, part] / tau_b + u[:, part, None, :, None] + v[:, None]
                t = log_b.exp()                                  # (G, b, W, G, n), rows b_i^j
                entropy_b -= sum_p_log_q(t, log_b, part.start)
                t = keep_largest(t, top_k) if top_k else t
            wanted = t.sum(0).repeat(k, 1, 1, 1, 1)              # (k, b, W, G, n), sum over j != j' of b_i^j
            wanted[:G] -= t
            a = log_a.exp()
            loss -= sum_p_log_q(wanted, log_a, part.start)
            entropy_a -= sum_p_log_q(a, log_a, part.start)
            gradient = a.mul_(wanted.sum(over, keepdim=True)).sub_(wanted).div_(tau)
            if mask == "zero" and not onehot:                    # these are constants
                positives(gradient, part.start).zero_()
            S[:, part] = gradient                                # S is not needed any more
        blocks = G if block else 1
        ctx.pairs = G * (k - 1) * n * blocks
        ctx.save_for_backward(z, c, S)
        entropies = entropy_a / (k * n * blocks), entropy_b / (G * n * blocks)
        ctx.mark_non_differentiable(*entropies)
        return loss / ctx.pairs, *entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, *_):
        z, c, S = ctx.saved_tensors
        S, factor = S.flatten(0, 1).flatten(1), gradient / ctx.pairs             # (k n, W G n)
        grad_z = (S @ c.flatten(0, 2)).mul_(factor).view_as(z)
        grad_c = (S.T @ z.flatten(0, 1)).mul_(factor).view_as(c) if ctx.needs_input_grad[1] else None
        return grad_z, grad_c, *[None] * 9


def sum_p_log_q(p, log_q, first):
    """Over all entries; where q is 0, among the positives, p is 0 too, and log_q is set to 0 in place."""
    own = positives(log_q, first)
    own.masked_fill_(own == -torch.inf, 0)
    return torch.einsum("kbm,kbm->kb", p.flatten(2), log_q.flatten(2)).sum()


@torch.compiler.disable
@in_fp32
def bam_loss(z, n_views, teacher=None, n_global=None, tau=0.1, tau_b=0.05, iters=3, mask="exclude", normalization="global",
             target="balanced", top_k=0, gather=identity, entropies=False):
    """Eq. 5. z: (n_views * n, E) latents of n images, view by view, the n_global large views first (None: all views are large).

    teacher: (n_global * n, E) latents of a moving average, which make the targets and the columns (App. C). The other arguments are
    the fields of Config; iters: of Sinkhorn. gather: (m, ...) -> (world * m, ...), the own rows first, differentiable; every rank
    brings as many images. Returns a scalar, with entropies=True also the mean entropies of the rows of A and of B.
    Raises ValueError for shapes that do not fit, unknown words and a global batch of one image.
    """
    for name, value in (("mask", mask), ("normalization", normalization), ("target", target)):
        known = get_args(Config.__dataclass_fields__[name].type)
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}.")
    G = n_views if n_global is None else n_global
    if n_views < 2 or not 1 <= G <= n_views or len(z) % n_views:
        raise ValueError(f"{len(z)} latents are not {n_views} views, two or more, of the same images, {G} of them large.")
    if teacher is not None and teacher.shape != (G * len(z) // n_views, z.shape[1]):
        raise ValueError(f"The teacher must have {G} x {len(z) // n_views} latents of {z.shape[1]} numbers, not {tuple(teacher.shape)}.")
    z = F.normalize(z, dim=-1).unflatten(0, (n_views, -1))                       # (k, n, E)
    z_t = None if teacher is None else F.normalize(teacher.detach(), dim=-1).view(G, *z.shape[1:])
    c = gather((z[:G] if z_t is None else z_t).flatten(0, 1)).unflatten(0, (-1, *z[:G].shape[:2]))   # (W, G, n, E)
    if c[:, 0, :, 0].numel() < 2:
        raise ValueError("The loss compares an image with others: the global batch needs two or more.")
    if target == "onehot" and (G < 2 or normalization == "block"):
        raise ValueError("SimCLR's target is another large view, of two or more, among all columns: normalization is global.")
    half_steps = 2 * iters if target == "balanced" else 1        # the first alone, without columns: softmax
    loss, *found = Matching.apply(z, c, z_t, tau, tau_b, half_steps, mask, normalization == "block", target == "onehot", top_k, gather)
    return (loss, *found) if entropies else loss


# ContrastiveCrop (App. G) --------------------------------------------------------------------------------------------


def heat_boxes(heat, threshold, size):
    """heat (B, h, w), what the heads of [CLS] attend to, summed -> (B, 4), the box around all that is above `threshold` after each
    map is enlarged to size x size and scaled to [0, 1]: left, top, right, bottom as shares of the sides."""
    heat = F.interpolate(heat[:, None], size=(size, size), mode="bilinear", align_corners=False)[:, 0]
    low, high = heat.amin((1, 2), keepdim=True), heat.amax((1, 2), keepdim=True)
    seen = (heat - low) / (high - low).clamp(min=1e-12) > threshold                  # (B, size, size)
    sides = []
    for inside in (seen.any(1), seen.any(2)):                                        # columns, rows (B, size)
        n = inside.shape[1]
        first = inside.int().argmax(1)
        last = n - inside.flip(1).int().argmax(1)
        sides.append((first / n, last / n))
    (left, right), (top, bottom) = sides
    return torch.stack([left, top, right, bottom], dim=1)


def box_refreshes(args):
    """The steps before which the boxes of all images are made anew."""
    return range(args.crop_start, args.steps, args.crop_every) if args.contrastive_crop else ()


# Optimizer -----------------------------------------------------------------------------------------------------------


class LARS(torch.optim.Optimizer):
    """SGD with momentum, the gradient of each tensor scaled to the tensor's own norm (You et al. 2017, arXiv 1708.03888; Sec. 4.1).

    params, lr, weight_decay as of torch.optim.SGD; betas: its first is the momentum; eps: none is needed. A group with `decays`
    False is not scaled.
    """

    def __init__(self, params, lr=0.3, betas=(0.9, 0.0), eps=0.0, weight_decay=1e-6, trust=1e-3):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, trust=trust))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                update = p.grad + group["weight_decay"] * p
                if group.get("decays", True):
                    p_norm, u_norm = p.norm(), update.norm()
                    update *= torch.where((p_norm > 0) & (u_norm > 0), group["trust"] * p_norm / u_norm, 1.0)
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.sub_(group["lr"] * state["momentum"].mul_(group["betas"][0]).add_(update))


# Model ---------------------------------------------------------------------------------------------------------------


class BatchNorm(nn.BatchNorm1d):
    """Over the images of each view, of the global batch: N ranks normalise, and pass gradients, as one process would. x (k, n, d)"""

    def forward(self, x, gather):
        y = x.float()
        mean = gather(y.mean(1)[None]).mean(0)                   # (k, d)
        y = y - mean[:, None]
        variance = gather(y.square().mean(1)[None]).mean(0)
        y = y * (variance[:, None] + self.eps).rsqrt()
        return (y if self.weight is None else y * self.weight + self.bias).to(x.dtype)


class Projector(nn.ModuleList):
    """g (App. C): three layers, an activation after the first two, BatchNorm after each or none. h (k, n, d) -> z (k, n, E)"""

    def __init__(self, d, width, dim, batch_norm, activation):
        super().__init__()
        self.activation = {"gelu": F.gelu, "relu": F.relu}[activation]
        for i, (before, after) in enumerate(((d, width), (width, width), (width, dim))):
            self.append(nn.Linear(before, after, bias=not batch_norm))
            nn.init.normal_(self[-1].weight, std=0.02)
            if not batch_norm:
                nn.init.zeros_(self[-1].bias)
            if batch_norm:
                self.append(BatchNorm(after, affine=i < 2, track_running_stats=False))

    def forward(self, x, gather):
        for layer in self:
            if isinstance(layer, BatchNorm):
                x = layer(x, gather)
            else:
                x = layer(x if layer is self[0] else self.activation(x))
        return x


def uses_text(args):
    return False


def needs_cls(args):
    """The flag by which h is the image's [CLS] token, or crops follow its attention."""
    if args.contrastive_crop:
        return "--contrastive-crop"
    return "--readout cls" if args.readout == "cls" else ""


def check(args):
    if args.batch < 2:
        raise ValueError(f"--batch {args.batch} must be 2 or more: the loss compares an image with others.")
    if args.crop_least > args.crop_border:
        raise ValueError(f"--crop-least {args.crop_least} must not be above --crop-border {args.crop_border}.")
    if args.contrastive_crop and args.crop_start >= args.steps:
        raise ValueError(f"--crop-start {args.crop_start} leaves none of --steps {args.steps} to ContrastiveCrop: lower it, "
                         f"or give --no-contrastive-crop.")


def views(args):
    """The random views of an image, in the words of common.View: two large ones, then the small."""
    border, least = args.crop_border, args.crop_least
    if args.local_crops and args.local_size > args.image_size:
        raise ValueError(f"--local-size {args.local_size}, of small views, must not be above the {args.image_size} pixels of large ones.")
    large = dict(size=args.image_size, scale=(border, 1.0))
    kinds = [large | dict(blur=1.0), large | dict(blur=0.1, solarize=0.2),
             *[dict(size=args.local_size, scale=(least, border), blur=0.5)] * args.local_crops]
    return [kind | dict(alpha=args.crop_alpha) for kind in kinds]


class Model(nn.Module):
    """An image encoder and a projector that learn by BAM, with or without a teacher. What is evaluated is h, of the teacher if there
    is one.

    image_encoder(images) -> (B, N, image_width), [CLS] first if it has one, for images of any size. There is no text encoder.
    """

    takes_cls = True

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        if config.target == "onehot" and config.normalization == "block":
            raise ValueError("--target onehot is SimCLR's, over all columns: leave out --normalization block.")
        self.config, self.image_encoder = config, image_encoder
        batch_norm = not config.teacher if config.batch_norm is None else config.batch_norm
        self.projector = Projector(image_width, config.projector_width, config.projector_dim, batch_norm, config.activation)
        self.teacher = copy.deepcopy(self.student()).requires_grad_(False) if config.teacher else None
        self.train()

    def student(self):
        return nn.ModuleList([self.image_encoder, self.projector])

    def train(self, mode=True):
        """The teacher normalises by the batch as the student does, but drops nothing."""
        super().train(mode)
        for module in self.teacher.modules() if self.teacher else ():
            module.training = mode and isinstance(module, nn.modules.batchnorm._BatchNorm)
        return self

    def evaluated(self):
        """The encoder that is evaluated."""
        return self.teacher[0] if self.teacher else self.image_encoder

    def readout(self, tokens):
        """(B, N, d) -> h (B, d)"""
        return tokens[:, 0] if self.config.readout == "cls" else tokens.mean(1)

    def latents(self, network, views, gather):
        """k views (n, 3, s, s), two large ones first -> h (k, n, d) and z (k, n, E)."""
        encoder, projector = network
        h = torch.cat([self.readout(encoder(torch.cat(same))) for same in (views[:2], views[2:]) if same])
        h = h.unflatten(0, (len(views), -1))
        return h, projector(h, gather)

    def forward(self, batch, gather=identity):
        """batch: views, the two large ones first, each (B, 3, s, s) -> {"loss": scalar, and scalars to log}.

        entropy_a, entropy_b: of the rows of A and B; similarity: mean cosine of the latents of different images here;
        effective_rank: how many directions h takes in the global batch, (sum l)^2 / sum l^2 of the eigenvalues l of its covariance.
        """
        cfg, views = self.config, batch["views"]
        teacher = None
        if cfg.teacher:  # first, while no activations of the student are held
            with torch.no_grad():
                teacher = self.latents(self.teacher, views[:2], gather)[1].flatten(0, 1)
        h, z = self.latents(self.student(), views, gather)
        loss, entropy_a, entropy_b = bam_loss(z.flatten(0, 1), len(views), teacher, 2, cfg.tau, cfg.tau_b, cfg.sinkhorn_iters, cfg.mask,
                                              cfg.normalization, cfg.target, cfg.top_k, gather, entropies=True)
        return {"loss": loss, "entropy_a": entropy_a, "entropy_b": entropy_b, "similarity": mean_cosine(z[0].detach()),
                "effective_rank": effective_rank(gather(h[0].detach()))}

    def after_update(self, step, steps):
        """The teacher follows the student: theta_t = l theta_t + (1 - l) theta_s, l from `ema` to 1 by half a cosine."""
        if self.teacher:
            momentum = 1 - (1 - self.config.ema) * (1 + math.cos(math.pi * step / steps)) / 2
            get_ema_multi_avg_fn(momentum)(list(self.teacher.parameters()), list(self.student().parameters()), None)

    def warn(self, record):
        """What a record of the log says of a collapse, or None."""
        if record["step"] > SETTLED and record["similarity"] > 0.99:
            return "all latents are alike, the network has collapsed: lower --tau-b or --lr, or use --batch-norm."
        if record["step"] > SETTLED and record["effective_rank"] < 1.5:
            return "the features have one direction left, the network has collapsed: lower --tau-b or --lr, or use --batch-norm."
        return None

    def chance_loss(self, batch_size, mask, patches):
        """The loss when all similarities are equal; batch_size is global."""
        cfg = self.config
        if cfg.target == "onehot":
            return math.log(2 * batch_size - 1)
        columns = batch_size if cfg.normalization == "block" else 2 * batch_size
        return math.log(columns - (cfg.mask == "exclude") * columns / batch_size)

    def boxes(self, images):
        """(B, 3, H, W) -> (B, 4), where crops of these images are to lie."""
        return heat_boxes(self.head_maps(images).float().sum(1), self.config.crop_threshold, images.shape[-1])

    def head_maps(self, images):
        """(B, 3, H, W) -> (B, heads, h, w), what [CLS] attends to in the last block."""
        return self.evaluated().cls_attention(images)

    def encode_image(self, images):
        """(B, 3, H, W) -> h (B, d), normalised."""
        return F.normalize(self.readout(self.evaluated()(images)).float(), dim=-1)

    def probe_features(self, images):
        """(B, 3, H, W) -> what the linear probe sees (App. D.1): [CLS] beside the mean of the patches; the mean where h is the mean."""
        tokens = self.evaluated()(images).float()
        return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1) if self.config.readout == "cls" else tokens.mean(1)


@in_fp32
def mean_cosine(z):
    """Mean cosine of different rows of z (B, E)."""
    z = F.normalize(z, dim=-1)
    return (z.sum(0).square().sum() - len(z)) / (len(z) * max(1, len(z) - 1))


@in_fp32
def effective_rank(h):
    """(sum l)^2 / sum l^2 of the eigenvalues l of the covariance of h (B, d): d where all directions count alike, 1 where one does."""
    h = h - h.mean(0)
    gram = h @ h.T if len(h) < h.shape[1] else h.T @ h           # the same eigenvalues
    return gram.trace().square() / gram.square().sum().clamp(min=1e-30)


def compare(m, E=4096):
    """Print time and memory of loss and gradient for m latents of E numbers of m / 2 images: ours, and the equations as printed."""
    import resource  # Unix alone has it
    z = torch.randn(m, E, requires_grad=True)

    def printed():
        y = F.normalize(z, dim=-1)
        S = mask_positives(y @ y.T, m // 2, -torch.inf)
        return matching(sinkhorn(S.detach(), 0.05, 3), attention(S, 0.1), m // 2)

    before, report = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for name, loss in (("ours", lambda: bam_loss(z, 2)), ("as printed", printed)):   # the smaller first: a peak does not go down
        start = time.perf_counter()
        value = loss()
        value.backward()
        seconds = time.perf_counter() - start
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        report.append(f"{name}: loss {value.item():.5f}, {seconds:.2f} s, {peak:,.0f} MiB")
    print(f"{m} latents of {E}, S of {m * m * 4 / 2**20:,.0f} MiB; " + "; ".join(report))


if __name__ == "__main__":
    sizes = [int(text) for text in sys.argv[1:] if text.isdigit()]
    if len(sizes) != len(sys.argv) - 1 or len(sizes) > 2 or sizes and (sizes[0] < 4 or sizes[0] % 2):
        sys.exit("error: python bam.py [LATENTS [NUMBERS]]: an even number of latents, 4 or more, and the numbers of each.")
    # Made-up images of ten classes: a class, an image and a view each add noise, in directions that a network can tell apart.
    torch.manual_seed(0)
    B, d, classes = 128, 64, 10
    centres, signal = torch.randn(classes, 8), torch.randn(8, d) / 8**0.5
    nuisance = torch.randn(24, d) / 24**0.5
    network = nn.Sequential(nn.Linear(d, 128), nn.ReLU(), nn.Linear(128, 32))
    projector = Projector(32, 128, 64, batch_norm=True, activation="relu")
    optimizer = torch.optim.Adam([*network.parameters(), *projector.parameters()], lr=3e-3)

    def views_of(labels):
        image = centres[labels] + 0.3 * torch.randn(len(labels), 8)
        return torch.cat([image @ signal + 1.5 * torch.randn(len(labels), 24) @ nuisance for _ in range(2)])   # (2 n, d)

    def nearest(labels, x):
        h = F.normalize(x - x.mean(0), dim=-1)
        return (labels[(h @ h.T).fill_diagonal_(-1).argmax(1)] == labels).float().mean().item()

    for step in range(301):
        x = views_of(torch.randint(classes, (B,)))
        h = network(x)
        z = projector(h.unflatten(0, (2, -1)), identity).flatten(0, 1)
        loss, entropy_a, entropy_b = bam_loss(z, 2, entropies=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 60 == 0:
            labels = torch.randint(classes, (500,))
            x = views_of(labels)[:500]
            with torch.no_grad():
                print(f"step {step:3d}  loss {loss.item():.3f}  entropy of A {entropy_a.item():.2f}, of B {entropy_b.item():.2f}  "
                      f"nearest neighbour of the same class {nearest(labels, network(x)):.0%}, of the input {nearest(labels, x):.0%}")
    if sizes:  # python bam.py 8192 256: the loss of as many latents of 256 numbers
        compare(*sizes)
