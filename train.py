"""Train a method: `python train.py --method sparc`, on 8 GPUs `torchrun --nproc_per_node=8 train.py
--method sparc`.

Settings come from the defaults of two dataclasses, Config below and the method's; then from the
method's --preset, then from the flags. The run's directory gets config.json, vocab.txt, log.jsonl,
last.pt, eval.json and pictures. To read how training works, start at train().
"""

import argparse
import collections
import contextlib
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
from typing import Annotated, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
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
CountOr0 = Annotated[int, 0, math.inf]
NotNegative = Annotated[float, 0, math.inf]


@dataclasses.dataclass
class Config:
    """Settings of a run, whatever the method. Batch sizes are global, over all ranks."""

    preset: str = "tiny"  # a row of the method's PRESETS, whose values replace the defaults here
    # SPEC: shapes | CSV, TSV | 'DIR/{00000..00012}.tar' | COCO, Karpathy JSON | .token | DIR
    data: str = "shapes"
    image_root: str | None = None  # directory that the file names of a table are relative to
    # SPEC to evaluate on at the end; None: the world's test split, else the training data
    eval_data: str | None = None
    vocab: str | None = None  # a BERT vocab.txt; None: trained from the captions
    vocab_size: int = 8192  # of a vocabulary trained from the captions, at most
    out: str | None = None  # directory of the run; None: runs/METHOD, runs/METHOD-2, ...
    image_encoder: str = "ViT-B/16"  # row of common.VIT_PRESETS[:setting=value,...], or ResNet-50
    text_encoder: str = "12x512"  # row of common.TEXT_PRESETS[:setting=value,...]
    image_size: int | None = None  # pixels; None: the encoder's, or the world's
    image_weights: str | None = None  # OpenCLIP, OpenAI, timm or DINO state dict for the image tower
    text_weights: str | None = None  # OpenCLIP or OpenAI state dict for the text tower
    # smallest fraction of the area that training crops keep (OpenCLIP's default)
    crop_scale: Annotated[float, 0.01, 1] = 0.9
    steps: Count = 1000  # updates
    batch: Count = 128  # pairs per step, over all ranks
    lr: NotNegative = 5e-4  # peak; linear warm-up, then --schedule to 0
    warmup: CountOr0 = 100  # steps, of each stage if there are several
    schedule: Literal["cosine", "linear"] = "cosine"  # of the learning rate after the warm-up
    optimizer: Literal["adamw", "lamb", "lars"] = "adamw"  # lamb: of STAIR; lars: of BAM
    weight_decay: NotNegative = 0.1  # on the weights of linear and convolution layers only
    # where half a cosine takes it by the last step; None: it stays
    weight_decay_end: NotNegative | None = None
    beta2: Annotated[float, 0, 0.999999] = 0.98  # AdamW's second; the first is 0.9 (CLIP, Table 19)
    adam_eps: Annotated[float, 0, 1] = 1e-6  # CLIP, Table 19
    clip_grad: NotNegative = 1.0  # largest norm of the gradient; 0: no clipping
    amp: Literal["bf16", "fp16", "off"] | None = None  # None: bf16 on a GPU, off on the CPU
    workers: Annotated[int, 0, 1024] = 0  # data loading processes per rank
    seed: Annotated[int, 0, 2**31] = 0  # of weights, data and augmentation
    log_every: Count = 10  # steps
    save_every: Count = 1000  # steps
    # steps between k-NN accuracies in the log, on --eval-data or the world; 0: none
    knn_every: CountOr0 = 0
    resume: bool = False  # continue the run in --out with its settings; given flags replace them
    compile: bool = False  # torch.compile
    # recompute the encoders' blocks in the backward pass: less memory, a third more time
    grad_checkpoint: bool = False
    # print parameters, FLOPs, memory and the chance level of the loss, and stop
    dry_run: bool = False
    ranks: Count = 1  # of --dry-run: how many ranks share the batch
    bench: CountOr0 = 0  # time this many steps, print the rates, and stop


OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, fused=True),
    "lamb": stair.LAMB,
    "lars": bam.LARS,
}
MOMENTS = {"adamw": 2, "lamb": 2, "lars": 1}  # numbers that an optimizer keeps of each parameter
BENCH_WARMUP = 3  # steps before --bench starts its clock
# flags without effect where the objective takes no captions
TEXT_FLAGS = ("vocab", "vocab_size", "text_encoder", "text_weights", "crop_scale")


