"""BAM: Unsupervised Representation Learning by Balanced Self Attention Matching
(Shalam and Korman, ECCV 2024, arXiv 2408.02014). Run: python train.py --method bam

BAM learns from images without captions. A batch has several views (random crops) of each image. The
attention of a view is the softmax of its similarities to the views of all other images. It must
match a target that is made from another view of the same image. Sinkhorn balances the targets, so
that all columns get the same total weight. A lower temperature sharpens the targets.

There are W ranks, with n images each; the paper's n is W n. An image has k views (n_views), and the
first G of them (n_global) are large; Model has G = 2. A representation has d numbers, a latent has
E numbers.

    symbol    name here                  shape         where
    h = f(x)  image_encoder, readout     (k, n, d)     Sec. 3; the representation, used later
    z = g(h)  projector, z               (k, n, E)     Sec. 3; latents; arrange makes |z| = 1
    Z_m       z_m, teacher in bam_loss   (k, n, E)     App. C; latents of the teacher, or z
    (none)    c                          (m, E)        z_m of all m = W G n large views: S's columns
    S, S hat  similarities               (k, n, m)     Eq. 3; rows z for A, z_m for B; columns c
    A         attention                  (k, n, m)     Eq. 1; row a_i^j: view j of image i
    B         sinkhorn, then B[:G]       (G, n, m)     Eq. 4; the targets; App. C calls them T
    tau       tau                        scalar        Eq. 1; temperature of A
    tau_B     tau_b                      scalar        Sec. 3.4; tau in Eq. 4, lambda in App. F
    L_BAM     image_losses, bam_loss     (n,), scalar  Eq. 5; CE: cross-entropy

The authors' code is https://github.com/DanielShalam/BAM at fd85871; (FILE:LINE) is a place in it.
`python tests/parity.py bam PATH` trains both, without BatchNorm; losses differ by about 1e-15.
Differs from the paper, as the authors' code does (search for "differs" for the rest):
  * Only large views are columns of S (bam_loss.py:141) and targets (bam_loss.py:106). Sec. 3.5
    leaves out only pairs of two small views.
  * S leaves out similarities of views of one image (bam_loss.py:63, 115). --mask zero is Eq. 3.
  * Sinkhorn has three iterations (bam_loss.py:34), and each begins with columns (bam_loss.py:292).
  * The loss is a mean over pairs of views and over images (bam_loss.py:128); Eq. 5 is a sum.
  * The teacher, if there is one, is evaluated (eval_linear.py:129); the paper does not say which.
Differs from the authors' code: BatchNorm in the projector has statistics of each view alone.
Not here: see the comment at Settings.
"""

import copy
import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(kw_only=True)
class Config:
    tau: float = 0.1      # temperature of the attention, > 0, at most 1 (Sec. 3.1)
    # temperature of the targets, > 0, at most 1. Below tau it sharpens them (Sec. 3.4, App. F)
    tau_b: float = 0.05
    sinkhorn_iters: int = 3  # Sinkhorn iterations of the targets, > 0 (authors' bam_loss.py:34)
    # similarities of views of one image. exclude: they are left out. zero: they are 0 (Eq. 3).
    # none: they are kept. self: 0 for a view with itself, others kept. Table 1's row without
    # masking is none or self: the paper leaves it open
    mask: Literal["exclude", "zero", "self", "none"] = "exclude"
    teacher: bool = True  # compute targets by a teacher, a moving average of the network (App. C)
    ema: float = 0.995    # first momentum of the teacher, <= 1. The last is 1 (main_pretrain.py:99)
    # representation of an image. cls: [CLS] (App. C). gap: the mean of all tokens, [CLS] too
    readout: Literal["cls", "gap"] = "cls"
    projector_width: int = 4096  # width of the projector's two hidden layers, > 0 (App. C)
    projector_dim: int = 4096  # width of the projector's output, the latents, > 0 (App. C)
    batch_norm: bool | None = None  # BatchNorm in the projector. None: if no teacher (App. C)
    activation: Literal["gelu", "relu"] = "gelu"  # of the projector. ResNet-50 has relu (App. C)


# Below the core: in_fp32, Gather, same_image, matching_loss, Projector, Teacher, by_size, to_log.


def fp32(function):
    """A decorator. It casts half-precision arguments to float32, keeps float64, and turns autocast
    off (in_fp32, below)."""
    @functools.wraps(function)
    def call(*args, **options):
        return in_fp32(function, *args, **options)
    return call


def all_ranks(x):
    """The default of every argument `gather`. It joins the rows x (R, ...) of all ranks to
    (world * R, ...), in the order of the ranks, with a gradient (Gather, below). Without a process
    group, it returns x. On several GPUs: dist.init_process_group, DDP(model), and equally many rows
    on each rank. To validate on one rank alone: model(batch, gather=lambda x: x), where model is
    not in DDP (Ranks, below)."""
    return Gather.apply(x) if dist.is_available() and dist.is_initialized() else x


# a_i^j = softmax(s_i^j / tau)                                                       (Eq. 1)
@fp32
def attention(S, tau, log=False):
    """S (..., rows, columns) -> A, whose rows sum to 1; with log=True log A, without underflow."""
    log_A = (S / tau).log_softmax(-1)
    return log_A if log else log_A.exp()


# L_SA-matching = sum_{j != j'} sum_i CE(a_i^j, a_i^j'),  CE(a, a') = -<a, log a'>   (Eq. 2)
# Eq. 2 is matching(A, log A), Eq. 5 is matching(B, log A). bam_loss takes the mean over i.
def matching(B, log_A):
    """Targets B (G, n, m), log A (k, n, m) -> the loss of each image (n,)."""
    G, k, loss = len(B), len(log_A), 0
    for j in range(G):
        for j2 in range(k):                                  # j2 is j'
            if j != j2:
                loss = loss - (B[j] * log_A[j2]).sum(-1)     # (n,)  CE(b_i^j, a_i^j')
    return loss / (G * (k - 1))  # differs: a mean over the pairs of views (bam_loss.py:128)


# S(p, q)     = cos(z_p, z_q),  p and q: any two views; Eq. 3 calls them i and j     (Sec. 3.1)
# S hat(p, q) = 0 if p and q show one image (the paper: i = j mod n), else S(p, q)   (Eq. 3)
@fp32
def similarities(z, c, is_same, mask="exclude"):
    """Rows z (k, n, E) and columns c (m, E) of length 1 -> S hat (k, n, m). is_same (k, n, m): the
    entries to mask: row and column show one image, or as `mask` says (same_image, below)."""
    S = z @ c.T                                                          # (k, n, m)
    # differs: exclude (header). -1e30 stands for -inf, because 0 * -inf in Eq. 5 would be NaN.
    return S.masked_fill(is_same, -1e30 if mask == "exclude" else 0.0)


# B = argmin_B' <-S, B'> - tau_B entropy(B'),  B' doubly stochastic                  (Eq. 4)
# Sinkhorn: K = exp(S / tau_B), then repeat K / row sums, K / column sums            (Sec. 3.3)
@fp32
@torch.no_grad()
def sinkhorn(S, tau, iters, *, gather=all_ranks):
    """S (..., rows, columns) of this rank, tau: tau_B -> B, without gradient. Rows sum to 1.
    differs: S of all ranks has k rows and G columns for each image (the paper's is square), so
    columns sum to about k / G, not 1 (bam_loss.py:289)."""
    log_K = S / tau                                      # tau is tau_B
    for _ in range(iters):                               # differs: columns first
        sums = log_K.logsumexp(-2, keepdim=True)         # (1, m), log sums over this rank's rows
        log_K -= gather(sums[None]).logsumexp(0)         # columns: (1, 1, m) -> (W, 1, m) -> (1, m)
        log_K -= log_K.logsumexp(-1, keepdim=True)       # rows
    return log_K.exp_()


