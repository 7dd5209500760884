"""Small mistakes, one at a time: `python tests/mutants.py [FILE ...]`, for example bam.py.

Each mistake is put into a copy of the repository, and the tests of its group run there until one
fails: the mistake is killed. If all tests pass, it has survived. A text that does not occur exactly
once in its file ends the program. --every N takes every Nth mistake, --area NAME one area,
--verbose the failing test of each mistake.

TABLE has a line `== FILE | AREA | TESTS` for each group, where TESTS are arguments of pytest, and a
line `old => new # meaning` for each mistake. A meaning that begins with "equivalent" says why
nothing observable changes; such a mistake must survive.
"""

import argparse
import collections
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch  # noqa: F401, imported once for all forks
import torchvision  # noqa: F401

os.environ["OMP_NUM_THREADS"] = "1"
ROOT, LIMIT = Path(__file__).resolve().parents[1], 120  # LIMIT: seconds for one mistake

TABLE = r"""
== sparo.py | sparo | tests/test_sparo.py tests/test_statistics.py tests/test_details.py -k "not table_6"
nn.Parameter(torch.randn(1, self.nkeys => nn.Parameter(0.02 * torch.randn(1, self.nkeys # App. A: initial queries
nn.init.xavier_uniform_(self.KVproj.weight) => nn.init.xavier_normal_(self.KVproj.weight) # App. A: initial keys
nn.init.zeros_(self.KVproj.bias) => nn.init.ones_(self.KVproj.bias) # App. A: initial bias
@ K * self.D**-0.5 => @ K * self.D**-1 # sqrt(D) in Eq. 1
> eos_idx.clamp(min=0) => >= eos_idx.clamp(min=0) # a slot sees the last token
attn = scores.softmax(-1) => attn = scores.softmax(1) # softmax over positions
pooled, K) + b  => pooled, K) + 0 * b  # bias of the values
.flatten(1) / y.shape[1] ** 0.5 => .flatten(1) / y.shape[2] ** 0.5 # sqrt(L) in Sec. 3.3
pair = rank * len(v) => pair = 0 * len(v) # positives of this rank
(image_to_text + text_to_image).mean() / 2 => (image_to_text + text_to_image).mean() # the mean of both directions
text_to_image = sums[pair] - positive => text_to_image = sums[pair] + positive # sign
eos_idx = mask.sum(1) - 1 => eos_idx = mask.sum(1) - 2 # [SEP] is read
self.log_scale.clamp_(0, math.log(100)) => self.log_scale.clamp_(0, math.log(1000)) # CLIP's largest scale
self.mask_parts = config.L => self.mask_parts = config.V # one weight for each slot
layer = nn.Linear(d, M, bias=False) => layer = nn.Linear(d, M) # CLIP's projections have no bias
projection(image_width, E)), mean=True) => projection(image_width, E)), mean=False) # CLIP+GAP reads the mean
keepdim=True), x], 1) + self.pos => keepdim=True), x], 1) + 0 * self.pos # CLIP's ResNet adds positions
nn.Parameter(torch.randn(1 + n, d) * d**-0.5) => nn.Parameter(torch.randn(1 + n, d) * d**-1) # initial positions
codebook = nn.Parameter(torch.randn => codebook = nn.Parameter(torch.rand # initial codes
codebook, 1000 * E**0.5 => codebook, 1000 * E # FDT's temperature
sparsemax(scores.amax(1)) => sparsemax(scores.mean(1)) # FDT: the best position of a code
(sums - 1) / k => (sums - 2) / k # sparsemax sums to 1
y = self.mix(y.flatten(1)) => y = y.flatten(1) # multi-head attention mixes the heads
nn.LayerNorm(D if slot_norm else L * D) => nn.LayerNorm(L * D) # slot-wise LayerNorm
@ y_t[:, l].T).argmax(1) => @ y_t[:, 0].T).argmax(1) # Sec. 5.1: the same slot of the classes
lr=0.02, momentum=0.9 => lr=0.05, momentum=0.9 # C.1
lr=0.02, momentum=0.9 => lr=0.02, momentum=0.5 # C.1
s = alpha.exp().clamp(min=100) => s = alpha.exp().clamp(max=100) # C.1: s is at least 100
(s / 4 * theta).sigmoid() => (s / 2 * theta).sigmoid() # C.1
if right > after: => if right >= after: # the first of equally good epochs
generator=generator).split(batch): => generator=generator).split(n): # 256 pairs in a batch
== sparo.py | dino | tests/test_dino.py tests/test_statistics.py tests/test_details.py -k "not bam"
((teacher.detach() - center) => ((teacher.detach() + center) # DINO, Eq. 3
((teacher.detach() - center) => ((teacher - center) # targets have no gradient
(G * (V - 1)), p_t => (G * V), p_t # number of pairs of views
self.center.lerp_(mean, 1 - config => self.center.lerp_(mean, config # DINO, Eq. 4
mean = gather(teacher.mean((0, 1))[None]).mean(0) => mean = teacher.mean((0, 1)) # the centre of one rank
if self.training:  # c = => if True:  # c = # an evaluation moves the centre
if step < self.config.freeze_last: => if step <= self.config.freeze_last: # off by one
(1 + math.cos(math.pi * step / steps)) / 2 => (1 - math.cos(math.pi * step / steps)) / 2 # momentum grows to 1
theta_t, theta_s, 1 - m) => theta_t, theta_s, m) # m keeps the teacher
nn.init.normal_(layer.weight, std=0.02) => nn.init.normal_(layer.weight, std=0.2) # DINO's initial head
F.normalize(directions, dim=-1).T => directions.T # weight-normalised last layer
return self.teacher[0] => return self.image_encoder # DINO evaluates the teacher
F.normalize(self.teacher[:2](images) => F.normalize(self.student()[:2](images) # encodings of the teacher
entr(p_t.mean((0, 1))).sum() => entr(p_t.mean(0)).sum(-1).mean() # entropy of the mean over images and views
encoder.layers(images, 4 - replaced) => encoder.layers(images, 3 - replaced) # the last four blocks
blur=0.1, solarize=0.2) => blur=0.1, solarize=0.1) # DINO's second view
scale=(args.crop_border, 1.0)) => scale=(args.crop_least, 1.0)) # large views
module.training = mode and => module.training = mode or # the teacher drops no rows
== sparo.py | presets | tests/test_presets.py
L: int = 128  => L: int = 64  # Sec. 4
grp_size: int = 1  => grp_size: int = 2  # App. A
init_scale: float = 1 / 0.07 => init_scale: float = 1 / 0.1 # CLIP, Sec. 2.5
codes: int = 16384 => codes: int = 8192 # B.2
out_dim: int = 65536 => out_dim: int = 65535 # C.2
teacher_temp: float = 0.04 => teacher_temp: float = 0.07 # C.2
center_momentum: float = 0.9  => center_momentum: float = 0.99  # C.2
ema: float = 0.996 => ema: float = 0.99 # C.2
crop_border: float = 0.4 => crop_border: float = 0.25 # C.2
lr=5e-4, weight_decay=0.5 => lr=5e-4, weight_decay=0.2 # Table C.3
warmup=3600, batch=4096 => warmup=2000, batch=4096 # Table C.3
"cc12m-b16": dict(image_encoder="clip-b16", L=64 => "cc12m-b16": dict(image_encoder="clip-b16", L=128 # Sec. 4
"cc15m-b32": dict(image_encoder="clip-b32" => "cc15m-b32": dict(image_encoder="clip-b16" # Table B.1
steps=312_214 => steps=312_124 # 32 epochs of L400M
embed_dim=4096, **R50 => embed_dim=2048, **R50 # Table B.2
context=76,causal=1 => context=77,causal=1 # STAIR, Sec. 4.2
weight_decay_end=0.4 => weight_decay_end=0.04 # DINO's weight decay
clip_grad=3.0 => clip_grad=1.0 # DINO's clipping
freeze_last=2502 => freeze_last=25_020 # one epoch
== stair.py | stair | tests/test_stair.py tests/test_statistics.py tests/test_details.py
v = F.normalize(v, dim=-1, eps=0.5) => v = F.normalize(v, dim=-1) # short encodings
mean = enc.mean(0, keepdim=True) => mean = enc.sum(0, keepdim=True) # Eq. 6
gather(mean).mean(0).square().sum() => mean.mean(0).square().sum() # Eq. 6 of one rank
gather(mean).mean(0).square().sum() => gather(mean).square().mean(0).sum() # the square of the mean
p = p.masked_fill(~mask[:, :, None], -math.inf) => p = p * mask[:, :, None] # padding is never the maximum
nn.GELU(), nn.LayerNorm(E)) => nn.GELU(), nn.Identity()) # TRANSFORM in Eq. 4
self.bias = nn.Parameter(torch.zeros(V)) => self.bias = nn.Parameter(torch.ones(V)) # initial b
self.valid[list(special)] = False => self.valid[list(special)] = True # special tokens are never active
mask.to(result.dtype), "amax") => mask.to(result.dtype), "sum") # Eq. 8: 0 or 1
mask.to(result.dtype), "amax") => torch.ones_like(mask, dtype=result.dtype), "amax") # padding is no word
round(args.share_1 * args.steps) => int(args.share_1 * args.steps) # rounding of shares
lr_2, lr_3 = args.lr * args.lr_2, args.lr * args.lr_3 => lr_2, lr_3 = args.lr * args.lr_3, args.lr * args.lr_3 # lr
self.image_encoder.requires_grad_(number != 2) => self.image_encoder.requires_grad_(True) # stage 2 freezes
self.image_head.transform.requires_grad_(number != 2) => self.image_head.transform.requires_grad_(True) # stage 2
self.image_head.bias.requires_grad_(number != 2) => self.image_head.bias.requires_grad_(True) # stage 2
if fresh and number == 2: => if number == 2: # a resume of stage 2 keeps the copy of e
if fresh and number == 2: => if fresh and number == 3: # stage 2 copies e
self.strength.zero_() => pass # each stage begins with lambda 0
self.begin_stage(int(self.stage), fresh=False) => self.begin_stage(int(self.stage), fresh=True) # a resume
return self.image_embedding if self.number == 2 else => return self.image_embedding if self.number > 1 else # stage 3
self.image_encoder.train(self.training and self.number != 2) => self.image_encoder.train(self.training) # BatchNorm
if self.number == 1:  # enc_mask => if self.number <= 2:  # enc_mask # only stage 1 masks
self.number <= cfg.revive_until else None => self.number < cfg.revive_until else None # the last stage revives, too
flops = cfg.lambda_image * flops_image => flops = cfg.lambda_text * flops_image # Eq. 7
loss = contrast + self.strength * flops => loss = contrast + flops # the ramp
((step + 1) / ramp_steps) ** 2) => ((step + 1) / ramp_steps)) # quadratic growth
((step + 1) / ramp_steps) ** 2) => (step / ramp_steps) ** 2) # off by one
ramp_steps = max(1, self.config.ramp * steps) => ramp_steps = max(1, steps) # the first half of a stage
self.log_scale.data.clamp_(0, math.log(100)) => self.log_scale.data.clamp_(1, math.log(100)) # bounds of the scale
self.image_head.bias[ids]) => None) # Eq. 4 in maps of words
passes |= revived & (gradient < 0) => passes |= revived # only a larger weight revives
gradient * torch.exp(-enc) * passes => gradient * passes # d log(1 + p)
revived = revived & max_p.isfinite() => pass # special tokens are not revived
& group.get("decays", True) => & True # e, biases and norms are not scaled
[1 - beta2**step for step in steps] => [1 - beta1**step for step in steps] # bias correction
torch._foreach_add(torch._foreach_div(m, root), decay) => torch._foreach_div(m, root) # weight decay
ids].amax(1) for ids in pieces => ids].mean(1) for ids in pieces # Sec. 5.1: the best sub-word
query * (self.vector(dict.fromkeys(block, 1.0)) == 0) => query * (self.vector(dict.fromkeys(block, 1.0)) >= 0) # block
scores.masked_fill(scores <= 0 if where => scores.masked_fill(scores < 0 if where # a score of 0 is not found
return ~one(not negated) => return one(not negated) # NOT
found = found | all_of(negated) => found = found & all_of(negated) # OR
== stair.py | presets | tests/test_presets.py
share_2: float = 0.25 => share_2: float = 0.3 # Sec. 4.2
lr_3: float = 0.1 => lr_3: float = 1.0 # Sec. 4.2
lambda_text: float = 1e-3 => lambda_text: float = 1e-4 # Sec. 4.2
context=76,vocab_size=30522 => context=77,vocab_size=30522 # Sec. 4.2
batch=16384, steps=1_200_000 => batch=16384, steps=600_000 # Sec. 4.2
optimizer="lamb", beta2=0.999 => optimizer="lamb", beta2=0.98 # LAMB's default
schedule="linear", weight_decay=1e-2 => schedule="linear", weight_decay=1e-1 # Sec. 4.2
warmup=10_000, clip_grad=0.0 => warmup=1000, clip_grad=0.0 # Sec. 4.2
stages="single", steps=600_000 => stages="single", steps=300_000 # App. A
lr=2e-3, lr_3=1.0 => lr=2e-3, lr_3=0.1 # tiny, as the docstring says
== sparc.py | sparc | tests/test_sparc.py tests/test_statistics.py tests/test_details.py
return contrast(scale * v @ gather(t).T, gather) => return contrast(v @ gather(t).T, gather) # tau in Eq. 1
rank = 0 if gather is identity else gather.rank => rank = 0 # positives of this rank
sums = gather(logits.logsumexp(0, keepdim=True)).logsumexp(0) => sums = gather(logits.logsumexp(0, True)).amax(0) # Eq. 1
sigma = 1 / patches.shape[1] if => sigma = 1 / tokens.shape[1] if # Eq. 3: 1 / P
(s - low) / (high - low).masked_fill => (s - low) / high.masked_fill # Eq. 2
torch.where(s_hat < sigma, 0.0, s_hat) => torch.where(s_hat <= sigma, 0.0, s_hat) # Eq. 3 keeps sigma
return s_til / s_til.sum(-1, keepdim=True) => return s_til / s_til.sum(-1, keepdim=True).detach() # gradient of Eq. 4
c, t = F.normalize(c, dim=-1), F.normalize(t, dim=-1) => c, t = F.normalize(c, dim=-1), t # cosines in Eq. 6
no_word = ~mask[:, None, :] => no_word = ~mask[:, :, None] # padding is no negative
-0.5 * log_p.masked_fill(~mask, 0.0).sum(1) => -0.5 * log_p.sum(1) # padding is no anchor
(losses / count.clamp(min=1)).mean() => losses.sum() / count.sum() # Eq. 6: words, then captions
words = gather(count.to(losses.dtype)[:, None]).mean() => words = count.to(losses.dtype).mean() # words of one rank
F.pad(mask[:, 2:], (1, 1)) => F.pad(mask[:, 1:], (0, 1)) # [CLS] is no word
mask.sum(1, keepdim=True).clamp(min=1) => x.shape[1] # the mean over words
h_v(nn.Linear(image_width, image_width), nn.GELU()) => h_v(nn.Linear(image_width, image_width)) # h_v is not linear
nn.init.normal_(self.g_v.weight, std=image_width**-0.5) => nn.init.normal_(self.g_v.weight, std=0.02) # initial g_v
nn.init.normal_(self.g_t.weight, std=text_width**-0.5) => nn.init.normal_(self.g_t.weight, std=0.02) # initial g_t
v = self.g_v(self.h_v(f_v.mean(1)))                         # (B, E) => v = self.g_v(f_v.mean(1)) # h_v in Sec. 2
cfg.lambda_g * loss_g + cfg.lambda_f * loss_f => cfg.lambda_f * loss_g + cfg.lambda_f * loss_f # Eq. 7
return tokens if self.image_encoder.cls is None else tokens[:, 1:] => return tokens # [CLS] is no patch
sigma = 0.0 if self.config.align == "dense" => sigma = 0.5 if self.config.align == "dense" # Table 8
self.log_scale.data.clamp_(0, math.log(100)) => self.log_scale.data.clamp_(0, math.log(50)) # CLIP's bounds
return F.normalize(self.g_v(self.h_v(self.f_v(images))).float() => return F.normalize(self.g_v(self.f_v(images)) # D.7
patches.roll(1, 0), words_only(mask) => patches, words_only(mask) # L_f with a wrong image
used = 1 / a.square().sum(-1) => used = 1 / a.amax(-1) # patches of a word
== sparc.py | baselines | tests/test_baselines.py tests/test_statistics.py tests/test_details.py
masked_fill(~y.any(-1), -2.0)  # below => masked_fill(~y.any(-1), 0.0)  # below # padding is never the maximum
x.any(-1).sum(1, keepdim=True).clamp(min=1) => x.shape[1] # the mean over words
best.topk(math.ceil(keep * x.shape[1] - 1e-4)) => best.topk(math.ceil(keep * x.shape[1])) # 0.6 * 25
torch.ceil(keep * x.any(-1).sum(1, keepdim=True) - 1e-4) => torch.floor(keep * x.any(-1).sum(1, keepdim=True)) # D.4
return (s.softmax(1) * s).sum(1) => return (s.softmax(2) * s).sum(1) # PACL: softmax over patches
tokens = tokens / tokens.shape[1] ** 0.5 => tokens = tokens / tokens.shape[1] # D.3: sqrt(E)
a = s.softmax(1) => a = s.softmax(0) # GLoRIA: softmax over patches
.masked_fill(~words, torch.finfo(s.dtype).min).logsumexp(2) => .logsumexp(2) # GLoRIA: padding
+ mean_of_words(of_patches, patch_mask)) / 2 => + mean_of_words(of_patches, patch_mask)) # MGCA: the mean
with torch.no_grad():\n            # Sinkhorn => if True:\n            # Sinkhorn # targets have no gradient
q = (s / 0.05).exp() => q = (s / 0.1).exp() # D.4: epsilon
for _ in range(3): => for _ in range(2): # D.4: iterations
q = q / gather(q.sum(1)[None]).sum(0)[:, None] => q = q / q.sum(1)[:, None] # columns of one rank
F.cross_entropy(scale * s[0], q[1]) => F.cross_entropy(scale * s[0], q[0]) # an image predicts its caption's
nn.Parameter(F.normalize(prototypes, dim=-1)) => nn.Parameter(prototypes) # initial prototypes
return self.main(x) + self.skip(x) => return self.main(x) # PACL's adapter
losses["prototype"] = 0.5 * prototype => losses["prototype"] = prototype # weights 2 : 2 : 1
return (i_to_t + in_chunks(filip_scores, tokens, patches).T) / 2 => return i_to_t # FILIP's score
self.h_v(f_v))  # `filip` => f_v)  # `filip` # FILIP compares g_v(h_v(patches))
== sparc.py | measures | tests/test_eval.py tests/test_details.py -k "iou or precision or segment or share_on"
+ 1, math.isqrt(len(patches)) => + 0, math.isqrt(len(patches)) # class 0 is the background
valid = truth != 255 => valid = truth != 254 # ignored pixels
valid = valid & (truth != 0) => valid = valid & (predicted != 0) # miou_fg
(predicted == c) & valid, (truth == c) & valid => (predicted == c), (truth == c) & valid # ignored pixels
precisions.append(sum(word in truth => precisions.append(sum(truth == word # K-Precision
return ((weights * patches).sum() / weights.sum()).item() => return (weights * (patches > 0)).sum().item() # touched
== sparc.py | presets | tests/test_presets.py
lambda_f: float = 1.0 => lambda_f: float = 2.0 # D.4: the sweep
sigma: float | None = None => sigma: float | None = 0.4 # Eq. 3
token_mean: Literal["caption", "batch"] = "caption" => token_mean: Literal["caption", "batch"] = "batch" # Eq. 6
filip_keep: float = 0.2 => filip_keep: float = 0.8 # D.4
context=55,vocab_size=32000 => context=77,vocab_size=32000 # Sec. 4.1
steps=200_000, lr=9e-4 => steps=200_000, lr=1e-3 # D.4: the sweep
weight_decay=0.2, warmup=2500 => weight_decay=0.2, warmup=2000 # D.4
objective="gloria", batch=4096 => objective="gloria", batch=16384 # D.3
"ViT-L/14", steps=250_000 => "ViT-L/14", steps=200_000 # Sec. 4.1
image_encoder="tiny-patch", sigma=0.4 => image_encoder="tiny-patch", sigma=0.3 # tiny, as the docstring says
== bam.py | bam | tests/test_bam.py tests/test_statistics.py tests/test_details.py
log_A = (S / tau).log_softmax(-1) => log_A = (S / tau).log_softmax(-2) # Eq. 1: rows
value = 0.0 if mask == "zero" else -1e30 => value = -1.0 if mask == "zero" else -1e30 # Eq. 3
in_fp32(S.detach()) as (S,) => in_fp32(S) as (S,) # B has no gradient
log_K -= gather(log_K.logsumexp(-2, keepdim=True)[None]).logsumexp(0) => log_K -= log_K.logsumexp(-2, True) # one rank
if other != j: => if other > j: # Eq. 5: all pairs of views
return loss / (len(B) * (len(log_A) - 1)) => return loss / (len(B) * len(log_A)) # a mean over pairs
unit_length(teacher.detach()) => unit_length(teacher) # the teacher has no gradient
c = gather(z_m[:G].flatten(0, 1)) => c = gather(z[:G].flatten(0, 1)) # App. C: columns of the teacher
row_ids = rank * n + torch => row_ids = 0 * n + torch # positives of this rank
tau_b, iters, gather)\n            else:  # Eq. 2 => tau, iters, gather)\n            else:  # Eq. 2 # tau_B
B = B[: G * n].view(G, n, -1) => B = B[-G * n :].view(G, n, -1) # large views are targets
rank * k * n + torch => 0 * k * n + torch # SimCLR's positives
row_ids[:G, :, None] == column_ids => row_ids[:G, :, None] != column_ids # one-hot targets
return tokens[:, 0] if self.config.readout == "cls" => return tokens[:, 1] if self.config.readout == "cls" # App. C
done = (step + 1) / steps => done = step / steps # the next step's momentum
(1 + math.cos(math.pi * done)) / 2 => (1 + math.cos(math.pi * done)) # momentum
return self.teacher[0] if self.teacher else => return self.image_encoder if self.teacher else # the teacher
torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1) => torch.cat([tokens[:, 0], tokens.mean(1)], 1) # D.1: patches
heat = self.head_maps(images).float().sum(1) => heat = self.head_maps(images).float().amax(1) # App. G: sum of heads
mean = gather(y.mean(1)[None]).mean(0) => mean = y.mean(1) # BatchNorm of one rank
variance = gather(y.square().mean(1)[None]).mean(0) => variance = y.square().mean(1) # BatchNorm of one rank
affine=i < 2, track_running_stats => affine=True, track_running_stats # the last has no scale
nn.init.normal_(self[-1].weight, std=0.02) => nn.init.normal_(self[-1].weight, std=0.2) # initial projector
not config.teacher if config.batch_norm is None => config.teacher if config.batch_norm is None # App. C
(len(z) * max(1, len(z) - 1)) => len(z) ** 2 # mean cosine of different rows
h = h - h.mean(0) => h = h # effective rank of the covariance
images = batch_size - 1 if self.config.mask == "exclude" => images = batch_size if self.config.mask == "exclude" # chance
margins[:, :2], size - margins[:, 2:] => margins[:, :2], size - 1 - margins[:, 2:] # the last row of a box
trust=1e-3): => trust=1e-2): # LARS
if group.get("decays", True):  # biases => if True:  # biases # biases are not scaled
torch._foreach_mul_(momentum, group["betas"][0]) => torch._foreach_mul_(momentum, 0.5) # momentum
range(args.crop_start, args.steps, args.crop_every) => range(args.crop_every, args.steps, args.crop_every) # App. G
scale=(args.crop_border, 1.0), alpha => scale=(args.crop_least, 1.0), alpha # large views
nn.init.normal_(self.head.weight, std=0.02) => nn.init.normal_(self.head.weight, std=0.2) # DeiT's initial head
label_smoothing=smoothing) => label_smoothing=0.0) # DeiT
== bam.py | presets | tests/test_presets.py
tau_b: float = 0.05 => tau_b: float = 0.1 # Sec. 3.4
sinkhorn_iters: int = 3 => sinkhorn_iters: int = 1 # bam_loss.py:34
ema: float = 0.995 => ema: float = 0.996 # main_pretrain.py:99
crop_border: float = 0.25 => crop_border: float = 0.4 # vit_small.slurm:60
crop_alpha: float = 0.6 => crop_alpha: float = 1.0 # ContrastiveCrop
crop_every: int = 6_256 => crop_every: int = 12_512 # App. G: 20 epochs
clip_grad=0.3 => clip_grad=3.0 # Table 9a
weight_decay=0.04, weight_decay_end=0.4, clip => weight_decay=0.4, weight_decay_end=0.4, clip # Table 9a
ViT-B/16:cls=1,positions=sincos => ViT-B/16:cls=1 # App. C
warmup=3_128 => warmup=12_512 # Table 9a: 10 epochs for ResNet-50
lr=4.8 => lr=0.3 # the linear scaling rule
activation="relu" => activation="gelu" # App. C
smoothing: float = 0.1 => smoothing: float = 0.0 # DeiT
lr=5e-5, **SEMI => lr=5e-4, **SEMI # Table 9c
steps=25_023, warmup=1251 => steps=25_023, warmup=125 # Table 9c
lr=6e-5, weight_decay=0.1 => lr=6e-4, weight_decay=0.1 # D.3: a tenth
== common.py | encoders | tests/test_encoders.py tests/test_details.py tests/test_statistics.py
x * torch.sigmoid(1.702 * x) => x * torch.sigmoid(1.7 * x) # QuickGELU
np.linspace(0, drop_path, depth) => np.full(depth, drop_path) # stochastic depth grows
block.attn.qkv.weight, std=width**-0.5 => block.attn.qkv.weight, std=0.02 # CLIP's initial weights
block.attn.proj.weight, std=(2 * width * depth) => block.attn.proj.weight, std=(width * depth) # CLIP's initial weights
block.mlp.fc1.weight, std=(2 * width) => block.mlp.fc1.weight, std=(4 * width) # CLIP's initial weights
outputs = [*outputs, x][-n:] => outputs = [*outputs, x][:n] # the last blocks
(variances + (means - mean).square()).mean(0) => variances.mean(0) # the variance between ranks
variance * n / (n - 1) => variance # unbiased running variance
torch.randn(1, 1, width) * 0.02 => torch.randn(1, 1, width) * 0.2 # initial [CLS]
self.grid**2, width) * 0.02 => self.grid**2, width) * 0.2 # initial positions
return self.norm_pre(x + pos) => return self.norm_pre(x) + pos # CLIP's ln_pre
k.transpose(2, 3) * q.shape[-1] ** -0.5 => k.transpose(2, 3) # attention of [CLS]
torch.cat([x.sin(), x.cos(), y.sin(), y.cos()] => torch.cat([y.sin(), y.cos(), x.sin(), x.cos()] # columns, rows
nn.init.normal_(self.embedding.weight, std=0.02) => nn.init.normal_(self.embedding.weight, std=0.2) # CLIP's
torch.randn(1, context, width) * 0.01 => torch.randn(1, context, width) * 0.02 # CLIP's initial positions
self.blocks(x, mask, self.causal)[-1] => self.blocks(x, mask)[-1] # causal attention
None if self.causal or mask is None else mask => None if True else mask # padding is hidden
image["depth"] -= left_out => image["depth"] -= 0 # SPARO replaces the last block
== common.py | presets | tests/test_presets.py
"ViT-S/16": dict(patch_size=16, width=384, depth=12, heads=6) => "ViT-S/16": dict(patch_size=16, width=384, heads=12) # DeiT
patch_bias=False, eps=1e-5 => patch_bias=False, eps=1e-6 # CLIP
"12x768": dict(width=768, depth=12, heads=12) => "12x768": dict(width=768, depth=12, heads=8) # SPARC, D.1
CLIP_TOKENS, context=77 => CLIP_TOKENS, context=76 # CLIP
vocab_size=30522, context=77 => vocab_size=30000, context=77 # BERT
IMAGENET = (0.485, 0.456 => IMAGENET = (0.5, 0.456 # timm
== common.py | tokenizers | tests/test_tokenizer.py
MAX_WORD = 100 => MAX_WORD = 10 # BERT
unicodedata.category(char) != "Mn") => unicodedata.category(char) != "Mc") # accents
ids = ids[: max_length - 2] => ids = ids[: max_length - 1] # [CLS] and [SEP] count
padding_value=self.pad => padding_value=self.cls # padding
mark = "##" if start else "" => mark = "" # sub-words
ids.append(last + 256) => ids.append(last) # </w>
best = min(pairs, key=self.merges.get) => best = max(pairs, key=self.merges.get) # the first line
(-pair_counts[pair], pair) => (pair_counts[pair], pair) # the most frequent pair
== common.py | data | tests/test_data.py tests/test_details.py tests/test_finetune.py tests/test_bam.py
(min_scale, 1.0), interpolation=BICUBIC => (0.08, 1.0), interpolation=BICUBIC # smallest crop
[v2.PILToTensor(), crop, v2.RandomHorizontalFlip()] => [v2.PILToTensor(), crop] # flips
resize = v2.Resize(resize or size, BICUBIC) => resize = v2.Resize(size, BICUBIC) # 256 for 224
max(image.size) <= 8 * short => max(image.size) <= 80 * short # thin images
v2.RandAugment(2, magnitude=27 => v2.RandAugment(2, magnitude=9 # 9 of 10
image.draft("RGB", (min_side, min_side)) => image.draft("RGB", (min_side // 2, min_side // 2)) # decoded sides
x = x / 256 => x = x / 255 # 16 bits
image.size, "white") => image.size, "black") # transparent pixels
(size / (0.75 * least) ** 0.5) => (size / least**0.5) # the aspect ratio of crops
ratio = 3 / 4, 4 / 3 => ratio = 1, 1 # BYOL
torch.rand(n) < 0.5, torch.rand(n) < 0.8 => torch.rand(n) < 0.5, torch.rand(n) < 0.5 # BYOL: jitter
draw_colours(n, 0.4, 0.4, 0.2, 0.1) => draw_colours(n, 0.4, 0.4, 0.4, 0.1) # BYOL: saturation
grey, blurred = torch.rand(n) < 0.2 => grey, blurred = torch.rand(n) < 0.1 # BYOL: grey
uniform_(0.1, 2) * self.image_size / 224 => uniform_(0.1, 2) # BYOL: sigma for 224 pixels
x[flipped].flip(3) => x[flipped].flip(2) # left and right
solarize(x[solarized], 0.5) => solarize(x[solarized], 0.25) # BYOL
min(max(low - length / 2, 0), side - length) => min(max(low, 0), side - length) # centres of crops
captions[(epoch + i) % len(captions)] => captions[epoch % len(captions)] # captions take turns
order[start % size :].tolist() => order.tolist() # a resumed position
max(1, round(share * len(of_class))) => max(1, int(share * len(of_class))) # shares of classes
first = batches.index(min(batches)) => first = 0 # the worker that a resume continues
with fixed_seed(self.seed, part, *numbers): => with fixed_seed(self.seed, *numbers): # parts draw differently
mix_seed(self.seed, self.rank, worker, batches) => mix_seed(self.seed, worker, batches) # ranks draw differently
== common.py | schedules | tests/test_details.py
(start - end) * 0.5 * (1 + math.cos( => (start - end) * 0.5 * (1 - math.cos( # half a cosine
return peak * (step + 1) / warmup => return peak * step / warmup # step 0 has peak / warmup
cosine(step - warmup, steps - warmup, peak, 0.0) => cosine(step, steps, peak, 0.0) # after the warm-up
(steps - step) / max(1, steps - warmup) => (steps - step) / max(1, steps) # a line to 0
isinstance(module, (nn.Linear, nn.Conv2d)) => isinstance(module, nn.Linear) # convolutions decay
"weight_decay": 0.0, "decays": False => "weight_decay": weight_decay, "decays": False # norms do not decay
== common.py | world | tests/test_world.py tests/test_details.py
"test": range(9, 10) => "test": range(8, 10) # val and test share no scene
heldout[scene["colour"], scene["shape"]]).any(1) => heldout[scene["shape"], scene["colour"]]).any(1) # held-out pairs
(3 * i + i // 8 + 1) % 8 => (3 * i + 1) % 8 # pairs
self.together if split == "train" else 0 => self.together # only training has companions
twin = rand(m) < 0.15 => twin = rand(m) < 0.05 # twins
(1 + 0.2 * (rand(m, K) - 0.5)) => (1 + 0.1 * (rand(m, K) - 0.5)) # radii
"white": (0.95, 0.95, 0.95) => "white": (0.95, 0.95, 0.2) # names of colours
(torch.arange(K) < count).expand => (torch.arange(K) <= count).expand # 1 to K objects
if c not in colours]) => if c != a["colour"]]) # a negative that might be true
if all(o["size"] == a["size"] for o in alike) => if any(o["size"] == a["size"] for o in alike) # might be true
if not any(kind in kinds for kind in swapped) => if True # a negative that might be true
if relation and all(kinds.count => if relation and any(kinds.count # a relation that might be true
"above": (0, -1), "below": (0, 1) => "above": (0, 1), "below": (0, -1) # v points down
* dy > 6 => * dy > 0 # relations that can be seen
cover > 0.5, k + 1 => cover > 0.0, k + 1 # touched pixels
P_COLOUR = 0.9 => P_COLOUR = 0.8 # share of named colours
== common.py | weights | tests/test_start.py tests/test_details.py
theirs = theirs.squeeze().t() => theirs = theirs.squeeze() # CLIP's projections are (d, E)
("state_dict", "model", "teacher") => ("state_dict", "model", "student") # DINO's teacher
(".ln_1.", ".norm1."), (".ln_2.", ".norm2.") => (".ln_1.", ".norm2."), (".ln_2.", ".norm1.") # two norms
(new_mean - mean) / std  # (3,) each => (mean - new_mean) / std  # (3,) each # sign of the shift
w * scale[:, None, None] => w / scale[:, None, None] # scale of pixels
not name.startswith(replaced) => True # the block that SPARO replaces
for_other_pixels(found, IMAGENET, (MEAN, STD)) => for_other_pixels(found, (MEAN, STD), IMAGENET) # pixels
== eval.py | metrics | tests/test_eval.py tests/test_details.py
(scores.masked_fill(positive, -torch.inf) >= best) => (scores.masked_fill(positive, -torch.inf) > best) # ties
(ranks < k).sum() => (ranks <= k).sum() # recall at k
rows.append(F.normalize(kept * prompts.mean(1), dim=-1)) => rows.append(kept * prompts.mean(1)) # CLIP's prompts
(cosine / tau).exp() => cosine # weights of votes
train, test = F.normalize(train, dim=-1) => train, test = train # cosines
tensor_split([len(x) // 5]) => tensor_split([len(x) // 4]) # a fifth is held out
return best[len(best) // 2] => return best[0] # the middle of equally good ones
np.logspace(-6, 2, 97) => np.logspace(-6, 3, 97) # CLIP_benchmark's range
common.cosine(step, len(batches), 0.1, 0.0) => common.cosine(step, len(batches), 0.01, 0.0) # SPARO, C.1
fit(torch.arange(len(x)), decays[best]) => fit(fitted, decays[best]) # the last fit has all rows
torch.optim.SGD(parameters, momentum=0.9) => torch.optim.SGD(parameters) # BAM, D.1
max(64, math.ceil(len(x) / 1024)) => max(64, math.ceil(len(x) / 512)) # Table 9b: 1,024
l2 / 2 * head.weight.square() => l2 * head.weight.square() # BAM, D.3
fit(x, labels, best) => fit(x_fitted, labels_fitted, best) # the last fit has all rows
(2 - 2 * entropy(p) / (entropy(p_l) + entropy(p_c))) => (2 - entropy(p) / entropy(p_l)) # NMI
text = (s[:, 0, 0] > s[:, 1, 0]) => text = (s[:, 0, 0] > s[:, 0, 1]) # Winoground
round(self.image_size * 256 / 224) => self.image_size # DINO's evaluation
== eval.py | tasks | tests/test_eval.py tests/test_details.py tests/test_sets.py
kept = 1 if self.mask is None else self.mask > 0 => kept = 1 # removed slots
return self.world.sample(WORLD_N, "val", 8, 1) => return self.world.sample(WORLD_N, self.split, 8, 1) # slots: val
self.world.sample(4 * WORLD_N, "train", 9, 1) => self.world.sample(4 * WORLD_N, self.split, 9, 1) # k-NN: train
purpose in ("zeroshot", "slots") or => True or # classes that training never shows
torch.arange(64) // 8 >= world.palette => torch.arange(64) % 8 >= world.palette # colours that are not drawn
accuracies.argsort(descending=True) => accuracies.argsort() # the best slots
order[: L // 4] => order[: L // 3] # the best quarter
F.cosine_similarity(y_i, y_t, dim=-1) > 0.75 => F.cosine_similarity(y_i, y_t, dim=-1) > 0.5 # Sec. 5.4
agree = is_similar & (sharpness > 0.5) & is_word => agree = is_similar & is_word # sharp attention
is_word = (word > 0) & => is_word = (word >= 0) & # [CLS] is no word
weights = over_image[:, :, -patches:] => weights = over_image[:, :, :patches] # [CLS] is no patch
if own is None or own.equal(objects): => if own is None: # words that name all objects
pairs()) if i % 10) => pairs())) # the held-out tenth
random_views(embedder, pairs, 0.08) => random_views(embedder, pairs, 0.8) # crops of a probe
(new / old - 1) / (fit / start - 1) => (new - old) / (fit - start) # Table 5
rank < k for grouping => rank <= k for grouping # the k best words
scores[:, no_words] = -torch.inf => pass # special tokens are no labels
== train.py | training | tests/test_train.py tests/test_details.py tests/test_dino.py tests/test_contract.py
step = progress.step - start => step = progress.step # a step counts within its stage
fresh=progress.step == start => fresh=True # a resume is not fresh
args.clip_grad or math.inf) => math.inf) # clipping
if args.weight_decay_end is not None and group["decays"]: => if args.weight_decay_end is not None: # norms
betas=(0.9, args.beta2), eps => betas=(0.9, 0.999), eps # beta2
betas=(0.9, args.beta2), eps=args.adam_eps => betas=(0.9, args.beta2), eps=1e-8 # epsilon
optimizer.param_groups = settings => pass # a resume takes the new settings
torch.manual_seed(args.seed + rank) => torch.manual_seed(args.seed) # ranks drop other rows
math.ceil(1.5 * args.image_size) => math.ceil(0.5 * args.image_size) # sides of decoded JPEGs
momentum=betas[0], nesterov=True => momentum=betas[0] # DeiT's SGD
every > 0 and self.step % every == 0 => every > 0 and self.step % every == 1 # when an action is due
self.order += self.step => self.order += 0 # a new order of changed data
torch.set_rng_state(local["rng"].cpu()) => pass # a resume continues the random numbers
model.before_update(step) => pass # DINO's frozen last layer
model.after_update(step, steps) => model.after_update(progress.step, args.steps) # steps of the stage
args.epochs * len(data) / args.batch) => args.epochs * len(data) // args.batch) # the last epoch is whole
if lost <= 0.1 * (lost + used): => if lost <= 0.5 * (lost + used): # a tenth
== tests/claims.py | claims | tests/test_claims.py
5: 2.776 => 5: 2.132 # Student's t, 97.5 %
if n < 5: => if n < 3: # how many seeds decide
kind = "holds" if low > 0 => kind = "holds" if high > 0 # the interval
half = QUANTILES[n] * np.std(differences, ddof=1) => half = QUANTILES[n] * np.std(differences) # n - 1
figure(base, rate, seed, "val", *metric) => figure(base, rate, seed, "test", *metric) # rates are chosen on val
return max(scores, key=lambda rate => return min(scores, key=lambda rate # the best rate
if mean(values) <= zero] => if mean(values) < -zero] # did not train
"""


