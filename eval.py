"""Evaluate trained runs: `python eval.py RUN [RUN ...] --task zeroshot,retrieval --data SPEC`.

The command prints a table of metrics and draws pictures into RUN. It appends the metrics to
RUN/evals.jsonl. Without --data it repeats the evaluation that ended the training, and writes
RUN/eval.json again. Several runs are evaluated one after the other. `torchrun --nproc_per_node=8
eval.py RUN ...` divides the images and captions among 8 GPUs.

A map of the sections:

    Metrics             pure functions on matrices; k-NN and linear probes
    The embedder        a model that reads and encodes images and captions, in fp32
    A run, its options  load_run: a run's directory -> Embedder and settings; options_of
    Data                EvalSet: one interface to every kind of data; functions that open data;
                        the drawn images of shapes
    Tasks               functions of (Embedder, EvalSet, options); tasks of one method come last
    What can be measured   TASKS: the table of all tasks, and what each task needs
    Pictures            PICTURES: the table of all pictures, and what each picture needs
    Evaluating a run    main -> evaluate_run -> load_run, open_eval_set, evaluate_and_show
    Search, Weights     --query, --export
    Command line        the flags

To add a task, a picture or a kind of data, write a function and add a row to TASKS, PICTURES or
KINDS. A new row of common.formats needs no row of KINDS.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import re
import sys
import textwrap
import threading
import unicodedata
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Callable, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image
from tqdm import tqdm

import bam
import common
import sparc
import sparo
import stair
from common import UserError

METHODS = {module.__name__: common.Method(module) for module in (sparo, stair, sparc, bam)}
METHODS["classifier"] = common.Method(bam.CLASSIFIER)  # train.py --finetune trains a classifier
METHODS["detector"] = common.Method(sparc.DETECTOR)  # train.py --method detector needs --finetune


# Metrics ----------------------------------------------------------------------------------
#
# A metric is a function that takes matrices and returns numbers. So a test can compare the numbers
# with a calculation by hand, and you can copy the function into other code.


def recall_at_k(queries, keys, positives, chunk=1024, similarity=torch.inner):
    """Fraction of queries with at least one positive among their k best keys -> {k: float}.

    queries (Q, E), keys (K, E); similarity(queries, keys) -> scores (Q, K).
    positives: ids of the queries (Q,) and of the keys (K,). A query and a key with equal ids are a
    positive pair. chunk: how many queries are scored at a time. Their scores take chunk x K x 4
    bytes, and the masks take less.

    A negative key with the score of the best positive key counts as better than the positive key.
    So a model that gives every pair the same score gets the worst recall, not the best.

    differs: SPARO (Sec. 4.2) defines recall as the fraction of the k best keys that are positive.
    The results of the paper come from the code of CLIP_benchmark (Table C.2). That code, the code
    of the authors (training/train.py:360) and this function count the queries that have any
    positive key among the k best.
    """
    query_ids, key_ids = positives
    ranks = []
    for x, ids in zip(queries.split(chunk), query_ids.split(chunk)):
        scores = similarity(x, keys)                                        # (chunk, K)
        for s, own in zip(scores.split(64), ids.split(64)):  # masked copies of 64 rows are small
            positive = own[:, None] == key_ids                              # (64, K)
            best = s.masked_fill(~positive, -torch.inf).amax(1, keepdim=True)
            # the rank of the best positive key, from 0: the number of negative keys before it. A
            # NaN is never below, so that it counts as wrong.
            rank = (~(s.masked_fill(positive, -torch.inf) < best)).sum(1)
            ranks.append(rank.where(positive.any(1), torch.inf))  # without a positive key
    ranks = torch.cat(ranks)
    return {k: (ranks < k).sum().item() / len(queries) for k in (1, 5, 10)}


def class_embeddings(encode_text, classes, kept=1):
    """Zero-shot classifier (C, E): the normalised mean of the encoded prompts of each class (CLIP).

    encode_text: list of n prompts -> encodings (n, E); classes: a Classes.
    kept: 1, or a vector (E,) with 1 for the dimensions to keep and 0 for all other dimensions.

    About 256 prompts are encoded at a time. Their means are computed before the next prompts are
    encoded, because STAIR's encodings of all 80,000 prompts of ImageNet would need 10 GB.
    """
    T, rows = len(classes.templates), []
    for prompts in chunks(classes.prompts, T * max(1, 256 // T)):
        prompts = encode_text(prompts).unflatten(0, (-1, T))                # (c, T, E)
        rows.append(F.normalize(kept * prompts.mean(1), dim=-1))
    return torch.cat(rows)


def knn_accuracy(train, train_labels, test, test_labels, k=20, tau=0.07, chunk=256):
    """Accuracy of a vote of the k nearest neighbours (DINO, Appendix).

    The vote of a neighbour for its label has the weight exp(cosine / tau).
    train (N, E), test (n, E): features of any norm; train_labels (N,), test_labels (n,).
    If there are fewer than k training features, all training features vote.
    chunk: how many test features are compared at a time. Their cosines take chunk x N x 4 bytes.
    """
    train, test = F.normalize(train, dim=-1), F.normalize(test, dim=-1)
    correct, classes = 0, int(train_labels.max()) + 1
    for x, labels in zip(test.split(chunk), test_labels.split(chunk)):
        cosine, nearest = (x @ train.T).topk(min(k, len(train)))            # (chunk, k)
        votes = torch.zeros(len(x), classes, device=x.device)
        votes.scatter_add_(1, train_labels[nearest], (cosine / tau).exp())
        correct += (votes.argmax(1) == labels).sum().item()
    return correct / len(test)


# {value of --probe: (the setting that the probe chooses by itself, the default number of epochs)}
PROBES = {"adamw": ("weight_decay", 10), "sgd": ("lr", 100), "lbfgs": ("l2", None)}
# The learning rates from which the sgd probe chooses without --probe-lr.
# differs: BAM (Table 9b) has one rate, .002 for ViT and .3 for ResNet-50, and learns from all
# training images. --probe-lr .002 does the same. Without --probe-lr our probe learns from nine
# tenths of the images, because the last tenth chooses the rate.
# differs: BAM's code (bam.py names its revision) multiplies the rate by batch / 256, which turns
# .002 into .008 (eval_linear.py:176). The code takes the epoch that is best on the test images
# (eval_linear.py:223). We take the last epoch. The code resizes crops bilinearly
# (eval_linear.py:61). We resize crops bicubically.
RATES = (0.002, 0.01, 0.05, 0.3, 1.0)


def hold_out(labels, step):
    """Labels (N,) -> (N,): True for the images to hold out, one in `step`, drawn class by class.

    A probe chooses its setting on the held-out images. If the probe chose on the test images, the
    accuracy would be too high. SPARO (C.1) does not say how many images are held out. We hold out a
    fifth. At least one image of each class is not held out. If no class has two images, no image is
    held out, and each probe takes the middle one of its settings. The split is the same each time,
    so that results can be reproduced.
    """
    labels = labels.cpu()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    order = order[labels[order].argsort(stable=True)]
    several = order[labels.bincount()[labels[order]] > 1]
    return torch.zeros(len(labels), dtype=torch.bool).index_fill(0, several[::step], True)


@torch.no_grad()
def predict(head, x, rows=None):
    """The classes (n,) that a linear classifier predicts for rows of features x, a tensor or
    SparseRows. Without `rows` the classes of all rows are predicted."""
    rows, device = torch.arange(len(x)) if rows is None else rows, head.weight.device
    return torch.cat([head(x[part].to(device)).argmax(1).cpu() for part in rows.split(1024)])


def middle_best(scores):
    """The index of the best score. If several scores are equally good, the index is the middle one,
    because settings at an end of a range are rarely right."""
    best = [i for i, score in enumerate(scores) if score == max(scores)]
    return best[len(best) // 2]


def adamw_probe(x, labels, epochs, device="cpu"):
    """Train a linear classifier on features (N, E) and labels (N,) as CLIP_benchmark does (SPARO,
    C.1) -> torch.nn.Linear on `device`, the weight decay. x is a tensor or stair.SparseRows. Each
    batch moves to the device by itself.

    The weight decay is one of 97 values from 1e-6 to 1e2. The search for the best value takes at
    most 15 trainings, which are scored on a held-out fifth of the rows. The search first scores
    every 16th value. Then it compares the best value with the values 8 steps below and above, and
    moves to the best of the three. It repeats this with 4, 2 and 1 steps, so that it can reach each
    of the 97 values. The classifier that is returned learns from all rows.

    differs: if several of the first seven values are equally good, CLIP_benchmark takes the
    smallest value. We take the middle one.
    """
    decays, classes = np.logspace(-6, 2, 97).tolist(), int(labels.max()) + 1
    is_held = hold_out(labels, 5)
    held, fitted = is_held.nonzero()[:, 0], (~is_held).nonzero()[:, 0]

    @common.fixed_seed(0)  # all fits start from the same weights and learn from the same batches
    def fit(learned, decay):
        """Train on the rows `learned` of x."""
        head = torch.nn.Linear(x.shape[1], classes).to(device)
        optimizer = torch.optim.AdamW(head.parameters(), weight_decay=decay, fused=True)
        orders = [learned[torch.randperm(len(learned))] for _ in range(epochs)]
        batches = [rows for epoch in orders for rows in epoch.split(64)]
        for step, rows in enumerate(batches):
            optimizer.param_groups[0]["lr"] = common.cosine(step, len(batches), 0.1, 0.0)
            optimizer.zero_grad()
            F.cross_entropy(head(x[rows].to(device)), labels[rows].to(device)).backward()
            optimizer.step()
        return head

    @functools.cache  # the search asks for some values twice
    def score(i):
        """The number of held-out rows that are classified correctly with weight decay i."""
        head = fit(fitted, decays[i])
        return (predict(head, x, held) == labels[held]).sum().item()

    scores = [score(i) for i in range(0, 97, 16)]
    best = 16 * middle_best(scores)
    for step in (8, 4, 2, 1) if len(held) else ():
        best = max((max(best - step, 0), best, min(best + step, 96)), key=score)
    return fit(torch.arange(len(x)), decays[best]), decays[best]


@common.fixed_seed(0)
def sgd_probe(crops, held, held_labels, classes, epochs, device="cpu", rates=RATES):
    """Train linear classifiers by bam.train_heads (BAM, D.1, Table 9b) -> the best one, a
    torch.nn.Linear on `device`, and its learning rate.

    crops() -> features (n, E) and labels (n,) of new random crops of the training images. Each
    epoch calls crops(). held (m, E), held_labels (m,): features and labels of centre crops of other
    images. These images choose the learning rate, one of `rates`. Features are tensors or
    SparseRows. classes: the number of classes.
    """
    heads = [torch.nn.Linear(held.shape[1], classes).to(device) for _ in rates]
    features = (crops() for _ in progress(range(epochs), "epochs of the linear probe"))
    bam.train_heads(heads, rates, features, epochs)
    scores = [(predict(head, held) == held_labels).sum().item() for head in heads]
    best = middle_best(scores)
    return heads[best], rates[best]


# Strengths of the l2 penalty (BAM, D.3). The strongest penalty comes first, because its fit
# converges in a few steps. Each later fit starts from the weights of the fit before.
STRENGTHS = np.logspace(5, -6, 45)


@common.fixed_seed(0)
def lbfgs_probe(x, labels, strengths=STRENGTHS):
    """Fit bam.logistic_regression to features (N, E) and labels (N,) (BAM, D.3, Table 5)
    -> torch.nn.Linear, the strength of the l2 penalty. x is a tensor or stair.SparseRows. The fit
    needs all rows at once, and runs on the device of the labels.

    The strength is that of 45 which is best on a held-out fifth of the rows. The classifier that is
    returned learns from all rows with this strength.

    differs: the paper chooses the strength on validation images.
    """
    x, held = x[torch.arange(len(x))].to(labels.device).double(), hold_out(labels, 5)
    head, right = torch.nn.Linear(x.shape[1], int(labels.max()) + 1).to(x), []
    x_fitted, labels_fitted = x[~held], labels[~held]
    for l2 in strengths:
        bam.logistic_regression(head, x_fitted, labels_fitted, l2)
        right.append((head(x[held]).argmax(1) == labels[held]).sum().item())
    best = strengths[middle_best(right)]
    bam.logistic_regression(head, x, labels, best)
    return head.float(), float(best)


def mean_per_class(predicted, labels):
    """Accuracy within each class of the labels (n,), averaged over these classes."""
    return mean([to_float((predicted == labels)[labels == c]) for c in labels.unique()])


def mean(values):
    """Mean of the values that are not None; nan if all are None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


# The embedder -----------------------------------------------------------------------------
#
# Encodings are computed in fp32, even if the training used bf16. A cosine in bf16 has only 8
# significant bits. So many pairs would get the same score, and metrics count a tie as an error.
#
# All ranks run the tasks, on the same data. encode_pairs and texts divide the encoding among the
# ranks (Embedder.in_parts). Then every rank gets all encodings. Rank 0 alone prints, draws and
# writes.


IMAGE_FORMS = ("Give paths, bytes, PIL images (of an array: Image.fromarray), or tensors "
               "(3, H, W) of uint8 or of floats in [0, 1]")
LOADING = threading.Lock()  # Embedder.read_given says why


def chunks(items, n):
    """Yield lists of n items; the last list may be shorter."""
    items = iter(items)
    while part := list(itertools.islice(items, n)):
        yield part


def as_list(items):
    """Return the items as a list. A single caption, image or open file becomes a list with one
    item."""
    forms = str, bytes, bytearray, memoryview, os.PathLike, Image.Image
    is_many = hasattr(items, "__iter__") and not hasattr(items, "read")
    return list(items) if is_many and not isinstance(items, forms) else [items]


def progress(items, what, **more):
    """A bar of tqdm that appears after five seconds. If the output is no terminal, the bar is
    printed every ten seconds."""
    interval = 0.1 if sys.stderr.isatty() else 10
    return tqdm(items, what, delay=5, leave=False, mininterval=interval,
                disable=common.this_rank()[0] > 0, **more)


def check_images(images):
    """Return a tensor (n, 3, H, W) of uint8 or of floats in [0, 1]. Raises UserError for another
    tensor. Encoders normalise the pixels, so that images that are already normalised would be
    encoded wrongly."""
    low, high = images.aminmax()
    is_unit = images.is_floating_point() and low >= 0 and high <= 1
    if images.ndim != 4 or images.shape[1] != 3 or not (images.dtype == torch.uint8 or is_unit):
        raise UserError(f"{IMAGE_FORMS}, not {images.dtype} of shape {tuple(images.shape)} from "
                        f"{low:g} to {high:g}.")
    return images


def sample_of(file, value=None):
    name = f"{file!s:.200}" if isinstance(file, (str, Path)) else "a file"
    return common.Sample(file, value, name)


def report_unreadable(counts, used):
    """Print how many files were left out, and why. counts: {problem: [count, last example]}. used:
    the number of files that were read. Raises UserError if this number is 0."""
    unread, reasons = sum(n for n, _ in counts.values()), common.describe_skipped(counts)
    if used == 0:
        raise UserError(f"None of the {unread} images could be read: {reasons or 'there is none'}: "
                        "check the path, --image-root and --label-fraction.")
    if unread:
        print(f"skipped {unread} of {used + unread} images that cannot be read: {reasons}")


def in_threads(compute, items, workers):
    """Yield compute(item) for each item, in order. `workers` threads compute at most 256 results
    ahead."""
    with ThreadPool(max(1, workers)) as pool:
        for part in chunks(items, 256):
            yield from pool.imap(compute, part)


def read_images(pairs, read, workers=0):
    """Pairs (image or file, value) -> yields pairs (image, value). Unreadable files are left out,
    and reported at the end.

    read(file) -> image; `workers` threads call `read`.
    """
    counts, used = {}, 0
    attempt = lambda pair: common.with_image(sample_of(*pair), read)
    samples = common.usable(in_threads(attempt, pairs, workers), counts)
    for used, sample in enumerate(samples, 1):
        yield sample.file, sample.value
    report_unreadable(counts, used)


