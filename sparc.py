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
         python train.py --method sparc --objective clip     (or filip, clip+filip, pacl, gloria, mgca: the baselines)
Result:  seeds 0-2, torch 2.15, one thread of an AMD EPYC (README): zero-shot .968 +- .021 against CLIP's .889 +- .057 and at most
         .899 of the other five, R@1 .852 / .777 against .727 / .666, but no gain in segmentation: L_f is solved nearly as well with
         a wrong image. With lambda_f = 0.1 words are grounded: mIoU on objects .842 +- .005 against .772 +- .040, zero-shot then
         .836 +- .093. No lambda_f gave both.
"""

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    objective: Literal["sparc", "clip", "filip", "clip+filip", "pacl", "gloria", "mgca"] = "sparc"  # Eq. 7, or a baseline, Sec. 4
    align: Literal["sparse", "dense", "softmax"] = "sparse"  # Eq. 2-4; Table 8: sigma = 0; Table 8: softmax weights
    embed_dim: int = 512                                     # E, Sec. D.1
    lambda_g: float = 0.5                                    # Eq. 7, Sec. D.4
    lambda_f: float = 1.0                                    # Eq. 7; Sec. D.4 sweeps 0.5, 1, 5, 10
    sigma: Annotated[float, 0, 1] | None = None                               # Eq. 3; None is 1 / P
    h_v: Literal["plain", "residual"] = "plain"              # Sec. 2; differs: "residual" is x + h_v(x)
    token_mean: Literal["caption", "batch"] = "caption"      # Eq. 6, or the paper's listing 1
    init_scale: float = 1 / 0.07                             # CLIP (arXiv 2103.00020), Sec. 2.5
    filip_keep: Annotated[float, 0.01, 1] = 0.2                                  # FILIP: share of the other side's tokens compared with; Table 11
    mgca_prototypes: Annotated[int, 2, math.inf] = 500                               # MGCA, Sec. D.4


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


# L_f = -1/2B sum_i 1/L_i sum_j [ log softmax_k(cos(c_ij, t_ik) / tau)_j + log softmax_k(cos(t_ij, c_ik) / tau)_j ]  (Eq. 6)
@in_fp32
def sequence_loss(c, t, mask, scale, token_mean="caption", gather=identity):
    """Eq. 6 for any c. c, t: (B, L, E), mask (B, L) True on words; scale: 1 / tau -> scalar.

    Negatives are the other words of the same caption: nothing leaves the rank. A caption without words adds 0.
    token_mean: "caption" is Eq. 6; "batch" divides by the words of the (gathered) batch, as the paper's listing does.
    """
    c, t = F.normalize(c, dim=-1), F.normalize(t, dim=-1)
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


# c_l = sum_p a_lp v_p                                                                                             (Eq. 5)
@in_fp32
def fine_grained_loss(tokens, patches, mask, scale, align=alignment_weights, token_mean="caption", gather=identity):
    """SPARC's local loss. tokens (B, L, E), patches (B, P, E), mask (B, L) True on words; scale: 1 / tau -> scalar."""
    grouped = align(tokens, patches) @ patches                           # (B, L, E), c_l
    return sequence_loss(grouped, tokens, mask, scale, token_mean, gather)


# Model ---------------------------------------------------------------------------------------------------------------


def words_only(mask):
    """Mask of the tokens (B, L) -> the same without the first and the last one of each caption, [CLS] and [SEP]."""
    return F.pad(mask[:, 2:], (1, 1)) & mask


def masked_mean(x, mask):
    """(B, L, d), (B, L) -> (B, d), the mean over the positions where mask is True; zeros where none is."""
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


class Residual(nn.Sequential):
    """x + h_v(x). Differs: for `tiny`, because L_f trains g_v(x) but Sec. D.7 segments with g_v(h_v(x))."""

    def forward(self, x):
        return x + super().forward(x)


