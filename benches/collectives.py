"""Times of the collectives of an expert layer of Qwen3-30B-A3B (bf16, hidden 2048), on the GPUs of one host.

    torchrun --nproc-per-node 2 benches/collectives.py

Each figure is the median of ten replays of a CUDA graph with 20 collectives, of the slowest rank. In the all-to-all of hidden states, each
rank sends its part of the tokens to all ranks. On two ranks, nearly every token has an expert on each.
"""

import os
import statistics

import torch
import torch.distributed as dist

HIDDEN = 2048
EXPERTS = 128
IN_A_GRAPH = 20
WARM_UPS = 2
REPLAYS = 10


def microseconds(collective):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            collective()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            collective()
    times = []
    for _ in range(WARM_UPS + REPLAYS):
        torch.cuda.synchronize()
        dist.barrier()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) * 1e3 / IN_A_GRAPH)
    slowest = torch.tensor(statistics.median(times[WARM_UPS:]), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def main():
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    names = ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "counts", "2 all-reduces", "5 exchanges"]
    if rank == 0:
        print("tokens", *names, sep=" | ", flush=True)
    for tokens in (8, 64, 256, 1024, 4096, 32768):
        whole, sent, received = (torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        part = torch.randn(tokens // size, HIDDEN, device="cuda", dtype=torch.bfloat16)
        counts, counts_received = (torch.zeros(EXPERTS, device="cuda", dtype=torch.int32) for _ in range(2))
        reduce = microseconds(lambda: dist.all_reduce(whole))
        scatter = microseconds(lambda: dist.reduce_scatter_tensor(part, whole))
        gather = microseconds(lambda: dist.all_gather_into_tensor(whole, part))
        to_all = microseconds(lambda: dist.all_to_all_single(received, sent))
        of_counts = microseconds(lambda: dist.all_to_all_single(counts_received, counts))
        times = [reduce, scatter, gather, to_all, of_counts, 2 * reduce, scatter + of_counts + 2 * to_all + gather]
        if rank == 0:
            print(tokens, *(f"{us:.1f}" for us in times), sep=" | ", flush=True)
    # NCCL's communicators wait for the graphs that captured their collectives.
    os._exit(0)


main()
