"""BAM: Unsupervised Representation Learning by Balanced Self Attention Matching
(Shalam and Korman, ECCV 2024, arXiv 2408.02014). It learns from images alone.

A view of an image is described by its similarities to the views of all other images of the
batch. The loss makes the views of one image agree: the description of each predicts the
balanced and sharpened description of another.

    symbol    name here                  shape         where
    h = f(x)  image_encoder, readout     (k, n, d)     Sec. 3; the representation used later
    z = g(h)  projector, z               (k, n, E)     Sec. 3; large first; bam_loss has (k n, E)
    Z_m       teacher, z_m               (k n, E)      App. C; latents of a moving average
              c                          (m, E)        large views of Z or Z_m, of all ranks
    S, S hat  similarities               (k n, m)      Sec. 3.1, Eq. 3; cosines of z and c
    A         attention                  (k n, m)      Eq. 1; row a_i^j: view j of image i
    B         sinkhorn                   (k n, m)      Eq. 4; balanced; T in App. C
    L_BAM     matching, bam_loss         (n,), scalar  Eq. 5
    n images on each of W ranks, k views of an image, G of them large; m = W G n columns

The authors' code is https://github.com/DanielShalam/BAM at fd85871, named below (FILE:LINE), or
(LINE) of the last file. `python tests/parity.py bam PATH` trains their network and ours side by
side, with their weight decay, in float64: the relative difference of the losses of 40 steps is at
most 1.3e-15, with a teacher 3.9e-16.

Differs from the paper, as the authors' code does (search for "differs" for the other places):
  * Columns of S (bam_loss.py:141) and targets (106) are large views alone; all rows are balanced.
  * Positives are left out (mask="exclude"; bam_loss.py:63, 115); "zero" is Eq. 3 as printed.
  * Three Sinkhorn iterations (34), columns first (292); a mean over pairs and images (128), no sum.
  * With a teacher, the teacher is evaluated (eval_linear.py:129, utils.py:106).
Differs from the authors' code (in brackets): the ViT starts as CLIP's does and learns all (as
MoCo-v3's, utils.py:53, with fixed patch embeddings, vit.py:169). ViT-S has 6 heads (12, vit.py:259;
`ViT-S/16:heads=12`). The rate ends at 0 (1e-6, main_pretrain.py:112); its warm-up begins at peak /
warmup (0, utils.py:190) and has the peak at the same step. Jitter has BYOL's saturation .2,
Sec. 4.1 (.4, image_transforms.py:52), and turns hues in YIQ (HSV). Pixels have CLIP's mean and
deviation (ImageNet's, 59). [CLS] does not decay (it does, utils.py:603).
Not here: Fig. 1 (similarities of views, of a class, of others), MoCo-v3, MAE, BEiT (Tables 2 to 4),
SwAV (App. H), Tables 6, 7 (`eval.py --export` writes weights), CAFormer (8), k-means (App. I).
Run:     python train.py --method bam                        (the embedded world)
Result:  k-NN of shapes .498 +- .081, SimCLR .578, DINO .371, pixels .715, untrained .39; in 600
         steps .737, SimCLR .733 (linear probe .661, .793); with two views .311, SimCLR .554; on
         CIFAR-10's photos, 25 epochs, .563, SimCLR .573 (.565, .589); seeds 3-5.
"""

import contextlib
import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    target: Literal["balanced", "softmax", "onehot"] = "balanced"  # Eq. 4; as in Eq. 2; SimCLR
    mask: Literal["exclude", "zero", "none"] = "exclude"  # positives: left out; Eq. 3; kept
    normalization: Literal["global", "block"] = "global"  # of S; of its blocks (Table 1)
    tau: float = 0.1  # temperature of A (Sec. 3.1)
    tau_b: float = 0.05  # tau_B, of B (Sec. 3.4; lambda in App. F)
    sinkhorn_iters: int = 3  # iterations of Sinkhorn (authors' bam_loss.py:34)
    teacher: bool = True  # a moving average makes targets and columns (App. C)
    ema: float = 0.995  # the teacher's momentum; it ends at 1 (authors' main_pretrain.py:99, 261)
    readout: Literal["cls", "gap"] = "cls"  # h: [CLS], or the mean of all tokens
    projector_width: int = 4096  # both hidden layers (App. C)
    projector_dim: int = 4096  # E (App. C)
    batch_norm: bool | None = None  # in the projector; None: if no teacher (App. C)
    activation: Literal["gelu", "relu"] = "gelu"  # in the projector; ResNet: ReLU (App. C)
    local_crops: int = 6  # small views beside two large ones (Sec. 3.5)
    local_size: int = 96  # pixels of a small view (authors' main_pretrain.py:133)
    crop_least: float = 0.05  # smallest area of small views (authors' main_pretrain.py:132)
    crop_border: float = 0.25  # their largest, smallest of large views
    contrastive_crop: bool = True  # crop around what [CLS] attends to (App. G)
    crop_start: int = 12_512  # first step with boxes: 40 epochs
    crop_every: int = 6_256  # steps that boxes last: 20 epochs
    crop_threshold: float = 0.1  # a box has all above (arXiv 2202.03278)
    crop_alpha: float = 0.6  # centres: Beta(alpha, alpha) in the box


