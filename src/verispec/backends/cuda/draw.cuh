// What draws are made of: a row's parameters, places in orders as 64-bit keys, noise and weights. Nothing depends on how the
// vocabulary is cut. A key decides ties too, so that a maximum or a minimum is enough. With MASKED, rows see only what their row
// of the mask table allows.
#pragma once
#include "arithmetic.cuh"
#include "noise.cuh"

using namespace vs;

typedef unsigned long long uint64;
constexpr int kThreads = 256, kChildrenChunk = 2048;
constexpr uint64 kNaNKey = ~0ull;

struct Args {
  const float* raw;            // [rows, vocab]
  const float* edited;         // [rows, vocab], or the same
  const unsigned* seeds;       // [rows, 2], low word first
  const unsigned* counters;    // [rows, 3]: t, sample index, stream
  const float* temperature;    // [rows]
  const int* top_k;            // [rows], 0 is off
  const float* top_p;          // [rows], 1 is off
  const float* log_min_p;      // [rows], -inf is off
  const int* masks;            // [rows], rows of the mask table; 0 allows everything
  const unsigned* allowed;     // [masks, mask_words]: bit i % 32 of word i / 32 allows token i
  uint64* tops;                // [rows, 2, chunks]: best of edited, best of raw
  uint64* best;                // [rows, chunks]: best of z + noise
  int64* sums;                 // [rows, chunks]: weights of the raw logits
  uint64* kept;                // [rows]: the last kept key of the order (-z, id)
  int* token_ids;              // [rows], -1 where there is nothing to draw
  float* logprobs;             // [rows]
  uint64* keys;                // [rows, chunks, per_chunk]: the best children of each chunk
  int* offered;                // [3, rows, k]: children, log p + noise and log p
  float* shares;               // [rows, vocab]: probabilities
  const int* share_rows;       // [rows]: where each row has them, -1: nowhere; null: where it is
  double* masses;              // as shares, [.., chunks of 1024 ids]: their sums, neighbours first
  float* totals;               // [rows, 2]: the largest raw logit, and the logarithm of the sum
  const int* busy;             // 0: the pass has no row but padding, and nothing is drawn; or null
  int vocab;                   // a multiple of 4
  int mask_words;
  int chunk;                   // ids of one block, a multiple of 4: as suits the number of rows
  int chunks;
  int k;                       // children of a row
  int per_chunk;               // of them that one chunk may have
};

__device__ __forceinline__ unsigned ordered(float v) {  // unsigned numbers in the order of floats; -0 is 0
  const int bits = __float_as_int(add(v, 0.0f));
  return static_cast<unsigned>(bits < 0 ? ~bits : bits ^ 0x80000000);
}
__device__ __forceinline__ float value_of(unsigned order) {
  return __int_as_float(static_cast<int>(order & 0x80000000u ? order ^ 0x80000000u : ~order));
}
__device__ __forceinline__ uint64 best_key(float v, int id) {  // the largest is the best; among equals the smallest id
  if (v != v) return kNaNKey;
  return static_cast<uint64>(ordered(v)) << 32 | (0xffffffffu - id);
}
__device__ __forceinline__ uint64 rank_key(float z, int id) {  // ascending in the order (-z, id)
  return static_cast<uint64>(~ordered(z)) << 32 | static_cast<unsigned>(id);
}

// A logit behind its edits, and behind the mask, which makes no row usable: NaN and +inf stay what they say.
__device__ __forceinline__ float masked(const Args& a, int row, int id, float v) {
#ifdef MASKED
  const int mask = a.masks[row];
  if (mask > 0 && !(a.allowed[static_cast<int64>(mask) * a.mask_words + id / 32] >> (id % 32) & 1))
    return v < -neg_inf() ? neg_inf() : __int_as_float(0x7fc00000);
#endif
  return v;
}
__device__ __forceinline__ float processed(const Args& a, int row, int id) {
  return masked(a, row, id, a.edited[static_cast<int64>(row) * a.vocab + id]);
}

// Four logits of a row from id on, which is a multiple of 4: as they are, and processed.
struct Four {
  float raw[4], processed[4];
  __device__ __forceinline__ Four(const Args& a, int row, int id) {
    const int64 at = static_cast<int64>(row) * a.vocab + id;
    put(raw, a.raw + at);
    if (a.raw != a.edited) put(processed, a.edited + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) processed[i] = masked(a, row, id + i, a.raw == a.edited ? raw[i] : processed[i]);
  }
  __device__ static __forceinline__ void put(float* to, const float* from) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
};
__device__ __forceinline__ bool is_raw(const Args& a) {  // whether nothing was edited
#ifdef MASKED
  return false;
#else
  return a.raw == a.edited;
#endif
}

