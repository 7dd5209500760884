"""Train a method: `python train.py --method sparc`, on 8 GPUs
`torchrun --nproc_per_node=8 train.py --method sparc`. To read how it works, begin at train().

Settings are the defaults of two dataclasses, Config below and the method's, then the values of its
--preset, then the flags. The run's directory gets config.json, vocab.txt, log.jsonl, last.pt,
eval.json and pictures. A map of the sections:

    Config                  every setting, its default, its help
    Training                train(): build, resume, loop
    Command line            flags from dataclasses; what is refused
    The run's directory     who may write there; what it holds
    Data, model, optimizer  what train() builds
    What moves              Progress, checkpoints, signals, the clock
    Log, evaluation, cost   what happens once in a while; --dry-run

To add a setting, add a field with a comment to Config; an optimizer, a row of OPTIMIZERS.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import inspect
import json
import math
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal, get_args, get_origin

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import common
import eval as evaluation
from common import UserError
from eval import METHODS


@dataclasses.dataclass
class Config:
    """Settings of a run, whatever the method. Batch sizes are global, over all ranks."""

    preset: str = "tiny"  # a row of the method's PRESETS, whose values replace the defaults here
    data: str = "shapes"  # SPEC, what to train on; its forms stand at the end of this help
    image_root: str | None = None  # directory that the file names of a table are relative to
    eval_data: str | None = None  # SPEC; None: --data, the test split if it has one
    vocab: str | None = None  # BERT's vocab.txt or CLIP's bpe_...txt.gz; None: from the captions
    vocab_size: int = 8192  # of a vocabulary trained from the captions, at most
    out: str | None = None  # directory of the run; None: runs/METHOD, runs/METHOD-2, ...
    image_encoder: str = "ViT-B/16"  # row of common.VIT_PRESETS[:setting=value,...], or ResNet-50
    text_encoder: str = "12x512"  # row of common.TEXT_PRESETS[:setting=value,...]
    image_size: int | None = None  # pixels; None: the encoder's, or the world's
    finetune: str | None = None  # RUN whose image encoder is fine-tuned, by --method classifier
    # file of a whole CLIP's weights or, for methods without captions, of a ViT's under timm's names
    init_weights: str | None = None
    crop_scale: float = 0.9  # smallest area of training crops (OpenCLIP's)
    steps: int = 1000  # updates
    epochs: int | None = None  # instead of --steps: how often each image of files is shown
    batch: int = 128  # pairs per step, over all ranks
    lr: float = 5e-4  # peak; linear warm-up from lr / warmup, then --schedule to 0
    warmup: int = 100  # steps, of each stage if there are several
    schedule: Literal["cosine", "linear"] = "cosine"  # of the learning rate after the warm-up
    optimizer: Literal["adamw", "lamb", "lars", "sgd"] = "adamw"  # lamb: of STAIR; lars: of BAM
    weight_decay: float = 0.1  # on the weights of linear and convolution layers only
    weight_decay_end: float | None = None  # where half a cosine takes it; None: it stays
    beta2: float = 0.98  # AdamW's, LAMB's; beta1 is 0.9 (CLIP, Table 18)
    adam_eps: float = 1e-6  # CLIP, Table 18
    clip_grad: float = 1.0  # largest norm of the gradient; 0: no clipping
    amp: Literal["bf16", "fp16", "off"] | None = None  # None: bf16 on a GPU, off on the CPU
    workers: int = 0  # data loading processes per rank
    seed: int = 0  # of weights, data and augmentation
    log_every: int = 10  # steps
    save_every: int = 1000  # steps
    keep_every: int = 0  # steps between checkpoints that stay, as step-N.pt; 0: none
    # steps between evaluations of 1,000 images in the log, by k-NN without captions; 0: none
    eval_every: int = 0
    probe: Literal["adamw", "sgd"] = "adamw"  # eval.py's linear probe: SPARO's or BAM's
    probe_epochs: int | None = None  # of the linear probe; None: its paper's, 10 or 100
    # continue the run in --out with its settings; given flags replace them; auto: or begin it
    resume: bool = False
    compile: bool = False  # torch.compile of each block of a ViT and of the text tower, or a ResNet
    grad_checkpoint: bool = False  # recompute a ViT's blocks in the backward pass: less memory
    accum_freq: int = 1  # parts of a rank's rows that the towers take one after the other
    dry_run: bool = False  # print parameters, FLOPs and the loss at chance, and stop
    bench: int = 0  # time this many steps, print the rates, and stop


BENCH_WARMUP = 3  # steps before --bench starts the clock


# Training -----------------------------------------
#
# One function, from the data to the last evaluation. All that it calls stands below it.


def train(args, out, device):
    """-> the signal that stopped it, if any. out: the run's directory; None: write nothing."""
    rank, world_size = this_rank()
    method, patience = METHODS[args.method], common.patient_group()

    # Build: what can be wrong is found here, not after an hour.
    data = open_training_data(args, method)
    tokenizer = build_tokenizer(args, data) if method.uses_text(args) else None
    model = new_model(args, method, tokenizer)
    options, eval_data = evaluation.options_of({}, args), None
    if rank == 0 and opens_early(args, model):
        eval_data = open_evaluation(args, model, options)
    transform = build_transform(args, method, model.image_encoder)
    if args.dry_run:
        return dry_run(args, method, model)
    model.to(device)
    embedder = evaluation.new_embedder(model, tokenizer, args, device)
    torch.manual_seed(args.seed + rank)  # stochastic depth differs between ranks
    autocast, scaler, is_half = mixed_precision(args, device)

    # Resume: `progress` is all that moves, beside weights, optimizer and loss scale.
    progress, saved = Progress(data.fingerprint, tokenizer and tokenizer.hash()), None
    if args.resume:
        saved = load_state(args, model, scaler, progress, device)
    if out:
        announce(args, data, model, tokenizer, device)
        write_run(args, tokenizer, out)
    log, stop, clock, batches = Log(args, out, progress.step), Stop(), Clock(), None

    end = 0
    for number, steps, lr in method.stages(args):  # STAIR has three, the others one
        start, end = end, end + steps
        if progress.step >= end:
            continue
        model.begin_stage(number, fresh=progress.step == start)
        progress.stage = number
        if steps < args.steps:
            log.bar.set_description(f"{args.method}, stage {number}")
        optimizer = build_optimizer(args, model, saved if progress.step > start else None)
        saved = parallel = None  # they would stay in memory, DDP's buckets as gradients
        parallel = wrap(args, model, world_size)
        model.train()

        while progress.step < end:
            if progress.step in method.box_refreshes(args):  # BAM: crops are where [CLS] looks
                batches = None  # ends its workers
                progress.boxes = find_boxes(args, data, model, device, autocast)
            if batches is None:
                batches = open_loader(args, data, transform, tokenizer, model, progress)
                clock.reset()
            batch = to_device(clock.wait_for(batches), device)

            # One update. The learning rate is a function of the step in its stage.
            step = progress.step - start
            set_schedules(optimizer, args, step, steps, lr)
            batch = common.distort(batch)

            # The forward pass: the towers in half precision, the loss over the global batch. Losses
            # stay in fp32 under autocast; TF32 in their products errs far less than bf16 towers.
            torch.backends.cuda.matmul.allow_tf32 = is_half
            with autocast():
                outputs = parallel(batch, common.gather)  # {"loss": scalar, others to log}

            # The backward pass; fp16 scales the loss, as its small gradients would be 0.
            scaler.scale(outputs["loss"]).backward()
            torch.backends.cuda.matmul.allow_tf32 = False
            model.before_update(step)

            # Clip the true gradient: unscale it first. The scaler skips an update that overflowed.
            scaler.unscale_(optimizer)
            grad_norm = clip_grad_norm_(model.parameters(), args.clip_grad or math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)  # None takes no memory

            # The method's own moves: a teacher follows its student, a temperature stays in bounds.
            model.after_update(step, steps)
            progress.advance(batch)
            log.bar.update()

            # Once in a while: log, evaluate, save, stop. What is due is the same on every rank.
            keep_due, evaluate_due = progress.due(args.keep_every), progress.due(args.eval_every)
            save_due = progress.due(args.save_every) or keep_due or progress.step == end
            log_due = progress.due(args.log_every) or evaluate_due or progress.step == args.steps
            # A GPU waits while ranks ask each other whether a signal came: they do it rarely.
            ask_due = save_due or progress.due(min(10, args.log_every)) or not dist.is_initialized()
            stopping = ask_due and stop.agreed(device)
            if args.bench:
                if progress.step == BENCH_WARMUP:
                    clock.reset()
                is_over = progress.step == BENCH_WARMUP + args.bench
                if is_over:
                    print_once(json.dumps(clock.rates(args.batch)))
                if stopping or is_over:
                    return stopping
                continue
            if stopping or log_due or save_due:
                check_finite(args, progress.step, outputs["loss"], grad_norm)
            if stopping or save_due:  # before an evaluation, which may outlast torchrun's patience
                names = ["last.pt"]
                if progress.step == end and end < args.steps:
                    names.append(f"stage-{number}.pt")
                if keep_due:
                    names.append(f"step-{progress.step}.pt")
                save(names, args, model, optimizer, scaler, progress)
            if log_due and rank == 0:
                record = {"step": progress.step, "lr": optimizer.param_groups[0]["lr"]}
                record |= measure(args, model, batch, autocast, outputs, grad_norm)
                record |= clock.rates(args.batch) | progress.skipped_counts()
                if evaluate_due and not stopping:
                    record |= evaluate_unnoticed(embedder, eval_data, options)
                log.write(record, model.warn(record))
                model.train()
            if log_due:
                clock.reset()
            if stopping:
                log.bar.close()
                print_once(f"Stopped by signal after step {progress.step}: start the same command "
                           f"again with --resume --out {shlex.quote(args.out)}")
                return stopping
    log.bar.close()
    stop.restore()  # a signal ends the evaluation at once
    finish(args, embedder, eval_data, options, progress)
    if patience:
        dist.barrier(patience)  # all leave together, after rank 0's evaluation


