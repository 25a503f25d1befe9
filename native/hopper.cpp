// A pass in the arithmetic of a Hopper GPU's tensor cores, on a CPU: docs/cuda-arithmetic.md, step by step, bit for bit.
// Compiled once per instruction set (VS_ISA); vectors are the compiler's own, as wide as its registers.
//
// One step of a chain adds 16 exact products and the accumulator, cut off 25 bits below the largest exponent. A float32
// holds the product of two bf16 values exactly, so terms are products times a power of two, cut to integers: that is the
// quick way, for exponents of everyday. `exact_step` is the definition, and serves whatever is left.
#include "api.h"
#include "crew.h"
#include "simd.h"

namespace vs {

#define VS_TABLE2(isa) table_##isa
#define VS_TABLE(isa) VS_TABLE2(isa)
#define VS_HOPPER2(isa) hopper_##isa
#define VS_HOPPER(isa) VS_HOPPER2(isa)
extern const Table VS_TABLE(VS_ISA);

namespace {

#if defined(__AVX512F__)
constexpr int kWide = 16, kShorts = 32;  // floats of a register, and bytes of one with exponents
#elif defined(__AVX2__)
constexpr int kWide = 8, kShorts = 32;
#else
constexpr int kWide = 4, kShorts = 16;
#endif
constexpr int kPieces = kLanes / kWide;  // registers for the floats of sixteen outputs
typedef float WideFloat __attribute__((vector_size(4 * kWide)));
typedef int32_t WideInt __attribute__((vector_size(4 * kWide)));
typedef uint32_t WideWord __attribute__((vector_size(4 * kWide)));
typedef int16_t Shorts __attribute__((vector_size(kShorts)));
typedef int16_t WideShort __attribute__((vector_size(2 * kWide)));
typedef uint16_t WideHalf __attribute__((vector_size(2 * kWide)));

constexpr int kStep = 16;             // products of one tensor-core step
constexpr int kLeastTop = 254 - 133;  // the least exponent that terms are aligned to
constexpr int kFractionBits = 25;     // that a term keeps below the largest exponent
constexpr int kTile = 64, kSpan = 256;  // positions of a softmax step, and of a chain of them
constexpr int kMaxParts = 4, kEnoughWork = 8192;
constexpr int kRows = 4;              // rows that share one reading of the weights

// Exponents are those of bf16 and float32 as they are stored, 1 for subnormals, and those of products are sums of two:
// 254 stands for 1. Zeros have none, and what is not finite lies above everything.
constexpr int16_t kNone = -16384, kNotFinite = 16384;
// Where the quick way holds: scales and results are normal floats, and no result can overflow.
constexpr int kLeast = 154, kMost = 374;

template <class Vector, class T>
static inline Vector load_as(const T* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
static inline WideFloat wide_bf16(const uint16_t* p) {
  return (WideFloat)(__builtin_convertvector(load_as<WideHalf>(p), WideWord) << 16);
}
static inline WideInt to_ints(WideFloat x) { return __builtin_convertvector(x, WideInt); }  // towards zero
static inline WideInt magnitude(WideInt x) {
  const WideWord sign = (WideWord)(x >> 31);
  return (WideInt)(((WideWord)x ^ sign) - sign);
}
static inline WideFloat power(WideInt exponent) { return (WideFloat)((WideWord)exponent << 23); }  // as it is stored
static inline bool any(WideInt mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask);
#else
  int32_t found = 0;
  for (int l = 0; l < kWide; ++l) found |= mask[l];
  return found;
#endif
}

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
static inline float of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
static inline float rounded(float x) {  // to bf16, ties to even
  const uint32_t bits = bits_of(x), up = bits + 0x7fff + ((bits >> 16) & 1);
  return of_bits(x == x ? up & 0xffff0000u : 0x7fc00000u);
}
static inline uint16_t bf16_bits(float x) { return uint16_t(bits_of(x) >> 16); }  // of a value that was rounded
static inline int exponent_of(float x) {
  const int stored = int(bits_of(x) >> 23) & 255;
  return stored ? stored : 1;
}

// ---- the chain ----

static double two_to(int exponent) {
  const uint64_t bits = uint64_t(exponent + 1023) << 52;
  double x;
  std::memcpy(&x, &bits, 8);
  return x;
}

// float64 to float32, towards zero; infinite from 2^128 on.
static float cut(double x) {
  const float nearest = float(x);
  if (__builtin_fabs(x) >= two_to(128)) return nearest;
  return __builtin_fabs(double(nearest)) > __builtin_fabs(x) ? of_bits(bits_of(nearest) - 1) : nearest;
}

// One step for one output, as it is defined. Sums with a term that is not finite are NaN, or that infinity.
static float exact_step(const uint16_t* w, int64_t stride, const float* x, float total) {
  int top = total == 0.0f ? 0 : exponent_of(total) + 127;
  double plain = double(total);
  for (int k = 0; k < kStep; ++k) {
    const float weight = bf16_to_float(w[k * stride]);
    const int exponent = exponent_of(x[k]) + exponent_of(weight);
    if (x[k] != 0.0f && weight != 0.0f && exponent > top) top = exponent;
    plain += double(x[k]) * double(weight);
  }
  if (!(plain - plain == 0.0)) return float(plain);
  if (top == 0) return 0.0f;
  top = top > kLeastTop ? top : kLeastTop;
  const double scale = two_to(kFractionBits + 254 - top);
  int64_t sum = int64_t(double(total) * scale);
  for (int k = 0; k < kStep; ++k) sum += int64_t(double(x[k]) * double(bf16_to_float(w[k * stride])) * scale);
  return cut(double(sum) * two_to(top - 254 - kFractionBits)) + 0.0f;  // what is cut to zero has no sign
}

// The left operand of products: bf16 values, their exponents, and the largest exponent of each step.
struct Operand {
  float* x;            // [rows][stride], zeros behind the last column
  int16_t *exponents;  // the same
  int16_t* tops;       // [rows][stride / 16]
  int stride;

