"""Evaluate a trained run: `python eval.py RUN --task zeroshot,retrieval --data SPEC`.

Prints a table and writes RUN/eval.json and pictures. Everything is computed in fp32: half-precision cosines tie.
A metric is a pure function of matrices; a task gathers the matrices; TASKS says which data each task can use.
"""

import argparse
import dataclasses
import json
import random
import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2.functional import to_pil_image

import common
import sparc
from common import UserError

METHODS = {"sparc": sparc}


# Metrics -------------------------------------------------------------------------------------------------------------


def recall_at_k(queries, keys, positives, ks=(1, 5, 10), chunk=1024):
    """Share of queries with ANY positive among their k nearest keys. queries (Q, E), keys (K, E) -> {k: float}.

    positives: (Q, K) boolean function given as two group-id vectors (Q,), (K,): equal ids are positives. A positive counts
    as retrieved at its rank among the keys by dot product; on a tie the negative goes first. Ranks are made in chunks.
    """
    query_ids, key_ids = positives
    hits = {k: 0 for k in ks}
    for q, ids in zip(queries.split(chunk), query_ids.split(chunk)):
        scores = q @ keys.T                                              # (chunk, K)
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


def winoground_scores(s):
    """s (n, 2, 2), [pair, caption, image] -> (text, image, group) scores, each a share of the n pairs; ties are wrong."""
    text = (s[:, 0, 0] > s[:, 1, 0]) & (s[:, 1, 1] > s[:, 0, 1])
    image = (s[:, 0, 0] > s[:, 0, 1]) & (s[:, 1, 1] > s[:, 1, 0])
    return [x.float().mean().item() for x in (text, image, text & image)]


def mean_iou(predicted, truth, background=0, foreground_only=False):
    """Mean IoU of maps (n, H, W) of class ids (SPARC, Sec. 4.5, D.7): per image the mean over the foreground classes present
    in its truth, then the mean over images that have one. truth 255 is ignored; `foreground_only` ignores background pixels.
    """
    means = []
    for p, t in zip(predicted, truth):
        valid = (t != 255) & ((t != background) if foreground_only else True)
        ious = []
        for c in t[valid].unique():
            if c != background:
                p_c, t_c = (p == c) & valid, (t == c) & valid
                ious.append((p_c & t_c).sum() / (p_c | t_c).sum())
        if ious:
            means.append(torch.stack(ious).mean())
    return torch.stack(means).mean().item() if means else float("nan")


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


class Embedder:
    """A trained model in evaluation mode: lists of captions and image tensors or files -> matrices on the CPU, fp32."""

    def __init__(self, model, tokenizer, context, image_size, device="cpu", chunk=256, workers=0):
        self.model, self.tokenizer, self.context, self.image_size = model.eval(), tokenizer, context, image_size
        self.device, self.chunk, self.workers = device, chunk, workers

    @torch.no_grad()
    def texts(self, captions):
        """n captions -> (n, E)."""
        rows = []
        for start in range(0, len(captions), self.chunk):
            tokens, mask = self.tokenizer.batch(captions[start : start + self.chunk], self.context)
            rows.append(self.model.encode_text(tokens.to(self.device), mask.to(self.device)).cpu())
        return torch.cat(rows)

    @torch.no_grad()
    def images(self, images, encode="encode_image"):
        """(n, 3, S, S) -> (n, E), or with encode="encode_patches" (n, P, E)."""
        return torch.cat([getattr(self.model, encode)(x.to(self.device)).cpu() for x in images.split(self.chunk)])

    def files(self, paths):
        """Image files -> embeddings (m, E) and the indices (m,) of the files that could be read."""
        loader = DataLoader(ImageFiles(paths, self.image_size), self.chunk, num_workers=self.workers, collate_fn=list)
        rows, kept = [], []
        for batch in loader:
            good = [(i, image) for i, image in batch if image is not None]
            if good:
                rows.append(self.images(torch.stack([image for _, image in good])))
                kept += [i for i, _ in good]
        if not kept:
            raise UserError(f"None of the {len(paths)} images could be read, the first is {paths[0]}.")
        if len(kept) < len(paths):
            print(f"skipped {len(paths) - len(kept)} of {len(paths)} images that cannot be read")
        return torch.cat(rows), torch.tensor(kept)


# Tasks ---------------------------------------------------------------------------------------------------------------

