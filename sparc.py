"""SPARC: Improving fine-grained understanding in image-text pre-training (arXiv 2401.09865).

Each word of a caption weighs the image patches by their similarity, the least similar by 0, and
their weighted mean must resemble that word more than the caption's other words (L_f). CLIP's
contrastive loss between whole images and whole captions is added (L_g). We know of no code by the
authors; their App. C has a listing.

    symbol       name here                 shape        where
    f_v          Model.f_v                 (B, P, d)    Sec. 2; all patches, without [CLS]
    f_t          text_encoder              (B, L, d)    Sec. 2; all tokens
    h_v          Model.h_v                 d -> d       Sec. 2; "a single non-linear layer"
    g_v, g_t     Model.g_v, Model.g_t      d -> E       Sec. 2, D.1; linear, E = 512
    v_p          patches                   (B, P, E)    Sec. 2; g_v(f_v)
    t_l          tokens                    (B, L, E)    Sec. 2; g_t(f_t)
    vbar, tbar   v, t                      (B, E)       Sec. 2; global embeddings
    a            alignment_weights         (B, L, P)    Eq. 2-4
    sigma        threshold                 scalar       Eq. 3; 1 / P
    c_l          grouped                   (B, L, E)    Eq. 5; language-grouped vision embedding
    tau          1 / scale                 scalar       Eq. 1, 6; learned, shared by both losses
    L_g          global_loss               scalar       Eq. 1
    L_f          fine_grained_loss         scalar       Eq. 6

Differs from the paper:
  * A token that is equally similar to all patches weighs them alike; Eq. 2 would be 0 / 0.
  * [CLS] and [SEP] are no words: they are left out of tbar and L_f, but count among the 55
    tokens (Sec. 4.1), so that 53 of a caption are read. SentencePiece adds none by default.
  * vbar and tbar are Sec. 2's; listing 1 has a vbar without h_v and a tbar with the padding.
  * Training crops images a little and flips them, evaluation crops the centre (segmentation does
    not); Sec. 4.1 resizes the whole image to 224 x 224.
  * `tiny` has lambda_f 0.1 at 2e-3: with 0.5, the paper's least, or at lower rates words are not
    grounded. Its sigma is not 1 / P, and it has a residual h_v.
  * Ours, as the paper names none: a text encoder that sees both ways, GELU in h_v, g_v and g_t
    without bias, Table 8's softmax of plain inner products, CLIP's second beta and epsilon for
    AdamW, no decay of norms, biases, embeddings and positions, 1 / tau within [1, 100], gradients
    clipped at norm 1.
Not here: detection (Table 5: OWL-ViT needs both towers) and captioning (Table 7), for which
`eval.py --export` writes the image encoder alone; the 32k SentencePiece vocabulary (WordPiece takes
its place); a batch of each of several datasets in one step, labels of JFT as captions (D.2); Pascal
Context's .mat maps (Table 6; `--classes FILE` reads them in VOC's layout); D.5's prompts (write
each prefix with each suffix into a file for `eval.py --templates`).
Run:     python train.py --method sparc       (--objective clip, filip, ...: the baselines)
Result:  a colour word has .20 of its weight on objects of its colour, a shape word .18 on objects
         of its shape (chance .07; val, seed 0). --preset tiny-stem --lambda-f 0.5 --lr 1e-3, seeds
         6-8: zero-shot .585 +- .032, CLIP .522 +- .016, with FILIP .495 +- .005, FILIP
         .429 +- .027; R@1 of captions .654, CLIP .615, of images .559, .538; mIoU: less.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    # Eq. 7, or a baseline of Sec. 4
    objective: Literal["sparc", "clip", "filip", "clip+filip", "pacl", "gloria", "mgca"] = "sparc"
    align: Literal["sparse", "dense", "softmax"] = "sparse"  # Eq. 2-4; Table 8: sigma 0, softmax
    embed_dim: int = 512                                 # E, Sec. D.1
    lambda_g: float = 0.5                                # Eq. 7, Sec. D.4
    lambda_f: float = 1.0                                # Eq. 7; Sec. D.4 sweeps 0.5, 1, 5, 10
    sigma: float | None = None                           # Eq. 3; None is 1 / P
    h_v: Literal["plain", "residual"] = "plain"          # Sec. 2; residual is x + h_v(x)
    token_mean: Literal["caption", "batch"] = "caption"  # Eq. 6, or the paper's listing 1
    init_scale: float = 1 / 0.07                         # 1 / tau at first; CLIP, Sec. 2.5
    filip_keep: float = 0.2                              # FILIP: fraction of tokens kept
    mgca_prototypes: int = 500                           # MGCA: their number, Sec. D.4


# Sec. 4.1, D.1, D.4. lr and weight decay are the middle of the paper's sweeps; its "1.1e-4"
# is read as 1.1e-3 and its batch "16348" as 16384.
PAPER = dict(text_encoder="12x768:context=55,vocab_size=32000", vocab_size=32_000, batch=16384,
             steps=200_000, lr=9e-4, weight_decay=0.2, warmup=2500)
GLORIA = PAPER | dict(objective="gloria", batch=4096, steps=800_000)  # Sec. D.3
TINY = dict(data="shapes:objects=4,together=0.85,small=0.13,large=0.18,background=0,fillers=0", embed_dim=128,
            text_encoder="tiny", h_v="residual", lambda_f=0.1, batch=128, lr=2e-3, weight_decay=0.1, warmup=50)
PRESETS = {  # settings of this file and of train.py; flags override them
    # Words weigh the patches of their objects: without a stem, which smears objects over their
    # neighbours. differs: sigma is not 1 / P, at which the background keeps weight.
    "tiny": TINY | dict(image_encoder="tiny-patch", sigma=0.4, steps=1200),
    # Faster to good retrieval, but its words weigh no objects.
    "tiny-stem": TINY | dict(image_encoder="tiny/4", steps=400),
    "b32": PAPER | dict(image_encoder="ViT-B/32"),
    "b16": PAPER | dict(image_encoder="ViT-B/16"),
    "l14": PAPER | dict(image_encoder="ViT-L/14", steps=250_000),
    "gloria-b32": GLORIA | dict(image_encoder="ViT-B/32"),
    "gloria-b16": GLORIA | dict(image_encoder="ViT-B/16"),
}


@contextlib.contextmanager
def in_fp32(*tensors):
    """`with in_fp32(x, y) as (x, y):` half precision is float32, float64 stays, autocast is off."""
    with torch.autocast(tensors[0].device.type, enabled=False):
        yield [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def identity(x):
    return x


def own_rows(x, gather):
    """For each row of this rank's x (B, ...) its number in gather(x) -> (B,)."""
    return getattr(gather, "rank", 0) * len(x) + torch.arange(len(x), device=x.device)


