"""SPARO: Selective Attention for Robust and Compositional Transformer Encodings for Vision
(Vani et al., ECCV 2024, arXiv 2404.15721).

L attention heads read the outputs of a transformer. Each head has a learned query and returns one
short vector, its slot. The encoding is the concatenation of the L slots. A slot is narrow and comes
from a single head, so it tends to hold a single concept. Both encoders of CLIP get L slots, and the
similarity of an image and a caption is the mean of the L cosines between their slots.

B images or captions give n outputs of width d each (a caption has n tokens), and L slots of width
V. Images and captions have their own n and d. Queries have width D.

    symbol    name here        shape              where
    H         x, then H        (B, n, d)          Sec. 3.2; the outputs of a transformer
    q_l       q                (L, D)             Eq. 1; learned query of slot l
    K_l       K, Sparo.keys    (L, D, d)          Eq. 1; learned key projection, with a bias b
    W         Sparo.Wproj      D -> V             Eq. 1; learned, shared by all slots
    u_l       u                (L, d)             Sparo.forward; what slot l looks for in H
    a_l       attn             (B, L, n)          Sparo.forward; the softmax of Eq. 1
    p_l       p                (B, L, d)          Sparo.forward; H, weighted by a_l
    y_l       y                (B, L, V)          Eq. 1; slots (slots_i of images, slots_t of texts)
    y^i, y^t  y_i, y_t         (B, M)             Sec. 3.3; slots, normalised and joined; M = L V
    tau       1 / scale        scalar             CLIP; temperature of its loss, learned

The authors' code is https://github.com/ankitkv/sparo-clip at 6621a31, a fork of OpenCLIP; DINO's is
https://github.com/facebookresearch/dino at 7c446df. (FILE:LINE) names a line of one of the two.
`python tests/parity.py sparo PATH` trains this file and theirs; losses differ by about 1e-14.

Differs from the paper (search for "differs" for the rest):
  * W and K_l have biases: App. A's listing has them, Eq. 1 has not.
  * Captions are WordPiece tokens and end at [SEP]. The paper's tokens are CLIP's, which
    --vocab bpe_simple_vocab_16e6.txt.gz selects.
  * Embeddings, positions and queries have no weight decay; the authors' have (main.py:310).
  * Random crops vary for every photo. The authors' crop a photo of 3:2 or 16:9 always alike
    (transform.py:105; common.random_crop has the reason).
  * The image encoder is initialised as CLIP's text encoder is (transformer.py:703). The authors'
    image encoder has torch's initial weights, and its [CLS] and positions have a deviation of
    width^-.5 (transformer.py:503, 430).
  * Recall@k counts queries with a match among the k nearest, as CLIP_benchmark (Table C.2) and the
    authors' code (training/train.py:360) do. Sec. 4.2 counts the fraction of the k that match.
Not here: CLIP's own form of ResNet-50 (App. B.3).
Run:     python train.py --method sparo                   (the world of shapes, in minutes)
         python train.py --method sparo --readout cls     (CLIP; gap: CLIP+GAP)
         python train.py --method sparo --objective dino  (DINO; --readout sparo, cls, gap)
"""

import copy
import functools
import math
import re
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass(kw_only=True)
class Config:
    L: int = 128                   # number of slots, > 0. Most presets have 64 (Sec. 4)
    V: int = 64                    # width of a slot, > 0 (Sec. 4)
    D: int = 64                    # width of a slot's query and keys, > 0 (Sec. 3.2)


# Below the core: in_fp32, Gather, own_columns, Keys, without_padding, as_bools.


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


# y_l = W K_l H^T softmax(H K_l^T q_l / sqrt(D))                                    (Eq. 1)
#
# Sparo.forward computes it from the right to the left:
#     u_l = K_l^T q_l / sqrt(D)   (d,)  comes first, because no image is in it
#     a_l = softmax(H u_l)        (n,)  the attention
#     p_l = H^T a_l               (d,)  one vector, so that K_l need not project n outputs
#     y_l = W K_l p_l             (V,)
class Sparo(nn.Module):
    """Separate-head attention (Sec. 3.2). Parameters have the names and dimensions of App. A's
    listing. grp_size: number of slots that share one key projection; it divides L (App. A)."""

    def __init__(self, d, L, V, D, grp_size=1):
        super().__init__()
        self.D, self.grp_size, self.nkeys = D, grp_size, L // grp_size
        # q_l; shape of App. A
        self.q = nn.Parameter(torch.randn(L, D).view(1, self.nkeys, grp_size, 1, D))
        # K_l and b_l of all slots: an nn.Linear, which keys() only reads (Keys, below)
        self.KVproj = Keys(d, self.nkeys * D)
        self.Wproj = nn.Linear(D, V)
        nn.init.xavier_uniform_(self.KVproj.weight)
        nn.init.zeros_(self.KVproj.bias)
        nn.init.zeros_(self.Wproj.bias)

    def forward(self, x, eos_idx=None, return_attn=False):
        """Outputs x (B, n, d) -> slots (B, L, V); with return_attn also the attention (B, L, n).
        eos_idx (B,): the index of each caption's last token, not its length. Slots ignore the
        positions after it."""
        H, padding = without_padding(x, eos_idx)                    # (B, n, d), (B, n)
        q = self.q.view(-1, self.D)                                 # (L, D)
        K, b = self.keys()                                          # (L, D, d), (L, D)
        u = torch.einsum("lD,lDd->ld", q, K) * self.D**-0.5         # (L, d)     K_l^T q_l / sqrt(D)
        scores = (H @ u.T).transpose(1, 2)                          # (B, L, n)  H u_l
        if padding is not None:
            scores = scores.masked_fill(padding[:, None], -torch.inf)
        attn = scores.softmax(-1)                                   # (B, L, n)  a_l
        p = attn @ H                                                # (B, L, d)  H^T a_l
        # differs: K_l has a bias b_l, and W has one (App. A). b_l would add q_l . b_l / sqrt(D) to
        # all scores of a slot, which softmax ignores. a_l sums to 1, so values get b_l once.
        values = torch.einsum("bld,lDd->blD", p, K) + b             # (B, L, D)  K_l p_l + b_l
        y = self.Wproj(values)                                      # (B, L, V)  W values + its bias
        return (y, attn) if return_attn else y

    def keys(self):
        """K (L, D, d), b (L, D). grp_size neighbouring slots share one K_l and b_l (App. A)."""
        K = self.KVproj.weight.unflatten(0, (self.nkeys, self.D))
        b = self.KVproj.bias.unflatten(0, (self.nkeys, self.D))
        return K.repeat_interleave(self.grp_size, 0), b.repeat_interleave(self.grp_size, 0)


