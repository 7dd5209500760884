"""Speed and memory of the papers' presets on one GPU: `python tests/gpu_bench.py`, 6 minutes.

Each row trains with train.py's own loop. The images and captions are random numbers on the GPU,
captions have full length, and a batch is the largest power of two that fits into --gib GiB, at most
the paper's batch. The rows "world" and "shards" read data by workers, so that waits show. The rows
"open_clip" (OpenCLIP's model, loss and optimizer) and "lightly" (DINO with timm's ViT and lightly's
head and loss) have the batch of the row before them, if these libraries are installed. A loss
compares the images of one GPU alone.

Rows come in the order of ROWS until --minutes are over. The table is printed and written to
tests/gpu.json: images per second, the peak memory, and the share of the card's bf16 peak (FLOPs of
the encoders and the loss without recomputation, by torch's counter, over NVIDIA's figure for dense
products).

`--toy` runs small presets, also on a CPU: a test of this command. `--computed 8 --method sparc
--preset b16` computes, on a CPU, the memory of each of 8 GPUs, and the FLOPs of the forward pass
of a sample in the whole batch (SPARC, Table 11).
"""

import argparse
import contextlib
import functools
import gc
import io
import json
import math
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import common
import train

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bf16 FLOP/s of dense products
CHECKPOINT, COMPILE = "--grad-checkpoint", "--compile"
CLIP_B32 = "--objective clip --image-encoder clip-b32 --text-encoder clip-b32"
# (method, preset, further flags, where the data come from), the rows that matter most first
ROWS = [
    *((method, preset, flags, "tensors") for method, preset in (
        ("sparc", "b16"), ("sparo", "cc15m-b16"), ("stair", "b16-single"), ("bam", "vit-s16"),
        ("sparc", "b32")) for flags in ("", CHECKPOINT)),
    ("sparc", "b32", CLIP_B32, "tensors"), ("open_clip", "ViT-B-32", "", "tensors"),
    ("sparo", "cc15m-r50", "", "tensors"), ("bam", "r50", "", "tensors"),
    ("sparo", "dino-s16", "--objective dino", "tensors"),
    ("lightly", "vit_small_patch16_224", "", "tensors"),
    ("sparc", "b32", "", "shards"), ("sparc", "b16", "", "world"),
    ("sparc", "b32", COMPILE, "tensors"), ("sparc", "b16", COMPILE, "tensors"),
    ("sparc", "l14", CHECKPOINT, "tensors"), ("bam", "vit-b16", CHECKPOINT, "tensors"),
    ("bam", "vit-s16", COMPILE, "tensors"), ("sparo", "cc15m-b32", "", "tensors"),
    ("sparo", "cc15m-r50", COMPILE, "tensors"), ("sparo", "cc15m-b16", COMPILE, "tensors"),
    ("sparo", "dino-s16", f"--objective dino {COMPILE}", "tensors"),
    ("stair", "b16-single", COMPILE, "tensors"), ("bam", "moco-s16", "", "tensors"),
    ("sparc", "gloria-b32", "", "tensors"), ("sparo", "l400m-b32", CHECKPOINT, "tensors"),
    ("bam", "moco-b16", CHECKPOINT, "tensors"), ("sparc", "l14", "", "tensors")]
TOY = [("sparc", "tiny", "", "tensors"), ("bam", "tiny", "", "tensors"),
       ("sparc", "tiny", "--image-encoder tiny-patch", "shards"), ("sparo", "tiny", "", "world")]
SECONDS = 3     # time that a row is measured
FIRST = 64      # images of the first batch; the next batches double it while memory allows
WARMUP = 2      # updates with the final batch before the clock starts


def random_batch(args, method, model, n, device):
    """Return a batch as open_loader yields it, of random pixels and words, on the device."""
    views = method.views(args)
    if views:
        transform = train.build_transform(args, method, model.image_encoder)
        crops = [torch.randint(256, (n, 3, view["size"], view["size"]), dtype=torch.uint8,
                               device=device) for view in views]
        batch = {"views": crops} | train.to_device({"draws": transform.draws(n)}, device)
    else:
        with torch.device(device):
            batch = train.made_up_batch(args, method, model, n)
    return batch | {"position": {}}


