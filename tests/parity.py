"""Check that this code trains as the authors' code does, step for step.

The script trains two networks from equal weights on equal batches, on the CPU: the authors' network
by their own train_one_epoch, and ours by train() of train.py. Clone the authors' code, install what
it needs, and run one of the last four commands:

    git clone https://github.com/ankitkv/sparo-clip ../sparo; git -C ../sparo checkout 6621a31
    git clone https://github.com/DanielShalam/BAM ../BAM; git -C ../BAM checkout fd85871
    git clone https://github.com/facebookresearch/dino ../dino; git -C ../dino checkout 7c446df
    git clone https://github.com/facebookresearch/moco-v3 ../moco; git -C ../moco checkout c349e6e
    pip install ftfy regex timm             # sparo needs ftfy and regex, bam and moco need timm
    python tests/parity.py sparo ../sparo
    python tests/parity.py bam ../BAM
    python tests/parity.py dino ../dino
    python tests/parity.py moco ../moco

What is printed: a row for each model, in float64 and in float32
    parameters         the number of trained numbers: the authors' = ours
    loss               the authors' loss in the first and in the last step
    losses differ by   the largest relative difference between the two losses of a step
    gradient norms     the same for the norm of the gradient, before it is clipped
Differences in float64 are rounding errors, below 1e-13. Those in float32 are larger.

What is replaced at run time, and why. The authors' files stay as they are.
  * .cuda() and torch.cuda.synchronize do nothing, because the script uses no GPU.
  * Functions of torch.distributed answer for one process, because there is no group of processes.
  * The modules wandb and diffdist are empty: nothing is logged, and nothing is gathered.
  * BAM's masking_fn is None (no top-k), because the authors' code reads it and never sets it.
  * BAM's loss is built without build_from_args, which passes ot_reg, an argument that BAMLoss
    lacks. BAM's Block gets only the arguments that it has.
  * train() gets its model, its batches and its parameter groups from here. The groups are the
    authors', because this project lets other parameters decay.
  * MoCo-v3's code finds the functions of timm that have moved, and an empty tensorboard.
  * DINO's gradient is clipped by the authors' function, for each parameter by itself. This project
    clips the norm over all parameters.

What is not compared, because it differs on purpose: BatchNorm in BAM's head, the warm-up of BAM,
DINO and MoCo-v3, the last learning rate of BAM and DINO, and DINO's small views.
"""

import copy
import functools
import os
import sys
from importlib.util import find_spec
from types import SimpleNamespace

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for a GPU
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
from torch import distributed, nn

import common
import train

VIEWS = ("--image-size 32 --readout cls --steps 40 --bench 37 --warmup 0 --weight-decay .04 --lr "
         "1e-4 --beta2 .999 --adam-eps 1e-8 --image-encoder tiny-patch:cls=1")
FLAGS = {  # of train.py; --bench N ends a run after 3 + N steps, without an evaluation
    "sparo": "--method sparo --image-encoder clip-b32:patch_size=8,width=128,depth=3,heads=2 "
             "--image-size 32 --steps 60 --bench 57 --warmup 6 --weight-decay .5 --clip-grad 0",
    "bam": f"--method bam {VIEWS},positions=sincos --weight-decay-end .4 --clip-grad .3"
           " --no-batch-norm",
    "dino": f"--method sparo --objective dino {VIEWS} --weight-decay-end .4 --clip-grad .03"
            " --freeze-last 10",
    "moco": f"--method bam --target moco {VIEWS},positions=sincos --clip-grad 0 --teacher --ema .9"
            " --tau .2 --local-crops 0 --projector-width 256 --projector-dim 64"}
AS_GIVEN = {"mean": torch.zeros(3, 1, 1), "std": torch.ones(3, 1, 1)}  # no normalisation of pixels
# {NAME: {printed row: its further flags}}
ROWS = {"sparo": {"SPARO": "--readout sparo", "CLIP": "--readout cls", "CLIP+GAP": "--readout gap"},
        "bam": {"BAM without a teacher": "--no-teacher", "BAM with the teacher": "--teacher"},
        "dino": {"DINO": ""}, "moco": {"MoCo-v3": ""}}


