"""The objectives that SPARC is compared with, against literal float64 loops; chunks; three ranks against one process."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import common
import sparc
from test_sparc import assert_same_with_gradients, cos, infonce, make_batch, ragged, tiny_model

OBJECTIVES = ["clip", "filip", "clip+filip", "pacl", "gloria", "mgca"]


# Literal references: lists of scalars, captions cut to their words ---------------------------------------------------


def words_of(tokens, mask):
    return [[t for t, word in zip(row, m) if word] for row, m in zip(tokens, mask)]


def mean(values):
    return sum(values) / len(values)


def largest(values):
    return max(values, key=lambda x: x.item())


def softmax(values):
    e = [x.exp() for x in values]
    return [x / sum(e) for x in e]


def both_ways(rows, columns, scale):
    """rows[i][j]: image i against caption j for the softmax over captions; columns[i][j]: for the one over images."""
    n = len(rows)
    return mean([infonce([scale * x for x in rows[i]], i) for i in range(n)]
                + [infonce([scale * columns[i][j] for i in range(n)], j) for j in range(n)])


def filip_rows_and_columns(captions, patches, sent_captions, sent_patches):
    rows = [[mean([largest([cos(p, t) for t in words]) for p in image]) for words in sent_captions]
            for image in patches]
    columns = [[mean([largest([cos(p, t) for p in image]) for t in words]) for words in captions]
               for image in sent_patches]
    return rows, columns


def literal_filip(captions, patches, scale, sent_captions=None, sent_patches=None):
    """Own patches against the words that are sent, own words against the patches that are sent; all of them by default."""
    return both_ways(*filip_rows_and_columns(captions, patches, sent_captions or captions, sent_patches or patches), scale)


def literal_sent(captions, patches, keep):
    """Of each list the share `keep`, rounded up, whose best cosine with anything on the other side is highest."""

    def chosen(items, others):
        best = [max(cos(x, y).item() for other in others for y in other) for x in items]
        order = sorted(range(len(items)), key=lambda i: -best[i])
        return [items[i] for i in order[: math.ceil(keep * len(items) - 1e-9)]]

    return [chosen(words, patches) for words in captions], [chosen(image, captions) for image in patches]


def literal_pacl(t, patches, scale):
    phi = [[sum(a * cos(p, caption) for a, p in zip(softmax([cos(p, caption) for p in image]), image)) for caption in t]
           for image in patches]
    return both_ways(phi, phi, scale)


def literal_gloria(captions, patches, scale):
    E = len(patches[0][0])

    def z(image, words):
        total = 0
        for t in words:
            a = softmax([sum(x * y for x, y in zip(t, v)) / math.sqrt(E) for v in image])
            c = sum(weight * v for weight, v in zip(a, image))
            total = total + (scale * cos(c, t)).exp()
        return total.log()

    rows = [[z(image, words) for words in captions] for image in patches]
    return both_ways(rows, rows, 1)


def literal_sinkhorn(scores, epsilon, iterations):
    q = [[math.exp(s / epsilon) for s in row] for row in scores]
    K, B = len(q[0]), len(q)
    for _ in range(iterations):
        for k in range(K):
            column = sum(q[b][k] for b in range(B))
            for b in range(B):
                q[b][k] /= K * column
        for b in range(B):
            row = sum(q[b])
            q[b] = [x / (B * row) for x in q[b]]
    return [[x * B for x in row] for row in q]


def literal_prototypes(v, t, prototypes, scale):
    s_v, s_t = ([[cos(x, c) for c in prototypes] for x in side] for side in (v, t))
    q_v, q_t = (literal_sinkhorn([[x.item() for x in row] for row in s], 0.05, 3) for s in (s_v, s_t))
    terms = []
    for s, q in ((s_v, q_t), (s_t, q_v)):
        for row, targets in zip(s, q):
            terms.append(-sum(target * p.log() for target, p in zip(targets, softmax([scale * x for x in row]))))
    return mean(terms)


def literal_attention(module, x, y):
    q, k, v = ([layer(item) for item in items] for layer, items in ((module.q, x), (module.k, y), (module.v, y)))
    weights = [softmax([(query * key).sum() / math.sqrt(len(key)) for key in k]) for query in q]
    return [module.out(sum(a * value for a, value in zip(row, v))) for row in weights]


def literal_within(c, t, scale):
    return mean([infonce([scale * cos(c[j], t[k]) for k in range(len(t))], j) for j in range(len(t))]
                + [infonce([scale * cos(t[j], c[k]) for k in range(len(t))], j) for j in range(len(t))])


# Equations -----------------------------------------------------------------------------------------------------------


def scale_of(value):
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_filip_loss_is_the_literal_one():
    tokens, patches, mask = ragged()
    scale = scale_of(7.0)
    expected = literal_filip(words_of(tokens, mask), patches, scale)
    assert_same_with_gradients(sparc.filip_loss(tokens, patches, mask, scale, keep=1), expected, (tokens, patches, scale))


@pytest.mark.parametrize("keep", [0.2, 0.6])
def test_filip_compares_with_the_most_similar_tokens_only(keep):
    tokens, patches, mask = ragged()
    captions = words_of(tokens, mask)
    sent = literal_sent(captions, patches, keep)
    assert [[len(items) for items in side] for side in sent] == ([[1, 1, 1], [2, 2, 2]] if keep == 0.2 else [[3, 2, 2], [4, 4, 4]])
    value = sparc.filip_loss(tokens, patches, mask, 7.0, keep)
    assert_same_with_gradients(value, literal_filip(captions, patches, 7.0, *sent), (tokens, patches))
    assert (value - sparc.filip_loss(tokens, patches, mask, 7.0, keep=1)).abs() > 1e-3


def test_pacl_loss_is_the_literal_one():
    tokens, patches, _ = ragged()
    t, scale = tokens[:, 0], scale_of(7.0)
    assert_same_with_gradients(sparc.pacl_loss(t, patches, scale), literal_pacl(t, patches, scale), (tokens, patches, scale))


def test_gloria_loss_is_the_literal_one():
    tokens, patches, mask = ragged()
    scale = scale_of(7.0)
    expected = literal_gloria(words_of(tokens, mask), patches, scale)
    assert_same_with_gradients(sparc.gloria_loss(tokens, patches, mask, scale), expected, (tokens, patches, scale))


def test_mgca_loss_is_the_literal_one():
    tokens, patches, mask = ragged()
    words_seen, patches_read = torch.randn_like(tokens).requires_grad_(), torch.randn_like(patches).requires_grad_()
    v, t, prototypes = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 3, 5))
    scale = scale_of(7.0)
    words = mean([literal_within(*pair, scale) for pair in zip(words_of(words_seen, mask), words_of(tokens, mask))])
    regions = mean([literal_within(*pair, scale) for pair in zip(patches_read, patches)])
    expected = (words + regions) / 2 + literal_prototypes(v, t, prototypes, scale)
    value = sparc.mgca_loss(v, t, tokens, patches, mask, words_seen, patches_read, prototypes, scale)
    assert_same_with_gradients(value, expected, (v, t, tokens, patches, words_seen, patches_read, prototypes, scale))


def test_sinkhorn_balances_the_prototypes():
    scores = torch.randn(12, 4, dtype=torch.float64).clamp(-1, 1)
    expected = torch.tensor(literal_sinkhorn(scores.tolist(), 0.05, 3), dtype=torch.float64)
    torch.testing.assert_close(sparc.sinkhorn(scores, 0.05, 3), expected)
    balanced = sparc.sinkhorn(scores / 4, 0.05, 200)
    torch.testing.assert_close(balanced.sum(1), torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(balanced.sum(0), torch.full((4,), 3.0, dtype=torch.float64), rtol=1e-3, atol=1e-3)


def test_cross_attention_is_the_literal_one_and_ignores_padding():
    module = sparc.CrossAttention(6, 4).double()
    x, y = torch.randn(2, 3, 6).double(), torch.randn(2, 5, 6).double()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]]).bool()
    for b in range(2):
        expected = torch.stack(literal_attention(module, x[b], y[b, mask[b]]))
        torch.testing.assert_close(module(x, y, mask)[b], expected)
    nothing = module(x, y, torch.zeros_like(mask))
    assert nothing.isfinite().all()


def pure_losses(tokens, patches, mask, scale=7.0):
    """Every loss that sees the words of a caption, as a function of one set of tensors."""
    def t():
        return sparc.masked_mean(tokens, mask)

    prototypes = torch.eye(4, dtype=tokens.dtype)
    return {"filip": sparc.filip_loss(tokens, patches, mask, scale),
            "filip, all tokens": sparc.filip_loss(tokens, patches, mask, scale, keep=1),
            "pacl": sparc.pacl_loss(t(), patches, scale), "gloria": sparc.gloria_loss(tokens, patches, mask, scale),
            "mgca": sparc.mgca_loss(patches.mean(1), t(), tokens, patches, mask, tokens + 1, patches + 1, prototypes, scale)}


def test_padding_changes_nothing():
    tokens, patches, mask = ragged()
    other = torch.where(mask[..., None], tokens, 100 * torch.randn_like(tokens))
    longer = F.pad(other, (0, 0, 0, 3), value=5.0)
    for (name, value), changed in zip(pure_losses(tokens, patches, mask).items(),
                                      pure_losses(longer, patches, F.pad(mask, (0, 3))).values()):
        torch.testing.assert_close(changed, value, msg=name)
        assert not torch.autograd.grad(value, tokens)[0][~mask].any()


@pytest.mark.parametrize("case", ["equal patches", "equal words", "zeros", "no words", "one pair"])
def test_degenerate_rows_have_finite_losses_and_gradients(case):
    tokens, patches, mask = (x.detach() for x in ragged())
    if case == "equal patches":
        patches = patches[:, :1].expand(-1, 6, -1)
    if case == "equal words":
        tokens = tokens[:, :1].expand(-1, 5, -1)
    if case == "zeros":
        tokens = torch.zeros_like(tokens)
    if case == "no words":
        mask = mask.clone()
        mask[1] = False
    if case == "one pair":
        tokens, patches, mask = tokens[:1], patches[:1], mask[:1]
    tokens, patches = tokens.float().requires_grad_(), patches.float().requires_grad_()
    for name, value in pure_losses(tokens, patches, mask, 100.0).items():
        assert value.isfinite(), name
        for gradient in torch.autograd.grad(value, (tokens, patches)):
            assert gradient.isfinite().all(), name


def test_limits():
    eye, mask = torch.eye(6, dtype=torch.float64), torch.ones(6, 1, dtype=torch.bool)
    pairs = eye[:, None]                                                # (6, 1, 6): one word and one patch a pair, all different
    for name in ("filip_loss", "gloria_loss"):
        assert getattr(sparc, name)(pairs, pairs, mask, 100.0) < 1e-6, name
    assert sparc.pacl_loss(eye, pairs, 100.0) < 1e-6
    same = torch.ones(6, 1, 6, dtype=torch.float64)
    for value in (sparc.filip_loss(same, same, mask, 100.0), sparc.pacl_loss(same[:, 0], same, 100.0),
                  sparc.gloria_loss(same, same, mask, 100.0)):
        assert value.item() == pytest.approx(math.log(6))


def test_chunks_give_the_same_values_and_gradients(monkeypatch):
    tokens, patches, mask = ragged(B=7, lengths=(5, 2, 3, 1, 4, 5, 2))
    scale = scale_of(7.0)
    whole = {name: (value, torch.autograd.grad(value, (tokens, patches, scale), retain_graph=True))
             for name, value in pure_losses(tokens, patches, mask, scale).items()}
    for elements in (1, 3 * 7 * 6 * 5):                                  # one and three captions at a time
        monkeypatch.setattr(sparc, "ELEMENTS", elements)
        for name, value in pure_losses(tokens, patches, mask, scale).items():
            torch.testing.assert_close(value, whole[name][0])
            for got, want in zip(torch.autograd.grad(value, (tokens, patches, scale)), whole[name][1]):
                torch.testing.assert_close(got, want, msg=name)


def test_chunks_bound_the_memory_of_a_large_batch(monkeypatch):
    """No tensor holds more than ELEMENTS similarities, where all at once would be 64 times as many."""
    monkeypatch.setattr(sparc, "ELEMENTS", 64 * 4 * 6 * 5)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                self.size = max(self.size, x.untyped_storage().nbytes() // x.element_size() if torch.is_tensor(x) else 0)
            return out

    B, P, L = 256, 6, 5
    tokens, patches = (torch.randn(B, n, 4, requires_grad=True) for n in (L, P))
    mask = torch.ones(B, L, dtype=torch.bool)
    for loss in (functools.partial(sparc.filip_loss, keep=1), sparc.filip_loss, sparc.gloria_loss):
        with Largest() as largest_tensor:
            loss(tokens, patches, mask, 7.0).backward()
        assert largest_tensor.size <= max(sparc.ELEMENTS, 2 * B * B), loss
        assert B * B * P * L > 10 * largest_tensor.size


def test_losses_of_half_precision_are_fp32():
    tokens, patches, mask = (x.detach().bfloat16() if x.is_floating_point() else x for x in ragged())
    expected = pure_losses(tokens.float(), patches.float(), mask, 100.0)
    with torch.autocast("cpu", torch.bfloat16):
        t = sparc.masked_mean(tokens.float(), mask)
        values = {"filip": sparc.filip_loss(tokens, patches, mask, 100.0), "pacl": sparc.pacl_loss(t, patches, 100.0),
                  "gloria": sparc.gloria_loss(tokens, patches, mask, 100.0)}
    for name, value in values.items():
        assert value.dtype == torch.float32 and torch.equal(value, expected[name]), name


def test_gloria_stays_bounded_where_the_patches_cancel():
    """Attention to almost equal weights on patches of mean zero leaves nothing but rounding of |c|^2."""
    patches = 10 * torch.randn(4, 9, 8)
    patches = (patches - patches.mean(1, keepdim=True)).requires_grad_()
    tokens = (1e-5 * torch.randn(4, 3, 8)).requires_grad_()
    mask = torch.ones(4, 3, dtype=torch.bool)
    scores = sparc.gloria_scores(patches, tokens, mask, patches @ patches.transpose(1, 2), 1.0)
    assert scores.abs().max() < 2 + math.log(3)                          # a cosine and log L
    with torch.no_grad():
        tokens *= 1e4
    exact = literal_gloria(words_of(tokens.double(), mask), list(patches.double()), 5.0)
    torch.testing.assert_close(sparc.gloria_loss(tokens, patches, mask, 5.0).double(), exact, rtol=1e-4, atol=1e-5)


# Model ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_model_trains_on_the_sum_of_its_terms(objective):
    model, batch = tiny_model(objective=objective), make_batch()
    out = model(batch)
    f_v, f_t = model.image_encoder(batch["images"]), model.text_encoder(batch["tokens"], batch["mask"])
    words, scale = sparc.words_only(batch["mask"]), 1 / 0.07
    patches, tokens = model.g_v(f_v), model.g_t(f_t)
    v, t = model.g_v(model.h_v(f_v.mean(1))), model.g_t(sparc.masked_mean(f_t, words))
    expected = {
        "global": lambda: sparc.global_loss(v, t, scale),
        "filip": lambda: sparc.filip_loss(tokens, model.g_v(model.h_v(f_v)), words, scale, keep=0.2),
        "pacl": lambda: sparc.pacl_loss(t, patches, scale),
        "gloria": lambda: sparc.gloria_loss(tokens, patches, words, scale),
        "mgca": lambda: sparc.mgca_loss(v, t, *(F.normalize(x, dim=-1) for x in (tokens, patches)), words,
                                        model.word_attention(F.normalize(tokens, dim=-1), F.normalize(patches, dim=-1)),
                                        model.patch_attention(F.normalize(patches, dim=-1), F.normalize(tokens, dim=-1), words),
                                        model.prototypes, scale)}
    names = [part.strip() for part in objective.replace("clip+", "global+").replace("gloria", "global+gloria")
             .replace("mgca", "global+mgca").split("+")]
    names = ["global" if name == "clip" else name for name in names]
    assert set(out) == {"loss", "scale", *names}
    for name in names:
        torch.testing.assert_close(out[name], expected[name]().detach(), msg=name)
    torch.testing.assert_close(out["loss"], sum(out[name] for name in names))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_parameter_gets_a_gradient(objective):
    model = tiny_model(objective=objective)
    model(make_batch())["loss"].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-6] == []


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_chance_loss_is_the_loss_of_equal_similarities(objective):
    model, batch = tiny_model(objective=objective), make_batch()
    for p in [*model.g_t.parameters(), *model.g_v.parameters()]:
        nn.init.zeros_(p)
    assert model(batch)["loss"].item() == pytest.approx(model.chance_loss(4, batch["mask"], 16), abs=1e-4)


def test_pacl_has_an_adapter_and_mgca_its_attention():
    pacl, mgca, plain = (tiny_model(objective=name) for name in ("pacl", "mgca", "sparc"))
    assert [tuple(p.shape) for p in pacl.g_v.parameters()] == [(8, 16), (8,), (8, 8), (8,), (8, 16), (8,)]
    assert not list(pacl.h_v.parameters())
    assert mgca.prototypes.shape == (500, 8) and mgca.word_attention.q.weight.shape == (128, 8)
    assert not any("attention" in name or "prototypes" in name for name, _ in plain.named_parameters())


@pytest.mark.parametrize("objective", ["filip", "pacl"])
def test_late_interaction_scores_are_those_of_the_loss(objective, monkeypatch):
    monkeypatch.setattr(sparc, "ELEMENTS", 4 * 16)                      # a caption at a time
    model, batch = tiny_model(objective=objective, filip_keep=1.0).eval(), make_batch()
    patches, tokens = model.encode_patches(batch["images"]), model.encode_tokens(batch["tokens"], batch["mask"])
    scores = model.similarity(patches, F.pad(tokens, (0, 0, 0, 2)) if objective == "filip" else tokens)
    assert model.late_interaction and scores.shape == (4, 4)
    captions = words_of(tokens, tokens.any(-1))
    if objective == "filip":
        rows, columns = filip_rows_and_columns(captions, patches, captions, patches)
        expected = [[(r + c) / 2 for r, c in zip(*pair)] for pair in zip(rows, columns)]
        assert [len(words) for words in captions] == [7, 2, 4, 1]
    else:
        expected = [[sum(a * cos(p, t) for a, p in zip(softmax([cos(p, t) for p in image]), image)) for (t,) in captions]
                    for image in patches]
    torch.testing.assert_close(scores, torch.stack([torch.stack(row) for row in expected]), rtol=1e-4, atol=1e-5)


# Three ranks = one process -------------------------------------------------------------------------------------------

CASES = [dict(objective=name, filip_keep=1.0) for name in OBJECTIVES] + [dict(objective="filip", filip_keep=0.5)]


def run_rank(rank, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=3)
    torch.set_num_threads(1)
    results = []
    for n, settings in enumerate(CASES):
        model = tiny_model(**settings)
        model.load_state_dict(torch.load(f"{directory}/model{n}.pt"))
        batch = {key: value[2 * rank : 2 * rank + 2] for key, value in torch.load(f"{directory}/batch.pt").items()}
        longest = int(batch["mask"].sum(1).max())  # each rank cuts to its own longest caption
        batch |= {key: batch[key][:, :longest] for key in ("tokens", "mask")}
        parallel = DistributedDataParallel(model)
        loss = parallel(batch, common.gather)["loss"]
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    torch.save(results, f"{directory}/rank{rank}.pt")
    dist.destroy_process_group()


def test_three_ranks_equal_one_process(tmp_path):
    """Also FILIP's token dropping, where each rank chooses among its own pairs: equal to choosing so in one process."""
    models, batch = [tiny_model(**settings) for settings in CASES], make_batch(B=6)
    batch["mask"][2:4, 5:] = False
    assert len({int(rows.sum(1).max()) for rows in batch["mask"].split(2)}) == 3  # every rank has another length
    for n, model in enumerate(models):
        torch.save(model.state_dict(), tmp_path / f"model{n}.pt")
    torch.save(batch, tmp_path / "batch.pt")
    torch.multiprocessing.spawn(run_rank, (str(tmp_path),), nprocs=3)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(3)]
    for n, (model, settings) in enumerate(zip(models, CASES)):
        loss = model(batch)["loss"] if settings["filip_keep"] == 1 else filip_in_groups_of_two(model, batch)
        loss.backward()
        assert mean([rank[n][0] for rank in ranks]).item() == pytest.approx(loss.item(), abs=2e-6), settings
        for name, p in model.named_parameters():
            for rank in ranks:
                torch.testing.assert_close(rank[n][1][name], p.grad, rtol=1e-4, atol=2e-5, msg=lambda m: f"{settings} {name}: {m}")


def filip_in_groups_of_two(model, batch):
    f_v, f_t = model.image_encoder(batch["images"]), model.text_encoder(batch["tokens"], batch["mask"])
    captions, images = words_of(model.g_t(f_t), sparc.words_only(batch["mask"])), list(model.g_v(model.h_v(f_v)))
    sent = [literal_sent(captions[i : i + 2], images[i : i + 2], 0.5) for i in range(0, 6, 2)]
    all_sent = [[item for group in sent for item in group[side]] for side in (0, 1)]
    return literal_filip(captions, images, model.log_scale.exp(), *all_sent)