  float* row(int r) const { return x + size_t(r) * stride; }

  // The row holds `width` values that were rounded.
  void finish(int r, int width) const {
    float* values = row(r);
    for (int i = width; i < round_to_steps(width); ++i) values[i] = 0.0f;
    int16_t* e = exponents + size_t(r) * stride;
    for (int i = 0; i < round_to_steps(width); ++i) {
      const int16_t stored = int16_t((bits_of(values[i]) >> 23) & 255);
      const int16_t finite = stored ? stored : int16_t(1);
      e[i] = values[i] == 0.0f ? kNone : stored == 255 ? kNotFinite : finite;
    }
    for (int i = 0; i < round_to_steps(width); i += kStep) {
      int16_t top = kNone;
      for (int k = 0; k < kStep; ++k) top = e[i + k] > top ? e[i + k] : top;
      tops[(size_t(r) * stride + i) / kStep] = top;
    }
  }

  static int round_to_steps(int n) { return (n + kStep - 1) / kStep * kStep; }
  static size_t nbytes(size_t rows, int stride) { return rows * stride * 6 + rows * (stride / kStep) * 2; }
};

// One step of R rows and sixteen outputs: sums[r] moves on. Weights of one k lie side by side, those of the next a stride on.
template <int R>
static inline void step(const uint16_t* w, int64_t stride, const float* const* x, const int16_t* const* exponents,
                        const int16_t* tops, WideFloat (*sums)[kPieces]) {
  int16_t largest[R][kLanes];
  for (int lane = 0; lane < kLanes; lane += kShorts / 2) {
    Shorts found[R];
    for (int r = 0; r < R; ++r) found[r] = Shorts{} + kNone;
    for (int k = 0; k < kStep; ++k) {
      const Shorts of_weights = (load_as<Shorts>(w + k * stride + lane) >> 7) & int16_t(255);
      for (int r = 0; r < R; ++r) {
        const Shorts e = of_weights + exponents[r][k];
        found[r] = found[r] > e ? found[r] : e;
      }
    }
    for (int r = 0; r < R; ++r) std::memcpy(largest[r] + lane, &found[r], kShorts);
  }
  for (int piece = 0; piece < kPieces; ++piece) {
    WideInt top[R], odd[R];
    WideWord total[R];  // may overflow where it is odd
    WideFloat scale[R];
    for (int r = 0; r < R; ++r) {
      const WideInt of_products = __builtin_convertvector(load_as<WideShort>(largest[r] + piece * kWide), WideInt);
      const WideInt of_sum = (((WideInt)sums[r][piece] >> 23) & 255) + 127;
      top[r] = of_products > of_sum ? of_products : of_sum;
      // Not above the row's own exponents: weights are zeros or subnormal, and their stored exponents are not theirs.
      odd[r] = (top[r] < kLeast) | (top[r] > kMost) | (of_products <= int32_t(tops[r]));
      scale[r] = power(kFractionBits + 254 + 127 - top[r]);
      total[r] = WideWord{};
    }
    for (int k = 0; k < kStep; ++k) {
      const WideFloat weights = wide_bf16(w + k * stride + piece * kWide);
      for (int r = 0; r < R; ++r) total[r] += (WideWord)to_ints((weights * x[r][k]) * scale[r]);
    }
    for (int r = 0; r < R; ++r) {
      odd[r] |= (WideInt)(total[r] ^ (total[r] << 1)) < 0;  // too large to add one more term
      const WideInt whole = (WideInt)(total[r] + (WideWord)to_ints(sums[r][piece] * scale[r]));
      const WideFloat nearest = __builtin_convertvector(whole, WideFloat);
      const WideInt is_above = magnitude(to_ints(nearest)) > magnitude(whole);
      const WideFloat towards_zero = (WideFloat)((WideWord)nearest + (WideWord)is_above);  // -1 where it is
      WideFloat found = towards_zero * power(top[r] - 254 - kFractionBits + 127);
      if (any(odd[r]))
        for (int l = 0; l < kWide; ++l)
          if (odd[r][l]) found[l] = exact_step(w + piece * kWide + l, stride, x[r], sums[r][piece][l]);
      sums[r][piece] = found;
    }
  }
}

#if defined(__clang__)
#define VS_ONE_COPY __attribute__((noinline))
#else
#define VS_ONE_COPY __attribute__((noinline, noclone))  // it is long, and takes the compiler seconds
#endif

// The chain of rows [row, row + R) over columns [first, end), from the given sums. `w` is at the first column.
template <int R>
VS_ONE_COPY static void chain_rows(const uint16_t* w, int64_t stride, const Operand& in, int row, int first, int end,
                       float (*sums)[kLanes]) {
  WideFloat acc[R][kPieces];
  std::memcpy(acc, sums, sizeof acc);
  for (int at = first; at < end; at += kStep, w += kStep * stride) {
    const float* x[R];
    const int16_t* exponents[R];
    int16_t tops[R];
    for (int r = 0; r < R; ++r) {
      const size_t place = size_t(row + r) * in.stride + at;
      x[r] = in.x + place, exponents[r] = in.exponents + place, tops[r] = in.tops[place / kStep];
    }
    if (at + kStep <= end) {
      step<R>(w, stride, x, exponents, tops, acc);
    } else {
      uint16_t last[kStep * kLanes] = {0};
      for (int k = 0; k < end - at; ++k) std::memcpy(last + k * kLanes, w + k * stride, 2 * kLanes);
      step<R>(last, kLanes, x, exponents, tops, acc);
    }
  }
  std::memcpy(sums, acc, sizeof acc);
}

static void chain(int num_rows, const uint16_t* w, int64_t stride, const Operand& in, int row, int first, int end,
                  float (*sums)[kLanes]) {
  switch (num_rows) {
    case 1: return chain_rows<1>(w, stride, in, row, first, end, sums);
    case 2: return chain_rows<2>(w, stride, in, row, first, end, sums);
    case 3:
      chain_rows<1>(w, stride, in, row + 2, first, end, sums + 2);
      return chain_rows<2>(w, stride, in, row, first, end, sums);
    default: return chain_rows<4>(w, stride, in, row, first, end, sums);
  }
}

// ---- linear layers ----

// Into how many parts K is cut: by the sizes of the layer alone.
static int num_parts(int num_out, int num_in) {
  const int64_t wanted = 2 * num_in < kEnoughWork ? 2 * num_in : kEnoughWork;
  int largest = 1;
  for (int s = 1; s <= kMaxParts; ++s) {
    if (num_in % (kTile * s)) continue;
    if (int64_t(s) * num_out >= wanted) return s;
    largest = s;
  }
  return largest;
}

// Sixteen outputs of up to kRows rows: one chain per part, and their tree.
static void product_tile(const Matrix& m, int tile, const Operand& in, int row, int num_rows, int parts,
                         float (*y)[kLanes]) {
  const uint16_t* w = static_cast<const uint16_t*>(m.data) + size_t(tile) * m.num_in * kLanes;
  const int size = m.num_in / parts;
  float p[kMaxParts][kRows][kLanes];
  std::memset(p, 0, sizeof p);
  for (int i = 0; i < parts; ++i)
    chain(num_rows, w + size_t(i) * size * kLanes, kLanes, in, row, i * size, (i + 1) * size, p[i]);
  for (int r = 0; r < num_rows; ++r)
    for (int l = 0; l < kLanes; ++l) {
      const float low = parts > 1 ? p[0][r][l] + p[1][r][l] : p[0][r][l];
      y[r][l] = parts < 3 ? low : low + (parts == 3 ? p[2][r][l] : p[2][r][l] + p[3][r][l]);
    }
}

// Some matrices with one left operand, in one phase. keep(row, matrix, output, y) takes each result.
template <int Count, class Keep>
static void multiply(Crew& crew, const Matrix* const (&matrices)[Count], const Operand& in, int num_rows, int parts,
                     const Keep& keep) {
  int tiles[Count], total = 0;
  for (int i = 0; i < Count; ++i) total += tiles[i] = (matrices[i]->num_out + kLanes - 1) / kLanes;
  run(crew, total, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      int which = 0, tile = int(item);
      while (tile >= tiles[which]) tile -= tiles[which++];
      const int left = matrices[which]->num_out - tile * kLanes, count = left < kLanes ? left : kLanes;
      for (int row = 0; row < num_rows; row += kRows) {
        const int rows = num_rows - row < kRows ? num_rows - row : kRows;
        float y[kRows][kLanes];
        product_tile(*matrices[which], tile, in, row, rows, parts, y);
        for (int r = 0; r < rows; ++r)
          for (int l = 0; l < count; ++l) keep(row + r, which, tile * kLanes + l, y[r][l]);
      }
    }
  });
}

