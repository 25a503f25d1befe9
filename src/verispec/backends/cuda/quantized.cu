// One linear layer of few rows on weights of BITS bits, with what follows it: for drafts, so its bits are nobody's promise.
// Compiled for one layer: KIND, N, K, BITS (4 or 8), SPLITS (warps of a block, which share the columns of 16 weight rows),
// STAGES, WIDTH, and for q/k/v HEADS, KV_HEADS, HEAD_DIM.
// Weights stand in the order in which lanes want them (quantize.py): 64 columns of 16 weight rows, a chunk, are one load per
// lane and 4 bits; all scales lie behind them. Whole numbers are multiplied, and each sum over 32 columns is scaled. A warp
// streams its chunks through a ring of its own in shared memory, which is filled before the wait for the kernel in front.
#include "epilogues.cuh"

using namespace vs;

constexpr int kChunks = K / 64, kLoads = BITS / 4;
constexpr int kOwn = (kChunks + SPLITS - 1) / SPLITS;  // chunks of a warp; the last one may have fewer
constexpr bool kEven = kOwn * SPLITS == kChunks;
constexpr int kAhead = kOwn < 4 ? kOwn : 4;  // chunks whose columns of x are on their way to registers
constexpr int kValueBytes = kLoads * 512, kStageBytes = kValueBytes + 64, kRingBytes = STAGES * kStageBytes;
constexpr int kThreads = 32 * (SPLITS + kScaled);

// Chunk `at` of a warp: each lane's own values, and the scales of all.
__device__ __forceinline__ void fetch(unsigned ring, const unsigned char* values, const unsigned char* scales, int at, int lane) {
  const unsigned stage = ring + at % STAGES * kStageBytes;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) copy16(stage + (i * 32 + lane) * 16, values + (at * kLoads + i) * 512 + lane * 16, true);
  if (lane < 4) copy16(stage + kValueBytes + lane * 16, scales + at * 64 + lane * 16, true);
}

struct Chunk {
  uint4 values[kLoads];
  uint2 scales;  // bf16: rows g and g + 8, columns 0-31 and 32-63 of each
  __device__ Chunk(const unsigned char* stage, int lane) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) values[i] = *reinterpret_cast<const uint4*>(stage + (i * 32 + lane) * 16);
    scales = *reinterpret_cast<const uint2*>(stage + kValueBytes + (lane >> 2) * 8);
  }
};

// The 8 weights of a lane for one k16 step, as whole numbers in bf16.
__device__ __forceinline__ void whole_numbers(unsigned* w, const Chunk& chunk, int step) {
#if BITS == 4
  const unsigned word = reinterpret_cast<const unsigned*>(&chunk.values[0])[step];
  const __nv_bfloat162 zero = __floats2bfloat162_rn(136.0f, 136.0f);
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 0x4300 + q is 128 + q
    const unsigned raised = (word >> (4 * i) & 0x000f000f) | 0x43004300;
    const __nv_bfloat162 v = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&raised), zero);
    w[i] = *reinterpret_cast<const unsigned*>(&v);
  }
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 0x4b000000 + q is 2^23 + q
    const unsigned word = reinterpret_cast<const unsigned*>(&chunk.values[step / 2])[step % 2 * 2 + i / 2];
    const float low = __uint_as_float(__byte_perm(word, 0x4b000000, i % 2 ? 0x7442 : 0x7440));
    const float high = __uint_as_float(__byte_perm(word, 0x4b000000, i % 2 ? 0x7443 : 0x7441));
    const __nv_bfloat162 v = __floats2bfloat162_rn(sub(low, 8388736.0f), sub(high, 8388736.0f));
    w[i] = *reinterpret_cast<const unsigned*>(&v);
  }
#endif
}

__device__ __forceinline__ void load_row(uint2* b, const bf16* x, int at) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    b[step] = x == nullptr ? make_uint2(0, 0) : *reinterpret_cast<const uint2*>(x + at * 64 + step * 16);
}

