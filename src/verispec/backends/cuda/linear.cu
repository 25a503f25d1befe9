// One linear layer of few rows with what follows it: y = tree over the parts of K of ascending k16 chains.
// Compiled for one layer: KIND, N, K (row length of the weights), PARTS, ROW_TILES (8 rows each, per block), TILES (16
// weight rows each, per block), STAGES, WIDTH (of the residual stream), and for q/k/v HEADS, KV_HEADS, HEAD_DIM.
// A warp owns 16 weight rows and one part of K. It streams them, and the rows' columns beside them, through a ring of its
// own in shared memory, 64 columns a stage, so there is no barrier in the loop; the ring is filled with weights before the
// wait for the previous kernel. Each of four threads takes four neighbouring columns of 16, for weights and rows alike,
// which changes no bit, because the sum over 16 columns has no order. One more warp per 8 rows adds the norm's statistic.
#include "epilogues.cuh"

using namespace vs;

constexpr int kPart = PARTS == 1 ? K : K / PARTS, kSteps = (kPart + 63) / 64;
constexpr int kMaxRows = ROW_TILES * 8, kStageBytes = 2048 + kMaxRows * 128;
constexpr int kWarps = TILES * PARTS, kRingBytes = STAGES * kStageBytes;
constexpr bool kPlainRows = ROW_TILES == 1 && STAGES > kSteps;
constexpr int kThreads = 32 * (kWarps + (kScaled ? ROW_TILES : 0));

// Eight chunks of 16 bytes make a row of a stage; four rows at once are read eight bytes a thread without conflicts.
__device__ __forceinline__ int chunk_offset(int row, int chunk) { return row * 128 + ((chunk ^ ((row & 3) << 1)) << 4); }

__device__ __forceinline__ void fetch_weights(unsigned ring, const bf16* w, int step, int lane, unsigned long long once) {
  const int chunk = lane & 7, column = step * 64 + chunk * 8;
  const unsigned stage = ring + (step % STAGES) * kStageBytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + (lane >> 3);
    copy16_once(stage + chunk_offset(row, chunk), w + static_cast<int64>(row) * K + column, column < kPart, once);
  }
}

// x[i] points to the lane's row 4 i + lane / 8 and its chunk, or is null behind the last row.
__device__ __forceinline__ void fetch_rows(unsigned ring, const bf16* const* x, int step, int lane) {
  const int chunk = lane & 7;
  const unsigned stage = ring + (step % STAGES) * kStageBytes + 2048;
#pragma unroll
  for (int i = 0; i < kMaxRows / 4; ++i)
    if (x[i] != nullptr && step * 64 + chunk * 8 < kPart)
      copy16_cached(stage + chunk_offset(i * 4 + (lane >> 3), chunk), x[i] + step * 64);
}

