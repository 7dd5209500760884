r"""Train a method: `python train.py --method sparc`, or on 8 GPUs
`torchrun --nproc_per_node=8 train.py --method sparc`.

The settings and their defaults are the fields of two dataclasses: Config in train.py, and Settings
in the file of the method. A preset replaces defaults. A flag replaces a default or a value of the
preset. The training writes config.json, vocab.txt, log.jsonl, last.pt, eval.json and pictures into
the directory of the run.

To read how it works, begin at train(). A map of the sections:

    Config                  every setting, its default, its help
    Training                train(): build, resume, loop
    Command line            flags from dataclasses; what is refused
    The run's directory     who may write there; what it holds
    Data, model, optimizer  what train() builds
    What moves              Progress, checkpoints, Stop for signals, the clock
    Log, evaluation, cost   what happens once in a while; --dry-run
    Main                    how errors and signals end the program

To add a setting, add a field with a comment to Config. To add an optimizer, add a row to
OPTIMIZERS. The name `args` stands for the settings of the run. The name `options` stands for the
settings of its evaluation (eval.options_of).

This Slurm job trains on two machines that share --out. The job requeues itself before its time is
over:

    #!/bin/bash
    #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96 --time=24:00:00
    #SBATCH --requeue --signal=B:TERM@120
    source .venv/bin/activate
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # Slurm 22.05 and newer need this variable
    trap 'kill -TERM $!; wait $!; scontrol requeue $SLURM_JOB_ID' TERM
    # the run has 100 seconds to save; torch before 2.12 ignores this variable and allows 30 seconds
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100
    srun torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_id=$SLURM_JOB_ID \
        --rdzv_endpoint=$SLURMD_NODENAME:29500 train.py --resume auto \
        --method sparc --preset l14 --grad-checkpoint --workers 12 --out runs/l14 \
        --data '/data/{00000..09999}.tar' --vocab /data/vocab.txt &
    wait $!

What a signal does:

    SIGTERM, SIGINT (Ctrl-C), SIGHUP        The run saves and ends after the present step. Several
    (a closed terminal, without nohup)      ranks need up to 2 seconds more.
    SIGUSR1, SIGUSR2, SIGXCPU               The run saves and ends in the same way. torchrun itself
    (Slurm, SGE, LSF)                       dies of these signals, so send SIGTERM to torchrun.
    any, before the first step              The run ends at once. A new directory is removed.
    any, while BAM looks for boxes          The run saves after the present batch, and ends. The
                                            resumed run looks for the boxes again.
    any, during --eval-every                The run ends after the evaluation. It was saved before.
    any, during the last evaluation         The run ends at once. It was saved before.
    a second Ctrl-C                         The run ends at once, without another save.

On one machine, `torchrun --max-restarts 3` with `--resume auto` continues from the last save after
a rank has died. On several machines, requeue the job.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import common
import eval as evaluation
from common import UserError, this_rank
from eval import METHODS


@dataclasses.dataclass
class Config:
    """Settings that all methods have. Batch sizes are global, over all ranks.

    The comment behind a field or above a field is the help of its flag. common.check_numbers checks
    the bounds in the comment, such as > 0 and <= 1.
    """

    preset: str = "tiny"  # preset of the method: a named set of values that replace the defaults
    # directory of the run. Without --out the directory is runs/METHOD or, if that exists,
    # runs/METHOD-2, and so on
    out: str | None = None
    # continue the run in --out. Flags of this command replace the settings of the run, except
    # --method, --preset, --vocab, --vocab-size, --optimizer, --finetune and --init-weights, which
    # cannot change. `--resume auto` starts a new run if --out has no checkpoint. With other --steps
    # the learning rate continues as in a run that has had these --steps from the start
    resume: bool = False
    # checkpoint in --out that --resume continues from, for example step-10000.pt. The checkpoint
    # replaces last.pt at once, and lines of later steps are deleted from log.jsonl
    checkpoint: str = "last.pt"
    # directory of a run whose encoders this run fine-tunes. --method classifier, the default,
    # trains the image encoder on labelled images (BAM, Table 3). --method detector trains both
    # encoders on boxes (SPARC, Table 5) and needs a run of SPARC
    finetune: str | None = None
    seed: int = 0  # seed, < 9e18, of the initial weights, of the order of the data and of crops

    # SPEC of the training data. The end of this help lists the forms of a SPEC. Only presets named
    # tiny have a default
    data: str | None = None
    # directory of the image files that --data and --eval-data name by relative paths. Without
    # --image-root the paths are relative to the directory of the FILE
    image_root: str | None = None
    # SPEC of the data on which the run is evaluated at the end. Without --eval-data the run is
    # evaluated on the test split of --data. If --data has no splits, the training images are the
    # test images. A run of BAM or DINO on files, and a run of another method on shards (.tar), are
    # evaluated only with --eval-data. A classifier is evaluated on its own shards
    eval_data: str | None = None
    # vocabulary file: vocab.txt of BERT, or bpe_simple_vocab_16e6.txt.gz of CLIP. Without --vocab a
    # new vocabulary is trained on the captions of --data
    vocab: str | None = None
    vocab_size: int = 8192  # largest number of tokens of a vocabulary trained on the captions, > 0
    # side of a training image in pixels, > 0. Without --image-size the side is the input size of
    # the image encoder or, for shapes, the size of the drawn images
    image_size: int | None = None
    # smallest area of a training crop, as a fraction of the area of the image, > 0, <= 1. With 1
    # the whole image is resized. The drawn images of shapes are not cropped if captions are read
    crop_scale: float = 0.9
    # probability that a training image is mirrored, <= 1. Without --flip the probability is 0 for
    # images with captions, because a mirrored image makes the word "left" wrong. For other images
    # the probability is .5
    flip: float | None = None
    # number of processes per rank that load data. With 0 the training process loads the data
    # itself. Without --workers the number is 0 for shapes and on macOS. For other data it is the
    # least of 8, the CPU cores per rank, and the shards per rank or the batches per epoch
    workers: int | None = None

    # image encoder: NAME, or NAME:setting=value,... to change settings. The end of this help lists
    # the names
    image_encoder: str = "ViT-B/16"
    # text encoder: NAME, or NAME:setting=value,... to change settings. The end of this help lists
    # the names
    text_encoder: str = "12x512"
    # file of pretrained weights to start from. Methods with captions load a whole CLIP. Methods
    # without captions load a ViT with timm's names of parameters, or a ResNet with torchvision's.
    # The file does not say which heads, quick_gelu, eps and pixels the encoder needs, so give these
    # four in --image-encoder. Most wrong values raise no error. Weights of a ResNet that blurs
    # before it strides, or of a ViT with norms after the attention, fit no encoder here
    init_weights: str | None = None

    # number of updates. With 0 the model is only evaluated, for example after --init-weights
    steps: int = 1000
    # number of passes over a FILE or class folders, > 0. --epochs replaces --steps
    epochs: int | None = None
    # number of images in an update, > 1, because contrastive losses compare images. Each image
    # comes with a caption if the method reads captions. The ranks share these images
    batch: int = 128
    lr: float = 5e-4  # highest learning rate, after the warm-up. --batch does not scale it
    warmup: int = 100  # number of steps of linear warm-up. Each stage of STAIR has its own warm-up
    schedule: Literal["cosine", "linear"] = "cosine"  # how the learning rate falls to 0
    # optimizer. STAIR's authors use lamb. BAM's authors use lars for ResNet-50
    optimizer: Literal["adamw", "lamb", "lars", "sgd"] = "adamw"
    weight_decay: float = 0.1  # weight decay of the weights of linear and convolution layers
    # weight decay at the end of the training. A half cosine leads from --weight-decay to this
    # value. Without --weight-decay-end the weight decay is constant
    weight_decay_end: float | None = None
    beta2: float = 0.98  # second beta of AdamW and LAMB, < 1 (CLIP, Table 18). The first is 0.9
    adam_eps: float = 1e-6  # epsilon of AdamW and LAMB (CLIP, Table 18)
    clip_grad: float = 1.0  # largest norm of the gradient. With 0 the gradient is not clipped

    log_every: int = 10  # number of steps between two lines of log.jsonl, > 0
    save_every: int = 1000  # number of steps between two saves of last.pt, > 0
    # number of steps between two checkpoints step-S.pt, which are never deleted. A checkpoint has
    # at most 12 bytes for each parameter. With 0 there are no such checkpoints
    keep_every: int = 0
    # number of steps between two evaluations during the training. Each evaluation uses at most
    # 1,000 images and writes its metrics to log.jsonl. BAM and DINO are evaluated by k-NN alone.
    # With 0 the run is evaluated only at the end
    eval_every: int = 0
    # recipe of the linear probe. adamw is SPARO's recipe, with 10 epochs. sgd is BAM's recipe, with
    # 100 epochs
    probe: Literal["adamw", "sgd"] = "adamw"

    # precision of the encoders. Without --amp the precision is bf16 on a GPU, and fp32 (off) on a
    # CPU. The loss is computed in fp32. With bf16 and fp16 a GPU uses TF32 for products of the loss
    amp: Literal["bf16", "fp16", "off"] | None = None
    # use torch.compile on each block of the ViT and of the text encoder. A ResNet is compiled as a
    # whole
    compile: bool = False
    # save memory: the backward pass computes the blocks of the ViT and of the text encoder again
    grad_checkpoint: bool = False
    # number of parts into which a rank splits its batch, > 0, to save memory. The encoders process
    # the parts one after the other. The loss still compares the whole batch
    accum_freq: int = 1
    # print what the run costs, and do not train. flops_per_sample: FLOPs of the forward pass.
    # h100_hours: hours of one H100 at 200 TFLOPs a second, fewer if the method has a teacher. The
    # loss of the whole batch adds up to 8 %, but with filip and gloria 70 to 270 %. chance_loss:
    # loss of a random guess. With --out DIR the command also draws first-batch.png
    dry_run: bool = False
    # number of steps to time. The command prints the images per second and then stops
    bench: int = 0


# {first setting of a group in --help: title of the group}
GROUPS = {"preset": "run", "data": "data", "image_encoder": "encoders", "steps": "optimization",
          "log_every": "log, checkpoints and evaluation", "amp": "speed and memory"}
MOST_WORKERS = 8  # largest number of workers without --workers
CHECKED = 1000  # number of captions on which the vocabulary is checked at the start
H100 = 200e12  # FLOPs that one H100 computes in a second of training in bf16 (tests/gpu.json)
BENCH_WARMUP = 3  # steps before --bench starts its clock; they choose kernels and allocate memory


# Training -----------------------------------------
#
# train() opens the data, trains and evaluates. The functions that train() calls stand below it.


def train(args, out, device):
    """Train, evaluate, and return the signal that stopped the run, or None. out: the directory of
    the run, or None on ranks that write nothing."""
    rank, world_size = this_rank()
    method = METHODS[args.method]

    # Build. The data of --eval-data are opened now, because a wrong path would otherwise give an
    # error after a day of training. Other data are opened at the end: a table would be in memory
    # twice.
    data = open_training_data(args, method)
    tokenizer = build_tokenizer(args, data) if method.uses_text(args) else None
    model = new_model(args, method, tokenizer)
    is_asked = (args.eval_data or args.eval_every) and not args.bench
    eval_data = open_evaluation(args, model) if is_asked else None
    transform = build_transform(args, method, model.image_encoder)
    if args.dry_run:
        if args.out:
            batches = open_loader(args, data, transform, tokenizer, model, Progress(), device, None)
            show_first_batch(args, tokenizer, common.distort(next(batches)))
        return dry_run(args, method, model) if rank == 0 else None
    embedder = evaluation.new_embedder(model.to(device), tokenizer, args, device)
    torch.manual_seed(args.seed + rank)  # stochastic depth differs between ranks
    autocast, scaler, is_half = mixed_precision(args, device)

    # Resume. `progress` holds what changes during training, see Progress.
    progress = Progress(data.fingerprint, tokenizer and tokenizer.hash(), args.seed)
    saved = load_state(args, data, model, scaler, progress, device) if args.resume else None
    progress.check_ranks(data.annotations, scaler)
    if out:
        announce(args, data, model, tokenizer, device, progress)
        if args.checkpoint != "last.pt":  # a run killed before its next save continues from it
            common.write_file(out / "last.pt", saved)
        write_run(args, tokenizer, out, progress.step)
    log, stop, clock, batches = Log(args, out, progress.step), Stop(), Clock(), None
    if common.gather_objects(log.last < progress.record.get("step", 0))[0]:  # killed after a save
        end_step(args, data, embedder, eval_data, log, progress, scaler)

    if args.steps == 0:  # the evaluation needs no update
        save(args, model, build_optimizer(args, model, None), scaler, progress)
    for number, start, end, lr in stages_of(args, progress.step):  # STAIR has three stages
        progress.stage, steps = number, end - start
        model.begin_stage(number, fresh=progress.step == start)
        optimizer = build_optimizer(args, model, saved if progress.step > start else None)
        saved = parallel = None  # frees memory: DDP of the stage before still holds gradients
        parallel = wrap(args, model, world_size)
        model.train()

        while progress.step < end:
            # BAM crops in boxes around what [CLS] attends to. --bench times updates without boxes.
            if progress.needs_boxes(method.box_refreshes(args)) and not args.bench:
                batches = None  # ends the workers, which crop in the old boxes
                boxes, stopping = find_boxes(args, data, model, device, autocast, stop)
                if stopping:  # the resumed run will look for the boxes again
                    save(args, model, optimizer, scaler, progress)
                    return end_early(args, progress.step, stopping, stop)
                progress.boxes = boxes
            if batches is None:
                batches = open_loader(args, data, transform, tokenizer, model, progress, device,
                                      stop)
                clock.reset()
            batch = common.distort(clock.wait_for(batches))
            if progress.step == 0 and not args.bench:
                show_first_batch(args, tokenizer, batch)
            step = progress.step - start  # number of steps since the start of the stage
            set_schedules(optimizer, args, step, steps, lr)

            # The forward pass. Encoders compute in half precision, the loss in fp32. Matrix
            # products of the loss may use TF32, whose errors are far smaller than those of bf16.
            torch.backends.cuda.matmul.allow_tf32 = is_half
            with autocast():
                outputs = parallel(batch)  # Model.forward: {"loss": scalar, ...}

            # The backward pass. The scaler multiplies the loss, because small gradients would be 0
            # in fp16.
            scaler.scale(outputs["loss"]).backward()
            torch.backends.cuda.matmul.allow_tf32 = False
            model.before_update(step)

            # Divide the gradients by the loss scale, clip them, update. The scaler skips the update
            # if gradients overflowed.
            scaler.unscale_(optimizer)
            grad_norm = clip_grad_norm_(model.parameters(), args.clip_grad or math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)  # None takes no memory

            # Changes of the method: a teacher follows the network, a temperature is clamped.
            model.after_update(step, steps)
            progress.advance(batch, args.batch)

            # Decide what is due. All ranks decide alike. A save precedes each evaluation, because a
            # long evaluation may be killed.
            evaluate_due = progress.due(args.eval_every)
            save_due = evaluate_due or any(map(progress.due, (args.save_every, args.keep_every)))
            save_due = save_due or progress.step == end
            log_due = progress.due(args.log_every) or save_due or progress.step == 1
            stopping = stop.agreed(device, save_due)

            # With --bench, time the updates and write nothing.
            if args.bench:
                if bench(args, clock, progress.step) or stopping:
                    return stopping
                continue

            # Save if the loss is finite. The checkpoint also holds the log's line of this step.
            if log_due or stopping:
                check_finite(args, progress.step, outputs["loss"], grad_norm, scaler)
            if log_due:
                record = {"lr": optimizer.param_groups[0]["lr"]} | clock.rates(args.batch)
                progress.note(record | measure(args, model, batch, autocast, outputs, grad_norm))
            if save_due or stopping:
                save(args, model, optimizer, scaler, progress, stage_ends=progress.step == end)

            # Evaluate on all ranks, and log. If the run must stop, the resumed run evaluates and
            # writes the line of this step.
            if log_due and not (evaluate_due and stopping):
                end_step(args, data, embedder, eval_data, log, progress, scaler)
            if log_due:
                clock.reset()

            # Stop.
            if stopping:
                return end_early(args, progress.step, stopping, stop)
    stop.restore()  # after this line a signal ends the program at once
    if failed := finish(args, embedder, eval_data, progress):
        stop.fail(" ".join(failed))
        return end_early(args, progress.step, stop.FAILED, stop)


# Command line -----------------------------------------
#
# Each field of Config and of the method's Settings is a flag. The comment of a field is the help of
# the flag.


def parse_args(argv):
    """Command line -> the run's settings."""
    # First read the flags of Config, because they decide which flags and defaults the method has.
    # `given` has only the flags of the command line.
    parser = common.Parser(usage="train.py --method NAME [--FLAG VALUE ...]", add_help=False,
                           description=__doc__.partition("\n\nTo read")[0])
    parser.add_argument("--method", choices=METHODS, help="what to train. sparo, stair and sparc "
                        "learn from images with captions. bam learns from images alone. classifier "
                        "and detector fine-tune a run. `--method NAME --help` lists the flags and "
                        "the defaults of a method")
    common.add_flags(parser, Config, GROUPS, "run")
    given, rest = parser.parse_known_args(argv)
    given = vars(given)
    for name, value in given.items():
        if value == "":  # for example --out "$DIR" if DIR is not set
            raise UserError(f"{common.flag_of(name)} is empty: give a value, or leave it out.")
    if "resume" in given and "out" not in given:
        raise UserError("--resume needs --out, the directory of the run to continue.")
    if "checkpoint" in given and given.get("resume") is not True:
        raise UserError("--checkpoint needs --resume, without auto.")
    if given.get("resume") == "auto":
        names = common.checkpoints(given["out"])
        given["resume"] = bool(names)
        if names and "last.pt" not in names:  # the run was killed before it first wrote last.pt
            given["checkpoint"] = names[0]

    # Then read the flags of the method. The defaults come from the preset or the resumed run.
    usual = default_settings(given)
    method = given.get("method", usual.get("method"))
    if method:
        own = METHODS[method].Settings
        usual = vars(Config()) | vars(own()) | usual
        common.add_flags(parser, own, {}, f"settings of {method}")
    shown = {name: x for name, x in usual.items() if x is not None and name != "method"}
    parser.set_defaults(**shown)  # for the help
    parser.epilog = lists_of_names([method] if method else METHODS)
    parser.add_argument("-h", "--help", action="help", help="show this and stop")
    args = parser.parse_args(rest, argparse.Namespace(**usual | given))
    if not method:
        parser.error(f"--method is required, one of {', '.join(METHODS)}")
    check_settings(args, METHODS[method], usual, given)
    return args