# L_BAM = sum_{j != j'} sum_i CE(b_i^j, a_i^j')                                      (Eq. 5)
# image_losses has the part of each i. bam_loss is their mean (differs: not the sum).
def image_losses(z, B, is_same, c, mask, tau):
    """Rows z (k, n, E), targets B (G, n, m) -> the loss of each image (n,), and log A (k, n, m)."""
    log_A = attention(similarities(z, c, is_same, mask), tau, log=True)      # (k, n, m)
    return matching(B, log_A), log_A


def bam_loss(z, n_views, teacher=None, n_global=None, *, tau=0.1, tau_b=0.05, iters=3,
             mask="exclude", gather=all_ranks, entropies=False):
    """z (n_views * n, E): latents of n images, view after view, large views first -> L_BAM, a
    scalar; with entropies=True also the mean entropies of A's and of B's rows (Fig. 3).

    teacher: z_m (k n, E), the teacher's latents, for targets and columns (App. C); None: z_m is z.
    n_global: number of large views; None: all views are large. tau, tau_b, iters, mask: see Config
    (iters is sinkhorn_iters there). All ranks have n images.
    """
    G = n_views if n_global is None else n_global
    z, z_m, c, is_same = arrange(z, n_views, G, teacher, mask, gather)
    with torch.no_grad():  # targets have no gradient (Sec. 4.1)
        S_hat = similarities(z_m, c, is_same, mask)                          # (k, n, m)
        B = sinkhorn(S_hat.flatten(0, 1), tau_b, iters, gather=gather)       # (k n, m)
    B = B.view(S_hat.shape)[:G]     # (G, n, m)  differs: small views balance, but are no targets
    # loss = image_losses(z, B, is_same, c, mask, tau)[0].mean(), in less memory (below)
    loss, entropy_a, entropy_b = matching_loss(z, B, c, is_same, mask, tau)
    return (loss, entropy_a, entropy_b) if entropies else loss


@fp32
def arrange(z, n_views, n_global, z_m, mask, gather):
    """Latents z, z_m (k n, E), z_m may be None -> z, z_m (k, n, E) and the columns c (m, E), all of
    length 1, and is_same (k, n, m)."""
    z = F.normalize(z, dim=-1).unflatten(0, (n_views, -1))               # (k, n, E)
    z_m = z if z_m is None else F.normalize(z_m.detach(), dim=-1).view(z.shape)
    c = gather(z_m[:n_global].flatten(0, 1))  # (m, E)  differs: columns of large views alone
    return z, z_m, c, same_image(z, n_global, c, mask)


class Model(nn.Module):
    """An image encoder f, a projector g and, with config.teacher, a moving average of both.
    image_encoder(images of any size) -> tokens (images, N, image_width), [CLS] first;
    image_encoder.cls is None if there is no [CLS]. text_encoder and text_width are not used. Call
    after_update after each update."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config, self.image_encoder = config, image_encoder
        self.projector = Projector(image_width, config)        # three linear layers (below)
        self.teacher = Teacher(self.student()) if config.teacher else None  # a copy (below)

    def student(self):
        return nn.ModuleList([self.image_encoder, self.projector])

    def forward(self, batch, gather=all_ranks):
        """batch["views"]: list of k views (n, 3, s, s), two large first -> {"loss", scalars}."""
        views, z_m = batch["views"], None
        if self.teacher:  # first, so that the student's activations are not yet in memory
            with torch.no_grad():
                z_m = self.latents(self.teacher, views, gather)[1].flatten(0, 1)  # (k n, E)
        h, z = self.latents(self.student(), views, gather)
        loss, *entropies = self.loss(z.flatten(0, 1), len(views), z_m, gather)
        return {"loss": loss, **to_log(h, z, gather, *entropies)}

    def latents(self, network, views, gather):  # -> h (k, n, d), z (k, n, E)
        encoder, projector = network
        batches = by_size(views)  # one batch of images for each size (below)
        h = torch.cat([self.readout(encoder(images)) for images in batches])    # (k n, d)
        h = h.unflatten(0, (len(views), -1))
        return h, projector(h, gather)

    def readout(self, tokens):  # (images, N, d), N tokens of an image -> h (images, d)
        return tokens[:, 0] if self.config.readout == "cls" else tokens.mean(1)

    def loss(self, z, n_views, z_m, gather):  # Ablation (below) has other losses
        cfg = self.config
        return bam_loss(z, n_views, z_m, n_global=2, tau=cfg.tau, tau_b=cfg.tau_b,
                        iters=cfg.sinkhorn_iters, mask=cfg.mask, gather=gather, entropies=True)

    @torch.no_grad()
    def after_update(self, step, steps):
        """teacher = momentum * teacher + (1 - momentum) * student (Sec. 3.5)."""
        if self.teacher:
            # The momentum rises to 1 (main_pretrain.py:261). step + 1: the authors make this update
            # at the start of the next step (wrappers.py:103).
            cosine = math.cos(math.pi * ((step + 1) / steps))
            momentum = 1 - (1 - self.config.ema) * (1 + cosine) / 2
            students = list(self.student().parameters())
            torch._foreach_lerp_(list(self.teacher.parameters()), students, 1 - momentum)

    def evaluation_encoder(self):  # the teacher's, if there is one, as in eval_linear.py:129
        return self.teacher[0] if self.teacher else self.image_encoder

    def encode_image(self, images):  # (n, 3, s, s) -> h (n, d), normalised
        return F.normalize(self.readout(self.evaluation_encoder()(images)).float(), dim=-1)


# To read BAM, stop here. ------------------------------------------------------------------
#
# BAM's loss for another `backbone`, a function of images (n, 3, s, s) -> h (n, d). `views` is a
# list of two or more tensors (n, 3, s, s), the G large views first. A wrong order of views or
# images, or a forgotten n_global, raises no error.
#     projector = Projector(d, Config(teacher=False))                   # once; with BatchNorm
#     parameters = [*backbone.parameters(), *projector.parameters()]    # once
#     optimizer = torch.optim.AdamW(parameters, lr=5e-4)                # once
#     h = torch.stack([backbone(view) for view in views])               # (k, n, d)
#     z = projector(h).flatten(0, 1)                                    # (k n, E)
#     loss = bam_loss(z, len(views), n_global=G)
#     loss.backward(), optimizer.step(), optimizer.zero_grad()          # update


# Ranks --------------------------------------------------------------------------------------
#
# On several GPUs: call dist.init_process_group, then wrap the model in DDP. Give each rank its own
# rows, equally many. Each rank has the loss of its own rows; DDP averages the gradients: the mean
# is the gradient that one process has with all rows.
# To validate on one rank alone: call the model, not DDP(model), with gather=lambda x: x. DDP's
# forward may wait for the other ranks.


class Gather(torch.autograd.Function):
    """x (R, ...) of each rank -> (world * R, ...). The backward pass sums the gradients that all
    ranks have for this rank's rows; DDP averages later. torch's all_gather has no gradient."""

    @staticmethod
    def forward(ctx, x):
        rows = x.new_empty(dist.get_world_size(), *x.shape)
        dist.all_gather([*rows], x.contiguous())
        return rows.flatten(0, 1)

    @staticmethod
    def backward(ctx, gradient):
        # all_reduce writes into its tensor, and autograd may use the same tensor elsewhere
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


# Helpers of the loss ------------------------------------------------------------------------


CHUNK = 2**24  # the most entries of S that the loss holds at a time


def in_fp32(function, *args, **kwargs):
    """Call the function with all arguments (...) in one dtype, float32 or float64. A scale, which
    has no dimension, keeps its own."""
    def is_cast(x):
        return torch.is_tensor(x) and x.is_floating_point() and x.ndim > 0

    tensors = [x for x in (*args, *kwargs.values()) if is_cast(x)]
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors], torch.float32)
    args = [x.to(dtype) if is_cast(x) else x for x in args]
    kwargs = {name: x.to(dtype) if is_cast(x) else x for name, x in kwargs.items()}
    # autocast does not know "meta"
    with torch.autocast(tensors[0].device.type.replace("meta", "cpu"), enabled=False):
        return function(*args, **kwargs)


def same_image(z, n_global, c, mask):
    """Which rows z (k, n, E) and columns c (m, E) show one image -> (k, n, m). With mask="self"
    they show one view; with "none" no entry is True. Rank i has the i-th part of c. Raises
    ValueError for other columns or one image."""
    (k, n), of_rank = z.shape[:2], n_global * z.shape[1]
    if len(c) == n_global or len(c) != of_rank and len(c) != of_rank * dist.get_world_size():
        raise ValueError(f"{n} images, {len(c)} columns: give two or more, and gather all ranks.")
    rank = dist.get_rank() if len(c) > of_rank else 0
    column = torch.arange(len(c), device=z.device)  # a rank's columns are view after view
    image = column // (n_global * n) * n + column % n                    # (m,), of all ranks
    view = column // n % n_global                                        # (m,)
    own_image = rank * n + torch.arange(n, device=z.device)[:, None]     # (n, 1)
    own_view = torch.arange(k, device=z.device)[:, None, None]           # (k, 1, 1)
    same = (image == own_image).expand(k, n, -1)
    if mask in ("exclude", "zero"):
        return same
    return {"self": same & (view == own_view), "none": torch.zeros_like(same)}[mask]


def matching_loss(z, B, c, is_same, mask, tau):
    """z (k, n, E), targets B (G, n, m) -> L_BAM and the mean entropies of A's and of B's rows."""
    def of_images(z, B, is_same):
        losses, log_A = image_losses(z, B, is_same, c, mask, tau)
        return losses, entropy(log_A.detach().exp()).mean(0)                      # (n,), (n,)

    losses, entropy_a = in_parts(of_images, z, B, is_same, size=len(z) * len(c))
    # differs: a mean over images (bam_loss.py:128)
    return losses.mean(), entropy_a.mean(), entropy(B).mean()


def in_parts(function, *inputs, size):
    """function(*inputs), computed for a few images at a time if all images need too much memory.

    Dimension 1 of each input is n, the images; each result is (n,). `size` is the number of
    entries of S for one image. If all images have more than CHUNK entries, they are split into
    parts, and the backward pass computes each part again instead of keeping it in memory.
    """
    p = max(1, CHUNK // size)  # images in a part
    if p >= inputs[0].shape[1]:
        return function(*inputs)
    parts = zip(*[x.split(p, 1) for x in inputs])
    found = [checkpoint(function, *part, use_reentrant=False) for part in parts]
    return [torch.cat(values) for values in zip(*found)]


# Parts of the model -------------------------------------------------------------------------


class Projector(nn.ModuleList):
    """The projector g (App. C): three linear layers with activations between them. BatchNorm over
    the images of all ranks (below) follows each layer if there is no teacher."""

    def __init__(self, d, config):
        super().__init__()
        self.activation = getattr(F, config.activation)
        batch_norm = not config.teacher if config.batch_norm is None else config.batch_norm
        widths = [d, config.projector_width, config.projector_width, config.projector_dim]
        for i in range(3):
            self.append(nn.Linear(widths[i], widths[i + 1], bias=not batch_norm))
            nn.init.normal_(self[-1].weight, std=0.02)       # as heads.py:44
            if batch_norm:
                # differs: the last BatchNorm has no scale and shift, as in heads.py:36
                self.append(BatchNorm(widths[i + 1], affine=i < 2))
            else:
                nn.init.zeros_(self[-1].bias)

    def forward(self, h, gather=all_ranks):  # h (k, n, d) or (n, d) -> z (k, n, E) or (n, E)
        for i, layer in enumerate(self):
            if isinstance(layer, nn.Linear) and i > 0:
                h = self.activation(h)
            h = layer(h, gather) if isinstance(layer, BatchNorm) else layer(h)
        return h


class BatchNorm(nn.Module):
    """BatchNorm over the images of all ranks, at least in float32: N ranks normalise as one. Not a
    subclass of torch's, so that convert_sync_batchnorm leaves the layer as it is."""

    def __init__(self, d, affine=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d)) if affine else None
        self.bias = nn.Parameter(torch.zeros(d)) if affine else None

    def forward(self, x, gather):  # x (k, n, d) or (n, d) -> the same shape
        # differs: each view has its own statistics. With statistics over all views, the tiny
        # network learned to tell small views from large ones.
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = gather(y.mean(-2)[None]).mean(0)               # (k, d)
        y = y - mean.unsqueeze(-2)
        variance = gather(y.square().mean(-2)[None]).mean(0)  # (k, d)
        y = y * (variance.unsqueeze(-2) + 1e-5).rsqrt()
        if self.weight is not None:
            y = y * self.weight + self.bias
        return y.to(x.dtype)