# y^i . y^t = mean_l sim(y^i_l, y^t_l);  i: image, t: text (no indices)             (Eq. 2)
# What runs: y^i = concat_l(y^i_l / |y^i_l|) / sqrt(L), y^t alike; y^i . y^t is then this mean.
@fp32
def normalize_slots(y):
    """Slots (B, L, V) -> encodings (B, M) of length 1, M = L V."""
    B, L, V = y.shape
    return F.normalize(y, dim=-1).flatten(1) / L**0.5


# L_CLIP = -1/(2B) sum_j [ log softmax_j'(y^i_j . y^t_j' / tau) at j' = j
#                        + log softmax_j'(y^t_j . y^i_j' / tau) at j' = j ]        (CLIP; Sec. 3.3)
# j: a pair of this rank. j': a pair of any rank. i and t are no indices: image and text.
# cross_entropy(logits, own) is -1/B sum_j log softmax(row j) at the row's own column.
@fp32
def clip_loss(v, t, scale, *, gather=all_ranks):
    """v, t: slots (B, L, V) or encodings (B, M) of this rank's images and captions -> scalar. The
    loss normalises each slot alone, and an encoding as a whole, so slots.flatten(1) gives another
    loss than slots. scale: 1 / tau, not log(1 / tau). gather: see all_ranks."""
    y_i = normalize_slots(v if v.ndim == 3 else v[:, None])   # (B, M)
    y_t = normalize_slots(t if t.ndim == 3 else t[:, None])   # (B, M)
    image_to_text = scale * y_i @ gather(y_t).T               # (B, world * B)  y^i_j . y^t_j' / tau
    text_to_image = scale * y_t @ gather(y_i).T               # (B, world * B)  y^t_j . y^i_j' / tau
    own = own_columns(image_to_text)                          # (B,), the columns j' = j
    return (F.cross_entropy(image_to_text, own) + F.cross_entropy(text_to_image, own)) / 2


class Model(nn.Module):
    """CLIP with SPARO on each encoder (Sec. 3.3).

    image_encoder(images) -> (B, n, image_width), with or without [CLS];
    text_encoder(tokens, mask) -> (B, n, text_width). The paper's text encoder is causal; any works.
    SPARO replaces the last block of each encoder (Sec. 4): give encoders without their last block.
    """

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config = config
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        self.image_readout, self.text_readout = self.readouts(image_width, text_width)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # CLIP, Sec. 2.5

    def readouts(self, *widths):
        cfg = self.config
        return [Sparo(d, cfg.L, cfg.V, cfg.D) for d in widths]

    def forward(self, batch, gather=all_ranks):
        """batch: images (B, 3, size, size), tokens (B, n), mask (B, n), True at tokens, then
        False at padding. Returns {"loss": scalar, "scale": scalar to log}."""
        slots_i = self.image_slots(batch["images"])                # (B, L, V)
        slots_t = self.text_slots(batch["tokens"], batch["mask"])  # (B, L, V)
        scale = self.log_scale.exp()
        return {"loss": clip_loss(slots_i, slots_t, scale, gather=gather), "scale": scale.detach()}

    @torch.no_grad()
    def after_update(self, step, steps):
        """Call after each update: keeps the scale within [1, 100], as OpenCLIP does."""
        self.log_scale.clamp_(0, math.log(100))

    def encode_image(self, images):
        return normalize_slots(self.image_slots(images))           # (B, M)

    def encode_text(self, tokens, mask):
        return normalize_slots(self.text_slots(tokens, mask))      # (B, M)

    def image_slots(self, images, **options):
        """Images (B, 3, size, size) -> slots (B, L, V), with return_attn=True also (B, L, n)."""
        return self.image_readout(self.image_encoder(images), **options)

    def text_slots(self, tokens, mask, **options):
        """tokens, mask (B, n) -> slots (B, L, V), with return_attn=True also (B, L, n)."""
        eos_idx = as_bools(mask, tokens.shape).sum(1) - 1          # (B,); padding comes last
        return self.text_readout(self.text_encoder(tokens, mask), eos_idx, **options)


