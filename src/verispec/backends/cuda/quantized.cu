// One linear layer of few rows on weights of BITS bits, with what follows it: for drafts, so its bits are nobody's promise.
// Compiled for one layer: KIND, N, K, BITS (4 or 8), E4M3 (whether 8 bits are a float, and no whole number), BLOCK_ROWS (1, 2, 4 or
// 8 of a block), WARPS (that share the columns), STAGES, STEP (chunks of a stage), LATE (whether the next kernel may start only
// when the rows are there), ENDERS (up to 6), AMONG (blocks that registers of an SM are to have room for), WIDTH, and for q/k/v
// HEADS, KV_HEADS, HEAD_DIM.
// Weights stand in the order in which lanes want them (quantize.py): 64 columns of 16 weight rows, a chunk, are one load per
// lane and 4 bits; all scales lie behind them. A block takes every gridDim.x-th tile of 16 weight rows. Its warps stream their
// chunks of all those tiles through rings of their own in shared memory, which are filled before the wait for the kernel in
// front and do not run empty between tiles. Rows become numbers of 8 bits, whole or e4m3 as the weights are, each 64 columns with
// a scale; products are sums over 32 columns. ENDERS more warps, tile by tile in turns, add the sums of all and do what follows.
#include "epilogues.cuh"

using namespace vs;

constexpr int kTiles = N / 16, kChunks = K / 64, kLoads = BITS / 4;
constexpr int kSteps = ((kChunks + WARPS - 1) / WARPS + STEP - 1) / STEP, kOwn = kSteps * STEP;  // of a warp, in each tile
constexpr bool kEven = kOwn * WARPS == kChunks;
constexpr int kValueBytes = kLoads * 512, kChunkBytes = kValueBytes + 64, kStageBytes = STEP * kChunkBytes;
constexpr int kRingBytes = STAGES * kStageBytes, kRowBytes = kOwn * BLOCK_ROWS * 64;
constexpr int kThreads = 32 * (WARPS + ENDERS), kMeeting = 32 * (WARPS + 1);  // who multiplies, and one who ends a tile
constexpr int kSides = BLOCK_ROWS > 1 ? 2 : 1;  // rows of a lane: 2 t and 2 t + 1
constexpr int kPlaces = ENDERS > 2 ? ENDERS : 2;  // of tiles that were multiplied
constexpr int kHolders = BLOCK_ROWS > 2 ? BLOCK_ROWS / 2 : 1, kAlike = 4 / kHolders;  // lanes t that differ, and those of the same rows
constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: whole numbers that are added to it stand in its low bits
constexpr int kWholeBits = 0x4b400000;
constexpr float kMost = E4M3 ? 448.0f : 127.0f;  // what the largest of 64 columns of a row becomes
static_assert(!E4M3 || BITS == 8, "floats have 8 bits");

// 16 x 8 whole numbers, kWholeBits more than the products of 32 columns.
__device__ __forceinline__ void whole_mma(int* d, const unsigned* a, uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\n"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(kWholeBits));
}

// The same of floats: just the products. Hopper's assembler makes two products of halves of it, and unpacks both sides.
__device__ __forceinline__ void e4m3_mma(float* d, const unsigned* a, uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\n"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(0.0f));
}

__device__ __forceinline__ void products(float* sums, const unsigned* weights, uint2 x) {
  if (E4M3) return e4m3_mma(sums, weights, x);
  int whole[4];
  whole_mma(whole, weights, x);
#pragma unroll
  for (int e = 0; e < 4; ++e) sums[e] = sub(__int_as_float(whole[e]), kWhole);
}

