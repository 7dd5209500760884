"""Train a method: `python train.py --method sparc`, on 8 GPUs
`torchrun --nproc_per_node=8 train.py --method sparc`.

Settings are the defaults of two dataclasses, Config below and the method's, then the values of the
method's --preset, then the flags. The run's directory gets config.json, vocab.txt, log.jsonl,
last.pt, eval.json and pictures. To read how training works, begin at train().
"""

import argparse
import copy
import dataclasses
import functools
import inspect
import itertools
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import typing
import weakref
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.benchmark import Timer
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import bam
import common
import eval as evaluation
import stair
from common import UserError
from eval import METHODS

Count = Annotated[int, 1, math.inf]
CountOrNone = Annotated[int, 0, math.inf]
Positive = Annotated[float, 0, math.inf]


@dataclasses.dataclass
class Config:
    """Settings of a run, whatever the method. Batch sizes are global, over all ranks."""

    preset: str = "tiny"  # a row of the method's PRESETS, whose values replace the defaults here
    data: str = "shapes"  # SPEC: shapes | CSV, TSV | tar | COCO, Karpathy JSON | .token | DIR
    image_root: str | None = None  # directory that the file names of a table are relative to
    eval_data: str | None = None  # SPEC; None: the world's test split, else the training data
    vocab: str | None = None  # a BERT vocab.txt; None: trained from the captions
    vocab_size: int = 8192  # of a vocabulary trained from the captions, at most
    out: str | None = None  # directory of the run; None: runs/METHOD, runs/METHOD-2, ...
    image_encoder: str = "ViT-B/16"  # row of common.VIT_PRESETS[:setting=value,...], or ResNet-50
    text_encoder: str = "12x512"  # row of common.TEXT_PRESETS[:setting=value,...]
    image_size: int | None = None  # pixels; None: the encoder's, or the world's
    image_weights: str | None = None  # OpenCLIP, OpenAI, timm or DINO weights for the image tower
    text_weights: str | None = None  # OpenCLIP or OpenAI weights for the text tower
    crop_scale: Annotated[float, 0.01, 1] = 0.9  # smallest area of training crops (OpenCLIP's)
    steps: Count = 1000  # updates
    batch: Count = 128  # pairs per step, over all ranks
    lr: Positive = 5e-4  # peak; linear warm-up, then --schedule to 0
    warmup: CountOrNone = 100  # steps, of each stage if there are several
    schedule: Literal["cosine", "linear"] = "cosine"  # of the learning rate after the warm-up
    optimizer: Literal["adamw", "lamb", "lars"] = "adamw"  # lamb: of STAIR; lars: of BAM
    weight_decay: Positive = 0.1  # on the weights of linear and convolution layers only
    weight_decay_end: Positive | None = None  # where half a cosine takes it; None: it stays
    beta2: Annotated[float, 0, 0.999999] = 0.98  # AdamW's second; the first is 0.9 (CLIP, Table 19)
    adam_eps: Annotated[float, 0, 1] = 1e-6  # CLIP, Table 19
    clip_grad: Positive = 1.0  # largest norm of the gradient; 0: no clipping
    amp: Literal["bf16", "fp16", "off"] | None = None  # None: bf16 on a GPU, off on the CPU
    workers: Annotated[int, 0, 1024] = 0  # data loading processes per rank
    seed: Annotated[int, 0, 2**31] = 0  # of weights, data and augmentation
    log_every: Count = 10  # steps
    save_every: Count = 1000  # steps
    knn_every: CountOrNone = 0  # steps between k-NN accuracies in the log; 0: none
    resume: bool = False  # continue the run in --out with its settings; given flags replace them
    compile: bool = False  # torch.compile
    grad_checkpoint: bool = False  # recompute the blocks in the backward pass: less memory
    dry_run: bool = False  # print parameters, FLOPs, memory and the loss by chance, and stop
    ranks: Count = 1  # of --dry-run: how many ranks share the batch
    bench: CountOrNone = 0  # time this many steps, print the rates, and stop


OPTIMIZERS = {  # name: (class, how many numbers it keeps of each parameter)
    "adamw": (functools.partial(torch.optim.AdamW, fused=True), 2),
    "lamb": (stair.LAMB, 2),
    "lars": (bam.LARS, 1),
}
BENCH_WARMUP = 3  # steps before --bench starts the clock
# flags without effect where the objective takes no captions
TEXT_FLAGS = ("vocab", "vocab_size", "text_encoder", "text_weights", "crop_scale")