class Teacher(nn.ModuleList):
    """A copy of networks, without gradients. Its BatchNorm uses statistics of the batch in
    training, as the student's does. Its stochastic depth stays off, so that targets have no noise
    of their own."""

    def __init__(self, networks):
        super().__init__(copy.deepcopy(networks))
        self.requires_grad_(False).train()

    def train(self, mode=True):
        super().train(False)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.training = mode
        return self


def by_size(views):
    """Views of two sizes at most, each (n, 3, s, s), two large views first -> one batch of images
    for each size."""
    return [torch.cat(same) for same in (views[:2], views[2:]) if same]


def to_log(h, z, gather, entropy_a=None, entropy_b=None):
    """h (k, n, d), z (k, n, E) and the entropies of the loss -> what Model logs."""
    entropies = {} if entropy_a is None else {"entropy_a": entropy_a, "entropy_b": entropy_b}
    return {**entropies, "similarity": mean_cosine(z[0].detach()),
            "effective_rank": effective_rank(gather(h[0].detach()))}


def entropy(P):
    """P (..., m), whose rows are distributions -> the entropy of each row (...)."""
    return torch.special.entr(P).sum(-1)


@fp32
def mean_cosine(z):
    """The mean cosine of two different rows of z (B, E); 1 if all latents are equal."""
    z = F.normalize(z, dim=-1)
    return (z.sum(0).square().sum() - len(z)) / (len(z) * max(1, len(z) - 1))


@fp32
def effective_rank(h):
    """(sum e)^2 / sum e^2 for the eigenvalues e of the covariance of h (B, d): 1 if h varies along
    one line, d if h varies equally in all directions."""
    h = h - h.mean(0)
    gram = h @ h.T if len(h) < h.shape[1] else h.T @ h   # both have the same eigenvalues
    return gram.trace().square() / gram.square().sum().clamp(min=1e-30)


# Settings, views, ContrastiveCrop, optimizer ----------------------------------------------
#
# Not here: the baselines MAE, BEiT, BYOL and NNCLR; ContrastiveCrop for ResNet-50;
# CAFormer (Table 8); SwAV (App. H); Table 7, for which `eval.py --export` writes weights.
#
# differs from the authors' code, where the paper names no setting:
#   * Weights start as in CLIP, and all weights learn. The authors' weights start as in MoCo-v3
#     (utils.py:53), and their patch embeddings do not learn (vit.py:169).
#   * ViT-S has 6 heads. The authors' ViT-S has 12 (vit.py:259), for which the flag is
#     --image-encoder ViT-S/16:heads=12,cls=1,positions=sincos.
#   * The learning rate starts at peak / warmup and ends at 0. The authors' rate starts at 0
#     (utils.py:190) and ends at 1e-6 (main_pretrain.py:112). Both reach the peak at the same step.
#   * [CLS] has no weight decay. The authors' [CLS] has weight decay (utils.py:603).
# The authors' vit_small.slurm differs from the paper. The script has 400 epochs (line 34), the
# learning rate .0048 (line 53: .0003 per 256 images), which falls to .001 (line 54), and new boxes
# every 40 epochs (line 37).
# The script asks for the 128 largest entries of a target (line 64), but masking_fn, which would
# select these entries, is never set (bam_loss.py:107).