// ---- what stands between products ----

static inline float exp2_f32(float x) {  // 0 below -126, 2^126 above 126; NaN stays NaN
  const float low = x < -126.0f ? -126.0f : x, c = low > 126.0f ? 126.0f : low;
  const float shifted = c + 12582912.0f, f = c - (shifted - 12582912.0f);
  float p = 1.3264726149e-3f;
  p = __builtin_fmaf(p, f, 9.6715129912e-3f);
  p = __builtin_fmaf(p, f, 5.5507335812e-2f);
  p = __builtin_fmaf(p, f, 2.4022242427e-1f);
  p = __builtin_fmaf(p, f, 6.9314700365e-1f);
  p = __builtin_fmaf(p, f, 1.0f);
  const float y = p * of_bits((bits_of(shifted) - 0x4B400000u + 127u) << 23);
  return x < -126.0f ? 0.0f : y;
}

static inline float silu(float g) { return g / (1.0f + exp2_f32(g * -1.44269504f)); }

static inline float gelu(float g) {  // the tanh form: g / (1 + e^(-2 u)), u = sqrt(2 / pi) (g + 0.044715 g^3)
  return g / (1.0f + exp2_f32(g * __builtin_fmaf(g * g, -0.10294324f, -2.3022082f)));
}

static inline float activated(int activation, float g) { return activation == kGeluTanh ? gelu(g) : silu(g); }