def peak_since_last(device):
    """Return the peak memory in bytes since the last call. It is 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def feed(row, limit):
    """Return what takes the place of train.open_loader. It fills `row` with what it learns.

    Without row["batch"] the first steps look for the number of images that fits: a batch of twice
    the images needs at most the present peak and twice the growth since half the images. The
    optimizer's update may need more than the batch; then nothing has grown.
    """

    def open_loader(args, data, transform, tokenizer, model, progress, device, stop):
        method, n, peaks = train.METHODS[args.method], FIRST, []
        make = functools.partial(random_batch, args, method, model, device=device)
        train.BENCH_WARMUP = math.inf  # the clock does not start yet
        while "batch" not in row:
            # the second batch is counted: the first update makes the optimizer's state
            counts = len(peaks) == 1 and not args.compile and not args.grad_checkpoint
            flops, batch = FlopCounterMode(display=False), make(n=n)
            peak_since_last(device)
            with flops if counts else contextlib.nullcontext():
                yield batch
            peaks.append(peak_since_last(device))
            if counts:
                row["flops_per_image"] = flops.get_total_flops() / n
            if len(peaks) == 1:
                continue
            grown = 2 * (peaks[-1] - peaks[-2]) if len(peaks) > 2 else 0
            if 2 * n > args.batch or (peaks[-1] + grown > limit) or device.type == "cpu":
                row["batch"] = n
            n *= 2
        args.batch = row["batch"]
        train.BENCH_WARMUP = progress.step + WARMUP
        batch = make(n=args.batch)
        while True:  # until train() has timed args.bench steps
            start = time.perf_counter()
            yield batch
            if progress.step <= train.BENCH_WARMUP:
                peak_since_last(device)  # waits for the GPU
                args.bench = max(3, min(50, int(SECONDS / (time.perf_counter() - start))))

    return open_loader


WORDS = "a photo of the red blue big small dog cat house tree".split()


def write_shards(directory, shards=4, samples=2000, side=(500, 375)):
    """Write tar shards of JPEGs with captions, if they are not there, and return their SPEC.

    The pictures are smooth noise, which takes as many bytes as a photo.
    """
    directory.mkdir(exist_ok=True)
    draw, pictures = np.random.default_rng(0), []
    for _ in range(32):
        small = draw.integers(0, 256, (side[1] // 8, side[0] // 8, 3), dtype=np.uint8)
        picture = np.asarray(Image.fromarray(small).resize(side, Image.Resampling.BICUBIC))
        grain = draw.integers(-20, 20, picture.shape)
        file = io.BytesIO()
        Image.fromarray((picture + grain).clip(0, 255).astype(np.uint8)).save(file, "JPEG")
        pictures.append(file.getvalue())
    for shard in range(shards):
        with tarfile.open(directory / f"{shard}.tar", "w") as tar:
            for i in range(samples):
                caption = f"{' '.join(draw.choice(WORDS, 12))} {shard * samples + i}"
                for name, data in (("jpg", pictures[i % 32]), ("txt", caption.encode())):
                    info = tarfile.TarInfo(f"{i:05}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    (directory / "vocab.txt").write_text("\n".join(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS, *"0123456789", *(f"##{i}" for i in range(10))]))
    return f"{directory}/{{0..{shards - 1}}}.tar"


def train_row(row, limit, directory, toy):
    """Train for a few steps by train.main, and add what --bench prints to `row`."""
    side = 32 if toy else 224
    command = ["--method", row["method"], "--preset", row["preset"], *row["flags"].split(),
               "--data", f"shapes:size={side}", "--image-size", side, "--bench", 3]
    if (row["method"], row["preset"]) in (("bam", "vit-s16"), ("bam", "vit-b16")):
        command += ["--no-contrastive-crop"]  # needs a table; an update takes as long without
    with pytest.MonkeyPatch.context() as patch:
        if row["source"] == "tensors":
            patch.setattr(train, "open_loader", feed(row, limit))
            patch.setattr(train, "BENCH_WARMUP", WARMUP)  # feed() changes it
        else:
            row |= {"batch": 16 if toy else 512, "workers": 1 if toy else common.cores_of_rank() - 2}
            command += ["--batch", row["batch"], "--workers", row["workers"]]
            command += ["--bench", 3 if toy else 20]
        if row["source"] == "shards":
            spec = write_shards(directory, *((2, 32, (48, 36)) if toy else ()))
            command += ["--data", spec, "--vocab", directory / "vocab.txt"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            train.main([str(word) for word in command])
    return row | json.loads(printed.getvalue().splitlines()[-1])


def open_clip_update(row, device, toy):
    """Return a function that makes an update of OpenCLIP's ViT-B-32 with its loss, AdamW and
    clipping, on row["batch"] pairs in bf16."""
    import open_clip

    model, loss = open_clip.create_model("ViT-B-32").to(device).train(), open_clip.ClipLoss()
    n = row["batch"]
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4, (0.9, 0.98), 1e-6, weight_decay=0.2)
    images = torch.rand(n, 3, 224, 224, device=device)
    texts = torch.randint(1, 49_000, (n, 77), device=device)

    def update():
        with torch.autocast(device.type, torch.bfloat16):
            total = loss(*model(images, texts))
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))

    return update


def lightly_update(row, device, toy):
    """Return a function that makes an update of DINO with timm's ViT-S/16 and lightly's head and
    loss, on two views of 224 and eight of 96 pixels of row["batch"] images in bf16."""
    import timm
    from lightly.loss import DINOLoss
    from lightly.models.modules import DINOProjectionHead
    from lightly.models.utils import update_momentum

    width, depth, codes, large, side = (12, 1, 64, 32, 16) if toy else (384, 12, 65_536, 224, 96)

    def model():
        vit = timm.create_model("vit_small_patch16_224", num_classes=0, img_size=large,
                                dynamic_img_size=True, embed_dim=width, depth=depth)
        return torch.nn.Sequential(vit, DINOProjectionHead(width, output_dim=codes)).to(device)

    student, teacher, loss = model(), model(), DINOLoss(codes).to(device)
    teacher.load_state_dict(student.state_dict())
    optimizer = torch.optim.AdamW(student.parameters(), 5e-4, weight_decay=0.04)
    views = [torch.rand(row["batch"], 3, size, size, device=device)
             for size in 2 * [large] + 8 * [side]]

    def update():
        with torch.autocast(device.type, torch.bfloat16):
            with torch.no_grad():
                targets = [teacher(view) for view in views[:2]]
            total = loss(targets, [student(view) for view in views], epoch=0)
        total.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        optimizer.step()
        optimizer.zero_grad()
        update_momentum(student, teacher, 0.996)

    return update


PEERS = {"open_clip": open_clip_update, "lightly": lightly_update}


def peer_row(row, toy):
    """Time the updates of another library, on as many images as the row of ours before it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    update, steps = PEERS[row["method"]](row, device, toy), 1 if toy else 20
    for step in range(WARMUP + steps):
        if step == WARMUP:
            peak_since_last(device)  # waits for the GPU
            start = time.perf_counter()
        update()
    peak, seconds = peak_since_last(device), time.perf_counter() - start
    return row | {"images_per_s": steps * row["batch"] / seconds, "data_share": 0.0,
                  "peak_memory_bytes": peak}