def lists_of_names(methods):
    """The end of --help: the names that --data, --preset and the encoders' flags expect."""
    lists = {"--data SPEC, one of": [row.form for row in common.formats()]}
    for method in methods:
        lists[f"--preset NAME of --method {method}"] = METHODS[method].PRESETS
    for flag, kinds in (("--image-encoder", common.IMAGE_ENCODERS),
                        ("--text-encoder", common.TEXT_ENCODERS)):
        lists[f"{flag} NAME"] = [name for presets in kinds.values() for name in presets]
    lines = []
    for title, names in lists.items():
        lines += [f"{title}:", *(f"  {name}" for name in names)]
    return "\n".join(lines)


def default_settings(given):
    """The settings that replace the defaults of the dataclasses. With --resume they are the
    settings of the resumed run. Otherwise they are the settings of the preset. --finetune adds the
    settings of the fine-tuned run's encoders. given: {name: value} of the flags that are given."""
    if given.get("resume"):
        # A run whose config.json lacks `flip` mirrored half of its images. --checkpoint is valid
        # for one command, so its saved value is dropped.
        saved = vars(evaluation.settings_of_run(given["out"])[1])
        return {"flip": 0.5} | saved | {"checkpoint": "last.pt"}
    method = given.get("method", "classifier" if "finetune" in given else None)
    if method is None:
        return {}
    presets, preset = METHODS[method].PRESETS, given.get("preset", Config.preset)
    if preset not in presets:
        raise UserError(f"{method} has no preset {preset!r}; it has {', '.join(presets)}.")
    usual = {"method": method} | presets[preset]
    if "finetune" in given:
        usual |= encoders_of(given["finetune"], method == "detector")
    return usual