class Model(nn.Module):
    """Two towers, the adaptors of Sec. 2 and the loss of Eq. 7.

    image_encoder(images) -> (B, P, image_width); text_encoder(tokens, mask) -> (B, L, text_width); both return all tokens.
    """

    takes_cls = False  # all image tokens are patches

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config = config
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        h_v = {"plain": nn.Sequential, "residual": Residual}[config.h_v]
        self.h_v = h_v(nn.Linear(image_width, image_width), nn.GELU())
        self.g_v = nn.Linear(image_width, config.embed_dim, bias=False)
        self.g_t = nn.Linear(text_width, config.embed_dim, bias=False)
        nn.init.normal_(self.g_v.weight, std=image_width**-0.5)
        nn.init.normal_(self.g_t.weight, std=text_width**-0.5)
        add_baseline_parts(self, image_width)
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.init_scale)))
        self.late_interaction = config.objective in SCORES  # compared by `similarity`, not by a dot product
        self.align = functools.partial(alignment_weights, threshold=config.sigma) if config.align == "sparse" \
            else ALIGN[config.align]

    def forward(self, batch, gather=identity):
        """batch: images (B, 3, H, W), tokens (B, L), mask (B, L) -> {"loss": scalar, and scalars to log}."""
        cfg, words = self.config, words_only(batch["mask"])
        f_v = self.image_encoder(batch["images"])                        # (B, P, d)
        f_t = self.text_encoder(batch["tokens"], batch["mask"])          # (B, L, d)
        v = self.g_v(self.h_v(f_v.mean(1)))                              # (B, E)
        t = self.g_t(masked_mean(f_t, words))                            # (B, E)
        scale = self.log_scale.exp()
        if cfg.objective == "sparc":
            patches, tokens = self.g_v(f_v), self.g_t(f_t)               # (B, P, E), (B, L, E)
            local = functools.partial(fine_grained_loss, mask=words, scale=scale, align=self.align,
                                      token_mean=cfg.token_mean, gather=gather)
            loss_g, loss_f = global_loss(v, t, scale, gather), local(tokens, patches)
            out = {"loss": cfg.lambda_g * loss_g + cfg.lambda_f * loss_f, "global": loss_g, "local": loss_f}  # Eq. 7
        else:
            x = SimpleNamespace(f_v=f_v, f_t=f_t, v=v, t=t, words=words, scale=scale, gather=gather)
            terms = {name: TERMS[name][0](self, x) for name in BASELINES[cfg.objective]}
            out = {"loss": sum(terms.values()), **terms}
        out["scale"] = scale
        return {name: value if name == "loss" else value.detach() for name, value in out.items()}

    def after_update(self, step, steps):
        """Keep 1 / tau within [1, 100], as CLIP does."""
        with torch.no_grad():
            self.log_scale.clamp_(0, math.log(100))

    def diagnose(self, batch):
        """L_f against the patches of a WRONG image. Where it is as low, L_f is solved without looking at the image."""
        if self.config.objective != "sparc":
            return {}
        patches = self.g_v(self.image_encoder(batch["images"])).roll(1, 0)
        tokens = self.g_t(self.text_encoder(batch["tokens"], batch["mask"]))
        loss = fine_grained_loss(tokens, patches, words_only(batch["mask"]), self.log_scale.exp(), self.align)
        return {"local_wrong_image": loss}

    def chance_loss(self, batch_size, mask, patches):
        """The loss when all similarities are equal; batch_size is global, patches their number P."""
        words = words_only(mask).sum(1).clamp(min=1).float()             # (B,), L_i
        if self.config.objective != "sparc":
            return sum(TERMS[name][1](self, batch_size, words, patches) for name in BASELINES[self.config.objective])
        return self.config.lambda_g * math.log(batch_size) + self.config.lambda_f * words.log().mean().item()

    def encode_image(self, images):
        """(B, 3, H, W) -> (B, E), normalised. FILIP and PACL, trained on patches, are compared by `similarity` instead."""
        return F.normalize(self.g_v(self.h_v(self.image_encoder(images).mean(1))).float(), dim=-1)

    def encode_text(self, tokens, mask):
        """(B, L), (B, L) -> (B, E), normalised."""
        return F.normalize(self.g_t(masked_mean(self.text_encoder(tokens, mask), words_only(mask))).float(), dim=-1)

    def encode_patches(self, images):
        """(B, 3, H, W) -> (B, P, E), normalised, through h_v and g_v as Sec. D.7 segments."""
        return F.normalize(self.g_v(self.h_v(self.image_encoder(images))).float(), dim=-1)

    def encode_tokens(self, tokens, mask):
        """(B, L), (B, L) -> (B, L, E), normalised, zeros where no word is: FILIP's side of `similarity`. PACL's is (B, 1, E)."""
        if self.config.objective == "pacl":
            return self.encode_text(tokens, mask)[:, None]
        words = words_only(mask)[..., None]
        return F.normalize(self.g_t(self.text_encoder(tokens, mask)).float(), dim=-1) * words

    def similarity(self, patches, tokens):
        """Scores (n, m) of n images (n, P, E) and m captions (m, L, E) of encode_patches and encode_tokens: FILIP's, PACL's."""
        return score(SCORES[self.config.objective], patches, tokens)

    def align_words(self, images, tokens, mask):
        """a_lp of Eq. 4 for pairs: (B, 3, H, W), (B, L), (B, L) -> (B, L, P)."""
        return self.align(self.g_t(self.text_encoder(tokens, mask)), self.g_v(self.image_encoder(images)))