# To read SPARO, stop here. ----------------------------------------------------------------
#
# To add SPARO to Hugging Face's CLIP (`model`): `images` are pixels, `ids` are tokens with the
# attention mask `mask`. Run lines marked "once" before DDP, lines marked "update" after each batch.
#     model.image_sparo, model.text_sparo = Sparo(768, 64, 64, 64), Sparo(512, 64, 64, 64)  # once
#     optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)                            # once
#     x = model.vision_model(pixel_values=images).last_hidden_state             # (B, n, 768)
#     x = model.vision_model.post_layernorm(x)  # the text model's outputs are normalised
#     h = model.text_model(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, n, 512)
#     v = model.image_sparo(x)                                                  # (B, L, V)
#     ends = as_bools(mask, ids.shape).sum(1) - 1                               # (B,)
#     t = model.text_sparo(h, eos_idx=ends)                                     # (B, L, V)
#     loss = clip_loss(v, t, model.logit_scale.exp())
#     loss.backward(), optimizer.step(), optimizer.zero_grad()                  # update
#     model.logit_scale.data.clamp_(0, math.log(100))                           # update


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


class Keys(nn.Linear):
    """An nn.Linear whose weight is read, and which is not called. torch's dynamic quantisation
    would replace the class nn.Linear by one without a weight, but replaces no subclass. Leave Keys
    out of LoRA, pruning and other quantisation: these change what a call computes."""


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


def after_end(eos_idx, x):
    """The padding of captions (B, n): True at the positions after the last token. eos_idx (B,) has
    the index of each caption's last token; x (B, n, d) are the outputs. An empty caption has the
    index -1. Its first position is not padding, because softmax needs one position."""
    B, n, _ = x.shape
    if eos_idx.shape != (B,):
        raise ValueError(f"eos_idx needs {B} indices of last tokens, not {eos_idx}.")
    return torch.arange(n, device=eos_idx.device) > eos_idx.clamp(min=0)[:, None]


def without_padding(x, eos_idx):
    """Outputs x (B, n, d) -> x with zeros at padding, because attention 0 * NaN would be NaN, and
    the padding (B, n), None without eos_idx."""
    if eos_idx is None:
        return x, None
    padding = after_end(eos_idx, x)
    return x.masked_fill(padding[..., None], 0.0), padding


def as_bools(mask, shape):
    """A mask of bools, or of 0 and 1 -> of bools. Raises ValueError for another shape, and for
    floats (an additive mask). An inverted mask passes."""
    if mask.shape != shape or mask.is_floating_point():
        raise ValueError(f"A mask needs bools {[*shape]}, not {mask.dtype} {[*mask.shape]}.")
    return mask.bool()


# Settings, presets, what train.py and eval.py ask for -------------------------------------


@dataclass(kw_only=True)
class Settings(Config):
    """All flags of this method. Model reads those of Config; Baseline and Dino read their own, too.
    train.py alone reads local_crops, local_size, crop_least and crop_border (views). common.py,
    train.py and Dino read replace_block (blocks_left_out)."""

    objective: Literal["clip", "dino"] = "clip"  # training loss: CLIP's (Sec. 3.3), DINO's (3.4)
    # how the outputs of an encoder become an encoding (Sec. 4, 5.3, B.2). sparo: slots. cls: one
    # token, as in CLIP. gap: the mean of the tokens, as in CLIP+GAP. attpool: attention pooling.
    # bottleneck: CLIP with a narrow layer before the encoding. fdt: weights of learned codes
    readout: Literal["sparo", "cls", "gap", "attpool", "bottleneck", "fdt"] = "sparo"
    replace_block: bool = True     # use SPARO in place of the last block of each encoder (Sec. 4)
    # width M of the encoding with --readout cls, gap, bottleneck or fdt, > 0 (Sec. 3.1)
    embed_dim: int = 512
    bottleneck: int = 64           # width m of the layer that --readout bottleneck adds, > 0 (B.2)
    codes: int = 16384             # number of codes of --readout fdt, > 0 (App. B.2)
    # heads of --readout attpool (Table 6). multi: a linear layer mixes the heads. separate: no
    # layer mixes the heads
    heads: Literal["separate", "multi"] = "multi"
    slot_norm: bool = False        # normalise the slots of --readout attpool one by one (Table 6)
    slot_projection: bool = False  # project the slots of --readout attpool one by one (Table 6)
    out_dim: int = 65536           # DINO: number K of outputs of the head, > 0 (App. C.2)
    head_width: int = 2048         # DINO: width of the head's hidden layers, > 0 (App. C.2)
    head_bottleneck: int = 256     # DINO: width of the inputs of the head's last layer, > 0 (C.2)
    ema: float = 0.996             # DINO: first momentum of the teacher, <= 1. The last is 1 (C.2)
    freeze_last: int = 0           # DINO: steps before the head's last layer trains (App. C.2)
    local_crops: int = 8           # DINO: number of small views. There are two large views (C.2)
    local_size: int = 96           # DINO: height and width of a small view in pixels, > 0 (C.2)
    crop_least: float = 0.05       # DINO: smallest area of a view / of its image, > 0, <= 1 (C.2)
    # DINO: area of a view / area of its image, > 0, <= 1: small views have at most this area, large
    # views at least this area (App. C.2)
    crop_border: float = 0.4


# The authors' images are OpenCLIP's: crops of .9 to 1 of the area, not mirrored (transform.py:105).
PAPER = dict(text_encoder="clip-b16", lr=5e-4, weight_decay=0.5, warmup=3600, batch=4096,
             clip_grad=0.0, crop_scale=0.9, flip=0.0)
