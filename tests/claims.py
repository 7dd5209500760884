"""Which claims of the papers hold for small models on small data.

    python tests/claims.py                 # writes tests/RESULTS.md, the tables of all claims
    python tests/claims.py NAME            # prints one group of claims
    python tests/claims.py NAME --again    # prints the commands for all figures that are missing
    python tests/claims.py NAME --costs    # measures what the trainings of the group cost

NAME is a group of claims-runs.json: `methods` has the table of all methods, `readme` the claims
with five seeds or more, `photos` the claim on photos of CIFAR-10 with captions. Earlier code made
the figures of the others: `photos-earlier` has CIFAR-10 without captions, `sparo`, `stair`,
`sparc` and `bam` have more claims of one paper each, `detection` fine-tunes runs of `readme`.

Words
    claim    Run A is above run B in a metric. claims-runs.json has all claims.
    run      A training with fixed flags of train.py, repeated with several seeds.
    rate     The learning rate of a run. Several rates are tried, and the best one is used.
    figure   The value of one metric, for one run with one rate and one seed. claims.json has the
             figures, with the revision that trained the run.

Columns of the table
    claim: A above B     The claim. "..." stands for the beginning of the row above.
    source               The table, figure or section of the paper.
    in the paper         The paper's values of A and B.
    TFLOPs               What a training of A and of B costs, forward and backward, by torch's
                         counter. Each stage of STAIR counts as much as the first.
    here                 Means ± standard deviations of A and B over the seeds, on the test split.
    untrained            The same metric of A's network before training: the zero of the row.
    difference by seed   A - B for each seed.
    95 % interval        The interval of the mean difference, by Student's t. The interval of a
                         share may end above 1.
    verdict              "holds", "reversed", "not shown" or "not decided", by the rule above the
                         tables; n is the number of seeds. "A did not train" says that A is not
                         above its untrained network. "not run yet" says that figures are missing.
                         A reason follows if a claim does not hold and a reason is known.

Below a table
    Learning rates       The rate of each run. "not swept" says that only one rate was tried. "as
                         NAME" says that the rate of the run NAME is used. "at the edge of its
                         sweep" says that the lowest or the highest rate was best, so that a better
                         one may lie outside.
    NAME                 What a run is, if its name does not tell.
    other sentences      Facts that concern many rows, and what else was found out.

To measure what is missing, run in the project's directory (two commands at a time, four rounds):

    for i in 1 2 3 4 5; do python tests/claims.py sparc --again | xargs -P 2 -I{} sh -c {}; done

--again first stores in claims.json the figures of all runs in runs/claims. Then it prints commands.
The first round trains each run with all its rates, and the second evaluates them on the val split.
The third round trains the best rate with the other seeds, and the fourth evaluates on the test
split. The fifth call only stores the figures. Then write RESULTS.md.
If a preset changes, delete its records in claims.json and its directories in runs/claims.

To add a claim, add its runs and the claim to claims-runs.json, then run the loop above.
A group has "title", "seeds", "rate_seeds" (for the choice of a rate; by default 0), "notes", and
"left_out": true if RESULTS.md leaves it out: its figures are missing, or earlier code made them:

    "runs": {NAME: a run}
        flags     flags of train.py. {seed} stands for the seed. --finetune names the directory of a
                  run of this group or another: runs/claims/GROUP/NAME-RATE-{seed}
        repeats   in place of flags: another run, whose trainings are used with a rate of its own
        rate_by   the metric whose best mean on the val split chooses the rate, or the name of the
                  run whose rate is used
        rates     the rates to try, by default RATES. A single rate is used as it is.
        seeds     the seeds, by default those of the group
        about     what the run is, printed below the table
    "table": {"rows": {label: run}, "columns": {heading: {metric: names of runs}}}
        a table of all runs side by side, if the group has one; its metrics are those of the test
        split, and a run that a column does not name has no such metric. Its first columns are
        COSTS, for which the machine must be quiet
    "plots": [{"title", "runs": {label: run}, "metrics": {heading: metric}}]
        a bar for the mean of each run, in each metric
    "claims": [a claim]
        claim     the claim as a sentence
        source    the table, figure or section of the paper
        paper     the paper's values of A and B, in the units of the figures here; "" if the paper
                  makes no such claim
        runs      the names of A and B
        metrics   a metric, or one for A and one for B
        why_not   the reason if the claim does not hold here
        untrained the name of a run with rate 0, which is A before training
        seeds     the seeds of this claim, if not all that A and B have
        budget    what A and B have in common, if it is not the number of images

A metric may have flags of eval.py, as in "zeroshot [--limit 10000]". Without flags, or without
"flags" in claims.json, it is evaluated with the run's own options.

Claims about photos need CIFAR-10 in class folders, cifar10/train and cifar10/test:

    from pathlib import Path
    from torchvision.datasets import CIFAR10
    for part in ("train", "test"):
        photos = CIFAR10("data", train=part == "train", download=True)
        for i, (image, label) in enumerate(photos):
            file = Path("cifar10", part, photos.classes[label], f"{i}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file)

--again links a tenth of cifar10/train in cifar10/val, and the others in cifar10/fit. Runs named
-fit train on fit, and val chooses their rates. --again also makes four shards of train and four of
fit, with captions. The recorded figures used 2,000 training images and 200 test images of each
class.
"""