# Command line -----------------------------------------
#
# A flag for each field of Config and of the method's Config; the comment of a field is its help.


class Parser(argparse.ArgumentParser):
    def error(self, message):
        let_rank_0_speak()
        super().error(message)


def let_rank_0_speak():
    """Ranks of a machine often fail alike: all but the first wait, until torchrun ends them."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Stop would only note it
        time.sleep(10)


@functools.cache  # the source of a class is searched for in its file
def comments_of(config_class):
    """{field: the comment behind a field of a dataclass, or the one in the line above it}."""
    pattern = r"^(?:    # (.*)\n)?    (\w+): [^#\n]*(?:# (.*))?$"
    found = re.findall(pattern, inspect.getsource(config_class), re.MULTILINE)
    return {name: behind or above for above, name, behind in found}


def flag_of(name):
    return "--" + name.replace("_", "-")


def add_flags(parser, config_class, title):
    """A flag for each field of a dataclass, with its comment as help."""
    group, comments = parser.add_argument_group(title), comments_of(config_class)
    for field in dataclasses.fields(config_class):
        kind = field.type
        if type(None) in get_args(kind):  # kind | None
            kind = get_args(kind)[0]
        if get_origin(kind) is Literal:
            options = {"choices": get_args(kind)}
        elif field.name == "resume":  # alone, or --resume auto
            options = {"nargs": "?", "const": True, "choices": ["auto"]}
        elif kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif kind is list:
            read = functools.partial(common.read_lines, flag=flag_of(field.name))
            options = {"type": read, "metavar": "FILE"}
        else:
            options = {"type": kind, "metavar": kind.__name__.upper()}
        options["help"] = comments[field.name].replace("%", "%%") + " (default: %(default)s)"
        group.add_argument(flag_of(field.name), **options)
    parser.set_defaults(**vars(config_class()))


def parse_args(argv):
    """Command line -> the run's settings."""
    usage = "train.py --method NAME [--FLAG VALUE ...]; --method NAME --help lists the flags"
    parser = Parser(usage=usage, description=__doc__, allow_abbrev=False, add_help=False,
                    epilog=f"A SPEC is one of: {common.spec_forms()}.")
    parser.add_argument("--method", choices=METHODS, help="has flags of its own")
    add_flags(parser, Config, "settings of a run")
    first, _ = parser.parse_known_args(argv)  # without the method's flags
    for name, value in vars(first).items():
        if value == "":  # a shell's variable that is not set
            raise UserError(f"{flag_of(name)} is empty: give a value, or leave it out.")
    if first.resume and not first.out:
        raise UserError("--resume needs --out, the directory of the run to continue.")
    if first.resume == "auto":
        first.resume = os.path.exists(f"{first.out}/last.pt")
    defaults = default_settings(first)
    method = first.method or defaults.get("method")
    if method:
        add_flags(parser, METHODS[method].Config, f"settings of {method}")
    parser.set_defaults(**defaults)
    parser.add_argument("-h", "--help", action="help", help="show this and stop")
    args = parser.parse_args(argv)
    if not method:
        parser.error("the following arguments are required: --method")
    args.resume = first.resume
    check_settings(args, METHODS[method], vars(parser.parse_args([])), argv)
    return args