def in_rows(function, *rows, size, limit=2**24):
    """function(*rows) -> (B, ...). A row needs `size` numbers. If all rows need more than `limit`,
    function gets a few rows at a time, and the backward pass computes each part again."""
    n = max(1, limit // size)
    if n >= len(rows[0]):
        return function(*rows)
    parts = zip(*[x.split(n) for x in rows])
    return torch.cat([checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False)
                      for part in parts])


# L_g = -1/2B sum_i [ log softmax_j(cos(vbar_i, tbar_j) / tau)_i
#                   + log softmax_j(cos(tbar_i, vbar_j) / tau)_i ]               (Eq. 1)
def global_loss(v, t, scale, gather=identity):
    """CLIP's loss. v, t: (B, E) embeddings of pairs; scale: 1 / tau -> scalar.
    gather: (B, E) -> (world * B, E), differentiable, rank by rank; gather.rank is this one."""
    with in_fp32(v, t) as (v, t):
        v, t = F.normalize(v, dim=-1), F.normalize(t, dim=-1)
        return contrast(scale * v @ gather(t).T, gather)            # of (B, world * B) logits


def contrast(logits, gather=identity):
    """Eq. 1 of any logits (B, world * B), this rank's images x all captions -> scalar."""
    i = own_rows(logits, gather)
    positive = logits.take_along_dim(i[:, None], 1)[:, 0]           # (B,)
    v_to_t = positive - logits.logsumexp(1)   # (B,)  log softmax_j(cos(vbar_i, tbar_j) / tau)_i
    # ranks exchange a number per caption, its sum over their images, in place of the images
    sums = gather(logits.logsumexp(0, keepdim=True)).logsumexp(0)   # (world * B,)
    t_to_v = positive - sums[i]               # (B,)  log softmax_j(cos(tbar_i, vbar_j) / tau)_i
    return -(v_to_t + t_to_v).mean() / 2


# s_lp = t_l . v_p
# shat_lp = (s_lp - min_k s_lk) / (max_k s_lk - min_k s_lk)                      (Eq. 2)
# stil_lp = shat_lp if shat_lp >= sigma else 0                                   (Eq. 3)
# a_lp = stil_lp / sum_r stil_lr                                                 (Eq. 4)
def alignment_weights(tokens, patches, threshold=None):
    """The weight of each patch for each token; the weights of a token sum to 1.
    tokens (B, L, E), patches (B, P, E) -> a (B, L, P). threshold: sigma, by default 1 / P."""
    sigma = 1 / patches.shape[1] if threshold is None else threshold
    with in_fp32(tokens, patches) as (tokens, patches):
        s = tokens @ patches.transpose(1, 2)                        # (B, L, P)
        low, high = s.amin(-1, keepdim=True), s.amax(-1, keepdim=True)  # (B, L, 1)
        equal = high == low  # differs: uniform weights there, because Eq. 2 is 0 / 0
        s_hat = torch.where(equal, 1.0, (s - low) / (high - low).masked_fill(equal, 1.0))
        s_til = torch.where(s_hat < sigma, 0.0, s_hat)
        return s_til / s_til.sum(-1, keepdim=True)