// Squares of the row added as a tree of neighbours, then 1 / sqrt(sum / width + eps). `scratch` has room for the row.
static float norm_factor(const float* x, int width, float eps, float* scratch) {
  for (int i = 0; i < width; ++i) scratch[i] = x[i] * x[i];
  for (int n = width; n > 1; n = (n + 1) / 2) {
    for (int i = 0; i < n / 2; ++i) scratch[i] = scratch[2 * i] + scratch[2 * i + 1];
    if (n % 2) scratch[n / 2] = scratch[n - 1];
  }
  return 1.0f / __builtin_sqrtf(__builtin_fmaf(scratch[0], 1.0f / float(width), eps));
}

struct Buffers {
  Operand in;          // of the product that comes next
  float* factors;      // [rows] of the last norm
  float* y;            // [rows][max(qkv, 2 mlp, hidden)]
  char* own;           // [threads][own_nbytes]
  size_t own_nbytes;
};

static int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// What attention needs for one row and K/V head; the values' last sixteen columns are ones, whose sum is that of the weights.
struct Attention {
  Operand q, p;        // [group][head_dim], [group][64]
  uint16_t *k, *v;     // [head_dim][64], [64][width]
  float *scores;       // [group][64]
  float *state, *span; // [group][width]
  float *state_top, *span_top;  // [group]
  int width;
};

static size_t carve(const Model& model, int num_rows, int num_threads, char* base, Buffers* b) {
  size_t offset = 0;
  auto take = [&](size_t nbytes) {
    char* p = base + offset;
    offset += (nbytes + 63) / 64 * 64;
    return p;
  };
  const int wide = model.num_heads * model.head_dim, qkv = wide + 2 * model.num_kv_heads * model.head_dim;
  int most = model.hidden > model.mlp ? model.hidden : model.mlp;
  most = round_up(wide > most ? wide : most, kStep);
  const size_t rows = size_t(num_rows), group = size_t(model.num_heads / model.num_kv_heads);
  const int d = round_up(model.head_dim, kStep);
  b->in.stride = most;
  b->in.x = reinterpret_cast<float*>(take(rows * most * 4));
  b->in.exponents = reinterpret_cast<int16_t*>(take(rows * most * 2));
  b->in.tops = reinterpret_cast<int16_t*>(take(rows * (most / kStep) * 2));
  b->factors = reinterpret_cast<float*>(take(rows * 4));
  int outputs = qkv > 2 * model.mlp ? qkv : 2 * model.mlp;
  outputs = model.hidden > outputs ? model.hidden : outputs;
  b->y = reinterpret_cast<float*>(take(rows * size_t(outputs) * 4));
  const size_t attention = Operand::nbytes(group, d) + Operand::nbytes(group, kTile) + size_t(d) * kTile * 2 +
                           size_t(d + kLanes) * kTile * 2 + group * (kTile + 2 * size_t(d + kLanes) + 2) * 4;
  b->own_nbytes = round_up(int(attention > size_t(most) * 4 ? attention : size_t(most) * 4) + 1024, 64);
  b->own = take(size_t(num_threads) * b->own_nbytes);
  return offset;
}