VIT = dict(batch=4096, steps=93_836, lr=3e-3, warmup=12_512, weight_decay=0.04, weight_decay_end=0.4, clip_grad=0.3,
           beta2=0.999, adam_eps=1e-8, probe="sgd")
PRESETS = {
    "tiny": dict(image_encoder="tiny", readout="gap", data="shapes:objects=1,background=0,palette=1,heldout=0",
                 batch=128, steps=300, lr=5e-4, weight_decay=0.1, warmup=25, teacher=False, projector_width=1024,
                 projector_dim=1024, local_crops=2, local_size=24, crop_least=0.2, crop_border=0.5,
                 contrastive_crop=False, crop_start=150, crop_every=75, probe="adamw"),
    # Sec. 4.1, App. C, Table 9a: 300 epochs of 1,281,167 images; warm-up 40, ResNet-50 10.
    # ResNet-50's lr .3 is read as per 256 images, ViT's .003 as it is; that ResNet-50 has no
    # teacher is our reading. The authors' vit_small.slurm differs: 400 epochs (34), lr .0048 (53)
    # that ends at .001 (54), boxes every 40 epochs (37). It asks for the largest 128 columns of a
    # target (64), but nothing sets the masking_fn that would take them (bam_loss.py:107).
    "vit-s16": dict(image_encoder="ViT-S/16:cls=1,positions=sincos", **VIT),
    "vit-b16": dict(image_encoder="ViT-B/16:cls=1,positions=sincos", **VIT),
    "r50": dict(image_encoder="ResNet-50", readout="gap", activation="relu", teacher=False, contrastive_crop=False,
                optimizer="lars", batch=4096, steps=93_836, lr=4.8, warmup=3_128, weight_decay=1e-6, clip_grad=0.0,
                probe="sgd"),
}
CHUNK = 2**24  # entries of S that the loss works on at a time


