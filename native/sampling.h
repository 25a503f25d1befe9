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

constexpr float kInfinity = __builtin_inff();

static inline bool is_finite(float x) { return x - x == 0.0f; }

static float largest_of(const float* x, int64_t count) {
  float best = x[0];
  for (int64_t i = 1; i < count; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

static bool has_nan(const float* x, int64_t count) {
  bool found = false;
  for (int64_t i = 0; i < count; ++i) found |= x[i] != x[i];
  return found;
}

static float normaliser(const float* logits, int vocab) {
  const float top = largest_of(logits, vocab);
  float lanes[kLanes] = {0};
  int i = 0;
  for (; i + kLanes <= vocab; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += exp_f32(logits[i + l] - top);
  for (int l = 0; i + l < vocab; ++l) lanes[l] += exp_f32(logits[i + l] - top);
  const float total = reduce_lanes(lanes);
  return is_finite(total) ? top + log_f32(total) : __builtin_nanf("");
}

static void normalisers(Crew crew, const float* logits, int num_rows, int vocab, float* out) {
  run(crew, num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) out[r] = normaliser(logits + size_t(r) * vocab, vocab);
  });
}

// Penalties, bias and bans of sampling row `row`.
static void edit(const Sampling& s, int64_t row, const float* logits, int vocab, float* edited) {
  std::memcpy(edited, logits, size_t(vocab) * 4);
  for (int32_t i = 0; i < s.num_penalties; ++i) {
    if (s.penalty_rows[i] != row) continue;
    float& value = edited[s.penalty_ids[i]];
    const float scaled = value > 0 ? value / s.repetition[i] : value * s.repetition[i];
    value = scaled - s.penalty[i];
  }
  for (int32_t i = 0; i < s.num_bias; ++i)
    if (s.bias_rows[i] == row) edited[s.bias_ids[i]] += s.bias[i];
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

static int64_t nucleus(const float* z, int vocab, int64_t keep, float top_p, float* spare) {
  double lanes[kLanes] = {0};
  for (int i = 0; i < vocab; ++i) lanes[i % kLanes] += double(exp_f32(z[i]));
  double total = 0;
  for (int l = 0; l < kLanes; ++l) total += lanes[l];
  const double limit = double(top_p) * total;
  for (int64_t tried = keep < 64 ? keep : 64;; tried = tried * 8 < keep ? tried * 8 : keep) {
    std::memcpy(spare, z, size_t(vocab) * 4);
    select_descending(spare, vocab, tried);
    double before = 0;
    for (int64_t i = 0; i < tried; ++i) {
      if (before >= limit) return i > 1 ? i : 1;
      before += double(exp_f32(spare[i]));
    }
    if (tried == keep) return keep;
  }
}

// z = (l - max) / T with filtered ids at -infinity; at T = 0 only the first maximum stays.
static void scale_and_filter(const Sampling& s, int64_t row, float* z, int vocab, float* spare) {
  const float top = largest_of(z, vocab), temperature = s.temperature[row];
  if (temperature == 0.0f) {
    int first = 0;
    while (first < vocab - 1 && z[first] != top) ++first;
    for (int i = 0; i < vocab; ++i) z[i] = i == first ? 0.0f : -kInfinity;
    return;
  }
  for (int i = 0; i < vocab; ++i) z[i] = (z[i] - top) / temperature;
  int64_t keep = vocab;
  if (s.log_min_p[row] > -kInfinity) {
    keep = 0;
    for (int i = 0; i < vocab; ++i) keep += z[i] >= s.log_min_p[row];
    keep = keep > 1 ? keep : 1;
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

static int64_t draw_row(const Sampling& s, int64_t row, const float* raw, int vocab, float* z, float* spare) {
  edit(s, row, raw, vocab, z);
  const float top = largest_of(z, vocab);
  if (has_nan(z, vocab) || !is_finite(top)) return -1;
  if (s.temperature[row] == 0.0f) {
    int64_t first = 0;
    while (z[first] != top) ++first;
    return first;
  }
  scale_and_filter(s, row, z, vocab, spare);
  return noisy_argmax(s, row, z, vocab);
}

static void draw(Crew crew, const float* logits, const int32_t* logit_rows, const float* row_normalisers, int vocab,
                 const Sampling& s, int64_t* token_ids, float* logprobs, float* scratch) {
  float *z = scratch + size_t(crew.tid) * 2 * vocab, *spare = z + vocab;
  run(crew, s.num_rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* raw = logits + size_t(logit_rows[r]) * vocab;
      const int64_t chosen = draw_row(s, r, raw, vocab, z, spare);
      token_ids[r] = chosen;
      logprobs[r] = raw[chosen < 0 ? 0 : chosen] - row_normalisers[logit_rows[r]];
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
      edit(s, r, logits + size_t(logit_rows[r]) * vocab, vocab, z);
      if (has_nan(z, vocab) || !is_finite(largest_of(z, vocab))) {
        for (int64_t i = r * k; i < (r + 1) * k; ++i) token_ids[i] = -1, values[i] = logprobs[i] = -kInfinity;
        continue;
      }
      if (s.temperature[r] == 0.0f) {
        best_of(z, vocab, k, token_ids + r * k, values + r * k);
      } else {
        scale_and_filter(s, r, z, vocab, spare);
        noisy_best_of(s, r, z, vocab, k, token_ids + r * k, values + r * k);
      }
      const float total = normaliser(z, vocab);
      for (int64_t i = r * k; i < (r + 1) * k; ++i) {
        logprobs[i] = z[token_ids[i]] - total;
        if (!is_finite(values[i])) token_ids[i] = -1;
        values[i] -= total;
      }
    }
  });
}

}  // namespace
}  // namespace vs
