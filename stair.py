"""STAIR: Learning Sparse Text and Image Representation in Grounded Tokens
(Chen et al., 2023, arXiv 2301.13081; no code by the authors). Run: python train.py --method stair

An image or a caption becomes one vector with a weight for each word of the vocabulary. Most weights
are 0, so people can read the vector and an inverted index can search it. The contrastive loss alone
would give words new meanings, so training has three stages. In stage 1 only a caption's own words
may be active in its vector, and the image encoder learns these words. Stage 2 freezes the image
encoder, and the text encoder learns to activate other words that fit. Stage 3 trains both encoders.

B images or captions have n outputs of width d each. The vocabulary has |V| words (tokens of
WordPiece) of width D.

    symbol      name here            shape            where
    f, g        image_encoder, image_head             Eq. 1; for texts: text_encoder, text_head
    h_j         h                    (B, n, d)        Eq. 4; an encoder's output at position j
    transform   transform            d -> D           Eq. 4; FC, GELU, LayerNorm
    e, b        e, b                 (|V|, D), (|V|,) Eq. 4; e: the text encoder's embedding
    p(h_j)      p                    (B, n, |V|)      Eq. 4
    enc         v of images, t of texts  (B, |V|)     Eq. 5; the weights of the words; E() of Eq. 1
    mask(y)     caption_mask         (B, |V|)         Eq. 8; 1 if the caption has the token
    lambda_1,2  lambda_image, _text  scalar           Eq. 7
    T           1 / scale            scalar           Eq. 3; temperature, learned (ours)

Differs from the paper (search for "differs" for the rest):
  * A word of the caption with weight 0 gets a gradient, in both encodings, if a larger weight
    lowers the loss (revive_until). The paper's ReLU gives it none; b16 keeps to the paper.
  * The loss divides an encoding by max(0.5, its length), which bounds the gradient. Search and
    evaluation divide by the length.
Where the paper is silent, these choices are ours (see also PRESETS and LAMB):
  * The loss is the mean of Eq. 3 and its mirror, from text to image.
  * Special tokens ([CLS], [SEP], ...) are never active.
  * Stage 2 trains e with the text encoder. The frozen image head keeps a copy of e until stage 3.
Not here: the authors' private pairs (App. B); an index (App. D) of other features than words.
"""

import ast
import contextlib
import functools
import math
import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass(kw_only=True)
class Config:
    lambda_image: float = 1e-3    # weight of the images' FLOPs loss (Eq. 7), 1e-4 to 1e-2 in 6.3
    lambda_text: float = 1e-3     # weight of the captions' FLOPs loss (Eq. 7)
    # last stage in which words of a caption with weight 0 get a gradient (ours). 0: in no stage
    revive_until: int = 3


# Below the core: in_fp32, Gather, own_columns, streamed, without_padding, as_bools, to_log.


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


# M(x, y) = cos(enc(x), enc(y))                                                      (Eq. 2)
# L_con = -1/B sum_i log( exp(M(x_i, y_i) / T) / sum_i' exp(M(x_i, y_i') / T) )      (Eq. 3)
# i: a pair of this rank; 1/B sum_i stands for the mean over the data. i': a pair of any rank.
# cross_entropy(logits, own) is -1/B sum_i log softmax(row i) at the row's own column.
@fp32
def contrastive_loss(v, t, scale, *, gather=all_ranks):
    """The mean of Eq. 3 and its mirror. v, t (B, |V|): enc of this rank's images and captions,
    normalised here -> scalar. scale: 1 / T, not log(1 / T). gather: see all_ranks."""
    v = F.normalize(v, dim=-1, eps=0.5)  # differs: eps bounds the gradient
    t = F.normalize(t, dim=-1, eps=0.5)
    image_to_text = scale * v @ gather(t).T           # (B, world * B)  M(x_i, y_i') / T
    text_to_image = scale * t @ gather(v).T           # (B, world * B)  M(x_i', y_i) / T
    own = own_columns(image_to_text)                  # (B,), the columns i' = i
    return (F.cross_entropy(image_to_text, own) + F.cross_entropy(text_to_image, own)) / 2


# p(h_j) = e . transform(h_j) + b,  transform(h) = LayerNorm(GELU(FC(h)))            (Eq. 4)
# enc = log(1 + relu(max_j p(h_j)))                                                  (Eq. 5)
def encode(transform_h, e, b, mask=None):
    """transform_h: transform(h) (B, n, D), e (|V|, D), b (|V|,) -> enc (B, |V|). mask (B, n) is
    False at padding. This is the definition. Training runs `streamed` (below): the same enc in less
    memory."""
    p = transform_h @ e.T + b                                            # (B, n, |V|)
    if mask is not None:
        p = p.masked_fill(~mask[:, :, None], -math.inf)
    return torch.log1p(p.max(1).values.relu())                           # (B, |V|)