@dataclass(kw_only=True)
class Settings(Config):
    """All flags of this method. Model reads those of Config, Ablation also target, normalization,
    FullModel.boxes crop_threshold. train.py alone reads the others (views, box_refreshes)."""

    # targets of the loss. balanced: Eq. 4. softmax: Eq. 2. onehot: as in SimCLR (App. H). moco: the
    # loss and the heads of MoCo-v3, with the presets moco-s16, moco-b16 and moco-r50
    target: Literal["balanced", "softmax", "onehot", "moco"] = "balanced"
    # what softmax and Sinkhorn normalise. global: all similarities (Sec. 3.1). block: the
    # similarities of each two views by themselves (Table 1)
    normalization: Literal["global", "block"] = "global"
    local_crops: int = 6  # number of small views. There are two large views (Sec. 3.5)
    local_size: int = 96  # side of a small view in pixels, > 0 (authors' main_pretrain.py:133)
    # smallest area of a view / area of its image, > 0, <= 1 (authors' main_pretrain.py:132)
    crop_least: float = 0.05
    # area of a view / area of its image, > 0, <= 1: small views have at most this area, large views
    # at least this area (vit_small.slurm:60)
    crop_border: float = 0.25
    contrastive_crop: bool = True  # crop where [CLS] attends, by ContrastiveCrop (App. G)
    crop_start: int = 12_512  # first step with ContrastiveCrop, after 40 epochs in App. G
    crop_every: int = 6_256  # steps between updates of crop boxes, > 0, 20 epochs in App. G
    # threshold of ContrastiveCrop, <= 1. The crop box holds the pixels with a larger attention,
    # divided by the largest attention (arXiv 2202.03278)
    crop_threshold: float = 0.1
    # alpha of ContrastiveCrop, > 0. Beta(alpha, alpha) draws the centres of crops in their box
    # (arXiv 2202.03278)
    crop_alpha: float = 0.6


VIT = dict(batch=4096, steps=93_836, lr=3e-3, warmup=12_512, weight_decay=0.04, weight_decay_end=0.4, clip_grad=0.3,
           beta2=0.999, adam_eps=1e-8, probe="sgd")
MOCO_V3 = dict(target="moco", batch=4096, steps=93_600, ema=0.99, projector_dim=256, local_crops=0,
               contrastive_crop=False, clip_grad=0.0, probe="sgd")
MOCO_VIT = MOCO_V3 | dict(tau=0.2, crop_border=0.08, lr=2.4e-3, warmup=12_480, weight_decay=0.1, beta2=0.999,
                          adam_eps=1e-8)
PRESETS = {  # settings of this file and of train.py by name; flags override them
    "tiny": dict(image_encoder="tiny", readout="gap", data="shapes:objects=1,background=0,palette=1,heldout=0",
                 batch=128, steps=300, lr=5e-4, weight_decay=0.1, warmup=25, teacher=False, projector_width=1024,
                 projector_dim=1024, local_crops=2, local_size=24, crop_least=0.2, crop_border=0.5,
                 contrastive_crop=False, crop_start=150, crop_every=75, probe="adamw"),
    # Sec. 4.1, App. C, Table 9a: 300 epochs of 1,281,167 images, 40 (ResNet-50: 10) for warm-up.
    # Our reading: ResNet-50's learning rate .3 is per 256 images, ViT's .003 is for all 4,096, and
    # ResNet-50 has no teacher.
    "vit-s16": dict(image_encoder="ViT-S/16:cls=1,positions=sincos", **VIT),
    "vit-b16": dict(image_encoder="ViT-B/16:cls=1,positions=sincos", **VIT),
    "r50": dict(image_encoder="ResNet-50", readout="gap", activation="relu", teacher=False, contrastive_crop=False,
                optimizer="lars", batch=4096, steps=93_836, lr=4.8, warmup=3_128, weight_decay=1e-6, clip_grad=0.0,
                probe="sgd"),
    # MoCo-v3's CONFIG.md: 300 epochs of 312 steps. Rates are per 256 images there. ViT-S has 12 heads (vits.py:117).
    "moco-s16": dict(image_encoder="ViT-S/16:heads=12,cls=1,positions=sincos", **MOCO_VIT),
    "moco-b16": dict(image_encoder="ViT-B/16:cls=1,positions=sincos", **MOCO_VIT),
    "moco-r50": MOCO_V3 | dict(image_encoder="ResNet-50", readout="gap", tau=1.0, crop_border=0.2, optimizer="lars",
                               lr=4.8, warmup=3_120, weight_decay=1e-6),
}


class FullModel(Model):
    """Model, and what train.py and eval.py also ask of it."""

    def probe_features(self, images):
        """(B, 3, H, W) -> features for a linear probe (App. D.1): h (B, d) if h is the mean of all
        tokens, otherwise [CLS] and the mean of the patches (B, 2 d).

        The paper names no normalisation of these features, so there is none. The authors' script
        has a BatchNorm before the probe (linear.slurm:35, eval_linear.py:362). differs: `tiny`
        trains the probe as SPARO's paper does (C.1), with AdamW and without augmentation.
        """
        tokens = self.evaluation_encoder()(images).float()
        if self.config.readout == "gap":
            return tokens.mean(1)
        return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1)

    def head_maps(self, images):
        """(B, 3, H, W) -> (B, heads, h, w), the attention of [CLS] in the last block. eval.py draws
        these maps at the run's image size; Fig. 5 has images of 512 pixels."""
        return self.evaluation_encoder().cls_attention(images)

    def boxes(self, images):
        """(B, 3, H, W) -> (B, 4), heat_boxes around what [CLS] attends to (App. G)."""
        heat = self.head_maps(images).float().sum(1)
        return heat_boxes(heat, self.config.crop_threshold, images.shape[-1])

    def chance_loss(self, batch_size, mask, patches):
        """The loss of two large views if all similarities are equal. batch_size: over all ranks."""
        images = batch_size - 1 if self.config.mask == "exclude" else batch_size
        return math.log(2 * images)

    def warn(self, record):
        """A warning if the network has collapsed, else None. The first 100 steps are exempt,
        because the latents of an untrained network can be nearly equal."""
        cosine, rank = record["similarity"], record["effective_rank"]
        if record["step"] <= 100 or (cosine <= 0.99 and rank >= 1.5):
            return None
        remedy = ", or give --no-teacher" if self.config.teacher else ""
        return (f"the network has collapsed (mean cosine {cosine:.3f}, effective rank {rank:.1f}): "
                f"lower --tau-b or --lr{remedy}.")


def model_class(args):
    if args.target == "moco":
        return MoCo
    is_bam = (args.target, args.normalization) == ("balanced", "global")
    return FullModel if is_bam else Ablation


def uses_text(args):
    return False


def needs_cls(args):
    """The flag that needs a [CLS] token, or "" if no flag does."""
    if args.contrastive_crop:
        return "--contrastive-crop"
    return "--readout cls" if args.readout == "cls" else ""


def check(args):
    """Raise ValueError for settings that do not fit. args: Settings, and steps."""
    if args.target in ("onehot", "moco") and args.normalization == "block":
        raise ValueError(f"--target {args.target} has no blocks: leave out --normalization block.")
    if args.target == "moco" and (args.local_crops or not args.teacher):
        raise ValueError("--target moco needs two views and the moving average: give "
                         "--local-crops 0 --teacher.")
    if args.contrastive_crop and args.crop_start >= args.steps:
        raise ValueError(f"--crop-start {args.crop_start} must be below --steps {args.steps}: "
                         "lower --crop-start, or give --no-contrastive-crop.")