def encoders_of(run, with_text):
    """The settings that describe a run's image encoder and, for a detector, its text encoder."""
    method, args = evaluation.settings_of_run(run)
    encoder = args.image_encoder
    kind, settings = common.encoder_settings(encoder, common.IMAGE_ENCODERS)
    if kind is common.ViT and method.blocks_left_out(args):  # SPARO replaces these blocks
        depth = settings["depth"] - method.blocks_left_out(args)
        encoder += f"{',' if ':' in encoder else ':'}depth={depth}"
    texts = {}
    if with_text:
        if args.method != "sparc":
            raise UserError(f"{run} is a run of {args.method}: give a run of --method sparc.")
        texts = {"text_encoder": args.text_encoder, "embed_dim": args.embed_dim,
                 "vocab": str(Path(run, "vocab.txt"))}
    return texts | {"image_encoder": encoder, "image_size": args.image_size}


# methods that fine-tune the encoders of another run
FINE_TUNED = "classifier", "detector"
# settings that have an effect only on methods with captions
TEXT_FLAGS = "vocab", "vocab_size", "text_encoder"
# paths, which may differ between the machines of a run; Progress.check_ranks compares the data and
# the vocabulary that the paths lead to
PATHS = {"out", "image_root", "data", "eval_data", "vocab", "init_weights"}
# settings that cannot change when a run is resumed
FIXED = {"method", "preset", "vocab", "vocab_size", "optimizer", "finetune", "init_weights"}


def check_settings(args, method, usual, given):
    """Raise UserError for flags that do not fit each other. usual: the settings without any flag. A
    flag with its usual value is accepted. given: the flags of Config that are given."""
    unused = () if method.uses_text(args) else TEXT_FLAGS
    if method.views(args):
        unused += ("crop_scale",)
    for name, default in usual.items():
        flag, value = common.flag_of(name), vars(args)[name]
        if value == default:
            continue
        if args.resume and name in FIXED:
            raise UserError(f"{args.out} has {flag} {default}: leave out {flag} {value}.")
        if name in TEXT_FLAGS and args.finetune and method.uses_text(args):
            raise UserError(f"{flag} {value} does not fit {args.finetune}: leave it out.")
        if name in unused:
            raise UserError(f"{flag} has no effect on this objective: leave it out.")
    comments = common.comments_of(Config) | common.comments_of(method.Settings)
    common.check_numbers(vars(args), comments)
    if "steps" in given and "epochs" not in given:
        args.epochs = None  # --steps replaces the --epochs of the resumed run
    if args.finetune and (args.init_weights or args.method not in FINE_TUNED):
        raise UserError("--finetune needs --method classifier or detector, and no --init-weights.")
    if args.bench and args.resume:
        raise UserError("--bench times a new run: leave out --resume.")
    if args.bench:
        args.steps, args.epochs = max(args.steps, BENCH_WARMUP + args.bench), None


# The run's directory -----------------------------------------
#
# One process writes into the directory and holds a lock. A new run never overwrites the files of an
# earlier run.


def choose_run(args):
    """The directory of the run, the same on every rank. Raises UserError if the directory holds
    another run, which --resume does not continue."""
    if not args.out:
        args.out, i = f"runs/{args.method}", 2
        while Path(args.out).exists():
            args.out, i = f"runs/{args.method}-{i}", i + 1
        args.out = common.gather_objects(args.out)[0]
    common.check_ranks({common.flag_of(name): value for name, value in vars(args).items()
                        if name not in PATHS})
    out, is_run = Path(args.out), False
    with contextlib.suppress(UserError):  # a run without config.json was killed before a save
        is_run = "argv" in common.read_config(out)
    names = ["*.pt", "eval.json"]  # a run has these files after a save
    if not is_run:  # files of these other names then belong to the user
        names += ["config.json", "vocab.txt", "log.jsonl"]
    with common.writing(out):  # the directory's name may be too long
        replaced = [path.name for name in names for path in out.glob(name)]
    if replaced and not args.resume:
        raise UserError(f"{out} already has a {replaced[0]}: add --resume, or change --out.")
    return out


@contextlib.contextmanager
def claim_run(args):
    """A context with the directory of the run, locked, or None if this process writes nothing.

    The lock is taken before train() reads or writes files of the directory. A new directory is
    removed if the run ends, by an error or by a signal, before a step is logged or saved.
    """
    out = None if args.dry_run or args.bench else choose_run(args)
    if out is None or this_rank()[0] > 0:
        yield None
        return
    is_new = not out.exists()
    with lock_run(out):
        stop = Stop(at_once=True)  # handles signals before and after the training
        try:
            yield out
        finally:
            # the files `lock` and, before its first line, log.jsonl are empty
            written = {path.name for path in out.glob("*") if path.stat().st_size}
            if is_new and written <= {"config.json", "vocab.txt", "first-batch.png"}:
                shutil.rmtree(out, ignore_errors=True)
            stop.restore()