@contextlib.contextmanager
def in_fp32(*tensors):
    """`with in_fp32(x, y) as (x, y):` half precision is float32, float64 stays, autocast is off."""
    with torch.autocast(tensors[0].device.type, enabled=False):
        yield [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def identity(x):
    return x


# Equations --------------------------------------------------------------------------------


# a_i^j = softmax(s_i^j / tau)                                                       (Eq. 1)
def attention(S, tau, log=False):
    """S (..., rows, columns) -> A, each row a distribution; or log A, without underflow."""
    with in_fp32(S) as (S,):
        log_A = (S / tau).log_softmax(-1)
        return log_A if log else log_A.exp()


# S hat(i, j) = 0 if i = j (mod n), else S(i, j)                                     (Eq. 3)
def mask_positives(S, row_ids, column_ids, mask="zero"):
    """S (R, C) -> S hat. row_ids (R,), column_ids (C,): the number of each row's, column's image."""
    if mask == "none":  # Table 1 without pos. masking
        return S
    # differs: "exclude" leaves positives out of softmax and Sinkhorn (bam_loss.py:63, 115)
    value = 0.0 if mask == "zero" else -1e30  # exp gives 0; 0 * log A in Eq. 5 is no NaN
    return S.masked_fill(row_ids[:, None] == column_ids, value)


# S_jj'(i, i') = cos(z_i^j, z_i'^j'),  then S hat                                (Sec. 3.1)
def similarities(z, c, row_ids, column_ids, mask):
    """z (k, p, E), all views of p images, and c (m, E), both of length 1 -> S hat (k p, m).
    row_ids (k, p) and column_ids (m,): the numbers of the images."""
    with in_fp32(z, c) as (z, c):
        return mask_positives(z.flatten(0, 1) @ c.T, row_ids.flatten(), column_ids, mask)


# B = argmin_B' <-S, B'> - tau_B h(B'),  B' doubly stochastic                        (Eq. 4)
def sinkhorn(S, tau, iters, gather=identity):
    """S (..., rows, columns) -> B: K = exp(S / tau), columns and rows normalised in turn.

    Each row of B has the sum 1, each column in the limit rows / columns (bam_loss.py:289): 1 if S
    is square. With gather, S has the rows of this rank, and the columns of all. B has no gradient
    (Sec. 4.1).
    """
    with in_fp32(S.detach()) as (S,):
        log_K = S / tau
    del S  # it takes as much memory as log_K
    for _ in range(iters):
        log_K -= gather(log_K.logsumexp(-2, keepdim=True)[None]).logsumexp(0)  # columns
        log_K -= log_K.logsumexp(-1, keepdim=True)                             # rows
    return log_K.exp_()


# L_BAM = sum_{j != j'} sum_i CE(b_i^j, a_i^j'),  CE(b, a) = -<b, log a>             (Eq. 5)
def matching(B, log_A):
    """B (G, p, m), log A (k, p, m) -> (p,), of each image the mean over pairs of views."""
    loss = 0
    for j, b in enumerate(B):
        for other, log_a in enumerate(log_A):
            if other != j:
                loss = loss - (b * log_a).sum(-1)
    return loss / (len(B) * (len(log_A) - 1))


def matching_loss(z, B, c, row_ids, column_ids, mask, tau):
    """Eq. 1, 3 and 5 for z (k, n, E), c (m, E) and targets B (G, n, m), which are given
    -> the loss and the mean row entropies of A and of B, scalars."""
    def of_images(z, B, row_ids):
        S = similarities(z, c, row_ids, column_ids, mask)                # (k p, m)
        log_A = attention(S, tau, log=True).unflatten(0, row_ids.shape)  # (k, p, m)
        return matching(B, log_A), entropy(log_A.detach().exp()).mean(0)

    losses, entropies = in_parts(of_images, z, B, row_ids, size=len(z) * len(c))  # (n,) each
    return losses.mean(), entropies.mean(), entropy(B).mean()


def entropy(P):
    """The entropy of each row of P (..., m) -> (...)."""
    return torch.special.entr(P).sum(-1)


def unit_length(z):
    with in_fp32(z) as (z,):
        return F.normalize(z, dim=-1)


def bam_loss(z, n_views, teacher=None, n_global=None, tau=0.1, tau_b=0.05, iters=3,
             mask="exclude", normalization="global", target="balanced",
             gather=identity, entropies=False):
    """Eq. 1 to 5. z: (n_views * n, E) latents of n images, view by view, the n_global large
    views first (None: all are). teacher: such latents of a moving average, for columns and
    targets (App. C). gather: (N, ...) -> (W N, ...), differentiable, rank by rank; gather.rank is
    this one; every rank has n images. The others are Config's (iters: sinkhorn_iters). -> scalar;
    with entropies=True also mean row entropies of A, and of B. ValueError: bad input.
    """
    k, n = n_views, len(z) // n_views
    G = k if n_global is None else n_global
    check_arguments(z, k, G, teacher, mask=mask, normalization=normalization, target=target)
    z = z_m = unit_length(z).view(k, n, -1)
    if teacher is not None:
        z_m = unit_length(teacher.detach()).view(k, n, -1)
    c = gather(z_m[:G].flatten(0, 1))                                    # (m, E), columns of S
    if len(c) < 2 * G:
        raise ValueError("The loss compares images: the global batch needs two or more.")

    rank = getattr(gather, "rank", 0)
    row_ids = rank * n + torch.arange(n, device=z.device).expand(k, n)   # the numbers of images
    column_ids = gather(row_ids[:G].flatten())                           # (m,)
    if target == "onehot":
        found = simclr_loss(z, c, G, tau, gather)
    elif normalization == "block":
        S, S_m = (similarities(x, c, row_ids, column_ids, mask).view(k, n, -1) for x in (z, z_m))
        found = block_loss(S, S_m[:G], target, tau, tau_b, iters, gather)
    else:
        with torch.no_grad():  # the loss has no gradient through B (Sec. 4.1)
            if target == "balanced":
                B = sinkhorn(similarities(z_m, c, row_ids, column_ids, mask), tau_b, iters, gather)
            else:  # Eq. 2, but with tau_B (tau_B = tau: Table 1 without balancing)
                B = attention(similarities(z_m, c, row_ids, column_ids, mask), tau_b)
        # differs: Sec. 3.5 takes small views as targets, too; bam_loss.py:106 takes large ones
        B = B[: G * n].view(G, n, -1)
        found = matching_loss(z, B, c, row_ids, column_ids, mask, tau)
    return found if entropies else found[0]


# Model ------------------------------------------------------------------------------------


class Model(nn.Module):
    """image_encoder(images of any size) -> (B, N, image_width), [CLS] first if there is one."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config, self.image_encoder = config, image_encoder
        self.projector = Projector(image_width, config)
        self.teacher = None
        if config.teacher:
            self.teacher = copy.deepcopy(self.student()).requires_grad_(False)
        self.train()

    def student(self):
        return nn.ModuleList([self.image_encoder, self.projector])

    def train(self, mode=True):
        """The teacher normalises by the batch as the student does, but drops nothing."""
        super().train(mode)
        if self.teacher:
            for module in self.teacher.modules():
                module.training = mode and isinstance(module, nn.modules.batchnorm._BatchNorm)
        return self

    def readout(self, tokens):  # (B, N, d) -> h (B, d)
        return tokens[:, 0] if self.config.readout == "cls" else tokens.mean(1)

    def latents(self, network, views, gather):
        """k views (n, 3, s, s), two large ones first -> h (k, n, d) and z (k, n, E)."""
        encoder, projector = network
        by_size = [views[:2], views[2:]] if len(views) > 2 else [views]
        h = torch.cat([self.readout(encoder(torch.cat(same))) for same in by_size])
        h = h.unflatten(0, (len(views), -1))
        return h, projector(h, gather)

    def forward(self, batch, gather=identity):
        """batch["views"]: (n, 3, s, s) each, two large ones first -> {"loss": scalar, others
        to log: entropies of A and B, mean cosine of latents, effective rank of h}."""
        cfg, views, z_m = self.config, batch["views"], None
        if self.teacher:  # first, while no activations of the student are held
            with torch.no_grad():
                z_m = self.latents(self.teacher, views, gather)[1].flatten(0, 1)
        h, z = self.latents(self.student(), views, gather)
        loss, entropy_a, entropy_b = bam_loss(
            z.flatten(0, 1), len(views), z_m, n_global=2, tau=cfg.tau, tau_b=cfg.tau_b,
            iters=cfg.sinkhorn_iters, mask=cfg.mask, normalization=cfg.normalization,
            target=cfg.target, gather=gather, entropies=True)
        return {"loss": loss, "entropy_a": entropy_a, "entropy_b": entropy_b,
                "similarity": mean_cosine(z[0].detach()),
                "effective_rank": effective_rank(gather(h[0].detach()))}

    @torch.no_grad()
    def after_update(self, step, steps):
        """teacher = momentum * teacher + (1 - momentum) * student (App. C)."""
        if self.teacher:
            # the next step moves the authors' teacher, with its momentum (wrappers.py:103)
            done = (step + 1) / steps
            momentum = 1 - (1 - self.config.ema) * (1 + math.cos(math.pi * done)) / 2
            students = list(self.student().parameters())
            torch._foreach_lerp_(list(self.teacher.parameters()), students, 1 - momentum)

    # To read BAM, stop here. Below: evaluation, projector, variants, crops, LARS, fine-tuning.
    #
    # On any `backbone`, images -> (B, d), for `views`: two or more (n, 3, s, s), large ones first,
    # G of them; gather: identity, under DDP common.gather. "once": before the optimizer is made.
    #     projector = Projector(d, Config(teacher=False))                   # once; has BatchNorm
    #     h = torch.stack([backbone(view) for view in views])               # (k, n, d)
    #     z = projector(h, gather).flatten(0, 1)                            # (k n, E)
    #     loss = bam_loss(z, len(views), n_global=G, gather=gather)

    def evaluation_encoder(self):
        """The image encoder that is evaluated: the teacher's (eval_linear.py:129)."""
        return self.teacher[0] if self.teacher else self.image_encoder

    def encode_image(self, images):
        """(B, 3, H, W) -> h (B, d), normalised."""
        return F.normalize(self.readout(self.evaluation_encoder()(images)).float(), dim=-1)

    def probe_features(self, images):
        """What a linear probe sees: h, or [CLS] and the mean of the patches (App. D.1). The
        authors' script normalises them by BatchNorm (linear.slurm:35, eval_linear.py:362); the
        paper does not say so. differs: `tiny` trains the probe as SPARO's paper does
        (C.1), by AdamW and without augmentation."""
        tokens = self.evaluation_encoder()(images).float()
        if self.config.readout == "gap":
            return tokens.mean(1)
        return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1)

    def head_maps(self, images):
        """(B, 3, H, W) -> (B, heads, h, w), the attention of [CLS] in the last block. eval.py draws
        it at the run's size; Fig. 5 is of 512 pixels."""
        return self.evaluation_encoder().cls_attention(images)

    def boxes(self, images):
        """(B, 3, H, W) -> (B, 4), boxes in which the centres of crops lie (App. G)."""
        heat = self.head_maps(images).float().sum(1)
        return heat_boxes(heat, self.config.crop_threshold, images.shape[-1])

    def chance_loss(self, batch_size, mask, patches):
        """The loss if all similarities are equal, of two large views; batch_size is global."""
        if self.config.target == "onehot":
            return math.log(2 * batch_size - 1)
        images = batch_size - 1 if self.config.mask == "exclude" else batch_size
        return math.log(images if self.config.normalization == "block" else 2 * images)

    def warn(self, record):
        """A sentence if the network has collapsed, or None. At first latents may be alike."""
        cosine, rank = record["similarity"], record["effective_rank"]
        if record["step"] <= 100 or (cosine <= 0.99 and rank >= 1.5):
            return None
        return (f"the network has collapsed (mean cosine {cosine:.3f}, effective rank {rank:.1f}"
                "): lower --tau-b or --lr, or use --batch-norm.")