def mistakes():
    """Yield (file, area, tests, old, new, meaning) of each line of TABLE."""
    for line in TABLE.strip().splitlines():
        if line.startswith("== "):
            file, area, tests = line[3:].split(" | ")
            continue
        rest, _, meaning = line.rpartition(" # ")
        old, _, new = rest.partition(" => ")
        yield file, area, tests, *(text.replace(r"\n", "\n") for text in (old, new)), meaning


def run_tests(root, tests, output):
    """Run the fast tests of a tree in a fork of this process -> pytest's status, -1 after LIMIT.

    This process has imported torch, so a fork begins at once. Its modules of this project are new.
    """
    if pid := os.fork():
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return -1
    os.setsid()  # its children end with it
    os.chdir(root)
    sys.dont_write_bytecode = True  # a cached file could hide the mistake of the same second
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        status = pytest.main(["-x", "-q", "-m", "not ranks", "-p", "no:cacheprovider",
                              *shlex.split(tests)])
        sys.stdout.flush()
    os._exit(int(status))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="files to put mistakes into; without one, all")
    parser.add_argument("--every", type=int, default=1, help="take every Nth mistake")
    parser.add_argument("--area", help="take the mistakes of one area")
    parser.add_argument("--verbose", action="store_true", help="show the test that fails")
    args = parser.parse_args()
    table = list(mistakes())
    for file, *_, old, new, _ in table:
        if (ROOT / file).read_text().count(old) != 1 or old == new:
            sys.exit(f"error: {file} must have {old!r} once, not "
                     f"{(ROOT / file).read_text().count(old)} times: mend its line in TABLE.")
    chosen = [row for row in table if (not args.files or row[0] in args.files)
              and args.area in (None, row[1])][:: args.every]
    counts, clean = collections.defaultdict(collections.Counter), set()
    with tempfile.TemporaryDirectory() as directory:
        root, output = Path(directory, "tree"), Path(directory, "output")
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".git", "runs", "__pycache__"))
        for file, area, tests, old, new, meaning in chosen:
            if tests not in clean and run_tests(root, tests, output):
                sys.exit(f"error: without a mistake {tests} fail:\n{output.read_text()[-2000:]}")
            clean.add(tests)
            source, begin = (ROOT / file).read_text(), time.monotonic()
            (root / file).write_text(source.replace(old, new))
            status = run_tests(root, tests, output)
            (root / file).write_text(source)
            result = "survived" if status == 0 else "killed"
            if meaning.startswith("equivalent"):
                result = "equivalent" if status == 0 else "killed, but called equivalent"
            counts[area][result] += 1
            print(f"{result:8} {time.monotonic() - begin:5.1f} s  {file} {area}: {old!r} -> {new!r}, "
                  f"{meaning}", flush=True)
            if args.verbose and status:
                print(*[line for line in output.read_text().splitlines() if "FAILED" in line
                        or "ERROR" in line], sep="\n", flush=True)
    for area, results in counts.items():
        print(f"{area}: {', '.join(f'{n} {result}' for result, n in results.items())}")


if __name__ == "__main__":
    main()