# L_f = -1/2B sum_i 1/L_i sum_j [ log softmax_k(cos(c_ij, t_ik) / tau)_j
#                               + log softmax_k(cos(t_ij, c_ik) / tau)_j ]       (Eq. 6)
def sequence_losses(c, t, mask, scale):
    """-1/2 sum_j of Eq. 6, for any c. c, t (B, L, E), mask (B, L) True on words; scale: 1 / tau
    -> (B,). Negatives are the other words of the same caption. A caption without words has 0."""
    with in_fp32(c, t) as (c, t):
        c, t = F.normalize(c, dim=-1), F.normalize(t, dim=-1)
        logits = scale * c @ t.transpose(1, 2)   # (B, L, L), [i, j, k] is cos(c_ij, t_ik) / tau
        no_word = ~mask[:, None, :]          # (B, 1, L)
        lowest = torch.finfo(logits.dtype).min   # -inf would be nan in a caption without words
        c_to_t = logits.masked_fill(no_word, lowest).log_softmax(-1)
        t_to_c = logits.transpose(1, 2).masked_fill(no_word, lowest).log_softmax(-1)
        log_p = c_to_t.diagonal(dim1=1, dim2=2) + t_to_c.diagonal(dim1=1, dim2=2)   # (B, L)
        return -0.5 * log_p.masked_fill(~mask, 0.0).sum(1)


def mean_of_words(losses, mask, token_mean="caption", gather=identity):
    """The losses (B,) of sequence_losses -> scalar. token_mean: "caption" is Eq. 6; "batch" is
    listing 1's mean over all words: the mean of all ranks' values is that of the global batch."""
    count = mask.sum(1)                      # (B,), L_i
    if token_mean == "batch":
        words = gather(count.to(losses.dtype)[:, None]).mean()  # per caption of the global batch
        return losses.sum() / (len(count) * words).clamp(min=1)
    return (losses / count.clamp(min=1)).mean()


# c_l = sum_p a_lp v_p                                                           (Eq. 5)
def fine_grained_loss(tokens, patches, mask, scale, align=alignment_weights,
                      token_mean="caption", gather=identity):
    """SPARC's local loss L_f. tokens (B, L, E), patches (B, P, E) -> scalar.
    mask (B, L): True on words; scale: 1 / tau; align(tokens, patches) -> a (B, L, P)."""
    def losses(tokens, patches, mask):
        grouped = align(tokens, patches) @ patches   # (B, L, E), c_l
        return sequence_losses(grouped, tokens, mask, scale)

    with in_fp32(tokens, patches) as (tokens, patches):
        size = tokens.shape[1] * patches.shape[1]        # weights of a caption, (L, P)
        sums = in_rows(losses, tokens, patches, mask, size=size)           # (B,)
        return mean_of_words(sums, mask, token_mean, gather)


def words_only(mask):
    """Mask of tokens -> mask of words, both (B, L): without first and last token."""
    return F.pad(mask[:, 2:], (1, 1))  # token l > 0 is a word if there is a token l + 1


def masked_mean(x, mask):
    """(B, L, d), (B, L) -> (B, d), the mean where mask is True; 0 where it never is."""
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


class Residual(nn.Sequential):
    """x + h_v(x). differs: the paper adds no x. With it D.7's patches contain L_f's g_v(x)."""

    def forward(self, x):
        return x + super().forward(x)