# Training -----------------------------------------


def train(args):
    rank, world_size, device = common.init_distributed()
    method, out = METHODS[args.method], choose_run(args)

    # Build: what can be wrong is found here, not after an hour.
    data, eval_data, options = open_data(args, method)
    tokenizer = build_tokenizer(args, data, out) if method.uses_text(args) else None
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = build_model(args, method, tokenizer)
    if args.dry_run:
        return dry_run(args, method, model) if rank == 0 else None
    transform = build_transform(args, method, model.image_encoder)
    model.to(device)
    torch.manual_seed(args.seed + rank)  # stochastic depth differs between ranks
    autocast, scaler = mixed_precision(args, device)

    # Resume: `at` is all that moves, beside the weights and the optimizer.
    at, saved, end = Progress(), None, 0
    if args.resume:
        saved = load_state(out / "last.pt", args, model, scaler, device)
        at.restore(saved, args.workers)
    if rank == 0 and not args.bench:
        write_run(args, tokenizer, out)
    log, stop, clock = Log(args, out, at.step), Stop(), Clock()
    check_finite, batches = FiniteCheck(out, rank), None

    for number, steps, lr in method.stages(args):  # STAIR has three, the others one
        start, end = end, end + steps
        if at.step >= end:
            continue
        model.begin_stage(number, fresh=at.step == start)
        optimizer = build_optimizer(args, model, saved if at.step > start else None)
        saved = None  # it would stay in memory
        parallel = wrap(args, model, device, world_size)
        model.train()

        while at.step < end:
            if at.step in method.box_refreshes(args):  # BAM: crop around what [CLS] attends to
                batches = None  # ends its workers
                at.use_boxes(find_boxes(args, data, model, device, autocast))
            if batches is None:
                batches = open_loader(args, data, transform, tokenizer, model, at)
                clock.reset()
            batch = to_device(clock.wait_for(batches), device)

            # One update.
            step = at.step - start
            set_schedules(optimizer, args, step, steps, lr)
            with autocast():
                outputs = parallel(batch, common.gather)  # {"loss": scalar, others to log}
            scaler.scale(outputs["loss"]).backward()
            model.before_update(step)
            scaler.unscale_(optimizer)
            grad_norm = clip_grad_norm_(model.parameters(), args.clip_grad or math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            model.after_update(step, steps)
            check_finite(at.step, batch, outputs["loss"], grad_norm, scaler)
            at.advance(batch)
            log.bar.update()

            # Once in a while: time, log, evaluate, save, stop.
            last, stopping = at.step == args.steps, stop.agreed(device)
            knn_due = args.knn_every and at.step % args.knn_every == 0
            if args.bench and at.step == BENCH_WARMUP:
                clock.reset(device)
            if args.bench and (at.step == BENCH_WARMUP + args.bench or stopping):
                return print_rates(args, model, batch, clock, autocast, device)
            if args.bench:
                continue
            if rank == 0 and (at.step % args.log_every == 0 or last or knn_due):
                record = {"step": at.step, **to_floats(outputs), "grad_norm": grad_norm.item()}
                record |= {"lr": optimizer.param_groups[0]["lr"], **clock.rates(args.batch)}
                record |= diagnose(args, model, batch, autocast) | at.skipped_counts()
                if knn_due:
                    record |= knn(args, model, tokenizer, eval_data, options)
                log.write(record, model.warn(record))
                clock.reset()
            if at.step % args.save_every == 0 or at.step == end or stopping:
                check_finite.flush()
                save(out / "last.pt", args, model, optimizer, scaler, at)
            if rank == 0 and at.step == end and not last:
                shutil.copy(out / "last.pt", out / f"stage-{number}.pt")
            if stopping:
                return log.stopped(at.step, out)
    log.bar.close()
    stop.restore()
    finish(args, model, tokenizer, eval_data, options, at)


# Command line -----------------------------------------


def comments_of(config_class):
    """{field: the comment behind a field of a dataclass, or the one in the line above it}."""
    pattern = r"^(?:    # (.*)\n)?    (\w+): [^#\n]*(?:# (.*))?$"
    found = re.findall(pattern, inspect.getsource(config_class), re.MULTILINE)
    return {name: behind or above for above, name, behind in found}


def type_and_bounds(annotation):
    """A field's annotation -> the type of its values, and (lowest, highest) or None."""
    if type(None) in typing.get_args(annotation):
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is not Annotated:
        return annotation, None
    kind, low, high = typing.get_args(annotation)
    return kind, (low, high)


def flag_of(name):
    return "--" + name.replace("_", "-")


def add_flags(parser, config_class, title, preset):
    """A flag for each field of a dataclass, --lambda-f for lambda_f. A flag that is not given stays
    out of the result. preset: {field: value}, which help shows in the place of the defaults."""
    group, comments = parser.add_argument_group(title), comments_of(config_class)
    for field in dataclasses.fields(config_class):
        kind, _ = type_and_bounds(field.type)
        value = f"default: {field.default}"
        if field.name in preset:
            value = f"by the preset: {preset[field.name]}"
        help = f"{comments[field.name]} ({value})".replace("%", "%%")
        if typing.get_origin(kind) is Literal:
            options = {"choices": typing.get_args(kind)}
        elif kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        else:
            options = {"type": kind, "metavar": kind.__name__.upper()}
        flag = flag_of(field.name)
        group.add_argument(flag, default=argparse.SUPPRESS, help=help, **options)


def parse_args(argv):
    """Command line -> the run's settings: one object with the fields of Config, of the method's
    Config, and `method`."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--method", choices=METHODS)
    first.add_argument("--preset", default=Config.preset)
    chosen = first.parse_known_args(argv)[0]
    method = METHODS.get(chosen.method)
    preset = method.PRESETS.get(chosen.preset, {}) if method else {}
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    method_help = "its own flags: --method NAME --help"
    parser.add_argument("--method", required=True, choices=METHODS, help=method_help)
    add_flags(parser, Config, "settings of a run", preset)
    if method:
        add_flags(parser, method.Config, f"settings of {chosen.method}", preset)
    flags = vars(parser.parse_args(argv))

    if flags.get("resume"):
        preset = saved_settings(flags)
    elif chosen.preset not in method.PRESETS:
        names = ", ".join(method.PRESETS)
        raise UserError(f"{chosen.method} has no preset {chosen.preset!r}; it has {names}.")
    Settings = dataclasses.make_dataclass(
        "Settings", [("method", str, chosen.method)], bases=(method.Config, Config))
    names = {field.name for field in dataclasses.fields(Settings)}
    args = Settings(**{name: x for name, x in (preset | flags).items() if name in names})
    check_settings(args, method, flags)
    return args


def check_settings(args, method, flags):
    """Raise UserError for values out of bounds, and for flags that do not fit each other."""
    for field in dataclasses.fields(args):
        value, (_, bounds) = vars(args)[field.name], type_and_bounds(field.type)
        if bounds and value is not None and not bounds[0] <= value <= bounds[1]:
            allowed = f"from {bounds[0]} to {bounds[1]}"
            if bounds[1] == math.inf:
                allowed = f"{bounds[0]} or more"
            raise UserError(f"{flag_of(field.name)} {value} must be {allowed}.")
    for name in TEXT_FLAGS:
        if name in flags and not method.uses_text(args):
            raise UserError(f"{flag_of(name)} has no effect here: this objective makes views of "
                            f"images and takes no captions.")
    if args.bench:
        args.steps = max(args.steps, BENCH_WARMUP + args.bench)
    try:
        method.check(args)
    except ValueError as error:
        raise UserError(str(error)) from None


def saved_settings(flags):
    """The settings of the run that --resume continues."""
    if "preset" in flags or "vocab" in flags:
        raise UserError("--resume takes preset and vocabulary from the run: leave out --preset and "
                        "--vocab.")
    if "out" not in flags:
        raise UserError("--resume needs --out, the directory of the run to continue.")
    if not Path(flags["out"], "config.json").exists():
        raise UserError(f"Nothing to resume: {flags['out']}/config.json does not exist.")
    saved = common.read_config(flags["out"])
    if saved["method"] != flags["method"]:
        raise UserError(f"{flags['out']} is a run of --method {saved['method']}, not of "
                        f"{flags['method']}.")
    return saved


# The run's directory -----------------------------------------


def choose_run(args):
    """The run's directory, the same on every rank; an old run is never overwritten."""
    if not args.out:
        names = (f"runs/{args.method}-{i}" for i in itertools.count(2))
        names = itertools.chain([f"runs/{args.method}"], names)
        free = next(name for name in names if not Path(name).exists())
        args.out = common.gather_objects(free)[0]
    out = Path(args.out)
    if not args.resume and (out / "last.pt").exists():
        raise UserError(f"{out} holds a run: continue it with --resume or choose another --out.")
    return out


def write_run(args, tokenizer, out):
    """Create the run's directory with what eval.py and --resume need to build the model again."""
    out.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        tokenizer.save(out / "vocab.txt")
    record = dataclasses.asdict(args) | {"argv": sys.argv, "git": None}
    record["machine"] = f"{platform.machine()} {platform.node()}, torch {torch.__version__}"
    if shutil.which("git"):
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        record["git"] = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    (out / "config.json").write_text(json.dumps(record, indent=2) + "\n")


class Log:
    """log.jsonl and the progress bar of rank 0; each warning is printed once."""

    def __init__(self, args, out, step):
        mute, self.warned = this_rank()[0] > 0 or bool(args.bench), set()
        self.bar = tqdm(total=args.steps, initial=step, desc=args.method, unit="step",
                        mininterval=1, disable=mute)
        if mute:
            return
        path, lines = out / "log.jsonl", []
        if step and path.exists():
            lines = path.read_text().splitlines(keepends=True)
        self.file = open(path, "w")
        for line in lines:  # a killed run may have written more, after the checkpoint of this step
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                self.file.write(line)

    def write(self, record, warning):
        if warning and warning not in self.warned:
            self.bar.write(f"warning at step {record['step']}: {warning}")
            self.warned.add(warning)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        rate = record["images_per_s"]
        self.bar.set_postfix_str(f"loss {record['loss']:.3f}, {rate:.0f} images/s")

    def stopped(self, step, out):
        self.bar.close()
        if this_rank()[0] == 0:
            print(f"Stopped by signal after step {step} and saved; continue with --resume "
                  f"--out {out}.")


# Data, model, optimizer -----------------------------------------


def open_data(args, method):
    """The training data, the data to evaluate on (None: at the end, see finish), and how to
    evaluate. Sets args.image_size where it was left to the encoder or the world."""
    with_text, (_, world_size) = method.uses_text(args), this_rank()
    if args.batch % world_size:
        raise UserError(f"--batch {args.batch} is global and must be a multiple of the "
                        f"{world_size} ranks.")
    _, encoder = common.image_encoder_settings(args.image_encoder)
    args.image_size = args.image_size or encoder["image_size"]
    data = common.open_data(args.data, args.image_root, "train", args.image_size, with_text)
    if isinstance(data, common.World):
        args.image_size = data.size
        if method.box_refreshes(args):
            raise UserError("The world draws each image once, and boxes of --contrastive-crop are "
                            "of images that come again: give --no-contrastive-crop or other data.")
    options, eval_data = evaluation.options_for(args, limit=1000, train_limit=20_000), None
    if args.eval_data and not with_text:
        options.tasks = ["knn"]  # a linear probe takes long
    if args.eval_data or args.knn_every:  # what is wrong with it is found before the training
        eval_data = evaluation.open_eval_set(options, args.image_size, with_text)
        evaluation.check(options, eval_data, with_text)
    if args.knn_every:
        knn_options = argparse.Namespace(**vars(options) | {"tasks": ["knn"]})
        evaluation.check(knn_options, eval_data, with_text)
    return data, eval_data, options


def build_tokenizer(args, data, out):
    """The run's saved vocabulary, the user's, or one trained from at most 100,000 captions."""
    if args.resume:
        return common.WordPiece(out / "vocab.txt")
    if args.vocab:
        return common.WordPiece(args.vocab)
    captions = data.sample_captions(100_000)
    return common.WordPiece(common.train_wordpiece(captions, args.vocab_size))


def build_model(args, method, tokenizer):
    """The model. Pretrained towers get a line for each thing of the file that did not fit."""
    towers = common.build_encoders(method, args, tokenizer)
    weights = {"--image-weights": args.image_weights, "--text-weights": args.text_weights}
    for (flag, path), tower in zip(weights.items(), towers):
        if path and not args.resume and not args.dry_run:
            report = common.load_encoder_weights(tower, common.load_checkpoint(path))
            for line in report if this_rank()[0] == 0 else []:
                print(f"{flag}: {line}")
    model = common.build_model(method, args, *towers)
    for module in model.modules():
        if isinstance(module, common.Chain):
            module.grad_checkpoint = args.grad_checkpoint
    return model


def build_transform(args, method, encoder):
    """What makes a training image of a file; views of the world's images too."""
    try:
        views = method.views(args)
    except ValueError as error:
        raise UserError(str(error)) from None
    if views is None:
        return common.train_transform(args.image_size, args.crop_scale)
    patch = encoder.image_size // encoder.grid
    for view in views:
        if view["size"] % patch:
            raise UserError(f"A view of {view['size']} pixels is not a multiple of the {patch} of "
                            f"a patch: choose another --local-size.")
    return common.Views([common.View(**view) for view in views], args.image_size)


def open_loader(args, data, transform, tokenizer, model, at):
    """This rank's batches, from the positions of `at` on."""
    rank, world_size = this_rank()
    refreshes = sum(step <= at.step for step in METHODS[args.method].box_refreshes(args))
    seed = args.seed + at.order + 10**6 * refreshes  # with new boxes the data get a new order
    place = dict(batch_size=args.batch // world_size, seed=seed, rank=rank, world_size=world_size,
                 positions=dict(at.positions))
    context = model.text_encoder.context if tokenizer else None
    if isinstance(data, common.World):
        views = None if tokenizer else transform
        stream = common.WorldStream(data, tokenizer, context, transform=views, **place)
    else:
        stream = common.Stream(data, tokenizer, transform, args.image_size, context,
                               boxes=at.boxes, **place)
    return iter(read_in_workers(stream, args.workers))


def read_in_workers(dataset, workers):
    return DataLoader(dataset, batch_size=None, num_workers=workers,
                      prefetch_factor=2 if workers else None, worker_init_fn=ignore_signals,
                      pin_memory=torch.cuda.is_available(),
                      generator=torch.Generator())  # else it draws from the training's numbers


def ignore_signals(worker):
    """torchrun and Slurm signal all processes: workers must live until the run has saved."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


@torch.no_grad()
def find_boxes(args, data, model, device, autocast):
    """Where crops of each image are to lie (BAM, App. G); each rank looks at a part of the data."""
    model.eval()
    images = common.EachImage(data, args.image_size, 256, *this_rank())
    keys, boxes = [], []
    for names, x in read_in_workers(images, args.workers):
        keys += map(common.Boxes.key, names)
        with autocast():
            boxes += model.boxes(x.to(device)).tolist()
    model.train()
    local = torch.tensor(keys, dtype=torch.long), torch.tensor(boxes).view(-1, 4)
    all_keys, all_boxes = zip(*common.gather_objects(local))
    return common.Boxes(torch.cat(all_keys), torch.cat(all_boxes))


def build_optimizer(args, model, saved):
    """A new optimizer, or one that goes on from a checkpoint, if it is not None."""
    groups = common.param_groups(model, args.weight_decay)
    kind, _ = OPTIMIZERS[args.optimizer]
    optimizer = kind(groups, betas=(0.9, args.beta2), eps=args.adam_eps)
    try:
        if saved:
            optimizer.load_state_dict(saved["optimizer"])
    except ValueError:
        raise UserError(f"{args.out}/last.pt is of another stage or optimizer than these settings: "
                        f"leave out what changes --steps, --optimizer or the stages.") from None
    return optimizer


def set_schedules(optimizer, args, step, steps, lr):
    """Learning rate and weight decay of a step of the stage, which has `steps` and the peak lr."""
    schedule = {"cosine": common.cosine_lr, "linear": common.linear_lr}[args.schedule]
    for group in optimizer.param_groups:
        group["lr"] = schedule(step, steps, args.warmup, lr)
        if args.weight_decay_end is not None and group["decays"]:
            decay = common.cosine(step, steps, args.weight_decay, args.weight_decay_end)
            group["weight_decay"] = decay


def wrap(args, model, device, world_size):
    """The model compiled and parallel, as the settings ask."""
    model = torch.compile(model) if args.compile else model
    if world_size == 1:
        return model
    # No rank sends its buffers: statistics, centres and the like are of the global batch anyway.
    known = inspect.signature(DistributedDataParallel).parameters
    flag = "broadcast_buffers"
    if "forward_sync_buffers" in known:  # its name from torch 2.15 on
        flag = "forward_sync_buffers"
    devices = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, **{flag: False})


def mixed_precision(args, device):
    """The context of --amp, to be called, and the scaler of the loss."""
    amp = args.amp or ("bf16" if device.type == "cuda" else "off")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}[amp]
    autocast = functools.partial(torch.autocast, device.type, dtype, enabled=amp != "off")
    return autocast, torch.amp.GradScaler(device.type, enabled=amp == "fp16")


def this_rank():
    """(rank, world_size)"""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def to_device(batch, device):
    return tree_map_only(torch.Tensor, lambda x: x.to(device, non_blocking=True), batch)


# What moves while training -----------------------------------------


@dataclasses.dataclass
class Progress:
    """All that moves while training and is saved, beside the weights and the optimizer."""

    step: int = 0
    order: int = 0  # added to --seed: in which order the data come
    positions: dict = dataclasses.field(default_factory=dict)  # of the data's workers, see Stream
    skipped: dict = dataclasses.field(default_factory=dict)  # {worker: {reason: [count, example]}}
    boxes: common.Boxes | None = None  # where crops are to lie (BAM, App. G)

    def advance(self, batch):
        self.step += 1
        self.positions |= batch["position"]
        self.skipped |= batch["skipped"]

    def use_boxes(self, boxes):
        """New boxes: the data begin a new order. A tar stream would else be read again up to the
        old place."""
        self.boxes = boxes
        for worker, (batches, _, *rest) in self.positions.items():
            self.positions[worker] = (batches, 0, *rest)

    def skipped_counts(self):
        """{"skipped": {reason: count}} of this rank, or nothing."""
        total = {}
        for reasons in self.skipped.values():
            for reason, (count, _) in reasons.items():
                total[reason] = total.get(reason, 0) + count
        return {"skipped": total} if total else {}

    def state(self, workers):
        """What a checkpoint keeps. Every rank must call it."""
        cuda_rng = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        local = {"rng": torch.get_rng_state(), "cuda_rng": cuda_rng,
                 "positions": self.positions, "skipped": self.skipped}
        return {"step": self.step, "order": self.order, "workers": workers,
                "boxes": self.boxes.state() if self.boxes else None,
                "ranks": common.gather_objects(local)}

    def restore(self, state, workers):
        """Go on from a checkpoint, with this rank's random numbers."""
        rank, world_size = this_rank()
        self.step, self.order = state["step"], state.get("order", 0)
        if state.get("boxes"):
            self.boxes = common.Boxes(*(x.cpu() for x in state["boxes"]))
        if (len(state["ranks"]), state["workers"]) != (world_size, workers):
            self.order += self.step
            if rank == 0:
                print(f"The run had {len(state['ranks'])} ranks and {state['workers']} workers, "
                      f"now {world_size} and {workers}: the data start a new order instead of the "
                      f"old place.")
            return
        local = state["ranks"][rank]
        self.positions, self.skipped = local["positions"], local["skipped"]
        torch.set_rng_state(local["rng"].cpu())
        if local["cuda_rng"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(local["cuda_rng"].cpu())


def save(path, args, model, optimizer, scaler, at):
    """Write a checkpoint. Every rank must call it."""
    state = {"method": args.method, "model": model.state_dict(), "scaler": scaler.state_dict(),
             "optimizer": optimizer.state_dict(), **at.state(args.workers)}
    if this_rank()[0] == 0:
        common.save_checkpoint(path, state)


def load_state(path, args, model, scaler, device):
    """Restore weights and loss scale from a checkpoint, and return all of it."""
    state = common.load_checkpoint(path, device)
    if state["method"] != args.method:
        raise UserError(f"{path} holds a {state['method']} model, not one of {args.method}.")
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        detail = str(error).splitlines()[1].strip()
        raise UserError(f"{path} holds a model of another size ({detail}): leave out the flags "
                        f"that change the model.") from None
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    return state


class Stop:
    """Notes SIGTERM and SIGINT, so that the run saves and ends after the step it is in. A second
    signal ends it at once."""

    def __init__(self):
        self.signal, self.flag, self.before = None, None, {}
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self.note)

    def restore(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        if self.signal is not None:
            sys.exit(128 + number)
        self.signal = number

    def agreed(self, device):
        """Whether any rank had a signal at its last call, which every rank makes once a step. The
        answer is a step late, so that no GPU waits for it."""
        if not dist.is_initialized():
            return self.signal is not None
        before, self.flag = self.flag, torch.tensor(float(self.signal is not None), device=device)
        dist.all_reduce(self.flag, dist.ReduceOp.MAX)
        return before is not None and bool(before)


class FiniteCheck:
    """Ends a run whose loss or gradient is not a number, and keeps the batch that made it. It looks
    at a step when the next one is given, so that no GPU waits for it."""

    def __init__(self, out, rank):
        self.out, self.rank, self.pending = out, rank, None

    def __call__(self, step, batch, loss, grad_norm, scaler):
        self.flush()
        values = {"loss": loss.detach()}
        if not scaler.is_enabled():  # with fp16 it may overflow: the scaler leaves out the update
            values["gradient's norm"] = grad_norm
        self.pending = step, batch, values

    def flush(self):
        """Look at the last step that was given."""
        (step, batch, values), self.pending = self.pending or (0, {}, {}), None
        for name, value in values.items():
            if torch.isfinite(value):
                continue
            path = self.out / f"nonfinite-step{step}-rank{self.rank}.pt"
            self.out.mkdir(parents=True, exist_ok=True)
            kept = batch.keys() & {"images", "views", "tokens", "mask"}
            torch.save({key: batch[key] for key in kept}, path)
            raise UserError(f"The {name} is {value.item()} at step {step}; its batch is in {path}, "
                            f"the weights before it in last.pt if a checkpoint was due. Lower "
                            f"--lr, raise --warmup, or use --amp bf16 or off.")


class Clock:
    """Images per second, and the fraction of the time that waits for data, since the last reset."""

    def reset(self, device=None):
        """device: a GPU that is to finish its work first."""
        if device:
            synchronize(device)
        self.start, self.steps, self.data_time = time.perf_counter(), 0, 0.0

    def wait_for(self, batches):
        before = time.perf_counter()
        batch = next(batches)
        self.data_time += time.perf_counter() - before
        self.steps += 1
        return batch

    def rates(self, batch_size):
        seconds = time.perf_counter() - self.start
        images_per_s = self.steps * batch_size / seconds
        return {"images_per_s": images_per_s, "data_share": self.data_time / seconds}


# Log, evaluation, cost -----------------------------------------


def to_floats(scalars):
    return {name: value.item() for name, value in scalars.items()}


@torch.no_grad()
def diagnose(args, model, batch, autocast):
    """What is computed only when a step is logged: the method's own scalars, the loss by chance."""
    model.eval()
    with autocast():
        scalars = to_floats(model.diagnose(batch))
    model.train()
    patches = model.image_encoder.grid**2
    return scalars | {"chance_loss": model.chance_loss(args.batch, batch.get("mask"), patches)}


def knn(args, model, tokenizer, eval_data, options):
    """k-NN accuracies on the way."""
    embed = evaluation.embedder(model.eval(), tokenizer, args, next(model.parameters()).device)
    accuracies = evaluation.knn(embed, eval_data, options)
    model.train()
    return accuracies


def finish(args, model, tokenizer, eval_data, options, at):
    """Print what every rank's workers skipped, evaluate, draw."""
    every_rank = common.gather_objects(at.skipped)
    if this_rank()[0] > 0:
        return
    for reasons in itertools.chain.from_iterable(workers.values() for workers in every_rank):
        for reason, (count, example) in reasons.items():
            print(f"skipped {count} samples: {reason}, the last {example}")
    with_text = model.encode_text is not None
    try:
        if eval_data is None:
            eval_data = evaluation.open_eval_set(options, args.image_size, with_text)
        evaluation.check(options, eval_data, with_text)
    except UserError as error:
        return print(f"No evaluation: {error}")
    print(f"Evaluation on {options.data}, split {options.split}, in fp32:")
    embed = evaluation.embedder(model.eval(), tokenizer, args, next(model.parameters()).device)
    evaluation.report(embed, eval_data, options, args.out)


def dry_run(args, method, model):
    """Print what the settings cost; the last line is JSON."""
    print(f"{'part':16} {'parameters':>12}")
    params = {}
    for name, part in (*model.named_children(), ("all", model)):
        params[name] = sum(p.numel() for p in part.parameters())
        print(f"{name:16} {params[name]:12,}")
    batch, patches = made_up_batch(args, method, model, 2), model.image_encoder.grid**2
    with flop_counter() as counter:
        model(batch)
    chance_loss = model.chance_loss(args.batch, batch.get("mask"), patches)
    record = {"params": params["all"], "flops_per_sample": counter.get_total_flops() // 2,
              "chance_loss": chance_loss, **update_cost(args, method, model)}
    print(f"update_*: one update of --batch {args.batch} on one of --ranks {args.ranks}, in fp32, "
          f"captions of full length; a multiplication and an addition are 2 FLOPs")
    print(json.dumps(record))


def flop_counter():
    """Counts matrix products and attention, that on the CPU too, which torch 2.6 leaves out."""
    aten, counter = torch.ops.aten, FlopCounterMode(display=False)
    formula = counter.flop_registry
    formula[aten._scaled_dot_product_flash_attention_for_cpu] = (
        formula[aten._scaled_dot_product_flash_attention])
    formula[aten._scaled_dot_product_flash_attention_for_cpu_backward] = (
        formula[aten._scaled_dot_product_flash_attention_backward])
    return counter


def made_up_batch(args, method, model, n):
    """n random images with captions of full length, or n random images of each view."""
    views = method.views(args)
    if views:
        return {"views": [torch.randn(n, 3, view["size"], view["size"]) for view in views]}
    text = model.text_encoder
    return {"images": torch.randn(n, 3, args.image_size, args.image_size),
            "tokens": torch.randint(text.vocab_size, (n, text.context)),
            "mask": torch.ones(n, text.context, dtype=torch.bool)}


def update_cost(args, method, model):
    """FLOPs and peak bytes of one update on one of --ranks ranks, the optimizer's numbers included.
    The tensors are fake: nothing is computed."""
    if args.batch % args.ranks:
        raise UserError(f"--batch {args.batch} must be a multiple of the {args.ranks} of --ranks.")

    def gather(x):  # whole numbers are lengths of captions, which are the same on all ranks
        repeats = args.ranks if x.is_floating_point() else 1
        return x.repeat(repeats, *[1] * (x.ndim - 1)) if repeats > 1 else x

    fake = fake_tensor.FakeTensorMode()
    with fake_tensor.FakeCopyMode(fake):
        model = copy.deepcopy(model)
    try:
        with fake:
            batch = made_up_batch(args, method, model, args.batch // args.ranks)
            tensors = [*model.parameters(), *tree_leaves(batch)]
            with flop_counter() as counter, LiveMemory(tensors) as memory:
                model(batch, gather)["loss"].backward()
    except (fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException):
        reason = f"what {args.method} computes depends on the values: measure it with --bench"
        return {"update_flops": None, "update_peak_bytes": None, "memory_unknown": reason}
    except ValueError as error:  # of a loss that needs a larger batch
        raise UserError(f"--batch {args.batch}: {error}") from None
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    _, moments = OPTIMIZERS[args.optimizer]
    peak = memory.peak + moments * trained
    return {"update_flops": counter.get_total_flops(), "update_peak_bytes": peak}


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all living tensors, real or fake: `peak` is what an allocator needs."""

    def __init__(self, tensors=()):
        super().__init__()
        self.live = self.peak = 0
        self.known = weakref.WeakKeyDictionary()
        for x in tensors:
            self.add(x)

    def add(self, x):
        storage = x.untyped_storage()
        if storage not in self.known:
            self.known[storage] = True
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.remove, storage.nbytes())

    def remove(self, size):
        self.live -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if torch.is_tensor(x):
                self.add(x)
        return out


def print_rates(args, model, batch, clock, autocast, device):
    """The rates of --bench, beside the FLOP/s of a large matrix product here and now; the last line
    is JSON."""
    synchronize(device)
    rates = clock.rates(args.batch)
    n, memory = 2048, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device.type == "cuda":
        n, memory = 8192, torch.cuda.max_memory_allocated(device)
    seconds = args.batch / rates["images_per_s"]
    with flop_counter() as counter, autocast():
        model(batch)["loss"].backward()
        a = torch.randn(n, n, device=device) @ torch.eye(n, device=device)  # in autocast's type
    flops = counter.get_total_flops() - 2 * n**3
    product = min(Timer("a @ a", globals={"a": a}).timeit(1).mean for _ in range(5))
    result = {"seconds_per_step": seconds, "flops_per_step_per_rank": flops,
              "flops_per_s": flops / seconds, "matmul_flops_per_s": 2 * n**3 / product,
              "share_of_matmul": flops / seconds * product / (2 * n**3),
              "peak_memory_bytes": memory, **rates}
    if this_rank()[0] == 0:
        for name, value in result.items():
            print(f"  {name:24} {value:,.3f}")
        print(json.dumps(result))


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv=None):
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        train(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