class BatchNorm(nn.BatchNorm1d):
    """Over the images of the global batch, in fp32: N ranks normalise as one process would."""

    def forward(self, x, gather):  # x (k, n, d) -> the same shape
        # differs: each view alone; over all views the tiny network told small from large
        y = x.float()
        mean = gather(y.mean(1)[None]).mean(0)               # (k, d)
        y = y - mean[:, None]
        variance = gather(y.square().mean(1)[None]).mean(0)
        y = y * (variance[:, None] + self.eps).rsqrt()
        if self.weight is not None:
            y = y * self.weight + self.bias
        return y.to(x.dtype)


class Projector(nn.ModuleList):
    """g (App. C): three layers, each with BatchNorm or none, activations between them."""

    def __init__(self, d, config):
        super().__init__()
        self.activation = getattr(F, config.activation)
        batch_norm = not config.teacher if config.batch_norm is None else config.batch_norm
        widths = [d, config.projector_width, config.projector_width, config.projector_dim]
        for i in range(3):
            self.append(nn.Linear(widths[i], widths[i + 1], bias=not batch_norm))
            nn.init.normal_(self[-1].weight, std=0.02)       # as heads.py:44
            if batch_norm:  # differs: the last has no scale and shift (heads.py:36)
                self.append(BatchNorm(widths[i + 1], affine=i < 2, track_running_stats=False))
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
    with in_fp32(z) as (z,):
        z = F.normalize(z, dim=-1)
        return (z.sum(0).square().sum() - len(z)) / (len(z) * max(1, len(z) - 1))