class TokenProjectionHead(nn.Module):
    """Eq. 4 and 5: an encoder's outputs (B, n, d) -> enc (B, |V|). embedding: the nn.Embedding
    (|V|, D) that the text encoder reads; its weight is e. special: ids of tokens that are never
    active, 0 to |V| - 1."""

    def __init__(self, d, embedding, special=()):
        super().__init__()
        vocab, D = embedding.weight.shape                                # |V|, D
        self.embedding = embedding
        self.transform = nn.Sequential(nn.Linear(d, D), nn.GELU(), nn.LayerNorm(D))
        self.bias = nn.Parameter(torch.zeros(vocab))
        self.register_buffer("valid", torch.ones(vocab, dtype=torch.bool))
        self.valid[[int(k) for k in special]] = False

    def forward(self, h, mask=None, e=None, revived=None):
        """h (B, n, d) -> enc (B, |V|). mask (B, n): True at tokens, then False at padding; None: no
        padding. e (|V|, D) replaces the embedding's weight. revived (B, |V|), bools: a word with
        True gets a gradient at weight 0, too, if a larger weight lowers the loss."""
        h, mask = without_padding(h, mask)
        e = self.embedding.weight if e is None else e
        b = self.bias.masked_fill(~self.valid, -math.inf)  # special tokens are never active
        transform_h = self.transform(h)                                  # (B, n, D)
        # = encode(transform_h, e, b, mask). differs: revived words also get a gradient (header)
        return streamed(transform_h, e, b, mask, revived, self.training)


# L_FLOPs = sum_k ( 1/N sum_i enc_k^(i) )^2,  N: the images or captions of all ranks (Eq. 6)
@fp32
def flops_loss(enc, *, gather=all_ranks):
    """enc (B, |V|), not normalised -> scalar, the same on all ranks. The loss is small if few words
    are active, and if each word is active in few samples."""
    mean = enc.mean(0, keepdim=True)                                 # (1, |V|), of this rank
    return gather(mean).mean(0).square().sum()


# mask(y)_k = 1 if token k is in the caption y                                       (Eq. 8)
def caption_mask(tokens, mask, size):
    """tokens, mask (B, n), False at padding; size: |V| -> mask(y) (B, |V|), 0 or 1."""
    result = torch.zeros(len(tokens), size, device=tokens.device)
    mask = as_bools(mask, tokens.shape).to(result.dtype)
    return result.scatter_reduce_(1, tokens, mask, "amax")  # a token counts once, padding never


