"""STAIR: Learning Sparse Text and Image Representation in Grounded Tokens (Chen et al., 2023, arXiv 2301.13081).

An image or a caption becomes a long vector with a weight for each word of the vocabulary, most of them zero: it can be read, and
searched with an inverted index. Three stages of training keep the words' meaning; a contrastive loss alone would redefine them.

    symbol       name here              shape          where
    h_j          h                      (B, N, d)      Eq. 4; all outputs of a tower, j = position
    e, b         embedding, bias        (|V|, E), (|V|)  Eq. 4; e is the text tower's token embedding, in both heads
    transform    transform              d -> E         Eq. 4; a layer, GELU and LayerNorm
    p(h_j)       logits                 (B, N, |V|)    Eq. 4; never all of it at a time
    enc          enc                    (B, |V|)       Eq. 5; log(1 + relu(max_j p(h_j)))
    mask(y)      caption_mask           (B, |V|)       Eq. 8; 1 where the caption holds the token
    L_FLOPs      flops_loss             scalar         Eq. 6
    lambda_1, 2  lambda_image, _text    scalar         Eq. 7
    1 / T        scale                  scalar         Eq. 3; learned

Differs from the paper:
  * enc is computed a few samples at a time, keeping of each word its maximum and where it was: O(B |V|) memory instead of
    O(B N |V|). The backward pass touches only those positions, and only where enc > 0.
  * Special tokens ([CLS], [SEP], [PAD], ...) are never active, padding has no part in the maximum. The paper does not say.
  * The mean of Eq. 6 is over the global batch; lambda grows with the square of the step over the first `ramp` of a stage, as in
    SPLADE (arXiv 2107.05720), which Eq. 6 comes from.
  * In stage 2 the token embedding belongs to the text tower and trains; the frozen image head keeps the copy it had.
  * revive_until: an inactive word of the caption gets the gradient that it would get if it were active, where the loss wants it
    larger; the paper's relu gives none, and words that the image tower cannot see yet die. Not in the preset b16.
  * An encoding shorter than 0.5 counts as 0.5 long in the cosine: next to zero its gradient would be without bound.
  * LAMB neither scales nor decays what is no weight of a linear or convolution layer: biases, norms, positions and the token embedding.
  * The preset tiny has its own shares of the stages, lambda and a stage 3 at full learning rate (the paper's is a tenth).
  * The text tower sees a caption in both directions; each stage has a new optimizer. The paper does not say.
  * Texts are encoded as they are, without "a photo of" before each caption (Sec. 4.3); give zero-shot prompts by --templates.

Not here: fusing dense embeddings or other features into the index; fine-tuning.

Run:     python train.py --method stair                     (the embedded world)
Result:  shape in the 10 best of 862 words .999 (in a single stage .002), R@1 .934 / .911 (CLIP .861 / .788), 15 active words a caption,
         three seeds on one thread of an AMD EPYC (README).
"""

import functools
import json
import math
import re
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable


@dataclass
class Config:
    stages: Literal["three", "single"] = "three"             # Sec. 3; App. A
    share_1: Annotated[float, 0, 1] = 0.25                                    # of the steps in stage 1; Sec. 4.2: 300k of 1,200k
    share_2: Annotated[float, 0, 1] = 0.25                                    # of the steps in stage 2
    lr_2: Annotated[float, 0, 100] = 1.0                                        # peak learning rate of stage 2, as a multiple of --lr
    lr_3: Annotated[float, 0, 100] = 0.1                                        # of stage 3; Sec. 4.2: 1e-4, the others 1e-3
    lambda_image: Annotated[float, 0, math.inf] = 1e-3                               # Eq. 7; Sec. 6.3 sweeps 1e-2, 1e-3, 1e-4
    lambda_text: Annotated[float, 0, math.inf] = 1e-3                                # Eq. 7
    ramp: Annotated[float, 0, 1] = 0.5                                        # share of a stage in which both grow from 0
    revive_until: Annotated[int, 0, 3] = 3                                    # differs: last stage in which inactive words of captions learn
    bias_image: float = 0.0                                  # b of Eq. 4 at the start
    bias_text: float = 0.0
    init_scale: Annotated[float, 1, 100] = 1 / 0.07                             # CLIP (arXiv 2103.00020), Sec. 2.5


