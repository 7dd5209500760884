"""SPARC: Improving fine-grained understanding in image-text pre-training (Bica et al., ICML 2024, arXiv 2401.09865).

Each word of a caption picks, sparsely, the image patches that resemble it, and their weighted mean must resemble that
word more than the caption's other words. CLIP's contrastive loss between whole images and whole captions goes on beside it.

    symbol       name here                 shape        where
    f_v, f_t     image_encoder,            (B, P, d)    Sec. 2; all patches, all tokens
                 text_encoder              (B, L, d)
    h_v          Model.h_v                 d -> d       Sec. 2; "a single non-linear layer" after the average pooling
    g_v, g_t     Model.g_v, Model.g_t      d -> E       Sec. 2, D.1; linear adaptors to E = 512
    v_p, t_l     patches, tokens           (B, P, E), (B, L, E)
    vbar, tbar   v, t                      (B, E)       Sec. 2; global embeddings
    s, shat,     alignment_weights         (B, L, P)    Eq. 2, 3, 4; a_lp is what it returns
    stil, a
    sigma        threshold                 scalar       Eq. 3; 1 / P
    c_l          grouped                   (B, L, E)    Eq. 5; language-grouped vision embedding
    tau          1 / scale                 scalar       Eq. 1, 6; learned, shared by both losses
    L_g, L_f     global_loss,              scalar       Eq. 1, Eq. 6
                 fine_grained_loss
    lambda_g, lambda_f                     scalar       Eq. 7

Differs from the paper:
  * A token whose similarities to all patches are equal gets uniform weights; Eq. 2 would divide 0 by 0.
  * The mask of L_f leaves out [CLS] and [SEP]: the paper's SentencePiece captions have none.
  * Text tower: bidirectional with a padding mask (the paper says only that tokens are averaged). No image CLS token.
  * Eq. 6 (mean over the tokens of a caption, then over captions) is the default; the paper's listing averages over all
    tokens of the batch instead: token_mean="batch".
  * Average pooling comes before h_v and g_v as in Sec. 2; the paper's listing averages adapted patches, without h_v.
  * `tiny` has x + h_v(x) instead of h_v(x): L_f trains g_v(x), Sec. D.7 segments with g_v(h_v(x)), and the sum ties the two.
  * AdamW's second beta and epsilon are CLIP's, clipping at norm 1 is ours: the paper gives none of the three. Photographs
    are cropped a little and flipped (train.py); the paper says only that they are resized.

Not here: detection (OWL-ViT), captioning (Flamingo), the 32k SentencePiece vocabulary (WordPiece takes its place).

Run:     python train.py --method sparc                      (the embedded world, minutes on two cores)
         python train.py --method sparc --objective clip     (the baseline on the same towers)
Result:  seeds 0-2, torch 2.15, one thread of an AMD EPYC (README): zero-shot .968 +- .021 against CLIP's .889 +- .057, R@1
         .852 / .777 against .727 / .666. No gain in segmentation there: L_f is solved nearly as well with a wrong image.
         With one word an object and lambda_f = 0.1: mIoU on objects .931 +- .020 against .763 +- .014.
"""

import functools
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    objective: Literal["sparc", "clip"] = "sparc"            # Eq. 7, or Eq. 1 alone
    align: Literal["sparse", "dense", "softmax"] = "sparse"  # Eq. 2-4; Table 8: sigma = 0; Table 8: softmax weights
    embed_dim: int = 512                                     # E, Sec. D.1
    lambda_g: float = 0.5                                    # Eq. 7, Sec. D.4
    lambda_f: float = 1.0                                    # Eq. 7; Sec. D.4 sweeps 0.5, 1, 5, 10
    sigma: float | None = None                               # Eq. 3; None is 1 / P
    h_v: Literal["plain", "residual"] = "plain"              # Sec. 2; differs: "residual" is x + h_v(x)
    token_mean: Literal["caption", "batch"] = "caption"      # Eq. 6, or the paper's listing 1
    init_scale: float = 1 / 0.07                             # CLIP (arXiv 2103.00020), Sec. 2.5