# Command line ------------------------------------------------------------------------------------


def comments_of(config_class):
    """{field: the comment behind a field of a dataclass, or the one in the line above it}."""
    comments, above = {}, ""
    for line in inspect.getsource(config_class).splitlines():
        field, comment = re.match(r"    (\w+): ", line), line.partition("# ")[2]
        if field:
            comments[field[1]] = comment or above
        above = comment
    return comments


def type_and_bounds(annotation):
    """A field's annotation -> the type of its values, and (lowest, highest) or None."""
    if type(None) in typing.get_args(annotation):
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is Annotated:
        kind, low, high = typing.get_args(annotation)
        return kind, (low, high)
    return annotation, None


def add_flags(parser, config_class, title, preset):
    """A flag for each field of a dataclass, --lambda-f for lambda_f. A flag that is not given stays
    out of the result. preset: {field: value}, which help shows in the place of the defaults."""
    group, comments = parser.add_argument_group(title), comments_of(config_class)
    for field in dataclasses.fields(config_class):
        value = f"default: {field.default}"
        if field.name in preset:
            value = f"by the preset: {preset[field.name]}"
        text = f"{comments[field.name]} ({value})".replace("%", "%%")
        options = {"default": argparse.SUPPRESS, "help": text}
        kind, _ = type_and_bounds(field.type)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Literal:
            options["choices"] = typing.get_args(kind)
        else:
            options |= {"type": kind, "metavar": kind.__name__.upper()}
        group.add_argument(flag_of(field.name), **options)


def flag_of(name):
    return "--" + name.replace("_", "-")


def parse_args(argv):
    """Command line -> the run's settings: one object with the fields of Config, of the method's
    Config, and `method`."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--method", choices=METHODS)
    first.add_argument("--preset", default=Config.preset)
    chosen = first.parse_known_args(argv)[0]

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    method_help = "its own flags: --method NAME --help"
    parser.add_argument("--method", required=True, choices=METHODS, help=method_help)
    method = METHODS.get(chosen.method)
    preset = method.PRESETS.get(chosen.preset, {}) if method else {}
    add_flags(parser, Config, "settings of a run", preset)
    if method:
        add_flags(parser, method.Config, f"settings of {chosen.method}", preset)
    flags = vars(parser.parse_args(argv))

    if flags.get("resume"):
        if "preset" in flags or "vocab" in flags:
            raise UserError("--resume takes preset and vocabulary from the run: leave out --preset "
                            "and --vocab.")
        preset = saved_settings(flags)
    elif chosen.preset not in method.PRESETS:
        names = ", ".join(method.PRESETS)
        raise UserError(f"{chosen.method} has no preset {chosen.preset!r}; it has {names}.")
    Settings = settings_class(method)
    fields = {field.name for field in dataclasses.fields(Settings)}
    args = Settings(**{name: x for name, x in (preset | flags).items() if name in fields})
    check_settings(args, method, flags)
    return args


def settings_class(method):
    """The dataclass with the fields of Config, of the method's Config, and `method`."""
    return dataclasses.make_dataclass(
        "Settings", [("method", str, method.__name__)], bases=(method.Config, Config)
    )


def check_settings(args, method, flags):
    """Raise UserError for values out of bounds, and for flags that do not fit each other."""
    for field in dataclasses.fields(args):
        value, (_, bounds) = getattr(args, field.name), type_and_bounds(field.type)
        if bounds and value is not None and not bounds[0] <= value <= bounds[1]:
            allowed = f"from {bounds[0]} to {bounds[1]}"
            if bounds[1] == math.inf:
                allowed = f"{bounds[0]} or more"
            raise UserError(f"{flag_of(field.name)} {value} must be {allowed}.")
    for name in TEXT_FLAGS:
        if name in flags and not method.uses_text(args):
            raise UserError(f"{flag_of(name)} has no effect here: this objective makes views of images "
                            f"and takes no captions.")
    try:
        method.check(args)
    except ValueError as error:
        raise UserError(str(error)) from None


# The run's directory -----------------------------------------------------------------------------