def effective_rank(h):
    """(sum e)^2 / sum e^2, where e are the eigenvalues of the covariance of h (B, d)."""
    with in_fp32(h) as (h,):
        h = h - h.mean(0)
        gram = h @ h.T if len(h) < h.shape[1] else h.T @ h   # the same eigenvalues
        return gram.trace().square() / gram.square().sum().clamp(min=1e-30)


def check_arguments(z, k, G, teacher, **settings):
    """Raise ValueError for arguments of bam_loss that do not fit."""
    for name, value in settings.items():
        known = get_args(Config.__annotations__[name])
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}.")
    if k < 2 or not 1 <= G <= k or len(z) % k:
        raise ValueError(f"{len(z)} latents are not two or more views ({k}, {G} large).")
    if teacher is not None and teacher.shape != z.shape:
        raise ValueError(f"The teacher's latents are {tuple(teacher.shape)}; they must be of all "
                         f"views, as the student's {tuple(z.shape)}.")
    if settings["target"] == "onehot" and (G < 2 or settings["normalization"] == "block"):
        raise ValueError("SimCLR takes two or more large views, and its normalization is global.")


def in_parts(function, *inputs, size):
    """function(*inputs), whose inputs hold n images in dimension 1 -> its results, each (n,). An
    image needs `size` numbers. If all need more than CHUNK, function gets a few images at a time,
    and the backward pass computes each part again."""
    p = max(1, CHUNK // size)  # images in a part
    if p >= inputs[0].shape[1]:
        return function(*inputs)
    parts = zip(*[x.split(p, 1) for x in inputs])
    found = [checkpoint(function, *part, use_reentrant=False) for part in parts]
    return [torch.cat(values) for values in zip(*found)]


# l(i, j) = -log softmax_{m != i}(cos(z_i, z_m) / tau)_j                (SimCLR, Eq. 1)
def simclr_loss(z, c, G, tau, gather=identity):
    """SimCLR (arXiv 2002.05709) in BAM's terms (App. H): z (k, n, E), c (m, E) -> as matching_loss.
    The target of a view is one-hot, at another view of its image. A row leaves out its own latent
    only, so that ids are numbers of latents here, not of images."""
    k, n, _ = z.shape
    rank = getattr(gather, "rank", 0)
    row_ids = rank * k * n + torch.arange(k * n, device=z.device).view(k, n)
    column_ids = gather(row_ids[:G].flatten())                               # (m,)
    B = (row_ids[:G, :, None] == column_ids).to(z.dtype)                     # (G, n, m)
    return matching_loss(z, B, c, row_ids, column_ids, "exclude", tau)


def block_loss(S, S_m, target, tau, tau_b, iters, gather):
    """Table 1 without global normalization: each block S_jj' (n, W n) has its own softmax and
    Sinkhorn. S (k, n, m), S_m (G, n, m) -> loss, entropies of A and B, means over j'."""
    G, n = S_m.shape[:2]
    S, S_m = (x.unflatten(2, (-1, G, n)) for x in (S, S_m))                  # (k, n, W, G, n)
    found = []
    for large in range(G):  # j'; the first dimension is j
        log_A = attention(S[:, :, :, large].flatten(2), tau, log=True)       # (k, n, W n)
        with torch.no_grad():
            blocks = S_m[:, :, :, large].flatten(2)                          # (G, n, W n)
            if target == "balanced":
                B = sinkhorn(blocks, tau_b, iters, gather)
            else:
                B = attention(blocks, tau_b)
            entropies = [entropy(x).mean() for x in (log_A.exp(), B)]
        found.append(torch.stack([matching(B, log_A).mean(), *entropies]))
    return torch.stack(found).mean(0).unbind()


# Settings, ContrastiveCrop, optimizer -----------------------------------------------------


def uses_text(args):
    return False


def needs_cls(args):
    """The flag that takes the [CLS] token, "" if none does."""
    if args.contrastive_crop:
        return "--contrastive-crop"
    return "--readout cls" if args.readout == "cls" else ""


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
    """Arguments of common.View (BYOL's, Sec. 4.1): two large views, then the small ones."""
    large = dict(size=args.image_size, scale=(args.crop_border, 1.0), alpha=args.crop_alpha)
    small = large | dict(size=args.local_size, scale=(args.crop_least, args.crop_border), blur=0.5)
    first, second = large | dict(blur=1.0), large | dict(blur=0.1, solarize=0.2)
    return [first, second] + args.local_crops * [small]


def box_refreshes(args):
    """The steps before which the boxes of all images are made anew (App. G)."""
    return range(args.crop_start, args.steps, args.crop_every) if args.contrastive_crop else ()


def heat_boxes(heat, threshold, size):
    """Attention of [CLS], summed over heads (B, h, w) -> (B, 4), the boxes around what is above
    `threshold` once scaled to [0, 1]: left, top, right, bottom as shares of the sides."""
    # differs: the map is enlarged before it is scaled to [0, 1]; App. G and the authors' code
    # (contrastive_croping_vit.py:38) scale first. Boxes hold their last row and column of pixels;
    # the authors' code (49) cuts both off.
    heat = F.interpolate(heat[:, None], (size, size), mode="bilinear")[:, 0]
    low, high = heat.amin((1, 2), keepdim=True), heat.amax((1, 2), keepdim=True)
    seen = (heat - low) / (high - low).clamp(min=1e-12) > threshold          # (B, size, size)
    columns, rows = seen.any(1), seen.any(2)                                 # (B, size)
    from_sides = columns, rows, columns.flip(1), rows.flip(1)  # left, top, right, bottom
    margins = torch.stack([x.int().argmax(1) for x in from_sides], 1)       # (B, 4), pixels
    return torch.cat([margins[:, :2], size - margins[:, 2:]], 1) / size


class LARS(torch.optim.Optimizer):
    """SGD with momentum betas[0] of updates scaled to the norm trust * |p| (arXiv 1708.03888).
    betas[1] and eps have no effect: train.py gives them to every optimizer."""

    def __init__(self, params, lr=0.3, betas=(0.9, 0), eps=0, weight_decay=1e-6, trust=1e-3):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, trust=trust))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            # all parameters at once: on a GPU a kernel for each would cost more than its work
            decay = torch._foreach_mul(params, group["weight_decay"])
            update = torch._foreach_add([p.grad for p in params], decay)
            if group.get("decays", True):  # not biases, norms, positions
                size, update_size = (torch.stack(torch._foreach_norm(x)) for x in (params, update))
                scale = group["trust"] * size / update_size                      # (n,)
                scale = torch.where((scale > 0) & scale.isfinite(), scale, 1.0)
                update = torch._foreach_mul(update, list(scale))
            momentum = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in params]
            torch._foreach_mul_(momentum, group["betas"][0])
            torch._foreach_add_(momentum, update)
            torch._foreach_sub_(params, torch._foreach_mul(momentum, group["lr"]))