@dataclasses.dataclass
class Embedder:
    """A trained model in evaluation mode, which encodes captions and images into matrices on the
    CPU.

    Each image and each caption becomes a vector (E,). The score of an image and a caption is the
    dot product of their vectors. A model with `late_interaction` encodes an image as patches (P, E)
    and a caption as tokens (L, E). `model.similarity` then computes the score. The methods below
    have an argument `encode`: the function that encodes, for example `model.probe_features`, or the
    name of a method of this class.
    """

    model: torch.nn.Module
    tokenizer: common.Tokenizer | None   # None: the model encodes only images
    context: int | None                  # longest caption, in tokens
    image_size: int                      # S, in pixels
    device: str = "cpu"
    chunk: int = 256                     # images or captions that are encoded at a time
    workers: int = 0                     # threads that read images
    mask: torch.Tensor | None = None     # (E,), multiplies the encodings of images (SPARO)
    text_free: bool = False              # encode a caption as the set of its words (STAIR)
    step: int = 0                        # number of training steps
    resize: int | None = None            # the shorter side before the crop; None: `read` chooses
    amp: str = "off"                     # precision of the encoders, "bf16" or "off"
    share: tuple = (0, 1)                # (number of this rank, number of ranks)
    tells: bool = False                  # print at once which tokens the model does not see
    # sums of the counts of `count` so far; copies of an Embedder share this Counter
    counted: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def read(self, file):
        """A path, bytes or PIL image -> its centre crop, uint8 (3, S, S). Tensors stay whole."""
        if torch.is_tensor(file):
            return check_images(file[None])[0]
        # CLIP resizes the shorter side to the size of the crop. Models with text do the same. DINO
        # and BAM (D.1) resize the shorter side to 256 for a crop of 224. Models without text do
        # the same.
        side = self.image_size if self.tokenizer else round(self.image_size * 256 / 224)
        return common.eval_transform(self.image_size, self.resize or side)(common.open_image(file))

    def encode_image(self, images):
        """Images (n, 3, S, S) -> (n, E), or patches (n, P, E) with late interaction."""
        if self.model.late_interaction:
            return self.model.encode_patches(images)
        x = self.model.encode_image(images)
        # normalised again, so that the scores of masked encodings are cosines
        return x if self.mask is None else F.normalize(x * self.mask.to(x.device), dim=-1)

    def encode_text(self, tokens, mask):
        """Token ids and mask (n, L) -> (n, E), or (n, L, E) with late interaction."""
        if self.model.late_interaction:
            return self.model.encode_tokens(tokens, mask)
        if self.text_free:
            return self.model.encode_words(tokens, mask)
        return self.model.encode_text(tokens, mask)

    def tokenize(self, captions):
        """n captions -> token ids and mask (n, L) on the device of the model. Raises UserError if
        the model has no text encoder, or if a caption is no string."""
        if self.tokenizer is None:
            raise UserError("This run has no text encoder: choose a task of images, such as knn.")
        with common.explained(TypeError, "Captions need strings"):
            "".join(captions)  # the error of join names the item that is no string
        tokens, mask = self.tokenizer.batch(captions, self.context)
        if self.tells:
            print_unseen(self.count(captions, tokens, mask), self.context)
        return tokens.to(self.device), mask.to(self.device)

    def count(self, captions, tokens, mask):
        """Counts of captions, and counts of their tokens without [CLS] and [SEP]."""
        full = itertools.compress(captions, (mask.sum(1) == self.context).tolist())
        return {"captions": len(captions), "tokens": int(mask.sum()) - 2 * len(tokens),
                "cut_captions": sum(len(self.tokenizer.encode(x)) > self.context for x in full),
                "unknown_tokens": int((tokens == self.tokenizer.unk).sum())}

    def in_parts(self, items, compute, what):
        """Divide an iterable of items into pieces -> yields compute(piece) for each piece, in
        order, on all ranks.

        A part of the items has a piece for each rank, which computes it. A piece of a full part has
        `chunk` items. An empty piece has no result. The last part is empty. what: the word for
        items.
        """
        (rank, ranks), items, part = self.share, iter(items), [None]
        with progress(None, "encoding", unit=f" {what}") as bar:
            while part:
                part = list(itertools.islice(items, ranks * self.chunk))
                size = math.ceil(len(part) / ranks)
                piece = part[rank * size : (rank + 1) * size]
                mine = len(part), compute(piece) if piece else None
                found = common.gather_objects(mine) if ranks > 1 else [mine]
                if len({n for n, _ in found}) > 1:  # ranks that disagree would lose or repeat items
                    raise UserError(f"Ranks found different {what}: give all ranks the same files.")
                yield from (result for _, result in found if result)
                bar.update(len(part))

    @torch.no_grad()
    @common.without_tf32()
    def compute(self, encode, *inputs):
        """Return encode(*inputs) in fp32 on the CPU. encode: a function, or the name of a method.
        Raises UserError if a number is NaN or infinite."""
        encode = getattr(self, encode) if isinstance(encode, str) else encode
        device = torch.device(self.device).type
        with torch.autocast(device, torch.bfloat16, enabled=self.amp == "bf16"):
            x = encode(*inputs).float().cpu()
        if not x.isfinite().all():
            raise UserError("Encodings are not finite, so the run has diverged: give another run.")
        return x

    def texts(self, captions, encode="encode_text"):
        """Encode n captions -> (n, E), or (n, L, E) if `encode` returns vectors of L tokens.
        Shorter captions are padded with zeros. A single string is one caption."""
        captions = as_list(captions)

        def compute(captions):
            inputs = self.tokenize(captions)
            return self.compute(encode, *inputs), self.count(captions, *inputs)

        parts = []
        for x, counts in self.in_parts(captions or [""], compute, "captions"):
            parts.append(x)
            self.counted.update(counts)
        if parts[0].ndim == 3:
            longest = max(x.shape[1] for x in parts)
            parts = [F.pad(x, (0, 0, 0, longest - x.shape[1])) for x in parts]
        return torch.cat(parts)[: len(captions)]

    def images(self, images, encode="encode_image"):
        """Encode n images -> (n, E), or (n, P, E) if `encode` encodes patches.

        An image is a path, bytes, an open file, a PIL image, or a tensor (3, S, S) of uint8 or of
        floats in [0, 1]. All but tensors are cropped. The argument is an image, a list of images,
        or a tensor (n, 3, S, S). `workers` threads read the images, `chunk` at a time. Raises
        UserError for another argument, or if an image cannot be read.
        """
        images = [images] if torch.is_tensor(images) and images.ndim == 3 else as_list(images)
        some = images or [torch.zeros(3, self.image_size, self.image_size)]  # to get the width E
        pairs = zip(some, itertools.repeat(None))
        return self.encode_pairs(pairs, encode, read=self.read_given)[0][: len(images)]

    def read_given(self, image, place=0):
        """`read` an image that a caller has given -> floats, because a list may mix uint8 and
        floats. Raises UserError, with the place in the list, if the image cannot be read."""
        is_path = isinstance(image, (str, os.PathLike))
        name = image if is_path else f"Image {place}, a {type(image).__name__},"
        # two threads must not read the same open file; a PIL image may still read from its file
        is_open = hasattr(image, "read") or isinstance(image, Image.Image)
        alone = LOADING if is_open else contextlib.nullcontext()
        problem = f"{name!s:.200} cannot be read"
        with alone, common.explained(Exception, problem, f". {IMAGE_FORMS}"):
            return common.to_unit(self.read(image))

    def maps(self, image, caption):
        """An image, in any form of `images`, and a caption -> a dict of weights:

            tokens   the L tokens of the caption, with [CLS] and [SEP]
            patches  numpy (n, h, w), n maps of weights of the patches. SPARC has a map of weights
                     for each token (Eq. 4). STAIR has a map of scores for each token (Fig. 10).
                     SPARO has a map of weights for each slot
            words    numpy (n, L), for SPARO only: the weights that each slot gives to the tokens

        Models of other methods have no maps. Raises UserError for such a model.
        """
        model = self.model
        x = self.read_given(image)[None].to(self.device)
        tokens, mask = self.tokenize([caption])
        found = {"tokens": [self.tokenizer.vocab[token] for token in tokens[0]]}
        if model.align_words:
            maps = self.compute(model.align_words, x, tokens, mask)[0]      # (L, P)
        elif model.slots:
            both = lambda *inputs: torch.cat(model.attend(*inputs)[1::-1], -1)  # over text, image
            maps = self.compute(both, x, tokens, mask)[0]                   # (n, L + [1 +] P)
            found["words"] = maps[:, : len(found["tokens"])].numpy()        # (n, L)
        elif model.word_maps:
            maps = self.compute(functools.partial(model.word_maps, ids=tokens[0]), x)[0].T  # (L, N)
        else:
            raise UserError("This model has no maps: give a run of SPARC, of STAIR, or with slots.")
        grid = [math.ceil(side / model.image_encoder.patch_size) for side in x.shape[2:]]
        # (n, h, w); the last columns are the patches
        return found | {"patches": maps[:, -math.prod(grid) :].unflatten(1, grid).numpy()}

    def encode_batches(self, batches, encode="encode_image"):
        """Batches of images (b, 3, S, S) -> encodings (n, E) or (n, P, E), on this rank alone."""
        return torch.cat([self.compute(encode, x.to(self.device)) for x in batches])

    def encode_pairs(self, pairs, encode="encode_image",
                     collect=lambda parts: torch.cat([*parts]), read=None):
        """Pairs (image or file, value) -> encodings (n, E) or (n, P, E) of the n images that can be
        read, and the list of the n values of these images. collect(parts) joins the encodings of
        many parts. read(file, number of the pair) -> image. Without `read` the image is a centre
        crop."""
        values, read = [], read or (lambda image, number: self.read(image))
        # row: (number, pair)
        attempt = lambda row: common.with_image(sample_of(*row[1]), read, row[0])

        def compute(piece):
            counts = {}
            samples = [*common.usable(in_threads(attempt, piece, self.workers), counts)]
            with common.explained(RuntimeError, "Tensors of a list need one size"):
                batches = [torch.stack([sample.file for sample in samples])] if samples else []
            x = [self.encode_batches([batch], encode) for batch in batches]
            return x, [sample.value for sample in samples], counts

        def encoded():
            skipped = []
            for x, used, counts in self.in_parts(enumerate(pairs), compute, "images"):
                values.extend(used)
                skipped.append(counts)
                yield from x
            report_unreadable(common.total_skipped(skipped), len(values))

        return collect(encoded()), values

    @torch.no_grad()
    def similarity(self, images, texts):
        """Encodings of n images and of m captions -> scores (n, m)."""
        if not self.model.late_interaction:
            return torch.inner(images, texts)
        return self.model.similarity(images.to(self.device), texts.to(self.device)).cpu()

    def pair_scores(self, images, texts):
        """Encodings of n images and of n captions -> scores (n,) of image i with caption i."""
        # `similarity` compares all images of a part with all captions of the part. Only the
        # diagonal is used, so parts of 16 waste less.
        parts = zip(images.split(16), texts.split(16))
        return torch.cat([self.similarity(x, y).diagonal() for x, y in parts])

    def classify(self, images, classes):
        """Encodings of n images, C classes -> zero-shot scores (n, C)."""
        if not self.model.late_interaction:
            kept = 1 if self.mask is None else self.mask > 0  # leaves out slots with weight 0
            return torch.inner(images, class_embeddings(self.texts, classes, kept))
        # tokens of different prompts cannot be averaged, so the scores of the prompts are averaged
        scores = self.similarity(images, self.texts(classes.prompts))       # (n, C * T)
        return scores.unflatten(1, (len(classes.names), -1)).mean(2)


# A run and its options ------------------------------------------------------------------
#
# The directory of a run holds the files that the model needs: config.json, vocab.txt and a
# checkpoint.


def new_embedder(model, tokenizer, args, device):
    """A model and the settings `args` of its run -> Embedder."""
    if model.encode_text is None:  # a model that learns from captions may encode only images
        tokenizer = None
    context = model.text_encoder.context if tokenizer else None
    size = model.image_encoder.image_size
    model.eval()
    return Embedder(model, tokenizer, context, size, device, workers=reading_threads(args))


def reading_threads(args):
    """The number of threads that read images if --workers is not given. The number is --workers of
    the run, but at least the smaller of 8 and the number of cores of the rank."""
    return max(args.workers or 0, min(8, common.cores_of_rank()))


def settings_of_run(run):
    """The directory of a run -> the method and the settings of the run. Relative paths in the
    settings start at the directory in which the run was trained. In another directory they become
    absolute. Raises UserError if the directory holds no run."""
    saved = common.read_config(run)
    method = METHODS.get(saved.get("method"))
    if method is None:
        raise UserError(f"{run} has the method {saved.get('method')!r}: give a run of train.py.")
    args = method.Settings()
    vars(args).update(saved)
    home, here = saved.get("directory", os.getcwd()), os.getcwd()
    for name in ("data", "eval_data", "image_root"):
        spec = saved.get(name)
        if spec and home != here and not is_shapes(spec):
            setattr(args, name, "::".join(os.path.join(home, part) for part in spec.split("::")))
    return method, args


def load_run(run, device="cpu", checkpoint="last.pt"):
    """A run's directory -> (Embedder, settings).

        model, args = eval.load_run("runs/sparc")
        x = model.images(["a.jpg", Image.open("b.jpg")])  # (2, E), normalised
        t = model.texts(["a cat"])                        # (1, E)
        model.similarity(x, t)                            # (2, 1)

    Raises UserError if the directory holds no run, or its files do not fit together.
    """
    method, args = settings_of_run(run)
    tokenizer = common.open_tokenizer(Path(run, "vocab.txt")) if method.uses_text(args) else None
    model = common.build_model(method, args, *common.build_encoders(method, args, tokenizer))
    state = common.load_checkpoint(Path(run, checkpoint))
    if not isinstance(state, dict) or state.get("method") != args.method:
        raise UserError(f"{run}/{checkpoint} holds no {args.method} model: give one of this run.")
    common.restore_model(model, state["model"], f"{run}/{checkpoint}", "config.json and vocab.txt "
                         "next to it must be those that the run wrote")
    if tokenizer and state["words"] != tokenizer.hash():
        raise UserError(f"{run}/vocab.txt has other words than the run: put back the run's file.")
    with common.explained((RuntimeError, AssertionError), f"--device {device} cannot be used"):
        embedder = new_embedder(model.to(device), tokenizer, args, device)
    embedder.step, embedder.tells = state["step"], True
    return embedder, args


# Data: one interface to every kind --------------------------------------------------------
#
# A task asks an EvalSet for pairs, and need not know how the pairs are stored. A member of an
# EvalSet is None if the data have no such pairs.

TEMPLATES = ["a photo of {a}.", "{a}", "a close-up of {a}.", "a picture of {a}."]
BROKEN = OSError, SyntaxError, ValueError  # errors of PIL for files that it cannot read
VOC_CLASSES = [
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "dining table", "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train",
    "tv monitor"]


class Classes:
    """Names of C classes, and their prompts: C * T strings. The T prompts of the first class come
    first.

    templates: T strings. {} stands for the name of a class. {c} also stands for the name, because
    files of CLIP_benchmark have {c}. {a} stands for the name with its article. source: the file or
    data set with the names.
    """

    def __init__(self, names, templates=None, source=None):
        self.names, self.source, self.prompts = names, source, []
        self.templates = templates or TEMPLATES
        for name in names:
            words = {"a": common.article(name), "c": name}
            self.prompts += [template.format(name, **words) for template in self.templates]