class Model(nn.Module):
    """Two encoders, the adaptors of Sec. 2 and the loss of Eq. 7. The encoders return all
    tokens: text_encoder(tokens, mask) (B, L, d), image_encoder(images) (B, P, d), or (B, 1 + P, d)
    with [CLS] first; image_encoder.cls is None if it has no [CLS]."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config = config
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        h_v = Residual if config.h_v == "residual" else nn.Sequential
        self.h_v = h_v(nn.Linear(image_width, image_width), nn.GELU())
        self.g_v = nn.Linear(image_width, config.embed_dim, bias=False)
        self.g_t = nn.Linear(text_width, config.embed_dim, bias=False)
        nn.init.normal_(self.g_v.weight, std=image_width**-0.5)
        nn.init.normal_(self.g_t.weight, std=text_width**-0.5)
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.init_scale)))

    def forward(self, batch, gather=identity):
        """batch: images (B, 3, H, W), tokens, mask (B, L) -> the loss and scalars to log."""
        cfg, words = self.config, words_only(batch["mask"])
        f_v = self.f_v(batch["images"])                             # (B, P, d)
        f_t = self.text_encoder(batch["tokens"], batch["mask"])     # (B, L, d)
        v = self.g_v(self.h_v(f_v.mean(1)))                         # (B, E)
        t = self.g_t(masked_mean(f_t, words))                       # (B, E)
        patches, tokens = self.g_v(f_v), self.g_t(f_t)              # (B, P, E), (B, L, E)
        scale = self.log_scale.exp()
        loss_g = global_loss(v, t, scale, gather)
        loss_f = fine_grained_loss(tokens, patches, words, scale, self.align, cfg.token_mean,
                                   gather)
        loss = cfg.lambda_g * loss_g + cfg.lambda_f * loss_f        # Eq. 7
        return {"loss": loss, "global": loss_g.detach(), "local": loss_f.detach(),
                "scale": scale.detach()}

    def f_v(self, images):
        """(B, 3, H, W) -> all patches (B, P, d). A [CLS] token is dropped: the paper has none."""
        tokens = self.image_encoder(images)
        return tokens if self.image_encoder.cls is None else tokens[:, 1:]

    def align(self, tokens, patches):
        """Eq. 2-4, or an ablation of Table 8. (B, L, E), (B, P, E) -> a (B, L, P)."""
        if self.config.align == "softmax":  # without a temperature: the paper names none
            return (tokens @ patches.transpose(1, 2)).softmax(-1)
        sigma = 0.0 if self.config.align == "dense" else self.config.sigma
        return alignment_weights(tokens, patches, sigma)

    def diagnose(self, batch):
        """L_f of captions with WRONG images: if words are not grounded, it is as low as L_f."""
        images, ids, mask = (batch[name][:256] for name in ("images", "tokens", "mask"))
        tokens = self.g_t(self.text_encoder(ids, mask))             # (B, L, E)
        patches = self.g_v(self.f_v(images))                        # (B, P, E)
        wrong = fine_grained_loss(tokens, patches.roll(1, 0), words_only(mask),
                                  self.log_scale.exp(), self.align, self.config.token_mean)
        used = patches_per_word(self.align(tokens, patches), words_only(mask))
        return {"local_wrong_image": wrong, "patches_per_word": used}

    def after_update(self, step, steps):
        """Keep 1 / tau within [1, 100], as CLIP does."""
        self.log_scale.data.clamp_(0, math.log(100))

    def encode_image(self, images):
        """(B, 3, H, W) -> (B, E), normalised."""
        return F.normalize(self.g_v(self.h_v(self.f_v(images).mean(1))).float(), dim=-1)

    def encode_text(self, tokens, mask):
        """(B, L), (B, L) -> (B, E), normalised."""
        t = self.g_t(masked_mean(self.text_encoder(tokens, mask), words_only(mask)))
        return F.normalize(t.float(), dim=-1)

    def encode_patches(self, images):
        """(B, 3, H, W) -> (B, P, E), normalised, through h_v and g_v (D.7). eval.py compares them
        with all classes of a data set, as we read D.7; the image's own alone would be easier."""
        return F.normalize(self.g_v(self.h_v(self.f_v(images))).float(), dim=-1)

    def align_words(self, images, tokens, mask):
        """The alignment weights of pairs. (B, 3, H, W), (B, L), (B, L) -> a (B, L, P)."""
        tokens = self.g_t(self.text_encoder(tokens, mask))          # (B, L, E)
        return self.align(tokens, self.g_v(self.f_v(images)))

    # To read SPARC, stop here. Below: what starts from CLIP, the loss at chance, baselines.

    def clip_parameters(self):
        """What starts from a whole CLIP (--init-weights); h_v, which it lacks, does not."""
        places = {"text_projection": self.g_t.weight, "logit_scale": self.log_scale}
        if isinstance(self.g_v, nn.Linear):  # PACL's is not
            places["visual.proj"] = self.g_v.weight
        return places

    def chance_loss(self, batch_size, mask, patches):
        """The loss when all similarities are equal. batch_size: global; patches: P."""
        words = words_only(mask).sum(1).clamp(min=1).float()        # (B,), L_i
        loss_g, loss_f = math.log(batch_size), words.log().mean()
        if self.config.token_mean == "batch":
            loss_f = (words * words.log()).sum() / words.sum()
        return self.config.lambda_g * loss_g + self.config.lambda_f * loss_f.item()