def lock_run(out):
    """Make the directory of the run and lock it -> the open file of the lock.

    The kernel frees the lock when the file is closed or the process ends, also if the process is
    killed. Forked workers do not hold the lock.
    """
    with common.writing(out):
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / "lock", "a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with common.locked(out):  # an evaluation may write at the same time
            for path in out.glob("*.tmp"):  # killed processes leave these files
                if re.fullmatch(r".+\.(pt|jsonl?|png|txt)\.\d+\.tmp|.+\.pt\.tmp", path.name):
                    path.unlink(missing_ok=True)
    except BlockingIOError:
        raise UserError(f"{out} is in use by a run: stop it, or change --out.") from None
    except OSError:
        pass  # this file system has no locks
    return file


def write_run(args, tokenizer, out, step):
    """Write config.json and vocab.txt, from which eval.py and --resume build the model again.
    Remove eval.json if it belongs to a later step than `step`, from which the run continues."""
    # `argv` and `directory` describe this command. Relative paths of settings start at `directory`.
    record = vars(args) | {"argv": sys.argv, "git": common.revision(),
                           "torch": str(torch.__version__), "threads": torch.get_num_threads(),
                           "directory": os.getcwd()}
    common.write_file(out / "config.json", record)
    if tokenizer and not args.resume:
        tokenizer.save(out / "vocab.txt")
    if evaluation.step_of(out) > step:
        (out / "eval.json").unlink()


def announce(args, data, model, tokenizer, device, progress):
    """Print facts about the run. Raises UserError if the vocabulary does not fit the captions."""
    params = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{args.out}: {args.method}, preset {args.preset}, step {progress.step} of {args.steps}")
    print(f"{params:.1f} M parameters on {device}; ranks: {this_rank()[1]}; threads of a rank: "
          f"{torch.get_num_threads()}; --workers {args.workers}; --warmup {args.warmup}")
    if any(0 < end - start < args.warmup for _, start, end, _ in stages_of(args)):
        print("note: the run, or a stage of it, is shorter than --warmup: it never reaches --lr")
    if isinstance(data, common.CaptionTable):
        print(f"{len(data):,} images, {len(data) / args.batch:.1f} steps per epoch")
    if tokenizer:
        check_vocabulary(args, data, tokenizer)


def check_vocabulary(args, data, tokenizer):
    """Raise UserError if the vocabulary lacks most tokens of the captions."""
    captions = data.sample_captions(CHECKED)
    ids = [i for caption in captions for i in tokenizer.encode(caption)[1:-1]]
    unknown = ids.count(tokenizer.unk) / max(1, len(ids))
    if unknown > 0.5:
        raise UserError(f"{unknown:.0%} of the captions' tokens are [UNK]: give another --vocab.")


class Log:
    """The file log.jsonl. Rank 0 also prints one of its lines about every ten seconds."""

    def __init__(self, args, out, step):
        self.args, self.warned, self.printed = args, set(), -math.inf
        self.last = 0  # the step of the last line
        if out:
            self.path = out / "log.jsonl"
            self.cut(step)

    def cut(self, step):
        """Keep the lines up to the step. The last line is dropped if a killed run wrote only a part
        of the line."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        kept = []
        for number, line in enumerate(lines, 1):
            what = f"Line {number} of {self.path} is damaged, delete it"
            with common.explained((ValueError, TypeError, KeyError), what):
                if line.endswith(b"\n") and (record := json.loads(line))["step"] <= step:
                    kept.append(line)
                    self.last = record["step"]
        with common.replacing(self.path) as file:
            file.writelines(kept)

    def write(self, record, warning):
        """Append a step's record; print each warning once."""
        step = record["step"]
        line = json.dumps(common.without_nan(record), allow_nan=False)  # NaN becomes null
        with common.writing(self.path), open(self.path, "a") as file:
            file.write(f"{line}\n")
            file.flush()
            os.fsync(file.fileno())  # the next checkpoint relies on this line
        args, rate = self.args, record["images_per_s"]
        if time.monotonic() > self.printed + 10 or step == args.steps:
            self.printed = time.monotonic()
            minutes = (args.steps - step) * args.batch / rate / 60
            print(f"{args.method}: step {step}/{args.steps}  loss {record['loss']:.4g}  lr "
                  f"{record['lr']:.3g}  {rate:.0f} images/s  {minutes:.0f} min left", flush=True)
        if warning and warning not in self.warned:
            print(f"warning at step {step}: {warning}")
            self.warned.add(warning)


# Data, model, optimizer -----------------------------------------
#
# Every rank builds the same model from --seed. Every rank reads another part of the data.


def open_training_data(args, method):
    """Open --data. Also set the settings that depend on the data: args.image_size, args.flip and
    args.workers, unless their flags are given, and args.steps with --epochs. For shapes
    args.image_size is the size of the drawn images. eval.py reads args.data_path and
    args.folder_captions to know what the run has learned from."""
    _, world_size = this_rank()
    if args.batch % world_size:
        raise UserError(f"--batch {args.batch} must be a multiple of the {world_size} ranks.")
    if args.data is None and not args.dry_run:
        raise UserError(f"--preset {args.preset} has no data: give --data (captions: --vocab).")
    args.data = args.data or "shapes"
    _, encoder = common.encoder_settings(args.image_encoder, common.IMAGE_ENCODERS)
    image_size = args.image_size or encoder["image_size"]
    content = method.content(args)
    data = common.open_data(args.data, args.image_root, "train", image_size, content, on_ranks=True)
    if content == "label":
        data = choose_labels(args, data)
    is_table = isinstance(data, common.CaptionTable)
    if isinstance(data, common.World):
        image_size = data.size
        if args.image_size not in (None, image_size):
            raise UserError(f"--image-size {args.image_size} does not fit {args.data}: drop it.")
    args.image_size = image_size
    if args.flip is None:
        args.flip = 0.0 if content == "caption" else 0.5
    # an absolute path, as eval.py may run in another directory, or after the data are removed
    args.data_path = str(Path(common.parse_spec(args.data)[0]).resolve())
    args.folder_captions = is_table and data.classes is not None
    if args.workers is None:
        args.workers = usual_workers(args, data)
    if args.epochs:
        if not is_table:
            raise UserError(f"--epochs does not fit {args.data}, of unknown size: give --steps.")
        args.steps = math.ceil(args.epochs * len(data) / args.batch)
    check_method(args)
    if method.box_refreshes(args) and not (is_table or args.dry_run):
        raise UserError("--contrastive-crop needs a folder or a table: give --no-contrastive-crop.")
    return data


def usual_workers(args, data):
    """The number of workers if --workers is not given, see Config. All ranks need the same number,
    because each worker of each rank reads an equal part of the data."""
    if isinstance(data, common.World) or sys.platform == "darwin":  # a fork may crash on macOS
        return 0
    parts = len(data) // (this_rank()[1] if data.unit == "shards" else args.batch)
    return min(common.gather_objects(min(MOST_WORKERS, common.cores_of_rank(), parts)))


def check_method(args):
    """Raise UserError if settings do not fit the method."""
    with common.explained(ValueError, f"--method {args.method}"):
        METHODS[args.method].check(args)


def choose_labels(args, data):
    """The labelled data, or the part of the data that --label-fraction chooses. Sets args.classes
    to the names of the classes."""
    given = args.classes  # names of --classes, or of the resumed run
    args.classes = list(data.classes or given or ())
    if len(args.classes) < 2:
        raise UserError(f"{args.data} needs names of two or more classes: give --classes FILE.")
    if given not in (None, args.classes):
        raise UserError(f"The classes of {args.data} are {', '.join(args.classes)}, not "
                        f"{', '.join(given)}: leave out --classes, or give the run's data.")
    data.classes = args.classes  # shards look up their labels in these names
    if args.label_fraction is None:
        return data
    if not isinstance(data, common.CaptionTable):
        raise UserError(f"--label-fraction needs class folders, {args.data} is something else.")
    paths = [data.path(i) for i in range(len(data))]
    return data.only(common.label_rows(paths, data.labels, args.label_fraction))