class Model(nn.Module):
    """Two encoders, each with a head: image_encoder(images) -> (B, n, image_width) and
    text_encoder(tokens, mask) -> (B, n, text_width). text_encoder.embedding is the nn.Embedding
    (|V|, D) that the encoder reads; text_encoder.special has the ids of tokens that are not words.
    Call begin_stage at the start of each stage, after_update after each update (recipe: below)."""

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config = config
        self.image_encoder, self.text_encoder = image_encoder, text_encoder
        embedding, special = text_encoder.embedding, text_encoder.special
        self.image_head = TokenProjectionHead(image_width, embedding, special)
        self.text_head = TokenProjectionHead(text_width, embedding, special)
        del self.image_head.embedding, self.text_head.embedding  # e is saved once; forward gets it
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # CLIP, Sec. 2.5
        self.register_buffer("image_embedding", embedding.weight.detach().clone())  # see image_e
        self.register_buffer("strength", torch.tensor(0.0))  # factor of both lambdas, 0 to 1
        # The stage, twice. Encodings read the buffer, so that a loaded checkpoint encodes as it
        # did. What decides on gradients reads the int: an `if` on a buffer would wait for the GPU.
        self.register_buffer("stage", torch.tensor(1))
        self.number = 1

    def forward(self, batch, gather=all_ranks):
        """batch: images (B, 3, H, W), tokens (B, n), mask (B, n), True at tokens, False at padding.
        Returns {"loss": scalar, and scalars to log}."""
        cfg = self.config
        scale = self.log_scale.exp()                              # 1 / T
        tokens, mask = batch["tokens"], batch["mask"]
        revived = None
        if self.number <= cfg.revive_until:                       # differs (header)
            revived = self.caption_words(tokens, mask) > 0        # (B, |V|)
        v = self.image_encoding(batch["images"], revived)         # (B, |V|)
        t = self.text_encoding(tokens, mask, revived)             # (B, |V|)
        # L = L_con + lambda_1 L_FLOPs of images + lambda_2 L_FLOPs of texts         (Eq. 7)
        contrast = contrastive_loss(v, t, scale, gather=gather)
        flops_image, flops_text = flops_loss(v, gather=gather), flops_loss(t, gather=gather)
        flops = cfg.lambda_image * flops_image + cfg.lambda_text * flops_text
        loss = contrast + self.strength * flops  # both lambdas grow: strength is 0 to 1 (Sec. 4.2)
        return {"loss": loss, **to_log(self, v, t, contrast, flops_image, flops_text)}

    # E(x) = g(f(x)), here enc                                                       (Eq. 1)
    def image_encoding(self, images, revived=None):  # (B, 3, H, W) -> enc (B, |V|), of any length
        return self.image_head(self.image_encoder(images), e=self.image_e(), revived=revived)

    def text_encoding(self, tokens, mask, revived=None):
        """tokens, mask (B, n) -> enc (B, |V|), or in stage 1 enc_mask of Eq. 8."""
        h = self.text_encoder(tokens, mask)                       # (B, n, d)
        enc = self.text_head(h, mask, self.text_encoder.embedding.weight, revived)
        # enc_mask = g(f(y)) mask(y)                                                 (Eq. 8)
        return torch.where(self.stage == 1, enc * self.caption_words(tokens, mask), enc)

    def caption_words(self, tokens, mask):
        """tokens, mask (B, n) -> mask(y) (B, |V|), 0 or 1; 0 at special tokens, as their enc."""
        return caption_mask(tokens, mask, len(self.text_head.valid)) * self.text_head.valid

    def image_e(self):
        """The image head's e: in stage 2 the copy from the end of stage 1, else the shared e."""
        e = self.text_encoder.embedding.weight
        e = e.detach() if self.number == 2 else e  # the copy is read: the shared e gets no gradient
        return torch.where(self.stage == 2, self.image_embedding, e)

    def begin_stage(self, number, fresh):
        """Enter stage 1, 2 or 3 (Sec. 3). Then make a new optimizer and, on several GPUs, a new
        DDP, because stage 2 freezes parameters. fresh: True if the stage begins, False if a
        checkpoint of this stage was loaded."""
        self.number = number
        self.stage.fill_(number)
        # Stage 2 freezes the image encoder and its head, but not e, which the text encoder trains.
        # FullModel (below) also freezes the statistics of BatchNorm.
        self.image_encoder.requires_grad_(number != 2)
        self.image_head.requires_grad_(number != 2)
        if fresh:
            self.strength.zero_()
            self.zero_grad()  # gradients of the last stage would move what this stage freezes
        if fresh and number == 2:
            self.image_embedding.copy_(self.text_encoder.embedding.weight.detach())

    def after_update(self, step, steps):
        """Let the lambdas grow with the square of the step (Sec. 4.2) in the first half of the
        stage (ours). Keep the scale within [1, 100], as OpenCLIP does."""
        self.log_scale.data.clamp_(0, math.log(100))
        self.strength.fill_(min(1.0, ((step + 1) / (steps / 2)) ** 2))

    def encode_image(self, images):  # (B, 3, H, W) -> (B, |V|), of length 1 or, without words, 0
        return F.normalize(self.image_encoding(images), dim=-1)

    def encode_text(self, tokens, mask):  # (B, n), (B, n) -> (B, |V|), of length 1 or 0
        return F.normalize(self.text_encoding(tokens, mask), dim=-1)


# To read STAIR, stop here. ------------------------------------------------------------------
#
# To turn Hugging Face's CLIP (`model`) into STAIR: `images` are pixels, `ids` are tokens with the
# attention mask `mask`. Lines marked "once" come before DDP. The lines are those of stage 3. For
# stage 1, without which words get new meanings (Table 7), multiply t by
# caption_mask(ids, mask, t.shape[1]).
#     e, special = model.text_model.embeddings.token_embedding, (49406, 49407)  # once
#     model.image_head = TokenProjectionHead(768, e, special)                   # once
#     model.text_head = TokenProjectionHead(512, e, special)                    # once
#     del model.image_head.embedding, model.text_head.embedding  # once; e keeps one name
#     optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)                # once
#     h = model.vision_model(pixel_values=images).last_hidden_state             # (B, n, 768)
#     v = model.image_head(model.vision_model.post_layernorm(h), e=e.weight)    # (B, |V|)
#     h = model.text_model(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, n, 512)
#     t = model.text_head(h, mask, e.weight)                                    # (B, |V|)
#     loss = contrastive_loss(v, t, model.logit_scale.exp())
#     loss = loss + 1e-3 * (flops_loss(v) + flops_loss(t))
#     loss.backward(), optimizer.step(), optimizer.zero_grad()                  # update
#     model.logit_scale.data.clamp_(0, math.log(100))                           # update
# Both heads share e. Without `del` a checkpoint would have e three times. A LoRA adapter of e has
# no effect.