# =====================================================================================================================
# The baselines of Sec. 4, as Sec. D.3 and D.4 describe the authors' re-implementations. To read SPARC, stop here.
#
#     objective    trained on            source
#     clip         global_loss           CLIP (arXiv 2103.00020)
#     filip        filip_loss            FILIP (arXiv 2111.07783): each patch with its best word, each word with its best patch
#     clip+filip   both                  Tables 9, 10
#     pacl         pacl_loss             PACL (arXiv 2212.04994): patches weighted by their similarity with the whole caption
#     gloria       global_loss +         GLoRIA (ICCV 2021): each word attends to the patches of EVERY image of the batch
#                  gloria_loss
#     mgca         global_loss +         MGCA (arXiv 2210.06044): words and patches attend to each other within the pair, and both
#                  mgca_loss             sides of a pair predict each other's prototypes
#
#     symbol            name here        shape             what
#     s^I, s^T          filip_scores     (b, B)            FILIP's similarities: own images x all captions, own captions x all images
#     phi               pacl_scores      (b, B)            PACL's compatibility, own images x all captions
#     a, c_ij, Z        gloria_scores    (b, B)            GLoRIA's matching of own images and all captions
#     o                 words_seen,      (B, L, E),        MGCA's cross-modal embeddings: of each word, from the patches,
#                       patches_read     (B, P, E)         and of each patch, from the words
#     c_k, q            prototypes, q    (K, E), (B, K)    MGCA's prototypes (500, D.4) and soft assignments
#
# Differs, or is our choice where the paper says nothing:
#   * One learned tau for all terms of an objective (D.3: all temperatures are learned); GLoRIA's tau_1, of its attention, is 1,
#     as the similarities are divided by sqrt(E) (D.3). The terms are added without weights.
#   * FILIP: D.4 says "20% token dropping", but in Table 11 its local loss costs .2 of all similarities in both directions at batch
#     sizes 2048, 4096 and 8192 (.26 at 16384; PACL's and GLoRIA's costs rise alike at their largest), so 20 % are kept.
#   * FILIP's patches go through h_v, which FILIP alone would not train otherwise; PACL's adapter replaces h_v and g_v.
#   * MGCA's prototypes are trained from the first step; its authors' code freezes them for an epoch.
#
# Where an objective compares images with all captions, the b x B x P x L similarities are made for a few captions at a time and
# made again in the backward pass.
# =====================================================================================================================