# OpenCLIP's AdamW has another beta2 and epsilon for a ResNet than for a ViT (params.py:11).
R50 = PAPER | dict(image_encoder="ResNet-50", steps=78_280, beta2=0.999, adam_eps=1e-8)
PRESETS = {  # the values of --preset: settings of this file and of train.py; flags override them
    "tiny": dict(image_encoder="tiny:cls=1", text_encoder="tiny:causal=1", data="shapes", L=32, V=16, D=16, batch=128,
                 steps=600, lr=1e-3, weight_decay=0.1, warmup=50, embed_dim=128, codes=512, out_dim=1024, ema=0.99,
                 head_width=256, head_bottleneck=64, local_crops=2, local_size=24, crop_least=0.2, crop_border=0.5),
    # Sec. 4, Table C.3. The steps are epochs x pairs / batch. Epochs x pairs (Table C.1):
    # CC3M 32 x 2,795,293, CC12M 25 x 10,030,127, CC15M 25 x 12,825,420, L400M 32 x 319,707,672.
    "cc3m-b16": dict(image_encoder="clip-b16", L=64, steps=21_838, **PAPER),
    "cc12m-b16": dict(image_encoder="clip-b16", L=64, steps=61_219, **PAPER),
    "cc3m-b32": dict(image_encoder="clip-b32", L=64, steps=21_838, **PAPER),  # Table B.1
    "cc12m-b32": dict(image_encoder="clip-b32", L=64, steps=61_219, **PAPER),
    # With --L 128: Table 6 and, in Table B.1, SPARO and AttnPool of CLIP32, which are Table 6's
    "cc15m-b32": dict(image_encoder="clip-b32", L=64, steps=78_280, **PAPER),
    "cc15m-b16": dict(image_encoder="clip-b16", L=64, steps=78_280, **PAPER),
    "l400m-b32": dict(image_encoder="clip-b32", L=128, steps=312_214,
                      **PAPER | dict(weight_decay=0.2, warmup=2000, batch=32768)),
    # Table B.2. differs: ResNet-50 is torchvision's. The text encoder keeps its last block, because
    # without this block SPARO would have fewer parameters than the table prints.
    "cc15m-r50": dict(L=128, V=32, D=32, **R50),
    "cc15m-r50-d64": dict(L=128, V=32, D=64, **R50),
    "cc15m-r50-clip": dict(readout="cls", embed_dim=1024, **R50),
    "cc15m-r50-clip4096": dict(readout="cls", embed_dim=4096, **R50),
    # The CLIP that STAIR is compared with (arXiv 2301.13081, Sec. 4.2); beta2 and adam_eps are
    # LAMB's defaults. STAIR does not say how it modifies CLIP's encoders, so [CLS] and the causal
    # text encoder stay. differs: LAMB neither scales nor decays the token embedding (see stair.py).
    "stair-clip": dict(image_encoder="ViT-B/16:cls=1", text_encoder="12x512:context=76,causal=1,vocab_size=30522",
                       readout="cls", steps=600_000, batch=16384, optimizer="lamb", beta2=0.999,
                       adam_eps=1e-6, lr=1e-3, schedule="linear", weight_decay=1e-2, warmup=10_000, clip_grad=0.0),
    # Sec. 3.4, App. C.2: 100 epochs, 10 of them warm-up, over ImageNet's 1,281,167 images.
    "dino-s16": dict(image_encoder="ViT-S/16:cls=1,drop_path=0.1", objective="dino", L=64, batch=512, steps=250_200,
                     lr=1e-3, beta2=0.999, adam_eps=1e-8, clip_grad=3.0, weight_decay=0.04, weight_decay_end=0.4,
                     warmup=25_020, freeze_last=2502, probe="sgd"),
}


def blocks_left_out(args):
    """Number of last blocks that each encoder lacks because SPARO replaces them (Sec. 3.4, 4)."""
    return int(args.readout == "sparo" and args.replace_block)


class FullModel(Model):
    """Model, and what eval.py and --init-weights also ask of it."""

    def __init__(self, config, *encoders_and_widths):
        super().__init__(config, *encoders_and_widths)
        self.slots = config.L if config.readout == "sparo" else 0
        self.mask_parts = config.L  # equal parts of an encoding; train_mask weights each part

    def clip_parameters(self):
        """{CLIP's name: parameter} that --init-weights sets, in addition to the encoders."""
        return {"logit_scale": self.log_scale}

    def attend(self, images, tokens, mask):
        """What the slots of B pairs attend to (Sec. 5.4): their attention over the image's tokens
        (B, L, n) and over the caption's tokens (B, L, n), then the slots of both (B, L, V)."""
        slots_i, over_image = self.image_slots(images, return_attn=True)
        slots_t, over_text = self.text_slots(tokens, mask, return_attn=True)
        return over_image, over_text, slots_i, slots_t


# Other read-outs --------------------------------------------------------------------------
#
# Each read-out takes x (B, n, d). For captions it also takes the indices eos_idx (B,) of the last
# tokens. It returns a single slot (B, 1, M), so that normalize_slots normalises the encoding as one
# vector. The paper does not say how it normalises the variants of Table 6.


