// Logit processing and the draw, row by row: what verispec/sampling/draw.py does, without noise for the whole vocabulary in
// memory. Rows are shared out to threads; a row's result depends on that row alone.
#pragma once
#include "api.h"
#include "crew.h"
#include "maths.h"

namespace vs {

void sort_descending(float* values, int64_t count);                      // in api.cpp: compiled once, for every CPU
void select_descending(float* values, int64_t count, int64_t num_best);  // the best first, in order; the rest after them

namespace {

constexpr float kInfinity = __builtin_inff(), kNaN = __builtin_nanf("");

static inline bool is_finite(float x) { return x - x == 0.0f; }

// The largest value, +0 for a zero of either sign; NaN if there is one. By integers that are ordered as the floats are,
// because their maximum may be taken in any order.
static float largest_of(const float* x, int64_t count) {
  int32_t best = INT32_MIN, magnitude = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, 4);
    const int32_t absolute = bits & INT32_MAX, ordered = bits ^ ((bits >> 31) & INT32_MAX);
    best = ordered > best ? ordered : best;
    magnitude = absolute > magnitude ? absolute : magnitude;
  }
  if (magnitude > 0x7f800000) return kNaN;
  best ^= (best >> 31) & INT32_MAX;
  float largest;
  std::memcpy(&largest, &best, 4);
  return largest + 0.0f;
}

// The sum of the weights of x - top. x holds no NaN and nothing above top.
static int64_t sum_weights(const float* x, int64_t count, float top) {
  uint64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += whole_bits(scaled_exp(x[i] - top));
  return int64_t(total - uint64_t(count) * kWholeBits);
}

static float log_total(int64_t sum) { return log_f32(float(sum) * 0x1p-40f); }

static Totals totals_of(const float* logits, int vocab) {
  const float top = largest_of(logits, vocab);
  if (!is_finite(top)) return {kNaN, kNaN};
  return {top, log_total(sum_weights(logits, vocab, top))};
}

static inline float logprob(float logit, const Totals& totals) { return (logit - totals.top) - totals.log_total; }

static void totals(Crew crew, const float* logits, int num_rows, int vocab, Totals* out) {
  run(crew, num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) out[r] = totals_of(logits + size_t(r) * vocab, vocab);
  });
}