static Attention attention_buffers(const Model& model, char* base) {
  auto take = [&](size_t nbytes) {
    char* p = base;
    base += (nbytes + 63) / 64 * 64;
    return p;
  };
  auto operand = [&](size_t rows, int stride) {
    Operand o;
    o.x = reinterpret_cast<float*>(take(rows * stride * 4)), o.stride = stride;
    o.exponents = reinterpret_cast<int16_t*>(take(rows * stride * 2));
    o.tops = reinterpret_cast<int16_t*>(take(rows * (stride / kStep) * 2));
    return o;
  };
  const size_t group = size_t(model.num_heads / model.num_kv_heads);
  const int d = round_up(model.head_dim, kStep);
  Attention a;
  a.width = d + kLanes;
  a.q = operand(group, d), a.p = operand(group, kTile);
  a.k = reinterpret_cast<uint16_t*>(take(size_t(d) * kTile * 2));
  a.v = reinterpret_cast<uint16_t*>(take(size_t(a.width) * kTile * 2));
  a.scores = reinterpret_cast<float*>(take(group * kTile * 4));
  a.state = reinterpret_cast<float*>(take(group * a.width * 4));
  a.span = reinterpret_cast<float*>(take(group * a.width * 4));
  a.state_top = reinterpret_cast<float*>(take(group * 4));
  a.span_top = reinterpret_cast<float*>(take(group * 4));
  return a;
}

// The norm's factor of each row, and bf16(x g) as the next operand.
static void prepare(Crew& crew, const float* x, const float* gain, int width, float eps, int num_rows, const Buffers& b) {
  run(crew, num_rows, [&](int64_t begin, int64_t end) {
    float* scratch = reinterpret_cast<float*>(b.own + crew.tid * b.own_nbytes);
    for (int row = int(begin); row < end; ++row) {
      const float* from = x + size_t(row) * width;
      float* to = b.in.row(row);
      b.factors[row] = norm_factor(from, width, eps, scratch);
      for (int i = 0; i < width; ++i) to[i] = rounded(from[i] * gain[i]);
      b.in.finish(row, width);
    }
  });
}

static void norm_head(float* v, const float* gain, int d, float eps, float* scratch) {
  const float factor = norm_factor(v, d, eps, scratch);
  for (int i = 0; i < d; ++i) v[i] = (v[i] * factor) * gain[i];
}

static void rotate(float* v, const float* cos_sin, int d) {
  const float *cos = cos_sin, *sin = cos_sin + d / 2;
  for (int i = 0; i < d / 2; ++i) {
    const float first = v[i], second = v[i + d / 2];
    v[i] = __builtin_fmaf(-second, sin[i], first * cos[i]);
    v[i + d / 2] = __builtin_fmaf(first, sin[i], second * cos[i]);
  }
}

// The norm's factor, bias, q/k norm, RoPE and the rounding; K and V go to their slot. Where one of these is not finite, K is
// NaN and V zero: rows that see the slot become NaN, and those that share a tile with it do not.
static void finish_qkv(const Model& model, const Layer& layer, const Rows& rows, const Store& kv, int index, int row,
                       float factor, float* qkv, float* scratch) {
  const int d = model.head_dim, num_q = model.num_heads, num_kv = model.num_kv_heads;
  const int num_values = (num_q + 2 * num_kv) * d;
  for (int i = 0; i < num_values; ++i) qkv[i] *= factor;
  for (int i = 0; layer.qkv_bias && i < num_values; ++i) qkv[i] += layer.qkv_bias[i];
  for (int h = 0; h < num_q + num_kv; ++h) {
    const float* gain = h < num_q ? layer.q_norm : layer.k_norm;
    if (gain) norm_head(qkv + h * d, gain, d, model.norm_eps, scratch);
    rotate(qkv + h * d, layer.cos_sin + size_t(rows.positions[row]) * d, d);
  }
  for (int i = 0; i < num_values; ++i) qkv[i] = rounded(qkv[i]);
  bool is_finite = true;
  for (int i = num_q * d; i < num_values; ++i) is_finite = is_finite && qkv[i] - qkv[i] == 0.0f;
  const int stride = round_up(d, kLanes);
  for (int h = 0; h < num_kv; ++h) {
    const size_t at = ((size_t(index) * kv.slots_per_layer + rows.slots[row]) * num_kv + h) * stride;
    for (int i = 0; i < d; ++i) {
      static_cast<uint16_t*>(kv.k)[at + i] = is_finite ? bf16_bits(qkv[(num_q + h) * d + i]) : uint16_t(0x7fc0);
      static_cast<uint16_t*>(kv.v)[at + i] = is_finite ? bf16_bits(qkv[(num_q + num_kv + h) * d + i]) : uint16_t(0);
    }
  }
}

// ---- attention ----