def saved_settings(flags):
    """The settings of the run that --resume continues."""
    if "out" not in flags:
        raise UserError("--resume needs --out, the directory of the run to continue.")
    if not Path(flags["out"], "config.json").exists():
        raise UserError(f"Nothing to resume: {flags['out']}/config.json does not exist.")
    saved = common.read_config(flags["out"])
    if saved["method"] != flags["method"]:
        raise UserError(f"{flags['out']} is a run of --method {saved['method']}, not of "
                        f"{flags['method']}.")
    return saved


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
    revision = None
    if shutil.which("git"):
        command = ["git", "rev-parse", "HEAD"]
        folder = Path(__file__).parent
        git = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        revision = git.stdout.strip() or None
    machine = f"{platform.machine()} {platform.node()}, torch {torch.__version__}"
    record = {"argv": sys.argv, "git": revision, "machine": machine}
    text = json.dumps(dataclasses.asdict(args) | record, indent=2)
    (out / "config.json").write_text(text + "\n")


class Log:
    """log.jsonl and the progress bar; warnings are printed once. On other ranks than 0 it is mute."""

    def __init__(self, args, out, step, rank):
        self.file, self.warned = None, set()
        mute = rank > 0 or bool(args.bench)
        self.bar = tqdm(
            total=args.steps, initial=step, desc=args.method, unit="step", mininterval=1, disable=mute
        )
        if not mute:
            self.file = self.open(out / "log.jsonl", step)

    def open(self, path, step):
        """Open to append, without what a killed run wrote after the checkpoint of this step."""
        lines = path.read_text().splitlines(keepends=True) if step and path.exists() else []
        file = open(path, "w")
        for line in lines:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                file.write(line)
        return file

    def is_due(self, args, step):
        knn_due = args.knn_every and step % args.knn_every == 0
        return step % args.log_every == 0 or step == args.steps or knn_due

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
        if self.file:
            print(f"Stopped by signal after step {step} and saved; continue with --resume --out {out}.")


# Building ----------------------------------------------------------------------------------------


def open_data(args, method):
    """The training data. Sets args.image_size where it was left to the encoder or the world."""
    encoder = common.image_encoder_settings(args.image_encoder)[1]
    args.image_size = args.image_size or encoder["image_size"]
    with_text = method.uses_text(args)
    data = common.open_data(args.data, args.image_root, "train", args.image_size, with_text)
    if isinstance(data, common.World):
        args.image_size = data.size
        if method.box_refreshes(args):
            raise UserError("The world draws each image once, and --contrastive-crop keeps boxes of "
                            "images that come again: give --no-contrastive-crop or other data.")
    return data


def open_eval_data(args, method, options):
    """The data of --eval-data or --knn-every, checked before the training; None without them."""
    if not (args.eval_data or args.knn_every):
        return None
    with_text = method.uses_text(args)
    if args.eval_data and not with_text:
        options.tasks = ["knn"]  # a linear probe takes long
    data = evaluation.open_eval_set(options, args.image_size, with_text)
    evaluation.check(options, data, with_text)
    if args.knn_every:
        try:
            knn_alone = argparse.Namespace(**vars(options) | {"tasks": ["knn"]})
            evaluation.check(knn_alone, data, with_text)
        except UserError as error:
            raise UserError(f"--knn-every needs class folders as --eval-data, or shapes: {error}") from None
    return data


def build_tokenizer(args, data, out):
    """The run's saved vocabulary, the user's, or one trained from at most 100,000 captions."""
    if args.resume:
        return common.WordPiece(out / "vocab.txt")
    if args.vocab:
        return common.WordPiece(args.vocab)
    captions = data.sample_captions(100_000)
    return common.WordPiece(common.train_wordpiece(captions, args.vocab_size))


def build_model(args, method, tokenizer):
    """The model, its towers pretrained where weights are given. The same on every rank."""
    torch.manual_seed(args.seed)
    image_encoder, text_encoder = common.build_encoders(method, args, tokenizer)
    if not (args.resume or args.dry_run):
        load_weights("--image-weights", args.image_weights, image_encoder)
        load_weights("--text-weights", args.text_weights, text_encoder)
    return common.build_model(method, args, image_encoder, text_encoder)


def load_weights(flag, path, encoder):
    """Load a pretrained tower, with a line for everything that did not fit."""
    if path:
        report = common.load_encoder_weights(encoder, common.load_checkpoint(path))
        if this_rank()[0] == 0:
            for line in report:
                print(f"{flag}: {line}")


