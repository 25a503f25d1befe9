// One linear layer of few rows with what follows it: y = tree over the parts of K of ascending k16 chains.
// Compiled for one layer: KIND, N, K (row length of the weights), PARTS, ROW_TILES (8 rows each, per block), TILES (16
// weight rows each, per block), STAGES, WIDTH (of the residual stream), and for q/k/v HEADS, KV_HEADS, HEAD_DIM.
// A warp owns 16 weight rows and one part of K. It streams them, and the rows' columns beside them, through a ring of its
// own in shared memory, 64 columns a stage, so there is no barrier in the loop; the ring is filled with weights before the
// wait for the previous kernel. Each of four threads takes four neighbouring columns of 16, for weights and rows alike,
// which changes no bit, because the sum over 16 columns has no order. One more warp per 8 rows adds the norm's statistic.
#include "arithmetic.cuh"

#define QKV 0
#define RESIDUAL 1
#define GATE_UP 2
#define HEAD 3
#define PLAIN 4

using namespace vs;

constexpr int kPart = PARTS == 1 ? K : K / PARTS, kSteps = (kPart + 63) / 64;
constexpr int kMaxRows = ROW_TILES * 8, kStageBytes = 2048 + kMaxRows * 128;
constexpr int kWarps = TILES * PARTS, kRingBytes = STAGES * kStageBytes;
constexpr bool kPlainRows = ROW_TILES == 1 && STAGES > kSteps;
constexpr bool kScaled = KIND == QKV || KIND == GATE_UP || KIND == HEAD;
constexpr int kThreads = 32 * (kWarps + (kScaled ? ROW_TILES : 0));

struct Args {
  const bf16* x;          // [rows, K]
  const bf16* w;          // [N, K]
  const float* nodes_in;  // [rows, WIDTH / 16] of the rows' residual stream
  void* out;              // what KIND gives: q, x (in and out), h, logits, y
  const float* bias;      // q/k/v: [N] in the order of heads, or null
  const float* cosines;   // [context, HEAD_DIM / 2]
  const float* sines;
  const int* positions;   // [rows]
  const int* slots;       // [rows]
  bf16* k_store;          // [slots, KV_HEADS, HEAD_DIM]
  bf16* v_store;
  int* not_finite;        // [rows], set to 1 where K or V was not finite
  const float* gain;      // residual: the next norm's weight [N]
  bf16* scaled;           // residual: x times gain [rows, N]
  float* nodes_out;       // residual: [rows, N / 16]
  const int* row_ids;     // head: which rows of x, or null
  float eps;
  int rows;
};

// Eight chunks of 16 bytes make a row of a stage; four rows at once are read eight bytes a thread without conflicts.
__device__ __forceinline__ int chunk_offset(int row, int chunk) { return row * 128 + ((chunk ^ ((row & 3) << 1)) << 4); }

__device__ __forceinline__ void fetch_weights(unsigned ring, const bf16* w, int step, int lane) {
  const int chunk = lane & 7, column = step * 64 + chunk * 8;
  const unsigned stage = ring + (step % STAGES) * kStageBytes;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + (lane >> 3);
    copy16(stage + chunk_offset(row, chunk), w + static_cast<int64>(row) * K + column, column < kPart);
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

// What an epilogue reads, fetched before it is needed: constants before the wait, the residual stream after it.
struct Ahead {
  float c[ROW_TILES][2], si[ROW_TILES][2];
  int slot[ROW_TILES][2];
  float bias[2], gain[2];
  float x[ROW_TILES][2][2];
};

__device__ __forceinline__ void fetch_constants(const Args& a, Ahead& ahead, int first_row, int tile, int g, int t) {
#if KIND == QKV
  constexpr int kHalf = HEAD_DIM / 2;
  const int head = tile / (HEAD_DIM / 16), pair = tile % (HEAD_DIM / 16) * 8 + g;
  for (int e = 0; e < 2; ++e) ahead.bias[e] = a.bias != nullptr ? a.bias[head * HEAD_DIM + pair + e * kHalf] : 0.0f;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = min(first_row + i * 8 + 2 * t + e, a.rows - 1);
      ahead.slot[i][e] = a.slots[row];
      if (head >= HEADS + KV_HEADS) continue;
      const int64 at = static_cast<int64>(a.positions[row]) * kHalf + pair;
      ahead.c[i][e] = a.cosines[at];
      ahead.si[i][e] = a.sines[at];
    }
#endif
  if (KIND == RESIDUAL) ahead.gain[0] = a.gain[tile * 16 + g], ahead.gain[1] = a.gain[tile * 16 + g + 8];
}

__device__ __forceinline__ void fetch_residual(const Args& a, Ahead& ahead, int first_row, int tile, int g, int t) {
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = min(first_row + i * 8 + 2 * t + e, a.rows - 1);
      const bf16* x = static_cast<const bf16*>(a.out) + static_cast<int64>(row) * N + tile * 16 + g;
      ahead.x[i][e][0] = to_float(x[0]);
      ahead.x[i][e][1] = to_float(x[8]);
    }
}

