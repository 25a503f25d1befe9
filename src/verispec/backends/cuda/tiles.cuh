// What follows products of many rows, for rows.cu (behind the library's) and large.cu: a thread has a tile of a row, eight outputs
// and the eight behind them, which are their partners where outputs are paired; rounded to bf16. Arguments are those of either file.
#pragma once
#include "arithmetic.cuh"

namespace vs {

__device__ __forceinline__ void unpack(uint4 packed, float* v) {
  const bf16* values = reinterpret_cast<const bf16*>(&packed);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = to_float(values[i]);
}

__device__ __forceinline__ uint4 pack(const float* v) {
  uint4 packed;
#pragma unroll
  for (int i = 0; i < 8; ++i) reinterpret_cast<bf16*>(&packed)[i] = to_bf16(v[i]);
  return packed;
}

__device__ __forceinline__ void load_eight(const float* from, float* to) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(from + i);
}

// Eight first elements of pairs of a head and their partners: by the norm's factor, with their bias.
template <typename A>
__device__ __forceinline__ void scale_pairs(const A& a, int head, int first, float s, float* v0, float* v1) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v0[i] = mul(v0[i], s), v1[i] = mul(v1[i], s);
    if (a.bias != nullptr) {
      v0[i] = add(v0[i], a.bias[head * HEAD_DIM + first + i]);
      v1[i] = add(v1[i], a.bias[head * HEAD_DIM + first + i + HEAD_DIM / 2]);
    }
  }
}

// Turned by the row's position, unless they are of v, and stored as q, or as K or V of the row's slot.
template <typename A>
__device__ __forceinline__ void store_pairs(const A& a, int row, int64 slot, int head, int first, const float* c, const float* si,
                                            float* v0, float* v1) {
  const bool turns = head < HEADS + KV_HEADS;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (turns) {
      const float before = v0[i];
      v0[i] = fused(-v1[i], si[i], mul(before, c[i]));
      v1[i] = fused(before, si[i], mul(v1[i], c[i]));
    }
    if (head < HEADS) continue;
    v0[i] = rounded(v0[i]);
    v1[i] = rounded(v1[i]);  // 0 x Inf would reach other rows of the sequence
    if (!(fabsf(v0[i]) <= 3.4e38f) || !(fabsf(v1[i]) <= 3.4e38f)) finite = false, v0[i] = v1[i] = 0.0f;
  }
  if (!finite) a.not_finite[row] = 1;
  bf16* to = head < HEADS ? static_cast<bf16*>(a.out) + (static_cast<int64>(row) * HEADS + head) * HEAD_DIM
                          : (turns ? a.k_store : a.v_store) + (slot * KV_HEADS + (head - HEADS) % KV_HEADS) * HEAD_DIM;
  *reinterpret_cast<uint4*>(to + first) = pack(v0);
  *reinterpret_cast<uint4*>(to + first + HEAD_DIM / 2) = pack(v1);
}

// Eight neighbours of the residual stream, from `n` on, and their scaled form; gives the tree of their squares, half of a node.
template <typename A>
__device__ __forceinline__ float store_stream(const A& a, int row, int n, bool valid, const float* v) {
  const int64 at = static_cast<int64>(row) * WIDTH + n;
  float gain[8], scaled[8], square[8];
  load_eight(a.gain + n, gain);
#pragma unroll
  for (int i = 0; i < 8; ++i) scaled[i] = mul(v[i], gain[i]), square[i] = mul(v[i], v[i]);
  if (valid) {
    *reinterpret_cast<uint4*>(static_cast<bf16*>(a.out) + at) = pack(v);
    *reinterpret_cast<uint4*>(a.scaled + at) = pack(scaled);
  }
  return register_tree<8>(square);
}

// h = activation(gate) up, in the place of the gates.
__device__ __forceinline__ void activate(float* gate, const float* up, float s) {
#pragma unroll
  for (int i = 0; i < 8; ++i) gate[i] = mul(activated(mul(gate[i], s)), mul(up[i], s));
}

}  // namespace vs