# The augmentation: large views change as in BYOL (arXiv 2006.07733, App. B), small views as in
# DINO's code (arXiv 2104.14294). The crops are those of the authors (vit_small.slurm:60).
# common.Views and common.distort apply the rows from top to bottom.
#
#                                      large view 1   large view 2   small views
#     crop: fraction of the image      .25 to 1       .25 to 1       .05 to .25
#     pixels of a side                 224            224            96
#     horizontal flip, p               .5             .5             .5
#     colour jitter, p                 .8             .8             .8
#     greyscale, p                     .2             .2             .2
#     Gaussian blur, p                 1              .1             .5
#     solarize (above .5), p           0              .2             0
#
# p is a probability. The aspect ratio of crops is 3/4 to 4/3. Colour jitter multiplies brightness
# and contrast by .6 to 1.4, saturation by .8 to 1.2, and turns the hue by up to .1 of a circle. The
# blur's sigma is .1 to 2 pixels if large views have 224 pixels, and in proportion otherwise.
# differs: the authors' code multiplies saturation by .6 to 1.4 (image_transforms.py:52), turns hues
# in HSV (here: YIQ), and normalises pixels by ImageNet's mean and deviation (here: CLIP's;
# image_transforms.py:59).
def views(args):
    """Arguments of common.View for each view of an image: two large views, then the small ones.
    args: Settings, and image_size in pixels."""
    large = dict(size=args.image_size, scale=(args.crop_border, 1.0), alpha=args.crop_alpha)
    small = large | dict(size=args.local_size, scale=(args.crop_least, args.crop_border), blur=0.5)
    first, second = large | dict(blur=1.0), large | dict(blur=0.1, solarize=0.2)
    return [first, second] + args.local_crops * [small]


def box_refreshes(args):
    """The steps before which the boxes of all images are computed again (App. G)."""
    return range(args.crop_start, args.steps, args.crop_every) if args.contrastive_crop else ()


def heat_boxes(heat, threshold, size):
    """Attention maps of [CLS], summed over heads (B, h, w) -> boxes (B, 4): left, top, right and
    bottom as fractions of the sides.

    A map is enlarged to `size` pixels and scaled to [0, 1]. The box is the smallest one that holds
    all pixels above `threshold`.
    """
    # differs: App. G and the authors' code (contrastive_croping_vit.py:38) scale the map before
    # they enlarge it. The authors' boxes lack their last row and column of pixels (line 49).
    heat = F.interpolate(heat[:, None], (size, size), mode="bilinear")[:, 0]
    low, high = heat.amin((1, 2), keepdim=True), heat.amax((1, 2), keepdim=True)
    seen = (heat - low) / (high - low).clamp(min=1e-12) > threshold          # (B, size, size)
    columns, rows = seen.any(1), seen.any(2)                                 # (B, size)
    from_sides = columns, rows, columns.flip(1), rows.flip(1)  # left, top, right, bottom
    margins = torch.stack([x.int().argmax(1) for x in from_sides], 1)        # (B, 4), pixels
    return torch.cat([margins[:, :2], size - margins[:, 2:]], 1) / size


class LARS(torch.optim.Optimizer):
    """SGD with momentum betas[0], each update scaled to the norm trust * |p| (arXiv 1708.03888).
    Groups with `decays` False (biases, norms and positions) are neither scaled nor decayed.
    betas[1] and eps have no effect; train.py gives them to every optimizer."""

    def __init__(self, params, lr=0.3, betas=(0.9, 0), eps=0, weight_decay=1e-6, trust=1e-3):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, trust=trust))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            # _foreach functions update all parameters at once. On a GPU, one kernel for each
            # parameter would take longer to start than to run.
            decays = group.get("decays", True)
            decay = torch._foreach_mul(params, group["weight_decay"] * decays)
            update = torch._foreach_add([p.grad for p in params], decay)
            if decays:
                size, update_size = (torch.stack(torch._foreach_norm(x)) for x in (params, update))
                scale = group["trust"] * size / update_size                      # (n,)
                scale = torch.where((scale > 0) & scale.isfinite(), scale, 1.0)
                update = torch._foreach_mul(update, list(scale))
            for p in params:
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            momentum = [self.state[p]["momentum"] for p in params]
            torch._foreach_mul_(momentum, group["betas"][0])
            torch._foreach_add_(momentum, update)
            torch._foreach_sub_(params, torch._foreach_mul(momentum, group["lr"]))


# Ablations (Table 1) and SimCLR (App. H) --------------------------------------------------
#
# Table 1 drops the masking, in one of two ways. Its text ("cancelling the zero-masking of the
# relevant diagonals") and the authors' code (bam_loss.py:101) keep all similarities: --mask none.
# App. H leaves out the similarity of a view with itself: --mask self sets it to 0. It cannot be
# removed: Eq. 5 compares row a_i^j with row b_i^j' of another view, which has weight in the column
# of view j. If a_i^j were 0 there, its logarithm would be infinite.


class Ablation(FullModel):
    """BAM with other targets or without global normalization."""

    def loss(self, z, n_views, z_m, gather):
        return ablated_loss(z, n_views, z_m, 2, self.config, gather)

    def chance_loss(self, batch_size, mask, patches):
        if self.config.target == "onehot":
            return math.log(2 * batch_size - 1)
        loss = super().chance_loss(batch_size, mask, patches)
        return loss - math.log(2) if self.config.normalization == "block" else loss


def ablated_loss(z, n_views, teacher, n_global, config, gather=all_ranks):
    """bam_loss with the target and the normalization of `config` (Settings) -> the loss, the mean
    entropies of the rows of A and of B. Raises KeyError for a wrong setting."""
    cfg, k, G = config, n_views, n_views if n_global is None else n_global
    is_global = {"global": True, "block": False}[cfg.normalization]
    mask = "self" if cfg.target == "onehot" else cfg.mask
    z, z_m, c, is_same = arrange(z, k, G, teacher, mask, gather)
    if cfg.target == "onehot":
        return simclr_loss(z, c, is_same, G, cfg.tau)
    # Eq. 2 with tau_B; if tau_B = tau: the unbalanced row of Table 1. differs: Eq. 2 has A on both
    # sides, so that both could have a gradient. Here the target has none, as Sec. 4.1 says of B.
    target = {
        "softmax": lambda S: attention(S, cfg.tau_b),
        "balanced": lambda S: sinkhorn(S, cfg.tau_b, cfg.sinkhorn_iters, gather=gather)}[cfg.target]
    S_m = similarities(z_m, c, is_same, mask).detach()                        # (k, n, m)
    if not is_global:
        return block_loss(similarities(z, c, is_same, mask), S_m[:G], cfg.tau, target)
    B = target(S_m.flatten(0, 1)).view(S_m.shape)[:G]                         # (G, n, m)
    return matching_loss(z, B, c, is_same, mask, cfg.tau)


# l(i, j) = -log softmax_{m != i}(cos(z_i, z_m) / tau)_j,  i, j views of one image
#                                                              (SimCLR, arXiv 2002.05709, Eq. 1)
def simclr_loss(z, c, is_same, G, tau):
    """SimCLR's loss in BAM's terms (App. H). z (k, n, E), c (m, E), is_same (k, n, m): the same
    view (see arrange) -> the loss, mean entropies of the rows of A and of B.

    The target that view j sets for the other views of its image is one-hot: the column of view j.
    A row leaves out its own column alone.

    differs: only the loss is SimCLR's. Projector, views and optimizer are BAM's. SimCLR's projector
    has two layers and 128 outputs, its colours change more, and its optimizer is LARS.
    """
    return matching_loss(z, is_same[:G].to(z.dtype), c, is_same, "exclude", tau)


def block_loss(S, S_m, tau, target):
    """Table 1 without global normalization: softmax and Sinkhorn see one block S_jj' (n, W n) at a
    time. S (k, n, m), S_m (G, n, m); target(blocks) -> B. Returns the loss, the mean entropies of
    the rows of A and of B."""
    G, n = S_m.shape[:2]
    S, S_m = (x.unflatten(2, (-1, G, n)) for x in (S, S_m))                  # (k, n, W, G, n)
    found = []
    for large in range(G):  # j', the view of the columns
        log_A = attention(S[:, :, :, large].flatten(2), tau, log=True)       # (k, n, W n)
        with torch.no_grad():
            B = target(S_m[:, :, :, large].flatten(2))                       # (G, n, W n)
            entropies = [entropy(x).mean() for x in (log_A.exp(), B)]
        found.append(torch.stack([matching(B, log_A).mean(), *entropies]))
    return torch.stack(found).mean(0).unbind()


