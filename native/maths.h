// exp, log and the noise from IEEE operations alone: one rounding per written operation, so every CPU gives these bits.
#pragma once
#include <cmath>
#include <cstring>

#include "api.h"

namespace vs {
namespace {

constexpr int kWeightBits = 40;

static inline float exp_f32(float x) {  // relative error below 2e-7; 0 below -87, and no overflow above 88
  float c = x < -87.0f ? -87.0f : x;
  c = c > 88.0f ? 88.0f : c;
  const float n = (c * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest whole number
  const float r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = (p * r * r + r) + 1.0f;
  const int32_t bits = int32_t((n == n ? n : 0.0f)) * (1 << 23) + 0x3f800000;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return x < -87.0f ? 0.0f : y * scale;
}

// exp_f32(z) * 2^40, for z from -infinity to 0: the same operations and bits, but that it may be anything that rounds to 0
// where exp_f32(z) * 2^40 does (z below -28.5).
static inline float scaled_exp(float z) {
  const float c = z < -30.0f ? -30.0f : z;
  const float n = (c * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = (p * r * r + r) + 1.0f;
  const int32_t bits = int32_t(n) * (1 << 23) + ((127 + kWeightBits) << 23);
  float scale;
  std::memcpy(&scale, &bits, 4);
  return y * scale;
}

// To the nearest whole number, ties to even, plus kWholeBits: the lowest bits of a double near 1.5 * 2^52 count ones. No
// instruction set here but AVX-512 converts to 64-bit integers; all of them add doubles.
constexpr uint64_t kWholeBits = 0x4338000000000000u;

static inline uint64_t whole_bits(float x) {
  const double sum = double(x) + 6755399441055744.0;
  uint64_t bits;
  std::memcpy(&bits, &sum, 8);
  return bits;
}

// The weight of a token: w = rint(exp(z) * 2^40). Not for NaN.
static inline int64_t weight(float z) { return int64_t(whole_bits(scaled_exp(z)) - kWholeBits); }

static inline float log_f32(float x) {  // of positive normal values; as verispec/sampling/noise.py has it
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  const int32_t e = (bits - 0x3F3504F3) >> 23;
  const int32_t mantissa = bits - e * (1 << 23);
  float m;
  std::memcpy(&m, &mantissa, 4);
  const float f = m - 1.0f, s = f / (m + 1.0f), z = s * s;
  const float series = z * (float(1.0 / 3) + z * (float(1.0 / 5) + z * (float(1.0 / 7) + z * float(1.0 / 9))));
  const float exponent = float(e), twice = s + s;
  return exponent * 0.693145751953125f + (twice + (twice * series + exponent * 1.428606765330187e-06f));
}

static inline float gumbel_f32(uint32_t word) {
  float u = (float(word) + 0.5f) * 2.3283064365386963e-10f;
  u = u < 0.999999940395355224609375f ? u : 0.999999940395355224609375f;
  const float w = 1.0f - u;
  const float e = -(log_f32(w) - ((w - 1.0f) + u) / w);
  return -log_f32(e);
}

constexpr float kMaxGumbel = 22.88f;

struct Words { uint32_t v[4]; };

static inline Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Sums run in sixteen lanes, element i in lane i % 16, and the lanes are added as a tree.
static inline float reduce_lanes(float* lanes) {
  for (int step = kLanes / 2; step > 0; step /= 2)
    for (int l = 0; l < step; ++l) lanes[l] += lanes[l + step];
  return lanes[0];
}

}  // namespace
}  // namespace vs
