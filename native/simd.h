// Sixteen lanes of float and int32 in the widest registers the instruction set has, and the dot products of one block of
// packed weights with R rows. The portable form is the definition; the others compute the same integers and the same
// single IEEE float operations. Everything is `static`: each instruction set's copy stays in its own object file.
#pragma once
#include <cstring>

#include "api.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vs {
namespace {

static inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u, bits;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24, exactly
    float value = float(int32_t(mantissa)) * 5.9604644775390625e-08f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | (mantissa << 13);
  }
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

static inline uint16_t float_to_half(float value) {  // round to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to infinity
  if (magnitude < 0x33000001u) return uint16_t(sign);             // rounds to zero
  uint32_t exponent = magnitude >> 23, mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  uint32_t shift = exponent < 113 ? 126 - exponent : 13;
  uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
  if (exponent >= 113) kept += (exponent - 113) << 10;  // the implicit bit adds one to the exponent field
  kept += rest > middle || (rest == middle && (kept & 1));
  return uint16_t(sign | kept);
}

static inline float bf16_to_float(uint16_t b) {
  uint32_t bits = uint32_t(b) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

constexpr int kRowTile = 8;
constexpr int kParts = 1;  // registers per sixteen lanes
struct Floats { __m512 v; };
struct Ints { __m512i v; };
static inline Floats zero() { return {_mm512_setzero_ps()}; }
static inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
static inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
static inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Floats to_float(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline Ints minus(Ints a, int32_t b) { return {_mm512_sub_epi32(a.v, _mm512_set1_epi32(b))}; }
static inline Floats load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline Floats load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// Sums of the sixteen lanes of sixteen vectors, each as the tree l += l + 8, then + 4, + 2, + 1.
static inline void reduce_tile(Floats (*acc)[kParts], float* out) {
  __m512 r[8], s[4], u[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = acc[2 * i][0].v, b = acc[2 * i + 1][0].v;
    r[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
  }
  for (int i = 0; i < 4; ++i)
    s[i] = _mm512_add_ps(_mm512_shuffle_f32x4(r[2 * i], r[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(r[2 * i], r[2 * i + 1], 0xDD));
  for (int i = 0; i < 2; ++i)
    u[i] = _mm512_add_ps(_mm512_shuffle_ps(s[2 * i], s[2 * i + 1], 0x44),
                         _mm512_shuffle_ps(s[2 * i], s[2 * i + 1], 0xEE));
  const __m512 mixed = _mm512_add_ps(_mm512_shuffle_ps(u[0], u[1], 0x88), _mm512_shuffle_ps(u[0], u[1], 0xDD));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_ps(out, _mm512_permutexvar_ps(order, mixed));
}
static inline __m512i four(const int8_t* a) {
  int32_t word;
  std::memcpy(&word, a, 4);
  return _mm512_set1_epi32(word);
}

template <int R>
static inline void dot_q4(const uint8_t* w, const int8_t* const* high, const int8_t* const* low, int, Ints* out) {
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i h[R], l[R];
  for (int r = 0; r < R; ++r) h[r] = l[r] = _mm512_setzero_si512();
  for (int j = 0; j < 4; ++j) {
    const __m512i packed = _mm512_loadu_si512(w + 64 * j);
    const __m512i first = _mm512_and_si512(packed, mask);
    const __m512i second = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
    for (int r = 0; r < R; ++r) {
      h[r] = _mm512_dpbusd_epi32(h[r], first, four(high[r] + 4 * j));
      l[r] = _mm512_dpbusd_epi32(l[r], first, four(low[r] + 4 * j));
    }
    for (int r = 0; r < R; ++r) {
      h[r] = _mm512_dpbusd_epi32(h[r], second, four(high[r] + 16 + 4 * j));
      l[r] = _mm512_dpbusd_epi32(l[r], second, four(low[r] + 16 + 4 * j));
    }
  }
  for (int r = 0; r < R; ++r) out[r].v = _mm512_add_epi32(_mm512_slli_epi32(h[r], 7), l[r]);
}

template <int R>
static inline void dot_q8(const int8_t* w, const int8_t* const* high, const int8_t* const* low, int, int num_values,
                          const int32_t* row_sums, Ints* out) {
  // The instruction takes unsigned by signed: w + 128 is unsigned, and 128 times the row's sum is taken off again.
  const __m512i flip = _mm512_set1_epi8(char(0x80));
  __m512i h[R], l[R];
  for (int r = 0; r < R; ++r) h[r] = l[r] = _mm512_setzero_si512();
  for (int j = 0; j < num_values / 4; ++j) {
    const __m512i shifted = _mm512_xor_si512(_mm512_loadu_si512(w + 64 * j), flip);
    for (int r = 0; r < R; ++r) {
      h[r] = _mm512_dpbusd_epi32(h[r], shifted, four(high[r] + 4 * j));
      l[r] = _mm512_dpbusd_epi32(l[r], shifted, four(low[r] + 4 * j));
    }
  }
  for (int r = 0; r < R; ++r) {
    out[r].v = _mm512_add_epi32(_mm512_slli_epi32(h[r], 7), l[r]);
    out[r] = minus(out[r], 128 * row_sums[r]);
  }
}

#elif defined(__AVX2__)

constexpr int kRowTile = 4;
constexpr int kParts = 2;
struct Floats { __m256 v; };  // half of the lanes: callers loop over the two parts
struct Ints { __m256i v; };
static inline Floats zero() { return {_mm256_setzero_ps()}; }
static inline Floats splat(float x) { return {_mm256_set1_ps(x)}; }
static inline Floats load(const float* p) { return {_mm256_loadu_ps(p)}; }
static inline void store(float* p, Floats a) { _mm256_storeu_ps(p, a.v); }
static inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline Floats to_float(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }
static inline Ints minus(Ints a, int32_t b) { return {_mm256_sub_epi32(a.v, _mm256_set1_epi32(b))}; }
static inline Floats load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
static inline Floats load_bf16(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
static inline void reduce_tile(Floats (*acc)[kParts], float* out) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int half = 0; half < 2; ++half) {
    __m256 w[8], s[4], u[2];
    for (int i = 0; i < 8; ++i) w[i] = _mm256_add_ps(acc[8 * half + i][0].v, acc[8 * half + i][1].v);
    for (int i = 0; i < 4; ++i)
      s[i] = _mm256_add_ps(_mm256_permute2f128_ps(w[2 * i], w[2 * i + 1], 0x20),
                           _mm256_permute2f128_ps(w[2 * i], w[2 * i + 1], 0x31));
    for (int i = 0; i < 2; ++i)
      u[i] = _mm256_add_ps(_mm256_shuffle_ps(s[2 * i], s[2 * i + 1], 0x44),
                           _mm256_shuffle_ps(s[2 * i], s[2 * i + 1], 0xEE));
    const __m256 mixed = _mm256_add_ps(_mm256_shuffle_ps(u[0], u[1], 0x88), _mm256_shuffle_ps(u[0], u[1], 0xDD));
    _mm256_storeu_ps(out + 8 * half, _mm256_permutevar8x32_ps(mixed, order));
  }
}
static inline __m256i four(const int8_t* a) {
  int32_t word;
  std::memcpy(&word, a, 4);
  return _mm256_set1_epi32(word);
}

template <int R>
static inline void dot_q4(const uint8_t* w, const int8_t* const* high, const int8_t* const* low, int part, Ints* out) {
  // Pairs of products are at most 2 * 15 * 127, so eight of them fit into 16 bits.
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i h[R], l[R];
  for (int r = 0; r < R; ++r) h[r] = l[r] = _mm256_setzero_si256();
  for (int j = 0; j < 4; ++j) {
    const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 64 * j + 32 * part));
    const __m256i first = _mm256_and_si256(packed, mask);
    const __m256i second = _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask);
    for (int r = 0; r < R; ++r) {
      h[r] = _mm256_add_epi16(h[r], _mm256_maddubs_epi16(first, four(high[r] + 4 * j)));
      l[r] = _mm256_add_epi16(l[r], _mm256_maddubs_epi16(first, four(low[r] + 4 * j)));
      h[r] = _mm256_add_epi16(h[r], _mm256_maddubs_epi16(second, four(high[r] + 16 + 4 * j)));
      l[r] = _mm256_add_epi16(l[r], _mm256_maddubs_epi16(second, four(low[r] + 16 + 4 * j)));
    }
  }
  for (int r = 0; r < R; ++r)
    out[r].v = _mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(h[r], ones), 7), _mm256_madd_epi16(l[r], ones));
}