# Mistakes in public copies of L_f: 0 / 0 in Eq. 2; -inf times 0 at padding; weights that are
# detached, or of cosines; negatives from the whole batch; no sigma, or 1 / 196 for every P.
#
# Into OpenCLIP's CLIP (`model`), for its `images` and `ids`; under DDP pass common.gather:
#     out = model.forward_intermediates(images, ids, image_indices=1, text_indices=1,
#                                       normalize_intermediates=True, image_output_fmt="NLC")
#     patches = out["image_intermediates"][-1] @ model.visual.proj     # (B, P, E), no [CLS]
#     tokens = out["text_intermediates"][-1] @ model.text_projection   # (B, L, E)
#     words = (ids > 0) & (ids < 49406)                                # (B, L)
#     v, t, scale = out["image_features"], out["text_features"], model.logit_scale.exp()
#     loss_f = fine_grained_loss(tokens, patches, words, scale)
#     loss = 0.5 * global_loss(v, t, scale, gather) + loss_f
#
# What was found out on the embedded world. Preset tiny-stem with lambda_f 0.5, the paper's least:
# L_f is nearly as low for a wrong image (at the end of training .11 and .16; chance 2.2). Its
# negatives are words of the same caption, so patches can be a codebook that tells words apart
# whatever the image shows. Zero-shot and retrieval gain, segmentation loses. With softmax weights
# (.608) or no threshold (.584) no loss of zero-shot is shown (.585; Table 8 has one), and softmax
# finds captions better (R@1 .674, .654); with 36 patches its zero-shot is lower (.616, .711).
# With lambda_f 0.1 at 2e-3, above the rate that zero-shot prefers, L_f needs the right image (.84,
# wrong image 2.05). Words weigh their objects most without a stem, as in `tiny`: with `--sigma .3
# --steps 2400` and seeds 6-8, colour words have .170 of their weight on objects of their colour,
# shape words .140 on objects of their shape (chance .069). SPARC is above CLIP with each seed in
# zero-shot (.670, .657), R@1 (.759, .695 of captions, .716, .663 of images) and faithfulness (K-Pna
# .926, .910), with two in mIoU of colours (.220, .208). Softmax puts more weight on colours with
# each seed (.283), but not on shapes (.064); without sparsity both get less (.130, .117).
# An update takes 1.005 times CLIP's FLOPs (Table 11: 1.005), which tests/test_train.py counts.


def patches_per_word(a, mask):
    """How many patches a word uses: 1 / sum_p a_lp^2, from 1 to P; a softmax tends to 1 (App. A).
    a (B, L, P), mask (B, L) True on words -> scalar, the mean over all words."""
    with in_fp32(a) as (a,):
        used = 1 / a.square().sum(-1)                                   # (B, L)
        return (used * mask).sum() / mask.sum().clamp(min=1)


# Below: the baselines of Sec. 4, as D.3 and D.4 describe them; b pairs on a rank, B on all. The
# losses of an objective share one learned tau and are added. MGCA's weigh 2 : 2 : 1, as in its code
# with D.4's lambdas of 1 (its defaults: 1, .7, .5). vbar and tbar evaluate all but FILIP and PACL.


def in_chunks(scores, x, y):
    """scores(x (b, N, E), y (B, M, E)) -> (b, B, ...), a few captions or images y at a time."""
    size = len(x) * x.shape[1] * y.shape[1]                        # similarities to one y
    columns = in_rows(lambda part: scores(x, part).transpose(0, 1), y, size=size)
    return columns.transpose(0, 1)


def gather_captions(tokens, gather):
    """tokens (b, L, E) -> those of all ranks (B, L', E), padded with zeros to the longest."""
    lengths = gather(torch.full((1, 1), tokens.shape[1], device=tokens.device))  # (world, 1)
    padding = int(lengths.max()) - tokens.shape[1] if len(lengths) > 1 else 0
    return gather(F.pad(tokens, (0, 0, 0, padding)))


def best_cosines(x, y):
    """x (n, N, E), y (m, M, E), normalised, zeros where padded -> maxima (n, m, N)."""
    s = x.flatten(0, 1) @ y.flatten(0, 1).T                             # (n * N, m * M)
    s = s.view(*x.shape[:2], *y.shape[:2]).masked_fill(~y.any(-1), -2.0)  # no cosine
    return s.amax(3).transpose(1, 2)


# s^I_ij = 1/P sum_p max_l cos(v_ip, t_jl),  s^T_ij = 1/L_i sum_l max_p cos(t_il, v_jp)
def filip_scores(x, y):
    """The mean over x of best_cosines. x (n, N, E), y (m, M, E) -> (n, m)."""
    mean = best_cosines(x, y).sum(2) / x.any(-1).sum(1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~y.flatten(1).any(1), 0.0)  # captions without words


