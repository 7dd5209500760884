"""SPARC: Improving fine-grained understanding in image-text pre-training
(Bica et al., arXiv 2401.09865).

CLIP's loss compares whole images with whole captions. SPARC keeps this loss (L_g) and adds one for
single words (L_f). A word gives each patch of the image a weight that grows with their similarity;
patches below a threshold get 0. The weighted mean of the patches must resemble this word more than
the other words of the caption. We know of no code by the authors; their App. C has a listing.

There are B pairs on each rank, P patches in an image, and L tokens in the longest caption. Each
encoder has its width d. Embeddings have the width E, the paper's d. Indices: i is a pair of this
rank, j a pair of any rank, l and l' are tokens of one caption, p and r are patches.

    symbol      name here               shape       where
    f_v         Model.patch_outputs     (B, P, d)   Sec. 2; all patches, without [CLS]
    f_t         text_encoder            (B, L, d)   Sec. 2; all tokens
    h_v         Model.h_v               d -> d      Sec. 2; "a single non-linear layer"
    g_v, g_t    Model.g_v, Model.g_t    d -> E      Sec. 2, D.1; linear, E = 512
    v_p         patches, v              (B, P, E)   Sec. 2; g_v(f_v)
    t_l         tokens, t               (B, L, E)   Sec. 2; g_t(f_t)
    vbar, tbar  vbar, tbar              (B, E)      Sec. 2; global embeddings
    a           alignment_weights       (B, L, P)   Eq. 2-4
    sigma       threshold               scalar      Eq. 3; 1 / P by default
    c_l         grouped_patches, c      (B, L, E)   Eq. 5; language-grouped vision embedding
    tau         1 / scale               scalar      Eq. 1, 6; temperature, learned, shared by both
    L_g         global_loss             scalar      Eq. 1
    L_f         fine_grained_loss       scalar      Eq. 6; the fine-grained loss

Differs from the paper (search for "differs" for the rest):
  * If all similarities of a word are equal, Eq. 2 is 0 / 0. Each patch then gets 1 / P.
  * A caption's [CLS] and [SEP] are no words: tbar and L_f leave them out. 53 of Sec. 4.1's 55
    tokens remain.
  * vbar and tbar follow Sec. 2. Listing 1's vbar has no h_v, its tbar includes the padding.
  * Evaluation crops the centre, but segmentation does not crop. Sec. 4.1 resizes the whole image to
    224 x 224, as the presets of the paper do in training.
  * `tiny` has lambda_f 0.1, the learning rate 2e-3, sigma 0.9 and a residual h_v. With the paper's
    smallest lambda_f, 0.5, or a lower rate, its words do not find their objects.
Not here: see the comment at Settings.
Run:     python train.py --method sparc       (--objective clip, filip, ...: the baselines)
         python train.py --method detector --finetune RUN       (Table 5, at the end of the file)
         python eval.py RUN --templates FILE  (FILE: D.5's prompts, each prefix + suffix)
"""

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
    embed_dim: int = 512         # width of the shared embedding space, > 0 (Sec. D.1)
    lambda_g: float = 0.5        # weight of the global loss L_g (Eq. 7, Sec. D.4)
    lambda_f: float = 1.0        # weight of the fine-grained loss L_f. D.4 tries 0.5 to 10
    # threshold sigma of the scaled similarities (Eq. 3), <= 1. None: 1 / P, P the number of patches
    sigma: float | None = None
    init_scale: float = 1 / 0.07  # first 1 / tau, > 0, from 1 to 100 (CLIP, Sec. 2.5)
    # how a word weights patches: sparse (Eq. 2-4), dense (no threshold), or softmax (Table 8)
    align: Literal["sparse", "dense", "softmax"] = "sparse"
    # layer before the global image embedding. plain: h_v(x) (Sec. 2). residual: x + h_v(x)
    h_v: Literal["plain", "residual"] = "plain"
    # how L_f averages over words. caption: in each caption, then over captions (Eq. 6). batch: over
    # all words (listing 1)
    token_mean: Literal["caption", "batch"] = "caption"


# Below the core: in_fp32, Gather, own_columns, unit, in_rows, mean_of_batch, softmax_weights,
# Residual, as_bools.


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


# L_g = -1/(2B) sum_i [ log softmax_j(cos(vbar_i, tbar_j) / tau) at j = i
#                     + log softmax_j(cos(tbar_i, vbar_j) / tau) at j = i ]      (Eq. 1)
# cross_entropy(logits, own) is -1/B sum_i log softmax(row i) at the row's own column.
@fp32
def global_loss(v, t, scale, *, gather=all_ranks):
    """CLIP's loss. v, t (B, E): vbar, tbar of this rank, normalised here -> scalar. scale: 1 / tau,
    not log(1 / tau). gather: see all_ranks."""
    v, t = unit(v), unit(t)                          # vbar and tbar of length 1 (below)
    v_to_t = scale * v @ gather(t).T                 # (B, world * B)  cos(vbar_i, tbar_j) / tau
    t_to_v = scale * t @ gather(v).T                 # (B, world * B)  cos(tbar_i, vbar_j) / tau
    own = own_columns(v_to_t)                        # (B,), the columns j = i
    return (F.cross_entropy(v_to_t, own) + F.cross_entropy(t_to_v, own)) / 2


# s_lp = t_l . v_p
# s_hat_lp = (s_lp - min_r s_lr) / (max_r s_lr - min_r s_lr)                     (Eq. 2)
# s_til_lp = s_hat_lp if s_hat_lp >= sigma else 0                                (Eq. 3)
# a_lp = s_til_lp / sum_{r=1..P} s_til_lr                                        (Eq. 4)
# The paper writes jk for lp in Eq. 3 and 4. Its R counts the patches with s_til > 0; others add 0.
@fp32
def alignment_weights(tokens, patches, threshold=None):
    """The weight that each token gives each patch; the weights of a token sum to 1.
    tokens (B, L, E), patches (B, P, E) -> a (B, L, P). threshold: sigma, at most 1; None: 1 / P."""
    sigma = 1 / patches.shape[1] if threshold is None else threshold
    s = tokens @ patches.transpose(1, 2)                        # (B, L, P)
    low, high = s.amin(-1, keepdim=True), s.amax(-1, keepdim=True)  # (B, L, 1)
    equal = high == low                                             # (B, L, 1)
    span = torch.where(equal, 1.0, high - low)  # never 0, so no gradient is NaN
    # differs: Eq. 2 is 0 / 0 if all s are equal. Then all weights are 1 / P.
    s_hat = torch.where(equal, 1.0, (s - low) / span)               # (B, L, P)
    s_til = torch.where(s_hat < sigma, 0.0, s_hat)
    return s_til / s_til.sum(-1, keepdim=True)


# c_l = sum_{r=1..P} a_lr v_r                                                    (Eq. 5)
def grouped_patches(tokens, patches, align):
    """t (B, L, E), v (B, P, E) -> c (B, L, E). align(t, v) -> a (B, L, P), Eq. 2-4."""
    return align(tokens, patches) @ patches


# L_f = 1/B sum_i loss_i / L_i,  L_i: the number of words of caption i
# loss_i = -1/2 sum_l [ log softmax_l'(cos(c_il, t_il') / tau) at l' = l
#                     + log softmax_l'(cos(t_il, c_il') / tau) at l' = l ]       (Eq. 6)
# i: a pair of image and caption. l, l': words of caption i, the paper's j and k.
@fp32
def sequence_losses(c, t, words, scale):
    """c, t (B, L, E), words (B, L) -> loss_i (B,), 0 for a caption without words. The negatives of
    a word are the other words of its caption, so no other caption is needed."""
    c, t = F.normalize(c, dim=-1), F.normalize(t, dim=-1)
    c_to_t = scale * c @ t.transpose(1, 2)   # (B, L, L), [i, l, l'] is cos(c_il, t_il') / tau
    t_to_c = c_to_t.transpose(1, 2)          # (B, L, L), [i, l, l'] is cos(t_il, c_il') / tau
    no_word = ~words[:, None, :]             # (B, 1, L), over l'
    lowest = torch.finfo(c_to_t.dtype).min   # -inf would be NaN in a caption without words
    log_c = c_to_t.masked_fill(no_word, lowest).log_softmax(-1)
    log_t = t_to_c.masked_fill(no_word, lowest).log_softmax(-1)
    log_p = log_c.diagonal(dim1=1, dim2=2) + log_t.diagonal(dim1=1, dim2=2)     # (B, L), l' = l
    return -0.5 * log_p.masked_fill(~words, 0.0).sum(1)