def read_templates(given):
    """The values of --templates -> list of templates. The values are templates, or one file of
    templates. Raises UserError for a template that does not have exactly one placeholder."""
    if len(given) == 1 and common.look_at(given[0]) == "file":
        given = common.read_list(given[0], "--templates")
    for template in given:
        if re.findall(r"\{\w*\}|[{}]", template) not in (["{}"], ["{a}"], ["{c}"]):
            raise UserError(f"--templates: {template!r} needs one {{}}, the name of a class, or "
                            "{a}, the name with its article; or give a file, a template a line.")
    return given


# The evaluation that ends a training uses a sample of the data, because it must be fast.
# `eval.py --data SPEC` uses all images of SPEC.
TEST_LIMIT, LEARN_LIMIT = 1000, 20_000  # number of images to evaluate, and to learn from
# Options that change no metric. evals.jsonl does not record these options.
NOT_OF_METRICS = set("query export workers batch device is_own given".split())


@dataclasses.dataclass
class Flags:
    """The flags of eval.py. The comment behind a field or above a field is the help of its flag."""

    # data to evaluate on: a SPEC of train.py, or a directory in the layout of CLIP_benchmark,
    # Pascal VOC, DAVIS 2017, Winoground or SugarCrepe. Without --data the data are --eval-data of
    # the training or, if the training had none, --data of the training
    data: list[str] | None = None
    # directory of the image files that --data names by relative paths. Without --image-root the
    # paths are relative to the directory of the FILE, to DIR/images for Winoground, or to the
    # current directory for SugarCrepe
    image_root: str | None = None
    # split of --data, if the data have splits. Without --split the split is val for Pascal VOC and
    # DAVIS, and test for other data. --data FILE:split=NAME overrides --split
    split: str | None = None
    # largest number of samples for each task and picture, > 0. The samples of class folders and of
    # labelled shards are random. Other data give their first samples. Without --limit all samples
    # of --data are used. Without --limit and --data, 1,000 samples are evaluated, and k-NN and
    # probes learn from 20,000 samples
    limit: int | None = None
    # file of class names for --data, one name a line. A line with a folder's name, or with its
    # number and a name, belongs to this folder. Else, for class folders, the first line names the
    # first folder in sorted order. For shards, the first line names label 0. If --data are class
    # folders and --train-data are shards, the lines may be the names of the folders in the order of
    # the labels. --select has names of its own
    classes: str | None = None
    # prompts for zero-shot classification, or one file with a prompt on each line. {} in a prompt
    # stands for the name of a class. {a} stands for the name with its article
    templates: list[str] | None = None
    # words to put before each caption in retrieval. STAIR has "a photo of" (Sec. 4.3)
    caption_prefix: str | None = None
    # file of nouns and adjectives, one word a line. Retrieval then also measures K-Pna, the
    # K-Precision of these words (SPARC, Sec. 4.4). shapes needs no file
    nouns_adjectives: str | None = None

    # names of tasks and pictures, joined by commas. The end of this help lists the names. Without
    # --task the tasks are those that run at the end of a training. All pictures that fit the data
    # and the model are then drawn
    task: str | None = None
    # data for the tasks `slots` and `masks`, which need --select unless --data is shapes. Task
    # `slots` ranks the slots on these images with classes (SPARO, Sec. 5.1, has ImageNet's
    # validation images). Task `masks` trains the masks on these SugarCrepe files (Sec. 5.2). A
    # directory in CLIP_benchmark's layout is DIR:split=NAME. Without :split=NAME the split is train
    select: str | None = None
    # directory of the image files that --select names by relative paths
    select_root: str | None = None

    # images that k-NN and probes learn from: class folders, or shards with labels. Without
    # --train-data they learn from the split train of --data. If --data has no such split, they
    # learn from the training data of the run
    train_data: str | None = None
    # labels that k-NN and probes learn from: a fraction of each class, or a file with the name or
    # the path of an image on each line. Without --label-fraction they learn from all labels
    label_fraction: str | None = None
    # how the linear probe is trained. adamw: as in SPARO (C.1). sgd: as in BAM (D.1). lbfgs: by
    # logistic regression, as in the transfer learning of BAM (D.3). Without --probe the value is
    # that of the training
    probe: Literal["adamw", "sgd", "lbfgs"] | None = None
    # learning rate of --probe sgd, > 0. BAM has .002 for ViT and .3 for ResNet-50 (Table 9b). With
    # --probe-lr the probe learns from all training images. Without --probe-lr it learns from nine
    # tenths with five rates, and takes the rate that is best on the last tenth
    probe_lr: float | None = None

    # queries, for which the command searches the images of --data instead of evaluating. A query is
    # a caption. For STAIR a query may also be words with AND, OR, NOT and parentheses (App. D).
    # Each command encodes all images, so give several queries to one command
    query: list[str] | None = None

    # file in RUN with the weights to evaluate, for example step-10000.pt, or stage-1.pt of STAIR
    checkpoint: str = "last.pt"
    # new file for the weights of the image encoder, under the parameter names of timm. The command
    # writes this file instead of evaluating. Its key "model" holds the weights of a ViT without a
    # stem, such as tiny-patch:cls=1
    export: str | None = None

    # number of threads that read images. Without --workers the number is that of the training. If
    # that is less than 8, the number is 8, or the number of CPU cores if there are fewer
    workers: int | None = None
    # number of images or captions that are encoded at a time, > 0
    batch: int = 256
    # torch device, for example cpu, cuda or cuda:1. Without --device the command uses a GPU, or the
    # CPU if there is no GPU
    device: str | None = None
    # precision of the encoders. bf16 is faster on a GPU, and changes the metrics a little. Without
    # --amp the precision is fp32 (off)
    amp: Literal["bf16", "off"] = "off"

    @property
    def tasks(self):
        """The names of --task, or []."""
        return self.task.split(",") if self.task else []


# {first flag of a group in --help: title of the group}
GROUPS = {"task": "tasks", "train_data": "k-NN and probes", "query": "search",
          "checkpoint": "weights", "workers": "machine"}


@dataclasses.dataclass
class Options(Flags):
    """The options of one evaluation: the flags, of which `data` is one SPEC here, and values that
    depend on the flags and on the settings of the run."""

    learn_limit: int | None = None    # number of images that k-NN and probes learn from; None: all
    on_training_images: bool = False  # whether the images are training data of the run
    is_own: bool = False              # whether this is the evaluation that ends the training
    # names of the flags on the command line
    given: tuple = dataclasses.field(default=(), compare=False)


def options_of(given, args):
    """The options of one evaluation. A flag that is not given gets its value from the settings of
    the run, or gets its default.

    given: {name: value} of the flags that are given; `data` is one SPEC. args: the settings of the
    run.
    """
    given = {name: value for name, value in given.items() if value != getattr(Options, name)}
    options = Options(data=args.eval_data or args.data, workers=reading_threads(args),
                      probe=args.probe)
    if "data" not in given:
        options.image_root, options.limit = args.image_root, TEST_LIMIT
        options.learn_limit = LEARN_LIMIT
    vars(options).update(given, given=tuple(given))
    kind, settings = kind_of(options.data), common.parse_spec(options.data)[1]
    options.split = settings.get("split") or options.split or kind.split
    # Without --train-data, k-NN and probes learn from the split train of the data. If there is no
    # such split, they learn from the training data of the run. They do not if the training data are
    # the data to evaluate, or are `shapes`, which has other classes.
    if not options.train_data and "train" in kind.splits(options.data):
        options.train_data = options.data
    elif not options.train_data and args.data != options.data and not is_shapes(args.data):
        options.train_data = args.data
    if options.templates:
        options.templates = read_templates(options.templates)
    elif args.folder_captions and not is_shapes(options.data):
        # a training on class folders makes the caption of each class from this template
        options.templates = [common.FOLDER_CAPTION]
    options.on_training_images = is_trained_on(options.data, options.split, args)
    options.is_own = given.keys() <= NOT_OF_METRICS | {"task"}
    return options


def is_trained_on(spec, split, args):
    """Whether the images are from the training data of the run, also if --label-fraction has left
    out some of them. `shapes` never shows a test scene in training."""
    name, learned = common.parse_spec(spec)[0], common.parse_spec(args.data)
    if is_shapes(spec) or Path(name).resolve() != Path(args.data_path):
        return False
    return split in ("all", learned[1].get("split", "train"))


def note_useless_flags(options, rows=()):
    """Print a note for each flag of the command line that neither the data nor the tasks and
    pictures `rows` read. Without the note a user would believe that the flag had an effect."""
    useless = {flag for row in [*TASKS.values(), *PICTURES.values()] for flag in row.flags}
    useless -= {flag for row in rows for flag in row.flags}
    if options.probe != "sgd":
        useless.add("probe_lr")
    if kind_of(options.data).split == "all" or "split" in common.parse_spec(options.data)[1]:
        useless.add("split")
    for flag in filter(useless.__contains__, options.given):
        print(f"note: {common.flag_of(flag)} has no effect here")


@dataclasses.dataclass
class EvalSet:
    """Data to evaluate on. Each kind of data has these members. A member is None if the data cannot
    give its values.

    A pair is (image, value). The image is a tensor (3, S, S), or a file, which may be unreadable.
    The argument `purpose` says what the pairs are for. `shapes` draws other scenes for each
    purpose. Files give the same pairs for all purposes.

    `groups` is a dict of groupings of the C classes. A grouping is a pair: a tensor (C,) with the
    group of each class, and the list of the names of the groups. Tasks compute their metric for
    each grouping, and append the key of the grouping to the name of the metric. The key "" is the
    grouping in which each class is a group by itself. A class of `shapes` is one of 64 pairs of a
    colour and a shape. So `shapes` also has the groupings "/colour" and "/shape". The dicts `maps`
    and `map_classes` have the same keys.
    """

    image_size: int = None         # S, in pixels
    classes: Classes = None        # names and prompts of the classes, for tasks with text
    groups: dict = None            # {key: (group of each class (C,), names of groups)}
    unseen: torch.Tensor = None    # (C,) True for classes that training never shows
    rare_classes: list = None      # numbers of the classes that AP_rare averages
    map_classes: dict = None       # {key: Classes} of `maps`
    content_words: set = None      # nouns and adjectives, which K-Pna counts
    pool: int = None               # number of images that retrieval ranks together; None: all
    is_world: bool = False         # whether the data are `shapes`, which has its own splits to
                                   # learn from and to choose slots and masks
    options: Options = None        # the options with which the data were opened
    source: object = None          # the object from common.open_data. Shards look up labels in its
                                   # `classes`, which a task may set later
    labelled: Callable = None      # (purpose) -> pairs (image, class id)
    captioned: Callable = None     # (purpose) -> pairs (image, list of captions)
    hard_negatives: Callable = None  # () -> pairs (image, [(kind, caption, wrong caption), ...])
    examples: Callable = None      # () -> pairs (image, (number of the example, caption)); each
                                   # example has two pairs
    maps: Callable = None          # (purpose) -> pairs (image, {key: class ids (H, W) from 1})
    videos: Callable = None        # (patch size) -> pairs (function () that yields the f frames
                                   # (3, h, w) of a video, object ids (f, H, W) from 1)
    boxes: Callable = None         # () -> pairs (image, padded to a square; common.Boxes)
    word_masks: Callable = None    # () -> pairs (image, (caption, {(kind, word): mask (S, S)}))

    @functools.cached_property  # k-NN and the linear probe share the opened data
    def learn(self):
        """() -> pairs (image, class id) that k-NN and probes learn from, see open_to_learn."""
        return open_to_learn(self.options, self)


class FileSet(EvalSet):
    """Images of a SPEC of train.py, with captions, or with labels of class folders or shards.

    Labels of shards have no names. So k-NN and probes can learn from shards, but only a classifier
    can be evaluated on shards.
    """

    def __init__(self, source, options, content):
        def each(purpose):  # a random sample of shards needs all headers; the first pair needs one
            return source.each(content, None if purpose == "first" else options.limit)

        self.source = source
        if content == "caption":
            self.captioned = each
        else:
            self.labelled = each
        if source.classes:
            self.groups = {"": (torch.arange(len(source.classes)), source.classes)}

    @functools.cached_property  # names may be missing, and only tasks with text need them
    def classes(self):
        names, source = common.class_names(self.source.classes, self.options.classes)
        return Classes(names, self.options.templates, source)


def class_ids(data, known, is_numbered):
    """The number in the list `known` of each class of `data` -> list, or None if the data have
    other classes.

    Class folders, and shards in CLIP_benchmark's layout, name their classes. Other shards only
    number them. Then line i of --classes is the name of label i. If the names do not fit, or if
    there are none, label i is class i if `is_numbered`, or if the names in `known` are numbers.
    """
    if data.groups:
        return common.match_names(data.groups[""][1], known)
    file = data.options.classes
    ids = common.match_names(common.read_lines(file, "--classes"), known) if file else None
    if ids is None and (is_numbered or known == [str(i) for i in range(len(known))]):
        ids = range(len(known))
    data.source.classes = ids and [known[i] for i in ids]
    return ids


def open_benchmark(options, *_):
    """A directory in CLIP_benchmark's layout -> EvalSet.

    The shards are SPLIT/0.tar, SPLIT/1.tar and so on. SPLIT/nshards.txt holds their number. If
    dataset_type.txt says "retrieval", KEY.txt holds the captions of a sample. Otherwise KEY.cls
    holds the label of a sample. A label is the number of a line of classnames.txt, counted from 0.
    Raises UserError if a file is missing or wrong.
    """
    directory, limit, given = options.data, options.limit, options.classes
    split = Path(directory, options.split)
    with common.explained(ValueError, f"{split}/nshards.txt", "; it is the number of tars"):
        n = int(common.read_text(split / "nshards.txt", "--data"))
    shards = common.TarShards(f"{split}/{{0..{n - 1}}}.tar")
    if options.query:  # a search needs neither labels nor captions
        return EvalSet(labelled=lambda purpose: shards.each(None, limit))
    kind = Path(directory, "dataset_type.txt")
    kind = common.read_text(kind, "--data").strip().lower() if common.look_at(kind) else ""
    if kind == "retrieval":
        return EvalSet(captioned=lambda purpose: itertools.islice(shards.each("caption"), limit))
    source = f"{directory}/classnames.txt"
    source = source if common.look_at(source) else given or source
    names = common.read_lines(source, "--classes")  # an empty line stays: CLEVR has an empty name
    groups = {"": (torch.arange(len(names)), names)}
    shown, source = common.class_names(names, given) if given else (names, source)
    templates, file = options.templates, f"{directory}/zeroshot_classification_templates.txt"
    if not templates and common.look_at(file):
        templates = read_templates([file])

    shards.classes = names
    return EvalSet(classes=Classes(shown, templates, source), groups=groups, source=shards,
                   labelled=lambda purpose: shards.each("label", limit))


def open_winoground(options, *_):
    """A directory with examples.jsonl of Winoground -> EvalSet, with at most --limit examples.
    --image-root is the directory of the images NAME.png. Raises UserError for a line that lacks one
    of the four fields."""
    file, pairs = Path(options.data, "examples.jsonl"), []
    root = options.image_root or Path(options.data, "images")
    for number, line in enumerate(common.read_list(file, "--data")[: options.limit]):
        with common.explained((ValueError, KeyError, TypeError), f"{file}, sample {number + 1}",
                              "; it must have image_0, image_1, caption_0, caption_1"):
            row = json.loads(line)
            for i in (0, 1):
                image = str(Path(root, f"{row[f'image_{i}']}.png"))
                pairs.append((image, (number, row[f"caption_{i}"])))
    return EvalSet(examples=lambda: pairs)


def sugarcrepe_files(directory):
    """The JSON files of a directory with a field of SugarCrepe in their first 4,000 bytes. One file
    may take the place of the directory."""
    is_directory = common.look_at(directory) == "directory"
    files = common.matching(f"{directory}/*.json") if is_directory else [directory]
    # other JSON files may be large, so they are not read as a whole
    return [Path(file) for file in files if common.file_holds(file, "negative_caption", 4000)]