# MoCo-v3, a baseline of Tables 2 to 10 (arXiv 2104.02057) ---------------------------------
#
# (FILE:LINE) is a place in facebookresearch/moco-v3 at c349e6e. `python tests/parity.py moco PATH`
# compares the steps of both.
#
# differs: biases, norms and [CLS] have no weight decay (main_moco.py:229). The learning rate starts
# at peak / warmup (main_moco.py:423: at 0). Crops are resized bicubically (main_moco.py:263:
# bilinearly), hues turn in YIQ, and CLIP's constants normalise pixels, as in BAM.


# L = 2 tau [CE(q1 . k2 / tau) + CE(q2 . k1 / tau)]                              (Algorithm 1)
@fp32
def moco_loss(q, k, tau, *, gather=all_ranks):
    """q, k (2, n, E): queries and keys of two views of n images -> scalar. A query must find the
    key of its image's other view among the keys that all ranks have for that view. Keys have no
    gradient."""
    q, k = F.normalize(q, dim=-1), F.normalize(k.detach(), dim=-1)
    k1, k2 = gather(k.transpose(0, 1)).unbind(1)                         # (W n, E) each
    own = same_image(q[:1], 1, k1, "exclude")[0].int().argmax(1)         # (n,)
    losses = [F.cross_entropy(q[0] @ k2.T / tau, own), F.cross_entropy(q[1] @ k1.T / tau, own)]
    return 2 * tau * sum(losses)


class MoCoHead(Projector):
    """MoCo-v3's projector or predictor (builder.py:36): linear layers without bias, BatchNorm and
    ReLU between them. The last BatchNorm, if there is one, has no scale and shift."""

    def __init__(self, widths, last_norm=True):
        nn.ModuleList.__init__(self)
        self.activation = F.relu
        for i in range(len(widths) - 1):
            self.append(nn.Linear(widths[i], widths[i + 1], bias=False))
            is_last = i == len(widths) - 2
            if last_norm or not is_last:
                self.append(BatchNorm(widths[i + 1], affine=not is_last))


class MoCo(FullModel):
    """MoCo-v3: a query of the network must find the key that the moving average, the teacher, gives
    to the other view of its image. A ResNet's heads are smaller (builder.py:100)."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__(config, image_encoder, text_encoder, image_width, text_width)
        if not getattr(image_encoder, "is_loaded", False):  # else --init-weights has given weights
            moco_weights(image_encoder)
        hidden, E = config.projector_width, config.projector_dim
        is_vit = hasattr(image_encoder, "patch_embed")
        if is_vit and isinstance(image_encoder.patch_embed, nn.Conv2d):
            image_encoder.patch_embed.requires_grad_(False)                  # (vits.py:50)
        self.projector = MoCoHead([image_width, *[hidden] * (2 if is_vit else 1), E])
        self.predictor = MoCoHead([E, hidden, E], last_norm=is_vit)
        self.teacher = Teacher(self.student())

    def latents(self, network, views, gather):  # each view is a batch of its own for BatchNorm
        encoder, projector = network
        h = torch.stack([self.readout(encoder(view)) for view in views])     # (2, n, d)
        return h, projector(h, gather)                                       # (2, n, E)

    def forward(self, batch, gather=all_ranks):
        with torch.no_grad():
            k = self.latents(self.teacher, batch["views"], gather)[1]
        h, z = self.latents(self.student(), batch["views"], gather)
        q = self.predictor(z, gather)                                        # (2, n, E)
        loss = moco_loss(q, k, self.config.tau, gather=gather)
        return {"loss": loss, **to_log(h, z, gather)}

    def evaluation_encoder(self):
        return self.image_encoder                                            # (main_lincls.py:180)

    def probe_features(self, images):  # [CLS] alone, or the mean of a ResNet's tokens
        return self.readout(self.image_encoder(images)).float()

    def chance_loss(self, batch_size, mask, patches):
        return 4 * self.config.tau * math.log(batch_size)


def moco_weights(encoder):
    """Initial weights of MoCo-v3: Xavier's for a ViT, with q, k and v apart (vits.py:34), and 0 for
    the last norm of a ResNet's block (main_moco.py:186)."""
    for name, layer in encoder.named_modules():
        if isinstance(layer, nn.Linear):
            for part in layer.weight.data.chunk(3 if name.endswith("qkv") else 1):
                nn.init.xavier_uniform_(part)
            nn.init.zeros_(layer.bias)
        if name == "patch_embed" and isinstance(layer, nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight.data.flatten(1))
            nn.init.zeros_(layer.bias)
        if name.endswith(".bn3"):
            nn.init.zeros_(layer.weight)
    if encoder.cls is not None:
        nn.init.normal_(encoder.cls, std=1e-6)


# Fine-tuning (Sec. 4.3 to 4.5, Tables 3 to 5) ---------------------------------------------
#
# `train.py --finetune RUN` trains a linear head and the image encoder of RUN, a run of any method.


@dataclass
class ClassifierConfig:
    # FILE of class names for shards, one name a line. The first line names label 0. Class folders
    # and shapes have names of their own
    classes: list | None = None
    # labels to train on: a fraction of each class in (0, 1], or a FILE of image names or paths.
    # Without this flag all labels
    label_fraction: str | None = None
    smoothing: float = 0.1  # label smoothing, < 1, 0.1 in DeiT's code
    mixup: float = 0.8  # alpha of MixUp, 0.8 in DeiT's code. With 0 there is no MixUp
    cutmix: float = 1.0  # alpha of CutMix, 1.0 in DeiT's code. With 0 there is no CutMix
    # use RandAugment: two operations on each image, of magnitude 9 of 10, as in DeiT's code
    rand_augment: bool = True
    erasing: float = 0.25  # probability, <= 1, to erase a rectangle of an image, 0.25 in DeiT
    # stochastic depth of the ViT, < 1, 0.1 in DeiT's code. This flag replaces drop_path of
    # --image-encoder
    drop_path: float = 0.1