import argparse
import collections
import contextlib
import io
import json
import math
import random
import re
import sys
import tarfile
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))

import common
import eval as evaluation
import train

RECORDS = Path(__file__).with_suffix(".json")
RESULTS = Path(__file__).with_name("RESULTS.md")
TABLES = json.loads(Path(__file__).with_name("claims-runs.json").read_text("utf-8"))
PLACE = "run", "rate", "seed", "split", "metric", "flags"  # what identifies a figure
METRIC = re.compile(r"(\S+)(?: \[(.+?)\])?")  # -> (name of the metric, flags of eval.py or "")
TASK_OF = {"i2t": "retrieval", "t2i": "retrieval", "faithfulness": "retrieval",
           "active": "sparsity", "miou": "segmentation",
           "miou_fg": "segmentation"}  # the other metrics have the name of their task
# {metric: (column, format)} of the costs in a group's "table"; an update of STAIR is one of stage 1
COSTS = {"parameters": ("parameters, M", "{:.2f}"),
         "flops": ("TFLOPs of an update", "{:.3f}"),
         "minutes": ("minutes of a CPU core", "{:.1f}")}
RATES = (0.0005, 0.001, 0.002)  # the learning rates to try, if a run names no others
# captions of photos, for make_shards
CAPTIONS = ("a photo of {}.", "a blurry photo of {}.", "a close-up of {}.",
            "a small picture of {}.", "{} in a low resolution photo.")


def key_of(record):
    """Return what identifies a record, as a tuple of strings."""
    return tuple(str(record.get(name, "")) for name in ("method", *PLACE))


def read_records():
    """Return claims.json as {key: record}."""
    return {key_of(record): record for record in json.loads(RECORDS.read_text("utf-8"))}


def add_records(found):
    """Write records to claims.json. They replace records with the same key."""
    records = read_records() | {key_of(record): record for record in found}
    lines = [json.dumps(records[key], ensure_ascii=False) for key in sorted(records)]
    with common.replacing(RECORDS) as file:
        file.write("[\n{}\n]\n".format(",\n".join(lines)).encode())


def trained(method, name):
    """Return the run whose trainings are used (itself, or the run that it repeats), its rates."""
    runs = TABLES[method]["runs"]
    name = runs[name].get("repeats", name)
    return name, runs[name].get("rates", RATES)


def rate_of(method, name, figure):
    """Return the learning rate that is best on the val split, or None if a figure is missing."""
    base, rates = trained(method, name)
    if len(rates) == 1:
        return rates[0]
    rate_by = TABLES[method]["runs"][name]["rate_by"]
    if rate_by in TABLES[method]["runs"]:
        return rate_of(method, rate_by, figure)
    metric, seeds = METRIC.match(rate_by).groups(""), TABLES[method].get("rate_seeds", [0])
    scores = {rate: [figure(base, rate, seed, "val", *metric) for seed in seeds] for rate in rates}
    if any(None in values for values in scores.values()):
        return None
    return max(scores, key=lambda rate: mean(scores[rate]))


def seeds_of(method, names):
    """Return the seeds that all of these runs have."""
    table = TABLES[method]
    seeds = [table["runs"][trained(method, name)[0]].get("seeds", table["seeds"]) for name in names]
    return [seed for seed in seeds[0] if all(seed in others for others in seeds)]