def open_evaluation(args, model):
    """The data for the evaluation that belongs to the run. Raises UserError if no task can use
    these data."""
    options, content = evaluation.options_of({}, args), METHODS[args.method].content(args)
    with common.explained(UserError, "No evaluation"):
        data = evaluation.open_eval_set(options, args.image_size, content)
        evaluation.tasks_to_run(options, data, model)
        pairs = data.labelled or data.captioned
        if pairs and not data.is_world:
            next(evaluation.read_images(pairs("first"), common.open_image))
    return data


def build_tokenizer(args, data):
    """The tokenizer. A resumed run has its vocabulary in vocab.txt. A new run reads --vocab.
    Without --vocab rank 0 trains a vocabulary on at most 100,000 captions."""
    if args.resume or args.vocab:
        return common.open_tokenizer(Path(args.out, "vocab.txt") if args.resume else args.vocab)
    words = None
    if this_rank()[0] == 0:
        captions = data.sample_captions(100_000)
        words = common.train_wordpiece(captions, args.vocab_size)
    return common.WordPiece(common.gather_objects(words)[0])


def new_model(args, method, tokenizer):
    """The model, the same on every rank."""
    torch.manual_seed(args.seed)
    encoders, parts = initial_encoders(args, method, tokenizer)
    model = common.build_model(method, args, *encoders)
    if parts is not None:
        flag = "finetune" if args.finetune else "init_weights"
        file = vars(args)[flag]
        with common.explained(UserError, f"{common.flag_of(flag)} {file}"):
            left_over = common.load_clip_parts(model, parts)
        # blocks.3.norm.bias -> blocks.3, head.0.weight -> head
        modules = [re.match(r"(blocks|visual)\.\w+|\w+", name)[0] for name in left_over]
        names = ", ".join(dict.fromkeys(modules)) or "nothing"
        print(f"{file} is loaded. Left over in the file: {names}.")
    save_memory(args, model)
    return model


def initial_encoders(args, method, tokenizer):
    """-> (image encoder, text encoder), with the weights of --finetune or --init-weights, and the
    weights that belong to no encoder, for load_clip_parts, or None without weights."""
    encoders, parts = common.build_encoders(method, args, tokenizer), None
    if args.resume or args.dry_run:  # the weights come from the checkpoint, or do not matter
        return encoders, parts
    if args.finetune:
        with torch.random.fork_rng(devices=[]):  # to build the source draws random numbers
            source = evaluation.load_run(args.finetune)[0].model
        common.copy_encoder(encoders[0], source.evaluation_encoder(), args.finetune)
        if method.uses_text(args):
            common.copy_encoder(encoders[1], source.text_encoder, args.finetune)
            projection = source.clip_parameters()["text_projection"]
            parts = {"text_projection": projection.t()}  # CLIP has the transposed matrix
    if args.init_weights:
        with common.explained(UserError, "--init-weights"):
            weights = common.load_checkpoint(args.init_weights)
        with common.explained(UserError, f"--init-weights {args.init_weights}"):
            if isinstance(weights, dict) and "ranks" in weights:
                raise UserError("it is a run's checkpoint: use --resume, or eval.py RUN --export.")
            if method.uses_text(args):
                parts = common.load_clip(encoders, weights, tokenizer)
            else:
                parts = common.load_timm(encoders[0], weights)
    return encoders, parts


def save_memory(args, model):
    """Apply --grad-checkpoint and --accum-freq to all encoders, also to those of a teacher."""
    if args.grad_checkpoint and common.Blocks not in map(type, model.image_encoder.modules()):
        raise UserError(f"--grad-checkpoint needs a ViT, not {args.image_encoder}: leave it out.")
    for module in model.modules():
        if isinstance(module, common.Blocks):
            module.grad_checkpoint = args.grad_checkpoint
        if isinstance(module, common.Encoder):
            module.accum_freq = args.accum_freq
        if isinstance(module, common.BatchNorm) and args.accum_freq > 1:
            raise UserError(f"--accum-freq splits batches, but {args.image_encoder} has BatchNorm: "
                            "choose a ViT without a stem, such as tiny-patch.")


def build_transform(args, method, encoder):
    """The function that turns a decoded image into a training image, or into several views. The
    drawn images of `shapes` go through this function only for methods without captions."""
    views = method.views(args)
    if method.content(args) == "boxes":
        return functools.partial(common.crop_boxes, size=args.image_size,
                                 min_scale=args.crop_scale, flip=args.flip)
    if settings := method.augment(args):
        return common.Augment(args.image_size, flip=args.flip, **settings)
    if views is None:
        return common.train_transform(args.image_size, args.crop_scale, args.flip)
    patch = encoder.patch_size if isinstance(encoder, common.ViT) else 1
    for view in views:
        if view["size"] % patch or view["size"] > args.image_size:
            raise UserError(f"--local-size must be a multiple of {patch} up to {args.image_size}.")
    return common.Views([common.View(**view) for view in views], args.image_size, args.flip)


def open_loader(args, data, transform, tokenizer, model, progress, device, stop):
    """Yield the batches of this rank on the device, beginning at the positions in `progress`. If
    the disk fails, the last batch is repeated until all ranks have agreed to stop."""
    rank, world_size = this_rank()
    context = model.text_encoder.context if tokenizer else None
    kind = common.Stream
    if isinstance(data, common.World):
        kind = common.WorldStream
        transform = None if tokenizer else transform  # a crop may lose objects of the caption
    # Large JPEGs are decoded at a smaller size, with enough pixels for the smallest crop.
    min_side = max(math.ceil(1.5 * args.image_size),
                   common.decoded_side(args.image_size, args.crop_scale))
    stream = kind(data, tokenizer, transform, min_side=min_side, context=context,
                  batch_size=args.batch // world_size, seed=args.seed + progress.order, rank=rank,
                  world_size=world_size, positions=dict(progress.positions), boxes=progress.boxes)
    # While a step is computed, the workers prepare the parts of the next batch, at least two parts
    # each.
    ahead = max(2, math.ceil(stream.parts / max(1, args.workers)))
    messages = read_in_workers(stream, args.workers, ahead)
    batch = None
    for number in itertools.count(progress.step):
        try:
            parts = itertools.islice(messages, stream.parts)
            parts = [to_device(part, device) for part in parts]
            batch = to_device(stream.join(parts, number), device)
        except common.DiskError as error:
            if batch is None or args.bench:
                raise
            stop.fail(error)
            yield from itertools.repeat(batch)
        if number == 0 and not args.bench:
            check_first_batch(args, batch)
        yield batch


def check_first_batch(args, batch):
    """Compare the samples in the first batch of all ranks. Raises UserError if a sample is there
    twice, because a contrastive loss would take the copy as a negative."""
    if METHODS[args.method].content(args) in ("label", "boxes"):
        return
    samples = sum(common.gather_objects(batch.get("samples", torch.empty(0)).tolist()), [])
    if again := len(samples) - len(set(samples)):
        raise UserError(f"{again} of the {args.batch} samples of the first batch are in it twice: "
                        "lower --batch or --workers, or give more readable images.")


# The run waits 1,800 seconds for a batch. Every 10 seconds the run looks whether workers are alive.
# It prints a note every 300 seconds.
PATIENCE, LOOK, NOTE = 1800, 10, 300


def read_in_workers(dataset, workers, ahead=2):
    """Yield the items of an IterableDataset, which `workers` processes read. Each process reads
    `ahead` items in advance."""
    place = tempfile.gettempdir()
    if workers and len(os.fsencode(place)) > 70:  # workers would print an error and send no batches
        raise UserError(f"TMPDIR {place} is too long: export TMPDIR=/tmp, or give --workers 0.")
    batches = iter(torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=workers, worker_init_fn=ignore_signals,
        pin_memory=torch.cuda.is_available(), timeout=LOOK if workers else 0,
        prefetch_factor=ahead if workers else None,
        # forked workers share the table's memory; Python 3.14 does not fork by default
        multiprocessing_context="fork" if workers else None,
        generator=torch.Generator()))  # keeps the random numbers of the training unchanged
    waited, received = 0, 0
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            # If a batch does not fit into /dev/shm, its worker hangs. So the wait has an end.
            waited += LOOK
            if waited >= PATIENCE or not str(error).startswith("DataLoader timed out"):
                raise
            if waited % NOTE == 0:
                pid = batches._workers[received % workers].pid  # workers send in turn
                print(f"note: rank {this_rank()[0]} has had no batch for {waited} s. It waits for "
                      f"worker {pid}. `readlink /proc/{pid}/fd/*` lists the files that the worker "
                      "reads. If `df /dev/shm` shows no free memory, lower --workers or --batch, "
                      "or raise the container's --shm-size.", file=sys.stderr)
            continue
        waited, received = 0, received + 1
        yield batch


