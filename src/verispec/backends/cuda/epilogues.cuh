// What follows the products of one linear layer, for linear.cu (few rows) and wide.cu (9 to 64): the same operations on
// the same values, so the same bits. A thread has outputs 16 tile + g and 16 tile + g + 8 of a row, which are partners.
// Compiled for KIND, N, WIDTH, and for q/k/v HEADS, KV_HEADS, HEAD_DIM.
#pragma once
#include "arithmetic.cuh"

#define QKV 0
#define RESIDUAL 1
#define GATE_UP 2
#define HEAD 3
#define PLAIN 4

namespace vs {

constexpr bool kScaled = KIND == QKV || KIND == GATE_UP || KIND == HEAD;

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
  const int* busy;        // 0: the pass has no row but padding, and nothing is done; or null
  float eps;
  int rows;
};

// What is added to or multiplied with the two outputs of every row, and with those of one row: constants may be fetched
// before the wait for the kernel in front, the residual stream only after it.
struct Columns {
  float bias[2], gain[2];
};
struct Beside {
  float c, si;
  int slot;
  float x[2];
};

__device__ __forceinline__ void fetch_columns(const Args& a, Columns& columns, int tile, int g) {
#if KIND == QKV
  const int at = tile / (HEAD_DIM / 16) * HEAD_DIM + tile % (HEAD_DIM / 16) * 8 + g;
  for (int e = 0; e < 2; ++e) columns.bias[e] = a.bias != nullptr ? a.bias[at + e * (HEAD_DIM / 2)] : 0.0f;
#endif
  if (KIND == RESIDUAL) columns.gain[0] = a.gain[tile * 16 + g], columns.gain[1] = a.gain[tile * 16 + g + 8];
}

__device__ __forceinline__ void fetch_constants(const Args& a, Beside& beside, int row, int tile, int g) {
#if KIND == QKV
  row = min(row, a.rows - 1);
  beside.slot = a.slots[row];
  if (tile / (HEAD_DIM / 16) >= HEADS + KV_HEADS) return;
  const int64 at = static_cast<int64>(a.positions[row]) * (HEAD_DIM / 2) + tile % (HEAD_DIM / 16) * 8 + g;
  beside.c = __ldg(a.cosines + at);
  beside.si = __ldg(a.sines + at);
#endif
}

__device__ __forceinline__ void fetch_residual(const Args& a, Beside& beside, int row, int tile, int g) {
  const bf16* x = static_cast<const bf16*>(a.out) + static_cast<int64>(min(row, a.rows - 1)) * N + tile * 16 + g;
  beside.x[0] = to_float(x[0]);
  beside.x[1] = to_float(x[8]);
}

__device__ __forceinline__ void finish_qkv(const Args& a, const Columns& columns, const Beside& beside, int tile, int g,
                                           int row, float s, float y0, float y1) {
#if KIND == QKV
  constexpr int kHalf = HEAD_DIM / 2;
  const int head = tile / (HEAD_DIM / 16), pair = tile % (HEAD_DIM / 16) * 8 + g;
  float v0 = mul(y0, s), v1 = mul(y1, s);
  if (a.bias != nullptr) v0 = add(v0, columns.bias[0]), v1 = add(v1, columns.bias[1]);
  if (head < HEADS + KV_HEADS) {
    const float c = beside.c, si = beside.si, first = v0;
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
             (static_cast<int64>(beside.slot) * KV_HEADS + (head - HEADS) % KV_HEADS) * HEAD_DIM + pair;
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
  *h = to_bf16(mul(activated(mul(y0, s)), mul(y1, s)));
}

// All lanes of the warp take part: the node of 16 neighbours is a tree over the eight groups of lanes.
__device__ __forceinline__ void finish_residual(const Args& a, const Columns& columns, const Beside& beside, int tile,
                                                int g, int row, float y0, float y1) {
  const bool valid = row < a.rows;
  const int64 at = static_cast<int64>(row) * N + tile * 16 + g;
  const float v0 = rounded(add(beside.x[0], y0)), v1 = rounded(add(beside.x[1], y1));
  if (valid) {
    bf16* x = static_cast<bf16*>(a.out) + at;
    x[0] = to_bf16(v0);
    x[8] = to_bf16(v1);
    a.scaled[at] = to_bf16(mul(v0, columns.gain[0]));
    a.scaled[at + 8] = to_bf16(mul(v1, columns.gain[1]));
  }
  float low = mul(v0, v0), high = mul(v1, v1);
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    low = add(low, __shfl_xor_sync(0xffffffffu, low, step));
    high = add(high, __shfl_xor_sync(0xffffffffu, high, step));
  }
  if (valid && g == 0) a.nodes_out[static_cast<int64>(row) * (N / 16) + tile] = add(low, high);
}

// One row's two outputs from the sums over the parts of K. All lanes of the warp take part; `s` is the row's norm factor.
__device__ __forceinline__ void finish(const Args& a, const Columns& columns, const Beside& beside, int tile, int g, int row,
                                       float s, float y0, float y1) {
  if (KIND != HEAD) y0 = rounded(y0), y1 = rounded(y1);
  if (KIND == RESIDUAL) finish_residual(a, columns, beside, tile, g, row, y0, y1);
  if (row >= a.rows) return;
  if (KIND == QKV) finish_qkv(a, columns, beside, tile, g, row, s, y0, y1);
  if (KIND == GATE_UP) finish_gate_up(a, tile, g, row, s, y0, y1);
  if (KIND == HEAD) {
    float* logits = static_cast<float*>(a.out) + static_cast<int64>(row) * N + tile * 16 + g;
    logits[0] = mul(y0, s);
    logits[8] = mul(y1, s);
  }
  if (KIND == PLAIN) {
    bf16* out = static_cast<bf16*>(a.out) + static_cast<int64>(row) * N + tile * 16 + g;
    out[0] = to_bf16(y0);
    out[8] = to_bf16(y1);
  }
}

__device__ __forceinline__ int row_of(const Args& a, int row) {
  return KIND == HEAD && a.row_ids != nullptr ? a.row_ids[row] : row;
}

// The norm factors of ROWS rows from first_row on, by one warp; there are at most 32.
template <int ROWS>
__device__ __forceinline__ void norm_factors(const Args& a, int first_row, float* factor, int lane) {
  const float* nodes[ROWS];
  float ss[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = first_row + i;
    nodes[i] = row < a.rows ? a.nodes_in + static_cast<int64>(row_of(a, row)) * (WIDTH / 16) : nullptr;
  }
  sums_of_nodes<WIDTH, ROWS>(nodes, ss, lane);
  float own = ss[0];
#pragma unroll
  for (int i = 1; i < ROWS; ++i) own = lane == i ? ss[i] : own;
  if (lane < ROWS) factor[lane] = norm_factor(own, 1.0f / WIDTH, a.eps);
}

}  // namespace vs