PRESETS = {  # settings of this file and of train.py by name; --flags go before them
    "tiny": dict(image_encoder="tiny", text_encoder="tiny", data="shapes:words=400", batch=128, steps=1000, lr=2e-3, lr_3=1.0,
                 share_1=0.4, share_2=0.15, lambda_image=5e-3, lambda_text=5e-3, weight_decay=0.1, warmup=50),
    # Sec. 4.2; stages of 300k, 300k and 600k steps
    "b16": dict(image_encoder="ViT-B/16", text_encoder="12x512:context=76", batch=16384, steps=1_200_000, lr=1e-3,
                schedule="linear", optimizer="lamb", weight_decay=1e-2, warmup=10_000, clip_grad=0.0, revive_until=0),
}
ELEMENTS = 2**23  # of the logits, and of the rows that the backward pass gathers, that exist at a time


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

# L_con = -1/2B sum_i [ log softmax_j(cos(enc_i, enc_j) / T)_i + the same over images ]                            (Eq. 2, 3)
@in_fp32
def contrastive_loss(v, t, scale, gather=identity):
    """CLIP's loss. v, t: (B, |V|) encodings of pairs; scale: 1 / T. Returns a scalar.

    gather: (B, |V|) -> (world * B, |V|) with the own rows first, differentiable; logits are local rows x global columns.
    """
    v, t = F.normalize(v, dim=-1, eps=0.5), F.normalize(t, dim=-1, eps=0.5)  # differs: see above
    i = torch.arange(len(v), device=v.device)
    return (F.cross_entropy(scale * v @ gather(t).T, i) + F.cross_entropy(scale * t @ gather(v).T, i)) / 2


# L_FLOPs = sum_k ( 1/N sum_i enc_k^(i) )^2                                                                          (Eq. 6)
@in_fp32
def flops_loss(enc, gather=identity):
    """The products that comparing two random encodings takes, made smooth. enc: (B, |V|); N is the global batch. -> scalar"""
    return gather(enc.mean(0, keepdim=True)).mean(0).square().sum()