def ignore_signals(worker):
    """Ignore signals in a worker. torchrun and Slurm send signals to all processes, but the workers
    must live until the run has saved."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@torch.no_grad()
def find_boxes(args, data, model, device, autocast, stop):
    """-> boxes (n, 4), and the signal that ended the search, or 0. The centres of an image's crops
    lie in its box (BAM, App. G). Each rank finds the boxes of another part of the images."""
    def read(path):
        return common.squeezed(common.open_image(path, args.image_size), args.image_size)

    model.eval()
    rank, ranks = this_rank()
    pairs = ((data.path(i), i) for i in range(rank, len(data), ranks))
    images, rows, boxes = evaluation.read_images(pairs, read, args.workers), [], []
    try:
        for part in evaluation.chunks(images, common.Stream.part):
            if stop.noted:
                break
            rows += [i for _, i in part]
            x = torch.stack([image for image, _ in part]).to(device)
            with autocast():
                boxes += model.boxes(x).tolist()
    except UserError as error:  # the disk has failed, or no image can be read
        stop.fail(error)
    model.train()
    found = torch.full((len(data), 4), math.nan)  # images that cannot be read keep NaN
    ranks = common.gather_objects((rows, torch.tensor(boxes).view(-1, 4), stop.noted))
    for rows, boxes, _ in ranks:
        found[rows] = boxes
    return found, max(noted for *_, noted in ranks)


OPTIMIZERS = {  # {name: function (groups, betas, eps) -> optimizer}
    "adamw": functools.partial(torch.optim.AdamW, fused=True),
    # the "sgd" of DeiT is the SGD of timm, which has Nesterov momentum
    "sgd": lambda groups, betas, eps: torch.optim.SGD(groups, momentum=betas[0], nesterov=True),
    "lamb": METHODS["stair"].LAMB, "lars": METHODS["bam"].LARS}


def build_optimizer(args, model, saved):
    """A new optimizer. With a checkpoint `saved`, the optimizer gets the state that was saved."""
    groups = common.param_groups(model, args.weight_decay)
    optimizer = OPTIMIZERS[args.optimizer](groups, betas=(0.9, args.beta2), eps=args.adam_eps)
    if saved:
        settings = optimizer.param_groups  # the settings of this command replace the saved ones
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups = settings
    return optimizer


def stages_of(args, step=0):
    """The stages that end after `step`: [(number, start, end, peak learning rate)]. A stage has the
    steps from start + 1 to end."""
    rows, end = [], 0
    for number, steps, lr in METHODS[args.method].stages(args):
        start, end = end, end + steps
        if end > step:
            rows.append((number, start, end, lr))
    return rows


def set_schedules(optimizer, args, step, steps, lr):
    """Set the learning rate and the weight decay for a step of a stage. The stage has `steps` steps
    and the peak learning rate `lr`."""
    schedule = {"cosine": common.cosine_lr, "linear": common.linear_lr}[args.schedule]
    for group in optimizer.param_groups:
        group["lr"] = schedule(step, steps, args.warmup, lr)
        if args.weight_decay_end is not None and group["decays"]:
            group["weight_decay"] = common.cosine(step, steps, args.weight_decay,
                                                  args.weight_decay_end)


def wrap(args, model, world_size):
    """The model, compiled with --compile, and wrapped in DDP if there are several ranks."""
    if args.compile:
        # DDP would split a compiled graph at the ends of its buckets. --grad-checkpoint cannot
        # recompute a split graph.
        torch._dynamo.config.optimize_ddp = False
        torch._dynamo.config.cache_size_limit = 128  # for blocks with different drop_path
        for module in model.modules():  # a ViT has Blocks, other encoders are compiled as a whole
            if type(module) in {common.Block, *common.IMAGE_ENCODERS} - {common.ViT}:
                module.compile()
    if world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # All ranks compute equal buffers, because BatchNorm's statistics are of the global batch.
        model.broadcast_buffers = False
    return model


def mixed_precision(args, device):
    """-> a function that returns the autocast context of --amp, the scaler of the loss, and whether
    the encoders run in half precision."""
    is_gpu = device.type == "cuda"
    if is_gpu and not args.amp and not torch.cuda.is_bf16_supported(False):  # not emulated
        args.amp = "fp16"  # config.json records this value
        print("note: this GPU computes no bf16, so --amp is fp16")
    amp = args.amp or ("bf16" if is_gpu else "off")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": torch.float32}[amp]
    autocast = functools.partial(torch.autocast, device.type, dtype, enabled=amp != "off")
    return autocast, torch.amp.GradScaler(device.type, enabled=amp == "fp16"), amp != "off"


def to_device(batch, device):
    return tree_map_only(torch.Tensor, lambda x: x.to(device, non_blocking=True), batch)


# What moves while training -----------------------------------------
#
# A checkpoint holds the whole Progress. So on a CPU a resumed run gives the same bits as a run that
# was never stopped.


@dataclasses.dataclass
class Progress:
    """What changes during training and is saved, beside weights, optimizer and loss scale."""

    data: str = ""  # fingerprint of the data to which the positions and boxes belong
    words: int | None = None  # hash of the vocabulary, if there is one
    seed: int = 0  # --seed, to which the positions also belong
    step: int = 0
    samples: int = 0  # number of samples in all steps; --batch may change on --resume
    stage: int = 1  # number of the stage of the last step
    order: int = 0  # number that is added to --seed for the order of the data; see restore
    positions: dict = dataclasses.field(default_factory=dict)  # {worker: its place in the data}
    boxes: torch.Tensor | None = None  # (n, 4), boxes of crop centres (BAM, App. G)
    record: dict = dataclasses.field(default_factory=dict)  # line of the last logged step

    def due(self, every):
        """Whether an action is due after this step. The action is due once in `every` steps, and
        never if `every` is 0."""
        return every > 0 and self.step % every == 0

    def needs_boxes(self, refreshes):
        """Whether the boxes are computed before this step. They are computed at the steps
        `refreshes`. They are also computed if they are missing after the first of these steps, as
        in a run that is resumed with other data."""
        is_late = len(refreshes) > 0 and self.step > refreshes[0]
        return self.step in refreshes or (is_late and self.boxes is None)

    def check_ranks(self, annotations, scaler):
        """Raise UserError if ranks have different data, vocabularies, labels, steps or dtypes."""
        common.check_ranks({"data": self.data, "a vocabulary with the hash": self.words,
                            "captions, labels or boxes with the hash": annotations,
                            "a last.pt after step": self.step, "fp16": scaler.is_enabled()})

    def advance(self, batch, size):
        self.step += 1
        self.samples += size
        self.positions |= batch["position"]

    def note(self, record):
        """Keep the record of this step for the log. It has the step, the means of all numbers over
        ranks and, if samples were skipped, "skipped": {reason: count over all ranks}. Every rank
        must call this method."""
        ranks = common.gather_objects((record, common.skipped_by(self.positions)))
        records, skipped = zip(*ranks)
        means = {name: sum(x[name] for x in records) / len(records) for name in record}
        means["peak_memory_bytes"] = max(x["peak_memory_bytes"] for x in records)
        counts = {reason: n for reason, (n, _) in common.total_skipped(skipped).items()}
        self.record = {"step": self.step} | means | ({"skipped": counts} if counts else {})

    def state(self, workers):
        """The values that a checkpoint holds. Every rank must call this method."""
        state = vars(self) | {"workers": workers, "part": common.Stream.part}
        cuda_rng = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        local = {"rng": torch.get_rng_state(), "cuda_rng": cuda_rng,
                 "positions": state.pop("positions")}
        return state | {"ranks": common.gather_objects(local)}

    def restore(self, state, workers):
        """Continue from the state of a checkpoint, with the random numbers of this rank.

        The saved positions are invalid if the data, --seed, the number of ranks, the number of
        workers or the number of samples in a message has changed. The data then begin again, in an
        order that the run has not used before.
        """
        rank, world_size = this_rank()
        if state["words"] != self.words:
            raise UserError("vocab.txt has other words than the run: put the old file back.")
        self.step, self.samples = state["step"], state["samples"]
        self.stage, self.order = state["stage"], state["order"]
        self.record = state.get("record", {})  # older checkpoints have no record
        if state["boxes"] is not None and state["data"] == self.data:
            self.boxes = state["boxes"].cpu()
        saved = len(state["ranks"]), *map(state.get, ("workers", "data", "part", "seed"))
        if saved != (world_size, workers, self.data, common.Stream.part, self.seed):
            self.order += self.step
            return print("note: the data, --seed, ranks, workers or the version have changed: the "
                         "data begin again, in another order")
        local = state["ranks"][rank]
        self.positions = local["positions"]
        torch.set_rng_state(local["rng"].cpu())
        if local["cuda_rng"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(local["cuda_rng"].cpu())


def save(args, model, optimizer, scaler, progress, stage_ends=False):
    """Write stage-N.pt at the end of a stage, step-S.pt if --keep-every asks for it, and last.pt.
    Every rank must call this function."""
    state = {"method": args.method, "model": model.state_dict(), "scaler": scaler.state_dict(),
             "optimizer": optimizer.state_dict(), **progress.state(args.workers)}
    names = []
    if stage_ends and progress.step < args.steps:
        names.append(f"stage-{progress.stage}.pt")
    if progress.due(args.keep_every):
        names.append(f"step-{progress.step}.pt")
    names.append("last.pt")  # written last: a run that has last.pt also has the other files
    if this_rank()[0] == 0:
        for name in names:
            common.write_file(Path(args.out, name), state)


def load_state(args, data, model, scaler, progress, device):
    """Restore weights, loss scale and `progress` from --checkpoint -> the whole checkpoint.
    With --epochs, set args.steps to the steps so far plus the steps that the epochs still need.
    Raises UserError if the run has made more than --steps steps. Also raises UserError if the flags
    of this command put the last step into another stage."""
    path = Path(args.out, args.checkpoint)
    state = common.load_checkpoint(path, device)
    common.restore_model(model, state["model"], path, "leave out flags that change the model; "
                         "vocab.txt and config.json must be those of the run")
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    progress.restore(state, args.workers)
    if args.epochs:
        rest = args.epochs * len(data) - progress.samples
        args.steps = progress.step + math.ceil(rest / args.batch)
        check_method(args)
    if args.steps + progress.step and not any(
            number == progress.stage and start < max(1, progress.step) <= end
            for number, start, end, _ in stages_of(args)):
        raise UserError(f"{args.out} has made {progress.step} steps, up to stage {progress.stage}. "
                        "--steps, --epochs, --share-1 contradict this: omit them, or give others.")
    return state


# Slurm, other clusters, a shell and a closed terminal send these signals before they end a process
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
           signal.SIGHUP)
# Ranks ask each other for signals every 2 seconds, and at least every 10 steps.
ASK, ASK_STEPS = 2, 10


class Stop:
    """Notes a signal, so that the run can save and end after its step.

    A signal that is ignored stays ignored, for example SIGHUP under nohup. Only the main thread
    notes signals, because Python allows handlers in no other thread. A second Ctrl-C ends a run of
    one rank at once. It does not end a run of several ranks, because Slurm and torchrun may both
    send a signal for one Ctrl-C. at_once: any signal ends the run at once.
    """

    # Noted if the disk or the last evaluation has failed. The number is above those of all signals.
    FAILED = 10_000

    def __init__(self, at_once=False):
        self.noted, self.error, self.at_once = 0, None, at_once
        self.steps, self.left, self.asked = 1, 1, time.monotonic()
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self.before = {number: signal.signal(number, self.note) for number in numbers
                       if signal.getsignal(number) != signal.SIG_IGN}

    def restore(self):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        again = self.noted and number == signal.SIGINT and not dist.is_initialized()
        if again or self.at_once:
            raise KeyboardInterrupt(number)
        self.noted = max(self.noted, int(number))

    def fail(self, error):
        self.noted, self.error = self.FAILED, str(error)

    def agreed(self, device, is_due):
        """The signal that any rank has noted, or 0. Every rank must call this method after each
        step. The GPUs wait while ranks ask each other. So the ranks ask only after self.steps
        steps, and if is_due. The ranks agree on self.steps, by the clock of the slowest rank."""
        if not dist.is_initialized():
            return self.noted
        self.left -= 1
        if self.left > 0 and not is_due:
            return 0
        now, steps = time.monotonic(), self.steps - max(self.left, 0)
        found = torch.tensor([self.noted, (now - self.asked) / steps], device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        noted, seconds = found.tolist()
        self.asked = now
        self.steps = self.left = max(1, min(ASK_STEPS, int(ASK // max(seconds, 1e-3))))
        return int(noted)


def end_early(args, step, number, stop):
    """Print how to continue a run that a signal stopped, and return the number of the signal.
    Raises UserError if the disk of a rank or the last evaluation has failed."""
    remedy = f"start the same command again with --resume --out {shlex.quote(args.out)}"
    if number == stop.FAILED:
        error = next(filter(None, common.gather_objects(stop.error)))
        raise UserError(f"{error} Step {step} is saved: {remedy}.")
    print(f"Stopped by signal after step {step}: {remedy}")
    return number


class Clock:
    """Measures images per second, and the fraction of time in which the run waits for data."""

    def reset(self):
        self.start, self.waits = self.now(), []

    def now(self):
        """The present time. On a GPU the time is an event in the queue of the GPU, because the CPU
        runs ahead of the GPU."""
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
        unit = 1 if sys.platform == "darwin" else 1024  # bytes in the unit of ru_maxrss
        process_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"images_per_s": len(self.waits) * batch_size / total, "data_share": waited / total,
                "peak_memory_bytes": torch.cuda.max_memory_allocated() or process_memory}


def check_finite(args, step, loss, grad_norm, scaler):
    """Raise UserError if the loss or the gradient is not finite, or if fp16 skips every update.
    A check at logged steps is enough, because weights that are NaN stay NaN."""
    # A gradient in fp16 may overflow. The scaler then skips the update and halves its scale. The
    # scale is 2 ** -100 after more than 100 skipped updates in a row.
    if not torch.isfinite(loss if scaler.is_enabled() else loss + grad_norm):
        raise UserError(f"The loss is {loss.item()}, the gradient's norm is {grad_norm.item()} at "
                        f"step {step}: lower --lr, raise --warmup or change --amp.")
    if scaler.get_scale() < 2.0**-100:
        raise UserError(f"fp16 skipped 100 updates before step {step}: lower --lr or change --amp.")


# Log, evaluation, cost -----------------------------------------
#
# These functions run at some steps only. They do not change the model.


@torch.no_grad()
def measure(args, model, batch, autocast, outputs, grad_norm):
    """The scalars to log for a step: the outputs of the step, the norm of the gradient, and the
    loss of a random guess. Model.diagnose adds scalars that only the log needs."""
    model.eval()
    with autocast():
        scalars = outputs | model.diagnose(batch) | {"grad_norm": grad_norm}
    model.train()
    chance_loss = model.chance_loss(args.batch, batch.get("mask"), model.image_encoder.grid**2)
    return {name: x.item() for name, x in scalars.items()} | {"chance_loss": chance_loss}


def warning(args, data, model, scaler, record):
    """A warning about a logged step, or None. Warnings are about gradients that overflow at any
    loss scale, or about more than a tenth of skipped samples. The method may have other warnings.
    """
    if scaler.get_scale() < 1:
        return ("gradients overflow in fp16, and updates are skipped: if this goes on, nothing is "
                "learned and the run ends")
    skipped = record.get("skipped", {})
    lost, used = sum(skipped.values()), record["step"] * args.batch
    if isinstance(data, common.CaptionTable):  # the start counts all broken rows of a table
        used = max(used, len(data))
    of_method = model.warn(record)
    if of_method or lost <= 0.1 * (lost + used):
        return of_method
    return (f"more than a tenth of the samples are skipped, most of them for this reason: "
            f"{max(skipped, key=skipped.get)} (counts are in log.jsonl)")


def show_first_batch(args, tokenizer, batch):
    """Draw eight samples of the first batch of rank 0 into first-batch.png, as the model reads
    them, but without boxes and queries. The views of an image stand side by side. Print facts about
    the whole batch."""
    if this_rank()[0] > 0:
        return
    views = [view[:8].cpu() for view in batch.get("views") or [batch["images"]]]
    pictures = [evaluation.join([*map(evaluation.to_picture, crops)], gap=2)
                for crops in zip(*views)]
    texts, facts = [("", "")] * len(pictures), f"{args.batch // this_rank()[1]:,} images"
    if "captions" in batch:
        inputs = batch["tokens"], batch["mask"], batch["captions"]
        texts = evaluation.as_read(tokenizer, *inputs)
        facts += describe_captions(tokenizer, *inputs, texts)
    elif "labels" in batch:
        texts = [(text, "") for text in label_texts(batch["labels"][:8].cpu(), args.classes)]
    if left_out := common.skipped_by(batch["position"]):
        facts += f"; left out so far: {common.describe_skipped(left_out)}"
    path = Path(args.out, "first-batch.png")
    path.parent.mkdir(parents=True, exist_ok=True)  # --dry-run has no directory yet
    common.write_file(path, evaluation.sheet_of_samples(pictures, texts, f"First batch: {facts}."))
    print(f"Look at {path}: eight samples as the model reads them. The batch: {facts}.")


def describe_captions(tokenizer, tokens, mask, captions, texts):
    """A phrase about the captions of a batch: their length, and the parts that are not read."""
    n, length = len(captions), int(mask.sum()) - 2 * len(captions)  # without [CLS] and [SEP]
    unknown = int((tokens == tokenizer.unk).sum()) / max(1, length)
    cut, again = sum(bool(cut) for _, cut in texts) / n, 1 - len(set(captions)) / n
    return (f", captions of {length / n:.1f} tokens; {unknown:.0%} of the tokens are [UNK], "
            f"{cut:.0%} of the captions are cut, {again:.0%} repeat another. First caption: "
            f"{captions[0]!r}")


def label_texts(labels, classes):
    """Labels (B,) -> names. Shares of classes (B, C), from MixUp or CutMix -> names with shares."""
    if labels.ndim == 1:
        return [classes[label] for label in labels]
    return [", ".join(f"{row[c]:.2f} {classes[c]}" for c in row.nonzero()[:, 0]) for row in labels]


def evaluate_unnoticed(args, embedder, eval_data, step):
    """The metrics of --eval-every. The main metrics are printed. A model with neither captions nor
    classes is evaluated by k-NN alone, because a linear probe takes long. The random numbers of the
    training do not change."""
    tasks = evaluation.default_tasks(eval_data, embedder.model)
    options = evaluation.options_of({"task": "knn"} if "knn" in tasks else {}, args)
    devices = [embedder.device] if embedder.device.type == "cuda" else []
    embedder.model.eval()
    with torch.random.fork_rng(devices):
        metrics = evaluation.evaluate(embedder, eval_data, options)
    embedder.model.train()
    names = [name for name in metrics if "/" not in name or name.endswith("R@1")]
    print(f"step {step}:", ", ".join(f"{name} {metrics[name]:.3f}" for name in names))
    return metrics


def end_step(args, data, embedder, eval_data, log, progress, scaler):
    """Evaluate after a logged step if an evaluation is due, then write the line of the step. If a
    killed run has not written the line, the resumed run calls this function. Every rank must call
    it."""
    record = progress.record
    if progress.due(args.eval_every) and record["step"] == progress.step:
        record = record | evaluate_unnoticed(args, embedder, eval_data, progress.step)
    if this_rank()[0] == 0:
        log.write(record, warning(args, data, embedder.model, scaler, record))


def finish(args, embedder, eval_data, progress):
    """Print which samples all ranks skipped, evaluate on all ranks, draw on rank 0, and print where
    the results are. Returns a message for each task that failed and for each file that could not
    be written. Every rank must call this function."""
    every_rank = common.gather_objects(common.skipped_by(progress.positions))
    if skipped := common.describe_skipped(common.total_skipped(every_rank)):
        print(f"skipped {skipped}")
    failed = []
    if eval_data is None:
        try:
            eval_data = open_evaluation(args, embedder.model)
        except UserError as error:
            print(f"note: {error}")
    # if one rank has no data, no rank evaluates, because the other ranks would wait for this rank
    if all(common.gather_objects(eval_data is not None)):
        print(f"Evaluation on {evaluation.describe(eval_data.options)}, in fp32:")
        embedder.model.eval()
        embedder.step = progress.step
        evaluation.evaluate_and_show(embedder, eval_data, eval_data.options, args.out, failed)
    run, data = shlex.quote(args.out), "" if eval_data else " --data DATA"
    print(f"{args.out} holds the weights, the log and the pictures. To train longer, repeat this "
          f"command with --resume --out {run} and more --steps. Next: python eval.py {run}{data}")
    common.wait_for_rank_0()  # all ranks end together
    return common.gather_objects(failed)[0]


@torch.no_grad()
def dry_run(args, method, model):
    """Print what the settings cost, as JSON. A multiply-add is 2 FLOPs."""
    model.eval()  # in training mode BatchNorm would gather CPU tensors of several GPUs
    batch = made_up_batch(args, method, model, 2)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch, lambda x: x)  # `gather` of a rank alone
    flops = counter.get_total_flops() / 2
    chance_loss = model.chance_loss(args.batch, batch.get("mask"), model.image_encoder.grid**2)
    words = {"vocab_size": model.text_encoder.vocab_size} if method.uses_text(args) else {}
    # a backward pass costs two forward passes; a teacher has none
    hours = args.batch * args.steps * 3 * flops / H100 / 3600
    record = {"params": sum(p.numel() for p in model.parameters()), **words,
              "flops_per_sample": int(flops), "h100_hours": round(hours, 2),
              "chance_loss": chance_loss}
    print(json.dumps(common.without_nan(record)))


def bench(args, clock, step):
    """Whether --bench ends after this step. After the last step the rates are printed as JSON. The
    clock starts after the first BENCH_WARMUP steps."""
    if step == BENCH_WARMUP:
        clock.reset()
    if step < BENCH_WARMUP + args.bench:
        return False
    print(json.dumps(clock.rates(args.batch)))
    return True


def made_up_batch(args, method, model, n):
    """A random batch of n images, as the method reads them: in views, with labels, with boxes, or
    with captions of full length."""
    views = method.views(args)
    if views:
        return {"views": [torch.randn(n, 3, view["size"], view["size"]) for view in views]}
    images = {"images": torch.randint(256, (n, 3, args.image_size, args.image_size)).byte()}
    if method.content(args) == "label":
        return images | {"labels": torch.randint(len(args.classes), (n,))}
    text, texts = model.text_encoder, n
    if method.content(args) == "boxes":  # an image has one box, and 50 classes are queries
        texts, is_asked = 50, torch.ones(n, 50, dtype=torch.bool)
        images |= {"asked": is_asked, "boxes": torch.rand(n, 1, 4), "classes": is_asked[:, None]}
    return images | {"tokens": torch.randint(text.vocab_size, (texts, text.context)),
                     "mask": torch.ones(texts, text.context, dtype=torch.bool)}


# Main -----------------------------------------
#
# One rank of each machine prints an error of the user, as one sentence. A signal stops the training
# after the present step (see Stop). The program then ends by this signal.


@common.without_tf32()
def main(argv=None):
    """Train as the command line says -> the signal that stopped the run, or None."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    device = common.init_distributed()
    with common.rank_0_prints(), claim_run(args) as out:
        stopped_by = train(args, out, device)
    if dist.is_initialized():  # not reached after an error, as NCCL would wait for other ranks
        dist.destroy_process_group()
    return stopped_by


if __name__ == "__main__":
    common.prepare_output()
    try:
        stopped_by = main()
    except KeyboardInterrupt as error:
        stopped_by = next(iter(error.args), signal.SIGINT)
    except Exception as error:
        common.let_rank_0_speak()
        if isinstance(error, UserError):
            sys.exit(f"error: {error}")
        raise
    finally:  # Python would wait for ever, because the workers ignore its SIGTERM
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # keeps torch from an error for each worker
        for worker in multiprocessing.active_children():
            worker.kill()
    if stopped_by:  # end by the signal, so that a shell and Slurm see the signal
        sys.stdout.flush()
        signal.signal(stopped_by, signal.SIG_DFL)
        os.kill(os.getpid(), stopped_by)