@fp32
def fine_grained_loss(tokens, patches, mask, scale, *, align=alignment_weights,
                      token_mean="caption", gather=all_ranks):
    """The fine-grained loss L_f (Eq. 6). Embeddings t_l (B, L, E) and v_p (B, P, E), not
    normalised -> scalar. mask (B, L): True on words: words_only(the mask of the token ids).
    scale: 1 / tau, not log(1 / tau). align: see Eq. 5. Only token_mean="batch" uses gather."""
    words = as_bools(mask, tokens.shape[:2])                    # (B, L)
    tokens = tokens.masked_fill(~words[..., None], 0.0)         # weight 0 * NaN would be NaN

    def losses_of(t, v, words):
        c = grouped_patches(t, v, align)                        # (B, L, E)
        return sequence_losses(c, t, words, scale)              # (B,), loss_i

    # = losses_of(tokens, patches, words), for some captions at a time, to save memory (below)
    losses = in_rows(losses_of, tokens, patches, words, size=tokens.shape[1] * patches.shape[1])
    count = words.sum(1)                                        # (B,), L_i
    if token_mean == "caption":
        return (losses / count.clamp(min=1)).mean()             # 1/B sum_i loss_i / L_i
    return {"batch": mean_of_batch}[token_mean](losses, count, gather)  # listing 1, below


def words_only(mask):
    """The mask of tokens (B, L), True at tokens, then False at padding -> the mask of words (B, L),
    without [CLS], the first token, and [SEP], the last. If your tokenizer adds neither, use its
    mask as the mask of words."""
    mask = as_bools(mask, mask.shape)
    words = torch.zeros_like(mask)
    words[:, 1:-1] = mask[:, 2:]  # token l is a word if l > 0 and there is a token l + 1
    return words


def masked_mean(x, mask):
    """The mean of x (B, L, d) where mask (B, L) is True -> (B, d); 0 where it never is True."""
    return x.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


