// The kernels of the CPU's own arithmetic: a pass over rows from the embedding to the logits. Compiled once per instruction set (VS_ISA).
//
// Order of every float sum, the same everywhere: a product of a quantised matrix adds its blocks in ascending order, each
// as acc + float(integer dot) * (d * a), then acc + m * (a * sum); a float matrix adds k = 0, 1, 2, ...; norms and softmax
// sums run in sixteen lanes (maths.h); attention adds values position by position. Nothing depends on the number of rows, on
// the row's index, or on how work is shared out to threads.
#include "api.h"
#include "crew.h"
#include "maths.h"
#include "sampling.h"
#include "simd.h"

namespace vs {
namespace {

// What a matrix product reads: floats, or blocks of 15-bit integers 128 * high + low, each with a scale, the sums of its
// halves, and its offset, the scale times its sum.
struct Input {
  const float* x;
  const int8_t *high, *low;
  const float *scales, *offsets;  // [rows][K / 32]
  const int32_t* sums;            // [rows][K / 16]
};

struct Buffers {
  float* normed;   // [rows][max K]
  int8_t *high, *low;  // [rows][max K]
  float *scales, *offsets;  // [rows][max K / 32]
  int32_t* sums;   // [rows][max K / 16]
  float* qkv;      // [rows][(heads + 2 kv_heads) * head_dim]
  float* attended; // [rows][heads * head_dim]
  float* gate_up;  // [rows][2 mlp]
  float* added;    // [rows][hidden]: what a sub-layer adds, where a norm comes before
  float* scores;   // [threads][kScoreRows][max context]: scores of four heads, then the context's places as int64
  int max_in;
  Input input() const { return {normed, high, low, scales, offsets, sums}; }
};

constexpr int kScoreRows = 6;

static bool is_quantised(const Matrix& w) { return w.format >= kQ4; }

static int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

static Buffers carve(const Model& model, int num_rows, int num_threads, int max_context, char* base, size_t* total) {
  size_t offset = 0;
  auto take = [&](size_t nbytes) {
    char* p = base + offset;
    offset += (nbytes + 63) / 64 * 64;
    return p;
  };
  Buffers b;
  const int wide = model.num_heads * model.head_dim;
  int max_in = model.hidden > model.mlp ? model.hidden : model.mlp;
  if (wide > max_in) max_in = wide;
  b.max_in = round_up(max_in, kBlock);
  const size_t rows = size_t(num_rows);
  b.normed = reinterpret_cast<float*>(take(rows * b.max_in * 4));
  b.high = reinterpret_cast<int8_t*>(take(rows * b.max_in));
  b.low = reinterpret_cast<int8_t*>(take(rows * b.max_in));
  b.scales = reinterpret_cast<float*>(take(rows * b.max_in / kBlock * 4));
  b.offsets = reinterpret_cast<float*>(take(rows * b.max_in / kBlock * 4));
  b.sums = reinterpret_cast<int32_t*>(take(rows * b.max_in / 16 * 4));
  b.qkv = reinterpret_cast<float*>(take(rows * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * 4));
  b.attended = reinterpret_cast<float*>(take(rows * wide * 4));
  b.gate_up = reinterpret_cast<float*>(take(rows * 2 * model.mlp * 4));
  b.added = reinterpret_cast<float*>(take(rows * model.hidden * 4));
  b.scores = reinterpret_cast<float*>(
      take(size_t(num_threads) * kScoreRows * round_up(max_context, kLanes) * 4));
  *total = offset;
  return b;
}

constexpr float kLargest = 16256.0f;  // 127 * 128: both parts of the integer fit into signed bytes

// One block of 32 values as 15-bit integers, x * 16256 / max|x| to the nearest, in two parts. A value that is not finite
// makes the block's scale NaN, so that whatever reads it becomes NaN.
static void quantise_block(const float* x, const Buffers& b, size_t at) {
  int32_t bits[kBlock], most = 0;  // magnitudes order as their bits do, and integers have a maximum in one instruction
  std::memcpy(bits, x, sizeof bits);
  for (int i = 0; i < kBlock; ++i) {
    const int32_t magnitude = bits[i] & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  const bool finite = most < 0x7f800000;
  float largest;
  std::memcpy(&largest, &most, 4);
  const float inverse = largest > 1e-30f ? kLargest / largest : 0.0f;
  int32_t rounded[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const float y = finite ? x[i] * inverse : 0.0f;
    rounded[i] = int32_t((y + 12582912.0f) - 12582912.0f);
  }
  int8_t high[kBlock], low[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    const int32_t upper = (rounded[i] + 64) >> 7;
    high[i] = int8_t(upper);
    low[i] = int8_t(rounded[i] - upper * 128);
  }
  std::memcpy(b.high + at, high, sizeof high);
  std::memcpy(b.low + at, low, sizeof low);
  int32_t first = 0, second = 0;
  for (int i = 0; i < kBlock / 2; ++i) first += rounded[i], second += rounded[i + kBlock / 2];
  b.sums[at / 16] = first;
  b.sums[at / 16 + 1] = second;
  const float scale = finite ? largest / kLargest : __builtin_nanf("");
  b.scales[at / kBlock] = scale;
  b.offsets[at / kBlock] = scale * float(first + second);
}

static void quantise_row(const float* x, int width, int row, const Buffers& b) {
  for (int i = 0; i < width; i += kBlock) quantise_block(x + i, b, size_t(row) * b.max_in + i);
}

static void norm_row(const float* x, const float* weight, int width, float eps, float* y) {
  float lanes[kLanes] = {0};
  int i = 0;
  for (; i + kLanes <= width; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += x[i + l] * x[i + l];
  for (int l = 0; i + l < width; ++l) lanes[l] += x[i + l] * x[i + l];
  const float mean = reduce_lanes(lanes) / float(width);
  const float scale = 1.0f / __builtin_sqrtf(mean + eps);
  for (int j = 0; j < width; ++j) y[j] = x[j] * scale * weight[j];
}

// Both are the gate times the sigmoid of something: x * (1 + tanh(u)) / 2 is x * sigmoid(2u).
static void activate_block(int activation, const float* gate, const float* up, int count, float* y) {
  if (activation == kSilu) {
    for (int i = 0; i < count; ++i) y[i] = gate[i] / (1.0f + exp_f32(-gate[i])) * up[i];
  } else {
    for (int i = 0; i < count; ++i) {
      const float x = gate[i], inner = 1.5957691216057308f * (x + 0.044715f * (x * x * x));  // 2 sqrt(2 / pi)
      y[i] = x / (1.0f + exp_f32(-inner)) * up[i];
    }
  }
}

// ---- products ----

static size_t block_nbytes(int format) {
  switch (format) {
    case kQ4: return 256 + 32;
    case kQ4Affine: return 256 + 64;
    case kQ4AffineWide: return 256 + 128;
    case kQ8: return 512 + 32;
    case kQ8Wide: return 512 + 64;
    case kQ8AffineWide: return 512 + 128;
    default: return 512 + 128;  // kQ8Halves
  }
}

static inline Floats load_scales(const uint8_t* p, bool wide, int part) {
  if (wide) return load(reinterpret_cast<const float*>(p) + part * kPartLanes);
  return load_half(reinterpret_cast<const uint16_t*>(p) + part * kPartLanes);
}

// Asks for weights that are needed a little later. With one row the processor's own reading ahead is enough; with more, the
// arithmetic between two reads makes it stop at each page of memory, and arithmetic and waiting would add up. Asking for
// what lies behind a matrix's end does no harm.
constexpr int kAhead = 4096;  // bytes: better than 2048, and than 8192 for small matrices

static inline void fetch_ahead(const uint8_t* w, size_t nbytes) {
  for (size_t line = 0; line < nbytes; line += 64) __builtin_prefetch(w + kAhead + line);
}

template <int F, int R>
static void quantised_tile(const uint8_t* weights, int num_blocks, const Input& in, int stride, int row, float* out,
                           int part) {
  constexpr bool is_q4 = F == kQ4 || F == kQ4Affine || F == kQ4AffineWide;
  constexpr bool wide = F == kQ4AffineWide || F == kQ8Wide || F == kQ8AffineWide || F == kQ8Halves;
  constexpr bool affine = F == kQ4Affine || F == kQ4AffineWide || F == kQ8AffineWide;
  constexpr int scale_nbytes = kLanes * (wide ? 4 : 2);
  const size_t step = block_nbytes(F);
  Floats acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  for (int b = 0; b < num_blocks; ++b) {
    const uint8_t* w = weights + size_t(b) * step;
    if (R > 1 && row == 0 && part == 0) fetch_ahead(w, step);  // later rows find the group in the cache
    const int8_t *high[R], *low[R];
    int32_t sums[R];
    float scales[R], offsets[R];
    for (int r = 0; r < R; ++r) {
      const size_t at = size_t(row + r) * stride + size_t(b) * kBlock;
      high[r] = in.high + at;
      low[r] = in.low + at;
      scales[r] = in.scales[at / kBlock];
      offsets[r] = in.offsets[at / kBlock];
      sums[r] = in.sums[at / 16] + in.sums[at / 16 + 1];
    }
    Ints dots[R];
    const uint8_t* scale_at = w + (is_q4 ? 256 : 512);
    if constexpr (F == kQ8Halves) {
      for (int half = 0; half < 2; ++half) {
        int32_t half_sums[R];
        for (int r = 0; r < R; ++r) {
          high[r] += 16 * half;
          low[r] += 16 * half;
          half_sums[r] = in.sums[(size_t(row + r) * stride + size_t(b) * kBlock) / 16 + half];
        }
        dot_q8<R>(reinterpret_cast<const int8_t*>(w) + 256 * half, high, low, part, 16, half_sums, dots);
        const Floats d = load_scales(scale_at + 64 * half, true, part);
        for (int r = 0; r < R; ++r) acc[r] = add(acc[r], mul(to_float(dots[r]), mul(d, splat(scales[r]))));
      }
      continue;
    }
    if constexpr (is_q4)
      dot_q4<R>(w, high, low, part, dots);
    else
      dot_q8<R>(reinterpret_cast<const int8_t*>(w), high, low, part, kBlock, sums, dots);
    const Floats d = load_scales(scale_at, wide, part);
    for (int r = 0; r < R; ++r) {
      const Ints dot = F == kQ4 ? minus(dots[r], 8 * sums[r]) : dots[r];
      acc[r] = add(acc[r], mul(to_float(dot), mul(d, splat(scales[r]))));
    }
    if constexpr (affine) {
      const Floats m = load_scales(scale_at + scale_nbytes, wide, part);
      for (int r = 0; r < R; ++r) acc[r] = add(acc[r], mul(m, splat(offsets[r])));
    }
  }
  for (int r = 0; r < R; ++r) store(out + r * kLanes + part * kPartLanes, acc[r]);
}

template <int F, int R>
static void float_tile(const uint8_t* w, int num_in, const Input& in, int stride, int row, float* out, int part) {
  Floats acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  constexpr size_t step = kLanes * (F == kF32 ? 4 : 2);
  const float* x = in.x + size_t(row) * stride;
  for (int k = 0; k < num_in; ++k) {
    const size_t at = size_t(k) * kLanes + part * kPartLanes;
    if (R > 1 && row == 0 && part == 0) fetch_ahead(w + size_t(k) * step, step);
    Floats v;
    if constexpr (F == kF32) v = load(reinterpret_cast<const float*>(w) + at);
    if constexpr (F == kF16) v = load_half(reinterpret_cast<const uint16_t*>(w) + at);
    if constexpr (F == kBF16) v = load_bf16(reinterpret_cast<const uint16_t*>(w) + at);
    for (int r = 0; r < R; ++r) acc[r] = add(acc[r], mul(splat(x[size_t(r) * stride + k]), v));
  }
  for (int r = 0; r < R; ++r) store(out + r * kLanes + part * kPartLanes, acc[r]);
}

template <int F, int R>
static void tile(const uint8_t* w, int num_in, const Input& in, int stride, int row, float* out) {
  for (int part = 0; part < kParts; ++part) {
    if constexpr (F >= kQ4)
      quantised_tile<F, R>(w, num_in / kBlock, in, stride, row, out, part);
    else
      float_tile<F, R>(w, num_in, in, stride, row, out, part);
  }
}

// y (+)= the product, for some groups of sixteen columns. A group is read once for all rows.
template <int F>
static void product(const Matrix& m, const Input& in, int stride, int num_rows, float* y, int y_stride, bool adds,
                    int64_t begin, int64_t end) {
  const size_t group_nbytes = F >= kQ4 ? size_t(m.num_in / kBlock) * block_nbytes(F)
                                       : size_t(m.num_in) * kLanes * (F == kF32 ? 4 : 2);
  float out[kRowTile * kLanes];
  for (int64_t g = begin; g < end; ++g) {
    const uint8_t* w = static_cast<const uint8_t*>(m.data) + size_t(g) * group_nbytes;
    const int column = int(g) * kLanes;
    const int count = m.num_out - column < kLanes ? m.num_out - column : kLanes;
    for (int row = 0; row < num_rows;) {
      const int left = num_rows - row;
      int rows;
      if (left >= kRowTile) {
        tile<F, kRowTile>(w, m.num_in, in, stride, row, out), rows = kRowTile;
      } else if (left >= 4) {
        tile<F, 4>(w, m.num_in, in, stride, row, out), rows = 4;
      } else if (left == 3) {
        tile<F, 3>(w, m.num_in, in, stride, row, out), rows = 3;
      } else if (left == 2) {
        tile<F, 2>(w, m.num_in, in, stride, row, out), rows = 2;
      } else {
        tile<F, 1>(w, m.num_in, in, stride, row, out), rows = 1;
      }
      for (int r = 0; r < rows; ++r) {
        float* to = y + size_t(row + r) * y_stride + column;
        const float* from = out + r * kLanes;
        if (adds)
          for (int i = 0; i < count; ++i) to[i] += from[i];
        else
          for (int i = 0; i < count; ++i) to[i] = from[i];
      }
      row += rows;
    }
  }
}

static int64_t num_groups(const Matrix& m) { return (m.num_out + kLanes - 1) / kLanes; }

static void multiply(const Matrix& m, const Input& in, int stride, int num_rows, float* y, int y_stride, bool adds,
                     int64_t begin, int64_t end) {
#define VS_CASE(F) \
  case F: return product<F>(m, in, stride, num_rows, y, y_stride, adds, begin, end)
  switch (m.format) {
    VS_CASE(kF32);
    VS_CASE(kF16);
    VS_CASE(kBF16);
    VS_CASE(kQ4);
    VS_CASE(kQ4Affine);
    VS_CASE(kQ4AffineWide);
    VS_CASE(kQ8);
    VS_CASE(kQ8Wide);
    VS_CASE(kQ8AffineWide);
    VS_CASE(kQ8Halves);
  }
#undef VS_CASE
}

struct Part {
  const Matrix* matrix;
  float* y;
};

// Several products of one input as one phase.
template <int N>
static void multiply_all(Crew& crew, const Part (&parts)[N], const Input& in, int stride, int num_rows, int y_stride,
                         bool adds) {
  int64_t total = 0;
  for (const Part& part : parts) total += num_groups(*part.matrix);
  run(crew, total, [&](int64_t begin, int64_t end) {
    for (const Part& part : parts) {
      const int64_t count = num_groups(*part.matrix);
      const int64_t first = begin > 0 ? begin : 0, last = end < count ? end : count;
      if (first < last) multiply(*part.matrix, in, stride, num_rows, part.y, y_stride, adds, first, last);
      begin -= count;
      end -= count;
    }
  });
}

// Row `index` of a packed matrix as floats: the embedding of a token.
static void unpack_row(const Matrix& m, int index, float* y) {
  const int group = index / kLanes, lane = index % kLanes;
  if (!is_quantised(m)) {
    const size_t width = m.format == kF32 ? 4 : 2;
    const uint8_t* w = static_cast<const uint8_t*>(m.data) + size_t(group) * m.num_in * kLanes * width;
    for (int k = 0; k < m.num_in; ++k) {
      const size_t at = size_t(k) * kLanes + lane;
      if (m.format == kF32) y[k] = reinterpret_cast<const float*>(w)[at];
      if (m.format == kF16) y[k] = half_to_float(reinterpret_cast<const uint16_t*>(w)[at]);
      if (m.format == kBF16) y[k] = bf16_to_float(reinterpret_cast<const uint16_t*>(w)[at]);
    }
    return;
  }
  const int num_blocks = m.num_in / kBlock;
  const bool is_q4 = m.format <= kQ4AffineWide;
  const bool wide = m.format == kQ4AffineWide || m.format >= kQ8Wide;
  const uint8_t* w = static_cast<const uint8_t*>(m.data) + size_t(group) * num_blocks * block_nbytes(m.format);
  for (int b = 0; b < num_blocks; ++b, w += block_nbytes(m.format)) {
    const uint8_t* scale_at = w + (is_q4 ? 256 : 512);
    auto scale = [&](int which) {
      return wide ? reinterpret_cast<const float*>(scale_at)[which * kLanes + lane]
                  : half_to_float(reinterpret_cast<const uint16_t*>(scale_at)[which * kLanes + lane]);
    };
    const bool affine = m.format == kQ4Affine || m.format == kQ4AffineWide || m.format == kQ8AffineWide;
    for (int i = 0; i < kBlock; ++i) {
      int32_t q;
      if (is_q4) {
        const int packed = w[64 * ((i % 16) / 4) + 4 * lane + i % 4];
        q = i < 16 ? packed & 15 : packed >> 4;
        if (m.format == kQ4) q -= 8;
      } else {
        q = reinterpret_cast<const int8_t*>(w)[64 * (i / 4) + 4 * lane + i % 4];
      }
      const float d = scale(m.format == kQ8Halves ? i / 16 : 0);
      y[b * kBlock + i] = affine ? float(q) * d + scale(1) : float(q) * d;
    }
  }
}

// ---- attention ----

static void rotate(float* x, const float* cos_sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i], c = cos_sin[i], s = cos_sin[half + i];
    x[i] = a * c - b * s;
    x[half + i] = b * c + a * s;
  }
}

static void store_halves(const float* x, int count, uint16_t* y) {
  int i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
#endif
  for (; i < count; ++i) y[i] = float_to_half(x[i]);
}

static void finish_qkv(const Model& model, const Layer& layer, const Rows& rows, const Store& kv, int index, int row,
                       float* qkv) {
  const int d = model.head_dim, num_q = model.num_heads, num_kv = model.num_kv_heads;
  if (layer.qkv_bias)
    for (int i = 0; i < (num_q + 2 * num_kv) * d; ++i) qkv[i] += layer.qkv_bias[i];
  const float* cos_sin = layer.cos_sin + size_t(rows.positions[row]) * d;
  for (int h = 0; h < num_q + num_kv; ++h) {
    float* head = qkv + h * d;
    const float* weight = h < num_q ? layer.q_norm : layer.k_norm;
    if (weight) norm_row(head, weight, d, model.norm_eps, head);
    rotate(head, cos_sin, d);
  }
  const int stride = round_up(d, kLanes);  // a head's place is padded with zeros, which nothing overwrites
  for (int h = 0; h < num_kv; ++h) {
    const size_t at = ((size_t(index) * kv.slots_per_layer + rows.slots[row]) * num_kv + h) * stride;
    const float *k = qkv + (num_q + h) * d, *v = k + num_kv * d;
    if (model.kv_is_half) {
      store_halves(k, d, static_cast<uint16_t*>(kv.k) + at);
      store_halves(v, d, static_cast<uint16_t*>(kv.v) + at);
    } else {
      std::memcpy(static_cast<float*>(kv.k) + at, k, size_t(d) * 4);
      std::memcpy(static_cast<float*>(kv.v) + at, v, size_t(d) * 4);
    }
  }
}

constexpr int kMaxHead = 512;
constexpr int kHeads = 4;  // heads of a group that are computed together

template <bool kHalf>
static inline Floats load_lanes(const void* store, size_t at) {
  if constexpr (kHalf) return load_half(static_cast<const uint16_t*>(store) + at);
  return load(static_cast<const float*>(store) + at);
}

// Scores of up to four heads at all positions: lanes over the head's values, sixteen positions at a time.
template <bool kHalf, int H>
static void score_heads(const void* k, const int64_t* at, int num_context, const float* q, int d, float scale,
                        float* scores, int score_stride) {
  float tail[kLanes];
  for (int first = 0; first < num_context; first += kLanes) {
    const int count = num_context - first < kLanes ? num_context - first : kLanes;
    for (int h = 0; h < H; ++h) {
      Floats acc[kLanes][kParts];
      for (int i = 0; i < kLanes; ++i)
        for (int part = 0; part < kParts; ++part) acc[i][part] = zero();
      for (int i = 0; i < count; ++i)
        for (int c = 0; c < d; c += kLanes)
          for (int part = 0; part < kParts; ++part) {
            const int from = c + part * kPartLanes;
            acc[i][part] = add(acc[i][part], mul(load(q + h * kMaxHead + from), load_lanes<kHalf>(k, at[first + i] + from)));
          }
      reduce_tile(acc, tail);
      for (int i = 0; i < count; ++i) scores[size_t(h) * score_stride + first + i] = tail[i] * scale;
    }
  }
}

// Weighted sums of the values, position by position.
template <bool kHalf, int H>
static void sum_heads(const void* v, const int64_t* at, int num_context, const float* scores, int score_stride, int d,
                      float* out) {
  for (int c = 0; c < d; c += kPartLanes) {
    Floats acc[H];
    for (int h = 0; h < H; ++h) acc[h] = zero();
    for (int p = 0; p < num_context; ++p) {
      const Floats value = load_lanes<kHalf>(v, at[p] + c);
      for (int h = 0; h < H; ++h) acc[h] = add(acc[h], mul(splat(scores[size_t(h) * score_stride + p]), value));
    }
    for (int h = 0; h < H; ++h) store(out + h * kMaxHead + c, acc[h]);
  }
}

static float softmax(float* s, int count) {
  float largest = s[0];
  for (int p = 1; p < count; ++p) largest = s[p] > largest ? s[p] : largest;
  for (int p = 0; p < count; ++p) s[p] = exp_f32(s[p] - largest);
  float lanes[kLanes] = {0};
  int p = 0;
  for (; p + kLanes <= count; p += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += s[p + l];
  for (int l = 0; p + l < count; ++l) lanes[l] += s[p + l];
  return reduce_lanes(lanes);
}

template <bool kHalf, int H>
static void attend_heads(const void* k, const void* v, const int64_t* at, int num_context, const float* q, int d,
                         float scale, float* out, float* scores, int score_stride) {
  const int padded = round_up(d, kLanes);
  float query[H * kMaxHead], result[H * kMaxHead], totals[H];
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < padded; ++i) query[h * kMaxHead + i] = i < d ? q[h * d + i] : 0.0f;
  score_heads<kHalf, H>(k, at, num_context, query, padded, scale, scores, score_stride);
  for (int h = 0; h < H; ++h) totals[h] = softmax(scores + size_t(h) * score_stride, num_context);
  sum_heads<kHalf, H>(v, at, num_context, scores, score_stride, padded, result);
  for (int h = 0; h < H; ++h)
    for (int i = 0; i < d; ++i) out[h * d + i] = result[h * kMaxHead + i] / totals[h];
}

// The heads of one row that share one K/V head. With a window the sums begin at its first position, which depends on the
// row's own position alone.
template <bool kHalf>
static void attend_group(const Model& model, const Rows& rows, const Store& kv, int index, int row, int kv_head,
                         const float* q, float* out, float* scores, int score_stride, int64_t* at) {
  const int d = model.head_dim, stride = round_up(d, kLanes), group = model.num_heads / model.num_kv_heads;
  const int prefix_len = rows.prefix_lens[row], num_context = prefix_len + rows.tail_lens[row];
  const int32_t* table = rows.table + size_t(rows.seq_rows[row]) * rows.table_width;
  const int32_t* tail = rows.tails + size_t(row) * rows.tail_width;
  const int64_t base = int64_t(index) * kv.slots_per_layer;
  const Layer& layer = model.layers[index];
  const int first = layer.window && num_context > layer.window ? num_context - layer.window : 0;
  for (int p = first; p < num_context; ++p) {
    const int32_t slot = p < prefix_len ? table[p] : tail[p - prefix_len];
    at[p - first] = ((base + slot) * model.num_kv_heads + kv_head) * stride;
  }
  const int seen = num_context - first;
  const float scale = 1.0f / __builtin_sqrtf(layer.query_scalar);
  for (int h = 0; h < group;) {
    const int left = group - h;
#define VS_HEADS(n) attend_heads<kHalf, n>(kv.k, kv.v, at, seen, q + h * d, d, scale, out + h * d, scores, score_stride), h += n
    if (left >= 4)
      VS_HEADS(4);
    else if (left == 3)
      VS_HEADS(3);
    else if (left == 2)
      VS_HEADS(2);
    else
      VS_HEADS(1);
#undef VS_HEADS
  }
}

static void attend(Crew& crew, const Model& model, const Rows& rows, const Store& kv, int layer, const float* q,
                   int q_stride, float* out, float* scores, int score_stride) {
  const int d = model.head_dim, group = model.num_heads / model.num_kv_heads;
  float* own = scores + size_t(crew.tid) * kScoreRows * score_stride;
  int64_t* at = reinterpret_cast<int64_t*>(own + kHeads * score_stride);
  run(crew, int64_t(rows.num_rows) * model.num_kv_heads, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int row = int(task / model.num_kv_heads), kv_head = int(task % model.num_kv_heads);
      const float* from = q + size_t(row) * q_stride + size_t(kv_head) * group * d;
      float* to = out + (size_t(row) * model.num_heads + size_t(kv_head) * group) * d;
      if (model.kv_is_half)
        attend_group<true>(model, rows, kv, layer, row, kv_head, from, to, own, score_stride, at);
      else
        attend_group<false>(model, rows, kv, layer, row, kv_head, from, to, own, score_stride, at);
    }
  });
}