__device__ __forceinline__ float exp_f32(float x) {  // as native/maths.h has it, for x up to 0
  const float c = x < -87.0f ? -87.0f : x;
  const float n = sub(add(mul(c, 1.44269504f), 12582912.0f), 12582912.0f);
  const float r = sub(sub(c, mul(n, 0.693359375f)), mul(n, -2.12194440e-4f));
  float p = 1.9875691500e-4f;
  p = add(mul(p, r), 1.3981999507e-3f);
  p = add(mul(p, r), 8.3334519073e-3f);
  p = add(mul(p, r), 4.1665795894e-2f);
  p = add(mul(p, r), 1.6666665459e-1f);
  p = add(mul(p, r), 5.0000001201e-1f);
  const float y = add(add(mul(mul(p, r), r), r), 1.0f);
  const float scale = __int_as_float((static_cast<int>(n) + 127) << 23);
  const float scaled = mul(y, scale);
  return x < -87.0f ? 0.0f : scaled;
}

__device__ __forceinline__ float log_f32(float x) {  // as native/maths.h has it, for positive normal values
  const int bits = __float_as_int(x), e = (bits - 0x3F3504F3) >> 23;
  const float m = __int_as_float(bits - e * (1 << 23));
  const float s = div(sub(m, 1.0f), add(m, 1.0f)), z = mul(s, s);
  const float third = float(1.0 / 3), fifth = float(1.0 / 5), seventh = float(1.0 / 7), ninth = float(1.0 / 9);
  const float series = mul(z, add(third, mul(z, add(fifth, mul(z, add(seventh, mul(z, ninth)))))));
  const float exponent = static_cast<float>(e), twice = add(s, s);
  return add(mul(exponent, 0.693145751953125f), add(twice, add(mul(twice, series), mul(exponent, 1.428606765330187e-06f))));
}

__device__ __forceinline__ float gumbel_f32(unsigned word) {
  float u = mul(add(__uint2float_rn(word), 0.5f), 2.3283064365386963e-10f);
  u = u < 0.999999940395355224609375f ? u : 0.999999940395355224609375f;
  const float w = sub(1.0f, u);
  const float e = -sub(log_f32(w), div(add(sub(w, 1.0f), u), w));
  return -log_f32(e);
}

__device__ __forceinline__ int64 weight(float z) { return __float2ll_rn(mul(exp_f32(z), 1099511627776.0f)); }

template <typename T, typename F>
__device__ __forceinline__ T block_reduce(T v, F combine) {  // the result is in every thread; order-free operations only
  __shared__ T partial[32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) v = combine(v, __shfl_xor_sync(0xffffffffu, v, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  v = partial[0];
  for (int i = 1; i < blockDim.x / 32; ++i) v = combine(v, partial[i]);
  return v;
}
struct Max { __device__ uint64 operator()(uint64 a, uint64 b) const { return a > b ? a : b; } };
struct Sum { __device__ int64 operator()(int64 a, int64 b) const { return a + b; } };

__device__ __forceinline__ uint64 best_of_chunks(const uint64* keys, int chunks) {
  uint64 best = 0;
  for (int i = threadIdx.x; i < chunks; i += blockDim.x) best = Max()(best, keys[i]);
  return block_reduce(best, Max());
}

__device__ __forceinline__ bool usable(uint64 top) {  // no NaN, and a finite maximum
  return top != kNaNKey && fabsf(value_of(static_cast<unsigned>(top >> 32))) <= 3.4028234664e38f;
}

__device__ __forceinline__ float scaled(float logit, float top, float temperature) {
  const float below = sub(logit, top);
  return temperature == 1.0f ? below : div(below, temperature);
}

// Whether z + noise is surely below a bound, `above` being z - bound. As the noise is at most -log u, u = word / 2^32, it is if
// log u > above. The bits of a float are a piecewise linear log2, nowhere above it; the margin is far above every rounding.
__device__ __forceinline__ bool is_below(float above, unsigned word) {
  const int log2_u = __float_as_int(mul(__uint2float_rn(word), 2.3283064365386963e-10f)) - 0x3F800000;  // times 2^23
  return mul(__int2float_rn(log2_u), 1.1920928955078125e-7f) > fused(above, kLog2e, 0.015f);
}