class Model(nn.Module):
    """Two encoders, the adaptors of Sec. 2 and the loss of Eq. 7. The encoders return all tokens:
    text_encoder(tokens, mask) -> (B, L, d); image_encoder(images) -> (B, P, d), or (B, 1 + P, d)
    with [CLS] first. image_encoder.cls is None if there is no [CLS]."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config = config
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        kind = {"plain": nn.Sequential, "residual": Residual}[config.h_v]  # Residual: below
        # ours: h_v's GELU, and no bias in g_v and g_t
        self.h_v = kind(nn.Linear(image_width, image_width), nn.GELU())
        self.g_v = nn.Linear(image_width, config.embed_dim, bias=False)
        self.g_t = nn.Linear(text_width, config.embed_dim, bias=False)
        nn.init.normal_(self.g_v.weight, std=image_width**-0.5)
        nn.init.normal_(self.g_t.weight, std=text_width**-0.5)
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.init_scale)))

    def forward(self, batch, gather=all_ranks):
        """batch: images (B, 3, H, W), tokens (B, L), mask (B, L), True at tokens, then False at
        padding -> {"loss": Eq. 7, others to log}."""
        cfg = self.config
        words = words_only(batch["mask"])  # (B, L)  differs: without [CLS] and [SEP]
        f_v = self.patch_outputs(batch["images"])                   # (B, P, d)
        f_t = self.text_encoder(batch["tokens"], batch["mask"])     # (B, L, d)
        vbar = self.g_v(self.h_v(f_v.mean(1)))                      # (B, d) -> (B, E)
        tbar = self.g_t(masked_mean(f_t, words))                    # (B, E)
        v, t = self.g_v(f_v), self.g_t(f_t)                         # (B, P, E), (B, L, E)
        scale = self.log_scale.exp()
        loss_g = global_loss(vbar, tbar, scale, gather=gather)
        loss_f = fine_grained_loss(t, v, words, scale, align=self.align,
                                   token_mean=cfg.token_mean, gather=gather)
        loss = cfg.lambda_g * loss_g + cfg.lambda_f * loss_f        # (Eq. 7)
        return {"loss": loss, "global": loss_g.detach(), "local": loss_f.detach(),
                "scale": scale.detach()}

    def patch_outputs(self, images):
        """(B, 3, H, W) -> f_v (B, P, d): all patches. The paper does not use [CLS]."""
        outputs = self.image_encoder(images)
        return outputs if self.image_encoder.cls is None else outputs[:, 1:]

    def align(self, tokens, patches):
        """Eq. 2-4, or what config.align names of Table 8. (B, L, E), (B, P, E) -> a (B, L, P)."""
        if self.config.align == "softmax":
            return softmax_weights(tokens, patches)                 # below
        sigma = {"sparse": self.config.sigma, "dense": 0.0}[self.config.align]
        return alignment_weights(tokens, patches, sigma)

    def after_update(self, step, steps):
        """Call after each update: keeps 1 / tau within [1, 100], as OpenCLIP does."""
        self.log_scale.data.clamp_(0, math.log(100))

    def encode_image(self, images):
        """(B, 3, H, W) -> vbar (B, E), normalised."""
        vbar = self.g_v(self.h_v(self.patch_outputs(images).mean(1)))
        return F.normalize(vbar.float(), dim=-1)

    def encode_text(self, tokens, mask):
        """(B, L), (B, L) -> tbar (B, E), normalised."""
        tbar = self.g_t(masked_mean(self.text_encoder(tokens, mask), words_only(mask)))
        return F.normalize(tbar.float(), dim=-1)


# To read SPARC, stop here. ----------------------------------------------------------------
#
# Mistakes in public copies of L_f:
#   * Eq. 2 divides 0 by 0 if all similarities of a word are equal.
#   * -inf is multiplied by 0 at padding, which gives NaN.
#   * Weights have no gradient, or come from cosines; Eq. 2 has inner products.
#   * Negatives come from all captions of the batch; Eq. 6 has the words of one caption.
#   * sigma is missing, or is 1 / 196 for every number of patches.
# An inverted mask raises no error. Swapped tokens and patches raise none if L = P.
#
# L_f can fall although the model ignores the images. To see this, log also L_f with
# patches.roll(1, 0) (FullModel.diagnose). This second loss must be much larger than L_f.
#
# To add L_f to OpenCLIP's CLIP (`model`): `images` and `ids` are the model's inputs.
#     optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)       # once
#     out = model.forward_intermediates(images, ids, image_indices=1, text_indices=1,
#                                       normalize_intermediates=True, image_output_fmt="NLC")
#     patches = out["image_intermediates"][-1] @ model.visual.proj     # (B, P, E), no [CLS]
#     tokens = out["text_intermediates"][-1] @ model.text_projection   # (B, L, E)
#     words = (ids > 0) & (ids < 49406)                                # (B, L)
#     v, t, scale = out["image_features"], out["text_features"], model.logit_scale.exp()
#     loss_f = fine_grained_loss(tokens, patches, words, scale)
#     loss = 0.5 * global_loss(v, t, scale) + loss_f
#     loss.backward(), optimizer.step(), optimizer.zero_grad()         # update
#     model.logit_scale.data.clamp_(0, math.log(100))                  # update

# To caption images (Sec. 4.6, D.8, Table 7) with the GPT-2 of Hugging Face's transformers (`lm`)
# and a run of this repository (`eval` is eval.py): each block of GPT-2 gets cross attention, which
# reads all patches f_v of the frozen image encoder. GPT-2's own weights are frozen, too. `images`
# are (B, 3, H, W). `ids` and `mask` (B, L) are the tokens of <|endoftext|> CAPTION <|endoftext|>,
# padded. Rate, warm-up and steps are those of D.8. Flamingo (arXiv 2204.14198) also has a resampler
# and gates.
#     lm = GPT2LMHeadModel.from_pretrained("gpt2", add_cross_attention=True)        # once
#     model = eval.load_run("runs/b16")[0].model.requires_grad_(False)              # once
#     into_lm = nn.Linear(model.g_v.in_features, lm.config.n_embd)                  # once
#     for name, p in lm.named_parameters():                                         # once
#         p.requires_grad_("cross" in name)                                         # once
#     trained = [*into_lm.parameters(), *[p for p in lm.parameters() if p.requires_grad]]  # once
#     optimizer = torch.optim.AdamW(trained, lr=1e-4)                               # once
#     schedule = get_cosine_schedule_with_warmup(optimizer, 5_000, 250_000)         # once
#     seen = into_lm(model.patch_outputs(images))                      # (B, P, n_embd)
#     labels = ids.masked_fill(mask == 0, -100)                        # (B, L)
#     loss = lm(ids, attention_mask=mask, labels=labels, encoder_hidden_states=seen).loss
#     loss.backward(), optimizer.step(), schedule.step(), optimizer.zero_grad()     # update
#     seen = into_lm(model.patch_outputs(images))                                   # caption
#     captions = lm.generate(ids[:, :1], encoder_hidden_states=seen, max_new_tokens=20)  # caption


# Ranks --------------------------------------------------------------------------------------
#
# On several GPUs: call dist.init_process_group, then wrap the model in DDP. Give each rank its own
# rows, equally many. Each rank has the loss of its own rows; DDP averages the gradients: the mean
# is the gradient that one process has with all rows. Gradients accumulated over small batches
# differ from those of one large batch: each small batch has fewer negatives.
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


# Helpers ----------------------------------------------------------------------------------
#
# Shapes and dtypes of arguments are checked. Values are not, because a GPU would have to wait.


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


def own_columns(logits):
    """The columns (B,) of this rank's captions in logits (B, world * B), or (B, B) if `gather`
    joins no ranks. Rank i has the i-th part. Raises ValueError if `gather` joins other rows."""
    B, columns = logits.shape
    if columns < 2 or columns % B or columns > B and columns != B * dist.get_world_size():
        raise ValueError(f"{B} images, {columns} captions: give two or more, as many on each rank.")
    rank = dist.get_rank() if columns > B else 0
    return rank * B + torch.arange(B, device=logits.device)


def unit(x):
    """x (..., E) / |x|. A row of zeros, which a caption without words has, stays zeros and gets no
    gradient: that of F.normalize is up to 1e12 there, too large for fp16."""
    return F.normalize(x.masked_fill((x == 0).all(-1, keepdim=True), 0), dim=-1)


def as_bools(mask, shape):
    """A mask of bools, or of 0 and 1 -> of bools. Raises ValueError for another shape, and for
    floats (an additive mask). An inverted mask passes."""
    if mask.shape != shape or mask.is_floating_point():
        raise ValueError(f"A mask needs bools {[*shape]}, not {mask.dtype} {[*mask.shape]}.")
    return mask.bool()


# Settings, presets, what train.py and eval.py ask for -------------------------------------
#
# Not here: Flamingo's resampler and gates (Table 7; the lines above caption images without them);
# the 32k SentencePiece vocabulary (here WordPiece); gradients from several datasets in one update,
# JFT's labels as captions (D.2); Pascal Context's .mat maps.


@dataclass(kw_only=True)
class Settings(Config):
    """All flags of this method. Model reads those of Config, Baseline reads all."""

    # training objective: that of SPARC (Eq. 7), or that of a baseline (Sec. 4)
    objective: Literal["sparc", "clip", "filip", "clip+filip", "pacl", "gloria", "mgca"] = "sparc"
    filip_keep: float = 0.2      # FILIP: fraction of kept tokens and patches, > 0, <= 1 (D.4)
    mgca_prototypes: int = 500   # MGCA: number of prototypes, > 0 (Sec. D.4)


# Sec. 4.1, D.1, D.4. Learning rate and weight decay are the middle of the paper's sweeps. The
# sweep's "1.1e-4" is read as 1.1e-3, the batch "16348" as 16384. What the paper does not name is
# our choice: a text encoder that sees both directions, GELU in h_v, no bias in g_v and g_t, no
# temperature in Table 8's softmax, CLIP's beta2 and epsilon for AdamW, no weight decay of norms,
# biases, embeddings and positions, 1 / tau within [1, 100], gradients clipped at norm 1.
PAPER = dict(text_encoder="12x768:context=55,vocab_size=32000", vocab_size=32_000, batch=16384,
             steps=200_000, lr=9e-4, weight_decay=0.2, warmup=2500, crop_scale=1.0, flip=0.0)
GLORIA = PAPER | dict(objective="gloria", batch=4096, steps=800_000)  # Sec. D.3
TINY = dict(data="shapes:objects=4,together=0.85,small=0.13,large=0.18,background=0,fillers=0", embed_dim=128,
            text_encoder="tiny", h_v="residual", lambda_f=0.1, batch=128, lr=2e-3, weight_decay=0.1, warmup=50)
PRESETS = {  # settings of this file and of train.py by name; flags override them
    # Words find their objects here. The image encoder has no convolutional stem, which would mix
    # the patches of an object with their neighbours. differs: sigma is 0.9, see tests/RESULTS.md.
    # An object covers few of the 36 patches, and 1 / P keeps the weight of most patches.
    "tiny": TINY | dict(image_encoder="tiny-patch", sigma=0.9, steps=1200),
    # Retrieval is good after fewer steps, but words do not find their objects.
    "tiny-stem": TINY | dict(image_encoder="tiny/4", steps=400),
    "b32": PAPER | dict(image_encoder="ViT-B/32"),
    "b16": PAPER | dict(image_encoder="ViT-B/16"),
    "l14": PAPER | dict(image_encoder="ViT-L/14", steps=250_000),
    "gloria-b32": GLORIA | dict(image_encoder="ViT-B/32"),
    "gloria-b16": GLORIA | dict(image_encoder="ViT-B/16"),
}


class FullModel(Model):
    """Model, and what train.py, eval.py and --init-weights also ask of it."""

    def encode_patches(self, images):
        """(B, 3, H, W) -> g_v(h_v(patches)) (B, P, E), normalised (D.7). eval.py compares patches
        with all classes of a data set, which is our reading of D.7. With only the classes that
        the image shows, segmentation would be easier."""
        return F.normalize(self.g_v(self.h_v(self.patch_outputs(images))).float(), dim=-1)

    def align_words(self, images, tokens, mask):
        """(B, 3, H, W), (B, L), (B, L) -> the alignment weights of the pairs (B, L, P)."""
        tokens = self.g_t(self.text_encoder(tokens, mask))          # (B, L, E)
        return self.align(tokens, self.g_v(self.patch_outputs(images)))

    def diagnose(self, batch):
        """Scalars to log: L_f of captions with WRONG images, and how many patches a word uses. If
        L_f is as low with wrong images as with the right ones, the images do not matter to L_f."""
        images, ids, mask = (batch[name][:256] for name in ("images", "tokens", "mask"))
        if len(images) < 2:
            return {}  # there is no wrong image
        tokens = self.g_t(self.text_encoder(ids, mask))             # (B, L, E)
        patches = self.g_v(self.patch_outputs(images))              # (B, P, E)
        wrong = fine_grained_loss(tokens, patches.roll(1, 0), words_only(mask),
                                  self.log_scale.exp(), align=self.align,
                                  token_mean=self.config.token_mean, gather=lambda x: x)
        used = patches_per_word(self.align(tokens, patches), words_only(mask))
        return {"local_wrong_image": wrong, "patches_per_word": used}

    def clip_parameters(self):
        """The parameters that --init-weights loads, by CLIP's names. CLIP has no h_v."""
        places = {"text_projection": self.g_t.weight, "logit_scale": self.log_scale}
        if isinstance(self.g_v, nn.Linear):  # not PACL's g_v, an adapter of two layers
            places["visual.proj"] = self.g_v.weight
        return places

    def chance_loss(self, batch_size, mask, patches):
        """The loss if all similarities are equal. batch_size: over all ranks; patches: P."""
        words = words_only(mask).sum(1).clamp(min=1).float()        # (B,), L_i
        loss_g, loss_f = math.log(batch_size), words.log().mean()
        if self.config.token_mean == "batch":
            loss_f = (words * words.log()).sum() / words.sum()
        return self.config.lambda_g * loss_g + self.config.lambda_f * loss_f.item()