// ---- the pass ----

// Norm and, where a matrix wants integers, quantise.
static void prepare(Crew& crew, int width, bool quantises, const float* x, const float* weight, float eps, int num_rows,
                    const Buffers& b) {
  run(crew, num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* y = b.normed + size_t(row) * b.max_in;
      const float* from = x + size_t(row) * width;
      if (weight)
        norm_row(from, weight, width, eps, y);
      else
        std::memcpy(y, from, size_t(width) * 4);
      if (quantises) quantise_row(y, width, int(row), b);
    }
  });
}

// x += norm(what a sub-layer gave).
static void add_normed(Crew& crew, const float* weight, int width, float eps, int num_rows, const Buffers& b, float* x) {
  run(crew, num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float *from = b.added + size_t(row) * width, *to = x + size_t(row) * width;
      norm_row(from, weight, width, eps, from);
      for (int i = 0; i < width; ++i) to[i] += from[i];
    }
  });
}

static void activate(Crew& crew, int activation, const Matrix& down, const float* gate_up, int mlp, int num_rows,
                     const Buffers& b) {
  const int num_blocks = (mlp + kBlock - 1) / kBlock;
  run(crew, int64_t(num_rows) * num_blocks, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const size_t row = size_t(task / num_blocks), at = size_t(task % num_blocks) * kBlock;
      const float* gate = gate_up + row * 2 * mlp + at;
      const int count = mlp - int(at) < kBlock ? mlp - int(at) : kBlock;
      float* y = b.normed + row * b.max_in + at;
      activate_block(activation, gate, gate + mlp, count, y);
      if (is_quantised(down)) quantise_block(y, b, row * b.max_in + at);
    }
  });
}

