// One aligned region copied by bulk copies (TMA), memory -> shared memory -> memory, for tools/bench_kernels.py.
//
// The region is cut into pieces of BULK_BYTES, of which a CTA takes every gridDim.x-th. One thread starts them all and
// keeps up to STAGES under way. Piece k of a CTA passes through stage k % STAGES of shared memory:
//
//     load(k)   the bulk copy into the stage; completes the phase k / STAGES of the stage's barrier
//     store(k)  waits for that phase, then a bulk copy out of the stage; once read, the stage is free again
//
// Bulk copies take multiples of 16 bytes at addresses that are multiples of 16: nothing narrower.

// BULK_BYTES (a multiple of 16 that divides the region) and STAGES are set by tools/bench_kernels.py.

typedef unsigned long long u64;

static __device__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

extern "C" __global__ void __launch_bounds__(32)
bulk_copy(const char* src, char* dst, u64 nbytes) {
    extern __shared__ __align__(128) char stages[];  // STAGES x BULK_BYTES
    __shared__ __align__(8) u64 arrived[STAGES];     // barriers; each completes a phase when its stage has been filled
    if (threadIdx.x) return;

    for (int stage = 0; stage < STAGES; ++stage)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrived + stage)));
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // bulk copies see the barriers

    const u64 pieces = nbytes / BULK_BYTES;
    const u64 mine = pieces > blockIdx.x ? (pieces - blockIdx.x - 1) / gridDim.x + 1 : 0;
    auto offset = [&](u64 k) { return (blockIdx.x + k * gridDim.x) * BULK_BYTES; };
    auto load = [&](u64 k) {
        const unsigned stage = shared_address(stages + k % STAGES * BULK_BYTES);
        const unsigned barrier = shared_address(arrived + k % STAGES);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(BULK_BYTES) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(stage), "l"(src + offset(k)), "r"(BULK_BYTES), "r"(barrier) : "memory");
    };
    auto store = [&](u64 k) {
        const unsigned stage = shared_address(stages + k % STAGES * BULK_BYTES);
        const unsigned barrier = shared_address(arrived + k % STAGES);
        const unsigned phase = k / STAGES & 1;
        unsigned done = 0;
        while (!done)
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     ::"l"(dst + offset(k)), "r"(stage), "r"(BULK_BYTES) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    };

    for (u64 k = 0; k < mine && k < STAGES; ++k) load(k);
    for (u64 k = 0; k < mine; ++k) {
        store(k);
        if (k + STAGES < mine) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the stage has been read
            load(k + STAGES);
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // written, before the kernel ends
}