// The first index whose row is not below `row`; rows ascend.
static int32_t first_of(const int64_t* rows, int32_t count, int64_t row) {
  int32_t low = 0;
  for (int32_t high = count; low < high;) {
    const int32_t middle = low + (high - low) / 2;
    if (rows[middle] < row)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// The logits with penalties, bias, bans and mask of sampling row `row`: in `edited`, or as they are where there are none.
static const float* edit(const Sampling& s, int64_t row, const float* logits, int vocab, float* edited) {
  const int32_t penalties = first_of(s.penalty_rows, s.num_penalties, row);
  const int32_t bias = first_of(s.bias_rows, s.num_bias, row);
  const bool penalised = penalties < s.num_penalties && s.penalty_rows[penalties] == row;
  const bool biased = bias < s.num_bias && s.bias_rows[bias] == row;
  const bool masked = s.masks && s.masks[row];
  if (!penalised && !biased && !masked) return logits;
  std::memcpy(edited, logits, size_t(vocab) * 4);
  for (int32_t i = penalties; i < s.num_penalties && s.penalty_rows[i] == row; ++i) {
    float& value = edited[s.penalty_ids[i]];
    const float scaled = value > 0 ? value / s.repetition[i] : value * s.repetition[i];
    value = scaled - s.penalty[i];
  }
  for (int32_t i = bias; i < s.num_bias && s.bias_rows[i] == row; ++i) edited[s.bias_ids[i]] += s.bias[i];
  if (masked) {
    const uint32_t* allowed = s.allowed + size_t(s.masks[row]) * size_t(s.mask_words);
    for (int first = 0; first < vocab; first += 32) {
      const uint32_t word = allowed[first / 32];
      const int count = vocab - first < 32 ? vocab - first : 32;
      if (word == UINT32_MAX) continue;
      for (int i = 0; i < count; ++i) edited[first + i] -= word >> i & 1 ? 0.0f : kInfinity;
    }
  }
  return edited;
}

// All but the first `keep` of the order by (-z, id) become -infinity.
static void keep_best(float* z, int vocab, int64_t keep, float* spare) {
  std::memcpy(spare, z, size_t(vocab) * 4);
  select_descending(spare, vocab, keep);
  const float threshold = spare[keep - 1];
  int64_t room = keep;
  for (int i = 0; i < vocab; ++i) room -= z[i] > threshold;
  for (int i = 0; i < vocab; ++i) {
    if (z[i] > threshold) continue;
    if (z[i] == threshold && room > 0)
      --room;
    else
      z[i] = -kInfinity;
  }
}

// How many of the order by (-z, id) it takes until their weights reach top_p times those of all that are left.
static int64_t nucleus(const float* z, int vocab, int64_t keep, float top_p, float* spare) {
  const int64_t needed = int64_t(std::ceil(double(top_p) * double(sum_weights(z, vocab, 0.0f))));
  for (int64_t tried = keep < 64 ? keep : 64;; tried = tried * 8 < keep ? tried * 8 : keep) {
    std::memcpy(spare, z, size_t(vocab) * 4);
    select_descending(spare, vocab, tried);
    int64_t reached = 0;
    for (int64_t i = 0; i < tried; ++i)
      if ((reached += weight(spare[i])) >= needed) return i + 1;
    if (tried == keep) return keep;
  }
}

// z = (l - top) / T with filtered ids at -infinity, for T above 0.
static void scale_and_filter(const Sampling& s, int64_t row, const float* logits, float top, int vocab, float* z,
                             float* spare) {
  const float temperature = s.temperature[row];
  for (int i = 0; i < vocab; ++i) z[i] = (logits[i] - top) / temperature;
  int64_t keep = vocab;
  if (s.log_min_p[row] > -kInfinity) {
    keep = 0;
    for (int i = 0; i < vocab; ++i) keep += z[i] >= s.log_min_p[row];
  }
  if (s.top_k[row] && s.top_k[row] < keep) keep = s.top_k[row];
  if (keep < vocab) keep_best(z, vocab, keep, spare);
  if (s.top_p[row] < 1.0f) {
    const int64_t fewer = nucleus(z, vocab, keep, s.top_p[row], spare);
    if (fewer < keep) keep_best(z, vocab, fewer, spare);
  }
}

constexpr int kChunk = 64;

// The Gumbel noise of ids first .. first + 63 for one row.
static void chunk_noise(const Sampling& s, int64_t row, int first, float* noise) {
  const uint32_t k0 = uint32_t(s.seeds[row]), k1 = uint32_t(s.seeds[row] >> 32);
  const uint32_t t = uint32_t(s.t[row]), sample = uint32_t(s.sample_index[row]);
  const uint32_t stream = uint32_t(s.stream[row]);
  uint32_t words[4][kChunk / 4];
  for (int b = 0; b < kChunk / 4; ++b) {
    const Words w = philox(uint32_t(first / 4 + b), t, sample, stream, k0, k1);
    for (int i = 0; i < 4; ++i) words[i][b] = w.v[i];
  }
  for (int i = 0; i < 4; ++i)
    for (int b = 0; b < kChunk / 4; ++b) noise[4 * b + i] = gumbel_f32(words[i][b]);
}

static int64_t noisy_argmax(const Sampling& s, int64_t row, const float* z, int vocab) {
  int64_t best_id = -1;
  float best = -kInfinity, noise[kChunk];
  for (int first = 0; first < vocab; first += kChunk) {
    const int count = vocab - first < kChunk ? vocab - first : kChunk;
    // No noise is larger than kMaxGumbel: a chunk that cannot win needs none.
    if (largest_of(z + first, count) + kMaxGumbel <= best) continue;
    chunk_noise(s, row, first, noise);
    for (int i = 0; i < count; ++i) {
      const float value = z[first + i] + noise[i];
      if (value > best) best = value, best_id = first + i;
    }
  }
  return best_id;
}

// Whether nothing but its mask changes the logits of sampling row `row`.
static bool only_masked(const Sampling& s, int64_t row) {
  const int32_t penalties = first_of(s.penalty_rows, s.num_penalties, row);
  const int32_t bias = first_of(s.bias_rows, s.num_bias, row);
  return s.masks && s.masks[row] && (penalties == s.num_penalties || s.penalty_rows[penalties] != row) &&
         (bias == s.num_bias || s.bias_rows[bias] != row);
}

// The smallest id of the largest allowed logit, or -1 if that is -infinity. Logits hold no NaN and no +infinity.
static int64_t largest_allowed(const Sampling& s, int64_t row, const float* logits, int vocab) {
  const uint32_t* allowed = s.allowed + size_t(s.masks[row]) * size_t(s.mask_words);
  float best = -kInfinity;
  int at = 0;
  for (int first = 0; first < vocab; first += 32) {
    const uint32_t word = allowed[first / 32];
    if (!word) continue;
    const int count = vocab - first < 32 ? vocab - first : 32;
    float top = -kInfinity;
    for (int i = 0; i < count; ++i) {
      const float value = word >> i & 1 ? logits[first + i] : -kInfinity;
      top = value > top ? value : top;
    }
    if (top > best) best = top, at = first;
  }
  if (best == -kInfinity) return -1;
  while (!(allowed[at / 32] >> at % 32 & 1) || logits[at] != best) ++at;
  return at;
}

// The token of sampling row `row`, or -1. `raw_top` is the largest of the raw logits, NaN if they are not usable.
static int64_t draw_row(const Sampling& s, int64_t row, const float* raw, float raw_top, int vocab, float* z,
                        float* spare) {
  if (s.temperature[row] == 0.0f && is_finite(raw_top) && only_masked(s, row))
    return largest_allowed(s, row, raw, vocab);
  const float* logits = edit(s, row, raw, vocab, z);
  const float top = logits == raw ? raw_top : largest_of(logits, vocab);
  if (!is_finite(top)) return -1;
  if (s.temperature[row] == 0.0f) {
    int64_t first = 0;
    while (logits[first] != top) ++first;
    return first;
  }
  scale_and_filter(s, row, logits, top, vocab, z, spare);
  return noisy_argmax(s, row, z, vocab);
}

static void draw(Crew crew, const float* logits, const int32_t* logit_rows, const Totals* totals, int vocab,
                 const Sampling& s, int64_t* token_ids, float* logprobs, float* scratch) {
  float *z = scratch + size_t(crew.tid) * 2 * vocab, *spare = z + vocab;
  run(crew, s.num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* raw = logits + size_t(logit_rows[r]) * vocab;
      const Totals& total = totals[logit_rows[r]];
      token_ids[r] = draw_row(s, r, raw, total.top, vocab, z, spare);
      logprobs[r] = token_ids[r] < 0 ? kNaN : logprob(raw[token_ids[r]], total);
    }
  });
}