# enc = log(1 + relu(max_j p(h_j))),  p(h_j) = e . transform(h_j) + b                                              (Eq. 4, 5)
class StreamedEncoding(torch.autograd.Function):
    """t (B, N, E), e (|V|, E), b (|V|,), seen (B, N) or None, words (|V|,) -> enc (B, |V|).

    Only the maximum over positions and its place are kept. Backward, an entry passes its gradient to the one position that made
    it, and only if it is above zero: d log(1 + x) = dx / (1 + x) = exp(-enc) dx. Entries of `revived` (B, |V|) that are zero pass
    it too where the loss would have them larger. words: 0 for those that are never active.
    """

    @staticmethod
    def forward(ctx, t, e, b, seen, words, revived):
        device, tops, places = t.device.type, [], []
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else t.dtype
        x, y = t.to(dtype), e.to(dtype)                                      # once, not for each part
        for i in range(0, len(t), n := max(1, ELEMENTS // (t.shape[1] * len(e)))):
            logits = x[i : i + n] @ y.T                                      # (n, N, |V|)
            if seen is not None:
                logits.masked_fill_(~seen[i : i + n, :, None], -torch.inf)
            top, place = logits.max(1)                                       # (n, |V|)
            tops.append(top)
            places.append(place.to(torch.int16 if t.shape[1] < 2**15 else torch.int32))
        top = torch.cat(tops).to(torch.promote_types(dtype, torch.float32))
        enc = torch.log1p(F.relu(top + b)) * words
        if revived is not None:
            revived = revived & (words > 0) & top.isfinite()
        ctx.save_for_backward(t, e, enc, torch.cat(places), revived)
        return enc

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        t, e, enc, places, revived = ctx.saved_tensors
        N, E = t.shape[1:]
        passing = enc > 0 if revived is None else (enc > 0) | (revived & (gradient < 0))
        gradient = gradient * torch.exp(-enc) * passing                      # (B, |V|), of the logits' maxima
        sample, word = gradient.nonzero(as_tuple=True)
        position = sample * N + places[sample, word]
        weight = gradient[sample, word][:, None]
        rows, grad_t, grad_e = t.flatten(0, 1), torch.zeros_like(t).flatten(0, 1), torch.zeros_like(e)
        n = max(1, ELEMENTS // E)
        for j, k, w in zip(position.split(n), word.split(n), weight.split(n)):
            grad_t.index_add_(0, j, (w * e[k]).to(t.dtype))
            grad_e.index_add_(0, k, (w * rows[j]).to(e.dtype))
        return grad_t.view_as(t), grad_e, gradient.sum(0), None, None, None


class TokenProjectionHead(nn.Module):
    """Eq. 4 and 5. d: width of h; embedding: nn.Embedding (|V|, E), the text tower's own.

    h (B, N, d), mask (B, N), False where nothing may be seen -> enc (B, |V|), >= 0. special: ids that are never active; bias: of
    all words at the start; e: another embedding to use; revived (B, |V|): entries that learn while they are zero. `logits` gives
    p(h_j) of single words.
    """

    def __init__(self, d, embedding, special=(), bias=0.0):
        super().__init__()
        V, E = embedding.weight.shape
        self.embedding = embedding
        self.transform = nn.Sequential(nn.Linear(d, E), nn.GELU(), nn.LayerNorm(E))
        self.bias = nn.Parameter(torch.full((V,), bias))
        self.register_buffer("words", torch.ones(V), persistent=False)
        self.words[list(special)] = 0

    @torch.compiler.disable
    def forward(self, h, mask=None, e=None, revived=None):
        e = self.embedding.weight if e is None else e
        return StreamedEncoding.apply(self.transform(h), e, self.bias, mask, self.words, revived)

    def logits(self, h, words, e=None):
        """p(h_j) of the words with these ids (n,), -> (B, N, n)."""
        e = self.embedding.weight if e is None else e
        return F.linear(self.transform(h), e[words], self.bias[words])


# mask(y)_k = 1 if token k exists in the caption y                                                                  (Eq. 8)
def caption_mask(tokens, mask, size):
    """tokens, mask (B, L) -> (B, size), 1 at the tokens of the caption; special tokens' places are of no effect."""
    return torch.zeros(len(tokens), size, device=tokens.device).scatter_reduce_(1, tokens, mask.float(), "amax")


# Optimizer -----------------------------------------------------------------------------------------------------------


class LAMB(torch.optim.Optimizer):
    """Adam whose update of each tensor is scaled to the tensor's own norm (You et al. 2020, arXiv 1904.00962; Sec. 4.2).

    params, lr, betas, eps, weight_decay as of torch.optim.AdamW; a group with `decays` False is not scaled.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                m = state["exp_avg"].lerp_(p.grad, 1 - beta1)
                v = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = (m / (1 - beta1 ** state["step"])) / ((v / (1 - beta2 ** state["step"])).sqrt() + group["eps"])
                update += group["weight_decay"] * p
                p_norm, u_norm = p.norm(), update.norm()
                scaled = (p_norm > 0) & (u_norm > 0) & group.get("decays", True)
                trust = torch.where(scaled, p_norm / u_norm, 1.0)
                p.sub_(group["lr"] * trust * update)


# Model ---------------------------------------------------------------------------------------------------------------


def check(args):
    if args.stages == "three" and args.share_1 + args.share_2 >= 1:
        raise ValueError(f"--share-1 {args.share_1} and --share-2 {args.share_2} leave no steps to stage 3.")


def stages(args):
    """The stages of a run: (number, steps, peak learning rate) of each."""
    if args.stages == "single":
        return [(3, args.steps, args.lr)]
    first, second = round(args.share_1 * args.steps), round(args.share_2 * args.steps)
    third = args.steps - first - second
    return [(1, first, args.lr), (2, second, args.lr * args.lr_2), (3, third, args.lr * args.lr_3)]


class Model(nn.Module):
    """Two towers with a token projection head each, tied to the text tower's embedding.

    image_encoder(images) -> (B, N, image_width); text_encoder(tokens, mask) -> (B, L, text_width), with `embedding`, its
    nn.Embedding, and `special`, the ids of tokens that stand for no word.
    """

    takes_cls = True

    def __init__(self, config, image_encoder, text_encoder, image_width, text_width):
        super().__init__()
        self.config, self.image_encoder, self.text_encoder = config, image_encoder, text_encoder
        embedding, special = text_encoder.embedding, text_encoder.special
        self.image_head = TokenProjectionHead(image_width, embedding, special, config.bias_image)
        self.text_head = TokenProjectionHead(text_width, embedding, special, config.bias_text)
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.init_scale)))
        self.register_buffer("image_embedding", embedding.weight.detach().clone())   # of the frozen image head in stage 2
        self.register_buffer("stage", torch.tensor(3))
        self.register_buffer("strength", torch.tensor(0.0))                           # of the regulariser, 0 to 1
        self.number = 3                                                               # the stage, for decisions in Python

    def begin_stage(self, number, fresh):
        """Freeze and thaw what stage 1, 2 or 3 of Sec. 3 trains; fresh: it begins, and is not continued."""
        self.number = number
        self.stage.fill_(number)
        self.image_encoder.requires_grad_(number != 2)
        for part in (self.image_head.transform, self.image_head.bias):
            part.requires_grad_(number != 2)
        if fresh:
            self.strength.zero_()
        if number == 2 and fresh:
            self.image_embedding.copy_(self.text_encoder.embedding.weight.detach())
        self.train(self.training)

    def load_state_dict(self, state, *arguments, **options):
        result = super().load_state_dict(state, *arguments, **options)
        self.number = int(self.stage)
        return result

    def train(self, mode=True):
        super().train(mode)
        self.image_encoder.train(mode and self.number != 2)
        return self

    def image_e(self):
        """e of the image head: in stage 2 the copy of its beginning."""
        return self.image_embedding if self.number == 2 else None

    def image_encoding(self, images, revived=None):
        """(B, 3, H, W) -> enc (B, |V|)."""
        return self.image_head(self.image_encoder(images), None, self.image_e(), revived)

    def text_encoding(self, tokens, mask, revived=None):
        """(B, L), (B, L) -> enc (B, |V|); in stage 1 of the caption's own tokens only (Eq. 8)."""
        enc = self.text_head(self.text_encoder(tokens, mask), mask, revived=revived)
        return enc * caption_mask(tokens, mask, enc.shape[1]) if self.number == 1 else enc

    def forward(self, batch, gather=identity):
        """batch: images (B, 3, H, W), tokens (B, L), mask (B, L) -> {"loss": scalar, and scalars to log}.

        active: words above zero in an encoding, mean over the batch; words_found: share of a caption's tokens that are active in
        its image; dead: share of the batch's distinct tokens that are active in no image.
        """
        cfg, tokens, mask = self.config, batch["tokens"], batch["mask"]
        own = caption_mask(tokens, mask, len(self.image_head.words)) * self.image_head.words          # (B, |V|)
        revived = own > 0 if self.number <= cfg.revive_until else None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.number != 2):
            v = self.image_encoding(batch["images"], revived)
        t = self.text_encoding(tokens, mask, revived)
        contrast = contrastive_loss(v, t, self.log_scale.exp(), gather)
        flops_image, flops_text = flops_loss(v, gather), flops_loss(t, gather)
        # L = L_con + lambda_1 L_FLOPs of images + lambda_2 L_FLOPs of texts                                         (Eq. 7)
        loss = contrast + self.strength * (cfg.lambda_image * flops_image + cfg.lambda_text * flops_text)
        with torch.no_grad():
            active = (v > 0).float()
            found = (active * own).sum(1) / own.sum(1).clamp(min=1)
            distinct = own.amax(0)
            dead = (distinct * (active.amax(0) == 0)).sum() / distinct.sum().clamp(min=1)
        return {"loss": loss, "contrast": contrast.detach(), "flops_image": flops_image.detach(), "flops_text": flops_text.detach(),
                "active_image": active.sum(1).mean(), "active_text": (t > 0).float().sum(1).mean(), "words_found": found.mean(),
                "dead": dead, "scale": self.log_scale.detach().exp(), "stage": self.stage}

    def after_update(self, step, steps):
        """Keep the scale within [1, 100]; the regulariser grows with the square of the step."""
        with torch.no_grad():
            self.log_scale.clamp_(0, math.log(100))
        ramp = max(1, self.config.ramp * steps)
        self.strength.fill_(min(1.0, ((step + 1) / ramp) ** 2))

    def warn(self, record):
        """What a record of the log says of words that die or do not leave, or None."""
        for side in ("image", "text"):
            if record[f"active_{side}"] < 1:
                return (f"{side} encodings have fewer than one active word: lower --lambda-{side} or the learning rate, or raise "
                        f"--bias-{side}.")
            if self.number == 3 and self.strength == 1 and record[f"active_{side}"] > len(self.image_head.words) / 4:
                return f"{side} encodings are not sparse, a quarter of the vocabulary is active: raise --lambda-{side}."
        return None

    def chance_loss(self, batch_size, mask, patches):
        """The contrastive loss when all similarities are equal; batch_size is global."""
        return math.log(batch_size)

    def encode_image(self, images):
        """(B, 3, H, W) -> (B, |V|), normalised."""
        return F.normalize(self.image_encoding(images), dim=-1)

    def encode_text(self, tokens, mask):
        """(B, L), (B, L) -> (B, |V|), normalised."""
        return F.normalize(self.text_encoding(tokens, mask), dim=-1)

    def encode_words(self, tokens, mask):
        """The query without a text tower (Sec. 7.1): the caption's tokens, each of weight one. -> (B, |V|), normalised."""
        words = caption_mask(tokens, mask, len(self.image_head.words)) * self.image_head.words
        return F.normalize(words, dim=-1)

    def word_maps(self, images, words):
        """p(h_j) of the words with these ids (n,) at each of the image's tokens (Sec. 7.2) -> (B, N, n)."""
        return self.image_head.logits(self.image_encoder(images), words, self.image_e())


# Inverted index (App. D) ---------------------------------------------------------------------------------------------


OPERATORS = ("AND", "OR", "NOT", "(", ")")


def parts_of(expression):
    """A boolean expression -> its words, operators and parentheses."""
    return re.findall(r"[()]|[^\s()]+", expression)


class InvertedIndex:
    """Exact search of sparse encodings: of each word the documents in which it is active, with its weights.

        index = InvertedIndex(vocabulary)                      # list of |V| tokens
        index.add(["a.jpg", "b.jpg"], enc)                     # enc (n, |V|), dense or sparse; an id that is there is replaced
        index.search({"red": 1.0, "circle": 0.7}, k=10)        # or an encoding (|V|,) -> [(id, score), ...], best first
        index.search(query, where="red AND (circle OR star) NOT blue", boost={"red": 0.5}, block=["the"], cosine=True)

    Documents are kept in segments, sorted by word. A new segment is merged with the one before as long as that is not larger, so
    that there are few, and each document is copied few times. Deleted ones leave when `merge` makes one segment of all.
    """

    def __init__(self, vocabulary):
        self.vocabulary, self.word_ids = list(vocabulary), {word: i for i, word in enumerate(vocabulary)}
        self.ids, self.rows = [], {}                            # ids of all rows; row of each document
        self.alive, self.norms = torch.zeros(0, dtype=torch.bool), torch.zeros(0)
        self.segments = []                                      # (starts (|V| + 1,), rows, weights), both (n,)

    def __len__(self):
        return len(self.rows)

    def add(self, ids, enc):
        """Add or replace documents: ids, a list of n strings; enc (n, |V|) >= 0."""
        if isinstance(ids, str):
            raise ValueError(f"ids is a list of names, not the string {ids!r}.")
        ids = [str(name) for name in ids]
        if enc.shape != (len(ids), len(self.vocabulary)):
            raise ValueError(f"{len(ids)} ids and a vocabulary of {len(self.vocabulary)} need encodings of that shape, not "
                             f"{tuple(enc.shape)}.")
        if len(set(ids)) < len(ids):
            raise ValueError("An id stands twice among the documents to add.")
        enc = enc.detach().to("cpu", torch.float32).to_sparse().coalesce()
        (rows, words), weights = enc.indices(), enc.values()
        if not (weights >= 0).all() or weights.isinf().any():
            raise ValueError("Weights of an encoding must be numbers that are not negative.")
        rows, words, weights = (x[weights > 0] for x in (rows, words, weights))
        self.delete([name for name in ids if name in self.rows])
        self.segments.append(self.segment(words, rows + len(self.ids), weights))
        self.norms = torch.cat([self.norms, torch.zeros(len(ids)).index_add_(0, rows, weights.square()).sqrt()])
        self.alive = torch.cat([self.alive, torch.ones(len(ids), dtype=torch.bool)])
        self.rows |= {name: len(self.ids) + i for i, name in enumerate(ids)}
        self.ids += ids
        while len(self.segments) > 1 and len(self.segments[-2][1]) <= len(self.segments[-1][1]):
            self.segments[-2:] = [self.segment(*self.postings(self.segments[-2:]))]

    def segment(self, words, rows, weights):
        order = torch.argsort(words, stable=True)
        starts = F.pad(torch.bincount(words, minlength=len(self.vocabulary)).cumsum(0), (1, 0))
        return starts, rows[order].int(), weights[order]

    def delete(self, ids):
        """Remove documents. Raises KeyError, and removes none, if an id is unknown."""
        ids = dict.fromkeys(str(name) for name in ids)          # one that is named twice is deleted once
        rows = [self.rows[name] for name in ids]
        for name in ids:
            del self.rows[name]
        self.alive[rows] = False

    def postings(self, segments):
        """(words, rows, weights) of the documents of these segments that are there, each (n,)."""
        parts = [(torch.repeat_interleave(torch.arange(len(self.vocabulary)), starts.diff()), rows.long(), weights)
                 for starts, rows, weights in segments] or [(torch.zeros(0, dtype=torch.long),) * 2 + (torch.zeros(0),)]
        words, rows, weights = (torch.cat(part) for part in zip(*parts))
        kept = self.alive[rows]
        return words[kept], rows[kept], weights[kept]

    def merge(self):
        """Make one segment of all, without the deleted documents."""
        words, rows, weights = self.postings(self.segments)
        place = self.alive.cumsum(0) - 1                        # new row of an old one
        self.segments = [self.segment(words, place[rows], weights)]
        self.ids = [name for name, alive in zip(self.ids, self.alive.tolist()) if alive]
        self.rows = {name: i for i, name in enumerate(self.ids)}
        self.norms, self.alive = self.norms[self.alive], torch.ones(len(self.ids), dtype=torch.bool)

    def word(self, word):
        """The id of a word. Raises ValueError where the vocabulary has none."""
        if word not in self.word_ids:
            raise ValueError(f"The vocabulary has no word {word!r}: give words that are one token.")
        return self.word_ids[word]

    def holding(self, word):
        """(rows,), True for the documents in which a word is active."""
        k, found = self.word(word), torch.zeros(len(self.ids), dtype=torch.bool)
        for starts, rows, _ in self.segments:
            found[rows[starts[k] : starts[k + 1]].long()] = True
        return found

    def where(self, expression):
        """(rows,), True for the documents that a boolean expression of words matches: AND, OR, NOT, parentheses; words beside each
        other are joined by AND, and AND binds more tightly than OR. Raises ValueError for what is none."""
        parts = parts_of(expression)

        def either():
            found = both()
            while parts and parts[0] == "OR":
                parts.pop(0)
                found = found | both()
            return found

        def both():
            found = single()
            while parts and parts[0] not in ("OR", ")"):
                if parts[0] == "AND":
                    parts.pop(0)
                found = found & single()
            return found

        def single():
            part = parts.pop(0) if parts else None
            if part == "NOT":
                return ~single()
            if part == "(":
                found = either()
                if not parts or parts.pop(0) != ")":
                    raise ValueError(f"A parenthesis is not closed in {expression!r}.")
                return found
            if part is None or part in OPERATORS:
                raise ValueError(f"A word is missing in {expression!r}" + (f" before {part!r}." if part else " at its end."))
            return self.holding(part)

        found = either()
        if parts:
            raise ValueError(f"A parenthesis too many in {expression!r}.")
        return found & self.alive

    def search(self, query, k=10, where=None, allow=None, block=(), boost=None, cosine=False):
        """The k documents with the largest dot product with the query, or cosine: [(id, score), ...], best first; documents that
        share no word with it are not found.

        query: {word: weight} or encoding (|V|,); where: a boolean expression that documents must match; allow, block: lists of words
        of the query that alone count, or do not; boost: {word: weight} that is added to the query's. Raises ValueError for unknown
        words.
        """
        if isinstance(query, dict):
            weights = {self.word(word): float(weight) for word, weight in query.items()}
        elif torch.is_tensor(query) and query.shape == (len(self.vocabulary),):
            query = query.to_dense()
            weights = {i: query[i].item() for i in query.nonzero()[:, 0].tolist()}
        else:
            raise ValueError(f"A query is a dict of weights, or a tensor of shape ({len(self.vocabulary)},), one weight a word, not "
                             f"{tuple(query.shape) if torch.is_tensor(query) else repr(query)}.")
        if k < 1:
            raise ValueError(f"k={k} must be at least 1.")
        for word, weight in (boost or {}).items():
            weights[self.word(word)] = weights.get(self.word(word), 0.0) + weight
        blocked = {self.word(word) for word in block}
        kept = weights.keys() if allow is None else {self.word(word) for word in allow} & weights.keys()
        weights = {i: weights[i] for i in kept if i not in blocked}
        scores = torch.zeros(len(self.ids))
        for starts, rows, values in self.segments:
            for i, weight in weights.items():
                own = slice(starts[i], starts[i + 1])
                scores.index_add_(0, rows[own], values[own], alpha=weight)
        scores[~self.alive] = 0
        if where is not None:
            scores[~self.where(where)] = 0
        if cosine:
            norm = math.sqrt(sum(weight**2 for weight in weights.values()))
            scores = scores / (self.norms * norm).clamp(min=1e-12)
        best, rows = scores.topk(min(k, len(scores)))
        return [(self.ids[row], score) for score, row in zip(best.tolist(), rows.tolist()) if score > 0]

    def save(self, path):
        self.merge()
        starts, rows, weights = self.segments[0]
        torch.save({"vocabulary": self.vocabulary, "ids": self.ids, "norms": self.norms, "starts": starts, "rows": rows,
                    "weights": weights}, path)

    @classmethod
    def load(cls, path):
        """Read what `save` wrote, without executing code from it."""
        state = torch.load(path, weights_only=True)
        if "vocabulary" not in state:
            raise ValueError(f"{path} holds no index.")
        index = cls(state["vocabulary"])
        index.ids, index.norms, index.segments = state["ids"], state["norms"], [(state["starts"], state["rows"], state["weights"])]
        index.rows = {name: i for i, name in enumerate(index.ids)}
        index.alive = torch.ones(len(index.ids), dtype=torch.bool)
        return index

    def export(self, path, scale=100, contents=None):
        """JSON lines {"id", "contents", "vector": {token: weight}}, as impact indexes (Anserini) read them: weights are whole
        numbers, round(scale * weight), those that round to zero are left out. contents: {id: text}."""
        words, rows, weights = self.postings(self.segments)
        order = torch.argsort(rows, stable=True)
        counts = torch.bincount(rows, minlength=len(self.ids)).tolist()
        groups = zip(words[order].split(counts), (scale * weights[order]).round().int().split(counts))
        with open(path, "w", encoding="utf-8") as file:
            for name, alive, (own, impacts) in zip(self.ids, self.alive.tolist(), groups):
                vector = {self.vocabulary[i]: impact for i, impact in zip(own.tolist(), impacts.tolist()) if impact}
                if alive:
                    file.write(json.dumps({"id": name, "contents": (contents or {}).get(name, ""), "vector": vector}) + "\n")


def compare_heads(B=16, N=197, E=512, V=30522):
    """Print time and memory of Eq. 4 and 5, forward and backward, streamed and with all logits at a time, at the start and when few
    words are active."""
    for bias, when in ((0.0, "at the start"), (-1.8, "trained")):
        head, h = TokenProjectionHead(E, nn.Embedding(V, E), bias=bias), torch.randn(B, N, E, requires_grad=True)
        nn.init.normal_(head.embedding.weight, std=0.02)

        def dense(h):
            return torch.log1p(F.relu(F.linear(head.transform(h), head.embedding.weight, head.bias).amax(1)))

        before, seconds, memory = peak_memory(), [], []
        for form in (head, dense):                                           # the smaller first: a peak does not go down
            start = time.perf_counter()
            enc = form(h)
            enc.sum().backward()
            seconds.append(time.perf_counter() - start)
            memory.append(peak_memory() - before)
        print(f"head on {B} x {N} x {E}, {V:,} words, {when}, {(enc > 0).sum(1).float().mean():,.0f} active: streamed {seconds[0]:.2f} s, "
              f"dense {seconds[1]:.2f} s: {seconds[0] / seconds[1]:.2f} times as long"
              + (f"; {memory[0]:,.0f} and {memory[1]:,.0f} MiB" if bias == 0 else ""))


def peak_memory():
    """MiB that this process has held at most."""
    import resource  # Unix alone has it
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compare_search(n, V=30522, active=100, words=20, E=512):
    """Print what the index of n made-up encodings costs, and the time of a query beside a matrix product with n dense embeddings.
    Words are as unequally frequent as 1 / sqrt(rank)."""
    index, frequency = InvertedIndex([f"w{i}" for i in range(V)]), (torch.arange(V) + 10.0) ** -0.5
    start, part = time.perf_counter(), 10_000
    for i in range(0, n, part):
        rows, words_of = torch.arange(part).repeat_interleave(active), torch.multinomial(frequency, part * active, replacement=True)
        enc = torch.sparse_coo_tensor(torch.stack([rows, words_of]), torch.rand(part * active), (part, V), check_invariants=True)
        index.add([str(j) for j in range(i, i + part)], enc)
    index.merge()
    rate = n / (time.perf_counter() - start)
    size = sum(x.nbytes for x in (*index.segments[0], index.norms)) / n
    queries = [{f"w{j}": 1.0 for j in torch.multinomial(frequency, words).tolist()} for _ in range(20)]
    dense, vectors = torch.randn(n, E), torch.randn(20, E)
    seconds = []
    for answer in (lambda i: index.search(queries[i]), lambda i: (dense @ vectors[i]).topk(10)):
        answer(0)
        start = time.perf_counter()
        for i in range(20):
            answer(i)
        seconds.append((time.perf_counter() - start) / 20)
    print(f"index of {n:,}: built at {rate:,.0f} images/s, {size:.0f} bytes an image (dense {4 * E}), {1 / seconds[0]:,.0f} "
          f"queries/s, dense {1 / seconds[1]:,.0f}: {seconds[1] / seconds[0]:.1f} times as fast")


if __name__ == "__main__":
    # Made-up pictures: three of nine patches show the words of the caption, as vectors; the others are noise. As in stage 1 the
    # text's encoding is its words alone. Then the pictures are indexed and searched.
    torch.manual_seed(0)
    B, L, N, E, V = 128, 3, 9, 32, 40
    looks, head = torch.randn(V, E), TokenProjectionHead(E, nn.Embedding(V, E))
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    for step in range(121):
        words = torch.rand(B, V).argsort(1)[:, :L]                           # (B, L)
        place = torch.rand(B, N).argsort(1)[:, :L]                           # (B, L)
        pictures = 0.3 * torch.randn(B, N, E)
        pictures.scatter_add_(1, place[..., None].expand(-1, -1, E), looks[words])
        own = caption_mask(words, torch.ones_like(words), V)                 # (B, |V|)
        enc = head(pictures, revived=own > 0)
        loss = contrastive_loss(enc, own, 10.0) + 3e-3 * flops_loss(enc)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            found = (enc.topk(L).indices.sort(1).values == words.sort(1).values).all(1)
            print(f"step {step:3d}  loss {loss.item():.3f}  active words {(enc > 0).sum(1).float().mean().item():4.1f} of {V}  "
                  f"pictures whose three heaviest words are theirs {found.float().mean().item():.0%}")
    index = InvertedIndex([f"w{i}" for i in range(V)])
    index.add([f"picture {n} of " + " ".join(f"w{i}" for i in sorted(row)) for n, row in enumerate(words.tolist())], enc)
    a, b = words[0, :2].tolist()
    for name, score in index.search({f"w{a}": 1.0, f"w{b}": 1.0}, k=3, where=f"w{a} AND w{b}"):
        print(f"w{a} AND w{b}: {name}, score {score:.2f}")
    if len(sys.argv) > 1:  # python stair.py 1000000: the costs of the head, and of an index of as many images
        compare_heads()
        compare_search(int(sys.argv[1]))
