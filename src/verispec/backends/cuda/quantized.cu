// One linear layer of few rows on weights of BITS bits, with what follows it: for drafts, so its bits are nobody's promise.
// Compiled for one layer: KIND, N, K, BITS (4 or 8), E4M3 (whether 8 bits are a float, and no whole number), BLOCK_ROWS (1, 2, 4 or
// 8 of a block), WARPS (that share the columns), STAGES, STEP (chunks of a stage), LATE (whether the next kernel may start only
// when the rows are there), ENDERS (1 or 2), WIDTH, and for q/k/v HEADS, KV_HEADS, HEAD_DIM.
// All scales lie behind the weights. A block takes every gridDim.x-th tile of 16 weight rows. Its warps stream their
// chunks of all those tiles through rings of their own in shared memory, which are filled before the wait for the kernel in
// front and do not run empty between tiles. ENDERS more warps, tile by tile in turns, add the sums of all and do what follows.
#include "epilogues.cuh"
#include "quantized.cuh"

using namespace vs;

constexpr int kTiles = N / 16, kChunks = K / 64;
constexpr int kSteps = ((kChunks + WARPS - 1) / WARPS + STEP - 1) / STEP, kOwn = kSteps * STEP;  // of a warp, in each tile
constexpr bool kEven = kOwn * WARPS == kChunks;
constexpr int kStageBytes = STEP * kChunkBytes;
constexpr int kRingBytes = STAGES * kStageBytes, kRowBytes = kOwn * BLOCK_ROWS * 64;
constexpr int kThreads = 32 * (WARPS + ENDERS), kMeeting = 32 * (WARPS + 1);  // who multiplies, and one who ends a tile

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

// In 8 bits [chunk][row].
__device__ __forceinline__ void put_eighth(uint4 x, Eighth at, unsigned char* rows, float* row_scales, int lane) {
  float v[8], scale;
  eight_of(x, v);
  const int to = at.chunk * BLOCK_ROWS + at.row;
  const uint2 eight = in_eight_bits(v, scale);
  if (at.row >= BLOCK_ROWS) return;
  *reinterpret_cast<uint2*>(rows + to * 64 + place_of_four(2 * (lane & 7))) = eight;
  if ((lane & 7) == 0) row_scales[to] = scale;
}

__device__ __forceinline__ void arrive(int barrier) { asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "n"(kMeeting) : "memory"); }
__device__ __forceinline__ void meet(int barrier) { asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "n"(kMeeting) : "memory"); }
constexpr int kFull = 1, kEmpty = 3;  // barriers of two places for sums

// grid (blocks that share the tiles, blocks of BLOCK_ROWS rows)
extern "C" __global__ void __launch_bounds__(kThreads, 2) quantized(const Args a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float4 sums[2][WARPS][32];
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
    int at = 0;  // the stage that is next
    for (int tile = 0; tile < num_tiles; ++tile) {
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
          const unsigned char* from = stage + c * kChunkBytes;
          const float* scales = row_scales + chunk * BLOCK_ROWS;
          multiply(acc, from, from + kValueBytes, *reinterpret_cast<const uint4*>(row + chunk * BLOCK_ROWS * 64), scales[0],
                   scales[kSides - 1], lane);
        }
      }
      if (tile >= 2) meet(kEmpty + tile % 2);
      sums[tile % 2][warp][lane] = make_float4(acc[0], acc[1], acc[2], acc[3]);
      arrive(kFull + tile % 2);
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
    meet(kFull + i % 2);
    float4 y = sums[i % 2][0][lane];
#pragma unroll
    for (int p = 1; p < WARPS; ++p) {
      const float4 other = sums[i % 2][p][lane];
      y.x = add(y.x, other.x), y.y = add(y.y, other.y), y.z = add(y.z, other.z), y.w = add(y.w, other.w);
    }
    if (i + 2 < num_tiles) arrive(kEmpty + i % 2);
#pragma unroll
    for (int e = 0; e < kSides; ++e) {
      const int column = 2 * t + e, row = column < BLOCK_ROWS ? first_row + column : a.rows;  // the others are of no row
      finish(a, columns, beside[e], tile, g, row, kScaled ? factor[column % BLOCK_ROWS] : 1.0f, e ? y.y : y.x, e ? y.w : y.z);
    }
  }
}