def values_of(method, name, metric, figure, seeds):
    """Return the values of a run in a metric by seed, or None if one is missing."""
    rate, (base, _) = rate_of(method, name, figure), trained(method, name)
    if rate is None:
        return None
    place = METRIC.match(metric).groups("")
    values = [figure(base, rate, seed, "test", *place) for seed in seeds]
    return None if None in values else values


def compare(method, claim, figure):
    """Compare A and B of a claim, or return None if a figure of A or B is missing.

    Return {"greater": figures of A, "smaller": of B, "untrained": of A's untrained network, or None
    if the claim names none or a figure is missing}, by seed.
    figure(run, rate, seed, split, metric, flags="") returns a number, or None if it is missing.
    """
    names, metrics = claim["runs"].split(), [x[0] for x in METRIC.finditer(claim["metrics"])] * 2
    seeds = claim.get("seeds") or seeds_of(method, names)
    sides = {side: values_of(method, name, metric, figure, seeds)
             for side, name, metric in zip(("greater", "smaller"), names, metrics)}
    is_known, idle = None not in sides.values(), None
    if "untrained" in claim:
        own = [seed for seed in seeds if seed in seeds_of(method, [claim["untrained"]])]
        idle = values_of(method, claim["untrained"], metrics[0], figure, own)
    return sides | {"untrained": idle or None} if is_known else None


RULE = ("A claim holds (is reversed) if the mean difference of n >= 5 seeds is above (below) 0 by "
        "more than t(.975, n - 1) standard errors; else it is not shown; with fewer seeds it is "
        "not decided. By chance alone 1 claim in 40 holds, and 1 is reversed.")


# {n: the 97.5 % quantile of Student's t with n - 1 degrees of freedom}
QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306,
             10: 2.262}


def interval(differences):
    """The 95 % interval of the mean of n differences (Student's t), or None if n is below 2."""
    n = len(differences)
    if n < 2:
        return None
    # for n above 10, the first terms of a series in 1 / (n - 1), with an error below .001
    quantile = QUANTILES.get(n, 1.960 + 2.372 / (n - 1) + 2.822 / (n - 1) ** 2 + 2.6 / (n - 1) ** 3)
    half = quantile * np.std(differences, ddof=1) / n**0.5
    return mean(differences) - half, mean(differences) + half


def verdict(differences):
    """Return the verdict of RULE."""
    n = len(differences)
    if n < 5:
        return f"not decided (n = {n})" if n else "not decided"
    low, high = interval(differences)
    kind = "holds" if low > 0 else "reversed" if high < 0 else "not shown"  # nan: not shown
    return f"{kind} (n = {n})"


def spread(values):
    """Values by seed -> "mean ± standard deviation"."""
    deviation = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{deviation}"


def cells(found, why_not=None):
    """Return a row's cells "here", "untrained", "difference by seed", "95 % interval", "verdict".

    found: what compare() returned.
    """
    if found is None:
        return "", "", "", "", "not run yet"
    sides, untrained = {"A": found["greater"], "B": found["smaller"]}, found["untrained"]
    differences = [a - b for a, b in zip(*sides.values())]
    between = interval(differences)
    between = f"{between[0]:+.3f} to {between[1]:+.3f}" if between else ""
    zero = mean(untrained) if untrained else -math.inf
    idle = [name for name, values in sides.items() if mean(values) <= zero]
    holds = f"{' and '.join(idle)} did not train" if idle else verdict(differences)
    holds += f": {why_not}" if why_not and not holds.startswith("holds") else ""
    return (", ".join(map(spread, sides.values())), spread(untrained) if untrained else "",
            " ".join(f"{x:+.3f}" for x in differences), between, holds)


def side_by_side(method, figure):
    """Return {column: {run: its values by seed, or None if a figure is missing}} of the group's
    "table"."""
    return {heading: {name: values_of(method, name, metric, figure, seeds_of(method, [name]))
                      for metric, names in metrics.items() for name in names.split()}
            for heading, metrics in TABLES[method]["table"]["columns"].items()}


def lines_of_plots(method, figure):
    """Return the lines of the group's "plots": a bar for each run, as long as its mean."""
    lines = []
    for plot in TABLES[method].get("plots", ()):
        lines += [f"**{plot['title']}**", "", "```"]
        for heading, metric in plot["metrics"].items():
            values = {label: values_of(method, name, metric, figure, seeds_of(method, [name]))
                      for label, name in plot["runs"].items()}
            largest = max([mean(x) for x in values.values() if x], default=1)
            lines.append(heading)
            for label, x in values.items():
                bar = f"{spread(x):18}{'█' * round(40 * mean(x) / largest)}" if x else "not run yet"
                lines.append(f"    {label:18}{bar}")
        lines += ["```", ""]
    return lines