# A stage of FullModel (below), which begins in stage 1:
#     model.begin_stage(number, fresh=True)            # 1, then 2, then 3
#     model.train()                                    # stage 2 freezes BatchNorm
#     parallel = DDP(model) if ranks > 1 else model    # again, because stage 2 freezes parameters
#     optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
#     for step in range(steps):                        # the steps of this stage
#         parallel(batch)["loss"].backward()
#         optimizer.step(), optimizer.zero_grad(), model.after_update(step, steps)
# The optimizer of stage 2 would not train the image encoder in stage 3, and the DDP of stage 2
# would not average its gradients. Without after_update both lambdas stay 0. None of these mistakes
# raises an error.


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


# Helpers -------------------------------------------------------------------------------------
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


def without_padding(h, mask):
    """h (B, n, d) -> h with zeros at padding, where a NaN would reach the gradients, and the mask
    of bools."""
    if mask is None:
        return h, None
    mask = as_bools(mask, h.shape[:2])
    return h.masked_fill(~mask[..., None], 0.0), mask


def as_bools(mask, shape):
    """A mask of bools, or of 0 and 1 -> of bools. Raises ValueError for another shape, and for
    floats (an additive mask). An inverted mask passes."""
    if mask.shape != shape or mask.is_floating_point():
        raise ValueError(f"A mask needs bools {[*shape]}, not {mask.dtype} {[*mask.shape]}.")
    return mask.bool()


# Settings, presets, what train.py and eval.py ask for ----------------------------------------


@dataclass(kw_only=True)
class Settings(Config):
    """All flags of this method. Model reads those of Config, train.py alone the others (stages)."""

    stages: Literal["three", "single"] = "three"  # all stages (Sec. 3), or the last (App. A)
    share_1: float = 0.25         # fraction of --steps for stage 1, <= 1 (Sec. 4.2)
    share_2: float = 0.25         # fraction of --steps for stage 2, <= 1. Stage 3 has the rest
    lr_3: float = 0.1             # peak learning rate of stage 3, divided by --lr (Sec. 4.2)


# Sec. 4.2: 300,000 + 300,000 + 600,000 steps, and BERT's 30,522 tokens (--vocab FILE). beta2 and
# adam_eps are LAMB's defaults. The CLIP of the paper's tables is the preset stair-clip of sparo.py.
# The paper leaves open how its encoders modify CLIP-B/16. Here the image encoder has no [CLS] and
# no LayerNorm before its blocks, and the text encoder attends in both directions. Ours, too: each
# stage has a new optimizer, the lambdas grow from 0 in its first half, photos are cropped a little.
B16 = dict(image_encoder="ViT-B/16", text_encoder="12x512:context=76,vocab_size=30522",
           batch=16384, steps=1_200_000, optimizer="lamb", beta2=0.999, adam_eps=1e-6, lr=1e-3,
           schedule="linear", weight_decay=1e-2, warmup=10_000, clip_grad=0.0, revive_until=0)
PRESETS = {  # the values of --preset: settings of this file and of train.py; flags override them
    # The values were chosen on the val split of the world of shapes. Unlike b16, tiny trains with
    # AdamW, and stage 3 has the peak learning rate of stage 1.
    "tiny": dict(image_encoder="tiny", text_encoder="tiny", data="shapes:words=400",
                 batch=128, steps=1000, lr=2e-3, lr_3=1.0, share_1=0.4, share_2=0.15,
                 lambda_image=5e-3, lambda_text=5e-3, weight_decay=0.1, warmup=50),
    "b16": B16,
    "b16-single": B16 | dict(stages="single", steps=600_000),  # App. A: as many steps as CLIP
}


def stages(args):
    """The stages of Sec. 3: [(number, steps, peak learning rate)]. args: Settings, and steps and
    lr."""
    if args.stages == "single":  # like stage 3: no mask, nothing frozen
        return [(3, args.steps, args.lr)]
    first, second = round(args.share_1 * args.steps), round(args.share_2 * args.steps)
    third = args.steps - first - second
    return [(1, first, args.lr), (2, second, args.lr), (3, third, args.lr * args.lr_3)]