def open_sugarcrepe(options, *_):
    """A directory with the files of SugarCrepe, one for each kind of negative, or one such file ->
    EvalSet, with at most --limit images. Raises UserError for an item that lacks one of its three
    fields."""
    root = options.image_root or "."
    # The negatives are grouped by image, so that an image with several negatives is encoded once.
    negatives_of = collections.defaultdict(list)
    for file in sugarcrepe_files(options.data):
        with common.explained((ValueError, KeyError, TypeError, AttributeError), file,
                              "; its items must have filename, caption and negative_caption"):
            for item in json.loads(file.read_text(encoding="utf-8")).values():
                negative = (file.stem, item["caption"], item["negative_caption"])
                negatives_of[str(Path(root, item["filename"]))].append(negative)
    pairs = [(path, [*dict.fromkeys(found)]) for path, found in negatives_of.items()]
    return EvalSet(hard_negatives=lambda: pairs[: options.limit])


def open_voc(options, image_size, _):
    """A directory in the layout of Pascal VOC -> EvalSet with maps.

    ImageSets/Segmentation/SPLIT.txt lists ids. JPEGImages/ID.jpg is an image.
    SegmentationClass/ID.png is the map of class ids of the image. Class 0 is the background. Pixels
    with 255 do not count. An image is resized to a square, not cropped, so that the patches cover
    the map. Raises UserError for a map of another form, or with a class that has no name.
    """
    directory = Path(options.data)
    file = directory / "ImageSets" / "Segmentation" / f"{options.split}.txt"
    ids = common.read_list(file, "--data")[: options.limit]
    names = common.read_lines(options.classes, "--classes") if options.classes else VOC_CLASSES
    if names and names[0].strip("_").lower() == "background":
        names = names[1:]  # class 0 is no object
    classes = Classes(names, options.templates, options.classes or "Pascal VOC")

    def read(name):
        """An id -> image (3, S, S), {"": map (H, W)}."""
        path = directory / "SegmentationClass" / f"{name}.png"
        truth = read_ids(path)
        image = common.open_image(directory / "JPEGImages" / f"{name}.jpg")
        common.check_sides(image, truth.shape[::-1])
        highest = truth.masked_fill(truth == 255, 0).max()
        if highest > len(names):
            raise UserError(f"{path} has class {highest}; {len(names)} have names: give --classes.")
        return common.squeezed(image, image_size), {"": truth}

    def maps(purpose):
        pairs = ((name, None) for name in ids)
        return (pair for pair, _ in read_images(pairs, read, options.workers))

    return EvalSet(classes=classes, map_classes={"": classes}, maps=maps)


def open_boxes(source, options, image_size):
    """A common.BoxTable -> EvalSet with boxes."""
    truths = dict(source.each("boxes", options.limit))

    def read(file):
        image = common.open_image(file)
        common.check_sides(image, truths[file].size)
        return common.squared(image, image_size)

    return EvalSet(classes=Classes(source.names, options.templates, source.name),
                   rare_classes=source.rare,
                   boxes=lambda: read_images(truths.items(), read, options.workers))


def read_ids(path):
    """A file with an id for each pixel -> (H, W) of uint8. Raises UserError for other files."""
    with Image.open(path) as file:
        ids = torch.from_numpy(np.array(file))
    if ids.ndim != 2 or ids.dtype != torch.uint8:
        raise UserError(f"{path} is no map of class ids of 8 bits: {ids.dtype} {[*ids.shape]}.")
    return ids


def open_davis(options, *_):
    """A directory in the layout of DAVIS 2017 -> EvalSet with videos.

    ImageSets/2017/SPLIT.txt lists videos. JPEGImages/480p/VIDEO/NAME.jpg is a frame.
    Annotations/480p/VIDEO/NAME.png is the map of object ids of the frame. The ids 0 and 255 are
    background. Raises UserError for a video without frames to measure or without objects to follow.
    Also raises UserError for a map of another form or size.
    """
    directory = Path(options.data)
    file = directory / "ImageSets" / "2017" / f"{options.split}.txt"
    names = common.read_list(file, "--data")[: options.limit]
    files = [davis_files(directory, name) for name in names]

    def videos(patch_size):
        for pairs in files:
            truth = read_objects(pairs)
            yield functools.partial(read_frames, pairs, truth.shape[:0:-1], patch_size), truth

    return EvalSet(videos=videos)


def davis_files(directory, name):
    """The files of a video: a list of pairs (frame, map)."""
    frames, maps = (directory / part / "480p" / name for part in ("JPEGImages", "Annotations"))
    of_frames = {path.stem for path in frames.glob("*.jpg")}
    stems = sorted({path.stem for path in maps.glob("*.png")}, key=common.natural)
    files = [(frames / f"{stem}.jpg", maps / f"{stem}.png") for stem in stems]
    # the map of the first frame is given, and the last frame does not count
    if len(stems) < 3 or of_frames != {*stems} or not read_objects(files[:1]).any():
        raise UserError(f"The video {name} needs at least three frames, a map for each, and "
                        f"objects 1, 2, ... in the first map (not 255, as in DAVIS 2016): {frames} "
                        f"has {len(of_frames)} frames, {maps} has {len(stems)} maps.")
    return files


def read_objects(files):
    """Pairs (frame, map) of files -> object ids (f, H, W), uint8, 0 for the background. The objects
    of the first map get the ids 1, 2 and so on without a gap, because an id without an object would
    count as found. Objects that the first map lacks are background, as in the code of DAVIS."""
    truth = []
    for _, path in files:
        with common.explained(BROKEN, f"The map {path} cannot be read"):
            truth.append(common.patiently(read_ids, path))
            if truth[-1].shape != truth[0].shape:
                raise ValueError(f"its size is not that of the first map, {files[0][1]}")
    objects = [i for i in truth[0].unique().tolist() if 0 < i < 255]
    numbers = [1 + objects.index(i) if i in objects else 0 for i in range(256)]
    return torch.tensor(numbers, dtype=torch.uint8)[torch.stack(truth).int()]