def most_similar(x, y, keep):
    """FILIP's token dropping: of each image or caption of x the fraction `keep` of tokens that
    are most similar to any token of y. x (b, N, E), y (b, M, E) -> (b, N', E)."""
    if keep == 1:  # all are
        return x
    with torch.no_grad():
        best = in_chunks(best_cosines, x, y).amax(1).masked_fill(~x.any(-1), -2.0)  # (b, N)
        # 1e-4: in fp32 0.6 * 25 is above 15
        index = best.topk(math.ceil(keep * x.shape[1] - 1e-4)).indices  # (b, N')
        count = torch.ceil(keep * x.any(-1).sum(1, keepdim=True) - 1e-4)
        kept = torch.arange(index.shape[1], device=x.device) < count    # (b, N')
    return x.take_along_dim(index[..., None], 1) * kept[..., None]


def filip_loss(tokens, patches, mask, scale, keep=0.2, gather=identity):
    """FILIP (arXiv 2111.07783). tokens (b, L, E), patches (b, P, E), mask (b, L) -> scalar.
    A rank sends its most similar tokens alone, chosen among its own b pairs; so N ranks equal one
    process only if keep = 1. D.4 says "20% token dropping"; Table 11's FLOPs fit 20 % kept."""
    with in_fp32(tokens, patches) as (tokens, patches):
        patches = F.normalize(patches, dim=-1)
        tokens = F.normalize(tokens, dim=-1) * mask[..., None]          # padding is zeros
        words = gather_captions(most_similar(tokens, patches, keep), gather)    # (B, L', E)
        images = gather(most_similar(patches, tokens, keep))            # (B, P', E)
        i_to_t = scale * in_chunks(filip_scores, patches, words)        # (b, B)
        t_to_i = scale * in_chunks(filip_scores, tokens, images)        # (b, B)
        i = own_rows(tokens, gather)
        return (F.cross_entropy(i_to_t, i) + F.cross_entropy(t_to_i, i)) / 2


# phi_ij = sum_p softmax_p(cos(v_ip, t_j)) cos(v_ip, t_j)
def pacl_scores(patches, t):
    """patches (b, P, E), captions t (c, 1, E), normalised -> phi (b, c)."""
    s = patches @ t[:, 0].T                                             # (b, P, c)
    return (s.softmax(1) * s).sum(1)


def pacl_loss(t, patches, scale, gather=identity):
    """PACL (arXiv 2212.04994). t (b, E) of captions, patches (b, P, E) -> scalar."""
    with in_fp32(patches, t) as (patches, t):
        patches, t = F.normalize(patches, dim=-1), F.normalize(t, dim=-1)
        return contrast(scale * in_chunks(pacl_scores, patches, gather(t)[:, None]), gather)


# a_ijlp = softmax_p(t_jl . v_ip / sqrt(E)),  c_ijl = sum_p a_ijlp v_ip
# Z_ij = tau log sum_l exp(cos(c_ijl, t_jl) / tau)
def gloria_loss(tokens, patches, mask, scale, gather=identity):
    """GLoRIA's local loss (ICCV 2021). tokens (b, L, E), patches (b, P, E), mask (b, L)
    -> scalar. Tokens are not merged into words, and s is divided by sqrt(E) (D.3).
    differs: its code, not its paper, has one more softmax, over the words, inside the first."""
    def scores(patches, tokens):  # c is never built: |c|^2 = a' gram a
        words, tokens = tokens.any(-1), tokens.flatten(0, 1)            # (c, L), (c * L, E)
        tokens = tokens / tokens.shape[1] ** 0.5  # cosines stay
        s = patches @ tokens.T                                          # (b, P, c * L)
        a = s.softmax(1)
        c_square = (a * (gram @ a)).sum(1)                              # (b, c * L)
        v_square = (gram.diagonal(dim1=1, dim2=2)[:, None] @ a)[:, 0]
        c_square = torch.maximum(c_square, 1e-6 * v_square)  # |c| may be mere rounding
        norms = (c_square * tokens.square().sum(1)).clamp(min=1e-24).sqrt()  # |c| |t|
        cos = ((a * s).sum(1) / norms).view(-1, *words.shape)           # (b, c, L)
        z = (scale * cos).masked_fill(~words, torch.finfo(s.dtype).min).logsumexp(2)
        return z.masked_fill(~words.any(1), 0.0)                        # (b, c), Z / tau

    with in_fp32(tokens, patches) as (tokens, patches):
        gram = patches @ patches.transpose(1, 2)                        # (b, P, P)
        captions = gather_captions(tokens * mask[..., None], gather)    # (B, L', E)
        return contrast(in_chunks(scores, patches, captions), gather)


def mgca_loss(tokens, patches, mask, word_context, patch_context, scale):
    """MGCA's token-wise loss (arXiv 2210.06044), without [CLS] weights (D.3) -> scalar.
    tokens (b, L, E), patches (b, P, E), mask (b, L) True on words; word_context (b, L, E): what
    each word gets from patches; patch_context (b, P, E): what each patch gets from words."""
    patch_mask = mask.any(1, keepdim=True).expand(patches.shape[:2])    # (b, P)
    of_words = sequence_losses(word_context, tokens, mask, scale)
    of_patches = sequence_losses(patch_context, patches, patch_mask, scale)
    return (mean_of_words(of_words, mask) + mean_of_words(of_patches, patch_mask)) / 2


