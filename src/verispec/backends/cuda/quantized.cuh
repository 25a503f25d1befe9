// Products of rows and weights of BITS bits, for quantized.cu and streamed.cu: what both are compiled for is BITS (4 or 8),
// E4M3 (whether 8 bits are a float, and no whole number) and BLOCK_ROWS (1, 2, 4 or 8 rows of a block).
// Weights stand in the order in which lanes want them (quantize.py): 64 columns of 16 weight rows, a chunk, are one load per
// lane and 4 bits. Rows become numbers of 8 bits, whole or e4m3 as the weights are, each 64 columns with a scale; products are
// sums over 32 columns.
#pragma once
#include "arithmetic.cuh"

namespace vs {

constexpr int kLoads = BITS / 4, kValueBytes = kLoads * 512, kChunkBytes = kValueBytes + 64;  // of a chunk; the scales lie apart
constexpr int kSides = BLOCK_ROWS > 1 ? 2 : 1;  // rows of a lane: 2 t and 2 t + 1
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

// Eight columns of a row, of 64 that eight lanes have together, in 8 bits, four to a word, and `scale` of all 64. All lanes of
// the warp take part.
__device__ __forceinline__ uint2 in_eight_bits(const float* v, float& scale) {
  unsigned bits = 0;  // of the largest: what is no number is larger than all
#pragma unroll
  for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(fabsf(v[i])));
#pragma unroll
  for (int step = 1; step < 8; step *= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, step));
  const float most = __uint_as_float(bits), inverse = most > 1e-30f ? div(kMost, most) : 0.0f;
  scale = mul(most, (BITS == 4 ? 0.0625f : 1.0f) / kMost);
  return make_uint2(four_of(v, inverse), four_of(v + 4, inverse));
}

// Where columns 4 n .. 4 n + 3 of 64 stand in a row: [16 t: columns 8 t and 32 + 8 t on].
__device__ __forceinline__ int place_of_four(int n) { return (n / 2 & 3) * 16 + n / 8 * 8 + n % 2 * 4; }

// Eight numbers of bf16, in order.
__device__ __forceinline__ void eight_of(uint4 x, float* v) {
  const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
}

// acc (of fragments: outputs g and g + 8 of rows 2 t and 2 t + 1) += a chunk's products with the rows' 64 columns: a lane has 16 of
// row g, and the scales of rows 2 t and 2 t + 1. `scales` of the chunk stand apart from its values.
__device__ __forceinline__ void multiply(float* acc, const unsigned char* chunk, const unsigned char* chunk_scales, uint4 x, float first,
                                         float second, int lane) {
  const uint4* values = reinterpret_cast<const uint4*>(chunk);
  uint4 own[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) own[i] = values[i * 32 + lane];
  const uint2 scales = *reinterpret_cast<const uint2*>(chunk_scales + (lane >> 2) * 8);  // of rows g and g + 8
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

}  // namespace vs