def read_frames(files, size, patch_size):
    """Pairs (frame, map) of files, (width, height) of the maps -> yields the frames (3, h, w). The
    shorter side is 480 and the longer side is a multiple of 64, as in the code of DINO. Then each
    side is reduced to a multiple of patch_size."""
    for file, _ in files:
        with common.explained(BROKEN, f"{file} cannot be read"):
            image = common.patiently(common.open_image, file)
            common.check_sides(image, size)
        sides = [side * 480 // min(image.size) for side in image.size]
        sides = [side if side == 480 else side // 64 * 64 for side in sides]
        sides = [side // patch_size * patch_size for side in sides]
        image = image.resize(sides, Image.Resampling.BILINEAR)
        yield pil_to_tensor(image)


def open_source(options, image_size, content):
    """A SPEC of train.py -> EvalSet."""
    source = common.open_data(options.data, options.image_root, options.split, image_size, content)
    if is_shapes(options.data):
        return WorldSet(source, options)
    if source.skipped:
        print(f"left out of {source.name}: {common.describe_skipped(source.skipped)}")
    if content == "boxes":
        return open_boxes(source, options, image_size)
    if source.unit == "shards":
        return FileSet(source, options, None if options.query else "label")
    return FileSet(source, options, "label" if source.classes else "caption")


def is_shapes(spec):
    return common.parse_spec(spec)[0] == "shapes"


def has(name):
    """A function (SPEC) -> whether the directory SPEC has a file or a directory of this name."""
    return lambda spec: common.look_at(f"{spec}/{name}")


def lists_in(directory):
    """A function (SPEC) -> the names of the splits that have a list SPLIT.txt in this directory."""
    return lambda spec: [Path(path).stem for path in common.matching(f"{spec}/{directory}/*.txt")]


def benchmark_splits(spec):
    """The splits of a directory in the layout of CLIP_benchmark."""
    found = common.list_directory(spec) if common.look_at(spec) == "directory" else []
    names = [entry.name for entry in found
             if common.is_directory(entry) and common.look_at(f"{entry.path}/nshards.txt")]
    return sorted(names, key=common.natural)


class Kind(NamedTuple):
    """A row of KINDS."""

    fits: Callable                      # (SPEC) -> whether the data are of this kind
    open: Callable                      # (options, image size, content) -> EvalSet;
                                        # common.open_data explains `content`
    split: str = "all"                  # split without --split; "all": the data have no splits
    splits: Callable = lambda spec: []  # (SPEC) -> names of the splits of a directory


KINDS = [  # the kind of a SPEC is the first row that fits
    Kind(has("SegmentationClass"), open_voc, "val", lists_in("ImageSets/Segmentation")),
    Kind(has("ImageSets/2017"), open_davis, "val", lists_in("ImageSets/2017")),
    Kind(benchmark_splits, open_benchmark, "test", benchmark_splits),
    Kind(has("examples.jsonl"), open_winoground),
    Kind(sugarcrepe_files, open_sugarcrepe),
    Kind(is_shapes, open_source, "test"),
    Kind(common.has_splits, open_source, "test"),
    Kind(lambda spec: True, open_source)]  # tables without splits, class folders and shards


def kind_of(spec):
    """The row of KINDS for a SPEC."""
    return next(kind for kind in KINDS if kind.fits(spec))


def open_eval_set(options, image_size, content="caption"):
    """Open options.data -> EvalSet. content: what the images need, see common.open_data. Raises
    UserError if the data cannot be opened."""
    kind, spec = kind_of(options.data), options.data
    splits = kind.splits(spec)
    if splits and options.split not in splits:
        raise UserError(f"{spec} has no split {options.split}: give --split, one of "
                        f"{', '.join(splits)}; for --select and --train-data DIR:split=NAME.")
    data = kind.open(options, image_size, content)
    data.image_size, data.options = image_size, options
    if data.groups and len(data.groups[""][1]) < 2:  # one class tells nothing
        data.groups = None
    if options.nouns_adjectives:
        words = common.read_list(options.nouns_adjectives, "--nouns-adjectives")
        data.content_words = {word.lower() for word in words}
    return data


def open_second(options, data, spec, root, message):
    """Open a second data set `spec`, for --train-data or --select -> EvalSet.

    "DIR:split=NAME" names the split of a directory with splits. Without a name the split is
    "train". For other data the split is "val". root: the directory of the image files that `spec`
    names by relative paths. Raises UserError with the message if `spec` is None, or names the
    images to evaluate.
    """
    name, settings = common.parse_spec(spec or "")
    splits = kind_of(name).splits(name) if spec else []
    split = settings.get("split", "train" if splits else "val")
    spec = name if splits else spec
    is_same = spec and Path(spec).resolve() == Path(options.data).resolve()
    if spec is None or (is_same and (split == options.split or split not in splits)):
        raise UserError(message)
    # --label-fraction is a fraction of all images, so the number of images has no limit
    limit = None if options.label_fraction else options.learn_limit
    # --classes names the classes of --data, and of shards, which have no names of their own
    second = dataclasses.replace(options, data=spec, split=split, image_root=root, limit=limit,
                                 classes=options.classes if spec.lower().endswith(".tar") else None)
    return open_eval_set(second, data.image_size)


def open_to_learn(options, data):
    """Open the data that k-NN and probes learn from -> a function () that yields pairs (image,
    class id).

    `shapes` has a training split. Other data come from options.train_data, which is --train-data or
    the choice of options_of. Class folders are matched by their names, labels of shards by their
    numbers. --label-fraction leaves a part of the pairs. Raises UserError if there are no images to
    learn from, or if their classes are not the classes of the data to evaluate.
    """
    spec, names = options.train_data, data.groups[""][1]
    train, ids = data, range(len(names))
    if not data.is_world:
        train = open_second(options, data, spec, None, "k-NN and probes must learn from images "
                            "that they are not tested on: give other class folders or tar shards "
                            "with labels, by eval.py --train-data or train.py --eval-data.")
        # Lines of --classes that are no names of folders name the sorted folders. data.classes
        # raises UserError if the number of lines is wrong.
        is_numbered = data.source.unit == "shards" or (options.classes and data.classes)
        ids = class_ids(train, names, is_numbered) if train.labelled else None
    if ids is None:
        raise UserError(f"k-NN and probes learn from {spec}, which must have the class folders of "
                        f"{options.data}: {', '.join(names)}; change eval.py --train-data, or name "
                        "the classes of shards by eval.py --classes.")

    def pairs(purpose="train"):
        return ((image, ids[label]) for image, label in train.labelled(purpose))

    if not data.is_world:
        next(pairs("first"))  # raises UserError if no image has a label
    if options.label_fraction is None:
        return pairs
    # The first pass over names and labels chooses the images. The second pass yields them.
    rows = [(image if isinstance(image, str) else None, label) for image, label in pairs()]
    chosen = set(common.label_rows(*zip(*rows), options.label_fraction))
    return lambda: (pair for i, pair in enumerate(pairs()) if i in chosen)


def open_selection(options, data, task, chooser, needed):
    """Open the data that choose slots or masks -> EvalSet: the data of --select, or other scenes of
    `shapes`.

    The task named `chooser` must be able to run on these data. needed: the words for these data in
    error messages. Raises UserError if --select is missing, or if `chooser` cannot run on the data
    of --select.
    """
    spec, message = options.select, f"Task {task} needs --select, {needed}"
    if spec is None and data.is_world:
        return data
    selection = open_second(options, data, spec, options.select_root,
                            f"{message}, not the data to evaluate.")
    if not TASKS[chooser].fits(selection):
        raise UserError(f"{message}, but {spec} holds none.")
    return selection


COLOURS, SHAPES = common.COLOUR_NAMES, common.SHAPE_NAMES
PAIRS = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]     # i = 8 * colour + shape
WORLD_WORDS = {"small", "large", *COLOURS, *SHAPES, *map(common.plural, SHAPES)}
# The number of scenes of `shapes` that a task uses. Some tasks use half as many scenes. k-NN and
# probes learn from four times as many scenes.
WORLD_N = 1000


class WorldSet(EvalSet):
    """The drawn images of `shapes`. They fit all tasks but `video` and `winoground`."""

    groups = {"": (torch.arange(64), PAIRS), "/colour": (torch.arange(64) // 8, COLOURS),
              "/shape": (torch.arange(64) % 8, SHAPES)}
    content_words, is_world = WORLD_WORDS, True

    def __init__(self, world, options):
        self.world, self.split, self.limit = world, options.split, options.limit
        # The size is fixed, so that a search does not become harder with a larger --limit.
        self.pool = WORLD_N // 2
        templates = options.templates
        # Captions contain "a photo of" only if they have fillers, words that describe nothing. A
        # model that was trained without fillers does not know this prompt.
        usual = ["{a}", "a photo of {a}"] if world.fillers else ["{a}"]
        self.classes = Classes(PAIRS, templates or usual, "shapes")
        self.map_classes = {"/colour": Classes(COLOURS, [f"{{a}} {shape}" for shape in SHAPES]),
                            "/shape": Classes(SHAPES, usual)}
        self.unseen = ~torch.isin(torch.arange(64), torch.tensor(world.trained))
        self.rare_classes = self.unseen.nonzero()[:, 0].tolist()

    def scenes(self, purpose):
        """A sample of World.sample for a purpose. Each call with the same purpose returns the same
        sample."""
        few, most = min(3, self.world.objects), self.world.objects
        n, split, seed, objects = {
            # purpose: (number of scenes, split, seed, objects in each scene; None: 1 to `most`)
            "train": (4 * WORLD_N, "train", 9, 1),
            "slots": (WORLD_N, "val", 8, 1),
            "zeroshot": (WORLD_N, self.split, 1, 1),
            "captioned": (WORLD_N // 2, self.split, 2, most),
            "negatives": (WORLD_N, self.split, 3, few),
            "segmentation": (WORLD_N // 2, self.split, 5, most),
            "samples": (WORLD_N // 2, self.split, 6, few),
            "search": (WORLD_N, self.split, 7, None),
            "test": (WORLD_N, self.split, 9, 1),
            "boxes": (WORLD_N // 2, self.split, 11, None),
        }[purpose]
        if self.limit and purpose not in ("train", "slots"):
            # A limit up to TEST_LIMIT is the largest number of scenes of each purpose. A larger
            # limit multiplies the number of scenes of each purpose by limit / TEST_LIMIT.
            n = max(min(n, self.limit), n * self.limit // TEST_LIMIT)
        return self.world.sample(n, split, seed, objects)

    def labelled(self, purpose):
        """Scenes of one object. The class is the pair of its colour and its shape. Classes that
        training never shows are left out, except for the purposes "zeroshot" and "slots", which
        need no training images."""
        sample = self.scenes(purpose)
        scene = sample["scene"]
        ids = scene["colour"] * 8 + scene["shape"]                          # (n, 1)
        for image, c in zip(sample["images"], ids[:, 0].tolist()):
            if purpose in ("zeroshot", "slots") or not self.unseen[c]:
                yield image, c

    def captioned(self, purpose):
        """Two captions for each scene, or one caption for the purpose "samples"."""
        sample, rng = self.scenes(purpose), random.Random(2)
        if purpose == "samples":
            yield from zip(sample["images"], [[caption] for caption in sample["captions"]])
            return
        for image, objects in zip(sample["images"], sample["objects"]):
            yield image, [self.world.caption(objects, rng) for _ in range(2)]

    def hard_negatives(self):
        """Hard negatives of the kinds of SugarCrepe that the scene allows."""
        sample, rng = self.scenes("negatives"), random.Random(3)
        for image, objects in zip(sample["images"], sample["objects"]):
            pairs = self.world.hard_negatives(objects, rng)
            yield image, [(kind, *pairs[kind]) for kind in sorted(pairs)]

    def maps(self, purpose):
        """Maps of colours and of shapes."""
        sample = self.scenes(purpose)
        truths = {grouping: label_maps(sample, grouping) for grouping in self.map_classes}
        for i, image in enumerate(sample["images"]):
            yield image, {grouping: ids[i] for grouping, ids in truths.items()}

    def boxes(self):
        sample = self.scenes("boxes")
        return zip(sample["images"], common.world_boxes(sample))

    def word_masks(self):
        """Yields image, (caption, masks, objects). The dict `masks` has a mask for each colour and
        each shape of a scene. The mask covers the objects of this colour or shape. The dict has the
        mask of a shape under the singular and under the plural of its name, because a caption may
        have either word. `objects` is the mask of all objects."""
        sample = self.scenes("samples")
        names = "images", "captions", "objects", "segmentation"
        for image, caption, objects, ids in zip(*[sample[name] for name in names]):
            masks = collections.defaultdict(lambda: torch.zeros_like(ids, dtype=torch.bool))
            for k, o in enumerate(objects, 1):
                plural = common.plural(o["shape"])
                for word in (("colour", o["colour"]), ("shape", o["shape"]), ("shape", plural)):
                    masks[word] = masks[word] | (ids == k)
            yield image, (caption, masks, ids > 0)


def label_maps(sample, grouping):
    """A World sample -> maps (n, S, S): 1 + the class id on an object, 0 on the background."""
    ids = F.pad(sample["scene"][grouping[1:]] + 1, (1, 0))                  # (n, 1 + K)
    segmentation = sample["segmentation"]
    return ids.gather(1, segmentation.flatten(1)).view_as(segmentation)


# Tasks ------------------------------------------------------------------------------------
#
# A task is a function of an Embedder, an EvalSet and the options of eval.py. The function returns
# {metric: result}. A result is a number, or a tensor whose mean is the metric. If the value of a
# random guess is known, the result is a tuple (value, chance). Most metrics are called TASK or
# TASK/NAME. TASK_OF in tests/claims.py gives the tasks of metrics with other names. Tasks for any
# model come first.
#
# A task reads pairs by data.captioned(purpose) or data.labelled(purpose). WorldSet.scenes lists the
# purposes. embedder.encode_pairs(pairs, embedder.model.encode_image) returns vectors (n, E).
# default_tasks lists the tasks that run without --task.


def encode_labelled(embedder, pairs, encode="encode_image", **options):
    """Pairs (image, class id) -> features (n, E) and class ids (n,) of the n readable images."""
    x, ids = embedder.encode_pairs(pairs, encode, **options)
    return x, torch.tensor(ids)


def probed(embedder, pairs, **options):
    """Pairs (image, class id) -> the features that the paper of the method probes, and class ids
    (n,). Features of STAIR are SparseRows, because most numbers are 0."""
    if embedder.model.encode_words:
        options["collect"] = stair.SparseRows
    return encode_labelled(embedder, pairs, embedder.model.probe_features, **options)


def take(embedder, data, n):
    """The first n readable samples -> images (n, 3, S, S), n captions. For data with labels and
    without captions, the caption of an image is a prompt with the name of its class."""
    if data.captioned:
        pairs = ((image, captions[0]) for image, captions in data.captioned("samples"))
    else:
        # data.classes may raise an error that asks for --classes. A model without text needs no
        # --classes.
        names = data.classes.names if embedder.tokenizer else data.groups[""][1]
        prompts = [f"a photo of {common.article(name)}." for name in names]
        pairs = ((image, prompts[c]) for image, c in data.labelled("samples"))
    images, captions = zip(*itertools.islice(read_images(pairs, embedder.read), n))
    return torch.stack(images), list(captions)


def learnable(data):
    """An index of the classes that k-NN and probes can learn. The chance counts these classes, also
    those without a readable image."""
    return slice(None) if data.unseen is None else ~data.unseen


def accuracies(task, data, predicted, ids, classes=slice(None)):
    """Predicted and true class ids (n,) -> {TASK and key of a grouping: (correct (n,), chance)}.
    classes: an index of the classes that count for the chance."""
    return {f"{task}{grouping}": (group[predicted] == group[ids], 1 / len(group[classes].unique()))
            for grouping, (group, _) in data.groups.items()}


def zeroshot(embedder, data, options):
    """Top-1 accuracy of zero-shot classification (CLIP), and top-5 for more than five classes.

    `mean_per_class_recall` is the accuracy within each class, averaged over classes with images."""
    x, ids = encode_labelled(embedder, data.labelled("zeroshot"))
    scores = embedder.classify(x, data.classes)                                # (n, C)
    predicted, chance = scores.argmax(1), 1 / scores.shape[1]
    result = accuracies("zeroshot", data, predicted, ids)
    if scores.shape[1] > 5:
        result["zeroshot/acc5"] = (scores.topk(5).indices == ids[:, None]).any(1), 5 * chance
    result["zeroshot/mean_per_class_recall"] = mean_per_class(predicted, ids), chance
    return result


def caption_words(*captions):
    """The words of all captions, without punctuation -> list."""
    return [word for word in common.split_words(" ".join(captions)) if word.isalnum()]


def retrieval(embedder, data, options):
    """Recall at 1, 5 and 10 of captions for an image (i2t) and of images for a caption (t2i).

    Every caption is a query. faithfulness/K-P is the K-Precision (SPARC, Sec. 4.4) of the caption
    that is nearest to each image. STAIR (Sec. 4.3) uses --caption-prefix "a photo of". If the data
    have a `pool`, the images are divided into pools of this size. Each pool is ranked by itself,
    and a metric is the mean over pools. An incomplete last pool is left out, because each search in
    the pool would be easier.
    """
    x, captions = embedder.encode_pairs(data.captioned("captioned"))
    n = min(data.pool or len(x), len(x))
    starts = range(0, len(x) - n + 1, n)
    pools = [rank_pairs(embedder, data, options, x[i : i + n], captions[i : i + n]) for i in starts]
    result = {name: mean([found[name] for found in pools]) for name in pools[0]}
    sizes = [len(group) for group in captions[: n * len(pools)]]
    m = round(sum(sizes) / len(pools))  # number of captions in a pool
    for k in (1, 5, 10):
        # the probability that k random captions of m contain none of the s captions of an image
        missed = [math.comb(m - s, k) / max(1, math.comb(m, k)) for s in sizes]
        result[f"i2t/R@{k}"] = result[f"i2t/R@{k}"], 1 - mean(missed)
        result[f"t2i/R@{k}"] = result[f"t2i/R@{k}"], min(1, k / n)
    return result | {"retrieval/images": n * len(pools)}


def rank_pairs(embedder, data, options, x, captions):
    """Encodings x (n, ...) of images, and n lists of captions -> {metric of retrieval: float}."""
    flat, prefix = list(itertools.chain(*captions)), options.caption_prefix
    y = embedder.texts([f"{prefix} {caption}" for caption in flat] if prefix else flat)
    image_ids = torch.arange(len(x))
    text_ids = torch.tensor([i for i, group in enumerate(captions) for _ in group])

    i2t = recall_at_k(x, y, (image_ids, text_ids), similarity=embedder.similarity)
    t2i = recall_at_k(y, x, (text_ids, image_ids),
                      similarity=lambda texts, images: embedder.similarity(images, texts).T)
    result = {f"i2t/R@{k}": recall for k, recall in i2t.items()}
    result |= {f"t2i/R@{k}": recall for k, recall in t2i.items()}
    nearest = torch.cat([embedder.similarity(part, y).argmax(1) for part in x.split(256)])
    retrieved = [caption_words(flat[j]) for j in nearest.tolist()]
    truths = [set(caption_words(*group)) for group in captions]
    result["faithfulness/K-P"] = sparc.k_precision(retrieved, truths)
    if data.content_words:
        result["faithfulness/K-Pna"] = sparc.k_precision(retrieved, truths, data.content_words)
    return result


def negative_pairs(embedder, data):
    """n pairs of a right and a wrong caption, the hard negative -> the n kinds of the pairs,
    encodings (n, E) of their images, of the right captions and of the wrong captions."""
    x, groups = embedder.encode_pairs(data.hard_negatives())
    rows = [i for i, group in enumerate(groups) for _ in group]
    kinds, captions, wrong = zip(*itertools.chain(*groups))
    return kinds, x[rows], *embedder.texts([*captions, *wrong]).chunk(2)


def negatives(embedder, data, options):
    """Share of captions that score strictly higher than their wrong variant (SugarCrepe).

    There is a metric for each kind of negative, and the mean over kinds."""
    kinds, x, right, wrong = negative_pairs(embedder, data)
    better = embedder.pair_scores(x, right) > embedder.pair_scores(x, wrong)
    of_kinds = sparo.right_by_kind(better, kinds)
    result = {f"negatives/{kind}": (share, 1 / 2) for kind, share in of_kinds.items()}
    return result | {"negatives": (mean(of_kinds.values()), 1 / 2)}


def winoground(embedder, data, options):
    """Text, image and group score on two images and two captions of equal words (Winoground)."""
    x, values = embedder.encode_pairs(data.examples())
    count = collections.Counter(pair for pair, _ in values)
    rows = [i for i, (pair, _) in enumerate(values) if count[pair] == 2]    # both can be read
    y = embedder.texts([values[i][1] for i in rows])
    x, y = x[rows].unflatten(0, (-1, 2)), y.unflatten(0, (-1, 2))           # (n, 2, E)
    scores = torch.stack([embedder.similarity(*pair).T for pair in zip(x, y)])
    text, image, group = sparo.winoground_scores(scores)
    # The chance is the probability that four scores in random order satisfy the inequalities.
    return {"winoground/text": (text, 1 / 4), "winoground/image": (image, 1 / 4),
            "winoground/group": (group, 1 / 6)}


def knn(embedder, data, options):
    """Accuracy of a vote of the 20 nearest training images (DINO; SPARO, Table 3)."""
    encode = embedder.model.encode_image
    x, ids = encode_labelled(embedder, data.learn(), encode)
    test, labels = encode_labelled(embedder, data.labelled("test"), encode)
    x, test = x.to(embedder.device), test.to(embedder.device)
    result = {}
    for grouping, (group, _) in data.groups.items():
        learned, truth = group[ids].to(embedder.device), group[labels].to(embedder.device)
        accuracy = knn_accuracy(x, learned, test, truth)
        result[f"knn{grouping}"] = accuracy, 1 / len(group[learnable(data)].unique())
    return result


def kmeans(embedder, data, options):
    """How well clusters of images of 2, 5, 10, ... classes agree with the labels (BAM, App. I)."""
    x, ids = encode_labelled(embedder, data.labelled("test"))
    if len(ids.unique()) in (1, len(ids)):
        raise UserError("k-means needs two classes, and two images of a class: give other data.")
    return {f"kmeans/{metric}": found for metric, found in bam.clustering(x, ids).items()}


def random_view(embedder):
    """A function `read` for encode_pairs: (image or file, its number) -> a random crop of at least
    8 % of the area of the image (BAM, D.1), flipped with probability 1/2.

    A seed that random_view draws and the number of the image decide the crop. So the crops do not
    depend on the number of threads and ranks.
    """
    # A crop has at least .08 ** .5 of each side. Large JPEGs are decoded at a smaller size, where
    # the smallest crop still has S pixels.
    size, seed = embedder.image_size, torch.randint(2**62, ()).item()
    side = size * math.ceil(1 / math.sqrt(0.08))

    def read(image, number):
        generator = torch.Generator().manual_seed(seed + number)
        if not torch.is_tensor(image):
            image = common.open_image(image, side)
        return common.crop_and_flip(image, size, (0.08, 1.0), 0.5, generator)

    return read


def linear(embedder, data, options):
    """Accuracy of a linear probe on the features that the paper of the method probes.

    See --probe. The result also has the setting that the probe has chosen."""
    pairs, device = data.learn, embedder.device
    setting, epochs = PROBES[options.probe]
    if options.probe == "lbfgs":  # BAM (D.3) resizes the shorter side to the size of the crop
        embedder = dataclasses.replace(embedder, resize=embedder.image_size)
    if options.probe == "sgd":
        # sgd trains on random crops of the images that are not held out. With --probe-lr there is
        # nothing to choose, so sgd trains on all images. A hundred of them show the feature size.
        rates, held, rest = [options.probe_lr or RATES[2]], 100 * [True], itertools.repeat(True)
        if options.probe_lr is None:
            is_held = hold_out(torch.tensor([label for _, label in pairs()]), 10)
            if is_held.any():
                rates, held, rest = RATES, is_held.tolist(), (~is_held).tolist()
        x, learned = probed(embedder, itertools.compress(pairs(), held))
        crops = lambda: probed(embedder, itertools.compress(pairs(), rest),
                               read=random_view(embedder))
        head, value = sgd_probe(crops, x, learned, len(data.groups[""][1]), epochs, device, rates)
    else:
        x, learned = probed(embedder, pairs())
        if options.probe == "adamw":
            head, value = adamw_probe(x, learned, epochs, device)
        else:
            head, value = lbfgs_probe(x, learned.to(device))
    x, ids = probed(embedder, data.labelled("test"))
    predicted = predict(head, x)
    result = accuracies("linear", data, predicted, ids, learnable(data))
    return result | {"linear/mean_per_class": mean_per_class(predicted, ids),
                     f"linear/{setting}": value}


# SPARC's task: segmentation ---------------------------------------------------------------
#
# sparc.py has the functions that compute the metrics.


def patch_classes(embedder, data):
    """{key of data.map_classes: embeddings (C, E) of its classes, to compare patches with}."""
    encode = functools.partial(embedder.texts, encode=embedder.model.encode_text)
    return {grouping: class_embeddings(encode, classes)
            for grouping, classes in data.map_classes.items()}


def segmentation(embedder, data, options):
    """Mean IoU of zero-shot segmentation, over the classes in the true map (SPARC, D.7).

    The paper has no class for the background, and we have none. So a background pixel is predicted
    as some class, and lowers the IoU of this class in `miou`. `miou_fg` ignores background pixels.
    D.7 names no prompts. We average several prompts for each class.
    """
    embeddings = patch_classes(embedder, data)
    scores, images = collections.defaultdict(list), 0
    for part in chunks(data.maps("segmentation"), embedder.chunk * common.this_rank()[1]):
        patches, maps = embedder.encode_pairs(part, embedder.model.encode_patches)  # (n, P, E)
        images += len(maps)
        for x, truths in zip(patches, maps):
            for grouping, truth in truths.items():
                predicted = sparc.segment(x, embeddings[grouping], truth.shape)
                foreground = sparc.image_iou(predicted, truth, foreground_only=True)
                scores[f"miou{grouping}"].append(sparc.image_iou(predicted, truth))
                scores[f"miou_fg{grouping}"].append(foreground)
    return {name: mean(values) for name, values in scores.items()} | {"segmentation/images": images}


def weights_on_objects(task, embedder, data, words_of):
    """Where the weights of a word lie in a scene of several objects (our measure).

    words_of(embedder, image, caption) -> pairs (word, weights (P,) of the patches of the image).
    Returns TASK/own/KIND for each kind of word, colour and shape: a pair (value, chance). The value
    is the weight on the objects that the word names / the weight on all objects. The chance is the
    value for equal weights. A network that weights all objects alike is at chance. Value and chance
    are means over the words of a kind. They are NaN without such words. A word that names all
    objects of its scene is skipped, because its value is always 1. A word without any weight on
    objects is skipped, too.
    """
    found = {f"{task}/own/{kind}": [] for kind in ("colour", "shape")}
    for image, (caption, masks, objects) in data.word_masks():
        for word, weights in words_of(embedder, image, caption):
            for kind in ("colour", "shape"):
                own = masks.get((kind, word))
                if own is None or own.equal(objects):
                    continue
                share = sparc.share_on(objects, weights)
                if share > 0:
                    even = (own.sum() / objects.sum()).item()
                    found[f"{task}/own/{kind}"].append((sparc.share_on(own, weights) / share, even))
    return {metric: (mean([value for value, _ in pairs]), mean([even for _, even in pairs]))
            for metric, pairs in found.items()}


def alignment(embedder, data, options):
    """Weight of a word on the objects that it names / its weight on all objects (SPARC)."""
    return weights_on_objects("alignment", embedder, data, maps_of_words)


# SPARO's tasks: slots and masks -----------------------------------------------------------
#
# The data that rank slots or train masks are never the data to evaluate.


def headlines(embedder, data, options, tasks=("zeroshot", "retrieval", "negatives")):
    """Run the tasks that fit the data -> {metric: result}, for the main metrics only."""
    result = {}
    for name in tasks:
        if TASKS[name].fits(data):
            result |= TASKS[name].run(embedder, data, options)
    names = ("zeroshot", "i2t/R@1", "t2i/R@1", "negatives")
    return {name: result[name] for name in names if name in result}


def slots(embedder, data, options):
    """Metrics with only the best slots, which are chosen on --select (SPARO, Sec. 5.1).

    Each slot alone classifies the images of --select. The slots are ranked by this zero-shot
    accuracy. Then subsets of the slots are evaluated on --data."""
    needed = "class folders to rank the slots on"
    selection = open_selection(options, data, "slots", "zeroshot", needed)
    pairs = selection.labelled("slots")
    x, ids = encode_labelled(embedder, pairs, embedder.model.image_slots)
    y = embedder.texts(selection.classes.prompts, embedder.model.text_slots)      # (C * T, L, V)
    y = F.normalize(y, dim=-1).unflatten(0, (len(selection.classes.names), -1)).mean(1)
    accuracies = sparo.slot_accuracies(x, y, ids)                           # (L,)
    order, (L, V) = accuracies.argsort(descending=True), y.shape[1:]
    result = {"slots/accuracy_best": accuracies.max()}
    choices = {"all": order, "best_half": order[: L // 2], "best_quarter": order[: L // 4]}
    for name, chosen in choices.items():
        mask = torch.zeros(L).index_fill(0, chosen, 1).repeat_interleave(V)
        found = headlines(dataclasses.replace(embedder, mask=mask), data, options)
        result |= {f"slots/{name}/{key}": value for key, value in found.items()}
    return result


@torch.no_grad()
def attention_of_slots(embedder, images, captions):
    """n images (n, 3, S, S) and their captions -> token ids of the captions (n, length), the
    weights that each slot gives to the patches (n, L, P), and the results of sparo.slot_words."""
    tokens, mask = embedder.tokenize(captions)
    attention = embedder.model.attend(images.to(embedder.device), tokens, mask)
    over_image, over_text, y_i, y_t = [x.cpu() for x in attention]
    patches = embedder.model.image_encoder.grid ** 2
    chosen = sparo.slot_words(over_text, y_i, y_t, mask.cpu())
    return tokens.cpu(), over_image[:, :, -patches:], *chosen               # without [CLS]


def words_of_slots(embedder, image, caption):
    """Yield (word, weights (P,)) for each slot that agrees on image and caption (sparo.slot_words).
    The weight is 1 for the patch with the highest weight of the slot, and 0 for other patches."""
    tokens, weights, word, _, agree = attention_of_slots(embedder, image[None], [caption])
    for slot in agree[0].nonzero()[:, 0].tolist():
        best = F.one_hot(weights[0, slot].argmax(), weights.shape[2])
        yield embedder.tokenizer.vocab[tokens[0, word[0, slot]]], best


def slot_alignment(embedder, data, options):
    """How often the brightest patch of a slot shows an object that the slot's word names (SPARO).

    Only slots that agree on image and caption count (sparo.slot_words). Without such a slot the
    value is nan."""
    return weights_on_objects("slot_alignment", embedder, data, words_of_slots)


def masks(embedder, data, options):
    """Metrics with masks of encodings, which are trained on --select (SPARO, Sec. 5.2, Table 5).

    The files of --select have hard negatives. One mask has a weight for each slot, another mask has
    a weight for each dimension.

    A pair of a caption and its hard negative is right if the image is closer to the caption.
    `pairs` is the fraction of right pairs with the mask, as a mean over the kinds of SugarCrepe.
    `pairs_before` is this mean without the mask. METRIC/relative_change divides the relative change
    of a metric by the relative change of `pairs`. With several --data, eval.py also prints the
    relative change of the mean accuracy, which is "VTAB Avg" in the paper (sparo.change_of_means).
    """
    needed = "SugarCrepe's files to train the mask on"
    selection = open_selection(options, data, "masks", "negatives", needed)
    kinds, x, y_p, y_n = negative_pairs(embedder, selection)
    tasks, result = ("zeroshot", "retrieval"), {}
    before = headlines(embedder, data, options, tasks)
    result |= {f"masks/{key}_before": found for key, found in before.items()}
    for name, parts in (("slots", embedder.model.mask_parts), ("dimensions", x.shape[1])):
        if x.shape[1] % parts:  # the width of an encoding without slots may not be divisible
            continue
        generator = torch.Generator().manual_seed(0)
        mask, start, fit = sparo.train_mask(x, y_p, y_n, kinds, parts, generator=generator)
        result |= {f"masks/{name}/pairs_before": start, f"masks/{name}/pairs": fit,
                   f"masks/{name}/kept": mask.mean()}
        after = headlines(dataclasses.replace(embedder, mask=mask), data, options, tasks)
        for key, found in after.items():
            result[f"masks/{name}/{key}"] = found
            change = sparo.relative_change(to_float(before[key]), to_float(found), start, fit)
            result[f"masks/{name}/{key}/relative_change"] = change
    return result


# STAIR's tasks: encodings that are words --------------------------------------------------
#
# Each number of an encoding is the weight of a word. So the words of an image can be ranked. A text
# can be encoded without the text encoder.


def vocabulary_scores(embedder, x):
    """Encodings x (n, E) of images -> scores (n, |V|) of all words of the vocabulary.

    The encodings of STAIR are such scores. For other methods, the score of a word is the similarity
    of the image to the encoding of the word (STAIR, Sec. 5.1).

    Special tokens score -inf. For other methods a piece such as `##car` also scores -inf if the
    vocabulary has the word `car`. Both would be encoded as "car", so the word would count twice.
    """
    tokenizer = embedder.tokenizer
    vocab, ids, no_words = tokenizer.vocab, tokenizer.ids, [*tokenizer.special]
    if embedder.model.encode_words is None:  # all methods but STAIR
        words = [token.removeprefix("##").removesuffix("##") for token in vocab]
        no_words += [k for k, word in enumerate(words) if word != vocab[k] and word in ids]
        x = embedder.similarity(x, embedder.texts(words))                   # (n, |V|)
    scores = x[:, : len(vocab)].clone()  # an embedding may have more rows than there are words
    scores[:, no_words] = -torch.inf
    return scores


def words(embedder, data, options):
    """How often the label of an image is among the k best words of the image (STAIR, Table 4).

    An image of `shapes` has two labels, its colour and its shape. `words` then counts the label
    with the better rank."""
    x, ids = encode_labelled(embedder, data.labelled("zeroshot"))
    tokenizer, scores, ranks = embedder.tokenizer, vocabulary_scores(embedder, x), {}
    for grouping, (group, names) in data.groups.items():
        if grouping == "" and len(data.groups) > 1:
            continue  # no single word names a colour and a shape
        names = names if grouping else data.classes.names  # --classes may rename the folders
        # a class without a name gets the score of special tokens, -inf
        pieces = [tokenizer.encode(name)[1:-1] or tokenizer.special for name in names]
        ranks[grouping] = stair.label_ranks(scores, pieces, group[ids])
    ranks[""] = torch.stack(list(ranks.values())).amin(0)
    ks = (1, 10, 50, 100)
    return {f"words{grouping}/top{k}": rank < k for grouping, rank in ranks.items() for k in ks}


def textfree(embedder, data, options):
    """Zero-shot accuracy and recall if a text is encoded as a bag of words (STAIR, Table 5)."""
    embedder = dataclasses.replace(embedder, text_free=True)
    found = headlines(embedder, data, options, ("zeroshot", "retrieval"))
    return {f"textfree/{key}": value for key, value in found.items()}


def sparsity(embedder, data, options):
    """Mean number of words with a weight in the encodings of 500 images and captions (STAIR)."""
    images, captions = take(embedder, data, 500)
    x = embedder.encode_batches(images.split(embedder.chunk))
    return {"active/image": (x != 0).flatten(1).sum(1),
            "active/text": (embedder.texts(captions) != 0).flatten(1).sum(1)}


# BAM's task: video ------------------------------------------------------------------------
#
# bam.py has the functions that follow objects and compute the metrics.


def video(embedder, data, options):
    """Region score J and contour score F of objects followed through a video (BAM, Table 6).

    A frame gets its labels from the last T frames. J, F and their mean are reported for each T, as
    means over the objects of all videos. A video of 80 frames of 854 x 480, in patches of 16, takes
    2 GB.
    """
    encoder = embedder.model.evaluation_encoder()
    patch, found = encoder.patch_size, collections.defaultdict(list)
    encode = lambda frames: encoder(frames)[:, int(encoder.cls is not None) :]  # without [CLS]
    for frames, truth in progress(data.videos(patch), "videos"):
        truth = truth.to(embedder.device)
        grid = [side // patch for side in next(frames()).shape[1:]]
        start = bam.first_map(truth[0], grid)                               # (C, P)
        # one frame at a time, because 80 frames take gigabytes
        x = embedder.encode_batches((frame[None] for frame in frames()), encode)  # (f, P, d)
        for T, soft in bam.propagate(x.to(embedder.device), start, grid).items():
            scores = bam.j_and_f(soft, truth, grid, patch)                  # (2, objects)
            for part, values in (("", scores.mean(0)), ("/J", scores[0]), ("/F", scores[1])):
                found[f"video/T{T}{part}"] += values.tolist()
    return {metric: mean(values) for metric, values in found.items()}


# Fine-tuned classifiers (BAM, Tables 3 to 5) ----------------------------------------------
#
# A classifier has classes and no captions. The task `classification` is for classifiers alone.


def learned_classes(options, data, model):
    """The number of each class of the data in the classifier, see class_ids. Without --classes,
    label i of shards is class i of a classifier that has learned from shards. Raises UserError if
    the data and the classifier have different classes.
    """
    known, is_numbered = model.config.classes, model.config.data.lower().endswith(".tar")
    names = data.groups[""][1] if data.groups else ["numbers"]
    if data.is_world:
        names = SHAPES
        ids = common.match_names(names, known)
    else:
        ids = class_ids(data, known, is_numbered and not options.classes)
    if ids is None and data.groups and options.classes:  # --classes may rename the folders
        ids = common.match_names(data.classes.names, known)
    if ids is None:
        only = lambda a, b: ", ".join(sorted({*a} - {*b})[:5]) or "none"
        raise UserError(f"Only the classifier has {only(known, names)}; only {options.data} has "
                        f"{only(names, known)}: make them equal; --classes names those of shards.")
    return ids


def classification(embedder, data, options):
    """Top-1 accuracy of a fine-tuned classifier (BAM, Table 3).

    A scene of `shapes` has one object here, and its shape is the class. `mean_per_class` is the
    accuracy within each class, averaged over classes.
    """
    pairs, encode = data.labelled("test"), embedder.model.class_scores
    scores, labels = encode_labelled(embedder, pairs, encode)
    if data.is_world:
        labels = data.groups["/shape"][0][labels]
    labels = torch.tensor(learned_classes(options, data, embedder.model)).to(labels.device)[labels]
    predicted, chance = scores.argmax(1), 1 / scores.shape[1]
    return {"classification": (predicted == labels, chance),
            "classification/mean_per_class": (mean_per_class(predicted, labels), chance)}


# Open-vocabulary detection (SPARC, Table 5) -----------------------------------------------
#
# The task `detection` is for detectors alone.


def detection(embedder, data, options):
    """AP of detected boxes: the mean over ten IoUs and over classes with a true box (COCO, LVIS).

    The IoUs are .5 to .95. AP_rare is the mean over the rare classes of LVIS. For `shapes`, AP_rare
    is the mean over the pairs of colour and shape that training images never show.
    """
    # In the code of OWL-ViT, the logit of a class is the mean of the logits of its prompts. This
    # logit is that of the mean embedding of the prompts.
    x = embedder.texts(data.classes.prompts)                                # (C * T, E)
    queries = x.unflatten(0, (len(data.classes.names), -1)).mean(1).to(embedder.device)
    encode = lambda images: sparc.best_boxes(*embedder.model.detect(images, queries))
    x, truths = embedder.encode_pairs(data.boxes(), encode)                 # (n, k, 6)
    found = []
    for rows, truth in zip(x, truths):
        boxes = rows[:, :4].clamp(min=0).minimum(rows.new_tensor(2 * truth.size))  # in the image
        found.append((boxes, rows[:, 4].long(), rows[:, 5]))
    of_lvis = any(truth.absent is not None for truth in truths)
    aps = sparc.average_precisions(found, truths, 300 if of_lvis else 100)
    if not aps:
        raise UserError(f"The images of {options.data} that can be read have no true box.")
    ap = torch.stack([*aps.values()])                                       # (classes, 10)
    result = {"detection/AP": ap.mean(), "detection/AP50": ap[:, 0].mean(),
              "detection/AP75": ap[:, 5].mean(), "detection/images": len(x)}
    if rare := [row for c, row in aps.items() if c in data.rare_classes]:
        result["detection/AP_rare"] = torch.stack(rare).mean()
    return result


# What can be measured ---------------------------------------------------------------------
#
# A row of TASKS lists attributes of EvalSet, and names one attribute of the model. The task can run
# if the data have one of the listed attributes, and the model has the named attribute.


IMAGES = "captioned", "groups"  # captions, or classes with names


class Row(NamedTuple):
    """A row of TASKS or PICTURES: a function, and what it needs from the data and the model."""

    run: Callable
    data: tuple                  # attributes of EvalSet; the data must have one of them
    model: str = "encode_image"  # attribute of the model, which must be neither None nor 0
    flags: tuple = ()            # flags that the function reads, beside those of data and machine

    def fits(self, data):
        """Whether the data, an EvalSet, have what the task needs."""
        return any(getattr(data, member) is not None for member in self.data)

    def suits(self, model):
        """Whether the model has what the task needs."""
        return bool(getattr(model, self.model))


PROMPTS, CAPTIONS = ("classes", "templates"), ("caption_prefix", "nouns_adjectives")
LEARNED = "train_data", "label_fraction", "classes"
CHOSEN_BY = *PROMPTS, *CAPTIONS, "select", "select_root"

TASKS = {
    "zeroshot": Row(zeroshot, ("groups",), "encode_text", PROMPTS),
    "retrieval": Row(retrieval, ("captioned",), "encode_text", CAPTIONS),
    "negatives": Row(negatives, ("hard_negatives",), "encode_text"),
    "winoground": Row(winoground, ("examples",), "encode_text"),
    "segmentation": Row(segmentation, ("maps",), "encode_patches", PROMPTS),
    "words": Row(words, ("groups",), "encode_text", ("classes",)),
    "textfree": Row(textfree, ("groups", "captioned"), "encode_words", PROMPTS + CAPTIONS),
    "sparsity": Row(sparsity, IMAGES, "encode_words", ("classes",)),
    "knn": Row(knn, ("groups",), flags=LEARNED),
    "linear": Row(linear, ("groups",), flags=(*LEARNED, "probe", "probe_lr")),
    "kmeans": Row(kmeans, ("groups",)),
    "video": Row(video, ("videos",)),
    "slots": Row(slots, ("groups", "captioned", "hard_negatives"), "slots", CHOSEN_BY),
    "masks": Row(masks, ("groups", "captioned"), "mask_parts", CHOSEN_BY),
    "alignment": Row(alignment, ("word_masks",), "align_words"),
    "slot_alignment": Row(slot_alignment, ("word_masks",), "slots"),
    "classification": Row(classification, ("labelled",), "class_scores", ("classes",)),
    "detection": Row(detection, ("boxes",), "detect", ("templates",)),
}

def default_tasks(data, model):
    """Names of the tasks of a model that run without --task."""
    if model.class_scores or model.detect:
        return ["classification", "detection", "video"]
    if model.encode_text is None:  # a linear probe on files takes long, so it needs --task
        return ["knn", "linear"] if data.is_world else ["knn", "video"]
    tasks = ["zeroshot", "retrieval", "negatives", "winoground", "segmentation", "alignment",
             "slot_alignment", "video"]
    return [*tasks, "words", "textfree", "sparsity"] if model.encode_words else tasks


def to_float(found):
    """The result of a task for one metric -> float. A result is a number, or a tensor, which gives
    its mean, or a tuple (result, chance), which gives its first item."""
    value = found[0] if isinstance(found, tuple) else found
    return value.float().mean().item() if torch.is_tensor(value) else value


# Pictures ---------------------------------------------------------------------------------
#
# A picture is a function of an Embedder and an EvalSet. It returns a PIL image, or None if there is
# nothing to show. PICTURES, at the end of this section, has a row for each of these functions.

BRIGHTNESS = ("Brightness shows the weight of a patch: black is 0, full brightness is the largest "
              "weight of the map.")
STOP_WORDS = {*("a an the and of in on at to by with from for as is are it its his her "
                "next well").split()}


def draw_text(string, width, size=13, colour="black"):
    """Draw text that wraps at `width` pixels. A longer word makes the picture wider.

    The font has only Latin letters without accents. Accents are dropped. A text in another script
    is drawn as "(...)".
    """
    if not string.isascii():
        string = unicodedata.normalize("NFKD", string).encode("ascii", "ignore").decode() or "(...)"
    font = ImageFont.load_default(size)
    lines = textwrap.wrap(string, max(1, int(width / font.getlength("n"))), break_long_words=False)
    width = max([width, *[math.ceil(font.getlength(line)) for line in lines]])
    page = Image.new("RGB", (width, (size + 3) * len(lines)), "white")
    ImageDraw.Draw(page).multiline_text((0, 0), "\n".join(lines), colour, font, spacing=2)
    return page


def join(pictures, down=False, gap=8):
    """Join pictures side by side, aligned at the bottom. With `down` they are joined vertically."""
    widths, heights = zip(*[picture.size for picture in pictures])
    gaps = gap * (len(pictures) - 1)
    size = (max(widths), sum(heights) + gaps) if down else (sum(widths) + gaps, max(heights))
    page, place = Image.new("RGB", size, "white"), 0
    for picture in pictures:
        page.paste(picture, (0, place) if down else (place, page.height - picture.height))
        place += gap + (picture.height if down else picture.width)
    return page


def sheet(title, note, rows, columns=12):
    """Draw a page with the title, a note on how to read the page, and rows of labelled pictures.

    rows: pairs (heading, [(picture, label), ...]). A line has at most `columns` pictures.
    """
    lines = []
    for heading, cells in rows:
        boxes = [join([draw_text(label, cell.width), cell], True, 2) for cell, label in cells]
        row = [join(part) for part in chunks(boxes, columns)]
        width = max([640, *[line.width for line in row]])
        lines.append(join([draw_text(heading, width), *row], True))
    width = max(line.width for line in lines)
    head = join([draw_text(title, width, 16), draw_text(note, width)], True, 4)
    return ImageOps.expand(join([head, *lines], True, 12), 10, "white")


def to_picture(image):
    """(3, S, S), uint8 or floats in [0, 1] -> PIL image of 112 to 224 pixels. Pixels are enlarged
    without smoothing, so that the picture shows what the model sees."""
    image = to_pil_image(image)
    size = min(max(112, image.width), 224)
    method = Image.Resampling.BICUBIC if size < image.width else Image.Resampling.NEAREST
    return image.resize((size, size), method)


def light_up(image, weights):
    """Image (3, H, W), weights (P,) of its patches -> a picture. A patch is the darker, the smaller
    its weight is, compared to the largest weight."""
    picture, grid = to_picture(image), math.isqrt(weights.numel())
    level = weights.clamp(min=0) / weights.max().clamp(min=1e-6)            # (P,)
    mask = to_pil_image(level.view(1, grid, grid)).resize(picture.size, Image.Resampling.NEAREST)
    return Image.composite(picture, Image.new("RGB", picture.size), mask)


def lit_sheet(title, note, rows):
    """Rows (heading, image (3, H, W), [(label, weights (P,) of the patches), ...]) -> a sheet."""
    pages = []
    for heading, image, maps in rows:
        cells = [(light_up(image, weights), label) for label, weights in maps]
        pages.append((heading, [(to_picture(image), "image"), *cells]))
    return sheet(title, note, pages)


def maps_of_words(embedder, image, caption):
    """An image and a caption -> pairs (token, weights (P,)), for the tokens between [CLS] and
    [SEP]. See Embedder.maps."""
    found = embedder.maps(image, caption)
    maps = torch.from_numpy(found["patches"]).flatten(1)                    # (L, P)
    if embedder.model.word_maps:  # scores, of which the lowest is black
        maps = maps - maps.amin(1, keepdim=True)
    return [*zip(found["tokens"], maps)][1:-1]


def draw_word_maps(embedder, data):
    """Which patches each word of a caption weights (SPARC, Eq. 4; STAIR, Fig. 10)."""
    rows = []
    for image, caption in zip(*take(embedder, data, 8)):
        complete = set(caption_words(caption))  # a token may be a piece of a word
        maps = [(word, weights) for word, weights in maps_of_words(embedder, image, caption)
                if word in complete - STOP_WORDS]
        rows.append((caption, image, maps[:8]))
    title = "Where the words of a caption lie in its image (SPARC, Eq. 4; STAIR, Fig. 10)."
    note = f"{BRIGHTNESS} At most eight words of a caption are shown."
    if embedder.model.word_maps:
        note += (" A weight is p(h_j) in STAIR's Eq. 4 minus the lowest of the map. It needs no "
                 "text encoder.")
    return lit_sheet(title, note, rows)


def draw_segmentation(embedder, data):
    """Which patches zero-shot segmentation gives to each class of the true map (SPARC, Fig. 3)."""
    classes, rows = patch_classes(embedder, data), []
    for image, truths in itertools.islice(data.maps("segmentation"), 8):
        patches = embedder.encode_batches([image[None]], embedder.model.encode_patches)[0]
        maps = []
        for grouping, truth in truths.items():
            nearest = (patches @ classes[grouping].T).argmax(1)             # (P,)
            for c, name in enumerate(data.map_classes[grouping].names):
                if (truth == c + 1).any():
                    maps.append((name, (nearest == c).float()))
        rows.append(("", image, maps))
    note = ("A patch is bright below the class whose text embedding is nearest. The classes are "
            "those of the true map.")
    return lit_sheet("Zero-shot segmentation by patches (SPARC, Fig. 3).", note, rows)


def draw_slots(embedder, data):
    """Which word and which patches each slot attends to (SPARO, Sec. 5.4).

    As in the paper, a row shows a slot that attends mainly to one word, and no two rows show slots
    that attend to the same words.
    """
    images, captions = take(embedder, data, 64)
    tokens, over_image, word, sharpness, agree = attention_of_slots(embedder, images, captions)
    rows, chosen = [], []
    for slot in (agree * sharpness).sum(0).argsort(descending=True).tolist():
        shown = agree[:, slot].nonzero()[:, 0]
        repeats = word[shown][:, chosen] == word[shown][:, [slot]]          # (shown, chosen)
        # A slot is new if no chosen slot has the same word in 30 % or more of these captions.
        is_new = (repeats.float().mean(0) < 0.3).all()
        if len(shown) < 4 or not is_new or len(chosen) == 8:
            continue
        chosen.append(slot)
        cells = []
        for i in shown[:5].tolist():
            lit = light_up(images[i], over_image[i, slot])
            name = embedder.tokenizer.vocab[tokens[i, word[i, slot]]]
            cells.append((join([to_picture(images[i]), lit], gap=0), name))
        rows.append((f"Slot {slot}", cells))
    if not rows:
        return None
    title = "SPARO: the word and the patches that the same slot weights (Sec. 5.4)."
    note = (f"A row is one of {agree.shape[1]} slots. The word above an image has more than half "
            f"of the slot's weight, and the slot's values for image and caption have a cosine "
            f"above 0.75. {BRIGHTNESS}")
    return sheet(title, note, rows)


def best_words(words, scores):
    """Words, their scores (n,) -> a text with the best 20 words and their scores (STAIR, Table 9).
    Words that are not in the encoding, with score 0, and special tokens, with score -inf, are left
    out."""
    best, ids = scores.topk(min(20, len(words)))
    pairs = zip(ids.tolist(), best.tolist())
    return "  ".join(f"{words[k]}={score:.2f}" for k, score in pairs if score > 0) or "no word"


def draw_words(embedder, data):
    """The words that score highest for an image (STAIR, Fig. 4)."""
    images, captions = take(embedder, data, 16)
    x, cells = embedder.encode_batches([images], embedder.model.image_encoding), []
    for image, caption, scores in zip(images, captions, vocabulary_scores(embedder, x)):
        words = draw_text(best_words(embedder.tokenizer.vocab, scores), 336)
        cells.append((join([to_picture(image), words]), caption))
    title = "The 20 words that score highest for an image, and their scores."
    note = ("A score is the weight of the word, before the encoding gets length 1. The model does "
            "not see the caption.")
    return sheet(title, note, [("", cells)], columns=2)


def draw_heads(embedder, data):
    """Which patches each head of the last block attends to from [CLS] (BAM, Fig. 5).

    The maps of the heads and their mean are drawn. Image files are read at 512 / 224 of the image
    size of the run. A model of 224 pixels then reads 512 pixels, as in the figure."""
    encoder = embedder.model.image_encoder
    if encoder.cls is None:
        return None
    if not data.is_world:
        patches = round(encoder.grid * 512 / 224)
        embedder = dataclasses.replace(embedder, image_size=encoder.patch_size * patches)
    images, _ = take(embedder, data, 8)
    rows = []
    for image, heads in zip(images, embedder.model.head_maps(images.to(embedder.device)).cpu()):
        names = ["mean of heads", *[f"head {i + 1}" for i in range(len(heads))]]
        rows.append(("", image, zip(names, [heads.mean(0), *heads])))
    title = "Which patches [CLS] attends to in the last block (BAM, Fig. 5)."
    return lit_sheet(title, BRIGHTNESS, rows)


def as_read(tokenizer, tokens, mask, captions):
    """Tokens and mask (n, L) of n captions -> pairs of texts: the tokens that the model reads, and
    the tokens that are cut off."""
    pairs = []
    for ids, kept, caption in zip(tokens.cpu(), mask.cpu(), captions):
        read = ids[kept].tolist()
        cut = tokenizer.encode(caption)[len(read) - 1 : -1]  # the tokens that are not read
        pairs.append([" ".join(tokenizer.vocab[i] for i in part) for part in (read, cut)])
    return pairs


def sheet_of_samples(pictures, texts, note):
    """Pictures of samples, and a pair of texts for each (read by the model, cut off) -> a sheet.
    The text stands above its picture. The text that is cut off is grey."""
    cells = []
    for picture, (read, cut) in zip(pictures, texts):
        words = [draw_text(read, picture.width), draw_text(cut, picture.width, colour="grey")]
        cells.append((join([*words, picture], True, 2), ""))
    return sheet("Samples as the model reads them.", note, [("", cells)], columns=4)


PICTURES = {
    "alignment": Row(draw_word_maps, IMAGES, "align_words", ("classes",)),
    "slots": Row(draw_slots, IMAGES, "slots", ("classes",)),
    "words": Row(draw_words, IMAGES, "image_encoding", ("classes",)),
    "queries": Row(draw_word_maps, IMAGES, "word_maps", ("classes",)),
    "segmentation": Row(draw_segmentation, ("maps",), "encode_patches", PROMPTS),
    "heads": Row(draw_heads, IMAGES, "head_maps"),
}


def pictures_to_draw(model, data, tasks):
    """The pictures that `tasks` names, or all pictures if `tasks` is empty -> {name: Row}. Pictures
    that do not fit the data or the model are left out."""
    return {name: picture for name, picture in PICTURES.items() if name in (tasks or PICTURES)
            and picture.fits(data) and picture.suits(model)}


@torch.no_grad()
def draw_pictures(embedder, data, tasks):
    """Draw the pictures of pictures_to_draw -> {name: picture}."""
    drawn = {name: picture.run(embedder, data)
             for name, picture in pictures_to_draw(embedder.model, data, tasks).items()}
    return {name: page for name, page in drawn.items() if page}


# Evaluating a run -----------------------------------------------------------------------
#
# RUN/eval.json has the metrics of the evaluation that ends the training. RUN/evals.jsonl has the
# metrics of each evaluation.


def tasks_to_run(options, data, model):
    """Names of the tasks to run: the tasks of --task or, without --task, the default tasks that fit
    the data and the model.

    Raises UserError if a name of --task fits neither as a task nor as a picture, or no task fits.
    Some errors would come only after minutes, so they are raised here: classes without names, no
    images to learn from, a classifier with other classes.
    """
    asked = options.tasks
    usable = [name for name, task in TASKS.items() if task.fits(data) and task.suits(model)]
    can = f"On {options.data} this model can run {', '.join(usable) or 'no task'}"
    if not usable and not PICTURES.keys() & asked:
        raise UserError(f"{can}: give class folders, a table of captions or shapes, by eval.py "
                        f"--data or train.py --eval-data; tar shards need CLIP_benchmark's layout.")
    pictures = pictures_to_draw(model, data, asked)
    if unfit := [name for name in asked if name not in usable and name not in pictures]:
        raise UserError(f"{can}; {unfit[0]} needs other data or another model, see --help.")
    wanted = asked or default_tasks(data, model)
    tasks = [name for name in usable if name in wanted]
    note_useless_flags(options, [*map(TASKS.get, tasks), *pictures.values()])
    if "zeroshot" in tasks:
        data.classes  # raises UserError if folders lack class names
    if "classification" in tasks:
        learned_classes(options, data, model)
    if "knn" in tasks or "linear" in tasks:
        data.learn  # the property raises if there is nothing to learn from
    return tasks


def evaluate(embedder, data, options, report=lambda new: None, failed=None):
    """Run the tasks -> {metric: float}. METRIC/chance is the value of a random guess, if the task
    knows this value.

    All ranks must call this function, because they divide the encoding. report(metrics) is called
    when a task ends. Raises UserError if a task cannot run. With a list `failed` in one process,
    the list gets the message instead, and the other tasks run.
    """
    result, embedder = {}, dataclasses.replace(embedder, share=common.this_rank())
    for name in tasks_to_run(options, data, embedder.model):
        with noted(failed, f"Task {name}: ", is_shared=True):
            new = {}
            for metric, found in TASKS[name].run(embedder, data, options).items():
                found = found if isinstance(found, tuple) else (found,)
                new |= zip((metric, f"{metric}/chance"), map(to_float, found))
            result |= new
            report(new)
    return result


def print_metrics(metrics):
    """Print a line for each metric of a task, with its chance."""
    for metric, value in metrics.items():
        if metric.endswith(("/images", "/chance")):
            continue
        chance = metrics.get(f"{metric}/chance")
        level = "" if chance is None else f"  chance {chance:.4f}"
        shown = f"{value:.4g}" if 0 < abs(value) < 0.001 else f"{value:.4f}"
        print(f"  {metric:36}  {shown}{level}")


def evaluate_and_show(embedder, data, options, run, failed):
    """Evaluate, print a table, write the metrics and the pictures into RUN -> {metric: float}. The
    metrics of a task are printed and written when the task ends. Rank 0 alone draws and writes.
    failed: a list that gets a message for each task that fails and for each file that cannot be
    written."""
    if common.this_rank()[0] > 0:
        return evaluate(embedder, data, options)
    so_far, before = {}, len(failed)

    def report(new):
        so_far.update(new)
        print_metrics(new)
        with noted([]):  # an error here does not matter, as a later line has all tasks
            write_line(run, metrics_record(embedder, data, options, so_far), is_complete=False)

    result = evaluate(embedder, data, options, report, failed)
    is_complete = len(failed) == before  # true if no task has failed
    print_notes(embedder, data)
    if result:  # a command that only draws has no metrics
        record = metrics_record(embedder, data, options, result)
        with noted(failed):
            write_line(run, record, is_complete)
        if is_complete and options.is_own and not options.tasks:
            failed += save_figures({Path(run, "eval.json"): record}, embedder.step)
    drawn = draw_pictures(embedder, data, options.tasks)
    pages = {output_path(run, options, f"{name}.png"): page for name, page in drawn.items()}
    failed += save_figures(pages, embedder.step)
    return result


@contextlib.contextmanager
def noted(failed, who="", is_shared=False):
    """A context that appends `who` and the message of a UserError to a list, so that the next task,
    file or run goes on. Without a list the context raises the error. is_shared: whether other ranks
    may wait for this rank. With several ranks the context then raises the error, too."""
    try:
        yield
    except UserError as error:
        if failed is None or (is_shared and common.this_rank()[1] > 1):
            raise
        failed.append(f"{who}{error}")


def print_notes(embedder, data):
    """Print facts on which the metrics depend: names of classes, and captions that are cut."""
    # without "classes" no task has needed the names of class folders
    if (classes := vars(data).get("classes")) and embedder.tokenizer:
        print(f"Class names: {classes.source}. Prompts of a class: {len(classes.templates)}, "
              f"for example {classes.prompts[0]!r}")
    print_unseen(embedder.counted, embedder.context)


def print_unseen(counted, context):
    """Print how many captions are cut and how many tokens are unknown. counted: the counts of
    Embedder.count."""
    if counted["cut_captions"]:
        print(f"{counted['cut_captions']:,} of {counted['captions']:,} captions and prompts are "
              f"longer than the context of {context} tokens: the model does not see their ends.")
    if counted["unknown_tokens"] > 0.1 * counted["tokens"]:
        fraction = counted["unknown_tokens"] / counted["tokens"]
        print(f"{fraction:.0%} of the tokens are [UNK]: train on captions with these words.")


def metric_options(options):
    """The options that change the results of an evaluation -> dict."""
    return {name: value for name, value in vars(options).items() if name not in NOT_OF_METRICS}


def metrics_record(embedder, data, options, result):
    """The metrics and all that they depend on, a dict."""
    depends_on = metric_options(options) | {"step": embedder.step, "git": common.revision()}
    if classes := vars(data).get("classes"):
        depends_on |= {"class_names": classes.source, "prompts": classes.templates}
    return {"settings": depends_on} | common.without_nan(result)


def write_line(run, record, is_complete=True):
    """Write a record as the last line of RUN/evals.jsonl. The record replaces an equal line. It
    also replaces the line of the tasks so far, which says "complete": false. The whole file is
    written again and renamed, so that neither a killed process nor a full disk loses a line."""
    path, mark = Path(run, "evals.jsonl"), {"complete": False}
    begun = json.dumps(mark | {"settings": record["settings"]})[:-1].encode()
    new = json.dumps(record if is_complete else mark | record).encode()
    with common.locked(run), common.writing(path):
        lines = path.read_bytes().splitlines() if path.exists() else []
        kept = [line for line in lines if not line.startswith(begun) and line != new]
        with common.replacing(path) as file:
            file.write(b"\n".join([*kept, new, b""]))


def path_words(text):
    """The words of a path, a query or a caption, for the name of a file. So results of different
    folders and texts get different names. The words have at most 60 bytes, because a file name has
    at most 255 bytes."""
    return re.sub(r"\W+", "-", str(text)).encode()[-60:].decode(errors="ignore").strip("-")


def output_path(run, options, name):
    """RUN/NAME for the evaluation that ends the training, RUN/DATA-SPLIT-NAME for any other. So
    pictures of other data or of another split do not replace each other."""
    if options.is_own:
        return Path(run, name)
    data = path_words(options.data)
    split = "" if options.split == "all" else f"{options.split}-"  # "all": there are no splits
    return Path(run, f"{data}-{split}{name}")


def step_of(run):
    """The step of RUN/eval.json, or -1 if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(Path(run, "eval.json").read_bytes())["settings"]["step"]
    return -1


def save_figures(figures, step):
    """Write {path: record or picture} and print the paths -> a message for each file that cannot be
    written. If eval.json belongs to a later step, because the training has gone on meanwhile, the
    files get the names step-S-NAME."""
    failed, written = [], []
    for path, figure in figures.items():
        with noted(failed), common.locked(path.parent):
            if step_of(path.parent) > step:
                path = path.with_name(f"step-{step}-{path.name}")
            common.write_file(path, figure)
            written.append(str(path))
    if written:
        print("written: " + ", ".join(written))
    return failed


# Search -----------------------------------------------------------------------------------
#
# A query is a caption. For STAIR a query may also be words with AND, OR, NOT.


def search(embedder, data, options, run):
    """Search the images of `data` for the queries of --query, and draw QUERY-search.png. A query is
    a caption or, for STAIR, words with AND, OR, NOT (STAIR, App. D)."""
    note_useless_flags(options)
    pairs, is_stair = data.captioned or data.labelled, bool(embedder.model.encode_words)
    if pairs is None:
        raise UserError(f"--query needs a folder of images, a table or shapes, not {options.data}.")
    captions = [query for query in options.query if not (is_stair and stair.is_boolean(query))]
    encoded, index, more = embedder.texts(captions), None, {}
    if is_stair:
        vocab = embedder.tokenizer.vocab
        # the embedding may have more rows than the vocabulary has words
        index = stair.InvertedIndex([*vocab, *range(len(vocab), encoded.shape[1])])
        more = {"collect": stair.SparseRows}
    y = dict(zip(captions, encoded))
    with common.explained(ValueError, "--query"):  # a wrong query ends before images are encoded
        for query in options.query:
            if query not in y:
                stair.boolean_query(query, index)
    x, names = embedder.encode_pairs(named_images(pairs), **more)
    if index:
        for rows in torch.arange(len(x)).split(embedder.chunk):
            index.add(rows.tolist(), x[rows])
    found = {query: answer(embedder, x, index, query, y.get(query)) for query in options.query}
    # Memory may be too small for all images. So the images that are found are read again.
    wanted = {names[row] for best in found.values() for row, _ in best}
    images = {name: image for image, name in named_images(pairs) if name in wanted}
    pages = []
    for query, best in found.items():
        heading = f"{query} (text encoder)" if query in y else query
        shown = ", ".join(f"{names[row][1]} ({score:.2f})" for row, score in best) or "nothing"
        print(f"{heading}: {shown}")
        cells = [(images[names[row]], f"{score:.2f}") for row, score in best]
        read = read_images(cells, embedder.read) if cells else []
        pages.append((heading, [(to_picture(image), score) for image, score in read]))
    note = ("The score of a caption is its similarity to the image, that of a query with AND, OR, "
            "NOT the sum of its words' weights.")
    page = sheet("The images that each query finds, and their scores.", note, pages)
    name = f"{path_words(' '.join(options.query))}-search.png"
    return save_figures({output_path(run, options, name): page}, embedder.step)


def named_images(pairs):
    """Yield (image, (its number, its name)). A name is a path, "shard:key" or the number. pairs:
    data.captioned or data.labelled."""
    for i, (image, value) in enumerate(pairs("search")):
        name = next((name for name in (image, value) if isinstance(name, str)), str(i))
        yield image, (i, name)


def answer(embedder, x, index, query, y):
    """The images that a query finds: at most eight pairs (row of x, score), best first.

    x: encodings of the images. index: their InvertedIndex, for STAIR. y: the encoding of the query,
    or None for words with AND, OR, NOT.
    """
    if y is None:
        where, words = stair.boolean_query(query, index)
        return index.search(dict.fromkeys(words, 1.0), 8, where)
    if index:
        return index.search(y, 8)
    scores = torch.cat([embedder.similarity(part, y[None])[:, 0] for part in x.split(256)])
    best = scores.topk(min(8, len(scores)))
    return [*zip(best.indices.tolist(), best.values.tolist())]


# Weights for other people's code ----------------------------------------------------------
#
# The file has the parameter names of timm, so that programs of others for detection and
# segmentation can load the image encoder.


def export(run, checkpoint, file):
    """Write the image encoder of a run to a new file, with the names of timm. If there is a
    teacher, the encoder is that of the teacher.

    Such a file is the start of DINO's evaluation of videos, of UPerNet, of Mask R-CNN and of DeiT's
    fine-tuning (BAM, Tables 3, 6, 7). Raises UserError if the file exists, or if the encoder is no
    plain ViT.
    """
    if not file or os.path.lexists(file) or file.endswith(".safetensors"):
        raise UserError(f"--export {file!r} must be a new file: give a name that ends in .pt.")
    embedder, args = load_run(run, checkpoint=checkpoint)
    weights = common.timm_weights(embedder.model.evaluation_encoder())
    common.write_file(Path(file), weights)
    print(f"{file}: {args.image_encoder}, {args.image_size} pixels, with the names of timm")


# Command line ---------------------------------------------------------------------------
#
# The flags are settings of an evaluation. The settings of the run are in its config.json.


def list_rows(table):
    """Lines for --help. Each row of TASKS or PICTURES gives its name, the first line of the
    docstring of its function, and its flags."""
    lines = []
    for name, row in table.items():
        about, _, _ = (row.run.__doc__ or "").partition("\n")
        lines.append(f"  {name:15} {about}")
        if row.flags:
            lines.append(f"  {'':15} reads {', '.join(map(common.flag_of, row.flags))}")
    return "\n".join(lines)


def parse_args(argv=None):
    """Command line -> runs, {name: value} of the flags that are given."""
    parser = common.Parser(usage="eval.py RUN [RUN ...] [--FLAG VALUE ...]; --help lists the flags",
                           description=__doc__.partition("\n\nA map")[0],
                           epilog=f"tasks:\n{list_rows(TASKS)}\n\npictures:\n{list_rows(PICTURES)}")
    parser.add_argument("runs", nargs="+", metavar="run", type=os.path.normpath,  # "a/" becomes "a"
                        help="directory of a run that train.py has trained")
    common.add_flags(parser, Flags, GROUPS, "data")
    given = vars(parser.parse_args(argv))
    return given.pop("runs"), given


def check_flags(runs, given):
    """Raise UserError for flags that do not fit together, before any run is evaluated."""
    known = TASKS | PICTURES
    if unknown := set(Flags(**given).tasks) - known.keys():
        raise UserError(f"There is no task {', '.join(unknown)}; there are {', '.join(known)}.")
    common.check_numbers(given, common.comments_of(Flags))
    if "export" in given and len(runs) > 1:
        raise UserError(f"--export writes the weights of one run: give one run, not {len(runs)}.")


def describe(options):
    """A phrase about the data, for the heading of the table."""
    most = f", {options.limit:,} samples at most" if options.limit else ""
    seen = ", from the training data of the run" if options.on_training_images else ""
    amp = f", encoders in {options.amp}" if options.amp != "off" else ""
    return f"{options.data}, split {options.split}{most}{seen}{amp}"


def evaluate_run(run, given, device, failed):
    """Evaluate a run -> metrics. given: {name: value} of the flags that are given; `data` is one
    SPEC. With --query the function searches instead, and returns {}. failed: a list that gets a
    message for each task that fails and for each file that cannot be written."""
    embedder, args = load_run(run, device, given.get("checkpoint", Flags.checkpoint))
    options = options_of(given, args)
    embedder.chunk, embedder.workers, embedder.amp = options.batch, options.workers, options.amp
    embedder.tells = bool(options.query)  # an evaluation prints its counts at the end
    content = None if options.query else METHODS[args.method].content(args)
    data = open_eval_set(options, embedder.image_size, content)
    so_far = "" if embedder.step == args.steps else f", step {embedder.step} of {args.steps},"
    print(f"{run}{so_far} on {describe(options)}:")
    if options.query:
        failed += search(embedder, data, options, run)
        return {}
    return evaluate_and_show(embedder, data, options, run, failed)


@common.without_tf32()
def main(argv=None):
    """Evaluate, search or export, as the command line says."""
    runs, given = parse_args(argv)
    check_flags(runs, given)
    device = common.init_distributed()
    # The ranks share an evaluation. --export and --query run on rank 0 alone.
    if common.this_rank()[0] == 0 or not given.keys() & {"export", "query"}:
        run_command(runs, given, given.get("device", device))
    common.wait_for_rank_0()  # all ranks end together


@common.rank_0_prints()
def run_command(runs, given, device):
    """Evaluate each run on each --data. If a run fails, the other runs are evaluated, and then
    UserError is raised. With several ranks UserError is raised at once."""
    if "export" in given:
        return export(runs[0], given.get("checkpoint", Flags.checkpoint), given["export"])
    specs, failed = [{"data": spec} for spec in given.get("data", ())] or [{}], []
    for run in runs:
        found = []
        for spec in specs:
            with noted(failed, f"{run}: " if len(runs) > 1 else "", is_shared=True):
                found.append(evaluate_run(run, given | spec, device, failed))
        changes = sparo.change_of_means(found) if len(specs) > 1 else {}
        for metric, change in changes.items():
            print(f"{run}: {metric} {change:+.3f}")
    if failed:
        raise UserError(" ".join(failed))


if __name__ == "__main__":
    common.prepare_output()
    try:
        main()
    except UserError as error:
        common.let_rank_0_speak()
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