# Fine-tuning (Sec. 4.3 to 4.5, Tables 3 to 5) ---------------------------------------------
#
# `train.py --finetune RUN` trains the image encoder of any method's run and a linear head.


@dataclass
class ClassifierConfig:
    # file of the names of labels 0, 1, ..., one a line; None: of class folders, of shapes
    classes: list | None = None
    label_fraction: str | None = None  # of each class, in (0, 1], or a FILE of image names
    smoothing: float = 0.1  # of the labels (DeiT's code, as all below)
    mixup: float = 0.8  # alpha of MixUp; 0: none
    cutmix: float = 1.0  # alpha of CutMix; 0: none
    rand_augment: bool = True  # two operations of magnitude 9 of 10
    erasing: float = 0.25  # how often a rectangle is erased
    drop_path: float = 0.1  # of the ViT, in place of --image-encoder's


class Classifier(nn.Module):
    """A linear head on [CLS], or on the mean of all tokens of an encoder without it."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config, self.image_encoder = config, image_encoder
        if "pos" in dict(image_encoder.named_buffers(recurse=False)):  # DeiT's code trains sin-cos
            image_encoder.pos = nn.Parameter(image_encoder.pos)
        self.head = nn.Linear(image_width, len(config.classes))
        nn.init.normal_(self.head.weight, std=0.02)  # as in DeiT's code
        nn.init.zeros_(self.head.bias)

    def readout(self, images):  # (B, 3, H, W) -> h (B, d)
        tokens = self.image_encoder(images)
        return tokens.mean(1) if self.image_encoder.cls is None else tokens[:, 0]

    def class_scores(self, images):  # -> (B, C)
        return self.head(self.readout(images)).float()

    def encode_image(self, images):  # -> (B, d), normalised
        return F.normalize(self.readout(images).float(), dim=-1)

    def forward(self, batch, gather=identity):
        """batch: images (B, 3, H, W) and labels (B,), or (B, C) where images are mixtures."""
        scores, smoothing = self.class_scores(batch["images"]), self.config.smoothing
        return {"loss": F.cross_entropy(scores, batch["labels"], label_smoothing=smoothing)}

    def chance_loss(self, batch_size, mask, patches):
        return math.log(self.head.out_features)


def augmentation(args):
    """Arguments of common.Augment."""
    return dict(classes=len(args.classes or ()), min_scale=args.crop_scale, mixup=args.mixup,
                cutmix=args.cutmix, rand_augment=args.rand_augment, erasing=args.erasing)


PLAIN = dict(smoothing=0.0, mixup=0.0, cutmix=0.0, rand_augment=False, erasing=0.0, drop_path=0.0)
DEIT = dict(image_encoder=PRESETS["vit-b16"]["image_encoder"], crop_scale=0.08, clip_grad=0.0, beta2=0.999,
            adam_eps=1e-8)
SEMI = dict(batch=512, steps=25_023, warmup=1251, weight_decay=0.3, **DEIT)
MOCO = DEIT | dict(batch=1024, lr=6e-5, weight_decay=0.1, crop_scale=0.05, rand_augment=False, erasing=0.0)
CLASSIFIER_PRESETS = {  # --finetune RUN brings its own encoder
    "tiny": dict(image_encoder="tiny", data=PRESETS["tiny"]["data"], batch=64, steps=100, lr=5e-4, weight_decay=0.05,
                 warmup=25, **PLAIN),
    # Table 3: 150 epochs, else DeiT's defaults (facebookresearch/deit, main.py: lr 5e-4 for 512
    # images, warm-up 5 epochs). differs: no moving average of the weights, no repeated
    # augmentation; the rate starts and ends at 0 (there 1e-6, 1e-5) and changes by step (there by
    # epoch). Steps are of all ImageNet, but for the rest of an epoch that fills no batch of one of
    # 8 GPUs: DeiT's loader drops it.
    "imagenet": dict(batch=1024, steps=187_650, lr=1e-3, warmup=6255, weight_decay=0.05, **DEIT),
    # Table 4: D.1's text says SGD, weight decay .3, a swept rate (.01 is ours, for the decay is
    # strong), Table 9c AdamW, 5e-5, and names no decay (.3 here). RandAugment is our reading of
    # D.1's "default" regularization. For 10 %; for 1 % --steps 2503 --warmup 125. DeiT's loader
    # drops an epoch's last, partial batch: it has 25,000 and 2,500 steps.
    "semi-sgd": dict(optimizer="sgd", lr=0.01, **SEMI),
    "semi-adamw": dict(lr=5e-5, **SEMI),
    # Table 5: MoCo-v3's (facebookresearch/moco-v3, transfer/: 8 x 128 images, lr 3e-4 for 512, 100
    # epochs, warm-up 3), its rates times .1 (D.3). Its datasets.py replaces DeiT's and only crops
    # and flips: its flowers' --reprob .25 has no effect. differs: bicubic, there bilinear.
    "cifar10": dict(steps=4800, warmup=144, **MOCO),
    "cifar100": dict(steps=4800, warmup=144, mixup=0.5, **MOCO),
    "flowers": dict(steps=100, warmup=3, mixup=0.0, cutmix=0.0, **MOCO | dict(weight_decay=0.3)),
    "pets": dict(steps=300, warmup=9, cutmix=0.0, drop_path=0.0, **MOCO),
}
CLASSIFIER = SimpleNamespace(  # what train.py and eval.py ask of a method
    Config=ClassifierConfig, PRESETS=CLASSIFIER_PRESETS, Model=Classifier, augment=augmentation,
    uses_text=lambda args: False, content=lambda args: "label",
    vit_settings=lambda args: {"drop_path": args.drop_path})


# What was found out on the embedded world (three seeds; * k-NN on CIFAR-10, 300 steps, one seed):
# * Sharpening prevents the collapse to uniform: with tau_B = tau the probe falls from .470 to .285,
#   without balancing, too, to .317. With tau_B = tau / 2 balancing makes no difference (without it
#   .468; of two views with it .421, without .453 *).
# * Positives must be masked (else .315), the projector needs BatchNorm (.30 *), blocks are no worse
#   than global normalisation (.470, .470).
# * A teacher, which has no BatchNorm: k-NN of CIFAR-10's photos, 25 epochs, .415, without .563. At
#   a tenth of the rate it is no better (after 5 epochs .31, of val, beside .32). With --batch-norm
#   it lags behind: on the world the effective rank of h after 60 steps is 1.2 with --ema .97, 1.4
#   with .8, 20 with 0, and 22 without a teacher (one seed each).
# * BAM gains on SimCLR of two views with the steps: probe .470, .576 in 300; .661, .659 in 600;
#   .906, .829 in 1,200 (above with four seeds of five: not shown). On CIFAR-10's photos it is below
#   with each seed: k-NN after 5, 15, 25 epochs .50, .55, .56, SimCLR .51, .57, .57.
# * Objects of eight colours teach it colours (.998), not shapes (.44, SimCLR .73; 600 steps, val):
#   targets are what the network sees already. Objects of one colour teach it shapes, at a low rate
#   (5e-4 .70, 2e-3 .42).
# * An update: 1.006 times DINO's FLOPs (Table 10: time .93): vit-s16, dino-s16 --readout cls, both
#   with --batch 2048 --local-crops 0.


if __name__ == "__main__":
    # The two views of an image are never compared, and yet become alike (Sec. 3.2).
    torch.manual_seed(0)
    z = torch.randn(256, 32, requires_grad=True)
    for step in range(241):
        loss, entropy_a, entropy_b = bam_loss(z, 2, entropies=True)
        loss.backward()
        if step % 60 == 0:
            cosine = F.cosine_similarity(*z.detach().chunk(2)).mean()
            print(f"step {step}: loss {loss:.5f}, entropy of A {entropy_a:.2f}, of B "
                  f"{entropy_b:.2f}, cosine of the two views {cosine:.2f}")
        z.data -= 200 * z.grad
        z.grad = None