// K and V of positions [first, first + count) beside each other. False if one that the row sees is NaN.
static bool gather(const Model& model, const Rows& rows, const Store& kv, int index, int row, int kv_head, int first,
                   int count, int first_seen, const Attention& a) {
  const int d = model.head_dim, stride = round_up(d, kLanes), prefix_len = rows.prefix_lens[row];
  const int32_t* table = rows.table + size_t(rows.seq_rows[row]) * rows.table_width;
  const int32_t* tail = rows.tails + size_t(row) * rows.tail_width;
  bool is_sound = true;
  for (int j = 0; j < kTile; ++j) {
    // Behind the context's end K may be anything finite: the scores are not looked at. V is not read: weights are zero.
    const int position = first + (j < count ? j : count - 1);
    const int32_t slot = position < prefix_len ? table[position] : tail[position - prefix_len];
    const size_t at = ((size_t(index) * kv.slots_per_layer + slot) * model.num_kv_heads + kv_head) * stride;
    const uint16_t *k = static_cast<const uint16_t*>(kv.k) + at, *v = static_cast<const uint16_t*>(kv.v) + at;
    const bool is_nan = (k[0] & 0x7f80) == 0x7f80;
    is_sound = is_sound && !(is_nan && position >= first_seen);
    for (int i = 0; i < stride; ++i) a.k[i * kTile + j] = is_nan ? uint16_t(0) : k[i];
    std::memcpy(a.v + j * a.width, v, size_t(stride) * 2);
  }
  return is_sound;
}

static inline float largest_of(float a, float b) { return b > a || b != b ? b : a; }  // NaN, if there is one

// One tile of one head, whose scores are known: weights into `p`, and by how much the sums so far are to be scaled.
static float weigh(const float* scores, int first_seen, int count, float* top, float* p) {
  float following = *top;
  for (int j = first_seen; j < count; ++j) following = largest_of(following, scores[j]);
  const bool is_empty = following == -__builtin_inff();
  for (int j = 0; j < kTile; ++j)
    p[j] = j >= first_seen && j < count && !is_empty ? rounded(exp2_f32(scores[j] - following)) : 0.0f;
  const float decay = is_empty ? 1.0f : exp2_f32(*top - following);
  *top = following;
  return decay;
}

// A tile of all heads of the group; `tops` and `sums` move on. first_seen and count are within the tile.
static void add_tile(int group, int d, int first_seen, int count, float scale, const Attention& a) {
  for (int h = 0; h < group; h += kRows) {
    const int heads = group - h < kRows ? group - h : kRows;
    for (int lane = 0; lane < kTile; lane += kLanes) {
      float sums[kRows][kLanes] = {{0.0f}};
      chain(heads, a.k + lane, kTile, a.q, h, 0, round_up(d, kStep), sums);
      for (int r = 0; r < heads; ++r)
        for (int l = 0; l < kLanes; ++l) a.scores[(h + r) * kTile + lane + l] = sums[r][l] * scale;
    }
    float decay[kRows];
    for (int r = 0; r < heads; ++r) {
      decay[r] = weigh(a.scores + (h + r) * kTile, first_seen, count, a.span_top + h + r, a.p.row(h + r));
      a.p.finish(h + r, kTile);
    }
    for (int lane = 0; lane < a.width; lane += kLanes) {
      float sums[kRows][kLanes];
      for (int r = 0; r < heads; ++r)
        for (int l = 0; l < kLanes; ++l) sums[r][l] = a.span[(h + r) * a.width + lane + l] * decay[r];
      chain(heads, a.v + lane, a.width, a.p, h, 0, kTile, sums);
      for (int r = 0; r < heads; ++r) std::memcpy(a.span + (h + r) * a.width + lane, sums[r], sizeof sums[r]);
    }
  }
}

// The span's sums join those of the spans before it.
static void merge(int group, const Attention& a) {
  for (int h = 0; h < group; ++h) {
    float *state = a.state + h * a.width, *span = a.span + h * a.width;
    if (a.span_top[h] == -__builtin_inff()) continue;
    if (a.state_top[h] == -__builtin_inff()) {
      std::memcpy(state, span, size_t(a.width) * 4);
      a.state_top[h] = a.span_top[h];
      continue;
    }
    const float top = largest_of(a.state_top[h], a.span_top[h]);
    const float by = exp2_f32(a.state_top[h] - top), by_span = exp2_f32(a.span_top[h] - top);
    for (int i = 0; i < a.width; ++i) state[i] = state[i] * by + span[i] * by_span;
    a.state_top[h] = top;
  }
}

static void clear(int group, int width, float* sums, float* tops) {
  std::memset(sums, 0, size_t(group) * width * 4);
  for (int h = 0; h < group; ++h) tops[h] = -__builtin_inff();
}

