"""Evaluate trained runs: `python eval.py RUN --task zeroshot,retrieval --data SPEC`, or several: `python eval.py RUN RUN ...`.

Prints a table and writes RUN/eval.json and pictures. Everything is computed in fp32: half-precision cosines tie. Of several
runs a last table shows mean and standard deviation over those that differ in their seed only, and a picture compares them.
A metric is a pure function of matrices; a task gathers the matrices; TASKS says which data each task can use.
"""

import argparse
import colorsys
import dataclasses
import functools
import itertools
import json
import math
import random
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import to_pil_image
from tqdm import tqdm

import bam
import common
import sparc
import sparo
import stair
from common import UserError

METHODS = {module.__name__: common.Method(module) for module in (sparo, stair, sparc, bam)}


# Metrics -------------------------------------------------------------------------------------------------------------


def dot(x, y):
    return x @ y.T


def recall_at_k(queries, keys, positives, ks=(1, 5, 10), chunk=1024, similarity=dot):
    """Share of queries with ANY positive among their k nearest keys. queries (Q, E), keys (K, E) -> {k: float}.

    positives: (Q, K) boolean function given as two group-id vectors (Q,), (K,): equal ids are positives. A positive counts
    as retrieved at its rank among the keys by similarity(queries, keys) -> (Q, K); on a tie the negative goes first. Ranks are
    made in chunks.
    """
    query_ids, key_ids = positives
    hits = {k: 0 for k in ks}
    for q, ids in zip(queries.split(chunk), query_ids.split(chunk)):
        scores = similarity(q, keys)                                     # (chunk, K)
        positive = ids[:, None] == key_ids                               # (chunk, K)
        best = scores.masked_fill(~positive, -torch.inf).amax(1, keepdim=True)
        rank = (scores.masked_fill(positive, -torch.inf) >= best).sum(1)  # negatives before the best positive
        for k in ks:
            hits[k] += (rank < k).sum().item()
    return {k: hits[k] / len(queries) for k in ks}


def class_embeddings(encode_text, names, templates):
    """Zero-shot classifier (C, E): embed each template of a class, normalise, average, normalise (CLIP)."""
    texts = [template.format(name) for name in names for template in templates]
    embeddings = encode_text(texts).view(len(names), len(templates), -1)  # (C, T, E)
    return F.normalize(embeddings.mean(1), dim=-1)


def knn_accuracy(train, train_labels, test, test_labels, k=20, tau=0.07, chunk=1024):
    """k nearest neighbours (DINO, Appendix): the k training features of highest cosine vote with exp(cosine / tau).

    Features (N, E), labels (N,) -> accuracy; k is at most the number of training features.
    """
    train, test = F.normalize(train, dim=-1), F.normalize(test, dim=-1)
    right, classes = 0, int(train_labels.max()) + 1
    for x, labels in zip(test.split(chunk), test_labels.split(chunk)):
        cosine, nearest = (x @ train.T).topk(min(k, len(train)))             # (chunk, k)
        votes = torch.zeros(len(x), classes).scatter_add_(1, train_labels[nearest], (cosine / tau).exp())
        right += (votes.argmax(1) == labels).sum().item()
    return right / len(test)


PROBES = {  # optimizer, its peak learning rate, a setting and the values to choose from, epochs, batch
    "adamw": (torch.optim.AdamW, dict(lr=0.1), "weight_decay", (0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2), 10, 256),      # SPARO, C.1
    "sgd": (functools.partial(torch.optim.SGD, momentum=0.9), {}, "lr", (0.002, 0.01, 0.05, 0.3), 100, 1024),    # BAM, Table 9b: .002, ResNet .3
}


def linear_probe(train, train_labels, test, test_labels, probe="adamw", least_steps=1000):
    """Linear classifier on frozen features, cosine schedule, for the epochs of PROBES, but at least `least_steps`: 10 epochs of
    ImageNet are 50,000. Weight decay or learning rate is chosen on the last fifth of a shuffled training set, then the whole of it
    is used. Features (N, E), labels (N,) -> (accuracy, {setting: value})."""
    make, fixed, setting, values, epochs, batch = PROBES[probe]
    classes = int(torch.maximum(train_labels.max(), test_labels.max())) + 1

    def fit(x, y, value):
        generator = torch.Generator().manual_seed(0)
        layer = torch.nn.Linear(x.shape[1], classes)
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        optimizer = make(layer.parameters(), **fixed, **{setting: value})
        rounds = max(epochs, math.ceil(least_steps / math.ceil(len(x) / batch)))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds * math.ceil(len(x) / batch))
        for _ in range(rounds):
            for rows in torch.randperm(len(x), generator=generator).split(batch):
                optimizer.zero_grad()
                F.cross_entropy(layer(x[rows]), y[rows]).backward()
                optimizer.step()
                schedule.step()
        return layer

    def accuracy(layer, x, y):
        with torch.no_grad():
            return (layer(x).argmax(1) == y).float().mean().item()

    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1))
    fitted, held = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    best = max(values, key=lambda x: accuracy(fit(train[fitted], train_labels[fitted], x), train[held], train_labels[held]))
    return accuracy(fit(train, train_labels, best), test, test_labels), {setting: best}


def k_means(x, k, generator, rounds=100, starts=3):
    """Clusters of x (n, E): the best of `starts` k-means, each begun by k-means++ (Arthur and Vassilvitskii 2007) -> ids (n,)."""
    best = (math.inf, None)
    for _ in range(starts):
        centres = x[torch.randint(len(x), (1,), generator=generator)]
        nearest = torch.full((len(x),), math.inf)
        while len(centres) < k:  # the next one with a probability that grows with the squared distance to those there are
            nearest = torch.minimum(nearest, (x - centres[-1]).square().sum(1))
            centres = torch.cat([centres, x[torch.multinomial(nearest + 1e-12, 1, generator=generator)]])
        old = None
        for _ in range(rounds):
            distance, ids = torch.cdist(x, centres).min(1)
            if old is not None and torch.equal(ids, old):
                break
            old, counts = ids, torch.bincount(ids, minlength=k)[:, None]         # (k, 1)
            centres = torch.where(counts > 0, torch.zeros_like(centres).index_add_(0, ids, x) / counts.clamp(min=1), centres)
        best = min(best, (distance.square().sum().item(), ids), key=lambda pair: pair[0])
    return best[1]


def contingency(a, b):
    """Labels a, b (n,) -> how many have each pair of them, (classes of a, classes of b), float64."""
    a, b = (x.unique(return_inverse=True)[1] for x in (a, b))
    return torch.bincount(a * (b.max() + 1) + b, minlength=int((a.max() + 1) * (b.max() + 1))).view(-1, int(b.max()) + 1).double()


def nmi(a, b):
    """Normalised mutual information of two clusterings (n,): 2 I / (H(a) + H(b)), 1 where both are the same."""
    p = contingency(a, b) / len(a)
    entropy_a, entropy_b, entropy = (-torch.xlogy(x, x).sum() for x in (p.sum(1), p.sum(0), p))
    return (2 * (entropy_a + entropy_b - entropy) / (entropy_a + entropy_b)).item() if entropy_a + entropy_b > 0 else 1.0


def ari(a, b):
    """Adjusted Rand index of two clusterings (n,) (Hubert and Arabie 1985): 1 for the same, 0 on average for random ones."""
    def pairs(x):
        return (x * (x - 1) / 2).sum()

    table = contingency(a, b)
    same, in_a, in_b, total = pairs(table), pairs(table.sum(1)), pairs(table.sum(0)), pairs(table.sum())
    expected, most = in_a * in_b / total, (in_a + in_b) / 2
    return ((same - expected) / (most - expected)).item() if most != expected else 1.0


def winoground_scores(s):
    """s (n, 2, 2), [pair, caption, image] -> (text, image, group) scores, each a share of the n pairs; ties are wrong."""
    text = (s[:, 0, 0] > s[:, 1, 0]) & (s[:, 1, 1] > s[:, 0, 1])
    image = (s[:, 0, 0] > s[:, 0, 1]) & (s[:, 1, 1] > s[:, 1, 0])
    return [x.float().mean().item() for x in (text, image, text & image)]


def k_precision(retrieved, truths, among=None):
    """K-Precision (SPARC, Sec. 4.4): the share of a retrieved caption's words that occur in its image's true captions, mean over
    images. retrieved: n lists of words; truths: n sets of words; among: count only these (K-Pna: nouns and adjectives); a
    caption without any of them does not count.
    """
    counted = [[word for word in words if among is None or word in among] for words in retrieved]
    return mean_known(sum(word in truth for word in words) / len(words) if words else None
                      for words, truth in zip(counted, truths))


def image_iou(predicted, truth, background=0, foreground_only=False):
    """Mean IoU over the foreground classes present in the truth, None without one. Maps (H, W) of class ids; 255 is ignored."""
    valid = (truth != 255) & ((truth != background) if foreground_only else True)
    ious = []
    for c in truth[valid].unique():
        if c != background:
            p_c, t_c = (predicted == c) & valid, (truth == c) & valid
            ious.append((p_c & t_c).sum() / (p_c | t_c).sum())
    return torch.stack(ious).mean().item() if ious else None


def mean_iou(predicted, truth, background=0, foreground_only=False):
    """Mean IoU of n maps (H, W) of class ids (SPARC, Sec. 4.5, D.7): per image over the foreground classes present in its truth,
    then over images that have one. truth 255 is ignored; `foreground_only` ignores background pixels.
    """
    return mean_known(image_iou(p, t, background, foreground_only) for p, t in zip(predicted, truth))


