// Checksums of one tile in each of many parts of tensors: kernels/copies/strata.py says which and why.
//
// A warp takes a stratum: it works out from the seed which tile is the sampled one, and sums that tile's words, each mixed
// with its number in the tile. The first launch of a refit writes sums[0][stratum]; the second writes sums[1][stratum] and
// counts those that differ.
//
// A tensor may begin at any byte. A tile's words are the aligned 16 bytes within it; the bytes before and after them, at
// most 15 each, are mixed one by one. Both launches see the same addresses, so they number alike.

// tile_sums.py sets TILE_BYTES, and as for all kernels THREADS and BATCH: the loads under way in each thread.

constexpr unsigned LANES = 32, WORD = 16;

typedef unsigned long long u64;

constexpr u64 ODD = 0x9e3779b97f4a7c15ull;

struct alignas(16) Stratum {
    u64 address, nbytes; // of the tensor
    u64 first, width;    // in tiles of the tensor, with 32 bits after the point
};

// Each bit of the result depends on every bit of `number`, and different numbers have different results.
static __device__ u64 mix(u64 number) {
    number = (number ^ number >> 33) * 0xff51afd7ed558ccdull;
    number = (number ^ number >> 33) * 0xc4ceb9fe1a85ec53ull;
    return number ^ number >> 33;
}

// A word's share of the sum: any one changed word changes the sum for certain, several almost surely.
static __device__ u64 share(u64 word, u64 number, u64 seed) { return mix(word ^ (seed + number * ODD)); }

static __device__ u64 sum_bytes(u64 address, unsigned count, u64 number, u64 seed) {
    const unsigned lane = threadIdx.x % LANES;
    if (lane >= count) return 0;
    return share(__ldcs(reinterpret_cast<const unsigned char*>(address) + lane), number + lane, seed);
}

static __device__ u64 sum_tile(u64 address, unsigned nbytes, u64 seed) {
    const unsigned head = min(nbytes, static_cast<unsigned>(-address % WORD));
    const unsigned words = (nbytes - head) / WORD, tail = (nbytes - head) % WORD;
    const uint4* const aligned = reinterpret_cast<const uint4*>(address + head);
    u64 sum = sum_bytes(address, head, 2 * TILE_BYTES, seed) +
              sum_bytes(address + head + words * WORD, tail, 2 * TILE_BYTES + WORD, seed);
    for (unsigned first = threadIdx.x % LANES; first < words; first += BATCH * LANES) {
        uint4 loaded[BATCH];
#pragma unroll
        for (unsigned k = 0; k < BATCH; ++k)
            if (first + k * LANES < words) loaded[k] = __ldcs(aligned + first + k * LANES);
#pragma unroll
        for (unsigned k = 0; k < BATCH; ++k) {
            const u64 number = 2 * static_cast<u64>(first + k * LANES);
            if (first + k * LANES < words)
                sum += share(static_cast<u64>(loaded[k].y) << 32 | loaded[k].x, number, seed) +
                       share(static_cast<u64>(loaded[k].w) << 32 | loaded[k].z, number + 1, seed);
        }
    }
    for (int lanes = LANES / 2; lanes; lanes /= 2) sum += __shfl_down_sync(0xffffffffu, sum, lanes);
    return sum;
}

// changed[0]: how many strata differ. sums [2][strata].
extern "C" __global__ void __launch_bounds__(THREADS)
tile_sums(const Stratum* __restrict__ strata, unsigned count, u64* __restrict__ sums, u64* __restrict__ changed,
          u64 seed, unsigned again) {
    if (!again && !blockIdx.x && !threadIdx.x) *changed = 0;
    const unsigned warps = gridDim.x * (THREADS / LANES);
    for (unsigned number = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES; number < count; number += warps) {
        const Stratum stratum = strata[number];
        const u64 random = mix(seed + (number + 1) * ODD) >> 32;
        const u64 start = ((stratum.first + __umul64hi(stratum.width, random << 32)) >> 32) * TILE_BYTES;
        const unsigned nbytes = min(static_cast<u64>(TILE_BYTES), stratum.nbytes - start);
        const u64 sum = sum_tile(stratum.address + start, nbytes, seed);
        if (threadIdx.x % LANES == 0) {
            sums[again * static_cast<u64>(count) + number] = sum;
            if (again && sum != sums[number]) atomicAdd(changed, 1ull);
        }
    }
}
