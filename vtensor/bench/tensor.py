"""What a virtual tensor costs beside torch's own: `vtensor bench tensor`.

**Operations.** Small ones on a tensor of 16 KiB that has all its memory: on the virtual one, on one of torch's, and on
the virtual one's `plain()`, which was taken before. Microseconds of the caller's time a call, means of batches of calls
that the three make in turns, in an order that is shuffled anew; on a GPU nobody waits within a batch. *over torch* is
the difference within one turn. The call of a Python function and the end of the result are part of all figures. A
virtual tensor looks for its memory once, if it is written to or read as a whole; each slice is a new one, and an
operation by index looks each time for what it names (*index_put*: two rows, by an index on the host).

**Creation.** `vtensor.empty` of 1 TiB from the default pool, and as the ceiling `torch.empty` of 4 KiB. *deletion* is
timed apart: dropping the tensor, the wait for the device, and the return of the addresses.

**First touches.** A value written to the first element of one page group after the other, until the device has done it:
for the first time, and once more. *mapped* is the difference, for each page group: memory that is created for it
(*fresh*; zeroed where the driver does not promise zeros) and that the pool had left, with others' data in it
(*recycled*: zeroed, or exchanged for new memory on a host, where another thread may read it at once). The ceiling is
the driver: create, map and set_access of the same handles, called from compiled code that zeroes nothing, touches
nothing and keeps no books.

**Growth.** Rows that come in chunks, small ones and on a GPU large ones, too, until the device has them all: `append_`
on memory that the pool creates or has left, `torch.cat` for each chunk, a list with one `torch.cat` at the end, and as
the ceiling a tensor that was made as large as it will be. All of it is timed, but for the chunks themselves, which are
there before. *peak* is computed, not measured: the bytes of all tensors at the time when they are most, without the
chunk at hand, and without what torch's allocator keeps of tensors that are gone.

**Reads of zeros.** The sum of a tensor to which nothing was ever written, until the device has it, for the first time
and once more, for each page group. The rival is the sum of a torch tensor of zeros, which lie in memory of their own:
where all of ours are one page, in the caches, ours is faster.

Targets for an H200: 10 us more than torch for an operation, and no difference with `plain()` (taken as 0.5 us, since it
is never quite 0); 100 us for a creation; 35 us for each page group that is mapped.
"""

from __future__ import annotations

from vtensor.allocator.driver import get_driver
from vtensor.bench.frame import Benchmark, Metric
from vtensor.bench.tensor_growth import growth
from vtensor.bench.tensor_operations import creation, operations
from vtensor.bench.tensor_touches import first_touches, zero_reads
from vtensor.devices import device_name, resolve_device
from vtensor.units import GIB, MIB, format_bytes

__all__ = ["benchmark"]

_METRICS = {
    **{name: Metric("us") for name in ("virtual", "torch", "plain()", "virtual over torch", "plain() over torch")},
    **{name: Metric("us") for name in ("creation", "deletion")},
    **{name: Metric("us/page group") for name in ("mapped fresh", "mapped recycled", "touched again")},
    "grown": Metric("ms"),
    "peak, computed": Metric("MiB"),
    **{name: Metric("us/page group") for name in ("first read", "second read")},
}


def benchmark(
    device: str, *, small: bool = False, rounds: int | None = None, touched_bytes: int | None = None
) -> Benchmark:
    """The benchmark for a device. `small`: a first look, in a few seconds.

    `touched_bytes` is what the first touches fill, a multiple of the driver's usual page group; by default 64 GiB on a
    GPU, or half of what is free there, and 256 MiB on a host.
    """
    device = device_name(resolve_device(device))
    on_gpu = device != "cpu"
    driver = get_driver(device)
    size = driver.default_page_group_bytes
    if touched_bytes is None:
        touched_bytes = 64 * size if small else 256 * MIB
        if on_gpu and not small:
            touched_bytes = min(64 * GIB, driver.memory_info()[0] // 2 // size * size)
    if touched_bytes < size or touched_bytes % size:
        raise ValueError(f"touched_bytes={touched_bytes!r} must be a positive multiple of {size:,}, the page group")
    read_bytes = 64 * size if small else 4 * GIB if on_gpu else 64 * MIB
    num_chunks, chunk_bytes = 8 if small else 64, [2 * size, 32 * size] if on_gpu else [8 * size]
    num_batches, num_calls, num_created = (3, 10, 5) if small else (20, 100, 50)
    return Benchmark(
        name="tensor",
        title="Virtual tensors beside torch's own",
        device=device,
        metrics=_METRICS,
        variants=[
            *operations(device, num_batches, num_calls),
            *creation(device, num_created),
            *first_touches(device, touched_bytes),
            *(variant for size in chunk_bytes for variant in growth(device, num_chunks, size)),
            *zero_reads(device, read_bytes),
        ],
        rounds=(2 if small else 5) if rounds is None else rounds,
        parameters={
            "small": small,
            "page_group_bytes": size,
            "num_batches": num_batches,
            "num_calls": num_calls,
            "num_created": num_created,
            "touched_bytes": touched_bytes,
            "num_chunks": num_chunks,
            "chunk_bytes": chunk_bytes,
            "read_bytes": read_bytes,
        },
        notes=f"page groups of {format_bytes(size)}; touches: {format_bytes(touched_bytes)}; "
        f"growth: {num_chunks} chunks; reads: {format_bytes(read_bytes)}",
        is_predicted=on_gpu,
    )