ELEMENTS = 2**24  # similarities in memory at a time, or those of one caption


def pieces(x, y, *more):
    """Cut y, tensors of B rows of which the first is (B, M, E) or (B, E), so that the similarities of x (b, N, E) and one piece
    of more than a row are at most ELEMENTS. -> a list of tuples"""
    width = y.shape[1] if y.ndim == 3 else 1
    size = max(1, ELEMENTS // (x.shape[0] * x.shape[1] * width))
    return list(zip(*(tensor.split(size) for tensor in (y, *more))))


def score(block, x, *y):
    """block(x, y) -> (b, c), for a few rows of y at a time, joined: (b, B)."""
    parts = pieces(x, *y)
    if len(parts) == 1:
        return block(x, *y)
    return torch.cat([checkpoint(block, x, *part, use_reentrant=False, preserve_rng_state=False) for part in parts], dim=1)


def gather_captions(tokens, mask, gather):
    """tokens (b, L, E), mask (b, L) of each rank -> those of all ranks, padded to the longest: (B, L', E), (B, L')."""
    own = torch.tensor([[tokens.shape[1]]], device=tokens.device)
    lengths = gather(own)
    more = 0 if lengths is own else int(lengths.max()) - tokens.shape[1]  # one rank never waits for its GPU here
    return gather(F.pad(tokens, (0, 0, 0, more))), gather(F.pad(mask, (0, more)).to(tokens.dtype)) > 0


def contrast(logits, gather):
    """InfoNCE both ways. logits: (b, B) of own images x captions of all ranks, pairs on the diagonal -> scalar.

    For the softmax over images a rank needs one number a caption from each other rank, not its patches.
    """
    b, i = len(logits), torch.arange(len(logits), device=logits.device)
    parts = gather(logits.logsumexp(0, keepdim=True))                    # (world, B): over each rank's images, its captions first
    parts = torch.stack([part.roll(k * b) for k, part in enumerate(parts)])[:, :b]  # (world, b): of this rank's captions
    return (F.cross_entropy(logits, i) + (parts.logsumexp(0) - logits.diagonal()).mean()) / 2


def similarities(x, y, y_mask):
    """x (n, N, E), y (m, M, E), y_mask (m, M) -> (n, N, m, M); below every cosine where y_mask is False."""
    s = x.flatten(0, 1) @ y.flatten(0, 1).T                              # (n * N, m * M)
    return s.view(*x.shape[:2], *y.shape[:2]).masked_fill(~y_mask, -2.0)


# s^I_ij = 1/P sum_p max_l cos(v_ip, t_jl),  s^T_ij = 1/L_i sum_l max_p cos(t_il, v_jp)
def filip_scores(x, y, y_mask, x_mask):
    """The mean over x's tokens of their best match in y. x (n, N, E), y (m, M, E), normalised; masks (m, M), (n, N) -> (n, m)."""
    best = similarities(x, y, y_mask).amax(3)                            # (n, N, m)
    mean = best.masked_fill(~x_mask[..., None], 0.0).sum(1) / x_mask.sum(1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~y_mask.any(1), 0.0)


@torch.no_grad()
def most_similar(patches, tokens, mask, keep):
    """FILIP's token dropping: a share `keep` of each image's patches, and of each caption's words, that are most similar to
    anything on the other side of this rank's batch. -> indices (b, P') of patches, (b, L') of words, mask (b, L') of words."""

    best_patch, best_word = torch.full(patches.shape[:2], -2.0, dtype=patches.dtype, device=patches.device), []
    for part in pieces(patches, tokens, mask):
        s = similarities(patches, *part)                                 # (b, P, c, L)
        best_patch = torch.maximum(best_patch, s.amax((2, 3)))           # (b, P)
        best_word.append(s.amax((0, 1)))                                 # (c, L)
    patch_index = best_patch.topk(math.ceil(keep * patches.shape[1] - 1e-4)).indices
    word_index = torch.cat(best_word).topk(math.ceil(keep * tokens.shape[1] - 1e-4)).indices  # padding comes last
    kept = torch.ceil(keep * mask.sum(1, keepdim=True) - 1e-4)           # (b, 1)
    return patch_index, word_index, torch.arange(word_index.shape[1], device=mask.device) < kept


@in_fp32
def filip_loss(tokens, patches, mask, scale, keep=0.2, gather=identity):
    """FILIP. tokens (B, L, E), patches (B, P, E), mask (B, L) True on words; scale: 1 / tau -> scalar.

    keep: the share of its tokens that a rank sends to the others. Compared are all own patches with the words sent by all, and all
    own words with the patches sent by all. As in FILIP each rank chooses within its own batch: N ranks equal one process for
    keep = 1 only.
    """
    patches, tokens = F.normalize(patches, dim=-1), F.normalize(tokens, dim=-1)
    patch_index, word_index, sent = most_similar(patches, tokens, mask, keep)
    captions = gather_captions(tokens.take_along_dim(word_index[..., None], 1), sent, gather)
    images = gather(patches.take_along_dim(patch_index[..., None], 1))   # (world * b, P', E)
    everything = [torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) for x in (patches, images)]
    i_to_t = score(functools.partial(filip_scores, x_mask=everything[0]), patches, *captions)            # (b, B), s^I
    t_to_i = score(functools.partial(filip_scores, x_mask=mask), tokens, images, everything[1])          # (b, B), s^T
    i = torch.arange(len(patches), device=patches.device)
    return (F.cross_entropy(scale * i_to_t, i) + F.cross_entropy(scale * t_to_i, i)) / 2