extern "C" __global__ void __launch_bounds__(kThreads) linear(const Args a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float factor[kMaxRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int part = warp % PARTS, tile = blockIdx.x * TILES + warp / PARTS, first_row = blockIdx.y * kMaxRows;
  const bool works = warp < kWarps && tile * 16 < N;
  const unsigned ring = shared_address(memory) + warp * kRingBytes;
  const bf16* w = a.w + static_cast<int64>(tile) * 16 * K + part * kPart;
  const unsigned long long once = read_once();
  float acc[ROW_TILES][4] = {};
  Columns columns;
  Beside beside[ROW_TILES][2];  // of rows 8 i + 2 t + e

  release_next();
  if (is_idle(a.busy)) {
    wait_for_previous();
    return;
  }
  if (works) {
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
      if (step < kSteps) fetch_weights(ring, w, step, lane, once);
      copy_commit();
    }
    if (part == 0) {
      fetch_columns(a, columns, tile, g);
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i)
        fetch_constants(a, beside[i / 2][i % 2], first_row + i / 2 * 8 + 2 * t + i % 2, tile, g);
    }
  }
  wait_for_previous();

  if (works) {
    if (KIND == RESIDUAL && part == 0)
#pragma unroll
      for (int i = 0; i < 2 * ROW_TILES; ++i)
        fetch_residual(a, beside[i / 2][i % 2], first_row + i / 2 * 8 + 2 * t + i % 2, tile, g);
    const bf16* x[kMaxRows / 4];
#pragma unroll
    for (int i = 0; i < kMaxRows / 4; ++i) {
      const int row = first_row + i * 4 + (lane >> 3);
      x[i] = row < a.rows ? a.x + static_cast<int64>(row_of(a, row)) * K + part * kPart + (lane & 7) * 8 : nullptr;
    }
    if (kPlainRows) {  // all weights are on their way: one round of plain loads is the quickest
      uint4 v[kMaxRows / 4][kSteps];
#pragma unroll
      for (int i = 0; i < kMaxRows / 4; ++i)
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          if (x[i] != nullptr && step * 64 + (lane & 7) * 8 < kPart)
            v[i][step] = *reinterpret_cast<const uint4*>(x[i] + step * 64);
#pragma unroll
      for (int i = 0; i < kMaxRows / 4; ++i)
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          *reinterpret_cast<uint4*>(memory + warp * kRingBytes + step * kStageBytes + 2048 +
                                    chunk_offset(i * 4 + (lane >> 3), lane & 7)) = v[i][step];
    } else {
#pragma unroll
      for (int step = 0; step < STAGES - 1; ++step) {  // groups end in order: these are behind the weights'
        if (step < kSteps) fetch_rows(ring, x, step, lane);
        copy_commit();
      }
    }
    for (int step = 0; step < kSteps; ++step) {
      copy_wait<STAGES - 2>();
      __syncwarp();
      const unsigned char* stage = memory + warp * kRingBytes + (step % STAGES) * kStageBytes;
      if (step + STAGES - 1 < kSteps) {  // into the stage that was read last: all lanes have passed the barrier since
        fetch_weights(ring, w, step + STAGES - 1, lane, once);
        fetch_rows(ring, x, step + STAGES - 1, lane);
      }
      copy_commit();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (kPart % 64 != 0 && step * 64 + k * 16 >= kPart) break;
        const int at = chunk_offset(g, 2 * k + (t >> 1)) + (t & 1) * 8;
        const uint2 low = *reinterpret_cast<const uint2*>(stage + at);
        const uint2 high = *reinterpret_cast<const uint2*>(stage + at + 8 * 128);
        const unsigned rows16[4] = {low.x, high.x, low.y, high.y};
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
          const uint2 b = *reinterpret_cast<const uint2*>(stage + 2048 + i * 1024 + at);
          mma(acc[i], rows16, &b.x);
        }
      }
    }
  } else if (kScaled && warp >= kWarps) {
    norm_factors<8>(a, first_row + (warp - kWarps) * 8, factor + (warp - kWarps) * 8, lane);
  }

  float4* mine = reinterpret_cast<float4*>(memory + warp * kRingBytes);  // the ring is empty now
  if (PARTS > 1 && works && part > 0) {
    copy_wait<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
      mine[i * 32 + lane] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
  }
  if (PARTS > 1 || kScaled) __syncthreads();
  if (!works || part > 0) return;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
    float y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float parts[PARTS];
      parts[0] = acc[i][e];
#pragma unroll
      for (int p = 1; p < PARTS; ++p)
        parts[p] = reinterpret_cast<const float*>(memory + (warp + p) * kRingBytes)[(i * 32 + lane) * 4 + e];
      y[e] = tree_of_parts<PARTS>(parts);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {  // y[e] and y[e + 2]: outputs g and g + 8 of row 2 t + e
      const int row = first_row + i * 8 + 2 * t + e;
      finish(a, columns, beside[i][e], tile, g, row, kScaled ? factor[row - first_row] : 1.0f, y[e], y[e + 2]);
    }
  }
}