// A lane's 16 weights of 32 columns: rows g and g + 8, twice four columns. Four bits become the upper half of a byte.
__device__ __forceinline__ void weights_of(unsigned* w, const uint4* values, int half) {
#if BITS == 4
  const unsigned low = half ? values->z : values->x, high = half ? values->w : values->y;
  w[0] = low & 0xf0f0f0f0, w[1] = low << 4 & 0xf0f0f0f0, w[2] = high & 0xf0f0f0f0, w[3] = high << 4 & 0xf0f0f0f0;
#else
  w[0] = values[half].x, w[1] = values[half].y, w[2] = values[half].z, w[3] = values[half].w;
#endif
}

// The chunks of one stage: where a warp is in its tiles.
struct Reader {
  const unsigned char *values, *scales;
  int step = 0, left;
  unsigned long long once = read_once();

  __device__ void fetch(unsigned stage, int first_chunk, int lane) {
    if (left == 0) return;
#pragma unroll
    for (int c = 0; c < STEP; ++c) {
      const bool wanted = kEven || first_chunk + step * STEP + c < kChunks;  // zeros behind the last column
      const unsigned to = stage + c * kChunkBytes;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const unsigned char* from = values + c * kValueBytes + i * 512 + lane * 16;
        if (BLOCK_ROWS > 1) copy16_once(to + (i * 32 + lane) * 16, from, wanted, once);  // with one row it was no quicker
        else copy16(to + (i * 32 + lane) * 16, from, wanted);
      }
      if (lane < 4) copy16(to + kValueBytes + lane * 16, scales + c * 64 + lane * 16, wanted);
    }
    --left;
    const bool is_last = ++step == kSteps;
    const int64 chunks = is_last ? static_cast<int64>(gridDim.x) * kChunks - (kSteps - 1) * STEP : STEP;
    values += chunks * kValueBytes, scales += chunks * 64;
    if (is_last) step = 0;
  }
};

// Eight columns of a row for each lane, which chunk of the warp's they are in, and of which row.
constexpr int kEighths = BLOCK_ROWS * kOwn * 8, kTurns = (kEighths + 31) / 32, kAtOnce = kTurns < 4 ? kTurns : 4;
struct Eighth {
  int row, chunk;
  __device__ Eighth(int turn, int lane) : row((turn * 32 + lane) / (kOwn * 8)), chunk((turn * 32 + lane) / 8 % kOwn) {}
};

__device__ __forceinline__ uint4 load_eighth(const Args& a, Eighth at, int first_row, int first_chunk, int lane) {
  const int row = first_row + at.row, chunk = first_chunk + at.chunk;
  if (at.row >= BLOCK_ROWS || row >= a.rows || chunk >= kChunks) return make_uint4(0, 0, 0, 0);
  return *reinterpret_cast<const uint4*>(a.x + static_cast<int64>(row_of(a, row)) * K + chunk * 64 + (lane & 7) * 8);
}

// Two floats in the order of their columns; no number stays none.
__device__ __forceinline__ unsigned short e4m3_pair(float first, float second) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;\n" : "=h"(pair) : "f"(first), "f"(second));
  return pair;
}

__device__ __forceinline__ unsigned four_of(const float* v, float inverse) {
  if (E4M3) {
    const unsigned low = e4m3_pair(mul(v[0], inverse), mul(v[1], inverse));
    return low | static_cast<unsigned>(e4m3_pair(mul(v[2], inverse), mul(v[3], inverse))) << 16;
  }
  unsigned q[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) q[i] = __float_as_uint(fused(v[i], inverse, kWhole));
  return __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
}

// In 8 bits [chunk][row][16 t: columns 8 t and 32 + 8 t on] with a scale for each 64; eight lanes have a chunk.
__device__ __forceinline__ void put_eighth(uint4 x, Eighth at, unsigned char* rows, float* row_scales, int lane) {
  const unsigned words[4] = {x.x, x.y, x.z, x.w};
  float v[8];
  unsigned bits = 0;  // of the largest: what is no number is larger than all
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
    bits = max(bits, __float_as_uint(fabsf(v[i])));
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, step));
  const float most = __uint_as_float(bits), inverse = most > 1e-30f ? div(kMost, most) : 0.0f;
  const uint2 eight = make_uint2(four_of(v, inverse), four_of(v + 4, inverse));
  if (at.row >= BLOCK_ROWS) return;
  const int to = at.chunk * BLOCK_ROWS + at.row;
  *reinterpret_cast<uint2*>(rows + to * 64 + (lane & 3) * 16 + (lane >> 2 & 1) * 8) = eight;
  if ((lane & 7) == 0) row_scales[to] = mul(most, (BITS == 4 ? 0.0625f : 1.0f) / kMost);
}