class Classifier(nn.Module):
    """A linear head on [CLS], or on the mean of all tokens if the encoder has no [CLS]."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config, self.image_encoder = config, image_encoder
        if "pos" in dict(image_encoder.named_buffers(recurse=False)):
            # Sin-cos positions are fixed in pre-training. Here they are trained, as the positions
            # in DeiT's code are.
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

    def forward(self, batch, gather=all_ranks):
        """batch: images (B, 3, H, W) and labels, (B,) or, for mixed images, shares (B, C)."""
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
CLASSIFIER_PRESETS = {  # with --finetune RUN, the run's encoder replaces image_encoder
    "tiny": dict(image_encoder="tiny", data=PRESETS["tiny"]["data"], batch=64, steps=100, lr=5e-4, weight_decay=0.05,
                 warmup=25, **PLAIN),
    # Table 3: 150 epochs, otherwise DeiT's defaults (facebookresearch/deit, main.py: learning rate
    # 5e-4 per 512 images, 5 epochs of warm-up). The number of steps is that of DeiT on 8 GPUs:
    # its loader drops the last images of an epoch if they do not fill a batch.
    # differs: no moving average of the weights, no repeated augmentation. The learning rate starts
    # at peak / warmup and ends at 0 (DeiT's: 1e-6 and 1e-5), and changes at every step (DeiT's: at
    # every epoch).
    "imagenet": dict(batch=1024, steps=187_650, lr=1e-3, warmup=6255, weight_decay=0.05, **DEIT),
    # The paper has two recipes for Table 4. D.1's text has SGD, weight decay .3 and a learning rate
    # from a sweep (.01 is our choice, because the decay is strong). Table 9c has AdamW and the
    # learning rate 5e-5, but names no weight decay, so the preset uses D.1's. RandAugment is our
    # reading of D.1's "default" regularization. These presets are for 10 % of the labels; for 1 %
    # give --steps 2503 --warmup 125. DeiT's loader drops the last, partial batch of an epoch and
    # would make 25,000 and 2,500 steps.
    "semi-sgd": dict(optimizer="sgd", lr=0.01, **SEMI),
    "semi-adamw": dict(lr=5e-5, **SEMI),
    # Table 5: MoCo-v3's recipe (facebookresearch/moco-v3, transfer/: batches of 8 x 128, lr 3e-4
    # per 512 images, 100 epochs, 3 of warm-up) with a tenth of its learning rate (D.3). MoCo-v3's
    # datasets.py only crops and flips, so MoCo-v3's flag --reprob .25 for flowers erases nothing.
    # differs: crops are resized bicubically (MoCo-v3: bilinearly).
    "cifar10": dict(steps=4800, warmup=144, **MOCO),
    "cifar100": dict(steps=4800, warmup=144, mixup=0.5, **MOCO),
    "flowers": dict(steps=100, warmup=3, mixup=0.0, cutmix=0.0, **MOCO | dict(weight_decay=0.3)),
    "pets": dict(steps=300, warmup=9, cutmix=0.0, drop_path=0.0, **MOCO),
}
# For train.py and eval.py this is a method like the four files: common.Method lists its members.
CLASSIFIER = SimpleNamespace(
    Config=ClassifierConfig, PRESETS=CLASSIFIER_PRESETS, Model=Classifier, augment=augmentation,
    uses_text=lambda args: False, content=lambda args: "label",
    vit_settings=lambda args: {"drop_path": args.drop_path})


# Video (Sec. 4.6, Table 6) ----------------------------------------------------------------
#
# The first frame of a video comes with a map of its objects. A later frame gets the labels of the
# earlier patches that are most similar to its own. The protocol is that of DINO's
# eval_video_segmentation.py (7c446df), which the authors' repository has, too. Features are the
# patches of the last block after its LayerNorm. J and F are those of davis2017-evaluation.
#
# differs from DINO's code: of patches that are equally similar no more than k count. PIL resizes
# the frames, OpenCV does there. Pixels are normalised as in training.

LAST_FRAMES = 7, 14, 21, 28  # T of Table 6; DINO's --n_last_frames is 7


def propagate(x, first, grid, last_frames=LAST_FRAMES, k=5, radius=12, tau=0.1):
    """Features x (f, P, d) of the patches of f frames, soft maps of the first frame (C, P)
    -> {T: soft maps of all frames (f, C, P)} for each T of last_frames. P = math.prod(grid).

    The map of a patch is a weighted mean of maps at the k most similar patches. These lie in the
    first frame or the T last ones, in a square of `radius` patches around the patch. A weight is
    exp(cosine / tau). k, radius and tau are those of DINO's --topk, --size_mask_neighborhood and
    label_propagation.
    """
    place = torch.arange(x.shape[1], device=x.device)
    row, column = place // grid[1], place % grid[1]
    far = torch.maximum((row[:, None] - row).abs(), (column[:, None] - column).abs()) > radius
    maps = {T: [first] for T in last_frames}
    for t in range(1, len(x)):
        found, now = {}, F.normalize(x[t], dim=-1)
        # One frame at a time: the cosines of two frames take P x P numbers. The k best of all
        # frames are among the k best of each frame.
        for s in [0, *range(max(1, t - max(last_frames)), t)]:
            cosines = now @ F.normalize(x[s], dim=-1).T                     # (P, P)
            cosines = cosines.masked_fill(far, -math.inf)
            found[s] = cosines.topk(min(k, len(place)))
        for T, earlier in maps.items():
            sources = [s for s in found if s == 0 or s >= t - T]
            cosines = torch.cat([found[s].values for s in sources], 1)      # (P, k * sources)
            labels = [earlier[s][:, found[s].indices] for s in sources]     # (C, P, k) each
            best, which = cosines.topk(min(k, len(place)))                  # (P, k)
            labels = torch.cat(labels, 2).gather(2, which.expand(len(first), -1, -1))
            earlier.append((labels * (best / tau).softmax(1)).sum(2))       # (C, P)
    return {T: torch.stack(soft) for T, soft in maps.items()}


def first_map(ids, grid):
    """Object ids (H, W) of a frame, 0 for the background -> maps (C, P) of 0 and 1, C - 1 objects.
    A patch gets the id at its centre."""
    small = F.interpolate(ids[None, None].float(), grid, mode="nearest-exact").flatten()    # (P,)
    return (small == torch.arange(1 + int(ids.max()), device=ids.device)[:, None]).float()


def map_to_ids(soft, grid, patch_size, size):
    """Soft maps (C, P) -> ids (H, W) of `size`. The maps are enlarged to pixels, each is stretched
    to [0, 1], and the largest wins."""
    soft = F.interpolate(soft.view(1, -1, *grid), scale_factor=patch_size, mode="bilinear")[0]
    low, high = soft.amin((1, 2), keepdim=True), soft.amax((1, 2), keepdim=True)
    soft = torch.where(high > low, (soft - low) / (high - low), soft)       # (C, h, w)
    ids = soft.max(0).indices[None, None].float()  # ten times as fast as argmax(0) on a CPU
    return F.interpolate(ids, size, mode="nearest-exact")[0, 0].long()


def jaccard(predicted, truth):
    """J: the IoU of masks (n, H, W) -> (n,); 1 where both masks are empty."""
    union = (predicted | truth).sum((1, 2))
    return ((predicted & truth).sum((1, 2)) / union).masked_fill(union == 0, 1.0)


def contour_accuracy(predicted, truth):
    """F of masks (n, H, W) -> (n,): the F-measure of contours; 1 where both masks have none. A
    contour pixel is right if the other contour is at most .008 of the diagonal away, rounded up."""
    radius = math.ceil(0.008 * math.hypot(*truth.shape[1:]))
    p, t = contours(predicted), contours(truth)
    n_p, n_t = p.sum((1, 2)), t.sum((1, 2))
    precision = (p & near(t, radius)).sum((1, 2)) / n_p.clamp(min=1)
    recall = (t & near(p, radius)).sum((1, 2)) / n_t.clamp(min=1)
    f = 2 * precision * recall / (precision + recall).clamp(min=1e-9)
    return f.masked_fill(n_p + n_t == 0, 1.0)


def contours(masks):
    """Masks (n, H, W) -> pixels whose neighbour to the right, below or right below differs."""
    x = F.pad(masks.float(), (0, 1, 0, 1), mode="replicate")                # (n, H + 1, W + 1)
    x, right, below, both = x[:, :-1, :-1], x[:, :-1, 1:], x[:, 1:, :-1], x[:, 1:, 1:]
    return (x != right) | (x != below) | (x != both)


def near(masks, radius):
    """Masks (n, H, W) -> the pixels at most `radius` away from a pixel of the mask."""
    steps = torch.arange(-radius, radius + 1, device=masks.device)
    disk = (steps[:, None] ** 2 + steps**2 <= radius**2).float()            # (2 r + 1, 2 r + 1)
    return F.conv2d(masks[:, None].float(), disk[None, None], padding=radius)[:, 0] > 0.5


def j_and_f(soft, truth, grid, patch_size):
    """Soft maps (f, C, P), true ids (f, H, W) -> J and F of each object, (2, C - 1): means over all
    frames but the first, which is given, and the last, as in DAVIS's code."""
    objects, scores = torch.arange(1, soft.shape[1], device=truth.device)[:, None, None], []
    for maps, ids in zip(soft[1:-1], truth[1:-1]):
        masks, true = map_to_ids(maps, grid, patch_size, ids.shape) == objects, ids == objects
        scores.append(torch.stack([jaccard(masks, true), contour_accuracy(masks, true)]))
    return torch.stack(scores).mean(0)


# k-means and linear probes (App. I, D.1, D.3) ----------------------------------------------
#
# eval.py encodes images; the functions here get features.