def build_transform(args, method, data, encoder):
    """What is done to each training image: None for the world's, whose captions go with them."""
    try:
        views = method.views(args)
    except ValueError as error:
        raise UserError(str(error)) from None
    if views is None:
        if isinstance(data, common.World):
            return None
        return common.train_transform(args.image_size, args.crop_scale)
    patch = encoder.image_size // encoder.grid
    for view in views:
        if view["size"] % patch:
            raise UserError(f"A view of {view['size']} pixels is not a multiple of the {patch} of a "
                            f"patch: choose another --local-size.")
    return common.Views([common.View(**view) for view in views], args.image_size)


def open_loader(args, data, transform, tokenizer, context, at):
    """This rank's batches, from the positions of `at` on."""
    rank, world_size = this_rank()
    refreshes = sum(step <= at.step for step in METHODS[args.method].box_refreshes(args))
    place = dict(
        batch_size=args.batch // world_size,
        seed=args.seed + at.order + 10**6 * refreshes,  # new boxes, new order
        rank=rank,
        world_size=world_size,
        positions=dict(at.positions),
    )
    if isinstance(data, common.World):
        stream = common.WorldStream(data, tokenizer, context, transform=transform, **place)
    else:
        size = args.image_size
        stream = common.Stream(data, tokenizer, transform, size, context, boxes=at.boxes, **place)
    return iter(open_dataset(stream, args.workers))


def open_dataset(dataset, workers):
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        prefetch_factor=2 if workers else None,
        worker_init_fn=ignore_signals,
        generator=torch.Generator(),  # else a loader draws from the random numbers of the training
    )


def ignore_signals(worker):
    """torchrun and Slurm signal all processes: workers must live until the run has saved."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


@torch.no_grad()
def find_boxes(args, data, model, device, autocast):
    """The boxes in which crops are to lie (BAM, App. G): each rank looks at its part of the images."""
    model.eval()
    images = common.EachImage(data, args.image_size, 256, *this_rank())
    keys, boxes = [], []
    for names, x in open_dataset(images, args.workers):
        keys += map(common.Boxes.key, names)
        with autocast():
            boxes += model.boxes(x.to(device)).tolist()
    model.train()
    local = torch.tensor(keys, dtype=torch.long), torch.tensor(boxes).view(-1, 4)
    all_keys, all_boxes = zip(*common.gather_objects(local))
    return common.Boxes(torch.cat(all_keys), torch.cat(all_boxes))


def this_rank():
    """(rank, world_size)"""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def to_device(batch, device):
    return tree_map_only(torch.Tensor, lambda x: x.to(device, non_blocking=True), batch)


def mixed_precision(args, device):
    """The autocast context of --amp, as a function, and the scaler of its gradients."""
    amp = args.amp or ("bf16" if device.type == "cuda" else "off")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}[amp]
    autocast = functools.partial(torch.autocast, device.type, dtype, enabled=amp != "off")
    return autocast, torch.amp.GradScaler(device.type, enabled=amp == "fp16")


# Parts of the loop -------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A stage of the training: STAIR has three, the others one."""

    number: int
    start: int  # step
    end: int
    lr: float  # peak

    @property
    def steps(self):
        return self.end - self.start


def plan_stages(args, method):
    stages, start = [], 0
    for number, steps, lr in method.stages(args):
        stages.append(Stage(number, start, start + steps, lr))
        start += steps
        if this_rank()[0] == 0 and 0 < steps <= args.warmup:
            print(f"--warmup {args.warmup} is not shorter than a stage of {steps} steps: "
                  f"the learning rate stays below its peak.")
    return stages