def default_settings(args):
    """What replaces the defaults of the dataclasses: the settings of the run that --resume
    continues, or a preset."""
    if args.resume:
        return common.read_config(args.out)
    method = args.method or ("classifier" if args.finetune is not None else None)
    if method is None:
        return {}
    presets = METHODS[method].PRESETS
    if args.preset not in presets:
        raise UserError(f"{method} has no preset {args.preset!r}; it has {', '.join(presets)}.")
    encoder = encoder_of(args.finetune) if args.finetune is not None else {}
    return {"method": method} | presets[args.preset] | encoder


def encoder_of(run):
    """The settings of a run that say what its image encoder is."""
    method, args = evaluation.settings_of_run(run)
    encoder = args.image_encoder
    kind, settings = common.image_encoder_settings(encoder)
    if kind is common.ViT and method.blocks_left_out(args):  # SPARO's read-out is left behind
        depth = settings["depth"] - method.blocks_left_out(args)
        encoder += f"{',' if ':' in encoder else ':'}depth={depth}"
    return {"image_encoder": encoder, "image_size": args.image_size}


# Every number is finite and not negative. Of these fields more is asked.
POSITIVE = set("""vocab_size image_size crop_scale steps epochs batch log_every save_every
    probe_epochs accum_freq embed_dim init_scale filip_keep mgca_prototypes L V D grp_size
    bottleneck codes out_dim head_width head_bottleneck student_temp teacher_temp local_size
    crop_least crop_border tau tau_b sinkhorn_iters projector_width projector_dim crop_every
    crop_alpha""".split())
BELOW_ONE = {"beta2", "smoothing", "drop_path"}
AT_MOST_ONE = {"crop_scale", "sigma", "filip_keep", "center_momentum", "ema", "crop_least",
               "crop_border", "crop_threshold", "share_1", "share_2", "ramp", "erasing"}
# flags that have no effect without captions
TEXT_FLAGS = {"vocab", "vocab_size", "text_encoder", "crop_scale"}
# what a run that is resumed keeps
FIXED = {"method", "preset", "vocab", "vocab_size", "optimizer", "finetune", "init_weights"}


def check_settings(args, method, defaults, argv):
    """Raise UserError for flags that do not fit. defaults: the settings without any flag, of which
    none is refused."""
    for name, default in defaults.items():
        flag, value = flag_of(name), vars(args)[name]
        if value == default:
            continue
        if args.resume and name in FIXED:
            raise UserError(f"{args.out} is a run of {flag} {default}: leave out {flag} {value}, "
                            f"or give another --out.")
        has_effect = method.uses_text(args) or (name == "crop_scale" and method.augment(args))
        if name in TEXT_FLAGS and not has_effect:
            raise UserError(f"{flag} has no effect here: the objective takes no captions.")
        if isinstance(value, (int, float)):
            check_number(name, value)
    named = {word.partition("=")[0] for word in argv}
    if {"--epochs", "--steps"} <= named:
        raise UserError("--epochs and --steps both say how long to train: give one of them.")
    if "--steps" in named:
        args.epochs = None  # of a run that is resumed
    if method.uses_text(args) and args.batch < 2:
        raise UserError(f"--batch {args.batch} must be 2 or more: the loss compares captions.")
    if args.finetune and (args.init_weights or args.method != "classifier"):
        raise UserError("--finetune trains a classifier from the weights of a run: leave out "
                        "--method and --init-weights.")
    if args.bench and args.resume:
        raise UserError("--bench times a new run: leave out --resume.")
    if args.bench:
        args.steps, args.epochs = max(args.steps, BENCH_WARMUP + args.bench), None


def check_number(name, value):
    rules = [(POSITIVE, value > 0, "positive"), (BELOW_ONE, value < 1, "below 1"),
             (AT_MOST_ONE, value <= 1, "at most 1"), ({"seed"}, value < 2**63, "below 2^63")]
    if not math.isfinite(value) or value < 0:
        raise UserError(f"{flag_of(name)} {value} must be finite and not negative.")
    for names, holds, wanted in rules:
        if name in names and not holds:
            raise UserError(f"{flag_of(name)} {value} must be {wanted}.")


# The run's directory -----------------------------------------
#
# One process writes there, under a lock; what an earlier run left is never overwritten.