def measure(row, found, limit, directory, toy):
    """Return the row with its figures, or with an error. found: the rows before it."""
    same = [other for other in found if "error" not in other and other["source"] == "tensors"
            and (other["method"], other["preset"]) == (row["method"], row["preset"])]
    if COMPILE in row["flags"] and same:  # a compiled model sees one size of batch alone
        row["batch"] = same[0]["batch"]
    try:
        if row["method"] in PEERS:
            row = peer_row(row | {"batch": found[-1]["batch"]}, toy)
        else:
            row = train_row(row, limit, directory, toy)
    except torch.cuda.OutOfMemoryError:
        if row.get("batch", 1) == 1:
            return row | {"error": "out of memory"}
        retry = True
    except ImportError:
        return row | {"error": "not installed"}
    else:
        retry = False
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    if retry:  # outside of the except clause, whose traceback holds the tensors
        return measure(row | {"batch": row["batch"] // 2}, found, limit, directory, toy)
    flops = row.get("flops_per_image", same[0].get("flops_per_image") if same else None)
    peak = next((peak for name, peak in PEAK.items() if name in card()), None)
    if flops and peak:
        row["share_of_peak"] = row["images_per_s"] * flops / peak
    return row


def card():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def kept_bytes(model, batch):
    """The bytes that a forward pass in bf16 keeps for the backward pass, with fused attention."""
    kept = {}  # {address: storage}, because a storage may be kept several times

    def keep(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        model(batch, lambda x: x)
    return sum(storage.nbytes() for storage in kept.values())


def untrained(flags):
    """Flags of train.py -> settings, the method, and its model on a CPU, in evaluation mode."""
    args = train.parse_args([*flags, "--dry-run"])
    method = train.METHODS[args.method]
    data = train.open_training_data(args, method)
    tokenizer = train.build_tokenizer(args, data) if method.uses_text(args) else None
    return args, method, train.new_model(args, method, tokenizer).eval()


def computed_gib(args, method, model, gpus):
    """The GiB of each GPU in bf16: weights, the optimizer's moments, gradients, and the tensors
    that the forward pass keeps for the samples of a GPU. Without the block that --grad-checkpoint
    recomputes, the figure is up to a quarter too low."""
    batches = [train.made_up_batch(args, method, model, n) for n in (2, 4)]
    few, many = (kept_bytes(model, batch) for batch in batches)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    copies = 3 if args.optimizer in ("adamw", "lamb") else 2  # moments and gradients
    state = sum(x.nbytes for x in model.state_dict().values()) + copies * trained
    return (state + (many - few) / 2 * (args.batch // gpus)) / 2**30


@torch.no_grad()
def computed_flops(args, method, model, gpus):
    """The FLOPs of the forward pass of a sample in the whole batch. A multiply-add is 2 FLOPs."""
    flops = {}
    for n, ranks in ((2, 1), (4, 1), (2, 2)):  # n samples on each rank
        batch = train.made_up_batch(args, method, model, n)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            with pytest.MonkeyPatch.context() as patch:  # losses ask for the number of the rank
                patch.setattr(torch.distributed, "get_rank", lambda: 0)
                patch.setattr(torch.distributed, "get_world_size", lambda: ranks)
                model(batch, lambda x: torch.cat([x] * ranks))
        flops[n, ranks] = counter.get_total_flops() / n
    # A loss compares a sample with each sample of the batch, and each comparison adds the FLOPs
    # `of_all`. FILIP's choice of tokens adds the FLOPs `of_rank` for each sample of the rank. The
    # images of a detector share their queries, so that a larger batch adds nothing.
    of_one = flops[2, 1]
    of_all = (flops[2, 2] - of_one) / 2
    of_rank = max(0, (flops[4, 1] - of_one) / 2 - of_all)
    return of_one + of_all * (args.batch - 2) + of_rank * (args.batch / gpus - 2)


def facts():
    """What the figures depend on: the card, the driver, torch and the commit."""
    commands = {"driver": "nvidia-smi --query-gpu=driver_version --format=csv,noheader",
                "commit": f"git -C {ROOT} rev-parse --short HEAD"}
    found = {"card": card(), "torch": torch.__version__}
    for name, command in commands.items():
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        found[name] = done.stdout.strip()
    return found


def show(row):
    """Print the row of a table in Markdown."""
    if "error" in row:
        figures = [row["error"], "", "", ""]
    else:
        figures = [f"{row['batch']:,}", f"{row['images_per_s']:,.0f}",
                   f"{row['peak_memory_bytes'] / 2**30:.1f}",
                   f"{row['share_of_peak']:.0%}" if "share_of_peak" in row else ""]
        if row["source"] != "tensors":
            figures[-1] = f"{row['data_share']:.0%} of the time waits, {row['workers']} workers"
    name = f"`{row['method']}`, `{row['preset']}` {row['flags']} {row['source']}"
    print(f"| {name} | {' | '.join(figures)} |", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6, help="no row begins later")
    parser.add_argument("--gib", type=float, default=76, help="most memory of a row; an 80 GB GPU "
                        "has 78 GiB for torch and NCCL")
    parser.add_argument("--out", default=str(ROOT / "tests" / "gpu.json"), help="file to write")
    parser.add_argument("--toy", action="store_true", help="small presets, also on a CPU")
    parser.add_argument("--computed", nargs=argparse.REMAINDER, help="a number of GPUs, then flags "
                        "of train.py: print the computed memory and FLOPs, and stop")
    args = parser.parse_args(argv)
    if args.computed:
        gpus, parts = int(args.computed[0]), untrained(args.computed[1:])
        return print(f"{computed_gib(*parts, gpus):.1f} GiB, "
                     f"{computed_flops(*parts, gpus) / 1e9:,.4g} GFLOPs of a sample")
    end, found = time.monotonic() + 60 * args.minutes, []
    print(f"{json.dumps(facts())}: at most {args.minutes:g} minutes, and the row that runs then")
    print("| preset, flags, data | batch | images/s | peak GiB | share of bf16 peak |\n"
          "|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for names in TOY if args.toy else ROWS:
            if time.monotonic() > end:
                break
            row = dict(zip(("method", "preset", "flags", "source"), names))
            found.append(measure(row, found, args.gib * 2**30, Path(directory, "shards"), args.toy))
            show(found[-1])
            Path(args.out).write_text(json.dumps(facts() | {"rows": found}, indent=1))


if __name__ == "__main__":
    main()
