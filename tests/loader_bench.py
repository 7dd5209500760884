"""Measure how shards are read: `python tests/loader_bench.py`, beside webdataset if it is installed.

Two disks are measured: the local one, whose shards are in the page cache, and a slow one, on which
each read costs 2 ms and each byte 1 / (200 MB/s). All readers decode and crop alike, in workers.
"""

import argparse
import importlib.util
import io
import itertools
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

LATENCY, RATE = 2e-3, 200e6
BYTES = [0]  # read so far by this process
READS = {"readv": os.readv, "preadv": os.preadv}


def write_shards(directory, shards, size):
    """Write shards of `size` photos of 480 x 360 pixels, about 45 kB, as img2dataset names them."""
    rng, photos = np.random.default_rng(0), []
    for _ in range(40):
        pixels = rng.integers(0, 255, (30, 40, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((480, 360), Image.BICUBIC).save(file, "JPEG", quality=92)
        photos.append(file.getvalue())
    for s in range(shards):
        with tarfile.open(f"{directory}/{s:05}.tar", "w") as tar:
            for i in range(size):
                for end, data in (("jpg", photos[i % 40]), ("txt", b"a photo"), ("json", b"{}")):
                    info = tarfile.TarInfo(f"{s:05}{i:05}.{end}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return f"{directory}/{{00000..{shards - 1:05}}}.tar"


def slow_down(is_slow):
    """Patch the reads of shards: count their bytes and, on the slow disk, wait."""
    def patched(read):
        def slow_read(*arguments):
            found = read(*arguments)
            n = found if isinstance(found, int) else len(found)
            BYTES[0] += n
            time.sleep(is_slow * (LATENCY + n / RATE))
            return found
        return slow_read
    for name, read in READS.items():
        setattr(os, name, patched(read))


class RawFile(io.FileIO):
    """A file that webdataset reads, by the patched os.readv."""

    def readinto(self, buffer):
        return os.readv(self.fileno(), [buffer])


def webdatasets(spec, args, transform):
    import webdataset as wds
    wds.gopen.__globals__["gopen_schemes"]["slow"] = lambda url, mode, bufsize: (
        io.BufferedReader(RawFile(url.partition(":")[2])))
    urls = [f"slow:{path}" for path in common.expand_braces(spec)]
    data = wds.WebDataset(urls, shardshuffle=100, nodesplitter=None).shuffle(4000)
    data = data.map(lambda sample: transform(common.open_image(sample["jpg"], 336)))
    return data.batched(64, collation_fn=lambda x: {"images": torch.stack(x)})


def measure(dataset, args):
    """-> seconds to the first batch, images per second after it, the longest wait for a batch."""
    start, times, n = time.perf_counter(), [], 0
    loader = DataLoader(dataset, batch_size=None, num_workers=args.workers,
                        multiprocessing_context="fork" if args.workers else None)
    for part in loader:
        n += len(part["images"])
        if n >= args.batch * (len(times) + 1):
            times.append(time.perf_counter() - start)
        if len(times) == args.batches:
            break
    waits = np.diff(times)
    return times[0], args.batch * len(waits) / waits.sum(), waits.max()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for setting in ("workers=1", "batch=256", "batches=12", "shards=6", "size=2000"):
        name, value = setting.split("=")
        parser.add_argument(f"--{name}", type=int, default=int(value))
    args, transform = parser.parse_args(), common.train_transform(224)
    torch.set_num_threads(1)
    readers = {"ours": lambda spec, args, transform: common.Stream(
        common.open_data(spec), None, transform, 336, None, args.batch, 0)}
    if importlib.util.find_spec("webdataset"):
        readers["webdataset"] = webdatasets
    with tempfile.TemporaryDirectory() as directory:
        spec = write_shards(directory, args.shards, args.size)
        print("disk, reader: seconds to the first batch, images/s, longest wait in seconds")
        for is_slow, (name, reader) in itertools.product((False, True), readers.items()):
            slow_down(is_slow)
            first, rate, wait = measure(reader(spec, args, transform), args)
            print(f"{'slow' if is_slow else 'local'}, {name}: {first:.2f} {rate:.0f} {wait:.2f}")
        samples = common.open_data(spec).samples(0, 0, 1)  # the reader alone, without decoding
        *_, (_, position) = itertools.islice(samples, args.shards * args.size * 2 // 3)
        del samples
        BYTES[0], start = 0, time.perf_counter()
        next(common.open_data(spec).samples(0, 0, 1, position))
        print(f"slow, resume after two thirds of an epoch: {BYTES[0] / 1e6:.0f} MB read again, "
              f"{time.perf_counter() - start:.2f} seconds")


if __name__ == "__main__":
    main()
