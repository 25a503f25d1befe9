// What attention of rows is made of, for attention.cu and streamed.cu. Compiled for HEAD_DIM.
#pragma once
#include "arithmetic.cuh"

namespace vs {

// The slot of a context's index j.
template <typename Args>
__device__ __forceinline__ int64 slot_of(const Args& a, int row, int64 seq_row, int prefix_len, int j) {
  return j < prefix_len ? a.table[seq_row * a.table_width + j]
                        : a.tails[static_cast<int64>(row) * a.tail_width + j - prefix_len];
}

// q of 16 heads: columns 4 t .. 4 t + 3 of each 16; zeros for heads that are not there.
__device__ __forceinline__ void load_query(unsigned (*q)[4], const bf16* low, const bf16* high, int t) {
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    uint2 a = make_uint2(0, 0), b = make_uint2(0, 0);
    if (low != nullptr) a = *reinterpret_cast<const uint2*>(low + step * 16 + 4 * t);
    if (high != nullptr) b = *reinterpret_cast<const uint2*>(high + step * 16 + 4 * t);
    q[step][0] = a.x, q[step][1] = b.x, q[step][2] = a.y, q[step][3] = b.y;
  }
}

__device__ __forceinline__ float masked(float s, float scale, int j, int len, int window) {
  const float value = mul(s, scale);
  return (j < len) & (j >= len - window) ? value : neg_inf();
}
// Weights behind a maximum of -inf are 0, so any finite number may stand for it.
__device__ __forceinline__ float subtracted(float m) { return m == neg_inf() ? 0.0f : m; }
__device__ __forceinline__ float weight(float s, float m) { return exp2_at_most_126(sub(s, m)); }
__device__ __forceinline__ float decay(float m, float next) { return next == neg_inf() ? 1.0f : exp2_at_most_126(sub(m, next)); }
__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

}  // namespace vs