static int longest_context(const Rows& rows) {
  int longest = 1;
  for (int r = 0; r < rows.num_rows; ++r) {
    const int n = rows.prefix_lens[r] + rows.tail_lens[r];
    longest = n > longest ? n : longest;
  }
  return longest;
}

static int num_phases(const Model& model) { return 1 + 12 * model.num_layers; }

static void forward(Crew crew, const Model& model, const Rows& rows, const Store& kv, const uint8_t* skip_attention,
                    const uint8_t* skip_mlp, float* x, int first, int end, void* scratch) {
  size_t total;
  const int max_context = longest_context(rows), score_stride = round_up(max_context, kLanes);
  const Buffers b = carve(model, rows.num_rows, crew.num_threads, max_context, static_cast<char*>(scratch), &total);
  const int M = rows.num_rows, D = model.hidden, wide = model.num_heads * model.head_dim;
  const int qkv_width = wide + 2 * model.num_kv_heads * model.head_dim;
  if (first < 0) {
    run(crew, M, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row) {
        float* y = x + size_t(row) * D;
        unpack_row(model.embed, rows.token_ids[row], y);
        for (int i = 0; i < D; ++i) y[i] *= model.embed_scale;
      }
    });
    first = 0;
  }
  for (int i = first; i < end; ++i) {
    const Layer& layer = model.layers[i];
    if (!skip_attention[i]) {
      const bool quantises = is_quantised(layer.q) || is_quantised(layer.k) || is_quantised(layer.v);
      prepare(crew, D, quantises, x, layer.attn_norm, model.norm_eps, M, b);
      const Part qkv[] = {{&layer.q, b.qkv}, {&layer.k, b.qkv + wide}, {&layer.v, b.qkv + wide + layer.k.num_out}};
      multiply_all(crew, qkv, b.input(), b.max_in, M, qkv_width, false);
      run(crew, M, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; ++row)
          finish_qkv(model, layer, rows, kv, i, int(row), b.qkv + size_t(row) * qkv_width);
      });
      attend(crew, model, rows, kv, i, b.qkv, qkv_width, b.attended, b.scores, score_stride);
      prepare(crew, wide, is_quantised(layer.o), b.attended, nullptr, 0.0f, M, b);
      const Part o[] = {{&layer.o, layer.attn_post_norm ? b.added : x}};
      multiply_all(crew, o, b.input(), b.max_in, M, D, !layer.attn_post_norm);
      if (layer.attn_post_norm) add_normed(crew, layer.attn_post_norm, D, model.norm_eps, M, b, x);
    }
    if (!skip_mlp[i]) {
      const bool quantises = is_quantised(layer.gate) || is_quantised(layer.up);
      prepare(crew, D, quantises, x, layer.mlp_norm, model.norm_eps, M, b);
      const Part gate_up[] = {{&layer.gate, b.gate_up}, {&layer.up, b.gate_up + model.mlp}};
      multiply_all(crew, gate_up, b.input(), b.max_in, M, 2 * model.mlp, false);
      activate(crew, layer.activation, layer.down, b.gate_up, model.mlp, M, b);
      const Part down[] = {{&layer.down, layer.mlp_post_norm ? b.added : x}};
      multiply_all(crew, down, b.input(), b.max_in, M, D, !layer.mlp_post_norm);
      if (layer.mlp_post_norm) add_normed(crew, layer.mlp_post_norm, D, model.norm_eps, M, b, x);
    }
  }
}

