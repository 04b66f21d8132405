// One launch performs a table of strided copies between any two memories that the GPU can address: its own, a peer's
// over NVLink, or both. kernels/cuda/tiles.py cuts the table into tiles; a CTA takes every gridDim.x-th of them.
//
// A tile is a box of rows. Its words are numbered row by row, and thread i of T takes words i, i + T, i + 2 T, ...
// Example: 3 rows of 4 words, 64 bytes apart at the source, packed at the destination, T = 8:
//
//     source       0 1 2 3 . . . . . . . . . . . .      thread 0: word 0 = row 0 column 0, word 8 = row 2 column 0
//      (64 bytes)  4 5 6 7 . . . . . . . . . . . .      thread 5: word 5 = row 1 column 1
//      a row)      8 9 a b . . . . . . . . . . . .      step of 8 words = 2 rows and 0 columns
//     destination  0 1 2 3 4 5 6 7 8 9 a b
//
// A thread divides twice per tile; then it goes from word to word by adding the step. It starts up to BATCH loads before
// its first store: a load from a peer takes microseconds, and only loads in flight fill the link. Threads never wait for
// each other, so a warp that is done goes on with the next tile while others still copy.

// copy_kernel.py sets THREADS and BATCH, and CHECKSUMS and OWN_GPU where the kernel takes them.
#ifndef CHECKSUMS
#define CHECKSUMS 0
#endif
// Whether sources lie in the GPU's own memory: loads that L2 may keep are 2% faster there.
#ifndef OWN_GPU
#define OWN_GPU 0
#endif

constexpr unsigned LANES = 32;

typedef unsigned long long u64;

struct alignas(16) Tile {
    u64 src, dst;                     // addresses of the first byte
    long long src_stride, dst_stride; // bytes from row to row
    unsigned words, row_words;
    unsigned word_bytes;
    unsigned copy;                    // for messages
};

// Visits the thread's words on one side of a tile, by additions alone.
template <typename Word>
struct Cursor {
    u64 address;
    unsigned column;
    const unsigned row_words, step_columns;
    const u64 step, wrap;

    __device__ Cursor(const Tile& tile, u64 base, long long stride)
        : address(base + threadIdx.x / tile.row_words * stride + threadIdx.x % tile.row_words * sizeof(Word)),
          column(threadIdx.x % tile.row_words), row_words(tile.row_words), step_columns(THREADS % tile.row_words),
          step(THREADS / tile.row_words * stride + THREADS % tile.row_words * sizeof(Word)),
          wrap(stride - tile.row_words * sizeof(Word)) {}

    __device__ Word* next() {
        Word* const here = reinterpret_cast<Word*>(address);
        address += step;
        column += step_columns;
        if (column >= row_words) {
            column -= row_words;
            address += wrap;
        }
        return here;
    }
};

// A word's share of a tile's checksum. It is linear in the word, with an odd factor for each number in the tile: any one
// changed word changes the sum, and words that change places almost surely change it.
static __device__ u64 weigh(u64 low, u64 high, unsigned number) {
    const u64 factor = (2 * static_cast<u64>(number) + 1) * 0x9e3779b97f4a7c15ull;
    return low * factor + high * (factor ^ 0x517cc1b727220a94ull);
}
static __device__ u64 weigh(uint4 word, unsigned number) {
    return weigh(static_cast<u64>(word.y) << 32 | word.x, static_cast<u64>(word.w) << 32 | word.z, number);
}
static __device__ u64 weigh(u64 word, unsigned number) { return weigh(word, 0, number); }