// Into the k best so far by (-value, id), `count` of them; ids come in ascending order. k is small.
static inline void insert(float value, int64_t id, int k, int& count, int64_t* ids, float* best) {
  if (count == k && !(value > best[k - 1])) return;
  int at = count < k ? count++ : k - 1;
  for (; at > 0 && value > best[at - 1]; --at) best[at] = best[at - 1], ids[at] = ids[at - 1];
  best[at] = value;
  ids[at] = id;
}

static void best_of(const float* values, int vocab, int k, int64_t* ids, float* best) {
  int count = 0;
  for (int i = 0; i < vocab; ++i) insert(values[i], i, k, count, ids, best);
}

static void top_k(Crew crew, const float* logits, const int32_t* logit_rows, int num_rows, int vocab, int k,
                  int64_t* token_ids, float* values) {
  run(crew, num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      best_of(logits + size_t(logit_rows[r]) * vocab, vocab, k, token_ids + r * k, values + r * k);
  });
}

// The k best of z plus noise, by (-value, id). A chunk that cannot reach the k-th best so far needs no noise.
static void noisy_best_of(const Sampling& s, int64_t row, const float* z, int vocab, int k, int64_t* ids, float* best) {
  float noise[kChunk];
  int count = 0;
  for (int first = 0; first < vocab; first += kChunk) {
    const int num = vocab - first < kChunk ? vocab - first : kChunk;
    if (count == k && !(largest_of(z + first, num) + kMaxGumbel > best[k - 1])) continue;
    chunk_noise(s, row, first, noise);
    for (int i = 0; i < num; ++i) insert(z[first + i] + noise[i], first + i, k, count, ids, best);
  }
}

static void noisy_top_k(Crew crew, const float* logits, const int32_t* logit_rows, int vocab, const Sampling& s, int k,
                        int64_t* token_ids, float* values, float* logprobs, float* scratch) {
  float *z = scratch + size_t(crew.tid) * 2 * vocab, *spare = z + vocab;
  run(crew, s.num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      int64_t* ids = token_ids + r * k;
      float *noisy = values + r * k, *scaled = logprobs + r * k;
      const float* edited = edit(s, r, logits + size_t(logit_rows[r]) * vocab, vocab, z);
      const float top = largest_of(edited, vocab);
      if (!is_finite(top)) {
        for (int i = 0; i < k; ++i) ids[i] = -1, noisy[i] = scaled[i] = -kInfinity;
        continue;
      }
      float log_sum;
      if (s.temperature[r] == 0.0f) {
        best_of(edited, vocab, k, ids, noisy);
        log_sum = log_total(sum_weights(edited, vocab, top));
        for (int i = 0; i < k; ++i) noisy[i] = scaled[i] = noisy[i] - top;
      } else {
        scale_and_filter(s, r, edited, top, vocab, z, spare);
        noisy_best_of(s, r, z, vocab, k, ids, noisy);
        log_sum = log_total(sum_weights(z, vocab, 0.0f));
        for (int i = 0; i < k; ++i) scaled[i] = z[ids[i]];
      }
      for (int i = 0; i < k; ++i) {
        if (!is_finite(noisy[i])) ids[i] = -1;
        noisy[i] -= log_sum;
        scaled[i] -= log_sum;
      }
    }
  });
}

}  // namespace
}  // namespace vs