static size_t scratch_nbytes(const Model& model, int num_rows, int num_threads, int max_context) {
  size_t total;
  carve(model, num_rows, num_threads, max_context, nullptr, &total);
  return total;
}

static void linear(Crew crew, const Matrix& m, const float* x, int num_rows, float* y, void* scratch) {
  Model sizes = {};
  sizes.hidden = m.num_in, sizes.mlp = m.num_in, sizes.num_heads = 1, sizes.num_kv_heads = 1, sizes.head_dim = 1;
  size_t total;
  const Buffers b = carve(sizes, num_rows, crew.num_threads, 1, static_cast<char*>(scratch), &total);
  prepare(crew, m.num_in, is_quantised(m), x, nullptr, 0.0f, num_rows, b);
  const Part parts[] = {{&m, y}};
  multiply_all(crew, parts, b.input(), b.max_in, num_rows, m.num_out, false);
}

static void logits(Crew crew, const Model& model, const float* x, int num_rows, float* y, Totals* row_totals,
                   void* scratch) {
  size_t total;
  const Buffers b = carve(model, num_rows, crew.num_threads, 1, static_cast<char*>(scratch), &total);
  prepare(crew, model.hidden, is_quantised(model.head), x, model.final_norm, model.norm_eps, num_rows, b);
  const Part parts[] = {{&model.head, y}};
  multiply_all(crew, parts, b.input(), b.max_in, num_rows, model.vocab, false);
  totals(crew, y, num_rows, model.vocab, row_totals);
}

