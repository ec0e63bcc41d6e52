/* The device kernels of guard mode: patterns are written around blocks and into freed ones, and looked at.
 *
 * The source of guard.ptx, which is what the library ships (`scripts/guard_ptx.py` makes it): the driver compiles
 * that for whatever GPU it finds. The stand-in for libcuda (tests/fake_cuda/kernels.h) includes this same
 * text as C, so that the tests run these very loops; hence no shared memory and no synchronisation, and the types
 * and macros at the top. Each thread sums up what it finds and tells it once, by atomics, which cost nothing
 * where nothing is wrong. Must not know: blocks, streams, the heap. */

#ifndef STRANDLINE_STAND_IN
typedef unsigned long long u64;
typedef unsigned char u8;
#define KERNEL extern "C" __global__ void
#define RANK ((u64)blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS ((u64)gridDim.x * blockDim.x)
#define LEAST(place, value) atomicMin(place, value)
#define ADD(place, value) atomicAdd(place, value)
#define RAISE(place) (*(volatile u64 *)(place) = 1)
#endif

/* One range that was looked at: the offset of the first byte that is wrong, and how many are. */
struct found {
    u64 first, count;
};

/* What one launch found. In host memory that the device can reach; the host sets `first` to ~0 before. */
struct slot {
    struct found front, rear, body;
};

#ifndef STRANDLINE_STAND_IN
__device__
#endif
static void tell(struct found *found, u64 first, u64 count, u64 *alarm) {
    if (count) {
        LEAST(&found->first, first);
        ADD(&found->count, count);
        RAISE(alarm);
    }
}

/* Bytes are looked at one by one up to a multiple of 16 and from the last one on, 16 at a time between them. */
#ifndef STRANDLINE_STAND_IN
__device__
#endif
static void look(u8 *at, u64 size, u64 word, struct found *found, u64 *alarm, u64 rank, u64 threads) {
    u64 first = ~0ull, count = 0, head = (16 - ((u64)at & 15)) & 15, i, k;
    u8 byte = (u8)word;
    if (head > size) head = size;
    u64 wide = (size - head) / 16, tail = head + wide * 16;
    for (i = rank; i < wide; i += threads) {
        ulonglong2 seen = ((ulonglong2 *)(at + head))[i];
        if (seen.x == word && seen.y == word) continue;
        for (k = 0; k < 16; k++)
            if (at[head + i * 16 + k] != byte) {
                if (head + i * 16 + k < first) first = head + i * 16 + k;
                count++;
            }
    }
    for (i = rank; i < head + (size - tail); i += threads) {
        k = i < head ? i : tail + (i - head);
        if (at[k] != byte) {
            if (k < first) first = k;
            count++;
        }
    }
    tell(found, first, count, alarm);
}

#ifndef STRANDLINE_STAND_IN
__device__
#endif
static void fill(u8 *at, u64 size, u64 word, u64 rank, u64 threads) {
    u64 head = (16 - ((u64)at & 15)) & 15, i;
    if (head > size) head = size;
    u64 wide = (size - head) / 16, tail = head + wide * 16;
    ulonglong2 both;
    both.x = word;
    both.y = word;
    for (i = rank; i < wide; i += threads) ((ulonglong2 *)(at + head))[i] = both;
    for (i = rank; i < head + (size - tail); i += threads) at[i < head ? i : tail + (i - head)] = (u8)word;
}

/* Writes the pattern before and behind a block of `size` bytes at `at`. */
KERNEL strandline_guard_arm(u8 *at, u64 size, u64 front, u64 rear, u64 pattern) {
    fill(at - front, front, pattern, RANK, THREADS);
    fill(at + size, rear, pattern, RANK, THREADS);
}

/* Looks at both patterns of a block, and fills its first `poisoned` bytes with the poison. */
KERNEL strandline_guard_retire(u8 *at, u64 size, u64 front, u64 rear, u64 pattern, u64 poisoned, u64 poison,
                               struct slot *slot, u64 *alarm) {
    look(at - front, front, pattern, &slot->front, alarm, RANK, THREADS);
    look(at + size, rear, pattern, &slot->rear, alarm, RANK, THREADS);
    fill(at, poisoned, poison, RANK, THREADS);
}

/* Looks whether a freed block still holds nothing but the poison. */
KERNEL strandline_guard_check(u8 *at, u64 size, u64 poison, struct slot *slot, u64 *alarm) {
    look(at, size, poison, &slot->body, alarm, RANK, THREADS);
}