def mean_known(values):
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


# Embedding -----------------------------------------------------------------------------------------------------------


class ImageFiles(Dataset):
    """Image files for evaluation: (index, image), or (index, None) where one cannot be read."""

    def __init__(self, paths, size):
        self.paths, self.size, self.transform = paths, size, common.eval_transform(size)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        try:
            return i, self.transform(common.open_image(self.paths[i], self.size))
        except common.IMAGE_ERRORS:
            return i, None


class SegmentationFolder(Dataset):
    """Pascal VOC's layout: ImageSets/Segmentation/SPLIT.txt lists ids, of images JPEGImages/ID.jpg and of maps
    SegmentationClass/ID.png, 0 for background, 1, 2, ... for the classes, 255 for what does not count. Items: (id, image
    (3, S, S), map (H, W)), the whole image squeezed into the square, or (id, None, None) where a file cannot be read.

    classes: a file with the names of the classes 1, 2, ..., one a line; None: Pascal VOC's 20.
    """

    def __init__(self, directory, split, size, classes=None):
        self.directory, self.size = Path(directory), size
        lists = {path.stem: path for path in sorted(self.directory.glob("ImageSets/Segmentation/*.txt"))}
        if split not in lists:
            found = ", ".join(lists) or "nothing"
            raise UserError(f"{directory}/ImageSets/Segmentation has no {split}.txt; --split can be {found}.")
        self.ids = lists[split].read_text().split()
        self.classes = read_lines(classes, "--classes") if classes else VOC_CLASSES
        self.transform = v2.Compose([v2.Resize((size, size), v2.InterpolationMode.BICUBIC, antialias=True), v2.ToImage(),
                                     v2.ToDtype(torch.float32, scale=True), v2.Normalize(common.MEAN, common.STD)])

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        try:
            image = common.open_image(self.directory / "JPEGImages" / f"{self.ids[i]}.jpg", self.size)
            with Image.open(self.map_path(self.ids[i])) as file:
                return self.ids[i], self.transform(image), torch.from_numpy(np.array(file))
        except common.IMAGE_ERRORS:
            return self.ids[i], None, None

    def map_path(self, name):
        return self.directory / "SegmentationClass" / f"{name}.png"

    def check(self, name, truth):
        if truth.ndim != 2 or truth.dtype != torch.uint8:
            raise UserError(f"{self.map_path(name)} is no map of class ids (8 bits, palette or grey) but {truth.dtype} of shape "
                            f"{tuple(truth.shape)}: save ids, not colours.")
        highest = max((c for c in truth.unique().tolist() if c != 255), default=0)
        if highest > len(self.classes):
            raise UserError(f"{self.map_path(name)} holds class {highest}, but there are {len(self.classes)} names: give all with "
                            f"--classes.")

    def read(self, limit=None, workers=0):
        """The (image, map) of the items that can be read, and at the end a line about the others."""
        items = DataLoader(Subset(self, range(min(limit or len(self), len(self)))), None, num_workers=workers)
        unread = []
        for name, image, truth in items:
            if image is None:
                unread.append(name)
                continue
            self.check(name, truth)
            yield image, truth
        if len(unread) == len(items):
            raise UserError(f"None of the {len(items)} images of {self.directory} and their maps could be read, the last is "
                            f"{unread[-1:]}.")
        if unread:
            print(f"skipped {len(unread)} of {len(items)} images that cannot be read or have no map, the last {unread[-1]}")