template <int R>
static inline void dot_q8(const int8_t* w, const int8_t* const* high, const int8_t* const* low, int part, int num_values,
                          const int32_t*, Ints* out) {
  // |w| is at most 128 and the rows' parts at most 127: a pair of products fits into 16 bits, so nothing saturates.
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i h[R], l[R];
  for (int r = 0; r < R; ++r) h[r] = l[r] = _mm256_setzero_si256();
  for (int j = 0; j < num_values / 4; ++j) {
    const __m256i signed_w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 64 * j + 32 * part));
    const __m256i magnitude = _mm256_abs_epi8(signed_w);
    for (int r = 0; r < R; ++r) {
      const __m256i upper = _mm256_sign_epi8(four(high[r] + 4 * j), signed_w);
      const __m256i lower = _mm256_sign_epi8(four(low[r] + 4 * j), signed_w);
      h[r] = _mm256_add_epi32(h[r], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, upper), ones));
      l[r] = _mm256_add_epi32(l[r], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, lower), ones));
    }
  }
  for (int r = 0; r < R; ++r) out[r].v = _mm256_add_epi32(_mm256_slli_epi32(h[r], 7), l[r]);
}

#else

constexpr int kRowTile = 4;
constexpr int kParts = 1;
struct Floats { float v[kLanes]; };
struct Ints { int32_t v[kLanes]; };
#define VS_EACH for (int l = 0; l < kLanes; ++l)
static inline Floats zero() { Floats r; VS_EACH r.v[l] = 0.0f; return r; }
static inline Floats splat(float x) { Floats r; VS_EACH r.v[l] = x; return r; }
static inline Floats load(const float* p) { Floats r; VS_EACH r.v[l] = p[l]; return r; }
static inline void store(float* p, const Floats& a) { VS_EACH p[l] = a.v[l]; }
static inline Floats add(const Floats& a, const Floats& b) { Floats r; VS_EACH r.v[l] = a.v[l] + b.v[l]; return r; }
static inline Floats mul(const Floats& a, const Floats& b) { Floats r; VS_EACH r.v[l] = a.v[l] * b.v[l]; return r; }
static inline Floats to_float(const Ints& a) { Floats r; VS_EACH r.v[l] = float(a.v[l]); return r; }
static inline Ints minus(const Ints& a, int32_t b) { Ints r; VS_EACH r.v[l] = a.v[l] - b; return r; }
static inline Floats load_half(const uint16_t* p) { Floats r; VS_EACH r.v[l] = half_to_float(p[l]); return r; }
static inline Floats load_bf16(const uint16_t* p) { Floats r; VS_EACH r.v[l] = bf16_to_float(p[l]); return r; }