class Baseline(FullModel):
    """CLIP with another read-out than SPARO. image_encoder.cls is None if there is no [CLS]; `cls`
    then takes the attention of CLIP's ResNet. `gap` takes image_encoder.norm, the last LayerNorm,
    away from the encoder."""

    def readouts(self, image_width, text_width):
        """[read-out of the image encoder, read-out of the text encoder]"""
        config, image_encoder = self.config, self.image_encoder
        E, m, widths = config.embed_dim, config.bottleneck, (image_width, text_width)

        def projection(d, M):
            layer = nn.Linear(d, M, bias=False)
            nn.init.normal_(layer.weight, std=d**-0.5)
            return layer

        if config.readout == "cls" and image_encoder.cls is None:  # a ResNet (App. B.3)
            pool = AttentionPool(image_width, image_encoder.grid**2, E)
            return [pool, Pool(projection(text_width, E))]
        if config.readout == "cls":
            return [Pool(projection(d, E)) for d in widths]
        if config.readout == "gap":
            # The authors take the mean first and apply the encoder's last LayerNorm to the mean
            # (transformer.py:527, 573), so the LayerNorm moves from the encoder to the read-out.
            norm, image_encoder.norm = image_encoder.norm, nn.Identity()
            mean = Pool(nn.Sequential(norm, projection(image_width, E)), mean=True)
            return [mean, Pool(projection(text_width, E))]         # captions are read as in CLIP
        if config.readout == "bottleneck":  # App. B.2
            return [Pool(nn.Sequential(projection(d, m), nn.Linear(m, E))) for d in widths]
        if config.readout == "fdt":
            codebook = nn.Parameter(torch.randn(config.codes, E))
            readouts = [FDT(d, codebook) for d in widths]
            del readouts[1].codebook  # one name for the codes; text_slots gives them
            return readouts
        return [CrossAttention(d, config.L, config.V, config.D, config.heads, config.slot_norm,
                               config.slot_projection) for d in widths]

    def text_slots(self, tokens, mask, **options):
        if self.config.readout == "fdt":
            options["codebook"] = self.image_readout.codebook
        return super().text_slots(tokens, mask, **options)

    def clip_parameters(self):
        """Only a model with --readout cls is CLIP and has CLIP's projections."""
        places = super().clip_parameters()
        if self.config.readout == "cls":
            places["visual.proj"] = self.image_readout.proj.weight
            places["text_projection"] = self.text_readout.proj.weight
        return places


class Pool(nn.Module):
    """Projects one output, at [CLS] or at a caption's last token (CLIP). With mean=True it projects
    the mean of all outputs (CLIP+GAP)."""

    def __init__(self, proj, mean=False):
        super().__init__()
        self.proj, self.mean = proj, mean

    def forward(self, x, eos_idx=None):
        if self.mean:
            x = x.mean(1)
        else:
            # an empty caption has the index -1; its first position counts, as in after_end
            index = 0 if eos_idx is None else eos_idx.clamp(min=0)
            x = x[torch.arange(len(x), device=x.device), index]
        return self.proj(x)[:, None]                               # (B, 1, M)


class AttentionPool(nn.Module):
    """The last layer of CLIP's ResNet (CLIP, Sec. 2.4): attention whose query is the mean of the n
    outputs, and whose keys and values are the mean and the outputs. A head is 64 wide."""

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
    """The cross-attention of Table 6: L heads of width D, each with a learned query.

    heads="multi" adds the layer that mixes the heads. A LayerNorm and a projection follow, each
    slot by slot (slot_norm, slot_projection) or over all slots together. AttPool mixes the heads
    and applies both over all slots together. The authors' code also applies a LayerNorm and a
    projection to the queries (transformer.py:229). Table 6 counts no parameters of such a
    projection.

    Table 6 counts a multiply-add once (--dry-run prints both). With --L 128 its read-outs fit, but
    SPARO's two rows are lower here, 7.43 and 6.82 for 8.0 and 7.4: Sparo.forward needs less than
    the listing of App. A.
    """

    def __init__(self, d, L, V, D, heads, slot_norm, slot_projection):
        super().__init__()
        self.q = nn.Parameter(torch.randn(L, 1, D))
        self.k, self.v = nn.Linear(d, L * D), nn.Linear(d, L * D)
        self.mix = {"multi": nn.Linear, "separate": nn.Identity}[heads](L * D, L * D)
        self.norm = nn.LayerNorm(D if slot_norm else L * D)
        self.proj = nn.Linear(D, V) if slot_projection else nn.Linear(L * D, L * V)

    def forward(self, x, eos_idx=None):
        B, n, _ = x.shape
        k = self.k(x).view(B, n, len(self.q), -1).transpose(1, 2)  # (B, L, n, D)
        v = self.v(x).view(B, n, len(self.q), -1).transpose(1, 2)
        visible = None if eos_idx is None else ~after_end(eos_idx, x)[:, None, None]
        y = F.scaled_dot_product_attention(self.q.expand(B, -1, -1, -1), k, v, visible)
        y = self.mix(y.flatten(1))                                 # (B, L D)
        y = self.norm(y.view(B, -1, *self.norm.normalized_shape))  # (B, L, D) or (B, 1, L D)
        y = self.proj(y.view(B, -1, self.proj.in_features))        # (B, L, V) or (B, 1, L V)
        return y.view(B, 1, -1)                                    # (B, 1, L V)


class FDT(nn.Module):
    """Finite Discrete Tokens (App. B.2): an encoding is a mixture of codes.

    Both encoders share the codes (C, E), the codebook; `forward` gets that of the other read-out.
    Each position scores all codes, each code keeps its largest score, and sparsemax turns the C
    scores into the weights of the mixture.

    differs: the outputs are normalised and include [CLS]. The authors do not normalise them
    (model.py:448) and leave out [CLS] (transformer.py:565). Positions after a caption's end score
    -inf and are never the largest; in the authors' code they score 0 (transformer.py:1067).
    """

    def __init__(self, d, codebook):
        super().__init__()
        E = codebook.shape[1]
        self.codebook, self.temperature = codebook, 1000 * E**0.5  # transformer.py:1004, 1065
        self.query = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, E), nn.GELU(), nn.LayerNorm(E),
                                   nn.Linear(E, E))

    def forward(self, x, eos_idx=None, codebook=None):
        codebook = self.codebook if codebook is None else codebook
        scores = self.query(x) @ codebook.T / self.temperature     # (B, n, C)
        if eos_idx is not None:
            scores = scores.masked_fill(after_end(eos_idx, x)[..., None], -torch.inf)
        return (sparsemax(scores.amax(1)) @ codebook)[:, None]     # (B, 1, E)