__device__ __forceinline__ void multiply(float* acc, const Chunk& chunk, const uint2* b) {
  const bf16* scales = reinterpret_cast<const bf16*>(&chunk.scales);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sums[4] = {};
#pragma unroll
    for (int step = 2 * half; step < 2 * half + 2; ++step) {
      unsigned w[4];
      whole_numbers(w, chunk, step);
      mma(sums, w, &b[step].x);
    }
    const float low = to_float(scales[half]), high = to_float(scales[2 + half]);
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] = fused(sums[e], e < 2 ? low : high, acc[e]);
  }
}

// grid (tiles of 16 weight rows, blocks of eight rows)
extern "C" __global__ void __launch_bounds__(kThreads, 2) quantized(const Args a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float4 sums[SPLITS][32];
  __shared__ float factor[8];
  const int split = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int tile = blockIdx.x, first_row = blockIdx.y * 8, own = kEven ? kOwn : min(kOwn, kChunks - split * kOwn);
  const bool works = split < SPLITS;
  const int64 begin = static_cast<int64>(tile) * kChunks + split * kOwn;
  const unsigned char* values = reinterpret_cast<const unsigned char*>(a.w) + begin * kValueBytes;
  const unsigned char* scales =
      reinterpret_cast<const unsigned char*>(a.w) + static_cast<int64>(N / 16) * kChunks * kValueBytes + begin * 64;
  const unsigned char* ring = memory + split * kRingBytes;
  const unsigned to = shared_address(ring);
  Columns columns;
  Beside beside[2];  // of rows 2 t and 2 t + 1
  release_next();
  if (works) {
#pragma unroll
    for (int at = 0; at < STAGES - 1; ++at) {
      if (at < own) fetch(to, values, scales, at, lane);
      copy_commit();
    }
    if (split == 0) {
      fetch_columns(a, columns, tile, g);
#pragma unroll
      for (int e = 0; e < 2; ++e) fetch_constants(a, beside[e], first_row + 2 * t + e, tile, g);
    }
  }
  wait_for_previous();
  if (works) {
    if (KIND == RESIDUAL && split == 0)
#pragma unroll
      for (int e = 0; e < 2; ++e) fetch_residual(a, beside[e], first_row + 2 * t + e, tile, g);
    const int row = first_row + g;
    const bf16* x = row < a.rows ? a.x + static_cast<int64>(row_of(a, row)) * K + split * kOwn * 64 + 4 * t : nullptr;
    float acc[4] = {};
    uint2 b[kAhead][4];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_row(b[i], i < own ? x : nullptr, i);
#pragma unroll 1
    for (int first = 0; first < own; first += kAhead)
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = first + i;
        if (at >= own) break;
        copy_wait<STAGES - 2>();
        __syncwarp();
        if (at + STAGES - 1 < own) fetch(to, values, scales, at + STAGES - 1, lane);  // where all lanes have read before
        copy_commit();
        multiply(acc, Chunk(ring + at % STAGES * kStageBytes, lane), b[i]);
        if (at + kAhead < own) load_row(b[i], x, at + kAhead);
      }
    sums[split][lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
  } else if (kScaled) {
    eight_factors(a, first_row, factor, lane);
  }
  __syncthreads();
  if (!works || split > 0) return;
  float4 y = sums[0][lane];
  for (int p = 1; p < SPLITS; ++p) {
    const float4 other = sums[p][lane];
    y.x = add(y.x, other.x), y.y = add(y.y, other.y), y.z = add(y.z, other.z), y.w = add(y.w, other.w);
  }
  const int row = first_row + 2 * t;
  finish(a, columns, beside[0], tile, g, row, kScaled ? factor[2 * t] : 1.0f, y.x, y.z);
  finish(a, columns, beside[1], tile, g, row + 1, kScaled ? factor[2 * t + 1] : 1.0f, y.y, y.w);
}