def choose_run(args):
    """The run's directory, the same on every rank; an old run is never overwritten."""
    if not args.out:
        args.out, i = f"runs/{args.method}", 2
        while Path(args.out).exists():
            args.out, i = f"runs/{args.method}-{i}", i + 1
        args.out = common.gather_objects(args.out)[0]
    if len(set(common.gather_objects(bool(args.resume)))) > 1:
        raise UserError(f"Only some ranks find {args.out}/last.pt to resume: --out must be a "
                        f"directory that all machines share.")
    out, is_run = Path(args.out), False
    with contextlib.suppress(UserError):  # a run that was killed before it saved begins anew
        is_run = "argv" in common.read_config(out)
    names = ["*.pt", "eval.json"]  # of a run that saved or ended
    if not is_run:  # then these are the user's own
        names += ["config.json", "vocab.txt", "log.jsonl"]
    with common.writing(out):  # its name may be too long
        replaced = [path.name for name in names for path in out.glob(name)]
    if replaced and not args.resume:
        raise UserError(f"{out} has a {replaced[0]} already: continue its run with --resume, or "
                        f"give another --out.")
    return out


@contextlib.contextmanager
def claim_run(args):
    """The run's directory, or None if this process writes nothing. It alone writes there, from
    before it reads anything. A new directory is removed if the run fails before its first step is
    logged or saved."""
    out = None if args.dry_run or args.bench else choose_run(args)
    if out is None or this_rank()[0] > 0:
        yield None
        return
    is_new = not out.exists()
    with lock_run(out):
        try:
            yield out
        finally:
            log, of_a_start = out / "log.jsonl", {"lock", "config.json", "vocab.txt", "log.jsonl"}
            nothing_logged = not log.exists() or log.stat().st_size == 0
            if is_new and out.exists() and nothing_logged and of_a_start >= {*os.listdir(out)}:
                shutil.rmtree(out)


def lock_run(out):
    """Make the run's directory and lock it -> a file; the kernel frees the lock when it is closed
    or the process ends, however that is. A process that it forks does not hold the lock."""
    with common.writing(out):
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / "lock", "a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{out} is in use by another run: wait for it or stop it, or give another "
                        f"--out.") from None
    except OSError:
        pass  # this file system has no locks
    return file


def write_run(args, tokenizer, out):
    """Write what eval.py and --resume need to build the model again."""
    git = subprocess.run("git rev-parse HEAD", shell=True, cwd=Path(__file__).parent,
                         capture_output=True, text=True)  # a shell: there may be no git
    record = {"argv": sys.argv} | vars(args)  # a run that is resumed keeps its own argv
    record["git"] = git.stdout.strip() or None
    with common.replacing(out / "config.json") as file:
        file.write(json.dumps(record, indent=2).encode() + b"\n")
    if tokenizer and not args.resume:
        tokenizer.save(out / "vocab.txt")


def announce(args, data, model, tokenizer, device):
    """Print what begins. Raises UserError if the vocabulary does not serve the captions."""
    params = sum(p.numel() for p in model.parameters())
    facts = [f"{device}, {this_rank()[1]} ranks, {torch.get_num_threads()} threads",
             f"{params / 1e6:.1f} M parameters"]
    if isinstance(data, common.CaptionTable):
        facts.append(f"{len(data):,} images, {len(data) / args.batch:.1f} steps per epoch")
    if tokenizer:
        facts.append(f"{check_vocabulary(args, data, tokenizer):.1%} of the captions' tokens are "
                     f"[UNK]")
    if args.resume:
        old = common.read_config(args.out)
        changed = [name for name, value in vars(args).items()
                   if name not in ("resume", "out") and value != old.get(name, value)]
        facts += [f"{flag_of(name)} was {old[name]}" for name in changed]
    print(f"{args.out}: {', '.join(facts)}")
    if "OMP_NUM_THREADS" not in os.environ and os.getloadavg()[0] > os.cpu_count():
        print("note: other jobs share these cores, and threads that wait for each other are slow: "
              "set OMP_NUM_THREADS=1")
    if device.type == "cuda" and args.workers == 0 and not isinstance(data, common.World):
        print("note: with --workers 0 the GPU waits while this process decodes images")
    if isinstance(data, common.CaptionTable) and len(data) < args.batch:
        print(f"note: a batch of {args.batch} holds each of the {len(data)} images several times, "
              f"as if they were different ones: lower --batch")
    for _, steps, _ in METHODS[args.method].stages(args):
        if 0 < steps < args.warmup:
            print(f"note: in {steps} steps the learning rate does not reach its peak: --warmup is "
                  f"{args.warmup}")


def check_vocabulary(args, data, tokenizer):
    """Raise UserError if the text encoder is for more tokens, or captions lack most of theirs; the
    share that they lack."""
    asked = common.asked_words(args.text_encoder)
    if asked > len(tokenizer) and not args.vocab:
        raise UserError(f"--text-encoder {args.text_encoder} is for {asked} tokens, a vocabulary "
                        f"trained from these captions has {len(tokenizer)}: give --vocab FILE of "
                        f"{asked} tokens, or another --text-encoder.")
    ids = [i for caption in data.sample_captions(1000) for i in tokenizer.encode(caption)[1:-1]]
    unknown = ids.count(tokenizer.unk) / max(1, len(ids))
    if unknown > 0.5:
        raise UserError(f"{unknown:.0%} of the captions' tokens are [UNK], words that the "
                        f"vocabulary lacks: give another --vocab, or none.")
    return unknown