@fp32
def sparsemax(z):
    """Scores (..., C) -> the nearest weights (..., C) that are not negative and sum to 1; many are
    exactly 0 (Martins & Astudillo 2016)."""
    k = torch.arange(1, z.shape[-1] + 1, device=z.device)
    sums = z.sort(-1, descending=True).values.cumsum(-1)       # (..., C), sum of the k largest
    # Each k gives a threshold. The largest threshold is the right one, and the k that gives it
    # is the number of weights above 0.
    threshold = ((sums - 1) / k).amax(-1, keepdim=True)
    return (z - threshold).clamp(min=0)


# DINO (arXiv 2104.14294) with SPARO (Sec. 3.4) --------------------------------------------


# P_s = softmax(g_s / tau_s),  P_t = softmax((g_t - c) / tau_t)
# mean over large views x and views x' != x of - P_t(x) . log P_s(x')          (DINO, Eq. 3)
@fp32
def dino_loss(student, teacher, center, student_temp=0.1, teacher_temp=0.04):
    """DINO's loss, a scalar, and P_t (G, B, K).

    student: logits g_s (V, B, K) of V views, of which the G large ones come first. teacher: logits
    g_t (G, B, K) of the large views; they get no gradient. center: c (K,).
    """
    p_t = ((teacher.detach() - center) / teacher_temp).softmax(-1)
    log_p_s = (student / student_temp).log_softmax(-1)
    G, V = len(teacher), len(student)
    # The sum over all pairs of views is a product of two sums, which is cheap. The G pairs of
    # a view with itself are then subtracted.
    every = (p_t.sum(0) * log_p_s.sum(0)).sum(-1).mean()
    same = (p_t * log_p_s[:G]).sum((0, 2)).mean()
    return (same - every) / (G * (V - 1)), p_t


@fp32
def cosines(x, y):
    """x (B, M), y (K, M) -> (B, K)."""
    return F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T


class DinoHead(nn.Module):
    """Encodings (B, M) -> logits (B, K): three layers, then the cosine with each of K learned
    directions, which is what DINO's weight-normalised last layer computes."""

    def __init__(self, M, K, width, bottleneck):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(M, width), nn.GELU(), nn.Linear(width, width),
                                 nn.GELU(), nn.Linear(width, bottleneck))
        self.last = Keys(bottleneck, K, bias=False)
        for layer in self.mlp[::2]:
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        return cosines(self.mlp(x), self.last.weight)


class Dino(nn.Module):
    """A student network learns the output distributions of a teacher network that sees another
    view of the same image. The teacher's weights are a moving average of the student's weights.
    Evaluation uses the teacher. The head gets the slots without normalisation.

    differs from DINO's code (FILE:LINE):
      * Clipping bounds the norm of the whole gradient, not the norm of each parameter's gradient
        (utils.py:132).
      * The learning rate ends at 0, not at 1e-6 (main_dino.py:101). Its warm-up begins at
        peak / warmup, not at 0 (utils.py:191), and reaches the peak at the same step.
      * [CLS], positions and queries have no weight decay. DINO's code applies weight decay to all
        parameters but biases and norms (utils.py:639).
      * Pixels are normalised with CLIP's mean and deviation, not ImageNet's (main_dino.py:431).
      * The image encoder is initialised as with --objective clip (see the top of this file).
      * Positions are interpolated with antialiasing. DINO's code uses no antialiasing
        (vision_transformer.py:187).
      * common.jitter changes the colours. DINO's code uses torchvision's jitter (main_dino.py:424).
    """

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config, self.image_encoder = config, image_encoder
        M, self.readout = image_width, Pool(nn.Identity(), config.readout == "gap")
        if config.readout == "sparo":
            M = config.L * config.V
            self.readout = Sparo(image_width, config.L, config.V, config.D)
        self.head = DinoHead(M, config.out_dim, config.head_width, config.head_bottleneck)
        self.teacher = copy.deepcopy(self.student()).requires_grad_(False)
        self.register_buffer("center", torch.zeros(config.out_dim))
        self.train()  # sets the teacher's mode, too

    def student(self):
        return nn.Sequential(self.image_encoder, self.readout, self.head)

    def train(self, mode=True):
        """The teacher applies no dropout or stochastic depth, but its BatchNorm normalises by the
        batch, as the student's BatchNorm does."""
        super().train(mode)
        for module in self.teacher.modules():
            module.training = mode and isinstance(module, nn.modules.batchnorm._BatchNorm)
        return self

    def logits(self, network, views):
        """V views (B, 3, s, s), the two large ones first -> logits (V, B, K). Views of one size
        go through the network together."""
        encode, head = network[:2], network[2]
        by_size = [torch.cat(part) for part in (views[:2], views[2:]) if part]
        y = torch.cat([encode(x).flatten(1) for x in by_size])     # (V B, M)
        return head(y).unflatten(0, (len(views), -1))

    def forward(self, batch, gather=all_ranks):
        """batch: views, a list of (B, 3, s, s), the two large ones first. Returns {"loss": scalar,
        "entropy": the mean entropy of P_t, "entropy_mean": the entropy of the mean of P_t over
        images and views}.

        After a collapse the outputs no longer depend on the image. Both entropies are then near
        log K, or both are near 0.
        """
        views = batch["views"]
        with torch.no_grad():
            teacher = self.logits(self.teacher, views[:2])         # (2, B, K)
        student = self.logits(self.student(), views)               # (V, B, K)
        loss, p_t = dino_loss(student, teacher, self.center)
        if self.training:  # c = m c + (1 - m) mean of g_t over the global batch   (DINO, Eq. 4)
            mean = gather(teacher.mean((0, 1))[None]).mean(0)      # (K,)
            self.center.lerp_(mean, 1 - 0.9)                       # m = .9 (App. C.2)
        entropy = torch.special.entr(p_t).sum(-1).mean()           # entr(p) = -p log p
        entropy_mean = torch.special.entr(p_t.mean((0, 1))).sum()
        return {"loss": loss, "entropy": entropy, "entropy_mean": entropy_mean}

    def before_update(self, step):
        """Keep the last layer fixed in the first steps. Adam skips a weight without a gradient, and
        does not count the step for this weight."""
        if step < self.config.freeze_last:
            self.head.last.weight.grad = None

    @torch.no_grad()
    def after_update(self, step, steps):
        """theta_t = m theta_t + (1 - m) theta_s; m grows from `ema` to 1 by half a cosine."""
        m = 1 - (1 - self.config.ema) * (1 + math.cos(math.pi * step / steps)) / 2
        theta_t, theta_s = (list(net.parameters()) for net in (self.teacher, self.student()))
        torch._foreach_lerp_(theta_t, theta_s, 1 - m)

    def chance_loss(self, batch_size, mask, patches):
        return math.log(self.config.out_dim)  # the loss of uniform distributions

    def evaluation_encoder(self):
        return self.teacher[0]

    def head_maps(self, images):
        return self.evaluation_encoder().cls_attention(images)              # (B, heads, h, w)

    def encode_image(self, images):
        return F.normalize(self.teacher[:2](images).flatten(1).float(), dim=-1)  # (B, M)

    def probe_features(self, images):
        """What DINO's linear probe learns from (App. C.2; eval_linear.py:256, 165): [CLS] after
        each of the last four blocks. The slots replace the last [CLS]; with `gap` the mean replaces
        it. For a ViT without [CLS], the means of the patches replace [CLS] (ours). For a ResNet the
        features are only the output of the read-out.

        differs: eval.py chooses the probe's learning rate; DINO's is .001 x batch / 256. With the
        preset `tiny`, the probe is trained as for CLIP (App. C.1), with AdamW and without
        augmentation.
        """
        encoder, readout, _ = self.teacher
        if not hasattr(encoder, "layers"):
            return readout(encoder(images)).flatten(1).float()
        replaced = blocks_left_out(self.config)  # 1 if SPARO replaces the last block, else 0
        layers = encoder.layers(images, 4 - replaced)              # of (B, n, d)
        blocks = layers if replaced else layers[:-1]
        summary = [x.mean(1) if encoder.cls is None else x[:, 0] for x in blocks]   # of (B, d)
        return torch.cat([*summary, readout(layers[-1]).flatten(1)], 1).float()