# phi_ij = sum_p softmax_p(cos(v_ip, t_j)) cos(v_ip, t_j)
def pacl_scores(patches, t):
    """PACL's similarity of b images and c captions. patches (b, P, E), t (c, E), normalised -> (b, c)."""
    s = patches @ t.T                                                    # (b, P, c)
    return (s.softmax(1) * s).sum(1)


@in_fp32
def pacl_loss(t, patches, scale, gather=identity):
    """PACL. t: (B, E) caption embeddings, patches (B, P, E); scale: 1 / tau -> scalar, an addition of SPARC's authors (D.4)."""
    patches, t = F.normalize(patches, dim=-1), F.normalize(t, dim=-1)
    return contrast(scale * score(pacl_scores, patches, gather(t)), gather)


# a_ijlp = softmax_p(t_jl . v_ip / sqrt(E)),  c_ijl = sum_p a_ijlp v_ip,  Z_ij = tau log sum_l exp(cos(c_ijl, t_jl) / tau)
def gloria_scores(patches, tokens, mask, gram, scale):
    """GLoRIA's Z / tau of b images and c captions. patches (b, P, E), tokens (c, L, E), mask (c, L) -> (b, c).

    c_ijl itself is never built: c.t = sum_p a_p s_p, and |c|^2 = a' V V' a with gram = V V' (b, P, P).
    """
    c, L, E = tokens.shape
    s = patches @ tokens.reshape(c * L, E).T                             # (b, P, c * L)
    a = (s / E**0.5).softmax(1)
    least = 1e-6 * (a * gram.diagonal(dim1=1, dim2=2)[..., None]).sum(1)  # of |c|^2: where patches cancel, only rounding is left
    square = torch.maximum((a * (gram @ a)).sum(1), least) * tokens.reshape(c * L, E).square().sum(1)  # (b, c * L), |c|^2 |t|^2
    cos = (a * s).sum(1) / square.clamp(min=1e-24).sqrt()
    cos = (scale * cos).view(-1, c, L).masked_fill(~mask, torch.finfo(s.dtype).min)
    return cos.logsumexp(2).masked_fill(~mask.any(1), 0.0)