static void attend_group(const Model& model, const Rows& rows, const Store& kv, int index, int row, int kv_head,
                         const float* q, float* out, const Attention& a) {
  const int d = model.head_dim, group = model.num_heads / model.num_kv_heads;
  const int num_context = rows.prefix_lens[row] + rows.tail_lens[row], window = model.layers[index].window;
  const int first_seen = window && num_context > window ? num_context - window : 0;
  const float scale = float(1.4426950408889634 / __builtin_sqrt(double(model.layers[index].query_scalar)));
  for (int h = 0; h < group; ++h) {
    for (int i = 0; i < d; ++i) a.q.row(h)[i] = rounded(q[h * d + i]);
    a.q.finish(h, d);
  }
  for (int j = 0; j < kTile; ++j)
    for (int l = 0; l < kLanes; ++l) a.v[j * a.width + a.width - kLanes + l] = 0x3f80;  // ones
  clear(group, a.width, a.state, a.state_top);
  bool is_sound = true;
  const int first_tile = first_seen / kTile * kTile;
  for (int begin = first_tile / kSpan * kSpan; begin < num_context; begin += kSpan) {
    clear(group, a.width, a.span, a.span_top);
    for (int tile = begin < first_tile ? first_tile : begin; tile < num_context && tile < begin + kSpan; tile += kTile) {
      const int count = num_context - tile < kTile ? num_context - tile : kTile;
      is_sound = gather(model, rows, kv, index, row, kv_head, tile, count, first_seen, a) && is_sound;
      add_tile(group, d, first_seen > tile ? first_seen - tile : 0, count, scale, a);
    }
    merge(group, a);
  }
  for (int h = 0; h < group; ++h) {
    const float* sums = a.state + h * a.width;
    for (int i = 0; i < d; ++i) {
      const float found = rounded(sums[i] / sums[a.width - kLanes]);
      out[h * d + i] = is_sound ? found : __builtin_nanf("");
    }
  }
}

static void attend(Crew& crew, const Model& model, const Rows& rows, const Store& kv, int layer, const float* q,
                   int q_stride, float* out, int out_stride, const Buffers& b) {
  const int d = model.head_dim, group = model.num_heads / model.num_kv_heads;
  run(crew, int64_t(rows.num_rows) * model.num_kv_heads, [&](int64_t begin, int64_t end) {
    const Attention a = attention_buffers(model, b.own + crew.tid * b.own_nbytes);
    for (int64_t task = begin; task < end; ++task) {
      const int row = int(task / model.num_kv_heads), kv_head = int(task % model.num_kv_heads);
      const size_t at = size_t(kv_head) * group * d;
      attend_group(model, rows, kv, layer, row, kv_head, q + size_t(row) * q_stride + at,
                   out + size_t(row) * out_stride + at, a);
    }
  });
}

// ---- the pass ----

static int num_phases(const Model& model) { return 1 + 12 * model.num_layers; }

static size_t scratch_nbytes(const Model& model, int num_rows, int num_threads, int) {
  Buffers b;
  return carve(model, num_rows, num_threads, nullptr, &b);
}

// x += the product, by way of a norm where the model has one behind its layers.
static void add_product(Crew& crew, const Model& model, const Matrix& w, const float* post_norm, int M, float* x,
                        const Buffers& b) {
  const int D = model.hidden, parts = num_parts(D, w.num_in);
  if (!post_norm)
    return multiply(crew, {&w}, b.in, M, parts, [&](int row, int, int i, float y) {
      float& value = x[size_t(row) * D + i];
      value = rounded(value + rounded(y));
    });
  multiply(crew, {&w}, b.in, M, parts, [&](int row, int, int i, float y) { b.y[size_t(row) * D + i] = rounded(y); });
  run(crew, M, [&](int64_t begin, int64_t end) {
    float* scratch = reinterpret_cast<float*>(b.own + crew.tid * b.own_nbytes);
    for (int64_t row = begin; row < end; ++row) {
      const float* y = b.y + size_t(row) * D;
      const float factor = norm_factor(y, D, model.norm_eps, scratch);
      float* to = x + size_t(row) * D;
      for (int i = 0; i < D; ++i) to[i] = rounded(to[i] + (y[i] * factor) * post_norm[i]);
    }
  });
}

static void add_attention(Crew& crew, const Model& model, const Rows& rows, const Store& kv, int index, float* x,
                          const Buffers& b) {
  const Layer& layer = model.layers[index];
  const int M = rows.num_rows, D = model.hidden, wide = model.num_heads * model.head_dim;
  const int qkv = wide + 2 * model.num_kv_heads * model.head_dim, firsts[] = {0, wide, wide + layer.k.num_out};
  prepare(crew, x, layer.attn_norm, D, model.norm_eps, M, b);
  multiply(crew, {&layer.q, &layer.k, &layer.v}, b.in, M, num_parts(qkv, D), [&](int row, int which, int i, float y) {
    b.y[size_t(row) * qkv + firsts[which] + i] = rounded(y);
  });
  run(crew, M, [&](int64_t begin, int64_t end) {
    float* scratch = reinterpret_cast<float*>(b.own + crew.tid * b.own_nbytes);
    for (int row = int(begin); row < end; ++row)
      finish_qkv(model, layer, rows, kv, index, row, b.factors[row], b.y + size_t(row) * qkv, scratch);
  });
  attend(crew, model, rows, kv, index, b.y, qkv, b.in.x, b.in.stride, b);
  run(crew, M, [&](int64_t begin, int64_t end) {
    for (int row = int(begin); row < end; ++row) b.in.finish(row, wide);
  });
  add_product(crew, model, layer.o, layer.attn_post_norm, M, x, b);
}