__device__ __forceinline__ void multiply(float* acc, const unsigned char* chunk, const unsigned char* row,
                                         const float* row_scales, int lane) {
  const uint4* values = reinterpret_cast<const uint4*>(chunk);
  uint4 own[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) own[i] = values[i * 32 + lane];
  const uint2 scales = *reinterpret_cast<const uint2*>(chunk + kValueBytes + (lane >> 2) * 8);  // of rows g and g + 8
  const uint4 x = *reinterpret_cast<const uint4*>(row);
  const float first = row_scales[0], second = BLOCK_ROWS > 1 ? row_scales[1] : first;
  unsigned w[4];
  float low[4], high[4];
  weights_of(w, own, 0);
  products(low, w, make_uint2(x.x, x.y));
  weights_of(w, own, 1);
  products(high, w, make_uint2(x.z, x.w));
#pragma unroll
  for (int e = 0; e < 4; e += 3 - kSides) {
    const unsigned both = e < 2 ? scales.x : scales.y;
    const float sum = mul(low[e], __uint_as_float(both << 16));
    const float sums = fused(high[e], __uint_as_float(both & 0xffff0000), sum);
    acc[e] = fused(sums, e % 2 ? second : first, acc[e]);
  }
}

__device__ __forceinline__ void arrive(int barrier) { asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "n"(kMeeting) : "memory"); }
__device__ __forceinline__ void meet(int barrier) { asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "n"(kMeeting) : "memory"); }
constexpr int kFull = 1, kEmpty = kFull + kPlaces;  // barriers of places for sums
static_assert(kEmpty + kPlaces <= 16, "there are so many barriers");

// A lane's sums of a tile: of output g, then of g + 8.
struct alignas(8 * kSides) Sums {
  float of[2][kSides];
};