def lines_side_by_side(method, figure):
    """Return the lines of the group's "table": a row for each method, a column for each metric. A
    column's largest mean is bold if verdict() says that the largest is above the second largest,
    and if all its figures are of one metric."""
    found, lines = side_by_side(method, figure), []
    best = {}  # {column: the run with the bold mean}
    for heading, values in found.items():
        if len(TABLES[method]["table"]["columns"][heading]) > 1:
            continue
        measured = {name: x for name, x in values.items() if x}
        first, second, *_ = [*sorted(measured, key=lambda name: -mean(measured[name])), "", ""]
        if second and measured.keys() == values.keys():
            differences = [a - b for a, b in zip(measured[first], measured[second])]
            best[heading] = first if verdict(differences).startswith("holds") else None
    heads = ["", *(column for column, _ in COSTS.values()), *found]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for label, name in TABLES[method]["table"]["rows"].items():
        row = [label]
        for metric, (_, form) in COSTS.items():
            cost = figure(name, "", "", "", metric)
            row.append("–" if cost is None else form.format(cost))
        for heading, values in found.items():
            cell = spread(values[name]) if values.get(name) else "not run yet"
            cell = f"**{cell}**" if best.get(heading) == name else cell
            row.append(cell if name in values else "–")
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


def measure_costs(method):
    """Measure what a training of each run costs, and store it in claims.json. For a group with a
    table these are COSTS, for other groups the FLOPs of the runs in its claims. A run that
    fine-tunes another is left out.

    The FLOPs are those of the forward and the backward pass, by torch's counter, as a mean over
    the first updates. The minutes are those of all updates, without the evaluation.
    """
    found, table = [], TABLES[method].get("table")
    of_claims = [name for claim in TABLES[method]["claims"] for name in claim["runs"].split()]
    names = table["rows"].values() if table else [trained(method, name)[0] for name in of_claims]
    for name in dict.fromkeys(names):
        flags = TABLES[method]["runs"][name]["flags"].split()
        if "--finetune" in flags:
            continue
        args, cost = train.parse_args(flags), {}
        if args.epochs:
            images = len(common.open_data(args.data, content=None))
            args.steps = math.ceil(args.epochs * images / args.batch)
        if table:
            cost["parameters"] = last_line(flags, "--dry-run")["params"] / 1e6
        if args.steps > 1:  # else the network stays untrained
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                last_line(flags, "--bench", "1")
            cost["flops"] = counter.get_total_flops() / (train.BENCH_WARMUP + 1) / 1e12
            cost["training"] = args.steps * cost["flops"]
        if table and args.steps > 1:
            images_per_s = last_line(flags, "--bench", "20")["images_per_s"]
            cost["minutes"] = args.steps * args.batch / images_per_s / 60
        found += [{"method": method, "run": name, "metric": metric, "value": value,
                   "torch": torch.__version__, "threads": torch.get_num_threads()}
                  for metric, value in cost.items()]
        add_records(found)