def in_rows(function, *rows, size, limit=2**24):
    """function(*rows) -> (B, ...), computed for a few rows at a time if all need too much memory.

    A row needs `size` numbers. If all rows need more than `limit` numbers, they are split into
    parts, and the backward pass computes each part again instead of keeping it in memory.
    """
    n = max(1, limit // size)
    if n >= len(rows[0]):
        return function(*rows)
    parts = zip(*[x.split(n) for x in rows])
    return torch.cat([checkpoint(function, *part, use_reentrant=False) for part in parts])


def mean_of_batch(losses, count, gather):
    """Listing 1: the mean of L_f over the words of all captions on all ranks. losses, count (B,):
    sums over the words of a caption, and their number -> scalar. Each rank divides its sum by the
    same number, the mean number of words of a rank. The mean of the ranks' losses is then the loss
    of one process."""
    words = gather(count.to(losses.dtype)[:, None]).mean()  # words of a caption, on average
    return losses.sum() / (len(count) * words).clamp(min=1)


class Residual(nn.Sequential):
    """x + h_v(x). differs: the paper adds no x. Segmentation reads g_v(h_v(x)) of a patch (D.7),
    but L_f trains g_v(x). The sum has both."""

    def forward(self, x):
        return x + super().forward(x)


@fp32
def softmax_weights(tokens, patches):
    """Table 8's softmax in place of Eq. 2-4; the paper names no temperature. tokens (B, L, E),
    patches (B, P, E) -> a (B, L, P)."""
    return (tokens @ patches.transpose(1, 2)).softmax(-1)


@fp32
def patches_per_word(a, mask):
    """The effective number of patches of a word, 1 / sum_p a_lp^2: 1 if one patch has all the
    weight, as softmax weights tend to (App. A), P if all weights are equal.
    a (B, L, P), mask (B, L): True on words -> scalar, the mean over all words."""
    used = 1 / a.square().sum(-1)                                   # (B, L)
    return (used * mask).sum() / mask.sum().clamp(min=1)


# Baselines (Sec. 4) -----------------------------------------------------------------------
#
# D.3 and D.4 describe the baselines. A rank has b pairs, all ranks have B. The losses of an
# objective are added and share one learned tau. D.4 sets all lambdas of MGCA to 1.
# MGCA's code then gives its three losses the weights 2 : 2 : 1 (its default lambdas: 1, .7, .5).
# Evaluation compares vbar and tbar, except for two objectives: FILIP compares patches with tokens,
# and PACL compares patches with captions.


def in_chunks(scores, x, y):
    """scores(x, y) -> (b, B, ...) of x (b, N, E) and y (B, M, E), for a part of y at a time if all
    of y needs too much memory (in_rows)."""
    size = len(x) * x.shape[1] * y.shape[1]                        # similarities to one y
    columns = in_rows(lambda part: scores(x, part).transpose(0, 1), y, size=size)
    return columns.transpose(0, 1)


def contrast(logits, gather):
    """Eq. 1 of logits (b, B) in place of cosines: rows are this rank's images, columns all ranks'
    captions -> scalar. One matrix serves both directions, because it is costly here: each rank sums
    over its own images, and sends one sum per caption."""
    i = own_columns(logits)                                         # (b,)
    positive = logits.take_along_dim(i[:, None], 1)[:, 0]           # (b,)
    v_to_t = positive - logits.logsumexp(1)   # (b,)  log softmax over captions
    sums = gather(logits.logsumexp(0, keepdim=True)).logsumexp(0)   # (B,)
    t_to_v = positive - sums[i]               # (b,)  log softmax over images
    return -(v_to_t + t_to_v).mean() / 2


def gather_captions(tokens, gather):
    """tokens (b, L, E) -> the tokens of all ranks (B, L', E), padded with zeros: the captions of
    another rank can be longer, and gather needs equal shapes."""
    lengths = gather(torch.full((1, 1), tokens.shape[1], device=tokens.device))  # (world, 1)
    padding = int(lengths.max()) - tokens.shape[1] if len(lengths) > 1 else 0
    return gather(F.pad(tokens, (0, 0, 0, padding)))


def best_cosines(x, y):
    """The largest cosine of each token of x with the tokens of y. x (n, N, E), y (m, M, E): vectors
    of norm 1, or zeros where padded -> (n, m, N)."""
    s = x.flatten(0, 1) @ y.flatten(0, 1).T                             # (n * N, m * M)
    s = s.view(*x.shape[:2], *y.shape[:2]).masked_fill(~y.any(-1), -2.0)  # below all cosines
    return s.amax(3).transpose(1, 2)


# s^I_ij = 1/P sum_p max_l cos(v_ip, t_jl),  s^T_ij = 1/L_i sum_l max_p cos(t_il, v_jp)
def filip_scores(x, y):
    """The mean of best_cosines over the tokens of x. x (n, N, E), y (m, M, E) -> (n, m)."""
    mean = best_cosines(x, y).sum(2) / x.any(-1).sum(1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~y.flatten(1).any(1), 0.0)  # a caption y without words scores 0


def most_similar(x, y, keep):
    """FILIP's token dropping: each image or caption of x keeps the fraction `keep` of its tokens.
    These are the tokens with the largest cosine to any token of any y. x (b, N, E), y (b, M, E)
    -> (b, N', E)."""
    with torch.no_grad():
        best = in_chunks(best_cosines, x, y).amax(1).masked_fill(~x.any(-1), -2.0)  # (b, N)
        # without - 1e-4, ceil(0.6 * 25) would be 16 in float32
        index = best.topk(math.ceil(keep * x.shape[1] - 1e-4)).indices  # (b, N')
        count = torch.ceil(keep * x.any(-1).sum(1, keepdim=True) - 1e-4)
        kept = torch.arange(index.shape[1], device=x.device) < count    # (b, N')
    return x.take_along_dim(index[..., None], 1) * kept[..., None]


@fp32
def filip_loss(tokens, patches, mask, scale, *, keep=0.2, gather=all_ranks):
    """FILIP (arXiv 2111.07783). tokens (b, L, E), patches (b, P, E), mask (b, L) -> scalar.

    Each rank sends only its most similar tokens, and chooses them by its own b pairs. So N ranks
    compute the loss of one process only if keep = 1.
    differs: D.4 says "20% token dropping"; we keep 20 %. On 256 ranks this takes 2.7 times CLIP's
    FLOPs (tests/gpu_bench.py --computed 256), and 80 % takes 7.5 times. Table 11 has 2.98. PACL
    takes 1.08 times (1.40 there), and GLoRIA 2.42 times (5.77 there), because their forms are
    cheaper here.
    """
    mask = as_bools(mask, tokens.shape[:2])
    tokens = tokens.masked_fill(~mask[..., None], 0.0)
    patches = F.normalize(patches, dim=-1)
    tokens = F.normalize(tokens, dim=-1)                            # 0 where no word is
    words = gather_captions(most_similar(tokens, patches, keep), gather)    # (B, L', E)
    images = gather(most_similar(patches, tokens, keep))            # (B, P', E)
    i_to_t = scale * in_chunks(filip_scores, patches, words)        # (b, B)
    t_to_i = scale * in_chunks(filip_scores, tokens, images)        # (b, B)
    i = own_columns(i_to_t)
    return (F.cross_entropy(i_to_t, i) + F.cross_entropy(t_to_i, i)) / 2


# phi_ij = sum_p softmax_p(cos(v_ip, t_j)) cos(v_ip, t_j)
def pacl_scores(patches, t):
    """patches (b, P, E), captions t (c, 1, E): vectors of norm 1 -> phi (b, c)."""
    s = patches @ t[:, 0].T                                             # (b, P, c)
    return (s.softmax(1) * s).sum(1)


@fp32
def pacl_loss(t, patches, scale, *, gather=all_ranks):
    """PACL (arXiv 2212.04994). t (b, E): embeddings of captions; patches (b, P, E) -> scalar."""
    patches, t = F.normalize(patches, dim=-1), unit(t)
    return contrast(scale * in_chunks(pacl_scores, patches, gather(t)[:, None]), gather)


# a_ijlp = softmax_p(t_jl . v_ip / sqrt(E)),  c_ijl = sum_p a_ijlp v_ip
# Z_ij = tau log sum_l exp(cos(c_ijl, t_jl) / tau)
@fp32
def gloria_loss(tokens, patches, mask, scale, *, gather=all_ranks):
    """GLoRIA's local loss (ICCV 2021). tokens (b, L, E), patches (b, P, E), mask (b, L) -> scalar.

    As D.3 says, tokens are not merged into words, and s is divided by sqrt(E).
    differs: GLoRIA's code applies a softmax over the words before the softmax over patches.
    GLoRIA's paper has no softmax over the words.
    """
    def scores(patches, tokens):
        # All c_ijl together would be too large. Their cosines need only |c|^2 = a' gram a and
        # c . t = a . s.
        words, tokens = tokens.any(-1), tokens.flatten(0, 1)            # (c, L), (c * L, E)
        tokens = tokens / tokens.shape[1] ** 0.5  # divides s by sqrt(E), and no cosine changes
        s = patches @ tokens.T                                          # (b, P, c * L)
        a = s.softmax(1)
        c_square = (a * (gram @ a)).sum(1)                              # (b, c * L)
        v_square = (gram.diagonal(dim1=1, dim2=2)[:, None] @ a)[:, 0]
        c_square = torch.maximum(c_square, 1e-6 * v_square)  # rounding can leave 0 or less
        norms = (c_square * tokens.square().sum(1)).clamp(min=1e-24).sqrt()  # |c| |t|
        cos = ((a * s).sum(1) / norms).view(-1, *words.shape)           # (b, c, L)
        z = (scale * cos).masked_fill(~words, torch.finfo(s.dtype).min).logsumexp(2)
        return z.masked_fill(~words.any(1), 0.0)                        # (b, c), Z / tau

    mask = as_bools(mask, tokens.shape[:2])
    tokens = tokens.masked_fill(~mask[..., None], 0.0)
    gram = patches @ patches.transpose(1, 2)                        # (b, P, P)
    captions = gather_captions(tokens, gather)                      # (B, L', E)
    return contrast(in_chunks(scores, patches, captions), gather)


@fp32
def mgca_loss(tokens, patches, mask, word_context, patch_context, scale):
    """MGCA's token-wise loss (arXiv 2210.06044) -> scalar. All tokens have the same weight (D.3);
    MGCA weights a token by the attention of [CLS] to the token.

    tokens (b, L, E), patches (b, P, E), mask (b, L): True on words; word_context (b, L, E): the
    attention output of each word over patches; patch_context (b, P, E): of each patch over words.
    """
    mask = as_bools(mask, tokens.shape[:2])
    patch_mask = mask.any(1, keepdim=True).expand(patches.shape[:2])    # (b, P)
    of_words = sequence_losses(word_context, tokens, mask, scale) / mask.sum(1).clamp(min=1)
    of_patches = sequence_losses(patch_context, patches, patch_mask, scale)
    of_patches = of_patches / patch_mask.sum(1).clamp(min=1)
    return (of_words.mean() + of_patches.mean()) / 2


@fp32
def prototype_loss(v, t, prototypes, scale, *, gather=all_ranks):
    """MGCA's prototype loss: an image predicts the prototypes of its caption, and a caption the
    prototypes of its image. v, t (b, E), prototypes (K, E) -> scalar.

    differs: MGCA's code normalises the prototypes in place, freezes them in the first epoch, and
    has a constant tau for each loss (.07, .1, .2). D.3 learns tau. Here all losses share one
    learned tau: zero-shot was .941. Zero-shot was .855 with three learned tau that start at the
    constants of MGCA's code (36 patches, --data shapes, seed 0).
    """
    v, t, prototypes = unit(v), unit(t), unit(prototypes)
    s = torch.stack([v @ prototypes.T, t @ prototypes.T])           # (2, b, K)
    # Sinkhorn-Knopp, 3 iterations (D.4): scale columns to sum 1 over all ranks, then rows
    q = (s.detach() / 0.05).exp()  # epsilon is .05 (D.4)
    for _ in range(3):
        q = q / gather(q.sum(1)[None]).sum(0)[:, None]
        q = q / q.sum(2, keepdim=True)
    return (F.cross_entropy(scale * s[0], q[1]) + F.cross_entropy(scale * s[1], q[0])) / 2


class CrossAttention(nn.Module):
    """MGCA's cross-attention, one head of width 128 (D.4). x (b, N, E) attends to y (b, M, E) where
    mask (b, M) is True -> (b, N, E). MGCA's code has these projections only as an option."""

    def __init__(self, dim, width=128):
        super().__init__()
        self.q, self.v = nn.Linear(dim, width), nn.Linear(dim, width)
        self.k = nn.Linear(dim, width, bias=False)  # a bias would cancel in the softmax
        self.out = nn.Linear(width, dim)

    def forward(self, x, y, mask):
        mask = mask | ~mask.any(1, keepdim=True)    # without True, x attends to all of y: else NaN
        x = F.scaled_dot_product_attention(self.q(x), self.k(y), self.v(y), mask[:, None])
        return self.out(x)


class Adapter(nn.Module):
    """PACL's adapter for patches, d -> E: two layers and a residual connection."""

    def __init__(self, width, dim):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(width, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.skip = nn.Linear(width, dim)

    def forward(self, x):
        return self.main(x) + self.skip(x)


class Baseline(FullModel):
    """SPARC's encoders and adaptors, trained on another objective."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__(config, image_encoder, text_encoder, image_width, text_width)
        self.late_interaction = config.objective in ("filip", "pacl")  # no L_g
        if config.objective == "pacl":
            self.h_v, self.g_v = nn.Identity(), Adapter(image_width, config.embed_dim)
        if config.objective == "mgca":
            self.word_attention = CrossAttention(config.embed_dim)
            self.patch_attention = CrossAttention(config.embed_dim)
            prototypes = torch.randn(config.mgca_prototypes, config.embed_dim)
            self.prototypes = nn.Parameter(F.normalize(prototypes, dim=-1))

    def forward(self, batch, gather=all_ranks):
        cfg, words = self.config, words_only(batch["mask"])
        f_v = self.patch_outputs(batch["images"])                       # (b, P, d)
        f_t = self.text_encoder(batch["tokens"], batch["mask"])         # (b, L, d)
        v = self.g_v(self.h_v(f_v.mean(1)))                             # (b, E)
        t = self.g_t(masked_mean(f_t, words))                           # (b, E)
        scale, losses = self.log_scale.exp(), {}
        if not self.late_interaction:
            losses["global"] = global_loss(v, t, scale, gather=gather)
        if cfg.objective in ("filip", "clip+filip"):
            # `filip` trains h_v only here. Patches pass h_v, as in D.7. That is our reading: those
            # of SPARC, PACL, GLoRIA and MGCA do not.
            tokens, patches = self.g_t(f_t), self.g_v(self.h_v(f_v))
            losses["filip"] = filip_loss(tokens, patches, words, scale, keep=cfg.filip_keep,
                                         gather=gather)
        if cfg.objective == "pacl":
            losses["pacl"] = pacl_loss(t, self.g_v(f_v), scale, gather=gather)
        if cfg.objective == "gloria":
            losses["gloria"] = gloria_loss(self.g_t(f_t), self.g_v(f_v), words, scale,
                                           gather=gather)
        if cfg.objective == "mgca":
            tokens = F.normalize(self.g_t(f_t), dim=-1)
            patches = F.normalize(self.g_v(f_v), dim=-1)
            word_context = self.word_attention(tokens, patches, words.new_ones(f_v.shape[:2]))
            patch_context = self.patch_attention(patches, tokens, words)
            losses["mgca"] = mgca_loss(tokens, patches, words, word_context, patch_context, scale)
            prototype = prototype_loss(v, t, self.prototypes, scale, gather=gather)
            losses["prototype"] = 0.5 * prototype  # 1 : 1 : 0.5 is 2 : 2 : 1
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
        """The captions as `similarity` expects them: the embeddings of the words (B, L, E), 0 at
        tokens that are no words. For PACL: the embeddings of the captions (B, 1, E)."""
        if self.config.objective == "pacl":
            return self.encode_text(tokens, mask)[:, None]
        tokens = self.g_t(self.text_encoder(tokens, mask)).float()      # (B, L, E)
        return F.normalize(tokens, dim=-1) * words_only(mask)[..., None]

    def similarity(self, patches, tokens):
        """patches (n, P, E), tokens (m, L, E) -> scores (n, m) of images and captions, for both
        directions of retrieval. FILIP has one score for each direction; ours is their mean."""
        if self.config.objective == "pacl":
            return in_chunks(pacl_scores, patches, tokens)
        i_to_t = in_chunks(filip_scores, patches, tokens)               # (n, m)
        return (i_to_t + in_chunks(filip_scores, tokens, patches).T) / 2


def model_class(args):
    return FullModel if args.objective == "sparc" else Baseline


# Measures of the paper --------------------------------------------------------------------
#
# eval.py encodes images and captions; the functions here measure tensors and lists of words.


def segment(patches, classes, size):
    """patches (P, E) of a square grid, classes (C, E) -> map (H, W) of `size`: 1 + the class with
    the largest inner product with each pixel's patch (D.7)."""
    ids, grid = (patches @ classes.T).argmax(1) + 1, math.isqrt(len(patches))  # (P,)
    return F.interpolate(ids.view(1, 1, grid, grid).float(), size, mode="nearest")[0, 0].long()


def image_iou(predicted, truth, foreground_only=False):
    """The mean IoU over the classes 1, 2, ... that are in the truth (D.7); None if there are none.

    predicted, truth (H, W): maps of classes, 0 for the background. Pixels with truth 255 are
    ignored; with foreground_only also pixels with truth 0.
    """
    valid = truth != 255
    if foreground_only:
        valid = valid & (truth != 0)
    ious = []
    for c in truth[valid & (truth != 0)].unique():
        p_c, t_c = (predicted == c) & valid, (truth == c) & valid
        ious.append((p_c & t_c).sum() / (p_c | t_c).sum())
    return torch.stack(ious).mean().item() if ious else None


def k_precision(retrieved, truths, among=None):
    """K-Precision (Sec. 4.4): the fraction of the words of a retrieved caption that occur in the
    true captions of the image, as a mean over images.

    retrieved: n lists of words; truths: n sets of words. among: count only these words (K-Pna:
    nouns and adjectives), and only captions that have one.

    differs: the paper cites Adlakha et al. (2023), who drop "a", "an", "the" and count a word only
    as often as the truth has it. This function does neither. The paper counts articles, too: its
    PACL, at the level of chance, has a K-Precision of .26 and a K-Pna of .03.
    """
    precisions = []
    for words, truth in zip(retrieved, truths, strict=True):
        words = [word for word in words if among is None or word in among]
        if words:
            precisions.append(sum(word in truth for word in words) / len(words))
    return sum(precisions) / len(precisions) if precisions else math.nan


def share_on(mask, weights):
    """The fraction of the weights (P,) of a square grid of patches that lies on an object. mask
    (S, S): the object's pixels. A patch that the mask covers by half counts half."""
    patches = F.adaptive_avg_pool2d(mask[None].float(), math.isqrt(len(weights))).flatten()  # (P,)
    return ((weights * patches).sum() / weights.sum()).item()


# Open-vocabulary detection (Sec. 4.5, Table 5) --------------------------------------------
#
# `train.py --method detector --finetune RUN` trains OWL-ViT (arXiv 2205.06230) on the encoders of
# RUN. Each patch of f_v gives a box and a class embedding, which is compared with the embeddings of
# texts, the queries. Without a source, numbers are those of OWL-ViT's code, google-research/scenic,
# projects/owl_vit (03c3032), configs/clip_b16.py.
#
# differs: the paper trains on Objects365 and Visual Genome, we on any file like COCO's or LVIS's.
# OWL-ViT also makes mosaics of images, draws a prompt for each query, clips the gradient of each
# image, drops blocks of the text encoder, and multiplies patches by [CLS], which SPARC lacks.
# OWL-ViT resizes bilinearly without antialiasing (here: bicubically, with), begins with LeCun's
# weights and tanh's GELU (here: torch's and the exact one), and cuts queries at 16 tokens (here: at
# the encoder's 55). That patches are f_v, before h_v and g_v, is our reading.


@dataclass
class DetectorConfig:
    embed_dim: int = 512  # width of the embeddings, > 0. The fine-tuned run gives it
    # stochastic depth of the ViT, < 1. This flag replaces drop_path of --image-encoder
    drop_path: float = 0.2


DETECTOR_PRESETS = {  # with --finetune RUN, the run's encoders replace image_encoder, text_encoder
    # Of the 16 pairs that these images never show, captions of sparc.py's `tiny` name ten.
    "tiny": dict(data="shapes:objects=4,small=0.13,large=0.18,background=0,fillers=0,heldout=16",
                 image_encoder="tiny-patch", text_encoder="tiny", embed_dim=128, drop_path=0.0, batch=32, steps=1500,
                 lr=2e-3, weight_decay=0.0, warmup=50),
    # Give --image-size 768, too.
    "b16": dict(image_encoder="ViT-B/16", text_encoder=PAPER["text_encoder"], batch=256, steps=140_000, lr=5e-5,
                weight_decay=0.0, warmup=1000, beta2=0.999, adam_eps=1e-8, crop_scale=0.3),
}


# GIoU = |A n B| / |A u B| - (|C| - |A u B|) / |C|,  C: the smallest box around A and B
def generalized_iou(a, b):
    """GIoU (arXiv 1902.09630) of boxes (..., 4): left, top, right, bottom -> (...)."""
    both = shared_area(a, b)
    either = (shared_area(a, a) + shared_area(b, b) - both).clamp(min=1e-9)
    sides = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    around = sides.prod(-1).clamp(min=1e-9)
    return both / either - (around - either) / around


def shared_area(a, b):
    """|A n B| of boxes (..., 4) -> (...)."""
    sides = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    return sides.clamp(min=0).prod(-1)


# -alpha (1 - p)^gamma log p  where the class is,  -(1 - alpha) p^gamma log(1 - p)  elsewhere
def focal_losses(logits, alpha=0.3, gamma=2.0):
    """Focal loss (arXiv 1708.02002) of logits (...), p = sigmoid(logit) -> where the class is (...)
    and elsewhere (...)."""
    p = logits.sigmoid()
    there = -alpha * (1 - p) ** gamma * F.logsigmoid(logits)
    return there, -(1 - alpha) * p**gamma * F.logsigmoid(-logits)


def assign(costs):
    """costs (n, m), n <= m, on the CPU -> (n,): a column of its own for each row, so that the sum
    of costs is least (shortest augmenting paths; Jonker and Volgenant, 1987)."""
    n, m = costs.shape
    column_of, row_of = [-1] * n, [-1] * m
    u, v = costs.new_zeros(n), costs.new_zeros(m)  # u_i + v_j <= cost_ij, and equal if assigned
    for first in range(n):
        length, before = costs.new_full((m,), math.inf), torch.zeros(m, dtype=torch.long)
        is_open, row, reached, passed = torch.ones(m, dtype=torch.bool), first, 0.0, []
        while row >= 0:  # until the path ends at a free column
            onward = reached + costs[row] - u[row] - v
            shorter = is_open & (onward < length)
            length[shorter], before[shorter] = onward[shorter], row
            column = length.masked_fill(~is_open, math.inf).argmin().item()
            reached, row = length[column].item(), row_of[column]
            is_open[column] = False
            passed.append(column)
        u[first] += reached
        for j in passed[:-1]:
            u[row_of[j]] += reached - length[j]
            v[j] -= reached - length[j]
        while row != first:  # each row on the path takes the column that leads to the next row
            row = before[column].item()
            row_of[column], column_of[row], column = row, column, column_of[row]
    return torch.tensor(column_of, dtype=torch.long)


def match(costs, is_box):
    """costs (B, M, P) of true boxes and patches, is_box (B, M): False for padding, which comes last
    -> (B, M), the patch of each true box, 0 for padding. An image's total cost is least.

    The GPU waits for the CPU here. An image of 30 boxes and 2,304 patches takes 5 to 11 ms on one
    core, so 32 images on a rank take .2 to .35 s a step. If this is too long, replace assign(costs)
    by torch.from_numpy(scipy.optimize.linear_sum_assignment(costs)[1]).
    """
    patches, costs = torch.zeros(is_box.shape, dtype=torch.long), costs.nan_to_num().double().cpu()
    for i, n in enumerate(is_box.sum(1).tolist()):
        patches[i, :n] = assign(costs[i, :n])
    return patches.to(is_box.device)


def centre_and_size(boxes):
    """Boxes (..., 4): left, top, right, bottom -> (..., 4): centre x, y, width, height."""
    low, high = boxes.split(2, -1)
    return torch.cat([(low + high) / 2, high - low], -1)


@fp32
def detection_losses(logits, boxes, asked, classes, truth):
    """The losses of classes, L1 and GIoU (3,). Each is the mean over images of a sum divided by the
    number of true classes, or boxes, of the image.

    logits (B, P, Q) of patches and queries; boxes (B, P, 4); asked (B, Q): queries of the image;
    truth (B, M, 4): true boxes; classes (B, M, Q): True for the classes of a true box (overlapping
    boxes are merged, and have several), False for padding.
    """
    is_box, classes = classes.any(2), classes.to(logits.dtype)
    there, elsewhere = focal_losses(logits)                             # (B, P, Q)
    with torch.no_grad():
        change = classes @ (there - elsewhere).transpose(1, 2)          # (B, M, P)
        pairs = truth[:, :, None], boxes[:, None]
        apart = (centre_and_size(pairs[0]) - centre_and_size(pairs[1])).abs().sum(-1)
        patches = match(change + apart - generalized_iou(*pairs), is_box)[..., None]
        target = torch.zeros_like(logits).scatter_add(1, patches.expand_as(classes), classes)
    found = boxes.take_along_dim(patches, 1)                            # (B, M, 4)
    of_classes = torch.where(target > 0, there, elsewhere) * asked[:, None]
    l1 = (found - truth).abs().sum(-1) * is_box                         # (B, M)
    giou = (1 - generalized_iou(found, truth)) * is_box
    labels, count = classes.sum((1, 2)).clamp(min=1), is_box.sum(1).clamp(min=1)    # (B,)
    sums = of_classes.sum((1, 2)) / labels, l1.sum(1) / count, giou.sum(1) / count
    return torch.stack(sums).mean(1)


# (cos(e_p, q) + shift_p) (elu(scale_p) + 1)
@fp32
def query_logits(e, queries, shift, scale):
    """Class embeddings e (B, P, E), queries (Q, E), shift and scale (B, P, 1) -> (B, P, Q)."""
    return (F.normalize(e, dim=-1) @ queries.T + shift) * (F.elu(scale) + 1)


@fp32
def patch_boxes(x):
    """What the head of boxes returns (B, P, 4), P patches of a square grid -> boxes (B, P, 4).
    Where x is 0 it is the patch.

    differs: OWL-ViT's code adds 1 to a patch's row and column, so that a box begins at the lower
    right corner of its patch. The paper and the code's comment name the centre, as here.
    """
    grid = math.isqrt(x.shape[1])
    places = (torch.arange(grid, device=x.device) + 0.5) / grid
    centres = torch.cartesian_prod(places, places).flip(1)              # (P, 2), x and y
    patch = F.pad(centres, (0, 2), value=1 / grid)                      # (P, 4), with the sizes
    centre, size = (x + patch.logit()).sigmoid().split(2, -1)
    return torch.cat([centre - size / 2, centre + size / 2], -1)


class Detector(nn.Module):
    """The encoders and g_t of a run of this file, with OWL-ViT's heads."""

    patch_outputs, encode_text = Model.patch_outputs, Model.encode_text

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config, self.image_encoder, self.text_encoder = config, image_encoder, text_encoder
        self.g_t = nn.Linear(text_width, config.embed_dim, bias=False)
        self.class_head = nn.Linear(image_width, config.embed_dim)
        self.shift, self.scale = nn.Linear(image_width, 1), nn.Linear(image_width, 1)
        self.box_head = nn.Sequential(nn.Linear(image_width, image_width), nn.GELU(),
                                      nn.Linear(image_width, image_width), nn.GELU(),
                                      nn.Linear(image_width, 4))
        nn.init.normal_(self.class_head.weight, std=1e-6)
        for p in (self.class_head.bias, self.box_head[-1].weight, self.box_head[-1].bias):
            nn.init.zeros_(p)

    def forward(self, batch, gather=all_ranks):
        """batch: images (B, 3, S, S); tokens and mask (Q, L) of the queries; asked (B, Q), boxes
        (B, M, 4) and classes (B, M, Q), see detection_losses -> the loss and others to log. The
        loss is a mean over images, so ranks need not gather."""
        queries = self.encode_text(batch["tokens"], batch["mask"])          # (Q, E)
        logits, boxes = self.detect(batch["images"], queries)
        P = boxes.shape[1]  # no more true boxes than patches
        truth, classes = batch["boxes"][:, :P], batch["classes"][:, :P]
        losses = detection_losses(logits, boxes, batch["asked"], classes, truth)
        return {"loss": losses.sum(), **dict(zip(("class", "l1", "giou"), losses.detach()))}

    def detect(self, images, queries):
        """images (B, 3, S, S); queries (Q, E): normalised, or means of several that are -> logits
        (B, P, Q) and boxes (B, P, 4): left, top, right, bottom, as fractions of S."""
        x = self.patch_outputs(images)                                      # (B, P, d)
        logits = query_logits(self.class_head(x), queries, self.shift(x), self.scale(x))
        return logits, patch_boxes(self.box_head(x))

    def encode_image(self, images):
        """(B, 3, S, S) -> the mean class embedding of the patches (B, E), normalised."""
        return F.normalize(self.class_head(self.patch_outputs(images)).mean(1).float(), dim=-1)

    def text_parameters(self):
        return [*self.text_encoder.parameters(), *self.g_t.parameters()]

    def before_update(self, step):
        self.before = [p.detach().clone() for p in self.text_parameters()]

    def after_update(self, step, steps):
        """Undo 24 of 25 parts of the text encoder's update: its learning rate is a 25th of the
        others' (2e-6 and 5e-5 in OWL-ViT)."""
        for p, before in zip(self.text_parameters(), self.before):
            p.data.lerp_(before, 1 - 1 / 25)

    def clip_parameters(self):
        return {"text_projection": self.g_t.weight}

    def chance_loss(self, batch_size, mask, patches):
        return math.nan  # it depends on the boxes


# For train.py and eval.py this is a method like the four files: common.Method lists its members.
DETECTOR = SimpleNamespace(
    Config=DetectorConfig, PRESETS=DETECTOR_PRESETS, Model=Detector,
    content=lambda args: "boxes", vit_settings=lambda args: {"drop_path": args.drop_path})


@fp32
def best_boxes(logits, boxes, n=300):
    """logits (B, P, Q), boxes (B, P, 4) -> (B, n, 6): box, query and logit of the n pairs of a
    patch and a query with the largest logits."""
    Q = logits.shape[2]
    best, place = logits.flatten(1).topk(min(n, logits[0].numel()))         # (B, n)
    boxes = boxes.take_along_dim(place[..., None] // Q, 1)                  # (B, n, 4)
    return torch.cat([boxes, (place % Q)[..., None], best[..., None]], 2)


# AP is that of pycocotools 2.0 and of lvis 0.5, to the last digits of float64. These steps are
# numpy.linspace's.
IOUS = 0.5 + torch.arange(10, dtype=torch.float64) * ((0.95 - 0.5) / 9)
RECALLS = torch.arange(101, dtype=torch.float64) * 0.01


def overlaps(found, truth, crowd):
    """IoU of boxes (n, 4) and (m, 4) -> (n, m); where crowd (m,): the share of `found` in it."""
    both = shared_area(found[:, None], truth)                               # (n, m)
    areas, others = shared_area(found, found)[:, None], shared_area(truth, truth)
    return both / torch.where(crowd, areas, areas + others - both).clamp(min=1e-12)


def judge(iou, crowd):
    """COCO's matching. iou (n, m) of found boxes, best first, and true boxes, crowd (m,)
    -> (2, 10, n): at each of IOUS, whether a found box is right, and whether it does not count.

    A found box takes the free true box with the largest IoU. If none is left, the found box may lie
    in a crowd. A crowd can be taken by any number of found boxes, which then do not count.
    """
    n, m = iou.shape
    result, free = torch.zeros(2, len(IOUS), n, dtype=torch.bool), torch.ones(len(IOUS), m) > 0
    rank = iou + 2 * ~crowd  # true boxes come before crowds
    for i in range(n):
        fits = free & (iou[i] >= IOUS[:, None])                   # (10, m)
        value = torch.where(fits, rank[i], -1.0).flip(1)                    # of equals the last
        best = m - 1 - value.argmax(1)                                      # (10,)
        result[0, :, i], result[1, :, i] = fits.any(1) & ~crowd[best], fits.any(1) & crowd[best]
        free[result[0, :, i], best[result[0, :, i]]] = False
    return result


def class_precision(scores, right, ignored, positives):
    """Scores (n,), right and ignored (10, n) of a class's found boxes; positives: the number of its
    true boxes -> AP at each of IOUS (10,): the mean over RECALLS of the largest precision at that
    recall or a larger one."""
    order = scores.argsort(descending=True, stable=True)
    hits = right[:, order].double().cumsum(1)                               # (10, n)
    misses = (~right & ~ignored)[:, order].double().cumsum(1)
    precision = hits / (hits + misses).clamp(min=1)
    precision = precision.flip(1).cummax(1).values.flip(1) if len(scores) else precision
    precision = F.pad(precision, (0, 1))  # 0 at recalls that are not reached
    place = torch.searchsorted(hits / positives, RECALLS.expand(len(IOUS), -1).contiguous())
    return precision.take_along_dim(place, 1).mean(1)


def average_precisions(found, truths, most=100):
    """COCO's AP, and LVIS's where truths have `absent` -> {class: AP at each of IOUS (10,)} for the
    classes that have a true box.

    found: for each image boxes (n, 4), classes (n,) and scores (n,). The `most` best of a class
    count. truths: for each image an object with
        boxes (m, 4), labels (m,), crowd (m,)   a crowd is a box around many objects
        absent    classes that the image does not show; None: all that are not in `labels`. LVIS
                  looks for few classes in an image; others are not judged there.
        partial   classes of which some objects have no box (LVIS)
    """
    parts, positives = {}, {}
    for (boxes, labels, scores), truth in zip(found, truths, strict=True):
        for c in torch.cat([labels, truth.labels]).unique().tolist():
            mine, rows = truth.labels == c, (labels == c).nonzero()[:, 0]
            if truth.absent is not None and not mine.any() and c not in truth.absent:
                continue
            rows = rows[scores[rows].argsort(descending=True, stable=True)][:most]
            crowd = truth.crowd[mine]
            right, ignored = torch.zeros(2, len(IOUS), len(rows), dtype=torch.bool)
            if mine.any():
                iou = overlaps(boxes[rows].double(), truth.boxes[mine].double(), crowd)
                right, ignored = judge(iou, crowd)
            if c in truth.partial:
                ignored = ~right  # a found box that is not right may show an object without a box
            parts.setdefault(c, []).append((scores[rows], right, ignored))
            positives[c] = positives.get(c, 0) + int((~crowd).sum())
    joined = {c: [torch.cat(x, -1) for x in zip(*parts[c])] for c in positives if positives[c]}
    return {c: class_precision(*columns, positives[c]) for c, columns in joined.items()}


# tests/RESULTS.md has the results at toy scale. Three of them concern the equations:
#
# * L_f can be solved without the image. The negatives of a word are the words of the same caption,
#   so patches can become a codebook that tells words apart, whatever the image shows. This happened
#   with --lambda-f .5 --lr 1e-3, but not with .1 and 2e-3. diagnose() logs L_f with wrong images.
# * With sigma .9 words give their own objects a larger share of the weights on objects than softmax
#   weights do: .939 and .842 for colours, .609 and .490 for shapes. PACL's words, weighted by
#   Eq. 2-4, are not shown to have less (.931 and .647). FILIP's, at SPARC's rate, have less (.495
#   and .421). With sigma .4 SPARC's colours had less (.772).
# * An update takes 1.06 times CLIP's FLOPs with `tiny`, and 1.005 times with `b16`, as in Table 11.


if __name__ == "__main__":
    print("An image has 9 patches, and a caption four words. Each word is seen on two patches. A\n"
          "word gives each patch a weight (Eq. 2-4), here in %.\n")
    torch.manual_seed(0)
    B, L, P, E = 64, 4, 9, 32
    tokens, patches = torch.randn(B, L, E), 0.5 * torch.randn(B, P, E)
    place = torch.rand(B, P).argsort(1)[:, :8]                          # (B, 2 L)
    patches.scatter_add_(1, place[..., None].expand(-1, -1, E), tokens.repeat_interleave(2, 1))
    mask = torch.ones(B, L, dtype=torch.bool)
    one, two = sorted(place[0, :2].tolist())
    print(f"a word that is seen on patches {one + 1} and {two + 1}")
    forms = {
        "softmax (Table 8)": softmax_weights,
        "no threshold": lambda tokens, patches: alignment_weights(tokens, patches, 0.0),
        "sigma = 1 / P": alignment_weights,
        "sigma = 0.5": lambda tokens, patches: alignment_weights(tokens, patches, 0.5)}
    for name, align in forms.items():
        a = align(tokens, patches)                                      # (B, L, P)
        print(f"{name:18}", " ".join(f"{100 * weight:3.0f}" for weight in a[0, 0]))
    print("\nSoftmax drops one of the two patches. Sigma = 0.5 drops all patches but these two.")
    right = fine_grained_loss(tokens, patches, mask, 10.0)
    wrong = fine_grained_loss(tokens, patches.roll(1, 0), mask, 10.0)
    print(f"\nL_f (Eq. 6) is {right:.2f} with the right images, {wrong:.2f} with wrong images,\n"
          "and log 4 = 1.39 for a guess.")