// Copy the thread's words of a tile. Returns their checksum as they were read (0 without CHECKSUMS).
template <typename Word>
static __device__ u64 copy_words(const Tile& tile) {
    u64 sum = 0;
    Cursor<Word> from(tile, tile.src, tile.src_stride), to(tile, tile.dst, tile.dst_stride);
    const unsigned words = tile.words;
    for (unsigned first = threadIdx.x; first < words; first += BATCH * THREADS) {
        Word loaded[BATCH];
#pragma unroll
        for (unsigned k = 0; k < BATCH; ++k) {
            const Word* const word = from.next();
            if (first + k * THREADS < words) loaded[k] = OWN_GPU ? __ldcg(word) : __ldcs(word);
        }
#pragma unroll
        for (unsigned k = 0; k < BATCH; ++k) {
            const unsigned number = first + k * THREADS;
            Word* const word = to.next();
            if (number < words) {
                if constexpr (CHECKSUMS) sum += weigh(loaded[k], number);
#ifdef FAULTY_COPY  // for tests of the checksums: one word of one copy is written as another
                if (tile.copy == FAULTY_COPY && number == 0) *reinterpret_cast<unsigned char*>(&loaded[k]) ^= 1;
#endif
                __stcs(word, loaded[k]);
            }
        }
    }
    return sum;
}

// The checksum of the thread's words as they are at the destination now. A thread reads what it wrote itself, so this
// needs no barrier. __ldcg bypasses the L1 cache.
template <typename Word>
static __device__ u64 sum_words(const Tile& tile) {
    u64 sum = 0;
    Cursor<Word> at(tile, tile.dst, tile.dst_stride);
#pragma unroll 4
    for (unsigned number = threadIdx.x; number < tile.words; number += THREADS) sum += weigh(__ldcg(at.next()), number);
    return sum;
}

static __device__ void add_sum(u64* total, u64 sum) {
    for (int lanes = LANES / 2; lanes; lanes /= 2) sum += __shfl_down_sync(0xffffffffu, sum, lanes);
    if (threadIdx.x % LANES == 0) atomicAdd(total, sum);
}

// sums[0] += checksum of the tile as it was read, sums[1] as it was written.
template <typename Word>
static __device__ void copy_tile(const Tile& tile, u64* sums) {
    const u64 read = copy_words<Word>(tile);
    if constexpr (CHECKSUMS) {
        add_sum(sums, read);
        add_sum(sums + 1, sum_words<Word>(tile));
    }
}

// Whether the host, whose memory `stop` is (or null), wants nothing to be copied any more.
static __device__ bool is_stopped(const unsigned* stop) {
    if (stop == nullptr) return false;
    __shared__ unsigned stopped;
    if (threadIdx.x == 0) stopped = *static_cast<const volatile unsigned*>(stop);
    __syncthreads();
    return stopped;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
copy_tiles(const Tile* __restrict__ tiles, unsigned count, u64* __restrict__ sums, const unsigned* stop) {
    if (is_stopped(stop)) return;
    __shared__ Tile warp_tiles[THREADS / LANES];  // one for each warp, so that warps need not wait for each other
    constexpr unsigned PARTS = sizeof(Tile) / sizeof(uint4);
    Tile& tile = warp_tiles[threadIdx.x / LANES];
    const unsigned part = threadIdx.x % LANES;
    uint4 next;
    if (part < PARTS && blockIdx.x < count) next = reinterpret_cast<const uint4*>(tiles + blockIdx.x)[part];
    for (unsigned number = blockIdx.x; number < count; number += gridDim.x) {
        __syncwarp();  // all lanes are done with the tile before
        if (part < PARTS) {
            reinterpret_cast<uint4*>(&tile)[part] = next;
            if (number + gridDim.x < count)  // arrives while this tile is copied
                next = reinterpret_cast<const uint4*>(tiles + number + gridDim.x)[part];
        }
        __syncwarp();
        u64* const sum = sums + 2 * static_cast<u64>(number);
        switch (tile.word_bytes) {
            case 16: copy_tile<uint4>(tile, sum); break;
            case 8: copy_tile<u64>(tile, sum); break;
            case 4: copy_tile<unsigned>(tile, sum); break;
            case 2: copy_tile<unsigned short>(tile, sum); break;
            default: copy_tile<unsigned char>(tile, sum);
        }
    }
}