@dataclasses.dataclass
class Progress:
    """All that moves while training and is saved, beside the weights and the optimizer."""

    step: int = 0
    order: int = 0  # added to --seed: in which order the data come
    positions: dict = dataclasses.field(default_factory=dict)  # of the data's workers, as Stream's
    skipped: dict = dataclasses.field(default_factory=dict)  # {worker: {reason: [count, example]}}
    boxes: common.Boxes | None = None  # where crops are to lie (BAM, App. G)

    def advance(self, batch):
        self.step += 1
        self.positions |= batch["position"]
        self.skipped |= batch["skipped"]

    def use_boxes(self, boxes):
        """With new boxes the data start a new order, at its beginning: to the old place a tar
        stream would have to be read again from its start."""
        self.boxes = boxes
        for worker, (batches, _, *rest) in self.positions.items():
            self.positions[worker] = (batches, 0, *rest)

    def skipped_counts(self):
        """{"skipped": {reason: count}} of this rank, or nothing."""
        total = collections.Counter()
        for reasons in self.skipped.values():
            for reason, (count, _) in reasons.items():
                total[reason] += count
        return {"skipped": dict(total)} if total else {}

    def state(self, workers):
        """What a checkpoint keeps. Every rank must call it."""
        local = {
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
            "positions": self.positions,
            "skipped": self.skipped,
        }
        return {
            "step": self.step,
            "order": self.order,
            "boxes": self.boxes.state() if self.boxes else None,
            "workers": workers,
            "ranks": common.gather_objects(local),
        }

    def restore(self, state, workers):
        """Take over a checkpoint, this rank's random numbers included."""
        rank, world_size = this_rank()
        self.step, self.order = state["step"], state.get("order", 0)
        if state.get("boxes"):
            self.boxes = common.Boxes(*(x.cpu() for x in state["boxes"]))
        before = len(state["ranks"]), state["workers"]
        if before != (world_size, workers):
            self.order += self.step
            if rank == 0:
                print(f"The run had {before[0]} ranks and {before[1]} workers, now {world_size} and "
                      f"{workers}: the data start a new order instead of the old place.")
            return
        local = state["ranks"][rank]
        self.positions, self.skipped = local["positions"], local["skipped"]
        torch.set_rng_state(local["rng"].cpu())
        if local["cuda_rng"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(local["cuda_rng"].cpu())


def save(path, args, model, optimizer, scaler, at):
    """Write a checkpoint. Every rank must call it; rank 0 writes."""
    state = {
        "method": args.method,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        **at.state(args.workers),
    }
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
        raise UserError(f"{path} holds a model of another size ({detail}): leave out the flags that "
                        f"change the model.") from None
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    return state


def build_optimizer(args, model, state=None):
    """A new optimizer, or one that continues from its saved state."""
    groups = common.param_groups(model, args.weight_decay)
    optimizer = OPTIMIZERS[args.optimizer](groups, betas=(0.9, args.beta2), eps=args.adam_eps)
    if state:
        try:
            optimizer.load_state_dict(state)
        except ValueError:
            raise UserError(f"{args.out}/last.pt is of another stage or optimizer than these settings: "
                            f"leave out the flags that change --steps, --optimizer or the "
                            f"stages.") from None
    return optimizer


def set_schedules(optimizer, args, stage, step):
    """Learning rate and weight decay at `step` of the stage."""
    schedule = {"cosine": common.cosine_lr, "linear": common.linear_lr}[args.schedule]
    for group in optimizer.param_groups:
        group["lr"] = schedule(step, stage.steps, args.warmup, stage.lr)
        if args.weight_decay_end is not None and group["decays"]:
            ends = args.weight_decay, args.weight_decay_end
            group["weight_decay"] = common.cosine(step, stage.steps, *ends)


def wrap(args, model, device, world_size):
    """The model compiled and parallel, as the settings ask."""
    if args.compile:
        model = torch.compile(model)
    if world_size > 1:
        # Every buffer is the same on all ranks: statistics, centres ... are of the global batch.
        known = inspect.signature(DistributedDataParallel).parameters
        flag = "broadcast_buffers"
        if "forward_sync_buffers" in known:  # its name from torch 2.15 on
            flag = "forward_sync_buffers"
        devices = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=devices, **{flag: False})
    return model