def model_class(args):
    if args.objective == "dino":
        return Dino
    return FullModel if args.readout == "sparo" else Baseline


def uses_text(args):
    return args.objective == "clip"


def needs_cls(args):
    if args.readout == "cls" and args.objective == "clip" and "ResNet" in args.image_encoder:
        return ""  # AttentionPool needs no [CLS]
    return f"--readout {args.readout}" if args.readout in ("cls", "bottleneck") else ""


def check(args):
    if args.objective == "dino" and args.readout not in ("sparo", "cls", "gap"):
        raise ValueError(f"--objective dino needs --readout sparo, cls or gap, not {args.readout}.")


def views(args):
    """Settings of DINO's random views of an image (App. C.2; main_dino.py:435): the two large
    views, then the small ones. args: Settings, and image_size in pixels."""
    if args.objective != "dino":
        return None
    large = dict(size=args.image_size, scale=(args.crop_border, 1.0))
    small = dict(size=args.local_size, scale=(args.crop_least, args.crop_border), blur=0.5)
    first, second = large | dict(blur=1.0), large | dict(blur=0.1, solarize=0.2)
    return [first, second] + args.local_crops * [small]


# Analyses ---------------------------------------------------------------------------------


def slot_accuracies(slots_i, slots_t, labels):
    """slots_i (n, L, V) of images, slots_t (C, L, V) of classes, labels (n,) -> zero-shot accuracy
    of each slot alone (L,) (Sec. 5.1)."""
    y_i, y_t = F.normalize(slots_i, dim=-1), F.normalize(slots_t, dim=-1)
    right = [(y_i[:, l] @ y_t[:, l].T).argmax(1) == labels for l in range(y_i.shape[1])]
    return torch.stack(right).float().mean(1)


def slot_words(over_text, slots_i, slots_t, mask):
    """Which slots can be interpreted by a word (Sec. 5.4). over_text (n, L, length): the weights
    that slots give to the tokens of captions; slots_i, slots_t (n, L, V); mask (n, length). Returns

        word       (n, L)  the position of the token to which a slot gives the highest weight
        sharpness  (n, L)  the weight that the slot gives to this token
        agree      (n, L)  True if the slot can be interpreted

    A slot can be interpreted if three things hold: the cosine of its image and its text encoding is
    above .75 (the paper's threshold), its sharpness is above .5 (our threshold; the paper says
    "sharp"), and its token is a word.
    """
    sharpness, word = over_text.max(-1)
    is_word = (word > 0) & (word < mask.sum(1, keepdim=True) - 1)           # not [CLS], not [SEP]
    is_similar = F.cosine_similarity(slots_i, slots_t, dim=-1) > 0.75
    return word, sharpness, is_similar & (sharpness > 0.5) & is_word