def prototype_loss(v, t, prototypes, scale, gather=identity):
    """MGCA: each side of a pair predicts the other's prototypes. v, t (b, E), prototypes (K, E)
    -> scalar. differs: MGCA's code divides prototypes by their norms in place, fixes them in the
    first epoch, and has a fixed tau for each loss (.07, .1, .2). D.3 learns tau: three that start
    at these values gave zero-shot .855, one .941 (36 patches, --data shapes, seed 0)."""
    with in_fp32(v, t, prototypes) as (v, t, prototypes):
        v, t, prototypes = (F.normalize(x, dim=-1) for x in (v, t, prototypes))
        s = torch.stack([v @ prototypes.T, t @ prototypes.T])           # (2, b, K)
        with torch.no_grad():  # Sinkhorn-Knopp: columns to sum 1 over all ranks, rows to sum 1
            q = (s / 0.05).exp()  # epsilon
            for _ in range(3):
                q = q / gather(q.sum(1)[None]).sum(0)[:, None]
                q = q / q.sum(2, keepdim=True)
        return (F.cross_entropy(scale * s[0], q[1]) + F.cross_entropy(scale * s[1], q[0])) / 2


class CrossAttention(nn.Module):
    """MGCA's, one head of 128 (D.4): x (b, N, E) attends to y (b, M, E) where mask (b, M)
    -> (b, N, E). MGCA's code has it as an option; by default it has no projections."""

    def __init__(self, dim, width=128):
        super().__init__()
        self.q, self.v = nn.Linear(dim, width), nn.Linear(dim, width)
        self.k = nn.Linear(dim, width, bias=False)  # a bias would cancel in the softmax
        self.out = nn.Linear(width, dim)

    def forward(self, x, y, mask):
        mask = mask | ~mask.any(1, keepdim=True)    # where nothing is True, all of y
        x = F.scaled_dot_product_attention(self.q(x), self.k(y), self.v(y), mask[:, None])
        return self.out(x)