class Log:
    """log.jsonl and the progress bar of rank 0; each warning is printed once."""

    def __init__(self, args, out, step):
        self.warned = set()
        self.bar = tqdm(total=args.steps, initial=step, desc=args.method, unit="step",
                        mininterval=1, disable=out is None)
        if out:
            self.path = out / "log.jsonl"
            self.cut(step)

    def cut(self, step):
        """Leave the lines up to the step; a killed run may have written half of the last."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        kept = []
        for number, line in enumerate(lines, 1):
            what = f"Line {number} of {self.path} is damaged, delete it"
            with common.explained((ValueError, TypeError, KeyError), what):
                if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                    kept.append(line)
        with common.replacing(self.path) as file:
            file.writelines(kept)

    def write(self, record, warning):
        if warning and warning not in self.warned:
            self.bar.write(f"warning at step {record['step']}: {warning}")
            self.warned.add(warning)
        # JSON has no NaN: a gradient that overflowed in fp16 is null
        plain = {name: x if not isinstance(x, float) or math.isfinite(x) else None
                 for name, x in record.items()}
        with common.writing(self.path), open(self.path, "a") as file:
            file.write(json.dumps(plain, allow_nan=False) + "\n")
        self.bar.set_postfix(loss=record["loss"], images_per_s=record["images_per_s"])


def print_once(line):
    if this_rank()[0] == 0:
        print(line)


# Data, model, optimizer -----------------------------------------
#
# Each rank builds the same model from --seed, and reads a part of the data of its own.


def open_training_data(args, method):
    """-> the data to train on. Sets args.image_size, the world's or else the encoder's if none is
    given, and with --epochs args.steps."""
    _, world_size = this_rank()
    if args.batch % world_size:
        raise UserError(f"--batch {args.batch} is global and must be a multiple of the "
                        f"{world_size} ranks.")
    encoder = common.image_encoder_settings(args.image_encoder)[1]
    args.image_size = args.image_size or encoder["image_size"]
    content = method.content(args)
    data = common.open_data(args.data, args.image_root, "train", args.image_size, content)
    if content == "label":
        data = choose_labels(args, data)
    is_table = isinstance(data, common.CaptionTable)
    if isinstance(data, common.World):
        args.image_size = data.size
    if args.epochs:
        if not is_table:
            raise UserError(f"--epochs {args.epochs}: how many images {args.data} has is not "
                            f"known; give --steps, which is epochs x images / --batch.")
        args.steps = math.ceil(args.epochs * len(data) / args.batch)
    with common.explained(ValueError, f"--method {args.method}"):
        method.check(args)
    if method.box_refreshes(args) and not (is_table or args.dry_run):
        raise UserError(f"--contrastive-crop finds boxes for the images of class folders or of a "
                        f"table, not of {args.data}: unpack shards, or give --no-contrastive-crop.")
    return data


def choose_labels(args, data):
    """The labelled data, or what --label-fraction leaves. Sets args.classes to the names."""
    given = args.classes  # of a run that is resumed, its own
    args.classes = list(data.classes or given or ())
    if not args.classes or given not in (None, args.classes):
        names = ", ".join(args.classes) or "not named"
        raise UserError(f"The classes of {args.data} are {names}: give --classes FILE of their "
                        f"names, one a line, that of label 0 first, or other data.")
    if args.label_fraction is None:
        return data
    if not isinstance(data, common.CaptionTable):
        raise UserError(f"--label-fraction takes images of class folders, not of {args.data}.")
    paths = [data.path(i) for i in range(len(data))]
    return data.only(common.label_rows(paths, data.labels, args.label_fraction))


def by_knn(model):
    """Whether k-NN evaluates a model: it has neither a text tower nor classes."""
    return model.encode_text is None and model.class_scores is None


def opens_early(args, model):
    """Whether data to evaluate are opened before the training, where their errors cost no time.
    Else, after it: they are what is trained on, and a table would be read and held twice."""
    return bool(args.eval_data or args.eval_every or by_knn(model))


def open_evaluation(args, model, options):
    """-> data of the run's own evaluation, None where none is possible; that is an error only with
    --eval-data or --eval-every."""
    with_text = model.encode_text is not None
    remedy = "" if with_text else " In training, --data is learned from and --eval-data tests"
    try:
        with common.explained(UserError, "No evaluation", remedy):
            data = evaluation.open_eval_set(options, args.image_size, with_text)
            tasks = evaluation.tasks_to_run(options, data, model)
            evaluation.check_data(tasks, options, data, model)
            pairs = data.labelled or data.captioned
            if pairs and not data.is_world:
                next(evaluation.read_images(pairs("first"), common.open_image))
        return data
    except UserError as error:
        if args.eval_data or args.eval_every:
            raise
        print(f"note: {error}")
        return None


def build_tokenizer(args, data):
    """The run's saved vocabulary, the user's, or one trained from at most 100,000 captions."""
    if args.resume or args.vocab:
        return common.open_tokenizer(Path(args.out, "vocab.txt") if args.resume else args.vocab)
    return common.WordPiece(
        common.train_wordpiece(data.sample_captions(100_000), args.vocab_size))


def new_model(args, method, tokenizer):
    """The model, the same on every rank."""
    torch.manual_seed(args.seed)
    towers, parts = build_towers(args, method, tokenizer)
    model = common.build_model(method, args, *towers)
    if parts is not None:
        with common.explained(UserError, f"--init-weights {args.init_weights}"):
            common.load_clip_parts(model, parts)
    save_memory(args, model)
    return model


def build_towers(args, method, tokenizer):
    """-> image and text encoder, with the weights that --finetune or --init-weights names; what
    such a file holds beside the towers, for load_clip_parts, or None."""
    towers, parts = common.build_encoders(method, args, tokenizer), None
    if args.resume or args.dry_run:  # the weights come from the checkpoint, or do not matter
        return towers, parts
    if args.finetune:
        with torch.random.fork_rng(devices=[]):  # to build the other model draws numbers, too
            source = evaluation.load_run(args.finetune)[0].model
        common.copy_tower(towers[0], source.evaluation_encoder(), args.finetune)
    if args.init_weights:
        with common.explained(UserError, f"--init-weights {args.init_weights}"):
            weights = common.load_checkpoint(args.init_weights)
            if "ranks" in weights:
                raise UserError("it is a checkpoint of a run here: `eval.py RUN --export FILE` "
                                "writes the weights of its image encoder for BAM and DINO.")
            if method.uses_text(args):
                parts = common.load_clip(towers, weights, tokenizer)
            else:
                common.load_timm(towers[0], weights)
    return towers, parts


def save_memory(args, model):
    """Set what --grad-checkpoint and --accum-freq ask for, in all towers, a teacher's, too."""
    if args.grad_checkpoint and isinstance(model.image_encoder, common.ResNet):
        raise UserError(f"--grad-checkpoint recomputes the blocks of a ViT, {args.image_encoder} "
                        f"has none: leave it out, or lower --batch.")
    for module in model.modules():
        if isinstance(module, common.Blocks):
            module.grad_checkpoint = args.grad_checkpoint
        if isinstance(module, common.Tower):
            module.accum_freq = args.accum_freq
        if isinstance(module, common.BatchNorm) and args.accum_freq > 1:
            raise UserError(f"--accum-freq {args.accum_freq} computes parts of a batch, the "
                            f"BatchNorm of {args.image_encoder} needs all of it: choose a ViT "
                            f"without a stem (in the embedded world, tiny-patch).")