def right_by_kind(right, kinds):
    """right (n,): whether a pair is right; kinds: the kinds of the n pairs -> {kind: the fraction
    of its pairs that are right}. SugarCrepe's accuracy is the mean of these fractions (App. B.4).
    """
    rows = {kind: torch.tensor([k == kind for k in kinds]) for kind in sorted(set(kinds))}
    return {kind: right[of_kind].float().mean().item() for kind, of_kind in rows.items()}


# m = sigmoid(s theta / 4),  s = max(100, exp(alpha)),  theta in R^M'            (App. C.1)
# cross-entropy of the logits  s cos(m y^i, y^p)  and  s cos(m y^i, y^n)
def train_mask(y_i, y_p, y_n, kinds, parts, epochs=100, batch=256, generator=None):
    """Train a mask of image encodings that tells captions from hard negatives (Sec. 5.2).

    y_i, y_p, y_n (n, M): encodings of images, of their captions and of the hard negatives. kinds:
    the kinds of the n pairs. parts: M', the number of weights of the mask, a divisor of M: L for
    slots, M for single dimensions. A pair is right if the image is closer to the caption than to
    the negative. The accuracy is the mean over kinds of the fraction of right pairs. All pairs
    train alike.

    Returns the mask (M,) of the epoch with the highest accuracy, the accuracy without a mask, and
    the accuracy with this mask. The mask is all ones if no epoch beats the encodings without a
    mask.

    differs: the paper gives no batch size, and the batch size sets the number of updates. Our batch
    size is 256.
    """
    n, M = y_i.shape
    theta = y_i.new_zeros(parts).requires_grad_()
    alpha = y_i.new_tensor(math.log(100)).requires_grad_()
    optimizer = torch.optim.SGD([theta, alpha], lr=0.02, momentum=0.9)

    def scale_and_mask():
        s = alpha.exp().clamp(min=100)
        return s, (s / 4 * theta).sigmoid().repeat_interleave(M // parts)

    def margin(m, rows=slice(None)):
        y = m * y_i[rows]
        return F.cosine_similarity(y, y_p[rows]) - F.cosine_similarity(y, y_n[rows])

    def accuracy(m):
        of_kinds = right_by_kind(margin(m) > 0, kinds)
        return sum(of_kinds.values()) / len(of_kinds)

    best = y_i.new_ones(M)
    before = after = accuracy(best)
    for _ in range(epochs):
        for rows in torch.randperm(n, generator=generator).split(batch):
            s, m = scale_and_mask()
            loss = F.softplus(-s * margin(m, rows)).mean()  # cross-entropy of the two logits
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        m = scale_and_mask()[1].detach()
        found = accuracy(m)
        if found > after:
            best, after = m, found
    return best, before, after


def winoground_scores(s):
    """Scores s (n, 2, 2), [pair, caption, image] -> text, image, group, each (n,) bool (App. B.5).

    text: both images score higher with their own caption. image: both captions score higher with
    their own image. group: both text and image hold. Equal scores count as wrong.
    """
    text = (s[:, 0, 0] > s[:, 1, 0]) & (s[:, 1, 1] > s[:, 0, 1])
    image = (s[:, 0, 0] > s[:, 0, 1]) & (s[:, 1, 1] > s[:, 1, 0])
    return text, image, text & image


def relative_change(old, new, start, fit):
    """The relative change of a metric divided by that of the accuracy on the pairs that a mask was
    trained on (Table 5); nan if the mask does not raise this accuracy."""
    return (new / old - 1) / (fit / start - 1) if fit > start > 0 and old else math.nan


def change_of_means(rows):
    """Metrics of `masks` on several data sets, [{metric: float}] -> for each metric the relative
    change of its mean over the data sets (SPARO, Table 5: VTAB Avg)."""
    result = {}
    for metric in dict.fromkeys(name for row in rows for name in row):
        if match := re.fullmatch(r"masks/(slots|dimensions)/(.+)/relative_change", metric):
            name, key = match.groups()
            names = (f"masks/{key}_before", f"masks/{name}/{key}", f"masks/{name}/pairs_before",
                     f"masks/{name}/pairs")
            known = [[row[x] for x in names] for row in rows if metric in row]
            means = [sum(values) / len(known) for values in zip(*known)]
            result[f"{metric}_of_means"] = relative_change(*means)
    return result


# tests/RESULTS.md has the results at toy scale: zero-shot, hard negatives and slots. `python
# tests/claims.py sparo` has the ablations, by earlier code.


if __name__ == "__main__":
    print("A picture has 10 tokens: its colour, its shape and 8 of noise. Its caption has a word\n"
          "for each of the two. Slots read both (Eq. 1). They learn only which caption belongs to\n"
          "which picture (Eq. 2). Where four slots attend (an equal share is 10 %):")
    torch.manual_seed(0)
    pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))     # a colour and a shape each
    looks, words = torch.randn(2, 2, 8, 32)
    of_image, of_text = readouts = nn.ModuleList(Sparo(32, 4, 8, D=32) for _ in range(2))
    optimizer = torch.optim.Adam(readouts.parameters(), lr=1e-2)
    for step in range(150):
        ids = pairs[torch.randperm(64)[:32]]                           # (B, 2)
        x = 0.5 * torch.randn(32, 10, 32)                              # (B, n, d)
        x[:, :2] += looks[torch.arange(2), ids]
        y_i, attn = of_image(x, return_attn=True)                      # (B, L, V), (B, L, n)
        loss = clip_loss(y_i, of_text(words[torch.arange(2), ids]), 10.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for l, (colour, shape) in enumerate(attn[:, :, :2].mean(0).tolist()):
        print(f"  slot {l + 1}: {colour:4.0%} at the colour, {shape:4.0%} at the shape")
    print("Nothing tells a slot what to look for, and yet each comes to prefer one of the two.")