def last_line(flags, *more):
    """Run train.py with these flags -> the last line that it prints, which is JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        train.main([*flags, *more])
    return json.loads(printed.getvalue().splitlines()[-1])


HEADER = ("claim: A above B", "source", "in the paper", "TFLOPs", "here", "untrained",
          "difference by seed", "95 % interval", "verdict")
HEADINGS = "What the paper claims", "What we asked in addition"


def tflops(method, claim, figure):
    """The TFLOPs of a training of A and of B, "12, 34", or "" if one was not measured."""
    names = [trained(method, name)[0] for name in claim["runs"].split()]
    costs = [figure(name, "", "", "", "training") for name in names]
    return "" if None in costs else ", ".join(f"{cost:.3g}" for cost in costs)


def lines_of(method):
    """Return the lines of a group of claims: its tables, rates and notes, as Markdown."""
    records, table = read_records(), TABLES[method]

    def figure(*place):
        """Return a recorded figure, or None."""
        return records.get(key_of({"method": method} | dict(zip(PLACE, place))), {}).get("value")

    lines = lines_side_by_side(method, figure) if "table" in table else []
    for heading, is_paper in zip(HEADINGS, (True, False)):
        claims = [claim for claim in table["claims"] if bool(claim["paper"]) == is_paper]
        if claims:
            lines += [f"**{heading}**", "", f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
        for claim in claims:
            row = cells(compare(method, claim, figure), claim.get("why_not"))
            cost = tflops(method, claim, figure)
            row = claim["claim"], claim["source"], claim["paper"], cost, *row
            lines.append(f"| {' | '.join(row)} |")
        lines += [""] if claims else []
    lines += lines_of_plots(method, figure)
    chosen = []
    for name, run in table["runs"].items():
        rate, (_, rates) = rate_of(method, name, figure), trained(method, name)
        remark = ""
        if len(rates) == 1:
            remark = " (not swept)"
        elif run["rate_by"] in table["runs"]:
            remark = f" (as {run['rate_by']})"
        elif rate in (rates[0], rates[-1]):
            remark = " (at the edge of its sweep)"
        chosen += [f"{name} {rate}{remark}"] if rate else []
    tried = ", ".join(map(str, table.get("rate_seeds", [0])))
    lines += [f"* Learning rates, chosen on the val split with seed {tried}, from {RATES} or from "
              f"the run's own rates: {', '.join(chosen) or 'none yet'}.",
              *[f"* {note}" for note in table["notes"]]]
    lines += [f"* `{name}`: {run['about']}" for name, run in table["runs"].items() if "about" in run]
    return [*lines, ""]


DEPARTURES = (
    "Most runs use the preset `tiny`, which departs from the papers. SPARC keeps normalised "
    "similarities of at least .9, gives its fine-grained loss the weight .1, and has a skip "
    "connection in its patch head h_v. STAIR trains with AdamW, and passes gradients to words of "
    "the caption that have weight 0. BAM has no teacher and no ContrastiveCrop.")


def results():
    """Return the text of tests/RESULTS.md."""
    _, _, columns = __doc__.partition("Columns of the table\n")
    columns = columns.partition("\n\n")[0].rstrip()
    parts = ["# Results\n", "`python tests/claims.py` writes this file from tests/claims.json, the "
             "record of all figures.\n", DEPARTURES + "\n", RULE + "\n", f"```\n{columns}\n```\n"]
    for method, table in TABLES.items():
        if not table.get("left_out"):
            parts += [f"## {table['title']}\n", *lines_of(method)]
    return "\n".join(parts)


def check_run(out, config, flags):
    """Raise UserError if a run has other flags, or if its preset has changed since."""
    argv = config.get("argv", [])
    preset = evaluation.METHODS[config["method"]].PRESETS[config["preset"]]
    given = {flag[2:].replace("-", "_") for flag in flags if flag.startswith("--")}
    given |= {"image_encoder"} if "finetune" in given else set()  # the encoder is that run's
    given |= {"steps"} if "epochs" in given else set()
    stale = [name for name in preset.keys() - given if config.get(name) != preset[name]]
    if argv[1:-4] != flags or stale:  # the last four are --out OUT --resume auto
        raise common.UserError(f"{out} was not trained with {' '.join(flags)}, or the preset has "
                               f"changed since: remove the directory.")


def last_figure(out, config, metric, flags):
    """Return a metric from the last line of evals.jsonl with these flags of eval.py, or None.

    All other options must be the run's own, except --task. An older line may lack an option that
    was added later. Then the option counts as the run's own.
    """
    _, given = evaluation.parse_args([str(out), *flags.split()])
    given |= {"data": given["data"][0]} if "data" in given else {}
    run = argparse.Namespace(**config)
    own = evaluation.metric_options(evaluation.options_of({}, run))
    wanted = evaluation.metric_options(evaluation.options_of(given, run))
    del wanted["task"]
    path, value = out / "evals.jsonl", None
    for line in path.read_text().splitlines() if path.exists() else []:
        record = json.loads(line)
        settings = own | record["settings"]
        if settings | wanted == settings:
            value = record.get(metric, value)
    return value


def make_shards(root, part, prefix):
    """Write four shards, ROOT/<prefix>00000.tar and so on, from ROOT/PART/CLASS/i.png.

    The shards have at most 2,000 images of each class. Each line of claims-classes.txt is the name
    of a class in the captions. The lines have the order of the folders.
    """
    rng, samples = random.Random(0), []
    names = common.read_lines(Path(__file__).with_name("claims-classes.txt"), "--classes")
    for folder, name in zip(sorted(Path(root, part).iterdir()), names):
        samples += [(path, name) for path in sorted(folder.iterdir())[:2000]]
    rng.shuffle(samples)
    for shard in range(4):
        with tarfile.open(Path(root, f"{prefix}{shard:05}.tar"), "w") as tar:
            for i, (path, name) in enumerate(samples[shard::4]):
                caption = rng.choice(CAPTIONS).format(common.article(name))
                for suffix, data in ((".png", path.read_bytes()), (".txt", caption.encode())):
                    member = tarfile.TarInfo(f"{i:06}{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def hold_out(root):
    """Link a random tenth of ROOT/train/CLASS in ROOT/val/CLASS, the others in ROOT/fit/CLASS."""
    for folder in Path(root, "train").iterdir():
        images = sorted(folder.iterdir())
        held = set(random.Random(0).sample(images, len(images) // 10))
        for image in images:
            link = Path(root, "val" if image in held else "fit", folder.name, image.name)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(image.resolve())


def train_again(method):
    """Store the figures of runs/claims in claims.json, and print commands for what is missing."""
    if Path("cifar10/train").is_dir():
        if not Path("cifar10/val").exists():
            hold_out("cifar10")
        for part, prefix in (("train", ""), ("fit", "fit-")):
            if not Path(f"cifar10/{prefix}00000.tar").exists():
                make_shards("cifar10", part, prefix)
    records, found = read_records(), []
    missing = collections.defaultdict(dict)  # {directory of a run: its commands, each once}

    def place_of(group, name, rate, seed):
        """Return the directory of a run, and its flags of train.py."""
        given = f"{TABLES[group]['runs'][name]['flags']} --lr {rate} --seed {seed}"
        return Path("runs/claims", group, f"{name}-{rate}-{seed}"), given.format(seed=seed)

    def note_training(group, name, rate, seed):
        """Note the command that trains a run, and before it the run that it fine-tunes, if any."""
        out, given = place_of(group, name, rate, seed)
        start = re.search(r"--finetune runs/claims/(\S+)/(\S+)", given)
        if start and not Path("runs/claims", *start.groups(), "eval.json").exists():
            return note_training(start[1], *start[2].rsplit("-", 2))  # a later round fine-tunes it
        missing[out][f"python train.py {given} --out {out} --resume auto"] = None

    def figure(name, rate, seed, split, metric, flags=""):
        """Return a figure from its run or its record, or note the command that measures it."""
        place = dict(zip(PLACE, (name, rate, seed, split, metric, flags)))
        out, given = place_of(method, name, rate, seed)
        record = records.get(key_of({"method": method} | place))
        if not (out / "eval.json").exists():
            return record["value"] if record else note_training(method, name, rate, seed)
        config = common.read_config(out)
        check_run(out, config, given.split())
        of = "" if config["eval_data"] else f"--split {split} "  # folders have no splits
        value, task = last_figure(out, config, metric, of + flags), metric.split("/")[0]
        if value is None and record:
            return record["value"]
        if value is None:
            task = TASK_OF.get(task, task)
            missing[out][f"python eval.py {out} {of}--task {task} {flags}".strip()] = None
        else:
            place = {name: x for name, x in place.items() if x != ""}
            found.append({"method": method, **place, "value": value, "commit": config["git"],
                          "torch": config.get("torch"), "threads": config.get("threads")})
        return value

    if "table" in TABLES[method]:
        side_by_side(method, figure)
    lines_of_plots(method, figure)  # notes what is missing
    for claim in TABLES[method]["claims"]:
        compare(method, claim, figure)
    add_records(found)
    for commands in missing.values():
        print(" && ".join(commands))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=TABLES, nargs="?", help="a group of claims")
    parser.add_argument("--again", action="store_true", help="print commands for what is missing")
    parser.add_argument("--costs", action="store_true", help="measure the costs of the table")
    args = parser.parse_args(argv)
    if (args.again or args.costs) and not args.method:
        parser.error("--again and --costs need the name of a group of claims")
    if args.again:
        train_again(args.method)
    elif args.costs:
        measure_costs(args.method)
    elif args.method:
        print("\n".join(lines_of(args.method)))
    else:
        RESULTS.write_text(results(), "utf-8")


if __name__ == "__main__":
    common.prepare_output()
    try:
        main()
    except common.UserError as error:
        sys.exit(f"error: {error}")