def sparo(args, batches):
    """Return the authors' network, ours with its weights, and two functions.

    groups(network) gives the authors' parameter groups. The last function trains their network.
    """
    import open_clip
    from training import scheduler, train as official
    slots, gap = args.readout == "sparo", args.readout == "gap"
    vision = dict(image_size=32, patch_size=8, width=128, layers=3, global_average_pool=gap)
    text = dict(context_length=32, vocab_size=64, width=128, layers=2, heads=4)
    theirs = open_clip.CLIP(args.embed_dim, vision, text, output_dict=True, use_sparo=slots,
                            L=args.L, V=args.V, sparo_attn_dim=args.D, reduce_depth=int(slots))
    encoders = common.build_encoders(train.METHODS["sparo"], args, tokenizer=range(64))
    state = {name: x for name, x in theirs.state_dict().items() if "sparo" not in name}
    parts = common.load_clip(encoders, state, tokenizer=None)
    encoders[0].pixels.load_state_dict(AS_GIVEN)
    ours = common.build_model(train.METHODS["sparo"], args, *encoders)
    common.load_clip_parts(ours, parts)
    if slots:
        copy_weights(ours.image_readout, theirs.visual.sparo)
        copy_weights(ours.text_readout, theirs.text_sparo)
    if gap:
        ours.image_readout.proj[1].weight.data.copy_(parts["visual.proj"].T)
        ours.text_readout.proj.weight.data.copy_(parts["text_projection"].T)

    def groups(network):  # as the authors' main() has them: matrices decay, [CLS] is a vector
        decay = [x for x in network.parameters() if x.squeeze().dim() > 1]
        rest = [x for x in network.parameters() if x.squeeze().dim() < 2]
        return dict(params=decay, weight_decay=args.weight_decay), dict(params=rest, weight_decay=0)

    optimizer = torch.optim.AdamW(groups(theirs), betas=(0.9, args.beta2), eps=args.adam_eps)
    schedule = scheduler.cosine_lr(optimizer, args.lr, args.warmup, args.steps)
    loader = torch.utils.data.DataLoader([(x["images"], x["tokens"]) for x in batches], None)
    loader.num_batches, loader.num_samples = args.steps, 1
    data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
    settings = SimpleNamespace(device="cpu", precision="fp32", distill=False, accum_freq=1,
                               skip_scheduler=False, grad_clip_norm=None, rank=1)
    return theirs, ours, groups, lambda: official.train_one_epoch(
        theirs, data, open_clip.ClipLoss(), 0, optimizer, None, schedule, None, settings)


def bam(args, batches):
    """Return what sparo() returns, for BAM."""
    import main_pretrain as official
    import utils
    from models import vit
    backbone = vit.ViT(img_size=32, patch_size=8, embed_dim=96, depth=2, num_heads=3, num_classes=0,
                       dynamic_img_size=True, block_fn=lambda dim, num_heads, **others: vit.Block(
                           dim, num_heads, qkv_bias=True, norm_layer=others["norm_layer"]))
    head = official.MlpProjHead(96, 3, 1024, 1024, use_bn=False, activation="gelu")
    theirs, kind = official.MultiCropWrapper(backbone, head), official.BAMLoss
    ours, loader, optimizer, (*schedules, momenta) = start(args, batches, utils, backbone, head)
    ours.image_encoder.patch_embed.requires_grad_(False)  # as the authors have it
    if args.teacher:
        theirs = official.StudentTeacherWrapper(theirs, copy.deepcopy(theirs), momenta)
        kind = official.DistillBAMLoss
    loss = kind(4, 2, 2, [args.tau_b], args.tau, args.sinkhorn_iters)
    loss.masking_fn = None
    return theirs, ours, utils.get_params_groups, lambda: official.train_one_epoch(
        theirs, loss, loader, optimizer, *schedules, 0, utils.AmpScalerWrapper(enable=False), args)