PAPER = dict(text_encoder="12x768:context=55", lr=9e-4, weight_decay=0.2, warmup=2500, batch=16384, steps=200_000,
             vocab_size=32_000)
PRESETS = {  # settings of this file and of train.py by name; --flags go before them
    "tiny": dict(image_encoder="tiny", text_encoder="tiny", data="shapes", embed_dim=128, h_v="residual", lambda_f=0.5,
                 batch=128, steps=600, lr=2e-3, weight_decay=0.1, warmup=50),
    # Sec. 4.1, D.1, D.4. lr and weight decay: the middle of the paper's sweeps; "1.1e-4" read as 1.1e-3, batch "16348" as 16384
    "b32": dict(image_encoder="ViT-B/32", **PAPER),
    "b16": dict(image_encoder="ViT-B/16", **PAPER),
    "l14": dict(image_encoder="ViT-L/14", **{**PAPER, "steps": 250_000}),
}
BOUNDS = {"sigma": (0, 1)}  # the values that train.py accepts


def in_fp32(function):
    """Leave autocast and cast half-precision arguments up (float64 stays): a softmax at scale 100 needs the digits."""

    def cast(x):
        return x.to(torch.promote_types(x.dtype, torch.float32)) if torch.is_tensor(x) and x.is_floating_point() else x

    @functools.wraps(function)
    def wrapper(x, *args, **kwargs):
        with torch.autocast(x.device.type, enabled=False):
            return function(cast(x), *map(cast, args), **{name: cast(value) for name, value in kwargs.items()})

    return wrapper


def identity(x):
    return x


# Equations -----------------------------------------------------------------------------------------------------------

# L_g = -1/2B sum_i [ log softmax_j(cos(vbar_i, tbar_j) / tau)_i + log softmax_j(cos(tbar_i, vbar_j) / tau)_i ]   (Eq. 1)
@in_fp32
def global_loss(v, t, scale, gather=identity):
    """CLIP's loss. v, t: (B, E) image and text embeddings of pairs; scale: 1 / tau. Returns a scalar.

    gather: (B, E) -> (world * B, E) with the own rows first, differentiable; logits are local rows x global columns.
    """
    v, t = F.normalize(v, dim=-1), F.normalize(t, dim=-1)
    i = torch.arange(len(v), device=v.device)
    return (F.cross_entropy(scale * v @ gather(t).T, i) + F.cross_entropy(scale * t @ gather(v).T, i)) / 2


# shat_lp = (s_lp - min_k s_lk) / (max_k s_lk - min_k s_lk), s_lp = t_l . v_p                                      (Eq. 2)
# stil_lp = shat_lp if shat_lp >= sigma else 0                                                                     (Eq. 3)
# a_lp = stil_lp / sum_r stil_lr                                                                                   (Eq. 4)
@in_fp32
def alignment_weights(tokens, patches, threshold=None):
    """How much each patch belongs to each token. tokens (B, L, E), patches (B, P, E) -> a (B, L, P), rows sum to 1.

    threshold: sigma of Eq. 3, by default 1 / P; 0 is Table 8's "no sparsity". A row of equal similarities is uniform.
    """
    s = tokens @ patches.transpose(1, 2)                                 # (B, L, P)
    low, high = s.amin(-1, keepdim=True), s.amax(-1, keepdim=True)       # (B, L, 1)
    constant = high == low  # differs: uniform weights where Eq. 2 is 0 / 0
    s = torch.where(constant, torch.ones_like(s), (s - low) / torch.where(constant, 1.0, high - low))
    sigma = 1 / patches.shape[1] if threshold is None else threshold
    s = torch.where(s < sigma, 0.0, s)
    return s / s.sum(-1, keepdim=True)


@in_fp32
def softmax_weights(tokens, patches):
    """Table 8's "softmax" ablation of Eq. 2-4: a_lp = softmax_p(t_l . v_p). Shapes as in alignment_weights."""
    return (tokens @ patches.transpose(1, 2)).softmax(-1)


ALIGN = {"sparse": alignment_weights, "dense": functools.partial(alignment_weights, threshold=0.0), "softmax": softmax_weights}