TEMPLATES = ["a photo of {}.", "{}", "a close-up of {}.", "a picture of {}."]
WORLD_CLASSES = {"colour": common.COLOUR_NAMES, "shape": common.SHAPE_NAMES,
                 "pair": [f"{c} {s}" for c in common.COLOUR_NAMES for s in common.SHAPE_NAMES]}
WORLD_N = 1000  # samples of the embedded world a task uses; its scenes come from the split's own part of the world


def zeroshot(embed, source, options):
    """Top-1 accuracy. World: one object a scene, 64 colour-shape classes. Class folders: the folders' names."""
    if isinstance(source, common.World):
        sample = source.sample(WORLD_N, options.split, 1, objects=1)
        colour, shape = sample["scene"]["colour"][:, 0], sample["scene"]["shape"][:, 0]
        scores = embed.images(sample["images"]) @ world_classes(embed, source, "pair").T
        predicted = scores.argmax(1)
        right = predicted == colour * 8 + shape
        held = torch.tensor([pair in source.heldout_pairs for pair in zip(colour.tolist(), shape.tolist())])
        return {"zeroshot": right, "zeroshot/colour": predicted // 8 == colour, "zeroshot/shape": predicted % 8 == shape,
                **({"zeroshot/heldout_pairs": right[held]} if held.any() else {})}
    names = [common.article(name.replace("_", " ")) for name in source.classes]
    chosen = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[: options.limit].tolist()
    images, kept = embed.files([source.paths[i] for i in chosen])
    labels = torch.as_tensor(source.labels)[chosen][kept]
    predicted = (images @ class_embeddings(embed.texts, names, options.templates or TEMPLATES).T).argmax(1)
    return {"zeroshot": predicted == labels, "zeroshot/chance": 1 / len(names)}