def dino(args, batches):
    """Return what sparo() returns, for DINO."""
    import main_dino as official
    import utils
    student, teacher = [utils.MultiCropWrapper(
        official.vits.VisionTransformer([32], 8, embed_dim=96, depth=2, num_heads=3, qkv_bias=True,
                                        norm_layer=lambda width: nn.LayerNorm(width, eps=1e-6)),
        official.DINOHead(96, 1024, hidden_dim=256, bottleneck_dim=64)) for _ in range(2)]
    teacher.requires_grad_(False).load_state_dict(student.state_dict())
    ours, loader, optimizer, schedules = start(args, batches, utils, student.backbone, student.head)
    train.clip_grad_norm_ = lambda _, norm: utils.clip_gradients(ours, norm)
    loss = official.DINOLoss(1024, 4, args.teacher_temp, args.teacher_temp, 0, 4)
    settings = SimpleNamespace(epochs=4, clip_grad=args.clip_grad, freeze_last_layer=1)
    both = nn.ModuleList([nn.DataParallel(student), teacher])
    return both, ours, utils.get_params_groups, lambda: [official.train_one_epoch(
        *both, teacher, loss, loader[10 * epoch:][:10], optimizer, *schedules, epoch, None,
        settings) for epoch in range(4)]


def moco(args, batches):
    """Return what sparo() returns, for MoCo-v3."""
    import timm.layers.helpers
    from timm.models.vision_transformer import VisionTransformer
    sys.modules |= {"timm.models.layers.helpers": timm.layers.helpers,
                    "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=None)}
    VisionTransformer.num_tokens = 1  # timm's new name is num_prefix_tokens
    import main_moco as official
    theirs = official.moco.builder.MoCo_ViT(lambda num_classes: official.vits.VisionTransformerMoCo(
        stop_grad_conv1=True, img_size=32, patch_size=8, embed_dim=96, depth=2, num_heads=3,
        qkv_bias=True, norm_layer=functools.partial(nn.LayerNorm, eps=1e-6),
        num_classes=num_classes), args.projector_dim, args.projector_width, args.tau)
    encoder, _ = common.build_encoders(train.METHODS["bam"], args, None)
    ours = common.build_model(train.METHODS["bam"], args, encoder, None)
    state = {name: x for name, x in theirs.base_encoder.state_dict().items() if "head." not in name}
    for encoder, projector in (ours.student(), ours.teacher):
        common.load_encoder(encoder, state, common.TIMM_NAMES, "")
        encoder.pixels.load_state_dict(AS_GIVEN)
        copy_weights(projector, theirs.base_encoder.head)
    copy_weights(ours.predictor, theirs.predictor)
    for batch in batches:
        del batch["views"][2:]

    def groups(network):
        trained = [x for x in network.parameters() if x.requires_grad]
        return dict(params=trained, weight_decay=args.weight_decay), dict(params=[], weight_decay=0)

    optimizer = torch.optim.AdamW(theirs.parameters(), weight_decay=args.weight_decay)
    settings = SimpleNamespace(lr=args.lr, warmup_epochs=0, epochs=4, moco_m=args.ema, gpu=None,
                               moco_m_cos=True, rank=1, print_freq=10)
    loader = [(batch["views"], None) for batch in batches]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return theirs, ours, groups, lambda: [
        official.train(loader[10 * epoch:][:10], theirs, optimizer, scaler, None, epoch, settings)
        for epoch in range(4)]


def start(args, batches, utils, vit, head):
    """Return our model with the weights of the authors' ViT and head.

    Return also the authors' batches, their optimizer, and their schedules of rate, decay, momentum.
    """
    encoder, _ = common.build_encoders(train.METHODS[args.method], args, None)
    common.load_encoder(encoder, vit.state_dict(), common.TIMM_NAMES, "")
    encoder.pixels.load_state_dict(AS_GIVEN)
    ours = common.build_model(train.METHODS[args.method], args, encoder, None)
    for network in filter(None, (ours.student(), ours.teacher)):
        copy_weights(network[-1], head)
    ends = (args.lr, 0), (args.weight_decay, args.weight_decay_end), (args.ema, 1)
    schedules = [utils.cosine_scheduler(*pair, 4, args.steps // 4) for pair in ends]
    optimizer = torch.optim.AdamW(utils.get_params_groups(nn.ModuleList([vit, head])))
    return ours, [(batch["views"], None) for batch in batches], optimizer, schedules


def copy_weights(ours, theirs):
    """Copy the trained parameters of the authors' module into ours, in the order of both."""
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(trained), ours.parameters())


def make_batch(args, dtype):
    """Return 24 images of coloured squares, four noisy views of each, and captions.

    Token 63 ends a caption.
    """
    images = nn.Upsample(scale_factor=8)(2 * torch.randn(24, 3, 4, 4, dtype=dtype))
    views = [images + torch.randn_like(images) for _ in range(4)]
    if args.method == "bam":
        views[2:] = [view[..., ::2, ::2] for view in views[2:]]
    last = torch.randint(4, 32, (24, 1))
    tokens = torch.randint(1, 63, (24, 32)).masked_fill(torch.arange(32) > last, 0)
    tokens.scatter_(1, last, 63)  # OpenCLIP takes the largest id for the end of a text
    return dict(images=images, tokens=tokens, mask=tokens > 0, views=views, position={}, skipped={})


def watch(network, run, backward=torch.Tensor.backward):
    """Return (steps, 3) of a training: loss, norm of the gradient, and number of its entries.

    The norm is measured after the backward pass, before the gradient is clipped.
    """

    def measured(loss):
        """Compute the gradients, and record the step."""
        backward(loss)
        gradients = [x.grad for x in network.parameters() if x.grad is not None]
        norm, count = nn.utils.get_total_norm(gradients), sum(x.numel() for x in gradients)
        record.append([loss.item(), norm.item(), count])
    record, torch.Tensor.backward = [], measured
    run()
    return torch.tensor(record, dtype=torch.float64)


OFFICIAL = {  # {NAME: (function above, repository, commit, one of its files, packages it needs)}
    "sparo": (sparo, "ankitkv/sparo-clip", "6621a31", "scripts/train_codebook.sh", "ftfy regex"),
    "bam": (bam, "DanielShalam/BAM", "fd85871", "bam/bam_loss.py", "timm"),
    "dino": (dino, "facebookresearch/dino", "7c446df", "main_dino.py", ""),
    "moco": (moco, "facebookresearch/moco-v3", "c349e6e", "main_moco.py", "timm")}

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in OFFICIAL:
        sys.exit("usage: python tests/parity.py NAME PATH\nNAME is sparo, bam, dino or moco, PATH "
                 "is a clone of the authors' code. The top of tests/parity.py has all commands.")
    name, path = sys.argv[1:]
    build, repository, commit, file, packages = OFFICIAL[name]
    if not os.path.exists(f"{path}/{file}"):
        sys.exit(f"{path} is no clone of https://github.com/{repository} at {commit}: clone the "
                 f"repository and check out this commit.")
    if missing := [package for package in packages.split() if not find_spec(package)]:
        sys.exit(f"{repository} needs packages that are missing: pip install {' '.join(missing)}")
    rows = [train.parse_args(f"{FLAGS[name]} {more}".split()) for more in ROWS[name].values()]
    torch.Tensor.cuda = lambda tensor, *args, **settings: tensor
    torch.cuda.synchronize = distributed.all_reduce = lambda *args, **settings: None
    distributed.get_world_size, distributed.get_rank = lambda: 1, lambda: 0
    distributed.all_gather = lambda rows, x, async_op: rows[0].copy_(x)
    sys.modules |= {"wandb": SimpleNamespace(run=None), "diffdist": SimpleNamespace()}
    del sys.modules["bam"]  # the authors have a package of this name
    sys.path[:0] = [path, path + "/src"]
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # the authors' code prints its progress
    print("what | steps | dtype | parameters | loss | losses differ by | gradient norms", file=out)
    for what, args in zip(ROWS[name], rows):
        for dtype in (torch.float64, torch.float32):
            torch.manual_seed(0)
            batches = [make_batch(args, dtype) for _ in range(4)] * (args.steps // 4)
            theirs, ours, groups, run = build(args, batches)
            a = watch(theirs.to(dtype), run)
            decay, rest = groups(ours.to(dtype))
            common.param_groups = lambda *_: [decay | {"decays": True}, rest | {"decays": False}]
            train.new_model, train.build_tokenizer = lambda *_: ours, lambda *_: None
            train.open_loader = lambda *_: iter(batches)
            b = watch(ours, lambda: train.train(args, None, torch.device("cpu")))
            loss, norm, _ = ((a - b).abs() / a).amax(0).tolist()
            print(f"{what} | {len(a)} | {str(dtype)[6:]} | {a[0, 2]:,.0f} = {b[0, 2]:,.0f} | "
                  f"{a[0, 0]:.2f} to {a[-1, 0]:.2g} | {loss:.1e} | {norm:.1e}", file=out)