class Adapter(nn.Module):
    """PACL's vision adapter: two layers with a residual connection, d -> E."""

    def __init__(self, width, dim):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(width, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.skip = nn.Linear(width, dim)

    def forward(self, x):
        return self.main(x) + self.skip(x)


class Baseline(Model):
    """SPARC's encoders and adaptors, trained on another objective."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__(config, image_encoder, text_encoder, image_width, text_width)
        self.late_interaction = config.objective in ("filip", "pacl")  # without L_g
        if config.objective == "pacl":
            self.h_v, self.g_v = nn.Identity(), Adapter(image_width, config.embed_dim)
        if config.objective == "mgca":
            self.word_attention = CrossAttention(config.embed_dim)
            self.patch_attention = CrossAttention(config.embed_dim)
            prototypes = torch.randn(config.mgca_prototypes, config.embed_dim)
            self.prototypes = nn.Parameter(F.normalize(prototypes, dim=-1))

    def forward(self, batch, gather=identity):
        cfg, words = self.config, words_only(batch["mask"])
        f_v = self.f_v(batch["images"])                                 # (b, P, d)
        f_t = self.text_encoder(batch["tokens"], batch["mask"])         # (b, L, d)
        v = self.g_v(self.h_v(f_v.mean(1)))                             # (b, E)
        t = self.g_t(masked_mean(f_t, words))                           # (b, E)
        scale, losses = self.log_scale.exp(), {}
        if not self.late_interaction:
            losses["global"] = global_loss(v, t, scale, gather)
        if cfg.objective in ("filip", "clip+filip"):
            tokens, patches = self.g_t(f_t), self.g_v(self.h_v(f_v))  # h_v: to train it, too
            losses["filip"] = filip_loss(tokens, patches, words, scale, cfg.filip_keep, gather)
        if cfg.objective == "pacl":
            losses["pacl"] = pacl_loss(t, self.g_v(f_v), scale, gather)
        if cfg.objective == "gloria":
            losses["gloria"] = gloria_loss(self.g_t(f_t), self.g_v(f_v), words, scale, gather)
        if cfg.objective == "mgca":
            tokens = F.normalize(self.g_t(f_t), dim=-1)
            patches = F.normalize(self.g_v(f_v), dim=-1)
            word_context = self.word_attention(tokens, patches, words.new_ones(f_v.shape[:2]))
            patch_context = self.patch_attention(patches, tokens, words)
            losses["mgca"] = mgca_loss(tokens, patches, words, word_context, patch_context, scale)
            prototype = prototype_loss(v, t, self.prototypes, scale, gather=gather)
            losses["prototype"] = 0.5 * prototype  # all three are half of MGCA's 2 : 2 : 1
        logged = {name: loss.detach() for name, loss in losses.items()}
        return {"loss": sum(losses.values()), **logged, "scale": scale.detach()}

    def diagnose(self, batch):
        return {}

    def chance_loss(self, batch_size, mask, patches):
        words = words_only(mask).sum(1).clamp(min=1).float()            # (b,), L_i
        log_B, log_L = math.log(batch_size), words.log().mean().item()
        other = {"clip+filip": log_B,
                 "gloria": log_B + (words.mean().log().item() - log_L) / 2,  # Z grows by log L
                 "mgca": (log_L + math.log(patches * self.config.mgca_prototypes)) / 2}
        return log_B + other.get(self.config.objective, 0.0)

    def encode_tokens(self, tokens, mask):
        """For `similarity`: words (B, L, E), padded with zeros, or PACL's captions (B, 1, E)."""
        if self.config.objective == "pacl":
            return self.encode_text(tokens, mask)[:, None]
        tokens = self.g_t(self.text_encoder(tokens, mask)).float()      # (B, L, E)
        return F.normalize(tokens, dim=-1) * words_only(mask)[..., None]

    def similarity(self, patches, tokens):
        """(n, P, E) of images, (m, L, E) of captions -> scores (n, m), for both directions: ours
        of FILIP, which has one for each, is their mean."""
        if self.config.objective == "pacl":
            return in_chunks(pacl_scores, patches, tokens)
        i_to_t = in_chunks(filip_scores, patches, tokens)               # (n, m)
        return (i_to_t + in_chunks(filip_scores, tokens, patches).T) / 2


def model_class(args):
    return Model if args.objective == "sparc" else Baseline


# Measures of the paper --------------------------------------------------------------------
#
# eval.py has the images and captions; these have matrices.


def segment(patches, classes, size):
    """Patches (P, E), classes (C, E) -> (H, W), 1 + the class nearest to each pixel's patch."""
    ids, grid = (patches @ classes.T).argmax(1) + 1, math.isqrt(len(patches))  # (P,)
    return F.interpolate(ids.view(1, 1, grid, grid).float(), size, mode="nearest")[0, 0].long()


def image_iou(predicted, truth, foreground_only=False):
    """Mean IoU over the classes 1, 2, ... in the truth, None without one (D.7). Maps (H, W);
    pixels with truth 255 are ignored, and with `foreground_only` those with truth 0 too."""
    valid = truth != 255
    if foreground_only:
        valid = valid & (truth != 0)
    ious = []
    for c in truth[valid & (truth != 0)].unique():
        p_c, t_c = (predicted == c) & valid, (truth == c) & valid
        ious.append((p_c & t_c).sum() / (p_c | t_c).sum())
    return torch.stack(ious).mean().item() if ious else None


def k_precision(retrieved, truths, among=None):
    """K-Precision (Sec. 4.4): how many of a retrieved caption's words occur in the true
    captions, a fraction, mean over images. retrieved: n lists of words; truths: n sets; among:
    count only these words (K-Pna: nouns and adjectives), and captions that have one.

    differs: Adlakha et al. (2023), cited for it, drop "a", "an", "the" and count a word only as
    often as the truth has it. The paper counts articles: its PACL, at chance, has .26, K-Pna .03.
    """
    precisions = []
    for words, truth in zip(retrieved, truths):
        words = [word for word in words if among is None or word in among]
        if words:
            precisions.append(sum(word in truth for word in words) / len(words))
    return sum(precisions) / len(precisions) if precisions else math.nan


def share_on(mask, weights):
    """Which share of the weights (P,) of patches lies on a mask (S, S), in pixels."""
    patches = F.adaptive_avg_pool2d(mask[None].float(), math.isqrt(len(weights))).flatten()  # (P,)
    return ((weights * patches).sum() / weights.sum()).item()


if __name__ == "__main__":
    # 4 of 9 patches of an image resemble the words of its caption, the others are noise.
    torch.manual_seed(0)
    tokens, patches = torch.randn(64, 4, 32), 0.3 * torch.randn(64, 9, 32)
    place = torch.rand(64, 9).argsort(1)[:, :4]                         # (B, L)
    patches.scatter_add_(1, place[..., None].expand(-1, -1, 32), tokens)
    print("words 0 to 3 are shown by patches", place[0].tolist(), "and weigh the 9 patches so:")
    print(alignment_weights(tokens, patches)[0])
    mask = torch.ones(64, 4, dtype=torch.bool)
    right = fine_grained_loss(tokens, patches, mask, 10.0)
    wrong = fine_grained_loss(tokens, patches.roll(1, 0), mask, 10.0)
    print(f"L_f with the right images {right:.3f}, with wrong images {wrong:.3f}")