def checkpoint_blocks(model, on):
    """Switch gradient checkpointing of all encoders in the model."""
    for module in model.modules():
        if isinstance(module, common.Chain):
            module.grad_checkpoint = on


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
        answer is a step late, so that no GPU is kept waiting for it."""
        if not dist.is_initialized():
            return self.signal is not None
        here = torch.tensor(float(self.signal is not None), device=device)
        last, self.flag = self.flag, here
        dist.all_reduce(self.flag, dist.ReduceOp.MAX)
        return last is not None and bool(last)


class FiniteCheck:
    """Ends a run whose loss or gradient is not a number, and keeps the batch that made it. It looks
    one step late, so that no GPU is kept waiting for it."""

    def __init__(self, out, rank):
        self.out, self.rank, self.pending = out, rank, None

    def __call__(self, step, batch, loss, grad_norm):
        self.flush()
        self.pending = step, batch, {"loss": loss.detach(), "gradient's norm": grad_norm}

    def flush(self):
        """Look at the step that was given last."""
        if self.pending is None:
            return
        (step, batch, values), self.pending = self.pending, None
        for name, value in values.items():
            if value is None or torch.isfinite(value):
                continue
            path = self.out / f"nonfinite-step{step}-rank{self.rank}.pt"
            self.out.mkdir(parents=True, exist_ok=True)
            kept = ("images", "views", "tokens", "mask")
            torch.save({key: batch[key] for key in kept if key in batch}, path)
            raise UserError(f"The {name} is {value.item()} at step {step}; its batch is in {path}, "
                            f"the weights before it in {self.out}/last.pt if a checkpoint was due. "
                            f"Lower --lr, raise --warmup, or use --amp bf16 or off.")


class Clock:
    """Images per second and the fraction of the time that waits for data, since the last reset."""

    def __init__(self, batch):
        self.batch = batch
        self.reset()

    def reset(self, device=None):
        """Start anew; device: a GPU whose work is to end first."""
        if device:
            synchronize(device)
        self.start, self.steps, self.data_time = time.perf_counter(), 0, 0.0

    @contextlib.contextmanager
    def waiting_for_data(self):
        before = time.perf_counter()
        yield
        self.data_time += time.perf_counter() - before
        self.steps += 1

    def rates(self):
        seconds = time.perf_counter() - self.start
        images = self.steps * self.batch
        return {"images_per_s": images / seconds, "data_share": self.data_time / seconds}


# Training ----------------------------------------------------------------------------------------


def train(args):
    method = METHODS[args.method]
    rank, world_size, device = common.init_distributed()
    if args.batch % world_size:
        raise UserError(f"--batch {args.batch} is global and must be a multiple of the {world_size} ranks.")
    out = choose_run(args)

    # Build: what can be wrong is found here, not after an hour.
    data = open_data(args, method)
    options = evaluation.options_for(args, limit=1000, train_limit=20_000)
    eval_data = open_eval_data(args, method, options)
    tokenizer = build_tokenizer(args, data, out) if method.uses_text(args) else None
    model = build_model(args, method, tokenizer)
    if args.dry_run:
        return dry_run(args, method, model) if rank == 0 else None
    transform = build_transform(args, method, data, model.image_encoder)
    context = model.text_encoder.context if tokenizer else None
    model.to(device)
    checkpoint_blocks(model, args.grad_checkpoint)
    torch.manual_seed(args.seed + rank)  # stochastic depth differs between ranks
    autocast, scaler = mixed_precision(args, device)
    stages, box_refreshes = plan_stages(args, method), method.box_refreshes(args)

    # Resume: `at` is all that moves, beside the weights and the optimizer.
    at, saved = Progress(), None
    if args.resume:
        saved = load_state(out / "last.pt", args, model, scaler, device)
        at.restore(saved, args.workers)
    if rank == 0 and not args.bench:
        write_run(args, tokenizer, out)
    log, stop, clock = Log(args, out, at.step, rank), Stop(), Clock(args.batch)
    check_finite, batches = FiniteCheck(out, rank), None

    for stage in stages:
        if at.step >= stage.end:
            continue
        model.zero_grad(set_to_none=True)  # the last gradient of what the stage freezes would count
        model.begin_stage(stage.number, fresh=at.step == stage.start)
        continued = saved["optimizer"] if saved and at.step > stage.start else None
        optimizer = build_optimizer(args, model, continued)  # each stage has its own
        saved = continued = None  # they would stay in memory
        parallel = wrap(args, model, device, world_size)
        model.train()

        while at.step < stage.end:
            if at.step in box_refreshes:  # BAM, App. G: crop around what [CLS] attends to by now
                batches = None  # ends its workers
                at.use_boxes(find_boxes(args, data, model, device, autocast))
            if batches is None:
                batches = open_loader(args, data, transform, tokenizer, context, at)
                clock.reset()
            with clock.waiting_for_data():
                batch = to_device(next(batches), device)

            # One update.
            step = at.step - stage.start
            set_schedules(optimizer, args, stage, step)
            with autocast():
                outputs = parallel(batch, common.gather)  # {"loss": scalar, others to log}
            scaler.scale(outputs["loss"]).backward()
            model.before_update(step)
            scaler.unscale_(optimizer)
            max_norm = args.clip_grad or math.inf
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            model.after_update(step, stage.steps)
            # With fp16 the norm may overflow: the scaler then leaves out the update.
            check_finite(at.step, batch, outputs["loss"], None if scaler.is_enabled() else grad_norm)
            at.advance(batch)
            log.bar.update()

            # Once in a while: time, log, evaluate, save, stop.
            last, stopping = at.step == args.steps, stop.agreed(device)
            if args.bench and at.step == BENCH_WARMUP:
                clock.reset(device)
            if args.bench and (at.step == BENCH_WARMUP + args.bench or stopping):
                return print_rates(args, model, batch, clock, autocast, device)
            if args.bench:
                continue
            if rank == 0 and log.is_due(args, at.step):
                record = {"step": at.step, **to_floats(outputs), "grad_norm": grad_norm.item()}
                record |= {"lr": optimizer.param_groups[0]["lr"], **clock.rates(), **at.skipped_counts()}
                record |= diagnose(args, model, batch, autocast)
                if args.knn_every and at.step % args.knn_every == 0:
                    record |= knn(args, model, tokenizer, eval_data, options, device)
                log.write(record, model.warn(record))
                clock.reset()
            if at.step % args.save_every == 0 or at.step == stage.end or stopping:
                check_finite.flush()
                save(out / "last.pt", args, model, optimizer, scaler, at)
            if rank == 0 and at.step == stage.end and not last:
                shutil.copy(out / "last.pt", out / f"stage-{stage.number}.pt")
            if stopping:
                return log.stopped(at.step, out)
    log.bar.close()
    stop.restore()
    finish(args, model, tokenizer, eval_data, options, at, out, device)


def to_floats(scalars):
    return {name: value.item() for name, value in scalars.items()}


@torch.no_grad()
def diagnose(args, model, batch, autocast):
    """What is computed only when a step is logged: the method's own scalars, and the chance level
    of the loss."""
    model.eval()
    with autocast():
        scalars = to_floats(model.diagnose(batch))
    model.train()
    patches = model.image_encoder.grid**2
    return scalars | {"chance_loss": model.chance_loss(args.batch, batch.get("mask"), patches)}


def knn(args, model, tokenizer, eval_data, options, device):
    """k-NN accuracies on the way."""
    embed = evaluation.embedder(model.eval(), tokenizer, args, device)
    accuracies = evaluation.knn(embed, eval_data, options)
    model.train()
    return accuracies


def finish(args, model, tokenizer, eval_data, options, at, out, device):
    """Print what each rank's workers skipped, evaluate, draw."""
    every_rank = common.gather_objects(at.skipped)
    if this_rank()[0] > 0:
        return
    for workers in every_rank:
        for reasons in workers.values():
            for reason, (count, example) in reasons.items():
                print(f"skipped {count} samples: {reason}, the last {example}")
    with_text = model.encode_text is not None
    try:
        if eval_data is None:
            eval_data = evaluation.open_eval_set(options, args.image_size, with_text)
        evaluation.check(options, eval_data, with_text)
    except UserError as error:
        print(f"No evaluation: {error}")
        return
    print(f"Evaluation on {options.data}, split {options.split}, in fp32:")
    embed = evaluation.embedder(model.eval(), tokenizer, args, device)
    evaluation.report(embed, eval_data, options, out)


