"""Models on gloo ranks, as DistributedDataParallel runs them, for comparison with one process."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import common


def one_rank(rank, directory, world, build, names):
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world)
    torch.set_num_threads(1)
    results = {}
    for name in names:
        model = build(name)
        model.load_state_dict(torch.load(f"{directory}/{name}.pt"))
        batch = torch.load(f"{directory}/batch.pt")
        own = tree_map(lambda x: x[len(x) // world * rank : len(x) // world * (rank + 1)], batch)
        parallel = DistributedDataParallel(model)
        out = parallel(own, common.gather)
        out["loss"].backward()
        results[name] = ({key: value.detach() for key, value in out.items()},
                         {key: p.grad for key, p in model.named_parameters() if p.requires_grad}, model.state_dict())
    torch.save(results, f"{directory}/rank{rank}.pt")
    dist.destroy_process_group()


def on_ranks(directory, build, models, batch, world=2):
    """(outputs, gradients, state after the forward pass) of every rank, {name: [...]}. models: {name: model}, and build(name), a
    function of a test module, makes one anew; batch: nested tensors whose rows are dealt to the ranks."""
    torch.save(batch, directory / "batch.pt")
    for name, model in models.items():
        torch.save(model.state_dict(), directory / f"{name}.pt")
    torch.multiprocessing.spawn(one_rank, (str(directory), world, build, list(models)), nprocs=world)
    ranks = [torch.load(directory / f"rank{rank}.pt") for rank in range(world)]
    return {name: [rank[name] for rank in ranks] for name in models}