def read_lines(path, flag):
    """The lines of a text file that are not empty."""
    try:
        return [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {path} cannot be read: {error}.") from None


class Embedder:
    """A trained model in evaluation mode: lists of captions and image tensors or files -> matrices on the CPU, fp32.

    A model with `late_interaction` compares patches with tokens, by its own `similarity`: what stands for an image is then
    (P, E) and for a caption (L, E), where others have (E,) and the dot product.
    """

    def __init__(self, model, tokenizer, context, image_size, device="cpu", chunk=256, workers=0):
        self.model, self.tokenizer, self.context, self.image_size = model.eval(), tokenizer, context, image_size
        self.device, self.chunk, self.workers = device, chunk, workers
        self.mask = None  # (E,), multiplies the encodings of images: concept selection (SPARO, Sec. 5.1, 5.2)
        self.words = self.unknown = 0  # of the texts, without [CLS] and [SEP]
        self.late = model.late_interaction
        self.sides = ("encode_patches", "encode_tokens") if self.late else ("encode_image", "encode_text")

    @torch.no_grad()
    def texts(self, captions, encode=None):
        """n captions -> (n, E), or (n, L, E) padded with zeros; encode: the model's method, by default for `similarity`."""
        rows = []
        for start in range(0, len(captions), self.chunk):
            tokens, mask = self.tokenizer.batch(captions[start : start + self.chunk], self.context)
            self.words += int(mask.sum()) - 2 * len(tokens)
            self.unknown += int((tokens == self.tokenizer.unk).sum())
            rows.append(getattr(self.model, encode or self.sides[1])(tokens.to(self.device), mask.to(self.device)).cpu())
        longest = max(x.shape[1] for x in rows)
        return torch.cat([F.pad(x, (0, 0, 0, longest - x.shape[1])) if x.ndim == 3 else x for x in rows])

    @torch.no_grad()
    def images(self, images, encode=None):
        """(n, 3, S, S) -> (n, E) or (n, P, E); encode as in `texts`."""
        encode = getattr(self.model, encode or self.sides[0])
        rows = torch.cat([encode(x.to(self.device)).cpu() for x in images.split(self.chunk)])
        return rows if self.mask is None else F.normalize(rows * self.mask, dim=-1)

    @torch.no_grad()
    def similarity(self, images, texts):
        """What `images` and `texts` gave, n and m of them -> scores (n, m)."""
        if self.late:
            return self.model.similarity(images.to(self.device), texts.to(self.device)).cpu()
        return dot(images, texts)

    def pairs(self, images, texts):
        """Scores (n,) of n images each with its own text."""
        return torch.cat([self.similarity(x, y).diagonal() for x, y in zip(images.split(16), texts.split(16))])

    def classify(self, images, names, templates):
        """Zero-shot scores (n, C) of what `images` gave: of each class its templates' mean."""
        if self.late:
            texts = self.texts([template.format(name) for name in names for template in templates])
            return self.similarity(images, texts).view(len(images), len(names), -1).mean(2)
        return dot(images, class_embeddings(self.texts, names, templates))

    def files(self, paths, encode=None, least=1):
        """Image files -> what `images` gives for the m that could be read, and their indices (m,); at least `least` of them."""
        loader = DataLoader(ImageFiles(paths, self.image_size), self.chunk, num_workers=self.workers, collate_fn=list)
        rows, kept = [], []
        for batch in loader:
            good = [(i, image) for i, image in batch if image is not None]
            if good:
                rows.append(self.images(torch.stack([image for _, image in good]), encode))
                kept += [i for i, _ in good]
        if len(kept) < least:
            raise UserError(f"None of the {len(paths)} images could be read, the first is {paths[0]}.")
        if len(kept) < len(paths):
            print(f"skipped {len(paths) - len(kept)} of {len(paths)} images that cannot be read")
        return torch.cat(rows) if rows else None, torch.tensor(kept, dtype=torch.long)


# Tasks ---------------------------------------------------------------------------------------------------------------

TEMPLATES = ["a photo of {}.", "{}", "a close-up of {}.", "a picture of {}."]
WORLD_CLASSES = {"colour": common.COLOUR_NAMES, "shape": common.SHAPE_NAMES,
                 "pair": [f"{c} {s}" for c in common.COLOUR_NAMES for s in common.SHAPE_NAMES]}
WORLD_NOUNS_ADJECTIVES = {*common.COLOUR_NAMES, "small", "large", "thing", "things", *common.SHAPE_NAMES,
                          *(common.plural(name) for name in common.SHAPE_NAMES)}
VOC_CLASSES = ["aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "dining table", "dog",
               "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv monitor"]
WORLD_N = 1000  # samples of the embedded world a task uses; its scenes come from the split's own part of the world


def random_order(source):
    """The indices of a table's images in an order that is always the same."""
    return torch.randperm(len(source), generator=torch.Generator().manual_seed(0)).tolist()


def class_names(source):
    """What prompts call the classes of class folders."""
    return [common.article(name.replace("_", " ")) for name in source.classes]


def folder_images(embed, source, limit=None, encode=None):
    """What `images` gives for the readable ones of `limit` random images of class folders, and their labels (m,)."""
    chosen = random_order(source)[:limit]
    images, kept = embed.files([source.paths[i] for i in chosen], encode)
    return images, torch.as_tensor(source.labels)[chosen][kept]


def shard_images(embed, source, limit=None, encode=None):
    """What `images` gives for the readable ones of the first `limit` images with labels of tar shards, and their labels (m,)."""
    samples, features, labels = itertools.islice(source.labelled(), limit), [], []
    while group := list(itertools.islice(samples, 4096)):
        images, kept = embed.files([image for image, _ in group], encode, least=0)
        features += [images] if len(kept) else []
        labels.append(torch.tensor([label for _, label in group])[kept])
    if not features:
        raise UserError(f"No image of {source.what} could be read.")
    return torch.cat(features), torch.cat(labels)


def pair_ids(scene):
    """World scene -> (n, K), the objects' index in WORLD_CLASSES["pair"]."""
    return scene["colour"] * 8 + scene["shape"]


def zeroshot(embed, source, options):
    """Top-1 accuracy. World: one object a scene, 64 colour-shape classes. Class folders: the folders' names."""
    if isinstance(source, common.World):
        sample = source.sample(WORLD_N, options.split, 1, objects=1)
        colour, shape = sample["scene"]["colour"][:, 0], sample["scene"]["shape"][:, 0]
        predicted = embed.classify(embed.images(sample["images"]), *world_prompts(source, "pair")).argmax(1)
        right = predicted == pair_ids(sample["scene"])[:, 0]
        held = torch.tensor([pair in source.heldout_pairs for pair in zip(colour.tolist(), shape.tolist())])
        return {"zeroshot": right, "zeroshot/colour": predicted // 8 == colour, "zeroshot/shape": predicted % 8 == shape,
                **({"zeroshot/heldout_pairs": right[held]} if held.any() else {})}
    names = class_names(source)
    images, labels = folder_images(embed, source, options.limit)
    predicted = embed.classify(images, names, options.templates or TEMPLATES).argmax(1)
    return {"zeroshot": predicted == labels, "zeroshot/chance": 1 / len(names)}


def captioned(embed, source, options):
    """Encodings of images, their numbers, and the list of captions of each; of the world scenes with the most objects, two captions
    each."""
    if is_world(source):
        sample, rng = source.sample(WORLD_N // 2, options.split, 2, objects=source.objects), random.Random(2)
        return embed.images(sample["images"]), torch.arange(WORLD_N // 2), [[source.caption(o, rng) for _ in range(2)]
                                                                            for o in sample["objects"]]
    images, kept = embed.files([source.paths[i] for i in range(min(len(source), options.limit or len(source)))])
    return images, kept, [source.captions_of(i) for i in kept.tolist()]


def retrieval(embed, source, options):
    """Recall at 1, 5, 10 both ways, every caption a query, and faithfulness: K-Precision of the caption ranked first for each image.
    K-Pna needs the world's word classes or a list of words."""
    images, kept, captions = captioned(embed, source, options)
    flat = [caption for group in captions for caption in group]
    texts, image_of_text = embed.texts(flat), kept.repeat_interleave(torch.tensor([len(group) for group in captions]))
    i2t = recall_at_k(images, texts, (kept, image_of_text), similarity=embed.similarity)
    t2i = recall_at_k(texts, images, (image_of_text, kept), similarity=lambda texts, images: embed.similarity(images, texts).T)
    first = [flat[j] for x in images.split(256) for j in embed.similarity(x, texts).argmax(1).tolist()]
    retrieved = [[word for word in common.split_words(caption) if word.isalnum()] for caption in first]  # no punctuation
    truths = [set(common.split_words(" ".join(group))) for group in captions]
    among = WORLD_NOUNS_ADJECTIVES if is_world(source) else options.nouns_adjectives
    return {f"{way}/R@{k}": value for way, table in (("i2t", i2t), ("t2i", t2i)) for k, value in table.items()} | {
        "faithfulness/K-P": k_precision(retrieved, truths),
        **({"faithfulness/K-Pna": k_precision(retrieved, truths, among)} if among else {}), "retrieval/images": len(images)}


def negative_pairs(embed, source, split, image_root):
    """Hard negatives -> kinds, list of n names; what `images` gives for each pair; captions; wrong captions."""
    if isinstance(source, common.World):
        sample, rng = source.sample(WORLD_N, split, 3, objects=min(3, source.objects)), random.Random(3)
        images = embed.images(sample["images"])
        rows = [(kind, i, *pair) for i, objects in enumerate(sample["objects"])
                for kind, pair in sorted(source.hard_negatives(objects, rng).items())]
    else:
        root = Path(image_root or ".")
        pairs = [(file.stem, item) for file in source for item in json.loads(file.read_text()).values()]
        names = sorted({item["filename"] for _, item in pairs})
        images, kept = embed.files([str(root / name) for name in names])
        index = {names[i]: row for row, i in enumerate(kept.tolist())}
        rows = [(kind, index[item["filename"]], item["caption"], item["negative_caption"]) for kind, item in pairs
                if item["filename"] in index]
    kinds, i, captions, wrong = zip(*rows)
    return kinds, images[list(i)], captions, wrong


def negatives(embed, source, options):
    """Share of pairs whose caption scores strictly higher than its hard negative, by SugarCrepe category."""
    kinds, x, captions, wrong = negative_pairs(embed, source, options.split, options.image_root)
    right = embed.pairs(x, embed.texts(captions)) > embed.pairs(x, embed.texts(wrong))
    by_kind = {kind: right[torch.tensor([k == kind for k in kinds])] for kind in sorted(set(kinds))}
    return {f"negatives/{kind}": value for kind, value in by_kind.items()} | {
        "negatives": sum(value.float().mean().item() for value in by_kind.values()) / len(by_kind)}


def winoground(embed, source, options):
    """Winoground's text, image and group scores on pairs of scenes that swap two colours."""
    images, captions = source.winoground(WORLD_N // 2, seed=4)
    x = embed.images(images.flatten(0, 1)).unflatten(0, (-1, 2))                                 # (n, 2, E)
    y = embed.texts([caption for pair in captions for caption in pair]).unflatten(0, (-1, 2))
    scores = torch.stack([embed.similarity(*pair).T for pair in zip(x, y)])                      # (n, 2, 2)
    return dict(zip(("winoground/text", "winoground/image", "winoground/group"), winoground_scores(scores)))


def label_maps(source, sample, by):
    """World sample -> class ids (n, S, S), 0 background, and the class names; by: "colour", "shape" or "pair"."""
    scene, segmentation = sample["scene"], sample["segmentation"]
    ids = {"colour": scene["colour"], "shape": scene["shape"], "pair": pair_ids(scene)}[by]
    ids = F.pad(ids + 1, (1, 0))                                          # (n, 1 + K)
    return ids.gather(1, segmentation.flatten(1)).view_as(segmentation), WORLD_CLASSES[by]


def world_prompts(source, by):
    """Names and templates of the world's colours, shapes or pairs, that speak as its captions do."""
    templates = {"colour": [f"{{}} {kind}" for kind in (common.SHAPE_NAMES if source.kinds else ["thing"])],
                 "shape": ["{}", "a photo of {}"], "pair": ["{}", "a photo of {}"]}
    return [common.article(name) for name in WORLD_CLASSES[by]], templates[by]


def embed_classes(embed, names, templates):
    """Text embeddings (C, E) of class names, to compare single patches with."""
    return class_embeddings(lambda texts: embed.texts(texts, "encode_text"), names, templates)


def segment(patches, classes, size):
    """Patches (n, P, E), classes (C, E) -> maps (n, H, W) of 1 + the class of highest cosine; size: (H, W), nearest upsampling."""
    grid = int(patches.shape[1] ** 0.5)
    best = (patches @ classes.T).argmax(-1).view(-1, 1, grid, grid) + 1
    return F.interpolate(best.float(), size, mode="nearest")[:, 0].long()


def segmentation(embed, source, options):
    """Zero-shot segmentation (SPARC, D.7): mIoU over the foreground classes present; of the world by colour, shape and pair.

    `miou` is the paper's: no background class, a background pixel that gets a class counts against it. `miou_fg` ignores
    background pixels: which object is where, without the objects' outlines.
    """
    if embed.model.encode_patches is None:
        return {}
    if is_world(source):
        sample, result = source.sample(WORLD_N // 2, options.split, 5, objects=source.objects), {}
        patches = embed.images(sample["images"], "encode_patches")
        for by in ("colour", "shape", "pair"):
            truth, _ = label_maps(source, sample, by)
            found = segment(patches, embed_classes(embed, *world_prompts(source, by)), truth.shape[1:])
            result[f"miou/{by}"] = mean_iou(found, truth)
            result[f"miou_fg/{by}"] = mean_iou(found, truth, foreground_only=True)
        return result
    classes = embed_classes(embed, [common.article(name) for name in source.classes], options.templates or TEMPLATES)
    scores, scores_fg = [], []
    for image, truth in source.read(options.limit, embed.workers):
        found = segment(embed.images(image[None], "encode_patches"), classes, truth.shape)[0]
        scores.append(image_iou(found, truth))
        scores_fg.append(image_iou(found, truth, foreground_only=True))
    return {"miou": mean_known(scores), "miou_fg": mean_known(scores_fg), "segmentation/images": len(scores)}


def labelled(embed, source, split, n, encode):
    """Features (N, E) and labels (N,) of the world's single objects, of the classes that it shows in training, of class folders,
    or of tar shards with labels."""
    if is_world(source):
        sample = source.sample(n, split, 9, objects=1)
        labels = pair_ids(sample["scene"])[:, 0]
        known = ~torch.isin(labels, torch.tensor([colour * 8 + shape for colour, shape in source.heldout_pairs]))
        return embed.images(sample["images"][known], encode), labels[known]
    return (folder_images if is_table(source) else shard_images)(embed, source, n, encode)


def open_train_data(source, options):
    """The data that k-NN and probes on the class folders `source` learn from. Raises UserError if it has not the same classes."""
    if options.train_data is None or same_path(options.train_data, options.data):
        raise UserError("k-NN and linear probes on class folders need --train-data, other class folders or tar shards with labels "
                        "to learn from.")
    train = common.open_data(options.train_data)
    if not isinstance(train, common.TarShards) and getattr(train, "classes", None) != source.classes:
        raise UserError(f"--train-data {options.train_data} must have the class folders of {options.data}: "
                        f"{', '.join(source.classes)}.")
    return train


def train_and_test(embed, source, options, encode):
    """Features and labels of the training part (the world's train split, or --train-data) and of the data to evaluate."""
    if is_world(source):
        return *labelled(embed, source, "train", 4 * WORLD_N, encode), *labelled(embed, source, options.split, WORLD_N, encode)
    train = open_train_data(source, options)
    x, y = labelled(embed, train, "train", options.train_limit, encode)
    if y.max() >= len(source.classes):
        raise UserError(f"{options.train_data}, to learn from, has label {y.max()}, but {options.data} has {len(source.classes)} class "
                        f"folders: label i is the folder at place i of the sorted names.")
    return x, y, *labelled(embed, source, options.split, options.limit, encode)


def same_path(a, b):
    return Path(a).resolve() == Path(b).resolve()


def knn(embed, source, options):
    """Accuracy of 20 nearest neighbours on the image encodings; on the world of pairs, colours and shapes."""
    train, train_labels, test, labels = train_and_test(embed, source, options, "encode_image")
    views = {"": lambda y: y, "/colour": lambda y: y // 8, "/shape": lambda y: y % 8} if is_world(source) else {"": lambda y: y}
    return {f"knn{name}": knn_accuracy(train, view(train_labels), test, view(labels)) for name, view in views.items()}


def linear(embed, source, options):
    """Accuracy of a linear probe on the normalised image encodings, or on what the model's paper probes."""
    encode = "probe_features"
    train, train_labels, test, labels = train_and_test(embed, source, options, encode)
    views = {"": lambda y: y, "/shape": lambda y: y % 8} if is_world(source) else {"": lambda y: y}
    result = {}
    for name, view in views.items():
        result[f"linear{name}"], chosen = linear_probe(train, view(train_labels), test, view(labels), options.probe)
        result |= {f"linear{name}/{setting}": value for setting, value in chosen.items()}
    return result


CLUSTERINGS = (10, 20, 40, 80, 160)  # classes of a clustering task (BAM, App. I)


def clusters(embed, source, options, repeats=10):
    """NMI and ARI of k-means on the image encodings of t random classes, mean over ten choices of them, for each t in CLUSTERINGS
    below the number of classes, and for all of them (BAM, App. I)."""
    x, labels = labelled(embed, source, options.split, 4 * WORLD_N if is_world(source) else options.limit, "encode_image")
    result, generator = {}, torch.Generator().manual_seed(0)
    views = {"": labels, "/shape": labels % 8} if is_world(source) else {"": labels}
    for name, truth in views.items():
        classes = truth.unique()
        for t in [*(t for t in CLUSTERINGS if t < len(classes)), len(classes)]:
            scores = []
            for _ in range(repeats if t < len(classes) else 1):
                rows = torch.isin(truth, classes[torch.randperm(len(classes), generator=generator)[:t]])
                found = k_means(x[rows], t, generator)
                scores.append((nmi(truth[rows], found), ari(truth[rows], found)))
            for metric, values in zip(("nmi", "ari"), zip(*scores)):
                result[f"clusters{name}/{t}/{metric}"] = sum(values) / len(values)
    return result


HEADLINES = {"zeroshot": "zeroshot", "i2t/R@1": "retrieval", "t2i/R@1": "retrieval", "negatives": "negatives"}  # metric: its task


def headlines(embed, source, options, tasks):
    """The headline metrics of those of the tasks that the data can serve."""
    found = {}
    for task in tasks:
        function, can_use = TASKS[task]
        found |= function(embed, source, options) if can_use(source) else {}
    return {key: value for key, value in found.items() if key in HEADLINES}


def with_mask(embed, source, options, mask):
    """The headline metrics while `mask` (M,) multiplies the encodings of images."""
    embed.mask = mask
    try:
        found = headlines(embed, source, options, dict.fromkeys(HEADLINES.values()))
    finally:
        embed.mask = None
    return {key: torch.as_tensor(value).float().mean().item() for key, value in found.items()}


def open_selection(embed, source, options, task, can_use, what):
    """The data of --select, that slots or masks are chosen on, or the world. Data to evaluate cannot choose too."""
    if options.select is None and is_world(source):
        return source
    if options.select is None or same_path(options.select, options.data):
        raise UserError(f"Task {task} needs --select, {what}, other than the data to evaluate on.")
    selection = open_eval_data(options.select, options.select_root, "val", embed.image_size)
    if not can_use(selection):
        raise UserError(f"Task {task} needs {what}; --select {options.select} is something else.")
    return selection


def slots(embed, source, options):
    """Post-hoc concept selection (SPARO, Sec. 5.1): slots ranked by their zero-shot accuracy alone on --select or the world's val
    split, the best half, the best quarter and, for comparison, the worst half evaluated on the split asked for."""
    if not embed.model.slots:
        return {}
    selection = open_selection(embed, source, options, "slots", TASKS["zeroshot"][1], "class folders to rank the slots on")
    if is_world(selection):
        sample, (names, templates) = selection.sample(WORLD_N, "val", 8, objects=1), world_prompts(selection, "pair")
        images, labels = embed.images(sample["images"], "image_slots"), pair_ids(sample["scene"])[:, 0]
    else:
        names, templates = class_names(selection), options.templates or TEMPLATES
        images, labels = folder_images(embed, selection, options.train_limit, "image_slots")
    texts = embed.texts([template.format(name) for name in names for template in templates], "text_slots")
    classes = F.normalize(texts, dim=-1).unflatten(0, (len(names), -1)).mean(1)                  # (C, L, V)
    accuracy = sparo.slot_accuracies(images, classes, labels)
    L, V = classes.shape[1:]
    order = accuracy.argsort(descending=True)
    result = {"slots/accuracy_best": accuracy.max(), "slots/accuracy_mean": accuracy.mean()}
    choices = {"all": order, "best_half": order[: L // 2], "best_quarter": order[: L // 4], "worst_half": order[L // 2 :]}
    for name, chosen in choices.items():
        mask = torch.zeros(L).index_fill(0, chosen, 1).repeat_interleave(V)
        result |= {f"slots/{name}/{key}": value for key, value in with_mask(embed, source, options, mask).items()}
    return result


def masks(embed, source, options):
    """Masks of the image encoding trained on the hard negatives of --select or the world (SPARO, Sec. 5.2, Table 5): for L parts
    and for single dimensions the share of right pairs before and after, and the relative change of the other metrics divided by
    that of this share."""
    if not embed.model.mask_parts:
        return {}
    selection = open_selection(embed, source, options, "masks", TASKS["negatives"][1], "SugarCrepe's files to train the mask on")
    _, x, captions, wrong = negative_pairs(embed, selection, options.split, options.select_root)
    y_p, y_n = embed.texts(captions), embed.texts(wrong)
    before, result = with_mask(embed, source, options, None), {}
    for name, parts in (("slots", embed.model.mask_parts), ("dimensions", x.shape[1])):
        if x.shape[1] % parts:
            continue
        mask, start, fit = sparo.train_mask(x, y_p, y_n, parts, generator=torch.Generator().manual_seed(0))
        after = with_mask(embed, source, options, mask)
        result |= {f"masks/{name}/pairs_before": start, f"masks/{name}/pairs": fit, f"masks/{name}/kept": mask.mean().item()}
        for key in [key for key in before if key != "negatives"]:
            change = (after[key] / before[key] - 1) / (fit / start - 1) if fit > start and before[key] else float("nan")
            result |= {f"masks/{name}/{key}": after[key], f"masks/{name}/{key}/relative_change": change}
    return result


def vocabulary_scores(embed, images):
    """What `images` gave -> scores (n, |V|) of every word of the vocabulary, special tokens at -inf: STAIR's encodings are these
    scores; of other models the similarities with the encodings of the single words (STAIR, Sec. 5.1)."""
    if embed.model.encode_words is None:
        images = embed.similarity(images, embed.texts([token.removeprefix("##") for token in embed.tokenizer.vocab]))
    scores = word_columns(embed, images).clone()
    scores[:, embed.tokenizer.special] = -torch.inf
    return scores


def label_ranks(scores, pieces, labels):
    """Ranks from 0 of the labels among all words: scores (n, |V|), pieces: of each class the ids of its sub-words, the best of
    which counts; labels (n,) -> (n,). Equal scores go before."""
    own = torch.stack([scores[:, ids].amax(1) for ids in pieces], 1).gather(1, labels[:, None])   # (n, 1)
    return (scores >= own).sum(1) - 1


def words(embed, source, options):
    """Interpretability (STAIR, Table 4): how often an image's label is among the k best words of the whole vocabulary; on the world
    the colour's name, the shape's, and the better of both. Of captioned images: the share of the ten best tokens that the image's
    captions hold, and, by chance, those of another image."""
    if not has_classes(source):
        images, _, captions = captioned(embed, source, options)
        best = vocabulary_scores(embed, images).topk(10).indices                              # (n, 10)
        own = [torch.tensor(embed.tokenizer.encode(" ".join(group))) for group in captions]
        return {name: torch.stack([torch.isin(row, ids).float().mean() for row, ids in zip(best, ids_of)])
                for name, ids_of in (("words/in_captions", own), ("words/in_others_captions", own[1:] + own[:1]))}
    if is_world(source):
        sample = source.sample(WORLD_N, options.split, 1, objects=1)
        scores, scene = vocabulary_scores(embed, embed.images(sample["images"])), sample["scene"]
        labels = {f"/{by}": (WORLD_CLASSES[by], scene[by][:, 0]) for by in ("colour", "shape")}
    else:
        images, found = folder_images(embed, source, options.limit)
        scores, labels = vocabulary_scores(embed, images), {"": ([name.replace("_", " ") for name in source.classes], found)}
    ranks = {by: label_ranks(scores, [embed.tokenizer.encode(name)[1:-1] for name in names], ids)
             for by, (names, ids) in labels.items()}
    if len(ranks) > 1:
        ranks[""] = torch.stack(list(ranks.values())).amin(0)
    return {f"words{by}/top{k}": rank < k for by, rank in ranks.items() for k in (1, 10, 50, 100)}


def textfree(embed, source, options):
    """Zero-shot classification and retrieval without the text tower (STAIR, Table 5): a text is the set of its tokens."""
    if embed.model.encode_words is None:
        return {}
    sides = embed.sides
    embed.sides = (sides[0], "encode_words")
    try:
        found = headlines(embed, source, options, ("zeroshot", "retrieval"))
    finally:
        embed.sides = sides
    return {f"textfree/{key}": value for key, value in found.items()}


def sparsity(embed, source, options):
    """How many words are active in an image's and in a caption's encoding, mean, and the dense width that they replace."""
    if embed.model.encode_words is None:
        return {}
    images, captions = picture_samples(source, options, options.limit or 500)
    return {"active/image": (embed.images(images) > 0).sum(1).float().mean(),
            "active/text": (embed.texts(captions) > 0).sum(1).float().mean()}


def patch_maps(embed, images, names):
    """p(h_j) of names at the patches of images (n, 3, S, S), mean over a name's sub-words (STAIR, Sec. 7.2) -> (n, g * g, names)."""
    pieces = [embed.tokenizer.encode(name)[1:-1] for name in names]
    ids, patches = torch.tensor([i for own in pieces for i in own], device=embed.device), embed.model.image_encoder.grid ** 2
    with torch.no_grad():
        maps = torch.cat([embed.model.word_maps(x.to(embed.device), ids)[:, -patches:].cpu() for x in images.split(embed.chunk)])
    return torch.stack([part.mean(-1) for part in maps.split([len(own) for own in pieces], -1)], -1)


def pointing(embed, source, options):
    """The pointing game (STAIR, Sec. 7.2): how often the centre of the patch that scores highest for a colour's or a shape's name
    lies on an object that has it, and how often that of a random patch would."""
    if embed.model.word_maps is None:
        return {}
    sample, grid, result = source.sample(WORLD_N // 2, options.split, 5), embed.model.image_encoder.grid, {}
    centre = (torch.arange(grid) * 2 + 1) * source.size // (2 * grid)
    for by, names in (("colour", common.COLOUR_NAMES), ("shape", common.SHAPE_NAMES)):
        best = patch_maps(embed, sample["images"], names).argmax(1)                              # (n, C)
        truth = label_maps(source, sample, by)[0][:, centre][:, :, centre].flatten(1)            # (n, g * g)
        on = truth[:, :, None] == torch.arange(1, len(names) + 1)                                # (n, g * g, C)
        shown = on.any(1)
        result[f"pointing/{by}"] = on.gather(1, best[:, None])[:, 0][shown].float().mean()
        result[f"pointing/{by}_chance"] = on.float().mean(1)[shown].mean()
    return result


def is_world(source):
    return isinstance(source, common.World)


def can_segment(source):
    return is_world(source) or isinstance(source, SegmentationFolder)


def is_table(source):
    return isinstance(source, common.CaptionTable)


def has_classes(source):
    """The world, or class folders."""
    return is_world(source) or is_table(source) and source.classes is not None


IMAGE_TASKS = {"knn", "linear", "clusters"}  # need no text tower
TASKS = {  # name: (function, which data it can use)
    "zeroshot": (zeroshot, has_classes),
    "retrieval": (retrieval, lambda s: is_world(s) or is_table(s) and s.classes is None),
    "negatives": (negatives, lambda s: is_world(s) or isinstance(s, list)),
    "winoground": (winoground, lambda s: is_world(s) and s.palette > 1),
    "segmentation": (segmentation, can_segment),
    "words": (words, lambda s: is_world(s) or is_table(s)),
    "textfree": (textfree, lambda s: is_world(s) or is_table(s)),
    "sparsity": (sparsity, lambda s: is_world(s) or is_table(s)),
    "pointing": (pointing, is_world),
    "knn": (knn, has_classes),
    "linear": (linear, has_classes),
    "clusters": (clusters, has_classes),
    "slots": (slots, lambda s: not isinstance(s, (SegmentationFolder, common.TarShards))),
    "masks": (masks, lambda s: is_world(s) or is_table(s)),
}
OF_WORDS = {"words", "textfree", "sparsity"}  # run by default where encodings are words
ON_REQUEST = {"knn", "linear", "clusters", "slots", "masks", "pointing"} | OF_WORDS  # run only where --task names them


# Pictures ------------------------------------------------------------------------------------------------------------

PALETTE = torch.tensor([(40, 40, 40), (230, 60, 60), (60, 180, 75), (70, 110, 240), (245, 225, 60), (150, 60, 190),
                        (245, 140, 40), (250, 170, 210), (240, 240, 240),
                        *([round(255 * x) for x in colorsys.hsv_to_rgb(0.382 * i % 1, (0.95, 0.5)[i % 2], (0.95, 0.75, 0.55)[i % 3])]
                          for i in range(9, 255)), (255, 255, 255)], dtype=torch.uint8)


def to_picture(image, side):
    """Normalised (3, H, W) -> PIL image of side x side, pixels enlarged without smoothing."""
    return to_pil_image(common.denormalize(image).clamp(0, 1)).resize((side, side), Image.Resampling.NEAREST)


def sheet(rows, path, side, title, legend=()):
    """Rows of (PIL image, label) cells -> one PNG: a title, a legend of (colour, name), a label of one or two lines a cell."""
    font, cell, top = ImageFont.load_default(12), side + 8, 52 if legend else 28
    tall = side + 20 + 14 * max(label.count("\n") for row in rows for _, label in row)
    page = Image.new("RGB", (max(cell * max(map(len, rows)) + 8, 640), top + len(rows) * tall), "white")
    draw = ImageDraw.Draw(page)
    draw.text((8, 6), title, "black", font)
    x = 8
    for colour, name in legend:
        draw.rectangle((x, 30, x + 12, 42), fill=colour, outline="black")
        draw.text((x + 18, 28), name, "black", font)
        x += 34 + int(font.getlength(name))
    for r, row in enumerate(rows):
        for c, (image, label) in enumerate(row):
            x, y = 8 + c * cell, top + (r + 1) * tall - side - 4
            lines = [next(line[:n] for n in range(len(line), -1, -1) if font.getlength(line[:n]) <= side)
                     for line in label.split("\n")]
            draw.multiline_text((x, y - 2), "\n".join(lines), "black", font, anchor="ld", spacing=1)
            page.paste(image.resize((side, side), Image.Resampling.NEAREST), (x, y))
    page.save(path)


def picture_samples(source, options, n):
    """n samples -> images (n, 3, S, S) and one caption each."""
    if isinstance(source, common.World):
        sample = source.sample(n, options.split, 6, objects=min(3, source.objects))
        return sample["images"], sample["captions"]
    found, order = [], range(len(source))
    files = ImageFiles(source.paths, options.image_size)
    if source.classes is not None:  # of all classes
        order = random_order(source)
    for i in order:
        image = files[i][1]
        if image is not None:
            found.append((image, source.captions_of(i)[0]))
        if len(found) == n:
            break
    images, captions = zip(*found)
    return torch.stack(images), list(captions)


def faded(picture, weights):
    """A PIL image, the more faded to white the less weight (P,) a patch has."""
    grid = int(len(weights) ** 0.5)
    light = to_pil_image(0.08 + 0.92 * (weights / weights.max()).view(1, grid, grid))
    light = light.resize(picture.size, Image.Resampling.NEAREST)
    return Image.composite(picture, Image.new("RGB", picture.size, "white"), light)


@torch.no_grad()
def draw_alignment(embed, source, options, path):
    """Which patches each word of a caption is aligned to (SPARC, Eq. 4): the more weight, the less faded to white."""
    if embed.model.align_words is None or isinstance(source, SegmentationFolder):
        return False
    images, captions = picture_samples(source, options, 8)
    tokens, mask = embed.tokenizer.batch(captions, embed.context)
    weights = embed.model.align_words(*(x.to(embed.device) for x in (images, tokens, mask))).cpu()  # (n, L, P)
    side, rows = 112, []
    for i, image in enumerate(images):
        picture = to_picture(image, side)
        rows.append([(picture, "image"), *((faded(picture, weights[i, l]), embed.tokenizer.vocab[tokens[i, l]])
                                           for l in range(1, min(int(mask[i].sum()) - 1, 15)))])
    sheet(rows, path, side, "Alignment of words to patches (a_lp, Eq. 4): what is not faded to white belongs to the word above")
    return True


def colour_map(ids):
    """Class ids (H, W) -> PIL image."""
    return to_pil_image(PALETTE[ids.long()].permute(2, 0, 1))


def picture_maps(source, options):
    """Eight samples -> images (8, 3, S, S), and for each way to name the classes, of the world by what its captions name of
    colour and shape: (its name, class names, prompts, true maps)."""
    if isinstance(source, SegmentationFolder):
        images, truths = zip(*itertools.islice(source.read(options.limit), 8))
        prompts = [common.article(name) for name in source.classes], options.templates or TEMPLATES
        return torch.stack(images), [("class", source.classes, prompts, truths)]
    sample = source.sample(8, options.split, 7, objects=source.objects)
    return sample["images"], [(by, WORLD_CLASSES[by], world_prompts(source, by), label_maps(source, sample, by)[0])
                              for by, named in (("colour", source.colours), ("shape", source.kinds)) if named]


def names_in(truth, names):
    return ", ".join(names[c - 1] for c in truth.unique().tolist() if 0 < c < 255)


def legend_of(source, maps, found):
    """The colours that stand for classes: of the world's all, of a folder's those in the true and found maps."""
    if is_world(source):
        both = zip(*(names for _, names, _, _ in maps))
        return [(tuple(PALETTE[i + 1].tolist()), " or ".join(names)) for i, names in enumerate(both)]
    (_, names, _, truths), = maps
    present = sorted({c for shown in (*truths, *found) for c in shown.unique().tolist() if 0 < c < 255})
    return [(tuple(PALETTE[c].tolist()), names[c - 1]) for c in present]


def found_maps(embed, images, prompts, truths):
    """What a model finds in pictures: images (n, 3, S, S) -> n maps of their truths' sizes."""
    classes, patches = embed_classes(embed, *prompts), embed.images(images, "encode_patches")
    return [segment(patches[i : i + 1], classes, truth.shape)[0] for i, truth in enumerate(truths)]


def draw_segmentation(embed, source, options, path):
    """Image, true and found segmentation, with the names of what is there; of the world by colour and by shape."""
    if not can_segment(source) or embed.model.encode_patches is None:
        return False
    (images, maps), side = picture_maps(source, options), 144
    rows, all_found = [[(to_picture(image, side), "image")] for image in images], []
    for by, names, prompts, truths in maps:
        all_found += found_maps(embed, images, prompts, truths)
        for row, truth, found in zip(rows, truths, all_found[-len(truths):]):
            row += [(colour_map(truth), f"true:\n{names_in(truth, names)}"), (colour_map(found), f"{by} found\nfor each patch"),
                    (colour_map(torch.where(truth > 0, found, 0)), f"{by} found,\nobjects only")]
    sheet(rows, path, side, "Zero-shot segmentation: each patch takes the class whose text is nearest", legend_of(source, maps, all_found))
    return True


def draw_comparison(runs, source, options, path):
    """Image, truth and what each run finds (SPARC, Fig. 3); of the world by colour and by shape. runs: {name: Embedder}."""
    (images, maps), side = picture_maps(source, options), 112
    rows, all_found = [[(to_picture(image, side), "image")] for image in images], []
    for _, names, prompts, truths in maps:
        for row, truth in zip(rows, truths):
            row.append((colour_map(truth), f"true:\n{names_in(truth, names)}"))
        for name, embed in runs.items():
            all_found += found_maps(embed, images, prompts, truths)
            for row, found in zip(rows, all_found[-len(truths):]):
                row.append((colour_map(found), name))
    sheet(rows, path, side, "Zero-shot segmentation: each patch takes the class whose text is nearest", legend_of(source, maps, all_found))


@torch.no_grad()
def draw_slots(embed, source, options, path):
    """What single slots of SPARO attend to in images and captions (Sec. 5.4): as in the paper slots with sharp attention to words,
    to other words than the slots above, and samples in which the slot's image and text agree (cosine above .75)."""
    if not embed.model.slots or isinstance(source, SegmentationFolder):
        return False
    images, captions = picture_samples(source, options, 64)
    tokens, mask = embed.tokenizer.batch(captions, embed.context)
    over_image, over_text, y_i, y_t = (x.cpu() for x in embed.model.attend(*(x.to(embed.device) for x in (images, tokens, mask))))
    sharpness, word = over_text.max(-1)                                   # (n, L)
    is_word = (word > 0) & (word < mask.sum(1, keepdim=True) - 1)
    agree = (F.cosine_similarity(y_i, y_t, dim=-1) > 0.75) & (sharpness > 0.5) & is_word

    def overlap(a, b):
        return (word[:, a] == word[:, b])[agree[:, a]].float().mean()

    chosen = []
    for slot in (agree * sharpness).sum(0).argsort(descending=True).tolist():
        if agree[:, slot].sum() >= 4 and all(overlap(slot, other) < 0.3 for other in chosen):
            chosen.append(slot)
    rows, side = [], 112
    for slot in chosen[:8]:
        row = []
        for i in agree[:, slot].nonzero()[:8, 0].tolist():
            patches = over_image[i, slot, -embed.model.image_encoder.grid ** 2:]  # without [CLS]
            picture = to_picture(images[i], side)
            row += [(picture, f"slot {slot}:\n{embed.tokenizer.vocab[tokens[i, word[i, slot]]]}"), (faded(picture, patches), "")]
        rows.append(row)
    if rows:
        sheet(rows, path, side, "Slots of SPARO, a row each: the word that the slot attends to, the image, and what the slot sees of "
                                "it (the rest fades)")
    return bool(rows)


def word_cloud(weights, side):
    """[(word, weight), ...], heaviest first -> picture of side x side, letters as large as the weights."""
    page = Image.new("RGB", (side, side), "white")
    draw, x, y, tall = ImageDraw.Draw(page), 2, 2, 0
    for word, weight in weights:
        size = 8 + round(10 * weight / weights[0][1])
        font = ImageFont.load_default(size)
        if x + font.getlength(word) > side:
            x, y, tall = 2, y + tall, 0
        if y + size > side:
            break
        draw.text((x, y), word, "black", font)
        x, tall = x + font.getlength(word) + size / 3, max(tall, size + 3)
    return page


def draw_words(embed, source, options, path):
    """The 20 heaviest words of images' encodings, as large as their weights (STAIR, Fig. 4), beside a caption."""
    if embed.model.encode_words is None or isinstance(source, SegmentationFolder):
        return False
    (images, captions), rows = picture_samples(source, options, 16), []
    for image, enc, caption in zip(images, embed.images(images), captions):
        top = [(embed.tokenizer.vocab[k], enc[k].item()) for k in enc.topk(20).indices.tolist() if enc[k] > 0]
        label = "\n".join(textwrap.wrap(caption, 23)[:4])
        rows.append([(to_picture(image, 144), label), *([(word_cloud(top, 144), "")] if top else [])])
    pairs = [left + right for left, right in itertools.zip_longest(rows[::2], rows[1::2], fillvalue=[])]
    sheet(pairs, path, 144, "STAIR: images, one of their captions, and the words of their encodings, as large as their weights")
    return True


def draw_queries(embed, source, options, path):
    """Where words are found in images without a text tower (STAIR, Fig. 10): words of a caption that a vocabulary entry stands for,
    and one that the caption lacks; bright where p(h_j) is high, from its least to its largest value in the image."""
    if embed.model.word_maps is None or isinstance(source, SegmentationFolder):
        return False
    images, captions = picture_samples(source, options, 10)
    every = [[word for word in common.split_words(caption) if len(word) > 2 and word in embed.tokenizer.ids]
             for caption in captions]
    if is_world(source):
        every = [[word for word in own if word in WORLD_NOUNS_ADJECTIVES] for own in every]
    rows, side = [], 112
    for i, own in enumerate(every):
        shown = list(dict.fromkeys(own))[:5]
        absent = [word for other in every[i + 1 :] + every[:i] for word in other if word not in own][:1]
        if shown + absent:
            picture = to_picture(images[i], side)
            maps = patch_maps(embed, images[i : i + 1], shown + absent)[0].T                     # (words, g * g)
            maps = (maps - maps.amin(1, keepdim=True)) / (maps.amax(1, keepdim=True) - maps.amin(1, keepdim=True)).clamp(min=1e-6)
            rows.append([(picture, captions[i])] + [(faded(picture, m), word + "\n(not in the caption)" * (word in absent))
                                                    for word, m in zip(shown + absent, maps)])
    if not rows:
        return False
    sheet(rows, path, side, "STAIR: where words are found in images, without a text tower; what scores low fades")
    return True


def file_name(spec):
    """A SPEC as a part of a file's name."""
    return re.sub("[^A-Za-z0-9]+", "-", spec).strip("-")


def is_boolean(query):
    return any(part in ("AND", "OR", "NOT") for part in stair.parts_of(query))


def lower_words(expression):
    """A boolean query with its words as the vocabulary spells them."""
    return " ".join(part if part in stair.OPERATORS else part.lower() for part in stair.parts_of(expression))


def wanted_words(query):
    """The words of a query that are not negated, by a NOT before them or before a parenthesis around them."""
    wanted, negated, outside = [], False, [False]
    for part in stair.parts_of(lower_words(query)):
        if part == "NOT":
            negated = not negated
        elif part == "(":
            outside.append(outside[-1] != negated)
            negated = False
        elif part == ")":
            outside = outside[:-1] or outside
        elif part not in stair.OPERATORS:
            wanted += [part] if negated == outside[-1] else []
            negated = False
    return wanted


def word_columns(embed, encodings):
    """Encodings without the columns that an embedding larger than the vocabulary has."""
    return encodings[:, : len(embed.tokenizer)]


def search(embed, source, options, run):
    """Index images (STAIR, App. D) into RUN/index.pt and, for other engines, RUN/index.jsonl, answer --query, and show what is found
    in RUN/search.png; of other data than the run's DATA-index.pt and so on. A query is a caption, answered with the text tower and
    without it, or words with AND, OR, NOT, parentheses."""
    if embed.model.encode_words is None:
        raise UserError("--query needs a run of --method stair: other encodings have no words.")
    if not (is_world(source) or is_table(source)):
        raise UserError(f"--query searches shapes, captioned images or class folders; {options.data} is something else.")
    index = stair.InvertedIndex(embed.tokenizer.vocab)
    try:  # before all is encoded
        for query in options.query:
            if is_boolean(query):
                index.where(lower_words(query))
            if not wanted_words(query):
                raise ValueError("it has no word to rank by: give one without NOT.")
    except ValueError as error:
        raise UserError(f"--query {query!r}: {error}") from None
    pictures, contents = {}, {}
    if is_world(source):
        sample = source.sample(WORLD_N, options.split, 7)
        pictures = {str(i): image for i, image in enumerate(sample["images"])}
        contents = dict(zip(pictures, sample["captions"]))
        index.add(list(pictures), word_columns(embed, embed.images(sample["images"], "image_encoding")))
    else:
        paths = [source.paths[i] for i in range(min(len(source), options.limit or len(source)))]
        for start in tqdm(range(0, len(paths), 1000), "images in thousands"):
            encodings, kept = embed.files(paths[start : start + 1000], "image_encoding", least=0)
            if len(kept):
                index.add([paths[start + i] for i in kept.tolist()], word_columns(embed, encodings))
            contents |= {paths[start + i]: source.captions_of(start + i)[0] for i in kept.tolist()}
    own = common.read_config(run)["data"] == options.data
    prefix = "" if own else file_name(options.data) + "-"
    path = Path(run, prefix + ("index.pt" if options.checkpoint == "last.pt" else f"index-{options.checkpoint}"))
    index.save(path)
    index.export(path.with_suffix(".jsonl"), contents=contents)
    print(f"{len(index)} images in {path} and {path.with_suffix('.jsonl')}")
    rows, transform = [], common.eval_transform(embed.image_size)
    for query in options.query:
        if is_boolean(query):
            answers = {"": index.search(dict.fromkeys(wanted_words(query), 1.0), 8, where=lower_words(query))}
        else:
            unknown = embed.unknown
            answers = {name: index.search(word_columns(embed, embed.texts([query], encode))[0], 8, cosine=True)
                       for name, encode in (("text tower", "encode_text"), ("words alone", "encode_words"))}
            if embed.unknown > unknown:
                print(f"{query}: the vocabulary does not know {(embed.unknown - unknown) // 2} of its words.")
        for name, found in answers.items():
            print(f"{query}{name and f' ({name})'}: " + (", ".join(f"{key} ({score:.2f})" for key, score in found) or "nothing"))
            shown = [pictures[key] if key in pictures else transform(common.open_image(key, embed.image_size)) for key, _ in found]
            rows.append([(word_cloud([(word, 1.0) for word in query.split()], 112), name)] + [
                (to_picture(image, 112), f"{score:.2f}") for image, (_, score) in zip(shown, found)])
    if rows:
        sheet(rows, Path(run, f"{prefix}search.png"), 112, "STAIR: what queries find, a row each, best first; scores are cosines, of "
                                                           "words with AND, OR, NOT sums of weights")
        print(f"picture: {Path(run, f'{prefix}search.png')}")


@torch.no_grad()
def draw_heads(embed, source, options, path):
    """What [CLS] attends to in the last block: the mean over heads, then each head (BAM, Fig. 5)."""
    if embed.model.head_maps is None or embed.model.image_encoder.cls is None or isinstance(source, SegmentationFolder):
        return False
    images, _ = picture_samples(source, options, 8)
    weights, side, rows = embed.model.head_maps(images.to(embed.device)).cpu(), 112, []
    for image, heads in zip(images, weights):                                    # heads (h, grid, grid)
        picture = to_picture(image, side)
        maps = [("mean of heads", heads.mean(0)), *((f"head {i}", head) for i, head in enumerate(heads, 1))]
        rows.append([(picture, "image"), *((faded(picture, each.flatten()), name) for name, each in maps)])
    sheet(rows, path, side, "Attention of [CLS] to the patches in the last block: what is not faded to white counts most")
    return True


def chart(curves, path, title, x_name):
    """Curves {name: [(x, y), ...]} -> one PNG, both axes from 0."""
    width, height, left, top, font = 640, 360, 56, 60, ImageFont.load_default(12)
    page = Image.new("RGB", (width + left + 24, height + top + 44), "white")
    draw = ImageDraw.Draw(page)
    highest = [max(point[axis] for curve in curves.values() for point in curve) for axis in (0, 1)]
    ticks = [[step * i for i in range(math.ceil(high / step) + 1)] for high, step in ((high, round_step(high)) for high in highest)]
    x_high, y_high = (each[-1] for each in ticks)

    def place(x, y):
        return left + x / x_high * width, top + height * (1 - y / y_high)

    draw.text((left, 6), title, "black", font)
    for x in ticks[0]:
        draw.text((place(x, 0)[0], top + height + 6), f"{x:g}", "black", font, anchor="ma")
    for y in ticks[1]:
        draw.line((*place(0, y), *place(x_high, y)), "#dddddd")
        draw.text((left - 6, place(0, y)[1]), f"{y:g}", "black", font, anchor="rm")
    draw.text((left + width, top + height + 24), x_name, "black", font, anchor="ra")
    right = left
    for i, (name, curve) in enumerate(curves.items(), 1):
        colour = tuple(PALETTE[i].tolist())
        draw.line([place(*point) for point in curve], colour, 2)
        draw.text((right, 26), name, colour, font)
        right += draw.textlength(name, font) + 24
    page.save(path)


def round_step(high):
    """The least of 1, 2, 4, 5, 10, 20, ... of which five reach `high`, above 0."""
    power = 10 ** math.floor(math.log10(max(high, 1e-9) / 5))
    return next(power * factor for factor in (1, 2, 4, 5, 10) if 5 * power * factor >= high)


def draw_entropies(embed, source, options, path):
    """How the entropies of A and B went in training (BAM, Fig. 3), from the run's log."""
    log = Path(path.parent, "log.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if path.name != "entropies.png" or len(records) < 2 or "entropy_a" not in records[0]:  # not again for other data
        return False
    curves = (("A", "entropy_a"), ("B", "entropy_b"), ("uniform", "chance_loss"))
    chart({name: [(record["step"], record[key]) for record in records] for name, key in curves}, path,
          "Mean entropy of the rows of A and of their target B, in nats", "step")
    return True


PICTURES = {"entropies.png": draw_entropies, "heads.png": draw_heads, "words.png": draw_words, "queries.png": draw_queries,
            "alignment.png": draw_alignment, "segmentation.png": draw_segmentation, "slots.png": draw_slots}


# Runs ----------------------------------------------------------------------------------------------------------------


def usable_tasks(source, has_text, data):
    """The names of the tasks that the data and the model can serve. Raises UserError if there is none."""
    usable = [name for name, (_, can_use) in TASKS.items() if can_use(source) and (has_text or name in IMAGE_TASKS)]
    if not usable:
        needed = "class folders or shapes to a model without a text tower"
        if has_text:
            needed = "captions, class folders, SugarCrepe or shapes"
        raise UserError(f"No task can evaluate on {data}: give {needed}.")
    return usable


def evaluate(embed, source, options):
    """Run the tasks of `options.tasks`, or those that the data can serve, without ON_REQUEST -> {metric: float}."""
    usable, result = usable_tasks(source, embed.tokenizer, options.data), {}
    wanted = OF_WORDS if embed.model.encode_words is not None else set()
    by_default = [name for name in usable if name not in ON_REQUEST - wanted] if embed.tokenizer else ["knn", "linear"]
    for name in options.tasks or by_default:
        if name not in usable:
            why = "this data" if embed.tokenizer or name in IMAGE_TASKS else "a model without a text tower"
            raise UserError(f"Task {name} cannot use {why}; what can be done is {', '.join(usable)}.")
        for key, value in TASKS[name][0](embed, source, options).items():
            result[key] = value.float().mean().item() if torch.is_tensor(value) else value
    return result


def report(embed, source, options, run, checkpoint="last.pt"):
    """Evaluate, print the table, write the pictures and RUN/eval.json, or eval-DATA-SPLIT.json beside one of other data; results of
    another checkpoint than the last stand in eval-CHECKPOINT.json, without pictures."""
    torch.backends.cudnn.allow_tf32 = False
    result = evaluate(embed, source, options)
    if not result:
        tasks = ", ".join(options.tasks or ["the default tasks"])
        raise UserError(f"{run}: this model has nothing to evaluate in {tasks} on {options.data}.")
    width = max(map(len, result))
    for name, value in result.items():
        print(f"  {name:{width}}  {value:.4f}" if isinstance(value, float) and (value == 0 or abs(value) > 1e-4)
              else f"  {name:{width}}  {value}")
    record = {"data": options.data, "split": options.split}
    if options.select:  # what the result depends on beside the data
        record["select"] = options.select
    base = "eval" if checkpoint == "last.pt" else f"eval-{Path(checkpoint).stem}"
    path = Path(run, f"{base}.json")
    old = json.loads(path.read_text()) if path.exists() else record
    if record.items() <= old.items():
        record = old  # the results of other tasks on the same data stay
    else:
        selected = f"-select-{file_name(options.select)}" if options.select else ""
        path = Path(run, f"{base}-{file_name(options.data)}-{options.split}{selected}.json")
    path.write_text(json.dumps(record | result, indent=2) + "\n")
    if embed.unknown > 0.1 * embed.words:
        print(f"{embed.unknown / embed.words:.0%} of the texts' tokens are [UNK]: the run's vocabulary does not know these words; train "
              f"on captions that hold them, or with --vocab.")
    if checkpoint == "last.pt" and (is_world(source) or is_table(source) or can_segment(source)):
        prefix = path.stem.removeprefix("eval").removeprefix("-")  # pictures of other data stand beside the run's own
        names = {f"{prefix}-{name}" if prefix else name: draw for name, draw in PICTURES.items()}
        drawn = [name for name, draw in names.items() if draw(embed, source, options, Path(run, name))]
        if drawn:
            print("pictures: " + ", ".join(str(Path(run, name)) for name in drawn))
    return result


def read_settings(run):
    """The settings of a run; those that its method did not have when it ran are at their defaults."""
    saved = common.read_config(run)
    args = METHODS[saved["method"]].Config()
    vars(args).update(saved)
    return args


def load_run(run, device="cpu", checkpoint="last.pt"):
    """A run's directory -> (Embedder, config); checkpoint: of its weights, the file's name. Raises UserError when it holds no run or
    one of an unknown method."""
    config = read_settings(run)
    method = METHODS[config.method]
    tokenizer = common.WordPiece(Path(run, "vocab.txt")) if method.uses_text(config) else None
    model = common.build_model(method, config, *common.build_encoders(method, config, tokenizer))
    state = common.load_checkpoint(Path(run, checkpoint))
    if state["method"] != config.method:
        raise UserError(f"{run}/{checkpoint} holds a {state['method']} model, but config.json says {config.method}.")
    model.load_state_dict(state["model"])
    return embedder(model.to(device), tokenizer, config, device), config


def embedder(model, tokenizer, config, device):
    if model.encode_text is None:  # it may learn from captions, and yet encode images alone
        tokenizer = None
    context = model.text_encoder.context if tokenizer else None
    return Embedder(model, tokenizer, context, model.image_encoder.image_size, device, workers=config.workers)


def is_segmentation_folder(spec):
    return Path(spec, "SegmentationClass").is_dir()


def options_for(args, **changes):
    """What `python eval.py RUN` would use for a run with these settings."""
    data = args.eval_data or args.data
    defaults = dict(tasks=None, data=data, split=default_split(data), image_root=args.image_root, image_size=args.image_size, limit=None,
                    templates=None, nouns_adjectives=None, train_data=args.data, train_limit=None, select=None, select_root=None,
                    classes=None, probe="adamw")
    if not args.eval_data and common.parse_spec(data)[0] != "shapes" and defaults["split"] == "test":
        defaults["split"] = "train"  # of a JSON with splits
    return argparse.Namespace(**defaults | changes)


def open_eval_set(options, image_size, captions=True):
    """The data to evaluate on."""
    return open_eval_data(options.data, options.image_root, options.split, image_size, options.classes)


def check(options, data, has_text):
    """Raise UserError where no task can be served, or k-NN has no labels to learn from."""
    if isinstance(data, common.TarShards):
        raise UserError("tar shards are for training only; give --eval-data, or run eval.py with other data.")
    usable_tasks(data, has_text, options.data)
    if not has_text and not is_world(data):
        train = open_train_data(data, options)
        if isinstance(train, common.TarShards):
            next(train.labelled())


def default_split(spec):
    """The split that is evaluated where none is asked for; `all` of data that have no splits."""
    if is_segmentation_folder(spec):
        return "val"  # VOC's test split has no maps
    name = common.parse_spec(spec)[0]
    return "test" if name == "shapes" or name.lower().endswith(".json") else "all"


def open_eval_data(spec, image_root, split, image_size, classes=None):
    """Like common.open_data; a directory of SugarCrepe's JSON files -> list of their paths; Pascal VOC's -> SegmentationFolder."""
    if is_segmentation_folder(spec):
        return SegmentationFolder(spec, split, image_size, classes)
    if Path(spec).is_dir():
        files = [path for path in sorted(Path(spec).glob("*.json")) if "negative_caption" in path.read_text()[:4000]]
        if files:
            return files
    return common.open_data(spec, image_root, split, image_size)


def differences(configs):
    """Runs' configs -> a name for each: the settings in which they differ, the seed aside."""
    every = dict.fromkeys(key for config in configs for key in config)
    keys = [key for key in every if len({json.dumps(config[key]) for config in configs if key in config}) > 1]
    keys = [key for key in keys if key not in ("seed", "out", "argv", "git", "machine", "resume", "workers", "log_every", "save_every")]
    keys.sort(key=lambda key: key not in ("method", "objective", "readout"))
    return [", ".join(str(config[key]) if len(keys) == 1 else f"{key}={config[key]}" for key in keys if key in config) or "all"
            for config in configs]


def compare(names, results):
    """Print a table: a column for each name, a row for each metric, mean and standard deviation over the runs of the name."""
    if not any(all(key in result for result in results) for key in results[0]):
        return print("These runs have no metric in common.")
    columns = {name: [result for other, result in zip(names, results) if other == name] for name in names}
    print("| |" + "".join(f" {name} ({len(column)}) |" for name, column in columns.items()))
    print("|---" * (len(columns) + 1) + "|")
    for metric in [key for key in results[0] if all(key in result for result in results)]:
        cells = []
        for column in columns.values():
            values = torch.tensor([float(result[metric]) for result in column])
            cells.append(f"{values.mean():.3f}" + (f" ± {values.std():.3f}" if len(column) > 1 else ""))
        print(f"| {metric} | " + " | ".join(cells) + " |")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="run", help="directory of a run of train.py")
    parser.add_argument("--task", help=f"comma-separated: {', '.join(TASKS)} (default: all that the data can serve but "
                                       f"{', '.join(sorted(ON_REQUEST))})")
    parser.add_argument("--checkpoint", default="last.pt", help="file of the run to evaluate: last.pt, stage-1.pt of a run in stages")
    parser.add_argument("--query", nargs="+", help="index the images of --data and search them (STAIR): captions, or words with AND, "
                                                   "OR, NOT and parentheses; nothing else is evaluated")
    parser.add_argument("--train-data", help="class folders, or tar shards with labels (KEY.cls, or \"label\" in KEY.json), that k-NN and "
                                             "linear probes learn from (default: the run's data; the world: its train split)")
    parser.add_argument("--data", help="SPEC as of train.py, a directory of SugarCrepe's JSON files, or one in Pascal VOC's "
                                       "layout (default: the run's)")
    parser.add_argument("--image-root", help="directory that the file names of a table or of SugarCrepe are relative to")
    parser.add_argument("--split", help="of the world, of Karpathy's JSON, of Pascal VOC's layout (default: test, of VOC val)")
    parser.add_argument("--templates", nargs="+", help="zero-shot prompts with {} for 'a class name' (default: four of CLIP's)")
    parser.add_argument("--classes", help="file with the names of classes 1, 2, ... of data in VOC's layout (default: VOC's)")
    parser.add_argument("--nouns-adjectives", help="file with the words, one a line, that K-Pna counts (default: the world's)")
    parser.add_argument("--train-limit", type=int, help="learn from TRAIN_LIMIT images of --train-data or --select")
    parser.add_argument("--select", help="what `slots` ranks the slots on, class folders, and `masks` trains masks on, SugarCrepe's "
                                         "files with images in --select-root (default: the world)")
    parser.add_argument("--select-root", help="directory that the file names of SugarCrepe as --select are relative to")
    parser.add_argument("--probe", choices=PROBES, default="adamw", help="how `linear` trains: SPARO's AdamW (default) or BAM's SGD")
    parser.add_argument("--limit", type=int, help="use LIMIT images: random ones for zero-shot, else the first")
    options = parser.parse_args(argv)
    options.tasks = options.task.split(",") if options.task else None
    unknown = set(options.tasks or []) - set(TASKS)
    if unknown:
        raise UserError(f"There is no task {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}.")
    if any(re.findall(r"[{}]+", template) != ["{}"] for template in options.templates or []):
        raise UserError(f"Every one of --templates {options.templates} needs one {{}}, where the class name goes, and no other braces.")
    for name in ("limit", "train_limit"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)} must be at least 1.")
    if options.nouns_adjectives:
        options.nouns_adjectives = {word.lower() for word in read_lines(options.nouns_adjectives, "--nouns-adjectives")}
    for run in options.runs:
        common.read_config(run)
    configs, choices, results, embedders = [], [], [], []
    for run in options.runs:
        embed, config = load_run(run, "cuda" if torch.cuda.is_available() else "cpu", options.checkpoint)
        chosen = argparse.Namespace(**vars(options))
        if not options.data:
            chosen.data, chosen.image_root = config.data, options.image_root or config.image_root
        if not options.train_data and config.data != chosen.data and common.parse_spec(config.data)[0] != "shapes":
            chosen.train_data = config.data
        chosen.split, chosen.image_size = default_split(chosen.data), embed.image_size
        if options.split and chosen.split == "all":
            raise UserError(f"--split {options.split}: {chosen.data} has no splits.")
        chosen.split = options.split or chosen.split
        source = open_eval_data(chosen.data, chosen.image_root, chosen.split, embed.image_size, options.classes)
        if options.query:
            search(embed, source, chosen, run)
            continue
        if len(options.runs) > 1:
            print(f"{run}:")
        results.append(report(embed, source, chosen, run, options.checkpoint))
        configs.append(vars(config))
        choices.append(chosen)
        embedders.append(embed)
    if len(results) > 1:
        names = differences(configs)
        compare(names, results)
        alike = len({(chosen.data, embed.image_size) for chosen, embed in zip(choices, embedders)}) == 1
        if can_segment(source) and alike and all(embed.model.encode_patches is not None for embed in embedders):
            path = Path(options.runs[0], "comparison.png")
            draw_comparison({re.sub(r"\w+=", "", name): embedders[names.index(name)] for name in names}, source, chosen, path)
            print(f"picture: {path}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
