// One linear layer of few rows on weights of BITS bits, with what follows it: for drafts, so its bits are nobody's promise.
// Compiled for one layer: KIND, N, K, BITS (4 or 8), TILES (16 weight rows each, per block), SPLITS (warps that
// share the columns of a tile), WIDTH, and for q/k/v HEADS, KV_HEADS, HEAD_DIM.
// Weights stand in the order in which lanes want them (quantize.py): 64 columns of 16 weight rows are one load per lane and
// 4 bits; all scales lie behind them. Whole numbers are multiplied, and each sum over 32 columns is scaled. The first loads
// do not wait for the kernel in front.
#include "epilogues.cuh"

using namespace vs;

constexpr int kChunks = K / 64, kWarps = TILES * SPLITS, kLoads = BITS / 4;
constexpr int kOwn = kChunks / SPLITS;  // chunks of a warp
static_assert(kOwn * SPLITS == kChunks, "warps share the columns equally");

__host__ __device__ constexpr int largest_divisor(int n, int most) { return n % most == 0 ? most : largest_divisor(n, most - 1); }
// Chunks on their way, and blocks on an SM: measured on an H200. Few blocks fetch far ahead, many keep each other busy.
constexpr int kMost = KIND == RESIDUAL ? 8 : KIND == QKV ? 4 : 2, kBlocks = KIND == RESIDUAL ? 2 : KIND == QKV ? 3 : 4;
constexpr int kAhead = largest_divisor(kOwn, kMost);
constexpr int kThreads = 32 * (kWarps + kScaled);

struct Chunk {
  uint4 values[kLoads];
  uint2 scales;  // bf16: rows g and g + 8, columns 0-31 and 32-63 of each
};

__device__ __forceinline__ uint4 load16(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

__device__ __forceinline__ void fetch(Chunk& chunk, const uint4* values, const uint2* scales, int at) {
#pragma unroll
  for (int i = 0; i < kLoads; ++i) chunk.values[i] = load16(values + (at * kLoads + i) * 32);
  chunk.scales = __ldg(scales + at * 8);
}

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

// grid (blocks of TILES tiles, blocks of eight rows)
extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) quantized(const Args a) {
  __shared__ float4 sums[kWarps][32];
  __shared__ float factor[8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3, split = warp % SPLITS;
  const int tile = blockIdx.x * TILES + warp / SPLITS, first_row = blockIdx.y * 8;
  const bool works = warp < kWarps && tile * 16 < N;
  const int64 begin = static_cast<int64>(tile) * kChunks + split * kOwn;
  const uint4* values = reinterpret_cast<const uint4*>(a.w) + begin * kLoads * 32 + lane;
  const uint4* behind = reinterpret_cast<const uint4*>(a.w) + static_cast<int64>(N / 16) * kChunks * kLoads * 32;
  const uint2* scales = reinterpret_cast<const uint2*>(behind) + begin * 8 + g;
  Columns columns;
  Beside beside[2];  // of rows 2 t and 2 t + 1
  Chunk chunks[kAhead];
  release_next();
  if (works) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fetch(chunks[i], values, scales, i);
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
#pragma unroll 1
    for (int at = 0; at < kOwn - kAhead; at += kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load_row(b[i], x, at + i);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        multiply(acc, chunks[i], b[i]);
        fetch(chunks[i], values, scales, at + i + kAhead);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_row(b[i], x, kOwn - kAhead + i);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) multiply(acc, chunks[i], b[i]);
    sums[warp][lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
  } else if (kScaled && warp == kWarps) {
    eight_factors(a, first_row, factor, lane);
  }
  __syncthreads();
  if (!works || split > 0) return;
  float4 y = sums[warp][lane];
  for (int p = 1; p < SPLITS; ++p) {
    const float4 other = sums[warp + p][lane];
    y.x = add(y.x, other.x), y.y = add(y.y, other.y), y.z = add(y.z, other.z), y.w = add(y.w, other.w);
  }
  const int row = first_row + 2 * t;
  finish(a, columns, beside[0], tile, g, row, kScaled ? factor[2 * t] : 1.0f, y.x, y.z);
  finish(a, columns, beside[1], tile, g, row + 1, kScaled ? factor[2 * t + 1] : 1.0f, y.y, y.w);
}
