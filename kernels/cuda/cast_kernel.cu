// Casts between two memories, and the scales that casts to block FP8 use. This file is compiled behind copy_kernel.cu,
// for its Tile and Cursor. cast_arithmetic.py has the same arithmetic on a CPU; the two agree bit for bit.
//
// A word has the same number of elements on both sides, so its size differs. A row of words lies within one row of
// blocks, and a word within one block. Example: blocks of 32 columns, words of 8, a tile from column 16 of a block on:
//
//     word    0 1 | 2 3 4 5 | 6 7 8 9      word w of a row has scale (first_column + 8 w) / 32: 0 0 1 1 1 1 2 2 2 2

struct alignas(16) CastTile {
    Tile box;                      // word_bytes: elements of a word, 1 where memory is not aligned for more
    u64 scales;                    // address of the scale of the first column
    unsigned first_column;         // within its block
    unsigned short block_columns;
    unsigned short kind;           // one of those of CAST_KINDS in cast_tiles.py
};

// The two bfloat16 of a pair, as float32.
static __device__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
static __device__ float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

static __device__ unsigned e4m3_pair(float first, float second) {
    unsigned short both;  // the first in the low byte
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
    return both;
}
static __device__ unsigned scaled_pair(unsigned pair, float factor) {
    return e4m3_pair(__fmul_rn(low(pair), factor), __fmul_rn(high(pair), factor));
}
static __device__ unsigned narrowed(unsigned bits) {  // to nearest, ties to even
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Kinds of casts, with many elements a word and with one.
struct ToE4m3x8 {
    typedef uint4 From;
    typedef u64 To;
    static constexpr unsigned ELEMENTS = 8;
    static constexpr bool SCALED = true;
    static __device__ To of(From w, float f) {
        const unsigned first = scaled_pair(w.x, f) | scaled_pair(w.y, f) << 16;
        return static_cast<u64>(scaled_pair(w.z, f) | scaled_pair(w.w, f) << 16) << 32 | first;
    }
};
struct ToE4m3 {
    typedef unsigned short From;
    typedef unsigned char To;
    static constexpr unsigned ELEMENTS = 1;
    static constexpr bool SCALED = true;
    static __device__ To of(From w, float f) { return static_cast<To>(scaled_pair(w, f)); }
};
struct Narrowx4 {
    typedef uint4 From;
    typedef u64 To;
    static constexpr unsigned ELEMENTS = 4;
    static constexpr bool SCALED = false;
    static __device__ To of(From w, float) {
        return static_cast<u64>(narrowed(w.z) | narrowed(w.w) << 16) << 32 | (narrowed(w.x) | narrowed(w.y) << 16);
    }
};
struct Narrow {
    typedef unsigned From;
    typedef unsigned short To;
    static constexpr unsigned ELEMENTS = 1;
    static constexpr bool SCALED = false;
    static __device__ To of(From w, float) { return static_cast<To>(narrowed(w)); }
};
struct Widenx4 {
    typedef u64 From;
    typedef uint4 To;
    static constexpr unsigned ELEMENTS = 4;
    static constexpr bool SCALED = false;
    static __device__ To of(From w, float) {
        const unsigned a = static_cast<unsigned>(w), b = static_cast<unsigned>(w >> 32);
        return make_uint4(a << 16, a & 0xffff0000u, b << 16, b & 0xffff0000u);
    }
};
struct Widen {
    typedef unsigned short From;
    typedef unsigned To;
    static constexpr unsigned ELEMENTS = 1;
    static constexpr bool SCALED = false;
    static __device__ To of(From w, float) { return static_cast<unsigned>(w) << 16; }
};

template <typename Cast>
static __device__ void cast_words(const CastTile& tile) {
    Cursor<const typename Cast::From> from(tile.box, tile.box.src, tile.box.src_stride);
    Cursor<typename Cast::To> to(tile.box, tile.box.dst, tile.box.dst_stride);
    const float* const scales = reinterpret_cast<const float*>(tile.scales);
    const unsigned words = tile.box.words;
    for (unsigned first = threadIdx.x; first < words; first += BATCH * THREADS) {
        typename Cast::From loaded[BATCH];
        float scale[BATCH];
#pragma unroll
        for (unsigned k = 0; k < BATCH; ++k) {
            const unsigned column = tile.first_column + from.column * Cast::ELEMENTS;
            const typename Cast::From* const word = from.next();
            if (first + k * THREADS < words) {
                loaded[k] = __ldcs(word);
                if constexpr (Cast::SCALED) scale[k] = __ldg(scales + column / tile.block_columns);
            }
        }
#pragma unroll
        for (unsigned k = 0; k < BATCH; ++k) {
            typename Cast::To* const word = to.next();
            if (first + k * THREADS < words) *word = Cast::of(loaded[k], Cast::SCALED ? __frcp_rn(scale[k]) : 0.0f);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
cast_tiles(const CastTile* __restrict__ tiles, unsigned count, const unsigned* stop) {
    if (is_stopped(stop)) return;
    for (unsigned number = blockIdx.x; number < count; number += gridDim.x) {
        const CastTile tile = tiles[number];
        switch (tile.kind * 2 + (tile.box.word_bytes > 1)) {
            case 0: cast_words<ToE4m3>(tile); break;
            case 1: cast_words<ToE4m3x8>(tile); break;
            case 2: cast_words<Narrow>(tile); break;
            case 3: cast_words<Narrowx4>(tile); break;
            case 4: cast_words<Widen>(tile); break;
            default: cast_words<Widenx4>(tile);
        }
    }
}

// A block of a weight, bfloat16, and where its scale goes. Rows begin `stride` bytes apart.
struct alignas(16) Block {
    u64 src, scale;
    unsigned stride, rows, columns;
    unsigned word_elements;  // 8, or 1 where rows are not aligned for more
};

// The larger of two pairs of non-negative bfloat16, half by half; a NaN wins.
static __device__ unsigned larger(unsigned a, unsigned b) {
    unsigned maximum;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(maximum) : "r"(a), "r"(b));
    return maximum;
}
static __device__ unsigned magnitudes(unsigned pair) { return pair & 0x7fff7fffu; }
static __device__ unsigned largest(uint4 w) {
    return larger(larger(magnitudes(w.x), magnitudes(w.y)), larger(magnitudes(w.z), magnitudes(w.w)));
}
static __device__ unsigned largest(unsigned short w) { return magnitudes(w); }

// The largest magnitudes among the lane's words of a block, a pair.
template <typename Word>
static __device__ unsigned largest_of(const Block& block) {
    const unsigned row_words = block.columns * 2 / sizeof(Word), words = block.rows * row_words;
    unsigned maximum = 0;
    for (unsigned first = threadIdx.x % LANES; first < words; first += BATCH * LANES) {
        Word loaded[BATCH] = {};
#pragma unroll
        for (unsigned k = 0; k < BATCH; ++k) {
            const unsigned number = first + k * LANES, row = number / row_words;
            const u64 address = block.src + static_cast<u64>(row) * block.stride + (number % row_words) * sizeof(Word);
            if (number < words) loaded[k] = __ldg(reinterpret_cast<const Word*>(address));
        }
#pragma unroll
        for (unsigned k = 0; k < BATCH; ++k) maximum = larger(maximum, largest(loaded[k]));
    }
    return maximum;
}

// Like torch on CUDA: multiply by the reciprocal of the constant 448. A NaN stays one. `half`: the largest magnitude.
static __device__ float scale_of(unsigned half) {
    const float amax = low(half);
    return __fmul_rn(amax < 1e-4f ? 1e-4f : amax, 1.0f / 448.0f);
}

// One warp for each block.
extern "C" __global__ void __launch_bounds__(THREADS)
block_scales(const Block* __restrict__ blocks, unsigned count) {
    constexpr unsigned WARPS = THREADS / LANES;
    for (unsigned number = blockIdx.x * WARPS + threadIdx.x / LANES; number < count; number += gridDim.x * WARPS) {
        const Block block = blocks[number];
        const unsigned pair = block.word_elements > 1 ? largest_of<uint4>(block) : largest_of<unsigned short>(block);
        const unsigned half = __reduce_max_sync(0xffffffffu, max(pair & 0xffffu, pair >> 16));  // ordered as integers
        if (threadIdx.x % LANES == 0) *reinterpret_cast<float*>(block.scale) = scale_of(half);
    }
}

// Casts bfloat16 to block FP8, block by block, and writes the scale of each: a block is read once, into registers. A tile
// has blocks beside each other. No block has more than THREADS * BATCH words.
extern "C" __global__ void __launch_bounds__(THREADS, 2048 / THREADS / 2)
cast_blocks(const CastTile* __restrict__ tiles, unsigned count) {
    constexpr unsigned WARPS = THREADS / LANES;
    __shared__ unsigned largest_halves[2][WARPS];  // two, so that one barrier a block is enough
    unsigned turn = 0;
    for (unsigned number = blockIdx.x; number < count; number += gridDim.x) {
        const CastTile tile = tiles[number];
        const unsigned row_words = tile.box.row_words, rows = tile.box.words / row_words;
        const unsigned block_words = tile.block_columns / ToE4m3x8::ELEMENTS;
        float* scale = reinterpret_cast<float*>(tile.scales);
        for (unsigned column = 0; column < row_words; column += block_words, ++scale, turn ^= 1) {
            Tile block = tile.box;
            block.row_words = min(block_words, row_words - column);
            const unsigned words = block.row_words * rows;
            Cursor<const uint4> from(block, block.src + column * sizeof(uint4), block.src_stride);
            uint4 loaded[BATCH] = {};
#pragma unroll
            for (unsigned k = 0; k < BATCH; ++k) {
                const uint4* const word = from.next();
                if (threadIdx.x + k * THREADS < words) loaded[k] = __ldcs(word);
            }
            unsigned pair = 0;
#pragma unroll
            for (unsigned k = 0; k < BATCH; ++k) pair = larger(pair, largest(loaded[k]));
            unsigned half = __reduce_max_sync(0xffffffffu, max(pair & 0xffffu, pair >> 16));  // ordered as integers
            if (threadIdx.x % LANES == 0) largest_halves[turn][threadIdx.x / LANES] = half;
            __syncthreads();
#pragma unroll
            for (unsigned warp = 0; warp < WARPS; ++warp) half = max(half, largest_halves[turn][warp]);
            const float of_block = scale_of(half), factor = __frcp_rn(of_block);
            if (threadIdx.x == 0) *scale = of_block;
            Cursor<u64> to(block, block.dst + column * sizeof(u64), block.dst_stride);
#pragma unroll
            for (unsigned k = 0; k < BATCH; ++k) {
                u64* const word = to.next();
                if (threadIdx.x + k * THREADS < words) *word = ToE4m3x8::of(loaded[k], factor);
            }
        }
    }
}