@in_fp32
def gloria_loss(tokens, patches, mask, scale, gather=identity):
    """GLoRIA's local loss. tokens (B, L, E), patches (B, P, E), mask (B, L) True on words; scale: 1 / tau -> scalar.

    Tokens are not merged into words (D.3). GLoRIA's code has one more softmax, over the words, inside the one over patches; its
    paper has not.
    """
    captions = gather_captions(tokens, mask, gather)
    block = functools.partial(gloria_scores, gram=patches @ patches.transpose(1, 2), scale=scale)
    return contrast(score(block, patches, *captions), gather)


# q: K prototypes with equal shares of the global batch, each row sums to 1: Sinkhorn-Knopp on exp(cos(v, c) / epsilon)
@torch.no_grad()
def sinkhorn(scores, epsilon, iterations, gather=identity):
    """scores (B, K) -> soft assignments (B, K) of this rank's rows, balanced over the rows of all ranks; no gradient."""
    q = (scores / epsilon).exp()
    for _ in range(iterations):
        q = q / gather(q.sum(0, keepdim=True)).sum(0)
        q = q / q.sum(1, keepdim=True)
    return q


@in_fp32
def prototype_loss(v, t, prototypes, scale, epsilon=0.05, iterations=3, gather=identity):
    """MGCA's cross-modal prototype alignment: the assignments of one side are the targets of the other.
    v, t: (B, E), prototypes (K, E); scale: 1 / tau -> scalar."""
    v, t, prototypes = (F.normalize(x, dim=-1) for x in (v, t, prototypes))
    s_v, s_t = v @ prototypes.T, t @ prototypes.T                        # (B, K)
    q_v, q_t = (sinkhorn(s, epsilon, iterations, gather) for s in (s_v, s_t))
    return (F.cross_entropy(scale * s_v, q_t) + F.cross_entropy(scale * s_t, q_v)) / 2


@in_fp32
def mgca_loss(v, t, tokens, patches, mask, words_seen, patches_read, prototypes, scale, gather=identity):
    """MGCA's token-wise and prototype losses, weights 1 (D.4); the instance-wise one is global_loss. -> scalar

    v, t: (B, E); tokens (B, L, E), patches (B, P, E), and what the cross-attention makes of them, words_seen (B, L, E) and
    patches_read (B, P, E); mask (B, L) True on words; prototypes (K, E); scale: 1 / tau. No [CLS] weights (D.3). A pair without
    words adds nothing to the token-wise loss.
    """
    seen = mask.any(1, keepdim=True).expand(patches.shape[:2])           # (B, P)
    token_wise = sequence_loss(words_seen, tokens, mask, scale) + sequence_loss(patches_read, patches, seen, scale)
    return token_wise / 2 + prototype_loss(v, t, prototypes, scale, gather=gather)


class CrossAttention(nn.Module):
    """One head of width 128 (D.4): x (B, N, E) attends to y (B, M, E) where mask (B, M) is True -> (B, N, E)."""

    def __init__(self, dim, width=128):
        super().__init__()
        self.q, self.v = nn.Linear(dim, width), nn.Linear(dim, width)
        self.k = nn.Linear(dim, width, bias=False)  # it would add the same to all scores of a query
        self.out = nn.Linear(width, dim)

    def forward(self, x, y, mask=None):
        if mask is not None:
            mask = (mask | ~mask.any(1, keepdim=True))[:, None]          # (B, 1, M); where nothing is True, everything
        return self.out(F.scaled_dot_product_attention(self.q(x), self.k(y), self.v(y), mask))