// grid (blocks that share the tiles, blocks of BLOCK_ROWS rows)
extern "C" __global__ void __launch_bounds__(kThreads, AMONG) quantized(const Args a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Sums sums[kPlaces][WARPS][8 * kHolders];
  __shared__ float factors[ENDERS][BLOCK_ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int first_row = blockIdx.y * BLOCK_ROWS, num_tiles = (kTiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  if (!LATE) release_next();
  if (is_idle(a.busy)) {
    wait_for_previous();
    return;
  }
  if (warp < WARPS) {
    const int first_chunk = warp * kOwn;
    const unsigned char* ring = memory + warp * kRingBytes;
    const unsigned to = shared_address(ring);
    unsigned char* rows = memory + WARPS * kRingBytes + warp * kRowBytes;
    float* row_scales = reinterpret_cast<float*>(memory + WARPS * (kRingBytes + kRowBytes)) + warp * kOwn * BLOCK_ROWS;
    const int64 begin = static_cast<int64>(blockIdx.x) * kChunks + first_chunk;
    Reader reader;
    reader.values = reinterpret_cast<const unsigned char*>(a.w) + begin * kValueBytes;
    reader.scales = reinterpret_cast<const unsigned char*>(a.w) + static_cast<int64>(kTiles) * kChunks * kValueBytes + begin * 64;
    reader.left = num_tiles * kSteps;
#pragma unroll
    for (int at = 0; at < STAGES - 1; ++at) {
      reader.fetch(to + at * kStageBytes, first_chunk, lane);
      copy_commit();
    }
    wait_for_previous();
#pragma unroll
    for (int first = 0; first < kTurns; first += kAtOnce) {
      uint4 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) x[i] = load_eighth(a, Eighth(first + i, lane), first_row, first_chunk, lane);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) put_eighth(x[i], Eighth(first + i, lane), rows, row_scales, lane);
    }
    if (LATE) release_next();
    const unsigned char* row = rows + g % BLOCK_ROWS * 64 + t * 16;
    row_scales += 2 * t % BLOCK_ROWS;
    int at = 0, place = 0;  // the stage and the place that are next
    for (int tile = 0; tile < num_tiles; ++tile, place = place + 1 == kPlaces ? 0 : place + 1) {
      float acc[4] = {};
      for (int step = 0; step < kSteps; ++step, at = at + 1 == STAGES ? 0 : at + 1) {
        copy_wait<STAGES - 2>();
        __syncwarp();  // all lanes have read the stage that is filled now
        reader.fetch(to + (at == 0 ? STAGES - 1 : at - 1) * kStageBytes, first_chunk, lane);
        copy_commit();
        const unsigned char* stage = ring + at * kStageBytes;
#pragma unroll
        for (int c = 0; c < STEP; ++c) {
          const int chunk = step * STEP + c;
          multiply(acc, stage + c * kChunkBytes, row + chunk * BLOCK_ROWS * 64, row_scales + chunk * BLOCK_ROWS, lane);
        }
      }
      if (tile >= kPlaces) meet(kEmpty + place);
      if (t < kHolders) {
        Sums own;
#pragma unroll
        for (int e = 0; e < kSides; ++e) own.of[0][e] = acc[e], own.of[1][e] = acc[2 + e];
        sums[place][warp][g * kHolders + t] = own;
      }
      arrive(kFull + place);
    }
    return;
  }
  wait_for_previous();
  if (LATE) release_next();
  float* factor = factors[warp - WARPS];
  if (kScaled) {
    norm_factors<BLOCK_ROWS>(a, first_row, factor, lane);
    __syncwarp();
  }
  for (int i = warp - WARPS; i < num_tiles; i += ENDERS) {
    const int tile = blockIdx.x + i * gridDim.x;
    Columns columns;
    Beside beside[2];  // of rows 2 t and 2 t + 1
    fetch_columns(a, columns, tile, g);
#pragma unroll
    for (int e = 0; e < kSides; ++e) {
      fetch_constants(a, beside[e], first_row + 2 * t + e, tile, g);
      if (KIND == RESIDUAL) fetch_residual(a, beside[e], first_row + 2 * t + e, tile, g);
    }
    const int place = i % kPlaces;
    meet(kFull + place);
    Sums y = {};
#pragma unroll
    for (int first = 0; first < WARPS; first += kAlike) {  // lanes of the same rows share the warps
      const int p = first + t / kHolders;
      if (p >= WARPS) continue;
      const Sums other = sums[place][p][g * kHolders + t % kHolders];
#pragma unroll
      for (int e = 0; e < kSides; ++e) y.of[0][e] = add(y.of[0][e], other.of[0][e]), y.of[1][e] = add(y.of[1][e], other.of[1][e]);
    }
#pragma unroll
    for (int step = kHolders; step < 4; step *= 2)
#pragma unroll
      for (int e = 0; e < 2 * kSides; ++e) {
        float& v = y.of[e / kSides][e % kSides];
        v = add(v, __shfl_xor_sync(0xffffffffu, v, step));
      }
    if (i + kPlaces < num_tiles) arrive(kEmpty + place);
#pragma unroll
    for (int e = 0; e < kSides; ++e) {
      const int column = 2 * t + e, row = column < BLOCK_ROWS ? first_row + column : a.rows;  // the others are of no row
      finish(a, columns, beside[e], tile, g, row, kScaled ? factor[column % BLOCK_ROWS] : 1.0f, y.of[0][e], y.of[1][e]);
    }
  }
}