# What a run costs --------------------------------------------------------------------------------


def dry_run(args, method, model):
    """Print what the settings cost; the last line is JSON."""
    print(f"{'part':16} {'parameters':>12}")
    for name, part in (*model.named_children(), ("all", model)):
        print(f"{name:16} {count(part):12,}")
    params = count(model)
    if sum(count(part) for part in model.children()) > params:
        print("(parameters that parts share are counted in each of them, and once in all)")
    batch = fake_batch(args, method, model, 2)
    with FlopCounterMode(display=False) as counter:
        loss = model(batch)["loss"]
        flops = counter.get_total_flops() // 2
        loss.backward()
    both = counter.get_total_flops() // 2
    print(f"FLOPs per sample (a multiplication and an addition are 2): forward {flops:,}, "
          f"forward and backward {both:,}")
    patches = model.image_encoder.grid**2
    chance_loss = model.chance_loss(args.batch, batch.get("mask"), patches)
    record = {"params": params, "flops_per_sample": flops, "chance_loss": chance_loss}
    record |= update_cost(args, method, model)
    if record["update_peak_bytes"]:
        memory = record["update_peak_bytes"] / 2**20
        print(f"one update of --batch {args.batch} on one of --ranks {args.ranks}, fp32, captions of "
              f"full length: {record['update_flops']:,} FLOPs, peak memory {memory:,.0f} MiB")
    print(json.dumps(record))