static void add_mlp(Crew& crew, const Model& model, const Rows& rows, int index, float* x, const Buffers& b) {
  const Layer& layer = model.layers[index];
  const int M = rows.num_rows, D = model.hidden, F = model.mlp;
  prepare(crew, x, layer.mlp_norm, D, model.norm_eps, M, b);
  multiply(crew, {&layer.gate, &layer.up}, b.in, M, num_parts(2 * F, D), [&](int row, int which, int i, float y) {
    b.y[size_t(row) * 2 * F + size_t(which) * F + i] = rounded(y);
  });
  run(crew, M, [&](int64_t begin, int64_t end) {
    for (int row = int(begin); row < end; ++row) {
      const float *gate = b.y + size_t(row) * 2 * F, *up = gate + F, s = b.factors[row];
      float* h = b.in.row(row);
      for (int i = 0; i < F; ++i) h[i] = rounded(activated(layer.activation, gate[i] * s) * (up[i] * s));
      b.in.finish(row, F);
    }
  });
  add_product(crew, model, layer.down, layer.mlp_post_norm, M, x, b);
}

static void forward(Crew crew, const Model& model, const Rows& rows, const Store& kv, const uint8_t* skip_attention,
                    const uint8_t* skip_mlp, float* x, int first, int end, void* scratch) {
  Buffers b;
  carve(model, rows.num_rows, crew.num_threads, static_cast<char*>(scratch), &b);
  const int D = model.hidden;
  run(crew, rows.num_rows, [&](int64_t from, int64_t to) {
    const uint16_t* embed = static_cast<const uint16_t*>(model.embed.data);
    for (int64_t row = from; row < to; ++row) {
      const int32_t id = rows.token_ids[row];
      const uint16_t* column = embed + size_t(id / kLanes) * D * kLanes + id % kLanes;
      float* y = x + size_t(row) * D;
      for (int i = 0; i < D; ++i)
        y[i] = rounded(first < 0 ? bf16_to_float(column[size_t(i) * kLanes]) * model.embed_scale : y[i]);
    }
  });
  for (int i = first < 0 ? 0 : first; i < end; ++i) {
    if (!skip_attention[i]) add_attention(crew, model, rows, kv, i, x, b);
    if (!skip_mlp[i]) add_mlp(crew, model, rows, i, x, b);
  }
}

static void logits(Crew crew, const Model& model, const float* x, int num_rows, float* y, Totals* totals, void* scratch) {
  Buffers b;
  carve(model, num_rows, crew.num_threads, static_cast<char*>(scratch), &b);
  prepare(crew, x, model.final_norm, model.hidden, model.norm_eps, num_rows, b);
  multiply(crew, {&model.head}, b.in, num_rows, 1, [&](int row, int, int i, float found) {
    y[size_t(row) * model.vocab + i] = found * b.factors[row];
  });
  VS_TABLE(VS_ISA).totals(crew, y, num_rows, model.vocab, totals);
}

static void linear(Crew crew, const Matrix& m, const float* x, int num_rows, float* y, void* scratch) {
  Model sizes = {};
  sizes.hidden = m.num_in, sizes.num_heads = 1, sizes.num_kv_heads = 1, sizes.head_dim = 1;
  Buffers b;
  carve(sizes, num_rows, crew.num_threads, static_cast<char*>(scratch), &b);
  run(crew, num_rows, [&](int64_t begin, int64_t end) {
    for (int row = int(begin); row < end; ++row) {
      for (int i = 0; i < m.num_in; ++i) b.in.row(row)[i] = rounded(x[size_t(row) * m.num_in + i]);
      b.in.finish(row, m.num_in);
    }
  });
  multiply(crew, {&m}, b.in, num_rows, num_parts(m.num_out, m.num_in), [&](int row, int, int i, float found) {
    y[size_t(row) * m.num_out + i] = found;
  });
}

static void activate(Crew crew, int activation, const float* gate_up, int num_rows, int mlp, float* y) {
  run(crew, num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* gate = gate_up + size_t(r) * 2 * mlp;
      for (int i = 0; i < mlp; ++i) y[size_t(r) * mlp + i] = rounded(activated(activation, gate[i]) * gate[mlp + i]);
    }
  });
}

static void attend_rows(Crew crew, const Model& model, const Rows& rows, const Store& kv, int layer, const float* q,
                        float* out, void* scratch) {
  Buffers b;
  carve(model, rows.num_rows, crew.num_threads, static_cast<char*>(scratch), &b);
  const int width = model.num_heads * model.head_dim;
  attend(crew, model, rows, kv, layer, q, width, out, width, b);
}

}  // namespace

extern const Arithmetic VS_HOPPER(VS_ISA);
const Arithmetic VS_HOPPER(VS_ISA) = {num_phases, scratch_nbytes, forward, logits, linear, activate, attend_rows};

}  // namespace vs