static void norm(Crew crew, const float* x, const float* weight, int num_rows, int width, float eps, float* y) {
  run(crew, num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) norm_row(x + size_t(r) * width, weight, width, eps, y + size_t(r) * width);
  });
}

static void activate_rows(Crew crew, int activation, const float* gate_up, int num_rows, int mlp, float* y) {
  run(crew, num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* gate = gate_up + size_t(r) * 2 * mlp;
      activate_block(activation, gate, gate + mlp, mlp, y + size_t(r) * mlp);
    }
  });
}

static void attend_rows(Crew crew, const Model& model, const Rows& rows, const Store& kv, int layer, const float* q,
                        float* out, void* scratch) {
  attend(crew, model, rows, kv, layer, q, model.num_heads * model.head_dim, out, static_cast<float*>(scratch),
         round_up(longest_context(rows), kLanes));
}

static void elementary(Crew crew, int which, const float* x, int64_t count, float* y) {
  run(crew, count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint32_t word;
      std::memcpy(&word, x + i, 4);
      y[i] = which == 0   ? exp_f32(x[i])
             : which == 1 ? log_f32(x[i])
             : which == 2 ? gumbel_f32(word)
                          : half_to_float(float_to_half(x[i]));
    }
  });
}

}  // namespace

#define VS_TEXT2(x) #x
#define VS_TEXT(x) VS_TEXT2(x)
#define VS_TABLE2(isa) table_##isa
#define VS_TABLE(isa) VS_TABLE2(isa)
#define VS_HOPPER2(isa) hopper_##isa
#define VS_HOPPER(isa) VS_HOPPER2(isa)
extern const Arithmetic VS_HOPPER(VS_ISA);
static const Arithmetic own = {num_phases, scratch_nbytes, forward, logits, linear, activate_rows, attend_rows};
extern const Table VS_TABLE(VS_ISA);
const Table VS_TABLE(VS_ISA) = {
    VS_TEXT(VS_ISA), &own, &VS_HOPPER(VS_ISA), norm, totals, draw, top_k, noisy_top_k, elementary,
};

}  // namespace vs