# c_l = sum_p a_lp v_p                                                                                             (Eq. 5)
# L_f = -1/2B sum_i 1/L_i sum_j [ log softmax_k(cos(c_ij, t_ik) / tau)_j + log softmax_k(cos(t_ij, c_ik) / tau)_j ]  (Eq. 6)
@in_fp32
def fine_grained_loss(tokens, patches, mask, scale, align=alignment_weights, token_mean="caption", gather=identity):
    """SPARC's local loss. tokens (B, L, E), patches (B, P, E), mask (B, L) True on words; scale: 1 / tau -> scalar.

    Negatives are the other words of the same caption: nothing leaves the rank. A caption without words adds 0.
    token_mean: "caption" is Eq. 6; "batch" divides by the words of the (gathered) batch, as the paper's listing does.
    """
    grouped = align(tokens, patches) @ patches                           # (B, L, E), c_l
    c, t = F.normalize(grouped, dim=-1), F.normalize(tokens, dim=-1)
    logits = scale * c @ t.transpose(1, 2)                               # (B, L, L), [i, j, k] = cos(c_ij, t_ik) / tau
    words = mask[:, None, :]
    hidden = torch.finfo(logits.dtype).min
    c_to_t = logits.masked_fill(~words, hidden).log_softmax(-1).diagonal(dim1=1, dim2=2)                   # (B, L)
    t_to_c = logits.transpose(1, 2).masked_fill(~words, hidden).log_softmax(-1).diagonal(dim1=1, dim2=2)   # (B, L)
    loss = -0.5 * (c_to_t + t_to_c).masked_fill(~mask, 0.0)              # (B, L)
    count = mask.sum(1)                                                  # (B,), L_i
    if token_mean == "batch":
        return loss.sum() / gather(count.to(loss.dtype)[:, None]).mean().clamp(min=1 / len(count)) / len(count)
    return (loss.sum(1) / count.clamp(min=1)).mean()


# Model ---------------------------------------------------------------------------------------------------------------


def words_only(mask):
    """Mask of the tokens (B, L) -> the same without the first and the last one of each caption, [CLS] and [SEP]."""
    return F.pad(mask[:, 2:], (1, 1)) & mask


def masked_mean(x, mask):
    """(B, L, d), (B, L) -> (B, d), the mean over the positions where mask is True; zeros where none is."""
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