def retrieval(embed, source, options):
    """Recall at 1, 5, 10 both ways, every caption a query. World: scenes with the most objects, two captions each."""
    if isinstance(source, common.World):
        sample, rng = source.sample(WORLD_N // 2, options.split, 2, objects=source.objects), random.Random(2)
        images = embed.images(sample["images"])
        texts = embed.texts([source.caption(o, rng) for o in sample["objects"] for _ in range(2)])
        image_of_text = torch.arange(len(images)).repeat_interleave(2)
        kept = torch.arange(len(images))
    else:
        n = min(len(source), options.limit or len(source))
        images, kept = embed.files([source.paths[i] for i in range(n)])
        captions = [source.captions_of(i) for i in kept.tolist()]
        texts = embed.texts([caption for group in captions for caption in group])
        image_of_text = kept.repeat_interleave(torch.tensor([len(group) for group in captions]))
    i2t = recall_at_k(images, texts, (kept, image_of_text))
    t2i = recall_at_k(texts, images, (image_of_text, kept))
    return {f"{way}/R@{k}": value for way, table in (("i2t", i2t), ("t2i", t2i)) for k, value in table.items()} | {
        "retrieval/images": len(images)}


def negatives(embed, source, options):
    """Share of pairs whose caption scores strictly higher than its hard negative, by SugarCrepe category."""
    if isinstance(source, common.World):
        sample, rng = source.sample(WORLD_N, options.split, 3, objects=min(3, source.objects)), random.Random(3)
        images = embed.images(sample["images"])
        rows = [(kind, i, *pair) for i, objects in enumerate(sample["objects"])
                for kind, pair in sorted(source.hard_negatives(objects, rng).items())]
    else:
        root = Path(options.image_root or ".")
        pairs = [(file.stem, item) for file in source for item in json.loads(file.read_text()).values()]
        names = sorted({item["filename"] for _, item in pairs})
        images, kept = embed.files([str(root / name) for name in names])
        index = {names[i]: row for row, i in enumerate(kept.tolist())}
        rows = [(kind, index[item["filename"]], item["caption"], item["negative_caption"]) for kind, item in pairs
                if item["filename"] in index]
    kinds, i, captions, wrong = zip(*rows)
    x = images[list(i)]
    right = (x * embed.texts(captions)).sum(1) > (x * embed.texts(wrong)).sum(1)
    by_kind = {kind: right[torch.tensor([k == kind for k in kinds])] for kind in sorted(set(kinds))}
    return {f"negatives/{kind}": value for kind, value in by_kind.items()} | {
        "negatives": sum(value.float().mean().item() for value in by_kind.values()) / len(by_kind)}


def winoground(embed, source, options):
    """Winoground's text, image and group scores on pairs of scenes that swap two colours."""
    images, captions = source.winoground(WORLD_N // 2, seed=4)
    x = embed.images(images.flatten(0, 1)).view(len(images), 2, -1)                              # (n, 2, E)
    y = embed.texts([caption for pair in captions for caption in pair]).view(len(images), 2, -1)
    return dict(zip(("winoground/text", "winoground/image", "winoground/group"), winoground_scores(y @ x.transpose(1, 2))))


def label_maps(source, sample, by):
    """World sample -> class ids (n, S, S), 0 background, and the class names; by: "colour", "shape" or "pair"."""
    scene, segmentation = sample["scene"], sample["segmentation"]
    ids = {"colour": scene["colour"], "shape": scene["shape"], "pair": scene["colour"] * 8 + scene["shape"]}[by]
    ids = F.pad(ids + 1, (1, 0))                                          # (n, 1 + K)
    return ids.gather(1, segmentation.flatten(1)).view_as(segmentation), WORLD_CLASSES[by]


def world_classes(embed, source, by):
    """Text embeddings (C, E) of the world's colours, shapes or pairs, in prompts that speak as its captions do."""
    prompts = {"colour": [f"{{}} {kind}" for kind in (common.SHAPE_NAMES if source.kinds else ["thing"])],
               "shape": ["{}", "a photo of {}"], "pair": ["{}", "a photo of {}"]}
    return class_embeddings(embed.texts, [common.article(name) for name in WORLD_CLASSES[by]], prompts[by])


def segment(patches, classes, size):
    """Patches (n, P, E), classes (C, E) -> maps (n, size, size) of 1 + the class of highest cosine, by nearest upsampling."""
    grid = int(patches.shape[1] ** 0.5)
    best = (patches @ classes.T).argmax(-1).view(-1, 1, grid, grid) + 1
    return F.interpolate(best.float(), (size, size), mode="nearest")[:, 0].long()


def segmentation(embed, source, options):
    """Zero-shot segmentation (SPARC, D.7): mIoU over the foreground classes present, by colour, shape and pair.

    `miou` is the paper's: no background class, a background pixel that gets a class counts against it. `miou_fg` ignores
    background pixels: which object is where, without the objects' outlines.
    """
    if not hasattr(embed.model, "encode_patches"):
        return {}
    sample = source.sample(WORLD_N // 2, options.split, 5, objects=source.objects)
    patches, result = embed.images(sample["images"], "encode_patches"), {}
    for by in ("colour", "shape", "pair"):
        truth, _ = label_maps(source, sample, by)
        predicted = segment(patches, world_classes(embed, source, by), source.size)
        result[f"miou/{by}"] = mean_iou(predicted, truth)
        result[f"miou_fg/{by}"] = mean_iou(predicted, truth, foreground_only=True)
    return result


def is_world(source):
    return isinstance(source, common.World)


def is_table(source):
    return isinstance(source, common.CaptionTable)


TASKS = {  # name: (function, which data it can use)
    "zeroshot": (zeroshot, lambda s: is_world(s) or is_table(s) and s.classes is not None),
    "retrieval": (retrieval, lambda s: is_world(s) or is_table(s) and s.classes is None),
    "negatives": (negatives, lambda s: is_world(s) or isinstance(s, list)),
    "winoground": (winoground, is_world),
    "segmentation": (segmentation, is_world),
}


# Pictures ------------------------------------------------------------------------------------------------------------

PALETTE = torch.tensor([(40, 40, 40), (230, 60, 60), (60, 180, 75), (70, 110, 240), (245, 225, 60), (150, 60, 190),
                        (245, 140, 40), (250, 170, 210), (240, 240, 240)], dtype=torch.uint8)


def to_picture(image, side):
    """Normalised (3, H, W) -> PIL image of side x side, pixels enlarged without smoothing."""
    image = image * torch.tensor(common.STD)[:, None, None] + torch.tensor(common.MEAN)[:, None, None]
    return to_pil_image(image.clamp(0, 1)).resize((side, side), Image.Resampling.NEAREST)


def sheet(rows, path, side, title, legend=()):
    """Rows of (PIL image, label) cells -> one PNG: a title, a legend of (colour, name), a label of one or two lines a cell."""
    font, cell, top = ImageFont.load_default(12), side + 8, 52 if legend else 28
    tall = side + 20 + 14 * any("\n" in label for row in rows for _, label in row)
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
            lines = [next(line[:n] for n in range(len(line), -1, -1) if font.getlength(line[:n]) <= cell) for line in label.split("\n")]
            draw.multiline_text((x, y - 2), "\n".join(lines), "black", font, anchor="ld", spacing=1)
            page.paste(image.resize((side, side), Image.Resampling.NEAREST), (x, y))
    page.save(path)


def picture_samples(source, options, n):
    """n samples -> images (n, 3, S, S) and one caption each."""
    if isinstance(source, common.World):
        sample = source.sample(n, options.split, 6, objects=min(3, source.objects))
        return sample["images"], sample["captions"]
    found = []
    files = ImageFiles(source.paths, options.image_size)
    for i in range(len(files)):
        image = files[i][1]
        if image is not None:
            found.append((image, source.captions_of(i)[0]))
        if len(found) == n:
            break
    images, captions = zip(*found)
    return torch.stack(images), list(captions)


@torch.no_grad()
def draw_alignment(embed, source, options, path):
    """Which patches each word of a caption is aligned to (SPARC, Eq. 4): the more weight, the less faded to white."""
    if not hasattr(embed.model, "align_words"):
        return False
    images, captions = picture_samples(source, options, 8)
    tokens, mask = embed.tokenizer.batch(captions, embed.context)
    weights = embed.model.align_words(*(x.to(embed.device) for x in (images, tokens, mask))).cpu()  # (n, L, P)
    grid, side, rows = int(weights.shape[2] ** 0.5), 112, []
    for i, image in enumerate(images):
        picture = to_picture(image, side)
        row = [(picture, "image")]
        for l in range(1, min(int(mask[i].sum()) - 1, 15)):
            light = (weights[i, l] / weights[i, l].max()).view(grid, grid)
            light = to_pil_image(0.08 + 0.92 * light[None]).resize((side, side), Image.Resampling.NEAREST)
            lit = Image.composite(picture, Image.new("RGB", picture.size, "white"), light)
            row.append((lit, embed.tokenizer.vocab[tokens[i, l]]))
        rows.append(row)
    sheet(rows, path, side, "Alignment of words to patches (a_lp, Eq. 4): what is not faded to white belongs to the word above")
    return True


def draw_segmentation(embed, source, options, path):
    """Image, true and predicted segmentation of scenes by colour and by shape, with the names of what is there."""
    if not isinstance(source, common.World) or not hasattr(embed.model, "encode_patches"):
        return False
    sample = source.sample(8, options.split, 7, objects=source.objects)
    patches, side, rows = embed.images(sample["images"], "encode_patches"), 144, []
    maps = {}
    for by in ("colour", "shape"):
        truth, names = label_maps(source, sample, by)
        maps[by] = truth, segment(patches, world_classes(embed, source, by), source.size), names
    for i, image in enumerate(sample["images"]):
        row = [(to_picture(image, side), "image")]
        for by, (truth, predicted, names) in maps.items():
            present = ", ".join(names[c - 1] for c in truth[i].unique().tolist() if c)
            inside = torch.where(truth[i] > 0, predicted[i], 0)
            for label, m in ((f"true {by}s:\n{present}", truth[i]), (f"{by} found\nfor each patch", predicted[i]),
                             (f"{by} found,\nobjects only", inside)):
                row.append((to_pil_image(PALETTE[m].permute(2, 0, 1)), label))
        rows.append(row)
    legend = [(tuple(PALETTE[i + 1].tolist()), f"{c} or {s}") for i, (c, s) in enumerate(zip(maps["colour"][2], maps["shape"][2]))]
    sheet(rows, path, side, "Zero-shot segmentation: each patch takes the class whose text is nearest", legend)
    return True


PICTURES = {"alignment.png": draw_alignment, "segmentation.png": draw_segmentation}


# Runs ----------------------------------------------------------------------------------------------------------------


def build_model(config, tokenizer):
    """A config (the dict of a run's config.json) -> the method's model, on the CPU, freshly initialised."""
    method = METHODS[config["method"]]
    image = common.encoder_settings(common.ViT, config["image_encoder"], common.VIT_PRESETS)
    image_encoder = common.ViT(**image | {"image_size": config["image_size"] or image["image_size"]})
    if image_encoder.cls is not None and not method.Model.takes_cls:
        raise UserError(f"{config['method']} takes all image tokens for patches: leave out cls=1 of --image-encoder.")
    text = common.encoder_settings(common.TextTransformer, config["text_encoder"], common.TEXT_PRESETS)
    text_encoder = common.TextTransformer(**text | {"vocab_size": len(tokenizer)})
    fields = {field.name: config[field.name] for field in dataclasses.fields(method.Config)}
    return method.Model(method.Config(**fields), image_encoder, text_encoder, image_encoder.width, text_encoder.width)


def evaluate(embed, source, options):
    """Run the tasks of `options.tasks`, or all that the data can serve -> {metric: float}."""
    usable = [name for name, (_, can_use) in TASKS.items() if can_use(source)]
    if not usable:
        raise UserError(f"No task can evaluate on {options.data}: give --data captions, class folders, SugarCrepe or shapes.")
    result = {}
    for name in options.tasks or usable:
        if name not in usable:
            raise UserError(f"Task {name} cannot use this data; it serves {', '.join(usable)}.")
        for key, value in TASKS[name][0](embed, source, options).items():
            result[key] = value.float().mean().item() if torch.is_tensor(value) else value
    return result


def report(embed, source, options, run):
    """Evaluate, print the table, write the pictures and RUN/eval.json, or eval-DATA-SPLIT.json beside one of other data."""
    torch.backends.cudnn.allow_tf32 = False
    result = evaluate(embed, source, options)
    width = max(map(len, result))
    for name, value in result.items():
        print(f"  {name:{width}}  {value:.4f}" if isinstance(value, float) else f"  {name:{width}}  {value}")
    record = {"data": options.data, "split": options.split}
    path = Path(run, "eval.json")
    old = json.loads(path.read_text()) if path.exists() else record
    if record.items() <= old.items():
        record = old  # the results of other tasks on the same data stay
    else:
        path = Path(run, f"eval-{re.sub('[^A-Za-z0-9]+', '-', options.data).strip('-')}-{options.split}.json")
    path.write_text(json.dumps(record | result, indent=2) + "\n")
    if is_world(source) or is_table(source):
        drawn = [name for name, draw in PICTURES.items() if draw(embed, source, options, Path(run, name))]
        if drawn:
            print("pictures: " + ", ".join(str(Path(run, name)) for name in drawn))
    return result


def load_run(run, device="cpu"):
    """A run's directory -> (Embedder, config). Raises UserError when it holds no run or one of an unknown method."""
    try:
        config = json.loads(Path(run, "config.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{run} holds no run: there is no {run}/config.json.") from None
    tokenizer = common.WordPiece(Path(run, "vocab.txt"))
    model = build_model(config, tokenizer)
    state = common.load_checkpoint(Path(run, "last.pt"))
    if state["method"] != config["method"]:
        raise UserError(f"{run}/last.pt holds a {state['method']} model, but config.json says {config['method']}.")
    model.load_state_dict(state["model"])
    return embedder(model.to(device), tokenizer, config, device), config


def embedder(model, tokenizer, config, device):
    return Embedder(model, tokenizer, model.text_encoder.context, model.image_encoder.image_size, device,
                    workers=config["workers"])


def open_eval_data(spec, image_root, split, image_size):
    """Like common.open_data, and a directory of SugarCrepe's JSON files -> list of their paths."""
    if Path(spec).is_dir():
        files = [path for path in sorted(Path(spec).glob("*.json")) if "negative_caption" in path.read_text()[:4000]]
        if files:
            return files
    return common.open_data(spec, image_root, split, image_size)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("run", help="directory of a run of train.py")
    parser.add_argument("--task", help=f"comma-separated: {', '.join(TASKS)} (default: all that the data can serve)")
    parser.add_argument("--data", help="SPEC as of train.py, or a directory of SugarCrepe's JSON files (default: the run's)")
    parser.add_argument("--image-root", help="directory that the file names of a table or of SugarCrepe are relative to")
    parser.add_argument("--split", default="test", help="of the world and of Karpathy's JSON (default: test)")
    parser.add_argument("--templates", nargs="+", help="zero-shot prompts with {} for 'a class name' (default: four of CLIP's)")
    parser.add_argument("--limit", type=int, help="use LIMIT images: the first for retrieval, random ones for zero-shot")
    options = parser.parse_args(argv)
    options.tasks = options.task.split(",") if options.task else None
    unknown = set(options.tasks or []) - set(TASKS)
    if unknown:
        raise UserError(f"There is no task {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}.")
    if any("{}" not in template for template in options.templates or []):
        raise UserError(f"Every one of --templates {options.templates} needs {{}} where the class name goes.")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit {options.limit} must be at least 1.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    embed, config = load_run(options.run, device)
    if not options.data:
        options.data, options.image_root = config["data"], options.image_root or config["image_root"]
    options.image_size = embed.image_size
    report(embed, open_eval_data(options.data, options.image_root, options.split, embed.image_size), options, options.run)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