class Adapter(nn.Module):
    """PACL's vision adapter: two layers with a residual connection, d -> E."""

    def __init__(self, width, dim):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(width, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.skip = nn.Linear(width, dim)

    def forward(self, x):
        return self.main(x) + self.skip(x)


def add_baseline_parts(model, image_width):
    """What a baseline has beyond SPARC's towers and adaptors. PACL's adapter stands in the place of h_v and g_v."""
    cfg = model.config
    if cfg.objective == "pacl":
        model.h_v, model.g_v = nn.Identity(), Adapter(image_width, cfg.embed_dim)
    if cfg.objective == "mgca":
        model.word_attention, model.patch_attention = CrossAttention(cfg.embed_dim), CrossAttention(cfg.embed_dim)
        model.prototypes = nn.Parameter(F.normalize(torch.randn(cfg.mgca_prototypes, cfg.embed_dim), dim=-1))


def filip_of(model, x):
    return filip_loss(model.g_t(x.f_t), model.g_v(model.h_v(x.f_v)), x.words, x.scale, model.config.filip_keep, x.gather)


def mgca_of(model, x):
    tokens, patches = F.normalize(model.g_t(x.f_t), dim=-1), F.normalize(model.g_v(x.f_v), dim=-1)
    words_seen, patches_read = model.word_attention(tokens, patches), model.patch_attention(patches, tokens, x.words)
    return mgca_loss(x.v, x.t, tokens, patches, x.words, words_seen, patches_read, model.prototypes, x.scale, x.gather)


def log_batch(model, batch, words, patches):
    return math.log(batch)


BASELINES = {"clip": ["global"], "filip": ["filip"], "clip+filip": ["global", "filip"], "pacl": ["pacl"],
             "gloria": ["global", "gloria"], "mgca": ["global", "mgca"]}
TERMS = {  # name: (loss of a model and its features x, chance level for captions of `words` (B,) words and images of `patches`)
    "global": (lambda model, x: global_loss(x.v, x.t, x.scale, x.gather), log_batch),
    "filip": (filip_of, log_batch),
    "pacl": (lambda model, x: pacl_loss(x.t, model.g_v(x.f_v), x.scale, x.gather), log_batch),
    "gloria": (lambda model, x: gloria_loss(model.g_t(x.f_t), model.g_v(x.f_v), x.words, x.scale, x.gather),
               lambda model, batch, words, patches:  # Z of a caption of L words is log L higher
               math.log(batch) + (words.mean().log() - words.log().mean()).item() / 2),
    "mgca": (mgca_of, lambda model, batch, words, patches:
             (words.log().mean().item() + math.log(patches)) / 2 + math.log(len(model.prototypes))),
}
COSTS = {  # Table 11: TFLOPS and peak MB of one update by batch size, per device
    "clip": {2048: (1.15, 4394), 4096: (2.29, 4452), 8192: (4.57, 5889), 16384: (9.14, 8578)},
    "pacl": {2048: (1.2, 4682), 4096: (2.46, 6267), 8192: (5.24, 9786), 16384: (12.8, 14785)},
    "gloria": {2048: (3.34, 8013), 4096: (13.21, 13840)},
    "mgca": {2048: (1.16, 4412), 4096: (2.31, 4462), 8192: (4.62, 5936), 16384: (9.23, 8681)},
    "filip": {2048: (1.37, 4394), 4096: (3.17, 5230), 8192: (8.09, 8657), 16384: (27.25, 15463)},
    "sparc": {2048: (1.15, 4408), 4096: (2.3, 4450), 8192: (4.6, 5914), 16384: (9.19, 8620)},
}


def filip_similarity(patches, tokens):
    """The mean of s^I and s^T with all tokens, one score for both directions of retrieval: n images (n, P, E), m captions
    (m, L, E), zeros where no word is -> (n, m)."""
    words, everything = tokens.any(-1), torch.ones(patches.shape[:2], dtype=torch.bool, device=patches.device)
    return (filip_scores(patches, tokens, words, everything) + filip_scores(tokens, patches, everything, words).T) / 2


SCORES = {  # of objectives without global embeddings: how an image and a caption are compared, (n, P, E), (m, L, E) -> (n, m)
    "filip": filip_similarity,
    "pacl": lambda patches, tokens: pacl_scores(patches, tokens[:, 0]),
}


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