def build_transform(args, method, encoder):
    """What makes a training image of a file; views of the world's images too."""
    views = method.views(args)
    if settings := method.augment(args):
        return common.Augment(args.image_size, **settings)
    if views is None:
        return common.train_transform(args.image_size, args.crop_scale)
    patch = encoder.image_size // encoder.grid
    for view in views:
        if view["size"] % patch or view["size"] > args.image_size:
            raise UserError(f"--local-size: a view of {view['size']} pixels is not a multiple of "
                            f"the {patch} of a patch, or above the {args.image_size} of a large "
                            f"view.")
    return common.Views([common.View(**view) for view in views], args.image_size)


def open_loader(args, data, transform, tokenizer, model, progress):
    """This rank's batches, from the positions of `progress` on."""
    rank, world_size = this_rank()
    context = model.text_encoder.context if tokenizer else None
    kind = common.Stream
    if isinstance(data, common.World):
        kind = common.WorldStream
        transform = None if tokenizer else transform  # its captions name what a crop may lose
    # large JPEGs are decoded smaller, with pixels enough for the smallest crop
    min_side = math.ceil(args.image_size * max(1.5, args.crop_scale ** -0.5))
    stream = kind(data, tokenizer, transform, min_side=min_side, context=context,
                  batch_size=args.batch // world_size, seed=args.seed + progress.order, rank=rank,
                  world_size=world_size, positions=dict(progress.positions), boxes=progress.boxes)
    return read_in_workers(stream, args.workers)


PATIENCE, LOOK = 1800, 10  # seconds: a batch is awaited so long, workers are looked at so often


def read_in_workers(dataset, workers):
    """The batches of an IterableDataset, read by so many processes."""
    batches = iter(torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=workers, worker_init_fn=ignore_signals,
        pin_memory=torch.cuda.is_available(), timeout=LOOK if workers else 0,
        # forked workers share the table's memory; Python 3.14 would start them otherwise
        multiprocessing_context="fork" if workers else None,
        generator=torch.Generator()))  # else it draws from the training's numbers
    waited = 0
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            # a worker whose batch does not fit into /dev/shm would be awaited for ever
            waited += LOOK
            if waited >= PATIENCE or not str(error).startswith("DataLoader timed out"):
                raise
            continue
        waited = 0
        yield batch