def count(module):
    return sum(p.numel() for p in module.parameters())


def fake_batch(args, method, model, n):
    """n random images with captions of full length, or n random images of each view."""
    views, size = method.views(args), args.image_size
    if views:
        return {"views": [torch.randn(n, 3, view["size"], view["size"]) for view in views]}
    text = model.text_encoder
    return {
        "images": torch.randn(n, 3, size, size),
        "tokens": torch.randint(text.vocab_size, (n, text.context)),
        "mask": torch.ones(n, text.context, dtype=torch.bool),
    }


def update_cost(args, method, model):
    """FLOPs and peak bytes of one update on one of --ranks ranks, optimizer's state included, from
    fake tensors: nothing is computed."""
    if args.batch % args.ranks:
        raise UserError(f"--batch {args.batch} must be a multiple of the {args.ranks} of --ranks.")

    def gather(x):  # whole numbers are lengths of captions, which are the same on all ranks
        if args.ranks == 1 or not x.is_floating_point():
            return x
        return x.repeat(args.ranks, *[1] * (x.ndim - 1))

    model.zero_grad(set_to_none=True)
    checkpoint_blocks(model, args.grad_checkpoint)
    fake = fake_tensor.FakeTensorMode()
    with fake_tensor.FakeCopyMode(fake):
        model = copy.deepcopy(model)
    try:
        with fake:
            batch = fake_batch(args, method, model, args.batch // args.ranks)
            tensors = [*model.parameters(), *tree_leaves(batch)]
            with FlopCounterMode(display=False) as counter, LiveMemory(tensors) as memory:
                model(batch, gather)["loss"].backward()
    except (fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException):
        reason = f"what {args.method} computes depends on the values: measure it with --bench"
        return {"update_flops": None, "update_peak_bytes": None, "memory_unknown": reason}
    except ValueError as error:  # a loss that needs a larger batch
        raise UserError(f"--batch {args.batch}: {error}") from None
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    moments = MOMENTS[args.optimizer] * trained
    return {"update_flops": counter.get_total_flops(), "update_peak_bytes": memory.peak + moments}


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all living tensors, real or fake: `peak` is what an allocator must hold."""

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
    """The rates of --bench, beside that of a large matrix product here and now; the last line is
    JSON."""
    synchronize(device)
    rates, steps = clock.rates(), clock.steps
    seconds, memory = args.batch / rates["images_per_s"], peak_memory(device)
    with FlopCounterMode(display=False) as counter, autocast():
        model(batch)["loss"].backward()
        product = torch.randn(8, 8, device=device) @ torch.randn(8, 8, device=device)
    flops, matmul = counter.get_total_flops(), matmul_rate(device, product.dtype)
    if this_rank()[0] > 0:
        return
    result = {
        "images_per_s": rates["images_per_s"],
        "seconds_per_step": seconds,
        "flops_per_step_per_rank": flops,
        "flops_per_s": flops / seconds,
        "matmul_flops_per_s": matmul,
        "share_of_matmul": flops / seconds / matmul,
        "data_share": rates["data_share"],
        "peak_memory_bytes": memory,
        "steps": steps,
    }
    for name, value in result.items():
        print(f"  {name:24} {value:,.3f}")
    print(json.dumps(result))


def matmul_rate(device, dtype):
    """FLOP/s of a large matrix product here and now: the yardstick of --bench."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = math.inf
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        a @ b
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device):
    """Peak memory in bytes: what CUDA allocated, or on the CPU the process's peak resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