class Model(nn.Module):
    """Two towers, the adaptors of Sec. 2 and the loss of Eq. 7.

    image_encoder(images) -> (B, P, image_width); text_encoder(tokens, mask) -> (B, L, text_width); both return all tokens.
    """

    takes_cls = False  # all image tokens are patches

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config = config
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.h_v = nn.Sequential(nn.Linear(image_width, image_width), nn.GELU())
        self.g_v = nn.Linear(image_width, config.embed_dim, bias=False)
        self.g_t = nn.Linear(text_width, config.embed_dim, bias=False)
        nn.init.normal_(self.g_v.weight, std=image_width**-0.5)
        nn.init.normal_(self.g_t.weight, std=text_width**-0.5)
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.init_scale)))
        self.align = functools.partial(alignment_weights, threshold=config.sigma) if config.align == "sparse" \
            else ALIGN[config.align]

    def through_h_v(self, x):
        # differs: the residual form, in `tiny`, because L_f trains g_v(x) but Sec. D.7 segments with g_v(h_v(x))
        return x + self.h_v(x) if self.config.h_v == "residual" else self.h_v(x)

    def forward(self, batch, gather=identity):
        """batch: images (B, 3, H, W), tokens (B, L), mask (B, L) -> {"loss": scalar, and scalars to log}."""
        cfg, words = self.config, words_only(batch["mask"])
        f_v = self.image_encoder(batch["images"])                        # (B, P, d)
        f_t = self.text_encoder(batch["tokens"], batch["mask"])          # (B, L, d)
        v = self.g_v(self.through_h_v(f_v.mean(1)))                      # (B, E)
        t = self.g_t(masked_mean(f_t, words))                            # (B, E)
        scale = self.log_scale.exp()
        loss_g = global_loss(v, t, scale, gather)
        out = {"loss": loss_g, "global": loss_g, "scale": scale}
        if cfg.objective == "sparc":
            patches, tokens = self.g_v(f_v), self.g_t(f_t)               # (B, P, E), (B, L, E)
            local = functools.partial(fine_grained_loss, mask=words, scale=scale, align=self.align,
                                      token_mean=cfg.token_mean, gather=gather)
            loss_f = local(tokens, patches)
            out |= {"loss": cfg.lambda_g * loss_g + cfg.lambda_f * loss_f, "local": loss_f}  # Eq. 7
            with torch.no_grad():  # as low against a WRONG image's patches: L_f is solved without looking at the image
                out["local_wrong_image"] = local(tokens.detach(), patches.detach().roll(1, 0))
        return {name: value if name == "loss" else value.detach() for name, value in out.items()}

    def after_step(self):
        """Keep 1 / tau within [1, 100], as CLIP does."""
        with torch.no_grad():
            self.log_scale.clamp_(0, math.log(100))

    def chance_loss(self, batch_size, mask):
        """The loss when all similarities are equal; batch_size is global."""
        loss_g = math.log(batch_size)
        if self.config.objective == "clip":
            return loss_g
        loss_f = words_only(mask).sum(1).clamp(min=1).log().mean().item()
        return self.config.lambda_g * loss_g + self.config.lambda_f * loss_f

    def encode_image(self, images):
        """(B, 3, H, W) -> (B, E), normalised."""
        return F.normalize(self.g_v(self.through_h_v(self.image_encoder(images).mean(1))).float(), dim=-1)

    def encode_text(self, tokens, mask):
        """(B, L), (B, L) -> (B, E), normalised."""
        return F.normalize(self.g_t(masked_mean(self.text_encoder(tokens, mask), words_only(mask))).float(), dim=-1)

    def encode_patches(self, images):
        """(B, 3, H, W) -> (B, P, E), normalised, through h_v and g_v as Sec. D.7 segments."""
        return F.normalize(self.g_v(self.through_h_v(self.image_encoder(images))).float(), dim=-1)

    def align_words(self, images, tokens, mask):
        """a_lp of Eq. 4 for pairs: (B, 3, H, W), (B, L), (B, L) -> (B, L, P)."""
        return self.align(self.g_t(self.text_encoder(tokens, mask)), self.g_v(self.image_encoder(images)))


if __name__ == "__main__":
    # Made-up pictures: patch place[i, l] of picture i shows word l of its caption, as a vector; the other patches are noise.
    torch.manual_seed(0)
    B, L, P, E, vocabulary = 64, 4, 9, 32, 20
    looks = torch.randn(vocabulary, E)                                   # how a word looks in a picture
    embedding, adaptor = nn.Embedding(vocabulary, E), nn.Linear(E, E, bias=False)
    optimizer = torch.optim.Adam([*embedding.parameters(), *adaptor.parameters()], lr=1e-2)
    mask = torch.ones(B, L, dtype=torch.bool)
    for step in range(101):
        words = torch.rand(B, vocabulary).argsort(1)[:, :L]              # (B, L)
        place = torch.rand(B, P).argsort(1)[:, :L]                       # (B, L)
        pictures = 0.3 * torch.randn(B, P, E)
        pictures.scatter_add_(1, place[..., None].expand(-1, -1, E), looks[words])
        t, v = embedding(words), adaptor(pictures)                       # (B, L, E), (B, P, E)
        loss_g, loss_f = global_loss(v.mean(1), t.mean(1), 10.0), fine_grained_loss(t, v, mask, 10.0)
        optimizer.zero_grad()
        (0.5 * loss_g + 0.5 * loss_f).backward()
        optimizer.step()
        if step % 20 == 0:
            found = (alignment_weights(t, v).argmax(-1) == place).float().mean()
            wrong = fine_grained_loss(t, v.roll(1, 0), mask, 10.0)
            print(f"step {step:3d}  L_g {loss_g.item():.3f}  L_f {loss_f.item():.3f}  L_f on a wrong picture {wrong.item():.3f}  "
                  f"words whose heaviest patch is theirs {found.item():.0%}")