def ignore_signals(worker):
    """torchrun and Slurm signal all processes: workers must live until the run has saved."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@torch.no_grad()
def find_boxes(args, data, model, device, autocast):
    """Where crops of each image are to lie (BAM, App. G); each rank looks at a part of the data."""
    model.eval()
    images = common.EachImage(data, args.image_size, 256, *this_rank())
    rows, boxes = [], []
    for numbers, x in read_in_workers(images, args.workers):
        rows += numbers
        with autocast():
            boxes += model.boxes(x.to(device)).tolist()
    model.train()
    found = torch.full((len(data), 4), math.nan)  # stays so for images that cannot be read
    for rows, boxes in common.gather_objects((rows, torch.tensor(boxes).view(-1, 4))):
        found[rows] = boxes
    return found


def sgd(groups, betas=(0.9, 0), eps=0):
    return torch.optim.SGD(groups, momentum=betas[0], nesterov=True)  # as timm's, so DeiT's "sgd"


OPTIMIZERS = {"adamw": functools.partial(torch.optim.AdamW, fused=True), "sgd": sgd,
              "lamb": METHODS["stair"].LAMB, "lars": METHODS["bam"].LARS}


def build_optimizer(args, model, saved):
    """A new optimizer, or one that goes on from a checkpoint, if it is not None."""
    groups = common.param_groups(model, args.weight_decay)
    optimizer = OPTIMIZERS[args.optimizer](groups, betas=(0.9, args.beta2), eps=args.adam_eps)
    if saved:
        settings = optimizer.param_groups  # of this command line, not those of the saved run
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups = settings
    return optimizer


def set_schedules(optimizer, args, step, steps, lr):
    """Learning rate and weight decay of a step of the stage, which has `steps` and the peak lr."""
    schedule = {"cosine": common.cosine_lr, "linear": common.linear_lr}[args.schedule]
    for group in optimizer.param_groups:
        group["lr"] = schedule(step, steps, args.warmup, lr)
        if args.weight_decay_end is not None and group["decays"]:
            decay = common.cosine(step, steps, args.weight_decay, args.weight_decay_end)
            group["weight_decay"] = decay


def wrap(args, model, world_size):
    """The model compiled and parallel, as the settings ask."""
    if args.compile:
        # DDP's buckets would split graphs, which those of recomputed blocks do not survive
        torch._dynamo.config.optimize_ddp = False
        torch._dynamo.config.cache_size_limit = 128  # a graph for each block's stochastic depth
        for module in model.modules():
            if isinstance(module, (common.Block, common.ResNet)):
                module.compile()
    if world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        model.broadcast_buffers = False  # statistics are of the global batch, alike on all ranks
    return model


def mixed_precision(args, device):
    """The context of --amp, to be called, the scaler of the loss, and whether --amp is not off."""
    amp = args.amp or ("bf16" if device.type == "cuda" else "off")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}[amp]
    autocast = functools.partial(torch.autocast, device.type, dtype, enabled=amp != "off")
    scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")
    return autocast, scaler, amp != "off"


def this_rank():
    """(rank, world_size)"""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def to_device(batch, device):
    return tree_map_only(torch.Tensor, lambda x: x.to(device, non_blocking=True), batch)


# What moves while training -----------------------------------------
#
# A resumed run goes on bit for bit: what moves is one object, and a checkpoint keeps it.


@dataclasses.dataclass
class Progress:
    """All that moves while training and is saved, beside weights, optimizer and loss scale."""

    data: str = common.World.fingerprint  # of the data that positions are of
    words: int | None = None  # a hash of the vocabulary, if there is one
    step: int = 0
    stage: int = 1  # that the last step was of
    order: int = 0  # added to --seed: in which order the data come
    positions: dict = dataclasses.field(default_factory=dict)  # of the data's workers, see Stream
    skipped: dict = dataclasses.field(default_factory=dict)  # {worker: {reason: [count, example]}}
    boxes: torch.Tensor | None = None  # (n, 4), where crops are to lie (BAM, App. G)

    def due(self, every):
        """Whether this is one of every so many steps; 0: none is."""
        return every > 0 and self.step % every == 0

    def advance(self, batch):
        self.step += 1
        self.positions |= batch["position"]
        self.skipped |= batch["skipped"]

    def skipped_counts(self):
        """{"skipped": {reason: count}} of this rank, or nothing."""
        total = common.total_skipped(self.skipped.values())
        counts = {reason: count for reason, (count, _) in total.items()}
        return {"skipped": counts} if counts else {}

    def state(self, workers):
        """What a checkpoint keeps. Every rank must call it."""
        cuda_rng = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        local = {"rng": torch.get_rng_state(), "cuda_rng": cuda_rng,
                 "positions": self.positions, "skipped": self.skipped}
        return {"step": self.step, "stage": self.stage, "order": self.order, "workers": workers,
                "data": self.data, "words": self.words, "boxes": self.boxes,
                "ranks": common.gather_objects(local)}

    def restore(self, state, workers):
        """Go on from a checkpoint, with this rank's random numbers."""
        rank, world_size = this_rank()
        if state["words"] != self.words:
            raise UserError("vocab.txt has other words than when the run was saved: put back its "
                            "own, or begin the run anew.")
        self.step, self.stage, self.order = state["step"], state["stage"], state["order"]
        if state["boxes"] is not None and state["data"] == self.data:
            self.boxes = state["boxes"].cpu()
        saved = len(state["ranks"]), state["workers"], state["data"]
        if saved != (world_size, workers, self.data):
            self.order += self.step
            return print_once("Other data, ranks, workers or code than before: the data start "
                              "anew, in another order.")
        local = state["ranks"][rank]
        self.positions, self.skipped = local["positions"], local["skipped"]
        torch.set_rng_state(local["rng"].cpu())
        if local["cuda_rng"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(local["cuda_rng"].cpu())


def save(names, args, model, optimizer, scaler, progress):
    """Write a checkpoint under each of the names. Every rank must call it."""
    state = {"method": args.method, "model": model.state_dict(), "scaler": scaler.state_dict(),
             "optimizer": optimizer.state_dict(), **progress.state(args.workers)}
    if this_rank()[0] == 0:
        common.save_checkpoint([Path(args.out, name) for name in names], state)


def load_state(args, model, scaler, progress, device):
    """Restore weights, loss scale and `progress` from last.pt, and return all of it. Raises
    UserError if its last step is not of the same stage with the flags of today."""
    path = Path(args.out, "last.pt")
    state = common.load_checkpoint(path, device)
    remedy = "leave out the flags that change the model; vocab.txt must be that of the run"
    common.restore_model(model, state["model"], path, remedy)
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    progress.restore(state, args.workers)
    stages, end, is_same = METHODS[args.method].stages(args), 0, False
    for number, steps, _ in stages:
        start, end = end, end + steps
        is_same |= number == progress.stage and start < progress.step <= end
    if len(stages) == 1 and progress.step > args.steps:
        raise UserError(f"{args.out} has made {progress.step} steps, more than --steps {args.steps}"
                        f": give as many or more, or leave --steps out.")
    if not is_same:
        raise UserError(f"{args.out} has made {progress.step} steps, the last in stage "
                        f"{progress.stage}; with these flags it is in another stage or in none: "
                        f"leave out --steps {args.steps}, or what else changes the stages.")
    return state


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Notes SIGTERM and SIGINT: the run saves and ends after its step. A second Ctrl-C ends it at
    once, but not on several ranks: there Slurm and torchrun may both send the first."""

    def __init__(self):
        self.noted = 0
        self.before = [signal.signal(number, self.note) for number in SIGNALS]

    def restore(self):
        for number, handler in zip(SIGNALS, self.before):
            signal.signal(number, handler)

    def note(self, number, frame):
        if self.noted and number == signal.SIGINT and not dist.is_initialized():
            raise KeyboardInterrupt
        self.noted = int(number)

    def agreed(self, device):
        """The signal that any rank noted, or 0. Every rank must ask after the same steps."""
        if not dist.is_initialized():
            return self.noted
        noted = torch.tensor(self.noted, device=device)
        dist.all_reduce(noted, dist.ReduceOp.MAX)
        return noted.item()


class Clock:
    """Images per second and the fraction of time that waits for data, since the last reset."""

    def reset(self):
        self.start, self.waits = self.now(), []

    def now(self):
        """This moment. The host runs ahead of a GPU, so it is one between the GPU's tasks."""
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait_for(self, batches):
        before, batch = self.now(), next(batches)
        self.waits.append((before, self.now()))
        return batch

    def seconds(self, before, after):
        if isinstance(before, float):
            return after - before
        after.synchronize()
        return before.elapsed_time(after) / 1000

    def rates(self, batch_size):
        total = self.seconds(self.start, self.now())
        waited = sum(self.seconds(*wait) for wait in self.waits)
        process_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"images_per_s": len(self.waits) * batch_size / total, "data_share": waited / total,
                "peak_memory_bytes": torch.cuda.max_memory_allocated() or process_memory}