// The epilogues: y0 and y1 are outputs n0 = 16 tile + g and n0 + 8 of one row, already rounded to bf16.
__device__ __forceinline__ void finish_qkv(const Args& a, const Ahead& ahead, int i, int e, int tile, int g, int row,
                                           float s, float y0, float y1) {
#if KIND == QKV
  constexpr int kHalf = HEAD_DIM / 2;
  const int head = tile / (HEAD_DIM / 16), pair = tile % (HEAD_DIM / 16) * 8 + g;
  float v0 = mul(y0, s), v1 = mul(y1, s);
  if (a.bias != nullptr) v0 = add(v0, ahead.bias[0]), v1 = add(v1, ahead.bias[1]);
  if (head < HEADS + KV_HEADS) {
    const float c = ahead.c[i][e], si = ahead.si[i][e], first = v0;
    v0 = fused(-v1, si, mul(first, c));
    v1 = fused(first, si, mul(v1, c));
  }
  if (head < HEADS) {
    bf16* q = static_cast<bf16*>(a.out) + (static_cast<int64>(row) * HEADS + head) * HEAD_DIM + pair;
    q[0] = to_bf16(v0);
    q[kHalf] = to_bf16(v1);
    return;
  }
  bf16* to = (head < HEADS + KV_HEADS ? a.k_store : a.v_store) +
             (static_cast<int64>(ahead.slot[i][e]) * KV_HEADS + (head - HEADS) % KV_HEADS) * HEAD_DIM + pair;
  v0 = rounded(v0);
  v1 = rounded(v1);
  if (!(fabsf(v0) <= 3.4e38f) || !(fabsf(v1) <= 3.4e38f)) {  // 0 x Inf would reach other rows of the sequence
    a.not_finite[row] = 1;
    v0 = v1 = 0.0f;
  }
  to[0] = to_bf16(v0);
  to[kHalf] = to_bf16(v1);
#endif
}

__device__ __forceinline__ void finish_gate_up(const Args& a, int tile, int g, int row, float s, float y0, float y1) {
  bf16* h = static_cast<bf16*>(a.out) + static_cast<int64>(row) * (N / 2) + tile * 8 + g;
  *h = to_bf16(mul(silu(mul(y0, s)), mul(y1, s)));
}

// All lanes of the warp take part: the node of 16 neighbours is a tree over the eight groups of lanes.
__device__ __forceinline__ void finish_residual(const Args& a, const Ahead& ahead, int i, int e, int tile, int g,
                                                int row, float y0, float y1) {
  const bool valid = row < a.rows;
  const int64 at = static_cast<int64>(row) * N + tile * 16 + g;
  const float v0 = rounded(add(ahead.x[i][e][0], y0)), v1 = rounded(add(ahead.x[i][e][1], y1));
  if (valid) {
    bf16* x = static_cast<bf16*>(a.out) + at;
    x[0] = to_bf16(v0);
    x[8] = to_bf16(v1);
    a.scaled[at] = to_bf16(mul(v0, ahead.gain[0]));
    a.scaled[at + 8] = to_bf16(mul(v1, ahead.gain[1]));
  }
  float low = mul(v0, v0), high = mul(v1, v1);
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    low = add(low, __shfl_xor_sync(0xffffffffu, low, step));
    high = add(high, __shfl_xor_sync(0xffffffffu, high, step));
  }
  if (valid && g == 0) a.nodes_out[static_cast<int64>(row) * (N / 16) + tile] = add(low, high);
}

__device__ __forceinline__ int row_of(const Args& a, int row) {
  return KIND == HEAD && a.row_ids != nullptr ? a.row_ids[row] : row;
}

extern "C" __global__ void __launch_bounds__(kThreads) linear(const Args a) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float factor[kMaxRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const int part = warp % PARTS, tile = blockIdx.x * TILES + warp / PARTS, first_row = blockIdx.y * kMaxRows;
  const bool works = warp < kWarps && tile * 16 < N;
  const unsigned ring = shared_address(memory) + warp * kRingBytes;
  const bf16* w = a.w + static_cast<int64>(tile) * 16 * K + part * kPart;
  float acc[ROW_TILES][4] = {};
  Ahead ahead;

  release_next();
  if (works) {
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
      if (step < kSteps) fetch_weights(ring, w, step, lane);
      copy_commit();
    }
    if (part == 0) fetch_constants(a, ahead, first_row, tile, g, t);
  }
  wait_for_previous();

  if (works) {
    if (KIND == RESIDUAL && part == 0) fetch_residual(a, ahead, first_row, tile, g, t);
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
        fetch_weights(ring, w, step + STAGES - 1, lane);
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
    const float* nodes[8];
    float ss[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = first_row + (warp - kWarps) * 8 + i;
      nodes[i] = row < a.rows ? a.nodes_in + static_cast<int64>(row_of(a, row)) * (WIDTH / 16) : nullptr;
    }
    sums_of_nodes<WIDTH, 8>(nodes, ss, lane);
    float own = ss[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) own = lane == i ? ss[i] : own;
    if (lane < 8) factor[(warp - kWarps) * 8 + lane] = norm_factor(own, 1.0f / WIDTH, a.eps);
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
      if (KIND != HEAD) y[e] = rounded(y[e]);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {  // y[e] and y[e + 2]: outputs g and g + 8 of row 2 t + e
      const int row = first_row + i * 8 + 2 * t + e;
      if (KIND == RESIDUAL) finish_residual(a, ahead, i, e, tile, g, row, y[e], y[e + 2]);
      if (row >= a.rows) continue;
      if (KIND == QKV) finish_qkv(a, ahead, i, e, tile, g, row, factor[row - first_row], y[e], y[e + 2]);
      if (KIND == GATE_UP) finish_gate_up(a, tile, g, row, factor[row - first_row], y[e], y[e + 2]);
      if (KIND == HEAD) {
        float* logits = static_cast<float*>(a.out) + static_cast<int64>(row) * N + tile * 16 + g;
        logits[0] = mul(y[e], factor[row - first_row]);
        logits[8] = mul(y[e + 2], factor[row - first_row]);
      }
      if (KIND == PLAIN) {
        bf16* out = static_cast<bf16*>(a.out) + static_cast<int64>(row) * N + tile * 16 + g;
        out[0] = to_bf16(y[e]);
        out[8] = to_bf16(y[e + 2]);
      }
    }
  }
}
