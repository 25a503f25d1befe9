// Weights from the blocks of model files into the layouts of api.h, sixteen rows at a time. Bytes are moved and scales
// multiplied out, which is exact; nothing is rounded, except where weights are quantised on request. Compiled once, for
// every CPU alike.
#include "pack.h"

#include "crew.h"
#include "simd.h"

namespace vs {
namespace {

static uint16_t half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

static float float_of_half_at(const uint8_t* p) { return half_to_float(half_at(p)); }

static bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }
static bool is_finite(float x) { return x - x == 0.0f; }

// One block of a file, read for one row: `kSubs` blocks of 32 values, each `kWidth` bytes (16 for 4-bit values: value i
// low, value i + 16 high) with `kNumScales` scales (the second one is a minimum, or the scale of the second half).
template <int Nbytes, int Subs, int Width, class S, int NumScales>
struct Blocks {
  static constexpr int kNbytes = Nbytes, kSubs = Subs, kWidth = Width, kNumScales = NumScales;
  using Scale = S;
  uint8_t values[Subs][Width];
  Scale scales[Subs][NumScales];
};

struct Q4_0 : Blocks<18, 1, 16, uint16_t, 1> {
  void read(const uint8_t* p) {
    scales[0][0] = half_at(p);
    std::memcpy(values[0], p + 2, 16);
  }
};

struct Q4_1 : Blocks<20, 1, 16, uint16_t, 2> {
  void read(const uint8_t* p) {
    scales[0][0] = half_at(p);
    scales[0][1] = half_at(p + 2);
    std::memcpy(values[0], p + 4, 16);
  }
};

struct Q8_0 : Blocks<34, 1, 32, uint16_t, 1> {
  void read(const uint8_t* p) {
    scales[0][0] = half_at(p);
    std::memcpy(values[0], p + 2, 32);
  }
};

// Values of five bits: the low four in halves of bytes, the fifth in one word of bits.
static void read_fives(const uint8_t* high, const uint8_t* low, int offset, uint8_t* values) {
  uint32_t bits;
  std::memcpy(&bits, high, 4);
  for (int i = 0; i < kBlock; ++i) {
    const int nibble = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
    values[i] = uint8_t((nibble | int(bits >> i & 1) << 4) - offset);
  }
}

struct Q5_0 : Blocks<22, 1, 32, uint16_t, 1> {
  void read(const uint8_t* p) {
    scales[0][0] = half_at(p);
    read_fives(p + 2, p + 6, 16, values[0]);
  }
};

struct Q5_1 : Blocks<24, 1, 32, float, 2> {
  void read(const uint8_t* p) {
    scales[0][0] = float_of_half_at(p);
    scales[0][1] = float_of_half_at(p + 2);
    read_fives(p + 4, p + 8, 0, values[0]);
  }
};

// Scales and minima of the eight sub-blocks of a Q4_K or Q5_K block: 6 bits each in 12 bytes.
static void read_k_scales(const uint8_t* p, float (*scales)[2]) {
  const float d = float_of_half_at(p), dmin = float_of_half_at(p + 2);
  const uint8_t* packed = p + 4;
  for (int i = 0; i < 8; ++i) {
    const int j = i % 4;
    const int scale = i < 4 ? packed[j] & 63 : (packed[8 + j] & 15) | (packed[j] >> 6) << 4;
    const int minimum = i < 4 ? packed[4 + j] & 63 : (packed[8 + j] >> 4) | (packed[4 + j] >> 6) << 4;
    scales[i][0] = d * float(scale);  // 11 and 6 significant bits: exact
    scales[i][1] = -(dmin * float(minimum));
  }
}

struct Q4_K : Blocks<144, 8, 16, float, 2> {
  void read(const uint8_t* p) {
    read_k_scales(p, scales);
    const uint8_t* packed = p + 16;  // 64 values in 32 bytes: low halves, then high halves
    for (int pair = 0; pair < 4; ++pair, packed += 32)
      for (int i = 0; i < 16; ++i) {
        values[2 * pair][i] = uint8_t((packed[i] & 15) | (packed[i + 16] & 15) << 4);
        values[2 * pair + 1][i] = uint8_t(packed[i] >> 4 | (packed[i + 16] & 0xf0));
      }
  }
};

struct Q5_K : Blocks<176, 8, 32, float, 2> {
  void read(const uint8_t* p) {
    read_k_scales(p, scales);
    const uint8_t *high = p + 16, *packed = p + 48;
    for (int pair = 0; pair < 4; ++pair, packed += 32)
      for (int i = 0; i < kBlock; ++i) {
        values[2 * pair][i] = uint8_t((packed[i] & 15) | (high[i] >> 2 * pair & 1) << 4);
        values[2 * pair + 1][i] = uint8_t(packed[i] >> 4 | (high[i] >> (2 * pair + 1) & 1) << 4);
      }
  }
};

struct Q6_K : Blocks<210, 8, 32, float, 2> {
  void read(const uint8_t* p) {
    const float d = float_of_half_at(p + 208);
    for (int sub = 0; sub < 8; ++sub) {
      const int half = sub / 4, quarter = sub % 4;  // 128 values each, then 32
      const uint8_t *low = p + 64 * half + 32 * (quarter % 2), *high = p + 128 + 32 * half;
      const int low_shift = 4 * (quarter / 2), high_shift = 2 * quarter;
      for (int i = 0; i < kBlock; ++i)
        values[sub][i] = uint8_t(((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4) - 32);
      for (int i = 0; i < 2; ++i) scales[sub][i] = d * float(int8_t(p[192 + 2 * sub + i]));
    }
  }
};

static float element(const uint8_t* p, int type) {
  if (type == kStoredF32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  return type == kStoredF16 ? float_of_half_at(p) : bf16_to_float(half_at(p));
}

// Float weights as blocks of Q8_0: d = max|x| / 127 as float16, then x / d to the nearest.
template <int Type>
struct Quantised : Blocks<kBlock*(Type == kStoredF32 ? 4 : 2), 1, 32, uint16_t, 1> {
  void read(const uint8_t* p) {
    float x[kBlock], largest = 0.0f;
    bool finite = true;
    for (int i = 0; i < kBlock; ++i) {
      x[i] = element(p + i * (Type == kStoredF32 ? 4 : 2), Type);
      finite &= is_finite(x[i]);
      const float magnitude = x[i] < 0.0f ? -x[i] : x[i];
      largest = magnitude > largest ? magnitude : largest;
    }
    const uint16_t scale = finite ? float_to_half(largest / 127.0f) : 0x7e00;
    this->scales[0][0] = scale;
    const float d = half_to_float(scale), inverse = is_finite(scale) && d > 0.0f ? 1.0f / d : 0.0f;
    for (int i = 0; i < kBlock; ++i) {
      float y = x[i] * inverse;
      y = y > 127.0f ? 127.0f : y < -127.0f ? -127.0f : y;
      this->values[0][i] = uint8_t(int8_t((y + 12582912.0f) - 12582912.0f));
    }
  }
};

// Groups [begin, end) of sixteen rows; what stands behind the last row is zero. False if a scale is not finite.
template <class B>
static bool pack_blocks(const StoredMatrix& m, uint8_t* out, int64_t begin, int64_t end) {
  constexpr size_t scale_at = kLanes * B::kWidth, scale_nbytes = sizeof(typename B::Scale);
  constexpr size_t step = scale_at + kLanes * B::kNumScales * scale_nbytes;
  const int num_blocks = m.num_in / kBlock / B::kSubs;
  bool finite = true;
  out += size_t(begin) * num_blocks * B::kSubs * step;
  for (int64_t group = begin; group < end; ++group)
    for (int b = 0; b < num_blocks; ++b, out += B::kSubs * step)
      for (int lane = 0; lane < kLanes; ++lane) {
        B block = {};
        const int64_t row = group * kLanes + lane;
        if (row < m.num_out) block.read(m.rows + (size_t(row) * num_blocks + b) * B::kNbytes);
        for (int sub = 0; sub < B::kSubs; ++sub) {
          uint8_t* to = out + sub * step;
          for (int i = 0; i < B::kWidth / 4; ++i) std::memcpy(to + 64 * i + 4 * lane, block.values[sub] + 4 * i, 4);
          for (int i = 0; i < B::kNumScales; ++i) {
            finite &= is_finite(block.scales[sub][i]);
            std::memcpy(to + scale_at + (i * kLanes + lane) * scale_nbytes, &block.scales[sub][i], scale_nbytes);
          }
        }
      }
  return finite;
}

template <int Type>
static bool pack_floats(const StoredMatrix& m, uint8_t* out, int64_t begin, int64_t end) {
  constexpr size_t width = Type == kStoredF32 ? 4 : 2;
  bool finite = true;
  out += size_t(begin) * m.num_in * kLanes * width;
  for (int64_t group = begin; group < end; ++group)
    for (int k = 0; k < m.num_in; ++k)
      for (int lane = 0; lane < kLanes; ++lane, out += width) {
        const int64_t row = group * kLanes + lane;
        if (row >= m.num_out) {
          std::memset(out, 0, width);
          continue;
        }
        const uint8_t* from = m.rows + (size_t(row) * m.num_in + k) * width;
        std::memcpy(out, from, width);
        finite &= is_finite(element(from, Type));
      }
  return finite;
}

using Packer = bool (*)(const StoredMatrix&, uint8_t*, int64_t, int64_t);

static Packer packer_of(int type, bool quantises) {
  switch (type) {
    case kStoredF32: return quantises ? pack_blocks<Quantised<kStoredF32>> : pack_floats<kStoredF32>;
    case kStoredF16: return quantises ? pack_blocks<Quantised<kStoredF16>> : pack_floats<kStoredF16>;
    case kStoredBF16: return quantises ? pack_blocks<Quantised<kStoredBF16>> : pack_floats<kStoredBF16>;
    case kStoredQ4_0: return pack_blocks<Q4_0>;
    case kStoredQ4_1: return pack_blocks<Q4_1>;
    case kStoredQ5_0: return pack_blocks<Q5_0>;
    case kStoredQ5_1: return pack_blocks<Q5_1>;
    case kStoredQ8_0: return pack_blocks<Q8_0>;
    case kStoredQ4_K: return pack_blocks<Q4_K>;
    case kStoredQ5_K: return pack_blocks<Q5_K>;
    case kStoredQ6_K: return pack_blocks<Q6_K>;
  }
  return nullptr;
}

}  // namespace

void pack(Crew crew, const StoredMatrix& m, uint8_t* out, int32_t* num_bad) {
  const Packer packer = packer_of(m.type, m.quantises);
  run(crew, (m.num_out + kLanes - 1) / kLanes, [&](int64_t begin, int64_t end) {
    if (!packer || !packer(m, out, begin, end)) __atomic_fetch_add(num_bad, 1, __ATOMIC_RELAXED);
  });
}

}  // namespace vs