def check_finite(args, step, loss, grad_norm):
    """Raise UserError if the loss or the gradient is not finite. Weights that are NaN stay NaN,
    on all ranks, so that it is enough to look once in a while."""
    # fp16's gradient may overflow: the scaler leaves out such an update
    if not torch.isfinite(loss if args.amp == "fp16" else loss + grad_norm):
        raise UserError(f"The loss is {loss.item()}, the gradient's norm is {grad_norm.item()} at "
                        f"step {step}: lower --lr, raise --warmup or change --amp.")


# Log, evaluation, cost -----------------------------------------
#
# What happens once in a while, and may cost time: none of it changes what is trained.


@torch.no_grad()
def measure(args, model, batch, autocast, outputs, grad_norm):
    """The scalars of a step that is logged, with what the method computes only then."""
    model.eval()
    with autocast():
        scalars = outputs | model.diagnose(batch) | {"grad_norm": grad_norm}
    patches = model.image_encoder.grid**2
    chance_loss = model.chance_loss(args.batch, batch.get("mask"), patches)
    return {name: x.item() for name, x in scalars.items()} | {"chance_loss": chance_loss}


def evaluate_unnoticed(embedder, eval_data, options):
    """The metrics of --eval-every, without captions those of k-NN alone, as a probe takes long. The
    training's random numbers go on as without it."""
    if by_knn(embedder.model):
        options = argparse.Namespace(**vars(options) | {"tasks": ["knn"]})
    devices = [embedder.device] if embedder.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        return evaluation.evaluate(embedder, eval_data, options)


def finish(args, embedder, eval_data, options, progress):
    """Print what all workers of all ranks skipped, evaluate, draw."""
    every_rank = common.gather_objects(common.total_skipped(progress.skipped.values()))
    if this_rank()[0] > 0:
        return
    if skipped := common.describe_skipped(common.total_skipped(every_rank)):
        print(f"skipped {skipped}")
    if not opens_early(args, embedder.model):
        eval_data = open_evaluation(args, embedder.model, options)
    if eval_data is None:
        return evaluation.save_pictures(evaluation.draw_log(args.out))
    print(f"Evaluation on {evaluation.describe(options)}, in fp32:")
    embedder.model.eval()
    embedder.step = progress.step
    evaluation.evaluate_and_show(embedder, eval_data, options, args.out)


def dry_run(args, method, model):
    """Print on rank 0 what the settings cost, as JSON. A multiply-add is 2 FLOPs."""
    params = sum(p.numel() for p in model.parameters())
    model.eval()  # on several GPUs BatchNorm would gather statistics of CPU tensors
    batch, patches = made_up_batch(args, method, model, 2), model.image_encoder.grid**2
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch)
    chance_loss = model.chance_loss(args.batch, batch.get("mask"), patches)
    words = {"vocab_size": model.text_encoder.vocab_size} if method.uses_text(args) else {}
    record = {"params": params, **words, "flops_per_sample": counter.get_total_flops() // 2,
              "chance_loss": chance_loss}
    print_once(json.dumps(record))


def made_up_batch(args, method, model, n):
    """n random images, as of files, with captions of full length or labels, or n random images a
    view."""
    views = method.views(args)
    if views:
        return {"views": [torch.randn(n, 3, view["size"], view["size"]) for view in views]}
    images = {"images": torch.randint(256, (n, 3, args.image_size, args.image_size)).byte()}
    if method.content(args) == "label":
        return images | {"labels": torch.randint(len(args.classes), (n,))}
    text = model.text_encoder
    return images | {"tokens": torch.randint(text.vocab_size, (n, text.context)),
                     "mask": torch.ones(n, text.context, dtype=torch.bool)}


def main(argv=None):
    """-> the signal that stopped the run, if any."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    common.turn_off_tf32()
    device = common.init_distributed()
    try:
        with claim_run(args) as out:
            stopped_by = train(args, out, device)
    except RuntimeError as error:  # torch's handler of SIGCHLD raises it anywhere
        message = str(error)
        if message.startswith("DataLoader worker (pid"):
            what = "A worker was killed, perhaps as memory ran out"
        elif message.startswith("DataLoader timed out"):
            what = f"No batch came for {PATIENCE // 60} minutes, perhaps as /dev/shm is full"
        else:
            raise
        raise UserError(f"{what}: lower --workers or --batch, or raise a container's --shm-size; "
                        f"--resume auto --out {shlex.quote(args.out)} goes on from the last save, "
                        f"if any.") from None
    if dist.is_initialized():  # not after an error: NCCL would wait for the other ranks
        dist.destroy_process_group()
    return stopped_by


if __name__ == "__main__":
    common.prepare_output()
    try:
        stopped_by = main()
    except KeyboardInterrupt:
        stopped_by = signal.SIGINT
    except Exception as error:
        let_rank_0_speak()
        for bar in list(tqdm._instances):
            bar.close()  # the message begins on a line of its own
        if isinstance(error, UserError):
            sys.exit(f"error: {error}")
        raise
    finally:  # Python ends workers by SIGTERM, which they ignore, and would wait for ever
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else torch raises an error of its own
        for worker in multiprocessing.active_children():
            worker.kill()
    if stopped_by:  # end without a handler: loops of a shell, && and Slurm see the signal
        sys.stdout.flush()
        signal.signal(stopped_by, signal.SIG_DFL)
        os.kill(os.getpid(), stopped_by)