def check(args):
    """Raise ValueError for Settings that do not fit."""
    if args.stages == "three" and args.share_1 + args.share_2 >= 1:
        raise ValueError("--share-1 and --share-2 leave no steps to stage 3: their sum is "
                         f"{args.share_1 + args.share_2:g} and must be below 1.")


def model_class(args):
    return FullModel


class FullModel(Model):
    """Model, and what checkpoints, BatchNorm, eval.py and --init-weights also ask of it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_load_state_dict_post_hook(continue_stage)

    def train(self, mode=True):
        """Stage 2 freezes the BatchNorm of the image encoder, too, once the stage has begun."""
        super().train(mode)
        self.image_encoder.train(mode and self.number != 2)
        return self

    def clip_parameters(self):
        """{CLIP's name: parameter} that --init-weights sets, in addition to the encoders. STAIR has
        no parameters for CLIP's projections."""
        return {"logit_scale": self.log_scale}

    def encode_words(self, tokens, mask):
        """tokens, mask (B, n) -> (B, |V|): a query without the text encoder. Its tokens have equal
        weights (Sec. 7.1). The query of a class includes the words of the prompt, such as "photo";
        the paper does not say whether they count."""
        return F.normalize(self.caption_words(tokens, mask), dim=-1)

    def word_maps(self, images, ids):
        """Images (B, 3, H, W), ids (m,) of words -> p(h_j) of these words (B, n, m): where in the
        images the words are (Sec. 7.2)."""
        h_e = self.image_head.transform(self.image_encoder(images))  # (B, n, D)
        return F.linear(h_e, self.image_e()[ids], self.image_head.bias[ids])


def continue_stage(model, keys):
    """Continue the stage of a checkpoint that was loaded, also into a module around the model."""
    model.begin_stage(int(model.stage), fresh=False)


def to_log(model, v, t, contrast, flops_image, flops_text):
    """The scalars that Model logs. v, t (B, |V|): encodings of images and captions."""
    log = {"contrast": contrast, "flops_image": flops_image, "flops_text": flops_text,
           "active_image": (v > 0).sum(1).float().mean(), "scale": model.log_scale.exp(),
           "active_text": (t > 0).sum(1).float().mean(), "stage": model.stage}
    return {name: value.detach() for name, value in log.items()}


# Eq. 4 and 5 in less memory ------------------------------------------------------------------


def streamed(h_e, e, b, mask, revived, training):
    """`encode` by StreamedEncoding. torch.export would unroll its loop for a single size of batch,
    and gets `encode` itself."""
    if torch.jit.is_tracing() or (torch.compiler.is_compiling() and not training):
        return encode(h_e, e, b, mask)
    return StreamedEncoding.apply(h_e, e, b, mask, revived)


class StreamedEncoding(torch.autograd.Function):
    """`encode` in O(B |V|) memory instead of O(B n |V|), because p is never held in full.

    Forward computes p for a few samples at a time. For each word it keeps the maximum of p(h_j)
    over j and the position j of the maximum. Backward sends the gradient of an entry of enc to this
    position only: d log(1 + p) = dp / (1 + p) = exp(-enc) dp. An entry above 0 always sends its
    gradient. An entry at 0 sends it only if `revived` (B, |V|) is True there and a larger value
    would lower the loss.
    """

    # how many numbers are in memory at a time: of p in forward, of the gathered rows in backward
    CHUNK = 2**23

    @staticmethod
    def forward(ctx, h_e, e, b, mask=None, revived=None):
        maxima, positions = [], []
        ctx.chunk = StreamedEncoding.CHUNK * (8 if h_e.is_cuda else 1)  # small chunks idle a GPU
        size = max(1, ctx.chunk // (h_e.shape[1] * len(e)))
        e_cast = e.to((h_e[:1, :1] @ e[:1].T).dtype)  # else autocast casts e for each chunk
        for i in range(0, len(h_e), size):
            p = h_e[i : i + size] @ e_cast.T                      # (size, n, |V|)
            if mask is not None:
                p.masked_fill_(~mask[i : i + size, :, None], -math.inf)
            maximum, position = p.max(1)                          # (size, |V|)
            maxima.append(maximum)
            positions.append(position.int())
        max_p = torch.cat(maxima) + b                             # (B, |V|); b does not depend on j
        enc = torch.log1p(max_p.relu())
        if revived is not None:
            revived = revived & max_p.isfinite()                  # special tokens have b = -inf
        ctx.save_for_backward(h_e, e, enc, torch.cat(positions), revived)
        return enc

    @staticmethod
    def backward(ctx, gradient):
        h_e, e, enc, positions, revived = ctx.saved_tensors
        passes = enc > 0
        if revived is not None:
            passes |= revived & (gradient < 0)
        grad_p = gradient * torch.exp(-enc) * passes              # (B, |V|)
        grad_e, grad_h = e.new_zeros(e.shape), h_e.new_zeros(h_e.shape)  # contiguous
        n, vocab, D = h_e.shape[1], *e.shape
        sample, word = grad_p.nonzero(as_tuple=True)              # (m,), the entries that pass
        if len(word) * D > ctx.chunk and len(word) > grad_p.numel() / 5:
            # Many words are active, as in a new head. Matrix products with all words then take less
            # time than sums over the active words. (8 samples, n = 50, |V| = 49,408, one thread:
            # products .6 s, always; sums 2.5 s if all words are active, .3 s if an eighth is, .05 s
            # if .08 % are. `encode` takes .4 s.)
            size = max(1, ctx.chunk // (n * vocab))
            for i in range(0, len(h_e), size):
                some_h, some_p = h_e[i : i + size], grad_p[i : i + size, None]
                some = grad_p.new_zeros(len(some_h), n, vocab)    # the gradient of p
                some.scatter_(1, positions[i : i + size, None].long(), some_p)
                grad_h[i : i + size] = some @ e
                grad_e += some.flatten(0, 1).T @ some_h.flatten(0, 1).to(some.dtype)
            return grad_h, grad_e, grad_p.sum(0), None, None

        row = sample * n + positions[sample, word]                # (m,), their rows of flat_h
        values = grad_p[sample, word][:, None]                    # (m, 1)
        flat_h, flat_grad = h_e.flatten(0, 1), grad_h.flatten(0, 1)  # (B n, D)
        size = max(1, ctx.chunk // D)
        for i, k, g in zip(row.split(size), word.split(size), values.split(size)):
            flat_grad.index_add_(0, i, (g * e[k]).to(h_e.dtype))
            grad_e.index_add_(0, k, (g * flat_h[i]).to(e.dtype))
        return grad_h, grad_e, grad_p.sum(0), None, None


# Optimizer (Sec. 4.2) ------------------------------------------------------------------------


class LAMB(torch.optim.Optimizer):
    """Adam whose update of a tensor is scaled to the norm of the tensor (arXiv 1904.00962).

    differs: groups with `decays` False are neither scaled nor decayed. These are biases, norms,
    positions and the token embedding e. Published LAMB scales and decays e; the first step of e in
    b16 would then be 49 times shorter. With `tiny --optimizer lamb --beta2 .999 --weight-decay
    1e-2 --lr 3e-3 --steps 500` zero-shot is .62, and .29 if e is scaled and decays (one seed).
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                state = self.state[p]
                if not state:
                    state["step"], state["exp_avg"] = 0, torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
            # All parameters at once: on a GPU, starting a kernel for each parameter would take
            # longer than the computation.
            steps, m, v = ([self.state[p][name] for p in params]
                           for name in ("step", "exp_avg", "exp_avg_sq"))
            grads, (beta1, beta2) = [p.grad for p in params], group["betas"]
            torch._foreach_lerp_(m, grads, 1 - beta1)
            torch._foreach_mul_(v, beta2)
            torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
            m = torch._foreach_div(m, [1 - beta1**step for step in steps])
            v = torch._foreach_div(v, [1 - beta2**step for step in steps])
            root = torch._foreach_add(torch._foreach_sqrt(v), group["eps"])
            decays = group.get("decays", True)
            decay = torch._foreach_mul(params, group["weight_decay"] * decays)
            update = torch._foreach_add(torch._foreach_div(m, root), decay)
            size, update_size = (torch.stack(torch._foreach_norm(x)) for x in (params, update))
            is_scaled = (size > 0) & (update_size > 0) & decays
            trust = torch.where(is_scaled, size / update_size, 1.0)
            torch._foreach_sub_(params, torch._foreach_mul(update, list(group["lr"] * trust)))


# Interpretability (Sec. 5.1, Table 4) --------------------------------------------------------


def label_ranks(scores, pieces, labels):
    """scores (n, |V|) of all words, labels (n,) -> ranks (n,) of the labels among the words.

    The best rank is 0; a label ranks behind the words that tie with it or have NaN. pieces: for
    each class the ids of its sub-words; the score of the class is the best score of a sub-word
    (Sec. 5.1).
    """
    by_class = torch.stack([scores[:, ids].amax(1) for ids in pieces], 1)   # (n, C)
    return (~(scores < by_class.gather(1, labels[:, None]))).sum(1) - 1


# Encodings of many images, for a probe ------------------------------------------------------


class SparseRows:
    """Features (N, E) that are mostly 0, such as STAIR's: the other numbers alone are stored.

    parts: tensors (n, E), one after the other; x[rows] -> the dense rows (n, E) in float32.
    ImageNet's 1.3 million training images take 156 GB as dense encodings of 30,522 words.
    """

    def __init__(self, parts):
        found = []
        for x in parts:
            kept = x != 0
            found.append((kept.sum(1), kept.nonzero()[:, 1].int(), x[kept].float()))
        self.count, self.columns, self.values = map(torch.cat, zip(*found))
        self.start = self.count.cumsum(0) - self.count  # where the numbers of a row begin
        self.shape = len(self.count), x.shape[1]

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        count, x = self.count[rows], self.values.new_zeros(len(rows), self.shape[1])
        row = torch.arange(len(rows)).repeat_interleave(count)
        # number k of all rows is number k - (count of the rows before) of its own row
        place = torch.arange(len(row)) + (self.start[rows] - count.cumsum(0) + count)[row]
        x[row, self.columns[place].long()] = self.values[place]
        return x


# Inverted index (App. D) --------------------------------------------------------------------


class InvertedIndex:
    """Exact search over encodings. For each word the index holds the documents in which the word
    has a weight above 0, and these weights. To block words in documents, set the weights of these
    words to 0 before `add`.

        index = InvertedIndex(vocabulary)                # list of |V| tokens
        index.add(["a.jpg", "b.jpg"], enc)               # (n, |V|) >= 0, dense or sparse
        index.search({"red": 1.0}, where=index.has("star") & ~index.has("blue"))
    """

    def __init__(self, vocabulary):
        self.word_ids, self.ids = {word: k for k, word in enumerate(vocabulary)}, []
        # joined: (|V|, n)
        self.parts = [torch.zeros(len(self.word_ids), 0, dtype=torch.float32).to_sparse()]

    def add(self, ids, enc):
        """Add n documents: a list of their ids, and their encodings (n, |V|). Raises
        ValueError if the two do not fit."""
        shape = len(ids), len(self.word_ids)
        if enc.shape != shape:
            raise ValueError(f"Give n ids and encodings {shape}, not {tuple(enc.shape)}.")
        self.ids.extend(ids)  # += would add the numbers of an array
        self.parts.append(enc.detach().to("cpu", torch.float32).to_sparse().T)

    def joined(self):
        """The weights of all documents, sparse (|V|, n), sorted by word. Joining copies all
        weights, so it waits for the first search after an `add`."""
        if len(self.parts) > 1:
            self.parts = [torch.cat(self.parts, 1).coalesce()]
        return self.parts[0]

    def vector(self, weights):
        """{word: weight} -> (|V|,). A word that is not in the vocabulary is tried in lower case,
        then without accents. Raises ValueError if the vocabulary lacks all three."""
        result = torch.zeros(len(self.word_ids), dtype=torch.float32)
        for word, weight in weights.items():
            lower = unicodedata.normalize("NFD", word.lower())  # a letter, then its accent (Mn)
            plain = "".join(char for char in lower if unicodedata.category(char) != "Mn")
            known = [form for form in (word, lower, plain) if form in self.word_ids]
            if not known:
                raise ValueError(f"The vocabulary has no word {word!r}: give words of vocab.txt.")
            result[self.word_ids[known[0]]] += weight
        return result

    def scores(self, query):
        """query (|V|,) -> its dot products with all documents (n,)."""
        enc = self.joined()
        words, documents = enc.indices()                          # (m,), of all weights above 0
        result = torch.zeros(len(self.ids), dtype=torch.float32)
        for k in query.nonzero()[:, 0].tolist():
            i, j = torch.searchsorted(words, torch.tensor([k, k + 1]))  # entries of word k
            result.index_add_(0, documents[i:j], enc.values()[i:j], alpha=query[k].item())
        return result

    def has(self, word):
        """(n,), True at the documents in which the word has a weight above 0."""
        return self.scores(self.vector({word: 1.0})) > 0

    def search(self, query, k=10, where=None, allow=None, block=()):
        """The k documents with the largest dot products, [(id, score)], best first.

        query: {word: weight} or an encoding (|V|,). where (n,): True (or 1) at the documents that
        may be found, even if their score is 0; None: all with a score above 0. allow: the only
        words of the query that count. block: words of the query that do not count. Raises
        ValueError for a word that the vocabulary lacks.
        """
        query = self.vector(query) if isinstance(query, dict) else query.detach().cpu().float()
        query = query * (self.vector(dict.fromkeys(block, 1.0)) == 0)
        if allow is not None:
            query = query * (self.vector(dict.fromkeys(allow, 1.0)) > 0)
        scores = self.scores(query)
        where = scores > 0 if where is None else torch.as_tensor(where).bool()
        scores = scores.masked_fill(~where, -math.inf)
        best = scores.topk(min(k, len(scores)))
        found = zip(best.indices.tolist(), best.values.tolist())
        return [(self.ids[row], score) for row, score in found if score > -math.inf]


def is_boolean(text):
    """Whether a query has AND, OR or NOT. Without them it is a caption."""
    return re.search(r"\b(AND|OR|NOT)\b", text) is not None


# A query becomes a formula of the numbers of its tokens, which Python's parser reads:
# red (ring OR star) NOT blue becomes 0 & ( 2 | 4 ) & ~ 7. The sign ~ binds more closely than &, and
# & binds more closely than |.
def boolean_query(text, index):
    """'red (ring OR star) NOT blue' -> (n,), True at the documents that match, and the words that
    are not negated, to rank the documents by.

    NOT binds more closely than AND, and AND more closely than OR. Words side by side mean AND.
    Raises ValueError if the query cannot be read, has a word that the vocabulary lacks, or negates
    all of its words.
    """
    signs = {"AND": "&", "OR": "|", "NOT": "~", "(": "(", ")": ")"}
    tokens = re.findall(r"[()]|[^\s()]+", text)
    formula = " ".join(signs.get(token, str(i)) for i, token in enumerate(tokens))
    formula = re.sub(r"(?<=[\d)]) (?=[\d(~])", " & ", formula)    # words side by side
    words = []

    def find(node, negated=False):
        if isinstance(node, ast.UnaryOp):
            return ~find(node.operand, not negated)
        if isinstance(node, ast.BinOp):
            left, right = find(node.left, negated), find(node.right, negated)
            return left & right if isinstance(node.op, ast.BitAnd) else left | right
        word = tokens[node.value]
        if not negated:
            words.append(word)
        return index.has(word)

    with contextlib.suppress(SyntaxError, AttributeError):  # () is a tuple, and has no value
        where = find(ast.parse(formula, mode="eval").body)
        if words:
            return where, words
    raise ValueError(f"{text!r} is not a boolean query: join words by AND, OR, NOT, ( ), at least "
                     "one without NOT.")


# tests/RESULTS.md has the results at toy scale, `python tests/claims.py stair` has those of earlier
# code. Two of the latter contradict the paper: stage 2 does not improve zero-shot, and the best
# word is the label more often with CLIP.


if __name__ == "__main__":
    print("A picture shows three of 30 words, and its caption names them. Both get a weight for\n"
          "each word (Eq. 4, 5), and learn to agree (Eq. 3). Few words may be active (Eq. 6).\n"
          "With mask(y), a caption's vector has no words but those of the caption (Eq. 8).\n")
    names = ("cat dog horse bird fish cow sheep bear car bus train boat bike plane red blue "
             "green black white man child baby tree grass snow sea house door chair cake").split()
    B, V, D = 128, len(names), 32
    for name, masks in ("no mask", False), ("mask(y)", True):
        torch.manual_seed(0)
        looks, e = torch.randn(V, D), nn.Embedding(V, D)
        image_head, text_head = heads = nn.ModuleList(TokenProjectionHead(D, e) for _ in range(2))
        optimizer = torch.optim.Adam(heads.parameters(), lr=1e-2)
        for step in range(101):
            words = torch.rand(B, V).argsort(1)[:, :3]            # (B, 3)
            pictures = 0.3 * torch.randn(B, 9, D)                 # (B, n, D)
            pictures[:, :3] += looks[words]
            mask_y = caption_mask(words, torch.ones_like(words), V)    # (B, |V|)
            v = image_head(pictures, revived=mask_y > 0)          # (B, |V|)
            t = text_head(e(words), revived=mask_y > 0)           # (B, |V|)
            t = t * mask_y if masks else t
            loss = contrastive_loss(v, t, 10.0) + 3e-3 * (flops_loss(v) + flops_loss(t))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = mask_y.gather(1, v.topk(3).indices).mean()
        best = ", ".join(f"{names[k]} {v[0, k]:.2f}" for k in v[0].topk(4).indices)
        print(f"{name:8}{right:5.0%} of the three best words are right. Words of a picture: {best}")
    print(f"This picture shows {', '.join(names[k] for k in words[0])}. Without the mask words get "
          "new meanings.")