def spread_rows(x, k, generator):
    """k rows of x (N, E) that are far apart -> (k, E), the start of k-means (k-means++).

    Several rows are drawn, each with a probability ~ (distance to the nearest chosen row)^2. The
    one that leaves the smallest sum of these squares is chosen next.
    """
    chosen = x[torch.randint(len(x), (1,), generator=generator)]
    nearest = torch.cdist(x, chosen)[:, 0].square()                         # (N,)
    while len(chosen) < k:
        # if all features are equal, all distances are 0, which multinomial refuses
        rows = torch.multinomial(nearest + 1e-12, 2 + int(math.log(k)), True, generator=generator)
        nearer = nearest[:, None].minimum(torch.cdist(x, x[rows]).square())  # (N, drawn rows)
        best = nearer.sum(0).argmin()
        nearest, chosen = nearer[:, best], torch.cat([chosen, x[rows[best, None]]])
    return chosen


def lloyd(x, k, generator, restarts=10, iterations=300):
    """k-means: features x (N, E) -> cluster ids (N,) from 0 to k - 1. The best of `restarts` runs
    has the smallest sum of squared distances to the centres, as in scikit-learn's KMeans."""
    x = x - x.mean(0)  # cdist subtracts squared norms, which would hide small distances in fp32
    least, best = math.inf, None
    for _ in range(restarts):
        centres, ids = spread_rows(x, k, generator), torch.full((len(x),), -1)
        for _ in range(iterations):
            distances, new = torch.cdist(x, centres).min(1)
            if new.equal(ids):
                break
            ids, count = new, new.bincount(minlength=k)[:, None]            # (k, 1)
            means = torch.zeros_like(centres).index_add_(0, ids, x) / count.clamp(min=1)
            centres = means.where(count > 0, centres)  # an empty cluster stays in its place
        if (total := distances.square().sum().item()) < least:
            least, best = total, ids
    return best


def contingency(labels, clusters):
    """labels (n,), clusters (n,) -> how many rows have label i and cluster j (C, K), in float64."""
    C, K = int(labels.max()) + 1, int(clusters.max()) + 1
    return (labels * K + clusters).bincount(minlength=C * K).view(C, K).double()


def nmi(labels, clusters):
    """Normalized mutual information of labels (n,) and clusters (n,): 1 if they are the same
    partition. It is divided by the mean of the two entropies, as scikit-learn divides it."""
    p = contingency(labels, clusters) / len(labels)
    entropy = lambda q: -q.xlogy(q).sum()
    both = entropy(p.sum(1)) + entropy(p.sum(0))
    return (2 - 2 * entropy(p) / both).item() if both > 0 else 1.0  # one label and one cluster


def ari(labels, clusters):
    """Adjusted Rand index of labels (n,) and clusters (n,): 1 if they are the same partition, 0 on
    average if the clusters are random."""
    n = contingency(labels, clusters)
    pairs = lambda count: (count * (count - 1) / 2).sum()
    same, same_l, same_c = pairs(n), pairs(n.sum(1)), pairs(n.sum(0))
    expected, largest = same_l * same_c / pairs(n.sum()).clamp(min=1), (same_l + same_c) / 2
    # the two are equal if all rows, or no two rows, are together in both partitions
    return ((same - expected) / (largest - expected)).item() if largest > expected else 1.0


def clustering(x, labels):
    """How well clusters of features x (N, E) agree with the labels (N,) -> {"t/NMI" and "t/ARI" for
    each number of classes t: value}.

    For each number of classes t, t classes are drawn ten times, and their images are divided into t
    clusters. NMI and ARI are means over the draws. Random clusters have a mean ARI of 0, but an NMI
    above 0, which is larger where classes have few images.

    differs: the paper says "standard k-means". The length 1 of encodings, the start by k-means++
    and the ten restarts are our choices. t of 2 and 5 serve data with few classes.
    """
    present, result, generator = labels.unique(), {}, torch.Generator().manual_seed(0)
    sizes = [t for t in (2, 5, 10, 20, 40, 80, 160) if t <= len(present)]
    for t in sizes:
        scores = []
        for _ in range(10):
            drawn = present[torch.randperm(len(present), generator=generator)[:t]]
            rows = torch.isin(labels, drawn)
            truth, clusters = labels[rows], lloyd(x[rows], t, generator)
            scores.append([nmi(truth, clusters), ari(truth, clusters)])
        result[f"{t}/NMI"], result[f"{t}/ARI"] = torch.tensor(scores).mean(0).tolist()
    return result


def train_heads(heads, rates, crops, epochs):
    """Train linear classifiers `heads`, one for each learning rate (D.1, Table 9b).

    crops: for each epoch, features (n, E) and labels (n,) of new random crops of the images. New
    crops are the only regularisation, as there is no weight decay. A batch has at most 1,024
    features (Table 9b). An epoch has at least 64 batches, so that a small data set gives enough
    updates. All heads train on the same batches, as in DINOv2's code, because encoding the crops
    takes far longer than training the heads.
    """
    for head in heads:
        nn.init.normal_(head.weight, std=0.01)
        nn.init.zeros_(head.bias)
    device = heads[0].weight.device
    parameters = [{"params": head.parameters(), "lr": rate} for head, rate in zip(heads, rates)]
    optimizer = torch.optim.SGD(parameters, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for x, labels in crops:
        for rows in torch.randperm(len(x)).chunk(max(64, math.ceil(len(x) / 1024))):
            batch, truth = x[rows].to(device), labels[rows].to(device)
            optimizer.zero_grad()
            # heads share no weights, so the sum gives each head the gradient of its own loss
            sum(F.cross_entropy(head(batch), truth) for head in heads).backward()
            optimizer.step()
        schedule.step()


def logistic_regression(head, x, labels, l2):
    """Minimise  cross entropy + l2 / 2 |W|^2  by LBFGS, from the weights of `head` (D.3).

    head: an nn.Linear; features x (N, E), labels (N,), in float64, so that rounding does not stop
    LBFGS before its tolerance.

    differs: the paper does not say whether the cross entropy is averaged over images, as it is
    here, or summed.
    """
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=1000, tolerance_grad=1e-5,
                                  line_search_fn="strong_wolfe")

    def objective():
        optimizer.zero_grad()
        loss = F.cross_entropy(head(x), labels) + l2 / 2 * head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(objective)


# tests/RESULTS.md has the results at toy scale, `python tests/claims.py bam` and `photos` have
# those of earlier code. Three of them concern the equations:
#
# * Sharpening (tau_B below tau) prevented the collapse to uniform attention, and balancing did not.
#   Table 1 has a collapse without balancing.
# * The projector needs BatchNorm. The teacher's projector has none, and a teacher hurt (Table 1: it
#   helps by 1.4).
# * BAM gains on SimCLR with the number of steps: it was below after 5 epochs of small photos, and
#   above after 20.


if __name__ == "__main__":
    print("Image 1 of four is a hub: all others are similar to it. A target says how similar an\n"
          "image should be to each other image. What each of the four gets from all targets\n"
          "(balanced: after 50 iterations):")
    S = torch.tensor([[-1e30, 0.5, 0.5, 0.5], [0.5, -1e30, 0.4, 0.0],
                      [0.5, 0.4, -1e30, 0.0], [0.5, 0.0, 0.0, -1e30]])    # masked (Eq. 3)
    targets = {"softmax (Eq. 1)": attention(S, 0.1), "balanced (Eq. 4)": sinkhorn(S, 0.1, 50)}
    for name, B in targets.items():
        print(f"  {name:17}", *[f"{share:5.2f}" for share in B.sum(0)])
    print("The loss never compares two views of one image. It compares their similarities to all\n"
          "other images. Yet the two views become similar. Their cosine after 0, 40, 80 and 120\n"
          "steps:")
    torch.manual_seed(1)
    z = torch.randn(256, 32, requires_grad=True)                          # 2 views of 128 images
    for step in range(121):
        if step % 40 == 0:
            print(f"{F.cosine_similarity(*z.chunk(2)).mean():7.2f}")
        gradient, = torch.autograd.grad(bam_loss(z, 2), z)
        z.data -= 200 * gradient