static inline void reduce_tile(Floats (*acc)[kParts], float* out) {
  for (int i = 0; i < kLanes; ++i) {
    float* lanes = acc[i][0].v;
    for (int step = kLanes / 2; step > 0; step /= 2)
      for (int l = 0; l < step; ++l) lanes[l] += lanes[l + step];
    out[i] = lanes[0];
  }
}

template <int R>
static inline void dot_q4(const uint8_t* w, const int8_t* const* high, const int8_t* const* low, int, Ints* out) {
  for (int r = 0; r < R; ++r) {
    VS_EACH out[r].v[l] = 0;
    for (int i = 0; i < 16; ++i) {
      const int32_t first = 128 * high[r][i] + low[r][i], second = 128 * high[r][16 + i] + low[r][16 + i];
      VS_EACH {
        const int32_t packed = w[64 * (i / 4) + 4 * l + i % 4];
        out[r].v[l] += (packed & 15) * first + (packed >> 4) * second;
      }
    }
  }
}

template <int R>
static inline void dot_q8(const int8_t* w, const int8_t* const* high, const int8_t* const* low, int, int num_values,
                          const int32_t*, Ints* out) {
  for (int r = 0; r < R; ++r) {
    VS_EACH out[r].v[l] = 0;
    for (int i = 0; i < num_values; ++i) {
      const int32_t a = 128 * high[r][i] + low[r][i];
      VS_EACH out[r].v[l] += int32_t(w[64 * (i / 4) + 4 * l + i % 4]) * a;
    }
  }
}

#endif

constexpr int kPartLanes = kLanes / kParts;

}  // namespace
}  // namespace vs
